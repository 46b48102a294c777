"""Matrix products on GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kgen.templates.contract import Config, Resources, contraction, knob, operand, result, template
from kgen.templates.problem import Problem

# Operand types that the matrix units multiply.
DOT_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int8)
MIN_BLOCK = 16


def refuse_dot(problem: Problem) -> str | None:
    """Why the matrix units cannot compute a product."""
    if problem.main_dtype not in DOT_TYPES:
        return f"no matrix unit multiplies {problem.main_dtype}"
    return None


@template(implements=contraction("b,m,k", "b,k,n -> b,m,n"), device="cuda", source="matmul.py.jinja", name="triton_matmul")
class Matmul:
    """C[b, m, n] = sum over k of A[b, m, k] B[b, k, n], any layout, by pointers and masks."""

    A, B, C = operand("b", "m", "k"), operand("b", "k", "n", many=True), result("b", "m", "n", many=True)
    BLOCK_M, BLOCK_N, BLOCK_K = knob(128, 64, 32, 16, 256), knob(128, 64, 32, 16, 256), knob(64, 32, 128)
    GROUP, WARPS, STAGES = knob(8), knob(4, 8), knob(3, 4, 2)

    def refuse(self, problem: Problem) -> str | None:
        return refuse_dot(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        wide = 2 if problem.main_dtype.itemsize > 2 else 1
        for m, n, k, warps, stages in (
            (128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 3), (128, 64, 64, 4, 4), (64, 128, 64, 4, 4),
            (64, 64, 64, 4, 4), (32, 64, 64, 4, 4), (64, 32, 64, 4, 4), (16, 64, 128, 4, 4), (16, 128, 64, 4, 4),
            (32, 32, 64, 2, 4),
        ):  # fmt: skip
            yield {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k // wide, "WARPS": warps, "STAGES": stages}

    def resources(self, problem: Problem, config: Config) -> Resources:
        size = problem.main_dtype.itemsize
        count = len(problem.members)
        tile = (config.BLOCK_M + count * config.BLOCK_N) * config.BLOCK_K * size
        sums = count * config.BLOCK_M * config.BLOCK_N // (config.WARPS * 32)
        return Resources(tile * config.STAGES, sums + 64)
