"""Contractions as kernels of templates: which are offered, with which operands, and which template has each.

Contractions are offered first. Those whose kernel, with all that was fused into it, is estimated to be slower than the library
call and separate kernels go back to the library, and the graph is scheduled anew around the calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial, reduce

from kgen.cost.tuning_query import Place, TuningResult, place
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.nodes import Origin
from kgen.ir.plan import Kernel
from kgen.scheduler.analysis.memo import memoised_for
from kgen.scheduler.kernels.workspaces import provide_workspaces
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Changes, Draft, Transform
from kgen.scheduler.selection.choose import choose_template, contraction_of, contractions_of, read_by_prologue
from kgen.scheduler.selection.size_buckets import forget_first_sizes
from kgen.scheduler.selection.template_decisions import DECISIONS, TemplateDecision
from kgen.scheduler.transforms.accumulators import make_accumulators
from kgen.scheduler.transforms.offered import offered
from kgen.scheduler.transforms.operand_padding import NONE, copies_by_result, from_memory
from kgen.scheduler.transforms.pricing import given_for
from kgen.scheduler.transforms.recompute import recomputed
from kgen.scheduler.transforms.recurrence import spread
from kgen.templates.base import Request
from kgen.verdict import OperatorCall, Outcome, Reason, Verdict

TEMPLATE = "template"
FAMILY = "shared kernel"


class Offer(Transform):
    """Says which contractions templates compute, and which of them share no kernel with another one."""

    name = TEMPLATE

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        names = offered(graph, options)
        forget_first_sizes(graph, [n for n in graph.nodes if ir.is_template_node(n) and names.intersection(ir.outs(n))])

    def apply(self, draft: Draft) -> None:
        open_ = (out for out in offered(draft.graph, draft.options) if draft.decisions.is_open(TEMPLATE, out))
        draft.taken = frozenset((*open_, *recomputed(draft.decisions)))
        draft.single = frozenset(draft.decisions.refused(FAMILY))


# ---- their operands ---------------------------------------------------------------------------------------------------


class Prologues(Transform):
    """Leaves contractions to templates, each operand computed tile by tile or read from memory."""

    name = "prologue"

    def apply(self, draft: Draft) -> None:
        draft.before = draft.nodes
        makers = {node.out: node for node in draft.nodes if isinstance(node, ir.Pointwise)}
        draft.nodes = [_offered(draft, node, makers) if ir.is_template_node(node) else node for node in draft.nodes]
        for node in draft.nodes:
            if ir.is_template_node(node) and node.vendor is None:
                make_accumulators(draft.graph, node)


def _offered(draft: Draft, node: ir.TemplateNode, makers: Mapping[str, ir.Pointwise]) -> ir.TemplateNode:
    if ir.outs(node)[0] not in draft.taken:
        return _from_memory(node)
    if not draft.options.prologues:
        node = _from_memory(node)
    elif ir.is_contraction(node):
        copies = copies_by_result(draft.decisions).get(node.out, NONE)
        node = _with_operands(draft, node, makers, from_memory(copies))
    return node if node.vendor is None else memoised_for(node, "without vendor", partial(replace, node, vendor=None))


def _with_operands(
    draft: Draft, node: ir.Contraction, makers: Mapping[str, ir.Pointwise], stored_first: tuple[bool, bool]
) -> ir.Contraction:
    """Each operand computed tile by tile, which makes its operators the contraction's, or read from the buffer that the library
    call would read: as the user demands, as was chosen, or as templates say of what computing it costs. What other kernels
    write in slices is read."""
    graph, demands, capabilities = draft.graph, draft.options.demands, draft.options.capabilities(draft.graph)
    operands, joined = [], list[tuple[OperatorCall, ...]]()
    for value, stored, first in zip((node.lhs, node.rhs), node.stored or (None, None), stored_first, strict=True):
        maker = None if stored is None or stored is value else makers.get(vs.loads([stored])[0].attr[0])
        prologue = () if maker is None else maker.origin.calls
        asked = {d.wanted for d in demands if d.between(prologue, node.origin.calls)}
        there = first or (stored is not None and any(graph.buffers[load.attr[0]].parts for load in vs.loads([stored])))
        cheap = stored is None or capabilities.may(node.out, Request(prologue_cost=vs.total_cost([value])))
        computed = stored is None or True in asked or (cheap and not (asked or there))
        operands.append(value if computed or stored is None else stored)
        if computed and prologue:
            joined.append(prologue)

    def made() -> ir.Contraction:
        origin = reduce(lambda whole, prologue: Origin(prologue).joined(whole), joined, node.origin)
        origin = replace(origin, name=node.origin.name, line=node.origin.line)
        return replace(node, lhs=operands[0], rhs=operands[1], origin=origin)

    return memoised_for(node, ("with operands", *operands, *joined), made)  # one object: what is known about it holds


def _from_memory(node: ir.TemplateNode) -> ir.TemplateNode:
    """With its operands read from where the library call would read them."""
    if not node.stored:
        return node
    if ir.is_contraction(node):
        return memoised_for(node, "from memory", partial(replace, node, lhs=node.stored[0], rhs=node.stored[1]))
    return memoised_for(node, "from memory", partial(replace, node, operands=node.stored))


# ---- which template ---------------------------------------------------------------------------------------------------


class Selection(Transform):
    """Gives each contraction its template, or leaves it to the library."""

    name = FAMILY

    def finish(self, attempt: Attempt) -> None:
        provide_workspaces(attempt.plan, lambda out: attempt.options.device(attempt.graph, out))

    def settle(self, attempt: Attempt) -> Changes:
        """Where a kernel had better do without something that a transform put there, that candidate is rejected first."""
        rejected: dict[Candidate, Verdict] = {}
        for k, step in enumerate(attempt.plan.steps):
            if not isinstance(step, Kernel) or not step.contracts:
                continue
            out = contraction_of(step)
            how = given_for(attempt, out)
            device = attempt.options.device(attempt.graph, out)
            chosen = choose_template(step, attempt.graph, device, how)
            DECISIONS.note(partial(TemplateDecision, out, step, attempt.graph, device, how, chosen))
            objections = _objections(step, chosen, attempt)
            if objections:
                rejected |= objections
            elif isinstance(chosen, Kernel):
                attempt.plan.steps[k] = chosen
                attempt.plan.verdicts.append(_chosen(out, chosen, how.tuning_results))
            else:
                rejected |= _to_the_library(step, chosen, attempt)
        return spread(Changes(rejected=_readers_first(rejected, attempt)), attempt)


def _objections(kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
    found = (one.objections(kernel, chosen, attempt) for one in attempt.draft.transforms)
    return next((objections for objections in found if objections), {})


def _to_the_library(kernel: Kernel, chosen: Verdict, attempt: Attempt) -> dict[Candidate, Verdict]:
    """Several contractions are first made apart."""
    matmuls = contractions_of(kernel)
    if len(matmuls) > 1:
        return {Candidate(FAMILY, one): replace(chosen, producer=one, reason=Reason.TWO_MATMULS) for one in matmuls}
    source = attempt.draft.measured_as.get(matmuls[0], matmuls[0])
    return {Candidate(TEMPLATE, source): chosen}


def _readers_first(rejected: dict[Candidate, Verdict], attempt: Attempt) -> dict[Candidate, Verdict]:
    """Without contractions that another rejected one reads through its prologue: what was that prologue may become their
    epilogue, with which they may be faster than the library. Where nobody knows their time, no epilogue helps."""
    kernels = {contraction_of(step): step for step in attempt.plan.steps if isinstance(step, Kernel) and step.contracts}
    given_up = [one for one in rejected if one.transform in (TEMPLATE, FAMILY) and one.target in kernels]
    read = {one.target: read_by_prologue(kernels[one.target]) for one in given_up}
    patient = [one for one in given_up if rejected[one].reason is not Reason.UNCALIBRATED]
    waiting = {one for one in patient if any(one.target in found for other, found in read.items() if other != one.target)}
    return {one: verdict for one, verdict in rejected.items() if one not in waiting}


def _chosen(out: str, kernel: Kernel, tuning_results: Mapping[Place, TuningResult]) -> Verdict:
    """With the times that were measured, where sizes are known."""
    known = tuning_results.get(place({}))
    times = () if known is None else (known.seconds * 1e6, known.library_seconds * 1e6)
    detail = str(kernel.by_size or kernel.choice)
    return Verdict(out, "", Outcome.CHOSEN, Reason.TEMPLATE, detail=detail, measured=times)
