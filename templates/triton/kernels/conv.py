"""Convolutions on GPUs by pointers, as implicit GEMMs: rows are positions of all images, columns output channels, and the sum
goes over filter taps and channels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Input, Problem
from kgen.templates.triton.kernels import conv_estimate
from kgen.templates.triton.kernels.matmul import ASYNCHRONOUS, LARGEST_EXACT, MIN_BLOCK, refuse_dot, refuse_empty

# The first compute capability whose tensor cores multiply all of the types.
LEAST_ARCH = 80
# Rows, columns and channels of a tile of 16-bit numbers, warps and stages, and whether one loop goes through taps and channels.
TILES = (
    (128, 256, 64, 8, 3, 1), (128, 128, 64, 8, 3, 1), (128, 128, 64, 4, 3, 1), (256, 128, 64, 8, 3, 1), (128, 128, 32, 4, 4, 1),
    (128, 64, 64, 4, 4, 1), (256, 64, 64, 8, 3, 1), (64, 64, 64, 4, 4, 1), (64, 128, 64, 4, 4, 1), (128, 128, 64, 8, 3, 0),
    (128, 64, 64, 4, 3, 0), (64, 256, 64, 8, 3, 1), (64, 32, 64, 4, 4, 1), (128, 32, 32, 4, 4, 1), (32, 32, 64, 4, 3, 1),
    (64, 16, 32, 4, 3, 1),
)  # fmt: skip


@template(implements=contraction("g,m+t,c", "g,t,c,n -> g,m,n"), device="cuda", source="conv.py.jinja", name="triton_conv")
class Conv(KernelTemplate):
    """Y[g, m, n] = sum over taps t and channels c of X[g, m + t, c] F[g, t, c, n], of each group g."""

    X, F, Y = operand("g", "m+t", "c", access="predicated"), operand("g", "t", "c", "n"), result("g", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_C = knob(128, 64, 32, 256), knob(128, 64, 32, 16, 256), knob(64, 32, 16)
    GROUP, FLATTEN, WARPS, STAGES = knob(8), knob(1, 0), knob(4, 8), knob(3, 4, 2)

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.arch < LEAST_ARCH:
            return f"it needs compute capability {LEAST_ARCH / 10}"
        return refuse_empty(problem) or refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        size = problem.main_dtype.itemsize
        largest = LARGEST_EXACT if problem.exact_float32 else math.inf
        for m, n, c, warps, stages, flat in TILES:
            depth = min(c * 2 // max(size, 2), _padded(problem.size("c")))
            if m * n <= largest and n <= max(2 * MIN_BLOCK, _padded(problem.size("n"))):
                yield {
                    "BLOCK_M": m, "BLOCK_N": n, "BLOCK_C": depth, "FLATTEN": flat, "WARPS": warps, "STAGES": stages,
                }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        stages = config.STAGES if config.BLOCK_M >= ASYNCHRONOUS else max(1, config.STAGES - 1)
        staged = sum(_staged(problem, config, one, stages) for one in problem.inputs.values())
        area = config.BLOCK_M * config.BLOCK_N
        return Resources(max(staged, 4 * area) + 1024, area // (config.WARPS * 32) + 80)

    def seconds(self, problem: Problem, config: Config) -> float:
        return conv_estimate.implicit_gemm(problem, config, self.resources(problem, config))

    def uncalibrated(self, problem: Problem) -> str | None:
        return "no GPU has measured it yet"


def _padded(length: int) -> int:
    """The power of two that so many channels fit in."""
    return max(MIN_BLOCK, 1 << (length - 1).bit_length())


def _staged(problem: Problem, config: Config, one: Input, stages: int) -> int:
    """Shared memory of an operand's tiles: of all stages, and once more of one that is computed on its way."""
    rows, depth = (config.get(problem.template.block(axis) or "") for axis in problem.operand_axes(one.name))
    return rows * depth * one.dtype.itemsize * (stages + (problem.copied(one) is None))
