"""Circular pads are concatenations: a kernel a padded dimension at most, forward and in the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def compiled(fn: Callable[..., Any], x: Tensor, **options: Any) -> list[int]:
    """How many kernels each graph has, where results and gradients are eager's."""
    made, wanted = (one.detach().clone().requires_grad_() for one in (x, x))
    with recording() as seen:
        got = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False}, **options)(made)
        got.sin().sum().backward()
    expected = fn(wanted)
    expected.sin().sum().backward()
    assert got.stride() == expected.stride()
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(made.grad, wanted.grad)
    assert made.grad is not None
    assert wanted.grad is not None
    assert made.grad.stride() == wanted.grad.stride()
    return [len(one.plan.kernels) for one in seen.graphs if isinstance(one, Record)]


def laplacian(x: Tensor) -> Tensor:
    p = F.pad(x.exp(), (1, 1, 1, 1), mode="circular")
    return p[..., 2:, 1:-1] + p[..., :-2, 1:-1] + p[..., 1:-1, 2:] + p[..., 1:-1, :-2] - 4 * x


@pytest.mark.parametrize(
    ("shape", "pads"),
    [((2, 3, 7), (2, 3)), ((1, 2, 5, 6), (0, 2, 1, 0)), ((3, 5, 6), (6, 6, 5, 5)), ((1, 1, 4, 3, 5), (1, 2, 0, 3, 4, 1))],
)
def test_a_pad(shape: tuple[int, ...], pads: tuple[int, ...]) -> None:
    dims = sum(any(pads[k : k + 2]) for k in range(0, len(pads), 2))
    assert max(compiled(lambda x: F.pad(x, pads, "circular"), torch.randn(shape))) <= dims


def test_producer_and_consumer() -> None:
    assert max(compiled(laplacian, torch.randn(2, 3, 9, 8))) <= 4


def test_eagers_strides() -> None:
    x = torch.randn(2, 3, 6, 5).to(memory_format=torch.channels_last)
    compiled(lambda x: F.pad(x, (1, 2, 3, 0), mode="circular"), x)


def test_no_alias_of_what_is_not_padded() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(x, (0, 0), mode="circular")
        y += 1
        return x * 1, y

    x = torch.randn(1, 2, 5)
    torch.testing.assert_close(torch.compile(fn, backend="kgen")(x), fn(x))


def test_dynamic_sizes() -> None:
    fn = torch.compile(lambda x: F.pad(x, (2, 1, 0, 3), mode="circular") * 2, backend="kgen", dynamic=True)
    for size in (5, 8):
        x = torch.randn(2, size + 1, size)
        torch.testing.assert_close(fn(x), F.pad(x, (2, 1, 0, 3), mode="circular") * 2)


def test_a_crop_stays() -> None:
    def fn(x: Tensor) -> Tensor:
        return F.pad(x, (2, -1), mode="circular")

    x = torch.randn(1, 2, 5)
    torch.testing.assert_close(torch.compile(fn, backend="kgen")(x), fn(x))
