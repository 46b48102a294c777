"""Which graphs of a program are slower than eager, and by which kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch.fx import GraphModule

from kgen import config as configuration
from kgen.backend import replace_random
from kgen.bisection.calls import leaves, run_with_gradients
from kgen.bisection.cause import CLUES, KernelOfPart, kernel_of_part
from kgen.bisection.copies import RandomState, copied
from kgen.bisection.part import Part, part_of, units_of, values_of
from kgen.bisection.timing import SLOWER, Timing, timed
from kgen.bisection.trial import Trial, fresh, info_of, trial_config
from kgen.capture.aot_cache import CompiledGraph, NotSerializable
from kgen.capture.operators import call_of, name_calls, paths_in
from kgen.capture.torch_adapter import GraphInfo
from kgen.config import Config
from kgen.ir.plan import members
from kgen.report.record import Record, recording
from kgen.watch import Compile, calls_watched, watched

__all__ = ["Seen", "SlowKernel", "TimedCall", "collecting", "faster_with", "slowest_kernels", "time_calls"]

Options = Mapping[str, Any]


@dataclass(slots=True)
class Call:
    """A graph of Dynamo's with the arguments of its first call; `aten` are the graphs that it became."""

    gm: GraphModule
    config: Config
    compiled: Callable[..., Any]
    inputs: list[Any] | None = None


@dataclass(slots=True)
class Seen:
    """The graphs of a program, and the aten graphs that they became."""

    calls: list[Call] = field(default_factory=list)
    aten: list[Aten] = field(default_factory=list)


@dataclass
class Aten:
    """A compiled aten graph that keeps the arguments of its first call."""

    gm: GraphModule
    info: GraphInfo
    config: Config
    compiled: CompiledGraph
    inputs: list[Any] | None = None
    output_strides: Any = field(init=False)
    coverage: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.output_strides, self.coverage = self.compiled.output_strides, self.compiled.coverage

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.inputs is None:
            self.inputs = copied(args)
        return self.compiled(args)

    def serialize(self) -> bytes:
        raise NotSerializable("its calls are watched")

    @classmethod
    def deserialize(cls, data: bytes) -> Self:
        raise NotSerializable("its calls are watched")


@contextmanager
def collecting() -> Iterator[Seen]:
    """Keeps every graph that is compiled inside, with the arguments of its first call."""
    seen = Seen()

    def watch_aten(gm: GraphModule, info: GraphInfo, config: Config, compile_graph: Compile) -> CompiledGraph:
        aten = replace_random(fresh(gm), info, config)
        seen.aten.append(made := Aten(aten, info, config, compile_graph(gm, info, config)))
        return made

    def watch_calls(gm: GraphModule, config: Config, compiled: Callable[..., Any]) -> Callable[..., Any]:
        seen.calls.append(kept := Call(gm, config, compiled))

        def call(*args: Any) -> Any:
            if kept.inputs is None:
                kept.inputs = leaves(args)
            return compiled(*args)

        return call

    with configuration.insist(cache=False, tuning="before"), watched(watch_aten), calls_watched(watch_calls):
        yield seen


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A graph of Dynamo's, forward and, where it was trained, backward."""

    call: Call
    timing: Timing
    aten: tuple[Aten, ...]


def time_calls(seen: Seen) -> list[TimedCall]:
    """Every graph that was called, that which loses most first."""
    made = []
    for call in seen.calls:
        if call.inputs is not None:
            both = [partial(run_with_gradients, function, call.inputs) for function in (call.compiled, call.gm)]
            aten = tuple(one for one in seen.aten if one.config is call.config and one.inputs is not None)
            made.append(TimedCall(call, timed(*both), aten))
    return sorted(made, key=lambda one: one.timing.eager - one.timing.compiled)


# ---- kernels ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlowKernel:
    """A kernel with the operators that it computes: as a part of their own, compiled and in eager."""

    kernel: KernelOfPart
    part: Part
    trial: Trial
    timing: Timing


def slowest_kernels(aten: Aten) -> list[SlowKernel]:
    """The kernels of a graph, that which loses most against its operators in eager first."""
    assert aten.inputs is not None
    values = values_of(aten.gm, copied(aten.inputs))
    whole = part_of(aten.gm, units_of(aten.gm), values)
    trial = Trial(trial_config(aten.config), RandomState.now())
    name_calls(whole.gm, paths_in(whole.gm, info_of(whole).paths))
    with recording() as recorder:
        trial.compiled(whole)
    records = [one for one in recorder.graphs if isinstance(one, Record)]
    kernels = [kernel for one in records for step in one.plan.kernels for kernel in members(step)]
    whole_values = values_of(whole.gm, copied(whole.inputs))
    made = []
    for kernel in kernels:
        calls = {call for origin in kernel.origins for call in origin.calls}
        units = [unit for unit in units_of(whole.gm) if call_of(unit[0]) in calls]
        if units:
            part = part_of(whole.gm, units, whole_values)
            made.append(SlowKernel(kernel_of_part(kernel), part, trial, time_part(part, trial)))
    return sorted(made, key=lambda one: one.timing.eager - one.timing.compiled)


def time_part(part: Part, trial: Trial) -> Timing:
    """A part compiled, against its operators in eager."""
    compiled, given = trial.compiled(part), copied(part.inputs)
    with torch.no_grad():
        return timed(lambda: compiled(list(given)), lambda: part.gm(*given))


def faster_with(slow: SlowKernel) -> list[tuple[Options, Timing]]:
    """Options that each make the part faster, the fastest first."""
    found = []
    for options in [*(clue.options for clue in CLUES), *_in_eager(slow)]:
        changed = replace(slow.trial, config=replace(slow.trial.config, **options))
        if changed.config != slow.trial.config and changed.wrong(slow.part) is None:
            timing = time_part(slow.part, changed)
            if timing.compiled * SLOWER < slow.timing.compiled:
                found.append((options, timing))
    return sorted(found, key=lambda one: one[1].compiled)


def _in_eager(slow: SlowKernel) -> Iterator[Options]:
    for operator in slow.kernel.operators:
        yield {"fallback": (*slow.trial.config.fallback, operator)}
