"""Times the variants of a problem: in turns, by the device's own clock, on arguments that no cache holds."""

from __future__ import annotations

import math
import pickle
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bench.calibration import Problem
from bench.contenders import failure
from bench.gpu_timing import COLD, MAX_SETS, Entry, Function, prepare, seconds
from bench.measure import synchronize
from bench.patterns import outputs_of
from bench.regret.variants import CHOSEN, LIBRARY, Compiled, Variant
from kgen.host.compiled import HostGraph

EAGER = "eager"
# Always timed to the end, however slow: what the others are compared with.
KEPT = (CHOSEN, LIBRARY)
# Rounds at least and at most; what is so much slower than the fastest after a few rounds is out.
ROUNDS, MOST_ROUNDS, TRIED, HOPELESS = 7, 60, 2, 2.0
# Arguments on a CPU: larger than its caches, in at most so many sets.
COLD_CPU, MAX_SETS_CPU = 80e6, 8
# Seconds for which a variant is called from the host, its time by the clock on the wall.
WALL = 5e-3


def measure(done: Compiled, budget: float, profiled: bool = False) -> dict[str, Any]:
    """The row of a problem. `budget` is seconds of timing for each variant; `profiled` asks for the time of each kernel."""
    problem, device = done.job.problem, done.job.device
    row = _head(problem, done)
    if done.failed:
        return row
    sets = argument_sets(problem, device)
    row["sets"] = len(sets)
    with torch.no_grad():
        entries = list(_entries(done, sets, row))
        take_turns(entries, budget * len(entries), device == "cuda")
        walls = {e.name: wall_seconds(e.call, sets[0]) for e in entries if e.name in (*KEPT, EAGER)}
        kernels = kernel_seconds(entries, sets[0]) if profiled else {}
    row["eager"] = next((e.summary()["seconds"] for e in entries if e.name == EAGER), None)
    row["eager_wall"] = walls.get(EAGER)
    by_name = {e.name: e for e in entries}
    row["variants"] = [_variant(v, by_name.get(v.name), walls, kernels) for v in done.variants]
    return row


def _head(problem: Problem, done: Compiled) -> dict[str, Any]:
    return {
        "name": problem.name, "model": problem.model, "title": problem.title, "class": problem.kind,
        "direction": problem.direction, "dtype": str(problem.dtype).removeprefix("torch."), "size": done.job.size,
        "args": [list(one.shape) for one in problem.args], "failed": {"problem": done.failed} if done.failed else {},
        "matmuls": done.matmuls, "variants": [],
    }  # fmt: skip


def argument_sets(problem: Problem, device: str) -> list[list[Tensor]]:
    """So many that together they are larger than the last cache."""
    cold, most = (COLD, MAX_SETS) if device == "cuda" else (COLD_CPU, MAX_SETS_CPU)
    count = max(1, min(most, math.ceil(cold / problem.nbytes)))
    return [problem.make(device, seed) for seed in range(count)]


class Timed(Entry):
    """A contender with the function that it calls."""

    call: Function


def _entries(done: Compiled, sets: Sequence[list[Tensor]], row: dict[str, Any]) -> Iterator[Timed]:
    """Eager and all variants that run; why others do not is noted."""
    problem = done.job.problem
    want = outputs_of(problem.fn(*sets[0]))
    calls: list[tuple[str, Callable[[], Function]]] = [(EAGER, lambda: problem.fn)]
    calls += [(v.name, lambda v=v: _loaded(v)) for v in done.variants if v.blueprint]
    row["failed"] |= {v.name: v.failed for v in done.variants if v.failed}
    for name, load in calls:
        entry = Timed(name)
        try:
            entry.call = load()
            prepare(entry, entry.call, sets, want, nullcontext())
        except Exception as cause:
            row["failed"][name] = failure(cause)
            synchronize()
            continue
        yield entry


def _loaded(variant: Variant) -> Function:
    graph = HostGraph(pickle.loads(variant.blueprint))
    return lambda *args: graph(list(args))


def take_turns(entries: Sequence[Entry], budget: float, on_gpu: bool) -> None:
    """Samples of all, the order rotating from round to round, of those that are not hopeless until the end."""
    alive, turn, deadline = list(entries), 0, time.perf_counter() + budget
    while alive and turn < MOST_ROUNDS and (turn < ROUNDS or time.perf_counter() < deadline):
        first = turn % len(alive)
        for entry in alive[first:] + alive[:first]:
            entry.samples.append(seconds(entry.replay, on_gpu, entry.wait) / entry.calls)
        turn += 1
        if turn in (TRIED, ROUNDS):
            middle = {entry.name: statistics.median(entry.samples) for entry in alive}
            best = min(middle.values())
            alive = [entry for entry in alive if middle[entry.name] <= HOPELESS * best or entry.name in KEPT]


def wall_seconds(call: Function, args: Sequence[Tensor]) -> float:
    """A call from the host, as many one after the other as fill some milliseconds."""
    call(*args)
    synchronize()
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < WALL:
        call(*args)
        count += 1
    synchronize()
    return (time.perf_counter() - started) / count


def kernel_seconds(entries: Sequence[Timed], args: Sequence[Tensor]) -> dict[str, list[list[Any]]]:
    """By variant, its kernels with their seconds in one call: profiled together, with a waiting kernel between two variants."""
    synchronize()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for entry in entries:
                torch.cuda._sleep(1000)
                entry.call(*args)
            synchronize()
    except RuntimeError:
        return {}
    on_gpu = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events = sorted(on_gpu, key=lambda e: e.time_range.start)
    found: list[list[list[Any]]] = []
    for event in events:
        if "spin" in event.name:
            found.append([])
        elif found and event.device_time_total:
            found[-1].append([event.name[:100], event.device_time_total * 1e-6])
    names = [entry.name for entry in entries]
    return dict(zip(names, found, strict=True)) if len(found) == len(names) else {}


def _variant(v: Variant, entry: Entry | None, walls: dict[str, float], kernels: dict[str, list[list[Any]]]) -> dict[str, Any]:
    made = {"name": v.name, "same_as": v.same_as, "failed": v.failed, "steps": v.steps, "matmuls": v.matmuls}
    made |= {"verdicts": v.verdicts} if v.verdicts else {}
    if entry is None or not entry.samples:
        return made
    summary = entry.summary()
    kept = {key: summary[key] for key in ("seconds", "low", "high", "rounds", "error", "recorded")}
    made |= kept | {"compile_s": v.compile_s, "kernels": kernels.get(v.name, [])}
    return made | ({"wall": walls[v.name]} if v.name in walls else {})
