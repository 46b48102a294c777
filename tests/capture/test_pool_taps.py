"""Gradients of maxima save which element of its window each one is, in eight bits, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.report.record import Record, recording

pytestmark = pytest.mark.interpret


@pytest.mark.parametrize(
    ("shape", "windows", "settings"),
    [
        ((2, 3, 9, 10), (3, 2, 1), {}),
        ((2, 3, 8, 8), (2, 2, 0), {}),
        ((1, 2, 12, 12), ((3, 2), (2, 1), (1, 0)), {"dilation": (2, 3)}),
        ((1, 2, 11, 11), (3, 2, 1), {"ceil_mode": True}),
        ((1, 2, 20, 20), (7, 1, 3), {}),
        ((1, 1, 30, 30), (9, 9, 0), {}),
        ((1, 2, 6, 6, 6), (3, 2, 1), {}),
    ],
)
@pytest.mark.parametrize("indices", [False, True])
def test_gradients(shape: tuple[int, ...], windows: Any, settings: dict[str, Any], indices: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    pool = F.max_pool3d if len(shape) == 5 else F.max_pool2d

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        found = pool(x * 2, *windows, return_indices=indices, **settings)
        return found if indices else (found,)

    x = torch.randn(shape).mul(2).round()  # equals among the maxima
    x.flatten()[3] = torch.nan
    made, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
    options = {"gpu_interpreter": True, "strict": True, "cache": False}
    with recording() as seen:
        got, expected = torch.compile(fn, backend="kgen", options=options)(made), fn(wanted)
        given = torch.randn_like(expected[0])
        got[0].backward(given)
    expected[0].backward(given)
    torch.testing.assert_close(got, expected, equal_nan=True)
    torch.testing.assert_close(made.grad, wanted.grad)
    backward = seen.graphs[-1]
    assert isinstance(backward, Record)
    kinds = {backward.plan.graph.buffers[one.buffer].dtype for one in backward.plan.graph.inputs if one.buffer}
    assert torch.int8 in kinds
    assert torch.int64 not in kinds


def test_what_a_program_returns_is_a_position() -> None:
    x = torch.randn(1, 2, 8, 8, requires_grad=True)
    options = {"gpu_interpreter": True, "strict": True, "cache": False}
    got = torch.compile(lambda x: F.max_pool2d(x, 2, return_indices=True), backend="kgen", options=options)(x)
    assert torch.equal(got[1], F.max_pool2d(x, 2, return_indices=True)[1])
