"""Which whole numbers a value can be, as far as its own arithmetic tells: an index that is always inside needs no check.

What data says is unknown, but for the range of its type. A selection is known where its condition compares what it selects
with numbers: ``where(0 <= t < n, int(t), 0)``, as bilinear sampling has it, is inside of n. What a check makes sure of proves
nothing here, for the question is whether that check is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.ir.values import Value

Range = tuple[float, float]
UNKNOWN: Range = (-math.inf, math.inf)
# Values that are looked at between an index and its data, at most: where one is used in several others it is looked at again.
MOST_VALUES = 96


def is_inside(found: Range, extent: Expr) -> bool:
    """Whether whole numbers of a range are in ``[0, extent)``."""
    low, high = found
    return low >= 0 and high < math.inf and ix.known_less(ix.constant(int(high)), extent)


def range_of(value: Value, definition: Callable[[Value], Value | None] = lambda _: None) -> Range:
    """The least and the greatest number that a value of a type of whole numbers can be; infinite where that is unknown. Of a
    load `definition` gives the value that was stored there, if it is known and nothing has changed since."""
    return _Ranges(definition).of(value, {})


def _both(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def _of_type(value: Value) -> Range:
    """Narrow types are kept in wide ones: what a load brings is a number of its own type."""
    dtype = value.attr[2] if value.op == "load" else value.dtype
    if dtype is torch.bool:
        return 0, 1
    return (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if dtype.itemsize < torch.int64.itemsize else UNKNOWN


def _within_type(found: Range, value: Value) -> Range:
    """Nothing is known of what has left its type: it wraps."""
    kind = torch.iinfo(value.dtype) if value.dtype is not torch.bool else None
    return found if kind is not None and kind.min <= found[0] and found[1] <= kind.max else UNKNOWN


# ---- rules ------------------------------------------------------------------------------------------------------------

Facts = Mapping[Value, Range]


class _Ranges:
    """Rules by operation. `facts` are ranges of values, floats among them, where some condition holds."""

    def __init__(self, definition: Callable[[Value], Value | None]) -> None:
        self.definition, self.left = definition, MOST_VALUES

    def of(self, value: Value, facts: Facts) -> Range:
        self.left -= 1
        if value.dtype.is_floating_point or value.dtype.is_complex or self.left < 0:
            return UNKNOWN
        rule = getattr(self, f"_{value.op}", None)
        found = UNKNOWN if rule is None else rule(value, facts)
        return _both(found, _both(facts.get(value, UNKNOWN), _of_type(value)))

    def _arguments(self, value: Value, facts: Facts) -> tuple[Range, ...]:
        return tuple(self.of(argument, facts) for argument in value.args)

    def _const(self, value: Value, _facts: Facts) -> Range:
        return int(value.attr), int(value.attr)

    def _index(self, value: Value, _facts: Facts) -> Range:
        return UNKNOWN if ix.indirects(value.attr) else value.attr.bounds()

    def _load(self, value: Value, facts: Facts) -> Range:
        stored = self.definition(value)
        return UNKNOWN if stored is None else self.of(stored, facts)

    def _cast(self, value: Value, facts: Facts) -> Range:
        """A float is cut off towards zero. One that is no number has no facts: no comparison with it holds."""
        [source] = value.args
        if value.dtype is torch.bool:
            return 0, 1
        if not source.dtype.is_floating_point:
            return _within_type(self.of(source, facts), value)
        low, high = facts.get(source, UNKNOWN)
        finite = math.isfinite(low) and math.isfinite(high)
        return _within_type((math.trunc(low), math.trunc(high)), value) if finite else UNKNOWN

    def _where(self, value: Value, facts: Facts) -> Range:
        condition, chosen, other = value.args
        known = dict(facts)
        for compared, found in self._conditions(condition):
            known[compared] = _both(known.get(compared, UNKNOWN), found)
        a, b = self.of(chosen, known), self.of(other, facts)
        return min(a[0], b[0]), max(a[1], b[1])

    def _add(self, value: Value, facts: Facts) -> Range:
        a, b = self._arguments(value, facts)
        return _within_type((a[0] + b[0], a[1] + b[1]), value)

    def _sub(self, value: Value, facts: Facts) -> Range:
        a, b = self._arguments(value, facts)
        return _within_type((a[0] - b[1], a[1] - b[0]), value)

    def _minimum(self, value: Value, facts: Facts) -> Range:
        a, b = self._arguments(value, facts)
        return min(a[0], b[0]), min(a[1], b[1])

    def _maximum(self, value: Value, facts: Facts) -> Range:
        a, b = self._arguments(value, facts)
        return max(a[0], b[0]), max(a[1], b[1])

    def _remainder(self, value: Value, facts: Facts) -> Range:
        """It has the sign of the divisor."""
        low, high = self.of(value.args[1], facts)
        return (0, high - 1) if low > 0 else UNKNOWN

    def _bitand(self, value: Value, facts: Facts) -> Range:
        highs = [high for low, high in self._arguments(value, facts) if low >= 0]
        return (0, min(highs)) if highs else UNKNOWN

    def _shr(self, value: Value, facts: Facts) -> Range:
        """Of what is not below zero, by a constant."""
        (low, high), number = self.of(value.args[0], facts), value.args[1]
        if low < 0 or high == math.inf or number.op != "const" or number.attr < 0:
            return UNKNOWN
        return int(low) >> int(number.attr), int(high) >> int(number.attr)

    def _conditions(self, condition: Value) -> Iterator[tuple[Value, Range]]:
        """Ranges of what is compared with numbers where a condition holds."""
        self.left -= 1
        if self.left < 0:
            return
        if condition.op == "load":
            stored = self.definition(condition)
            yield from () if stored is None else self._conditions(stored)
        elif condition.op == "and":
            for part in condition.args:
                yield from self._conditions(part)
        elif condition.op in _BOUNDS:
            a, b = condition.args
            if _is_number(b):
                yield a, _bounded(condition.op, b.attr, a)
            elif _is_number(a):
                yield b, _bounded(_TURNED[condition.op], a.attr, b)


# ---- comparisons --------------------------------------------------------------------------------------------------------


def _bounded(op: str, number: Any, compared: Value) -> Range:
    """What is compared with a number. Of floats, only the whole numbers that they are cut off to matter: what is below 511 is
    cut off to 510 at most."""
    return _BOUNDS[op](number, compared.dtype.is_floating_point)


def _is_number(value: Value) -> bool:
    return value.op == "const" and not isinstance(value.attr, complex) and math.isfinite(value.attr)


def _below(number: Any, is_float: bool) -> float:
    """The greatest number that counts below another one."""
    if not is_float:
        return number - 1
    return math.ceil(number) - 1 if number > 0 else number


def _above(number: Any, is_float: bool) -> float:
    if not is_float:
        return number + 1
    return math.floor(number) + 1 if number < 0 else number


_BOUNDS: dict[str, Callable[[Any, bool], Range]] = {
    "lt": lambda number, is_float: (-math.inf, _below(number, is_float)),
    "le": lambda number, _: (-math.inf, number),
    "gt": lambda number, is_float: (_above(number, is_float), math.inf),
    "ge": lambda number, _: (number, math.inf),
    "eq": lambda number, _: (number, number),
}
_TURNED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
