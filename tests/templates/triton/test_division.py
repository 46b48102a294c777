"""Division of tiles by one number a row: signs, zeros, infinities and NaN as IEEE has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.templates.triton.codegen.table import division_by_power, literal
from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned

SPECIAL = [0.0, -0.0, 1.0, -3.0, 1e-38, -1e-45, 3e38, float("inf"), float("-inf"), float("nan"), 7.1e-31, 1.3e30]


def divided(x: Tensor, y: Tensor) -> Tensor:
    return x / y.amax(-1, keepdim=True)


@pytest.mark.interpret
def test_special_values() -> None:
    x = torch.tensor(SPECIAL).repeat(len(SPECIAL), 4)
    y = torch.tensor(SPECIAL)[:, None].expand(-1, 48).contiguous()
    want, got = divided(x, y), compiled(divided, x, y)
    plain = want.isfinite() & (want.abs() > 2.0**-100)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])
    assert torch.equal(got == 0, want == 0)
    torch.testing.assert_close(got[plain], want[plain], rtol=2e-7, atol=0)  # the interpreter's fma rounds twice


@pytest.mark.interpret
def test_random_values() -> None:
    x, y = torch.randn(64, 300) * 100, torch.randn(64, 300)
    torch.testing.assert_close(compiled(divided, x, y), divided(x, y), rtol=2e-7, atol=0)


@pytest.mark.gpu
def test_it_rounds_as_a_division_does() -> None:
    x, y = torch.randn(4096, 1000, device="cuda") * 100, torch.randn(4096, 1000, device="cuda")
    assert torch.equal(torch.compile(divided, backend="kgen")(x, y), divided(x, y))


def test_rows_are_one_kernel() -> None:
    [kernel] = planned(divided, torch.empty(64, 300), torch.empty(64, 300)).kernels
    assert kernel.inner


@pytest.mark.interpret
def test_powers_of_two_of_float64() -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(500)]).double()
    for number in (2.0**24, -0.5, 2.0**-60, 3.0):
        got = compiled(lambda x, number=number: x / number, x)
        assert torch.equal(got.nan_to_num(nan=7.0), (x / number).nan_to_num(nan=7.0))


def test_which_divisions_are_multiplications() -> None:
    assert division_by_power("t0", 2.0**24) == f"t0 * {literal(2.0**-24, torch.float64)}"
    assert division_by_power("t0", -0.5) == f"t0 * {literal(-2.0, torch.float64)}"
    assert [division_by_power("t0", n) for n in (3.0, 0.0, float("inf"), float("nan"), 2.0**120)] == [None] * 5
