"""What stands between two steps of a program: the function in the slot, and the mask that it is, if it is one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kgen.ir import values as vs
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
        which it holds nowhere, by the ranges of the loops that it names."""
        return _kept(self.value)


def _kept(value: Value) -> Value | None:
    if value.op == "where":
        condition, yes, no = value.args
        if _is(no, -math.inf):
            return _both(condition, _kept(yes))
        return _both(vs.call("not", condition), _kept(no)) if _is(yes, -math.inf) else None
    if value.op == "add":
        added = (one for one in value.args if one.op == "where" and any(_is(arg, 0) for arg in one.args[1:]))
        return next((kept for one in added if (kept := _kept(one)) is not None), None)
    return None


def _both(condition: Value, other: Value | None) -> Value:
    return condition if other is None else vs.call("and", condition, other)


def _is(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number
