"""Grouped matmuls on GPUs by pointers: rows of one matrix, in runs whose ends are numbers in memory, times a matrix each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, operator, result, template
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels import estimate
from kgen.templates.triton.kernels.matmul import (
    LARGEST_EXACT,
    MIN_BLOCK,
    operand_bytes,
    order_of_dots,
    refuse_dot,
    refuse_empty,
)

LEAST_ARCH = 80
# Rows, columns and depth of a tile, warps and stages.
TILES = (
    (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 4), (32, 64, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (32, 32, 64, 4, 4),
)  # fmt: skip
# Programs for each SM.
PROGRAMS = 2


class _Grouped(KernelTemplate):
    """What both kernels have in common."""

    def refuse(self, problem: Problem) -> str | None:
        if problem.device.arch < LEAST_ARCH:
            return f"it needs compute capability {LEAST_ARCH / 10}"
        return refuse_empty(problem) or refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        wide = max(1, problem.main_dtype.itemsize // 2)
        largest = LARGEST_EXACT if problem.exact_float32 else math.inf
        for m, n, k, warps, stages in TILES:
            if m * n <= largest:
                yield {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": max(MIN_BLOCK, k // wide), "WARPS": warps, "STAGES": stages}

    def resources(self, problem: Problem, config: Config) -> Resources:
        area = config.BLOCK_M * config.BLOCK_N
        shared = max(sum(operand_bytes(problem, config, config.STAGES)), 4 * area) + 1024
        return Resources(shared, len(problem.members) * area // (config.WARPS * 32) + 80)

    def order(self, problem: Problem, config: Config) -> Hashable:
        return order_of_dots(problem, config)

    def uncalibrated(self, problem: Problem) -> str | None:
        return "no GPU has measured grouped matmuls yet"


@template(
    implements=operator("aten::_grouped_mm", "m,k", "g,k,n", "g -> m,n"), device="cuda", source="grouped_matmul.py.jinja",
    name="triton_grouped_matmul",
)  # fmt: skip
class GroupedMatmul(_Grouped):
    """C[m, n] = sum over k of A[m, k] B[g, k, n] for the rows m of group g, those before ENDS[g] and in no group before it.
    Programs stay and take tiles of all groups in turn; rows behind the last group are zero."""

    A, B, ENDS = operand("m", "k"), operand("g", "k", "n", many=True), operand("g")
    C = result("m", "n", many=True)
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 32, 16), knob(128, 64, 32, 256), knob(64, 32, 16, 128)
    GROUP, WARPS, STAGES = knob(8), knob(4, 8), knob(3, 4)
    reductions: ClassVar = frozenset()  # tiles begin where groups do, not at multiples of their length
    full_row: ClassVar = 0

    def grid(self, problem: Problem, config: Config) -> Expr:
        return ix.minimum(_tiles(problem, config), ix.constant(PROGRAMS * problem.device.compute_units))

    def seconds(self, problem: Problem, config: Config) -> float:
        """Each group has a tile that is half empty, on the average."""
        m, n, k, g = (problem.size(axis) for axis in "mnkg")
        rows = m + g * config.BLOCK_M / 2
        return _seconds(problem, config, 2 * len(problem.members) * rows * n * k)


@template(
    implements=operator("aten::_grouped_mm", "m,k", "k,n", "g -> g,m,n"), device="cuda",
    source="grouped_matmul_weight.py.jinja", name="triton_grouped_matmul_weight",
)  # fmt: skip
class GroupedMatmulWeight(_Grouped):
    """C[g, m, n] = sum over the k of group g of A[m, k] B[k, n]: the gradient of a grouped matmul's matrices. A group without
    elements has zeros."""

    A, B, ENDS, C = operand("m", "k"), operand("k", "n"), operand("g"), result("g", "m", "n")
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 32, 16), knob(128, 64, 32, 256), knob(64, 32, 16, 128)
    GROUP, WARPS, STAGES = knob(8), knob(4, 8), knob(3, 4)

    def seconds(self, problem: Problem, config: Config) -> float:
        """Each group has a step that is half empty, on the average."""
        m, n, k, g = (problem.size(axis) for axis in "mnkg")
        return _seconds(problem, config, 2 * m * n * (k + g * config.BLOCK_K / 2))


def _tiles(problem: Problem, config: Config) -> Expr:
    """The most tiles that groups can have: one of each may be cut off, and so may be what is behind the last one."""
    rows = problem.tiles("m", config.BLOCK_M) + problem.extent("g")
    return rows * problem.tiles("n", config.BLOCK_N)


def _seconds(problem: Problem, config: Config, flops: float) -> float:
    """A roofline of operations and bytes, at the rate of matmuls by pointers."""
    moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
    share = estimate.POINTER_RATE * min(1.0, config.BLOCK_M * config.BLOCK_N / (128 * 128)) ** 0.3
    return estimate.LAUNCH + max(flops / problem.rate / share, moved / problem.device.bandwidth)
