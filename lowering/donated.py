"""Operands that a higher-order operator may overwrite: buffers that its bodies change and give back.

A body that writes into a carried buffer gets it, copies it, writes into the copy and returns that. Where the result of a body
is such a chain of writes, the body writes into its argument instead, and returns nothing for it. The operator as a whole then
writes into its operand, if the old contents are dead; else into one copy in front of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kgen.capture.control_flow import is_traced
from kgen.capture.notes import DONATED
from kgen.ir import values as vs
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.mutation import at_newest, plain_load, root_of
from kgen.lowering.reinplace import WRITES
from kgen.lowering.tensor import Tensor
from kgen.lowering.user_kernel import to_write

__all__ = ["RULES", "donate"]

aten = torch.ops.aten

# Which arguments are bodies whose results are the operator's, and which argument holds what they carry or get.
_BODIES: Mapping[Any, tuple[tuple[int, ...], int]] = {cond_op: ((1, 2), 3), scan_op: ((0,), 1), while_loop_op: ((1,), 2)}


def donate(gm: GraphModule) -> GraphModule:
    """A copy of the graph in which the bodies of calls write into their arguments, in place; each such call notes it."""
    gm = _copied(gm)
    calls = [node for node in gm.graph.nodes if node.target in _BODIES]
    names = [str(arg.target) for node in calls for arg in node.all_input_nodes if arg.op == "get_attr"]
    for node in calls:
        donated = _positions(gm, node)
        bodies = [_target(node, k) for k in _BODIES[node.target][0]]
        if donated and all(names.count(name) == 1 for name in bodies):
            node.meta[DONATED] = donated
            for name in bodies:
                body = _copied(getattr(gm, name))
                _write_arguments(body, donated)
                setattr(gm, name, body)
    return gm


def _copied(gm: GraphModule) -> GraphModule:
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies)).meta = dict(gm.graph.output_node().meta)
    return GraphModule(gm, graph)


def _target(node: Node, position: int) -> str:
    body: Any = node.args[position]
    return str(body.target)


def _bodies(gm: GraphModule, node: Node) -> Iterator[GraphModule]:
    for position in _BODIES[node.target][0]:
        given: Any = node.args[position]
        body = getattr(gm, str(given.target), None) if given.op == "get_attr" else None
        if isinstance(body, GraphModule) and is_traced(body) and isinstance(_results(body), tuple | list):
            yield body


def _results(body: GraphModule) -> Any:
    return body.graph.output_node().args[0]


def _positions(gm: GraphModule, node: Node) -> dict[int, int]:
    """Results of a call -> the operands that they are, with some elements changed. No operand is in it twice."""
    bodies = list(_bodies(gm, node))
    if len(bodies) != len(_BODIES[node.target][0]):
        return {}
    given: Any = node.args[_BODIES[node.target][1]]
    of_bodies = [_origins(body) for body in bodies]
    found = {k: p for k, p in of_bodies[0].items() if all(one.get(k) == p for one in of_bodies) and p < len(given)}
    if node.target is not cond_op:  # what is carried
        found = {k: p for k, p in found.items() if k == p}
    arguments = bodies[0].graph.find_nodes(op="placeholder")
    single = [p for p in found.values() if list(found.values()).count(p) == 1 and isinstance(given[p], Node)]
    single = [p for p in single if _same_strides(given[p], arguments[p])]
    return {k: p for k, p in found.items() if p in single}


def _origins(body: GraphModule) -> dict[int, int]:
    """Results of a body -> positions of the arguments that they are, with some elements changed."""
    order: dict[Node | None, int] = {node: k for k, node in enumerate(body.graph.find_nodes(op="placeholder"))}
    found = {k: _origin(body, node) for k, node in enumerate(_results(body)) if isinstance(node, Node)}
    return {k: order[node] for k, node in found.items() if node in order and _same_strides(_results(body)[k], node)}


def _same_strides(one: Node | None, other: Node | None) -> bool:
    """Whether two nodes are tensors of one type, with the same sizes and strides whatever the sizes are."""
    x, y = (None if node is None else node.meta.get("val") for node in (one, other))
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype or x.dim() != y.dim():
        return False
    pairs = [*zip(x.shape, y.shape, strict=True), *zip(x.stride(), y.stride(), strict=True)]
    return all(statically_known_true(a == b) for a, b in pairs)


def _origin(body: GraphModule, node: Node) -> Node | None:
    """The argument that a chain of writes began with."""
    while node.op == "call_function":
        below = _below(body, node)
        if below is None:
            return None
        node = below
    return node if node.op == "placeholder" else None


def _below(body: GraphModule, node: Node) -> Node | None:
    """What a node is a copy of, with some elements changed."""
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    source: Any = node.args[0] if node.args else None
    if name in WRITES or node.target is aten.clone.default:
        return source if isinstance(source, Node) else None
    if node.target is aten.copy.default:
        changed: Any = node.args[1]
        return changed if isinstance(changed, Node) and _same_strides(changed, source) else None
    if node.target is operator.getitem and source.target in _BODIES:
        position = _positions(body, source).get(node.args[1])  # type: ignore[arg-type]
        given: Any = source.args[_BODIES[source.target][1]]
        return None if position is None else given[position]
    return None


def _write_arguments(body: GraphModule, donated: Mapping[int, int]) -> None:
    """Makes a body write into its arguments, and return None in the place of results."""
    arguments = body.graph.find_nodes(op="placeholder")
    output = body.graph.output_node()
    results = list(_results(body))
    for k, position in donated.items():
        argument = arguments[position]
        for user in [one for one in argument.users if one.target is aten.clone.default and _same_strides(one, argument)]:
            if any(one is user for j, one in enumerate(results) if j != k):
                continue  # another result is what the buffer was
            results[k] = argument if results[k] is user else results[k]
            user.replace_all_uses_with(argument)
            body.graph.erase_node(user)
        if _origin_of_copy(results[k]) is not argument:
            with body.graph.inserting_before(output):
                write = body.graph.call_function(aten.copy_.default, (argument, results[k]))
                write.meta = {**output.meta, "val": argument.meta["val"]}
        results[k] = None
    output.args = (tuple(results),)
    body.recompile()


def _origin_of_copy(node: Node) -> Any:
    return node.args[0] if node.target is aten.clone.default else node


# ---- lowering ----------------------------------------------------------------------------------------------------------


def call(b: Builder, *args: Any, **kwargs: Any) -> Any:
    """A call of the operator, which writes into its operands, or into copies of them where their old contents are wanted."""
    node = b.current
    donated: Mapping[int, int] = node.meta.get(DONATED, {})
    place = _BODIES[node.target][1]
    given: list[Any] = list(args[place])
    nodes: Any = node.args[place]
    written: dict[int, Tensor] = {}
    for k, position in donated.items():
        written[k] = given[position] = to_write(b, nodes[position], given[position])
    names = [name for one in written.values() if (name := plain_load(one)) is not None]
    roots = {root_of(b, name) for name in names}
    carried = tuple(one if k in donated.values() else _apart(b, one, roots) for k, one in enumerate(given))
    whole = (*_apart(b, args[:place], roots), carried, *_apart(b, args[place + 1 :], roots))
    results = list(fallback.extern(b, node, whole, kwargs, "a higher-order operator", written=names, skipped=donated))
    return tuple(at_newest(b, written[k]) if k in written else one for k, one in enumerate(results))


def _apart(b: Builder, tree: Any, roots: set[str]) -> Any:
    """Operands with memory of their own where they are parts of what the operator writes: a copy that a program has made of a
    row is none yet, and iterations would read what others have written."""
    if isinstance(tree, tuple | list):
        return type(tree)(_apart(b, one, roots) for one in tree)
    if not isinstance(tree, Tensor) or roots.isdisjoint(root_of(b, load.attr[0]) for load in vs.loads([tree.value])):
        return tree
    return b.stored_operand(tree)


RULES = {f"torch.ops.higher_order.{name}": call for name in ("cond", "scan", "while_loop")}
