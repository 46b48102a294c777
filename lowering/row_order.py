"""Sorting of short rows without a sort: an element's rank is the number of elements that come before it.

Counting compares every pair of a row's elements, which is all work that has no order of its own: a reduction, so it takes what
computes the rows into its kernel. Who has a rank is a second reduction. Both are cheap for rows of some hundred elements,
where a library's sort is five or six launches. Equal elements keep their order; a NaN comes after all numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import gather
from kgen.lowering.reduction import reduce, reuse
from kgen.lowering.result_readers import readers, reads
from kgen.lowering.row_sort import sorted_rows
from kgen.lowering.sort_keys import RANKED, along_last, rank_of
from kgen.lowering.sorting_network import Network, network_of
from kgen.lowering.tensor import Tensor, at, broadcast, convert, indices, reshape, rounded
from kgen.lowering.views import axis, permute, squeeze, unsqueeze

I32, I64 = torch.int32, torch.int64
# Rows that one program sorts sooner than all programs count pairs, in two kernels or three.
LONG_ROW = 1024


def sort(
    b: Builder, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Tensor, Tensor]:
    """(values, positions). Equal elements keep their order, whether or not `stable` asks for it."""
    few = _sorted_few(b, x, dim, descending, stable=bool(stable))
    if few is not None:
        return few
    order = None if _is_counted(b, x, dim) else sorted_rows(b, x, dim, descending, bool(stable) or reads(b, 1))
    if order is not None:
        return order.values(b), order.positions(b)
    rows = _counted_rows(b, x, dim)
    positions = b.realize(_holders(b, rows, _ranks(b, rows, descending)))
    values = b.realize(gather(b, rows, -1, positions))  # what compares all pairs of them reads each one often
    return _back(b, values, dim), _back(b, positions, dim)


def argsort(b: Builder, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = None) -> Tensor:
    return sort(b, x, dim, descending, stable=True)[1]


def msort(b: Builder, x: Tensor) -> Tensor:
    return sort(b, x, 0)[0]


def kthvalue(b: Builder, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    network = network_of(b, x, dim, False, reads(b, 1)) if isinstance(k, int) else None
    if network is not None:
        value = network.value(k - 1)
        return _kept(b, value, dim, x.rank, keepdim), _kept(b, _position(network, k - 1), dim, x.rank, keepdim)
    return _element(b, x, dim, keepdim, lambda rows: rows.with_value(vs.const(k - 1, I32), I32))


def median(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower one of two in the middle; of a row with a NaN its first NaN. With no `dim`, that of all elements."""
    few = None if dim is None else _median_of_few(b, x, dim, keepdim)
    if few is not None:
        return few
    return _median(b, x, dim, keepdim, lambda length, nans: vs.where(_none(nans), _half(length), _less(length, nans)))


