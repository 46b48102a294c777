"""The gradient of elements that are picked by their position: arithmetic, with nothing scattered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.ir.nodes import Scatter
from kgen.ir.plan import members
from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu


def by_gather(x: Tensor, t: Tensor) -> Tensor:
    return F.log_softmax(x, -1).gather(1, t[:, None]).tanh().mean()


def by_positions(x: Tensor, t: Tensor) -> Tensor:
    """Forward saves the positions of rows for the gradient, which counts them again."""
    return F.log_softmax(x, -1)[torch.arange(len(x), device=x.device), t].tanh().mean()


@pytest.mark.parametrize("loss", [by_gather, by_positions])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_gradient_is_one_kernel(loss: Callable[[Tensor, Tensor], Tensor], dynamic: bool) -> None:
    x, t = torch.randn(6, 40, requires_grad=True), torch.tensor([0, 39, 7, 7, 12, 1])
    [want] = torch.autograd.grad(loss(x, t), [x])
    with recording() as recorder, kgen.config.override(cache=False):
        [got] = torch.autograd.grad(torch.compile(loss, backend="kgen", fullgraph=True, dynamic=dynamic)(x, t), [x])
    torch.testing.assert_close(got, want)
    backward = recorder.graphs[-1]
    assert isinstance(backward, Record)
    if not dynamic or loss is by_gather:
        assert not any(isinstance(node, Scatter) for node in backward.plan.graph.nodes)
    if not dynamic:
        assert sum(len(members(step)) for step in backward.plan.kernels) == 1
