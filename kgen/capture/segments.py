"""Dynamo's graph as segments that AOTAutograd traces one by one, so that a body is traced once however often it is called.

In one graph, each call of a body by `invoke_subgraph` is a node, with all that it saves for backward. Tracing and splitting
take time for each. Here each body is a graph of its own, and so is what stands between calls. Python makes the calls. Autograd
connects them, as it does for modules that are compiled apart. No kernel reaches across these seams in one graph, either.

Where something writes into a tensor that it is given, draws random numbers or hands on other things than tensors, the graph
stays whole. So it does where only some results of a segment have gradients (`kgen/capture/gradient_paths.py`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._dynamo import compiled_autograd
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from kgen.capture.aot_parts import Part, noted_parts
from kgen.capture.batching import changes_gradients, changes_more, too_dynamic
from kgen.capture.equal_blocks import kind_of
from kgen.capture.gradient_paths import are_together, differentiated, wants_gradient
from kgen.capture.regions import Refused, example
from kgen.capture.segment_calls import Call, Calls, Tangent
from kgen.capture.torch_adapter import own_fake_mode, storage_of
from kgen.capture.trial import tried

__all__ = ["LEAST_CALLS", "Segment", "Segmented", "segments_of"]

# Fewer calls of a body are traced as fast in one graph.
LEAST_CALLS = 3
# So many segments that are no call of a body are worth being graphs apart.
MOST_BETWEEN = 8

Compiled = Callable[..., Sequence[Any]]
Compile = Callable[[GraphModule, Sequence[torch.Tensor]], Compiled]


@dataclass(frozen=True, slots=True)
class Segment:
    """A function of what the nodes `inputs` give, which makes what `outputs` give. Calls of one `key` are of one function; what
    is no call has none."""

    key: Hashable
    module: GraphModule
    inputs: tuple[Node, ...]
    outputs: tuple[Node | None, ...]  # None: nobody needs it


# ---- taking a graph apart ----------------------------------------------------------------------------------------------


def segments_of(gm: GraphModule) -> list[Segment]:
    """The segments of a graph in order; none where it stays whole."""
    bodies = [node.args[0] for node in gm.graph.nodes if node.target is invoke_subgraph]
    often = Counter(str(body.target) for body in bodies)
    if max(often.values(), default=0) < LEAST_CALLS or too_dynamic(gm):
        return []
    if any(changes_gradients(node) or changes_more(node) for node in gm.graph.nodes):
        return []
    try:
        made = list(_segments(gm, set(bodies)))
        if sum(one.key is None for one in made) > MOST_BETWEEN:
            return []
        _Proof(made).check(differentiated(gm))
    except Refused:
        return []
    return made


def _segments(gm: GraphModule, bodies: set[Any]) -> Iterator[Segment]:
    between = list[Node]()
    for node in gm.graph.nodes:
        if node.target is invoke_subgraph:
            yield from _between(gm, between)
            yield _call(gm, node)
            between = []
        elif node not in bodies and node.op not in ("placeholder", "output") and not _is_result(node):
            between.append(node)
    yield from _between(gm, between)


def _is_result(node: Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target is invoke_subgraph


def _call(gm: GraphModule, call: Node) -> Segment:
    body, name, *operands = call.args
    if not isinstance(body, Node) or call.kwargs:
        raise Refused(f"{call.name} calls in another way")
    given = tuple(one for one in operands if isinstance(one, Node))
    results: list[Node | None] = [None] * len(call.meta["example_value"])
    for user in call.users:
        number = user.args[1] if _is_result(user) else None
        if not isinstance(number, int) or results[number] is not None:
            raise Refused(f"{user.name} takes the results in another way")
        results[number] = user
    if len(given) < len(operands):
        raise Refused(f"{call.name} has an operand that is no tensor")
    key = name, body.target, tuple(kind_of(example(one)) for one in given)
    return Segment(key, getattr(gm, str(body.target)), given, tuple(results))


def _between(gm: GraphModule, nodes: Sequence[Node]) -> Iterator[Segment]:
    """What stands between two calls, as a function."""
    if not nodes:
        return
    inside, graph = set(nodes), Graph()
    given = tuple(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in inside))
    made = {node: _placeholder(graph, node) for node in given}
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    results = tuple(node for node in nodes if not set(node.users) <= inside)
    graph.output(tuple(made[node] for node in results))
    yield Segment(None, GraphModule(gm, graph), given, results)


def _placeholder(graph: Graph, node: Node) -> Node:
    made = graph.placeholder(node.name)
    made.meta = {"example_value": example(node)}
    return made


class _Proof:
    """That segments are functions of tensors, and that their gradients are those of the whole graph."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self.seen = set[Hashable]()

    def check(self, with_gradients: set[Node]) -> None:
        """Raises Refused."""
        for one in self.segments:
            self._check_values(one)
            self._check_gradients(one, with_gradients)
            if one.key is None or one.key not in self.seen:
                self.seen.add(one.key)
                self._check_body(one)

    @staticmethod
    def _check_values(one: Segment) -> None:
        values = [example(node) for node in (*one.inputs, *one.outputs) if node is not None]
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise Refused("an operand or a result is no tensor")
        if one.key is not None and len({storage_of(value) for value in values}) < len(values):
            raise Refused("tensors of a call share memory: they may be taken for one in all calls")

    @staticmethod
    def _check_gradients(one: Segment, with_gradients: set[Node]) -> None:
        needed = [node for node in one.outputs if node is not None]
        dropped = len(needed) < len(one.outputs) and any(map(wants_gradient, needed))
        if dropped or not are_together(needed, with_gradients):
            raise Refused("a result has no gradient, unlike another one")

    @staticmethod
    def _check_body(one: Segment) -> None:
        values = [example(node) for node in one.inputs]
        results, trial = tried(one.module, values, layouts=False)
        if trial.writes and len(results) > 1:
            raise Refused("what the results depend on is not known: something is written in slot")
        taken = set(map(storage_of, values))
        for result in results:
            if not isinstance(result, torch.Tensor) or (one.key is not None and storage_of(result) in taken):
                raise Refused("a result of a body is no tensor, or has no memory of its own")
            taken.add(storage_of(result))


