"""Stacks the gradients of what `select` takes of a tensor, one index at a time.

Autograd gives ``x[:, t]`` a gradient of zeros but for one index, and adds these up: a recurrence that is unrolled over 24 steps
makes 24 tensors as large as x. As values of one kernel they are 24 selections at each element. One stack of the parts has the
same elements, and the kernels that make the parts store them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

aten = torch.ops.aten
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_FILLED = (aten.full.default, aten.full_like.default)
# As many parts as this are worth a tensor in memory. Up to four may be selected at no cost.
LEAST = 5


@dataclass(slots=True)
class _Sum:
    """The summands of a tree of additions: parts by their index, and what has all elements."""

    parts: dict[int, list[Node]] = field(default_factory=dict)
    dense: list[Node] = field(default_factory=list)
    dims: set[int] = field(default_factory=set)
    additions: list[Node] = field(default_factory=list)
    scatters: list[Node] = field(default_factory=list)

    def in_any_order(self) -> bool:
        """Whether no element has more than two summands that are no zeros."""
        most = max(map(len, self.parts.values()), default=0)
        return len(self.dense) + most <= 2


def stack_gradients(gm: GraphModule) -> None:
    """Rewrites sums of `select_scatter`s into zeros as a `stack`. Each element has one summand that is no zero, and one more
    where a tensor of all elements is added, or an index was taken twice: no order of additions changes. Of a zero only the
    sign may."""
    for node in reversed(list(gm.graph.nodes)):
        if _is_sum(node) and not any(_is_sum(user) and _is_own(node) for user in node.users):
            _try(gm, node)


def _try(gm: GraphModule, node: Node) -> None:
    found = _Sum()
    _collect(node, found, node)
    value = node.meta.get("val")
    if len(found.parts) < LEAST or len(found.dims) > 1 or not found.in_any_order():
        return
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return
    (dim,) = found.dims
    count = value.shape[dim]
    if not isinstance(count, int) or count > 2 * len(found.parts):
        return
    with gm.graph.inserting_before(node):
        made = gm.graph.call_function(aten.stack.default, (list(_parts(gm, found.parts, count)), dim))
        made.meta = dict(node.meta)
        if found.dense:
            made = gm.graph.call_function(aten.add.Tensor, (found.dense[0], made))
            made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    for unused in (*found.additions, *found.scatters):
        gm.graph.erase_node(unused)


def _parts(gm: GraphModule, parts: dict[int, list[Node]], count: int) -> Iterator[Node]:
    """A part for each index: zeros where there is none, the sum of two."""
    like = next(iter(parts.values()))[0]
    for k in range(count):
        if k in parts:
            first, *more = parts[k]
            yield _added(gm, first, more[0]) if more else first
            continue
        value = like.meta["val"]
        options = {"dtype": value.dtype, "device": value.device}
        zeros = gm.graph.call_function(aten.full.default, (list(value.shape), 0), options)
        zeros.meta = {**like.meta, "val": value.new_zeros(value.shape)}
        yield zeros


def _added(gm: GraphModule, one: Node, other: Node) -> Node:
    made = gm.graph.call_function(aten.add.Tensor, (one, other))
    made.meta = dict(one.meta)
    return made


def _collect(node: Node, found: _Sum, top: Node) -> None:
    """The summands, first ones first, without recursion: a sum may be as deep as a sequence is long."""
    stack: list[Node] = [node]
    while stack:
        one = stack.pop()
        if one is top or (_is_sum(one) and _is_own(one)):
            found.additions.append(one)
            stack += [arg for arg in reversed(one.args) if isinstance(arg, Node)]
        elif _is_slice(one, top):
            index, dim = _place(one)
            found.parts.setdefault(index, []).append(one.args[1])  # type: ignore[arg-type]
            found.dims.add(dim)
            found.scatters.append(one)
        else:
            found.dense.append(one)


def _is_sum(node: Node) -> bool:
    """Whether it adds two tensors of its own shape and type."""
    if node.op != "call_function" or node.target is not aten.add.Tensor or node.kwargs:
        return False
    return all(isinstance(arg, Node) and _same(arg, node) for arg in node.args)


def _is_own(node: Node) -> bool:
    return len(node.users) == 1


def _is_slice(node: Node, top: Node) -> bool:
    """Whether it is zeros but for one index, which nobody else reads."""
    if node.target is not aten.select_scatter.default or not _is_own(node) or not _same(node, top):
        return False
    base, part, *place = node.args
    whole = len(place) == 2 and all(isinstance(p, int) for p in place)
    return bool(whole and _is_zero(base) and isinstance(part, Node) and _dtype(part) == _dtype(node))


def _is_zero(node: Any) -> bool:
    if not isinstance(node, Node):
        return False
    if node.target in _FILLED:
        return isinstance(node.args[1], int | float) and node.args[1] == 0  # a symbol would be fixed
    return node.target in _ZEROS


def _place(node: Node) -> tuple[int, int]:
    """The index of the part and its dimension, both from the front."""
    shape = node.meta["val"].shape
    given, index = node.args[2:]
    assert isinstance(given, int)
    assert isinstance(index, int)
    dim = given % len(shape)
    return index % int(shape[dim]), dim


def _dtype(node: Node) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)


def _same(one: Node, other: Node) -> bool:
    """Whether both are tensors of one shape, in numbers, and one type: comparing sizes that are symbols would fix them."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype != b.dtype or a.dim() != b.dim():
        return False
    return all(isinstance(n, int) and isinstance(m, int) and n == m for n, m in zip(a.shape, b.shape, strict=True))
