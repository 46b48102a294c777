"""`kgen.export`: a module as a folder that `kgen.load` runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kgen import config as configuration
from kgen.backend import Passes, ready_to_compile, toolchain_of
from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.exported import Exported, compile_exported, traced
from kgen.errors import NotExportable
from kgen.host.compiled import HostGraph, compiled_launches
from kgen.host.exported import Contents, write_folder

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
    with the same torch on a CPU of the same kind: without tracing, a compiler or the module's source. A module on a GPU needs a
    GPU of the same compute capability, under the same index, and no Triton. Its kernels are launched one by one: the modes
    record no CUDA graph here.

    `dynamic_shapes` is torch.export's: it says which sizes may differ from the example's. `options` are those of
    `kgen.compile`, and may name a mode. The folder has the module's tensors, too.

    Raises NotExportable, torch.export's errors, and those of `kgen.compile`."""
    given: Any = {**(options or {}), "strict": True, "freezing": False, "tuning": "before"}
    config = ready_to_compile(None, given, on_cpu=not _has_gpu(module, args, kwargs))
    passes = Passes(config)
    program = traced(module, args, kwargs or {}, dynamic_shapes)
    made = compile_exported(program, partial(passes.compile_graph, ()), passes.before_partitioning)
    return _written(made, _whole(made.graph), Path(folder), config)


def _has_gpu(*given: Any) -> bool:
    """Whether some tensor of a module and its arguments is on a GPU."""
    module, *arguments = given
    tensors = (*module.parameters(), *module.buffers(), *pytree.tree_leaves(arguments))
    return any(isinstance(one, torch.Tensor) and one.is_cuda for one in tensors)


def _whole(graph: CompiledGraph) -> HostGraph:
    """Raises NotExportable for what a folder does not hold."""
    if not isinstance(graph, HostGraph):
        raise NotExportable(reason="it was not compiled as a whole")
    if graph.callables:
        raise NotExportable(reason="it calls Python functions, such as operators that are written in Python")
    devices = {slot.device for slot in graph.blueprint.program.slots}
    if any(not device.startswith(("cpu", "cuda")) for device in devices):
        raise NotExportable(reason=f"it runs on {', '.join(sorted(devices))}, and folders hold code for CPUs and NVIDIA GPUs")
    return graph


def _written(made: Exported, graph: HostGraph, folder: Path, config: configuration.Config) -> Path:
    blueprint = graph.blueprint
    with toolchain_of(config):
        contents = Contents(
            blueprint.program, tuple(blueprint.constants), made.call, len(blueprint.units), compiled_launches(blueprint)
        )
        write_folder(folder, contents, blueprint.units, made.weights)
    return folder
