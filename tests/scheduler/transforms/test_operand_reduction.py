"""Sums of a matmul's operand in the matmul's own kernel: what is launched and read, values, what stays apart and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from matmuls import compiled, error, forced
from torch import Tensor

import kgen
from bench.matmuls import BY_NUMBER
from kgen import errors
from kgen.build import triton
from kgen.commands.explain import Explanation
from kgen.cost import model
from kgen.ir.plan import Kernel, Schedule
from kgen.only import only
from kgen.scheduler import Options
from kgen.scheduler.transforms.operand_reduction import operand_reductions, without_sums
from kgen.templates.contract import contraction, knob, operand, result, template
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict
from tests.kernels import plans
from tests.slow import slow_but
from tests.templates.triton.test_hopper_matmuls import disassembled

bf = torch.bfloat16
GPU = Options(gpu_everywhere=True)
SUMMING = ("triton_matmul_tiles", "triton_matmul")
BACK_ENDS = {"cpp": Options(), "triton": GPU}
Function = Callable[..., Any]


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.fixture(autouse=True)
def templates_win(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)
    allowed = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def gradients(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy.t() @ x, dy.sum(0)


def of_the_right(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t() @ dy, dy.sum(0)


def of_both(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return dy.t() @ x, dy.sum(0), x.sum(0)


def of_rows(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy @ x.t(), dy.sum(1)


def computed_operand(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    dz = dy * 3
    return dz.t() @ x, dz.sum(0)


def worked_on(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.relu(dy.t() @ x), (dy.sum(0) * 0.5 + 1).to(torch.float32)


def in_batches(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return dy.mT @ x, dy.sum(-2)


def flattened(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The matmul sees rows of two dimensions as one, the sum does not."""
    return dy.flatten(0, 1).t() @ x.flatten(0, 1), dy.sum((0, 1))


def of_a_family(dy: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sigmoid(dy.t() @ x) * (dy.t() @ y), dy.sum(0)


CASES: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "gradients": (gradients, ((136, 72), (136, 40))),
    "odd sizes": (gradients, ((131, 67), (131, 35))),
    "rows of a longer operand": (of_rows, ((67, 131), (35, 131))),
    "computed": (computed_operand, ((131, 67), (131, 40))),
    "worked on": (worked_on, ((136, 72), (136, 40))),
    "in batches": (in_batches, ((3, 70, 40), (3, 70, 24))),
    "flattened": (flattened, ((5, 26, 72), (5, 26, 40))),
    "of a family": (of_a_family, ((136, 72), (136, 40), (136, 40))),
}
OF_THE_RIGHT: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "right": (of_the_right, ((131, 67), (131, 40))),
    "both": (of_both, ((136, 72), (136, 40))),
}


def planned(fn: Function, *args: Tensor, options: Options = GPU) -> Schedule:
    (plan,) = plans(fn, *args, options=options).schedules
    return plan


def verdict(plan: Schedule, reason: Reason) -> Verdict:
    return next(v for v in plan.verdicts if v.reason is reason)


def summing(plan: Schedule) -> list[Kernel]:
    return [k for k in plan.kernels if isinstance(k, Kernel) and operand_reductions(k)]


# ---- what is launched, and read -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", BACK_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_one_kernel(name: str, target: str) -> None:
    fn, shapes = CASES[name]
    plan = planned(fn, *(r(*shape) for shape in shapes), options=BACK_ENDS[target])
    assert len(plan.steps) == 1
    assert len(summing(plan)) == 1
    assert verdict(plan, Reason.OPERAND_REDUCTION).outcome is Outcome.FUSED


@pytest.mark.parametrize("target", BACK_ENDS)
def test_demands(target: str) -> None:
    """A sum that moves into a matmul's kernel after fusion is what was asked for, and stays there whatever is faster."""
    args = (r(136, 72), r(136, 40))
    wanted = replace(BACK_ENDS[target], demands=(FusionDemand("aten.mm", "aten.sum", True),))
    plan = planned(gradients, *args, options=wanted)
    assert (len(plan.steps), len(summing(plan))) == (1, 1)
    with pytest.raises(errors.FusionRequired, match=r"aten\.mm.*aten\.sum"):
        planned(lambda dy, x: (dy.t() @ x, dy.sum(1)), *args, options=wanted)
    with pytest.raises(errors.FusionRequired):
        planned(gradients, *args, options=replace(wanted, stable=True))


