"""Sorting of rows of a few elements by a network of comparisons, which is arithmetic: it fuses with what makes the rows and
with its readers, and of an element that is read alone, such as a median, the comparisons that it does not need are gone.

The network is Batcher's odd-even merge sort (K. E. Batcher, "Sorting networks and their applications", 1968) of the next power
of two, without the comparators that reach past the row. It compares integers that order as the elements do (`Keys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.concat import chosen, joined
from kgen.lowering.sort_keys import Keys, along_last, keys_of
from kgen.lowering.tensor import Tensor, at, indices, rounded
from kgen.lowering.views import axis, unsqueeze

__all__ = ["MOST_ELEMENTS", "Network", "comparators", "network_of"]

I32, I64 = torch.int32, torch.int64
# Elements of a row, which registers hold with the integers that stand for them.
MOST_ELEMENTS = 16
# What the elements of a row may cost, in additions, to be computed where they are compared.
MOST_COST = 256


def comparators(length: int) -> Iterator[tuple[int, int]]:
    """Pairs of ranks, in order: the smaller element goes to the first one."""
    whole = 1 << max(0, length - 1).bit_length()
    part = 1
    while part < whole:
        step = part
        while step:
            for begin in range(step % part, whole - step, 2 * step):
                for k in range(min(step, whole - begin - step)):
                    first, second = begin + k, begin + k + step
                    if first // (2 * part) == second // (2 * part) and second < length:
                        yield first, second
            step //= 2
        part *= 2


@dataclass(frozen=True, slots=True)
class Network:
    """Rows along the last dimension of a tensor, and the sorted keys of one row at `rows`' other indices."""

    rows: Tensor
    keys: Keys
    order: tuple[Value, ...]

    def value(self, rank: int) -> Tensor:
        """The element of each row that has a rank."""
        return self._tensor(self.keys.value(self.order[rank]), self.rows.dtype)

    def position(self, rank: int) -> Tensor:
        return self._tensor(self.keys.position(self.order[rank]), I64)

    def first_nan(self) -> Tensor:
        """The position of the first NaN of each row, an int32; their number where there is none."""
        none = vs.const(len(self.order), I32)
        found = [vs.where(vs.call("isnan", v), vs.const(k, I32), none) for k, v in enumerate(_elements(self.rows))]
        return self._tensor(reduce(partial(vs.call, "minimum"), found), I32)

    def _tensor(self, value: Value, dtype: torch.dtype) -> Tensor:
        sizes = self.rows.sizes[:-1]
        names = dict(zip(indices(self.rows.sizes)[:-1], indices(sizes), strict=True))
        mapping = {atom: index for old, index in names.items() for atom in ix.free_atoms(old)}
        return Tensor(sizes, dtype, self.rows.device, vs.substitute(value, mapping))

    def stacked(self, b: Builder, parts: Sequence[Tensor], dim: int, one_by_one: bool) -> Tensor:
        """Elements of all ranks along a dimension. Where they are read `one_by_one`, they are not stored for that."""
        if one_by_one:
            return chosen(parts, dim)
        return joined(b, [unsqueeze(b, part, dim) for part in parts], dim)


def network_of(b: Builder, x: Tensor, dim: int, descending: bool, positions: bool) -> Network | None:
    """The network that sorts a tensor along a dimension, with or without positions; None where rows are too long, or numbers
    have no such keys."""
    length = x.sizes[dim].as_int() if x.rank else None
    if length is None or not 1 < length <= MOST_ELEMENTS or not b.sorts_in_registers():
        return None
    keys = keys_of(x.dtype, descending, positions, length) if x.dtype is not torch.float64 else None
    if keys is None:
        return None
    rows = along_last(rounded(x), axis(dim, x.rank))
    if vs.total_cost(_elements(rows)) > MOST_COST:
        rows = along_last(b.realize(rounded(x)), axis(dim, x.rank))
    order = [keys.of(value, vs.const(k, keys.dtype)) for k, value in enumerate(_elements(rows))]
    for first, second in comparators(length):
        pair = order[first], order[second]
        order[first], order[second] = vs.call("minimum", *pair), vs.call("maximum", *pair)
    return Network(rows, keys, tuple(order))


def _elements(rows: Tensor) -> list[Value]:
    lead = indices(rows.sizes)[:-1]
    return [at(rows, (*lead, ix.constant(k))) for k in range(rows.sizes[-1].as_int() or 0)]
