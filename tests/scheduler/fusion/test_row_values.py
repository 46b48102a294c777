"""What belongs to short rows, and whether each thread of a row computes it again or a kernel of its own does."""

from __future__ import annotations

import torch
from torch import Tensor

from kgen.ir.plan import members
from kgen.verdict import Outcome, Reason
from tests.rendering import training_texts_of_a_gpu
from tests.scheduler.selection.test_safe_choices import planned

ROWS, LENGTH = 1 << 20, 17


def placed(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """Numbers of rows that take many divisions, each at one place of its row."""
    d = x / (1 + y)
    for _ in range(6):
        d = d / (x + d) + y / (1 + d)
    return torch.where(torch.arange(LENGTH, device=x.device) == at[:, None], d[:, None], 0.0)


def scaled(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    return torch.where(torch.arange(LENGTH, device=x.device) == at[:, None], (x / y)[:, None], 0.0)


def normal(x: Tensor) -> Tensor:
    """What belongs to rows is made of them, and they need it again."""
    return (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True) + 1e-5).rsqrt()


def args(rows: int = ROWS) -> tuple[Tensor, ...]:
    return torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.long)


def kernels(*given: object) -> int:
    return sum(len(members(step)) for step in planned(*given).kernels)  # type: ignore[arg-type]


def test_dear_values_of_rows_have_a_kernel() -> None:
    plan = planned(placed, *args())
    assert len(plan.kernels) == 2
    assert any(v.outcome is Outcome.UNPROFITABLE and v.reason is Reason.ROW_VALUES for v in plan.verdicts)


def test_others_stay_with_their_rows() -> None:
    assert kernels(scaled, *args()) == 1
    assert kernels(placed, *args(1 << 10)) == 1  # a launch takes longer
    assert kernels(normal, torch.empty(ROWS, LENGTH)) == 1


def smoothed(y: Tensor, season: Tensor, rate: Tensor) -> Tensor:
    """A recurrence along short rows; gradients of its steps are placed in a row one after the other."""
    seasons, level, errors = list(season.unbind(1)), y[:, 0], []
    for t in range(1, y.shape[1]):
        k = t % season.shape[1]
        errors.append(y[:, t] - level - seasons[k])
        level = rate * (y[:, t] - seasons[k]) + (1 - rate) * level
        seasons[k] = rate * (y[:, t] - level) + (1 - rate) * seasons[k]
    return torch.stack(errors, 1).square().mean()


def test_values_of_rows_do_not_gather_in_a_kernel_of_points() -> None:
    """Each of them is cheap, and all of them together take longer than a launch: the kernel of points has few."""
    _, backward = training_texts_of_a_gpu(smoothed, torch.empty(30011, 30), torch.empty(30011, 6), torch.empty(30011))
    of_rows, of_points = (len(text.splitlines()) for text in backward.kernels.values())
    assert of_points < of_rows / 2
