"""Numbers of 8 bits as floats, and multiplications of 16-bit floats, two or four at a time.

The conversion instruction of an SM makes 16 floats in a cycle, and weights of 8 bits arrive faster. Instead a byte takes its
place in the digits of a power of two, between which and the next one whole numbers are neighbours, and that power is taken away
again. All of it is exact.
"""

from __future__ import annotations

import struct
from typing import Any

import triton.language as tl
from triton.language import core

# Of 2^23 in float32, of 2^10 in two float16, of 2^7 in two bfloat16: the bits.
TWO_23, TWO_10, TWO_7 = 0x4B000000, 0x64646464, 0x43004300
TWO_7_BYTES = 0x43434343
# Signed bytes with their sign turned are larger by 128, and none is below zero.
TURNED = "xor.b32 x, {x}, 0x80808080; "


def _float32(signed: bool) -> str:
    less = TWO_23 + 128 if signed else TWO_23
    lines = [f"prmt.b32 p, x, {TWO_23}, {0x7440 + k}; sub.f32 ${k}, p, 0f{less:08X}; " for k in range(4)]
    return (TURNED.format(x="$4") if signed else "mov.b32 x, $4; ") + "".join(lines)


def _float16(signed: bool) -> str:
    less = 0xE480E480 if signed else 0xE400E400  # -1152, -1024
    lines = [
        f"prmt.b32 p, x, {TWO_10}, {selected}; fma.rn.f16x2 ${k}, p, one, less; " for k, selected in enumerate((0x4140, 0x4342))
    ]
    start = TURNED.format(x="$2") if signed else "mov.b32 x, $2; "
    return f"{start}mov.b32 one, 0x3C003C00; mov.b32 less, {less}; " + "".join(lines)


def _bfloat16(signed: bool) -> str:
    """Seven bits beside 2^7, and the eighth one, which makes 2^8 of it. Of a signed number the latter is taken from the former;
    an unsigned one is their sum less 2^8, which is taken from the former before: then every step is exact."""
    lines = []
    for k, selected in enumerate((0x4140, 0x4342)):
        lines.append(f"prmt.b32 p, bytes, 0, {selected}; ")
        lines.append(f"lop3.b32 x, p, 0x007F007F, {TWO_7}, 0xEA; lop3.b32 y, p, 0x00800080, {TWO_7}, 0xEA; ")
        if not signed:
            lines.append("fma.rn.bf16x2 x, x, one, less; ")
        lines.append(f"fma.rn.bf16x2 ${k}, y, {'less' if signed else 'one'}, x; ")
    less = 0xBF80BF80 if signed else 0xC380C380  # -1, -256
    # a register of its own, for those that are written may be those that are read
    return f"mov.b32 bytes, $2; mov.b32 one, 0x3F803F80; mov.b32 less, {less}; " + "".join(lines)


# Elements at a time. Triton takes no tile of fewer, such as a row's only column.
BYTES, HALVES = 4, 2
MAKES = {tl.float32: (_float32, "=f,=f,=f,=f,r"), tl.float16: (_float16, "=r,=r,r"), tl.bfloat16: (_bfloat16, "=r,=r,r")}
SHORT = {tl.float16: "f16", tl.bfloat16: "bf16"}


def _bits_of_bfloat16(more: int) -> int:
    """Of more - 2^7."""
    return struct.unpack("<I", struct.pack("<f", more - 2.0**7))[0] >> 16


def _bits_of_float16(more: int) -> int:
    """Of more - 2^10."""
    return struct.unpack("<H", struct.pack("<e", more - 2.0**10))[0]


# The digits of a power of two, and the bits of 1 and of a number less that power.
SMALL = {tl.float16: (TWO_10, 0x3C00, _bits_of_float16), tl.bfloat16: (TWO_7_BYTES, 0x3F80, _bits_of_bfloat16)}
INSTRUCTION = {tl.float16: "fma.rn.f16x2", tl.bfloat16: "fma.rn.bf16x2"}


