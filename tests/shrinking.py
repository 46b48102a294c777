"""Makes what fails smaller: the search that the program fuzzers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self, TypeVar


class Shrinkable(Protocol):
    def smaller(self) -> Iterator[Self]:
        """Itself with one part left out, in turn."""


P = TypeVar("P", bound=Shrinkable)


def smallest(program: P, fails: Callable[[P], bool], size: Callable[[P], Any], runs: Callable[[P], bool], attempts: int) -> P:
    """A program in which no single part can be left out without losing the failure. Candidates that do not run, or are of no
    smaller `size`, cost none of the `attempts`."""
    left, progress = attempts, True
    while progress and left > 0:
        progress = False
        for candidate in program.smaller():
            if left <= 0 or size(candidate) >= size(program) or not runs(candidate):
                continue
            left -= 1
            if fails(candidate):
                program, progress = candidate, True
                break
    return program