def nanmedian(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The same among the numbers; of a row of NaNs alone its first one."""

    def rank(length: Value, nans: Value) -> Value:
        numbers = _less(length, nans)
        return vs.where(_none(numbers), numbers, _half(numbers))

    return _median(b, x, dim, keepdim, rank)


# ---- a few elements ------------------------------------------------------------------------------------------------


def _sorted_few(b: Builder, x: Tensor, dim: int, descending: bool, stable: bool) -> tuple[Tensor, Tensor] | None:
    network = network_of(b, x, dim, descending, stable or reads(b, 1))
    if network is None:
        return None
    ranks, dim = range(len(network.order)), axis(dim, x.rank)
    values, positions = [network.value(k) for k in ranks], [_position(network, k) for k in ranks]
    stacked = (network.stacked(b, parts, dim, _is_read_one_by_one(b, k, dim)) for k, parts in enumerate((values, positions)))
    return next(stacked), next(stacked)


def _position(network: Network, rank: int) -> Tensor:
    """The position of an element; 0, which nobody reads, where the network does not know it."""
    if network.keys.low:
        return network.position(rank)
    value = network.value(rank)
    return value.with_value(vs.const(0, I64), I64)


def _kept(b: Builder, found: Tensor, dim: int, rank: int, keepdim: bool) -> Tensor:
    return unsqueeze(b, found, axis(dim, rank)) if keepdim else found


def _is_read_one_by_one(b: Builder, position: int, dim: int) -> bool:
    """Whether each reader takes one place of all rows."""
    found, rank = readers(b, position), b.current.meta["val"]
    rank = (rank[position] if isinstance(rank, tuple | list) else rank).dim()
    taken: list[Any] = [reader.args[1] for reader in found if reader.target is torch.ops.aten.select.int]
    return len(taken) == len(found) and all(axis(one, rank) == dim for one in taken)


def _median_of_few(b: Builder, x: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor] | None:
    """The lower one in the middle; of a row with NaNs the first of these."""
    network = network_of(b, x, dim, False, reads(b, 1))
    if network is None:
        return None
    middle = (len(network.order) - 1) // 2
    value, place = network.value(middle), _position(network, middle)
    if x.dtype.is_floating_point:
        nan = network.first_nan()
        some = vs.call("lt", nan.value, vs.const(len(network.order), I32))
        value = value.with_value(vs.where(some, vs.const(math.nan, value.value.dtype), value.value))
        place = place.with_value(vs.where(some, vs.cast(nan.value, I64), place.value))
    return _kept(b, value, dim, x.rank, keepdim), _kept(b, place, dim, x.rank, keepdim)


# ---- ranks ---------------------------------------------------------------------------------------------------------


def _is_counted(b: Builder, x: Tensor, dim: int) -> bool:
    """Whether few rows are so long that all threads of a GPU had better count than one program sort."""
    length = x.sizes[dim].as_int() if x.rank else None
    return length is not None and length > LONG_ROW and x.dtype in (*RANKED, I64) and b.ranks_rows(x.device, length, x.numel())


def _counted_rows(b: Builder, x: Tensor, dim: int) -> Tensor:
    """The rows along `dim`, as those along the last dimension. Raises Refused for rows that the library sorts."""
    length = x.sizes[dim].as_int() if x.rank else None
    if length is None or x.dtype not in (*RANKED, I64):
        raise Refused("sort-like: a type or a length that kernels do not cover")
    if not b.ranks_rows(x.device, length, x.numel()):
        raise Refused("sort-like: the library is taken to be faster, or kernels are off")
    return along_last(rounded(reuse(b, x)), axis(dim, x.rank))


def _ranks(b: Builder, rows: Tensor, descending: bool) -> Tensor:
    """The rank of each element in its sorted row, an int32."""
    pairs = (*rows.sizes, rows.sizes[-1])
    *lead, mine, other = indices(pairs)
    key, key_of_other = (_key(at(rows, (*lead, k))) for k in (mine, other))
    before = vs.call("gt" if descending else "lt", key_of_other, key)
    earlier = vs.call("and", vs.call("eq", key_of_other, key), vs.compare("lt", other, mine))
    counted = Tensor(pairs, I32, rows.device, vs.cast(vs.call("or", before, earlier), I32))
    return reduce(b, "sum", counted, [rows.rank], False)


def _holders(b: Builder, rows: Tensor, ranks: Tensor) -> Tensor:
    """For each rank the position of the element that has it."""
    pairs = (*rows.sizes, rows.sizes[-1])
    *lead, rank, position = indices(pairs)
    return _position_of(b, rows, at(ranks, (*lead, position)), vs.index_value(rank, I32), pairs)


def _position_of(b: Builder, rows: Tensor, rank: Value, wanted: Value, sizes: Sequence[Expr]) -> Tensor:
    """The position, along the last axis of a loop over `sizes`, whose rank is the wanted one."""
    position = vs.index_value(indices(sizes)[-1], I32)
    matching = vs.where(vs.call("eq", rank, wanted), position, vs.const(0, I32))
    found = reduce(b, "sum", Tensor(tuple(sizes), I32, rows.device, matching), [len(sizes) - 1], False)
    return convert(found, I64)


def _element(b: Builder, x: Tensor, dim: int, keepdim: bool, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(value, position) of the element of each row that has a rank, which `wanted` gives at each element of the rows."""
    found = _element_in_order(b, x, dim, wanted) or _counted_element(b, _counted_rows(b, x, dim), wanted)
    value, position = (_back(b, t, dim) for t in found)
    return (value, position) if keepdim else (squeeze(b, value, dim), squeeze(b, position, dim))


def _element_in_order(b: Builder, x: Tensor, dim: int, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor] | None:
    """The same of rows that are sorted; None where they are not."""
    if not x.rank or _is_counted(b, x, dim):
        return None
    rows = along_last(rounded(x), axis(dim, x.rank))
    order = sorted_rows(b, rows, -1, False, reads(b, 1))
    return None if order is None else order.at_rank(b, wanted(order.source))


def _counted_element(b: Builder, rows: Tensor, wanted: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    ranks = _ranks(b, rows, descending=False)
    found = _position_of(b, rows, ranks.value, wanted(rows).value, rows.sizes)
    position = b.realize(unsqueeze(b, found, -1))
    return gather(b, rows, -1, position), position


def _back(b: Builder, rows: Tensor, dim: int) -> Tensor:
    """What is along the last dimension along `dim` again."""
    dim = axis(dim, rows.rank)
    return permute(b, rows, [*range(dim), rows.rank - 1, *range(dim, rows.rank - 1)])


def _key(value: Value) -> Value:
    """An integer that orders as the value does, the same for both zeros."""
    if not value.dtype.is_floating_point:
        return value if value.dtype is I64 else vs.cast(value, I32)
    zero = vs.const(0.0, value.dtype)
    return rank_of(vs.where(vs.call("eq", value, zero), zero, value))


# ---- medians --------------------------------------------------------------------------------------------------------


def _median(b: Builder, x: Tensor, dim: int | None, keepdim: bool, rank: Callable[[Value, Value], Value]) -> Any:
    if dim is None:
        flat = reshape(x, (x.numel(),))
        return _median(b, flat, 0, False, rank)[0]

    def wanted(rows: Tensor) -> Tensor:
        nans = _nans(b, rows)
        return nans.with_value(rank(vs.index_value(rows.sizes[-1], I32), nans.value), I32)

    return _element(b, x, dim, keepdim, wanted)


def _nans(b: Builder, rows: Tensor) -> Tensor:
    """How many NaNs each row has, repeated over the row."""
    if not rows.dtype.is_floating_point:
        return rows.with_value(vs.const(0, I32), I32)
    counted = rows.with_value(vs.cast(vs.call("isnan", rows.value), I32), I32)
    return broadcast(reduce(b, "sum", counted, [rows.rank - 1], True), rows.sizes)


def _half(length: Value) -> Value:
    return vs.call("shr", _less(length, vs.const(1, I32)), vs.const(1, I32))


def _less(a: Value, b: Value) -> Value:
    return vs.call("sub", a, b)


def _none(count: Value) -> Value:
    return vs.call("eq", count, vs.const(0, I32))


RULES: dict[str, Callable[..., Any]] = {
    "aten.sort": sort,
    "aten.argsort": argsort,
    "aten.msort": msort,
    "aten.kthvalue": kthvalue,
    "aten.median": median,
    "aten.nanmedian": nanmedian,
}
