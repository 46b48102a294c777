"""Operators that are taken apart after tracing: equal ones are traced once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from kgen.capture import higher_order

pytestmark = pytest.mark.cpu


def norms(x: Tensor, *weights: Tensor) -> Tensor:
    for weight in weights:
        x = F.group_norm(x, 2, weight, eps=1e-5)
    return F.group_norm(F.group_norm(x, 2, eps=1e-3), 4)


def test_equal_operators_are_traced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of other groups, or with another number, are not."""
    traced = []
    inner = higher_order._Expansion._traced

    def counting(self: higher_order._Expansion, *args: object) -> GraphModule:
        traced.append(self.node.target)
        return inner(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(higher_order._Expansion, "_traced", counting)
    torch._dynamo.reset()
    torch.manual_seed(0)
    args = [torch.randn(2, 8, 4, 4, requires_grad=True), *(torch.rand(8, requires_grad=True) for _ in range(4))]
    want = norms(*args)
    got = torch.compile(norms, backend="kgen", options={"cache": False})(*args)
    torch.testing.assert_close(got, want)
    # Not their squares' sum: that of normalised values is a constant, and its gradient is rounding alone.
    seed = torch.randn_like(want)
    gradients = [torch.autograd.grad(one, args, seed) for one in (got, want)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)
    forward = torch.ops.aten.native_group_norm.default
    assert traced.count(forward) == 3
    assert len(traced) == 6