@pytest.mark.cpu
@pytest.mark.parametrize("interpreted", [False, pytest.param(True, marks=pytest.mark.interpret)])
def test_nothing_is_read_twice(interpreted: bool) -> None:
    """The report's bytes are the fewest possible: both operands and both results, once."""
    args = (r(136, 72), r(136, 40))
    with kgen.config.override(gpu_interpreter=interpreted, cache=False):
        report: Explanation = kgen.explain(gradients, *args, print_report=False)
    assert len(report.kernels) == 1
    assert sum(g.bytes_moved for g in report.graphs) == 4 * (136 * 72 + 136 * 40 + 72 * 40 + 72)


def test_of_a_linear_layer_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By estimates alone, the library's among them: the matmul and the sum of the benchmark are one kernel."""
    monkeypatch.undo()
    matmul = BY_NUMBER["15"]
    plan = planned(matmul.fn, *(torch.empty(g.shape, dtype=g.dtype) for g in matmul.inputs))
    assert len(plan.steps) == 1
    assert verdict(plan, Reason.OPERAND_REDUCTION).bytes_saved == 2 * 4096 * 4096


# ---- values -------------------------------------------------------------------------------------------------------------


def near(fn: Function, got: tuple[Tensor, ...], args: list[Tensor]) -> None:
    wanted = fn(*(a.double() for a in args))
    for one, other in zip(got, wanted, strict=True):
        assert error(one, other) < (4e-3 if args[0].dtype.itemsize == 2 else 1e-6)


@pytest.mark.every(5)
@pytest.mark.interpret
@pytest.mark.parametrize("name", [*CASES, *OF_THE_RIGHT])
@pytest.mark.parametrize(("taker", "dtype"), [*((taker, bf) for taker in SUMMING), ("triton_matmul", torch.float32)], ids=str)
def test_in_tiles(taker: str, name: str, dtype: torch.dtype) -> None:
    fn, shapes = (CASES | OF_THE_RIGHT)[name]
    args = [r(*shape, dtype=dtype) for shape in shapes]

    def smallest(configs: Any) -> Any:
        return sorted(configs, key=lambda c: c.BLOCK_M * c.BLOCK_N)[:1]

    with forced(taker, smallest) as made:
        got = compiled(fn, *args)
    assert len(made.kernels) == 1
    near(fn, got, args)


@pytest.mark.cpu
@pytest.mark.parametrize(
    "dtype", slow_but(lambda kind: kind is torch.float32, (torch.float32, bf, torch.float16, torch.float64)), ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_as_rows_are_packed(name: str, dtype: torch.dtype) -> None:
    fn, shapes = CASES[name]
    args = [r(*shape, dtype=dtype) for shape in shapes]
    report = kgen.explain(fn, *args, print_report=False)
    assert len(report.kernels) == 1
    near(fn, torch.compile(fn, backend="kgen", options={"cache": False})(*args), args)


@pytest.mark.cpu
def test_sums_of_many_blocks_in_parts() -> None:
    """Several blocks along k, rows that are packed one after the other, and sums over k in parts for threads."""
    args = [r(1500, 1203), r(1500, 33)]
    for pick in (0, -1):
        torch._dynamo.reset()
        with only("cpp_matmul", lambda configs, pick=pick: configs[pick]):
            near(gradients, torch.compile(gradients, backend="kgen", options={"cache": False})(*args), args)


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("interpreted", [False, True])
def test_sizes_of_the_call(interpreted: bool) -> None:
    step = torch.compile(gradients, backend="kgen", dynamic=True, options={"gpu_interpreter": interpreted, "cache": False})
    for rows in (72, 200, 17):
        args = [r(rows, 40), r(rows, 24)]
        near(gradients, step(*args), args)


@pytest.mark.interpret
def test_what_is_not_a_number_stays_so() -> None:
    dy, x = r(40, 24), r(40, 32)
    dy[3, 5], dy[7, 6], dy[8, 7], dy[9, 7] = float("nan"), float("inf"), float("inf"), float("-inf")
    with forced("triton_matmul"):
        _, got = compiled(gradients, dy, x)
    torch.testing.assert_close(got, dy.sum(0), equal_nan=True)


# ---- machine code ---------------------------------------------------------------------------------------------------------


@pytest.mark.ptx
@pytest.mark.parametrize("fn", [gradients, of_the_right])
@pytest.mark.parametrize("taker", SUMMING)
def test_matmuls_still_overlap(taker: str, fn: Function) -> None:
    """The loop with sums waits for none of its matmuls, the other loop is what it was, and they share all of their memory but
    the tile of ones."""
    args = [torch.empty(2048, 2048, dtype=bf) for _ in range(2)]

    def pick(configs: Any) -> Any:
        return [c for c in configs if c.BLOCK_M == c.BLOCK_N == 128][:1]

    with forced(taker, pick, runs=False) as made:
        compiled(fn, *args)
    (found,) = triton.compile_kernels(made.matmuls, 90)
    code = disassembled(found.cubin)
    matmuls = re.findall(r"HGMMA\S*", code)
    assert any("64x16x16" in line for line in matmuls)
    assert sum("gsb" in line for line in re.findall("HGMMA.*", code)) < len(matmuls)
    needed = made.needs[0].shared + 64 * 16 * bf.itemsize  # asked last without the sums, which need a tile of ones
    assert 0.9 * needed < found.shared <= needed
    registers, stack = triton.resource_usage(found.cubin)
    assert stack == 0
    assert registers <= 255


# ---- what stays apart -----------------------------------------------------------------------------------------------------


def test_no_order_of_additions_depends_on_a_tile() -> None:
    plan = planned(gradients, r(136, 72), r(136, 40), options=Options(gpu_everywhere=True, stable=True))
    assert not summing(plan)
    assert verdict(plan, Reason.STABLE_ORDER).outcome is Outcome.UNPROFITABLE


def test_forbidden() -> None:
    with kgen.forbid_fused("aten.mm", "aten.sum"):
        plan = planned(
            gradients, r(136, 72), r(136, 40), options=Options(gpu_everywhere=True, demands=kgen.verdict.DEMANDS.get())
        )
    assert not summing(plan)


def test_a_kernel_of_its_own_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "sums_seconds", lambda problem: -1.0)
    plan = planned(gradients, r(136, 72), r(136, 40))
    assert not summing(plan)
    together, apart = verdict(plan, Reason.APART_FASTER).measured
    assert apart < together


