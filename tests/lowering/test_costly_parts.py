"""Parts that cost much are written one by one: selected inside one value, each element would compute all of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from op_case import check
from torch import Tensor

from kgen.ir.nodes import Pointwise


def sampled(x: Tensor, grid: Tensor) -> list[Tensor]:
    return [F.grid_sample(x[..., k:], grid, align_corners=False) for k in range(3)]


WHOLES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "stack": (lambda x, grid: torch.stack(sampled(x, grid), -2).flatten(-2).sum(-1), 3),
    "cat": (lambda x, grid: torch.cat(sampled(x, grid), -1).sum(-1), 3),
    "cheap stack": (lambda x, grid: torch.stack([x.sin(), x.cos(), x], -2).sum(-1), 0),
}


@pytest.mark.parametrize("name", WHOLES)
def test_parts_that_cost_much_are_written(name: str) -> None:
    made = torch.Generator().manual_seed(0)
    args = [torch.randn(2, 3, 6, 8, generator=made), torch.rand(2, 5, 4, 2, generator=made) * 2 - 1]
    function, parts = WHOLES[name]
    graph = check(function, args)
    written = {n.out for n in graph.nodes if isinstance(n, Pointwise) and graph.buffers[n.out].is_part}
    assert len(written) == parts
