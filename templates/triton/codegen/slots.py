"""Slots of Triton templates: operand tiles with their prologues, result stores with their epilogues."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import PART, Statement
from kgen.ir.spans import ANY
from kgen.ir.values import Value
from kgen.rendered.tensor_map import TensorMap
from kgen.templates.contract import Config, Result
from kgen.templates.middle import Middle
from kgen.templates.problem import Input, Problem
from kgen.templates.render import clean
from kgen.templates.slots import Index, Lazy, OperandSlot, Pair, ResultSlot, RunsOf, Segment, StepSlot
from kgen.templates.triton.codegen.halves import HALVES, of_halves
from kgen.templates.triton.codegen.packed import adjacent_count
from kgen.templates.triton.codegen.powers import in_powers_of_two
from kgen.templates.triton.codegen.runs import ROW, Run, Runs, runs_of
from kgen.templates.triton.codegen.table import TRITON_TYPES, literal
from kgen.templates.triton.codegen.tile import Dimension, Folded, Parameters, TileEmitter, uniform_loops
from kgen.templates.triton.codegen.tma_layout import TmaLayout, epilogue_tma_layout, tma_layout
from kgen.templates.triton.codegen.tma_moves import Move, Window, move, name_of

# Numbers of a mask's guards that a program looks at together.
GUARDS = 1024


@dataclass(frozen=True, slots=True)
class Engine:
    """What of an epilogue goes by TMA, for one tile of a result."""

    slots: Slots
    result: str
    tile: Window

    def load(self, buffer: str, offset: Expr, dtype: torch.dtype) -> str | None:
        found = self._move(buffer, offset, dtype, written=False)
        return None if found is None else found.load()

    def store(self, buffer: str, offset: Expr, dtype: torch.dtype) -> Callable[[str], list[str]] | None:
        found = self._move(buffer, offset, dtype, written=True)
        return None if found is None else found.store

    def _move(self, buffer: str, offset: Expr, dtype: torch.dtype, written: bool) -> Move | None:
        problem, config = self.slots.problem, self.slots.config
        found = epilogue_tma_layout(problem, self.result, buffer, offset, dtype, written)
        box = None if isinstance(found, str) else found.map({axis: problem.side(axis, config) for axis in self.tile.axes})
        return None if box is None or isinstance(found, str) else self.slots.move(found, box, self.tile)


@dataclass(frozen=True, slots=True)
class Stored:
    """A call of a result's `store`: the tile's name, its axes with their indices, and the lengths of sides that are parts of a
    block. The statement `met` stands behind the reduction `behind`, or at the end."""

    result: Result
    name: str
    axes: tuple[str, ...]
    indices: Sequence[Index]
    lengths: Mapping[str, str]
    met: str = ""
    behind: Statement | None = None


@dataclass(frozen=True, slots=True)
class Within:
    """Along the axes `inside` all of a tile is within the axis; along the first of `end` it ends at an index, the second. Along
    the axes of `starts` it begins there, at a multiple of its length; along those that are `counted` at such a one, too."""

    inside: str = ""
    end: tuple[str, str] = ("", "")
    starts: Mapping[str, str] = field(default_factory=dict)
    counted: Container[str] = ()


EVERYWHERE = Within()


@dataclass(frozen=True, slots=True)
class Shown:
    """What the next step sees of a step: without its last factor where not `scaled`, without its mask where not `masked`, also
    of a finite number where the step is `filled`, and without roundings to the type of the operand `into`, if there is one.
    Tiles whose names begin with `fixed` were made in front of a loop."""

    scaled: bool = True
    masked: bool = True
    into: str = ""
    filled: bool = False
    fixed: str = ""


@dataclass(slots=True)
class Slots:
    """Renders the slots of one problem under one configuration."""

    problem: Problem
    config: Config
    exact: bool = False
    parameters: Parameters = field(default_factory=Parameters)
    guards: ClassVar[int] = GUARDS

    def operand_slot(self, name: str, facts: dict[str, object], count: int, sums: frozenset[int]) -> OperandSlot:
        return OperandSlot(name, self, facts, count, 0, sums)

    def result_slot(self, name: str) -> ResultSlot:
        return ResultSlot(name, self)

    def step_slot(self, name: str) -> StepSlot:
        return StepSlot(name, self)

    def workspace_slot(self, memory: Lazy) -> Lazy:
        return memory

    def emitter(
        self,
        axes: Sequence[str],
        indices: Sequence[Index],
        loops: Mapping[str, tuple[Var, ...]],
        lengths: Mapping[str, str],
        folded: Folded | None = None,
        within: Within = EVERYWHERE,
    ) -> TileEmitter:
        """An emitter for the tile that the author's indices span, or for what is left of it when an axis is folded; `lengths`
        are those of sides that are not whole blocks."""
        template = self.problem.template
        if len(indices) != len(axes):
            raise ValueError(f"{template.name}: {len(indices)} indices for the axes {', '.join(axes)}")
        dimensions: list[Dimension] = []
        scalars: list[Dimension] = []
        for axis, index in zip(axes, indices, strict=True):
            knob = template.block(axis)
            if knob is None:
                pair = index if isinstance(index, Pair) else None
                scalars.append(Dimension(axis, loops[axis], "1", str(index), False, pair=pair))
                continue
            ragged, length = self._side(axis, knob, index)
            block = lengths.get(axis, length)
            if folded is not None and axis == folded.axis:
                if folded.runs == 1:
                    scalars.append(Dimension(axis, loops[axis], "1", str(index), False))
                    continue
                block = str(folded.runs)
            cut = within.end[1] if axis == within.end[0] else ""
            ragged = bool(cut) or (ragged and axis not in within.inside)
            start = within.starts.get(axis, "")
            uniform = uniform_loops(loops[axis], self.config.get(knob)) if start else ()
            points = self.config.get(knob) if block == knob else 0
            counted = points if start or axis in within.counted else 0
            dimensions.append(
                Dimension(axis, loops[axis], block, str(index), ragged, 1, cut, None, start, uniform, points == 1, counted)
            )
        return TileEmitter(self.problem, self.parameters, dimensions, scalars, self.exact)

    def _side(self, axis: str, block: str, index: Index) -> tuple[bool, str]:
        """Whether a tile at such indices may lie past the end of an axis, and the text of its length."""
        extent = self.problem.extent(axis).as_int()
        if isinstance(index, Segment):
            return extent is None or index.begin + index.length > extent, str(index.length)
        return extent is None or extent % self.config.get(block) != 0, block

    def check_axes(self, given: Iterable[str]) -> None:
        """Raises ValueError for what an author says of no axis: it would be overlooked."""
        axes = self.problem.template.axes
        unknown = [name for name in given if name not in axes]
        if unknown:
            raise ValueError(f"{unknown[0]} is neither an axis ({', '.join(axes)}) nor anything else that a slot takes")

    def tile(
        self, operand: str, number: int, name: str, indices: Sequence[Index], own: bool = False, **starts: Any
    ) -> list[str]:
        """Statements that make `name` the operand's tile, zero beyond the ends of its axes. The author gives vectors of
        indices, or, of an operand that is to come by TMA, where the tile begins. With variables of its `own`
        it may stand in front of a loop that has others of the same names. Where indices are a block's, in order, `starts` may
        say for an axis where it begins: what neighbours along it are made of is then read once (`adjacent_count`), and loops
        that have one index in the tile are numbers (`uniform_loops`). Of a tile by TMA, `aligned` are the axes along which it
        begins at a multiple of its length, as `starts` are. Along the axes `inside` the author promises that all indices are
        within. With ``end=("k", "last")`` the tile is zero from that index on."""
        inside, end, aligned = starts.pop("inside", ""), starts.pop("end", ("", "")), starts.pop("aligned", "")
        self.check_axes([*starts, *aligned])
        aligned = aligned or starts
        one = self.problem.members[number][operand]
        if self.problem.template.operands[operand].access == "tma":
            found = tma_layout(self.problem, one)
            box = None if isinstance(found, str) else found.map(self._blocks(one))
            if box is not None and not isinstance(found, str):
                window = Window(
                    one.axes, one.loops, dict(zip(one.axes, map(str, indices), strict=True)), self._tile_lengths(one.axes, {})
                )
                return [f"{name} = {self.move(found, box, window).load()}"]
            starts = dict(zip(one.axes, map(str, indices), strict=True))
            indices = [self._indices(axis, start) for axis, start in starts.items()]
        known = [a for a in one.axes if a in starts and self.problem.template.block(a)]
        axis = next((a for a in known if one.load is None and self._has_runs(one, a)), None)
        ordered = {a: start for a, start in starts.items() if a in aligned and a != axis}
        emitter = self.emitter(one.axes, indices, one.loops, {}, within=Within(inside, end, ordered))
        emitter.suffix = f"_{name}" if own else ""
        load = self.problem.copied(one)
        if load is not None:
            text = raw_load(emitter, load, one.dtype)
        elif axis is not None:
            text = self._joined(emitter, one, axis, starts[axis])
        else:
            text = _computed(emitter, one.value, one.dtype)
        if self.problem.rounds and one.dtype is torch.float32:
            text = f"lib.rounded_to_tf32({text})"
        emitter.outer.lines.append(f"{name} = {text}")
        return emitter.finish()

    def entry(self, operand: str, number: int, name: str, indices: Sequence[Index], inside: str = "") -> list[str]:
        """Statements that make `name` the entries at which an operand is 1, -1 past the ends of other axes."""
        one = self.problem.members[number][operand]
        if one.entry is None:
            raise ValueError(f"{self.problem.template.name}: {operand} is not 1 at one entry of its last axis: refuse it")
        emitter = self.emitter(one.axes[:-1], indices, one.loops, {}, within=Within(inside))
        emitter.suffix, emitter.behind = f"_{name}", True
        text = emitter._tile(one.entry)
        for axis in emitter.masked():
            text = f"tl.where({emitter.inside(axis)}, {text}, -1)"
        emitter.outer.lines.append(f"{name} = {text}")
        return emitter.finish()

    def _has_runs(self, one: Input, axis: str) -> bool:
        """Whether a tile has whole runs of neighbours that come from the same elements: one column has a part of one."""
        count = adjacent_count(one.value, one.loops[axis])
        return count > 0 and self._blocks(one)[axis] % count == 0

    def _joined(self, emitter: TileEmitter, one: Input, axis: str, start: str) -> str:
        """A tile whose neighbours along `axis` come from the same elements: each of them is computed on a tile of those."""
        at = next(k for k, d in enumerate(emitter.dimensions) if d.axis == axis)
        whole = emitter.dimensions[at]
        last = whole.loops[-1]
        count = adjacent_count(one.value, whole.loops)
        block = f"{whole.block} // {count}"
        fewer = replace(
            whole,
            loops=whole.loops[:-1],
            block=block,
            index=f"({start} // {count} + tl.arange(0, {block}))",
            adjacent=count,
        )
        shape = emitter._shape(emitter.level)
        emitter.dimensions = (*emitter.dimensions[:at], fewer, *emitter.dimensions[at + 1 :])
        each = [vs.substitute(one.value, {last: ix.constant(n)}) for n in range(count)]
        names = [emitter._bind("neighbour", _computed(emitter, value, one.dtype)) for value in each]
        rank = len(emitter.dimensions)
        joints = range(rank, rank + count.bit_length() - 1)
        order = [*range(at + 1), *joints, *range(at + 1, rank)]
        return f"tl.reshape(tl.permute({_side_by_side(names)}, {tuple(order)}), {shape})"

    def _blocks(self, one: Input) -> dict[str, int]:
        """The lengths of an operand's tiles."""
        return {axis: self.config.get(block) for axis in one.axes if (block := self.problem.template.block(axis))}

    def store_sum(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """Stores the sums `name` of an operand, with what is made of them. Indices are those that its tiles are asked for with,
        without those of the axes that are summed over."""
        axes, lines = self._summed_axes(operand), list[str]()
        if self.problem.template.operands[operand].access == "tma":
            lines, indices = self._spread(axes, indices, {}, _counted)
        return [*lines, *self._sum(operand, number, name, axes, indices)]

    def _summed_axes(self, operand: str) -> tuple[str, ...]:
        """The axes of an operand's sums."""
        template = self.problem.template
        return tuple(axis for axis in template.operands[operand].axes if axis in template.implements.results[0])

    def _sum(self, operand: str, number: int, name: str, axes: Sequence[str], indices: Sequence[str]) -> list[str]:
        emitter = self.emitter(axes, indices, self.problem.loops, {})
        emitter.suffix = "_of_sums"
        for s in self.problem.operand_reduction(operand, number).statements:
            if s.kind == "reduction":
                emitter.sum_up(s, name)
            else:
                emitter._pointwise(s)
        return emitter.finish()

    def store_second(self, result: str, name: str, indices: Sequence[str]) -> list[str]:
        """Stores a second result of a step, with what is made of it."""
        template, lines = self.problem.template, list[str]()
        for k, s in enumerate(self.problem.seconds(result)):
            emitter = self.emitter(template.results[result].axes, indices, self.problem.loops, {})
            emitter.suffix = f"_{result}{k or ''}"
            [step] = (v.attr for v in vs.topological([s.value]) if v.op == "step")
            emitter.locals[step] = (name, emitter.level)
            emitter._pointwise(s)
            lines += emitter.finish()
        return lines

    def apply(self, step: str, text: str, indices: Sequence[Index], inside: str = "", **how: Any) -> list[str]:
        """Makes of the tile `text` of a step's sums what the next step sees of them, but for what the author makes himself
        (`Shown`). Tiles of several steps, ``"left right"``, are made into the first one. Where indices are a block's, in order,
        `starts` say where it begins."""
        starts = how.pop("starts", {})
        shown = Shown(**how)
        middle = self.problem.middles[step]
        self.check_axes(starts)
        emitter = self.emitter(middle.axes, indices, self.problem.loops, {}, within=Within(inside, starts=starts))
        emitter.suffix, emitter.behind = f"_{step}", True
        name, *_ = names = text.split()
        emitter.locals |= {one: (tile, emitter.level) for one, tile in zip(middle.steps, names, strict=True)}
        kind = self.problem.inputs[shown.into].dtype if shown.into else None
        function = middle.function(shown.scaled, shown.masked, kind, shown.filled)
        if shown.fixed:
            function = _with_fixed(emitter, function, self._fixed(middle), shown.fixed)
        value = emitter._tile(in_powers_of_two(function, emitter.exact))
        along, past = (middle.summed, "0.0") if middle.normalised is None else (middle.normalised, "float('-inf')")
        if along in emitter.masked():
            value = f"tl.where({emitter.inside(along)}, {value}, {past})"
        emitter.outer.lines += [f"{name} = {value}"] if value != name else []
        return emitter.finish()

    def fixed(self, step: str, stem: str, indices: Sequence[Index]) -> list[str]:
        """Makes tiles of those parts of a step's function that are the same for all indices of the batch's first loop, in the
        type in which they are stored."""
        middle = self.problem.middles[step]
        emitter = self.emitter(middle.axes, indices, self.problem.loops, {})
        emitter.suffix, emitter.behind = f"_{stem}", True
        for k, part in enumerate(self._fixed(middle)):
            emitter.outer.lines.append(f"{stem}{k} = ({emitter._tile(part)}).to({TRITON_TYPES[vs.memory_dtype(part)].storage})")
        return emitter.finish()

    def _fixed(self, middle: Middle) -> tuple[Value, ...]:
        """The largest such parts that read memory for each element of a tile. Every other one has to be computed anyway."""
        function = middle.function(scaled=False)
        moving = frozenset(self.problem.loops[middle.axes[0]][:1])
        both = [frozenset(self.problem.loops[axis]) for axis in middle.axes[-2:]]
        same: dict[Value, bool] = {}
        for one in vs.topological([function], through_indices=False):
            same[one] = one.op != "step" and moving.isdisjoint(one.variables()) and all(same[arg] for arg in one.args)
        parts = dict.fromkeys(arg for one in same for arg in one.args if same[arg] and not same[one])
        tiles = (p for p in parts if vs.loads([p]) and not any(one.isdisjoint(p.variables()) for one in both))
        return tuple(tiles)

    def edges(self, tiles: RunsOf, stem: str, row: str, like: str = "") -> list[str]:
        """Statements that say between which indices each of the `runs` is, for a tile of rows from `row` on. With indices of a
        `batch` these are the runs of that batch: integers from memory are loaded first. The mask of the batch holds where it
        held for the edges `like`."""
        step, batch = tiles.step, tiles.batch
        axes = self.problem.middles[step].axes[:-2] if batch else ()
        runs = runs_of(self.problem, step, self.config, tiles.rows, bool(batch), tiles.filled)
        emitter = self.emitter(axes, batch, self.problem.loops, {})
        emitter.suffix = f"_{stem}"
        names = [row]
        loaded: dict[Atom, Expr] = {}
        is_size = row in self.parameters.sizes
        for load, symbol in runs.known.loaded.items() if runs.known is not None else ():
            name = emitter._bind(f"{stem}_{symbol.name}", emitter.emit(vs.substitute(load, {ROW: ix.size(row).expr()})))
            names.append(name)
            loaded[symbol] = ix.size(name, -ANY, ANY).expr()
        if not is_size:
            self.parameters.sizes.pop(row, None)
        kind = "tl.int64" if emitter.wide else "tl.int32"
        for k, edge in enumerate(runs.edges(ix.size(row).expr())):
            text = self._of_variables(emitter, ix.substitute(edge, loaded), names)
            emitter.outer.lines.append(f"{stem}{k} = tl.cast({text}, {kind})" if loaded else f"{stem}{k} = {text}")
        return [*emitter.finish(), *self._unless_it_holds(step, runs, stem, (*batch, row), like)]

    def _unless_it_holds(self, step: str, runs: Runs, stem: str, indices: Sequence[Index], like: str) -> list[str]:
        """Statements that make one run of all tiles where a mask says nothing: the first one in which it is applied."""
        one = next((run for run in runs.all if not run.whole), None)
        if one is None or not self.problem.middles[step].guards or runs.leave_out_none:
            return []
        holds, end = f"{like or stem}_holds", self.length(runs.length)
        wanted = ("0" if k <= one.first else end for k in range(runs.all[-1].last + 1))
        return [
            *([] if like else self._holds(step, holds, indices)),
            *(f"{stem}{k} = tl.where({holds} != 0, {stem}{k}, {edge})" for k, edge in enumerate(wanted)),
        ]

    def runs(self, step: str, rows: int, by_batch: bool = False, filled: bool = False) -> tuple[Run, ...]:
        return runs_of(self.problem, step, self.config, rows, by_batch, filled).all

    def number(self, number: float) -> str:
        return repr(number)

    def element(self, operand: str, *_: object) -> list[str]:
        raise ValueError(
            f"{self.problem.template.name}: elements are of C++; in Triton {operand} has tiles: {operand}.tile(...)"
        )

    def store_element(self, result: str, *_: object) -> list[str]:
        raise ValueError(
            f"{self.problem.template.name}: elements are of C++; in Triton {result} has tiles: {result}.store(...)"
        )

    def holds(self, step: str, *_: object) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in Triton `edges` of {step} ask whether its mask holds")

    def _holds(self, step: str, name: str, indices: Sequence[Index]) -> list[str]:
        """Statements that make `name` 1 if all guards of a mask are 0, for indices of the batch and the first row: those of a
        tile of rows, or of all columns. It is 0 if not."""
        middle = self.problem.middles[step]
        axis, rows = middle.guard_axis, middle.axes[-2]
        *batch, row = indices
        if axis == rows:
            block = self.config.get(self.problem.template.block(axis) or "")
            return self._guards(middle, name, batch, axis, str(row), str(block))
        length, first = min(self.guards, 1 << (max(1, self.problem.size(axis)) - 1).bit_length()), f"{name}_first"
        lines = self._guards(middle, f"{name}_here", batch, axis, first, str(length))
        loop = f"for {first} in range(0, {self.size(axis)}, {length}):"
        begin, joined = f"{name} = tl.full([], 1, tl.int32)", f"    {name} = {name} & {name}_here"
        return [begin, loop, *(f"    {line}" for line in lines), joined]

    def _guards(self, middle: Middle, name: str, batch: Sequence[Index], axis: str, first: str, length: str) -> list[str]:
        """The same of `length` indices of an axis from `first` on; those past its end do not count."""
        loops, extent = self.problem.loops, self.problem.extent(axis).as_int()
        scalars = [Dimension(a, loops[a], "1", str(i), False) for a, i in zip(middle.axes[:-2], batch, strict=True)]
        ragged = extent is None or extent % int(length) != 0
        along = Dimension(axis, loops[axis], length, f"({first} + {self._counting(length)})", ragged)
        emitter = TileEmitter(self.problem, self.parameters, [along], scalars, self.exact)
        emitter.suffix, emitter.behind = f"_{name}", True
        for k, guard in enumerate(middle.guards):
            value = f"({emitter._tile(guard)} == 0)"
            value = f"({value} | ~({emitter.inside(axis)}))" if ragged else value
            so_far = "" if k == 0 else f"{name} & "
            emitter.outer.lines.append(f"{name} = {so_far}tl.min({value}.to(tl.int32), 0)")
        return emitter.finish()

    def _counting(self, length: str) -> str:
        """The numbers below a length."""
        return f"tl.arange(0, {length})"

    def bounds(self, step: str, *_: object) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in Triton tiles of {step} are in `runs` between `edges`")

    def _indices(self, axis: str, start: str) -> str:
        """All indices of a side that begins at `start`."""
        block = self.problem.template.block(axis)
        return start if block is None else f"({start} + tl.arange(0, {block}))"

    def move(self, found: TmaLayout, box: TensorMap, tile: Window) -> Move:
        """How TMA moves a tile."""
        name = self.descriptor(box)
        self.parameters.made_names.add(name)
        return self.placed(found, name, tile)

    def descriptor(self, box: TensorMap) -> str:
        """The name of a descriptor, a parameter of the kernel once it is among the names that were made."""
        return name_of(box, self.parameters.maps, clean(box.buffer))

    def placed(self, found: TmaLayout, name: str, tile: Window) -> Move:
        """A tile by the descriptor `name`."""
        static = all(self.problem.static(axis) for axis in self.problem.loops)  # sizes at run time have 64 bits, TMA 32
        return move(found, name, tile, self.emitter((), (), {}, {}).text, static)

    def _tile_lengths(self, axes: Sequence[str], lengths: Mapping[str, str]) -> dict[str, str]:
        """The lengths of a tile's sides, which are knobs where nothing else is said."""
        return {axis: lengths.get(axis, block) for axis in axes if (block := self.problem.template.block(axis))}

    def store(
        self,
        result: str,
        name: str,
        indices: Sequence[Index],
        end: tuple[str, str] = ("", ""),
        starts: Mapping[str, str] | None = None,
        **lengths: str,
    ) -> list[str]:
        """The epilogue of a result's tile `name`, with everything that it stores; `lengths` of sides that are parts of a
        block. With ``end=("m", "last")`` nothing is stored from that index on. Where indices are a block's, in order, `starts`
        say where it begins, as the indices do of a tile by TMA: loops that have one index in the tile are then numbers."""
        self.check_axes([*lengths, *(starts or ())])
        declared = self.problem.template.results[result]
        lines, engine = list[str](), None
        if declared.access == "tma":
            starts = dict(zip(declared.axes, map(str, indices), strict=True))
            lines, indices = self._spread(declared.axes, list(starts.values()), lengths, _counted)
            if self.config.get("TMA_EPILOGUE", True):
                engine = Engine(
                    self, result, Window(declared.axes, self.problem.loops, starts, self._tile_lengths(declared.axes, lengths))
                )
        within = Within(end=end, starts={} if declared.access == "tma" else starts or {}, counted=starts or {})
        emitter = self.emitter(declared.axes, indices, self.problem.loops, lengths, within=within)
        emitter.engine = engine
        return [*lines, *self._epilogue(emitter, Stored(declared, name, declared.axes, indices, lengths))]

    def _epilogue(self, emitter: TileEmitter, tile: Stored) -> list[str]:
        """The statements of an epilogue, on the tile that the emitter spans."""
        emitter.behind = True
        names = [f"{tile.name}{k}" for k in range(len(self.problem.mains))] if tile.result.many else tile.name.split()
        outs = [out for s in self.problem.mains for out in s.outs]
        emitter.locals |= {out: (one, emitter.level) for out, one in zip(outs, names, strict=True)}
        folded: list[Folded] = []
        for s in self.problem.epilogue:
            if s.kind == "partial":
                folded.append(self._fold(emitter, s, tile.lengths))
                emitter.outer.lines += [tile.met] if s is tile.behind else []
            elif s.kind == "scatter":
                emitter._scatter(s)
            else:
                emitter._pointwise(s)
        lines = emitter.finish()
        for one in (one for one in folded if any(one.statement.stored)):
            lines += self._store_parts(one, tile.axes, tile.indices, tile.lengths)
        return [*lines, tile.met] if tile.met and tile.behind is None else lines

    def _fold(self, emitter: TileEmitter, s: Statement, lengths: Mapping[str, str]) -> Folded:
        axis = self.problem.part(s).axis
        if axis in lengths and axis not in self.problem.template.author.epilogue_subtile(self.problem, self.config):
            raise ValueError(
                f"{self.problem.template.name} stores parts of tiles and has no method `epilogue_subtile` that says so"
            )
        return emitter.fold(s, self.config)

    def _spread(
        self, axes: Sequence[str], starts: Sequence[str], lengths: Mapping[str, str], counted: Callable[[str, str], str]
    ) -> tuple[list[str], list[str]]:
        """Vectors of the indices of a tile that begins at `starts`: the statements that make them, and their names. `counted`
        gives the numbers from 0 to the length of an axis' side."""
        block = self.problem.template.block
        tile_axes = {axis: lengths.get(axis, length) for axis in axes if (length := block(axis))}
        lines = [
            f"r{axis} = {start} + {counted(axis, tile_axes[axis])}"
            for axis, start in zip(axes, starts, strict=True)
            if axis in tile_axes
        ]
        names = [f"r{axis}" if axis in tile_axes else start for axis, start in zip(axes, starts, strict=True)]
        self.parameters.made_names.update(names)
        return lines, names

    def _store_parts(
        self, folded: Folded, axes: Sequence[str], indices: Sequence[Index], lengths: Mapping[str, str]
    ) -> list[str]:
        """Stores what the points of a tile were folded to: its loops are those of the first point of each run."""
        s, first = folded.statement, f"first_{folded.axis}"
        at = next(k for k, axis in enumerate(axes) if axis == folded.axis)
        indices_at: tuple[Index, ...] = tuple(
            first if axis == folded.axis else index for axis, index in zip(axes, indices, strict=True)
        )
        emitter = self.emitter(axes, indices_at, self.problem.loops, lengths, folded)
        emitter.made_names |= {first, PART}
        if folded.axis in lengths and folded.runs == 1:  # of a last tile, whole sides may lie past the end
            emitter.guard = (f"({first} < {emitter.text(self.problem.extent(folded.axis))})", frozenset())
        number = folded.number(first)
        emitter.outer.lines.append(f"{PART} = tl.cast({number}, tl.int64)" if emitter.wide else f"{PART} = {number}")
        for out, name, stored in zip(s.outs, folded.names, s.stored, strict=True):
            if stored:
                emitter._store(out, s.store[0], name)
        return [f"{first} = {folded.first(str(indices[at]))}", *emitter.finish()]

    @property
    def accumulator(self) -> str:
        """The text of the type of sums."""
        return TRITON_TYPES[self.problem.accumulator].compute

    def size(self, axis: str) -> str:
        """The text of an axis' length."""
        return self.length(self.problem.extent(axis))

    def expression(self, expr: Expr, names: Sequence[str]) -> str:
        """The text of an expression of sizes, and of these variables, which are no parameters of the kernel."""
        return self._of_variables(self.emitter((), (), {}, {}), expr, names)

    def _of_variables(self, emitter: TileEmitter, expr: Expr, names: Iterable[str]) -> str:
        own = [name for name in names if name not in self.parameters.sizes]
        text = emitter.text(expr)
        for name in own:
            self.parameters.sizes.pop(name, None)
        return text

    def length(self, expr: Expr) -> str:
        """The text of an expression of sizes."""
        return self.emitter((), (), {}, {}).text(expr)


def _counted(_axis: str, length: str) -> str:
    return f"tl.arange(0, {length})"


def _side_by_side(names: Sequence[str]) -> str:
    """Tiles side by side along new last axes of length 2, the first name where all of these are 0."""
    if len(names) == 1:
        return names[0]
    return f"tl.join({_side_by_side(names[::2])}, {_side_by_side(names[1::2])})"


def _with_fixed(emitter: TileEmitter, function: Value, parts: Sequence[Value], stem: str) -> Value:
    """A function with tiles in the place of parts of it."""
    mapping: dict[Value, Value] = {}
    for k, part in enumerate(parts):
        mapping[part] = vs.step_result(f"{stem}{k}", part.dtype)
        emitter.locals[f"{stem}{k}"] = (f"{stem}{k}.to({TRITON_TYPES[part.dtype].compute})", emitter.level)
    return vs.with_parts(function, mapping)


def _computed(emitter: TileEmitter, value: Value, dtype: torch.dtype) -> str:
    """A tile with a prologue, zero beyond the ends of its axes."""
    halves = of_halves(emitter, value, dtype)
    text = halves or emitter.emit(value)
    if emitter.axes(value) != emitter.level:
        text = f"tl.broadcast_to({text}, {emitter._shape(emitter.level)})"
    masks = [emitter.inside(d.axis) for d in emitter.dimensions if d.ragged]
    if masks:
        text = f"tl.where({' & '.join(masks)}, {text}, {literal(_zero(value.dtype), value.dtype)})"
    kind = TRITON_TYPES[dtype].storage
    wide = halves is None and value.dtype is torch.float32 and dtype in HALVES
    return f"lib.to_halves({text}, {kind})" if wide else f"({text}).to({kind})"


def raw_load(emitter: TileEmitter, load: Value, dtype: torch.dtype) -> str:
    """A tile in its layout in memory, so that the compiler can copy it to shared memory without a detour through registers."""
    name, (offset,), _ = load.attr
    if any(extent == 0 for extent in emitter.graph.buffers[name].sizes):
        return f"tl.full({emitter._shape(emitter.level)}, 0, {TRITON_TYPES[dtype].storage})"
    emitter.guard = (emitter.emit(load.args[0]), emitter.axes(load.args[0])) if load.args else None
    mask = emitter._mask_argument(emitter.level)
    emitter.guard = None
    other = f", other={_zero(dtype)}" if mask else ""  # of 8-bit floats an integer is none
    return f"tl.load({emitter._place(name, offset, emitter.level)}{mask}{other})"


def _zero(dtype: torch.dtype) -> float | int:
    return 0.0 if dtype.is_floating_point else 0
