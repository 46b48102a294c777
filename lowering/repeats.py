"""Operators that compute what another one has computed.

AOTAutograd drops these in training, where it looks for what to keep for the backward; a graph for inference has them as they
were written: rotary embeddings made anew in each layer, masks, matmuls with the same operands.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_flatten

from kgen.capture.operators import PLAIN, is_pure


def drop_repeats(gm: GraphModule) -> None:
    """Lets users of a call read an earlier equal one. Both stay where both are in memory that the graph returns, for its owner
    may write to one of them; where memory was written in between; where what they give is no strided tensor; and where sizes
    are known at run time alone, for these have names."""
    returned = {place for node in gm.graph.output_node().all_input_nodes for place in _storages(_values(node)) or ()}
    known: dict[Hashable, tuple[Node, set[int]]] = {}  # calls, and the memory in which their results lie
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is not operator.getitem and not is_pure(node.target):
            if _may_write(node.target):
                known.clear()
            continue
        values = _values(node)
        storages = _storages(values)
        if storages is None or any(_is_symbolic(value) and free_unbacked_symbols(value) for value in values):
            continue
        first, others = known.setdefault(_key(node, values), (node, storages))
        is_returned = not returned.isdisjoint(storages)
        if first is node or (is_returned and not returned.isdisjoint(others)):
            continue
        if is_returned:
            returned |= others
        node.replace_all_uses_with(first)
        gm.graph.erase_node(node)


def _is_symbolic(value: torch.Tensor) -> bool:
    """Whether some size is known at run time alone, or is a symbol."""
    return not all(type(one) is int for one in (*value.shape, *value.stride(), value.storage_offset()))


def _may_write(target: Any) -> bool:
    """Whether a call may change a tensor. Python's own functions are of numbers."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    return getattr(target, "__module__", "") not in ("_operator", "math", "torch")


def _key(node: Node, values: Sequence[torch.Tensor]) -> Hashable:
    """Equal for equal calls with results in one layout: of numbers the type counts, and the sign of a zero."""
    leaves, shape = tree_flatten((node.args, node.kwargs))
    layouts = tuple(str(value.stride()) if _is_symbolic(value) else value.stride() for value in values)
    return (
        node.target,
        shape,
        layouts,
        tuple((type(leaf), leaf if type(leaf) in (Node, *PLAIN) else repr(leaf)) for leaf in leaves),
    )


def _values(node: Node) -> list[Any]:
    return tree_flatten(node.meta.get("val"))[0]


def _storages(values: Sequence[Any]) -> set[int] | None:
    """The memory in which a node's results lie; None where that is not known, or they are no tensors."""
    if not all(isinstance(value, torch.Tensor) and value.layout is torch.strided for value in values):
        return None
    return {value.untyped_storage()._cdata for value in values} or None
