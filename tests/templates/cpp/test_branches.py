"""Conditions that all lanes share have a loop for each value: parts of a concatenation, frames of images."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen

pytestmark = pytest.mark.cpu


def haar(x: Tensor) -> Tensor:
    """Sums of neighbouring frames, the first of which is repeated in front, then their differences."""
    a, b = torch.cat([x[:, :1], x], 1).unflatten(1, (-1, 2)).unbind(2)
    return torch.cat([a + b, a - b], 0)


def stacked(x: Tensor) -> Tensor:
    return torch.cat([x.exp(), x[1:] * 2, x[:1].sin()], 0)


def framed(x: Tensor) -> Tensor:
    return F.pad(x * 3, (0, 0, 2, 1)) + 1


def test_shared_divisors() -> None:
    """Names outside of the loop belong to divisors too, which are no conditions."""
    torch._dynamo.reset()
    x, s = torch.randn(3, 5, 77), torch.tensor([0.5, 3.0, 7.0])
    f = lambda x, s: torch.cat([x / s[:, None, None], x * 2], 0)  # noqa: E731
    made = torch.compile(f, backend="kgen", fullgraph=True, options={"strict": True})
    torch.testing.assert_close(made(x, s), f(x, s))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("columns", [64, 77, 5000])
@pytest.mark.parametrize("f", [haar, stacked, framed])
def test_each_value_is_right(f: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    x = torch.randint(-8, 8, (3, 5, columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.testing.assert_close(torch.compile(f, backend="kgen", fullgraph=True, options={"strict": True})(x), f(x))


def test_a_loop_loads_one_part_alone() -> None:
    """Two conditions: which half of the result, and whether the frame is the first."""
    [graph] = kgen.explain(haar, torch.randn(3, 5, 5000), print_report=False).graphs
    [kernel] = graph.kernels
    assert kernel.source.count("for_each_value(") == 2
