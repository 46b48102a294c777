"""A reduction along the last dimension is the same, from whichever end the dimension is counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu


def loss_and_entropy(x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy counts from the front, the softmax from the end."""
    p = F.log_softmax(x, -1)
    return F.cross_entropy(x, labels) - (p.exp() * p).sum(-1).mean()


def two_sums(x: Tensor, _: Tensor) -> Tensor:
    return x.exp().sum(1).log().sum() + x.exp().sum(-1).sqrt().sum()


@pytest.mark.parametrize(("fn", "wanted"), [(loss_and_entropy, {"max": 1}), (two_sums, {"sum": 3})])
def test_it_is_computed_for_one(fn: Callable[..., Any], wanted: dict[str, int]) -> None:
    """The two sums of exponentials are one, beside those of all rows."""
    torch._dynamo.reset()
    x, labels = torch.randn(40, 300), torch.randint(300, (40,))
    made, given = (x.clone().requires_grad_() for _ in range(2))
    with recording() as seen:
        torch.compile(fn, backend="kgen", options={"cache": False})(made, labels).backward()
    fn(given, labels).backward()
    torch.testing.assert_close(made.grad, given.grad)
    forward = next(one for one in seen.graphs if isinstance(one, Record) and one.info.role == "forward")
    found = [s.op for k in forward.plan.kernels for s in k.statements if s.kind == "reduction"]
    assert {op: found.count(op) for op in wanted} == wanted
