"""Repairs of PTX that ptxas would assemble wrongly. Compiler processes import it: it must import neither torch nor Triton."""

from __future__ import annotations

import re

_PACKED = re.compile(r"\badd\.[su]16x2[ \t]+(%\w+),[ \t]*([%\w-]+),[ \t]*([%\w-]+);")
_HALVES = (
    r"{ .reg .b16 kg_al, kg_ah, kg_bl, kg_bh; .reg .b32 kg_a, kg_b; mov.b32 kg_a, \2; mov.b32 kg_b, \3;"
    r" mov.b32 {kg_al, kg_ah}, kg_a; mov.b32 {kg_bl, kg_bh}, kg_b;"
    r" add.s16 kg_al, kg_al, kg_bl; add.s16 kg_ah, kg_ah, kg_bh; mov.b32 \1, {kg_al, kg_ah}; }"
)
_LEFT = re.compile(r"^.*(?:\badd\.(?:\w+\.)*[su]16x2\b|@!?%?\w+\s+\{ \.reg \.b16 kg_al).*$", re.MULTILINE)


def with_scalar_adds(ptx: str) -> str:
    """The module with each packed 16-bit addition as two scalar ones.

    For sm_90, ptxas 12.8 to 13.1 drops the constant of `add.s16x2` where only one half of the result is used: it assembles
    `VIADD.16x2 R, R, 0x0`. LLVM packs the bounds checks of padded convolutions so, whose last rows were wrong.

    Raises ValueError for a packed addition in a form that is not known, such as one under a predicate."""
    repaired = _PACKED.sub(_HALVES, ptx) if "16x2" in ptx else ptx
    left = _LEFT.search(repaired)
    if left is not None:
        raise ValueError(f"a packed addition in a form that is not known: {left[0].strip()}")
    return repaired
