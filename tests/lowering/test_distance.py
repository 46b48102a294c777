"""Distances of all pairs of rows on a GPU: which ones kernels compute, and their values and gradients."""

from __future__ import annotations

import math

import pytest
import torch
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower
from kgen.reference.evaluate import evaluate_graph

aten = torch.ops.aten


def rows(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def lowered(fn: object, *args: Tensor, gpu: bool = True) -> ir.Graph:
    return lower(capture(fn, args, "fake"), LoweringContext(gpu_everywhere=gpu))  # type: ignore[arg-type]


def calls(graph: ir.Graph) -> list[ir.Extern]:
    return [node for node in graph.nodes if isinstance(node, ir.Extern)]


@pytest.mark.parametrize("p", [0.0, 1.0, 1.5, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("shapes", [((5, 3), (7, 3)), ((2, 40, 4), (2, 30, 4)), ((2, 1, 6, 1), (3, 4, 1)), ((0, 3), (7, 3))])
def test_values(p: float, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    x, y = (rows(*s) for s in shapes)

    def fn(x: Tensor, y: Tensor) -> Tensor:
        return aten._cdist_forward(x, y, p, 2)

    graph = lowered(fn, x, y)
    assert not calls(graph)
    torch.testing.assert_close(evaluate_graph(graph, [x, y])[0], fn(x, y))


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
def test_gradients(p: float) -> None:
    x, y, grad = rows(2, 40, 4), rows(2, 30, 4), rows(2, 40, 30)
    y[:, 3] = x[:, 5]  # a distance of zero
    distance = aten._cdist_forward(x, y, p, 2)

    def fn(grad: Tensor, x: Tensor, y: Tensor, distance: Tensor) -> Tensor:
        return aten._cdist_backward(grad, x, y, p, distance)

    graph = lowered(fn, grad, x, y, distance)
    assert not calls(graph)
    torch.testing.assert_close(evaluate_graph(graph, [grad, x, y, distance])[0], fn(grad, x, y, distance))


@pytest.mark.parametrize(
    ("p", "mode", "count", "gpu"),
    [(2.0, 1, 5, True), (2.0, None, 26, True), (1.0, None, 5, False)],
    ids=["asked", "many", "cpu"],
)
def test_others_are_calls(p: float, mode: int | None, count: int, gpu: bool) -> None:
    x, y = rows(count, 3), rows(5, 3)
    assert len(calls(lowered(lambda x, y: aten._cdist_forward(x, y, p, mode), x, y, gpu=gpu))) == 1


def test_gradients_of_other_orders_are_calls() -> None:
    x, y, grad = rows(6, 3), rows(5, 3), rows(6, 5)
    fn = lambda g, x, y, d: aten._cdist_backward(g, x, y, 1.5, d)  # noqa: E731
    assert len(calls(lowered(fn, grad, x, y, grad.abs()))) == 1
