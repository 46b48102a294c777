"""What a template is asked to compute: a kernel whose loops have been sorted into the template's named axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from kgen import index as ix
from kgen import ir, ops
from kgen import values as vs
from kgen.index import Atom, Expr, Var
from kgen.plan import Kernel, Statement
from kgen.sizes import Sizes
from kgen.templates.contract import Template
from kgen.values import Value


@dataclass(frozen=True, slots=True)
class Device:
    """What a choice needs to know of the machine. `arch` is a GPU's compute capability (90), `processors` its multiprocessors
    or the CPU's threads, `shared` the shared memory of a program in bytes, `registers` the 32-bit registers of a thread; `isa`
    names the CPU's instruction set, `lanes` are the float32 numbers of a vector. Rates, a second: `flops` of a matrix product
    in 16-bit floats, and `bandwidth` in bytes."""

    kind: str = "cuda"
    arch: int = 90
    processors: int = 132
    shared: int = 232448
    registers: int = 255
    isa: str = ""
    lanes: int = 1
    flops: float = 790e12
    bandwidth: float = 4.3e12


@dataclass(frozen=True, slots=True)
class Input:
    """An operand of a problem. `dtype` is the type in which it is multiplied; `load` the load that it is, if it is one and
    nothing else, of that very type. `loops` are those of each of its axes: one, wherever memory allows."""

    name: str
    axes: tuple[str, ...]
    value: Value
    dtype: torch.dtype
    load: Value | None
    loops: Mapping[str, tuple[Var, ...]]


class Problem:
    """One kernel as a template sees it. Sizes are numbers at the hints (`size`) or expressions (`extent`)."""

    def __init__(
        self, template: Template, kernel: Kernel, graph: ir.Graph, loops: Mapping[str, tuple[Var, ...]], device: Device
    ) -> None:
        self.template, self.kernel, self.graph, self.loops, self.device = template, kernel, graph, loops, device
        self.sizes = Sizes(graph.size_hints)
        self.main = next(s for s in kernel.statements if s.kind == "contraction")
        values = (self.main.value, *self.main.factors)
        assert self.main.operands is not None
        self.inputs = {
            name: self._input(name, operand.axes, value)
            for (name, operand), value in zip(template.operands.items(), values, strict=True)
        }

    def _input(self, name: str, axes: tuple[str, ...], value: Value) -> Input:
        """The operand with the loops of an axis joined where it walks through memory as if they were one: what the epilogue
        makes of a result's rows, say two dimensions of them, need not concern the operands."""
        exprs = [e for v in vs.topological([value]) for e in vs.index_exprs(v)]
        loops: dict[str, tuple[Var, ...]] = {}
        mapping: dict[Atom, Expr] = {}
        for axis in axes:
            loops[axis] = self.loops[axis]
            if len(loops[axis]) > 1 and all(_as_one(e, loops[axis]) for e in exprs):
                *rest, last = loops[axis]
                whole = ix.var(axis, self.extent(axis))
                mapping |= {**dict.fromkeys(rest, ix.ZERO), last: whole.expr()}
                loops[axis] = (whole,)
        value = vs.substitute(value, mapping) if mapping else value
        return Input(name, axes, value, self.main_dtype, _plain(value, self.main_dtype), loops)

    @property
    def epilogue(self) -> tuple[Statement, ...]:
        """What happens to the result before it is stored."""
        return tuple(s for s in self.kernel.statements if s is not self.main)

    @cached_property
    def accumulator(self) -> torch.dtype:
        """The type in which products are added up."""
        assert self.main.operands is not None
        return ops.sum_dtype(self.main.operands)

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def extent(self, axis: str) -> Expr:
        """The length of an axis; 1 for an empty one."""
        return ix.product(v.extent for v in self.loops[axis])

    def size(self, axis: str) -> int:
        return self.sizes.of(self.extent(axis))

    def static(self, axis: str) -> bool:
        return self.extent(axis).as_int() is not None

    def tiles(self, axis: str, block: int) -> Expr:
        return ix.ceildiv(self.extent(axis), block)

    # ---- layouts ----------------------------------------------------------------------------------------------------

    def stride(self, name: str, axis: str) -> Expr | None:
        """Elements from one index of an axis to the next, where the operand is one load and the axis one loop."""
        load, loops = self.inputs[name].load, self.inputs[name].loops[axis]
        if load is None or len(loops) > 1:
            return None
        return ix.stride_of(load.attr[1][0], loops[0]) if loops else ix.ZERO

    def contiguous(self, name: str) -> str | None:
        """The axis along which the operand's neighbours are neighbours in memory, where it is one load."""
        return next((axis for axis in self.inputs[name].axes if self.stride(name, axis) == 1), None)

    @property
    def flops(self) -> int:
        total = 2
        for axis in self.loops:
            total *= self.size(axis)
        return total

    @property
    def size_of_result(self) -> int:
        """Bytes of the product as the library would store it, in the operands' type."""
        return self._points(self.template.implements.results[0]) * self.main_dtype.itemsize

    def bytes_of_operand(self, name: str) -> int:
        """Bytes of an operand as the library would read it."""
        return self._points(self.inputs[name].axes) * self.inputs[name].dtype.itemsize

    def _points(self, axes: Iterable[str]) -> int:
        total = 1
        for axis in axes:
            total *= self.size(axis)
        return total

    @property
    def main_dtype(self) -> torch.dtype:
        """The type of the operands."""
        assert self.main.operands is not None
        return self.main.operands

    @property
    def finishing(self) -> bool:
        """Whether the epilogue is more than storing the sum: a bias, too, is something that libraries add themselves."""
        return len(self.epilogue) > 1

    def bytes_read(self, name: str) -> int:
        """Bytes of the buffers from which an operand is made, each counted once."""
        loads = {v.attr[0] for v in vs.loads([self.inputs[name].value])}
        return sum(self.sizes.bytes(self.graph.buffers[b]) for b in loads if b in self.graph.buffers)

    @cached_property
    def epilogue_bytes(self) -> int:
        """Bytes that the epilogue reads and writes."""
        made = {o for s in self.kernel.statements for o in s.outs}
        read = {v.attr[0] for s in self.epilogue for v in vs.loads(s.roots)} - made
        written = {o for s in self.epilogue for o, kept in zip(s.outs, s.stored, strict=True) if kept}
        return sum(self.sizes.bytes(self.graph.buffers[b]) for b in read | written)


