"""What stands between two steps of a program: the function in the slot, and the mask that it is, if it is one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.spans import EVERYWHERE, UNKNOWN, Holds, Known, where_holds
from kgen.ir.values import Value
from kgen.templates import masks

# Results of contractions are seldom larger: the last digit of such a number's multiple would be a factor of its power.
LARGE = 2.0**20
# Smaller factors, and those that are larger than its inverse, stay where they are: without them numbers may leave its range.
LEAST_FACTOR = 2.0**-40


@dataclass(frozen=True, slots=True)
class Middle:
    """A slot between two steps of a program: over these axes, the function `value` of one element each of `steps`. Where a
    softmax along `normalised` follows, what is past the end of that axis is -inf; 0 where a contraction sums along `summed`.
    `loops` are those of all axes."""

    axes: tuple[str, ...]
    steps: tuple[str, ...]
    value: Value
    normalised: str | None
    summed: str | None = None
    loops: Mapping[str, tuple[Var, ...]] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether the slot leaves the element as it is."""
        return self.value.op == "step"

    @property
    def factor(self) -> float:
        """The positive number that the function multiplies by at last, -inf and 0 staying what they are; 1 where there is none.
        The maximum of a row may be found before, and an exponential of another base takes both factors at once. The sum of a
        contraction may be multiplied in place of its elements."""
        return _factored(self.value)[0]

    @property
    def mask(self) -> Value | None:
        """The condition without which an element is -inf, or 0 where a contraction follows and `guards` are 0. A template may
        leave out tiles in which it holds nowhere (`reach`)."""
        return None if self._mask is None else vs.without_bounds(self._mask)

    @property
    def _mask(self) -> Value | None:
        """The mask with what it is said to be within."""
        if self.normalised is not None:
            return masks.kept(_factored(self.value)[1])
        return None if self._zeros is None else self._zeros.condition

    @property
    def guards(self) -> tuple[Value, ...]:
        """The mask says nothing unless these are 0, for all rows or for all columns: that of `guard_axis`."""
        return () if self.normalised is not None or self._zeros is None else self._zeros.guards

    @property
    def guard_axis(self) -> str:
        """The axis whose indices guards depend on, besides those of the batch."""
        rows, columns = self.axes[-2:]
        return columns if any(v in guard.variables() for guard in self.guards for v in self.loops[columns]) else rows

    @property
    def fill(self) -> masks.Fill | None:
        """The finite number that masked elements are, without `factor`, where nothing makes elements -inf. A template may leave
        out tiles in which its condition holds nowhere for rows whose weights of that number are 0."""
        return masks.fill_of(self.function(scaled=False)) if self.normalised is not None and self.mask is None else None

    @property
    def _zeros(self) -> masks.Zeros | None:
        """Guards of several axes are too many to look at."""
        rows, columns = (frozenset(self.loops.get(axis, ())) for axis in self.axes[-2:])
        found = masks.zeros(self.value, (rows, columns))
        if found is None or not found.guards:
            return found
        names = frozenset[Var]().union(*(guard.variables() for guard in found.guards))
        return found if self.loops and not (names & rows and names & columns) else None

    def is_large(self, masked: bool = True, filled: bool = False) -> bool:
        """Whether the function, as `function` gives it, may be far larger than a contraction's results are: finite numbers that
        stand for -inf are, and so may be what it reads from memory."""
        value = self.function(scaled=False, masked=masked, filled=filled)
        return any(_may_be_large(one) for one in vs.topological([value]))

    @property
    def unmasked(self) -> Value:
        """The function where the mask, or the condition of `fill`, holds."""
        return self.function(masked=False, filled=True)

    def function(
        self, scaled: bool = True, masked: bool = True, into: torch.dtype | None = None, filled: bool = False
    ) -> Value:
        """The function, without `factor` where not `scaled`, and where not `masked` as if `mask` held; the condition of `fill`
        holds only where tiles without it are left out, which is `filled`. What is to be rounded to the type `into` is not
        rounded to it before."""
        value = vs.without_bounds(_unrounded(self.value if scaled else _factored(self.value)[1], into))
        if masked:
            return value
        fill = self.fill if filled and self.mask is None else None
        condition = self.mask if fill is None else fill.condition
        return value if condition is None else masks.assuming(value, condition)

    def reach(
        self,
        loops: Mapping[str, tuple[Var, ...]],
        first: Expr,
        count: Expr,
        known: Known | None = None,
        filled: bool = False,
    ) -> Holds:
        """Where the mask holds along the last axis, or, where `filled`, the condition of `fill`, for `count` rows (at least
        one) from the row `first` on. With `known` the ends may be in terms of the loops of the other axes."""
        rows, columns = (loops[axis] for axis in self.axes[-2:])
        wanted = self.fill.condition if filled and self.fill is not None else self._mask
        if wanted is None:
            return EVERYWHERE
        if not columns or not rows:
            return UNKNOWN
        digits: dict[Atom, Expr] = {}
        along, down = (_one_of(loops_of, axis, digits) for loops_of, axis in ((columns, self.axes[-1]), (rows, self.axes[-2])))
        mask = vs.substitute(wanted, digits) if digits else wanted
        return where_holds(mask, along, {down: (first, first + count - 1)}, known)

    def known(self, loops: Mapping[str, tuple[Var, ...]]) -> Known:
        """What the ends may be in terms of where a kernel has one index of each axis but the last two."""
        return Known(frozenset(v for axis in self.axes[:-2] for v in loops[axis]))


def _one_of(loops: Sequence[Var], axis: str, digits: dict[Atom, Expr]) -> Var:
    """The loop of an axis; in place of several a new one, of which `digits` then has what they are."""
    if len(loops) == 1:
        return loops[0]
    whole = ix.var(axis, ix.product(v.extent for v in loops))
    digits |= dict(zip(loops, ix.delinearize(whole.expr(), [v.extent for v in loops]), strict=True))
    return whole


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


def _unrounded(value: Value, kind: torch.dtype | None) -> Value:
    """A value that is rounded to a type later, without roundings to it at last."""
    if value.op == "round_to" and value.attr is kind:
        return value.args[0]
    if value.op == "where":
        condition, *branches = value.args
        return vs.where(condition, *(_unrounded(branch, kind) for branch in branches))
    return value


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


def _may_be_large(value: Value) -> bool:
    if value.op == "const":
        return LARGE <= abs(value.attr) < math.inf
    return value.op == "load" and value.dtype.is_floating_point


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
