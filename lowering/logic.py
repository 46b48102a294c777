"""Elementwise predicates: comparisons, logic, bits and tests of floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import values as vs
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.pointwise import Operand, Rule, number, pointwise, rounded_in
from kgen.lowering.tensor import Tensor, promote, rounded


def comparison(op: str) -> Rule:
    return lambda b, *args: pointwise(lambda *v: vs.call(op, *v), *args, result=torch.bool, convert_operand=rounded_in)


def logical(op: str) -> Rule:
    """Every operand on its own is true where it is not zero; no promotion takes part."""
    return lambda b, *args: pointwise(lambda *v: vs.call(op, *v), *args, compute=torch.bool)


def bitwise(op: str, on_bool: str) -> Rule:
    return lambda b, *args: pointwise(lambda *v: vs.call(on_bool if v[0].dtype is torch.bool else op, *v), *args)


def shift(op: str) -> Rule:
    def rule(b: Builder, x: Operand, y: Operand) -> Tensor:
        if promote(x, y).is_floating_point or promote(x, y) is torch.bool:
            raise Refused("shift of a dtype other than an integer")
        return pointwise(lambda p, q: vs.call(op, p, q), x, y)

    return rule


def test_float(op: str) -> Rule:
    """A predicate on floats that is false for every integer."""

    def rule(b: Builder, x: Tensor) -> Tensor:
        if not x.dtype.is_floating_point:
            return x.with_value(vs.const(False, torch.bool), torch.bool)
        return pointwise(lambda p: vs.call(op, p), rounded(x), result=torch.bool)

    return rule


def infinite_with(sign_op: str) -> Rule:
    """isposinf and isneginf."""
    limit = float("inf") if sign_op == "gt" else float("-inf")

    def rule(b: Builder, x: Tensor) -> Tensor:
        if not x.dtype.is_floating_point:
            return x.with_value(vs.const(False, torch.bool), torch.bool)
        return pointwise(lambda p: vs.call("eq", p, number(limit, p)), rounded(x), result=torch.bool)

    return rule


def isfinite(b: Builder, x: Tensor) -> Tensor:
    if not x.dtype.is_floating_point:
        return x.with_value(vs.const(True, torch.bool), torch.bool)
    return pointwise(lambda p: vs.call("lt", vs.call("abs", p), number(float("inf"), p)), rounded(x), result=torch.bool)


RULES: dict[str, Callable[..., Any]] = {
    "aten.bitwise_not": bitwise("invert", "not"),
    "aten.bitwise_left_shift": shift("shl"),
    "aten.bitwise_right_shift": shift("shr"),
    "aten.__lshift__": shift("shl"),
    "aten.__rshift__": shift("shr"),
    "aten.isnan": test_float("isnan"),
    "aten.isinf": test_float("isinf"),
    "aten.isfinite": isfinite,
    "aten.isposinf": infinite_with("gt"),
    "aten.isneginf": infinite_with("lt"),
    **{f"aten.bitwise_{name}": bitwise(f"bit{name}", name) for name in ("and", "or", "xor")},
    "kgen.within": logical("within"),
    **{f"aten.logical_{name}": logical(name) for name in ("and", "or", "xor", "not")},
    **{f"aten.{name}": comparison(name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}
