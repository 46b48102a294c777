"""Whether two groups may become one kernel. Answers with the joint items, or with the reason why not."""

from __future__ import annotations

from collections.abc import Iterable

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.values import Index
from kgen.scheduler.analysis.items import Group, Item, Members
from kgen.scheduler.analysis.loop_alignment import Space
from kgen.verdict import Reason


def moved(group: Group, space: Space, first: bool) -> Members:
    """The group's items over the merged loops; `first` says which side of the space the group is."""
    mapping, run_inner = (space.map_a, space.a_inner) if first else (space.map_b, space.b_inner)
    had_inner = bool(group.inner)
    items = [
        i.substituted(mapping, space.outer, space.inner if (bool(i.inner) if had_inner else run_inner) else ())
        for i in group.items
    ]
    if all(new is old for new, old in zip(items, group.items, strict=True)):
        return group.members
    return Members.of(items)


def illegal(a: Members, b: Members) -> Reason | None:
    """The first rule that one kernel of both would break, or None. Each rule compares (buffer, index) pairs over the same
    loops; rules within one side held when that side was made. Costs what the smaller side has of reads and writes."""
    small, large = (a, b) if len(a.items) <= len(b.items) else (b, a)
    for name, entries in small.reads.items():
        reason = _bad_reads(entries, large.made.get(name), large.mutated.get(name))
        if reason:
            return reason
    for name, producer in small.made.items():
        reason = _bad_reads(large.reads.get(name, ()), producer, None)
        if reason:
            return reason
    for name, writer in small.mutated.items():
        reason = _bad_reads(large.reads.get(name, ()), None, writer)
        if reason:
            return reason
    return _bad_chain(small, large) or _bad_chain(large, small)


def _bad_reads(entries: Iterable[tuple[Item, Index]], producer: Item | None, writer: Item | None) -> Reason | None:
    """Reads of a buffer that the other side makes, or whose storage it overwrites."""
    for item, index in entries:
        if producer is not None:
            reason = _bad_flow(producer, item, index)
            if reason:
                return reason
        if writer is not None and not _same_element(writer, index):
            return Reason.MUTATION
    return None


def _bad_flow(producer: Item, consumer: Item, index: tuple[ix.Expr, ...]) -> Reason | None:
    """A consumer in the same kernel must read exactly the element that was made at its own point."""
    if isinstance(producer.node, ir.Scatter) and not _same_element(producer, index):
        return Reason.SCATTER_RESULT
    if producer.store != index or producer.second:
        return Reason.INDEX_MISMATCH
    if producer.is_partial and not consumer.is_partial and not producer.is_whole:  # a point is not its tile
        return Reason.INDEX_MISMATCH
    if producer.inner and not producer.reduces and not consumer.inner:
        return Reason.INDEX_MISMATCH
    return None


def _same_element(writer: Item, index: tuple[ix.Expr, ...]) -> bool:
    """Whether a scatter writes, at each point, just the element that the read at that point touches."""
    assert isinstance(writer.node, ir.Scatter)
    if writer.node.mode != "set" or writer.mask is not None:
        return False
    if any(isinstance(a, ix.Indirect) for e in writer.store for a in ix.free_atoms(e)):
        return False
    loops = {v for v in writer.outer + writer.inner if v.extent != 1}
    covered = {a for e in writer.store for a in ix.free_atoms(e)}
    return writer.store == index and loops <= covered


def _bad_chain(first: Members, second: Members) -> Reason | None:
    """Two writes of one storage in one kernel must hit the same element at each point, or they might swap."""
    for target, later in second.mutated.items():
        earlier = first.made.get(target)
        if earlier is None:
            continue
        if earlier.store != later.store or (isinstance(earlier.node, ir.Scatter) and not _same_element(later, earlier.store)):
            return Reason.MUTATION
    return None


def races(a: Members, b: Members) -> Reason | None:
    """The same for a device whose points have no order: a write after another one of the same storage must be of the same
    point, and set what it writes. An update of an element at many points may run before the element gets its first value at
    one of them."""
    for first, second in ((a, b), (b, a)):
        for target, later in second.mutated.items():
            earlier = first.made.get(target)
            if earlier is not None and not _same_element(later, earlier.store):
                return Reason.MUTATION
    return None
