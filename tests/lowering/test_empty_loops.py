"""Tensors of no elements: their loops do nothing, and code in front of the loops reads nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen import backend
from kgen.ir import nodes as ir
from tests.op_case import lowered
from tests.opinfo import evaluated

Outcome = tuple[Tensor, ...]


def reductions(x: Tensor, w: Tensor) -> Outcome:
    """The sum of columns shares a kernel with that of the softmax; what it reads is at no address."""
    return (x @ w).softmax(-1), x.reshape(-1, 2).sum(0), x.reshape(-1, 3).prod(0), x.mean()


def others(x: Tensor, w: Tensor) -> Outcome:
    flags = x.reshape(-1, 3) > 0
    return flags.any(0), flags.all(0), x.var(0, unbiased=False), x.cumsum(1), x.cummax(0)[1], (x.sum(1) + 1) * 2, w.sum(0)


def writes(x: Tensor, w: Tensor) -> Outcome:
    """Rows that a call writes, of which there are none."""
    w = w.clone()
    w[: x.shape[0]] = x.reshape(-1, 6)[:, :4] + 1
    w.index_add_(0, torch.arange(x.shape[0]), x[:, 2:])
    return w, w.scatter_add(0, torch.zeros(x.shape[0], 4, dtype=torch.int64), x[:, :4])


def last_column(x: Tensor, w: Tensor) -> Outcome:
    """The last step of a factorisation writes what is below the diagonal: nothing, through a view of a view."""
    w = w.clone()
    w[0, 0] = x.sum()
    w[6:, 3] = w[6:, :3] @ w[0, :3]
    return (w,)


PROGRAMS = [reductions, others, writes, last_column]


def check(program: Callable[..., Outcome], dynamic: bool) -> None:
    """At a few sizes, of which the last is none at all."""
    compiled = torch.compile(program, backend="kgen", dynamic=dynamic)
    w = torch.randn(6, 4)
    for n in (3, 0) if dynamic else (0,):
        x = torch.randn(n, 6)
        for ours, eager in zip(compiled(x, w), program(x, w), strict=True):
            torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("program", PROGRAMS)
def test_evaluated(program: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "STAGES", evaluated.STAGES)
    check(program, dynamic=False)


@pytest.mark.cpu
@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled(program: Callable[..., Outcome], dynamic: bool) -> None:
    check(program, dynamic)


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_is_read(program: Callable[..., Outcome]) -> None:
    """No body loads from the tensor without elements."""
    x, w = torch.randn(0, 6), torch.randn(6, 4)
    graph = lowered(program, (x, w))
    empty = {name for name, buffer in graph.buffers.items() if any(size == 0 for size in buffer.sizes)}
    read = {name for node in graph.nodes if isinstance(node, ir.Pointwise | ir.Reduction) for name in ir.reads(node)}
    assert empty
    assert not read & empty
