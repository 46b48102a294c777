"""Counts what the scheduler made of a function, without running g++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch.fx import GraphModule

from kgen.capture.decompositions import TABLE
from kgen.capture.operators import trace_origins
from kgen.ir.plan import Schedule
from kgen.lowering import LoweringContext, OperatorAxes, lower, reinplace
from kgen.scheduler import Options, schedule
from kgen.templates import registry


@dataclass(frozen=True)
class Plans:
    """The schedules of a function's graphs: forward (or inference), then backward."""

    schedules: tuple[Schedule, ...]

    @property
    def kernels(self) -> int:
        return sum(len(s.kernels) for s in self.schedules)

    @property
    def forward(self) -> Schedule:
        return self.schedules[0]

    @property
    def externs(self) -> list[str]:
        return [str(c.node.target) for s in self.schedules for c in s.calls]


def plans(f: Callable[..., Any], *args: Any, options: Options | None = None, backward: bool = False) -> Plans:
    """Schedules `f` as the backend would."""
    made: list[Schedule] = []

    def compiler(gm: GraphModule, inputs: Any) -> Any:
        graph = lower(reinplace(gm), LoweringContext(operators=registry.operators(OperatorAxes)))
        trace_origins(gm, graph)
        made.append(schedule(graph, options))
        return gm.forward

    compiled = aot_function(
        f, compiler, compiler, decompositions=TABLE, inference_compiler=compiler, keep_inference_input_mutations=True
    )
    if backward:
        out = compiled(*args)
        (out if isinstance(out, torch.Tensor) else out[0]).sum().backward()
    else:
        with torch.no_grad():
            compiled(*args)
    return Plans(tuple(made))
