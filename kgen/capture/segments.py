"""Dynamo's graph as segments that AOTAutograd traces one by one, so that a body which is called many times is traced once.

A body that `invoke_subgraph` calls n times is one node n times in AOTAutograd's graph, with all that it saves for backward: its time
grows with n. Here each body is a graph of its own, and so is what stands between calls. The calls are made from Python, and
autograd connects them, as it does for modules that are compiled apart. Kernels do not reach across such seams anyway.

Where something writes into a tensor that it is given, draws random numbers or hands on other things than tensors, the graph
stays whole.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from kgen.capture.batching import changes_gradients, changes_more, too_dynamic
from kgen.capture.equal_blocks import kind_of
from kgen.capture.gradient_paths import are_together, differentiated, wants_gradient
from kgen.capture.regions import Refused, example
from kgen.capture.torch_adapter import own_fake_mode
from kgen.capture.trial import storage_of, tried

__all__ = ["LEAST_CALLS", "Segment", "Segmented", "segments_of"]

# Fewer calls of a body are traced as fast in one graph.
LEAST_CALLS = 3
# So many segments that are no call of a body are worth being graphs apart.
MOST_BETWEEN = 8

Compiled = Callable[..., Sequence[Any]]
Compile = Callable[[GraphModule, Sequence[torch.Tensor]], Compiled]


@dataclass(frozen=True, slots=True)
class Segment:
    """A function of what the nodes `inputs` give, which makes what `outputs` give. Those of one `key` are one function."""

    key: Hashable
    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node | None, ...]  # None: nobody needs it


def segments_of(gm: GraphModule) -> list[Segment]:
    """The segments of a graph in order; none where it stays whole."""
    calls = [node for node in gm.graph.nodes if node.target is invoke_subgraph]
    often = Counter(node.args[0].target for node in calls)
    if not calls or max(often.values()) < LEAST_CALLS or too_dynamic(gm) or not _means_the_same(gm):
        return []
    try:
        made = list(_Segmentation(gm).segments())
        if sum(one.key is None for one in made) > MOST_BETWEEN:
            return []
        _Proof(made).check(differentiated(gm))
    except Refused:
        return []
    return made


def _means_the_same(gm: GraphModule) -> bool:
    """Whether no node changes what others mean."""
    return not any(changes_gradients(node) or changes_more(node) for node in gm.graph.nodes)


class _Segmentation:
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.bodies = {node.args[0] for node in gm.graph.nodes if node.target is invoke_subgraph}

    def segments(self) -> Iterator[Segment]:
        between = list[Node]()
        for node in self.gm.graph.nodes:
            if node.target is invoke_subgraph:
                yield from self._between(between)
                yield self._call(node)
                between = []
            elif not self._is_outside(node):
                between.append(node)
        yield from self._between(between)

    def _is_outside(self, node: Node) -> bool:
        """Arguments, bodies, results of calls, and the graph's own."""
        result = node.target is operator.getitem and node.args[0].target is invoke_subgraph  # type: ignore[union-attr]
        return result or node in self.bodies or node.op in ("placeholder", "output")

    def _call(self, call: Node) -> Segment:
        body, name, *operands = call.args
        if not isinstance(body, Node) or not all(isinstance(one, Node) for one in operands) or call.kwargs:
            raise Refused(f"{call.name} has an operand that is no node")
        count = len(call.meta["example_value"])
        results: list[Node | None] = [None] * count
        for user in call.users:
            if user.target is not operator.getitem or results[user.args[1]] is not None:  # type: ignore[index]
                raise Refused(f"{call.name} has results that are taken otherwise")
            results[user.args[1]] = user  # type: ignore[index]
        kinds = tuple(kind_of(example(one)) for one in operands)  # type: ignore[arg-type]
        return Segment((name, body.target, kinds), getattr(self.gm, str(body.target)), tuple(operands), tuple(results))  # type: ignore[arg-type]

    def _between(self, nodes: Sequence[Node]) -> Iterator[Segment]:
        """What stands between two calls, as a function."""
        if not nodes:
            return
        inside, graph, made, given = set(nodes), Graph(), dict[Node, Node](), list[Node]()

        def taken(node: Node) -> Node:
            if node not in made:
                given.append(node)
                with graph.inserting_after(last[0]) if last else graph.inserting_before():
                    made[node] = new = graph.placeholder(node.name)
                last[:] = [new]
                new.meta = {"example_value": example(node)}
            return made[node]

        last = list[Node]()
        for node in nodes:
            made[node] = graph.node_copy(node, taken)
        results = tuple(node for node in nodes if not set(node.users) <= inside)
        graph.output(tuple(made[node] for node in results))
        yield Segment(None, GraphModule(self.gm, graph), tuple(given), results)


