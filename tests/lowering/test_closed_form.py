"""Index tensors that read no memory become index expressions: mirrored, wrapped and clamped edges."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.lowering.closed_form import fit
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned


def reflected(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2, 1, 4), mode="reflect")


def circular(x: Tensor) -> Tensor:
    return F.pad(x, (3, 2, 1, 4), mode="circular")


def rolled(x: Tensor) -> Tensor:
    return x[..., (torch.arange(x.shape[-1]) + 3) % x.shape[-1]]


@pytest.mark.parametrize(
    "table",
    [
        [0, 0, 0, 0, 1, 1, 2, 2, 3, 3],
        [1, 2, 2, 3, 3, 4, 4, 4, 4, 4],
        [0] * 6 + [1] * 4 + [2] * 2,
        [3, 2, 1, 0, 1, 2, 3, 4, 3, 2],
        [2, 1, 0, 1, 2, 3],
        [0, 1, 2, 3, 2, 1],
        [3, 4, 0, 1, 2, 3, 4, 0, 1],
        [1, 2, 3, 0, 1],
        [0, 2, 3],
        [1, 2, 5, 6],
        [7, 5, 3, 1, 0, 2, 4, 6, 6, 6, 6],
        [5, 0, 9, 9, 3, 7],
    ],
)
def test_tables_are_fitted(table: list[int]) -> None:
    i = ix.var("i", len(table))
    found = fit(tuple(table), i)
    assert found is not None
    assert [int(ix.evaluate(found, lambda _, k=k: k)) for k in range(len(table))] == table


def test_a_table_of_many_runs_is_not_fitted() -> None:
    assert fit((0, 5, 1, 9, 2, 7, 7, 3, 11, 4), ix.var("i", 10)) is None


@pytest.mark.parametrize("fn", [reflected, rolled], ids=["reflected", "rolled"])
def test_an_edge_is_no_index_from_data(fn: Callable[[Tensor], Tensor]) -> None:
    [kernel] = planned(fn, torch.empty(2, 64, 96, 128), gpu=True).kernels
    [statement] = kernel.statements
    assert not any(ix.indirects(e) for load in vs.loads([statement.value]) for e in load.attr[1])


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [reflected, circular, rolled], ids=["reflected", "circular", "rolled"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_values(fn: Callable[[Tensor], Tensor], channels_last: bool) -> None:
    x = torch.randn(2, 8, 9, 11)
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    assert torch.equal(compiled(fn, x), fn(x))
