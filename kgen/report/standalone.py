"""What `output_code.py` of a debug folder is made with: `Script` reads as the program of one compiled graph, a line a step, and
`run` builds the kernels beside it, checks the graph against the evaluator, and times it.

A number in a script is an integer or a `Reg`, a size that is only known when the graph is called.
"""

from __future__ import annotations

import operator
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Union

import torch

from kgen.build import cpp
from kgen.capture import rng  # noqa: F401  defines the operators that draw random numbers
from kgen.capture.eager_graph import EagerGraph
from kgen.host import native
from kgen.host import program as hp
from kgen.ir import index as ix
from kgen.reference.evaluate import Policy, evaluate_graph

__all__ = ["TOLERANCE", "Reg", "Script", "Slot", "View", "difference", "reduce_operator"]


@dataclass(frozen=True, slots=True)
class Reg:
    """A size, stride or offset decided at the call, or another number computed from sizes: `kind` is int, bool or float, and a
    float is held by its bits (`kgen.ir.index.float_bits`)."""

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


class Script:
    """Collects a `kgen.host.program.Program`. The methods are the instructions described there."""

    def __init__(self) -> None:
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

    def result(self, dtype: torch.dtype, sizes: Sequence[Number], strides: Sequence[Number], offset: Number = 0) -> Slot:
        """An array that a later library call gives."""
        self.slots.append(hp.SlotSpec(dtype, self._regs(sizes), self._regs(strides), self._reg(offset)))
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
    ) -> Slot:
        """A tensor argument. `binds` are the sizes it defines; example integers are drawn below `high`."""
        slot = self.result(dtype, sizes, strides)
        bound = tuple((reg.number, what, dim) for reg, what, dim in binds)
        self.inputs.append(_Example(hp.InputTensor(slot.number, dtype, self._regs(sizes), self._regs(strides), bound), high))
        return slot

    def integer(self, number: Number, check: bool = False) -> None:
        """An integer argument."""
        self.inputs.append(_Example(hp.InputInt(self._reg(number), check), 0))

    def ignored(self) -> None:
        self.inputs.append(_Example(hp.InputIgnored(), 0))

    def constant(self, position: int, dtype: torch.dtype, sizes: Sequence[Number], strides: Sequence[Number]) -> Slot:
        """Tensor number `position` of constants.pt."""
        slot = self.result(dtype, sizes, strides)
        self.constants.append((slot.number, position))
        return slot

    # ---- steps ----------------------------------------------------------------------------------------------------------

    def alloc(self, dtype: torch.dtype, sizes: Sequence[Number], strides: Sequence[Number], offset: Number = 0) -> Slot:
        slot = self.result(dtype, sizes, strides, offset)
        self.code.append(hp.Alloc(slot.number))
        return slot

    def reuse(
        self, old: Slot, dtype: torch.dtype, sizes: Sequence[Number], strides: Sequence[Number], offset: Number = 0
    ) -> Slot:
        """A new array in the memory of `old`."""
        slot = self.result(dtype, sizes, strides, offset)
        self.code.append(hp.Reuse(slot.number, old.number))
        return slot

    def alias(
        self, old: Slot, dtype: torch.dtype, sizes: Sequence[Number], strides: Sequence[Number], offset: Number = 0
    ) -> Slot:
        """A newer version, or another reading, of the memory of `old`."""
        slot = self.result(dtype, sizes, strides, offset)
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
        items = tuple(item for item in self.code if isinstance(item, hp.Kernel))
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

    def gpu_kernel(self, name: str) -> None:
        """A launch of a GPU kernel: scripts build C++ only."""
        self.why_not = f"the graph launches the GPU kernel {name}"

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
        return hp.Program(
            tuple(example.spec for example in self.inputs), tuple(self.registers), tuple(self.slots), tuple(self.code),
            tuple(self.outputs), tuple(self.kernels), tuple(self.computes), tuple(self.constants),
        )  # fmt: skip

    # ---- running --------------------------------------------------------------------------------------------------------

    def load(self, folder: Path) -> Callable[[list[Any]], list[Any]]:
        """The graph as a callable on a boxed list of inputs, its kernels built from ``kernels.cpp`` in `folder`."""
        if self.why_not:
            raise SystemExit(f"this file cannot run alone: {self.why_not}")
        source = (folder / "kernels.cpp").read_text() if self.kernels else ""
        libraries = [cpp.load_library(cpp.build_unit("kernels", source, objects=self.objects))] if self.kernels else []
        constants = torch.load(folder / "constants.pt") if self.constants else []
        return native.load(self.program(), libraries, constants)

    def example_inputs(self) -> list[Any]:
        """Random inputs of the right sizes, strides and dtypes; the same ones at each call."""
        torch.manual_seed(0)
        values = self._values()
        return [_draw(example, values) for example in self.inputs]

    def _values(self) -> list[int]:
        values = list(self.registers)
        for item in self.computes:
            args = [values[reg] for reg in (item.a, item.b, item.c) if reg >= 0]
            if item.op in _COMPUTE:
                values[item.dst] = _COMPUTE[item.op](*args)
            else:  # a function of one float gets its argument twice
                values[item.dst] = ix.evaluate_function(item.op, args)
        return values

    def run(self, file: str, moved: int = 0) -> None:
        """Builds, checks and times the graph. `moved` is what it moves in memory, in bytes. Exits with 1 when it is wrong."""
        folder = Path(file).parent
        graph = self.load(folder)
        wrong = _check(self, graph, folder)
        seconds = _time(graph, self)
        speed = f", {moved / seconds / 1e9:.1f} GB/s" if moved else ""
        _say(f"{seconds * 1e6:.1f} us a call{speed} ({len(self.kernels)} different kernels, {torch.get_num_threads()} threads)")
        if wrong:
            raise SystemExit(1)


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


