"""Loads a host program into the native runtime: `load(program, libraries)` gives the callable of a compiled graph.

The program's dataclasses become the nested tuples that runtime.cpp reads; what can be decided before the first call is
decided here: which views are a slot's own geometry, which results can be held to their promised sizes, what dies where.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

import torch

from kgen.build import cpp, toolchain
from kgen.capture import check_index as _check_index  # noqa: F401  an operator that programs call
from kgen.errors import InputMismatch, InvalidProgram, TensorMapRefused
from kgen.host.launch import GpuKernel
from kgen.host.program import (
    COMPUTE_OPS,
    NUMBER_KINDS,
    Alias,
    Alloc,
    Arg,
    ArgConst,
    ArgInt,
    ArgList,
    ArgTensor,
    BindSize,
    Check,
    Compute,
    Extern,
    Free,
    Input,
    InputIgnored,
    InputInt,
    InputTensor,
    Instruction,
    Kernel,
    Launch,
    OutArgument,
    OutInt,
    Output,
    OutTensor,
    Pick,
    Program,
    PythonCall,
    Reuse,
    SlotSpec,
    arg_tensors,
    each,
    is_exact,
    is_own,
    passed_on,
    slots_defined,
    slots_read,
    verify,
)

__all__ = ["load"]

Encoded = tuple[Any, ...]

# The orders of the enums in runtime.cpp.
_KINDS: tuple[type[Instruction], ...] = (
    Alloc, Free, Reuse, Alias, Kernel, Extern, PythonCall, BindSize, Compute, Launch, Pick, Check,
)  # fmt: skip


def load(
    program: Program,
    libraries: Iterable[ctypes.CDLL] = (),
    constants: Sequence[torch.Tensor] = (),
    callables: Sequence[Callable[..., Any]] = (),
    launches: Sequence[GpuKernel] = (),
    runtime: ModuleType | None = None,
) -> Callable[[list[Any]], list[Any]]:
    """A callable that takes the boxed list of inputs, clears it, and returns the list of outputs.

    `libraries` hold the kernels that the program names, `launches` are its GPU kernels. `runtime` is the native runtime, by
    default the one of the cache. The callable keeps no state between
    calls: it may run in several threads at once. It raises InputMismatch for inputs the program was not made for, and
    TensorMapRefused for tensors that a kernel cannot reach as it was compiled to.
    """
    verify(program)
    libraries = tuple(libraries)
    addresses = [_address(name, libraries) for name in program.kernels]
    encoder = Encoder(program, addresses, constants, callables, launches)
    return encoder.make(libraries, runtime or cpp.runtime_library())


def _address(name: str, libraries: tuple[ctypes.CDLL, ...]) -> int:
    for library in libraries:
        try:
            return cpp.function_address(library, name)
        except AttributeError:
            continue
    raise InvalidProgram(where=f"kernel {name}", rule="is in one of the libraries")


@functools.cache
def _current_stream() -> int:
    """The address of torch's C function that names the current stream of a CUDA device."""
    library = ctypes.CDLL(str(toolchain.torch_library_dir() / "libtorch_cuda.so"))
    return cpp.function_address(library, "aoti_torch_get_current_cuda_stream")


def _mismatch(position: int, actual: str, expected: str) -> InputMismatch:
    return InputMismatch(position=position, actual=actual, expected=expected)


def _map_refused(kernel: str, buffer: str, problem: str) -> TensorMapRefused:
    return TensorMapRefused(kernel=kernel, buffer=buffer, problem=problem)


