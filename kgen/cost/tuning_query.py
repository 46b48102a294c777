"""What the scheduler asks of whoever knows measured times, and gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kgen.ir.plan import Choice

if TYPE_CHECKING:
    from kgen.ir import nodes as ir
    from kgen.ir.index import Size
    from kgen.ir.plan import Launch
    from kgen.templates.contract import Template
    from kgen.templates.problem import Problem
    from kgen.verdict import Verdict


# In the place of a template's name: matmuls that might share a kernel, or be steps in one, are faster with one each.
APART = "a kernel for each"
# In the place of a template's knobs: the library's one call for the matmul and what follows, where it has one.
FUSED = (("fused", True),)


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The fastest way to compute a matmul: a template with the values of its knobs, its sum cut into so many parts, with
    copies of these operands (operand padding); or, without a template, the library and separate kernels, or its one
    call for all (`FUSED`). Times in seconds, NaN where unknown."""

    template: str | None
    config: tuple[tuple[str, Any], ...]
    parts: int
    seconds: float
    library_seconds: float
    copies: str = ""

    def choice_for(self, template: Template) -> Choice | None:
        """The configuration, if the template still has the knobs that were measured."""
        values = dict(self.config)
        return Choice(template.name, template.config(**values).values) if set(values) == set(template.knobs) else None


Copies = Mapping[str, tuple[float, Sequence["Problem"]]]


@dataclass(frozen=True, slots=True)
class TuningQuery:
    """A kernel of one matmul, or of several that share an operand, and how templates see it: for each template the problems
    of all members. `parts` is into how many parts its sum might be cut, with the elements of the tile for which it would be so
    many, `vendor` whether a library call computes it. It is asked for each of the `hints`: where sizes are dynamic, these are
    one length after the other. `find_copies` finds out about `copies` once somebody measures. `apart`: it is of several
    contractions, each of which templates may compute by itself."""

    step: Launch
    problems: Sequence[Sequence[Problem]]
    parts: Mapping[int, int] = field(default_factory=dict)
    vendor: bool = True
    hints: Sequence[Mapping[Size, int]] = ({},)
    find_copies: Callable[[], Copies] = dict
    apart: bool = False

    @property
    def copies(self) -> Copies:
        """The operands that may be copied, with the seconds that this is estimated to take, and how templates see it then."""
        return self.find_copies()

    @property
    def is_program(self) -> bool:
        """Whether it is of several contractions with work between them."""
        return any(problem.template.implements.program is not None for problems in self.problems for problem in problems)


Place = frozenset[tuple["Size", int]]
# By the results of contractions.
TuningResults = dict[str, Mapping[Place, TuningResult]]


def place(hints: Mapping[Size, int]) -> Place:
    """Size hints as a key."""
    return frozenset(hints.items())


class Oracle(Protocol):
    """Answers from measurements, old or new. Questions without an answer are left to the cost model."""

    @property
    def is_worth_asking(self) -> bool:
        """Whether there can be any answer."""

    def tuning_results(self, questions: Sequence[TuningQuery], graph: ir.Graph) -> Mapping[str, Mapping[Place, TuningResult]]:
        """Answers by the names of the steps and by the hints for which they hold."""

    def verdicts(self) -> list[Verdict]:
        """What became of candidates that were measured; each once."""
