"""Chooses the tiling of a kernel for a GPU: which loops are program axes, how large a program's tile is, how many warps run it.

A program computes a tile of points. `x` is the axis along which neighbouring threads touch neighbouring memory; a second
axis `y` exists only where accesses disagree on that (a transposed input); `r` is the inner space of reductions and scans. A
reduction is *persistent* when a program holds full rows in registers, else it walks them in steps of `r`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from kgen.device import SECTOR, Gpu
from kgen.ir import index as ix
from kgen.ir import joins, ops
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import MAX_PERSISTENT, Blocks, ComboKernel, Kernel, Statement, Tiling
from kgen.scheduler.tiling.guards import without_needless_guards
from kgen.scheduler.tiling.lookups import by_short_runs, gathers_runs, lookup_steps
from kgen.scheduler.tiling.loops import (
    Touch,
    collapsed,
    collapsed_apart,
    distinct_touches,
    grouped,
    linearized,
    ordered,
    rejoined,
    runs_along,
    stride_along,
    unflattened,
    usual_steps,
    usual_stride,
)
from kgen.scheduler.tiling.registers import REGISTER, registers_of_a_point, registers_of_a_row
from kgen.scheduler.tiling.sorting_tiles import sorting_blocks
from kgen.scheduler.tiling.unrolling import unrolled

# A tile pays on both axes only where each is at least this long.
MIN_TILE = 16
# Of how many points of a row one may be left unused.
LEAST_WASTE = 8
# Streams of what is read that one run of what is stored may have.
MOST_STREAMS = 64
# Bytes that a thread moves at once, and threads of a program of a pointwise kernel; and the first compute capability of GPUs
# that add so many bytes to memory at once, of such numbers.
VECTOR = 16
THREADS = 128
VECTOR_ATOMICS, ADDED_AS_VECTORS = 90, (torch.float32, torch.bfloat16, torch.float16)
# Bytes of windows for each that is a neighbour along inner loops alone, from which on both are read across. Bilateral filters
# took 1951 us, and not 484, where there were as many (H200, 2026-11-29, bench.untuned).
CROSSED = 2
# Of a combo kernel: programs of THREADS that an SM runs side by side, how many rounds of them are enough to share the work
# evenly, and the most points of a thread. Beyond, fewer programs with more points find their member less often.
PROGRAMS_PER_SM = 12
ROUNDS = 8
MAX_POINTS = 8
# Steps along rows of a combo kernel's members, each for rows up to that length and the last for all longer ones too, and points
# of a tile: few steps, so that members of many sizes share few bodies.
COMBO_STEPS = (2, 4, 8, 16, 128, 1024)
COMBO_POINTS = 2048
# Warps of the one program that runs kernels in order, and points of its tile along rows and in all: its few tiles follow each
# other, so that latency counts.
SEQUENCE_WARPS, SEQUENCE_ROW, SEQUENCE_POINTS = 16, 4096, 16384
# Steps along rows of arithmetic that hold few points past the end, one of so many at most; points of such a tile; and programs
# that each SM has to have of it.
SHORT_STEPS, SHORTEST_WASTE, SHORT_STEP_POINTS, PROGRAMS_OF_STEPS = (32, 16, 8, 4), 32, 1024, 16
# The largest and the shortest step along a single row of arithmetic, what part of the row it has to save, and rows that each SM
# has to have.
HEAVY_STEP, SHORTEST_STEP, WORTH_WALKING, ROWS_OF_STEPS = 2048, 512, 4, 8
# Rows and columns of a tile that share what belongs to columns; and bytes of lines that the L1 cache serves in the time of one
# from memory.
COLUMN_ROWS, COLUMNS_OF_A_TILE, LINES_OF_A_BYTE = 32, 128, 6
# Rows and points of a step where much is moved along rows, and much across them: full sectors of both. How many bytes are much,
# and how many times as many those of the one may be.
CROSSED_ROWS, CROSSED_STEP, CROSSED_BYTES, MOST_CROSSED = 32, 64, 8 << 20, 4
# The least side of a plane of heavy points, and neighbours at most that a plane takes with its rows.
LINE_OF_A_PLANE = 64
MOST_INTERLEAVED = 8
# Of how many points of a plane's rows one has to be saved by narrower tiles: those of 32 16-bit numbers are whole sectors yet.
WASTE_OF_A_PLANE = 5
# Operations that take an SM as long as its share of memory takes for a byte.
OPERATIONS_OF_A_BYTE = 6
# Operations of a load of what belongs to a row at each of its points, and of finding a row along one loop.
ROW_LOAD, ROW_INDEX = 4, 8
# Short columns of an SM from which threads enough have two columns each, and those of a program then.
MANY_COLUMNS, COLUMN_PAIRS = 4096, 256
# Points that a program of a reduction holds at once; those of a step along rows that begin between vectors (H200, 2026-11-30:
# maxima of rows of 30,522 numbers of 16 bits 301 us and 124, sums of exponentials below them 314 and 166 with half as many as
# rows at vectors had), and those of a thread that finds positions (663 us and 244).
REDUCTION_POINTS, SCALAR_POINTS, POSITION_POINTS = 4096, 2048, 4
MAX_WARPS = 32
# Warps of a program that walks a row, and points of a step for each warp of one that walks it again: the more warps, the fewer
# programs run side by side, and the more of their rows L2 holds (docs/decisions/0032-rows-on-a-gpu.md).
WALKING_WARPS, AGAIN_WARP = 8, 512
# Rows for each SM, up to which a second round of programs that fill an SM each would leave most SMs without any.
UNEVEN_ROUND = 1.5
# Strides of adjacent elements, read backwards as well.
ADJACENT = (1, -1)
# Points of a row in registers for each warp.
ROW_WARP = 1024
# Warps of a program of rows that has an SM to itself, at most, and points of its tile for each of them.
MOST_LONE_WARPS, LONE_WARP = 16, 256
# Neighbouring columns that a program reduces: whole cache lines of 16-bit numbers; and the fewest, where that makes more
# programs of few columns: whole sectors. And points of such a tile: with twice as many, statistics of images take 1.2 times as
# long (H100, 2026-11-26).
COLUMNS, FEWEST_COLUMNS, COLUMN_POINTS = 64, 16, 512
# Warps of such a program, at most where few programs have more of them, and of all of an SM then, to be done in fewer steps.
COLUMN_WARPS, MOST_COLUMN_WARPS, COLUMN_WARPS_PER_SM = 4, 16, 48
# Registers that an SM has for each lane of its warps; and that addresses, loops and functions take, or addresses alone.
REGISTERS_OF_WARPS, FREE_REGISTERS, ADDRESSES = 2048, 24, 10
# Points of a thread that walks a row, below which fewer threads have as many each: their loads are what is under way; and those
# whose values it has at a time at least, as compilers order them.
WALKED_POINTS, AT_A_TIME = 8, 2
# Points of columns that a program holds in registers: of those that are read once, and of those that would be walked again.
# And points of such a tile, of whose columns at least whole sectors lie side by side.
SHORT_COLUMN, REGISTER_COLUMN, REGISTER_POINTS = 64, 512, 8192
# Points of a block of rows whose columns are summed, and points of it for each warp: accumulators and column vectors take as
# many registers each as one operand of the row. The next two blocks are on their way while one is computed: with one, the
# backward of an RMS norm of 4096 columns takes 1.3 times as long on an H200, with three 1.13 times.
SHARED_POINTS = 4096
SHARED_WARP = 512
# Of rows of a medium length half as many: fewer warps wait for each other at each sum of a row (H200, 2026-11-26, backward of
# layer norms: 6272 rows of 384 in 16 us and not 29, 25088 of 192 in 28 and not 41, 16384 of 1024 in 34 and not 43; shorter and
# longer rows took up to 2.8 times as long).
MEDIUM_ROWS = (256, 1024)
SHARED_STAGES = 3
# Shared memory that the next blocks may take: GPUs with little of it still hold a program with a long row.
SHARED_BYTES = 65536
# Warps of 128 registers a thread that an SM holds: two programs of a full block; and how many of a few warps, whose threads
# have up to 168. Should one need more registers, the programs run in two rounds of equal size.
WARPS_PER_SM = 16
FEW_WARPS, OF_FEW_WARPS = 4, 3
# Blocks of rows that a program takes where there are enough: the fewer programs, the fewer partial sums.
MIN_BLOCKS = 4
# A longer row is walked again, out of the L2 cache, rather than held by all the registers of an SM: then other programs'
# loads fill the pauses of its arithmetic.
MAX_REGISTER_ROW = 16384
# Registers of a thread that values of its points may take in a reduction, and how many they take where they would take more.
MOST_REGISTERS, FEW_REGISTERS = 224, 112
# The same of columns in registers, whose loads are all under way at once.
MOST_OF_COLUMNS = 160
# Loads of scalars from which on the L1 cache is what a pointwise kernel waits for.
MOST_SCALARS = 8
# Bytes of what all rows of a table of pairs read from which on a program takes several of them, how many, and points of these.
SHARED_ROW, MOST_SHARING, SHARED_TILE = 16384, 4, 16384
# Threads that have what belongs to a row of a few points, of several rows in a program.
ROW_COPIES = 2
# Statements of a pointwise kernel whose values fit in registers whatever its tile is.
FEW_STATEMENTS = 16
# Operations of a point from which arithmetic takes longer than loads; then points of a thread, the most warps for so few, and
# registers that a point takes beside its values.
HEAVY, HEAVY_POINTS, HEAVY_WARPS, HEAVY_REGISTERS = 32, 8, 8, 4
# Operations of a point from which rows that wait for arithmetic have fewer points a thread, and registers of these.
MEDIUM, MEDIUM_REGISTERS = 16, 72
# Points of a thread of a scan whose joins are as heavy, as long as a program has no more warps than that.
SCANNED_POINTS = 2
# Operations of a special function (`lgamma`), which is computed in float64.
SPECIAL = 60
# Points of a thread that share special functions of their row: registers for two of them are there.
SHARED_SPECIAL = 2
INT32 = 2**31 - 1


def persistent(kernel: Kernel, limit: int = MAX_PERSISTENT) -> bool:
    """Whether a program holds a full row of the inner space at once."""
    points = ix.product(v.extent for v in kernel.inner).as_int()
    return points is not None and points <= limit


def choose_tiles(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu, reorder: bool = True) -> Tiling:
    """The tiling of a kernel. Kernels without reductions and scans have no order among their points: all loops are axes."""
    return without_needless_guards(_tiled(linearized(kernel, graph), graph, sizes, gpu, reorder), graph)


def _tiled(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu, reorder: bool, unroll: bool = True) -> Tiling:
    given = kernel
    if not any(s.kind in ("reduction", "scan") for s in kernel.statements) and not _reads_what_changes(kernel):
        kernel = _flattened(kernel)
    elif reorder:
        kernel = unflattened(kernel)
    touches = list(distinct_touches(kernel, graph, sizes))
    if reorder:
        seen = {(touch.buffer, touch.offset, touch.store): touch for touch in touches}  # loads that statements share are one
        kernel = ordered(kernel, list(seen.values()), sizes)
    kernel = looped = _with_long_rows(collapsed(kernel), graph, sizes, reorder)
    kernel = unrolled(kernel, graph, sizes, gpu) if reorder and unroll else kernel
    wide = not _fits_32(kernel)
    if kernel.share is not None:
        blocks = _lightened_shares(kernel, shared_blocks(sizes.points(kernel.outer), sizes.points(kernel.inner), gpu))
        in_flight = SHARED_BYTES // max(1, blocks.x * blocks.r * _bytes_per_point(kernel))
        blocks = replace(blocks, stages=1 + min(SHARED_STAGES - 1, in_flight))
        return Tiling(kernel, kernel.outer, (), blocks, True, wide)
    if kernel.inner:
        return _reduced(kernel, graph, sizes, gpu, reorder)
    touches = list(distinct_touches(kernel, graph, sizes))
    slow = _second_axis(kernel, touches, sizes) if reorder else None
    if slow is None:
        shared = _shared_columns(kernel, touches, sizes, gpu)
        if shared is not None:
            return Tiling(kernel, kernel.outer[-1:], kernel.outer[:-1], shared, True, wide)
        runs = _rows_at_data(kernel, graph, sizes, gpu) if reorder and kernel is looped else None
        if runs is not None:
            return runs
        kernel = _stored_in_runs(kernel, touches, sizes) if reorder else kernel
        blocks = _pointwise_blocks(kernel, graph, sizes, gpu)
        rows = kernel.outer[:-1] if _has_row_values(kernel, touches, blocks.x, sizes) else ()
        return Tiling(kernel, kernel.outer[len(rows) :], rows, blocks, True, wide)
    if kernel is not looped and not _stores_adjacent(kernel, sizes):
        return _tiled(given, graph, sizes, gpu, reorder, unroll=False)
    x = (*kernel.outer[-1:], *_interleaved(kernel, slow, touches, sizes))
    y = (*(v for v in kernel.outer if v not in x and v is not slow), slow)
    results = sizes.points(looped.outer) // max(1, sizes.points(kernel.outer))
    blocks = _lightened_plane(kernel, _plane_blocks(sizes.points(x), slow, sizes, results))
    return Tiling(kernel, x, y, blocks, True, wide)


def _reduced(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu, reorder: bool) -> Tiling:
    """The tile of a kernel with inner loops."""
    touches, wide = list(distinct_touches(kernel, graph, sizes)), not _fits_32(kernel)
    for v in kernel.inner:
        joined = grouped(kernel, v, touches, sizes)
        if joined is not None:
            return _grouped(*joined, sizes.of(v.extent), sizes, gpu, wide)
    if reorder and _contiguous_across(kernel, touches, sizes) and not any(_slides(kernel, touch, sizes) for touch in touches):
        kernel = rejoined(kernel, touches, sizes)
        touches = list(distinct_touches(kernel, graph, sizes))
    return _reduction(kernel, graph, touches, sizes, gpu, wide)


def choose_combo_tiles(batch: ComboKernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu, reorder: bool = True) -> list[Tiling]:
    """The tilings of a combo kernel's members: the others keep SMs busy, so no tile is cut for that."""
    tilings = [choose_tiles(kernel, graph, sizes, gpu, reorder) for kernel in batch.members]
    if batch.in_order:
        return [_in_sequence(tiling, sizes) for tiling in tilings]
    whole = [_of_member(tiling, graph, sizes) for tiling in tilings]
    programs = sum(-(-sizes.points(t.x) // t.blocks.x) for t in whole if not t.y)
    more = 1
    while programs > more * ROUNDS * PROGRAMS_PER_SM * gpu.compute_units:
        more *= 2

    def grown(tiling: Tiling) -> Tiling:
        x = tiling.blocks.x
        return (
            tiling
            if tiling.y or tiling.kernel.inner
            else replace(tiling, blocks=replace(tiling.blocks, x=max(x, min(x * more, THREADS * MAX_POINTS))))
        )

    return [grown(t) for t in whole]


def _in_sequence(tiling: Tiling, sizes: Sizes) -> Tiling:
    """The tiling of a kernel that one program runs alone, tile after tile."""
    kernel, warps = tiling.kernel, SEQUENCE_WARPS
    if tiling.y or tiling.group > 1:
        return replace(tiling, blocks=replace(tiling.blocks, warps=warps))
    rows = power_of_two(max(1, sizes.points(tiling.x)))
    if not kernel.inner:
        return replace(tiling, blocks=Blocks(x=min(rows, SEQUENCE_ROW), warps=warps))
    r = min(power_of_two(sizes.points(kernel.inner)), SEQUENCE_ROW)
    return replace(tiling, blocks=Blocks(x=min(rows, SEQUENCE_POINTS // r), r=r, warps=warps), persistent=False)


def _of_member(tiling: Tiling, graph: ir.Graph, sizes: Sizes) -> Tiling:
    """The tiling of a kernel that runs beside others: all have one number of warps, and few kinds of tiles."""
    kernel, blocks = tiling.kernel, tiling.blocks
    more = blocks.warps // COLUMN_WARPS
    if not tiling.persistent and blocks.x > 1 and more > 1:  # columns: other programs run meanwhile
        blocks = replace(blocks, r=blocks.r // more, warps=COLUMN_WARPS)
        tiling = replace(tiling, blocks=blocks)
    if tiling.y and blocks.y == 1:  # rows: members share bodies of points
        tiling = replace(tiling, x=kernel.outer, y=())
    if tiling.y or tiling.group > 1:
        return tiling
    if not kernel.inner:
        return replace(tiling, blocks=replace(blocks, x=_vector_block(kernel, graph, sizes)))
    if not tiling.persistent and blocks.x > 1:  # columns
        return tiling
    length = sizes.points(kernel.inner)
    if length > COMBO_STEPS[0] and _contiguous_across(kernel, list(distinct_touches(kernel, graph, sizes)), sizes):
        x = min(blocks.x, max(FEWEST_COLUMNS, 2 * COMBO_POINTS // blocks.r))
        return replace(tiling, blocks=_with_fewer_rows(kernel, replace(blocks, x=x, warps=THREADS // 32), FEWEST_COLUMNS // 2))
    r = next((step for step in COMBO_STEPS if length <= step), COMBO_STEPS[-1])
    blocks = _with_fewer_rows(kernel, Blocks(x=COMBO_POINTS // r, r=r, warps=THREADS // 32), 1)
    return replace(tiling, blocks=blocks, persistent=False)


def _with_fewer_rows(kernel: Kernel, blocks: Blocks, least: int) -> Blocks:
    """Where values of all rows, and accumulators, would not be in registers."""
    accumulators, registers = sum(s.kind == "reduction" for s in kernel.statements), _registers(kernel)
    while blocks.x > least and registers(blocks) + accumulators * _points_of_a_thread(blocks) > MOST_OF_COLUMNS:
        blocks = replace(blocks, x=blocks.x // 2)
    return blocks


def _flattened(kernel: Kernel) -> Kernel:
    """Every loop an outer one: programs may run the points in any order. What ran once for all inner points runs at each of
    them, but is stored at the first one alone: an update in place must not run twice, and programs that store the same numbers
    wait for each other (a batch norm that saves its statistics takes 3 times as long: 117 us for 154 MB on an H200)."""
    statements = tuple(
        replace(_once(s, kernel) if any(s.stored) and not s.inner else s, inner=False, section=-1)
        for s in sorted(kernel.statements, key=lambda s: s.section)
    )
    return replace(kernel, outer=kernel.outer + kernel.inner, inner=(), sections=0, statements=statements, rows=())


def _reads_what_changes(kernel: Kernel) -> bool:
    """Whether something but the update itself reads what is updated in place once for all inner points, before or after: other
    programs would find either."""
    changes = [s for s in kernel.statements if s.target is not None and not s.inner] if kernel.inner else []
    return any(
        load.attr[0] in (change.target, *change.outs)
        for change in changes
        for s in kernel.statements
        if s is not change
        for load in vs.loads(s.roots)
    )


def _once(s: Statement, kernel: Kernel) -> Statement:
    """The statement at the first inner point alone."""
    zero = vs.const(0, torch.int64)
    masks = [vs.call("eq", vs.index_value(v.expr()), zero) for v in kernel.inner if v.extent != 1]
    masks += [] if s.mask is None else [s.mask]
    return replace(s, mask=functools.reduce(lambda a, b: vs.call("and", a, b), masks)) if masks else s


# ---- pointwise ------------------------------------------------------------------------------------------------------


def _second_axis(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> Var | None:
    """The loop along which some access is contiguous, or has several elements in a sector, that strides along the last loop:
    tiles over both serve both."""
    if len(kernel.outer) < 2 or sizes.of(kernel.outer[-1].extent) < MIN_TILE:
        return None
    fast = kernel.outer[-1]
    weights: dict[Var, int] = {}
    for touch in touches:
        stride = usual_stride(touch.offset, fast, sizes)
        if (stride is not None and abs(stride) <= 1) or runs_along(touch.offset, fast, sizes):
            continue
        for v in kernel.outer[:-1]:
            near = runs_along(touch.offset, v, sizes) or _shares_sectors(kernel, touch, v, sizes)
            if near and sizes.of(v.extent) >= MIN_TILE:
                weights[v] = weights.get(v, 0) + touch.distinct
    return max(weights, key=lambda v: weights[v]) if weights else None


def _shares_sectors(kernel: Kernel, touch: Touch, v: Var, sizes: Sizes) -> bool:
    """Whether sectors have several neighbours along a loop, and none, or two of them, along the last one: pixels that were
    channels lie so."""
    each = touch.bytes // max(1, sizes.points((*kernel.outer, *kernel.inner)))
    stride = usual_stride(touch.offset, v, sizes)
    if not stride or 2 * abs(stride) * each > SECTOR:
        return False
    steps = usual_steps(touch.offset, kernel.outer[-1], sizes)
    return 2 * sum(step * each >= SECTOR for step in steps) >= len(steps) > 0


def _with_long_rows(kernel: Kernel, graph: ir.Graph, sizes: Sizes, reorder: bool) -> Kernel:
    """A kernel of planes with the loops of an image as one, although the loop along which memory is read across stands between
    them: a plane's rows then go on past the ends of an image's rows, which are seldom a whole number of tiles."""
    made = collapsed_apart(kernel) if reorder and not kernel.inner and kernel.share is None else kernel
    if made is kernel or sizes.of(made.outer[-1].extent) < LINE_OF_A_PLANE:
        return kernel
    return kernel if _second_axis(made, list(distinct_touches(made, graph, sizes)), sizes) is None else made


def _interleaved(kernel: Kernel, slow: Var, touches: list[Touch], sizes: Sizes) -> tuple[Var, ...]:
    """The short loop, if there is one, that with the last one makes one run of most of what is moved, as pairs of neighbours in
    rows do: without it each access would take a part of every sector."""
    fast = kernel.outer[-1]
    for v in kernel.outer[:-1]:
        if v is slow or not 1 < sizes.of(v.extent) <= MOST_INTERLEAVED:
            continue
        steps = [(usual_stride(t.offset, v, sizes), usual_stride(t.offset, fast, sizes), t.distinct) for t in touches]
        runs = sum(moved for own, step, moved in steps if (own, step) == (1, sizes.of(v.extent)))
        if runs > sum(moved for own, step, moved in steps if own and step == 1):
            return (v,)
    return ()


def _stores_adjacent(kernel: Kernel, sizes: Sizes) -> bool:
    """Whether what adjacent points of the last loop store is adjacent. In a plane, where columns are read, results of a
    loop that was written out would be apart twice (H200, bench.untuned: spectra as pairs of numbers, 55 us and 131)."""
    stores = (s.store[0] for s in kernel.statements if any(s.stored))
    return all(stride_along(offset, kernel.outer[-1], sizes) == 1 for offset in stores)


def _has_row_values(kernel: Kernel, touches: list[Touch], block: int, sizes: Sizes) -> bool:
    """Whether programs had better not cross the ends of rows, along the last loop: what belongs to a row is then made once in a
    program and not at each point, and no point divides to find its row. Few points of a program are beyond the end. Where rows
    begin between vectors, neighbours have a load each, which has to be worth it."""
    if len(kernel.outer) < 2:
        return False
    fast, rest = kernel.outer[-1], set(kernel.outer[:-1])
    length = sizes.of(fast.extent)
    if fast.extent.as_int() is None or LEAST_WASTE * (-length % block) > length:
        return False
    found = (ix.free_atoms(t.offset) for t in touches)
    if not any(rest & atoms and fast not in atoms for atoms in found):
        return False
    return length % (block // THREADS or 1) == 0 or _rows_cost_most(kernel, touches, sizes)


def _rows_cost_most(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> bool:
    """Whether a point's operations take longer than what it moves, and half of them belong to its row."""
    fast = kernel.outer[-1]
    moved = sum(touch.distinct for touch in touches) / max(1, sizes.points(kernel.outer))
    values = [(v, v.variables()) for v in vs.topological([root for s in kernel.statements for root in s.roots])]
    costs = {v: ROW_LOAD if v.op == "load" and fast not in found else ops.cost(v.op) for v, found in values}
    of_rows = ROW_INDEX * (len(kernel.outer) - 1) + sum(costs[v] for v, found in values if found and fast not in found)
    every = ROW_INDEX * (len(kernel.outer) - 1) + sum(costs.values())
    return every > OPERATIONS_OF_A_BYTE * moved and 2 * of_rows >= every


def _shared_columns(kernel: Kernel, touches: list[Touch], sizes: Sizes, gpu: Gpu) -> Blocks | None:
    """A tile of several rows, along the last loop, where what belongs to columns is loaded with strides, as a small matrix that
    is read across: the L1 cache serves such a load as slowly as one of so many lines, and rows of one program share it."""
    fast, points = kernel.outer[-1] if kernel.outer else None, sizes.points(kernel.outer)
    if fast is None or not fast.extent.as_int() or points < COLUMN_ROWS * sizes.of(fast.extent) * gpu.compute_units:
        return None
    length = sizes.of(fast.extent)
    x = min(power_of_two(length), COLUMNS_OF_A_TILE)
    columns = [t for t in touches if not t.store and ix.free_atoms(t.offset) == {fast}]
    steps = [(t.bytes // points, abs(stride_along(t.offset, fast, sizes) or 0)) for t in columns]
    served = sum(min(SECTOR, size * stride) for size, stride in steps if stride > 1)
    if served * points <= LINES_OF_A_BYTE * sum(t.distinct for t in touches) or LEAST_WASTE * (-length % x) > length:
        return None
    return Blocks(x=x, y=COLUMN_ROWS, warps=THREADS // 32)


def _rows_at_data(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> Tiling | None:
    """A tile of rows that are runs at places from data, each as long as a thread's vector, such as codes of vectors of eight:
    the thread loads the codes of its row. Else it does so for each element, and threads exchange codes in shared memory."""
    split = by_short_runs(kernel, sizes)
    if split is None:
        return None
    length, block = sizes.of(split.outer[-1].extent), _pointwise_blocks(split, graph, sizes, gpu).x
    if length * THREADS != _vector_block(split, graph, sizes) or length * THREADS > block:
        return None
    blocks = Blocks(x=length, y=block // length, warps=THREADS // 32)
    return Tiling(split, split.outer[-1:], split.outer[:-1], blocks, True, not _fits_32(split))


def _stored_in_runs(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> Kernel:
    """With the loops innermost, too short for tiles, that make one run of all that is stored, such as the taps of filters. Else
    each thread stores into a sector of its own. What is read in as many streams stays in the L1 cache meanwhile. Several stores
    may make a run together, as the tensors of a concatenation do."""
    stores = [touch.offset for touch in touches if touch.store]
    steps = {v: {usual_stride(offset, v, sizes) for offset in stores} for v in kernel.outer}
    if not stores or not all(len(found) == 1 and None not in found for found in steps.values()):
        return kernel
    order = sorted(kernel.outer, key=lambda v: max(step or 0 for step in steps[v]))
    run = 1
    for v in order:
        long, together = sizes.of(v.extent) >= MIN_TILE, {run, run * len(stores)}
        if not steps[v] <= (together if long else {run}):
            return kernel
        if long:
            return collapsed(replace(kernel, outer=(*reversed(order),))) if 1 < run < MOST_STREAMS else kernel
        run *= sizes.of(v.extent)
    return kernel


def _pointwise_blocks(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> Blocks:
    """Enough points a thread for wide accesses, but not so many that SMs stay idle."""
    points, block = sizes.points(kernel.outer), _vector_block(kernel, graph, sizes)
    if gathers_runs(kernel, sizes):  # loads begin when indices are there: more bytes are on their way (1.06 times the speed)
        block *= 2
    while block > THREADS and points < block * gpu.compute_units * 2:
        block //= 2
    if block > THREADS and _reads_between_vectors(kernel, block // THREADS, sizes):
        block = THREADS
    if _has_special_functions(kernel):
        block = THREADS
    if block > THREADS and len(kernel.statements) > FEW_STATEMENTS:
        each = registers_of_a_point(kernel)
        while block > THREADS and each * block > MOST_REGISTERS * THREADS:
            block //= 2
    elif block > THREADS and _fills_registers(kernel, graph, block // THREADS):
        block = THREADS
    return Blocks(x=_scattered_block(kernel, graph, sizes, gpu, block), warps=THREADS // 32)


def _fills_registers(kernel: Kernel, graph: ir.Graph, points: int) -> bool:
    """Whether values of so many points leave an SM two programs, which wait for arithmetic: it takes longer than memory."""
    if registers_of_a_point(kernel) * points <= MOST_OF_COLUMNS:
        return False
    roots = [root for s in kernel.statements for root in s.roots]
    read = sum(dtype.itemsize for _, _, dtype in {load.attr for load in vs.loads(roots)})
    stored = [o for s in kernel.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept]
    return vs.total_cost(roots) > OPERATIONS_OF_A_BYTE * (read + sum(graph.buffers[o].dtype.itemsize for o in stored))


def _scattered_block(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu, block: int) -> int:
    """Points of a program that adds floats to memory: each thread has as many neighbours as one addition takes. With more,
    threads exchange addresses and values in shared memory before each, and meet at four barriers."""
    scatters = [s for s in kernel.statements if s.kind == "scatter"]
    if not scatters or not kernel.outer or not all(_adds_floats(s, graph) for s in scatters):
        return block
    points = sizes.points(kernel.outer)
    together = math.gcd(points, VECTOR) if points % block else VECTOR  # of what is masked
    read = (load.attr for s in kernel.statements for load in vs.loads(s.roots))
    widths = (_vector_width(kernel, offset, dtype, sizes) for _, (offset,), dtype in read)
    width = min(_scatter_width(kernel, s, graph, sizes, gpu) for s in scatters)
    return min(block, THREADS * width) if min(together, max(widths, default=1)) > width else block


def _adds_floats(s: Statement, graph: ir.Graph) -> bool:
    """Of other updates a histogram took 213 us with a point a thread, and 110 with eight; maxima of rows 247 and 130."""
    return s.target is not None and s.op == "add" and graph.buffers[s.target].dtype.is_floating_point


def _scatter_width(kernel: Kernel, s: Statement, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> int:
    """Elements that one update takes. Additions are vectors from Hopper on, of floats of up to 32 bits."""
    assert s.target is not None
    dtype = graph.buffers[s.target].dtype
    vectors = dtype in ADDED_AS_VECTORS and gpu.arch >= VECTOR_ATOMICS
    return _vector_width(kernel, s.store[0], dtype, sizes) if vectors else 1


def _vector_width(kernel: Kernel, offset: Expr, dtype: torch.dtype, sizes: Sizes) -> int:
    """Elements that neighbouring points access as one vector."""
    fast, width = kernel.outer[-1], VECTOR // dtype.itemsize
    if stride_along(offset, fast, sizes) != 1:
        return 1
    whole = ix.free_atoms(offset - ix.position_in(kernel.outer)).isdisjoint(kernel.outer)
    length = VECTOR if whole else sizes.of(fast.extent)
    while width > 1 and (length % width or not _begins_at_vectors(kernel.outer, offset, width, sizes)):
        width //= 2
    return width


def _reads_between_vectors(kernel: Kernel, width: int, sizes: Sizes) -> bool:
    """Whether most loads begin between vectors, as those of windows, where something else is of vectors, so that a thread has
    neighbours. Such loads are scalars then, of addresses a vector apart, each of which the L1 cache serves as slowly as the
    full vector. With a point a thread, neighbours are loaded together."""
    fast = kernel.outer[-1] if kernel.outer else None
    if fast is None:
        return False
    loads = dict.fromkeys(load.attr[1][0] for s in kernel.statements for load in vs.loads(s.roots))
    stores = [s.store[0] for s in kernel.statements if any(s.stored)]
    runs = [offset for offset in loads if stride_along(offset, fast, sizes) == 1]
    between = [offset for offset in runs if not _begins_at_vectors(kernel.outer, offset, width, sizes)]
    if len(between) < MOST_SCALARS or 2 * len(between) <= len(runs):
        return False
    return len(between) < len(runs) or any(_begins_at_vectors(kernel.outer, offset, width, sizes) for offset in stores)


def _begins_between_vectors(kernel: Kernel, sizes: Sizes) -> bool:
    """Whether some rows that are walked begin between vectors, as those of 30,522 numbers do: threads load fewer numbers
    at a time, and have more loads on their way than registers for what they add up."""
    loads = [load for s in kernel.statements if s.inner for load in vs.loads(s.roots)]
    along = [load for load in loads if stride_along(load.attr[1][0], kernel.inner[-1], sizes) == 1]
    return any(
        not _begins_at_vectors(kernel.inner, load.attr[1][0], VECTOR // load.attr[2].itemsize, sizes) for load in along
    )  # fmt: skip


def _is_read_for_sums_below_maxima(kernel: Kernel) -> bool:
    """Whether a row is read again for nothing but sums below its maxima, as of exponentials: one walk makes both."""
    made = {(s.section, s.op if s.kind == "reduction" else s.kind) for s in kernel.statements if s.inner}
    return kernel.sections == 2 and not kernel.rows and made == {(0, "max"), (1, "sum")}


def _begins_at_vectors(loops: tuple[Var, ...], offset: Expr, width: int, sizes: Sizes) -> bool:
    """Whether all that the offset adds to a run of neighbours is in steps of full vectors, wherever data or clamps lead."""
    rest = offset - ix.position_in(loops)
    if not ix.free_atoms(rest).isdisjoint(loops):
        rest = offset - loops[-1].expr()
    known = ((number, [sizes.of(atom.expr()) for atom in term if isinstance(atom, ix.Size)]) for term, number in rest.terms)
    return all(math.prod(numbers, start=number) % width == 0 for number, numbers in known)


def _vector_block(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> int:
    """Points of a program whose threads move VECTOR bytes each, in the type that moves most bytes."""
    moved: dict[int, int] = {}
    for name in sorted(_touched(kernel, graph)):
        buffer = graph.buffers[name]
        moved[buffer.dtype.itemsize] = moved.get(buffer.dtype.itemsize, 0) + sizes.bytes(buffer)
    width = max(moved, key=lambda size: moved[size]) if moved else 4
    return THREADS * (VECTOR // width)


def _touched(kernel: Kernel, graph: ir.Graph) -> set[str]:
    made = {o for s in kernel.statements for o in s.outs}
    found = {load.attr[0] for s in kernel.statements for load in vs.loads(s.roots)} - made
    found.update(o for s in kernel.statements for o, stored in zip(s.outs, s.stored, strict=True) if stored)
    return {n for n in found if n in graph.buffers}


def _plane_blocks(length: int, slow: Var, sizes: Sizes, results: int) -> Blocks:
    """A tile whose sides are whole cache lines of both kinds of access; shorter where points have several results each, and
    narrower where much of the last tile of a row would be beyond its end, as of 85 columns."""
    x = min(LINE_OF_A_PLANE, power_of_two(length))
    if WASTE_OF_A_PLANE * -(-length // (x // 2)) <= 2 * (WASTE_OF_A_PLANE - 1) * -(-length // x):
        x //= 2
    y = max(MIN_TILE, min(128, power_of_two(sizes.of(slow.extent))) // power_of_two(results))
    return Blocks(x=x, y=y, warps=8 if x * y > 4096 else 4)


def _lightened_plane(kernel: Kernel, blocks: Blocks) -> Blocks:
    """With fewer points a thread where their values would leave an SM with one program: first a shorter side, of a full cache
    line yet, then more warps."""
    each = registers_of_a_point(kernel)
    return _thinned(
        blocks, lambda one: each * one.x * one.y > MOST_OF_COLUMNS * 32 * one.warps,
        lambda one: replace(one, y=one.y // 2) if one.y > LINE_OF_A_PLANE else None,
    )  # fmt: skip


def _thinned(blocks: Blocks, is_full: Callable[[Blocks], bool], shorter: Callable[[Blocks], Blocks | None]) -> Blocks:
    """A tile whose threads have less, until they are not full: a shorter one, as long as there is one, then more warps."""
    while is_full(blocks):
        less = shorter(blocks)
        if less is None and blocks.warps >= WARPS_PER_SM:
            break
        blocks = less or replace(blocks, warps=2 * blocks.warps)
    return blocks


# ---- reductions -----------------------------------------------------------------------------------------------------


def _reduction(kernel: Kernel, graph: ir.Graph, touches: list[Touch], sizes: Sizes, gpu: Gpu, wide: bool) -> Tiling:
    rows, length = sizes.points(kernel.outer), sizes.points(kernel.inner)
    across, together = _contiguous_across(kernel, touches, sizes), 1
    # of programs that fill an SM each, a second round would be of few rows: two of an SM at a time
    uneven = kernel.sections > 1 and gpu.compute_units < rows < gpu.compute_units * UNEVEN_ROUND
    if any(s.op in ops.ROW_ORDERS for s in kernel.statements):
        return Tiling(kernel, kernel.outer, (), sorting_blocks(kernel, graph, rows, length, across, gpu), True, wide)
    whole = persistent(kernel, MAX_PERSISTENT if kernel.rows else MAX_REGISTER_ROW) and (
        bool(kernel.rows) or not across or length <= (REGISTER_COLUMN if kernel.sections > 1 else SHORT_COLUMN)
    )
    if across and not whole:
        blocks = _column_blocks(kernel, kernel.outer[-1], sizes, gpu)
    elif whole:
        r = power_of_two(length)
        x = _rows_per_program(rows, r, gpu, across)
        x *= _rows_that_share(kernel, touches, sizes, x, rows, gpu)
        together = 1 if across else _rows_of_a_sector(kernel, touches, sizes, r, gpu)
        x = max(x, together)
        waits = 1 if across else len({s.section for s in kernel.statements if s.kind == "reduction"})
        lone = not across and rows <= x * gpu.compute_units
        blocks = Blocks(x=x, r=r, warps=max(_warps(x * r, waits), _lone_warps(x * r) if lone else 1))
    else:
        # a row that is walked again should still be in the L2 cache then: few rows at a time, many threads to each
        many = rows > gpu.compute_units  # of few rows a long step has more on its way
        one_walk = many and _is_read_for_sums_below_maxima(kernel)
        again = kernel.sections > 1 and not one_walk
        scalar = many and _begins_between_vectors(kernel, sizes)
        most = REDUCTION_POINTS if one_walk else SCALAR_POINTS if scalar else 2 * REDUCTION_POINTS
        r = _again_step(rows, length, gpu) if again and not uneven else _step(length, most)
        warps = max(WALKING_WARPS, r // AGAIN_WARP) if again else WALKING_WARPS
        blocks = Blocks(x=1, r=r, warps=max(warps, _lone_warps(r)) if rows <= gpu.compute_units else warps)
    steps = _short_steps(kernel, touches, across, sizes, gpu) if whole and _may_step(kernel) else None
    if steps is None and together == 1 and not (across and whole):
        steps = _crossing_steps(kernel, touches, sizes)
    if steps is not None:
        return Tiling(kernel, kernel.outer, (), steps, False, wide)
    if not across:
        if cost_of_a_point(kernel) >= MEDIUM and (
            _moves_little(kernel, graph) or _waits_for_arithmetic(kernel, touches, sizes)
        ):
            blocks = _of_fewer_rows(kernel, blocks)
        blocks = _lightened(kernel, blocks, length, together)
        blocks = blocks if whole else _lightened_walk(kernel, blocks, 2 if uneven else 1, rows > gpu.compute_units)
        blocks = _with_warps_for_scans(kernel, blocks)
        whole = whole and blocks.r >= length
    elif whole:
        blocks = _lightened_columns(kernel, blocks)
    return Tiling(kernel, kernel.outer, (), blocks, whole, wide)


def _short_steps(kernel: Kernel, touches: list[Touch], across: bool, sizes: Sizes, gpu: Gpu) -> Blocks | None:
    """A tile that walks its rows in short steps, where holding them wastes what takes the time: points past the end. Threads
    then have rows to themselves, and add up what they made once. None where that is not so, or a row is read again."""
    rows, length = sizes.points(kernel.outer), sizes.points(kernel.inner)
    lookups = None if across else lookup_steps(kernel, touches, sizes, gpu.compute_units)
    if lookups is not None or 8 * (power_of_two(length) - length) <= length:
        return lookups
    if across:
        return Blocks(x=COLUMN_PAIRS, r=1, warps=COLUMN_WARPS) if rows >= gpu.compute_units * MANY_COLUMNS else None
    if not _waits_for_arithmetic(kernel, touches, sizes):
        return None
    r = next(step for step in (*SHORT_STEPS, 1) if SHORTEST_WASTE * (-length % step) <= length)
    x, least = SHORT_STEP_POINTS // r, gpu.compute_units * PROGRAMS_OF_STEPS
    while 2 * power_of_two(length) >= 3 * length and x * r > THREADS and rows < x * least:
        x //= 2  # where a third of the points or more would be past the end, a row for each thread is better than that
    if rows >= x * least or (x * r == THREADS and 2 * rows >= x * least):
        return Blocks(x=x, r=r, warps=THREADS // 32)
    return _long_steps(kernel, rows, length, gpu)


def _crossing_steps(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> Blocks | None:
    """Short steps of rows side by side where much is moved along the rows, and much across them, as where an image is summed by
    channels and stored with its channels last: full sectors of both. One row alone would write an element of each sector."""
    rows = sizes.of(kernel.outer[-1].extent) if kernel.outer else 1
    if not _may_step(kernel) or rows < CROSSED_ROWS or sizes.points(kernel.inner) < 2 * CROSSED_STEP:
        return None
    walked = [t for t in touches if t.inner and not _slides(kernel, t, sizes)]
    across = sum(t.distinct for t in walked if _is_across(kernel, t, sizes))
    along = sum(t.distinct for t in walked if any(stride_along(t.offset, v, sizes) in ADJACENT for v in kernel.inner))
    crossed = across + along >= CROSSED_BYTES and max(across, along) <= MOST_CROSSED * min(across, along)
    return Blocks(x=CROSSED_ROWS, r=CROSSED_STEP, warps=COLUMN_WARPS) if crossed else None


def _may_step(kernel: Kernel) -> bool:
    """Whether rows are read in one walk, of what a step does not need from the one before."""
    kinds = ("pointwise", "reduction", "scatter")
    return kernel.sections == 1 and not kernel.rows and all(s.kind in kinds for s in kernel.statements if s.inner)


def _long_steps(kernel: Kernel, rows: int, length: int, gpu: Gpu) -> Blocks | None:
    """A tile that walks one row in steps, of which the last one is full or nearly so. None where a power of two holds as much
    of the row, where SMs have few rows, or registers do not hold a step's values."""
    r = _step(length, HEAVY_STEP)
    blocks = Blocks(x=1, r=r, warps=max(1, r * HEAVY_WARPS // HEAVY_STEP))
    saved = power_of_two(length) - -(-length // r) * r
    if r < SHORTEST_STEP or WORTH_WALKING * saved < length or rows < ROWS_OF_STEPS * gpu.compute_units:
        return None
    each = registers_of_a_point(kernel) + sum(s.kind == "reduction" for s in kernel.statements)
    return blocks if each * _points_of_a_thread(blocks) <= FEW_REGISTERS else None


def _waits_for_arithmetic(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> bool:
    """Whether a point's operations take longer than what it moves, as in a table of all pairs of a few numbers."""
    points = sizes.points((*kernel.outer, *kernel.inner))  # of no images there are none
    return cost_of_a_point(kernel) * points > OPERATIONS_OF_A_BYTE * sum(touch.distinct for touch in touches)


def _moves_little(kernel: Kernel, graph: ir.Graph) -> bool:
    """Whether a point's operations take longer than what it reads once, and stores."""
    points = [s for s in kernel.statements if s.inner and s.kind == "pointwise"]
    stored = [o for s in points for o, kept in zip(s.outs, s.stored, strict=True) if kept]
    moved = _bytes_per_point(kernel) + sum(graph.buffers[name].dtype.itemsize for name in stored)
    return cost_of_a_point(kernel) > OPERATIONS_OF_A_BYTE * moved


def _lightened(kernel: Kernel, blocks: Blocks, length: int, together: int = 1) -> Blocks:
    """With fewer points a thread where their values would not be in its registers: such as bilinear samples, which have twenty
    at a time; or where arithmetic takes the time, which more threads of an SM share. Rows are walked then, unless they are
    read again. So many rows stay together."""
    registers, heavy = _registers(kernel), cost_of_a_point(kernel) >= HEAVY
    if registers(blocks) <= MOST_REGISTERS and not heavy:
        return blocks
    may_walk = kernel.sections == 1 and not kernel.rows and together == 1
    warps = WARPS_PER_SM if together > 1 else HEAVY_WARPS if heavy else FEW_WARPS
    most = _special_points(kernel) if _has_special_functions(kernel) else HEAVY_POINTS
    while registers(blocks) > FEW_REGISTERS or (heavy and _points_of_a_thread(blocks) > most):
        if blocks.x > together:
            blocks = replace(blocks, x=blocks.x // 2)
        elif blocks.warps < warps:
            blocks = replace(blocks, warps=2 * blocks.warps)
        elif may_walk and blocks.r > 32 * blocks.warps:
            blocks = replace(blocks, r=blocks.r // 2)
        else:
            break
    return replace(blocks, r=_step(length, blocks.r)) if blocks.r < length else blocks


def _of_fewer_rows(kernel: Kernel, blocks: Blocks) -> Blocks:
    """With fewer rows where the values of their points leave an SM few warps: arithmetic waits for what was computed before,
    and other warps run meanwhile."""
    registers = _registers(kernel)
    while blocks.x > 1 and registers(blocks) > MEDIUM_REGISTERS and _points_of_a_thread(blocks) > HEAVY_POINTS:
        blocks = replace(blocks, x=blocks.x // 2)
    return blocks


def _lightened_walk(kernel: Kernel, blocks: Blocks, programs: int, many: bool) -> Blocks:
    """With shorter steps along rows where so many programs of an SM have no registers for what threads keep of each of their
    points from step to step, beside the values of some of them, or of all where positions are found: 32,001 columns with exact
    logarithms took 4.4 times as long with 16 points, and correlations of long rows, of three sums, 1.5 to 2.5 times
    (H200). Threads with few points are fewer then. Those of `many` rows that find positions have few points in any case."""
    kept, registers = _kept_registers(kernel), _registers(kernel)
    of_all = any(s.kind == "reduction" and s.op in ("argmax", "argmin") for s in kernel.statements)

    def are_full(one: Blocks) -> bool:
        points, room = _points_of_a_thread(one), REGISTERS_OF_WARPS // (programs * one.warps)
        if of_all:
            return (many and points > POSITION_POINTS) or registers(one) + kept * points > room - FREE_REGISTERS
        return registers(one) * min(points, AT_A_TIME) // points + kept * points > room - ADDRESSES

    while are_full(blocks) and blocks.r > 32 * blocks.warps:
        few = _points_of_a_thread(blocks) <= WALKED_POINTS and blocks.warps > WALKING_WARPS
        blocks = replace(blocks, r=blocks.r // 2, warps=blocks.warps // 2 if few else blocks.warps)
    return blocks


def _kept_registers(kernel: Kernel) -> int:
    """What a thread keeps of each of its points from step to step along a row, in registers, and what functions take."""
    kept: dict[int, int] = {}
    for s in kernel.statements:
        if s.kind == "reduction":
            width = max(1, s.value.dtype.itemsize // REGISTER) * len(s.outs)
            kept[s.section] = kept.get(s.section, 0) + width
    return max(kept.values(), default=0) + (HEAVY_REGISTERS if cost_of_a_point(kernel) >= HEAVY else 0)


def _with_warps_for_scans(kernel: Kernel, blocks: Blocks) -> Blocks:
    """With few points a thread where a scan's joins are heavy: a thread makes them one after the other."""
    if not any(s.kind == "scan" and joins.cost(s.op, s.value.dtype) >= HEAVY for s in kernel.statements):
        return blocks
    while blocks.warps < HEAVY_WARPS and _points_of_a_thread(blocks) > SCANNED_POINTS:
        blocks = replace(blocks, warps=2 * blocks.warps)
    return blocks


def _lightened_columns(kernel: Kernel, blocks: Blocks) -> Blocks:
    """The same of columns in registers: first more threads share the tile, then it has fewer columns, of whole sectors yet."""
    registers = _registers(kernel)
    if registers(blocks) <= MOST_OF_COLUMNS:
        return blocks
    while registers(blocks) > FEW_REGISTERS:
        if blocks.warps < WALKING_WARPS:
            blocks = replace(blocks, warps=2 * blocks.warps)
        elif blocks.x > FEWEST_COLUMNS // 2:
            blocks = replace(blocks, x=blocks.x // 2)
        else:
            break
    return blocks


def _registers(kernel: Kernel) -> Callable[[Blocks], int]:
    """Registers of a thread that values of its points and of its rows take, by the tile."""
    each, of_row = registers_of_a_point(kernel), registers_of_a_row(kernel)
    return lambda blocks: each * _points_of_a_thread(blocks) + of_row * (ROW_COPIES * blocks.x // (32 * blocks.warps))


def cost_of_a_point(kernel: Kernel) -> int:
    """Elementary operations of an inner point, without those of its row."""
    inner = frozenset(kernel.inner)
    values = vs.topological([root for s in kernel.statements if s.inner for root in s.roots])
    return sum(ops.cost(value.op) for value in values if not inner.isdisjoint(value.variables()))


def _has_special_functions(kernel: Kernel) -> bool:
    """Whether it computes such as are long in doubles: the values of one of them fill the registers of a thread."""
    return any(ops.cost(value.op) >= SPECIAL for value in vs.topological([root for s in kernel.statements for root in s.roots]))


def _special_points(kernel: Kernel) -> int:
    """Points of a thread where special functions are computed: one, or several that share those of their row, which each of its
    threads computes."""
    inner = frozenset(kernel.inner)
    values = vs.topological([root for s in kernel.statements for root in s.roots])
    of_rows = any(ops.cost(value.op) >= SPECIAL and inner.isdisjoint(value.variables()) for value in values)
    return SHARED_SPECIAL if of_rows else 1


def _points_of_a_thread(blocks: Blocks) -> int:
    return max(1, blocks.x * blocks.r // (32 * blocks.warps))


def _grouped(kernel: Kernel, merged: Var, width: int, sizes: Sizes, gpu: Gpu, wide: bool) -> Tiling:
    """Neighbouring channels of several groups along x, the pixels along r: whole cache lines of both."""
    outer = (*(v for v in kernel.outer if v is not merged), merged)
    blocks = _column_blocks(kernel, merged, sizes, gpu)
    return Tiling(replace(kernel, outer=outer), outer, (), blocks, False, wide, width)


def _column_blocks(kernel: Kernel, columns: Var, sizes: Sizes, gpu: Gpu) -> Blocks:
    """Few points a thread: accumulators are tiles, and folding them at the end costs their size."""
    rows, length = sizes.points(kernel.outer), sizes.points(kernel.inner)
    x = min(COLUMNS, power_of_two(max(1, sizes.of(columns.extent))))
    while x > FEWEST_COLUMNS and rows < x * gpu.compute_units:
        x //= 2
    blocks = Blocks(x=x, r=_step(length, COLUMN_POINTS // x), warps=COLUMN_WARPS)
    return _in_fewer_steps(kernel, blocks, -(-rows // x), length, gpu)


def _in_fewer_steps(kernel: Kernel, blocks: Blocks, programs: int, length: int, gpu: Gpu) -> Blocks:
    """With more warps, where an SM has few programs: each step waits for memory, and nothing else runs meanwhile. As long as
    the values of a thread are in the registers that so many threads have."""
    accumulators = sum(s.kind == "reduction" for s in kernel.statements)
    registers = (registers_of_a_point(kernel) + accumulators) * _points_of_a_thread(blocks)

    def may_double(blocks: Blocks) -> bool:
        warps = 2 * blocks.warps
        few = warps <= MOST_COLUMN_WARPS and warps * programs <= gpu.compute_units * COLUMN_WARPS_PER_SM
        return few and 2 * blocks.r <= length and registers * warps <= REGISTERS_OF_WARPS // 2

    while may_double(blocks):
        blocks = replace(blocks, r=2 * blocks.r, warps=2 * blocks.warps)
    return blocks


def _again_step(rows: int, length: int, gpu: Gpu) -> int:
    """Points of a step along a row that is walked again. A program that has an SM to itself waits for each of its steps: a few
    large ones take less time, though the last is mostly empty."""
    most = 4 * REDUCTION_POINTS
    return min(most, power_of_two(length)) if rows <= gpu.compute_units else _step(length, most)


def _step(length: int, most: int) -> int:
    """Points of a step along a row: the largest of which the last one is not wasted for more than an eighth of the row."""
    most = max(1, min(most, power_of_two(length)))
    sizes = [r for r in (most, most // 2, most // 4) if r]
    return next((r for r in sizes if 8 * (-(-length // r) * r - length) <= length), sizes[-1])


def _rows_per_program(rows: int, r: int, gpu: Gpu, across: bool) -> int:
    """Short rows share a program, as long as enough programs are left."""
    x = max(1, REDUCTION_POINTS // 2 // r)
    if across:
        x = max(x, min(32, power_of_two(rows), max(FEWEST_COLUMNS, REGISTER_POINTS // r)))
    least = FEWEST_COLUMNS // 2 if across and r > SHORT_COLUMN else 1  # a long column of fewer reads parts of sectors
    while x > least and rows < x * gpu.compute_units * 2:
        x //= 2
    return x


def _rows_that_share(kernel: Kernel, touches: list[Touch], sizes: Sizes, x: int, rows: int, gpu: Gpu) -> int:
    """Rows for each of a program's where all rows read the same, as those of a table of all pairs: read by each row anew, it is
    what L2 has to give."""
    outer, length = frozenset(kernel.outer), sizes.points(kernel.inner)
    along = [(t, ix.free_atoms(t.offset)) for t in touches if t.inner]
    walked = [(t, outer.isdisjoint(atoms)) for t, atoms in along if not atoms.isdisjoint(kernel.inner)]
    if x > 1 or not all(same for _, same in walked) or sum(t.distinct for t, _ in walked) < SHARED_ROW:
        return 1
    more = 1
    while more < MOST_SHARING and rows >= 2 * more * 4 * gpu.compute_units and 2 * more * length <= SHARED_TILE:
        more *= 2
    return more


def _rows_of_a_sector(kernel: Kernel, touches: list[Touch], sizes: Sizes, r: int, gpu: Gpu) -> int:
    """Rows that move full sectors together, or half of them, where much is read or stored across rows, as a transposed operand
    is: each row alone moves one element of each sector. One where registers do not hold so many, or SMs would be idle."""
    points, rows = max(1, sizes.points((*kernel.outer, *kernel.inner))), sizes.points(kernel.outer)
    turned = [t for t in touches if t.inner and _is_across(kernel, t, sizes)]
    moved = sum(t.distinct * SECTOR // max(1, t.bytes // points) for t in turned)
    if moved <= sum(t.distinct for t in touches):
        return 1
    full = x = max(SECTOR // max(1, t.bytes // points) for t in turned)
    while x > 1 and (x * r > REGISTER_POINTS or rows < 2 * x * gpu.compute_units):
        x //= 2
    return x if 2 * x >= full else 1


def _is_across(kernel: Kernel, touch: Touch, sizes: Sizes) -> bool:
    """Whether neighbours of an access are in the next row, and those of a row apart."""
    if not kernel.outer or stride_along(touch.offset, kernel.outer[-1], sizes) not in ADJACENT:
        return False
    return all((stride_along(touch.offset, v, sizes) or 0) not in (0, *ADJACENT) for v in kernel.inner)


def shared_blocks(rows: int, length: int, gpu: Gpu) -> Blocks:
    """The tile of a kernel whose programs share out the rows."""
    r = power_of_two(length)
    medium = MEDIUM_ROWS[0] <= r <= MEDIUM_ROWS[1]
    x = max(1, SHARED_POINTS // r // (2 if medium else 1))
    while x > 1 and rows < x * gpu.compute_units:
        x //= 2
    return Blocks(x=x, r=r, warps=max(1, min(MAX_WARPS, x * r // SHARED_WARP)), stages=SHARED_STAGES)


def _lightened_shares(kernel: Kernel, blocks: Blocks) -> Blocks:
    """With fewer points a thread where a point has many values, the sums of its columns among them: an SM would hold one such
    program, and the others would follow in a second round. First fewer rows, then more warps for one row."""
    each = registers_of_a_point(kernel) + sum(s.kind == "column" for s in kernel.statements)
    return _thinned(
        blocks, lambda one: each * _points_of_a_thread(one) > FEW_REGISTERS,
        lambda one: replace(one, x=one.x // 2) if one.x > 1 else None,
    )  # fmt: skip


def _bytes_per_point(kernel: Kernel) -> int:
    """What the kernel reads from memory for each row and column."""
    made = {o for s in kernel.statements for o in s.outs}
    read = {load.attr for s in kernel.statements for load in vs.loads(s.roots) if load.attr[0] not in made}
    rows, columns = set(kernel.outer), set(kernel.inner)
    return sum(dtype.itemsize for _, (at,), dtype in read if rows & ix.free_atoms(at) and columns & ix.free_atoms(at))


def shares(rows: int, length: int, gpu: Gpu) -> int:
    """Programs among which rows are shared out: not more than run side by side, all with the same number of blocks."""
    blocks = shared_blocks(rows, length, gpu)
    count = -(-rows // blocks.x)
    most = gpu.compute_units * (OF_FEW_WARPS if blocks.warps == FEW_WARPS else max(1, WARPS_PER_SM // blocks.warps))
    programs = min(most, max(count // MIN_BLOCKS, min(count, gpu.compute_units)))
    rounds = -(-count // max(1, programs))
    return -(-count // max(1, rounds))


def _warps(points: int, waits: int = 1) -> int:
    """About 32 points a thread: enough loads under way at once, and few enough for registers. Twice as many where reductions
    wait for each other: the fewer warps meet at each of them, and other programs of the SM run meanwhile."""
    warps = max(1, min(MAX_WARPS, points // ROW_WARP))
    return warps if waits < 2 else max(min(warps, 2), warps // 2)


def _lone_warps(points: int) -> int:
    """Of a program that has an SM to itself: with a warp for each scheduler, every operation would wait for the one before."""
    return max(1, min(MOST_LONE_WARPS, points // LONE_WARP))


def _contiguous_across(kernel: Kernel, touches: list[Touch], sizes: Sizes) -> bool:
    """Whether most bytes of the inner accesses are neighbours along the outer loops and not along the inner ones. Windows are
    both. They are read across, for rows would begin between vectors, unless much else is along the inner loops alone."""
    if not kernel.outer:
        return False
    across = along = windows = 0
    for touch in touches:
        if not touch.inner:
            continue
        inside = any(stride_along(touch.offset, v, sizes) in ADJACENT for v in kernel.inner)
        if inside and not _slides(kernel, touch, sizes):
            along += touch.distinct
        elif inside:
            windows += touch.distinct
        elif stride_along(touch.offset, kernel.outer[-1], sizes) in ADJACENT:
            across += touch.distinct
    return across + windows > along if windows > CROSSED * along else across > along + windows


def _slides(kernel: Kernel, touch: Touch, sizes: Sizes) -> bool:
    """Whether an access is neighbours along an inner loop and along the last outer one, as windows are that begin at every
    element."""
    steps = [stride_along(touch.offset, v, sizes) for v in (*kernel.outer[-1:], *kernel.inner)]
    return touch.inner and bool(kernel.outer) and steps[0] in ADJACENT and any(step in ADJACENT for step in steps[1:])


# ---- index arithmetic -----------------------------------------------------------------------------------------------


def _fits_32(kernel: Kernel) -> bool:
    """Whether every offset and count is known to fit in 32 bits, with room for a tile that reaches past the end."""
    room = INT32 - (1 << 20)
    exprs: list[Expr] = [ix.product(v.extent for v in kernel.outer), ix.product(v.extent for v in kernel.inner)]
    for s in kernel.statements:
        exprs += s.store
        for value in vs.topological(s.roots):
            if value.op == "load":
                exprs += vs.index_exprs(value)
    return all(ix.within(e, room) for e in exprs)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
