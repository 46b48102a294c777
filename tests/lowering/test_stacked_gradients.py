"""The gradients of a tensor's slices are one stack of them, where no order of additions changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_case import capture, check, tensor
from torch import Tensor

from kgen import lowering

F32 = torch.float32
STEPS = 7


def spread(part: Tensor, like: Tensor, k: int) -> Tensor:
    return torch.select_scatter(torch.zeros_like(like), part, 1, k)


def all_indices(x: Tensor, *parts: Tensor) -> Tensor:
    total = spread(parts[-1], x, STEPS - 1)
    for k in reversed(range(STEPS - 1)):
        total = total + spread(parts[k], x, k)
    return total * 2


def but_one(x: Tensor, *parts: Tensor) -> Tensor:
    total = spread(parts[0], x, -1)
    for k in range(1, STEPS - 1):
        total = total + spread(parts[k], x, k)
    return total


def beside_all_elements(x: Tensor, *parts: Tensor) -> Tensor:
    total = spread(parts[0], x, 0)
    for k in range(1, STEPS - 1):
        total = total + spread(parts[k], x, k)
    return total + x + spread(parts[-1], x, STEPS - 1)


def beside_two(x: Tensor, *parts: Tensor) -> Tensor:
    total = x + spread(parts[0], x, 0)
    for k in range(1, STEPS):
        total = total + spread(parts[k], x, k)
    return total + x * 3


def one_index_again(x: Tensor, *parts: Tensor) -> Tensor:
    total = spread(parts[0], x, 0)
    for k in range(1, STEPS):
        total = total + spread(parts[k], x, min(k, STEPS - 2))
    return total


def one_index_three_times(x: Tensor, *parts: Tensor) -> Tensor:
    total = spread(parts[0], x, 0)
    for k in range(1, STEPS):
        total = total + spread(parts[k], x, min(k, STEPS - 3))
    return total


def one_index_again_beside_all_elements(x: Tensor, *parts: Tensor) -> Tensor:
    return one_index_again(x, *parts) + x


def read_on_the_way(x: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    total, out = spread(parts[0], x, 0), []
    for k in range(1, STEPS):
        total = total + spread(parts[k], x, k)
        out.append(total.sum(1))
    return total, *out


def few(x: Tensor, *parts: Tensor) -> Tensor:
    return spread(parts[0], x, 0) + spread(parts[1], x, 1) + spread(parts[2], x, 2)


def of_ones(x: Tensor, *parts: Tensor) -> Tensor:
    total = torch.select_scatter(torch.ones_like(x), parts[0], 1, 0)
    for k in range(1, STEPS):
        total = total + torch.select_scatter(torch.ones_like(x), parts[k], 1, k)
    return total


def inputs() -> list[Any]:
    return [tensor(F32, 3, STEPS, 5), *(tensor(F32, 3, 5) + k for k in range(STEPS))]


def stacks(fn: Callable[..., Any]) -> int:
    gm = lowering.reinplace(capture(fn, inputs()))
    return sum(node.target is torch.ops.aten.stack.default for node in gm.graph.nodes)


@pytest.mark.parametrize("fn", [all_indices, but_one, beside_all_elements, one_index_again])
def test_joined(fn: Callable[..., Any]) -> None:
    assert stacks(fn) == 1
    check(fn, inputs())


@pytest.mark.parametrize(
    "fn", [beside_two, one_index_three_times, one_index_again_beside_all_elements, read_on_the_way, few, of_ones]
)
def test_apart(fn: Callable[..., Any]) -> None:
    assert stacks(fn) == 0
    check(fn, inputs())


@pytest.mark.cpu
def test_sizes_that_data_give_are_not_compared() -> None:
    """A sum with one element of others, of as many elements as are positive."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return x[x > 0] + y

    x, y = torch.randn(50), torch.randn(1)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(torch.compile(fn, backend="kgen", fullgraph=True)(x, y), fn(x, y))
