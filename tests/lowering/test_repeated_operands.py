"""Matmuls of matrices whose rows, or columns, are all the same: one of them is multiplied, or the other matrix is summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir import nodes as ir
from tests.gpu_graphs import run
from tests.kernels import plans

torch.manual_seed(0)
W = torch.randn(40, 50)


def row(x: Tensor, w: Tensor) -> Tensor:
    return x.expand(64, 40) @ w


def column(x: Tensor, w: Tensor) -> Tensor:
    return w.t() @ x.expand(40, 30)


def number(t: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return t.expand(20, 40) @ w, w.t() @ t.expand(40, 9)


def ones(w: Tensor) -> Tensor:
    return torch.ones(17, 40, dtype=w.dtype) @ w + 1


def batches(x: Tensor, w: Tensor) -> Tensor:
    return torch.bmm(x[:, None].expand(6, 12, 40), w) * 2


def both(s: Tensor, t: Tensor) -> Tensor:
    return s.expand(12, 40) @ t.expand(40, 7)


def loss(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """The gradient of a sum is a matrix of ones."""
    return F.linear(F.gelu(F.linear(x, w)), v).sum()


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "row": (row, (torch.randn(1, 40), W)),
    "column": (column, (torch.randn(40, 1), W)),
    "number": (number, (torch.randn(()), W)),
    "ones": (ones, (W,)),
    "batches": (batches, (torch.randn(6, 40), torch.randn(6, 40, 10))),
    "both": (both, (torch.randn(1, 40), torch.randn(40, 1))),
}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, kind: torch.dtype) -> None:
    fn, args = CASES[name]
    torch._dynamo.reset()
    given = [a.to(kind) for a in args]
    got, want = torch.compile(fn, backend="kgen", fullgraph=True)(*given), fn(*(a.double() for a in given))
    tolerance = 1e-5 if kind is torch.float32 else 1e-2
    torch.testing.assert_close(got, want, rtol=tolerance, atol=10 * tolerance, check_dtype=False)


@pytest.mark.interpret
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name: str) -> None:
    fn, args = CASES[name]
    run(fn, *args)


@pytest.mark.cpu
@pytest.mark.parametrize("sizes", [(0, 4, 5), (3, 0, 5), (3, 4, 0)])
def test_nothing_to_multiply(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    torch._dynamo.reset()
    x, w = torch.randn(1, k), torch.randn(k, n)
    got = torch.compile(lambda x, w: x.expand(m, k) @ w + 1, backend="kgen", fullgraph=True)(x, w)
    torch.testing.assert_close(got, x.expand(m, k) @ w + 1)


@pytest.mark.cpu
def test_sums_of_integers_keep_their_type() -> None:
    torch._dynamo.reset()
    x, w = torch.ones(1, 32, dtype=torch.int8), torch.full((32, 16), 100, dtype=torch.int8)
    got = torch.compile(lambda x, w: torch._int_mm(x.expand(24, 32), w), backend="kgen", fullgraph=True)(x, w)
    torch.testing.assert_close(got, torch.full((24, 16), 3200, dtype=torch.int32))


@pytest.mark.cpu
def test_gradients_of_a_sum() -> None:
    args = [torch.randn(70, 33), torch.randn(45, 33), torch.randn(20, 45)]
    torch._dynamo.reset()
    ours, theirs = ([a.to(kind).detach().requires_grad_() for a in args] for kind in (torch.float32, torch.float64))
    torch.compile(loss, backend="kgen", fullgraph=True)(*ours).backward()
    loss(*theirs).backward()
    for got, want in zip(ours, theirs, strict=True):
        assert got.grad is not None
        torch.testing.assert_close(got.grad.double(), want.grad, rtol=1e-4, atol=1e-4)


def contractions(fn: Callable[..., Any], *args: Tensor) -> list[ir.Contraction]:
    return [node for node in plans(fn, *args).forward.graph.nodes if ir.is_contraction(node)]


@pytest.mark.parametrize("name", ["row", "column", "batches"])
def test_one_of_them_is_multiplied(name: str) -> None:
    fn, args = CASES[name]
    [node] = contractions(fn, *args)
    assert [v.extent.as_int() for v in node.out_vars[-2:]].count(1) == 1


@pytest.mark.parametrize("name", ["number", "ones"])
def test_of_one_number_nothing_is_multiplied(name: str) -> None:
    fn, args = CASES[name]
    assert not contractions(fn, *args)


def test_two_of_four_matmuls_are_left_in_the_gradient_of_a_sum() -> None:
    args = [torch.randn(70, 33), torch.randn(45, 33), torch.randn(20, 45)]
    _, backward = plans(loss, *(a.requires_grad_() for a in args), backward=True).schedules
    assert len([node for node in backward.graph.nodes if ir.is_contraction(node)]) == 2
