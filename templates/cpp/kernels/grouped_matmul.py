"""Grouped matmuls on CPUs, by the engine of `include/kgen/matmul.h`: each group is a matmul of its own rows."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, ClassVar

import torch

from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, knob, operand, operator, result, template
from kgen.templates.cpp.kernels.blocking import FEW_ROWS, choose_blocking
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class _Grouped(KernelTemplate):
    """What both kernels have in common. How many rows or columns a group has is known at the call: its matmul may have few."""

    reductions: ClassVar = frozenset()  # rectangles begin where groups do, not at multiples of their length

    def refuse(self, problem: Problem) -> str | None:
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype]:
        """The element types whose loops are linked."""
        return problem.inputs["A"].dtype, problem.inputs["B"].dtype

    def order(self, problem: Problem, config: Config) -> Hashable:
        return "grouped", config.FEW_ROWS

    def uncalibrated(self, problem: Problem) -> str | None:
        return "grouped matmuls on a CPU have not been compared with the library's loop"


@template(
    implements=operator("aten::_grouped_mm", "m,k", "g,k,n", "g -> m,n"), device="cpu", source="grouped_matmul.cpp.jinja",
    name="cpp_grouped_matmul",
)  # fmt: skip
class GroupedMatmul(_Grouped):
    """C[m, n] = sum over k of A[m, k] B[g, k, n] for the rows m of group g, those before ENDS[g] and in no group before it.
    Rows behind the last group are zero."""

    A, B, ENDS = operand("m", "k"), operand("g", "k", "n", many=True), operand("g")
    C = result("m", "n", many=True)
    ROWS, BLOCK_M, BLOCK_N, BLOCK_K, FEW_ROWS = knob(528), knob(528), knob(128), knob(256), knob(FEW_ROWS)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        rows = max(1, problem.size("m") // problem.size("g"))
        yield _blocking(problem, (rows, problem.size("n"), problem.size("k")))


@template(
    implements=operator("aten::_grouped_mm", "m,k", "k,n", "g -> g,m,n"), device="cpu",
    source="grouped_matmul_weight.cpp.jinja", name="cpp_grouped_matmul_weight",
)  # fmt: skip
class GroupedMatmulWeight(_Grouped):
    """C[g, m, n] = sum over the k of group g of A[m, k] B[k, n]: the gradient of a grouped matmul's matrices. A group without
    elements has zeros."""

    A, B, ENDS, C = operand("m", "k"), operand("k", "n"), operand("g"), result("g", "m", "n")
    ROWS, BLOCK_M, BLOCK_N, BLOCK_K, FEW_ROWS = knob(528), knob(528), knob(128), knob(256), knob(FEW_ROWS)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        depth = max(1, problem.size("k") // problem.size("g"))
        yield _blocking(problem, (problem.size("m"), problem.size("n"), depth))


def _blocking(problem: Problem, size: tuple[int, int, int]) -> dict[str, Any]:
    """The rule's cut for groups of equal length."""
    threads = 1 if problem.size("g") >= 4 * problem.device.compute_units else problem.device.compute_units
    cut = choose_blocking(size, problem.main_dtype, problem.device.isa, threads, len(problem.members))
    return {"ROWS": cut.rows, "BLOCK_M": cut.tile_rows, "BLOCK_N": cut.tile_columns, "FEW_ROWS": FEW_ROWS}
