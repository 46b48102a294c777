"""Handles that the author of a template in Gluon passes around: shared memory, and the barriers that guard it.

A slot at the head of the Jinja file gives a handle, ``{% set left = A.ring("left", STAGES) %}``. The kernel's functions take it
as a parameter, and its methods are the statements around it: ``{{ left.make() }}``, ``{{ left.fetch("b", "m0", "k0",
stage="stage", ready=ready.at("stage")) }}``, ``{{ left.view("stage") }}``. Text that is written here names what a handle or a
call was given, parameters of the kernel, and functions of `templates/triton/device/warp_groups.py`: no other variable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from kgen.ir.index import Expr
from kgen.templates.triton.codegen.tma_layout import ByEights
from kgen.templates.triton.codegen.tma_moves import Move

# Stores that may be under way when no memory has to be waited for: more than a kernel ever has.
ANY_PENDING = 63


@dataclass(frozen=True, slots=True)
class Barrier:
    """One of several barriers: their name, and which of them, as text."""

    barriers: str
    index: str


@dataclass(frozen=True, slots=True)
class Barriers:
    """So many barriers, each of which `arrivals` complete. `made` is told their name and number where they
    are made."""

    name: str
    count: int
    arrivals: int = 1
    made: Callable[[str, int], None] = field(default=lambda _name, _count: None, compare=False)

    def make(self) -> str:
        self.made(self.name, self.count)
        return f"{self.name} = ws.barriers({self.count}, {self.arrivals})"

    def at(self, index: str) -> Barrier:
        return Barrier(self.name, index)


@dataclass(frozen=True, slots=True)
class BoxedTile:
    """Tiles that TMA moves: the name of their descriptor, the lengths of its blocks, the type of its elements, whether they
    lie the other way round in memory, and the one that begins at some indices."""

    descriptor: str
    block: tuple[int, ...]
    dtype: torch.dtype
    turned: bool
    move: Callable[[Sequence[str]], Move]

    @property
    def bytes(self) -> int:
        return math.prod(self.block) * self.dtype.itemsize

    def shares_memory(self, other: BoxedTile) -> bool:
        """Whether a tile of the other kind fits where one of this kind has been."""
        return (self.block, self.dtype, self.turned) == (other.block, other.dtype, other.turned)

    def make(self, name: str, *lengths: int) -> str:
        """Makes shared memory for a tile, or for as many as `lengths` say."""
        shape = ", ".join(map(str, (*lengths, *self.block)))
        return f"{name} = gl.allocate_shared_memory({self.descriptor}.dtype, [{shape}], {self.descriptor}.layout)"

    def view(self, memory: str) -> str:
        """A tile in shared memory as the author wants it."""
        if len(self.block) > 2:
            memory = f"{memory}.reshape([{math.prod(self.block[:-1])}, {self.block[-1]}])"
        return f"{memory}.permute((1, 0))" if self.turned else memory

    def leaving(self, indices: Sequence[str], value: str) -> str:
        """The first arguments of a store of `value`: descriptor, place, and the tile in its layout in memory."""
        turned = f"gl.permute({value}, (1, 0))" if self.turned else value
        return f"{self.descriptor}, {self.move(indices).begin}, {turned}"


@dataclass(frozen=True, slots=True)
class Place:
    """So many bytes of shared memory, as text."""

    text: str
    bytes: int

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ring:
    """Shared memory for `count` tiles of one kind, its stages. Of an operand of a family, `number` says which, `summed` whether
    its elements are added up as well."""

    name: str
    count: int
    tile: BoxedTile
    number: int = 0
    summed: bool = False

    @property
    def bytes(self) -> int:
        """Of one tile."""
        return self.tile.bytes

    def make(self) -> str:
        return self.tile.make(self.name, self.count)

    def fetch(self, *indices: str, stage: str, ready: Barrier) -> str:
        """Asks TMA for the tile that begins at these indices, in a stage; the barrier will know of it."""
        move = self.tile.move(indices)
        return f"ws.fetch({move.map}, {move.begin}, {ready.barriers}, {self.name}, {stage}, {ready.index})"

    def at(self, stage: str) -> str:
        """A stage's memory."""
        return f"{self.name}.index({stage})"

    def place(self, stage: str) -> Place:
        """A stage's memory when nobody needs its tile any more."""
        return Place(self.at(stage), self.bytes)

    def view(self, stage: str) -> str:
        """A stage's tile as the author wants it."""
        return self.tile.view(self.at(stage))


@dataclass(frozen=True, slots=True)
class Kept:
    """Shared memory where all of an operand stays, in `chunks` of its rows that lie as `TmaLayout.by_eights` says; `outer` are
    the places of its matrix along what is no side of it."""

    name: str
    descriptor: str
    chunks: int
    way: ByEights
    itemsize: int
    outer: Callable[[Sequence[str]], Sequence[str]]

    @property
    def bytes(self) -> int:
        """Of all chunks."""
        return self.chunks * math.prod(self.way.map.block) * self.itemsize

    def make(self) -> str:
        lengths = ", ".join(map(str, (self.chunks, *self.way.map.block)))
        return f"{self.name} = gl.allocate_shared_memory({self.descriptor}.dtype, [{lengths}], {self.descriptor}.layout)"

    def fetch(self, *indices: str, chunk: str, ready: Barrier) -> str:
        """Asks TMA for a chunk of the matrix at these indices, those of the axes without a tile."""
        begin = ", ".join(self.way.begin(self.outer(indices), chunk))
        return f"ws.fetch({self.descriptor}, [{begin}], {ready.barriers}, {self.name}, {chunk}, {ready.index})"


