"""The gradient of linear resampling: each element asks the results that it is a share of, in no more than a window.

    y[o] = (1 - l[o]) * x[i[o]] + l[o] * x[i[o] + 1]        with i[o] + l[o] = s[o], the place of a result among the elements
    dx[i] = sum over o of max(0, 1 - |s[o] - i|) * dy[o]    over the few o with s[o] in (i - 1, i + 1)

So no additions collide. Dimensions follow each other where a window of all of them is large: windows overlap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.closed_form import MAX_TABLE
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import gather_source
from kgen.lowering.tensor import Tensor, at, convert
from kgen.lowering.windows import MAX_UNROLLED, inside

# Runs of equal weights along a dimension that are told apart by comparisons: more would take longer than to compute weights.
MOST_RUNS = 3


@dataclass(frozen=True, slots=True)
class _Line:
    """One dimension of a resampling: `out` results of `extent` elements, at ``positions``. An element is part of no more than
    `window` results, from number ``(i * rise + shift) // run`` on. A result is at ``(o + half) * scale - half``."""

    extent: int
    out: int
    scale: float
    half: float
    positions: tuple[float, ...]
    rise: int
    run: int
    shift: int
    window: int

    @property
    def is_same(self) -> bool:
        return self.positions == tuple(range(self.extent))

    def start(self, i: Expr) -> Expr:
        return ix.floordiv(i * self.rise + self.shift, ix.as_expr(self.run))

    def place(self, o: Expr, dtype: torch.dtype) -> Value:
        def half(op: str, value: Value) -> Value:
            return vs.call(op, value, vs.const(self.half, dtype)) if self.half else value

        place = half("sub", vs.call("mul", half("add", vs.index_value(o, dtype)), vs.const(self.scale, dtype)))
        return vs.call("minimum", vs.call("maximum", place, vs.const(0, dtype)), vs.const(self.extent - 1, dtype))


def backward(b: Builder, grad: Tensor, extents: Sequence[int], align_corners: bool, scales: Sequence[float]) -> Tensor:
    wide, rank = ops.compute_dtype(grad.dtype), len(extents)
    sizes = [size.as_int() for size in grad.sizes[-rank:]]
    lines = [_line(n, m, align_corners, scale, wide) for n, m, scale in zip(extents, sizes, scales, strict=True)]
    return convert(_gathered(b, convert(gather_source(b, grad), wide), lines), grad.dtype)


def _line(extent: int, out: int | None, align_corners: bool, scale: float, dtype: torch.dtype) -> _Line:
    if not extent or not out or max(extent, out) > MAX_TABLE:
        raise Refused("linear resampling of a symbolic size, or of nothing")
    if align_corners:
        half, scale = 0.0, (extent - 1.0) / (out - 1.0) if out > 1 else 0.0
    else:
        half, scale = 0.5, 1.0 / scale if scale else extent / out
    positions = ((torch.arange(out, dtype=dtype) + half) * scale - half).clamp(0, extent - 1).tolist()
    first, last = _spans(positions)
    rise, run = _slope(extent, out, align_corners)
    shift = min((low + 1) * run - 1 - i * rise for i, low in first.items())
    window = max(high - (i * rise + shift) // run for i, high in last.items()) + 1
    return _Line(extent, out, scale, half, tuple(positions), rise, run, shift, window)


def _spans(positions: Sequence[float]) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last result of each element that has any."""
    first, last = dict[int, int](), dict[int, int]()
    for o, place in enumerate(positions):
        for i in (math.floor(place), math.ceil(place)):
            first.setdefault(i, o)
            last[i] = o
    return first, last


def _slope(extent: int, out: int, align_corners: bool) -> tuple[int, int]:
    """By how many results the window of an element moves in how many elements."""
    rise, run = (out - 1, extent - 1) if align_corners and extent > 1 else (out, extent)
    common = math.gcd(rise, run) or 1
    return rise // common, run // common


def _gathered(b: Builder, x: Tensor, lines: Sequence[_Line]) -> Tensor:
    """`x`, the gradients of results, as those of elements."""
    moved = [n for n, line in enumerate(lines) if not line.is_same]
    if math.prod(lines[n].window for n in moved) <= MAX_UNROLLED:
        return _summed(b, x, lines, moved)
    # the dimension that shrinks most is the first one: what is stored before it is the smaller
    for n in sorted(moved, key=lambda n: (lines[n].extent / lines[n].out, n)):
        x = _summed(b, gather_source(b, x), lines, [n])
    return x


def _summed(b: Builder, x: Tensor, lines: Sequence[_Line], dims: Sequence[int]) -> Tensor:
    """`x`, whose last dimensions are those of the lines, with each element's results along `dims` added up."""
    lead = x.rank - len(lines)
    sizes = list(x.sizes)
    for n in dims:
        sizes[lead + n] = ix.as_expr(lines[n].extent)
    windows = [lines[n].window for n in dims]
    if math.prod(windows) <= MAX_UNROLLED:
        out = Tensor(tuple(sizes), x.dtype, x.device, x.value)
        total: Value | None = None
        for taps in itertools.product(*map(range, windows)):
            term = _term(x, out.indices, lines, dict(zip(dims, taps, strict=True)))
            total = term if total is None else vs.call("add", total, term)
        assert total is not None
        return out.with_value(total)
    wide = Tensor((*sizes, *map(ix.as_expr, windows)), x.dtype, x.device, x.value)
    j = wide.indices
    term = _term(x, j[: len(sizes)], lines, dict(zip(dims, j[len(sizes) :], strict=True)))
    return b.reduce("sum", wide.with_value(term), range(len(sizes), wide.rank), dtypes=[x.dtype])[0]


def _term(x: Tensor, j: Sequence[Expr], lines: Sequence[_Line], taps: Mapping[int, Expr | int]) -> Value:
    """What one result of each element's window gives it."""
    lead = x.rank - len(lines)
    place = list(j)
    for n, k in taps.items():
        place[lead + n] = lines[n].start(j[lead + n]) + k
    real = inside([place[lead + n] for n in taps], [x.sizes[lead + n] for n in taps])
    term = vs.masked(real, at(x, place), vs.const(0, x.dtype))
    for n, k in taps.items():
        term = vs.call("mul", term, _weight(lines[n], j[lead + n], k, x.dtype))
    return term


def _weight(line: _Line, i: Expr, k: Expr | int, dtype: torch.dtype) -> Value:
    runs = _runs(line, k) if isinstance(k, int) else []
    if not 0 < len(runs) <= MOST_RUNS:
        distance = vs.call("abs", vs.call("sub", line.place(line.start(i) + k, dtype), vs.index_value(i, dtype)))
        return vs.call("maximum", vs.call("sub", vs.const(1, dtype), distance), vs.const(0, dtype))
    (_, weight), *rest = reversed(runs)
    made = vs.const(weight, dtype)
    for end, weight in rest:
        made = vs.where(vs.compare("lt", i, ix.constant(end)), vs.const(weight, dtype), made)
    return made


def _runs(line: _Line, k: int) -> list[tuple[int, float]]:
    """(the element behind it, the weight) of each run of equal weights of the k-th result of windows. Of results that do not
    exist nobody asks the weight."""
    runs: list[tuple[int, float]] = []
    for i in range(line.extent):
        o = (i * line.rise + line.shift) // line.run + k
        if not 0 <= o < line.out:
            continue
        weight = max(0.0, 1.0 - abs(line.positions[o] - i))
        if runs and runs[-1][1] == weight:
            runs.pop()
        runs.append((i + 1, weight))
    return runs


RULES: dict[str, Callable[..., Any]] = {"kgen.resample_backward": backward}
