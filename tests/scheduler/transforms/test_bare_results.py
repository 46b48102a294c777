"""Contractions whose templates beat the library alone, but not with what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.ir.plan import Kernel, Schedule
from kgen.verdict import Outcome, Reason
from tests.scheduler.selection.test_safe_choices import planned

ODD = 20_011  # columns of a result, rows of which the library stores number by number


def angles(x: Tensor, w: Tensor) -> Tensor:
    return torch.acos((x @ w.t()).float().clamp(-0.999, 0.999)).cos()


def rectified(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w.t())


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def contractions(plan: Schedule) -> list[Kernel]:
    return [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]


def test_a_heavy_epilogue_becomes_a_kernel() -> None:
    plan = planned(angles, half(1024, 512), half(ODD, 512))
    [kernel] = contractions(plan)
    assert kernel.choice is not None
    assert len(plan.steps) == 2
    [found] = [v for v in plan.verdicts if v.reason is Reason.BARE and not v.consumer]
    assert found.outcome is Outcome.UNPROFITABLE
    assert "MATMUL" in found.detail.upper()


@pytest.mark.parametrize(
    ("fn", "columns", "templates"),
    [(rectified, ODD, 1), (angles, 20_480, 0)],
)
def test_what_stays(fn: Callable[..., Tensor], columns: int, templates: int) -> None:
    """A light epilogue in its kernel, and what the library is good at with the library."""
    plan = planned(fn, half(1024, 512), half(columns, 512))
    assert len(contractions(plan)) == templates
    assert not any(v.reason is Reason.BARE for v in plan.verdicts)
