"""The one table of scalar operations.

A row says everything the compiler knows about an operation: arity, result dtype, reference (a torch function that the
evaluator applies elementwise), and cost in units of one addition.  Back ends supply only a name -> text table; a test fails
when a row is missing there.  Arguments arrive already promoted: a lowering casts, an operation never does.

Compute dtypes are `COMPUTE_DTYPES`; 16-bit floats never appear inside a kernel (a load widens them exactly, `round` and
stores narrow them to nearest even).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

COMPUTE_DTYPES = (
    torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool,
)  # fmt: skip
NARROW_FLOATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)

# Result dtype rules: of the first argument, of the last one, or fixed.
FIRST, LAST = "first", "last"

# What an operation admits.
FLOAT, INTEGER, NUMBER, BOOL, ANY = "float", "integer", "number", "bool", "any"


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """One operation. `admits` names the dtypes of its value arguments; `cost` is in additions; `exact` is false where a
    vector library may differ from the reference by an ulp or more."""

    name: str
    arity: int
    result: str | torch.dtype
    admits: str
    reference: Callable[..., torch.Tensor]
    cost: int = 1
    exact: bool = True


@dataclass(frozen=True, slots=True)
class ReductionOp:
    """A reduction. `combine` names the scalar op that joins two partial results (None: a special accumulator);
    `outputs` is how many results it gives."""

    name: str
    combine: str | None
    admits: str
    outputs: int = 1


def admitted(kind: str) -> tuple[torch.dtype, ...]:
    """The compute dtypes that an `admits` word stands for."""
    floats = tuple(d for d in COMPUTE_DTYPES if d.is_floating_point)
    integers = tuple(d for d in COMPUTE_DTYPES if not d.is_floating_point and d is not torch.bool)
    return {
        FLOAT: floats, INTEGER: integers, NUMBER: floats + integers, BOOL: (torch.bool,),
        ANY: floats + integers + (torch.bool,),
    }[kind]  # fmt: skip


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel computes on values stored as `dtype`."""
    return torch.float32 if dtype in NARROW_FLOATS else dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a contraction of operands of `dtype` accumulates."""
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return torch.int32 if dtype.itemsize == 1 else dtype


def _floor_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a, torch.where(b == 0, torch.ones_like(b), b), rounding_mode="floor")


def _trunc_div(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not a.dtype.is_signed:
        return torch.div(a, torch.where(b == 0, torch.ones_like(b), b), rounding_mode="trunc")
    # torch's kernel traps on the most negative number divided by -1; here it wraps
    quotient = torch.div(a, torch.where((b == 0) | (b == -1), torch.ones_like(b), b), rounding_mode="trunc")
    return torch.where(b == -1, -a, quotient)


def _int_or_float(on_int: Callable[..., torch.Tensor], on_float: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda a, b: on_float(a, b) if a.dtype.is_floating_point else on_int(a, b)


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.remainder(a, torch.where(b == 0, torch.ones_like(b), b))


def _fmod(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.fmod(a, torch.where(b == 0, torch.ones_like(b), b))


def _polygamma(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """`n`, the order, is the same number everywhere: torch takes it as an int."""
    return torch.polygamma(int(n.flatten()[0]) if n.numel() else 1, x)


def _unary(rows: str, admits: str, result: str | torch.dtype = FIRST, cost: int = 1, exact: bool = True) -> list[ScalarOp]:
    return [ScalarOp(n, 1, result, admits, _reference(n), cost, exact) for n in rows.split()]


def _binary(rows: str, admits: str, result: str | torch.dtype = FIRST, cost: int = 1, exact: bool = True) -> list[ScalarOp]:
    return [ScalarOp(n, 2, result, admits, _reference(n), cost, exact) for n in rows.split()]


_NAMES: dict[str, Callable[..., torch.Tensor]] = {
    "round": torch.round, "not": torch.logical_not, "and": torch.logical_and, "or": torch.logical_or, "xor": torch.logical_xor,
    "invert": torch.bitwise_not, "bitand": torch.bitwise_and, "bitor": torch.bitwise_or, "bitxor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift, "shr": torch.bitwise_right_shift, "truediv": torch.true_divide,
    "floordiv": _int_or_float(_floor_div, torch.floor_divide),
    "truncdiv": _int_or_float(_trunc_div, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "remainder": _int_or_float(_remainder, torch.remainder), "fmod": _int_or_float(_fmod, torch.fmod),
    "sub": torch.sub, "add": torch.add, "mul": torch.mul, "ipow": torch.pow, "within": torch.logical_and,
}  # fmt: skip


def _reference(name: str) -> Callable[..., torch.Tensor]:
    found = _NAMES.get(name) or getattr(torch, name, None) or getattr(torch.special, name, None)
    if found is None:
        raise KeyError(name)
    return found


_ROWS: list[ScalarOp] = [
    # arithmetic
    *_binary("add sub mul", NUMBER),
    *_binary("maximum minimum", NUMBER),  # NaN wins, as in torch
    *_binary("fmax fmin", FLOAT),  # NaN loses
    *_binary("truediv", FLOAT, cost=4),
    *_binary("floordiv truncdiv remainder fmod", NUMBER, cost=8),
    *_binary("gcd", INTEGER, cost=40),
    *_binary("ipow", INTEGER, cost=60),  # wraps; a negative exponent gives 0, or 1 and -1 for bases 1 and -1
    *_unary("neg", NUMBER),
    *_unary("abs", NUMBER),
    *_unary("sign", NUMBER, cost=2),
    *_unary("square", NUMBER),
    # comparisons and logic
    *_binary("eq ne", ANY, torch.bool),
    *_binary("lt le gt ge", ANY, torch.bool),
    *_unary("not", BOOL),
    *_binary("and or xor", BOOL),
    # as "and"; the right one says in fewer words what follows from the left one, and may be left out
    *_binary("within", BOOL),
    *_unary("isnan", FLOAT, torch.bool),
    *_unary("isinf", FLOAT, torch.bool),
    *_unary("signbit", NUMBER, torch.bool),
    # bits
    *_unary("invert", INTEGER),
    *_binary("bitand bitor bitxor shl shr", INTEGER),
    # rounding
    *_unary("floor ceil trunc round", FLOAT),
    # roots, exponentials, logarithms
    *_unary("sqrt", FLOAT, cost=4),
    *_unary("rsqrt reciprocal", FLOAT, cost=5, exact=False),
    *_unary("exp exp2 expm1 log log2 log10 log1p", FLOAT, cost=15, exact=False),
    *_unary("sigmoid", FLOAT, cost=18, exact=False),
    # trigonometric and hyperbolic
    *_unary("sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh", FLOAT, cost=20, exact=False),
    *_binary("pow atan2 hypot", FLOAT, cost=30, exact=False),
    *_binary("copysign nextafter", FLOAT, cost=2),
    # special functions
    *_unary("erf erfc erfinv", FLOAT, cost=20, exact=False),
    *_unary("lgamma digamma i0 i0e i1 i1e ndtri log_ndtr erfcx", FLOAT, cost=60, exact=False),
    *_unary("bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1", FLOAT, cost=60, exact=False),
    *_unary("modified_bessel_k0 modified_bessel_k1", FLOAT, cost=60, exact=False),
    *_unary("scaled_modified_bessel_k0 scaled_modified_bessel_k1", FLOAT, cost=60, exact=False),
    *_unary("spherical_bessel_j0 airy_ai", FLOAT, cost=60, exact=False),
    *_binary("igamma igammac zeta", FLOAT, cost=100, exact=False),
    ScalarOp("polygamma", 2, FIRST, FLOAT, _polygamma, 100, False),
    *_binary(
        "chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w"
        " shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v"
        " shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l"
        " legendre_polynomial_p",
        FLOAT, cost=100, exact=False,
    ),
    # selection and fused multiply-add (one rounding: only where the user asked for it)
    ScalarOp("where", 3, LAST, ANY, torch.where),
    ScalarOp("fma", 3, FIRST, FLOAT, lambda a, b, c: (a.double() * b.double() + c.double()).to(a.dtype)),
]  # fmt: skip

OPS: dict[str, ScalarOp] = {row.name: row for row in _ROWS}

# Operations whose meaning needs more than their arguments: values.py and the emitters treat each by name.
#   const    attr = number                      index   attr = Expr; the integer itself
#   load     attr = (buffer, indices); args = () or (mask,): lanes where the mask is false give 0 and touch no memory
#   step     attr = name of a step of an operation's program; the element that it has made
#   cast     attr = target compute dtype; float -> int truncates; -> bool is != 0
#   round    attr = narrow float dtype; value rounded to it, kept in float32
#   bitcast  attr = target dtype of the same width
#   assert   attr = a word of FAILURES; args = (value, condition): the value; where a point that uses it does not meet the
#            condition, the call fails, or the kernel ends on a GPU
#   rand     args = (seed, counter): uniform in [0, 1); randn: normal; randbits: 64 random bits (Philox4x32-10)
RANDOM = ("rand", "randn", "randbits")
STRUCTURAL = ("const", "index", "load", "step", "cast", "round_to", "bitcast", "assert", *RANDOM)
COSTS = {
    "const": 0, "index": 1, "load": 1, "step": 0, "cast": 1, "round_to": 1, "bitcast": 0, "assert": 1, "rand": 40,
    "randn": 80, "randbits": 40,
}  # fmt: skip

# What makes a call fail, with the result of a C++ kernel that found it. The host raises eager's exceptions for them.
FAILURES = {"index": 1, "division": 2}

# Special functions that kernels on a GPU do not compute: there the operators stay library calls.
CPU_ONLY = frozenset(
    [
        "modified_bessel_k0",
        "modified_bessel_k1",
        "scaled_modified_bessel_k0",
        "scaled_modified_bessel_k1",
        "airy_ai",
        "igamma",
        "igammac",
        "zeta",
        "polygamma",
        "chebyshev_polynomial_t",
        "chebyshev_polynomial_u",
        "chebyshev_polynomial_v",
        "chebyshev_polynomial_w",
        "shifted_chebyshev_polynomial_t",
        "shifted_chebyshev_polynomial_u",
        "shifted_chebyshev_polynomial_v",
        "shifted_chebyshev_polynomial_w",
        "hermite_polynomial_h",
        "hermite_polynomial_he",
        "laguerre_polynomial_l",
        "legendre_polynomial_p",
    ]
)

# Scatter mode -> dtypes that a GPU combines with memory in one indivisible step. The others would race: there is no such
# multiplication, 8- and 16-bit integers have none, and extremes of floats compare bits and so lose NaNs.
GPU_ATOMICS: dict[str, tuple[torch.dtype, ...]] = {
    "add": (
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint32, torch.uint64,
    ),
    "max": (torch.int32, torch.int64, torch.uint32, torch.uint64),
    "min": (torch.int32, torch.int64, torch.uint32, torch.uint64),
}  # fmt: skip

REDUCTIONS: dict[str, ReductionOp] = {
    row.name: row
    for row in (
        ReductionOp("sum", "add", NUMBER),
        ReductionOp("prod", "mul", NUMBER),
        ReductionOp("max", "maximum", NUMBER),
        ReductionOp("min", "minimum", NUMBER),
        ReductionOp("any", "or", BOOL),
        ReductionOp("all", "and", BOOL),
        ReductionOp("bitxor", "bitxor", INTEGER),
        # first index of the extreme value; NaN counts as the extreme; outputs (value, index)
        ReductionOp("argmax", None, ANY, 2),
        ReductionOp("argmin", None, ANY, 2),
        # mean and sum of squared deviations, by Welford's update and Chan's combination; outputs (mean, m2)
        ReductionOp("welford", None, FLOAT, 2),
    )
}
# Reductions of which partial results join by an operation of two numbers, in whichever order.
JOINED = frozenset(row.name for row in REDUCTIONS.values() if row.combine is not None)
# Scans whose every result depends on all elements of the row: its integers in ascending order, and the same with the position
# that each had, where equal ones keep their order.
ROW_ORDERS = ("sort", "stable_sort")
SCANS = ("sum", "prod", "max", "min", "argmax", "argmin", "logaddexp", *ROW_ORDERS)
# Reductions and scans with two results, the second of which is a position.
WITH_POSITIONS = ("argmax", "argmin", "stable_sort")


def identity(op: str, dtype: torch.dtype) -> Any:
    """The value that leaves a reduction unchanged, as a Python number."""
    if op in ("sum", "bitxor", "welford"):
        return 0
    if op == "prod":
        return 1
    if op in ("any", "all"):
        return op == "all"
    largest = op in ("min", "argmin", *ROW_ORDERS)
    if dtype is torch.bool:
        return largest
    if dtype.is_floating_point:
        return math.inf if largest else -math.inf
    info = torch.iinfo(dtype)
    return info.max if largest else info.min


def result_dtype(op: str, args: tuple[torch.dtype, ...]) -> torch.dtype:
    rule = OPS[op].result
    if isinstance(rule, torch.dtype):
        return rule
    return args[0] if rule == FIRST else args[-1]


def cost(op: str) -> int:
    row = OPS.get(op)
    return row.cost if row else COSTS[op]
