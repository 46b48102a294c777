"""Long rows that are walked in steps, and index arithmetic, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.arithmetic import maximum
from kgen.templates.triton.device.folds import fold_max, fold_min, fold_prod, fold_sum


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
        found = tl.max(tl.where(last, tile.to(tl.int8), 0), 1)[:, None] != 0
    else:
        found = tl.sum(tl.where(last, tile, tl.zeros([1, 1], tile.dtype)), 1)[:, None].to(tile.dtype)
    return found


@triton.jit
def step_mean(mean, m2, value, inverse):
    """Welford's step (1962); `inverse` is one over the number of points with this one."""
    apart = value - mean
    mean = mean + apart * inverse
    return mean, m2 + apart * (value - mean)


@triton.jit
def points_seen(length, width: tl.constexpr):
    """How many points of a row each column of its steps has met."""
    return (length - tl.arange(0, width)[None, :] + (width - 1)) // width


@triton.jit
def step_groups(top, total, values, weights, axis: tl.constexpr):
    highest = maximum(top, fold_max(values, axis))
    base = tl.where(highest == float("-inf"), 0.0, highest)
    terms = tl.exp(values - tl.expand_dims(base, axis)) * weights
    return highest, total * tl.exp(top - base) + tl.sum(terms, axis)


@triton.jit
def step_rescaled(top, total, value, weight, width: tl.constexpr):
    """Running maxima, and sums of exp(value - maximum) * weight, one for `width` neighbouring columns: so many of one thread's
    values share a correction of the sum. The hardware's exponential is as exact here as any: where its relative error grows,
    far from the maximum, the term vanishes."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1] // width
    values, weights = tl.reshape(value, [rows, columns, width]), tl.reshape(weight, [rows, columns, width])
    return step_groups(top, total, values, weights, 2)


@triton.jit
def step_rescaled_apart(top, total, value, weight, width: tl.constexpr):
    """The same for columns as far apart as possible: they are one thread's where it loads few neighbours at a time."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1] // width
    values, weights = tl.reshape(value, [rows, width, columns]), tl.reshape(weight, [rows, width, columns])
    return step_groups(top, total, values, weights, 1)


@triton.jit
def fold_rescaled(top, total, axis: tl.constexpr):
    whole = fold_max(top, axis)
    return whole, tl.sum(total * tl.exp(top - whole[:, None]), axis)


# ---- rows that share a result: a column of rows, `width` neighbours to a group -----------------------------------------


@triton.jit
def groups_of(rows, width: tl.constexpr):
    count: tl.constexpr = rows.shape[0] // width
    return tl.reshape(rows, [count, width])


@triton.jit
def to_members(groups, width: tl.constexpr):
    count: tl.constexpr = groups.shape[0]
    return tl.reshape(tl.broadcast_to(groups[:, None], [count, width]), [count * width, 1])


@triton.jit
def join_group_sum(rows, width: tl.constexpr):
    return to_members(fold_sum(groups_of(rows, width), 1), width)


@triton.jit
def join_group_prod(rows, width: tl.constexpr):
    return to_members(fold_prod(groups_of(rows, width), 1), width)


@triton.jit
def join_group_max(rows, width: tl.constexpr):
    return to_members(fold_max(groups_of(rows, width), 1), width)


@triton.jit
def join_group_min(rows, width: tl.constexpr):
    return to_members(fold_min(groups_of(rows, width), 1), width)


@triton.jit
def join_group_rescaled(top, total, width: tl.constexpr):
    """A row of -inf alone has no sum (NaN), but adds nothing to those of a group that has other elements."""
    whole = join_group_max(top, width)
    nothing = (top == float("-inf")) & (whole > float("-inf"))
    return whole, join_group_sum(tl.where(nothing, 0.0, total * tl.exp(top - whole)), width)


@triton.jit
def join_group_welford(mean, m2, count, width: tl.constexpr):
    """All rows of a group have the same count."""
    common = to_members(fold_sum(groups_of(mean, width), 1), width) * (1.0 / width)
    apart = mean - common
    return common, join_group_sum(m2 + count * apart * apart, width)


# ---- blocks of a row: `width` neighbours along it share a result -------------------------------------------------------


@triton.jit
def blocks_of(tile, width: tl.constexpr):
    rows: tl.constexpr = tile.shape[0]
    count: tl.constexpr = tile.shape[1] // width
    return tl.reshape(tile, [rows, count, width])


@triton.jit
def to_points(blocks, width: tl.constexpr):
    rows: tl.constexpr = blocks.shape[0]
    count: tl.constexpr = blocks.shape[1]
    return tl.reshape(tl.broadcast_to(blocks[:, :, None], [rows, count, width]), [rows, count * width])


@triton.jit
def side_by_side_2(first, second):
    return tl.join(first, second)


@triton.jit
def side_by_side_4(first, second, third, fourth):
    pairs = tl.join(tl.join(first, third), tl.join(second, fourth))
    if len(first.shape) == 1:
        made = tl.reshape(pairs, [first.shape[0], 4])
    else:
        made = tl.reshape(pairs, [first.shape[0], first.shape[1], 4])
    return made


@triton.jit
def alternating(even, odd):
    """Rows whose elements take turns."""
    if len(even.shape) == 2:
        made = tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])
    else:
        made = tl.reshape(tl.join(even, odd), [even.shape[0], even.shape[1], 2 * even.shape[2]])
    return made


@triton.jit
def fold_blocks_sum(tile, width: tl.constexpr):
    return to_points(fold_sum(blocks_of(tile, width), 2), width)


@triton.jit
def fold_blocks_max(tile, width: tl.constexpr):
    return to_points(fold_max(blocks_of(tile, width), 2), width)


@triton.jit
def fold_blocks_min(tile, width: tl.constexpr):
    return to_points(fold_min(blocks_of(tile, width), 2), width)
