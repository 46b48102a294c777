"""Blocks of rows, such as states with a scale for each, join the kernel of the same elements in another shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.scheduler import Options
from tests.kernels import plans

ROWS, BLOCKS, BLOCK = 6, 4, 25


def scaled(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A scale for each block; the values themselves in the shape of the input."""
    y = torch.tanh(x.view(-1, BLOCK) + g.view(-1, BLOCK))
    scale = y.abs().amax(1, keepdim=True)
    return (y / scale).round().to(torch.int8), scale, x - y.view_as(x) * 0.1


def two_states(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Two of them, which share the result of the input's shape."""
    a, b = torch.tanh(g.view(-1, BLOCK)), torch.exp(x.view(-1, BLOCK)).sigmoid().log1p()
    scales = a.abs().amax(1, keepdim=True), b.amax(1, keepdim=True)
    step = a / (b.sqrt() + 1)
    return (a / scales[0]).round(), (b / scales[1]).round(), x - step.view_as(x), *scales


def summed(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Statistics of blocks, and of others with as many elements, whose blocks lie across these."""
    y = torch.exp(x.view(-1, BLOCK) * g.view(-1, BLOCK))
    return y / y.sum(1, keepdim=True), y.view(-1, 2 * BLOCK).amax(1), y.view_as(x) + 1


def turned(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Elements of each block in the other order of loops: no row of the input is one of a block."""
    y = torch.tanh(x.view(-1, BLOCK) + g.view(-1, BLOCK))
    return y / y.sum(1, keepdim=True), y.t() * 2


def given() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(ROWS, BLOCKS * BLOCK, generator=generator) for _ in range(2))  # type: ignore[return-value]


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("fn", [scaled, two_states])
def test_one_kernel(fn: Callable[..., Any], gpu: bool) -> None:
    found = plans(fn, *given(), options=Options(gpu_everywhere=gpu))
    assert found.kernels == 1, [str(v) for v in found.forward.verdicts]


@pytest.mark.cpu
@pytest.mark.parametrize("fn", [scaled, two_states, summed, turned])
def test_values(fn: Callable[..., Any]) -> None:
    torch.testing.assert_close(torch.compile(fn, backend="kgen")(*given()), fn(*given()))


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [scaled, two_states, summed, turned])
def test_values_of_triton_kernels(fn: Callable[..., Any]) -> None:
    compiled = torch.compile(fn, backend="kgen", options={"gpu_interpreter": True, "cache": False})
    torch.testing.assert_close(compiled(*given()), fn(*given()))
