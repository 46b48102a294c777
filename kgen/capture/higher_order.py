"""`flex_attention` and its gradient as the operators that they stand for.

FlexAttention reaches a compiler as one node whose score and mask functions are graphs for a single element. torch defines the
node's meaning by an implementation of ordinary operators (`torch._higher_order_ops.flex_attention`): it maps both graphs over
all scores. Traced with the graph's own fake tensors, that implementation takes the node's place. From there on the scores are
values like any others. Block-sparse lists of a `BlockMask` drop out: they repeat what its mask function says.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import (
    flex_attention,
    flex_attention_backward,
    sdpa_dense,
    sdpa_dense_backward,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from kgen.capture import torch_adapter
from kgen.capture.decompositions import TABLE

__all__ = ["NoMeaning", "expand"]

aten = torch.ops.aten

MEANINGS: Mapping[Any, Callable[..., Any]] = {
    flex_attention: sdpa_dense,
    flex_attention_backward: sdpa_dense_backward,
}

# Which argument of the gradient holds the graph of its score function's own gradients, and which the tensors that the score
# function captures; gradients of that graph before those of captured tensors: of a score and its four indices.
OWN_GRADIENTS, CAPTURED, BEFORE_CAPTURED = 8, 12, 5


def expand(gm: GraphModule, meanings: Mapping[Any, Callable[..., Any]] = MEANINGS) -> GraphModule:
    """The graph with every node of `meanings` written out. It is a new one where there are such nodes."""
    found = [node for node in gm.graph.nodes if node.target in meanings]
    if not found:
        return gm
    graph, copies = torch.fx.Graph(), dict[Node, Node]()
    graph.output(graph.graph_copy(gm.graph, copies)).meta = dict(gm.graph.output_node().meta)
    made = GraphModule(gm, graph)
    known: dict[Hashable, GraphModule] = {}
    for node in found:
        _Expansion(made, copies[node], meanings[node.target], known).run()
    made.graph.eliminate_dead_code()
    made.graph.lint()
    made.recompile()
    return made


# What a note on a node says of its results.
_OF_RESULTS = ("val", "unbacked_bindings")


class NoMeaning(Exception):
    """Raised by a meaning that does not cover a node, which then stays as it is."""


class _Expansion:
    """The replacement of one node. `known` are traced meanings: equal layers have equal ones, and tracing one takes as long
    as compiling what comes of it."""

    def __init__(self, gm: GraphModule, node: Node, meaning: Callable[..., Any], known: dict[Hashable, GraphModule]) -> None:
        self.gm, self.graph, self.node, self.meaning, self.known = gm, gm.graph, node, meaning, known

    def run(self) -> None:
        flat, spec = pytree.tree_flatten((self.node.args, self.node.kwargs))
        given = list(
            dict.fromkeys(arg for arg in flat if isinstance(arg, Node) and not isinstance(self._value(arg), GraphModule))
        )
        try:
            traced = self._memoised(flat, spec, given)
        except NoMeaning:
            return
        with self.graph.inserting_before(self.node):
            results = self._with_zeros(self._copied(traced, given))
        self._replace(self.node, results)

    def _value(self, node: Node) -> Any:
        return operator.attrgetter(str(node.target))(self.gm) if node.op == "get_attr" else node.meta["val"]

    def _memoised(self, flat: list[Any], spec: Any, given: list[Node]) -> GraphModule:
        key = self._key(flat, spec, given)
        if key is None:
            return self._traced(flat, spec, given)
        if key not in self.known:
            self.known[key] = self._traced(flat, spec, given)
        return self.known[key]

    def _key(self, flat: list[Any], spec: Any, given: list[Node]) -> Hashable | None:
        """Equal for nodes with one traced meaning. None where that may depend on more than static tensors and plain numbers."""
        values = [self._value(node) for node in given]
        positions = {node: k for k, node in enumerate(given)}
        bodies = any(isinstance(arg, Node) and arg not in positions for arg in flat)
        if bodies or self.node.target in MEANINGS or not all(map(_is_static, values)):
            return None
        tensors = tuple((v.shape, v.stride(), v.storage_offset(), v.dtype, v.device, v.requires_grad) for v in values)
        arguments = [(Node, positions[arg]) if isinstance(arg, Node) else (type(arg), arg) for arg in flat]
        if not all(one is Node or issubclass(one, _PLAIN) for one, _ in arguments):
            return None
        return self.node.target, repr(spec), tuple(arguments), tensors

    def _traced(self, flat: list[Any], spec: Any, given: list[Node]) -> GraphModule:
        """The meaning as a graph of functional aten operators, a function of the values of `given`."""

        def meaning(*values: Any) -> Any:
            known = dict(zip(given, values, strict=True))
            whole = [known[arg] if arg in known else self._body(arg) if isinstance(arg, Node) else arg for arg in flat]
            args, kwargs = pytree.tree_unflatten(whole, spec)
            return self.meaning(*args, **kwargs)

        values = [self._differentiable(self._value(node), node) for node in given]
        with torch_adapter.fake_mode_of(self.node), torch.no_grad():
            return _without_empty_rows(make_fx(meaning, TABLE, _allow_non_fake_inputs=True)(*values))

    def _body(self, node: Node) -> Any:
        """A graph that another operator takes; one of one element, which vmap is to map over all of them, takes no symbols."""
        value = self._value(node)
        return _ScalarTensors(value) if isinstance(value, GraphModule) and self.node.target in MEANINGS else value

    def _differentiable(self, value: Any, node: Node) -> Any:
        """A captured tensor as one that requires a gradient where the score function's own gradients have one of it: the
        meaning asks for that. The node itself stands for gradients of all captured tensors, wanted or not."""
        if self.node.target is not flex_attention_backward or not isinstance(value, torch.Tensor):
            return value
        captured: Any = self.node.args[CAPTURED]
        body: Any = self.node.args[OWN_GRADIENTS]
        own = self._value(body)
        gradients = own.graph.output_node().args[0][BEFORE_CAPTURED:]
        wanted = any(one is node and grad is not None for one, grad in zip(captured, gradients, strict=True))
        return value.detach().requires_grad_(wanted)

    def _copied(self, traced: GraphModule, given: list[Node]) -> Any:
        """Copies the traced nodes to before the node, and gives what they return."""
        env: dict[Node, Any] = dict(zip(_placeholders(traced), given, strict=True))
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                env[node] = self._constant(operator.attrgetter(str(node.target))(traced))
            elif node.target is aten.copy_.default:  # into memory that is new, and has no views
                env[node] = env[node.args[0]] = self.graph.call_function(aten.copy.default, map_arg(node.args, env.__getitem__))
            elif node.target is aten._to_copy.default and not isinstance(node.args[0], Node):  # a number, as vmap makes it one
                env[node] = self.graph.call_function(aten.scalar_tensor.default, node.args, node.kwargs)
            elif node.op == "call_function":
                env[node] = self.graph.node_copy(node, env.__getitem__)
            elif node.op == "output":
                return map_arg(node.args[0], env.__getitem__)
            else:
                continue
            env[node].meta = self._meta(node)
        raise AssertionError("a graph without an output")

    def _with_zeros(self, results: Any) -> Any:
        """The results with zeros for gradients of captured tensors that the score function has none of: one that it takes a
        size of may be the query, whose gradients torch adds up."""
        if self.node.target is not flex_attention_backward:
            return results
        *others, gradients = results
        captured: Any = self.node.args[CAPTURED]
        return (
            *others,
            tuple(self._zeros(one) if grad is None else grad for one, grad in zip(captured, gradients, strict=True)),
        )

    def _zeros(self, like: Any) -> Node | None:
        if not isinstance(like, Node) or not isinstance(self._value(like), torch.Tensor):
            return None
        made = self.graph.call_function(aten.zeros_like.default, (like,))
        made.meta = {**self._meta(self.node), "val": torch.zeros_like(self._value(like))}
        return made

    def _constant(self, value: torch.Tensor) -> Node:
        """A single number is one in the graph, wherever its tensor is: what a mask puts in may be -inf."""
        if type(value) is torch.Tensor and value.dim() == 0:
            kind: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            return self.graph.call_function(aten.scalar_tensor.default, (value.item(),), kind)
        name = next(name for k in itertools.count() if not hasattr(self.gm, name := f"_expanded_constant{k}"))
        self.gm.register_buffer(name, value, persistent=False)
        return self.graph.get_attr(name)

    def _meta(self, node: Node) -> dict[str, Any]:
        """Where the user's code called what is replaced, and what the new node says of its own results: the numbers that a loop
        counts are results of the loop, not of each node that it is made of."""
        kept = {k: v for k, v in self.node.meta.items() if k not in (*_OF_RESULTS, "tensor_meta", "eager_input_vals")}
        return kept | {k: node.meta[k] for k in _OF_RESULTS if k in node.meta}

    def _replace(self, node: Node, results: Any) -> None:
        """Puts results in the place of a node that stands for a tuple of them: whoever reads it picks one."""
        for user in list(node.users):
            result = results[user.args[1]]
            if isinstance(result, Node):
                user.replace_all_uses_with(self._as_traced(result, user))
                self.graph.erase_node(user)
            else:  # a tuple, or what nobody reads
                self._replace(user, result)
        self.graph.erase_node(node)

    def _as_traced(self, result: Node, user: Node) -> Node:
        """The result in the dtype and with the strides that the node has it in: torch's own meaning leaves the log-sum-exp of
        float64 as it is, and a batch of transposed rows is transposed, where `map` stacks them. Views of it were traced for
        the node's strides, and would see other elements."""
        has, wanted = result.meta.get("val"), user.meta.get("val")
        if not isinstance(has, torch.Tensor) or not isinstance(wanted, torch.Tensor):
            return result
        with self.graph.inserting_before(user):
            if has.dtype is not wanted.dtype:
                result = self.graph.call_function(aten._to_copy.default, (result,), {"dtype": wanted.dtype})
                result.meta = {**user.meta, "val": has.to(wanted.dtype)}
            return result if _placement(has) == _placement(wanted) else self._restrided(result, user)

    def _restrided(self, result: Node, user: Node) -> Node:
        """A copy whose dimensions follow each other in memory as those of the node's result do."""
        order = torch_adapter.stride_order(user.meta["val"])
        back = [order.index(d) for d in range(len(order))]
        contiguous: dict[str, Any] = {"memory_format": torch.contiguous_format}
        for target, more, kind in ((aten.permute, (order,), {}), (aten.clone, (), contiguous), (aten.permute, (back,), {})):
            value = result.meta["val"]
            result = self.graph.call_function(target.default, (result, *more), kind)
            result.meta = {**user.meta, "val": target.default(value, *more, **kind)}
        return result