# ---- running them ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a value is among those of a run."""

    at: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A call. What is at the slots `dead` is not needed behind it. `part` is what it comes to, if it is nothing more."""

    run: Compiled
    part: Part | None
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    dead: tuple[int, ...]


class Segmented:
    """What a graph computes, from its segments. Each value is let go behind the last segment that reads it."""

    def __init__(self, gm: GraphModule, segments: Sequence[Segment], compiled: Compile) -> None:
        """Compiles the segments, calls of one function once."""
        self._inputs = len(gm.graph.find_nodes(op="placeholder"))
        nodes = [
            *gm.graph.find_nodes(op="placeholder"),
            *(node for one in segments for node in one.outputs if node is not None),
        ]
        slots = {node: slot for slot, node in enumerate(nodes)}
        (output,) = gm.graph.find_nodes(op="output")
        self._size = len(slots)
        self._result: Any = map_arg(output.args[0], lambda node: cast(Any, _Slot(slots[node])))
        kept = {leaf.at for leaf in pytree.tree_leaves(self._result) if isinstance(leaf, _Slot)}
        self._steps = _steps(segments, slots, kept, compiled)
        self._made = [slot for slot in range(self._inputs, self._size) if slot in kept]
        self._calls = self._calls_of_all(segments, [example(node) for node in nodes])

    def _calls_of_all(self, segments: Sequence[Segment], values: Sequence[torch.Tensor]) -> Calls | None:
        """All steps as one; None where AOTAutograd does more around one of them than calling it."""
        calls = [_call_of(step, values) for step in self._steps]
        if None in calls or not segments or _has_hooks():
            return None
        constant = [number for number, slot in enumerate(self._made) if not values[slot].requires_grad]
        return Calls(cast(list[Call], calls), self._size, self._inputs, self._made, constant)

    def __call__(self, *args: Any) -> Any:
        values: list[Any] = [*args, *[None] * (self._size - len(args))]
        if self._calls is not None and not compiled_autograd.compiled_autograd_enabled:
            for slot, made in zip(self._made, self._calls(args), strict=True):
                values[slot] = made
        else:
            for step in self._steps:
                _run(step, values)
        return pytree.tree_map(lambda leaf: values[leaf.at] if isinstance(leaf, _Slot) else leaf, self._result)


def _has_hooks() -> bool:
    """Whether saved tensors go through hooks that AOTAutograd may have traced into its graphs."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _call_of(step: _Step, values: Sequence[torch.Tensor]) -> Call | None:
    part = step.part
    if part is None or not part.is_plain(len(step.inputs), len(step.outputs)):
        return None
    slots = [step.outputs[number] for number in part.tangents] if part.node is not None else []
    if None in slots:
        return None  # a gradient that nothing says the sizes of
    tangents = (
        Tangent(slot, values[slot].shape, values[slot].dtype, values[slot].device) for slot in slots if slot is not None
    )
    outputs = tuple((slot, number) for number, slot in enumerate(step.outputs) if slot is not None)
    return Call(part, step.inputs, outputs, len(step.outputs), step.dead, tuple(tangents))


def _run(step: _Step, values: list[Any]) -> None:
    results = step.run(*[values[slot] for slot in step.inputs])
    for slot, made in zip(step.outputs, results, strict=True):
        if slot is not None:
            values[slot] = made
    for slot in step.dead:
        values[slot] = None


def _steps(segments: Sequence[Segment], slots: dict[Node, int], kept: set[int], compiled: Compile) -> list[_Step]:
    calls = [
        (tuple(slots[node] for node in one.inputs), tuple(None if node is None else slots[node] for node in one.outputs))
        for one in segments
    ]
    last = {slot: k for k, (inputs, outputs) in enumerate(calls) for slot in (*inputs, *outputs) if slot is not None}
    dead: list[list[int]] = [[] for _ in calls]
    for slot, k in last.items():
        if slot not in kept:
            dead[k].append(slot)
    made, steps = dict[Hashable, tuple[Compiled, Part | None]](), list[_Step]()
    for one, (inputs, outputs), gone in zip(segments, calls, dead, strict=True):
        key = (one.module,) if one.key is None else one.key
        if key not in made:
            with noted_parts() as parts:
                run = compiled(one.module, _examples(one))
            made[key] = run, parts[0] if len(parts) == 1 else None
        steps.append(_Step(*made[key], inputs, outputs, tuple(gone)))
    return steps


def _examples(one: Segment) -> list[torch.Tensor]:
    """Tensors without data, and without history."""
    values = [example(node) for node in one.inputs]
    with own_fake_mode(values):
        return [value.detach().requires_grad_(value.requires_grad) for value in values]
