"""Elementwise mathematics: powers, exponentials, trigonometry and the special functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import values as vs
from kgen.ir.joins import log_add
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.pointwise import (
    Operand,
    Rule,
    float_formula,
    float_result,
    formula,
    is_float,
    mul,
    number,
    pointwise,
    to_float,
)
from kgen.lowering.tensor import Tensor, convert, promote

# ---- powers ---------------------------------------------------------------------------------------------------------


def power(b: Builder, x: Operand, y: Operand) -> Tensor:
    kind = promote(x, y)
    if kind is torch.bool:
        raise Refused("power of bools")
    if isinstance(y, int | float) and not isinstance(x, int | float):
        return pointwise(lambda p: fixed_power(p, y), x, compute=kind)
    if isinstance(x, int | float) and x == 1:
        return pointwise(lambda p: number(1, p), y, compute=kind)
    return pointwise(lambda p, q: vs.call("pow" if is_float(p) else "ipow", p, q), x, y)


# Exponents of few multiplications, each of which may be off by half a unit in the last place: so x^n is by (n - 1) / 2, as much
# as a power of any exponent is in eager.
_SHORT = range(4, 9)


def fixed_power(base: Value, exponent: float) -> Value:
    """A power with a literal exponent; the special cases are eager's."""
    if exponent == 0:
        return number(1, base)
    if not is_float(base):
        if exponent < 0:
            raise Refused("an integer to a negative power")
        return _repeated_multiplication(base, int(exponent))
    square = vs.call("mul", base, base)
    special: dict[float, Callable[[], Value]] = {
        0.5: lambda: vs.call("sqrt", base),
        -0.5: lambda: vs.call("rsqrt", base),
        1.0: lambda: base,
        -1.0: lambda: vs.call("reciprocal", base),
        2.0: lambda: square,
        3.0: lambda: vs.call("mul", square, base),
        -2.0: lambda: vs.call("reciprocal", square),
    }
    found = special.get(float(exponent))
    if found is None and float(exponent) in _SHORT:
        return _repeated_multiplication(base, int(exponent))
    return found() if found else vs.call("pow", base, number(exponent, base))


def _repeated_multiplication(base: Value, exponent: int) -> Value:
    """Repeated squaring: exact for integers, which wrap."""
    result: Value | None = None
    while exponent:
        if exponent & 1:
            result = base if result is None else vs.call("mul", result, base)
        exponent >>= 1
        if exponent:
            base = vs.call("mul", base, base)
    assert result is not None
    return result


def float_power(b: Builder, x: Operand, y: Operand) -> Tensor:
    """Always in double precision."""
    wide = [convert(o, torch.float64) if isinstance(o, Tensor) else o for o in (x, y)]
    if isinstance(y, int | float):
        return pointwise(lambda p: fixed_power(p, y), wide[0], compute=torch.float64)
    return pointwise(lambda p, q: vs.call("pow", p, q), *wide, compute=torch.float64)


def ldexp(b: Builder, x: Tensor, exponent: Operand) -> Tensor:
    """A float by a whole number is one of its own type with another exponent: the power alone might not be finite."""
    if not isinstance(exponent, Tensor) or exponent.dtype.is_floating_point or not x.dtype.is_floating_point:
        return mul(b, x, power(b, 2.0, _as_wide(exponent, x)))
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    return convert(pointwise(_scaled_by_power, convert(x, wide), convert(exponent, wide)), x.dtype)


def _as_wide(exponent: Operand, x: Tensor) -> Operand:
    """A float exponent as eager takes two to its power: one without dimensions is as wide as what is scaled."""
    if not isinstance(exponent, Tensor) or exponent.rank or not exponent.dtype.is_floating_point:
        return exponent
    base = x.dtype if x.dtype.is_floating_point else torch.float32  # the type of the two
    return convert(exponent, torch.promote_types(base, exponent.dtype))


def _scaled_by_power(x: Value, exponent: Value) -> Value:
    """x times 2^exponent, in three factors that have x's range."""
    most = 2400 if x.dtype is torch.float64 else 300
    exponent = vs.call("minimum", vs.call("maximum", exponent, number(-most, x)), number(most, x))
    third = vs.call("trunc", vs.call("mul", exponent, number(1 / 3, x)))
    rest = vs.call("sub", exponent, vs.call("add", third, third))
    factor = vs.call("exp2", third)
    return vs.call("mul", vs.call("mul", vs.call("mul", x, factor), factor), vs.call("exp2", rest))


