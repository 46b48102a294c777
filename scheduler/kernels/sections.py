"""Turns a fused group into a kernel: which inner loop each item runs in, and what crosses from one to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.plan import PART, Kernel, Statement
from kgen.ir.sizes import Sizes
from kgen.ir.values import Value
from kgen.scheduler.analysis.items import Group, Item
from kgen.scheduler.fusion.cost import LIMITS, Limits
from kgen.verdict import Outcome, Reason, Verdict


def make_kernel(group: Group, sizes: Sizes, needed: frozenset[str], verdicts: list[Verdict], target: str = "cpp") -> Kernel:
    """`needed` are buffers that something outside the group reads; the rest stay in registers or rows."""
    items = group.items
    after = _place(items)
    items, after, rows, stored = _crossings(group, items, after, _Keeping(group.inner, sizes, LIMITS[target]), needed, verdicts)
    tiled = frozenset(o for item in items if item.is_partial for o in item.outs)
    statements = [_statement(item, after[k], stored, tiled) for k, item in enumerate(items)]
    sections = 1 + max((s.section for s in statements if s.inner), default=-1)
    origins = tuple(item.node.origin for item in items)
    return Kernel(_name(items), group.outer, group.inner, sections, tuple(statements), tuple(rows), origins, target)


def _place(items: list[Item]) -> list[int]:
    """The section of each item. A reduction's result exists after its section; an inner reader of it runs in the next."""
    ready: dict[str, tuple[int, bool]] = {}  # buffer -> (section, complete only after it)
    places: list[int] = []
    for item in items:
        section = 0 if item.inner else -1
        for read in item.reads:
            if read.buffer in ready:
                at, complete_after = ready[read.buffer]
                section = max(section, at + 1 if complete_after and item.inner else at)
        if isinstance(item.node, ir.Scatter):
            section = max(section, _after_readers(item, items[: len(places)], places))
        places.append(section)
        for out in item.outs:
            # an outer item stands after section `section`: inner readers need the one after that
            ready[out] = (section, item.reduces or not item.inner)
    return places


def _after_readers(writer: Item, earlier: list[Item], places: list[int]) -> int:
    """The first section in which a write may run: whoever reads the old contents has run by then."""
    assert isinstance(writer.node, ir.Scatter)
    target, section = writer.node.target, -1
    for item, place in zip(earlier, places, strict=True):
        if any(read.buffer == target for read in item.reads):
            section = max(section, place if item.inner or not writer.inner else place + 1)
    return section


@dataclass(frozen=True, slots=True)
class _Keeping:
    """How a value of one section reaches a later one: computed again (inline), in a row, or through memory."""

    inner: tuple[Var, ...]
    sizes: Sizes
    limits: Limits

    def cheap(self, item: Item) -> bool:
        return isinstance(item.node, ir.Pointwise) and item.cost <= self.limits.recompute

    def how(self, producer: Item, changed: set[str]) -> str:
        if self.cheap(producer) and not any(read.buffer in changed for read in producer.reads):
            return "inline"
        static = all(v.extent.as_int() is not None for v in self.inner)
        return "row" if static and self.sizes.points(self.inner) <= self.limits.max_row else "memory"


def _crossings(
    group: Group,
    items: list[Item],
    places: list[int],
    keeping: _Keeping,
    needed: frozenset[str],
    verdicts: list[Verdict],
) -> tuple[list[Item], list[int], list[str], set[str]]:
    """Resolves inner values that a later section reads: recomputed, kept in a row, or stored in memory."""
    made = {o: k for k, item in enumerate(items) for o in item.outs if item.inner and not item.reduces}
    rows: list[str] = []
    stored = {o for item in items for o in item.outs if o in needed}
    inline: dict[str, Item] = {}
    last = _last_readers(items, places)
    for k, item in enumerate(items):
        for name in _read_through(item, places[k], items, places, inline) if item.inner else ():
            source = made.get(name)
            if source is None or places[source] >= places[k] or name in inline:
                continue
            producer = items[source]
            how = keeping.how(producer, _changed_before(items, places, last[name]))
            if name in rows or (name in stored and how != "inline"):
                continue  # a row is no memory for others: what is stored is read back
            outcome, reason = Outcome.STORED, Reason.EXPENSIVE
            if how == "inline":
                inline[name] = producer
                outcome, reason = Outcome.RECOMPUTED, Reason.CHEAP
            elif how == "row":
                rows.append(name)
                reason = Reason.ROW_IN_CACHE
            else:
                stored.add(name)
            verdicts.append(Verdict(name, item.outs[0], outcome, reason))
    if inline:
        items = [_inlined(item, places[k], items, places, inline) for k, item in enumerate(items)]
        still_read = {r.buffer for item in items for r in item.reads}
        keep = [
            k
            for k, item in enumerate(items)
            if any(o in stored or o in still_read for o in item.outs) or not set(item.outs) <= set(inline)
        ]
        items, places = [items[k] for k in keep], [places[k] for k in keep]
    return items, places, rows, stored


