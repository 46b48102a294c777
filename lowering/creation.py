"""Tensors made from nothing: constants, ranges, and values that depend on the position only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Sizes
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.pointwise import Operand, to_copy, value_in
from kgen.lowering.tensor import Tensor, indices


@dataclass(frozen=True, slots=True)
class Expected:
    """What torch says about a result of the node under lowering."""

    sizes: Sizes
    dtype: torch.dtype
    device: torch.device

    def holding(self, value: Value) -> Tensor:
        """The tensor whose element is `value`, converted to the expected dtype."""
        return Tensor(self.sizes, self.dtype, self.device, vs.cast(value, ops.compute_dtype(self.dtype)))


def expected(b: Builder, position: int | None = None) -> Expected:
    """Shape, dtype and device of the current node's result (of one result when it has several)."""
    meta = b.current.meta["val"]
    found = meta if position is None else meta[position]
    if found.layout != torch.strided:
        raise Refused(f"layout {found.layout}")
    return Expected(b.symbols.sizes(found.shape), found.dtype, found.device)


def filled(b: Builder, number: Operand) -> Tensor:
    what = expected(b)
    return what.holding(value_in(number, what.dtype))


def full(b: Builder, size: Any, fill_value: Operand, **_: Any) -> Tensor:
    return filled(b, fill_value)


def full_like(b: Builder, x: Tensor, fill_value: Operand, **_: Any) -> Tensor:
    return filled(b, fill_value)


def new_full(b: Builder, x: Tensor, size: Any, fill_value: Operand, **_: Any) -> Tensor:
    return filled(b, fill_value)


def constant(number: float) -> Callable[..., Tensor]:
    """A rule for tensors of one number. Uninitialised memory is zeros: a value costs nothing until somebody stores it."""
    return lambda b, *args, **kwargs: filled(b, number)


def scalar_tensor(b: Builder, number: Operand, **_: Any) -> Tensor:
    return filled(b, number)


def converted(b: Builder, x: Operand, **options: Any) -> Tensor:
    """vmap converts numbers of the program as if they were tensors."""
    return to_copy(b, x, **options) if isinstance(x, Tensor) else filled(b, x)


# ---- ranges ---------------------------------------------------------------------------------------------------------


def _is_integral(*numbers: Operand) -> bool:
    return all(isinstance(n, int | Expr) for n in numbers)


def _progression(start: Any, step: Any, what: Expected, rank_index: Expr) -> Value:
    """``start + step * i``: exactly for integers, for floats as eager's ``arange`` on the device accumulates: in double
    precision, but on a GPU for narrower types in single precision, rounded at the end alone. Whatever is made whole numbers
    of them, such as indices, depends on the last bit."""
    if not what.dtype.is_floating_point:  # eager truncates them, too
        start, step = (int(n) if isinstance(n, float) else n for n in (start, step))
    if _is_integral(start, step):
        return vs.index_value(ix.as_expr(start) + ix.as_expr(step) * rank_index)
    kind = torch.float32 if what.device.type == "cuda" and what.dtype.itemsize < torch.float64.itemsize else torch.float64
    first, stride, number = value_in(start, kind), value_in(step, kind), vs.index_value(rank_index, kind)
    if kind is torch.float32:
        return vs.call("fma", stride, number, first)
    return vs.call("add", first, vs.call("mul", stride, number))


def arange(b: Builder, *bounds: Any, **_: Any) -> Tensor:
    start, step = (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    what = expected(b)
    return what.holding(_progression(start, step, what, indices(what.sizes)[0]))


def iota(b: Builder, length: Any, *, start: Any = 0, step: Any = 1, **_: Any) -> Tensor:
    what = expected(b)
    return what.holding(_progression(start, step, what, indices(what.sizes)[0]))


def linspace(b: Builder, start: Operand, end: Operand, steps: Any, **_: Any) -> Tensor:
    """From both ends towards the middle, as in eager, so that the last element is `end` exactly."""
    what = expected(b)
    if isinstance(start, Tensor) or isinstance(end, Tensor):
        start, end = (o.with_value(o.value) if isinstance(o, Tensor) else o for o in (start, end))
    kind = what.dtype if what.dtype is torch.float64 or not what.dtype.is_floating_point else torch.float32
    kind = kind if kind.is_floating_point else torch.float64
    low, high = value_in(start, kind), value_in(end, kind)
    i, last = indices(what.sizes)[0], ix.as_expr(steps) - 1
    if last == 0 or last.as_int() == -1:
        return what.holding(low)
    step = vs.call("truediv", vs.call("sub", high, low), vs.index_value(last, kind))
    rising = vs.call("add", low, vs.call("mul", step, vs.index_value(i, kind)))
    falling = vs.call("sub", high, vs.call("mul", step, vs.index_value(last - i, kind)))
    return what.holding(vs.where(vs.compare("lt", i, ix.floordiv(ix.as_expr(steps), 2)), rising, falling))


def eye(b: Builder, *_: Any, **__: Any) -> Tensor:
    what = expected(b)
    row, column = indices(what.sizes)
    return what.holding(vs.call("eq", vs.index_value(row), vs.index_value(column)))


# ---- triangles ------------------------------------------------------------------------------------------------------


def triangle(op: str) -> Callable[..., Tensor]:
    """tril keeps ``column - row <= diagonal``, triu ``>=``."""

    def rule(b: Builder, x: Tensor, diagonal: Any = 0) -> Tensor:
        row, column = x.indices[-2:]
        # compared as sums without subtraction: the bounds of both sides then often decide it now
        keep = vs.compare(op, column, row + diagonal)
        return x.with_value(vs.where(keep, x.value, vs.const(0, x.dtype)))

    return rule


_ZERO_FILLED = (
    "zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided",
    "empty_permuted", "_efficientzerotensor",
)  # fmt: skip

RULES: dict[str, Callable[..., Any]] = {
    "aten.full": full,
    "aten.full_like": full_like,
    "aten.new_full": new_full,
    "aten._to_copy": converted,
    "aten.scalar_tensor": scalar_tensor,
    "aten.arange": arange,
    "prims.iota": iota,
    "aten.linspace": linspace,
    "aten.eye": eye,
    "aten.tril": triangle("le"),
    "aten.triu": triangle("ge"),
    "aten.ones": constant(1),
    "aten.ones_like": constant(1),
    "aten.new_ones": constant(1),
    **{f"aten.{name}": constant(0) for name in _ZERO_FILLED},
}
