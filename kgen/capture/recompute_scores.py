"""Backward graphs compute the weights of a softmax between two contractions again, instead of reading them from memory.

Where one contraction makes scores that are larger than its operands, and another one reduces the axis of the softmax away,
forward saves one number of each row, and backward gets

    weights = exp(scores - lse)    with lse = max(scores) + log(sum(exp(scores - max(scores))))

In front of the softmax and behind it may be any elementwise work; all of it that is as large as the scores is computed again.
The row sum in the gradient of a softmax needs no scores at all (Dao et al., 2022, arXiv:2205.14135, appendix B.2):

    sum over n of dA[n] A[n] = sum over v of g[v] O[v]
    where O[v] = sum over n of A[n] V[n, v] and dA[n] = sum over v of g[v] V[n, v]

A are the weights with all factors, such as those of dropout. These sums are in float32, of O as forward rounds it. So is the
gradient of a number by which all weights are multiplied, a sum of such sums.

What only repeats keys and values, and what depends on no input, is computed again as well.
Recomputing is always right, so what is computed again is a matter of profit alone. The two rewrites are not: `_softmax_of` and
`_row_sum` say what they ask for.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from kgen.capture import rng, torch_adapter
from kgen.capture.smooth import all_behind, is_smooth
from kgen.capture.tangents import of_tangents
from kgen.ir.program import MatrixSizes

__all__ = [
    "CONSTANTS", "SAME", "Calls", "Softmax", "behind_elementwise", "calls", "columns_of", "grows", "narrowest", "number_apart",
    "number_of", "recompute_scores", "sizes_around", "softmax_in",
]  # fmt: skip

aten = torch.ops.aten

HALVES = (torch.float16, torch.bfloat16)
# They leave each element as it is, but for its type.
SAME = {aten.alias.default, aten.clone.default, aten._to_copy.default, aten.detach.default, aten.lift_fresh_copy.default}
# They leave elements in their order.
IN_ORDER = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
# One element each of what is made anew, or of memory.
OTHERS = {
    aten.full_like.default, aten.full.default, aten.scalar_tensor.default, aten.zeros_like.default, aten.ones_like.default,
    aten.arange.start_step, aten.arange.start, aten.arange.default, aten.cat.default, aten.constant_pad_nd.default,
    aten.embedding.default, aten.index.Tensor, aten.gather.default, aten.index_select.default, rng.RAND,
    torch.ops.prims.iota.default,
}  # fmt: skip
# Of a log-sum-exp below, log(sum) is lost whole, for the spacing of float32 is 16 there: such a row has been filled with one
# large number, as masks of finite numbers do, and its weights are all equal.
FILLED = -(2.0**27)
# Finite numbers from here on may stand for infinity; other scores are seldom as large.
LARGE = 2.0**20
# Those that a choice puts in place of scores are seldom anything else: of a row of -65504, the log-sum-exp keeps eight bits.
CHOSEN = 2.0**15
# One number.
CONSTANTS = (aten.full.default, aten.full_like.default, aten.scalar_tensor.default)
# What they multiply by is no mask.
FACTORS = (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar)


def recompute_scores(
    gm: GraphModule, is_worth_it: Callable[[torch.device, MatrixSizes], bool], as_eager: bool = False
) -> GraphModule:
    """The joint graph, before it is split. `is_worth_it` is asked where there is a softmax to which this applies. Gradients
    read weights in float32, but `as_eager` those that eager has saved."""
    if gm.graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _take_sums_apart(gm, is_worth_it)
    backward = of_tangents(gm)
    found = [made for node in gm.graph.nodes if (made := _attention_of(node, backward)) is not None]
    done = [one for one in found if is_worth_it(one.softmax.scores.meta["val"].device, _sizes_of(one))]
    alone: dict[Node, bool] = {}
    for one in done:
        _Rewrite(gm, one, backward, as_eager, alone).run()
    if done:
        gm.graph.lint()
        gm.recompile()
    return gm


# ---- what is looked for ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Softmax:
    """``weights = exp(scores - top) / total``, along the last axis."""

    scores: Node
    top: Node
    total: Node
    weights: Node


@dataclass(frozen=True, slots=True)
class Attention:
    """A softmax, what forward makes of its weights elementwise (`after`, in order), and the contractions of these."""

    softmax: Softmax
    after: tuple[Node, ...]
    contractions: tuple[Node, ...]


def _sizes_of(found: Attention) -> MatrixSizes:
    kept = {node.meta["val"].shape[-1] for node in found.contractions}
    return sizes_around(found.softmax.scores, kept, found.contractions[0])


def sizes_around(scores: Node, kept: Iterable[int], contraction: Node) -> MatrixSizes:
    """Lengths of the scores, and of their contractions along other axes, of which `kept` are those behind the softmax; the type
    is that of what weights are multiplied by, before it was widened."""
    rows, columns = scores.meta["val"].shape[-2:]
    made_of = [one for one in behind_elementwise([scores], _matrix(scores)) if grows(one)]
    summed = {operands[0].meta["val"].shape[-1] for operands in map(_args, made_of)}
    return MatrixSizes(rows, columns, frozenset(summed.union(kept)), narrowest(contraction))


def narrowest(contraction: Node) -> torch.dtype:
    """The type of a contraction's operand that has the fewest bytes an element on its way there."""
    ways = [one.meta["val"].dtype for operand in contraction.all_input_nodes for one in _way_back(operand)]
    return min(ways, key=lambda dtype: dtype.itemsize)


