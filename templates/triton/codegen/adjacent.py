"""Results of a point that are adjacent in memory, such as those of a stack along the last dimension: one store has them all.

Apart, each store of a warp would write a part of each sector only. Two or four of them are one vector of a thread. Threads
exchange more of them, which begin anywhere, first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.plan import Statement, address

# Results that one store has, and the most bytes of them: what a thread stores at once.
NUMBERS, VECTOR = (4, 2), 16
# Stores of neighbours from which on threads exchange them, the bytes that one of them may have then, and results at most.
APART, EXCHANGED, MOST = 5, 64, 16


def runs_of_stores(statements: Sequence[Statement], graph: ir.Graph) -> Iterator[Sequence[Statement]]:
    """The statements in order, those in one list whose results are adjacent."""
    at = 0
    while at < len(statements):
        number = _number(statements[at : at + MOST], graph)
        yield statements[at : at + number]
        at += number


def side_by_side(values: Sequence[str]) -> str:
    """An expression for rows of so many values, a power of two of at least two."""
    if len(values) <= max(NUMBERS):
        return f"lib.side_by_side_{len(values)}({', '.join(values)})"
    return f"lib.alternating({side_by_side(values[::2])}, {side_by_side(values[1::2])})"


def _number(coming: Sequence[Statement], graph: ir.Graph) -> int:
    """How many of the statements one store has, from the first one on."""
    known = next((n for n in NUMBERS if _are_adjacent(coming[:n], n, graph, n)), 1)
    most = min(len(coming), EXCHANGED // graph.buffers[coming[0].outs[0]].dtype.itemsize)
    many = next((n for n in range(most, APART - 1, -1) if _are_adjacent(coming[:n], n, graph, 1)), 1)
    return many if -(-many // known) >= APART else known


def _are_adjacent(statements: Sequence[Statement], number: int, graph: ir.Graph, begins_at: int) -> bool:
    """Whether so many results follow each other in memory, from a multiple of a number on."""
    if len(statements) < number or not all(_only_stores(s) for s in statements):
        return False
    names = [s.outs[0] for s in statements]
    (buffer, begin, dtype), *rest = (address(graph, name) for name in names)
    if any((one, kind) != (buffer, dtype) for one, _, kind in rest) or begins_at * dtype.itemsize > VECTOR:
        return False
    first, *others = (s.store[0] + at for s, at in zip(statements, (begin, *(at for _, at, _ in rest)), strict=True))
    read = {load.attr[0] for s in statements for load in vs.loads(s.roots)}
    if not read.isdisjoint(names) or not any(isinstance(atom, Var) for atom in ix.free_atoms(first)):
        return False
    if ix.mod(first, begins_at) != 0:  # no vector begins there
        return False
    return all((offset - first).as_int() == k for k, offset in enumerate(others, 1))


def _only_stores(s: Statement) -> bool:
    """Whether the statement stores one number of its own point, whatever that is."""
    return s.kind == "pointwise" and s.stored == (True,) and s.mask is None and s.target is None and not s.inner
