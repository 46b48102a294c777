"""Renders a schedule's kernels: into translation units, one C++ function per distinct kernel, and into distinct GPU kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kgen.build.gpu_kernel import TritonKernel
from kgen.host.assemble import KernelCall
from kgen.plan import Launch, Packing, Schedule, variants

_WORD = re.compile(r"[A-Za-z_]\w*")
PRELUDE = "#include <kgen/kernel.h>\nusing namespace kgen;\n"


@dataclass(frozen=True, slots=True)
class Rendered:
    """One kernel's text. `names` are the identifiers that the text made up: they do not count in its key."""

    text: str
    buffers: tuple[str, ...]
    sizes: tuple[str, ...]
    names: frozenset[str]


@dataclass(slots=True)
class UnitPlan:
    """Sources of the graph's units with their keys, how each kernel step is called (GPU kernels stand there), and the C++
    functions by name."""

    sources: list[tuple[str, str]]  # (text, key)
    calls: dict[str, KernelCall]  # by the names of `kgen.plan.variants`
    functions: dict[str, str] = field(default_factory=dict)


def plan_units(schedule: Schedule, render: Callable[[Launch | Packing, str], Rendered | KernelCall], workers: int) -> UnitPlan:
    """Distinct kernels are told apart by their text without names and comments, so equal layers share one function. `render`
    gives a C++ function, or the call of a GPU kernel. What packs operands is a function like any other."""
    functions: dict[str, tuple[str, str]] = {}  # canonical text -> (symbol, text)
    launches: dict[Any, TritonKernel] = {}
    calls: dict[str, KernelCall] = {}
    kernels = (one for kernel in schedule.kernels for one in variants(kernel))
    for step in (*kernels, *schedule.packings):
        symbol = f"k{len(functions) + len(launches)}_{step.name}"
        made = render(step, symbol)
        if isinstance(made, KernelCall):
            assert made.launch is not None
            launch = launches.setdefault(made.launch.identity, made.launch)
            calls[step.name] = replace(made, symbol=launch.name, launch=launch)
            continue
        canonical = canonical_text(made.text.replace(symbol, "kernel"), made.names)
        known = functions.setdefault(canonical, (symbol, made.text))
        calls[step.name] = KernelCall(known[0], made.buffers, made.sizes)
    return UnitPlan(_units(functions, workers), calls, dict(functions.values()))


def canonical_text(text: str, names: frozenset[str]) -> str:
    """The text with comments dropped and made-up names replaced by their order of appearance."""
    order: dict[str, str] = {}

    def rename(match: re.Match[str]) -> str:
        word = match.group()
        return order.setdefault(word, f"n{len(order)}") if word in names else word

    body = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith(("//", "# ")))
    return _WORD.sub(rename, body)


def _units(functions: dict[str, tuple[str, str]], workers: int) -> list[tuple[str, str]]:
    """Spreads the functions over at most `workers` units of similar size; small graphs make one."""
    if not functions:
        return []
    total = sum(len(text) for _, text in functions.values())
    count = max(1, min(workers, total // 6000))
    bins: list[list[tuple[str, str, str]]] = [[] for _ in range(count)]
    loads = [0] * count
    for canonical, (symbol, text) in sorted(functions.items(), key=lambda kv: -len(kv[1][1])):
        at = loads.index(min(loads))
        bins[at].append((symbol, canonical, text))
        loads[at] += len(text)
    out = []
    for group in bins:
        group.sort()
        source = PRELUDE + "\n".join(text for _, _, text in group)
        key = "\n".join(f"{symbol}\n{canonical}" for symbol, canonical, _ in group)
        out.append((source, key))
    return out
