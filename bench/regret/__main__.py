"""What kgen's choices of templates cost, on problems from the layers of models: the default choice, no templates at all, and
each template's best.

python -m bench.regret --json out/bench/regret.json                      # on a GPU; about nine minutes with 16 cores
python -m bench.regret --json out/bench/regret.json --append --minutes 8  # goes on where a run stopped, for eight minutes
python -m bench.regret --models ResNet-50 ViT-B --classes conv3x3 matmul --shard 0/4
python -m bench.regret --device cpu --json out/bench/regret-cpu.json
python -m bench.regret --dtypes f32 --tf32                                # float32, as after precision "high"
python -m bench.regret --dry --limit 10                                   # compiles for a GPU that is not here
python -m bench.regret --report out/bench/regret.json                     # only the tables
python -m bench.regret --device cuda --replan out/bench/regret.json       # and what the cost model would choose today

Processes that need no GPU compile all variants of a problem; this one times them in turns as they come, by the device's own
clock. There is no tuning file: `chosen` is what the cost model says.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.calibration import CLASSES, SIZES, problems
from bench.contenders import failure
from bench.measure import machine_facts, rounding, thread_count
from bench.measurements import Entry, read, rows_in, write
from bench.regret.measure import measure
from bench.regret.replan import replan
from bench.regret.report import regret_of, show
from bench.regret.variants import H100, Compiled, Job, compile_job
from kgen.capture import torch_adapter

Row = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
# Of a run on a CPU, every so many-th problem in bfloat16 as well.
NARROW_TOO = 4
# Seconds between two versions of the JSON.
WRITING = 10.0
# Seconds that a problem may take to be timed, and the exit status of a run that another one has to go on with.
HUNG, BROKEN = 120.0, 3


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.regret", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dry", action="store_true", help="compile only, for an H100 that need not be here")
    parser.add_argument("--models", nargs="+", help="only these, such as ViT-B")
    parser.add_argument("--classes", nargs="+", choices=CLASSES)
    parser.add_argument("--direction", choices=["forward", "backward"])
    parser.add_argument("--names", nargs="+", help="only problems whose names contain one of these")
    parser.add_argument("--size", choices=list(SIZES), help="of the problems; by default that of the device")
    parser.add_argument(
        "--dtypes", nargs="+", choices=list(DTYPES), help="by default bf16 on a GPU; f32 and some bf16 on a CPU"
    )
    parser.add_argument("--tf32", action="store_true", help="let matmuls in float32 round their operands, of all contenders")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every n-th problem, from the i-th on")
    parser.add_argument("--limit", type=int, help="so many problems, spread over the whole set")
    parser.add_argument("--minutes", type=float, default=600.0, help="start no problem after so long")
    parser.add_argument("--seconds", type=float, default=0.04, help="of timing, for each variant")
    parser.add_argument("--configs", type=int, default=2, help="configurations of each template, the model's favourites first")
    parser.add_argument(
        "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) - 1), help="processes that compile; 0: this one does"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of a CPU's kernels")
    parser.add_argument("--kernels", action="store_true", help="on a GPU, profile each kernel of each variant as well")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")
    parser.add_argument(
        "--replan", type=Path, nargs="+", metavar="JSON", help="only print what these files say of what would be chosen today"
    )
    parser.add_argument("--report", type=Path, nargs="+", metavar="JSON", help="only print what these files say")
    return parser.parse_args(arguments)


def jobs_of(options: argparse.Namespace, known: set[str]) -> list[Job]:
    """The problems that were asked for, in an order in which any part of the run has some of everything."""
    on_gpu = options.device == "cuda"
    size = options.size or ("gpu" if on_gpu else "cpu")
    facts = None if not on_gpu else H100 if options.dry else torch_adapter.gpu_facts(torch.device("cuda", 0))
    threads = 1 if on_gpu else options.threads
    found: list[Job] = []
    for number in range(len(problems(SIZES[size]))):
        for dtype in dtypes_of(options, number):
            job = Job(size, number, dtype, options.device, facts, options.configs, threads, options.tf32)
            if wanted(options, job) and job.problem.name not in known:
                found.append(job)
    first, step = map(int, options.shard.split("/"))
    found = spread(found)[first::step]
    return found[: options.limit] if options.limit else found


def dtypes_of(options: argparse.Namespace, number: int) -> list[torch.dtype]:
    if options.dtypes:
        return [DTYPES[name] for name in options.dtypes]
    if options.device == "cuda":
        return [torch.bfloat16]
    return [torch.float32, *([torch.bfloat16] if number % NARROW_TOO == 0 else [])]


def wanted(options: argparse.Namespace, job: Job) -> bool:
    problem = job.problem
    return (
        (not options.models or problem.model in options.models)
        and (not options.classes or problem.kind in options.classes)
        and (not options.direction or problem.direction == options.direction)
        and (not options.names or any(name in problem.name for name in options.names))
    )


def spread(jobs: Sequence[Job]) -> list[Job]:
    """By the golden ratio: neighbours in the list are far apart in the set."""
    return [job for _, job in sorted(enumerate(jobs), key=lambda item: item[0] * 0.6180339887498949 % 1)]


def compiled(jobs: Sequence[Job], options: argparse.Namespace, deadline: float) -> Generator[Compiled, None, None]:
    """As they are done. On a CPU, whose cores are then busy with timing, a few at a time, and none while those are timed."""
    if not options.jobs:
        yield from map(compile_job, jobs)
        return
    together = len(jobs) if options.device == "cuda" else 2 * options.jobs
    context = multiprocessing.get_context("spawn")  # a fork of a process that uses a GPU cannot
    pool = ProcessPoolExecutor(options.jobs, context)
    try:
        for start in range(0, len(jobs), together):
            running = {pool.submit(compile_job, job) for job in jobs[start : start + together]}
            if options.device == "cuda":
                yield from _as_they_come(running, deadline)
            else:
                done, _ = wait(running)
                yield from (one.result() for one in done)
            if time.monotonic() > deadline:
                break
    finally:
        pool.shutdown(wait=True, cancel_futures=True)  # what has begun is finished: some seconds


def _as_they_come(running: set[Future[Compiled]], deadline: float) -> Iterator[Compiled]:
    while running:
        done, running = wait(running, timeout=max(0.0, deadline - time.monotonic()), return_when=FIRST_COMPLETED)
        if not done:
            return
        yield from (one.result() for one in done)


def line(row: Row) -> str:
    one = regret_of(row)
    if one is None:
        return f"{row['name']}: {'; '.join(f'{name}: {why}' for name, why in row['failed'].items()) or 'compiled'}"
    times = f"{one.chosen * 1e6:.1f} us, library {one.library * 1e6:.1f}, best {one.best * 1e6:.1f} ({one.winner})"
    return f"{row['name']} [{row['class']}]: {times}, over best {one.over_best:.2f}, over library {one.over_library:.2f}"


def dry_row(done: Compiled) -> Row:
    """What is known without having timed anything."""
    problem = done.job.problem
    failed = {v.name: v.failed for v in done.variants if v.failed} | ({"problem": done.failed} if done.failed else {})
    variants = [
        {"name": v.name, "same_as": v.same_as, "steps": v.steps, "matmuls": v.matmuls, "compile_s": v.compile_s}
        for v in done.variants
    ]  # fmt: skip
    head = {"name": problem.name, "model": problem.model, "class": problem.kind, "direction": problem.direction}
    return {**head, "failed": failed, "matmuls": done.matmuls, "variants": variants}


class Rows:
    """What was measured, and the file that it goes to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path | None = options.json
        self.rows: list[Row] = []
        if options.append and self.path is not None and self.path.exists():
            self.rows = rows_in(self.path)
        self.machine = machine_facts()
        self.written = time.monotonic()

    @property
    def card(self) -> str:
        """What the rows of this run are measured on."""
        return str(self.machine.get("gpu", self.machine["cpu"]))

    @property
    def names(self) -> set[str]:
        """Of the problems that were measured on it."""
        return {row["name"] for row in self.rows if row["card"] == self.card}

    def add(self, row: Row) -> None:
        versions = {name: self.machine[name] for name in ("commit", "torch", "triton")}
        self.rows.append({**row, "card": self.card, "date": self.machine["date"], **versions})
        if time.monotonic() > self.written + WRITING:
            self.write()

    def write(self) -> None:
        if self.path is not None:
            write(self.path, "regret", [Entry(f"{row['name']} on {row['card']}", {}, {}, row) for row in self.rows])
        self.written = time.monotonic()


