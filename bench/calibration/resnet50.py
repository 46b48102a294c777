"""Layers of ResNet-50 at 224 x 224: a bottleneck's three convolutions in each stage, the stem, the classifier, and training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, image, kernel, variance, vector, weight

# Sides of the images in the stages after the first, and the narrow widths of their bottlenecks.
STAGES = ((56, 64), (28, 128), (14, 256), (7, 512))


def problems(size: Size) -> Iterator[Problem]:
    yield from _inference(size)
    yield from _training(size)


def _norm(width: int) -> tuple[Arg, ...]:
    return vector(width), variance(width), vector(width), vector(width)


def _inference(size: Size) -> Iterator[Problem]:
    n = size.batch
    side = size.of(224)
    stem = partial(b.conv_act, act=F.relu, stride=2, padding=3)
    yield Problem(
        "ResNet-50", "stem 7x7 + relu", "conv-large", stem, (image(n, 3, side, side), kernel(64, 3, 7, 7), vector(64))
    )
    yield Problem("ResNet-50", "max pool", "reduction", b.max_pool, (image(n, 64, side // 2, side // 2),))
    for full, narrow in STAGES:
        side, mid, wide = size.of(full, 7), size.of(narrow), size.of(4 * narrow)
        big, small = image(n, wide, side, side), image(n, mid, side, side)
        relu = partial(b.conv_act, act=F.relu)
        yield Problem(
            "ResNet-50", f"1x1 {wide} to {mid} + relu at {side}", "conv1x1", relu, (big, kernel(mid, wide, 1, 1), vector(mid))
        )
        three = partial(b.conv_act, act=F.relu, padding=1)
        yield Problem(
            "ResNet-50", f"3x3 {mid} + relu at {side}", "conv3x3", three, (small, kernel(mid, mid, 3, 3), vector(mid))
        )
        joined = partial(b.conv_bn_residual, act=F.relu)
        args = (small, kernel(wide, mid, 1, 1), *_norm(wide), big)
        yield Problem("ResNet-50", f"1x1 {mid} to {wide} + bn + residual + relu at {side}", "conv1x1", joined, args)
    for full, narrow in STAGES[:3]:
        side, mid = size.of(full, 7), size.of(2 * narrow)
        small = image(n, mid, side, side)
        down = partial(b.conv_bn_act, act=F.relu, stride=2, padding=1)
        args = (small, kernel(mid, mid, 3, 3), *_norm(mid))
        yield Problem("ResNet-50", f"3x3 {mid} stride 2 + bn + relu at {side}", "conv3x3", down, args)
    side, mid = size.of(28, 7), size.of(128)
    args = (image(n, mid, side, side), *_norm(mid), kernel(mid, mid, 3, 3))
    yield Problem(
        "ResNet-50",
        f"bn + relu in front of 3x3 {mid} at {side}",
        "conv3x3",
        partial(b.bn_act_conv, act=F.relu, padding=1),
        args,
    )
    side, wide = size.of(56, 7), size.of(256)
    short = partial(b.conv, stride=2)
    yield Problem(
        "ResNet-50",
        f"shortcut 1x1 stride 2 at {side}",
        "conv1x1",
        short,
        (image(n, wide, side, side), kernel(2 * wide, wide, 1, 1)),
    )
    wide = size.of(2048)
    args = (image(n, wide, 7, 7), weight(1000, wide), vector(1000))
    yield Problem("ResNet-50", "mean + classifier", "skinny-matmul", b.pooled_linear, args)
    side, wide = size.of(56, 7), size.of(256)
    yield Problem(
        "ResNet-50", "residual + relu", "pointwise", b.add_relu, (image(n, wide, side, side), image(n, wide, side, side))
    )


def _training(size: Size) -> Iterator[Problem]:
    n = size.batch
    for full, narrow in STAGES:
        side, mid, wide = size.of(full, 7), size.of(narrow), size.of(4 * narrow)
        big, small = image(n, wide, side, side), image(n, mid, side, side)
        args = (small, big, kernel(mid, wide, 1, 1))
        yield Problem(
            "ResNet-50", f"1x1 {wide} to {mid} both gradients at {side}", "conv-backward", b.conv_backward, args, "backward"
        )
        three = partial(b.conv_backward, padding=1)
        args = (small, small, kernel(mid, mid, 3, 3))
        yield Problem("ResNet-50", f"3x3 {mid} both gradients at {side}", "conv-backward", three, args, "backward")
        yield from _between_norms(mid, wide, small, big)
    side, mid, wide = size.of(56, 7), size.of(64), size.of(256)
    big, small = image(n, wide, side, side), image(n, mid, side, side)
    step = partial(b.norm_conv_backward, act=F.relu, padding=1)
    args = (small, small, vector(mid), vector(mid), small, kernel(mid, mid, 3, 3))
    yield Problem("ResNet-50", f"relu, bn and 3x3 {mid} backward at {side}", "conv-backward", step, args, "backward")
    args = (big, big, vector(wide), vector(wide), small, kernel(wide, mid, 1, 1))
    step = partial(b.norm_conv_backward, act=F.relu)
    yield Problem("ResNet-50", f"relu, bn and 1x1 {mid} to {wide} backward at {side}", "conv-backward", step, args, "backward")
    yield Problem(
        "ResNet-50",
        f"3x3 {mid} and statistics at {side}",
        "conv3x3",
        partial(b.conv_statistics, padding=1),
        (small, kernel(mid, mid, 3, 3)),
    )
    side, mid = size.of(28, 7), size.of(128)
    args = (image(n, mid, side, side), image(n, mid, 2 * side, 2 * side), kernel(mid, mid, 3, 3))
    down = partial(b.conv_backward, stride=2, padding=1)
    yield Problem("ResNet-50", f"3x3 {mid} stride 2 both gradients at {2 * side}", "conv-backward", down, args, "backward")
    wide = size.of(2048)
    args = (activation(n, 1000), activation(n, wide), weight(1000, wide))
    yield Problem("ResNet-50", "classifier's gradients", "matmul-backward", b.linear_backward, args, "backward")
    args = (big, big, vector(big.shape[1]), vector(big.shape[1]))
    yield Problem("ResNet-50", "relu and bn backward", "reduction", partial(b.norm_act_backward, act=F.relu), args, "backward")


def _between_norms(mid: int, wide: int, small: Arg, big: Arg) -> Iterator[Problem]:
    """Backward through the last convolution of a bottleneck, and through the first one of the next, which may be in the next
    stage."""
    side, step = small.shape[-1], b.conv_between_norms_backward
    args = (big, big, vector(wide), _floats(wide), small, kernel(wide, mid, 1, 1), small, _floats(mid))
    yield Problem("ResNet-50", f"1x1 {mid} to {wide} between norms backward at {side}", "conv-backward", step, args, "backward")
    for made, x in ((mid, small), (2 * mid, image(small.shape[0], 2 * mid, side, side))):
        args = (x, x, vector(made), _floats(made), big, kernel(made, wide, 1, 1), big, _floats(wide), big)
        name = f"1x1 {wide} to {made} between norms backward at {side}"
        yield Problem("ResNet-50", name, "conv-backward", step, args, "backward")


def _floats(length: int) -> Arg:
    return Arg((length,), dtype=torch.float32)
