"""What stands between two steps of a program: the function in the slot, and the mask that it is, if it is one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.spans import EVERYWHERE, UNKNOWN, Holds, where_holds
from kgen.ir.values import Value


@dataclass(frozen=True, slots=True)
class Middle:
    """A slot between two steps of a program: over these axes, the function `value` of the element `step`. Where a softmax along
    `normalised` follows, what lies past the end of that axis is -inf."""

    axes: tuple[str, ...]
    step: str
    value: Value
    normalised: str | None

    @property
    def is_plain(self) -> bool:
        """Whether the slot leaves the element as it is."""
        return self.value.op == "step"

    @property
    def mask(self) -> Value | None:
        """The condition without which an element is -inf, where the function ends in one. A template may leave out tiles in
        which it holds nowhere (`reach`)."""
        return _kept(self.value)

    @property
    def unmasked(self) -> Value:
        """The function where the mask holds."""
        return _unmasked(self.value)

    def reach(self, loops: Mapping[str, tuple[Var, ...]], first: Expr, count: Expr) -> Holds:
        """Where the mask holds along the last axis, for `count` rows (at least one) from the row `first` on."""
        rows, columns = (loops[axis] for axis in self.axes[-2:])
        if self.mask is None:
            return EVERYWHERE
        if len(columns) != 1 or len(rows) > 1:
            return UNKNOWN
        return where_holds(self.mask, columns[0], dict.fromkeys(rows, (first, first + count - 1)))


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


def _and(condition: Value, more: Value | None) -> Value:
    return condition if more is None else vs.call("and", condition, more)


def _is(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number
