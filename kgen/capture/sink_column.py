"""A softmax with a column of its own for a sink (Xiao et al., 2024, arXiv:2309.17453), which takes weight and has no value:

    softmax(cat(s, e))[..., :n]   ->   softmax(s) * sigmoid(lse(s) - e)      with lse(s) = log(sum(exp(s)))

The number of a row is multiplied behind the contraction (`weighted_sums.py`), so that what is left is attention over aligned
columns. A row of s that is -inf as a whole has no weights, as it has beside a finite e. Where backward computes weights again,
it reads the log-sum-exp of all columns, log(exp(lse(s)) + exp(e)).

The maximum of a row that is subtracted before the softmax, as some models do, changes no weight and goes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.recompute_scores import SAME, Calls, Softmax, calls, columns_of, sizes_around, softmax_in
from kgen.capture.tangents import of_tangents
from kgen.ir.program import MatrixSizes

__all__ = ["take_sinks_apart"]

aten = torch.ops.aten

CONTRACTIONS = (aten.bmm.default, aten.mm.default)


@dataclass(frozen=True, slots=True)
class Sink:
    """A softmax of the columns of `scores` and one more. `lse` is the log-sum-exp of each row where somebody reads it; `read`
    are the slices of `weights` that have the scores' columns."""

    scores: Node
    column: Node
    weights: Node
    read: tuple[Node, ...]
    lse: Node | None


def take_sinks_apart(gm: GraphModule, is_worth_it: Callable[[torch.device, MatrixSizes], bool]) -> GraphModule:
    """The graph, changed in place. `is_worth_it` is asked where there is a sink."""
    backward = of_tangents(gm)
    if backward:  # what backward computes again, it has copies of
        gm.graph.eliminate_dead_code()
    found = [made for node in gm.graph.nodes if node not in backward and (made := _sink_of(node, backward)) is not None]
    if backward:  # weights that backward reads from memory stay what they are
        found = [one for one in found if one.lse is not None]
    done = [one for one in found if is_worth_it(one.weights.meta["val"].device, _sizes_of(one, backward))]
    for one in done:
        _Rewrite(gm, one).run()
    if done:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


def _sizes_of(found: Sink, backward: set[Node]) -> MatrixSizes:
    contractions = [_contraction_of(one, backward) for one in found.read]
    kept = [one.meta["val"].shape[-1] for one in contractions if one is not None]
    [contraction, *_] = [one for one in contractions if one is not None]
    return sizes_around(found.scores, kept, contraction)


# ---- what is looked for ------------------------------------------------------------------------------------------------


def _sink_of(weights: Node, backward: set[Node]) -> Sink | None:
    softmax = softmax_in(weights)
    if softmax is None or softmax.scores.meta["val"].dtype is not torch.float32:
        return None
    lse = _log_sum_exp_of(softmax, backward)
    joined = None if lse is False else _joined(softmax.scores, shifted=lse is True and not backward)
    if joined is None:
        return None
    read = _reads(weights, backward)
    parts: list[Node] = list(_args(joined)[0])
    kept = next((one for one in parts if one.meta["val"].shape[-1] > 1), None)
    if len(parts) != 2 or kept is None or not read:
        return None
    [column] = [one for one in parts if one is not kept]
    first = parts.index(kept)
    size = kept.meta["val"].shape[-1]
    if column.meta["val"].shape[-1] != 1 or any(columns_of(one) != (one.args[0], (first, first + size)) for one in read):
        return None
    return Sink(kept, column, weights, read, lse if isinstance(lse, Node) else None)


def _joined(node: Node, shifted: bool) -> Node | None:
    """What is joined along the last axis, behind casts, and behind the subtraction of each row's maximum if that may be there.
    A log-sum-exp, and what backward computes again, are functions of shifted scores: those of others are wrong."""
    while _same(node) or (shifted and _is_shifted(node)):
        node = _args(node)[0]
    if not calls(node, aten.cat.default):
        return None
    parts, axis = (*_args(node), 0)[:2]
    value = node.meta["val"]
    static = all(isinstance(n, int) for one in parts for n in one.meta["val"].shape)
    return node if static and axis % value.dim() == value.dim() - 1 and value.dtype.is_floating_point else None


def _is_shifted(node: Any) -> bool:
    """Whether a node is ``x - max(x)``, of each row."""
    if not calls(node, aten.sub.Tensor):
        return False
    x, top = _args(node)
    if not isinstance(top, Node) or top.kwargs:
        return False
    if top.target is operator.getitem:
        both, position = _args(top)
        return position == 0 and both.target is aten.max.dim and _is_along_last(both, x)
    return top.target is aten.amax.default and _is_along_last(top, x)


