"""Gradients of windows that are views: what an element gets from all windows that hold it.

torch's own decomposition adds the windows up in memory, at indices that it computes: an update for each element of each window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.pooling import inside
from kgen.lowering.tensor import Tensor, at, indices
from kgen.lowering.views import axis

# Elementary operations of all terms, up to which a sum is written out.
MOST_COST = 64


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
