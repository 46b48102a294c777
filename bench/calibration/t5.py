"""Layers of T5-base: a position bias in attention, RMS norms, GEGLU, and a decoder that looks at an encoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch.nn.functional as F

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, vector, weight

MODEL = "T5"


def problems(size: Size) -> Iterator[Problem]:
    length, width, heads, inner = min(512, size.length), size.of(768), size.of(12, 2), size.of(2048)
    n = max(1, size.tokens // length)
    x = activation(n, length, width)
    yield from _forward(x, heads, inner)
    yield from _decode(n, width, heads, inner, length)
    yield from _backward(x, heads, inner)


def _forward(x: Arg, heads: int, inner: int) -> Iterator[Problem]:
    n, length, width = x.shape
    g, square = vector(width), weight(width, width)
    q = activation(n, heads, length, width // heads)
    bias = activation(1, heads, length, length)
    yield Problem(MODEL, "norm + q", "matmul", b.rms_linear, (x, g, square))
    yield Problem(MODEL, "q, k, v", "matmul", b.qkv_apart, (x, square, square, square))
    yield Problem(MODEL, "softmax(q k^T + bias)", "attention", b.scores_bias_softmax, (q, q, bias))
    yield Problem(MODEL, "p v, heads merged", "attention", b.values_merged, (activation(n, heads, length, length), q))
    yield Problem(MODEL, "heads + projection + residual", "matmul", b.merged_linear, (q, square, x))
    yield Problem(MODEL, "fc1 + relu", "matmul", partial(b.linear_act_no_bias, act=F.relu), (x, weight(inner, width)))
    yield Problem(MODEL, "GEGLU", "matmul", b.geglu_in, (x, weight(inner, width), weight(inner, width)))
    yield Problem(
        MODEL, "fc2 + residual", "matmul", b.linear_residual_no_bias, (activation(n, length, inner), weight(width, inner), x)
    )
    yield Problem(MODEL, "residual + norm", "norm", b.residual_rms_norm, (x, x, g))


def _decode(n: int, width: int, heads: int, inner: int, length: int) -> Iterator[Problem]:
    square, x = weight(width, width), activation(n, width)
    yield Problem(MODEL, f"q, k, v of {n}", "skinny-matmul", b.qkv_apart, (x, square, square, square))
    yield Problem(MODEL, f"GEGLU of {n}", "skinny-matmul", b.geglu_in, (x, weight(inner, width), weight(inner, width)))
    q, k = activation(n, heads, 1, width // heads), activation(n, heads, length, width // heads)
    yield Problem(MODEL, "one token's look at the encoder", "attention", b.attention_decode, (q, k, k))


def _backward(x: Arg, heads: int, inner: int) -> Iterator[Problem]:
    n, length, width = x.shape
    h = activation(n, length, inner)
    kind = "matmul-backward"
    args: tuple[Arg, ...] = (x, weight(width, inner), h)
    yield Problem(MODEL, "fc2 input gradient + relu'", kind, partial(b.act_input_gradient, act=F.relu), args, "backward")
    yield Problem(MODEL, "fc1 weight gradient", kind, b.weight_gradient, (h, x), "backward")
    yield Problem(
        MODEL,
        "fc1 input gradient + norm backward",
        kind,
        b.rms_input_gradient,
        (h, weight(inner, width), x, vector(width)),
        "backward",
    )
    q, p = activation(n, heads, length, width // heads), activation(n, heads, length, length)
    yield Problem(MODEL, "scores' gradient", "attention-backward", b.scores_backward, (q, q, p), "backward")
    yield Problem(MODEL, "norm backward + residual", "norm", b.rms_norm_backward, (x, x, vector(width), x), "backward")
