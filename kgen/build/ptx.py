"""Repairs of PTX that ptxas would assemble wrongly. Compiler processes import it: it must import neither torch nor Triton."""

from __future__ import annotations

import re
from collections import Counter

_PACKED = re.compile(r"\badd\.[su]16x2[ \t]+(%\w+),[ \t]*([%\w-]+),[ \t]*([%\w-]+);")
_HALVES = (
    r"{ .reg .b16 kg_al, kg_ah, kg_bl, kg_bh; .reg .b32 kg_a, kg_b; mov.b32 kg_a, \2; mov.b32 kg_b, \3;"
    r" mov.b32 {kg_al, kg_ah}, kg_a; mov.b32 {kg_bl, kg_bh}, kg_b;"
    r" add.s16 kg_al, kg_al, kg_bl; add.s16 kg_ah, kg_ah, kg_bh; mov.b32 \1, {kg_al, kg_ah}; }"
)
_LEFT = re.compile(r"^.*(?:\badd\.(?:\w+\.)*[su]16x2\b|@!?%?\w+\s+\{ \.reg \.b16 kg_al).*$", re.MULTILINE)

# An operator, and the register that it writes; those whose numbers have 14 bits, and those that such a number is widened to.
_WRITTEN = re.compile(r"^[ \t]*(?:@!?%\w+[ \t]+)?([a-z]\w*)[\w.:]*[ \t]+(%\w+),", re.MULTILINE)
_NARROW = re.compile(r"^[ \t]*(?:and\.b32[ \t]+(%\w+), %\w+, 16383|bfe\.u32[ \t]+(%\w+), %\w+, \d+, 14);", re.MULTILINE)
_WIDENED = re.compile(r"^[ \t]*cvt\.u64\.u32[ \t]+(%\w+), (%\w+);", re.MULTILINE)
_OFFSET = re.compile(r"\b(add\.s|or\.b)64[ \t]+(%\w+), (%\w+), (-?\d+);")
_HALF = (1 << 32) - 1

# Two halves of a register, and integer operators that may have made it.
_UNPACKED = re.compile(r"\bmov\.b32[ \t]+\{(%\w+), (%\w+)\}, (%\w+);")
_INTEGER = frozenset(
    ("and", "or", "xor", "not", "lop3", "shl", "shr", "add", "sub", "mul", "mad", "bfe", "bfi", "prmt", "selp")
)


def repaired(ptx: str) -> str:
    """The module without what ptxas is known to assemble wrongly. Raises ValueError for what cannot be replaced."""
    return with_shifted_halves(with_short_descriptors(with_scalar_adds(ptx)))


def with_shifted_halves(ptx: str) -> str:
    """The module with the upper half of a register of two 16-bit integers taken by a shift.

    For sm_90, ptxas 12.8 reads another uniform register for it where the two are the same for all threads: LLVM packs pairs of
    16-bit indices, and the warps of one group stored their half of each tile somewhere else, or nowhere. Registers that are
    loaded, or hold two floats, are not uniform and stay as they are."""
    if _UNPACKED.search(ptx) is None:
        return ptx
    makers: dict[str, set[str]] = {}
    for operator, register in _WRITTEN.findall(ptx):
        makers.setdefault(register, set()).add(operator)

    def shifted(found: re.Match[str]) -> str:
        lower, upper, both = found.groups()
        if not makers.get(both, {""}) <= _INTEGER:
            return found[0]
        return (
            f"{{ .reg .b32 kg_upper; shr.u32 kg_upper, {both}, 16; cvt.u16.u32 {lower}, {both};"
            f" cvt.u16.u32 {upper}, kg_upper; }}"
        )

    return _UNPACKED.sub(shifted, ptx)


def with_short_descriptors(ptx: str) -> str:
    """The module with descriptors of shared memory whose halves are made apart from each other: the lower one by an addition of
    32 bits, which cannot carry, the upper one a constant.

    For sm_90, ptxas 12.8 takes the wrong uniform registers for some additions of 64 bits to an address of 14 bits: those of
    another operand, or what other warps of a program have computed. The MMA then reads outside of shared memory, or the wrong
    tile."""
    if "wgmma" not in ptx:
        return ptx
    writes = Counter(register for _, register in _WRITTEN.findall(ptx))
    narrow = {one or other for one, other in _NARROW.findall(ptx)}
    source = {wide: one for wide, one in _WIDENED.findall(ptx) if one in narrow and writes[one] == writes[wide] == 1}

    def short(found: re.Match[str]) -> str:
        kind, made, address, number = found.groups()
        upper, lower = divmod(int(number) & ((1 << 64) - 1), 1 << 32)
        if address not in source or lower + (1 << 14) > _HALF:
            return found[0]
        return (
            f"{{ .reg .b32 kg_lower; {kind}32 kg_lower, {source[address]}, {lower}; mov.b64 {made}, {{kg_lower, {upper}}}; }}"
        )

    return _OFFSET.sub(short, ptx)


def with_scalar_adds(ptx: str) -> str:
    """The module with each packed 16-bit addition as two scalar ones.

    For sm_90, ptxas 12.8 to 13.1 drops the constant of `add.s16x2` where only one half of the result is used: it assembles
    `VIADD.16x2 R, R, 0x0`. LLVM packs the bounds checks of padded convolutions so, whose last rows were wrong.

    Raises ValueError for a packed addition in a form that is not known, such as one under a predicate."""
    made = _PACKED.sub(_HALVES, ptx) if "16x2" in ptx else ptx
    left = _LEFT.search(made)
    if left is not None:
        raise ValueError(f"a packed addition in a form that is not known: {left[0].strip()}")
    return made
