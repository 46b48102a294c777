"""Tiles on their way through the copy engine, as Triton text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from kgen.build.tensor_map import TensorMap
from kgen.ir import index as ix
from kgen.ir.index import Var
from kgen.templates.triton.codegen.expression import IndexText
from kgen.templates.triton.codegen.tma_boxes import Boxes, ByEights

# Where a group of warps finds the tile that a part of its epilogue reads.
_PART = "group * PARTS + part"


@dataclass(frozen=True, slots=True)
class Move:
    """One tile: the name of its descriptor, where it begins along each dimension of that, and its sides as they lie in memory.
    A `turned` tile has them the other way round."""

    map: str
    places: tuple[str, ...]
    sides: tuple[str, str]
    turned: bool

    @property
    def begin(self) -> str:
        """Its place, as the copy engine is told."""
        return f"[{', '.join(self.places)}]"

    def load(self) -> str:
        """The tile as the author wants it."""
        text = f"{self.map}.load({self.begin})"
        if len(self.places) > 2:
            text = f"{text}.reshape({', '.join(self.sides)})"
        return f"{text}.T" if self.turned else text

    def store(self, value: str) -> list[str]:
        """Statements that store `value`, a tile of the descriptor's element type."""
        value = f"{value}.T" if self.turned else value
        if len(self.places) > 2:
            value = f"tl.reshape({value}, [{', '.join(['1'] * (len(self.places) - 2) + list(self.sides))}])"
        return [f"{self.map}.store({self.begin}, {value})"]


@dataclass(frozen=True, slots=True)
class Staged:
    """A tile's way in Gluon, where shared memory is written out: an operand's through a ring of stages, a result's through
    memory that it leaves from. `block` are the sides of the descriptor's blocks, `dtype` is its elements' type."""

    move: Move
    block: tuple[int, ...]
    dtype: torch.dtype

    def same_memory(self, other: Staged) -> bool:
        """Whether tiles of both lie alike."""
        return (self.block, self.dtype, self.move.turned) == (other.block, other.dtype, other.move.turned)

    def memory(self, name: str, *more: int) -> str:
        """Makes the memory `name` of a tile, or of as many as the lengths `more` say."""
        lengths = ", ".join(map(str, (*more, *self.block)))
        return f"{name} = gl.allocate_shared_memory({self.move.map}.dtype, [{lengths}], {self.move.map}.layout)"

    def fetch(self, ring: str) -> str:
        return f"ws.fetch({self.move.map}, {self.move.begin}, ready, {ring}, stage, stage)"

    def view(self, ring: str) -> str:
        """A stage's tile as the author wants it."""
        return self._as_tile(f"{ring}.index(stage)")

    def _as_tile(self, text: str) -> str:
        if len(self.block) > 2:
            text = f"{text}.reshape([{', '.join(map(str, self.block[-2:]))}])"
        return f"{text}.permute((1, 0))" if self.move.turned else text

    def ahead(self, memory: str) -> str:
        """Asks for the tile that part `part` of an epilogue reads."""
        return f"ws.fetch({self.move.map}, {self.move.begin}, arrived, {memory}, {_PART}, group)"

    def loaded(self, memory: str, place: str) -> str:
        """The tile at a place of a memory, in registers."""
        return f"{self._as_tile(f'{memory}.index({place})')}.load(layout)"

    def sent(self, memory: str, value: str, pending: str) -> str:
        """A statement that stores `value` through `memory`; `pending`: how many later stores may still be reading theirs."""
        return f"ws.write({self._leaves(value)}, {memory}, {pending})"

    def sent_in_turn(self, memory: str, value: str, first: bool) -> list[str]:
        """The same through memory that groups of warps have in turn; the `first` waits for the other one to have left."""
        waits = ["ws.await_turn(drained, group, count, PROGRAMS)"] if first else []
        return [*waits, f"ws.send({self._leaves(value)}, {memory})"]

    def _leaves(self, value: str) -> str:
        turned = f"gl.permute({value}, (1, 0))" if self.move.turned else value
        return f"{self.move.map}, {self.move.begin}, {turned}"


@dataclass(frozen=True, slots=True)
class Kept:
    """An operand that stays in shared memory, in `chunks` of its rows; `places` are where its matrix begins along what is no
    side of it."""

    way: ByEights
    name: str
    places: tuple[str, ...]
    chunks: int

    def memory(self, name: str) -> str:
        lengths = ", ".join(map(str, (self.chunks, *self.way.map.block)))
        return f"{name} = gl.allocate_shared_memory({self.name}.dtype, [{lengths}], {self.name}.layout)"

    def fetch(self, name: str) -> str:
        """Asks for the chunk `chunk`; one barrier knows of all."""
        begin = ", ".join(self.way.begin(self.places, "chunk"))
        return f"ws.fetch({self.name}, [{begin}], arriving, {name}, chunk, 0)"


