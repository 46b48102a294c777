"""Slots of C++ templates: operands of the matmul engine (`include/kgen/matmul.h`), and what becomes of its results.

An operand is memory with strides, or a function that computes a block of its values into a thread's memory. A result's tile
stays in a thread's cache, and its epilogue is a loop nest over it like that of any pointwise kernel, the tile one more input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Statement
from kgen.ir.spans import ANY, Known
from kgen.ir.values import Value
from kgen.templates.contract import Config
from kgen.templates.cpp.codegen.elements import Elements, Point
from kgen.templates.cpp.codegen.epilogue_loops import Block, EpilogueLoops, Parameters, Rectangle, digits
from kgen.templates.cpp.codegen.table import CPP_TYPES
from kgen.templates.cpp.codegen.tile_loops import tile_loops_of
from kgen.templates.problem import Input, Problem, bare_number
from kgen.templates.render import clean
from kgen.templates.slots import Index, Lazy, OperandSlot, ResultSlot, RunsOf, StepSlot

# Names of what a function that computes a block of an operand has, and of the loops over a rectangle of results.
FILLING, WALKING = (
    frozenset(("i0", "ni", "k0", "nk", "ld", "i", "k", "i_run", "i_first", "k_run", "k_first")),
    frozenset(("r", "j")),
)

# What a rectangle is told by besides indices of batches: where it begins, how long its sides are, and how far apart rows are.
RECTANGLE = 5
# A run is long of which so many fill a vector.
LONG_RUN = 4
# Numbers of a mask's guards that are worked out together.
GUARDS = 256


@dataclass(frozen=True, slots=True)
class Run:
    """Indices of an axis among which the loops `last` alone count on, `count` of them from the C++ variable `first` on.
    `length` is how many there may be, 0 where there are no other loops."""

    outer: tuple[Var, ...]
    last: tuple[Var, ...]
    first: str
    count: str
    name: str

    @classmethod
    def of(cls, loops: tuple[Var, ...], first: str, count: str, name: str, in_runs: bool) -> Run:
        """The runs of an axis; all of it is one run where it is not computed `in_runs`."""
        return cls(loops[:-1], loops[-1:], first, count, name) if in_runs else cls((), loops, first, count, name)

    @property
    def length(self) -> Expr:
        return ix.product(v.extent for v in self.last) if self.outer else ix.ZERO

    @property
    def names(self) -> tuple[str, ...]:
        return (f"{self.name}_run", f"{self.name}_first") if self.outer else ()

    @property
    def digits(self) -> dict[Atom, Expr]:
        """The other loops, in the run that begins with the first index."""
        return digits(self.outer, ix.size(self.names[0]).expr()) if self.outer else {}

    def block(self, axis: str) -> Block:
        return Block(axis, self.last, self.names[1] if self.outer else self.first, self.count, self.name)

    def lines(self, text: Callable[[Expr], str]) -> list[str]:
        """Statements that work out the run, and where in it the first index is."""
        if not self.outer:
            return []
        length = text(self.length)
        return [
            f"const int64_t {self.names[0]} = {self.first} / ({length});",
            f"const int64_t {self.names[1]} = {self.first} - {self.names[0]} * ({length});",
        ]


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

    def step_slot(self, name: str) -> StepSlot:
        return StepSlot(name, self)

    def workspace_slot(self, memory: Lazy) -> Lazy:
        return memory

    # ---- operands ---------------------------------------------------------------------------------------------------

    def tile(self, operand: str, number: int, name: str, indices: Sequence[str], phase: str = "") -> list[str]:
        """Declares `name`, the operand as the engine takes it. `indices` are those of the axes without a tile (batches)."""
        if self.problem.template.operands[operand].access == "coordinates":
            return self._over_coordinates(operand, name, indices, phase)
        one = self.problem.members[number][operand]
        constant = bare_number(one.value)
        if constant.op == "const" and not any(map(self.problem.template.block, one.axes)):
            return [f"constexpr double {name} = {float(constant.attr)!r};"]
        is_number = len(one.axes) == 1 and self.problem.template.block(one.axes[0]) is None
        own, summed = ("", "") if is_number else self._block_axes(one)
        batch = [a for a in one.axes if a not in (own, summed)]
        if len(indices) != len(batch):
            axes = ", ".join(batch) or "none"
            raise ValueError(
                f"{self.problem.template.name}: {len(indices)} indices for the axes {axes}: in C++ a tile takes none of "
                "the two that it is cut along"
            )
        self._told_apart(indices, FILLING)
        fixed = self._digits(batch, indices, one.loops)
        if is_number:
            if one.dtype.is_floating_point:
                raise ValueError(f"{self.problem.template.name}: {operand} is one number a tile, which in C++ is an integer")
            return self.epilogue_loops.integer(vs.substitute(one.value, fixed), name)
        array = next((made for *key, made in self.problem.kernel.packed if key == [operand, number]), None)
        if array is not None:
            return [self._packed(one, name, fixed, array)]
        strides = [self.problem.stride(operand, axis, number) for axis in (own, summed)]
        if one.load is not None and None not in strides:
            return self._strided(one, name, fixed, [s for s in strides if s is not None])
        return self._filled(one, name, fixed, self._along(one, own))

    def _block_axes(self, one: Input) -> tuple[str, str]:
        """The axes of a block of the operand. Raises ValueError where it has no two that a matmul goes over."""
        try:
            return self.problem.operand_axes(one.name)
        except StopIteration:
            raise ValueError(
                f"{self.problem.template.name}: {one.name} is over {', '.join(one.axes)}, of which the matmul engine's blocks "
                f"need one that the result has and one that it lacks: read it by {one.name}.element(...)"
            ) from None

    def element(self, operand: str, number: int, name: str, indices: Sequence[str], lanes: str) -> list[str]:
        """Statements that make `name` the element at these indices, with its prologue, or a vector of elements."""
        one = self.problem.members[number][operand]
        return Elements(self.epilogue_loops).load(one, name, Point(one.axes, tuple(indices), lanes))

    def entry(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """Statements that make `name` the entry at which an operand is 1, for one index of each other axis."""
        one = self.problem.members[number][operand]
        if one.entry is None:
            raise ValueError(f"{self.problem.template.name}: {operand} is not 1 at one entry of its last axis: refuse it")
        fixed = self._digits(one.axes[:-1], indices, one.loops)
        return self.epilogue_loops.integer(vs.substitute(one.entry, fixed), name)

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
        """A function that computes a block of the operand: of a window within bounds, or one that lanes would jump through, run
        by run, so that addresses and bounds are worked out once a run, and lanes of a vector are along the last loop of an
        axis."""
        own, summed = self.problem.operand_axes(one.name)
        blocks = ((own, ("i0", "ni", "i")), (summed, ("k0", "nk", "k")))
        guarded = any(load.args for load in vs.loads([one.value]))
        in_runs = (guarded or self._has_long_runs(one, along)) and self.problem.reads_window(one)
        runs = {axis: Run.of(one.loops[axis], *names, in_runs=in_runs) for axis, names in blocks}
        operand_axes = {axis: run.block(axis) for axis, run in runs.items()}
        fixed = {**fixed, **runs[own].digits, **runs[summed].digits}
        self._note_variables([name for run in runs.values() for name in run.names])
        slow, fast = (operand_axes[a] for a in ((own, summed) if along == summed else (summed, own)))
        buffer = ir.fresh(self.problem.graph, f"{name}_block")
        kind = CPP_TYPES[one.dtype].storage
        statement = Statement("pointwise", (buffer,), one.value, (ix.ZERO,), False, -1, (True,))
        body = self.epilogue_loops.block(statement, Rectangle(slow, fast, (buffer,), "ld", fixed, {buffer: one.dtype}))
        body = [*(line for run in runs.values() for line in run.lines(self.text)), *body]
        filled = f"filled<{kind}, Along::{'k' if along == summed else 'i'}>"
        lengths = [self.text(run.length) for run in runs.values()]
        ends = f", {lengths[0]}, {lengths[1]}" if any(run.outer for run in runs.values()) else ""
        arguments = f"int64_t i0, int64_t ni, int64_t k0, int64_t nk, {kind}* p_{clean(buffer)}, int64_t ld"
        return [f"const auto {name} = {filled}([&]({arguments}) {{", *(f"  {line}" for line in body), f"}}{ends});"]

    def _has_long_runs(self, one: Input, axis: str) -> bool:
        """Whether vectors along an axis of several loops would divide for each lane, though the last loop fills much of one."""
        if len(one.loops[axis]) < 2:
            return False
        count = one.loops[axis][-1].extent.as_int()
        return count is not None and LONG_RUN * count >= self.problem.device.lanes

    def _over_coordinates(self, operand: str, name: str, indices: Sequence[str], phase: str) -> list[str]:
        """A function that computes a rectangle of the operand over coordinates of its windows, in the type of sums: each once
        for all taps. Of `phase`, every so many-th coordinate along the rows."""
        one = self.problem.over_coordinates(operand)
        assert isinstance(one, Input)
        slow_axis, fast_axis = (axis for axis in one.axes if self.problem.template.block(axis) is not None)
        rest = [axis for axis in one.axes if axis not in (slow_axis, fast_axis)]
        if len(indices) != len(rest):
            raise ValueError(f"{self.problem.template.name}: {len(indices)} indices for the axes {', '.join(rest)}")
        self._told_apart((*indices, phase), FILLING)
        if phase:
            one = self._every(one, fast_axis, phase)
        slow, fast = (
            Block(axis, one.loops[axis], *names, ix.product(v.extent for v in one.loops[axis]))
            for axis, names in ((slow_axis, ("i0", "ni", "i")), (fast_axis, ("k0", "nk", "k")))
        )
        lines = self._computed(one, name, Rectangle(slow, fast, (), "ld", self._digits(rest, indices, one.loops)))
        return [
            f"const auto {name} = [&](int64_t i0, int64_t ni, int64_t k0, int64_t nk, {lines[0]}, int64_t ld) {{",
            *lines[1:],
            "};",
        ]

    def _every(self, one: Input, axis: str, phase: str) -> Input:
        """The operand at every so many-th coordinate of an axis, as its positions step, from the C++ variable on."""
        self._note_variables([phase])
        grid = self.problem.grid(axis)
        if grid is None or grid.step == 1:
            return one
        coordinate = one.loops[axis][0]
        own = ix.var(f"{coordinate.name}_step", ix.ceildiv(coordinate.extent, grid.step))
        value = vs.substitute(one.value, {coordinate: ix.size(phase).expr() + own.expr() * grid.step})
        return replace(one, value=value, loops={**one.loops, axis: (own,)})

    def _computed(self, one: Input, name: str, over: Rectangle) -> list[str]:
        """The parameter to which a rectangle of an operand's values is written, in the type of sums, and what writes it."""
        buffer, kind = ir.fresh(self.problem.graph, f"{name}_block"), self.problem.accumulator
        statement = Statement("pointwise", (buffer,), vs.cast(one.value, kind), (ix.ZERO,), False, -1, (True,))
        body = self.epilogue_loops.block(statement, replace(over, buffers=(buffer,), local={buffer: kind}))
        return [f"{self.accumulator}* p_{clean(buffer)}", *(f"  {line}" for line in body)]

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

    def store(self, result: str, text: str, indices: Sequence[str]) -> list[str]:
        """The epilogue of the rectangle `text`; of a family, of the rectangles `text`0, `text`1, and so on. `indices` are those
        of the batch axes, then the first row, the first column, the numbers of rows and of columns, and the tiles' leading
        dimension."""
        axes = self.problem.template.results[result].axes
        self._told_apart(indices, WALKING)
        if len(axes) < 2:
            raise ValueError(
                f"{self.problem.template.name}: {result} is over {axes[0]} alone, and `store` takes rectangles of two axes: "
                f"store it by {result}.store_element(...)"
            )
        batch, (rows, columns) = axes[:-2], axes[-2:]
        if len(indices) != len(batch) + RECTANGLE:
            raise ValueError(
                f"{self.problem.template.name}: {len(indices)} indices, where {result}.store takes those of "
                f"{', '.join(batch) or 'no batch'}, first row, first column, how many of each, and a leading dimension"
            )
        scalars, (row, column, count, width, ld) = indices[: len(batch)], indices[len(batch) :]
        loops = self.problem.loops
        fixed = self._digits(batch, scalars, loops)
        slow, fast = Block(rows, loops[rows], row, count, "r"), Block(columns, loops[columns], column, width, "j")
        sums = tuple(out for s in self.problem.mains for out in s.outs)
        many = self.problem.template.results[result].many
        names = [f"{text}{k}" for k in range(len(sums))] if many else text.split()
        if len(names) != len(sums):
            raise ValueError(f"{self.problem.template.name}: {len(names)} names, where one call stores {len(sums)} results")
        aliases = [f"const auto* const p_{clean(out)} = {one};" for out, one in zip(sums, names, strict=True)]
        tile_loops = tile_loops_of(self.problem, self.config, columns)
        return [*aliases, *self.epilogue_loops.epilogue(tile_loops, Rectangle(slow, fast, sums, ld, fixed))]

    def store_element(self, result: str, text: str, indices: Sequence[str], lanes: str) -> list[str]:
        """The epilogue of one element, or of a vector of elements. Of several results, and of a family, `text` are the names of
        all, "first second"."""
        axes = self.problem.template.results[result].axes
        return Elements(self.epilogue_loops).store(text.split(), Point(axes, tuple(indices), lanes))

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

    def apply(self, step: str, text: str, indices: Sequence[str], masked: bool = True, filled: bool = False) -> list[str]:
        """Makes of the rectangle `text` of a step's sums what the next step sees of them. `indices` are those of a store.
        Rectangles of several steps, ``"left right"``, are made into the first one."""
        middle, loops = self.problem.middles[step], self.problem.loops
        self._told_apart(indices, WALKING)
        batch, (rows, columns) = middle.axes[:-2], middle.axes[-2:]
        scalars, (row, column, count, width, ld) = indices[: len(batch)], indices[len(batch) :]
        fixed = self._digits(batch, scalars, loops)
        slow, fast = Block(rows, loops[rows], row, count, "r"), Block(columns, loops[columns], column, width, "j")
        kind, tiles = self.problem.accumulator, dict(zip(middle.steps, text.split(), strict=True))
        made = {one: ir.fresh(self.problem.graph, f"{one}_made_for_{step}") for one in tiles}
        first, *_ = made.values()
        value = middle.function(masked=masked, filled=filled)
        value = vs.replace_steps(value, lambda leaf: vs.load(made[leaf.attr], (ix.ZERO,), kind))
        statement = Statement("pointwise", (first,), vs.cast(value, kind), (ix.ZERO,), False, -1, (True,))
        rectangle = Rectangle(slow, fast, tuple(made.values()), ld, fixed, dict.fromkeys(made.values(), kind))
        body = self.epilogue_loops.block(statement, rectangle)
        self.parameters.made_names.update(f"p_{clean(one)}" for one in made.values())
        named = [f"  auto* const p_{clean(made[one])} = {tile};" for one, tile in tiles.items()]
        return ["{", *named, *(f"  {line}" for line in body), "}"]

    def bounds(
        self, step: str, names: tuple[str, str], ends: tuple[Expr, Expr], known: Known, variables: Sequence[str],
        batch: Sequence[str],
    ) -> list[str]:  # fmt: skip
        """Statements that make the first names the ends of a span, for indices of a batch; before, those that load integers."""
        fixed = self._digits(self.problem.middles[step].axes[:-2], batch, self.problem.loops)
        self._note_variables(variables)
        lines: list[str] = []
        for load, symbol in known.loaded.items():
            name = f"{names[0]}_{symbol.name}"
            lines += self.epilogue_loops.integer(vs.substitute(load, fixed), name)
            fixed[symbol] = ix.size(name, -ANY, ANY).expr()
            self._note_variables([name])
        texts = (self.text(ix.substitute(end, fixed)) for end in ends)
        return [*lines, *(f"const int64_t {name} = {text};" for name, text in zip(names, texts, strict=True))]

    def holds(self, step: str, name: str, indices: Sequence[str]) -> list[str]:
        """Statements that make `name` whether all guards of a mask are 0, for indices of the batch, the first row and how many
        rows there are: those of these rows, or of all columns."""
        middle = self.problem.middles[step]
        *batch, row, rows = indices
        fixed = self._digits(middle.axes[:-2], batch, self.problem.loops)
        axis, here, count = middle.guard_axis, f"{name}_here", f"{name}_count"
        first, last = (row, f"{row} + {rows}") if axis == middle.axes[-2] else ("0", self.size(axis))
        side = Block(axis, self.problem.loops[axis], here, count, "j")
        body = [
            line for k, guard in enumerate(middle.guards) for line in self._guard(guard, f"{name}_guard{k}", side, fixed, name)
        ]
        self._note_variables([here, count])
        return [
            f"bool {name} = true;",
            f"for (int64_t {here} = {first}; {name} && {here} < {last}; {here} += {GUARDS}) {{",
            f"  const int64_t {count} = smaller<int64_t>({GUARDS}, {last} - {here});",
            *(f"  {line}" for line in body),
            "}",
        ]  # fmt: skip

    def _guard(self, guard: Value, stem: str, side: Block, fixed: Mapping[Atom, Expr], name: str) -> list[str]:
        """Statements that make `name` false unless a guard is 0 at all indices of a side."""
        made = ir.fresh(self.problem.graph, stem)
        array = f"p_{clean(made)}"
        self.parameters.made_names.add(array)
        return [
            "{",
            f"  alignas(64) {self.accumulator} {array}[{GUARDS}];",
            *(f"  {line}" for line in self.epilogue_loops.numbers(guard, made, side, fixed)),
            f"  for (int64_t k = 0; k < {side.count}; ++k) {name} = {name} && {array}[k] == 0;",
            "}",
        ]

    def number(self, number: float) -> str:
        return repr(number)

    def fixed(self, step: str, stem: str, indices: Sequence[Index]) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in C++ {step} has no tiles in front of a loop")

    def edges(self, tiles: RunsOf, stem: str, row: str) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in C++ tiles of {tiles.step} are between `begin` and `end`")

    def runs(self, step: str, rows: int, by_batch: bool, filled: bool) -> tuple[object, ...]:
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
