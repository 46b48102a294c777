"""What is computed and then read at computed positions: stored for all readers, or computed where few elements are read."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from op_case import check
from torch import Tensor

from kgen.ir.nodes import Graph, Pointwise


def roi(x: Tensor, which: Tensor, grid: Tensor) -> Tensor:
    """Each region samples the whole image that it belongs to."""
    return F.grid_sample(x[which], grid, align_corners=False)


def corners(x: Tensor, which: Tensor, grid: Tensor) -> Tensor:
    """Four readers of one computed tensor."""
    y, x0 = torch.sigmoid(x).exp().tanh() * x.sin(), which % x.shape[-1]
    return y[..., x0] + y[..., x0.flip(0)] * y[..., (x0 + 1) % x.shape[-1]] - y[..., x0 // 2]


def inputs(points: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, 2, 9, 7, generator=made),
        torch.randint(3, (5,), generator=made),
        torch.rand(5, points, points, 2, generator=made) * 2 - 1,
    ]


def stored(graph: Graph, elements: int) -> int:
    """Pointwise nodes in front of the last that store so many elements."""
    sizes = [[v.extent.as_int() or 0 for v in n.vars] for n in graph.nodes[:-1] if isinstance(n, Pointwise)]
    return sum(torch.Size(one).numel() == elements for one in sizes)


@pytest.mark.parametrize(("points", "copies"), [(3, 0), (12, 1)])
def test_images_that_are_picked_are_stored_where_most_of_them_is_read(points: int, copies: int) -> None:
    assert stored(check(roi, inputs(points)), 5 * 2 * 9 * 7) == copies


def test_readers_share_what_was_stored() -> None:
    x, _, _ = inputs(1)
    which = torch.randint(7, (30,), generator=torch.Generator().manual_seed(1))
    assert stored(check(corners, [x, which, x]), x.numel()) == 1
