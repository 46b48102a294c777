"""What belongs to columns and is read with strides: rows of a program share it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kgen
from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Tiling
from kgen.scheduler import choose_tiles
from tests.scheduler.selection.test_safe_choices import planned


def masked(mask: Tensor, g: Tensor, w: Tensor) -> Tensor:
    """The gradient of a relu before four columns: their weights are read across."""
    return torch.where(mask, 0.0, g @ w.t())


def affine(x: Tensor, w: Tensor) -> Tensor:
    return x * w[:, 0] + w[:, 1]


def tiling(*given: object) -> Tiling:
    plan = planned(*given)  # type: ignore[arg-type]
    [step] = plan.kernels
    found = choose_tiles(step, plan.graph, Sizes({}), Gpu())  # type: ignore[arg-type]
    assert isinstance(found, Tiling)
    return found


def args(rows: int, columns: int = 128) -> tuple[Tensor, ...]:
    return torch.zeros(rows, columns, dtype=torch.bool), torch.randn(rows, 4), torch.randn(columns, 4)


def test_rows_share_strided_columns() -> None:
    shared = tiling(masked, *args(1 << 17))
    assert (len(shared.x), len(shared.y), shared.blocks.y) == (1, 1, 32)
    assert tiling(masked, *args(512)).blocks.y == 1  # too few rows for all SMs
    assert tiling(affine, torch.empty(1 << 17, 128), torch.empty(128, 2)).blocks.y == 1  # memory takes longer


@pytest.mark.interpret
def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kgen.scheduler.tiling.tiles.COLUMN_ROWS", 4)
    mask, g, w = args(4 * 132 + 3, 96)
    mask[::3] = True
    with torch.no_grad(), kgen.config.override(cache=False, gpu_interpreter=True):
        got = torch.compile(masked, backend="kgen", fullgraph=True)(mask, g, w)
    torch.testing.assert_close(got, masked(mask, g, w))
