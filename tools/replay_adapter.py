"""The only file of the replay that knows kgen from inside: how graphs go as far as their kernels' texts, and what these are.

A commit that moves or renames what is imported here changes this file too: `tools.replay between` uses each commit's own.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.fx import GraphModule

from kgen import backend
from kgen.build import cpp, triton


def _first_of(*names: str) -> ModuleType:
    """The module under the first name that it has: commits older than this file have other ones."""
    found = next(name for name in names if _exists(name))
    return importlib.import_module(found)


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


torch_adapter = _first_of("kgen.capture.torch_adapter", "kgen.torch_adapter")
debug = _first_of("kgen.report.debug", "kgen.debug")

# What `torch_adapter.gpu_facts` says of an H200. Older commits have the third name for the second.
GPU_FACTS = {
    "arch": 90,
    "compute_units": 132,
    "processors": 132,
    "shared": 232448,
    "clock": 1_980_000_000,
    "memory": 4_800_000_000_000,
    "driver": 12080,
}
OPTIONS = {"cache": False, "isa": "avx512", "strict": True}


@dataclass(frozen=True)
class Texts:
    """What one graph becomes: its role, its steps, verdicts and calls, and the text of each kernel by file name."""

    role: str
    steps: str
    verdicts: str
    calls: str
    kernels: Mapping[str, str]


class Stopped(BaseException):
    """Ends a compilation whose graph cannot run: its kernels' texts are kept."""


Rewrite = Callable[[GraphModule], GraphModule]


def door(options: Mapping[str, Any]) -> Callable[..., Any]:
    """The back end for torch.compile."""
    return partial(backend.kgen_backend, options={**OPTIONS, **options})


@contextmanager
def rendering(keep: Callable[[Texts], None], rewrite: Rewrite) -> Iterator[None]:
    """Graphs that are compiled inside become texts, which `keep` gets, and no machine code; then they run in eager. `rewrite`
    gives the graph that is rendered in place of the one that runs."""
    given: dict[str, GraphModule] = {}

    def first(gm: GraphModule, info: Any, _: Any) -> GraphModule:
        given[info.name] = gm
        return rewrite(gm)

    def last(work: tuple[Any, Any, Any], info: Any, config: Any) -> Any:
        keep(_texts(work[1], work[2], info))
        if config.freezing:
            raise Stopped  # the rest of a frozen graph has more inputs than its caller gives
        return backend.run_eagerly(given.pop(info.name), info, config)

    stages = (first, *(stage for stage in backend.STAGES if stage.__name__ != "build"), last)
    with patch.object(backend, "STAGES", stages), without_compilers():
        yield


@contextmanager
def without_compilers() -> Iterator[None]:
    """Nothing is compiled in the background, and the GPU is an H200 that need not exist."""
    with (
        patch.object(torch_adapter, "gpu_facts", lambda _: GPU_FACTS),
        patch.object(cpp, "prepare", _nothing),
        patch.object(triton, "begin", _nothing),
        patch.object(triton, "prestart", _nothing),
    ):
        yield


def _nothing(*_: Any, **__: Any) -> None:
    """Stands in for what compiles in the background."""


def _texts(plan: Any, units: Any, info: Any) -> Texts:
    launches = {call.symbol: call.launch for call in units.calls.values() if call.launch is not None}
    numbered = [*units.functions, *launches]

    def unnumbered(text: str) -> str:
        """Without the numbers of kernels, graphs and compilations: one kernel more leaves the others as they are."""
        for symbol in numbered:
            text = re.sub(rf"\b{symbol}", _plain(symbol), text)
        return text.replace(info.name, "graph")

    kernels = {f"{_plain(symbol)}.cpp": unnumbered(text) for symbol, text in units.functions.items()}
    kernels |= {f"{_plain(symbol)}.py": unnumbered(launch.source) for symbol, launch in launches.items()}
    calls = "".join(f"{name}: {_call(call)}\n" for name, call in sorted(units.calls.items()))
    steps, verdicts = debug.print_schedule(plan), debug.print_verdicts(plan)
    return Texts(info.role, unnumbered(steps), unnumbered(verdicts), unnumbered(calls), kernels)


def _plain(symbol: str) -> str:
    return re.sub(r"^k\d+_", "k_", symbol)


def _call(call: Any) -> str:
    """How a kernel is called and compiled."""
    made = [repr(replace(call, launch=None))]
    if call.launch is not None:
        shown = (f for f in fields(call.launch) if f.name not in ("name", "source", "key"))
        made += [f"    {f.name} = {getattr(call.launch, f.name)!r}" for f in shown]
    return "\n".join(made)


def settle() -> None:
    """Makes renderings of one process independent of those before."""
    torch._dynamo.reset()
    torch.set_num_threads(16)
