"""Indices without a stride along the lanes: rolled, clamped, mirrored, divided. Lanes that read a run of neighbours load it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from kgen.ir import index as ix
from kgen.templates.cpp.codegen.lane_steps import steps_of

pytestmark = pytest.mark.cpu


def rolled(x: Tensor) -> Tensor:
    return torch.roll(x, (1, -2), (0, 1)) + x


def mirrored(x: Tensor) -> Tensor:
    return F.pad(x[None], (3, 2, 2, 3), mode="reflect")[0] * 2


def clamped(x: Tensor) -> Tensor:
    return F.pad(x[None], (3, 2, 2, 3), mode="replicate")[0] * 2


def scaled(x: Tensor) -> Tensor:
    """Each 128 columns have a scale, the last ones too, which are fewer."""
    p = F.pad(x, (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    return (p / p.abs().amax(-1, keepdim=True).clamp(1e-4)).flatten(1)[:, : x.shape[1]]


def best_of_rolled(x: Tensor) -> Tensor:
    """One loop stands for both dimensions, which begin again apart from each other."""
    return torch.roll(x, (1, -2), (1, 2)).flatten(1).amax(1)


def source_of(f: Callable[..., Tensor], *args: Tensor) -> str:
    torch._dynamo.reset()
    [graph] = kgen.explain(f, *args, print_report=False).graphs
    return "".join(kernel.source for kernel in graph.kernels)


@pytest.mark.parametrize("f", [rolled, mirrored, clamped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_runs(f: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for columns in (40, 67, 130):
        torch._dynamo.reset()
        x = (torch.randn(9, columns) * 50).to(dtype)
        assert torch.equal(torch.compile(f, backend="kgen")(x), f(x))
    source = source_of(f, x)
    assert "gather_run<" in source
    assert " gather<" not in source


def test_runs_of_reduced_dimensions() -> None:
    for columns in (64, 67, 130):
        torch._dynamo.reset()
        x = torch.randn(3, 9, columns)
        assert torch.equal(torch.compile(best_of_rolled, backend="kgen")(x), best_of_rolled(x))
    source = source_of(best_of_rolled, x)
    assert "gather_run<" in source
    assert " gather<" not in source


def test_groups_of_the_last_columns() -> None:
    for columns in (64, 200, 300):
        torch._dynamo.reset()
        x = torch.randn(5, columns)
        assert torch.equal(torch.compile(scaled, backend="kgen")(x), scaled(x))


def test_steps() -> None:
    v, u = ix.var("v", 1000), ix.var("u", 8)
    one = v.expr()

    def kind(expr: ix.Expr) -> str | None:
        steps = steps_of(expr, v, 16)
        return None if steps is None else steps.kind(16)

    assert kind(ix.mod(one + 5, 1000) + u.expr() * 1000) == "run"
    assert kind(ix.floordiv(one, 128) + u.expr()) == "number"
    assert kind(ix.floordiv(one, 128) * 3) == "number"
    assert kind(ix.floordiv(one, 3)) == ""  # no vector has one element
    assert kind(ix.mod(one, 20)) == ""  # most vectors begin again
    assert kind(ix.mod(one * -1 + 2000, 1000)) is None
    assert kind(ix.mod(one, 500) * 2) == ""


@pytest.mark.parametrize("by", [3, 7, 100, 1501])
def test_quotients_of_lanes(by: int) -> None:
    """Numbers of points, which kernels multiply where machines divide."""
    x = torch.arange(3 * by + 5)

    def f(x: Tensor) -> Tensor:
        wide = x.expand(4, -1).flatten()
        return wide.repeat(3)[: 11 * len(x) - 1] * 2

    assert "floordiv_" not in source_of(f, x)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(f, backend="kgen")(x), f(x))


def test_quotients_of_data_are_no_runs() -> None:
    """Of an enlarged image columns are read at indices from data: the first lane says nothing of the last one."""
    x, at = torch.randn(1, 2, 4, 3), torch.tensor([-1, 0, -1, 0, 0, 5, 2])

    def columns(x: Tensor, at: Tensor) -> Tensor:
        return F.interpolate(x * 2, scale_factor=2)[..., at] * 2

    made = torch.compile(columns, backend="kgen", options={"cache": False, "strict": True})(x, at)
    torch.testing.assert_close(made, columns(x, at))
