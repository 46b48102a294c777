"""A contraction of a sum of softmaxes becomes a sum of contractions of one softmax each, as differential attention has them
(Ye et al., 2024, arXiv:2410.05258):

    (softmax(a) - c softmax(b)) v   ->   softmax(a) v - c (softmax(b) v)

Each of these is attention, which stores no weights. So are the gradients of v, of which the sum is the other factor. A factor
that is told apart is a number, or a tensor with one number for a whole matrix, such as a learned c of each head, or for a row
of the result. Results of the contractions are rounded to the graph's type before they are multiplied and added up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture import torch_adapter
from kgen.capture.recompute_scores import sizes_around
from kgen.ir.program import MatrixSizes

__all__ = ["split_weighted_sums"]

aten = torch.ops.aten

CONTRACTIONS = (aten.bmm.default, aten.mm.default)
# They leave elements where they are; they move them in order; they move them otherwise.
STAYING = {aten.alias.default, aten.clone.default, aten._to_copy.default}
IN_ORDER = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
TURNING = {aten.permute.default, aten.transpose.int, aten.t.default}
# They take some elements, such as one of the two matrices of a pair of heads.
TAKING = {aten.select.int, aten.slice.Tensor}
MOVING = {*STAYING, *IN_ORDER, *TURNING, *TAKING}
# Terms of one sum; each is a kernel of its own.
MOST_TERMS = 4


@dataclass(frozen=True, slots=True)
class Term:
    """`factor` times a node, moved as the nodes of `way` do, the first one first, and times `scales`: tensors with a number for
    each matrix, or row, and the moves behind each."""

    node: Node
    factor: float
    way: tuple[Node, ...]
    scales: tuple[tuple[Node, tuple[Node, ...]], ...] = ()


def split_weighted_sums(gm: GraphModule, is_worth_it: Callable[[torch.device, MatrixSizes], bool]) -> GraphModule:
    """The graph, changed in place. `is_worth_it` is asked about each softmax in such a sum."""
    found = [(node, side, terms) for node in gm.graph.nodes for side, terms in _sums(node)]
    done = [one for one in found if all(is_worth_it(one[0].meta["val"].device, sizes) for sizes in _sizes(*one))]
    for node, side, terms in done:
        _replace(gm, node, side, terms)
    if done:
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


def _sums(node: Node) -> Iterator[tuple[int, Sequence[Term]]]:
    """The operand of a contraction that is a sum of softmaxes, if one is, and its terms."""
    if node.target not in CONTRACTIONS or node.kwargs or not _is_floating(node):
        return
    for side, operand in enumerate(node.args):
        assert isinstance(operand, Node)
        terms = _terms(Term(operand, 1.0, ())) if _is_largest(operand, node) else ()
        several = len(terms) > 1 or any(term.scales for term in terms)
        if several and len(terms) <= MOST_TERMS and all(_is_softmax(t.node) and _has_rows(t, side == 0) for t in terms):
            yield side, terms
            return


def _sizes(node: Node, side: int, terms: Sequence[Term]) -> Iterator[MatrixSizes]:
    """Lengths of the scores of each softmax, and of what is around them."""
    kept = node.meta["val"].shape[side - 2 if side else -1]
    return (sizes_around(_scores_of(term.node), [kept], node) for term in terms)


def _scores_of(softmax: Node) -> Node:
    *_, weights = softmax.all_input_nodes if softmax.target is aten.where.self else (softmax,)
    power: Any = weights.args[0]
    scores: Node = power.args[0].args[0]
    return scores


def _terms(term: Term) -> list[Term]:
    """What is added up to make a node."""
    node = term.node
    args: tuple[Any, ...] = node.args
    if node.target in MOVING and _is_floating(node):
        return _terms(replace(term, node=args[0], way=(node, *term.way)))
    if node.kwargs or not _is_floating(node):
        return [term]
    if node.target is aten.neg.default:
        return _terms(replace(term, node=args[0], factor=-term.factor))
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and isinstance(args[1], int | float):
        return _terms(replace(term, node=args[0], factor=term.factor * args[1]))
    scaled = _scaled(node) if all(map(_keeps_matrices, term.way)) else None
    if scaled is not None:
        return _terms(replace(term, node=scaled[0], scales=(*term.scales, (scaled[1], term.way))))
    if node.target in (aten.div.Tensor, aten.div.Scalar) and isinstance(args[1], int | float) and args[1]:
        return _terms(replace(term, node=args[0], factor=term.factor / args[1]))
    if node.target in (aten.add.Tensor, aten.sub.Tensor) and all(_is_like(one, node) for one in args):
        sign = -1.0 if node.target is aten.sub.Tensor else 1.0
        left, right = args
        return [*_terms(replace(term, node=left)), *_terms(replace(term, node=right, factor=sign * term.factor))]
    return [term]


def _scaled(node: Node) -> tuple[Node, Node] | None:
    """The matrices that a node multiplies, and the tensor with a number for each of them, or of their rows."""
    if node.target is not aten.mul.Tensor:
        return None
    for one, scale in (node.args, node.args[::-1]):
        if _is_like(one, node) and isinstance(scale, Node) and _is_floating(scale):
            assert isinstance(one, Node)
            sizes, rank = scale.meta["val"].shape, node.meta["val"].dim()
            if len(sizes) <= rank > 1 and all(size == 1 for size in sizes[-1:]):
                return one, scale
    return None


def _has_rows(term: Term, rows: bool) -> bool:
    """Whether each factor of a term has a number for a matrix or, where the contraction leaves these `rows`, for a row."""
    return all(_rows_of(scale) == 1 or (rows and not any(one.target in TURNING for one in way)) for scale, way in term.scales)


def _rows_of(scale: Node) -> int:
    """For how many rows of a matrix a factor has numbers."""
    sizes = scale.meta["val"].shape
    return int(sizes[-2]) if len(sizes) > 1 else 1


def _keeps_matrices(node: Node) -> bool:
    """Whether a move leaves each matrix of the last two dimensions what it is, or transposes all of them."""
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if node.target in STAYING:
        return True
    if node.target in IN_ORDER:
        return before[-2:] == after[-2:] and math.prod(before) == math.prod(after)
    if node.target in TAKING:
        return False
    rank = len(after)
    axes: Any = node.args[1:] if node.target is aten.transpose.int else node.args[1] if len(node.args) > 1 else (0, 1)
    axes = [axis % rank for axis in axes]
    return sorted(axes) == [rank - 2, rank - 1] or (axes[:-2] == list(range(rank - 2)) and len(axes) == rank)


def _is_largest(operand: Node, contraction: Node) -> bool:
    """Whether an operand has more elements than the other one, and than the result: only then it is much not to store it."""
    others = [one for one in (*contraction.all_input_nodes, contraction) if one is not operand]
    sizes = [math.prod(one.meta["val"].shape) for one in (operand, *others)]
    return all(isinstance(size, int) for size in sizes) and sizes[0] > max(sizes[1:])


def _is_like(value: Any, node: Node) -> bool:
    """Whether a value has an element for each one of a node."""
    return isinstance(value, Node) and value.meta["val"].shape == node.meta["val"].shape and _is_floating(value)


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _is_softmax(node: Node) -> bool:
    """Whether a node divides exponentials by their sum, but for rows that are to have no weights."""
    args: tuple[Any, ...] = node.args
    if node.target is aten.where.self and all(isinstance(one, Node) for one in args):
        none, zero, weights = args
        asked = none.target is aten.logical_not.default and none.args[0].target is aten.any.dim
        is_zero = zero.target in (aten.full.default, aten.full_like.default) and zero.args[1] == 0
        return asked and is_zero and _is_softmax(weights)
    if node.target is not aten.div.Tensor or node.kwargs:
        return False
    power, total = args
    sums = isinstance(total, Node) and total.target is aten.sum.dim_IntList and total.args[0] is power
    powers = sums and isinstance(power, Node) and power.target is aten.exp.default
    return powers and isinstance(power.args[0], Node) and power.args[0].target is aten.sub.Tensor


def _replace(gm: GraphModule, node: Node, side: int, terms: Sequence[Term]) -> None:
    with gm.graph.inserting_before(node):
        total = _made(gm, node, side, terms[0])
        for term in terms[1:]:
            total = _call(gm, node, aten.add.Tensor, total, _made(gm, node, side, term))
    node.replace_all_uses_with(total)
    gm.graph.erase_node(node)


def _made(gm: GraphModule, node: Node, side: int, term: Term) -> Node:
    """The contraction of one term."""
    operand = term.node
    for one in term.way:
        operand = _call(gm, one, one.target, operand, *one.args[1:], **one.kwargs)
    result = _call(gm, node, node.target, *(operand if k == side else one for k, one in enumerate(node.args)))
    if term.factor != 1.0:
        result = _call(gm, node, aten.mul.Tensor, result, term.factor)
    for scale, way in term.scales:
        result = _call(gm, node, aten.mul.Tensor, result, _moved_scale(gm, term, scale, way))
    kind = node.meta["val"].dtype
    return result if result.meta["val"].dtype is kind else _call(gm, node, aten._to_copy.default, result, dtype=kind)


def _moved_scale(gm: GraphModule, term: Term, scale: Node, way: Sequence[Node]) -> Node:
    """A tensor with a number for each matrix or row, where the moves behind its multiplication take these."""
    first, last = way[0].all_input_nodes[0] if way else term.node, way[-1] if way else term.node
    before, after = ([*one.meta["val"].shape[:-2], _rows_of(scale), 1] for one in (first, last))
    if scale.meta["val"].numel() == 1:
        return _call(gm, scale, aten.view.default, scale, [1] * len(after))
    whole = _call(gm, scale, aten.expand.default, scale, before)
    return _call(gm, scale, aten.reshape.default, whole, after)


def _call(gm: GraphModule, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    made = gm.graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta", "eager_input_vals")}
    made.meta["val"] = torch_adapter.fake_result(made)
    return made
