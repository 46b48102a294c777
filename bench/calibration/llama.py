"""Layers of a Llama of 8 billion parameters: prefill, training, and decoding of few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Problem, Size, activation, indices, vector, weight

MODEL = "Llama"
HEAD, GROUPS, QUERIES_PER_KEY, VOCABULARY = 128, 8, 4, 128256
DECODED = (1, 4, 16)


def problems(size: Size) -> Iterator[Problem]:
    width, inner = size.of(4096 if size.name == "gpu" else 1024), size.of(14336 if size.name == "gpu" else 2816)
    yield from _prefill(size, width, inner)
    yield from _decode(size, width, inner)
    yield from _backward(size, width, inner)


def _prefill(size: Size, width: int, inner: int) -> Iterator[Problem]:
    tokens, length = size.tokens, size.length
    x, g, keys = activation(tokens, width), vector(width), max(16, width // QUERIES_PER_KEY)
    yield Problem(MODEL, "norm + q", "matmul", b.rms_linear, (x, g, weight(width, width)))
    yield Problem(MODEL, "q, k, v", "matmul", b.qkv_apart, (x, weight(width, width), weight(keys, width), weight(keys, width)))
    head = min(HEAD, keys)
    cos = activation(tokens, head)
    yield Problem(
        MODEL,
        "q, k + rotary",
        "matmul",
        partial(b.qk_rotary, head=head),
        (x, weight(width, width), weight(keys, width), cos, cos),
    )
    yield Problem(MODEL, "rotary", "pointwise", b.rotary, (activation(width // head, tokens, head), cos, cos))
    yield Problem(MODEL, "o + residual", "matmul", b.linear_residual_no_bias, (x, weight(width, width), x))
    yield Problem(MODEL, "gate, up: SwiGLU", "matmul", b.swiglu_in, (x, weight(inner, width), weight(inner, width)))
    h = activation(tokens, inner)
    yield Problem(MODEL, "SwiGLU + down + residual", "matmul", b.swiglu_out, (h, h, weight(width, inner), x))
    yield Problem(MODEL, "residual + norm", "norm", b.residual_rms_norm, (x, x, g))
    q = activation(1, width // head, length, head)
    yield Problem(MODEL, "causal softmax(q k^T)", "attention", b.scores_causal_softmax, (q, q))
    yield Problem(MODEL, "causal attention", "attention", b.attention_causal, (q, q, q))
    rows = min(tokens, 1024)
    vocabulary = VOCABULARY if size.name == "gpu" else 4096
    yield Problem(
        MODEL,
        "logits + loss",
        "matmul",
        b.logits_loss,
        (activation(rows, width), weight(vocabulary, width), indices(vocabulary, rows)),
    )
    yield Problem(MODEL, "embedding", "gather", b.embedding_sum, (weight(vocabulary, width), indices(vocabulary, tokens), x))


def _decode(size: Size, width: int, inner: int) -> Iterator[Problem]:
    keys = max(16, width // QUERIES_PER_KEY)
    for m in DECODED:
        x, g = activation(m, width), vector(width)
        kind = "skinny-matmul"
        yield Problem(
            MODEL, f"q, k, v of {m}", kind, b.qkv_apart, (x, weight(width, width), weight(keys, width), weight(keys, width))
        )
        yield Problem(
            MODEL,
            f"norm + SwiGLU MLP of {m}",
            kind,
            b.swiglu_mlp,
            (x, g, weight(inner, width), weight(inner, width), weight(width, inner)),
        )
        yield Problem(
            MODEL, f"down + residual of {m}", kind, b.linear_residual_no_bias, (activation(m, inner), weight(width, inner), x)
        )
    head = min(HEAD, keys)
    for m in (1, 16):
        q, k = activation(m, GROUPS, QUERIES_PER_KEY, head), activation(m, GROUPS, 4 * size.length, head)
        yield Problem(MODEL, f"attention of one token, {m} sequences", "attention", b.attention_decode, (q, k, k))


def _backward(size: Size, width: int, inner: int) -> Iterator[Problem]:
    tokens = size.tokens
    x, h, g = activation(tokens, width), activation(tokens, inner), vector(width)
    kind = "matmul-backward"
    yield Problem(MODEL, "down input gradient + SwiGLU'", kind, b.swiglu_backward, (x, weight(width, inner), h, h), "backward")
    yield Problem(
        MODEL,
        "gate, up input gradient",
        kind,
        b.swiglu_input_gradient,
        (h, h, weight(inner, width), weight(inner, width)),
        "backward",
    )
    yield Problem(MODEL, "down weight gradient, SwiGLU again", kind, b.swiglu_weight_gradient, (x, h, h), "backward")
    yield Problem(
        MODEL, "q input gradient + norm backward", kind, b.rms_input_gradient, (x, weight(width, width), x, g), "backward"
    )
    yield Problem(MODEL, "o weight gradient", kind, b.weight_gradient, (x, x), "backward")
    yield Problem(MODEL, "rms norm backward + residual", "norm", b.rms_norm_backward, (x, x, g, x), "backward")
    yield Problem(MODEL, "SwiGLU backward", "pointwise", b.swiglu_grad, (h, h, h), "backward")
