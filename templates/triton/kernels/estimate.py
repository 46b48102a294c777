"""What a matmul takes on a GPU, tile by tile. Constants are fitted to measurements on an H200 (`bench/cost_model.py`).

An SM works off its tiles one after the other: the MMAs of a tile, slowed down where too few bytes are on their way
to it at a time, then the tile's epilogue, which another program on the same SM hides. The memory sets a limit to all of
them together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kgen.device import ADDITIONS, L2_RATE, LINE, SECTOR
from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.templates.calibration import HOPPER
from kgen.templates.contract import Config
from kgen.templates.problem import Input, Problem, memoised, memoised_at_sizes
from kgen.templates.triton.codegen.precision import exact_values
from kgen.templates.triton.codegen.rng_blocks import share_blocks
from kgen.templates.triton.codegen.tile import uniform_loops
from kgen.templates.triton.codegen.tma_layout import by_tma, tiles_read

# Seconds: a launch with what stands idle at either end; starting a program; from asking for a stage until it is there.
LAUNCH, START, LATENCY = 1.4e-6, 0.35e-6, 0.85e-6
# Bytes of the narrowest asynchronous copy. Operands whose runs in memory are narrower pass through registers: none is on its
# way while a program multiplies, and each step begins with waiting for them, for the L2 cache at least (H100, 2026-11-27,
# bench.untuned: steps took .5 to 1.25 us more than what they do, of rows of 845, 65,537 and 1001 numbers of 16 bits).
NARROWEST, FETCHED = 4, 0.5e-6
# Until each warp has its part, and the barriers between them are there (H100, 2026-11-26, bench.regret: 79 kernels).
PARTING = 0.6e-6
# The same of bytes that come from the memory behind the L2 cache to a program that asks for many at a time (H100 and H200,
# 2026-11-27, bench.regret: 200 kernels on 32 to 400 programs).
ARRIVING = 1.15e-6
# The share of the L2 cache's rate at which TMA fills with zeros what tiles have beyond the ends of an operand: 2 TB/s for all
# SMs together (H200, 2026-11-27, bench.regret --kernels: of tiles of 64 rows for four, the zeros take longer than the weights).
ZEROS_SHARE = 0.15
# What functions of the device's library cost in epilogues beyond the additions that they count for elsewhere (H100, 2026-11-24,
# bench.regret; H200, 2026-11-30, bench.untuned: 20 million cosines of sums of angles and arc cosines behind a matmul of 35 us
# took 552 us, in a kernel of their own 92).
LONGER = {"erf": 45, "log1p": 80, "sigmoid": 12, "sin": 260, "cos": 260, "tan": 280, "acos": 400, "asin": 400}
# The same of those whose results are to be as exact as eager's: a branch for each of a thread's numbers, one after the other
# (H100, 2026-11-27, bench.untuned: 32 million tanh behind a matmul and in front of sums of rows, 128 us).
EXACTLY = {"tanh": 140}
# The same of each of the longer functions whose result is to be as exact, where warps have parts of their own: GELU and
# softplus of float32 took 77 to 93 more than expected, SiLU behind a norm 107 to 165 (H200, 2026-11-30, bench.regret --tf32).
EXACTLY_IN_PARTS = 85
# The same of random numbers whose blocks are made for each of them: in Gluon, in a loop over tiles, which has no registers for
# blocks, and of a part of a tile (H200, 2026-11-29, decision 0050: behind a linear layer of 67 million results 380 us more).
EACH = {"rand": 290, "randn": 330, "randbits": 290}
# And of those that share their blocks, whose numbers go from one layout of threads to another: 108 us more, with GELU 203.
SHARED_BLOCK = 80
# What each number that an epilogue reads counts for, in additions: it is loaded, widened, and seldom there in time (H100,
# 2026-11-24, bench.regret: gradients of GELU, residuals of 1x1 convolutions).
READ = 10
# Seconds of a warp for each column that it sums up: it folds the rows that its threads have, and waits for the other warps
# (H200, 2026-11-26, gradients between batch norms: 1x1 convolutions of 128 channels into 256 and 512).
SUMMED = 1.5e-9
# How much longer an epilogue takes whose next operands are prefetched while it sums up columns: there are too few registers
# for both (H100, 2026-11-24, bench.regret: gradients of ConvNeXt's MLP, 95 us without, 180 with).
CROWDED, MOST_NUMBERS = 2.0, 256
# Fewer warps than these that have an SM to themselves wait for their own results: how much longer they then add.
WARPS_OF_EPILOGUE, WAITING = 8, 1.0
# Seconds of an epilogue besides: in which nothing is multiplied where a program has the SM to itself; for each part, in
# which warps wait for each other; and for each reduction of full rows, less of shorter ones than these.
TURN, PART, FOLD, FOLDED = 0.05e-6, 0.02e-6, 0.15e-6, 256
# How much longer tiles take in one loop whose epilogue reads rows within bounds, by pointers: seen are 1.3, 1.6, and 6.5 (H100,
# 2026-11-26, bench.regret: ViT's and Whisper's gradients of GELU, ResNet-50's last residual).
MASKED = 1.5
# And where operands are computed, whose times scatter most (standard deviation of the logarithm .36 to .48): what is a tie is
# better read from memory.
DOUBTFUL = 1.06
# The same of programs that keep an operand: a reduction of full rows, and a number that an epilogue reads for each of its own.
FOLD_BESIDE, READ_BESIDE, NEXT = 1.15e-6, 50e-12, 0.35
# Shared memory and registers of an SM, and bytes that the system takes from each program.
SHARED, REGISTERS, RESERVED = 233_472, 65_536, 1024
# Seconds of an SM for each element of an operand that is turned over in shared memory (H100, 2026-11-28, bench.untuned --list
# fourth: gradients of linear layers in TF32; 4,096 elements took .7 to 6.5 us).
TURNED = 1.5e-6 / 4096
# The same for one that becomes TF32 in registers (H200, 2026-11-28: 4096 x 4096 x 4096 in tiles of 128 x 128 took 465 us
# without and 787 with it, 8192 x 1024 x 1024 took 71 and 114).
# In low tiles, of 32 x 64, these took 1690 and 195, of which 1000 and 133 are expected without.
ROUNDED, ROUNDED_LOW = 4.5e-11, 2.2e-11
# Share of the peak rate that the main loop reaches with operands by TMA: of large tiles, of those that
# are higher than wide, for which the units read more of shared memory, of others, and of those below 128 x 128.
LARGE_RATE, TALL_RATE, SMALL_RATE, THIN_RATE = 0.93, 0.88, 0.89, 0.7
# And of small tiles of two programs on an SM.
PAIR_RATE = 0.89
# The same for pointers.
POINTER_RATE = 0.76
# Seconds of a warp that operands cost element by element: those that it computes, for each elementary operation; those of
# windows, whose places and bounds it computes; of rows in runs that jump, but are as wide as loads; and of what threads load in
# so few bytes at a time. The most bytes of a load, and the most warps of an SM that work at it side by side. Fitted to
# measurements on an H100, 2026-11-24 (bench.regret).
COMPUTED, GATHERED, JUMPING, SCATTERED = 32e-12, 0.5e-9, 0.12e-9, 0.04e-9
# How much longer windows within bounds take where a loop brings them in several steps: of three configurations on the stem of
# ResNet-50 estimates were off by 0.9, 3.0 and 4.3, while in one step, with all of the sum in a tile, they hold.
IN_STEPS = 4.3
PLACED = {8: 0.3e-9, 4: 0.45e-9, 2: 0.55e-9, 1: 0.6e-9}
WIDEST, ELEMENT_WARPS = 16, 16
# How much faster SMs multiply while so many of them are idle that the GPU's power does not limit its clock (H100, 2026-11-26,
# bench.regret: 100 kernels with fewer tiles than SMs, or with few in the last wave).
UNTHROTTLED = 1.2
# What is left of it where numbers have 8 bits: the units are twice as fast, small tiles no easier to feed.
BYTE_SHARE = 0.8
# Share of the rate that is left below so many rows, where a Hopper GPU multiplies registers; counted where a tile is so low
# because it is wide, not because there are few rows to read a matrix for.
LOW_TILE, LOW_RATE, LOW_RATE_IN_TURN = 64, 0.3, 0.45
# And of the units that multiply float32 numbers exactly. And seconds for each element that a warp reads of a right operand that
# is contiguous along k in shared memory: its threads have neighbours along n, and wait for each other at the banks (H100,
# 2026-11-27, bench.untuned: a step of 16 x 64 x 64 took 2.8 us where multiplying takes .5).
EXACT_RATE, BANKED = 0.5, 0.14e-9
# Columns that it costs to multiply a tile by ones: 16, but bound by reading the tile from shared memory.
ONES = 32
# How much more a row of an operand costs that begins in the middle of a line of the cache; and one that TMA brings
# from the middle of the bytes that memory is read in (H100, 2026-11-24, bench.regret).
STRADDLING, SPLIT = 2.2, 8.0
# The share of the bandwidth that few SMs can use at least.
ALONE = 0.6
# The share of the time of stores, element by element, for which a program waits.
BY_ELEMENT = 0.85
# Seconds of a step of a program that does nothing but read, and how much longer it takes to read several operands (H100,
# 2026-11-24, bench.regret: one token's attention, experts' SwiGLU).
READ_STEP, READ_SEVERAL = 0.7e-6, 1.1
# And of runs of fewer bytes than lines of the cache need (H100 and H200, 2026-11-26, bench.regret: experts of single tokens).
RUNS = ((2 * LINE, 1.0), (LINE, 1.08), (0, 1.35))
# Share of the memory's bandwidth that kernels reach.
STREAM_RATE, READ_RATE = 0.92, 1.02
# Of two warp groups that take turns on an SM, each with full rows: how much longer a tile takes than its MMAs at
# the rate of low tiles and its epilogue's arithmetic one after the other, and seconds for each number that an epilogue reads.
PING_PONG_SLOWDOWN, TURNS_OF_WORK, READ_IN_TURN = 0.86, 1.0, 29e-12
# The share of it that is left where results leave by TMA, which no warp waits for.
STORED_BY_TMA = 0.88
# Seconds of an SM for each number of a tile at least so wide of which each thread stores a column: they wait for the banks of
# shared memory before (H200, 2026-11-30: softmax of rows of 197 in tiles of 64 x 256 took 58 us with 8 warps, 30 with 4;
# of rows of 198 both took 33).
COLUMN_OF_A_THREAD, WIDE_TILE = 1e-10, 256
# How much of the shorter of computing and streaming, or of multiplying and epilogues, does not happen during the other; and of
# the latter where programs come and go (H100, 2026-11-24, bench.regret).
APART, BESIDE = 0.2, 0.45
# How much of the time in which only a part of the programs is left is lost.
IDLE, UNEVEN = 0.15, 1.0


@dataclass(frozen=True, slots=True)
class Tile:
    """A configuration's tile on one problem: seconds of its MMAs, of a step of them, of its epilogue up to the stores, of
    the stores, of the epilogue's arithmetic, and of what nothing on the same SM hides."""

    mma: float
    step: float
    epilogue: float
    stores: float
    work: float
    bare: float


