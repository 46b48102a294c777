"""A graph that the native runtime runs: the compiled result, and how it is stored on disk."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from kgen import only
from kgen.build import cpp, triton
from kgen.capture import torch_adapter
from kgen.capture.aot_cache import NotSerializable
from kgen.errors import KernelSpills, KernelTooLarge, MixedCapabilities
from kgen.host import program as hp
from kgen.host.cudagraph import Recording, recorded
from kgen.host.frozen import FrozenCall, Setup
from kgen.host.launch import GpuKernel, load_kernel
from kgen.host.native import load
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.rendered.gpu_kernel import CompiledKernel, CompiledLaunches, TritonKernel

# How many times as much of its registers a kernel may spill where it is measured. What spills more never wins, and ptxas makes
# some of it wrong: a float32 matmul with 5,696 bytes of stack and 32 registers ended with a misaligned address on an H100.
WHERE_MEASURED = 8

# Of each result of a graph; None for what is no tensor.
Strides = tuple[tuple[Any, ...] | None, ...]


@dataclass(slots=True)
class Blueprint:
    """Everything that makes a compiled graph, as plain data: its C++ units, the program, its constants, the
    GPU kernels that the program launches by number, how it is recorded as a CUDA graph, if it is, and what is computed once
    of frozen arguments. Of a graph in which something was `replaced` after a failure, nothing is kept on disk."""

    units: list[cpp.Unit]
    program: hp.Program
    constants: list[torch.Tensor] = field(default_factory=list)
    coverage: dict[str, int] = field(default_factory=dict)
    launches: list[TritonKernel] = field(default_factory=list)
    recording: Recording | None = None
    setup: Setup | None = None
    replaced: bool = False


class HostGraph:
    """Calls the native runtime. Re-entrant: it holds no state between calls."""

    def __init__(self, blueprint: Blueprint, output_strides: tuple[Any, ...] = (), callables: Sequence[Any] = ()) -> None:
        self.blueprint = blueprint
        self.output_strides = output_strides
        self.coverage: Mapping[str, int] = blueprint.coverage
        self.callables = list(callables)
        libraries = [cpp.load_library(path) for path in cpp.build_units(blueprint.units)]
        launches = _load_launches(blueprint)
        self.run = load(blueprint.program, libraries, blueprint.constants, self.callables, launches)
        if blueprint.recording is not None:
            self.run = recorded(self.run, blueprint.recording, blueprint.constants, blueprint.program)
        if blueprint.setup is not None:
            self.run = FrozenCall(self.run, blueprint.setup, libraries)

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        return self.run(args)

    def serialize(self) -> bytes:
        if self.callables:
            raise NotSerializable("the graph calls Python functions")
        if self.blueprint.replaced:
            raise NotSerializable("another process may be able to compile all of it")
        out = io.BytesIO()
        try:
            pickle.dump(self.blueprint, out)
        except (pickle.PicklingError, TypeError, AttributeError) as cause:
            raise NotSerializable(str(cause)) from cause
        return out.getvalue()

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        return cls(pickle.loads(data))


def strides_of_results(graph: ir.Graph, traced: Strides) -> Strides:
    """`traced` has the strides that tracing computed for each result, None for what is no tensor. Elements that share memory in
    eager have places of their own here (`kgen/lowering/results.py`), so backward gets such a tensor with other strides."""
    return tuple(_found(graph, item, strides) for item, strides in zip(graph.outputs, traced, strict=True))


def _found(graph: ir.Graph, item: Any, traced: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Symbolic strides stay as traced, and those of dimensions of length 1, which no address depends on."""
    if traced is None or not isinstance(item, ir.TensorArg) or not all(isinstance(s, int) for s in traced):
        return traced
    buffer = graph.buffers[item.buffer]
    linear = ix.linearize(item.index, ir.dense_strides(buffer))
    strides = [ix.stride_of(linear, v) for v in item.vars]
    known = [None if s is None else s.as_int() for s in strides]
    return tuple(old if new is None or v.extent == 1 else new for v, old, new in zip(item.vars, traced, known, strict=True))


def compiled_launches(blueprint: Blueprint) -> CompiledLaunches:
    """The GPU kernels, compiled for the devices that the program names: a look-up when the cache has them.

    Raises MixedCapabilities, KernelTooLarge, KernelSpills and TritonBuildFailed."""
    if not blueprint.launches:
        return CompiledLaunches()
    program = blueprint.program
    names = {program.slots[item.slots[0]].device for item in hp.each(program.code) if isinstance(item, hp.Launch)}
    devices = sorted(torch.device(name).index or 0 for name in names)
    capabilities = {device: torch.cuda.get_device_capability(device) for device in devices}
    if len(set(capabilities.values())) > 1:
        raise MixedCapabilities(devices=", ".join(f"cuda:{k} is {major}.{minor}" for k, (major, minor) in capabilities.items()))
    major, minor = capabilities[devices[0]]
    arch = 10 * major + minor
    kernels = triton.compile_kernels(blueprint.launches, arch)
    found: list[KernelSpills | KernelTooLarge] = [
        *_spilling(blueprint.launches, kernels, 1 if only.current() is None else WHERE_MEASURED)
    ]
    for device in devices:
        available = torch_adapter.gpu_facts(torch.device("cuda", device))["shared"]
        found += _too_large(kernels, available, f"cuda:{device}")
    _raise_first(found)
    return CompiledLaunches(tuple(kernels), tuple(devices), arch)


def _load_launches(blueprint: Blueprint) -> list[GpuKernel]:
    """The GPU kernels, compiled and loaded. Raises what `compiled_launches` does, and LaunchFailed."""
    made = compiled_launches(blueprint)
    return [load_kernel(kernel, made.devices) for kernel in made.kernels]


def check_spills(launches: Sequence[TritonKernel], kernels: Sequence[CompiledKernel], times: int = 1) -> None:
    """Raises KernelSpills for the first kernel with more spilled registers than `times` what its author puts up with."""
    _raise_first(list(_spilling(launches, kernels, times)))


def check_shared(kernels: Sequence[CompiledKernel], available: int, device: str) -> None:
    """Raises KernelTooLarge for the first kernel that needs more bytes of shared memory than a program can have."""
    _raise_first(list(_too_large(kernels, available, device)))


def _spilling(launches: Sequence[TritonKernel], kernels: Sequence[CompiledKernel], times: int) -> Iterator[KernelSpills]:
    for launch, kernel in zip(launches, kernels, strict=True):
        if launch.most_stack is not None and kernel.stack > times * launch.most_stack:
            yield KernelSpills(kernel=kernel.name, stack=kernel.stack, most=times * launch.most_stack)


def _too_large(kernels: Sequence[CompiledKernel], available: int, device: str) -> Iterator[KernelTooLarge]:
    for kernel in kernels:
        if kernel.shared > available:
            yield KernelTooLarge(kernel=kernel.name, needed=kernel.shared, available=available, device=device)


def _raise_first(found: Sequence[KernelSpills | KernelTooLarge]) -> None:
    """The first one, which knows the `others`: the next attempt does without all of them."""
    if found:
        first, *others = found
        raise type(first)(**first.details, others=tuple(others))
