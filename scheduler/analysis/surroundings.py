"""Nodes that stand in equal surroundings, as those of a network's equal layers do.

Labels are refined as by B. Weisfeiler and A. Leman (The reduction of a graph to canonical form, 1968): a node's next one is
made of its own, and of those before and behind it. Sets stand for these, not lists: a sum along the residual connections of a
network reads as many of them as there are layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from kgen.ir import nodes as ir
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.analysis.memo import memoised_for

# Edges away from a node up to which others tell it from its equals: queries and values are that far from gradients of weights.
RADIUS = 3


def surroundings(graph: ir.Graph) -> Mapping[str, Hashable]:
    """By what each node makes: equal for nodes with equal operators and layouts of results, as have those around them. What
    their bodies compute is not compared otherwise. Only comparisons of labels of one graph mean anything."""
    return memoised_for(graph.nodes, "surroundings", lambda: _refined(graph))


def _refined(graph: ir.Graph) -> Mapping[str, Hashable]:
    makers = {out: k for k, node in enumerate(graph.nodes) for out in ir.outs(node)}
    reads = [reads_of(node) for node in graph.nodes]
    readers = defaultdict[str, list[int]](list)
    for k, names in enumerate(reads):
        for name in names:
            readers[name].append(k)
    given = {name: hash(_facts(graph, name)) for names in reads for name in names if name not in makers}
    labels = [hash(_own(graph, node)) for node in graph.nodes]
    visible = ir.visible(graph)
    for _ in range(RADIUS):
        labels = [
            hash((
                labels[k],
                frozenset(labels[makers[name]] if name in makers else given[name] for name in reads[k]),
                frozenset(labels[one] for out in ir.outs(node) for one in readers[out]),
                visible.isdisjoint(ir.outs(node)),
            ))
            for k, node in enumerate(graph.nodes)
        ]  # fmt: skip
    return {out: (labels[k], n) for k, node in enumerate(graph.nodes) for n, out in enumerate(ir.outs(node))}


def _own(graph: ir.Graph, node: ir.Node) -> Hashable:
    return type(node).__name__, node.origin.operators, tuple(_facts(graph, out) for out in ir.outs(node))


def _facts(graph: ir.Graph, name: str) -> Hashable:
    buffer = graph.buffers[name]
    return buffer.dtype, str(buffer.device), buffer.sizes, buffer.strides, buffer.kind
