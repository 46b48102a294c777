"""Rejections that come back layer by layer are spread to the layers that are left, and to nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from op_case import lowered
from torch import Tensor

from kgen.ir import nodes as ir
from kgen.ir.plan import Schedule
from kgen.scheduler import Options, schedule
from kgen.scheduler.analysis.surroundings import RADIUS, surroundings
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Decisions, Draft, Transform
from kgen.scheduler.transforms import table
from kgen.scheduler.transforms.recurrence import spread
from kgen.verdict import Outcome, Reason, Verdict

pytestmark = pytest.mark.none

LAYERS = 12
WHY = Verdict("", "", Outcome.UNPROFITABLE, Reason.VENDOR_FASTER)


def layers(x: Tensor, *weights: Tensor) -> Tensor:
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        x = x + torch.relu(x @ first) @ second
    return x


def graph_of(count: int) -> ir.Graph:
    return lowered(layers, (torch.randn(8, 4), *(torch.randn(4, 4) for _ in range(2 * count))))


def matmuls(graph: ir.Graph) -> list[str]:
    return [node.out for node in graph.nodes if ir.is_contraction(node)]


def attempt_at(graph: ir.Graph, decisions: Decisions | None = None, missing: str = "") -> Attempt:
    """One with a plan of nothing; the graph as it has it may lack a node."""
    draft = Draft(graph, graph, graph.nodes, Options(), decisions or Decisions(), {})
    draft.graph = replace(graph, nodes=[node for node in graph.nodes if missing not in ir.outs(node)])
    return Attempt(draft, Schedule(draft.graph, [], []))


class Domino(Transform):
    """Matmuls of even numbers are rejected one by one, each as soon as the one before is; `attempts` counts."""

    name = "domino"

    def __init__(self) -> None:
        self.attempts = 0

    def settle(self, attempt: Attempt) -> Changes:
        self.attempts += 1
        left = [out for out in matmuls(attempt.graph)[::2] if attempt.decisions.is_open(self.name, out)]
        return spread(Changes(rejected={Candidate(self.name, out): replace(WHY, producer=out) for out in left[:1]}), attempt)


def test_layers_that_are_equal_stand_in_equal_surroundings() -> None:
    graph = graph_of(LAYERS)
    labels = surroundings(graph)
    first, second = (matmuls(graph)[k::2] for k in range(2))
    for found in (first, second):
        assert len({labels[out] for out in found[RADIUS:-RADIUS]}) == 1  # of inner layers
        assert labels[found[0]] != labels[found[RADIUS]]  # which reads an input
    assert labels[first[RADIUS]] != labels[second[RADIUS]]  # of other operators


def test_what_is_of_other_sizes_stands_elsewhere() -> None:
    weights = [torch.randn(4, 6) if k % 4 == 2 else torch.randn(6, 4) if k % 4 == 3 else torch.randn(4, 4) for k in range(24)]
    graph = lowered(layers, (torch.randn(8, 4), *weights))
    labels = [surroundings(graph)[out] for out in matmuls(graph)[::2]]
    assert labels[4] == labels[6] != labels[5] == labels[7]


def test_twelve_layers_take_few_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    domino = Domino()
    monkeypatch.setattr(table, "TRANSFORMS", (*table.TRANSFORMS, domino))
    graph = graph_of(LAYERS)
    plan = schedule(graph, Options(templates=False))
    found = {v.producer for v in plan.verdicts if v.reason is Reason.VENDOR_FASTER}
    assert found == set(matmuls(graph)[::2])  # and each has a verdict with its name
    assert domino.attempts < LAYERS


def test_one_attempt_says_nothing_of_others() -> None:
    graph = graph_of(LAYERS)
    names = matmuls(graph)[::2]
    changes = [Changes(rejected={Candidate("domino", out): replace(WHY, producer=out)}) for out in names[4:7]]
    first = spread(changes[0], attempt_at(graph))
    assert first == changes[0]
    second = spread(changes[1], attempt_at(graph, Decisions().after(first), missing=names[7]))
    assert {one.target for one in second.rejected} > {names[5], names[6]}
    assert names[4] not in {one.target for one in second.rejected}  # it was rejected before
    assert names[7] not in {one.target for one in second.rejected}  # it is part of something else, as of a program
    assert all(why.producer == one.target for one, why in second.rejected.items())
    assert not any(one.target in matmuls(graph)[1::2] for one in second.rejected)


def test_another_reason_or_transform_is_no_recurrence() -> None:
    graph = graph_of(LAYERS)
    one, other, third = matmuls(graph)[8:14:2]
    before = Decisions().after(Changes(rejected={Candidate("domino", one): WHY}))
    for changes in (
        Changes(rejected={Candidate("domino", other): replace(WHY, reason=Reason.UNCALIBRATED)}),
        Changes(rejected={Candidate("another", third): WHY}),
        Changes(rejected={Candidate("domino", "derived"): WHY}),  # a buffer that scheduling made
    ):
        assert spread(changes, attempt_at(graph, before)) == changes
