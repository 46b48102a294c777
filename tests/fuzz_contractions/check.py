"""One problem, all of its candidates, each compared with float64 on memory that shows what is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from .candidates import Candidate, CandidateCompiler, Prepared, Traced, chosen_of, templates
from .computation import Computation, wrong
from .problem import Problem
from .tensors import GuardedTensor, make

RIGHT, WRONG, NOT_COMPILED, NOT_RUN = "right", "wrong", "not compiled", "not run"
CRASHED, HUNG, SAME = "crashed", "hung", "same as another"
# What is being done with a candidate.
PREPARING, COMPILING, RUNNING = "preparing", "compiling", "running"
# What stands for a candidate where all of them are concerned.
THE_PROBLEM = "the problem"
# By how much an axis of symbolic length is longer in a second call.
LONGER = 9
# What makes a run fail.
FATAL = (WRONG, CRASHED, HUNG)


@dataclass(frozen=True)
class Result:
    """What became of a candidate. `templates` are those that its plan really uses."""

    candidate: str
    outcome: str
    text: str = ""
    templates: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class How:
    """Where a problem runs, and how much of it: `most` configurations of each template (0: all), without the candidates whose
    names are in `skip`; with names in `those`, none but these."""

    device: str = "cuda"
    most: int = 0
    skip: frozenset[str] = frozenset()
    those: frozenset[str] = frozenset()

    @property
    def interpreted(self) -> bool:
        return self.device == "cpu"

    def wants(self, name: str) -> bool:
        return name not in self.skip and (not self.those or name in self.those)


Begin = Callable[[str, str], None]


def check(problem: Problem, how: How, begin: Begin = lambda stage, name: None) -> Iterator[Result]:
    """The results of a problem's candidates, in order. `begin` hears what comes next, as a stage and the candidate's name: a
    kernel may end the process."""
    begin(PREPARING, THE_PROBLEM)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = problem.tf32
    try:
        with torch.no_grad():
            yield from _Check(problem, how).results(begin)
    finally:
        torch._dynamo.reset()


class _Sample:
    """Tensors of a problem, what eager makes of them, and what it should be."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.computation = Computation(problem)
        generator = torch.Generator(device).manual_seed(abs(problem.seed))
        self.guarded: list[GuardedTensor] = [make(spec, torch.device(device), generator) for spec in self.computation.specs]
        self.flat = [guarded.tensor for guarded in self.guarded]
        self.expected = self.computation.expected(self.flat)
        self.eager: list[torch.Tensor] = []

    def wrong(self, got: Sequence[torch.Tensor]) -> str:
        """What is wrong with results; memory around the inputs is put right again."""
        problem = wrong(got, self.eager, self.expected, self.computation.norm_limit)
        if any(guarded.damaged for guarded in self.guarded):
            problem = problem or "it wrote to its inputs, or to memory next to them"
            for guarded in self.guarded:
                guarded.memory.copy_(guarded.before)
        return problem


class _Check:
    def __init__(self, problem: Problem, how: How) -> None:
        self.problem, self.how = problem, how
        self.samples = [_Sample(one, how.device) for one in sizes_of(problem)]

    def results(self, begin: Begin) -> Iterator[Result]:
        traced = Traced(self.samples[0].computation.run, self.problem.dynamic)
        for sample in self.samples:
            sample.eager = tree_leaves(traced.call(*sample.flat))
            yield Result("eager", RIGHT, sample.wrong(sample.eager))  # a note: eager rounds more often
        compiler = CandidateCompiler(traced.graphs[0], self.how.interpreted)
        if len(traced.graphs) > 1:  # torch has guarded a size
            self.samples = self.samples[:1]
        prepared: list[Prepared] = []
        for candidate in self._wanted(compiler):
            made = candidate if isinstance(candidate, Result) else _prepared(compiler, candidate, prepared)
            if isinstance(made, Result):
                yield made
            else:
                prepared.append(made)
        for one in prepared:
            name, used = str(one.candidate), tuple(sorted(one.templates))
            begin(COMPILING, name)
            try:
                traced.graphs[0].run = one.build()
            except Exception as cause:
                yield Result(name, NOT_COMPILED, _text(cause), used)
                continue
            begin(RUNNING, name)
            found = (self._run(traced, sample) for sample in self.samples)
            yield replace(next((r for r in found if r.outcome != RIGHT), Result("", RIGHT)), candidate=name, templates=used)

    def _wanted(self, compiler: CandidateCompiler) -> Iterator[Candidate | Result]:
        """The candidates that are to be checked; templates that cannot even say which they have."""
        yield from (one for one in (Candidate(),) if self.how.wants(str(one)))
        for template in templates(self.how.interpreted):
            try:
                chosen = chosen_of(compiler, template, self.problem.seed, self.how.most)
            except Exception as cause:
                yield Result(template, NOT_COMPILED, _text(cause))
                continue
            yield from (c for c in chosen if self.how.wants(str(c)))

    def _run(self, traced: Traced, sample: _Sample) -> Result:
        try:
            got = tree_leaves(traced.call(*sample.flat))
            if self.how.device != "cpu":
                torch.cuda.synchronize()
        except Exception as cause:
            return Result("", NOT_RUN, _text(cause))
        problem = sample.wrong(got)
        return Result("", WRONG if problem else RIGHT, problem)


def sizes_of(problem: Problem) -> list[Problem]:
    """The problem, and with symbolic sizes the same with a longer axis, of which the graph knows nothing."""
    if not problem.dynamic:
        return [problem]
    name, length = next((name, length) for name, length in problem.sizes if name in "mn")
    return [problem, problem.with_size(name, length + LONGER)]


def _prepared(compiler: CandidateCompiler, candidate: Candidate, known: Collection[Prepared]) -> Prepared | Result:
    """The candidate, unless its kernels are another one's."""
    try:
        made = compiler.prepare(candidate)
    except Exception as cause:
        return Result(str(candidate), NOT_COMPILED, _text(cause))
    if any(made.identity == other.identity for other in known):
        return Result(str(candidate), SAME)
    return made


def _text(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {str(cause).strip()[:800]}"
