"""What was offered to templates, and what each of them made of it: for people who ask why one was not taken."""

from __future__ import annotations

from dataclasses import dataclass

from kgen.cost import model
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel
from kgen.listeners import Listeners
from kgen.scheduler.selection.choose import Given, prepared_for
from kgen.scheduler.selection.memo import prices
from kgen.templates.contract import Template
from kgen.templates.problem import Problem, problem_of
from kgen.verdict import Verdict

__all__ = ["DECISIONS", "TemplateDecision", "verdict_on"]


@dataclass(frozen=True, slots=True)
class TemplateDecision:
    """A kernel of contractions, `out` the result of the first, and what came of it: the kernel with a template, or why the
    library has it."""

    out: str
    kernel: Kernel
    graph: ir.Graph
    device: Device
    given: Given
    chosen: Kernel | Verdict


DECISIONS: Listeners[TemplateDecision] = Listeners()


def verdict_on(template: Template, decision: TemplateDecision) -> str:
    """What became of one template in a decision, as a sentence without its subject."""
    if template.device != decision.device.kind:
        return f"is for {template.device}, and the kernel runs on {decision.device.kind}"
    problem = problem_of(template, prepared_for(template, decision.kernel, decision.graph), decision.graph, decision.device)
    reason = problem if isinstance(problem, str) else template.refuse(problem)
    if isinstance(problem, str) or reason is not None:
        return f"refuses it: {reason}"
    return _of_feasible(problem, decision)


def _of_feasible(problem: Problem, decision: TemplateDecision) -> str:
    found = sorted(prices(problem), key=lambda row: row[1])
    if not found:
        return "could compute it, but no configuration of its knobs fits the device"
    (config, seconds), count = found[0], len(found)
    mine = f"{_microseconds(seconds)} by the estimate, with {config} of {count} configurations"
    if isinstance(decision.chosen, Verdict):
        return f"could compute it in {mine}, but {decision.chosen.reason.value} ({_library(problem, decision.chosen)})"
    choice = decision.chosen.choice
    assert choice is not None
    if choice.template == problem.template.name:
        return f"takes it: {decision.chosen.by_size or choice}"
    return f"could compute it in {mine}, but {choice} is faster ({_other(decision)})"


def _library(problem: Problem, verdict: Verdict) -> str:
    """What the library is thought, or was measured, to take."""
    if problem.uncalibrated:
        return problem.uncalibrated
    return f"the library takes {_microseconds(model.vendor_seconds(problem))} by the estimate, with what is not fused"


def _other(decision: TemplateDecision) -> str:
    assert isinstance(decision.chosen, Kernel)
    if decision.given.only is not None:
        return "it is the only one that may"
    if decision.given.tuning_results:
        return "as measured"
    return "by the estimate"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