# ---- formulas -------------------------------------------------------------------------------------------------------


def _where_nan(test: Value, otherwise: Value) -> Value:
    return vs.where(vs.call("isnan", test), number(math.nan, test), otherwise)


def _times_log(op: str) -> Callable[[Value, Value], Value]:
    """xlogy and xlog1py: zero times anything but NaN is zero."""

    def body(x: Value, y: Value) -> Value:
        product = vs.call("mul", x, vs.call(op, y))
        return _where_nan(y, vs.where(vs.call("eq", x, number(0, x)), number(0, x), product))

    return body


def _entropy(x: Value) -> Value:
    inside = vs.where(
        vs.call("gt", x, number(0, x)), vs.call("neg", vs.call("mul", x, vs.call("log", x))), number(-math.inf, x)
    )
    return _keep_nan(x, vs.where(vs.call("eq", x, number(0, x)), number(0, x), inside))


def _keep_nan(x: Value, otherwise: Value) -> Value:
    return vs.where(vs.call("isnan", x), x, otherwise)


def _log2_of_one_plus(x: Value) -> Value:
    return vs.call("mul", vs.call("log1p", x), number(1 / math.log(2), x))


def _lcm(x: Value, y: Value) -> Value:
    if x.dtype.itemsize < 4:  # C++ multiplies narrow integers as 32-bit ones: what overflows may be negative
        wide = _lcm(vs.cast(x, torch.int32), vs.cast(y, torch.int32))
        return vs.cast(wide, x.dtype)
    divisor = vs.call("gcd", x, y)
    product = vs.call("abs", vs.call("mul", vs.call("truncdiv", x, divisor), y))
    return vs.where(vs.call("eq", divisor, number(0, x)), number(0, x), product)


def _sinc(x: Value) -> Value:
    angle = vs.call("mul", x, number(math.pi, x))
    return vs.where(vs.call("eq", x, number(0, x)), number(1, x), vs.call("truediv", vs.call("sin", angle), angle))


def _normal_cdf(x: Value) -> Value:
    return _half_erfc_of_minus(vs.call("mul", x, number(math.sqrt(0.5), x)))


def _half_erfc_of_minus(z: Value) -> Value:
    return vs.call("mul", vs.call("erfc", vs.call("neg", z)), number(0.5, z))


def scaled(b: Builder, x: Tensor, factor: Operand) -> Tensor:
    """`mul.Scalar`, which torch's own composites use. ndtr comes as ``(erf(z) + 1) / 2``, without any digit where z << 0."""

    def body(p: Value, q: Value) -> Value:
        z = _below_one_plus_erf(p)
        return vs.call("mul", p, q) if z is None or q is not number(0.5, p) else _half_erfc_of_minus(z)

    return pointwise(body, x, factor) if is_float(x.value) else mul(b, x, factor)


def _below_one_plus_erf(value: Value) -> Value | None:
    if value.op == "add" and value.args[0].op == "erf" and value.args[1] is number(1, value):
        return value.args[0].args[0]
    return None


def _heaviside(x: Value, at_zero: Value) -> Value:
    step = vs.cast(vs.call("gt", x, number(0, x)), x.dtype)
    if is_float(x):
        step = vs.where(vs.call("isnan", x), number(0, x), step)
    return vs.where(vs.call("eq", x, number(0, x)), at_zero, step)


def _angle(x: Value) -> Value:
    return _keep_nan(x, vs.where(vs.call("lt", x, number(0, x)), number(math.pi, x), number(0, x)))


def logit(b: Builder, x: Tensor, eps: float | None = None) -> Tensor:
    def body(p: Value) -> Value:
        if eps is not None:
            low, high = number(eps, p), number(1 - eps, p)
            p = vs.where(vs.call("lt", p, low), low, vs.where(vs.call("gt", p, high), high, p))
        return vs.call("log", vs.call("truediv", p, vs.call("sub", number(1, p), p)))

    return pointwise(body, x, compute=to_float(x.dtype))


