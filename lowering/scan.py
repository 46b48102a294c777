"""Running sums, products, extremes and log-sum-exps along one dimension."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.few_terms import are_cheap, are_few, running
from kgen.lowering.reduction import as_summand
from kgen.lowering.tensor import Tensor

# Terms of a running sum that are written out, at most.
MOST_RUNNING = 2


def summing(op: str) -> Callable[..., Tensor]:
    """cumsum and cumprod: integers add up in int64."""

    def rule(b: Builder, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        x = as_summand(x, dtype)
        if x.dtype is torch.bool:
            raise Refused("a running sum in bool")
        if x.rank == 0:
            return x
        if b.on_gpu(x.device) and _are_few(x, dim % x.rank):
            return _written_out(op, x, dim % x.rank)
        if x.dtype is torch.float32:  # as eager: a running sum of n floats would drift by n roundings
            total = b.scan(op, x.with_value(vs.cast(x.value, torch.float64), torch.float64), dim)[0]
            # stored as eager has it: a kernel that cannot take part in the scan would read twice the bytes
            return b.copy(total.with_value(vs.cast(total.value, torch.float32), torch.float32))
        return b.scan(op, x, dim)[0]

    return rule


def _are_few(x: Tensor, dim: int) -> bool:
    """Whether a running sum has two cheap terms, at many points: it is rounded as one in float64. The choice among more terms
    fills registers where loops are written out: three weights of a particle at eight corners took 255 of a thread."""
    others = tuple(size for k, size in enumerate(x.sizes) if k != dim)
    return are_few(others, [x.axes[dim]], most=MOST_RUNNING) and are_cheap([x.axes[dim]], x.value)


def _written_out(op: str, x: Tensor, dim: int) -> Tensor:
    """The running sum as arithmetic at each point of the result."""
    loop, combine = x.axes[dim], ops.REDUCTIONS[op].combine
    assert combine is not None
    term = ix.var("r0", loop.extent)
    return x.with_value(running(combine, term, loop.expr(), vs.substitute(x.value, {loop: term.expr()})))


def extreme(op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """(running extreme, its last position so far)."""

    def rule(b: Builder, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if x.rank == 0:
            return x, x.with_value(vs.const(0, torch.int64), torch.int64)
        value, where = b.scan(op, x, dim, [x.dtype, torch.int64])
        return value, where

    return rule


def logcumsumexp(b: Builder, x: Tensor, dim: int) -> Tensor:
    if not x.dtype.is_floating_point:
        raise Refused("logcumsumexp of integers")
    return x if x.rank == 0 else b.scan("logaddexp", x, dim)[0]


RULES: dict[str, Callable[..., Any]] = {
    "aten.cumsum": summing("sum"),
    "aten.cumprod": summing("prod"),
    "aten.cummax": extreme("argmax"),
    "aten.cummin": extreme("argmin"),
    "aten.logcumsumexp": logcumsumexp,
    "aten._logcumsumexp": logcumsumexp,
}
