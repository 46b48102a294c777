"""What a graph may compute again although the last bits need not be the same: what changes little where its operands do.

A contraction that is computed again may add up in another order. Then a comparison of its elements with what was made of them
the first time, such as the maximum of a row, has another answer.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

__all__ = ["all_behind", "is_smooth"]

aten = torch.ops.aten

# A choice is between operands: what it asks is an operand, too.
SMOOTH = {
    aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.exp, aten.exp2, aten.expm1, aten.log, aten.log2,
    aten.log1p, aten.tanh, aten.sigmoid, aten.sin, aten.cos, aten.erf, aten.pow, aten.square, aten.sqrt, aten.rsqrt,
    aten.reciprocal, aten.abs, aten.maximum, aten.minimum, aten.clamp, aten.clamp_min, aten.clamp_max, aten.relu,
    aten.addcmul, aten.addcdiv, aten.lerp, aten.where, aten._to_copy, aten.clone, aten.alias, aten.detach,
}  # fmt: skip
MOVES = {aten.expand.default, aten.reshape.default, aten._unsafe_view.default}


def is_smooth(node: Node) -> bool:
    """Whether elements of an elementwise call change little where those of its operands do."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or "rounding_mode" in node.kwargs:
        return False
    moves = bool(getattr(target, "is_view", False)) or target in MOVES
    return moves or (target.overloadpacket in SMOOTH and bool(node.meta["val"].dtype.is_floating_point))


def all_behind(nodes: Iterable[Node]) -> set[Node]:
    """All that depends on some nodes."""
    found, waiting = set[Node](), list(nodes)
    while waiting:
        more = set(waiting.pop().users) - found
        found |= more
        waiting += more
    return found
