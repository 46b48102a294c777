"""Writes into a part of a tensor of what is computed from another part of it: no copy in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
