"""Windows over the last dimensions of a tensor; and gradients of windows that are views: what an element gets from all windows
that hold it.

torch's own decomposition adds the windows up in memory, at indices that it computes: an update for each element of each window.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Sizes
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.tensor import Tensor, at, indices
from kgen.lowering.views import axis

# Elements of a window that are written out.
MAX_UNROLLED = 32
# Elementary operations of all terms, up to which a sum is written out.
MOST_COST = 64


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of `size` elements, `dilation` apart, every `stride`, over the last dimensions of a tensor of shape `sizes`
    with `padding` before it; `out` is how many there are along each dimension."""

    sizes: Sizes
    out: Sizes
    size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.size)

    @property
    def extents(self) -> Sizes:
        return self.sizes[-self.rank :]

    def start(self, window: Sequence[Expr]) -> list[Expr]:
        return [o * s - p for o, s, p in zip(window, self.stride, self.padding, strict=True)]

    def taps(self, window: Sequence[Expr], tap: Sequence[Expr | int]) -> tuple[list[Expr], Value]:
        """The position of one element of a window, and whether it is inside the tensor."""
        place = [s + ix.as_expr(t) * d for s, t, d in zip(self.start(window), tap, self.dilation, strict=True)]
        return place, inside(place, self.extents)

    def all_taps(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*(range(n) for n in self.size)))

    def covering(self) -> list[int]:
        """The most windows along each dimension that contain one element."""
        return [(k - 1) * d // s + 1 for k, s, d in zip(self.size, self.stride, self.dilation, strict=True)]


def inside(place: Sequence[Expr], extents: Sequence[Expr]) -> Value:
    test = vs.const(True, torch.bool)
    for e, extent in zip(place, extents, strict=True):
        test = vs.call("and", test, vs.call("and", vs.compare("ge", e, ix.ZERO), vs.compare("lt", e, extent)))
    return test


def unfold_backward(b: Builder, grad: Tensor, input_size: Sequence[Any], dim: int, size: int, step: int) -> Tensor:
    """Each element of the gradient is read by one element of the result: window w has element i at place i - w * step. Windows
    are added in their order."""
    sizes = tuple(map(ix.as_expr, input_size))
    if not sizes or grad.rank != len(sizes) + 1:
        raise Refused("windows of a number")
    k, terms = axis(dim, len(sizes)), (size - 1) // step + 1

    def term(j: Sequence[Expr], which: Sequence[Expr | int]) -> Value:
        window = ix.floordiv(j[k], ix.as_expr(step)) - which[0]
        place = j[k] - window * step
        real = inside((window, place), (grad.sizes[k], ix.as_expr(size)))
        read = at(grad, [*j[:k], window, *j[k + 1 :], place])
        return vs.masked(real, read, vs.const(0, read.dtype))

    return _added(b, grad, sizes, (terms,), term)


def col2im(
    b: Builder,
    x: Tensor,
    output_size: Sequence[Any],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Columns of windows, added up where they overlap: (batch, channels * taps, windows) or that without a batch, as an image.
    Each element of a column is read by one element of the result at most."""
    image = tuple(map(ix.as_expr, output_size))
    two = [[int(k) for k in pair] for pair in (kernel_size, dilation, padding, stride)]
    if x.rank not in (2, 3) or any(len(pair) != 2 for pair in (image, *two)):
        raise Refused("columns of other dimensions")
    along = [_Covered(*each) for each in zip(image, *two, strict=True)]
    high, wide = along
    sizes = (*x.sizes[:-2], ix.floordiv(x.sizes[-2], ix.as_expr(high.size * wide.size)), *image)

    def term(j: Sequence[Expr], which: Sequence[Expr | int]) -> Value:
        (row, up, above), (column, left, before) = (c.read_by(i, k) for c, i, k in zip(along, j[-2:], which, strict=True))
        channel = (j[-3] * high.size + up) * wide.size + left
        read = at(x, [*j[:-3], channel, row * wide.windows + column])
        return vs.masked(vs.call("and", above, before), read, vs.const(0, read.dtype))

    return _added(b, x, sizes, tuple(c.terms for c in along), term)


@dataclass(frozen=True, slots=True)
class _Covered:
    """The windows along one dimension of `extent` elements that hold an element: without dilation as many windows as may, else
    one for each tap."""

    extent: Expr
    size: int
    dilation: int
    padding: int
    stride: int

    @property
    def windows(self) -> Expr:
        return ix.floordiv(self.extent + 2 * self.padding - self.dilation * (self.size - 1) - 1, ix.as_expr(self.stride)) + 1

    @property
    def terms(self) -> int:
        return (self.size - 1) // self.stride + 1 if self.dilation == 1 else self.size

    def read_by(self, place: Expr, which: Expr | int) -> tuple[Expr, Expr, Value]:
        """A window, the tap at which it holds the element at a place, and whether there are both."""
        stride = ix.as_expr(self.stride)
        if self.dilation == 1:
            window = ix.floordiv(place + self.padding, stride) - which
            tap = place + self.padding - window * stride
            return window, tap, inside((window, tap), (self.windows, ix.as_expr(self.size)))
        tap = ix.as_expr(which)
        first = place + self.padding - tap * self.dilation
        window = ix.floordiv(first, stride)
        exact = vs.compare("eq", first - window * stride, ix.ZERO)
        return window, tap, vs.call("and", exact, inside((window,), (self.windows,)))


def _added(
    b: Builder, x: Tensor, sizes: Sizes, terms: tuple[int, ...], term: Callable[[Sequence[Expr], Sequence[Expr | int]], Value]
) -> Tensor:
    """The sum of terms that are made of x: written out where they are few, else one of a loop over each of their numbers."""
    count = math.prod(terms)
    if count > 1 and count * max(1, vs.total_cost([x.value])) > MOST_COST:
        all_sizes = (*sizes, *map(ix.as_expr, terms))
        every = indices(all_sizes)
        wide = Tensor(all_sizes, x.dtype, x.device, term(every[: len(sizes)], every[len(sizes) :]))
        (total,) = b.reduce("sum", wide, list(range(len(sizes), len(all_sizes))), dtypes=[x.dtype])
        return total
    j = indices(sizes)
    values = (term(j, which) for which in itertools.product(*(reversed(range(n)) for n in terms)))
    return Tensor(sizes, x.dtype, x.device, functools.reduce(lambda one, other: vs.call("add", one, other), values))


RULES: dict[str, Callable[..., Any]] = {"aten.unfold_backward": unfold_backward, "aten.col2im": col2im}
