"""Rows of a few elements that are sorted by a network: right for all types, in one kernel with what is around."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.lowering.sorting_network import MOST_ELEMENTS, comparators
from tests.scheduler.selection.test_safe_choices import planned

TYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("length", range(2, MOST_ELEMENTS + 1))
def test_networks_sort(length: int) -> None:
    """By the 0-1 principle: a network that sorts all rows of zeros and ones sorts all rows."""
    rows = itertools.product((0, 1), repeat=length) if length <= 10 else _some_rows(length)
    pairs = list(comparators(length))
    assert all(first < second < length for first, second in pairs)
    for row in rows:
        found = list(row)
        for first, second in pairs:
            found[first], found[second] = sorted((found[first], found[second]))
        assert found == sorted(row)


def _some_rows(length: int) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(length)
    return [tuple(row) for row in torch.randint(0, 2, (500, length), generator=generator).tolist()]


def rows_of(dtype: torch.dtype, length: int) -> Tensor:
    """Rows with equal elements, NaNs, infinities and zeros of both signs."""
    x = (torch.randn(19, length, generator=torch.Generator().manual_seed(length)) * 3).round()
    if dtype is torch.bool:
        return x > 0
    if dtype.is_floating_point:
        x[0, 0] = x[1, 1] = math.nan
        x[1, 0], x[2, 0] = math.inf, -math.inf
        x[3], x[4] = 0.0, math.nan
        x[3, ::2] = -0.0
    return x.to(dtype)


def everything(x: Tensor) -> list[Tensor]:
    length, found = x.shape[-1], []
    for descending in (False, True):
        if x.dtype is not torch.int64:  # no key has its position, too
            found += torch.sort(x, stable=True, dim=-1, descending=descending)
            found.append(torch.argsort(x, dim=-1, descending=descending, stable=True))
        found.append(x.sort(-1, descending=descending).values)
        found.append(x.t().contiguous().sort(0, descending=descending).values[length // 2])
    if x.dtype is not torch.bool:
        found += [x.kthvalue(2, -1).values, x.median(-1).values, x.t().contiguous().median(0).values]
    return found


@pytest.mark.cpu
@pytest.mark.every(5)
@pytest.mark.parametrize("length", [2, 5, 9])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rows_are_sorted_as_eager_does(dtype: torch.dtype, length: int) -> None:
    x = rows_of(dtype, length)
    torch._dynamo.reset()
    got = torch.compile(everything, backend="kgen", options={"top_k": "kernels", "cache": False})(x)
    for one, want in zip(got, everything(x), strict=True):
        torch.testing.assert_close(one, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_signs_of_zeros_stay_where_positions_are_read(dtype: torch.dtype) -> None:
    x = rows_of(dtype, 5)
    torch._dynamo.reset()
    got, _ = torch.compile(lambda x: torch.sort(x, stable=True), backend="kgen", options={"top_k": "kernels", "cache": False})(
        x
    )
    assert torch.equal(torch.signbit(got[3]), torch.signbit(x[3]))


@pytest.mark.cpu
def test_a_median_with_its_position() -> None:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        return (*x.median(-1), *x.kthvalue(3, -1, keepdim=True))

    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(1))
    x[0, 4] = x[0, 5] = math.nan
    torch._dynamo.reset()
    got = torch.compile(both, backend="kgen", options={"top_k": "kernels", "cache": False})(x)
    for one, want in zip(got, both(x), strict=True):
        torch.testing.assert_close(one, want, rtol=0, atol=0, equal_nan=True)


def far_from_median(x: Tensor) -> Tensor:
    middle = x.sort(-1).values[..., 4]
    spread = (x - middle[..., None]).abs().median(-1).values
    return torch.where((x[..., 0] - middle).abs() > 2 * spread, middle, x[..., 0])


def ordered(x: Tensor) -> Tensor:
    return x.sort(0).values * 2


@pytest.mark.parametrize(("fn", "shape", "kernels"), [(far_from_median, (4096, 9), 1), (ordered, (16, 600, 32), 1)])
def test_kernels(fn: Callable[[Tensor], Tensor], shape: tuple[int, ...], kernels: int) -> None:
    """Of an element that is read alone the rest of the network is gone; all elements are stored by one kernel."""
    plan = planned(fn, torch.randn(shape))
    assert len(plan.kernels) == len(plan.steps) == kernels


def test_longer_rows_are_sorted_otherwise() -> None:
    """As two reductions of pairs, where there are few."""
    plan = planned(lambda x: x.sort(-1).values, torch.randn(8, MOST_ELEMENTS + 1))
    assert any(kernel.sections for kernel in plan.kernels)
