"""Layers of MobileNetV3-Large at 224 x 224: hard swish, strides in the depthwise convolution, a head of 1x1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, image, kernel, vector, weight

MODEL = "MobileNetV3"
# Side, channels of the block, channels inside, window, stride.
BLOCKS = ((56, 24, 72, 5, 2), (28, 40, 240, 3, 2), (14, 112, 672, 5, 1), (7, 160, 960, 5, 1))


def problems(size: Size) -> Iterator[Problem]:
    n, side = size.batch, size.of(224)
    stem = partial(b.conv_act, act=F.hardswish, stride=2, padding=1)
    yield Problem(
        MODEL, "stem 3x3 stride 2 + hard swish", "conv3x3", stem, (image(n, 3, side, side), kernel(16, 3, 3, 3), vector(16))
    )
    for full, c, inner, window, stride in BLOCKS:
        yield from _block(n, size.of(full, 7), c, inner, window, stride)
    yield from _head(n)


def _block(n: int, side: int, c: int, inner: int, window: int, stride: int) -> Iterator[Problem]:
    x, h = image(n, c, side, side), image(n, inner, side, side)
    at = f"{c} to {inner} at {side}"
    args: tuple[Arg, ...] = (x, kernel(inner, c, 1, 1), vector(inner))
    yield Problem(MODEL, f"expand 1x1 + hard swish, {at}", "conv1x1", partial(b.conv_act, act=F.hardswish), args)
    args = (h, kernel(inner, 1, window, window), vector(inner))
    depthwise = partial(b.depthwise_act, act=F.hardswish, stride=stride, padding=window // 2)
    yield Problem(MODEL, f"depthwise {window}x{window} stride {stride} + hard swish, {at}", "depthwise", depthwise, args)
    args = (h, kernel(c, inner, 1, 1), vector(c), x)
    yield Problem(MODEL, f"project 1x1 + residual, {at}", "conv1x1", b.conv_residual, args)
    args = (x, h, kernel(c, inner, 1, 1))
    yield Problem(MODEL, f"project 1x1 both gradients, {at}", "conv-backward", b.conv_backward, args, "backward")


def _head(n: int) -> Iterator[Problem]:
    args: tuple[Arg, ...] = (activation(n, 960), weight(1280, 960), vector(1280))
    yield Problem(MODEL, "classifier's first layer + hard swish", "skinny-matmul", partial(b.linear_act, act=F.hardswish), args)
    args = (activation(n, 1280), weight(1000, 1280), vector(1000))
    yield Problem(MODEL, "classifier's second layer", "skinny-matmul", b.linear_bias, args)
