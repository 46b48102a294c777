"""Which operators AOTAutograd takes apart while tracing, nearly all with torch's own decompositions.

The table is torch's core set plus what else turns into pointwise, reductions and views, minus the operators that kgen lowers
itself: there a decomposition would hide structure (a contraction, a sort) or do more work (a pooling made of gathers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import _core_aten_decompositions_post_autograd as core_decompositions
from torch._decomp import get_decompositions
from torch._decomp.decompositions import pw_cast_for_opmath

from kgen.capture.resampling import RESAMPLE, taken_apart

aten = torch.ops.aten

# Taken apart although not in torch's core set: each becomes work that fuses with its neighbours.
EXTRA: tuple[Any, ...] = (
    aten._adaptive_avg_pool2d_backward,
    aten._batch_norm_no_update,
    aten._batch_norm_with_update,
    aten._batch_norm_with_update_functional,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_functional,
    aten._native_batch_norm_legit_no_training,
    aten._log_softmax,
    aten._softmax,
    aten.addmv,
    aten.avg_pool2d_backward,
    aten.batch_norm_backward,
    aten.cudnn_batch_norm,
    aten.cudnn_batch_norm_backward,
    aten.elu,
    aten.expand_copy,
    aten.grid_sampler_2d,
    aten.hardtanh,
    aten.index_select,
    aten.instance_norm,
    aten.leaky_relu,
    aten.linear_backward,
    aten.log_sigmoid_forward,
    aten.native_batch_norm,
    aten.native_layer_norm,
    aten.normal.Tensor_Tensor,
    aten.normal.Tensor_float,
    aten.normal.float_Tensor,
    aten.nll_loss2d_forward,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.silu,
    aten.split_with_sizes,
    aten.upsample_bicubic2d,
    aten.upsample_bilinear2d,
    aten.upsample_linear1d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten.upsample_trilinear3d,
)

# Lowered by kgen itself, or an extern on purpose.
NATIVE: tuple[Any, ...] = (
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten.addmm,
    aten.baddbmm,
    aten.bmm,
    aten.col2im,
    aten.convolution,
    aten.convolution_backward,
    aten.embedding,
    aten.embedding_dense_backward,
    aten.gelu,
    aten.gelu_backward,
    # torch 2.11's decomposition writes into memory that it has just made, which AOTAutograd then refuses
    aten.index_fill.int_Scalar,
    aten.index_fill.int_Tensor,
    aten.logsumexp,
    aten.max_pool2d_with_indices,
    aten.mm,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.unfold_backward,
    # torch's core table has these, but as sums over a scatter of ones or gathers per window
    aten.avg_pool2d_backward,
    aten.sum.default,
    aten.sum.dim_IntList,
    # one select each instead of an index computation for the whole tensor
    aten.select_scatter,
    aten.slice_scatter,
    # a deviation does not overflow where its square does
    aten.std,
    aten.std_mean,
    # a view of a concatenation would hide that its parts are read at one place
    aten.stack,
)


def _huber_loss(x: torch.Tensor, target: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
    """Eager's result has the type of `x`; torch's decomposition promotes."""
    loss = core_decompositions()[aten.huber_loss.default](x, target, reduction, delta)
    return loss.to(x.dtype)


def _smooth_l1_loss_backward(
    grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int, beta: float
) -> torch.Tensor:
    """NaN stays, as in eager: torch's decomposition takes its sign, which is 0."""
    gap, scaled = x - target, grad / x.numel() if reduction == 1 else grad
    return torch.where(gap.abs() >= beta, scaled * gap.sign(), scaled * gap / beta)


def _native_dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Chances have 24 bits whatever the type of `x`, as in eager: torch's decomposition draws them in that type, where a rate
    of 1% of bfloat16 comes out as 1.6%, and one of .1% as .8%."""
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    kept = torch.rand_like(x, dtype=wide) >= p
    return x * kept * (1 / (1 - p)), kept


def _native_group_norm(  # noqa: PLR0913  aten's arguments
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics and one elementwise step. The operator's own result would be saved for the gradient of an activation behind
    it. torch's decomposition copies tensors with channels last."""
    wide = x.to(torch.float32) if x.dtype.itemsize == 2 else x
    grouped = wide.reshape(n, group, c // group, *x.shape[2:])
    variance, mean = torch.var_mean(grouped, list(range(2, grouped.dim())), correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    out = ((grouped - mean) * scale).reshape(x.shape)
    channels = (1, c, *(1 for _ in x.shape[2:]))
    out = out if weight is None else out * weight.reshape(channels)
    out = out if bias is None else out + bias.reshape(channels)
    mean, scale = (one.reshape(n, group).to(x.dtype) for one in (mean, scale))
    return out.to(x.dtype), mean, scale


def _native_group_norm_backward(  # noqa: PLR0913  aten's arguments
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    wanted: list[bool],
) -> tuple[torch.Tensor | None, ...]:
    """With y = (x - mean) * rstd * weight: sums over each channel of an image, then one elementwise step. Images keep their
    shape, so that layouts can be chosen for them."""
    wide = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    dy_wide, x_wide, mean, rstd = (one.to(wide) for one in (dy, x, mean, rstd))
    weights = torch.ones(c, dtype=wide, device=x.device) if weight is None else weight.to(wide)
    each, per = (n, group, c // group), [*range(2, x.dim())]
    moments, sums = (one.sum(per).reshape(each) if per else one.reshape(each) for one in (dy_wide * x_wide, dy_wide))
    dx = dweight = dbias = None
    if wanted[0]:
        grouped = weights.reshape(1, group, c // group)
        number = c // group * hxw
        of_x = ((sums * grouped).sum(2) * mean - (moments * grouped).sum(2)) * rstd**3 / number
        rest = -of_x * mean - (sums * grouped).sum(2) * rstd / number
        spread = (n, c, *(1 for _ in per))
        scale, of_x, rest = (
            one.expand(each).reshape(spread) for one in (rstd[..., None] * grouped, of_x[..., None], rest[..., None])
        )
        dx = (dy_wide * scale + x_wide * of_x + rest).to(x.dtype)
    if wanted[1]:
        dweight = ((moments - sums * mean[..., None]) * rstd[..., None]).sum(0).reshape(c).to(x.dtype)
    if wanted[2]:
        dbias = sums.sum(0).reshape(c).to(x.dtype)
    return dx, dweight, dbias


def _overloads(ops: tuple[Any, ...]) -> list[Any]:
    found: list[Any] = []
    for op in ops:
        packet = isinstance(op, torch._ops.OpOverloadPacket)
        found.extend(getattr(op, name) for name in op.overloads()) if packet else found.append(op)
    return found


# Operator overload -> decomposition, as AOTAutograd takes it. The operators of quantisation are in `kgen.capture.quantised`.
TABLE: dict[Any, Callable[..., Any]] = {
    **core_decompositions(), **get_decompositions(EXTRA), aten.huber_loss.default: _huber_loss,
    aten.native_dropout.default: _native_dropout, RESAMPLE: taken_apart,
    aten.smooth_l1_loss_backward.default: pw_cast_for_opmath(_smooth_l1_loss_backward),
}  # fmt: skip


for _native in _overloads(NATIVE):
    TABLE.pop(_native, None)

# Taken apart after layouts are chosen: torch's own takes images for matrices, which have none.
GRADIENTS: dict[Any, Callable[..., Any]] = {aten.native_group_norm_backward.default: _native_group_norm_backward}
# And in joint graphs, where a backward pass may compute the last step again.
TRAINED: dict[Any, Callable[..., Any]] = {aten.native_group_norm.default: _native_group_norm, **GRADIENTS}
