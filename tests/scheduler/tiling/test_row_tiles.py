"""Elementwise kernels on a GPU whose programs do not cross the ends of rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, Tiling
from kgen.scheduler import choose_tiles
from tests.gpu_graphs import run
from tests.rendering import gpu_call
from tests.scheduler.selection.test_safe_choices import planned


def tilings(plan: Schedule, gpu: Gpu | None = None) -> list[Tiling]:
    kernels = [step for step in plan.kernels if isinstance(step, Kernel)]
    return [choose_tiles(kernel, plan.graph, Sizes({}), gpu or Gpu()) for kernel in kernels]


def minus_row(x: Tensor, row: Tensor) -> Tensor:
    return (x - row[:, None]).exp()


@pytest.mark.parametrize(
    ("rows", "columns", "apart"),
    [(64, 8192, True), (64, 8184, True), (64, 8191, False), (4096, 64, False), (64, 1100, False)],
    ids=["whole", "ragged", "unaligned", "short", "wasteful"],
)
def test_programs_keep_to_rows(rows: int, columns: int, apart: bool) -> None:
    """Where few of a program's points are beyond the end of a row, and rows begin at whole vectors."""
    [tiling] = tilings(planned(minus_row, torch.randn(rows, columns), torch.randn(rows)))
    assert (tiling.blocks.y, bool(tiling.y)) == (1, apart)
    assert tiling.x[-1].extent.as_int() in (columns, rows * columns)


def likelihood_gradient(x: Tensor, top: Tensor, total: Tensor, labels: Tensor, d: Tensor) -> Tensor:
    hit = torch.arange(x.shape[1]) == labels[:, None]
    return torch.where(hit, d[:, None], 0.0) - torch.exp(x - top[:, None] - total.log()[:, None]) * d.abs()[:, None]


def rows_between_vectors(columns: int) -> list[Tensor]:
    return [torch.randn(64, columns), torch.randn(64), torch.rand(64) + 1, torch.randint(0, 99, (64,)), torch.randn(64)]


@pytest.mark.parametrize(("fn", "apart"), [(likelihood_gradient, True), (lambda x, *_: x.exp(), False)])
def test_rows_between_vectors_have_programs_where_what_belongs_to_them_costs_most(
    fn: Callable[..., Tensor], apart: bool
) -> None:
    [tiling] = tilings(planned(fn, *rows_between_vectors(8191)))
    assert bool(tiling.y) == apart


def test_no_rows_have_no_programs_of_their_own() -> None:
    args = [torch.randn(0, 8191), torch.randn(0), torch.rand(0), torch.randint(0, 99, (0,)), torch.randn(0)]
    [tiling] = tilings(planned(likelihood_gradient, *args))
    assert tiling.blocks.x


@pytest.mark.interpret
def test_values_of_rows_between_vectors() -> None:
    assert run(likelihood_gradient, *rows_between_vectors(2047), gpu_interpreter=True).kinds == {"plane"}


@pytest.mark.parametrize(("rows", "warps"), [(1, 16), (64, 16), (1000, 4)])
def test_a_program_with_an_sm_to_itself_has_more_warps(rows: int, warps: int) -> None:
    [tiling] = tilings(planned(lambda x: x.softmax(-1), torch.randn(rows, 4096)), Gpu())
    assert tiling.blocks.warps in (warps, warps // 2)


def test_what_belongs_to_columns_needs_no_rows() -> None:
    [tiling] = tilings(planned(lambda x, b: x + b, torch.randn(64, 8192), torch.randn(8192)))
    assert not tiling.y


@pytest.mark.interpret
@pytest.mark.parametrize("columns", [1024, 1000])
def test_values_of_rows(columns: int) -> None:
    assert run(minus_row, torch.randn(3, columns), torch.randn(3), gpu_interpreter=True).kinds == {"plane"}


def flipped(x: Tensor) -> Tensor:
    return x.flip(-1) * 2


def test_stores_of_joined_loops_are_the_index_of_the_program() -> None:
    """Triton sees that a thread's points are neighbours there."""
    plan = planned(flipped, torch.randn(40, 30, 33))
    [tiling] = tilings(plan)
    assert len(tiling.x) > 1
    text = gpu_call(tiling, plan.graph).launch.source
    [store] = [line for line in text.splitlines() if "tl.store" in line]
    assert "+ (xi)" in store


@pytest.mark.interpret
def test_values_of_joined_loops() -> None:
    """All of an axis, its outer loops alone, and some with a step."""
    x, y, z = torch.randn(7, 5, 9), torch.randn(7, 5), torch.randn(14, 5, 18)
    assert run(lambda x, y, z: x.flip(-1) * y[..., None] + z[::2, :, ::2], x, y, z, gpu_interpreter=True).kinds


@pytest.mark.parametrize(("rows", "step"), [(80, 16384), (4096, 4096)])
def test_few_rows_that_are_walked_again_take_large_steps(rows: int, step: int) -> None:
    [tiling] = tilings(planned(lambda x: x.softmax(-1), torch.randn(rows, 50257, dtype=torch.bfloat16)))
    assert tiling.blocks.r == step


def crossed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x * y.t()).sum(1), x * 2 - y.t()


