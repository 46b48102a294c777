"""What a matrix product of the C++ engine takes, with constants fitted to measurements on an Intel Xeon with AMX
(`bench/cpu_products.py`). The library's time, in the same units: `kgen.tuning.model`.

With many rows the operands are packed, then multiplied; with a few the time is that of reading them, where they lie.
"""

from __future__ import annotations

import torch

from kgen.templates.contract import Config
from kgen.templates.problem import Problem

# Seconds: starting the kernel, and packing and storing what there is at least.
START = 2e-6
# Share of the peak rate: of numbers in registers, and of bfloat16 in tiles, whose packing counts for more.
RATE, PAIRS_RATE, PAIRS_COLUMNS_RATE = 0.88, 0.8, 0.56
# Share of the memory's bandwidth: of packing, of reading columns of a few rows, and of pairs that have to be brought together.
PACK_RATE, READ_RATE, PAIRING_RATE = 1.0, 1.0, 0.55


def seconds(problem: Problem, config: Config) -> float:
    """The time of a kernel."""
    smallest = min(problem.size("m"), problem.size("n"))
    few = smallest <= config.FEW_ROWS
    pairs = problem.main_dtype is torch.bfloat16 and problem.device.narrow > 1
    apart = pairs and any(problem.stride(name, "k") != 1 for name in ("A", "B"))
    compute = problem.flops / problem.rate / (PAIRS_COLUMNS_RATE if apart else PAIRS_RATE if pairs else RATE)
    share = (PAIRING_RATE if apart and smallest > 2 else READ_RATE) if few else PACK_RATE
    reading = sum(problem.bytes_read(name) for name in problem.inputs) / problem.device.bandwidth / share
    writing = problem.epilogue_bytes / problem.device.bandwidth
    return START + writing + (max(compute, reading) if few else compute + reading)
