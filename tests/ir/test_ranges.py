"""What the arithmetic of an index says of its range; and kernels of indices that are inside check nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.ranges import UNKNOWN, is_inside, range_of
from kgen.ir.values import Value
from tests.back_ends import BACK_ENDS

X = ix.var("x", 1000).expr()


def data(dtype: torch.dtype) -> Value:
    return vs.load(f"data_{str(dtype).removeprefix('torch.')}", (X,), dtype)


def number(n: float, like: Value) -> Value:
    return vs.const(n, like.dtype)


def compare(op: str, a: Value, b: float) -> Value:
    return vs.call(op, a, number(b, a))


def both(*conditions: Value) -> Value:
    found = conditions[0]
    for one in conditions[1:]:
        found = vs.call("and", found, one)
    return found


def cut(t: Value) -> Value:
    return vs.cast(t, torch.int64)


I64, F32, U8, BOOL = (data(dtype) for dtype in (torch.int64, torch.float32, torch.uint8, torch.bool))
T = vs.call("floor", F32)
INF = math.inf


def clamped(v: Value, low: int, high: int) -> Value:
    return vs.call("minimum", vs.call("maximum", v, number(low, v)), number(high, v))


def selected(condition: Value, v: Value, other: int = 0) -> Value:
    return vs.where(condition, v, number(other, v))


CASES: dict[str, tuple[Value, tuple[float, float]]] = {
    "data": (I64, UNKNOWN),
    "bytes": (vs.cast(U8, torch.int64), (0, 255)),
    "flags": (vs.cast(BOOL, torch.int64), (0, 1)),
    "a loop": (vs.index_value(X + 3), (3, 1002)),
    "clamped": (clamped(I64, 0, 9), (0, 9)),
    "one end": (vs.call("maximum", I64, number(0, I64)), (0, INF)),
    "sum": (vs.call("add", clamped(I64, 0, 9), clamped(I64, 2, 3)), (2, 12)),
    "difference": (vs.call("sub", number(9, I64), clamped(I64, 0, 9)), (0, 9)),
    "remainder": (vs.call("remainder", I64, number(7, I64)), (0, 6)),
    "negative divisor": (vs.call("remainder", I64, number(-7, I64)), UNKNOWN),
    "low bits": (vs.call("bitand", I64, number(15, I64)), (0, 15)),
    "high bits": (vs.call("shr", U8, number(4, U8)), (0, 15)),
    "high bits of what may be below zero": (vs.call("shr", I64, number(4, I64)), UNKNOWN),
    "high bits, by data": (vs.call("shr", U8, U8), (0, 255)),
    "a float": (cut(F32), UNKNOWN),
    "a clamped float may be no number": (cut(clamped(F32, 0, 9)), UNKNOWN),
    "a sample": (selected(both(compare("ge", T, 0.0), compare("lt", T, 511.0)), cut(T)), (0, 510)),
    "other order": (selected(both(vs.call("gt", number(8.5, T), T), compare("gt", T, -1.0)), cut(T)), (0, 8)),
    "another float": (selected(both(compare("ge", F32, 0.0), compare("lt", F32, 511.0)), cut(T)), UNKNOWN),
    "one bound": (selected(compare("ge", T, 0.0), cut(T)), UNKNOWN),
    "either bound": (selected(vs.call("or", compare("ge", T, 0.0), compare("lt", T, 9.0)), cut(T)), UNKNOWN),
    "the other value": (selected(both(compare("ge", T, 0.0), compare("le", T, 4.0)), cut(T), -2), (-2, 4)),
    "whole numbers": (selected(both(compare("gt", I64, -1), compare("lt", I64, 5)), I64), (0, 4)),
    "wraps": (vs.call("add", vs.cast(vs.call("maximum", I64, number(0, I64)), torch.int64), number(1, I64)), UNKNOWN),
}


@pytest.mark.parametrize("name", CASES)
def test_ranges(name: str) -> None:
    value, found = CASES[name]
    assert range_of(value) == found


def test_inside() -> None:
    assert is_inside((0, 9), ix.constant(10))
    assert not is_inside((0, 9), ix.constant(9))
    assert not is_inside((-1, 5), ix.constant(10))
    assert not is_inside(UNKNOWN, ix.constant(10))
    size = ix.size("s", 12, 100).expr()
    assert is_inside((0, 9), size)
    assert not is_inside((0, 19), size)


def test_what_was_stored_on_the_way() -> None:
    """A condition and a number that kernels have in memory, or in registers, are what they were made of."""
    valid, place = data(torch.bool), data(torch.int64)
    stored = {valid: both(compare("ge", T, 0.0), compare("lt", T, 511.0)), place: clamped(vs.cast(U8, torch.int64), 3, 700)}
    assert range_of(selected(valid, cut(T)), stored.get) == (0, 510)
    assert range_of(place, stored.get) == (3, 255)
    assert range_of(selected(valid, cut(T))) == UNKNOWN


def test_what_uses_a_value_again_and_again_takes_no_longer() -> None:
    """Each sum has the one before it twice: 2^60 ways to the data."""
    value = clamped(I64, 0, 1)
    for _ in range(60):
        value = vs.call("add", value, value)
    assert range_of(value)[1] >= 2**60


def test_what_a_check_makes_sure_of_proves_nothing() -> None:
    """Else the check of an index that is checked elsewhere would be left out everywhere."""
    assert range_of(vs.index_value(ix.indirect(I64, 8).expr())) == UNKNOWN
    assert range_of(vs.asserted(I64, compare("ge", I64, 0), "index")) == UNKNOWN


def test_bounds_of_floats_hold_for_what_is_cut_off() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        op, other = draw.choice(["lt", "le"]), draw.choice(["gt", "ge"])
        low, high = sorted(draw.choice([draw.uniform(-3, 3), float(draw.randrange(-3, 4))]) for _ in range(2))
        found = range_of(selected(both(compare(op, F32, high), compare(other, F32, low)), cut(F32), 0))
        t = draw.choice([draw.uniform(low, high), low, high, low + 1e-6, high - 1e-6])
        t = float(torch.tensor(t))
        ends = [float(torch.tensor(end)) for end in (low, high)]
        if (t < ends[1] or (op == "le" and t == ends[1])) and (t > ends[0] or (other == "ge" and t == ends[0])):
            assert found[0] <= math.trunc(t) <= found[1], (op, other, low, high, t)


# ---- in kernels -----------------------------------------------------------------------------------------------------------


def sampled(image: Tensor, at: Tensor) -> Tensor:
    return F.grid_sample(image, at, padding_mode="zeros", align_corners=False)


def clamp_gather(x: Tensor, i: Tensor) -> Tensor:
    return x[i.clamp(0, 6)] * 2


def remainder_gather(x: Tensor, i: Tensor) -> Tensor:
    return x[i % 7] + x[(i & 3) + 1]


WIDE = torch.tensor([-(2**63), -5, -1, 0, 3, 6, 7, 2**63 - 1])
FAR = torch.tensor([-9e5, -1.5, -1.0, -0.99, 0.0, 0.5, 0.999, 1.0, 1.01, 3e5])
BEYOND = torch.tensor([-3e38, 3e38, math.inf, -math.inf, math.nan])


def grid(points: Tensor) -> Tensor:
    return torch.stack(torch.meshgrid(points, points, indexing="ij"), -1)[None]


INSIDE: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "samples": (sampled, (torch.randn(1, 2, 5, 7), grid(FAR))),
    "clamped": (clamp_gather, (torch.randn(7, 3), WIDE)),
    "remainders": (remainder_gather, (torch.randn(7, 3), WIDE)),
}


@pytest.mark.cpu
@pytest.mark.interpret
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", INSIDE)
def test_no_check_of_what_is_inside(name: str, options: dict[str, Any]) -> None:
    fn, args = INSIDE[name]
    got = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    torch.testing.assert_close(got, fn(*args), rtol=1e-4, atol=1e-5)
    with kgen.config.override(**options):
        code = [kernel.source for graph in kgen.explain(fn, *args, print_report=False).graphs for kernel in graph.kernels]
    assert code
    assert not any("checked_index" in text or "device_assert" in text for text in code)


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_points_far_away_are_read_nowhere(options: dict[str, Any]) -> None:
    torch.compile(sampled, backend="kgen", fullgraph=True, options=options)(torch.randn(1, 2, 5, 7), grid(BEYOND))


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_indices_that_may_be_outside_are_checked(options: dict[str, Any]) -> None:
    def fn(x: Tensor, i: Tensor) -> Tensor:
        return x[i.clamp(0, 7)]

    with kgen.config.override(**options):
        [graph] = kgen.explain(fn, torch.randn(9, 3), WIDE, print_report=False).graphs
        assert not any("checked_index" in one.source or "device_assert" in one.source for one in graph.kernels)
        [graph] = kgen.explain(fn, torch.randn(7, 3), WIDE.clamp(0, 6), print_report=False).graphs
        assert any("checked_index" in one.source or "device_assert" in one.source for one in graph.kernels)


def test_an_index_outside_is_an_error() -> None:
    fn = torch.compile(lambda x, i: x[i.clamp(0, 7)], backend="kgen", fullgraph=True, options={"cache": False})
    with pytest.raises(IndexError):
        fn(torch.randn(7, 3), WIDE)


def test_what_changed_since_is_not_known() -> None:
    """The condition was made of numbers that are others by now."""

    def fn(x: Tensor, t: Tensor) -> Tensor:
        inside = (t >= 0) & (t < 7)
        t.mul_(3)
        return x[torch.where(inside, t.long(), 0)]

    compiled = torch.compile(fn, backend="kgen", fullgraph=True, options={"cache": False})
    t = torch.tensor([0.0, 1.0, 2.0, -9.0, 2.1])
    torch.testing.assert_close(compiled(x := torch.randn(7, 3), t.clone()), fn(x, t.clone()))
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([0.0, 1.0, 2.0, 3.0, 6.5]))
