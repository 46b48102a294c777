"""Loops over compiled bodies, stepped by the native runtime (`kgen/host/runtime_loops.h`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

from kgen.build import cpp

__all__ = ["CompiledBody", "repeat", "scan"]

# To ask which compiler there is takes longer than a short loop.
_runtime: Callable[[], ModuleType] = functools.cache(cpp.runtime_library)

Strides = Sequence[tuple[int, ...] | None]


class CompiledBody(Protocol):
    """A body as a callable of a list of arguments that have these strides; None where it does not matter."""

    run: Callable[[list[Any]], Sequence[Any]]
    strides: Strides


def repeat(condition: CompiledBody, body: CompiledBody, given: list[Any], kept: tuple[bool, ...]) -> tuple[Any, ...]:
    """Runs `body` as long as `condition` holds. Both get the carried values, which the body gives anew, then the others.

    `given` are these arguments, `kept` says of each carried one whether the body writes into it, and gives None for it."""
    made: tuple[Any, ...] = _runtime().repeat(condition.run, body.run, given, kept, condition.strides, body.strides)
    return made


def scan(body: CompiledBody, carried: list[Any], rows: list[Any], others: list[Any], kept: tuple[bool, ...]) -> list[Any]:
    """Runs `body` once for each row. It gives the carried values anew, and results that become the rows of tensors. `kept` says
    of each carried value whether the body writes into it, and gives None for it."""
    made: list[Any] = _runtime().scan(body.run, carried, rows, others, kept, body.strides)
    return made
