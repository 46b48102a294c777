"""What a matmul of the C++ engine takes, with constants fitted to measurements on an Intel Xeon with AMX
(`bench/cpu_matmuls.py`). The library's time, in the same units: `kgen.cost.model`.

With many rows the operands are packed, then multiplied; with a few the time is that of reading them, where they lie. Between,
rows are packed and columns read while they are multiplied (`include/kgen/dots.h`). The constants of pairs in registers, and of
such columns, come from an AMD EPYC with AVX-512's instructions for bfloat16.
"""

from __future__ import annotations

import math

import torch

from kgen.ir import values as vs
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen import packing
from kgen.templates.cpp.kernels.blocking import DOT_ROWS, FEW_ROWS, Blocking, choose_blocking
from kgen.templates.problem import Problem

# Seconds: starting the kernel, and packing and storing what there is at least.
START = 2e-6
# Share of the peak rate: of numbers in registers (0.83 to 0.95 of the library's, by the CPU), and of bfloat16 in tiles, whose
# packing counts for more.
RATE, TILES_RATE, TILES_COLUMNS_RATE = 0.88, 0.8, 0.56
PAIRS_RATE = 0.93  # of bfloat16 in registers
# The same of convolutions, and the share of the bandwidth at which their images are packed, where calls follow each other and
# nothing stays in a core's caches (docs/decisions/0029-prices-of-cpu-convolutions.md).
IMAGES_RATE, IMAGES_TILES_RATE, IMAGES_PACK_RATE = 0.65, 0.36, 0.35
# The latter of float32 images that one tap reads in order (the same decision: an AMD EPYC with AVX-512).
IN_ORDER_PACK_RATE = 0.6
# And the seconds of a thread for each result, which few channels do not hide, and for each unit of its epilogue's cost.
IMAGES_RESULT, IMAGES_EPILOGUE = 0.5e-9, 0.01e-9
# The same of convolutions whose filters were packed before the call: the start, the share of the rate, the bytes of windows
# that a thread packs in a second, and its seconds for each result (docs/decisions/0031-frozen-convolutions-on-cpus.md).
FROZEN_START, FROZEN_RATE, FROZEN_PACK, FROZEN_RESULT = 25e-6, 0.7, 12e9, 0.2e-9
# And how many times longer than an estimate without such filters the same takes in tiles.
FROZEN_TILES = 1.6
# Seconds of a thread for each result of a few rows or columns: adding up a register's lanes.
FEW_RESULT = 2e-9
# Share of the memory's bandwidth: of packing, of reading columns of a few rows, and of pairs that have to be brought together.
PACK_RATE, READ_RATE, PAIRING_RATE = 1.0, 1.0, 0.55
# What is left of the time of reading columns that are read while they are multiplied.
READ_MEANWHILE = 0.75
# Adding up rows that were just packed, from the cache, to bringing them there from memory.
SUMMING = 0.25
# Rows of a rectangle whose matmuls take as long as bringing its columns into order.
PACKED_ROWS = 16


def seconds(problem: Problem, config: Config) -> float:
    """The time of a kernel."""
    smallest = min(problem.size("m"), problem.size("n"))
    ready = packed(problem)
    few = smallest <= config.FEW_ROWS and not ready
    pairs = problem.main_dtype is torch.bfloat16 and problem.device.narrow > 1
    apart = pairs and any(problem.stride(name, "k") != 1 for name in ("A", "B")[: 1 if ready else 2])
    compute = problem.flops / problem.rate / _rate(problem, pairs, apart) * (1.0 if few else _padded(problem))
    share = (PAIRING_RATE if apart and smallest > 2 else READ_RATE) if few else PACK_RATE
    reading = {name: problem.bytes_read(name) / problem.device.bandwidth / share for name in problem.inputs}
    if problem.windowed_call is not None and ready and not problem.device.in_tiles(problem.main_dtype):
        return _of_frozen_filters(problem, config)
    if problem.windowed_call is not None and not few:
        reading["A"] /= IMAGES_PACK_RATE if _of_windows(problem) else IN_ORDER_PACK_RATE
        compute += _of_results(problem)
    compute += sum(problem.bytes_read(one.operand) for one in problem.operand_reductions) / problem.device.bandwidth * SUMMING
    writing = problem.epilogue_bytes / problem.device.bandwidth
    if few:
        compute += FEW_RESULT * _results(problem) / problem.device.compute_units
        alone = problem.device.compute_units if _one_thread(problem) else 1
        return START + writing + max(compute, sum(reading.values())) * alone
    if problem.in_order or not (problem.static("m") and problem.static("n")):
        compute *= _excess(problem, config)
    if ready:  # what is packed comes from memory while it is multiplied
        longer = FROZEN_TILES if problem.windowed_call is not None else 1.0
        return START + writing + (max(compute, reading["B"]) + reading["A"]) * longer
    if _dots(problem):
        reading["B"] *= READ_MEANWHILE
    return START + writing + compute + sum(reading.values())


def _of_results(problem: Problem) -> float:
    """The time for a convolution's results and their epilogue. Those of matrices take what a matmul's do, and a separate kernel
    computes as much of the library's results, unless the library does both in one call."""
    if not _of_windows(problem) and not problem.has_fused_call:
        return 0.0
    each = IMAGES_RESULT + IMAGES_EPILOGUE * vs.total_cost([root for s in problem.epilogue for root in s.roots])
    return each * _results(problem) / problem.device.compute_units


