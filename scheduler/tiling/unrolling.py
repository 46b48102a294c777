"""Writes short loops of pointwise kernels on a GPU point by point, where arithmetic takes longer than memory, and most of it is
the same at all of their points.

    before   y[i, c < 3] = f(i) * x[i, c]                                    f(i) is computed by three threads
    after    t = f(i);  y[i, 0] = t * x[i, 0];  y[i, 1] = t * x[i, 1];  y[i, 2] = t * x[i, 2]

One thread then has all points of the loop. Indices count as work: a point of three loops divides several times to find its
loop variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kgen.device import Gpu
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import Kernel, Statement
from kgen.ir.values import Value
from kgen.scheduler.tiling.loops import collapsed, distinct_touches, stride_along, usual_stride

# Points of a loop that is written point by point, at most, and statements of the kernel that comes of it.
MOST_POINTS, MOST_STATEMENTS = 12, 64
# Turns that the points of a longer loop may take: their results are adjacent, and one store has them.
NUMBERS = (2, 4)
# How many times less work there has to be, and no less than memory takes: operations that take an SM as long as a byte. These
# are rough ones, of which each is several instructions.
GAIN, OPERATIONS_OF_A_BYTE = 1.5, 3
# How many times less than that of the outermost loop, such as a batch: its points are far apart, and programs of each run side
# by side.
GAIN_OF_BATCHES = 2.5
# Instructions of a division by a known number or its remainder, and of an access besides.
DIVISION, ACCESS = 4, 2
# Parts of a loop that a thread has a point of each of, at most, and how many times fewer bytes they have to move together.
MOST_PARTS, GAIN_OF_PARTS = 4, 1.2
# Bytes that programs move before a part of a loop is done, at least: a cache has fewer of them read again by the next part.
CACHED = 1 << 23
# Bytes between what neighbouring threads store, at most: a sector of a cache line.
SECTOR = 32
# Of how many bytes that are read one may be in runs of a thread.
SMALL_SHARE = 4
# Bytes of the run that a thread of such a loop reads, at most, element by element: a word, which is what threads of a loop over
# its elements would read a part of each.
RUN = 4
# Threads that each SM has to have left: with fewer of them, it waits for memory; and how many times fewer are enough, at most,
# as arithmetic takes so many times longer.
THREADS_PER_SM, FEWER_THREADS = 2048, 4


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop to be written point by point: the indices of its points, and what is left of it for a thread to go along."""

    v: Var
    points: tuple[Expr, ...]
    left: Var | None = None

    def without(self, loops: Iterable[Var]) -> tuple[Var, ...]:
        """The kernel's loops then."""
        return tuple(one for v in loops for one in ([v] if v is not self.v else [] if self.left is None else [self.left]))


def unrolled(kernel: Kernel, graph: ir.Graph, sizes: Sizes, gpu: Gpu) -> Kernel:
    """The kernel with the loop that saves most written point by point, if any saves enough. No loop of it is an inner one."""
    if not _is_pointwise(kernel):
        return kernel
    statements = _without_locals(kernel.statements)
    for loop in _parts(kernel):
        made = replace(kernel, outer=loop.without(kernel.outer), statements=_at_each_point(statements, loop))
        if _leaves_enough(made.outer, sizes, gpu) and _reads_less(made, statements, loop, graph, sizes):
            return unrolled(collapsed(made), graph, sizes, gpu)
    moved = _bytes(kernel, graph, sizes)
    least, found = _work(kernel.outer, statements) / GAIN, kernel
    for loop in (*_short_loops(kernel), *_turns(kernel)):
        if not _leaves_enough(loop.without(kernel.outer), sizes, gpu, FEWER_THREADS):
            continue
        made = replace(kernel, outer=loop.without(kernel.outer), statements=_at_each_point(statements, loop))
        memory = OPERATIONS_OF_A_BYTE * min(moved, _bytes(made, graph, sizes)) / sizes.points(kernel.outer)
        work = max(_work(made.outer, made.statements) / len(loop.points), memory)
        fewer = min(work / max(1, memory), FEWER_THREADS)
        if not _leaves_enough(made.outer, sizes, gpu, fewer):
            continue
        if len(kernel.outer) > 1 and loop.v is kernel.outer[0]:
            work *= GAIN_OF_BATCHES
        if work < least and len(made.statements) <= MOST_STATEMENTS and _moves_sectors(kernel, made, loop, graph, sizes):
            least, found = work, made
    return found if found is kernel else collapsed(found)


