"""Recurrences that are unrolled: their steps are one kernel on a GPU, whatever slices they read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.ir.plan import Kernel
from kgen.scheduler.fusion import cost
from tests.gpu_graphs import run
from tests.scheduler.selection.test_safe_choices import planned


def recurrence(k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """RWKV's, which carries three values."""
    top, total, weight, out = torch.full_like(w, -9.0), torch.zeros_like(w), torch.zeros_like(w), []
    for t in range(k.shape[1]):
        p = torch.maximum(top, k[:, t])
        a, b = torch.exp(top - p), torch.exp(k[:, t] - p)
        total, weight, top = a * total + b * v[:, t], a * weight + b, p
        out.append(total / weight)
    return torch.stack(out, 1)


def arguments(steps: int, columns: int = 1000) -> list[Tensor]:
    return [torch.randn(8, steps, columns), torch.randn(8, steps, columns), torch.randn(8, columns)]


def test_a_recurrence_is_one_kernel() -> None:
    [kernel] = planned(recurrence, *arguments(30)).kernels
    assert isinstance(kernel, Kernel)
    assert len(kernel.statements) > cost.MAX_ITEMS


def test_what_needs_many_values_at_a_time_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_LIVE", 4)
    assert len(planned(recurrence, *arguments(31)).kernels) > 1


@pytest.mark.interpret
def test_values() -> None:
    run(recurrence, *arguments(20, 40), gpu_interpreter=True)


def beside_each_other(x: Tensor, at: Tensor, other: Tensor) -> tuple[Tensor, ...]:
    """Between two updates a sum reads the same tensor, and joins an earlier one."""
    zeros = torch.zeros(x.shape[0], 100, device=x.device)
    sums = x.sum(1)
    first = zeros.scatter_add(1, at, x)
    sums = (x * 2).sum(1) + sums
    return first, zeros.scatter_add(1, other, x), sums


def test_readers_that_become_neighbours_are_tried() -> None:
    x, at = torch.randn(64, 20000), torch.randint(0, 100, (64, 20000))
    plan = planned(beside_each_other, x, at, at.flip(1))
    assert [sum(s.kind == "scatter" for s in k.statements) for k in plan.kernels if isinstance(k, Kernel)].count(2) == 1
