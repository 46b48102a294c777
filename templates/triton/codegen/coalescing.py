"""Which axis of a tile neighbouring threads should go along, where Triton cannot tell.

Triton lets neighbouring threads read along the axis where it sees that addresses follow each other. It sees none in an index
``i % 27``: 27 has no factor 2. Nor does it in one that jumps from each element to the next one. Then Triton 3.6 takes the first
axis, and 3.7 the last one. Where that is the wrong one, each thread of a warp reads another line of the cache, and a load
takes up to 32 times as long (H100, 2026-11-27, bench.untuned: a matmul that stores its result in 729 columns of each image,
77 us; a transposed convolution with weights in steps of 4, 133 us where 27 had been expected).

A hint says what Triton cannot see: that pairs along an axis are neighbours. It is not true at the end of each run, and false
for steps of more than one element. So a second hint takes back what Triton could make of it: a multiple of one element may
begin anywhere, so no load is wider than one. Both are there for the order of the threads alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from kgen.device import LINE
from kgen.ir import index as ix
from kgen.ir.index import Expr, Sizes, Var


def hinted(text: str, lengths: Mapping[str, bool]) -> str:
    """The text of offsets with the hint that they are neighbours along the axes that are true."""
    pairs = ", ".join("2" if wanted else "1" for wanted in lengths.values())
    ones = ", ".join("1" for _ in lengths)
    return f"tl.max_contiguous(tl.multiple_of({text}, [{ones}]), [{pairs}])"


def nearest_axis(offset: Expr, axes: Mapping[str, tuple[Var, ...]], itemsize: int, sizes: Sizes) -> str | None:
    """The axis along which elements at `offset` are nearest to each other, of the `axes` of a tile with their loops, the
    fastest one last. None where Triton sees an axis without gaps by itself, and where no axis shares a line of the cache."""
    steps: dict[str, int] = {}
    for axis, loops in axes.items():
        step = _step(offset, loops[-1], sizes)
        if step == 1 and _is_seen(offset, loops):
            return None
        if step:
            steps[axis] = step
    nearest = min(steps, key=lambda axis: steps[axis], default=None)
    return nearest if nearest is not None and steps[nearest] * itemsize < LINE else None


def _step(offset: Expr, loop: Var, sizes: Sizes) -> int:
    """How far apart neighbours along a loop are, at most points where that varies; 0 where data, or functions other than
    division, decide."""
    stride = ix.stride_of(offset, loop)
    if stride is not None:
        return abs(sizes.of(stride))
    if _divisors(offset) is None:
        return 0
    length = sizes.of(loop.extent)
    return median_low(
        [abs(_at(offset, loop, k + 1, sizes) - _at(offset, loop, k, sizes)) for k in range(0, length, length // 8 + 1)]
    )


def _at(offset: Expr, loop: Var, place: int, sizes: Sizes) -> int:
    return sizes.of(ix.substitute(offset, {loop: ix.constant(place)}))


def _is_seen(offset: Expr, loops: tuple[Var, ...]) -> bool:
    """Whether Triton sees that elements of the last loop follow each other: no remainder by an odd number is in between. Of
    numbers that only the call knows nothing is hinted."""
    between = [] if len(loops) == 1 else [loops[-1].extent]
    if ix.stride_of(offset, loops[-1]) is None:
        between += _divisors(offset) or []
    lengths = [extent.as_int() for extent in between]
    return all(length is None or length % 2 == 0 for length in lengths)


def _divisors(expr: Expr) -> list[Expr] | None:
    """What an index is divided by; None where it also depends on data, or on functions of other kinds."""
    found: list[Expr] = []
    for terms, _ in expr.terms:
        for atom in terms:
            if isinstance(atom, ix.Indirect | ix.Apply):
                return None
            inner = _divisors(atom.num) if isinstance(atom, ix.FloorDiv | ix.Mod) else []
            if inner is None:
                return None
            found += [*inner, atom.den] if isinstance(atom, ix.FloorDiv | ix.Mod) else []
    return found
