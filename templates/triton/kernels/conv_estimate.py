"""What convolutions take on a GPU. But for depthwise ones along one axis, and those by warps with parts of their own, these
estimates only order configurations: dense ones of 64 to 256 channels take .83 to 1.6 of them (H100, 2026-11-25,
bench.gpu_convs), too little to choose by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kgen.device import L2_RATE, SECTOR
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.templates import calibration
from kgen.templates.base import Resources
from kgen.templates.contract import Config
from kgen.templates.problem import Problem
from kgen.templates.triton.kernels.estimate import (
    LAUNCH,
    POINTER_RATE,
    REGISTERS,
    RESERVED,
    SHARED,
    START,
    STREAM_RATE,
    WIDEST,
)

# Share of the peak rate that tiles reach, by the fewest of their points; seconds of a program's step that are address
# arithmetic, and seconds for each tap of a loop over taps whose pipeline drains.
SMALL_RATES = ((128 * 256, 1.0), (128 * 128, 0.93), (128 * 64, 0.75), (64 * 64, 0.6), (0, 0.4))
STEP, DRAINED = 0.02e-6, 0.6e-6
# Ordinary instructions that an SM starts in a cycle, cycles a second, and instructions of a load with its address and bounds;
# warps that keep an SM busy; and bytes that lie side by side where loads make good use of what the memory gives.
LANES, CLOCK, LOAD, BUSY_WARPS, RUN = 128, 1.7e9, 10, 16, 64
# Instructions of a multiplication with an addition: operands are widened, and filters are brought to each thread. Windows along
# two axes are loaded element by element, for each has bounds of its own (H100, 2026-11-26, bench.regret: 15 convolutions, .7 to
# 1.5 of the estimate, but for filters of hundreds of taps and channels).
MULTIPLIED = 2.5
# Of depthwise convolutions whose threads have several positions: instructions of a load of a tap, how many more an element of
# an image takes whose numbers have fewer bytes than a register, and fewer without bounds; how much longer all takes, and the
# share of the shorter of computing and moving that does not happen during the other; and rounds of programs of which the last
# counts. 18 times of 9 problems are .8 to 1.3 of the estimate (H200, 2026-11-27, bench.gpu_depthwise). Taps of channels side by
# side are gathered: 7 x 7 of 14 x 14 took 26.8 us with 8 channels a thread, 18.2 with 4 (2026-11-30, bench.regret --kernels).
FILTER, FULL, CONVERTED, BOUNDED, DEPTHWISE_LONGER, DEPTHWISE_APART, FEW_ROUNDS = 6, 4, 3, 4, 1.1, 0.4, 2


# Of warps with parts of their own, whose estimates are as measured (H100, 2026-11-26, bench.gpu_convs and bench.regret: 105
# times of 18 layers, standard deviation of the logarithm .08): the share of the peak rate by a tile's channels, what is left of
# it where warp groups multiply in turn; bytes a second that TMA brings to an SM; how much longer a step takes of the fewest
# stages; seconds of each element of an epilogue, and what is left of them beside another tile; seconds before and after; and
# the share of the bandwidth, and of the shorter of computing and moving what does not happen during the other.
SHARES = {64: 0.607, 128: 0.949, 256: 0.898}
IN_TURN, LOAD_RATE, SHALLOW, FEWEST_STAGES, EPILOGUE, BESIDE = 0.911, 116e9, 1.07, 3, 1.45e-10, 0.675
BEGINNING, MOVE_RATE, APART = 1.8e-6, 0.863, 0.44
# Of depthwise convolutions: types, axes of windows, the fewest taps and the most, and the fewest results. And the most taps and
# the longest stride where the library has fast kernels: channels side by side, in rows of whole loads.
HOPPER, MEASURED_TYPES, PLANE = 9, (torch.float32, torch.float16, torch.bfloat16), 2
FEW_TAPS, MANY_TAPS, FEWEST_RESULTS = 9, 121, 1_500_000
TAPS_BESIDE, STEP_BESIDE = 49, 2
# Windows of one axis: the fewest and the most taps that were measured, what they take of the estimate where positions lie side
# by side, and how many times as long where channels do, of which a thread loads few at a time; and bytes of sectors that the L2
# cache takes in a second (H200, 2026-11-29, bench.gpu_depthwise: 12 times of 3 problems are .68 to 1.15 of the estimate; of
# channels side by side 44 to 97 us).
SHORTEST_LINE, LONGEST_LINE, LINE_APART, LINE_BESIDE, SECTOR_RATE = 5, 31, 0.45, 5.0, 4.4e12
# What was measured: taps, half of the channels of a tile that is full, and the fewest positions.
MEASURED_TAPS, HALF_TILE, FEWEST_ROWS = 9, 64, 1024


# What depthwise convolutions along one axis take of the estimate; the library's take 7 times as long as the template's (H100,
# 2026-11-25, bench.gpu_convs: causal conv1d, channels last, 1.5 to 1.9). Those along two axes were slower than the library's.
ALONG_ONE = 1.2


@dataclass(frozen=True, slots=True)
class Strips:
    """How many strips of positions there are, and the taps and coordinates along the first dimension of their windows."""

    count: int
    taps: int
    coordinates: int


def direct_unmeasured(problem: Problem) -> str | None:
    """Why nothing is known of a direct convolution."""
    if not _runs_along_one_axis(problem):
        return "no GPU has measured it but depthwise along one axis, with the channels of images and results side by side"
    return calibration.of_half_on_hopper(problem)


def _runs_along_one_axis(problem: Problem) -> bool:
    """Whether windows of a depthwise convolution reach along one axis of an image whose channels lie side by side, and whose
    results do: with positions side by side it took 6 times its estimate (H100, 2026-11-26: Mamba)."""
    image = problem.inputs["X"]
    depthwise = problem.size("c") == problem.size("n") == 1
    along = depthwise and _is_line(problem) and are_channels_beside(problem)
    channel = image.loops["g"][-1:]
    stored = [s.store[0] for s in problem.epilogue if any(s.stored)]
    return along and all(ix.stride_of(index, v) == 1 for v in channel for index in stored)


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


def warp_specialized(problem: Problem, config: Config, tiles_of_positions: int) -> float:
    """The time of tiles whose operands TMA brings while others are multiplied: of two warp groups that share each tile, or have
    one each, of which one multiplies while the other one's epilogue runs."""
    device, area, size = problem.device, config.BLOCK_M * config.BLOCK_N, problem.main_dtype.itemsize
    tiles = problem.size("g") * tiles_of_positions * math.ceil(problem.size("n") / config.BLOCK_N)
    steps = problem.size("t") * math.ceil(problem.size("c") / config.BLOCK_C)
    share = SHARES[config.BLOCK_N] * (1.0 if config.COOPERATIVE else IN_TURN)
    arithmetic = 2 * area * config.BLOCK_C / (problem.rate / device.compute_units) / share
    loaded = (config.BLOCK_M + config.BLOCK_N) * config.BLOCK_C * size / LOAD_RATE
    step = max(arithmetic, loaded) * (SHALLOW if config.STAGES == FEWEST_STAGES else 1.0)
    epilogue = EPILOGUE * area * (1.0 if config.COOPERATIVE else BESIDE)
    busy = math.ceil(tiles / device.compute_units) * (steps * step + epilogue)
    moved = _moved(problem) / device.bandwidth / MOVE_RATE
    return BEGINNING + max(busy, moved) + APART * min(busy, moved)


