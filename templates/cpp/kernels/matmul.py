"""Matmuls on CPUs, by the engine of `include/kgen/matmul.h`."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.templates import calibration
from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.cpp.kernels import estimate
from kgen.templates.cpp.kernels.blocking import FEW_ROWS
from kgen.templates.problem import Part, Problem

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8)
# Rectangles are cut at multiples of these, whatever the type and the instruction set.
ROWS, COLUMNS = 48, 32
# Rows of the largest rectangle whose columns are reduced in runs.
MOST_ROWS = 1536


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told of the problems: whether an epilogue reduces rectangles, which then are whole, and whether
    updates have to run in the order of the batches."""

    whole: bool
    batches_in_turn: bool


@template(implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cpu", source="matmul.cpp.jinja", name="cpp_matmul")
class Matmul(KernelTemplate):
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n] on packed blocks, any layout, threads over both axes and over k; of a
    family, with one A packed for all."""

    A, B, C = (
        operand("b", "m", "k", sums=True),
        operand("b", "k", "n", many=True, packs=True),
        result("b", "m", "n", many=True, ordered=True),
    )
    ROWS, BLOCK_M, BLOCK_N, SPLIT_K = knob(528, 288), knob(528, 288, 96, 48), knob(128, 64, 32), knob(1, 2, 4)
    FEW_ROWS = knob(0, 16)
    joins = "parts"

    def refuse(self, problem: Problem) -> str | None:
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """The rule's cut, then narrower rectangles for whoever measures. A few rows are not packed, and so not summed."""
        first = estimate.rule(problem)
        few = 0 if problem.operand_reductions else first.few_rows if problem.static("m") and problem.static("n") else FEW_ROWS
        parts = [problem.part(s) for s in problem.epilogue if s.kind == "partial"]
        seen: set[tuple[int, int]] = set()
        for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2)):
            tile = _rows(first.tile_rows // rows, parts), _columns(first.tile_columns // columns, parts)
            if tile not in seen:
                yield {
                    "ROWS": -(-first.rows // tile[0]) * tile[0], "BLOCK_M": tile[0], "BLOCK_N": tile[1],
                    "SPLIT_K": first.parts,
                    "FEW_ROWS": few,
                }  # fmt: skip
            seen.add(tile)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(any(one.reduces_tiles for one in problems), any("b" in one.in_order for one in problems))

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype]:
        """The element types whose loops are linked."""
        return problem.inputs["A"].dtype, problem.inputs["B"].dtype

    def order(self, problem: Problem, config: Config) -> Hashable:
        """Sums run along k in blocks of one length; in parts for threads, and in another order where there are few rows."""
        few = min(problem.size("m"), problem.size("n")) <= config.FEW_ROWS
        return config.SPLIT_K, few and not estimate.packed(problem)

    def seconds(self, problem: Problem, config: Config) -> float:
        return estimate.seconds(problem, config)

    def uncalibrated(self, problem: Problem) -> str | None:
        return calibration.of_matrices_on_cpus(problem)


def _rows(wanted: int, parts: list[Part]) -> int:
    """Rows of a rectangle: whole runs of them where columns are reduced in runs."""
    runs = [part.run.as_int() or 1 for part in parts if part.axis == "m" and not part.whole]
    unit = math.lcm(ROWS, *runs)
    return max(unit, min(wanted, MOST_ROWS) // unit * unit)


def _columns(wanted: int, parts: list[Part]) -> int:
    """Columns of a rectangle: a power of two where rows are reduced in runs, which are powers of two."""
    columns = max(COLUMNS, wanted // COLUMNS * COLUMNS)
    return 1 << columns.bit_length() - 1 if any(part.axis == "n" and not part.whole for part in parts) else columns
