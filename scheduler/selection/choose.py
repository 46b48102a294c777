"""Chooses the template and the configuration of a matmul, or leaves it to the library."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kgen.cost import model
from kgen.cost.tuning_query import APART, Place, TuningResult, place
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Choice, Kernel
from kgen.only import Only
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.selection.memo import for_equal, for_form, memoised_best, prices
from kgen.scheduler.selection.size_buckets import BEATEN, Best, Hints, Prices, choices_by_bucket, length_of
from kgen.scheduler.tiling.loops import collapsed, distinct_touches, linearized, ordered, unflattened
from kgen.templates import registry
from kgen.templates.contract import Config, Template
from kgen.templates.problem import Problem, problem_of
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict


def contraction_of(kernel: Kernel) -> str:
    """The result of the kernel's first contraction."""
    return contractions_of(kernel)[0]


def contractions_of(kernel: Kernel) -> tuple[str, ...]:
    """The results of the kernel's contractions: what the first statement that reads a sum makes of it."""
    return memoised_for(kernel, "contractions", lambda: _contracted_by(kernel))


def _contracted_by(kernel: Kernel) -> tuple[str, ...]:
    found: list[str] = []
    for s in kernel.statements:
        if s.kind == "contraction":
            readers = (r for r in kernel.statements if any(load.attr[0] in s.outs for load in vs.loads(r.roots)))
            found.append(next(readers).outs[0])
    return tuple(found)


def read_by_prologue(kernel: Kernel) -> set[str]:
    """Buffers that operands of a kernel's contractions are computed from."""
    values = [v for s in kernel.statements if s.kind == "contraction" for v in (s.value, *s.factors)]
    return {load.attr[0] for load in vs.loads([v for v in values if v.op != "load" or v.args])}


def prepared(kernel: Kernel, graph: ir.Graph) -> Kernel:
    """The kernel with linear offsets and as few loops as walk through memory in the same way."""
    return for_equal("prepared", kernel, graph, lambda: _prepared(kernel, graph))


def _prepared(kernel: Kernel, graph: ir.Graph) -> Kernel:
    return collapsed(in_order(kernel, graph))


def in_order(kernel: Kernel, graph: ir.Graph) -> Kernel:
    """The kernel with linear offsets and its loops from outermost to innermost in memory."""
    return for_equal("in order", kernel, graph, lambda: _in_order(kernel, graph))


def _in_order(kernel: Kernel, graph: ir.Graph) -> Kernel:
    sizes = Sizes(graph.size_hints)
    kernel = unflattened(linearized(kernel, graph))
    return ordered(kernel, list(distinct_touches(kernel, graph, sizes)), sizes)


def prepared_for(template: Template, kernel: Kernel, graph: ir.Graph) -> Kernel:
    """The kernel as a template's axes want its loops: as few as can be, or, where some walk through one dimension together, as
    they are, for the last taps and the channels may lie in memory as one loop."""
    if not template.implements.windows:
        return prepared(kernel, graph)
    return in_order(kernel, graph)


def problems(kernel: Kernel, graph: ir.Graph, device: Device, only: Only | None) -> tuple[list[Problem], list[str]]:
    """What the registered templates, or the only one that may, could make of a kernel, and why the others could not."""
    names = None if only is None else only.names
    how = ("problems", device, names)
    found, refusals = for_equal(how, kernel, graph, lambda: _problems(kernel, graph, device, names))
    return list(found), list(refusals)


def _problems(kernel: Kernel, graph: ir.Graph, device: Device, only: tuple[str, ...] | None) -> tuple[list[Problem], list[str]]:
    found: list[Problem] = []
    refusals: list[str] = []
    for template in registry.every(device.kind):
        if only is not None and template.name not in only:
            continue
        problem = problem_of(template, prepared_for(template, kernel, graph), graph, device)
        reason = problem if isinstance(problem, str) else template.refuse(problem)
        if isinstance(problem, str) or reason is not None:
            refusals.append(f"{template.name}: {reason}")
        else:
            found.append(problem)
    return found, refusals


