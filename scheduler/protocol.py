"""What a transform is: a rewrite of the graph around a contraction or a reduction, as a value.

A transform proposes candidates and applies them to a draft of the graph. The driver (`kgen.scheduler.schedule`) fuses the draft
and asks each transform what the plan made of its candidates: which do not hold (`check`), with which numbers others would be
better (`settle`), what a kernel had better do without (`objections`). It then makes a new draft with what it has learnt. The
driver names no transform; `kgen.scheduler.transforms.table` lists them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kgen import errors
from kgen.cost.tuning_query import TuningResults
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, Step
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.options import Options
from kgen.verdict import Verdict

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a transform, by its name, may do around `target`: a buffer of the input graph, or one derived from it."""

    transform: str
    target: str


@dataclass(frozen=True, slots=True)
class Changes:
    """What an attempt has found out: `settings` of candidates (a number of parts, which operands, the size of a tile), and
    those that were `rejected`, with the verdict."""

    settings: Mapping[Candidate, Hashable] = field(default_factory=dict)
    rejected: Mapping[Candidate, Verdict] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.settings or self.rejected)

    def __or__(self, other: Changes) -> Changes:
        return Changes({**self.settings, **other.settings}, {**self.rejected, **other.rejected})


@dataclass(frozen=True, slots=True)
class Decisions:
    """What all attempts so far have found out."""

    settings: Mapping[Candidate, Hashable] = field(default_factory=dict)
    rejected: Mapping[Candidate, Verdict] = field(default_factory=dict)

    def is_open(self, transform: str, target: str) -> bool:
        """Whether a candidate was not rejected."""
        return Candidate(transform, target) not in self.rejected

    def refused(self, transform: str) -> dict[str, Verdict]:
        """The rejected candidates of a transform, by their targets."""
        return {one.target: verdict for one, verdict in self.rejected.items() if one.transform == transform}

    def settled(self, transform: str, kind: type[T]) -> dict[str, T]:
        """The settings of a transform's candidates that were not rejected, by their targets. All are of one `kind`."""
        return dict(memoised_for(self, f"settled {transform}", lambda: self._settled(transform, kind)))

    def _settled(self, transform: str, kind: type[T]) -> dict[str, T]:
        found: dict[str, T] = {}
        for one, value in self.settings.items():
            if one.transform == transform and one not in self.rejected:
                assert isinstance(value, kind), f"{value!r} is no setting of {transform}"
                found[one.target] = value
        return found

    def after(self, changes: Changes) -> Decisions:
        """With what one more attempt has found out. Raises NoProgress where that is nothing: attempts would go on forever."""
        made = Decisions({**self.settings, **changes.settings}, {**self.rejected, **changes.rejected})
        if made.settings == self.settings and made.rejected.keys() == self.rejected.keys():
            refused = ", ".join(f"{one.transform} of {one.target}" for one in changes.rejected)
            raise errors.NoProgress(refused=refused or "nothing")
        return made


@dataclass(slots=True)
class Draft:
    """A graph on its way through the transforms. `graph` is this attempt's own: transforms add buffers to it, its nodes stay
    those of the input, with programs in place of what was recognised. `nodes` are what the transforms made of them, and `given`
    is the graph as it was before.

    `before` are the nodes before any contraction was changed, and `tuning_results` measurements so far. `taken` are
    contractions, by their first results, that templates compute; `single` ones share no kernel with another contraction, and
    updates in `apart` none with any. What `full_row_buffers` names has to be made in the kernel of the contraction it says.
    Programs that are `computing` have operands that could be read from memory instead.
    Contractions that are `asked` are not measured again; those in `measured_as` have the measurements of another one, and no
    library call computes those in `without_library`."""

    graph: ir.Graph
    given: ir.Graph
    nodes: list[ir.Node]
    options: Options
    decisions: Decisions
    tuning_results: TuningResults
    transforms: tuple[Transform, ...] = ()
    before: list[ir.Node] = field(default_factory=list)
    taken: frozenset[str] = frozenset()
    single: frozenset[str] = frozenset()
    computing: frozenset[str] = frozenset()
    apart: Mapping[str, Verdict] = field(default_factory=dict)
    full_row_buffers: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    measured_as: dict[str, str] = field(default_factory=dict)
    without_library: set[str] = field(default_factory=set)
    verdicts: list[Verdict] = field(default_factory=list)


@dataclass(slots=True)
class Attempt:
    """A draft, the plan that fusion made of it, and what was measured."""

    draft: Draft
    plan: Schedule

    @property
    def tuning_results(self) -> TuningResults:
        return self.draft.tuning_results

    @property
    def graph(self) -> ir.Graph:
        return self.draft.graph

    @property
    def options(self) -> Options:
        return self.draft.options

    @property
    def decisions(self) -> Decisions:
        return self.draft.decisions


@dataclass(frozen=True, slots=True)
class Forming:
    """What transforms of fused steps need to know besides the draft: `kept` are buffers that are memory whoever reads them."""

    draft: Draft
    sizes: Sizes
    kept: frozenset[str]
    verdicts: list[Verdict]


class Transform:
    """The base of all transforms: one that does nothing. `name` tells its candidates from others."""

    name = ""

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        """Changes the scheduler's copy of the input once, before any attempt."""

    def apply(self, draft: Draft) -> None:
        """Rewrites the draft's nodes for the candidates that were not rejected. Buffers are added to the draft's graph."""

    def form(self, steps: list[Step], forming: Forming) -> list[Step]:
        """Rewrites fused steps, where a transform moves work between kernels."""
        return steps

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        """Candidates of which fusion has not made what they are for."""
        return {}

    def settle(self, attempt: Attempt) -> Changes:
        """What the plan says of candidates that were not asked before, by estimates or measurements. What needs no other
        attempt, such as the choice of a template, is written into the plan."""
        return Changes()

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        """Candidates that a contraction's kernel had better do without, now that it was `chosen` which template has it, or why
        none has."""
        return {}

    def tried(self, attempt: Attempt) -> Changes:
        """Candidates worth another attempt although the plan is settled; if they are judged to be no better, it stays."""
        return Changes()

    def judged(self, attempt: Attempt, settled: Attempt) -> Mapping[Candidate, Verdict]:
        """Of what was tried, the candidates that make the plan no better than the settled one."""
        return {}

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        """Contractions whose measurements no longer hold once the candidate is rejected: their kernel was another one."""
        return ()

    def finish(self, attempt: Attempt) -> None:
        """Changes the final plan, before memory is planned."""

    def report(self, attempt: Attempt) -> list[Verdict]:
        """What is to be said of the candidates in the final plan."""
        return []
