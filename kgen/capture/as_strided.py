"""Views by strides written as slices, which say of which elements they are whatever the strides.

Functionalization writes ``x.chunk(2, 1)`` as calls of `aten.as_strided`, and these hold only while `x` stays where it is. Other
views by strides are of the tensor that owns the storage, and of no view of it, for which nobody keeps the strides.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["name_owners", "replace_as_strided"]

aten = torch.ops.aten


def replace_as_strided(gm: GraphModule) -> GraphModule:
    """The graph with slices in the place of views by strides: a copy, or itself where there are none."""
    if not gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        return gm
    graph, made = Graph(), dict[Node, Node]()
    for node in gm.graph.nodes:
        copied = graph.node_copy(node, made.__getitem__)
        found = _slice(node) if node.target is aten.as_strided.default else None
        if found is not None:
            copied.target, copied.args = aten.slice.Tensor, (copied.args[0], *found)
        made[node] = copied
    return GraphModule(gm, graph)


def _slice(node: Node) -> tuple[int, int, int] | None:
    """Dimension, start and end of the slice that a view is; None where it is something else."""
    source, view = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if source.dtype is not view.dtype or source.dim() != view.dim() or source.stride() != view.stride():
        return None
    cut = [k for k in range(view.dim()) if source.shape[k] != view.shape[k]]
    if len(cut) != 1 or source.stride(cut[0]) == 0:
        return None
    start, rest = divmod(view.storage_offset() - source.storage_offset(), source.stride(cut[0]))
    end = start + view.shape[cut[0]]
    return (cut[0], start, end) if rest == 0 and start >= 0 and end <= source.shape[cut[0]] else None


def name_owners(gm: GraphModule) -> GraphModule:
    """The graph, changed in place: views by strides of views become such of the tensor below."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        owner = _owner(node)
        if owner is not None:
            offset = node.meta["val"].storage_offset() - owner.meta["val"].storage_offset()
            node.args = (owner, *node.args[1:3], offset)
    return gm


def _owner(node: Node) -> Node | None:
    """The tensor of which the source of a view by strides is a view; None where it is none, or begins who knows where."""
    source = owner = node.all_input_nodes[0]
    while owner.op == "call_function" and getattr(owner.target, "is_view", False):
        below = owner.all_input_nodes[0]
        if below.meta["val"].dtype is not node.meta["val"].dtype:
            return None
        owner = below
    if owner is source or owner.op == "placeholder":
        return None
    offsets = (one.meta["val"].storage_offset() for one in (node, owner))
    return owner if all(isinstance(one, int) for one in offsets) else None
