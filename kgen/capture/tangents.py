"""Which nodes of the graph of forward and backward, as AOTAutograd traces it, belong to backward."""

from __future__ import annotations

from torch.fx import GraphModule, Node


def of_tangents(gm: GraphModule) -> set[Node]:
    """What depends on the gradients of results."""
    found: set[Node] = set()
    for node in gm.graph.nodes:
        is_tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found
