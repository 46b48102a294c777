"""Weights of norms multiplied into frozen matrices: ``(x * r * g) @ w`` becomes ``(x * r) @ (g[:, None] * w)``.

The weight of a norm runs along the axis that the matmul behind it sums over, so it cannot leave the sum as other scales do
(scale hoisting), but it can change sides. Where both are frozen (the option `freezing`) the matrix is scaled once, and
what remains in front of the matmul are rows and their scales: no operand to compute.

That is so where nothing but such matmuls needs the weighted rows. Matrices are left alone if they are computed from something
smaller, such as bytes, which would be read in their place; and those of float16, whose range the scaled ones might exceed.
A scaled bfloat16 matrix is rounded, in the place of the weighted rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

aten = torch.ops.aten

# Matmuls, and the place of their left operand among the arguments; the right one follows.
_MATMULS: dict[Any, int] = {aten.mm.default: 0, aten.addmm.default: 1}
_RESHAPED = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_TURNED = (aten.permute.default, aten.t.default, aten.transpose.int, aten.alias.default)
_KINDS = (torch.bfloat16, torch.float32, torch.float64)


def fold_weights(gm: GraphModule, frozen: frozenset[str]) -> GraphModule:
    """The graph with weights folded: a copy, if there are any. `frozen` are the names of inputs that stay as they are."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {})).meta = dict(gm.graph.output_node().meta)
    if not [node for node in list(graph.nodes) if _fold(node, frozen)]:
        return gm
    graph.eliminate_dead_code()
    return GraphModule(gm, graph)


def _fold(node: Node, frozen: frozenset[str]) -> bool:
    """Takes the weight out of a node that weights rows, if it may."""
    if node.target is not aten.mul.Tensor or not all(isinstance(one, Node) for one in node.args):
        return False
    rows, weight = node.all_input_nodes[0], node.all_input_nodes[-1]
    if not _is_input(weight, frozen):
        rows, weight = weight, rows
    if not _weights(node, rows, weight, frozen):
        return False
    found = list(_matmuls(node))
    matmuls = [matmul for reader, matmul in found if matmul is not None and _may_scale(reader, matmul, frozen)]
    if not found or len(matmuls) < len(found):
        return False
    for matmul in matmuls:
        _scale(matmul, weight)
    kind = node.meta["val"].dtype
    with node.graph.inserting_before(node):
        plain = rows if rows.meta["val"].dtype is kind else _call(node, aten._to_copy.default, rows, dtype=kind)
    node.replace_all_uses_with(plain)
    return True


def _weights(node: Node, rows: Node, weight: Node, frozen: frozenset[str]) -> bool:
    """Whether the node multiplies each row by the elements of a frozen vector."""
    made, of, by = (one.meta["val"] for one in (node, rows, weight))
    if not all(isinstance(one, torch.Tensor) for one in (made, of, by)) or not _is_input(weight, frozen):
        return False
    return bool(of.shape == made.shape and by.dim() == 1 and made.dim() > 1 and by.shape[0] == made.shape[-1])


def _matmuls(node: Node) -> Iterator[tuple[Node, Node | None]]:
    """What reads the rows, past conversions and other shapes of the same rows: a node and the matmul that it is read by; None
    for any other reader."""
    for user in node.users:
        same = isinstance(user.meta.get("val"), torch.Tensor) and user.meta["val"].shape[-1:] == node.meta["val"].shape[-1:]
        converted = user.target is aten._to_copy.default and user.meta["val"].dtype in _KINDS
        if same and user.args[0] is node and (converted or user.target in _RESHAPED):
            yield from _matmuls(user)
        else:
            yield node, user if user.target in _MATMULS else None


def _may_scale(reader: Node, matmul: Node, frozen: frozenset[str]) -> bool:
    """Whether the rows are the matmul's left operand and nothing else of it, and the right one is frozen as it is stored."""
    place = _MATMULS[matmul.target]
    others = [one for k, one in enumerate(matmul.args) if k != place]
    matrix = matmul.args[place + 1]
    if matmul.args[place] is not reader or reader in others or not isinstance(matrix, Node):
        return False
    source = matrix
    while source.op == "call_function" and source.target in _TURNED:
        source = source.args[0]  # type: ignore[assignment]
    return _is_input(source, frozen) and matrix.meta["val"].dtype in _KINDS


def _scale(matmul: Node, weight: Node) -> None:
    """Multiplies a matmul's right operand by the weight, row by row."""
    place = _MATMULS[matmul.target] + 1
    matrix = matmul.args[place]
    assert isinstance(matrix, Node)
    with matmul.graph.inserting_before(matmul):
        scaled = _call(matmul, aten.mul.Tensor, matrix, _call(matmul, aten.unsqueeze.default, weight, 1))
        kind = matrix.meta["val"].dtype
        if scaled.meta["val"].dtype is not kind:
            scaled = _call(matmul, aten._to_copy.default, scaled, dtype=kind)
    matmul.update_arg(place, scaled)


def _call(place: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call where nodes are inserted, on behalf of a node."""
    made = place.graph.call_function(target, args, kwargs)
    given = [one.meta["val"] if isinstance(one, Node) else one for one in args]
    made.meta = {**place.meta, "val": target(*given, **kwargs)}
    return made


def _is_input(node: Any, frozen: frozenset[str]) -> bool:
    return isinstance(node, Node) and node.op == "placeholder" and node.name in frozen
