"""Is each configuration of convolution templates right on a GPU? On small and odd sizes, against float64, one line a failure.

A kernel that never ends, or that spoils the device, must not end the check: a process for each template makes the checks one
after the other, and another one goes on behind the check at which it stopped. Templates are checked side by side.
"""

from __future__ import annotations

import multiprocessing as mp
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from bench.contenders import failure
from bench.conv_problems import Convolution, FilterGradient, Problem, bf16, f16, f32, random_gradient, random_problem
from kgen.only import only
from kgen.templates.contract import Config

# Seconds that a check may take, with a process' start and the compiler.
PATIENCE = 120.0
# Largest error of an element against the largest number, by type: float32 may be rounded to TF32.
TOLERANCE = {bf16: 0.02, f16: 4e-3, f32: 4e-3}
DIRECT, WEIGHT = "triton_conv_direct", "triton_conv_weight"

# Problems for all configurations: tiles cross rows and images.
GEMM_CASES = (
    Convolution((3, 72, 29, 37), (200, 72, 3, 3), (1, 1), (1, 1), (1, 1), slots=2),
    Convolution((2, 64, 32, 32), (128, 64, 3, 3), (1, 1), (1, 1), (1, 1)),
    Convolution((2, 136, 23, 31), (96, 68, 5, 2), (2, 1), (3, 4), (1, 3), groups=2, last=False, dtype=f16),
    Convolution((2, 40, 15, 17), (72, 40, 3, 3), (1, 2), (0, 5), (2, 1), dtype=f32, slots=3),
    Convolution((2, 48, 6, 14, 15), (64, 48, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
)
DIRECT_CASES = (
    Convolution((3, 96, 29, 37), (96, 1, 7, 7), (1, 1), (3, 3), (1, 1), groups=96, slots=2),
    Convolution((3, 72, 29, 37), (144, 1, 3, 3), (2, 1), (1, 4), (1, 2), groups=72, last=False, dtype=f32),
    Convolution((2, 3, 65, 70), (96, 3, 7, 7), (2, 2), (3, 3), (1, 1), last=False),
    Convolution((2, 130, 300), (130, 1, 4), (1,), (3,), (1,), groups=130, last=False, dtype=f16),
    Convolution((2, 40, 6, 14, 15), (40, 1, 3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), groups=40),
)
WEIGHT_CASES = (
    FilterGradient((4, 72, 29, 37), 136, (3, 3), (1, 1), (1, 1), (1, 1)),
    FilterGradient((2, 64, 32, 33), 64, (3, 2), (2, 1), (1, 4), (1, 2), last=False, dtype=f16),
    FilterGradient((3, 40, 35, 17), 72, (3, 3), (1, 2), (0, 5), (2, 1), dtype=f32),
    FilterGradient((2, 20, 900), 33, (4,), (1,), (3,), (1,), last=False),
)
RANDOM = 30


@dataclass(frozen=True)
class Task:
    """A problem, and whether all configurations of a template are to be checked on it, or one that `number` says."""

    problem: Problem
    number: int | None = None


def tasks_of(template: str, count: int = RANDOM) -> list[Task]:
    """The problems of a template, then random ones."""
    if template == WEIGHT:
        return [*map(Task, WEIGHT_CASES), *(Task(random_gradient(seed, large=True), 7 * seed) for seed in range(count))]
    few = template == DIRECT
    fixed = [Task(one) for one in (DIRECT_CASES if few else GEMM_CASES)]
    return [*fixed, *(Task(random_problem(seed, few, large=True), 7 * seed) for seed in range(count))]


@dataclass
class Progress:
    """The check that was begun last, how many were, how many failed, and the problems that were refused."""

    task: int = 0
    number: int = -1
    config: str = ""
    checks: int = 0
    wrong: int = 0
    refused: int = 0


def check(templates: Sequence[str]) -> int:
    """Prints what is wrong, and how many checks there were of each template; the exit status."""
    with ThreadPoolExecutor(len(templates)) as pool:
        return int(sum(pool.map(_check_template, templates)) > 0)


def _check_template(template: str) -> int:
    progress, tasks = Progress(), tasks_of(template)
    while not _went_on(template, progress, tasks):
        print(f"{template}: {tasks[progress.task].problem}: {progress.config} never ends, or ends its process", flush=True)
        progress.wrong += 1
    print(f"{template}: {progress.checks} checks, {progress.wrong} failures, {progress.refused} problems refused", flush=True)
    return progress.wrong


def _went_on(template: str, progress: Progress, tasks: Sequence[Task]) -> bool:
    """Makes the checks behind those that were begun, in a process of its own; False where one stopped it."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, template, progress.task, progress.number + 1), daemon=True)
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
                    print(f"{template}: {tasks[progress.task].problem}: {progress.config}: {message}", flush=True)
                    progress.wrong += 1
                case _:
                    return True
    except EOFError:
        pass
    finally:
        process.kill()
    return False


def _work(link: Connection, template: str, first: int, number: int) -> None:
    """All checks from a problem's configuration on."""
    tasks = tasks_of(template)
    with torch.no_grad():
        for at in range(first, len(tasks)):
            args = tasks[at].problem.make("cuda" if torch.cuda.is_available() else "cpu")
            want = tasks[at].problem.function(*(one.double() for one in args))
            number = number if at == first else 0
            last = number + 1
            while number < last:
                link.send(("begin", at, number, ""))
                last = _check_one(partial(link.send), template, (at, number), tasks[at], args, want)
                number += 1
    link.send(("end",))


def _check_one(send: partial[None], template: str, place: tuple[int, int], task: Task, args: list[Tensor], want: Tensor) -> int:
    """Checks the configuration of a number; how many there are to check."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        number = place[1] if task.number is None else task.number
        one = found[number % len(found)]
        send(("begin", *place, " ".join(f"{name}={value}" for name, value in one.values)))
        return one

    torch._dynamo.reset()
    message = ""
    options = {"cache": False, "gpu_interpreter": not args[0].is_cuda}
    try:
        with only(template, pick):
            got = torch.compile(task.problem.function, backend="kgen", fullgraph=True, options=options)(*args)
        message = _difference(got, want, args[0].dtype)
    except Exception as cause:
        message = failure(cause)
    if not seen:
        send(("refused",))
    if message:
        send(("wrong", message))
    return len(seen) if task.number is None else 1


def _difference(got: Tensor, want: Tensor, dtype: torch.dtype) -> str:
    """What is wrong with a result."""
    error = (got.double() - want).abs()
    bad = (~(error <= TOLERANCE[dtype] * want.abs().max())).nonzero()  # NaN as well
    if not len(bad):
        return ""
    return f"error {float(error.max()):.1e}, {len(bad)} of {want.numel()} are far off, the first at {tuple(bad[0].tolist())}"