def warp_specialized_unmeasured(problem: Problem) -> str | None:
    """Why nothing is known of a convolution by warps with parts of their own. With a last tile of half its channels (320) it
    took up to 1.6 of the estimate, and was slower than the library."""
    taps, channels, filters = problem.size("t"), problem.size("c"), problem.size("n")
    whole = filters == HALF_TILE or filters % (2 * HALF_TILE) == 0
    if (taps, problem.size("g")) != (MEASURED_TAPS, 1) or channels % HALF_TILE or not whole or problem.size("m") < FEWEST_ROWS:
        return (
            f"no GPU has measured it but on filters of {MEASURED_TAPS} taps, on multiples of {HALF_TILE} channels in and of "
            f"{2 * HALF_TILE} out, and on at least {FEWEST_ROWS} positions"
        )
    return calibration.of_half_on_hopper(problem)


def weight_gradient(problem: Problem, config: Config) -> float:
    """The time of tiles whose sums over positions are split into parts, with the memory traffic of these parts."""
    device, area = problem.device, config.BLOCK_M * config.BLOCK_N
    blocks = {"g": 1, "t": 1, "m": config.BLOCK_M, "n": config.BLOCK_N}
    programs = config.SPLIT * math.prod(math.ceil(problem.size(axis) / block) for axis, block in blocks.items())
    steps = math.ceil(problem.size("k") / config.BLOCK_K / config.SPLIT)
    share = POINTER_RATE * next(rate for least, rate in SMALL_RATES if area >= least)
    arithmetic = 2 * area * config.BLOCK_K / (problem.rate / device.compute_units) / share
    loaded = (config.BLOCK_M + config.BLOCK_N) * config.BLOCK_K * problem.main_dtype.itemsize / L2_RATE
    each = steps * (max(arithmetic, loaded) + STEP) + START + 4 * area / L2_RATE
    last = 4 * area * config.SPLIT / L2_RATE
    busy = math.ceil(programs / device.compute_units) * each + last
    parts = 8 * area * programs / device.bandwidth
    return 2 * LAUNCH + max(busy, streaming(problem) + parts) + START


