"""Gradients of ReLU that a norm's gradient reads: computed in each of its kernels, or stored for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.lowering import LoweringContext, graph, lower
from kgen.reference.evaluate import evaluate_graph
from tests.op_case import capture, flat

Function = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


@pytest.fixture(autouse=True)
def little_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "LARGE", 64)


def of_norm(off: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    masked = torch.where(off, 0.0, grad)
    return masked - x * (masked * x).sum(0) - masked.sum(0), masked.sum(0)


def of_norm_and_residual(off: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    masked = torch.where(off, 0.0, grad)
    return masked - x * (masked * x).sum(0), masked.sum(0), masked.t() + 1


def of_two_numbers(off: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    masked = torch.where(off, x, grad)
    return masked - x * (masked * x).sum(0), masked.sum(0)


def given_away(off: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    masked = torch.where(off, 0.0, grad)
    return masked - x * (masked * x).sum(0), masked.sum(0), masked


def multiplied(off: Tensor, grad: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    masked = torch.where(off, 0.0, grad)
    return masked @ x.t(), masked.sum(0), masked - masked.sum(0)


def is_stored(fn: Function, dtype: torch.dtype) -> bool:
    """Whether a choice is a node of its own, in a graph for a GPU whose results are checked."""
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(32, 16, generator=generator).to(dtype) for _ in range(2)]
    args.insert(0, torch.rand(32, 16, generator=generator) < 0.5)
    made = lower(capture(fn, tuple(args), "fake"), LoweringContext(gpu_everywhere=True))
    for got, want in zip(flat(evaluate_graph(made, args)), flat(fn(*args)), strict=True):
        torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    return any(isinstance(node, ir.Pointwise) and node.value.op == "where" for node in made.nodes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_computed_again(dtype: torch.dtype) -> None:
    assert not is_stored(of_norm, dtype)


@pytest.mark.parametrize("fn", [of_norm_and_residual, of_two_numbers, given_away, multiplied])
def test_they_are_stored(fn: Function) -> None:
    """For a third kernel, where two numbers are read for each, and where they are in memory anyway."""
    assert is_stored(fn, torch.bfloat16)


def test_what_the_graph_gives_away_is_stored() -> None:
    assert is_stored(given_away, torch.float32)
