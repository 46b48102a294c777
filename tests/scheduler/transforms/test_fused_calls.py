"""The library's calls for a matmul and what follows: what they are seen in, and when they take the place of two steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

import kgen
from kgen.capture.decompositions import TABLE
from kgen.cost import model
from kgen.cost.tuning_query import FUSED, Place, TuningQuery, TuningResult, place
from kgen.counters import counters
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel, Schedule
from kgen.ir.verify import verify
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph
from kgen.report.record import Record, recording
from kgen.scheduler import Options, schedule
from kgen.tuning import measure as measuring
from kgen.tuning import tuner
from kgen.tuning.store import TuningFile
from kgen.tuning.tuner import candidates_of
from kgen.verdict import Reason, Verdict

Function = Callable[..., Any]
bf16 = torch.bfloat16
CALL = "aten._addmm_activation.default"


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def gelu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return gelu(F.linear(x, w, b))


def relu_linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def given(m: int = 512, k: int = 4096, n: int = 4096, dtype: torch.dtype = bf16) -> tuple[Tensor, ...]:
    return torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype), torch.empty(n, dtype=dtype)


def lowered(f: Function, *args: Tensor, device: str = "cuda:0", numerics: str = "fast") -> ir.Graph:
    """On a GPU that need not be here."""
    mode = FakeTensorMode()
    fakes = [FakeTensor(mode, a.to("meta"), torch.device(device)) for a in args]
    with mode:
        gm = make_fx(f, decomposition_table=TABLE)(*fakes)
    with _disable_current_modes():
        return lower(reinplace(gm), LoweringContext(numerics=numerics))


def steps(plan: Schedule) -> list[str]:
    return [step.name if isinstance(step, Kernel) else str(step.node.target) for step in plan.steps]  # type: ignore[union-attr]


def noted(graph: ir.Graph) -> list[tuple[str, dict[str, Any]]]:
    calls = [node.fused for node in graph.nodes if isinstance(node, ir.Contraction)]
    return [(str(call.target), dict(call.kwargs)) for call in calls if call is not None]


# ---- what they are seen in --------------------------------------------------------------------------------------------


def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.clamp(torch.addmm(b, x, w.t()), min=0)


SEEN: dict[str, tuple[Function, tuple[Tensor, ...], bool]] = {
    "gelu": (gelu_linear, given(), True),
    "gelu of float16": (gelu_linear, given(dtype=torch.float16), True),
    "relu": (relu_linear, given(), False),
    "relu of float32": (relu_linear, given(dtype=torch.float32), False),
    "relu written otherwise": (by_hand, given(), False),
}


@pytest.mark.parametrize("name", SEEN)
def test_seen(name: str) -> None:
    f, args, is_gelu = SEEN[name]
    graph = lowered(f, *args)
    assert noted(graph) == [(CALL, {"use_gelu": is_gelu})]
    verify(graph, "lower")


def two_readers(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return gelu(y), y.exp() - 1


UNSEEN: dict[str, tuple[Function, tuple[Tensor, ...]]] = {
    "gelu by erf": (lambda x, w, b: F.gelu(F.linear(x, w, b)), given()),
    "gelu of float32, whose tanh the library does in its own way": (gelu_linear, given(dtype=torch.float32)),
    "more than an activation": (lambda x, w, b: gelu(F.linear(x, w, b)) * 2, given()),
    "relu6": (lambda x, w, b: F.relu6(F.linear(x, w, b)), given()),
    "no bias": (lambda x, w, b: F.relu(x @ w.t()), given()),
    "a bias for each row": (lambda x, w, b: F.relu(torch.addmm(b, x, w.t())), (*given()[:2], torch.empty(512, 1, dtype=bf16))),
    "a matrix added": (lambda x, w, b: F.relu(torch.addmm(x, x, w.t())), given()),
    "scaled": (lambda x, w, b: F.relu(torch.addmm(b, x, w.t(), alpha=2)), given()),
    "another type": (lambda x, w, b: F.relu(F.linear(x, w, b).float()), given()),
    "two readers": (two_readers, given()),
    "nothing to add up, where torch leaves the activation out": (relu_linear, given(k=0)),
    "transposed": (lambda x, w, b: F.relu(F.linear(x, w, b).t()) + 0, given()),
    "three dimensions": (relu_linear, (torch.empty(2, 256, 4096, dtype=bf16), *given()[1:])),
}


@pytest.mark.parametrize("name", UNSEEN)
def test_not_seen(name: str) -> None:
    f, args = UNSEEN[name]
    assert noted(lowered(f, *args)) == []


def test_not_seen_where_each_operation_is_rounded() -> None:
    """The one call does not round in between."""
    assert noted(lowered(gelu_linear, *given(), numerics="eager")) == []
    assert noted(lowered(relu_linear, *given(), numerics="eager")) == []


def test_gelu_on_a_cpu_is_another_function() -> None:
    assert noted(lowered(gelu_linear, *given(), device="cpu")) == []
    assert noted(lowered(relu_linear, *given(), device="cpu")) == [(CALL, {"use_gelu": False})]


# ---- the plan ---------------------------------------------------------------------------------------------------------


def test_one_call_instead_of_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 0.0)
    plan = schedule(lowered(gelu_linear, *given()), Options())
    assert steps(plan) == [CALL]
    reasons = {v.reason for v in plan.verdicts}
    assert reasons >= {Reason.LIBRARY_FUSES, Reason.LIBRARY, Reason.VENDOR_FASTER}
    assert Reason.NO_LOWERING not in reasons
    (call,) = plan.calls
    assert call.node.origin.operators == ("aten.addmm.default", "aten.gelu.default")


def test_a_faster_template_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1.0)
    assert steps(schedule(lowered(gelu_linear, *given()), Options())) == ["addmm_gelu"]


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(gelu(F.linear(x, w, b)), v, c)


def test_in_front_of_another_matmul() -> None:
    args = torch.empty(2, 256, 512, dtype=bf16), *given(1, 512, 2048)[1:], *given(1, 2048, 512)[1:]
    plan = schedule(lowered(mlp, *args), Options(templates=False))
    assert steps(plan) == [CALL, "aten.addmm.default"]


def returned_too(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return y, gelu(y)


def summed_too(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    y = F.linear(x, w, b)
    return gelu(y), y.sum(1)


KEPT: dict[str, tuple[Function, Options]] = {
    "the matmul is a result": (returned_too, Options(templates=False)),
    "the matmul has another reader": (summed_too, Options(templates=False)),
    "without fusion": (gelu_linear, Options(templates=False, fusion=False)),
    "switched off": (gelu_linear, Options(templates=False, fused_calls=False)),
}


@pytest.mark.parametrize("name", KEPT)
def test_two_steps(name: str) -> None:
    f, options = KEPT[name]
    first, second = steps(schedule(lowered(f, *given()), options))
    assert first == "aten.addmm.default"
    assert second in ("gelu", "sum_gelu")


def test_demands_are_about_kernels() -> None:
    with kgen.forbid_fused("aten.addmm", "aten.gelu"):
        plan = schedule(lowered(gelu_linear, *given()), Options(templates=False, demands=kgen.verdict.DEMANDS.get()))
    assert steps(plan) == ["aten.addmm.default", "gelu"]
    with kgen.require_fused("aten.addmm", "aten.gelu"):
        plan = schedule(lowered(gelu_linear, *given()), Options(demands=kgen.verdict.DEMANDS.get()))
    assert steps(plan) == ["addmm_gelu"]


def test_a_cpu_makes_two_passes_anyway() -> None:
    assert steps(schedule(lowered(relu_linear, *given(), device="cpu"), Options(templates=False)))[0] == "aten.addmm.default"


def test_the_estimate_is_between_the_bare_matmul_and_two_steps() -> None:
    (problem,) = [p for p in asked().problems[0] if p.has_fused_call]
    one = model.apart_seconds(problem)
    problem.__dict__["has_fused_call"] = False
    two = model.apart_seconds(problem)
    assert 20e-6 < one < two - 1e-6


# ---- the measured choice ----------------------------------------------------------------------------------------------


class Knows:
    """An oracle with one answer to every question."""

    is_worth_asking = True

    def __init__(self, config: tuple[tuple[str, Any], ...] = ()) -> None:
        self.config = config
        self.asked: list[TuningQuery] = []

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, TuningResult]]:
        self.asked += questions
        return {q.step.name: {place({}): TuningResult(None, self.config, 1, 1e-6, 1e-6)} for q in questions}

    def verdicts(self) -> list[Verdict]:
        return []


def asked() -> TuningQuery:
    oracle = Knows()
    schedule(lowered(gelu_linear, *given()), Options(oracle=oracle))
    return oracle.asked[0]


def test_what_was_measured_decides_between_one_call_and_two_steps() -> None:
    assert steps(schedule(lowered(gelu_linear, *given()), Options(oracle=Knows(FUSED)))) == [CALL]
    assert steps(schedule(lowered(gelu_linear, *given()), Options(oracle=Knows()))) == ["aten.addmm.default", "gelu"]


def test_stable_choices_know_no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    for oracle in (Knows(), Knows(FUSED)):
        assert steps(schedule(lowered(gelu_linear, *given()), Options(oracle=oracle, stable=True))) == ["addmm_gelu"]
    monkeypatch.setattr(model, "feasible", lambda problem: iter(()))  # no template takes it
    for oracle in (Knows(), Knows(FUSED)):
        assert steps(schedule(lowered(gelu_linear, *given()), Options(oracle=oracle, stable=True))) == [CALL]


def test_both_calls_are_candidates() -> None:
    found = candidates_of(asked())
    assert [(c.template, c.config) for c in found[:2]] == [(None, ()), (None, FUSED)]
    assert {c.template for c in found[2:]} >= {"triton_matmul"}
    assert str(found[1]) == "the library, in one call"
    assert all(c.template for c in candidates_of(asked(), stable=True))


@pytest.mark.cpu
@pytest.mark.parametrize("config", [(), FUSED])
def test_measured_and_looked_up(config: tuple[tuple[str, Any], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which is to have such calls here: what the file then says is what runs."""
    monkeypatch.setattr(Options, "may_fuse_calls", lambda self, graph: lambda out: self.fused_calls)
    monkeypatch.setattr(tuner, "CANDIDATES", 1)
    monkeypatch.setattr(tuner, "OF_EACH", 0)
    file = tmp_path / "tuning.json"
    args = torch.randn(64, 96), torch.randn(128, 96), torch.randn(128)
    options = {"cache": False, "tuning_file": str(file), "tuning_seconds": 600}

    def run(**more: Any) -> list[str]:
        torch._dynamo.reset()
        with recording() as seen, torch.no_grad():
            got = torch.compile(relu_linear, backend="kgen", options={**options, **more})(*args)
        torch.testing.assert_close(got, relu_linear(*args), rtol=1e-4, atol=1e-4)
        (graph,) = seen.graphs
        assert isinstance(graph, Record)
        return steps(graph.plan)

    try:
        run(mode="max-autotune-no-cudagraphs")
    finally:
        measuring.stop()
    (entry,) = TuningFile(file).entries()
    assert entry.measured == 3
    contents = json.loads(file.read_text())
    contents["entries"][0] |= {"template": None, "version": tuner._versions("cpu")[""], "config": dict(config)}
    file.write_text(json.dumps(contents))
    assert run() == ([CALL] if config else ["aten.addmm.default", "relu"])


