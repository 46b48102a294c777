"""Graphs of thousands of nodes: no stage recurses over them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kgen.host.assemble import assemble
from kgen.ir.plan import Call, Schedule, variants
from kgen.lowering.builder import Builder
from kgen.lowering.graph import LoweringContext, lower
from kgen.lowering.mutation import root_of
from kgen.lowering.reinplace import reinplace
from kgen.rendered.kernel_call import KernelCall
from kgen.scheduler.schedule import schedule

aten = torch.ops.aten


def row_writes(count: int) -> GraphModule:
    """``for i in range(count): b[i] = b[i] + 1`` as AOTAutograd writes it."""
    with FakeTensorMode():
        whole, row = torch.empty(count, 4), torch.empty(4)
    graph = Graph()

    def call(target: torch._ops.OpOverload, value: Tensor, *args: Node | int) -> Node:
        node = graph.call_function(target, args)
        node.meta["val"] = value
        return node

    given = current = graph.placeholder("b")
    given.meta["val"] = whole
    for i in range(count):
        changed = call(aten.add.Tensor, row, call(aten.select.int, row, current, 0, i), 1)
        copied = call(aten.copy.default, row, call(aten.select.int, row, current, 0, i), changed)
        current = call(aten.select_scatter.default, whole, current, copied, 0, i)
    call(aten.copy_.default, whole, given, current)
    graph.output(())
    return GraphModule({}, graph)


def test_a_thousand_writes_of_rows_become_a_program() -> None:
    lowered = lower(reinplace(row_writes(1100)), LoweringContext())
    assert len(lowered.nodes) == 1100
    plan = schedule(lowered)
    names = {name: KernelCall(name, tuple(ir_names), ()) for name, ir_names in _buffers(plan)}
    assert len(assemble(plan, names).program.code) >= 1100


def _buffers(plan: Schedule) -> Iterator[tuple[str, list[str]]]:
    for step in plan.steps:
        if not isinstance(step, Call):
            for one in variants(step):
                yield one.name, [out for statement in step.statements for out in statement.outs]


def test_a_write_looks_at_no_write_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: twice the writes ask for twice as many storages."""
    counts = []
    for size in (100, 200):
        asked = 0

        def counted(b: Builder, name: str) -> str:
            nonlocal asked
            asked += 1
            return root_of(b, name)

        monkeypatch.setattr("kgen.lowering.mutation.root_of", counted)
        lower(reinplace(row_writes(size)), LoweringContext())
        counts.append(asked)
    assert counts[1] < 2.5 * counts[0]


@pytest.mark.cpu
@pytest.mark.slow
def test_a_thousand_writes_of_rows() -> None:
    def add_to_rows(b: Tensor) -> Tensor:
        for i in range(1000):
            b[i] = b[i] + 1
        return b

    assert bool((torch.compile(add_to_rows, backend="kgen")(torch.zeros(1000, 4)) == 1).all())
