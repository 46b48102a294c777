"""What a GPU's atomic operations take that meet: those of one line of the L2 cache are made one after the other.

Memory traffic says nothing of them: a table of 384 numbers is in the cache, and 25 million operations on it took 2.9 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from kgen.device import LINE, Device
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel, Statement
from kgen.ir.sizes import Sizes

# Operations a second on one line, and the lines that are worked on at the same time (a first guess: H200, 2026-11-26, the
# gradient of an embedding with 384 numbers).
LINE_RATE, MOST_LINES = 1.1e9, 96


def atomics_seconds(kernel: Kernel, graph: ir.Graph, device: Device) -> float:
    """The time of the kernel's atomic operations, if the kernel did nothing else: 0 on a CPU, which has none."""
    if device.kind != "cuda":
        return 0.0
    sizes = Sizes(graph.size_hints)
    return sum(statement_seconds(s, points_of(kernel, s, sizes), graph) for s in kernel.statements if meets(s))


def statement_seconds(update: Statement, points: int, graph: ir.Graph) -> float:
    """The time of so many atomic operations of one statement."""
    table = Sizes(graph.size_hints).bytes(graph.buffers[update.outs[0]])
    return points / (LINE_RATE * max(1, min(MOST_LINES, math.ceil(table / LINE))))


def meets(statement: Statement) -> bool:
    """Whether points of a statement may update one element at the same time: where data say which."""
    chosen: Iterable[object] = (atom for e in statement.store for atom in ix.free_atoms(e))
    return statement.kind == "scatter" and statement.op != "set" and any(isinstance(atom, ix.Indirect) for atom in chosen)


def points_of(kernel: Kernel, statement: Statement, sizes: Sizes) -> int:
    """For how many points of the kernel's loops a statement runs."""
    loops = (*kernel.outer, *(kernel.inner if statement.inner else ()))
    return math.prod(sizes.of(v.extent) for v in loops)
