"""kgen without compilers: lowered and scheduled graphs run in the evaluator. It finds wrong rules in a tenth of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kgen import backend, pipeline
from kgen.capture import torch_adapter
from kgen.config import Config
from kgen.ir.plan import Schedule
from kgen.reference.evaluate import evaluate_graph


class Evaluated:
    """A scheduled graph, run by the oracle."""

    coverage: Mapping[str, int] = {}

    def __init__(self, gm: torch.fx.GraphModule, plan: Schedule) -> None:
        self.plan, self.output_strides = plan, torch_adapter.output_strides(gm)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        given = list(args)
        args.clear()
        return evaluate_graph(self.plan.graph, given)


def _evaluated(work: tuple[torch.fx.GraphModule, Schedule], _info: Any, _config: Config) -> Evaluated:
    return Evaluated(*work)


# In place of `kgen.backend.STAGES`.
STAGES: Any = (
    backend.compile_bodies, backend.replace_random, pipeline.reinplace, pipeline.lower, pipeline.schedule, _evaluated,
)  # fmt: skip
