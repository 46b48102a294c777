"""Whether a step may run at another time: what the steps touch that it moves over."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

from kgen.ir import nodes as ir
from kgen.ir.plan import Step
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.analysis.memory import has_hidden_effects, reads, writes

Numbers = dict[str, list[int]]  # of steps, in order, by storage


class Moves:
    """The order of steps. To look at all steps that one moves over would be, for each pair of matmuls of an unrolled loop, all
    steps between these; the steps that touch a storage are few."""

    def __init__(self, graph: ir.Graph, steps: Sequence[Step]) -> None:
        self.graph, self.steps = graph, steps

    def may_pass(self, k: int, begin: int, end: int) -> bool:
        """Whether step k may change places with those from `begin` on and before `end`, of which it is none: all effects are
        known, and no step of the two writes a storage that the other one reads or writes."""
        readers, writers = self._touching
        read, written = _touched(self.graph, self.steps[k])
        return not (
            _has_one(self._hidden, begin, end)
            or any(_has_one(writers.get(name, ()), begin, end) for name in (*read, *written))
            or any(_has_one(readers.get(name, ()), begin, end) for name in written)
        )

    @cached_property
    def _hidden(self) -> list[int]:
        return [k for k, step in enumerate(self.steps) if has_hidden_effects(step)]

    @cached_property
    def _touching(self) -> tuple[Numbers, Numbers]:
        """Which steps read each storage, and which write it."""
        touched = [_touched(self.graph, step) for step in self.steps]
        return _by_storage(read for read, _ in touched), _by_storage(written for _, written in touched)


def _touched(graph: ir.Graph, step: Step) -> tuple[set[str], set[str]]:
    """The storages that a step reads and writes."""
    return memoised_for(step, "storages", lambda: (ir.storages(graph, reads(step)), ir.storages(graph, writes(step))), graph)


def _by_storage(touched: Iterable[Iterable[str]]) -> Numbers:
    found: Numbers = {}
    for k, names in enumerate(touched):
        for name in names:
            found.setdefault(name, []).append(k)
    return found


def _has_one(numbers: Sequence[int], begin: int, end: int) -> bool:
    """Whether one of the numbers, which are in order, is in ``[begin, end)``."""
    k = bisect_left(numbers, begin)
    return k < len(numbers) and numbers[k] < end
