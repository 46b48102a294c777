"""Matmuls of a loop's iterations that need nobody's results, as one in front of the loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

import kgen
from kgen.capture import hoisting
from kgen.capture.hoisting import MATMULS, hoist_matmuls

T = 6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rnn(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1:])
    for t in range(T):
        h = torch.tanh(x[t] @ w + h @ u)
    return h


def gates(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """What is split, and written into a tensor from in front of the loop."""
    out, h = torch.zeros_like(x), x[0]
    for t in range(T):
        a, b = torch.cat((x[t] * 2 @ w, h @ u), 1).chunk(2, 1)
        h = torch.sigmoid(a) * torch.tanh(b)
        out[t] = h
    return out


def both_ways(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    there = back = torch.zeros_like(x[0])
    for t in range(T):
        there = torch.tanh(torch.nn.functional.linear(x[t], w) + there @ u)
    for t in reversed(range(T)):
        back = torch.tanh(x[t].matmul(w) - back @ u)
    return there + back


def added_in_place(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """The result of a matmul is written into: it stays where it is."""
    h = x[0]
    for t in range(T):
        g = x[t] @ w
        g += h @ u
        h = torch.tanh(g)
    return h


def inputs_change(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """An iteration writes what the next one multiplies."""
    x, h = x.clone(), x[0]
    for t in range(T - 1):
        h = torch.tanh(x[t] @ w + h @ u)
        x[t + 1] = x[t + 1] + h
    return h


def weights_change(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    w, h = w.clone(), x[0]
    for t in range(T):
        h = torch.tanh(x[t] @ w + h @ u)
        w.mul_(0.5)
    return h


def hoisted(f: Callable[..., Any], gradients: bool) -> tuple[int, int]:
    """How many matmuls the graph had, and has; results and gradients are those of eager."""
    counts: list[int] = []

    def backend(gm: GraphModule, _inputs: Any) -> Any:
        counts.append(sum(node.target in MATMULS for node in gm.graph.nodes))
        verdicts = hoist_matmuls(gm)
        assert all("in front of the loop" in one.detail for one in verdicts)
        names = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
        counts.append(sum("matmul" in name or "linear" in name or ".mm" in name or ".bmm" in name for name in names))
        return gm.forward

    args = [torch.randn(size, dtype=torch.float64).mul_(0.5).requires_grad_(gradients) for size in ((T, 3, 4), (4, 4), (4, 4))]
    got, want = torch.compile(f, backend=backend, fullgraph=True)(*args), f(*args)
    torch.testing.assert_close(got, want)
    if gradients:
        torch.testing.assert_close(torch.autograd.grad(got.sum(), args), torch.autograd.grad(want.sum(), args))
    return counts[0], counts[1]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("f", [rnn, gates, both_ways], ids=lambda f: f.__name__)
def test_matmuls_of_the_inputs_are_one(f: Callable[..., Any], gradients: bool) -> None:
    before, after = hoisted(f, gradients)
    loops = before // (2 * T)
    assert after <= loops * (T + 2)


@pytest.mark.parametrize("f", [added_in_place, inputs_change, weights_change], ids=lambda f: f.__name__)
def test_matmuls_that_stay(f: Callable[..., Any]) -> None:
    hoisted(f, gradients=False)


def test_small_matrices_of_a_gpu_are_read_in_each_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hoisting.LARGE["cuda"] > 128 * 128
    monkeypatch.setattr(hoisting, "LARGE", {"cpu": 17})
    before, after = hoisted(rnn, gradients=False)
    assert after == before
    monkeypatch.setattr(hoisting, "LARGE", {"cpu": 16})
    assert hoisted(rnn, gradients=False)[1] < before


@pytest.mark.cpu
def test_through_kgen() -> None:
    args = [torch.randn(size) * 0.5 for size in ((T, 3, 4), (4, 4), (4, 4))]
    want = gates(*(arg.double() for arg in args))
    for option in (True, False):
        torch._dynamo.reset()
        got = torch.compile(gates, backend="kgen", fullgraph=True, options={"loop_batching": option})(*args)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert "in front of the loop" in " ".join(str(kgen.explain(gates, *args, print_report=False)).split())
