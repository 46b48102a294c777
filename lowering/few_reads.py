"""Values of which a reader takes few elements, at positions from data, as a loss takes those of labels.

    y[b, c, i] = f(x[b, c, i // 2], x[b, c, i // 2 + 1]);   p[b, i] = y[b, label[b, i], i]
    p[b, i] = f(x[b, label[b, i], i // 2], x[b, label[b, i], i // 2 + 1])

The reader's kernel is another one than that of the rest of the readers, which go through all elements and need none in memory:
the value would be stored for a few of its elements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.short_axes import UNIQUE, Reader, count_of, is_hidden, kept_whole, written_again
from kgen.lowering.stencils import is_shifted

# Elements for each one that is read, at least: an element that is computed again takes more loads than one that is stored.
FEWEST = 8
# Operations of an element, at most, for each of so many elements.
COST, MOST_COST = 8, 256
# On a CPU a cache has fewer elements than this.
LARGE = 1 << 20
# How many times as many elements as a tensor a value made of it has at least, so that storing that one takes little.
SMALLER = 4


def recompute_few_reads(graph: ir.Graph, on_gpu: Callable[[torch.device], bool]) -> None:
    """Replaces loads of such elements by what they are made of."""
    if any(_is_at_data(load) for node in graph.nodes for load in _loads(node)):
        _FewReads(graph, on_gpu).run()


class _FewReads:
    def __init__(self, graph: ir.Graph, on_gpu: Callable[[torch.device], bool]) -> None:
        self.graph, self.on_gpu = graph, on_gpu
        self.kept = kept_whole(graph)
        self.stored = self.kept | {out for node in graph.nodes if ir.is_call(node) for out in ir.outs(node)}
        self.makers: dict[str, ir.Pointwise] = {}  # without what they can compute themselves
        self.readers = Counter(name for node in graph.nodes for name in ir.reads(node))
        self.is_written = written_again(graph)

    def run(self) -> None:
        for number, node in enumerate(self.graph.nodes):
            made = self._recomputing(node) if isinstance(node, Reader) and any(map(_is_at_data, _loads(node))) else node
            self.graph.nodes[number] = made
            if isinstance(made, ir.Pointwise) and (whole := self._from_memory(made)) is not None:
                self.makers[made.out] = whole

    def _recomputing(self, node: Reader) -> ir.Node:
        points = count_of(v.extent for group in ir.iteration(node) for v in group)
        origin = node.origin

        def replaced(load: Value) -> Value | None:
            nonlocal origin
            maker = self.makers.get(load.attr[0])
            if maker is None or not _is_at_data(load) or not self._may_move(maker, points):
                return None
            origin = origin.joined(maker.origin)
            return self._element(maker, load)

        [value] = vs.replace_loads([node.value], replaced)
        return node if value is node.value else replace(node, value=value, origin=origin)

    def _from_memory(self, node: ir.Pointwise) -> ir.Pointwise | None:
        """The node, made of what is in memory in any case alone. None of others, of large ones, and of what differs at each
        evaluation."""
        count, origin = count_of(v.extent for v in node.vars), node.origin

        def replaced(load: Value) -> Value | None:
            nonlocal origin
            maker = self.makers.get(load.attr[0])
            if maker is None or self._is_stored(load, count) or not is_hidden(self.graph, maker.out, self.kept):
                return None
            origin = origin.joined(maker.origin)
            return self._element(maker, load)

        [value] = vs.replace_loads([node.value], replaced)
        if vs.total_cost([value]) > MOST_COST or any(v.op in UNIQUE for v in vs.topological([value])):
            return None
        return replace(node, value=value, origin=origin) if all(self._is_stored(v, count) for v in vs.loads([value])) else None

    def _element(self, maker: ir.Pointwise, load: Value) -> Value:
        stored = vs.as_stored(maker.value, self.graph.buffers[maker.out].dtype)
        value = vs.substitute(stored, dict(zip(maker.vars, load.attr[1], strict=True)))
        if not load.args:
            return value
        return vs.where(load.args[0], vs.guard_loads(value, load.args[0]), vs.const(0, value.dtype))

    def _may_move(self, maker: ir.Pointwise, points: int) -> bool:
        """Whether a reader of so many elements may compute them: others read the value, and nobody else sees it."""
        count = count_of(v.extent for v in maker.vars)
        if self.readers[maker.out] < 2 or count < (1 if self.on_gpu(self.graph.buffers[maker.out].device) else LARGE):
            return False
        less = count // points if points else 0
        return less >= FEWEST and vs.total_cost([maker.value]) <= COST * less and is_hidden(self.graph, maker.out, self.kept)

    def _is_stored(self, load: Value, count: int) -> bool:
        """Whether what a value of `count` elements reads is in memory in any case, and stays as it is; or is much smaller."""
        name, index, _ = load.attr
        if self.is_written(name) or _is_at_data(load):
            return False
        small = 0 < count_of(self.graph.buffers[name].sizes) * SMALLER <= count
        return small or self.graph.is_given(name) or name in self.stored or any(map(is_shifted, index))


def _loads(node: ir.Node) -> list[Value]:
    return vs.loads([node.value]) if isinstance(node, Reader) else []


def _is_at_data(load: Value) -> bool:
    return any(ix.indirects(e) for e in load.attr[1])