def direct(problem: Problem, config: Config, needs: Resources) -> float:
    """The time of tiles that are multiplied and added up by ordinary instructions."""
    device = problem.device
    blocks = {"g": config.BLOCK_G, "m": config.BLOCK_M, "n": config.BLOCK_N}
    tiles = math.prod(math.ceil(problem.size(axis) / block) for axis, block in blocks.items())
    image, filters = config.BLOCK_G * config.BLOCK_M, config.BLOCK_G * config.BLOCK_N
    plane = sum(v.extent != 1 for v in problem.inputs["X"].loops["t"]) > 1
    wide = 1 if plane else _width(problem, "X", blocks), _width(problem, "F", blocks)
    apart = max(1.0, RUN / (config.BLOCK_G * problem.main_dtype.itemsize)) if wide[0] > 1 else 1.0  # of lines that are not full
    loads = image * (1 + LOAD / wide[0] * apart) + filters * (1 + LOAD / wide[1])
    step = (image * config.BLOCK_N * MULTIPLIED + loads) / LANES / CLOCK
    steps = problem.size("t") * problem.size("c")
    together = max(1, REGISTERS // (min(255, needs.registers) * config.WARPS * 32))
    waits = max(1.0, BUSY_WARPS / (together * config.WARPS))
    busy = math.ceil(tiles / device.compute_units) * (steps * step * waits + START / together)
    longer = ALONG_ONE if _runs_along_one_axis(problem) else 1.0
    return LAUNCH + longer * max(busy, streaming(problem)) + START


def depthwise(problem: Problem, config: Config, strips: Strips, registers: int) -> float:
    """The time of tiles of which each thread has several positions. An SM holds as many programs as its registers allow; with
    few warps it waits for positions that are loaded one by one, and where all programs are less than two rounds of these, the
    last round takes as long as a full one."""
    device, threads = problem.device, config.WARPS * 32
    tile, columns = config.BLOCK_G * config.BLOCK_M, problem.size("t") // strips.taps
    own = min(_width(problem, "X", {"g": config.BLOCK_G}), max(1, tile // threads)) if config.BLOCK_G > 1 else 1
    image = strips.coordinates * tile * (1 + _load(problem) / own)
    step = columns * (image + strips.taps * threads * own * FILTER + strips.taps * config.ROWS * tile) / LANES / CLOCK
    programs = math.ceil(problem.size("g") / config.BLOCK_G) * problem.size("n") * math.ceil(strips.count / config.BLOCK_M)
    beside = max(1, REGISTERS // (min(255, registers) * threads))
    rounds = programs / device.compute_units / beside
    waits = max(1.0, BUSY_WARPS / (beside * config.WARPS)) if config.BLOCK_G == 1 else 1.0
    idle = math.ceil(rounds) / rounds if rounds < FEW_ROUNDS else waits
    busy, moved = programs / device.compute_units * step * idle, streaming(problem)
    if _is_line(problem):
        busy = busy * LINE_BESIDE if are_channels_beside(problem) else busy * LINE_APART + _scattered(problem, config.ROWS)
    return LAUNCH + START + DEPTHWISE_LONGER * (max(busy, moved) + DEPTHWISE_APART * min(busy, moved))


def _scattered(problem: Problem, rows: int) -> float:
    """Seconds of results that the threads of a warp store into sectors of their own, so many of a thread."""
    results, size = problem.size("g") * problem.size("m"), problem.main_dtype.itemsize
    return results * min(SECTOR, rows * size) / SECTOR_RATE


def has_bounds(problem: Problem) -> bool:
    """Whether loads of an image have bounds, as those of a padded one do."""
    return any(load.args for load in vs.loads([problem.inputs["X"].value]))


def _load(problem: Problem) -> int:
    narrow = problem.inputs["X"].dtype.itemsize < FULL
    return LOAD + (CONVERTED if narrow else 0) - (0 if has_bounds(problem) else BOUNDED)


def are_channels_beside(problem: Problem) -> bool:
    """Whether the channels of an image lie side by side."""
    return _width(problem, "X", {"g": RUN}) > 1


def depthwise_unmeasured(problem: Problem) -> str | None:
    """Why nothing is known of a depthwise convolution."""
    hopper = problem.device.arch // 10 == HOPPER
    if not hopper or any(one.dtype not in MEASURED_TYPES for one in problem.inputs.values()):
        return "no GPU but one of compute capability 9.0 has measured it, on floats of 16 and 32 bits"
    if _is_line(problem) and (problem.size("t") > LONGEST_LINE or max(problem.steps.values(), default=1) > 1):
        return f"no GPU has measured it along one axis but on {LONGEST_LINE} taps at most and steps of 1"
    if len(problem.inputs["X"].loops["t"]) > PLANE:
        return "no GPU has measured it but on windows along one axis or two"
    return _unmeasured_windows(problem)


def _is_line(problem: Problem) -> bool:
    """Whether windows have one axis."""
    return len(problem.inputs["X"].loops["t"]) == 1


def _unmeasured_windows(problem: Problem) -> str | None:
    image, taps = problem.inputs["X"], problem.size("t")
    results = problem.size("g") * problem.size("m")
    fewest = SHORTEST_LINE if _is_line(problem) and not are_channels_beside(problem) else FEW_TAPS
    if problem.size("n") != 1 or not fewest <= taps <= MANY_TAPS or results < FEWEST_RESULTS:
        return (
            f"no GPU has measured it but on {fewest} to {MANY_TAPS} taps, and {FEWEST_RESULTS:,} results, one of each channel"
        )
    if image.load is None and image.bounded_load is None:
        return "no GPU has measured it on an image that is computed"
    whole = problem.size("g") * image.dtype.itemsize % WIDEST == 0
    if are_channels_beside(problem) and whole and (taps > TAPS_BESIDE or max(problem.steps.values(), default=1) > STEP_BESIDE):
        return (
            f"no GPU has measured it with channels side by side, in rows of whole loads, but on {TAPS_BESIDE} taps at most and "
            f"strides of {STEP_BESIDE} at most"
        )
    return None


def _width(problem: Problem, name: str, blocks: Mapping[str, int]) -> int:
    """Elements of an operand that a thread loads at a time: neighbours along a side of its tile. Neighbouring positions begin
    anywhere, for a tap moves all of them."""
    one = problem.inputs[name]
    index = next((load.attr[1][0] for load in vs.loads([one.value])), None)
    for axis in (axis for axis in one.axes if axis in blocks and axis != "m"):
        loops = one.loops[axis]
        if index is not None and loops and ix.stride_of(index, loops[-1]) == 1:
            return min(WIDEST // one.dtype.itemsize, blocks[axis])
    return 1


def streaming(problem: Problem) -> float:
    """Seconds of what has to come from memory and go there."""
    return _moved(problem) / problem.device.bandwidth / STREAM_RATE


def _moved(problem: Problem) -> int:
    return sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