def _read_through(item: Item, place: int, items: list[Item], places: list[int], inline: Mapping[str, Item]) -> Iterator[str]:
    """What the item reads, and what a value of an earlier section reads that is computed again for it: its operands, too, must
    still be there. `inline` may grow on the way."""
    sections = {o: places[k] for k, it in enumerate(items) for o in it.outs}
    pending, seen = [item], set[str]()
    while pending:
        for name in sorted({read.buffer for read in pending.pop().reads} - seen):
            seen.add(name)
            yield name
            if name in inline and sections[name] < place:
                pending.append(inline[name])


def _last_readers(items: list[Item], places: list[int]) -> dict[str, int]:
    """By buffer, the last section in which it may be read, if every value is computed again where it is needed."""
    last: dict[str, int] = {}
    for k in reversed(range(len(items))):
        item, section = items[k], places[k]
        if item.inner and isinstance(item.node, ir.Pointwise):
            section = max(section, last.get(item.node.out, -1))
        for read in item.reads:
            last[read.buffer] = max(last.get(read.buffer, -1), section)
    return last


def _changed_before(items: list[Item], places: list[int], section: int) -> set[str]:
    """Buffers whose contents are no longer there at the end of `section`."""
    return {
        i.node.target for i, place in zip(items, places, strict=True) if isinstance(i.node, ir.Scatter) and place <= section
    }


def _inlined(item: Item, place: int, items: list[Item], places: list[int], inline: dict[str, Item]) -> Item:
    """The item with loads of earlier sections' cheap values replaced by those values."""
    if not item.inner or not any(r.buffer in inline for r in item.reads):
        return item
    section_of = {o: places[k] for k, it in enumerate(items) for o in it.outs}

    def replace(load: Value) -> Value | None:
        producer = inline.get(load.attr[0])
        if producer is None or section_of[load.attr[0]] >= place:
            return None
        value = _inlined(producer, place, items, places, inline).value
        buffer_dtype = load.attr[2]
        value = vs.cast(value, ops.compute_dtype(buffer_dtype))
        return value if not load.args else vs.guard_loads(value, load.args[0])

    roots = [item.value, *([] if item.mask is None else [item.mask])]
    new = vs.replace_loads(roots, replace)
    return dataclasses.replace(item, value=new[0], mask=new[1] if len(new) > 1 else None)


def _statement(item: Item, section: int, stored: set[str], tiled: frozenset[str]) -> Statement:
    node = item.node
    flags = tuple(o in stored for o in item.outs)
    if ir.is_contraction(node):
        assert node.operands is not None
        kinds = (node.operands, node.operands)
        return Statement(
            "contraction", item.outs, item.value, item.store, True, section, flags, "sum",
            factors=item.factors, operands=kinds, unscaled=node.unscaled,
        )  # fmt: skip
    if ir.is_product(node):
        return Statement(
            "contraction", item.outs, item.value, item.store, True, section, flags, node.operator,
            factors=item.factors, operands=node.dtypes, axes=item.axes, arguments=node.arguments,
        )  # fmt: skip
    if isinstance(node, ir.Partial):
        return _partial(item, node, section, flags, tiled)
    if isinstance(node, ir.Reduction):
        return Statement("reduction", node.outs, item.value, item.store, True, section, flags, node.op, rank=item.rank)
    if isinstance(node, ir.Scan):
        axis = item.inner[0] if item.inner else None
        return Statement(
            "scan", node.outs, item.value, item.store, bool(item.inner), section, flags, node.op, axis=axis, rank=item.rank
        )
    if isinstance(node, ir.Scatter):
        kind = "scatter" if item.is_update else "pointwise"
        return Statement(
            kind, (node.out,), item.value, item.store, bool(item.inner), section, (True,), node.mode, item.mask, node.target,
            rank=item.rank,
        )  # fmt: skip
    return Statement("pointwise", (node.out,), item.value, item.store, bool(item.inner), section, flags)


def _partial(item: Item, node: ir.Partial, section: int, flags: tuple[bool, ...], tiled: frozenset[str]) -> Statement:
    """Which tile it is is for the template to say. What others have made of the tile (`tiled`) is in its registers."""
    length = ix.product(v.extent for v in node.rvars)
    store = (ix.var(PART, ix.ceildiv(length, node.block)).expr(), *item.store[1:])

    def of_this_tile(load: Value) -> Value | None:
        return vs.load(load.attr[0], store, load.attr[2]) if load.attr[0] in tiled else None

    [value] = vs.replace_loads([item.value], of_this_tile)
    block = node.block if node.fixed else 0
    return Statement("partial", node.outs, value, store, False, section, flags, node.op, rank=item.rank, block=block)


def _name(items: list[Item]) -> str:
    """A readable kernel name from the operators it fuses."""
    words = dict.fromkeys(op.split(".")[1] for item in items for op in item.node.origin.operators if "." in op)
    text = "_".join(list(words)[:4]).strip("_") or "kernel"
    return "".join(c if c.isalnum() else "_" for c in text)[:48]
