"""What a matrix product of the C++ engine takes, with constants fitted to measurements on an Intel Xeon with AMX
(`bench/cpu_products.py`). The library's time, in the same units: `kgen.tuning.model`.

With many rows the operands are packed, then multiplied; with a few the time is that of reading them, where they lie.
"""

from __future__ import annotations

import math

import torch

from kgen.templates.contract import Config
from kgen.templates.cpp import packing
from kgen.templates.cpp.blocking import Blocking, choose_blocking
from kgen.templates.problem import Problem

# Seconds: starting the kernel, and packing and storing what there is at least.
START = 2e-6
# Share of the peak rate: of numbers in registers (0.83 to 0.95 of the library's, by the CPU), and of bfloat16 in tiles, whose
# packing counts for more.
RATE, PAIRS_RATE, PAIRS_COLUMNS_RATE = 0.88, 0.8, 0.56
# Share of the memory's bandwidth: of packing, of reading columns of a few rows, and of pairs that have to be brought together.
PACK_RATE, READ_RATE, PAIRING_RATE = 1.0, 1.0, 0.55
# Adding up rows that were just packed, from the cache, to bringing them there from memory.
SUMMING = 0.25
# Rows of a rectangle whose products take as long as bringing its columns into order.
PACKED_ROWS = 16


def seconds(problem: Problem, config: Config) -> float:
    """The time of a kernel."""
    smallest = min(problem.size("m"), problem.size("n"))
    ready = packed(problem)
    few = smallest <= config.FEW_ROWS and not ready
    pairs = problem.main_dtype is torch.bfloat16 and problem.device.narrow > 1
    apart = pairs and any(problem.stride(name, "k") != 1 for name in ("A", "B")[: 1 if ready else 2])
    compute = problem.flops / problem.rate / (PAIRS_COLUMNS_RATE if apart else PAIRS_RATE if pairs else RATE)
    share = (PAIRING_RATE if apart and smallest > 2 else READ_RATE) if few else PACK_RATE
    reading = {name: problem.bytes_read(name) / problem.device.bandwidth / share for name in problem.inputs}
    compute += sum(problem.bytes_read(one.operand) for one in problem.side_sums) / problem.device.bandwidth * SUMMING
    writing = problem.epilogue_bytes / problem.device.bandwidth
    if not few and not (problem.static("m") and problem.static("n")):
        compute *= _excess(problem, config)
    if ready:  # what is packed comes from memory while it is multiplied
        return START + writing + max(compute, reading["B"]) + reading["A"]
    return START + writing + (max(compute, sum(reading.values())) if few else compute + sum(reading.values()))


def packed(problem: Problem) -> bool:
    """Whether all right operands were packed before the call."""
    return all(problem.is_frozen("B", k) and packing.why_not(problem, "B", k) is None for k in range(len(problem.members)))


def rule(problem: Problem) -> Blocking:
    """The cut that the rule makes at the hints."""
    b, m, n, k = (problem.size(axis) for axis in "bmnk")
    device = problem.device
    return choose_blocking((m, n, k), problem.main_dtype, device.isa, _threads(b, device.processors), len(problem.members))


def _threads(batch: int, processors: int) -> int:
    """Threads that share one matrix product."""
    return 1 if batch >= processors else processors


def _excess(problem: Problem, config: Config) -> float:
    """How many times longer the products take than with the rule's cut: a cut made for another length of a dynamic axis packs
    columns more often, or leaves threads idle."""
    own = Blocking(config.ROWS, config.BLOCK_M, config.BLOCK_N, config.PARTS)
    return max(1.0, _effort(problem, own) / _effort(problem, rule(problem)))


def _effort(problem: Problem, cut: Blocking) -> float:
    """What the thread with most rectangles does, in a unit of the problem's."""
    b, m, n = (problem.size(axis) for axis in "bmn")
    rows = min(cut.rows, m)
    tile_rows, tile_columns = min(cut.tile_rows, rows), min(cut.tile_columns, n)
    tasks = math.ceil(rows / tile_rows) * math.ceil(n / tile_columns) * cut.parts
    rounds = math.ceil(m / rows) * math.ceil(tasks / _threads(b, problem.device.processors))
    return rounds * tile_rows * tile_columns / cut.parts * (1 + PACKED_ROWS / tile_rows)
