"""Which tiles along the axis of a softmax a template has to make: not those that a mask leaves out as a whole; and where it need
not ask for the mask, nor for the end of the axis, because it holds everywhere in a tile.

A mask says of a tile at (m0, n0) that it holds nowhere, or everywhere, by comparisons that are linear in n0
(`templates/mask_ranges.py`). So there are three runs of tiles one behind the other, each of which may be empty: up to the first
that is whole, the whole ones, and the others. Of a causal mask the first is always empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from kgen.ir import index as ix
from kgen.ir.index import Expr, Var
from kgen.ir.values import Value
from kgen.templates.contract import Config
from kgen.templates.mask_ranges import everywhere, nowhere, run_of
from kgen.templates.problem import Problem, once


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles from edge `first` up to edge `last`; `whole`: no element of them is masked or past the end."""

    first: int
    last: int
    whole: bool


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the first index of a tile may be: at all of `low` at least, and below all of `high`."""

    low: tuple[Expr, ...] = ()
    high: tuple[Expr, ...] = ()

    def __add__(self, other: Ends) -> Ends:
        return Ends((*self.low, *other.low), (*self.high, *other.high))


@dataclass(frozen=True, slots=True)
class Runs:
    """The tiles to make, as long as `block`, along an axis of length `length`; `whole` are those of which all is there, where any
    may be. Expressions are in terms of the first row `row`."""

    row: Var
    length: Expr
    block: int
    made: Ends
    whole: Ends | None

    @property
    def all(self) -> tuple[Run, ...]:
        if self.whole is None:
            return (Run(0, 1, whole=False),)
        before = [Run(0, 1, whole=False)] if self.whole.low else []
        last = len(before) + 1
        return *before, Run(last - 1, last, whole=True), *([Run(last, last + 1, whole=False)] if self.whole.high else [])

    def edges(self, row: Expr) -> list[Expr]:
        """The edges, in order, for a tile of rows from `row` on; tiles begin at multiples of their length. Where only the last
        tile is not whole, an edge may lie past the end of the axis."""
        begin, end = self._first_tile(self.made.low), reduce(ix.minimum, self.made.high, self.length)
        found = [begin, end]
        if self.whole is not None:
            first = ix.maximum(begin, self._first_tile(self.whole.low)) if self.whole.low else begin
            after = [ix.maximum(first, self._first_tile([reduce(ix.minimum, self.whole.high)]))] if self.whole.high else []
            found = [begin, *([first] if self.whole.low else []), *after, end]
        return [ix.substitute(edge, {self.row: row}) for edge in found]

    def _first_tile(self, ends: Sequence[Expr]) -> Expr:
        """The first tile at or behind all of these ends."""
        return ix.ceildiv(reduce(ix.maximum, ends, ix.ZERO), self.block) * self.block


@once
def runs_of(problem: Problem, step: str, config: Config) -> Runs:
    """The runs of tiles of a step's result along the axis that the softmax goes along."""
    middle, author = problem.middles[step], problem.template
    axis = middle.normalised
    assert axis is not None
    rows = next(a for a in middle.axes if a != axis and author.block(a) is not None)
    block, height = (config.get(author.block(a) or "") for a in (axis, rows))
    length = problem.extent(axis)
    row, column = ix.var("row", ix.maximum(problem.extent(rows), ix.ONE)), ix.var("column", ix.maximum(length, ix.ONE))
    inside = length.as_int() is not None and length.as_int() % block == 0  # type: ignore[operator]
    whole = Ends() if inside else Ends(high=(length - (block - 1),))
    if middle.mask is None:
        return Runs(row, length, block, Ends(), whole)
    loops = problem.loops
    ranges = {
        **run_of(loops[rows], row.expr(), ix.constant(height)), **run_of(loops[axis], column.expr(), ix.constant(block)),
    }  # fmt: skip
    left = _where(everywhere(middle.mask, ranges), column)
    return Runs(row, length, block, _unless(nowhere(middle.mask, ranges), column), None if left is None else whole + left)


def _unless(condition: Value, column: Var) -> Ends:
    """Between which ends a condition does not hold for sure: it holds outside."""
    if condition.op == "or":
        return _unless(condition.args[0], column) + _unless(condition.args[1], column)
    ends = (_solved(above, least, column) for above, least in _least_sums(condition, holds=False))
    return sum((one for one in ends if one is not None), Ends())


def _where(condition: Value, column: Var) -> Ends | None:
    """Between which ends a condition holds; None where that is not known."""
    if condition.op == "const":
        return Ends() if condition.attr else None
    if condition.op == "and":
        parts = [_where(one, column) for one in condition.args]
    else:
        parts = [_solved(above, least, column) for above, least in _least_sums(condition, holds=True)] or [None]
    known = [one for one in parts if one is not None]
    return sum(known, Ends()) if len(known) == len(parts) else None


def _least_sums(condition: Value, holds: bool) -> list[tuple[Expr, int]]:
    """Sums that have to be at least so large, all of them, for a comparison to hold, or not to; none for anything else."""
    if condition.op not in ("lt", "le") or any(one.op not in ("index", "const") for one in condition.args):
        return []
    left, right = (ix.as_expr(one.attr) for one in condition.args)
    above = right - left if holds else left - right
    return [(one, int((condition.op == "lt") == holds)) for one in _smallest(above)]


def _smallest(total: Expr) -> list[Expr]:
    """Expressions of which a sum is the least: those of its minima, and of the maxima that it subtracts."""
    for mono, coef in total.terms:
        [atom, *rest] = mono or (None,)
        if isinstance(atom, ix.Apply) and not rest and atom.fn == ("min" if coef > 0 else "max"):
            others = total - atom.expr() * coef
            return [one for arg in atom.args for one in _smallest(others + arg * coef)]
    return [total]


def _solved(above: Expr, least: int, column: Var) -> Ends | None:
    """Where the column has to be for a sum to be at least so large; None where that is no one end."""
    known, slope = above.as_int(), ix.stride_of(above, column)
    if known is not None:
        return Ends() if known >= least else None
    if slope == 1:
        return Ends(low=(column.expr() - above + least,))
    return Ends(high=(above + column.expr() + 1 - least,)) if slope == -1 else None
