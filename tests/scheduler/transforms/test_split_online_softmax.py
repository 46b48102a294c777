"""Softmax, log-sum-exp and losses of few long rows: a GPU's programs share each row and read it once for both reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.report.traffic import bytes_minimal, bytes_moved
from tests.scheduler.selection.test_safe_choices import planned

LENGTH = 65536


def powers_too(x: Tensor) -> tuple[Tensor, Tensor]:
    """Exponentials are a result: some kernel has to store them."""
    powers = (x - x.amax(-1, keepdim=True)).exp()
    return powers, powers.sum(-1)


def weighted(x: Tensor) -> Tensor:
    """No sum of exponentials alone."""
    return ((x - x.amax(-1, keepdim=True)).exp() * x).sum(-1)


def other_maximum(x: Tensor) -> Tensor:
    return (x - (2 * x).amax(-1, keepdim=True)).exp().sum(-1)


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def logsumexp(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


@pytest.mark.parametrize(("f", "kernels", "excess"), [(softmax, 3, 1.51), (F.log_softmax, 3, 1.51), (logsumexp, 2, 1.01)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_read_once_for_its_statistics(f: Callable[..., Any], kernels: int, excess: float, dtype: torch.dtype) -> None:
    call = (lambda x: F.log_softmax(x, -1)) if f is F.log_softmax else f
    plan = planned(call, torch.empty(16, 262144, dtype=dtype))
    assert len(plan.kernels) == kernels
    assert bytes_moved(plan) <= excess * bytes_minimal(plan)


def test_many_rows_need_no_shares() -> None:
    assert len(planned(softmax, torch.empty(512, 262144)).kernels) == 1


@pytest.mark.parametrize("f", [powers_too, weighted, other_maximum])
def test_other_sums_are_made_apart(f: Callable[..., Any]) -> None:
    plan = planned(f, torch.empty(16, 262144))
    assert len(plan.kernels) >= 4


@pytest.mark.parametrize("length", [262147, 50257])
def test_the_last_share_of_other_lengths_ends_early(length: int) -> None:
    plan = planned(logsumexp, torch.empty(4, length))
    assert len(plan.kernels) == 2
    assert bytes_moved(plan) <= 1.01 * bytes_minimal(plan)


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("length", [LENGTH, 50257])
@pytest.mark.parametrize("f", [softmax, logsumexp, powers_too, weighted, lambda x: F.log_softmax(x, -1)])
def test_results(f: Callable[..., Any], length: int) -> None:
    """A share without a finite number, a row without one, an infinity and a NaN."""
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(0)) * 3
    x[0, : length // 2] = float("-inf")
    x[1] = float("-inf")
    x[2, 5], x[3, length - 1] = float("inf"), float("nan")
    got = torch.compile(f, backend="kgen", options={"gpu_interpreter": True, "cache": False})(x)
    torch.testing.assert_close(got, f(x), equal_nan=True, rtol=1e-4, atol=1e-6)
