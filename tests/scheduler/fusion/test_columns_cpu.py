"""Column sums that ride on a CPU's kernels of rows: shares of the rows have sums of their own, whatever the threads."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kgen.scheduler import Options
from kgen.scheduler.transforms import column_reduction
from kgen.scheduler.transforms.column_reduction import MAX_SHARES, MIN_SHARES, SHARE_BYTES
from kgen.verdict import Reason
from tests.scheduler.fusion import test_columns
from tests.scheduler.fusion.test_columns import (
    accumulating,
    carriers,
    check_a_number_of_rows,
    integers_and_wide,
    layer_norm_backward,
    overwriting,
    plan_of,
    r,
    softmax_backward,
    sums_of_two_dimensions,
    sums_over_two_loops,
)

pytestmark = pytest.mark.cpu

CPU = Options()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are shared out however little they are."""
    monkeypatch.setattr(column_reduction, "SHARE_BYTES", 1 << 15)
    monkeypatch.setattr(column_reduction, "MIN_SHARES", 2)


check = partial(test_columns.check, planned=CPU, cache=False)


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


def test_rows_that_lie_across_add_nothing() -> None:
    """Lanes go along the rows where sums of columns ride: three of four tensors have their neighbours from row to row."""

    def f(dy: Tensor, x: Tensor, z: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        t = dy.transpose(1, 2)
        total = (t * x * w[:, None]).sum(1, keepdim=True)
        return x * total + z, (t * x).sum((0, 2)), t.sum((0, 2))

    plan = plan_of(f, r(32, 700, 128), r(32, 128, 700), r(32, 128, 700), r(128), options=CPU)
    assert not carriers(plan)
    assert any(v.reason is Reason.LAYOUT_CONFLICT for v in plan.verdicts)


# ---- results --------------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
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
    check(sums_over_two_loops, r(4, 75, 64), r(4, 75, 64))


@pytest.mark.usefixtures("small")
def test_columns_of_two_dimensions() -> None:
    check(sums_of_two_dimensions, r(600, 6, 32), r(6, 32), r(600, 6, 32))


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
    monkeypatch.setattr(column_reduction._Carrier, "_turned", lambda *_: False)
    check(centred, turned(500, 32, 48), turned(500, 32, 48))


@pytest.mark.usefixtures("small")
def test_a_gradient_that_accumulates_in_place() -> None:
    check(accumulating, r(500, 64), r(500, 64), r(64))


@pytest.mark.usefixtures("small")
def test_rows_that_are_overwritten() -> None:
    check(overwriting, r(500, 64), r(500, 64), carrying=0)


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
    check(integers_and_wide, torch.randint(-99, 99, (900, 40)), r(900, 40).double(), carrying=2)


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
    check_a_number_of_rows()
