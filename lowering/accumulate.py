"""Adds a sparse gradient into a dense one in place.

A tied embedding's gradient is ``mm(...) + embedding_dense_backward(...)``: two tensors the size of the table, one of them
almost all zeros. Scattering the rows into the matmul's own result moves the rows alone.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import Argument

aten = torch.ops.aten
_MATMULS = (aten.mm.default, aten.addmm.default)


def accumulate(gm: GraphModule) -> GraphModule:
    """Rewrites ``matmul + embedding_dense_backward`` to an accumulating ``index_put`` into the matmul."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target is aten.add.Tensor and not node.kwargs:
            _try(gm, node)
    return gm


def _try(gm: GraphModule, node: Node) -> None:
    for summand, sparse in (node.args, node.args[::-1]):
        dense = _without_permutes(summand)
        if _is_matmul(dense) and _is_sparse(sparse) and _same_type(dense, sparse, node):
            grad, rows = sparse.args[:2]  # type: ignore[union-attr]
            with gm.graph.inserting_before(node):
                put = gm.graph.call_function(aten.index_put.default, (dense, [rows], grad, True))
            put.meta = dict(node.meta)
            node.replace_all_uses_with(put)
            unused = [n for n in node.args if isinstance(n, Node)]
            gm.graph.erase_node(node)
            _erase_unused(gm, unused)
            return


def _erase_unused(gm: GraphModule, nodes: list[Node]) -> None:
    """Removes the sparse gradient and the permutations that the sum read, now that nobody does."""
    for node in nodes:
        while not node.users and node.target in (aten.permute.default, aten.embedding_dense_backward.default):
            below = node.args[0]
            gm.graph.erase_node(node)
            assert isinstance(below, Node)
            node = below


def _without_permutes(node: Argument) -> Argument:
    """The tensor below permutations that cancel each other: what transposing a transposed weight leaves."""
    order: list[int] | None = None
    below: Argument = node
    while isinstance(below, Node) and below.target is aten.permute.default and len(below.users) == 1:
        dims = [int(d) for d in below.args[1]]  # type: ignore[union-attr, arg-type]
        order = dims if order is None else [dims[k] for k in order]
        below = below.args[0]
    return below if order is not None and order == sorted(order) else node


def _is_matmul(node: object) -> bool:
    return isinstance(node, Node) and node.target in _MATMULS and len(node.users) == 1


def _is_sparse(node: object) -> bool:
    """An embedding's gradient that nobody else reads, without a padding row or scaling by frequency."""
    if not isinstance(node, Node) or node.target is not aten.embedding_dense_backward.default or len(node.users) != 1:
        return False
    return bool(node.args[3] == -1 and not node.args[4])


def _same_type(dense: object, sparse: object, out: Node) -> bool:
    """float32 or float64 throughout: repeated rows accumulate in the result's own precision."""
    values = [n.meta.get("val") for n in (dense, sparse, out) if isinstance(n, Node)]
    tensors = [v for v in values if isinstance(v, torch.Tensor)]
    if len(tensors) < len(values):
        return False
    dtype, shape = tensors[0].dtype, tensors[0].shape
    return dtype in (torch.float32, torch.float64) and all(t.dtype == dtype and t.shape == shape for t in tensors)
