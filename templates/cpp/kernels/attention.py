"""Attention on CPUs: scores of queries and keys, softmax, and the weighted sum of values, by `include/kgen/attention.h`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, contraction, knob, operand, result, template
from kgen.templates.pattern import program, softmax
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told: whether anything is done with scores."""

    scored: bool


@template(
    implements=program(
        scores=contraction("b,m,d", "b,n,d -> b,m,n"),
        weights=softmax("scores", over="n"),
        out=contraction("weights", "b,n,v -> b,m,v"),
    ),
    device="cpu",
    source="attention.cpp.jinja",
    name="cpp_attention",
)
class Attention(KernelTemplate):
    """O[b, m, v] = sum over n of weights[b, m, n] V[b, n, v]: blocks of scores stay in a thread's cache, any layout, threads over
    batches and rows."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(96, 48, 192), knob(256, 128), knob(64), knob(64)
    engine = "attention"

    def refuse(self, problem: Problem) -> str | None:
        kinds = {one.dtype for one in problem.inputs.values()}
        if len(kinds) > 1:
            return "queries, keys and values are multiplied in different types"
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield {}
        yield {"BLOCK_M": 48, "BLOCK_N": 128}

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(not problems[0].middles["scores"].is_plain)

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype]:
        """The element types whose loops are linked."""
        return problem.inputs["Q"].dtype, problem.inputs["K"].dtype
