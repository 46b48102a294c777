"""The smallest problem that still fails: sizes are halved, and what surrounds the contraction is dropped, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .draw import is_possible
from .problem import Problem


def shrunk(problem: Problem, fails: Callable[[Problem], bool]) -> Problem:
    """Greedy: the first simpler problem that fails is the next one to simplify."""
    while True:
        smaller = next((p for p in simpler(problem) if p != problem and is_possible(p) and fails(p)), None)
        if smaller is None:
            return problem
        problem = smaller


def simpler(problem: Problem) -> Iterator[Problem]:
    """What drops most comes first."""
    for name in ("family", "epilogue", "left", "right"):
        if getattr(problem, name):
            yield replace(problem, **{name: ""})
    if problem.layouts != ("contiguous", "contiguous"):
        yield replace(problem, layouts=("contiguous", problem.layouts[1]))
        yield replace(problem, layouts=(problem.layouts[0], "contiguous"))
    for name, values in problem.options:
        plain = {"padding": 0, "bias": 0, "by_row": 0}.get(name, 1)
        for k, value in enumerate(values):
            if value != plain and name != "groups":
                yield problem.with_option(name, (*values[:k], plain, *values[k + 1 :]))
    for name, length in sorted(problem.sizes, key=lambda item: -item[1]):
        for less in (1, length // 4, length // 2, length - 1 if length < 20 else length // 2):
            if 0 < less < length:
                yield problem.with_size(name, less)
