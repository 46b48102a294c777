"""What estimates of templates have been compared with measurements on, and what not."""

from __future__ import annotations

from kgen.templates.problem import Problem


def of_matrices(problem: Problem) -> str | None:
    """Why estimates that were fitted to matrix products say nothing of a problem: they count no address arithmetic, no loads
    that do not coalesce, and no prologue that runs again for each tap of a window."""
    for number, member in enumerate(problem.members):
        for name in member:
            if problem.is_window(name, number):
                return f"operand {name} is no matrix in memory: its elements are gathered within bounds, tile by tile"
    return None
