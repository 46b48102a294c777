"""Sorting of rows that a GPU's program holds in registers: one node of the IR, which fuses as scans do.

What is sorted are integers that order as the elements do, most often with the elements' positions in their low bits: elements
and positions are arithmetic on sorted integers. Where 64 bits have no room for a position, integers are sorted with positions
beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.indexing import gather
from kgen.lowering.reduction import reduce
from kgen.lowering.sort_keys import LONG, LOW_OF_SHORT, LOW_OF_WORD, Keys, keys_of
from kgen.lowering.tensor import Tensor, rounded
from kgen.lowering.views import axis

__all__ = ["SortedRows", "sorted_rows"]

I32, I64 = torch.int32, torch.int64


# Elements of a row that is sorted by keys of 64 bits, at most: 4,096 of float32 with positions take 376 us, the library's 292
# (H200, 2,048 rows).
MOST_WIDE = 2048


@dataclass(frozen=True, slots=True)
class SortedRows:
    """A tensor's rows along a dimension in ascending order of their keys. `beside` are positions that keys have no room for."""

    source: Tensor
    dim: int
    keys: Keys
    sorted: Tensor
    beside: Tensor | None

    def values(self, b: Builder) -> Tensor:
        """The elements, stored."""
        return b.copy(self._elements(b, self.sorted, self.beside))

    def positions(self, b: Builder) -> Tensor:
        """The positions that elements had, stored."""
        return b.copy(self._positions(self.sorted, self.beside))

    def first(self, b: Builder, count: int) -> tuple[Tensor, Tensor]:
        """(elements, positions) of the first ranks of each row, in memory of their own."""
        both = self._elements(b, self.sorted, self.beside), self._positions(self.sorted, self.beside)
        values, positions = (self._stored_first(b, t, count) for t in both)
        return values, positions

    def _stored_first(self, b: Builder, x: Tensor, count: int) -> Tensor:
        """What the rows' kernel stores of the first ranks alone."""
        if x.sizes[self.dim] == count:
            return b.copy(x)
        sizes = tuple(ix.constant(count) if k == self.dim else size for k, size in enumerate(x.sizes))
        target = b.copy(Tensor(sizes, x.dtype, x.device, vs.const(0, ops.compute_dtype(x.dtype))))
        inside = vs.compare("lt", x.indices[self.dim], ix.constant(count))
        return b.scatter(target, x.sizes, x.indices, x.value, mask=inside)

    def at_rank(self, b: Builder, rank: Tensor) -> tuple[Tensor, Tensor]:
        """(element, position) of one rank of each row, which is told at each of its elements, along a dimension of length 1.
        A position is 0 where keys do not know it."""
        found = [self._picked(b, t, rank.value) for t in (self.sorted, self.beside) if t is not None]
        key, place = found[0], found[1] if len(found) > 1 else None
        return self._elements(b, key, place), self._positions(key, place)

    def _picked(self, b: Builder, x: Tensor, rank: Value) -> Tensor:
        here = vs.call("eq", vs.index_value(x.indices[self.dim], rank.dtype), rank)
        wanted = vs.where(here, x.value, vs.const(ops.identity("max", x.dtype), x.dtype))
        return reduce(b, "max", x.with_value(wanted), [self.dim], True)

    def _elements(self, b: Builder, key: Tensor, place: Tensor | None) -> Tensor:
        if self.keys.equal_zeros and place is not None:
            return gather(b, self.source, self.dim, place)
        return key.with_value(self.keys.value(key.value), self.source.dtype)

    def _positions(self, key: Tensor, place: Tensor | None) -> Tensor:
        if place is not None:
            return place
        return key.with_value(self.keys.position(key.value) if self.keys.low else vs.const(0, I64), I64)


def sorted_rows(b: Builder, x: Tensor, dim: int, descending: bool, positions: bool) -> SortedRows | None:
    """The rows along a dimension in order, with or without positions; None where kernels do not sort such rows."""
    length = x.sizes[dim].as_int() if x.rank else None
    if length is None or not b.sorts_rows(x.device, length):
        return None
    x, dim = rounded(x), axis(dim, x.rank)
    keys = _keys(b, x, descending, positions, length)
    if keys is None or (keys.dtype.itemsize > 4 and length > MOST_WIDE):
        return None
    if keys.equal_zeros:
        x = b.realize(x)
    position = vs.cast(vs.index_value(x.indices[dim]), keys.dtype)
    integers = x.with_value(keys.of(x.value, position), keys.dtype)
    found = b.scan("stable_sort" if positions and not keys.low else "sort", integers, dim)
    return SortedRows(x, dim, keys, found[0], found[1] if len(found) > 1 else None)


def _keys(b: Builder, x: Tensor, descending: bool, positions: bool, length: int) -> Keys | None:
    if not positions or x.dtype not in (I32, *LONG):
        return keys_of(x.dtype, descending, positions, length)
    if x.dtype is torch.float64:
        return Keys(x.dtype, I64, 0, descending, length, equal_zeros=True)
    low, high = b.range_of(x)  # that of the positions of another sort, for one
    fits = [bits for bits in (LOW_OF_SHORT, LOW_OF_WORD) if -(1 << bits - 1) <= low and high < 1 << bits - 1]
    if LOW_OF_SHORT in fits and 2 * length <= 1 << LOW_OF_SHORT:
        return Keys(x.dtype, I32, LOW_OF_SHORT, descending, length)
    return Keys(x.dtype, I64, LOW_OF_WORD if fits or x.dtype is I32 else 0, descending, length)
