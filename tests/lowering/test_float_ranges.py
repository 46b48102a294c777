"""Ranges of floats accumulate as eager's do on the device: what is made whole numbers of them depends on the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.rendering import texts_of_a_gpu


def frames(x: Tensor) -> Tensor:
    """As a phase vocoder takes them, at 1.3 times the pace."""
    at = torch.arange(0, x.shape[-1], 1.3, device=x.device)
    return x.index_select(-1, at.long()) * (at % 1.0)


def of_a_gpu(dtype: torch.dtype) -> str:
    def ranged(x: Tensor) -> Tensor:
        return torch.arange(0.5, 700, 1.3, dtype=dtype, device=x.device).sin() * x[0, 0]

    return "".join(texts_of_a_gpu(ranged, torch.empty(4, 700, dtype=dtype)).kernels.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_makes_narrow_ones_in_single_precision(dtype: torch.dtype) -> None:
    """Element 190 of 1.3 i is 246.99998 there, and 247 in double precision."""
    source = of_a_gpu(dtype)
    assert "fma" in source
    assert "float64" not in source


def test_a_gpu_makes_wide_ones_in_double_precision() -> None:
    assert "float64" in of_a_gpu(torch.float64)


@pytest.mark.gpu
def test_a_gpu_gives_what_eager_does_there() -> None:
    x = torch.randn(3, 700, device="cuda")
    torch.testing.assert_close(torch.compile(frames, backend="kgen")(x), frames(x))