def test_tf32_rounds() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    plan = planned(gradients, r(136, 72), r(136, 40))
    assert not summing(plan)
    assert "TF32" in verdict(plan, Reason.NO_OPERAND_REDUCTION).detail


def test_the_engine_sums_what_it_packs_once() -> None:
    plan = planned(of_the_right, r(136, 72), r(136, 40), options=Options())
    assert not summing(plan)
    assert "does not add up B" in verdict(plan, Reason.NO_OPERAND_REDUCTION).detail


@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(lambda dy, x: (dy.t() @ x, dy.sum(1)), id="other axis"),
        pytest.param(lambda dy, x: (dy.t() @ x, dy.sum()), id="all axes"),
        pytest.param(lambda dy, x: (dy.t() @ x, dy.abs().sum(0)), id="other value"),
        pytest.param(lambda dy, x: (dy.t() @ x, dy.amax(0)), id="other reduction"),
        pytest.param(lambda dy, x: (dy[:50].t() @ x[:50], dy.sum(0)), id="fewer rows"),
        pytest.param(lambda dy, x: (dy.to(bf).t() @ x.to(bf), dy.sum(0)), id="rounded in the matmul alone"),
    ],
)
def test_other_sums(fn: Function) -> None:
    assert not summing(planned(fn, r(72, 72), r(72, 40)))


def test_the_matmul_needs_the_sum() -> None:
    def fn(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        sums = dy.sum(0)
        return dy.t() @ (x + sums), sums

    assert not summing(planned(fn, r(72, 72), r(72, 72)))


def test_the_operand_changes_in_between() -> None:
    def fn(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        matmul = dy.t() @ x
        dy.add_(1)
        return matmul, dy.sum(0)

    assert not summing(planned(fn, r(72, 72), r(72, 40)))


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("interpreted", [False, True])
def test_a_result_without_elements_has_sums(interpreted: bool) -> None:
    """No tile would make them."""
    args = [r(72, 40), r(72, 0)]
    got = torch.compile(gradients, backend="kgen", options={"cache": False, "gpu_interpreter": interpreted})(*args)
    torch.testing.assert_close(got[1], args[0].sum(0))


def test_a_kernel_without_its_sums() -> None:
    plan = planned(worked_on, r(136, 72), r(136, 40))
    (kernel,) = summing(plan)
    (first, *_) = operand_reductions(kernel)
    assert without_sums(kernel).statements == kernel.statements[: kernel.statements.index(first)]


# ---- the contract ---------------------------------------------------------------------------------------------------------


def test_a_declaration_has_to_store_its_sums() -> None:
    with pytest.raises(errors.BadTemplate, match="never calls store_sum"):

        @template(
            implements=contraction("b,m,k", "b,k,n -> b,m,n"),
            device="cuda",
            source="../../../templates/triton/kernels/matvec.py.jinja",
            name="sums_nothing",
        )
        class _Matmul(kgen.KernelTemplate):
            A, B, C = operand("b", "m", "k", sums=True), operand("b", "k", "n", many=True), result("b", "m", "n", many=True)
            BLOCK_M, BLOCK_N, BLOCK_K = knob(1), knob(32), knob(32)
