"""Sums along one-hot rows: one term of each counts, and no row is walked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir import values as vs
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


def scatters_of(fn: object, *args: Tensor) -> int:
    """The scatters of a lowered graph, whose results are eager's."""
    graph = lower(reinplace(capture(fn, args, "fake")), LoweringContext())
    [got], want = evaluate_graph(graph, list(args)), fn(*args)  # type: ignore[operator]
    torch.testing.assert_close(got, want, equal_nan=True)
    return sum(isinstance(node, ir.Scatter) for node in graph.nodes)


def put(c: Tensor, t: Tensor) -> Tensor:
    """As the gradient of a minimum along rows."""
    return torch.zeros(6, COLUMNS).scatter(1, t, c / 3) + 1


@pytest.mark.parametrize("columns", [1, 3], ids=["as large as the index", "larger"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int32])
def test_one_number_of_each_row_in_zeros_is_no_scatter(columns: int, kind: torch.dtype) -> None:
    c, t = inputs()
    c = (c * 9).to(kind).expand(6, columns).contiguous()
    assert scatters_of(lambda c, t: torch.zeros(6, COLUMNS, dtype=kind).scatter(1, t, c) + 1, c, t) == 0
    assert scatters_of(lambda c, t: torch.full((COLUMNS, 6), 7, dtype=kind).scatter(0, t.t(), c.t()), c, t) == 0


def test_what_is_no_one_hot_row_is_scattered() -> None:
    c, t = inputs()
    two = t.expand(6, 2)
    assert scatters_of(lambda c, t: torch.zeros(6, COLUMNS).scatter(1, t, c.expand(6, 2)), c, two) == 1
    assert scatters_of(lambda c, t: torch.zeros(7, COLUMNS).scatter(1, t, c), c, t) == 1, "a row without a number"
    assert scatters_of(lambda c, t: torch.zeros(6, COLUMNS).scatter(1, t, c.tanh().exp().sin().lgamma()), c, t) == 1, "dear"
    assert scatters_of(lambda c, t: c.expand(6, COLUMNS).clone().scatter(1, t, c), c, t) == 1, "no constant"


def test_one_number_of_each_row_in_what_is_computed_is_no_scatter() -> None:
    """As the best one's score that is set to zero before the next is looked for: no kernel of its own for one number a row."""
    c, t = inputs()

    def scores(c: Tensor) -> Tensor:
        return c * torch.arange(COLUMNS)

    def cleared(c: Tensor, t: Tensor) -> Tensor:
        made = scores(c)
        made[torch.arange(6), t[:, 0]] = 0
        return made * 2

    assert scatters_of(cleared, c, t) == 0
    assert scatters_of(cleared, c, t - COLUMNS) == 0, "counted from the end"
    assert scatters_of(lambda c, t: scores(c).scatter(1, t, c + 1), c, t) == 0
    assert scatters_of(lambda c, t: scores(c).t().exp().scatter(0, t.t(), 3.0), c, t) == 0
    assert scatters_of(lambda c, t: scores(c).index_put((torch.arange(6), t[:, 0]), c[:, 0], accumulate=True), c, t) == 1
    assert scatters_of(lambda c, t: scores(c).index_put((t[:, 0], torch.arange(6)), c[:, 0]), c, t % 6) == 1, "rows of data"


def test_a_source_that_was_changed_since() -> None:
    def changed(c: Tensor, t: Tensor) -> Tensor:
        made = put(c, t)
        c.add_(1)
        return made

    c, t = inputs()
    graph = lower(reinplace(capture(changed, (c.clone(), t), "fake")), LoweringContext())
    torch.testing.assert_close(evaluate_graph(graph, [c.clone(), t])[-1], put(c, t))


def test_an_index_outside_is_still_an_error() -> None:
    c, t = inputs()
    graph = lower(reinplace(capture(put, (c, t), "fake")), LoweringContext())
    [node] = [node for node in graph.nodes if isinstance(node, ir.Pointwise)]
    assert any(value.op == "assert" for value in vs.topological([node.value]))


