"""Which tiles along the axis of a softmax a template has to make: not those that a mask leaves out as a whole; and where it
need not ask for the mask, nor for the end of the axis, because it holds everywhere in a tile.

For a tile of rows a mask says outside of which columns it holds nowhere, and inside of which everywhere
(`kgen/ir/spans.py`). So there are three runs of tiles one behind the other, each of which may be empty: up to the first that is
whole, the whole ones, and the others. Of a causal mask the first is always empty.
"""

from __future__ import annotations

from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Expr, Size
from kgen.ir.spans import Known, Span
from kgen.templates.contract import Config
from kgen.templates.problem import Problem, memoised

# Stands for the first row of a tile.
ROW: Size = ix.size("first row")


@dataclass(frozen=True, slots=True)
class Run:
    """Tiles from edge `first` up to edge `last`; `whole`: no element of them is masked or past the end; `rest`: those in front
    of edge `first` and behind edge `last`."""

    first: int
    last: int
    whole: bool
    rest: bool = False


@dataclass(frozen=True, slots=True)
class Runs:
    """The tiles to make, as long as `block`, along an axis of length `length`: those with columns of `made`; those within
    `whole` are whole, if that is known of any. Expressions are in terms of the first row, and of loops and integers from memory
    that are `known`."""

    length: Expr
    block: int
    made: Span
    whole: Span | None
    known: Known | None = None
    rest: bool = False

    @property
    def all(self) -> tuple[Run, ...]:
        runs = self._made
        return (*runs, Run(0, runs[-1].last, whole=False, rest=True)) if self.rest else runs

    @property
    def leave_out_none(self) -> bool:
        """Whether all tiles are made."""
        return self.made == Span()

    @property
    def _made(self) -> tuple[Run, ...]:
        if self.whole is None:
            return (Run(0, 1, whole=False),)
        before = [Run(0, 1, whole=False)] if self.whole.begin is not None else []
        last = len(before) + 1
        return *before, Run(last - 1, last, whole=True), *([Run(last, last + 1, whole=False)] if self._ends_early() else [])

    def edges(self, row: Expr) -> list[Expr]:
        """The edges, in order, for a tile of rows from `row` on: multiples of a tile's length, or the last one."""
        begin, end = self._down(self.made.begin or ix.ZERO), ix.minimum(self.length, self.made.end or self.length)
        found = [begin, end]
        if self.whole is not None:
            first = begin
            if self.whole.begin is not None:  # where a tile's rows are many, whole tiles would begin behind the end
                first = ix.minimum(end, ix.maximum(begin, self._up(self.whole.begin)))
            last = [ix.maximum(first, self._down(self._whole_end()))] if self._ends_early() else []
            found = [begin, *([first] if self.whole.begin is not None else []), *last, end]
        return [ix.substitute(edge, {ROW: row}) for edge in found]

    def _ends_early(self) -> bool:
        """Whether a tile behind the whole ones may have columns as well."""
        return self.whole is not None and (self.whole.end is not None or not self._is_even())

    def _is_even(self) -> bool:
        """Whether the last tile of the axis is as long as the others."""
        length = self.length.as_int()
        return length is not None and length % self.block == 0

    def _whole_end(self) -> Expr:
        assert self.whole is not None
        return ix.minimum(self.length, self.whole.end or self.length)

    def _down(self, column: Expr) -> Expr:
        """The beginning of the tile that a column is in."""
        return ix.floordiv(ix.maximum(column, ix.ZERO), self.block) * self.block

    def _up(self, column: Expr) -> Expr:
        """The beginning of the first tile from a column on."""
        return ix.ceildiv(ix.maximum(column, ix.ZERO), self.block) * self.block


@memoised
def runs_of(problem: Problem, step: str, config: Config, height: int = 0, by_batch: bool = False, filled: bool = False) -> Runs:
    """The runs of tiles of a step's result along the axis of the softmax, for so many rows, or for a block's; `by_batch`: those
    of each index of the other axes; `filled`: without what is masked by a finite number, but for a run of the rest."""
    middle, template = problem.middles[step], problem.template
    rows, columns = middle.axes[-2:]
    own, block = (config.get(template.block(axis) or "") for axis in (rows, columns))
    known = middle.known(problem.loops) if by_batch else None
    found = middle.reach(problem.loops, ROW.expr(), ix.constant(height or own), known, filled)
    made = found.may or Span(end=ix.ZERO)
    if middle.guards and not by_batch:  # which are of one index of the batch
        made = Span()
    rest = filled and middle.fill is not None and made != Span()
    return Runs(problem.extent(columns), block, made, found.must, known, rest)
