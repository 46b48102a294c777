"""Matrix products on CPUs, by the engine of `include/kgen/matmul.h`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.cpp import estimate
from kgen.templates.cpp.blocking import FEW_ROWS
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8)


@template(implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cpu", source="matmul.cpp.jinja", name="cpp_matmul")
class Matmul:
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n] on packed blocks, any layout, threads over both axes and over k; of a
    family, with one A packed for all."""

    A, B, C = operand("b", "m", "k"), operand("b", "k", "n", many=True), result("b", "m", "n", many=True)
    ROWS, TILE_ROWS, TILE_COLUMNS, PARTS = knob(512, 256), knob(512, 256, 128, 64), knob(128, 256, 64), knob(1, 2, 4)
    FEW_ROWS = knob(0, 16)

    def refuse(self, problem: Problem) -> str | None:
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """The rule's cut, then wider and narrower rectangles for whoever measures."""
        first = estimate.rule(problem)
        seen: set[tuple[int, int]] = set()
        for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2)):
            tile = max(48, first.tile_rows // rows // 48 * 48), max(32, first.tile_columns // columns // 32 * 32)
            if tile not in seen:
                yield {
                    "ROWS": first.rows, "TILE_ROWS": tile[0], "TILE_COLUMNS": tile[1], "PARTS": first.parts,
                    "FEW_ROWS": first.few_rows if problem.static("m") and problem.static("n") else FEW_ROWS,
                }  # fmt: skip
            seen.add(tile)

    def seconds(self, problem: Problem, config: Config) -> float:
        return estimate.seconds(problem, config)
