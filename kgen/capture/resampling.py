"""Linear resampling whose gradient is one operator.

torch takes it apart before autograd sees it. Its gradient would be that of 2^n gathers: as many tables of float32, to which
additions at computed positions go, and a sum of them. Here autograd sees ``kgen::resample``, which is taken apart below it, and
whose gradient is ``kgen::resample_backward``: aten's own takes no symbol for a number of images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kgen.capture.operators import put_in_place

__all__ = ["RESAMPLE", "RESAMPLERS", "keep_resampling_whole", "taken_apart"]

aten = torch.ops.aten

RESAMPLERS: frozenset[Any] = frozenset({torch.nn.functional.interpolate, torch.nn.functional.upsample})
MODES = {"linear": 1, "bilinear": 2, "trilinear": 3}
FORWARD = {1: aten.upsample_linear1d.default, 2: aten.upsample_bilinear2d.default, 3: aten.upsample_trilinear3d.default}
BACKWARD = {
    1: aten.upsample_linear1d_backward.default,
    2: aten.upsample_bilinear2d_backward.default,
    3: aten.upsample_trilinear3d_backward.default,
}

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("resample(Tensor x, int[] size, bool align_corners, float[] scales) -> Tensor")
_library.define("resample_backward(Tensor grad, int[] extents, bool align_corners, float[] scales) -> Tensor")
RESAMPLE = torch.ops.kgen.resample.default


def taken_apart(x: torch.Tensor, size: Sequence[int], align_corners: bool, scales: Sequence[float]) -> torch.Tensor:
    """A scale of 0 stands for none given: the sizes say what it is."""
    return FORWARD[len(size)](x, size, align_corners, *_given(scales))


def _given(scales: Sequence[float]) -> list[float | None]:
    return [scale or None for scale in scales]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, size, ctx.align_corners, ctx.scales = inputs
    ctx.extents = list(x.shape[-len(size) :])


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return torch.ops.kgen.resample_backward(grad, ctx.extents, ctx.align_corners, ctx.scales), None, None, None


def _backward(grad: torch.Tensor, extents: Sequence[int], align_corners: bool, scales: Sequence[float]) -> torch.Tensor:
    shape, rank = [*grad.shape[: -len(extents)], *extents], len(extents)
    made: torch.Tensor = BACKWARD[rank](grad, grad.shape[-rank:], shape, align_corners, *_given(scales))
    return made


def _fake_backward(grad: torch.Tensor, extents: Sequence[int], *_: Any) -> torch.Tensor:
    layout = torch._prims_common.suggest_memory_format(grad)
    return torch.empty((*grad.shape[: -len(extents)], *extents), dtype=grad.dtype, device=grad.device, memory_format=layout)


_library.impl("resample", taken_apart, "CompositeExplicitAutograd")
for _key in ("CPU", "CUDA"):
    _library.impl("resample_backward", _backward, _key)
torch.library.register_fake("kgen::resample_backward", _fake_backward, lib=_library)
torch.library.register_autograd("kgen::resample", _gradient, setup_context=_save, lib=_library)


def keep_resampling_whole(gm: GraphModule, drop: bool) -> None:
    """Replaces linear resampling of known sizes, in place; `drop` says whether one that keeps all sizes is a copy, also where
    0 times an infinity would be NaN."""
    if any("functorch" in getattr(node.target, "__module__", "") for node in gm.graph.nodes):
        return  # its transforms have no rule for the operator
    changed = False
    for node in list(gm.graph.nodes):
        if node.target in RESAMPLERS and (call := _call(node, *node.args, **node.kwargs)) is not None:
            _replace(gm, node, call, drop)
            changed = True
    if changed:
        gm.graph.lint()
        gm.recompile()


def _call(  # noqa: PLR0913  torch's arguments
    node: Node,
    input: Any,  # noqa: A002  torch's name
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> tuple[Any, ...] | None:
    """The arguments of ``kgen::resample``."""
    rank, made = MODES.get(mode), node.meta.get("example_value")
    given = input.meta.get("example_value") if isinstance(input, Node) else None
    if rank is None or antialias or not isinstance(made, torch.Tensor) or not isinstance(given, torch.Tensor):
        return None
    sizes = (*given.shape[2:], *made.shape[2:])
    plain = given.is_floating_point() and given.dtype is made.dtype and not is_traceable_wrapper_subclass(given)
    if not plain or len(sizes) != 2 * rank or not all(type(n) is int for n in sizes):
        return None
    scales = [0.0] * rank
    if size is None and not recompute_scale_factor:
        scales = list(scale_factor) if isinstance(scale_factor, list | tuple) else [scale_factor] * rank
        if len(scales) != rank or not all(type(scale) in (int, float) for scale in scales):
            return None
    return input, list(sizes[rank:]), bool(align_corners), [float(scale) for scale in scales]


def _replace(gm: GraphModule, node: Node, call: tuple[Any, ...], drop: bool) -> None:
    x, size, align_corners, scales = call
    made = node.meta["example_value"]
    same = list(x.meta["example_value"].shape[2:]) == size and (align_corners or all(scale in (0.0, 1.0) for scale in scales))
    layout = _layout(made)
    with gm.graph.inserting_before(node):
        if drop and same and layout is not None:
            new = gm.graph.call_function(torch.clone, (x,), {"memory_format": layout})
        else:
            new = gm.graph.call_function(RESAMPLE, call)
    put_in_place(new, node)


def _layout(x: torch.Tensor) -> torch.memory_format | None:
    if x.is_contiguous():
        return torch.contiguous_format
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return last if last is not None and x.is_contiguous(memory_format=last) else None
