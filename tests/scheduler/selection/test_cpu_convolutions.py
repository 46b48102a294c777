"""Who computes convolutions on a CPU, by estimates of both: the library orders filters at each call, which pays for many
positions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.device import Device
from kgen.ir.plan import Schedule, members
from kgen.scheduler import Options
from tests.kernels import plans

# Two threads with AVX-512: of an AMD, whose MKL is slow, and with AMX.
AMD = Device("cpu", 0, 2, 0, 0, "avx512", 16, 2 * 280e9, 2.0, 20e9, 0.42)
AMX = Device("cpu", 0, 2, 0, 0, "avx512", 16, 7 * 280e9, 7.0, 20e9, 1.0)
pytestmark = pytest.mark.parametrize("cpu", [AMD, AMX], ids=["avx512", "amx"])


def image(*shape: int) -> Tensor:
    return torch.empty(*shape).to(memory_format=torch.channels_last)


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, padding=w.shape[-1] // 2, groups=x.shape[1] // w.shape[1]))


def gradients(dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    windows = ([1, 1], [w.shape[-1] // 2] * 2, [1, 1], False, [0, 0], x.shape[1] // w.shape[1])
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *windows, [True, True, False])
    return dx, dw


def taken(f: Callable[..., object], *args: Tensor, cpu: Device) -> tuple[list[str], int]:
    """The templates of a plan, and its library calls."""
    plan: Schedule = plans(f, *args, options=Options(cpu=cpu)).forward
    kernels = [kernel for step in plan.kernels for kernel in members(step) if kernel.contracts]
    return [kernel.choice.template for kernel in kernels if kernel.choice is not None], len(plan.calls)


def test_many_channels_at_few_positions_are_a_templates(cpu: Device) -> None:
    assert taken(convolution, image(1, 512, 7, 7), image(512, 512, 3, 3), cpu=cpu) == (["cpp_matmul"], 0)
    assert taken(convolution, image(1, 2048, 7, 7), image(512, 2048, 1, 1), cpu=cpu) == (["cpp_matmul"], 0)


def test_few_channels_at_many_positions_are_the_librarys(cpu: Device) -> None:
    assert taken(convolution, image(1, 64, 56, 56), image(64, 64, 3, 3), cpu=cpu) == ([], 1)


def test_one_tap_is_a_matmul_where_the_library_is_a_guest(cpu: Device) -> None:
    expected = (["cpp_matmul"], 0) if cpu is AMD else ([], 1)
    assert taken(convolution, image(1, 256, 56, 56), image(64, 256, 1, 1), cpu=cpu) == expected


def test_results_of_one_tap_cost_what_a_matmuls_do(cpu: Device) -> None:
    """The gradient of an image has many channels, made of few."""
    templates, _ = taken(gradients, image(1, 24, 56, 56), image(1, 144, 56, 56), image(24, 144, 1, 1), cpu=cpu)
    assert len(templates) == (2 if cpu is AMD else 1)


def test_a_concatenation_of_images_is_an_operand_of_one_tap(cpu: Device) -> None:
    """It is matrices one behind the other: bounds say which of them has a channel."""
    args = (image(1, 320, 16, 16), image(1, 320, 16, 16), image(320, 640, 1, 1))
    templates, calls = taken(lambda x, y, w: F.conv2d(torch.cat([x, y], 1), w), *args, cpu=cpu)
    assert (templates, calls) == (["cpp_matmul"], 0)


def test_windows_of_a_concatenation_are_the_librarys(cpu: Device) -> None:
    args = (image(1, 32, 56, 56), image(1, 32, 56, 56), image(64, 64, 3, 3))
    assert taken(lambda x, y, w: F.conv2d(torch.cat([x, y], 1), w, padding=1), *args, cpu=cpu) == ([], 1)


def test_patches_may_be_normalised_on_the_way(cpu: Device) -> None:
    def patches(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(F.layer_norm(x.permute(0, 2, 3, 1), (192,)).permute(0, 3, 1, 2), w, stride=2)

    assert taken(patches, image(1, 192, 28, 28), image(384, 192, 2, 2), cpu=cpu) == (["cpp_matmul"], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_guests_gradients_have_a_few_more_positions(dtype: torch.dtype, cpu: Device) -> None:
    args = (image(1, 320, 16, 16).to(dtype), image(1, 320, 16, 16).to(dtype), image(320, 320, 3, 3).to(dtype))
    templates, _ = taken(lambda dy, x, w: gradients(dy, x, w)[1], *args, cpu=cpu)
    assert bool(templates) == (cpu is AMD and dtype is torch.float32)


@pytest.mark.parametrize("taps", [1, 3])
def test_gradients_of_many_channels_at_few_positions_are_a_templates(taps: int, cpu: Device) -> None:
    args = (image(1, 512, 7, 7), image(1, 512, 7, 7), image(512, 512, taps, taps))
    assert taken(gradients, *args, cpu=cpu) == (["cpp_matmul", "cpp_matmul"], 0)


def test_gradients_at_many_positions_are_the_librarys_one_call(cpu: Device) -> None:
    assert taken(gradients, image(1, 64, 56, 56), image(1, 64, 56, 56), image(64, 64, 3, 3), cpu=cpu) == ([], 1)


@pytest.mark.parametrize(("channels", "side", "taps"), [(240, 28, 5), (384, 14, 7), (96, 56, 7)])
def test_gradients_of_depthwise_filters_are_a_templates(channels: int, side: int, taps: int, cpu: Device) -> None:
    args = (image(1, channels, side, side), image(1, channels, side, side), torch.empty(channels, 1, taps, taps))
    templates, _ = taken(gradients, *args, cpu=cpu)
    assert templates
    assert set(templates) == {"cpp_conv_direct"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_depthwise_convolutions_along_one_dimension_are_a_templates(dtype: torch.dtype, cpu: Device) -> None:
    def causal(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(x, w, padding=3, groups=x.shape[1])

    args = (torch.empty(1, 1536, 128, dtype=dtype), torch.empty(1536, 1, 4, dtype=dtype))
    assert taken(causal, *args, cpu=cpu) == ((["cpp_conv_contiguous"], 0) if dtype is torch.bfloat16 else ([], 1))
