"""The largest or smallest elements of rows, without sorting them: rounds of maxima over keys that no two elements share.

A key has the element's rank among all values of its type in its high 32 bits, and in its low ones its position counted from
the end. So the largest key is the first of the largest elements, each round finds the largest key below the one before, and a
found key tells value and position. A NaN ranks above all numbers, as in eager; which of equal elements eager finds is open.

Long rows are cut into groups. The `k` largest elements lie in the groups of the `k` largest maxima, so one walk finds the
groups, and rounds run over their maxima and over their elements alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.concat import MAX_SELECTED, joined, stack
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import gather_source
from kgen.lowering.reduction import reduce, reuse
from kgen.lowering.result_readers import reads
from kgen.lowering.row_sort import sorted_rows
from kgen.lowering.sort_keys import RANKED, along_last, rank_of, value_of_rank
from kgen.lowering.tensor import Tensor, at, indices, rounded
from kgen.lowering.views import unsqueeze

I64 = torch.int64
# Each round is a walk over a row or over its candidates.
MAX_K = 64
# Longer rows are cut into groups.
MAX_DIRECT = 256
# Rows that are sorted in full where rounds are no choice: of longer ones the library finds few elements sooner. More than MAX_K
# elements it sorts as well.
MAX_SORTED = 2048
UNCOVERED = "sort-like: a type, a length or a number of elements that kernels do not cover"
LOWEST = ops.identity("max", I64)
LOW_WORD = 0xFFFFFFFF


def top_k(b: Builder, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> tuple[Tensor, Tensor]:  # noqa: A002  aten names it so
    """(values, positions), always sorted; the first of equal elements comes first."""
    dim = dim % x.rank if x.rank else 0
    length = x.sizes[dim].as_int() if x.rank else None
    if length is None or not isinstance(k, int) or not 0 < k <= length:
        raise Refused(UNCOVERED)
    count = ix.product(size for n, size in enumerate(x.sizes) if n != dim)
    if x.dtype not in RANKED or k > MAX_K or not b.finds_top(x.device, k, count):
        return _of_sorted(b, x, k, dim, largest, length)
    rows = along_last(rounded(reuse(b, x)), dim)
    found = _direct(b, rows, k, largest) if length <= MAX_DIRECT else _grouped(b, rows, length, k, largest)
    values = [key.with_value(_value(key.value, x.dtype, largest), x.dtype) for key in found]
    positions = [key.with_value(_position(key.value)) for key in found]
    return _stacked(b, values, dim), _stacked(b, positions, dim)


def _of_sorted(b: Builder, x: Tensor, k: int, dim: int, largest: bool, length: int) -> tuple[Tensor, Tensor]:
    """The first elements of sorted rows, where a program of a GPU holds these."""
    order = sorted_rows(b, x, dim, largest, reads(b, 1)) if length <= MAX_SORTED or k > MAX_K else None
    if order is None:
        covered = x.dtype in RANKED and k <= MAX_K
        raise Refused("sort-like: the library is taken to be faster, or kernels are off" if covered else UNCOVERED)
    return order.first(b, k)


def _stacked(b: Builder, tensors: Sequence[Tensor], dim: int) -> Tensor:
    if 1 < len(tensors) <= MAX_SELECTED:
        return stack(b, tensors, dim)
    return joined(b, [unsqueeze(b, t, dim) for t in tensors], dim)


# ---- rounds ---------------------------------------------------------------------------------------------------------


def _direct(b: Builder, rows: Tensor, k: int, largest: bool) -> list[Tensor]:
    """The keys of the `k` first elements of each row."""
    key = _key(rows.value, rows.indices[-1], largest)
    return _rounds(b, rows.with_value(key, I64), [rows.rank - 1], k)


def _grouped(b: Builder, rows: Tensor, length: int, k: int, largest: bool) -> list[Tensor]:
    """The same, by groups of a number of elements with which groups and candidates are about as many."""
    rows = gather_source(b, rows)
    width = 1 << round(math.log2(length / k) / 2)
    count = -(-length // width)
    lead = rows.sizes[:-1]

    def keys(sizes: Sequence[Any], place: Callable[[Sequence[Expr]], Expr]) -> Tensor:
        """Of the elements at places, which may be past the end."""
        exprs = tuple(map(ix.as_expr, sizes))
        index = indices(exprs)
        where = place(index)
        key = _key(at(rows, (*index[: len(lead)], where)), where, largest)
        inside = vs.compare("lt", where, ix.constant(length))
        return Tensor(exprs, I64, rows.device, vs.masked(inside, key, vs.const(LOWEST, I64)))

    of_all = keys((*lead, count, width), lambda index: index[-2] * width + index[-1])
    largest_keys = reduce(b, "max", of_all, [len(lead) + 1], False)
    best = _rounds(b, largest_keys, [len(lead)], k)
    groups = b.realize(_stacked(b, [key.with_value(_group(key.value, width)) for key in best], len(lead)))

    def place(index: Sequence[Expr]) -> Expr:
        return vs.indirect(at(groups, index[:-1]), ix.constant(count), False) * width + index[-1]

    return _rounds(b, keys((*lead, k, width), place), [len(lead), len(lead) + 1], k)


def _rounds(b: Builder, keys: Tensor, dims: Sequence[int], k: int) -> list[Tensor]:
    """The `k` largest keys over `dims`, the largest first."""
    found = [reduce(b, "max", keys, dims, False)]
    while len(found) < k:
        last = at(found[-1], [i for n, i in enumerate(keys.indices) if n not in dims])
        below = vs.where(vs.call("lt", keys.value, last), keys.value, vs.const(LOWEST, I64))
        found.append(reduce(b, "max", keys.with_value(below), dims, False))
    return found


# ---- keys -----------------------------------------------------------------------------------------------------------


def _key(value: Value, position: Expr, largest: bool) -> Value:
    rank = rank_of(value) if value.dtype.is_floating_point else vs.cast(value, I64)
    rank = vs.cast(rank if largest else vs.call("invert", rank), I64)
    back = vs.call("sub", vs.const(LOW_WORD, I64), vs.index_value(position))  # no index: these have 32 bits on a GPU
    return vs.call("add", vs.call("shl", rank, vs.const(32, I64)), back)


def _value(key: Value, dtype: torch.dtype, largest: bool) -> Value:
    rank = vs.call("shr", key, vs.const(32, I64))
    rank = rank if largest else vs.call("invert", rank)
    if not dtype.is_floating_point:
        return vs.cast(rank, dtype)
    return value_of_rank(vs.cast(rank, torch.int32))


def _position(key: Value) -> Value:
    low = vs.const(LOW_WORD, I64)
    return vs.call("sub", low, vs.call("bitand", key, low))


def _group(key: Value, width: int) -> Value:
    return vs.call("shr", _position(key), vs.const(width.bit_length() - 1, I64))


RULES: dict[str, Callable[..., Any]] = {"aten.topk": top_k}
