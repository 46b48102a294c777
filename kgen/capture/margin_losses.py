"""Margin losses as eager computes them: torch takes them apart, before autograd sees them, into something else.

At a margin that is just kept, and at NaN, eager's loss and its gradient are 0; torch's parts have a gradient there, and NaN. Of
a list of labels that -1 ends, torch's parts add the loss of label 0 for each position behind the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from kgen.capture.operators import put_in_place

__all__ = ["keep_margin_losses"]

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}

_library = torch.library.Library("kgen", "FRAGMENT")
_library.define("multi_margin_loss(Tensor x, Tensor label, Scalar p, Scalar margin, Tensor? weight, int reduction) -> Tensor")
_library.define("multilabel_margin_loss(Tensor x, Tensor labels, int reduction) -> Tensor")


def _multi_margin_loss(x: Tensor, label: Tensor, p: float, margin: float, weight: Tensor | None, reduction: int) -> Tensor:
    x, label = torch.atleast_2d(x), torch.atleast_1d(label).unsqueeze(1)
    gap = margin - x.gather(1, label) + x
    is_other = torch.arange(x.shape[1], device=x.device) != label
    gap = torch.where(is_other & (gap > 0), gap, 0)
    loss = gap if p == 1 else gap * gap
    if weight is not None:
        loss = loss * torch.atleast_1d(weight)[label]
    return _reduced(loss.mean(1), reduction)


def _multilabel_margin_loss(x: Tensor, labels: Tensor, reduction: int) -> Tensor:
    """Labels are those in front of the first -1."""
    shape, x, labels = x.shape[:-1], torch.atleast_2d(x), torch.atleast_2d(labels)
    is_label = (labels == -1).cumsum(1) == 0
    labels = torch.where(is_label, labels, 0)
    is_named = (is_label.unsqueeze(2) & (labels.unsqueeze(2) == torch.arange(x.shape[1], device=x.device))).any(1, keepdim=True)
    gap = 1 - x.gather(1, labels).unsqueeze(2) + x.unsqueeze(1)
    loss = torch.where(is_label.unsqueeze(2) & ~is_named & (gap > 0), gap, 0)
    return _reduced(loss.sum((1, 2)).div(x.shape[1]), reduction).reshape(shape if reduction == 0 else ())


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    return loss.mean() if reduction == 1 else loss.sum() if reduction == 2 else loss


for _name, _function in (("multi_margin_loss", _multi_margin_loss), ("multilabel_margin_loss", _multilabel_margin_loss)):
    _library.impl(_name, _function, "CompositeImplicitAutograd")


def keep_margin_losses(gm: GraphModule) -> None:
    """Replaces margin losses in the graph."""
    if any("functorch" in getattr(node.target, "__module__", "") for node in gm.graph.nodes):
        return  # its transforms have no rule for the operators
    calls: dict[Any, Callable[..., Any]] = {F.multi_margin_loss: _of_one_label, F.multilabel_margin_loss: _of_labels}
    found = [(node, calls[node.target](*node.args, **node.kwargs)) for node in gm.graph.nodes if node.target in calls]
    for node, call in found:
        if call is not None:
            _replace(gm, node, *call)
    if found:
        gm.graph.lint()
        gm.recompile()


def _of_one_label(  # noqa: PLR0913  torch's arguments
    input: Node,  # noqa: A002  torch's name
    target: Node,
    p: Any = 1,
    margin: Any = 1.0,
    weight: Node | None = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> tuple[Any, tuple[Any, ...]] | None:
    if size_average is not None or reduce is not None:
        return None
    return torch.ops.kgen.multi_margin_loss.default, (input, target, p, margin, weight, REDUCTIONS[reduction])


def _of_labels(
    input: Node,  # noqa: A002  torch's name
    target: Node,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
) -> tuple[Any, tuple[Any, ...]] | None:
    if size_average is not None or reduce is not None:
        return None
    return torch.ops.kgen.multilabel_margin_loss.default, (input, target, REDUCTIONS[reduction])


def _replace(gm: GraphModule, node: Node, operator: Any, arguments: tuple[Any, ...]) -> None:
    with gm.graph.inserting_before(node):
        new = gm.graph.call_function(operator, arguments)
    put_in_place(new, node)
