"""What templates with an online softmax call: a row's maximum and the weights of a tile, in powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.intrinsics import approximate_exp2
from kgen.templates.triton.device.matmul import waited


@triton.jit
def shift_of(highest, scale: tl.constexpr):
    """What is subtracted of scores in powers of two: `scale` times the highest of a row, nothing of one that is -inf so far."""
    return tl.where(highest == float("-inf"), 0.0, highest) * scale


@triton.jit
def power_of(scores, shift, scale: tl.constexpr):
    """2^(scale * scores - shift), rounded once before the power is taken."""
    return approximate_exp2(tl.fma(scores, tl.full(scores.shape, scale, scores.dtype), tl.broadcast_to(-shift, scores.shape)))


@triton.jit
def dot_of_weights(weights, right, acc, precision: tl.constexpr):
    """acc + weights right, where the weights are in registers: the next tile's may overwrite them only once these were
    multiplied (`finished`)."""
    if precision == "tf32" or precision == "tf32+wait":  # noqa: PLR1714  Triton knows no `in`
        return waited(weights, right, acc, "tf32")
    else:
        return waited(weights, right, acc, "ieee")


@triton.jit
def add_entries(total, x, entry, count):
    """The sums of entries below `count`, with what a tile adds to each. Four entries at a time: a sum of a whole tile goes
    through shared memory, and four of them do so at once. Most tiles have one entry."""
    entry = entry.to(tl.int32)
    first = tl.min(tl.where(entry < 0, count, entry))
    last = tl.minimum(tl.max(entry) + 1, count)
    fours = first + tl.maximum(last - first, 0) // 4 * 4
    for c in range(first, fours, 4):
        total += sums_of_four(x, entry, c, total)
    for c in range(fours, last):
        one = tl.sum(tl.sum(tl.where(entry == c, x, 0.0), 1), 0)
        total += tl.where(tl.arange(0, total.shape[0]) == c, one, 0.0)
    return total


@triton.jit
def sums_of_four(x, entry, c, total):
    """What a tile adds to the entries from c on, in a tensor of all entries."""
    even = tl.join(tl.where(entry == c, x, 0.0), tl.where(entry == c + 2, x, 0.0))
    odd = tl.join(tl.where(entry == c + 1, x, 0.0), tl.where(entry == c + 3, x, 0.0))
    sums = tl.reshape(tl.sum(tl.sum(tl.join(even, odd), 1), 0), [4])
    hit = tl.arange(0, total.shape[0])[:, None] == c + tl.arange(0, 4)[None, :]
    return tl.sum(tl.where(hit, sums[None, :], 0.0), 1)
