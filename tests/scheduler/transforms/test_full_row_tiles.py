"""Rows of a matmul that are reduced and read again in the matmul's own kernel: values, what is launched, what stays apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.build import triton
from kgen.cost import model
from kgen.device import Device
from kgen.ir.plan import Schedule, members
from kgen.only import only
from kgen.scheduler import Options
from kgen.scheduler.selection.choose import problems
from kgen.templates.contract import Config
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.codegen import gradients
from tests.full_row_cases import check, near, plan_of, r, rms_norm, softmax, wide
from tests.matmuls import compiled, forced

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates win over the library."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e9)


def whole(plan: Schedule) -> list[str]:
    """The reductions of full rows in matmuls' kernels."""
    kernels = [k for step in plan.kernels for k in members(step)]
    return [s.op for k in kernels if k.contracts for s in k.statements if s.kind == "partial"]


def by_heads(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Queries or keys, each head normalised."""
    y = (x @ w).view(x.shape[0], -1, 16)
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5) * g


@dataclass(frozen=True)
class Case:
    """`inputs` by the length of a row; `ops` are the reductions of a row."""

    f: Callable[..., Any]
    inputs: Callable[[int], tuple[Any, ...]]
    ops: tuple[str, ...]


def matmul(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return r(45, 40, dtype=dtype), r(40, n, dtype=dtype)


CASES = {
    "softmax": Case(softmax, lambda n: (r(3, 37, 24), r(3, n, 24), r(37, n) > 0.1), ("max", "sum")),
    "log_softmax": Case(lambda x, w, b: F.log_softmax(x @ w + b, -1), lambda n: (*matmul(n), r(n)), ("max", "sum")),
    "layer_norm": Case(
        lambda x, w, y, g, b: F.layer_norm(x @ w + y, w.shape[1:], g, b),
        lambda n: (*matmul(n), r(45, n), r(n), r(n)), ("welford",),
    ),
    "rms_norm": Case(rms_norm, lambda n: (*matmul(n), r(n)), ("sum",)),
    "means": Case(lambda x, w: (lambda y: y - y.mean(-1, keepdim=True))(x @ w), matmul, ("sum",)),
    "three_dimensions": Case(
        lambda x, w, b: F.layer_norm(F.linear(x, w, b), w.shape[:1]), lambda n: (r(3, 15, 40), r(n, 40), r(n)), ("welford",)
    ),
    "the_largest": Case(lambda x, w: (lambda y: y == y.amax(-1, keepdim=True))(x @ w), matmul, ("max",)),
    "all_but_the_largest": Case(
        lambda x, w: (lambda y: torch.where(torch.arange(y.shape[1]) == y.argmax(-1, keepdim=True), 0, y))(x @ w),
        matmul, ("argmax",),
    ),
    "normalised_twice": Case(
        lambda x, w: F.layer_norm(x @ w, w.shape[1:]).softmax(-1), matmul, ("welford", "max", "sum")
    ),
    "matmul_kept": Case(lambda x, w: (lambda y: (y, y.softmax(-1)))(x @ w), matmul, ("max", "sum")),
    "statistics_kept": Case(
        lambda x, w: torch.ops.aten.native_layer_norm(x @ w, w.shape[1:], None, None, 1e-5), matmul, ("welford",)
    ),
    "log_sum_exp_kept": Case(
        lambda x, w: (lambda y: (torch.logsumexp(y, -1), y.softmax(-1)))(x @ w), matmul, ("max", "max", "sum", "sum")
    ),
    "columns_summed": Case(lambda x, w: (lambda y: (y.softmax(-1), y.sum(0)))(x @ w), matmul, ("max", "sum", "sum")),
    "bfloat16": Case(softmax, lambda n: (
        r(2, 37, 24, dtype=torch.bfloat16), r(2, n, 24, dtype=torch.bfloat16), r(37, n) > 0.1), ("max", "sum"),
    ),
    "gated": Case(
        lambda x, w, v: (F.silu(x @ w) * (x @ v)).softmax(-1), lambda n: (*matmul(n), r(40, n)), ("max", "sum")
    ),
    "result_transposed": Case(lambda x, w: (x @ w).softmax(-1).t().contiguous(), matmul, ("max", "sum")),
    "backward_of_softmax": Case(
        lambda dy, v, p: (lambda g: (g - (g * p).sum(-1, keepdim=True)) * p)(dy @ v),
        lambda n: (*matmul(n), r(45, n)), ("sum",),
    ),
}  # fmt: skip
JOINED = {"columns_summed": 1}  # launches that add up what is summed over tiles of rows
LENGTHS = (31, 64, 100, 256)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("n", [31, 256])
@pytest.mark.parametrize("name", CASES)
def test_plans(name: str, n: int) -> None:
    case = CASES[name]
    plan = plan_of(case.f, *case.inputs(n))
    assert not plan.calls
    assert len(plan.kernels) == 1 + JOINED.get(name, 0)
    assert sorted(whole(plan)) == sorted(case.ops)
    assert any(v.outcome is Outcome.FUSED and v.reason is Reason.ROWS for v in plan.verdicts)


@pytest.mark.every(5)
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, n: int) -> None:
    check(CASES[name].f, *CASES[name].inputs(n), tolerance=2e-2 if name == "bfloat16" else 3e-5)


@pytest.mark.usefixtures("fused")
def test_rows_of_one_element_are_no_rows() -> None:
    for name in ("softmax", "layer_norm", "rms_norm"):
        check(CASES[name].f, *CASES[name].inputs(1), tolerance=1e-4)


def smallest(configs: Sequence[Config]) -> Sequence[Config]:
    return sorted(configs, key=lambda c: c.BLOCK_M * c.BLOCK_N)[:1]


@pytest.mark.every(3)
@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("name", ["softmax", "layer_norm", "statistics_kept", "gated", "bfloat16"])
@pytest.mark.parametrize("template", ["triton_matmul_tiles", "triton_matmul_persistent", "triton_matmul_b_resident"])
def test_values_of_each_template(name: str, template: str) -> None:
    """Rows of another number than the tile's, several tiles for each program among them."""
    case = CASES[name]

    def walking(configs: Sequence[Config]) -> Sequence[Config]:
        found = [c for c in configs if c.BLOCK_N >= 104 and c.get("EPILOGUE_SUBTILES", 1) == 1]
        if template != "triton_matmul_b_resident":
            return smallest(found)
        return [Config(tuple((k, 2 if k == "TILES" else 16 if k == "BLOCK_M" else v) for k, v in found[0].values))]

    with forced(template, walking) as made:
        check(case.f, *case.inputs(104), tolerance=2e-2 if name == "bfloat16" else 3e-5)
    assert len(made.kernels) == 1


def test_tiles_in_sides_hold_no_rows() -> None:
    """Sides past the first have nothing of a row, and would write its reductions too."""

    def most(configs: Sequence[Config]) -> Config:
        assert {c.EPILOGUE_SUBTILES for c in configs} == {1}
        return min(configs, key=lambda c: -c.BLOCK_N)

    with only("triton_matmul_persistent", most):
        check(softmax, *CASES["softmax"].inputs(104), tolerance=3e-5)


@pytest.mark.usefixtures("fused")
def test_heads_in_a_tile() -> None:
    args = (r(45, 40), r(40, 64), r(16))
    plan = plan_of(by_heads, *args)
    assert (len(plan.kernels), whole(plan)) == (1, ["sum"])
    check(by_heads, *args)


@pytest.mark.usefixtures("fused")
def test_rows_without_anything_in_them() -> None:
    mask = torch.zeros(40, 100, dtype=torch.bool)
    mask[3] = True
    mask[4, 1:] = True
    mask[:, 64:] = True
    check(softmax, r(2, 40, 24), r(2, 100, 24), mask)
    x, w = matmul(100)
    x[5, 3], x[6, 3] = math.inf, math.nan
    for name in ("log_softmax", "layer_norm", "the_largest"):
        f, (_, _, *rest) = CASES[name].f, CASES[name].inputs(100)
        check(f, x, w, *rest)


@pytest.mark.usefixtures("fused")
def test_rows_of_the_lowest_number_and_far_from_zero() -> None:
    """Where a row's maximum may not be multiplied by anything, neither for its size nor for its last digits."""
    mask = torch.zeros(45, 100, dtype=torch.bool)
    mask[3] = True
    mask[4, 1:] = True
    x, w = matmul(100, torch.bfloat16)
    for low in (torch.finfo(torch.bfloat16).min, -1e9):
        check(lambda x, w, mask, low=low: (x @ w).masked_fill(mask, low).softmax(-1), x, w, mask, tolerance=1e-3)
    check(lambda x, w: (x @ w + torch.arange(100) * 4.0 - 1e3).softmax(-1).bfloat16(), x.float(), w.float(), tolerance=1e-2)
    x[5, 3], x[6, 3], x[7, 3] = math.inf, -math.inf, math.nan
    check(lambda x, w: (x @ w).softmax(-1), x, w, tolerance=1e-2)


@pytest.mark.usefixtures("fused")
def test_padding_does_not_count() -> None:
    """Past the end of a row the tile holds what the epilogue makes of zeros."""
    check(lambda x, w: (lambda y: y - y.amax(-1, keepdim=True))(-5 - (x @ w).square()), *matmul(33))
    check(lambda x, w: F.layer_norm((x @ w) + 100, (33,)), *matmul(33), tolerance=1e-3)


@pytest.mark.parametrize("sizes", [(0, 40, 30), (20, 0, 30), (20, 40, 0)])
@pytest.mark.parametrize("template", ["triton_matmul", "triton_matmul_b_resident"])
def test_without_elements(template: str, sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    with only(template, lambda configs: configs[0]):
        for f in (lambda x, w: (x @ w).softmax(-1), lambda x, w: F.relu(x @ w) + 1):
            check(f, r(m, k), r(k, n))


@pytest.mark.usefixtures("fused")
def test_a_number_of_rows_that_the_call_knows() -> None:
    f = torch.compile(rms_norm, backend="kgen", dynamic=True, options={"gpu_interpreter": True, "cache": False})
    torch._dynamo.reset()
    w, g = r(40, 100), r(100)
    torch._dynamo.mark_static(w)
    torch._dynamo.mark_static(g)
    for m in (45, 7, 130):
        x = r(m, 40)
        torch._dynamo.mark_static(x, 1)
        near(f(x, w, g), rms_norm(*wide((x, w, g))), 2e-5)


@pytest.mark.every(2)
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "layer_norm", "rms_norm", "by_heads"])
def test_gradients(name: str) -> None:
    f, args = (by_heads, (r(45, 40), r(40, 64), r(16))) if name == "by_heads" else (CASES[name].f, CASES[name].inputs(100))
    inputs = [a.requires_grad_() if a.is_floating_point() else a for a in args]
    torch._dynamo.reset()
    fast = torch.compile(f, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    got = gradients(fast)(*inputs)
    doubles = [a.detach().double().requires_grad_() if a.is_floating_point() else a for a in args]
    near(got, gradients(f)(*doubles), 1e-4)


# ---- what stays apart ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("n", "reason"), [(1030, None), (700, Reason.NOT_WHOLE)])
def test_rows_that_no_tile_holds(n: int, reason: Reason | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are too long for any tile, or for those that this device could run."""
    if reason is not None:
        monkeypatch.setattr(model, "fits", lambda problem, config: config.BLOCK_N <= 256 and problem.admits(config))
    args = (*matmul(n), r(n))
    plan = plan_of(rms_norm, *args)
    assert (len(plan.kernels), whole(plan)) == (2, [])
    assert reason is None or any(v.reason is reason for v in plan.verdicts)
    check(rms_norm, *args)


def test_rows_are_apart_where_the_library_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a template may have the matmul without them."""
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e-9 if problem.whole else 1e9)
    plan = plan_of(rms_norm, *matmul(100), r(100))
    assert (len(plan.kernels), len(plan.calls), whole(plan)) == (2, 0, [])
    assert any(v.outcome is Outcome.UNPROFITABLE and v.reason is Reason.VENDOR_FASTER for v in plan.verdicts)


def test_a_demand_keeps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "vendor_seconds", lambda problem: 1e-9)
    demands = (FusionDemand("aten.mm", "aten.mean", True),)
    plan = plan_of(rms_norm, *matmul(100), r(100), options=Options(gpu_everywhere=True, demands=demands))
    assert (len(plan.kernels), whole(plan)) == (1, ["sum"])
    with kgen.require_fused("aten.mm", "aten.mean"):
        check(rms_norm, *matmul(100), r(100))


