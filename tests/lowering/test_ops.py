"""The scalar-op table: rows are well formed, and every reference runs on every dtype that its row admits."""

from __future__ import annotations

import math

import pytest
import torch

from kgen.ir import ops
from kgen.reference.evaluate_value import apply


def arguments(row: ops.ScalarOp, dtype: torch.dtype) -> list[torch.Tensor]:
    if dtype is torch.bool:
        base = torch.tensor([True, False, True, False])
    else:
        base = torch.tensor([1, 2, 3, 5]).double() * (0.25 if dtype.is_floating_point else 1)
    args = [(base if k == 0 else base.flip(0)).to(dtype) for k in range(row.arity)]
    if row.name == "where":
        args[0] = torch.tensor([True, False, True, False])
    if row.name == "polygamma":
        args[1] = torch.ones(4, dtype=dtype)
    if row.name.endswith(("_polynomial_h", "_polynomial_l")) or "_polynomial_" in row.name:
        args[1] = torch.full((4,), 2, dtype=dtype)
    return args


CASES = [(row, dtype) for row in ops.OPS.values() for dtype in ops.admitted(row.admits)]


@pytest.mark.parametrize(("row", "dtype"), CASES, ids=lambda v: v.name if isinstance(v, ops.ScalarOp) else str(v)[6:])
def test_reference_runs_and_gives_the_dtype_of_the_row(row: ops.ScalarOp, dtype: torch.dtype) -> None:
    args = arguments(row, dtype)
    result = apply(row.name, *args)
    assert result.shape == (4,)
    assert result.dtype == ops.result_dtype(row.name, tuple(a.dtype for a in args))


def test_rows_are_well_formed() -> None:
    for name, row in ops.OPS.items():
        assert row.name == name
        assert row.arity in (1, 2, 3)
        assert row.cost >= 1
        assert row.result in (ops.FIRST, ops.LAST) or isinstance(row.result, torch.dtype)
        assert ops.admitted(row.admits)
        assert name not in ops.STRUCTURAL
    assert set(ops.COSTS) == set(ops.STRUCTURAL)


def test_reductions_combine_with_operations_that_admit_their_dtypes() -> None:
    for name, row in ops.REDUCTIONS.items():
        assert row.name == name
        if row.combine is not None:
            assert set(ops.admitted(row.admits)) <= set(ops.admitted(ops.OPS[row.combine].admits))


@pytest.mark.parametrize("op", [name for name, row in ops.REDUCTIONS.items() if row.combine])
def test_identity_leaves_every_value_unchanged(op: str) -> None:
    row = ops.REDUCTIONS[op]
    for dtype in ops.admitted(row.admits):
        value = arguments(ops.OPS[row.combine], dtype)[0]
        neutral = torch.tensor(ops.identity(op, dtype), dtype=dtype).expand(4).contiguous()
        assert torch.equal(apply(row.combine, value, neutral), value)


@pytest.mark.parametrize("op", ["argmax", "argmin"])
def test_identity_of_an_extreme_loses_to_everything(op: str) -> None:
    for dtype in ops.COMPUTE_DTYPES:
        worst = ops.identity(op, dtype)
        assert worst == {"argmax": min, "argmin": max}[op](worst, ops.identity("argmax", dtype), ops.identity("argmin", dtype))


def test_nan_rules() -> None:
    nan, one = torch.tensor([math.nan, 1.0]), torch.tensor([1.0, math.nan])
    assert apply("maximum", nan, one).isnan().all()
    assert apply("minimum", nan, one).isnan().all()
    assert apply("fmax", nan, one).tolist() == [1.0, 1.0]
    assert apply("fmin", nan, one).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("op", ["floordiv", "truncdiv", "remainder", "fmod"])
@pytest.mark.parametrize("dtype", ops.admitted(ops.INTEGER), ids=lambda d: str(d)[6:])
def test_integer_division_never_traps(op: str, dtype: torch.dtype) -> None:
    least = torch.iinfo(dtype).min
    a = torch.tensor([least] * 17 + [7] * 17).to(dtype)
    b = torch.tensor([-1 if dtype.is_signed else 1] * 17 + [0] * 17).to(dtype)
    assert apply(op, a, b).dtype == dtype


def test_integer_division_follows_torch() -> None:
    a, b = torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])
    assert apply("floordiv", a, b).tolist() == [3, -4, -4, 3]
    assert apply("truncdiv", a, b).tolist() == [3, -3, -3, 3]
    assert apply("truncdiv", a, torch.full((4,), -1)).tolist() == [-7, 7, -7, 7]
    assert apply("remainder", a, b).tolist() == [1, 1, -1, -1]
    assert apply("fmod", a, b).tolist() == [1, -1, 1, -1]


def test_fma_rounds_once() -> None:
    a = torch.tensor([1 + 2.0**-12])
    assert apply("fma", a, a, -(a * a)).item() != 0.0


def test_compute_dtype_widens_narrow_floats_only() -> None:
    assert {ops.compute_dtype(d) for d in ops.NARROW_FLOATS} == {torch.float32}
    assert all(ops.compute_dtype(d) is d for d in ops.COMPUTE_DTYPES)
