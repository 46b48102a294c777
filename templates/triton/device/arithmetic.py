"""Exact Triton functions: arithmetic, division, shifts, conversions. Division and square roots are correctly rounded."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kgen.templates.triton.device.integers import float_of_byte
from kgen.templates.triton.device.intrinsics import approximate_rsqrt
from kgen.templates.triton.device.rounded import inverses, quotients, roots


@triton.jit
def truediv(a, b):
    if b.dtype.is_fp64():
        return a / b
    else:
        return tl.div_rn(a, b)  # `/` is an approximation for float32


@triton.jit
def divided(a, b):
    """`truediv` of tensors: Python's numbers have no number of elements."""
    if b.dtype.is_fp64() or (a.numel < 4 and b.numel < 4):
        return truediv(a, b)
    elif b.numel < a.numel:
        return divided_by_few(a, b)
    else:
        return quotients(a, b)


@triton.jit
def divided_by_number(a, number: tl.constexpr, reciprocal: tl.constexpr, corrections: tl.constexpr):
    """a / number of float32, for a positive number whose correctly rounded reciprocal is known: the quotient is corrected by
    its exact remainder, as in `divided_by_few`. The remainder's sign is turned, which keeps that of a zero."""
    first = a * reciprocal
    found = first
    for _ in tl.static_range(corrections):
        rest = tl.fma(tl.full([], number, tl.float32), found, a * -1.0)
        found = tl.fma(rest, tl.full([], 0.0 - reciprocal, tl.float32), found)
    return tl.where(tl.abs(first) < float("inf"), found, first)


@triton.jit
def divided_by_few(a, b):
    """a / b of float32, where several elements of a tile have one divisor, whose reciprocal is computed once: the quotient is
    corrected twice by its exact remainder (Markstein 1990), which rounds it as a division does. A GPU's own division tests each
    element for what needs a longer way; here a power of two brings divisors from where that is, and what a remainder cannot
    correct, zeros and infinities, stays. Quotients below 2^-100 may be off by a last bit."""
    size = tl.abs(b)
    factor = tl.where(size < 7.9e-31, 1.2676506e30, tl.where(size > 1.2676506e30, 7.888609e-31, 1.0))
    a, divisor = a * factor, b * factor
    reciprocal = tl.div_rn(tl.full([], 1.0, tl.float32), divisor)
    divisor = 0.0 - tl.where(tl.abs(divisor) < float("inf"), divisor, 0.0)
    first = a * reciprocal
    found = tl.fma(tl.fma(divisor, first, a), reciprocal, first)
    found = tl.fma(tl.fma(divisor, found, a), reciprocal, found)
    size = tl.abs(first)
    return tl.where((size > 0.0) & (size < float("inf")), found, first)


@triton.jit
def sqrt(x):
    if x.dtype.is_fp64():
        return tl.sqrt(x)
    elif x.numel < 4:
        return tl.sqrt_rn(x)
    else:
        return roots(x)


@triton.jit
def reciprocal(x):
    if x.dtype.is_fp64() or x.numel < 4:
        return truediv(1.0, x)
    else:
        return inverses(x)


@triton.jit
def rsqrt(x):
    """Of float32 the hardware's, which eager takes."""
    if x.dtype.is_fp64():
        return truediv(1.0, tl.sqrt(x))
    else:
        return approximate_rsqrt(x)


@triton.jit
def neg(x):
    if x.dtype.is_floating():
        return x * -1.0  # Triton's `-x` is 0 - x, which makes -0 of no number
    else:
        return 0 - x


@triton.jit
def sign(x):
    if x.dtype.is_int_unsigned():
        return (x != 0).to(x.dtype)
    else:
        return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def isinf(x):
    return tl.abs(x) == float("inf")


@triton.jit
def bits_of(x):
    """A float's bits as a signed integer."""
    if x.dtype.is_fp64():
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def signbit(x):
    if x.dtype.is_floating():
        return bits_of(x) < 0
    else:
        return x < 0


@triton.jit
def copysign(a, b):
    size = bits_of(tl.abs(a))
    negative = bits_of(tl.abs(b)) ^ bits_of(b)
    return (size | negative).to(a.dtype, bitcast=True)


