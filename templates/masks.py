"""Masks in functions of scores: where an element is -inf, another number, or 0, as the function itself says it.

    where(n <= m, s, -inf)                              -inf without the condition
    where(n <= m, s, -65504)                            one number, the fill, without it
    where(n < 1, t, where(n <= m, s, -inf))              -inf where neither holds
    where(n <= m, s, 0) * 0.25                          0 without it
    exp(where(n <= m, s, -65504) - lse[m]) * t          0 without it where exp(-65504 - lse[m]) is 0

In the last case a tile may be left out where this number, which no score is part of, is 0 for every row: see `Zeros.guards`.
Without the condition an element counts as the number that stands there. Scores that are no numbers do not change that: a mask
that is added to a score, or a weight of 0 that is multiplied by something, is one that leaves the element out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value

# Results of these are numbers of moderate size where arguments are: 0 times one of them is 0.
MODERATE = frozenset(
    [
        "step",
        "load",
        "const",
        "index",
        "add",
        "sub",
        "mul",
        "neg",
        "abs",
        "minimum",
        "maximum",
        "where",
        "tanh",
        "sigmoid",
        "sin",
        "cos",
        "cast",
        "round_to",
        "rand",
        "and",
        "or",
        "xor",
        "not",
        "bitand",
        "bitor",
        "lt",
        "le",
        "gt",
        "ge",
        "eq",
        "ne",
    ]
)
# Loops of each axis.
Axes = tuple[frozenset[Var], ...]
# They leave 0 as it is.
KEEPING_ZERO = frozenset(("neg", "round_to"))


@dataclass(frozen=True, slots=True)
class Zeros:
    """Without `condition` an element is 0, if all of `guards` are: values that depend on no scores."""

    condition: Value
    guards: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """Without `condition` an element is `number`, which is finite."""

    condition: Value
    number: float


def kept(value: Value, number: float = -math.inf) -> Value | None:
    """The condition of this value, and of those inside on which it is the `number` as well."""
    if value.op == "where":
        condition, yes, no = value.args
        if _is(no, number):
            return both(condition, kept(yes, number))
        if _is(yes, number):
            return both(vs.call("not", condition), kept(no, number))
        inside, other = kept(yes, number), kept(no, number)
        if inside is None and other is None:
            return None
        return both(_either(vs.call("not", condition), inside), None if other is None else _either(condition, other))
    if value.op == "add" and number == -math.inf:
        left, right = (kept(arg) for arg in value.args)
        return right if left is None else both(left, right)
    if value.op in ("round_to", "cast") and number == -math.inf and value.args[0].dtype.is_floating_point:
        return kept(value.args[0]) if value.dtype.is_floating_point else None
    return None


@lru_cache(maxsize=256)
def fill_of(value: Value) -> Fill | None:
    """The number that masked elements are, and where."""
    for condition, masked in _masked_forms(value):
        if masked.op == "const" and math.isfinite(masked.attr):
            return Fill(condition, float(masked.attr))
    return None


@lru_cache(maxsize=4096)
def zeros(value: Value, axes: Axes = ()) -> Zeros | None:
    """Where a value is 0; of several answers one without guards, unless only another one is of loops of all these axes."""
    if value.op in KEEPING_ZERO or (value.op == "cast" and value.args[0].dtype.is_floating_point):
        return zeros(value.args[0], axes)
    if value.op == "where":
        return _zeros_of_branch(value, axes)
    if value.op == "exp":
        return _zeros_of_power(value)
    if value.op == "truediv":
        return zeros(value.args[0], axes) if value.args[1].op == "const" and value.args[1].attr not in (0, math.inf) else None
    if value.op in ("add", "sub"):
        return _zeros_of_both(*(zeros(arg, axes) for arg in value.args))
    if value.op != "mul":
        return None
    pairs = (value.args, value.args[::-1])
    found = [one for factor, other in pairs if _is_moderate(other) and (one := zeros(factor, axes)) is not None]
    return min(found, key=lambda one: len(one.guards), default=None)


def assuming(value: Value, condition: Value) -> Value:
    """The value where the condition holds: branches that depend on parts of it are decided."""
    known = dict(_parts(condition, True))

    def visit(old: Value, args: tuple[Value, ...], _: object) -> Value:
        if old.op == "where":
            asked, wanted = _positive(old.args[0], True)
            if asked in known:
                return args[1] if known[asked] == wanted else args[2]
        return old if args == old.args else vs.rebuild(old, args, old.attr)

    return vs.rewrite([value], visit)[value]


def _either(condition: Value, more: Value | None) -> Value:
    return vs.const(True, torch.bool) if more is None else vs.call("or", condition, more)


def both(condition: Value, more: Value | None) -> Value:
    return condition if more is None else vs.call("and", condition, more)


def _zeros_of_branch(value: Value, axes: Axes) -> Zeros | None:
    condition, yes, no = value.args
    for one, other, holds in ((no, yes, condition), (yes, no, vs.call("not", condition))):
        if _is(one, 0):
            inside = zeros(other, axes)
            if inside is None or (inside.guards and (_is_of(holds, axes) or not _is_of(inside.condition, axes))):
                return Zeros(holds)
            return Zeros(both(holds, inside.condition), tuple(vs.where(holds, guard, one) for guard in inside.guards))
    return None


def _is_of(condition: Value, axes: Axes) -> bool:
    """Whether a condition depends on a loop of each axis."""
    return all(not axis.isdisjoint(condition.variables()) for axis in axes)


def _zeros_of_both(left: Zeros | None, right: Zeros | None) -> Zeros | None:
    if left is None or right is None or left.condition is not right.condition:
        return None
    return Zeros(left.condition, tuple(dict.fromkeys((*left.guards, *right.guards))))


def _zeros_of_power(value: Value) -> Zeros | None:
    """Of a power whose exponent has no score in it where it is masked."""
    for condition, masked in _masked_forms(value):
        return Zeros(condition, () if _is(masked, 0) else (masked,))
    return None


def _masked_forms(value: Value) -> Iterator[tuple[Value, Value]]:
    """Conditions of masks inside, the outermost first, and what the value is without each, where no score is in that."""
    for node in reversed(vs.topological([value])):
        for number in _numbers(node):
            condition = kept(node, number)
            masked = _with(value, node, vs.const(number, node.dtype))
            if condition is not None and all(part.op != "step" for part in vs.topological([masked])):
                yield condition, masked


def _numbers(node: Value) -> list[float]:
    """What a node may be where it is masked."""
    if not node.dtype.is_floating_point:
        return []
    if node.op == "where":
        return [branch.attr for branch in node.args[1:] if branch.op == "const"]
    return [-math.inf] if node.op == "add" else []


def _with(value: Value, old: Value, new: Value) -> Value:
    """A value with one inside replaced."""

    def visit(one: Value, args: tuple[Value, ...], _: object) -> Value:
        return new if one is old else one if args == one.args else vs.rebuild(one, args, one.attr)

    return vs.rewrite([value], visit)[value]


def _parts(condition: Value, wanted: bool) -> Iterator[tuple[Value, bool]]:
    """What is known of parts of a condition that is as `wanted`."""
    condition, wanted = _positive(condition, wanted)
    yield condition, wanted
    joins = ("and", "bitand") if wanted else ("or", "bitor")
    if condition.op in joins and condition.dtype is torch.bool:
        for part in condition.args:
            yield from _parts(part, wanted)


def _positive(condition: Value, wanted: bool) -> tuple[Value, bool]:
    while condition.op == "not":
        condition, wanted = condition.args[0], not wanted
    return condition, wanted


def _is_moderate(value: Value) -> bool:
    """Whether a value is a number of moderate size where scores and memory are."""
    return all(part.op in MODERATE or _is_quotient(part) for part in vs.topological([value], through_indices=False))


def _is_quotient(value: Value) -> bool:
    return value.op == "truediv" and value.args[1].op == "const" and value.args[1].attr != 0


def _is(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number


__all__ = ["Fill", "Zeros", "assuming", "both", "fill_of", "kept", "zeros"]
