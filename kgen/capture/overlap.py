"""Graphs of one capture side by side: one is planned while the kernels of those before it are compiled.

The next graph is planned for the strides that the results of the one before it will have. Should a further attempt give them
other ones, both have to be captured again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from kgen.capture.aot_cache import CompiledGraph, Steps, Strides

__all__ = ["Overlap", "ResultsMoved", "Unfinished"]


class ResultsMoved(Exception):
    """An attempt gave a graph's results other strides than the graph after it was planned for."""


@dataclass(slots=True, eq=False)
class Unfinished:
    """A graph on its way. `promised` are the strides of its results, as they were said first."""

    overlap: Overlap
    steps: Steps
    promised: Strides | None = None
    graph: CompiledGraph | None = None

    def advance(self) -> None:
        """Goes on until kernels have to be waited for, or until the graph is there."""
        try:
            strides = next(self.steps)
        except StopIteration as done:
            self.graph = done.value
        if self.promised is None:
            self.promised = strides() if self.graph is None else self.graph.output_strides

    @property
    def has_moved(self) -> bool:
        return self.graph is not None and _known(self.graph.output_strides) != _known(self.promised or ())

    def result(self) -> CompiledGraph:
        """Raises what compiling one of the graphs beside it raises, and ResultsMoved."""
        self.overlap.finish()
        assert self.graph is not None
        return self.graph


@dataclass(slots=True)
class Overlap:
    """The graphs of one capture, in order. `alone` hides what tracing has left switched on from what is compiled."""

    alone: Callable[[], AbstractContextManager[None]]
    graphs: list[Unfinished] = field(default_factory=list)
    error: Exception | None = None

    def begin(self, steps: Steps) -> Unfinished:
        made = Unfinished(self, steps)
        made.advance()
        self.graphs.append(made)
        return made

    def finish(self) -> None:
        """Takes each graph as far as the next wait, again and again: a further attempt at one is planned while kernels of the
        others are compiled. Raises the first error, at each call."""
        if self.error is None:
            try:
                with self.alone():
                    self._finish()
            except Exception as error:  # noqa: BLE001  raised below
                self.error = error
        if self.error is not None:
            raise self.error

    def _finish(self) -> None:
        while left := [one for one in self.graphs if one.graph is None]:
            for one in left:
                one.advance()
        if any(one.has_moved for one in self.graphs[:-1]):
            raise ResultsMoved


def _known(strides: Strides) -> list[list[int | None] | None]:
    """Strides without symbols, which would become guards by being compared. No attempt changes those."""
    return [None if one is None else [s if isinstance(s, int) else None for s in one] for one in strides]
