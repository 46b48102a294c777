"""What torch's own tools see of a compilation: loggers below `kgen`, which TORCH_LOGS="+kgen" shows, and artifacts of
torch.compile's structured trace, which tlparse shows.

| logger | says |
|---|---|
| kgen.stages | each stage of each graph, with its time |
| kgen.fusion | the kernels and every verdict |
| kgen.tuning | what was measured |
| kgen.output_code | the generated code |
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch._logging._internal import trace_structured

from kgen.ir import nodes as ir
from kgen.ir.printer import print_graph

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from kgen.build.unit import UnitPlan
    from kgen.capture.torch_adapter import GraphInfo
    from kgen.ir.plan import Schedule

__all__ = ["code", "graph", "lowered", "scheduled"]

FUSION, OUTPUT_CODE = (logging.getLogger(f"kgen.{name}") for name in ("fusion", "output_code"))


def graph(gm: GraphModule, info: GraphInfo) -> None:
    """The aten graph that came in."""
    _artifact("graph", info, lambda: gm.print_readable(print_output=False))


def lowered(made: ir.Graph, info: GraphInfo) -> None:
    """The loop IR in front of fusion."""
    _artifact("ir", info, lambda: print_graph(made))


def scheduled(plan: Schedule, info: GraphInfo) -> None:
    """The kernels, and every decision."""
    FUSION.info("%s %s: %d kernels, %d library calls", info.role, info.name, len(plan.kernels), len(plan.calls))
    if FUSION.isEnabledFor(logging.DEBUG):
        for verdict in plan.final_verdicts():
            FUSION.debug("%s: %s%s", info.name, verdict, f"; to change it: {verdict.change}" if verdict.change else "")
    _artifact("kernels", info, lambda: _kernels(plan))
    _artifact("verdicts", info, lambda: json.dumps([one.to_dict() for one in plan.final_verdicts()], indent=1), "json")


def code(units: UnitPlan, info: GraphInfo) -> None:
    """The generated sources, C++ and Triton."""
    for name, text in _sources(units):
        OUTPUT_CODE.debug("%s, %s:\n%s", info.name, name, text)
    _artifact("output_code", info, lambda: "\n".join(text for _, text in _sources(units)))


def _kernels(plan: Schedule) -> str:
    from kgen.report.debug import print_schedule  # noqa: PLC0415  with what prints debug scripts; only where somebody listens

    return print_schedule(plan)


def _sources(units: UnitPlan) -> list[tuple[str, str]]:
    found = [(f"unit {number}", one.source) for number, one in enumerate(units.sources)]
    return found + [(call.launch.name, call.launch.source) for call in units.calls.values() if call.launch is not None]


def _artifact(name: str, info: GraphInfo, payload: Callable[[], str], encoding: str = "string") -> None:
    """One artifact of the structured trace; its text is made only where a trace is kept."""
    about = {"name": f"kgen_{name}_{info.role}_{info.name}", "encoding": encoding}
    trace_structured("artifact", metadata_fn=lambda: about, payload_fn=payload)
