"""What a softmax looks like as a value: exponentials over their sum, with or without the maximum subtracted, and with zeros in
place of rows that are masked as a whole where somebody asked for that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kgen.ir.values import Value

# Of a load and the name of a reduction: what that reduces to make the element, or None.
Reduced = Callable[[Value, str], Value | None]


@dataclass(frozen=True, slots=True)
class Weights:
    """A softmax of the value `of`. Rows that are -inf as a whole give zeros where it is `safe`, else NaN."""

    of: Value
    safe: bool


def weights_in(value: Value, reduced: Reduced) -> Weights | None:
    """The softmax that a value is."""
    value = bare(value)
    if value.op == "where":
        return _safe(value, reduced)
    parts = _quotient(value)
    if parts is None:
        return None
    exponential, total = bare(parts[0]), bare(parts[1])
    summed = reduced(total, "sum")
    if exponential.op != "exp" or summed is None or bare(summed) is not exponential:
        return None
    return Weights(_without_maximum(bare(exponential.args[0]), reduced), False)


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


def _safe(value: Value, reduced: Reduced) -> Weights | None:
    """``where(not any(x != -inf), 0, softmax(x))``."""
    condition, zero, inner = value.args
    if not _is_number(zero, 0) or condition.op != "not":
        return None
    found = weights_in(inner, reduced)
    some = reduced(condition.args[0], "any")
    if found is None or some is None or some.op != "not" or some.args[0].op != "eq":
        return None
    compared, limit = some.args[0].args
    return Weights(found.of, True) if bare(compared) is found.of and _is_number(limit, -math.inf) else None


def bare(value: Value) -> Value:
    """The value before it was rounded to 16 bits, which a kernel does without."""
    while value.op == "round_to":
        value = value.args[0]
    return value


def _is_number(value: Value, number: float) -> bool:
    return value.op == "const" and value.attr == number
