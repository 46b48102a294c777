"""Contractions that a template computes faster than the library, but not together with what follows: their results are stored,
and kernels of their own read them.

An epilogue runs on few warps, which wait for each of its functions; kernels that do nothing else have many. Where the library
call and separate kernels look faster than one kernel for all, a template for the contraction alone may be faster than that
call. Then the graph is scheduled anew with nothing in its kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kgen.ir.plan import Kernel
from kgen.scheduler.analysis.memory import needed
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import best_of, contraction_of, contractions_of
from kgen.scheduler.transforms.pricing import given_for
from kgen.verdict import Outcome, Reason, Verdict

# How much faster than the library call a template has to look: it may compute operands that a kernel of their own stores in the
# next attempt, and gradients that one library call makes together are worth less apart.
DOUBT = 1.5


class BareResults(Transform):
    """Keeps what follows a contraction out of its kernel, where only so a template has it."""

    name = "bare results"

    def apply(self, draft: Draft) -> None:
        draft.apart = {**draft.apart, **draft.decisions.refused(self.name)}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        if isinstance(chosen, Kernel) or chosen.reason is not Reason.VENDOR_FASTER or len(contractions_of(kernel)) > 1:
            return {}
        out, alone = contraction_of(kernel), without_epilogue(kernel)
        if len(alone.statements) == len(kernel.statements):
            return {}
        device = attempt.options.device(attempt.graph, out)
        given = replace(given_for(attempt, out), tuning_results={})
        found, whole = (best_of(one, attempt.graph, device, given) for one in (alone, kernel))
        if found is None or whole is None or found.is_unmeasured or whole.problem.has_fused_call:
            return {}
        if found.seconds_of_template * DOUBT >= found.seconds_of_library:
            return {}
        times = (found.seconds_of_template * 1e6, found.seconds_of_library * 1e6)
        why = Verdict(out, "", Outcome.UNPROFITABLE, Reason.BARE, detail=str(found.choice), measured=times)
        return {Candidate(self.name, out): why}

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (candidate.target,)


def without_epilogue(kernel: Kernel) -> Kernel:
    """The kernel of the contraction alone, whose result is stored."""
    out = contraction_of(kernel)
    kept = needed(kernel, [s for s in kernel.statements if out in s.outs])
    return replace(kernel, statements=tuple(replace(s, stored=tuple(o == out for o in s.outs)) for s in kept))
