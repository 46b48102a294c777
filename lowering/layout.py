"""Strides of what leaves the loops: a tensor stored with exactly the strides that it has in eager."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.nodes import Buffer, Sizes, TensorArg, dense_strides
from kgen.lowering.builder import Builder, is_dense, is_storable, stride_order, without
from kgen.lowering.tensor import Tensor, axes

# Their results do not depend on how the operands lie, and a copy to eager's strides would be for nothing.
_ANY_STRIDES = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}

# Their library calls on a GPU take and give dense tensors in the order of the dimensions, where those on a CPU, and kernels of
# kgen's own, also take channels that are last: the choice of layouts may have made them so.
_IN_ORDER_ON_GPU = {torch.ops.aten.native_group_norm}


def strides_of(b: Builder, value: torch.Tensor, node: Node) -> Sizes:
    """The strides of an argument or result of the node's library call."""
    if value.is_cuda and value.dim() > 1 and getattr(node.target, "overloadpacket", None) in _IN_ORDER_ON_GPU:
        return ix.contiguous_strides(b.symbols.sizes(value.shape))
    return b.symbols.sizes(value.stride())


def store_with(tensor: Tensor, wanted: Sizes | None, copy: Callable[[Tensor], Tensor], b: Builder) -> Tensor:
    """The tensor in a buffer that `copy` makes, with strides `wanted` where they can be had: gaps stay gaps, and along a
    dimension of stride 0 one element is stored. Tracing may promise such a dimension to a tensor whose elements differ along it
    (torch 2.11: a slice written into an expanded tensor): that gets no stride of 0."""
    repeated = [k for k, s in enumerate(wanted or ()) if s == 0 and tensor.sizes[k] != 1]
    if not tensor.value.variables().isdisjoint(tensor.axes[k] for k in repeated):
        return copy(tensor)
    kept = without(tensor.sizes, repeated)
    first = vs.substitute(tensor.value, {tensor.axes[k]: ix.ZERO for k in repeated})
    made = copy(replace(tensor, sizes=kept, value=first))
    if wanted is not None and is_storable(tensor.sizes, wanted, b.symbols):
        b.freeze(made.value.attr[0], wanted)
    return replace(made, sizes=tensor.sizes)


def covers(buffer: Buffer, view: TensorArg) -> bool:
    """Whether the view is all of a buffer whose layout is open."""
    return (
        buffer.strides is None
        and view.vars == axes(buffer.sizes)
        and all(e is v.expr() for e, v in zip(view.index, view.vars, strict=True))
    )


def fix_strides(b: Builder, view: TensorArg, wanted: Sizes | None) -> bool:
    """Whether the view has the strides, fixing the layout of its buffer so that it does when that is still open."""
    if wanted is None:
        return True
    buffer = b.graph.buffers[view.buffer]
    if covers(buffer, view) and is_dense(buffer.sizes, wanted):
        b.freeze(view.buffer, wanted)
        return True
    linear = ix.linearize(view.index, dense_strides(buffer))
    return all(v.extent == 1 or ix.stride_of(linear, v) is w for v, w in zip(view.vars, wanted, strict=True))


# ---- operands of library calls --------------------------------------------------------------------------------------


def as_traced(b: Builder, node: Node, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The call's arguments with the strides that the traced graph gave them. Operators may demand them (fused attention wants
    the rows of its bias padded, which eager does by slicing a wider tensor), and those of the results follow from them."""
    sources = (*node.args, *(None for _ in args[len(node.args) :]))
    if getattr(node.target, "overloadpacket", None) in _ANY_STRIDES:
        return tuple(_in_order(b, s, a) for s, a in zip(sources, args, strict=True)), dict(kwargs)
    written = _written(node)

    def moved(key: int | str, source: Any, given: Any) -> Any:
        return given if key in written else placed(b, source, given, node)

    positional = tuple(moved(k, sources[k], a) for k, a in enumerate(args))
    return positional, {k: moved(k, node.kwargs.get(k), a) for k, a in kwargs.items()}


def _in_order(b: Builder, source: Any, given: Any) -> Any:
    """A matrix that has to be stored for its call, in eager's order of dimensions: the transpose of a computed weight is a view
    there, and a kernel that stores it transposed would read all that it is computed of with strides. What others read as well,
    such as the sum that is a bias's gradient, may become a part of the matmul's kernel, and theirs. Where no sum does, it has
    that order if the call has to have it stored."""
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(given, Tensor) or given.weak or not isinstance(value, torch.Tensor) or b.as_view(given) is not None:
        return given
    if b.symbols.sizes(value.shape) != given.sizes:
        return given
    order = stride_order(b.symbols.sizes(value.stride()), given.sizes)
    readers = _readers(source)
    if len(readers) == 1:
        return b.copied_matrices(given, order)
    if not any(_is_sum(one) for one in readers):
        b.orders[given] = order
    return given


def _readers(node: Node) -> list[Node]:
    """Those of a tensor, or of what it is a view of."""
    while len(node.users) == 1 and _is_view(node):
        node = node.all_input_nodes[0]
    return list(node.users)


def _is_sum(node: Node) -> bool:
    """Whether a sum reads an operand, or a view of it."""
    while len(node.users) == 1 and _is_view(node):
        [node] = node.users
    return getattr(node.target, "overloadpacket", None) is torch.ops.aten.sum


def _is_view(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "is_view", False)


def _written(node: Node) -> set[int | str]:
    """Positions and names of arguments that the operator writes: they stay what they are. What it only views does not: a
    view as complex numbers demands eager's strides, and `lowering.results` finds the storage of a view that is returned."""
    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else enumerate(schema.arguments)
    found = [(k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return {key for pair in found for key in pair}


def _packed(sizes: Sizes, strides: Sizes) -> Sizes:
    """Dense strides in the order of some of which nobody knows whether they are: tracing writes strides in terms of others,
    such as the number of all elements over the rest of a view's shape."""
    order = stride_order(strides, sizes)
    dense = ix.contiguous_strides(sizes[k] for k in order)
    return tuple(dense[order.index(k)] for k in range(len(sizes)))


def placed(b: Builder, source: Any, given: Any, call: Node) -> Any:
    """One argument of a call, or a list of them, with the strides of what it is in the traced graph."""
    if isinstance(source, list | tuple) and isinstance(given, list | tuple) and len(source) == len(given):
        return tuple(placed(b, s, g, call) for s, g in zip(source, given, strict=True))
    value = source.meta.get("val") if isinstance(source, Node) else None
    if not isinstance(given, Tensor) or given.weak or not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return given
    wanted = strides_of(b, value, call)
    if b.symbols.sizes(value.shape) != given.sizes:
        return given
    if not is_storable(given.sizes, wanted, b.symbols):
        if any(s == 0 for s in wanted):
            return given
        wanted = _packed(given.sizes, wanted)
    view = b.as_view(given)
    if view is not None and fix_strides(b, view, wanted):
        b.freeze(view.buffer)
        return given
    key = (given, wanted)
    if key not in b.placed:
        b.placed[key] = store_with(given, wanted, b.stored_operand, b)
        b.note_placed(given, b.placed[key])
    return b.placed[key]