class Encoder:
    """Walks a verified program once and builds the tuples."""

    def __init__(
        self,
        program: Program,
        addresses: Sequence[int],
        constants: Sequence[torch.Tensor],
        callables: Sequence[Callable[..., Any]],
        launches: Sequence[GpuKernel],
    ) -> None:
        self.program = program
        self.addresses = addresses
        self.constants = constants
        self.callables = callables
        self.launches = launches
        # Registers that a result of an extern decides and that have no value yet at this point of the walk.
        self.unknown = {reg for item in program.code for reg in _registers_written(item)}
        # Slots that something else than a kernel touches, so that they may have to be tensors.
        self.tensors = {out.slot for out in program.outputs if isinstance(out, OutTensor)}
        for item in each(program.code):
            if not isinstance(item, Kernel | Launch | Free | Check):
                self.tensors.update(slots_read(item), slots_defined(item))
        self.passed_on = passed_on(program)

    def make(self, libraries: tuple[ctypes.CDLL, ...], runtime: ModuleType) -> Callable[[list[Any]], list[Any]]:
        program = self.program
        spec = (
            tuple(self.input(item) for item in program.inputs),
            program.registers,
            tuple(map(_compute, program.computes)),
            tuple((s.dtype, s.sizes, s.strides, s.offset, s.device) for s in program.slots),
            tuple((slot, self.constants[index]) for slot, index in program.constants),
            tuple(self.code()),
            tuple(map(self.output, program.outputs)),
            _mismatch,
            _map_refused,
            libraries,
            _current_stream() if any(s.device.startswith("cuda") for s in program.slots) else 0,
            program.name,
            program.regions,
        )
        runner: Callable[[list[Any]], list[Any]] = runtime.create(spec)
        return runner

    def input(self, item: Input) -> Encoded:
        if isinstance(item, InputIgnored):
            return (2,)
        if isinstance(item, InputInt):
            return 1, item.reg, item.check
        binds = tuple((reg, what == "stride", dim) for reg, what, dim in item.binds)
        strides = None if item.strides is None else _or_minus_one(item.strides)
        only_kernels = item.slot not in self.tensors
        device = self.program.slots[item.slot].device
        alignment = (item.aligned, item.mutated, *(self.readings(item.slot) if item.aligned else (True, ())))
        sizes = _or_minus_one(item.sizes)
        return 0, item.slot, item.dtype, device, sizes, strides, binds, only_kernels, *alignment, item.passed_on

    def readings(self, slot: int) -> Encoded:
        """Whether all geometries in which the program reads the memory of `slot` are known when the call begins, and those
        that are."""
        views: list[SlotSpec | ArgTensor | OutTensor] = []
        family = {slot}
        for item in each(self.program.code):
            if isinstance(item, Alias | Reuse) and item.source in family:
                family.add(item.slot)
            if isinstance(item, Extern | PythonCall):
                views += (arg for arg in arg_tensors(item.args, item.kwargs) if arg.slot in family)
        views += (out for out in self.program.outputs if isinstance(out, OutTensor) and out.slot in family)
        views += (self.program.slots[member] for member in family)
        found = {
            (view.sizes, view.strides, view.offset, view.dtype.itemsize)
            for view in views
            if view.sizes is not None and view.dtype
        }
        known = {v for v in found if self.unknown.isdisjoint((*v[0], *v[1], v[2]))}
        return known == found, tuple(sorted(known))

    def code(self) -> list[Encoded]:
        encoded = []
        for item in with_frees(self.program):
            encoded.append(self.encoded(item))
            self.unknown.difference_update(_registers_written(item))
        return encoded

    def encoded(self, item: Instruction) -> Encoded:
        return _KINDS.index(type(item)), *self.fields(item)

    def fields(self, item: Instruction) -> Encoded:
        if isinstance(item, Pick):
            return item.register, item.limits, tuple(map(self.encoded, item.items))
        if isinstance(item, Kernel):
            region = self.region(self.program.kernels[item.index], item.origin)
            return self.addresses[item.index], item.slots, item.registers, region, item.work
        if isinstance(item, Launch):
            return self.launch(item)
        if isinstance(item, Extern | PythonCall):
            return self.call(item)
        if isinstance(item, Alias | Reuse):
            slots = self.program.slots
            return item.slot, item.source, slots[item.slot] == slots[item.source]
        if isinstance(item, BindSize):
            return item.reg, item.slot, item.dim, item.what == "stride"
        if isinstance(item, Check):
            return item.reg, item.message, item.index
        return _compute(item) if isinstance(item, Compute) else (item.slot,)

    def launch(self, item: Launch) -> Encoded:
        kernel = self.launches[item.index]
        name = self.program.launches[item.index]
        if (len(item.slots), len(item.registers), len(item.maps)) != (kernel.pointers, kernel.integers, kernel.maps):
            takes = f"{kernel.pointers} slots and {kernel.integers} registers ({kernel.maps} descriptors)"
            raise InvalidProgram(where="a launch", rule=f"gives kernel {name} {takes}")
        device = self.program.slots[item.slots[0]].device
        names, region = (name, *item.maps), self.region(name, item.origin)
        return item.slots, item.registers, item.grid, device, kernel.handle, kernel.scratch, names, kernel.functions, region

    def region(self, name: str, origin: str) -> str:
        """What a kernel is called in a profiler's timeline; empty where it is not there."""
        return f"{name}{origin}" if self.program.regions else ""

    def call(self, item: Extern | PythonCall) -> Encoded:
        args = tuple(self.arg(arg) for arg in item.args)
        kwargs = tuple((name, self.arg(arg)) for name, arg in item.kwargs)
        outs = tuple(
            (-1, False, False, False)
            if slot is None
            else (slot, self.is_known(slot), slot in item.aligned, slot in self.passed_on)
            for slot in item.outs
        )
        if isinstance(item, PythonCall):
            return self.callables[item.index], args, kwargs, outs, item.registers
        return item.op, "" if item.overload == "default" else item.overload, args, kwargs, outs, item.registers

    def is_known(self, slot: int) -> bool:
        """Whether the slot's geometry is computed before the call that defines it, so that the result can be checked."""
        spec = self.program.slots[slot]
        return self.unknown.isdisjoint((*spec.sizes, *spec.strides, spec.offset))

    def arg(self, arg: Arg) -> Encoded:
        if isinstance(arg, ArgTensor):
            return (0, *self.view(arg))
        if isinstance(arg, ArgInt):
            return 1, arg.reg, NUMBER_KINDS.index(arg.kind)
        if isinstance(arg, ArgConst):
            return 2, arg.value
        constant = _constant_list(arg)
        if constant is not None:
            return 2, constant
        return 3, tuple(self.arg(entry) for entry in arg.items)

    def view(self, view: ArgTensor | OutTensor) -> Encoded:
        if is_own(view, self.program.slots[view.slot]):
            return view.slot, True
        return view.slot, False, view.sizes, view.strides, view.offset, view.dtype, is_exact(view)

    def output(self, out: Output) -> Encoded:
        if isinstance(out, OutTensor):
            return (0, *self.view(out))
        if isinstance(out, OutArgument):
            return 3, out.position, out.factor
        return (1, out.reg, NUMBER_KINDS.index(out.kind)) if isinstance(out, OutInt) else (2, out.value)


