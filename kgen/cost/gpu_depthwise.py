"""What a GPU's library takes for depthwise convolutions, and for gradients of their images: no matrix unit multiplies them.

Times are of an H200 (2026-11-27, bench.gpu_depthwise). Torch has a kernel for channels that lie apart. cuDNN has fast ones for
channels that lie side by side in rows of whole loads, and slow ones for other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.cost.layouts import has_whole_loads
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.templates.problem import Problem

__all__ = ["depthwise_on_gpu", "is_depthwise"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Seconds of an SM for a position of a channel, and for each tap of it."""

    position: float
    tap: float


# 11 x 11 taps 101 us, 3 x 3 125 us and 5 x 5 225 us; 3 x 3 27 us and 5 x 5 50 us; 11 x 11 taps 161 us (4 x 4 took 428).
APART, FAST, SLOW = Rate(0.69e-9, 0.066e-9), Rate(0.09e-9, 0.015e-9), Rate(0.0, 0.114e-9)
# Fast ones of more taps than these: 7 x 7 of 96 channels of 56 x 56 took 82 us, of 192 of 28 x 28 46, of 384 of 14 x 14 24
# (2026-11-30, bench.regret --kernels).
FAST_TAPS, FAST_OF_MORE = 25, Rate(0.09e-9, 0.0225e-9)
# Of windows of one axis, whose channels lie side by side (2026-11-29): 31 taps 72 us, 15 taps 66 us, 9 taps in float32 122 us.
LINES = Rate(2.2e-9, 0.044e-9)
LINE_RANK = 3


def is_depthwise(problem: Problem) -> bool:
    """Whether a library's convolution makes one channel of one, by several taps."""
    axes = problem.template.implements.axes
    return problem.windowed_call is not None and {"c", "n", "t"} <= {*axes} and problem.size("c") == problem.size("n") == 1


def depthwise_on_gpu(problem: Problem, call: ir.Extern) -> float:
    """Seconds of the arithmetic of the library's call."""
    taps = problem.size("t")
    positions = problem.flops / 2 / len(problem.members) / taps
    rate = _rate(problem, call)
    return positions / problem.device.compute_units * (rate.position + taps * rate.tap)


def _rate(problem: Problem, call: ir.Extern) -> Rate:
    image = next(one for one in call.args if isinstance(one, ir.TensorArg))
    strides = problem.graph.buffers[image.buffer].strides
    channels = image.vars[1]  # the image may be a view of a buffer of other dimensions
    if strides is None or ix.stride_of(ix.linearize(image.index, strides), channels) != 1:
        return APART
    if len(image.vars) == LINE_RANK:
        return LINES
    if not has_whole_loads(problem.sizes.of(channels.extent), image.dtype):
        return SLOW
    return FAST if problem.size("t") <= FAST_TAPS else FAST_OF_MORE
