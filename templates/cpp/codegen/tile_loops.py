"""The walks over a rectangle of results, in a thread's cache, in which an epilogue is done.

Most epilogues are one walk, row by row. Partial reductions (`Statement`) join it where they can: those along the rows
as a sum in registers, those along the columns as one number for each column in the thread's memory. A walk of its own is left
for what needs the result of another reduction, for runs shorter than the rectangle, and for means and places of columns. Each
walk computes what it needs of the results again: an element that is not stored is in no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.plan import Statement
from kgen.ir.values import Value
from kgen.templates.contract import Config
from kgen.templates.problem import Problem


@dataclass(frozen=True, slots=True)
class Cut:
    """A side of a walk's rectangles that is shorter than the tile's: points along an axis."""

    axis: str
    length: int


@dataclass(frozen=True, slots=True)
class TileLoop:
    """Statements of one walk: points, folds across the rows, and folds down the columns. One with a `cut` goes over smaller
    rectangles, a `vertical` one down the columns."""

    points: tuple[Statement, ...]
    across: tuple[Statement, ...]
    down: tuple[Statement, ...]
    cut: Cut | None
    vertical: bool


def tile_loops_of(problem: Problem, config: Config, fast: str) -> list[TileLoop]:
    """The walks of a problem's epilogue in order; `fast` is the axis of the rows."""
    found: dict[tuple[int, bool, Cut | None], list[Statement]] = {}
    depth: dict[str, int] = {}  # of a reduction's results: how many walks have to be complete before they are read
    for s in _inlined(problem.epilogue):
        level = max((depth[load.attr[0]] for load in vs.loads(s.roots) if load.attr[0] in depth), default=0)
        cut, vertical = None, False
        if s.kind == "partial":
            depth |= dict.fromkeys(s.outs, level + 1)
            part = problem.part(s)
            cut = Cut(part.axis, s.block) if s.block < problem.side(part.axis, config) else None
            vertical = part.axis != fast and ops.REDUCTIONS[s.op].combine is None
        found.setdefault((level, vertical, cut), []).append(s)
    return [_tile_loop(problem, found[key], key[2], key[1], fast) for key in sorted(found, key=lambda key: key[0])]


def _tile_loop(problem: Problem, statements: list[Statement], cut: Cut | None, vertical: bool, fast: str) -> TileLoop:
    folds = [s for s in statements if s.kind == "partial"]
    across = tuple(s for s in folds if problem.part(s).axis == fast)
    down = tuple(s for s in folds if problem.part(s).axis != fast)
    return TileLoop(tuple(s for s in statements if s.kind != "partial"), across, down, cut, vertical)


def _inlined(epilogue: Iterable[Statement]) -> tuple[Statement, ...]:
    """What is stored or folded, in terms of the sums of products and of memory alone; without reductions, all as it is."""
    epilogue = tuple(epilogue)
    if all(s.kind != "partial" for s in epilogue):
        return epilogue
    made: dict[str, Value] = {}
    found: list[Statement] = []

    def value_of(load: Value) -> Value | None:
        return made.get(load.attr[0])

    for one in epilogue:
        s = with_loads(one, value_of)
        if s.kind == "pointwise":
            made.update(dict.fromkeys(s.outs, s.value))
        if s.kind != "pointwise" or any(s.stored):
            found.append(s)
    return tuple(found)


def with_loads(s: Statement, replaced: Callable[[Value], Value | None]) -> Statement:
    """The statement with other values in place of some loads."""
    value, *rest = vs.replace_loads([s.value, *([] if s.mask is None else [s.mask])], replaced)
    store = tuple(ix.substitute(e, {}, {}, lambda v: vs.replace_loads([v], replaced)[0]) for e in s.store)
    return replace(s, value=value, mask=rest[0] if rest else None, store=store)


def joined(s: Statement, total: Value) -> Value:
    """`total`, in the type in which the reduction is carried on, with one more value."""
    combine = ops.REDUCTIONS[s.op].combine
    assert combine is not None
    value = s.value if s.value.dtype == total.dtype else vs.cast(s.value, total.dtype)
    return vs.call(combine, total, value)