@dataclass(frozen=True, slots=True)
class Reads:
    """Shared memory for the tiles that an epilogue reads by TMA, a ring for each; none where they come by pointers.
    `place` is the stage of the tile that is being stored."""

    rings: tuple[Ring, ...]
    place: str = ""

    def __iter__(self) -> Iterator[Ring]:
        return iter(self.rings)

    def __len__(self) -> int:
        return len(self.rings)

    @property
    def bytes(self) -> int:
        """Of one tile of each."""
        return sum(ring.bytes for ring in self.rings)

    def at(self, place: str) -> Reads:
        return replace(self, place=place)


@dataclass(frozen=True, slots=True)
class ColumnRing:
    """Shared memory for `count` rows of so many float32 numbers, one for each column of a tile. `key` is equal for one access
    of several problems, of which `accesses` are a buffer and an offset each; `begin` gives the place of one of a batch's
    columns in the buffer."""

    name: str
    count: int
    length: int
    descriptor: str
    key: tuple[str, str]
    accesses: frozenset[tuple[str, Expr]]
    begin: Callable[[str, str], str]

    @property
    def bytes(self) -> int:
        return self.length * 4

    def make(self) -> str:
        shape = f"[{self.count}, {self.length}]"
        return f"{self.name} = gl.allocate_shared_memory({self.descriptor}.dtype, {shape}, {self.descriptor}.layout)"

    def fetch(self, row: str, column: str, *, stage: str, ready: Barrier) -> str:
        place = self.begin(row, column)
        return f"ws.fetch({self.descriptor}, [{place}], {ready.barriers}, {self.name}, {stage}, {ready.index})"


@dataclass(frozen=True, slots=True)
class Columns:
    """Shared memory for numbers of columns. `place` is the stage of the tile that they belong to, `layout` how threads hold
    the tile."""

    rings: tuple[ColumnRing, ...]
    place: str = ""
    layout: str = ""

    def __iter__(self) -> Iterator[ColumnRing]:
        return iter(self.rings)

    def __len__(self) -> int:
        return len(self.rings)

    @property
    def bytes(self) -> int:
        """Of one tile."""
        return sum(ring.bytes for ring in self.rings)

    def at(self, place: str, layout: str) -> Columns:
        return replace(self, place=place, layout=layout)

    @classmethod
    def of(cls, rings: Iterable[ColumnRing]) -> Columns:
        """Each access once."""
        found: dict[tuple[str, str], ColumnRing] = {}
        for ring in rings:
            first = found.get(ring.key, ring)
            found[ring.key] = replace(first, accesses=first.accesses | ring.accesses)
        return cls(tuple(found.values()))

    def joined(self, other: Columns) -> Columns:
        """What two problems read, each access once."""
        return Columns.of([*self.rings, *other.rings])

    def load(self, buffer: str, offset: Expr) -> str | None:
        """The text of the numbers that are read there, as a row; None where they did not come by TMA."""
        ring = next((ring for ring in self.rings if (buffer, offset) in ring.accesses), None)
        if ring is None or not self.layout:
            return None
        return f"{ring.name}.index({self.place}).load(gl.SliceLayout(0, {self.layout}))[None, :]"


@dataclass(frozen=True, slots=True)
class Leaving:
    """Shared memory for one tile on its way to a result: its own, or that `instead` of which it may be."""

    name: str
    tile: BoxedTile
    instead: str = ""

    def make(self) -> str:
        if not self.instead:
            return self.tile.make(self.name)
        block = ", ".join(map(str, self.tile.block))
        return (
            f"{self.name} = {self.instead}._reinterpret({self.tile.descriptor}.dtype, [{block}], {self.tile.descriptor}.layout)"
        )


@dataclass(frozen=True, slots=True)
class Writes:
    """Shared memory that an epilogue's results leave from by TMA: for each of them, in order, memory of its own, or the
    ring of what is read where it takes the place. With `turn`, a statement that waits for it, warp groups have the memory
    in turn."""

    homes: tuple[Leaving | Ring, ...] = ()
    turn: str = ""

    def __iter__(self) -> Iterator[Leaving]:
        """What has memory of its own."""
        return (home for home in self.homes if isinstance(home, Leaving))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def in_turn(self, wait: str) -> Writes:
        """The same for warp groups that have it in turn: the statement `wait` stands in front of the first store. Each
        group waits for its stores to have left, and passes the turn, by statements of the author's."""
        if any(isinstance(home, Ring) for home in self.homes):
            raise ValueError("results that warp groups store in turn cannot take the place of what is read")
        return replace(self, turn=wait)

    def store(self, number: int, leaving: str, place: str) -> list[str]:
        """Statements that store the tile `number`, of which `leaving` are the first arguments. `place` is that of the tiles
        that are read."""
        home = self.homes[number]
        if self.turn:
            return [*([self.turn] if number == 0 else []), f"ws.send({leaving}, {home.name})"]
        if isinstance(home, Ring):
            return [f"ws.write({leaving}, {home.at(place)}, {ANY_PENDING})"]
        return [f"ws.write({leaving}, {home.name}, {len(self.homes) - 1})"]


def names(handles: Iterable[object]) -> list[str]:
    """The names of handles, of what they contain, and of other variables, as parameters of a function; None is left out."""
    found: list[str] = []
    for one in handles:
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, Barriers | Ring | Kept | Leaving | ColumnRing):
            found.append(one.name)
        elif isinstance(one, Iterable):
            found += names(one)
        elif one is not None:
            found.append(str(one))
    return found
