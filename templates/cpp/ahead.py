"""Memory that a later row needs, asked for while a row is worked on.

A nest with several sections reads a row from memory in one of them and has it in the cache in the others. Without help memory
idles during those: processors look ahead along what is being read, not across the sections. So a section that finds its row in
the cache asks for the same place of the next one. And where short runs lie apart, as the heads of a permuted copy do, no
processor sees the next run coming, nor where lanes walk down columns.
"""

from __future__ import annotations

from kgen import index as ix
from kgen import values as vs
from kgen.index import Expr, Var
from kgen.plan import Nest
from kgen.sizes import Sizes
from kgen.templates.cpp.emit import Emitter

# Bytes of all asked rows together: more would drive the present row from a private cache (L2, from 512 KiB on).
MAX_BYTES = 1 << 17
# Steps of the vector loop that a row has at least: shorter ones are one stream to a processor.
MIN_STEPS = 4
# Bytes ahead where short runs lie apart, runs ahead at most, and the longest run that counts as short.
APART, MOST_RUNS, SHORT = 4096, 16, 2048


def prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> dict[int, list[str]]:
    """By section, statements for the body of its vector loop."""
    kernel, lanes = nest.kernel, nest.vector
    if lanes is None or not kernel.inner or nest.one_step:
        return {}
    if nest.vertical:
        return _down_columns(nest, lanes, emitter, sizes)
    if kernel.sections < 2:
        return {}
    row = next((v for v in reversed(kernel.outer) if v.extent.as_int() != 1), None)
    if row is None or sizes.of(lanes.extent) < MIN_STEPS * nest.lanes:
        return {}
    points = sizes.points(kernel.inner)
    found: dict[int, list[str]] = {}
    total = 0
    for (name, at), section in _first_reads(nest).items():
        step = ix.stride_of(at, row)
        if step is None or not step.terms or ix.stride_of(at, lanes) != 1:
            continue
        total += points * emitter.graph.buffers[name].dtype.itemsize
        last = section == kernel.sections - 1
        place = emitter._index(at).scalar(at if last else at + step)
        found.setdefault(0 if last else section + 1, []).append(f"prefetch_lanes<L>({emitter._pointer(name)} + {place});")
    return found if total <= MAX_BYTES else {}


def _down_columns(nest: Nest, lanes: Var, emitter: Emitter, sizes: Sizes) -> dict[int, list[str]]:
    """Lanes that walk down columns read a short run of each row."""
    kernel, down = nest.kernel, nest.kernel.inner[-1]
    points = sizes.points(kernel.outer) * sizes.points(kernel.inner)
    found: dict[int, list[str]] = {}
    for (name, at), section in _first_reads(nest).items():
        step, itemsize = ix.stride_of(at, down), emitter.graph.buffers[name].dtype.itemsize
        run = nest.lanes * itemsize
        if step is None or not step.terms or ix.stride_of(at, lanes) != 1 or (step.as_int() or nest.lanes + 1) <= nest.lanes:
            continue
        if run <= SHORT and points * itemsize > MAX_BYTES:
            place = emitter._index(at).scalar(at + step * max(1, min(MOST_RUNS, APART // run)))
            found.setdefault(section, []).append(f"prefetch_lanes<L>({emitter._pointer(name)} + {place});")
    return found


def run_prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> list[str]:
    """Statements before the vector loop of a nest of independent points: later runs of what is read in short ones."""
    kernel, lanes = nest.kernel, nest.vector
    row = next((v for v in reversed(kernel.outer) if v is not lanes and v.extent.as_int() != 1), None)
    if kernel.inner or lanes is None or nest.tile is not None or row is None:
        return []
    count = lanes.extent.as_int()
    found: dict[str, None] = {}
    for name, at in _reads(nest):
        step, itemsize = ix.stride_of(at, row), emitter.graph.buffers[name].dtype.itemsize
        if step is None or not step.terms or count is None or ix.stride_of(at, lanes) != 1 or step == count:
            continue
        if count * itemsize <= SHORT and sizes.points(kernel.outer) * itemsize > MAX_BYTES:
            later = max(1, min(MOST_RUNS, APART // (count * itemsize)))
            place = emitter._index(at).scalar(ix.substitute(at, {lanes: ix.ZERO}, {}) + step * later)
            found.setdefault(f"prefetch_run({emitter._pointer(name)} + {place}, {count});")
    return list(found)


def _reads(nest: Nest) -> list[tuple[str, Expr]]:
    """What is read from memory at places that do not come from data."""
    made = {out for s in nest.kernel.statements for out in s.outs}
    loads = (load.attr for s in nest.kernel.statements for load in vs.loads(s.roots))
    found = dict.fromkeys((name, at) for name, (at, *_), _ in loads if name not in made)
    return [(name, at) for name, at in found if not any(isinstance(a, ix.Indirect) for a in ix.free_atoms(at))]


def _first_reads(nest: Nest) -> dict[tuple[str, Expr], int]:
    """What is read from memory in inner loops, and in which section first."""
    made = {out for s in nest.kernel.statements for out in s.outs}
    found: dict[tuple[str, Expr], int] = {}
    for s in sorted((s for s in nest.kernel.statements if s.inner), key=lambda s: s.section):
        for load in vs.loads(s.roots):
            name, (at, *_), _ = load.attr
            if name not in made and not any(isinstance(a, ix.Indirect) for a in ix.free_atoms(at)):
                found.setdefault((name, at), s.section)
    return found
