"""Attention on CPUs: scores of queries and keys, softmax, and the weighted sum of values, by `include/kgen/attention.h`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.templates.attention_programs import ATTENTION
from kgen.templates.base import KernelTemplate
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.middle import Middle
from kgen.templates.problem import Problem

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Rows of queries that read a block of keys while it is in a core's cache, and blocks of rows that a thread should get.
ROWS, TASKS = 192, 4
# Seconds: starting the kernel. Shares of the peak rate, of numbers in registers and of AMX tiles, on the scale of
# the library's call, whose estimate counts no softmax either: the kernel takes 0.65 to 0.95 of the call's time where nothing is
# masked (docs/decisions/0016-cpu-attention.md).
START, RATE, TILES_RATE = 2e-6, 1.0, 1.1


@dataclass(frozen=True, slots=True)
class Facts:
    """What the Jinja file is told: whether anything is done with scores."""

    scored: bool


@template(
    implements=ATTENTION,
    device="cpu",
    source="attention.cpp.jinja",
    name="cpp_attention",
)
class Attention(KernelTemplate):
    """O[b, m, v] = sum over n of weights[b, m, n] V[b, n, v]: blocks of scores stay in a thread's cache, operands have
    any layout, and threads share batches and rows."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    L = result("b", "m")
    BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V = knob(192, 96), knob(128, 256), knob(64), knob(64)
    engine = "attention"

    def refuse(self, problem: Problem) -> str | None:
        kinds = {one.dtype for one in problem.inputs.values()}
        if len(kinds) > 1:
            return "queries, keys and values are multiplied in different types"
        if problem.main_dtype not in TYPES:
            return f"it does not multiply {problem.main_dtype}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        for m in rows_of_blocks(problem):
            for n in (128, 256):
                yield {"BLOCK_M": m, "BLOCK_N": n}

    def seconds(self, problem: Problem, config: Config) -> float:
        """Both matmuls at the engine's rates, of scores that a mask may keep; or reading operands."""
        rate = TILES_RATE if problem.device.in_tiles(problem.main_dtype) else RATE
        matmuls = problem.flops / problem.rate / rate * share(problem, problem.middles["scores"], config)
        reading = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
        return START + max(matmuls, reading / problem.device.bandwidth)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(not problems[0].middles["scores"].is_plain)

    def multiplies(self, problem: Problem) -> tuple[torch.dtype, torch.dtype]:
        """The element types whose loops are linked."""
        return problem.inputs["Q"].dtype, problem.inputs["K"].dtype


def rows_of_blocks(problem: Problem) -> tuple[int, int]:
    """Rows of a block, the better ones first: fewer where threads would have less than a few blocks each."""
    blocks = problem.size("b") * -(-problem.size("m") // ROWS)
    return (ROWS, ROWS // 2) if blocks >= TASKS * problem.device.compute_units else (ROWS // 2, ROWS)


def share(problem: Problem, middle: Middle, config: Config) -> float:
    """The part of the scores that is computed with a slot's mask, where guards are 0 and masked scores have no weight."""
    rows, columns = problem.size("m"), problem.size("n")
    kept = 0
    for first in range(0, rows, config.BLOCK_M):
        count = min(config.BLOCK_M, rows - first)
        span = middle.reach(problem.loops, ix.constant(first), ix.constant(count), filled=True).may
        if span is not None:
            low = 0 if span.begin is None else max(0, problem.sizes.of(span.begin))
            high = columns if span.end is None else min(columns, problem.sizes.of(span.end))
            kept += count * max(0, high - low)
    return kept / (rows * columns)
