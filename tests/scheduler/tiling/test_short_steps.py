"""Rows that fill no power of two: which are walked in short steps rather than held, with points past their ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Tiling
from kgen.scheduler import choose_tiles
from kgen.scheduler.tiling import tiles
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned


def pairs(target: Tensor, own: Tensor) -> Tensor:
    """A table of which only sums of rows are stored."""
    u = target[:, :, None] - own[:, None, :]
    return (torch.where(u.abs() <= 1, 0.5 * u * u, u.abs() - 0.5) * torch.exp(-u.abs())).sum(-1)


def rows(x: Tensor) -> Tensor:
    return x.sum(-1)


def columns(x: Tensor, w: Tensor) -> Tensor:
    return (x * w[:, :, None]).sum(1)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x * x.tanh(), -1)


def tiled(fn: Callable[..., object], *sizes: tuple[int, ...]) -> Tiling:
    plan = planned(fn, *(torch.rand(size) for size in sizes))
    [kernel] = plan.kernels
    return choose_tiles(kernel, plan.graph, Sizes({}), Gpu())


def test_pairs() -> None:
    """200 is a multiple of 8."""
    tiling = tiled(pairs, (2048, 200), (2048, 200))
    assert (tiling.blocks.x, tiling.blocks.r, tiling.persistent) == (128, 8, False)


def test_a_row_for_each_thread() -> None:
    """65 points would leave 63 of 128 lanes idle; of fewer rows each thread has one, not eight."""
    tiling = tiled(pairs, (2048, 100), (2048, 65))
    assert (tiling.blocks.x, tiling.blocks.r, tiling.persistent) == (128, 1, False)
    assert tiled(pairs, (2048, 400), (2048, 65)).blocks.x == 256
    assert tiled(pairs, (200, 100), (200, 65)).persistent


def lines(at: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    d = (x[None] - at[:, None]).abs()
    w = torch.exp(-d) * (1 - d.clamp(max=1) ** 3) ** 3
    return w.sum(1), (w * d).sum(1)


@pytest.mark.parametrize(("rows", "length", "step"), [(2003, 10007, 2048), (2003, 8000, 8192), (500, 10007, 16384)])
def test_long_rows_of_arithmetic_are_walked_where_that_saves_points(rows: int, length: int, step: int) -> None:
    """16,384 points would hold 10,007, five steps are 10,240. Few rows are held, since each SM has few of them at a time."""
    tiling = tiled(lines, (rows,), (length,))
    assert (tiling.blocks.x, tiling.blocks.r, tiling.persistent) == (1, step, step > length)


def test_short_columns() -> None:
    tiling = tiled(columns, (100_000, 9, 8), (100_000, 9))
    assert (tiling.blocks.x, tiling.blocks.r, tiling.persistent) == (256, 1, False)


@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (pairs, [(2048, 256), (2048, 256)]),
        (rows, [(400_000, 200)]),
        (softmax, [(400_000, 200)]),
        (columns, [(1000, 9, 8), (1000, 9)]),
    ],
    ids=["a power of two", "memory decides", "read again", "few columns"],
)
def test_others_are_held(fn: Callable[..., object], sizes: list[tuple[int, ...]]) -> None:
    assert tiled(fn, *sizes).persistent


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("fn", "sizes"), [(pairs, [(3, 20), (3, 20)]), (pairs, [(2, 50), (2, 51)]), (columns, [(30, 9, 8), (30, 9)])]
)
def test_values(fn: Callable[..., object], sizes: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "PROGRAMS_OF_STEPS", 0)
    monkeypatch.setattr(tiles, "MANY_COLUMNS", 1)
    given = [torch.rand(size) for size in sizes]
    torch.testing.assert_close(compiled(fn, *given), fn(*given))
