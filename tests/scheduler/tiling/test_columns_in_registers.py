"""Tiles of GPU kernels whose values a thread has to hold: of columns, of rows, and of windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.build import triton
from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import ComboKernel, Kernel, Schedule, Tiling
from kgen.scheduler import choose_combo_tiles, choose_tiles
from kgen.scheduler.tiling.registers import registers_of_a_row
from tests.gpu_graphs import run
from tests.rendering import gpu_call
from tests.scheduler.selection.test_safe_choices import planned


def tilings(plan: Schedule) -> list[Tiling]:
    kernels = [step for step in plan.kernels if isinstance(step, Kernel)]
    return [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in kernels]


def stack_of(plan: Schedule, tiling: Tiling) -> int:
    """Bytes of registers of a thread that are in memory."""
    [made] = triton.compile_kernels([gpu_call(tiling, plan.graph).launch], 90)
    return int(made.stack)


def many_values(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Two sums of columns, and much between them."""
    total = x
    for one in others:
        total = total * torch.where(one > 0, one * x, x)
    parts = [torch.where(one > 0, one, total) for one in others]
    return (total.sum(1), *(p * q for p, q in zip(parts, reversed(parts), strict=True)))


def of_rows(x: Tensor, *others: Tensor) -> Tensor:
    """Rows of 5, of each of which many numbers belong to the row."""
    parts = [torch.sin(one) for one in others]
    mixed = [p * q for p, q in zip(parts, reversed(parts), strict=True)]
    return sum((m[:, None] * (x + k) for k, m in enumerate(mixed)), x).sum(1)


@pytest.mark.ptx
def test_columns_with_many_values_have_more_threads() -> None:
    plan = planned(many_values, torch.randn(512, 32, 64), *(torch.randn(512, 32, 64) for _ in range(12)))
    [tiling] = tilings(plan)
    assert tiling.persistent
    assert tiling.blocks.warps > 2
    assert stack_of(plan, tiling) == 0


def test_what_belongs_to_rows_counts() -> None:
    [tiling] = tilings(planned(of_rows, torch.randn(200001, 5), *(torch.randn(200001) for _ in range(40))))
    assert registers_of_a_row(tiling.kernel) > 32
    assert tiling.blocks.x < 256


def columns(x: Tensor) -> Tensor:
    return x.sum(1)


@pytest.mark.parametrize(("size", "warps"), [((32, 100, 301), 16), ((512, 100, 301), 4)], ids=["few", "many"])
def test_few_programs_have_more_warps(size: tuple[int, ...], warps: int) -> None:
    tiling = tilings(planned(columns, torch.randn(size)))[0]
    assert (tiling.blocks.warps, tiling.blocks.x * tiling.blocks.r) == (warps, 128 * warps)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.maximum(a[:, None, 0], b[None, :, 0]), torch.minimum(a[:, None, 1], b[None, :, 1])
    return (high - low).clamp(0).amax(1)


def test_rows_of_a_table_of_pairs_share_programs() -> None:
    [tiling] = tilings(planned(overlaps, torch.randn(4096, 2), torch.randn(4096, 2)))
    assert (tiling.blocks.x, tiling.blocks.r) == (4, 4096)
    [few] = tilings(planned(overlaps, torch.randn(128, 2), torch.randn(4096, 2)))
    assert few.blocks.x == 1


def to_rows(table: Tensor, at: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a table whose rows are summed in bags: features by rows of `grad`."""
    rows = (grad[:, :, None] * weight[:, None, :]).transpose(1, 2)
    return table.index_put([at], rows, accumulate=True)


def test_what_jumps_goes_outside() -> None:
    arguments = (torch.zeros(39000, 10), torch.randint(0, 39000, (8192, 39)), torch.randn(8192, 39), torch.randn(8192, 10))
    scatters = [t for t in tilings(planned(to_rows, *arguments)) if any(s.kind == "scatter" for s in t.kernel.statements)]
    assert [t.kernel.outer[-1].extent.as_int() for t in scatters] == [10]


def window(x: Tensor) -> Tensor:
    return F.avg_pool1d(x, 25, 1, padding=12)


def test_windows_take_a_point_a_thread() -> None:
    [tiling] = tilings(planned(window, torch.randn(64, 321, 336)))
    assert tiling.blocks.x == 32 * tiling.blocks.warps
    [short] = tilings(planned(lambda x: F.avg_pool1d(x, 3, 1, padding=1), torch.randn(64, 321, 336)))
    assert short.blocks.x == 4 * 32 * short.blocks.warps


def differences(x: Tensor, y: Tensor) -> Tensor:
    return y * 2 + F.pad(x[:, :, 1:] - x[:, :, :-1], (0, 1))


def test_a_run_of_memory_is_addressed_by_its_axis() -> None:
    plan = planned(differences, torch.randn(24, 511, 511), torch.randn(24, 511, 511))
    [tiling] = tilings(plan)
    text = gpu_call(tiling, plan.graph).launch.source
    assert len(tiling.x) > 1
    assert text.count("+ (xi)") == 3  # y, x, and the result


def sums(x: Tensor) -> Tensor:
    """A row of two loops is one run of memory."""
    return (x.transpose(1, 2)[:, :, 1:] + x[:, :-1, :].transpose(1, 2)).exp().sum((1, 2))


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (differences, [(2, 5, 7), (2, 5, 7)]),
        (sums, [(3, 5, 6)]),
        (columns, [(3, 40, 33)]),
        (overlaps, [(7, 2), (30, 2)]),
        (window, [(2, 3, 40)]),
    ],
)
def test_values(fn: Callable[..., Any], sizes: list[tuple[int, ...]]) -> None:
    run(fn, *map(torch.randn, sizes), gpu_interpreter=True)


def test_members_of_combo_kernels_have_the_usual_warps() -> None:
    """All have one number of them."""
    plan = planned(lambda x, y: (x.sum(1), y.sum(1)), torch.randn(32, 100, 301), torch.randn(32, 100, 301))
    [batch] = [step for step in plan.kernels if isinstance(step, ComboKernel)]
    assert {tiling.blocks.warps for tiling in choose_combo_tiles(batch, plan.graph, Sizes({}), Gpu())} == {4}
