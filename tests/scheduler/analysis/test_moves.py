"""Which steps may change places: the same as by looking at every step between."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir.plan import Schedule
from kgen.scheduler.analysis import moves
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.analysis.moves import Moves
from tests.kernels import plans


def steps_of_a_recurrence(x: Tensor, w: Tensor) -> Tensor:
    h = x
    rows = []
    for _ in range(4):
        h = torch.tanh(h @ w)
        rows.append((h @ x.T).sum(-1))
    x.add_(1)
    return torch.stack(rows)


def by_each_step(plan: Schedule, hidden: set[int], k: int, begin: int, end: int) -> bool:
    def touched(one: int) -> tuple[set[str], set[str]]:
        return ir.storages(plan.graph, reads(plan.steps[one])), ir.storages(plan.graph, writes(plan.steps[one]))

    read, written = touched(k)
    for other in range(begin, end):
        read_there, written_there = touched(other)
        if other in hidden or written_there & (read | written) or read_there & written:
            return False
    return True


@pytest.mark.parametrize("hidden", [set(), {3}], ids=["known effects", "hidden effects"])
def test_a_step_passes_those_that_share_no_write_with_it(hidden: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans(steps_of_a_recurrence, torch.ones(8, 8), torch.ones(8, 8)).forward
    opaque = [plan.steps[k] for k in hidden]
    monkeypatch.setattr(moves, "has_hidden_effects", lambda step: any(step is one for one in opaque))
    found = Moves(plan.graph, plan.steps)
    ranges = list(itertools.combinations(range(len(plan.steps) + 1), 2))
    asked = [(k, *where) for where in ranges for k in range(len(plan.steps)) if not where[0] <= k < where[1]]
    passed = {one: found.may_pass(*one) for one in asked}
    assert passed == {one: by_each_step(plan, hidden, *one) for one in asked}
    assert len(plan.steps) > 6
    assert set(passed.values()) == {True, False}


def test_each_step_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plans(steps_of_a_recurrence, torch.ones(8, 8), torch.ones(8, 8)).forward
    looked: list[int] = []
    monkeypatch.setattr(moves, "has_hidden_effects", lambda step: bool(looked.append(id(step))))
    found = Moves(plan.graph, plan.steps)
    for k in range(1, len(plan.steps)):
        found.may_pass(k, 0, k)
    assert len(looked) == len(plan.steps)
