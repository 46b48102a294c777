"""Tiles that TMA moves where an axis stands for several loops: of an image's positions, shifted by filter taps.

A tile of a composite axis has so many indices of each loop. In memory that is a box that a tap moves. TMA reads zeros beyond
the ends of a descriptor's tensor, so a condition must leave out just that. This module proves it from the access alone, and
refuses what it cannot prove. All sizes are known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.values import Value
from kgen.rendered.tensor_map import MAX_RANK, MAX_SIDE, MAX_STEP, TensorMap
from kgen.templates.problem import Problem, memoised
from kgen.templates.triton.codegen.launch import ALIGNMENT, aligned
from kgen.templates.triton.codegen.table import TRITON_TYPES
from kgen.templates.triton.codegen.tma_layout import WRITTEN_TYPES, rows_end

# The largest coordinate that a kernel counts in 32 bits, with room for tiles that reach past an end.
MAX_PLACE = 2**30


@dataclass(frozen=True, slots=True)
class BoxOrder:
    """The order in which tiles go through an axis: box by box, `box` indices of each of its loops, the last one fastest. Rows
    count what a box has past the ends of loops, too."""

    loops: tuple[Var, ...]
    box: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Of a box."""
        return math.prod(self.box)

    @property
    def counts(self) -> tuple[int, ...]:
        """How many tiles there are along each loop."""
        return tuple(-(-_known(v.extent) // side) for v, side in zip(self.loops, self.box, strict=True))

    @property
    def filled(self) -> bool:
        """Whether no box reaches past an end."""
        return all(_known(v.extent) % side == 0 for v, side in zip(self.loops, self.box, strict=True))

    def part(self, rows: int) -> tuple[int, ...]:
        """The box that so many neighbouring rows of one are, a power of two."""
        found: list[int] = []
        for side in reversed(self.box):
            found.append(min(side, rows))
            rows //= found[-1]
        return tuple(reversed(found))

    def indices(self, row: str) -> list[str]:
        """The index of each loop at a row, as text."""
        counts, found = self.counts, list[str]()
        for k, side in enumerate(self.box):
            number = _digit(f"({row}) // {self.rows}", math.prod(counts[k + 1 :]), counts[k], k == 0)
            inside = _digit(f"({row}) % {self.rows}", math.prod(self.box[k + 1 :]), side, k == 0)
            found.append(f"({number}) * {side} + {inside}" if side > 1 else f"{number}")
        return found

    def index(self, names: Sequence[str]) -> tuple[str, str]:
        """The axis' index where its loops have these, and the condition that none of them is past its end ("": none is)."""
        extents = [_known(v.extent) for v in self.loops]
        index = names[0]
        for name, extent in zip(names[1:], extents[1:], strict=True):
            index = f"({index}) * {extent} + {name}"
        ends = zip(names, extents, self.box, strict=True)
        return index, " & ".join(f"({name} < {extent})" for name, extent, side in ends if extent % side)


def _digit(row: str, below: int, count: int, first: bool) -> str:
    """One digit of a row: of `count` values where `below` rows have the same; the first digit has no larger one before it."""
    if count == 1:
        return "0"
    shifted = row if below == 1 else f"({row}) // {below}"
    return shifted if first else f"({shifted}) % {count}"


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of a box's tensor. The loop `moves`, of which a tile has several indices, goes along it by `step` elements
    (None: a tile has one place); each of `taps`, loops with one index, moves it by its own step. `start` is the place when all
    are 0."""

    moves: Var | None
    step: int
    taps: tuple[tuple[Var, int], ...]
    start: int
    size: int
    stride: int

    @property
    def steps(self) -> Mapping[Var, int]:
        return {**dict(self.taps), **({} if self.moves is None else {self.moves: self.step})}


@dataclass(frozen=True, slots=True)
class BoxLayout:
    """A tensor in memory as tiles are cut from it: its dimensions, outermost first. The last one is contiguous, `inner` is the
    axis that a tile has along it; the loops of axis `outer` move along the ones before, in order."""

    buffer: str
    dtype: torch.dtype
    outer: str
    inner: str
    dimensions: tuple[Dimension, ...]
    offset: int

    def map(self, box: Mapping[Var, int], columns: int) -> TensorMap | str:
        """The descriptor of tiles with so many indices of each loop, or why there is none."""
        block = (*(1 if side.moves is None else box[side.moves] for side in self.dimensions[:-1]), columns)
        steps = (*(side.step if n > 1 else 1 for side, n in zip(self.dimensions[:-1], block[:-1], strict=True)), 1)
        spans = [n * step for n, step in zip(block[:-1], steps[:-1], strict=True)]
        if any(step > MAX_STEP for step in steps) or any(span > MAX_SIDE for span in spans):
            return f"a box spans {max(spans)} elements, and takes one of {max(steps)}"
        if columns * self.dtype.itemsize < ALIGNMENT:
            return f"rows of a box have less than {ALIGNMENT} bytes"
        kind = TRITON_TYPES[self.dtype].pointer.removeprefix("*")
        sizes, strides = (
            [ix.constant(n) for n in found] for found in zip(*((s.size, s.stride) for s in self.dimensions), strict=True)
        )
        return TensorMap(self.buffer, kind, block, tuple(sizes), tuple(strides), ix.constant(self.offset), steps)

    def origin(self, indices: Mapping[Var, str], column: str) -> list[str]:
        """Where a box begins, as text: `indices` has the index of each loop, and `column` is the first of the inner axis."""
        found = []
        for side in self.dimensions[:-1]:
            moved = [f"({indices[v]})" if step == 1 else f"({indices[v]}) * {step}" for v, step in side.steps.items()]
            start = [str(side.start)] if side.start or not moved else []
            found.append(" + ".join([*moved, *start]))
        return [*found, column]


@dataclass(frozen=True, slots=True)
class BoxAccess:
    """A tile that an epilogue reads or writes by TMA for each tile of a result."""

    buffer: str
    offset: Expr
    written: bool
    layout: BoxLayout


@memoised
def operand_box(problem: Problem, name: str, outer: str, inner: str) -> BoxLayout | str:
    """How TMA fetches tiles of an operand, or why that cannot be done."""
    one, values = problem.inputs[name], (problem.main.value, *problem.main.factors)
    value = values[list(problem.template.operands).index(name)]  # over the problem's loops: an operand may have joined some
    load = value if value.op == "load" else replace(one, value=value).bounded_load
    if load is None or load.attr[2] != one.dtype or (load is value and load.args):
        return f"{name} is computed"
    singles = tuple(v for axis in one.axes if axis not in (outer, inner) for v in problem.loops[axis])
    return _box_layout(
        problem, name, load, _Loops(outer, problem.loops[outer], inner, problem.loops[inner], singles, problem.steps)
    )


@memoised
def epilogue_tiles_of(problem: Problem, result: str) -> tuple[BoxAccess, ...]:
    """What an epilogue reads and writes by TMA, each access once, in the order in which it does."""
    made = {out for s in problem.kernel.statements for out in s.outs}
    found: dict[BoxAccess, None] = {}
    for s in problem.epilogue:
        loads = [load for load in vs.loads(s.roots) if not load.args and load.attr[0] not in made]
        kept = (out for out, stored in zip(s.outs, s.stored, strict=True) if stored and s.kind not in ("partial", "scatter"))
        stores = [vs.load(out, s.store, problem.graph.buffers[out].dtype) for out in kept]
        for load, written in [*((load, False) for load in loads), *((store, True) for store in stores)]:
            if isinstance(layout := _of_epilogue(problem, result, load, written), BoxLayout):
                found[BoxAccess(load.attr[0], load.attr[1][0], written, layout)] = None
    return tuple(found)


def _of_epilogue(problem: Problem, result: str, load: Value, written: bool) -> BoxLayout | str:
    name, _, dtype = load.attr
    if dtype not in WRITTEN_TYPES:
        return f"elements of {name} are {dtype}"
    *rest, outer, inner = problem.template.results[result].axes
    singles = tuple(v for axis in rest for v in problem.loops[axis])
    loops = _Loops(outer, problem.loops[outer], inner, problem.loops[inner], singles, {})
    found = _box_layout(problem, name, load, loops)
    if not written or isinstance(found, str):
        return found
    if any(side.step != 1 for side in found.dimensions):
        return f"{name} is stored with gaps"
    return rows_end(name, dtype, ix.constant(found.dimensions[-1].size)) or found


@dataclass(frozen=True, slots=True)
class _Loops:
    """The loops of an access by what a tile has of them: several indices of the axes `outer` and `inner`, one of the rest.
    By how many elements of a dimension some of them move is in `steps`, where that is not 1."""

    outer: str
    outer_loops: tuple[Var, ...]
    inner: str
    inner_loops: tuple[Var, ...]
    singles: tuple[Var, ...]
    steps: Mapping[Var, int]

    @property
    def all(self) -> tuple[Var, ...]:
        return (*self.outer_loops, *self.singles, *self.inner_loops)


def _box_layout(problem: Problem, name: str, load: Value, loops: _Loops) -> BoxLayout | str:
    """The tensor whose tiles an access reads; `name` is for people."""
    buffer, (offset,), dtype = load.attr
    found = {v: ix.stride_of(offset, v) for v in loops.all}
    strides = {v: n for v, stride in found.items() if stride is not None and (n := stride.as_int()) is not None}
    base = ix.substitute(offset, dict.fromkeys(loops.all, ix.ZERO)).as_int()
    extents = [v.extent.as_int() for v in loops.all]
    if base is None or len(strides) < len(found) or None in extents:
        return f"{name} is no box in memory of a known size"
    if len(loops.inner_loops) != 1 or strides[loops.inner_loops[0]] != 1:
        return f"{name} has no neighbours along one loop of {loops.inner}"
    ranges = _ranges(load.args)
    dims = "its padding is no range of places" if ranges is None else _dimensions(loops, strides, ranges)
    if isinstance(dims, str):
        return f"{name}: {dims}"
    [last] = loops.inner_loops
    made = tuple(side for side, _ in dims)
    start = base + sum(begin for _, begin in dims)
    layout = BoxLayout(
        buffer, dtype, loops.outer, loops.inner, (*made, Dimension(None, 1, (), 0, _known(last.extent), 1)), start
    )
    return layout if (why := _refused(problem, name, layout)) is None else why


def _refused(problem: Problem, name: str, layout: BoxLayout) -> str | None:
    """Why the hardware has no such tensor, or why it would read what the access does not."""
    size, buffer = layout.dtype.itemsize, problem.graph.buffers[layout.buffer]
    if len(layout.dimensions) > MAX_RANK:
        return f"{name} has more than {MAX_RANK} dimensions"
    if not aligned(buffer) or layout.offset * size % ALIGNMENT:
        return f"{name} does not begin at a multiple of {ALIGNMENT} bytes"
    if any(side.stride * size % ALIGNMENT for side in layout.dimensions[:-1]):
        return f"rows of {name} do not begin at multiples of {ALIGNMENT} bytes"
    if any(side.size * max(side.steps.values(), default=1) > MAX_PLACE for side in layout.dimensions):
        return f"{name} is too long for a descriptor"
    last = layout.offset + sum((side.size - 1) * side.stride for side in layout.dimensions)
    if layout.offset < 0 or last >= _elements(buffer.sizes, buffer.strides):
        return f"tiles of {name} reach past what it is read from"
    return None


def _elements(sizes: Sequence[Expr], strides: Sequence[Expr] | None) -> int:
    """Elements from the first one of a buffer to behind the last; 0 where that is not known."""
    every = [one.as_int() for one in (*sizes, *(ix.contiguous_strides(sizes) if strides is None else strides))]
    if any(one is None or one < 0 for one in every) or 0 in every[: len(sizes)]:
        return 0
    numbers = [one for one in every if one is not None]
    return 1 + sum((n - 1) * stride for n, stride in zip(numbers[: len(sizes)], numbers[len(sizes) :], strict=True))


@dataclass(frozen=True, slots=True)
class _Range:
    """From `low` up to below `high` a sum of loops has to be, whose factors have no common one; None: no matter how small, or
    large."""

    sum: Expr
    low: int | None
    high: int | None


def _ranges(conditions: Iterable[Value]) -> list[_Range] | None:
    """The ranges that conditions are, all of which hold; None where one of them is something else."""
    todo, found = list(conditions), list[_Range]()
    while todo:
        one = todo.pop()
        below = one.args[0] if one.op == "not" else one
        if one.op == "and":
            todo += one.args
        elif below.op == "lt" and (below.args[0].op, below.args[1].op) == ("index", "const"):
            sum_below = _sum_below(below.args[0].attr, int(below.args[1].attr))
            if sum_below is None:
                return None
            total, end = sum_below
            found.append(_Range(total, None, end) if below is one else _Range(total, end, None))
        else:
            return None
    return found


def _sum_below(expr: Expr, end: int) -> tuple[Expr, int] | None:
    """A sum of loops without a common factor, and the number that it is below just where an expression is below `end`; None
    where the expression is no such sum."""
    loops = [v for v in ix.free_atoms(expr) if isinstance(v, Var)]
    strides = [ix.stride_of(expr, v) for v in loops]
    steps = {v: s.as_int() or 0 for v, s in zip(loops, strides, strict=True) if s is not None}
    rest = expr - _sum(steps)
    constant, common = rest.as_int(), math.gcd(*steps.values())
    if constant is None or not common or min(steps.values()) <= 0:
        return None
    return _sum({v: step // common for v, step in steps.items()}), -(-(end - constant) // common)


def _sum(steps: Mapping[Var, int]) -> Expr:
    total = ix.ZERO
    for v, step in steps.items():
        total = total + v.expr() * step
    return total


def _dimensions(loops: _Loops, strides: Mapping[Var, int], ranges: list[_Range]) -> list[tuple[Dimension, int]] | str:
    """The dimensions but for the last one, each with the elements from where the access begins to its first place; or why loops
    and ranges are none."""
    by_unit: dict[int, dict[Var, int]] = {}
    for v in (*loops.outer_loops, *loops.singles):
        step = loops.steps.get(v, 1)
        if v in loops.singles and strides[v] == 0:
            continue
        if strides[v] <= 0 or step <= 0 or strides[v] % step:
            return "its places go backwards, or stay where they are"
        by_unit.setdefault(strides[v] // step, {})[v] = step
    found = []
    for unit, steps in by_unit.items():
        moving = [v for v in steps if v in loops.outer_loops]
        common = math.gcd(*steps.values())  # places in between are nowhere
        steps = {v: step // common for v, step in steps.items()}
        total = _sum(steps)
        own = [one for one in ranges if one.sum is total]
        if len(moving) > 1:
            return "two of its loops go along one dimension"
        ranges = [one for one in ranges if one.sum is not total]
        found.append(_dimension(moving, steps, unit * common, own))
    if ranges:
        return "its padding depends on more than a place along one dimension"
    if any(side.size <= 0 for side, _ in found):
        return "it is all padding"
    order = [None, *loops.outer_loops]
    return sorted(found, key=lambda one: order.index(one[0].moves))


def _dimension(moving: Sequence[Var], steps: Mapping[Var, int], unit: int, ranges: Sequence[_Range]) -> tuple[Dimension, int]:
    """A dimension along which loops move by `steps` units, and the elements from 0 to its first place."""
    end = 1 + sum(step * (_known(v.extent) - 1) for v, step in steps.items())
    low = max([0, *(one.low for one in ranges if one.low is not None)])
    high = min([end, *(one.high for one in ranges if one.high is not None)])
    taps = tuple((v, step) for v, step in steps.items() if v not in moving)
    moves = moving[0] if moving else None
    return Dimension(moves, 1 if moves is None else steps[moves], taps, -low, high - low, unit), low * unit


def _known(size: Expr) -> int:
    found = size.as_int()
    assert found is not None
    return found


def powers(most: int) -> tuple[int, ...]:
    """1, 2, 4, and so on, up to `most`."""
    return tuple(1 << k for k in range(most.bit_length()))
