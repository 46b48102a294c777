"""Layers of EfficientNet-B0 at 224 x 224: inverted bottlenecks with few channels, squeeze and excite, SiLU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, image, kernel, variance, vector

MODEL = "EfficientNet"
# Side, channels of the block, channels inside, window, and channels of squeeze and excite.
BLOCKS = ((56, 24, 144, 3, 6), (28, 40, 240, 5, 10), (14, 112, 672, 5, 28), (7, 192, 1152, 3, 48))


def problems(size: Size) -> Iterator[Problem]:
    n, side = size.batch, size.of(224)
    stem = partial(b.conv_act, act=F.silu, stride=2, padding=1)
    yield Problem(
        MODEL, "stem 3x3 stride 2 + silu", "conv3x3", stem, (image(n, 3, side, side), kernel(32, 3, 3, 3), vector(32))
    )
    for full, c, inner, window, few in BLOCKS:
        yield from _block(n, size.of(full, 7), c, inner, window, few)
    for full, c, inner, window, _ in BLOCKS[1:3]:
        yield from _backward(n, size.of(full, 7), c, inner, window)


def _norm(width: int) -> tuple[Arg, ...]:
    return vector(width), variance(width), vector(width), vector(width)


def _block(n: int, side: int, c: int, inner: int, window: int, few: int) -> Iterator[Problem]:
    x, h = image(n, c, side, side), image(n, inner, side, side)
    at = f"{c} to {inner} at {side}"
    args: tuple[Arg, ...] = (x, kernel(inner, c, 1, 1), *_norm(inner))
    yield Problem(MODEL, f"expand 1x1 + bn + silu, {at}", "conv1x1", partial(b.conv_bn_act, act=F.silu), args)
    args = (h, kernel(inner, 1, window, window), vector(inner))
    depthwise = partial(b.depthwise_act, act=F.silu, stride=1, padding=window // 2)
    yield Problem(MODEL, f"depthwise {window}x{window} + silu, {at}", "depthwise", depthwise, args)
    args = (h, kernel(few, inner, 1, 1), vector(few), kernel(inner, few, 1, 1), vector(inner))
    yield Problem(MODEL, f"squeeze and excite, {at}", "reduction", partial(b.squeeze_excite, act=F.silu), args)
    args = (h, image(n, inner, 1, 1), kernel(c, inner, 1, 1), vector(c), x)
    yield Problem(MODEL, f"scale + project 1x1 + residual, {at}", "conv1x1", b.scaled_conv, args)


def _backward(n: int, side: int, c: int, inner: int, window: int) -> Iterator[Problem]:
    x, h = image(n, c, side, side), image(n, inner, side, side)
    at = f"{c} to {inner} at {side}"
    args: tuple[Arg, ...] = (x, h, kernel(c, inner, 1, 1))
    yield Problem(MODEL, f"project 1x1 both gradients, {at}", "conv-backward", b.conv_backward, args, "backward")
    args = (h, h, vector(inner), vector(inner), x, kernel(inner, c, 1, 1))
    step = partial(b.norm_conv_backward, act=F.silu)
    yield Problem(MODEL, f"silu, bn and expand 1x1 backward, {at}", "conv-backward", step, args, "backward")
    args = (h, h, kernel(inner, 1, window, window))
    depthwise = partial(b.conv_backward, padding=window // 2, groups=inner)
    yield Problem(MODEL, f"depthwise {window}x{window} both gradients, {at}", "conv-backward", depthwise, args, "backward")
