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
