"""Attention by pointers, deliberately plain: what the contract of templates needs for programs, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import kgen
from kgen import contraction, knob, operand, result, softmax
from kgen.templates.problem import Problem

ATTENTION = kgen.program(
    scores=contraction("b,m,d", "b,n,d -> b,m,n"),
    weights=softmax("scores", over="n", logsumexp=True),
    out=contraction("weights", "b,n,v -> b,m,v"),
)


@kgen.template(implements=ATTENTION, device="cuda", source="attention.py.jinja", name="plain_attention")
class Attention(kgen.KernelTemplate):
    """Online softmax over blocks of keys; blocks of values' columns compute the scores anew."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    L = result("b", "m")
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(32, 16), knob(32, 16), knob(16), knob(16, 64)

    def refuse(self, problem: Problem) -> str | None:
        return "no matrix unit multiplies float64" if problem.main_dtype is torch.float64 else None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield {"BLOCK_V": 16 if problem.size("v") <= 16 else 64}
        yield {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_V": 16}
        yield {"BLOCK_M": 16, "BLOCK_V": 64}


@kgen.template(implements=ATTENTION, device="cpu", source="attention.cpp.jinja", name="plain_attention_cpp")
class AttentionOnCpu(kgen.KernelTemplate):
    """The same in C++."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    L = result("b", "m")
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(32, 16), knob(32, 16), knob(16), knob(16, 64)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield {"BLOCK_V": 16 if problem.size("v") <= 16 else 64}
        yield {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_V": 16}
