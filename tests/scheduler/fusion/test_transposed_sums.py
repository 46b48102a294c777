"""A sum over several axes and what reads its operand in another order are one loop: axes of equal length are each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kgen

pytestmark = pytest.mark.cpu


def centred(x: Tensor) -> Tensor:
    y = torch.sin(x)
    return torch.relu(y - y.mean((0, 2), keepdim=True)).permute(2, 0, 1).contiguous()


def first_of_each(x: Tensor) -> tuple[Tensor, Tensor]:
    """The place of the largest number is that in the sum's own order of axes."""
    flat = x.transpose(0, 1).flatten(1)
    return flat.argmax(1), x.permute(2, 0, 1) - flat.amax(1)


def test_axes_are_paired_by_their_length() -> None:
    x = torch.randn(20, 30, 41)
    [graph] = kgen.explain(centred, x, print_report=False).graphs
    [kernel] = graph.kernels
    assert "floordiv_" not in kernel.source
    assert "gather<" not in kernel.source
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(centred, backend="kgen")(x), centred(x), atol=1e-6)


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 4), (6, 5, 1), (1, 7, 9)])
def test_values(shape: tuple[int, ...]) -> None:
    x = torch.randint(0, 5, shape).float()  # many numbers are equal
    for f in (centred, first_of_each):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(f, backend="kgen")(x), f(x))


def test_a_running_sum_keeps_its_order() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.sum((0, 2))
        return x.permute(2, 0, 1).flatten(0, 1).cumsum(0) + total, total

    x = torch.randint(0, 9, (4, 5, 6)).float()
    torch.testing.assert_close(torch.compile(f, backend="kgen")(x), f(x))
