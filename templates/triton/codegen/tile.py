"""Values, folds and stores on a tile of a matmul: what fills the slots of Triton templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.plan import Statement
from kgen.ir.values import Value
from kgen.rendered.tensor_map import TensorMap
from kgen.templates.contract import Config
from kgen.templates.problem import Part, Problem
from kgen.templates.render import clean
from kgen.templates.slots import Pair
from kgen.templates.triton.codegen.coalescing import hinted, nearest_axis
from kgen.templates.triton.codegen.point import NARROW_INDEX, Axes, PointEmitter, Scope
from kgen.templates.triton.codegen.precision import exact_values
from kgen.templates.triton.codegen.rng_blocks import by_blocks, share_blocks
from kgen.templates.triton.codegen.table import REDUCE, TRITON_TYPES, WIDEN, literal


@dataclass(slots=True)
class Parameters:
    """What the slots of one kernel have in common: its pointers, descriptors and sizes, and the names that are taken. `shifts`
    are constants in the addresses of a function, one for each access; those that are `open` (None: all) are its parameters."""

    pointers: dict[str, None] = field(default_factory=dict)
    maps: dict[TensorMap, str] = field(default_factory=dict)  # descriptors, with their names
    sizes: dict[str, None] = field(default_factory=dict)
    made_names: set[str] = field(default_factory=set)
    count: int = 0
    shifts: list[int] = field(default_factory=list)
    open: frozenset[int] | None = frozenset()

    def shifted(self, offset: Expr) -> Expr:
        """An offset whose constant is the function's next shift."""
        number, constant = len(self.shifts), offset.constant_term()
        self.shifts.append(constant)
        if self.open is not None and number not in self.open:
            return offset
        return offset - ix.constant(constant) + ix.size(shift_name(number)).expr()

    def shift_names(self) -> list[str]:
        """The parameters that are shifts."""
        return [shift_name(k) for k in range(len(self.shifts)) if self.open is None or k in self.open]


def shift_name(number: int) -> str:
    """No other name of a kernel looks like it: those of buffers have a number or a letter of their own."""
    return f"shift{number}"


@dataclass(frozen=True, slots=True)
class Dimension:
    """An axis of a tile: its letter, its loops, the text of its length, and that of its indices (one dimension). A point of the
    tile may stand for `adjacent` along the axis; then `loops` are without the last one. Points from `end` on, where that is
    said, are past the end of the tile. One index may be given as a `pair`. In a tile that begins at `start` the `uniform`
    loops, the first of `loops`, have one index each. A tile may have a `single` index along the axis. Its indices are those
    from a multiple of `counted` on, where that is not 0, and so many."""

    axis: str
    loops: tuple[Var, ...]
    block: str
    index: str
    ragged: bool
    adjacent: int = 1
    end: str = ""
    pair: Pair | None = None
    start: str = ""
    uniform: tuple[Var, ...] = ()
    single: bool = False
    counted: int = 0


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