@pytest.mark.parametrize(("dtype", "columns", "together"), [(torch.bfloat16, 1000, 8), (torch.float32, 1000, 8)])
def test_rows_that_read_across_rows_share_sectors(dtype: torch.dtype, columns: int, together: int) -> None:
    """As many as fill a sector or half of it, if registers hold them."""
    [tiling] = tilings(planned(crossed, torch.randn(4000, columns).to(dtype), torch.randn(columns, 4000).to(dtype)))
    assert (tiling.blocks.x, tiling.blocks.y, tiling.persistent) == (together, 1, True)


def test_longer_rows_that_read_across_rows_are_walked_in_short_steps() -> None:
    """Registers hold no eight rows of 4,000 numbers: sectors are full all the same."""
    [tiling, _] = tilings(planned(crossed, torch.randn(4000, 4000), torch.randn(4000, 4000)))
    assert tiling.blocks.x >= 8


def stored_across(x: Tensor) -> tuple[Tensor, Tensor]:
    """An image of contiguous channels: their sums, and the image with its channels last."""
    y = x * 2
    return y.sum((0, 2, 3)), y.contiguous(memory_format=torch.channels_last)


def test_rows_that_store_across_rows_share_sectors() -> None:
    """One channel alone would write two bytes of each sector."""
    tiles = tilings(planned(stored_across, torch.randn(24, 64, 64, 64, dtype=torch.bfloat16)))
    assert tiles[0].blocks.x >= 16


def test_shares_of_images_keep_runs_of_neighbours() -> None:
    """Sums of images of which one has its channels last: shares of channels would read parts of sectors."""
    x = torch.randn(24, 64, 64, 64, dtype=torch.bfloat16)
    y = torch.randn(24, 64, 64, 64, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    [tiling, _] = tilings(planned(lambda x, y: (x * y).sum((1, 2, 3)), x, y))
    assert sorted(v.extent.as_int() or 0 for v in tiling.kernel.inner)[-2] >= 16


def test_rows_that_read_along_rows_are_alone() -> None:
    [tiling] = tilings(planned(lambda x, y: (x * y).sum(1), torch.randn(4000, 4000), torch.randn(4000, 4000)))
    assert tiling.blocks.x == 1


@pytest.mark.interpret
def test_values_of_rows_that_read_across_rows() -> None:
    assert run(crossed, torch.randn(701, 300), torch.randn(300, 701), gpu_interpreter=True).kinds == {"rows"}


@pytest.mark.interpret
def test_values_of_rows_that_store_across_rows() -> None:
    assert run(stored_across, torch.randn(4, 48, 112, 113), gpu_interpreter=True).kinds


def shared_digamma(x: Tensor) -> Tensor:
    return (torch.digamma(x.sum(1, keepdim=True)) - torch.digamma(x)).sum(1)


@pytest.mark.parametrize(("fn", "points"), [(shared_digamma, 2), (lambda x: torch.digamma(x).sum(1), 1)])
def test_points_share_special_functions_of_their_row(fn: Callable[..., Tensor], points: int) -> None:
    [tiling] = tilings(planned(fn, torch.rand(20000, 101) + 1))
    assert tiling.blocks.x * tiling.blocks.r == 32 * points * tiling.blocks.warps


def soft_value(x: Tensor) -> Tensor:
    s = x / 0.03
    return (s.softmax(1) * (x - 0.03 * s.log_softmax(1))).sum(1)


def test_rows_of_arithmetic_leave_an_sm_warps() -> None:
    """Each of its three sums waits for the one before; what is read is little."""
    [tiling] = tilings(planned(soft_value, torch.randn(80_000, 18)))
    assert tiling.blocks.x * tiling.blocks.r == 16 * 32 * tiling.blocks.warps
    [tiling] = tilings(planned(lambda x: x.softmax(1), torch.randn(80_000, 18)))
    assert tiling.blocks.x * tiling.blocks.r == 32 * 32 * tiling.blocks.warps


def difference(x: Tensor) -> Tensor:
    """Squared distances of each frame to the windows that begin at its elements."""
    delayed = x[..., 1:].unfold(-1, 256, 1)
    frames = x.unfold(-1, 256, 256)[:, : delayed.shape[1] // 256]
    return (frames[:, :, None] - delayed[:, : frames.shape[1] * 256].unflatten(1, (-1, 256))).square().sum(-1)


def test_windows_are_reduced_across() -> None:
    """Rows of windows begin between vectors, and neighbouring ones read neighbours."""
    [tiling] = tilings(planned(difference, torch.empty(8, 80000)))
    assert tiling.blocks.x > tiling.blocks.r
    assert [v.extent.as_int() for v in tiling.x][-1] == 256


def turned_norm(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of planes, of which two results are stored with the other axis last."""
    y = x.sigmoid().permute(0, 2, 1)
    m = y.mean((1, 2), keepdim=True)
    return (y - m).contiguous(), ((y - m) * w).contiguous(), m


def test_inner_loops_go_along_what_is_stored() -> None:
    """A load of several statements counts as the one that it is."""
    found = tilings(planned(turned_norm, torch.empty(384, 64, 207), torch.empty(207, 64)))
    assert [v.extent.as_int() for tiling in found for v in tiling.kernel.inner] == [207, 64]
