"""Operators on sizes: checks of numbers that only the data decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen.index import Expr
from kgen.lowering import fallback
from kgen.lowering.builder import Builder


def assert_scalar(b: Builder, condition: Expr | int | bool, message: str) -> Any:
    """Nothing where the ranges of the sizes decide; a call that checks at run time elsewhere."""
    known = condition.as_int() if isinstance(condition, Expr) else condition
    return None if known else fallback.extern(b, b.current, (condition, message), {}, "a check at run time")


def constrain_range(_b: Builder, *_args: Any, **_kwargs: Any) -> None:
    """Told the ShapeEnv a range while tracing."""


RULES: dict[str, Callable[..., Any]] = {
    "aten._assert_scalar": assert_scalar,
    "aten.sym_constrain_range": constrain_range,
    "aten.sym_constrain_range_for_size": constrain_range,
}
