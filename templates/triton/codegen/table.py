"""Scalar operations, reductions and scans as Triton text.

Every text is an expression to be filled with `format(*arguments)` and bound to a name; its arguments are names or `literal`s.
`lib` is `kgen.templates.triton.device.library`. Kernels are compiled with ``enable_fp_fusion=False``: a*b+c is never
contracted, but in multiplications whose results all have 16 bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from kgen.ir import ops


class TritonType(NamedTuple):
    """A pointer in a kernel's signature, the elements that it points to, and the type in which a kernel computes on them."""

    pointer: str
    storage: str
    compute: str


TRITON_TYPES: dict[torch.dtype, TritonType] = {
    torch.float32: TritonType("*fp32", "tl.float32", "tl.float32"),
    torch.float64: TritonType("*fp64", "tl.float64", "tl.float64"),
    torch.bfloat16: TritonType("*bf16", "tl.bfloat16", "tl.float32"),
    torch.float16: TritonType("*fp16", "tl.float16", "tl.float32"),
    torch.float8_e4m3fn: TritonType("*fp8e4nv", "tl.float8e4nv", "tl.float32"),
    torch.float8_e5m2: TritonType("*fp8e5", "tl.float8e5", "tl.float32"),
    torch.int8: TritonType("*i8", "tl.int8", "tl.int8"),
    torch.int16: TritonType("*i16", "tl.int16", "tl.int16"),
    torch.int32: TritonType("*i32", "tl.int32", "tl.int32"),
    torch.int64: TritonType("*i64", "tl.int64", "tl.int64"),
    torch.uint8: TritonType("*u8", "tl.uint8", "tl.uint8"),
    torch.uint16: TritonType("*u16", "tl.uint16", "tl.uint16"),
    torch.uint32: TritonType("*u32", "tl.uint32", "tl.uint32"),
    torch.uint64: TritonType("*u64", "tl.uint64", "tl.uint64"),
    torch.bool: TritonType("*i1", "tl.int1", "tl.int1"),
}

_UNARY = (
    "neg sign isinf signbit trunc round sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sigmoid"
    " sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc erfinv erfcx lgamma digamma"
    " i0 i0e i1 i1e ndtri log_ndtr bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1"
    " spherical_bessel_j0"
)
_BINARY = "maximum minimum fmax fmin floordiv truncdiv remainder fmod gcd ipow shl shr pow atan2 hypot copysign nextafter"
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "within": "&", "or": "|", "xor": "^", "bitand": "&", "bitor": "|", "bitxor": "^",
}  # fmt: skip

# Operation -> text.
TRITON_OPS: dict[str, str] = {
    **{name: f"lib.{name}({{0}})" for name in _UNARY.split()},
    **{name: f"lib.{name}({{0}}, {{1}})" for name in _BINARY.split()},
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _INFIX.items()},
    "truediv": "lib.divided({0}, {1})",
    "abs": "tl.abs({0})",
    "square": "{0} * {0}",
    "not": "~{0}",
    "invert": "~{0}",
    "isnan": "{0} != {0}",
    "floor": "lib.floor({0})",
    "ceil": "lib.ceil({0})",
    "where": "tl.where({0}, {1}, {2})",
    "fma": "tl.fma({0}, {1}, {2})",
}

# Whether this torch makes the largest float8_e4m3fn of what is larger; older ones make NaN.
_SATURATES = bool(torch.tensor(1000.0).to(torch.float8_e4m3fn).float().isfinite())
_OVERFLOW = "" if _SATURATES else ", saturate=False"

# float32 operations of values that end in 16 bits: the hardware's functions, exact to 2^-21 or better.
FAST_OPS: dict[str, str] = {
    "truediv": "{0} / {1}",
    "reciprocal": "1.0 / {0}",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "exp": "lib.fast_exp({0})",
    "exp2": "lib.approximate_exp2({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "sigmoid": "lib.fast_sigmoid({0})",
    "erf": "lib.fast_erf({0})",
    "tanh": "lib.fast_tanh({0})",
}

# Numbers between which neither they nor their reciprocals lose digits.
_ORDINARY = (2.0**-100, 2.0**100)


def division_by_number(dividend: str, number: float, exact: bool) -> str | None:
    """A float32 quotient by a number in a kernel's text, rounded as a division rounds it if `exact`; None of a number out of
    range. By a power of two it is a multiplication. Else the quotient by a reciprocal is corrected: one correction gives all
    digits where the number has few of its own, for no quotient is then close to the middle between two floats."""
    divisor = float(torch.tensor(number, dtype=torch.float32))
    size, (digits, _) = abs(divisor), math.frexp(divisor)
    if not _ORDINARY[0] < size < _ORDINARY[1]:
        return None
    reciprocal = float(torch.tensor(1.0 / size, dtype=torch.float32))
    if abs(digits) == 0.5 or not exact:
        return f"{dividend} * {literal(math.copysign(reciprocal, divisor), torch.float32)}"
    few = int(abs(digits) * 2**24) % 8 == 0
    signed = dividend if divisor > 0 else f"lib.neg({dividend})"
    return f"lib.divided_by_number({signed}, {size!r}, {reciprocal!r}, {1 if few else 2})"


