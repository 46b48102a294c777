"""Where a condition holds along one loop while others are within ranges: interval analysis of conditions on indices.

    n <= m           rows m0 ... m1    may hold for n < m1 + 1, holds in all rows for n < m0 + 1
    m - n < 128                        may hold for n > m0 - 128, holds in all rows for n > m1 - 128

Both answers are spans of indices whose ends are expressions, so that a kernel can work them out for a tile of rows. They may be
in terms of an integer from memory, such as the length of a sequence, where the kernel can load it. What is no comparison of
such sums may hold anywhere and need not hold at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr, Size, Var
from kgen.ir.values import Value


@dataclass(frozen=True, slots=True)
class Span:
    """Indices from `begin` on and before `end`; None: there is no bound."""

    begin: Expr | None = None
    end: Expr | None = None

    def __and__(self, other: Span) -> Span:
        return Span(_joined(ix.maximum, self.begin, other.begin), _joined(ix.minimum, self.end, other.end))

    def hull(self, other: Span) -> Span:
        """A span with both in it."""
        begins, ends = (self.begin, other.begin), (self.end, other.end)
        begin = None if None in begins else _joined(ix.minimum, *begins)
        return Span(begin, None if None in ends else _joined(ix.maximum, *ends))


@dataclass(frozen=True, slots=True)
class Holds:
    """Outside of `may` a condition holds in no row, inside of `must` in every one; None: nowhere."""

    may: Span | None
    must: Span | None


EVERYWHERE, NOWHERE, UNKNOWN = Holds(Span(), Span()), Holds(None, None), Holds(Span(), None)
# Comparisons as others: with their sides exchanged, or where the other one does not hold.
COMPARISONS = {
    "lt": ("lt", False, True), "le": ("le", False, True), "gt": ("lt", True, True), "ge": ("le", True, True),
    "eq": ("eq", False, True), "ne": ("eq", False, False),
}  # fmt: skip
# The first and the last index of a loop that it may have.
Ranges = Mapping[Var, tuple[Expr, Expr]]
# The bounds of a symbol for an integer from memory: nothing is known of it.
ANY = 1 << 62
# Blocks of a loop, each of which has an integer in memory, that a range of it may meet.
MOST_BLOCKS = 8


@dataclass(frozen=True, slots=True)
class Known:
    """What ends of spans may be in terms of, besides sizes: `loops` of which a kernel has one index, and integers in memory at
    such indices, each by the symbol in `loaded`, which grows as the analysis meets them. Of integers that blocks of a ranged
    loop share, `several` has one symbol for all, and those of the blocks that its range meets."""

    loops: frozenset[Var] = frozenset()
    loaded: dict[Value, Size] = field(default_factory=dict)
    several: dict[Size, tuple[Size, ...]] = field(default_factory=dict)

    def symbol(self, load: Value, ranges: Ranges) -> Size | None:
        """The symbol of an integer from memory, where the kernel can load it."""
        if load.args or load.dtype.itemsize < 4:
            return None
        if load.variables() <= self.loops:
            return self._one(load)
        others = [loop for loop in load.variables() - self.loops if isinstance(loop, Var)]
        if len(others) != 1 or others[0] not in ranges or not load.variables() <= {*self.loops, *others}:
            return None
        return self._of_blocks(load, others[0], ranges[others[0]])

    def _one(self, load: Value) -> Size:
        return self.loaded.setdefault(load, ix.size(f"loaded{len(self.loaded)}", -ANY, ANY))

    def _of_blocks(self, load: Value, loop: Var, ends: tuple[Expr, Expr]) -> Size | None:
        """The symbol for the integers of all blocks that a range of the loop meets, where these are few."""
        block, count = _block_of(load, loop), (ends[1] - ends[0]).as_int()
        if block is None or count is None or count >= MOST_BLOCKS * block:
            return None
        rows = [*(ends[0] + step for step in range(0, count, block)), ends[1]]
        last = loop.extent - 1
        parts = tuple(self._one(vs.substitute(load, {loop: ix.minimum(place, last)})) for place in rows)
        found = next((whole for whole, known in self.several.items() if known == parts), None)
        if found is None:
            found = ix.size(f"several{len(self.several)}", -ANY, ANY)
            self.several[found] = parts
        return found


def _block_of(load: Value, loop: Var) -> int | None:
    """How many neighbours of a loop read the same integer, where it is read at a quotient of the loop alone."""
    offsets = vs.index_exprs(load)
    atoms = {atom for e in offsets for mono, _ in e.terms for atom in mono if loop in ix.free_atoms(atom.expr())}
    blocks = {atom.den.as_int() for atom in atoms if isinstance(atom, ix.FloorDiv) and atom.num is loop.expr()}
    whole = all(isinstance(atom, ix.FloorDiv) and atom.num is loop.expr() for atom in atoms)
    [block] = blocks if len(blocks) == 1 else [None]
    return block if whole and block is not None and block > 1 else None


def where_holds(condition: Value, along: Var, ranges: Ranges, known: Known | None = None) -> Holds:
    """Where a condition holds along a loop, while each other one has any index of its range, or the one that it has."""
    return _Analysis(along, ranges, known).holds(condition, True)


def _joined(how: Callable[[Expr, Expr], Expr], a: Expr | None, b: Expr | None) -> Expr | None:
    return b if a is None else a if b is None else how(a, b)


@dataclass(frozen=True, slots=True)
class _Analysis:
    along: Var
    ranges: Ranges
    known: Known | None

    def holds(self, value: Value, wanted: bool) -> Holds:
        """Where a condition is as it is `wanted`."""
        if value.op == "const":
            return EVERYWHERE if bool(value.attr) == wanted else NOWHERE
        if value.op == "not":
            return self.holds(value.args[0], not wanted)
        if value.op in ("and", "within", "or", "bitand", "bitor") and value.dtype is torch.bool:
            left, right = (self.holds(arg, wanted) for arg in value.args)
            return _either(left, right) if value.op.endswith("or") == wanted else _both(left, right)
        if value.op in COMPARISONS:
            return self._comparison(*COMPARISONS[value.op], value.args, wanted)
        return UNKNOWN

    def _comparison(self, op: str, turned: bool, direct: bool, args: Sequence[Value], wanted: bool) -> Holds:
        left, right = args[::-1] if turned else args
        wanted = wanted == direct
        for side, other in ((left, right), (right, left)):
            if side.op == "abs":
                return self._distance(op, side.args[0], other, side is left, wanted)
        a, b = self._index(left), self._index(right)
        if a is None or b is None:
            return UNKNOWN
        if op == "eq":
            both = (self._positive(b - a + 1), self._positive(a - b + 1))
            return _both(*both) if wanted else _either(self._positive(b - a), self._positive(a - b))
        less = b - a + (op == "le")
        return self._positive(less if wanted else 1 - less)

    def _distance(self, op: str, inside: Value, other: Value, is_left: bool, wanted: bool) -> Holds:
        """``|x| < y``, ``|x| <= y``, and these with their sides exchanged."""
        x, y = self._index(inside), self._index(other)
        if x is None or y is None or op == "eq":
            return UNKNOWN
        if not is_left:  # y < |x| is not |x| <= y
            op, wanted = "le" if op == "lt" else "lt", not wanted
        within = y + (op == "le")
        if wanted:
            return _both(self._positive(within - x), self._positive(within + x))
        return _either(self._positive(x - within + 1), self._positive(1 - within - x))

    def _positive(self, expr: Expr) -> Holds:
        """Where an expression is above 0."""
        step, bounds = self._step(expr, self.along), self._bounds(expr)
        if step is None or bounds is None:
            return UNKNOWN
        least, most = (bound - 1 for bound in bounds)
        if not step:
            may = None if ix.known_less(most, ix.ZERO) else self._all_or_none(most)
            return Holds(may, Span() if ix.lower_bound(least) >= 0 else None)
        if step > 0:
            return Holds(Span(begin=ix.ceildiv(-most, step)), Span(begin=ix.ceildiv(-least, step)))
        return Holds(Span(end=ix.floordiv(most, -step) + 1), Span(end=ix.floordiv(least, -step) + 1))

    def _all_or_none(self, most: Expr) -> Span:
        """All of the loop where a number that depends on memory is not negative, else none of it."""
        loaded = frozenset[Size]() if self.known is None else frozenset(self.known.loaded.values())
        if loaded.isdisjoint(ix.free_atoms(most)):
            return Span()
        return Span(end=ix.minimum(ix.maximum(most + 1, ix.ZERO), ix.ONE) * self.along.extent)

    def _step(self, expr: Expr, loop: Var) -> int | None:
        step = ix.stride_of(expr, loop)
        return None if step is None else step.as_int()

    def _bounds(self, expr: Expr) -> tuple[Expr, Expr] | None:
        """The least and the most that an expression is within the ranges where the loop is 0."""
        least = most = expr - (self._step(expr, self.along) or 0) * self.along.expr()
        for loop, ends in self.ranges.items():
            step = self._step(expr, loop)
            if step is None:
                return None
            first, last = ends if step >= 0 else ends[::-1]
            least, most = least + step * (first - loop.expr()), most + step * (last - loop.expr())
        least, most = self._of_blocks(least, ix.minimum), self._of_blocks(most, ix.maximum)
        atoms = {atom for end in (least, most) for atom in ix.free_atoms(end)}
        loops = frozenset[Var]() if self.known is None else self.known.loops
        known = all(isinstance(atom, Size) or atom in loops for atom in atoms)
        return (least, most) if known else None

    def _of_blocks(self, expr: Expr, least: Callable[[Expr, Expr], Expr]) -> Expr:
        """An end with the least, or the most, of the integers of several blocks in their place."""
        other = ix.maximum if least is ix.minimum else ix.minimum
        for whole, parts in self.known.several.items() if self.known is not None else ():
            step = ix.stride_of(expr, whole)
            number = None if step is None else step.as_int()
            if number:
                found = reduce(least if number > 0 else other, (part.expr() for part in parts))
                expr = expr + number * (found - whole.expr())
        return expr

    def _index(self, value: Value) -> Expr | None:
        """An integer as an expression of loops, sizes, and integers from memory."""
        if value.dtype.is_floating_point or value.dtype is torch.bool:
            return None
        if value.op == "index":
            found: Expr = value.attr
            return found
        if value.op == "load":
            symbol = None if self.known is None else self.known.symbol(value, self.ranges)
            return None if symbol is None else symbol.expr()
        if value.op == "const":
            return ix.constant(int(value.attr))
        if value.op == "cast" and value.dtype.itemsize >= 4:  # narrower ones wrap
            return self._index(value.args[0])
        args = [self._index(arg) for arg in value.args]
        if value.op not in ("add", "sub", "neg") or None in args:
            return None
        first, *rest = (arg for arg in args if arg is not None)
        return -first if not rest else first + rest[0] if value.op == "add" else first - rest[0]


def _both(left: Holds, right: Holds) -> Holds:
    may = None if left.may is None or right.may is None else left.may & right.may
    return Holds(may, None if left.must is None or right.must is None else left.must & right.must)


def _either(left: Holds, right: Holds) -> Holds:
    """Two spans need not be one: of what certainly holds, one is kept."""
    may = left.may.hull(right.may) if left.may is not None and right.may is not None else left.may or right.may
    return Holds(may, left.must or right.must)


__all__ = ["Holds", "Known", "Ranges", "Span", "where_holds"]
