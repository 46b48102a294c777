"""What a softmax looks like as a value: exponentials over their sum, with or without the maximum subtracted, and with zeros in
place of rows that are masked as a whole where somebody asked for that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from kgen.ir import values as vs
from kgen.ir.values import Value

# Operations, one behind the other, by which a value is a multiple of something.
MOST_FACTORS = 6
# Of a load and the name of a reduction: what that reduces to make the element, or None.
Reduced = Callable[[Value, str], Value | None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A softmax of the value `of`, with the load of its sum. Rows that are -inf as a whole give zeros where it is `safe`, else
    NaN. If there is something `kept`, rows of it that are -inf are NaN all the same: nobody may take it for safe unless that is
    finite."""

    of: Value
    total: Value
    safe: bool
    kept: Value | None = None


@dataclass(frozen=True, slots=True)
class Factor:
    """A part of a value, and what makes of it the value in float32, unrounded. Of a multiple of the part, that is the same
    multiple."""

    part: Value
    times: Callable[[Value], Value]


@dataclass(frozen=True, slots=True)
class Total:
    """A sum of exponentials of the value `of`; `shifted`: its maximum was subtracted from each."""

    of: Value
    shifted: bool


@dataclass(frozen=True, slots=True)
class LogSumExp:
    """A value that has the form of a log-sum-exp: the loads of the sum, and of the maximum if that is added. `guarded`: where
    the maximum is infinite, it is the result."""

    total: Value
    top: Value | None
    guarded: bool


def weights_in(value: Value, reduced: Reduced, part: Callable[[Value], Value] = lambda whole: whole) -> Weights | None:
    """The softmax that a value is. It may have `part` of the elements of those that are added up."""
    value = bare(value)
    if value.op == "where":
        return _safe(value, reduced, part)
    parts = _quotient(value)
    if parts is None:
        return None
    exponential, total = bare(parts[0]), bare(parts[1])
    summed = reduced(total, "sum")
    if exponential.op != "exp" or summed is None or bare(summed).op != "exp" or part(bare(summed)) is not exponential:
        return None
    return Weights(_without_maxima(bare(bare(summed).args[0]), reduced), total, False)


def total_of(load: Value, reduced: Reduced) -> Total | None:
    """What exponentials a load is the sum of."""
    summed = reduced(load, "sum")
    exponential = None if summed is None else bare(summed)
    if exponential is None or exponential.op != "exp":
        return None
    inside = bare(exponential.args[0])
    of = _without_maximum(inside, reduced)
    return Total(of, of is not inside)


def logsumexp_form(value: Value) -> LogSumExp | None:
    """``log(s)``, ``m + log(s)``, or with a guard ``where(isinf(m), m, m + log(s))``, of two loads."""
    if value.op == "where":
        condition, yes, no = value.args
        found = logsumexp_form(no)
        guards = found is not None and found.top is yes and condition.op == "isinf" and condition.args[0] is yes
        return LogSumExp(found.total, yes, True) if found is not None and guards and not found.guarded else None
    if value.op == "add":
        for one, other in (value.args, value.args[::-1]):
            found = logsumexp_form(one) if one.op == "log" else None
            if found is not None and other.op == "load" and not other.args:
                return LogSumExp(found.total, other, False)
        return None
    total = bare(value.args[0]) if value.op == "log" else None
    return LogSumExp(total, None, False) if total is not None and total.op == "load" and not total.args else None


def _quotient(value: Value) -> tuple[Value, Value] | None:
    """What is divided by what."""
    if value.op == "truediv":
        return value.args[0], value.args[1]
    if value.op == "mul":
        for factor, other in (value.args, value.args[::-1]):
            if other.op == "truediv" and _is_number(other.args[0], 1):
                return factor, other.args[1]
            if other.op == "reciprocal":
                return factor, other.args[0]
    return None


def _without_maximum(value: Value, reduced: Reduced) -> Value:
    """What the exponential is of, before its row's maximum was subtracted: that leaves the quotient as it is."""
    if value.op == "sub":
        subtracted, top = bare(value.args[0]), reduced(bare(value.args[1]), "max")
        if top is not None and bare(top) is subtracted:
            return subtracted
    return value


