"""A softmax with one column more than are multiplied becomes one without it, and a number for each row of the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.capture.sink_column import take_sinks_apart
from tests.attention_gradients import r
from tests.capture.test_weighted_sums import graph_of, matmuls

LENGTH, HEAD = 48, 8


def scores(q: Tensor, k: Tensor) -> Tensor:
    rows = torch.arange(LENGTH)
    return (q @ k.mT).masked_fill(rows > rows[:, None], -math.inf)


def behind(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1).softmax(-1)[..., :-1] @ v


def in_front(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((sink.expand(3, LENGTH, 1), scores(q, k)), -1).softmax(-1)[..., 1:] @ v


def of_each_row(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink * q[..., :1]), -1).softmax(-1)[..., :LENGTH] @ v


def without_maximum(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """As GPT-OSS has it."""
    all_ = torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1)
    return (all_ - all_.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def without_largest(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    all_ = torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1)
    return (all_ - all_.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def rows_without_scores(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    masked = scores(q, k).masked_fill((torch.arange(LENGTH) < 5)[:, None], -math.inf)
    return torch.cat((masked, sink.expand(3, LENGTH, 1)), -1).softmax(-1)[..., :-1] @ v


TAKEN = (behind, in_front, of_each_row, without_maximum, without_largest, rows_without_scores)


def two_columns(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, LENGTH, 2)), -1).softmax(-1)[..., :-2] @ v


def with_a_value(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1).softmax(-1) @ torch.cat((v, v[:, :1]), 1)


def fewer_columns(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1).softmax(-1)[..., 1:-1] @ v[:, 1:]


def not_multiplied(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1).softmax(-1)[..., :-1].sum(-1) + v.sum(-1)


def joined_along_rows(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    return torch.cat((scores(q, k), sink.expand(3, 1, LENGTH)), 1).softmax(-1)[:, :-1] @ v


def with_their_log_sum_exp(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp is that of the scores without their maximum."""
    z = torch.cat((scores(q, k), sink.expand(3, LENGTH, 1)), -1)
    z = z - z.amax(-1, keepdim=True)
    top = z.amax(-1, keepdim=True)
    e = (z - top).exp()
    total = e.sum(-1, keepdim=True)
    return (e / total)[..., :-1] @ v, torch.where(top.isinf(), top, top + total.log())


def arguments() -> list[Tensor]:
    return [*(r(3, LENGTH, HEAD, seed=k) for k in range(3)), r(3, 1, 1, seed=3)]


@pytest.mark.parametrize("fn", TAKEN)
def test_the_column_goes(fn: Callable[..., Tensor]) -> None:
    args = arguments()
    gm = graph_of(fn, *args)
    made = take_sinks_apart(gm, lambda *_: True)
    assert not any(node.target is torch.ops.aten.cat.default for node in made.graph.nodes)
    [got] = made(*args) if isinstance(made(*args), list | tuple) else [made(*args)]
    torch.testing.assert_close(got.double(), fn(*(a.double() for a in args)), rtol=1e-5, atol=1e-5)
    assert matmuls(made) == 2


@pytest.mark.parametrize(
    "fn", [two_columns, with_a_value, fewer_columns, not_multiplied, joined_along_rows, with_their_log_sum_exp]
)
def test_what_is_left(fn: Callable[..., Any]) -> None:
    gm = graph_of(fn, *arguments())
    before = [str(node) for node in gm.graph.nodes]
    take_sinks_apart(gm, lambda *_: True)
    assert [str(node) for node in gm.graph.nodes] == before


def test_where_templates_take_none_it_stays() -> None:
    gm = graph_of(behind, *arguments())
    before = [str(node) for node in gm.graph.nodes]
    assert [str(node) for node in take_sinks_apart(gm, lambda *_: False).graph.nodes] == before


@pytest.mark.cpu
@pytest.mark.parametrize("fn", [behind, without_maximum])
def test_inference_is_attention_and_a_number_for_each_row(fn: Callable[..., Tensor]) -> None:
    """In the default mode. Rounded as eager rounds, the column stays."""
    args = arguments()
    torch._dynamo.reset()
    with torch.no_grad(), kgen.config.override(cache=False):
        report = kgen.explain(fn, *args, print_report=False)
        got = torch.compile(fn, backend="kgen")(*args)
        with kgen.config.override(numerics="eager"):
            exact = kgen.explain(fn, *args, print_report=False)
    assert sum("attention<" in one.source for one in report.kernels) == 1
    assert len(report.kernels) == 2
    assert not any("attention<" in one.source for one in exact.kernels)
    torch.testing.assert_close(got, fn(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.cpu
@pytest.mark.parametrize("fn", [behind, of_each_row, rows_without_scores])
def test_gradients_are_right(fn: Callable[..., Tensor]) -> None:
    """Backward computes weights again, of all columns."""
    args = [one.requires_grad_() for one in arguments()]
    wide = [one.detach().double().requires_grad_() for one in args]
    torch._dynamo.reset()
    with kgen.config.override(cache=False, recompute_scores="on"):
        got = torch.compile(fn, backend="kgen")(*args)
        want = fn(*wide)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        got.square().sum().backward()
        want.square().sum().backward()
    for one, other in zip(args, wide, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
