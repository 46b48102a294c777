"""Views: index maps on the tensor below, never copies. The ``*_copy`` forms lower the same way, since values are lazy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.capture.operators import is_view
from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Buffer, Sizes
from kgen.ir.values import Value
from kgen.lowering.builder import Builder, stride_order
from kgen.lowering.fallback import Refused
from kgen.lowering.tensor import Tensor, reindex, reshape
from kgen.lowering.unbacked import checked_index, is_binding, wrapped

Extent = Expr | int


def result_sizes(b: Builder) -> Sizes:
    """The shape that torch gives the operator under lowering."""
    return b.symbols.sizes(b.current.meta["val"].shape)


def axis(dim: int, rank: int) -> int:
    """A dimension number counted from the front; a 0-d tensor passes for 1-d."""
    return dim % max(rank, 1)


def slice_start(start: Extent | None, extent: Expr) -> Expr:
    """Where a slice begins. No upper clamp: a slice that begins past the end has no element to read."""
    e = wrapped(0 if start is None else start, extent)
    return e if e.bounds()[0] >= 0 else ix.maximum(e, 0)


def slice_length(start: Expr, end: Extent | None, step: int, extent: Expr) -> Expr:
    stop = extent if end is None or (isinstance(end, int) and end >= 1 << 62) else ix.minimum(wrapped(end, extent), extent)
    return ix.maximum(ix.ceildiv(stop - start, step), 0)


# ---- shape ----------------------------------------------------------------------------------------------------------


def view(b: Builder, x: Tensor, size: Any) -> Tensor:
    return view_dtype(b, x, size) if isinstance(size, torch.dtype) else reshape(x, result_sizes(b))


def view_dtype(b: Builder, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Reads the same bits as another type of the same width."""
    if dtype == x.dtype:
        return x
    if dtype.itemsize != x.dtype.itemsize:
        raise Refused("view as a dtype of another width")
    return x.with_value(_from_bits(_bits(x), dtype), dtype)


def _bits(x: Tensor) -> Value:
    if x.dtype is torch.bfloat16:  # the upper half of its float32
        wide = vs.bitcast(vs.cast(x.value, torch.bfloat16), torch.int32)
        return vs.cast(vs.call("shr", wide, vs.const(16, torch.int32)), torch.int16)
    if x.dtype in ops.NARROW_FLOATS:
        raise Refused("bits of a 16-bit or 8-bit float")
    return x.value


def _from_bits(bits: Value, dtype: torch.dtype) -> Value:
    if dtype is torch.bfloat16:
        wide = vs.cast(bits if not bits.dtype.is_floating_point else vs.bitcast(bits, torch.int16), torch.int32)
        return vs.bitcast(vs.call("shl", wide, vs.const(16, torch.int32)), torch.float32)
    if dtype in ops.NARROW_FLOATS:
        raise Refused("bits of a 16-bit or 8-bit float")
    if bits.dtype.is_floating_point or dtype.is_floating_point:
        return vs.bitcast(bits, dtype)
    return vs.cast(bits, dtype)


