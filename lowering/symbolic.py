"""Operators on sizes: checks of numbers that only the data decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen.ir import index as ix
from kgen.ir.index import Expr
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor
from kgen.lowering.unbacked import check


def assert_scalar(b: Builder, condition: Expr | int | bool | Tensor, message: str) -> None:
    """A call that checks at run time. What the ranges of the sizes say is either checked already (`unbacked.check_bound`), or
    guarded."""
    if isinstance(condition, Tensor):
        fallback.extern(b, b.current, (condition, message), {}, "a check at run time")
    else:
        check(b, ix.as_expr(int(condition) if isinstance(condition, bool) else condition), message)


def constrain_range(_b: Builder, *_args: Any, **_kwargs: Any) -> None:
    """Told the ShapeEnv a range while tracing, which was checked where the number was bound."""


RULES: dict[str, Callable[..., Any]] = {
    "aten._assert_scalar": assert_scalar,
    "aten.sym_constrain_range": constrain_range,
    "aten.sym_constrain_range_for_size": constrain_range,
}
