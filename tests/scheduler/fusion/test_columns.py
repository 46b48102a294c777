"""Column sums that ride on a kernel of rows, as the backward of a normalisation has them: what moves, and what must not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kgen.build import triton
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule
from kgen.report.record import Record, recording
from kgen.report.traffic import bytes_minimal, bytes_moved
from kgen.scheduler import Gpu, Options, choose_tiles
from kgen.verdict import FusionDemand, Outcome, Reason
from tests.kernels import plans
from tests.rendering import gpu_call

GPU = Options(gpu_everywhere=True)
r = torch.randn


def layer_norm_backward(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide, dy = x.float(), dy.float()
    mean = wide.mean(-1, keepdim=True)
    scale = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + 1e-5)
    unit = (wide - mean) * scale
    dw = dy * w
    dx = (dw - dw.mean(-1, keepdim=True) - unit * (dw * unit).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), (dy * unit).sum(0), dy.sum(0)


def softmax_backward(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    dx = y * (grad - (grad * y).sum(-1, keepdim=True))
    return dx, dx.sum(0)


def plan_of(f: Callable[..., Any], *args: Tensor, options: Options = GPU) -> Schedule:
    return plans(f, *args, options=options).forward


def carriers(plan: Schedule) -> list[Kernel]:
    return [k for k in plan.kernels if isinstance(k, Kernel) and k.share is not None]


def reasons(plan: Schedule, outcome: Outcome) -> set[Reason]:
    return {v.reason for v in plan.verdicts if v.outcome is outcome}


def sums_over_two_loops(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    dx = x * (g - (g * x).sum(-1, keepdim=True))
    return dx, dx.sum((0, 1)), (g * x).reshape(-1, x.shape[-1]).sum(0)


def sums_of_two_dimensions(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    dw = g * w
    return dw - dw.mean((1, 2), keepdim=True), (x * g).sum(0) + (dw * x).sum(0)


def accumulating(x: Tensor, g: Tensor, total: Tensor) -> tuple[Tensor]:
    dx, db = softmax_backward(g, x)
    total.add_(db)
    return (dx,)


def overwriting(x: Tensor, g: Tensor) -> tuple[Tensor]:
    db = (x * g).sum(0)
    x.copy_(x.softmax(-1))
    return (db,)


def integers_and_wide(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x - x.amax(-1, keepdim=True), x.sum(0), y - y.amax(-1, keepdim=True), (y * 2).sum(0)


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(4096, 1024), (1024, 1024), (4001, 768), (600, 4096), (5000, 100)])
def test_a_backward_of_a_normalisation_is_two_kernels(rows: int, columns: int) -> None:
    plan = plan_of(layer_norm_backward, r(rows, columns), r(rows, columns), r(columns))
    first, last = plan.kernels
    assert [first] == carriers(plan)
    assert [s.op for s in last.statements] == ["sum", "sum"]
    [verdict] = [v for v in plan.verdicts if v.reason is Reason.COLUMN_SUMS]
    assert verdict.outcome is Outcome.FUSED
    assert verdict.bytes_saved > 0


def test_what_both_read_is_moved_once() -> None:
    rows, columns = 4096, 1024
    plan = plan_of(layer_norm_backward, r(rows, columns), r(rows, columns), r(columns))
    [carrier] = carriers(plan)
    assert carrier.share is not None
    partial = 2 * 2 * carrier.share.extent.as_int() * columns * 4  # two sums, written and read again
    assert bytes_moved(plan) == bytes_minimal(plan) + partial
    assert bytes_minimal(plan) == 3 * rows * columns * 4 + 3 * columns * 4


def test_what_only_the_sums_read_is_not_stored() -> None:
    def f(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = x * (g - (g * x).sum(-1, keepdim=True))
        return y.sum(0), y.amax(-1)

    plan = plan_of(f, r(4096, 512), r(4096, 512))
    assert len(plan.kernels) == 2
    assert bytes_moved(plan) < 2.2 * 4096 * 512 * 4


def test_a_bias_gradient_rides_on_the_rows_that_make_it() -> None:
    plan = plan_of(softmax_backward, r(4096, 512), r(4096, 512))
    assert len(plan.kernels) == len(carriers(plan)) + 1 == 2


def test_programs_share_all_rows_and_no_more() -> None:
    """Each program takes as many blocks as any other but the last: none waits for one that has a block more."""
    for rows in (300, 4096, 32768):
        plan = plan_of(layer_norm_backward, r(rows, 64), r(rows, 64), r(64))
        [carrier] = carriers(plan)
        assert carrier.share is not None
        programs = carrier.share.extent.as_int()
        blocks = -(-rows // choose_tiles(carrier, plan.graph, Sizes({}), Gpu()).blocks.x)
        assert programs is not None
        assert (-(-blocks // programs) - 1) * programs < blocks


# ---- what stays apart -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "columns"), [(20, 512), (4096, 16), (600, 20000), (2000, 40000)])
def test_shapes_that_stay_apart(rows: int, columns: int) -> None:
    """Few rows (the partial sums would be as large as the data), short rows, rows that leave no registers for sums."""
    plan = plan_of(softmax_backward, r(rows, columns), r(rows, columns))
    assert not carriers(plan)


def test_too_many_sums_stay_apart() -> None:
    def f(x: Tensor, y: Tensor) -> list[Tensor]:
        dx = y * (x - (x * y).sum(-1, keepdim=True))
        return [dx, dx.sum(0), (dx * x).sum(0), (dx * y).sum(0), (x - y).sum(0), x.sum(0)]

    plan = plan_of(f, r(1024, 4096), r(1024, 4096))
    assert not carriers(plan)
    assert Reason.TOO_LARGE in reasons(plan, Outcome.UNPROFITABLE)


def test_other_reductions_of_columns_stay_apart() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1), x.amax(0)

    assert not carriers(plan_of(f, r(4096, 512)))


def test_sums_that_the_rows_need_stay_apart() -> None:
    assert not carriers(plan_of(lambda x: (x * x.sum(0)).softmax(-1), r(4096, 512)))


def test_a_kernel_for_the_gpu_carries_none_for_the_cpu() -> None:
    plan = plan_of(softmax_backward, r(1024, 512), r(1024, 512), options=Options())
    assert not carriers(plan)  # two megabytes stay in the CPU's cache


def test_no_fusion_means_no_sums_on_rows() -> None:
    assert not carriers(plan_of(softmax_backward, r(4096, 512), r(4096, 512), options=replace(GPU, fusion=False)))


def test_a_demand_keeps_them_apart() -> None:
    demands = (FusionDemand("aten.amax", "aten.sum", False),)
    f = lambda x: (x - x.amax(-1, keepdim=True), x.sum(0))  # noqa: E731
    assert len(carriers(plan_of(f, r(4096, 512)))) == 1
    assert not carriers(plan_of(f, r(4096, 512), options=replace(GPU, demands=demands)))


# ---- results --------------------------------------------------------------------------------------------------------


INTERPRETED = {"gpu_interpreter": True}


def run(f: Callable[..., Any], *args: Any, dynamic: bool | None = None, **options: bool) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", dynamic=dynamic, fullgraph=True, options=options or INTERPRETED)(*args)


def check(
    f: Callable[..., Any], *args: Tensor, rtol: float = 1e-4, carrying: int = 1, planned: Options = GPU, **options: bool
) -> None:
    """Agrees with float64 on copies of the arguments, which end as eager's do; `carrying` kernels of rows sum columns."""
    assert len(carriers(plan_of(f, *(a.clone() for a in args), options=planned))) == carrying
    mine, wide = [a.clone() for a in args], [a.double() if a.is_floating_point() else a.clone() for a in args]
    with torch.no_grad():
        got, want = run(f, *mine, **options), f(*wide)
    for one, other in zip((*got, *mine), (*want, *wide), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=rtol * float(other.abs().max()))


