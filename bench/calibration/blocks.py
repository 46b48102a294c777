"""The functions of the calibration set: a few operators with their real neighbours, as models spell them. Those of a backward
compute what autograd would, from what a forward has saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
aten = torch.ops.aten


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gradients(fn: Function, inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Of pointwise work and norms, whose forward is computed again from what was saved."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in inputs]
        return torch.autograd.grad(fn(*leaves), leaves, dy)


# ---- matmuls --------------------------------------------------------------------------------------------------------


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def linear_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def linear_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, b)


def linear_residual_no_bias(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w)


def linear_scaled_residual(x: Tensor, w: Tensor, b: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """With a layer scale."""
    return r + g * F.linear(x, w, b)


def linear_residual_norm(x: Tensor, w: Tensor, b: Tensor, r: Tensor, g: Tensor, c: Tensor) -> Tensor:
    return F.layer_norm(r + F.linear(x, w, b), (r.shape[-1],), g, c)


def linear_act(x: Tensor, w: Tensor, b: Tensor, act: Function) -> Tensor:
    return act(F.linear(x, w, b))


def linear_act_no_bias(x: Tensor, w: Tensor, act: Function) -> Tensor:
    return act(F.linear(x, w))


def conv1d_of_gpt2(b: Tensor, x: Tensor, w: Tensor, act: Function | None = None) -> Tensor:
    """GPT-2's linear layer, whose matrix is stored input by output."""
    y = torch.addmm(b, x, w)
    return y if act is None else act(y)


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, act: Function) -> Tensor:
    return F.linear(act(F.linear(x, w, b)), v, c)


def norm_mlp(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, act: Function) -> Tensor:
    """The second half of a pre-norm block."""
    return x + mlp(F.layer_norm(x, (x.shape[-1],), g, h), w, b, v, c, act)


def norm_linear(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (x.shape[-1],), g, h), w, b)


def rms_linear(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (x.shape[-1],), g), w)