class _Proof:
    """That nothing writes into what it is given, or has more results than tensors."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.seen = set[Hashable]()

    def check(self, with_gradients: set[Node]) -> None:
        """Raises Refused."""
        for one in self.segments:
            if not are_together(filter(None, one.outputs), with_gradients) or (None in one.outputs and self._trains(one)):
                raise Refused("a result has no gradient, unlike another one")
            values = [example(node) for node in one.inputs]
            if not all(isinstance(value, torch.Tensor) for value in values):
                raise Refused("an operand is no tensor")
            if one.key is not None and len(set(map(storage_of, values))) < len(values):
                raise Refused("two operands share memory: they would be taken for one in all calls")
            if not all(isinstance(example(node), torch.Tensor) for node in one.outputs if node is not None):
                raise Refused("a result is no tensor")
            if one.key is None or one.key not in self.seen:
                self.seen.add(one.key)
                self._check_body(one, values)

    @staticmethod
    def _trains(one: Segment) -> bool:
        return any(wants_gradient(node) for node in one.outputs if node is not None)

    @staticmethod
    def _check_body(one: Segment, values: Sequence[torch.Tensor]) -> None:
        results, trial = tried(one.module, values, layouts=False)
        if trial.writes and len(results) > 1:
            raise Refused("what the results depend on is not known: something is written in place")
        taken = set(map(storage_of, values))
        for result in results:
            if not isinstance(result, torch.Tensor) or (one.key is not None and storage_of(result) in taken):
                raise Refused("a result of a body is no tensor, or has no memory of its own")
            taken.add(storage_of(result))


# ---- running them ------------------------------------------------------------------------------------------------------


class Segmented:
    """What a graph computes, from its segments. Each value is let go behind the last segment that reads it."""

    def __init__(self, gm: GraphModule, segments: Sequence[Segment], compiled: Compile) -> None:
        """Compiles the segments, equal ones once."""
        arguments = gm.graph.find_nodes(op="placeholder")
        places = {node: place for place, node in enumerate(arguments)}
        made = dict[Hashable, Compiled]()
        steps = []
        for one in segments:
            run = made.get(one.key) if one.key is not None else None
            if run is None:
                run = compiled(one.module, _examples(one))
                if one.key is not None:
                    made[one.key] = run
            for node in one.outputs:
                if node is not None:
                    places.setdefault(node, len(places))
            steps.append((run, [places[node] for node in one.inputs], [None if n is None else places[n] for n in one.outputs]))
        (result,) = gm.graph.find_nodes(op="output")
        self._result = torch.fx.map_arg(result.args[0], lambda node: _Place(places[node]))
        kept = {leaf.at for leaf in pytree.tree_leaves(self._result) if isinstance(leaf, _Place)}
        self._size, self._steps = len(places), _with_deaths(steps, kept)

    def __call__(self, *args: Any) -> Any:
        values: list[Any] = [*args, *[None] * (self._size - len(args))]
        for run, inputs, outputs, dead in self._steps:
            for place, made in zip(outputs, run(*[values[place] for place in inputs]), strict=True):
                if place is not None:
                    values[place] = made
            made = None
            for place in dead:
                values[place] = None
        return pytree.tree_map(lambda leaf: values[leaf.at] if isinstance(leaf, _Place) else leaf, self._result)


@dataclass(frozen=True, slots=True)
class _Place:
    at: int


def _with_deaths(steps: Sequence[Any], kept: set[int]) -> list[Any]:
    """Each step with the places of what nothing needs behind it."""
    last = {place: k for k, (_, inputs, outputs) in enumerate(steps) for place in (*inputs, *outputs) if place is not None}
    dead: dict[int, list[int]] = {k: [] for k in range(len(steps))}
    for place, k in last.items():
        if place not in kept:
            dead[k].append(place)
    return [(*step, dead[k]) for k, step in enumerate(steps)]


def _examples(one: Segment) -> list[torch.Tensor]:
    """Tensors without data, and without history."""
    values = [example(node) for node in one.inputs]
    with own_fake_mode(values):
        return [value.detach().requires_grad_(value.requires_grad) for value in values]
