"""Quotients by one number, which vectors share: a reciprocal and its rest give them, signs of zeros among them."""

from __future__ import annotations

import pytest
import torch

from tests.matmuls import compiled

ZEROS = (0.0, -0.0, 1e-3, -1e-3, float("inf"), -float("inf"), float("nan"))


@pytest.mark.cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("divisor", [10.0, -10.0, 3.0, 0.1, 1e30, -7e-31, 0.0, -0.0])
def test_quotients_by_one_number_are_eagers(dtype: torch.dtype, divisor: float) -> None:
    x = torch.tensor(ZEROS * 9, dtype=dtype)
    for fn in (lambda x: x / divisor, lambda x: x.round(decimals=1)):
        got, want = compiled(fn, x), fn(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        numbers = ~want.isnan()
        assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])
