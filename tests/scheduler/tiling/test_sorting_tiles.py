"""Tiles of kernels that sort: rows in registers, in a warp of their own as far as its registers go."""

from __future__ import annotations

import pytest
import torch

from kgen.device import Gpu
from kgen.ir.index import Sizes
from kgen.ir.plan import Tiling
from kgen.scheduler import choose_tiles
from kgen.templates.triton.codegen.sorting import network_arguments
from tests.scheduler.selection.test_safe_choices import planned

f32, bf16, i64 = torch.float32, torch.bfloat16, torch.int64


def tile(dtype: torch.dtype, rows: int, length: int, dim: int = -1) -> tuple[Tiling, str]:
    shape = (rows, length) if dim else (length, rows)
    plan = planned(lambda x: tuple(torch.sort(x, dim=dim, stable=True)), torch.empty(shape, dtype=dtype))
    [kernel] = plan.kernels
    found = choose_tiles(kernel, plan.graph, Sizes({}), Gpu())
    return found, network_arguments(found, plan.graph)


@pytest.mark.parametrize(
    ("dtype", "rows", "length", "blocks", "bits"),
    [
        (f32, 65536, 32, (32, 32, 4), "5, 2, 3"),  # several rows a warp
        (f32, 65536, 100, (8, 128, 4), "7, 2, 5"),
        (f32, 65536, 101, (2, 128, 1), "7, 0, 5"),  # rows begin between vectors: four elements of each lane are apart
        (bf16, 65536, 256, (4, 256, 4), "8, 3, 5"),
        (f32, 65536, 1000, (1, 1024, 1), "10, 2, 5"),
        (i64, 65536, 1000, (1, 1024, 2), "10, 1, 6"),  # positions are beside
        (bf16, 65536, 4000, (1, 4096, 4), "12, 3, 7"),
        (f32, 1, 1000, (1, 1024, 4), "10, 2, 7"),  # nothing else for the SM
    ],
)
def test_rows(dtype: torch.dtype, rows: int, length: int, blocks: tuple[int, int, int], bits: str) -> None:
    found, arguments = tile(dtype, rows, length)
    assert found.persistent
    assert (found.blocks.x, found.blocks.r, found.blocks.warps) == blocks
    assert arguments == bits


@pytest.mark.parametrize(("length", "dtype"), [(32, f32), (1000, f32), (4000, bf16), (2000, i64)])
def test_columns_fit_in_registers(length: int, dtype: torch.dtype) -> None:
    found, _ = tile(dtype, 65536, length, dim=0)
    assert found.persistent
    assert found.blocks.x * found.blocks.r <= 32 * 32 * found.blocks.warps
    assert found.blocks.warps <= 16


def test_few_columns_have_an_sm_each() -> None:
    found, bits = tile(bf16, 100, 4001, dim=0)
    assert (found.blocks.x, found.blocks.r, found.blocks.warps) == (1, 4096, 16)
    assert bits == "12, 0, 9"
