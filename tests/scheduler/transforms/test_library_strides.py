"""Rows of a GPU library's matmuls begin at multiples of 16 bytes, where that costs less than it saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir.plan import Call, Schedule
from kgen.report.record import recording
from kgen.scheduler.transforms import library_strides
from kgen.scheduler.transforms.library_strides import operands
from kgen.verdict import Reason
from tests.gpu_graphs import run
from tests.scheduler.selection.test_safe_choices import planned

h = torch.float16
BIG = torch.empty(2000, 1201, dtype=h)


def calls(plan: Schedule) -> list[ir.Extern]:
    return [step.node for step in plan.steps if isinstance(step, Call) and operands(step.node)]


def strides(plan: Schedule, name: str | None) -> list[int | None]:
    found = plan.graph.buffers[name or ""].strides
    return [s.as_int() for s in found or ()]


def rows(plan: Schedule) -> list[int | None]:
    """Of each matrix that a call reads, the stride of the buffer's rows."""
    return [strides(plan, arg.buffer)[0] for call in calls(plan) for _, arg in operands(call)]


def views(x: Tensor, y: Tensor) -> Tensor:
    """A matmul of every second number of rows, transposed, and of the last 1,200 numbers of rows of 1,201."""
    return x[:, ::2].t() @ y[:, 1:]


def test_rows_that_begin_between_loads_are_copied() -> None:
    plan = planned(views, torch.empty(2000, 1400, dtype=h), BIG)
    assert rows(plan) == [704, 1216]
    [call] = calls(plan)
    assert {v.reason for v in plan.verdicts if v.consumer == call.outs[0]} >= {Reason.ROWS_IN_LINES}


def test_a_copy_is_a_second_store_of_the_kernel() -> None:
    plan = planned(lambda x, y: ((z := y.sin()), views(x, z)), torch.empty(2000, 1400, dtype=h), BIG)
    assert rows(plan) == [704, 1216]
    [seen, _] = [strides(plan, o.buffer) for o in plan.graph.outputs if isinstance(o, ir.TensorArg)]
    assert seen == [1201, 1]


def test_short_matmuls_read_them_as_they_are() -> None:
    plan = planned(views, torch.empty(32, 1400, dtype=h), BIG[:32])
    assert rows(plan) in ([], [1400, 1201])


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_rows_of_odd_lengths_stay(kind: torch.dtype) -> None:
    """Measured: the library's kernel for 197 or 845 numbers of 2 bytes is the same from any row (H200, 2026-11-28)."""
    plan = planned(lambda x, w: x[:, 1:-1] @ w, BIG.to(kind), torch.empty(1199, 800, dtype=kind))
    assert not calls(plan) or rows(plan)[0] == 1201


def summed(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    made = torch.addmm(b, x[1:].sin(), y[:, 1:]) + 1
    return (x.t()[:, 1:] @ made[:, ::2]).exp()


def batches(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x[:, 1:, 1:33], y.transpose(1, 2)[:, 1:33]).relu() @ y[:, :, 4:].cos()


@pytest.mark.interpret
def test_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever rows begin between multiples, they are moved."""
    monkeypatch.setattr(library_strides, "_seconds", lambda node, graph, device, aligned: float(aligned < library_strides.LOAD))
    monkeypatch.setattr(
        library_strides, "_is_concerned", lambda node, *_: ir.is_contraction(node) and library_strides.is_matmul(node)
    )
    torch.manual_seed(0)
    options = {"gpu_interpreter": True, "templates": False}
    with recording() as recorder:
        run(summed, torch.randn(20, 36), torch.randn(36, 17), torch.randn(16), **options)
        run(batches, torch.randn(3, 20, 36), torch.randn(3, 20, 36), **options)
    for plan in (graph.plan for graph in recorder.graphs):
        read = [arg.buffer for call in calls(plan) for _, arg in operands(call)]
        assert any(library_strides.COPY in name for name in read)
