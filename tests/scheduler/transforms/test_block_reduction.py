"""Blocks of a row that are reduced in the kernel that has the row in registers: right in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.scheduler import Options
from kgen.verdict import Reason
from tests.kernels import plans


def halves(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """What belongs together is half a row apart, as in the gradient of `x.repeat(1, 2)`."""
    total = (x * w).sum(-1, keepdim=True)
    return (w * total).view(-1, 2, 8).sum(1), total


def quarters(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    most = (x + w).amax(-1, keepdim=True)
    return (x * most).view(-1, 4, 4).amax(1), most


def runs(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = (x * w).sum(-1, keepdim=True)
    return (w * total).view(-1, 4, 4).sum(2), total


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("fn", [halves, quarters, runs])
def test_agrees_with_eager(fn: Callable[..., tuple[Tensor, Tensor]]) -> None:
    args = torch.randn(6, 16), torch.randn(6, 16)
    plan = plans(fn, *args, options=Options(gpu_everywhere=True)).forward
    assert [v.reason for v in plan.verdicts if v.reason is Reason.BLOCKS_OF_ROWS] == [Reason.BLOCKS_OF_ROWS]
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
    torch.testing.assert_close(compiled(*args), fn(*args))
