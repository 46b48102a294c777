"""How an index grows from lane to lane where it has no stride: an index that is clamped, mirrored, divided, or begins again."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Atom, Expr, Var


@dataclass(frozen=True, slots=True)
class Steps:
    """The least and the most that an index grows from one lane to the next, and what it usually does."""

    least: float
    most: float
    usual: float

    def times(self, factor: int) -> Steps:
        """The steps of a multiple."""
        low, high = sorted((self.least * factor, self.most * factor))
        return Steps(low, high, self.usual * factor)

    def kind(self, lanes: int) -> str:
        """What most vectors of lanes have: a `run` of neighbours, one `number`, or neither. The first and last lane then say
        whether one has it: steps are no longer than one, or never go back."""
        if self.most <= 1 and self.usual == 1:
            return "run"
        return "number" if self.least >= 0 and self.usual * 2 * lanes <= 1 else ""


NONE = Steps(0, 0, 0)


def steps_of(expr: Expr, vector: Var, lanes: int) -> Steps | None:
    """The steps of an index along the vector loop; None where nothing is known of them."""
    total = NONE
    for mono, factor in expr.terms:
        if not any(_depends(atom, vector) for atom in mono):
            continue
        steps = _of_atom(mono[0], vector, lanes) if len(mono) == 1 else None
        if steps is None:
            return None
        more = steps.times(factor)
        total = Steps(total.least + more.least, total.most + more.most, total.usual + more.usual)
    return total


def _depends(atom: Atom, vector: Var) -> bool:
    return vector in ix.free_atoms(ix.as_expr(atom)) or isinstance(atom, ix.Indirect)


def _of_atom(atom: Atom, vector: Var, lanes: int) -> Steps | None:
    if atom is vector:
        return Steps(1, 1, 1)
    if isinstance(atom, ix.FloorDiv | ix.Mod):
        return _of_division(atom, vector, lanes)
    if isinstance(atom, ix.Apply) and atom.fn in ("min", "max"):
        return _of_extreme(atom, vector, lanes)
    return None


def _of_division(atom: ix.FloorDiv | ix.Mod, vector: Var, lanes: int) -> Steps | None:
    inside, by = steps_of(atom.num, vector, lanes), atom.den.as_int()
    if inside is None or by is None or by < 1 or inside.least < 0 or inside.most > by:
        return None
    if isinstance(atom, ix.FloorDiv):
        return Steps(0, math.ceil(inside.most / by), inside.usual / by)
    usual = inside.usual if by >= 2 * lanes else math.inf  # begins again within most vectors
    return Steps(-math.inf, inside.most, usual)


def _of_extreme(atom: ix.Apply, vector: Var, lanes: int) -> Steps | None:
    found = [steps_of(e, vector, lanes) for e in atom.args]
    every = [steps for steps in found if steps is not None]
    if len(every) < len(found):
        return None
    return Steps(min(s.least for s in every), max(s.most for s in every), max(s.usual for s in every))