def _or_minus_one(regs: tuple[int | None, ...]) -> tuple[int, ...]:
    return tuple(-1 if reg is None else reg for reg in regs)


def _compute(item: Compute) -> Encoded:
    # A register that is not read must still exist.
    return item.dst, COMPUTE_OPS.index(item.op), item.a, item.b, max(item.c, 0)


def _constant_list(arg: ArgList) -> list[Any] | None:
    """The plain list when all of it is constant, so that it is converted once at load."""
    if not arg.items or not all(isinstance(entry, ArgConst) for entry in arg.items):
        return None
    return [entry.value for entry in arg.items if isinstance(entry, ArgConst)]


def _registers_written(item: Instruction) -> tuple[int, ...]:
    if isinstance(item, BindSize):
        return (item.reg,)
    if isinstance(item, Compute):
        return (item.dst,)
    if isinstance(item, Extern | PythonCall):
        return tuple(reg for _, reg in item.registers)
    return ()


def with_frees(program: Program) -> list[Instruction]:
    """The code with a `Free` after the last use of every slot that the program leaves alive and does not return.

    Mainly for inputs: AOTAutograd hands over ownership, and peak memory counts how early they go."""
    kept = {out.slot for out in program.outputs if isinstance(out, OutTensor)}
    kept |= {item.slot for item in program.code if isinstance(item, Free)}
    kept |= {item.source for item in program.code if isinstance(item, Reuse)}
    kept |= {slot for slot, _ in program.constants}
    last: dict[int, int] = {item.slot: -1 for item in program.inputs if isinstance(item, InputTensor)}
    for position, item in enumerate(program.code):
        for slot in (*slots_read(item), *slots_defined(item)):
            last[slot] = position
    dying: dict[int, list[Instruction]] = {}
    for slot, position in last.items():
        if slot not in kept:
            dying.setdefault(position, []).append(Free(slot))
    code = list(dying.get(-1, ()))
    for position, item in enumerate(program.code):
        code += (item, *dying.get(position, ()))
    return code
