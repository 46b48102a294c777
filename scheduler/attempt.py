"""One attempt at a schedule: transforms applied, nodes fused, kernels formed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kgen import errors
from kgen.cost.tuning_query import TuningResults
from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel, Schedule, Step
from kgen.scheduler.analysis.dependencies import needed
from kgen.scheduler.fusion.combo_kernels import batch
from kgen.scheduler.fusion.fuse import Fuser
from kgen.scheduler.fusion.grouping import Constraints, fuser_of
from kgen.scheduler.fusion.pairs import Pairs
from kgen.scheduler.fusion.sequences import in_sequence
from kgen.scheduler.kernels.steps import distinct_names, local_buffers, steps_of, storage_shared
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Decisions, Draft, Forming, Transform
from kgen.scheduler.selection.choose import demanded
from kgen.verdict import FusionDemand

TABLE = "kgen.scheduler.transforms.table"


def transforms_for(graph: ir.Graph) -> tuple[Transform, ...]:
    """The transforms that may have something to do. Where every element of the graph is made on its own, that is none of them,
    and their modules are not even loaded."""
    if not ir.any_combines(graph):
        return ()
    found: tuple[Transform, ...] = importlib.import_module(TABLE).TRANSFORMS
    return found


def attempted(
    graph: ir.Graph, options: Options, transforms: tuple[Transform, ...], decisions: Decisions, tuning_results: TuningResults
) -> Attempt:
    """A plan without a memory plan. The graph stays as it is: the attempt has buffers of its own."""
    own = replace(graph, buffers=dict(graph.buffers))
    draft = Draft(own, graph.nodes, options, decisions, dict(tuning_results), transforms)
    for one in transforms:
        one.apply(draft)
    if len(draft.nodes) > 1:  # a graph's only node makes its result
        draft.nodes = needed(draft.graph, draft.nodes)
    return Attempt(draft, _plan(draft))


def _plan(draft: Draft) -> Schedule:
    options, rewritten = draft.options, replace(draft.graph, nodes=draft.nodes)
    fuser = fuser_of(rewritten, options, Constraints(draft.single, draft.full_row_buffers, draft.apart))
    groups = fuser.run() if len(fuser.groups) > 1 or options.demands else fuser.groups
    forming = Forming(draft, fuser.sizes, fuser.outputs | storage_shared(fuser.graph), fuser.verdicts)
    fused = steps_of(fuser, groups, forming.kept, options)
    pairs = Pairs(fuser, len(fuser.verdicts), [step.name for step in fused if isinstance(step, Kernel)])
    steps = _formed(fused, forming, fuser)
    plan = Schedule(draft.graph, steps, [*fuser.verdicts, *draft.verdicts])
    plan.settle = pairs.settled
    plan.local = local_buffers(steps)
    plan.call_results = frozenset(o for group in groups if isinstance(group.call, ir.Extern) for o in ir.outs(group.call))
    return plan


def _formed(steps: list[Step], forming: Forming, fuser: Fuser) -> list[Step]:
    """The steps of fused groups, with what moves between kernels, and with independent kernels gathered."""
    options = forming.draft.options
    for one in forming.draft.transforms if options.fusion else ():
        steps = one.form(steps, forming)
    _raise_unmet(fuser.unmet, steps)
    steps = distinct_names(steps)
    if len(steps) < 2 or not options.fusion or not options.horizontal_fusion:
        return steps
    steps = batch(steps, fuser.graph, options, fuser.verdicts)
    return in_sequence(steps, fuser.graph, options.demands, fuser.verdicts)


def _raise_unmet(unmet: Iterable[tuple[FusionDemand, errors.FusionRequired]], steps: Sequence[Step]) -> None:
    """Raises for what the user wants in one kernel and has not got, now that all that moves into kernels has moved."""
    for demand, missing in unmet:
        if not any(isinstance(step, Kernel) and demanded(step, (demand,)) for step in steps):
            raise missing
