"""The smallest problem that still fails: sizes are halved, and what surrounds the contraction is dropped, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .draw import is_possible
from .problem import Problem

# Lengths below this are tried one by one.
CLOSE = 20


def shrunk(problem: Problem, fails: Callable[[Problem], bool]) -> Problem:
    """Greedy: the first simpler problem that fails is the next one to simplify."""
    while True:
        smaller = next((p for p in simpler(problem) if p != problem and is_possible(p) and fails(p)), None)
        if smaller is None:
            return problem
        problem = smaller


def simpler(problem: Problem) -> Iterator[Problem]:
    """What drops most comes first."""
    yield from (replace(problem, **{name: ""}) for name in ("family", "epilogue", "left", "right"))
    yield replace(problem, dynamic=False)
    yield replace(problem, layouts=("contiguous", problem.layouts[1]))
    yield replace(problem, layouts=(problem.layouts[0], "contiguous"))
    yield from _with_plain_options(problem)
    for name, length in sorted(problem.sizes, key=lambda item: -item[1]):
        for less in (1, length // 4, length // 2, length - 1 if length < CLOSE else length // 2):
            if 0 < less < length:
                yield problem.with_size(name, less)


def _with_plain_options(problem: Problem) -> Iterator[Problem]:
    for name, values in problem.options:
        plain = {"padding": 0, "bias": 0, "by_row": 0}.get(name, 1)
        for k in range(len(values) if name != "groups" else 0):
            yield problem.with_option(name, (*values[:k], plain, *values[k + 1 :]))
