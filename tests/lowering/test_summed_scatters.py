"""Sums of tables of zeros to which something was added: which ones are made without the table, and that results stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph

X, AT = torch.randn(5, 30, 4, dtype=torch.float64), torch.randint(0, 9, (5, 30, 4))


def graph_of(f: Callable[..., Any], *args: Any, gpu: bool = True) -> ir.Graph:
    return lower(reinplace(capture(f, args, "fake")), LoweringContext(gpu_everywhere=gpu))


def of_expanded_rows(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x * 2).sum(1)


def kept_dimension(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x).sum(1, keepdim=True) + 1


def added_rows(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).index_add(2, at[0, 0], x).sum(1)


@pytest.mark.parametrize("fn", [of_expanded_rows, kept_dimension, added_rows])
def test_no_table_is_made(fn: Callable[..., Tensor]) -> None:
    graph = graph_of(fn, X, AT)
    assert not any(isinstance(node, ir.Reduction) for node in graph.nodes)
    assert all((size.as_int() or 0) != 30 for name, b in graph.buffers.items() if b.kind == "intermediate" for size in b.sizes)
    [got] = evaluate_graph(graph, [X, AT])
    torch.testing.assert_close(got, fn(X, AT))


def over_the_index(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x).sum(2)


def result_too(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x)
    return table.sum(1), table


def read_again(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    table = torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x)
    return table.sum(1), table.amax(1)


def to_ones(x: Tensor, at: Tensor) -> Tensor:
    return torch.ones(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x).sum(1)


def squared(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).scatter_add(2, at, x).square().sum(1)


def largest(x: Tensor, at: Tensor) -> Tensor:
    return torch.zeros(5, 30, 9, dtype=x.dtype).scatter_reduce(2, at, x, "amax").sum(1)


def one_number(x: Tensor, at: Tensor) -> Tensor:
    """Hundreds of additions to each element would wait for each other."""
    return torch.zeros(5, 30, 4, 9, dtype=x.dtype).index_add(3, at[0, 0, :1], x[..., None]).sum((0, 1, 2))


@pytest.mark.parametrize("fn", [over_the_index, result_too, read_again, to_ones, squared, largest, one_number])
def test_other_tables_are_made(fn: Callable[..., Any]) -> None:
    graph, want = graph_of(fn, X, AT), fn(X, AT)
    assert any(isinstance(node, ir.Reduction) for node in graph.nodes)
    torch.testing.assert_close(tuple(evaluate_graph(graph, [X, AT])), want if isinstance(want, tuple) else (want,))


def test_a_cpu_adds_in_order() -> None:
    assert any(isinstance(node, ir.Reduction) for node in graph_of(of_expanded_rows, X, AT, gpu=False).nodes)