class Ways(Protocol):
    """How an epilogue's accesses go where pointers are not the best way."""

    def load(self, buffer: str, offset: Expr, dtype: torch.dtype) -> str | None:
        """The tile that is read there, as text; None: by pointers."""

    def store(self, buffer: str, offset: Expr, dtype: torch.dtype) -> Callable[[str], list[str]] | None:
        """What gives the statements that store a tile there; None: by pointers."""


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
        self.axis_of = {v: d.axis for d in dimensions for v in d.loops[len(d.uniform) :]}
        self.level = frozenset(self.order)
        self._masked = frozenset(d.axis for d in dimensions if d.ragged)
        self.behind = False  # behind the matmuls, in registers: what makes operands goes through other instructions
        self.engine: Ways | None = None
        self.sharing = 0  # warps among which the rows of a tile are shared, where that is written out
        self.layout = ""  # the name of how threads hold the tile, where that is written out
        self.bytes: dict[Value, str] = {}  # tiles of truth values, as they came by TMA
        self.folded: Dimension | None = None  # along which the tile is being reduced

    def masked(self) -> Axes:
        return self._masked

    def _place(self, buffer: str, offset: Expr, level: Axes) -> str:
        return super()._place(buffer, self.parameters.shifted(offset), level)

    def _coalesced(self, at: str, buffer: str, offset: Expr) -> str:
        """Not in Gluon, where the text says how threads hold a tile. Of an axis with one index there are no neighbours, and
        Triton 3.6 and 3.7 fail where one number has a hint."""
        found = self._expr_axes(offset)
        axes = {d.axis: d.loops for d in self.dimensions if d.axis in found and d.loops and not d.single}
        whole = all(d.adjacent == 1 for d in self.dimensions)
        if len(axes) < 2 or not whole or self.problem.template.language == "gluon":
            return at
        along = nearest_axis(offset, axes, self.graph.buffers[buffer].dtype.itemsize, self.problem.sizes)
        return at if along is None else hinted(at, {d.axis: d.axis == along for d in self.dimensions})

    def _variable(self, atom: Atom) -> str:
        is_shift = isinstance(atom, ix.Size) and atom.name in self.parameters.shift_names()
        return str(atom) if is_shift else super()._variable(atom)

    def _shape(self, axes: Axes) -> str:
        return "[" + ", ".join(d.block if d.axis in axes else "1" for d in self.dimensions) + "]"

    def _store(self, out: str, offset: Expr, name: str, axes: Axes | None = None) -> None:
        dtype = self.graph.buffers[out].dtype
        stores = self.engine.store(out, offset, dtype) if self.engine is not None else None
        if stores is None:
            super()._store(out, offset, name, axes)
            return
        whole = name if axes in (None, self.level) else f"tl.broadcast_to({name}, {self._shape(self.level)})"
        for line in stores(self._narrowed(whole, dtype)):
            self._line(line)

    def _load(self, value: Value) -> str:
        name, (offset,), dtype = value.attr
        tile = self.engine.load(name, offset, dtype) if self.engine is not None and not value.args else None
        if tile is None:
            return self._of_side(super()._load(value), value)
        if dtype is torch.bool:
            self.bytes[value] = self._bind("byte", tile)
            return f"{self.bytes[value]} != 0"
        wide = ops.compute_dtype(dtype)
        return tile if wide == dtype else WIDEN.format(tile, type=TRITON_TYPES[wide].compute)

    def _of_side(self, text: str, load: Value) -> str:
        """A load of a number for each row, or for each column, of a tile of results that is then reduced: as a vector that is
        spread. Triton would bring the accumulators into the layout of the load, and reduce each row across a full warp (sm_90,
        the nearest of 1,024 codes: 5,088 instructions and 1,736)."""
        spanned = [k for k, d in enumerate(self.dimensions) if d.axis in self._expr_axes(load.attr[1][0])]
        plain = self.behind and not load.args and self.problem.template.language == "triton"
        if not plain or len(spanned) != 1 or len(self.dimensions) != 2 or not self.problem.reduces_tiles:
            return text
        return f"tl.expand_dims(tl.reshape({text}, [{self.dimensions[spanned[0]].block}]), {1 - spanned[0]})"

    def _shared_random(self, value: Value) -> str | None:
        rank = len(self.dimensions)
        if self.problem.template.language == "gluon" or self.axes(value) != self.level or rank > 2:
            return None
        for at, d in reversed(list(enumerate(self.dimensions))):
            if d.counted and share_blocks(value, d.loops[len(d.uniform) :], d.counted):
                return by_blocks(value, turned=at < rank - 1)
        return None

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
            text = self._across(s.op, tiles, at + (runs > 1))
            self._line(f"{', '.join([*names, *rest])} = {text}")
        if s.op in ("argmax", "argmin"):
            self._line(f"{names[1]} = {names[1]}.to(tl.int64)")
        for out, name in zip(s.outs, names, strict=True):
            spread = f"tl.expand_dims({name}, {at + (runs > 1)})"
            if runs == 1:
                self._define(out, spread, self.level - {part.axis}, False)
            else:
                spread = f"tl.reshape(tl.broadcast_to({spread}, [{', '.join(cut)}]), [{', '.join(lengths)}])"
                self._define(out, spread, self.level, False)
        return Folded(s, part.axis, part, runs, s.block, names)

    def _across(self, op: str, tiles: Sequence[str], axis: int) -> str:
        """Tiles folded along an axis: at once, or, where warps share rows, first what each warp has of them."""
        if not self.sharing or len(tiles) > 1:
            return REDUCE[op].across.format(*tiles, axis=axis)
        own = REDUCE[op].across.format(f"ws.by_warp({tiles[0]}, {self.sharing})", axis=2)
        return f"ws.of_rows({REDUCE[op].across.format(f'ws.of_warps({own}, {self.sharing})', axis=1)}, {self.layout})"

    def _is_filled(self, s: Statement, part: Part) -> bool:
        """Whether every part that counts has just so many points as the statement says."""
        return not part.whole or part.is_row(s.block) or part.axis not in self.masked()

    def _fold_spread(self, s: Statement, tile: str, names: Sequence[str], at: int, axis: str) -> None:
        """Mean and squared deviations of points that stay in registers: two sums are cheaper than joining pairs of states."""
        mean, m2 = names
        self._line(f"{mean} = {self._across('sum', [tile], at)} / {literal(s.block, s.value.dtype)}")
        apart = f"{tile} - tl.expand_dims({mean}, {at})"
        apart = self._bind("apart", f"tl.where({self.inside(axis)}, {apart}, 0)" if axis in self.masked() else apart)
        squares = self._bind("squares", f"{apart} * {apart}")
        self._line(f"{m2} = {self._across('sum', [squares], at)}")

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
            kind = "int32" if s.rank.bounds()[1] < NARROW_INDEX else "int64"  # as many registers as numbers take, or two
            place = f"tl.broadcast_to({self._number(s.rank)}, {self._shape(self.level)}).to(tl.{kind})"
            return [tile, self._bind("place", place)]
        if s.op == "welford" and not self._is_filled(s, part):
            count = f"tl.zeros_like({tile}) + " + ("1.0" if inside is None else f"tl.where({inside}, 1.0, 0.0)")
            return [tile, f"tl.zeros_like({tile})", self._bind("count", count)]
        return [tile]

    def _checked(self, condition: str, failure: str) -> str:
        return f"lib.trap_unless({condition})"

    def _value_text(self, value: Value) -> str:
        if self.behind and value.op == "round_to" and value.attr is torch.bfloat16 and self.axes(value) == self.level:
            return f"lib.rounded_to_bfloat16({self.emit(value.args[0])})"
        return self._picked(value) or self._chosen(value) or super()._value_text(value)

    def _chosen(self, value: Value) -> str | None:
        """A choice by bytes that lie four in a register."""
        if value.op != "where" or not self.sharing or value.dtype is not torch.float32:
            return None
        condition, *others = value.args
        self.emit(condition)
        byte = self.bytes.get(condition)
        return None if byte is None else f"ws.chosen({byte}, {', '.join(map(self.emit, others))})"

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
        head = [line for d in self.scalars for line in self._scalar_loops(d)]
        for k, d in enumerate(self.dimensions):
            lift = ", ".join(":" if j == k else "None" for j in range(len(self.dimensions)))
            lifted = d.index if len(self.dimensions) == 1 else f"{d.index}[{lift}]"
            head += self._uniform_loops(d) + self._loops(d, f"{lifted}.to(tl.int64)" if self.wide else lifted)
            if d.ragged:
                extent = ix.floordiv(self.problem.extent(d.axis), ix.constant(d.adjacent))
                head.append(f"{self.inside(d.axis)} = {lifted} < ({d.end or self.text(extent)})")
        self.parameters.count = self.counter
        return [*head, *lines]

    def _scalar_loops(self, d: Dimension) -> list[str]:
        """The loops of an axis of which a program has one index; of a pair, the first loop needs no division."""
        cast = "tl.cast({}, tl.int64)" if self.wide else "{}"
        if d.pair is None or len(d.loops) == 1:
            return self._loops(d, cast.format(d.index))
        first, *others = d.loops
        parts = ((first,), d.pair.outer), (tuple(others), d.pair.inner)
        return [line for loops, index in parts for line in self._loops(replace(d, loops=loops), cast.format(index))]

    def _uniform_loops(self, d: Dimension) -> list[str]:
        """Those that have one index in the whole tile: numbers, where other loops have vectors."""
        if not d.uniform:
            return []
        first = f"(({d.start}) // {_extent(d.loops[len(d.uniform) :])})"
        return self._loops(replace(d, loops=d.uniform, uniform=()), f"tl.cast({first}, tl.int64)" if self.wide else first)

    def _loops(self, d: Dimension, index: str) -> list[str]:
        """The loops of a composite axis as digits of its index, the last one fastest. Behind uniform loops they count from
        where these are."""
        lines: list[str] = []
        divisor = ix.ONE
        loops = d.loops[len(d.uniform) :]
        if d.uniform and not self.variables.isdisjoint(loops):
            within = _extent(loops)
            index = f"({index} - ({d.start}) // {within} * {within})"
        for v in reversed(loops):
            if v in self.variables:
                quotient = index if divisor == 1 else f"({index} // ({self.text(divisor)}))"
                rest = "" if v is loops[0] else f" % ({self.text(v.extent)})"
                name = self._variable(v)
                lines.append(f"{name} = {quotient}{rest}")
                self.made_names.add(name)
            divisor = divisor * v.extent
        return lines


def uniform_loops(loops: Sequence[Var], block: int) -> tuple[Var, ...]:
    """The loops of an axis that have one index in each tile of `block` points that begins at a multiple of that: as many as
    leave others a multiple of it."""
    within = 1
    for k in range(len(loops) - 1, 0, -1):
        extent = loops[k].extent.as_int()
        if extent is None:
            return ()
        within *= extent
        if within % block == 0:
            return tuple(loops[:k])
    return ()


def _extent(loops: Sequence[Var]) -> int:
    """How many points loops of known extents have together."""
    return math.prod(extent for v in loops if (extent := v.extent.as_int()) is not None)


def is_wide(problem: Problem) -> bool:
    """Whether offsets may need 64 bits."""
    room = 2**31 - (1 << 20)
    exprs: list[Expr] = [problem.extent(axis) for axis in problem.loops]
    for s in problem.kernel.statements:
        exprs += s.store if any(s.stored) else ()
        exprs += [e for v in vs.topological(s.roots) if v.op == "load" for e in vs.index_exprs(v)]
    return not all(ix.within(e, room) for e in exprs)
