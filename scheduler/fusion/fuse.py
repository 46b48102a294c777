"""Greedy fusion: candidate pairs share a buffer, the most memory traffic saved goes first, every decision is a `Verdict`.

Near-linear: a buffer with n readers gives n producer-consumer pairs and n - 1 horizontal pairs; a group has a bounded size; the
search for a path between two groups looks only at groups ranked between them, and gives up after `SEARCH_LIMIT` of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from kgen import errors
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Atom, Expr, Sizes
from kgen.ir.values import Index
from kgen.scheduler.analysis.items import Group, Item, Members
from kgen.scheduler.analysis.loop_alignment import Space, align, identity_space, in_rows, same_points
from kgen.scheduler.analysis.memo import memoised
from kgen.scheduler.fusion import cost
from kgen.scheduler.fusion.contraction_groups import are_family, feeds_contraction, has_contraction, is_partial
from kgen.scheduler.fusion.legality import illegal, moved, races
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import FusionDemand, OperatorCall, Outcome, Reason, Verdict

SEARCH_LIMIT = 256
# Pairs of accesses tried before equal loops are joined as they are, or two groups count as not alignable.
MAX_ALIGNMENTS = 12
# A buffer with more readers than this pairs with the first ones only, and takes no part in horizontal fusion, but for readers
# that make parts of one buffer, such as the elements of rows that are sorted by a network.
MAX_READERS = 32


@dataclass(frozen=True, slots=True)
class _Fusible:
    """The loops that two groups may share, the items of each in them, whether data flows between the two, and bytes saved."""

    space: Space
    left: Members
    right: Members
    flows: bool
    saved: int


@dataclass(slots=True)
class Fuser:
    """State of one fusion run. `readers` and `producer` are by buffer version; `before`/`after` are the group graph."""

    graph: ir.Graph
    groups: list[Group]
    sizes: Sizes
    outputs: frozenset[str]
    limits: dict[str, cost.Limits]  # by device
    enabled: bool = True
    demands: tuple[FusionDemand, ...] = ()
    single: frozenset[str] = frozenset()  # results of contractions that share a kernel with no other contraction
    horizontal_fusion: bool = True  # groups that need nothing of each other may be one kernel
    full_row_buffers: Mapping[str, str] = field(default_factory=dict)  # buffers that are made in the kernel of a matmul
    unordered: frozenset[str] = frozenset()  # devices whose programs run points in any order
    capabilities: Capabilities = field(default_factory=Capabilities)  # of the registered templates
    apart: Mapping[str, Verdict] = field(default_factory=dict)  # why updates are not in a matmul's kernel, by their results
    unmet: list[tuple[FusionDemand, errors.FusionRequired]] = field(default_factory=list)  # what fusion alone has not done
    producer: dict[str, Group] = field(default_factory=dict)
    readers: dict[str, dict[int, Group]] = field(default_factory=dict)  # by serial, so that a merge costs no search
    after: dict[int, set[Group]] = field(default_factory=dict)
    before: dict[int, set[Group]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    refused: dict[tuple[int, int], Verdict] = field(default_factory=dict)  # the last refusal of two groups, by serials
    _heap: list[tuple[int, int, int, int]] = field(default_factory=list)
    _by_serial: dict[int, Group] = field(default_factory=dict)
    _buffers: dict[tuple[int, int], str] = field(default_factory=dict)
    _bytes: dict[str, int] = field(default_factory=dict)
    _blocked: dict[int, dict[int, str]] = field(default_factory=dict)  # pairs to be tried again after merges
    # the last two groups between which a third one was looked for, and what was found, until one of them merges
    _between: tuple[Group, Group, list[Group] | None] | None = None

    def run(self) -> list[Group]:
        self._by_serial = {g.serial: g for g in self.groups}
        for group in self.groups:
            self._push_candidates(group, (*group.writes, *group.reads))
        while self._heap:
            _, _, left, right = heapq.heappop(self._heap)
            a, b = self._by_serial.get(left), self._by_serial.get(right)
            buffer = self._buffers.pop((left, right), None)
            if a is None or b is None or buffer is None or not (a.alive and b.alive):
                continue
            self._consider(a, b, buffer)
        self._check_demands()
        return [g for g in self.groups if g.alive]

    # ---- candidates -------------------------------------------------------------------------------------------------

    def _push_candidates(self, group: Group, buffers: Iterable[str]) -> None:
        """Queues the pairs that `group` forms over `buffers`."""
        for buffer in buffers:
            producer = self.producer.get(buffer)
            readers = self.readers.get(buffer, {})
            if producer is group:
                for reader in list(readers.values())[:MAX_READERS]:
                    self._push(group, reader, buffer)
                continue
            if producer is not None:
                self._push(producer, group, buffer)
            if group.serial in readers and (len(readers) <= MAX_READERS or self._parts_of(group)):
                for adjacent in _adjacent(group, readers.values()):
                    if len(readers) <= MAX_READERS or self._parts_of(group) & self._parts_of(adjacent):
                        self._push_in_order(group, adjacent, buffer)

    def _parts_of(self, group: Group) -> set[str]:
        """The buffers of which a group makes parts."""
        made = (self.graph.buffers[name] for name in group.members.made if name in self.graph.buffers)
        return {one.alias_of for one in made if one.is_part and one.alias_of is not None}

    def _push_in_order(self, a: Group, b: Group, buffer: str) -> None:
        """`_push` for groups of which it is not known which one feeds the other."""
        first, second = (a, b) if a.first <= b.first else (b, a)
        self._push(first, second, buffer)

    def _push(self, a: Group, b: Group, buffer: str) -> None:
        if a is b or not (a.alive and b.alive):
            return
        if (self._waits(a) or self._waits(b)) and not (has_contraction(a) or has_contraction(b)):
            self._wait(a, b, buffer)  # for a matmul to join either
            return
        key = (a.serial, b.serial)
        if key not in self._buffers:
            self._buffers[key] = buffer
            distance = max(a.last, b.last) - min(a.first, b.first)
            heapq.heappush(self._heap, (-self._saved(a, b), distance, a.serial, b.serial))

    def _waits(self, group: Group) -> bool:
        """Whether some matmul's kernel is the only one that the group may join."""
        return is_partial(group) or self._is_full_row(group)

    def _is_full_row(self, group: Group) -> bool:
        return bool(self.full_row_buffers) and not group.members.made.keys().isdisjoint(self.full_row_buffers)

    def _saved(self, a: Group, b: Group) -> int:
        """Bytes that need not move when the two are one kernel."""
        if a.call or b.call:
            return 0
        total, points = 0, [(one, self.sizes.points((*one.outer, *one.inner))) for one in (a, b)]
        for name in self.common(a, b):
            nbytes = self._shared_bytes(name, points)
            total += nbytes
            made = name in a.members.made or name in b.members.made
            if made and name not in self.outputs and self._only_readers(name, a, b):
                total += nbytes  # nobody else needs it: it is never stored
        return total

    def _shared_bytes(self, name: str, points: list[tuple[Group, int]]) -> int:
        """Bytes of a buffer that groups of so many points may all touch, no more than each does: each step of an unrolled loop
        reads a slice."""
        whole = self._bytes.get(name)
        if whole is None:
            whole = self._bytes[name] = self.sizes.bytes(self.graph.buffers[name])
        return min(whole, *(self._touched_bytes(group, number, name, whole) for group, number in points))

    def _touched_bytes(self, group: Group, points: int, name: str, whole: int) -> int:
        """Bytes of a buffer that a group touches at most: an access touches no more elements than the group has points."""
        one = points * self.graph.buffers[name].dtype.itemsize
        return whole if one >= whole else one * max(1, len(self._all_indices(group, name)))

    def _only_readers(self, name: str, a: Group, b: Group) -> bool:
        readers = self.readers.get(name, {})
        return len(readers) <= 2 and all(r is a or r is b for r in readers.values())

    def common(self, a: Group, b: Group) -> list[str]:
        """Buffers that both touch, at least one of them by reading."""
        small, large = (a.members, b.members) if len(a.items) <= len(b.items) else (b.members, a.members)
        made, read = large.made, large.reads
        return [n for n in small.touched if n in read or n in made]

    # ---- one decision -----------------------------------------------------------------------------------------------

    def _consider(self, a: Group, b: Group, buffer: str) -> None:
        found = self.judged(a, b, buffer)
        if isinstance(found, Verdict):
            if found.reason in (Reason.CYCLE, Reason.SEARCH_LIMIT):
                self._wait(a, b, buffer)
            self._refuse(a, b, found)
            return
        if not self._rerank(a, b):
            self._refuse(a, b, Verdict(a.name, b.name, Outcome.ILLEGAL, Reason.SEARCH_LIMIT))
            return
        self.verdicts.append(Verdict(a.name, b.name, Outcome.FUSED, self._why(a, b, found.flows), found.saved))
        left, right = found.left, found.right
        joined = memoised(("joined", left, right), lambda: left.joined(right))
        if len(a.items) >= len(b.items):
            self._merge(a, b, found.space, joined)
        else:
            self._merge(b, a, found.space, joined)

    def _refuse(self, a: Group, b: Group, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self.refused[min(a.serial, b.serial), max(a.serial, b.serial)] = verdict

    def judged(self, a: Group, b: Group, buffer: str) -> _Fusible | Verdict:
        """How the two may be one kernel, or why not. Nothing changes."""
        refused = self._refused(a, b)
        if refused:
            return Verdict(a.name, b.name, *refused)
        unordered = self._out_of_order(a, b)
        if unordered:
            return Verdict(a.name, b.name, Outcome.ILLEGAL, Reason.NOT_IN_ORDER, detail=unordered)
        flows, merged = self._together(a, b, buffer)
        if isinstance(merged, Reason):
            return Verdict(a.name, b.name, Outcome.ILLEGAL if flows else Outcome.UNPROFITABLE, merged)
        path = self._path(a, b)
        if path:
            return Verdict(a.name, b.name, Outcome.ILLEGAL, path)
        space, left, right = merged
        reason = cost.unprofitable(self.graph, self.sizes, left, right, space, self.limits[a.device])
        saved = self._saved(a, b)
        if reason is None and saved <= 0:
            reason = Reason.NO_SAVING
        if reason:
            return Verdict(a.name, b.name, Outcome.UNPROFITABLE, reason)
        return _Fusible(space, left, right, flows, saved)

    def _refused(self, a: Group, b: Group) -> tuple[Outcome, Reason] | None:
        """Why the two stay apart, whatever their loops are."""
        if a.call or b.call or a.device != b.device:
            return Outcome.ILLEGAL, Reason.EXTERN_CALL if a.call or b.call else Reason.DEVICE
        if not self.enabled:
            return Outcome.UNPROFITABLE, Reason.SWITCHED_OFF
        if any(not d.wanted and _matches(d, a, b) for d in self.demands):
            return Outcome.UNPROFITABLE, Reason.FORBIDDEN
        if self._fills(a, b) or self._fills(b, a):
            return Outcome.ILLEGAL, Reason.PART
        if has_contraction(a) == has_contraction(b):
            return None
        refused = [self.apart[out] for out in (*a.members.made, *b.members.made) if out in self.apart]
        return (refused[0].outcome, refused[0].reason) if refused else None

    def _out_of_order(self, a: Group, b: Group) -> str | None:
        """Why no template keeps the order of updates on the tiles of a contraction, where the device has one."""
        if has_contraction(a) == has_contraction(b) or a.device in self.unordered:
            return None
        others = b.items if has_contraction(a) else a.items
        update = next((item for item in others if item.is_update and item.in_order), None)
        return None if update is None else self.capabilities.why_not(update.outs[0], Request(ordered=True))

    def _fills(self, a: Group, b: Group) -> bool:
        """Whether one makes a part of what the other needs all of."""
        parts = [name for name in a.members.made if self.graph.buffers[name].is_part]
        return bool(parts) and not ir.storages(self.graph, (*b.members.reads, *b.members.mutated)).isdisjoint(parts)

    def _wait(self, a: Group, b: Group, buffer: str) -> None:
        """Has the pair tried again when either has merged with a third group."""
        self._blocked.setdefault(a.serial, {})[b.serial] = buffer
        self._blocked.setdefault(b.serial, {})[a.serial] = buffer

    def _together(self, a: Group, b: Group, buffer: str) -> tuple[bool, tuple[Space, Members, Members] | Reason]:
        """Whether data flows from one to the other, and the merged loops, where there are any that both may run in."""
        common = self.common(a, b)
        flows = any(n in a.members.made or n in b.members.made for n in common)
        if not flows and not self.horizontal_fusion:
            return flows, Reason.HORIZONTAL_OFF
        if has_contraction(a) != has_contraction(b):
            a, b = (one if has_contraction(one) else self._free(one) for one in (a, b))
        merged = self._merged(a, b, buffer, common)
        return flows, self._epilogue(a, b, merged, flows) if has_contraction(a) or has_contraction(b) else merged

    def _free(self, group: Group) -> Group:
        """The group with the points of its updates as a matmul's tiles may run them, where nothing else gives it an order: on
        a device that keeps one, each update says at which place a point has to come."""
        any_order = group.device in self.unordered

        def is_free(item: Item) -> bool:
            return not item.in_order or item.is_update or (any_order and isinstance(item.node, ir.Scatter))

        if not group.inner or not all(item.inner and is_free(item) for item in group.items):
            return group
        # under their old names they could be taken for the loops of the matmul's sum
        fresh = [ix.var(f"x{k}", v.extent) for k, v in enumerate(group.inner, len(group.outer))]
        outer = (*group.outer, *fresh)
        renamed: dict[Atom, Expr] = {v: f.expr() for v, f in zip(group.inner, fresh, strict=True)}

        def freed(item: Item) -> Item:
            rank = item.turn(group.inner) if item.is_update and not any_order else item.rank
            return replace(replace(item, rank=rank, in_order=False).substituted(renamed, outer, ()), inner=())

        def members() -> Members:
            return Members.of([freed(item) for item in group.items])

        return replace(group, outer=outer, inner=(), members=memoised(("free", group.members, any_order), members))

    def _epilogue(
        self, a: Group, b: Group, merged: tuple[Space, Members, Members] | Reason, flows: bool
    ) -> tuple[Space, Members, Members] | Reason:
        """What may run on the tiles of a matmul: independent points, one for each of the matmul's."""
        if isinstance(merged, Reason):
            return merged
        if not flows:
            return Reason.NO_SAVING
        if _summed(merged[1].items) != _summed(a.items) or _summed(merged[2].items) != _summed(b.items):
            return Reason.NOT_EPILOGUE  # a sum of one term has no loop: rows or columns must not take its place
        items = (*merged[1].items, *merged[2].items)
        if feeds_contraction(items):
            return Reason.NOT_PROLOGUE
        if has_contraction(a) and has_contraction(b):
            if not self.horizontal_fusion:
                return Reason.HORIZONTAL_OFF
            alone = any(out in self.single for item in items for out in item.outs)
            return merged if are_family(items, self.capabilities) and not alone else Reason.TWO_MATMULS
        others = merged[2] if has_contraction(a) else merged[1]
        return Reason.NOT_EPILOGUE if any(item.inner for item in others.items) else merged

    def _why(self, a: Group, b: Group, flows: bool) -> Reason:
        if not flows:
            return Reason.HORIZONTAL
        if has_contraction(a) or has_contraction(b):
            if self._is_full_row(b if has_contraction(a) else a):
                return Reason.ROWS
            return Reason.TILE_PARTIALS if is_partial(a) or is_partial(b) else Reason.EPILOGUE
        return Reason.BROADCAST_BACK if any(i.reduces for i in a.items) else Reason.SHARED_DATA

    def _merged(self, a: Group, b: Group, buffer: str, common: list[str]) -> tuple[Space, Members, Members] | Reason:
        """The merged loops of two groups, found once for these members, whatever attempt asks."""
        of_rows = has_contraction(a) != has_contraction(b) and self._is_full_row(b if has_contraction(a) else a)
        key = ("merged", a.members, b.members, buffer, of_rows, a.device in self.unordered)
        return memoised(key, lambda: self._search(a, b, self._by_promise(a, b, buffer, common), of_rows))

    def _search(self, a: Group, b: Group, names: Sequence[str], of_rows: bool) -> tuple[Space, Members, Members] | Reason:
        """Tries the accesses to shared buffers until one aligns the loops legally. Where none does, equal loops are joined."""
        best: Reason = Reason.SPACE_MISMATCH
        accesses = ((left, right) for name in names for left in self._indices(a, name) for right in self._indices(b, name))
        for left, right in islice(accesses, MAX_ALIGNMENTS):
            found = self._legal(a, b, align(a, b, left, right))
            if isinstance(found, Reason) and of_rows:
                found = self._legal(a, b, in_rows(a, b, left, right))
            if not isinstance(found, Reason):
                return found
            best = found if best is Reason.SPACE_MISMATCH else best
        if best is Reason.REDUCED_AXES_DIFFER:
            return best  # of a square, rows and columns have the same loops, but are at other elements
        found = self._legal(a, b, same_points(a, b) if has_contraction(a) or has_contraction(b) else identity_space(a, b))
        return best if isinstance(found, Reason) else found

    def _legal(self, a: Group, b: Group, space: Space | Reason) -> tuple[Space, Members, Members] | Reason:
        if isinstance(space, Reason):
            return space
        left, right = moved(a, space, True), moved(b, space, False)
        reason = illegal(left, right)
        if reason is None and a.device in self.unordered:
            lost = _may_be_lost(space, (*left.items, *right.items))
            reason = Reason.EMPTY_LOOP if lost else races(left, right)
        return reason if reason else (space, left, right)

    def _by_promise(self, a: Group, b: Group, first: str, common: list[str]) -> list[str]:
        """The pair's own buffer first, then what flows between the two, then what both read."""
        flows = [n for n in common if n in a.members.made or n in b.members.made]
        rest = [n for n in common if n not in flows]
        head = [first] if first in common else []
        return list(dict.fromkeys((*head, *flows, *rest) if first in flows else (*flows, *head, *rest)))

    def _indices(self, group: Group, name: str) -> list[Index]:
        return self._all_indices(group, name)[:3]

    def _all_indices(self, group: Group, name: str) -> list[Index]:
        maker = group.members.made.get(name)
        found = [maker.store] if maker is not None else []
        found += [index for _, index in group.members.reads.get(name, ())]
        return list(dict.fromkeys(found))

    def _path(self, a: Group, b: Group) -> Reason | None:
        """Whether a third group is on a path between the two. Ranks order the group graph, so that only groups ranked
        between the two can."""
        low, high = (a, b) if a.rank < b.rank else (b, a)
        between = self._reached(self.after, low, high)
        self._between = low, high, between
        if between is None:
            return Reason.SEARCH_LIMIT
        return Reason.CYCLE if any(high in self.after.get(g.serial, ()) for g in between) else None

    def _reached(self, edges: dict[int, set[Group]], start: Group, skip: Group) -> list[Group] | None:
        """Groups that `edges` lead to from `start` through groups ranked between it and `skip`; None when there are too
        many."""
        low, high = min(start.rank, skip.rank), max(start.rank, skip.rank)
        stack = [g for g in edges.get(start.serial, ()) if low < g.rank < high]
        seen = {g.serial: g for g in stack}
        while stack:
            if len(seen) > SEARCH_LIMIT:
                return None
            for group in edges.get(stack.pop().serial, ()):
                if low < group.rank < high and group.serial not in seen:
                    seen[group.serial] = group
                    stack.append(group)
        return list(seen.values())

    def _rerank(self, a: Group, b: Group) -> bool:
        """Makes ranks order the graph in which the two are one: what leads to the later one moves before, what follows from
        the earlier one moves behind, within the ranks that all of them had (Pearce and Kelly, "A dynamic topological sort
        algorithm for directed acyclic graphs", 2006). False when too many would move."""
        low, high = (a, b) if a.rank < b.rank else (b, a)
        known = self._between is not None and self._between[0] is low and self._between[1] is high
        behind = self._between[2] if known and self._between else self._reached(self.after, low, high)
        self._between = None
        predecessors = self._reached(self.before, high, low)
        if behind is None or predecessors is None:
            return False
        behind.sort(key=lambda g: g.rank)
        predecessors.sort(key=lambda g: g.rank)
        ranks = sorted([low.rank, high.rank, *(g.rank for g in behind), *(g.rank for g in predecessors)])
        for group, rank in zip(predecessors, ranks, strict=False):
            group.rank = rank
        a.rank = b.rank = ranks[len(predecessors)]
        for group, rank in zip(reversed(behind), reversed(ranks), strict=False):
            group.rank = rank
        return True

    def _merge(self, a: Group, b: Group, space: Space, joined: Members) -> None:
        """`a` takes over everything of `b`, the smaller one, and its candidates are those that `b` brings."""
        fresh = list(dict.fromkeys((*b.members.made, *b.members.reads)))
        a.outer, a.inner, a.members = space.outer, space.inner, joined
        a.first, a.last = min(a.first, b.first), max(a.last, b.last)
        b.alive = False
        del self._by_serial[b.serial]
        for buffer in b.members.made:
            self.producer[buffer] = a
        for buffer in b.members.reads:
            readers = self.readers.setdefault(buffer, {})
            self._push_adjacent(b, buffer)
            readers.pop(b.serial, None)
            readers[a.serial] = a
        self._rewire(a, b)
        self._push_candidates(a, fresh)
        for serial, buffer in (*self._blocked.pop(a.serial, {}).items(), *self._blocked.pop(b.serial, {}).items()):
            other = self._by_serial.get(serial)
            if other is not None:
                self._push_in_order(a, other, buffer)

    def _push_adjacent(self, leaves: Group, buffer: str) -> None:
        """Queues the readers that are next to each other once one between them is part of another group."""
        readers = self.readers[buffer]
        if leaves.serial in readers and len(readers) <= MAX_READERS:
            around = _adjacent(leaves, readers.values())
            if len(around) == 2:
                self._push_in_order(around[0], around[1], buffer)

    def _rewire(self, a: Group, b: Group) -> None:
        """Replaces `b` by `a` in the group graph."""
        successors = (self.after.pop(b.serial, set()) | self.after.get(a.serial, set())) - {a, b}
        self.after[a.serial] = successors
        for group in self.before.pop(b.serial, set()):
            if group is not a and group.alive:
                self.after[group.serial].discard(b)
                self.after[group.serial].add(a)
                self.before.setdefault(a.serial, set()).add(group)
        for group in successors:
            back = self.before.setdefault(group.serial, set())
            back.discard(b)
            back.add(a)
        self.before.get(a.serial, set()).discard(b)

    # ---- demands ----------------------------------------------------------------------------------------------------

    def _check_demands(self) -> None:
        for demand in self.demands:
            groups = [g for g in self.groups if g.alive]
            one = [g for g in groups if demand.first.among(_calls(g))]
            two = [g for g in groups if demand.second.among(_calls(g))]
            shared = [g for g in one if g in two and g.call is None]
            if not one or not two:
                continue
            if demand.wanted and not shared:
                pair = [v for v in reversed(self.verdicts) if {v.producer, v.consumer} & {g.name for g in one}]
                reason = str(pair[0].reason.value) if pair else Reason.SPACE_MISMATCH.value
                change = pair[0].change if pair else ""
                missing = errors.FusionRequired(
                    producer=demand.producer, consumer=demand.consumer, reason=reason, change=change
                )
                self.unmet.append((demand, missing))
            if not demand.wanted and shared:
                raise errors.FusionForbidden(producer=demand.producer, consumer=demand.consumer, kernel=shared[0].name)


def _may_be_lost(space: Space, items: Sequence[Item]) -> bool:
    """Whether something runs outside of an inner loop that may be empty. On a GPU all loops of points are one, and what is
    outside runs at the first inner point. A reduction's loop stays a loop."""
    if all(item.inner for item in items) or any(item.reduces for item in items):
        return False
    return any(ix.lower_bound(v.extent) < 1 for v in space.inner)


def _summed(items: Iterable[Item]) -> list[list[Expr]]:
    """Extents of the loops over which matmuls are sums."""
    return [[v.extent for v in item.inner if v.extent != 1] for item in items if item.contracts]


def _adjacent(group: Group, readers: Iterable[Group]) -> list[Group]:
    """The readers just before and after `group` in program order."""
    order = sorted(readers, key=lambda g: (g.first, g.serial))
    at = order.index(group)
    return [*order[max(0, at - 1) : at], *order[at + 1 : at + 2]]


def _calls(group: Group) -> list[OperatorCall]:
    nodes = [group.call] if group.call else [i.node for i in group.items]
    return [call for n in nodes if n is not None for call in n.origin.calls]


def _matches(demand: FusionDemand, a: Group, b: Group) -> bool:
    return demand.between(_calls(a), _calls(b))
