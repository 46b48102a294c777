"""Batches: small independent kernels that run as one, the way foreach operators and optimisers need it.

A step over a hundred parameters is a hundred kernels that share nothing, so fusion leaves them apart, and each would wake the
threads, or be launched, for a few microseconds of work. A batch is one kernel over all of them: the back end shares its points
out, and members that do the same to other buffers share one body.

A kernel joins a batch that stands earlier in the order of steps. It must not touch what a step between the two changes, nor
change what one touches; inside a batch there is no order at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from kgen import ir
from kgen import values as vs
from kgen.plan import Batch, Call, Kernel, Step
from kgen.scheduler.memory import lends, reads, root, writes
from kgen.sizes import Sizes
from kgen.values import Value
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# Elementary operations that keep all threads busy: a kernel with more gains nothing from company. It joins only its own likes,
# whose text costs nothing, and only where nobody waits for its result while that is in cache.
FULL = 1 << 20
# A kernel that takes new memory moves up past at most so many steps: that memory lives the longer for it.
NEAR = 8
# What one function may hold: members, and different bodies.
MAX_MEMBERS = 512
MAX_FORMS = 16


def batch(steps: list[Step], graph: ir.Graph, demands: tuple[FusionDemand, ...], verdicts: list[Verdict]) -> list[Step]:
    """The steps with independent kernels of points gathered into batches. `demands` that forbid fusion hold for batches too."""
    found = _Batches(graph, _read_elsewhere(steps), [d for d in demands if not d.wanted])
    for step in steps:
        found.add(step)
    return [_joined(place, verdicts) for place in found.places]


def _joined(place: _Place, verdicts: list[Verdict]) -> Step:
    if len(place.members) < 2:
        return place.step
    first, *others = place.members
    verdicts += [Verdict(first.name, other.name, Outcome.BATCHED, Reason.INDEPENDENT) for other in others]
    return Batch(f"{first.name}_and_{len(others)}_more", tuple(place.members))


def _read_elsewhere(steps: list[Step]) -> set[str]:
    """Buffers that a step reads which another one has made."""
    return {name for step in steps for name in reads(step) - writes(step)}


@dataclass(slots=True)
class _Place:
    """One place in the order: a step that stays alone (no members), or the members of a batch."""

    step: Step
    members: list[Kernel] = field(default_factory=list)
    forms: set[Hashable] = field(default_factory=set)
    small: bool = False


@dataclass(slots=True)
class _Batches:
    graph: ir.Graph
    read_elsewhere: set[str]
    forbidden: list[FusionDemand]
    places: list[_Place] = field(default_factory=list)
    by_form: dict[Hashable, list[int]] = field(default_factory=dict)
    read_at: dict[str, int] = field(default_factory=dict)  # storage -> the last place that reads, or writes, it
    written_at: dict[str, int] = field(default_factory=dict)
    barrier: int = -1

    def add(self, step: Step) -> None:
        read, written = ({root(self.graph, n) for n in names} for names in (reads(step), writes(step)))
        earliest = self._earliest(read, written)
        if isinstance(step, Kernel) and self._may_join(step):
            at = self._join(step, earliest)
        else:
            at = len(self.places)
            self.places.append(_Place(step))
        for names, table in ((read, self.read_at), (written, self.written_at)):
            for name in names:
                table[name] = max(at, table.get(name, -1))
        if isinstance(step, Call) and (lends(step) or step.node.mutates or step.node.binds):
            self.barrier = at  # changes memory under other names, or finds out sizes

    def _may_join(self, kernel: Kernel) -> bool:
        if kernel.inner or kernel.target != "cpp" or any(s.kind != "pointwise" for s in kernel.statements):
            return False
        return self._small(kernel) or not self.read_elsewhere & writes(kernel)

    def _earliest(self, read: set[str], written: set[str]) -> int:
        """The first place after all that the step depends on."""
        before = [self.barrier]
        before += [self.written_at.get(name, -1) for name in read | written]
        before += [self.read_at.get(name, -1) for name in written]
        return max(before) + 1

    def _join(self, kernel: Kernel, earliest: int) -> int:
        """Puts the kernel into the first batch that takes it, its own likes before others, or opens one."""
        form, small = _form(kernel), self._small(kernel)
        known = self.by_form.setdefault(form, [])
        if self._makes_new(kernel):
            earliest = max(earliest, len(self.places) - NEAR)
        others = range(earliest, len(self.places)) if small else ()
        candidates = (*(k for k in known if k >= earliest), *others)
        at = next((k for k in candidates if self._takes(self.places[k], kernel, form)), len(self.places))
        if at == len(self.places):
            self.places.append(_Place(kernel, small=small))
        place = self.places[at]
        place.members.append(kernel)
        place.forms.add(form)
        place.small &= small
        if at not in known:
            known.append(at)
        return at

    def _takes(self, place: _Place, kernel: Kernel, form: Hashable) -> bool:
        if not place.members or len(place.members) >= MAX_MEMBERS:
            return False
        if form not in place.forms and (not place.small or len(place.forms) >= MAX_FORMS):
            return False
        return not any(forbids(d, kernel, other) for d in self.forbidden for other in place.members)

    def _small(self, kernel: Kernel) -> bool:
        cost = vs.total_cost(s.value for s in kernel.statements)
        return Sizes(self.graph.size_hints).points(kernel.outer) * cost < FULL

    def _makes_new(self, kernel: Kernel) -> bool:
        return any(self.graph.buffers[name].alias_of is None for name in writes(kernel))


def forbids(demand: FusionDemand, a: Kernel, b: Kernel) -> bool:
    """Whether a demand that two operators stay apart keeps these kernels apart."""

    def has(kernel: Kernel, operator: str) -> bool:
        return any(operator in (op, op.rpartition(".")[0]) for origin in kernel.origins for op in origin.operators)

    pairs = ((a, b), (b, a))
    return any(has(one, demand.producer) and has(other, demand.consumer) for one, other in pairs)


def _form(kernel: Kernel) -> Hashable:
    """Equal for kernels that do the same to their buffers, whatever these are called and however large they are."""
    numbers: dict[Value, int] = {}
    slots: dict[str, int] = {}
    rows: list[Hashable] = []
    for value in vs.topological(s.value for s in kernel.statements):
        numbers[value] = len(numbers)
        rows.append((value.op, value.dtype, tuple(numbers[a] for a in value.args), _attribute(value, slots)))
    rows += [(numbers[s.value], s.stored, _slots(s.outs, slots)) for s in kernel.statements]
    return tuple(rows)


def _attribute(value: Value, slots: dict[str, int]) -> Hashable:
    if value.op == "load":
        return _slots([value.attr[0]], slots)
    return None if value.op == "index" else repr(value.attr)  # 0.0 and -0.0 are equal, but not the same constant


def _slots(names: Iterable[str], slots: dict[str, int]) -> tuple[int, ...]:
    return tuple(slots.setdefault(name, len(slots)) for name in names)
