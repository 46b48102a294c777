"""Any two steps of a plan that touch one buffer have exactly one verdict that names both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Schedule
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.fusion.fuse import MAX_READERS
from kgen.verdict import REFUSED, Outcome, Reason, Verdict
from tools import replay_adapter as adapter
from tools.replay_corpus import Case, corpus
from tools.replay_graphs import call

BENCHES = (
    "memory/softmax-train", "memory/residual_norm-train", "memory/scatter_add-train", "memory/adam_step", "matmul/17",
    "models/gpt-tiny-train", "dynamic/layer_norm",
)  # fmt: skip


# ---- functions ---------------------------------------------------------------------------------------------------------


def norm(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (64,), w[0]) * 2 + x.sum(0)


def attention(x: Tensor, w: Tensor) -> Tensor:
    return torch.softmax((x @ w) * 0.1, -1) @ x + x.mean(0)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    return (x.t().contiguous() + 1).cumsum(1) * w + x.softmax(0)


def library(x: Tensor, w: Tensor) -> Tensor:
    return torch.sort(x + 1).values * w + torch.sort(x.relu()).values


def overwritten(x: Tensor, w: Tensor) -> Tensor:
    y = x + x.flip(0) * w
    x.mul_(2)
    return y.sum(0)


def joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x, w, x @ w, x.sin(), w.exp()], -1).softmax(-1) * x[:, :1]


def read_by_many(x: Tensor, w: Tensor) -> list[Tensor]:
    return [torch.sort(x + number).values * w[number] for number in range(MAX_READERS + 2)]


def far_apart(x: Tensor, w: Tensor) -> list[Tensor]:
    return [x.sum(0), (x.t() @ w).cumsum(0), x.t().sort().values, x.flip(0).cumsum(1), (x[:8] * w[:8]).cumsum(0)]


FUNCTIONS = (norm, attention, transposed, library, overwritten, joined, read_by_many, far_apart)


def matrices(function: Callable[..., Any]) -> tuple[Callable[..., Any], Sequence[Tensor]]:
    return function, (torch.empty(64, 64), torch.empty(64, 64))


CASES = [
    *(Case(f.__name__, partial(matrices, f)) for f in FUNCTIONS),
    *(case for case in corpus() if case.name in BENCHES),
]  # fmt: skip


# ---- plans -------------------------------------------------------------------------------------------------------------


def plans_of(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """The plans of a case's graphs; nothing is compiled."""
    found: list[Schedule] = []
    monkeypatch.setattr(adapter.debug, "print_verdicts", lambda plan: found.append(plan) or "")
    torch._dynamo.reset()
    with suppress(adapter.Stopped):
        call(case, device, adapter.door(case.options), partial(adapter.rendering, lambda _: None))
    return found


def sharing(plan: Schedule) -> Iterator[tuple[int, int]]:
    """Numbers of steps that touch one buffer."""
    touched = [reads(step) | writes(step) for step in plan.steps]
    return (pair for pair in combinations(range(len(touched)), 2) if not touched[pair[0]].isdisjoint(touched[pair[1]]))


def of_pairs(plan: Schedule) -> list[Verdict]:
    return [verdict for verdict in plan.final_verdicts() if verdict.kernels]


@pytest.mark.every(5)
@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_that_touch_one_buffer_have_one_verdict(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = plans_of(case, device, monkeypatch)
    assert plans
    for plan in plans:
        verdicts = of_pairs(plan)
        count = Counter(frozenset(verdict.kernels) for verdict in verdicts)
        assert set(count.values()) <= {1}
        assert len(verdicts) == len(list(sharing(plan)))
        assert all(len(pair) == 2 for pair in count)
        assert {verdict.outcome for verdict in verdicts} <= {*REFUSED}
        named = {kernel.name for kernel in plan.kernels}
        shared = {frozenset(plan.steps[n].name for n in pair) for pair in sharing(plan) if _are_kernels(plan, pair)}
        assert {pair for pair in count if pair <= named} == shared


def _are_kernels(plan: Schedule, pair: tuple[int, int]) -> bool:
    return all(hasattr(plan.steps[number], "name") for number in pair)


def test_a_kernel_and_a_call_stay_apart_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    [plan] = plans_of(Case("library", partial(matrices, library)), "cpu", monkeypatch)
    assert {verdict.reason for verdict in of_pairs(plan) if "sort" in " ".join(verdict.kernels)} == {Reason.EXTERN_CALL}


def test_what_fusion_does_not_try_has_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = set()
    for function in (read_by_many, far_apart):
        [plan] = plans_of(Case("many", partial(matrices, function)), "gpu", monkeypatch)
        reasons |= {verdict.reason for verdict in of_pairs(plan)}
    assert Reason.NOT_TRIED in reasons


def test_scheduling_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions about pairs that are no more stay in the log of the scheduler; asked twice, a plan gives the same verdicts."""
    [plan] = plans_of(Case("norm", partial(matrices, norm)), "cpu", monkeypatch)
    assert not any(verdict.kernels for verdict in plan.verdicts)
    assert plan.final_verdicts() == plan.final_verdicts()
    fused = [verdict for verdict in plan.verdicts if verdict.outcome is Outcome.FUSED]
    assert fused == [verdict for verdict in plan.final_verdicts() if verdict.outcome is Outcome.FUSED]
