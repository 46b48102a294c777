"""Decides what the next attempt at a graph does without, after one has failed (docs/failures.md).

Imported when something has failed, never before: most processes need none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from kgen import failures
from kgen.capture.operators import operator_name, source_line
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.errors import ConfigurationFailed, KgenError
from kgen.failures import Attempt, Failure, KernelsFailed
from kgen.unusable import Unusable
from kgen.verdict import DEMANDS, Reason

__all__ = ["attempt_after", "failed_pass"]

# Failures of kernels and operators that are worked around one by one.
MAX_FAILURES = 16
# The stages that templates and fusion matter to, and what runs without these.
_STAGES = ("schedule", "render", "build")
_RUNGS = {
    "templates": "library calls compute all contractions of the graph",
    "fusion": "each loop of the graph is a kernel of its own",
}


def attempt_after(cause: Exception, attempt: Attempt, graph: tuple[GraphModule, GraphInfo], config: Config) -> Attempt | None:
    """What to try after `attempt` has ended with `cause`, with a warning; None where that has to be raised."""
    if isinstance(cause, ConfigurationFailed):
        news = [one for one in cause.details["found"] if one not in attempt.unusable]
        if news:
            return Attempt(attempt.failures, (*attempt.unusable, *news), attempt.eager)
    if attempt.eager or failures.is_strict(config) or not failures.may_replace(cause):
        return None
    return _Recovery(cause, attempt, *graph, config).run()


@dataclass(frozen=True, slots=True)
class _Recovery:
    cause: Exception
    attempt: Attempt
    gm: GraphModule
    info: GraphInfo
    config: Config

    def run(self) -> Attempt | None:
        known = self.attempt.failures
        found = [f for f in self.failures() if self.is_news(f)]
        eager = False
        if not found or len(known) + len(found) > MAX_FAILURES:
            switch = self.next_rung()
            eager = switch is None
            if eager and any(one.wanted for one in DEMANDS.get()):
                return None  # in eager nothing is fused
            found = [self.of_graph(switch)]
        for failure in found:
            failures.warn(failure)
        dropped = (Unusable(f.choice, f.why, compiled=False) for f in found if f.choice is not None)
        return Attempt((*known, *found), (*self.attempt.unusable, *dropped), eager)

    def failures(self) -> Sequence[Failure]:
        """What is to blame, where that is known."""
        if isinstance(self.cause, KernelsFailed):
            return self.cause.failures
        name = self.cause.details.get("aten_node") if isinstance(self.cause, KgenError) else None
        node = next((n for n in self.gm.graph.nodes if n.name == name), None)
        return [] if node is None else [self.of_operator(node)]

    def is_news(self, failure: Failure) -> bool:
        """Whether leaving out what failed makes a difference to the last attempt."""
        if failure.choice is not None:
            return all(one.choice != failure.choice for one in self.attempt.unusable)
        return not failure.nodes <= frozenset().union(*(f.nodes for f in self.attempt.failures))

    def of_operator(self, node: Node) -> Failure:
        """Lowering failed on one call. After a second one of its operator, none is lowered any more."""
        operator = operator_name(node.target)
        again = any(f.operators == (operator,) for f in self.attempt.failures)
        nodes = [n for n in _calls(self.gm) if again and operator_name(n.target) == operator]
        instead = "PyTorch's own operator runs" if not again else "PyTorch's own operator runs wherever the graph has it"
        return Failure(
            f"lowering {operator}", failures.reason_of(self.cause), instead, Reason.INTERNAL_ERROR, (operator,),
            source_line(node),
            failures.keep_report(f"lowering_{operator}", self.cause, self.gm), frozenset(n.name for n in (node, *nodes)),
        )  # fmt: skip

    def next_rung(self) -> str | None:
        """The next thing that the whole graph can do without."""
        off = {switch for f in self.attempt.failures for switch in f.switches}
        known = (switch for switch in _RUNGS if getattr(self.config, switch) and switch not in off)
        return next(known, None) if self.attempt.stage in _STAGES else None

    def of_graph(self, switch: str | None) -> Failure:
        """It is not known what to leave out, or there is too much of it."""
        cause = self.cause.__cause__ if isinstance(self.cause, KernelsFailed) else self.cause
        assert isinstance(cause, Exception)
        instead = "every operator of the graph runs by itself in eager" if switch is None else _RUNGS[switch]
        calls = _calls(self.gm)
        return Failure(
            f"stage {self.attempt.stage} of {self.info.name}", failures.reason_of(cause), instead, Reason.INTERNAL_ERROR,
            tuple(dict.fromkeys(operator_name(n.target) for n in calls)), next(filter(None, map(source_line, calls)), ""),
            failures.keep_report(f"{self.attempt.stage}_{self.info.role}", cause, self.gm),
            switches=() if switch is None else (switch,),
        )  # fmt: skip


def failed_pass(name: str, cause: Exception, gm: GraphModule) -> Failure:
    """A pass in front of the stages, which only makes the graph faster, has failed: with a warning."""
    calls = _calls(gm)
    failure = Failure(
        f"pass {name}", failures.reason_of(cause), "the graph is compiled without it", Reason.INTERNAL_ERROR,
        tuple(dict.fromkeys(operator_name(n.target) for n in calls)), next(filter(None, map(source_line, calls)), ""),
        failures.keep_report(f"pass_{name}", cause, gm),
    )  # fmt: skip
    failures.warn(failure)
    return failure


def _calls(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]
