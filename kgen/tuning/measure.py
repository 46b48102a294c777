"""Measures benchmark jobs in a process of their own, and survives whatever a candidate does to that."""

from __future__ import annotations

import atexit
import os
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kgen import cache
from kgen.build import child
from kgen.counters import counters
from kgen.tuning.benchmark import BenchmarkJob, undisturbed

__all__ = ["Failure", "Outcome", "measure", "stop"]

# Seconds until a started process answers, until a candidate's first run ends, and beyond those meant for timing.
START_LIMIT, RUN_LIMIT, TIMING_LIMIT = 120.0, 30.0, 60.0
# Processes that may be lost to the candidates of one benchmark job.
MAX_LOST = 8


@dataclass(frozen=True, slots=True)
class Failure:
    """What was wrong with a candidate: it failed, gave wrong results, crashed its process, or hung."""

    why: str
    text: str = ""


@dataclass(slots=True)
class Outcome:
    """Seconds by candidate, and the failures of others."""

    seconds: dict[int, float] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


def measure(benchmark: BenchmarkJob, step: Callable[[str], None] = lambda text: None) -> Outcome:
    """Runs a benchmark job. A candidate that kills the process, or does not end, is dropped, and the rest start anew. `step`
    hears of every candidate that was run. Without a reference that runs, nothing is measured."""
    outcome, left = Outcome(), dict(benchmark.candidates)
    for _ in range(MAX_LOST):
        if benchmark.reference not in left:
            break
        lost = _attempt(replace(benchmark, candidates=left), outcome, step)
        if lost is None:
            break
        for number in outcome.failures:
            left.pop(number, None)
    return outcome


def stop() -> None:
    """Ends the process, if one is running: it holds a context on the GPU."""
    with _one_at_a_time:
        while _running:
            _running.pop().kill()


def _attempt(benchmark: BenchmarkJob, outcome: Outcome, step: Callable[[str], None]) -> int | None:
    """One process' attempt at a benchmark job; the candidate that it was lost to."""
    with _one_at_a_time, cache.scratch("tuning") as folder:
        place = folder / "job"
        place.write_bytes(pickle.dumps(benchmark))
        worker = _worker()
        at, limit = benchmark.reference, RUN_LIMIT
        try:
            worker.ask(str(place))
            while True:
                message = worker.reply(limit)
                if "begin" in message:
                    at, limit = message["begin"], RUN_LIMIT
                    step(benchmark.names.get(at, str(at)))
                elif "failed" in message:
                    outcome.failures[message["failed"]] = Failure(message["why"], message["text"])
                elif "timing" in message:
                    at, limit = -1, message["timing"] + TIMING_LIMIT
                elif "times" in message:
                    times = {int(number): samples for number, samples in message["times"].items()}
                    outcome.seconds = {n: undisturbed(samples) for n, samples in times.items() if samples}
                    return None
        except (child.Ended, child.Late) as end:
            worker.kill()
            _running.clear()
            counters.add("tuning.lost")
            return _blame(end, at, benchmark, outcome)


def _blame(end: Exception, at: int, benchmark: BenchmarkJob, outcome: Outcome) -> int:
    """Notes which candidate ended a process. What goes wrong while all take turns is nobody's in particular: then it is the
    reference's, and the benchmark job is over."""
    if at in outcome.failures:
        return at  # it said so before its process broke
    number = benchmark.reference if at < 0 else at
    late = isinstance(end, child.Late)
    text = f"no answer after {end} s" if late else str(end)
    outcome.failures[number] = Failure("hung" if late else "crashed", text)
    return number


# ---- the process ------------------------------------------------------------------------------------------------------


_running: list[child.Worker] = []
_one_at_a_time = threading.RLock()


def _worker() -> child.Worker:
    """The process, started when there is none, or when it is that of another process that forked this one."""
    if _running and (_running[0].process.poll() is not None or _running[0].owner != os.getpid()):
        _running.clear()
    if not _running:
        _running.append(child.Worker("kgen.tuning.worker", START_LIMIT))
    return _running[0]


atexit.register(stop)
