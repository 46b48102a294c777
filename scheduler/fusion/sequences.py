"""Sequences: small kernels of a GPU that wait for each other, in one program of one launch.

The norm of a vector of norms is a kernel of microseconds behind another one: most of its time is its launch. One program that
runs both, with a barrier between, saves that. The second one has work for one program alone, so only the first one loses
company.
"""

from __future__ import annotations

from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import ComboKernel, Kernel, Step
from kgen.ir.sizes import Sizes
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.fusion.combo_kernels import forbids, is_simple, is_static
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# Points of the first kernel, and elementary operations, at most: about what one SM does in the time of a launch.
MOST_POINTS, MOST_WORK = 1 << 15, 1 << 18
# Points of a later one, which has one row.
MOST_ROW = 1 << 13


def in_sequence(
    steps: list[Step], graph: ir.Graph, demands: tuple[FusionDemand, ...], verdicts: list[Verdict]
) -> list[Step]:
    """The steps with neighbours joined that one program runs one after the other."""
    made: list[Step] = []
    forbidden = [d for d in demands if not d.wanted]
    for step in steps:
        before = made[-1] if made else None
        first = _first(before, graph)
        if before is None or first is None or not isinstance(step, Kernel) or not _follows(step, before, graph):
            made.append(step)
        elif any(forbids(d, one, step) for d in forbidden for one in first):
            made.append(step)
        else:
            made[-1] = ComboKernel(f"{first[0].name}_then_{len(first)}_more", (*first, step), in_order=True)
            verdicts.append(Verdict(first[-1].name, step.name, Outcome.BATCHED, Reason.SEQUENCE))
    return made


def _first(step: Step | None, graph: ir.Graph) -> tuple[Kernel, ...] | None:
    """What a sequence may go on from: its members so far."""
    if isinstance(step, ComboKernel):
        return step.members if step.in_order else None
    if not isinstance(step, Kernel) or not _fits(step, graph):
        return None
    points = _points(step, graph)
    work = points * max(1, vs.total_cost(s.value for s in step.statements))
    return (step,) if points <= MOST_POINTS and work <= MOST_WORK else None


def _follows(kernel: Kernel, before: Step, graph: ir.Graph) -> bool:
    """Whether a kernel of one row reads what the step before has made, on the same device."""
    if not _fits(kernel, graph) or not kernel.inner or _points(kernel, graph) > MOST_ROW:
        return False
    alone = Sizes(graph.size_hints).points(kernel.outer) == 1
    made = ir.storages(graph, writes(before))
    devices = {graph.buffers[name].device for name in writes(before) | writes(kernel)}
    return alone and len(devices) == 1 and not made.isdisjoint(ir.storages(graph, reads(kernel)))


def _fits(kernel: Kernel, graph: ir.Graph) -> bool:
    return kernel.target == "triton" and is_simple(kernel) and is_static(kernel, graph)


def _points(kernel: Kernel, graph: ir.Graph) -> int:
    return Sizes(graph.size_hints).points((*kernel.outer, *kernel.inner))
