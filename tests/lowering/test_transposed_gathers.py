"""Rows of a transposed tensor that are read many times are copied first: else each element is in a sector of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_case import check
from torch import Tensor

from kgen.ir import values as vs
from kgen.ir.nodes import Graph, Pointwise

CHANNELS, POINTS = 16, 40

GATHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda x, rows: x.t()[rows],
    "index of a batch": lambda x, rows: x.view(2, 8, POINTS).transpose(1, 2)[rows % 2, rows],
    "index in front": lambda x, rows: x.t().unflatten(1, (2, 8))[rows, 1:],
    "index_select": lambda x, rows: torch.index_select(x.t(), 0, rows),
    "embedding": lambda x, rows: torch.nn.functional.embedding(rows, x.t()),
    "unsafe_index": lambda x, rows: torch.ops.aten._unsafe_index(x.t(), [rows]),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows of a matrix": lambda x, rows: x.view(POINTS, CHANNELS)[rows],
    "columns": lambda x, rows: x.t()[:, rows % CHANNELS],
    "few rows": lambda x, rows: x.t()[rows[:60]],
    "short rows": lambda x, rows: x.view(4, 5, 32).transpose(1, 2)[:, rows % 32],
    "rows beside each other": lambda x, rows: x[:4].t()[rows],
}


def inputs() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(CHANNELS, POINTS, generator=made), torch.randint(POINTS, (6 * POINTS,), generator=made)]


def copies(graph: Graph) -> list[tuple[int, ...]]:
    return [tuple(v.extent.as_int() or 0 for v in n.vars) for n in graph.nodes[:-1] if isinstance(n, Pointwise)]


@pytest.mark.parametrize("name", GATHERS)
def test_the_rows_are_copied(name: str) -> None:
    assert len(copies(check(GATHERS[name], inputs()))) == 1


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_read_where_they_are(name: str) -> None:
    assert not copies(check(OTHERS[name], inputs()))


def test_several_gathers_read_one_copy() -> None:
    def f(x: Tensor, rows: Tensor) -> Tensor:
        return x.t()[rows] - x.t()[rows.flip(0)]

    assert copies(check(f, inputs())) == [(POINTS, CHANNELS)]


def edges(x: Tensor, rows: Tensor) -> Tensor:
    """Differences of points to others, and the points: as a graph network has them."""
    got = x.transpose(1, 2)[rows % 2, rows]
    return torch.cat([got - x.transpose(1, 2)[0, :1], x.transpose(1, 2)[1, :1].expand_as(got)], 1)


def test_others_read_the_copy_as_well() -> None:
    graph = check(edges, [inputs()[0].view(2, 8, POINTS), inputs()[1]])
    assert copies(graph) == [(2, POINTS, 8)]
    [result] = [n for n in graph.nodes[1:] if isinstance(n, Pointwise)]
    read = {load.attr[0] for load in vs.loads([result.value])}
    assert graph.nodes[0].out in read  # type: ignore[union-attr]
    assert graph.inputs[0] not in read


def test_copies_in_two_orders_of_one_tensor() -> None:
    def f(x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        planes, points = x.permute(1, 2, 0), x.transpose(1, 2)
        first = points[rows % 8, rows]
        return first, planes[rows % 16, rows] - 1, planes[rows[:2] % 16] + 0, points[rows[:2] % 8] + 0

    check(f, [torch.randn(8, 16, POINTS), torch.cat([inputs()[1]] * 20)])


def test_what_is_written_in_between_is_copied_again() -> None:
    def f(x: Tensor, rows: Tensor) -> Tensor:
        x = x + 0
        first = x.t()[rows]
        x.mul_(2)
        return first - x.t()[rows]

    check(f, inputs())
