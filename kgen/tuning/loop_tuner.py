"""Decides about loop kernels by measured times: kernels without a contraction, once everything else about a plan is settled.

The scheduler's own loops or tiles are the first candidate and the reference. The others are what the kernel's template
offers (`LoopTemplate.configs`), compiled from the part of the graph that became the kernel, as candidates of contractions are.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kgen import unusable
from kgen.counters import counters
from kgen.host.compiled import Blueprint
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Choice, Kernel, Schedule
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.templates.contract import Config as Knobs
from kgen.templates.loop_contract import LoopProblem, LoopTemplate
from kgen.templates.registry import loop_names, loop_template
from kgen.tuning import entry
from kgen.tuning.arguments import arguments, roundings
from kgen.tuning.benchmark import BenchmarkJob, Setting
from kgen.tuning.building import build_all
from kgen.tuning.entry import Entry, Key
from kgen.tuning.measure import Failure, Outcome, measure
from kgen.tuning.problem_keys import key_of_loops
from kgen.tuning.progress import Say, progress
from kgen.tuning.tuner import ASKED, COLD, COMPILING, LEAST_TIMING, REASONS, TIMING, Tuner, software
from kgen.verdict import Outcome as Decision
from kgen.verdict import Reason, Verdict

__all__ = ["LoopCompiler", "LoopTuner"]

LOG = logging.getLogger("kgen.tuning")

# Bytes below which a kernel is not measured: its time is that of starting it.
LEAST_BYTES = {"cuda": 1 << 20, "cpu": 1 << 18}
# Share of the time of the scheduler's own choice that another one has to stay below: closer is noise.
BETTER = 0.97


@dataclass(frozen=True, slots=True)
class LoopCompiler:
    """What the pipeline provides: a kernel as its template sees it, with the scheduler's loops; the plan of a graph alone; and
    what the plan is built of."""

    problem: Callable[[Kernel, ir.Graph], LoopProblem]
    plan: Callable[[ir.Graph], Schedule]
    blueprint: Callable[[Schedule], Blueprint]


@dataclass(frozen=True, slots=True)
class _Query:
    """A loop kernel with several configurations, the scheduler's own first."""

    step: Kernel
    problem: LoopProblem
    template: LoopTemplate
    configs: tuple[Knobs, ...]
    key: Key

    @property
    def is_exact(self) -> bool:
        """Whether all configurations have the same results, bit by bit: each element is made on its own."""
        return _makes_points(self.step)


@dataclass(slots=True)
class _Open:
    """A query that is being measured: the plan of its part of the graph, and where in it the kernel stands."""

    query: _Query
    part: ir.Graph
    plan: Schedule
    at: int
    made: dict[int, Blueprint] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)