@pytest.mark.every(3)
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(
    "f",
    [
        pytest.param(lambda x, w: (x @ w) - (x @ w).mean(0), id="long columns"),
        pytest.param(lambda x, w: (lambda y: y - y.amax(-1, keepdim=True).flip(0))(x @ w), id="another row"),
        pytest.param(lambda x, w: (lambda y: y / y.sum())(x @ w), id="everything"),
        pytest.param(lambda x, w: (lambda y: y - y.cumsum(-1))(x @ w), id="scan"),
        pytest.param(lambda x, w: (lambda y: y.flip(0) - y.amax(-1, keepdim=True))(x @ w), id="elements of another row"),
        pytest.param(lambda x, w: (lambda p: p[1:] - p[:-1])((x @ w).softmax(-1)), id="neighbours of the result"),
        pytest.param(lambda x, w: (lambda y: y - y.view(-1, 2, 50).amax(1).repeat(1, 2))(x @ w), id="halves of a row"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_right(f: Callable[..., Any]) -> None:
    check(f, r(1100, 40), r(40, 100), tolerance=1e-3)


@pytest.mark.usefixtures("fused")
def test_columns_of_few_rows_are_rows_too() -> None:
    """A tile may hold all of the other axis."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return y - y.mean(0)

    args = matmul(90)
    plan = plan_of(f, *args)
    assert (len(plan.kernels), whole(plan)) == (1, ["sum"])
    check(f, *args)


def test_stable_results_depend_on_no_tile() -> None:
    plan = plan_of(rms_norm, *matmul(100), r(100), options=Options(gpu_everywhere=True, stable=True))
    assert whole(plan) == []


def test_the_estimate_keeps_rows_where_that_pays() -> None:
    """Where sums are short; long rows of long sums are better off in tiles that do not hold them."""
    for columns, templates in (
        (1024, {"triton_matmul_full_row"}),
        (256, {"triton_matmul_b_resident", "triton_matmul", "triton_matmul_tiles"}),
    ):
        f, args = queries(columns, 64)
        [kernel] = plan_of(f, *args).kernels
        assert members(kernel)[0].choice.template in templates
    f, args = normalised(1024, 1024)
    assert len(plan_of(f, *args).kernels) == 2


@pytest.mark.usefixtures("fused")
def test_an_operand_that_stays_is_one_tile() -> None:
    """A configuration may come from a file, or from another matmul of a grouped kernel."""
    plan = plan_of(softmax, *CASES["softmax"].inputs(100))
    [kernel] = (k for step in plan.kernels for k in members(step) if k.contracts)
    problem = next(p for p in problems(kernel, plan.graph, Device(), None)[0] if p.template.name == "triton_matmul_b_resident")
    assert all(c.BLOCK_N == 128 and c.BLOCK_K == 32 for c in model.feasible(problem))
    first = dict(next(iter(model.feasible(problem))).values)
    for smaller in ({"BLOCK_N": 64}, {"BLOCK_K": 16}):
        assert not model.fits(problem, problem.template.config(**{**first, **smaller}))


# ---- for a GPU that is not here --------------------------------------------------------------------------------------------


def queries(n: int, k: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    q = torch.empty(64, n, k, dtype=torch.bfloat16)
    return softmax, (q, q.clone(), torch.empty(n, n, dtype=torch.bool))


def normalised(n: int, k: int) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    t = [torch.empty(*sizes, dtype=torch.bfloat16) for sizes in ((8192, k), (k, n), (8192, n), (n,), (n,))]
    return CASES["layer_norm"].f, tuple(t)


@pytest.mark.every(2)
@pytest.mark.ptx
@pytest.mark.parametrize(
    ("template", "problem", "block"),
    [
        ("triton_matmul_b_resident", queries(1024, 64), 1024),
        ("triton_matmul_b_resident", queries(512, 64), 512),
        ("triton_matmul", normalised(512, 512), 512),
        ("triton_matmul_tiles", normalised(512, 512), 512),
        ("triton_matmul_tiles", normalised(256, 512), 256),
    ],
)
def test_full_row_tiles_spill_nothing(template: str, problem: Any, block: int) -> None:
    f, args = problem
    with forced(template, lambda configs: [c for c in configs if block == c.BLOCK_N][:1], runs=False) as made:
        compiled(f, *args)
    [kernel] = made.kernels
    [built] = triton.compile_kernels([kernel], 90)
    assert built.stack == 0
    assert built.shared <= made.needs[0].shared <= 232_448
