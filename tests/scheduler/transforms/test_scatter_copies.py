"""Additions that meet on few lines of a GPU's memory go to copies of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.scheduler.transforms import scatter_copies
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned

ROWS, ADDED, WIDTH = 5, 900, 3


def put(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).index_put((rows,), values, accumulate=True)


def scattered(rows: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(ROWS, WIDTH, dtype=values.dtype).scatter_add(0, rows[:, None].expand(-1, WIDTH), values) + 1


def counted(rows: Tensor, _: Tensor) -> Tensor:
    return torch.zeros(ROWS, dtype=torch.int64).index_add(0, rows, torch.ones_like(rows))


def embedded(rows: Tensor, values: Tensor) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(values, rows, ROWS, 1, False).to(torch.bfloat16)


def from_ones(rows: Tensor, values: Tensor) -> Tensor:
    return torch.ones(ROWS, WIDTH, dtype=values.dtype).index_add(0, rows, values)


def repeated(rows: Tensor, values: Tensor) -> Tensor:
    first = torch.zeros(ROWS, WIDTH, dtype=values.dtype).index_add(0, rows, values)
    return first.index_add(0, rows, values.sin())


CASES = {"put": put, "scattered": scattered, "counted": counted, "embedded": embedded, "ones": from_ones, "repeated": repeated}


def copies_in(fn: Callable[..., Tensor], *args: Tensor) -> list[int]:
    """Of each scatter in the plan."""
    sizes = [b.sizes[0].as_int() or 0 for b in _buffers(fn, *args) if len(b.sizes) == 3]
    return sorted(set(sizes))


def _buffers(fn: Callable[..., Tensor], *args: Tensor) -> list[ir.Buffer]:
    plan = planned(fn, *args)
    made = {out for step in plan.kernels for s in step.statements for out in s.outs}
    return [plan.graph.buffers[name] for name in made]


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter_copies, "WORTH", 0)
    torch.manual_seed(0)
    rows, values = torch.randint(0, ROWS, (ADDED,)), torch.rand(ADDED, WIDTH)
    exact = CASES[name](rows, values.double())
    got = compiled(CASES[name], rows, values)
    torch.testing.assert_close(got, exact.to(got.dtype))


@pytest.mark.parametrize(
    ("rows", "columns", "added", "copies"),
    [
        (32, 12, 512 * 512, [64]),  # T5's positions
        (2, 768, 4096, [16]),  # rows lie side by side: an instruction adds to a whole line
        (2, 768, 1024, []),
        (30522, 768, 4096, []),
        (8, 2, 1000, []),
    ],
)
def test_copies_are_as_many_as_pay(rows: int, columns: int, added: int, copies: Sequence[int]) -> None:
    def fn(index: Tensor, values: Tensor) -> Tensor:
        return torch.zeros(rows, columns).index_add(0, index, values)

    assert copies_in(fn, torch.zeros(added, dtype=torch.int64), torch.empty(added, columns)) == copies


def test_only_zeros_that_nobody_else_sees_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter_copies, "WORTH", 0)
    args = torch.zeros(ADDED, dtype=torch.int64), torch.empty(ADDED, WIDTH)
    assert copies_in(put, *args) == [8]
    assert copies_in(from_ones, *args) == []
    assert copies_in(repeated, *args) == []
