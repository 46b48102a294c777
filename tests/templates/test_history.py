"""Kernels do not depend on what a process has compiled before: two models give the same ones in either order."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kgen.report.record import Record, recording

pytestmark = pytest.mark.cpu
BACK_ENDS: dict[str, dict[str, Any]] = {"cpp": {}, "triton": {"gpu_interpreter": True}}


def sines(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.sin() - y.exp()


def sines_later(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.cos() + y.exp() * x.sin()


def rows(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return x.view(-1)[i * 3 + j] - y.view(-1)[j * 3 + i]


def rows_later(x: Tensor, y: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (x + y).view(-1)[j * 5 + (i + 0 * j)] + y.view(-1)[j] - x.view(-1)[i]


def texts(fn: Callable[..., Tensor], shape: tuple[int, int], options: dict[str, Any]) -> list[str]:
    """What is compiled, without the lengths of dimensions."""
    torch._dynamo.reset()
    args = *torch.randn(2, *shape).unbind(), torch.arange(shape[1]) % 5, torch.arange(shape[1]) % 4
    with recording() as seen, torch.no_grad():
        torch.compile(fn, backend="kgen", options={"cache": False, **options})(*args)
    (graph,) = seen.graphs
    assert isinstance(graph, Record)
    calls = graph.units.calls.values()
    made = [*graph.units.functions.values(), *(call.launch.source for call in calls if call.launch is not None)]
    return [text.replace(str(math.prod(shape)), "all").replace(str(shape[1]), "columns") for text in made]


@pytest.mark.parametrize("options", BACK_ENDS.values(), ids=BACK_ENDS)
@pytest.mark.parametrize(("fn", "before"), [(sines, sines_later), (rows, rows_later)], ids=["points", "indices"])
def test_a_kernel_does_not_depend_on_what_was_compiled_before(
    fn: Callable[..., Tensor], before: Callable[..., Tensor], options: dict[str, Any]
) -> None:
    """Of two lengths: of the second one nothing is known when the first is compiled."""
    first, again = ((7, 743), (7, 751)) if options else ((7, 743), (7, 757))
    fresh = texts(fn, first, options)
    texts(before, again, options)
    assert texts(fn, again, options) == fresh
