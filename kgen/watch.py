"""Lets a tool stand between AOTAutograd and the stages: it gets each graph as it comes in, and gives what is to be called.

A module's variable and not a context's: backward graphs may be compiled in a thread of autograd's, without a context of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch.fx import GraphModule

from kgen.capture.aot_cache import CompiledGraph
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config

__all__ = ["Compile", "Watch", "current", "watched"]

Compile = Callable[[GraphModule, GraphInfo, Config], CompiledGraph]


class Watch(Protocol):
    """Makes what AOTAutograd calls of a graph. `compile_graph` runs it through the stages, and may change its nodes."""

    def __call__(self, gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile, /) -> CompiledGraph: ...


_current: Watch | None = None


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
