"""Random programs under kgen, against eager: `python -m tests.fuzz_programs --programs 5000 --jobs 2`, or `make fuzz-programs`.

A program has 3 to 10 operations. It may write in place, alias its inputs and results, mix dtypes, and read at repeated or
wrong indices. It meets NaNs, infinities, the extremes of integers, and sizes 1 and 0. A seed always gives the same program.
Workers are processes: one that dies or hangs is a finding. The fuzzer shrinks a finding and prints it as a module that runs
alone. KGEN_CACHE_DIR names a cache folder to use instead of a fresh one.

    python -m tests.fuzz_programs --seed 123 --programs 1        replays the program of seed 123
    python -m tests.fuzz_programs --gradients --device cuda      gradients as well, on a GPU
    python -m tests.fuzz_programs --device interpreter           a GPU's kernels, in Triton's interpreter on the CPU
    python -m tests.fuzz_programs --loops --programs 2000        Python loops over rows; make fuzz-loops runs them all
    python -m tests.fuzz_programs --control-flow                 loops and branches that tensors decide
    KGEN_FALLBACK=all python -m tests.fuzz_programs --loops      no kernels: what rewriting makes of many more loops

The exit status is 1 if anything was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parent))  # for `python -m tests.fuzz_programs`
import torch
from fuzz_loops import grow_loop
from fuzz_operations import OPERATIONS, RAISING
from fuzz_oracle import Finding, check, device_lost
from fuzz_program import Operation, Program, grow, shrunk

import kgen

ROOT = Path(__file__).parents[1]
# Seconds: the first program of a worker may have to build kgen's runtime.
PATIENCE, FIRST_PATIENCE = 120, 400
# Compiled programs stay in a process's memory.
PROGRAMS_A_WORKER = 250
SHRUNK_FINDINGS = 40
# The device whose tensors are the CPU's and whose kernels are a GPU's.
INTERPRETER = "interpreter"

SHOWN = """

if __name__ == "__main__":
    torch.backends.cudnn.allow_tf32 = False
    results = []
    for g in (f, {compiled}):
        bases = [b.requires_grad_({gradients} and b.is_floating_point()) for b in make()]
        with torch.set_grad_enabled({gradients}):
            inputs = views(*(b.clone() for b in bases))
            outputs = [*g(*inputs), *inputs]
        leaves = [b for b in bases if b.requires_grad]
        if leaves:
            weights = [torch.linspace(0.5, 1, t.numel(), dtype=f64, device=D).view(t.shape) for t in outputs]
            loss = sum((t * w).sum() for t, w in zip(outputs, weights) if t.requires_grad)
            outputs += torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append(outputs)
    for want, got in zip(*results):
        print("eager:", want, want.stride(), "kgen:", got, got.stride(), sep="\\n")
"""


def module(program: Program, device: str) -> str:
    """The program as a file that shows its results in eager and under kgen."""
    dynamic = program.dynamic or (None if program.marked else False)
    options = ', options={"gpu_interpreter": True}' if device == INTERPRETER else ""
    compiled = f'torch.compile(f, backend="kgen", dynamic={dynamic}, fullgraph=True{options})'
    if program.converted:
        compiled = f'__import__("kgen").control_flow(f, dynamic={dynamic}{options})'
    return program.source(_of_tensors(device)) + SHOWN.format(compiled=compiled, gradients=program.gradients)


def _of_tensors(device: str) -> str:
    return "cpu" if device == INTERPRETER else device


def operations(skipped: frozenset[str], device: str) -> tuple[Mapping[Operation, float], list[Operation]]:
    """What programs are made of, and what may end them. On a GPU an exception of a kernel ends the process, in eager, too.
    Its interpreter raises others than eager."""
    kept = {op: weight for op, weight in OPERATIONS.items() if op.__name__ not in skipped}
    return kept, [op for op in RAISING if op.__name__ not in skipped and device == "cpu"]


# ---- the worker -----------------------------------------------------------------------------------------------------


def work(device: str) -> None:
    """Answers each line, a program as JSON, with a line that says what differs."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.allow_tf32 = False  # on by default: eager would round the operands of float32 convolutions
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    for line in sys.stdin:
        torch.manual_seed(0)
        try:
            with kgen.config.override(gpu_interpreter=device == INTERPRETER):
                found = check(Program.of_json(json.loads(line)), _of_tensors(device))
        except Exception:  # a mistake of the comparison
            found = Finding("comparison", traceback.format_exc())
        replies.write(json.dumps([found.kind, found.text]) + "\n")
        replies.flush()


