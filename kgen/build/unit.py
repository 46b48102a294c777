"""Renders a schedule's kernels: into translation units, one C++ function per distinct kernel, and into distinct GPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kgen.build.cpp import Unit
from kgen.ir.plan import Launch, Packing, Schedule, variants
from kgen.rendered.gpu_kernel import TritonKernel
from kgen.rendered.kernel_call import KernelCall, Rendered
from kgen.templates.render import PLACE, canonical_text

PRELUDE = "#include <kgen/kernel.h>\nusing namespace kgen;\n"


# So many functions that differ in constant offsets alone become one. For fewer, the C++ compiler gets the numbers.
MANY_SIMILAR = 4


@dataclass(slots=True)
class UnitPlan:
    """The graph's translation units, how each kernel step is called (GPU kernels stand there), and the C++
    functions by name."""

    sources: list[Unit]
    calls: dict[str, KernelCall]  # by the names of `kgen.ir.plan.variants`
    functions: dict[str, str] = field(default_factory=dict)


def plan_units(schedule: Schedule, render: Callable[[Launch | Packing, str], Rendered | KernelCall], workers: int) -> UnitPlan:
    """Distinct kernels are told apart by their text without names and comments, so equal layers share one function. `render`
    gives a C++ function, or the call of a GPU kernel. What packs operands is a function like any other."""
    functions: dict[str, Function] = {}  # by canonical text
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
        functions.setdefault(_key(symbol, made), Function(symbol, made)).steps[step.name] = made
    functions = _joined(functions)
    for function in functions.values():
        calls |= {name: KernelCall(function.symbol, made.buffers, made.sizes) for name, made in function.steps.items()}
    return UnitPlan(_units(functions, workers), calls, {f.symbol: f.made.text for f in functions.values()})


@dataclass(frozen=True, slots=True)
class Function:
    """A C++ function, and what each step that calls it gives it."""

    symbol: str
    made: Rendered
    steps: dict[str, Rendered] = field(default_factory=dict)


def _joined(functions: Mapping[str, Function]) -> dict[str, Function]:
    """The functions, where one takes the place of many that differ in constant offsets alone."""
    able = [f for f in functions.values() if f.made.general is not None]
    out = dict(functions)
    if len(able) < MANY_SIMILAR:
        return out
    for key, calls in _by_general_form(able).items():
        if len({id(call.function) for call in calls}) >= MANY_SIMILAR:
            out[key] = Function(calls[0].symbol, calls[0].made, {call.step: call.made for call in calls})
            for call in calls:
                del call.function.steps[call.step]
    return {key: f for key, f in out.items() if f.steps}


@dataclass(frozen=True, slots=True)
class _GeneralCall:
    """A step, the function with literal offsets that it calls, and what it may call in its place."""

    function: Function
    step: str
    symbol: str
    made: Rendered


def _by_general_form(functions: Iterable[Function]) -> dict[str, list[_GeneralCall]]:
    """The steps that call the functions, by the canonical text of their kernels without constant offsets."""
    found: dict[str, list[_GeneralCall]] = {}
    for function in functions:
        symbol = f"{function.symbol}_at"
        for name, step in function.steps.items():
            if step.general is not None:
                made = step.general(symbol)
                found.setdefault(_key(symbol, made), []).append(_GeneralCall(function, name, symbol, made))
    return found


def _key(symbol: str, made: Rendered) -> str:
    return canonical_text(made.text.replace(symbol, "kernel"), made.names)


def _units(functions: Mapping[str, Function], workers: int) -> list[Unit]:
    """Spreads the functions over at most `workers` units of similar size; small graphs make one."""
    if not functions:
        return []
    total = sum(len(f.made.text) for f in functions.values())
    count = max(1, min(workers, total // 6000))
    bins: list[list[tuple[str, str, Rendered]]] = [[] for _ in range(count)]
    loads = [0] * count
    for canonical, function in sorted(functions.items(), key=lambda kv: -len(kv[1].made.text)):
        at = loads.index(min(loads))
        bins[at].append((function.symbol, canonical, function.made))
        loads[at] += len(function.made.text)
    return [_unit(f"kernels{k}", sorted(group, key=lambda one: one[0])) for k, group in enumerate(bins)]


def _unit(name: str, group: Sequence[tuple[str, str, Rendered]]) -> Unit:
    """The unit of functions: symbol, canonical text, and what was rendered. What several link is linked once."""
    source = PRELUDE
    for _, _, made in group:
        source += f"{made.text}\n"
        if PLACE.search(made.text):  # what follows is no line of that template
            source += f'# {len(source.splitlines()) + 2} "{name}.cpp"\n'
    key = "\n".join(f"{symbol}\n{canonical}" for symbol, canonical, _ in group)
    return Unit(name, source, key, tuple(dict.fromkeys(text for _, _, made in group for text in made.objects)))
