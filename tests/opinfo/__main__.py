"""Operators of torch's own test database under kgen, against eager: `python -m tests.opinfo --shard 1/8`, or `make opinfo`.

Workers are processes: one that dies or hangs is a finding, and the next task gets a new one. Known failures are listed with
reasons in known_failures.py; the exit status is 1 if anything else was found. KGEN_CACHE_DIR names a cache folder to use
instead of a fresh one.

    python -m tests.opinfo --ops '^softmax' --dtypes float32 --kinds forward,gradient
    python -m tests.opinfo --evaluate          without compilers: lowered graphs run in the evaluator
    python -m tests.opinfo --interpreter       kernels for a GPU, run by Triton's interpreter on the CPU
    python -m tests.opinfo --device cuda --json out.json
"""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from tests.opinfo.known_failures import reason
from tests.opinfo.tasks import DTYPES, KINDS, Checker, Outcome, Task, tasks

ROOT = Path(__file__).parents[2]
# Compiled code stays in a process's memory.
TASKS_A_WORKER = 60


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.opinfo", description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--kinds", default=",".join(KINDS), help="forward, gradient, inplace, out")
    parser.add_argument("--ops", default="", help="a regular expression that names contain")
    parser.add_argument("--samples", type=int, default=3, help="of each task")
    parser.add_argument("--shard", default="1/1", metavar="K/N", help="every N-th task from the K-th on")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--patience", type=float, default=300, help="seconds that a task may take")
    parser.add_argument("--minutes", type=float, default=0, help="begin no task after so long")
    parser.add_argument("--json", default="", help="a file for all outcomes, written as they come")
    parser.add_argument("--evaluate", action="store_true", help="run lowered graphs in the evaluator, without compilers")
    parser.add_argument("--interpreter", action="store_true", help="make GPU kernels, and run them in Triton's interpreter")
    parser.add_argument("--backend", default="kgen", help="another back end of torch.compile, to compare with")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# ---- the worker ---------------------------------------------------------------------------------------------------------


def work(args: argparse.Namespace) -> None:
    """Answers each line, a task as JSON, with an outcome."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    import torch

    from kgen import backend, config
    from tests.opinfo import evaluated

    if args.evaluate:
        backend.STAGES = evaluated.STAGES
    torch.set_num_threads(1)
    cached = not args.evaluate and not args.interpreter
    config.override(strict=True, gpu_interpreter=args.interpreter, cache=cached).__enter__()
    chosen = torch._dynamo.lookup_backend(args.backend) if args.backend != "kgen" else backend.kgen_backend
    checker = Checker(args.device, chosen, args.samples)
    for line in sys.stdin:
        task = Task(**json.loads(line))
        try:
            found = checker.check(task)
        except Exception as error:  # a mistake of the suite
            found = Outcome("error", f"the suite: {type(error).__name__}: {error}")
        replies.write(json.dumps(asdict(found)) + "\n")
        replies.flush()


@dataclass
class Worker:
    """A process that checks tasks; started anew when it dies, hangs or has done its share."""

    arguments: Sequence[str]
    patience: float
    process: subprocess.Popen[str] | None = None
    done: int = 0
    log: IO[str] = field(default_factory=lambda: tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115

    def check(self, task: Task) -> Outcome:
        if self.process is None or self.done >= TASKS_A_WORKER:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.done += 1
        try:
            self.process.stdin.write(json.dumps(asdict(task)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        if not select.select([self.process.stdout], [], [], self.patience)[0]:
            self.stop()
            return Outcome("hang", f"no answer in {self.patience:.0f} seconds")
        reply = self.process.stdout.readline()
        if not reply:
            return self._died()
        found = Outcome(**json.loads(reply))
        if "CUDA error" in found.detail:  # nothing works on this GPU in that process any more
            self.stop()
        return found

    def _start(self) -> None:
        self.stop()
        self.log.truncate(0)
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.opinfo", "--worker", *self.arguments]
        environment = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT, env=environment
        )
        self.done = 0

    def _died(self) -> Outcome:
        assert self.process is not None
        status = self.process.wait()
        self.process = None
        self.log.seek(0)
        return Outcome("crash", f"the process ended with status {status}: {self.log.read()[-1500:]}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# ---- the suite ----------------------------------------------------------------------------------------------------------


@dataclass
class Suite:
    """Tasks shared out over workers. Outcomes are written to a file as they come, so that an interruption loses none."""

    args: argparse.Namespace
    arguments: Sequence[str]
    found: list[tuple[Task, Outcome]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, todo: Sequence[Task]) -> None:
        queue: SimpleQueue[Task] = SimpleQueue()
        for task in todo:
            queue.put(task)
        threads = [threading.Thread(target=self._serve, args=(queue,)) for _ in range(self.args.jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _serve(self, queue: SimpleQueue[Task]) -> None:
        worker = Worker(self.arguments, self.args.patience)
        for task in self._remaining(queue):
            outcome = worker.check(task)
            with self.lock:
                self._note(task, outcome)
        worker.stop()

    def _remaining(self, queue: SimpleQueue[Task]) -> Iterator[Task]:
        while not self.args.minutes or time.monotonic() - self.started < 60 * self.args.minutes:
            try:
                yield queue.get_nowait()
            except Empty:
                return

    def _note(self, task: Task, outcome: Outcome) -> None:
        self.found.append((task, outcome))
        if outcome.bad:
            known = reason(task)
            print(f"{'known' if known else outcome.status.upper()}: {task}: {outcome.detail or known}", flush=True)
        if self.args.json:
            with Path(self.args.json).open("a") as file:
                file.write(json.dumps({**asdict(task), **asdict(outcome)}) + "\n")

    @property
    def new(self) -> list[Task]:
        """Failures that are not known."""
        return [task for task, outcome in self.found if outcome.bad and not reason(task)]


def main() -> int:
    args = parsed()
    if args.worker:
        work(args)
        return 0
    first, count = map(int, args.shard.split("/"))
    todo = [t for t in tasks(args.device, args.dtypes.split(","), args.kinds.split(",")) if re.search(args.ops, t.op)]
    todo = todo[first - 1 :: count]
    if args.json:
        Path(args.json).unlink(missing_ok=True)
    suite = Suite(args, sys.argv[1:])
    if "KGEN_CACHE_DIR" in os.environ:
        suite.run(todo)
    else:
        with tempfile.TemporaryDirectory(prefix="kgen-opinfo-") as folder:
            os.environ["KGEN_CACHE_DIR"] = folder
            suite.run(todo)
    for dtype in args.dtypes.split(","):
        counts = Counter(outcome.status for task, outcome in suite.found if task.dtype == dtype)
        print(dtype, dict(counts.most_common()))
    print(f"{len(suite.found)} of {len(todo)} tasks, {len(suite.new)} new failures")
    return 1 if suite.new else 0


if __name__ == "__main__":
    sys.exit(main())
