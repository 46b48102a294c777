"""Convolutions as models have them: blocks of inference, and steps of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.conv_problems import channels_last

Function = Callable[..., Tensor]
bf16 = torch.bfloat16


@dataclass(frozen=True)
class Given:
    """An argument. `last`: channels are last in memory; `positive` numbers are variances."""

    shape: tuple[int, ...]
    last: bool = True
    positive: bool = False

    def make(self, device: str, seed: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        made = torch.randn(self.shape, generator=generator, device=device)
        made = made.abs() + 0.5 if self.positive else made
        if len(self.shape) > 2 and seed % 100:  # filters: results as large as what they are made of
            made = made / math.sqrt(math.prod(self.shape[1:]))
        made = made.to(bf16)
        return channels_last(made) if self.last and len(self.shape) > 2 else made

    def shrunk(self, by: int) -> Given:
        """With positions, and images, divided by about `by`."""
        if len(self.shape) < 3 or max(self.shape[2:]) < 14:
            return self
        return replace(self, shape=(max(1, self.shape[0] // by), self.shape[1], *(max(8, n // by) for n in self.shape[2:])))


@dataclass(frozen=True)
class Pattern:
    """`written` is what is compiled; a pattern that `trains` is timed with its backward pass; `quick`: a short run has it."""

    name: str
    written: Function
    inputs: tuple[Given, ...]
    trains: bool = False
    quick: bool = False

    def make(self, device: str, seed: int = 0) -> list[Tensor]:
        made = [one.make(device, 100 * seed + k) for k, one in enumerate(self.inputs)]
        return [one.requires_grad_() for one in made] if self.trains else made

    def shrunk(self, by: int) -> Pattern:
        return self if by == 1 else replace(self, inputs=tuple(one.shrunk(by) for one in self.inputs))


def image(*shape: int) -> Given:
    return Given(shape)


def filters(*shape: int) -> Given:
    return Given(shape)


def vectors(length: int, count: int) -> tuple[Given, ...]:
    return (Given((length,)),) * count


def statistics(length: int) -> tuple[Given, ...]:
    """Mean, variance, weight and bias of a batch norm."""
    return Given((length,)), Given((length,), positive=True), *vectors(length, 2)


# ---- inference ------------------------------------------------------------------------------------------------------


def norm(y: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(y, mean, var, weight, bias)


def conv_bn_relu(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu(norm(F.conv2d(x, w, padding=1), *stats))


def conv_bias_residual_relu(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b, padding=1) + r)


def pointwise_residual_relu(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w) + r)


def stem(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu(norm(F.conv2d(x, w, stride=2, padding=3), *stats))


def strided_bn_relu(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu(norm(F.conv2d(x, w, stride=2, padding=1), *stats))


def dilated_bn_relu(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu(norm(F.conv2d(x, w, padding=2, dilation=2), *stats))


def grouped_bn_relu(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu(norm(F.conv2d(x, w, padding=1, groups=x.shape[1] // w.shape[1]), *stats))


def depthwise_bn_relu6(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.relu6(norm(F.conv2d(x, w, padding=1, groups=x.shape[1]), *stats))


def depthwise_bn_silu(x: Tensor, w: Tensor, *stats: Tensor) -> Tensor:
    return F.silu(norm(F.conv2d(x, w, padding=2, groups=x.shape[1]), *stats))


def depthwise_layer_norm(x: Tensor, w: Tensor, b: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    y = F.conv2d(x, w, b, padding=3, groups=x.shape[1]).permute(0, 2, 3, 1)
    return F.gelu(F.layer_norm(y, (y.shape[-1],), gain, shift))


def convnext_block(x: Tensor, w: Tensor, b: Tensor, *more: Tensor) -> Tensor:
    gain, shift, up, down, scale = more
    y = F.conv2d(x, w, b, padding=3, groups=x.shape[1]).permute(0, 2, 3, 1)
    y = F.linear(F.gelu(F.linear(F.layer_norm(y, (y.shape[-1],), gain, shift), up)), down) * scale
    return x + y.permute(0, 3, 1, 2)


def transposed_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv_transpose2d(x, w, b, stride=2, padding=1))


def conv3d_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv3d(x, w, b, padding=1))


def causal_conv1d_silu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv1d(F.pad(x, (w.shape[-1] - 1, 0)), w, b, groups=x.shape[1]))


def group_norm_silu_conv(x: Tensor, w: Tensor, b: Tensor, r: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.conv2d(F.silu(F.group_norm(x, 32, gain, shift)), w, b, padding=1) + r


def conv_of_concat(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.conv2d(torch.cat((x, y), 1), w, b, padding=1))


def upsampled_conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.conv2d(F.interpolate(x, scale_factor=2.0), w, b, padding=1))


# ---- training -------------------------------------------------------------------------------------------------------


def trained_bn(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(y, None, None, weight, bias, training=True)


def trained_conv_bn_relu(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.relu(trained_bn(F.conv2d(x, w, padding=1), gain, shift))


def trained_depthwise(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    return F.silu(trained_bn(F.conv2d(x, w, padding=w.shape[-1] // 2, groups=x.shape[1]), gain, shift))


def trained_depthwise_norm(x: Tensor, w: Tensor, b: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    y = F.conv2d(x, w, b, padding=w.shape[-1] // 2, groups=x.shape[1]).permute(0, 2, 3, 1)
    return F.layer_norm(y, (y.shape[-1],), gain, shift)


def depthwise_filters(g: Tensor, x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
    """The gradient of depthwise filters alone, of two dimensions, or causal ones along one, of which a slice was taken."""
    taps, rank = w.shape[-1], w.dim() - 2
    causal = rank == 1
    cut = tuple(slice((n - 1) // stride + 1) for n in x.shape[2:])  # of shrunk images
    made, padding = (F.pad(g, (0, taps - 1)), taps - 1) if causal else (g[:, :, *cut], taps // 2)
    how = [stride] * rank, [padding] * rank, [1] * rank, False, [0] * rank, x.shape[1], [False, True, False]
    found: Tensor = torch.ops.aten.convolution_backward(made, x, w, None, *how)[1]
    return found


def strided_depthwise_filters(g: Tensor, x: Tensor, w: Tensor) -> Tensor:
    return depthwise_filters(g, x, w, stride=2)


def trained_causal_conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return causal_conv1d_silu(x, w, b)


def bottleneck(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, *norms: Tensor) -> Tensor:
    y = F.relu(trained_bn(F.conv2d(x, w0), *norms[:2]))
    y = F.relu(trained_bn(F.conv2d(y, w1, padding=1), *norms[2:4]))
    return F.relu(trained_bn(F.conv2d(y, w2), *norms[4:]) + x)


PATTERNS = (
    Pattern("conv3x3 bn relu 256", conv_bn_relu,
            (image(32, 256, 56, 56), filters(256, 256, 3, 3), *statistics(256)), quick=True),
    Pattern("conv3x3 bn relu 64", conv_bn_relu, (image(16, 64, 112, 112), filters(64, 64, 3, 3), *statistics(64)), quick=True),
    Pattern("conv3x3 bn relu 512", conv_bn_relu, (image(32, 512, 28, 28), filters(512, 512, 3, 3), *statistics(512))),
    Pattern("conv3x3 bias residual relu", conv_bias_residual_relu,
            (image(32, 128, 56, 56), filters(128, 128, 3, 3), *vectors(128, 1), image(32, 128, 56, 56))),
    Pattern("conv1x1 residual relu", pointwise_residual_relu,
            (image(32, 256, 56, 56), filters(256, 256, 1, 1), image(32, 256, 56, 56))),
    Pattern("stem", stem, (image(64, 3, 224, 224), filters(64, 3, 7, 7), *statistics(64)), quick=True),
    Pattern("conv3x3 stride 2", strided_bn_relu, (image(32, 256, 56, 56), filters(512, 256, 3, 3), *statistics(512))),
    Pattern("conv3x3 dilation 2", dilated_bn_relu, (image(16, 256, 56, 56), filters(256, 256, 3, 3), *statistics(256))),
    Pattern("conv3x3 of 32 groups", grouped_bn_relu, (image(32, 512, 28, 28), filters(512, 16, 3, 3), *statistics(512))),
    Pattern("depthwise 3x3 bn relu6", depthwise_bn_relu6,
            (image(64, 144, 56, 56), filters(144, 1, 3, 3), *statistics(144)), quick=True),
    Pattern("depthwise 5x5 bn silu", depthwise_bn_silu, (image(64, 240, 28, 28), filters(240, 1, 5, 5), *statistics(240))),
    Pattern("depthwise 7x7 layer_norm gelu", depthwise_layer_norm,
            (image(32, 96, 56, 56), filters(96, 1, 7, 7), *vectors(96, 3)), quick=True),
    Pattern("ConvNeXt block", convnext_block,
            (image(32, 96, 56, 56), filters(96, 1, 7, 7), *vectors(96, 3), Given((384, 96)), Given((96, 384)),
             *vectors(96, 1))),
    Pattern("transposed 4x4 stride 2", transposed_relu, (image(32, 256, 28, 28), filters(256, 128, 4, 4), *vectors(128, 1))),
    Pattern("conv3d 3x3x3", conv3d_relu, (image(4, 64, 16, 56, 56), filters(64, 64, 3, 3, 3), *vectors(64, 1)), quick=True),
    Pattern("causal conv1d silu", causal_conv1d_silu,
            (Given((8, 2048, 4096), last=False), Given((2048, 1, 4), last=False), *vectors(2048, 1)), quick=True),
    Pattern("causal conv1d silu, channels last", causal_conv1d_silu,
            (image(8, 2048, 4096), filters(2048, 1, 4), *vectors(2048, 1))),
    Pattern("silu(group_norm) conv3x3 residual", group_norm_silu_conv,
            (image(8, 320, 64, 64), filters(320, 320, 3, 3), *vectors(320, 1), image(8, 320, 64, 64), *vectors(320, 2))),
    Pattern("conv3x3 of a concat", conv_of_concat,
            (image(8, 320, 64, 64), filters(320, 640, 3, 3), image(8, 320, 64, 64), *vectors(320, 1))),
    Pattern("conv3x3 of an upsampled image", upsampled_conv,
            (image(8, 320, 32, 32), filters(320, 320, 3, 3), *vectors(320, 1))),
    Pattern("conv3x3 bn relu contiguous", conv_bn_relu,
            (Given((32, 128, 56, 56), last=False), Given((128, 128, 3, 3), last=False), *statistics(128))),
    Pattern("train: conv3x3 bn relu", trained_conv_bn_relu,
            (image(32, 128, 56, 56), filters(128, 128, 3, 3), *vectors(128, 2)), trains=True),
    Pattern("train: depthwise 3x3 bn silu", trained_depthwise,
            (image(32, 144, 56, 56), filters(144, 1, 3, 3), *vectors(144, 2)), trains=True),
    Pattern("train: causal conv1d silu", trained_causal_conv1d,
            (Given((8, 2048, 2048), last=False), Given((2048, 1, 4), last=False), *vectors(2048, 1)), trains=True),
    Pattern("train: causal conv1d silu, channels last", trained_causal_conv1d,
            (image(8, 1536, 2048), filters(1536, 1, 4), *vectors(1536, 1)), trains=True),
    Pattern("train: depthwise 5x5 bn silu", trained_depthwise,
            (image(64, 240, 28, 28), filters(240, 1, 5, 5), *vectors(240, 2)), trains=True),
    Pattern("train: depthwise 7x7 layer_norm", trained_depthwise_norm,
            (image(32, 96, 56, 56), filters(96, 1, 7, 7), *vectors(96, 3)), trains=True),
    Pattern("filters: causal conv1d", depthwise_filters,
            (Given((8, 1536, 2048), last=False), Given((8, 1536, 2048), last=False), Given((1536, 1, 4), last=False))),
    Pattern("filters: causal conv1d, channels last", depthwise_filters,
            (image(8, 1536, 2048), image(8, 1536, 2048), filters(1536, 1, 4))),
    Pattern("filters: depthwise 3x3", depthwise_filters,
            (image(32, 144, 56, 56), image(32, 144, 56, 56), filters(144, 1, 3, 3))),
    Pattern("filters: depthwise 3x3 stride 2", strided_depthwise_filters,
            (image(32, 144, 56, 56), image(32, 144, 112, 112), filters(144, 1, 3, 3))),
    Pattern("filters: depthwise 3x3 contiguous", depthwise_filters,
            (Given((32, 144, 56, 56), last=False), Given((32, 144, 56, 56), last=False), Given((144, 1, 3, 3), last=False))),
    Pattern("filters: depthwise 3x3 late contiguous", depthwise_filters,
            (Given((32, 960, 7, 7), last=False), Given((32, 960, 7, 7), last=False), Given((960, 1, 3, 3), last=False))),
    Pattern("filters: depthwise 5x5", depthwise_filters,
            (image(64, 240, 28, 28), image(64, 240, 28, 28), filters(240, 1, 5, 5))),
    Pattern("filters: depthwise 7x7", depthwise_filters,
            (image(32, 96, 56, 56), image(32, 96, 56, 56), filters(96, 1, 7, 7))),
    Pattern("filters: depthwise 7x7 late", depthwise_filters,
            (image(32, 768, 7, 7), image(32, 768, 7, 7), filters(768, 1, 7, 7))),
    Pattern("filters: depthwise 7x7 contiguous", depthwise_filters,
            (Given((32, 96, 56, 56), last=False), Given((32, 96, 56, 56), last=False), Given((96, 1, 7, 7), last=False))),
    Pattern("train: silu(group_norm) conv3x3", group_norm_silu_conv,
            (image(8, 320, 32, 32), filters(320, 320, 3, 3), *vectors(320, 1), image(8, 320, 32, 32), *vectors(320, 2)),
            trains=True),
    Pattern("train: bottleneck", bottleneck,
            (image(16, 256, 56, 56), filters(64, 256, 1, 1), filters(64, 64, 3, 3), filters(256, 64, 1, 1),
             *vectors(64, 4), *vectors(256, 2)), trains=True, quick=True),
)  # fmt: skip
BY_NAME = {one.name: one for one in PATTERNS}
