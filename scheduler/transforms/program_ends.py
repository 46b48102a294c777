"""Where programs end: at a contraction; at a sum, which is a contraction with the number 1; or at a sum into entries of a
table, which is a contraction with a 1 for each element where its entry is.

    bias[h, m, n] = sum over b of f(scores[b, h, m, n], ...)          a contraction over b with 1
    slope[h] = sum over b, m, n of f(scores[b, h, m, n], ...)         row[b, h, m] = sum over n, then slope[h] = sum over b, m
    total = sum over m, n of g[m, n] * (sum over b of f(...))         sum over m, n, b of g[m, n] * f(...)
    table[bucket[m, n], h] += f(scores[b, h, m, n], ...)              part[h, b, i, c] = sum over n and the i-th m of
                                                                      f(...) * (bucket[m, n] == c)

A kernel of a program adds up along loops of rows and columns. What a sum goes over besides is added up by a node of its own, of
one number for each row, or of one table for some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Indirect, Var
from kgen.ir.program import Contract, Elementwise, Program
from kgen.ir.values import Value
from kgen.scheduler.transforms.graph_reader import Reader

ROW, ENTRY, PART = "row", "entry", "part"
# Types of sums of which the loops may be split: the parts are in float32.
SPLIT = (torch.float32, torch.float16, torch.bfloat16)
# Sums between a sum and what they add up that are looked through.
MOST_SUMS = 2
# Entries of a table that each part has a sum for, and rows of a part.
MOST_ENTRIES, ROWS_OF_PART = 256, (256, 128, 64, 32)
# Elements of a sum over many batches that are few: their tiles leave most of a GPU idle, so batches come in parts, of which all
# sums together are no more than so many; and adding them to a table takes no time.
FEW_SUMS, SUMS_OF_PARTS, MANY_BATCHES = 1 << 19, 1 << 21, 16


@dataclass(frozen=True, slots=True)
class SplitSum:
    """The nodes that add up the sums that a program has made, and buffers for these."""

    rest: tuple[ir.Node, ...]
    buffers: tuple[ir.Buffer, ...]


@dataclass(frozen=True, slots=True)
class End:
    """What the last step of a program may be: a contraction, which `node` means. A program takes the place of whoever makes
    `out`. Where `split`, the node makes a part of that."""

    contraction: ir.Contraction
    node: ir.Contraction | ir.Reduction
    out: str
    split: SplitSum | None = None


def by_preference(programs: Iterable[Program]) -> list[Program]:
    """Programs that make less of the same elements first."""
    return sorted(programs, key=lambda one: ("contraction", "table", "sum").index(_kind(one)))


def ends_of(graph: ir.Graph, reader: Reader, node: ir.Node, program: Program) -> Iterator[End]:
    """What a node may be to a program. Sums of a function of one contraction are reduced on its tiles, and none."""
    kind = _kind(program)
    if ir.is_contraction(node):
        yield from [End(node, node, node.out)] if kind == "contraction" else ()
    elif not _is_of_several(program):
        return
    elif isinstance(node, ir.Reduction) and kind != "table":
        yield from _sums(graph, reader, node, whole=kind == "sum")
    elif kind == "table":
        yield from _tables(graph, reader, node) if isinstance(node, ir.Scatter) else _parts_of_table(node)


def may_end(graph: ir.Graph, programs: Iterable[Program]) -> Callable[[ir.Node], bool]:
    """Of which nodes `ends_of` may make ends of one of the programs, as far as can be told without a look at what they read."""
    several = {_kind(program) for program in programs if _is_of_several(program)}
    kinds: list[type[ir.Node]] = []
    if any(_kind(program) == "contraction" for program in programs):
        kinds.append(ir.Contraction)
    if several - {"contraction"}:
        kinds.append(ir.Reduction)

    def may(node: ir.Node) -> bool:
        is_table = isinstance(node, ir.Scatter) and "table" in several and _is_table(graph, node)
        return is_table or isinstance(node, tuple(kinds))

    return may


def _kind(program: Program) -> str:
    """What the last step is: a ``contraction`` with an operand that has an axis of its own; a ``sum``, with one that has none;
    or a ``table``, with one that has all axes of the other factor, and one of its own."""
    last = program.steps[-1]
    assert isinstance(last, Contract)
    left, right = (set(program.axes_of(ref)) for ref in last.reads)
    if right <= left:
        return "sum"
    return "table" if left < right and isinstance(last.left, str) else "contraction"


def _is_of_several(program: Program) -> bool:
    last = program.steps[-1]
    before = program.step(last.left) if isinstance(last, Contract) and isinstance(last.left, str) else None
    return isinstance(before, Elementwise) and len(before.of) > 1


def _reads_contractions(reader: Reader, value: Value) -> bool:
    """Whether a value depends on several contractions element by element."""
    makers = {load.attr[0]: reader.makers.get(load.attr[0]) for load in reader.loads(reader.inlined(value))}
    return sum(node is not None and ir.is_contraction(node) for node in makers.values()) > 1


# ---- sums -------------------------------------------------------------------------------------------------------------


def _sums(graph: ir.Graph, reader: Reader, node: ir.Reduction, whole: bool) -> Iterator[End]:
    """A sum as a contraction with 1: of all loops, or, unless it has to be `whole`, of one of them, from the longest on."""
    if node.op != "sum" or not node.value.dtype.is_floating_point:
        return
    node = _of_elements(reader, node)
    if not _reads_contractions(reader, node.value):
        return
    one = vs.const(1, node.value.dtype)
    if whole:
        yield from _sum_in_parts(graph, node)
    yield End(_contraction(node, node.value, one), node, node.outs[0])
    if len(node.rvars) > 1 and graph.buffers[node.outs[0]].dtype in SPLIT and not whole:
        for loop in sorted(node.rvars, key=lambda v: v.extent.as_int() or 0, reverse=True):
            yield _split(graph, node, loop)


def _contraction(node: ir.Reduction, left: Value, right: Value) -> ir.Contraction:
    return ir.Contraction(node.outs[0], node.vars, node.rvars, left, right, None, node.origin, left.dtype)


def _split(graph: ir.Graph, node: ir.Reduction, loop: Var) -> End:
    """The sum along one loop, with a node that adds up the others."""
    [out] = node.outs
    others = tuple(v for v in node.rvars if v is not loop)
    loops = (*node.vars, *others)
    buffer = _buffer(graph, ir.Derived(out, f"{ROW}_{loop.name}"), loops)
    first = ir.Reduction((buffer.name,), loops, (loop,), "sum", node.value, node.origin)
    rest = ir.Reduction((out,), node.vars, others, "sum", vs.cast(_load(buffer, loops), node.value.dtype), node.origin)
    return End(_contraction(first, node.value, vs.const(1, node.value.dtype)), first, out, SplitSum((rest,), (buffer,)))


def _sum_in_parts(graph: ir.Graph, node: ir.Reduction) -> Iterator[End]:
    """A sum of few elements over many as sums of parts, with a node that adds up these."""
    [out] = node.outs
    few = ix.product(v.extent for v in node.vars).as_int()
    if few is None or not 0 < few <= FEW_SUMS or graph.buffers[out].dtype not in SPLIT:
        return
    loop = max(node.rvars, key=lambda v: v.extent.as_int() or 0)
    count = loop.extent.as_int()
    if count is None or count < MANY_BATCHES:
        return
    parts = next((k for k in _powers(SUMS_OF_PARTS // few) if count % k == 0 and k < count), None)
    if parts is None:
        return
    part, own = ix.var(f"{loop.name}_part", ix.constant(parts)), ix.var(f"{loop.name}_own", ix.constant(count // parts))
    mapping: dict[Atom, Expr] = {loop: part.expr() * (count // parts) + own.expr()}
    value = vs.substitute(node.value, mapping)
    loops = (part, *node.vars)
    rvars = tuple(own if v is loop else v for v in node.rvars)
    buffer = _buffer(graph, ir.Derived(out, f"{PART}_{loop.name}"), loops)
    first = ir.Reduction((buffer.name,), loops, rvars, "sum", value, node.origin)
    rest = ir.Reduction((out,), node.vars, (part,), "sum", vs.cast(_load(buffer, loops), value.dtype), node.origin)
    yield End(_contraction(first, value, vs.const(1, value.dtype)), first, out, SplitSum((rest,), (buffer,)))


def _powers(most: int) -> Iterator[int]:
    """Powers of two from the largest that is no more than `most` down to 2."""
    power = 1 << max(0, most.bit_length() - 1)
    while power > 1:
        yield power
        power //= 2


def _buffer(graph: ir.Graph, what: ir.Derived, loops: Sequence[Var]) -> ir.Buffer:
    sizes = tuple(v.extent for v in loops)
    device = graph.buffers[what.source].device
    return ir.Buffer(ir.derived(graph, what), torch.float32, device, sizes, ix.contiguous_strides(sizes))


def _load(buffer: ir.Buffer, loops: Sequence[Var]) -> Value:
    return vs.load(buffer.name, tuple(v.expr() for v in loops), buffer.dtype)


# ---- sums of sums -----------------------------------------------------------------------------------------------------


def _of_elements(reader: Reader, node: ir.Reduction) -> ir.Reduction:
    """The sum without sums between it and the elements that these add up."""
    for _ in range(MOST_SUMS):
        value = reader.inlined(node.value)
        sums = [load for load in reader.loads(value) if _is_sum(reader.makers.get(load.attr[0])) and not load.args]
        made = (_through(reader, node, value, load) for load in sums)
        node = next((one for one in made if one is not None), node)
    return node


def _is_sum(node: ir.Node | None) -> bool:
    return isinstance(node, ir.Reduction) and node.op == "sum"


def _through(reader: Reader, node: ir.Reduction, value: Value, load: Value) -> ir.Reduction | None:
    """The sum with the elements of an inner one in the place of its result; None where it is no multiple of that."""
    inner = reader.makers[load.attr[0]]
    assert isinstance(inner, ir.Reduction)
    if _multiple(value, load, load) is None:  # as most sums along a network's residual connections; the rest takes long
        return None
    own = {v: ix.var(f"{inner.outs[0]}_{v.name}", v.extent) for v in inner.rvars}
    mapping: dict[Atom, Expr] = dict(zip(inner.vars, load.attr[1], strict=True))
    mapping |= {v: w.expr() for v, w in own.items()}
    made = _multiple(value, load, vs.cast(vs.substitute(inner.value, mapping), load.dtype))
    return None if made is None else replace(node, rvars=(*node.rvars, *own.values()), value=made)


def _multiple(value: Value, load: Value, element: Value) -> Value | None:
    """A multiple of what is loaded as the same multiple of an element, rounded nowhere; None where it is none."""
    if value is load:
        return element
    if value.op in ("round_to", "cast", "neg") and value.dtype.is_floating_point:
        made = _multiple(value.args[0], load, element)
        return made if made is None or value.op == "round_to" else vs.rebuild(value, (made,), value.attr)
    if value.op == "mul":
        for one, other in (value.args, value.args[::-1]):
            made = _multiple(one, load, element)
            if made is not None and load not in vs.loads([other]):
                return vs.call("mul", made, other)
    if value.op == "where" and value.args[2].op == "const" and value.args[2].attr == 0:
        condition, one, zero = value.args
        made = _multiple(one, load, element) if load not in vs.loads([condition]) else None
        return None if made is None else vs.where(condition, made, zero)
    return None


# ---- tables -----------------------------------------------------------------------------------------------------------


def _tables(graph: ir.Graph, reader: Reader, node: ir.Scatter) -> Iterator[End]:
    """What is added to entries of a table, as sums over elements with a 1 where their entry is."""
    place = _place_of_entry(graph, node)
    if place is None or not _is_table(graph, node):
        return
    [kept, entry] = [tuple(v for k, e in enumerate(node.index) for v in ix.free_atoms(e) if k != place), node.index[place]]
    others = tuple(v for v in node.vars if v in kept)
    loops = tuple(v for v in node.vars if v not in kept)
    elements = _of_elements(reader, ir.Reduction((node.out,), others, loops, "sum", node.value, node.origin))
    if not _reads_contractions(reader, elements.value):
        return
    [indirect] = ix.free_atoms(entry)
    assert isinstance(indirect, Indirect)
    position = vs.asserted(indirect.value, vs.index_inside(indirect.value, indirect.size), "index")
    if node.mask is not None:
        position = vs.where(node.mask, position, vs.const(-1, position.dtype))
    if len(elements.rvars) > len(loops) and _is_few(elements, position):
        return  # its elements go to the table
    elements, position = _unflattened(reader, elements, position)
    for rows, columns in permutations(sorted(elements.rvars, key=lambda v: -(v.extent.as_int() or 0)), 2):
        table = _Table(graph, node, place, _is_of_zeros(graph, reader, node))
        yield table.end(elements, position, (rows, columns))


def _is_few(elements: ir.Reduction, position: Value) -> bool:
    """Whether a sum over the loops that say nothing of an entry, which are many, has few elements."""
    own = {a for one in vs.topological([position]) for e in vs.index_exprs(one) for a in ix.free_atoms(e)}
    few = ix.product(v.extent for v in (*elements.vars, *elements.rvars) if v in own or v in elements.vars).as_int()
    many = ix.product(v.extent for v in elements.rvars if v not in own).as_int()
    return few is not None and many is not None and few <= FEW_SUMS and many >= MANY_BATCHES


def _is_table(graph: ir.Graph, node: ir.Scatter) -> bool:
    """Whether a node adds numbers to entries of a table."""
    kind = graph.buffers[node.out].dtype
    return node.value.dtype.is_floating_point and kind in SPLIT and _place_of_entry(graph, node) is not None


def _parts_of_table(node: ir.Node) -> Iterator[End]:
    """A sum that is a part of such a table, where it is made without a program."""
    if isinstance(node, ir.Reduction) and node.op == "sum" and node.value.op == "mul" and one_hot(node.value.args[1]):
        yield End(_contraction(node, *node.value.args), node, node.outs[0])


def _place_of_entry(graph: ir.Graph, node: ir.Scatter) -> int | None:
    """The dimension of a table along which its entries are; None where there is no such one, or not one alone."""
    whole = [k for k, e in enumerate(node.index) if any(isinstance(a, Indirect) and e is a.expr() for a in ix.free_atoms(e))]
    loops = [v for k, e in enumerate(node.index) if k not in whole for v in ix.free_atoms(e)]
    plain = [e for k, e in enumerate(node.index) if k not in whole]
    if node.mode != "add" or len(whole) != 1 or len(set(loops)) < len(loops):
        return None
    if not all(isinstance(v, Var) for v in loops) or any(e is not v.expr() for e, v in zip(plain, loops, strict=False)):
        return None
    count = graph.buffers[node.out].sizes[whole[0]].as_int()
    return whole[0] if len(plain) == len(loops) and count is not None and count <= MOST_ENTRIES else None


def _unflattened(reader: Reader, node: ir.Reduction, position: Value) -> tuple[ir.Reduction, Value]:
    """The sum over the dimensions of what it reads, where one loop goes through several of them."""
    for loop in node.rvars:
        own = next(filter(None, (_dimensions(reader, load, loop) for load in reader.loads(reader.inlined(node.value)))), None)
        if own is not None:
            mapping: dict[Atom, Expr] = {loop: ix.position_in(own)}
            value, position = vs.substitute(reader.inlined(node.value), mapping), vs.substitute(position, mapping)
            node = replace(node, rvars=tuple(w for v in node.rvars for w in (own if v is loop else (v,))), value=value)
    return node, position


def _dimensions(reader: Reader, load: Value, loop: Var) -> tuple[Var, ...] | None:
    """Loops over the dimensions of a contraction's result through which one loop goes."""
    maker = reader.makers.get(load.attr[0])
    if maker is None or not ir.is_contraction(maker):
        return None
    found = [v for v, e in zip(maker.out_vars, load.attr[1], strict=True) if loop in ix.free_atoms(e)]
    if len(found) < 2 or ix.product(v.extent for v in found) is not loop.extent:
        return None
    return tuple(ix.var(f"{loop.name}_{k}", v.extent) for k, v in enumerate(found))


