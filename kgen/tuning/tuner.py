"""Decides by measured times: looks them up in tuning files, and in the max-autotune modes measures what is missing.

A question is a kernel of a matmul with all that was fused into it. Its benchmark job compares configurations of the templates
that take it and the library with separate kernels, each compiled from the same part of the graph (subgraph extraction) by the
same pipeline, so that what is timed is what would run: finishing kernels, sums that are cut and their addition included. A
candidate wins only with results that agree with the library's.
"""

from __future__ import annotations

import contextvars
import logging
import math
import pickle
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from kgen.build import triton
from kgen.config import Config
from kgen.cost import model
from kgen.cost.tuning_query import APART, FUSED, Place, TuningQuery, TuningResult, place
from kgen.counters import counters
from kgen.host.compiled import Blueprint
from kgen.ir import nodes as ir
from kgen.ir.plan import ComboKernel
from kgen.listeners import Listeners
from kgen.only import Only
from kgen.scheduler.selection.size_buckets import Hints
from kgen.scheduler.transforms.subgraph_extraction import extract_subgraph
from kgen.templates import registry
from kgen.templates.contract import Config as Knobs
from kgen.tuning import entry, store
from kgen.tuning.arguments import arguments, exact_arguments, roundings
from kgen.tuning.benchmark import BenchmarkJob, Check, Setting
from kgen.tuning.building import build_all
from kgen.tuning.entry import Entry, Key
from kgen.tuning.measure import Failure, Outcome, measure
from kgen.tuning.problem_keys import keys_of
from kgen.tuning.progress import Say, progress
from kgen.verdict import Outcome as Decision
from kgen.verdict import Reason, Verdict

__all__ = [
    "ASKED", "COLD", "COMPILING", "LEAST_TIMING", "REASONS", "TIMING", "UNMEASURED", "Candidate", "CandidateCompiler",
    "Tuner", "Unmeasured", "software",
]  # fmt: skip

LOG = logging.getLogger("kgen.tuning")

# What is asked about the graphs that are compiled meanwhile, and whether a measurement has answered it.
ASKED: contextvars.ContextVar[dict[Key, bool] | None] = contextvars.ContextVar("kgen_asked", default=None)


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A kernel whose problem nobody has measured, with the cost model's seconds for the best template and for the library."""

    key: Key
    seconds: float
    library_seconds: float


# Of each kernel once: for a tool that says what is worth measuring.
UNMEASURED: Listeners[Unmeasured] = Listeners()

