"""Loads of a GPU kernel without masks: of what many points of a tile share, where all of them may load it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kgen.device import Gpu
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule
from kgen.scheduler import choose_tiles
from tests.gpu_graphs import run
from tests.scheduler.selection.test_safe_choices import planned


def corner(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `x[:4, :500].mean()`, in rows of 1000."""
    return (F.pad((g / 3).expand(4, 500), (0, 500, 0, 4)) * x).sum(1)


def both_corners(g: Tensor, x: Tensor) -> Tensor:
    return ((F.pad(g.expand(4, 500), (0, 500, 0, 4)) - F.pad((g * 2).expand(4, 500), (500, 0, 4, 0))) * x).sum(1)


def short_row(row: Tensor, x: Tensor) -> Tensor:
    """The row has no element at most points."""
    return (F.pad(row.expand(4, 500), (0, 500, 0, 4)) * x).sum(1)


def whole_tile(y: Tensor, x: Tensor) -> Tensor:
    return (F.pad(y, (0, 500, 0, 4)) * x).sum(1)


X = torch.randn(8, 1000)


def masked(plan: Schedule, name: str) -> list[bool]:
    """Whether the loads of an argument have masks."""
    [kernel] = [step for step in plan.kernels if isinstance(step, Kernel)]
    tiling = choose_tiles(kernel, plan.graph, Sizes({}), Gpu())
    loads = vs.loads([root for s in tiling.kernel.statements for root in s.roots])
    return [bool(load.args) for load in loads if load.attr[0] == name]


@pytest.mark.parametrize("fn", [corner, both_corners])
def test_a_scalar_is_loaded_for_all_points(fn: object) -> None:
    plan = planned(fn, torch.randn(()), X)  # type: ignore[arg-type]
    assert masked(plan, plan.graph.inputs[0].buffer) == [False]


@pytest.mark.parametrize(("fn", "size"), [(short_row, (500,)), (whole_tile, (4, 500))], ids=["outside", "of each point"])
def test_others_keep_their_masks(fn: object, size: tuple[int, ...]) -> None:
    plan = planned(fn, torch.randn(size), X)  # type: ignore[arg-type]
    assert masked(plan, plan.graph.inputs[0].buffer) == [True]


@pytest.mark.interpret
@pytest.mark.parametrize("fn", [corner, both_corners])
def test_values(fn: object) -> None:
    run(fn, torch.randn(()), X, gpu_interpreter=True)  # type: ignore[arg-type]
