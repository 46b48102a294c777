"""What a CPU's library takes for a convolution, or for one of its gradients.

Measured on two threads of an Intel Xeon with AMX and of an AMD EPYC with AVX-512, with images whose channels are the innermost
dimension: the constants fit both within a fifth (docs/decisions/0029-prices-of-cpu-convolutions.md). The library brings filters
into an order of its own at each call, and their gradient back from it. Frozen filters have that order before the call, and are
read while others are multiplied (docs/decisions/0031-frozen-convolutions-on-cpus.md).
"""

from __future__ import annotations

import math

import torch

from kgen.ir import nodes as ir
from kgen.templates.problem import Problem

__all__ = ["convolution_on_cpu"]

# Seconds of a call through torch: of a convolution, and of each gradient, of which one call makes several.
CALL, GRADIENT = 60e-6, 40e-6
# Shares of the rate: of sums over channels, of one channel each, and of the gradient of such filters.
RATE, OF_CHANNELS, OF_CHANNELS_FILTERS = 0.75, 0.35, 0.03
# Shares of the bandwidth: of filters, of those that gradients read or write, and of images, in 32 bits and in 16.
FILTERS, GRADIENT_FILTERS, IMAGES, NARROW_IMAGES = 0.28, 0.15, 0.8, 0.25
# The same where filters are frozen: of the rate, and of the bandwidth of images.
FROZEN_RATE, FROZEN_IMAGES = 0.68, 1.2


def convolution_on_cpu(problem: Problem, call: ir.Extern) -> float:
    """Seconds of the library's call, without what it does to the results in the same call."""
    gradient = len(call.outs) > 1
    tensors = [one for one in call.args if isinstance(one, ir.TensorArg)]
    filters = tensors[2 if gradient else 1]
    of_filters = gradient and call.outs[0] is None
    read = _bytes(problem, filters)
    images = sum(_bytes(problem, one) for one in tensors[: 2 if of_filters else 1])
    images += 0 if of_filters else problem.size_of_result
    if not gradient and filters.buffer in problem.graph.frozen:
        return CALL + _of_frozen(problem, filters, read, images)
    wide = problem.main_dtype.itemsize >= torch.float32.itemsize
    moving = read / (GRADIENT_FILTERS if gradient else FILTERS) + images / (IMAGES if wide else NARROW_IMAGES)
    rate = problem.rate * _share(problem, filters, of_filters)
    return (GRADIENT if gradient else CALL) + problem.flops / len(problem.members) / rate + moving / problem.device.bandwidth


def _bytes(problem: Problem, operand: ir.TensorArg) -> int:
    """Of an operand, which may be a view of a buffer of other dimensions."""
    return problem.sizes.points(operand.vars) * operand.dtype.itemsize


def _of_frozen(problem: Problem, filters: ir.TensorArg, read: int, images: int) -> float:
    """Seconds of a convolution whose `filters`, so many bytes of them, the library has in its order."""
    in_tiles = problem.device.in_tiles(problem.main_dtype)
    share = _share(problem, filters, of_filters=False) if _is_depthwise(filters) or in_tiles else FROZEN_RATE
    bandwidth = problem.device.bandwidth
    return max(problem.flops / problem.rate / share, read / bandwidth) + images / FROZEN_IMAGES / bandwidth


def _share(problem: Problem, filters: ir.TensorArg, of_filters: bool) -> float:
    """The share of the rate that sums of products reach. Of instructions that multiply 16-bit floats n times as fast as wide
    ones, about the root of n is left."""
    if _is_depthwise(filters):
        return OF_CHANNELS_FILTERS if of_filters else OF_CHANNELS
    return RATE / math.sqrt(problem.device.narrow) if problem.main_dtype.itemsize == torch.bfloat16.itemsize else RATE


def _is_depthwise(filters: ir.TensorArg) -> bool:
    """Whether each group has one channel."""
    return filters.vars[1].extent.as_int() == 1 and filters.vars[0].extent.as_int() != 1
