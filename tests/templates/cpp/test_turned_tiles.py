"""Loads that are contiguous along another loop than the lanes come through transposed tiles: right at every edge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen

pytestmark = pytest.mark.cpu

KINDS = (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int64, torch.bool)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    drawn = torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn > 0 if dtype is torch.bool else drawn.to(dtype)


def added(x: Tensor, y: Tensor) -> Tensor:
    return x ^ y.t() if x.dtype is torch.bool else x + y.t()


def both(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return x * 2 + y.transpose(1, 2) - z.transpose(1, 2)


def source_of(f: Callable[..., Tensor], *args: Tensor) -> str:
    [graph] = kgen.explain(f, *args).graphs
    [kernel] = graph.kernels
    return kernel.source


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (33, 65), (47, 100), (257, 300), (96, 40)])
def test_transposed_operands(dtype: torch.dtype, rows: int, columns: int) -> None:
    torch._dynamo.reset()
    x, y = numbers(rows, columns, dtype=dtype), numbers(columns, rows, dtype=dtype)
    got = torch.compile(added, backend="kgen", fullgraph=True)(x, y)
    assert torch.equal(got, added(x, y))


def test_they_are_read_in_tiles() -> None:
    source = source_of(added, numbers(64, 96), numbers(96, 64))
    assert "load_tile<float" in source
    assert "load_strided" not in source


def test_batches_and_two_operands() -> None:
    args = numbers(3, 70, 90), numbers(3, 90, 70), numbers(3, 90, 70) + 1
    source = source_of(both, *args)
    assert source.count("load_tile<float") == 2
    torch._dynamo.reset()
    assert torch.equal(torch.compile(both, backend="kgen")(*args), both(*args))


def test_sizes_at_run_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(added, backend="kgen", dynamic=True)
    for rows, columns in ((64, 48), (33, 97), (130, 35)):
        x, y = numbers(rows, columns), numbers(columns, rows)
        assert torch.equal(compiled(x, y), added(x, y))


@pytest.mark.every(5)
@pytest.mark.parametrize("step", [2, 3, 4])
@pytest.mark.parametrize("length", [64, 66, 127, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_every_nth_element_up_to_the_last(step: int, length: int, dtype: torch.dtype) -> None:
    """Whole registers are loaded; nothing behind the last element may be touched (test_guard_pages.py) or mixed in."""
    torch._dynamo.reset()
    x = numbers(8, length, dtype=dtype)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x[:, k::step] * 2 for k in range(step))

    for got, want in zip(torch.compile(f, backend="kgen", fullgraph=True)(x), f(x), strict=True):
        assert torch.equal(got, want)
