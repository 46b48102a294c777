"""Operators with bodies of their own: `cond`, `while_loop`, `scan`, `map`, `invoke_subgraph`.

A body goes through all stages by itself, once, however often the operator runs it. The operator remains a call from the host
program: it runs the compiled bodies without torch's dispatcher in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import generic_scan, scan_op
from torch._higher_order_ops.while_loop import while_loop_op, while_loop_stack_output_op
from torch.fx import GraphModule, Node

from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.branches import both
from kgen.capture.higher_order import NoMeaning, expand
from kgen.capture.independent import over_rows
from kgen.capture.notes import DONATED, note
from kgen.capture.torch_adapter import batching_rules_only, is_too_large
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["OPERATORS", "Body", "compile_bodies", "direct", "is_traced", "with_batches"]

Compile = Callable[[str, GraphModule], CompiledGraph]


class Loops(Protocol):
    """What steps through iterations of compiled bodies: `kgen.host.loops`."""

    def repeat(self, condition: Any, body: Any, given: list[Any], kept: tuple[bool, ...], /) -> Sequence[Any]: ...

    def scan(
        self, body: Any, carried: list[Any], rows: list[Any], others: list[Any], kept: tuple[bool, ...], /
    ) -> Sequence[Any]: ...


class Body(torch.nn.Module):
    """A compiled body, called with its arguments as the graph was.

    It writes into the arguments `donated.values()`, which are the results `donated`, in the place of which it gives None."""

    def __init__(
        self,
        compiled: CompiledGraph,
        strides: Sequence[tuple[int, ...] | None],
        kind: Callable[[Any], Any],
        donated: Mapping[int, int],
        loops: Loops,
    ) -> None:
        super().__init__()
        self.run, self.strides, self.kind, self.donated = getattr(compiled, "run", compiled), strides, kind, donated
        self.loops = loops

    def forward(self, *args: Any) -> Any:
        """All results, as the graph has them."""
        given = list(args)
        for position in self.donated.values():
            given[position] = given[position].clone()
        results = list(self.run(self.placed(given)))
        for k, position in self.donated.items():
            results[k] = given[position]
        return self.kind(results)

    def written(self, *args: Any) -> Any:
        """The results, with None for those that are arguments now."""
        return self.kind(self.run(self.placed(args)))

    def placed(self, args: Sequence[Any]) -> list[Any]:
        """Arguments with the strides that the body was compiled for."""
        return [_restrided(arg, strides) for arg, strides in zip(args, self.strides, strict=True)]

    __call__ = forward


def _restrided(arg: Any, strides: tuple[int, ...] | None) -> Any:
    """A tensor with the strides that the body was compiled for: iterations get slices, or what other graphs have made."""
    if strides is None or arg.stride() == strides:
        return arg
    return torch.empty_strided(arg.shape, strides, dtype=arg.dtype, device=arg.device).copy_(arg)


def _only(results: Any) -> Any:
    return results[0]


def compile_bodies(gm: GraphModule, compile_body: Compile, loops: Loops) -> GraphModule:
    """Puts compiled bodies in the place of graphs. Calls may share a body, which is compiled once."""
    for node in list(gm.graph.nodes):
        if node.target in OPERATORS:
            for name, graph in _graphs(gm, node):
                compiled = compile_body(name, _with_list_of_results(graph))
                donated = node.meta.get(DONATED, {}) if isinstance(_results(graph), tuple | list) else {}
                setattr(gm, name, Body(compiled, _known_strides(graph), _kind_of_results(graph), donated, loops))
    return gm


def with_batches(gm: GraphModule) -> GraphModule:
    """The graph with a batch for all that is one, and with both branches of what would take longer to decide."""
    _choose_in_bodies(gm)
    chosen = _written_out(gm, {cond_op: both}, Verdict("", "", Outcome.FUSED, Reason.BOTH_BRANCHES))
    verdict = Verdict("", "", Outcome.BATCHED, Reason.INDEPENDENT_ITERATIONS, detail="each touches a row of its own")
    return _written_out(chosen, {map_impl: _over_all, while_loop_op: over_rows}, verdict)


def _choose_in_bodies(gm: GraphModule) -> None:
    """Innermost first: a branch with a branch in it is as simple as both of those, and so is a loop."""
    for name, body in list(gm.named_children()):
        if isinstance(body, GraphModule) and is_traced(body):
            _choose_in_bodies(body)
            setattr(gm, name, expand(body, {cond_op: both}))


def _written_out(gm: GraphModule, meanings: Mapping[Any, Callable[..., Any]], verdict: Verdict) -> GraphModule:
    """The graph with what the operators mean, where they mean it; the verdict says of which but `map` that is so."""
    names = [node.name for node in gm.graph.nodes if node.target in meanings and node.target is not map_impl]
    made = expand(gm, meanings)
    left = {node.name for node in made.graph.nodes if node.target in meanings}
    calls = [node for node in made.graph.nodes if node.op == "call_function"]
    for name in names:
        if name not in left and calls:
            note(calls[-1], replace(verdict, producer=name))
    return made


def _graphs(gm: GraphModule, node: Node) -> Iterator[tuple[str, GraphModule]]:
    """The bodies of a call that are not compiled yet, and that tracing has given types and sizes."""
    for arg in node.all_input_nodes:
        if arg.op == "get_attr":
            graph = getattr(gm, str(arg.target), None)
            if isinstance(graph, GraphModule) and is_traced(graph):
                yield str(arg.target), graph


def is_traced(graph: GraphModule) -> bool:
    """Whether each node that gives something has a value. Checks give nothing."""
    nodes = (node for node in graph.graph.nodes if node.op in ("placeholder", "call_function"))
    return all("val" in node.meta or not node.users for node in nodes)


def _results(graph: GraphModule) -> Any:
    return graph.graph.output_node().args[0]


def _kind_of_results(graph: GraphModule) -> Callable[[Any], Any]:
    results = _results(graph)
    if not isinstance(results, tuple | list):
        return _only
    return list if isinstance(results, list) else tuple


def _with_list_of_results(graph: GraphModule) -> GraphModule:
    """A copy of a graph that returns a tuple."""
    made, copies = torch.fx.Graph(), dict[Node, Node]()
    results = made.graph_copy(graph.graph, copies)
    made.output(tuple(results) if isinstance(results, tuple | list) else (results,)).meta = dict(graph.graph.output_node().meta)
    return GraphModule(graph, made)


def _known_strides(graph: GraphModule) -> list[tuple[int, ...] | None]:
    """Of each argument; None for numbers, for what has no known strides, and for what nobody reads, which may have no value."""
    values = [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]
    return [_strides(value) if isinstance(value, torch.Tensor) and value.layout == torch.strided else None for value in values]


def _strides(value: torch.Tensor) -> tuple[int, ...] | None:
    strides = tuple(value.stride())
    return strides if all(type(stride) is int for stride in strides) else None


def _over_all(body: GraphModule, xs: Sequence[Any], others: Sequence[Any]) -> Any:
    """`map` with a batch. Raises NoMeaning where vmap has no batch of the body, or one that is too large."""
    given = max(map(_bytes, (*xs, *others)))
    for node in body.graph.nodes:
        if is_too_large(int(xs[0].shape[0]) * _bytes(node.meta.get("val")), given):
            raise NoMeaning
    dims = (*(0 for _ in xs), *(None for _ in others))
    try:
        with batching_rules_only():
            return torch.vmap(body, in_dims=dims, randomness="error")(*xs, *others)
    except Exception as cause:
        raise NoMeaning from cause


def _bytes(value: Any) -> int:
    """Of a tensor, else 0. Raises NoMeaning for one whose size is a symbol."""
    if not isinstance(value, torch.Tensor):
        return 0
    if any(type(size) is not int for size in value.shape):
        raise NoMeaning
    return value.numel() * value.element_size()


# ---- running -----------------------------------------------------------------------------------------------------------


def _dense(operator: Any) -> Callable[..., Any]:
    """What torch does for an operator on dense tensors."""
    implementation: Callable[..., Any] = operator.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]
    return implementation


def _cond(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    chosen = true_fn if pred else false_fn
    return chosen.written(*operands) if isinstance(chosen, Body) else chosen(*operands)


def _while(cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any], **more: Any) -> Any:
    """Steps in the native runtime. Results that the body writes into carried buffers are None."""
    if more.get("mutated_arg_indices") or not isinstance(cond_fn, Body) or not isinstance(body_fn, Body):
        return _dense(while_loop_op)(cond_fn, body_fn, carried, additional, **more)
    kept = tuple(k in body_fn.donated for k in range(len(carried)))
    given = body_fn.placed([*carried, *additional])
    return body_fn.loops.repeat(cond_fn, body_fn, given, kept)


def _invoke(subgraph: Any, _identifier: Any, *operands: Any) -> Any:
    return subgraph(*operands)


def _scan(combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any] = ()) -> Sequence[Any]:
    """The last carried values, and each iteration's other results as rows. Buffers that the body writes into are None."""
    count = xs[0].shape[0] if xs else 0
    if not count:
        result: Sequence[Any] = generic_scan(combine_fn, init, xs, additional_inputs=additional_inputs)
        return result
    if isinstance(combine_fn, Body):
        kept = tuple(k in combine_fn.donated for k in range(len(init)))
        return combine_fn.loops.scan(combine_fn, list(init), list(xs), list(additional_inputs), kept)
    carry, rows = list(init), list[Any]()
    for k in range(count):
        made = combine_fn(*carry, *(x[k] for x in xs), *additional_inputs)
        carry, results = list(made[: len(init)]), made[len(init) :]
        rows = rows or [None if one is None else one.new_empty((count, *one.shape)) for one in results]
        for row, one in zip(rows, results, strict=True):
            if row is not None:
                row[k].copy_(one)
    return [*carry, *rows]


OPERATORS: Mapping[Any, Callable[..., Any]] = {
    cond_op: _cond,
    invoke_subgraph: _invoke,
    map_impl: _dense(map_impl),
    scan_op: _scan,
    while_loop_op: _while,
    while_loop_stack_output_op: _dense(while_loop_stack_output_op),
}


def direct(operator: Any) -> Callable[..., Any]:
    """What the host program calls for a higher-order operator."""
    return OPERATORS.get(operator, operator)
