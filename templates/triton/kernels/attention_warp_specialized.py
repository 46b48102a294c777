"""Attention on Hopper GPUs by warps with parts of their own, in Gluon: one warp issues the TMA loads of queries, keys and
values, and each of two or three warp groups has a tile of rows. After Shah and others, FlashAttention-3 (arXiv:2407.08608).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.ir.program import MatrixSizes
from kgen.templates.attention_programs import ATTENTION
from kgen.templates.base import KernelTemplate, Resources
from kgen.templates.contract import Config, knob, operand, result, template
from kgen.templates.problem import Problem
from kgen.templates.triton.codegen.runs import runs_of
from kgen.templates.triton.codegen.tma_layout import Access, tma_accesses
from kgen.templates.triton.kernels import attention_estimate
from kgen.templates.triton.kernels.attention import LONGEST, heads_together, padded_length, suits
from kgen.templates.triton.kernels.hopper import refuse_device, refuse_epilogue, refuse_halves
from kgen.templates.triton.kernels.matmul_tma import BARRIERS

# Rows of a warp group's tile: those that its four warps multiply at once.
ROWS, WARPS = 64, 4
# Registers of a thread that multiplies, and of one that loads, by the number of warp groups that multiply.
REGISTERS = {1: (240, 40), 2: (232, 40), 3: (160, 32)}
# Registers of a thread besides those of tiles.
OTHER_REGISTERS = 40
# What is left of the time of a kernel whose warps all do the same, by the longest head (H100, 2026-11-25, bench.gpu_attention:
# 23 kernels, bfloat16; standard deviation of the logarithm .08). Of heads of 256 one kernel (H200, 2026-11-26), the one that
# the estimate prefers: 464 us for causal 2x16x4096x256, cuDNN 507.
GAIN = {64: 1.04, 128: 0.83, 256: 0.78}
# Padded heads that were measured.
MEASURED = (*attention_estimate.MEASURED, 256)
# And the fewest rows and keys. Where there are fewer its tiles waste more than the estimate knows: 197 of 384 heads took 34 us,
# where the template by pointers takes 29 (H200, 2026-12-01, bench.attention_calibration).
FEWEST = 400
# By operations of the slot for a score: how much longer a kernel takes than those count, and one with two tiles of scores at a
# time, which gains where masks cost little and loses elsewhere (H100, 2026-11-25, bench.gpu_attention: softcap, window,
# grouped, causal 128 long).
SLOT, PIPELINED, FOR_SLOT, MOST_FOR_SLOT = 180, 0.92, 0.1, 1.15

# Keys of a tile, warp groups that multiply, stages, whether they are pipelined, and ping-pong, and whether TMA stores the
# result, by the longest head that they are for.
CONFIGS = {
    64: (
        (128, 2, 3, False, True, True), (128, 2, 3, True, True, True), (128, 2, 2, True, False, True),
        (128, 3, 2, False, True, True), (128, 3, 2, True, True, True), (128, 3, 2, True, False, True),
        (128, 3, 3, True, False, True), (64, 3, 4, True, False, True),
    ),
    128: (
        (128, 2, 2, True, True, True), (128, 2, 2, False, False, True), (128, 2, 2, False, True, True),
        (128, 2, 2, True, False, True), (64, 2, 4, True, False, True), (64, 2, 3, True, True, True),
        (64, 2, 3, False, True, True), (64, 3, 3, False, False, True),
    ),
    256: (
        (64, 2, 2, False, True, False), (64, 2, 2, False, False, False), (64, 2, 2, True, False, False),
        (32, 2, 3, False, False, False), (32, 2, 3, True, False, False),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Facts:
    """`rows` of a program; scores are multiplied by `factor`, and by `scale` for powers of two; then warps and registers of
    those beside the first group."""

    rows: int
    factor: float
    warps: list[int]
    registers: list[int]

    @property
    def scale(self) -> float:
        return self.factor * math.log2(math.e)


@template(
    implements=ATTENTION, device="cuda", source="attention_warp_specialized.py.jinja", name="triton_attention_warp_specialized"
)
class WarpSpecializedAttention(KernelTemplate):
    """O[b, m, v] = sum over n of softmax(scores(Q[b, m, :] K[b, n, :]))[n] V[b, n, v]."""

    Q, K, V, O = (  # noqa: E741
        operand("b", "m", "d", access="tma"),
        operand("b", "n", "d", access="tma"),
        operand("b", "n", "v", access="tma"),
        result("b", "m", "v", access="tma"),
    )
    L = result("b", "m")
    BLOCK_M, BLOCK_N = knob(64), knob(128, 64, 32)
    BLOCK_D, BLOCK_V = knob(64, 16, 32, 128, 256), knob(64, 16, 32, 128, 256)
    GROUP, WARPS, STAGES = knob(1, 2, 4, 8, 16, 32, 64), knob(4), knob(2, 3, 4)
    PROGRAMS = knob(2, 3, 1)  # warp groups that multiply
    PIPELINED, PINGPONG, TMA_STORE = knob(True, False), knob(False, True), knob(True, False)
    language = "gluon"
    longest: ClassVar = {"d": LONGEST, "v": LONGEST}
    reductions: ClassVar = frozenset()

    def refuse(self, problem: Problem) -> str | None:
        return refuse_device(problem) or refuse_halves(problem, "keys") or refuse_epilogue(problem)

    def configs(self, problem: Problem) -> Iterator[dict[str, Any]]:
        names = ("BLOCK_N", "PROGRAMS", "STAGES", "PIPELINED", "PINGPONG", "TMA_STORE")
        boxed = bool(_boxed(problem))
        lengths = {f"BLOCK_{axis.upper()}": padded_length(problem.size(axis)) for axis in "dv"}
        for row in CONFIGS[_longest(problem)]:
            values = dict(zip(names, row, strict=True))
            values["TMA_STORE"] = values["TMA_STORE"] and boxed
            yield {**values, **lengths, "BLOCK_M": ROWS, "GROUP": heads_together(problem), "WARPS": WARPS}

    def resources(self, problem: Problem, config: Config) -> Resources:
        if not suits(problem, config):
            return Resources(shared=problem.device.shared + 1)
        size = problem.main_dtype.itemsize
        heads = config.BLOCK_D + config.BLOCK_V
        rows = config.PROGRAMS * config.BLOCK_M
        shared = (rows * config.BLOCK_D + config.STAGES * config.BLOCK_N * heads) * size
        shared += rows * config.BLOCK_V * sum(one.tma_layout.dtype.itemsize for one in _boxed(problem) if config.TMA_STORE)
        registers = OTHER_REGISTERS + (config.BLOCK_M * (config.BLOCK_V + config.BLOCK_N * 3 // 2)) // (32 * config.WARPS)
        return Resources(shared + 2 * BARRIERS, registers)

    def grid(self, problem: Problem, config: Config) -> Expr:
        return problem.extent("b") * ix.ceildiv(problem.extent("m"), config.PROGRAMS * config.BLOCK_M)

    def facts(self, problems: Sequence[Problem], config: Config) -> Facts:
        [problem] = problems
        multiplying, loading = REGISTERS[config.PROGRAMS]
        others = config.PROGRAMS - 1
        factor = problem.middles["scores"].factor
        return Facts(
            config.PROGRAMS * config.BLOCK_M, factor, [config.WARPS] * others + [1], [multiplying] * others + [loading]
        )

    def seconds(self, problem: Problem, config: Config) -> float:
        """As if all warp groups were warps of one tile of rows."""
        groups = config.PROGRAMS
        rows = {"BLOCK_M": config.BLOCK_M * groups, "WARPS": config.WARPS * groups}
        joined = Config(tuple((name, rows.get(name, value)) for name, value in config.values))
        needs = self.resources(problem, config)
        work = attention_estimate.slot_work(problem, joined)
        longer = GAIN[_longest(problem)] * (1 + work / SLOT)
        longer *= min(MOST_FOR_SLOT, PIPELINED + FOR_SLOT * work) if config.PIPELINED else 1.0
        return longer * attention_estimate.seconds(problem, joined, needs, (config.BLOCK_D, config.BLOCK_V))

    def is_measured(self, sizes: MatrixSizes, arch: int) -> bool:
        return attention_estimate.is_measured(sizes, arch)

    def uncalibrated(self, problem: Problem) -> str | None:
        longest = max(padded_length(problem.size(axis)) for axis in "dv")
        why = attention_estimate.unmeasured(problem, longest, MEASURED, FEWEST)
        return (
            why if why is not None or not _is_window(problem) else "it was slower where both ends of a row's tiles are masked"
        )


def _is_window(problem: Problem) -> bool:
    """Whether tiles are masked in front of the whole ones, by indices alone. Of a window of 1,024 keys in 16,384 it took 2.2
    times its estimate, 328 us, and the template by pointers 247 (H200, 2026-11-28, bench.gpu_attention --quick)."""
    config = next(iter(problem.template.configs(problem)), None)
    found = None if config is None else runs_of(problem, "scores", config)
    return found is not None and found.known is None and found.whole is not None and found.whole.begin is not None


def _longest(problem: Problem) -> int:
    """Elements of a head's longer side, as configurations are chosen by."""
    return next(most for most in CONFIGS if max(problem.size("d"), problem.size("v")) <= most)


def _boxed(problem: Problem) -> list[Access]:
    """The results that TMA can store."""
    return [one for one in tma_accesses(problem, "O") if one.written]
