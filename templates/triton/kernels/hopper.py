"""What all templates for the matrix units of Hopper refuse."""

from __future__ import annotations

from kgen.templates.problem import Problem

__all__ = ["refuse_device"]

HOPPER = 90


def refuse_device(problem: Problem) -> str | None:
    """Why a device has no warp groups that multiply together, if it has none."""
    if problem.device.interpreted:
        return "Triton's interpreter does not run Gluon"
    if problem.device.arch // 10 != HOPPER // 10:
        return f"its multiplications are those of compute capability 9.0, not {problem.device.arch / 10}"
    return None
