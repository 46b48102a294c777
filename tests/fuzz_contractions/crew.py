"""Processes that check problems side by side, with time limits: compilers take the cores, so the GPU seldom waits."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from kgen.build import child

from .check import COMPILING, CRASHED, FATAL, HUNG, NOT_COMPILED, PREPARING, RUNNING, THE_PROBLEM, How, Result
from .problem import Problem, as_json

# Seconds until a process has started, until a problem's kernels are written, a candidate compiled, and run and compared.
START_LIMIT = 180.0
LIMITS = {PREPARING: 240.0, COMPILING: 330.0, RUNNING: 60.0}
# Processes that may be lost to one problem.
MAX_LOST = 8


@dataclass
class Checked:
    """A problem with its results, and the seconds that it took."""

    problem: Problem
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[Result]:
        return [r for r in self.results if r.outcome in FATAL]


class Worker:
    """One process, started when it is needed and again when it was lost."""

    def __init__(self, number: int = 0, module: str = f"{__package__}.worker") -> None:
        self.number, self.module = number, module
        self.process: subprocess.Popen[bytes] | None = None
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def check(self, problem: Problem, how: How) -> Checked:
        """The problem's results; a candidate that ends the process, or does not end, is noted, and the rest goes on."""
        checked, started = Checked(problem), time.monotonic()
        for _ in range(MAX_LOST):
            done = frozenset(r.candidate for r in checked.results) | how.skip
            lost = self._attempt(problem, how, done, checked.results)
            if not lost:
                break
            if lost.candidate not in {r.candidate for r in checked.results}:  # else it said so before it ended
                checked.results.append(lost)
            if lost.candidate == THE_PROBLEM:
                break
        checked.seconds = time.monotonic() - started
        return checked

    def _attempt(self, problem: Problem, how: How, skip: frozenset[str], results: list[Result]) -> Result | None:
        """One process' go at a problem; which candidate it was lost to, if it was."""
        at, stage = THE_PROBLEM, PREPARING
        try:
            self._ask(
                {
                    "problem": as_json(problem),
                    "device": how.device,
                    "most": how.most,
                    "skip": sorted(skip),
                    "those": sorted(how.those),
                }
            )
            while True:
                message = self._reply(LIMITS[stage])
                if message is None:
                    raise _Ended(self._status())
                if "begin" in message:
                    stage, at = message["begin"], message["candidate"]
                elif "result" in message:
                    found = message["result"]
                    results.append(Result(**{**found, "templates": tuple(found["templates"])}))
                elif "done" in message:
                    return None
        except queue.Empty:
            self.stop()
            return Result(at, _lost(stage, HUNG), f"no answer after {LIMITS[stage]:.0f} s of {stage}")
        except (_Ended, OSError) as cause:
            self.stop()
            return Result(at, _lost(stage, CRASHED), f"{cause} while {stage}")

    def _ask(self, request: dict[str, Any]) -> None:
        if self.process is None:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def _start(self) -> None:
        with _one_at_a_time:
            os.environ["KGEN_FUZZ_WORKER"] = str(self.number)  # for the process that starts now
            self.process = child.start(self.module, without=("TRITON_INTERPRET",))
        assert self.process.stdout is not None
        self.messages = queue.Queue()
        threading.Thread(target=_listen, args=(self.process.stdout, self.messages), daemon=True).start()
        if self._reply(START_LIMIT) is None:
            raise _Ended(self._status())

    def _reply(self, limit: float) -> dict[str, Any] | None:
        return self.messages.get(timeout=limit)

    def _status(self) -> str:
        assert self.process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.process.wait(timeout=10)
            return f"its process ended with {'signal' if status < 0 else 'status'} {abs(status)}"
        return "its process closed its output"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def _lost(stage: str, outcome: str) -> str:
    """A compiler that ends its process has made no wrong kernel."""
    return NOT_COMPILED if stage == COMPILING else outcome


class _Ended(Exception):
    """The process is gone."""


_one_at_a_time = threading.Lock()


def _listen(replies: IO[bytes], messages: queue.Queue[dict[str, Any] | None]) -> None:
    for line in replies:
        with contextlib.suppress(ValueError):  # half a line of a process that died
            messages.put(json.loads(line))
    messages.put(None)


def check_all(problems: Iterable[Problem], how: Callable[[Problem], How], workers: int, until: float) -> Iterator[Checked]:
    """The problems as they are done, `workers` at a time; none begins after `until` (of `time.monotonic`)."""
    found: queue.Queue[Checked | None] = queue.Queue()
    waiting, lock = iter(problems), threading.Lock()

    def work(number: int) -> None:
        worker = Worker(number)
        try:
            while time.monotonic() < until:
                with lock:
                    problem = next(waiting, None)
                if problem is None:
                    break
                found.put(worker.check(problem, how(problem)))
        finally:
            worker.stop()
            found.put(None)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(workers)]
    for thread in threads:
        thread.start()
    left = len(threads)
    while left:
        one = found.get()
        if one is None:
            left -= 1
        else:
            yield one
