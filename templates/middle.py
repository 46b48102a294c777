"""What stands between two steps of a program: the function in the slot, and the mask that it is, if it is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.spans import EVERYWHERE, UNKNOWN, Holds, Known, where_holds
from kgen.ir.values import Value

# Smaller factors, and those that are larger than its inverse, stay where they are: without them numbers may leave its range.
LEAST_FACTOR = 2.0**-40


@dataclass(frozen=True, slots=True)
class Middle:
    """A slot between two steps of a program: over these axes, the function `value` of one element each of `steps`. Where a
    softmax along `normalised` follows, what is past the end of that axis is -inf; 0 where a contraction sums along `summed`."""

    axes: tuple[str, ...]
    steps: tuple[str, ...]
    value: Value
    normalised: str | None
    summed: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the slot leaves the element as it is."""
        return self.value.op == "step"

    @property
    def factor(self) -> float:
        """The positive number that the function multiplies by at last, -inf staying what it is; 1 where there is none. The
        maximum of a row may be found before, and an exponential of another base takes both factors at once."""
        return _factored(self.value)[0] if self.normalised is not None else 1.0

    @property
    def mask(self) -> Value | None:
        """The condition without which an element is -inf, or 0 where a contraction follows, where the function ends in one. A
        template may leave out tiles in which it holds nowhere (`reach`)."""
        return _kept(self.function(scaled=False)) if self.normalised is not None else _nonzero(self.value)

    @property
    def unmasked(self) -> Value:
        """The function where the mask holds."""
        return self.function(masked=False)

    def function(self, scaled: bool = True, masked: bool = True) -> Value:
        """The function, without `factor` where not `scaled`, and as if `mask` held where not `masked`."""
        if scaled and masked:
            return self.value
        if self.normalised is None:
            return self.value if masked else _where_nonzero(self.value)
        factor, value = _factored(self.value)
        value = value if masked else _unmasked(value)
        return vs.call("mul", value, vs.const(factor, value.dtype)) if scaled and factor != 1 else value

    def reach(self, loops: Mapping[str, tuple[Var, ...]], first: Expr, count: Expr, known: Known | None = None) -> Holds:
        """Where the mask holds along the last axis, for `count` rows (at least one) from the row `first` on. With `known` the
        ends may be in terms of the loops of the other axes. Rows that are several loops count as all rows."""
        rows, columns = (loops[axis] for axis in self.axes[-2:])
        if self.mask is None:
            return EVERYWHERE
        if not columns:
            return UNKNOWN
        along = columns[0] if len(columns) == 1 else ix.var(self.axes[-1], ix.product(v.extent for v in columns))
        mask = vs.substitute(self.mask, _digits(columns, along.expr())) if len(columns) > 1 else self.mask
        ranges = (
            {v: (ix.ZERO, v.extent - 1) for v in rows} if len(rows) > 1 else dict.fromkeys(rows, (first, first + count - 1))
        )
        return where_holds(mask, along, ranges, known)

    def known(self, loops: Mapping[str, tuple[Var, ...]]) -> Known:
        """What the ends may be in terms of where a kernel has one index of each axis but the last two."""
        return Known(frozenset(v for axis in self.axes[:-2] for v in loops[axis]))


def _digits(loops: Sequence[Var], place: Expr) -> dict[Atom, Expr]:
    """Loops as digits of the place in an axis, the last one fastest."""
    found: dict[Atom, Expr] = {}
    for v in reversed(loops):
        found[v] = place if v is loops[0] else ix.mod(place, v.extent)
        place = ix.floordiv(place, v.extent)
    return found


def _kept(value: Value) -> Value | None:
    """The condition of this value, and of those inside on which it is -inf as well."""
    if value.op == "where":
        condition, yes, no = value.args
        if _is(no, -math.inf):
            return _and(condition, _kept(yes))
        return _and(vs.call("not", condition), _kept(no)) if _is(yes, -math.inf) else None
    if value.op == "add":
        left, right = map(_kept, value.args)
        return right if left is None else _and(left, right)
    return None


def _unmasked(value: Value) -> Value:
    """The value where `_kept` of it holds."""
    if value.op == "where":
        _, yes, no = value.args
        return _unmasked(yes) if _is(no, -math.inf) else _unmasked(no) if _is(yes, -math.inf) else value
    return vs.call("add", *map(_unmasked, value.args)) if value.op == "add" else value


def _nonzero(value: Value) -> Value | None:
    """The condition without which this value is 0: that of the outermost branches, also of a multiple by a constant. What is
    multiplied by another value may be no number there."""
    times = _times(value)
    if times is not None:
        return _nonzero(times[1])
    if value.op != "where":
        return None
    condition, yes, no = value.args
    if _is(no, 0):
        return _and(condition, _nonzero(yes))
    return _and(vs.call("not", condition), _nonzero(no)) if _is(yes, 0) else None


def _where_nonzero(value: Value) -> Value:
    """The value where `_nonzero` of it holds."""
    times = _times(value)
    if times is not None:
        rest = _where_nonzero(times[1])
        return vs.rebuild(value, tuple(rest if arg is times[1] else arg for arg in value.args), value.attr)
    if value.op != "where":
        return value
    _, yes, no = value.args
    return _where_nonzero(yes) if _is(no, 0) else _where_nonzero(no) if _is(yes, 0) else value


def _and(condition: Value, more: Value | None) -> Value:
    return condition if more is None else vs.call("and", condition, more)


def _factored(value: Value) -> tuple[float, Value]:
    """A positive factor of a value, and the rest. Any positive multiple of a mask, which is 0 or -inf, is the mask itself."""
    times = _times(value)
    if times is not None:
        more, rest = _factored(times[1])
        return (times[0] * more, rest) if _is_usual(times[0] * more) else (1.0, value)
    if value.op == "where":
        condition, *branches = value.args
        return _shared(value, branches, lambda left, right: vs.where(condition, left, right))
    if value.op == "add":
        return _shared(value, value.args, lambda left, right: vs.call("add", left, right))
    return 1.0, value


def _times(value: Value) -> tuple[float, Value] | None:
    """The constant that a value is multiplied by, or the inverse of a divisor, and the other factor."""
    if value.op not in ("mul", "truediv") or not value.dtype.is_floating_point:
        return None
    left, right = value.args
    if left.op == "const" and value.op == "mul":
        left, right = right, left
    if right.op != "const" or not _is_usual(right.attr):
        return None
    return (right.attr if value.op == "mul" else 1 / right.attr), left


def _shared(value: Value, branches: Sequence[Value], join: Callable[[Value, Value], Value]) -> tuple[float, Value]:
    """The factor of the one side, where the other is 0 or -inf everywhere."""
    left, right = branches
    if _is_mask(right):
        factor, rest = _factored(left)
        return factor, join(rest, right)
    if _is_mask(left):
        factor, rest = _factored(right)
        return factor, join(left, rest)
    return 1.0, value


def _is_mask(value: Value) -> bool:
    """Whether a value is 0 or -inf, wherever it is."""
    if value.op == "where":
        return all(map(_is_mask, value.args[1:]))
    return _is(value, 0) or _is(value, -math.inf)


def _is_usual(factor: float) -> bool:
    """Whether multiples by a positive factor stay in float32's range."""
    return LEAST_FACTOR <= factor <= 1 / LEAST_FACTOR


def _is(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number