# ---- what runs --------------------------------------------------------------------------------------------------------


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [bf16, torch.float16, torch.float32])
def test_it_runs(dtype: torch.dtype) -> None:
    """As a GPU's kernels do in the interpreter."""
    args = [(torch.randn(a.shape) / 8).to(dtype) for a in given(48, 64, 32)]
    torch._dynamo.reset()
    options = {"gpu_interpreter": True, "templates": False, "cache": False, "poison": True}
    with recording() as seen, torch.no_grad():
        got = torch.compile(relu_linear, backend="kgen", options=options)(*args)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    assert steps(graph.plan) == [CALL]
    torch.testing.assert_close(got, relu_linear(*args))


@pytest.mark.cpu
def test_its_script_and_a_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [torch.randn(a.shape) / 8 for a in given(48, 64, 32, torch.float32)]
    options = {"gpu_interpreter": True, "templates": False, "cache_dir": str(tmp_path / "cache")}
    for debug in ({"debug": str(tmp_path / "debug"), "cache": False}, {}, {}):
        torch._dynamo.reset()
        before = counters.snapshot().get("lowered", 0)
        with torch.no_grad():
            got = torch.compile(relu_linear, backend="kgen", options={**options, **debug})(*args)
        torch.testing.assert_close(got, relu_linear(*args))
    assert counters.snapshot().get("lowered", 0) == before  # the last one was found in the cache
    (script,) = (tmp_path / "debug").glob("*/output_code.py")
    assert "_addmm_activation" in script.read_text()
    names: dict[str, Any] = {"__name__": "output_code"}
    exec(compile(script.read_text(), "output_code.py", "exec"), names)
    names["p"].run(str(script))
    assert "right:" in capsys.readouterr().out


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("f", [gelu_linear, relu_linear])
@pytest.mark.parametrize("dtype", [bf16, torch.float16])
def test_on_a_gpu(f: Function, dtype: torch.dtype) -> None:
    """NaNs stay NaNs, and gelu is the one by tanh: by erf it is up to 5e-4 away, about where these results are."""
    args = [torch.randn(a.shape, device="cuda") / 8 for a in given(256, 512, 384)]
    args[0][7] = torch.nan
    args = [a.to(dtype) for a in args]
    args[2] -= 2.5
    torch._dynamo.reset()
    with recording() as seen, torch.no_grad():
        got = torch.compile(f, backend="kgen", options={"templates": False, "cache": False})(*args)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    assert steps(graph.plan) == [CALL]
    want = f(*(a.float() for a in args))
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=1e-3, equal_nan=True)
    if f is gelu_linear:
        by_erf = F.gelu(F.linear(*(a.float() for a in args)))
        assert (got - want).abs().nanmean() < (got - by_erf).abs().nanmean()


def test_the_evaluator_knows_the_call() -> None:
    args = [(torch.randn(a.shape) / 8) for a in given(48, 64, 32)]
    graph = lowered(relu_linear, *args, device="cpu")
    plan = schedule(graph, Options(templates=False, gpu_everywhere=True))
    assert steps(plan) == [CALL]
    (got,) = evaluate_graph(graph, args)
    torch.testing.assert_close(got, relu_linear(*args))
