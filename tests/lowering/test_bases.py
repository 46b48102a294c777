"""Stacks of cheap functions of one number are chosen among at each element on a GPU, so that what permutes them stores them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.matmuls import compiled
from tests.scheduler.selection.test_safe_choices import planned


def polynomials(x: Tensor, count: int) -> Tensor:
    """Chebyshev's, of the tanh, in front of the features they belong to."""
    t = x.tanh()
    basis = [torch.ones_like(t), t]
    while len(basis) < count:
        basis.append(2 * t * basis[-1] - basis[-2])
    return torch.stack(basis, -1).transpose(1, 2).contiguous()


def of_two(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([x, y, x + y, x - y, x * y], -1).transpose(1, 2).contiguous()


def test_a_basis_is_stored_where_it_is_read() -> None:
    assert len(planned(lambda x: polynomials(x, 5), torch.empty(512, 128)).kernels) == 1
    assert len(planned(lambda x: polynomials(x, 9), torch.empty(512, 128)).kernels) > 1  # too many
    assert len(planned(of_two, torch.empty(512, 128), torch.empty(512, 128)).kernels) > 1


def test_stored_in_parts_on_a_cpu() -> None:
    plan = planned(lambda x: polynomials(x, 5), torch.empty(512, 128), gpu=False)
    assert any(buffer.parts for buffer in plan.graph.buffers.values())


@pytest.mark.interpret
@pytest.mark.parametrize(("count", "dtype"), itertools.product((5, 8), (torch.float32, torch.bfloat16)))
def test_values(count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 33).to(dtype)
    with torch.no_grad():
        got = compiled(lambda x: polynomials(x, count), x)
    torch.testing.assert_close(
        got.double(), polynomials(x.double(), count), atol=1e-5 if dtype == torch.float32 else 0.01, rtol=0
    )
