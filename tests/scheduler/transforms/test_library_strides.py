"""Rows of a GPU library's matmuls begin at multiples of 16 bytes, where that costs less than it saves."""

from __future__ import annotations

from collections.abc import Iterator

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


def squared(x: Tensor) -> Tensor:
    """A matmul of what a kernel makes, whose result has whole lines."""
    y = (x * 2).sin()
    return y.t()[:1200] @ y[:, :1200]


def test_what_a_kernel_makes_has_longer_rows() -> None:
    assert set(rows(planned(squared, BIG))) == {1216}


def test_short_and_small_rows_stay() -> None:
    assert set(rows(planned(squared, torch.empty(64, 1201, dtype=h)))) <= {1201}
    assert set(
        rows(planned(lambda x, y: x.sin().t() @ y, torch.empty(1 << 16, 33, dtype=h), torch.empty(1 << 16, 512, dtype=h)))
    ) <= {33}


def test_results_that_somebody_sees_keep_their_rows() -> None:
    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).sin()
        return y, y.t()[:1200] @ y[:, :1200]

    plan = planned(f, BIG)
    seen = [strides(plan, o.buffer) for o in plan.graph.outputs if isinstance(o, ir.TensorArg)]
    assert seen == [[1201, 1], [1200, 1]]
    assert set(rows(plan)) == {1216}  # of copies, which the same kernel stores


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_inputs_are_copied_for_long_matmuls_and_results_have_longer_rows(tf32: None) -> None:
    def f(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).amax(1)

    plan = planned(f, torch.empty(8192, 2050), torch.empty(2050, 2050))
    [call] = calls(plan)
    assert rows(plan) == [2080, 2080]
    assert strides(plan, call.outs[0]) == [2080, 1]
    assert {v.reason for v in plan.verdicts if v.consumer == call.outs[0]} >= {Reason.ROWS_IN_LINES}
    short = planned(f, torch.empty(32, 2050), torch.empty(2050, 2050))
    assert set(rows(short)) <= {2050}


def test_what_no_matmul_touches_keeps_its_rows(tf32: None) -> None:
    def f(x: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        total = z.sum(-1)
        return (x @ w).amax(1), (total * total.t()).amax(1)

    plan = planned(f, torch.empty(8192, 2050), torch.empty(2050, 2050), torch.empty(2050, 2050, 8))
    [call] = calls(plan)
    assert strides(plan, call.outs[0]) == [2080, 1]
    totals = [name for name, buffer in plan.graph.buffers.items() if buffer.kind == "intermediate" and name.startswith("sum")]
    assert [strides(plan, name) for name in totals] == [[2050, 1]]


def test_full_float32_is_multiplied_as_fast_from_any_row() -> None:
    plan = planned(lambda x, w: (x @ w).amax(1), torch.empty(8192, 2050), torch.empty(2050, 2050))
    assert set(rows(plan)) <= {2050}


def summed(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    made = torch.addmm(b, x[1:].sin(), y[:, 1:]) + 1
    return (x.t()[:, 1:] @ made[:, ::2]).exp()


def batches(x: Tensor, y: Tensor) -> Tensor:
    return torch.bmm(x[:, 1:], y.transpose(1, 2)).relu() @ y[:, :, 1:].cos()


@pytest.mark.interpret
def test_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever rows begin between multiples, they are moved."""
    monkeypatch.setattr(library_strides, "_seconds", lambda node, graph, device, aligned: float(aligned < library_strides.LOAD))
    monkeypatch.setattr(
        library_strides, "_is_concerned", lambda node, *_: ir.is_contraction(node) and library_strides.is_matmul(node)
    )
    monkeypatch.setattr(library_strides, "SHORTEST_ROW", 16)
    torch.manual_seed(0)
    options = {"gpu_interpreter": True, "templates": False}
    with recording() as recorder:
        run(summed, torch.randn(20, 35), torch.randn(35, 18), torch.randn(17), **options)
        run(batches, torch.randn(3, 20, 35), torch.randn(3, 19, 35), **options)
    for plan in (graph.plan for graph in recorder.graphs):
        read = [arg.buffer for call in calls(plan) for _, arg in operands(call)]
        assert any(library_strides.COPY in name for name in read)
        assert any(strides(plan, name)[-2] not in (35, 18, 17, 34) for name in read if library_strides.COPY not in name)