def _as_one(expr: Expr, loops: tuple[Var, ...]) -> bool:
    """Whether the index walks through the loops, the last one fastest, as through one. Indices from data are left alone."""
    if any(isinstance(a, ix.Indirect) for a in ix.free_atoms(expr)):
        return False
    strides = [ix.stride_of(expr, v) for v in loops]
    pairs = zip(strides, strides[1:], loops[1:], strict=False)
    return all(a is not None and b is not None and a is b * v.extent for a, b, v in pairs)


def _plain(value: Value, dtype: torch.dtype) -> Value | None:
    """The value itself where it is one load, unmasked, of `dtype`."""
    return value if value.op == "load" and value.attr[2] == dtype and not value.args else None


def problem_of(template: Template, kernel: Kernel, graph: ir.Graph, device: Device) -> Problem | str:
    """The problem that a kernel is for a template, or why it is none. `kernel` has linear offsets."""
    main = [s for s in kernel.statements if s.kind == "contraction"]
    if len(main) != 1:
        return f"{len(main)} products in one kernel"
    pattern = template.implements
    values = (main[0].value, *main[0].factors)
    if len(values) != len(pattern.operands):
        return f"{len(values)} operands, where the template has {len(pattern.operands)}"
    if _contiguous_first(kernel, graph, values):
        values = values[::-1]
        turned = Statement(
            "contraction", main[0].outs, values[0], main[0].store, True, main[0].section, main[0].stored, "sum",
            factors=values[1:], operands=main[0].operands,
        )  # fmt: skip
        statements = tuple(turned if s is main[0] else s for s in kernel.statements)
        kernel = Kernel(
            kernel.name, kernel.outer, kernel.inner, kernel.sections, statements, kernel.rows, kernel.origins, kernel.target
        )
    loops: dict[str, list[Var]] = {axis: [] for axis in pattern.axes}
    used = [variables_of(v) for v in values]
    for v in (*kernel.outer, *kernel.inner):
        axis = _axis_of(v, used, v in kernel.outer, template)
        if axis is None:
            return f"loop {v.name} fits none of the axes {', '.join(pattern.axes)}"
        loops[axis].append(v)
    return Problem(template, kernel, graph, {a: tuple(found) for a, found in loops.items()}, device)


def _axis_of(v: Var, used: list[frozenset[Atom]], outer: bool, template: Template) -> str | None:
    """The axis of the loop: of the results for an outer one, in all operands that know it, and in as few others as can be.
    Along it those others repeat, as what is expanded does, and as everything does along a length of 1."""
    pattern = template.implements
    needed = {k for k, atoms in enumerate(used) if v in atoms}
    fitting: list[tuple[int, str]] = []
    for axis in pattern.axes:
        inside = {k for k, axes in enumerate(pattern.operands) if axis in axes}
        if inside >= needed and any(axis in axes for axes in pattern.results) == outer:
            fitting.append((len(inside), axis))
    return min(fitting, key=lambda one: one[0])[1] if fitting else None


def _contiguous_first(kernel: Kernel, graph: ir.Graph, values: tuple[Value, ...]) -> bool:
    """Whether the rows of a matrix product, not its columns, are contiguous in what is stored: then the product is turned, so
    that the last axis of the result is the contiguous one."""
    if len(values) != 2:
        return False
    left, right = (variables_of(v) for v in values)
    score = 0
    for s in kernel.statements:
        for out, kept in zip(s.outs, s.stored, strict=True):
            for v in kernel.outer if kept else ():
                if ix.stride_of(s.store[0], v) == 1 and (v in left) != (v in right):
                    score += graph.buffers[out].dtype.itemsize * (1 if v in left else -1)
    return score > 0


def variables_of(value: Value) -> frozenset[Atom]:
    """The loop variables on which a value depends."""
    found: set[Atom] = set()
    for v in vs.topological([value]):
        for e in vs.index_exprs(v):
            found |= {a for a in ix.free_atoms(e) if isinstance(a, Var)}
    return frozenset(found)


def buffers_of(statements: Iterable[Statement]) -> list[str]:
    """Every buffer that statements touch in memory, in order of first use."""
    statements = list(statements)
    made = {o for s in statements for o, kept in zip(s.outs, s.stored, strict=True) if not kept}
    found: dict[str, None] = {}
    for s in statements:
        for load in vs.loads(s.roots):
            found.setdefault(load.attr[0])
        for out, kept in zip(s.outs, s.stored, strict=True):
            if kept:
                found.setdefault(out)
    return [name for name in found if name not in made]
