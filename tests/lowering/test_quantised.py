"""Quantised weights: 8-bit columns with scales, packed 4-bit ones, and the operators of `quantized_decomposed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch import Tensor

import kgen

BACK_ENDS = [
    pytest.param({}, marks=pytest.mark.cpu, id="cpp"),
    pytest.param({"gpu_interpreter": True}, marks=pytest.mark.interpret, id="triton"),
]
Q = torch.ops.quantized_decomposed
BOUNDS = (-128, 127, torch.int8)


def r(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def codes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.int8)


def compiled(f: Callable[..., Any], *args: Tensor, **options: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    with kgen.config.override(cache=False, **options):
        report = kgen.explain(f, *args, print_report=False)
        return torch.compile(f, backend="kgen")(*args), report


@pytest.mark.parametrize("options", BACK_ENDS)
@pytest.mark.usefixtures("templates_win")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_columns_of_8_bits_are_one_kernel_with_their_scales(options: dict[str, Any], dtype: torch.dtype) -> None:
    def f(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
        return torch.relu(torch._weight_int8pack_mm(x, w, scales))

    x, w, scales = r(40, 64, dtype=dtype), codes(48, 64), (r(48).abs() / 100).to(dtype)
    got, report = compiled(f, x, w, scales, **options)
    want = torch.relu(x.double() @ w.double().t() * scales.double())
    assert (len(report.kernels), len(report.externs)) == (1, 0), report
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-3)


@pytest.mark.cpu
def test_packed_4_bits_are_a_library_call() -> None:
    """Their layout is the library's own."""
    packed = torch._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (64, 128), dtype=torch.int32), 1)
    x, scales = r(8, 128, dtype=torch.bfloat16), r(4, 64, 2, dtype=torch.bfloat16)

    def f(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        return torch.relu(torch._weight_int4pack_mm_for_cpu(x, packed, 32, scales))

    got, report = compiled(f, x, packed, scales)
    assert [call.operator for call in report.externs] == ["aten._weight_int4pack_mm_for_cpu.default"]
    torch.testing.assert_close(got, f(x, packed, scales))


def by_numbers(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = Q.quantize_per_tensor(x, 0.037, 3, *BOUNDS)
    return Q.dequantize_per_tensor(torch.relu(q), 0.037, 3, *BOUNDS)


def by_tensors(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = Q.quantize_per_tensor.tensor(x, scale[0], zero[0], *BOUNDS)
    return Q.dequantize_per_tensor.tensor(q, scale[0], zero[0], *BOUNDS)


def by_channels(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    q = Q.quantize_per_channel(x, scale, zero, 1, *BOUNDS)
    return Q.dequantize_per_channel(q, scale, zero, 1, *BOUNDS)


@pytest.mark.parametrize("options", BACK_ENDS)
@pytest.mark.parametrize("f", [by_numbers, by_tensors, by_channels])
def test_quantising_is_elementwise_work(options: dict[str, Any], f: Callable[..., Tensor]) -> None:
    """One kernel, with eager's bits: rounding to even at halves, clamped ends."""
    x = torch.cat([r(20, 48) * 3, torch.arange(48).expand(1, 48) * 0.037 / 2])
    scale, zero = r(48).abs() + 0.01, torch.randint(-9, 9, (48,), generator=torch.Generator().manual_seed(0))
    got, report = compiled(f, x, scale, zero, **options)
    assert (len(report.kernels), len(report.externs)) == (1, 0), report
    assert torch.equal(got, f(x, scale, zero))


@pytest.mark.cpu
@pytest.mark.usefixtures("templates_win")
def test_dequantised_weights_are_a_prologue() -> None:
    """The matmul reads 8-bit integers from memory."""

    def f(x: Tensor, w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return x @ Q.dequantize_per_channel(w, scale, zero, 0, *BOUNDS).t()

    x, w, scale = r(40, 64), codes(48, 64), r(48).abs() / 100
    zero = torch.randint(-9, 9, (48,), generator=torch.Generator().manual_seed(0))
    got, report = compiled(f, x, w, scale, zero)
    assert (len(report.kernels), len(report.externs)) == (1, 0), report
    torch.testing.assert_close(got, f(x, w, scale, zero), rtol=1e-4, atol=1e-4)
