"""Reductions that find a largest element and its position, where nobody reads the position: the element is enough.

before   v, p = argmax over r of x[i, r]      and only v is read, as in x.max(-1).values
after    v = max over r of x[i, r]
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kgen.ir import nodes as ir

# The reductions without a position. Both propagate NaN, and of equals any will do.
OF_ELEMENTS = {"argmax": "max", "argmin": "min"}


def drop_unread_positions(graph: ir.Graph) -> None:
    """Replaces such reductions in the graph."""
    read = ir.visible(graph).union(*map(ir.reads, graph.nodes))
    for number, node in enumerate(graph.nodes):
        if isinstance(node, ir.Reduction) and _has_position(node) and node.outs[1] not in read:
            del graph.buffers[node.outs[1]]
            graph.nodes[number] = replace(node, op=OF_ELEMENTS[node.op], outs=node.outs[:1])


def _has_position(node: ir.Node) -> bool:
    return isinstance(node, ir.Reduction) and node.op in OF_ELEMENTS and node.value.dtype is not torch.bool
