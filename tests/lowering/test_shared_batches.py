"""Matmuls of batches whose matrices on one side are all the same: one of them is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from tests.gpu_graphs import run
from tests.kernels import plans

torch.manual_seed(0)
X = torch.randn(4, 6, 40, 33)


def left(w: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return torch.sigmoid(w * s) @ x


def right(w: Tensor, s: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(x.transpose(2, 3).flatten(0, 1), torch.sigmoid(w * s).expand(24, 40, 40))


def both_ways(w: Tensor, s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """One matrix for two matmuls, in both orders."""
    made = (w * s).exp()
    return made @ x, made.t() @ (x + 1)


def apart(w: Tensor, s: Tensor, x: Tensor) -> Tensor:
    """Each batch has a matrix of its own."""
    return torch.sigmoid(w * s[:6, None, None] * x[:1, :, :, :1]) @ x[0]


CASES: dict[str, Callable[..., Any]] = {"left": left, "right": right, "both ways": both_ways, "apart": apart}


def given(kind: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(t.to(kind) for t in (torch.linspace(-1, 1, 1600).view(40, 40), torch.linspace(0, 2, 40), X))


def results(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, kind: torch.dtype) -> None:
    fn, args = CASES[name], given(kind)
    torch._dynamo.reset()
    got, want = torch.compile(fn, backend="kgen", fullgraph=True)(*args), fn(*(a.double() for a in args))
    tolerance = 1e-5 if kind is torch.float32 else 2e-2
    for one, other in zip(results(got), results(want), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=20 * tolerance)


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    run(CASES[name], *given(torch.float32))


@pytest.mark.cpu
def test_gradients() -> None:
    torch._dynamo.reset()
    ours, theirs = ([a.detach().clone().requires_grad_() for a in given(kind)] for kind in (torch.float32, torch.float64))
    torch.compile(left, backend="kgen", fullgraph=True)(*ours).square().sum().backward()
    left(*theirs).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", ["left", "right", "both ways"])
def test_one_matrix_is_stored(name: str) -> None:
    """As many elements as one matrix has, in what is stored for a call."""
    graph = plans(CASES[name], *given(torch.float32)).forward.graph
    made = [out for node in graph.nodes if isinstance(node, ir.Pointwise) for out in ir.outs(node)]
    counts = [size for out in made if (size := _elements(graph.buffers[out])) % 1600 == 0]
    assert counts
    assert all(size == 1600 for size in counts)


def _elements(buffer: ir.Buffer) -> int:
    count = 1
    for size in buffer.sizes:
        count *= size.as_int() or 0
    return count
