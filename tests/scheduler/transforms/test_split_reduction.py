"""Few columns of many rows, which are several loops: each point of the outer ones is a share where the inner ones have none."""

from __future__ import annotations

import pytest
import torch
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
