"""Layers of Whisper-small: two 1-d convolutions over a spectrogram, 1500 frames, and a decoder of few tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, indices, kernel, vector, weight

MODEL, BANDS, VOCABULARY = "Whisper", 80, 51865


def problems(size: Size) -> Iterator[Problem]:
    n = 4 if size.name == "gpu" else 1
    frames = {"gpu": 1500, "cpu": 300, "tiny": 30}[size.name]
    width, heads = size.of(768), size.of(12, 2)
    yield from _encoder(n, frames, width, heads)
    yield from _decoder(n, frames, width, heads, VOCABULARY if size.name == "gpu" else 5187)
    yield from _backward(n, frames, width, heads)


def _encoder(n: int, frames: int, width: int, heads: int) -> Iterator[Problem]:
    x, inner = activation(n, frames, width), 4 * width
    norm = (vector(width), vector(width))
    args: tuple[Arg, ...] = (activation(n, BANDS, 2 * frames), kernel(width, BANDS, 3), vector(width))
    yield Problem(MODEL, "first conv1d + gelu", "conv-large", partial(b.conv1d_gelu, stride=1), args)
    args = (activation(n, width, 2 * frames), kernel(width, width, 3), vector(width))
    yield Problem(MODEL, "second conv1d stride 2 + gelu", "conv-large", partial(b.conv1d_gelu, stride=2), args)
    args = (x, weight(width, width), vector(width), weight(width, width), vector(width), weight(width, width), vector(width))
    yield Problem(MODEL, "q, k, v with bias", "matmul", b.qkv_bias, args)
    q = activation(n, heads, frames, width // heads)
    yield Problem(MODEL, "softmax(q k^T)", "attention", b.scores_softmax, (q, q))
    yield Problem(MODEL, "p v", "attention", b.values_merged, (activation(n, heads, frames, frames), q))
    yield Problem(MODEL, "norm + fc1", "matmul", b.norm_linear, (x, *norm, weight(inner, width), vector(inner)))
    yield Problem(
        MODEL,
        "fc2 + residual",
        "matmul",
        b.linear_residual,
        (activation(n, frames, inner), weight(width, inner), vector(width), x),
    )
    yield Problem(MODEL, "residual + norm", "norm", b.residual_layer_norm, (x, x, *norm))


def _decoder(n: int, frames: int, width: int, heads: int, vocabulary: int) -> Iterator[Problem]:
    q, k = activation(n, heads, 1, width // heads), activation(n, heads, frames, width // heads)
    yield Problem(MODEL, "one token's look at the encoder", "attention", b.attention_decode, (q, k, k))
    x, inner = activation(n, width), 4 * width
    norm = (vector(width), vector(width))
    args: tuple[Arg, ...] = (x, *norm, weight(inner, width), vector(inner), weight(width, inner), vector(width))
    yield Problem(MODEL, f"norm + MLP + residual of {n}", "skinny-matmul", partial(b.norm_mlp, act=b.gelu), args)
    yield Problem(MODEL, f"logits of {n}", "skinny-matmul", b.linear, (x, weight(vocabulary, width)))
    tokens = indices(vocabulary, n, 1)
    yield Problem(
        MODEL, "embedding of a token", "gather", b.embedding_sum, (weight(vocabulary, width), tokens, activation(1, width))
    )


def _backward(n: int, frames: int, width: int, heads: int) -> Iterator[Problem]:
    x, h = activation(n, frames, width), activation(n, frames, 4 * width)
    args: tuple[Arg, ...] = (x, weight(width, 4 * width), h)
    gelu = partial(b.act_input_gradient, act=b.gelu)
    yield Problem(MODEL, "fc2 input gradient + gelu'", "matmul-backward", gelu, args, "backward")
    yield Problem(MODEL, "fc1 weight and bias gradient", "matmul-backward", b.weight_bias_gradient, (h, x), "backward")
    args = (activation(n, width, frames), activation(n, width, 2 * frames), kernel(width, width, 3))
    yield Problem(MODEL, "second conv1d's gradients", "conv-backward", b.conv1d_backward, args, "backward")
    q, p = activation(n, heads, frames, width // heads), activation(n, heads, frames, frames)
    yield Problem(MODEL, "gradient of v", "attention-backward", b.v_gradient, (p, q), "backward")
