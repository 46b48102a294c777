"""Layers of BERT-base at 512 tokens: post-norms, a padding mask, a pooler and the head of the masked language model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, indices, vector, weight

MODEL, VOCABULARY = "BERT", 30522


def problems(size: Size) -> Iterator[Problem]:
    length, width, heads = min(512, size.length), size.of(768), size.of(12, 2)
    n = max(1, size.tokens // length)
    x = activation(n, length, width)
    vocabulary = VOCABULARY if size.name != "tiny" else 256
    yield from _forward(x, heads, vocabulary)
    yield from _backward(x, heads, vocabulary)


def _forward(x: Arg, heads: int, vocabulary: int) -> Iterator[Problem]:
    n, length, width = x.shape
    norm = (vector(width), vector(width))
    square, inner = weight(width, width), 4 * width
    args: tuple[Arg, ...] = (weight(vocabulary, width), indices(vocabulary, n, length), activation(length, width), *norm)
    yield Problem(MODEL, "embeddings + norm", "gather", b.embedding_norm, args)
    args = (x, square, vector(width), square, vector(width), square, vector(width))
    yield Problem(MODEL, "q, k, v with bias", "matmul", b.qkv_bias, args)
    q = activation(n, heads, length, width // heads)
    mask = Arg((n, 1, 1, length), mask=True)
    yield Problem(MODEL, "masked softmax(q k^T)", "attention", b.scores_masked_softmax, (q, q, mask))
    yield Problem(MODEL, "masked attention", "attention", b.attention_masked, (q, q, q, mask))
    yield Problem(MODEL, "projection + residual + norm", "matmul", b.linear_residual_norm, (x, square, vector(width), x, *norm))
    yield Problem(MODEL, "fc1 + gelu", "matmul", partial(b.linear_act, act=b.gelu), (x, weight(inner, width), vector(inner)))
    args = (activation(n, length, inner), weight(width, inner), vector(width), x, *norm)
    yield Problem(MODEL, "fc2 + residual + norm", "matmul", b.linear_residual_norm, args)
    args = (activation(n, width), square, vector(width))
    yield Problem(MODEL, "pooler", "skinny-matmul", partial(b.linear_act, act=torch.tanh), args)
    rows = max(16, n * length * 15 // 100 // 8 * 8)
    yield Problem(
        MODEL,
        "logits of masked tokens",
        "matmul",
        b.linear_bias,
        (activation(rows, width), weight(vocabulary, width), vector(vocabulary)),
    )
    yield Problem(
        MODEL, "cross entropy", "reduction", b.cross_entropy, (activation(rows, vocabulary), indices(vocabulary, rows))
    )


def _backward(x: Arg, heads: int, vocabulary: int) -> Iterator[Problem]:
    n, length, width = x.shape
    inner = activation(n, length, 4 * width)
    kind = "matmul-backward"
    yield Problem(MODEL, "linear layer's gradients", kind, b.linear_backward, (x, x, weight(width, width)), "backward")
    args: tuple[Arg, ...] = (x, weight(width, 4 * width), inner)
    yield Problem(MODEL, "fc2 input gradient + gelu'", kind, partial(b.act_input_gradient, act=b.gelu), args, "backward")
    args = (inner, inner, x)
    yield Problem(MODEL, "gelu' + fc1 weight gradient", kind, partial(b.act_weight_gradient, act=b.gelu), args, "backward")
    q, p = activation(n, heads, length, width // heads), activation(n, heads, length, length)
    yield Problem(MODEL, "scores' gradient", "attention-backward", b.scores_backward, (q, q, p), "backward")
    yield Problem(MODEL, "gradients of q and k", "attention-backward", b.qk_gradient, (p, q, q), "backward")
    yield Problem(MODEL, "gradient of v", "attention-backward", b.v_gradient, (p, q), "backward")
    args = (x, indices(vocabulary, n, length))
    yield Problem(MODEL, "embedding backward", "gather", partial(b.embedding_backward, rows=vocabulary), args, "backward")
    yield Problem(MODEL, "norm backward", "norm", b.layer_norm_backward, (x, x, vector(width), vector(width), x), "backward")
