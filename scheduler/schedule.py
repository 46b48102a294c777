"""The schedule stage: attempts at a plan, each with what the ones before have found out, until nothing changes."""

from __future__ import annotations

import importlib
from collections.abc import Hashable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace

from kgen import errors
from kgen.cost.tuning_query import TuningResults
from kgen.ir import nodes as ir
from kgen.ir.plan import Schedule
from kgen.scheduler.analysis.memo import memoising
from kgen.scheduler.analysis.memory import freeze_layouts, plan_memory
from kgen.scheduler.analysis.stride_orders import choose_orders
from kgen.scheduler.kernels.plan import plan_of
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Decisions, Draft, Transform
from kgen.templates import registry
from kgen.verdict import Verdict

__all__ = ["Options", "schedule"]

TABLE = "kgen.scheduler.transforms.table"


def schedule(graph: ir.Graph, options: Options | None = None) -> Schedule:
    """Groups the graph's nodes into kernels, orders them, and plans their memory. The graph stays as it is.

    Where a demand fails because a contraction's kernel has what another one should have, there are no programs of several
    contractions, then no templates."""
    options = options or Options()
    try:
        return _scheduled(graph, options)
    except errors.FusionRequired:
        for fewer in _with_fewer_templates(options):
            with suppress(errors.FusionRequired):
                return _scheduled(graph, fewer)
        raise


def _with_fewer_templates(options: Options) -> Iterator[Options]:
    if options.templates and options.programs and registry.programs():
        yield replace(options, programs=False, memo=None)
    if options.templates:
        yield replace(options, templates=False, memo=None)


def _scheduled(given: ir.Graph, options: Options) -> Schedule:
    transforms = _transforms_for(given)
    search = _Search(_prepared(given, options, transforms), options, transforms)
    with memoising(options.memo):
        found = search.run()
    plan = found.plan
    plan.verdicts[:0] = [*(options.oracle.verdicts() if options.oracle else ()), *search.refusals]
    plan.verdicts += [verdict for one in transforms for verdict in one.report(found)]
    for one in transforms:
        one.finish(found)
    return plan_memory(plan)


def _transforms_for(graph: ir.Graph) -> tuple[Transform, ...]:
    """The transforms that may have something to do. Where every element of the graph is made on its own, that is none of them,
    and their modules are not even loaded."""
    if not ir.any_combines(graph):
        return ()
    found: tuple[Transform, ...] = importlib.import_module(TABLE).TRANSFORMS
    return found


def _prepared(given: ir.Graph, options: Options, transforms: tuple[Transform, ...]) -> ir.Graph:
    """A copy of the graph as the first attempt finds it. Schedules with one memo have the same list of nodes: what is known
    about that, such as the programs in it, took half of a further schedule's time to find out again."""
    memo: dict[Hashable, object] = {} if options.memo is None else options.memo.known
    key = "prepared", replace(options, oracle=None, memo=None)
    graph = memo.get(key)
    if not isinstance(graph, ir.Graph):
        graph = ir.own_copy(given)
        if len(graph.nodes) > 1:  # else nobody reads what is made here
            choose_orders(graph, lambda buffer: options.target(str(buffer.device)) == "triton")
        freeze_layouts(graph)
        for one in transforms:
            one.prepare(graph, options)
        memo[key] = graph
    return replace(ir.own_copy(graph), nodes=graph.nodes)


@dataclass(slots=True)
class _Search:
    """The attempts at a schedule of one graph. `settled` is the plan with which those are compared that are `tried` although
    nothing was left to change."""

    graph: ir.Graph
    options: Options
    transforms: tuple[Transform, ...]
    decisions: Decisions = field(default_factory=Decisions)
    tuning_results: TuningResults = field(default_factory=dict)
    refusals: list[Verdict] = field(default_factory=list)
    settled: Attempt | None = None
    tried: frozenset[Candidate] = frozenset()

    def run(self) -> Attempt:
        """The first attempt that nothing is left to change about."""
        while True:
            attempt = self._attempt()
            changes = self._changes(attempt) if self.transforms else None
            if not changes:
                return attempt
            self._learn(changes, attempt)
            if self.settled is not None and self.tried <= self.decisions.rejected.keys():
                return self.settled

    def _attempt(self) -> Attempt:
        """A plan without a memory plan. The graph stays as it is: the attempt has buffers of its own."""
        own = replace(self.graph, buffers=dict(self.graph.buffers))
        draft = Draft(own, own, own.nodes, self.options, self.decisions, dict(self.tuning_results), self.transforms)
        for one in self.transforms:
            one.apply(draft)
        return Attempt(draft, plan_of(draft))

    def _changes(self, attempt: Attempt) -> Changes:
        """What to change: what does not hold, or is better otherwise; and when that is nothing, what is worth a trial."""
        failed = Changes(rejected={one: why for each in self.transforms for one, why in each.check(attempt).items()})
        found = failed or next((found for one in self.transforms if (found := one.settle(attempt))), None)
        if found or self.settled is None:
            return found or self._tried(attempt)
        settled = self.settled
        return Changes(rejected={one: why for each in self.transforms for one, why in each.judged(attempt, settled).items()})

    def _tried(self, attempt: Attempt) -> Changes:
        found = Changes()
        for one in self.transforms:
            found |= one.tried(attempt)
        self.settled, self.tried = attempt, frozenset(found.settings)
        self.refusals += () if found.settings else found.rejected.values()
        return found if found.settings else Changes()

    def _learn(self, changes: Changes, attempt: Attempt) -> None:
        """Measurements of contractions whose kernels will be others are forgotten; those of the settled plan hold again where
        what was tried is rejected."""
        self.refusals += changes.rejected.values()
        self.decisions = self.decisions.after(changes)
        by_name = {one.name: one for one in self.transforms}
        gone = {out for one, why in changes.rejected.items() for out in by_name[one.transform].unmeasured(one, why)}
        gone |= {one.target for one in self.tried & changes.settings.keys()}
        self.tuning_results = {out: found for out, found in attempt.tuning_results.items() if out not in gone}
        if self.settled is not None:
            again = {one.target for one in self.tried & changes.rejected.keys()}
            self.tuning_results |= {out: found for out, found in self.settled.tuning_results.items() if out in again}
