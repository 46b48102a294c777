"""What `output_code.py` of a debug folder is made with: `Script` reads as the program of one compiled graph, a line a step, and
`run` builds the kernels beside it, checks the graph against the evaluator, and times it.

A number in a script is an integer or a `Reg`, a size that is only known when the graph is called.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

import torch

from kgen.build import cpp, triton
from kgen.capture import rng  # noqa: F401  defines the operators that draw random numbers
from kgen.host import native
from kgen.host import program as hp
from kgen.host.interpret import Interpreted
from kgen.host.launch import load_kernel
from kgen.ir import functions
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.report.script_checks import check, say, timed

__all__ = ["Reg", "Script", "Slot", "View", "reduce_operator"]


@dataclass(frozen=True, slots=True)
class Reg:
    """A size, stride or offset decided at the call, or another number computed from sizes: `kind` is int, bool or float, and a
    float is held by its bits (`kgen.ir.functions.float_bits`)."""

    number: int
    kind: str = "int"

    def as_bool(self) -> Reg:
        return Reg(self.number, "bool")

    def as_float(self) -> Reg:
        return Reg(self.number, "float")


@dataclass(frozen=True, slots=True)
class Slot:
    """An array of the program."""

    number: int


Number = Union[int, Reg]


@dataclass(frozen=True, slots=True)
class View:
    """Another geometry on a slot's storage, in elements of `dtype`."""

    slot: Slot
    dtype: torch.dtype
    sizes: tuple[Number, ...]
    strides: tuple[Number, ...]
    offset: Number = 0


@dataclass(frozen=True, slots=True)
class _Example:
    """How an example input is drawn: integers below `high`."""

    spec: hp.Input
    high: int


@dataclass(frozen=True, slots=True)
class _GpuKernel:
    """The launch of a kernel beside the script; the text of the file is read when the script runs."""

    number: int
    kernel: TritonKernel


