"""What a fusion is worth: memory traffic at the size hints, and when saving it would cost more elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from kgen.device import SECTOR
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import MAX_PERSISTENT
from kgen.scheduler.analysis.items import Access, Item, Members, by_need
from kgen.scheduler.analysis.loop_alignment import Space
from kgen.scheduler.tiling.loops import GROUPS, unflattened_loops
from kgen.scheduler.tiling.tiles import REGISTER_COLUMN, REGISTER_POINTS
from kgen.scheduler.tiling.unrolling import MOST_POINTS
from kgen.verdict import Reason

# Outer points that a kernel of independent points keeps at least: lanes and threads both live on them.
MIN_POINTS = 512
# Lanes over an outer loop: columns that a task walks down together.
COLUMNS = 64
# Bounds of one kernel: beyond these the compiler spills registers and its time grows.
MAX_ITEMS = 64
MAX_COST = 2500
MAX_BUFFERS = 96
# Values that a longer chain of items may need at the same time: a thread has 255 registers, and a point at least.
MAX_LIVE = 128
# Times what two kernels share that each may read of its own, where that is much.
OF_THEIR_OWN = 16
# Threads of a row that compute what belongs to the row, each for itself, and the longest row that is shared so; points of a
# thread where rows are reduced; and the bytes that move in a launch's time.
OF_A_ROW, SHORT_ROW, OF_A_THREAD, A_LAUNCH = 32, 64, 4, 6 << 20
# How an access goes through memory, as seen from a row; the fewest neighbours that make good use of a sector; and bytes of the
# widest numbers.
ALONG, ACROSS, FEWEST_BESIDE, WIDEST = "along", "across", 8, 16
# Points of a row from which on it matters how many programs walk rows.
LONG_WALK = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Where a kind of device draws its lines. Rows of more than `long_row` points, all that are walked together counted, are
    worth sharing among threads when there are fewer than `min_rows`; what a later section needs is computed again below a
    cost of `recompute`, else kept in a row of at most `max_row` points. A longer row is not walked twice in runs of fewer
    than `min_run` neighbours, nor one from `LONG_WALK` points on where fewer than `min_programs` walk whole cache lines of
    neighbouring rows. Where rows are neighbours in memory, `lanes` of them are walked together, and count as one. Columns
    of more than `column_bytes`, COLUMNS of them counted, are out of the cache when a task walks down again: worse than two
    kernels. Those of `register_column` points are in registers then. Two kernels that share little stay apart where each
    reads more than `waiting` bytes that were made for it alone: one kernel would need both in memory, and save little but a
    launch. Rows are walked again, where accesses lie across each other, if a tile of them in which all move full sectors
    has no more points than `turned_tile`: copies are faster (2,202 us for 449 and a copy of 160; H100). A chain of up to
    `chain` items is one kernel where few of its values are needed at the same time. A device does `operations` in the time of
    a byte from memory; 0 where threads share no row."""

    long_row: int
    min_rows: int
    recompute: int
    max_row: int
    min_run: int = 0
    min_programs: int = 0
    lanes: int = 1
    column_bytes: int = 48 * 1024
    register_column: int = 0
    waiting: int = 1 << 19
    chain: int = 0
    turned_tile: int = 0
    operations: int = 0


LIMITS = {
    "cpp": Limits(long_row=32768, min_rows=4, recompute=10, max_row=32768),  # 128 KiB of float32: half an L2 slice
    # a row is held by registers, and arithmetic is cheap; a row shared by programs needs a launch for each walk
    "triton": Limits(
        long_row=MAX_PERSISTENT,
        min_rows=64,
        recompute=60,
        max_row=MAX_PERSISTENT,
        min_run=64,
        min_programs=2048,
        lanes=32,
        register_column=REGISTER_COLUMN,
        waiting=64 << 20,
        chain=512,
        turned_tile=REGISTER_POINTS,
        operations=5,
    ),
}


