"""What crosses from one section of a kernel to the next is there when it is read, and is what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.verdict import Outcome
from tests.kernels import plans

pytestmark = [pytest.mark.cpu, pytest.mark.interpret]

BACK_ENDS = {"cpp": {"cache": False}, "triton": {"cache": False, "gpu_interpreter": True}}


def r(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def gated_softmax(x: Tensor) -> Tensor:
    """`u` is cheap to compute again in the later sections, `s`, of which it is made, is not."""
    s = torch.sigmoid(x)
    u = x * s + s + 1
    return torch.softmax(u, -1)


def gated_norm(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    u = x * s + s + 1
    v = u - s * u
    return v * torch.rsqrt((u * v).mean(-1, keepdim=True).abs() + 0.1) + u


def overwritten(x: Tensor) -> Tensor:
    """`u` is read in a section before x is written, and in one after that."""
    u = x * x.mean(-1, keepdim=True) + x.flip(0).flip(0) + 1
    e = torch.exp(u - u.amax(-1, keepdim=True))
    x.copy_(e / e.sum(-1, keepdim=True))
    return u / x.amax(-1, keepdim=True)


CASES: dict[str, Callable[..., Any]] = {f.__name__: f for f in (gated_softmax, gated_norm, overwritten)}


@pytest.mark.parametrize("back_end", BACK_ENDS)
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, back_end: str) -> None:
    f, x = CASES[name], r(33, 70)
    torch._dynamo.reset()
    with torch.no_grad():
        ours, theirs = x.clone(), x.clone()
        got = torch.compile(f, backend="kgen", fullgraph=True, options=BACK_ENDS[back_end])(ours)
        torch.testing.assert_close(got, f(theirs), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_operand_of_what_is_computed_again_is_kept() -> None:
    plan = plans(gated_softmax, r(33, 70)).forward
    assert len(plan.kernels) == 1
    outcomes = {v.producer: v.outcome for v in plan.verdicts if v.outcome in (Outcome.RECOMPUTED, Outcome.STORED)}
    assert outcomes["sigmoid"] is Outcome.STORED
    assert Outcome.RECOMPUTED in outcomes.values()
