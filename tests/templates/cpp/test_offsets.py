"""Kernels that differ in the constant offsets of their accesses alone are one function, which gets the offsets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.build.unit import MANY_SIMILAR, UnitPlan, plan_units
from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Launch, Nest, Schedule, Statement
from kgen.rendered.kernel_call import Rendered
from kgen.scheduler import Options
from kgen.templates.cpp.codegen.constant_offsets import with_offsets_as_sizes
from tests.kernels import plans
from tests.rendering import cpp_function

F32 = torch.float32
COUNT = 6
# Kernels that write disjoint rows are one otherwise.
APART = Options(horizontal_fusion=False)


def rows(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[i] = b[i] + 1
    return b


def rows_of_next(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[i] = b[i + 1] * 2 + b[i]
    return b


def columns(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[:, i] = b[:, i] * x[0, i] + x[1]
    return b


def sums(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[i + 1] = b[i].sum() + b[i + 1]
    return b


def backwards(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[i + 1] = b[i].flip(0) + 1
    return b


def windows(x: Tensor, b: Tensor) -> Tensor:
    for i in range(COUNT):
        b[1:5, i : i + 2] = torch.softmax(b[2:6, i + 1 : i + 3], -1) + x[i, 1:3]
    return b


def gathered(x: Tensor, b: Tensor) -> Tensor:
    row_offsets = (x[0] > 0).long()
    for i in range(COUNT):
        b[i] = b[:, i + 1][row_offsets + i] + 1
    return b


def scattered(x: Tensor, b: Tensor) -> Tensor:
    row_offsets = (x > 0).long()
    for i in range(COUNT):
        b[i].scatter_add_(0, row_offsets[i], b[i + 1])
    return b


FUNCTIONS: list[Callable[[Tensor, Tensor], Tensor]] = [
    rows, rows_of_next, columns, sums, backwards, windows, gathered, scattered,
]  # fmt: skip


def units(schedule: Schedule) -> UnitPlan:
    def render(step: Launch, symbol: str) -> Rendered:
        return cpp_function(step, symbol, schedule.graph)

    return plan_units(schedule, render, 1)


def functions_of(count: int) -> UnitPlan:
    def write(b: Tensor) -> Tensor:
        for i in range(count):
            b[i] = b[i] + 1
        return b

    return units(plans(write, torch.zeros(count, 4), options=APART).forward)


@pytest.mark.parametrize("count", [MANY_SIMILAR + 1, 4 * MANY_SIMILAR])
def test_writes_of_rows_share_a_function(count: int) -> None:
    """The first row has no offset."""
    made = functions_of(count)
    assert len(made.functions) == 2
    assert [call.sizes for call in made.calls.values()] == [(), *((4 * i,) for i in range(1, count))]
    assert sum("const int64_t offset0 = ints[0];" in text for text in made.functions.values()) == 1


def test_a_few_functions_keep_their_offsets() -> None:
    made = functions_of(MANY_SIMILAR)
    assert len(made.functions) == MANY_SIMILAR
    assert all(call.sizes == () for call in made.calls.values())


def test_equal_offsets_are_one_size() -> None:
    i = ix.var("i", 8)
    loads = [vs.load("x", (i.expr() + k,), F32) for k in (3, 5, 3, 0)]
    statement = Statement("pointwise", ("y",), vs.call("add", vs.call("add", *loads[:2]), vs.call("mul", *loads[2:])), (i.expr() - 5,), False, -1, (True,))  # fmt: skip  # noqa: E501
    nest, offsets = with_offsets_as_sizes(Nest(Kernel("k", (i,), (), 0, (statement,)), None, 1))
    (made,) = nest.kernel.statements
    row_offsets = {str(load.attr[1][0]) for load in vs.loads([made.value])}
    assert row_offsets == {"i", "offset0 + i", "offset1 + i"}
    assert sorted(offsets.values()) == [-5, 3, 5]
    back = {ix.size(name, -(1 << 62), 1 << 62): ix.constant(number) for name, number in offsets.items()}
    assert vs.substitute(made.value, back) is statement.value
    assert ix.substitute(made.store[0], back) is statement.store[0]


@pytest.mark.every(2)
@pytest.mark.cpu
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_functions_with_offsets_are_right(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    x, b = torch.randn(8, 8), torch.randn(8, 8)
    expected = function(x, b.clone())
    torch.testing.assert_close(torch.compile(function, backend="kgen")(x, b.clone()), expected)
    shared = units(plans(function, x, b.clone(), options=APART).forward)
    assert any(isinstance(size, int) for call in shared.calls.values() for size in call.sizes)


@pytest.mark.cpu
def test_offsets_stand_beside_sizes() -> None:
    @torch.compile(backend="kgen", dynamic=True)
    def write(b: Tensor) -> Tensor:
        for i in range(COUNT):
            b[i] = b[i] * b.shape[1] + 1
        return b

    torch._dynamo.reset()
    for width in (5, 9):
        b = torch.randn(COUNT, width)
        expected = b * width + 1
        torch.testing.assert_close(write(b), expected)
