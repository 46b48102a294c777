"""Greedy fusion: candidate pairs share a buffer, the most memory traffic saved goes first, every decision is a `Verdict`.

Near-linear: a buffer with n readers gives n producer-consumer pairs and n - 1 sibling pairs; a group has a bounded size; the
search for a path between two groups looks only at groups whose positions lie between theirs, and gives up after
`SEARCH_LIMIT` of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from kgen import errors, ir
from kgen.scheduler import cost
from kgen.scheduler.align import Space, align, identity_space
from kgen.scheduler.items import Group, Item
from kgen.scheduler.legality import illegal, joined_items
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

SEARCH_LIMIT = 256


@dataclass(slots=True)
class Fuser:
    """State of one fusion run. `readers` and `producer` are by buffer version; `before`/`after` are the group graph."""

    graph: ir.Graph
    groups: list[Group]
    sizes: cost.Sizes
    outputs: frozenset[str]
    enabled: bool = True
    demands: tuple[FusionDemand, ...] = ()
    producer: dict[str, Group] = field(default_factory=dict)
    readers: dict[str, list[Group]] = field(default_factory=dict)
    after: dict[int, set[Group]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    _heap: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    _by_serial: dict[int, Group] = field(default_factory=dict)
    _buffers: dict[tuple[int, int], str] = field(default_factory=dict)
    _version: dict[int, int] = field(default_factory=dict)

    def run(self) -> list[Group]:
        self._by_serial = {g.serial: g for g in self.groups}
        for group in self.groups:
            self._push_candidates(group)
        while self._heap:
            _, _, left, right, _ = heapq.heappop(self._heap)
            a, b = self._by_serial.get(left), self._by_serial.get(right)
            buffer = self._buffers.pop((left, right), None)
            if a is None or b is None or buffer is None or not (a.alive and b.alive):
                continue
            self._consider(a, b, buffer)
        self._check_demands()
        return [g for g in self.groups if g.alive]

    # ---- candidates -------------------------------------------------------------------------------------------------

    def _push_candidates(self, group: Group) -> None:
        for buffer in group.writes:
            for reader in self.readers.get(buffer, ()):
                self._push(group, reader, buffer)
        for buffer in self._read_buffers(group):
            producer = self.producer.get(buffer)
            if producer is not None:
                self._push(producer, group, buffer)
            siblings = self.readers.get(buffer, [])
            at = siblings.index(group) if len(siblings) <= 64 and group in siblings else None
            if at is not None:
                for neighbour in siblings[max(0, at - 1) : at] + siblings[at + 1 : at + 2]:
                    self._push(*sorted((group, neighbour), key=lambda g: g.first), buffer)

    def _push(self, a: Group, b: Group, buffer: str) -> None:
        if a is b or not (a.alive and b.alive):
            return
        key = (a.serial, b.serial)
        if key in self._buffers:
            return
        self._buffers[key] = buffer
        saved = self._saved(a, b)
        heapq.heappush(self._heap, (-saved, max(a.last, b.last) - min(a.first, b.first), a.serial, b.serial, saved))

    def _read_buffers(self, group: Group) -> list[str]:
        return sorted({r.buffer for i in group.items for r in i.reads} | (set(ir.reads(group.call)) if group.call else set()))

    def _saved(self, a: Group, b: Group) -> int:
        """Bytes that need not move when the two are one kernel."""
        if a.call or b.call:
            return 0
        total = 0
        written = set(a.writes) | set(b.writes)
        read_a, read_b = set(self._read_buffers(a)), set(self._read_buffers(b))
        for name in (read_a & read_b) | (written & (read_a | read_b)):
            nbytes = self.sizes.bytes(self.graph.buffers[name])
            total += nbytes
            if name in written and name not in self.outputs and all(r is a or r is b for r in self.readers.get(name, ())):
                total += nbytes  # nobody else needs it: it is never stored
        return total

    # ---- one decision -----------------------------------------------------------------------------------------------

    def _consider(self, a: Group, b: Group, buffer: str) -> None:
        if a.call or b.call:
            self._say(a, b, Outcome.ILLEGAL, Reason.EXTERN_CALL)
            return
        if not self.enabled:
            self._say(a, b, Outcome.UNPROFITABLE, Reason.SWITCHED_OFF)
            return
        if any(not d.wanted and _matches(d, a, b) for d in self.demands):
            self._say(a, b, Outcome.UNPROFITABLE, Reason.FORBIDDEN)
            return
        flows = any(o in self._reads_set(b) for o in a.writes) or any(o in self._reads_set(a) for o in b.writes)
        space = self._space(a, b, buffer)
        if isinstance(space, Reason):
            self._say(a, b, Outcome.ILLEGAL if flows else Outcome.UNPROFITABLE, space)
            return
        items = joined_items(a, b, space)
        reason = illegal(self.graph, items) or self._path(a, b)
        if reason:
            self._say(a, b, Outcome.ILLEGAL, reason)
            return
        reason = cost.unprofitable(self.sizes, items, space.outer, space.inner)
        saved = self._saved(a, b)
        if reason is None and saved <= 0:
            reason = Reason.NO_SAVING
        if reason:
            self._say(a, b, Outcome.UNPROFITABLE, reason)
            return
        self._say(a, b, Outcome.FUSED, self._why(a, b, flows), saved)
        self._merge(a, b, space, items)

    def _why(self, a: Group, b: Group, flows: bool) -> Reason:
        if not flows:
            return Reason.SIBLINGS
        if any(i.reduces for i in a.items):
            return Reason.BROADCAST_BACK
        return Reason.SHARED_DATA

    def _reads_set(self, group: Group) -> set[str]:
        return {r.buffer for i in group.items for r in i.reads}

    def _space(self, a: Group, b: Group, buffer: str) -> Space | Reason:
        """Tries the accesses to the shared buffer (then to any other) until one aligns the loops legally."""
        best: Space | Reason = Reason.SPACE_MISMATCH
        tried = 0
        for name in self._shared(a, b, buffer):
            for left in self._indices(a, name):
                for right in self._indices(b, name):
                    tried += 1
                    if tried > 12:
                        return best
                    space = align(a, b, left, right)
                    if isinstance(space, Space):
                        if illegal(self.graph, joined_items(a, b, space)) is None:
                            return space
                        best = Reason.INDEX_MISMATCH
                    elif best is Reason.SPACE_MISMATCH:
                        best = space
        same = identity_space(a, b)
        if isinstance(same, Space) and illegal(self.graph, joined_items(a, b, same)) is None:
            return same
        return best

    def _shared(self, a: Group, b: Group, first: str) -> list[str]:
        touched_a = self._reads_set(a) | set(a.writes)
        touched_b = self._reads_set(b) | set(b.writes)
        flows = [n for n in (*a.writes, *b.writes) if n in touched_a and n in touched_b and n != first]
        rest = sorted((touched_a & touched_b) - {first, *flows})
        head = [first] if first in touched_a and first in touched_b else []
        return (flows + head if first not in (*a.writes, *b.writes) else head + flows) + rest

    def _indices(self, group: Group, name: str) -> list[tuple]:  # type: ignore[type-arg]
        found = [i.store for i in group.items if name in i.outs]
        found += sorted({r.index for i in group.items for r in i.reads if r.buffer == name}, key=str)
        return list(dict.fromkeys(found))[:3]

    def _path(self, a: Group, b: Group) -> Reason | None:
        """Whether a third group lies on a path between the two."""
        for start, end in ((a, b), (b, a)):
            stack = [g for g in self.after.get(start.serial, ()) if g is not end]
            seen = {g.serial for g in stack}
            while stack:
                group = stack.pop()
                if group is end:
                    return Reason.CYCLE
                if group.first > end.last:
                    continue
                if len(seen) > SEARCH_LIMIT:
                    return Reason.SEARCH_LIMIT
                for nxt in self.after.get(group.serial, ()):
                    if nxt is end:
                        return Reason.CYCLE
                    if nxt.serial not in seen:
                        seen.add(nxt.serial)
                        stack.append(nxt)
        return None

    def _merge(self, a: Group, b: Group, space: Space, items: list[Item]) -> None:
        a.outer, a.inner, a.items = space.outer, space.inner, items
        a.first, a.last = min(a.first, b.first), max(a.last, b.last)
        b.alive = False
        del self._by_serial[b.serial]
        for buffer in b.writes:
            self.producer[buffer] = a
        for buffer in self._reads_set(b):
            old = self.readers.get(buffer, [])
            self.readers[buffer] = [g for g in old if g is not b and g is not a] + [a]
        successors = (self.after.pop(b.serial, set()) | self.after.get(a.serial, set())) - {a, b}
        self.after[a.serial] = successors
        for group in self._before.pop(b.serial, set()):
            if group is not a and group.alive:
                self.after[group.serial].discard(b)
                self.after[group.serial].add(a)
                self._before.setdefault(a.serial, set()).add(group)
        for group in successors:
            back = self._before.setdefault(group.serial, set())
            back.discard(b)
            back.add(a)
        self._before.get(a.serial, set()).discard(b)
        self._push_candidates(a)

    _before: dict[int, set[Group]] = field(default_factory=dict)

    def _say(self, a: Group, b: Group, outcome: Outcome, reason: Reason, saved: int = 0) -> None:
        self.verdicts.append(Verdict(a.name, b.name, outcome, reason, saved))

    # ---- demands ----------------------------------------------------------------------------------------------------

    def _check_demands(self) -> None:
        for demand in self.demands:
            groups = [g for g in self.groups if g.alive]
            one = [g for g in groups if _has(g, demand.producer)]
            two = [g for g in groups if _has(g, demand.consumer)]
            shared = [g for g in one if g in two and g.call is None]
            if not one or not two:
                continue
            if demand.wanted and not shared:
                pair = [v for v in reversed(self.verdicts) if {v.producer, v.consumer} & {g.name for g in one}]
                reason = str(pair[0].reason.value) if pair else Reason.SPACE_MISMATCH.value
                change = pair[0].change if pair else ""
                raise errors.FusionRequired(producer=demand.producer, consumer=demand.consumer, reason=reason, change=change)
            if not demand.wanted and shared:
                raise errors.FusionForbidden(producer=demand.producer, consumer=demand.consumer, kernel=shared[0].name)


def _operators(group: Group) -> Iterable[str]:
    nodes = [group.call] if group.call else [i.node for i in group.items]
    return [op for n in nodes if n is not None for op in n.origin.operators]


def _has(group: Group, operator: str) -> bool:
    return any(op == operator or op.rpartition(".")[0] == operator for op in _operators(group))


def _matches(demand: FusionDemand, a: Group, b: Group) -> bool:
    return (_has(a, demand.producer) and _has(b, demand.consumer)) or (_has(b, demand.producer) and _has(a, demand.consumer))
