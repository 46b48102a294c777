"""Attention of short rows on GPUs, such as that of windows: all rows and keys of a head are one tile, and a program makes
several windows, of which the bias and the mask are the same. For compute capability 8.0 and newer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.ir.program import MatrixSizes
from kgen.templates import calibration
from kgen.templates.attention_programs import ATTENTION
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels import attention, estimate
from kgen.templates.triton.kernels.attention import Facts, padded_length, parts_of, suits

# The most rows and keys, and elements of a head.
SHORT, LONGEST = 64, 128
# Windows of a program, warps and stages.
CONFIGS = ((8, 4, 3), (8, 4, 2), (4, 4, 2), (2, 4, 2), (4, 4, 1), (1, 4, 1), (8, 8, 2))
# How much longer it takes than memory by the windows of a program, with 8 warps, and by stages; padded heads, the fewest rows
# and keys, and the fewest windows times heads that were measured (H200, 2026-11-29): windows of 49 and 64 tokens took 15 to 102
# us, kernels that store scores 57 to 251, the library's attention 704, Inductor 122 to 741.
BY_WINDOWS, WARPS_8, BY_STAGES = {1: 1.65, 2: 1.6, 4: 1.45, 8: 1.4, 16: 1.5}, 1.7, {1: 1.2, 2: 1.0, 3: 0.97}
MEASURED, FEWEST, FEWEST_WINDOWS = (32, 64), 49, 3072


@dataclass(frozen=True, slots=True)
class WindowFacts(Facts):
    """The same, and how long the first loop of the batch is, and all others together."""

    first: int = 1
    rest: int = 1


@template(implements=ATTENTION, device="cuda", source="attention_windows.py.jinja", name="triton_attention_windows")
class AttentionWindows(KernelTemplate):
    """O[b, m, v] = sum over n of softmax(scores(Q[b, m, :] K[b, n, :]))[n] V[b, n, v]."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    L = result("b", "m")
    BLOCK_M, BLOCK_N = knob(64, 32, 16), knob(64, 32, 16)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128), knob(64, 16, 32, 128)
    WINDOWS, WARPS, STAGES = knob(8, 16, 4, 2, 1), knob(4, 8), knob(2, 1, 3)
    longest: ClassVar = {"d": LONGEST, "v": LONGEST, "m": SHORT, "n": SHORT}

    def refuse(self, problem: Problem) -> str | None:
        if not all(problem.static(axis) for axis in "bmn"):
            return "its windows have known sizes"
        if max(problem.size("m"), problem.size("n")) > SHORT:
            return f"its windows have {SHORT} rows and keys or fewer"
        return attention.refuse(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        blocks = {f"BLOCK_{axis.upper()}": padded_length(problem.size(axis)) for axis in "mndv"}
        first, seen = _first(problem), set[tuple[int, int, int]]()
        for count, warps, stages in CONFIGS:
            count = next((k for k in (16, 8, 4, 2) if k <= min(count, first)), 1)
            row = (count, warps, stages if count > 1 else 1)
            if row not in seen:
                seen.add(row)
                yield {**blocks, "WINDOWS": count, "WARPS": warps, "STAGES": row[2]}

    def resources(self, problem: Problem, config: Config) -> Resources:
        fits = all(padded_length(problem.size(axis)) == config.get(f"BLOCK_{axis.upper()}") for axis in "mn")
        if not fits or not suits(problem, config):
            return Resources(shared=problem.device.shared + 1)
        return Resources(attention.shared(problem, config), attention.registers(problem, config))

    def grid(self, problem: Problem, config: Config) -> Expr:
        first = _first(problem)
        return problem.extent("b") // first * ix.constant(math.ceil(first / config.WINDOWS))

    def facts(self, problems: Sequence[Problem], config: Config) -> WindowFacts:
        [problem] = problems
        first = _first(problem)
        rest = problem.size("b") // first
        return WindowFacts(parts_of(problem, "d"), parts_of(problem, "v"), problem.middles["scores"].factor, first, rest)

    def seconds(self, problem: Problem, config: Config) -> float:
        moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
        longer = BY_WINDOWS[config.WINDOWS] * (WARPS_8 if config.WARPS == 8 else 1.0) * BY_STAGES[config.STAGES]
        return estimate.LAUNCH + longer * moved / problem.device.bandwidth

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        numbers = calibration.is_half_on_hopper(sizes.dtype, arch)
        rows = min(sizes.rows, sizes.columns) >= FEWEST and max(sizes.rows, sizes.columns) <= SHORT
        return numbers and rows and sizes.others <= set(MEASURED)

    def uncalibrated(self, problem: Problem) -> str | None:
        unlike = calibration.of_half_on_hopper(problem)
        if unlike is not None:
            return unlike
        heads = {padded_length(problem.size(axis)) for axis in "dv"}
        if not heads <= set(MEASURED) or min(problem.size("m"), problem.size("n")) < FEWEST:
            return f"no GPU has measured it on other heads than {MEASURED}, or on fewer than {FEWEST} rows or keys"
        return f"no GPU has measured fewer than {FEWEST_WINDOWS} windows" if problem.size("b") < FEWEST_WINDOWS else None


def _first(problem: Problem) -> int:
    """The length of the first loop of the batch."""
    loops = problem.loops["b"]
    return max(1, problem.sizes.of(loops[0].extent)) if loops else 1
