"""What a conformance check found: one result for each problem and configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum

from kgen.errors import TemplateCheckFailed
from kgen.testing.case import Case

__all__ = ["Outcome", "Report", "Result"]


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"
    SPILLED = "left out"


@dataclass(frozen=True, slots=True)
class Result:
    """One problem under one configuration. `error` is the largest difference to the reference, relative to 1 plus the size of
    the element there, and `tolerance` what the types allow. `kernels` and `calls` are what the whole problem was compiled to;
    `stored` says that the matmul went through memory between two of them. `reason` says what failed or why it was refused."""

    case: Case
    config: str
    outcome: Outcome
    error: float = 0.0
    tolerance: float = 0.0
    kernels: int = 0
    calls: int = 0
    stored: bool = False
    reason: str = ""
    cause: BaseException | None = None

    @property
    def fused(self) -> bool:
        """Whether everything around the template's loop became a part of its kernel."""
        return self.outcome is Outcome.PASSED and not self.calls and not self.stored and self.kernels <= self.case.kernels

    def __str__(self) -> str:
        if self.outcome is Outcome.PASSED:
            launches = f"{self.kernels} kernels" if self.kernels != 1 else "1 kernel"
            text = f"error {self.error:.1e} of {self.tolerance:.1e}, {launches}"
            text += f", {self.calls} library calls" if self.calls else ""
            text += ", the matmul in memory" if self.stored else ""
        else:
            text = self.reason
        config = f" [{self.config}]" if self.config else ""
        return f"{self.outcome.value} {self.case}{config}: {text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of a template, in order. `where` is the device, or "interpreter". `options` are those of the check, as they
    are written in a call; `stopped` is the problem that was not begun, for the time was up."""

    template: str
    where: str
    results: tuple[Result, ...]
    options: str = ""
    stopped: Case | None = None

    @property
    def failed(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome is Outcome.FAILED)

    @property
    def passed(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome is Outcome.PASSED)

    @property
    def refused(self) -> tuple[Result, ...]:
        return tuple(r for r in self.results if r.outcome is Outcome.REFUSED)

    @property
    def spilled(self) -> tuple[Result, ...]:
        """What kgen never runs: its compiler keeps a thread's registers in memory."""
        return tuple(r for r in self.results if r.outcome is Outcome.SPILLED)

    @property
    def problems(self) -> tuple[Case, ...]:
        """The distinct problems."""
        return tuple({id(r.case): r.case for r in self.results}.values())

    @property
    def separate(self) -> tuple[Result, ...]:
        """What passed, but with kernels or calls besides the template's."""
        return tuple(r for r in self.passed if not r.fused)

    def repeats(self, case: Case) -> str:
        """Python that checks one problem again, under the same configurations."""
        return f"kgen.testing.check_template({self.template!r}, only={str(case)!r}{self.options})"

    def raise_if_failed(self) -> None:
        """Raises TemplateCheckFailed for the first problem that failed, and for a template that took no problem at all."""
        for result in self.failed:
            raise TemplateCheckFailed(
                template=self.template,
                case=result.case,
                config=result.config or "any configuration",
                problem=result.reason,
                repeats=self.repeats(result.case),
            ) from result.cause
        if not self.passed:
            first = self.refused[0].reason if self.refused else "there was no problem to check"
            raise TemplateCheckFailed(
                template=self.template,
                case="every problem",
                config="any configuration",
                problem=f"none was taken: {first}",
                repeats=f"kgen.testing.check_template({self.template!r}{self.options})",
            )

    def __str__(self) -> str:
        """Failures, refusals and what is left out one by one, the rest as totals."""
        count, refused = len(self.problems), len({id(r.case) for r in self.refused})
        runs = f"{len(self.results)} runs: {len(self.passed)} passed, {len(self.failed)} failed"
        lines = [f"{self.template} on {self.where}: {count} problems, {runs}; refused {refused} / {count}"]
        lines += [f"  {r}" for r in self.failed]
        lines += [f"  repeat it: {self.repeats(case)}" for case in {id(r.case): r.case for r in self.failed}.values()]
        lines += [f"  the time was up before {self.stopped}"] if self.stopped else []
        reasons = Counter(r.reason for r in self.refused)
        lines += [f"  refused {n}: {reason}" for reason, n in reasons.most_common()]
        lines += [f"  {r}" for r in self.spilled]
        lines += [f"  not fused: {r}" for r in {id(r.case): r for r in self.separate}.values()]
        return "\n".join(lines)
