"""What decides about a contraction's kernel, and what it is expected to take."""

from __future__ import annotations

from collections.abc import Mapping

from kgen.cost.tuning_query import Place, TuningResult
from kgen.ir.plan import Kernel
from kgen.scheduler.protocol import Attempt
from kgen.scheduler.selection.choose import Given, best_of, contraction_of
from kgen.scheduler.selection.size_buckets import Best


def given_for(attempt: Attempt, out: str) -> Given:
    """What decides about the template of a contraction besides the cost model."""
    draft, options = attempt.draft, attempt.options
    vendor, source = out not in draft.without_library, draft.measured_as.get(out, out)
    return Given(options.demands, options.only, vendor, attempt.tuning_results.get(source, {}), options.stable)


def estimate(attempt: Attempt, kernel: Kernel) -> Best | None:
    """The best to be had of a kernel by the cost model, whatever the user demands; None where no template has it."""
    return _best(attempt, kernel, {})


def measured_or_estimated(attempt: Attempt, kernel: Kernel) -> Best | None:
    """The best to be had of a kernel as it was measured, else by the cost model; None where no template has it."""
    return _best(attempt, kernel, attempt.tuning_results.get(contraction_of(kernel), {}))


def _best(attempt: Attempt, kernel: Kernel, tuning_results: Mapping[Place, TuningResult]) -> Best | None:
    out, options = contraction_of(kernel), attempt.options
    how = Given(vendor=out not in attempt.draft.without_library, tuning_results=tuning_results, stable=options.stable)
    return best_of(kernel, attempt.graph, options.device(attempt.graph, out), how)
