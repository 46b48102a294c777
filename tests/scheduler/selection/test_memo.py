"""Equal matmuls are searched once while a graph is scheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.cost import model
from kgen.ir.plan import Kernel
from kgen.scheduler import Options
from kgen.scheduler.selection import choose
from kgen.scheduler.selection.size_buckets import Best
from kgen.templates.problem import Problem
from tests.kernels import plans

pytestmark = pytest.mark.none


def layers(*functions: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def f(x: Tensor, *weights: Tensor) -> Tensor:
        x = x + 1
        for function, w in zip(functions, weights, strict=True):
            x = function(x @ w)
        return x + x.flip(0)  # which no template's epilogue holds

    return f


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matmuls that were searched."""
    made: list[Any] = []
    here = choose._best_here

    def noted(problems: Sequence[Problem], *more: Any) -> Best | None:
        made.append(problems[0].kernel.name)
        return here(problems, *more)

    monkeypatch.setattr(choose, "_best_here", noted)
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1.0)
    return made


def searched(searches: list[Any], *functions: Callable[[Tensor], Tensor]) -> int:
    searches.clear()
    args = (torch.randn(64, 64), *(torch.randn(64, 64) for _ in functions))
    plan = plans(layers(*functions), *args, options=Options(programs=False)).forward
    matmuls = [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]
    assert len(matmuls) == len(functions)
    assert all(step.choice is not None for step in matmuls)
    return len(searches)


def test_equal_layers_are_searched_once(searches: list[Any]) -> None:
    relu, tanh = torch.relu, torch.tanh
    few, many = searched(searches, relu, relu), searched(searches, relu, relu, relu, relu)
    assert few == many
    assert searched(searches, relu, relu, tanh, tanh) > many
    assert searched(searches, relu, relu) == few  # nothing is left for the next graph


def test_steps_of_a_sequence_are_searched_once(searches: list[Any]) -> None:
    """They begin elsewhere in what they read, by indices too, and in what they write; aligned otherwise, they are others."""

    def steps(x: Tensor, ids: Tensor, table: Tensor, w: Tensor) -> Tensor:
        found = [(x[:, k] @ w) + table[ids[:, k]] * x[:, k + 1] for k in range(1, 7)]
        return torch.stack(found, 1)

    def count(width: int) -> int:
        searches.clear()
        ids = torch.zeros(64, 16, dtype=torch.int64)
        args = (torch.randn(64, 16, width), ids, torch.randn(9, width), torch.randn(width, width))
        plan = plans(steps, *args, options=Options(programs=False)).forward
        matmuls = [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]
        assert len(matmuls) == 6
        return len(searches)

    assert count(64) == 3  # ids of 8 bytes begin at a multiple of 16 or not, and the first result begins at 0
    assert count(65) > 2


def test_parts_of_different_tensors_are_searched_once(searches: list[Any]) -> None:
    def f(w: Tensor, *xs: Tensor) -> list[Tensor]:
        return [torch.cat([(x @ w).relu(), (x @ w).tanh() + 1], 1) for x in xs]

    searches.clear()
    plan = plans(f, torch.randn(64, 64), *(torch.randn(64, 64) for _ in range(3)), options=Options(programs=False)).forward
    matmuls = [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]
    assert len(matmuls) == 3
    assert len(searches) == 1