def _bytes(kernel: Kernel, graph: ir.Graph, sizes: Sizes) -> int:
    """What a kernel moves. Loads that come to the same elements by other indices count several times, as those of neighbours
    in a short row do until their loop is written out. Its statements then share them."""
    touches = distinct_touches(kernel, graph, sizes)
    return sum({(touch.buffer, touch.offset): touch.distinct for touch in touches}.values())


def _short_loops(kernel: Kernel) -> Iterator[_Loop]:
    for v in kernel.outer:
        extent = v.extent.as_int()
        if extent is not None and 1 < extent <= MOST_POINTS:
            yield _Loop(v, tuple(ix.constant(point) for point in range(extent)))


def _turns(kernel: Kernel) -> Iterator[_Loop]:
    """Points of the last loop that take turns: indices and values go by its quotient and its remainder, as two numbers of one
    byte do."""
    for v in kernel.outer[-1:]:
        extent, number = v.extent.as_int(), _least_divisor(kernel, v)
        if extent is not None and number in NUMBERS and extent % number == 0 and extent > MOST_POINTS:
            left = ix.var(f"{v.name}q", extent // number)
            yield _Loop(v, tuple(left.expr() * number + point for point in range(number)), left)


def _parts(kernel: Kernel) -> Iterator[_Loop]:
    """Equal parts of a loop, a point of each at a time: results that a concatenation puts behind each other."""
    for v in kernel.outer:
        extent, bounds = v.extent.as_int(), _bounds(kernel, v)
        length = min(bounds, default=0)
        if extent is None or not 0 < length < extent or any(bound % length for bound in (*bounds, extent)):
            continue
        if extent // length <= MOST_PARTS:
            left = ix.var(f"{v.name}p", length)
            yield _Loop(v, tuple(left.expr() + first for first in range(0, extent, length)), left)


def _bounds(kernel: Kernel, v: Var) -> set[int]:
    """The numbers that a loop itself is compared with."""
    below = (value.args for s in kernel.statements for value in vs.topological(s.roots) if value.op == "lt")
    return {b.attr for a, b in below if a.op == "index" and a.attr is v.expr() and b.op == "const" and isinstance(b.attr, int)}


def _reads_less(made: Kernel, statements: Sequence[Statement], loop: _Loop, graph: ir.Graph, sizes: Sizes) -> bool:
    """Whether parts read the same elements, which are gone from the caches when the loop comes to the next part."""
    assert loop.left is not None
    fast = made.outer[-1]

    def read(points: tuple[Expr, ...]) -> set[tuple[Expr, int]]:
        found = _at_each_point(statements, replace(loop, points=points))
        loads = (load.attr for s in found for load in vs.loads(s.roots))
        return {(offset, dtype.itemsize) for _, (offset,), dtype in loads if fast in ix.free_atoms(offset)}

    apart, together = [read((point,)) for point in loop.points], read(loop.points)
    size = sum(
        graph.buffers[o].dtype.itemsize for s in made.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept
    )
    before, after = (size + sum(width for _, width in loads) for loads in ([x for one in apart for x in one], together))
    later = made.outer[made.outer.index(loop.left) :]
    far = sizes.points(later) * before // len(loop.points) >= CACHED
    return far and before >= GAIN_OF_PARTS * after and len(made.statements) <= MOST_STATEMENTS


def _least_divisor(kernel: Kernel, v: Var) -> int:
    """The least number that a loop itself is divided by; 0 where it is by none."""
    exprs = (e for s in kernel.statements for value in vs.topological(s.roots) for e in vs.index_exprs(value))
    atoms = (atom for e in exprs for mono, _ in e.terms for atom in mono if isinstance(atom, ix.FloorDiv | ix.Mod))
    return min((number for atom in atoms if atom.num is v.expr() and (number := atom.den.as_int())), default=0)


def _is_pointwise(kernel: Kernel) -> bool:
    """Whether points are independent, nothing is updated, and no random numbers are shared among points."""
    if kernel.inner or kernel.share is not None or any(s.kind != "pointwise" or s.target for s in kernel.statements):
        return False
    if any(ix.indirects(e) for s in kernel.statements for e in s.store):
        return False
    return not any(value.op in ops.RANDOM for s in kernel.statements for value in vs.topological(s.roots))


def _leaves_enough(loops: tuple[Var, ...], sizes: Sizes, gpu: Gpu, fewer: float = 1) -> bool:
    """Whether all SMs have threads enough, or so many times fewer."""
    return bool(loops) and fewer * sizes.points(loops) >= gpu.compute_units * THREADS_PER_SM


def _moves_sectors(old: Kernel, new: Kernel, loop: _Loop, graph: ir.Graph, sizes: Sizes) -> bool:
    """Whether neighbouring threads still store into the same sectors, and what a part of a loop reads is still a run.
    Where data say what is read, there was none before."""
    if loop.v is not old.outer[-1]:
        return True
    fast = new.outer[-1]
    stores = (
        (s.store[0], graph.buffers[o].dtype) for s in new.statements for o, kept in zip(s.outs, s.stored, strict=True) if kept
    )
    if not all(_is_near(offset, fast, SECTOR // dtype.itemsize, sizes) for offset, dtype in stores):
        return False
    return _keeps_runs(old, loop.v, fast, graph, sizes) if loop.left is None else _reads_runs(new, fast, sizes)


def _keeps_runs(old: Kernel, v: Var, fast: Var, graph: ir.Graph, sizes: Sizes) -> bool:
    """Whether what is read in runs along a loop is near what threads beside read, but for a small share: else each thread has
    a run of its own, of which a load takes one element."""
    read = [touch for touch in distinct_touches(old, graph, sizes) if not touch.store]
    apart = [
        touch for touch in read
        if stride_along(touch.offset, v, sizes) == 1 and stride_along(touch.offset, fast, sizes)
        and not _is_near(touch.offset, fast, SECTOR // max(1, graph.buffers[touch.buffer].dtype.itemsize), sizes)
    ]  # fmt: skip
    return SMALL_SHARE * sum(touch.distinct for touch in apart) <= sum(touch.distinct for touch in read)


def _reads_runs(kernel: Kernel, fast: Var, sizes: Sizes) -> bool:
    """Whether neighbouring threads read a run of memory each: adjacent elements, or the three bytes of each that four numbers
    come from. Where data say what is read, there was none before."""
    runs: dict[tuple[str, Expr], tuple[int, set[int]]] = {}
    for name, (offset,), dtype in (load.attr for s in kernel.statements for load in vs.loads(s.roots)):
        if not ix.indirects(offset):
            first = offset.constant_term()
            runs.setdefault((name, offset - first), (dtype.itemsize, set()))[1].add(first)
    return all(
        _is_near(offset, fast, min(len(firsts), max(1, RUN // width)), sizes) for (_, offset), (width, firsts) in runs.items()
    )


def _is_near(offset: Expr, fast: Var, most: int, sizes: Sizes) -> bool:
    stride = usual_stride(offset, fast, sizes)
    return stride is not None and abs(stride) <= most


def _without_locals(statements: Iterable[Statement]) -> list[Statement]:
    """What is stored, computed from memory alone: what a statement reads of those before is that statement's value."""
    made: dict[str, Value] = {}
    found = []

    def computed(load: Value) -> Value | None:
        return made.get(load.attr[0])

    for s in statements:
        masks = [] if s.mask is None else [s.mask]
        value, *masks = vs.replace_loads([s.value, *masks], computed)
        made.update(dict.fromkeys(s.outs, value))
        if any(s.stored):
            found.append(replace(s, value=value, mask=masks[0] if masks else None))
    return found


def _at_each_point(statements: Iterable[Statement], loop: _Loop) -> tuple[Statement, ...]:
    """Each statement at all points of a loop, one after the other: what they store may be adjacent. What is stored at one
    point alone is left out of the others."""
    found: dict[Statement, None] = {}
    for s in statements:
        for point in loop.points:
            made = s.substituted({loop.v: point})
            if made.mask is None or made.mask.op != "const":
                found[made] = None
            elif made.mask.attr:
                found[replace(made, mask=None)] = None
    return tuple(found)


def _work(loops: tuple[Var, ...], statements: Iterable[Statement]) -> int:
    """Instructions of a point, roughly: arithmetic, accesses, and divisions in indices."""
    roots = [root for s in statements for root in s.roots]
    values = vs.topological(roots)
    exprs = [*(e for value in values for e in vs.index_exprs(value)), *(e for s in statements for e in s.store)]
    atoms = {atom for e in exprs for atom in ix.free_atoms(e)}
    divided = {atom for e in exprs for mono, _ in e.terms for atom in mono if isinstance(atom, ix.FloorDiv | ix.Mod)}
    variables = 2 * sum(v in atoms for v in loops) - 2
    accesses = sum(value.op == "load" for value in values) + sum(any(s.stored) for s in statements)
    return vs.total_cost(roots) + ACCESS * accesses + DIVISION * (len(divided) + max(0, variables))
