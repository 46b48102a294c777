"""oneDNN's calls that compute a convolution together with what one node makes of it: an activation, or a sum with a tensor of
the same size.

As in `lowering/fused_calls.py`, a node has such a form if its value is the one that the rules of the operators build. Relus and
other functions that clamp are left out: oneDNN makes zeros of NaNs there, and hides that a network has diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.lowering.builder import Builder
from kgen.lowering.pointwise import add, clamp, div, formula, mul, to_copy
from kgen.lowering.tensor import Tensor

aten = torch.ops.aten
# torch's call for a sum raises an error for images along one axis; that for an activation takes them.
_SUMMED_RANKS = (4, 5)
_REASON = "the library's call for both"
Rule = Callable[[Builder, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """The arguments of a convolution's call: its operands, then its numbers. `element` is one of the result."""

    element: vs.Value
    operands: tuple[Any, Any, Any]
    padding: Any
    stride: Any
    dilation: Any
    groups: Any


def fused_convolution(b: Builder, node: ir.Contraction, reader: ir.Pointwise) -> ir.Extern | None:
    """The one call for a convolution and its only reader."""
    call, result = node.vendor, b.graph.buffers[node.out]
    if call is None or call.target is not aten.convolution.default or not _has_points((*node.out_vars, *node.reduced)):
        return None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = call.args
    if transposed or result.device.type != "cpu" or not _computes(result.dtype) or not ir.is_row(b.graph, bias):
        return None
    element = vs.load(node.out, (v.expr() for v in reader.vars), result.dtype)
    alone = Tensor(result.sizes, result.dtype, result.device, element)
    each = [(bias, alone), *(_with_bias(b, alone, reader) if bias is None else ())]
    calls = (
        call
        for added, whole in each
        for call in _matching(b, whole, reader, Shape(element, (x, weight, added), padding, stride, dilation, groups))
    )
    found = next(calls, None)
    return None if found is None else ir.Extern((reader.out,), *found, reason=_REASON)


def _with_bias(b: Builder, alone: Tensor, reader: ir.Pointwise) -> Iterator[tuple[ir.TensorArg, Tensor]]:
    """The convolution's result with a number for each channel that its reader adds first."""
    channel = reader.vars[1]
    for load in vs.loads([reader.value]):
        name, index, dtype = load.attr
        if index == (channel.expr(),) and dtype == alone.dtype and b.graph.buffers[name].sizes == (channel.extent,):
            bias = ir.TensorArg(name, (channel,), index, dtype)
            if ir.is_row(b.graph, bias):
                yield bias, add(b, alone, Tensor(alone.sizes, alone.dtype, alone.device, load))


Call = tuple[Any, tuple[Any, ...]]


def _matching(b: Builder, whole: Tensor, reader: ir.Pointwise, shape: Shape) -> Iterator[Call]:
    for name, rule in _ACTIVATIONS:
        if any(one.value is reader.value for one in _forms(b, rule, whole)):
            yield _with_activation(shape, name)
    if whole.dtype is not torch.float32:
        return  # where oneDNN declines a sum, torch adds on its own
    if len(whole.sizes) not in _SUMMED_RANKS:
        return
    for other in _others(b, shape.element, whole.dtype, reader):
        tensor = Tensor(whole.sizes, whole.dtype, whole.device, other)
        if any(one.value is reader.value for one in (add(b, whole, tensor), add(b, tensor, whole))):
            yield _with_sum(shape, ir.TensorArg(other.attr[0], reader.vars, other.attr[1], whole.dtype))


def _forms(b: Builder, rule: Rule, whole: Tensor) -> Iterator[Tensor]:
    """What an activation makes of a result: in its type, or, as decompositions do, in float32 between two conversions."""
    yield rule(b, whole)
    if whole.dtype in ops.NARROW_FLOATS and b.numerics != "eager":  # the one call does not round in between
        yield to_copy(b, rule(b, to_copy(b, whole, dtype=torch.float32)), dtype=whole.dtype)


def _others(b: Builder, result: vs.Value, kind: torch.dtype, reader: ir.Pointwise) -> Iterator[vs.Value]:
    """Whole tensors like the convolution's result that its reader reads as well, stored like it."""
    made = b.graph.buffers[result.attr[0]]
    for load in vs.loads([reader.value]):
        buffer = b.graph.buffers[load.attr[0]]
        same = load.attr[1] == result.attr[1] and load.attr[2] == kind and buffer.sizes == made.sizes
        if load is not result and same and buffer.device == made.device:
            yield load


def _has_points(loops: tuple[ix.Var, ...]) -> bool:
    return all(ix.known_less(ix.ZERO, v.extent) for v in loops)


# ---- the calls --------------------------------------------------------------------------------------------------------------


def _computes(kind: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if kind is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return kind is torch.float32


def _with_activation(shape: Shape, name: str) -> Call:
    numbers = (shape.padding, shape.stride, shape.dilation, shape.groups)
    return torch.ops.mkldnn._convolution_pointwise.default, (*shape.operands, *numbers, name, (), "")


def _with_sum(shape: Shape, other: ir.TensorArg) -> Call:
    x, *weights = shape.operands
    numbers = (shape.padding, shape.stride, shape.dilation, shape.groups)
    return torch.ops.mkldnn._convolution_pointwise.binary, (x, other, *weights, *numbers, "add", None, None, (), "")


# ---- activations ------------------------------------------------------------------------------------------------------------


def _sigmoid(b: Builder, x: Tensor) -> Tensor:
    return formula(lambda p: vs.call("sigmoid", p))(b, x)


def _hardswish(b: Builder, x: Tensor) -> Tensor:
    return div(b, mul(b, x, clamp(b, add(b, x, 3), 0, 6)), 6)


def _silu(b: Builder, x: Tensor) -> Tensor:
    return mul(b, x, _sigmoid(b, x))


# As oneDNN calls them, and the operators' rules.
_ACTIVATIONS: tuple[tuple[str, Rule], ...] = (("sigmoid", _sigmoid), ("swish", _silu), ("hardswish", _hardswish))