# Candidates of a benchmark job: the model's favourites, but some of each template; none that the model thinks so much slower.
CANDIDATES, OF_EACH, HOPELESS = 14, 3, 4.0
# Configurations of a sum that is cut, of each template.
CUT_RANKS = 2
# Seconds in which candidates take turns, and the share of a graph's time that compiling them may take.
TIMING, LEAST_TIMING, COMPILING = 1.5, 0.15, 0.6
# Bytes of arguments between two uses of the same ones: more than the caches hold.
COLD = {"cuda": 120e6, "cpu": 60e6}
# Candidates that read copies of operands.
COPIED = 8
# How the knobs that cut a sum and copy operands are called in a tuning file.
SUM_PARTS, COPIES = "parts of the sum", "copies of operands"
LIBRARY = "the library"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to compute a question: a template and its knobs, or the library where there is none. `rank` chooses among the
    configurations of a sum in parts, the model's favourite first; they are known only once it is cut. `copies` are those of
    operands that are stored first."""

    template: str | None
    config: tuple[tuple[str, Any], ...] = ()
    parts: int = 1
    rank: int = 0
    copies: str = ""

    def only(self) -> Only | None:
        """How to have it."""
        return None if self.template in (None, APART) else Only(self.template, self._pick, self.parts, self.copies)

    def _pick(self, configs: Sequence[Knobs]) -> Knobs:
        if self.parts > 1:
            return configs[min(self.rank, len(configs) - 1)]
        return next(c for c in configs if c.values == self.config)

    def __str__(self) -> str:
        if self.template is None and self.config == FUSED:
            return f"{LIBRARY}, in one call"
        cut = f", cut into {self.parts}, choice {self.rank}" if self.parts > 1 else ""
        copied = f", operands copied: {self.copies}" if self.copies else ""
        return f"{self.template} {Knobs(self.config)}{cut}{copied}".rstrip() if self.template else LIBRARY


@dataclass(frozen=True, slots=True)
class CandidateCompiler:
    """What the pipeline provides to compile candidates: `make` compiles a graph's plan by a template, by the library, or, where
    the third argument says so, as the cost model likes each matmul alone, and says which configuration it took; the last
    argument says whether calls of the library may compute more than the matmul. `build` makes machine code; `name` is that of
    the machine that a device is."""

    make: Callable[[ir.Graph, Only | None, bool, bool], tuple[Blueprint, tuple[tuple[str, Any], ...]]]
    build: Callable[[Blueprint], object]
    name: Callable[[str], str]


@dataclass(slots=True)
class _Open:
    """A question that is being measured."""

    question: TuningQuery
    key: Key
    part: ir.Graph
    candidates: list[Candidate]
    made: dict[int, Blueprint] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)


class Tuner:
    """The oracle of one graph's compilation."""

    def __init__(self, config: Config, compiler: CandidateCompiler) -> None:
        self.config, self.compiler = config, compiler
        self.stable = config.numerics == "stable"
        self.chain = store.stores(config)
        self.known: dict[Key, TuningResult | None] = {}
        self.verdicts_: list[Verdict] = []
        self.spent = 0.0
        self.noted: set[tuple[str, Key]] = set()

    @cached_property
    def is_worth_asking(self) -> bool:
        """Whether anything was measured on this machine, or may be now."""
        if (self.config.autotune and not self.config.gpu_interpreter) or ASKED.get() is not None:
            return True
        if UNMEASURED.heard:
            return True
        names = {self.compiler.name(kind) for kind in ("cpu", "cuda")} if self.config.measurements else set()
        return any(e.key.device in names for file in self.chain.files for e in file.entries())

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, TuningResult]]:
        """Answers by the names of the steps and by hints; a question without one is left to the cost model."""
        keys = {q.step.name: self._keys(q, graph) for q in questions if q.problems}
        for question, key in ((q, key) for q in questions for key in keys.get(q.step.name, ())):
            if key not in self.known:
                self.known[key] = self._found(key, question) if self.config.measurements else None
        if self.config.autotune and not self.config.gpu_interpreter:
            asked = {q.step.name: q for q in questions if q.step.name in keys}
            requests = [(key, q, hints) for name, q in asked.items() for key, hints in zip(keys[name], q.hints, strict=True)]
            self._measure({key: (q, hints) for key, q, hints in requests if self.known[key] is None}, graph)
        asked_meanwhile = ASKED.get()
        if asked_meanwhile is not None:
            asked_meanwhile.update((key, self.known[key] is not None) for own in keys.values() for key in own)
        if UNMEASURED.heard:
            self._note_unmeasured([(q, keys[q.step.name]) for q in questions if q.step.name in keys])
        return {q.step.name: self._known(keys[q.step.name], q.hints) for q in questions if q.step.name in keys}

    def _note_unmeasured(self, asked: Sequence[tuple[TuningQuery, Sequence[Key]]]) -> None:
        """Each attempt at a graph asks again."""
        for question, keys in asked:
            for key, hints in zip(keys, question.hints, strict=True):
                if self.known[key] is None and (question.step.name, key) not in self.noted:
                    self.noted.add((question.step.name, key))
                    UNMEASURED.note(partial(_unmeasured, key, question, hints))

    def _known(self, keys: Sequence[Key], hints: Sequence[Hints]) -> dict[Place, TuningResult]:
        found = {place(at): self.known[key] for key, at in zip(keys, hints, strict=True)}
        return {at: tuning_result for at, tuning_result in found.items() if tuning_result is not None}

    def verdicts(self) -> list[Verdict]:
        verdicts_, self.verdicts_ = self.verdicts_, []
        return verdicts_

    def _keys(self, question: TuningQuery, graph: ir.Graph) -> list[Key]:
        device = self.compiler.name(_device(question))
        return keys_of(question.step, graph, device, self.config.numerics, question.hints)

    # ---- what is known ----------------------------------------------------------------------------------------------

    def _found(self, key: Key, question: TuningQuery) -> TuningResult | None:
        known = self.chain.find(key, _versions(_device(question), question.is_program))
        if known is None:
            return None
        knobs = dict(known.config)
        parts, copies = knobs.pop(SUM_PARTS, 1), knobs.pop(COPIES, "")
        return TuningResult(known.template, tuple(knobs.items()), parts, known.seconds, known.library_seconds, copies)

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, missing: Mapping[Key, tuple[TuningQuery, Hints]], graph: ir.Graph) -> None:
        left = self.config.tuning_seconds - self.spent
        if left <= 0 and missing:
            counters.add("tuning.no_time")
        opened = [self._opened(key, *asked, graph) for key, asked in missing.items()] if left > 0 else []
        benchmarks = [benchmark for benchmark in opened if benchmark is not None]
        if not benchmarks:
            return
        started = time.monotonic()
        steps = sum(len(c.candidates) for c in benchmarks)
        with progress(", ".join(c.question.step.name for c in benchmarks), steps) as (step, line):
            self._compile(benchmarks, started + left * COMPILING)
            for number, benchmark in enumerate(benchmarks):
                rest = (started + left - time.monotonic()) / (len(benchmarks) - number)
                self._run(benchmark, max(LEAST_TIMING, min(TIMING, rest / 2)), step)
                self._conclude(benchmark, line)
        self.spent += time.monotonic() - started

    def _opened(self, key: Key, question: TuningQuery, hints: Hints, graph: ir.Graph) -> _Open | None:
        part = extract_subgraph(graph, question.step)
        if part is None:
            return None
        part.size_hints |= hints
        here = replace(question, problems=[[p.at(hints) for p in own] for own in question.problems])
        return _Open(here, key, part, candidates_of(here, self.stable))

    def _compile(self, benchmarks: Sequence[_Open], deadline: float) -> None:
        """All candidates of all benchmark jobs, several at a time."""
        failures = build_all(self._made(benchmarks), self.compiler.build, deadline)
        for (position, number), failure in failures.items():
            benchmarks[position].outcome.failures[number] = failure

    def _made(self, benchmarks: Sequence[_Open]) -> Iterator[tuple[tuple[int, int], Blueprint]]:
        """The candidates that could be rendered, by the number of the benchmark job and their own."""
        for position, benchmark in enumerate(benchmarks):
            for number, candidate in enumerate(benchmark.candidates):
                try:
                    fused = candidate.template is not None or candidate.config == FUSED
                    made, config = self.compiler.make(benchmark.part, candidate.only(), candidate.template == APART, fused)
                except Exception as cause:  # noqa: BLE001  an author's template may raise anything
                    benchmark.outcome.failures[number] = Failure("failed", f"{type(cause).__name__}: {cause}"[:500])
                    continue
                benchmark.made[number] = made
                if candidate.parts > 1:
                    benchmark.candidates[number] = Candidate(candidate.template, config, candidate.parts, candidate.rank)
                yield (position, number), made

    def _run(self, benchmark: _Open, seconds: float, step: Say) -> None:
        outcome = benchmark.outcome
        ready = {n: b for n, b in benchmark.made.items() if n not in outcome.failures}
        data: dict[int, bytes] = {}
        for number, blueprint in ready.items():
            data[number] = pickle.dumps(blueprint)
        reference = min(data, default=-1)  # the library, where there is a call of it
        if reference < 0:
            return
        names = {n: str(benchmark.candidates[n]) for n in data}
        kind = _device(benchmark.question)
        given = arguments(benchmark.part)
        on_grid = exact_arguments(benchmark.part, given)
        exact = None if on_grid is None else Check(on_grid, roundings(benchmark.part, matmuls=False))
        asked = BenchmarkJob(
            benchmark.key.title,
            data,
            given,
            reference,
            seconds,
            COLD[kind],
            Setting.here(self.config),
            names,
            self.stable,
            roundings(benchmark.part, matmuls=True),
            exact,
            bool(ir.windowed(benchmark.part)),
        )
        found = measure(asked, step)
        outcome.seconds = found.seconds
        outcome.failures |= found.failures
        counters.add("tuning.measured", len(found.seconds))

    def _conclude(self, benchmark: _Open, line: Say) -> None:
        """Notes the winner, and what became of the others."""
        seconds, question = benchmark.outcome.seconds, benchmark.question
        out = question.step.name
        self.verdicts_ += [
            Verdict(out, str(benchmark.candidates[n]), Decision.DROPPED, REASONS[failure.why], detail=failure.text)
            for n, failure in sorted(benchmark.outcome.failures.items())
        ]
        if not seconds:
            return
        best = min(seconds, key=lambda n: (seconds[n], n))
        library = min((s for n, s in seconds.items() if benchmark.candidates[n].template is None), default=math.nan)
        winner = benchmark.candidates[best]
        for number, time_of in sorted(seconds.items(), key=lambda item: item[1]):
            LOG.debug("%s: %s takes %.3g us", out, benchmark.candidates[number], 1e6 * time_of)
        LOG.info("%s: %s is the fastest of %d, %.3g us", out, winner, len(seconds), 1e6 * seconds[best])
        self.known[benchmark.key] = TuningResult(
            winner.template, winner.config, winner.parts, seconds[best], library, winner.copies
        )
        cut = ((SUM_PARTS, winner.parts),) if winner.parts > 1 else ()
        copied = ((COPIES, winner.copies),) if winner.copies else ()
        config = (*winner.config, *cut, *copied)
        versions = _versions(_device(benchmark.question), benchmark.question.is_program)
        made = Entry(
            benchmark.key, winner.template, versions[winner.template or ""], config, seconds[best], library, len(seconds),
            entry.now(), software(),
        )  # fmt: skip
        self.chain.add([made])
        against = "" if math.isnan(library) else f"; {LIBRARY}: {library * 1e6:.1f} us"
        dropped = f", {len(benchmark.outcome.failures)} dropped" if benchmark.outcome.failures else ""
        line(f"{benchmark.key.title}: {winner}, {seconds[best] * 1e6:.1f} us of {len(seconds)} timed{dropped}{against}")