def check_a_number_of_rows(**options: bool) -> None:
    """One graph for all of them."""
    torch._dynamo.reset()
    compiled = torch.compile(softmax_backward, backend="kgen", options={"cache": False, **options})
    with recording() as recorder:
        for rows in (400, 901, 3):
            g, y = r(rows, 64), r(rows, 64)
            for t in (g, y):
                torch._dynamo.mark_dynamic(t, 0)
            torch.testing.assert_close(compiled(g, y), softmax_backward(g, y), rtol=1e-4, atol=1e-4)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    assert len(carriers(graph.plan)) == 1


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize(("rows", "columns"), [(300, 64), (299, 100), (1000, 40), (400, 513)])
def test_rows_and_columns_that_fill_no_tile(rows: int, columns: int) -> None:
    check(layer_norm_backward, r(rows, columns), r(rows, columns), r(columns))


@pytest.mark.interpret
def test_bfloat16_rows_and_float32_weights() -> None:
    x, dy = r(400, 96).bfloat16(), r(400, 96).bfloat16()
    check(layer_norm_backward, dy, x, r(96), rtol=1e-2)


@pytest.mark.interpret
def test_rows_of_two_loops() -> None:
    """Sums over batch and time of what the rows' kernel walks as two loops, or as one."""

    check(sums_over_two_loops, r(4, 75, 64), r(4, 75, 64))


@pytest.mark.interpret
def test_columns_of_two_dimensions() -> None:
    check(sums_of_two_dimensions, r(600, 6, 32), r(6, 32), r(600, 6, 32))


