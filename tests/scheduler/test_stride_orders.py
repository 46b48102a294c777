"""Tensors that nobody sees take the order of strides of their neighbours; results keep that of eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.ir.plan import Schedule
from tests.scheduler.selection.test_safe_choices import planned

N, C, SIDE = 4, 96, 12


def residual_stream(x: Tensor, *weights: Tensor) -> Tensor:
    """Tokens of an image, which eager keeps channel by channel through all sums."""
    tokens = (x + 1).flatten(2).transpose(1, 2)
    for w in weights:
        tokens = tokens + F.layer_norm(tokens, tokens.shape[-1:]) @ w
    return tokens


def summed(x: Tensor, *weights: Tensor) -> Tensor:
    return residual_stream(x, *weights).square().mean(1)


def arguments() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(N, C, SIDE, SIDE, generator=made), *(torch.randn(C, C, generator=made) / C**0.5 for _ in range(3))]


def streams(plan: Schedule) -> list[int]:
    """Of sums with the residual, the strides along channels."""
    tokens = [b for name, b in plan.graph.buffers.items() if name.startswith("add_") and len(b.sizes) == 3]
    return [b.strides[2].as_int() or 0 for b in tokens if b.strides is not None]


@pytest.mark.parametrize("gpu", [True, False])
def test_a_residual_stream_has_its_channels_side_by_side(gpu: bool) -> None:
    found = streams(planned(summed, *arguments(), gpu=gpu))
    assert found
    assert set(found) == {1}


@pytest.mark.cpu
def test_results_keep_the_strides_of_eager() -> None:
    args = arguments()
    eager, got = residual_stream(*args), torch.compile(residual_stream, backend="kgen", options={"cache": False})(*args)
    assert eager.stride() == got.stride()
    assert got.stride()[2] != 1
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-4)


def test_where_neighbours_agree_with_eager_its_order_stays() -> None:
    """Everything is transposed: a sum of transposed tensors, whose rows are reduced in memory order."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        total = x.transpose(1, 2) + y.transpose(1, 2)
        return total.amax(1) + (total * y.transpose(1, 2)).sum(1)

    found = streams(planned(f, torch.empty(8, 64, 4096), torch.empty(8, 64, 4096)))
    assert all(stride != 1 for stride in found)
