"""Few columns of many rows, which are several loops: each point of the outer ones is a share where the inner ones have none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matmuls import compiled, error
from tests.scheduler.selection.test_safe_choices import planned


def squares_and_their_columns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """What is stored at each point cannot be left out past the end of a share: shares have equal lengths."""
    made = (x.view(y.shape) * y).view(x.shape)
    return made, made.sum(0)


@pytest.mark.parametrize(
    ("images", "rows", "columns"), [(32, 197, 3072), (16, 211, 64), (3, 2048, 64)], ids=["a prime", "two", "one that divides"]
)
def test_it_is_shared_out(images: int, rows: int, columns: int) -> None:
    x, y = torch.empty(images * rows, columns), torch.empty(images, rows, columns)
    partial, joined = planned(squares_and_their_columns, x, y).kernels
    share = partial.outer[0]
    assert share.extent.as_int() >= images
    assert joined.inner == (share,)


@pytest.mark.interpret
def test_values() -> None:
    x, y = torch.randn(16 * 211, 64), torch.randn(16, 211, 64)
    found, wanted = compiled(squares_and_their_columns, x, y), squares_and_their_columns(x.double(), y.double())
    for got, want in zip(found, wanted, strict=True):
        assert error(got, want) < 1e-6


def instance_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Images and channels are one loop of the norm, neighbouring channels neighbours in memory."""
    return F.relu(F.instance_norm(x, weight=weight[0], bias=weight[1]))


def test_channels_of_images_are_shared_out() -> None:
    x = torch.empty(8, 128, 128, 128).to(memory_format=torch.channels_last)
    partial, joined, last = planned(instance_norm, x, torch.empty(2, 128)).kernels
    assert joined.inner == (partial.outer[0],)
    assert not last.inner


@pytest.mark.interpret
def test_values_of_channels_of_images() -> None:
    x, weight = torch.randn(2, 32, 64, 64).to(memory_format=torch.channels_last), torch.randn(2, 32)
    assert error(compiled(instance_norm, x, weight), instance_norm(x.double(), weight.double())) < 1e-6
