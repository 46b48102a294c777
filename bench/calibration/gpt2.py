"""Layers of GPT-2 at 1024 tokens: matrices stored input by output, tanh-gelu, tied embeddings of 50257 rows, and decoding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, indices, vector, weight

MODEL, VOCABULARY = "GPT-2", 50257


def problems(size: Size) -> Iterator[Problem]:
    width, heads = size.of(768), size.of(12, 2)
    n = max(1, size.tokens // size.length)
    x = activation(n, size.length, width)
    vocabulary = VOCABULARY if size.name == "gpu" else 5003 if size.name == "cpu" else 251
    yield from _forward(x, heads, vocabulary)
    yield from _decode(width, heads, size.length)
    yield from _backward(x, heads, vocabulary)


def _forward(x: Arg, heads: int, vocabulary: int) -> Iterator[Problem]:
    n, length, width = x.shape
    inner = 4 * width
    norm = (vector(width), vector(width))
    args: tuple[Arg, ...] = (weight(vocabulary, width), indices(vocabulary, n, length), activation(length, width))
    yield Problem(MODEL, "embeddings", "gather", b.embedding_sum, args)
    args = (vector(3 * width), activation(n * length, width), weight(width, 3 * width, inner=width))
    yield Problem(MODEL, "qkv, input by output", "matmul", b.conv1d_of_gpt2, args)
    q = activation(n, heads, length, width // heads)
    yield Problem(MODEL, "causal softmax(q k^T)", "attention", b.scores_causal_softmax, (q, q))
    yield Problem(MODEL, "causal attention", "attention", b.attention_causal, (q, q, q))
    args = (vector(inner), activation(n * length, width), weight(width, inner, inner=width))
    yield Problem(MODEL, "fc1 + gelu, input by output", "matmul", partial(b.conv1d_of_gpt2, act=b.gelu_tanh), args)
    args = (x, *norm, weight(inner, width), vector(inner), weight(width, inner), vector(width))
    yield Problem(MODEL, "norm + MLP + residual", "matmul", partial(b.norm_mlp, act=b.gelu_tanh), args)
    rows = n * length
    yield Problem(MODEL, "logits", "matmul", b.linear, (activation(rows, width), weight(vocabulary, width)))
    args = (activation(rows, width), weight(vocabulary, width), indices(vocabulary, rows))
    yield Problem(MODEL, "logits + loss", "matmul", b.logits_loss, args)
    yield Problem(
        MODEL, "cross entropy", "reduction", b.cross_entropy, (activation(rows, vocabulary), indices(vocabulary, rows))
    )


def _decode(width: int, heads: int, length: int) -> Iterator[Problem]:
    inner = 4 * width
    norm = (vector(width), vector(width))
    for m in (1, 8):
        x = activation(m, width)
        args: tuple[Arg, ...] = (x, *norm, weight(3 * width, width), vector(3 * width))
        yield Problem(MODEL, f"norm + qkv of {m}", "skinny-matmul", b.norm_linear, args)
        args = (x, *norm, weight(inner, width), vector(inner), weight(width, inner), vector(width))
        yield Problem(MODEL, f"norm + MLP + residual of {m}", "skinny-matmul", partial(b.norm_mlp, act=b.gelu_tanh), args)
        q, k = activation(m, heads, 1, width // heads), activation(m, heads, length, width // heads)
        yield Problem(MODEL, f"attention of one token, {m} sequences", "attention", b.attention_decode, (q, k, k))


def _backward(x: Arg, heads: int, vocabulary: int) -> Iterator[Problem]:
    n, length, width = x.shape
    inner = activation(n, length, 4 * width)
    rows = n * length
    kind = "matmul-backward"
    args: tuple[Arg, ...] = (x, x, inner, weight(4 * width, width), weight(width, 4 * width))
    yield Problem(MODEL, "MLP backward", kind, partial(b.mlp_backward_of_rows, act=b.gelu_tanh), args, "backward")
    args = (activation(rows, vocabulary), weight(vocabulary, width))
    yield Problem(MODEL, "logits' input gradient", kind, b.input_gradient, args, "backward")
    yield Problem(
        MODEL,
        "logits' weight gradient",
        kind,
        b.weight_gradient,
        (activation(rows, vocabulary), activation(rows, width)),
        "backward",
    )
    q, p = activation(n, heads, length, width // heads), activation(n, heads, length, length)
    yield Problem(MODEL, "attention backward", "attention-backward", b.attention_backward, (q, q, q, q, p), "backward")
    yield Problem(
        MODEL,
        "cross entropy backward",
        "reduction",
        b.cross_entropy_backward,
        (activation(rows, vocabulary), indices(vocabulary, rows)),
        "backward",
    )