# Why a candidate was dropped, by what `measure` and `build_all` say of it.
REASONS = {
    "not compiled": Reason.NOT_COMPILED, "failed": Reason.FAILED, "wrong": Reason.WRONG_RESULT, "crashed": Reason.CRASHED,
    "hung": Reason.HUNG,
}  # fmt: skip


# ---- candidates -------------------------------------------------------------------------------------------------------


def candidates_of(question: TuningQuery, stable: bool = False) -> list[Candidate]:
    """The library first, if it computes the matmul, then the configurations that the cost model likes. `stable` leaves those
    alone that have the results of its favourite."""
    priced, orders = _priced(question, stable)
    same_order = [(seconds, c) for seconds, _, c in priced if orders[c] == orders[priced[0][2]]]
    kept = _spread(same_order)
    if stable:
        return kept
    takers = [own[0] for own in question.problems if own[0].template.implements.batch]
    for parts, tile in question.parts.items():
        names = [p.template.name for p in takers if any(_has_tile(c, tile) for c in model.feasible(p))]
        kept += [Candidate(name, parts=parts, rank=rank) for name in names for rank in range(CUT_RANKS)]
    kept += _with_copies(question, HOPELESS * priced[0][0] if priced else math.inf)
    fused = any(own.has_fused_call for own in question.problems[0]) if question.problems else False
    library = [Candidate(None), *([Candidate(None, FUSED)] if fused else [])] if question.vendor else []
    return [*library, *([Candidate(APART)] if question.apart else []), *kept]


