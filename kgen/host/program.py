"""The program of one compiled graph: what the native runtime interprets, as plain data that pickles.

Three kinds of numbered things exist at run time, all private to one call:

- *registers* hold int64 (floats as their bits): literals (preloaded), sizes and strides bound from inputs, and what `Compute`
  makes of them. Every size, stride and offset below is a register number.
- *slots* hold arrays. A slot is defined exactly once: by an input, a constant, `Alloc`, `Reuse`, `Alias`, an `Extern` or a
  `PythonCall`. Strides and offsets count elements.
- *memory* is what slots refer to. `Alloc` makes one; `Alias` adds a holder, `Reuse` moves a holder, `Free` removes one; memory
is
  given back when its last holder is freed, or at the end of the call. So freeing a base under a live alias is safe.

An input's data stands at its slot's `offset`, whatever the tensor's own storage offset is; the same holds for results of
externs. Offsets in `ArgTensor`, `OutTensor` and aliases use the slot's frame of reference.

Order of a call: bind inputs, run `computes`, check inputs, clear the caller's list, run `code`, make `outputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Union

import torch

from kgen.errors import InvalidProgram

__all__ = [
    "Alias", "Alloc", "Arg", "ArgConst", "ArgInt", "ArgList", "ArgTensor", "BindSize", "Check", "Compute", "Extern", "Free",
    "InputIgnored", "InputInt", "InputTensor", "Instruction", "Kernel", "Launch", "OutArgument", "OutConst", "OutInt",
    "OutTensor", "Pick",
    "Program", "PythonCall", "Regs", "Reuse", "SlotSpec", "accept_saved", "each", "is_own", "passed_on", "verify",
]  # fmt: skip

Regs = tuple[int, ...]

#: Operators of `Compute`: floor arithmetic and those of `functions.FUNCTIONS`, then of `FLOAT_FUNCTIONS` on float64 bits (one
#: with a single argument gets it twice). Integer division by zero gives 0, never a trap.
COMPUTE_OPS = (
    "add", "sub", "mul", "floordiv", "mod", "min", "max", "pow", "shl", "shr", "and", "or", "xor", "lt", "le", "eq", "select",
    "float", "fadd", "fmul", "fdiv", "fpow", "fmin", "fmax", "flt", "fle", "feq", "ftrunc", "ffloor", "fceil", "fround",
    "fsqrt", "fexp", "flog", "flog2", "fsin", "fcos", "ftan", "fasin", "facos", "fatan", "fsinh", "fcosh", "ftanh",
    "fasinh", "fmod", "frounddec",
)  # fmt: skip
NUMBER_KINDS = ("int", "bool", "float")


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """Geometry of a slot: memory of ``offset + 1 + sum((size - 1) * stride)`` elements, none when a size is 0. `device` is
    "cpu", or a device with its index: "cuda:0"."""

    dtype: torch.dtype
    sizes: Regs
    strides: Regs
    offset: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Compute:
    """``register[dst] = op(a, b)``; `select` is ``b if a else c``."""

    dst: int
    op: str
    a: int
    b: int
    c: int = -1


@dataclass(frozen=True, slots=True)
class InputTensor:
    """A tensor argument on its slot's device. None in `sizes` leaves a dimension unchecked, None for `strides` leaves all
    strides unchecked (a stride is never checked where the size is 1 or the tensor is empty). `binds` are (register, "size" or
    "stride", dim).

    `passed_on`: of whatever type, on whatever device. `mutated`: some step writes its elements. `aligned`: a kernel needs the
    data at a multiple of 16 bytes. A misaligned tensor is copied for the time of the call, and copied back when mutated."""

    slot: int
    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    strides: tuple[int | None, ...] | None
    binds: tuple[tuple[int, str, int], ...] = ()
    aligned: bool = False
    mutated: bool = False
    passed_on: bool = False


@dataclass(frozen=True, slots=True)
class InputInt:
    """An integer argument: stored into `reg`, or compared with it when `check`."""

    reg: int
    check: bool = False


@dataclass(frozen=True, slots=True)
class InputIgnored:
    """An argument that the graph does not use."""


Input = Union[InputTensor, InputInt, InputIgnored]


@dataclass(frozen=True, slots=True)
class ArgTensor:
    """The view (sizes, strides, offset, dtype) of a slot's storage; `sizes` None means the slot's own tensor as it is."""

    slot: int
    sizes: Regs | None = None
    strides: Regs = ()
    offset: int = -1
    dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class ArgInt:
    """A number in a register; `kind` is one of NUMBER_KINDS, and a float is given by its bits."""

    reg: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class ArgConst:
    value: Any


@dataclass(frozen=True, slots=True)
class ArgList:
    items: tuple[Arg, ...]


Arg = Union[ArgTensor, ArgInt, ArgConst, ArgList]
KwArgs = tuple[tuple[str, Arg], ...]


@dataclass(frozen=True, slots=True)
class Alloc:
    slot: int


@dataclass(frozen=True, slots=True)
class Free:
    slot: int


@dataclass(frozen=True, slots=True)
class Reuse:
    """`slot` takes over the memory of `source`, which must hold at least as many bytes. `source` may still be read by the
    next kernels (in place), but is freed from now on through `slot` alone."""

    slot: int
    source: int


@dataclass(frozen=True, slots=True)
class Alias:
    """`slot` is another geometry or version on the memory of `source`."""

    slot: int
    source: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Calls ``int name(void** ptrs, const int64_t* ints, int threads)`` with the slots' data pointers (offset included).
    A result other than 0 is one of `ops.FAILURES`: of an index out of range, the call raises IndexError, of an integer divided
    by zero RuntimeError, as eager does. `work` says in that message what the kernel computes, and for which of the user's
    lines. `origin` follows the kernel's name in a profiler's timeline: the modules and the line that it is of."""

    index: int
    slots: tuple[int, ...]
    registers: Regs = ()
    work: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """Launches GPU kernel `index` on the current stream of its slots' device, with the slots' data pointers (offset included)
    and the registers, in the order of its parameters. For a TMA descriptor these are a slot and the registers of
    `kgen.rendered.tensor_map.TensorMap.numbers`; `maps` names the buffers of its descriptors in order, for messages. `grid` are
    the numbers of programs along x, y and z; when one is 0, nothing is launched. `origin` is as that of `Kernel`."""

    index: int
    slots: tuple[int, ...]
    registers: Regs
    grid: Regs
    maps: tuple[str, ...] = ()
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Extern:
    """A boxed call of a dispatcher operator: `op` "aten::mm", `overload` "out" ("default" and "" are the same).

    Results are flattened (a list result counts as its elements) and `outs` names the slot that takes each, or None.
    `registers` are (position, register) for results that are numbers; a float leaves its bits. `aligned` are those of `outs`
    whose data a kernel needs at a multiple of 16 bytes: a misaligned result is copied."""

    op: str
    overload: str
    args: tuple[Arg, ...]
    kwargs: KwArgs = ()
    outs: tuple[int | None, ...] = ()
    registers: tuple[tuple[int, int], ...] = ()
    aligned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PythonCall:
    """``callables[index](*args, **kwargs)``; a tuple or list result is flattened as for `Extern`."""

    index: int
    args: tuple[Arg, ...]
    kwargs: KwArgs = ()
    outs: tuple[int | None, ...] = ()
    registers: tuple[tuple[int, int], ...] = ()
    aligned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BindSize:
    """``register[reg] = size (or stride) of the slot's actual tensor``, for sizes known only after an extern ran."""

    reg: int
    slot: int
    dim: int
    what: str = "size"


