"""How an exported program is called: what stands between a module's arguments and those of its graph, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Argument", "Constant", "ExportedCall", "Result", "Weight"]


@dataclass(frozen=True, slots=True)
class Weight:
    """An argument of the graph that is the module's: a parameter, a buffer or a constant tensor."""

    name: str


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the graph that is a tensor of the caller's, the leaf at `position` of all arguments.

    `sizes` has the length of each dimension, None for a dynamic one, whose name in conditions `symbols` has. `order` has the
    dimensions from the one with the largest stride on. What is `written` cannot be replaced by a copy of another layout."""

    position: int
    name: str
    dtype: torch.dtype
    device: str
    sizes: tuple[int | None, ...]
    symbols: tuple[str | None, ...]
    order: tuple[int, ...]
    written: bool


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of the caller's arguments, or of the results, that is no tensor, and the same at each call."""

    position: int
    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Result:
    """A leaf of the results: the graph's at `position`. It is in the storage of the graph's argument `base`, if that is not
    None: the argument itself, or a view of it with the geometry of the graph's result."""

    position: int
    base: int | None = None
    is_argument: bool = False


@dataclass(frozen=True, slots=True)
class ExportedCall:
    """`takes` and `gives` are the structures of ``(args, kwargs)`` and of the results, as torch's pytrees write them. `inputs`
    are the graph's arguments in order. `conditions` are Python expressions about the dynamic sizes, ``L['s0']``; `meanings`
    has what each symbol is, for people."""

    takes: str
    gives: str
    inputs: tuple[Weight | Argument, ...]
    constants: tuple[Constant, ...]
    results: tuple[Result | Constant, ...]
    conditions: tuple[str, ...]
    meanings: tuple[tuple[str, str], ...]