@dataclass
class Worker:
    """A process that checks programs, started anew when it dies, hangs or has done its share."""

    device: str
    jobs: int = 1
    process: subprocess.Popen[str] | None = None
    done: int = 0
    log: IO[str] = field(default_factory=lambda: tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115

    def check(self, program: Program) -> Finding:
        if self.process is None or self.done >= PROGRAMS_A_WORKER:
            self._start()
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        patience = PATIENCE if self.done else FIRST_PATIENCE
        self.done += 1
        try:
            self.process.stdin.write(json.dumps(program.as_json()) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._died()
        if not select.select([self.process.stdout], [], [], patience)[0]:
            self.stop()
            return Finding("hang", f"no answer in {patience} seconds")
        reply = self.process.stdout.readline()
        if not reply:
            return self._died()
        found = Finding(*json.loads(reply))
        if device_lost(found):
            self.stop()
        return found

    def _start(self) -> None:
        self.stop()
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz_programs", "--worker", "--device", self.device]
        self.log.truncate(0)
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=self._environment(),
        )
        self.done = 0

    def _environment(self) -> dict[str, str]:
        """Workers share the cores. At least two threads stay, so that code for several threads runs as such.
        A kernel that fails is a finding."""
        threads = str(max(2, (os.cpu_count() or 1) // self.jobs))
        return {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "KGEN_STRICT": "1", **os.environ}

    def _died(self) -> Finding:
        assert self.process is not None
        status = self.process.wait()
        self.process = None
        self.log.seek(0)
        return Finding("crash", f"the process ended with status {status}\n{self.log.read()[-2000:]}")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


# ---- the campaign ---------------------------------------------------------------------------------------------------


@dataclass
class Campaign:
    """What all jobs share."""

    args: argparse.Namespace
    seeds: Iterator[int]
    started: float = field(default_factory=time.monotonic)
    kinds: Counter[str] = field(default_factory=Counter)
    found: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self) -> int:
        jobs = [threading.Thread(target=self._job, daemon=True) for _ in range(self.args.jobs)]
        for job in jobs:
            job.start()
        while any(job.is_alive() for job in jobs):
            time.sleep(0.2)
            self._tell_progress()
        print(self._summary(), flush=True)
        return 1 if self.found else 0

    def _job(self) -> None:
        worker = Worker(self.args.device, self.args.jobs)
        while (seed := self._next_seed()) is not None:
            program = self._grown(seed)
            finding = worker.check(program)
            with self.lock:
                self.kinds[finding.kind] += 1
            if finding.bad and finding.kind not in self.args.ignore:
                self._report(worker, program, finding)
            elif finding.kind in ("torch", "refused") and self.args.verbose:
                print(f"---- seed {seed}: {finding.kind}: {finding.text}", flush=True)
        worker.stop()

    def _grown(self, seed: int) -> Program:
        if self.args.loops or self.args.control_flow:
            return grow_loop(seed, self.args.gradients, self.args.control_flow)
        kept, raising = operations(frozenset(self.args.skip), self.args.device)
        return grow(seed, kept, raising, self.args.gradients)

    def _next_seed(self) -> int | None:
        with self.lock:
            late = time.monotonic() - self.started > 60 * self.args.minutes
            return None if late else next(self.seeds, None)

    def _report(self, worker: Worker, program: Program, finding: Finding) -> None:
        with self.lock:
            self.found += 1
            smaller = self.found <= self.args.shrink
        if smaller:
            program = shrunk(program, lambda p: worker.check(p).kind == finding.kind)
            finding = worker.check(program)
        text = f"seed {program.seed}: {finding.kind}: {finding.text}"
        source = module(program, self.args.device)
        with self.lock:
            print(f"---- {text}\n{source}", flush=True)
        if self.args.out is not None:
            self.args.out.mkdir(parents=True, exist_ok=True)
            comment = "".join(f"# {line}\n" for line in text.splitlines())
            (self.args.out / f"{finding.kind}_{program.seed}.py").write_text(comment + source)

    _told: float = 0.0

    def _tell_progress(self) -> None:
        if time.monotonic() - max(self._told, self.started) > 60:
            self._told = time.monotonic()
            print(self._summary(), file=sys.stderr, flush=True)

    def _summary(self) -> str:
        seconds, total = time.monotonic() - self.started, sum(self.kinds.values())
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.most_common())
        return f"{total} programs in {seconds:.0f} s ({total / max(seconds, 1e-9):.2f} a second): {kinds}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (default 0)")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no program after so long")
    parser.add_argument("--gradients", action="store_true", help="float programs, and their gradients")
    parser.add_argument("--loops", action="store_true", help="Python loops over rows")
    parser.add_argument("--control-flow", action="store_true", help="loops and branches that tensors decide")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, or interpreter: GPU kernels on the CPU")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="OPERATION", help="operations of tests/fuzz_operations.py to leave out"
    )
    parser.add_argument(
        "--ignore", nargs="*", default=[], metavar="KIND", help="kinds of findings to count only, such as alias"
    )
    parser.add_argument("--shrink", type=int, default=SHRUNK_FINDINGS, metavar="N", help="make the first N findings smaller")
    parser.add_argument("--out", type=Path, help="a folder for the programs found")
    parser.add_argument(
        "--verbose", action="store_true", help="also tell what torch's own tracing changes, and what is refused"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.device)
        return 0
    with _own_cache():
        return Campaign(args, iter(range(args.seed, args.seed + args.programs))).run()


@contextlib.contextmanager
def _own_cache() -> Iterator[None]:
    """A fresh cache that all workers share: nothing comes from an earlier version of kgen."""
    if "KGEN_CACHE_DIR" in os.environ:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="kgen-fuzz-", ignore_cleanup_errors=True) as folder:
        os.environ["KGEN_CACHE_DIR"] = folder
        yield


if __name__ == "__main__":
    sys.exit(main())
