"""Sums of all elements beside reductions of rows: in one kernel with these, and right in the interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kgen.ir.plan import Kernel, members
from kgen.scheduler import Options
from kgen.scheduler.transforms import row_totals
from kgen.verdict import Reason
from tests.kernels import plans

ROWS, LENGTH = 600, 70


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_totals, "LARGE", ROWS * LENGTH)


def divergence(x: Tensor, y: Tensor) -> Tensor:
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    return (p.exp() * (p - q)).sum() / len(x)


def extremes(x: Tensor) -> tuple[Tensor, ...]:
    return x.amax(1), x.amin(), x.sum(1), (x > 2).any()


def of_pages(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(2), (x * x).sum()


CASES: dict[str, tuple[Callable[..., object], list[Tensor]]] = {
    "a divergence": (divergence, [torch.randn(ROWS, LENGTH), torch.randn(ROWS, LENGTH)]),
    "16 bits": (divergence, [torch.randn(ROWS, LENGTH).bfloat16(), torch.randn(ROWS, LENGTH).bfloat16()]),
    "extremes": (extremes, [torch.randn(ROWS, LENGTH)]),
    "rows of pages": (of_pages, [torch.randn(2, ROWS, LENGTH)]),
}


def kernels(fn: Callable[..., object], *args: Tensor, **more: bool) -> list[Kernel]:
    plan = plans(fn, *args, options=Options(gpu_everywhere=True, **more)).forward
    return [one for step in plan.kernels for one in members(step)]


def over_all(found: list[Kernel], x: Tensor) -> list[Kernel]:
    """The kernels that walk all elements in one row: totals that no kernel of rows has."""
    return [k for k in found if math.prod(v.extent.as_int() or 0 for v in k.inner) == x.numel()]


@pytest.mark.interpret
@pytest.mark.cpu
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_eager(name: str) -> None:
    fn, args = CASES[name]
    assert not over_all(kernels(fn, *args), args[0])
    torch._dynamo.reset()
    step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
    torch.testing.assert_close(step(*args), fn(*args))


def test_one_kernel_reads_what_a_divergence_is_made_of() -> None:
    rows, total = kernels(divergence, *CASES["a divergence"][1])
    assert [v.extent.as_int() for v in rows.outer] == [ROWS]
    assert [v.extent.as_int() for v in total.inner] == [ROWS]


def test_a_total_that_the_rows_need_stays_whole() -> None:
    """One kernel could not have both the rows of the total and those of what is divided by it."""

    def fn(x: Tensor) -> Tensor:
        return (x / (x * x).sum()).amax(1)

    x = torch.randn(ROWS, LENGTH)
    plan = plans(fn, x, options=Options(gpu_everywhere=True)).forward
    assert not any(row_totals._ROWS in s.outs[0] for step in plan.kernels for k in members(step) for s in k.statements)
    assert any(v.reason is Reason.NO_SAVING for v in plan.verdicts)


@pytest.mark.parametrize(
    ("fn", "more"),
    [(lambda x: ((x * x).sum(), x.sin().amax(0)), {}), (lambda x: (x.sum(), x.amax(1)), {"stable": True})],
    ids=["columns", "the order of additions stays"],
)
def test_left_whole(fn: Callable[..., object], more: dict[str, bool]) -> None:
    assert not any(row_totals._ROWS in s.outs[0] for k in kernels(fn, torch.randn(ROWS, LENGTH), **more) for s in k.statements)


def test_many_totals_stay_whole() -> None:
    """A kernel that holds a row has registers for few sums more."""

    def several(x: Tensor) -> tuple[Tensor, ...]:
        return x.amax(1), x.amin(), x.exp().sum(), (x * x).sum()

    x = torch.randn(ROWS, LENGTH)
    plan = plans(several, x, options=Options(gpu_everywhere=True)).forward
    assert not any(name.endswith("_rows") for name in plan.graph.buffers)
