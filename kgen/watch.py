"""Lets a tool stand between AOTAutograd and the stages, and between Dynamo and AOTAutograd: it gets each graph as it comes in,
and gives what is to be called.

A module's variable and not a context's: backward graphs may be compiled in a thread of autograd's, without a context of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

from torch.fx import GraphModule

from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config

__all__ = ["CALLS", "GRAPHS", "Compile", "Watch", "WatchCalls", "calls_watched", "watched"]

Compile = Callable[[GraphModule, GraphInfo, Config], CompiledGraph]


class Watch(Protocol):
    """Makes what AOTAutograd calls of a graph. `compile_graph` runs it through the stages, and may change its nodes."""

    def __call__(self, gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile, /) -> CompiledGraph: ...


class WatchCalls(Protocol):
    """Makes what Dynamo calls of its graph. `compiled` is what it would call otherwise; `gm` is the graph before any pass."""

    def __call__(self, gm: GraphModule, config: Config, compiled: Callable[..., Any], /) -> Callable[..., Any]: ...


_W = TypeVar("_W")


class _Kept(Generic[_W]):
    """Where the watch of this process is, if it has one."""

    watch: _W | None = None

    @contextmanager
    def holds(self, watch: _W) -> Iterator[None]:
        before, self.watch = self.watch, watch
        try:
            yield
        finally:
            self.watch = before


# On the graphs that AOTAutograd gives, and on those of Dynamo's.
GRAPHS, CALLS = _Kept[Watch](), _Kept[WatchCalls]()


def watched(watch: Watch) -> AbstractContextManager[None]:
    """Gives `watch` every graph that is compiled inside, in any thread."""
    return GRAPHS.holds(watch)


def calls_watched(watch: WatchCalls) -> AbstractContextManager[None]:
    """Gives `watch` every graph of Dynamo's that is compiled inside, in any thread."""
    return CALLS.holds(watch)
