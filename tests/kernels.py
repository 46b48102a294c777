"""Counts what the scheduler made of a function, without running g++."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

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


def _shapes_alone(gm: GraphModule) -> Callable[..., list[Any]] | None:
    """What stands for the graph: results of the right form without contents, for large matmuls take a CPU minutes. None where
    sizes are symbols."""
    [results] = (node.args[0] for node in gm.graph.nodes if node.op == "output")
    values = [one.meta.get("val") if isinstance(one, torch.fx.Node) else one for one in results]
    sizes = [n for v in values if isinstance(v, torch.Tensor) for n in (*v.shape, *v.stride())]
    if not all(v is None or isinstance(v, torch.Tensor) for v in values) or not all(isinstance(n, int) for n in sizes):
        return None
    forms = [None if v is None else (tuple(v.shape), v.stride(), v.dtype) for v in values]
    return lambda *_: [None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2]) for one in forms]


def plans(f: Callable[..., Any], *args: Any, options: Options | None = None, backward: bool = False) -> Plans:
    """Schedules `f` as the backend would."""
    made: list[Schedule] = []

    def compiler(gm: GraphModule, inputs: Any) -> Any:
        with _disable_current_modes():  # as in `torch_adapter`
            graph = lower(reinplace(gm), LoweringContext(operators=registry.operators(OperatorAxes)))
        trace_origins(gm, graph)
        made.append(schedule(graph, options))
        return _shapes_alone(gm) or gm.forward

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