class Script:
    """Collects a `kgen.host.program.Program`. The methods are the instructions described there. Slots are on `device` unless
    they say otherwise; on a machine without such a GPU everything is on the CPU, and GPU kernels are interpreted."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.gpu_kernels: list[TritonKernel] = []
        self.registers: list[int] = []
        self.literals: dict[int, int] = {}
        self.slots: list[hp.SlotSpec] = []
        self.inputs: list[_Example] = []
        self.computes: list[hp.Compute] = []
        self.code: list[hp.Instruction] = []
        self.outputs: list[hp.Output] = []
        self.kernels: list[str] = []
        self.objects: Sequence[str] = ()  # what they link
        self.constants: list[tuple[int, int]] = []
        self.why_not = ""

    # ---- numbers and arrays ---------------------------------------------------------------------------------------------

    def symbol(self, example: int = 0) -> Reg:
        """A register; `example` is its value for the example inputs."""
        self.registers.append(example)
        return Reg(len(self.registers) - 1)

    def compute(self, dst: Reg, op: str, *args: Number) -> None:
        """``dst = op(args)``, before the first step."""
        self.computes.append(hp.Compute(dst.number, op, *map(self._reg, args)))

    def compute_here(self, dst: Reg, op: str, *args: Number) -> None:
        """``dst = op(args)`` between two steps: it needs a size that a library call found out."""
        self.code.append(hp.Compute(dst.number, op, *map(self._reg, args)))

    def result(
        self,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        offset: Number = 0,
        device: str | None = None,
    ) -> Slot:
        """An array that a later library call gives."""
        where = device or self.device
        self.slots.append(hp.SlotSpec(dtype, self._regs(sizes), self._regs(strides), self._reg(offset), where))
        return Slot(len(self.slots) - 1)

    def _reg(self, number: Number) -> int:
        if isinstance(number, Reg):
            return number.number
        if number not in self.literals:
            self.literals[number] = self.symbol(number).number
        return self.literals[number]

    def _regs(self, numbers: Sequence[Number]) -> tuple[int, ...]:
        return tuple(map(self._reg, numbers))

    # ---- inputs ---------------------------------------------------------------------------------------------------------

    def input(
        self,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        binds: Sequence[tuple[Reg, str, int]] = (),
        high: int = 8,
        device: str | None = None,
    ) -> Slot:
        """A tensor argument. `binds` are the sizes it defines; example integers are drawn below `high`."""
        slot = self.result(dtype, sizes, strides, device=device)
        bound = tuple((reg.number, what, dim) for reg, what, dim in binds)
        self.inputs.append(_Example(hp.InputTensor(slot.number, dtype, self._regs(sizes), self._regs(strides), bound), high))
        return slot

    def integer(self, number: Number, check: bool = False) -> None:
        """An integer argument."""
        self.inputs.append(_Example(hp.InputInt(self._reg(number), check), 0))

    def ignored(self) -> None:
        self.inputs.append(_Example(hp.InputIgnored(), 0))

    def constant(
        self,
        position: int,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        offset: Number = 0,
        device: str | None = None,
    ) -> Slot:
        """Tensor number `position` of constants.pt."""
        slot = self.result(dtype, sizes, strides, offset, device)
        self.constants.append((slot.number, position))
        return slot

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def alloc(
        self,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        offset: Number = 0,
        device: str | None = None,
    ) -> Slot:
        slot = self.result(dtype, sizes, strides, offset, device)
        self.code.append(hp.Alloc(slot.number))
        return slot

    def reuse(
        self,
        old: Slot,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        offset: Number = 0,
        device: str | None = None,
    ) -> Slot:
        """A new array in the memory of `old`."""
        slot = self.result(dtype, sizes, strides, offset, device)
        self.code.append(hp.Reuse(slot.number, old.number))
        return slot

    def alias(
        self,
        old: Slot,
        dtype: torch.dtype,
        sizes: Sequence[Number],
        strides: Sequence[Number],
        offset: Number = 0,
        device: str | None = None,
    ) -> Slot:
        """A newer version, or another reading, of the memory of `old`."""
        slot = self.result(dtype, sizes, strides, offset, device)
        self.code.append(hp.Alias(slot.number, old.number))
        return slot

    def free(self, slot: Slot) -> None:
        self.code.append(hp.Free(slot.number))

    def kernel(self, symbol: str, slots: Sequence[Slot], sizes: Sequence[Number] = ()) -> None:
        """Runs a function of kernels.cpp."""
        if symbol not in self.kernels:
            self.kernels.append(symbol)
        numbers = tuple(slot.number for slot in slots)
        self.code.append(hp.Kernel(self.kernels.index(symbol), numbers, self._regs(sizes)))

    @contextmanager
    def pick(self, number: Number, limits: Sequence[int]) -> Iterator[None]:
        """Of the kernels inside one runs: the first whose limit is at least the number, or the last, which has no limit."""
        code, self.code = self.code, []
        yield
        items = tuple(item for item in self.code if isinstance(item, hp.Kernel | hp.Launch))
        self.code = [*code, hp.Pick(self._reg(number), tuple(limits), items)]

    def call(
        self,
        op: str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
        outs: Sequence[Slot | None] = (),
        integers: Sequence[tuple[int, Reg]] = (),
    ) -> None:
        """Calls a torch operator, ``aten::mm`` or ``aten::mm.out``; `outs` take its results, `integers` its integer results."""
        name, _, overload = op.partition(".")
        given = tuple((key, self._arg(value)) for key, value in (kwargs or {}).items())
        results = tuple(None if out is None else out.number for out in outs)
        numbers = tuple((position, reg.number) for position, reg in integers)
        self.code.append(hp.Extern(name, overload, tuple(map(self._arg, args)), given, results, numbers))

    def python_call(self, what: str) -> None:
        """A call of a Python function, which no file can hold."""
        self.why_not = f"the graph calls the Python function {what}"

    def gpu_kernel(
        self, name: str, signature: tuple[str, ...], divisible: tuple[bool, ...], warps: int, stages: int, **options: Any
    ) -> _GpuKernel:
        """A kernel in the file of its name, with what else its machine code depends on (`TritonKernel`)."""
        kernel = TritonKernel(name, "", "", signature, divisible, warps, stages, tuple(options.items()))
        self.gpu_kernels.append(kernel)
        return _GpuKernel(len(self.gpu_kernels) - 1, kernel)

    def launch(
        self,
        kernel: _GpuKernel,
        slots: Sequence[Slot],
        numbers: Sequence[Number],
        grid: Sequence[Number],
        maps: tuple[str, ...] = (),
    ) -> None:
        """Launches so many programs of a kernel; `maps` name the buffers of its TMA descriptors."""
        given = tuple(slot.number for slot in slots)
        self.code.append(hp.Launch(kernel.number, given, self._regs(numbers), self._regs(grid), maps))

    def bind(self, reg: Reg, slot: Slot, dim: int, what: str = "size") -> None:
        """A size that is known now that a library call has run."""
        self.code.append(hp.BindSize(reg.number, slot.number, dim, what))

    def output(self, value: Any) -> None:
        arg = self._arg(value)
        if isinstance(arg, hp.ArgTensor):
            self.outputs.append(hp.OutTensor(arg.slot, arg.sizes, arg.strides, arg.offset, arg.dtype))
        else:
            self.outputs.append(hp.OutInt(arg.reg, arg.kind) if isinstance(arg, hp.ArgInt) else hp.OutConst(value))

    def output_argument(self, position: int, factor: int = 1) -> None:
        """An argument that is ignored otherwise, times a factor."""
        self.outputs.append(hp.OutArgument(position, factor))

    def _arg(self, value: Any) -> hp.Arg:
        if isinstance(value, Slot):
            return hp.ArgTensor(value.number)
        if isinstance(value, View):
            return hp.ArgTensor(
                value.slot.number, self._regs(value.sizes), self._regs(value.strides), self._reg(value.offset), value.dtype
            )
        if isinstance(value, Reg):
            return hp.ArgInt(value.number, value.kind)
        if isinstance(value, list | tuple):
            return hp.ArgList(tuple(map(self._arg, value)))
        return hp.ArgConst(value)

    def program(self) -> hp.Program:
        code, slots = self.code, self.slots
        if self.is_interpreted:
            code = [_interpreted(item) for item in code]
            slots = [replace(spec, device="cpu") for spec in slots]
        return hp.Program(
            tuple(example.spec for example in self.inputs), tuple(self.registers), tuple(slots), tuple(code),
            tuple(self.outputs), tuple(self.kernels), tuple(self.computes), tuple(self.constants),
            () if self.is_interpreted else tuple(kernel.name for kernel in self.gpu_kernels),
        )  # fmt: skip

    # ---- running --------------------------------------------------------------------------------------------------------

    @property
    def is_on_gpu(self) -> bool:
        return self.device != "cpu" and torch.cuda.is_available()

    @property
    def is_interpreted(self) -> bool:
        """Whether GPU kernels run without a GPU."""
        return bool(self.gpu_kernels) and not self.is_on_gpu

    def load(self, folder: Path) -> Callable[[list[Any]], list[Any]]:
        """The graph as a callable on a boxed list of inputs, its kernels built from the files in `folder`."""
        if self.why_not:
            raise SystemExit(f"this file cannot run alone: {self.why_not}")
        source = (folder / "kernels.cpp").read_text() if self.kernels else ""
        libraries = [cpp.load_library(cpp.build_unit("kernels", source, objects=self.objects))] if self.kernels else []
        constants = torch.load(folder / "constants.pt", map_location=self.where) if self.constants else []
        texts = [(folder / f"{kernel.name}.py").read_text() for kernel in self.gpu_kernels]
        kernels = [replace(one, source=text, key=text) for one, text in zip(self.gpu_kernels, texts, strict=True)]
        if not self.is_on_gpu:
            launches = [item for item in hp.each(self.code) if isinstance(item, hp.Launch)]
            maps = {item.index: item.maps for item in launches}
            callables = [Interpreted(kernel, maps.get(k, ())) for k, kernel in enumerate(kernels)]
            return native.load(self.program(), libraries, constants, callables)
        device = torch.device(self.device)
        major, minor = torch.cuda.get_device_capability(device)
        compiled = triton.compile_kernels(kernels, 10 * major + minor)
        loaded = [load_kernel(kernel, [device.index or 0]) for kernel in compiled]
        return native.load(self.program(), libraries, constants, launches=loaded)

    @property
    def where(self) -> str:
        """Where the arrays are that do not say otherwise."""
        return self.device if self.is_on_gpu else "cpu"

    def example_inputs(self) -> list[Any]:
        """Random inputs of the right sizes, strides and dtypes; the same ones at each call."""
        torch.manual_seed(0)
        values = self._values()
        return [self._placed(example, _draw(example, values)) for example in self.inputs]

    def _placed(self, example: _Example, value: Any) -> Any:
        """A drawn input, on the device of its slot; the numbers are those of every machine."""
        if not isinstance(example.spec, hp.InputTensor) or not self.is_on_gpu:
            return value
        moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.slots[example.spec.slot].device)
        return moved.copy_(value)

    def _values(self) -> list[int]:
        values = list(self.registers)
        for item in self.computes:
            args = [values[reg] for reg in (item.a, item.b, item.c) if reg >= 0]
            if item.op in _COMPUTE:
                values[item.dst] = _COMPUTE[item.op](*args)
            else:  # a function of one float gets its argument twice
                values[item.dst] = functions.evaluate_function(item.op, args)
        return values

    def run(self, file: str, moved: int = 0) -> None:
        """Builds, checks and times the graph. `moved` is what it moves in memory, in bytes. Exits with 1 when it is wrong."""
        folder = Path(file).parent
        graph = self.load(folder)
        wrong = check(graph, self.example_inputs, folder)
        if self.is_interpreted:
            say(f"not timed: {len(self.gpu_kernels)} GPU kernels ran in Triton's interpreter")
            if wrong:
                raise SystemExit(1)
            return
        seconds = timed(graph, self.example_inputs(), self.is_on_gpu)
        speed = f", {moved / seconds / 1e9:.1f} GB/s" if moved else ""
        count, where = len(self.kernels) + len(self.gpu_kernels), f"{torch.get_num_threads()} threads"
        where = torch.cuda.get_device_name(self.device) if self.is_on_gpu else where
        say(f"{seconds * 1e6:.1f} us a call{speed} ({count} different kernels, {where})")
        if wrong:
            raise SystemExit(1)


def _interpreted(item: hp.Instruction) -> hp.Instruction:
    """An instruction without a GPU: a launch is a call of the interpreter."""
    if isinstance(item, hp.Pick):
        return replace(item, items=tuple(_call(one) if isinstance(one, hp.Launch) else one for one in item.items))
    if isinstance(item, hp.Extern):
        return replace(item, args=tuple(map(_on_cpu, item.args)), kwargs=tuple((k, _on_cpu(v)) for k, v in item.kwargs))
    return _call(item) if isinstance(item, hp.Launch) else item


def _on_cpu(arg: hp.Arg) -> hp.Arg:
    """A device among an operator's arguments is that of the machine that wrote the script."""
    return hp.ArgConst(torch.device("cpu")) if isinstance(arg, hp.ArgConst) and isinstance(arg.value, torch.device) else arg


