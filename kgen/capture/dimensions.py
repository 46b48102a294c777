"""Dimensions that are counted from the end, counted from the front: equal reductions become equal calls.

A loss of logits asks for the maxima along dimension 1, a softmax of the same logits along -1. AOTAutograd merges calls whose
arguments are equal, and so only then computes one of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["count_from_front"]

aten = torch.ops.aten

# Their second argument is a dimension or a list of them.
REDUCTIONS: tuple[Any, ...] = (
    aten.amax.default, aten.amin.default, aten.argmax.default, aten.argmin.default, aten.logsumexp.default, aten.max.dim,
    aten.mean.dim, aten.min.dim, aten.sum.dim_IntList, aten.var_mean.correction,
)  # fmt: skip


def count_from_front(gm: GraphModule) -> GraphModule:
    """The graph itself, changed in place."""
    for target in REDUCTIONS:
        for node in gm.graph.find_nodes(op="call_function", target=target):
            if len(node.args) > 1 and isinstance(node.args[0], Node):
                rank = node.args[0].meta["val"].dim()
                node.update_arg(1, _from_front(node.args[1], rank))
    return gm


def _from_front(dims: Any, rank: int) -> Any:
    if isinstance(dims, list | tuple):
        return [_from_front(one, rank) for one in dims]
    return dims + rank if type(dims) is int and dims < 0 and rank else dims
