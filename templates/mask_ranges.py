"""Where a condition over loops holds nowhere: interval arithmetic on its value, for tiles that a mask leaves out as a whole.

Each loop runs through a range, from one expression to another. The answer is a condition on these expressions, a value again:
``n <= m`` over n from n0 and m up to m1 holds nowhere if ``m1 < n0``. What comes from memory may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, FloorDiv, Size, Var
from kgen.ir.values import Value

FALSE, TRUE = vs.const(False, torch.bool), vs.const(True, torch.bool)
# Types in which no index overflows.
WIDE = (torch.int64, torch.int32)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: Expr
    high: Expr

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: int) -> Range:
        """The products with a number."""
        ends = self.low * factor, self.high * factor
        return Range(*(ends if factor >= 0 else ends[::-1]))


Ranges = Mapping[Atom, Range]


def run_of(loops: Sequence[Var], first: Expr, count: Expr) -> dict[Atom, Range]:
    """The ranges of an axis' loops where its index runs through `count` neighbours, at least one. The last loop may come round
    to its begin; of those between the outermost and the last nothing is said."""
    last = first + count - 1
    if len(loops) == 1:
        return {loops[0]: Range(first, last)}
    found: dict[Atom, Range] = {}
    if loops:
        inner = loops[-1].extent
        begin, rounds = ix.mod(first, inner), ix.floordiv(last, inner) - ix.floordiv(first, inner)
        found[loops[-1]] = Range(
            begin * (ix.ONE - ix.minimum(ix.ONE, rounds)), ix.minimum(begin + count - 1, inner - 1)
        )  # fmt: skip
        below = ix.product(v.extent for v in loops[1:])
        found[loops[0]] = Range(ix.floordiv(first, below), ix.floordiv(last, below))
    return found


def nowhere(condition: Value, ranges: Ranges) -> Value:
    """Whether a condition holds for none of the loops' numbers, as far as it is known."""
    return _Conditions(ranges, holds=False)(condition)


def everywhere(condition: Value, ranges: Ranges) -> Value:
    """Whether a condition holds for all of the loops' numbers, as far as it is known."""
    return _Conditions(ranges, holds=True)(condition)


@dataclass(frozen=True, slots=True)
class _Conditions:
    """Conditions under which a value always, or never, `holds`."""

    ranges: Ranges
    holds: bool

    def __call__(self, value: Value) -> Value:
        if value.op == "const":
            return TRUE if bool(value.attr) == self.holds else FALSE
        if value.op == "not":
            return _Conditions(self.ranges, not self.holds)(value.args[0])
        joined = _JOINED.get(value.op)
        if joined is not None and value.dtype is torch.bool:
            return vs.call(joined if self.holds else _OTHER[joined], *map(self, value.args))
        compared = _COMPARED.get(value.op)
        sides = [_range_of(one, self.ranges) for one in value.args] if compared is not None else []
        left, right = (*sides, None, None)[:2]
        if compared is None or left is None or right is None:
            return FALSE
        return compared(left, right, self.holds)


_JOINED = {"and": "and", "bitand": "and", "or": "or", "bitor": "or"}
_OTHER = {"and": "or", "or": "and"}


def _less(left: Range, right: Range, holds: bool) -> Value:
    return vs.compare("lt", left.high, right.low) if holds else vs.compare("le", right.high, left.low)


def _less_or_equal(left: Range, right: Range, holds: bool) -> Value:
    return vs.compare("le", left.high, right.low) if holds else vs.compare("lt", right.high, left.low)


def _equal(left: Range, right: Range, holds: bool) -> Value:
    if holds:
        return vs.call("and", _less_or_equal(left, right, True), _less_or_equal(right, left, True))
    return vs.call("or", _less(left, right, True), _less(right, left, True))


_COMPARED: Mapping[str, Callable[[Range, Range, bool], Value]] = {
    "lt": _less,
    "le": _less_or_equal,
    "gt": lambda left, right, holds: _less(right, left, holds),
    "ge": lambda left, right, holds: _less_or_equal(right, left, holds),
    "eq": _equal,
    "ne": lambda left, right, holds: _equal(left, right, not holds),
}


def _range_of(value: Value, ranges: Ranges) -> Range | None:
    """What a number made of indices runs through; None where that is not known."""
    if value.op == "const" and not value.dtype.is_floating_point and value.dtype is not torch.bool:
        return Range(ix.constant(value.attr), ix.constant(value.attr))
    if value.dtype not in WIDE:
        return None
    if value.op == "index":
        return _range(value.attr, ranges)
    if value.op == "cast" and value.args[0].dtype is torch.int64 and value.args[0].op == "index":
        low, high = value.args[0].attr.bounds()
        return _range_of(value.args[0], ranges) if -(2**31) <= low <= high < 2**31 else None
    if value.op == "floordiv" and value.args[1].op == "const" and value.args[1].attr > 0:
        divided = _range_of(value.args[0], ranges)
        return divided and _quotient(divided, ix.constant(value.args[1].attr))
    if value.op not in _ARITHMETIC or value.dtype is not torch.int64:
        return None
    parts = [_range_of(one, ranges) for one in value.args]
    known = [one for one in parts if one is not None]
    return _ARITHMETIC[value.op](*known) if len(known) == len(parts) else None


def _size(one: Range) -> Range:
    return Range(ix.maximum(ix.maximum(one.low, one.high * -1), ix.ZERO), ix.maximum(one.high, one.low * -1))


_ARITHMETIC: Mapping[str, Callable[..., Range]] = {
    "add": lambda left, right: left + right,
    "sub": lambda left, right: left + right.times(-1),
    "neg": lambda one: one.times(-1),
    "abs": _size,
}


def _range(expr: Expr, ranges: Ranges) -> Range | None:
    total = Range(ix.ZERO, ix.ZERO)
    for mono, coef in expr.terms:
        one = _range_of_term(mono, ranges)
        if one is None:
            return None
        total = total + one.times(coef)
    return total


def _range_of_term(mono: tuple[Atom, ...], ranges: Ranges) -> Range | None:
    if all(isinstance(atom, Size) for atom in mono):
        known = ix.product(atom.expr() for atom in mono)
        return Range(known, known)
    return _range_of_atom(mono[0], ranges) if len(mono) == 1 else None


def _range_of_atom(atom: Atom, ranges: Ranges) -> Range | None:
    if atom in ranges:
        return ranges[atom]
    if isinstance(atom, Var):
        return Range(ix.ZERO, atom.extent - 1)
    if isinstance(atom, FloorDiv) and (atom.den.as_int() or 0) > 0:
        inside = _range(atom.num, ranges)
        return inside and _quotient(inside, atom.den)
    return None


def _quotient(one: Range, divisor: Expr) -> Range:
    """Of a positive divisor."""
    return Range(ix.floordiv(one.low, divisor), ix.floordiv(one.high, divisor))
