"""Distances of all pairs of rows, on a GPU. Torch's kernel has a block of threads for each pair, however short the rows are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kgen.ir import values as vs
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.pointwise import number, pointwise
from kgen.lowering.reduction import total, vector_norm
from kgen.lowering.tensor import Tensor
from kgen.lowering.views import unsqueeze

# Rows for which eager computes squared distances by a matmul, by its mode: always, or where there are more than that.
MATMUL, MORE_ROWS = 1, 25


def _differences(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    """``x[..., i, None, k] - y[..., None, j, k]``."""
    if not b.on_gpu(x.device) or x.sizes[-1] == 0:
        raise Refused("distances of no numbers, or not on a GPU")
    return pointwise(lambda p, q: vs.call("sub", p, q), unsqueeze(b, x, -2), unsqueeze(b, y, -3))


def cdist(b: Builder, x: Tensor, y: Tensor, p: float, mode: int | None) -> Tensor:
    """Norms of the differences."""
    many = not all((t.sizes[-2].as_int() or MORE_ROWS + 1) <= MORE_ROWS for t in (x, y))
    if p == 2 and (mode == MATMUL or (not mode and many)):
        raise Refused("distances by a matmul")
    return vector_norm(b, _differences(b, x, y), p, -1)


def cdist_backward(b: Builder, grad: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    """The gradient of the rows of `x`; at a distance of zero it is zero."""
    if x.sizes[:-2] != y.sizes[:-2] or p not in SLOPES:
        raise Refused("the gradient of distances of another order, or of batches that differ")
    slope = SLOPES[p]
    each = pointwise(
        lambda g, d, r: vs.call("mul", g, slope(d, r)),
        unsqueeze(b, grad, -1), _differences(b, x, y), unsqueeze(b, distance, -1),
    )  # fmt: skip
    return total(b, each, -2)


def _share(difference: Value, distance: Value) -> Value:
    zero = number(0, distance)
    return vs.where(vs.call("eq", distance, zero), zero, vs.call("truediv", difference, distance))


def _largest(difference: Value, distance: Value) -> Value:
    return vs.where(vs.call("eq", vs.call("abs", difference), distance), vs.call("sign", difference), number(0, distance))


SLOPES: dict[float, Callable[[Value, Value], Value]] = {
    1.0: lambda difference, _: vs.call("sign", difference),
    2.0: _share,
    math.inf: _largest,
}

RULES: dict[str, Callable[..., Any]] = {"aten._cdist_forward": cdist, "aten._cdist_backward": cdist_backward}
