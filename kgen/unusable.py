"""Configurations that turned out not to run on this machine while a graph was compiled, which is then compiled without them.

What a template says of its needs is what it foresees. Where the compiler makes more of it, or fails, another configuration, or
the library, is as good; a call that cannot be launched is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgen.ir.plan import Choice


@dataclass(frozen=True, slots=True)
class Unusable:
    """A template with values of its knobs, and what went wrong with them; `compiled` says whether they got as far as that."""

    choice: Choice
    why: str
    compiled: bool


FOUND: ContextVar[tuple[Unusable, ...]] = ContextVar("kgen_unusable", default=())


def usable(template: str, config: tuple[tuple[str, Any], ...]) -> bool:
    """Whether nothing is known against a configuration."""
    return not any((one.choice.template, one.choice.config) == (template, config) for one in FOUND.get())


@contextmanager
def without(found: tuple[Unusable, ...]) -> Iterator[None]:
    """Graphs compiled inside do not use these."""
    token = FOUND.set(found)
    try:
        yield
    finally:
        FOUND.reset(token)
