"""Reading at computed positions, and writing to regions known from index arithmetic alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Sizes, dense_strides
from kgen.ir.ranges import UNKNOWN, Range, is_inside
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.checks import checked
from kgen.lowering.closed_form import index_form
from kgen.lowering.contraction import library
from kgen.lowering.fallback import Refused
from kgen.lowering.mutation import Write, are_digits, at_newest, write, write_in_place, written_back
from kgen.lowering.pointwise import Operand, rounded_in
from kgen.lowering.tensor import Tensor, at, broadcast, broadcast_sizes, convert, indices, promote, reindex, reshape
from kgen.lowering.unbacked import checked_index
from kgen.lowering.views import Extent, axis, dense, select, slice_length, slice_start, storage_index

# A gathered value that costs more than this is stored first: every element read through an index would compute it again.
CHEAP_SOURCE = 4
# On a GPU one of inputs that costs up to this is computed at each point where positions are known: each element is read once
# then. What kernels make would have to be in memory before.
CHEAP_VIEW = 24
# What advanced indexing reads once is often read at more places: bilinear sampling reads the corners around each point.
CORNERS = 4
# Rows of a transposed tensor that are read so many times are copied first: each of their elements is in a sector of its own,
# and a copy has them side by side. Rows shorter than a sector gain little.
TIMES_READ, SECTOR = 2, 32


def gather_source(b: Builder, x: Tensor, points: Expr | None = None) -> Tensor:
    """`x` in a form that may be read at any index. `points` is how many elements will be read: reading fewer than there
    are, it is cheaper to compute just those than to store all."""
    if not vs.loads([x.value]) or vs.total_cost([x.value]) <= CHEAP_SOURCE:
        return x
    if points is not None and not any(s == 0 for s in x.sizes) and ix.lower_bound(x.numel() - points) >= 0:
        return x
    return b.stored_once(x)


def indexed_source(b: Builder, x: Tensor, points: Expr) -> Tensor:
    """`gather_source` for advanced indexing that makes so many elements."""
    return gather_source(b, x, points * CORNERS)


def row_source(b: Builder, x: Tensor, points: Expr) -> Tensor:
    """`indexed_source` for gathers of rows, the last dimension; `points` elements are read in all."""
    reads, elements = points.as_int(), x.numel().as_int()
    if reads and elements and reads >= TIMES_READ * elements and _has_scattered_rows(b, x):
        return b.with_rows(x)
    return indexed_source(b, x, points)


def _is_of_inputs(b: Builder, x: Tensor) -> bool:
    """Whether no kernel makes what a tensor is made of."""
    return all(b.graph.is_given(load.attr[0]) for load in vs.loads([x.value]))


def _has_scattered_rows(b: Builder, x: Tensor) -> bool:
    """Whether neighbours of a row are far apart in memory, in all that they are made of."""
    length, loads = x.sizes[-1].as_int() or 0, vs.loads([x.value])
    return bool(loads) and length * x.dtype.itemsize >= SECTOR and all(_is_scattered(b, load, x.axes[-1]) for load in loads)


def _is_scattered(b: Builder, load: Value, loop: ix.Var) -> bool:
    name, index, dtype = load.attr
    buffer = b.graph.buffers[name]
    stride = ix.stride_of(ix.linearize(index, buffer.strides or dense_strides(buffer)), loop)
    return stride is not None and (stride.as_int() or 0) * dtype.itemsize >= SECTOR


def position(index: Tensor, where: Sequence[Expr], extent: Expr, wrap: bool, found: Range = UNKNOWN) -> Expr:
    """The element of an index tensor, whose elements are in the range that was `found`, as an index into a dimension of size
    `extent`."""
    value = at(index, where)
    known = index_form(value, extent, wrap)
    return known if known is not None else vs.indirect(value, extent, wrap and found[0] < 0, is_inside(found, extent))


def read_at(b: Builder, x: Tensor, sizes: Sizes, where: Callable[..., Sequence[Expr]]) -> Tensor:
    """`reindex` at positions from data, each of which is checked."""
    read = reindex(x, sizes, where)
    return read.with_value(checked(b.graph, read.value, where(*read.indices)))


# ---- index.Tensor ---------------------------------------------------------------------------------------------------


class Advanced:
    """torch's advanced indexing of a tensor of shape `sizes`: which dimensions index tensors replace, and where the
    dimensions that they share stand in the result."""

    def __init__(self, b: Builder, sizes: Sizes, tensors: Sequence[Tensor | None]) -> None:
        if any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in tensors):
            raise Refused("boolean mask: the number of elements depends on data")
        self.sizes = sizes
        self.indexed = [k for k, t in enumerate(tensors) if t is not None]
        self.shape = broadcast_sizes(*(t.sizes for t in tensors if t is not None))
        self.tensors = {k: broadcast(t, self.shape) for k, t in enumerate(tensors) if t is not None}
        self.ranges = {k: b.range_of(t) for k, t in enumerate(tensors) if t is not None}
        adjacent = self.indexed == list(range(self.indexed[0], self.indexed[0] + len(self.indexed))) if self.indexed else True
        self.first = self.indexed[0] if adjacent and self.indexed else 0
        self.kept = [k for k in range(len(sizes)) if k not in self.tensors]

    def result_sizes(self) -> Sizes:
        kept = [self.sizes[k] for k in self.kept]
        return (*kept[: self.first], *self.shape, *kept[self.first :])

    def gathered(self, b: Builder, x: Tensor) -> Tensor:
        """The indexed tensor in a form that may be read at any index; its rows stay rows where the last dimension stays so."""
        if b.on_gpu(x.device) and vs.total_cost([x.value]) <= CHEAP_VIEW and _is_of_inputs(b, x) and self._is_view():
            return x
        rows = self.kept[-1:] == [len(self.sizes) - 1] and len(self.kept) > self.first
        source = row_source if rows else indexed_source
        return source(b, x, ix.product(self.result_sizes()))

    def _is_view(self) -> bool:
        """Whether arithmetic on loops gives the positions, of no more elements than there are: as of a roll, or of a flip."""
        sizes = self.result_sizes()
        fewer = ix.lower_bound(ix.product(self.sizes) - ix.product(sizes)) >= 0
        return fewer and not any(ix.indirects(e) for e in self.source(indices(sizes)))

    def source(self, j: Sequence[Expr], wrap: bool = True) -> list[Expr]:
        """The index into the indexed tensor for an index into the result."""
        n = len(self.shape)
        lanes = j[self.first : self.first + n]
        kept = iter((*j[: self.first], *j[self.first + n :]))
        return [
            position(self.tensors[k], lanes, extent, wrap, self.ranges[k]) if k in self.tensors else next(kept)
            for k, extent in enumerate(self.sizes)
        ]


def index(b: Builder, x: Tensor, indices_: Sequence[Tensor | None]) -> Tensor:
    plan = Advanced(b, x.sizes, indices_)
    if not plan.indexed:
        return x
    return read_at(b, plan.gathered(b, x), plan.result_sizes(), lambda *j: plan.source(j))


def unsafe_index(b: Builder, x: Tensor, indices_: Sequence[Tensor | None]) -> Tensor:
    """What is known to be in range."""
    plan = Advanced(b, x.sizes, indices_)
    return reindex(plan.gathered(b, x), plan.result_sizes(), lambda *j: plan.source(j)) if plan.indexed else x


def unsafe_masked_index(b: Builder, x: Tensor, mask: Tensor, indices_: Sequence[Tensor | None], fill: Any) -> Tensor:
    """Reads where the mask holds, else `fill`; indices outside count only where it holds."""
    plan = Advanced(b, x.sizes, indices_)
    sizes = plan.result_sizes()
    inside = broadcast(mask, sizes)
    read = reindex(indexed_source(b, x, ix.product(sizes)), sizes, lambda *j: plan.source(j))
    return read.with_value(vs.masked(inside.value, read.value, vs.const(fill, read.dtype)))


# ---- along one dimension --------------------------------------------------------------------------------------------


def at_least_1d(x: Tensor) -> Tensor:
    return x if x.rank else reshape(x, (1,))


def gather(b: Builder, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    if any(s == 0 for s in index.sizes):  # torch lets an empty index have any rank
        return Tensor(index.sizes, x.dtype, x.device, vs.const(0, x.dtype))
    source, lanes, k = at_least_1d(x), at_least_1d(index), axis(dim, x.rank)
    if lanes.sizes[k] == 1 and b.of_sorted_rows(source) == k and _agree_but_along(source.sizes, lanes.sizes, k):
        return element_of_row(b, source, k, lanes)
    # along the other dimensions torch lets the index have no more elements than there are
    fewer = ix.lower_bound(source.sizes[k] - lanes.sizes[k]) >= 0
    source = gather_source(b, source, source.numel() if fewer else index.numel())
    found = b.range_of(lanes)

    def where(*j: Expr) -> list[Expr]:
        return [position(lanes, j, source.sizes[k], False, found) if d == k else i for d, i in enumerate(j)]

    return reshape(read_at(b, source, lanes.sizes, where), index.sizes)


def _agree_but_along(sizes: Sequence[Expr], others: Sequence[Expr], k: int) -> bool:
    return all(a == b for d, (a, b) in enumerate(zip(sizes, others, strict=True)) if d != k)


def element_of_row(b: Builder, x: Tensor, k: int, index: Tensor) -> Tensor:
    """One element of each row along dimension `k`, of rows that a kernel holds: a sum of its bits where the row is at the
    index. So nobody has to store the rows for it."""
    lane = at(index, [ix.ZERO if d == k else i for d, i in enumerate(x.indices)])
    lane = vs.asserted(lane, vs.index_inside(lane, x.sizes[k]), "index")
    here = vs.call("eq", vs.cast(vs.index_value(x.indices[k]), lane.dtype), lane)
    kind = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bool: torch.int32}.get(x.value.dtype, x.value.dtype)
    is_float = x.value.dtype.is_floating_point
    bits = vs.bitcast(x.value, kind) if is_float else vs.cast(x.value, kind)
    (found,) = b.reduce("sum", x.with_value(vs.where(here, bits, vs.const(0, kind)), kind), [k], True)
    value = vs.bitcast(found.value, x.value.dtype) if is_float else vs.cast(found.value, x.value.dtype)
    return found.with_value(value, x.dtype)


def index_select(b: Builder, x: Tensor, dim: int, index: Tensor) -> Tensor:
    source, lanes, k = at_least_1d(x), at_least_1d(index), axis(dim, x.rank)
    sizes = (*source.sizes[:k], lanes.sizes[0], *source.sizes[k + 1 :])
    source = (indexed_source if k == source.rank - 1 else row_source)(b, source, ix.product(sizes))
    found = b.range_of(lanes)
    read = read_at(b, source, sizes, lambda *j: [*j[:k], position(lanes, [j[k]], source.sizes[k], False, found), *j[k + 1 :]])
    return read if x.rank else reshape(read, ())


def embedding(b: Builder, weight: Tensor, indices_: Tensor, *_: Any, **__: Any) -> Tensor:
    rest, n, found = weight.sizes[1:], indices_.rank, b.range_of(indices_)

    def where(*j: Expr) -> list[Expr]:
        return [position(indices_, j[:n], weight.sizes[0], False, found), *j[n:]]

    sizes = (*indices_.sizes, *rest)
    return read_at(b, row_source(b, weight, ix.product(sizes)), sizes, where)


def take(b: Builder, x: Tensor, index: Tensor) -> Tensor:
    flat = gather_source(b, reshape(x, (x.numel(),)))
    return read_at(b, flat, index.sizes, lambda *j: [position(index, j, flat.sizes[0], True)])


# ---- search ---------------------------------------------------------------------------------------------------------


def searchsorted(
    b: Builder,
    sequence: Tensor,
    x: Operand,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """The number of leading elements of each sorted row that are below `x` (or not above it, on the right side). Both are
    compared in their common type, as eager has stored them."""
    kind = promote(sequence, x)
    wanted = rounded_in(x, kind)
    sizes = x.sizes if isinstance(x, Tensor) else ()
    count = sequence.sizes[-1].as_int()
    if count is None:
        raise Refused("search in a sequence of symbolic length")
    searched = x.numel() if isinstance(x, Tensor) else ix.ONE
    sequence = gather_source(b, sequence, searched * count.bit_length())
    lead = indices(sizes)[:-1] if sequence.rank > 1 else ()

    def element(k: Value) -> Value:
        place = vs.indirect(k, sequence.sizes[-1], wrap=False)
        if sorter is not None:
            place = vs.indirect(at(sorter, [*lead, place]), sequence.sizes[-1], wrap=False)
        found = rounded_in(sequence.with_value(at(sequence, [*lead, place])), kind)
        return checked(b.graph, found, [place])

    above = "gt" if (side == "right" if side is not None else right) else "ge"
    found = binary_search(count, lambda k: vs.call("not", vs.call(above, element(k), wanted)))
    dtype = torch.int32 if out_int32 else torch.int64
    return Tensor(sizes, dtype, sequence.device, vs.cast(found, dtype))


def binary_search(count: int, holds: Callable[[Value], Value]) -> Value:
    """How many of the positions ``0 .. count-1`` satisfy `holds`, which is true of a leading part of them. The steps are those
    of torch's bisection: in a row that is not sorted, such as one with NaNs, other steps find another position."""

    def number(n: int) -> Value:
        return vs.const(n, torch.int64)

    start, end = number(0), number(count)
    for step in range(count.bit_length()):
        middle = vs.call("shr", vs.call("add", start, end), number(1)) if step else number(count // 2)
        after = holds(vs.call("minimum", middle, number(count - 1)) if step else middle)
        if step:
            after = vs.call("and", vs.call("lt", start, end), after)
        start, end = vs.where(after, vs.call("add", middle, number(1)), start), vs.where(after, end, middle)
    return start


def bucketize(b: Builder, x: Any, boundaries: Tensor, *, out_int32: bool = False, right: bool = False) -> Tensor:
    return searchsorted(b, boundaries, x, out_int32=out_int32, right=right)


# ---- writes to a region ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor: `part` is the view of it, `where` maps an index of the view to one of the tensor."""

    part: Tensor
    where: Sequence[Expr]


def _replace_region(b: Builder, base: Tensor, region: Region, src: Tensor, otherwise: Callable[[], Value]) -> Tensor:
    """`base` with a region replaced by `src`; `otherwise` gives the whole new value for the case that the old one stays."""
    done = written_back(b, base, region.part.value, src)
    if done is None:
        done = write_in_place(b, base, Write(region.part.sizes, region.where, src.value))
    return done if done is not None else base.with_value(otherwise())


def _prepared(x: Tensor, src: Tensor, sizes: Sizes) -> Tensor:
    return broadcast(convert(src, x.dtype), sizes)


def select_scatter(b: Builder, x: Tensor, src: Tensor, dim: int, index: Extent) -> Tensor:
    k = axis(dim, x.rank)
    place = checked_index(b, index, x.sizes[k])
    part = select(b, at_newest(b, x), k, place)
    src = _prepared(x, src, part.sizes)
    j = part.indices

    def otherwise() -> Value:
        i = x.indices
        here = _equal(i[k], place)
        return vs.masked(here, at(src, [*i[:k], *i[k + 1 :]]), x.value)

    return _replace_region(b, x, Region(part, [*j[:k], place, *j[k:]]), src, otherwise)


def _equal(a: Expr, b: Expr) -> Value:
    if a is b:
        return vs.const(True, torch.bool)
    return vs.call("eq", vs.index_value(a), vs.index_value(b))


def slice_scatter(
    b: Builder, x: Tensor, src: Tensor, dim: int = 0, start: Extent | None = None, end: Extent | None = None, step: int = 1
) -> Tensor:
    k = axis(dim, x.rank)
    begin, extent = slice_start(start, x.sizes[k]), x.sizes[k]
    sizes = (*x.sizes[:k], slice_length(begin, end, step, extent), *x.sizes[k + 1 :])
    if src.rank == x.rank and src.sizes[k] != 1:
        sizes = (*sizes[:k], src.sizes[k], *sizes[k + 1 :])
    part = reindex(at_newest(b, x), sizes, lambda *j: [begin + i * step if d == k else i for d, i in enumerate(j)])
    src = _prepared(x, src, sizes)
    j = part.indices

    def otherwise() -> Value:
        i = x.indices
        offset = i[k] - begin
        here = vs.call("and", vs.compare("ge", i[k], begin), vs.compare("lt", i[k], begin + sizes[k] * step))
        if step != 1:
            here = vs.call("and", here, _equal(ix.mod(offset, step), ix.ZERO))
        read = at(src, [*i[:k], ix.floordiv(offset, step), *i[k + 1 :]])
        return vs.masked(here, read, x.value)

    if any(s == 0 for s in sizes):
        return x
    return _replace_region(b, x, Region(part, [*j[:k], begin + j[k] * step, *j[k + 1 :]]), src, otherwise)


def diagonal_scatter(b: Builder, x: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    p, q = axis(dim1, x.rank), axis(dim2, x.rank)
    length = ix.maximum(ix.minimum(x.sizes[p] - max(-offset, 0), x.sizes[q] - max(offset, 0)), 0)
    rest = [k for k in range(x.rank) if k not in (p, q)]
    sizes = (*(x.sizes[k] for k in rest), length)

    def where(*j: Expr) -> list[Expr]:
        place = dict(zip(rest, j[:-1], strict=True))
        return [j[-1] + max(-offset, 0) if k == p else j[-1] + max(offset, 0) if k == q else place[k] for k in range(x.rank)]

    part = reindex(at_newest(b, x), sizes, where)
    src = _prepared(x, src, sizes)

    def otherwise() -> Value:
        i = x.indices
        here = _equal(i[q], i[p] + offset)
        return vs.masked(here, at(src, [*(i[k] for k in rest), i[p] - max(-offset, 0)]), x.value)

    return _replace_region(b, x, Region(part, where(*indices(sizes))), src, otherwise)


def as_strided_scatter(
    b: Builder, x: Tensor, src: Tensor, size: Any, stride: Any, storage_offset: Extent | None = None
) -> Tensor:
    value = b.current.args[0].meta["val"]
    strides, offset = b.symbols.sizes(value.stride()), b.symbols.expr(value.storage_offset())
    start = (offset if storage_offset is None else ix.as_expr(storage_offset)) - offset
    if not dense(x.sizes, strides) or start.bounds()[0] < 0:
        raise Refused("as_strided_scatter into a tensor that is not dense")
    src = _prepared(x, src, tuple(map(ix.as_expr, size)))
    if any(s == 0 for s in src.sizes):
        return x
    if not are_digits(zip(map(ix.as_expr, stride), src.sizes, strict=True)):
        raise Refused("as_strided_scatter of elements that share places, for which eager raises")
    where = storage_index(ix.linearize(src.indices, stride, start), x.sizes, strides)
    return write(b, x, Write(src.sizes, where, src.value))


# ---- masks ----------------------------------------------------------------------------------------------------------


def masked_scatter(b: Builder, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The k-th true element of the mask takes the k-th element of the source: a running count says which."""
    sizes = broadcast_sizes(x.sizes, mask.sizes)
    x, mask = broadcast(x, sizes), convert(broadcast(mask, sizes), torch.bool)
    flat = reshape(mask, (mask.numel(),))
    (count,) = b.scan("sum", convert(flat, torch.int64), 0)
    place = reshape(count, sizes)
    taken = gather_source(b, reshape(source, (source.numel(),)))
    lane = vs.indirect(vs.call("sub", place.value, vs.const(1, torch.int64)), taken.sizes[0], wrap=False)
    return x.with_value(vs.masked(mask.value, checked(b.graph, at(taken, [lane]), [lane]), x.value))


DATA_DEPENDENT = [
    "nonzero",
    "nonzero_static",
    "masked_select",
    "unique_dim",
    "unique_consecutive",
    "_unique",
    "_unique2",
    "unique_dim_consecutive",
    "bincount",
]

RULES: dict[str, Callable[..., Any]] = {
    "aten.index": index,
    "aten._unsafe_index": unsafe_index,
    "aten._unsafe_masked_index": unsafe_masked_index,
    "aten.gather": gather,
    "aten.index_select": index_select,
    "aten.embedding": embedding,
    "aten.take": take,
    "aten.searchsorted": searchsorted,
    "aten.bucketize": bucketize,
    "aten.select_scatter": select_scatter,
    "aten.slice_scatter": slice_scatter,
    "aten.diagonal_scatter": diagonal_scatter,
    "aten.as_strided_scatter": as_strided_scatter,
    "aten.masked_scatter": masked_scatter,
    **{f"aten.{name}": library("data-dependent size") for name in DATA_DEPENDENT},
}
