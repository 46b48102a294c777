"""Stencils: values that are read beside the points where they are made, such as fluxes and differences.

    before   f[i] = a[i] * b[i];   y[i] = f[i + 1] - f[i - 1] + a[i]
    after    y[i] = a[i + 1] * b[i + 1] - a[i - 1] * b[i - 1] + a[i]

A kernel makes each element at one point. So such a value is stored, and another kernel reads it. Its readers often read what it
is made of in any case. A cache has the elements beside a point. So the readers recompute the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.short_axes import UNIQUE, Reader, count_of, is_hidden, kept_whole, written_again

# Fewer elements are in a core's cache. On a GPU, a value that is stored has a launch as well.
LARGE = 1 << 20
# Bytes that a GPU moves in the time of a launch that waits for another one, at least. Fewer points take as long as so many.
LAUNCH, FEWEST_BUSY = 1 << 22, 1 << 16
# A reader with many more points than the value has elements would compute each of them several times.
MOST_POINTS = 1.25
# Loads and operations of a reader, at most: registers hold what it reads, and its text stays short.
MAX_LOADS, MAX_COST = 32, 400
# In the time of a byte from memory a GPU does so many operations; a load from a cache takes as long as some of them.
OPERATIONS, DOUBLE_OPERATIONS, LOAD = 6, 3, 3
# Points of a loop that a thread may have, at most, so that it computes once what is the same for them.
MOST_SHARED = 4
# Bytes between what neighbouring threads of a GPU store, at most: a sector of a cache line.
SECTOR = 32
# Values that are tried together, at most.
MOST_TRIED = 8


def recompute_in_stencils(graph: ir.Graph, on_gpu: Callable[[torch.device], bool]) -> None:
    """Replaces loads of such values by what they are made of, where this moves fewer bytes for little arithmetic."""
    made = [graph.buffers[node.out] for node in graph.nodes if isinstance(node, ir.Pointwise)]
    gpu = any(on_gpu(buffer.device) for buffer in made)
    if any(count_of(buffer.sizes) >= (1 if gpu else LARGE) for buffer in made):
        _Stencils(graph, gpu).run()


class _Stencils:
    def __init__(self, graph: ir.Graph, gpu: bool) -> None:
        self.graph, self.gpu = graph, gpu
        self.nodes: dict[int, ir.Node] = dict(enumerate(graph.nodes))
        self.kept = kept_whole(graph)
        self.makers = {out: number for number, node in self.nodes.items() for out in ir.outs(node)}
        self.readers: dict[str, set[int]] = {}
        self.movable = set[int]()  # nodes whose readers may compute them
        self.depths: dict[int, int] = {}  # how many values below a node are read beside where they are made
        self.together: dict[object, set[int]] = {}  # the nodes of a kernel
        self.memo: dict[tuple[str, frozenset[str]], Value] = {}  # what values are made of, until a node changes
        self.is_written = written_again(graph)

    def run(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            self.change(number, node)
        self.apart = {name for name in self.readers if self._is_read_beside(name)}
        for number, node in self.nodes.items():
            self.depths[number] = max((self._depth(load) for load in vs.loads(ir.roots(node))), default=0)
            self.together.setdefault(self.kernel_of(number), set()).add(number)
        candidates = [name for name in self.makers if name in self.apart and self._may_move(name)]
        self.movable = {self.makers[name] for name in candidates}
        for family in self._families(candidates):
            self._settle(family)
        self.graph.nodes = [self.nodes[number] for number in sorted(self.nodes)]

    def change(self, number: int, node: ir.Node) -> None:
        """Puts a node in the place of one, and notes what it reads."""
        for name in ir.reads(self.nodes[number]):
            self.readers.setdefault(name, set()).discard(number)
        self.nodes[number] = node
        self.memo.clear()
        for name in ir.reads(node):
            self.readers.setdefault(name, set()).add(number)

    def kernel_of(self, number: int) -> object:
        """Equal for nodes that will be one kernel: those of equal loops, where none reads another one beside its points. A sum
        has a kernel of its own."""
        node = self.nodes[number]
        return (node.vars, self.depths[number]) if isinstance(node, ir.Pointwise) else number

    def _depth(self, load: Value) -> int:
        maker = self.makers.get(load.attr[0])
        return 0 if maker is None else self.depths.get(maker, 0) + (load.attr[0] in self.apart and self.is_beside(load))

    def forget(self, name: str) -> None:
        """Drops a value that nobody reads any longer."""
        number = self.makers.pop(name)
        self.together[self.kernel_of(number)].discard(number)
        for read in ir.reads(self.nodes.pop(number)):
            self.readers[read].discard(number)
        self.readers[name].clear()
        del self.graph.buffers[name]

    # ---- which values -------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> ir.Pointwise | None:
        """The node of a value that only kernels see."""
        node = self.nodes.get(self.makers.get(name, -1))
        return node if isinstance(node, ir.Pointwise) and is_hidden(self.graph, name, self.kept) else None

    def loads_of(self, name: str) -> list[tuple[ir.Node, Value]]:
        nodes = [self.nodes[number] for number in sorted(self.readers.get(name, ()))]
        return [(node, load) for node in nodes for load in vs.loads(ir.roots(node)) if load.attr[0] == name]

    def _is_read_beside(self, name: str) -> bool:
        return self._value(name) is not None and any(self.is_beside(load) for _, load in self.loads_of(name))

    def is_beside(self, load: Value) -> bool:
        """Whether a load moves along loops from another point than 0, or backwards, or stays at one of many points."""
        sizes = self.graph.buffers[load.attr[0]].sizes
        return any(size != 1 if e.as_int() is not None else is_shifted(e) for e, size in zip(load.attr[1], sizes, strict=True))

    def stays(self, load: Value) -> bool:
        """Whether what is read is made by a node of loops that readers do not compute."""
        maker = self.makers.get(load.attr[0])
        return maker is not None and maker not in self.movable and not ir.is_call(self.nodes[maker])

    def _may_move(self, name: str) -> bool:
        """Whether readers may compute a value: from memory that nobody writes, at places that are known, and each of them about
        as many elements as there are."""
        node, buffer = self._value(name), self.graph.buffers[name]
        count = count_of(buffer.sizes)
        if node is None or count < (1 if self.gpu else LARGE) or not self._is_plain(node):
            return False
        readers = self.loads_of(name)
        return all(
            isinstance(reader, Reader) and _is_static(load) and _points(reader) <= MOST_POINTS * count
            for reader, load in readers
        )

    def _is_plain(self, node: ir.Pointwise) -> bool:
        """Whether a value is arithmetic on elements in its own order: a copy in another order is for its readers."""
        loads = vs.loads([node.value])
        if any(v.op in UNIQUE for v in vs.topological([node.value])):
            return False
        # measured on a CPU alone: on a GPU parts of rows that wrap around are gathers
        anywhere = self.graph.buffers[node.out].device.type == "cpu"
        return all(_is_static(load) and self._stays(load.attr[0]) and _in_order(load, node, anywhere) for load in loads)

    def _stays(self, name: str) -> bool:
        """Whether a buffer keeps its elements, and has neighbours of its last dimension side by side."""
        strides = self.graph.buffers[name].strides
        return not self.is_written(name) and (not strides or strides[-1] == 1)

    def _families(self, names: Sequence[str]) -> list[list[str]]:
        """Values that share readers, in the order of the program."""
        families: list[tuple[set[int], list[str]]] = []
        for name in names:
            readers, found = set(self.readers[name]), [name]
            for family in [one for one in families if one[0] & readers]:
                families.remove(family)
                readers, found = readers | family[0], [*family[1], *found]
            families.append((readers, found))
        return [found for _, found in families]

    # ---- whether it pays ----------------------------------------------------------------------------------------------

    def _settle(self, family: list[str]) -> None:
        """Moves those values of a family that together save most, cheap ones first."""
        family = [name for name in family if self._may_move(name)]  # others may have become their readers
        order = sorted(
            family, key=lambda name: vs.total_cost(self.expanded(ir.roots(self.nodes[self.makers[name]]), frozenset()))
        )
        best, most = None, 0.0
        for count in range(1, min(len(order), MOST_TRIED) + 1):
            move = _Move(self, frozenset(order[:count]))
            if move.is_large():
                break
            gain = move.gain()
            if gain > most:
                best, most = move, gain
        if best is not None:
            best.apply()

    def expanded(self, roots: Sequence[Value], moved: frozenset[str]) -> list[Value]:
        """Values without loads of what moves, nor of what only their kernel has."""
        for name in self._below(roots, moved):
            node = self.nodes[self.makers[name]]
            assert isinstance(node, ir.Pointwise)
            made = self._replaced([node.value], moved)[0]
            self.memo[name, moved] = vs.as_stored(made, self.graph.buffers[name].dtype)
        return self._replaced(roots, moved)

    def _below(self, roots: Sequence[Value], moved: frozenset[str]) -> list[str]:
        """The values that have to be expanded first, in the order of the program: a chain of them may be long."""
        found, left = set[str](), list(roots)
        while left:
            for load in vs.loads([left.pop()]):
                name = load.attr[0]
                if name not in found and (name, moved) not in self.memo and self._is_replaced(name, moved):
                    found.add(name)
                    left += ir.roots(self.nodes[self.makers[name]])
        return sorted(found, key=self.makers.__getitem__)

    def _is_replaced(self, name: str, moved: frozenset[str]) -> bool:
        return name in moved or self._passes(name)

    def _replaced(self, roots: Sequence[Value], moved: frozenset[str]) -> list[Value]:
        anyway = {load for load in vs.loads(roots) if not load.args}

        def replaced(load: Value) -> Value | None:
            return self.in_place_of(load, moved, anyway) if self._is_replaced(load.attr[0], moved) else None

        return vs.replace_loads(list(roots), replaced)

    def in_place_of(self, load: Value, moved: frozenset[str], anyway: Container[Value]) -> Value:
        """What makes an element, without a mask on what is loaded anyway."""
        name, index, _ = load.attr
        node = self.nodes[self.makers[name]]
        assert isinstance(node, ir.Pointwise)
        value = vs.substitute(self.memo[name, moved], dict(zip(node.vars, index, strict=True)))
        if not load.args:
            return value
        return vs.where(load.args[0], vs.guard_loads(value, load.args[0], anyway), vs.const(0, value.dtype))

    def _passes(self, name: str) -> bool:
        """Whether a value goes from one operator to others of its kernel."""
        node = self._value(name)
        return node is not None and name not in self.apart and self._is_plain(node)

    def in_memory(self, name: str) -> bool:
        """Whether others store it in any case."""
        maker = self.nodes.get(self.makers.get(name, -1))
        return name in self.kept or name in self.apart or maker is None or ir.is_call(maker)


class _Move:
    """Some values computed by their readers, and what that saves: operations of a GPU, for each element."""

    def __init__(self, among: _Stencils, names: frozenset[str]) -> None:
        self.among, self.names = among, names
        self.makers = {among.makers[name] for name in names}
        self.readers = sorted({number for name in names for number in among.readers[name]} - self.makers)
        changed = (*self.readers, *self.makers)
        self.old = {number: among.expanded(ir.roots(among.nodes[number]), frozenset())[0] for number in changed}
        self.new = {number: among.expanded([self.old[number]], names)[0] for number in self.readers}

    def is_large(self) -> bool:
        return any(len(vs.loads([value])) > MAX_LOADS or vs.total_cost([value]) > MAX_COST for value in self.new.values())

    def gain(self) -> float:
        among = self.among
        buffers = among.graph.buffers
        elements = max(FEWEST_BUSY * among.gpu, *(count_of(buffers[name].sizes) for name in self.names))
        double = any(buffers[name].dtype is torch.float64 for name in self.names)
        operations = DOUBLE_OPERATIONS if double else OPERATIONS
        # on a CPU a cache may have what the kernel of a value reads
        alone = filter(self._is_alone, self.makers) if among.gpu else ()
        kernels = {among.kernel_of(number) for number in (*self.readers, *alone)}
        saved: float = sum(map(self._bytes, self.names)) + sum(map(self._saved, kernels))
        saved += LAUNCH * among.gpu * sum(map(self._part_of_launch, kernels))
        return saved * operations / elements - sum(map(self._arithmetic, self._groups()))

    def _is_alone(self, number: int) -> bool:
        """Whether a value has a kernel without its readers: each of these reads it beside its points. A sum that does not do so
        has the value in its own kernel, and so does a scan, or what else stays, that it is made of at its own points."""
        among, [name] = self.among, ir.outs(self.among.nodes[number])
        if any(among.stays(load) and not among.is_beside(load) for load in vs.loads(ir.roots(among.nodes[number]))):
            return False
        beside = {id(node) for node, load in among.loads_of(name) if among.is_beside(load)}
        own = among.kernel_of(number)
        return all(id(among.nodes[k]) in beside or among.kernel_of(k) == own for k in among.readers[name])

    def _part_of_launch(self, kernel: object) -> float:
        """The part of a kernel that the move takes away, if others may take the rest."""
        nodes = self.among.together[kernel]
        return len(nodes & self.makers) / len(nodes) if nodes and nodes <= self.among.movable else 0

    def _groups(self) -> list[list[int]]:
        """The readers of each kernel."""
        groups: dict[object, list[int]] = {}
        for number in self.readers:
            groups.setdefault(self.among.kernel_of(number), []).append(number)
        return list(groups.values())

    def _saved(self, kernel: object) -> int:
        """Bytes that a kernel no longer loads, without those that it loads instead. What nobody has stored is stored too."""
        among = self.among
        nodes = among.together[kernel]
        own = {name for number in nodes for name in ir.outs(among.nodes[number])}
        after = {name for number in nodes - {*self.makers, *self.readers} for name in ir.reads(among.nodes[number])}
        before = after | {name for number in nodes & self.old.keys() for name in _names(self.old[number])}
        after = after | {name for number in nodes & self.new.keys() for name in _names(self.new[number])}
        more = ((2 - among.in_memory(name)) * self._bytes(name) for name in after - before)
        return sum(map(self._bytes, before - after - own)) - sum(more)

    def _arithmetic(self, group: list[int]) -> float:
        """Operations for an element. A thread has all points of one short loop, if that saves most."""
        old, new = [self.old[number] for number in group], [self.new[number] for number in group]
        node = self.among.nodes[group[0]]
        short = [v for v in node.vars[1:] if self._may_share(v, node)] if isinstance(node, ir.Pointwise) else []

        def more(v: ix.Var | None) -> float:
            (computed, loaded), (before, loaded_before) = _operations(new, v), _operations(old, v)
            return computed - before + LOAD * max(loaded - loaded_before, 0)

        return min(more(v) for v in (None, *short))

    def _may_share(self, v: ix.Var, node: ir.Pointwise) -> bool:
        """Whether a thread may have all points of a loop: of the last one, where threads still store in the same sectors."""
        extent = v.extent.as_int() or 0
        stored = extent * self.among.graph.buffers[node.out].dtype.itemsize
        return 1 < extent <= MOST_SHARED and (v is not node.vars[-1] or (self.among.gpu and stored <= SECTOR))

    def _bytes(self, name: str) -> int:
        buffer = self.among.graph.buffers[name]
        return count_of(buffer.sizes) * buffer.dtype.itemsize

    def apply(self) -> None:
        among = self.among
        changed = {number: self._moved(number) for number in self.readers}
        for number, node in changed.items():
            among.change(number, node)
        for name in self.names:
            among.forget(name)

    def _moved(self, number: int) -> ir.Node:
        """What a reader computes now. What else it reads of its own kernel it still reads there."""
        among, node = self.among, self.among.nodes[number]
        assert isinstance(node, Reader)
        anyway = {load for load in vs.loads([self.old[number]]) if not load.args}

        def replaced(load: Value) -> Value | None:
            return among.in_place_of(load, self.names, anyway) if load.attr[0] in self.names else None

        gone = [among.nodes[among.makers[name]] for name in ir.reads(node) if name in self.names]
        value = vs.replace_loads([node.value], replaced)[0]
        return replace(node, value=value, origin=_joined(node.origin, gone))


def _operations(values: Sequence[Value], along: ix.Var | None) -> tuple[float, float]:
    """Operations and loads of a point, where a thread with all points of the loop `along` shares what is the same for them."""
    points = 1 if along is None else along.extent.as_int() or 1
    if along is not None:
        bound: list[dict[ix.Atom, Expr]] = [{along: ix.constant(k)} for k in range(points)]
        values = [vs.substitute(value, point) for value in values for point in bound]
    found = vs.topological(values)
    return sum(ops.cost(value.op) for value in found) / points, sum(value.op == "load" for value in found) / points


def _names(value: Value) -> set[str]:
    return {load.attr[0] for load in vs.loads([value])}


def _joined(origin: ir.Origin, nodes: Iterable[ir.Node]) -> ir.Origin:
    for node in nodes:
        origin = origin.joined(node.origin)
    return origin


def _is_static(load: Value) -> bool:
    return not any(ix.indirects(e) for e in load.attr[1])


def is_shifted(expr: Expr) -> bool:
    """Whether an index moves along loops from another point than 0, or backwards."""
    inner = [part for monomial, _ in expr.terms for atom in monomial for part in _inside(atom)]
    return any(not monomial or factor < 0 for monomial, factor in expr.terms) or any(map(is_shifted, inner))


def _inside(atom: ix.Atom) -> tuple[Expr, ...]:
    """What an atom is computed from, without what it is divided by."""
    if isinstance(atom, ix.Apply):
        return tuple(arg for arg in atom.args if arg.as_int() is None)
    return (atom.num,) if isinstance(atom, ix.FloorDiv | ix.Mod) else ()


def _in_order(load: Value, node: ir.Pointwise, anywhere: bool) -> bool:
    """Whether a load of about as many elements as are made reads neighbours for neighbours."""
    index = load.attr[1]
    used = {atom for e in index for atom in ix.free_atoms(e)}
    loops = [v for v in node.vars if v.extent != 1]
    return not all(v in used for v in loops) or (bool(loops) and _moves_by_one(index[-1], loops[-1], anywhere))


def _moves_by_one(expr: Expr, v: ix.Var, anywhere: bool) -> bool:
    """Whether an index goes to its neighbour with the loop, but where it wraps around or is clamped. It begins at the first
    element, or `anywhere`."""
    atom = (expr - expr.constant_term() if anywhere else expr).atom()
    if atom is not None and atom is not v:
        return any(_moves_by_one(part, v, anywhere) for part in _inside(atom))
    step = ix.stride_of(expr, v)
    return step is not None and step.as_int() == 1


def _points(node: ir.Node) -> float:
    assert isinstance(node, Reader)
    loops = [v for group in ir.iteration(node) for v in group]
    return count_of(v.extent for v in loops) or math.inf
