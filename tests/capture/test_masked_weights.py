"""Softmaxes with weights that a mask makes 0 once more: right whatever is in the scores, and one kernel where it may be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen
from kgen.only import only

ROWS, HEAD = 40, 16
pytestmark = pytest.mark.cpu
CAUSAL = torch.zeros(ROWS, ROWS).masked_fill(torch.ones(ROWS, ROWS).triu(1).bool(), -math.inf)


def attention(number: float, last: str, bias: Tensor | None) -> Callable[..., Tensor]:
    """Scores are a number where a sentence has ended, weights 0, in one of several spellings."""

    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
        masked = keep[:, None, None, :].eq(0)
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        s = s if bias is None else s + bias
        weights = s.masked_fill(masked, number).softmax(-1)
        if last == "filled":
            return weights.masked_fill(masked, 0.0) @ v
        return (torch.where(~masked, weights, 0.0) if last == "chosen" else weights * ~masked) @ v

    return fn


def sample() -> list[Tensor]:
    """The first sentence has no first word, the second one no word at all."""
    q, k, v = (torch.randn(3, 2, ROWS, HEAD, generator=torch.Generator().manual_seed(k)) for k in range(3))
    keep = torch.arange(ROWS) < torch.tensor([[30], [0], [ROWS]])
    keep[0, 0] = False
    return [q, k, v, keep]


def results(fn: Callable[..., Tensor], args: list[Tensor], trains: bool) -> tuple[Tensor, ...]:
    given = [one.clone().requires_grad_(trains and one.is_floating_point()) for one in args]
    out = fn(*given)
    if not trains:
        return (out,)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    return (out.detach(), *torch.autograd.grad(out, given[:3], weights))


def compiled(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    options = {"strict": True, "cache": False, "recompute_scores": "on"}
    made: Callable[..., Tensor] = torch.compile(fn, backend="kgen", options=options)
    return made


LOWEST = torch.finfo(torch.float32).min


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("number", "last", "biased"),
    [*itertools.product((LOWEST, -math.inf, -1e9), ("filled", "chosen"), (False, True)), (-math.inf, "multiplied", False)],
)
def test_they_are_what_eager_makes(number: float, last: str, biased: bool) -> None:
    """With a bias of -inf, some rows have weights for nothing that the mask keeps. These are NaN in eager, not 0, or 0 by the
    lowest number, which is more than the bias."""
    fn, args = attention(number, last, CAUSAL if biased else None), sample()
    made = compiled(fn)
    for trains in (False, True):
        for mine, right in zip(results(made, args, trains), results(fn, args, trains), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("trains", [False, True])
def test_weights_that_somebody_reads_stay(trains: bool) -> None:
    """Those of a sentence without words are all equal, where scores are one number."""

    def fn(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        masked = keep[:, None, None, :].eq(0)
        weights = (q @ k.transpose(-1, -2)).masked_fill(masked, LOWEST).softmax(-1)
        return weights.masked_fill(masked, 0.0) @ v, weights

    args = [one.requires_grad_(trains and one.is_floating_point()) for one in sample()]
    for mine, right in zip(compiled(fn)(*args), fn(*args), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("number", "biased"), [(LOWEST, False), (-math.inf, False), (LOWEST, True), (-math.inf, True)])
def test_they_are_one_kernel_where_scores_are_finite(number: float, biased: bool) -> None:
    """With a bias there may be rows that are no zeros: then they are calls of the library, and a softmax."""
    torch._dynamo.reset()
    with only("cpp_attention", lambda configs: configs[0]), kgen.config.override(cache=False):
        report = kgen.explain(attention(number, "filled", CAUSAL if biased else None), *sample(), print_report=False)
    assert ("0 library calls" in repr(report)) is not biased, report
