"""Is each configuration of a template right on a GPU? One line a failure.

A kernel that never ends, or that spoils the device, must not end the check: a process of its own makes the checks of some tasks
one after the other, and another one goes on behind the check at which it stopped. Several processes run side by side: compiling
takes most of the time.
"""

from __future__ import annotations

import math
import multiprocessing as mp
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch

from bench.contenders import failure
from kgen.only import Pick
from kgen.templates.contract import Config

# Seconds that a check may take, with a process' start and the compiler; processes at a time.
PATIENCE, CONCURRENT = 120.0, 6
# Calls the template, which has `pick` choose, and says what is wrong with the result, or nothing.
Check = Callable[[Pick], str]


@dataclass(frozen=True)
class Task:
    """`make` computes what all checks of the task compare with. `number` is the configuration to check, None: all, but no more
    than `most`. `optional`: the template may refuse it."""

    title: str
    make: Callable[[], Check]
    number: int | None = None
    most: int | None = None
    optional: bool = False


# The tasks of a template. Each process asks for them again: they need not be pickled, but the function has to be.
Tasks = Callable[[str], Sequence[Task]]


@dataclass
class Progress:
    """The check that was begun last, how many were, how many failed, and how many tasks were refused."""

    task: int
    number: int = -1
    config: str = ""
    checks: int = 0
    wrong: int = 0
    refused: int = 0


def check(templates: Sequence[str], tasks_of: Tasks, concurrent: int = CONCURRENT, minutes: float = math.inf) -> int:
    """Prints what is wrong, and how many checks there were of each template; the exit status. Of each template no task begins
    after so many minutes."""
    wrong = 0
    for template in templates:
        count = min(concurrent, len(tasks_of(template)))
        work = partial(_check_some, template, tasks_of, step=count, until=time.time() + 60 * minutes)
        with ThreadPoolExecutor(count) as pool:
            done = list(pool.map(work, range(count)))
        failures = sum(one.wrong for one in done)
        refused = sum(one.refused for one in done)
        _tell(f"{template}: {sum(one.checks for one in done)} checks, {failures} failures, {refused} tasks refused")
        wrong += failures
    return int(wrong > 0)


def _tell(line: str) -> None:
    """Prints a line at once: several threads do."""
    print(f"{line}\n", end="", flush=True)


def _check_some(template: str, tasks_of: Tasks, first: int, step: int, until: float) -> Progress:
    """The tasks from the first one on in so wide steps."""
    progress, tasks = Progress(first), tasks_of(template)
    while not _went_on(template, tasks_of, progress, step, until):
        _tell(f"{template}: {tasks[progress.task].title}: {progress.config} never ends, or ends its process")
        progress.wrong += 1
    return progress


def _went_on(template: str, tasks_of: Tasks, progress: Progress, step: int, until: float) -> bool:
    """Makes the checks behind those that were begun, in a process of its own; False where one stopped it."""
    context, tasks = mp.get_context("spawn"), tasks_of(template)
    ours, theirs = context.Pipe()
    args = (theirs, template, tasks_of, range(progress.task, len(tasks), step), progress.number + 1, until)
    process = context.Process(target=_work, args=args, daemon=True)
    process.start()
    theirs.close()
    try:
        while ours.poll(PATIENCE):
            match ours.recv():
                case ("begin", task, number, config):
                    progress.checks += not config
                    progress.task, progress.number, progress.config = task, number, config
                case ("refused",):
                    progress.refused += 1
                case ("wrong", message):
                    _tell(f"{template}: {tasks[progress.task].title}: {progress.config}: {message}")
                    progress.wrong += 1
                case _:
                    return True
    except EOFError:
        pass
    finally:
        process.kill()
    return False


def _work(link: Connection, template: str, tasks_of: Tasks, mine: Sequence[int], number: int, until: float) -> None:
    """All checks of some tasks, of the first one from a configuration on."""
    tasks = tasks_of(template)
    with torch.no_grad():
        for at in mine:
            if time.time() > until:
                break
            made = tasks[at].make()
            count = number + 1
            while number < count:
                link.send(("begin", at, number, ""))
                count = _check_one(link, tasks[at], made, (at, number))
                number += 1
            number = 0
    link.send(("end",))


def _check_one(link: Connection, task: Task, made: Check, place: tuple[int, int]) -> int:
    """Checks the configuration of a number; how many there are to check."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        one = found[(place[1] if task.number is None else task.number) % len(found)]
        link.send(("begin", *place, " ".join(f"{name}={value}" for name, value in one.values)))
        return one

    torch._dynamo.reset()
    try:
        message = made(pick)
    except torch.AcceleratorError as cause:  # nothing of this process can use the GPU any more
        link.send(("wrong", failure(cause)))
        raise SystemExit(1) from cause
    except Exception as cause:
        message = failure(cause)
    if not seen and task.optional:
        link.send(("refused",))
    message = message or ("" if seen or task.optional else "it is not used")
    if message:
        link.send(("wrong", message))
    return len(seen[: task.most]) if task.number is None else 1
