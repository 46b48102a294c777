"""Memory that a later row needs, asked for while a row is worked on.

A nest with several sections reads a row from memory in one of them and has it in the cache in the others. Without help memory
idles during those: hardware prefetchers follow what is being read, not across the sections. So a section that finds its row in
the cache asks for the same place of the next one. And where short runs lie apart, as the heads of a permuted copy do, no
prefetcher sees the next run coming, nor where lanes walk down columns. Least of all does it see what data point to: their
indices are read early for that.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.plan import Kernel, Nest, Statement
from kgen.ir.values import Value
from kgen.templates.cpp.codegen.emit import Emitter

# Bytes of all asked rows together: more would drive the present row from a private cache (L2, from 512 KiB on).
MAX_BYTES = 1 << 17
# Steps of the vector loop that a row has at least: shorter ones are one stream to a hardware prefetcher.
MIN_STEPS = 4
# Prefetch distance in bytes where short runs lie apart, runs to prefetch at most, and the longest run that counts as short.
APART, MOST_RUNS, SHORT = 4096, 16, 2048
# Rows, and steps along the lanes, by which indices are read early that point to something for each lane.
POINTED_ROWS, POINTED_STEPS = 8, 16
POINTED = "pointed"


def prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> dict[int, list[str]]:
    """By section, statements for the body of its vector loop."""
    kernel, lanes = nest.kernel, nest.vector
    if lanes is None or not kernel.inner or nest.one_step:
        return {}
    if nest.vertical:
        return _down_columns(nest, lanes, emitter, sizes)
    row = next((v for v in reversed(kernel.outer) if v.extent.as_int() != 1), None)
    if kernel.sections < 2 or row is None or sizes.of(lanes.extent) < MIN_STEPS * nest.lanes:
        return {}
    points = sizes.points(kernel.inner)
    found: dict[int, list[str]] = {}
    total = 0
    for (name, at), section in _first_reads(nest).items():
        step = step_between(at, lanes, row)
        if step is None:
            continue
        total += points * emitter.graph.buffers[name].dtype.itemsize
        last = section == kernel.sections - 1
        place = emitter._index(at).scalar(at if last else at + step)
        found.setdefault(0 if last else section + 1, []).append(f"prefetch_lanes<L>({emitter._pointer(name)} + {place});")
    return found if total <= MAX_BYTES else {}


def _down_columns(nest: Nest, lanes: Var, emitter: Emitter, sizes: Sizes) -> dict[int, list[str]]:
    """Lanes that walk down columns read a short run of each row."""
    kernel = nest.kernel
    points = sizes.points(kernel.outer) * sizes.points(kernel.inner)
    found: dict[int, list[str]] = {}
    for (name, at), section in _first_reads(nest).items():
        step, itemsize = step_between(at, lanes, kernel.inner[-1]), emitter.graph.buffers[name].dtype.itemsize
        if step is None or (step.as_int() or nest.lanes + 1) <= nest.lanes or points * itemsize <= MAX_BYTES:
            continue
        later = _later(nest.lanes * itemsize)
        if later:
            place = emitter._index(at).scalar(at + step * later)
            found.setdefault(section, []).append(f"prefetch_lanes<L>({emitter._pointer(name)} + {place});")
    return found


def run_prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> list[str]:
    """Statements before the vector loop of a nest of independent points: later runs of what is read in short ones."""
    kernel, lanes = nest.kernel, nest.vector
    row = next((v for v in reversed(kernel.outer) if v is not lanes and v.extent.as_int() != 1), None)
    count = None if lanes is None else lanes.extent.as_int()
    if kernel.inner or lanes is None or count is None or nest.tile is not None or row is None:
        return []
    found: list[str] = []
    for name, at in _first_reads(nest):
        step, itemsize = step_between(at, lanes, row), emitter.graph.buffers[name].dtype.itemsize
        if step is None or step == count or sizes.points(kernel.outer) * itemsize <= MAX_BYTES:
            continue
        later = _later(count * itemsize)
        if later:
            place = emitter._index(at).scalar(ix.substitute(at, {lanes: ix.ZERO}, {}) + step * later)
            found.append(f"prefetch_run({emitter._pointer(name)} + {place}, {count});")
    return found


@dataclass(frozen=True, slots=True)
class Early:
    """An index is read as it will be so many points later along a loop. What it points to is `run` elements long, or as long as
    there are lanes."""

    walked: Var
    later: int
    run: int | None = None


def pointed_prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> tuple[list[str], dict[int, list[str]]]:
    """What later indices point to: statements before the vector loop of a nest of independent points, and by section for the
    body of the loop."""
    kernel, lanes = nest.kernel, nest.vector
    before: list[str] = []
    inside: dict[int, list[str]] = {}
    if lanes is None or nest.tile is not None or nest.one_step:
        return before, inside
    made = {out for s in kernel.statements for out in s.outs}
    targets = {(s.outs[0], s.store[0]): s.section for s in _innermost(kernel) if s.kind == "scatter"}
    for (name, at), section in (_first_reads(nest) | targets).items():
        index, table = _index_from_data(at), emitter.graph.buffers[name]
        if index is None or index[1].attr[0] in made or sizes.bytes(table) <= MAX_BYTES:
            continue
        pointer, (source, (place, *_), _) = index[0], index[1].attr
        early = _early(nest, at, place, table.dtype.itemsize, sizes)
        if early is None:
            continue
        there: dict[Atom, Expr] = {early.walked: ix.minimum(early.walked.expr() + early.later, early.walked.extent - 1)}
        there |= {} if early.run is None else {lanes: ix.ZERO}
        target = ix.substitute(at, {**there, pointer: ix.var(POINTED, pointer.size).expr()}, {})
        place = ix.substitute(place, there, {})
        read = f"{emitter._pointer(source)}[{emitter._index(place).scalar(place)}]"
        found = f"{emitter._pointer(name)} + {emitter._index(target).scalar(target)}"
        asking = f"prefetch_lanes<L>({found})" if early.run is None else f"prefetch_run({found}, {early.run})"
        lines = inside.setdefault(section, []) if early.run is None else before
        lines.append(f"{{ const int64_t {POINTED} = {read}; {asking}; }}")
    return before, inside


def _early(nest: Nest, at: Expr, place: Expr, itemsize: int, sizes: Sizes) -> Early | None:
    """How early an index at `place` is read, which is part of `at`. Where each lane has an index of its own, the
    first one's is asked for: they are often the same."""
    kernel, lanes = nest.kernel, nest.vector
    assert lanes is not None
    loops = [v for v in (*kernel.outer, *kernel.inner) if v is not lanes and v.extent.as_int() != 1]
    rows = [v for v in loops if v in ix.free_atoms(place)]
    if nest.vertical and kernel.inner:
        along = rows and rows[-1] in kernel.inner and ix.stride_of(at, lanes) == 1
        return Early(rows[-1], POINTED_ROWS) if along else None
    if lanes in ix.free_atoms(place):
        long = sizes.of(lanes.extent) >= 4 * POINTED_STEPS * nest.lanes
        return Early(lanes, POINTED_STEPS * nest.lanes) if long or not rows else Early(rows[-1], POINTED_ROWS)
    count = lanes.extent.as_int()
    later = 0 if count is None else _later(count * itemsize)
    if later and rows and not kernel.inner and ix.stride_of(at, lanes) == 1:
        return Early(rows[-1], later, count)
    return None


