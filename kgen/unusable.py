"""Configurations that turned out not to run on this machine while a graph was compiled, which is then compiled without them.

What a template says of its needs is what it foresees. Where the compiler makes more of it, or fails, another configuration, or
the library, is as good; a call that cannot be launched is not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kgen.ir.plan import Choice


@dataclass(frozen=True, slots=True)
class Unusable:
    """A template with values of its knobs, and what went wrong with them; `compiled` says whether they got as far as that.
    `problem` is the identity of the problem in which it went wrong (`Problem.identity`), None for all of the graph."""

    choice: Choice
    why: str
    compiled: bool
    problem: Hashable = None


FOUND: ContextVar[tuple[Unusable, ...]] = ContextVar("kgen_unusable", default=())


def usable(template: str, config: tuple[tuple[str, Any], ...], identity: Callable[[], Hashable]) -> bool:
    """Whether nothing is known against a configuration for the problem with an identity, computed where it matters."""
    known = [one for one in FOUND.get() if (one.choice.template, one.choice.config) == (template, config)]
    return not any(one.problem is None or one.problem == identity() for one in known)


@contextmanager
def without(found: tuple[Unusable, ...]) -> Iterator[None]:
    """Graphs compiled inside do not use these."""
    token = FOUND.set(found)
    try:
        yield
    finally:
        FOUND.reset(token)


@dataclass(slots=True)
class Memo:
    """What the scheduler has found out about one graph, kept for the attempts at it that follow and have to do without some
    configurations. What depends on those says so in its key."""

    graph: object = None
    known: dict[Hashable, object] = field(default_factory=dict)

    def of(self, graph: object) -> Memo:
        """The memo for a graph: empty where it was another one's."""
        if self.graph is not graph:
            self.graph, self.known = graph, {}
        return self

    def clear(self) -> None:
        """Forgets all, now that the graph is compiled."""
        self.graph, self.known = None, {}