def chosen_problem(kernel: Kernel, graph: ir.Graph, device: Device) -> Problem:
    """The problem of a kernel that has its template."""
    assert kernel.choice is not None
    template = registry.find(kernel.choice.template)
    problem = problem_of(template, prepared_for(template, kernel, graph), graph, device)
    assert isinstance(problem, Problem)
    return problem


def part_blocks(kernel: Kernel, graph: ir.Graph, device: Device) -> dict[str, int]:
    """How many points the parts of the kernel's partial reductions have under its template's tile, by their first results."""
    assert kernel.choice is not None
    problem = chosen_problem(kernel, graph, device)
    config = problem.template.config(**dict(kernel.choice.config))
    return {name: block for name, block in problem.part_blocks(config).items() if block is not None}


@dataclass(frozen=True, slots=True)
class Given:
    """What decides besides the cost model: the user's demands, the one template that may take matmuls, whether a library call
    computes the matmul, what was measured, by `place`, and whether that may change the order in which sums are added, or the
    choice of the library."""

    demands: tuple[FusionDemand, ...] = ()
    only: Only | None = None
    vendor: bool = True
    tuning_results: Mapping[Place, TuningResult] = field(default_factory=dict)
    stable: bool = False

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What changes the best to be had, besides the only template."""
        return self.vendor, self.stable, tuple(self.tuning_results.items())


def best_of(kernel: Kernel, graph: ir.Graph, device: Device, given: Given) -> Best | None:
    """The best of a kernel, the same for all that are equal but for names: its problem may be that of another one."""
    only = None if given.only is None else given.only.names
    how = ("best of", device, only, *given.key)
    return for_form(how, [kernel], graph, lambda: best(problems(kernel, graph, device, given.only)[0], given))


def best(problems: Sequence[Problem], given: Given) -> Best | None:
    """The best to be had of a matmul, over all sizes that it may have: as it was measured, else as the cost model has it."""
    by_template = {problem.template.name: problem for problem in problems}

    def here(hints: Hints) -> Best | None:
        tuning_result = given.tuning_results.get(place(hints))
        return _best_here([problem.at(hints) for problem in problems], given, tuning_result)

    def seconds(choice: Choice, hints: Hints) -> float:
        problem = by_template[choice.template].at(hints)
        config = problem.template.config(**dict(choice.config))
        return model.seconds(problem, config) if model.fits(problem, config) else math.inf

    fused = any(problem.has_fused_call for problem in problems[:1])
    return memoised_best(problems, (*given.key, fused), lambda: choices_by_bucket(problems[:1], Prices(here, seconds)))


def _best_here(problems: Sequence[Problem], given: Given, tuning_result: TuningResult | None) -> Best | None:
    """The best at the sizes of the hints, by estimates that can be relied on, if there are any."""
    priced = [
        (problem.uncalibrated is not None, seconds, k, problem, config)
        for k, problem in enumerate(problems) for config, seconds in prices(problem)
    ]  # fmt: skip
    if not priced:
        return None
    _, seconds, _, problem, config = min(priced, key=lambda row: row[:3])
    vendor = given.vendor and not given.stable
    found = Best(problem, config, seconds, model.vendor_seconds(problem) if vendor else math.inf)
    return found if tuning_result is None else _measured(found, problems, tuning_result, given)


def _measured(estimated: Best, problems: Sequence[Problem], result: TuningResult, given: Given) -> Best:
    """What was measured in the place of estimates, as far as it can still be had. Of a sum in parts, the template and its knobs
    are those for the parts."""
    library = result.library_seconds if given.vendor and not given.stable else math.inf
    if result.template in (None, APART):
        others = result.seconds if given.vendor else math.inf
        return estimated if given.stable else replace(
            estimated, seconds_of_template=result.seconds * BEATEN, seconds_of_library=others, measured=True
        )  # fmt: skip
    problem = next((p for p in problems if p.template.name == result.template), None)
    choice = None if problem is None else result.choice_for(problem.template)
    if problem is None or choice is None:
        return estimated
    config = problem.template.config(**dict(choice.config))
    other = given.stable and model.order(problem, config) != model.order(estimated.problem, estimated.config)
    if other or not model.fits(problem, config):
        return estimated
    return Best(problem, config, result.seconds, math.inf if math.isnan(library) else library, measured=True)


def choose_template(kernel: Kernel, graph: ir.Graph, device: Device, given: Given) -> Kernel | Verdict:
    """The kernel with the fastest template and configuration, as it was measured, else as the cost model estimates, or why the
    library has it."""
    out = contraction_of(kernel)
    chosen = best_of(kernel, graph, device, given)
    if chosen is None:
        found, refusals = problems(kernel, graph, device, given.only)
        refusals += [f"{p.template.name}: no configuration fits the device" for p in found if not prices(p)]
        return Verdict(out, "", Outcome.EXTERN, Reason.NO_TEMPLATE, detail="; ".join(refusals))
    name = chosen.problem.template.name
    if given.only is not None:
        return replace(kernel, choice=Choice(name, given.only.pick(by_estimate(chosen.problem)).values))
    times = (chosen.seconds_of_template * 1e6, chosen.seconds_of_library * 1e6)
    reason = _why_library(chosen, given)
    if reason is not None and not demanded(kernel, given.demands):
        detail = chosen.problem.uncalibrated if reason is Reason.UNCALIBRATED else name
        return Verdict(out, "", Outcome.EXTERN, reason, detail=detail or name, measured=times)
    return replace(kernel, choice=chosen.choice, by_size=chosen.by_size)


def _why_library(chosen: Best, given: Given) -> Reason | None:
    """Why the library has a matmul that it computes as well; None where the template has it."""
    if not given.vendor:
        return None
    if chosen.is_unmeasured and not given.stable:
        return Reason.UNCALIBRATED
    faster = chosen.seconds_of_library < chosen.seconds_of_template
    return (Reason.VENDOR_MEASURED if chosen.measured else Reason.VENDOR_FASTER) if faster else None


def least_seconds(problems: Sequence[Problem], vendor: bool) -> float:
    """The time of the best that templates make of one matmul, or, where it is a `vendor`'s too, the library; infinite where
    nothing computes it."""
    own = template_seconds(problems, vendor)
    return min([own, *(model.vendor_seconds(problem) for problem in problems[:1] if vendor)])


def template_seconds(problems: Sequence[Problem], vendor: bool) -> float:
    """The time of the best template for one matmul, infinite where there is none. Where it is a `vendor`'s too, only estimates
    count that were compared with measurements."""
    known = (problem for problem in problems if not (vendor and problem.uncalibrated))
    return min((seconds for problem in known for _, seconds in prices(problem)), default=math.inf)


def by_estimate(problem: Problem) -> list[Config]:
    """The configurations that the device can run, the fastest first by the cost model."""
    return [config for config, _ in sorted(prices(problem), key=lambda row: row[1])]


def next_best(kernel: Kernel, graph: ir.Graph, device: Device) -> list[Choice]:
    """The choices that come after a kernel's own, the best first by estimates, as far as they are thought to be faster than the
    library. None where sizes are known at run time only: then several are chosen, each for some."""
    found, _ = problems(kernel, graph, device, None)
    if not found or length_of(found) is not None:
        return []
    rows = [
        ((problem.uncalibrated is not None, seconds), Choice(problem.template.name, config.values))
        for problem in found for config, seconds in prices(problem) if seconds < model.vendor_seconds(problem)
    ]  # fmt: skip
    return [choice for _, choice in sorted(rows, key=lambda row: row[0]) if choice != kernel.choice]


def demanded(kernel: Kernel, demands: tuple[FusionDemand, ...]) -> bool:
    """Whether a require_fused asks for two operators of the kernel."""
    calls = [call for o in kernel.origins for call in o.calls]
    return any(d.wanted and d.between(calls, calls) for d in demands)
