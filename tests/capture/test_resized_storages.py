"""Graphs that free or make the memory of an input, as hooks of sharded training do with weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_reads_a_storage_runs_before_it_is_freed(dynamic: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        x.untyped_storage().resize_(0)
        return y.cos()

    x = torch.randn(10)
    wanted = x.sin().cos()
    result = torch.compile(function, backend="kgen", fullgraph=True, dynamic=dynamic)(x)
    torch.testing.assert_close(result, wanted)
    assert x.untyped_storage().size() == 0


@torch.no_grad()
def test_a_freed_input_gets_memory_and_values() -> None:
    def function(x: Tensor, out: Tensor) -> Tensor:
        out.untyped_storage().resize_(x.untyped_storage().size())
        out.copy_(x.sin())
        return out * 2

    compiled = torch.compile(function, backend="kgen", fullgraph=True)
    for _ in range(2):
        x, out = torch.randn(10), torch.empty(10)
        out.untyped_storage().resize_(0)
        torch.testing.assert_close(compiled(x, out), x.sin() * 2)
        torch.testing.assert_close(out, x.sin())
