"""kgen's compiled graphs as entries of AOTAutograd's own cache, so that a second process skips AOT tracing.

AOTAutograd saves, under a key of Dynamo's graph, inputs and settings, everything it needs to rebuild its wrappers, plus the
compiled forward and backward. For that it demands an `OutputCode`: the one class of torch._inductor imported here, and one
that importing AOTAutograd has loaded anyway. It also keeps the guards that tracing and lowering added, and checks them.

The seam: a back end hands over a `CompiledGraph`, which can turn itself into bytes and back.
"""

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode

from kgen import cache
from kgen.counters import counters

__all__ = ["CachedGraph", "CompiledGraph", "NotSerializable", "count_coverage", "entry_tag"]

Strides = tuple[tuple[Any, ...] | None, ...]
Storages = tuple[tuple[int, int], ...]


class NotSerializable(Exception):
    """Raised by `CompiledGraph.serialize`: this graph works but is not worth, or not able, to be kept on disk."""


class CompiledGraph(Protocol):
    """What the last stage makes. Called with one list, which it clears as soon as it holds the arguments itself.

    `output_strides` has, for each output, the strides it will have (integers or SymInts), or None for what is no tensor.
    `coverage` counts what the graph runs by the names that `kgen.coverage` reports ("kernels", "extern.aten.mm"). A graph may
    have `run`, which does the same as calling it, and `follow`, which takes what to tell of graphs that take its place.
    """

    output_strides: Strides
    coverage: Mapping[str, int]

    def __call__(self, args: list[Any]) -> Sequence[Any]: ...

    def serialize(self) -> bytes: ...

    @classmethod
    def deserialize(cls, data: bytes) -> Self: ...


class CachedGraph(OutputCode):
    """A `CompiledGraph` in the form that AOTAutograd calls, saves and loads. `storages` are its arguments that are whole
    storages, by position, and how many elements of each the graph knows of: traced storages end where the last view does."""

    def __init__(self, graph: CompiledGraph, storages: Storages = ()) -> None:
        super().__init__()
        self.storages = storages
        self._boxed_call = True  # on the object, not the class: functools.wraps must carry it over
        self.kind: type[CompiledGraph] = type(graph)
        self.graph: CompiledGraph | None = graph
        self.run: Callable[[list[Any]], Sequence[Any]] | None = _entry(graph, storages)
        self.data = b""
        count_coverage(graph)
        follow = getattr(graph, "follow", None)
        if follow is not None:
            follow(self.change_over)

    def change_over(self, graph: CompiledGraph, *, is_final: bool) -> None:
        """Calls `graph` from the next call on. Until it is the final one, this is not it for AOTAutograd's cache."""
        if is_final:
            self.graph = graph
        self.run = _entry(graph, self.storages)

    def __call__(self, inputs: Any) -> Any:
        return self.run(inputs)  # type: ignore[misc]

    def call_first(self, action: Callable[[], None]) -> None:
        """Runs `action` before the first call, and costs nothing after it."""
        graph = self.graph
        assert graph is not None

        def first(args: list[Any]) -> Sequence[Any]:
            self.run = _entry(graph, self.storages)
            action()
            return self.run(args)

        self.run = first

    # ---- what AOTAutograd's cache calls: the first on a copy that it then pickles, the second on the unpickled object ----

    def prepare_for_serialization(self) -> None:
        assert self.graph is not None
        try:
            self.data = self.graph.serialize()
        except NotSerializable as cause:
            raise BypassAOTAutogradCache(f"kgen: {cause}") from cause
        self.graph = self.run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        self.graph = self.kind.deserialize(self.data)
        self.run = _entry(self.graph, self.storages)
        self.data = b""
        if not graph_kwargs.get("is_backward"):
            counters.add("aot_cache_hit")
        count_coverage(self.graph)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Inductor's way to ship compiled Triton kernels; kgen's are inside `data`."""


def _entry(graph: CompiledGraph, storages: Storages) -> Callable[[list[Any]], Sequence[Any]]:
    """What a call of the graph comes to: for a tiny kernel, a Python frame less is a tenth of the time."""
    run: Callable[[list[Any]], Sequence[Any]] = getattr(graph, "run", graph)
    if not storages:
        return run

    def of_known_elements(args: list[Any]) -> Sequence[Any]:
        for position, length in storages:
            args[position] = args[position][:length]
        return run(args)

    return of_known_elements


def count_coverage(graph: CompiledGraph) -> None:
    counters.add("graphs")
    for name, amount in graph.coverage.items():
        counters.add(name, amount)


def entry_tag(key: Any) -> str:
    """What makes AOTAutograd's key fit kgen: the caller's `key`, our code, and the cache folder. AOTAutograd keeps its entries
    in a folder of torch's; an emptied or another kgen cache folder must be cold all the same.

    Raises CacheNotWritable."""
    content = repr((_fingerprint(), _generation(), key))
    return "kgen-" + hashlib.sha256(content.encode()).hexdigest()[:32]


def _generation() -> str:
    """A random name that the cache folder keeps as long as it is not emptied."""
    found = cache.get("aot", "generation")
    if found is None:
        with cache.lock("aot", "generation"):
            found = cache.get("aot", "generation")
            if found is None:
                found = uuid.uuid4().hex.encode()
                cache.put("aot", "generation", found)
    return found.decode()


@functools.cache
def _fingerprint() -> str:
    """A hash of kgen's own sources: AOTAutograd's key covers torch, not us."""
    root = Path(__file__).parents[1]
    folders = [root, *(root.parent / name for name in ("lowering", "scheduler", "templates") if root.name == "kgen")]
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.suffix in (".py", ".jinja", ".h", ".cpp"):
                digest.update(path.relative_to(folder).as_posix().encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
