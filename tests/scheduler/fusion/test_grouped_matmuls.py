"""Matmuls that read one operand: when one kernel makes them all, each with its own width and epilogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import at_several_lengths, compiled, error, forced
from torch import Tensor

import kgen
from bench.cost_model import problems_of
from bench.matmuls import BY_NUMBER
from kgen.build import triton
from kgen.cost import model
from kgen.ir.plan import ComboKernel, Schedule, members
from kgen.scheduler import Options
from kgen.templates.contract import Resources
from kgen.verdict import Outcome, Reason
from tests.kernels import plans
from tests.scheduler.selection.test_safe_choices import planned

BACK_ENDS = {
    "cpp": pytest.param({"cache": False}, marks=pytest.mark.cpu, id="cpp"),
    "triton": pytest.param(
        {"cache": False, "gpu_interpreter": True}, marks=[pytest.mark.cpu, pytest.mark.interpret], id="triton"
    ),
}
bf = torch.bfloat16


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


pytestmark = pytest.mark.usefixtures("templates_win")


def qkv(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(more[:3], more[3:], strict=True))


def weights(widths: tuple[int, ...], inner: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [*(r(n, inner, dtype=dtype) for n in widths), *(r(n, dtype=dtype) for n in widths)]


def heads(x: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """As attention takes them: queries have more heads than keys and values."""
    return tuple(t.view(2, 35, -1, 8).transpose(1, 2).contiguous() for t in qkv(x, *more))


def other_epilogues(x: Tensor, w: Tensor, v: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.gelu(x @ w), (x @ v).half() + y


def with_family(x: Tensor, w: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return F.silu(x @ w) * (x @ u), x @ v


def with_sums(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ w).exp().sum(-1), x @ v


def right_operand(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, y @ w


CASES: dict[str, tuple[Callable[..., Any], list[Tensor], int]] = {
    "q, k and v": (qkv, [r(70, 50), *weights((96, 32, 32), 50)], 1),
    "q, k and v of equal widths": (qkv, [r(2, 35, 50), *weights((48, 48, 48), 50)], 1),
    "one row": (qkv, [r(1, 50), *weights((96, 32, 32), 50)], 1),
    "heads": (heads, [r(2, 35, 50), *weights((64, 16, 16), 50)], 1),
    "other epilogues": (other_epilogues, [r(70, 50), r(50, 96), r(50, 33), r(70, 33).half()], 1),
    "a family among them": (with_family, [r(70, 50), r(50, 64), r(50, 64), r(50, 33)], 1),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", CASES)
def test_one_kernel(name: str, options: dict[str, Any]) -> None:
    fn, args, kernels = CASES[name]
    kgen.coverage_reset()
    found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    counts = kgen.coverage()
    assert (counts["kernels"], counts["extern_calls"]) == (kernels, 0)
    for one, other in zip(found, fn(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5 if one.dtype is torch.float32 else 2e-3, atol=2e-4)


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_tiles", "triton_matvec"])
def test_each_template_that_joins(template: str) -> None:
    x = r(1 if template == "triton_matvec" else 72, 64, dtype=bf)
    args = [x, *weights((96, 32, 32), 64, bf)]
    with forced(template) as made:
        found = compiled(qkv, *args)
    assert len(made.matmuls) == 1
    assert made.matmuls[0].source.count("tl.dot") + made.matmuls[0].source.count("lib.dot") <= 2  # k and v are equal
    assert all(error(one, other) < 5e-3 for one, other in zip(found, qkv(*args), strict=True))


@pytest.mark.cpu
@pytest.mark.interpret
def test_reductions_on_the_tiles_of_one_of_them() -> None:
    args = [r(70, 50) * 0.1, r(50, 96), r(50, 33)]
    with forced("triton_matmul") as made:
        found = compiled(with_sums, *args)
    assert [len(made.matmuls), len(made.kernels)] == [1, 2]
    assert all(error(one, other) < 1e-4 for one, other in zip(found, with_sums(*args), strict=True))


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_sizes_of_the_call(options: dict[str, Any]) -> None:
    more = weights((96, 32, 32), 50)
    for x, found in at_several_lengths(qkv, more, options):
        assert all(error(one, other) < 1e-5 for one, other in zip(found, qkv(x, *more), strict=True))


# ---- what stays apart -------------------------------------------------------------------------------------------------


def chained(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The second matmul needs the first one for its weights."""
    y = x @ w
    return y, x @ y


