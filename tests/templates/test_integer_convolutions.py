"""Convolutions of bytes as programs spell them: converted to wider integers, as bytes that wrap, and quantised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # defines the operators of Q
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.only import only
from tests.slow import slow_but

Q = torch.ops.quantized_decomposed
int8, uint8 = torch.int8, torch.uint8


def widened(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.conv2d(x.int(), w.int(), padding=1)


def shifted(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """The zero point is no zero: the border is, though."""
    return F.conv2d(x.view(uint8).int() - 130, w.int(), stride=2, padding=1)


def wrapping(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def unsigned(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.conv2d(x.view(uint8), w.view(uint8), stride=2)


def depthwise(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    return F.conv2d(x.short(), w[:8, :1].short(), padding=1, groups=8)


def quantised(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    image = Q.dequantize_per_tensor(x, 0.02, 3, -128, 127, int8)
    filters = Q.dequantize_per_channel(w, scales, None, 0, -128, 127, int8)
    return Q.quantize_per_tensor(F.relu(F.conv2d(image, filters, padding=1)), 0.5, -2, -128, 127, int8)


def quantised_unsigned(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    image = Q.dequantize_per_tensor(x.view(uint8), 0.02, 130, 0, 255, uint8)
    filters = Q.dequantize_per_channel(w, scales, None, 0, -128, 127, int8)
    return Q.quantize_per_tensor(F.conv2d(image, filters, stride=2, padding=1), 0.5, 13, 0, 255, uint8)


EXACT = (widened, shifted, wrapping, unsigned, depthwise)
ROUNDED = (quantised, quantised_unsigned)
TEMPLATES = ("cpp_matmul", "cpp_conv_direct", "triton_conv", "triton_conv_direct")
TELLING = [
    (wrapping, "cpp_matmul"),
    (wrapping, "triton_conv"),
    (widened, "triton_conv_direct"),
    (shifted, "triton_conv_direct"),
]


def arguments() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randint(-128, 128, shape, generator=generator, dtype=int8) for shape in ((2, 8, 5, 6), (12, 8, 3, 3)))
    return x, w, torch.rand(12, generator=generator) * 0.01 + 0.001


def computed(fn: Callable[..., Tensor], name: str, *args: Tensor) -> Tensor:
    """By the template where it takes the convolution, else by the library."""
    torch._dynamo.reset()
    interpreted = name.startswith("triton")
    with (
        only(name, lambda found: found[0]) if name else nullcontext(),
        kgen.config.override(cache=False, gpu_interpreter=interpreted),
    ):
        made: Tensor = torch.compile(fn, backend="kgen", fullgraph=True)(*args)
    return made


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("fn", "name"), slow_but(lambda *pair: pair in TELLING, [(fn, name) for fn in EXACT for name in ("", *TEMPLATES)])
)
def test_integers_are_added_up_exactly(fn: Callable[..., Tensor], name: str) -> None:
    args = arguments()
    want, got = fn(*args), computed(fn, name, *args)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("fn", "name"),
    slow_but(
        lambda *pair: pair in [(quantised, "triton_conv"), (quantised_unsigned, "cpp_matmul")],
        [(fn, name) for fn in ROUNDED for name in ("", *TEMPLATES)],
    ),
)
def test_quantised_results_are_a_step_apart_at_most(fn: Callable[..., Tensor], name: str) -> None:
    """Of a sum between two steps the order of its terms may decide."""
    args = arguments()
    want, got = fn(*args), computed(fn, name, *args)
    apart = (got.int() - want.int()).abs()
    assert got.dtype == want.dtype
    assert int(apart.max()) <= 1
    assert int((apart > 0).sum()) <= 3
