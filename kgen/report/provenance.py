"""Which operators a loop node computes: its own, and those that lowering wrote into its value instead of storing.

Kernel names, headers and `explain` show them, and `require_fused` and `forbid_fused` look for them: without the inlined ones,
a relu in front of a reduction would be in no kernel at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from kgen.capture.operators import is_view, operator_name
from kgen.ir import nodes as ir

__all__ = ["computing_nodes", "trace_origins"]


def trace_origins(gm: GraphModule, graph: ir.Graph) -> ir.Graph:
    """Completes the origins of `graph`'s loop nodes, lowered from `gm`, in program order."""
    nodes = {n.name: n for n in gm.graph.nodes}
    order = {n: k for k, n in enumerate(gm.graph.nodes)}
    stored = {nodes[n.origin.name] for n in graph.nodes if n.origin.name in nodes}
    calls = {n.origin.name for n in graph.nodes if not isinstance(n, ir.Pointwise | ir.Reduction | ir.Scan | ir.Scatter)}
    for position, node in enumerate(graph.nodes):
        source = nodes.get(node.origin.name)
        if source is None or not isinstance(node, ir.Pointwise | ir.Reduction | ir.Scan | ir.Scatter):
            continue
        found = _inlined(source, stored)
        if source.name not in calls or not found:  # a loop that only prepares a call's operand does not do the call
            found.add(source)
        operators = dict.fromkeys(
            operator_name(n.target) for n in sorted(found, key=order.__getitem__) if n.op == "call_function"
        )
        graph.nodes[position] = replace(node, origin=replace(node.origin, operators=tuple(operators)))
    return graph


def computing_nodes(gm: GraphModule, graph: ir.Graph, origins: Iterable[ir.Origin]) -> list[Node]:
    """The calls of `gm` that kernels with these origins compute, in program order, without views: library calls could compute
    the rest instead."""
    nodes = {n.name: n for n in gm.graph.nodes}
    stored = {nodes[n.origin.name] for n in graph.nodes if n.origin.name in nodes}
    found: set[Node] = set()
    for origin in origins:
        source = nodes.get(origin.name)
        if source is not None:
            found |= _inlined(source, stored)
            # not where a loop only prepares the operand of a call
            found.update([source] if operator_name(source.target) in origin.operators else [])
    return [n for n in gm.graph.nodes if n in found and isinstance(n.target, torch._ops.OpOverload) and not is_view(n.target)]


def _inlined(source: Node, stored: set[Node]) -> set[Node]:
    """The operators between `source` and the stored values that it reads, views and constants left out."""
    found: set[Node] = set()
    seen: set[Node] = {source}
    stack = list(source.all_input_nodes)
    while stack:
        node = stack.pop()
        if node in seen or node in stored:
            continue
        seen.add(node)
        stack += node.all_input_nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.all_input_nodes and not is_view(node.target):
            found.add(node)
    return found