def _in_parts(node: ir.Reduction, position: Value, rows: Var) -> tuple[ir.Reduction, Value, Var]:
    """The sum with its rows cut into parts, and the loop over the rows of a part."""
    count = rows.extent.as_int() or 0
    most = next((most for most in ROWS_OF_PART if count % most == 0 and count > most), None)
    if most is None:
        return node, position, rows
    part, row = ix.var(f"{rows.name}_part", ix.constant(count // most)), ix.var(f"{rows.name}_row", ix.constant(most))
    mapping: dict[Atom, Expr] = {rows: part.expr() * most + row.expr()}
    rvars = tuple(w for v in node.rvars for w in ((part, row) if v is rows else (v,)))
    made = replace(node, rvars=rvars, value=vs.substitute(node.value, mapping))
    return made, vs.substitute(position, mapping), row


@dataclass(frozen=True, slots=True)
class _Table:
    """A table, whose entries are along the dimension `place`, and what is added to it; `new`: to zeros that nobody has."""

    graph: ir.Graph
    node: ir.Scatter
    place: int
    new: bool

    def end(self, elements: ir.Reduction, position: Value, inner: tuple[Var, Var]) -> End:
        """Sums for each entry over some rows and all columns, with nodes that add them up and to the table."""
        what = ir.Derived(self.node.out, f"{ENTRY}_{inner[0].name}_{inner[1].name}")
        elements, position, row = _in_parts(elements, position, inner[0])
        inner = (row, inner[1])
        entry = ix.var("entry", self.graph.buffers[self.node.out].sizes[self.place])
        others = tuple(v for v in elements.rvars if v not in inner)
        loops = (*elements.vars, *others, entry)
        buffer = _buffer(self.graph, what, loops)
        selected = vs.call("eq", position, vs.index_value(entry.expr(), position.dtype))
        one, zero = (vs.const(number, elements.value.dtype) for number in (1, 0))
        right = vs.where(selected, one, zero)
        first = ir.Reduction((buffer.name,), loops, inner, "sum", vs.call("mul", elements.value, right), self.node.origin)
        split = self._added(buffer, others, loops)
        return End(_contraction(first, elements.value, right), first, self.node.out, split)

    def _added(self, buffer: ir.Buffer, others: Sequence[Var], loops: Sequence[Var]) -> SplitSum:
        """The nodes that add up the sums of an entry, and add them to the table."""
        kept = tuple(v for v in loops if v not in others)
        index = list(self.node.index)
        index[self.place] = kept[-1].expr()
        if self.new:
            return self._made(buffer, others, loops, tuple(v for e in index for v in kept if e is v.expr()))
        total = _buffer(self.graph, ir.Derived(self.node.out, f"{ENTRY}_total"), kept)
        added = _added(total.name, kept, others, _load(buffer, loops), self.node.origin)
        out, target, origin = self.node.out, self.node.target, self.node.origin
        scatter = ir.Scatter(out, target, kept, tuple(index), _load(total, kept), "add", None, origin)
        return SplitSum((added, scatter), (buffer, total))

    def _made(self, buffer: ir.Buffer, others: Sequence[Var], loops: Sequence[Var], order: tuple[Var, ...]) -> SplitSum:
        """The table, made of these sums and of nothing else."""
        table = replace(self.graph.buffers[self.node.out], alias_of=None)
        return SplitSum((_added(table.name, order, others, _load(buffer, loops), self.node.origin),), (buffer, table))


def _added(out: str, loops: tuple[Var, ...], summed: Sequence[Var], value: Value, origin: ir.Origin) -> ir.Node:
    """A sum, or the value itself where there is nothing to add up."""
    if not summed:
        return ir.Pointwise(out, loops, value, origin)
    return ir.Reduction((out,), loops, tuple(summed), "sum", value, origin)


def _is_of_zeros(graph: ir.Graph, reader: Reader, node: ir.Scatter) -> bool:
    """Whether a table is zeros before, whose storage nobody else knows."""
    maker, out = reader.makers.get(node.target), graph.buffers[node.out]
    zeros = isinstance(maker, ir.Pointwise) and maker.value.op == "const" and maker.value.attr == 0
    alone = reader.readers.get(node.target, []) == [node] and out.alias_of == node.target and out.offset == 0
    shared = [b.name for b in graph.buffers.values() if b.alias_of in (node.target, node.out)]
    results = {one.buffer for one in graph.outputs if isinstance(one, ir.TensorArg)}
    return zeros and alone and shared == [node.out] and node.target not in results


def one_hot(value: Value) -> bool:
    """Whether a value is 1 or 0."""
    return value.op == "where" and all(one.op == "const" and one.attr in (0, 1) for one in value.args[1:])


__all__ = ["End", "SplitSum", "by_preference", "ends_of", "one_hot"]
