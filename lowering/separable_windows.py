"""Large windows that overlap, one dimension after the other: the sum of k x k elements is that of k sums of k elements each,
which neighbouring windows share. Maxima as well.

before   y[i, j] = sum over a, b of x[i + a, j + b]                                       k * k loads of an element
after    t[i, j] = sum over b of x[i, j + b];   y[i, j] = sum over a of t[i + a, j]       2 * k, a store and a load

Gradients of sums are the same the other way: an element asks the windows that contain it along one dimension, then the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.few_terms import combined
from kgen.lowering.indexing import gather_source
from kgen.lowering.tensor import Tensor, at
from kgen.lowering.windows import MAX_UNROLLED, Windows, inside

# Loads of a window that take as long as storing an element and loading it again: 5 x 5 in one kernel took 142 to 168 us, 7 x 7
# in two 57 to 71 (H200, 16x64x112x112).
STORED = 8
# An element of a window, or a window that contains an element: its position along a dimension, and whether it is real.
Tap = Callable[[Expr, Expr], tuple[Expr, Value]]


def is_separable(windows: Windows) -> bool:
    """Whether windows take less time one dimension after the other."""
    return math.prod(windows.size) > _cheapest(windows)[0]


def separate_windows(b: Builder, op: str, x: Tensor, windows: Windows) -> Tensor:
    """The "sum" or "max" of each window, of shape ``(*x.sizes[:-rank], *windows.out)`` and of the dtype of `x`. What is stored
    between dimensions has that dtype as well."""
    for n in _cheapest(windows)[1]:
        x = _combined(b, op, x, x.rank - windows.rank + n, windows.out[n], windows.size[n], _taps(windows, n))
    return x


def _cheapest(windows: Windows) -> tuple[int, tuple[int, ...]]:
    """(loads of an element of the result, the order of the dimensions) at the least cost."""
    return min((_cost(order, windows), order) for order in itertools.permutations(_windowed(windows)))


def _windowed(windows: Windows) -> list[int]:
    """The dimensions along which a window is more than its element."""
    rows = [n for n, size in enumerate(windows.size) if size > 1 or windows.stride[n] > 1 or windows.padding[n]]
    return rows or [windows.rank - 1]


def _cost(order: Sequence[int], windows: Windows) -> int:
    """A dimension that is still to come has `stride` times as many elements as there are windows."""
    cost = 0
    for place, n in enumerate(order):
        elements = math.prod(windows.stride[later] for later in order[place + 1 :])
        cost += elements * (windows.size[n] + (STORED if place + 1 < len(order) else 0))
    return cost


def _taps(windows: Windows, n: int) -> Tap:
    def tap(window: Expr, number: Expr) -> tuple[Expr, Value]:
        place = window * windows.stride[n] - windows.padding[n] + number * windows.dilation[n]
        return place, inside((place,), (windows.extents[n],))

    return tap


def gathered_sums(b: Builder, shares: Tensor, windows: Windows) -> Tensor:
    """What the windows that contain an element give it, in all; `shares` is what a window gives each of its elements. Windows
    have no dilation. The result has the shape `windows.sizes`."""
    covering = windows.covering()
    # the dimension that grows most is the last one: what is stored before it is small
    for n in sorted(_windowed(windows), key=lambda n: windows.stride[n]):
        shares = _combined(
            b, "sum", shares, shares.rank - windows.rank + n, windows.extents[n], covering[n], _containing(windows, n)
        )
    return shares


def _containing(windows: Windows, n: int) -> Tap:
    """The windows that contain an element, the last one first."""
    size, stride, padding = windows.size[n], windows.stride[n], windows.padding[n]

    def tap(element: Expr, number: Expr) -> tuple[Expr, Value]:
        window = ix.floordiv(element + padding, ix.as_expr(stride)) - number
        real = inside((window,), (windows.out[n],))
        return window, vs.call("and", real, vs.compare("lt", element + padding - window * stride, ix.as_expr(size)))

    return tap


def _combined(b: Builder, op: str, x: Tensor, dim: int, extent: Expr, terms: int, tap: Tap) -> Tensor:
    """`x` with `extent` elements along a dimension, each `terms` elements of `x` combined."""
    x = gather_source(b, x)
    sizes = (*x.sizes[:dim], extent, *x.sizes[dim + 1 :])
    wide = Tensor((*sizes, ix.as_expr(terms)), x.dtype, x.device, x.value)
    *j, number = wide.indices
    place, real = tap(j[dim], number)
    term = vs.masked(real, at(x, [*j[:dim], place, *j[dim + 1 :]]), vs.const(ops.identity(op, x.dtype), x.dtype))
    combine = ops.REDUCTIONS[op].combine
    if terms > MAX_UNROLLED or combine is None:
        return b.reduce(op, wide.with_value(term), [len(sizes)], dtypes=[x.dtype])[0]
    return Tensor(sizes, x.dtype, x.device, combined(combine, wide.axes[-1:], term))
