"""Which of the next best configurations cannot run either, and where a further attempt at a graph begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from codegen import options_for

from kgen import backend, errors, next_best, pipeline, unusable
from kgen.backend import STAGES
from kgen.build import triton
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import from_call
from kgen.device import Gpu
from kgen.ir.plan import Choice, Kernel, Schedule, members
from kgen.rendered.gpu_kernel import CompiledKernel, TritonKernel
from kgen.scheduler.selection import choose
from kgen.scheduler.selection.choose import contraction_of
from kgen.unusable import Memo, Unusable
from tests.scheduler.selection import test_safe_choices
from tests.scheduler.selection.test_safe_choices import planned

KERNEL = Kernel("k", (), (), 1, (), (), (), "triton")
INFO = GraphInfo("graph", "inference", frozenset(), frozenset())
CHOICES = [Choice("t", (("STAGES", k),)) for k in range(20)]


def kernel_of(choice: Choice) -> TritonKernel:
    return TritonKernel(f"k{dict(choice.config)['STAGES']}", "", "", (), (), 4, 1, most_stack=256)


@dataclass
class Compiler:
    """Compiles nothing. `stacks` and `shared` are bytes of kernels by name, 0 of others; `broken` ones do not compile."""

    stacks: Mapping[str, int] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    begun: list[str] = field(default_factory=list)

    def begin(self, kernel: TritonKernel, _arch: int) -> None:
        self.begun.append(kernel.name)

    def compile_kernels(self, kernels: Sequence[TritonKernel], _arch: int) -> list[CompiledKernel]:
        [one] = kernels
        if one.name in self.broken:
            raise errors.TritonBuildFailed(kernel=one.name, arch=90, how="exit 1", source="s", output="o", log="l")
        shared, stack = self.shared.get(one.name, 0), self.stacks.get(one.name, 0)
        return [CompiledKernel(one.name, one.name, b"", (), (), 4, shared, (), 255, stack)]

    def unfit(self, monkeypatch: pytest.MonkeyPatch, choices: Sequence[Choice] = CHOICES, cores: int = 4) -> list[int]:
        """The numbers of the choices that cannot run."""
        monkeypatch.setattr(triton, "begin", self.begin)
        monkeypatch.setattr(triton, "compile_kernels", self.compile_kernels)
        monkeypatch.setattr(next_best.os, "sched_getaffinity", lambda _: set(range(cores)))
        found = next_best.unfit(KERNEL, choices, lambda kernel: kernel_of(chosen(kernel)), Gpu())
        assert all(one.compiled and one.why for one in found)
        return [dict(one.choice.config)["STAGES"] for one in found]


def chosen(kernel: Kernel) -> Choice:
    assert kernel.choice is not None
    return kernel.choice


def test_they_are_those_up_to_the_first_that_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler({"k0": 1168, "k1": 872, "k3": 872}, {"k2": 300_000})
    assert compiler.unfit(monkeypatch) == [0, 1, 2, 3]
    assert compiler.begun == [f"k{n}" for n in range(8)]  # two rounds, a core each
    assert Compiler({"k1": 872}).unfit(monkeypatch) == []


def test_few_enough_spilled_registers_are_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Compiler({"k0": 257, "k1": 256}).unfit(monkeypatch) == [0]


def test_what_does_not_compile_is_left_to_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Compiler({"k0": 1168, "k2": 1168}, broken=("k1",)).unfit(monkeypatch) == [0]


def test_what_cannot_be_rendered_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler({"k0": 1168})
    monkeypatch.setattr(triton, "begin", compiler.begin)
    assert next_best.unfit(KERNEL, CHOICES, lambda _: None, Gpu()) == ()
    assert not compiler.begun


def test_the_search_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Choice("t", (("STAGES", k),)) for k in range(100)]
    compiler = Compiler({f"k{n}": 1168 for n in range(100)})
    assert compiler.unfit(monkeypatch, many, cores=64) == list(range(next_best.MOST))


def matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w)


def test_the_next_best_are_in_the_order_of_estimates() -> None:
    """Each of them is what the scheduler takes where those before it are left out."""
    args = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(4096, 4096, dtype=torch.bfloat16)
    plan = planned(matmul, *args)
    [kernel] = (k for step in plan.kernels for k in members(step) if k.choice is not None)
    device = options_for(gpu=True).device(plan.graph, contraction_of(kernel))
    left_out = [chosen(kernel)]
    for choice in choose.next_best(kernel, plan.graph, device)[:3]:
        with unusable.without(tuple(Unusable(one, "", compiled=True) for one in left_out)):
            [again] = (k for step in planned(matmul, *args).kernels for k in members(step) if k.choice is not None)
        assert chosen(again) == choice
        left_out.append(choice)


def two_matmuls(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.relu(x @ w), torch.abs(y @ v)


def test_a_configuration_is_left_out_for_its_problem_alone() -> None:
    """It spilled with one epilogue: the other matmul, of the same lengths, keeps it."""
    square = torch.empty(4096, 4096, dtype=torch.bfloat16)

    def kernels() -> tuple[Schedule, list[Kernel]]:
        plan = planned(two_matmuls, *(torch.empty_like(square) for _ in range(4)))
        return plan, [k for step in plan.kernels for k in members(step) if k.choice is not None]

    plan, before = kernels()
    assert len(before) == 2
    assert chosen(before[0]) == chosen(before[1])
    device = options_for(gpu=True).device(plan.graph, contraction_of(before[0]))
    problem = choose.chosen_problem(before[0], plan.graph, device).identity()
    with unusable.without((Unusable(chosen(before[0]), "", compiled=True, problem=problem),)):
        _, after = kernels()
    assert chosen(after[0]) != chosen(before[0])
    assert chosen(after[1]) == chosen(before[1])


def test_what_spills_says_for_which_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(matmul, *(torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(2)))
    [kernel] = (k for step in plan.kernels for k in members(step) if k.choice is not None)
    monkeypatch.setattr(pipeline, "_unfit_after", lambda *_: (Unusable(chosen(kernel), "next", compiled=True),))
    found = pipeline._unfit_with(plan, INFO, from_call(None, {}), kernel, "spills")
    assert [one.why for one in found] == ["spills", "next"]
    assert found[0].problem is not None
    assert found[0].problem == found[1].problem


def test_a_further_attempt_finds_what_the_last_one_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the plan that it would make by itself, without what is left out, and looks at no matmul's templates again."""
    args = [torch.empty(4096, 4096, dtype=torch.bfloat16) for _ in range(4)]
    memo, looked, problems = Memo(), list[str](), choose._problems

    def noted(kernel: Kernel, *more: Any) -> Any:
        looked.append(kernel.name)
        return problems(kernel, *more)

    def steps(memo: Memo | None) -> tuple[list[str], list[Kernel], int]:
        looked.clear()
        monkeypatch.setattr(test_safe_choices, "options_for", lambda gpu: replace(options_for(gpu=gpu), memo=memo))
        plan = planned(two_matmuls, *args)
        return [*map(str, plan.steps)], [k for step in plan.kernels for k in members(step) if k.choice is not None], len(looked)

    monkeypatch.setattr(choose, "_problems", noted)
    _, first, _ = steps(memo)
    with unusable.without((Unusable(chosen(first[0]), "", compiled=True),)):
        fresh, _, looked_fresh = steps(None)
        again, kernels, looked_again = steps(memo)
    assert again == fresh
    assert chosen(first[0]) not in [chosen(one) for one in kernels]
    assert looked_again == 0 < looked_fresh


