"""Configurations that do not run after all, and what is known of the GPU that they are chosen for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kgen
from kgen import errors, only, pipeline
from kgen.commands.explain import watching
from kgen.config import from_call
from kgen.device import Gpu, gpu_from
from kgen.failed_kernels import say_what_failed
from kgen.host.compiled import Blueprint, HostGraph, check_shared, check_spills
from kgen.host.interpret import Interpreted
from kgen.ir.plan import Choice, Kernel, members
from kgen.unusable import Unusable
from kgen.verdict import Outcome, Reason

KERNEL = Kernel("k", (), (), 1, (), (), (), "triton")
OPTIONS = {"gpu_interpreter": True, "cache": False, "strict": False}


def matmul(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w) + y


def arguments() -> tuple[torch.Tensor, ...]:
    return torch.randn(96, 64).half(), torch.randn(64, 80).half(), torch.randn(96, 80).half()


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], Exception | None]) -> list[str]:
    """Kernels of matmuls fail to be built as `fails` says of the attempts at them; the heads of their texts."""
    texts: list[str] = []

    def build(blueprint: Blueprint, strides: Any, callables: Sequence[Any]) -> HostGraph:
        for launch in (call.kernel for call in callables if isinstance(call, Interpreted)):
            if "ACCUMULATOR" in launch.source:
                texts.append(launch.source.partition("import")[0])
                failure = fails(len(texts))
                if failure is not None:
                    failure.details["kernel"] = launch.name  # type: ignore[attr-defined]
                    raise failure
        return HostGraph(blueprint, strides, callables)

    monkeypatch.setattr(pipeline, "HostGraph", build)
    torch._dynamo.reset()
    return texts


def too_large() -> Exception:
    return errors.KernelTooLarge(kernel="k", needed=300_000, available=232_448, device="a GPU")


def spilled() -> Exception:
    return errors.KernelSpills(kernel="k", stack=728, most=256)


def not_compiled() -> Exception:
    return errors.TritonBuildFailed(kernel="k", arch=90, how="exit 1", source="s", output="o", log="l")


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("failure", "reason", "warned"),
    [(too_large, Reason.FAILED, 0), (spilled, Reason.FAILED, 0), (not_compiled, Reason.NOT_COMPILED, 2)],
)
def test_another_configuration_takes_over(
    monkeypatch: pytest.MonkeyPatch, failure: Callable[[], Exception], reason: Reason, warned: int
) -> None:
    """That a configuration needs too much is foreseen; that one does not compile is an error, with a warning."""
    args = arguments()
    texts = failing(monkeypatch, lambda attempt: failure() if attempt <= 2 else None)
    with kgen.require_fused("aten.mm", "aten.relu"), watching() as seen, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = torch.compile(matmul, backend="kgen", options=OPTIONS)(*args)
    messages = [str(w.message) for w in caught if w.category is errors.FallbackWarning]
    assert len(messages) == warned
    assert all("aten.mm.default" in text and "BLOCK_M=" in text for text in messages)
    torch.testing.assert_close(got, matmul(*args), atol=2e-2, rtol=2e-2)
    assert len(texts) == len(set(texts)) == 3
    dropped = [v for v in seen.report().verdicts if v.outcome is Outcome.DROPPED]
    assert [v.reason for v in dropped] == [reason, reason]
    assert all(v.producer.startswith("triton_") and "BLOCK_M=" in v.consumer for v in dropped)


@pytest.mark.interpret
@pytest.mark.cpu
def test_strict_leaves_out_only_what_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    args, strict = arguments(), {**OPTIONS, "strict": True}
    texts = failing(monkeypatch, lambda attempt: too_large() if attempt == 1 else None)
    torch.compile(matmul, backend="kgen", options=strict)(*args)
    assert len(texts) == 2
    failing(monkeypatch, lambda attempt: not_compiled())
    with pytest.raises(Exception, match="Triton failed"):
        torch.compile(matmul, backend="kgen", options=strict)(*args)


@pytest.mark.interpret
@pytest.mark.cpu
def test_the_library_takes_over_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    texts = failing(monkeypatch, lambda _: too_large())
    got = torch.compile(matmul, backend="kgen", options=OPTIONS)(*args)
    assert len(texts) == len(set(texts)) > 5
    torch.testing.assert_close(got, matmul(*args))


@pytest.mark.interpret
@pytest.mark.cpu
def test_the_only_template_fails_for_all_to_see(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda _: too_large())
    with (
        only.only("triton_matmul", lambda configs: configs[0]),
        pytest.raises(Exception, match="300000 bytes of shared memory"),
    ):
        torch.compile(matmul, backend="kgen", options=OPTIONS)(*arguments())


def test_what_a_program_may_not_have() -> None:
    kernels: Any = [SimpleNamespace(name="k0", shared=100), SimpleNamespace(name="k1", shared=232_449)]
    check_shared(kernels[:1], 232_448, "a GPU")
    with pytest.raises(errors.KernelTooLarge, match="k1 needs 232449 bytes of shared memory; a program has 232448 on a GPU"):
        check_shared(kernels, 232_448, "a GPU")


def test_kernels_that_do_not_fit_cost_one_attempt_together() -> None:
    """Who raises for the first of them names the others, and all of their configurations are left out."""
    found: Any = [SimpleNamespace(name=f"k{k}", shared=shared) for k, shared in enumerate((232_449, 100, 300_000))]
    with pytest.raises(errors.KernelTooLarge, match="k0") as raised:
        check_shared(found, 232_448, "a GPU")
    [other] = raised.value.details["others"]
    assert other.details["kernel"] == "k2"
    choices = [Choice("t", (("STAGES", k),)) for k in range(3)]
    steps = [replace(KERNEL, name=f"k{k}", choice=choice) for k, choice in enumerate(choices)]
    units: Any = SimpleNamespace(calls={one.name: SimpleNamespace(symbol=one.name) for one in steps})
    plan: Any = SimpleNamespace(kernels=steps, packings=[])

    def unfit_with(step: Any, why: str) -> tuple[Unusable, ...]:
        return (Unusable(step.choice, why, compiled=True),)

    with pytest.raises(errors.ConfigurationFailed) as failed:
        say_what_failed(
            raised.value, (torch.fx.GraphModule({}, torch.fx.Graph()), plan), units, from_call(None, {}), unfit_with
        )
    assert [one.choice for one in failed.value.details["found"]] == [choices[0], choices[2]]


def test_a_gpu_by_its_properties() -> None:
    h200 = {"arch": 90, "compute_units": 132, "shared": 232_448, "clock": 1_980_000_000, "memory": 4_916_736_000_000}
    found, known = gpu_from(h200), Gpu()
    assert (found.arch, found.compute_units, found.shared) == (known.arch, known.compute_units, known.shared)
    assert found.flops == pytest.approx(known.flops, rel=0.01)
    assert found.bandwidth == pytest.approx(known.bandwidth, rel=0.01)


@pytest.mark.interpret
@pytest.mark.cpu
def test_configurations_suit_the_shared_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"arch": 86, "compute_units": 82, "shared": 101_376, "clock": 1_700_000_000, "memory": 936_000_000_000}
    monkeypatch.setattr(pipeline, "gpu_of", lambda _: gpu_from(small))
    seen: list[int] = []
    real = pipeline.render_step

    def spy(step: Any, symbol: str, decisions: Any) -> Any:
        for choice in filter(None, (one.choice for one in members(step))):
            [problem] = decisions.problems(step)
            template = problem.template
            seen.append(template.resources(problem, template.config(**dict(choice.config))).shared)
        return real(step, symbol, decisions)

    monkeypatch.setattr(pipeline, "render_step", spy)
    torch._dynamo.reset()
    args = arguments()
    with kgen.require_fused("aten.mm", "aten.relu"):
        got = torch.compile(matmul, backend="kgen", options=OPTIONS)(*args)
    torch.testing.assert_close(got, matmul(*args), atol=2e-2, rtol=2e-2)
    assert seen
    assert max(seen) <= small["shared"]


def test_spilled_registers_count_where_a_limit_is_given() -> None:
    def kernel(**known: Any) -> Any:
        return SimpleNamespace(name="k", **known)

    check_spills([kernel(most_stack=None), kernel(most_stack=256)], [kernel(stack=4096), kernel(stack=256)])
    with pytest.raises(errors.KernelSpills, match="728 bytes"):
        check_spills([kernel(most_stack=256)], [kernel(stack=728)])
    check_spills([kernel(most_stack=256)], [kernel(stack=728)], 8)
    with pytest.raises(errors.KernelSpills, match="5696 bytes"):
        check_spills([kernel(most_stack=256)], [kernel(stack=5696)], 8)
