"""Gradients of attention on GPUs by pointers, with scores computed again tile by tile: no matrix of scores is stored. What
becomes of a score and of the gradient of its weight is a slot's; sums are in one order, without atomic additions. For compute
capability 8.0 and newer; after Dao, FlashAttention-2 (arXiv:2307.08691).

One template makes the gradients of queries and of keys, whose program is the same with rows and columns exchanged, and sums of
scores' gradients along one of these: in one launch, what is wanted of them. One makes the gradient of values, one the sum of
scores' gradients over batches, as of a bias that these share, and one their sums into the entries of a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kgen.ir.program import MatrixSizes
from kgen.templates.attention_programs import GRADIENT, GRADIENT_OF_SCORES, GRADIENT_OF_TABLE, GRADIENT_OF_VALUES
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels import attention_estimate
from kgen.templates.triton.kernels.attention import LEAST_ARCH, LONGEST, TYPES, padded_length

# Tiles of rows and of columns, warps and stages, by the elements that a row of all operands has together.
TILES = {
    192: ((64, 64, 4, 2), (128, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    384: ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2)),
    768: ((32, 32, 4, 2), (32, 16, 4, 1), (16, 16, 4, 1)),
}
# The same of float32 numbers that are multiplied exactly: both operands are in registers, and larger tiles spill.
EXACT = {
    192: ((32, 32, 4, 2), (32, 16, 4, 2)),
    384: ((32, 32, 8, 2), (32, 16, 4, 2), (16, 16, 4, 2)),
    768: ((16, 16, 4, 1),),
}
# 32-bit registers of a thread besides those of tiles, the most that it has, and threads of a warp.
OTHER_REGISTERS, WARP = 72, 32
# Share of the peak rate of dots of tiles that are made, by rows, columns and warps of a tile, of others a guess, and seconds of
# a launch (H200, 2026-11-26, bench.gpu_attention --backward: train bias, train causal bias, train slopes).
DOTS = {(64, 64, 4): 0.3, (64, 32, 4): 0.29, (128, 64, 8): 0.26, (64, 64, 8): 0.21, (32, 32, 4): 0.18}
OTHER_DOTS, LAUNCH = 0.1, 4e-6


# The same where a tile's scores are added to sums of entries, which need registers of their own.
TILES_OF_ENTRIES = {192: TILES[192], 384: ((64, 32, 4, 2), (32, 16, 4, 2)), 768: TILES[768]}
# Entries of a table, of which each row of a tile has a sum in registers; and these sums of a thread.
ENTRIES, SUMS_OF_THREAD = 256, 64
# The axes of heads, and the length of those of which sums of scores' gradients in 16 bits were measured (H200, 2026-11-26,
# bench.gpu_attention --backward: train bias, train causal bias, train T5).
HEADS, MEASURED_SUMS = "dve", 64
# Rows or columns below which most of the smallest tile is past an end.
LEAST_SIDE = 16


@dataclass(frozen=True, slots=True)
class Facts:
    """Elements of tiles along the axes of heads, powers of two. Gradients of scores are rounded to the type of the operand
    `into`, and their sums are multiplied by `factor` at last."""

    d: int
    v: int
    e: int = 0
    c: int = 0
    into: str = ""
    factor: float = 1.0


class _Recomputing(KernelTemplate):
    """What both kernels have in common."""

    longest: ClassVar = {"d": LONGEST, "v": LONGEST}
    _of_scores: ClassVar[bool] = False
    _tiles: ClassVar = TILES

    def refuse(self, problem: Problem) -> str | None:
        kinds = {one.dtype for one in problem.inputs.values()}
        if not kinds <= set(TYPES):
            return f"it multiplies {', '.join(map(str, TYPES))}"
        if len(kinds) > 1:
            return "its operands are multiplied in different types"
        if problem.device.arch < LEAST_ARCH:
            return f"it needs compute capability {LEAST_ARCH / 10}"
        return None

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        heads = {f"BLOCK_{axis.upper()}": _padded(problem, axis) for axis in self.longest}
        total = sum(heads[f"BLOCK_{axes[-1].upper()}"] for axes in _matrices(problem).values())
        wide = total * max(1, problem.main_dtype.itemsize // 2)
        tables = EXACT if problem.exact_float32 else self._tiles
        table = next((rows for most, rows in tables.items() if wide <= 2 * most), tables[768])
        for m, n, warps, stages in table:
            yield {"BLOCK_M": m, "BLOCK_N": n, **heads, "WARPS": warps, "STAGES": stages}

    def resources(self, problem: Problem, config: Config) -> Resources:
        if any(_padded(problem, axis) != config.get(f"BLOCK_{axis.upper()}") for axis in self.longest):
            return Resources(shared=problem.device.shared + 1)
        return Resources(_shared(problem, config), _registers(problem, config))

    def seconds(self, problem: Problem, config: Config) -> float:
        moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
        dots = DOTS.get((config.BLOCK_M, config.BLOCK_N, config.WARPS), OTHER_DOTS)
        share = attention_estimate.made_share(problem, config, problem.template.implements.middles[-1])
        made = share * problem.flops / problem.rate / dots
        idle = attention_estimate.idle_factor(problem, _programs(problem, config))
        return LAUNCH + max(idle * made, moved / problem.device.bandwidth)

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        return not self._of_scores and attention_estimate.is_measured(sizes, arch)

    def uncalibrated(self, problem: Problem) -> str | None:
        heads = {_padded(problem, axis) for axis in self.longest if axis in HEADS}
        if self._of_scores and not problem.narrows and heads != {MEASURED_SUMS}:
            return f"no GPU has measured its sums of scores' gradients on other heads than {MEASURED_SUMS}"
        if len(heads) > 1:
            return "no GPU has measured it on operands whose heads differ"
        [head] = heads
        return attention_estimate.unmeasured(problem, head)


@template(
    implements=GRADIENT,
    device="cuda",
    source="attention_backward.py.jinja",
    name="triton_attention_backward",
)
class AttentionBackward(_Recomputing):
    """O[b, m, e] = sum over n of dscores(Q[b, m, :] K[b, n, :], G[b, m, :] V[b, n, :]) R[b, n, e]. With one e it is a
    sum along rows, which no matrix units make."""

    Q, K, G, V = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "m", "v"), operand("b", "n", "v")
    R, O = operand("b", "n", "e"), result("b", "m", "e")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64, 128, 32, 16), knob(64, 32, 16)
    BLOCK_D, BLOCK_V, BLOCK_E = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256)
    WARPS, STAGES = knob(4, 8), knob(2, 1)
    longest: ClassVar = {"d": LONGEST, "v": LONGEST, "e": LONGEST}
    joins = "program"

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        if _is_sum(problem):  # in float32
            return Facts(config.BLOCK_D, config.BLOCK_V, 1)
        return Facts(config.BLOCK_D, config.BLOCK_V, config.BLOCK_E, into="R", factor=_last_factor(problem))


@template(
    implements=GRADIENT_OF_VALUES,
    device="cuda",
    source="attention_backward_values.py.jinja",
    name="triton_attention_backward_values",
)
class AttentionBackwardValues(_Recomputing):
    """O[b, m, v] = sum over n of weights(Q[b, m, :] K[b, n, :]) V[b, n, v]."""

    Q, K, V, O = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "n", "v"), result("b", "m", "v")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64, 128, 32, 16), knob(64, 32, 16)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256)
    WARPS, STAGES = knob(4, 8), knob(2, 1)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(config.BLOCK_D, config.BLOCK_V)


@template(
    implements=GRADIENT_OF_SCORES,
    device="cuda",
    source="attention_backward_scores.py.jinja",
    name="triton_attention_backward_scores",
)
class AttentionBackwardScores(_Recomputing):
    """O[b, m, n] = sum over r of dscores(Q[b, r, m, :] K[b, r, n, :], G[b, r, m, :] V[b, r, n, :]) W[b, r]."""

    Q, K = operand("b", "r", "m", "d"), operand("b", "r", "n", "d")
    G, V = operand("b", "r", "m", "v"), operand("b", "r", "n", "v")
    W, O = operand("b", "r"), result("b", "m", "n")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64, 128, 32, 16), knob(64, 32, 16)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256)
    WARPS, STAGES = knob(4, 8), knob(2, 1)
    _of_scores = True

    def refuse(self, problem: Problem) -> str | None:
        if min(problem.size("m"), problem.size("n")) < LEAST_SIDE:
            return f"its tiles have {LEAST_SIDE} rows and columns or more"
        return super().refuse(problem)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(config.BLOCK_D, config.BLOCK_V)


@template(
    implements=GRADIENT_OF_TABLE,
    device="cuda",
    source="attention_backward_table.py.jinja",
    name="triton_attention_backward_table",
)
class AttentionBackwardTable(_Recomputing):
    """O[b, c] = sum over m and n of dscores(Q[b, m, :] K[b, n, :], G[b, m, :] V[b, n, :]) P[b, m, n, c], where P is 1 for one
    entry c of each score, and 0 for others. A tile looks at entries between its first one and its last one."""

    Q, K, G, V = operand("b", "m", "d"), operand("b", "n", "d"), operand("b", "m", "v"), operand("b", "n", "v")
    P, O = operand("b", "m", "n", "c"), result("b", "c")  # noqa: E741
    BLOCK_M, BLOCK_N = knob(64, 128, 32, 16), knob(64, 32, 16)
    BLOCK_D, BLOCK_V, BLOCK_C = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256), knob(32, 16, 64, 128, 256)
    WARPS, STAGES = knob(4, 8), knob(2, 1)
    longest: ClassVar = {"d": LONGEST, "v": LONGEST, "c": ENTRIES}
    _of_scores, _tiles = True, TILES_OF_ENTRIES

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        return Facts(config.BLOCK_D, config.BLOCK_V, c=config.BLOCK_C)

    def refuse(self, problem: Problem) -> str | None:
        if problem.inputs["P"].entry is None:
            return "its last operand is not 1 at one entry of each score"
        return super().refuse(problem)

    def resources(self, problem: Problem, config: Config) -> Resources:
        found, sums = super().resources(problem, config), config.BLOCK_M * config.BLOCK_C // (WARP * config.WARPS)
        return replace(found, shared=problem.device.shared + 1) if sums > SUMS_OF_THREAD else found


def _last_factor(problem: Problem) -> float:
    """What the sums of scores' gradients are multiplied by in place of these. In float16 it keeps them in range."""
    return 1.0 if problem.inputs["R"].dtype is torch.float16 else problem.middles["dscores"].factor


