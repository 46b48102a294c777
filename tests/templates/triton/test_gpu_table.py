"""The op tables through the Triton back end, in Triton's interpreter: every lowering family without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from codegen import Row, doubled, elementwise_rows, indexing_rows, laid_out, report, run_rows

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::UserWarning")]

# What a GPU has no atomic or no function for: these stay library calls.
LIBRARY = frozenset(
    ["igamma", "igammac", "polygamma", "special_zeta", "special_airy_ai", "scatter", "scatter_reduce", "index_reduce"]
)
# Batches a dtype.
SHARDS = {torch.float32: 6, torch.bfloat16: 6, torch.int64: 3, torch.bool: 2}


def rows(dtype: torch.dtype) -> list[Row]:
    return [*elementwise_rows([dtype]), *indexing_rows([dtype])]


def check(chosen: list[Row], dtype: torch.dtype = torch.float32) -> None:
    library = LIBRARY | ({"index_put", "index_add", "scatter_add"} if dtype.itemsize == 1 else set())  # no atomics of a byte
    admitted = [row if row.externs is None else replace(row, externs=row.externs | library) for row in chosen]
    failures = run_rows(admitted, gpu=True)
    assert not failures, f"{len(failures)} of {len(chosen)} rows fail\n{report(failures)}"


def batches(*dtypes: torch.dtype) -> list[Any]:
    return [
        pytest.param(dtype, part, id=f"{str(dtype).removeprefix('torch.')}-{part}")
        for dtype in dtypes
        for part in range(SHARDS.get(dtype, 4))
    ]


@pytest.mark.every(2)
@pytest.mark.parametrize(("dtype", "part"), batches(torch.float32))
def test_agrees_with_eager(dtype: torch.dtype, part: int) -> None:
    check(rows(dtype)[part :: SHARDS[dtype]], dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_a_part_of_the_table_in_other_dtypes(dtype: torch.dtype) -> None:
    check(rows(dtype)[::6], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "part"), batches(torch.bfloat16, torch.int64, torch.bool))
def test_other_dtypes(dtype: torch.dtype, part: int) -> None:
    check(rows(dtype)[part :: SHARDS[dtype]], dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "part"), batches(torch.float64, torch.float16, torch.int32, torch.uint8))
def test_rarer_dtypes(dtype: torch.dtype, part: int) -> None:
    check(rows(dtype)[part :: SHARDS.get(dtype, 4)], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("how", ["stepped", "offset", "turned", "misaligned"])
def test_layouts(how: str, part: int) -> None:
    """Every second element, an odd offset, dimensions in reverse, an address of no alignment."""
    views = ("view", "as_strided")  # the operator itself wants another layout
    check([laid_out(row, how) for row in rows(torch.float32)[part::4] if not row.name.startswith(views)])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_symbolic_sizes(part: int) -> None:
    check([doubled(row) for row in elementwise_rows([torch.float32])[part::4]])
