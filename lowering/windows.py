"""Windows over the last dimensions of a tensor; and gradients of windows that are views: what an element gets from all windows
that hold it.

torch's own decomposition adds the windows up in memory, at indices that it computes: an update for each element of each window.
"""

from __future__ import annotations

import itertools
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

    def term(j: Sequence[Expr], back: Expr | int) -> Value:
        window = ix.floordiv(j[k], ix.as_expr(step)) - back
        place = j[k] - window * step
        real = inside((window, place), (grad.sizes[k], ix.as_expr(size)))
        read = at(grad, [*j[:k], window, *j[k + 1 :], place])
        return vs.masked(real, read, vs.const(0, read.dtype))

    if terms > 1 and terms * max(1, vs.total_cost([grad.value])) > MOST_COST:
        wide = indices((*sizes, ix.as_expr(terms)))
        every = Tensor((*sizes, ix.as_expr(terms)), grad.dtype, grad.device, term(wide[:-1], wide[-1]))
        (total,) = b.reduce("sum", every, [len(sizes)], dtypes=[grad.dtype])
        return total
    j = indices(sizes)
    value = term(j, terms - 1)
    for back in reversed(range(terms - 1)):
        value = vs.call("add", value, term(j, back))
    return Tensor(sizes, grad.dtype, grad.device, value)


RULES: dict[str, Callable[..., Any]] = {"aten.unfold_backward": unfold_backward}
