"""Concatenations of many parts of which an elementwise operator alone reads: it is applied to the parts.

    before   y[part n] = x_n;   z[i] = f(y[i])
    after    z[part n] = f(x_n)

Neither kernel would have the other's loops: the concatenation would be stored, to be read again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.short_axes import UNIQUE, Reader, written_again

# Bytes of a run in memory, on average: shorter ones are written element by element.
RUN = 64


def apply_to_parts(graph: ir.Graph, fresh: Callable[[str], str]) -> None:
    """Replaces such readers in the graph by one for each run of elements, and drops what they read."""
    if any(buffer.parts for buffer in graph.buffers.values()):
        _PartReaders(graph, fresh).run()


class _PartReaders:
    def __init__(self, graph: ir.Graph, fresh: Callable[[str], str]) -> None:
        self.graph, self.fresh = graph, fresh
        self.makers = {node.out: node for node in graph.nodes if isinstance(node, ir.Pointwise)}
        self.readers: dict[str, int] = defaultdict(int)
        for node in graph.nodes:
            for name in ir.reads(node):
                self.readers[name] += 1 if isinstance(node, Reader) else 2  # others need it in memory
        self.results = {one.buffer for one in ir.tensor_args(list(graph.outputs))}
        self.is_written = written_again(graph)

    def run(self) -> None:
        nodes: list[list[ir.Node]] = []
        dropped = set[str]()
        for node in self.graph.nodes:
            nodes.append([node])
            if isinstance(node, ir.Pointwise) and (wholes := self._wholes(node)) and (runs := self._runs(node, wholes)):
                nodes[-1] = self._cut(node, wholes, runs)
                dropped.update(part for whole in wholes for part in (whole.name, *whole.parts))
        if dropped:
            self.graph.nodes = [one for made in nodes for one in made if dropped.isdisjoint(ir.outs(one))]
            for name in dropped:
                del self.graph.buffers[name]

    # ---- which ------------------------------------------------------------------------------------------------------

    def _wholes(self, node: ir.Pointwise) -> list[ir.Buffer]:
        """The concatenations that a node is made of; none where it may not be cut, or where that would keep it from the kernel
        of something else that it reads."""
        buffers = self.graph.buffers
        own, names = buffers[node.out], dict.fromkeys(load.attr[0] for load in vs.loads([node.value]))
        wholes = [buffers[name] for name in names if buffers[name].parts]
        if not wholes or own.kind != "intermediate" or own.alias_of is not None or self.is_written(own.name):
            return []
        if not all(buffers[name].parts or self.graph.is_given(name) for name in names) or _is_unique(node):
            return []
        place = tuple(v.expr() for v in node.vars)
        at_points = all(not one.args and one.attr[1] == place for one in vs.loads([node.value]) if buffers[one.attr[0]].parts)
        return wholes if at_points and all(self._may_vanish(whole, own) for whole in wholes) else []

    def _may_vanish(self, whole: ir.Buffer, made: ir.Buffer) -> bool:
        """Whether the node of `made` alone reads it, which stores no more in its place."""
        makers = [self.makers.get(part) for part in whole.parts]
        alone = self.readers[whole.name] == 1 and whole.name not in self.results and not self.is_written(whole.name)
        if not alone or whole.kind != "intermediate" or whole.sizes != made.sizes or whole.device != made.device:
            return False
        if made.name not in self.results and made.dtype.itemsize > whole.dtype.itemsize:
            return False
        return all(one is not None and not _is_unique(one) and self._stays(one) for one in makers)

    def _stays(self, maker: ir.Pointwise) -> bool:
        """Whether what it reads is later what it is now."""
        return not any(self.is_written(load.attr[0]) for load in vs.loads([maker.value]))

    def _runs(self, node: ir.Pointwise, wholes: Sequence[ir.Buffer]) -> list[tuple[int, Expr, Expr]]:
        """Dimension, start and end of the runs that the bounds of all parts make; none where they are not known, or short."""
        dimensions = {_dimension(self.graph.buffers, whole) for whole in wholes}
        bounds = [self._bounds(whole) for whole in wholes]
        k, numbers = min(dimensions), {bound: bound.as_int() for one in bounds for bound in one}
        if len(dimensions) > 1:
            return []
        ordered = bounds[0]
        if any(one != ordered for one in bounds):
            if None in numbers.values():
                return []
            ordered = tuple(sorted(numbers, key=lambda bound: numbers[bound] or 0))
        strides = self._strides(node.out, wholes[0])
        step, length, size = strides[k].as_int(), node.vars[k].extent.as_int(), self.graph.buffers[node.out].dtype.itemsize
        if step is None or (step * size < RUN and step * size * (length or 0) < RUN * (len(ordered) - 1)):
            return []
        return [(k, low, high) for low, high in itertools.pairwise(ordered)]

    def _bounds(self, whole: ir.Buffer) -> tuple[Expr, ...]:
        k = _dimension(self.graph.buffers, whole)
        return tuple(itertools.accumulate((self.graph.buffers[part].sizes[k] for part in whole.parts), initial=ix.ZERO))

    def _strides(self, name: str, whole: ir.Buffer) -> tuple[Expr, ...]:
        own = self.graph.buffers[name]
        return ir.dense_strides(own if own.strides is not None or own.hint is not None else whole)

    # ---- what becomes of it -----------------------------------------------------------------------------------------

    def _cut(self, node: ir.Pointwise, wholes: Sequence[ir.Buffer], runs: Sequence[tuple[int, Expr, Expr]]) -> list[ir.Node]:
        graph, strides = self.graph, self._strides(node.out, wholes[0])
        names = tuple(self.fresh(f"{node.out}_part{n}") for n in range(len(runs)))
        whole = graph.buffers[node.out] = replace(graph.buffers[node.out], strides=strides, parts=names)
        starts = {one.name: dict(zip(self._bounds(one), one.parts, strict=False)) for one in wholes}
        current: dict[str, tuple[ir.Pointwise, Expr]] = {}  # the part that a run is in, and where that begins
        made: list[ir.Node] = []
        for name, (k, low, high) in zip(names, runs, strict=True):
            for one in wholes:
                if low in starts[one.name]:
                    current[one.name] = self.makers[starts[one.name][low]], low
            run = self.makers[name] = self._run(replace(node, out=name), (k, low, high), current)
            sizes = tuple(v.extent for v in run.vars)
            offset = low * strides[k] + whole.offset
            graph.buffers[name] = replace(
                whole, name=name, sizes=sizes, offset=offset, alias_of=whole.name, parts=(), is_part=True
            )
            made.append(run)
        return made

    def _run(
        self, node: ir.Pointwise, run: tuple[int, Expr, Expr], current: Mapping[str, tuple[ir.Pointwise, Expr]]
    ) -> ir.Pointwise:
        k, low, high = run
        v, origin = node.vars[k], node.origin
        own = ix.var(v.name, high - low)
        loops = (*node.vars[:k], own, *node.vars[k + 1 :])

        def part_of(load: Value) -> Value | None:
            nonlocal origin
            if load.attr[0] not in current:
                return None
            maker, start = current[load.attr[0]]
            origin = origin.joined(maker.origin)
            place = [own.expr() + (low - start) if d == k else one.expr() for d, one in enumerate(loops)]
            value = vs.substitute(maker.value, dict(zip(maker.vars, place, strict=True)))
            return vs.cast(value, self.graph.buffers[load.attr[0]].dtype)  # as it would be in memory

        [value] = vs.replace_loads([vs.substitute(node.value, {v: own.expr() + low})], part_of)
        return replace(node, vars=loops, value=value, origin=origin)


def _dimension(buffers: Mapping[str, ir.Buffer], whole: ir.Buffer) -> int:
    """The one along which the parts of a buffer are."""
    parts = [buffers[name].sizes for name in whole.parts]
    return next((k for k, size in enumerate(whole.sizes) if any(own[k] is not size for own in parts)), 0)


def _is_unique(node: ir.Pointwise) -> bool:
    return any(value.op in UNIQUE for value in vs.topological([node.value]))
