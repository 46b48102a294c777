"""Library calls that compute a convolution together with what one node makes of it: an activation, or a sum with a tensor of
the same size and its relu.

As in `lowering/fused_calls.py`, a node has such a form if its value is the one that the rules of the operators build.
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
from kgen.lowering.activation import relu
from kgen.lowering.builder import Builder
from kgen.lowering.pointwise import add, clamp, div, formula, mul, to_copy
from kgen.lowering.tensor import Tensor

aten = torch.ops.aten
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
    library = _LIBRARIES.get(result.device.type)
    if transposed or library is None or not library.computes(result.dtype) or not ir.is_row(b.graph, bias):
        return None
    element = vs.load(node.out, (v.expr() for v in reader.vars), result.dtype)
    alone = Tensor(result.sizes, result.dtype, result.device, element)
    each = [(bias, alone), *(_with_bias(b, alone, reader) if bias is None else ())]
    calls = (
        call
        for added, whole in each
        for call in _matching(b, whole, reader, library, Shape(element, (x, weight, added), padding, stride, dilation, groups))
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


@dataclass(frozen=True, slots=True)
class Activation:
    """A function of a result as the library calls it, with its parameters, and the operator's rule."""

    name: str
    rule: Rule
    parameters: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Library:
    """What a device's library has: functions of a convolution, of its sum with a tensor, and of that sum's relu."""

    computes: Callable[[torch.dtype], bool]
    activations: tuple[Activation, ...]
    alone: Callable[[Shape, Activation], Call]
    added: Callable[[Shape, ir.TensorArg, bool], Call]
    sums: Callable[[torch.dtype], tuple[bool, ...]]  # those that it has: whether with a relu


def _matching(b: Builder, whole: Tensor, reader: ir.Pointwise, library: Library, shape: Shape) -> Iterator[Call]:
    for activation in library.activations:
        if any(one.value is reader.value for one in _forms(b, activation.rule, whole)):
            yield library.alone(shape, activation)
    for other in _others(b, shape.element, whole.dtype, reader):
        tensor = Tensor(whole.sizes, whole.dtype, whole.device, other)
        sums = add(b, whole, tensor), add(b, tensor, whole)
        for with_relu in library.sums(whole.dtype):
            if any((relu(b, one) if with_relu else one).value is reader.value for one in sums):
                operand = ir.TensorArg(other.attr[0], reader.vars, other.attr[1], whole.dtype)
                yield library.added(shape, operand, with_relu)


def _forms(b: Builder, rule: Rule, whole: Tensor) -> Iterator[Tensor]:
    """What an activation makes of a result: in its type, or, as decompositions do, in float32 between two conversions."""
    yield rule(b, whole)
    if whole.dtype in ops.NARROW_FLOATS:
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


# ---- oneDNN -----------------------------------------------------------------------------------------------------------------


def _by_onednn(kind: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return False
    if kind is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return kind is torch.float32


def _onednn(shape: Shape, activation: Activation) -> Call:
    numbers = (shape.padding, shape.stride, shape.dilation, shape.groups)
    function = (activation.name, activation.parameters, "")
    return torch.ops.mkldnn._convolution_pointwise.default, (*shape.operands, *numbers, *function)


def _onednn_sum(shape: Shape, other: ir.TensorArg, with_relu: bool) -> Call:
    x, *weights = shape.operands
    numbers = (shape.padding, shape.stride, shape.dilation, shape.groups)
    activation = ("relu", (), "") if with_relu else (None, (), "")
    return torch.ops.mkldnn._convolution_pointwise.binary, (x, other, *weights, *numbers, "add", None, *activation)


def _sums_by_onednn(kind: torch.dtype) -> tuple[bool, ...]:
    """Where oneDNN declines a sum, torch adds on its own, and its sums with a relu are of float32 alone."""
    return (True, False) if kind is torch.float32 else ()


def _sigmoid(b: Builder, x: Tensor) -> Tensor:
    return formula(lambda p: vs.call("sigmoid", p))(b, x)


def _hardsigmoid(b: Builder, x: Tensor) -> Tensor:
    return div(b, clamp(b, add(b, x, 3), 0, 6), 6)


def _hardswish(b: Builder, x: Tensor) -> Tensor:
    return div(b, mul(b, x, clamp(b, add(b, x, 3), 0, 6)), 6)


def _relu6(b: Builder, x: Tensor) -> Tensor:
    return clamp(b, x, 0, 6)


def _silu(b: Builder, x: Tensor) -> Tensor:
    return mul(b, x, _sigmoid(b, x))


# ---- cuDNN ------------------------------------------------------------------------------------------------------------------


def _by_cudnn(kind: torch.dtype) -> bool:
    return kind in (torch.float16, torch.bfloat16, torch.float32) and torch.backends.cudnn.is_available()


def _cudnn(shape: Shape, _: Activation) -> Call:
    return aten.cudnn_convolution_relu.default, (*shape.operands, shape.stride, shape.padding, shape.dilation, shape.groups)


def _cudnn_sum(shape: Shape, other: ir.TensorArg, _: bool) -> Call:
    x, weight, bias = shape.operands
    numbers = (shape.stride, shape.padding, shape.dilation, shape.groups)
    return aten.cudnn_convolution_add_relu.default, (x, weight, other, 1, bias, *numbers)


_OF_ONEDNN = (
    Activation("relu", relu),
    Activation("sigmoid", _sigmoid),
    Activation("swish", _silu),
    Activation("hardswish", _hardswish),
    Activation("hardsigmoid", _hardsigmoid),
    Activation("hardtanh", _relu6, (0.0, 6.0)),
)
_LIBRARIES = {
    "cpu": Library(_by_onednn, _OF_ONEDNN, _onednn, _onednn_sum, _sums_by_onednn),
    "cuda": Library(_by_cudnn, (Activation("relu", relu),), _cudnn, _cudnn_sum, lambda _: (True,)),
}
