"""The steps of a schedule as a graph: which needs what of which, and what keeping two apart costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Call, Schedule, Step
from kgen.report.traffic import call_traffic, kernel_traffic
from kgen.scheduler.analysis.memory import reads, root, writes
from kgen.scheduler.fusion.pairs import step_names
from kgen.verdict import Verdict

__all__ = ["Steps", "step_bytes"]


def step_bytes(step: Step, plan: Schedule) -> int:
    """What one run of the step moves."""
    return (call_traffic(step, plan) if isinstance(step, Call) else kernel_traffic(step, plan)).total


@dataclass(slots=True)
class Steps:
    """What the steps of a plan read and write, by storages, and what the final verdicts call them."""

    plan: Schedule
    names: list[str] = field(init=False)
    read: list[set[str]] = field(init=False)
    written: list[set[str]] = field(init=False)
    readers: Counter[str] = field(init=False)
    kept: set[str] = field(init=False)  # storages that somebody needs whatever kernels there are
    numbers: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        graph, steps = self.plan.graph, self.plan.steps
        self.names = step_names(steps)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.read, self.written = [self._storages(reads(s)) for s in steps], [self._storages(writes(s)) for s in steps]
        self.readers = Counter(name for names in self.read for name in names)
        self.kept = self._storages(ir.visible(graph)) | {name for name, b in graph.buffers.items() if b.kind == "input"}

    def _storages(self, names: Iterable[str]) -> set[str]:
        return {root(self.plan.graph, name) for name in names}

    def needed(self) -> list[tuple[tuple[int, str], ...]]:
        """For each step the earlier ones whose results it reads, each with the tensor as the user's modules call it, or by its
        name in the graph."""
        made: dict[str, int] = {}
        found = []
        for number, names in enumerate(self.read):
            before: dict[int, str] = {}
            for name in sorted(names & made.keys()):
                before.setdefault(made[name], self.plan.graph.paths.get(name, name))
            found.append(tuple(sorted(before.items())))
            made |= dict.fromkeys(self.written[number], number)
        return found

    def bytes_lost(self, verdict: Verdict) -> int:
        """The traffic that one kernel in place of two would save; of what is no pair of steps, the size of the tensor that the
        verdict is about."""
        pair = [self.numbers[name] for name in verdict.kernels if name in self.numbers]
        if len(pair) == 2:
            first, second = pair
            common = (self.read[first] | self.written[first]) & (self.read[second] | self.written[second])
            return sum(self._saved(name, first) for name in common)
        return verdict.bytes_saved or self._bytes(verdict.producer)

    def _saved(self, storage: str, first: int) -> int:
        """One trip of a tensor through memory, two where nobody else needs it."""
        only_between = storage in self.written[first] and self.readers[storage] == 1 and storage not in self.kept
        return self._bytes(storage) * (2 if only_between else 1)

    def _bytes(self, name: str) -> int:
        buffer = self.plan.graph.buffers.get(name)
        return 0 if buffer is None or buffer.strides is None else Sizes(self.plan.graph.seen_sizes).bytes(buffer)
