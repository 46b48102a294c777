"""Random complex numbers have two parts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.cpu

COUNT = 20_000
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(COUNT, dtype=x.dtype),
    "rand_like": torch.rand_like,
    "uniform": lambda x: x.clone().uniform_(-2, 3),
    "randn": lambda x: torch.randn(COUNT, dtype=x.dtype),
    "randn_like": torch.randn_like,
    "normal": lambda x: x.clone().normal_(1, 2),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_both_parts_are_distributed_as_in_eager(name: str, dtype: torch.dtype) -> None:
    x = torch.zeros(COUNT, dtype=dtype)
    torch._dynamo.reset()
    got = torch.compile(CALLS[name], backend="kgen", fullgraph=True, options={"cache": False})(x)
    want = CALLS[name](x)
    assert got.dtype is dtype
    for mine, theirs in zip((got.real, got.imag), (want.real, want.imag), strict=True):
        torch.testing.assert_close(mine.mean(), theirs.mean(), rtol=0, atol=0.08)
        torch.testing.assert_close(mine.std(), theirs.std(), rtol=0.05, atol=0)
    assert abs(torch.corrcoef(torch.stack([got.real, got.imag]))[0, 1]) < 0.05
