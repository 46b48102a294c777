"""`cond` with small branches, as both of them and a choice between their results.

To run the branch that a tensor names, somebody reads the tensor: on a GPU the host waits for it. Two branches of a few
operators on few elements cost less, and fuse with what is around them. A branch must do no harm where it is not wanted: it
raises no error, draws no random numbers, and reads nothing at places that data decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from kgen.capture.higher_order import NoMeaning

__all__ = ["both"]

aten = torch.ops.aten

# Results of operators that both branches may compute together, in elements. The call of a branch takes as long as some ten
# thousand on a CPU, and with the read of a flag as some hundred thousand on a GPU.
MOST, MOST_ON_GPU = 1 << 15, 1 << 20
# They move elements, or sum them up, at places that no data decide. So do views and elementwise operators.
_HARMLESS = frozenset(
    {
        aten.clone.default, aten.lift_fresh_copy.default, aten.copy.default,
        aten.select_scatter.default, aten.slice_scatter.default, aten.full.default,
        aten.full_like.default, aten.scalar_tensor.default, aten.arange.start_step,
        aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.amax.default, aten.amin.default,
        aten.any.default, aten.any.dim, aten.all.default, aten.all.dim, aten.cat.default,
    }
)  # fmt: skip
# Integers make these raise an error: where they divide by zero, or for a negative exponent.
_RAISE = frozenset({aten.div, aten.remainder, aten.fmod, aten.floor_divide, aten.pow, aten.float_power})


def both(pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> tuple[Any, ...]:
    """Both branches' results by the flag. Raises NoMeaning where a branch is large, or may do harm."""
    branches = true_fn, false_fn
    if not isinstance(pred, torch.Tensor) or not all(isinstance(one, GraphModule) for one in branches):
        raise NoMeaning
    elements = sum(_elements(node, pred.device) for branch in branches for node in branch.graph.nodes)
    if elements > (MOST_ON_GPU if pred.is_cuda else MOST):
        raise NoMeaning
    made = [branch(*operands) for branch in branches]
    try:
        return tuple(_chosen(pred, *pair) for pair in zip(*made, strict=True))
    except RuntimeError as cause:  # of other devices
        raise NoMeaning from cause


def _chosen(pred: torch.Tensor, one: Any, other: Any) -> Any:
    """Raises NoMeaning for what is no tensor, or would have other strides than the branches' results."""
    if one is None and other is None:
        return None
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dtype != other.dtype:
        raise NoMeaning
    chosen = torch.where(pred.reshape(()), one, other)
    if chosen.shape != one.shape or chosen.stride() != one.stride():
        raise NoMeaning
    return chosen


def _elements(node: torch.fx.Node, device: torch.device) -> int:
    """What a node computes. Raises NoMeaning if it may do harm where its branch is not wanted."""
    if node.op in ("placeholder", "output"):
        return 0
    values = [one for one in pytree.tree_leaves(node.meta.get("val")) if isinstance(one, torch.Tensor)]
    if node.op == "get_attr" and all(one.dim() == 0 for one in values):
        return 0  # a number
    if node.op != "call_function" or not values or not _is_harmless(node, values):
        raise NoMeaning
    if any((one.device != device and one.dim()) or not all(type(n) is int for n in one.shape) for one in values):
        raise NoMeaning
    if any(not isinstance(one.meta.get("val"), torch.Tensor) for one in node.all_input_nodes):
        raise NoMeaning  # a number that data have decided
    return 0 if _is_view(node.target) else sum(one.numel() for one in values)


def _is_harmless(node: torch.fx.Node, values: Sequence[torch.Tensor]) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    if target._schema.is_mutable:
        return False
    if target.overloadpacket in _RAISE and not all(one.is_floating_point() for one in values):
        return False
    return torch.Tag.pointwise in target.tags or _is_view(target) or target in _HARMLESS


def _is_view(target: Any) -> bool:
    return bool(target.is_view)
