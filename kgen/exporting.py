"""`kgen.export`: a module as a folder that `kgen.load` runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kgen import config as configuration
from kgen.backend import Passes, ready_to_compile, toolchain_of
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.exported import Exported, compile_exported, traced
from kgen.errors import NotExportable
from kgen.host.compiled import HostGraph
from kgen.host.exported import write_folder

__all__ = ["export"]


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    folder: str | Path,
    dynamic_shapes: Any = None,
    options: configuration.Options | None = None,
) -> Path:
    """Compiles inference of `module` for example arguments and writes it to `folder`, which `kgen.load` runs in any process
    with the same torch on a CPU of the same kind: without tracing, a compiler or the module's source.

    `dynamic_shapes` is torch.export's: it says which sizes may differ from the example's. `options` are those of
    `kgen.compile`, and may name a mode. The folder has the module's tensors, too.

    Raises NotExportable, torch.export's errors, and those of `kgen.compile`."""
    given: Any = {**(options or {}), "strict": True, "freezing": False, "tuning": "before"}
    config = ready_to_compile(None, given, on_cpu=True)
    passes = Passes(config)
    program = traced(module, args, kwargs or {}, dynamic_shapes)
    made = compile_exported(program, partial(passes.compile_graph, ()), passes.before_partitioning)
    return _written(made, _on_cpu(made.graph), Path(folder), config)


def _on_cpu(graph: CompiledGraph) -> HostGraph:
    """Raises NotExportable for what a folder does not hold."""
    if not isinstance(graph, HostGraph):
        raise NotExportable(reason="it was not compiled as a whole")
    if graph.callables:
        raise NotExportable(reason="it calls Python functions, such as operators that are written in Python")
    devices = {slot.device for slot in graph.blueprint.program.slots}
    if any(not device.startswith("cpu") for device in devices):
        raise NotExportable(reason=f"it runs on {', '.join(sorted(devices))}, and folders hold code for CPUs alone")
    return graph


def _written(made: Exported, graph: HostGraph, folder: Path, config: configuration.Config) -> Path:
    blueprint = graph.blueprint
    with toolchain_of(config):
        write_folder(folder, blueprint.program, blueprint.constants, blueprint.units, made.call, made.weights)
    return folder
