"""Slots of C++ templates: operands of the matmul engine (`include/kgen/matmul.h`), and what becomes of its results.

An operand is memory with strides, or a function that computes a block of its values into a thread's memory. A result's tile
stays in a thread's cache, and its epilogue is a loop nest over it like that of any pointwise kernel, the tile one more input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Statement
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.epilogue_loops import Block, EpilogueLoops, Parameters, Rectangle, digits
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.codegen.tile_loops import tile_loops_of
from kgen.templates.problem import Input, Problem
from kgen.templates.render import clean
from kgen.templates.slots import OperandSlot, ResultSlot

# Names of what a function that computes a block of an operand has, and of the loops over a rectangle of results.
FILLING, WALKING = frozenset(("i0", "ni", "k0", "nk", "ld", "i", "k")), frozenset(("r", "j"))


@dataclass(slots=True)
class Slots:
    """Renders the slots of one problem under one configuration."""

    problem: Problem
    config: Config
    parameters: Parameters = field(default_factory=Parameters)
    epilogue_loops: EpilogueLoops = field(init=False)

    def __post_init__(self) -> None:
        self.epilogue_loops = EpilogueLoops(self.problem, self.config, self.parameters)

    def operand_slot(self, name: str, facts: dict[str, object], count: int, sums: frozenset[int]) -> OperandSlot:
        return OperandSlot(name, self, facts, count, 0, sums)

    def result_slot(self, name: str) -> ResultSlot:
        return ResultSlot(name, self)

    # ---- operands ---------------------------------------------------------------------------------------------------

    def tile(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """Declares `name`, the operand as the engine takes it. `indices` are those of the axes without a tile (batches)."""
        one = self.problem.members[number][operand]
        own, summed = self.problem.operand_axes(one.name)
        batch = [a for a in one.axes if a not in (own, summed)]
        if len(indices) != len(batch):
            raise ValueError(f"{self.problem.template.name}: {len(indices)} indices for the axes {', '.join(batch)}")
        self._told_apart(indices, FILLING)
        fixed = self._digits(batch, indices, one.loops)
        array = next((made for *key, made in self.problem.kernel.packed if key == [operand, number]), None)
        if array is not None:
            return [self._packed(one, name, fixed, array)]
        strides = [self.problem.stride(operand, axis, number) for axis in (own, summed)]
        if one.load is not None and None not in strides:
            return self._strided(one, name, fixed, [s for s in strides if s is not None])
        return self._filled(one, name, fixed, self._along(one, own))

    def _told_apart(self, indices: Sequence[str], names: frozenset[str]) -> None:
        """Inside of a generated loop the author's variable of the same name is another one."""
        hidden = next((index for index in indices if index in names), None)
        if hidden is not None:
            raise ValueError(
                f"{self.problem.template.name}: an index called {hidden} is hidden by a generated loop's: rename it"
            )

    def _packed(self, one: Input, name: str, fixed: Mapping[Atom, Expr], array: str) -> str:
        """The array of a `kgen.ir.plan.Packing`, in which batches follow each other."""
        own, summed = self.problem.operand_axes(one.name)
        kind, other = CPP_TYPES[one.dtype].storage, CPP_TYPES[self.problem.main_dtype].storage
        self.parameters.pointers.setdefault(array)
        batch = [v for a in one.axes if a not in (own, summed) for v in one.loops[a] if v in one.value.variables()]
        start = f"p_{clean(array)}"
        if batch:
            number = ix.substitute(ix.position_in(batch), dict(fixed), {})
            words = f"packed_words<unit_t<{other}, {kind}>>({self.size(own)}, {self.size(summed)})"
            start += f" + ({self.text(number)}) * {words}"
        return f"const Packed<{kind}> {name}{{{start}, {self.size(summed)}}};"

    def _strided(self, one: Input, name: str, fixed: Mapping[Atom, Expr], strides: list[Expr]) -> list[str]:
        assert one.load is not None
        buffer, (offset,), _ = one.load.attr
        zero: dict[Atom, Expr] = {v: ix.ZERO for axis in one.axes for v in one.loops[axis]}
        at = {**zero, **fixed}
        start = ix.substitute(offset, at, {}, lambda value: vs.substitute(value, at))
        kind = CPP_TYPES[one.dtype].storage
        self.parameters.pointers.setdefault(buffer)
        lines, text = self.epilogue_loops.place(start, f"{name}_start")
        where = f"p_{clean(buffer)}" + (f" + {text}" if start.terms else "")
        return [*lines, f"const Strided<{kind}> {name}{{{where}, {self.text(strides[0])}, {self.text(strides[1])}}};"]

    def _along(self, one: Input, own: str) -> str:
        """The axis along which most of the operand's memory is contiguous: neighbours in a vector. Arrays of one axis, such as
        weights, do not count: they are contiguous along it, and read once a row along the other one. An axis that fills less
        than half a vector is none for vectors."""
        summed = self.problem.operand_axes(one.name)[1]
        if self._is_short(own) != self._is_short(summed):
            return summed if self._is_short(own) else own
        weights = {own: 0, summed: 0}
        for load in vs.loads([one.value]):
            place = load.attr[1][0]
            for axis, other in ((own, summed), (summed, own)):
                loops = one.loops[axis]
                varies = not load.variables().isdisjoint(one.loops[other])
                if varies and loops and ix.stride_of(place, loops[-1]) == 1:
                    weights[axis] += load.attr[2].itemsize
        return own if weights[own] > weights[summed] else summed

    def _is_short(self, axis: str) -> bool:
        extent = self.problem.extent(axis).as_int()
        return extent is not None and 2 * extent < self.problem.device.lanes

    def _filled(self, one: Input, name: str, fixed: Mapping[Atom, Expr], along: str) -> list[str]:
        """A function that computes a block of the operand."""
        own, summed = self.problem.operand_axes(one.name)
        operand_axes = {
            own: Block(own, one.loops[own], "i0", "ni", "i"),
            summed: Block(summed, one.loops[summed], "k0", "nk", "k"),
        }
        slow, fast = (operand_axes[a] for a in ((own, summed) if along == summed else (summed, own)))
        buffer = ir.fresh(self.problem.graph, f"{name}_block")
        kind = CPP_TYPES[one.dtype].storage
        statement = Statement("pointwise", (buffer,), one.value, (ix.ZERO,), False, -1, (True,))
        body = self.epilogue_loops.block(statement, Rectangle(slow, fast, (buffer,), "ld", fixed, {buffer: one.dtype}))
        head = f"const auto {name} = filled<{kind}, Along::{'k' if along == summed else 'i'}>("
        arguments = f"int64_t i0, int64_t ni, int64_t k0, int64_t nk, {kind}* p_{clean(buffer)}, int64_t ld"
        return [f"{head}[&]({arguments}) {{", *(f"  {line}" for line in body), "});"]

    def store_sum(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """What becomes of the sums `name` of an operand. `indices` are those of the batch axes, then the first index of the
        operand's own axis, and how many sums there are."""
        one = self.problem.members[number][operand]
        own, summed = self.problem.operand_axes(one.name)
        batch = [a for a in one.axes if a not in (own, summed)]
        fixed = self._digits(batch, indices[: len(batch)], self.problem.loops)
        first, count = indices[len(batch) :]
        found = self.problem.operand_reduction(operand, number)
        return self._totals(found.statements, name, Block(own, self.problem.loops[own], first, count, "j"), fixed)

    def _totals(self, statements: Sequence[Statement], name: str, side: Block, fixed: Mapping[Atom, Expr]) -> list[str]:
        """What becomes of the numbers `name`, one for each index of a side."""
        total = ir.fresh(self.problem.graph, f"{statements[0].outs[0]}_total")
        self.parameters.made_names.add(f"p_{clean(total)}")
        return [f"const auto* const p_{clean(total)} = {name};", *self.epilogue_loops.totals(statements, total, side, fixed)]

    # ---- results ----------------------------------------------------------------------------------------------------

    def store(self, result: str, name: str, indices: Sequence[str]) -> list[str]:
        """The epilogue of the rectangle `name`; of a family, of the rectangles `name`0, `name`1, and so on. `indices` are those
        of the batch axes, then the first row, the first column, the numbers of rows and of columns, and the tiles' leading
        dimension."""
        axes = self.problem.template.results[result].axes
        self._told_apart(indices, WALKING)
        batch, (rows, columns) = axes[:-2], axes[-2:]
        scalars, (row, column, count, width, ld) = indices[: len(batch)], indices[len(batch) :]
        loops = self.problem.loops
        fixed = self._digits(batch, scalars, loops)
        slow, fast = Block(rows, loops[rows], row, count, "r"), Block(columns, loops[columns], column, width, "j")
        sums = tuple(out for s in self.problem.mains for out in s.outs)
        many = self.problem.template.results[result].many
        names = [f"{name}{k}" for k in range(len(sums))] if many else [name]
        aliases = [f"const auto* const p_{clean(out)} = {one};" for out, one in zip(sums, names, strict=True)]
        tile_loops = tile_loops_of(self.problem, self.config, columns)
        return [*aliases, *self.epilogue_loops.epilogue(tile_loops, Rectangle(slow, fast, sums, ld, fixed))]

    def store_second(self, result: str, name: str, indices: Sequence[str]) -> list[str]:
        """What becomes of the second results `name` of a step. `indices` are those of the batch axes, then the first row, and
        how many rows there are."""
        *batch, rows = self.problem.template.results[result].axes
        fixed = self._digits(batch, indices[: len(batch)], self.problem.loops)
        first, count = indices[len(batch) :]
        side = Block(rows, self.problem.loops[rows], first, count, "j")
        body = self._totals(self.problem.seconds(result), name, side, fixed)
        return ["{", *(f"  {line}" for line in body), "}"]

    # ---- between the steps of a program ------------------------------------------------------------------------------

    def apply(self, step: str, name: str, indices: Sequence[str], masked: bool = True) -> list[str]:
        """Makes of the rectangle `name` of a step's sums what the next step sees of them. `indices` are those of a store."""
        middle, loops = self.problem.middles[step], self.problem.loops
        self._told_apart(indices, WALKING)
        batch, (rows, columns) = middle.axes[:-2], middle.axes[-2:]
        scalars, (row, column, count, width, ld) = indices[: len(batch)], indices[len(batch) :]
        fixed = self._digits(batch, scalars, loops)
        slow, fast = Block(rows, loops[rows], row, count, "r"), Block(columns, loops[columns], column, width, "j")
        made, kind = ir.fresh(self.problem.graph, f"{step}_made"), self.problem.accumulator
        value = vs.replace_steps(middle.value if masked else middle.unmasked, lambda _: vs.load(made, (ix.ZERO,), kind))
        statement = Statement("pointwise", (made,), vs.cast(value, kind), (ix.ZERO,), False, -1, (True,))
        body = self.epilogue_loops.block(statement, Rectangle(slow, fast, (made,), ld, fixed, {made: kind}))
        self.parameters.made_names.add(f"p_{clean(made)}")
        return ["{", f"  auto* const p_{clean(made)} = {name};", *(f"  {line}" for line in body), "}"]

    def edges(self, step: str, stem: str, row: str, rows: int) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in C++ tiles of {step} are between `begin` and `end`")

    def runs(self, step: str, rows: int) -> tuple[object, ...]:
        return ()

    @property
    def accumulator(self) -> str:
        """The text of the type of sums."""
        return CPP_TYPES[self.problem.accumulator].storage

    def _digits(self, axes: Sequence[str], indices: Sequence[str], loops: Mapping[str, tuple[Var, ...]]) -> dict[Atom, Expr]:
        """Loops of axes of which the function has one index, a C++ variable."""
        found: dict[Atom, Expr] = {}
        self._note_variables(indices)
        for axis, index in zip(axes, indices, strict=True):
            found |= digits(loops[axis], ix.size(index).expr())
        return found

    def size(self, axis: str) -> str:
        """The text of an axis' length."""
        return self.text(self.problem.extent(axis))

    def expression(self, expr: Expr, names: Sequence[str]) -> str:
        """The text of an expression of sizes, and of these C++ variables."""
        self._told_apart(names, WALKING)
        self._note_variables(names)
        return self.text(expr)

    def _note_variables(self, names: Sequence[str]) -> None:
        """These names in indices are no parameters of the kernel."""
        self.epilogue_loops.variables.update(names)

    def text(self, expr: Expr) -> str:
        """An expression of sizes, and of the author's variables."""
        return self.epilogue_loops.text(expr)
