"""What is computed once of frozen arguments (`kgen/capture/freeze.py`), when it is, and how long it is kept.

One compiled graph may serve many modules: Dynamo compiles equal layers once and hands their parameters over as arguments. So
constants belong to the tensors they were made of, not to the graph, and nothing of them is in a cache on disk. The first call
with some tensors computes them; they live as long as all of these tensors do.

A promise that is broken does no harm where it shows: if a tensor has been written since (its version, as autograd counts it,
has changed), replaced, or given other memory, the call computes its constants anew. What does not show is a write past
autograd: through `.data`, numpy or another name of the memory, or to a tensor that was made in inference mode.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.build import cpp
from kgen.capture.eager_graph import EagerGraph
from kgen.host import program as hp
from kgen.host.native import load

__all__ = ["FrozenCall", "Packed", "Setup"]

Run = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """An array of a `Packing`: `program` makes it of the argument at position `source`, results of the setup's graph
    counted as further ones. Arrays of one tensor and one `layout` are equal."""

    source: int
    program: hp.Program
    layout: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Setup:
    """How a graph's further arguments are made of its own: the results of the serialised `graph` for the arguments `uses`, each
    with its `strides`, then the arrays `packed`. Results in `spent` are only packed. `watched` are the caller's arguments that
    all of this is made of."""

    watched: tuple[int, ...]
    uses: tuple[int, ...]
    graph: bytes
    strides: tuple[tuple[int, ...], ...]
    packed: tuple[Packed, ...]
    spent: frozenset[int]


class FrozenCall:
    """A graph's `run`, with the arguments that its caller does not have."""

    def __init__(self, run: Run, setup: Setup, libraries: Iterable[ctypes.CDLL]) -> None:
        self._run, self._setup = run, setup
        self._graph = EagerGraph.deserialize(setup.graph) if setup.graph else None
        libraries = tuple(libraries)
        self._pack = [(one, load(one.program, libraries)) for one in setup.packed]
        self._identities = cpp.runtime_library().identities
        self._known: dict[tuple[int, ...], _Made] = {}  # by the numbers of the tensors
        self._last = _Made(b"", ())
        self._lock = threading.Lock()

    def __call__(self, args: list[Any]) -> Any:
        key, last = self._identities(args, self._setup.watched), self._last
        args += last.constants if key == last.key else self._constants(key, args)
        return self._run(args)

    def _constants(self, key: bytes, args: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        watched = [args[k] for k in self._setup.watched]
        ids = tuple(map(id, watched))
        with self._lock:
            found = self._known.get(ids)
            if found is None or found.key != key:
                if found is not None:
                    warnings.warn(_CHANGED, stacklevel=2)
                self._known.pop(ids, None)  # before as much memory is taken again
                found = self._known[ids] = _Made(key, self._computed(args), _dying(self, ids, watched))
            self._last = found
        return found.constants

    def _computed(self, args: Sequence[Any]) -> tuple[torch.Tensor | None, ...]:
        setup = self._setup
        with torch.inference_mode(False), torch.no_grad():
            made: list[torch.Tensor | None] = []
            if self._graph is not None:
                results = self._graph([args[k] for k in setup.uses])
                made += map(_with_strides, results, setup.strides)
            given = (*args, *made)
            packed = [_shared(given[one.source], one, run) for one, run in self._pack]
        return (*(None if k in setup.spent else one for k, one in enumerate(made)), *packed)

    def forget(self, ids: tuple[int, ...]) -> None:
        """Drops what was made of tensors one of which is gone."""
        found = self._known.pop(ids, None)
        if found is self._last:
            self._last = _Made(b"", ())


@dataclass(frozen=True, slots=True)
class _Made:
    """Constants, the state of the tensors of which they were made, and what hears of the end of these."""

    key: bytes
    constants: tuple[torch.Tensor | None, ...]
    dying: tuple[weakref.ref[torch.Tensor], ...] = ()


_CHANGED = "a tensor that the option freezing promised not to change has changed: constants are computed anew"


def _dying(call: FrozenCall, ids: tuple[int, ...], tensors: Iterable[torch.Tensor]) -> tuple[weakref.ref[torch.Tensor], ...]:
    """References that drop the constants made of `tensors` with the first of these; numbers of the dead are given out again."""
    owner = weakref.ref(call)

    def gone(_: weakref.ref[torch.Tensor]) -> None:
        alive = owner()
        if alive is not None:
            alive.forget(ids)

    return tuple(weakref.ref(one, gone) for one in tensors)


_arrays: dict[tuple[Any, ...], tuple[weakref.ref[torch.Tensor], weakref.ref[torch.Tensor]]] = {}


def _shared(source: torch.Tensor, packed: Packed, run: Run) -> torch.Tensor:
    """The array of a tensor, which graphs that read it in one layout have in common: those of other batch sizes, say."""
    key = (packed.layout, cpp.runtime_library().identities([source], (0,)))
    known = _arrays.get(key)
    array = None if known is None or known[0]() is not source else known[1]()
    if array is None:
        (array,) = run([source])
        _arrays[key] = weakref.ref(source), weakref.ref(array, lambda _: _arrays.pop(key, None))
    return array


def _with_strides(result: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The result in the layout that the graph was compiled for."""
    if result.stride() == strides:
        return result
    return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device).copy_(result)
