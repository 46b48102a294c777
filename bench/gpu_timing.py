"""Times contenders on a GPU, by its own clock: recorded as CUDA graphs over arguments that no cache holds, in turns.

On a CPU, which is there to try things out, functions are called and the clock is the host's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.measure import interleave, rounding, synchronize
from bench.patterns import outputs_of
from kgen.host.graph_of_calls import graph_of_calls
from kgen.ir.plan import Kernel
from kgen.report.record import Record, recording

Function = Callable[..., Any]
# Bytes of arguments that one graph goes through, several times what the L2 cache holds.
COLD = 220e6
MAX_SETS = 24
# What a graph takes at least, so that its own start does not count.
GRAPH_SECONDS = 4e-4
# Rounds at least, however long they take.
MIN_ROUNDS = 7
# A GPU's cycles a second, about, and the longest that it is kept waiting for the host.
CYCLES, LONGEST_WAIT = 1.8e9, 0.05


@dataclass
class Entry:
    """One contender on one matmul. `replay` runs it `calls` times; where that is no recorded graph but calls, the device is
    kept waiting for `wait` cycles while the host makes them."""

    name: str
    compile_s: float = 0.0
    error: float | None = None
    peak_bytes: int | None = None
    recorded: bool = True
    calls: int = 1
    wait: int = 0
    replay: Function = field(default=lambda: None)
    samples: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.samples)
        quarter = len(ordered) // 4
        return {
            "seconds": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter],
            "rounds": len(ordered), "compile_s": self.compile_s, "error": self.error, "peak_bytes": self.peak_bytes,
            "recorded": self.recorded, "chosen": self.chosen,
        }  # fmt: skip


def prepare(
    entry: Entry,
    fn: Function,
    sets: Sequence[list[Tensor]],
    want: Any,
    context: AbstractContextManager[Any],
    record: bool = True,
) -> None:
    """Compiles, checks (where it is known what to want), and records the contender. Without `record` the host counts too."""
    on_gpu = sets[0][0].is_cuda
    started = time.perf_counter()
    with recording() as recorder, context:
        got = fn(*sets[0])
    synchronize()
    entry.compile_s = time.perf_counter() - started
    entry.error = None if want is None else relative_error(got, want)
    entry.chosen = [line for graph in recorder.graphs if isinstance(graph, Record) for line in steps_of(graph)]
    del got
    entry.peak_bytes = peak_bytes(lambda: fn(*sets[0])) if on_gpu else None
    one_call = seconds(_calls(fn, sets), on_gpu) / len(sets)
    entry.calls = max(len(sets), min(64, math.ceil(GRAPH_SECONDS / one_call))) if on_gpu else len(sets)
    order = [sets[k % len(sets)] for k in range(entry.calls)]
    entry.recorded = on_gpu and record
    if entry.recorded:
        try:
            entry.replay = graph_of_calls(_calls(fn, order))
        except RuntimeError:
            torch.cuda.synchronize()
            entry.recorded = False
    if not entry.recorded:
        entry.replay = _calls(fn, order)
        entry.wait = _cycles_of_host(entry.replay) if on_gpu and record else 0


def take_turns(entries: Sequence[Entry], budget: float, on_gpu: bool) -> None:
    """Samples of all, the order rotating from round to round, for `budget` seconds."""
    deadline = time.perf_counter() + budget
    turn = 0
    while turn < MIN_ROUNDS or time.perf_counter() < deadline:
        for entry in (*entries[turn % len(entries) :], *entries[: turn % len(entries)]):
            entry.samples.append(seconds(entry.replay, on_gpu, entry.wait) / entry.calls)
        turn += 1


def timed(entries: Sequence[Entry], budget: float, on_gpu: bool) -> dict[str, Any]:
    """The columns `results` and `samples` of a row, by contenders, after `budget` seconds of taking turns."""
    if entries:
        take_turns(entries, budget, on_gpu)
    return {
        "results": {entry.name: entry.summary() for entry in entries},
        "samples": {entry.name: entry.samples for entry in entries},
    }


def _calls(fn: Function, order: Sequence[list[Tensor]]) -> Function:
    """One call after the other, none of whose results lives on: for those, CUDA graphs would be recorded anew."""

    def run() -> None:
        for args in order:
            fn(*args)

    return run


def _cycles_of_host(call: Function) -> int:
    """Of the device, in which the host makes all the calls of a round: it then finds them queued, as a graph's are."""
    synchronize()
    started = time.perf_counter()
    call()
    taken = time.perf_counter() - started
    synchronize()
    return int(min(LONGEST_WAIT, 1.5 * taken) * CYCLES)


def seconds(call: Function, on_gpu: bool, wait: int = 0) -> float:
    if not on_gpu:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    if wait:
        torch.cuda._sleep(wait)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def peak_bytes(call: Function) -> int:
    """What a call has in use at most, results included, beyond what there was before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    del result
    return torch.cuda.max_memory_allocated() - before


def relative_error(got: Any, want: Any) -> float:
    """Of the worst output, by its norm; infinite where something is not a number and should be."""
    worst = 0.0
    for ours, theirs in zip(outputs_of(got), outputs_of(want), strict=True):
        found = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        worst = max(worst, math.inf if math.isnan(found) else found)
    return worst


def steps_of(graph: Record) -> list[str]:
    """The kernels and library calls of a compiled graph, with the templates and configurations of matmuls."""
    lines = []
    for step in graph.plan.steps:
        if isinstance(step, Kernel):
            lines.append(f"{step.name}: {step.choice}" if step.choice else step.name)
        else:
            lines.append(str(step.node.target) if hasattr(step, "node") else step.name)
    return lines


def machine_rates(device: str, size: int = 8192) -> dict[str, float]:
    """What this machine does in this run: operations a second of a bare matmul of `size` cubed by kind of arithmetic, and
    bytes a second that a copy reads and writes. A kind that the machine or torch lacks is left out."""
    rates: dict[str, float] = {}
    for kind, make in MATMULS_OF.items():
        try:
            call = make(device, size)
            call()
            timing = interleave({kind: call}, seconds=0.3, sample=1e-2)
        except (RuntimeError, NotImplementedError):
            continue
        rates[kind] = 2 * size**3 / timing[kind].median
    source = torch.ones(size**2 * 4, device=device)
    target = torch.empty_like(source)
    rates["copy"] = 2 * source.nbytes / interleave({"copy": lambda: target.copy_(source)}, seconds=0.3)["copy"].median
    return rates


def _plain(dtype: torch.dtype, tf32: bool) -> Callable[[str, int], Function]:
    def make(device: str, size: int) -> Function:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))

        def matmul() -> Tensor:
            with rounding(tf32):
                return a @ b

        return matmul

    return make


def _float8(device: str, size: int) -> Function:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


MATMULS_OF: dict[str, Callable[[str, int], Function]] = {
    "bfloat16": _plain(torch.bfloat16, False), "tf32": _plain(torch.float32, True), "float8": _float8,
}  # fmt: skip
