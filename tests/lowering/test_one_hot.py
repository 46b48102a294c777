"""Sums along one-hot rows: one term of each counts, and no row is walked."""

from __future__ import annotations

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph

COLUMNS = 40


def one_hot(t: Tensor, value: float = -1.0) -> Tensor:
    return torch.zeros(t.shape[0], COLUMNS).scatter(1, t, value)


def summed(c: Tensor, t: Tensor) -> Tensor:
    return (one_hot(t) * c).sum(1)


def summed_and_kept(c: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """As in the gradient of a log-softmax: it has two readers, so that it is stored."""
    scaled = one_hot(t) * (c / 3).tanh().exp()
    return scaled.sum(1, keepdim=True), scaled.exp()


def divided(c: Tensor, t: Tensor) -> Tensor:
    return (-one_hot(t, 2.5) / c).sum(1, keepdim=True)


def sums_of(fn: object, *args: Tensor) -> int:
    """The reductions of a lowered graph, whose results are eager's."""
    graph = lower(reinplace(capture(fn, args, "fake")), LoweringContext())
    got, want = evaluate_graph(graph, list(args)), fn(*args)  # type: ignore[operator]
    for one, other in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    return sum(isinstance(node, ir.Reduction) for node in graph.nodes)


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(6, 1, generator=generator), torch.tensor([0, 39, 7, 7, 12, 1])[:, None]


@pytest.mark.parametrize("fn", [summed, summed_and_kept, divided])
def test_a_sum_along_a_one_hot_row_is_no_reduction(fn: object) -> None:
    assert sums_of(fn, *inputs()) == 0


@pytest.mark.parametrize("fn", [summed, divided])
def test_what_zero_makes_no_zero_of(fn: object) -> None:
    """0 times infinity is in the sum, as 0 divided by 0 is."""
    c, t = inputs()
    c[0], c[1], c[2], c[3] = float("inf"), float("nan"), 0.0, float("-inf")
    assert sums_of(fn, c, t) == 0


def test_what_differs_along_the_row_is_summed() -> None:
    c, t = inputs()
    assert sums_of(lambda c, t: (one_hot(t) * c.expand(6, COLUMNS).cumsum(1)).sum(1), c, t) == 1
    assert sums_of(lambda c, t: (one_hot(t) * c).exp().sum(1), c, t) == 1
    assert sums_of(lambda c, t: ((one_hot(t) + 1) * c).sum(1), c, t) == 1


def test_a_value_that_was_changed_since_is_not_computed_again() -> None:
    """It is made of what `c` was before."""

    def changed(c: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        scaled = one_hot(t) * (c / 3).tanh().exp()
        kept = scaled.exp()
        c.add_(1)
        return scaled.sum(1), kept

    c, t = inputs()
    graph = lower(reinplace(capture(changed, (c.clone(), t), "fake")), LoweringContext())
    want = changed(c.clone(), t)
    for one, other in zip(evaluate_graph(graph, [c.clone(), t]), want, strict=False):
        torch.testing.assert_close(one, other)
