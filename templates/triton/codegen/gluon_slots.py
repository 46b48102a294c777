"""Slots of templates in Gluon, where shared memory, barriers and layouts are written out: they take and give handles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.plan import Statement
from kgen.ir.values import Value
from kgen.rendered.tensor_map import TensorMap
from kgen.templates.problem import Input
from kgen.templates.slots import Index, Lazy, OperandSlot, ResultSlot, StepSlot
from kgen.templates.triton.codegen.gluon_handles import BoxedTile, Columns, Kept, Leaving, Place, Reads, Ring, Writes
from kgen.templates.triton.codegen.gluon_steps import Shared, StepHalves
from kgen.templates.triton.codegen.slots import Slots, Stored, Within
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.codegen.tma_box import BoxAccess, BoxLayout, BoxOrder, epilogue_tiles_of, operand_box
from kgen.templates.triton.codegen.tma_layout import Access, ByEights, TmaLayout, tma_accesses, tma_layout
from kgen.templates.triton.codegen.tma_moves import Move, Window, digit

NO_READS, NO_WRITES = Reads(()), Writes()
# Numbers of a mask's guards that a program looks at together: it waits for them before its warps part.
GUARDS = 4096


@dataclass(frozen=True, slots=True)
class GluonOperand(OperandSlot):
    """``{% set left = A.ring("left", STAGES) %}`` is shared memory for so many tiles of A; ``{% set rights = B.rings("right",
    STAGES) %}`` are the rings `right0`, `right1`, ... of a family's operands; ``{% set right = B.keep("right", rows=256) %}``
    is memory for all of an operand, so many rows at a time."""

    def ring(self, name: str, stages: int) -> Ring:
        return self._slots().ring(self, name, stages)

    def rings(self, name: str, stages: int) -> tuple[Ring, ...]:
        return tuple(one.ring(f"{name}{one.number}", stages) for one in self)

    def keep(self, name: str, rows: int) -> Kept:
        return self._slots().keep(self, name, rows)

    def store_sum(self, name: str, *indices: str, layout: str = "") -> str:
        return "\n".join(self._slots().store_sum(self.name, self.number, name, indices, layout))

    def _slots(self) -> GluonSlots:
        assert isinstance(self.filler, GluonSlots)
        return self.filler


@dataclass(frozen=True, slots=True)
class GluonResult(ResultSlot):
    """``{% set reads = C.reads("early", STAGES) %}`` is shared memory for the tiles that C's epilogue reads by TMA, which
    the author asks for: ``{% for one in reads %}{{ one.fetch(...) }}``. ``{% set writes = C.writes("leaving") %}`` is what its
    results leave from; where a tile that has been read is of the same kind, `over` gives its place away. Unless they are
    `wanted`, tiles come and go by pointers.

    ``{{ C.store("acc", "b", "m0", "n0", layout="layout", reads=reads.at("stage"), writes=writes) }}`` runs the epilogue on the
    tile `acc`, which threads hold as `layout` says. The statement `met` runs where all warps have needed what was fetched, of a
    result whose rows warps share."""

    def reads(self, name: str, count: int, wanted: bool = True) -> Reads:
        return self._slots().reads(name, count) if wanted else NO_READS

    def writes(self, name: str, over: Reads = NO_READS, wanted: bool = True, instead: Place | None = None) -> Writes:
        return self._slots().writes(name, over, instead) if wanted else NO_WRITES

    def store(
        self, name: str, *indices: Index, layout: str = "", reads: Reads = NO_READS, writes: Writes = NO_WRITES, met: str = "",
        **lengths: str | None,
    ) -> str:  # fmt: skip
        if self.name in self.filler.problem.template.seconds:  # its indices are vectors, whose layout threads hold it in
            return ResultSlot.store(self, name, *indices)
        parts = {axis: length for axis, length in lengths.items() if length}
        return "\n".join(
            self._slots().store_tile(self.name, name, list(map(str, indices)), parts, Through(layout, reads, writes, met))
        )

    def _slots(self) -> GluonSlots:
        assert isinstance(self.filler, GluonSlots)
        return self.filler


@dataclass(frozen=True, slots=True)
class GluonWorkspace(Lazy):
    """``{% set sums = SUMS.ring("sums", 2, BLOCK_N, BLOCK_D) %}`` is shared memory for so many tiles. The workspace is a whole
    number of them, one behind the other; ``{{ sums.tile.descriptor }}`` is their descriptor."""

    filler: Any

    def ring(self, name: str, stages: int, rows: int, columns: int) -> Ring:
        return Ring(name, stages, self.filler.tiles_of_workspace(self.name, rows, columns))


@dataclass(frozen=True, slots=True)
class GluonStep(StepSlot):
    """Of a function of two elements, ``{{ step.first("early", "s", 0, "b", "rm", "rn") }}`` makes `early0`, `early1` and so on
    of the tile `s` of the element number 0, and ``{{ step.second("early", "t", 1, "b", "rm", "rn") }}`` makes of the tile `t`
    of the other one what the next step sees; of one element, `early0` is that. Not `masked`, elements are those where a mask
    keeps all. ``{% set stats = step.columns("stats", STAGES) %}`` is shared memory for numbers of columns, which both take as
    ``stats=stats.at("stage", "layout")``; ``{{ step.of_rows_alone("b", "rm") }}`` reads those of rows, before a loop.
    ``{% set same = weights.among(step, 0, "V") %}`` says whether an early part of `step` is what this one sees of the same
    element, but for the rounding to the type of `V`; ``{{ same.of("early", whole) }}`` is that part."""

    def first(self, stem: str, tile: str, number: int, *indices: Index, **how: Any) -> str:
        return "\n".join(self._halves(**how).first(stem, tile, number, indices))

    def second(self, stem: str, tile: str, number: int, *indices: Index, **how: Any) -> str:
        return "\n".join(self._halves(**how).second(stem, tile, number, indices))

    def among(self, other: GluonStep, number: int, multiplies: str, **how: Any) -> Shared | None:
        return self._halves(into=multiplies).among(other._halves(**how), number)

    def of_rows_alone(self, *indices: Index, **how: Any) -> str:
        return "\n".join(self._halves(**how).rows(indices))

    def columns(self, name: str, stages: int) -> Columns:
        return self._halves().columns(name, stages)

    def _halves(self, **how: Any) -> StepHalves:
        assert isinstance(self.filler, GluonSlots)
        return StepHalves(self.filler, self.name, self.filler.known.setdefault(self.name, {}), **how)


@dataclass(frozen=True, slots=True)
class Through:
    """What a store in Gluon is given: how threads hold the tile, memory for what is read and written, and a statement."""

    layout: str
    reads: Reads
    writes: Writes
    met: str


@dataclass(slots=True)
class GluonSlots(Slots):
    """Renders the slots of one problem under one configuration. `tiles` is what the epilogue may move by TMA, in the order
    in which it does: known before anything is rendered."""

    guards: ClassVar[int] = GUARDS
    tiles: dict[Access | BoxAccess, BoxedTile] = field(init=False)
    orders: dict[str, BoxOrder] = field(init=False)  # of axes of which tiles have several loops
    known: dict[str, dict[Value, str]] = field(default_factory=dict)  # of each step, what was read in front of a loop

    def __post_init__(self) -> None:
        template, config = self.problem.template, self.config
        shapes = template.author.tile_shapes(self.problem, config)
        self.orders = {axis: BoxOrder(self.problem.loops[axis], box) for axis, box in shapes.items()}
        if self.orders:
            self.tiles = self._epilogue_tiles()
            return
        [result, *_] = template.results
        lengths = {axis: self.problem.side(axis, config) for axis in template.results[result].axes}
        found = {one: one.tma_layout.map(lengths) for one in tma_accesses(self.problem, result)}
        axes = template.results[result].axes
        self.tiles = {
            one: self._boxed(one.tma_layout, box, axes, self.problem.loops) for one, box in found.items() if box is not None
        }

    def operand_slot(self, name: str, facts: dict[str, object], count: int, sums: frozenset[int]) -> OperandSlot:
        return GluonOperand(name, self, facts, count, 0, sums)

    def result_slot(self, name: str) -> ResultSlot:
        return GluonResult(name, self)

    def step_slot(self, name: str) -> StepSlot:
        return GluonStep(name, self)

    def workspace_slot(self, memory: Lazy) -> Lazy:
        return GluonWorkspace(memory.name, memory.text, memory.among, self)

    def tiles_of_workspace(self, buffer: str, rows: int, columns: int) -> BoxedTile:
        """Tiles of a workspace that is a matrix of so many columns."""
        dtype, [length] = self.problem.graph.buffers[buffer].dtype, self.problem.graph.buffers[buffer].sizes
        sizes, strides = (ix.floordiv(length, columns), ix.constant(columns)), (ix.constant(columns), ix.ONE)
        box = TensorMap(buffer, TRITON_TYPES[dtype].pointer.removeprefix("*"), (rows, columns), sizes, strides)
        descriptor = self.descriptor(box)
        return self._used(
            BoxedTile(descriptor, box.block, dtype, False, lambda at: Move(descriptor, tuple(at), ("", ""), turned=False))
        )

    # ---- handles ----------------------------------------------------------------------------------------------------

    def _epilogue_tiles(self) -> dict[Access | BoxAccess, BoxedTile]:
        """What the epilogue may move where its tiles have several loops."""
        [result, *_] = self.problem.template.results
        axes = self.problem.template.results[result].axes
        lengths = {axis: self.problem.side(axis, self.config) for axis in axes}
        found = {one: self._box(one.layout, axes, lengths) for one in epilogue_tiles_of(self.problem, result)}
        return {one: box for one, box in found.items() if box is not None}

    def ring(self, slot: GluonOperand, name: str, stages: int) -> Ring:
        one = self.problem.members[slot.number][slot.name]
        if outer := next((axis for axis in one.axes if axis in self.orders), None):
            return Ring(name, stages, self._used(self._operand_box(one, outer)), slot.number, slot.summed)
        found = self._lying(one)
        box = found.map(self._blocks(one))
        assert box is not None, f"tiles of {one.name} are too large for a descriptor"
        return Ring(name, stages, self._used(self._boxed(found, box, one.axes, one.loops)), slot.number, slot.summed)

    def keep(self, slot: GluonOperand, name: str, rows: int) -> Kept:
        one = self.problem.members[slot.number][slot.name]
        found, blocks = self._lying(one), self._blocks(one)
        way = found.by_eights(rows, blocks[found.axes[-1]])
        assert isinstance(way, ByEights), way
        descriptor = self.descriptor(way.map)
        self.parameters.made_names.add(descriptor)
        outer = [axis for axis in one.axes if axis not in blocks]

        def origin(indices: Sequence[str]) -> Sequence[str]:
            starts = {**dict.fromkeys(blocks, ""), **dict(zip(outer, indices, strict=True))}
            window = Window(one.axes, one.loops, starts, self._tile_lengths(one.axes, {}))
            return self.placed(found, descriptor, window).origin[:-2]

        return Kept(name, descriptor, blocks[found.axes[-2]] // rows, way, found.dtype.itemsize, origin)

    def reads(self, name: str, count: int) -> Reads:
        found = [self._used(tile) for one, tile in self.tiles.items() if not one.written]
        # a matrix may be read as it is and transposed, by one descriptor
        number = [sum(other.descriptor == tile.descriptor for other in found[:k]) for k, tile in enumerate(found)]
        again = [f"_again{k}" if k else "" for k in number]
        return Reads(tuple(Ring(self._memory(name, tile, more), count, tile) for tile, more in zip(found, again, strict=True)))

    def writes(self, name: str, over: Reads, instead: Place | None = None) -> Writes:
        """Of the tiles that leave, the first one may do so where a stage of a ring is free, `instead` of memory of its own."""
        homes: list[Leaving | Ring] = []
        free: list[Ring] = []  # of what has been read
        coming = iter(over.rings)
        for one, tile in self.tiles.items():
            if not one.written:
                free += [ring for ring in [next(coming, None)] if ring is not None]
                continue
            ring = next((ring for ring in free if ring.tile.shares_memory(tile)), None)
            if ring is None:
                where, instead = "" if instead is None or instead.bytes != tile.bytes else str(instead), None
                homes.append(Leaving(self._memory(name, tile), self._used(tile), where))
            else:
                homes.append(ring)
            free = [other for other in free if other is not ring]
        return Writes(tuple(homes))

    def _lying(self, one: Input) -> TmaLayout:
        found = tma_layout(self.problem, one)
        assert isinstance(found, TmaLayout), found
        return found

    def _boxed(
        self, found: TmaLayout, box: TensorMap, axes: tuple[str, ...], loops: Mapping[str, tuple[Var, ...]]
    ) -> BoxedTile:
        descriptor, tile_axes = self.descriptor(box), self._tile_lengths(axes, {})
        turned = tuple(axis for axis in axes if axis in tile_axes) != found.axes[-2:]

        def place(indices: Sequence[str]) -> Window:
            return Window(axes, loops, dict(zip(axes, indices, strict=True)), tile_axes)

        return BoxedTile(
            descriptor, box.block, found.dtype, turned, lambda indices: self.placed(found, descriptor, place(indices))
        )

    def _operand_box(self, one: Input, outer: str) -> BoxedTile:
        """An operand's tiles along the axis `outer`."""
        lengths = self._blocks(one)
        [inner] = (axis for axis in lengths if axis != outer)
        layout = operand_box(self.problem, one.name, outer, inner)
        assert isinstance(layout, BoxLayout), layout
        made = self._box(layout, one.axes, lengths)
        assert made is not None, f"tiles of {one.name} are too large for a descriptor"
        return made

    def _box(self, layout: BoxLayout, axes: Sequence[str], lengths: Mapping[str, int]) -> BoxedTile | None:
        """Tiles of so many rows and columns; None where they are too large for a descriptor."""
        order = self.orders[layout.outer]
        lengths_of = dict(zip(order.loops, order.part(lengths[layout.outer]), strict=True))
        box = layout.map(lengths_of, lengths[layout.inner])
        if isinstance(box, str):
            return None
        descriptor = self.descriptor(box)

        def move(indices: Sequence[str]) -> Move:
            at = dict(zip(axes, indices, strict=True))
            origin = layout.origin(self._loop_indices(layout, at), at[layout.inner])
            return Move(descriptor, tuple(origin), ("", ""), turned=False)

        return BoxedTile(descriptor, box.block, layout.dtype, False, move)

    def _loop_indices(self, layout: BoxLayout, at: Mapping[str, str]) -> dict[Var, str]:
        """The index of each loop where a box begins, but for those of its columns, from the indices of axes."""
        order, text = self.orders[layout.outer], self.emitter((), (), {}, {}).text
        found = dict(zip(order.loops, order.indices(at[layout.outer]), strict=True))
        for axis in (axis for axis in at if axis not in (layout.outer, layout.inner)):
            loops = self.problem.loops[axis]
            found |= {v: digit(at[axis], loops, v, text) for v in loops}
        return found

    def _used(self, tile: BoxedTile) -> BoxedTile:
        """The tile, whose descriptor is a parameter of the kernel from now on."""
        self.parameters.made_names.add(tile.descriptor)
        return tile

    def _memory(self, prefix: str, tile: BoxedTile, suffix: str = "") -> str:
        """The name of a tile's shared memory. It is a buffer's, so it is no part of a key: equal layers share a kernel."""
        name = f"{prefix}_{tile.descriptor.removeprefix('map_')}{suffix}"
        self.parameters.made_names.add(name)
        return name

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _counting(self, length: str) -> str:
        return f"ws.counting({length})"

    def tile(
        self, operand: str, number: int, name: str, indices: Sequence[Index], own: bool = False, inside: str = "", **starts: str
    ) -> list[str]:
        raise ValueError(f"{self.problem.template.name}: in Gluon tiles of {operand} come through `ring` or `keep`")

    def store_sum(self, operand: str, number: int, name: str, indices: Sequence[str], layout: str = "") -> list[str]:
        axes = self._summed_axes(operand)
        lines, indices = self._laid_out(axes, indices, {}, layout)
        return [*lines, *self._sum(operand, number, name, axes, indices)]

    def store_tile(
        self, result: str, name: str, indices: Sequence[str], lengths: Mapping[str, str], through: Through
    ) -> list[str]:
        """The epilogue of a result's tile `name`, with everything that it stores; `lengths` of sides that are parts of a
        block. The statement `met` stands behind the first reduction of rows that warps share for which all that was fetched,
        and the matmul, was needed, or at the end: a load from shared memory that is on its way is held up by no barrier of
        threads, and TMA may overtake it."""
        self.check_axes(lengths)
        declared = self.problem.template.results[result]
        moves = Moves(self.tiles, indices, through)
        lines, vectors = self._laid_out(declared.axes, indices, lengths, through.layout)
        starts = {axis: str(start) for axis, start in zip(declared.axes, indices, strict=True) if axis not in self.orders}
        emitter = self.emitter(declared.axes, vectors, self.problem.loops, lengths, within=Within(starts=starts))
        emitter.engine, emitter.layout = moves, through.layout
        if declared.access == "shared":
            emitter.sharing = self.config.WARPS
        if through.writes.homes:
            self.parameters.made_names.update(tile.descriptor for one, tile in self.tiles.items() if one.written)
        folds = (s for s in self.problem.epilogue if s.kind == "partial" and through.met)
        behind = next((s for s in folds if self._needs_all(s, moves)), None)
        return [*lines, *self._epilogue(emitter, Stored(declared, name, declared.axes, vectors, lengths, through.met, behind))]

    def _needs_all(self, fold: Statement, moves: Moves) -> bool:
        """Whether a reduction is of the matmul, and of all that the epilogue fetches."""
        makers = {out: s for s in self.problem.epilogue for out in s.outs}
        needed, todo = set[Value](), list(fold.roots)
        while todo:
            fresh = [load for load in vs.loads([todo.pop()]) if load not in needed]
            needed.update(fresh)
            todo += [root for load in fresh if (maker := makers.get(load.attr[0])) for root in maker.roots]
        matmuls = {out for s in self.problem.mains for out in s.outs}
        every = vs.loads([root for s in self.problem.epilogue for root in s.roots])
        others = (load for load in every if load.attr[0] not in makers and load.attr[0] not in matmuls)
        fetched = {load for load in others if not load.args and moves.ring(load.attr[0], load.attr[1][0]) is not None}
        return fetched <= needed and matmuls <= {load.attr[0] for load in needed}

    def _laid_out(
        self, axes: Sequence[str], starts: Sequence[str], lengths: Mapping[str, str], layout: str
    ) -> tuple[list[str], list[str]]:
        """Vectors of the indices of a tile that begins at `starts`, which threads hold as `layout` says: the statements that
        make them, and their names."""
        if not layout:
            raise ValueError(f"{self.problem.template.name}: a store in Gluon has to know the layout")
        tile_axes = [axis for axis in axes if self.problem.template.block(axis)]
        slice_layouts = {axis: f"gl.SliceLayout({1 - k}, {layout})" for k, axis in enumerate(tile_axes)}
        lines, names = self._spread(
            axes, starts, lengths, lambda axis, length: f"gl.arange(0, {length}, {slice_layouts[axis]})"
        )
        return [*lines, *(line for axis in tile_axes if axis in self.orders for line in self._in_box_order(axis))], names

    def _in_box_order(self, axis: str) -> list[str]:
        """Statements that make the axis' indices of a vector of rows. Past the end of a loop they are past that of the axis."""
        rows, order = f"r{axis}", self.orders[axis]
        names = [f"{rows}{k}" for k in range(len(order.loops))]
        self.parameters.made_names.update(names)
        index, inside = order.index(names)
        lines = [f"{name} = {place}" for name, place in zip(names, order.indices(rows), strict=True)]
        return [*lines, f"{rows} = tl.where({inside}, {index}, {self.size(axis)})" if inside else f"{rows} = {index}"]

    def _side(self, axis: str, block: str, index: Index) -> tuple[bool, str]:
        if axis in self.orders:
            return not self.orders[axis].filled, block
        return Slots._side(self, axis, block, index)


