"""Vector loops of a CPU's kernels: which loop the lanes are, how it is split, and what runs inside of a block of it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kgen
from kgen.build.toolchain import register_bytes
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel
from kgen.scheduler.tiling.loops import choose_loops
from tests.lowering.test_sorting_network import everything, rows_of
from tests.scheduler.selection.test_safe_choices import planned

pytestmark = pytest.mark.cpu


def source_of(f: Callable[..., Tensor], *args: Tensor) -> str:
    """The one kernel's text; its results are those of eager."""
    torch.testing.assert_close(torch.compile(f, backend="kgen")(*args), f(*args), rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    [graph] = kgen.explain(f, *args, print_report=False).graphs
    [kernel] = graph.kernels
    return kernel.source


def lanes(source: str) -> str:
    found = re.search(r"lanes: (\w+) x", source)
    assert found is not None
    return found[1]


def crossed(x: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.cross(x, y) * 2


def test_coordinates_run_inside_of_a_block_of_points() -> None:
    source = source_of(crossed, torch.randn(20001, 3), torch.randn(20001, 3))
    assert lanes(source) == "x0"
    assert "x1 = task % (3)" in source
    assert "load_every<3" in source


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x.flatten(1) * scale.repeat_interleave(40, 1) + 1


def test_groups_are_loops() -> None:
    source = source_of(scaled, torch.randn(50, 6, 40), torch.randn(50, 6))
    assert "gather" not in source
    assert "floordiv" not in source


def summed(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale.repeat_interleave(10, 1)[:, None]).sum(1)


def test_what_is_loaded_once_costs_little() -> None:
    source = source_of(summed, torch.randn(3, 500, 320), torch.randn(3, 32))
    assert lanes(source) == "x1"


def normalised(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, (0, 2), keepdim=True)
    return torch.relu((x - mean) * torch.rsqrt(var + 1e-5) * weight[:, None] + bias[:, None]).contiguous()


def test_columns_that_are_read_again_leave_tasks() -> None:
    x = torch.randn(4, 5000, 64).transpose(1, 2)
    source = source_of(normalised, x, torch.randn(64), torch.randn(64))
    assert "parallel_for(threads, 64," in source


def rotated_back(g: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """What the gradient of q or k is in front of interleaved rotary positions. The first token has none."""
    tokens = g[:, :, 1:]
    pairs = (tokens * sin).unflatten(-1, (4, 2))
    zeros = torch.zeros_like(tokens)
    turned = zeros.slice_scatter(-pairs[..., 0], -1, 1, 8, 2) + zeros.slice_scatter(pairs[..., 1], -1, 0, 8, 2)
    rest = torch.zeros_like(g).slice_scatter(turned + tokens * cos, 2, 1)
    return rest + torch.zeros_like(g).slice_scatter(g[:, :, :1], 2, 0, 1)


def bias_gradient(q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """q, k and v are columns of one row, as of one matmul."""
    parts = torch.stack([rotated_back(q, sin, cos), rotated_back(k, sin, cos), v])
    return parts.permute(1, 3, 0, 2, 4).reshape(-1, 96).sum(0)


def test_many_vectors_of_indices_take_one_register() -> None:
    q, k, v = torch.randn(3, 2, 4, 200, 8)
    sin, cos = torch.randn(2, 199, 8)
    source = source_of(bias_gradient, q, k, v, sin, cos)
    assert source.count("gather") > 4
    found = re.search(r"lanes: \w+ x (\d+)", source)
    assert found is not None
    assert int(found[1]) * 4 <= register_bytes()


def summed_columns(x: Tensor) -> Tensor:
    return x.sum(0)


@pytest.mark.parametrize(
    ("fn", "x", "registers"), [(summed_columns, torch.randn(500, 96), 4), (everything, rows_of(torch.int32, 9), 1)]
)
def test_lanes_of_many_values_take_one_register(fn: Callable[[Tensor], object], x: Tensor, registers: int) -> None:
    plan = planned(fn, x, gpu=False)
    found = [choose_loops(k, plan.graph, Sizes({}), 32) for k in plan.kernels if isinstance(k, Kernel) and k.inner]
    assert [(nest.vertical, nest.lanes) for nest in found] == [(True, 8 * registers)]
