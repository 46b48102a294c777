"""Matrices times one vector each, on a GPU: sums in the kernels of what makes the matrices, or reads them beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel
from kgen.lowering.graph import LoweringContext, lower
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options
from kgen.scheduler.schedule import schedule
from tests.op_case import capture, flat

B, D = 260, 64


def decayed(state: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """A step of a delta rule: an old value is removed, a new one written, one read."""
    state = state * torch.exp(rate)[:, None]
    removed = torch.einsum("bvk,bk->bv", state, k)
    state = state + (v - removed)[..., None] * k[:, None]
    return torch.einsum("bvk,bk->bv", state, q), state


def by_columns(state: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor) -> Tensor:
    return torch.einsum("bkv,bk->bv", state * torch.sigmoid(rate)[:, None] + k[..., None] * v[:, None], q)


def read_beside(state: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.bmm(state, q[..., None]), state.square().sum(-1)


def read_alone(state: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor) -> Tensor:
    return torch.bmm(state, q[..., None])


def joined(state: Tensor, k: Tensor, v: Tensor, q: Tensor, rate: Tensor) -> Tensor:
    """A cache with one more key: nothing computes its elements."""
    return torch.bmm(q[:, None], torch.cat([state, k[:, None]], 1).mT)


def arguments(kind: torch.dtype = torch.float32) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(B, D, D, generator=made).to(kind), *(torch.randn(B, D, generator=made).to(kind) for _ in range(4))]


def lowered(fn: Callable[..., Any], args: list[Tensor], gpu: bool = True) -> ir.Graph:
    return lower(capture(fn, tuple(args), "fake"), LoweringContext(gpu_everywhere=gpu))


def contractions(graph: ir.Graph) -> int:
    return sum(ir.is_contraction(node) for node in graph.nodes)


@pytest.mark.parametrize("fn", [decayed, by_columns, read_beside])
def test_states_are_multiplied_where_they_are_made(fn: Callable[..., Any]) -> None:
    args = arguments()
    graph = lowered(fn, args)
    assert contractions(graph) == 0
    for got, want in zip(flat(evaluate_graph(graph, args)), flat(fn(*args)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_step_is_one_kernel() -> None:
    plan = schedule(lowered(decayed, arguments()), Options(gpu_everywhere=True))
    assert [type(step) for step in plan.steps] == [Kernel]


@pytest.mark.parametrize("fn", [read_alone, joined])
def test_what_nobody_computes_stays_a_matmul(fn: Callable[..., Any]) -> None:
    assert contractions(lowered(fn, arguments())) == 1


def test_other_types_small_states_and_cpus() -> None:
    assert contractions(lowered(by_columns, arguments(torch.bfloat16))) == 1
    assert contractions(lowered(by_columns, [one[:3] for one in arguments()])) == 1
    assert contractions(lowered(by_columns, arguments(), gpu=False)) == 1
