"""Additions at places that are known, one for each element at most: elementwise, and no scatter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower
from kgen.reference.evaluate import evaluate_graph
from tests.op_case import capture, flat

put, masked_put = torch.ops.aten.index_put.default, torch.ops.aten._unsafe_masked_index_put_accumulate.default
X, Y = torch.arange(60.0).view(3, 4, 5), torch.arange(24.0).view(3, 4, 2) - 7

ADDITIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "columns": lambda x, y: put(torch.zeros_like(x), [None, None, torch.arange(2)], y, True),
    "columns later": lambda x, y: put(torch.zeros_like(x), [None, None, torch.arange(3, 5)], y, True),
    "onto numbers": lambda x, y: put(x * 2, [None, None, torch.arange(1, 3)], y, True),
    "a grid": lambda x, y: put(torch.ones_like(x[0]), [torch.arange(1, 4)[:, None], torch.arange(2)], y[0, 1:], True),
    "turned": lambda x, y: put(torch.ones_like(x[0]), [torch.arange(4), torch.arange(1, 3)[:, None]], y[0].t(), True),
    "slices": lambda x, y: torch.zeros_like(x).index_add(2, torch.arange(1, 3), y, alpha=3),
    "bools": lambda x, y: put(x > 20, [None, None, torch.arange(2)], y > 0, True),
    "masked": lambda x, y: masked_put(torch.zeros_like(x), y > 0, [None, None, torch.arange(1, 3)], y),
    "16 bits": lambda x, y: put(torch.zeros_like(x).half(), [None, None, torch.arange(2)], y.half(), True),
}
SCATTERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "every second": lambda x, y: put(torch.zeros_like(x), [None, None, torch.arange(0, 4, 2)], y, True),
    "one place": lambda x, y: put(torch.zeros_like(x), [None, None, torch.tensor([1, 1])], y, True),
    "in place": lambda x, y: put(x, [None, None, torch.arange(2)], y, True),
}


def scatters(fn: Callable[[Tensor, Tensor], Tensor]) -> int:
    """Scatters in the graph, whose results are checked."""
    made = lower(capture(fn, (X, Y), "fake"), LoweringContext())
    for got, want in zip(flat(evaluate_graph(made, [X, Y])), flat(fn(X, Y)), strict=True):
        torch.testing.assert_close(got, want)
    return sum(isinstance(node, ir.Scatter) for node in made.nodes)


@pytest.mark.parametrize("name", ADDITIONS)
def test_they_are_elementwise(name: str) -> None:
    assert scatters(ADDITIONS[name]) == 0


@pytest.mark.parametrize("name", SCATTERS)
def test_they_are_scattered(name: str) -> None:
    assert scatters(SCATTERS[name]) == 1


def test_an_index_past_the_end_raises() -> None:
    def past(x: Tensor, y: Tensor) -> Tensor:
        return put(torch.zeros_like(x), [None, None, torch.arange(4, 6)], y, True)

    with pytest.raises(IndexError):
        torch.compile(past, backend="kgen", options={"strict": True})(X, Y)


def test_zeros_have_eagers_sign() -> None:
    def added(x: Tensor, y: Tensor) -> Tensor:
        return 1 / put(torch.zeros_like(x), [None, None, torch.arange(2)], y, True)

    y = torch.full_like(Y, -0.0)
    torch.testing.assert_close(torch.compile(added, backend="kgen", options={"strict": True})(X, y), added(X, y))


def test_gradients_of_columns() -> None:
    def picked(x: Tensor) -> Tensor:
        return x.index_select(2, torch.arange(1, 4)).exp() * 2

    x = torch.randn(3, 4, 5, requires_grad=True)
    found, wanted = (torch.autograd.grad(fn(x).sum(), x)[0] for fn in (torch.compile(picked, backend="kgen"), picked))
    torch.testing.assert_close(found, wanted)
