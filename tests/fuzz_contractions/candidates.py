"""Every way to compute a problem: the default choice, and each template that takes it under each of its configurations.

A function is traced once. Each candidate goes through the pipeline's own stages from there, with the choice of the template
taken away from the cost model (`kgen.only`), and then stands in for the compiled graph that torch.compile calls: what
surrounds the graph at run time is part of what is checked.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import config as configuration
from kgen import pipeline
from kgen.capture import rng, torch_adapter
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.torch_adapter import GraphInfo
from kgen.ir.index import Sizes
from kgen.ir.plan import Kernel, Schedule, members
from kgen.only import only
from kgen.scheduler.selection.choose import contraction_of, problems
from kgen.scheduler.transforms.operand_padding import possible_copies
from kgen.scheduler.transforms.split_k import may_cut, possible_parts
from kgen.templates import registry
from kgen.templates.contract import Config as Knobs


@dataclass(frozen=True)
class Candidate:
    """A template and its knobs, or the default choice where there is none."""

    template: str = ""
    knobs: tuple[tuple[str, Any], ...] = ()
    parts: int = 1
    copies: str = ""

    def within(self) -> AbstractContextManager[None]:
        return only(self.template, self._pick, self.parts, self.copies) if self.template else nullcontext()

    def _pick(self, configs: Sequence[Knobs]) -> Knobs:
        """A second matmul of the graph may have no such configuration."""
        return next((c for c in configs if c.values == self.knobs), configs[0])

    def __str__(self) -> str:
        if not self.template:
            return "default"
        more = [f"in {self.parts} parts"] if self.parts > 1 else []
        more += [f"operands copied: {self.copies}"] if self.copies else []
        return " ".join([self.template, " ".join(f"{k}={v}" for k, v in self.knobs), *more])


@dataclass
class Graph:
    """The one graph of a function: `run` is what computes it, eager at first; `arguments` are those of the last call."""

    gm: GraphModule
    info: GraphInfo
    run: Callable[[list[Any]], Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, args: list[Any]) -> Any:
        self.arguments = tuple(args)
        return self.run(args)


class _Standing:
    """A `CompiledGraph` that calls whatever its `Graph` runs at the time."""

    coverage: dict[str, int] = {}  # noqa: RUF012  nothing is counted

    def __init__(self, graph: Graph, strides: tuple[Any, ...]) -> None:
        self.graph, self.output_strides = graph, strides

    def __call__(self, args: list[Any]) -> Any:
        return self.graph(args)


class Traced:
    """A function that torch.compile has traced for the shapes of its first call."""

    def __init__(self, function: Callable[..., Any], dynamic: bool = False) -> None:
        self.graphs: list[Graph] = []
        own = types.FunctionType(_call(function).__code__.replace(), globals(), "problem", None, _call(function).__closure__)
        self.call = torch.compile(own, backend=self._backend, dynamic=dynamic, fullgraph=True)

    def _backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_adapter.capture(gm, example_inputs, self._keep, rng.replace_random, None)

    def _keep(self, gm: GraphModule, info: GraphInfo) -> CompiledGraph:
        strides = torch_adapter.output_strides(gm)
        graph = Graph(gm, info, EagerGraph(gm, strides))
        self.graphs.append(graph)
        return _Standing(graph, strides)


def _call(function: Callable[..., Any]) -> types.FunctionType:
    def problem(*args: torch.Tensor) -> Any:
        return function(*args)

    return problem  # type: ignore[return-value]


@dataclass
class Prepared:
    """A candidate whose kernels are written, and are compiled in the background; `build` loads them."""

    candidate: Candidate
    identity: Hashable
    templates: frozenset[str]
    build: Callable[[], Callable[[list[Any]], Any]]


class CandidateCompiler:
    """Makes candidates of one traced graph. On a machine without a GPU they are interpreted."""

    def __init__(self, graph: Graph, interpreted: bool, cache_dir: str | None = None) -> None:
        self.graph = graph
        self.config = configuration.from_call(
            None,
            {"cache": False, "poison": True, "gpu_interpreter": interpreted, "measurements": False, "cache_dir": cache_dir},
        )
        self.reinplaced = pipeline.reinplace(_copied(graph.gm), graph.info, self.config)

    def prepare(self, candidate: Candidate) -> Prepared:
        with candidate.within():
            gm, plan, units = self._rendered()
            templates = frozenset(k.choice.template for step in plan.kernels for k in members(step) if k.choice is not None)
        work = gm, plan, units
        launches = sorted((name, call.launch.identity, str(call.grid)) for name, call in units.calls.items() if call.launch)
        calls = sorted(str(call.node.target) for call in plan.calls)

        def build() -> Callable[[list[Any]], Any]:
            with candidate.within():
                return pipeline.build(work, self.graph.info, self.config).run

        return Prepared(candidate, (tuple(launches), tuple(calls)), templates, build)

    def _rendered(self) -> tuple[GraphModule, Schedule, Any]:
        return pipeline.render(self._scheduled(), self.graph.info, self.config)

    def offered(self, template: str) -> list[Candidate]:
        """The configurations of a template for the first matmul that it takes, the best first by the cost model, and its first
        one with the sum in parts and with copies of operands; none where it takes no matmul."""
        found: list[Knobs] = []

        def note(configs: Sequence[Knobs]) -> Knobs:
            found.extend(() if found else configs)
            return configs[0]

        with only(template, note):
            plan = self._scheduled()[1]
        kernels = [k for step in plan.kernels for k in members(step) if k.choice is not None]
        plain = [Candidate(template, config.values) for config in found]
        return plain + ([replace(plain[0], **way) for way in self._ways(kernels[0], plan)] if len(kernels) == 1 else [])

    def _scheduled(self) -> tuple[GraphModule, Schedule]:
        work = pipeline.lower(self.reinplaced, self.graph.info, self.config)
        return pipeline.schedule(work, self.graph.info, self.config)

    def _ways(self, kernel: Kernel, plan: Schedule) -> list[dict[str, Any]]:
        """How the sum of the only matmul may be cut, and which of its operands may be copied."""
        options = pipeline.scheduler_options(plan.graph, self.config)
        device = options.device(plan.graph, contraction_of(kernel))
        found: list[dict[str, Any]] = []
        if may_cut(kernel, Sizes(plan.graph.size_hints), device):
            found += [{"parts": parts} for parts in possible_parts(problems(kernel, plan.graph, device, None)[0], kernel)]
        return found or [{"copies": copies} for copies in possible_copies(kernel, plan.graph, device)]


def _copied(gm: GraphModule) -> GraphModule:
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return GraphModule(gm, graph)


def templates(interpreted: bool) -> list[str]:
    """All of the GPU's, by name; Triton's interpreter does not run Gluon."""
    return [t.name for t in registry.every("cuda") if not (interpreted and t.language == "gluon")]


def chosen_of(compiler: CandidateCompiler, template: str, seed: int, most: int) -> list[Candidate]:
    """The candidates of a template: all, or `most` of them where that is not 0, chosen by the seed, so that many problems
    together see all."""
    offered = compiler.offered(template)
    few = most and len(offered) > most
    return random.Random(f"{seed} {template}").sample(offered, most) if few else offered