def _placement(value: torch.Tensor) -> tuple[Any, ...]:
    """The strides of the dimensions that have some, as expressions where they are symbols."""
    known = zip(value.shape, torch_adapter.stride_keys(value), strict=True)
    return tuple(stride for size, stride in known if type(size) is not int or size != 1)


class _ScalarTensors(torch.fx.Interpreter):
    """Runs a graph with tensors for sizes that are symbols where operators want tensors: vmap makes these of numbers alone."""

    def __call__(self, *args: Any) -> Any:
        results = self.run(*args)
        return [*results] if isinstance(results, list) else results

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, torch._ops.OpOverload):
            wanted = [isinstance(argument.type, torch.TensorType) for argument in target._schema.arguments]
            args = tuple(
                aten.scalar_tensor.default(arg, dtype=torch.int64) if is_tensor and isinstance(arg, torch.SymInt) else arg
                for arg, is_tensor in zip(args, wanted, strict=False)
            )
        return super().call_function(target, args, kwargs)


_PLAIN = (int, float, str, torch.dtype, torch.device, type(None))


def _is_static(value: Any) -> bool:
    if not isinstance(value, FakeTensor) or value.layout != torch.strided:
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _without_empty_rows(gm: GraphModule) -> GraphModule:
    """The graph with no question for rows of -inf in front of their log-sum-exp, which is -inf by itself. Nothing else needs
    these scores then but the softmax and the log-sum-exp."""
    for node in gm.graph.find_nodes(op="call_function", target=aten.where.self):
        condition, number, total = node.args
        plain = total.target is aten.logsumexp.default and len(total.args) == 2
        if plain and _is_minus_infinity(number) and _is_empty(condition, *total.args):
            node.replace_all_uses_with(total)
    gm.graph.eliminate_dead_code()
    return gm


def _is_minus_infinity(node: Node) -> bool:
    return node.target is aten.scalar_tensor.default and bool(node.args[0] == -math.inf)


def _is_empty(condition: Node, scores: Node, axes: list[int]) -> bool:
    """Whether a condition is that all scores along the axes are -inf: not any that is not."""
    negated = condition.target is aten.logical_not.default
    inside: Any = condition.args[0] if negated else condition
    if not negated or inside.target is not aten.any.dim or [*inside.args[1:]] != axes:
        return False
    [other] = inside.args[0].all_input_nodes if inside.args[0].target is aten.logical_not.default else [None]
    return other is not None and other.target is aten.eq.Scalar and other.args[0] is scores and bool(other.args[1] == -math.inf)


def _placeholders(gm: GraphModule) -> Iterator[Node]:
    return (node for node in gm.graph.nodes if node.op == "placeholder")
