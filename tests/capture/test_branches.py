"""`cond` with small branches as a choice between both of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.capture.branches import MOST
from kgen.counters import counters
from kgen.verdict import Reason

pytestmark = [pytest.mark.cpu, pytest.mark.usefixtures("fresh_counters")]


def write_if(x: Tensor, flag: Tensor) -> Tensor:
    x = x.clone()
    if flag > 0:
        x[1] = 0
    else:
        x[:, 2].mul_(2)
    return x + 1


def in_each_other(x: Tensor, flag: Tensor) -> Tensor:
    return (x * 2 if flag > 1 else x.sum(0, keepdim=True).expand_as(x) + 1) if flag > 0 else x.sin()


def divided(x: Tensor, flag: Tensor) -> Tensor:
    """No branch may raise an error that is not wanted."""
    whole, by = x.long(), flag.long()
    return whole // by if by.sum() != 0 else whole + 1


def drawn(x: Tensor, flag: Tensor) -> Tensor:
    return x + torch.rand_like(x) * 0 if flag > 0 else x * 3


def picked(x: Tensor, flag: Tensor) -> Tensor:
    """What the flag guards would read beyond the end."""
    at = flag.long().clamp(min=0).reshape(1).expand(2) * 1000
    return x[at] + x[:2] if flag < 1 else x[:2] * 2


def multiplied(x: Tensor, flag: Tensor) -> Tensor:
    return x @ x.t() @ x if flag > 0 else x * 2


def calls(f: Callable[..., Any], *args: Tensor) -> int:
    """How many branches are called. Results are those of eager."""
    compiled = kgen.compile(f, control_flow=True, options={"strict": True})
    for flag in (2.0, 1.0, -1.0, 0.0):
        given = [*args, torch.tensor(flag)]
        torch.testing.assert_close(compiled(*given), f(*given), rtol=1e-5, atol=1e-5)
    return counters["extern.cond"]


@pytest.mark.parametrize("f", [write_if, in_each_other], ids=lambda f: f.__name__)
def test_small_branches_are_computed_both(f: Callable[..., Any]) -> None:
    assert calls(f, torch.randn(6, 6)) == 0


@pytest.mark.parametrize("f", [divided, drawn, picked, multiplied], ids=lambda f: f.__name__)
def test_branches_that_do_harm_or_take_long_are_called(f: Callable[..., Any]) -> None:
    assert calls(f, torch.randn(6, 6) * 9) == 1


def test_large_branches_are_called() -> None:
    assert calls(write_if, torch.randn(MOST // 64, 64)) == 1


def test_gradients() -> None:
    x, flag = torch.randn(6, 6, requires_grad=True), torch.tensor(1.0)
    got = torch.autograd.grad(kgen.compile(write_if, control_flow=True)(x, flag).square().sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(write_if(x, flag).square().sum(), x))


def test_explain_says_so() -> None:
    text = str(kgen.explain(kgen.control_flow(write_if), torch.randn(6, 6), torch.tensor(1.0), print_report=False))
    assert Reason.BOTH_BRANCHES.value in " ".join(text.split())
