"""How everything here is timed: contenders take turns in one process, and a median stands with its spread."""

from __future__ import annotations

import gc
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Thunk = Callable[[], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds a call, over all rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        ordered = sorted(samples)
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter], len(ordered))


def interleave(
    contenders: Mapping[str, Thunk],
    seconds: float = 1.0,
    sample: float = 2e-3,
    rounds: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Times each contender in turn, the order rotating from round to round, so that a drift of the machine affects all equally.

    A round calls a contender as often as fills `sample` seconds. At least `rounds` rounds, then more while `seconds` last. On a
    machine that others use, `time.process_time` as the clock measures what one thread does, waiting left out.
    """
    repeats = {name: _repeats(call, sample) for name, call in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    started = time.perf_counter()
    with _no_gc():
        turn = 0
        while turn < rounds or time.perf_counter() - started < seconds:
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(_time(contenders[name], repeats[name], clock))
            turn += 1
    return {name: Timing.of(times) for name, times in samples.items()}


def _repeats(call: Thunk, sample: float) -> int:
    """Calls that fill `sample` seconds; also the warm-up. No sample: one call, for what takes long anyway."""
    call()
    if not sample:
        return 1
    one_call = min(_time(call, 1) for _ in range(3))
    return max(1, math.ceil(sample / max(one_call, 1e-7)))


def _time(call: Thunk, repeats: int, clock: Callable[[], float] = time.perf_counter) -> float:
    synchronize()
    started = clock()
    for _ in range(repeats):
        call()
    synchronize()
    return (clock() - started) / repeats


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@contextmanager
def _no_gc() -> Any:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def cache_environment(folder: str | Path) -> dict[str, str]:
    """Caches of both compilers, and of Triton, in one folder. AOTAutograd's cache, which both use, is in Inductor's."""
    names = {"KGEN_CACHE_DIR": "kgen", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {variable: f"{folder}/{name}" for variable, name in names.items()}


def seconds_of(call: Thunk) -> float:
    """One call, timed once: for compilations."""
    return _time(call, 1)


def geomean(values: Iterable[float]) -> float:
    """NaN for no values."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def growth_exponent(sizes: list[int], seconds: list[float]) -> float:
    """The slope of log(seconds) over log(size), by least squares."""
    xs, ys = [math.log(n) for n in sizes], [math.log(t) for t in seconds]
    return statistics.linear_regression(xs, ys).slope


def copy_rate(threads: int | None = None, megabytes: int = 256, device: str = "cpu") -> float:
    """Bytes read and written a second by a plain copy too large for the caches."""
    source = torch.ones(megabytes * 2**18, device=device)
    target = torch.empty_like(source)
    with thread_count(threads):
        timing = interleave({"copy": lambda: target.copy_(source)}, seconds=0.5)
    return 2 * source.nbytes / timing["copy"].median


@contextmanager
def thread_count(threads: int | None) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def rounding(tf32: bool) -> Any:
    """Matmuls in float32 may round their operands there, or must not."""
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def machine_facts() -> dict[str, Any]:
    """What a reader of the numbers must know of the machine and the versions; names no path and no host."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "compiler": _first_line([os.environ.get("KGEN_CXX", "g++"), "--version"]),
        "commit": _first_line(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
    }
    for package, distribution in (("torch", "torch"), ("triton", "triton"), ("kgen", "torch-kgen")):
        facts[package] = _version(distribution)
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_name() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found.group(1) if found else platform.processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def as_json(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: asdict(timing) for name, timing in timings.items()}