def _index_from_data(at: Expr) -> tuple[ix.Indirect, Value] | None:
    """The only index from data in a place, if it is read from memory, and where: none before zero need be told apart, since
    asking for a wrong place does no harm."""
    found = _from_data(at)
    loads = vs.loads([found[0].value]) if len(found) == 1 else []
    if len(loads) != 1 or loads[0].args or _from_data(loads[0].attr[1][0]):
        return None
    return found[0], loads[0]


def step_between(at: Expr, lanes: Var, row: Var) -> Expr | None:
    """How far a place moves from row to row. None where it stays, is not contiguous along the lanes, or comes from data."""
    step = ix.stride_of(at, row)
    moves = step is not None and step.terms and not _from_data(at)
    return step if moves and ix.stride_of(at, lanes) == 1 else None


@dataclass(frozen=True, slots=True)
class Pointed:
    """Where an index is in the buffer `source`, and the first element of what it points to, in terms of it."""

    source: str
    place: Expr
    target: Expr


def pointed_row(at: Expr, lanes: Var, row: Var, later: int) -> Pointed | None:
    """What an index will point to so many rows later. None where it is another one for each lane, or the same for all rows."""
    index = _index_from_data(at)
    if index is None or ix.stride_of(at, lanes) != 1:
        return None
    pointer, (source, (place, *_), _) = index[0], index[1].attr
    if lanes in ix.free_atoms(place) or row not in ix.free_atoms(place):
        return None
    there: dict[Atom, Expr] = {row: row.expr() + later}
    target = ix.substitute(at, {**there, lanes: ix.ZERO, pointer: ix.var(POINTED, pointer.size).expr()}, {})
    return Pointed(source, ix.substitute(place, there, {}), target)


def _from_data(at: Expr) -> list[ix.Indirect]:
    """The indices in a place that come from data."""
    return [a for a in ix.free_atoms(at) if isinstance(a, ix.Indirect)]


def _later(run: int) -> int:
    """How many runs of so many bytes are prefetched; 0: they are long."""
    return max(1, min(MOST_RUNS, APART // run)) if run <= SHORT else 0


def _first_reads(nest: Nest) -> dict[tuple[str, Expr], int]:
    """What the innermost loops read from memory, and in which section first."""
    kernel = nest.kernel
    made = {out for s in kernel.statements for out in s.outs}
    found: dict[tuple[str, Expr], int] = {}
    for s in sorted(_innermost(kernel), key=lambda s: s.section):
        for load in vs.loads(s.roots):
            name, (at, *_), _ = load.attr
            if name not in made:
                found.setdefault((name, at), s.section)
    return found


def _innermost(kernel: Kernel) -> list[Statement]:
    """The statements in the innermost loops."""
    return [s for s in kernel.statements if s.inner or not kernel.inner]