def unprofitable(graph: ir.Graph, sizes: Sizes, a: Members, b: Members, space: Space, limits: Limits) -> Reason | None:
    """Why the merged kernel would be worse although it moves less memory."""
    outer, inner = space.outer, space.inner
    if _is_large(a, b) and not _is_chain(a, b, limits.chain):
        return Reason.TOO_LARGE
    if _would_wait(graph, sizes, a, b, limits.waiting):
        return Reason.BOTH_IN_MEMORY
    if inner and limits.operations and _repeats_row_values(graph, sizes, a, b, space, limits.operations):
        return Reason.ROW_VALUES
    if inner and limits.turned_tile and _lie_across(graph, sizes, a, b, space):
        return Reason.LAYOUT_CONFLICT
    joined = sorted(a.items + b.items, key=lambda i: i.position) if inner else []
    if inner and _revisits(joined):
        reason = _repeated_walk(_Walk.of(graph, joined, space), sizes, limits)
        if reason is not None:
            return reason
    few = not outer or (sizes.points(outer) < MIN_POINTS and sizes.points(inner) > MIN_POINTS)
    if inner and few and not _ordered(a, b):
        return Reason.PARALLELISM  # as two kernels all points are independent
    return None


def _is_large(a: Members, b: Members) -> bool:
    if len(a.items) + len(b.items) > MAX_ITEMS or a.cost + b.cost > MAX_COST:
        return True
    return len(a.reads) + len(b.reads) + len(a.made) + len(b.made) > 2 * MAX_BUFFERS


def _is_chain(a: Members, b: Members, longest: int) -> bool:
    """Whether the two are steps of an unrolled recurrence, of independent points: however many steps there are, few values
    are needed at the same time. Cut anywhere, a chain stores its values and reads them again."""
    if len(a.items) + len(b.items) > longest or a.cost + b.cost > MAX_COST * longest // (2 * MAX_ITEMS):
        return False
    items = sorted(a.items + b.items, key=lambda i: i.position)
    if any(item.reduces or item.in_order for item in items):
        return False
    items = by_need(items)
    made, read = {out for item in items for out in item.outs}, a.reads.keys() | b.reads.keys()
    return len(made ^ read) <= 2 * MAX_BUFFERS and _live(items) <= MAX_LIVE


def _live(items: list[Item]) -> int:
    """Elements that items in this order need at the same time, each from its first use to its last one."""
    first, last = dict[Access, int](), dict[Access, int]()
    for k, item in enumerate(items):
        for access in (*item.reads, *(Access(out, item.store) for out in item.outs)):
            first.setdefault(access, k)
            last[access] = k
    change = [0] * (len(items) + 1)
    for access, k in first.items():
        change[k] += 1
        change[last[access]] -= 1
    return max(accumulate(change))


