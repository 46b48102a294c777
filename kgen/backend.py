"""The way in, and the list of stages that a graph goes through."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import config as configuration
from kgen import errors, only, unusable
from kgen.build import cpp, toolchain
from kgen.capture import rng, torch_adapter
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.eager_graph import EagerGraph
from kgen.capture.freeze import freeze
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.failures import Attempt
from kgen.templates import registry
from kgen.tuning.store import stores

__all__ = ["Stage", "compile", "compile_graph", "kgen_backend", "replace_random", "run_eagerly"]

Stage = Callable[[Any, GraphInfo, Config], Any]


# ---- the stages: each takes what the one before it made -----------------------------------------------------------------


def replace_random(gm: GraphModule, info: GraphInfo, _config: Config) -> GraphModule:
    """Training graphs had this done before they were split (`rng.replace_random` on the joint graph)."""
    is_random = info.role == "inference" and any(node.target in rng.RULES for node in gm.graph.nodes)
    return rng.replace_random(gm) if is_random else gm


def run_eagerly(gm: GraphModule, info: GraphInfo, config: Config) -> CompiledGraph:
    """Every operator by itself, in eager: for `fallback="all"`, and where nothing else compiles."""
    made = EagerGraph(gm, torch_adapter.output_strides(gm), info.failures)
    importlib.import_module("kgen.report.record").record_eager(info, made.coverage, config)
    return made


def _from_pipeline(name: str) -> Stage:
    """A stage of `kgen.pipeline`, imported when it first runs: a process that finds its graphs in the cache never needs the
    compiler, and importing it takes longer than loading them."""

    def stage(work: Any, info: GraphInfo, config: Config) -> Any:
        return getattr(importlib.import_module("kgen.pipeline"), name)(work, info, config)

    stage.__name__ = name
    return stage


STAGES: tuple[Stage, ...] = (
    replace_random,
    *map(_from_pipeline, ("reinplace", "lower", "schedule", "render", "build")),
)  # fmt: skip

EAGER_STAGES: tuple[Stage, ...] = (replace_random, run_eagerly)


def compile_graph(gm: GraphModule, info: GraphInfo, config: Config) -> CompiledGraph:
    """One functional aten graph through every stage, again and again without what turns out not to work (docs/failures.md).

    Raises what the first attempt raises where the user can help it, and where `strict` says so."""
    attempt, frozen = Attempt(eager="all" in config.fallback), None
    while True:
        try:
            with unusable.without(attempt.unusable) if attempt.unusable else nullcontext():
                if attempt.eager:
                    return _through_stages(EAGER_STAGES, (gm, info), config, attempt)
                frozen = frozen or _frozen(gm, info, config)
                return _through_stages(STAGES, frozen, config, attempt)
        except Exception as cause:
            following = importlib.import_module("kgen.recovery").attempt_after(cause, attempt, (gm, info), config)
            if following is None:
                raise
            attempt = following


def _through_stages(
    stages: Sequence[Stage], graph: tuple[GraphModule, GraphInfo], config: Config, attempt: Attempt
) -> CompiledGraph:
    work: Any = graph[0]
    info = replace(graph[1], failures=attempt.failures) if attempt.failures else graph[1]
    for stage in stages:
        attempt.stage = stage.__name__
        work = stage(work, info, config)
    return work


# ---- the two doors ------------------------------------------------------------------------------------------------------


def kgen_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> Callable[..., Any]:
    """What torch.compile calls for backend="kgen" (entry point group torch_dynamo_backends).

    Raises UnknownMode, UnknownOption or BadOptionValue; torch wraps them in its BackendCompilerFailed."""
    config = configuration.from_call(mode, {**(options or {}), **unknown})
    cpp.prepare()
    with _without_collections():
        return torch_adapter.capture(
            gm,
            example_inputs,
            compile_graph=partial(_compile_graph_with, config),
            joint_pass=rng.replace_random,
            cache_key=_cache_key(config) if config.cache and not config.debug and only.current() is None else None,
        )


def _compile_graph_with(config: Config, gm: GraphModule, info: GraphInfo) -> CompiledGraph:
    with _toolchain_of(config), _without_collections():
        return compile_graph(gm, info, config)


def _frozen(gm: GraphModule, info: GraphInfo, config: Config) -> tuple[GraphModule, GraphInfo]:
    """The graph without what depends on its module's tensors alone: further inputs bring that.

    Raises FreezingInTraining."""
    if not config.freezing:
        return gm, info
    if info.role != "inference":
        raise errors.FreezingInTraining()
    gm, freezing = freeze(gm, info.static_inputs, config.numerics == "fast")
    return gm, replace(info, freezing=freezing, static_inputs=info.static_inputs | freezing.inputs)


@contextmanager
def _without_collections() -> Iterator[None]:
    """While a graph is compiled, much is made and little is garbage in cycles, but each full collection walks everything that
    torch has loaded, which takes a third of a second."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _toolchain_of(config: Config) -> AbstractContextManager[object]:
    """The compiler and the instruction set that this call names, for the stages that ask for the current ones."""
    named = {"compiler": config.compiler, "isa": config.isa, "compile_seconds": config.compile_seconds}
    return configuration.override(**{name: value for name, value in named.items() if value is not None})


def _cache_key(config: Config) -> tuple[Any, ...]:
    """Lanes and tiles are chosen for the instruction set that was found, which machines that share a cache need not share,
    templates among those that have been registered, and by what was measured. Where that happens while compiling, what is
    compiled is as good as the file that it leaves behind."""
    tuned = () if config.autotune else stores(config).fingerprint()
    with _toolchain_of(config):
        return (*configuration.code_key(config), toolchain.isa().name, registry.fingerprint(), tuned)


def compile(  # noqa: A001
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Any:
    """torch.compile(model, backend="kgen", ...) by another door: it works without an installed entry point, takes mode and
    options together, and refuses wrong ones at once instead of at the first call. Without `model`, a decorator."""
    configuration.from_call(mode, options)
    given = {**(options or {}), **({"mode": mode} if mode is not None else {})}
    return torch.compile(model, backend=kgen_backend, options=given, dynamic=dynamic, fullgraph=fullgraph)