@dataclass(frozen=True, slots=True)
class Moves:
    """How the epilogue of one tile reads and writes through shared memory that the author has given it."""

    tiles: Mapping[Access | BoxAccess, BoxedTile]
    indices: Sequence[str]
    through: Through

    def load(self, buffer: str, offset: Expr, dtype: torch.dtype) -> str | None:
        ring = self.ring(buffer, offset)
        return None if ring is None else f"{ring.view(self.through.reads.place)}.load({self.through.layout})"

    def ring(self, buffer: str, offset: Expr) -> Ring | None:
        """Where what is read there comes to."""
        tiles = [(one.buffer, one.offset) for one in self.tiles if not one.written]
        rings = self.through.reads.rings
        return rings[tiles.index((buffer, offset))] if rings and (buffer, offset) in tiles else None

    def store(self, buffer: str, offset: Expr, dtype: torch.dtype) -> Callable[[str], list[str]] | None:
        written = {(one.buffer, one.offset): tile for one, tile in self.tiles.items() if one.written}
        if not self.through.writes.homes or (buffer, offset) not in written:
            return None
        number, tile = list(written).index((buffer, offset)), written[buffer, offset]
        reads, writes = self.through.reads, self.through.writes
        return lambda value: writes.store(number, tile.leaving(self.indices, value), reads.place)
