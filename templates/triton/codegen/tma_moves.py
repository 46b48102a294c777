"""TMA loads and stores, as Triton text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir.index import Var
from kgen.rendered.tensor_map import TensorMap
from kgen.templates.triton.codegen.expression import IndexText
from kgen.templates.triton.codegen.tma_layout import TmaLayout


@dataclass(frozen=True, slots=True)
class Move:
    """One tile: the name of its descriptor, where it begins along each dimension of that, and its sides as they lie in memory.
    A `turned` tile has them the other way round."""

    map: str
    origin: tuple[str, ...]
    lengths: tuple[str, str]
    turned: bool

    @property
    def begin(self) -> str:
        """Its coordinates for TMA."""
        return f"[{', '.join(self.origin)}]"

    def load(self) -> str:
        """The tile as the author wants it."""
        text = f"{self.map}.load({self.begin})"
        if len(self.origin) > 2:
            text = f"{text}.reshape({', '.join(self.lengths)})"
        return f"{text}.T" if self.turned else text

    def store(self, value: str) -> list[str]:
        """Statements that store `value`, a tile of the descriptor's element type."""
        value = f"{value}.T" if self.turned else value
        if len(self.origin) > 2:
            value = f"tl.reshape({value}, [{', '.join(['1'] * (len(self.origin) - 2) + list(self.lengths))}])"
        return [f"{self.map}.store({self.begin}, {value})"]


@dataclass(frozen=True, slots=True)
class Window:
    """A tile as a template says it: its axes in order with their loops, where it begins along each, and the lengths of its
    sides, or the knobs that are; an axis that is no side has one index."""

    axes: tuple[str, ...]
    loops: Mapping[str, tuple[Var, ...]]
    starts: Mapping[str, str]
    lengths: Mapping[str, str]


def move(found: TmaLayout, name: str, tile: Window, text: IndexText, static: bool) -> Move:
    """The way of a tile through the descriptor `name`. Unless all sizes are `static`, places have 64 bits, and are cut to the
    32 that descriptors take."""
    origin: list[str] = []
    for axis, loop in zip(found.axes, found.loops, strict=True):
        single = axis not in tile.lengths and loop is not None
        place = digit(tile.starts[axis], tile.loops[axis], loop, text) if single else tile.starts[axis]
        origin.append(place if static else f"tl.cast({place}, tl.int32)")
    first, second = found.axes[-2:]
    wanted = tuple(axis for axis in tile.axes if axis in (first, second))
    return Move(name, tuple(origin), (tile.lengths[first], tile.lengths[second]), wanted != (first, second))


def digit(index: str, loops: tuple[Var, ...], loop: Var | None, text: IndexText) -> str:
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
