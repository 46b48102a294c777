"""Convolutions on GPUs by pointers, as implicit GEMMs: rows are positions of all images, columns output channels, and the sum
goes over filter taps and channels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.problem import Input, Problem
from kgen.templates.triton.codegen.tma_layout import in_registers
from kgen.templates.triton.kernels import conv_estimate
from kgen.templates.triton.kernels.matmul import ASYNCHRONOUS, LARGEST_EXACT, MIN_BLOCK, refuse_dot, refuse_empty

# The first compute capability whose tensor cores multiply all of the types, and the first one that reads their operands from
# shared memory. Before it threads hold operands, too: registers for each byte that a thread loads in a step.
LEAST_ARCH, FROM_SHARED = 80, 90
PER_BYTE = 3 / 16
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
        staged = sum(staged_bytes(problem, config, one, stages) for one in problem.inputs.values())
        area = config.BLOCK_M * config.BLOCK_N
        return Resources(max(staged, 4 * area) + 1024, area // (config.WARPS * 32) + 80 + operand_registers(problem, config))

    def seconds(self, problem: Problem, config: Config) -> float:
        return conv_estimate.implicit_gemm(problem, config, self.resources(problem, config))

    def uncalibrated(self, problem: Problem) -> str | None:
        return "no GPU has measured it yet"


def _padded(length: int) -> int:
    """The power of two that so many channels fit in."""
    return max(MIN_BLOCK, power_of_two(length))


def staged_bytes(problem: Problem, config: Config, one: Input, stages: int) -> int:
    """Shared memory of an operand's tiles: of all stages, and once more of one that is computed or rounded on its way."""
    rows, depth = (config.get(problem.template.block(axis) or "") for axis in problem.operand_axes(one.name))
    return rows * depth * one.dtype.itemsize * (stages + in_registers(problem, one))


def operand_registers(problem: Problem, config: Config, each: float = PER_BYTE) -> int:
    """Registers of a thread for operands and their addresses, `each` of them for a byte."""
    if problem.device.arch >= FROM_SHARED:
        return 0
    loaded = sum(staged_bytes(problem, config, one, 1) for one in problem.inputs.values())
    return int(loaded * each) // (config.WARPS * 32)


# Groups, rows and output channels of a tile, and warps: of channels that lie side by side, and of few groups.
DIRECT_TILES = (
    (64, 32, 1, 4), (32, 64, 1, 4), (64, 64, 1, 4), (128, 32, 1, 4), (32, 32, 1, 4), (128, 16, 1, 4), (16, 128, 1, 4),
    (8, 128, 1, 4), (32, 32, 2, 4), (16, 32, 4, 4), (1, 512, 1, 4), (1, 1024, 1, 4), (1, 256, 1, 4), (4, 256, 1, 4),
    (1, 256, 2, 4), (1, 128, 8, 4), (1, 128, 16, 4), (1, 64, 32, 4), (1, 128, 32, 4), (1, 64, 64, 4), (1, 32, 64, 4),
    (1, 32, 128, 4), (1, 64, 64, 8),
)  # fmt: skip
# The most steps that are written out side by side (compilers take seconds for 49), fewer where filters take registers; the
# most elements that a thread loads for them, or registers spill; and the most channels of a group.
MOST_UNROLLED, FEW_UNROLLED, LOADED, FEW_CHANNELS = 16, 4, 128, 16


@dataclass(frozen=True, slots=True)
class Facts:
    """How many steps of a sum are written out side by side."""

    unrolled: int


@template(
    implements=contraction("g,m+t,c", "g,t,c,n -> g,m,n"), device="cuda", source="conv_direct.py.jinja",
    name="triton_conv_direct",
)  # fmt: skip
class DirectConv(KernelTemplate):
    """The same without matrix units: depthwise, or of few channels."""

    X, F, Y = operand("g", "m+t", "c", access="predicated"), operand("g", "t", "c", "n"), result("g", "m", "n")
    BLOCK_G, BLOCK_M, BLOCK_N = (
        knob(64, 1, 4, 8, 16, 32, 128),
        knob(32, 16, 64, 128, 256, 512, 1024),
        knob(1, 2, 4, 8, 16, 32, 64, 128),
    )
    WARPS, STAGES = knob(4, 8), knob(2)
    longest: ClassVar = {"c": FEW_CHANNELS}

    def refuse(self, problem: Problem) -> str | None:
        return refuse_empty(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        most = {axis: power_of_two(problem.size(axis)) for axis in "gn"}
        for g, m, n, warps in DIRECT_TILES:
            if g <= most["g"] and n <= most["n"]:
                yield {"BLOCK_G": g, "BLOCK_M": m, "BLOCK_N": n, "WARPS": warps}
        if most["g"] < MIN_BLOCK and most["n"] == 1:
            yield {"BLOCK_G": most["g"], "BLOCK_M": 64, "BLOCK_N": 1}

    def resources(self, problem: Problem, config: Config) -> Resources:
        area = config.BLOCK_G * config.BLOCK_M * config.BLOCK_N
        tiles = config.BLOCK_G * (config.BLOCK_M + config.BLOCK_N)
        words = problem.accumulator.itemsize // 4 or 1
        return Resources(4 * words * area, words * (2 * area + 2 * tiles) // (config.WARPS * 32) + 48)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        steps = (problem.extent("t") * problem.extent("c")).as_int() or 1
        each = config.BLOCK_G * config.BLOCK_M // (config.WARPS * 32)
        most = max(1, min(MOST_UNROLLED, LOADED // max(1, each))) if config.BLOCK_N == 1 else FEW_UNROLLED
        return Facts(max(count for count in range(1, most + 1) if steps % count == 0))

    def seconds(self, problem: Problem, config: Config) -> float:
        return conv_estimate.direct(problem, config, self.resources(problem, config))

    def uncalibrated(self, problem: Problem) -> str | None:
        return conv_estimate.direct_unmeasured(problem)


def power_of_two(length: int) -> int:
    """The power of two that so many fit in."""
    return 1 << (length - 1).bit_length()
