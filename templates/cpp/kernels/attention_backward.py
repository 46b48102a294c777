"""Gradients of attention on CPUs by `include/kgen/attention_backward.h`: scores are computed again block by block, and nobody
stores any. What becomes of a score and of the gradient of its weight is a slot's. Each sum is one thread's, in one order.

One template makes the gradients of queries and of keys, whose program is the same with rows and columns exchanged, and sums of
scores' gradients along one of these. One makes that of values, one the sum of scores' gradients over batches, and one their
sums into the entries of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from kgen.templates.attention_programs import GRADIENT, GRADIENT_OF_SCORES, GRADIENT_OF_TABLE, GRADIENT_OF_VALUES
from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.cpp.kernels.attention import START, TILES_RATE, TYPES, rows_of_blocks, share
from kgen.templates.problem import Problem, bare_number

# Share of the peak rate, of numbers in registers.
RATE = 0.8
# Entries of a table, of which each block has sums of its own.
ENTRIES = 256


class _Recomputing(KernelTemplate):
    """What both kernels have in common."""

    engine = "attention_backward"
    _slot: ClassVar[str]

    def refuse(self, problem: Problem) -> str | None:
        if len({one.dtype for one in problem.inputs.values()}) > 1:
            return "its operands are multiplied in different types"
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        for m in rows_of_blocks(problem):
            yield {"BLOCK_M": m}

    def seconds(self, problem: Problem, config: Config) -> float:
        """All matmuls at the engine's rates, of scores that a mask may keep; or reading operands."""
        rate = TILES_RATE if problem.device.in_tiles(problem.main_dtype) else RATE
        matmuls = problem.flops / problem.rate / rate * share(problem, problem.middles[self._slot], config)
        reading = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
        return START + max(matmuls, reading / problem.device.bandwidth)

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype]:
        """The element types whose loops are linked."""
        return problem.inputs["Q"].dtype, problem.inputs["K"].dtype

    def uncalibrated(self, problem: Problem) -> str | None:
        return "too few measurements of it have been compared with its estimates"


@template(
    implements=GRADIENT,
    device="cpu",
    source="attention_backward.cpp.jinja",
    name="cpp_attention_backward",
)
class AttentionBackward(_Recomputing):
    """O[b, m, e] = sum over n of dscores(Q[b, m, :] K[b, n, :], G[b, m, :] V[b, n, :]) R[b, n, e]."""

    Q, K, G, V = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "m", "v"), operand("b", "n", "v")
    R, O = operand("b", "n", "e"), result("b", "m", "e")  # noqa: E741
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_E = knob(192, 96), knob(128), knob(64), knob(64), knob(64)
    _slot = "dscores"

    def facts(self, problems: Sequence[Problem], config: Config) -> str:
        """Whether scores' gradients are added up as they are."""
        [problem] = problems
        factor = bare_number(problem.inputs["R"].value)
        return "true" if problem.size("e") == 1 and factor.op == "const" and factor.attr == 1 else "false"


@template(
    implements=GRADIENT_OF_VALUES,
    device="cpu",
    source="attention_backward_values.cpp.jinja",
    name="cpp_attention_backward_values",
)
class AttentionBackwardValues(_Recomputing):
    """O[b, m, v] = sum over n of weights(Q[b, m, :] K[b, n, :]) V[b, n, v]."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(192, 96), knob(128), knob(64), knob(64)
    _slot = "weights"


@template(
    implements=GRADIENT_OF_SCORES,
    device="cpu",
    source="attention_backward_scores.cpp.jinja",
    name="cpp_attention_backward_scores",
)
class AttentionBackwardScores(_Recomputing):
    """O[b, m, n] = sum over r of dscores(Q[b, r, m, :] K[b, r, n, :], G[b, r, m, :] V[b, r, n, :]) W[b, r], where W is 1."""

    Q, K = operand("b", "r", "m", "d"), operand("b", "r", "n", "d")
    G, V = operand("b", "r", "m", "v"), operand("b", "r", "n", "v")
    W, O = operand("b", "r"), result("b", "m", "n")  # noqa: E741
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(192, 96), knob(128), knob(64), knob(64)
    _slot = "dscores"

    def refuse(self, problem: Problem) -> str | None:
        factor = bare_number(problem.inputs["W"].value)
        return "it adds up what has no factor" if factor.op != "const" or factor.attr != 1 else super().refuse(problem)


@template(
    implements=GRADIENT_OF_TABLE,
    device="cpu",
    source="attention_backward_table.cpp.jinja",
    name="cpp_attention_backward_table",
)
class AttentionBackwardTable(_Recomputing):
    """O[b, c] = sum over m and n of dscores(Q[b, m, :] K[b, n, :], G[b, m, :] V[b, n, :]) P[b, m, n, c], where P is 1 for one
    entry c of each score, and 0 for others."""

    Q, K, G, V = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "m", "v"), operand("b", "n", "v")
    P, O = operand("b", "m", "n", "c"), result("b", "c")  # noqa: E741
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_C = knob(192, 96), knob(128), knob(64), knob(64), knob(64)
    longest: ClassVar = {"c": ENTRIES}
    _slot = "dscores"

    def refuse(self, problem: Problem) -> str | None:
        if problem.inputs["P"].entry is None:
            return "its last operand is not 1 at one entry of each score"
        return super().refuse(problem)
