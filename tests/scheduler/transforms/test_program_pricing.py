"""Programs compete with the library, and with separate kernels: by estimates, and by measurements."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kgen
from kgen.cost.tuning_query import APART, Place, TuningQuery, TuningResult, place
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel, Schedule, members
from kgen.ir.verify import verify
from kgen.report.record import Record, recording
from kgen.scheduler import Options
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.templates import registry
from kgen.templates.contract import Config, Template
from kgen.templates.problem import Problem
from kgen.tuning import measure as measuring
from kgen.tuning.store import TuningFile
from kgen.tuning.tuner import candidates_of
from kgen.verdict import Reason, Verdict
from tests.kernels import plans
from tests.scheduler.transforms.test_programs import SPELLINGS, TEMPLATES, inputs, r, written_out

PLAIN = TEMPLATES["plain_attention_cpp"]
OF_THE_LIBRARY = SPELLINGS["of the library"]
OPTIONS = Options(cpu=Device("cpu", isa="generic"))


class Slow(type(PLAIN.author)):  # type: ignore[misc]
    """Says that it takes a second."""

    def seconds(self, problem: Problem, config: Config) -> float:
        return 1.0


class Unknown(type(PLAIN.author)):  # type: ignore[misc]
    """Says that nobody has measured it."""

    def uncalibrated(self, problem: Problem) -> str:
        return "nobody has timed it"


@pytest.fixture
def attention() -> Iterator[Any]:
    """Registers the plain template with another author, where no built-in one competes with it."""
    built_in = registry.find("cpp_attention")
    registry.remove(built_in.name)

    def register(author: Any = PLAIN.author) -> Template:
        made = replace(PLAIN, author=author)
        registry.add(made)
        return made

    yield register
    registry.remove(PLAIN.name)
    registry.add(built_in)


def reasons(options: Options = OPTIONS, f: Any = written_out, args: Sequence[Tensor] = ()) -> tuple[set[Reason], bool]:
    """Of the verdicts, and whether the program was taken."""
    plan = plans(f, *(args or inputs()), options=options).forward
    choices = [k.choice.template for step in plan.kernels for k in members(step) if k.choice is not None]
    return {verdict.reason for verdict in plan.verdicts}, choices == [PLAIN.name]


# ---- estimates ------------------------------------------------------------------------------------------------------


def test_without_an_estimate_the_roofline_counts(attention):
    attention()
    assert reasons() == ({Reason.TEMPLATE}, True)


def test_what_is_estimated_to_be_slower_is_not_taken(attention):
    attention(Slow())
    found, taken = reasons()
    assert Reason.VENDOR_FASTER in found
    assert not taken
    found, taken = reasons(f=OF_THE_LIBRARY)
    assert Reason.VENDOR_FASTER in found
    assert not taken


def test_what_nobody_has_measured_is_not_taken(attention):
    attention(Unknown())
    plan = plans(written_out, *inputs(), options=OPTIONS).forward
    [verdict] = [v for v in plan.verdicts if v.reason is Reason.UNCALIBRATED]
    assert verdict.detail == "nobody has timed it"
    assert len(plan.kernels) > 1
    assert not reasons(f=OF_THE_LIBRARY)[1]


@pytest.mark.cpu
@pytest.mark.parametrize("author", [Slow(), Unknown()], ids=["slow", "unknown"])
def test_results_are_right_without_the_program(attention, author):
    attention(author)
    torch._dynamo.reset()
    args = inputs()
    with kgen.config.override(cache=False):
        torch.testing.assert_close(torch.compile(written_out, backend="kgen")(*args), written_out(*args))


# ---- measurements ---------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """Says of every question that this was the fastest; `asked` are the questions."""

    template: str | None
    asked: list[TuningQuery]
    is_worth_asking: bool = True

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, Any]]:
        self.asked += questions
        return {q.step.name: {place({}): self._told(q)} for q in questions}

    def _told(self, question: TuningQuery) -> Any:
        is_program = any(problem.template is registry.find(PLAIN.name) for own in question.problems for problem in own)
        config = PLAIN.config().values if self.template == PLAIN.name else ()
        return TuningResult(self.template if is_program else None, config if is_program else (), 1, 1e-5, 2e-5)

    def verdicts(self) -> list[Verdict]:
        return []


@pytest.mark.parametrize("fastest", [None, APART, PLAIN.name])
def test_measurements_decide_whatever_is_estimated(attention, fastest):
    attention(Unknown() if fastest == PLAIN.name else PLAIN.author)
    told = Told(fastest, [])
    found, taken = reasons(replace(OPTIONS, oracle=told))
    assert taken == (fastest == PLAIN.name)
    assert (Reason.VENDOR_MEASURED in found) == (not taken)
    question = told.asked[0]
    assert question.vendor
    assert question.apart


def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    return written_out(q * 2, k, v) * gate


def extracted(plan: Schedule) -> ir.Graph:
    """The subgraph of the one kernel."""
    [kernel] = [step for step in plan.kernels if isinstance(step, Kernel)]
    part = extract_subgraph(plan.graph, kernel)
    assert part is not None
    return part


def test_what_is_measured_are_the_nodes_that_the_program_replaces(attention):
    attention()
    plan = plans(gated, *inputs(), r(2, 3, 12, 16), options=OPTIONS).forward
    part = extracted(plan)
    verify(part, "extraction")
    assert (len(part.inputs), len(part.outputs)) == (4, 1)
    assert sum(isinstance(node, ir.Contraction) for node in part.nodes) == 2
    assert not any(isinstance(node, ir.Operation) for node in part.nodes)
    alone = plans(OF_THE_LIBRARY, *inputs(), options=OPTIONS).forward
    assert [type(node) for node in extracted(alone).nodes] == [ir.Operation]


def test_the_library_separate_kernels_and_the_template_are_candidates(attention):
    attention()
    told = Told(PLAIN.name, [])
    reasons(replace(OPTIONS, oracle=told))
    assert [c.template for c in candidates_of(told.asked[0])][:3] == [None, APART, PLAIN.name]


@pytest.mark.slow
@pytest.mark.cpu
def test_a_program_is_measured_against_the_library(attention, tmp_path: Path):
    attention()
    torch._dynamo.reset()
    args = inputs()
    file = tmp_path / "tuning.json"
    options = {"mode": "max-autotune-no-cudagraphs", "cache": False, "tuning_file": str(file), "tuning_seconds": 60}
    try:
        with recording() as seen, torch.no_grad():
            torch.testing.assert_close(torch.compile(written_out, backend="kgen", options=options)(*args), written_out(*args))
    finally:
        measuring.stop()
    [graph] = seen.graphs
    assert isinstance(graph, Record)
    entries = TuningFile(file).entries()
    found = [entry for entry in entries if entry.measured >= 3]
    assert found, entries
    assert not any(v.reason in (Reason.WRONG_RESULT, Reason.FAILED, Reason.NOT_COMPILED) for v in graph.plan.verdicts)