def _call(item: hp.Launch) -> hp.PythonCall:
    """It takes the tensors, then the integers, then the grid."""
    return hp.PythonCall(item.index, (*map(hp.ArgTensor, item.slots), *map(hp.ArgInt, (*item.registers, *item.grid))))


# ---- example inputs ---------------------------------------------------------------------------------------------------


def _draw(example: _Example, values: list[int]) -> Any:
    spec = example.spec
    if isinstance(spec, hp.InputInt):
        return values[spec.reg]
    if not isinstance(spec, hp.InputTensor):
        return 0
    sizes = [values[reg] for reg in spec.sizes if reg is not None]
    strides = [values[reg] for reg in spec.strides or () if reg is not None]
    span = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    return _random(span, spec.dtype, example.high).as_strided(sizes, strides)


def _random(count: int, dtype: torch.dtype, high: int) -> torch.Tensor:
    if dtype.is_complex or dtype.is_floating_point:
        wide = torch.float32 if dtype.itemsize < 2 else dtype
        return torch.randn(count, dtype=wide).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, (count,)).to(dtype)
    return torch.randint(0, max(1, high), (count,)).to(dtype)


_COMPUTE: dict[str, Callable[..., int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "floordiv": lambda a, b: a // b if b else 0,
    "mod": lambda a, b: a % b if b else a, "min": min, "max": max, "pow": pow, "shl": operator.lshift, "shr": operator.rshift,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "lt": operator.lt, "le": operator.le, "eq": operator.eq,
    "select": lambda c, a, b: a if c else b,
}  # fmt: skip


# ---- pickling graphs --------------------------------------------------------------------------------------------------


def reduce_operator(value: Any) -> Any:
    """How an operator is pickled: by name, since it cannot be pickled itself. NotImplemented for anything else."""
    if isinstance(value, torch._ops.OpOverload):
        return find_operator, (value.namespace, value._schema.name.split("::")[1], value._overloadname)
    return NotImplemented


def find_operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