class LoopTuner:
    """Chooses configurations of the loop kernels of one plan. It shares the time of a graph with the tuner of contractions."""

    def __init__(self, tuner: Tuner, compiler: LoopCompiler) -> None:
        self.tuner, self.compiler, self.config = tuner, compiler, tuner.config
        self.may_measure = self.config.autotune and not self.config.gpu_interpreter
        self.known: dict[Key, Knobs | None] = {}
        self.verdicts: list[Verdict] = []

    @property
    def is_worth_asking(self) -> bool:
        """Whether a loop kernel was measured on this machine, or may be now."""
        if self.may_measure or ASKED.get() is not None:
            return True
        if not self.config.measurements or self.config.gpu_interpreter:
            return False
        kinds = {self.tuner.compiler.name(kind): kind for kind in ("cpu", "cuda")}
        entries = (one for file in self.tuner.chain.files for one in file.entries())
        return any(one.key.device in kinds and one.template in loop_names(kinds[one.key.device]) for one in entries)

    def tune(self, plan: Schedule) -> None:
        """Gives the plan's loop kernels the configurations that are known, or found, to be the fastest."""
        queries = [one for one in (self._query(step, plan.graph) for step in plan.kernels) if one is not None]
        for query in queries:
            if query.key not in self.known:
                self.known[query.key] = self._found(query) if self.config.measurements else None
        if self.may_measure:
            self._measure({q.key: q for q in queries if self.known[q.key] is None}, plan.graph)
        asked = ASKED.get()
        if asked is not None:
            asked.update((query.key, self.known[query.key] is not None) for query in queries)
        chosen = {q.step.name: self._chosen(q) for q in queries}
        plan.steps[:] = [
            replace(step, choice=chosen[step.name]) if isinstance(step, Kernel) and chosen.get(step.name) else step
            for step in plan.steps
        ]
        plan.verdicts += self.verdicts

    def _query(self, step: object, graph: ir.Graph) -> _Query | None:
        """What is asked of a step, if it is a loop kernel with a choice, and large enough. With "stable" numerics, sums keep
        the order that they have by rule."""
        if not isinstance(step, Kernel) or step.contracts or (self.tuner.stable and not _makes_points(step)):
            return None
        problem = self.compiler.problem(step, graph)
        if _bytes(step, graph) < LEAST_BYTES[problem.device]:
            return None
        template = loop_template(problem)
        configs = tuple(c for c in template.configs(problem) if unusable.usable(template.name, c.values, lambda: None))
        key = key_of_loops(problem, template.name, self.tuner.compiler.name(problem.device), self.config.numerics)
        return _Query(step, problem, template, configs, key) if key is not None and len(configs) > 1 else None

    def _found(self, query: _Query) -> Knobs | None:
        """What the tuning files say, if the template still offers that."""
        known = self.tuner.chain.find(query.key, {query.template.name: query.template.version})
        return next((c for c in query.configs if known is not None and c.values == known.config), None)

    def _chosen(self, query: _Query) -> Choice | None:
        """The configuration, where it is another one than the scheduler's."""
        config = self.known[query.key]
        return None if config in (None, query.configs[0]) else Choice(query.template.name, config.values)

    # ---- measuring ----------------------------------------------------------------------------------------------------

    def _measure(self, missing: Mapping[Key, _Query], graph: ir.Graph) -> None:
        """Those that move most bytes first: the time may not do for all."""
        left = self.config.tuning_seconds - self.tuner.spent
        largest = sorted(missing.values(), key=lambda q: -_bytes(q.step, graph))
        if left <= 0 and missing:
            counters.add("tuning.no_time")
        opened = [one for one in (self._opened(q, graph) for q in largest) if one is not None] if left > 0 else []
        if not opened:
            return
        started = time.monotonic()
        what = ", ".join(one.query.step.name for one in opened)
        with progress(what, sum(len(one.query.configs) for one in opened)) as (step, line):
            failures = build_all(self._made(opened), self.tuner.compiler.build, started + left * COMPILING)
            for (position, number), failure in failures.items():
                opened[position].outcome.failures[number] = failure
            for number, one in enumerate(opened):
                rest = (started + left - time.monotonic()) / (len(opened) - number)
                if rest <= 0:
                    counters.add("tuning.no_time")
                    continue
                self._run(one, max(LEAST_TIMING, min(TIMING, rest / 2)), step)
                self._conclude(one, line)
        self.tuner.spent += time.monotonic() - started

    def _opened(self, query: _Query, graph: ir.Graph) -> _Open | None:
        """The part of the graph that became the kernel, where the scheduler makes the same kernel of that part alone."""
        part = extract_subgraph(graph, query.step)
        if part is None:
            return None
        plan = self.compiler.plan(part)
        for position, step in enumerate(plan.steps):
            if isinstance(step, Kernel) and not step.contracts:
                problem = self.compiler.problem(step, plan.graph)
                if key_of_loops(problem, query.template.name, query.key.device, query.key.numerics) == query.key:
                    return _Open(query, part, plan, position)
        return None

    def _made(self, opened: Sequence[_Open]) -> Iterator[tuple[tuple[int, int], Blueprint]]:
        """The candidates that could be rendered, by the number of the query and their own."""
        for position, one in enumerate(opened):
            for number, config in enumerate(one.query.configs):
                try:
                    made = self.compiler.blueprint(_with_choice(one, config))
                except Exception as cause:  # noqa: BLE001  an author's template may raise anything
                    one.outcome.failures[number] = Failure("failed", f"{type(cause).__name__}: {cause}"[:500])
                    continue
                one.made[number] = made
                yield (position, number), made

    def _run(self, one: _Open, seconds: float, step: Say) -> None:
        data = {n: pickle.dumps(made) for n, made in one.made.items() if n not in one.outcome.failures}
        if 0 not in data:
            return
        query = one.query
        names = {n: _name(query, n) for n in data}
        asked = BenchmarkJob(
            query.key.title, data, arguments(one.part), 0, seconds, COLD[query.problem.device], Setting.here(self.config),
            names, query.is_exact, roundings(one.part, matmuls=True),
        )  # fmt: skip
        found = measure(asked, step)
        one.outcome.seconds = found.seconds
        one.outcome.failures |= found.failures
        counters.add("tuning.measured", len(found.seconds))

    def _conclude(self, one: _Open, line: Say) -> None:
        """Notes the winner, and what became of the others."""
        query, seconds, failures = one.query, one.outcome.seconds, one.outcome.failures
        self.verdicts += [
            Verdict(query.step.name, _name(query, n), Decision.DROPPED, REASONS[failure.why], detail=failure.text)
            for n, failure in sorted(failures.items())
        ]
        if 0 not in seconds:
            return
        fastest = min(seconds, key=lambda n: (seconds[n], n))
        best = fastest if seconds[fastest] < BETTER * seconds[0] else 0
        self.known[query.key] = winner = query.configs[best]
        for number, time_of in sorted(seconds.items(), key=lambda item: item[1]):
            LOG.debug("%s: %s takes %.3g us", query.step.name, _name(query, number), 1e6 * time_of)
        self.tuner.chain.add([
            Entry(
                query.key, query.template.name, query.template.version, winner.values, seconds[best], math.nan, len(seconds),
                entry.now(), software(),
            )
        ])  # fmt: skip
        times = tuple(round(1e6 * seconds[n], 3) for n in (best, 0))
        if best:
            self.verdicts.append(
                Verdict(query.step.name, "", Decision.CHOSEN, Reason.LOOPS_MEASURED, detail=_name(query, best), measured=times)
            )
        dropped = f", {len(failures)} dropped" if failures else ""
        rule = "" if best == 0 else f"; by rule: {times[1]:.1f} us"
        line(f"{query.key.title}: {_name(query, best)}, {times[0]:.1f} us of {len(seconds)} timed{dropped}{rule}")


def _with_choice(one: _Open, config: Knobs) -> Schedule:
    """The plan of the part with the kernel under a configuration."""
    steps = list(one.plan.steps)
    step = steps[one.at]
    assert isinstance(step, Kernel)
    steps[one.at] = replace(step, choice=Choice(one.query.template.name, config.values))
    return replace(one.plan, steps=steps)


def _name(query: _Query, number: int) -> str:
    return f"{query.template.name} {query.configs[number]}"


def _makes_points(step: Kernel) -> bool:
    return all(s.kind == "pointwise" for s in step.statements)


def _bytes(step: Kernel, graph: ir.Graph) -> int:
    """What the kernel reads and writes, each buffer once, at the hints."""
    sizes = Sizes(graph.size_hints)
    names = {load.attr[0] for s in step.statements for load in vs.loads(s.roots)}
    names |= {out for s in step.statements for out, kept in zip(s.outs, s.stored, strict=True) if kept}
    buffers = (graph.buffers[name] for name in names if name in graph.buffers)
    return sum(math.prod(map(sizes.of, b.sizes)) * b.dtype.itemsize for b in buffers)