@triton.jit
def nextafter(a, b):
    away = (b > a) == (a > 0)
    bits = bits_of(a)
    next_bits = tl.where(away, bits + 1, bits - 1)
    smallest = (bits_of(b) & ~bits_of(tl.abs(b))) | 1
    stepped = tl.where(a == 0, smallest, next_bits).to(a.dtype, bitcast=True)
    return tl.where((a != a) | (b != b), a + b, tl.where(a == b, b, stepped))


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fmax(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def fmin(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def trunc(x):
    return libdevice.trunc(x)


@triton.jit
def round(x):  # noqa: A001
    return libdevice.rint(x)


# ---- division with a quotient or rest ----------------------------------------------------------------------------------


@triton.jit
def divide_integers(a, b):
    """Rounds towards zero. To LLVM a division by zero, or of the most negative number by -1, is undefined behaviour."""
    if a.dtype.is_int_signed():
        quotient = a // tl.where((b == 0) | (b == -1), 1, b)
        return tl.where(b == -1, 0 - a, quotient)
    else:
        return a // tl.where(b == 0, 1, b)


@triton.jit
def truncdiv(a, b):
    if a.dtype.is_floating():
        return trunc(truediv(a, b))
    else:
        return divide_integers(a, b)


@triton.jit
def fmod(a, b):
    if a.dtype.is_fp32():
        return libdevice.fmod(a.to(tl.float64), b.to(tl.float64)).to(tl.float32)  # exact, even where b is subnormal
    elif a.dtype.is_fp64():
        return libdevice.fmod(a, b)
    else:
        return a - divide_integers(a, b) * b


@triton.jit
def has_wrong_sign(rest, b):
    return (rest != 0) & ((rest < 0) != (b < 0))


@triton.jit
def remainder(a, b):
    """The rest with the divisor's sign."""
    rest = fmod(a, b)
    if not a.dtype.is_int_unsigned():
        rest = tl.where(has_wrong_sign(rest, b), rest + b, rest)
    return rest


@triton.jit
def floordiv_floats(a, b):
    """As in torch: the quotient of what is exactly divisible, so that it agrees with `remainder`."""
    rest = fmod(a, b)
    plain = truediv(a, b)
    whole = truediv(a - rest, b)
    quotient = tl.where(has_wrong_sign(rest, b), whole - 1.0, whole)
    low = tl.floor(quotient)
    nearest = tl.where(quotient - low > 0.5, low + 1.0, low)
    return tl.where(b == 0, plain, tl.where(quotient == 0, copysign(quotient * 0.0, plain), nearest))


@triton.jit
def floordiv(a, b):
    if a.dtype.is_floating():
        return floordiv_floats(a, b)
    else:
        quotient = divide_integers(a, b)
        if a.dtype.is_int_signed():
            quotient = tl.where(has_wrong_sign(a - quotient * b, b), quotient - 1, quotient)
        return quotient


@triton.jit
def floor(x):
    """Triton's takes subnormal float32 numbers for zero."""
    low = tl.floor(x)
    return tl.where((low == 0) & (x < 0), -1.0, low)


@triton.jit
def ceil(x):
    high = tl.ceil(x)
    return tl.where((high == 0) & (x > 0), 1.0, high)


@triton.jit
def gcd(a, b):
    a, b = tl.broadcast(a, b)
    if a.dtype.is_int_signed():  # tl.abs would let LLVM assume that the most negative number does not occur
        a = tl.where(a < 0, 0 - a, a)
        b = tl.where(b < 0, 0 - b, b)
    for _ in range(a.dtype.primitive_bitwidth * 3 // 2):  # Fibonacci numbers take the most steps
        rest = a % tl.where(b == 0, 1, b)
        a, b = tl.where(b == 0, a, b), tl.where(b == 0, b, rest)
    return a


@triton.jit
def ipow(a, b):
    power, exponent = tl.broadcast(a, b)
    result = (power ^ power) | 1
    for _ in range(a.dtype.primitive_bitwidth):
        result = tl.where((exponent & 1) != 0, result * power, result)
        power = power * power
        exponent = exponent >> 1
    if a.dtype.is_int_signed():
        of_one = tl.where(a == 1, 1, tl.where(a == -1, 1 - 2 * (b & 1), 0)).to(a.dtype)
        result = tl.where(b < 0, of_one, result)
    return result


# ---- shifts: counts outside the width shift everything out -------------------------------------------------------------


@triton.jit
def shl(a, b):
    outside = (b < 0) | (b >= a.dtype.primitive_bitwidth)
    return tl.where(outside, 0, a << tl.where(outside, 0, b)).to(a.dtype)


@triton.jit
def shr(a, b):
    most = a.dtype.primitive_bitwidth - 1
    outside = (b < 0) | (b > most)
    shifted = a >> tl.where(outside, most, b).to(b.dtype)
    if a.dtype.is_int_signed():
        return shifted
    else:
        return tl.where(outside, 0, shifted).to(a.dtype)


# ---- conversions -------------------------------------------------------------------------------------------------------


@triton.jit
def cast(x, to: tl.constexpr):
    """To a compute type. Floats out of range wrap like integers where torch's CUDA kernels make them do so."""
    if x.dtype.is_floating() and to.is_int() and to.primitive_bitwidth > 1 and to.primitive_bitwidth < 64:
        if to.is_int_unsigned():
            return x.to(tl.int64).to(to)
        else:
            return x.to(tl.int32).to(to)
    elif x.dtype.is_int() and x.dtype.primitive_bitwidth == 8 and to.is_floating():
        return float_of_byte(x, to)
    else:
        return x.to(to)


@triton.jit
def narrow(x, to: tl.constexpr, saturate: tl.constexpr = True):
    """To a storage type, rounded to nearest even. The hardware makes the largest finite 8-bit float of what is larger; in torch
    float8_e5m2 then has infinity, and float8_e4m3fn, by the release, the largest number or NaN (`saturate` is false)."""
    if to == tl.float8e5:
        return replaced(x, to, tl.abs(x) >= 61440.0, 0x7C)
    elif to == tl.float8e4nv and not saturate:
        return replaced(x, to, tl.abs(x) > 464.0, 0x7F)  # 464 is between 448 and what would come next; ties go to 448
    else:
        return cast(x, to)


@triton.jit
def replaced(x, to: tl.constexpr, where, code: tl.constexpr):
    """To an 8-bit float, with `code` as bits and the sign of x in some places."""
    bits = x.to(to).to(tl.uint8, bitcast=True)
    special = (tl.where(signbit(x), 0x80, 0) | code).to(tl.uint8)
    return tl.where(where, special, bits).to(to, bitcast=True)


@triton.jit
def round_to(x, to: tl.constexpr, saturate: tl.constexpr = True):
    """To a narrow float and back."""
    return narrow(x, to, saturate).to(x.dtype)
