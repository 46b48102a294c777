"""Nodes that nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.ir import nodes as ir
from kgen.scheduler.analysis.dependencies import reads_of


def needed(graph: ir.Graph, nodes: Sequence[ir.Node], kinds: tuple[type[ir.Node], ...] = (ir.Pointwise,)) -> list[ir.Node]:
    """The nodes without those of some `kinds` that nobody reads."""
    read = ir.visible(graph)
    kept: list[ir.Node] = []
    for node in reversed(nodes):
        if isinstance(node, kinds) and read.isdisjoint(ir.outs(node)):
            continue
        read.update(reads_of(node))
        kept.append(node)
    return kept[::-1]