def division_by_power(dividend: str, number: float) -> str | None:
    """A float64 quotient by a power of two as a multiplication, which gives the same bits; None of other numbers."""
    if math.isnan(number) or abs(math.frexp(number)[0]) != 0.5 or not _ORDINARY[0] < abs(number) < _ORDINARY[1]:
        return None
    return f"{dividend} * {literal(1.0 / number, torch.float64)}"


# The structural operations that are calls; `type` is a storage type for round_to and a compute type for the others. The
# emitter itself knows what const, index, load and assert mean.
STRUCTURAL: dict[str, str] = {
    "cast": "lib.cast({0}, {type})",
    "round_to": "lib.round_to({0}, {type}" + _OVERFLOW + ")",
    "bitcast": "{0}.to({type}, bitcast=True)",
    "rand": "lib.rand({0}, {1})",
    "randn": "lib.randn({0}, {1})",
    "randbits": "lib.randbits({0}, {1})",
}

# A loaded element as a value of its compute type, and a value as an element of storage type `type`, rounded as torch does.
WIDEN = "{0}.to({type})"
NARROW = "lib.narrow({0}, {type}" + _OVERFLOW + ")"


class Fold(NamedTuple):
    """How a reduction goes. Its state is one name, (value, index) for argmax and argmin, (mean, m2, count) for welford.

    `step` takes in an element elementwise: ``format(*state, value)``, or ``format(*state, value, index)``; `combine` joins two
    states: ``format(*state, *state)``; `across` folds a state's tiles along an axis: ``format(*state, axis=...)``.
    """

    step: str
    combine: str
    across: str


def _fold(op: str, joined: str) -> Fold:
    return Fold(joined, joined, f"lib.fold_{op}({{0}}, {{axis}})")


def _extreme(op: str) -> Fold:
    joined = f"lib.combine_{op}({{0}}, {{1}}, {{2}}, {{3}})"
    return Fold(joined, joined, f"lib.fold_{op}({{0}}, {{1}}, {{axis}})")


REDUCE: dict[str, Fold] = {
    "sum": _fold("sum", "{0} + {1}"),
    "prod": _fold("prod", "{0} * {1}"),
    "max": _fold("max", "lib.maximum({0}, {1})"),
    "min": _fold("min", "lib.minimum({0}, {1})"),
    "any": _fold("any", "{0} | {1}"),
    "all": _fold("all", "{0} & {1}"),
    "bitxor": _fold("bitxor", "{0} ^ {1}"),
    "argmax": _extreme("argmax"),
    "argmin": _extreme("argmin"),
    "welford": Fold(
        "lib.step_welford({0}, {1}, {2}, {3})",
        "lib.combine_welford({0}, {1}, {2}, {3}, {4}, {5})",
        "lib.fold_welford({0}, {1}, {2}, {axis})",
    ),
}

# The index, of type int64 or int32, of a state of argmax or argmin that has seen nothing: it loses against every other.
NO_INDEX, NO_NARROW_INDEX = 2**63 - 1, 2**31 - 1


class Prefixes(NamedTuple):
    """How a scan goes: `combine` joins what came before (first) with what follows, `along` gives all prefixes of a tile, and
    `backwards` all that begin at its end."""

    combine: str
    along: str
    backwards: str = ""


def _last_extreme(op: str) -> Prefixes:
    return Prefixes(f"lib.follow_{op}({{0}}, {{1}}, {{2}}, {{3}})", f"lib.scan_{op}({{0}}, {{1}}, {{axis}})")


SCAN: dict[str, Prefixes] = {
    **{
        op: Prefixes(REDUCE[op].combine, f"lib.scan_{op}({{0}}, {{axis}})", f"lib.scan_{op}({{0}}, {{axis}}, True)")
        for op in ("sum", "prod", "max", "min")
    },
    "argmax": _last_extreme("argmax"),
    "argmin": _last_extreme("argmin"),
    "logaddexp": Prefixes("lib.logaddexp({0}, {1})", "lib.scan_logaddexp({0}, {axis})"),
    "sort": Prefixes("", "lib.sort_rows({0}, {bits})"),
    "stable_sort": Prefixes("", "lib.sort_pairs({0}, {1}, {bits})"),
}


def scatter_atomic(mode: str, dtype: torch.dtype) -> str | None:
    """The text of a scatter's combination with what is in memory, ``format(pointer, value, mask)``; None where the hardware
    has none: multiplications, 8- and 16-bit integers, and float extremes, whose atomics compare bits and so lose NaNs."""
    if dtype not in ops.GPU_ATOMICS.get(mode, ()):
        return None
    return f'tl.atomic_{mode}({{0}}, {{1}}, mask={{2}}, sem="relaxed")'


def literal(number: Any, dtype: torch.dtype) -> str:
    """A number of a compute dtype as a scalar of exactly that type."""
    kind = TRITON_TYPES[dtype].compute
    if dtype is torch.bool:
        return f"tl.full([], {bool(number)}, {kind})"
    if not dtype.is_floating_point:
        return f"tl.full([], {int(number)}, {kind})"
    value = float(torch.tensor(float(number), dtype=dtype))
    if not math.isfinite(value):
        return f'tl.full([], float("{value}"), {kind})'
    if value == 0 and math.copysign(1, value) < 0:
        return f"(tl.full([], 0.0, {kind}) * -1.0)"  # Triton makes every constant that equals zero +0
    return f"tl.full([], {value!r}, {kind})"
