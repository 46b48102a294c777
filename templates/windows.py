"""Windows of a tensor: loops of the result and loops of the sum that walk through one dimension together, as the positions and
the taps of a convolution do. Offsets are linear by now; which dimension a loop walks through follows from the strides.

A wrong guess would be no error: a template's slots work out addresses from loops, whatever axes these are called by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value

# The largest stride or dilation that is looked for where sizes are symbols.
MOST_STEPS = 16


@dataclass(frozen=True, slots=True)
class Window:
    """Loops of the result, loops of the sum, and by how many elements of the dimension each of them moves."""

    positions: tuple[Var, ...]
    taps: tuple[Var, ...]
    steps: Mapping[Var, int]


def windows_of(value: Value, graph: ir.Graph, outer: Sequence[Var], inner: Sequence[Var]) -> list[Window]:
    """The windows through which a value reads its tensor, by the order of its dimensions."""
    found = (_of_load(load, graph, outer, inner) for load in vs.loads([value]) if load.attr[0] in graph.buffers)
    return next((windows for windows in found if windows), [])


def _of_load(load: Value, graph: ir.Graph, outer: Sequence[Var], inner: Sequence[Var]) -> list[Window]:
    offset, buffer = load.attr[1][0], graph.buffers[load.attr[0]]
    by_dimension: dict[int, dict[Var, int]] = {}
    for v in (*outer, *inner):
        place = _dimension_and_step(ix.stride_of(offset, v), buffer)
        if place is not None:
            by_dimension.setdefault(place[0], {})[v] = place[1]
    windows = []
    for _, steps in sorted(by_dimension.items()):
        positions, taps = (tuple(v for v in loops if v in steps) for loops in (outer, inner))
        if positions and taps:
            windows.append(Window(positions, taps, steps))
    return windows


def _dimension_and_step(stride: Expr | None, buffer: ir.Buffer) -> tuple[int, int] | None:
    """The dimension that a loop walks through, and its steps: the fewest that make its stride."""
    if stride is None or not stride.terms or buffer.strides is None:
        return None
    steps = [(_multiple(stride, own), k) for k, own in enumerate(buffer.strides) if buffer.sizes[k] != 1]
    fewest = min(((count, k) for count, k in steps if count is not None), default=None)
    return None if fewest is None else (fewest[1], fewest[0])


def _multiple(stride: Expr, unit: Expr) -> int | None:
    """How many times a stride has another one in it."""
    whole, part = stride.as_int(), unit.as_int()
    if whole is not None and part:
        return whole // part if whole % part == 0 and whole // part > 0 else None
    return next((count for count in range(1, MOST_STEPS + 1) if unit * count is stride), None) if unit.terms else None


@dataclass(frozen=True, slots=True)
class Grid:
    """The coordinates along a dimension that a position and a tap come to: ``position * step + tap * dilation``. Steps that
    have a common factor are divided by it."""

    position: Var
    tap: Var
    step: int
    dilation: int

    @property
    def coordinate(self) -> Var:
        """The loop over all coordinates, in the order of the dimension."""
        last = (self.position.extent - 1) * self.step + (self.tap.extent - 1) * self.dilation
        return ix.var(f"{self.position.name}_coordinate", last + 1)


def grid_of(position: Var, tap: Var, steps: Mapping[Var, int]) -> Grid:
    """The grid of a window with one loop each."""
    step, dilation = steps.get(position, 1), steps.get(tap, 1)
    common = math.gcd(step, dilation)
    return Grid(position, tap, step // common, dilation // common)


def over_coordinates(value: Value, grid: Grid) -> Value | None:
    """What a value is at each coordinate of a grid; None where it depends on the position and the tap in another way."""
    if 1 not in (grid.step, grid.dilation):
        return None
    coordinate, position, tap = grid.coordinate.expr(), grid.position.expr(), grid.tap.expr()
    left: Var
    mapping: dict[Atom, Expr]
    if grid.step == 1:
        left, mapping = grid.tap, {grid.position: coordinate - tap * grid.dilation}
    else:
        left, mapping = grid.position, {grid.tap: coordinate - position * grid.step}
    # each coordinate is one of some position and tap: what no longer names either of these holds at all of them
    found = vs.substitute(value, mapping)
    return None if left in found.variables() else found
