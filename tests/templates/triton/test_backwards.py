"""Rows that are read and written from the end: kernels take them in the order of memory, and scan from their last point."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen
from tests.templates.triton.test_row_walks import kernel_of, lines


def suffixes(x: Tensor) -> Tensor:
    """The gradient of a running sum, and a running sum of it the other way."""
    e = x * 2
    return e.flip(-1).cumsum(-1).flip(-1) * e


def largest(x: Tensor) -> Tensor:
    return x.flip(-1).cummax(-1).values.flip(-1) + x


def multiplied(x: Tensor) -> Tensor:
    return torch.cumprod((x * 1.5).flip(-1), -1).flip(-1) * x


def both_ways(x: Tensor) -> Tensor:
    return x.cumsum(-1) + x.flip(-1).cumsum(-1)


@pytest.mark.parametrize("fn", [suffixes, multiplied], ids=lambda fn: fn.__name__)
def test_rows_are_in_the_order_of_memory(fn: Callable[[Tensor], Tensor]) -> None:
    source = kernel_of(fn, torch.empty(4096, 16)).source
    accesses = lines(source, "p_", "*16")
    assert accesses
    assert not [line for line in accesses if "- y0" in line]
    assert lines(source, "lib.scan_", "1, True)")


@pytest.mark.interpret
@pytest.mark.parametrize("length", [16, 13, 1])
@pytest.mark.parametrize("fn", [suffixes, largest, multiplied, both_ways], ids=lambda fn: fn.__name__)
def test_values(fn: Callable[[Tensor], Tensor], length: int) -> None:
    x = torch.randn(70, length)
    with torch.no_grad(), kgen.config.override(cache=False, gpu_interpreter=True):
        got = torch.compile(fn, backend="kgen", fullgraph=True)(x)
    torch.testing.assert_close(got, fn(x))
