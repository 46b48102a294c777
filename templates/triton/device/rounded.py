"""Division and square roots of float32, correctly rounded, four elements at a time.

The assembler writes each of them as a short way and a branch to a long one. The branch keeps it from mixing the ways of several
elements, so each waits for the one before; and zeros, of which masks and gradients are full, take the long way in a division.
Here four elements share a branch, which none takes whose divisor and quotient are in range. The short way is the assembler's:
a reciprocal, one step of Newton's, and the quotient corrected by its exact remainder (Markstein 1990). The remainder of a
numerator below 2^-100 is not exact: its quotient may be off by the last bit.
"""

from __future__ import annotations

from typing import Any

from triton.language import core

# Elements at a time. A thread may have fewer.
FEW = 4
# 2^126, 2^-126, 2^-100, and the first number that is none.
LARGE, SMALL, SMALL_SQUARE, INFINITE = "0f7E800000", "0f00800000", "0f0D800000", "0f7F800000"

_RECIPROCAL = (
    "rcp.approx.ftz.f32 r, {b}; neg.f32 n, {b}; fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 r, r, e, r; "
)  # fmt: skip
_QUOTIENT = (
    _RECIPROCAL + "mul.rn.f32 q, {a}, r; fma.rn.f32 e, n, q, {a}; fma.rn.f32 e, r, e, q; copysign.f32 {made}, q, e; "
    f"abs.f32 q, q; abs.f32 n, {{b}}; setp.lt.and.f32 p, q, {LARGE}, p; setp.lt.and.f32 p, n, {LARGE}, p; "
)  # fmt: skip
_INVERSE = (
    _RECIPROCAL + "fma.rn.f32 e, n, r, 0f3F800000; fma.rn.f32 {made}, r, e, r; "
    f"abs.f32 r, r; setp.lt.and.f32 p, r, {LARGE}, p; setp.gt.and.f32 p, r, {SMALL}, p; "
)  # fmt: skip
_ROOT = (
    "rsqrt.approx.ftz.f32 r, {a}; mul.rn.f32 q, {a}, r; mul.rn.f32 r, r, 0f3F000000; neg.f32 n, q; "
    "fma.rn.f32 e, n, q, {a}; fma.rn.f32 {made}, e, r, q; "
    f"setp.gt.and.f32 p, {{a}}, {SMALL_SQUARE}, p; setp.lt.and.f32 p, {{a}}, {INFINITE}, p; "
)  # fmt: skip


def _text(short: str, long: str, arguments: int) -> tuple[str, str]:
    """The assembly of FEW elements, and its constraints."""
    registers = [{"made": f"m{k}", "a": f"${FEW + k}", "b": f"${2 * FEW + k}"} for k in range(FEW)]
    lines = [
        ".reg .pred p; .reg .f32 r, n, e, q, m0, m1, m2, m3; setp.eq.u32 p, 0, 0; ",
        *(short.format(**named) for named in registers),
        "@p bra done; ",
        *(long.format(**named) for named in registers),
        "done: ",
        *(f"mov.f32 ${k}, m{k}; " for k in range(FEW)),
    ]
    return f"{{ {''.join(lines)}}}", ",".join(["=f"] * FEW + ["f"] * (FEW * arguments))


_DIVIDE = _text(_QUOTIENT, "div.rn.f32 {made}, {a}, {b}; ", 2)
_INVERT = _text(_INVERSE.replace("{b}", "{a}"), "rcp.rn.f32 {made}, {a}; ", 1)
_TAKE_ROOT = _text(_ROOT, "sqrt.rn.f32 {made}, {a}; ", 1)


def _made(text: tuple[str, str], arguments: list[Any], _semantic: Any) -> Any:
    return core.inline_asm_elementwise(*text, arguments, core.float32, is_pure=True, pack=FEW, _semantic=_semantic)


@core.extern
def quotients(a: Any, b: Any, _semantic: Any = None) -> Any:
    """a / b of tiles of at least FEW elements."""
    return _made(_DIVIDE, [a, b], _semantic)


@core.extern
def inverses(x: Any, _semantic: Any = None) -> Any:
    """1 / x of a tile of at least FEW elements."""
    return _made(_INVERT, [x], _semantic)


@core.extern
def roots(x: Any, _semantic: Any = None) -> Any:
    """The square roots of a tile of at least FEW elements."""
    return _made(_TAKE_ROOT, [x], _semantic)
