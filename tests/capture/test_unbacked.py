"""Sizes, indices and numbers that only data decide."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.cpu
Function = Callable[[Tensor, Tensor], Any]


@pytest.fixture(autouse=True)
def captured() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield
    torch._dynamo.reset()


def number(n: Tensor) -> int:
    """A number that Dynamo does not know: of an input itself it may."""
    return int((n + 0).item())


def attempt(function: Function, x: Tensor, n: Tensor) -> Any:
    try:
        return function(x, n)
    except (RuntimeError, IndexError) as error:
        return error


def set_columns(x: Tensor, n: Tensor) -> Tensor:
    out = x.clone()
    out[:, : number(n)] = 0
    return out


def matmul_of_columns(x: Tensor, n: Tensor) -> Tensor:
    some = x[:, : number(n)]
    return some @ some.t()


def not_three(x: Tensor, n: Tensor) -> Tensor:
    count = number(n)
    torch._check(count != 3)
    return x + count


def two_equal_numbers(x: Tensor, n: Tensor) -> Tensor:
    count, other = number(n), int((n.abs() + 0).item())
    torch._check(count == other)
    return x + count * other


FUNCTIONS: dict[str, Function] = {
    "first columns": lambda x, n: x[:, : number(n)].sum(-1),
    "columns from": lambda x, n: x[:, number(n) :].sum(-1),
    "last columns": lambda x, n: x[:, -number(n) :].exp(),
    "every other": lambda x, n: x[:, 1 : number(n) : 2].sum(-1),
    "narrow": lambda x, n: x.narrow(1, 0, number(n)) * 2,
    "split": lambda x, n: x.split([number(n), 8 - number(n)], 1)[1].sum(-1),
    "row": lambda x, n: x[number(n)] + 1,
    "column": lambda x, n: x.select(1, number(n)).exp(),
    "zeros": lambda x, n: torch.zeros(number(n)) + 1,
    "arange": lambda x, n: torch.arange(number(n)) * 2,
    "scalar": lambda x, n: x * number(n),
    "write": set_columns,
    "matmul": matmul_of_columns,
    "check": not_three,
    "equal": two_equal_numbers,
    "masked": lambda x, n: torch.masked_select(x, x > 0).sin(),
    "nonzero": lambda x, n: x.nonzero().sum(0) + n,
    "repeated": lambda x, n: torch.repeat_interleave(x[0], n.expand(8)) + 1,
}


@pytest.mark.parametrize("bound", [math.inf, -math.inf])
def test_numbers_are_compared_with_infinity(bound: float) -> None:
    run = torch.compile(lambda x: x.item() == bound, backend="kgen", fullgraph=True)
    assert [run(torch.tensor([n])) for n in (3.0, bound, -bound)] == [False, True, False]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_from_data(name: str) -> None:
    """Right for each number, with an error where eager has one: what torch assumes of a number is checked."""
    function = FUNCTIONS[name]
    run = torch.compile(function, backend="kgen", fullgraph=True)
    x = torch.randn(6, 8)
    for value in (3, 5, -2, 20, 0):
        found, expected = attempt(run, x, torch.tensor(value)), attempt(function, x, torch.tensor(value))
        if isinstance(expected, Exception):
            assert type(found) is type(expected), value
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["first columns", "columns from", "narrow", "column", "masked", "scalar"])
def test_gradients_through_sizes_from_data(name: str) -> None:
    function = FUNCTIONS[name]
    run = torch.compile(function, backend="kgen", fullgraph=True)
    for value in (3, 5, 1):
        x, n = torch.randn(6, 8, requires_grad=True), torch.tensor(value)
        (found,) = torch.autograd.grad(run(x, n).square().sum(), x)
        (expected,) = torch.autograd.grad(function(x, n).square().sum(), x)
        torch.testing.assert_close(found, expected)


def test_results_of_a_branch_have_sizes_that_its_data_decide() -> None:
    """Torch does not note in bodies that an operator decides sizes."""

    def rows(x: Tensor) -> Tensor:
        return torch.cos(torch.ones([x.nonzero().size(0), 8]))

    def others(x: Tensor) -> Tensor:
        return torch.sin(torch.ones([(x < 0).nonzero().size(0), 8]))

    def chosen(flag: Tensor, x: Tensor) -> Tensor:
        return torch.cond(flag, rows, others, [x.sin()])

    run = torch.compile(chosen, backend="kgen", dynamic=True)
    x = torch.randn(2, 3, 3)
    for flag in (torch.tensor(True), torch.tensor(False)):
        torch.testing.assert_close(run(flag, x), chosen(flag, x))


def test_parts_whose_sizes_are_said_in_several_ways() -> None:
    """The last part of a split has what is left of a symbolic quotient."""

    def joined(x: Tensor) -> Tensor:
        return torch.cat(x.view(-1, 64, 4).split(8, 1))

    for options in ({"verify": True}, {}):
        torch._dynamo.reset()
        run, x = torch.compile(joined, backend="kgen", options=options), torch.randn(512, 4)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(run(x), joined(x))
        torch.testing.assert_close(run(x[:192]), joined(x[:192]))