@dataclass(slots=True)
class Held:
    """The shared memory that an epilogue's tiles in Gluon come to and leave from. What is read is fetched `ahead`, during the
    products; a result leaves from the memory of a tile like it that has been read by then, if there is one. Where what is read
    comes with an operand's tile, `in_stages`, that memory is given away too early, and groups of warps have another one in
    turn."""

    ahead: bool
    in_stages: bool = False
    reads: dict[Move, Staged] = field(default_factory=dict)
    writes: dict[Move, Staged] = field(default_factory=dict)
    places: dict[Move, Move] = field(default_factory=dict)  # of what is written: what was read where it takes its place

    def load(self, way: Staged) -> str:
        self.reads[way.move] = way
        return way.loaded(self.memory(way.move), "stage" if self.in_stages else _PART)

    def store(self, way: Staged, value: str) -> list[str]:
        first = not self.writes
        self.writes[way.move] = way
        if self.in_stages:
            return way.sent_in_turn(_leaving(way.move), value, first)
        taken = set(self.places.values())
        alike = [move for move, one in self.reads.items() if move not in taken and one.same_memory(way)]
        if not alike:
            return [way.sent(_leaving(way.move), value, "PENDING")]
        self.places[way.move] = alike[0]
        return [way.sent(f"{self.memory(alike[0])}.index({_PART})", value, "63")]

    def memory(self, move: Move) -> str:
        """The name of the memory of what is read. A matrix may be read as it is and transposed, by one descriptor."""
        number = [other for other in self.reads if other.map == move.map].index(move)
        return f"held_{move.map.removeprefix('map_')}" + (f"_again{number}" if number else "")

    @property
    def readings(self) -> dict[str, Staged]:
        """What is read, by the names of its memories."""
        return {self.memory(move): way for move, way in self.reads.items()}

    @property
    def leaving(self) -> dict[str, Staged]:
        """What is written, by the names of the memories that it has to itself."""
        return {_leaving(move): way for move, way in self.writes.items() if move not in self.places}

    def bytes_read(self) -> int:
        """Of one part."""
        return sum(math.prod(way.block) * way.dtype.itemsize for way in self.reads.values())

    def memories(self) -> list[str]:
        """Statements that make what only the multiplying warps touch."""
        own = [way.memory(name) for name, way in self.leaving.items()]
        return [*own, f"PENDING: tl.constexpr = {max(0, len(self.writes) - 1)}"]

    def instead_of(self, first: Held) -> list[str]:
        """The same where it takes turns with `first`, through whose memory goes what is alike."""
        pairs = zip(self.writes, first.writes, strict=True)
        return [f"{_leaving(own)} = {_leaving(other)}" for own, other in pairs if _leaving(own) != _leaving(other)]


def _leaving(move: Move) -> str:
    """The name of the memory of what is written and has no other place."""
    return f"leaving_{move.map.removeprefix('map_')}"


@dataclass(frozen=True, slots=True)
class Way:
    """How one access of an epilogue goes, in Gluon."""

    held: Held
    staged: Staged

    def load(self) -> str:
        return self.held.load(self.staged)

    def store(self, value: str) -> list[str]:
        return self.held.store(self.staged, value)


@dataclass(frozen=True, slots=True)
class Window:
    """A tile as a template says it: its axes in order with their loops, where it begins along each, and the lengths of its
    sides, or the knobs that are; an axis that is no side has one index."""

    axes: tuple[str, ...]
    loops: Mapping[str, tuple[Var, ...]]
    starts: Mapping[str, str]
    sides: Mapping[str, str]


def move(found: Boxes, name: str, tile: Window, text: IndexText, static: bool) -> Move:
    """The way of a tile through the descriptor `name`. Unless all sizes are `static`, places have 64 bits, and are cut to the
    32 that descriptors take."""
    places: list[str] = []
    for axis, loop in zip(found.axes, found.loops, strict=True):
        single = axis not in tile.sides and loop is not None
        place = _digit(tile.starts[axis], tile.loops[axis], loop, text) if single else tile.starts[axis]
        places.append(place if static else f"tl.cast({place}, tl.int32)")
    first, second = found.axes[-2:]
    wanted = tuple(axis for axis in tile.axes if axis in (first, second))
    return Move(name, tuple(places), (tile.sides[first], tile.sides[second]), wanted != (first, second))


def _digit(index: str, loops: tuple[Var, ...], loop: Var | None, text: IndexText) -> str:
    """One loop of a composite axis as a digit of its index."""
    assert loop is not None
    after = ix.product(v.extent for v in loops[loops.index(loop) + 1 :])
    quotient = index if after == 1 else f"({index}) // ({text(after)})"
    return quotient if loop is loops[0] else f"({quotient}) % ({text(loop.extent)})"


def name_of(box: TensorMap, maps: dict[TensorMap, str], stem: str) -> str:
    """The name of a descriptor among a kernel's parameters."""
    if box not in maps:
        maps[box] = f"map_{stem}" + (f"_{len(maps)}" if any(m.buffer == box.buffer for m in maps) else "")
    return maps[box]
