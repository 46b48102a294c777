"""What templates with an online softmax call: a row's maximum and the weights of a tile, in powers of two."""

from __future__ import annotations

import triton
import triton.language as tl

from kgen.templates.triton.device.intrinsics import approximate_exp2, rounded_to_tf32
from kgen.templates.triton.device.matmul import waited


@triton.jit
def shift_of(highest, scale: tl.constexpr, exact: tl.constexpr = False):
    """What is subtracted of scores in powers of two: `scale` times the highest of a row, nothing of one that is -inf so far. Of
    `exact` powers it is the highest score itself."""
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    if exact:
        return shift
    else:
        return shift * scale


@triton.jit
def power_of(scores, shift, scale: tl.constexpr, exact: tl.constexpr = False):
    """2^(scale * scores - shift), rounded once before the power is taken. An `exact` one is 2^(scale * (scores - shift)): the
    highest score's is 1, however large it is."""
    if exact:
        return approximate_exp2((scores - shift) * scale)
    else:
        factor = tl.full(scores.shape, scale, scores.dtype)
        return approximate_exp2(tl.fma(scores, factor, tl.broadcast_to(-shift, scores.shape)))


@triton.jit
def dot_of_weights(weights, right, acc, precision: tl.constexpr):
    """acc + weights right, where the weights are in registers: the next tile's may overwrite them only once these were
    multiplied (`finished`)."""
    if precision == "tf32" or precision == "tf32+wait":  # noqa: PLR1714  Triton knows no `in`
        return waited(rounded_to_tf32(weights), right, acc, "tf32")
    else:
        return waited(weights, right, acc, "ieee")
