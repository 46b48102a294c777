"""Column sums that ride on a CPU's kernels of rows: shares of the rows have sums of their own, whatever the threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.record import Record, recording
from kgen.scheduler import Options, columns
from kgen.scheduler.columns import MAX_SHARES, MIN_SHARES, SHARE_BYTES
from tests.test_columns import carriers, layer_norm_backward, plan_of, r, softmax_backward

pytestmark = pytest.mark.cpu

CPU = Options()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shared out however little they are."""
    monkeypatch.setattr(columns, "SHARE_BYTES", 1 << 15)
    monkeypatch.setattr(columns, "MIN_SHARES", 2)


def run(f: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> Any:
    torch._dynamo.reset()
    return torch.compile(f, backend="kgen", dynamic=dynamic, fullgraph=True, options={"cache": False})(*args)


def check(f: Callable[..., Any], *args: Tensor, rtol: float = 1e-4, carrying: int = 1) -> None:
    """Agrees with float64 on copies of the arguments, which end as eager's do; `carrying` kernels of rows sum columns."""
    assert len(carriers(plan_of(f, *(a.clone() for a in args), options=CPU))) == carrying
    mine, wide = [a.clone() for a in args], [a.double() if a.is_floating_point() else a.clone() for a in args]
    with torch.no_grad():
        got, want = run(f, *mine), f(*wide)
    for one, other in zip((*got, *mine), (*want, *wide), strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=rtol, atol=rtol * float(other.abs().max()))


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "length", "shares"),
    [
        (4096, 1024, 64),
        (4 * SHARE_BYTES // 1024, 1024, MIN_SHARES),
        (4 * SHARE_BYTES // 1024 - 64, 1024, 0),
        (20, 1 << 16, 0),
        (1 << 17, 512, MAX_SHARES),
    ],
)
def test_rows_are_shared_out_by_their_bytes(rows: int, length: int, shares: int) -> None:
    plan = plan_of(layer_norm_backward, r(rows, length), r(rows, length), r(length), options=CPU)
    assert [k.share.extent.as_int() for k in carriers(plan) if k.share is not None] == ([shares] if shares else [])


def test_the_first_walk_with_all_values_adds_them() -> None:
    """Gradients of weight and bias need what the first walk reads; that of a softmax needs what the second makes."""

    def with_mean(dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        unit = (x - mean) * scale
        return dy - unit * (dy * unit).mean(-1, keepdim=True), (dy * unit).sum(0), dy.sum(0)

    big, one = (r(4096, 1024), r(4096, 1024)), r(4096, 1)
    for f, args, section in ((with_mean, (*big, one, one), 0), (softmax_backward, big, 1)):
        [carrier] = carriers(plan_of(f, *args, options=CPU))
        assert {s.section for s in carrier.statements if s.kind == "column"} == {section}
        assert carrier.sections == 2


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("rows", "length"), [(300, 64), (299, 100), (1000, 40), (400, 513), (200, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_gradients_of_a_normalisation(rows: int, length: int, dtype: torch.dtype) -> None:
    tolerance = 1e-4 if dtype is not torch.bfloat16 else 2e-2
    check(layer_norm_backward, r(rows, length).to(dtype), r(rows, length).to(dtype), r(length), rtol=tolerance)


@pytest.mark.usefixtures("small")
def test_what_is_made_and_summed() -> None:
    check(softmax_backward, r(300, 100), r(300, 100))


@pytest.mark.usefixtures("small")
def test_rows_of_two_loops() -> None:
    def f(x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        dx = x * (g - (g * x).sum(-1, keepdim=True))
        return dx, dx.sum((0, 1)), (g * x).reshape(-1, x.shape[-1]).sum(0)

    check(f, r(4, 75, 64), r(4, 75, 64))


@pytest.mark.usefixtures("small")
def test_columns_of_two_dimensions() -> None:
    def f(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        dw = g * w
        return dw - dw.mean((1, 2), keepdim=True), (x * g).sum(0) + (dw * x).sum(0)

    check(f, r(600, 6, 32), r(6, 32), r(600, 6, 32))


def centred(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    p = x
    for other in others:
        p = p * other
    return p - p.mean((1, 2), keepdim=True), p.sum(0), x.sum(0)


def turned(*sizes: int) -> Tensor:
    return r(sizes[0], sizes[2], sizes[1]).transpose(1, 2)


@pytest.mark.usefixtures("small")
def test_lanes_that_walk_across_the_sums_stay_apart() -> None:
    """The rows lie in memory in another order than their columns' sums."""
    check(centred, turned(500, 32, 48), turned(500, 32, 48), carrying=0)


@pytest.mark.usefixtures("small")
def test_lanes_that_walk_across_the_sums_add_to_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which loop becomes lanes is chosen later."""
    monkeypatch.setattr(columns._Carrier, "_turned", lambda *_: False)
    check(centred, turned(500, 32, 48), turned(500, 32, 48))


@pytest.mark.usefixtures("small")
def test_a_gradient_that_accumulates_in_place() -> None:
    def f(x: Tensor, g: Tensor, total: Tensor) -> tuple[Tensor]:
        dx, db = softmax_backward(g, x)
        total.add_(db)
        return (dx,)

    check(f, r(500, 64), r(500, 64), r(64))


@pytest.mark.usefixtures("small")
def test_rows_that_are_overwritten() -> None:
    def f(x: Tensor, g: Tensor) -> tuple[Tensor]:
        db = (x * g).sum(0)
        x.copy_(x.softmax(-1))
        return (db,)

    check(f, r(500, 64), r(500, 64), carrying=0)


@pytest.mark.usefixtures("small")
def test_sums_that_a_step_before_the_rows_needs() -> None:
    def f(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        db = x.sum(0)
        return db, (x * (db.amax() + w)).softmax(-1)

    check(f, r(500, 64), r(1, 64), carrying=0)


@pytest.mark.usefixtures("small")
def test_a_scan_of_rows_stays_apart() -> None:
    check(lambda x, y: (x.cumsum(-1), (x * y).sum(0)), r(600, 48), r(600, 48), carrying=0)


@pytest.mark.usefixtures("small")
def test_integers_and_wide_numbers() -> None:
    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x - x.amax(-1, keepdim=True), x.sum(0), y - y.amax(-1, keepdim=True), (y * 2).sum(0)

    check(f, torch.randint(-99, 99, (900, 40)), r(900, 40).double(), carrying=2)


@pytest.mark.usefixtures("small")
def test_sums_of_one_number_for_all_lanes() -> None:
    def f(x: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        return x.softmax(-1), (x * 0 + s).sum(0), s.expand_as(x).sum(0)

    check(f, r(500, 64), r(500, 1))


def test_results_are_the_same_with_any_number_of_threads() -> None:
    args = r(4096, 1024), r(4096, 1024), r(1024)
    compiled = torch.compile(layer_norm_backward, backend="kgen", options={"cache": False})
    before = torch.get_num_threads()
    torch._dynamo.reset()
    try:
        found = []
        for threads in (1, 2, 3, 1):
            torch.set_num_threads(threads)
            found.append(compiled(*args))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for result in found[1:] for one, other in zip(found[0][1:], result[1:], strict=True))


@pytest.mark.usefixtures("small")
def test_a_number_of_rows_at_run_time() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(softmax_backward, backend="kgen", options={"cache": False})
    with recording() as recorder:
        for rows in (400, 901, 3):
            g, y = r(rows, 64), r(rows, 64)
            for t in (g, y):
                torch._dynamo.mark_dynamic(t, 0)
            torch.testing.assert_close(compiled(g, y), softmax_backward(g, y), rtol=1e-4, atol=1e-4)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    assert len(carriers(graph.plan)) == 1
