"""Batches: small independent kernels, of points or of plain reductions, that run as one, the way foreach operators and
optimisers need it.

A step over a hundred parameters is a hundred kernels that share nothing, so fusion leaves them apart, and each would wake the
threads, or be launched, for a few microseconds of work. A batch is one kernel over all of them: the back end shares its points
out, and members that do the same to other buffers share one body.

A kernel joins a batch that stands earlier in the order of steps. It must not touch what a step between the two changes, nor
change what one touches; inside a batch there is no order at all. Kernels that write disjoint parts of one buffer, in place, may
run in one batch: rows of a tensor that a loop writes, the columns of bboxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Call, ComboKernel, Kernel, Step, address
from kgen.ir.values import Value
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.analysis.memory import may_alias, reads, writes
from kgen.scheduler.analysis.touched import Touched, touched
from kgen.scheduler.options import Options
from kgen.verdict import FusionDemand, OperatorCall, Outcome, Reason, Verdict

# Elementary operations that keep all threads busy: a kernel with more gains nothing from company. It joins only its own likes,
# whose text costs nothing, and only where nobody waits for its result while that is in cache.
FULL = 1 << 20
# A kernel that takes new memory moves up past at most so many steps: that memory lives the longer for it.
NEAR = 8
# On a GPU nobody else keeps a kernel's company: it fills the device from some tens of thousands of points on, and what a batch
# saves is its launch, 2 to 3 us. Up to so many points (a microsecond of memory traffic) a kernel joins any other such: the
# bodies' text and the registers of the hungriest one cost less than that. A larger one joins its own likes only, and beyond
# as many points as run for several launches it stays alone.
GPU_SMALL = 1 << 18
GPU_FULL = 1 << 22


@dataclass(frozen=True, slots=True)
class Room:
    """What one function may hold: members, different bodies, and pointers."""

    members: int
    forms: int
    pointers: int


# Rows of a CPU's kernel that threads share, and points of one row that they would share on its own. A longer row joins where it
# is a small part, one in MANY, of what others like it have: then each thread has some of them.
ROWS, LONG, MANY = 8, 1 << 15, 16
# Reductions whose members may share a body: others count points, or have more than one result.
FOLDS = ("sum", "prod", "max", "min", "any", "all")
# Pointers are parameters of a GPU's kernel, which is its table of them: they lie in constant memory and come with the launch,
# so nothing is uploaded before. Some may be Triton's own. A program finds its member among so many by 9 branches.
POINTER_BYTES, OWN_POINTERS = 8, 32
CPP_ROOM, MOST_MEMBERS, MOST_FORMS = Room(512, 16, 1 << 16), 512, 8
# Kernels that write parts of one buffer are compared with so many that have touched it before: each comparison is a proof.
COMPARED = 64
# They may have so many times as many bodies: each is a few operators on few points, and waits for all others as a kernel.
IN_PLACE = 4


def room_of(gpu: Gpu) -> Room:
    """The room of a GPU's kernel."""
    return Room(MOST_MEMBERS, MOST_FORMS, gpu.parameters // POINTER_BYTES - OWN_POINTERS)


def batch(steps: list[Step], graph: ir.Graph, options: Options, verdicts: list[Verdict]) -> list[Step]:
    """The steps with independent kernels gathered into batches. Demands that forbid fusion hold for batches too."""
    room = {"cpp": CPP_ROOM, "triton": room_of(options.gpu)}
    found = _Batches(graph, room, _read_elsewhere(steps), [d for d in options.demands if not d.wanted], verdicts)
    simple = (one for one in steps if isinstance(one, Kernel) and one.inner and is_simple(one))
    for one in simple:
        found.likes[form_in(graph, one)] += found.points(one)
    for step in steps:
        found.add(step)
    return [_joined(place, verdicts) for place in found.entries]


def _joined(place: _Place, verdicts: list[Verdict]) -> Step:
    if len(place.members) < 2:
        return place.step
    first, *others = place.members
    verdicts += [Verdict(first.name, other.name, Outcome.BATCHED, Reason.INDEPENDENT) for other in others]
    return ComboKernel(f"{first.name}_and_{len(others)}_more", tuple(place.members))


def _read_elsewhere(steps: list[Step]) -> set[str]:
    """Buffers that a step reads which another one has made."""
    return {name for step in steps for name in reads(step) - writes(step)}


@dataclass(slots=True)
class _Place:
    """One place in the order: a step that stays alone (no members), or the members of a batch."""

    step: Step
    members: list[Kernel] = field(default_factory=list)
    forms: set[Hashable] = field(default_factory=set)
    pointers: set[Hashable] = field(default_factory=set)
    wholes: set[str] = field(default_factory=set)  # buffers of which members write parts
    small: bool = False


@dataclass(frozen=True, slots=True)
class _Access:
    """What a step, or more than one (None), does to memory at a place."""

    at: int
    writes: bool
    step: Step | None


@dataclass(slots=True)
class _Batches:
    graph: ir.Graph
    room: Mapping[str, Room]
    read_elsewhere: set[str]
    forbidden: list[FusionDemand]
    verdicts: list[Verdict]
    entries: list[_Place] = field(default_factory=list)
    by_form: dict[Hashable, list[int]] = field(default_factory=dict)
    read_at: dict[str, int] = field(default_factory=dict)  # memory (`ir.storages`) -> the last place that reads, or writes, it
    written_at: dict[str, int] = field(default_factory=dict)
    accesses: dict[str, list[_Access]] = field(default_factory=dict)  # memory -> the last places that touch it
    barrier: int = -1
    likes: Counter[Hashable] = field(default_factory=Counter)  # points of all reductions of each form

    def add(self, step: Step) -> None:
        read, written = (ir.storages(self.graph, names) for names in (reads(step), writes(step)))
        earliest = self._earliest(step, read, written)
        if isinstance(step, Kernel) and self._may_join(step):
            at = self._join(step, earliest)
        else:
            if isinstance(step, Kernel) and step.target == "triton" and is_simple(step) and not is_static(step, self.graph):
                self._refuse_symbols(step, earliest)
            at = len(self.entries)
            self.entries.append(_Place(step))
        for name in read | written:
            self._note(name, _Access(at, name in written, step))
        for names, table in ((read, self.read_at), (written, self.written_at)):
            for name in names:
                table[name] = max(at, table.get(name, -1))
        if isinstance(step, Call) and (may_alias(step) or step.node.mutates or step.node.binds):
            self.barrier = at  # changes memory under other names, or finds out sizes

    def _may_join(self, kernel: Kernel) -> bool:
        if not is_simple(kernel):
            return False
        if kernel.target == "triton":
            fits = self.points(kernel) <= GPU_FULL or bool(self._wholes(kernel))
            return is_static(kernel, self.graph) and fits and self.points(kernel) > 0
        if kernel.inner:
            share = MANY * self.points(kernel) <= self.likes[form_in(self.graph, kernel)]
            return share or (self._small(kernel) and self._has_tasks(kernel))
        return self._small(kernel) or not self.read_elsewhere & writes(kernel)

    def _has_tasks(self, kernel: Kernel) -> bool:
        """Whether threads share a CPU's kernel just as well in company, where each row is one task."""
        return Sizes(self.graph.size_hints).points(kernel.outer) >= ROWS or self.points(kernel) < LONG

    def _refuse_symbols(self, kernel: Kernel, earliest: int) -> None:
        """A verdict where the kernel might have joined another one."""
        alone = (place.step for place in self.entries[earliest:])
        other = next((s for s in alone if isinstance(s, Kernel) and is_simple(s) and self._home(s) == self._home(kernel)), None)
        if other is not None:
            self.verdicts.append(Verdict(other.name, kernel.name, Outcome.ILLEGAL, Reason.SYMBOLIC))

    def _earliest(self, step: Step, read: set[str], written: set[str]) -> int:
        """The first place after all that the step depends on."""
        before = [self.barrier]
        for name in read | written:
            last = max(self.written_at.get(name, -1), self.read_at.get(name, -1) if name in written else -1)
            mine = self._elements(step, name) if last > self.barrier else None
            if mine is not None:
                last = min(last, self._last_to_meet(name, mine))
            before.append(last)
        return max(before) + 1

    def _elements(self, step: Step | None, name: str) -> Touched | None:
        """The elements of a buffer's memory that a step touches, where they are known. Most steps meet no other on a buffer, so
        nobody asks for theirs."""
        if not isinstance(step, Kernel):
            return None
        return memoised_for(step, "touched", lambda: touched(self.graph, step), self.graph).get(name)

    def _last_to_meet(self, name: str, mine: Touched) -> int:
        """The last place that touches elements which the step needs. The step comes no earlier than the last one that wrote
        other elements: its buffer is a version of what that one has made."""
        known = self.accesses.get(name, [])
        met = [one.at for one in known if (one.writes or mine.written) and not self._is_apart(mine, one, name)]
        return max([self.written_at.get(name, -1) - 1, *met])

    def _is_apart(self, mine: Touched, one: _Access, name: str) -> bool:
        elements = self._elements(one.step, name)
        return elements is not None and mine.apart(elements)

    def _note(self, name: str, access: _Access) -> None:
        known = self.accesses.setdefault(name, [])
        known.append(access)
        if len(known) > COMPARED:
            first, second, *_ = known
            known[:2] = [_Access(max(first.at, second.at), first.writes or second.writes, None)]

    def _join(self, kernel: Kernel, earliest: int) -> int:
        """Puts the kernel into the first batch that takes it, its own likes before others, or opens one."""
        form, small = form_in(self.graph, kernel), self._small(kernel) and not kernel.inner
        known = self.by_form.setdefault(form, [])
        if self._makes_new(kernel):
            earliest = max(earliest, len(self.entries) - NEAR)
        others = range(earliest, len(self.entries)) if small or self._wholes(kernel) else ()
        candidates = (*(k for k in known if k >= earliest), *others)
        at = next((k for k in candidates if self._takes(self.entries[k], kernel, form)), len(self.entries))
        if at == len(self.entries):
            self.entries.append(_Place(kernel, small=small))
        place = self.entries[at]
        place.members.append(kernel)
        place.forms.add(form)
        place.pointers |= self._pointers(kernel)
        place.wholes |= self._wholes(kernel)
        place.small &= small
        if at not in known:
            known.append(at)
        return at

    def _takes(self, place: _Place, kernel: Kernel, form: Hashable) -> bool:
        room = self.room[kernel.target]
        if not place.members or len(place.members) >= room.members or self._home(place.members[0]) != self._home(kernel):
            return False
        forms = room.forms * IN_PLACE if writes_in_place(kernel) else room.forms
        if form not in place.forms and not (len(place.forms) < forms and self._suits(place, kernel)):
            return False
        if len(place.pointers | self._pointers(kernel)) > room.pointers:
            return False
        return not any(forbids(d, kernel, other) for d in self.forbidden for other in place.members)

    def _suits(self, place: _Place, kernel: Kernel) -> bool:
        """Whether another body may join: all compute few points, or members make parts of one buffer, which is done when all
        are. Reductions join their own likes only: registers and the order of loads suit them badly in other company."""
        mixes = place.small and self._small(kernel) and not kernel.inner
        return mixes or not place.wholes.isdisjoint(self._wholes(kernel))

    def _wholes(self, kernel: Kernel) -> set[str]:
        """The buffers of which a GPU's kernel writes parts."""
        written = writes(kernel) if kernel.target == "triton" else ()
        return {ir.owner(self.graph, name) for name in written if self.graph.buffers[name].is_part}

    def _home(self, kernel: Kernel) -> Hashable:
        """The language and the device of a kernel."""
        return kernel.target, next(self.graph.buffers[name].device for name in sorted(writes(kernel)))

    def _pointers(self, kernel: Kernel) -> set[Hashable]:
        return {pointer_of(self.graph, name) for name in reads(kernel) | writes(kernel)}

    def _small(self, kernel: Kernel) -> bool:
        if kernel.target == "triton":
            return self.points(kernel) <= GPU_SMALL
        return self.points(kernel) * vs.total_cost(s.value for s in kernel.statements) < FULL

    def points(self, kernel: Kernel) -> int:
        return Sizes(self.graph.size_hints).points((*kernel.outer, *kernel.inner))

    def _makes_new(self, kernel: Kernel) -> bool:
        return any(self.graph.buffers[ir.owner(self.graph, name)].alias_of is None for name in writes(kernel))


def form_in(graph: ir.Graph, kernel: Kernel) -> Hashable:
    """Equal for kernels that do the same to their buffers, whatever these are called and however large they are."""
    return _body(kernel), tuple(graph.buffers[out].dtype for s in kernel.statements for out in s.outs)


def is_simple(kernel: Kernel) -> bool:
    """Whether a kernel computes points, or walks its rows once to reduce them."""
    return is_plain(kernel) and kernel.sections <= 1


def is_plain(kernel: Kernel) -> bool:
    """Whether a kernel computes points and reduces rows, and keeps no rows from one walk to the next."""
    if not kernel.inner:
        return all(s.kind == "pointwise" for s in kernel.statements)
    plain = all(s.kind == "pointwise" or (s.kind == "reduction" and s.op in FOLDS) for s in kernel.statements)
    return plain and not kernel.rows and kernel.share is None


def writes_in_place(kernel: Kernel) -> bool:
    """Whether a kernel does no more than to write parts of buffers that are there."""
    return all(s.kind == "pointwise" and s.op == "set" and s.target is not None for s in kernel.statements)


def is_static(kernel: Kernel, graph: ir.Graph) -> bool:
    """Whether all sizes are numbers: a GPU's kernel has the members' programs counted in its text."""
    buffers = [graph.buffers[name] for name in reads(kernel) | writes(kernel)]
    exprs = [v.extent for v in (*kernel.outer, *kernel.inner)]
    exprs += [e for b in buffers for e in (*b.sizes, *(b.strides or ()), ix.as_expr(b.offset))]
    exprs += [e for v in vs.topological(r for s in kernel.statements for r in s.roots) for e in vs.index_exprs(v)]
    return not any(isinstance(atom, ix.Size) for e in exprs for atom in ix.free_atoms(e))


def pointer_of(graph: ir.Graph, name: str) -> Hashable:
    """Equal for buffers that a combo kernel has one pointer for: parts of a buffer share the pointer of the whole."""
    buffer = graph.buffers[name]
    return address(graph, buffer.alias_of if buffer.is_part and buffer.alias_of is not None else name)


def forbids(demand: FusionDemand, a: Kernel, b: Kernel) -> bool:
    """Whether a demand that two operators stay apart keeps these kernels apart."""
    return demand.between(_calls(a), _calls(b))


def _calls(kernel: Kernel) -> list[OperatorCall]:
    return [call for origin in kernel.origins for call in origin.calls]


def _body(kernel: Kernel) -> Hashable:
    values = list(vs.by_place(s.value for s in kernel.statements))
    numbers = {value: k for k, value in enumerate(values)}
    slots: dict[str, int] = {}
    rows: list[Hashable] = [(v.op, v.dtype, tuple(numbers[a] for a in v.args), _attribute(v, slots)) for v in values]
    rows += [(s.kind, s.op, s.inner, numbers[s.value], s.stored, _slots(s.outs, slots)) for s in kernel.statements]
    return tuple(rows)


def _attribute(value: Value, slots: dict[str, int]) -> Hashable:
    if value.op == "load":
        return _slots([value.attr[0]], slots)
    return None if value.op == "index" else repr(value.attr)  # 0.0 and -0.0 are equal, but not the same constant


def _slots(names: Iterable[str], slots: dict[str, int]) -> tuple[int, ...]:
    return tuple(slots.setdefault(name, len(slots)) for name in names)
