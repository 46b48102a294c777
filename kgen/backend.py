"""The way in, and the list of stages that a graph goes through."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from kgen import config as configuration
from kgen import errors, rng, torch_adapter
from kgen.aot_cache import CompiledGraph
from kgen.build import cpp, toolchain
from kgen.config import Config
from kgen.eager_graph import EagerGraph
from kgen.freeze import freeze
from kgen.templates import registry
from kgen.torch_adapter import GraphInfo
from kgen.tuning import only, unusable
from kgen.tuning.store import stores

__all__ = ["Stage", "compile", "compile_graph", "kgen_backend", "replace_random", "run_eagerly"]

Stage = Callable[[Any, GraphInfo, Config], Any]


# ---- the stages: each takes what the one before it made -----------------------------------------------------------------


def replace_random(gm: GraphModule, info: GraphInfo, _config: Config) -> GraphModule:
    """Training graphs had this done before they were split (`rng.replace_random` on the joint graph)."""
    return rng.replace_random(gm) if info.role == "inference" else gm


def run_eagerly(gm: GraphModule, _info: GraphInfo, _config: Config) -> CompiledGraph:
    """The end of the line for `fallback="all"`: every operator by itself, in eager."""
    return EagerGraph(gm, torch_adapter.output_strides(gm))


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
    """One functional aten graph through every stage; once more without a template's configuration that turns out not to run."""
    found: tuple[unusable.Unusable, ...] = ()
    while True:
        try:
            with unusable.without(found):
                return _through_stages(gm, info, config)
        except errors.ConfigurationFailed as failure:
            one = unusable.Unusable(**failure.details)
            if one in found:
                raise
            found += (one,)


def _through_stages(gm: GraphModule, info: GraphInfo, config: Config) -> CompiledGraph:
    work: Any = gm
    for stage in EAGER_STAGES if "all" in config.fallback else STAGES:
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
        return compile_graph(*(_frozen(gm, info, config) if config.freezing else (gm, info)), config)


def _frozen(gm: GraphModule, info: GraphInfo, config: Config) -> tuple[GraphModule, GraphInfo]:
    """The graph without what depends on its module's tensors alone: further inputs bring that.

    Raises FreezingInTraining."""
    if info.role != "inference":
        raise errors.FreezingInTraining()
    if "all" in config.fallback:
        return gm, info
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
    named = {"compiler": config.compiler, "isa": config.isa}
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
