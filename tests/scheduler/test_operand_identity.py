"""Operands are the same with their loops and extents, not as interned values alone: one number expanded to two shapes is one
value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from back_ends import BACK_ENDS, r
from torch import Tensor

from kgen.ir import values as vs
from kgen.ir.plan import ComboKernel, Schedule
from kgen.scheduler import Options
from tests.kernels import plans

pytestmark = pytest.mark.usefixtures("templates_win")


def left(t: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    e = t.expand(5, 4)
    return e.t() @ g, e @ w


def right(t: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return g.t() @ t.expand(5, 4), w.t() @ t.expand(4, 5)


def both(t: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return t.expand(5, 4) @ t.expand(4, 7), t.expand(4, 5) @ t.expand(5, 7), x @ t.expand(4, 7)


def rows(u: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Equal rows, of which the sums have other lengths."""
    return u[:, None].expand(5, 5) @ g, u[:, None].expand(5, 4) @ w


def columns(u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Equal sums, of other numbers of rows."""
    return u.expand(3, 5) @ g, u.expand(8, 5) @ g.relu()


def batches(u: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    e = u.expand(2, 3, 5)
    return e @ g, e[:1] @ g[:1].exp()


def split(t: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """As many numbers, in rows of another length."""
    return t.expand(4, 6) @ g, t.expand(6, 4) @ g[:4]


def sums(t: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    e = t.expand(5, 4)
    return e.t() @ g, e.sum(0), e.sum(1), e @ w, t.expand(5, 5).sum(0), e.sum()


def one_kernel(t: Tensor, g: Tensor, w: Tensor) -> Tensor:
    return t.expand(6, 5) @ g + t.expand(6, 4) @ w


CASES: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "left": (left, [r(), r(5, 6), r(4, 7)]),
    "right": (right, [r(), r(5, 6), r(4, 7)]),
    "both": (both, [r(), r(5, 4)]),
    "rows": (rows, [r(5), r(5, 6), r(4, 6)]),
    "columns": (columns, [r(5), r(5, 6)]),
    "batches": (batches, [r(5), r(2, 5, 6)]),
    "split": (split, [r(), r(6, 9)]),
    "sums": (sums, [r(), r(5, 6), r(4, 7)]),
    "one kernel": (one_kernel, [r(), r(5, 7), r(4, 7)]),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("options", BACK_ENDS.values())
@pytest.mark.parametrize("name", CASES)
def test_one_number_in_several_shapes(name: str, options: dict[str, Any]) -> None:
    fn, args = CASES[name]
    found = torch.compile(fn, backend="kgen", fullgraph=True, options=options)(*args)
    torch.testing.assert_close(found, fn(*args), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", BACK_ENDS.values())
def test_gradients_of_the_plainest_network(options: dict[str, Any]) -> None:
    def network(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, w)), v).sum()

    args = [r(8, 16).requires_grad_(), r(32, 16).requires_grad_(), r(12, 32).requires_grad_()]
    found = torch.autograd.grad(torch.compile(network, backend="kgen", options=options)(*args), args)
    torch.testing.assert_close(found, torch.autograd.grad(network(*args), args), rtol=1e-4, atol=1e-4)


def _joined(fn: Callable[..., Any], *args: Tensor) -> int:
    return sum(len(step.members) for step in plans(fn, *args).forward.steps if isinstance(step, ComboKernel))


def test_equal_arrays_still_share_a_kernel() -> None:
    def same(u: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return u[:, None].expand(4, 5) @ g, u[:, None].expand(4, 5) @ w

    assert _joined(same, r(4), r(5, 6), r(5, 7)) == 2
    assert _joined(rows, r(5), r(5, 6), r(4, 7)) == 0


def test_a_maximum_of_other_points_is_no_row_maximum() -> None:
    """The exponentials of each half of a row are rescaled by the maximum of the half, not by that of the row."""

    def halves(x: Tensor, w: Tensor) -> Tensor:
        y = (x @ w).view(64, 2, 2048)
        return (y - y.amax((1, 2), keepdim=True)).exp().sum(-1)

    args = [r(64, 32), r(32, 4096)]
    plan = plans(halves, *args, options=Options(gpu_everywhere=True)).forward
    folded = [s.op for step in plan.kernels for s in step.statements if s.kind == "partial"]
    assert folded == ["max"]


def test_scales_of_other_lengths_share_no_loops() -> None:
    """A slice of a longer row of statistics has the index of a shorter one."""

    def scaled(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return (x * (y.square().sum(-1)[:4] * x.square().sum(-1))[:, None]) @ w

    plan = plans(scaled, r(4, 5), r(8, 5), r(5, 6)).forward
    read = [(s, load) for step in plan.kernels for s in step.statements for load in vs.loads(s.roots)]
    assert all(e.bounds()[1] < size for _, load in read for e, size in zip(load.attr[1], _sizes(plan, load), strict=True))


def _sizes(plan: Schedule, load: vs.Value) -> list[int]:
    return [size.as_int() or 0 for size in plan.graph.buffers[load.attr[0]].sizes]
