"""Times two ways of computing the same in turn, so that both meet the same machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from kgen.report.graph_report import time_text

__all__ = ["SLOWER", "Timing", "timed"]

# From so many times eager's time on, something counts as slower: less than that differs from run to run.
SLOWER = 1.1
_ROUNDS = 9
_LEAST = 2e-3  # seconds of a round: shorter ones are repeated


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: medians of rounds that took turns."""

    compiled: float
    eager: float

    @property
    def ratio(self) -> float:
        return self.compiled / self.eager

    @property
    def is_slower(self) -> bool:
        return self.ratio > SLOWER

    def __str__(self) -> str:
        return f"{time_text(self.compiled)} compiled, {time_text(self.eager)} in eager ({self.ratio:.2f}x the time)"


def timed(compiled: Callable[[], object], eager: Callable[[], object]) -> Timing:
    """Both functions called in turn. The first calls, which may compile, do not count."""
    counts = [_count(one) for one in (compiled, eager)]
    rounds = [[_seconds(one, count) for one, count in zip((compiled, eager), counts, strict=True)] for _ in range(_ROUNDS)]
    return Timing(median(first for first, _ in rounds), median(second for _, second in rounds))


def _count(function: Callable[[], object]) -> int:
    """How often a round calls the function."""
    function()
    return max(1, round(_LEAST / max(_seconds(function, 1), 1e-7)))


def _seconds(function: Callable[[], object], count: int) -> float:
    _settle()
    started = time.perf_counter()
    for _ in range(count):
        function()
    _settle()
    return (time.perf_counter() - started) / count


def _settle() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