def permute(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    order = [axis(d, x.rank) for d in dims]
    place = {d: k for k, d in enumerate(order)}
    return reindex(x, (x.sizes[d] for d in order), lambda *j: [j[place[d]] for d in range(x.rank)])


def transpose(b: Builder, x: Tensor, dim0: int = 0, dim1: int = 1) -> Tensor:
    order = list(range(x.rank))
    if x.rank:
        p, q = axis(dim0, x.rank), axis(dim1, x.rank)
        order[p], order[q] = order[q], order[p]
    return permute(b, x, order)


def t(b: Builder, x: Tensor) -> Tensor:
    return x if x.rank < 2 else transpose(b, x, 0, 1)


def unsqueeze(b: Builder, x: Tensor, dim: int) -> Tensor:
    k = dim % (x.rank + 1)
    return reindex(x, (*x.sizes[:k], ix.ONE, *x.sizes[k:]), lambda *j: [*j[:k], *j[k + 1 :]])


def squeeze(b: Builder, x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    dims = range(x.rank) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis(d, x.rank) for d in dims if x.rank and x.sizes[axis(d, x.rank)] == 1}
    kept = [k for k in range(x.rank) if k not in gone]
    place = {k: n for n, k in enumerate(kept)}
    return reindex(x, (x.sizes[k] for k in kept), lambda *j: [j[place[k]] if k in place else ix.ZERO for k in range(x.rank)])


def expand(b: Builder, x: Tensor, size: Any, **_: Any) -> Tensor:
    sizes = result_sizes(b)
    lead = len(sizes) - x.rank
    return reindex(x, sizes, lambda *j: [ix.ZERO if s == 1 else i for s, i in zip(x.sizes, j[lead:], strict=True)])


def broadcast_in_dim(b: Builder, x: Tensor, shape: Sequence[Extent], dims: Sequence[int]) -> Tensor:
    return reindex(x, shape, lambda *j: [ix.ZERO if s == 1 else j[d] for s, d in zip(x.sizes, dims, strict=True)])


# ---- parts ----------------------------------------------------------------------------------------------------------


def slice_dim(x: Tensor, dim: int, start: Expr, length: Extent, step: int = 1) -> Tensor:
    """`length` elements along `dim` from `start` on."""
    sizes = list(x.sizes)
    sizes[dim] = ix.as_expr(length)
    return reindex(x, sizes, lambda *j: [start + i * step if k == dim else i for k, i in enumerate(j)])


def slice_tensor(
    b: Builder, x: Tensor, dim: int = 0, start: Extent | None = None, end: Extent | None = None, step: int = 1
) -> Tensor:
    k = axis(dim, x.rank)
    first = slice_start(start, x.sizes[k])
    length = slice_length(first, end, step, x.sizes[k]) if is_binding(b.current) else result_sizes(b)[k]
    return slice_dim(x, k, first, length, step)


def narrow(b: Builder, x: Tensor, dim: int, start: Extent, length: Extent) -> Tensor:
    if isinstance(start, Tensor):
        raise Refused("narrow from a tensor's value")
    k = axis(dim, x.rank)
    return slice_dim(x, k, wrapped(start, x.sizes[k]), length)


def select(b: Builder, x: Tensor, dim: int, index: Extent) -> Tensor:
    k = axis(dim, x.rank)
    at_index = checked_index(b, index, x.sizes[k])
    return reindex(x, (*x.sizes[:k], *x.sizes[k + 1 :]), lambda *j: [*j[:k], at_index, *j[k:]])


def split(b: Builder, x: Tensor, split_size: Any, dim: int = 0) -> tuple[Tensor, ...]:
    if isinstance(split_size, list | tuple):
        return split_with_sizes(b, x, split_size, dim)
    k = axis(dim, x.rank)
    extents = [b.symbols.sizes(v.shape)[k] for v in b.current.meta["val"]]
    return split_with_sizes(b, x, extents, dim)


def split_with_sizes(b: Builder, x: Tensor, split_sizes: Sequence[Extent], dim: int = 0) -> tuple[Tensor, ...]:
    k = axis(dim, x.rank)
    parts, start = [], ix.ZERO
    for extent in split_sizes:
        parts.append(slice_dim(x, k, start, extent))
        start = start + extent
    return tuple(parts)


def unbind(b: Builder, x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(select(b, x, dim, k) for k in range(len(b.current.meta["val"])))


def diagonal(b: Builder, x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    p, q = axis(dim1, x.rank), axis(dim2, x.rank)

    def where(*j: Expr) -> list[Expr]:
        rest = iter(j[:-1])
        ends = {p: j[-1] + max(-offset, 0), q: j[-1] + max(offset, 0)}
        return [ends[k] if k in ends else next(rest) for k in range(x.rank)]

    return reindex(x, result_sizes(b), where)


def unfold(b: Builder, x: Tensor, dim: int, size: Extent, step: Extent) -> Tensor:
    if not x.rank:
        return reindex(x, result_sizes(b), lambda *_: [])
    d = axis(dim, x.rank)
    return reindex(x, result_sizes(b), lambda *j: [i * step + j[-1] if k == d else i for k, i in enumerate(j[:-1])])


# ---- rearrangements -------------------------------------------------------------------------------------------------


def flip(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor:
    turned = {axis(d, x.rank) for d in dims}
    return reindex(
        x, x.sizes, lambda *j: [x.sizes[k] - 1 - i if k in turned and x.sizes[k] != 1 else i for k, i in enumerate(j)]
    )


def roll(b: Builder, x: Tensor, shifts: Any, dims: Any = ()) -> Tensor:
    moves = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    over = list(dims) if isinstance(dims, list | tuple) else [dims]
    if any(s == 0 for s in x.sizes) or not x.rank:
        return x
    if not over:
        flat = reshape(x, (x.numel(),))
        return reshape(_rolled(flat, 0, moves[0]), x.sizes)
    for move, dim in zip(moves, over, strict=True):
        x = _rolled(x, axis(dim, x.rank), move)
    return x


def _rolled(x: Tensor, dim: int, shift: Extent) -> Tensor:
    extent = x.sizes[dim]
    back = extent - ix.mod(ix.as_expr(shift), extent)
    return reindex(x, x.sizes, lambda *j: [ix.mod(i + back, extent) if k == dim else i for k, i in enumerate(j)])


def rot90(b: Builder, x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> Tensor:
    p, q = axis(dims[0], x.rank), axis(dims[1], x.rank)
    quarter_turns = k % 4
    if quarter_turns == 2:
        return flip(b, x, (p, q))
    if quarter_turns == 1:
        return transpose(b, flip(b, x, (q,)), p, q)
    return transpose(b, flip(b, x, (p,)), p, q) if quarter_turns == 3 else x


def repeat(b: Builder, x: Tensor, repeats: Sequence[Extent]) -> Tensor:
    lead = len(repeats) - x.rank

    def where(*j: Expr) -> list[Expr]:
        return [ix.ZERO if s.as_int() in (0, 1) else ix.mod(i, s) for s, i in zip(x.sizes, j[lead:], strict=True)]

    return reindex(x, result_sizes(b), where)


# ---- storage --------------------------------------------------------------------------------------------------------


def as_strided(
    b: Builder, x: Tensor, size: Sequence[Extent], stride: Sequence[Extent], storage_offset: Extent | None = None
) -> Tensor:
    """A view by storage offsets. Where the tensor below is dense in eager, an offset into its storage names one of its
    elements, whatever layout kgen gives it; an input that is not dense is addressed through a one-dimensional alias."""
    inner = b.current.args[0]
    own_offset = b.symbols.expr(inner.meta["val"].storage_offset())
    start = own_offset if storage_offset is None else ix.as_expr(storage_offset)
    base, node = _storage_owner(b, x, inner)
    value = node.meta["val"]
    strides, offset = b.symbols.sizes(value.stride()), b.symbols.expr(value.storage_offset())

    def linear(j: Sequence[Expr]) -> Expr:
        return ix.linearize(j, stride, start - offset)

    if any(s == 0 for s in map(ix.as_expr, size)):
        return reindex(base, size, lambda *_: [ix.ZERO] * base.rank)
    reach = ix.linearize([ix.as_expr(s) - 1 for s in size], stride, start - offset)
    inside = (start - offset).bounds()[0] >= 0 and b.symbols.ensure_nonnegative([base.numel() - 1 - reach])
    if inside and dense(base.sizes, strides):
        return reindex(base, size, lambda *j: storage_index(linear(j), base.sizes, strides))
    is_input = base.value.op == "load" and b.graph.buffers[base.value.attr[0]].kind == "input"
    if not is_input or node.op != "placeholder":  # what is a copy to other strides may be lazy, and read an input itself
        raise Refused("as_strided beyond the tensor it is applied to")
    below = b.graph.buffers[base.value.attr[0]]
    name = b.fresh(f"{below.name}_storage")
    b.graph.buffers[name] = Buffer(
        name, x.dtype, x.device, (reach - (start - offset) + 1,), (ix.ONE,), start - offset, alias_of=below.name
    )
    flat = b.load(b.graph.buffers[name])
    return reindex(flat, size, lambda *j: [linear(j) - (start - offset)])


def _storage_owner(b: Builder, x: Tensor, node: Any) -> tuple[Tensor, Any]:
    """The tensor at the root of a chain of views, and its FX node."""
    env = b.env
    while node.op == "call_function" and is_view(node.target):
        below = env.get(node.args[0])
        if not isinstance(below, Tensor) or below.dtype != x.dtype:  # offsets count elements of one type
            break
        node = node.args[0]
    return env.get(node, x), node


def dense(sizes: Sizes, strides: Sizes) -> bool:
    """Whether the strides are those of a packed array in some order of its dimensions."""
    total = ix.ONE
    for k in reversed(stride_order(strides, sizes)):
        if sizes[k] == 1:
            continue
        if strides[k] is not total:
            return False
        total = total * sizes[k]
    return True


def storage_index(linear: Expr, sizes: Sizes, strides: Sizes) -> list[Expr]:
    """The logical index of the element at an offset into dense storage."""
    order = stride_order(strides, sizes)
    where = [ix.ZERO] * len(sizes)
    for k, e in zip(order, ix.delinearize(linear, [sizes[k] for k in order]), strict=True):
        where[k] = e if sizes[k] != 1 else ix.ZERO
    return where


def identity(b: Builder, x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


_VIEW_RULES: dict[str, Callable[..., Any]] = {
    "alias": identity, "as_strided": as_strided, "detach": identity, "diagonal": diagonal, "expand": expand, "permute": permute,
    "select": select, "slice": slice_tensor, "split": split, "split_with_sizes": split_with_sizes, "squeeze": squeeze, "t": t,
    "transpose": transpose, "unbind": unbind, "unfold": unfold, "unsqueeze": unsqueeze, "view": view,
}  # fmt: skip

RULES: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": rule for name, rule in _VIEW_RULES.items()},
    **{f"aten.{name}_copy": rule for name, rule in _VIEW_RULES.items()},
    "aten._reshape_alias": view,
    "aten._unsafe_view": view,
    "aten.reshape": view,
    "aten._reshape_copy": view,
    "aten.flip": flip,
    "aten.lift": identity,
    "aten.lift_fresh": identity,
    "aten.lift_fresh_copy": identity,
    "aten.narrow": narrow,
    "aten.narrow_copy": narrow,
    "aten.repeat": repeat,
    "aten.roll": roll,
    "aten.rot90": rot90,
    "aten.unsafe_split": split,
    "aten.unsafe_split_with_sizes": split_with_sizes,
    "prims.broadcast_in_dim": broadcast_in_dim,
    "prims.rev": flip,
    "prims.view_of": identity,
}