def added(sizes: tuple[int, int], dim: int, kind: torch.dtype = torch.float32) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda c, t: torch.zeros(sizes, dtype=kind).scatter_add(dim, t, c) * 2


def test_one_addition_a_row_to_zeros_is_no_scatter() -> None:
    """As in the gradient of picked elements: no atomics, and no zeros that are filled before."""
    c, t = inputs()
    assert scatters_of(added((6, COLUMNS), 1), c, t) == 0
    assert scatters_of(added((COLUMNS, 6), 0), c.t(), t.t()) == 0
    assert scatters_of(added((6, COLUMNS), 1, torch.int64), t * 3, t) == 0
    assert scatters_of(lambda c, t: added((6, COLUMNS), 1)(c.tanh().exp().sin().lgamma(), t), c, t) == 0, "dear, so stored"


def test_other_additions_are_scattered() -> None:
    c, t = inputs()
    assert scatters_of(added((6, COLUMNS), 1), c.expand(6, 2), t.expand(6, 2)) == 1, "two a row"
    assert scatters_of(lambda c, t: torch.ones(6, COLUMNS).scatter_add(1, t, c), c, t) == 1, "to ones"
    assert scatters_of(added((7, COLUMNS), 1), c, t) == 1, "a row without a number"
    assert scatters_of(added((6, COLUMNS), 1), c.expand(6, 2), t) == 1, "a larger source"


def test_one_element_of_each_row_by_advanced_indices_is_no_scatter() -> None:
    """As in the gradient of `x[torch.arange(len(x)), labels]`, with indices that count from the end."""
    c, t = inputs()
    label = t[:, 0] - 20
    zeros = (6, COLUMNS)
    assert (
        scatters_of(lambda c, t: torch.zeros(zeros).index_put((torch.arange(6), t), c, accumulate=True) * 2, c[:, 0], label)
        == 0
    )
    assert scatters_of(lambda c, t: torch.ones(zeros).index_put((torch.arange(6), t), c) * 2, c[:, 0], label) == 0
    assert (
        scatters_of(lambda c, t: torch.zeros(COLUMNS, 6).index_put((t, torch.arange(6)), c.sin().lgamma()), c[:, 0], label) == 0
    )
    assert scatters_of(lambda c, t: torch.zeros(zeros).index_put((t % 6, t), c, accumulate=True), c[:, 0], label) == 1, (
        "which rows?"
    )
    assert scatters_of(lambda c, t: torch.zeros(7, COLUMNS).index_put((torch.arange(6), t), c), c[:, 0], label) == 1, (
        "some rows"
    )


def test_elements_of_rows_in_three_dimensions() -> None:
    """The loops of what is kept stand before or after those of the indices."""
    t, c, put = torch.tensor([3, 0, 4, 4, 1, 2]), torch.randn(6, 5), torch.ops.aten.index_put
    assert scatters_of(lambda c, t: put(torch.zeros(6, 7, 5), [torch.arange(6), t], c, True) * 2, c, t) == 0
    assert scatters_of(lambda c, t: put(torch.zeros(5, 6, 7), [None, torch.arange(6), t], c.t(), True), c, t) == 0
    assert scatters_of(lambda c, t: put(torch.zeros(6, 5, 7), [torch.arange(6), None, t], c, True), c, t) == 0


def test_all_elements_in_order_are_no_scatter() -> None:
    """As in the gradient of an interpolation to the size that a tensor has: the dimension of one element is not indexed."""
    c, put = torch.randn(6, 5), torch.ops.aten.index_put
    assert scatters_of(lambda c, t: put(torch.zeros(1, 6, 5), [None, None, torch.arange(5)], c[None], True) * 2, c, c) == 0
    assert scatters_of(lambda c, t: put(torch.zeros(6, 1, 5), [None, None, torch.arange(5)], c[:, None], True), c, c) == 0
    assert scatters_of(lambda c, t: put(torch.ones(1, 6), [None, torch.arange(6)], c.t()[:1]) * 2, c, c) == 0
