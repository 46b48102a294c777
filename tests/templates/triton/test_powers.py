"""Exponentials of scores as powers of two: the same numbers where they are made so, and others left as they are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.templates.middle import Middle
from kgen.templates.triton.codegen.powers import in_powers_of_two
from tests.templates.test_masks import KEPT, LOOPS, S, T, c, minus, number, row, times, weight

HALVES = times(S, c(0.5))
CAPPED = vs.call("tanh", S)
BOUND = vs.where(vs.call("lt", row("lse"), c(1.0)), c(-math.log(9)), c(0.0))
MADE = {
    "multiple": weight(HALVES),
    "quotient": weight(vs.call("truediv", S, c(8.0))),
    "element": weight(S),
    "not below zero": vs.call("exp", minus(HALVES, row("lse"))),
    "bounded by the row": vs.call("exp", vs.call("minimum", minus(HALVES, row("lse")), BOUND)),
    "masked otherwise": weight(vs.where(vs.call("not", KEPT), c(-math.inf), S)),
    "masked": times(weight(vs.where(KEPT, HALVES, c(-math.inf))), minus(T, row("delta"))),
}
LEFT = {
    "of a finite mask": weight(vs.where(KEPT, HALVES, c(-1e9))),  # as large as the logarithm of a sum of such
    "of a sum": weight(vs.call("add", HALVES, row("bias"))),
    "of a function": weight(CAPPED),
    "of another element": vs.call("exp", minus(S, T)),
    "of no difference": vs.call("exp", S),
}


def operations(value: Value) -> set[str]:
    return {one.op for one in vs.topological([value])}


@pytest.mark.parametrize("name", MADE)
def test_powers_are_the_same_numbers(name: str) -> None:
    value = MADE[name]
    made = in_powers_of_two(value, set())
    assert "exp2" in operations(made)
    assert "exp" not in operations(made)
    for m, n, s, lse in itertools.product((0, 5), (0, 5), (-30.0, 0.25, 3.0), (0.5, 4.0)):
        at = {"s": s, "t": 1.5, "lse": lse, "delta": 0.25}
        assert number(made, m, n, at) == pytest.approx(number(value, m, n, at), rel=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_others_are_left(name: str) -> None:
    assert in_powers_of_two(LEFT[name], set()) is LEFT[name]


def test_exact_ones_are_left() -> None:
    value = MADE["element"]
    assert in_powers_of_two(value, {value}) is value


def test_a_last_factor_and_a_last_rounding_may_be_made_later() -> None:
    """What is 0 elsewhere has them as well; a rounding to another type is none of these."""
    rounded = vs.cast(times(T, weight(S)), torch.bfloat16)
    value = times(vs.where(KEPT, rounded, c(0)), c(0.125))
    middle = Middle(("m", "n"), ("s", "t"), value, None, "n", LOOPS)
    assert middle.factor == 0.125
    assert middle.function(scaled=False) is vs.where(KEPT, rounded, c(0))
    assert middle.function(scaled=False, into=torch.bfloat16) is vs.where(KEPT, times(T, weight(S)), c(0))
    assert middle.function(scaled=False, into=torch.float16) is middle.function(scaled=False)
    assert middle.function() is value