def _attention_of(node: Node, backward: set[Node]) -> Attention | None:
    softmax = _softmax_of(node) if node not in backward else None
    if softmax is None or not any(map(grows, behind_elementwise([softmax.scores], _matrix(softmax.scores)))):
        return None
    return None if _jumps(softmax.scores) else _followed(softmax, backward)


def _jumps(scores: Node) -> bool:
    """Whether scores depend on how elements of a contraction compare with what was made of these and is not made again, such as
    the fifth largest of a row: made again, the elements may have other bits."""
    made = set(behind_elementwise([scores], _matrix(scores)))
    for node in made:
        if _is_elementwise(node) and not is_smooth(node):
            read = set(_read_by(node, made))
            if not all_behind(filter(grows, read)).isdisjoint(read - made):
                return True
    return False


def _read_by(node: Node, made: set[Node]) -> Iterator[Node]:
    """What a node is made of: contractions, and what is none of what is made again."""
    seen, waiting = set[Node](), [node]
    while waiting:
        one = waiting.pop()
        if one not in seen and one in made and _is_elementwise(one):
            waiting += one.all_input_nodes
        elif one not in seen:
            yield one
        seen.add(one)


def _softmax_of(node: Node) -> Softmax | None:
    """The softmax whose weights a node is; None where its parts are read by others, which would need them again."""
    found = softmax_in(node)
    if found is None:
        return None
    power, total = _args(node)
    [shifted] = _args(power)
    alone = set(power.users) == {total, node} and set(total.users) == {node} and set(shifted.users) == {power}
    return found if alone and _fits(found.scores) else None


def softmax_in(node: Node) -> Softmax | None:
    """The softmax along the last axis whose weights a node is, whoever reads its parts."""
    if not calls(node, aten.div.Tensor):
        return None
    power, total = _args(node)
    if not calls(power, aten.exp.default) or not calls(total, aten.sum.dim_IntList):
        return None
    [shifted] = _args(power)
    if not calls(shifted, aten.sub.Tensor):
        return None
    scores, top = _args(shifted)
    if not calls(top, aten.amax.default) or not _is_sum_of(total, power) or not _is_sum_of(top, scores):
        return None
    return Softmax(scores, top, total, node)


def _fits(scores: Node) -> bool:
    """Scores of other types have another log-sum-exp; sizes at run time are not compared."""
    value = scores.meta["val"]
    return value.dim() > 1 and value.dtype is torch.float32 and _is_static(scores)


def _args(node: Node) -> tuple[Any, ...]:
    return node.args


def calls(value: Any, target: Any) -> bool:
    """Whether a value is a plain call of an operator."""
    return isinstance(value, Node) and value.target is target and not value.kwargs


def _is_sum_of(reduction: Node, of: Node) -> bool:
    return reduction.args[0] is of and _is_last(reduction)


def _is_last(reduction: Node) -> bool:
    """Whether a reduction goes along the last axis and keeps it."""
    _, axes, keep = (*_args(reduction), None, None)[:3]
    rank = reduction.meta["val"].dim()
    return keep is True and rank > 0 and [axis % rank for axis in axes or ()] == [rank - 1]


def _followed(softmax: Softmax, backward: set[Node]) -> Attention | None:
    """Where the weights go in forward; None where that is not elementwise work and contractions alone."""
    after, contractions, waiting = dict[Node, None](), dict[Node, None](), [softmax.weights]
    while waiting:
        node = waiting.pop()
        for user in node.users:
            if user in backward or user in after or user in contractions:
                continue
            if _is_contraction(user) and _is_static(user):
                contractions[user] = None
            elif _is_elementwise(user) and (_elements(user) >= _elements(node) or columns_of(user) is not None):
                after[user] = None
                waiting.append(user)
            else:
                return None
    reduced = [one for one in contractions if _elements(one) < _elements(softmax.scores)]
    return (
        Attention(softmax, tuple(sorted(after)), tuple(contractions)) if reduced and len(reduced) == len(contractions) else None
    )


def _is_contraction(node: Node) -> bool:
    return node.target in (aten.bmm.default, aten.mm.default)


