"""Prologues in 16 bits: whole numbers of few digits, and multiplications of two numbers, which are rounded there as in float32.

A number of 4 bits that is unpacked, converted to float32, multiplied by a scale and rounded takes 14 instructions. Weights of
4 bits arrive faster. In 16 bits an instruction makes two numbers, and one conversion takes four bytes.
"""

from __future__ import annotations

import torch

from kgen.ir.ranges import range_of
from kgen.ir.values import Value
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.codegen.tile import TileEmitter

HALVES = (torch.bfloat16, torch.float16)
BYTES = (torch.int8, torch.uint8)
# The greatest whole number that fits beside a power of two in the narrowest of these types, and the most that is taken from
# such numbers: differences are exact.
SMALL, MOST_LESS = 127, 128


def of_halves(emitter: TileEmitter, value: Value, dtype: torch.dtype) -> str | None:
    """A tile of 16-bit floats that needs no wider ones on the way: numbers that have few enough digits as they are, and
    multiplications of two of them, which are rounded once there as here."""
    if dtype not in HALVES:
        return None
    if value.op != "mul":
        return _in_few_digits(emitter, value, dtype)
    factors = [_in_few_digits(emitter, one, dtype) for one in value.args]
    return None if None in factors else f"lib.multiply_halves({', '.join(map(str, factors))})"


def _in_few_digits(emitter: TileEmitter, value: Value, dtype: torch.dtype) -> str | None:
    kind = TRITON_TYPES[dtype].storage
    small = _small(value)
    if small is not None:
        whole, less = small
        return f"lib.small_number({_byte(emitter, whole)}, {kind}, {less})"
    if value.op == "cast" and value.args[0].dtype in BYTES:
        return f"lib.cast({emitter.emit(value.args[0])}, {kind})"
    if value.op == "load" and value.attr[2] == dtype:
        return f"({emitter.emit(value)}).to({kind})"
    return None


def _small(value: Value) -> tuple[Value, int] | None:
    """A whole number between 0 and SMALL, and the constant that `value` is less than that."""
    less = 0
    while value.op in ("cast", "add", "sub"):
        constant = _constant(value)
        if constant is None or abs(less + constant) > MOST_LESS or not _keeps(value, constant):
            break
        less, value = less + constant, value.args[0]
    low, high = range_of(value)
    return (value, less) if low >= 0 and high <= SMALL else None


def _constant(value: Value) -> int | None:
    """What an operation takes from its first argument, where that is a whole number."""
    if value.op == "cast":
        return 0
    number = value.args[1]
    if number.op != "const" or isinstance(number.attr, complex) or not abs(number.attr) <= MOST_LESS:
        return None
    less = int(number.attr) if value.op == "sub" else -int(number.attr)
    return less if abs(less) == abs(number.attr) else None


def _keeps(value: Value, less: int) -> bool:
    """Whether an operation has the exact result: a type of whole numbers wraps. What becomes a float is looked at in the end,
    for differences of small numbers are exact in any type."""
    [source, *_] = value.args
    if torch.bool in (source.dtype, value.dtype):
        return False
    if value.dtype.is_floating_point:
        return True
    if source.dtype.is_floating_point:
        return False
    low, high = range_of(source)
    kind = torch.iinfo(value.dtype)
    return kind.min <= low - less and high - less <= kind.max


def _byte(emitter: TileEmitter, value: Value) -> str:
    """The text of a small number as a byte. Bits of bytes are taken of four at a time."""
    found = _bits(value)
    if found is None:
        return f"({emitter.emit(value)}).to(tl.uint8)"
    source, shift, mask = found
    return f"lib.bits_of_bytes({emitter.emit(source)}, {shift}, {mask})"


def _bits(value: Value) -> tuple[Value, int, int] | None:
    """The byte, the shift and the mask of `(byte >> shift) & mask`, where no bit of the sign comes in."""
    mask = 255
    if value.op == "bitand" and value.args[1].op == "const":
        value, mask = value.args[0], int(value.args[1].attr)
    shift = 0
    if value.op == "shr" and value.args[1].op == "const":
        value, shift = value.args[0], int(value.args[1].attr)
    if value.dtype not in BYTES or not 0 <= shift < 8:
        return None
    room = 255 >> shift
    if mask > room and value.dtype is not torch.uint8:
        return None
    return value, shift, mask & room
