"""Transforms as values: a new one is one file and one row, and the graph that is scheduled stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from op_case import lowered
from torch import Tensor

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.printer import print_graph
from kgen.ir.verify import verify
from kgen.reference.evaluate import evaluate_graph
from kgen.scheduler import Options, schedule
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.transforms import table
from kgen.verdict import Outcome, Reason, Verdict


class Halves(Transform):
    """Sums each row in two halves, one after the other; `holds` says whether that is any good."""

    name = "halves"

    def __init__(self, holds: bool = True) -> None:
        self.holds = holds
        self.nodes: list[ir.Node] = []

    def apply(self, draft: Draft) -> None:
        draft.nodes = [one for node in draft.nodes for one in self._halves(draft, node)]
        self.nodes = draft.nodes

    def _halves(self, draft: Draft, node: ir.Node) -> list[ir.Node]:
        if not isinstance(node, ir.Reduction) or node.op != "sum" or not draft.decisions.is_open(self.name, node.outs[0]):
            return [node]
        out, long = node.outs[0], node.rvars[0]
        half = ix.var("half", ix.floordiv(long.extent, 2))
        made: list[ir.Node] = []
        for number in range(2):
            name = ir.derived(draft.graph, ir.Derived(out, "half", number))
            draft.graph.buffers[name] = replace(draft.graph.buffers[out], name=name, kind="intermediate")
            at: dict[ix.Atom, ix.Expr] = {long: half.expr() + number * half.extent}
            made.append(replace(node, outs=(name,), rvars=(half,), value=vs.substitute(node.value, at)))
        row = [v.expr() for v in node.vars]
        first, second = (vs.load(ir.outs(one)[0], row, node.value.dtype) for one in made)
        return [*made, ir.Pointwise(out, node.vars, vs.call("add", first, second), node.origin)]

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        split = {attempt.graph.provenance[name].source for name in attempt.graph.buffers if self._is_half(attempt.graph, name)}
        why = Verdict("", "", Outcome.UNPROFITABLE, Reason.NO_SAVING)
        return {} if self.holds else {Candidate(self.name, out): replace(why, consumer=out) for out in split}

    def _is_half(self, graph: ir.Graph, name: str) -> bool:
        return name in graph.provenance and graph.provenance[name].role == "half"


def rows(x: Tensor) -> Tensor:
    return torch.exp(x).sum(-1)


ARGUMENTS = (torch.randn(6, 40),)


def test_a_transform_is_one_class_and_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves()
    monkeypatch.setattr(table, "TRANSFORMS", (*table.TRANSFORMS, halves))
    graph = lowered(rows, ARGUMENTS)
    plan = schedule(graph)
    assert sum(isinstance(node, ir.Reduction) for node in halves.nodes) == 2
    [found] = evaluate_graph(verify(replace(plan.graph, nodes=halves.nodes), "halves"), ARGUMENTS)
    assert torch.allclose(found, rows(*ARGUMENTS), rtol=1e-5)


def test_a_candidate_that_does_not_hold_is_rejected_with_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    halves = Halves(holds=False)
    monkeypatch.setattr(table, "TRANSFORMS", (*table.TRANSFORMS, halves))
    plan = schedule(lowered(rows, ARGUMENTS))
    assert sum(isinstance(node, ir.Reduction) for node in halves.nodes) == 1
    assert [v.reason for v in plan.verdicts if v.consumer in plan.graph.buffers and v.reason is Reason.NO_SAVING]


@pytest.mark.parametrize("function", [rows, lambda x: torch.softmax(x @ x.t(), -1), lambda x: torch.cat([x @ x.t(), x], -1)])
def test_scheduling_leaves_its_graph_as_it_is(function: object) -> None:
    graph = lowered(function, ARGUMENTS)
    before = print_graph(graph), dict(graph.buffers), list(graph.nodes), dict(graph.provenance), dict(graph.size_hints)
    schedule(graph, Options(gpu_everywhere=True))
    assert (print_graph(graph), graph.buffers, graph.nodes, graph.provenance, graph.size_hints) == before


def test_a_graph_of_points_enters_no_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "TRANSFORMS", (Halves(), Halves()))  # two of one name would be an error where they are asked
    called = []
    monkeypatch.setattr(Halves, "apply", lambda self, draft: called.append(draft))
    schedule(lowered(torch.relu, ARGUMENTS))
    assert not called