@dataclass(frozen=True, slots=True)
class Load:
    """Of a GPU whose last round of tiles leaves SMs idle: the share of the time for which SMs have tiles; what is left of the
    time of multiplying, for the clock is faster then; and what is left of the time of the last tiles' memory traffic."""

    busy: float = 1.0
    throttled: float = 1.0
    last: float = 1.0


def _load(waves: float, each: int) -> Load:
    last = waves - each + 1
    return Load(waves / each, 1 - (1 - max(last, 1 / UNTHROTTLED)) / each, max(ALONE, last))


def seconds(problem: Problem, config: Config, shared: int, registers: int) -> float:
    """The time of a kernel. `shared` and `registers` are what a program needs. A configuration with PROGRAMS has programs that
    stay on their SM, as many on each."""
    device = problem.device
    tiles = problem.size("b") * _tiles(problem, "m", config.BLOCK_M) * _tiles(problem, "n", config.BLOCK_N)
    each = math.ceil(tiles / device.compute_units)  # of the SM with most of them
    limit = min(SHARED // (shared + RESERVED), REGISTERS // (min(255, registers) * config.WARPS * 32))
    stays = config.get("PROGRAMS")
    together = max(1, min(stays or limit, limit, each))
    waves = tiles / device.compute_units
    tile = tile_of(problem, config, together, _load(waves, each))
    in_flight = _in_flight(problem, config)
    mma = tile.mma * max(1.0, _waiting(in_flight, tile.step) / together)
    if together > 1:
        multiplying = mma + tile.bare + (0 if stays else START / together)
        apart = APART if stays and not _reads(problem) else BESIDE
        hiding = max(multiplying, tile.work) + apart * min(multiplying, tile.work)  # all programs add on the same units
        busy = each * hiding + tile.epilogue + tile.stores
    elif stays:  # nobody waits for what is stored but the end
        busy = each * (mma + tile.bare + tile.epilogue + TURN) + tile.stores
    else:
        busy = each * (mma + tile.bare + tile.epilogue + tile.stores + START)
    busy += _summing(problem, config, tiles) + each * _turning(problem, config)
    arriving = _arriving(problem, config, min(tiles, device.compute_units * together) * max(1, in_flight))
    streaming = max(_streaming(problem, waves / together) * _in_runs(problem, config), arriving, filling(problem, config))
    busy *= MASKED if _reads_in_bounds(problem, config) else 1.0
    busy *= DOUBTFUL if any(one.load is None for one in problem.inputs.values()) else 1.0
    parting = PARTING if _has_parts(config) else 0.0
    return LAUNCH + parting + max(busy, streaming) + APART * min(busy, streaming) + START


def _in_flight(problem: Problem, config: Config) -> int:
    """Steps whose operands are on their way while a program multiplies."""
    steps = math.ceil(problem.size("k") / config.BLOCK_K)
    if steps > 1 and passes_registers(problem):
        return 0
    return config.STAGES - 1 if config.get("FLATTEN") else min(config.STAGES - 1, steps)  # none of the next tile's


def _waiting(in_flight: int, step: float) -> float:
    """How much longer than what it does a step takes in a program that is alone."""
    return LATENCY / (in_flight * step) if in_flight else 1 + FETCHED / step


def _turning(problem: Problem, config: Config, operands: str = "AB") -> float:
    """Seconds of a tile for operands that become TF32 in registers, or are turned over in shared memory, bank by bank: Hopper's
    matrix units read those of tiles that are not low there, and float32 numbers only with neighbours along k."""
    if not problem.tf32 or problem.device.arch // 10 != HOPPER:
        return 0.0
    lengths = {"A": config.BLOCK_M, "B": config.BLOCK_N}
    cost = _rounding if config.BLOCK_M < LOW_TILE else _second_write
    each = (
        lengths[name] * cost(problem, name, number) for number, member in enumerate(problem.members)
        for name, one in member.items() if name in operands and one.dtype is torch.float32
    )  # fmt: skip
    return math.ceil(problem.size("k") / config.BLOCK_K) * config.BLOCK_K * sum(each)


def _rounding(problem: Problem, name: str, number: int) -> float:
    """Seconds of an SM for an element that becomes TF32 in the registers that it is multiplied out of."""
    return 0.0 if by_tma(problem, problem.members[number][name]) else ROUNDED_LOW


def _second_write(problem: Problem, name: str, number: int) -> float:
    """Seconds of an SM for an element that is written to shared memory again. What a computed operand costs besides is known
    by its operations (`_of_element`)."""
    one = problem.members[number][name]
    if one.load is not None:
        return TURNED if problem.stride(name, "k", number) != 1 else 0.0 if by_tma(problem, one) else ROUNDED
    tiles = (load.attr[1][0] for load in _tiles_of(problem, one))
    return TURNED if any(_jumps(one, offset) for offset in tiles) else 0.0


def _jumps(one: Input, offset: Expr) -> bool:
    """Whether neighbours along k are apart in memory."""
    loops = one.loops["k"]
    return bool(loops) and ix.stride_of(offset, loops[-1]) != 1


def streamed(problem: Problem, config: Config) -> float:
    """The time of a kernel that does nothing but read: as fast as memory, or as a program's steps, one after the other."""
    steps = math.ceil(problem.size("k") / config.BLOCK_K)
    wasted = steps * config.BLOCK_K / problem.size("k")
    several = READ_SEVERAL if len(problem.members) > 1 else 1.0
    each = problem.size("b") * _tiles(problem, "n", config.BLOCK_N) / problem.device.compute_units
    several *= _in_runs(problem, config)
    reading = max(_streaming(problem, each, UNEVEN) * wasted * several, steps * READ_STEP)
    elements = config.BLOCK_N * _of_computed(problem, "B") + config.BLOCK_M * _of_computed(problem, "A")
    return LAUNCH + max(reading, each * steps * config.BLOCK_K * elements / ELEMENT_WARPS)


def _of_computed(problem: Problem, name: str) -> float:
    """Seconds of a warp for each element of computed operands that a program has room for, whether it is one or not. Of the
    row, which every program computes, each number that it is made of is read as well."""
    total = 0.0
    for one in (one for one in _operands(problem) if one.load is None and one.name == name):
        reads = len(vs.loads([one.value])) if name == "A" else 0
        total += GATHERED * IN_STEPS if problem.reads_window(one) else _of_element(problem, one) + COMPUTED * READ * reads
    return total


def _in_runs(problem: Problem, config: Config) -> float:
    """How much longer memory takes where tiles have short rows of the operand that is most of what is read."""
    one = problem.inputs["B"]
    if problem.contiguous("B") != "n" or by_tma(problem, one) or problem.size("n") <= config.BLOCK_N:
        return 1.0
    if 2 * problem.bytes_read("B") < _traffic(problem):
        return 1.0
    return next(longer for least, longer in RUNS if config.BLOCK_N * one.dtype.itemsize >= least)


def b_resident(problem: Problem, config: Config, shared: int, registers: int) -> float:
    """The time of a kernel whose programs load one operand once, then take TILES tiles each, one after the other. Little of a
    tile's epilogue is hidden but its memory traffic: nothing else is on the SM, or one other program."""
    device, tile = problem.device, tile_of(problem, config)
    programs = problem.size("b") * math.ceil(_tiles(problem, "m", config.BLOCK_M) / config.TILES)
    limit = min(SHARED // (shared + RESERVED), REGISTERS // (min(255, registers) * config.WARPS * 32))
    together = max(1, min(limit, math.ceil(programs / device.compute_units)))
    loading = sum(_loaded(problem, one, config) for one in _operands(problem)) / L2_RATE + LATENCY
    folds = FOLD_BESIDE * sum(s.kind == "partial" for s in problem.epilogue) if problem.whole else 0.0
    reading = _reads(problem) * READ_BESIDE * config.BLOCK_M * config.BLOCK_N
    waiting = LATENCY * NEXT if config.TILES > 1 else 0.0  # the next tile is on its way
    turning = _turning(problem, config, "A")  # the other one is turned over in the beginning
    walk = config.TILES * (tile.mma + tile.work + turning + reading + (folds + waiting) / together)
    each = math.ceil(programs / device.compute_units)
    busy = each * (walk + (loading + START) / together)
    streaming = _streaming(problem, programs / device.compute_units / together)
    return LAUNCH + max(busy, streaming) + APART * min(busy, streaming) + START


def rows(problem: Problem, config: Config) -> float:
    """The time of a kernel whose programs load one operand once, then take TILES tiles of full rows, as many at a time as
    there are PROGRAMS. An SM has one such program."""
    device = problem.device
    programs = problem.size("b") * math.ceil(_tiles(problem, "m", config.BLOCK_M) / config.TILES)
    area = config.BLOCK_M * config.BLOCK_N
    mma = 2 * area * config.BLOCK_K / (problem.rate / device.compute_units * LOW_RATE_IN_TURN)
    operations = _epilogue_cost(problem) + _random_cost(problem, each=True)
    work = area * (operations / ADDITIONS * TURNS_OF_WORK + _reads(problem) * READ_IN_TURN)
    loading = config.BLOCK_N * config.BLOCK_K * problem.main_dtype.itemsize / L2_RATE + LATENCY + START
    tiles = math.ceil(config.TILES / config.PROGRAMS) * config.PROGRAMS
    turn = (mma * PING_PONG_SLOWDOWN + work) * (STORED_BY_TMA if config.TMA_STORE else 1.0)
    busy = math.ceil(programs / device.compute_units) * (loading + tiles * turn)
    streaming = _streaming(problem, programs / device.compute_units)
    return LAUNCH + max(busy, streaming) + APART * min(busy, streaming) + START


def _summing(problem: Problem, config: Config, tiles: int) -> float:
    """Seconds by which sums of operands hold up the SMs. One tile of each row or column of tiles takes longer: all
    others wait for the last of these, unless as many SMs have nothing to do in the last round of tiles."""
    compute_units, total = problem.device.compute_units, 0.0
    steps = math.ceil(problem.size("k") / config.BLOCK_K)
    for one in problem.operand_reductions:
        axis = "m" if one.operand == "A" else "n"
        rows = config.get(f"BLOCK_{axis.upper()}")
        longer = problem.size("b") * _tiles(problem, axis, rows)
        own = 2 * rows * ONES * config.BLOCK_K * steps / (problem.rate / compute_units)
        total += own * max(longer / compute_units, 1.0 if longer > -tiles % compute_units else 0.0)
    return total


def _streaming(problem: Problem, waves: float, lost: float = IDLE) -> float:
    """Seconds of all memory traffic. A last wave that is not full cannot use all of the bandwidth."""
    idle = math.ceil(waves) / waves - 1 if waves > 1 else 0.0
    moved = (_traffic(problem) - problem.stored_bytes) / READ_RATE + problem.stored_bytes / STREAM_RATE
    return moved / problem.device.bandwidth * (1 + lost * idle)


def tile_of(problem: Problem, config: Config, together: int = 1, load: Load = Load()) -> Tile:
    """The parts of one tile's time on an SM where `together` programs share the time."""
    device, count = problem.device, len(problem.members)
    steps = math.ceil(problem.size("k") / config.BLOCK_K)
    area = config.BLOCK_M * config.BLOCK_N
    rate = problem.rate / device.compute_units
    arithmetic = 2 * area * config.BLOCK_K * count / rate / _share(problem, config, area * count, together)
    arithmetic *= load.throttled
    step = max(arithmetic, _all_loaded(problem, config, load.busy) / L2_RATE, _copied(problem, config) / L2_RATE)
    step += _by_element(problem, config) / min(ELEMENT_WARPS, together * config.WARPS) + _scattered(problem, config)
    step += _at_banks(problem, config)
    step = max(step, LATENCY / together) if _waits(problem) and not config.get("SLICED_K") else step
    waiting = WAITING if together * config.WARPS < WARPS_OF_EPILOGUE else 1.0
    crowded = CROWDED if _is_crowded(problem, config) else 1.0
    each = bool(config.get("FLATTEN")) or config.get("EPILOGUE_SUBTILES", 1) > 1
    operations = _epilogue_cost(problem) + _random_cost(problem, each) + READ * _numbers_read(problem)
    operations += EXACTLY_IN_PARTS * _exact_functions(problem) if _has_parts(config) else 0
    work = area * operations / ADDITIONS * waiting * crowded
    work += _sums_of_columns(problem) * config.BLOCK_N * config.WARPS * SUMMED
    share = area / (problem.size("b") * problem.size("m") * problem.size("n")) * device.compute_units / device.bandwidth
    share *= load.last
    read, stores = problem.epilogue_bytes - problem.stored_bytes, problem.stored_bytes * share
    parts = config.get("EPILOGUE_SUBTILES", 1)
    folds = _folds(problem)
    bare = parts * PART + folds * FOLD * min(1.0, config.BLOCK_N / FOLDED)
    if not _stores_vectors(problem):  # by many instructions, which a program waits for, into lines that rows share
        row = config.BLOCK_N // parts * problem.accumulator.itemsize
        bare += stores * (1 + LINE / row) * BY_ELEMENT
        bare += area * COLUMN_OF_A_THREAD if _stores_columns(problem, config) else 0.0
        return Tile(steps * step, step, work + read * share, 0.0, work, bare)
    return Tile(steps * step, step, work + read * share, stores, work, bare)


def _has_parts(config: Config) -> bool:
    """Whether the warps of a program have parts of their own, and registers that were handed out to them."""
    return config.get("COOPERATIVE") is not None


def _reads_in_bounds(problem: Problem, config: Config) -> bool:
    """Whether an epilogue in a loop over tiles reads, by pointers, rows of which some may not exist."""
    by_pointers = config.get("FLATTEN") and config.get("TMA_EPILOGUE") is False
    return bool(by_pointers and _numbers_read(problem) and problem.size("m") % config.BLOCK_M)


def _is_crowded(problem: Problem, config: Config) -> bool:
    """Whether an epilogue has no registers for what it reads beside the sums."""
    if config.get("PREFETCH") and problem.reduces_tiles:
        return True
    area, threads = config.BLOCK_M * config.BLOCK_N, config.WARPS * 32
    ragged = _folds(problem) and problem.size("n") < config.BLOCK_N and not _has_parts(config)
    if ragged and 2 * area >= MOST_NUMBERS * threads:
        return True
    parts = area // config.get("EPILOGUE_SUBTILES", 1)
    return _numbers_read(problem) > 1 and (1 + _numbers_read(problem)) * parts > MOST_NUMBERS * threads


def _stores_vectors(problem: Problem) -> bool:
    """Whether each row of the results begins at a multiple of 16 bytes, so that threads store as many at a time."""
    return not _rows_begin_at(problem) % 16


def _stores_columns(problem: Problem, config: Config) -> bool:
    """Whether each thread stores one column of a wide tile, of 16-bit numbers whose rows begin anywhere."""
    return _rows_begin_at(problem) == 2 and WIDE_TILE <= config.BLOCK_N <= config.WARPS * 32


@memoised
def _rows_begin_at(problem: Problem) -> int:
    """The bytes that rows of the results begin at multiples of; 16 at most."""
    loops = [v for own in problem.loops.values() for v in own]
    stored = [s for s in problem.epilogue if any(s.stored)]
    sizes = {s.outs[0]: problem.graph.buffers[s.outs[0]].dtype.itemsize for s in stored}
    strides = [(ix.stride_of(e, v), sizes[s.outs[0]]) for s in stored for e in s.store for v in loops]
    return math.gcd(16, *(problem.sizes.of(st) * size for st, size in strides if st is not None and st != 1))


@memoised
def _epilogue_cost(problem: Problem) -> int:
    """Elementary operations for each result. What several statements need is computed once."""
    roots = [root for s in problem.epilogue for root in s.roots]
    longer = [EXACTLY[v.op] for v in vs.topological(roots) if v.op in EXACTLY and v in _exact(problem)]
    return vs.total_cost(roots, LONGER) + sum(longer)


@memoised
def _exact_functions(problem: Problem) -> int:
    """How many of the longer functions of each result are to be as exact as eager's."""
    values = vs.topological([root for s in problem.epilogue for root in s.roots])
    return sum(v.op in LONGER and v in _exact(problem) for v in values)


@memoised
def _exact(problem: Problem) -> set[vs.Value]:
    """What the hardware's approximations are not good enough for."""
    return exact_values(problem.kernel.statements, problem.graph)


@memoised
def _random_cost(problem: Problem, each: bool) -> int:
    """What random numbers cost in an epilogue besides; `each`: none share their blocks."""
    random = [v for v in vs.topological([r for s in problem.epilogue for r in s.roots]) if v.op in ops.RANDOM]
    return sum(EACH[v.op] if each or not made_by_blocks(problem, v) else SHARED_BLOCK for v in random)


def made_by_blocks(problem: Problem, random: vs.Value) -> bool:
    """Whether the random numbers of a result that follow each other along an axis share their blocks."""
    axes = (axis for axis in problem.loops if problem.template.block(axis))
    return problem.template.language != "gluon" and any(share_blocks(random, problem.loops[axis]) for axis in axes)


@memoised
def _reads(problem: Problem) -> int:
    """Tiles that an epilogue reads for each of its own."""
    return len({load.attr[:2] for load in tiles_read(problem)})


@memoised_at_sizes
def _numbers_read(problem: Problem) -> int:
    """Tiles of numbers among them: masks are neither widened nor long on their way."""
    return len({load.attr[:2] for load in tiles_read(problem) if load.attr[2] is not torch.bool})


@memoised
def _operands(problem: Problem) -> list[Input]:
    """Each operand once: those that the matmuls of a family have in common, and their own."""
    return [one for k, member in enumerate(problem.members) for one in member.values() if k == 0 or _own(problem, one)]


@memoised
def _folds(problem: Problem) -> int:
    """Reductions of full rows."""
    return sum(s.kind == "partial" for s in problem.epilogue) if problem.whole else 0


@memoised
def _sums_of_columns(problem: Problem) -> int:
    """Reductions of an epilogue's columns. Of rows, a thread has many numbers of each."""
    columns = frozenset(problem.loops.get("n", ()))
    partial = (s for s in problem.epilogue if s.kind == "partial" and not problem.whole)
    return sum(not columns.isdisjoint(atom for e in s.store for atom in ix.free_atoms(e)) for s in partial)


def _own(problem: Problem, one: Input) -> bool:
    return problem.template.operands[one.name].many


def _loaded(problem: Problem, one: Input, config: Config, busy: float = 1.0) -> float:
    """Bytes of an operand's tile, without rows beyond its end, and more where rows cross cache lines: as far as SMs are busy,
    for they share the L2 cache."""
    size = float(one.dtype.itemsize)
    for block, axis in zip(_blocks(problem, one), one.axes, strict=True):
        points, length = config.get(block, 1), problem.size(axis)
        inside = 1.0 if axis == "k" else length / (math.ceil(length / points) * points)
        size *= points * inside
    return size * (1 + (_apart(problem, one.name) - 1) * busy)


def _all_loaded(problem: Problem, config: Config, busy: float) -> float:
    return sum(_loaded(problem, one, config, busy) for one in _operands(problem))


def _copied(problem: Problem, config: Config) -> float:
    """Bytes that an SM could copy while it copies what a step reads: narrow asynchronous copies take as long as the widest
    (H100, 2026-11-27, bench.untuned: 64 and 96 copies of a warp, of 4 bytes a thread, took 10 to 11 cycles each)."""
    total = 0.0
    for one in _operands(problem):
        if one.load is None or by_tma(problem, one):
            continue
        width = _width(problem, one, one.load)
        total += _loaded(problem, one, config, 0.0) * (WIDEST / width if width >= NARROWEST else 1.0)
    return total


@memoised_at_sizes
def passes_registers(problem: Problem) -> bool:
    """Whether a tile of some operand is read in runs that no asynchronous copy is as narrow as."""
    tiles = ((one, load) for one in _operands(problem) if not by_tma(problem, one) for load in _tiles_of(problem, one))
    return any((_known_width(problem, one, load) or NARROWEST) < NARROWEST for one, load in tiles)


def _tiles_of(problem: Problem, one: Input) -> list[vs.Value]:
    """What an operand reads a tile of: all that varies along both of its axes."""
    if one.load is not None:
        return [one.load]
    axes = [frozenset(one.loops[axis]) for axis in one.axes if problem.template.block(axis)]
    return [load for load in vs.loads([one.value]) if all(own & ix.free_atoms(load.attr[1][0]) for own in axes)]


def _arriving(problem: Problem, config: Config, on_their_way: int) -> float:
    """Seconds until the last operand has come from memory, so many of whose tiles are on their way at a time."""
    if not on_their_way:
        return 0.0
    tiles = max(problem.bytes_read(one.name) / _loaded(problem, one, config, 0.0) for one in _operands(problem))
    return tiles * ARRIVING / on_their_way


def filling(problem: Problem, config: Config) -> float:
    """Seconds that TMA takes to fill with zeros what tiles have beyond the ends of operands."""
    tiles = problem.size("b") * _tiles(problem, "m", config.BLOCK_M) * _tiles(problem, "n", config.BLOCK_N)
    steps = math.ceil(problem.size("k") / config.BLOCK_K)
    zeros = sum(_zeros(problem, one, config) for one in _operands(problem) if by_tma(problem, one))
    return tiles * steps * zeros / (ZEROS_SHARE * L2_RATE * problem.device.compute_units)


def _zeros(problem: Problem, one: Input, config: Config) -> float:
    """Bytes of an operand's tile beyond its ends, on average over all tiles."""
    pairs = [(config.get(block, 1), problem.size(axis)) for block, axis in zip(_blocks(problem, one), one.axes, strict=True)]
    inside = math.prod(length / (math.ceil(length / points) * points) for points, length in pairs)
    return math.prod(points for points, _ in pairs) * one.dtype.itemsize * (1 - inside)


@memoised
def _blocks(problem: Problem, one: Input) -> tuple[str, ...]:
    """The knobs that would be the tile along the operand's axes."""
    return tuple(f"BLOCK_{axis.upper()}" for axis in one.axes)


@memoised_at_sizes
def _apart(problem: Problem, name: str) -> float:
    """How much longer an operand's rows take than whole lines of the cache."""
    one = problem.inputs[name]
    strides = [problem.stride(name, axis) for axis in one.axes]
    rows = [problem.sizes.of(s) * one.dtype.itemsize for s in strides if s is not None and s != 1]
    if all(row % LINE == 0 for row in rows):
        return 1.0
    return SPLIT if any(row % SECTOR for row in rows) and by_tma(problem, one) else STRADDLING


def _share(problem: Problem, config: Config, area: int, together: int) -> float:
    """The share of the peak rate that the slowest operand and the tile's size allow."""
    large, pair = area >= 128 * 256, together > 1 and area >= 128 * 128
    small = SMALL_RATE if area >= 128 * 128 else THIN_RATE
    wide = TALL_RATE if config.BLOCK_M > config.BLOCK_N else LARGE_RATE
    rate = wide if large else PAIR_RATE if pair else small
    if problem.main_dtype.itemsize == 1 and not large and not pair:
        rate *= BYTE_SHARE
    if problem.exact_float32:
        rate = EXACT_RATE
    if "n" in problem.whole and config.BLOCK_M < LOW_TILE:
        rate = min(rate, LOW_RATE)
    return rate if _all_by_tma(problem) else min(rate, POINTER_RATE)


@memoised
def _all_by_tma(problem: Problem) -> bool:
    return all(by_tma(problem, one) for member in problem.members for one in member.values())


def _by_element(problem: Problem, config: Config) -> float:
    """Seconds that warps spend on the elements of a step's operands, one by one: those that they compute, and those that no
    wide load brings."""
    total = 0.0
    for one, seconds_each in _costly(problem, _uniform(problem, config)):
        pairs = zip(_blocks(problem, one), one.axes, strict=True)
        gathered = one.load is None and problem.reads_window(one)  # with an address for each place, past the end as well
        lengths = [
            config.get(block, 1) if gathered and axis == "k" else min(config.get(block, 1), problem.size(axis))
            for block, axis in pairs
        ]
        total += math.prod(lengths) * seconds_each * _unsteadiness(problem, one, config)
    return total


def _uniform(problem: Problem, config: Config) -> frozenset[Var]:
    """The loops that have one index in each tile of an operand."""
    pairs = (
        (one.loops[axis], block)
        for one in _operands(problem)
        for axis, block in zip(one.axes, _blocks(problem, one), strict=True)
    )
    return frozenset(v for loops, block in pairs if len(loops) > 1 for v in uniform_loops(loops, config.get(block, 1)))


@memoised_at_sizes
def _costly(problem: Problem, uniform: frozenset[Var]) -> list[tuple[Input, float]]:
    """Operands whose elements cost seconds one by one, and how many each."""
    found = [(one, _of_element(problem, one, uniform)) for one in _operands(problem)]
    return [(one, each) for one, each in found if each]


@memoised
def _waits(problem: Problem) -> bool:
    """Whether an operand is computed from more than one tensor: what varies along the sum alone is not on its way while a
    program multiplies, and each step begins with waiting for it."""
    computed = [one for one in _operands(problem) if one.load is None and not problem.reads_window(one)]
    return any(len({load.attr[0] for load in vs.loads([one.value])}) > 1 for one in computed)


def _unsteadiness(problem: Problem, one: Input, config: Config) -> float:
    bounded = one.load is None and problem.reads_window(one)
    return IN_STEPS if bounded and problem.size("k") > config.BLOCK_K else 1.0


@memoised_at_sizes
def _of_element(problem: Problem, one: Input, uniform: frozenset[Var] = frozenset()) -> float:
    """Seconds of a warp for an element of an operand's tile, in which the `uniform` loops have one index each."""
    if one.load is None:
        return GATHERED if problem.reads_window(one) else COMPUTED * _operations(one, uniform)
    if by_tma(problem, one):
        return 0.0
    width = _width(problem, one, one.load)
    return PLACED[width] if width < WIDEST else JUMPING if problem.reads_window(one) else 0.0


def _operations(one: Input, uniform: frozenset[Var]) -> int:
    """Elementary operations for each element of a computed operand, less those of what is the same in all of a tile along an
    axis, because it differs along its uniform loops alone."""
    everything = vs.total_cost([one.value], LONGER)
    axes = [(frozenset(loops) - uniform, frozenset(loops) & uniform) for loops in one.loops.values()]
    if not any(same for _, same in axes):
        return everything
    found = ((v, v.variables()) for v in vs.topological([one.value]))
    shared = (v for v, loops in found if any(loops & same and not loops & others for others, same in axes))
    return everything - sum(ops.cost(v.op) + LONGER.get(v.op, 0) for v in shared)


def _width(problem: Problem, one: Input, load: vs.Value) -> int:
    """Bytes that a thread may load of an operand at a time; an element, where that is not known."""
    return _known_width(problem, one, load) or int(load.attr[2].itemsize)


def _known_width(problem: Problem, one: Input, load: vs.Value) -> int | None:
    """The bytes of as many neighbours as each run in memory has, from where it begins, up to the end of its axis: a mask says
    of each element whether it is inside. None where that is not known."""
    index, size = load.attr[1][0], load.attr[2].itemsize
    loops = [v for axis in one.axes if problem.template.block(axis) for v in one.loops[axis]]
    strides = {v: ix.stride_of(index, v) for v in loops}
    runs = [v for v in loops if strides[v] == 1]
    if len(runs) != 1:
        return None
    steps = [s for v, s in strides.items() if v is not runs[0] and not _is_gathered(index, v)]
    known = [problem.sizes.of(s) * size for s in steps if s is not None]
    return math.gcd(WIDEST, *known, problem.sizes.of(runs[0].extent) * size) if len(known) == len(steps) else None


def _at_banks(problem: Problem, config: Config) -> float:
    """Seconds of a step in which threads that multiply float32 numbers exactly wait for shared memory."""
    if not problem.exact_float32:
        return 0.0
    turned = [one for one in _operands(problem) if one.name == "B" and one.load is not None and problem.contiguous("B") == "k"]
    return BANKED * len(turned) * config.BLOCK_N * config.BLOCK_K * config.WARPS


def _scattered(problem: Problem, config: Config) -> float:
    """Seconds that an SM spends on a step's operands whose runs in memory begin in the middle of what memory is read in."""
    found = [one for one in _operands(problem) if _is_scattered(problem, one)]
    return SCATTERED * sum(math.prod(config.get(block, 1) for block in _blocks(problem, one)) for one in found)


@memoised_at_sizes
def _is_scattered(problem: Problem, one: Input) -> bool:
    if one.load is None or by_tma(problem, one) or not problem.reads_window(one):
        return False
    return _width(problem, one, one.load) == WIDEST and _run(problem, one) * one.dtype.itemsize < SECTOR


def _run(problem: Problem, one: Input) -> int:
    """Neighbours in memory that lie in one tile, from wherever their run begins: as many as divide both."""
    assert one.load is not None
    index = one.load.attr[1][0]
    runs = [own for own in one.loops.values() if own and ix.stride_of(index, own[-1]) == 1]
    return min((math.gcd(problem.sizes.of(own[-1].extent), LINE) if len(own) > 1 else LINE for own in runs), default=1)


def _is_gathered(index: ix.Expr, loop: ix.Var) -> bool:
    """Whether data say where a row begins."""
    return ix.stride_of(index, loop) is None and any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(index))


def _tiles(problem: Problem, axis: str, block: int) -> int:
    return math.ceil(problem.size(axis) / block)


@memoised_at_sizes
def _traffic(problem: Problem) -> int:
    """Bytes that the kernel has to move."""
    return sum(problem.bytes_read(name) for name in problem.inputs) + problem.epilogue_bytes
