"""Layers of Mamba (1.4 billion parameters) and of Mamba-2's chunks: depthwise conv1d, the small projections of the time step,
one step of the state."""

from __future__ import annotations

from collections.abc import Iterator

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, kernel, vector, weight

MODEL, STATES, CHUNK, HEADS = "Mamba", 16, 64, 32


def problems(size: Size) -> Iterator[Problem]:
    width = size.of(2048 if size.name == "gpu" else 768)
    yield from _prefill(size, width)
    yield from _decode(width)
    yield from _backward(size, width)


def _prefill(size: Size, width: int) -> Iterator[Problem]:
    inner, rank = 2 * width, max(16, width // 16)
    n, tokens = max(1, size.tokens // size.length), size.tokens
    x, h = activation(tokens, width), activation(tokens, inner)
    yield Problem(MODEL, "norm + in projection", "matmul", b.rms_linear, (x, vector(width), weight(2 * inner, width)))
    args: tuple[Arg, ...] = (activation(n, inner, size.length), kernel(inner, 1, 4), vector(inner))
    yield Problem(MODEL, "causal conv1d + silu", "depthwise", b.causal_conv1d_silu, args)
    yield Problem(MODEL, "projection to time step and states", "matmul", b.linear, (h, weight(rank + 2 * STATES, inner)))
    yield Problem(
        MODEL, "time step + softplus", "matmul", b.time_step, (activation(tokens, rank), weight(inner, rank), vector(inner))
    )
    yield Problem(MODEL, "gate + out projection + residual", "matmul", b.gated_linear, (h, h, weight(width, inner), x))
    chunks = max(1, size.length // CHUNK)
    states = activation(n, chunks, HEADS, CHUNK, 128)
    decay = Arg((n, chunks, HEADS, CHUNK), 0.1)
    yield Problem(MODEL, "scores of chunks with decay", "attention", b.chunk_scores, (states, states, decay))
    scores, values = activation(n, chunks, HEADS, CHUNK, CHUNK), activation(n, chunks, HEADS, CHUNK, 64)
    yield Problem(MODEL, "chunks' values", "attention", b.values, (scores, values))


def _decode(width: int) -> Iterator[Problem]:
    inner, rank = 2 * width, max(16, width // 16)
    for m in (1, 16):
        x = activation(m, inner)
        args: tuple[Arg, ...] = (activation(m, inner, 4), x, kernel(inner, 4), vector(inner))
        yield Problem(MODEL, f"conv1d step of {m}", "pointwise", b.causal_conv1d_step, args)
        a = Arg((inner, STATES), 0.5)
        args = (activation(m, inner, STATES), x, x, a, activation(m, STATES), activation(m, STATES), x)
        yield Problem(MODEL, f"state's step of {m}", "reduction", b.state_step, args)
        args = (activation(m, width), vector(width), weight(2 * inner, width))
        yield Problem(MODEL, f"norm + in projection of {m}", "skinny-matmul", b.rms_linear, args)
        yield Problem(
            MODEL, f"time step of {m}", "skinny-matmul", b.time_step, (activation(m, rank), weight(inner, rank), vector(inner))
        )
        args = (x, x, weight(width, inner), activation(m, width))
        yield Problem(MODEL, f"gate + out projection of {m}", "skinny-matmul", b.gated_linear, args)


def _backward(size: Size, width: int) -> Iterator[Problem]:
    inner, rank = 2 * width, max(16, width // 16)
    n, tokens = max(1, size.tokens // size.length), size.tokens
    x, h = activation(tokens, width), activation(tokens, inner)
    args: tuple[Arg, ...] = (
        activation(n, inner, size.length),
        activation(n, inner, size.length),
        kernel(inner, 1, 4),
        vector(inner),
    )
    yield Problem(MODEL, "causal conv1d + silu backward", "conv-backward", b.causal_conv1d_silu_backward, args, "backward")
    args = (h, h, activation(tokens, rank))
    yield Problem(MODEL, "time step's weight gradient", "matmul-backward", b.time_step_weight_gradient, args, "backward")
    args = (activation(tokens, 2 * inner), weight(2 * inner, width), x, vector(width))
    yield Problem(MODEL, "in projection's input gradient + norm", "matmul-backward", b.rms_input_gradient, args, "backward")
    yield Problem(MODEL, "out projection's weight gradient", "matmul-backward", b.swiglu_weight_gradient, (x, h, h), "backward")