@core.extern
def float_of_byte(x: Any, to: Any, _semantic: Any = None) -> Any:
    """int8 or uint8 to a float: tiles to floats of 16 or 32 bits by their digits."""
    to = core._unwrap_if_constexpr(to)
    if to not in MAKES or x.numel.value < BYTES:
        return x.to(to, _semantic=_semantic)
    make, constraints = MAKES[to]
    text = f"{{ .reg .b32 bytes, x, y, p, one, less; {make(x.dtype == tl.int8)}}}"
    return core.inline_asm_elementwise(text, constraints, [x], to, is_pure=True, pack=BYTES, _semantic=_semantic)


@core.extern
def multiply_halves(a: Any, b: Any, _semantic: Any = None) -> Any:
    """a b of tiles of 16-bit floats of one type, rounded once, as a multiplication in float32 is when it is rounded: that one
    is exact. It is a b - 0, for bfloat16 has no multiplication of its own before Hopper."""
    if a.numel.value * b.numel.value < HALVES:
        return a.to(tl.float32, _semantic=_semantic).__mul__(b, _semantic=_semantic).to(a.dtype, _semantic=_semantic)
    text = f"{{ .reg .b32 zero; mov.b32 zero, 0x80008000; {INSTRUCTION[a.dtype]} $0, $1, $2, zero; }}"
    return core.inline_asm_elementwise(text, "=r,r,r", [a, b], a.dtype, is_pure=True, pack=HALVES, _semantic=_semantic)


@core.extern
def to_halves(x: Any, to: Any, _semantic: Any = None) -> Any:
    """float32 to 16-bit floats. One by one the conversion is as slow as a special function."""
    to = core._unwrap_if_constexpr(to)
    if x.numel.value < HALVES:
        return x.to(to, _semantic=_semantic)
    text = f"cvt.rn.{SHORT[to]}x2.f32 $0, $2, $1;"
    return core.inline_asm_elementwise(text, "=r,f,f", [x], to, is_pure=True, pack=HALVES, _semantic=_semantic)


@core.extern
def bits_of_bytes(x: Any, shift: Any, mask: Any, _semantic: Any = None) -> Any:
    """(x >> shift) & mask of int8 or uint8, where the mask leaves none of the bits that a shift brings in."""
    shift, mask = core._unwrap_if_constexpr(shift), core._unwrap_if_constexpr(mask)
    if x.numel.value < BYTES:
        return x.__rshift__(shift, _semantic=_semantic).__and__(mask, _semantic=_semantic).to(core.uint8, _semantic=_semantic)
    text = f"{{ .reg .b32 x; shr.b32 x, $1, {shift}; and.b32 $0, x, {mask * 0x01010101}; }}"
    return core.inline_asm_elementwise(text, "=r,r", [x], core.uint8, is_pure=True, pack=BYTES, _semantic=_semantic)


@core.extern
def small_number(x: Any, to: Any, less: Any, _semantic: Any = None) -> Any:
    """x - less for bytes below 128, as 16-bit floats: x beside the digits of 2^7 or 2^10, from which both numbers are taken."""
    to, less = core._unwrap_if_constexpr(to), core._unwrap_if_constexpr(less)
    if x.numel.value < BYTES:
        return x.to(tl.float32, _semantic=_semantic).__sub__(less, _semantic=_semantic).to(to, _semantic=_semantic)
    digits, one, bits = SMALL[to]
    lines = (f"prmt.b32 p{k}, $2, {digits}, {selected}; " for k, selected in enumerate((0x4140, 0x4342)))
    both = (f"fma.rn.{SHORT[to]}x2 ${k}, p{k}, one, less; " for k in range(2))
    constants = f"mov.b32 one, {one * 0x10001}; mov.b32 less, {bits(-less) * 0x10001}; "
    text = f"{{ .reg .b32 p0, p1, one, less; {''.join(lines)}{constants}{''.join(both)}}}"
    return core.inline_asm_elementwise(text, "=r,=r,r", [x], to, is_pure=True, pack=BYTES, _semantic=_semantic)
