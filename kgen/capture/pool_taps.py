"""Which element of its window each maximum is, in eight bits, for the gradient of a pooling.

Autograd saves the position of each maximum in the image: 64 bits, four times the bytes of the maxima in bfloat16. A window has
few elements, and the number of one within its window says as much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.operators import put_in_place

__all__ = ["BACKWARDS", "shorten_pool_positions"]

aten = torch.ops.aten

BACKWARDS = {aten.max_pool2d_with_indices_backward.default: 2, aten.max_pool3d_with_indices_backward.default: 3}
# Elements of a window that have a number in eight bits.
MOST = 128

_WINDOWS = "int[] size, int[] stride, int[] padding, int[] dilation"
_library = torch.library.Library("kgen", "FRAGMENT")
_library.define(f"pool_taps(Tensor positions, SymInt[] extents, {_WINDOWS}) -> Tensor")
_library.define(f"tapped_pool_backward(Tensor grad, Tensor taps, Tensor x, {_WINDOWS}) -> Tensor")


def _starts(taps: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> list[torch.Tensor]:
    """Where each window starts, for each dimension."""
    rank, starts = len(stride), []
    for n, (step, before) in enumerate(zip(stride, padding, strict=True)):
        along = torch.arange(taps.shape[taps.dim() - rank + n], device=taps.device) * step - before
        starts.append(along.reshape(-1, *(1 for _ in range(rank - n - 1))))
    return starts


def _taps(
    positions: torch.Tensor,
    extents: Sequence[int],
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    number, left = torch.zeros_like(positions), positions
    starts, weight = _starts(positions, stride, padding), 1
    for n in reversed(range(len(size))):
        number = number + (left % extents[n] - starts[n]) // dilation[n] * weight
        left, weight = left // extents[n], weight * size[n]
    return number.to(torch.int8)


def _fake_taps(positions: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(positions, dtype=torch.int8)


def _backward(  # noqa: PLR0913  the operator's arguments
    grad: torch.Tensor,
    taps: torch.Tensor,
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    rank, left = len(size), taps.to(torch.int64)
    starts, positions, weight = _starts(taps, stride, padding), torch.zeros_like(left), 1
    for n in reversed(range(rank)):
        positions = positions + (left % size[n] * dilation[n] + starts[n]) * weight
        left, weight = left // size[n], weight * x.shape[x.dim() - rank + n]
    total = x.new_zeros((*x.shape[:-rank], math.prod(x.shape[-rank:])))
    return total.scatter_add(-1, positions.flatten(-rank), grad.flatten(-rank)).reshape(x.shape)


def _fake_backward(grad: torch.Tensor, taps: torch.Tensor, x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x, dtype=grad.dtype)


for _name, _meaning, _fake in (("pool_taps", _taps, _fake_taps), ("tapped_pool_backward", _backward, _fake_backward)):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _meaning, _key)
    torch.library.register_fake(f"kgen::{_name}", _fake, lib=_library)


def shorten_pool_positions(gm: GraphModule) -> GraphModule:
    """The joint graph, changed in place."""
    for node in list(gm.graph.nodes):
        if node.target in BACKWARDS and (windows := _windows(node, BACKWARDS[node.target])) is not None:
            _replace(gm, node, windows)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    return gm


def _windows(node: Node, rank: int) -> tuple[list[int], ...] | None:
    """Sizes, strides, paddings and dilations of few elements that have numbers."""
    size, stride, padding, dilation = (_each(given, rank) for given in node.args[2:6])
    if not size or not padding or not dilation or math.prod(size) > MOST:
        return None
    return size, stride or size, padding, dilation


def _each(given: Any, rank: int) -> list[int]:
    given = [given] if isinstance(given, int) else list(given or ())
    if not all(type(n) is int for n in given):
        return []
    return given * rank if len(given) == 1 else given


def _replace(gm: GraphModule, node: Node, windows: tuple[list[int], ...]) -> None:
    grad, x, positions = node.args[0], node.args[1], node.args[7]
    assert isinstance(x, Node)
    assert isinstance(positions, Node)
    extents = list(x.meta["val"].shape[-len(windows[0]) :])
    if not all(type(n) is int for n in extents):
        return
    with gm.graph.inserting_after(positions):
        taps = gm.graph.call_function(torch.ops.kgen.pool_taps.default, (positions, extents, *windows))
    with positions.meta["val"].fake_mode:
        taps.meta["val"] = _fake_taps(positions.meta["val"])
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(torch.ops.kgen.tapped_pool_backward.default, (grad, taps, x, *windows))
    put_in_place(new, node)
