"""Reads a graph backwards: who makes and who reads a buffer, and values in terms of contractions, reductions and memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import overwritten
from kgen.scheduler.transforms.softmax_form import Weights, weights_in

# Nodes that have no effect but their results.
COMPUTATIONS = (ir.Pointwise, ir.Reduction, ir.Contraction, ir.Operation)
# They make finite numbers of such.
MODERATE = frozenset(
    (
        "add",
        "sub",
        "mul",
        "neg",
        "tanh",
        "cast",
        "round_to",
        "index",
        "where",
        "and",
        "or",
        "not",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
    )
)
# Elementwise nodes, one reading the other, that are looked through.
MOST_NODES = 48
# Elements of one buffer that such a node reads, at most. Windows read more, and no step's result is a function of several
# elements of one contraction: three moving averages of 25 elements, one of the other, would be inlined to 15,625 loads.
MOST_ELEMENTS = 8


@dataclass(frozen=True, slots=True)
class Longer:
    """A softmax along one loop, of more columns than one reads: the `first` ones in order or, where `behind`, the last ones.
    The others come first in `order`, so that columns that are read are one run; `kept` says which these are."""

    weights: Weights
    along: Var
    order: Var
    first: Expr
    behind: bool

    @property
    def place(self) -> Expr:
        """The column that is read."""
        return self.order.expr() - self.first

    @property
    def kept(self) -> Value:
        return vs.compare("ge", self.order.expr(), self.first)

    @property
    def of(self) -> Value:
        """What the softmax is of, in that order."""
        if self.behind:
            return vs.substitute(self.weights.of, {self.along: self.order.expr()})
        last = self.order.expr() + (self.along.extent - self.first)
        others = vs.substitute(self.weights.of, {self.along: last})
        return vs.where(self.kept, self.read(self.weights.of, self.along), vs.guard_loads(others, vs.call("not", self.kept)))

    def read(self, value: Value, loop: Var) -> Value:
        """A function of the columns that are read, for which nothing else is read."""
        return vs.guard_loads(vs.substitute(value, {loop: self.place}), self.kept)


@dataclass(frozen=True, slots=True)
class Reader:
    """Who makes and who reads the buffers of a graph, which of them hold elementwise functions of contractions or reductions,
    and values in terms of these and of memory."""

    makers: Mapping[str, ir.Node]
    readers: Mapping[str, list[ir.Node]]
    visible: frozenset[str]
    derived: frozenset[str]
    owners: Mapping[str, str]  # of the storage
    positions: Mapping[str, int]  # of who makes a buffer, among the nodes
    writes: Sequence[tuple[int, str]]  # into storage that is there: by which node, into which
    known: dict[Value, Value | None] = field(default_factory=dict)
    whole: dict[Value, Value] = field(default_factory=dict)  # values by what they are inlined to
    found: dict[Value, list[Value]] = field(default_factory=dict)  # the loads of values
    finite: dict[str, bool] = field(default_factory=dict)  # whether elementwise nodes make finite numbers of such
    transparent: dict[str, bool] = field(default_factory=dict)  # whether elementwise nodes are looked through
    inputs: dict[int, tuple[ir.Node, tuple[str, ...]]] = field(default_factory=dict)  # nodes by identity, and what they read

    @classmethod
    def of(cls, graph: ir.Graph) -> Reader:
        makers: dict[str, ir.Node] = {}
        readers: dict[str, list[ir.Node]] = {}
        derived: set[str] = set()
        known: dict[str, str] = {}
        owners = {name: ir.storage_owner(graph.buffers, name, known) for name in graph.buffers}
        writes = [(k, owners[old]) for k, node in enumerate(graph.nodes) for old in overwritten(node)]
        inputs = {id(node): (node, ir.reads(node)) for node in graph.nodes}
        for node, read in inputs.values():
            for name in read:
                readers.setdefault(name, []).append(node)
            makers |= dict.fromkeys(ir.outs(node), node)
            inside = isinstance(node, ir.Pointwise) and not derived.isdisjoint(read)
            derived.update(ir.outs(node) if inside or ir.is_contraction(node) or isinstance(node, ir.Reduction) else ())
        positions = {out: k for k, node in enumerate(graph.nodes) for out in ir.outs(node)}
        visible = frozenset(ir.visible(graph))
        return cls(makers, readers, visible, frozenset(derived), owners, positions, writes, inputs=inputs)

    def reads(self, node: ir.Node) -> tuple[str, ...]:
        """`ir.reads`, of any node: searches ask again and again, and each time all values would be walked through."""
        known = self.inputs.get(id(node))
        if known is None:
            known = self.inputs[id(node)] = (node, ir.reads(node))  # the node is kept, or another one gets its identity
        return known[1]

    def loads(self, value: Value) -> list[Value]:
        """`vs.loads` of an inlined value: those of an unrolled loop are too large to keep their loads, and each program
        is looked for in them."""
        if value not in self.found:
            self.found[value] = vs.loads([value])
        return self.found[value]

    def is_current(self, names: Iterable[str], last: str) -> bool:
        """Whether nobody has written into the storage of buffers since they were made, when `last` is."""
        made = {name: self.positions.get(name, -1) for name in names}
        return not any(
            self.owners[name] == storage and made[name] < k < self.positions[last]
            for name in made
            for k, storage in self.writes
        )

    def only_for(self, instead: Mapping[str, ir.Node], more: Iterable[ir.Node] = ()) -> list[ir.Node]:
        """The computations that nobody needs when other nodes, and `more` behind these, stand in the place of those that make
        some buffers, in no order."""
        kept = self.visible.union(*map(self.reads, (*instead.values(), *more)))
        gone = [self.makers[out] for out in instead]
        known = set(map(id, gone))
        for one in gone:  # grows on the way
            for maker in (self.makers[name] for name in self.reads(one) if name in self.makers):
                if id(maker) in known or not isinstance(maker, COMPUTATIONS) or not kept.isdisjoint(ir.outs(maker)):
                    continue
                if all(id(r) in known for out in ir.outs(maker) for r in self.readers.get(out, ())):
                    known.add(id(maker))
                    gone.append(maker)
        return gone[len(instead) :]

    def other_reader(self, name: str, end: ir.Node, instead: ir.Node) -> ir.Node | None:
        """Who reads a buffer, or what is made of it, although it does not lead to `end`, or although another node reads its
        result `instead` of making it; None: it is a result of the graph, or under one."""
        leading = self.leading(end, self.reads(instead))
        todo = [self.makers[name]]
        for node in todo:  # grows on the way
            readers = [r for out in ir.outs(node) for r in self.readers.get(out, ())]
            outside = next((r for r in readers if id(r) not in leading), None)
            if outside is not None:
                return outside
            todo += [r for r in readers if r is not end and not any(r is one for one in todo)]
        return None

    def rounded_to(self, name: str) -> torch.dtype | None:
        """The type to which everybody rounds the elements of a buffer, or these times a number; None where that is not one
        type."""
        readers = self.readers.get(name, [])
        if name in self.visible or not all(map(ir.roots, readers)):  # library calls read buffers, and no values
            return None
        found: set[torch.dtype | None] = set()
        for root in (root for node in readers for root in ir.roots(node)):
            scaled: set[Value] = set()
            for value in vs.topological([root]):
                if _loads(value, name) or (value.op == "mul" and _is_scaled(value, scaled)):
                    scaled.add(value)
                elif not scaled.isdisjoint(value.args):
                    found.add(value.attr if value.op == "round_to" else None)
            found |= {None} if root in scaled else set()
        return found.pop() if len(found) == 1 else None

    def leading(self, end: ir.Node, read: Iterable[str] = ()) -> set[int]:
        """The nodes, by identity, that make what a node reads, without those whose results are `read`."""
        read = set(read)
        found, todo = {id(end)}, [end]
        for node in todo:  # grows on the way
            for maker in (self.makers[name] for name in self.reads(node) if name in self.makers):
                if id(maker) not in found and read.isdisjoint(ir.outs(maker)):
                    found.add(id(maker))
                    todo.append(maker)
        return found

    def inlined(self, value: Value, depth: int = 0) -> Value:
        """The value with the elementwise nodes on its way back to contractions and reductions inlined, such that read no
        memory, and masks of rows' and columns' numbers, as of documents. What else is read stays in memory: for each element
        that a step makes it would be computed again."""
        if depth:
            return vs.replace_loads([value], lambda load: self._through(load, depth))[0]
        if value not in self.whole:
            self.whole[value] = vs.replace_loads([value], lambda load: self._through(load, 0))[0]
        return self.whole[value]

    def _through(self, load: Value, depth: int) -> Value | None:
        if load not in self.known:
            self.known[load] = self._inlined(load, depth) if depth < MOST_NODES else None
        return self.known[load]

    def _inlined(self, load: Value, depth: int) -> Value | None:
        name, index, dtype = load.attr
        node = self.makers.get(name)
        if not isinstance(node, ir.Pointwise) or not self._is_transparent(node):
            return None
        mapping: dict[Atom, Expr] = dict(zip(node.vars, index, strict=True))
        value = self.inlined(vs.cast(vs.substitute(node.value, mapping), ops.compute_dtype(dtype)), depth + 1)
        return vs.masked(load.args[0], value, vs.const(0, value.dtype)) if load.args else value

    def _is_transparent(self, node: ir.Pointwise) -> bool:
        """Whether a node is looked through: of loads at many places it is asked again and again."""
        if node.out not in self.transparent:
            loads = vs.loads([node.value])
            of_each = Counter(load.attr[0] for load in loads if load.attr[0] in self.derived)
            few = max(of_each.values(), default=0) <= MOST_ELEMENTS
            self.transparent[node.out] = few and (node.out in self.derived or not loads or _is_joined(node))
        return self.transparent[node.out]

    def reduced(self, load: Value, op: str, along: Sequence[Var]) -> Value | None:
        """What the reduction `op` along these loops reduces to make the element that is loaded; None: it is no such load."""
        name, index, _ = load.attr
        node = self.makers.get(name)
        if not isinstance(node, ir.Reduction) or node.op != op or load.args:
            return None
        if [v.extent for v in node.rvars] != [v.extent for v in along]:
            return None
        mapping: dict[Atom, Expr] = dict(zip(node.vars, index, strict=True))
        mapping |= {v: w.expr() for v, w in zip(node.rvars, along, strict=True)}
        return self.inlined(vs.substitute(node.value, mapping))

    def weights(self, value: Value, along: Sequence[Var]) -> Weights | None:
        """The softmax that a value is, along loops."""
        return self._known(weights_in(value, self._reduced_along(along)))

    def _known(self, found: Weights | None) -> Weights | None:
        """A softmax, unless it is safe only if something is finite of which nobody can tell."""
        return found if found is None or found.kept is None or self._is_finite(found.kept) else None

    def _is_finite(self, root: Value) -> bool:
        """Whether a value is made of contractions and numbers, as are scores in front of masks, biases and the like. Its own
        size is no question: what leaves the range of a type has left it for other readers, too."""
        return all(map(self._is_finite_of_finite, vs.topological([root], through_indices=False)))

    def _is_finite_of_finite(self, value: Value) -> bool:
        """Whether one operation makes finite numbers of such."""
        if value.op == "load":
            maker = None if value.dtype is torch.bool else self.makers.get(value.attr[0])
            if isinstance(maker, ir.Pointwise):
                if maker.out not in self.finite:
                    self.finite[maker.out] = self._is_finite(maker.value)
                return self.finite[maker.out]
            return not value.dtype.is_floating_point or (maker is not None and ir.is_contraction(maker))
        if value.op == "const":
            return math.isfinite(value.attr)
        if value.op == "truediv":
            return value.args[1].op == "const" and value.args[1].attr != 0
        return value.op in MODERATE

    def longer(self, value: Value, along: Sequence[Var]) -> Longer | None:
        """The softmax of more columns that a value is, along one loop, as one with a sink has: a column without a value."""
        [loop, *others] = along
        makers = (self.makers.get(load.attr[0]) for load in self.loads(value))
        sums = (node for node in makers if isinstance(node, ir.Reduction) and node.op == "sum" and len(node.rvars) == 1)
        for extent in dict.fromkeys(node.rvars[0].extent for node in sums) if not others else ():
            more = (extent - loop.extent).as_int()
            if not more or more < 0:
                continue
            whole, order = ix.var(f"{loop.name}_all", extent), ix.var(f"{loop.name}_in_order", extent)
            for begin in (0, more):
                mapping: dict[Atom, Expr] = {whole: loop.expr() + begin}
                found = self._known(weights_in(value, self._reduced_along([whole]), partial(vs.substitute, mapping=mapping)))
                if found is not None:
                    return Longer(found, whole, order, ix.constant(more), begin > 0)
        return None

    def _reduced_along(self, along: Sequence[Var]) -> Callable[[Value, str], Value | None]:
        return lambda load, op: self.reduced(load, op, along) if load.op == "load" else None


def _is_joined(node: ir.Pointwise) -> bool:
    """Whether a node makes truth values of numbers that are fewer than these: of each, one loop at least knows nothing."""
    loops = {v for v in node.vars if v.extent is not ix.ONE}
    loads = vs.loads([node.value])
    return node.value.dtype is torch.bool and all(not loops <= load.variables() for load in loads)


def _is_scaled(product: Value, scaled: set[Value]) -> bool:
    """Whether one factor is among these, and the other one a number."""
    return any(one in scaled and other.op == "const" for one, other in (product.args, product.args[::-1]))


def _loads(value: Value, name: str) -> bool:
    return value.op == "load" and bool(value.attr[0] == name)
