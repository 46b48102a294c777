"""Functions of sizes: those that an index may hold, and those on floats, which the host alone computes."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence

__all__ = ["BINARY_FLOAT_FUNCTIONS", "FLOAT_FUNCTIONS", "FOLD", "FUNCTIONS", "evaluate_function", "float_bits", "float_of"]

_FOLD: dict[str, Callable[..., int]] = {
    "min": min, "max": max, "pow": pow, "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "lt": lambda a, b: int(a < b), "le": lambda a, b: int(a <= b),
    "eq": lambda a, b: int(a == b), "select": lambda c, a, b: a if c else b,
}  # fmt: skip
FUNCTIONS = frozenset(_FOLD)


def float_bits(number: float) -> int:
    """A float64 as the signed 64-bit integer of the same bits: how sizes' expressions carry floats."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_of(bits: int) -> float:
    """The inverse of `float_bits`."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])


def _on_floats(fn: Callable[..., float]) -> Callable[..., int]:
    return lambda *args: float_bits(fn(*map(float_of, args)))


# Functions on float64 bit patterns, for numbers computed from sizes such as s**-0.5. They occur only in the definitions of
# derived sizes (`ir.Graph.derived`), never in an index: the host computes them, kernels get the result.
_FLOAT_FOLD: dict[str, Callable[..., int]] = {
    "float": lambda a: float_bits(float(a)),
    "fadd": _on_floats(lambda a, b: a + b), "fmul": _on_floats(lambda a, b: a * b),
    "fdiv": _on_floats(lambda a, b: a / b if b else math.copysign(math.inf, a) if a else math.nan),
    "fmod": _on_floats(lambda a, b: a % b if b else math.nan),
    "frounddec": _on_floats(lambda a, digits: round(a, int(digits))),
    "fpow": _on_floats(math.pow), "fmin": _on_floats(min), "fmax": _on_floats(max),
    "flt": lambda a, b: int(float_of(a) < float_of(b)), "fle": lambda a, b: int(float_of(a) <= float_of(b)),
    "feq": lambda a, b: int(float_of(a) == float_of(b)),
    "ftrunc": lambda a: math.trunc(float_of(a)), "ffloor": lambda a: math.floor(float_of(a)),
    "fceil": lambda a: math.ceil(float_of(a)), "fround": lambda a: round(float_of(a)),
    **{f"f{name}": _on_floats(getattr(math, name)) for name in (
        "sqrt", "exp", "log", "log2", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
        "asinh",
    )},
}  # fmt: skip
FLOAT_FUNCTIONS = frozenset(_FLOAT_FOLD)
BINARY_FLOAT_FUNCTIONS = frozenset(("fadd", "fmul", "fdiv", "fmod", "frounddec", "fpow", "fmin", "fmax", "flt", "fle", "feq"))


def evaluate_function(fn: str, args: Sequence[int]) -> int:
    """The reference of a function of `FLOAT_FUNCTIONS`; one that takes a single argument ignores the others."""
    return _FLOAT_FOLD[fn](*(args[:2] if fn in BINARY_FLOAT_FUNCTIONS else args[:1]))


# All of them.
FOLD = {**_FOLD, **_FLOAT_FOLD}
