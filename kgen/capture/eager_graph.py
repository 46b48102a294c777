"""A graph that torch runs node by node: the executor of `fallback="all"`, and of graphs that cannot be compiled."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_aggregate

from kgen.capture.aot_cache import NotSerializable

if TYPE_CHECKING:
    from kgen.failures import Failure

__all__ = ["EagerGraph"]


class EagerGraph:
    """A `CompiledGraph` without any code of ours."""

    def __init__(self, gm: GraphModule, output_strides: tuple[Any, ...], failures: Sequence[Failure] = ()) -> None:
        self.gm = gm
        self.output_strides = output_strides
        self.replaced = bool(failures)
        calls = (f"extern.{n.target}" for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload))
        self.coverage: Mapping[str, int] = Counter([*calls, *(f"replaced.{one}" for one in failures)])

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return Interpreter(self.gm).boxed_run(args)

    def serialize(self) -> bytes:
        """Nodes and constants. Not torch.fx's own pickling: that traces the graph again on loading, and would turn operators
        without tensor arguments, `kgen::seeds` among them, into constants. Output strides matter at compile time only."""
        if self.replaced:
            raise NotSerializable("another process may be able to compile it")
        nodes = list(self.gm.graph.nodes)
        position = {node: k for k, node in enumerate(nodes)}
        constants = {str(n.target): _constant(self.gm, n) for n in nodes if n.op == "get_attr"}
        try:
            return pickle.dumps(([_written(n, position) for n in nodes], constants))
        except (pickle.PicklingError, TypeError, AttributeError) as cause:
            raise NotSerializable(str(cause)) from cause

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        rows, constants = pickle.loads(data)
        graph = Graph()
        made: list[Node] = []
        for op, name, target, args, kwargs in rows:
            args, kwargs = map_aggregate((args, kwargs), lambda leaf: leaf.read(made) if isinstance(leaf, _Reference) else leaf)
            found = target.read(made) if isinstance(target, _Operator) else target
            made.append(graph.create_node(op, found, args, kwargs, name))
        return cls(GraphModule(constants, graph), ())


@dataclass(frozen=True, slots=True)
class _Reference:
    """The result of an earlier node."""

    position: int

    def read(self, made: list[Node]) -> Node:
        return made[self.position]


@dataclass(frozen=True, slots=True)
class _Operator:
    """An operator, which does not pickle by itself."""

    namespace: str
    name: str
    overload: str

    def read(self, _made: list[Node]) -> Any:
        return getattr(getattr(getattr(torch.ops, self.namespace), self.name), self.overload)


def _written(node: Node, position: Mapping[Node, int]) -> tuple[Any, ...]:
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = _Operator(target.namespace, target._schema.name.split("::")[1], target._overloadname)
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise NotSerializable(f"{target} has graphs of its own")
    tree: Any = (node.args, node.kwargs)
    args, kwargs = map_aggregate(tree, lambda leaf: _Reference(position[leaf]) if isinstance(leaf, Node) else leaf)  # type: ignore
    return node.op, node.name, target, args, kwargs


def _constant(gm: GraphModule, node: Node) -> torch.Tensor:
    found: Any = gm
    for part in str(node.target).split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        raise NotSerializable(f"{node.target} is not a tensor")
    return found