def _is_sum(problem: Problem) -> bool:
    """Whether a gradient is a sum of those of scores alone."""
    return "e" in problem.loops and problem.size("e") == 1


def _padded(problem: Problem, axis: str) -> int:
    """Elements of a tile along an axis of heads. A sum has the tiles of gradients of queries and keys: they are one launch."""
    return padded_length(problem.size("d" if axis == "e" and _is_sum(problem) else axis))


def _programs(problem: Problem, config: Config) -> int:
    """Programs of a launch: a long sum of few rows, as that of the gradient of a weight, leaves most SMs without any. Those of
    a table have been measured as they are."""
    tiles = {"m": config.BLOCK_M, "n": config.BLOCK_N}
    axes = [axis for axis in problem.template.implements.results[0] if axis in tiles]
    if not axes:
        return problem.device.compute_units
    return problem.size("b") * math.prod(math.ceil(problem.size(axis) / tiles[axis]) for axis in axes)


def _matrices(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The axes of operands that are rows or columns of heads."""
    return {name: one.axes for name, one in problem.inputs.items() if len({"m", "n"} & set(one.axes)) == 1}


def _row_bytes(problem: Problem, config: Config, axis: str) -> int:
    """Bytes of one point along an axis in the tiles of all operands that have it."""
    own = ((problem.inputs[name].dtype, axes) for name, axes in _matrices(problem).items() if axis in axes)
    return sum(config.get(f"BLOCK_{axes[-1].upper()}") * dtype.itemsize for dtype, axes in own)


def _shared(problem: Problem, config: Config) -> int:
    """Tiles of rows once, those of columns for each stage, and what is multiplied last."""
    rows, columns = (_row_bytes(problem, config, axis) for axis in "mn")
    made = config.BLOCK_M * config.BLOCK_N * problem.main_dtype.itemsize
    times = config.STAGES if "r" in problem.loops else 1  # where batches come one by one, rows do
    return config.BLOCK_M * rows * times + config.BLOCK_N * columns * config.STAGES + made


def _registers(problem: Problem, config: Config) -> int:
    """Of a thread: elements of contractions, and sums."""
    last = problem.template.implements.results[0][-1]
    numbers = config.BLOCK_M * (3 * config.BLOCK_N + config.get(f"BLOCK_{last.upper()}"))
    return OTHER_REGISTERS + numbers // (WARP * config.WARPS)
