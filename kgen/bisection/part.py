"""Parts of an aten graph that run alone, on the values that they have within the whole graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

__all__ = ["Part", "Unit", "made_part", "part_of", "units_of", "values_of"]

# An operator's node with those that take its results apart: what a part has as a whole, or not at all.
Unit = tuple[Node, ...]
Values = Mapping[Node, Any]
# Methods are called in Dynamo's graphs alone.
_CALLS = ("call_function", "call_method")


@dataclass(frozen=True, slots=True)
class Part:
    """A graph whose inputs are values of the whole one; `shape_env` is that of its fake tensors, whose sizes are numbers."""

    gm: GraphModule
    inputs: tuple[Any, ...]
    shape_env: ShapeEnv

    @property
    def calls(self) -> list[Node]:
        return [n for n in self.gm.graph.nodes if n.op in _CALLS and n.target is not operator.getitem]


def units_of(gm: GraphModule) -> list[Unit]:
    """The calls of a graph, in order."""
    nodes = [n for n in gm.graph.nodes if n.op in _CALLS]
    return [(n, *_taken_apart(n)) for n in nodes if not _takes_apart(n)]


def _takes_apart(node: Node) -> bool:
    return node.target is operator.getitem


def _taken_apart(node: Node) -> list[Node]:
    """Items of a node's result, and items of these."""
    items = [user for user in node.users if _takes_apart(user)]
    return [one for item in items for one in (item, *_taken_apart(item))]


def values_of(gm: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """What each node of an aten graph gives. Writes are left out, so that arguments and their views keep what every node read:
    an aten graph writes into its arguments at its end."""
    run = Interpreter(gm, garbage_collect_values=False)
    run.args_iter = iter(inputs)
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op != "output":
                run.env[node] = run.env[_written(node)] if _writes(node) else run.run_node(node)
    return dict(run.env)


def _writes(node: Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _written(node: Node) -> Node:
    source = node.args[1]
    assert isinstance(source, Node)
    return source


def part_of(gm: GraphModule, units: Iterable[Unit], values: Values) -> Part:
    """These units alone. Their operands from outside are inputs, sizes from outside are numbers. Results are what anything
    outside reads of them, or nothing at all."""
    inside = {node for unit in units for node in unit}
    builder = _Builder(Graph(), inside, values)
    for node in gm.graph.nodes:
        if node in inside:
            builder.add(node)
    builder.graph.output([builder.made[n] for n in gm.graph.nodes if n in inside and _is_result(n, inside, values)])
    return made_part(GraphModule(gm, builder.graph), builder.inputs)


def made_part(gm: GraphModule, inputs: Sequence[Any]) -> Part:
    """A graph with its inputs as a part: its nodes get fake values of these sizes."""
    shapes = ShapeEnv()
    FakeTensorProp(gm, FakeTensorMode(shape_env=shapes, static_shapes=True, allow_non_fake_inputs=True)).propagate(*inputs)
    return Part(gm, tuple(inputs), shapes)


def _is_result(node: Node, inside: set[Node], values: Values) -> bool:
    if _writes(node) or not isinstance(values[node], torch.Tensor):
        return False
    return not node.users or any(user not in inside for user in node.users)


class _Builder:
    """Copies nodes into a graph, and makes inputs of what they read from outside."""

    def __init__(self, graph: Graph, inside: set[Node], values: Values) -> None:
        self.graph, self.inside, self.values = graph, inside, values
        self.made: dict[Node, Any] = {}
        self.inputs: list[Any] = []

    def add(self, node: Node) -> None:
        for one in node.all_input_nodes:
            if one not in self.inside and one not in self.made:
                self.made[one] = self._outside(one)
        copy = self.graph.create_node(
            node.op, node.target, torch.fx.node.map_arg(node.args, self.made.__getitem__),
            torch.fx.node.map_arg(node.kwargs, self.made.__getitem__), node.name, node.type,
        )  # fmt: skip
        copy.meta = dict(node.meta)
        self.made[node] = copy

    def _outside(self, node: Node) -> Any:
        """What stands for a node outside: a number itself, or an input."""
        value = self.values[node]
        if node.op == "get_attr":
            return self._first(lambda: self.graph.get_attr(str(node.target)))
        if not isinstance(value, torch.Tensor):
            return value
        made = self._first(lambda: self.graph.placeholder(node.name))
        self.inputs.append(value)
        return made

    def _first(self, make: Callable[[], Node]) -> Node:
        """A node in front of all calls; inputs keep the order in which they are made."""
        call = next((n for n in self.graph.nodes if n.op in _CALLS), None)
        with self.graph.inserting_before(call) if call is not None else nullcontext():
            return make()
