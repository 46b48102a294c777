"""What is gathered for many batches of a contraction's elements is stored first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options
from kgen.scheduler.transforms import stored_gathers
from kgen.scheduler.transforms.stored_gathers import StoredGathers
from tests.op_case import lowered

WINDOWS = 64


def biased(q: Tensor, k: Tensor, table: Tensor, index: Tensor) -> Tensor:
    return q @ k.mT + table[index].permute(2, 0, 1)


def inputs(windows: int = WINDOWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, table = (torch.randn(*shape, generator=generator) for shape in ((windows, 2, 9, 4), (windows, 2, 9, 4), (17, 2)))
    return [q, k, table, torch.arange(9)[:, None] - torch.arange(9) + 8]


def prepared(function: Callable[..., Tensor], args: list[Tensor]) -> ir.Graph:
    graph = lowered(function, args)
    StoredGathers().prepare(graph, Options(gpu_everywhere=True))
    return graph


def gathering(graph: ir.Graph) -> list[tuple[ir.Expr, ...]]:
    """The sizes of what is gathered by elementwise nodes."""
    nodes = [node for node in graph.nodes if isinstance(node, ir.Pointwise)]
    found = [n for n in nodes if any(ix.indirects(e) for load in vs.loads([n.value]) for e in load.attr[1])]
    return [tuple(v.extent.as_int() for v in node.vars) for node in found]


def test_a_bias_of_many_windows_is_stored(monkeypatch) -> None:
    monkeypatch.setattr(stored_gathers, "WORTH", WINDOWS * 2 * 81)
    graph = prepared(biased, inputs())
    assert gathering(graph) == [(2, 9, 9)]
    [got] = evaluate_graph(graph, inputs())
    torch.testing.assert_close(got, biased(*inputs()))


def test_a_bias_of_few_windows_or_of_few_elements_is_not(monkeypatch) -> None:
    assert gathering(prepared(biased, inputs())) == [(WINDOWS, 2, 9, 9)]
    monkeypatch.setattr(stored_gathers, "WORTH", 1)
    assert gathering(prepared(biased, inputs(16))) == [(16, 2, 9, 9)]


def test_what_each_batch_gathers_of_its_own_is_not(monkeypatch) -> None:
    monkeypatch.setattr(stored_gathers, "WORTH", 1)

    def function(q: Tensor, k: Tensor, table: Tensor, index: Tensor) -> Tensor:
        return q @ k.mT + table[index + torch.arange(q.shape[0])[:, None, None] % 1].permute(0, 3, 1, 2)

    graph = prepared(function, inputs())
    assert all(sizes[0] == WINDOWS for sizes in gathering(graph))
