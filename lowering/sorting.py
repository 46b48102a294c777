"""Kin of sorting that are library calls: no loop nest of the IR orders long rows by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen.lowering.contraction import library

OPERATORS = [
    "mode",
    "histc",
    "histogram",
    "quantile",
    "nanquantile",
]

RULES: dict[str, Callable[..., Any]] = {f"aten.{name}": library("sort-like") for name in OPERATORS}