def _reads(weights: Node, backward: set[Node]) -> tuple[Node, ...]:
    """The slices of weights that forward reads; none where it reads them in another way, or multiplies nothing by them."""
    found: list[Node] = []
    waiting = [weights]
    while waiting:
        for user in waiting.pop().users:
            if user in backward:
                continue
            if _same(user):
                waiting.append(user)
            elif user.target is aten.slice.Tensor and _contraction_of(user, backward) is not None:
                found.append(user)
            else:
                return ()
    return tuple(found)


def _contraction_of(node: Node, backward: set[Node]) -> Node | None:
    """The contraction to which forward leads a node, moved; None where it leads it to something else as well."""
    users = [user for user in node.users if user not in backward]
    if len(users) != 1:
        return None
    [user] = users
    if user.target in CONTRACTIONS:
        return user
    return _contraction_of(user, backward) if _moves(user) else None


def _moves(node: Node) -> bool:
    return node.target in SAME or bool(getattr(node.target, "is_view", False)) or node.target is aten._unsafe_view.default


def _log_sum_exp_of(softmax: Softmax, backward: set[Node]) -> Node | bool:
    """Who else reads the rows' maxima and sums: a log-sum-exp, nobody (True), or something else (False)."""
    top, total = softmax.top, softmax.total
    logs = [user for user in total.users if user is not softmax.weights]
    if not logs:
        return all(user.target is aten.sub.Tensor for user in top.users)
    if len(logs) != 1 or not calls(logs[0], aten.log.default) or len(logs[0].users) != 1:
        return False
    [added] = logs[0].users
    if not calls(added, aten.add.Tensor) or added.args != (top, logs[0]) or len(added.users) != 1:
        return False
    [guarded] = added.users
    if not calls(guarded, aten.where.self) or guarded.args[1:] != (top, added):
        return False
    asked: Any = guarded.args[0]
    if not calls(asked, aten.isinf.default) or asked.args != (top,) or len(asked.users) != 1:
        return False
    rest = [user for user in top.users if user not in (added, guarded, asked)]
    return guarded if all(user.target is aten.sub.Tensor and user not in backward for user in rest) else False


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def _same(node: Any) -> bool:
    """Whether a node is another one, but for its type."""
    return isinstance(node, Node) and node.target in SAME and bool(node.meta["val"].dtype.is_floating_point)


def _is_along_last(reduction: Node, of: Any) -> bool:
    """Whether a reduction goes along the last axis of a node and keeps it."""
    source, axes, keep = (*_args(reduction), None, None)[:3]
    rank = source.meta["val"].dim()
    axes = [axes] if isinstance(axes, int) else axes or ()
    return source is of and keep is True and rank > 1 and [axis % rank for axis in axes] == [rank - 1]


# ---- the rewrite -------------------------------------------------------------------------------------------------------


class _Rewrite(Calls):
    """Changes what forward reads of one softmax with a sink."""

    def __init__(self, gm: GraphModule, found: Sink) -> None:
        super().__init__(gm.graph, found.weights)
        self.found = found

    def run(self) -> None:
        found = self.found
        with self.graph.inserting_before(found.lse or found.weights):
            weights, lse = self._softmax(self._cast(found.scores, torch.float32))
            column = self._cast(found.column, torch.float32)
            share = self._call(aten.sigmoid.default, self._call(aten.sub.Tensor, lse, column))
            if found.lse is not None:
                whole = self._both(lse, column)
                whole.meta["recompute"] = found.lse.meta.get("recompute")
                found.lse.replace_all_uses_with(whole)
        for node in found.read:
            with self.graph.inserting_before(node):
                made = self._cast(self._call(aten.mul.Tensor, weights, share), node.meta["val"].dtype)
            node.replace_all_uses_with(made)

    def _softmax(self, scores: Node) -> tuple[Node, Node]:
        """Weights of scores, which are 0 in rows that are -inf as a whole, and the log-sum-exp of each row."""
        top = self._call(aten.amax.default, scores, [-1], True)
        power = self._call(aten.exp.default, self._call(aten.sub.Tensor, scores, top))
        total = self._call(aten.sum.dim_IntList, power, [-1], True)
        some = self._call(aten.logical_not.default, self._call(aten.eq.Scalar, scores, -math.inf))
        none = self._call(aten.logical_not.default, self._call(aten.any.dim, some, -1, True))
        zero = self._call(aten.full_like.default, total, 0.0)
        weights = self._call(aten.where.self, none, zero, self._call(aten.div.Tensor, power, total))
        return weights, self._log_sum_exp_of(top, total)

    def _both(self, lse: Node, column: Node) -> Node:
        """The log-sum-exp of all columns."""
        top = self._call(aten.maximum.default, lse, column)
        apart = self._call(aten.abs.default, self._call(aten.sub.Tensor, lse, column))
        more = self._call(aten.log1p.default, self._call(aten.exp.default, self._call(aten.neg.default, apart)))
        made = self._call(aten.add.Tensor, top, more)
        return self._call(aten.where.self, self._call(aten.isinf.default, top), top, made)
