"""How the results of two neighbouring runs of a scan join to that of both, as scalar values: one function for each scan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.values import Value


def joined(op: str, before: tuple[Value, ...], own: tuple[Value, ...]) -> tuple[Value, ...]:
    """The results of scan `op` behind both runs: one value, or a running extreme and its position."""
    combine = ops.REDUCTIONS[op].combine if op in ops.JOINED else None
    if combine is not None:
        return (vs.call(combine, before[0], own[0]),)
    return _JOINS[op](before, own)


def cost(op: str, dtype: torch.dtype) -> int:
    """Elementary operations that join the results of two runs; 0 where these do not join."""
    if op in ops.ROW_ORDERS:
        return 0
    before, own = ((vs.step_result(name, dtype), vs.step_result(f"{name}_position", torch.int64)) for name in ("before", "own"))
    return vs.total_cost(joined(op, before, own)[:1])


def log_add(exp: str, log_of_one_plus: Callable[[Value], Value]) -> Callable[[Value, Value], Value]:
    """``log(exp(x) + exp(y))`` of any base, without overflow; equal infinities stay."""

    def join(x: Value, y: Value) -> Value:
        gap = vs.call("abs", vs.call("sub", x, y))
        total = vs.call("add", vs.call("maximum", x, y), log_of_one_plus(vs.call(exp, vs.call("neg", gap))))
        same = vs.call("and", vs.call("isinf", x), vs.call("eq", x, y))
        return vs.where(same, x, total)

    return join


def _extreme(order: str) -> Callable[..., tuple[Value, ...]]:
    """The last one wins among equals and among NaNs."""

    def join(before: tuple[Value, ...], own: tuple[Value, ...]) -> tuple[Value, ...]:
        later = vs.call(order, own[0], before[0])
        if own[0].dtype.is_floating_point:
            later = vs.call("or", later, vs.call("isnan", own[0]))
        return tuple(vs.where(later, b, a) for a, b in zip(before, own, strict=True))

    return join


# Of scans that no reduction of the same name joins.
_JOINS: dict[str, Callable[..., tuple[Value, ...]]] = {
    "logaddexp": lambda before, own: (log_add("exp", lambda v: vs.call("log1p", v))(before[0], own[0]),),
    "argmax": _extreme("ge"),
    "argmin": _extreme("le"),
}