def _priced(question: TuningQuery, stable: bool) -> tuple[list[tuple[float, int, Candidate]], dict[Candidate, Hashable]]:
    """Templates' configurations with the cost model's seconds, the fastest first, and the order in which each adds."""
    batch = isinstance(question.step, ComboKernel)
    priced: list[tuple[float, int, Candidate]] = []
    orders: dict[Candidate, Hashable] = {}
    for problems in question.problems:
        largest = max(problems, key=lambda p: p.flops)
        for config in (c for c in model.feasible(largest) if all(model.fits(p, c) for p in problems)):
            seconds = model.grouped_seconds(problems, config) if batch else model.seconds(problems[0], config)
            candidate = Candidate(largest.template.name, config.values)
            priced.append((seconds, len(priced), candidate))
            orders[candidate] = tuple(model.order(p, config) for p in problems) if stable else None
    priced.sort(key=lambda row: row[:2])
    return priced, orders


def _unmeasured(key: Key, question: TuningQuery, hints: Hints) -> Unmeasured:
    here = replace(question, problems=[[p.at(hints) for p in own] for own in question.problems])
    priced, _ = _priced(here, stable=False)
    library = sum(model.vendor_seconds(p) for p in here.problems[0]) if question.vendor else math.nan
    return Unmeasured(key, priced[0][0] if priced else math.nan, library)


