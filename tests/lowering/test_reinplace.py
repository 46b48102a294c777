"""Writes into graph inputs go straight to their storage, and never where somebody still reads the old contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_case import capture, check, lowered, tensor

from kgen import lowering, pipeline
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.reference.evaluate import evaluate_graph

F32 = torch.float32


def written(graph: ir.Graph) -> int:
    """Elements that the graph's loops store."""
    total = 0
    for node in graph.nodes:
        if isinstance(node, ir.Pointwise | ir.Scatter):
            extent = ix.product(v.extent for v in node.vars).as_int()
            assert extent is not None
            total += extent
    return total


def row(x: Any, v: Any) -> Any:
    x[1] = v
    return v + 1


def row_only(x: Any, v: Any) -> None:
    x[1] = v


def row_add(x: Any, v: Any) -> None:
    x[1] += v


def block(x: Any, v: Any) -> None:
    x[1:3, 2] = v[:2]


def through_view(x: Any, v: Any) -> None:
    x.view(2, 3, 8)[1, 2] = v


def through_turned_view(x: Any, v: Any) -> None:
    x.t()[:, 3] = v


def indexed(x: Any, v: Any) -> None:
    x[torch.tensor([4, 0])] = v


def indexed_in_slice(x: Any, v: Any) -> None:
    x[1:5][torch.tensor([3, 0])] = v


def diagonal(x: Any, v: Any) -> None:
    x.diagonal().copy_(v[:6])


def many_rows(x: Any, v: Any) -> None:
    for k in range(5):
        x[k] = v * k


def filled(x: Any, v: Any) -> None:
    x[2].fill_(3.0)


def added(x: Any, v: Any) -> None:
    x.index_add_(0, torch.tensor([0, 0]), torch.stack([v, v]))


WRITES = [
    (row_only, 8),
    (row_add, 8),
    (block, 2),
    (through_view, 8),
    (through_turned_view, 8),
    (indexed, 16),
    (indexed_in_slice, 16),
    (diagonal, 6),
    (many_rows, 40),
    (filled, 8),
    (added, 16),
]


@pytest.mark.parametrize(("fn", "elements"), WRITES, ids=lambda p: getattr(p, "__name__", str(p)))
def test_only_what_changes_is_written(fn: Callable[..., Any], elements: int) -> None:
    graph = check(fn, [tensor(F32, 6, 8), tensor(F32, 8)])
    assert written(graph) <= elements + (2 if fn in (indexed, indexed_in_slice) else 0)


def shifted(x: Any, v: Any) -> None:
    x[1:] = x[:-1] + 1


def reversed_rows(x: Any, v: Any) -> None:
    x[:3] = x.flip(0)[:3]


def turned(x: Any, v: Any) -> None:
    x[:, :6].copy_(x[:, :6].t().clone())


def old_value_returned(x: Any, v: Any) -> Any:
    y = x.clone()
    x[0] = v
    return y


def old_value_used(x: Any, v: Any) -> Any:
    y = x * 2 + 1
    x[0] = v
    return y + x


def old_row_used(x: Any, v: Any) -> Any:
    y = x[0].clone()
    x[0] = v
    return y


def gathered_from_itself(x: Any, v: Any) -> None:
    x[torch.tensor([0, 1])] = x[torch.tensor([1, 0])]


def swapped(x: Any, v: Any) -> None:
    y = x[0].clone()
    x[0] = x[1]
    x[1] = y


def everything(x: Any, v: Any) -> Any:
    x.mul_(2)
    z = x + 1
    x[2] = z[0]
    x.add_(v)
    return z


def two_results(x: Any, v: Any) -> Any:
    a = x.index_fill(0, torch.tensor([1]), 5.0)
    b = a.select_scatter(v, 0, 0)
    return a, b


def clone_written(x: Any, v: Any) -> Any:
    y = x.clone()
    y[0] = v
    return y, x + 1


