"""Scalar operations as C++ text, for the vector layer in `include/kgen`.

The same text serves vectors, masked tails and scalars: every function there takes any mixture of them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

_UNARY = (
    "neg abs sign square not isnan isinf signbit invert floor ceil trunc round sqrt rsqrt reciprocal"
    " exp exp2 expm1 log log2 log10 log1p sigmoid sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh"
    " erf erfc erfinv lgamma digamma i0 i0e i1 i1e ndtri log_ndtr erfcx"
    " bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1"
    " scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai"
)
_BINARY = (
    "add sub mul maximum minimum fmax fmin truediv floordiv truncdiv remainder fmod gcd ipow eq ne lt le gt ge and or xor"
    " bitand bitor bitxor shl shr pow atan2 hypot copysign nextafter igamma igammac zeta polygamma"
    " chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w"
    " shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v"
    " shifted_chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p"
)

# Operation -> text, to be filled with `format(*arguments)`.
CPP_OPS: dict[str, str] = {
    **{name: f"{name}_({{0}})" for name in _UNARY.split()},
    **{name: f"{name}_({{0}}, {{1}})" for name in _BINARY.split()},
    "where": "where_({0}, {1}, {2})",
    "within": "and_({0}, {1})",
    "fma": "fma_({0}, {1}, {2})",
}

# The structural operations that are calls; `type` is a storage type for round_to and a compute type for the others. The
# emitter itself knows what const, index, load and assert mean.
CPP_STRUCTURAL: dict[str, str] = {
    "cast": "cast_<{type}>({0})",
    "round_to": "round_to_<{type}>({0})",
    "bitcast": "bitcast_<{type}>({0})",
    "rand": "rand_({0}, {1})",
    "randn": "randn_({0}, {1})",
    "randbits": "randbits_({0}, {1})",
}

# Scatter mode -> operator type for `scatter_combine`.
CPP_SCATTER: dict[str, str] = {"add": "Add", "mul": "Mul", "max": "Max", "min": "Min"}

# Scan -> operator type for `Running`; argmax and argmin are `RunningExtreme`.
CPP_SCANS: dict[str, str] = {"sum": "Add", "prod": "Mul", "max": "Max", "min": "Min", "logaddexp": "LogAddExp"}


class CppType(NamedTuple):
    """How elements lie in memory, and the type in which a kernel computes on them."""

    storage: str
    compute: str


CPP_TYPES: dict[torch.dtype, CppType] = {
    torch.float32: CppType("float", "float"),
    torch.float64: CppType("double", "double"),
    torch.bfloat16: CppType("bfloat16", "float"),
    torch.float16: CppType("half", "float"),
    torch.float8_e4m3fn: CppType("float8_e4m3fn", "float"),
    torch.float8_e5m2: CppType("float8_e5m2", "float"),
    torch.int8: CppType("int8_t", "int8_t"),
    torch.int16: CppType("int16_t", "int16_t"),
    torch.int32: CppType("int32_t", "int32_t"),
    torch.int64: CppType("int64_t", "int64_t"),
    torch.uint8: CppType("uint8_t", "uint8_t"),
    torch.uint16: CppType("uint16_t", "uint16_t"),
    torch.uint32: CppType("uint32_t", "uint32_t"),
    torch.uint64: CppType("uint64_t", "uint64_t"),
    torch.bool: CppType("bool", "bool"),
}


def literal(number: Any, dtype: torch.dtype) -> str:
    """A number of a compute dtype as a C++ expression of exactly that type."""
    if dtype is torch.bool:
        return "true" if number else "false"
    kind = CPP_TYPES[dtype].compute
    if dtype.is_floating_point:
        return _float_literal(float(number), kind)
    if number == -(2**63):
        return "int64_t(-9223372036854775807 - 1)"  # the positive number alone does not fit
    return f"{kind}({int(number)}{'u' if number > 2**63 - 1 else ''})"


def _float_literal(number: float, kind: str) -> str:
    suffix = "f" if kind == "float" else ""
    if math.isnan(number):
        return f'__builtin_nan{suffix}("")'
    if math.isinf(number):
        return f"{'-' if number < 0 else ''}__builtin_inf{suffix}()"
    if suffix:
        as_float = float(torch.tensor(number, dtype=torch.float32))
        if math.isinf(as_float):  # beyond the format's range: no literal of it exists
            return _float_literal(as_float, kind)
        number = as_float
    return f"{number!r}{suffix}"
