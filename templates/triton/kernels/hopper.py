"""What all templates for the matrix units of Hopper refuse."""

from __future__ import annotations

import torch

from kgen.ir import index as ix
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.tma_layout import TmaLayout, tma_layout

__all__ = ["refuse_device", "refuse_epilogue", "refuse_halves"]

HOPPER = 90


def refuse_device(problem: Problem) -> str | None:
    """Why a device has no warp groups that multiply together, if it has none."""
    if problem.device.interpreted:
        return "Triton's interpreter does not run Gluon"
    if problem.device.arch // 10 != HOPPER // 10:
        return f"its multiplications are those of compute capability 9.0, not {problem.device.arch / 10}"
    return None


def refuse_halves(problem: Problem, columns: str) -> str | None:
    """Why operands are not all of one 16-bit type, there for each row, and brought by TMA; `columns` is the name of what n
    counts."""
    kinds = {one.dtype for one in problem.inputs.values()}
    if len(kinds) > 1 or not kinds <= {torch.float16, torch.bfloat16}:
        return "it multiplies numbers of 16 bits, all of one type"
    if ix.lower_bound(problem.extent("n")) < 1 or any(problem.extent(axis) == 0 for axis in problem.loops):
        return f"it may have no elements, or no {columns}"
    for one in problem.inputs.values():
        if not isinstance(why := tma_layout(problem, one), TmaLayout):
            return why
    return None


def refuse_epilogue(problem: Problem) -> str | None:
    """Why an epilogue is none for tiles whose layout is written out."""
    if any(s.kind in ("scatter", "partial") for s in problem.epilogue):
        return "its epilogue scatters, or reduces tiles"
    return None
