"""Whether two groups may become one kernel. Answers with the joint items, or with the reason why not."""

from __future__ import annotations

from kgen import index as ix
from kgen import ir
from kgen.scheduler.align import Space
from kgen.scheduler.items import Group, Item
from kgen.verdict import Reason


def joined_items(a: Group, b: Group, space: Space) -> list[Item]:
    """Both groups' items over the joint loops, in program order."""
    items = [_moved(i, space, space.map_a, space.a_inner, bool(a.inner)) for i in a.items]
    items += [_moved(i, space, space.map_b, space.b_inner, bool(b.inner)) for i in b.items]
    return sorted(items, key=lambda i: i.position)


def _moved(item: Item, space: Space, mapping: dict, was_inner: bool, group_had_inner: bool) -> Item:  # type: ignore[type-arg]
    inner = bool(item.inner) if group_had_inner else was_inner
    return item.substituted(mapping, space.outer, space.inner if inner else ())


def illegal(graph: ir.Graph, items: list[Item]) -> Reason | None:
    """The first rule that the joint items break, or None. Every rule looks at (buffer, index) pairs over the same loops."""
    written: dict[str, Item] = {}
    for item in items:
        for out in item.outs:
            written[out] = item
    mutated = {item.node.target: item for item in items if isinstance(item.node, ir.Scatter)}
    for item in items:
        for access in item.reads:
            producer = written.get(access.buffer)
            if producer is not None and producer is not item:
                reason = _bad_flow(producer, item, access.index)
                if reason:
                    return reason
            writer = mutated.get(access.buffer)
            if writer is not None and not _same_element(writer, access.index):
                return Reason.MUTATION
    return _bad_chain(graph, mutated, written)


def _bad_flow(producer: Item, consumer: Item, index: tuple[ix.Expr, ...]) -> Reason | None:
    """A consumer in the same kernel must read exactly the element that was made at its own point."""
    if isinstance(producer.node, ir.Scatter) and not _same_element(producer, index):
        return Reason.SCATTER_RESULT
    if producer.store != index:
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


def _bad_chain(graph: ir.Graph, mutated: dict[str, Item], written: dict[str, Item]) -> Reason | None:
    """Two writes of one storage in one kernel must hit the same element at each point, or they might swap."""
    for target, second in mutated.items():
        first = written.get(target)
        if first is not None and first.store != second.store:
            return Reason.MUTATION
        if first is not None and isinstance(first.node, ir.Scatter) and not _same_element(second, first.store):
            return Reason.MUTATION
    return None
