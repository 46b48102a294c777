"""Frozen weights of convolutions in the order in which a CPU's library multiplies them, made once: `pack_weights`.

The library reorders plain weights at each call. After everything else, as `operand_packing`: what is chosen does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr
from kgen.ir.plan import Call, LibraryPacking, Schedule
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["pack_weights"]

_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}


@dataclass(frozen=True, slots=True)
class _Form:
    """Where a call has its weight, and from where on its padding, stride, dilation and groups are."""

    weight: int
    numbers: int


_PLAIN = torch.ops.aten.convolution.default


def _forms() -> dict[Any, _Form]:
    ops = torch.ops.mkldnn
    return {ops._convolution_pointwise.default: _Form(1, 3), ops._convolution_pointwise.binary: _Form(2, 4)}


def pack_weights(plan: Schedule) -> None:
    """Changes the plan: convolutions that the library computes read packed weights, further inputs of the graph."""
    if not torch.backends.mkldnn.is_available() or not torch.backends.mkldnn.enabled:
        return
    frozen = {one.buffer for one in plan.graph.inputs if one.frozen and one.buffer is not None}
    found: dict[tuple[Any, ...], str] = {}
    for k, step in enumerate(plan.steps):
        call = _as_library_call(step.node) if isinstance(step, Call) and isinstance(step.node, ir.Extern) else None
        if call is not None and (form := _forms()[call.target]) and _may_pack(call, form, plan.graph, frozen):
            plan.steps[k] = Call(_packed(call, form, plan, found))


def _as_library_call(node: ir.Extern) -> ir.Extern | None:
    """The call in the form that takes packed weights."""
    if node.target is not _PLAIN:
        return node if node.target in _forms() else None
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    if transposed:
        return None
    args = (x, weight, bias, padding, stride, dilation, groups, "none", (), "")
    return replace(node, target=torch.ops.mkldnn._convolution_pointwise.default, args=args)


def _may_pack(call: ir.Extern, form: _Form, graph: ir.Graph, frozen: set[str]) -> bool:
    """Whether the weight is a whole frozen tensor, and images have their channels last: with packed weights results have. The
    image may be a view, as of rows that a norm of channels made."""
    image, weight = call.args[0], call.args[form.weight]
    tensors = [weight, *(a for a in call.args[1 : form.weight] if isinstance(a, ir.TensorArg))]
    if not all(isinstance(one, ir.TensorArg) and _is_whole(one, graph) for one in tensors) or weight.buffer not in frozen:
        return False
    if not ir.is_row(graph, call.args[form.weight + 1]):
        return False
    kind, out = weight.dtype, call.outs[0]
    narrow = kind is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if out is None or not (kind is torch.float32 or narrow):
        return False
    result = graph.buffers[out]
    return _is_image(image, weight.dtype, graph) and _is_last(result.sizes, result.strides)


def _is_whole(arg: ir.TensorArg, graph: ir.Graph) -> bool:
    buffer = graph.buffers[arg.buffer]
    same = _sizes(arg) == buffer.sizes and arg.dtype is buffer.dtype and buffer.device.type == "cpu"
    return same and all(e is v.expr() for e, v in zip(arg.index, arg.vars, strict=True))


def _is_image(arg: Any, dtype: torch.dtype, graph: ir.Graph) -> bool:
    """Whether an argument is a tensor of a type in the CPU's memory, of which channels are the innermost dimension."""
    if not isinstance(arg, ir.TensorArg):
        return False
    buffer = graph.buffers[arg.buffer]
    if not arg.dtype is buffer.dtype is dtype or buffer.device.type != "cpu" or buffer.strides is None:
        return False
    linear = ix.linearize(arg.index, buffer.strides)
    return _is_last(_sizes(arg), [ix.stride_of(linear, v) for v in arg.vars])


def _sizes(arg: ir.TensorArg) -> tuple[Expr, ...]:
    return tuple(v.extent for v in arg.vars)


def _is_last(extents: Sequence[Expr], strides: Sequence[Expr | None] | None) -> bool:
    """Whether channels are the innermost dimension, and not the only one."""
    order, sizes = _LAST.get(len(extents)), [e.as_int() for e in extents]
    if order is None or strides is None or any(n is None or n == 0 for n in sizes) or sizes[1] == 1:
        return False
    span = 1
    for dim in reversed(order):
        step = strides[dim]
        if sizes[dim] != 1 and (step is None or step.as_int() != span):
            return False
        span *= sizes[dim] or 0
    return span != sizes[0] * sizes[1]  # type: ignore[operator]


def _packed(call: ir.Extern, form: _Form, plan: Schedule, found: dict[tuple[Any, ...], str]) -> ir.Extern:
    image, weight = call.args[0], call.args[form.weight]
    padding, stride, dilation, groups = call.args[form.numbers : form.numbers + 4]
    sizes = tuple(e.as_int() for e in _sizes(image))
    numbers = (padding, stride, dilation, groups, sizes)
    key = (weight.buffer, numbers)
    if key not in found:
        found[key] = _array(weight, numbers, plan)
    name = found[key]
    plan.verdicts.append(Verdict(weight.buffer, call.outs[0] or "", Outcome.PACKED, Reason.FROZEN_OPERAND, detail="by oneDNN"))
    args = list(call.args)
    args[form.weight] = replace(weight, buffer=name)
    return replace(call, args=tuple(args))


def _array(weight: ir.TensorArg, numbers: tuple[Any, ...], plan: Schedule) -> str:
    """A further input of the graph, and how it is made."""
    graph = plan.graph
    name = ir.fresh(graph, f"packed_{weight.buffer}", ())
    target = torch.ops.mkldnn._reorder_convolution_weight.default
    plan.library_packings.append(LibraryPacking(name, weight.buffer, target, numbers))
    graph.buffers[name] = replace(graph.buffers[weight.buffer], name=name, strides=None, kind="input", alias_of=None)
    graph.inputs.append(ir.GraphInput(name, static=True, frozen=True))
    return name
