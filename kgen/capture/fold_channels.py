"""Scales and shifts of a convolution's channels multiplied into its frozen weights: ``conv(x, w, b) * s + t`` becomes
``conv(x, s * w, s * b + t)``.

This is what a batch norm in evaluation is, but it is found by what it computes: elementwise operators, one behind the other,
whose other operand is a number for each channel and depends on frozen inputs alone (the option `freezing`). The convolution may
have no other reader. Sums are rounded in other places than in eager, and scaled 16-bit weights are rounded; float16 is left
alone, whose range scaled weights might exceed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from kgen.capture.freeze import constants
from kgen.capture.notes import note
from kgen.capture.operators import operator_name
from kgen.capture.torch_adapter import fake_result
from kgen.verdict import Outcome, Reason, Verdict

__all__ = ["fold_channels"]

aten = torch.ops.aten
_CONVOLUTION = aten.convolution.default
_TRANSPOSED = 6  # the place among its arguments
_KINDS = (torch.bfloat16, torch.float32, torch.float64)
# Of which operand a result is an affine function for each value of the other one.
_EITHER = (aten.mul.Tensor, aten.add.Tensor)
_FIRST = (aten.sub.Tensor, aten.div.Tensor)


def fold_channels(gm: GraphModule, frozen: frozenset[str]) -> GraphModule:
    """The graph with scales and shifts folded: a copy, if there are any. `frozen` are the names of inputs that stay as they
    are."""
    if not frozen or not gm.graph.find_nodes(op="call_function", target=_CONVOLUTION):
        return gm
    made = GraphModule(gm, Graph())
    made.graph.output(made.graph.graph_copy(gm.graph, {})).meta = dict(gm.graph.output_node().meta)
    known = constants(made, frozen)
    if not [node for node in made.graph.find_nodes(op="call_function", target=_CONVOLUTION) if _fold(node, known)]:
        return gm
    made.graph.eliminate_dead_code()
    return made


def _fold(node: Node, known: frozenset[Node]) -> bool:
    """Folds what follows a convolution, if anything may be."""
    _, weight, bias = node.args[:3]
    if weight not in known or (bias is not None and bias not in known) or node.args[_TRANSPOSED]:
        return False
    steps = list(_steps(node, known)) if node.meta["val"].dtype in _KINDS else []
    while steps and steps[-1].operand is None:
        steps.pop()  # conversions alone change nothing
    if not steps:
        return False
    end = steps[-1].node
    with node.graph.inserting_before(end):
        made = _rewritten(node, steps)
        kept = made if made.meta["val"].dtype is end.meta["val"].dtype else _to(end, made, end.meta["val"].dtype)
    end.replace_all_uses_with(kept)
    return True


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator behind a convolution, and the numbers with which it changes channels; None if it converts them."""

    node: Node
    operand: Node | None


def _steps(node: Node, known: frozenset[Node]) -> Iterator[_Step]:
    while len(node.users) == 1:
        (user,) = node.users
        step = _step(user, node, known)
        if step is None:
            return
        yield step
        node = user


def _step(user: Node, node: Node, known: frozenset[Node]) -> _Step | None:
    made, of = user.meta.get("val"), node.meta["val"]
    if not isinstance(made, torch.Tensor) or made.shape != of.shape or made.dtype not in _KINDS:
        return None
    if user.target is aten._to_copy.default:
        return _Step(user, None) if set(user.kwargs) <= {"dtype"} and made.dtype.itemsize >= of.dtype.itemsize else None
    if user.target not in (*_EITHER, *_FIRST) or user.kwargs or len(user.args) != 2:
        return None
    place = user.args.index(node)
    other = user.args[1 - place]
    if (place == 1 and user.target in _FIRST) or not isinstance(other, Node) or other not in known:
        return None
    return _Step(user, other) if _is_per_channel(other.meta["val"], of) else None


def _is_per_channel(numbers: Any, of: torch.Tensor) -> bool:
    """Whether a tensor has one number for each channel of images, or one for all."""
    if not isinstance(numbers, torch.Tensor) or not numbers.dtype.is_floating_point or numbers.dim() > of.dim():
        return False
    sizes = [1] * (of.dim() - numbers.dim()) + list(numbers.shape)
    return sizes[1] in (1, of.shape[1]) and all(n == 1 for k, n in enumerate(sizes) if k != 1)


@dataclass(frozen=True, slots=True)
class _Affine:
    """``scale * sum + shift`` for each channel, in the widest type that a step computes in; None where a part is not there."""

    scale: Node | None
    shift: Node | None

    def after(self, step: _Step, numbers: Node) -> _Affine:
        target, place = step.node.target, step.node
        if target in (aten.add.Tensor, aten.sub.Tensor):
            if self.shift is not None:
                return replace(self, shift=_call(place, target, self.shift, numbers))
            return replace(self, shift=numbers if target is aten.add.Tensor else _call(place, aten.neg.default, numbers))
        ones = aten.reciprocal.default
        scale = _call(place, target, self.scale, numbers) if self.scale else numbers
        if self.scale is None and target is aten.div.Tensor:
            scale = _call(place, ones, numbers)
        return _Affine(scale, None if self.shift is None else _call(place, target, self.shift, numbers))


def _rewritten(node: Node, steps: list[_Step]) -> Node:
    """The convolution with other weights, where nodes are inserted."""
    image, weight, bias, *rest = node.args
    assert isinstance(weight, Node)
    kind = max((step.node.meta["val"].dtype for step in steps), key=lambda one: one.itemsize)
    channels, end = weight.meta["val"].shape[0], steps[-1].node
    affine = _Affine(None, None if bias is None else _to(end, bias, kind))  # type: ignore[arg-type]
    for step in steps:
        if step.operand is not None:
            numbers = _call(end, aten.expand.default, _call(end, aten.reshape.default, step.operand, [-1]), [channels])
            affine = affine.after(step, _to(end, numbers, kind))
    if affine.scale is not None:
        shape = [channels, *(1 for _ in weight.meta["val"].shape[1:])]
        scaled = _call(end, aten.mul.Tensor, _to(end, weight, kind), _call(end, aten.reshape.default, affine.scale, shape))
        weight = _to(end, scaled, weight.meta["val"].dtype)
    shift = None if affine.shift is None else _to(end, affine.shift, weight.meta["val"].dtype)
    made = _call(end, _CONVOLUTION, image, weight, shift, *rest)
    made.meta = {**node.meta, "val": made.meta["val"]}
    for step in steps:
        if step.operand is not None:
            name = operator_name(step.node.target)
            note(made, Verdict(name, node.name, Outcome.FOLDED, Reason.FROZEN_ALONE, detail=step.node.name))
    return made


def _to(place: Node, node: Node, kind: torch.dtype) -> Node:
    return node if node.meta["val"].dtype is kind else _call(place, aten._to_copy.default, node, dtype=kind)


def _call(place: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A call where nodes are inserted, on behalf of a node."""
    made = place.graph.call_function(target, args, kwargs)
    made.meta = {**place.meta}
    made.meta["val"] = fake_result(made)
    return made
