"""Weights of a softmax that a mask makes 0 once more, as encoders of speech do for rows that are padding as a whole:

    where(m, 0, softmax(where(m, lowest, s)))        ->   where(m, 0, softmax(where(m, -inf, s)))

`lowest` is the lowest number of a type. Where it stands elements have no weight, as with -inf, but in rows of nothing else. All
weights of such a row are 0 in the end, and so are their gradients. The scheduler knows that of the new form
(`scheduler/transforms/softmax_form.py`), and templates leave tiles out that -inf fills.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.recompute_scores import CONSTANTS, SAME, Calls, Softmax, number_apart, number_of, softmax_in
from kgen.capture.tangents import of_tangents

__all__ = ["simplify_masked_weights"]

aten = torch.ops.aten

CONTRACTIONS = {aten.bmm.default, aten.mm.default, aten.convolution.default}
DIVISIONS = {aten.div.Tensor, aten.div.Scalar}
# They make finite numbers of such.
MODERATE = {
    *SAME, aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.tanh.default,
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default, aten.permute.default,
    aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor, aten.select.int, aten.cat.default,
    aten.constant_pad_nd.default, aten.gather.default,
}  # fmt: skip
NOT = {aten.logical_not.default, aten.bitwise_not.default}


def simplify_masked_weights(gm: GraphModule) -> GraphModule:
    """The graph of inference, or of both directions, changed in place."""
    backward = of_tangents(gm) - {gm.graph.output_node()}  # what a graph gives away somebody else reads
    forward = [node for node in gm.graph.nodes if node not in backward and node.target is aten.where.self]
    changed = [_Rewrite(gm, node, backward).run() for node in forward]
    if any(changed):
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


class _Rewrite(Calls):
    """Changes what is around one call that may make weights 0."""

    def __init__(self, gm: GraphModule, node: Node, backward: set[Node]) -> None:
        super().__init__(gm.graph, node)
        self.node, self.backward = node, backward

    def run(self) -> bool:
        chosen = number_apart(self.node, (0.0,))
        weights = None if chosen is None else _bare(self.node.args[3 - chosen])
        softmax = None if weights is None else softmax_in(weights)
        if chosen is None or weights is None or softmax is None:
            return False
        return self._fill(chosen, softmax)

    def _fill(self, chosen: int, softmax: Softmax) -> bool:
        """Scores that are the lowest number under the same mask become -inf there."""
        filled = _bare(softmax.scores)
        number = number_apart(filled, _lowest(filled))
        if number is None or _without(self.node, chosen) != _without(filled, number):
            return False
        if not _is_finite(filled.args[3 - number]) or not self._is_alone(filled, softmax):
            return False
        with self.graph.inserting_before(filled):
            value = filled.meta["val"]
            nothing = self._call(aten.scalar_tensor.default, -math.inf, dtype=value.dtype, device=value.device)
        filled.update_arg(number, nothing)
        return True

    def _is_alone(self, filled: Node, softmax: Softmax) -> bool:
        """Whether forward reads the scores for the softmax alone, and this for the weights that are made 0 alone."""
        power: Any = softmax.weights.args[0]
        own = {softmax.top, power.args[0], power, softmax.total}
        read = [*self._readers(filled), *self._readers(softmax.weights)]
        parts = [user for one in own for user in one.users if user not in self.backward]
        return {*read, *parts} <= {*own, softmax.weights, self.node}

    def _readers(self, node: Node) -> Iterator[Node]:
        """Who reads a node in forward, in whatever type. An alias that nobody there reads is for backward."""
        for user in node.users:
            if user.target in SAME:
                yield from self._readers(user)
            elif user not in self.backward:
                yield user


def _lowest(scores: Node) -> Container[float]:
    """The numbers below which a tensor has none but -inf: that of its own type, and those that are as far out."""
    kinds = {scores.meta["val"].dtype, torch.bfloat16, torch.float32}
    return {torch.finfo(kind).min for kind in kinds if kind.is_floating_point}


def _without(choice: Node, argument: int) -> tuple[Node, bool]:
    """A condition, and what it is where a choice is this argument."""
    condition, holds = choice.args[0], argument == 1
    assert isinstance(condition, Node)
    while condition.target in NOT:
        [condition], holds = condition.all_input_nodes, not holds
    return condition, holds


def _is_finite(root: Any) -> bool:
    """Whether a tensor is made of contractions and numbers, as are scores in front of masks, biases and the like. Of others
    some may be -inf, and a row of these is no row of zeros."""
    seen, waiting = set[Node](), [root]
    while waiting:
        node = waiting.pop()
        if node in seen or not isinstance(node, Node) or node.target in CONTRACTIONS:
            continue
        if not node.meta["val"].dtype.is_floating_point:  # indices
            continue
        seen.add(node)
        if node.target in CONSTANTS:
            number = number_of(node)
            known = number is not None and math.isfinite(number)
        else:
            known = node.target in MODERATE or (node.target in DIVISIONS and not isinstance(node.args[1], Node))
        if not known or not all(math.isfinite(one) for one in node.args if isinstance(one, int | float)):
            return False
        waiting += node.all_input_nodes
    return True


def _bare(node: Any) -> Any:
    """A node in whatever type it was before."""
    while isinstance(node, Node) and node.target in SAME and node.args:
        node = node.args[0]
    return node
