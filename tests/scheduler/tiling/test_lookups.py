"""Tables that are read at places from data: which threads share places, and which tables."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Tiling
from kgen.scheduler import choose_tiles
from kgen.scheduler.tiling.lookups import LANES, TABLES_OF_A_STEP
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned

TREES = 50


def forest(x: Tensor, feature: Tensor, threshold: Tensor, left: Tensor, leaf: Tensor) -> Tensor:
    """Three steps down each tree; their leaves are summed."""
    node = torch.zeros(len(x), len(feature), dtype=torch.long, device=x.device)
    at = torch.arange(len(feature), device=x.device)[None]
    for _ in range(3):
        right = x.gather(1, feature[at, node]) >= threshold[at, node]
        node = left[at, node] + right
    return leaf[at, node].sum(1)


def trees(rows: int, count: int = TREES) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    tables = (torch.randint(5, (count, 31)), torch.rand(count, 31), torch.randint(30, (count, 31)), torch.rand(count, 31))
    return torch.rand(rows, 5), *tables


def picked(x: Tensor, at: Tensor) -> Tensor:
    """Each row has a table of its own."""
    return x.gather(1, at).sum(1)


def decoded(codes: Tensor, books: Tensor, scales: Tensor) -> Tensor:
    """Rows of vectors of eight, each the sum of two that codes name."""
    return (books[0][codes[..., 0].long()] + books[1][codes[..., 1].long()]).flatten(-2) * scales


def codes(rows: int, vectors: int, width: int = 8) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    named = torch.randint(16, (rows, vectors, 2), dtype=torch.uint8)
    return named, torch.randn(2, 16, width).bfloat16(), torch.randn(rows, 1).bfloat16()


def tilings(fn: object, args: tuple[Tensor, ...]) -> list[Tiling]:
    plan = planned(fn, *args)  # type: ignore[arg-type]
    kernels = [step for step in plan.kernels if isinstance(step, Kernel)]
    return [choose_tiles(kernel, plan.graph, Sizes({}), Gpu()) for kernel in kernels]


def test_lanes_share_a_table() -> None:
    blocks = tilings(forest, trees(20000))[0].blocks
    assert (blocks.x, blocks.r) == (LANES, TABLES_OF_A_STEP)


def test_rows_with_tables_of_their_own() -> None:
    """Lanes along the row read what is near. So do the few rows of a small batch, which SMs would wait for."""
    assert tilings(picked, (torch.rand(20000, 64), torch.randint(64, (20000, TREES))))[0].blocks.r == 64
    assert tilings(forest, trees(1000))[0].blocks.r > TABLES_OF_A_STEP


def test_rows_of_codes() -> None:
    """A row of eight elements loads its codes for all of them."""
    [tiling] = tilings(decoded, codes(4096, 512))
    assert (tiling.blocks.x, tiling.blocks.y, [v.extent.as_int() for v in tiling.x]) == (8, 256, [8])


@pytest.mark.parametrize("width", [6, 4, 16])
def test_other_runs_of_codes(width: int) -> None:
    """No power of two; less than a vector; more than one."""
    [tiling] = tilings(decoded, codes(4096, 64, width))
    assert tiling.blocks.x > 16


@pytest.mark.interpret
def test_values() -> None:
    with torch.no_grad():
        given = trees(132 * LANES + 3, 11)
        torch.testing.assert_close(compiled(forest, *given), forest(*given))
        given = codes(5, 12)
        torch.testing.assert_close(compiled(decoded, *given), decoded(*given), atol=0.02, rtol=0.02)
