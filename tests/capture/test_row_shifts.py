"""A softmax of what its rows' maxima were subtracted from becomes that of the rows, before gradients are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

import kgen
from kgen.capture.row_shifts import drop_row_shifts


def by_method(x: Tensor) -> Tensor:
    return (x - x.max(dim=-1, keepdim=True).values).softmax(-1)


def by_function(x: Tensor) -> Tensor:
    return F.softmax(torch.sub(x, torch.max(x, 1, True)[0]), dim=1)


def detached(x: Tensor) -> Tensor:
    return torch.softmax(x - x.amax(dim=-1, keepdim=True).detach(), dim=-1)


def widened(x: Tensor) -> Tensor:
    return F.softmax((x - x.amax((-1,)).unsqueeze(-1)).float(), dim=-1, dtype=torch.float64)


def divided(x: Tensor) -> Tensor:
    x = x / 32
    return ((x - x.amax(dim=-1).unsqueeze(-1)) * 32).softmax(-1)


def halved(x: Tensor) -> Tensor:
    return ((x - x.max(-1, keepdim=True)[0]) / 2).softmax(-1)


TAKEN = (by_method, by_function, detached, widened, divided, halved)


def of_another_axis(x: Tensor) -> Tensor:
    return (x - x.amax(1, keepdim=True)).softmax(-1)


def of_something_else(x: Tensor) -> Tensor:
    return (x - (2 * x).amax(-1, keepdim=True)).softmax(-1)


def multiplied(x: Tensor) -> Tensor:
    """The lowest number of a type times this is -inf."""
    return ((x - x.amax(-1, keepdim=True)) * 32).softmax(-1)


def negated(x: Tensor) -> Tensor:
    return ((x - x.amax(-1, keepdim=True)) * -1).softmax(-1)


def narrowed(x: Tensor) -> Tensor:
    return (x - x.amax(-1, keepdim=True)).softmax(-1, dtype=torch.float16)


def read_by_others(x: Tensor) -> Tensor:
    y = x - x.amax(-1, keepdim=True)
    return y.softmax(-1) * y


def of_all(x: Tensor) -> Tensor:
    return (x - x.max()).softmax(-1)


def minimum(x: Tensor) -> Tensor:
    return (x - x.min(-1, keepdim=True).values).softmax(-1)


def of_the_first(x: Tensor) -> Tensor:
    """Maxima of columns, of which those of the first matrix are subtracted from rows."""
    x = x[..., :4]
    return (x - x.amax(1)[0].unsqueeze(1)).softmax(1)


def of_rows_that_are_written(x: Tensor) -> Tensor:
    x = x + 1
    y = x - x.amax(-1, keepdim=True)
    x[..., 1] = 7
    return y.softmax(-1)


def of_maxima_that_are_written(x: Tensor) -> Tensor:
    top = x.amax(-1, keepdim=True)
    top[0] = math.nan
    return (x - top).softmax(-1)


def of_rows_that_are_results(x: Tensor) -> Tensor:
    x = x + 1
    y = x - x.amax(-1, keepdim=True)
    torch.mul(x, 2, out=x)
    return y.softmax(-1)


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x - x.amax(-1, keepdim=True)
    return y.softmax(-1)


LEFT = (
    of_another_axis, of_something_else, multiplied, negated, narrowed, read_by_others, of_all, minimum, of_the_first,
    of_rows_that_are_written, of_maxima_that_are_written, of_rows_that_are_results, without_gradients,
)  # fmt: skip


def captured(fn: Callable[..., Tensor], *args: Tensor) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=keep, fullgraph=True)(*args)
    return graphs[0]


def rows() -> Tensor:
    x = 5 * torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    x[0, 0] = torch.finfo(torch.float32).min
    x[0, 1, :3] = -math.inf
    return x


def differences(gm: GraphModule) -> list[str]:
    return [str(one.target) for one in gm.graph.nodes if getattr(one.target, "__name__", one.target) in ("sub", "max", "amax")]


@pytest.mark.parametrize("fn", TAKEN)
def test_the_subtraction_goes(fn: Callable[..., Tensor]) -> None:
    x = rows()
    gm = captured(fn, x)
    assert differences(gm)
    drop_row_shifts(gm)
    assert not differences(gm)
    torch.testing.assert_close(gm(x)[0], fn(x))
    strange = torch.tensor([[-math.inf, -math.inf], [math.inf, 0.0], [math.nan, 0.0]]).expand(2, 3, 2)
    assert gm(strange)[0].isnan().all() == fn(strange).isnan().all()


@pytest.mark.parametrize("fn", LEFT)
def test_what_is_left(fn: Callable[..., Tensor]) -> None:
    gm = captured(fn, rows())
    before = str(gm.graph)
    drop_row_shifts(gm)
    assert str(gm.graph) == before


@pytest.mark.cpu
def test_a_single_number() -> None:
    x = torch.tensor(3.0)
    assert torch.compile(lambda x: (x - x.amax(0)).softmax(0), backend="kgen", options={"strict": True})(x) == 1


@pytest.mark.cpu
def test_gradients_are_those_of_the_rows() -> None:
    """In the default mode; rounded as eager rounds, the subtraction stays."""
    x, g = rows()[1:].requires_grad_(), torch.randn(2, 4, 6)
    by_method(x.double()).backward(g.double())
    wanted, x.grad = x.grad, None
    for options in ({"strict": True}, {"strict": True, "numerics": "eager"}):
        torch._dynamo.reset()
        kgen.coverage_reset()
        torch.compile(by_method, backend="kgen", options=options)(x).backward(g)
        assert x.grad is not None
        torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-5)
        x.grad = None
