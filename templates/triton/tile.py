"""Slots of Triton templates: operand tiles with their prologues, result stores with their epilogues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kgen import index as ix
from kgen import ops
from kgen import values as vs
from kgen.build.tensor_map import TensorMap
from kgen.index import Expr, Var
from kgen.plan import PART, Statement
from kgen.templates.contract import Config
from kgen.templates.problem import Part, Problem
from kgen.templates.render import clean
from kgen.templates.triton.boxes import Boxes, boxes, epilogue_boxes
from kgen.templates.triton.moves import Move, Window, move, name_of
from kgen.templates.triton.point import Axes, PointEmitter, Scope
from kgen.templates.triton.precision import exact_values
from kgen.templates.triton.table import REDUCE, TRITON_TYPES, WIDEN, literal
from kgen.values import Value


@dataclass(slots=True)
class Parameters:
    """What the slots of one kernel have in common: its pointers, descriptors and sizes, and the names that are taken."""

    pointers: dict[str, None] = field(default_factory=dict)
    maps: dict[TensorMap, str] = field(default_factory=dict)  # descriptors, with their names
    sizes: dict[str, None] = field(default_factory=dict)
    made_names: set[str] = field(default_factory=set)
    count: int = 0


@dataclass(frozen=True, slots=True)
class Dimension:
    """An axis of a tile: its letter, its loops, the knob that is its length, and the text of its indices (one dimension)."""

    axis: str
    loops: tuple[Var, ...]
    block: str
    index: str
    ragged: bool


@dataclass(frozen=True, slots=True)
class Folded:
    """A partial reduction of a tile: `names` hold its results, `runs` of them along the axis, of `block` points each."""

    statement: Statement
    axis: str
    part: Part
    runs: int
    block: int
    names: tuple[str, ...]

    def first(self, index: str) -> str:
        """The index of the first point of each run."""
        return f"tl.min({index}, 0)" if self.runs == 1 else f"tl.min(tl.reshape({index}, [{self.runs}, {self.block}]), 1)"

    def number(self, first: str) -> str:
        """Which part of the row, or of the run, the tile makes."""
        if self.part.whole:
            return f"{first} // {self.block}"
        return f"{first} % {self.part.run} // {self.block}" if self.runs == 1 else "0"


class TileEmitter(PointEmitter):
    """Emits values on the tile that `dimensions` span; `scalars` are axes of which a program has one index."""

    def __init__(
        self, problem: Problem, parameters: Parameters, dimensions: list[Dimension], scalars: list[Dimension], exact: bool
    ) -> None:
        statements = problem.kernel.statements
        everything = (v for s in statements for v in vs.topological(s.roots))
        super().__init__(problem.graph, set(everything) if exact else exact_values(statements, problem.graph))
        self.problem, self.dimensions, self.scalars = problem, tuple(dimensions), tuple(scalars)
        self.parameters = parameters
        self.pointers, self.sizes, self.made_names = parameters.pointers, parameters.sizes, parameters.made_names
        self.counter = parameters.count
        self.order = "".join(d.axis for d in dimensions)
        self.wide = is_wide(problem)
        self.axis_of = {v: d.axis for d in dimensions for v in d.loops}
        self.level = frozenset(self.order)
        self._masked = frozenset(d.axis for d in dimensions if d.ragged)
        self.behind = False  # behind the products, in registers: what makes operands goes through other instructions
        self.engine: Engine | None = None
        self.folded: Dimension | None = None  # along which the tile is being reduced

    def masked(self) -> Axes:
        return self._masked

    def _shape(self, axes: Axes) -> str:
        return "[" + ", ".join(d.block if d.axis in axes else "1" for d in self.dimensions) + "]"

    def _store(self, out: str, offset: Expr, name: str, axes: Axes | None = None) -> None:
        dtype = self.graph.buffers[out].dtype
        way = self.engine.move(out, offset, dtype, written=True) if self.engine is not None else None
        if way is None:
            super()._store(out, offset, name, axes)
            return
        whole = name if axes in (None, self.level) else f"tl.broadcast_to({name}, {self._shape(self.level)})"
        self._line(way.store(self._narrowed(whole, dtype)))

    def _load(self, value: Value) -> str:
        name, (offset,), dtype = value.attr
        way = self.engine.move(name, offset, dtype, written=False) if self.engine is not None and not value.args else None
        if way is None:
            return super()._load(value)
        if dtype is torch.bool:
            return f"{way.load()} != 0"
        wide = ops.compute_dtype(dtype)
        return way.load() if wide == dtype else WIDEN.format(way.load(), type=TRITON_TYPES[wide].compute)

    def fold(self, s: Statement, config: Config) -> Folded:
        """Reduces the tile along an axis; later statements find the results at each point of it."""
        part = self.problem.part(s)
        at = next(k for k, d in enumerate(self.dimensions) if d.axis == part.axis)
        runs = 1 if part.whole else self.problem.side(part.axis, config) // s.block
        lengths = [d.block for d in self.dimensions]
        cut = [*lengths[:at], str(runs), str(s.block), *lengths[at + 1 :]]
        tiles = self._folding(s, part)
        if runs > 1:
            tiles = [f"tl.reshape({tile}, [{', '.join(cut)}])" for tile in tiles]
        names = tuple(self._fresh(clean(out)) for out in s.outs)
        if s.op == "welford" and self._is_filled(s, part):
            self._fold_spread(s, tiles[0], names, at + (runs > 1), "" if runs > 1 else part.axis)
        else:
            rest = [self._fresh("count")] if s.op == "welford" else []
            text = REDUCE[s.op].across.format(*tiles, axis=at + (runs > 1))
            self._line(f"{', '.join([*names, *rest])} = {text}")
        for out, name in zip(s.outs, names, strict=True):
            spread = f"tl.expand_dims({name}, {at + (runs > 1)})"
            if runs == 1:
                self._define(out, spread, self.level - {part.axis}, False)
            else:
                spread = f"tl.reshape(tl.broadcast_to({spread}, [{', '.join(cut)}]), [{', '.join(lengths)}])"
                self._define(out, spread, self.level, False)
        return Folded(s, part.axis, part, runs, s.block, names)

    def _is_filled(self, s: Statement, part: Part) -> bool:
        """Whether every part that counts has just so many points as the statement says."""
        return not part.whole or part.is_row(s.block) or part.axis not in self.masked()

    def _fold_spread(self, s: Statement, tile: str, names: Sequence[str], at: int, axis: str) -> None:
        """Mean and squared deviations of points that stay in registers: two sums are cheaper than joining pairs of states."""
        mean, m2 = names
        self._line(f"{mean} = tl.sum({tile}, {at}) / {literal(s.block, s.value.dtype)}")
        apart = f"{tile} - tl.expand_dims({mean}, {at})"
        apart = self._bind("apart", f"tl.where({self.inside(axis)}, {apart}, 0)" if axis in self.masked() else apart)
        self._line(f"{m2} = tl.sum({apart} * {apart}, {at})")

    def sum_up(self, s: Statement, name: str) -> None:
        """Defines the results of a sum that the author has made, on a tile of the sums."""
        for out, stored in zip(s.outs, s.stored, strict=True):
            self._define(out, name, self.level, False)
            if stored:
                self._store(out, s.store[0], name)

    def _pointwise(self, s: Statement) -> None:
        """What there is one of for each row is stored once a row."""
        tile = self.level
        if s.stored[0]:
            self.level = self._expr_axes(s.store[0]) | self.axes(s.value)
        super()._pointwise(s)
        self.level = tile

    def _folding(self, s: Statement, part: Part) -> list[str]:
        """The tiles that a fold takes; points past the end of the axis leave it unchanged."""
        axis = part.axis
        inside = self.inside(axis) if axis in self.masked() else None
        self.folded = next(d for d in self.dimensions if d.axis == axis)
        tile = self._tile(s.value)
        if inside is not None:
            tile = f"tl.where({inside}, {tile}, {literal(ops.identity(s.op, s.value.dtype), s.value.dtype)})"
        tile = self._bind("tile", tile)
        if s.op in ("argmax", "argmin"):
            assert s.rank is not None
            return [tile, self._bind("place", f"tl.broadcast_to({self.text(s.rank)}, {self._shape(self.level)}).to(tl.int64)")]
        if s.op == "welford" and not self._is_filled(s, part):
            count = f"tl.zeros_like({tile}) + " + ("1.0" if inside is None else f"tl.where({inside}, 1.0, 0.0)")
            return [tile, f"tl.zeros_like({tile})", self._bind("count", count)]
        return [tile]

    def _checked(self, condition: str) -> str:
        return f"lib.trap_unless({condition})"

    def _value_text(self, value: Value) -> str:
        if self.behind and value.op == "round_to" and value.attr is torch.bfloat16 and self.axes(value) == self.level:
            return f"lib.rounded_to_bfloat16({self.emit(value.args[0])})"
        return self._picked(value) or super()._value_text(value)

    def _picked(self, value: Value) -> str | None:
        """``index == number`` along the axis that is folded, for a number that the points of a row share: compared with the
        place in the tile, which the compiler knows of each register. The points of a tile that is folded are neighbours."""
        if value.op != "eq" or self.folded is None:
            return None
        place, number = value.args
        place = place.args[0] if place.op == "cast" else place
        if place.op != "index" or self.folded.loops != (place.attr.atom(),) or self.folded.axis in self.axes(number):
            return None
        name = self.emit(number)
        lift = ", ".join(":" if d is self.folded else "None" for d in self.dimensions)
        first = f"tl.cast(tl.min({self.folded.index}, 0), {TRITON_TYPES[number.dtype].compute})"
        return f"tl.arange(0, {self.folded.block})[{lift}] == {name} - {first}"

    def finish(self) -> list[str]:
        """The statements, after those that work out the loop variables they need."""
        lines = self.outer.lines
        self.outer = self.inner = self.fixed = self.scope = Scope()
        head = [
            line for d in self.scalars for line in self._loops(d, f"tl.cast({d.index}, tl.int64)" if self.wide else d.index)
        ]
        for k, d in enumerate(self.dimensions):
            lift = ", ".join(":" if j == k else "None" for j in range(len(self.dimensions)))
            lifted = d.index if len(self.dimensions) == 1 else f"{d.index}[{lift}]"
            head += self._loops(d, f"{lifted}.to(tl.int64)" if self.wide else lifted)
            if d.ragged:
                head.append(f"{self.inside(d.axis)} = {lifted} < ({self.text(self.problem.extent(d.axis))})")
        self.parameters.count = self.counter
        return [*head, *lines]

    def _loops(self, d: Dimension, index: str) -> list[str]:
        """The loops of a composite axis as digits of its index, the last one fastest."""
        lines: list[str] = []
        divisor = ix.ONE
        for v in reversed(d.loops):
            if v in self.variables:
                quotient = index if divisor == 1 else f"({index} // ({self.text(divisor)}))"
                rest = "" if v is d.loops[0] else f" % ({self.text(v.extent)})"
                name = self._variable(v)
                lines.append(f"{name} = {quotient}{rest}")
                self.made_names.add(name)
            divisor = divisor * v.extent
        return lines


def is_wide(problem: Problem) -> bool:
    """Whether offsets may need 64 bits."""
    room = 2**31 - (1 << 20)
    exprs: list[Expr] = [problem.extent(axis) for axis in problem.loops]
    for s in problem.kernel.statements:
        exprs += s.store if any(s.stored) else ()
        exprs += [e for v in vs.topological(s.roots) if v.op == "load" for e in vs.index_exprs(v)]
    return any(not -room <= bound <= room for e in exprs for bound in e.bounds())


@dataclass(frozen=True, slots=True)
class Engine:
    """What of an epilogue goes through the copy engine, for one tile of a result."""

    slots: Slots
    result: str
    tile: Window

    def move(self, buffer: str, offset: Expr, dtype: torch.dtype, written: bool) -> Move | None:
        """The way of the tile that an epilogue reads or writes there; None: it goes by pointers."""
        problem, config = self.slots.problem, self.slots.config
        found = epilogue_boxes(problem, self.result, buffer, offset, dtype, written)
        if isinstance(found, str):
            return None
        box = found.map({axis: problem.side(axis, config) for axis in self.tile.axes})
        return None if box is None else self.slots.move(found, box, self.tile)


@dataclass(slots=True)
class Slots:
    """Renders the slots of one problem under one configuration."""

    problem: Problem
    config: Config
    exact: bool = False
    parameters: Parameters = field(default_factory=Parameters)

    def emitter(
        self,
        axes: Sequence[str],
        indices: Sequence[str],
        loops: Mapping[str, tuple[Var, ...]],
        lengths: Mapping[str, str],
        folded: Folded | None = None,
    ) -> TileEmitter:
        """An emitter for the tile that the author's indices span, or for what is left of it when an axis is folded; `lengths`
        are those of sides that are not whole blocks."""
        template = self.problem.template
        if len(indices) != len(axes):
            raise ValueError(f"{template.name}: {len(indices)} indices for the axes {', '.join(axes)}")
        dimensions: list[Dimension] = []
        scalars: list[Dimension] = []
        for axis, index in zip(axes, indices, strict=True):
            block = template.block(axis)
            if block is None:
                scalars.append(Dimension(axis, loops[axis], "1", index, False))
                continue
            extent = self.problem.extent(axis).as_int()
            ragged = extent is None or extent % self.config.get(block) != 0
            block = lengths.get(axis, block)
            if folded is not None and axis == folded.axis:
                if folded.runs == 1:
                    scalars.append(Dimension(axis, loops[axis], "1", index, False))
                    continue
                block = str(folded.runs)
            dimensions.append(Dimension(axis, loops[axis], block, index, ragged))
        return TileEmitter(self.problem, self.parameters, dimensions, scalars, self.exact)

    def tile(self, operand: str, number: int, name: str, indices: Sequence[str], own: bool = False) -> list[str]:
        """Statements that make `name` the operand's tile, zero beyond the ends of its axes. The author gives vectors of
        indices, or, of an operand that is to come through the copy engine, where the tile begins. With variables of its `own`
        it may stand in front of a loop that has others of the same names."""
        one = self.problem.members[number][operand]
        if self.problem.template.operands[operand].access == "tma":
            found = boxes(self.problem, one)
            blocks = {axis: self.config.get(block) for axis in one.axes if (block := self.problem.template.block(axis))}
            box = None if isinstance(found, str) else found.map(blocks)
            if box is not None and not isinstance(found, str):
                starts = dict(zip(one.axes, indices, strict=True))
                window = Window(one.axes, one.loops, starts, self._sides(one.axes, {}))
                return [f"{name} = {self.move(found, box, window).load()}"]
            indices = [self._indices(axis, start) for axis, start in zip(one.axes, indices, strict=True)]
        emitter = self.emitter(one.axes, indices, one.loops, {})
        emitter.suffix = f"_{name}" if own else ""
        if one.load is not None:
            text = raw_load(emitter, one.load, one.dtype)
        else:
            value = emitter.emit(one.value)
            if emitter.axes(one.value) != emitter.level:
                value = f"tl.broadcast_to({value}, {emitter._shape(emitter.level)})"
            masks = [emitter.inside(d.axis) for d in emitter.dimensions if d.ragged]
            if masks:
                value = f"tl.where({' & '.join(masks)}, {value}, {literal(_zero(one.value.dtype), one.value.dtype)})"
            text = f"({value}).to({TRITON_TYPES[one.dtype].storage})"
        emitter.outer.lines.append(f"{name} = {text}")
        return emitter.finish()

    def store_sum(self, operand: str, number: int, name: str, indices: Sequence[str]) -> list[str]:
        """Stores the sums `name` of an operand, with what is made of them. Indices are those that its tiles are asked for with,
        without those of the axes that are summed over."""
        template = self.problem.template
        axes = [axis for axis in template.operands[operand].axes if axis in template.implements.results[0]]
        lines = list[str]()
        if template.operands[operand].access == "tma":
            lines, indices = self._spread(axes, indices, {})
        emitter = self.emitter(axes, indices, self.problem.loops, {})
        emitter.suffix = "_of_sums"
        for s in self.problem.side_sum(operand, number).statements:
            if s.kind == "reduction":
                emitter.sum_up(s, name)
            else:
                emitter._pointwise(s)
        return [*lines, *emitter.finish()]

    def _indices(self, axis: str, start: str) -> str:
        """All indices of a side that begins at `start`."""
        block = self.problem.template.block(axis)
        return start if block is None else f"({start} + tl.arange(0, {block}))"

    def move(self, found: Boxes, box: TensorMap, tile: Window) -> Move:
        """A tile's way through the copy engine."""
        name = name_of(box, self.parameters.maps, clean(box.buffer))
        self.parameters.made_names.add(name)
        static = all(self.problem.static(axis) for axis in self.problem.loops)  # sizes at run time have 64 bits, boxes 32
        return move(found, name, tile, self.emitter((), (), {}, {}).text, static)

    def _sides(self, axes: Sequence[str], lengths: Mapping[str, str]) -> dict[str, str]:
        """The lengths of a tile's sides, which are knobs where nothing else is said."""
        return {axis: lengths.get(axis, block) for axis in axes if (block := self.problem.template.block(axis))}

    def store(self, result: str, name: str, indices: Sequence[str], **lengths: str) -> list[str]:
        """The epilogue of a result's tile `name`, with everything that it stores; `lengths` of sides that are parts of a
        block."""
        axes = self.problem.template.results[result].axes
        lines, engine = list[str](), None
        if self.problem.template.results[result].access == "tma":
            starts = dict(zip(axes, indices, strict=True))
            lines, indices = self._spread(axes, indices, lengths)
            if self.config.get("ENGINE", True):
                engine = Engine(self, result, Window(axes, self.problem.loops, starts, self._sides(axes, lengths)))
        emitter = self.emitter(axes, indices, self.problem.loops, lengths)
        emitter.engine, emitter.behind = engine, True
        many = self.problem.template.results[result].many
        names = [f"{name}{k}" for k in range(len(self.problem.mains))] if many else name.split()
        outs = [out for s in self.problem.mains for out in s.outs]
        emitter.locals |= {out: (one, emitter.level) for out, one in zip(outs, names, strict=True)}
        folded: list[Folded] = []
        for s in self.problem.epilogue:
            if s.kind == "partial":
                if self.problem.part(s).axis in lengths and self.problem.template.method("sides") is None:
                    raise ValueError(
                        f"{self.problem.template.name} stores parts of tiles and has no method `sides` that says so"
                    )
                folded.append(emitter.fold(s, self.config))
            elif s.kind == "scatter":
                emitter._scatter(s)
            else:
                emitter._pointwise(s)
        lines += emitter.finish()
        for one in (one for one in folded if any(one.statement.stored)):
            lines += self._store_parts(one, axes, indices, lengths)
        return lines

    def _spread(self, axes: Sequence[str], starts: Sequence[str], lengths: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Vectors of the indices of a tile that begins at `starts`: the statements that make them, and their names."""
        lines: list[str] = []
        names: list[str] = []
        for axis, start in zip(axes, starts, strict=True):
            block = self.problem.template.block(axis)
            names.append(start if block is None else f"r{axis}")
            if block is not None:
                lines.append(f"r{axis} = {start} + tl.arange(0, {lengths.get(axis, block)})")
        self.parameters.made_names.update(names)
        return lines, names

    def _store_parts(
        self, folded: Folded, axes: Sequence[str], indices: Sequence[str], lengths: Mapping[str, str]
    ) -> list[str]:
        """Stores what the points of a tile were folded to: its loops are those of the first point of each run."""
        s, first = folded.statement, f"first_{folded.axis}"
        at = next(k for k, axis in enumerate(axes) if axis == folded.axis)
        places = tuple(first if axis == folded.axis else index for axis, index in zip(axes, indices, strict=True))
        emitter = self.emitter(axes, places, self.problem.loops, lengths, folded)
        emitter.made_names |= {first, PART}
        if folded.axis in lengths and folded.runs == 1:  # of a last tile, whole sides may lie past the end
            emitter.guard = (f"({first} < {emitter.text(self.problem.extent(folded.axis))})", frozenset())
        number = folded.number(first)
        emitter.outer.lines.append(f"{PART} = tl.cast({number}, tl.int64)" if emitter.wide else f"{PART} = {number}")
        for out, name, stored in zip(s.outs, folded.names, s.stored, strict=True):
            if stored:
                emitter._store(out, s.store[0], name)
        return [f"{first} = {folded.first(indices[at])}", *emitter.finish()]

    def size(self, axis: str) -> str:
        """The text of an axis' length."""
        return self.length(self.problem.extent(axis))

    def length(self, expr: Expr) -> str:
        """The text of an expression of sizes."""
        return self.emitter((), (), {}, {}).text(expr)


def raw_load(emitter: TileEmitter, load: Value, dtype: torch.dtype) -> str:
    """A tile as it lies in memory, so that the compiler can copy it to shared memory without a detour through registers."""
    name, (offset,), _ = load.attr
    if any(extent == 0 for extent in emitter.graph.buffers[name].sizes):
        return f"tl.full({emitter._shape(emitter.level)}, 0, {TRITON_TYPES[dtype].storage})"
    mask = emitter._mask_argument(emitter.level)
    other = f", other={_zero(dtype)}" if mask else ""  # of 8-bit floats an integer is none
    return f"tl.load({emitter._place(name, offset, emitter.level)}{mask}{other})"


def _zero(dtype: torch.dtype) -> float | int:
    return 0.0 if dtype.is_floating_point else 0