def grows(node: Node) -> bool:
    """Whether a contraction makes more than it reads."""
    return _is_contraction(node) and all(_is_static(one) and _elements(node) > _elements(one) for one in node.all_input_nodes)


def _is_elementwise(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    known = target in SAME or target in IN_ORDER or target in OTHERS or torch.Tag.pointwise in target.tags
    return known or bool(getattr(target, "is_view", False))


def _elements(node: Node) -> int:
    """How many elements a tensor has; 0 where its sizes are symbols: to compare those would guard the graph on the answer."""
    return math.prod(node.meta["val"].shape) if _is_static(node) else 0


def _matrix(scores: Node) -> int:
    """Elements of all scores of one row of batches."""
    return math.prod(scores.meta["val"].shape[-2:])


def behind_elementwise(roots: Iterable[Node], least: int) -> Iterator[Node]:
    """Calls that make at least so many elements, up to the first ones that are not elementwise, which are among them."""
    seen, waiting = set[Node](), list(roots)
    while waiting:
        node = waiting.pop()
        if node in seen or node.op != "call_function" or not _is_static(node) or _elements(node) < least:
            continue
        seen.add(node)
        yield node
        if _is_elementwise(node):
            waiting += node.all_input_nodes


def _may_be_filled(scores: Node) -> bool:
    """Whether finite numbers may stand for -inf in scores: a large one, or what is read and not multiplied by. Of other scores
    the log-sum-exp has all digits that matter."""
    made = set(behind_elementwise([scores], _matrix(scores)))
    return any(_may_fill(node, made) for node in made if _is_elementwise(node))


def _may_fill(node: Node, made: set[Node]) -> bool:
    numbers = [float(one) for one in node.args if isinstance(one, int | float) and not isinstance(one, bool)]
    read = [one for one in node.all_input_nodes if one not in made and _is_floating(one)]
    filled = [number_of(one) for one in read if one.target in CONSTANTS]
    least = CHOSEN if node.target is aten.where.self else LARGE
    if None in filled or any(least <= abs(one) < math.inf for one in (*numbers, *filled) if one is not None):
        return True
    is_factor = node.target in FACTORS
    return not is_factor and any(one.target not in CONSTANTS for one in read)


def _fill_of(scores: Node) -> float | None:
    """The one number that choices fill scores with, where nothing else may fill them: a row of it has equal weights, and its
    log-sum-exp is about that number. Where numbers are read and added, rows may have several of them."""
    made = set(behind_elementwise([scores], _matrix(scores)))
    ways = [node for node in made if _is_elementwise(node) and _may_fill(node, made)]
    numbers = {number_of(one) for node in ways for one in node.all_input_nodes if one.target in CONSTANTS}
    number = numbers.pop() if len(numbers) == 1 and all(calls(node, aten.where.self) for node in ways) else None
    return number if number is not None and number <= -CHOSEN else None


def _is_floating(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def number_of(constant: Node) -> float | None:
    """What a call of one of `CONSTANTS` fills a tensor with; None where only a run knows."""
    found = constant.args[0] if constant.target is aten.scalar_tensor.default else constant.args[1]
    return float(found) if isinstance(found, int | float) else None


def number_apart(node: Any, numbers: Container[float]) -> int | None:
    """Which argument of a choice is one of some numbers, the other one being none of them; None of other nodes, too."""
    if not calls(node, aten.where.self):
        return None
    found = [k for k, one in enumerate(_args(node)) if k and one.target in CONSTANTS and number_of(one) in numbers]
    return found[0] if len(found) == 1 else None


def _is_rounded_small(node: Node, matrix: int) -> bool:
    """Whether a kernel may keep more bits of a node than memory does, which is no matrix of scores."""
    if not _elements(node) or _elements(node) >= matrix or node.meta["val"].dtype not in HALVES:
        return False
    *_, made = _way_back(node, scaled=False)
    return made.op == "call_function" and bool(made.all_input_nodes) and not _is_contraction(made)


def _enlarged(contraction: Node) -> Iterator[Node]:
    """What makes more bytes of the same elements in front of a contraction, with the views around it: it repeats them, as of
    heads that share keys, or widens them, and may scale them as well."""
    for operand in contraction.all_input_nodes if _is_contraction(contraction) else ():
        *way, node = _way_back(operand)
        if way and _bytes(node) < _bytes(operand):
            yield from way


def _way_back(node: Node, scaled: bool = True) -> Iterator[Node]:
    """A node, and what it is made of one by one, up to what is more than the same elements, or than these times a number."""
    yield node
    while node.op == "call_function" and (_is_same(node) or (scaled and _is_scaled(node))):
        [node] = node.all_input_nodes
        yield node


def _is_same(node: Node) -> bool:
    return node.target in SAME or bool(getattr(node.target, "is_view", False))


def _is_scaled(node: Node) -> bool:
    return node.target is aten.mul.Scalar or (node.target is aten.mul.Tensor and not isinstance(node.args[1], Node))


def _bytes(node: Node) -> int:
    return _elements(node) * node.meta["val"].dtype.itemsize if _elements(node) else 0


def _of_nothing(node: Node, alone: dict[Node, bool]) -> list[Node]:
    """The calls behind a node that depend on no input, such as of positions: none of their results needs to be saved. What
    `alone` knows is passed over, with all behind it, and it learns about the others: behind a layer are all before it."""
    found, waiting = list[Node](), [node]
    while waiting:
        one = waiting[-1]
        if one in alone:
            waiting.pop()
        elif before := [other for other in one.all_input_nodes if other not in alone]:
            waiting += before
        else:
            alone[one] = one.op == "call_function" and _is_pure(one) and all(alone[other] for other in one.all_input_nodes)
            found += [one] if alone[one] else ()
    return found


def _is_kept(node: Node) -> bool:
    """Whether a node says by a random number what stays of the weights. On a GPU each kernel of backward would draw it again,
    and that takes longer there than to read a byte (96 million of them, H200: 800 of 1,020 us)."""
    value = node.meta["val"]
    if value.dtype is not torch.bool or not torch_adapter.is_cuda(value):
        return False
    return any(calls(one, rng.RAND) for one in behind_elementwise([node], _elements(node)))


def _is_pure(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _is_static(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)


def _take_sums_apart(gm: GraphModule, is_worth_it: Callable[[torch.device, MatrixSizes], bool]) -> None:
    """Contractions with an addend that make scores become contractions and elementwise work."""
    softmaxes = [found for node in gm.graph.nodes if (found := _softmax_of(node)) is not None]
    made = (node for found in softmaxes for node in behind_elementwise([found.scores], _matrix(found.scores)))
    for node in dict.fromkeys(one for one in made if one.target is aten.baddbmm.default):
        addend, left, right = _args(node)
        value, of = node.meta["val"], left.meta["val"]
        rows, columns = value.shape[-2:]
        if not is_worth_it(value.device, MatrixSizes(rows, columns, frozenset({of.shape[-1]}), of.dtype)):
            continue
        beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
        calls = Calls(gm.graph, node)
        with gm.graph.inserting_before(node):
            whole = calls._call(aten.bmm.default, left, right)
            whole = whole if alpha == 1 else calls._call(aten.mul.Tensor, whole, alpha)
            if beta != 0:  # what is multiplied by 0 is not read: it may be memory that nobody has written
                addend = addend if beta == 1 else calls._call(aten.mul.Tensor, addend, beta)
                whole = calls._call(aten.add.Tensor, whole, addend)
        node.replace_all_uses_with(whole)
        gm.graph.erase_node(node)


# ---- the rewrite -------------------------------------------------------------------------------------------------------


class Calls:
    """Writes calls into a graph, with the notes of one node."""

    def __init__(self, graph: torch.fx.Graph, like: Node) -> None:
        self.graph = graph
        self._like = like

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        made = self.graph.call_function(target, args, kwargs)
        like = self._like.meta
        made.meta = {k: v for k, v in like.items() if k not in ("val", "tensor_meta", "eager_input_vals", "recompute")}
        made.meta["val"] = torch_adapter.fake_result(made)
        return made

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        return node if node.meta["val"].dtype is dtype else self._call(aten._to_copy.default, node, dtype=dtype)

    def _log_sum_exp_of(self, top: Node, total: Node) -> Node:
        """Of each row; of one that is infinite as a whole, its maximum."""
        made = self._call(aten.add.Tensor, top, self._call(aten.log.default, total))
        return self._call(aten.where.self, self._call(aten.isinf.default, top), top, made)


class _Rewrite(Calls):
    """Changes what backward reads of one softmax."""

    def __init__(self, gm: GraphModule, found: Attention, backward: set[Node], as_eager: bool, alone: dict[Node, bool]) -> None:
        super().__init__(gm.graph, found.softmax.weights)
        self.alone = alone
        self.as_eager = as_eager
        self.found = found
        self.softmax = found.softmax
        self.backward = backward

    def run(self) -> None:
        for node in [one for one in self.graph.nodes if one in self.backward and one.target is aten.sum.dim_IntList]:
            if _is_last(node):
                self._replace_row_sum(node)
            else:
                self._replace_sum_of_rows(node)
        for node in [one for one in self.graph.nodes if one in self.backward]:
            self._replace_padding(node)
        self._round()
        lse = self._log_sum_exp()
        self._recompute(lse)
        self._mark()
        for node in [one for one in self.graph.nodes if one in self.backward]:
            columns = columns_of(node)
            if columns is not None and columns[0].meta["val"].shape[-1] == self.softmax.scores.meta["val"].shape[-1]:
                self._replace_columns(node, *columns)

    def _round(self) -> None:
        """What scores read of smaller 16-bit results is rounded in forward as well: backward has it from memory, and powers of
        other scores than those of the log-sum-exp are no weights."""
        for node in list(behind_elementwise([self.softmax.scores], _matrix(self.softmax.scores))):
            for one in node.all_input_nodes if _is_elementwise(node) else ():
                if _is_rounded_small(one, _matrix(self.softmax.scores)):
                    with self.graph.inserting_before(node):
                        wide = self._call(aten._to_copy.default, one, dtype=torch.float32)
                        node.replace_input_with(one, self._call(aten._to_copy.default, wide, dtype=one.meta["val"].dtype))

    def _recompute(self, lse: Node) -> None:
        """Backward reads copies of the weights, and of what is made of them."""
        again = {self.softmax.weights: self._weights(lse), **self._rows_with_scores(lse)}
        for node in self._elementwise_of(again):
            if self._is_widened(node):
                again[node] = again[self.softmax.weights]
                continue
            with self.graph.inserting_after(max(node, *(again[one] for one in node.all_input_nodes if one in again))):
                again[node] = self.graph.node_copy(node, lambda one: again.get(one, one))
                _recomputed(again[node])
        for node, copy in again.items():
            node.replace_all_uses_with(copy, delete_user_cb=lambda user: user in self.backward)

    def _is_widened(self, node: Node) -> bool:
        """Whether a node is the softmax's weights in float32, as a gradient's formula makes them of the 16 bits that forward
        has saved. What a program rounds and widens itself is read by forward as well."""
        value = node.meta["val"]
        if self.as_eager or value.dtype is not torch.float32 or not self.backward.issuperset(node.users):
            return False
        kinds, made = [], node
        while made.target in SAME and made is not self.softmax.weights:
            kinds.append(made.meta["val"].dtype)
            [made] = made.all_input_nodes
        return made is self.softmax.weights and len(kinds) > 1 and set(kinds[1:]) <= set(HALVES)

    def _mark(self) -> None:
        """Says what may not be saved."""
        roots = [self.softmax.scores, *(one for node in self.found.after for one in node.all_input_nodes)]
        own = (self.softmax.weights, *self.found.after)
        made = [one for one in behind_elementwise(roots, _matrix(self.softmax.scores)) if one not in own]
        made = [one for one in made if _is_elementwise(one) or grows(one)]
        asked = (one for one in self._elementwise_of(made, until=own) if _elements(one) >= _matrix(self.softmax.scores))
        drawn = {one for one in made if _is_kept(one)}
        for node in drawn:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for node in dict.fromkeys((*made, *asked)):  # backward may ask which of two numbers a score was
            for one in (node, *_enlarged(node), *_of_nothing(node, self.alone)) if node not in drawn else ():
                _recomputed(one)
        for node in itertools.chain(*map(_enlarged, self.found.contractions)):
            _recomputed(node)

    def _elementwise_of(self, roots: Iterable[Node], until: Sequence[Node] = ()) -> list[Node]:
        """What forward makes elementwise of nodes, in order."""
        found, waiting = set[Node](), list(roots)
        while waiting:
            more = {user for user in waiting.pop().users if _is_elementwise(user)} - self.backward - found - {*until}
            found |= more
            waiting += more
        return sorted(found)

    def _rows_with_scores(self, lse: Node) -> dict[Node, Node]:
        """What asks whether a row has a score besides -inf, and what says the same of its log-sum-exp."""
        found = [node for node in self.graph.nodes if _asks_for_scores(node, self.softmax.scores)]
        with self.graph.inserting_before(self.softmax.weights):
            made = {node: self._call(aten.ne.Scalar, lse, -math.inf) for node in found}
        for node in made.values():
            _recomputed(node)
        return made

    def _log_sum_exp(self) -> Node:
        with self.graph.inserting_before(self.softmax.weights):
            lse = self._log_sum_exp_of(self.softmax.top, self.softmax.total)
        lse.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return lse

    def _weights(self, lse: Node) -> Node:
        """Of scores that may be filled no weight is more than 1, however the log-sum-exp of large scores was rounded, nor more
        than its share of a row that was filled. Both are one bound of the exponent, a number of the row."""
        scores = self.softmax.scores
        with self.graph.inserting_before(self.softmax.weights):
            top, *bounds = self._bound(lse, _fill_of(scores)) if _may_be_filled(scores) else (lse,)
            shifted = self._call(aten.sub.Tensor, scores, top)
            bounded = self._call(aten.minimum.default, shifted, bounds[-1]) if bounds else shifted
            weights = self._call(aten.exp.default, bounded)
        for node in (shifted, *bounds, *(() if top is lse else (top,)), bounded, weights):
            _recomputed(node)
        return weights

    def _bound(self, lse: Node, fill: float | None) -> tuple[Node, ...]:
        """What is subtracted from scores: the log-sum-exp, or the number that fills a row, beside which the logarithm of the
        count is lost. Then what the exponent is at most, last, behind the calls that it takes."""
        value, count = lse.meta["val"], self.softmax.scores.meta["val"].shape[-1]
        filled = self._call(aten.lt.Scalar, lse, FILLED if fill is None else fill / 2)
        share, whole, number = (
            self._call(aten.full.default, [], number, dtype=value.dtype, device=value.device)
            for number in (-math.log(count), 0.0, fill or 0.0)
        )
        top = lse if fill is None else self._call(aten.where.self, filled, number, lse)
        return top, filled, share, whole, number, self._call(aten.where.self, filled, share, whole)

    def _replace_sum_of_rows(self, node: Node) -> None:
        """A sum along rows and more, as the gradient of a factor of all weights: rows are summed first, in float32."""
        added, axes, *keep = _args(node)
        rank = added.meta["val"].dim()
        if node.kwargs or not rank or (axes and rank - 1 not in [axis % rank for axis in axes]):
            return
        with self.graph.inserting_before(node):
            wide = self._cast(added, torch.float32)
            rows = self._call(aten.sum.dim_IntList, wide, [-1], True)
            total = self._call(aten.sum.dim_IntList, rows, axes, *keep)
            made = self._cast(total, node.meta["val"].dtype)
        if self._replace_row_sum(rows):
            node.replace_all_uses_with(made)
            made = node
        for one in (made, total, rows, wide):
            if not one.users and one is not added and one in self.graph.nodes:
                self.graph.erase_node(one)

    def _replace_row_sum(self, node: Node) -> bool:
        found = next((one for f in self.found.contractions if (one := _row_sum(node, f, self.softmax))), None)
        if found is None:
            return False
        gradient, result, factor, scales = found
        value = node.meta["val"]
        with self.graph.inserting_before(node):
            saved = self._as_forward_rounds(result)
            terms = self._call(aten.mul.Tensor, *(self._cast(one, torch.float32) for one in (gradient, saved)))
            total = self._call(aten.sum.dim_IntList, terms, [-1], True)
            total = total if factor == 1.0 else self._call(aten.mul.Tensor, total, factor)
            made = self._call(aten.view.default, total, list(value.shape))
            for scale, shape in scales:
                whole = self._call(aten.expand.default, self._cast(scale, torch.float32), [*shape[:-1], 1])
                made = self._call(aten.mul.Tensor, made, self._call(aten.reshape.default, whole, list(value.shape)))
            made = self._cast(made, value.dtype)
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        return True

    def _as_forward_rounds(self, result: Node) -> Node:
        """A result in float32 of which forward reads 16-bit numbers alone, as these: nothing else needs to be stored, or saved.
        Fewer bits, as of quantised results, would make the sum another one."""
        end, is_wide = result, result.meta["val"].dtype is torch.float32
        while is_wide and len(users := [user for user in end.users if user not in self.backward]) == 1:
            [end] = users
            if end.target is aten._to_copy.default and end.meta["val"].dtype in HALVES:
                return self._call(aten.view.default, end, list(result.meta["val"].shape))
            if end.target not in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default):
                break
        return result

    def _replace_padding(self, node: Node) -> None:
        """Zeros around a tensor as a function of that, which needs no memory of its own."""
        found = _padded(node)
        if found is None or node.meta["val"].dtype is not found[0].meta["val"].dtype:
            return
        inner, (first, last) = found
        with self.graph.inserting_before(node):
            made = self._call(aten.constant_pad_nd.default, inner, [first, node.meta["val"].shape[-1] - last], 0.0)
        self.backward.add(made)
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)

    def _replace_columns(self, node: Node, source: Node, columns: Columns) -> None:
        """Some columns of scores' gradients from those of what they are made of: others are not computed for them, nor read."""
        with self.graph.inserting_before(node):
            made = self._columns(source, columns, {})
        if made.meta["val"].dtype is node.meta["val"].dtype:
            node.replace_all_uses_with(made)
            self.graph.erase_node(node)

    def _columns(self, node: Node, columns: Columns, known: dict[Node, Node]) -> Node:
        if node not in known:
            known[node] = made = self._made_columns(node, columns, known)
            if not self.backward.isdisjoint(made.all_input_nodes):
                self.backward.add(made)
            elif made not in node.all_input_nodes:  # what was there before may be dear
                _recomputed(made)
        return known[node]

    def _made_columns(self, node: Node, columns: Columns, known: dict[Node, Node]) -> Node:
        first, last = columns
        size, ends = node.meta["val"].shape[-1], [0]
        for part in _parts_of(node):
            ends.append(ends[-1] + part.meta["val"].shape[-1])
            if (*ends[-2:],) == columns:
                return part
        if calls(node, aten.constant_pad_nd.default) and len(_args(node)[1]) == 2:
            inner, (before, _), _ = _args(node)
            if columns == (before, before + inner.meta["val"].shape[-1]):
                return inner
        if _is_pointwise(node):
            own = {
                one: self._columns(one, columns, known)
                for one in node.all_input_nodes
                if one.meta["val"].dim() and one.meta["val"].shape[-1] == size
            }
            return self._call(node.target, *map_arg(node.args, lambda one: own.get(one, one)), **node.kwargs)
        return self._call(aten.slice.Tensor, node, node.meta["val"].dim() - 1, first, last)


def _asks_for_scores(node: Node, scores: Node) -> bool:
    """Whether a node is ``any(scores != -inf)`` along the last axis."""
    if not calls(node, aten.any.dim):
        return False
    inside, axis, keep = (*_args(node), None)[:3]
    negated = calls(inside, aten.logical_not.default)
    compared = inside.args[0] if negated else inside
    wanted = aten.eq.Scalar if negated else aten.ne.Scalar
    is_last = keep is True and axis in (-1, scores.meta["val"].dim() - 1)
    return is_last and calls(compared, wanted) and compared.args == (scores, -math.inf)


def _recomputed(node: Node) -> None:
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


# ---- row sums ----------------------------------------------------------------------------------------------------------


# From the first column up to the last one, which is not among them.
Columns = tuple[int, int]


# A tensor, and the shape to which it is broadcast.
Scale = tuple[Node, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Factors:
    """What is multiplied: a number, and elements of tensors. Of a smaller tensor, also how it is broadcast, of some columns of
    the last axis, which. A condition without which the rest is 0 has the argument that is 0 and the shape of the choice."""

    number: float
    tensors: Counter[Any]


def _row_sum(node: Node, contraction: Node, softmax: Softmax) -> tuple[Node, Node, float, list[Scale]] | None:
    """A gradient g, the result O of a contraction, a factor f and others for each row, with ``node = f * sum over v of g O``
    times these, see the head of this file."""
    weights, values = _args(contraction)
    if node.kwargs or not _is_last(node):
        return None
    size, kept = (one.meta["val"].shape[-1] for one in (softmax.scores, weights))
    added = _args(node)[0]
    if _elements(added) != _elements(softmax.scores) or added.meta["val"].shape[-1] != size:
        return None
    inside, whole = _without_padding(_factors(added, size)), _of_columns(_factors(weights, kept), size)
    if whole.tensors - inside.tensors or whole.number == 0:
        return None
    factor = inside.number / whole.number
    rest = list((inside.tensors - whole.tensors).elements())
    scales = [one for one in rest if _is_of_rows(one)]
    rest = [one for one in rest if not _is_of_rows(one)]
    rows = _elements(softmax.scores) // size
    if len(rest) != 1 or not calls(rest[0], contraction.target) or {_elements(rest[0]), _elements(weights)} != {rows * kept}:
        return None
    gradient, turned = _args(rest[0])
    if not _exchanges_last(turned) or turned.args[0] is not values:
        return None
    return gradient, contraction, 1.0 if math.isclose(factor, 1.0, rel_tol=1e-5) else factor, scales


def _is_of_rows(tensor: Any) -> bool:
    """Whether one of `Factors` has a number for each row, or for several."""
    if (
        not isinstance(tensor, tuple)
        or len(tensor) != 2
        or not isinstance(tensor[0], Node)
        or not isinstance(tensor[0].meta.get("val"), torch.Tensor)
    ):
        return False
    sizes = tensor[0].meta["val"].shape
    return len(tensor[1]) > 1 and all(isinstance(size, int) for size in tensor[1]) and (not sizes or sizes[-1] == 1)


def columns_of(node: Node) -> tuple[Node, Columns] | None:
    """What a node has a run of the last axis of, and which."""
    if node.target is not aten.slice.Tensor or node.kwargs:
        return None
    source, *where = _args(node)
    columns = _columns_at(source.meta["val"], *where)
    return None if columns is None else (source, columns)


def _padded(node: Any) -> tuple[Node, Columns] | None:
    """What a node has in these columns of its last axis, with zeros in all others, as the gradient of a slice has."""
    if not calls(node, aten.slice_scatter.default):
        return None
    base, inner, *where = _args(node)
    zeros = base.target is aten.full.default and base.args[1] == 0
    with_base = _columns_at(base.meta["val"], *where) if zeros else None
    return None if with_base is None or not _is_static(inner) else (inner, with_base)


def _columns_at(
    value: torch.Tensor, axis: int = 0, begin: int | None = None, end: int | None = None, step: int = 1
) -> Columns | None:
    """The run of the last axis that a slice with these arguments is of."""
    size = value.shape[-1]
    ends = [0 if begin is None else begin, size if end is None else end]
    if step != 1 or axis % value.dim() != value.dim() - 1 or not all(isinstance(one, int) for one in ends):
        return None
    first, last = (min(size, max(0, one + size if one < 0 else one)) for one in ends)
    return first, last


def _parts_of(node: Node) -> Sequence[Node]:
    """What is joined along the last axis."""
    if node.target is not aten.cat.default:
        return ()
    parts, axis = (*_args(node), 0)[:2]
    return tuple(parts) if axis in (-1, node.meta["val"].dim() - 1) else ()


def _is_pointwise(node: Node) -> bool:
    """Whether each element is one of the same elements of tensors, whatever their sizes."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and (torch.Tag.pointwise in target.tags or target in SAME)


def _without_padding(found: Factors) -> Factors:
    """Of factors of which one is padded with zeros: its other columns, of all factors."""
    pads = {one: padded for one in found.tensors if (padded := _padded(one)) is not None}
    if len(pads) != 1 or found.tensors[next(iter(pads))] != 1:
        return found
    [(pad, (inner, columns))] = pads.items()
    others = Counter({(one, columns): count for one, count in found.tensors.items() if one is not pad})
    return _times(Factors(found.number, others), _factors(inner, columns[1] - columns[0]))


def _of_columns(found: Factors, size: int) -> Factors:
    """With slices of the last axis, of `size` elements, taken apart."""
    made = Factors(found.number, Counter())
    for one, count in found.tensors.items():
        found_in = columns_of(one) if isinstance(one, Node) else None
        if found_in is None or found_in[0].meta["val"].shape[-1] != size or count != 1:
            made = _times(made, Factors(1.0, Counter({one: count})))
            continue
        inner = _factors(found_in[0], size)
        made = _times(made, Factors(inner.number, Counter({(t, found_in[1]): n for t, n in inner.tensors.items()})))
    return made


def _exchanges_last(node: Node) -> bool:
    """Whether a node is the transpose of matrices."""
    rank = node.meta["val"].dim()
    if calls(node, aten.permute.default):
        return [axis % rank for axis in _args(node)[1]] == [*range(rank - 2), rank - 1, rank - 2]
    exchanged = calls(node, aten.transpose.int) and {axis % rank for axis in _args(node)[1:]} == {rank - 1, rank - 2}
    return exchanged or calls(node, aten.t.default)


def _factors(node: Node, size: int, shape: tuple[int, ...] = ()) -> Factors:
    """Of what has `size` elements in its last axis; `shape` is that of the multiplication which reads the node."""
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return Factors(1.0, Counter([node]))
    args, own = _args(node), tuple(node.meta["val"].shape)
    if _is_transparent(node, size):
        return _factors(args[0], size, shape)
    if node.target is aten.neg.default:
        return _times(Factors(-1.0, Counter()), _factors(args[0], size, shape))
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        one, other = (_factors(a, size, own) if isinstance(a, Node) else Factors(float(a), Counter()) for a in args)
        return _times(one, other)
    if (zero := number_apart(node, (0.0,))) is not None:
        condition = Factors(1.0, Counter([(args[0], zero, own)]))
        return _times(condition, _factors(args[3 - zero], size, own))
    if node.target in (aten.div.Tensor, aten.div.Scalar) and not isinstance(args[1], Node) and not node.kwargs:
        return _times(Factors(1 / float(args[1]), Counter()), _factors(args[0], size, shape))
    return Factors(1.0, Counter([node if _elements(node) == math.prod(shape or own) else (node, shape)]))


def _is_transparent(node: Node, size: int) -> bool:
    """Whether a node has the elements of another one, in order, but for rounding."""
    if node.target in SAME:
        return bool(node.meta["val"].dtype.is_floating_point)
    if not _moves_in_order(node):
        return False
    return _keeps_rows(_args(node)[0].meta["val"].shape, node.meta["val"].shape, size)


def _moves_in_order(node: Node) -> bool:
    """Whether a node is a view of a tensor's elements in their order, or of fewer that are expanded. Axes of one element may be
    anywhere, as `einsum` has them."""
    if node.target is aten.permute.default:
        source, axes = _args(node)
        shape = source.meta["val"].shape
        moved = [axis % len(shape) for axis in axes if shape[axis] != 1]
        return moved == sorted(moved)
    return node.target in IN_ORDER or node.target in (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _keeps_rows(before: Sequence[int], after: Sequence[int], size: int) -> bool:
    """Whether rows of `size` elements stay rows, but for axes of one element."""
    ends = [next((n for n in reversed(shape) if n != 1), 0) for shape in (before, after)]
    return math.prod(before) == math.prod(after) and ends == [size, size]


def _times(one: Factors, other: Factors) -> Factors:
    return Factors(one.number * other.number, one.tensors + other.tensors)
