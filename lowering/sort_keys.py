"""Integers that order as the elements of rows do, so that sorting is sorting integers.

Where positions are read, or equal elements have to keep their order, each integer also has its element's position in its low
bits, and whether that is a negative zero, which orders as the other zero does. A NaN comes after all numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.tensor import Tensor, reindex

__all__ = ["RANKED", "Keys", "along_last", "keys_of", "rank_of", "value_of_rank"]

I32, I64 = torch.int32, torch.int64
# Types whose values have a rank of 32 bits.
RANKED = (
    torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
# 16-bit floating-point numbers leave these low bits of a float32 unused, integers of 16 bits half of an int32.
LOW_OF_HALF, LOW_OF_SHORT, LOW_OF_WORD = 13, 16, 32
HALVES, SHORTS = (torch.float16, torch.bfloat16), (torch.int8, torch.int16, torch.uint8, torch.bool)
# Types whose integers have no room for a position.
LONG = (torch.int64, torch.float64)


@dataclass(frozen=True, slots=True)
class Keys:
    """Integers of a type for elements of a type, with `low` bits for positions below `length`; 0: they have none. Those of
    `equal_zeros` do not tell zeros of both signs apart, though they have no room for a position."""

    element: torch.dtype
    dtype: torch.dtype
    low: int
    descending: bool
    length: int
    equal_zeros: bool = False

    def of(self, value: Value, position: Value) -> Value:
        """The key of an element at a position, which has the key's type."""
        floating = value.dtype.is_floating_point
        zero = vs.call("eq", value, vs.const(0.0, value.dtype)) if floating and (self.low or self.equal_zeros) else None
        if floating:
            rank = rank_of(value if zero is None else vs.where(zero, vs.const(0.0, value.dtype), value))
        else:
            rank = vs.cast(value, self.dtype if self.element in (I32, I64) else I32)
        rank = vs.call("invert", rank) if self.descending else rank
        if not self.low:
            return rank
        low = vs.call("shl", position, vs.const(1, self.dtype))
        if zero is not None:
            negative = vs.call("and", zero, vs.call("lt", vs.bitcast(value, I32), vs.const(0, I32)))
            low = vs.call("bitor", low, vs.cast(negative, self.dtype))
        return vs.call("bitor", self._high(rank), low)

    def _high(self, rank: Value) -> Value:
        """The rank in the high bits alone."""
        if self.element in HALVES:
            return vs.call("bitand", rank, vs.const(-1 << self.low, I32))
        return vs.call("shl", vs.cast(rank, self.dtype), vs.const(self.low, self.dtype))

    def value(self, key: Value) -> Value:
        """The element that has a key."""
        rank = key
        if self.low and self.element not in HALVES:
            rank = vs.cast(vs.call("shr", key, vs.const(self.low, self.dtype)), I32)
        rank = vs.call("invert", rank) if self.descending else rank
        if not self.element.is_floating_point:
            return vs.cast(rank, self.element)
        number = value_of_rank(rank)
        if not self.low:
            return number
        if self.element in HALVES:
            bits = vs.call("bitand", vs.bitcast(number, I32), vs.const(-1 << self.low, I32))
            number = vs.bitcast(bits, torch.float32)
        negative = vs.call("ne", vs.call("bitand", key, vs.const(1, self.dtype)), vs.const(0, self.dtype))
        return vs.where(negative, vs.const(-0.0, torch.float32), number)

    def position(self, key: Value) -> Value:
        """The position of the element that has a key."""
        numbers = 1 << (self.length - 1).bit_length()
        low = vs.call("bitand", key, vs.const(2 * numbers - 1, self.dtype))
        return vs.cast(vs.call("shr", low, vs.const(1, self.dtype)), I64)


def keys_of(dtype: torch.dtype, descending: bool, positions: bool, length: int) -> Keys | None:
    """Keys of elements of a type; None where there are none, or they have no room for positions."""
    low, numbers = 0, 2 * length
    if not positions:
        kind = I64 if dtype in LONG else I32
        return Keys(dtype, kind, 0, descending, length) if dtype in (*RANKED, *LONG) else None
    if dtype in HALVES and numbers <= 1 << LOW_OF_HALF:
        kind, low = I32, LOW_OF_HALF
    elif dtype in SHORTS and numbers <= 1 << LOW_OF_SHORT:
        kind, low = I32, LOW_OF_SHORT
    elif dtype in RANKED and dtype not in HALVES:
        kind, low = I64, LOW_OF_WORD
    return Keys(dtype, kind, low, descending, length) if low else None


def rank_of(value: Value) -> Value:
    """The place of a float32 among all of them, as an int32, or of a float64, as an int64. Of negative numbers the other bits
    count backwards."""
    bits = vs.bitcast(value, I64 if value.dtype is torch.float64 else torch.int32)
    return vs.where(vs.call("isnan", value), _largest(bits), _folded(bits))


def _folded(bits: Value) -> Value:
    positive = vs.call("ge", bits, vs.const(0, bits.dtype))
    return vs.where(positive, bits, vs.call("bitxor", bits, _largest(bits)))


def _largest(bits: Value) -> Value:
    return vs.const(torch.iinfo(bits.dtype).max, bits.dtype)


def value_of_rank(rank: Value) -> Value:
    """The float32 or float64 that has a rank."""
    return vs.bitcast(_folded(rank), torch.float64 if rank.dtype is I64 else torch.float32)


def along_last(x: Tensor, dim: int) -> Tensor:
    """The rows along dimension `dim` as those along the last one."""
    rest = [k for k in range(x.rank) if k != dim]

    def where(*index: Expr) -> Sequence[Expr]:
        place = dict(zip((*rest, dim), index, strict=True))
        return [place[k] for k in range(x.rank)]

    return reindex(x, [x.sizes[k] for k in (*rest, dim)], where)
