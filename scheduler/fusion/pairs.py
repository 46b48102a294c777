"""One final verdict for each two steps of a plan that touch one buffer.

Fusion decides about groups, some of them several times while they grow. What it said of groups that are no more is left out,
and what it never had to say is found. A report asks for that; scheduling does not pay for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Schedule, Step
from kgen.scheduler.analysis.items import Group
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.fusion.fuse import MAX_READERS, Fuser
from kgen.verdict import REFUSED, Outcome, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Pairs:
    """What is known about steps that stay apart. The first `grouped` verdicts of the fuser are about groups. Transforms that
    form kernels said the others, about kernels by the `names` that these had then: several may have had one name."""

    fuser: Fuser
    grouped: int
    names: Sequence[str]

    def settled(self, plan: Schedule) -> list[Verdict]:
        """The plan's verdicts, with one for each pair of steps in place of all that was refused about it."""
        count = Counter(self.names)
        formed = [v for v in self.fuser.verdicts[self.grouped :] if v.outcome in REFUSED]
        known = {frozenset((v.producer, v.consumer)): v for v in formed if count[v.producer] == count[v.consumer] == 1}
        found = _Pairing(self.fuser, plan.steps, known)
        pairs = list(found.verdicts())
        gone = {id(v) for v in self.fuser.verdicts[: self.grouped] if v.outcome in REFUSED}
        gone |= {id(v) for v in formed if frozenset((v.producer, v.consumer)) in found.used}
        return [v for v in plan.verdicts if id(v) not in gone] + pairs


@dataclass(slots=True)
class _Pairing:
    """The pairs of the steps of one plan. `known` are verdicts by names of kernels."""

    fuser: Fuser
    steps: Sequence[Step]
    known: Mapping[frozenset[str], Verdict]
    names: list[str] = field(init=False)
    reads: list[set[str]] = field(init=False)
    writes: list[set[str]] = field(init=False)
    touching: dict[str, list[int]] = field(init=False, default_factory=dict)  # numbers of steps by buffer
    used: set[frozenset[str]] = field(init=False, default_factory=set)  # of what is known

    def __post_init__(self) -> None:
        self.names = step_names(self.steps)
        self.reads, self.writes = [reads(step) for step in self.steps], [writes(step) for step in self.steps]
        for number in range(len(self.steps)):
            for name in sorted(self.reads[number] | self.writes[number]):
                self.touching.setdefault(name, []).append(number)

    def verdicts(self) -> Iterator[Verdict]:
        """First of steps that need each other, then of those that read the same data."""
        shared: dict[tuple[int, int], list[str]] = {}
        for name, numbers in self.touching.items():
            for pair in combinations(numbers, 2):
                shared.setdefault(pair, []).append(name)
        flowing = {pair: names for pair, names in shared.items() if any(self._flows(pair, name) for name in names)}
        for pair in (*sorted(flowing), *sorted(shared.keys() - flowing.keys())):
            verdict = self._verdict(pair, shared[pair], pair in flowing)
            yield replace(verdict, kernels=tuple(self.names[number] for number in pair))

    def _flows(self, pair: tuple[int, int], name: str) -> bool:
        return any(name in self.writes[number] for number in pair)

    def _verdict(self, pair: tuple[int, int], names: Sequence[str], flows: bool) -> Verdict:
        key = frozenset(self.names[number] for number in pair)
        if key in self.known:
            self.used.add(key)
            return self.known[key]
        groups = [(a, b) for a in self._groups(pair[0]) for b in self._groups(pair[1])]
        refused = [self.fuser.refused.get((min(a.serial, b.serial), max(a.serial, b.serial))) for a, b in groups]
        found = next((verdict for verdict in refused if verdict is not None), None)
        return found or self._unsaid(pair, names, groups, flows)

    def _unsaid(
        self, pair: tuple[int, int], names: Sequence[str], groups: Sequence[tuple[Group, Group]], flows: bool
    ) -> Verdict:
        """What fusion had no cause to say."""
        first, second = (self.steps[number] for number in pair)
        if isinstance(first, Call) or isinstance(second, Call):
            return Verdict(self.names[pair[0]], self.names[pair[1]], Outcome.ILLEGAL, Reason.EXTERN_CALL)
        if flows and any(a is b for a, b in groups):  # a transform has made two kernels of one group
            return Verdict(first.name, second.name, Outcome.ILLEGAL, Reason.PART)
        many = not flows and all(len(self.touching[name]) > MAX_READERS for name in names)
        found = None if many else self._tried(groups)
        if found is not None:
            return found
        overwritten = {s.target for step in (first, second) for s in step.statements} & {*names}
        outcome, reason = (Outcome.ILLEGAL, Reason.MUTATION) if overwritten else (Outcome.UNPROFITABLE, Reason.NOT_TRIED)
        return Verdict(first.name, second.name, outcome, reason)

    def _tried(self, groups: Sequence[tuple[Group, Group]]) -> Verdict | None:
        """What fusion would say of two groups that it has not tried; None where nothing keeps them apart."""
        for a, b in groups:
            common = self.fuser.common(a, b) if a is not b else []
            found = self.fuser.judged(a, b, common[0]) if common else None
            if isinstance(found, Verdict):
                return found
        return None

    def _groups(self, number: int) -> list[Group]:
        """The groups that a step is made of. One that a transform has cut off is of the group of what reads its results."""
        return self._made(number) or [
            group for name in sorted(self.writes[number]) for reader in self.touching[name] for group in self._made(reader)
        ]

    def _made(self, number: int) -> list[Group]:
        step = self.steps[number]
        made = ir.outs(step.node) if isinstance(step, Call) else [out for s in step.statements for out in s.outs]
        producers = (self.fuser.producer.get(name) for name in made)
        return list(dict.fromkeys(group for group in producers if group is not None))


def step_names(steps: Sequence[Step]) -> list[str]:
    """What the final verdicts call the steps of a plan."""
    return _distinct(map(_name, steps))


def _name(step: Step) -> str:
    """The name of a kernel; the operator of a library call, and its result."""
    return f"{step.node.target} {' '.join(ir.outs(step.node)[:1])}" if isinstance(step, Call) else step.name


def _distinct(names: Iterable[str]) -> list[str]:
    """Calls without results get a number where they call one operator."""
    count: Counter[str] = Counter()
    found = []
    for name in names:
        count[name] += 1
        found.append(name if count[name] == 1 else f"{name} {count[name]}")
    return found
