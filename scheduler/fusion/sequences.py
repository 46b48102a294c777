"""Sequences: small kernels of a GPU that wait for each other, in one program of one launch.

The norm of a vector of norms is a kernel of microseconds behind another one: most of its time is its launch. One program that
runs both, with a barrier between, saves that. The second one has work for one program alone, so only the first one loses
company.
"""

from __future__ import annotations

import torch

from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.ir.plan import Call, ComboKernel, Kernel, Step
from kgen.scheduler.analysis.memory import reads, writes
from kgen.scheduler.fusion.combo_kernels import forbids, is_plain, is_static
from kgen.scheduler.tiling.lookups import cost_of_gathers
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

# Points of the first kernel, and elementary operations, at most: about what one SM does in the time of a launch.
MOST_POINTS, MOST_WORK = 1 << 15, 1 << 18
# Points of a later one, which has one row.
MOST_ROW = 1 << 13
# Steps that a kernel moves up past, at most.
NEAR = 8


def in_sequence(steps: list[Step], graph: ir.Graph, demands: tuple[FusionDemand, ...], verdicts: list[Verdict]) -> list[Step]:
    """The steps with those joined that one program runs one after the other. `demands` that forbid fusion hold here too."""
    made: list[Step] = []
    forbidden = [d for d in demands if not d.wanted]
    for step in steps:
        at = _place(step, made, graph) if isinstance(step, Kernel) and _is_tail(step, graph) else None
        if at is None or not isinstance(step, Kernel):
            made.append(step)
            continue
        first = _first(made[at], graph)
        if any(forbids(d, one, step) for d in forbidden for one in first):
            made.append(step)
            continue
        made[at] = ComboKernel(f"{first[0].name}_then_{len(first)}_more", (*first, step), in_order=True)
        verdicts.append(Verdict(first[-1].name, step.name, Outcome.BATCHED, Reason.SEQUENCE))
    return made


def _place(kernel: Kernel, made: list[Step], graph: ir.Graph) -> int | None:
    """Where the step is that the kernel may follow at once: none between touches what it changes or changes what it touches."""
    read, written = (ir.storages(graph, names) for names in (reads(kernel), writes(kernel)))
    for at in range(len(made) - 1, max(-1, len(made) - 1 - NEAR), -1):
        step = made[at]
        if isinstance(step, Call):
            return None
        changed = ir.storages(graph, writes(step))
        if _first(step, graph) and not read.isdisjoint(changed) and _device(step, graph) == _device(kernel, graph):
            return at
        if not changed.isdisjoint(read | written) or not written.isdisjoint(ir.storages(graph, reads(step))):
            return None
    return None


def _device(step: Kernel | ComboKernel, graph: ir.Graph) -> torch.device:
    return next(graph.buffers[name].device for name in sorted(writes(step)))


def _is_tail(kernel: Kernel, graph: ir.Graph) -> bool:
    """Whether one program has all of a kernel's work."""
    return _fits(kernel, graph) and Sizes(graph.size_hints).points(kernel.outer) == 1 and _points(kernel, graph) <= MOST_ROW


def _first(step: Step, graph: ir.Graph) -> tuple[Kernel, ...]:
    """What a sequence may go on from: its members so far; nothing where the step is too large."""
    if isinstance(step, ComboKernel):
        return step.members if step.in_order else ()
    if not isinstance(step, Kernel) or not _fits(step, graph):
        return ()
    points = _points(step, graph)
    work = points * max(1, vs.total_cost(s.value for s in step.statements) + cost_of_gathers(step))
    return (step,) if points <= MOST_POINTS and work <= MOST_WORK else ()


def _fits(kernel: Kernel, graph: ir.Graph) -> bool:
    return kernel.target == "triton" and is_plain(kernel) and is_static(kernel, graph)


def _points(kernel: Kernel, graph: ir.Graph) -> int:
    return Sizes(graph.size_hints).points((*kernel.outer, *kernel.inner))
