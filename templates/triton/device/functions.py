"""Elementary and special functions in Triton: those of CUDA's libdevice, which eager CUDA kernels use too.

Triton links libdevice with subnormal float32 numbers flushed to zero. Where a flushed argument would change more than a last
subnormal digit, as in log or atan2, the functions here scale it. Those that are next to a multiple of x give that of a tiny
one, so that sin(x) / x is 1.

Functions of float32 that lose digits next to their zeros and poles, or more than 4 ulp anywhere, compute in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kgen.templates.triton.device.arithmetic import copysign, isinf, maximum, neg, reciprocal, sqrt, truediv, trunc
from kgen.templates.triton.device.intrinsics import approximate_exp2, approximate_reciprocal


@triton.jit
def unless_tiny(x, found, slope: tl.constexpr = 1.0):
    """`found`, but x itself, times `slope`, where a float32 x is so near zero that its function is that, and may be flushed."""
    if x.dtype.is_fp32():
        found = tl.where(tl.abs(x) < 2.3509887016445750e-38, x * slope, found)
    return found


# ---- elementary functions ----------------------------------------------------------------------------------------------


@triton.jit
def exp(x):
    return libdevice.exp(x)


@triton.jit
def exp2(x):
    return libdevice.exp2(x)


@triton.jit
def expm1(x):
    return unless_tiny(x, libdevice.expm1(x))


@triton.jit
def log(x):
    if x.dtype.is_fp64():
        return libdevice.log(x)
    else:
        small = x < 1.1754943508222875e-38
        return libdevice.log(tl.where(small, x * 8388608.0, x)) - tl.where(small, 15.9423847, 0.0)


@triton.jit
def log2(x):
    if x.dtype.is_fp64():
        return libdevice.log2(x)
    else:
        small = x < 1.1754943508222875e-38
        return libdevice.log2(tl.where(small, x * 8388608.0, x)) - tl.where(small, 23.0, 0.0)


@triton.jit
def log10(x):
    if x.dtype.is_fp64():
        return libdevice.log10(x)
    else:
        small = x < 1.1754943508222875e-38
        return libdevice.log10(tl.where(small, x * 8388608.0, x)) - tl.where(small, 6.92368990, 0.0)


@triton.jit
def log1p(x):
    return unless_tiny(x, libdevice.log1p(x))


@triton.jit
def logaddexp(a, b):
    top = maximum(a, b)
    # equal infinities have no difference
    return tl.where((a == b) & isinf(a), a, top + log1p(exp(0.0 - tl.abs(a - b))))


@triton.jit
def sigmoid(x):
    """Of float32 the hardware's reciprocal is as exact as the exponential. A quarter of the divisor has one without a subnormal
    number, which the instruction would flush."""
    if x.dtype.is_fp64():
        return reciprocal(1.0 + exp(0.0 - x))
    else:
        return 0.25 * approximate_reciprocal(tl.fma(exp(0.0 - x), 0.25, 0.25))


@triton.jit
def fast_exp(x, scale: tl.constexpr = 1.0):
    """exp(scale x)."""
    return approximate_exp2(x * (scale * 1.4426950408889634))


@triton.jit
def fast_sigmoid(x, scale: tl.constexpr = 1.0):
    """sigmoid(scale x)."""
    return approximate_reciprocal(1.0 + fast_exp(x, -1.0 * scale))


@triton.jit
def fast_erf(x):
    """Abramowitz and Stegun, "Handbook of Mathematical Functions", 7.1.26: its absolute error is below 2e-7."""
    magnitude = tl.abs(x)
    t = approximate_reciprocal(1.0 + 0.3275911 * magnitude)
    terms = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    found = 1.0 - terms * fast_exp(magnitude * magnitude, -1.0)
    return tl.where(x < 0, 0.0 - found, found)


@triton.jit
def fast_tanh(x):
    """1 - 2 / (exp(2x) + 1), whose absolute error is a few units of 2^-24: near zero, where that counts, x - x^3 / 3."""
    far = 1.0 - 2.0 * fast_sigmoid(x, -2.0)
    return tl.where(tl.abs(x) < 0.04, x - x * x * x * 0.33333334, far)


@triton.jit
def sin(x):
    return unless_tiny(x, libdevice.sin(x))


@triton.jit
def cos(x):
    return libdevice.cos(x)


@triton.jit
def tan(x):
    return unless_tiny(x, libdevice.tan(x))


@triton.jit
def asin(x):
    return unless_tiny(x, libdevice.asin(x))


@triton.jit
def acos(x):
    return libdevice.acos(x)


@triton.jit
def atan(x):
    return unless_tiny(x, libdevice.atan(x))


@triton.jit
def sinh(x):
    return unless_tiny(x, libdevice.sinh(x))


@triton.jit
def cosh(x):
    return libdevice.cosh(x)


@triton.jit
def tanh(x):
    return unless_tiny(x, libdevice.tanh(x))


@triton.jit
def asinh(x):
    return unless_tiny(x, libdevice.asinh(x))


@triton.jit
def acosh(x):
    return libdevice.acosh(x)


@triton.jit
def atanh(x):
    return unless_tiny(x, libdevice.atanh(x))


@triton.jit
def atan2(a, b):
    if a.dtype.is_fp64():
        return libdevice.atan2(a, b)
    else:
        scale = tl.where((tl.abs(a) < 1e-30) & (tl.abs(b) < 1e30), 8388608.0, 1.0)
        return libdevice.atan2(a * scale, b * scale)


@triton.jit
def hypot(a, b):
    if a.dtype.is_fp64():
        return libdevice.hypot(a, b)
    else:
        small = (tl.abs(a) < 1e-20) & (tl.abs(b) < 1e-20)
        scale = tl.where(small, 16777216.0, 1.0)
        return libdevice.hypot(a * scale, b * scale) * tl.where(small, 5.9604644775390625e-08, 1.0)


# ---- special functions -------------------------------------------------------------------------------------------------


@triton.jit
def erf(x):
    return libdevice.erf(x)


@triton.jit
def erfc(x):
    return libdevice.erfc(x)


@triton.jit
def erfinv(x):
    return unless_tiny(x, libdevice.erfinv(x), 0.8862269254527580)


@triton.jit
def erfcx(x):
    found = libdevice.erfcx(x)
    if x.dtype.is_fp32():  # may be subnormal from 4e37 on: its gradient multiplies it by x
        found = tl.where(x > 1e20, truediv(0.5641895835477563, x), found)
    return found


@triton.jit
def has_negative(x):
    """Whether any element of a tile is below 0, for a branch of all of its threads."""
    return tl.max((x < 0).to(tl.int32), None) > 0


@triton.jit
def lgamma(x):
    """Of float32 in its own precision, where no element of the tile is negative: below 3 units in the last place."""
    if x.dtype.is_fp32() and x.type.is_block():
        if has_negative(x):  # noqa: SIM108 (Triton branches on a statement only)
            found = libdevice.lgamma(x.to(tl.float64)).to(x.dtype)
        else:
            found = lgamma_of_positive(x)
        return found
    else:
        return libdevice.lgamma(x.to(tl.float64)).to(x.dtype)


@triton.jit
def lgamma_of_positive(x):
    """From 8 on Stirling's series (Abramowitz and Stegun, 6.1.41). Between .5 and 8 (x - 1) (x - 2) times a rational function,
    with a relative error of 1e-8: a weighted least-squares fit. Below that, the recurrence."""
    low = x < 0.5
    near = tl.where(low, x + 1.0, tl.minimum(x, 8.0)).to(tl.float64)
    above = 0.01364509077 + near * 4.298153057e-05
    above = 0.0405712461 + near * (0.3835534347 + near * (0.6027925863 + near * (0.2066299456 + near * above)))
    below = 0.1151065823 + near * 0.003913628991
    below = 0.01880392612 + near * (0.354399625 + near * (1.0 + near * (0.6685548931 + near * below)))
    zeros = tl.where(low, x * (x - 1.0), (x - 1.0) * (x - 2.0))
    made = zeros * truediv(above.to(tl.float32), below.to(tl.float32))
    log_x = log(x)
    inverse = truediv(1.0, x)
    z = inverse * inverse
    tail = inverse * (1.0 / 12.0 + z * (-1.0 / 360.0 + z * (1.0 / 1260.0)))
    far = (x - 0.5) * (log_x - 1.0) + (tail + 0.4189385332046727)
    return tl.where(x < 8.0, tl.where(low, made - log_x, made), far)


@triton.jit
def digamma(number):
    """Of float32 in its own precision, where no element of the tile is negative: below 3 units in the last place."""
    if number.dtype.is_fp32() and number.type.is_block():
        if has_negative(number):  # noqa: SIM108
            found = digamma_in_doubles(number)
        else:
            found = digamma_of_positive(number)
        return found
    else:
        return digamma_in_doubles(number)


@triton.jit
def digamma_of_positive(x):
    """From 6 on the asymptotic series. Between 1 and 6 the distance from the root, whose first 24 bits are exact, times a
    rational function, with a relative error of 3e-9: a weighted least-squares fit. Below that, the recurrence."""
    low = x < 1.0
    near = tl.where(low, x + 1.0, tl.minimum(x, 6.0)).to(tl.float64)
    above = 0.5969214454 + near * (0.046902087 + near * 0.0001591913044)
    above = 0.5765747484 + near * (1.399683883 + near * above)
    below = 1.0 + near * (0.2456411577 + near * 0.01114585987)
    below = 0.0006350006586 + near * (0.8381337925 + near * below)
    distance = tl.where(low, (x - 0.4616321325302124) - 1.243814994e-08, (x - 1.4616321325302124) - 1.243814994e-08)
    made = distance * truediv(above.to(tl.float32), below.to(tl.float32))
    inverse = truediv(1.0, x)
    z = inverse * inverse
    tail = z * (1.0 / 12.0 + z * (-1.0 / 120.0 + z * (1.0 / 252.0 + z * (-1.0 / 240.0))))
    far = log(x) - 0.5 * inverse - tail
    return tl.where(x < 6.0, tl.where(low, made - inverse, made), far)


@triton.jit
def digamma_in_doubles(number):
    """Reflection, recurrence up to 10, then the asymptotic series: Abramowitz and Stegun, 6.3.7, 6.3.5, 6.3.18. What the
    recurrence adds up is one fraction: divisions of doubles take longer than all else."""
    x = number.to(tl.float64)
    mirrored = x < 0
    y = tl.where(mirrored, 1.0 - x, x)
    above = y * 0.0
    below = above + 1.0
    for _ in tl.static_range(10):
        low = y < 10.0
        above = tl.where(low, above * y + below, above)
        below = tl.where(low, below * y, below)
        y = tl.where(low, y + 1.0, y)
    inverse = truediv(1.0, y)
    z = inverse * inverse
    tail = -691.0 / 32760.0 + z * (1.0 / 12.0)
    tail = -1.0 / 240.0 + z * (1.0 / 132.0 + z * tail)
    tail = z * (1.0 / 12.0 + z * (-1.0 / 120.0 + z * (1.0 / 252.0 + z * tail)))
    result = log(y) - 0.5 * inverse - tail - truediv(above, below)
    fraction = x - trunc(x)
    cotangent = truediv(libdevice.cospi(fraction), libdevice.sinpi(fraction))
    result = tl.where(mirrored, result - 3.141592653589793 * cotangent, result)
    result = tl.where(mirrored & (fraction == 0), float("nan"), result)
    result = tl.where(x == float("inf"), x, result)
    return tl.where(x == 0, copysign(x + float("inf"), neg(x)), result).to(number.dtype)


@triton.jit
def i0(x):
    value = libdevice.cyl_bessel_i0(x.to(tl.float64)).to(x.dtype)
    return tl.where(isinf(x), float("nan"), value)  # as torch has it


@triton.jit
def i1(x):
    value = libdevice.cyl_bessel_i1(x.to(tl.float64)).to(x.dtype)
    return tl.where(isinf(x), float("nan"), value)


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
    size = tl.abs(x).to(tl.float64)
    near = exp(0.0 - size) * i0(size)
    far = scaled_bessel_tail(tl.maximum(size, 30.0, propagate_nan=tl.PropagateNan.ALL), 0)
    return tl.where(size < 30.0, near, far).to(x.dtype)


@triton.jit
def i1e(x):
    size = tl.abs(x).to(tl.float64)
    near = exp(0.0 - size) * i1(size)
    far = scaled_bessel_tail(tl.maximum(size, 30.0, propagate_nan=tl.PropagateNan.ALL), 4)
    return copysign(tl.where(size < 30.0, near, far).to(x.dtype), x)


@triton.jit
def ndtri(x):
    return libdevice.normcdfinv(x.to(tl.float64)).to(x.dtype)  # in double, where no float32 is subnormal


@triton.jit
def log_ndtr(x):
    scaled = x.to(tl.float64) * 0.7071067811865476
    low = log(erfcx(0.0 - scaled) * 0.5) - scaled * scaled
    return tl.where(x < -1.0, low, log1p(erfc(scaled) * -0.5)).to(x.dtype)


@triton.jit
def bessel_j0(x):
    return tl.where(isinf(x), float("nan"), libdevice.j0(x.to(tl.float64))).to(x.dtype)  # of infinity as torch has it


@triton.jit
def bessel_j1(x):
    return tl.where(isinf(x), float("nan"), libdevice.j1(x.to(tl.float64))).to(x.dtype)  # of infinity as torch has it


@triton.jit
def bessel_y0(x):
    return tl.where((x < 0) | isinf(x), float("nan"), libdevice.y0(x.to(tl.float64))).to(x.dtype)


@triton.jit
def bessel_y1(x):
    return tl.where((x < 0) | isinf(x), float("nan"), libdevice.y1(x.to(tl.float64))).to(x.dtype)


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
