"""Functions that generated Triton kernels call, as ``lib.name(...)``.

This module imports Triton only: worker processes that compile kernels must not wait for torch. Where nothing else is said a
function means what its row of `kgen.ops.OPS` says. Arguments are tensors of any shapes that broadcast, or scalars.

Accuracy: division and square roots are correctly rounded; other functions are those of CUDA's libdevice, which eager CUDA
kernels use too. Triton links libdevice with subnormal float32 numbers flushed to zero, so where a flushed argument would change
more than a last subnormal digit (logarithms, rsqrt, fmod) the functions here look after it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# ---- exact arithmetic ------------------------------------------------------------------------------------------------


@triton.jit
def truediv(a, b):
    if b.dtype.is_fp64():
        return a / b
    else:
        return tl.div_rn(a, b)  # `/` is an approximation for float32


@triton.jit
def sqrt(x):
    if x.dtype.is_fp64():
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def reciprocal(x):
    return truediv(1.0, x)


@triton.jit
def rsqrt(x):
    return truediv(1.0, sqrt(x))


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
def gcd(a, b):
    a, b = tl.broadcast(tl.abs(a), tl.abs(b))
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
    else:
        return x.to(to)


@triton.jit
def narrow(x, to: tl.constexpr, saturate: tl.constexpr = True):
    """To a storage type, rounded to nearest even. The hardware makes the largest finite 8-bit float of what is larger; in torch
    float8_e5m2 then has infinity, and float8_e4m3fn, by the release, the largest number or NaN (`saturate` is false)."""
    if to == tl.float8e5:
        return replaced(x, to, tl.abs(x) >= 61440.0, 0x7C)
    elif to == tl.float8e4nv and not saturate:
        return replaced(x, to, tl.abs(x) > 464.0, 0x7F)  # 464 lies between 448 and what would come next; ties go to 448
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


# ---- elementary functions ----------------------------------------------------------------------------------------------


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return libdevice.expm1(x)


@triton.jit
def log(x):
    if x.dtype.is_fp64():
        return libdevice.log(x)
    else:
        small = x < 1.17549435e-38
        return libdevice.log(tl.where(small, x * 8388608.0, x)) - tl.where(small, 15.9423847, 0.0)


@triton.jit
def log2(x):
    if x.dtype.is_fp64():
        return libdevice.log2(x)
    else:
        small = x < 1.17549435e-38
        return libdevice.log2(tl.where(small, x * 8388608.0, x)) - tl.where(small, 23.0, 0.0)


@triton.jit
def log10(x):
    if x.dtype.is_fp64():
        return libdevice.log10(x)
    else:
        small = x < 1.17549435e-38
        return libdevice.log10(tl.where(small, x * 8388608.0, x)) - tl.where(small, 6.92368990, 0.0)


@triton.jit
def log1p(x):
    return libdevice.log1p(x)


@triton.jit
def logaddexp(a, b):
    top = maximum(a, b)
    # equal infinities have no difference
    return tl.where((a == b) & isinf(a), a, top + log1p(exp(0.0 - tl.abs(a - b))))


@triton.jit
def sigmoid(x):
    return truediv(1.0, 1.0 + exp(0.0 - x))


@triton.jit
def sin(x):
    return libdevice.sin(x)


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def tan(x):
    return libdevice.tan(x)


@triton.jit
def asin(x):
    return libdevice.asin(x)


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return libdevice.atan(x)


@triton.jit
def sinh(x):
    return libdevice.sinh(x)


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def tanh(x):
    return libdevice.tanh(x)


@triton.jit
def asinh(x):
    return libdevice.asinh(x)


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return libdevice.atanh(x)


@triton.jit
def pow(a, b):  # noqa: A001
    return libdevice.pow(a, b)


@triton.jit
def atan2(a, b):
    return libdevice.atan2(a, b)


@triton.jit
def hypot(a, b):
    return libdevice.hypot(a, b)


# ---- special functions -------------------------------------------------------------------------------------------------


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def erfinv(x):
    return libdevice.erfinv(x)


@triton.jit
def erfcx(x):
    return libdevice.erfcx(x)


@triton.jit
def lgamma(x):
    return libdevice.lgamma(x)


@triton.jit
def digamma(x):
    """Reflection, recurrence up to 10, then the asymptotic series: Abramowitz and Stegun, 6.3.7, 6.3.5, 6.3.18."""
    mirrored = x < 0
    y = tl.where(mirrored, 1.0 - x, x)
    result = y * 0.0
    for _ in range(10):
        low = y < 10.0
        result = tl.where(low, result - truediv(1.0, y), result)
        y = tl.where(low, y + 1.0, y)
    z = truediv(1.0, y * y)
    tail = -691.0 / 32760.0 + z * (1.0 / 12.0)
    tail = -1.0 / 240.0 + z * (1.0 / 132.0 + z * tail)
    tail = z * (1.0 / 12.0 + z * (-1.0 / 120.0 + z * (1.0 / 252.0 + z * tail)))
    result = result + log(y) - truediv(0.5, y) - tail
    fraction = x - trunc(x)
    result = tl.where(mirrored, result - truediv(3.141592653589793, tan(fraction * 3.141592653589793)), result)
    result = tl.where(mirrored & (fraction == 0), float("nan"), result)
    result = tl.where(x == float("inf"), x, result)
    return tl.where(x == 0, copysign(x + float("inf"), neg(x)), result)


@triton.jit
def i0(x):
    return libdevice.cyl_bessel_i0(x)


@triton.jit
def i1(x):
    return libdevice.cyl_bessel_i1(x)


@triton.jit
def scaled_bessel_tail(x, mu: tl.constexpr):
    """exp(-x) I_n(x) for large x, mu = 4 n^2: Abramowitz and Stegun, 9.7.1. Exact in double from 30 on."""
    reciprocal_of_8x = truediv(0.125, x)
    term = reciprocal_of_8x * 0.0 + 1.0
    total = term
    for k in tl.static_range(1, 15):
        term = term * (((2 * k - 1) * (2 * k - 1) - mu) / k) * reciprocal_of_8x
        total += term
    return total * truediv(1.0, sqrt(x * 6.283185307179586))


@triton.jit
def i0e(x):
    size = tl.abs(x)
    near = exp(0.0 - size) * i0(size)
    return tl.where(size < 30.0, near, scaled_bessel_tail(tl.maximum(size, 30.0, propagate_nan=tl.PropagateNan.ALL), 0))


@triton.jit
def i1e(x):
    size = tl.abs(x)
    near = exp(0.0 - size) * i1(size)
    far = scaled_bessel_tail(tl.maximum(size, 30.0, propagate_nan=tl.PropagateNan.ALL), 4)
    return copysign(tl.where(size < 30.0, near, far), x)


@triton.jit
def ndtri(x):
    return libdevice.normcdfinv(x)


@triton.jit
def log_ndtr(x):
    scaled = x * 0.7071067811865476
    low = log(erfcx(0.0 - scaled) * 0.5) - scaled * scaled
    return tl.where(x < -1.0, low, log1p(erfc(scaled) * -0.5))


@triton.jit
def bessel_j0(x):
    return libdevice.j0(x)


@triton.jit
def bessel_j1(x):
    return libdevice.j1(x)


@triton.jit
def bessel_y0(x):
    return libdevice.y0(x)


@triton.jit
def bessel_y1(x):
    return libdevice.y1(x)


@triton.jit
def modified_bessel_i0(x):
    return i0(x)


@triton.jit
def modified_bessel_i1(x):
    return i1(x)


@triton.jit
def spherical_bessel_j0(x):
    """sin(x) / x, by its series where that loses digits."""
    z = x * x
    series = 1.0 + z * (-1.0 / 6.0 + z * (1.0 / 120.0 + z * (-1.0 / 5040.0 + z * (1.0 / 362880.0 - z * (1.0 / 39916800.0)))))
    series = tl.where(tl.abs(x) < 0.5, series, truediv(sin(x), x))
    return tl.where(isinf(x), 0.0, series)


# ---- random numbers: see kgen/rng.py -----------------------------------------------------------------------------------


@triton.jit
def philox(seed, counter):
    """The first two words of the block, as uint32."""
    key, block = tl.broadcast(seed.to(tl.uint64), counter.to(tl.uint64))
    k0 = key.to(tl.uint32)
    k1 = (key >> 32).to(tl.uint32)
    c0 = block.to(tl.uint32)
    c1 = (block >> 32).to(tl.uint32)
    c2 = c0 ^ c0
    c3 = c2
    m0 = tl.full([], 0xD2511F53, tl.uint32)
    m1 = tl.full([], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        high1 = tl.umulhi(c2, m1)
        low0 = c0 * m0
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += tl.full([], 0x9E3779B9, tl.uint32)
        k1 += tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1


@triton.jit
def unit_interval(word):
    """The upper 24 of 32 bits as a multiple of 2**-24 in [0, 1)."""
    return (word >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def rand(seed, counter):
    first, _ = philox(seed, counter)
    return unit_interval(first)


@triton.jit
def randn(seed, counter):
    first, second = philox(seed, counter)
    positive = unit_interval(first) + 5.9604644775390625e-08
    return sqrt(libdevice.log(positive) * -2.0) * libdevice.cos(unit_interval(second) * 6.283185307179586)


@triton.jit
def randbits(seed, counter):
    first, second = philox(seed, counter)
    return (first.to(tl.uint64) | (second.to(tl.uint64) << 32)).to(tl.int64)


# ---- reductions and scans: combining functions, folds of a tile along an axis, prefixes along an axis ------------------


@triton.jit
def combine_sum(a, b):
    return a + b


@triton.jit
def combine_prod(a, b):
    return a * b


@triton.jit
def combine_any(a, b):
    return a | b


@triton.jit
def combine_all(a, b):
    return a & b


@triton.jit
def combine_bitxor(a, b):
    return a ^ b


@triton.jit
def fold_sum(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_sum)


@triton.jit
def fold_prod(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_prod)


@triton.jit
def fold_max(x, axis: tl.constexpr):
    return tl.reduce(x, axis, maximum)


@triton.jit
def fold_min(x, axis: tl.constexpr):
    return tl.reduce(x, axis, minimum)


@triton.jit
def fold_any(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_any)


@triton.jit
def fold_all(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_all)


@triton.jit
def fold_bitxor(x, axis: tl.constexpr):
    return tl.reduce(x, axis, combine_bitxor)


@triton.jit
def combine_argmax(a, a_index, b, b_index):
    """The larger value with its index; NaN is larger than all, the smaller index wins among equals."""
    same = (a == b) | ((a != a) & (b != b))
    first = (a > b) | ((a != a) & (b == b)) | (same & (a_index < b_index))
    return tl.where(first, a, b), tl.where(first, a_index, b_index)


@triton.jit
def combine_argmin(a, a_index, b, b_index):
    same = (a == b) | ((a != a) & (b != b))
    first = (a < b) | ((a != a) & (b == b)) | (same & (a_index < b_index))
    return tl.where(first, a, b), tl.where(first, a_index, b_index)


@triton.jit
def fold_argmax(x, index, axis: tl.constexpr):
    return tl.reduce((x, index), axis, combine_argmax)


@triton.jit
def fold_argmin(x, index, axis: tl.constexpr):
    return tl.reduce((x, index), axis, combine_argmin)


@triton.jit
def step_welford(mean, m2, count, x):
    """Welford, "Note on a method for calculating corrected sums of squares and products" (1962)."""
    count += 1.0
    delta = x - mean
    mean += truediv(delta, count)
    return mean, m2 + delta * (x - mean), count


@triton.jit
def combine_welford(mean, m2, count, other_mean, other_m2, other_count):
    """Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979)."""
    both = count + other_count
    share = truediv(other_count, tl.where(both == 0, 1.0, both))
    delta = other_mean - mean
    # a state without elements changes nothing, though the other's mean be infinite
    joined = tl.where(count == 0, other_mean, tl.where(other_count == 0, mean, mean + delta * share))
    between = tl.where((count == 0) | (other_count == 0), 0.0, delta * delta * (count * share))
    return joined, m2 + other_m2 + between, both


@triton.jit
def fold_welford(mean, m2, count, axis: tl.constexpr):
    return tl.reduce((mean, m2, count), axis, combine_welford)


@triton.jit
def scan_sum(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_sum)


@triton.jit
def scan_prod(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, combine_prod)


@triton.jit
def scan_max(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, maximum)


@triton.jit
def scan_min(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, minimum)


@triton.jit
def scan_logaddexp(x, axis: tl.constexpr):
    return tl.associative_scan(x, axis, logaddexp)


@triton.jit
def follow_argmax(a, a_index, b, b_index):
    """b stands behind a, and wins among equals and among NaNs."""
    later = (b >= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, b_index, a_index)


@triton.jit
def follow_argmin(a, a_index, b, b_index):
    later = (b <= a) | (b != b)
    return tl.where(later, b, a), tl.where(later, b_index, a_index)


@triton.jit
def scan_argmax(x, index, axis: tl.constexpr):
    return tl.associative_scan((x, index), axis, follow_argmax)


@triton.jit
def scan_argmin(x, index, axis: tl.constexpr):
    return tl.associative_scan((x, index), axis, follow_argmin)


# ---- index arithmetic and walks of long rows ---------------------------------------------------------------------------


@triton.jit
def index_div(a, b):
    """Floor division by a positive divisor."""
    quotient = a // b
    return quotient - (a < quotient * b).to(quotient.dtype)


@triton.jit
def index_mod(a, b):
    return a - index_div(a, b) * b


@triton.jit
def index_pow(a, b):
    """By a small non-negative exponent that is the same everywhere."""
    result = a * 0 + 1
    for _ in range(b):
        result = result * a
    return result


@triton.jit
def last_column(tile, width: tl.constexpr):
    """The last column of a tile of `width` columns, as a tile of one."""
    last = tl.arange(0, width)[None, :] == width - 1
    if tile.dtype == tl.int1:
        return (tl.max(tl.where(last, tile.to(tl.int8), 0), 1)[:, None]) != 0
    kept = tl.where(last, tile, tl.zeros([1, 1], tile.dtype))
    return tl.sum(kept, 1)[:, None].to(tile.dtype)


@triton.jit
def step_rescaled(top, total, value, weight):
    """A running maximum, and the sum of exp(value - maximum) * weight, with one exponential for both cases."""
    apart = tl.where(value == float("-inf"), float("-inf"), 0.0 - tl.abs(value - top))
    factor = exp(apart)
    larger = value > top
    total = tl.where(larger, total * factor + weight, total + factor * weight)
    return maximum(top, value), total


@triton.jit
def fold_rescaled(top, total, axis: tl.constexpr):
    whole = fold_max(top, axis)
    return whole, tl.sum(total * exp(top - whole[:, None]), axis)
