"""Bags of as many rows each are kernels; deterministic programs add up in the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from op_case import capture
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options, schedule

TABLE = torch.randn(40, 12)
IDS = torch.randint(40, (6, 5))


def graph_of(f: Callable[..., Any], *args: Any, **context: Any) -> ir.Graph:
    return lower(reinplace(capture(f, args, "fake")), LoweringContext(**context))


def calls(graph: ir.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if isinstance(node, ir.Extern)]


def check(f: Callable[..., Tensor], *args: Tensor) -> None:
    graph = graph_of(f, *args)
    assert not calls(graph)
    [got] = evaluate_graph(graph, list(args))
    torch.testing.assert_close(got, f(*args))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes(mode: str, dtype: torch.dtype) -> None:
    check(lambda table, ids: F.embedding_bag(ids, table, mode=mode), TABLE.to(dtype), IDS)


def test_weights_of_rows() -> None:
    check(lambda table, ids, w: F.embedding_bag(ids, table, mode="sum", per_sample_weights=w), TABLE, IDS, torch.rand(6, 5))


def test_one_row() -> None:
    check(lambda table, ids: F.embedding_bag(ids, table, mode="mean"), TABLE, IDS[:, :1])


def test_one_kernel_on_a_gpu() -> None:
    graph = graph_of(lambda table, ids: F.embedding_bag(ids, table, mode="mean"), TABLE, IDS, gpu_everywhere=True)
    plan = schedule(graph, Options(gpu_everywhere=True))
    assert (len(plan.kernels), plan.calls) == (1, [])


@pytest.mark.parametrize(
    "f",
    [
        lambda table, ids: F.embedding_bag(ids.flatten(), table, torch.tensor([0, 3, 10]), mode="sum"),
        lambda table, ids: F.embedding_bag(ids, table, mode="sum", padding_idx=3),
    ],
    ids=["lengths", "padding"],
)
def test_other_bags_are_the_librarys(f: Callable[..., Tensor]) -> None:
    assert calls(graph_of(f, TABLE, IDS)) == ["aten._embedding_bag_forward_only.default"]


@pytest.mark.parametrize(("dtype", "mine"), [(torch.float32, False), (torch.int64, True)])
def test_deterministic_programs_have_no_atomic_additions_of_floats(dtype: torch.dtype, mine: bool) -> None:
    def add(base: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
        return base.index_add(0, ids, rows)

    args = torch.zeros(8, 4, dtype=dtype), torch.randint(8, (20,)), torch.ones(20, 4, dtype=dtype)
    assert not calls(graph_of(add, *args, gpu_everywhere=True))
    assert not calls(graph_of(add, *args, deterministic=True)), "a CPU adds in order"
    found = calls(graph_of(add, *args, gpu_everywhere=True, deterministic=True))
    assert found == ([] if mine else ["aten.index_put.default"])


@pytest.mark.cpu
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("ids", [torch.tensor([[2]]), torch.tensor([[2], [0]])], ids=["one", "two"])
def test_gradients_of_single_rows_in_bfloat16(mode: str, ids: Tensor) -> None:
    """Tracing says that the library saves as many numbers as there are ids; it saves none."""
    table = torch.randn(5, 3, dtype=torch.bfloat16, requires_grad=True)

    def bags(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, mode=mode) * 2

    found = torch.compile(bags, backend="kgen", fullgraph=True)(table, ids)
    assert torch.equal(found, bags(table, ids))
    assert torch.equal(*(torch.autograd.grad(result.sum(), table)[0] for result in (found, bags(table, ids))))