@pytest.mark.interpret
def test_what_follows_the_sums_follows_the_partial_results() -> None:
    def f(x: Tensor, g: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        dx, db = softmax_backward(g, x)
        return dx, (old * 0.9 + db * 0.1).half()

    check(f, r(500, 64), r(500, 64), r(64), rtol=1e-2)


@pytest.mark.interpret
def test_a_gradient_that_accumulates_in_place() -> None:
    check(accumulating, r(500, 64), r(500, 64), r(64))


@pytest.mark.slow
@pytest.mark.interpret
def test_rows_that_are_overwritten() -> None:
    """The sums are of the rows as they were before; the kernel of rows changes them."""

    check(overwriting, r(500, 64), r(500, 64), carrying=0)


@pytest.mark.interpret
def test_rows_that_are_overwritten_by_what_is_summed() -> None:
    def f(x: Tensor) -> tuple[Tensor]:
        x.copy_(x.softmax(-1))
        return ((x * x).sum(0),)

    check(f, r(500, 64), carrying=0)


@pytest.mark.interpret
def test_rows_that_fusion_gave_to_the_columns() -> None:
    """The last use of the rows shares more with the sums than with the rest of the rows' kernel: it comes along."""

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.softmax(-1)
        return y, (y * y).sum(0)

    check(f, r(500, 64))
    assert len(plan_of(f, r(500, 64)).kernels) == 2


@pytest.mark.interpret
def test_what_is_changed_in_between() -> None:
    """The second sum reads g as the index_add has left it, which reads what the kernel of rows makes."""

    def f(x: Tensor, g: Tensor, i: Tensor) -> tuple[Tensor, ...]:
        top = (x * g).softmax(-1)
        g.index_add_(0, i, top)
        return top, (x * g).sum(0)

    torch.manual_seed(0)
    i = torch.randperm(500)
    with torch.no_grad():
        x, g = r(500, 64), r(500, 64)
        other = g.clone()
        got, want = run(f, x, g, i), f(x, other, i)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(g, other)


@pytest.mark.interpret
def test_sums_that_a_step_before_the_rows_needs() -> None:
    """The kernel of rows reads what is scaled by the column sums' maximum: the sums cannot wait for it."""

    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        db = x.sum(0)
        scale = db.amax() + w
        return db, (x * scale).softmax(-1)

    check(f, r(500, 64), r(1, 64), carrying=0)


@pytest.mark.every(2)
@pytest.mark.interpret
@pytest.mark.parametrize("first", [0, 1])
def test_sums_along_either_axis_of_two_layouts(first: int) -> None:
    """The sums of rows carry those of columns; riding on the softmax, which walks the other way, they would stride over x."""

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows, columns = lambda: (x + y.t()).sum(1), lambda: x.sum(0)
        one, two = (columns(), rows()) if first else (rows(), columns())
        return one, two, y.softmax(-1)

    with torch.no_grad():
        args = r(400, 300), r(300, 400)
        torch.testing.assert_close(run(f, *args), f(*args), rtol=1e-4, atol=1e-4)
    plan = plan_of(f, *args)
    [carrier] = carriers(plan)
    assert "aten.amax.default" not in {op for o in carrier.origins for op in o.operators}


@pytest.mark.interpret
def test_scans_of_rows() -> None:
    check(lambda x, y: (x.cumsum(-1), (x * y).sum(0)), r(600, 48), r(600, 48))


@pytest.mark.interpret
def test_integers_and_wide_numbers() -> None:
    check(integers_and_wide, torch.randint(-99, 99, (900, 40)), r(900, 40).double(), carrying=2)


@pytest.mark.interpret
def test_results_repeat() -> None:
    args = r(1000, 96), r(1000, 96), r(96)
    first, second = run(layer_norm_backward, *args), run(layer_norm_backward, *args)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.interpret
def test_a_dynamic_number_of_rows() -> None:
    check_a_number_of_rows(**INTERPRETED)


def test_a_dynamic_number_of_columns_stays_apart() -> None:
    compiled = torch.compile(softmax_backward, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    g, y = r(400, 64), r(400, 64)
    for t in (g, y):
        torch._dynamo.mark_dynamic(t, 1)
    with recording() as recorder:
        compiled(g, y)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    assert not carriers(graph.plan)


@pytest.mark.interpret
def test_a_model_trains() -> None:
    """Linear, residual sum and LayerNorm: gradients of all parameters, the bias' through the normalisation."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.relu(x) + self.linear(x))

    torch.manual_seed(0)
    mine = nn.Sequential(Block(), Block())
    theirs = nn.Sequential(Block(), Block())
    theirs.load_state_dict(mine.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(mine, backend="kgen", options={"gpu_interpreter": True})
    optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (mine, theirs)]
    for _ in range(3):
        x, target = r(600, 64), r(600, 64)
        for model, optimiser in zip((compiled, theirs), optimisers, strict=True):
            optimiser.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimiser.step()
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


# ---- machine code ---------------------------------------------------------------------------------------------------


@pytest.mark.ptx
def test_a_dynamic_number_of_rows_compiles() -> None:
    compiled = torch.compile(softmax_backward, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    g, y = r(400, 64), r(400, 64)
    for t in (g, y):
        torch._dynamo.mark_dynamic(t, 0)
    with recording() as recorder:
        compiled(g, y)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    launches = [call.launch for call in graph.units.calls.values() if call.launch is not None]
    assert any("i64" in launch.signature for launch in launches)
    assert len(triton.compile_kernels(launches, 90)) == 2


@pytest.mark.ptx
@pytest.mark.parametrize("operands", [1, 2, 5])
def test_the_next_rows_fit_in_shared_memory(operands: int) -> None:
    def f(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        x = sum(tensors[1:], tensors[0])
        return x.softmax(-1), x.sum(0)

    plan = plan_of(f, *(r(512, 8192) for _ in range(operands)))
    [carrier] = carriers(plan)
    tiling = choose_tiles(carrier, plan.graph, Sizes({}), Gpu())
    assert tiling.blocks.stages == {1: 3, 2: 2, 5: 1}[operands]
    launch = gpu_call(tiling, plan.graph, "rows").launch
    assert launch is not None
    [made] = triton.compile_kernels([launch], 80)
    assert (made.shared > 60_000) == (operands < 5)
    assert made.shared < 99 * 1024


@pytest.mark.every(5)
@pytest.mark.ptx
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("columns", [1024, 4096, 8192])
def test_accumulators_stay_in_registers(arch: int, columns: int) -> None:
    plan = plan_of(layer_norm_backward, r(512, columns).bfloat16(), r(512, columns).bfloat16(), r(columns))
    [carrier] = carriers(plan)
    launch = gpu_call(choose_tiles(carrier, plan.graph, Sizes({}), Gpu()), plan.graph, "rows").launch
    assert launch is not None
    [made] = triton.compile_kernels([launch], arch)
    assert made.stack == 0


@pytest.mark.parametrize(("length", "kernels"), [(256, 1), (9000, 2)])
def test_long_rows_are_not_stored_across_their_own(length: int, kernels: int) -> None:
    """Each store of a row would touch as many sectors as it has elements. A tile of enough short rows moves full ones."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1).transpose(1, 2).contiguous()

    found = plans(turned, torch.empty(4, 512, length, dtype=torch.bfloat16), options=Options(gpu_everywhere=True))
    assert found.kernels == kernels, [str(v) for v in found.forward.verdicts]
    assert any(v.reason is Reason.LAYOUT_CONFLICT for v in found.forward.verdicts) == (kernels > 1)


def weighted(grad: Tensor, y: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    made = y * weight + bias
    dx = made * (grad - (grad * made).sum(-1, keepdim=True))
    return dx, dx.sum(0)


@pytest.mark.parametrize(("columns", "carried"), [(8000, 1), (12000, 0)])
def test_long_rows_with_vectors_of_columns_carry_no_sums(columns: int, carried: int) -> None:
    """Of 64 registers of a thread a weight, a bias and a sum would take 48."""
    plan = plan_of(weighted, r(600, columns), r(600, columns), r(columns), r(columns))
    assert len(carriers(plan)) == carried
    assert carried or Reason.TOO_LARGE in reasons(plan, Outcome.UNPROFITABLE)


@pytest.mark.parametrize(("length", "kernels"), [(64, 1), (4096, 3)])
def test_sums_along_rows_and_across_them_are_kernels_of_their_own(length: int, kernels: int) -> None:
    """They have a small operand in common, by which their loops align. Together either would read an element of each sector."""

    def sums(pairs: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        apart = x[:, None] - x[None]
        return (pairs[..., None] * apart).sum(1), (pairs.t()[..., None] * apart).sum(1)

    found = plans(sums, r(length, length), r(length, 3), options=Options(gpu_everywhere=True))
    assert found.kernels == kernels, [str(v) for v in found.forward.verdicts]
    assert any(v.reason is Reason.LAYOUT_CONFLICT for v in found.forward.verdicts) == (kernels > 1)


def test_three_numbers_of_a_point_are_no_lanes_of_pairs() -> None:
    """A sum across rows goes on along these, and not along three numbers that belong to each of their points."""

    def across(pairs: Tensor, x: Tensor) -> Tensor:
        return (pairs.t()[..., None] * (x[:, None] - x[None])).sum(1)

    plan = plan_of(across, r(4096, 4096), r(4096, 3))
    tiling = choose_tiles(plan.kernels[0], plan.graph, Sizes({}), Gpu())
    assert tiling.x[-1].extent.as_int() == 4096
    assert tiling.blocks.x >= 32
