"""Steps of a plan: fused groups become kernels and calls of libraries, and templates are told what was decided of them.

In a kernel, each item runs in an inner loop, a *section*, or outside of them; what one section makes and a later one reads is
computed again, kept in a row, or stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from kgen.device import Device, Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Sizes, Var
from kgen.ir.plan import PART, Call, Choice, ComboKernel, Kernel, Launch, Nest, Packing, Statement, Step, Tiling, members
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import topological
from kgen.scheduler.analysis.items import Group, Item
from kgen.scheduler.analysis.memo import memoised, memoised_for
from kgen.scheduler.analysis.memory import LiveBytes, is_less
from kgen.scheduler.fusion.cost import LIMITS, Limits
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.options import Options
from kgen.scheduler.selection.choose import chosen_problem, contraction_of
from kgen.scheduler.tiling.loops import choose_loops
from kgen.scheduler.tiling.tiles import choose_combo_tiles, choose_tiles
from kgen.templates.loop_contract import LoopProblem, loop_problem
from kgen.templates.problem import Problem
from kgen.verdict import Outcome, Reason, Verdict

# What weights of a softmax are made by.
EXPONENTIALS = frozenset(("exp", "exp2"))

# Names of results that a value is made of, and of those that it is made of exponentials of.
_MadeOf = tuple[frozenset[str], frozenset[str]]
_NONE: frozenset[str] = frozenset()

__all__ = ["StepChoices", "distinct_names", "local_buffers", "make_kernel", "steps_of", "storage_shared"]


def steps_of(fuser: Fuser, groups: list[Group], kept: frozenset[str], options: Options) -> list[Step]:
    """The steps of the fused groups in order, without those whose results nobody needs. `kept` are buffers that are memory
    whoever reads them. Groups that can run early do so where less is in memory then."""
    order = _in_order(groups, fuser)
    made = {group.serial: _step(group, fuser, kept, options) for group in order}
    steps, early = (
        [step for group in one if not _is_dead(step := made[group.serial])]
        for one in (order, _in_order(groups, fuser, early=True))
    )
    return early if is_less(LiveBytes(fuser.graph, early), LiveBytes(fuser.graph, steps)) else steps


def _in_order(groups: list[Group], fuser: Fuser, early: bool = False) -> list[Group]:
    """A topological order of the fused groups, close to program order: that of their last nodes, or, `early`, of their first
    ones. A group whose last node is far behind the first one may hold on to what it reads until then."""
    if len(groups) < 2:
        return groups
    by_number = sorted(groups, key=lambda g: g.first if early else g.last)
    numbers = {g.serial: k for k, g in enumerate(by_number)}
    after = [{numbers[t.serial] for t in fuser.after.get(g.serial, ()) if t.serial in numbers} for g in by_number]
    return [by_number[k] for k in topological(after, fuser.graph.name)]


def _step(group: Group, fuser: Fuser, kept: frozenset[str], options: Options) -> Step:
    if group.call is not None:
        node = group.call
        call = ir.call_of(node)
        assert call is not None
        reason = Reason.LIBRARY if call is not node or len(call.origin.operators) > 1 else Reason.NO_LOWERING
        fuser.verdicts.append(Verdict(group.name, str(call.target), Outcome.EXTERN, reason, detail=call.reason))
        return Call(call)
    needed = frozenset(
        name for name in group.writes
        if name in kept or any(r is not group for r in fuser.readers.get(name, {}).values())
    )  # fmt: skip
    target = options.target(group.device)

    def made() -> tuple[Kernel, tuple[Verdict, ...]]:
        verdicts: list[Verdict] = []
        return make_kernel(group, fuser.sizes, needed, verdicts, target), tuple(verdicts)

    kernel, verdicts = memoised(("kernel", group.members, needed, target), made)
    fuser.verdicts += verdicts
    return kernel


def _is_dead(step: Step) -> bool:
    """Whether nobody reads what a kernel makes: a rule may store more than the graph then needs."""
    return isinstance(step, Kernel) and not any(any(s.stored) for s in step.statements)


def storage_shared(graph: ir.Graph) -> frozenset[str]:
    """Buffers whose storage has another name as well: memory whether or not anybody reads them by this one."""
    aliases = {b.name: b.alias_of for b in graph.buffers.values() if b.alias_of is not None}
    return frozenset((*aliases, *aliases.values()))


def distinct_names(steps: list[Step]) -> list[Step]:
    """Kernels with the same operators get a number, with which none has the name of another one. A kernel that has its number
    at each attempt is one object: what is known about it holds."""
    taken: set[str] = set()
    numbers: dict[str, int] = {}  # by name, from which number on some may be free
    out: list[Step] = []
    for step in steps:
        if isinstance(step, Kernel):
            name, number = step.name, numbers.get(step.name, 2)
            while name in taken:
                name, number = f"{step.name}_{number}", number + 1
            numbers[step.name] = number
            taken.add(name)
            step = step if name == step.name else _named(step, name)
        out.append(step)
    return out


def _named(kernel: Kernel, name: str) -> Kernel:
    return memoised_for(kernel, ("named", name), lambda: replace(kernel, name=name))


def local_buffers(steps: list[Step]) -> frozenset[str]:
    """Buffers that never become memory."""
    found: set[str] = set()
    for step in steps:
        if not isinstance(step, Call):
            for s in step.statements:
                found.update(o for o, stored in zip(s.outs, s.stored, strict=True) if not stored)
    return frozenset(found)


# ---- kernels ----------------------------------------------------------------------------------------------------------


def make_kernel(group: Group, sizes: Sizes, needed: frozenset[str], verdicts: list[Verdict], target: str = "cpp") -> Kernel:
    """`needed` are buffers that something outside the group reads; the rest stay in registers or rows."""
    items = _reading_what_is_stored(group.items, needed)
    after = _place(items)
    items, after, rows, stored = _crossings(group, items, after, _Keeping(group.inner, sizes, LIMITS[target]), needed, verdicts)
    tiled = frozenset(o for item in items if item.is_partial for o in item.outs)
    statements = [_statement(item, after[k], stored, tiled) for k, item in enumerate(items)]
    sections = 1 + max((s.section for s in statements if s.inner), default=-1)
    origins = tuple(item.node.origin for item in items)
    return Kernel(_name(items), group.outer, group.inner, sections, tuple(statements), tuple(rows), origins, target)


def _reading_what_is_stored(items: list[Item], needed: frozenset[str]) -> list[Item]:
    """Where the kernel stores 16-bit numbers and sums up their exponentials, all of it reads them as they are stored. Who reads
    both later, as the gradient of a softmax does, divides exponentials by their own sum: with one of unrounded numbers, weights
    close to 1 would be off by as much as the logits, and rows would not add up to 1. What rows were reduced to, such as their
    maxima, is read as it is."""
    values = list(vs.topological([root for item in items for root in _roots(item)]))
    if not any(value.op in EXPONENTIALS for value in values):
        return items
    narrow = {v.attr[0]: v.attr[2] for v in values if v.op == "load" and v.attr[2] in ops.NARROW_FLOATS}
    rows = {out for item in items if isinstance(item.node, ir.Reduction | ir.Partial) for out in item.outs}
    summed = _summed_exponentials(items, needed.intersection(narrow) - rows)
    if not summed:
        return items

    def as_stored(load: Value) -> Value | None:
        return vs.as_stored(load, narrow[load.attr[0]]) if load.attr[0] in summed else None

    replaced = [vs.replace_loads(_roots(item), as_stored) for item in items]
    return [
        dataclasses.replace(item, value=value, mask=mask[0] if mask else None)
        for item, (value, *mask) in zip(items, replaced, strict=True)
    ]


def _summed_exponentials(items: list[Item], known: frozenset[str]) -> frozenset[str]:
    """Those of the `known` results that the items sum up exponentials of, be it by way of other results."""
    made: dict[str, _MadeOf] = {}
    found: frozenset[str] = frozenset()
    for item in items:
        of: dict[Value, _MadeOf] = {}
        for value in vs.topological(_roots(item)):
            below = [of[arg] for arg in value.args]
            if value.op == "load" and value.attr[0] in made:
                below.append(made[value.attr[0]])
            plain, raised = (frozenset[str]().union(*parts) for parts in zip(*below, strict=True)) if below else (_NONE, _NONE)
            of[value] = (plain, raised | plain if value.op in EXPONENTIALS else raised)
        plain, raised = of[item.value]
        found |= raised if item.reduces or item.is_partial else _NONE
        made |= {out: (plain | {out} if out in known else plain, raised) for out in item.outs}
    return found


def _roots(item: Item) -> list[Value]:
    return [item.value, *([] if item.mask is None else [item.mask])]


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
            if how == "row" and not stored.isdisjoint(producer.outs):
                how = "memory"  # a scan stores its values and their positions at one index: rows have another than memory
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

    new = vs.replace_loads(_roots(item), replace)
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
    if ir.is_template_node(node):
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
    """Which tile it is is for the template to say. What others have made of the same tile (`tiled`), row by row as this one
    does, is in its registers. A sum down the columns that reads what rows have been reduced to finds it at the rows."""
    length = ix.product(v.extent for v in node.rvars)
    store = (ix.var(PART, ix.ceildiv(length, node.block)).expr(), *item.store[1:])

    def of_this_tile(load: Value) -> Value | None:
        name, index, dtype = load.attr
        return vs.load(name, store, dtype) if name in tiled and index[1:] == store[1:] else None

    [value] = vs.replace_loads([item.value], of_this_tile)
    block = node.block if node.fixed else 0
    return Statement("partial", node.outs, value, store, False, section, flags, node.op, rank=item.rank, block=block)


def _name(items: list[Item]) -> str:
    """A readable kernel name from the operators it fuses."""
    words = dict.fromkeys(op.split(".")[1] for item in items for op in item.node.origin.operators if "." in op)
    text = "_".join(list(words)[:4]).strip("_") or "kernel"
    return "".join(c if c.isalnum() else "_" for c in text)[:48]


# ---- what templates ask -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepChoices:
    """The choices for one graph. `device` tells the device of a buffer, `register_bytes` is the length of the CPU's vector
    registers; without `reorder` loops stay in the order of the program. `exact`: results are rounded as eager rounds them."""

    graph: ir.Graph
    device: Callable[[str], Device]
    register_bytes: int
    gpu: Gpu = Gpu()  # noqa: RUF009 -- frozen
    reorder: bool = True
    exact: bool = False

    def choice(self, step: Launch | Packing) -> Choice | None:
        """The template and its configuration, where they are more than a matter of course."""
        return None if isinstance(step, Packing) else members(step)[0].choice

    def problems(self, step: Launch | Packing) -> list[Problem]:
        """The contractions, as the chosen template sees them."""
        assert not isinstance(step, Packing)
        return [chosen_problem(kernel, self.graph, self.device(contraction_of(kernel))) for kernel in members(step)]

    def loops(self, step: Launch | Packing) -> LoopProblem | None:
        """The kernel of a step without a contraction: the loops of C++ kernels, the tiles of GPU kernels."""
        if isinstance(step, Packing):
            return loop_problem(step, self.graph)
        if members(step)[0].contracts:
            return None
        chosen = self._tilings(step) if step.target == "triton" else self._vector_loops(step)
        return loop_problem(step, self.graph, chosen, self.exact)

    def _vector_loops(self, step: Launch) -> tuple[Nest, ...]:
        sizes = Sizes(self.graph.size_hints)
        return tuple(choose_loops(one, self.graph, sizes, self.register_bytes, self.reorder) for one in members(step))

    def _tilings(self, step: Launch) -> tuple[Tiling, ...]:
        sizes = Sizes(self.graph.size_hints)
        if isinstance(step, ComboKernel):
            return tuple(choose_combo_tiles(step, self.graph, sizes, self.gpu, self.reorder))
        return (choose_tiles(step, self.graph, sizes, self.gpu, self.reorder),)