def _repeats_row_values(graph: ir.Graph, sizes: Sizes, a: Members, b: Members, space: Space, operations: int) -> bool:
    """Whether one of the two computes what belongs to rows, not from what the other one makes, and threads that each compute it
    for themselves take longer than a kernel of its own."""
    rows, points = (a, b) if not any(item.inner for item in a.items) else (b, a)
    if any(item.inner for item in rows.items) or not any(item.inner for item in points.items) or _flows(points, rows):
        return False
    count, length = sizes.points(space.outer), sizes.points(space.inner)
    in_rows = any(item.reduces or item.in_order for item in points.items)
    if length > SHORT_ROW or (not in_rows and length <= MOST_POINTS):
        return False  # threads have many points of a long row; one thread may have a short one
    threads = min(-(-length // OF_A_THREAD) if in_rows else length, OF_A_ROW)
    of_points = sum(item.cost for item in points.items if item.inner) * length * count
    # with what the points' kernel has of rows already: it grew by one small step after the other
    of_rows = (rows.cost + sum(item.cost for item in points.items if not item.inner)) * count
    shared = points.touched if len(points.touched) < len(rows.touched) else rows.touched
    moved = [sum(sizes.bytes(graph.buffers[name]) for name in one.touched) for one in (rows, points)]
    both = sum(sizes.bytes(graph.buffers[name]) for name in shared if name in points.touched and name in rows.touched)
    apart = max(of_rows, moved[0] * operations) + max(of_points, moved[1] * operations) + A_LAUNCH * operations
    return max(of_rows * threads + of_points, (sum(moved) - 2 * both) * operations) > apart


def _flows(a: Members, b: Members) -> bool:
    return not a.made.keys().isdisjoint(b.reads)


def _would_wait(graph: ir.Graph, sizes: Sizes, a: Members, b: Members, much: int) -> bool:
    """Whether two kernels share little, such as a number of each row that one of them makes, and each reads much that the graph
    makes for it alone."""
    shared = (a.reads.keys() | a.made.keys()) & (b.reads.keys() | b.made.keys())

    def own(m: Members) -> int:
        others = (graph.buffers[name] for name in m.reads if name not in shared and name not in m.made)
        return sum(sizes.bytes(buffer) for buffer in others if buffer.kind == "intermediate")

    least = min(own(a), own(b))
    return least > much and least > OF_THEIR_OWN * sum(sizes.bytes(graph.buffers[name]) for name in shared)


def _lie_across(graph: ir.Graph, sizes: Sizes, a: Members, b: Members, space: Space) -> bool:
    """Whether neither of the two reads much that the other one makes, one goes along rows of memory, and the other one across
    them: as two kernels each has the tile that moves full sectors."""
    if sizes.points((*space.outer, *space.inner)) * WIDEST < A_LAUNCH:
        return False  # nothing moves much, however it goes
    flowing = (a.made.keys() & b.reads.keys()) | (b.made.keys() & a.reads.keys())
    if sum(sizes.bytes(graph.buffers[name]) for name in flowing) >= A_LAUNCH:
        return False
    ways = [_Walk.of(graph, list(one.items), space).ways(sizes) for one in (a, b)]
    return ways in ([{ALONG}, {ACROSS}], [{ACROSS}, {ALONG}])


@dataclass(frozen=True, slots=True)
class _Touch:
    """An access: its element size in bytes, its offset, and whether it reads."""

    itemsize: int
    offset: Expr
    reads: bool


@dataclass(frozen=True)
class _Walk:
    """The loops of a merged kernel and what it touches, where strides are known. Loops of several dimensions
    at once are taken apart."""

    outer: tuple[Var, ...]
    inner: tuple[Var, ...]
    touches: tuple[_Touch, ...]

    @staticmethod
    def of(graph: ir.Graph, items: list[Item], space: Space) -> _Walk:
        touches: list[_Touch] = []
        for item in items:
            accesses = [*((r.buffer, r.index, True) for r in item.reads), *((out, item.store, False) for out in item.outs)]
            for name, index, read in accesses:
                buffer = graph.buffers[name]
                if buffer.strides is not None and len(index) == len(buffer.strides):
                    touches.append(_Touch(buffer.dtype.itemsize, ix.linearize(index, buffer.strides), read))
        outer, inner, mapping = unflattened_loops(space.outer, space.inner, [t.offset for t in touches])
        if mapping:
            touches = [replace(t, offset=ix.substitute(t.offset, mapping)) for t in touches]
        return _Walk(outer, inner, tuple(touches))

    def ways(self, sizes: Sizes) -> set[str]:
        """How the accesses that move much go through memory: with neighbours along inner loops, or along outer ones."""
        found = set()
        for touch in self.touches:
            varying = [v for v in (*self.outer, *self.inner) if _stride(touch.offset, v, sizes)]
            if not any(v in varying for v in self.inner) or sizes.points(varying) * touch.itemsize < A_LAUNCH:
                continue
            beside = [v for v in varying if _stride(touch.offset, v, sizes) == 1 and sizes.of(v.extent) >= FEWEST_BESIDE]
            found |= {ALONG if v in self.inner else ACROSS for v in beside}
        return found


def _repeated_walk(walk: _Walk, sizes: Sizes, limits: Limits) -> Reason | None:
    """Why rows should not be walked again once their reduction is known."""
    length, rows = sizes.points(walk.inner), sizes.points(walk.outer)
    together = _rows_walked_together(walk, sizes, limits.lanes)
    if length * together > limits.long_row and rows // together < limits.min_rows:
        return Reason.PARALLELISM
    run = _short_run(walk, sizes, limits.min_run)
    few = length >= LONG_WALK and _line_programs(sizes, walk, run) < limits.min_programs
    if run and (length > limits.max_row or few):
        return Reason.LAYOUT_CONFLICT
    if limits.turned_tile and _turned_tile(walk, sizes) > limits.turned_tile:
        return Reason.LAYOUT_CONFLICT
    far = length > limits.register_column and _column_bytes(walk, sizes) > limits.column_bytes
    return Reason.COLUMNS if far else None


def _rows_walked_together(walk: _Walk, sizes: Sizes, lanes: int) -> int:
    """Of rows that are neighbours in memory, such as channels, those that one program walks side by side."""
    together = 1
    for offset in (t.offset for t in walk.touches if t.reads):
        across = any(_stride(offset, v, sizes) for v in walk.inner)
        beside = [sizes.of(v.extent) for v in walk.outer if _stride(offset, v, sizes) == 1]
        if across and beside and not any(_stride(offset, v, sizes) == 1 for v in walk.inner):
            together = max(together, min(beside[0], lanes))
    return together


def _column_bytes(walk: _Walk, sizes: Sizes) -> int:
    """What the inner loops walk over for one vector of outer points, where their rows lie far apart; 0 where they do not."""
    most = 0
    for touch in walk.touches:
        steps = [_stride(touch.offset, v, sizes) for v in walk.inner]
        if any(0 < step * touch.itemsize < 2 * COLUMNS * 4 for step in steps):
            return 0
        if any(steps) and any(_stride(touch.offset, v, sizes) == 1 for v in walk.outer):
            most = max(most, touch.itemsize)
    return most * COLUMNS * sizes.points(walk.inner)


def _turned_tile(walk: _Walk, sizes: Sizes) -> int:
    """Points of a tile of full rows in which an access with neighbours across them moves full sectors; 0 where no access to all
    points has its neighbours along the rows, or none has them across."""
    loops = frozenset(v for v in (*walk.outer, *walk.inner) if v.extent != 1)
    touches = [t for t in walk.touches if loops <= ix.free_atoms(t.offset)]

    def has_steps_of_one(touch: _Touch, loops: tuple[Var, ...]) -> bool:
        return any(_stride(touch.offset, v, sizes) == 1 for v in loops)

    along = [t for t in touches if has_steps_of_one(t, walk.inner)]
    across = [t.itemsize for t in touches if t not in along and has_steps_of_one(t, walk.outer)]
    return sizes.points(walk.inner) * (SECTOR // min(across)) if along and across else 0


def _short_run(walk: _Walk, sizes: Sizes, least: int) -> int:
    """The neighbours along the inner loops of some access that has few, and an outer loop goes on where they end; 0 of others.
    One that some inner loop repeats, as that of a channel's weight at each pixel, is a small one, and does not count."""
    for offset in (t.offset for t in walk.touches):
        if any(v.extent != 1 and v not in ix.free_atoms(offset) for v in walk.inner):
            continue
        runs = [sizes.of(v.extent) for v in walk.inner if _stride(offset, v, sizes) == 1]
        if runs and runs[0] < least and any(_stride(offset, v, sizes) == runs[0] for v in walk.outer):
            return runs[0]
    return 0


def _line_programs(sizes: Sizes, walk: _Walk, run: int) -> int:
    """Programs that walk as many neighbouring rows together as share a cache line; none where no tile joins runs of that
    length: each program would move parts of cache lines, several programs the same ones."""
    return sizes.points(walk.outer) * run // COLUMNS if run in GROUPS else 0


def _stride(offset: Expr, v: Var, sizes: Sizes) -> int:
    """0 also where the offset has none."""
    stride = ix.stride_of(offset, v)
    return 0 if stride is None else abs(sizes.of(stride))


def _ordered(a: Members, b: Members) -> bool:
    """Whether inner loops must run in order at all."""
    return any(item.in_order for m in (a, b) for item in m.items)


def _revisits(items: list[Item]) -> bool:
    """Whether some item at inner level needs a reduction's finished result, so that the row is walked again."""
    finished: set[str] = set()
    for item in items:
        if item.inner and any(r.buffer in finished for r in item.reads):
            return True
        if item.reduces or any(r.buffer in finished for r in item.reads):
            finished.update(item.outs)
    return False
