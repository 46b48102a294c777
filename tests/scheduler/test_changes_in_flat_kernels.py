"""A buffer that is updated once a row in a kernel without reductions: programs share the rows out, and each would update it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.matmuls import compiled

ROWS, LENGTH = 600, 100  # fewer rows are two kernels


def moved_beside(state: Tensor, mean: Tensor, x: Tensor) -> Tensor:
    """Nobody reads the state but its update."""
    state.mul_(0.9).add_(mean, alpha=0.1)
    return torch.sigmoid(x - mean[:, None])


def read_after(state: Tensor, mean: Tensor, x: Tensor) -> Tensor:
    state.mul_(0.9).add_(mean, alpha=0.1)
    return x - state[:, None]


def read_before(state: Tensor, mean: Tensor, x: Tensor) -> Tensor:
    y = x - state[:, None]
    state.mul_(0.9).add_(mean, alpha=0.1)
    return y


@pytest.mark.every(5)
@pytest.mark.interpret
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("fn", [moved_beside, read_after, read_before])
def test_it_is_updated_once(fn: object, transposed: bool) -> None:
    x = torch.randn(LENGTH, ROWS).t() if transposed else torch.randn(ROWS, LENGTH)
    state, mean = torch.randn(ROWS), torch.randn(ROWS)
    ours, theirs = state.clone(), state.clone()
    got, want = compiled(fn, ours, mean, x), fn(theirs, mean, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)
