"""16-bit numbers to which much is added are summed up in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.matmuls import compiled

ROWS, ADDED, WIDTH = 5, 900, 3


def put(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).index_put((rows,), values, accumulate=True)


def added(rows: Tensor, values: Tensor) -> Tensor:
    return torch.ones(ROWS, WIDTH, dtype=values.dtype).index_add(0, rows, values)


def scattered(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).scatter_add(0, rows[:, None].expand(-1, WIDTH), values)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [put, added, scattered])
def test_sums_are_rounded_once(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, values = torch.randint(0, ROWS, (ADDED,)), torch.rand(ADDED, WIDTH).to(dtype)
    exact = fn(rows, values.double())
    got = compiled(fn, rows, values)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()


def test_what_is_changed_in_place_keeps_its_type() -> None:
    base, rows, values = torch.zeros(ROWS, WIDTH).bfloat16(), torch.arange(ROWS), torch.randn(ROWS, WIDTH).bfloat16()
    want = base.clone().index_put_((rows,), values, accumulate=True)
    compiled(lambda b, r, v: b.index_put_((r,), v, accumulate=True), base, rows, values)
    torch.testing.assert_close(base, want)