def intermediate(x: Any, v: Any) -> Any:
    y = x.exp()
    for k in range(4):
        y[k] = v
    return y.sum(0)


def view_of_intermediate_later(x: Any, v: Any) -> Any:
    y = (x * 2).exp()
    top = y[0] + 1
    y[0] = v
    return top * y[0], y


def constant(x: Any, v: Any) -> Any:
    c = torch.arange(8.0)
    c[torch.tensor([1])] = v[0]
    return c


def whole(x: Any, v: Any) -> None:
    x.copy_(x.flip(0) + v)


READERS = [
    row,
    shifted,
    reversed_rows,
    turned,
    old_value_returned,
    old_value_used,
    old_row_used,
    gathered_from_itself,
    swapped,
    everything,
    two_results,
    clone_written,
    intermediate,
    view_of_intermediate_later,
    constant,
    whole,
]


@pytest.mark.parametrize("fn", READERS, ids=lambda f: f.__name__)
def test_old_contents_survive_while_read(fn: Callable[..., Any]) -> None:
    check(fn, [tensor(F32, 6, 8), tensor(F32, 8)])


def test_symbolic() -> None:
    graph = check(row_add, [tensor(F32, 6, 8), tensor(F32, 8)], "symbolic")
    assert [type(n) for n in graph.nodes] == [ir.Scatter]


def test_many_writes_stay_linear() -> None:
    def rows(x: Any, v: Any) -> None:
        for k in range(64):
            x[k] = v

    graph = check(rows, [tensor(F32, 64, 4), tensor(F32, 4)])
    assert written(graph) == 256


def cloned(x: Any, v: Any) -> Any:
    return x.clone()


def result_and_clone(x: Any, v: Any) -> Any:
    y = x.flip(0).cumsum(0)
    return y, y.clone()


def computed_then_copied(x: Any, v: Any) -> Any:
    y = x.index_fill(0, torch.tensor([1]), 5.0)
    x.copy_(y)
    return y


def constant_result(x: Any, v: Any) -> Any:
    return torch.tensor([1.0, 2.0])


@pytest.mark.parametrize("fn", [cloned, result_and_clone, computed_then_copied, constant_result], ids=lambda f: f.__name__)
def test_results_share_no_storage_that_eager_does_not_share(fn: Callable[..., Any]) -> None:
    x, v = tensor(F32, 6, 8), tensor(F32, 8)
    graph = lowered(fn, [x, v])
    results = [r for r in evaluate_graph(graph, [x, v]) if isinstance(r, torch.Tensor)]
    storages = [t.untyped_storage().data_ptr() for t in (*results, x, v, *graph.constants.values())]
    assert len(set(storages)) == len(storages)


def repeated(x: Any, v: Any) -> Any:
    return (x.exp() + v, x.exp() * v)


def sparse_gradient(x: Any, v: Any) -> Any:
    return x.mm(x.t()) + torch.ops.aten.embedding_dense_backward.default(v, torch.tensor([0, 2]), 6, -1, False)


@pytest.mark.parametrize("fn", [row, row_add, block, indexed, repeated, sparse_gradient], ids=lambda fn: fn.__name__)
def test_the_stage_sees_a_graph_that_writes_or_repeats(fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    v = torch.rand(2, 6) if fn is sparse_gradient else torch.rand(4)
    assert stage_sees(fn, (torch.rand(6, 4), v), monkeypatch)


def test_the_stage_is_left_out_where_it_has_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stage_sees(lambda x, v: (x.exp() + v).relu()[1:], (torch.rand(6, 4), torch.rand(4)), monkeypatch)


def stage_sees(fn: Callable[..., Any], inputs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> bool:
    seen: list[Any] = []
    monkeypatch.setattr(lowering, "reinplace", lambda gm: seen.append(gm) or gm)
    gm = capture(fn, inputs, "real", functionalize=True)
    pipeline.reinplace(gm, GraphInfo("graph", "inference", frozenset(), frozenset()), Config())
    return bool(seen)