def _with_copies(question: TuningQuery, hopeless: float) -> list[Candidate]:
    """Those that read copies of operands: the model's favourites, which include some of all ways to copy."""
    priced = [
        (seconds + model.seconds(problem, config), Candidate(problem.template.name, config.values, copies=copies))
        for copies, (seconds, problems) in question.copies.items() for problem in problems for config in model.feasible(problem)
    ]  # fmt: skip
    priced = sorted((row for row in priced if row[0] <= hopeless), key=lambda row: row[0])
    first = [next((c for _, c in priced if c.copies == copies), None) for copies in question.copies]
    return list(dict.fromkeys([*(c for _, c in priced[:COPIED]), *(c for c in first if c is not None)]))


def _has_tile(config: Knobs, elements: int) -> bool:
    """Whether the tile of a configuration is so small; of those without blocks nothing is known."""
    return config.get("BLOCK_M", 1) * config.get("BLOCK_N", 1) <= elements


def _spread(priced: Sequence[tuple[float, Candidate]]) -> list[Candidate]:
    """The first ones, and the first few of each template, as long as they are not hopeless."""
    possible = [candidate for seconds, candidate in priced if seconds <= HOPELESS * priced[0][0]]
    kept = possible[:CANDIDATES]
    for name in dict.fromkeys(c.template for c in possible):
        kept += [c for c in possible if c.template == name][:OF_EACH]
    return list(dict.fromkeys(kept))


# ---- names ------------------------------------------------------------------------------------------------------------


def _device(question: TuningQuery) -> str:
    return question.problems[0][0].device.kind


def _versions(device: str, programs: bool = False) -> dict[str, str]:
    """Those of the templates of a device; under "" what stands for all that the library was compared with. A program has others
    against it than a contraction has, and templates of an operator have no contraction."""
    known = [t for t in registry.every(device) if programs or t.implements.program is None]
    versions = {t.name: t.version for t in known}
    compared = {t.name: t.version for t in known if programs or not t.implements.operator}
    everything = entry.digest({**compared, LIBRARY: "with and without what follows"})
    return {**versions, "": everything, APART: everything}


def software() -> str:
    """What makes a measurement: torch and Triton, with their versions."""
    found = (("torch", torch.__version__), ("triton", triton.version()))
    return ", ".join(f"{name} {version}" for name, version in found if version)
