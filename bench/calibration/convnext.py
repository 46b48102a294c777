"""Layers of ConvNeXt-T at 224 x 224: depthwise 7x7 with a norm of channels, an MLP with a layer scale, patches between
stages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, image, kernel, vector, weight

MODEL = "ConvNeXt"
STAGES = ((56, 96), (28, 192), (14, 384), (7, 768))


def problems(size: Size) -> Iterator[Problem]:
    n, side, first = size.batch, size.of(224), size.of(96)
    args = (image(n, 3, side, side), kernel(first, 3, 4, 4), vector(first))
    yield Problem(MODEL, "stem 4x4 in steps of 4", "conv-large", partial(b.conv, stride=4), args)
    for full, width in STAGES:
        side, c = size.of(full, 7), size.of(width)
        yield from _block(n, side, c)
    for full, width in STAGES[:3]:
        side, c = size.of(full, 7) // 2 * 2, size.of(width)
        args = (image(n, c, side, side), vector(c), vector(c), kernel(2 * c, c, 2, 2), vector(2 * c))
        yield Problem(MODEL, f"norm + 2x2 in steps of 2, {c} at {side}", "conv-large", b.patches_of_norm, args)
    for full, width in (STAGES[0], STAGES[2]):
        yield from _backward(n, size.of(full, 7), size.of(width))


def _block(n: int, side: int, c: int) -> Iterator[Problem]:
    x, y = image(n, c, side, side), activation(n, side, side, c)
    args: tuple[Arg, ...] = (x, kernel(c, 1, 7, 7), vector(c), vector(c), vector(c))
    yield Problem(MODEL, f"depthwise 7x7 + norm, {c} at {side}", "depthwise", partial(b.depthwise_norm, padding=3), args)
    args = (y, weight(4 * c, c), vector(4 * c))
    yield Problem(MODEL, f"fc1 + gelu, {c} at {side}", "matmul", partial(b.linear_act, act=b.gelu), args)
    args = (y, weight(4 * c, c), vector(4 * c), weight(c, 4 * c), vector(c), vector(c), x)
    yield Problem(MODEL, f"MLP + scale + residual, {c} at {side}", "matmul", b.convnext_mlp, args)


def _backward(n: int, side: int, c: int) -> Iterator[Problem]:
    x, y, h = image(n, c, side, side), activation(n, side, side, c), activation(n, side, side, 4 * c)
    args: tuple[Arg, ...] = (y, weight(c, 4 * c), h)
    gelu = partial(b.act_input_gradient, act=b.gelu)
    yield Problem(MODEL, f"fc2 input gradient + gelu', {c} at {side}", "matmul-backward", gelu, args, "backward")
    args = (y, y, h, weight(4 * c, c), weight(c, 4 * c))
    whole = partial(b.mlp_backward_of_rows, act=b.gelu)
    yield Problem(MODEL, f"MLP backward, {c} at {side}", "matmul-backward", whole, args, "backward")
    args = (x, x, kernel(c, 1, 7, 7))
    depthwise = partial(b.conv_backward, padding=3, groups=c)
    yield Problem(MODEL, f"depthwise 7x7 both gradients, {c} at {side}", "conv-backward", depthwise, args, "backward")
    args = (y, y, vector(c), vector(c), y)
    yield Problem(MODEL, f"norm backward, {c} at {side}", "norm", b.layer_norm_backward, args, "backward")
