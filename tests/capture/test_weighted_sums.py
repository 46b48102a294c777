"""A sum of softmaxes before a contraction becomes contractions of one softmax each, where that is more than nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch.fx import GraphModule

import kgen
from kgen.capture.decompositions import TABLE
from kgen.capture.weighted_sums import split_weighted_sums
from tests.attention_gradients import r

LENGTH, HEAD = 64, 8


def softmaxes(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return (q @ k.mT).softmax(-1), (q @ k.mT * 0.5).softmax(-1)


def difference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - 0.3 * other) @ v


def nested(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (-(one * 2 - (other + one) / 4).to(v.dtype).contiguous()).transpose(0, 1).transpose(0, 1) @ v


def turned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return v.mT @ (one + other).mT


def factor_of_a_tensor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - v[0, 0, 0] * other) @ v


def factor_of_each_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With heads in a dimension of their own, turned matrices, and a factor of a type of its own."""
    one, other = (x.unflatten(0, (3, 1)).mT for x in softmaxes(q, k))
    factor = v[:, :1, :1].double()[:, None].expand(3, 1, 1, 1).relu()
    return ((one - (factor * other).to(v.dtype)).mT @ v[:, None]).flatten(0, 1)


def halves_of_one_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pairs of heads, as the authors write it."""
    both = torch.stack([q, q * 0.5], 1).flatten(0, 1) @ k.repeat_interleave(2, 0).mT
    pairs = both.softmax(-1).view(3, 2, LENGTH, LENGTH)
    return (pairs[:, 0] - v.mean((-2, -1), keepdim=True) * pairs[:, 1]) @ v


def factor_of_each_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - v[:, :, :1] * other) @ v


def one_with_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, _ = softmaxes(q, k)
    return (one * v.exp()[..., :1]) @ v


def turned_factor_of_each_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one.mT - (v[:, :, :1] * other).mT) @ v


def factor_of_each_column(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - v[:, :, :1].mT * other) @ v


def one_of_them_is_none(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - torch.relu(other)) @ v


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k)
    return (one - other[:, :1]) @ v


def few_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, other = softmaxes(q, k[:, :4])
    return (one - other) @ v[:, :4]


def graph_of(fn: Callable[..., Any], *args: Tensor) -> GraphModule:
    kept: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> GraphModule:
        kept.append(gm)
        return gm

    with torch.no_grad():
        aot_function(fn, keep, decompositions=TABLE)(*args)
    return kept[0]


def matmuls(gm: GraphModule) -> int:
    return sum(node.target is torch.ops.aten.bmm.default for node in gm.graph.nodes)


def arguments() -> list[Tensor]:
    return [r(3, LENGTH, HEAD, seed=k) for k in range(3)]


@pytest.mark.parametrize(("fn", "terms"), [
    (difference, 2), (nested, 3), (turned, 2), (factor_of_a_tensor, 2), (factor_of_each_head, 2), (halves_of_one_softmax, 2),
    (factor_of_each_row, 2), (one_with_a_factor, 1),
])  # fmt: skip
def test_each_softmax_has_a_contraction(fn: Callable[..., Tensor], terms: int) -> None:
    args = arguments()
    gm = graph_of(fn, *args)
    before, want = matmuls(gm), fn(*(a.double() for a in args))
    made = split_weighted_sums(gm, lambda *_: True)
    assert matmuls(made) == before + terms - 1
    [got] = made(*args) if isinstance(made(*args), list | tuple) else [made(*args)]
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fn", [factor_of_each_column, turned_factor_of_each_row, one_of_them_is_none, broadcast, few_columns])
def test_what_is_left(fn: Callable[..., Tensor]) -> None:
    gm = graph_of(fn, *arguments())
    before = [str(node) for node in gm.graph.nodes]
    split_weighted_sums(gm, lambda *_: True)
    assert [str(node) for node in gm.graph.nodes] == before


def test_where_templates_take_none_it_stays() -> None:
    gm = graph_of(difference, *arguments())
    before = matmuls(gm)
    assert matmuls(split_weighted_sums(gm, lambda *_: False)) == before


@pytest.mark.cpu
def test_inference_is_a_kernel_for_each_softmax() -> None:
    """In the default mode. Rounded as eager rounds, sums stay as they are."""
    args = arguments()
    torch._dynamo.reset()
    with torch.no_grad(), kgen.config.override(cache=False):
        report = kgen.explain(difference, *args, print_report=False)
        got = torch.compile(difference, backend="kgen")(*args)
        with kgen.config.override(numerics="eager"):
            exact = kgen.explain(difference, *args, print_report=False)
    assert sum("attention<" in one.source for one in report.kernels) == len(report.kernels) == 2
    assert not any("attention<" in one.source for one in exact.kernels)
    torch.testing.assert_close(got, difference(*args), rtol=1e-5, atol=1e-5)
