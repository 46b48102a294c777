"""Programs of templates in the place of the nodes that they stand for, until no template takes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kgen.ir import nodes as ir
from kgen.ir.plan import Kernel
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import product_of
from kgen.scheduler.transforms.recognition import Recognised, applied, may_hold_programs, recognised
from kgen.templates import registry
from kgen.verdict import Verdict

PROGRAM = "program"


class Programs(Transform):
    """Puts an operation where a program of some template stands (`recognition.py`). What no template takes stays as it was."""

    name = PROGRAM

    def apply(self, draft: Draft) -> None:
        places = [place for place in _places(draft.graph, draft.options) if draft.decisions.is_open(PROGRAM, place.out)]
        if not places:
            return
        outs = {place.out for place in places}
        draft.nodes = applied(replace(draft.graph, nodes=draft.nodes), *places).nodes
        draft.taken |= outs
        draft.asked |= outs  # the measurements are those of the nodes in whose place they stand
        draft.without_library |= {place.out for place in places if place.operation.vendor is None}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        out = product_of(kernel)
        is_program = any(isinstance(n, ir.Operation) and n.program and out in ir.outs(n) for n in attempt.draft.nodes)
        return {Candidate(PROGRAM, out): chosen} if is_program and isinstance(chosen, Verdict) else {}


def _places(graph: ir.Graph, options: Options) -> list[Recognised]:
    """Places of programs that templates implement. These may divide behind a sum, and add up in the order of their tiles."""
    wanted = options.templates and options.fusion and options.scales and not options.stable
    if not wanted or not may_hold_programs(graph) or not registry.programs():
        return []
    kinds = {options.device(graph, name).kind for name in graph.buffers}
    places = recognised(graph, [program for kind in sorted(kinds) for program in registry.programs(kind)])
    return [place for place in places if not place.is_forbidden(options.demands)]
