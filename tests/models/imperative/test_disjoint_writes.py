"""Writes into a part of a tensor of what is computed from another part of it: no copy in between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.counters import counters
from kgen.ir import index as ix

pytestmark = pytest.mark.cpu

N = 70


def every_other_row(b: Tensor) -> None:
    for i in range(0, N, 2):
        b[i] = b[i + 1] * 2


def every_other_column(b: Tensor) -> None:
    b[:, ::2] = b[:, 1::2] * 2 + b[:, ::2]


def from_the_other_half(b: Tensor) -> None:
    for i in range(N // 2):
        b[i] = b[i + N // 2] * b[i]


def next_rows(b: Tensor) -> None:
    b[1:] = b[:-1] * 2


def every_third(b: Tensor) -> None:
    b[:, :-3:3] = b[:, 3::3] * 2


@pytest.mark.parametrize(
    ("f", "kernels"),
    [(every_other_row, 1), (every_other_column, 1), (from_the_other_half, 1), (next_rows, 2), (every_third, 2)],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_disjoint_writes(f: Callable[[Tensor], None], kernels: int) -> None:
    torch._dynamo.reset()
    counters.reset()
    mine = torch.randn(N, N)
    exact = mine.double()
    torch.compile(f, backend="kgen", fullgraph=True)(mine)
    f(exact)
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    assert counters["kernels"] == kernels


# ---- writes that share a kernel ----------------------------------------------------------------------------------------


def triangle(b: Tensor) -> Tensor:
    """Rows of other lengths: no batch has all of them."""
    out = torch.zeros_like(b)
    for i in range(12):
        out[i, : i + 1] = b[i, : i + 1] * 2
    return out


def bboxes(b: Tensor) -> Tensor:
    """As a detector decodes them: each column in its own way."""
    b = b.view(-1, 4).clone()
    b[:, 0] = b[:, 0].sigmoid() * 8
    b[:, 1] = b[:, 1].sigmoid() * 4
    b[:, 2] = b[:, 2].exp() * 3
    b[:, 3] = b[:, 3].exp() * 5
    b[:12, 3] *= 2
    return b


def in_order(b: Tensor) -> Tensor:
    """Each write needs what the one before has made."""
    b = b.clone()
    for i in range(1, 6):
        b[i, i:] = b[i - 1, i:] + b[i, i:]
    return b


def check(f: Callable[..., Any], *args: Tensor) -> int:
    torch._dynamo.reset()
    counters.reset()
    got = torch.compile(f, backend="kgen", fullgraph=True, options={"strict": True, "loop_rolling": "off"})(*args)
    torch.testing.assert_close([got.double()], [f(*(arg.double() for arg in args))], rtol=1e-5, atol=1e-5)
    return counters["kernels"]


@pytest.mark.parametrize(("f", "most"), [(triangle, 2), (bboxes, 3), (in_order, 6)], ids=lambda f: getattr(f, "__name__", ""))
def test_parts_are_written_by_one_kernel(f: Callable[..., Any], most: int) -> None:
    assert check(f, torch.randn(12, 12)) <= most


@pytest.mark.interpret
@pytest.mark.parametrize("f", [triangle, bboxes, in_order], ids=lambda f: f.__name__)
def test_on_a_gpu(f: Callable[..., Any]) -> None:
    with kgen.config.override(gpu_interpreter=True, cache=False):
        check(f, torch.randn(12, 12))


def drawn(seed: int, buffers: int = 4, writes: int = 7) -> Callable[..., Tensor]:
    """Writes into parts of buffers of what is computed from other parts, some disjoint and some not, in a drawn order."""
    pick = random.Random(seed)

    def part() -> tuple[slice, slice]:
        rows, columns = pick.randint(0, 5), pick.randint(0, 5)
        return slice(rows, rows + 3, pick.choice((1, 2))), slice(columns, columns + 3)

    steps = [(pick.randrange(buffers), pick.randrange(buffers), part(), part(), pick.random()) for _ in range(buffers * writes)]

    def f(b: Tensor) -> Tensor:
        made = [b + k for k in range(buffers)]
        for to, source, there, here, factor in steps:
            value = made[source][here]
            shape = made[to][there].shape
            made[to][there] = value.mean() * factor if value.shape != shape else torch.tanh(value) * factor + 0.1
        return torch.stack(made)

    return f


@pytest.mark.parametrize("seed", range(3))
def test_drawn_writes(seed: int) -> None:
    check(drawn(seed), torch.randn(9, 9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 130))
def test_many_drawn_writes(seed: int) -> None:
    check(drawn(seed), torch.randn(9, 9))


def test_disjoint_indices() -> None:
    i, j, s = ix.var("i", 8).expr(), ix.var("j", 4).expr(), ix.size("s", 2).expr()
    assert ix.disjoint((i, j * 2), (i, i * 2 + 1))
    assert ix.disjoint((i,), (j + 8,))
    assert ix.disjoint((i * 6 + j * 3,), (j * 9 + 2,))
    assert ix.disjoint((ix.ZERO,), (ix.ONE,))
    assert not ix.disjoint((i * 2,), (j * 3 + 1,))
    assert not ix.disjoint((i,), (j + 7,))
    assert not ix.disjoint((i * 4,), (j * 2 + 2,))
    assert not ix.disjoint((i * 2,), (i * s + 1,))
    assert not ix.disjoint((), ())