def _of_frozen_filters(problem: Problem, config: Config) -> float:
    """The time of a convolution whose filters are packed: threads pack its windows, and multiply them."""
    threads = problem.device.compute_units
    compute = problem.flops / problem.rate / FROZEN_RATE * _padded(problem)
    if problem.in_order or not (problem.static("m") and problem.static("n")):
        compute *= _excess(problem, config)
    packing = problem.bytes_of_operand("A") / FROZEN_PACK + _results(problem) * FROZEN_RESULT
    others = problem.bytes_read("B") + max(0, problem.epilogue_bytes - problem.stored_bytes)
    return FROZEN_START + compute + packing / threads + others / problem.device.bandwidth


def _results(problem: Problem) -> int:
    """Numbers of a matmul's result."""
    return problem.size_of_result // problem.main_dtype.itemsize


def _padded(problem: Problem) -> float:
    """How many times the columns that there are the main loop multiplies: whole registers of them, or, in tiles, all."""
    if problem.device.in_tiles(problem.main_dtype):
        return 1.0
    columns, lanes = max(1, problem.size("n")), problem.device.lanes
    return math.ceil(columns / lanes) * lanes / columns


def _rate(problem: Problem, pairs: bool, apart: bool) -> float:
    """The share of the peak rate that matmuls reach: of numbers, of `pairs`, or of those that are no neighbours in memory."""
    tiles = problem.device.in_tiles(problem.main_dtype)
    if _of_windows(problem):
        return IMAGES_TILES_RATE if tiles else IMAGES_RATE
    if not tiles:
        return PAIRS_RATE if pairs else RATE
    return TILES_COLUMNS_RATE if apart else TILES_RATE


def _of_windows(problem: Problem) -> bool:
    """Whether windows of images are gathered. Float32 images that one tap reads in order are matrices like others, which was
    measured where the library is a guest: elsewhere its convolutions of one tap are as fast as these."""
    if problem.windowed_call is None:
        return False
    measured = problem.device.library < 1 and problem.main_dtype.itemsize == torch.float32.itemsize
    windows = (one for one in problem.inputs.values() if problem.reads_window(one))
    return not measured or not all(map(problem.joins_matrices, windows))


def _dots(problem: Problem) -> bool:
    """Whether columns are multiplied where they lie: `Operand::takes_dots` of the engine."""
    if problem.device.in_tiles(problem.main_dtype) or problem.size("m") > DOT_ROWS:
        return False
    return all(problem.stride("B", "k", number) == 1 for number in range(len(problem.members)))


def packed(problem: Problem) -> bool:
    """Whether all right operands were packed before the call."""
    return all(problem.is_frozen("B", k) and packing.why_not(problem, "B", k) is None for k in range(len(problem.members)))


def rule(problem: Problem) -> Blocking:
    """The cut that the rule makes at the hints."""
    return _rule(problem, problem.in_order)


def _rule(problem: Problem, in_order: tuple[str, ...]) -> Blocking:
    """Were results stored in order along these axes."""
    size, isa = (problem.size("m"), problem.size("n"), problem.size("k")), problem.device.isa
    order = next((axis for axis in "mn" if axis in in_order), "")
    return choose_blocking(size, problem.main_dtype, isa, _threads(problem, in_order), len(problem.members), order)


def _threads(problem: Problem, in_order: tuple[str, ...]) -> int:
    """Threads that share one matmul."""
    compute_units = problem.device.compute_units
    return 1 if problem.size("b") >= compute_units and "b" not in in_order else compute_units


def _excess(problem: Problem, config: Config) -> float:
    """How many times longer the matmuls take than with the rule's cut, in any order: a cut made for another length of a
    dynamic axis packs columns more often, or leaves threads idle, and so does an order."""
    own = Blocking(config.ROWS, config.BLOCK_M, config.BLOCK_N, config.SPLIT_K)
    return max(1.0, _effort(problem, own, problem.in_order) / _effort(problem, _rule(problem, ()), ()))


def _effort(problem: Problem, cut: Blocking, in_order: tuple[str, ...]) -> float:
    """What the thread with most rectangles does, in a unit of the problem's."""
    b, m, n = (problem.size(axis) for axis in "bmn")
    threads = _threads(problem, in_order)
    rows = min(cut.rows, m)
    tile_rows, tile_columns = min(cut.tile_rows, rows), min(cut.tile_columns, n)
    down, across = math.ceil(rows / tile_rows), math.ceil(n / tile_columns)
    tasks, each = down * across * cut.parts, tile_rows * tile_columns / cut.parts
    if cut.parts == 1 and "m" in in_order:
        tasks, each = across, rows * tile_columns
    elif cut.parts == 1 and "n" in in_order:
        tasks, each = down, tile_rows * n
    matmuls = b if threads > 1 or "b" in in_order else math.ceil(b / problem.device.compute_units)
    rounds = matmuls * math.ceil(m / rows) * math.ceil(tasks / threads)
    return rounds * each * (1 + PACKED_ROWS / tile_rows)


def _one_thread(problem: Problem) -> bool:
    """Whether a few rows, or columns, are stored in the order of what threads would share."""
    return ("n" if problem.size("m") <= FEW_ROWS else "m") in problem.in_order
