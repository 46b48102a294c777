"""Neighbours of an operand that are made of the same elements, as two numbers of 4 bits are of a byte: those are read once."""

from __future__ import annotations

from collections.abc import Sequence

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Var
from kgen.ir.values import Value


def adjacent_count(value: Value, loops: Sequence[Var]) -> int:
    """How many neighbours along an axis are made of the same elements, as the two halves of a byte are: the extent of its last
    loop, if that is 2, 4 or 8 and what moves with it and with another loop of the axis is read for several of those elements,
    as a scale is; 0 if there is no such loop."""
    if len(loops) < 2 or (count := loops[-1].extent.as_int()) not in (2, 4, 8):
        return 0
    *others, last = loops
    moving = [_atoms(load) for load in vs.loads([value]) if _atoms(load).intersection(others)]
    shared = [atoms.difference(loops) for atoms in moving if last not in atoms]
    own = [atoms for atoms in moving if last in atoms]
    fewer = all(any(not atoms >= elsewhere for elsewhere in shared) for atoms in own)
    return count if shared and fewer else 0


def _atoms(load: Value) -> frozenset[Atom]:
    return frozenset(atom for e in vs.index_exprs(load) for atom in ix.free_atoms(e))
