"""Gradients of filters on GPUs by pointers: of each filter tap a matmul whose sum goes over the positions of all images."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, contraction, host_value, knob, operand, result, template, workspace
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels import conv_estimate
from kgen.templates.triton.kernels.conv import operand_registers, power_of_two, staged_bytes
from kgen.templates.triton.kernels.matmul import MIN_BLOCK, refuse_dot, refuse_empty, sums_needs

LEAST_ARCH = 80
# Registers for each byte that a thread loads in a step, where operands are held there: each row has an address of its own.
PER_BYTE = 0.6
# Points of the largest tile of exact float32 numbers, which threads hold as well.
MOST_EXACT = 64 * 32
# The most filter taps: of more positions it is no gradient of filters.
MOST_TAPS = 512
# Channels of the image, of the gradient, and positions of a step, warps and stages.
TILES = (
    (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 256, 64, 8, 3), (64, 128, 64, 4, 4), (128, 64, 64, 4, 4),
    (64, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (32, 32, 128, 4, 3), (16, 64, 64, 4, 4), (16, 16, 128, 4, 3),
)  # fmt: skip
# Into how many parts sums are split, and programs for each SM that make it busy.
SPLITS, PROGRAMS = (1, 2, 4, 8, 16, 32, 64, 128), (1, 2, 4)


def _counters(problem: Problem, config: Config) -> Expr:
    """One for each tile whose sum is split."""
    return problem.blocks(config) if config.SPLIT > 1 else ix.ZERO


def _columns(problem: Problem, config: Config) -> Expr:
    """Parts of sums of the gradient's columns, where somebody wants these."""
    return _counters(problem, config) * (config.SPLIT * config.BLOCK_N) if problem.operand_reductions else ix.ZERO


@template(
    implements=contraction("g,t+k,m", "g,k,n -> g,t,m,n"), device="cuda", source="conv_weight.py.jinja",
    name="triton_conv_weight",
)  # fmt: skip
class ConvWeight(KernelTemplate):
    """W[g, t, m, n] = sum over positions k of X[g, t + k, m] D[g, k, n], of each group g, in parts added up in order."""

    X, D = operand("g", "t+k", "m", access="predicated"), operand("g", "k", "n", sums=True)
    W = result("g", "t", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 32, 16), knob(128, 64, 32, 16, 256), knob(64, 32, 128)
    SPLIT, WARPS, STAGES = knob(*SPLITS), knob(4, 8), knob(3, 4, 2)
    longest: ClassVar = {"t": MOST_TAPS}
    SUMS = workspace(torch.float32, lambda p, c: _counters(p, c) * (c.SPLIT * c.BLOCK_M * c.BLOCK_N))
    COLUMNS = workspace(torch.float32, _columns)
    DONE = workspace(torch.int32, _counters, zeroed=True)
    SHARE = host_value(lambda p, c: ix.ceildiv(ix.ceildiv(p.extent("k"), c.BLOCK_K), c.SPLIT) * c.BLOCK_K)

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.arch < LEAST_ARCH:
            return f"it needs compute capability {LEAST_ARCH / 10}"
        if problem.accumulator is not torch.float32:
            return "parts of sums are kept in float32"
        return refuse_empty(problem) or refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        wide = max(1, problem.main_dtype.itemsize // 2)
        most = {axis: max(2 * MIN_BLOCK, power_of_two(problem.size(axis))) for axis in "mn"}
        largest = MOST_EXACT if problem.exact_float32 else math.inf
        for m, n, k, warps, stages in TILES:
            if m <= most["m"] and n <= most["n"] and m * n <= largest:
                for split in _splits(problem, m, n, k // wide):
                    yield {
                        "BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k // wide, "SPLIT": split, "WARPS": warps, "STAGES": stages,
                    }  # fmt: skip

    def resources(self, problem: Problem, config: Config) -> Resources:
        area = config.BLOCK_M * config.BLOCK_N
        staged = sum(staged_bytes(problem, config, one, config.STAGES) for one in problem.inputs.values())
        ones = sums_needs(problem, config)
        registers = area // (config.WARPS * 32) + ones.registers + 80 + operand_registers(problem, config, PER_BYTE)
        return Resources(max(staged + ones.shared, 4 * area) + 1024, registers)

    def grid(self, problem: Problem, config: Config) -> Expr:
        return problem.blocks(config) * config.SPLIT

    def seconds(self, problem: Problem, config: Config) -> float:
        return conv_estimate.weight_gradient(problem, config)

    def uncalibrated(self, problem: Problem) -> str | None:
        return "no GPU has measured it yet"


def _splits(problem: Problem, m: int, n: int, k: int) -> list[int]:
    """Splits that keep the SMs busy with one program each, or with several, and leave each part several steps."""
    tiles = problem.size("g") * problem.size("t") * math.ceil(problem.size("m") / m) * math.ceil(problem.size("n") / n)
    steps = math.ceil(problem.size("k") / k)
    wanted = (min(count * problem.device.compute_units / tiles, steps / 4) for count in PROGRAMS)
    return sorted({min(SPLITS, key=lambda split: abs(math.log(split / max(1.0, one)))) for one in wanted})
