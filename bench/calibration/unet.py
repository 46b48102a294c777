"""Layers of the U-Net of a latent diffusion model: residual blocks with group norms and a time embedding, attention over
pixels."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, image, kernel, vector, weight

MODEL = "U-Net"
STAGES = ((64, 320), (32, 640), (16, 1280))
GROUPS, HEADS, TEXT = 32, 8, 77


def problems(size: Size) -> Iterator[Problem]:
    n = 4 if size.name == "gpu" else 1
    for full, width in STAGES:
        side, c = _scaled(size, full, width)
        yield from _residual_block(n, side, c)
        yield from _transformer(n, side, c)
    side, c = _scaled(size, *STAGES[1])
    yield from _between(n, side, c)
    yield from _backward(n, side, c)


def _scaled(size: Size, side: int, width: int) -> tuple[int, int]:
    if size.name == "gpu":
        return side, width
    return (side // 2, width // 2) if size.name == "cpu" else (8, width // 5)


def _residual_block(n: int, side: int, c: int) -> Iterator[Problem]:
    x, at = image(n, c, side, side), f"{c} at {side}"
    conv = (kernel(c, c, 3, 3), vector(c))
    norm = (vector(c), vector(c))
    yield Problem(MODEL, f"3x3 + time embedding, {at}", "conv3x3", b.conv_plus_embedding, (x, *conv, activation(n, c)))
    yield Problem(MODEL, f"3x3 + residual, {at}", "conv3x3", partial(b.conv_residual, padding=1), (x, *conv, x))
    args: tuple[Arg, ...] = (x, *norm, *conv)
    yield Problem(MODEL, f"group norm + silu + 3x3, {at}", "conv3x3", partial(b.group_norm_silu_conv, groups=GROUPS), args)
    yield Problem(MODEL, f"group norm + silu, {at}", "norm", partial(b.group_norm_silu, groups=GROUPS), (x, *norm))


def _transformer(n: int, side: int, c: int) -> Iterator[Problem]:
    tokens, at = side * side, f"{c} at {side}"
    x = activation(n, tokens, c)
    norm = (vector(c), vector(c))
    yield Problem(MODEL, f"norm + q, {at}", "matmul", b.norm_linear, (x, *norm, weight(c, c), vector(c)))
    args: tuple[Arg, ...] = (x, weight(8 * c, c), vector(8 * c))
    yield Problem(MODEL, f"GEGLU, {at}", "matmul", b.geglu_fused, args)
    q, k = activation(n, HEADS, tokens, c // HEADS), activation(n, HEADS, TEXT, c // HEADS)
    yield Problem(MODEL, f"attention to the text, {at}", "attention", b.attention, (q, k, k))
    if tokens <= 1024:
        yield Problem(MODEL, f"attention, {at}", "attention", b.attention, (q, q, q))
    args = (q, weight(c, c), vector(c), x)
    yield Problem(MODEL, f"heads + projection + residual, {at}", "matmul", b.merged_linear_residual, args)


def _between(n: int, side: int, c: int) -> Iterator[Problem]:
    x = image(n, c, side, side)
    args: tuple[Arg, ...] = (x, kernel(c, c, 3, 3), vector(c))
    yield Problem(MODEL, f"upsample + 3x3, {c} at {side}", "conv3x3", b.upsample_conv, args)
    yield Problem(MODEL, f"3x3 stride 2, {c} at {side}", "conv3x3", partial(b.conv, stride=2, padding=1), args)
    args = (x, x, kernel(c, 2 * c, 1, 1), vector(c))
    yield Problem(MODEL, f"cat + 1x1, {c} at {side}", "conv1x1", b.cat_conv, args)
    args = (x, x, vector(2 * c), vector(2 * c))
    yield Problem(MODEL, f"cat + group norm + silu, {c} at {side}", "norm", partial(b.cat_group_norm_silu, groups=GROUPS), args)
    args = (activation(n, 320), weight(1280, 320), vector(1280), weight(1280, 1280), vector(1280))
    yield Problem(MODEL, "time embedding", "skinny-matmul", partial(b.mlp, act=F.silu), args)


def _backward(n: int, side: int, c: int) -> Iterator[Problem]:
    x = image(n, c, side, side)
    args: tuple[Arg, ...] = (x, x, kernel(c, c, 3, 3))
    both = partial(b.conv_backward, padding=1, bias=True)
    yield Problem(MODEL, f"3x3 all gradients, {c} at {side}", "conv-backward", both, args, "backward")
    yield Problem(
        MODEL,
        f"3x3 input gradient, {c} at {side}",
        "conv-backward",
        partial(b.conv_input_gradient, padding=1),
        args,
        "backward",
    )
    yield Problem(
        MODEL,
        f"3x3 weight gradient, {c} at {side}",
        "conv-backward",
        partial(b.conv_weight_gradient, padding=1),
        args,
        "backward",
    )
    args = (x, x, vector(c), vector(c))
    backward = partial(b.group_norm_silu_backward, groups=GROUPS)
    yield Problem(MODEL, f"group norm + silu backward, {c} at {side}", "norm", backward, args, "backward")
