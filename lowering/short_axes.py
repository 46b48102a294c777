"""Values along an axis of few points that their readers read one by one: colours, words of a code, parts of complex numbers.

    before   y[i, c < 3] = f(x[i, c]);   z[i] = y[i, 0] + y[i, 1] * y[i, 2]
    after    y0[i] = f(x[i, 0]);  y1[i] = f(x[i, 1]);  y2[i] = f(x[i, 2]);   z[i] = y0[i] + y1[i] * y2[i]

A reader at the same points joins the kernel of what it reads, and one at others does not. What nobody reads is not computed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr
from kgen.ir.values import Value

# Points of an axis that are written one by one, at most.
FEW = 8
Reader = ir.Pointwise | ir.Reduction | ir.Scan
# Operators that nobody may evaluate once more, or fewer times.
UNIQUE = ("assert", *ops.RANDOM)
T = TypeVar("T")


def unroll_short_axes(graph: ir.Graph, fresh: Callable[[str], str]) -> None:
    """Replaces such values in the graph, the last ones first: what these read may then be one of them."""
    _Unrolling(graph, fresh).run()


class _Unrolling:
    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str]) -> None:
        self.graph, self.fresh = graph, fresh
        self.nodes: list[list[ir.Node]] = [[node] for node in graph.nodes]  # what stands for each node
        self.kept = kept_whole(graph)
        self.makers = {out: node for node in graph.nodes for out in ir.outs(node)}
        self.readers: dict[str, set[int]] = defaultdict(set)  # the numbers of the nodes that read a buffer by loads

    def run(self) -> None:
        for number, [node] in enumerate(self.nodes):
            for name in ir.reads(node):
                self.readers[name].add(number)
        for number in reversed(range(len(self.nodes))):
            [node] = self.nodes[number]
            if isinstance(node, ir.Pointwise) and (axis := self._axis(node)) is not None:
                self.nodes[number] = self._unroll(node, axis)
        self.graph.nodes = [node for parts in self.nodes for node in parts]

    def _axis(self, node: ir.Pointwise) -> int | None:
        """The number of the axis."""
        buffer = self.graph.buffers[node.out]
        if node.out in self.kept or buffer.kind != "intermediate" or buffer.alias_of is not None or buffer.parts:
            return None
        extents = [size.as_int() for size in buffer.sizes]
        for axis in (axis for axis, extent in enumerate(extents) if extent is not None and 1 < extent <= FEW):
            if self._reads_apart(node, axis) and self._is_given(node, axis):
                return axis
        return None

    def _loads(self, name: str) -> list[Value]:
        nodes = [node for number in self.readers[name] for node in self.nodes[number]]
        return [load for node in nodes for load in vs.loads(ir.roots(node)) if load.attr[0] == name]

    def _reads_apart(self, node: ir.Pointwise, axis: int) -> bool:
        """Whether each reader says which point of the axis it reads. A load with a mask may name one that there is not."""
        points = [load.attr[1][axis].as_int() for load in self._loads(node.out)]
        extent = self.graph.buffers[node.out].sizes[axis].as_int() or 0
        return bool(points) and all(point is not None and 0 <= point < extent for point in points)

    def _is_given(self, node: ir.Pointwise, axis: int) -> bool:
        """Whether what differs along the axis is read from memory that others fill: a value that ends a sum or a matmul stays
        with it."""
        v = node.vars[axis]
        for load in vs.loads([node.value]):
            maker = self.makers.get(load.attr[0])
            moving = any(v in ix.free_atoms(e) for e in load.attr[1]) or any(v in arg.variables() for arg in load.args)
            if moving and not (maker is None or isinstance(maker, ir.Pointwise | ir.Extern)):
                return False
        return True

    def _unroll(self, node: ir.Pointwise, axis: int) -> list[ir.Node]:
        old, v = self.graph.buffers[node.out], node.vars[axis]
        points = sorted({point for load in self._loads(node.out) if (point := load.attr[1][axis].as_int()) is not None})
        names = {point: self.fresh(f"{node.out}_{point}") for point in points}
        parts: list[ir.Node] = []
        for point, name in names.items():
            self.graph.buffers[name] = _without(old, axis, name)
            place: dict[Atom, Expr] = {v: ix.constant(point)}
            part = ir.Pointwise(name, _drop(node.vars, axis), vs.substitute(node.value, place), node.origin)
            parts.append(part)
            if node.out in self.graph.paths:
                self.graph.paths[name] = self.graph.paths[node.out]

        def read(load: Value) -> Value | None:
            if load.attr[0] != node.out:
                return None
            point = load.attr[1][axis].as_int()
            assert point is not None
            return vs.load(names[point], _drop(load.attr[1], axis), load.attr[2], load.args[0] if load.args else None)

        for number in self.readers[node.out]:
            readers = [one for one in self.nodes[number] if isinstance(one, Reader)]
            self.nodes[number] = [replace(one, value=vs.replace_loads([one.value], read)[0]) for one in readers]
        del self.graph.buffers[node.out]
        return parts


def kept_whole(graph: ir.Graph) -> set[str]:
    """What has to be one buffer: results, what calls and templates read, what is written again, and what has views."""
    found = {one.buffer for one in ir.tensor_args(list(graph.outputs))}
    for node in graph.nodes:
        if not isinstance(node, Reader):
            found.update(ir.reads(node))
    found.update(buffer.alias_of for buffer in graph.buffers.values() if buffer.alias_of is not None)
    return found


def count_of(sizes: Iterable[Expr]) -> int:
    """0 where a size is not known."""
    return math.prod(size.as_int() or 0 for size in sizes)


def is_hidden(graph: ir.Graph, name: str, kept: Container[str]) -> bool:
    """Whether only kernels see a value; `kept` is what has to be one buffer."""
    buffer = graph.buffers[name]
    return buffer.kind == "intermediate" and buffer.alias_of is None and not buffer.parts and name not in kept


def written_again(graph: ir.Graph) -> Callable[[str], bool]:
    """Whether the storage of a buffer has another version or a view, as a question by its name."""
    known: dict[str, str] = {}
    aliases = (buffer.name for buffer in graph.buffers.values() if buffer.alias_of is not None and not buffer.is_part)
    written = {ir.storage_owner(graph.buffers, name, known) for name in aliases}
    return lambda name: ir.storage_owner(graph.buffers, name, known) in written


def _drop(found: Sequence[T], axis: int) -> tuple[T, ...]:
    return (*found[:axis], *found[axis + 1 :])


def _without(old: ir.Buffer, axis: int, name: str) -> ir.Buffer:
    """A buffer of one point of the axis, in the same order."""
    hint = None if old.hint is None else tuple(d - (d > axis) for d in old.hint if d != axis)
    return ir.Buffer(name, old.dtype, old.device, _drop(old.sizes, axis), hint=hint)
