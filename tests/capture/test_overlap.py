"""Backward graphs are planned while kernels of forward are compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen import backend, errors
from kgen import config as kgen_config
from kgen.backend import STAGES
from kgen.counters import counters
from kgen.unusable import Unusable
from tests.tuning.test_next_best import CHOICES

pytestmark = pytest.mark.cpu

Step = tuple[str, str]


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a GPU, with the option."""
    monkeypatch.setattr(backend, "plans_backward_early", lambda _gm, config: not config.lazy_backward)
    torch._dynamo.reset()
    counters.reset()
    with kgen_config.override(lazy_backward=False):
        yield


def model(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x * w).exp().sum()


def arguments(size: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, requires_grad=True) for _ in range(2)]


def check(size: int, **options: Any) -> Tensor:
    """Compares a forward and a backward call with eager; the compiled result before the backward call."""
    args = arguments(size)
    want = torch.autograd.grad(model(*args), args)
    result = torch.compile(model, backend="kgen", options=options)(*args)
    torch.testing.assert_close(torch.autograd.grad(result, args), want)
    return result


def test_by_default_backward_waits_for_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.torch_adapter, "uses_cuda", lambda _: True)
    config = backend.configuration.from_call()
    assert config.lazy_backward
    assert not backend.plans_backward_early(torch.fx.symbolic_trace(lambda x: x + 1), config)


def watch(monkeypatch: pytest.MonkeyPatch, problems: Mapping[Step, list[Exception]] | None = None) -> list[Step]:
    """The stages and roles of graphs, as they are entered; `problems` are raised there, one a time."""
    seen: list[Step] = []
    left = dict(problems or {})

    def traced(stage: Any) -> Any:
        def run(work: Any, info: Any, config: Any) -> Any:
            where = stage.__name__, info.role
            seen.append(where)
            if left.get(where):
                raise left[where].pop(0)
            return stage(work, info, config)

        run.__name__ = stage.__name__
        return run

    monkeypatch.setattr(backend, "STAGES", tuple(map(traced, STAGES)))
    return seen


def late(seen: Sequence[Step]) -> list[Step]:
    return [one for one in seen if one[0] in ("schedule", "build")]


def unfit(k: int) -> errors.ConfigurationFailed:
    return errors.ConfigurationFailed(choice=CHOICES[k], why="", found=(Unusable(CHOICES[k], "", compiled=True),))


def test_backward_is_planned_before_forward_is_waited_for(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    check(101, cache=False)
    assert late(seen) == [("schedule", "forward"), ("schedule", "backward"), ("build", "forward"), ("build", "backward")]
    assert counters["graphs"] == 2


def test_a_lazy_backward_is_compiled_at_its_first_call(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch(monkeypatch)
    args = arguments(102)
    result = torch.compile(model, backend="kgen", options={"cache": False, "lazy_backward": True})(*args)
    assert {role for _, role in seen} == {"forward"}
    result.backward()
    assert late(seen) == [("schedule", "forward"), ("build", "forward"), ("schedule", "backward"), ("build", "backward")]


def test_further_attempts_overlap_too(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """While kernels of one graph's further attempt are compiled, the other one is planned again."""
    problems = {("build", "forward"): [unfit(0)], ("build", "backward"): [unfit(1)]}
    seen = watch(monkeypatch, problems)
    check(103, cache=False)
    planned, built = ([(stage, role) for role in ("forward", "backward")] for stage in ("schedule", "build"))
    again = [(stage, role) for role in ("forward", "backward") for stage in ("build", "schedule")]
    assert late(seen) == [*planned, *again, *built]


def test_an_error_of_forward_is_raised_where_the_graph_is_compiled(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = errors.InvalidIR(stage="build", node="x", problem="made up")
    watch(monkeypatch, {("build", "forward"): [problem]})
    with pytest.raises(Exception, match="made up"):
        torch.compile(model, backend="kgen", options={"strict": True})(*arguments(104))
    check(104)  # nothing of it was kept


def test_layouts_that_change_after_backward_was_planned(early: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both graphs are captured again, one after the other."""
    other = iter([((3, 1),)])
    promised = backend._strides_of
    monkeypatch.setattr(backend, "_strides_of", lambda planned: next(other, None) or promised(planned))
    seen = watch(monkeypatch)
    check(105, cache=False)
    again = [("schedule", "forward"), ("build", "forward"), ("schedule", "backward"), ("build", "backward")]
    assert late(seen)[-4:] == again
    assert len(late(seen)) == 8


def test_the_cache_gets_graphs_that_are_built(early: None) -> None:
    check(106)
    assert counters["aot_trace"] == 1
    torch._dynamo.reset()
    check(106)
    assert counters["aot_trace"] == 1
    assert counters["aot_cache_hit"] == 1
    assert counters["graphs"] == 4


def test_a_dynamic_graph_is_compiled_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layouts are symbolic. Nor is one without gradients."""
    seen = []
    monkeypatch.setattr(backend.torch_adapter, "uses_cuda", lambda _: True)
    inner = backend.plans_backward_early
    monkeypatch.setattr(backend, "plans_backward_early", lambda gm, config: seen.append(inner(gm, config)))
    options = {"cache": False, "lazy_backward": False}
    for dynamic, grad in ((False, True), (True, True), (False, False)):
        torch._dynamo.reset()
        with torch.set_grad_enabled(grad):
            torch.compile(model, backend="kgen", dynamic=dynamic, options=options)(*arguments(107))
    assert seen == [True, False, False]
