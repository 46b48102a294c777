"""Softmaxes of what their rows' maxima were subtracted from become those of the rows:

    softmax(x - max(x))          ->  softmax(x)
    softmax((x - max(x)) * 32)   ->  softmax(x * 32)

A softmax subtracts the maximum itself, so the weights are the same, and so are rows that are NaN or infinite. Models subtract
it against overflow (GPT-OSS, CogView). This is done in Dynamo's graph: the gradient of the maximum adds zero to each row, but
AOTAutograd writes it as a sum and a scatter over all scores.

In that graph tensors may be written in place, and gradients be switched off: the nodes from the maximum to the softmax are
known ones, which do neither.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["drop_row_shifts"]

PAIRS: frozenset[Any] = frozenset({"max", torch.max})  # of numbers and positions
MAXIMA: frozenset[Any] = PAIRS | {"amax", torch.amax}
SOFTMAXES: frozenset[Any] = frozenset({"softmax", torch.softmax, torch.nn.functional.softmax})
DIFFERENCES: frozenset[Any] = frozenset({"sub", operator.sub, torch.sub, "__sub__"})
CASTS: frozenset[Any] = frozenset({"float", "to"})
# They leave a number of each row what it is.
SAME: frozenset[Any] = frozenset({"detach", "unsqueeze", torch.unsqueeze})
FACTORS: frozenset[Any] = frozenset({"mul", operator.mul, torch.mul})
QUOTIENTS: frozenset[Any] = frozenset({"div", operator.truediv, torch.div})
ITEMS: frozenset[Any] = frozenset({operator.getitem, getattr})
# They change neither their arguments nor whether gradients are wanted.
PLAIN = MAXIMA | SOFTMAXES | DIFFERENCES | CASTS | SAME | FACTORS | QUOTIENTS | ITEMS


def drop_row_shifts(gm: GraphModule) -> None:
    """Leaves the subtractions out, in place."""
    found = [made for node in gm.graph.nodes if (made := _shifted(node)) is not None]
    for reader, difference in found:
        reader.replace_input_with(difference, _args(difference)[0])
        _erase(gm, difference)
    if found:
        gm.graph.lint()
        gm.recompile()


def _shifted(softmax: Node) -> tuple[Node, Node] | None:
    """The subtraction in front of a softmax, behind who reads it."""
    if softmax.target not in SOFTMAXES or not softmax.args:
        return None
    value, axis = _value(softmax), _axis(softmax, 1)
    reader, node = softmax, softmax.args[0]
    factor = 1.0
    while isinstance(node, Node) and len(node.users) == 1 and not _is_difference(node):
        number = _number(node)
        if number is None or number <= 0 or factor != 1.0:
            return None
        factor, reader, node = number, node, node.args[0]
    if value is None or axis is None or not isinstance(node, Node) or len(node.users) != 1 or not _is_difference(node):
        return None
    x, top = _args(node)
    maximum = _maximum(top, x, axis % max(value.dim(), 1))
    if maximum is None or not _fits(x, value, factor) or not _are_plain_between(maximum, softmax):
        return None
    return reader, node


def _is_difference(node: Node) -> bool:
    return node.target in DIFFERENCES and len(node.args) == 2 and not node.kwargs and isinstance(node.args[0], Node)


def _number(node: Node) -> float | None:
    """By what a node multiplies another one, which comes first; 1 for a cast between floats."""
    if node.target in CASTS:
        return 1.0 if _is_cast(node) else None
    if node.target not in FACTORS | QUOTIENTS or len(node.args) != 2 or node.kwargs or not isinstance(node.args[0], Node):
        return None
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, int | float) or number == 0:
        return None
    return float(number) if node.target in FACTORS else 1.0 / number


def _is_cast(node: Node) -> bool:
    values = [_value(one) for one in (node, *node.all_input_nodes)]
    [made, *given] = values
    return len(given) == 1 and made is not None and given[0] is not None and _is_no_narrower(made, given[0])


def _is_no_narrower(made: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether each number of one type is a number of the other: what was subtracted may have made it smaller."""
    both = made.dtype.is_floating_point and given.dtype.is_floating_point
    return both and torch.promote_types(made.dtype, given.dtype) is made.dtype and made.device == given.device


def _fits(x: Any, value: torch.Tensor, factor: float) -> bool:
    """Whether rows that are multiplied by a number do not overflow: it is no larger than what they were divided by."""
    given = _value(x)
    if given is None or given.shape != value.shape or not _is_no_narrower(value, given):
        return False
    divided = _number(x) if x.target in QUOTIENTS else None
    return factor * (divided or 1.0) <= 1.0


def _are_plain_between(first: Node, last: Node) -> bool:
    """Whether nothing from one node to a later one may write into a tensor: the rows would be others by then."""
    node = first.next
    while node is not last and node.target in PLAIN and "out" not in node.kwargs:
        node = node.next
    return node is last


def _maximum(node: Any, x: Node, axis: int) -> Node | None:
    """The maximum of each row, where a node is that with one element along the axis."""
    rank, kept = _rank(x), False
    while isinstance(node, Node) and node.target in SAME:
        if node.target != "detach":
            if kept or len(node.args) != 2 or not isinstance(node.args[1], int) or node.args[1] % rank != axis:
                return None
            kept = True
        node = node.args[0]
    if not isinstance(node, Node):
        return None
    maxima = MAXIMA - PAIRS  # of a pair alone there is one for all elements, or of two tensors
    if node.target in ITEMS:
        node, which = node.args
        if which not in (0, "values"):
            return None
        maxima = PAIRS
    if not isinstance(node, Node) or node.target not in maxima or node.args[:1] != (x,):
        return None
    own, keeps = _axis(node, 1), _keeps(node)
    return node if own is not None and own % rank == axis and keeps is not kept else None


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _axis(node: Node, position: int) -> int | None:
    found: Any = node.args[position] if len(node.args) > position else node.kwargs.get("dim", node.kwargs.get("axis"))
    if isinstance(found, tuple | list) and len(found) == 1:
        [found] = found
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _keeps(node: Node) -> bool:
    kwargs: Mapping[str, Any] = node.kwargs
    return bool(node.args[2] if len(node.args) > 2 else kwargs.get("keepdim", kwargs.get("keepdims", False)))


def _rank(node: Node) -> int:
    value = _value(node)
    return 1 if value is None else max(value.dim(), 1)


def _value(node: Any) -> torch.Tensor | None:
    found = node.meta.get("example_value") if isinstance(node, Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _erase(gm: GraphModule, node: Node) -> None:
    """A node that nobody reads any more, and what only it has read of the row's maximum."""
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if not one.users and one.target in DIFFERENCES | MAXIMA | SAME | ITEMS:
            before = one.all_input_nodes
            gm.graph.erase_node(one)
            waiting += before