@dataclass(frozen=True, slots=True)
class Pick:
    """Runs one of `items`, which do the same in different ways: the first whose limit is at least the register, or the last,
    which has no limit. A Python call in it has no results."""

    register: int
    limits: tuple[int, ...]
    items: tuple[Kernel | Launch | PythonCall, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """Raises an error with the message where the register is 0: IndexError if `index`, else RuntimeError."""

    reg: int
    message: str
    index: bool


Instruction = Union[Alloc, Free, Reuse, Alias, Kernel, Extern, PythonCall, BindSize, Compute, Launch, Pick, Check]


@dataclass(frozen=True, slots=True)
class OutTensor:
    """A view of a slot's storage; the slot's own tensor object when the geometry is the same (an input itself, then).
    `sizes` None means the slot's tensor as it is, None where an extern returned no tensor. `exact`: an extern's tensor may have
    other strides in dimensions of length 1, and the result has these."""

    slot: int
    sizes: Regs | None = None
    strides: Regs = ()
    offset: int = -1
    dtype: torch.dtype | None = None
    exact: bool = False


@dataclass(frozen=True, slots=True)
class OutInt:
    """As `ArgInt`."""

    reg: int
    kind: str = "int"


@dataclass(frozen=True, slots=True)
class OutConst:
    value: Any


@dataclass(frozen=True, slots=True)
class OutArgument:
    """The argument at `position` as the caller gave it, times `factor`. The program ignores it otherwise."""

    position: int
    factor: int = 1


Output = Union[OutTensor, OutInt, OutConst, OutArgument]


@dataclass(frozen=True, slots=True)
class Program:
    """`registers` are initial values; `constants` pairs (slot, index into the tensors given at load); `kernels` are symbols of
    C++ functions, `launches` names of GPU kernels. `name` is that of a call in a profiler's timeline (empty: it has none);
    with `regions` each kernel has its own there."""

    inputs: tuple[Input, ...]
    registers: tuple[int, ...]
    slots: tuple[SlotSpec, ...]
    code: tuple[Instruction, ...]
    outputs: tuple[Output, ...]
    kernels: tuple[str, ...] = ()
    computes: tuple[Compute, ...] = ()
    constants: tuple[tuple[int, int], ...] = ()
    launches: tuple[str, ...] = ()
    name: str = ""
    regions: bool = False


def arg_tensors(args: tuple[Arg, ...], kwargs: KwArgs = ()) -> Iterator[ArgTensor]:
    """Every tensor operand in an argument list, nested ones too."""
    pending = [*args, *(arg for _, arg in kwargs)]
    while pending:
        arg = pending.pop(0)
        if isinstance(arg, ArgTensor):
            yield arg
        elif isinstance(arg, ArgList):
            pending[:0] = arg.items


def each(code: Iterable[Instruction]) -> Iterator[Instruction]:
    """The instructions that may run: in place of a `Pick` what it picks from."""
    for item in code:
        if isinstance(item, Pick):
            yield from item.items
        else:
            yield item


def slots_read(item: Instruction) -> tuple[int, ...]:
    """Slots that must be defined before `item` runs."""
    if isinstance(item, Pick):
        return tuple(dict.fromkeys(slot for one in item.items for slot in slots_read(one)))
    if isinstance(item, Kernel | Launch):
        return item.slots
    if isinstance(item, Extern | PythonCall):
        return tuple(arg.slot for arg in arg_tensors(item.args, item.kwargs))
    if isinstance(item, Reuse | Alias):
        return (item.source,)
    if isinstance(item, Free | BindSize):
        return (item.slot,)
    return ()


def slots_defined(item: Instruction) -> tuple[int, ...]:
    if isinstance(item, Alloc | Reuse | Alias):
        return (item.slot,)
    if isinstance(item, Extern | PythonCall):
        return tuple(slot for slot in item.outs if slot is not None)
    return ()


def is_own(view: ArgTensor | OutTensor, spec: SlotSpec) -> bool:
    """Whether the view is the slot's tensor as it is."""
    geometry = (view.sizes, view.strides, view.offset, view.dtype)
    if is_exact(view):
        return False
    return view.sizes is None or geometry == (spec.sizes, spec.strides, spec.offset, spec.dtype)


def is_exact(view: ArgTensor | OutTensor) -> bool:
    """Whether the view is the slot's tensor with the strides of eager in dimensions of length 1."""
    return isinstance(view, OutTensor) and view.exact


def passed_on(program: Program) -> frozenset[int]:
    """The slots that only torch's operators and the caller get to see, and as whole tensors. Their sizes and types may differ
    from what tracing promised: no kernel relies on them, and nothing computes an address with them."""
    views: list[ArgTensor | OutTensor] = [out for out in program.outputs if isinstance(out, OutTensor)]
    seen: set[int] = set()
    for item in each(program.code):
        if isinstance(item, Extern):
            views += arg_tensors(item.args, item.kwargs)
        elif not isinstance(item, Free):
            seen.update(slots_read(item), slots_defined(item))
    seen.update(view.slot for view in views if not is_exact(view) and not is_own(view, program.slots[view.slot]))
    return frozenset(range(len(program.slots))).difference(seen)


def accept_saved(program: Program) -> Program:
    """The program of a backward graph: a tensor that is only passed on may be as the forward's call gave it.

    Its sizes, type and device need not be those of tracing: seeds that attention saves for its gradients are said to be on the
    GPU, and are on the CPU where nothing is dropped; sums that attention saves are said to be of 32 bits, and are of 64 where
    the queries are."""
    loose = passed_on(program)
    inputs = tuple(
        replace(item, sizes=(None,) * len(item.sizes), strides=None, passed_on=True)
        if isinstance(item, InputTensor) and item.slot in loose
        else item
        for item in program.inputs
    )
    return replace(program, inputs=inputs)


def verify(program: Program) -> None:
    """Raise `InvalidProgram` where the native runtime would read a slot, kernel or register that is not there."""
    Verifier(program).run()


class Verifier:
    """One walk in program order. It keeps the runtime free of checks: what passes here cannot read outside its tables."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.defined: set[int] = set()
        self.freed: set[int] = set()

    def run(self) -> None:
        program = self.program
        for position, spec in enumerate(program.slots):
            if len(spec.sizes) != len(spec.strides):
                self.fail(f"slot {position}", "has as many strides as sizes")
            self.registers(f"slot {position}", (*spec.sizes, *spec.strides, spec.offset))
            if spec.device == "cuda":
                self.fail(f"slot {position}", "names its CUDA device by number")
        for position, argument in enumerate(program.inputs):
            self.input(f"input {position}", argument)
        for slot, _ in program.constants:
            self.define("constants", slot)
        for compute in program.computes:
            self.compute("computes", compute)
        for position, item in enumerate(program.code):
            self.instruction(f"code {position} ({type(item).__name__})", item)
        for position, out in enumerate(program.outputs):
            self.output(f"output {position}", out)

    def fail(self, where: str, rule: str) -> None:
        raise InvalidProgram(where=where, rule=rule)

    def registers(self, where: str, regs: tuple[int | None, ...]) -> None:
        if not all(reg is None or 0 <= reg < len(self.program.registers) for reg in regs):
            self.fail(where, f"uses registers below {len(self.program.registers)}, got {regs}")

    def define(self, where: str, slot: int) -> None:
        if not 0 <= slot < len(self.program.slots):
            self.fail(where, f"uses slots below {len(self.program.slots)}, got {slot}")
        if slot in self.defined:
            self.fail(where, f"defines each slot once, got {slot} again")
        self.defined.add(slot)

    def read(self, where: str, slot: int) -> None:
        if slot not in self.defined or slot in self.freed:
            self.fail(where, f"reads only live slots, {slot} is {'freed' if slot in self.freed else 'not defined'}")

    def input(self, where: str, argument: Input) -> None:
        if isinstance(argument, InputInt):
            self.registers(where, (argument.reg,))
        elif isinstance(argument, InputTensor):
            self.define(where, argument.slot)
            self.registers(where, (*argument.sizes, *(argument.strides or ()), *(reg for reg, _, _ in argument.binds)))
            if argument.strides is not None and len(argument.strides) != len(argument.sizes):
                self.fail(where, "has as many strides as sizes")
            if not all(what in ("size", "stride") and 0 <= dim < len(argument.sizes) for _, what, dim in argument.binds):
                self.fail(where, "binds sizes and strides of its own dimensions")

    def compute(self, where: str, item: Compute) -> None:
        if item.op not in COMPUTE_OPS:
            self.fail(where, f"knows the operators {COMPUTE_OPS}, got {item.op}")
        self.registers(where, (item.dst, item.a, item.b, item.c if item.op == "select" else None))

    def view(self, where: str, view: ArgTensor | OutTensor) -> None:
        self.read(where, view.slot)
        if view.sizes is not None:
            if len(view.sizes) != len(view.strides) or view.dtype is None:
                self.fail(where, "gives a view as many strides as sizes, and a dtype")
            self.registers(where, (*view.sizes, *view.strides, view.offset))

    def ints(self, where: str, args: tuple[Arg, ...]) -> None:
        for arg in args:
            if isinstance(arg, ArgInt):
                self.registers(where, (arg.reg,))
            elif isinstance(arg, ArgList):
                self.ints(where, arg.items)

    def instruction(self, where: str, item: Instruction) -> None:
        for slot in slots_read(item):
            self.read(where, slot)
        if isinstance(item, Compute):
            self.compute(where, item)
        elif isinstance(item, BindSize | Check):
            self.registers(where, (item.reg,))
        elif isinstance(item, Kernel | Launch):
            self.kernel(where, item)
        elif isinstance(item, Alloc | Reuse | Alias):
            self.memory(where, item)
        elif isinstance(item, Extern | PythonCall):
            self.call(where, item)
        elif isinstance(item, Free):
            self.freed.add(item.slot)
        elif isinstance(item, Pick):
            self.pick(where, item)
        for slot in slots_defined(item):
            self.define(where, slot)

    def call(self, where: str, item: Extern | PythonCall) -> None:
        for view in arg_tensors(item.args, item.kwargs):
            self.view(where, view)
        self.ints(where, (*item.args, *(arg for _, arg in item.kwargs)))
        self.registers(where, tuple(reg for _, reg in item.registers))

    def memory(self, where: str, item: Alloc | Reuse | Alias) -> None:
        if not 0 <= item.slot < len(self.program.slots):
            return  # `define` says so
        device = self.program.slots[item.slot].device
        if isinstance(item, Alloc):
            if device.partition(":")[0] not in ("cpu", "cuda"):
                self.fail(where, f"allocates on the CPU or on CUDA devices, got {device}")
        elif device != self.program.slots[item.source].device:
            self.fail(where, f"stays on the device of slot {item.source}, got {device}")

    def kernel(self, where: str, item: Kernel | Launch) -> None:
        known = self.program.kernels if isinstance(item, Kernel) else self.program.launches
        self.registers(where, item.registers)
        if not 0 <= item.index < len(known):
            self.fail(where, f"names one of {len(known)} kernels, got {item.index}")
        devices = {self.program.slots[slot].device for slot in item.slots}
        if isinstance(item, Kernel):
            if devices - {"cpu"}:
                self.fail(where, f"runs on the CPU, got slots on {sorted(devices)}")
            return
        self.registers(where, item.grid)
        if len(item.grid) != 3:
            self.fail(where, f"has a grid of three registers, got {item.grid}")
        if len(devices) != 1:
            self.fail(where, f"has all of its slots on one device, got {sorted(devices)}")

    def pick(self, where: str, item: Pick) -> None:
        self.registers(where, (item.register,))
        if len(item.items) != len(item.limits) + 1 or list(item.limits) != sorted(set(item.limits)):
            self.fail(where, f"has growing limits, one fewer than items, got {item.limits} for {len(item.items)} items")
        if len({type(one) for one in item.items}) != 1:
            self.fail(where, f"picks from items of one kind, got {[type(one).__name__ for one in item.items]}")
        for one in item.items:
            results = isinstance(one, PythonCall) and (*one.outs, *one.registers)
            if results or not isinstance(one, Kernel | Launch | PythonCall):
                self.fail(where, f"picks from kernels that write to what is there, got {one}")
            self.instruction(where, one)

    def output(self, where: str, out: Output) -> None:
        if isinstance(out, OutTensor):
            self.view(where, out)
        elif isinstance(out, OutInt):
            self.registers(where, (out.reg,))
        elif isinstance(out, OutArgument):
            inputs = self.program.inputs
            if not (0 <= out.position < len(inputs) and isinstance(inputs[out.position], InputIgnored)):
                self.fail(where, f"returns an argument that nothing else uses, got {out.position}")
