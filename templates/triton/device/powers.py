"""Powers of float32, by an exponent of any size.

libdevice adds up a logarithm of two parts without multiply-add instructions, and asks for each special value by itself: 90
instructions by a constant and 120 by another tensor. Here it is half of that.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from kgen.templates.triton.device.arithmetic import neg, signbit
from kgen.templates.triton.device.intrinsics import approximate_exp2, approximate_reciprocal


@triton.jit
def pow(a, b):  # noqa: A001
    if a.dtype.is_fp64():
        return libdevice.pow(a, b)
    else:
        whole, half = tl.floor(b) == b, b * 0.5
        found, ordinary = power_of_size(tl.abs(a), b)
        found = tl.where(whole & (tl.floor(half) != half) & signbit(a), neg(found), found)
        found = tl.where(signbit(a) & ordinary & ~whole, float("nan"), found)
        beyond = ~(tl.abs(b) < float("inf"))
        one = (b == 0) | (beyond & ((a == 1) | ((a == -1) & (b == b))))  # noqa: PLR0124 (also of and to no number)
        return tl.where(one, 1.0, found)


@triton.jit
def power_of_size(x, b):
    """x^b of x >= 0, and whether x is neither 0 nor infinite. What rounds off the exponent of two, times log(2), is the power's
    relative error. An exponent of 128 may have been rounded to that: so it ends below, and the rest says whether the power is
    finite."""
    high, low, ordinary = parts_of_log2(x)
    exponent = b * high
    near = ordinary & (tl.abs(exponent) < 200.0)
    exponent = tl.where(near, tl.minimum(exponent, 127.99999237060547), exponent)
    rest = tl.fma(b, low, tl.fma(b, high, neg(exponent)))
    found = approximate_exp2(exponent) * tl.where(near, tl.fma(rest, 0.6931471805599453, 1.0), 1.0)
    most = tl.where(near & (rest < 7.62939453125e-06), 3.4028234663852886e38, float("inf"))
    return tl.where(found > most, most, found), ordinary


@triton.jit
def parts_of_log2(x):
    """log2(x) of x >= 0 as a sum of two, with a relative error of 2^-30, and whether x is neither 0 nor infinite.

    With x = 2^n m, m between the roots of 1/2 and 2, and s = (m - 1) / (m + 1), it is n + 2 / log(2) (s + s^3/3 + s^5/5 + ...).
    The quotient is corrected by its exact remainder (Markstein 1990), which takes part in its cube as well. Sums of two
    numbers keep what they round off (Dekker 1971)."""
    small = x < 1.1754943508222875e-38
    x = tl.where(small, x * 8388608.0, x)
    bits = x.to(tl.int32, bitcast=True)
    ordinary = (bits > 0) & (bits < 0x7F800000)
    n = (bits - 0x3F3504F3) >> 23
    m = (bits - (n << 23)).to(tl.float32, bitcast=True)
    above, below = m - 1.0, m + 1.0
    inverse = approximate_reciprocal(below)
    s = above * inverse
    rest = tl.fma(neg(s), m - (below - 1.0), tl.fma(neg(s), below, above)) * inverse
    z = s * s
    terms = tl.fma(z, 0.2623081892525388, 0.32059889797532523)
    terms = tl.fma(z, terms, 0.4121985831111324)
    terms = tl.fma(z, terms, 0.5770780163555854)
    terms = tl.fma(z, terms, 0.9617966939259757)
    most = s * 2.885390043258667
    less = tl.fma(s, 3.85192597818218e-08, tl.fma(s, 2.885390043258667, neg(most)))
    less = tl.fma(s * z, terms, tl.fma(rest, tl.fma(z, 2.885390043258667, 2.885390043258667), less))
    whole = n.to(tl.float32) - tl.where(small, 23.0, 0.0)
    high = whole + most
    less = less + (most - (high - whole))
    total = high + less
    low = less - (total - high)
    return tl.where(ordinary, total, tl.where(x == 0, float("-inf"), x)), low, ordinary
