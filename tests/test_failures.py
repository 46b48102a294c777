"""What cannot be compiled is replaced by PyTorch's operators, with one warning; `strict` raises (docs/failures.md)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen import errors, failures, pipeline, recovery
from kgen.commands.explain import Explanation, watching
from kgen.failures import KernelsFailed
from kgen.host.compiled import Blueprint, HostGraph
from kgen.host.interpret import Interpreted
from kgen.ir.plan import members
from kgen.lowering import graph as lowering_graph
from kgen.verdict import Outcome, Reason

pytestmark = pytest.mark.cpu

LENIENT = {"strict": False, "cache": False}


@pytest.fixture(autouse=True)
def _fresh_counts() -> Iterator[None]:
    kgen.coverage_reset()
    yield
    kgen.coverage_reset()


def call(f: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str], Explanation]:
    """The result of the compiled function, the warnings about failures, and what was compiled."""
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    with warnings.catch_warnings(record=True) as caught, watching() as seen:
        warnings.simplefilter("always")
        result = torch.compile(f, backend="kgen", options={**LENIENT, **options}, dynamic=dynamic)(*args)
    return result, [str(w.message) for w in caught if issubclass(w.category, errors.FallbackWarning)], seen.report()


def broken(monkeypatch: pytest.MonkeyPatch, holds: str) -> list[str]:
    """C++ kernels with a word in their names do not compile; their symbols."""
    symbols: list[str] = []
    real = pipeline.render_step

    def render(step: Any, symbol: str, decisions: Any) -> Any:
        made = real(step, symbol, decisions)
        if holds not in symbol:
            return made
        symbols.append(symbol)
        return replace(made, text=f"{made.text}\nint broken_{symbol} = not_declared;\n")

    monkeypatch.setattr(pipeline, "render_step", render)
    return symbols


def replaced(report: Explanation) -> list[Any]:
    return [v for v in report.verdicts if v.outcome is Outcome.REPLACED]


def two_kernels(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x.sin() * 2).sum(1), y.cos() + 1


# ---- kernels ------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile_becomes_library_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    symbols = broken(monkeypatch, "sin")
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    assert symbols
    [warning] = messages
    assert "aten.sin.default" in warning
    assert "test_failures.py" in warning
    assert "aten.cos.default" not in warning
    assert "not_declared" in warning
    kept = Path(warning.partition("kept for a report: ")[2].partition("\n")[0])
    assert "not_declared" in kept.read_text()
    assert "cos_add" not in kept.read_text(), "the file holds the kernel that fails, and no other"
    assert len(report.kernels) == 1, "the other kernel stays"
    assert "aten.sin.default" in {e.operator for e in report.externs}
    [verdict] = replaced(report)
    assert verdict.reason is Reason.NOT_COMPILED
    assert "aten.sin.default" in verdict.consumer
    assert str(kept) in verdict.detail
    counts = kgen.coverage()
    assert counts["replacements"] == 1
    assert [name for name in counts["replaced"] if "aten.sin.default" in name]


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "sin")
    with pytest.raises(Exception, match="the C\\+\\+ compiler failed") as caught:
        call(two_kernels, torch.randn(40, 30), torch.randn(50), strict=True)
    assert isinstance(caught.value.inner_exception, errors.KernelBuildFailed)  # type: ignore[attr-defined]
    monkeypatch.setenv("KGEN_STRICT", "1")
    assert kgen.config.current().strict
    monkeypatch.setenv("KGEN_STRICT", "0")
    assert not kgen.config.current().strict


def test_tests_are_strict() -> None:
    assert kgen.config.current().strict


def test_equal_kernels_give_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "sin")

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x.sin() @ x.t()).contiguous()
        return x

    x = torch.randn(20, 20)
    got, messages, _ = call(f, x, templates=False)
    torch.testing.assert_close(got, f(x))
    assert len(messages) == 1


def test_failures_may_come_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, "")
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    assert not report.kernels
    assert len(messages) == kgen.coverage()["replacements"]


def test_too_many_failures_end_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "MAX_FAILURES", 0)
    broken(monkeypatch, "")
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    assert not report.kernels
    assert "every operator of the graph runs by itself in eager" in messages[-1]
    assert [e.reason for e in report.externs if e.operator == "aten.sin.default"] == ["the graph could not be compiled"]
    assert len(messages) == len(replaced(report)) == kgen.coverage()["replacements"] == 3


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_to_inputs(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    def f(x: Tensor, at: Tensor, y: Tensor) -> Tensor:
        x[at] = y.sin()
        x.mul_(2)
        return x.t() + 1

    broken(monkeypatch, "sin")
    x, at, y = torch.randn(9, 5), torch.tensor([3, 1]), torch.randn(2, 5)
    mine, theirs = x.clone(), x.clone()
    got, messages, _ = call(f, mine, at, y, dynamic=dynamic)
    torch.testing.assert_close((got, mine), (f(theirs, at, y), theirs))
    assert messages


def test_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout((x @ w).sin(), 0.5).softmax(1)

    x, w = torch.randn(20, 30, requires_grad=True), torch.randn(30, 10, requires_grad=True)
    results = []
    for holds in ("in no name", ""):
        broken(monkeypatch, holds)
        torch._dynamo.reset()
        torch.manual_seed(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = torch.compile(f, backend="kgen", options=LENIENT)(x, w)
            results.append((out, *torch.autograd.grad(out.square().sum(), (x, w))))
    assert any(w.category is errors.FallbackWarning for w in caught)
    torch.testing.assert_close(results[1], results[0])


def test_a_kernel_that_cannot_be_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.render_step

    def render(step: Any, *args: Any) -> Any:
        if any("aten.sin.default" in o.operators for o in step.origins):
            raise AssertionError("no such slot")
        return real(step, *args)

    monkeypatch.setattr(pipeline, "render_step", render)
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    assert "AssertionError: no such slot" in messages[0]
    assert len(messages) == len(report.kernels) == 1
    kept = Path(messages[0].partition("kept for a report: ")[2].partition("\n")[0]).read_text()
    assert "Traceback" in kept
    assert "torch.ops.aten.sin.default" in kept
    with pytest.raises(Exception, match="no such slot"):
        call(two_kernels, x, y, strict=True)


GPU_FAILURES = {
    "triton": lambda: errors.TritonBuildFailed(
        kernel="k", arch=90, how="exit 1", source="kept.py", output="k.py:3: error: CompilationError", log="l"
    ),
    "launch": lambda: errors.LaunchFailed(problem="loading kernel k: it can have 512 threads", kernel="k"),
    "shared memory": lambda: errors.KernelTooLarge(kernel="k", needed=300_000, available=232_448, device="a GPU"),
}


@pytest.mark.interpret
@pytest.mark.parametrize("kind", GPU_FAILURES)
def test_a_gpu_kernel_that_does_not_build_or_load(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    def build(blueprint: Blueprint, strides: Any, callables: Any) -> HostGraph:
        for launch in (call.kernel for call in callables if isinstance(call, Interpreted)):
            if "sin" in launch.name:
                failure = GPU_FAILURES[kind]()
                failure.details["kernel"] = launch.name
                raise failure
        return HostGraph(blueprint, strides, callables)

    monkeypatch.setattr(pipeline, "HostGraph", build)
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y, gpu_interpreter=True)
    torch.testing.assert_close(got, two_kernels(x, y))
    [warning] = messages
    assert "aten.sin.default" in warning
    assert "kept for a report" in warning
    assert len(report.kernels) == 1
    assert replaced(report)[0].reason is (Reason.NOT_COMPILED if kind == "triton" else Reason.FAILED)
    with pytest.raises(Exception, match=r"Triton failed|512 threads|shared memory"):
        call(two_kernels, x, y, gpu_interpreter=True, strict=True)


@pytest.mark.usefixtures("templates_win")
def test_a_template_that_does_not_compile_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pipeline.render_step

    def render(step: Any, symbol: str, decisions: Any) -> Any:
        made = real(step, symbol, decisions)
        if members(step)[0].choice is None:
            return made
        return replace(made, text=f"{made.text}\nint broken_{symbol} = not_declared;\n")

    monkeypatch.setattr(pipeline, "render_step", render)
    x, w = torch.randn(64, 64), torch.randn(64, 64)
    got, messages, report = call(lambda x, w: torch.relu(x @ w), x, w)
    torch.testing.assert_close(got, torch.relu(x @ w))
    assert messages
    assert all("another configuration, or the library, takes over" in text for text in messages[:-1])
    assert "aten.mm.default" in {e.operator for e in report.externs}
    assert kgen.coverage()["replacements"] == len(messages)


def test_what_was_replaced_is_not_kept_on_disk(fresh_graphs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(40, 30), torch.randn(50)
    with monkeypatch.context() as patch:
        broken(patch, "sin")
        for _ in range(2):
            _, messages, _ = call(two_kernels, x, y, cache=True)
            assert len(messages) == 1, "each process, and each compilation, tries again"
    assert kgen.coverage()["cache_hits"] == 0 or kgen.coverage()["aot_traces"] == 2
    _, messages, report = call(two_kernels, x, y, cache=True)
    assert not messages
    assert report.kernels


# ---- operators and stages -----------------------------------------------------------------------------------------------


def rule_fails(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    def rule(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    monkeypatch.setitem(lowering_graph.RULES, name, rule)


@pytest.mark.parametrize(
    "error",
    [ZeroDivisionError("by zero"), errors.InvalidIR(stage="lower", node="n", problem="by zero")],
    ids=lambda e: type(e).__name__,
)
def test_an_operator_whose_rule_fails_runs_in_eager(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    rule_fails(monkeypatch, "aten.sin", error)
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    [warning] = messages
    assert "lowering aten.sin.default failed" in warning
    assert "by zero" in warning
    assert "two_kernels" in warning or "test_failures.py" in warning
    assert {e.operator for e in report.externs} == {"aten.sin.default"}
    assert replaced(report)[0].reason is Reason.INTERNAL_ERROR
    with pytest.raises(Exception, match="by zero"):
        call(two_kernels, x, y, strict=True)


def test_an_operator_that_fails_again_is_not_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    rule_fails(monkeypatch, "aten.sin", ZeroDivisionError("by zero"))

    def f(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin() + 1
        return x

    x = torch.randn(10)
    got, messages, _ = call(f, x)
    torch.testing.assert_close(got, f(x))
    assert len(messages) == 2


def schedule_fails(monkeypatch: pytest.MonkeyPatch, when: Callable[[Any], bool]) -> None:
    real = pipeline.make_schedule

    def schedule(graph: Any, options: Any) -> Any:
        if when(options):
            raise RecursionError("too deep")
        return real(graph, options)

    monkeypatch.setattr(pipeline, "make_schedule", schedule)


@pytest.mark.parametrize(
    ("when", "warned", "kernels"),
    [
        (lambda options: options.templates, "library calls compute all contractions", True),
        (lambda options: options.fusion, "each loop of the graph is a kernel of its own", True),
        (lambda options: True, "every operator of the graph runs by itself in eager", False),
    ],
)
def test_a_schedule_that_fails(monkeypatch: pytest.MonkeyPatch, when: Any, warned: str, kernels: bool) -> None:
    schedule_fails(monkeypatch, when)
    x, y = torch.randn(40, 30), torch.randn(50)
    got, messages, report = call(two_kernels, x, y)
    torch.testing.assert_close(got, two_kernels(x, y))
    assert warned in messages[-1]
    assert "RecursionError: too deep" in messages[-1]
    assert "stage schedule" in messages[-1]
    assert "test_failures.py" in messages[-1]
    assert bool(report.kernels) is kernels
    assert len(replaced(report)) == len(messages)


def test_random_numbers_in_a_graph_that_runs_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule_fails(monkeypatch, lambda _: True)
    x = torch.ones(2000)
    got, messages, _ = call(lambda x: torch.nn.functional.dropout(x, 0.5), x)
    assert messages
    assert set(got.tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("fails", ["freeze", "schedule"])
def test_a_frozen_graph(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    if fails == "schedule":
        schedule_fails(monkeypatch, lambda _: True)
    else:
        monkeypatch.setattr("kgen.backend.freeze", lambda *_: 1 // 0)
    x = torch.randn(5, 8)
    with torch.no_grad():
        got, messages, _ = call(model, x, freezing=True)
        torch.testing.assert_close(got, model(x))
    assert f"stage {fails}" in messages[-1]


# ---- passes in front of the stages --------------------------------------------------------------------------------------


def half_done(name: str) -> Callable[..., Any]:
    """A pass that has changed the graph when it raises."""

    def fails(gm: torch.fx.GraphModule, *_: Any, **__: Any) -> Any:
        for node in list(gm.graph.nodes):
            if node.op == "call_function" and node.all_input_nodes:
                node.replace_all_uses_with(node.all_input_nodes[0])
        raise KeyError(name)

    return fails


PASSES = {
    "rewrite": ("kgen.capture.batching.batch_repeats", lambda x, w: torch.stack([row.sin() @ w for row in x]).sum(0)),
    "recomputed_scores": ("kgen.capture.recompute_scores.recompute_scores", lambda x, w: torch.softmax(x @ w, -1)),
    "laid_out": ("kgen.capture.layouts.choose_layouts", lambda x, w: torch.conv2d(x[None, :1, :, None], w[:1, None, :1, None])),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_that_raises_is_left_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, f = PASSES[name]
    monkeypatch.setattr(place, half_done(name))
    x, w = (torch.randn(6, 6, requires_grad=True) for _ in range(2))
    got, messages, report = call(f, x, w)
    expected = f(x, w)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(r.square().sum(), [x, w]) for r in (got, expected)))
    assert len(messages) == 1
    assert f"pass {name} failed, so the graph is compiled without it" in messages[0]
    assert "test_failures.py" in messages[0]
    assert kgen.coverage()["replacements"] >= 1
    assert [v.producer for v in replaced(report)][:1] == [f"pass {name}"]
    with pytest.raises(Exception, match=name):
        call(f, x, w, strict=True)


def test_a_scalar_has_a_softmax() -> None:
    x = torch.randn((), requires_grad=True)
    got, messages, _ = call(lambda x: torch.softmax(x, 0), x)
    assert not messages
    torch.testing.assert_close(got, torch.tensor(1.0))
    torch.testing.assert_close(torch.autograd.grad(got, x)[0], torch.tensor(0.0))


# ---- what still raises --------------------------------------------------------------------------------------------------


def test_users_mistakes_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(40, 30), torch.randn(50)
    with kgen.require_fused("aten.sin", "aten.cos"), pytest.raises(Exception, match="must be fused"):
        call(two_kernels, x, y)
    with pytest.raises(Exception, match="kgen has no option"):
        call(two_kernels, x, y, fuse=True)
    schedule_fails(monkeypatch, lambda _: True)
    with kgen.require_fused("aten.sin", "aten.sum"), pytest.raises(Exception, match="too deep"):
        call(two_kernels, x, y)


@pytest.mark.parametrize(
    "error", [torch._dynamo.exc.Unsupported("no"), torch.OutOfMemoryError("full"), MemoryError("full"), OSError("no disk")]
)
def test_what_is_not_kgens_own_passes(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    rule_fails(monkeypatch, "aten.sin", error)
    assert not failures.may_replace(error)
    with pytest.raises(Exception, match=str(error)):
        kgen.compile(two_kernels, options=LENIENT)(torch.randn(40, 30), torch.randn(50))
    assert not failures.may_replace(KeyboardInterrupt())


def test_texts() -> None:
    many = tuple(f"aten.op{k}" for k in range(9))
    made = failures.Failure("kernel k0", "why", "library", Reason.FAILED, many, "a.py:1 f()")
    assert made.place == "aten.op0, aten.op1, aten.op2, aten.op3, aten.op4, aten.op5, ...; a.py:1 f()"
    assert str(KernelsFailed([made])) == f"kernel k0 ({made.place}): why"
    late = errors.KernelBuildFailed(kernel="k", how="not done after 600 s", source="s", output="", command="g++")
    assert failures.reason_of(late) == "the compiler failed (not done after 600 s)"
    assert failures.keep_report("x", ValueError("v"), SimpleNamespace()).endswith(".txt")  # type: ignore[arg-type]