def watched(done: Compiled, options: argparse.Namespace, found: Rows) -> Row:
    """The row of a problem. A kernel that hangs ends the process, after that has been noted."""

    def give_up() -> None:
        found.add({**dry_row(done), "failed": {"problem": f"hung for {HUNG:.0f} s"}})
        found.write()
        print(f"{done.job.problem.name}: a kernel hangs; go on with --append", flush=True)
        os._exit(BROKEN)

    timer = threading.Timer(HUNG, give_up)
    timer.daemon = True
    timer.start()
    try:
        return measure(done, options.seconds, options.kernels and options.device == "cuda")
    finally:
        timer.cancel()


def require_gpu(options: argparse.Namespace, found: Rows) -> None:
    """Ends the process where a kernel has broken the GPU's context: no other one can run in it."""
    try:
        if options.device == "cuda" and not options.dry:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError as cause:
        found.write()
        print(f"the GPU's context is broken ({failure(cause)}); go on with --append", flush=True)
        os._exit(BROKEN)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console(width=220)
    if options.report:
        show([row for path in options.report for row in read(path).rows], console)
        return
    if options.replan:
        options.dry = True
        measured = [row for path in options.replan for row in read(path).rows]
        replan(measured, jobs_of(options, set()), console)
        return
    deadline = time.monotonic() + 60 * options.minutes
    found = Rows(options)
    jobs = jobs_of(options, found.names)
    results = compiled(jobs, options, deadline)
    with thread_count(options.threads), rounding(options.tf32):
        for done in results:
            row = dry_row(done) if options.dry else watched(done, options, found)
            found.add(row)
            console.print(line(row), highlight=False, markup=False, soft_wrap=True)
            require_gpu(options, found)
            if time.monotonic() > deadline:
                break
    found.write()
    show(found.rows, console)
    results.close()


if __name__ == "__main__":
    main()
