"""Layers of ViT-B/16 at 224 x 224: 197 tokens an image, a length that no tile divides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, image, kernel, vector, weight

MODEL = "ViT-B"


def problems(size: Size) -> Iterator[Problem]:
    width, heads, side = size.of(768), size.of(12, 2), size.of(224)
    tokens = (side // 16) ** 2 + 1
    x = activation(size.batch, tokens, width)
    yield Problem(
        MODEL,
        "patches",
        "conv-large",
        partial(b.patches, patch=16),
        (image(size.batch, 3, side, side), kernel(width, 3, 16, 16), vector(width)),
    )
    yield from _forward(size, x, heads)
    yield from _backward(size, x, heads)


def _forward(size: Size, x: Arg, heads: int) -> Iterator[Problem]:
    n, tokens, width = x.shape
    inner = 4 * width
    norm = (vector(width), vector(width))
    yield Problem(MODEL, "norm + qkv", "matmul", b.norm_linear, (x, *norm, weight(3 * width, width), vector(3 * width)))
    yield Problem(
        MODEL, "qkv to heads", "matmul", partial(b.qkv_fused, heads=heads), (x, weight(3 * width, width), vector(3 * width))
    )
    q = activation(n, heads, tokens, width // heads)
    yield Problem(MODEL, "softmax(q k^T)", "attention", b.scores_softmax, (q, q))
    yield Problem(MODEL, "p v", "attention", b.values_merged, (activation(n, heads, tokens, tokens), q))
    yield Problem(MODEL, "attention", "attention", b.attention, (q, q, q))
    yield Problem(
        MODEL, "heads + projection + residual", "matmul", b.merged_linear_residual, (q, weight(width, width), vector(width), x)
    )
    yield Problem(MODEL, "fc1 + gelu", "matmul", partial(b.linear_act, act=b.gelu), (x, weight(inner, width), vector(inner)))
    yield Problem(
        MODEL,
        "fc2 + residual",
        "matmul",
        b.linear_residual,
        (activation(n, tokens, inner), weight(width, inner), vector(width), x),
    )
    args = (x, *norm, weight(inner, width), vector(inner), weight(width, inner), vector(width))
    yield Problem(MODEL, "norm + MLP + residual", "matmul", partial(b.norm_mlp, act=b.gelu), args)
    yield Problem(MODEL, "residual + norm", "norm", b.residual_layer_norm, (x, x, *norm))
    yield Problem(MODEL, "head", "skinny-matmul", b.linear_bias, (activation(n, width), weight(1000, width), vector(1000)))


def _backward(size: Size, x: Arg, heads: int) -> Iterator[Problem]:
    n, tokens, width = x.shape
    inner = 4 * width
    h = activation(n, tokens, inner)
    act = partial(b.act_input_gradient, act=b.gelu)
    yield Problem(MODEL, "fc2 input gradient + gelu'", "matmul-backward", act, (x, weight(width, inner), h), "backward")
    yield Problem(MODEL, "fc2 weight and bias gradient", "matmul-backward", b.weight_bias_gradient, (x, h), "backward")
    norm = (vector(width), vector(width))
    yield Problem(
        MODEL,
        "fc1 input gradient + norm backward",
        "matmul-backward",
        b.norm_input_gradient,
        (h, weight(inner, width), x, *norm),
        "backward",
    )
    yield Problem(MODEL, "layer norm backward + residual", "norm", b.layer_norm_backward, (x, x, *norm, x), "backward")
    q, p = activation(n, heads, tokens, width // heads), activation(n, heads, tokens, tokens)
    yield Problem(MODEL, "attention backward", "attention-backward", b.attention_backward, (q, q, q, q, p), "backward")