# ---- checking and timing ----------------------------------------------------------------------------------------------

# Relative to the largest magnitude of a tensor: a sum in another order differs by a few roundings of that.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def _check(script: Script, graph: Callable[[list[Any]], list[Any]], folder: Path) -> bool:
    """Prints how the results and changed inputs compare with the reference beside the script; True when they differ."""
    reference, name = _reference(folder)
    if reference is None:
        _say("not checked: there is no reference in this folder")
        return False
    expected_inputs = script.example_inputs()
    expected = reference(expected_inputs)
    inputs = script.example_inputs()
    got = graph(list(inputs))
    pairs = [(f"output {k}", a, b) for k, (a, b) in enumerate(zip(got, expected, strict=True))]
    pairs += [(f"input {k} after the call", a, b) for k, (a, b) in enumerate(zip(inputs, expected_inputs, strict=True))]
    wrong = [f"{what}: {found}" for what, a, b in pairs if (found := difference(a, b))]
    for line in wrong:
        _say(f"WRONG {line}")
    if not wrong:
        _say(f"right: all results ({len(got)}), and the inputs after the call, agree with {name}")
    return bool(wrong)


def _reference(folder: Path) -> tuple[Callable[[list[Any]], Sequence[Any]] | None, str]:
    if (folder / "graph.pkl").exists():
        lowered = pickle.loads((folder / "graph.pkl").read_bytes())
        return (lambda inputs: evaluate_graph(lowered, inputs, policy=Policy(check_vendor=False))), "the evaluated loop IR"
    if (folder / "graph.fx").exists():
        eager = EagerGraph.deserialize((folder / "graph.fx").read_bytes())
        return (lambda inputs: eager(list(inputs))), "the FX graph in eager"
    return None, ""


def difference(got: Any, expected: Any) -> str:
    """How two results differ, or an empty text."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        return "" if type(got) is type(expected) and got == expected else f"{got} instead of {expected}"
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype}{list(got.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not got.dtype.is_floating_point or not got.numel():
        return "" if torch.equal(got, expected) else "other values"
    wide, other = got.double(), expected.double()
    limit = TOLERANCE.get(got.dtype, 1e-1)
    finite = other[other.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    if torch.allclose(wide, other, rtol=limit, atol=limit * scale, equal_nan=True):
        return ""
    return f"differs by up to {float((wide - other).abs().nan_to_num().max()):.3g}, values up to {scale:.3g}"


def _time(graph: Callable[[list[Any]], list[Any]], script: Script, budget: float = 0.5) -> float:
    """The median seconds of a call."""
    inputs = script.example_inputs()
    samples: list[float] = []
    end = time.perf_counter() + budget
    while len(samples) < 3 or (time.perf_counter() < end and len(samples) < 1000):
        start = time.perf_counter()
        graph(list(inputs))
        samples.append(time.perf_counter() - start)
    return median(samples[1:])


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  a script's output


# ---- pickling graphs --------------------------------------------------------------------------------------------------


def reduce_operator(value: Any) -> Any:
    """How an operator is pickled: by name, since it cannot be pickled itself. NotImplemented for anything else."""
    if isinstance(value, torch._ops.OpOverload):
        return find_operator, (value.namespace, value._schema.name.split("::")[1], value._overloadname)
    return NotImplemented


def find_operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)
