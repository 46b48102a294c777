"""Sorting and its kin: library calls, because no loop nest of the IR orders elements by value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen.lowering.contraction import library

OPERATORS = [
    "sort",
    "argsort",
    "msort",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "histc",
    "histogram",
    "quantile",
    "nanquantile",
]

RULES: dict[str, Callable[..., Any]] = {f"aten.{name}": library("sort-like") for name in OPERATORS}
