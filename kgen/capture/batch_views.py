"""Views of a tensor that have a loop's iterations as their first dimension, as nodes of Dynamo's graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from kgen.capture.accesses import Access, Span
from kgen.capture.regions import Refused
from kgen.capture.torch_adapter import own_fake_mode

__all__ = ["Writer", "batch_view"]

aten = torch.ops.aten

ITERATIONS = -1  # among the dimensions of a view, the one of iterations


class Writer:
    """Writes nodes with their example values in front of a node. `meta` says what user's line they come from."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before
        self.made = list[Node]()
        self.mode = own_fake_mode([node.meta.get("example_value") for node in graph.nodes])
        self.has_gradients = torch.is_grad_enabled() or any("grad_enabled" in str(node.target) for node in graph.nodes)
        self.meta = {k: v for k, v in before.meta.items() if k not in ("example_value", "tensor_dict", "grapharg")}

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """A call of a method of the first argument."""
        value = self._value(args, kwargs, lambda tensor, *rest, **named: getattr(tensor, name)(*rest, **named))
        with self.graph.inserting_before(self.before):
            return self.noted(self.graph.call_method(name, args, kwargs), value)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """A call of a function."""
        value = self._value(args, kwargs, target)
        with self.graph.inserting_before(self.before):
            return self.noted(self.graph.call_function(target, args, kwargs), value)

    def copy(self, node: Node, inputs: dict[Node, Node]) -> Node:
        """A copy of a traced node."""
        with self.graph.inserting_before(self.before):
            if node.target is aten._to_copy.default and not isinstance(node.args[0], Node):  # a number, as vmap makes it one
                made = self.graph.call_function(aten.scalar_tensor.default, node.args, node.kwargs)
            else:
                made = self.graph.node_copy(node, inputs.__getitem__)
        made.meta = {}
        return self.noted(made, node.meta["val"])

    def _value(self, args: Any, kwargs: Any, function: Callable[..., Any]) -> Any:
        args, kwargs = map_arg((args, kwargs), lambda node: node.meta["example_value"])
        try:
            with self.mode, torch.no_grad():
                return function(*args, **kwargs)
        except Exception as cause:
            raise Refused(f"iterations have no view: {cause}") from cause

    def noted(self, node: Node, value: Any) -> Node:
        node.meta.update(self.meta, example_value=value)
        self.made.append(node)
        return node

    def erase(self) -> None:
        """Takes back all that was written."""
        for node in reversed(self.made):
            self.graph.erase_node(node)


def batch_view(writer: Writer, base: Node, access: Access, count: int) -> Node:
    """What iterations touch of a tensor, with iterations in front. It is a view unless iterations run backwards."""
    sizes = base.meta["example_value"].shape
    index = [_slice_of(span, size, count) for span, size in zip(access.spans, sizes, strict=True)]
    node = base if all(entry == slice(None) for entry in index) else writer.call(operator.getitem, base, tuple(index))
    axes = [d for d, span in enumerate(access.spans) if span.kept or span.advance]
    for d in access.moving:
        span, at = access.spans[d], axes.index(d)
        if span.kept:
            node = _windows(writer, node, at, span, count)
            axes.insert(at, ITERATIONS)
        else:
            node = writer.method("flip", node, at) if span.advance < 0 else node
            axes[at] = ITERATIONS
    return _in_front(writer, node, axes)


def _slice_of(span: Span, size: int, count: int) -> Any:
    """What an index has for one dimension: what all iterations touch, and of windows all between."""
    if not span.advance:
        return _slice(span.start, span.start + span.extent, span.step, size) if span.kept else span.start
    low, high = span.hull(count)
    if not span.kept:
        return _slice(low, high, abs(span.advance), size)
    return _slice(low, span.start + span.advance * count if _tiles(span, size, count) else high, 1, size)


def _slice(start: int, stop: int, step: int, size: int) -> slice:
    return slice(None) if (start, stop, step) == (0, size, 1) else slice(start, stop, step)


def _tiles(span: Span, size: int, count: int) -> bool:
    """Whether windows stand side by side, each in a tile of its own."""
    return span.advance >= span.extent and span.start + span.advance * count <= size


def _windows(writer: Writer, node: Node, at: int, span: Span, count: int) -> Node:
    """Splits a dimension into iterations and what one of them touches."""
    if span.advance < 0:
        node, span = writer.method("flip", node, at), _mirrored(span)
        return writer.method("flip", _windows(writer, node, at, span, count), at + 1)
    every: tuple[slice, ...] = (slice(None),) * (at + 1)
    if node.meta["example_value"].shape[at] == span.advance * count:
        node = writer.method("unflatten", node, at, (count, span.advance))
    else:
        node = writer.method("movedim", writer.method("unfold", node, at, span.extent, span.advance), -1, at + 1)
    window = _slice(0, span.extent, span.step, node.meta["example_value"].shape[at + 1])
    return node if window == slice(None) else writer.call(operator.getitem, node, (*every, window))


def _mirrored(span: Span) -> Span:
    return Span(span.start, -span.advance, span.length, span.step, span.kept)


def _in_front(writer: Writer, node: Node, axes: list[int]) -> Node:
    """One dimension of iterations, in front: where several have been indexed, their diagonal."""
    axes = list(axes)
    while axes.count(ITERATIONS) > 1:
        one, other = [at for at, axis in enumerate(axes) if axis == ITERATIONS][:2]
        node = writer.method("diagonal", node, 0, one, other)
        axes = [axis for at, axis in enumerate(axes) if at not in (one, other)] + [ITERATIONS]
    at = axes.index(ITERATIONS)
    return node if at == 0 else writer.method("movedim", node, at, 0)
