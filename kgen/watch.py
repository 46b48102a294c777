"""Lets a tool stand between AOTAutograd and the stages, and between Dynamo and AOTAutograd: it gets each graph as it comes in,
and gives what is to be called.

A module's variable and not a context's: backward graphs may be compiled in a thread of autograd's, without a context of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch.fx import GraphModule

from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config

__all__ = ["Compile", "Watch", "WatchCalls", "calls_watched", "current", "current_calls", "watched"]

Compile = Callable[[GraphModule, GraphInfo, Config], CompiledGraph]


class Watch(Protocol):
    """Makes what AOTAutograd calls of a graph. `compile_graph` runs it through the stages, and may change its nodes."""

    def __call__(self, gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile, /) -> CompiledGraph: ...


class WatchCalls(Protocol):
    """Makes what Dynamo calls of its graph. `compiled` is what it would call otherwise; `gm` is the graph before any pass."""

    def __call__(self, gm: GraphModule, config: Config, compiled: Callable[..., Any], /) -> Callable[..., Any]: ...


_current: Watch | None = None
_current_calls: WatchCalls | None = None


def current() -> Watch | None:
    """The watch of this process, if it has one."""
    return _current


@contextmanager
def watched(watch: Watch) -> Iterator[None]:
    """Gives `watch` every graph that is compiled inside, in any thread."""
    global _current  # noqa: PLW0603
    before, _current = _current, watch
    try:
        yield
    finally:
        _current = before


def current_calls() -> WatchCalls | None:
    """The watch of this process on Dynamo's graphs, if it has one."""
    return _current_calls


@contextmanager
def calls_watched(watch: WatchCalls) -> Iterator[None]:
    """Gives `watch` every graph of Dynamo's that is compiled inside, in any thread."""
    global _current_calls  # noqa: PLW0603
    before, _current_calls = _current_calls, watch
    try:
        yield
    finally:
        _current_calls = before
