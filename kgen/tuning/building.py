"""Builds candidates, several at a time, until a deadline."""

from __future__ import annotations

import concurrent.futures
import contextvars
import os
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from kgen.host.compiled import Blueprint
from kgen.tuning.measure import Failure

K = TypeVar("K", bound=Hashable)


def build_all(made: Iterable[tuple[K, Blueprint]], build: Callable[[Blueprint], object], deadline: float) -> dict[K, Failure]:
    """Makes machine code of all that is `made`, from the first one on. What was not built, by the deadline at the latest
    (`time.monotonic`), and why."""
    pool = concurrent.futures.ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0))), thread_name_prefix="kgen-candidates")
    jobs = {pool.submit(contextvars.copy_context().run, build, one): key for key, one in made}
    done, late = concurrent.futures.wait(jobs, timeout=max(1.0, deadline - time.monotonic()))
    problems = {jobs[job]: job.exception() for job in done}
    failures = {key: Failure("not compiled", str(problem)[:500]) for key, problem in problems.items() if problem is not None}
    for job in late:
        job.cancel()
        failures[jobs[job]] = Failure("not compiled", "it was not compiled in time")
    pool.shutdown(wait=False, cancel_futures=True)
    return failures
