"""16-bit numbers to which much is added are summed up in float32, and rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.lowering import scatter
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import indices
from tests.matmuls import compiled

ROWS, ADDED, WIDTH = 5, 900, 3


def put(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).index_put((rows,), values, accumulate=True)


def added(rows: Tensor, values: Tensor) -> Tensor:
    return torch.ones(ROWS, WIDTH, dtype=values.dtype).index_add(0, rows, values)


def scattered(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).scatter_add(0, rows[:, None].expand(-1, WIDTH), values)


@pytest.mark.interpret
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [put, added, scattered])
def test_sums_are_rounded_once(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows, values = torch.randint(0, ROWS, (ADDED,)), torch.rand(ADDED, WIDTH).to(dtype)
    exact = fn(rows, values.double())
    got = compiled(fn, rows, values)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps).all()


def test_what_is_changed_in_place_keeps_its_type() -> None:
    base, rows, values = torch.zeros(ROWS, WIDTH).bfloat16(), torch.arange(ROWS), torch.randn(ROWS, WIDTH).bfloat16()
    want = base.clone().index_put_((rows,), values, accumulate=True)
    compiled(lambda b, r, v: b.index_put_((r,), v, accumulate=True), base, rows, values)
    torch.testing.assert_close(base, want)


def counted(rows: Tensor, _: Tensor) -> Tensor:
    return torch.zeros(ROWS, dtype=torch.int64).index_add(0, rows, torch.ones_like(rows))


def averaged(rows: Tensor, values: Tensor) -> Tensor:
    return torch.full((ROWS, WIDTH), 2.0, dtype=values.dtype).index_add(0, rows, values, alpha=0.5)


def embedded(rows: Tensor, values: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(values, rows, ROWS, 1, False)


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [put, scattered, averaged, counted, embedded])
def test_what_meets_on_few_lines_goes_to_copies_on_a_gpu(fn: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def noted(*given: Any) -> int:
        made.append(real(*given))
        return made[-1]

    real = scatter._copies
    monkeypatch.setattr(scatter, "_copies", noted)
    monkeypatch.setattr(scatter, "WORTH", 0)
    torch.manual_seed(0)
    rows, values = torch.randint(0, ROWS, (ADDED,)), torch.rand(ADDED, WIDTH)
    exact = fn(rows, values.double())
    got = compiled(fn, rows, values)
    torch.testing.assert_close(got, exact.to(got.dtype))
    assert set(made) == {8}


def test_copies_are_as_many_as_pay() -> None:
    def copies(sizes: Sequence[int], added: Sequence[int], direct: int) -> int:
        """Of a table of such sizes, to which rows are added whose last `direct` loops are the table's."""
        shape, loops = ([ix.as_expr(s) for s in given] for given in (sizes, added))
        b = Builder("graph")
        b.gpu_everywhere = True
        base = scatter.full(b, tuple(shape), torch.float32, torch.device("cpu"), 0)
        own = indices(loops)[len(loops) - direct :]
        where = [ix.ZERO] * (len(sizes) - direct) + list(own)
        return scatter._copies(b, base, scatter.Write(tuple(loops), where, vs.const(1, torch.float32)))

    assert copies((32, 12), (512, 512, 12), 1) == 64  # T5's positions
    assert copies((2, 768), (4096, 768), 1) == 16  # rows lie side by side: an instruction adds to a whole line
    assert copies((2, 768), (1024, 768), 1) == 1
    assert copies((30522, 768), (4096, 768), 1) == 1
    assert copies((10,), (100_000,), 0) == 128
    assert copies((10,), (1000,), 0) == 1
    assert copies((64, 64), (64, 64), 2) == 1  # no two points meet
