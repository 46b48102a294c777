"""Layers of a mixture of experts (Mixtral's sizes): routers, experts' matmuls in decoding and in training."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from bench.calibration import blocks as b
from bench.calibration.problem import Arg, Problem, Size, activation, weight

MODEL, EXPERTS, MANY, TOP = "MoE", 8, 64, 2


def problems(size: Size) -> Iterator[Problem]:
    width, inner = size.of(4096 if size.name == "gpu" else 512), size.of(14336 if size.name == "gpu" else 1408)
    yield from _routers(size, width)
    yield from _decode(width, inner)
    yield from _prefill(size, width // 2, inner // 8)
    yield from _backward(size, width // 2, inner // 8)


def _routers(size: Size, width: int) -> Iterator[Problem]:
    for m in dict.fromkeys((1, 16, size.tokens)):
        kind = "skinny-matmul"
        x = activation(m, width)
        yield Problem(MODEL, f"router of {m}", kind, partial(b.router, top=TOP), (x, weight(EXPERTS, width)))
    bias = Arg((MANY,), 0.1)
    yield Problem(
        MODEL,
        "router with sigmoids",
        "skinny-matmul",
        b.router_sigmoid,
        (activation(size.tokens, width), weight(MANY, width), bias),
    )


def _decode(width: int, inner: int) -> Iterator[Problem]:
    into, back = Arg((EXPERTS, width, inner), width**-0.5), Arg((EXPERTS, inner, width), inner**-0.5)
    for m in (1, 4):
        x, h = activation(EXPERTS, m, width), activation(EXPERTS, m, inner)
        yield Problem(MODEL, f"experts' SwiGLU, {m} each", "skinny-matmul", b.expert_in, (x, into, into))
        yield Problem(MODEL, f"experts' output, {m} each", "skinny-matmul", b.expert_out, (h, back, activation(EXPERTS, m)))
    for m in (1, 4):
        chosen = Arg((m * TOP,), top=EXPERTS)
        yield Problem(
            MODEL, f"gathered experts of {m}", "skinny-matmul", b.gathered_expert, (activation(m * TOP, width), into, chosen)
        )


def _prefill(size: Size, width: int, inner: int) -> Iterator[Problem]:
    m = max(16, size.tokens * TOP // EXPERTS)
    into, back = Arg((EXPERTS, width, inner), width**-0.5), Arg((EXPERTS, inner, width), inner**-0.5)
    x = activation(EXPERTS, m, width)
    yield Problem(MODEL, f"experts' SwiGLU, {m} each", "matmul", b.expert_in, (x, into, into))
    yield Problem(
        MODEL,
        f"experts' output, {m} each",
        "matmul",
        b.expert_out,
        (activation(EXPERTS, m, inner), back, activation(EXPERTS, m)),
    )


def _backward(size: Size, width: int, inner: int) -> Iterator[Problem]:
    m = max(16, size.tokens * TOP // EXPERTS)
    x, h = activation(EXPERTS, m, width), activation(EXPERTS, m, inner)
    into = Arg((EXPERTS, width, inner), width**-0.5)
    yield Problem(MODEL, f"experts' weight gradient, {m} each", "matmul-backward", b.expert_weight_gradient, (x, h), "backward")
    yield Problem(
        MODEL, f"experts' input gradient, {m} each", "matmul-backward", b.expert_input_gradient, (h, into), "backward"
    )
