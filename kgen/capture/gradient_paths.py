"""Which nodes of Dynamo's graph have a gradient in eager: those from which something differentiable leads to a result.

A body is differentiated as a whole. Where only some of its results lead to the graph's, the others' operands get zeros, or NaN
from a derivative that is infinite, where eager has no gradient at all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import GraphModule, Node

from kgen.capture.regions import Refused, example, tensors_of

__all__ = ["are_together", "differentiated", "operands_of_results", "wants_gradient"]


def wants_gradient(node: Node) -> bool:
    """Whether a node's value has a gradient. Raises Refused where its type is not known."""
    return any(one.requires_grad for one in tensors_of(example(node)))


def are_together(results: Iterable[Node], found: set[Node]) -> bool:
    """Whether all results of a body that want gradients are among those that have them, or none."""
    return len({node in found for node in results if wants_gradient(node)}) < 2


def differentiated(gm: GraphModule) -> set[Node]:
    """All nodes that have gradients. Raises Refused."""
    found = set[Node]()
    for node in reversed(gm.graph.nodes):
        if node.op == "output":
            found.update(filter(wants_gradient, node.all_input_nodes))
        elif node in found and node.target is operator.getitem and _is_call(node.args[0]):
            found.update(filter(wants_gradient, _operands(gm, node)))
        elif node in found and not _is_call(node):
            found.update(one for one in node.all_input_nodes if one.op != "get_attr" and wants_gradient(one))
    return found


def _is_call(node: object) -> bool:
    return isinstance(node, Node) and node.target is invoke_subgraph


def _operands(gm: GraphModule, result: Node) -> Iterable[Node]:
    """The operands of a call that one of its results depends on."""
    call, number = result.args
    body = getattr(gm, str(call.args[0].target))  # type: ignore[union-attr]
    operands = call.args[2:]  # type: ignore[union-attr]
    return [operands[k] for k in sorted(operands_of_results(body)[number])]  # type: ignore[index,misc]


def operands_of_results(body: GraphModule) -> Sequence[frozenset[int]]:
    """Of each result of a body the numbers of the operands that it has gradients for. Raises Refused."""
    reached, given = dict[Node, frozenset[int]](), 0
    for node in body.graph.nodes:
        if node.op == "placeholder":
            reached[node] = frozenset([given] if wants_gradient(node) else [])
            given += 1
        elif node.op == "get_attr":
            reached[node] = frozenset()
        elif node.op != "output":
            inputs = [reached[one] for one in node.all_input_nodes]
            reached[node] = frozenset().union(*inputs) if wants_gradient(node) else frozenset()
    (output,) = body.graph.find_nodes(op="output")
    results = output.args[0]
    if not isinstance(results, tuple | list) or not all(isinstance(one, Node) for one in results):
        raise Refused("a body gives other things than tensors")
    return [reached[one] for one in results]
