"""What a GPU's atomic operations take that meet: those of one line of the L2 cache are made one after the other.

Memory traffic says nothing of them: a table of 384 numbers is in the cache, and 25 million operations on it took 14 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kgen.device import LINE, Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Statement

# Instructions a second on one line, and the lines that are worked on at the same time (H200, 2026-11-26: 25 million additions
# to 1 to 512 copies of a table of 384 numbers take 14.4 to .38 ms, 12.6 million to rows of 768 in one place .17 ms).
LINE_RATE, MOST_LINES = 1e8, 650


def atomics_seconds(kernel: Kernel, graph: ir.Graph, device: Device) -> float:
    """The time of the kernel's atomic operations, if the kernel did nothing else: 0 on a CPU, which has none."""
    if device.kind != "cuda":
        return 0.0
    sizes = Sizes(graph.size_hints)
    return sum(
        statement_seconds(s, points_of(kernel, s, sizes), graph, not kernel.contracts) for s in kernel.statements if meets(s)
    )


def statement_seconds(update: Statement, points: int, graph: ir.Graph, along: bool = True) -> float:
    """The time of so many atomic operations of one statement. Whether the kernel goes `along` what it stores: the tiles of a
    contraction do not."""
    sizes, buffer = Sizes(graph.size_hints), graph.buffers[update.outs[0]]
    return meeting_seconds(points / (_together(update, buffer, sizes) if along else 1), lines_of(sizes.bytes(buffer)))


def lines_of(table: int) -> int:
    """The lines of a table of so many bytes."""
    return max(1, math.ceil(table / LINE))


def meeting_seconds(instructions: float, lines: int) -> float:
    """The time of so many instructions, each with operations on one line, that are spread over so many lines."""
    return instructions / min(MOST_LINES, lines) / LINE_RATE


def _together(update: Statement, buffer: ir.Buffer, sizes: Sizes) -> int:
    """How many operations of one instruction go to a line: those along a loop that walks over neighbours. Where a kernel is
    prepared for its template, statements have offsets for indices."""
    strides = buffer.strides or ir.dense_strides(buffer)
    offset = ix.linearize(update.store, strides) if len(update.store) == len(strides) else update.store[0]
    walking = (v for v in ix.free_atoms(offset) if isinstance(v, ix.Var) and ix.stride_of(offset, v) == 1)
    length = max((sizes.of(v.extent) for v in walking), default=1)
    return max(1, min(length, LINE // buffer.dtype.itemsize))


def meets(statement: Statement) -> bool:
    """Whether points of a statement may update one element at the same time: where data say which."""
    chosen: Iterable[object] = (atom for e in statement.store for atom in ix.free_atoms(e))
    return statement.kind == "scatter" and statement.op != "set" and any(isinstance(atom, ix.Indirect) for atom in chosen)


def points_of(kernel: Kernel, statement: Statement, sizes: Sizes) -> int:
    """For how many points of the kernel's loops a statement runs."""
    loops = (*kernel.outer, *(kernel.inner if statement.inner else ()))
    return math.prod(sizes.of(v.extent) for v in loops)
