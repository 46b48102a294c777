"""Memory that a later row needs, asked for while a row is worked on.

A nest with several sections reads a row from memory in one of them and has it in the cache in the others. Without help memory
idles during those: processors look ahead along what is being read, not across the sections. So a section that finds its row in
the cache asks for the same place of the next one.
"""

from __future__ import annotations

from kgen import index as ix
from kgen import values as vs
from kgen.index import Expr
from kgen.plan import Nest
from kgen.sizes import Sizes
from kgen.templates.cpp.emit import Emitter

# Bytes of all asked rows together: more would drive the present row from a private cache (L2, from 512 KiB on).
MAX_BYTES = 1 << 17
# Steps of the vector loop that a row has at least: shorter ones are one stream to a processor.
MIN_STEPS = 4


def prefetches(nest: Nest, emitter: Emitter, sizes: Sizes) -> dict[int, list[str]]:
    """By section, statements for the body of its vector loop."""
    kernel, lanes = nest.kernel, nest.vector
    if kernel.sections < 2 or lanes is None or nest.vertical or nest.one_step or not kernel.inner:
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
