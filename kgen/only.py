"""Takes the choice of a template away from the cost model: for conformance tests, and for measuring one candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kgen.ir.plan import Config

Pick = Callable[[Sequence["Config"]], "Config"]


@dataclass(frozen=True, slots=True)
class Only:
    """The one template that may take matmuls, whatever it costs, and which of its feasible configurations it gets: `pick`
    sees those that the cost model likes best first. Sums are cut into `parts`, and `copies` are made of operands. The templates
    `also` may take matmuls as well, as a program's gradients need some of their own."""

    template: str
    pick: Pick
    parts: int = 1
    copies: str = ""
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.template, *self.also)


_only: ContextVar[Only | None] = ContextVar("kgen_only_template", default=None)


def current() -> Only | None:
    return _only.get()


@contextmanager
def only(template: str, pick: Pick, parts: int = 1, copies: str = "", also: tuple[str, ...] = ()) -> Iterator[None]:
    """Graphs compiled inside give each of their matmuls to `template`, or to one of those `also` named, or to the library where
    all refuse. They are never taken from the cache of compiled graphs, nor kept there."""
    token = _only.set(Only(template, pick, parts, copies, also))
    try:
        yield
    finally:
        _only.reset(token)
