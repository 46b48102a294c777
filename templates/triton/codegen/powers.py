"""Exponentials of what a contraction has made as powers of two, which are an instruction of the GPU.

    exp(scores * 0.125 - lse[m])   ->   exp2(scores * (0.125 * log2(e)) - lse[m] * log2(e))

The multiplication that an exponential begins with joins the one in its argument, and one of a row's number is made once for the
row. Other arguments stay as they are: a large number that stands for -inf would leave float32's range, or differ from the
logarithm of a sum of such numbers by its last digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set

import torch

from kgen.ir import values as vs
from kgen.ir.values import Value

LOG2_E = math.log2(math.e)


def in_powers_of_two(value: Value, exact: Set[Value]) -> Value:
    """The function with exponentials of multiples of a step's element, less what depends on none, as powers of two, but for
    those that are to be as exact as eager's."""

    def visit(old: Value, args: tuple[Value, ...], _: Callable[[Value], Value]) -> Value:
        if old.op == "exp" and old.dtype is torch.float32 and old not in exact:
            power = _scaled(args[0])
            if power is not None:
                return vs.call("exp2", power)
        return old if args == old.args else vs.rebuild(old, args, old.attr)

    return vs.rewrite([value], visit)[value]


def _scaled(value: Value) -> Value | None:
    """A value times the logarithm of e, where that is no more work."""
    if value.op not in ("minimum", "sub") or any(one.op == "step" for one in vs.topological([value.args[1]])):
        return None
    if value.op == "minimum":
        inner = _scaled(value.args[0])
        return None if inner is None else vs.call("minimum", inner, _times(value.args[1], LOG2_E))
    left = _multiple(value.args[0])
    return None if left is None else vs.call("sub", left, _times(value.args[1], LOG2_E))


def _multiple(value: Value) -> Value | None:
    """The same of a multiple of a step's element, or of that and -inf."""
    if value.op == "step":
        return _times(value, LOG2_E)
    if value.op == "where":
        condition, *branches = value.args
        made = [one if one.op == "const" and one.attr == -math.inf else _multiple(one) for one in branches]
        yes, no = made
        return None if yes is None or no is None else vs.where(condition, yes, no)
    if value.op in ("mul", "truediv") and value.args[0].op == "step" and value.args[1].op == "const":
        number = float(value.args[1].attr)
        return _times(value.args[0], number * LOG2_E if value.op == "mul" else LOG2_E / number) if number else None
    return None


def _times(value: Value, number: float) -> Value:
    """The value times a number: of one number or another it is one of two others."""
    if value.op == "const":
        return vs.const(value.attr * number, value.dtype)
    if value.op == "where" and all(one.op == "const" for one in value.args[1:]):
        condition, *numbers = value.args
        return vs.where(condition, *(_times(one, number) for one in numbers))
    return vs.call("mul", value, vs.const(number, value.dtype))