def _without_maxima(value: Value, reduced: Reduced) -> Value:
    """The same where a model has subtracted the maximum of each row itself, before the softmax does."""
    while (inner := _without_maximum(value, reduced)) is not value:
        value = bare(inner)
    return value


def _safe(value: Value, reduced: Reduced, part: Callable[[Value], Value]) -> Weights | None:
    """``where(not any(x != -inf), 0, softmax(x))``, or ``where(m, 0, softmax(where(m, -inf, x)))``."""
    return _safe_by_rows(value, reduced, part) or _safe_by_elements(value, reduced, part)


def _safe_by_elements(value: Value, reduced: Reduced, part: Callable[[Value], Value]) -> Weights | None:
    """The weights of masked elements are 0 in rows of nothing else as well."""
    chosen = _number_apart(value, 0)
    found = None if chosen is None else weights_in(value.args[3 - chosen], reduced, part)
    filled = None if found is None or found.of.op != "where" else _number_apart(found.of, -math.inf)
    if chosen is None or found is None or filled is None:
        return None
    read = part(found.of)  # of what is added up, what this element is made of
    same = read.op == "where" and _without(value, chosen) == _without(read, filled)
    return replace(found, safe=True, kept=found.of.args[3 - filled]) if same else None


def _number_apart(choice: Value, number: float) -> int | None:
    """Which argument of a choice is a number, the other one being none."""
    found = [k for k in (1, 2) if _is_number(choice.args[k], number)]
    return found[0] if len(found) == 1 else None


def _without(choice: Value, argument: int) -> tuple[Value, bool]:
    """A condition, and what it is where a choice is this argument."""
    condition, holds = choice.args[0], argument == 1
    while condition.op == "not":
        [condition], holds = condition.args, not holds
    return condition, holds


def _safe_by_rows(value: Value, reduced: Reduced, part: Callable[[Value], Value]) -> Weights | None:
    condition, zero, inner = value.args
    if not _is_number(zero, 0) or condition.op != "not":
        return None
    found = weights_in(inner, reduced, part)
    some = reduced(condition.args[0], "any")
    if found is None or some is None or some.op != "not" or some.args[0].op != "eq":
        return None
    compared, limit = some.args[0].args
    return replace(found, safe=True) if bare(compared) is found.of and _is_number(limit, -math.inf) else None


def factors(value: Value, most: int = MOST_FACTORS) -> Iterator[Factor]:
    """Of what a value is a multiple, the largest parts first."""
    for one in _factors(bare(value)) if most else ():
        yield one
        for inner in factors(one.part, most - 1):
            yield Factor(inner.part, partial(_after, one.times, inner.times))


def _after(outer: Callable[[Value], Value], inner: Callable[[Value], Value], value: Value) -> Value:
    return outer(inner(value))


def _factors(value: Value) -> Iterator[Factor]:
    """The same by one operation."""
    if value.op == "cast" and value.dtype.is_floating_point and value.args[0].dtype.is_floating_point:
        yield Factor(bare(value.args[0]), lambda part: part)
    elif value.op == "mul":
        for one, other in (value.args, value.args[::-1]):
            yield Factor(bare(one), lambda part, by=other: vs.call("mul", part, vs.cast(by, part.dtype)))  # type: ignore[misc]
    elif value.op == "truediv":
        one, other = value.args
        yield Factor(bare(one), lambda part: vs.call("truediv", part, vs.cast(other, part.dtype)))
    elif value.op == "where" and (chosen := _number_apart(value, 0)) is not None:
        condition, holds = _without(value, chosen)
        kept = vs.call("not", condition) if holds else condition
        yield Factor(bare(value.args[3 - chosen]), lambda part: vs.where(kept, part, vs.const(0, part.dtype)))


def bare(value: Value) -> Value:
    """The value before it was rounded to 16 bits, which a kernel does without."""
    while value.op == "round_to":
        value = value.args[0]
    return value


def _is_number(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number
