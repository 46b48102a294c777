"""What measurements say of the matmuls in a plan: asked of the oracle once fusion has said what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kgen.cost import model
from kgen.cost.tuning_query import APART, Copies, Oracle, Place, TuningQuery, TuningResult, TuningResults, place
from kgen.device import Device
from kgen.ir import nodes as ir
from kgen.ir.index import Sizes
from kgen.ir.plan import ComboKernel, Kernel, Launch, Schedule, Step, members
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.fusion.grouped_matmuls import Joining, grouped_problems, join
from kgen.scheduler.protocol import Attempt, Changes, Transform
from kgen.scheduler.selection.choose import contraction_of, problems
from kgen.scheduler.selection.memo import for_form
from kgen.scheduler.selection.size_buckets import buckets_of, length_of
from kgen.scheduler.transforms.operand_padding import possible_copies
from kgen.scheduler.transforms.pricing import estimate
from kgen.scheduler.transforms.split_k import may_cut, possible_parts
from kgen.scheduler.transforms.subgraph_extraction import source_of
from kgen.templates.problem import Problem


class GroupedMatmuls(Transform):
    """Joins contractions that read one operand, where that is estimated to be faster."""

    name = "grouped matmuls"

    def settle(self, attempt: Attempt) -> Changes:
        options = attempt.options
        if options.horizontal_fusion and options.grouped:
            how = Joining(
                lambda out: options.device(attempt.graph, out),
                lambda one: estimate(attempt, one),
                options.demands,
                options.only,
            )
            join(attempt.plan, how)
        return Changes()


class Measurements(Transform):
    """Asks for measured times, now that fusion has said what kernels are made of."""

    name = "measurements"

    def settle(self, attempt: Attempt) -> Changes:
        options = attempt.options
        if options.oracle is not None and options.only is None and options.oracle.is_worth_asking:
            attempt.draft.tuning_results |= ask(options.oracle, attempt)
        return Changes()


def ask(oracle: Oracle, attempt: Attempt) -> TuningResults:
    """Answers by the contractions' results. Parts of a sum, which are contractions of their own, have the answer of the whole,
    and so have contractions that read copies of their operands. What was joined by an estimate stays so only if nothing better
    was measured; grouped kernels get the configuration that was best."""
    found: TuningResults = {}
    plan = attempt.plan

    def device(out: str) -> Device:
        return attempt.options.device(plan.graph, out)

    grouped = _tuning_results(
        oracle, plan, [step for step in plan.steps if isinstance(step, ComboKernel) and step.members[0].choice], device
    )
    plan.steps[:] = [one for step in plan.steps for one in _settled(step, grouped, found, plan.graph, device)]
    single = [step for step in plan.steps if isinstance(step, Kernel) and step.contracts]
    whole = [kernel for kernel in single if contraction_of(kernel) not in attempt.draft.asked]
    known = _tuning_results(oracle, plan, [k for k in whole if contraction_of(k) not in found], device)
    return found | {contraction_of(k): known[k.name] for k in whole if k.name in known}


def _tuning_results(
    oracle: Oracle, plan: Schedule, steps: Sequence[Launch], device: Callable[[str], Device]
) -> Mapping[str, Mapping[Place, TuningResult]]:
    """By the names of the steps."""
    questions = (_question(step, plan.graph, device(contraction_of(members(step)[0]))) for step in steps)
    return oracle.tuning_results([question for question in questions if question is not None], plan.graph)


def _question(step: Launch, graph: ir.Graph, device: Device) -> TuningQuery | None:
    found = _problems(step, graph, device)
    if not found:
        return None
    outs = [contraction_of(kernel) for kernel in members(step)]
    library = all(_has_library(graph, out) for out in outs)
    maker = _makers(graph).get(outs[0])
    apart = len(outs) > 1 or (maker is not None and bool(ir.replaced(maker)))
    length = length_of(found[0])
    if length is not None:
        return TuningQuery(step, found, {}, library, [bucket.hints for bucket in buckets_of(length, graph)], apart=apart)
    cuttable = isinstance(step, Kernel) and may_cut(step, Sizes(graph.size_hints), device)
    parts = possible_parts([own[0] for own in found], members(step)[0]) if cuttable else {}
    if not isinstance(step, Kernel) or parts:
        return TuningQuery(step, found, parts, library, apart=apart)
    return TuningQuery(step, found, parts, library, find_copies=partial(_priced_copies, step, graph, device), apart=apart)


def _priced_copies(step: Kernel, graph: ir.Graph, device: Device) -> Copies:
    return {name: (c.seconds, c.problems) for name, c in possible_copies(step, graph, device).items()}


def _problems(step: Launch, graph: ir.Graph, device: Device) -> list[list[Problem]]:
    """By template, the problems of all members. Those of equal layers are one layer's."""
    if isinstance(step, ComboKernel):
        return list(grouped_problems(step.members, graph, device).values())
    found = for_form(("problems", device), [step], graph, lambda: problems(step, graph, device, None)[0])
    return [[problem] for problem in found]


def _has_library(graph: ir.Graph, out: str) -> bool:
    """Whether a library call computes the contraction, or several of them and separate kernels do."""
    maker = _makers(graph).get(source_of(graph, out))
    return maker is not None and (maker.vendor is not None or bool(ir.replaced(maker)))


def _makers(graph: ir.Graph) -> Mapping[str, ir.TemplateNode]:
    """By each result of templates, the node that makes it."""
    return memoised_for(
        graph.nodes,
        "makers of results of templates",
        lambda: {out: node for node in graph.nodes if ir.is_template_node(node) for out in ir.outs(node)},
    )


def _settled(
    step: Step,
    grouped: Mapping[str, Mapping[Place, TuningResult]],
    found: TuningResults,
    graph: ir.Graph,
    device: Callable[[str], Device],
) -> Iterator[Step]:
    """The step, or what is better in its place. Where sizes are dynamic, estimates alone say which matmuls are joined."""
    tuning_result = grouped.get(step.name, {}).get(place({})) if isinstance(step, ComboKernel) else None
    if tuning_result is None or not isinstance(step, ComboKernel):
        yield step
        return
    if tuning_result.template in (None, APART):
        yield from (replace(kernel, choice=None, by_size=None) for kernel in step.members)
        if tuning_result.template is None:
            found |= {contraction_of(kernel): {place({}): tuning_result} for kernel in step.members}
        return
    own = grouped_problems(step.members, graph, device(contraction_of(step.members[0]))).get(tuning_result.template, [])
    choice = tuning_result.choice_for(own[0].template) if own else None
    fits = choice is not None and all(model.fits(p, p.template.config(**dict(choice.config))) for p in own)
    yield replace(step, members=tuple(replace(k, choice=choice, by_size=None) for k in step.members)) if fits else step
