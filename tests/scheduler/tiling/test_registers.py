"""Reductions on a GPU of what has many values at each point: a thread holds fewer points then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, Tiling
from kgen.scheduler import choose_tiles
from kgen.scheduler.tiling.registers import registers_of_a_point
from tests.gpu_graphs import run
from tests.rendering import gpu_call
from tests.scheduler.selection.test_safe_choices import planned

REGISTERS = 256


def sampled(image: Tensor, at: Tensor, target: Tensor) -> Tensor:
    return ((F.grid_sample(image, at, padding_mode="border", align_corners=True) - target) ** 2 + 1e-6).pow(0.45).mean()


def summed(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1)


def reductions(plan: Schedule) -> list[Tiling]:
    kernels = [step for step in plan.kernels if isinstance(step, Kernel) and step.inner]
    return [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in kernels]


def points_of_a_thread(tiling: Tiling) -> float:
    return tiling.blocks.x * tiling.blocks.r / (32 * tiling.blocks.warps)


IMAGES = (torch.randn(8, 3, 255, 511), torch.rand(8, 255, 511, 2) * 2 - 1, torch.randn(8, 3, 255, 511))


@pytest.mark.ptx
def test_samples_of_an_image_take_few_points_at_a_time() -> None:
    plan = planned(sampled, *IMAGES)
    long = max(reductions(plan), key=lambda tiling: registers_of_a_point(tiling.kernel))
    each = registers_of_a_point(long.kernel)
    assert each > 8
    assert each * points_of_a_thread(long) <= REGISTERS
    assert not long.persistent
    assert [one.stack for one in triton.compile_kernels([gpu_call(long, plan.graph).launch], 90)] == [0]


def test_simple_sums_keep_their_rows_in_registers() -> None:
    [tiling] = reductions(planned(summed, torch.randn(4096, 8000), torch.randn(4096, 8000)))
    assert registers_of_a_point(tiling.kernel) <= 3
    assert (tiling.persistent, points_of_a_thread(tiling)) == (True, 32)


def heavy(x: Tensor, y: Tensor) -> Tensor:
    return (F.softplus(x * y) / (1 + x.exp())).sum(-1)


@pytest.mark.parametrize("columns", [200, 1000, 5000])
def test_a_thread_has_few_points_of_much_arithmetic(columns: int) -> None:
    for tiling in reductions(planned(heavy, torch.randn(4096, columns), torch.randn(4096, columns))):
        assert points_of_a_thread(tiling) <= 8


def test_shares_of_heavy_rows_are_shorter() -> None:
    x = torch.randn(2**17)
    plans = [planned(f, x, x) for f in (summed, lambda x, y: heavy(x.tan(), y.atan()))]
    few, many = (reductions(plan)[0].kernel.outer[0].extent.as_int() for plan in plans)
    assert few is not None
    assert many is not None
    assert many > few


def test_values_of_a_point() -> None:
    """Two loads and their quotient; a sum of three loads never holds more than two; what belongs to a row takes none."""

    def registers(fn: object, *args: Tensor) -> int:
        [tiling] = reductions(planned(fn, *args))
        return registers_of_a_point(tiling.kernel)

    x, row = torch.randn(64, 200), torch.randn(64, 1)
    assert registers(lambda a, b: (a / b).sum(-1), x, x + 1) == 3
    assert registers(lambda a, b: (a / b).sum(-1), x, row) == 2


@pytest.mark.interpret
def test_results() -> None:
    torch.manual_seed(0)
    image, target = torch.randn(2, 3, 47, 101), torch.randn(2, 3, 47, 101)
    at = torch.rand(2, 47, 101, 2) * 2.2 - 1.1
    run(sampled, image, at, target, gpu_interpreter=True)


def mixed(x: Tensor, y: Tensor, flag: Tensor, count: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Extremes of rows, many results of each point, and sums of columns."""
    a, b, whole = x * flag + count, torch.where(flag, x, y) - c, (count // 3 * flag).float() + (x > c)
    return a, b, whole, (a + b).sum(0, dtype=torch.float32), count / 7, torch.add(x, c, alpha=2).amax(1)


def test_rows_with_many_values_leave_room_for_another_program() -> None:
    """Two rows of 2,048 points would take 166 registers of each thread, and an SM would hold one program of 8 warps."""
    x = torch.empty(3001, 1777)
    plan = planned(mixed, x.half(), x, x.bool(), x.int(), x.bfloat16())
    [tiling] = [tiling for tiling in reductions(plan) if tiling.kernel.share is not None]
    assert points_of_a_thread(tiling) <= 8


def many_values(number: int) -> Callable[[Tensor], Tensor]:
    def joined(x: Tensor) -> Tensor:
        values = [torch.sin(x + k) for k in range(number)]
        total = sum(values[1:], values[0])
        return sum([value * total for value in values[1:]], values[0] * total)

    return joined


@pytest.mark.parametrize(("number", "points"), [(50, 1), (20, 4)])
def test_a_thread_has_one_point_of_much_arithmetic_that_fills_its_registers(number: int, points: int) -> None:
    """With 255 registers a thread, an SM holds two programs of four warps."""
    [kernel] = (plan := planned(many_values(number), torch.empty(1 << 22))).kernels
    assert isinstance(kernel, Kernel)
    assert points_of_a_thread(choose_tiles(kernel, plan.graph, Sizes({}), Gpu())) == points
