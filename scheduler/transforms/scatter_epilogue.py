"""Updates at indices from data as epilogues of matmuls on a CPU: rows of a matmul that are added to a table as they are made.

Points that may hit one element run in order there, so threads share a matmul only along the other axis. Whether a template
keeps that order, and whether what is left to share is enough, is decided with the template: where not, the graph is scheduled
anew with these updates apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kgen.cost import model
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import ComboKernel, Kernel, Statement
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.scheduler.selection.choose import Given, best, contraction_of, demanded, problems
from kgen.scheduler.transforms.pricing import given_for
from kgen.verdict import Outcome, Reason, Verdict

# How much slower one kernel may look than two: estimates are no better, and one does not store the matmul.
DOUBT = 1.05


class ScatterEpilogue(Transform):
    """Has updates in the kernel of the contraction whose rows they add."""

    name = "scatter epilogue"

    def apply(self, draft: Draft) -> None:
        draft.apart = draft.decisions.refused(self.name)

    def settle(self, attempt: Attempt) -> Changes:
        """Updates that contractions of one kernel, which have their template, had better do without."""
        found: dict[Candidate, Verdict] = {}
        for step in attempt.plan.steps:
            if isinstance(step, ComboKernel) and step.members[0].contracts:
                for kernel in step.members:
                    found |= self.objections(kernel, kernel, attempt)
        return Changes(rejected=found)

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        if not scatters(kernel):
            return {}
        out = contraction_of(kernel)
        device = attempt.options.device(attempt.graph, out)
        found = why_scatters_apart(kernel, chosen, attempt.graph, device, given_for(attempt, out))
        return {Candidate(self.name, update): verdict for update, verdict in found.items()}

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (verdict.producer,)


def scatters(kernel: Kernel) -> tuple[Statement, ...]:
    """The updates of a matmul's kernel that have to run in order."""
    return tuple(s for s in kernel.statements if s.in_order) if kernel.contracts else ()


def without_scatters(kernel: Kernel) -> Kernel:
    """The kernel with what its updates need in memory instead."""
    gone = scatters(kernel)
    read = {load.attr[0] for s in gone for load in vs.loads(s.roots)}
    kept = (s for s in kernel.statements if s not in gone)
    stored = (replace(s, stored=tuple(k or o in read for o, k in zip(s.outs, s.stored, strict=True))) for s in kept)
    return replace(kernel, statements=tuple(stored))


def why_scatters_apart(
    kernel: Kernel, chosen: Kernel | Verdict, graph: ir.Graph, device: Device, given: Given
) -> dict[str, Verdict]:
    """By their results, why updates in a matmul's kernel are better off in kernels of their own, once it was `chosen` how to
    make it with them. Estimates decide: nothing has measured the matmul without them."""
    found = scatters(kernel)
    if not found:
        return {}
    if isinstance(chosen, Verdict):
        illegal = chosen.reason is Reason.NO_TEMPLATE
        return _of_each(found, Verdict(
            chosen.producer, "", Outcome.ILLEGAL if illegal else Outcome.UNPROFITABLE,
            Reason.NOT_IN_ORDER if illegal else chosen.reason, detail=chosen.detail, measured=chosen.measured,
        ))  # fmt: skip
    if given.only is not None or demanded(kernel, given.demands):
        return {}
    estimates = replace(given, tuning_results={})
    with_them, alone = (problems(one, graph, device, None)[0] for one in (kernel, without_scatters(kernel)))
    together, bare = best(with_them, estimates), best(alone, estimates)
    if together is None or bare is None:
        return {}
    apart = bare.seconds + model.scatter_seconds(together.problem)
    if together.seconds_of_template <= apart * DOUBT:
        return {}
    times = (together.seconds_of_template * 1e6, apart * 1e6)
    out, detail = contraction_of(kernel), str(bare.choice)
    return _of_each(found, Verdict(out, "", Outcome.UNPROFITABLE, Reason.ORDER_DEAR, detail=detail, measured=times))


def _of_each(found: Iterable[Statement], why: Verdict) -> dict[str, Verdict]:
    return {s.outs[0]: replace(why, consumer=s.outs[0]) for s in found}