def changed_between(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    first = x @ w
    x.add_(0.5)
    return first, x @ v


def nothing_in_common(x: Tensor, y: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return x @ w, y @ v


APART: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "one needs the other": (chained, [r(50, 50), r(50, 50)]),
    "the operand is changed in between": (changed_between, [r(70, 50), r(50, 96), r(50, 33)]),
    "nothing in common": (nothing_in_common, [r(70, 50), r(70, 50) * 2, r(50, 96), r(50, 33)]),
}


@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", APART)
def test_matmuls_that_stay_apart(name: str, options: dict[str, Any]) -> None:
    fn, args = APART[name]
    kept = [a.clone() for a in args]
    found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    for one, other in zip(found, fn(*kept), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not joined(plans(fn, *kept, options=Options()).forward)


def joined(plan: Schedule) -> list[ComboKernel]:
    return [step for step in plan.steps if isinstance(step, ComboKernel) and members(step)[0].choice is not None]


@pytest.mark.cpu
def test_forbidden_and_explained() -> None:
    fn, args = other_epilogues, [r(70, 50), r(50, 96), r(50, 33), r(70, 33).half()]
    plan = plans(fn, *args, options=Options()).forward
    assert len(joined(plan)) == 1
    assert [v.outcome for v in plan.verdicts if v.reason is Reason.SAME_OPERAND] == [Outcome.BATCHED]
    with kgen.forbid_fused("aten.gelu", "aten.add"):
        report = kgen.explain(fn, *args, print_report=False)
    assert not any("and_1_more" in kernel.name for kernel in report.kernels)


@pytest.mark.cpu
def test_switched_off_with_templates() -> None:
    fn, args, _ = CASES["q, k and v"]
    assert not joined(plans(fn, *args, options=replace(Options(), templates=False)).forward)


# ---- on a GPU that is not here ----------------------------------------------------------------------------------------


@pytest.mark.cpu
def test_the_cost_model_joins_where_waves_are_filled() -> None:
    """2048 rows by 4096, 1024 and 1024 columns: alone, the narrow ones leave a third of an H200 idle."""
    problems = [p for p in problems_of(BY_NUMBER["11"]) if p.template.name == "triton_matmul_tiles"]
    assert len(problems) == 3
    configs = list(model.feasible(problems[0]))
    together = min(model.grouped_seconds(problems, c) for c in configs)
    assert together < sum(min(model.seconds(p, c) for c in configs) for p in problems)


@pytest.mark.ptx
def test_compiles_for_hopper_with_asynchronous_matmuls() -> None:
    """Branches must not cost the pipeline: as much shared memory as one matmul has, no registers spilled."""
    args = [r(256, 512, dtype=bf), *weights((512, 256, 256), 512, bf)]
    needs: list[Resources] = []
    with forced("triton_matmul_tiles", lambda configs: [c for c in configs if (c.BLOCK_M, c.BLOCK_N) == (128, 128)][:1],
                runs=False) as made:  # fmt: skip
        compiled(qkv, *args)
        needs += made.needs
    (kernel,) = made.matmuls
    (done,) = triton.compile_kernels([kernel], 90)
    assert done.shared <= needs[0].shared
    assert done.stack == 0
    assert done.cubin


def steps(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """The steps of a sequence, each by one of two matrices; the last one does more."""
    found = [x[:, k] @ w[k % 2] + b for k in range(5)]
    return [*found, (x[:, 5] @ w[0]).relu()]


def test_equal_matmuls_of_a_launch_are_one_body() -> None:
    """They differ in where they read, and in what they write: a program chooses both, and the body is compiled once."""
    args = [r(24, 7, 64, dtype=bf), r(2, 64, 48, dtype=bf), r(48, dtype=bf)]
    with forced("triton_matmul") as made, kgen.config.override(loop_batching=False):
        found = compiled(steps, *args)
    assert len(made.matmuls) == 1
    assert made.matmuls[0].source.count("lib.dot") == 2
    for one, other in zip(found, steps(*args), strict=True):
        assert error(one, other) < 5e-3


@pytest.mark.ptx
def test_pointers_that_a_program_chooses_are_as_aligned_as_they_were() -> None:
    args = [torch.empty(64, 7, 512, dtype=bf), torch.empty(2, 512, 64, dtype=bf), torch.empty(64, dtype=bf)]
    with forced("triton_matmul", runs=False) as made, kgen.config.override(loop_batching=False):
        compiled(steps, *args)
    (kernel,) = made.matmuls
    (done,) = triton.compile_kernels([kernel], 90)
    assert done.stack == 0
    assert done.shared >= made.needs[0].shared * 3 // 4  # loads of two bytes would not go there on their own


def small_ones(*tensors: Tensor) -> list[Tensor]:
    """Matmuls that have nothing in common, each with an epilogue of its own."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    return [(x @ w).relu() * k for k, (x, w) in enumerate(pairs, 1)]


SMALL = [(20, 50), (50, 33), (70, 24), (24, 40), (17, 64), (64, 20)]


@pytest.mark.interpret
def test_small_matmuls_of_other_operands_are_one_launch() -> None:
    args = [r(*shape) for shape in SMALL]
    torch._dynamo.reset()
    with kgen.config.override(cache=False, gpu_interpreter=True):
        report = kgen.explain(small_ones, *args, print_report=False)
        got = torch.compile(small_ones, backend="kgen")(*args)
    assert len(report.kernels) == 1, report
    assert {v.outcome for v in report.verdicts if v.reason is Reason.FEW_TILES} == {Outcome.BATCHED}
    torch.testing.assert_close(got, small_ones(*args), rtol=1e-4, atol=1e-4)


def test_matmuls_that_fill_the_gpu_stay_apart() -> None:
    plan = planned(small_ones, *(torch.empty(4096, 4096, dtype=bf) for _ in range(4)))
    assert not any(isinstance(step, ComboKernel) for step in plan.steps)


def test_what_waits_for_each_other_is_no_group() -> None:
    def f(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return (x @ w) @ v

    plan = planned(f, *(torch.empty(64, 64, dtype=bf) for _ in range(3)))
    assert not any(isinstance(step, ComboKernel) for step in plan.steps)


def test_eight_matmuls_of_one_operand_are_one_launch() -> None:
    """As the gates of an LSTM, or many small heads."""

    def f(x: Tensor, *ws: Tensor) -> list[Tensor]:
        return [(x @ w).sigmoid() for w in ws]

    for gpu in (True, False):
        plan = planned(f, *(torch.empty(*shape, dtype=bf) for shape in [(64, 256), *[(256, 64)] * 8]), gpu=gpu)
        [step] = plan.steps
        assert len(members(step)) == 8  # type: ignore[arg-type]
