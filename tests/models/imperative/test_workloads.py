"""Decoders of detectors and recurrent networks through every stage: results and gradients as in eager with float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.imperative.workloads import WORKLOADS, Workload

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def exact(args: Sequence[Tensor]) -> list[Tensor]:
    return [arg.double() if arg.is_floating_point() else arg.clone() for arg in args]


def listed(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def check(got: Any, want: Any) -> None:
    for one, other in zip(listed(got), listed(want), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one.name)
def test_results(workload: Workload) -> None:
    args = workload.arguments(1)
    compiled = torch.compile(workload.run, backend="kgen", fullgraph=True, options={"strict": True})
    want = workload.run(*exact(args))
    with torch.no_grad():
        check(compiled(*(arg.clone() for arg in args)), want)
    assert any(one.any() for one in listed(want))


@pytest.mark.every(2)
@pytest.mark.parametrize("workload", [one for one in WORKLOADS if one.differentiable], ids=lambda one: one.name)
def test_gradients(workload: Workload) -> None:
    def gradients(run: Any, args: Sequence[Tensor]) -> list[Tensor]:
        args = [arg.requires_grad_() for arg in args]
        loss = sum(one.square().sum() for one in listed(run(*args)))
        return [one for one in torch.autograd.grad(loss, args, allow_unused=True) if one is not None]  # type: ignore[arg-type]

    args = workload.arguments(1)
    compiled = torch.compile(workload.run, backend="kgen", fullgraph=True, options={"strict": True})
    check(gradients(compiled, [arg.clone() for arg in args]), gradients(workload.run, exact(args)))
