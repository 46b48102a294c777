"""Freezing: an inference graph without what depends on its module's tensors alone (the option `freezing`).

`freeze` splits an aten graph in two. The *setup* computes constants from frozen inputs; the rest gets them as further inputs,
behind its own. When the setup runs, how long its results are kept, and what happens when a tensor does change after all, is
the host's affair (`kgen/host/frozen.py`).

What becomes a constant is decided by memory alone, for whatever is computed once is faster than at each call:

- nothing that is larger than the frozen tensors it is made of (int8 weights that become floats, anything expanded), for it
  would be read in their place; what is small all the same may be;
- no views, which cost nothing, so that kernels see the tensors behind them;
- no results of the graph: they belong to the caller, who may write to them;
- nothing random, nothing with effects, no operators but torch's own.

A tensor that the graph writes is not frozen, nor is one that a higher-order operator gets to see.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node

from kgen.capture.fold_weights import fold_weights
from kgen.capture.operators import is_pure
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["Freezing", "constants", "freeze", "frozen_inputs"]

# Bytes that a constant may always have.
SMALL = 64 << 10
# Views, although no schema says that their result aliases their argument.
_ALIASES = ("aten::_unsafe_view", "aten::lift_fresh", "aten::_reshape_alias")


@dataclass(frozen=True, slots=True)
class Freezing:
    """What a graph has of frozen tensors. `inputs` are positions of placeholders whose elements stay as they are, the first
    `arguments` of which come from the caller and the others from `setup`, a graph that takes the arguments `uses`."""

    inputs: frozenset[int]
    arguments: int
    uses: tuple[int, ...] = ()
    setup: GraphModule | None = None
    verdicts: tuple[Verdict, ...] = field(default=())


def freeze(gm: GraphModule, static: frozenset[int], scales: bool = True) -> tuple[GraphModule, Freezing]:
    """The graph with constants as further inputs, and where these come from. `static` are the positions of inputs that belong
    to the module. With `scales` weights of norms become part of the matrices behind them."""
    if scales:
        gm = fold_weights(gm, frozen_inputs(gm, static))
    return _Split(gm, static).run()


def frozen_inputs(gm: GraphModule, static: frozenset[int]) -> frozenset[str]:
    """The names of inputs among those of the module that nothing in the graph writes."""
    written = set(_written(gm.graph.nodes))
    inputs = enumerate(gm.graph.find_nodes(op="placeholder"))
    return frozenset(n.name for k, n in inputs if k in static and _is_plain(n) and n not in written)


def constants(gm: GraphModule, frozen: frozenset[str]) -> frozenset[Node]:
    """Nodes that depend on nothing but the inputs of these names."""
    found = {node for node in gm.graph.find_nodes(op="placeholder") if node.name in frozen}
    for node in gm.graph.nodes:
        computed = node.target is operator.getitem or is_pure(node.target)
        if computed and node.all_input_nodes and found.issuperset(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


class _Split:
    def __init__(self, gm: GraphModule, static: frozenset[int]) -> None:
        self.gm = gm
        self.nodes: list[Node] = list(gm.graph.nodes)
        self.inputs = [n for n in self.nodes if n.op == "placeholder"]
        self.static = static
        self.verdicts: list[Verdict] = []
        self.leaves: dict[Node, frozenset[Node]] = {}  # of what can be computed once: the frozen inputs that it depends on
        self.folded: dict[Node, None] = {}
        self.asked: set[Node] = set()

    def run(self) -> tuple[GraphModule, Freezing]:
        written = set(_written(self.nodes))
        for k, node in enumerate(self.inputs):
            if k in self.static and _is_plain(node):
                if node in written:
                    self.verdicts.append(Verdict(node.name, "", Outcome.NOT_FROZEN, Reason.WRITTEN))
                else:
                    self.leaves[node] = frozenset([node])
        frozen = list(self.leaves)
        returned = set(_returned(self.nodes[-1]))
        for node in self.nodes:
            if node.op in ("call_function", "get_attr") and self._computable(node):
                self.leaves[node] = frozenset().union(*(self.leaves[n] for n in node.all_input_nodes))
        for node in self.nodes:
            if node not in self.leaves:
                for one in node.all_input_nodes:
                    self._ask(one, returned)
        position = {node: k for k, node in enumerate(self.inputs)}
        inputs = frozenset(position[n] for n in frozen) | frozenset(range(len(position), len(position) + len(self.folded)))
        verdicts = tuple(self.verdicts)
        if not self.folded:
            return self.gm, Freezing(inputs, len(position), verdicts=verdicts)
        used = sorted({position[n] for one in self.folded for n in self.leaves[one]})
        return self._rest(), Freezing(inputs, len(position), tuple(used), self._setup(used), verdicts)

    def _computable(self, node: Node) -> bool:
        """Whether a node can be computed without any input but frozen ones."""
        if not all(one in self.leaves for one in node.all_input_nodes) or not _is_plain(node):
            return False
        if node.op == "get_attr" or node.target is operator.getitem:
            return True
        return is_pure(node.target) and not any(map(_is_symbolic, _leaves((node.args, node.kwargs))))

    def _ask(self, node: Node, returned: set[Node]) -> None:
        """Notes what the rest of the graph needs for the result of a node: a constant, or else those among its arguments."""
        pending = [node]
        while pending:
            node = pending.pop()
            if node in self.asked or not self.leaves.get(node) or node.op == "placeholder":
                continue
            self.asked.add(node)
            refusal = None if _is_view(node) else self._why_not(node, returned)
            if _is_view(node) or not isinstance(node.meta["val"], torch.Tensor) or refusal is not None:
                pending += node.all_input_nodes
            else:
                self.folded[node] = None
            if not _is_view(node) and isinstance(node.meta["val"], torch.Tensor):
                name = str(node.target)
                outcome = Outcome.FROZEN if refusal is None else Outcome.NOT_FROZEN
                self.verdicts.append(Verdict(name, node.name, outcome, refusal or Reason.FROZEN_ALONE))

    def _why_not(self, node: Node, returned: set[Node]) -> Reason | None:
        if node in returned:
            return Reason.RETURNED
        made, of = _bytes(node), sum(map(_bytes, self.leaves[node]))
        return Reason.LARGER if made > max(of, SMALL) else None

    def _setup(self, used: list[int]) -> GraphModule:
        """From the arguments `used` to the constants."""
        wanted = {*self.folded, *(self.inputs[k] for k in used)}
        for node in reversed(self.nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        graph, made = Graph(), dict[Node, Node]()
        for node in self.nodes:
            if node in wanted:
                made[node] = graph.node_copy(node, made.__getitem__)
        graph.output([made[node] for node in self.folded])
        return GraphModule(self.gm, graph)

    def _rest(self) -> GraphModule:
        """The graph that gets the constants behind its own inputs. AOTAutograd keeps the one it handed over."""
        graph, made = Graph(), dict[Node, Node]()
        for node in self.inputs:
            made[node] = graph.node_copy(node)
        for node in self.folded:
            made[node] = graph.placeholder(f"frozen_{node.name}")
            made[node].meta = {"val": node.meta["val"]}
        needed = self._needed()
        for node in self.nodes:
            if node in needed and node not in made:
                made[node] = graph.node_copy(node, made.__getitem__)
        return GraphModule(self.gm, graph)

    def _needed(self) -> set[Node]:
        """Nodes of the rest: what never could be computed once, and what that needs."""
        found = {node for node in self.nodes if not self.leaves.get(node)}
        for node in reversed(self.nodes):
            if node in found and node not in self.folded:
                found.update(node.all_input_nodes)
        return found


# ---- what operators do --------------------------------------------------------------------------------------------------


def _is_view(node: Node) -> bool:
    """Whether the result aliases an argument, or may."""
    if node.target is operator.getitem:
        return _is_view(node.args[0])  # type: ignore[arg-type]
    if not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema
    return schema.name in _ALIASES or any(one.alias_info is not None for one in schema.returns)


def _written(nodes: Iterable[Node]) -> Iterator[Node]:
    """Inputs that some node writes, or may."""
    for node in nodes:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        if isinstance(node.target, OpOverload):
            named = {one.name: one for one in node.target._schema.arguments}
            given = dict(zip(named, node.args, strict=False)) | node.kwargs
            trees = [tree for name, tree in given.items() if getattr(named[name].alias_info, "is_write", False)]
        else:
            trees = [node.args, node.kwargs] if isinstance(node.target, torch._ops.HigherOrderOperator) else []
        yield from map(_owner, (leaf for leaf in _leaves(trees) if isinstance(leaf, Node)))


def _owner(node: Node) -> Node:
    """Whose memory a view is in."""
    while node.op == "call_function" and _is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _returned(output: Node) -> Iterator[Node]:
    """Nodes whose memory a result of the graph is in."""
    for node in output.all_input_nodes:
        yield node
        while node.op == "call_function" and _is_view(node) and isinstance(node.args[0], Node):
            node = node.args[0]
            yield node


# ---- values -------------------------------------------------------------------------------------------------------------


def _is_plain(node: Node) -> bool:
    """Whether a node is strided tensors of known sizes."""
    values = _leaves(node.meta.get("val"))
    return bool(values) and all(isinstance(v, torch.Tensor) and v.layout == torch.strided and _is_static(v) for v in values)


def _is_static(value: torch.Tensor) -> bool:
    return not any(map(_is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _bytes(node: Node) -> int:
    return sum(v.numel() * v.element_size() for v in _leaves(node.meta["val"]))


def _leaves(tree: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(tree)
