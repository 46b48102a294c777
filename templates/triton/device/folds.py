"""Reductions and scans in Triton: functions that combine, folds of a tile along an axis, prefixes along an axis."""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.arithmetic import maximum, minimum, truediv
from kgen.templates.triton.device.functions import logaddexp


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
    best = fold_max(x, axis)
    return best, first_of(x, best, index, axis)


@triton.jit
def fold_argmin(x, index, axis: tl.constexpr):
    best = fold_min(x, axis)
    return best, first_of(x, best, index, axis)


@triton.jit
def first_of(x, best, index, axis: tl.constexpr):
    """The smallest index of the elements that are `best`, or of those that are no number, since `best` is one of them then. Two
    folds of one tensor each take half of the operations of one fold of pairs; and that would move the accumulators of a matmul
    to the layout of the indices."""
    found = (x == tl.expand_dims(best, axis)) | (x != x)
    most: tl.constexpr = 2**63 - 1 if index.dtype.primitive_bitwidth == 64 else 2**31 - 1
    return tl.min(tl.where(found, index, most), axis)


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
    """Of a tile in registers, in two passes as Chan, Golub and LeVeque describe: the mean first, then the squares around it.
    Combining states by pairs divides for each, which takes ptxas ten seconds where a thread holds 128 elements. Means are
    weighted before they are added up, so that large ones do not overflow."""
    total = tl.reduce(count, axis, combine_sum)
    share = truediv(1.0, tl.where(total == 0, 1.0, total))
    weighted = tl.where(count == 0, 0.0, mean * (count * tl.expand_dims(share, axis)))
    joined = tl.reduce(weighted, axis, combine_sum)
    delta = tl.where(count == 0, 0.0, mean - tl.expand_dims(joined, axis))
    return joined, tl.reduce(m2 + delta * delta * count, axis, combine_sum), total


@triton.jit
def scan_sum(x, axis: tl.constexpr, backwards: tl.constexpr = False):
    return tl.associative_scan(x, axis, combine_sum, reverse=backwards)


@triton.jit
def scan_prod(x, axis: tl.constexpr, backwards: tl.constexpr = False):
    return tl.associative_scan(x, axis, combine_prod, reverse=backwards)


@triton.jit
def scan_max(x, axis: tl.constexpr, backwards: tl.constexpr = False):
    return tl.associative_scan(x, axis, maximum, reverse=backwards)


@triton.jit
def scan_min(x, axis: tl.constexpr, backwards: tl.constexpr = False):
    return tl.associative_scan(x, axis, minimum, reverse=backwards)


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