def nan_to_num(
    b: Builder, x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.dtype.is_floating_point:
        return x
    info = torch.finfo(x.dtype)

    def body(p: Value) -> Value:
        high = number(info.max if posinf is None else posinf, p)
        low = number(info.min if neginf is None else neginf, p)
        finite = vs.where(vs.call("eq", p, number(-math.inf, p)), low, p)
        finite = vs.where(vs.call("eq", p, number(math.inf, p)), high, finite)
        return vs.where(vs.call("isnan", p), number(nan or 0.0, p), finite)

    return pointwise(body, x)


def polygamma(b: Builder, order: int, x: Tensor) -> Tensor:
    if order == 0:
        return float_result("digamma")(b, x)
    return pointwise(lambda p: vs.call("polygamma", p, number(order, p)), x, compute=to_float(x.dtype))


def nextafter(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    if promote(x, y).itemsize < 4:
        raise Refused("nextafter of a 16-bit float")
    return pointwise(lambda p, q: vs.call("nextafter", p, q), x, y)


def scaled_by(factor: float) -> Rule:
    return float_formula(lambda p: vs.call("mul", p, number(factor, p)))


_FLOAT_RESULTS = (
    "sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p sigmoid sin cos tan asin acos atan sinh cosh tanh asinh acosh"
    " atanh erf erfc erfinv lgamma digamma i0 atan2 copysign"
)
_SPECIAL = (
    "i0e i1 i1e ndtri log_ndtr erfcx bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 "
    "modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai zeta"
    " chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w"
    " shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v"
    " shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
)
# Old names that reach a graph when it is traced without decompositions.
_SAME_AS = {
    "special_exp2": "exp2", "special_expm1": "expm1", "special_log1p": "log1p", "special_expit": "sigmoid",
    "special_erf": "erf", "special_erfc": "erfc", "special_erfinv": "erfinv", "special_gammaln": "lgamma",
    "special_digamma": "digamma", "special_psi": "digamma", "special_i0": "i0",
}  # fmt: skip

RULES: dict[str, Callable[..., Any]] = {
    **{f"aten.{name}": float_result(name) for name in _FLOAT_RESULTS.split()},
    **{f"aten.special_{name}": float_result(name) for name in _SPECIAL.split()},
    **{f"aten.{name}": float_result(op) for name, op in _SAME_AS.items()},
    "aten.hypot": formula(lambda p, q: vs.call("hypot", p, q)),
    "aten.igamma": formula(lambda p, q: vs.call("igamma", p, q)),
    "aten.igammac": formula(lambda p, q: vs.call("igammac", p, q)),
    "aten.gcd": formula(lambda p, q: vs.call("gcd", p, q)),
    "aten.lcm": formula(_lcm),
    "aten.mul.Scalar": scaled,
    "aten.pow": power,
    "aten.float_power": float_power,
    "aten.ldexp": ldexp,
    "aten.xlogy": float_formula(_times_log("log")),
    "aten.special_xlogy": float_formula(_times_log("log")),
    "aten.special_xlog1py": float_formula(_times_log("log1p")),
    "aten.special_entr": float_formula(_entropy),
    "aten.special_ndtr": float_formula(_normal_cdf),
    "aten.logaddexp": float_formula(log_add("exp", lambda v: vs.call("log1p", v))),
    "aten.logaddexp2": float_formula(log_add("exp2", _log2_of_one_plus)),
    "aten.sinc": float_formula(_sinc),
    "aten.special_sinc": float_formula(_sinc),
    "aten.heaviside": formula(_heaviside),
    "aten.angle": float_formula(_angle),
    "aten.logit": logit,
    "aten.special_logit": logit,
    "aten.nan_to_num": nan_to_num,
    "aten.polygamma": polygamma,
    "aten.special_polygamma": polygamma,
    "aten.nextafter": nextafter,
    "aten.deg2rad": scaled_by(math.pi / 180),
    "aten.rad2deg": scaled_by(180 / math.pi),
    "aten.frac": formula(lambda p: vs.call("sub", p, vs.call("trunc", p))),
}
