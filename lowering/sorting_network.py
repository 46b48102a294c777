"""Sorting of rows of a few elements by a network of comparisons, which is arithmetic: it fuses with what makes the rows and
with its readers, and of an element that is read alone, such as a median, the comparisons that it does not need are gone.

The network is Batcher's odd-even merge sort (K. E. Batcher, "Sorting networks and their applications", 1968) of the next power
of two, without the comparators that reach past the row. It compares integers that order as the elements do. Where positions
are read, or equal elements have to keep their order, each integer also has its element's position in its low bits, and whether
that is a negative zero, which orders as the other zero does. A NaN comes after all numbers.
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
from kgen.lowering.tensor import Tensor, at, indices, rounded
from kgen.lowering.top_k import RANKED, along_last, rank_of, value_of_rank
from kgen.lowering.views import axis, unsqueeze

__all__ = ["MOST_ELEMENTS", "Network", "comparators", "network_of"]

I32, I64 = torch.int32, torch.int64
# Elements of a row, which registers hold with the integers that stand for them.
MOST_ELEMENTS = 16
# What the elements of a row may cost, in additions, to be computed where they are compared.
MOST_COST = 256
# 16-bit floating-point numbers leave these low bits of a float32 unused, integers of 16 bits half of an int32. A position and
# the bit of a negative zero need five.
LOW_OF_HALF, LOW_OF_SHORT, LOW_OF_WORD = 13, 16, 32
HALVES, SHORTS = (torch.float16, torch.bfloat16), (torch.int8, torch.int16, torch.uint8, torch.bool)


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
class Keys:
    """Integers of a type that order as elements do, with `low` bits for positions; 0: they have none."""

    dtype: torch.dtype
    low: int
    descending: bool

    def of(self, value: Value, element: torch.dtype, position: int) -> Value:
        """The key of an element of a row."""
        floating = value.dtype.is_floating_point
        zero = vs.call("eq", value, vs.const(0.0, value.dtype)) if floating and self.low else None
        if floating:
            rank = rank_of(value if zero is None else vs.where(zero, vs.const(0.0, value.dtype), value))
        else:
            rank = vs.cast(value, self.dtype if element in (I32, I64) else I32)
        rank = vs.call("invert", rank) if self.descending else rank
        if not self.low:
            return rank
        low = vs.const(2 * position, self.dtype)
        if zero is not None:
            negative = vs.call("and", zero, vs.call("lt", vs.bitcast(value, I32), vs.const(0, I32)))
            low = vs.where(negative, vs.const(2 * position + 1, self.dtype), low)
        return vs.call("bitor", self._high(rank, element), low)

    def _high(self, rank: Value, element: torch.dtype) -> Value:
        """The rank in the high bits alone."""
        if element in HALVES:
            return vs.call("bitand", rank, vs.const(-1 << self.low, I32))
        return vs.call("shl", vs.cast(rank, self.dtype), vs.const(self.low, self.dtype))

    def value(self, key: Value, element: torch.dtype) -> Value:
        """The element that has a key."""
        rank = key
        if self.low and element not in HALVES:
            rank = vs.cast(vs.call("shr", key, vs.const(self.low, self.dtype)), I32)
        rank = vs.call("invert", rank) if self.descending else rank
        if not element.is_floating_point:
            return vs.cast(rank, element)
        if not self.low:
            return value_of_rank(rank)
        number = value_of_rank(rank)
        if element in HALVES:
            bits = vs.call("bitand", vs.bitcast(number, I32), vs.const(-1 << self.low, I32))
            number = vs.bitcast(bits, torch.float32)
        negative = vs.call("ne", vs.call("bitand", key, vs.const(1, self.dtype)), vs.const(0, self.dtype))
        return vs.where(negative, vs.const(-0.0, torch.float32), number)

    def position(self, key: Value) -> Value:
        """The position of the element that has a key."""
        low = vs.call("bitand", key, vs.const(2 * MOST_ELEMENTS - 1, self.dtype))
        return vs.cast(vs.call("shr", low, vs.const(1, self.dtype)), I64)


@dataclass(frozen=True, slots=True)
class Network:
    """Rows along the last dimension of a tensor, and the sorted keys of one row at `rows`' other indices."""

    rows: Tensor
    keys: Keys
    order: tuple[Value, ...]

    def value(self, rank: int) -> Tensor:
        """The element of each row that has a rank."""
        return self._tensor(self.keys.value(self.order[rank], self.rows.dtype), self.rows.dtype)

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
    keys = _keys(x.dtype, descending, positions)
    if length is None or not 1 < length <= MOST_ELEMENTS or keys is None or not b.sorts_in_registers(x.device):
        return None
    rows = along_last(rounded(x), axis(dim, x.rank))
    if vs.total_cost(_elements(rows)) > MOST_COST:
        rows = along_last(b.realize(rounded(x)), axis(dim, x.rank))
    order = [keys.of(value, x.dtype, k) for k, value in enumerate(_elements(rows))]
    for first, second in comparators(length):
        pair = order[first], order[second]
        order[first], order[second] = vs.call("minimum", *pair), vs.call("maximum", *pair)
    return Network(rows, keys, tuple(order))


def _elements(rows: Tensor) -> list[Value]:
    lead = indices(rows.sizes)[:-1]
    return [at(rows, (*lead, ix.constant(k))) for k in range(rows.sizes[-1].as_int() or 0)]


def _keys(dtype: torch.dtype, descending: bool, positions: bool) -> Keys | None:
    if not positions:
        return Keys(I64 if dtype is I64 else I32, 0, descending) if dtype in (*RANKED, I64) else None
    if dtype in HALVES:
        return Keys(I32, LOW_OF_HALF, descending)
    if dtype in SHORTS:
        return Keys(I32, LOW_OF_SHORT, descending)
    return Keys(I64, LOW_OF_WORD, descending) if dtype in RANKED else None
