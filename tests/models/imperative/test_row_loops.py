"""Loops over rows through every stage: results as in eager with float64, and few kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from bench.imperative.programs import channel_swap
from kgen.counters import counters

pytestmark = pytest.mark.cpu

N = 8


def kernels(f: Callable[..., Any], *args: Tensor) -> int:
    """How many kernels a function has; what it does is what eager does with float64."""
    torch._dynamo.reset()
    counters.reset()
    mine, exact = [arg.clone() for arg in args], [arg.double() if arg.is_floating_point() else arg.clone() for arg in args]
    got, want = torch.compile(f, backend="kgen", fullgraph=True)(*mine), f(*exact)
    for one, other in zip([*mine, got], [*exact, want], strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)
    return counters["kernels"]


def get_started(b: Tensor) -> Tensor:
    for i in range(b.shape[0]):
        b[i] = b[i] + 1
    return b


def normalised(image: Tensor) -> Tensor:
    out, means = torch.empty_like(image), image.new_tensor([0.5, 0.4, 0.3])
    for i in range(3):
        out[..., i] = (image[..., 2 - i] - means[i]) / (i + 1)
    return out


def columns(b: Tensor) -> None:
    for i in range(N):
        b[:, i] = b[:, i] * 2 + i


def tiles(b: Tensor) -> None:
    for i in range(N // 2):
        b[2 * i : 2 * i + 2].mul_(3)


def every_other(b: Tensor) -> Tensor:
    out = b.clone()
    for i in range(N // 2):
        out[2 * i] = b[2 * i + 1] * 2
    return out


def masks(b: Tensor) -> None:
    for i in range(N):
        b[i] = torch.where(b[i] > 0, b[i], b[i] * 0.1)


def life(board: Tensor) -> Tensor:
    """One step of the Game of Life, row by row, on a board with a dead border."""
    out = torch.zeros_like(board)
    for i in range(1, N - 1):
        three = board[i - 1] + board[i] + board[i + 1]
        around = three[:-2] + three[1:-1] + three[2:] - board[i, 1:-1]
        out[i, 1:-1] = ((around == 3) | ((around == 2) & (board[i, 1:-1] == 1))).to(board.dtype)
    return out


def cache_rows(cache: Tensor, new: Tensor) -> None:
    """The keys of each sequence behind those that are there."""
    for i in range(N):
        cache[i, 3:5] = new[i]


def loop_in_loop(b: Tensor) -> None:
    for i in range(N):
        for j in range(N):
            b[i, j] = b[i, j] * 2 + 1


def loops_of_three(b: Tensor) -> None:
    for i in range(N):
        for j in range(N):
            for k in range(3):
                b[i, j, k] = b[i, j, k] * (k + 1) + j - i


@pytest.mark.every(2)
@pytest.mark.parametrize("n", [8, 1000])
def test_any_count_of_rows_is_one_kernel(n: int) -> None:
    assert kernels(get_started, torch.randn(n, 16)) == 1


@pytest.mark.parametrize(
    "f", [columns, tiles, every_other, masks, channel_swap, normalised, loop_in_loop, loops_of_three], ids=lambda f: f.__name__
)
def test_one_kernel(f: Callable[..., Any]) -> None:
    assert kernels(f, torch.randn(N, N, 3) if f in (channel_swap, normalised, loops_of_three) else torch.randn(N, N)) == 1


def test_all_inner_loops_come_before_the_outer_one() -> None:
    """Of 12 rows, three that are batches already were taken for a loop: there were two kernels."""
    assert kernels(every_element, torch.randn(12, 12, 4)) == 1


def every_element(b: Tensor) -> None:
    for i in range(b.shape[0]):
        for j in range(b.shape[1]):
            b[i, j] = b[i, j] * 2 + 1


def test_game_of_life() -> None:
    board = (torch.rand(N, N, generator=torch.Generator().manual_seed(0)) > 0.5).float()
    board[[0, -1]] = 0
    board[:, [0, -1]] = 0
    assert kernels(life, board) <= 3


def test_a_cache_of_keys() -> None:
    assert kernels(cache_rows, torch.randn(N, 6, 4), torch.randn(N, 2, 4)) == 1


def halves(b: Tensor) -> None:
    for i in range(N):
        b[i] = b[i] + 1 if i < N // 2 else b[i] * 2


def elimination(a: Tensor) -> Tensor:
    """The first step of Gaussian elimination."""
    for i in range(1, N):
        a[i] = a[i] - a[0] * (a[i, 0] / a[0, 0])
    return a


def smoothed(b: Tensor) -> None:
    """A stencil in place: each row waits for the one before."""
    for i in range(1, N - 1):
        b[i] = (b[i - 1] + b[i] + b[i + 1]) / 3


@pytest.mark.parametrize("f", [halves, elimination, smoothed], ids=lambda f: f.__name__)
def test_right(f: Callable[..., Any]) -> None:
    kernels(f, torch.randn(N, N).abs() + 1)


@pytest.mark.parametrize("f", [get_started, columns, masks], ids=lambda f: f.__name__)
def test_gradients(f: Callable[..., Any]) -> None:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        b = x * w
        f(b)
        return b.square().sum()

    torch._dynamo.reset()
    args = [torch.randn(N, N, requires_grad=True) for _ in range(2)]
    got = torch.autograd.grad(torch.compile(loss, backend="kgen", fullgraph=True)(*args), args)
    exact = [arg.detach().double().requires_grad_() for arg in args]
    want = torch.autograd.grad(loss(*exact), exact)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_the_option() -> None:
    torch._dynamo.reset()
    with kgen.config.override(loop_batching=False):
        assert "iterations of" not in str(kgen.explain(columns, torch.randn(N, N), print_report=False))


def test_explain() -> None:
    torch._dynamo.reset()
    report = " ".join(str(kgen.explain(get_started, torch.randn(N, 4))).split())
    assert "8 iterations of 3 operators" in report
