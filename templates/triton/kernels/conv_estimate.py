"""What convolutions take on a GPU. Nobody has compared these estimates with measurements: they order configurations."""

from __future__ import annotations

import math

from kgen.device import L2_RATE
from kgen.templates.base import Resources
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels.estimate import LAUNCH, POINTER_RATE, REGISTERS, RESERVED, SHARED, START, STREAM_RATE

# Share of the peak rate that tiles reach, by the fewest of their points; seconds of a program's step that are address
# arithmetic, and seconds for each tap of a loop over taps whose pipeline drains.
SMALL_RATES = ((128 * 256, 1.0), (128 * 128, 0.93), (128 * 64, 0.75), (64 * 64, 0.6), (0, 0.4))
STEP, DRAINED = 0.02e-6, 0.6e-6


def implicit_gemm(problem: Problem, config: Config, needs: Resources) -> float:
    """The time of tiles whose steps are taps and blocks of channels."""
    device, area = problem.device, config.BLOCK_M * config.BLOCK_N
    tiles = problem.size("g") * math.prod(
        math.ceil(problem.size(axis) / block) for axis, block in (("m", config.BLOCK_M), ("n", config.BLOCK_N))
    )
    taps = problem.size("t")
    steps = taps * math.ceil(problem.size("c") / config.BLOCK_C)
    share = POINTER_RATE * next(rate for least, rate in SMALL_RATES if area >= least)
    arithmetic = 2 * area * config.BLOCK_C / (problem.rate / device.compute_units) / share
    loaded = (config.BLOCK_M + config.BLOCK_N) * config.BLOCK_C * problem.main_dtype.itemsize / L2_RATE
    tile = steps * (max(arithmetic, loaded) + STEP) + START + (0.0 if config.FLATTEN else taps * DRAINED)
    busy = math.ceil(tiles / device.compute_units) * tile
    together = max(1, min(SHARED // (needs.shared + RESERVED), REGISTERS // (min(255, needs.registers) * config.WARPS * 32)))
    busy *= 1.0 if together > 1 or tiles <= device.compute_units else 1.15  # nothing hides an epilogue
    return LAUNCH + max(busy, streaming(problem)) + START


def streaming(problem: Problem) -> float:
    """Seconds of what has to come from memory and go there."""
    moved = sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
    return moved / problem.device.bandwidth / STREAM_RATE
