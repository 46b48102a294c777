"""Sums of products that are cut into parts: results, what is launched, and which sums stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from matmuls import error
from torch import Tensor

from kgen.ir.plan import Kernel
from kgen.only import only
from kgen.report.record import Record, recording
from tests.scheduler.selection.test_safe_choices import planned
from tests.slow import slow_but

pytestmark = [pytest.mark.interpret, pytest.mark.cpu]
h = torch.float16
LONG = 8192


def r(*shape: int, dtype: torch.dtype = h) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def run(fn: Callable[..., Any], *args: Any, dynamic: int | None = None) -> tuple[Any, list[str]]:
    """The result, and the steps of the graph."""
    torch._dynamo.reset()
    if dynamic is not None:
        torch._dynamo.mark_dynamic(args[0], dynamic)
    with recording() as recorder:
        step = torch.compile(fn, backend="kgen", fullgraph=True, options={"gpu_interpreter": True, "cache": False})
        got = step(*args)
        again = step(*args)
    assert torch.equal(got, again)
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    names = ["matmul" if isinstance(s, Kernel) and s.contracts else getattr(s, "name", "call") for s in graph.plan.steps]
    return got, names


def activated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(torch.addmm(b, x, w, alpha=0.5) + 1)


CASES: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "epilogue": (activated, [r(64, LONG), r(LONG, 64), r(64)]),
    "rows_by_rows": (F.linear, [r(33, LONG), r(50, LONG)]),
    "batch": (lambda x, w: torch.bmm(x, w) * 2, [r(2, 40, LONG), r(2, LONG, 64)]),
    "computed": (lambda x, w: (x * 2 + 1) @ w.to(h), [r(40, LONG), r(LONG, 64, dtype=torch.float32)]),
    "one_tap": (lambda x, w: F.conv2d(x, w).relu(), [r(1, LONG, 6, 6), r(64, LONG, 1, 1)]),
    "integers": (torch._int_mm, [r(32, LONG).mul(30).to(torch.int8), r(LONG, 64).mul(30).to(torch.int8)]),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("epilogue", "batch"), CASES))
def test_two_launches(name: str) -> None:
    fn, args = CASES[name]
    got, steps = run(fn, *args)
    assert error(got, fn(*args)) < 1e-3
    assert len(steps) == 2
    assert steps[0] == "matmul"


def mm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@pytest.mark.parametrize(
    ("args", "dynamic"),
    [
        ((r(64, 8191), r(8191, 64)), None),  # no whole parts
        ((r(64, 512), r(512, 64)), None),  # a short sum
        ((r(64, LONG), r(LONG, 64)), 1),  # of a length that only the call knows
    ],
)
def test_sums_that_stay_whole(args: tuple[Tensor, Tensor], dynamic: int | None) -> None:
    x, w = args
    if dynamic is not None:
        torch._dynamo.mark_dynamic(w, 0)
    got, steps = run(mm, x, w, dynamic=dynamic)
    assert error(got, x @ w) < 1e-3
    assert len(steps) == 1


def test_who_forces_a_template_gets_whole_sums() -> None:
    x, w = r(64, LONG), r(LONG, 64)
    with only("triton_matmul", lambda configs: configs[0]):
        got, steps = run(mm, x, w)
    assert error(got, x @ w) < 1e-3
    assert steps == ["matmul"]


def test_on_a_cpu_the_engine_itself_shares_out_sums() -> None:
    x, w = r(64, LONG, dtype=torch.float32), r(LONG, 64, dtype=torch.float32)
    torch._dynamo.reset()
    with recording() as recorder:
        got = torch.compile(mm, backend="kgen", options={"cache": False})(x, w)
    assert error(got, x @ w) < 1e-5
    [graph] = recorder.graphs
    assert isinstance(graph, Record)
    assert len(graph.plan.steps) == 1


@pytest.mark.usefixtures("tf32")
def test_parts_cost_what_their_operands_do() -> None:
    """In TF32 the left operand is computed and turned over in shared memory; half as long in each of two parts."""

    def gradient(g: Tensor, y: Tensor, x: Tensor) -> Tensor:
        return torch.where(y > 0, g, 0.0).t() @ x

    plan = planned(gradient, *(torch.empty(4096, n) for n in (1000, 1000, 784)))
    assert not any(isinstance(step, Kernel) and step.contracts for step in plan.steps)


@pytest.mark.usefixtures("tf32")
def test_parts_take_what_idle_sms_can() -> None:
    """In TF32 templates are fast with low tiles, of which there are enough without parts; the library's are high."""
    plan = planned(lambda g, x: g.t() @ x, torch.empty(32768, 512), torch.empty(32768, 512))
    assert not any(isinstance(step, Kernel) and step.contracts for step in plan.steps)