def test_a_memo_is_one_graphs() -> None:
    memo, graph = Memo(), object()
    memo.of(graph).known["x"] = 1
    assert memo.of(graph).known == {"x": 1}
    assert memo.of(object()).known == {}


def test_a_further_attempt_begins_after_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only a configuration is left out; after a failure of a kernel the graph is lowered again."""
    seen: list[str] = []
    problems = [
        errors.ConfigurationFailed(choice=CHOICES[0], why="", found=(Unusable(CHOICES[0], "", compiled=True),)),
        errors.InvalidIR(stage="render", node="x", problem="made up"),
    ]

    def traced(stage: Any) -> Any:
        def run(*args: Any) -> Any:
            seen.append(stage.__name__)
            if stage.__name__ == "render" and problems:
                raise problems.pop(0)
            return stage(*args)

        run.__name__ = stage.__name__
        return run

    monkeypatch.setattr(backend, "STAGES", tuple(map(traced, STAGES)))
    torch._dynamo.reset()
    x = torch.randn(8)
    with pytest.warns(errors.FallbackWarning):
        got = torch.compile(lambda x: torch.relu(x) + 1, backend="kgen", options={"cache": False, "strict": False})(x)
    torch.testing.assert_close(got, torch.relu(x) + 1)
    first = [stage.__name__ for stage in STAGES[:-1]]
    assert seen == [*first, "schedule", "render", *first, "build"]
