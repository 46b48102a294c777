"""Chooses the template and the configuration of a product, or leaves it to the library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kgen import ir
from kgen import values as vs
from kgen.plan import Choice, Kernel
from kgen.scheduler.loops import collapsed, distinct_touches, linearized, ordered, unflattened
from kgen.sizes import Sizes
from kgen.templates import registry
from kgen.templates.contract import Config
from kgen.templates.problem import Device, Problem, problem_of
from kgen.tuning import model
from kgen.tuning.answer import Answer
from kgen.tuning.only import Only
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict


def product_of(kernel: Kernel) -> str:
    """The result of the kernel's first product."""
    return products_of(kernel)[0]


def products_of(kernel: Kernel) -> tuple[str, ...]:
    """The results of the kernel's products: what the first statement that reads a sum makes of it."""
    found: list[str] = []
    for s in kernel.statements:
        if s.kind == "contraction":
            readers = (r for r in kernel.statements if any(load.attr[0] in s.outs for load in vs.loads(r.roots)))
            found.append(next(readers).outs[0])
    return tuple(found)


def prepared(kernel: Kernel, graph: ir.Graph) -> Kernel:
    """The kernel with linear offsets and as few loops as walk through memory alike."""
    sizes = Sizes(graph.size_hints)
    kernel = unflattened(linearized(kernel, graph))
    return collapsed(ordered(kernel, list(distinct_touches(kernel, graph, sizes)), sizes))


def problems(kernel: Kernel, graph: ir.Graph, device: Device, only: Only | None) -> tuple[list[Problem], list[str]]:
    """What the registered templates, or the only one that may, could make of a kernel, and why the others could not."""
    found: list[Problem] = []
    refusals: list[str] = []
    ready = prepared(kernel, graph)
    for template in registry.every(device.kind):
        if only is not None and template.name != only.template:
            continue
        problem = problem_of(template, ready, graph, device)
        reason = problem if isinstance(problem, str) else template.refuse(problem)
        if isinstance(problem, str) or reason is not None:
            refusals.append(f"{template.name}: {reason}")
        else:
            found.append(problem)
    return found, refusals


def chosen_problem(kernel: Kernel, graph: ir.Graph, device: Device) -> Problem:
    """The problem of a kernel that has its template."""
    assert kernel.choice is not None
    problem = problem_of(registry.find(kernel.choice.template), prepared(kernel, graph), graph, device)
    assert isinstance(problem, Problem)
    return problem


def part_blocks(kernel: Kernel, graph: ir.Graph, device: Device) -> dict[str, int]:
    """How many points the parts of the kernel's partial reductions have under its template's tile, by their first results."""
    assert kernel.choice is not None
    problem = chosen_problem(kernel, graph, device)
    config = problem.template.config(**dict(kernel.choice.config))
    return {name: block for name, block in problem.part_blocks(config).items() if block is not None}


@dataclass(frozen=True, slots=True)
class Best:
    """The best that can be had of a product: the configuration of a template, its time, and the library's, in seconds."""

    problem: Problem
    config: Config
    seconds_of_template: float
    seconds_of_library: float

    @property
    def seconds(self) -> float:
        return min(self.seconds_of_template, self.seconds_of_library)


def best(problems: Sequence[Problem], vendor: bool) -> Best | None:
    """What the cost model likes best; `vendor` says whether there is a library call that computes the product."""
    priced = [
        (model.seconds(problem, config), k, problem, config)
        for k, problem in enumerate(problems) for config in model.feasible(problem)
    ]  # fmt: skip
    if not priced:
        return None
    seconds, _, problem, config = min(priced, key=lambda row: row[:2])
    return Best(problem, config, seconds, model.vendor_seconds(problem) if vendor else math.inf)


@dataclass(frozen=True, slots=True)
class Given:
    """What else decides: the user's demands, the one template that may take products, whether a library call computes the
    product, what was measured, and whether that may change the order in which sums are added, or the choice of the library."""

    demands: tuple[FusionDemand, ...] = ()
    only: Only | None = None
    vendor: bool = True
    answer: Answer | None = None
    stable: bool = False


def choose_template(kernel: Kernel, graph: ir.Graph, device: Device, given: Given) -> Kernel | Verdict:
    """The kernel with the fastest template and configuration, as it was measured, else as the cost model estimates, or why the
    library has it."""
    out = product_of(kernel)
    found, refusals = problems(kernel, graph, device, given.only)
    refusals += [f"{p.template.name}: no configuration fits the device" for p in found if not any(model.feasible(p))]
    chosen = best(found, given.vendor and not given.stable)
    if chosen is None:
        return Verdict(out, "", Outcome.EXTERN, Reason.NO_TEMPLATE, detail="; ".join(refusals))
    name = chosen.problem.template.name
    if given.only is not None:
        return replace(kernel, choice=Choice(name, given.only.pick(by_estimate(chosen.problem)).values))
    known = _answered(given.answer, found)
    if known is not None and (not given.stable or model.order(*known) == model.order(chosen.problem, chosen.config)):
        return replace(kernel, choice=Choice(known[0].template.name, known[1].values))
    library, reason = chosen.seconds_of_library < chosen.seconds_of_template, Reason.VENDOR_FASTER
    times = (chosen.seconds_of_template * 1e6, chosen.seconds_of_library * 1e6)
    if given.answer is not None and given.answer.template is None and not given.stable:
        library, reason, times = True, Reason.VENDOR_MEASURED, (math.nan, given.answer.library_seconds * 1e6)
    if library and given.vendor and not _demanded(kernel, given.demands):
        return Verdict(out, "", Outcome.EXTERN, reason, detail=name, measured=times)
    return replace(kernel, choice=Choice(name, chosen.config.values))


def by_estimate(problem: Problem) -> list[Config]:
    """The configurations that the device can run, the fastest first by the cost model."""
    return sorted(model.feasible(problem), key=lambda config: model.seconds(problem, config))


def _answered(answer: Answer | None, problems: Sequence[Problem]) -> tuple[Problem, Config] | None:
    """What was measured to be fastest, if that is a template that still takes the problem so. Of a sum in parts, the template
    and its knobs are those for the parts."""
    problem = next((p for p in problems if answer is not None and p.template.name == answer.template), None)
    if answer is None or problem is None or set(dict(answer.config)) != set(problem.template.knobs):
        return None
    config = problem.template.config(**dict(answer.config))
    return (problem, config) if model.fits(problem, config) else None


def _demanded(kernel: Kernel, demands: tuple[FusionDemand, ...]) -> bool:
    """Whether a require_fused asks for two operators of the kernel."""
    operators = [op for o in kernel.origins for op in o.operators]
    return any(d.wanted and d.between(operators, operators) for d in demands)
