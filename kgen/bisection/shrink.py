"""The search for a small part of a list that still shows a fault.

First the shortest beginning and the shortest end by bisection, then ever smaller runs are left out (Zeller and Hildebrandt,
"Simplifying and isolating failure-inducing input", 2002). Every part was tried: bisection does not rely on a fault that
stays when more is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Shrinker"]

Item = TypeVar("Item")


@dataclass(slots=True)
class Shrinker(Generic[Item]):
    """`shows` says whether a part shows the fault. It is asked at most `trials` times."""

    shows: Callable[[Sequence[Item]], bool]
    trials: int
    count: int = 0
    known: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def smallest(self, items: Sequence[Item]) -> list[Item]:
        """A part from which nothing more can be left out, of `items`, which show the fault."""
        numbers = list(range(len(items)))
        numbers = self._shortest(items, numbers, lambda part, length: part[:length])
        numbers = self._shortest(items, numbers, lambda part, length: part[len(part) - length :])
        return [items[k] for k in self._thinned(items, numbers)]

    def _shortest(self, items: Sequence[Item], numbers: list[int], cut: Callable[[list[int], int], list[int]]) -> list[int]:
        low, high = 0, len(numbers)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ask(items, cut(numbers, middle)) else (middle, high)
        return cut(numbers, high)

    def _thinned(self, items: Sequence[Item], numbers: list[int]) -> list[int]:
        size = max(1, len(numbers) // 2)
        while True:
            rest = self._without_runs(items, numbers, size)
            if size == 1 and len(rest) == len(numbers):
                return rest
            numbers, size = rest, max(1, min(size // 2, len(rest) // 2))

    def _without_runs(self, items: Sequence[Item], numbers: list[int], size: int) -> list[int]:
        start = 0
        while start < len(numbers):
            rest = numbers[:start] + numbers[start + size :]
            if rest and self._ask(items, rest):
                numbers = rest
            else:
                start += size
        return numbers

    def _ask(self, items: Sequence[Item], numbers: list[int]) -> bool:
        key = tuple(numbers)
        if key not in self.known:
            if self.count >= self.trials:
                return False
            self.count += 1
            self.known[key] = self.shows([items[k] for k in numbers])
        return self.known[key]
