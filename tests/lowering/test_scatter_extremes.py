"""Extremes of floats that data send to one place: kernels find those of integer ranks on a GPU, which has atomics of these."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kgen.ir.plan import Kernel
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def largest(at: Tensor, x: Tensor) -> Tensor:
    """Of the messages of each node, its fill among them."""
    return torch.full((40, x.shape[1]), -0.25, dtype=x.dtype, device=x.device).scatter_reduce(0, at, x, "amax")


def smallest(at: Tensor, x: Tensor) -> Tensor:
    return torch.zeros(40, x.shape[1], dtype=x.dtype, device=x.device).scatter_reduce(0, at, x, "amin")


def messages_alone(at: Tensor, x: Tensor) -> Tensor:
    """Fills stay where no message goes."""
    empty = torch.zeros(40, x.shape[1], dtype=x.dtype, device=x.device)
    return empty.index_reduce(0, at[:, 0], x, "amax", include_self=False)


def into(table: Tensor, at: Tensor, x: Tensor) -> Tensor:
    return table.scatter_reduce(0, at, x, "amax")


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    at, x = torch.randint(35, (100, 1)).expand(100, 7), torch.randn(100, 7).to(dtype)
    x[3, 0], x[4, 1], x[5, 2] = float("nan"), float("inf"), -float("inf")
    x[6, 3] = -torch.tensor(float("nan"))
    return at, x


@pytest.mark.parametrize("fn", [largest, smallest, messages_alone])
def test_kernels_alone(fn: object) -> None:
    for dtype in KINDS:
        assert all(isinstance(step, Kernel) for step in planned(fn, *inputs(dtype)).steps)  # type: ignore[arg-type]


def test_numbers_in_memory_stay_the_library_s() -> None:
    steps = planned(into, torch.randn(40, 7), *inputs(torch.float32)).steps
    assert not all(isinstance(step, Kernel) for step in steps)


@pytest.mark.interpret
@pytest.mark.parametrize(("fn", "dtype"), itertools.product((largest, smallest, messages_alone), KINDS))
def test_values(fn: object, dtype: torch.dtype) -> None:
    given = inputs(dtype)
    with torch.no_grad():
        got, want = compiled(fn, *given), fn(*given)  # type: ignore[arg-type,operator]
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpret
def test_gradients() -> None:
    at, x = inputs(torch.float32)
    x = x.nan_to_num().clamp(-3, 3)
    got, want = (x.clone().requires_grad_() for _ in range(2))
    compiled(largest, at, got).square().sum().backward()
    largest(at, want).square().sum().backward()
    torch.testing.assert_close(got.grad, want.grad)


@pytest.mark.interpret
def test_gradients_of_what_is_rounded() -> None:
    """In bfloat16 the largest of what a kernel computes equals what another one computes again, as both are stored."""

    def messages(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.zeros(40, 7, dtype=x.dtype).scatter_reduce(0, at, (x * y).relu(), "amax")

    at, x = inputs(torch.bfloat16)
    x = x.nan_to_num().clamp(-3, 3)
    found = []
    for fn in (lambda *args: compiled(messages, *args), messages):
        given = [x.clone().requires_grad_(), x.flip(0).requires_grad_()]
        fn(at, *given).float().sum().backward()
        found.append([tensor.grad for tensor in given])
    torch.testing.assert_close(found[0], found[1])