def swiglu_in(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(F.linear(x, w)) * F.linear(x, v)


def geglu_in(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return gelu_tanh(F.linear(x, w)) * F.linear(x, v)


def geglu_fused(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    h, gate = F.linear(x, w, b).chunk(2, -1)
    return h * F.gelu(gate)


def swiglu_out(gate: Tensor, up: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(F.silu(gate) * up, w)


def swiglu_mlp(x: Tensor, g: Tensor, w: Tensor, v: Tensor, out: Tensor) -> Tensor:
    h = F.rms_norm(x, (x.shape[-1],), g)
    return x + F.linear(F.silu(F.linear(h, w)) * F.linear(h, v), out)


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-3, -2)


def qkv_fused(x: Tensor, w: Tensor, b: Tensor, heads: int) -> tuple[Tensor, ...]:
    """One matmul for the three, split and turned to heads in memory."""
    return tuple(heads_of(one, heads).contiguous() for one in F.linear(x, w, b).chunk(3, -1))


def qkv_apart(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, wq), F.linear(x, wk), F.linear(x, wv)


def qkv_bias(x: Tensor, wq: Tensor, bq: Tensor, wk: Tensor, bk: Tensor, wv: Tensor, bv: Tensor) -> tuple[Tensor, ...]:
    return F.linear(x, wq, bq), F.linear(x, wk, bk), F.linear(x, wv, bv)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def qk_rotary(x: Tensor, wq: Tensor, wk: Tensor, cos: Tensor, sin: Tensor, head: int) -> tuple[Tensor, Tensor]:
    q, k = (F.linear(x, w).unflatten(-1, (-1, head)).transpose(-3, -2) for w in (wq, wk))
    return rotated(q, cos, sin), rotated(k, cos, sin)


def merged_linear_residual(o: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """Attention's output, its heads brought together, through a linear layer."""
    return r + F.linear(o.transpose(-3, -2).flatten(-2), w, b)


def merged_linear(o: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(o.transpose(-3, -2).flatten(-2), w)


def logits_loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def expert_mlp(x: Tensor, w: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """Tokens already sorted by expert: x is experts x tokens x width."""
    return torch.bmm(F.silu(torch.bmm(x, w)) * torch.bmm(x, v), out)


def expert_in(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.silu(torch.bmm(x, w)) * torch.bmm(x, v)


def expert_out(h: Tensor, out: Tensor, scale: Tensor) -> Tensor:
    return torch.bmm(h, out) * scale.unsqueeze(-1)


def gathered_expert(x: Tensor, w: Tensor, chosen: Tensor) -> Tensor:
    """The weights of each token's own expert."""
    return torch.bmm(x.unsqueeze(1), w[chosen]).squeeze(1)


def router(x: Tensor, w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    weights, chosen = F.linear(x, w).float().softmax(-1).topk(top, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def router_sigmoid(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.linear(x, w).float().sigmoid()
    return scores, (scores + b).argmax(-1)


# ---- backward of matmuls -------------------------------------------------------------------------------------------


def linear_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    dy, x = dy.flatten(0, -2), x.flatten(0, -2)
    return dy @ w, dy.t() @ x, dy.sum(0)


def input_gradient(dy: Tensor, w: Tensor) -> Tensor:
    return dy @ w


def input_gradient_residual(dy: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + dy @ w


def weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).t() @ x.flatten(0, -2)


def weight_bias_gradient(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    dy = dy.flatten(0, -2)
    return dy.t() @ x.flatten(0, -2), dy.sum(0)


def act_input_gradient(dy: Tensor, w: Tensor, h: Tensor, act: Function) -> Tensor:
    """Through the second layer of an MLP and its activation, whose argument was saved."""
    return gradients(act, (h,), dy @ w)[0]


def act_weight_gradient(dh: Tensor, h: Tensor, x: Tensor, act: Function) -> tuple[Tensor, Tensor]:
    d = gradients(act, (h,), dh)[0].flatten(0, -2)
    return d.t() @ x.flatten(0, -2), d.sum(0)


def mlp_backward(dy: Tensor, x: Tensor, h: Tensor, w: Tensor, v: Tensor, act: Function) -> tuple[Tensor, ...]:
    """All gradients of `mlp`, the first layer's results saved."""
    dh = gradients(act, (h,), dy @ v)[0]
    return dh @ w, dh.t() @ x, dh.sum(0), dy.t() @ act(h), dy.sum(0)


def mlp_backward_of_rows(dy: Tensor, x: Tensor, h: Tensor, w: Tensor, v: Tensor, act: Function) -> tuple[Tensor, ...]:
    """The same over the last dimension of tensors with more."""
    dy, x, h = dy.flatten(0, -2), x.flatten(0, -2), h.flatten(0, -2)
    return mlp_backward(dy, x, h, w, v, act)


def swiglu_backward(dy: Tensor, out: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    """Through the second layer of a SwiGLU MLP to the results of the first."""
    return gradients(lambda g, u: F.silu(g) * u, (gate, up), dy @ out)


def swiglu_input_gradient(dgate: Tensor, dup: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return dgate @ w + dup @ v


def swiglu_weight_gradient(dy: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return dy.t() @ (F.silu(gate) * up)


def expert_weight_gradient(x: Tensor, dh: Tensor) -> Tensor:
    return x.transpose(1, 2) @ dh


def expert_input_gradient(dh: Tensor, w: Tensor) -> Tensor:
    return dh @ w.transpose(1, 2)


def norm_input_gradient(dy: Tensor, w: Tensor, x: Tensor, g: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """Through a linear layer and the layer norm in front of it."""
    return gradients(lambda x, g, h: F.layer_norm(x, (x.shape[-1],), g, h), (x, g, h), dy @ w)


def rms_input_gradient(dy: Tensor, w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return gradients(lambda x, g: F.rms_norm(x, (x.shape[-1],), g), (x, g), dy @ w)


# ---- attention, as plain operators -----------------------------------------------------------------------------------


def scores_softmax(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1)


def scores_softmax_float(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).float().softmax(-1).to(q.dtype)


def scores_masked_softmax(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)


def scores_causal_softmax(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    rows, columns = torch.arange(q.shape[-2], device=q.device), torch.arange(k.shape[-2], device=q.device)
    return scores.masked_fill(columns > rows[:, None], torch.finfo(scores.dtype).min).softmax(-1)


def scores_bias_softmax(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """T5: a position bias and no scale."""
    return (q @ k.transpose(-2, -1) + bias).float().softmax(-1).to(q.dtype)


def values(p: Tensor, v: Tensor) -> Tensor:
    return p @ v


def values_merged(p: Tensor, v: Tensor) -> Tensor:
    return (p @ v).transpose(-3, -2).flatten(-2)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_softmax(q, k) @ v


def attention_masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return scores_masked_softmax(q, k, mask) @ v


def attention_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_causal_softmax(q, k) @ v


def attention_decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token of each sequence: q is batch x groups x heads of a group x width."""
    return scores_softmax_float(q, k) @ v


def attention_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    dp = do @ v.transpose(-2, -1)
    ds = aten._softmax_backward_data(dp, p, -1, p.dtype) * q.shape[-1] ** -0.5
    return ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ do


def scores_backward(do: Tensor, v: Tensor, p: Tensor) -> Tensor:
    """To the scores, the softmax saved."""
    return aten._softmax_backward_data(do @ v.transpose(-2, -1), p, -1, p.dtype) * v.shape[-1] ** -0.5


def qk_gradient(ds: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return ds @ k, ds.transpose(-2, -1) @ q


def v_gradient(p: Tensor, do: Tensor) -> Tensor:
    return p.transpose(-2, -1) @ do


# ---- convolutions ----------------------------------------------------------------------------------------------------


def conv(x: Tensor, w: Tensor, b: Tensor | None = None, **how: Any) -> Tensor:
    return F.conv2d(x, w, b, **how)


def conv_act(x: Tensor, w: Tensor, b: Tensor, act: Function, **how: Any) -> Tensor:
    """Its batch norm folded into weight and bias."""
    return act(F.conv2d(x, w, b, **how))


def conv_act_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor, act: Function, **how: Any) -> Tensor:
    return act(r + F.conv2d(x, w, b, **how))


def conv_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor, **how: Any) -> Tensor:
    return r + F.conv2d(x, w, b, **how)


def normed(x: Tensor, m: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.batch_norm(x, m, v, g, b)


def conv_bn_act(x: Tensor, w: Tensor, m: Tensor, v: Tensor, g: Tensor, b: Tensor, act: Function, **how: Any) -> Tensor:
    return act(normed(F.conv2d(x, w, **how), m, v, g, b))


def conv_bn_residual(
    x: Tensor, w: Tensor, m: Tensor, v: Tensor, g: Tensor, b: Tensor, r: Tensor, act: Function, **how: Any
) -> Tensor:
    return act(r + normed(F.conv2d(x, w, **how), m, v, g, b))


def bn_act_conv(x: Tensor, m: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, act: Function, **how: Any) -> Tensor:
    """What a convolution's own prologue would be: the norm and the activation of the one before."""
    return F.conv2d(act(normed(x, m, v, g, b)), w, **how)


def conv_statistics(x: Tensor, w: Tensor, **how: Any) -> tuple[Tensor, ...]:
    """In training: the results and what the batch norm needs of them."""
    y = F.conv2d(x, w, **how)
    return (y, *torch.var_mean(y.float(), (0, 2, 3), correction=0))


def scaled_conv(x: Tensor, s: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    """Squeeze and excite in front of a projection, and its residual."""
    return r + F.conv2d(x * s.sigmoid(), w, b)


def squeeze(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


def squeeze_excite(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, act: Function) -> Tensor:
    s = act(F.conv2d(x.mean((2, 3), keepdim=True), w, b))
    return x * F.hardsigmoid(F.conv2d(s, v, c))


def group_norm_silu_conv(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor, groups: int) -> Tensor:
    return F.conv2d(F.silu(F.group_norm(x, groups, g, h)), w, b, padding=1)


def conv_plus_embedding(x: Tensor, w: Tensor, b: Tensor, e: Tensor) -> Tensor:
    """A residual block of a diffusion U-Net adds the time embedding to each channel."""
    return F.conv2d(x, w, b, padding=1) + e[:, :, None, None]


def upsample_conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), w, b, padding=1)


def cat_conv(x: Tensor, skip: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A shortcut of 1x1 over two images side by side."""
    return F.conv2d(torch.cat((x, skip), 1), w, b)


def depthwise_norm(x: Tensor, w: Tensor, b: Tensor, g: Tensor, h: Tensor, padding: int) -> Tensor:
    """The first half of a ConvNeXt block, its channels last for the norm."""
    y = F.conv2d(x, w, b, padding=padding, groups=x.shape[1]).permute(0, 2, 3, 1)
    return F.layer_norm(y, (y.shape[-1],), g, h)


def convnext_mlp(y: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, g: Tensor, r: Tensor) -> Tensor:
    """The second half: an MLP over channels, a layer scale and the residual."""
    return r + (g * mlp(y, w, b, v, c, gelu)).permute(0, 3, 1, 2)


def depthwise_act(x: Tensor, w: Tensor, b: Tensor, act: Function, stride: int, padding: int) -> Tensor:
    return act(F.conv2d(x, w, b, stride=stride, padding=padding, groups=x.shape[1]))


def channels_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """ConvNeXt's layer norm of channels, in front of a patch of 2x2."""
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), g, b).permute(0, 3, 1, 2)


def patches(x: Tensor, w: Tensor, b: Tensor, patch: int) -> Tensor:
    """A convolution whose windows do not overlap, and its results as tokens."""
    return F.conv2d(x, w, b, stride=patch).flatten(2).transpose(1, 2)


def patches_of_norm(x: Tensor, g: Tensor, h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.conv2d(channels_norm(x, g, h), w, b, stride=2)


# ---- backward of convolutions ----------------------------------------------------------------------------------------


def conv_backward(
    dy: Tensor, x: Tensor, w: Tensor, stride: int = 1, padding: int = 0, groups: int = 1, bias: bool = False
) -> tuple[Tensor, ...]:
    sizes = [w.shape[0]] if bias else None
    mask = [True, True, bias]
    found = aten.convolution_backward(
        dy, x, w, sizes, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups, mask
    )  # fmt: skip
    return tuple(one for one in found if one is not None)


def conv_input_gradient(dy: Tensor, x: Tensor, w: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    mask = [True, False, False]
    return aten.convolution_backward(dy, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)[0]


def conv_weight_gradient(dy: Tensor, x: Tensor, w: Tensor, stride: int = 1, padding: int = 0) -> Tensor:
    mask = [False, True, False]
    return aten.convolution_backward(dy, x, w, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, mask)[1]


def norm_act(y: Tensor, g: Tensor, b: Tensor, act: Function) -> Tensor:
    return act(F.batch_norm(y, None, None, g, b, training=True))


def norm_act_backward(dz: Tensor, y: Tensor, g: Tensor, b: Tensor, act: Function) -> tuple[Tensor, ...]:
    """Through an activation and a batch norm in training, the convolution's result saved."""
    return gradients(partial(norm_act, act=act), (y, g, b), dz)


def norm_conv_backward(
    dz: Tensor, y: Tensor, g: Tensor, b: Tensor, x: Tensor, w: Tensor, act: Function, stride: int = 1, padding: int = 0
) -> tuple[Tensor, ...]:
    """The step of a bottleneck's backward: activation, norm, and both gradients of the convolution."""
    dy, dg, db = gradients(partial(norm_act, act=act), (y, g, b), dz)
    return (*conv_backward(dy, x, w, stride, padding), dg, db)


def conv_between_norms_backward(
    dz: Tensor, z: Tensor, g: Tensor, sums: Tensor, x: Tensor, w: Tensor, y: Tensor, mean: Tensor, r: Tensor | None = None
) -> tuple[Tensor, ...]:
    """From one norm's backward to the next one's sums: what the first subtracts of `dz`, its results `z` centred, the
    convolution's gradients, the activation of `x` before it, and both sums of the norm of `y` that made that."""

    def each(v: Tensor) -> Tensor:
        return v[:, None, None]

    dy = ((dz.float() - each(sums * 1e-4) - z.float() * each(sums * 1e-3)) * each(g.float())).to(dz.dtype)
    dx, dw = conv_backward(dy, x, w)
    dh = torch.where(x <= 0, 0, dx if r is None else dx + r)
    return dh, dw, dh.float().sum((0, 2, 3)), (dh.float() * (y.float() - each(mean))).sum((0, 2, 3))


# ---- norms, reductions, pointwise work -------------------------------------------------------------------------------


def residual_layer_norm(x: Tensor, r: Tensor, g: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = x + r
    return y, F.layer_norm(y, (y.shape[-1],), g, b)


def layer_norm(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), g, b)


def layer_norm_backward(dy: Tensor, x: Tensor, g: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    dx, dg, db = gradients(lambda x, g, b: F.layer_norm(x, (x.shape[-1],), g, b), (x, g, b), dy)
    return dx + r, dg, db


def rms_norm(x: Tensor, g: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), g)


def residual_rms_norm(x: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = x + r
    return y, F.rms_norm(y, (y.shape[-1],), g)


def rms_norm_backward(dy: Tensor, x: Tensor, g: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    dx, dg = gradients(lambda x, g: F.rms_norm(x, (x.shape[-1],), g), (x, g), dy)
    return dx + r, dg


def group_norm_silu(x: Tensor, g: Tensor, b: Tensor, groups: int) -> Tensor:
    return F.silu(F.group_norm(x, groups, g, b))


def group_norm_silu_backward(dy: Tensor, x: Tensor, g: Tensor, b: Tensor, groups: int) -> tuple[Tensor, ...]:
    return gradients(partial(group_norm_silu, groups=groups), (x, g, b), dy)


def cat_group_norm_silu(x: Tensor, skip: Tensor, g: Tensor, b: Tensor, groups: int) -> Tensor:
    return group_norm_silu(torch.cat((x, skip), 1), g, b, groups)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotated(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_grad(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return gradients(swiglu, (gate, up), dy)


def embedding_sum(words: Tensor, token: Tensor, positions: Tensor) -> Tensor:
    return F.embedding(token, words) + positions


def embedding_norm(words: Tensor, token: Tensor, positions: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return layer_norm(F.embedding(token, words) + positions, g, b)


def embedding_backward(dy: Tensor, token: Tensor, rows: int) -> Tensor:
    return aten.embedding_dense_backward(dy, token, rows, -1, False)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), target)


def cross_entropy_backward(logits: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        return torch.autograd.grad(F.cross_entropy(leaf.float(), target), leaf)


def max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def pooled_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.mean((2, 3)), w, b)


def add_relu(x: Tensor, r: Tensor) -> Tensor:
    return F.relu(x + r)


# ---- one dimension, and states ---------------------------------------------------------------------------------------


def causal_conv1d_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Mamba's: four taps of each channel."""
    return F.silu(F.conv1d(x, w, b, padding=w.shape[-1] - 1, groups=x.shape[1])[..., : x.shape[-1]])


def causal_conv1d_step(state: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """One token of it: the state moves by one."""
    state = torch.cat((state[..., 1:], x.unsqueeze(-1)), -1)
    return state, F.silu((state * w).sum(-1) + b)


def conv1d_gelu(x: Tensor, w: Tensor, b: Tensor, stride: int) -> Tensor:
    """Whisper's: over a spectrogram."""
    return F.gelu(F.conv1d(x, w, b, stride=stride, padding=1))


def conv1d_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Of Whisper's second one."""
    found = aten.convolution_backward(dy, x, w, [w.shape[0]], [2], [1], [1], False, [0], 1, [True, True, True])
    return tuple(found)


def causal_conv1d_silu_backward(dy: Tensor, x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    return gradients(causal_conv1d_silu, (x, w, b), dy)


def time_step_weight_gradient(dy: Tensor, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    d = gradients(F.softplus, (h,), dy)[0]
    return d.t() @ x, d.sum(0)


def time_step(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.softplus(F.linear(x, w, b))


def state_step(h: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """One token of a selective scan: state is batch x channels x states."""
    h = h * torch.exp(dt[..., None] * -torch.exp(a)) + (dt * x)[..., None] * b[:, None]
    return h, (h * c[:, None]).sum(-1) * F.silu(z)


def gated_linear(y: Tensor, z: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(y * F.silu(z), w)


def chunk_scores(b: Tensor, c: Tensor, decay: Tensor) -> Tensor:
    """Mamba-2: within a chunk, c b^T with a decay from each position to the next, below the diagonal."""
    length = decay.shape[-1]
    sums = decay.cumsum(-1)
    apart = (sums[..., :, None] - sums[..., None, :]).masked_fill(
        torch.ones(length, length, dtype=torch.bool, device=decay.device).triu(1), -1e4
    )
    return c @ b.transpose(-2, -1) * apart.exp().to(b.dtype)
