"""Writes at every k-th place that fill a tensor between them are one kernel, with their gradients right; others stay writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    a, b = x[..., ::2], x[..., 1::2]
    out[..., ::2] = a * cos - b * sin
    out[..., 1::2] = b * cos + a * sin
    return out * 2


def colours(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In any order, and with a number for one of three."""
    out = torch.zeros(3 * x.shape[0], x.shape[1], dtype=torch.float64)
    out[2::3], out[0::3], out[1::3] = x, x.exp(), 5.0
    return out


def given(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Into an argument."""
    x[:, ::2], x[:, 1::2] = cos, sin + x.sum(1, keepdim=True)
    return x.exp()


def in_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last place stays as it was."""
    out = x.clone()
    out[:, :6:2], out[:, 1::2] = cos[:3], sin
    return out


def read_between(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros_like(x)
    out[:, 1::2] = cos
    total = out.sum()
    out[:, ::2] = sin * 2
    return out, total


def of_the_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What is written comes from another write."""
    out = torch.zeros_like(x)
    out[:, ::2] = cos * x[:, :4]
    out[:, 1::2] = out[:, ::2] * 3
    return out


def at_one_place_again(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = x.exp()
    out[:, ::2] = cos
    out[:, ::2] = sin
    return out


def flat(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def arguments(requires: bool) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    sizes = ((6, 8), (4,), (4,))
    return [torch.randn(size, generator=made).requires_grad_(requires and k > 0) for k, size in enumerate(sizes)]


@pytest.mark.parametrize(("dynamic", "trains"), [(False, False), (True, True)])
@pytest.mark.parametrize(
    "fn", [rotary, colours, given, in_part, read_between, of_the_first, at_one_place_again], ids=lambda fn: fn.__name__
)
def test_results_are_eagers(fn: Callable[..., Tensor], dynamic: bool, trains: bool) -> None:
    torch._dynamo.reset()
    made, wanted = arguments(trains), arguments(trains)
    got = flat(torch.compile(fn, backend="kgen", dynamic=dynamic, options={"cache": False, "strict": True})(*made))
    expected = flat(fn(*wanted))
    for one, other in zip((*got, *made), (*expected, *wanted), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)
    if trains and any(one.requires_grad for one in expected):
        for out in (got, expected):
            sum((one * torch.linspace(-1, 1, one.numel()).view_as(one)).sum() for one in out if one.requires_grad).backward()
        for one, other in zip(made[1:], wanted[1:], strict=True):
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize(("fn", "count"), [(rotary, 1), (colours, 1), (of_the_first, 1), (read_between, 2)])
def test_kernels(fn: Callable[..., Tensor], count: int) -> None:
    torch._dynamo.reset()
    with recording() as seen:
        torch.compile(fn, backend="kgen", options={"cache": False})(*arguments(False))
    [graph] = [one for one in seen.graphs if isinstance(one, Record)]
    assert len(graph.plan.kernels) == count
