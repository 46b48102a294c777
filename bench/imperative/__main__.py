"""Imperative programs: decoders of detectors with suppression, recurrent networks, small loops, loops that data decide.

python -m bench.imperative --cpu-time --json out.json
python -m bench.imperative --only lstm yolov3 --scale 2 --seconds 1
python -m bench.imperative --device cuda --jobs 12 --json out.json

Contenders take turns; times are the host's. The programs are those of `bench/imperative/programs.py`, for inference, most with
float32. `--scale` makes tensors of the larger ones larger and their loops longer. With `--jobs`, each program has a process
and caches of its own: so many are compiled at a time, and they are timed one after the other when all are ready.

A row has the seconds of a call, those until the first call has returned, errors against eager in float64, the kernels that were
compiled, on a GPU those that a call launches, and how many graphs Dynamo has made.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Timer
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.utils import counters as dynamo_counters
from torch._inductor import metrics

import kgen
from bench.contenders import copy_of, failure
from bench.imperative.programs import PROGRAMS, Program
from bench.measure import cache_environment, geomean, interleave, synchronize, thread_count
from bench.measurements import write
from kgen.counters import counters

ROOT = Path(__file__).parents[2]
BY_NAME = {one.name: one for one in PROGRAMS}
PEERS = ("eager", "inductor", "inductor-graphs")
READY = "ready"
Call = Callable[[], Any]
Row = dict[str, Any]


class TooLongError(BaseException):
    """Compiling takes too long. No compiler takes it for a failure that it can do without."""


# ---- contenders -----------------------------------------------------------------------------------------------------------


def _eager(program: Program, args: Sequence[Tensor]) -> Callable[..., Any]:
    return program.library(args) if program.library else program.run


def _inductor(mode: str | None) -> Callable[[Program, Sequence[Tensor]], Callable[..., Any]]:
    def made(program: Program, _args: Sequence[Tensor]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(copy_of(program.run), mode=mode, dynamic=_is_dynamic(program))
        return compiled

    return made


def _kgen(**given: Any) -> Callable[[Program, Sequence[Tensor]], Callable[..., Any]]:
    def made(program: Program, _args: Sequence[Tensor]) -> Callable[..., Any]:
        run, dynamic = copy_of(program.run), _is_dynamic(program)
        compiled: Callable[..., Any] = kgen.compile(
            run, options=given, dynamic=dynamic, fullgraph=True, control_flow=program.data_decides
        )
        return compiled

    return made


def _is_dynamic(program: Program) -> bool | None:
    return True if program.counts else None


CONTENDERS = {
    "eager": _eager,
    "inductor": _inductor(None),
    "kgen": _kgen(),
    "kgen-rolled": _kgen(loop_rolling="on"),
    "inductor-graphs": _inductor("reduce-overhead"),
    "kgen-graphs": _kgen(mode="reduce-overhead"),
}
ON_A_CPU = ("eager", "inductor", "kgen")


def call_of(program: Program, run: Callable[..., Any], args: Sequence[Tensor]) -> Call:
    """A call without arguments. What CUDA graphs gave before may be written again."""

    def call() -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        if not program.counts:
            return run(*args)
        for count in program.counts:
            result = run(*args, count)
        return result

    return call


def joined(results: Any) -> Tensor:
    """All results as one row of numbers."""
    listed = list(results) if isinstance(results, tuple | list) else [results]
    return torch.cat([torch.as_tensor(one).cpu().double().flatten() for one in listed])


# ---- one row --------------------------------------------------------------------------------------------------------------


@dataclass
class Prepared:
    """The contenders of a program that are compiled, and what is known of them."""

    row: Row
    calls: dict[str, Call]


def prepared(program: Program, options: argparse.Namespace) -> Prepared:
    torch._dynamo.reset()
    torch.backends.cudnn.allow_tf32 = False
    warm_up(options.device)
    args = tuple(arg.to(options.device) for arg in program.arguments(options.scale))
    exact = [arg.double() if arg.is_floating_point() else arg for arg in args]
    want = joined(call_of(program, program.run, exact)())
    row: Row = {"name": program.name, **{key: {} for key in ("seconds", "compile_s", "error", "kernels", "launches", "graphs")}}
    made = Prepared({**row, "failed": {}}, {})
    for name in options.contenders:
        try:
            with _limited(options.limit):
                _prepare(made, name, call_of(program, CONTENDERS[name](program, args), args), want)
        except TooLongError:
            made.row["failed"][name] = f"compiling takes more than {options.limit} s"
        except Exception as cause:
            made.row["failed"][name] = failure(cause)
    return made


def warm_up(device: str) -> None:
    """What is built once a machine, and what is loaded once a process, counts for nobody."""
    for backend in ("inductor", "kgen"):
        torch.compile(lambda x: torch.relu(x) * 2, backend=backend)(torch.ones(8, device=device))
    synchronize()


def _prepare(made: Prepared, name: str, call: Call, want: Tensor) -> None:
    kernels, graphs, started = _kernels(), _graphs(), time.perf_counter()
    got = call()
    synchronize()
    made.row["compile_s"][name] = time.perf_counter() - started
    made.row["kernels"][name], made.row["graphs"][name] = _kernels() - kernels, _graphs() - graphs
    made.row["error"][name] = ((joined(got) - want).norm() / want.norm().clamp(min=1e-30)).item()
    del got
    for _ in range(3):
        call()  # CUDA graphs are recorded
    made.calls[name] = call


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_args: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _kernels() -> int:
    """How many have been generated in this process, library calls not among them."""
    return int(counters["kernels"]) + int(metrics.generated_kernel_count)


def _graphs() -> int:
    return int(dynamo_counters["stats"]["unique_graphs"])


def measure(made: Prepared, options: argparse.Namespace) -> None:
    """Puts times into the row."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    timings = interleave(made.calls, seconds=options.seconds * len(made.calls), clock=clock) if made.calls else {}
    made.row["seconds"] = {name: one.median for name, one in timings.items()}
    made.row["low"] = {name: one.low for name, one in timings.items()}


def count_launches(made: Prepared) -> None:
    """Puts the launches of calls into the row. A process that has profiled once is slower: it comes after all times."""
    made.row["launches"] = {name: _launches(call) for name, call in made.calls.items()}


def _launches(call: Call) -> int:
    """Kernels that a call runs, those of a replayed CUDA graph among them; neither copies nor fills."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [one for one in profile.key_averages() if not one.key.startswith(("Memcpy", "Memset"))]
    return sum(one.count for one in events if one.self_device_time_total > 0)


# ---- all rows -------------------------------------------------------------------------------------------------------------


def rows(names: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    if options.jobs == 1:
        yield from (_row(BY_NAME[name], options) for name in names)
        return
    warm_up(options.device)
    with tempfile.TemporaryDirectory(prefix="kgen-imperative-") as folder, ThreadPool(options.jobs) as pool:
        children = pool.map(lambda name: _Child(name, options, Path(folder) / name).wait(), names, chunksize=1)
        for one in children:
            one.go_on().wait()
        yield from pool.imap(lambda one: one.row(), children)


def _row(program: Program, options: argparse.Namespace, wait: Callable[[], None] = lambda: None) -> Row:
    """`wait` lasts until this row may be measured, and then until its launches may be counted."""
    made = prepared(program, options)
    wait()
    measure(made, options)
    wait()
    if options.device == "cuda":
        count_launches(made)
    return made.row


class _Child:
    """A process that compiles a row's contenders, says so, and measures them when it is told to."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        folder.mkdir()
        self.name, self.errors, self.longest = name, folder / "errors", options.limit * len(options.contenders) + 60
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ, **cache_environment(folder)}
        command = [sys.executable, "-m", "bench.imperative", *sys.argv[1:], "--jobs", "1", "--child", name]
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )

    def wait(self) -> _Child:
        """Until it waits, has failed, or has taken too long."""
        assert self.process.stdout is not None
        timer, started = _killing(self.process, self.longest), time.perf_counter()
        for line in self.process.stdout:
            if line.strip() == READY:
                break
        timer.cancel()
        print(f"{self.name}: {time.perf_counter() - started:.1f} s", flush=True)
        return self

    def go_on(self) -> _Child:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        return self

    def row(self) -> Row:
        timer = _killing(self.process, self.longest)
        output, _ = self.go_on().process.communicate()
        timer.cancel()
        if self.process.returncode == 0:
            made: Row = json.loads(output.strip().rpartition("\n")[2])
            return made
        return {"name": self.name, "seconds": {}, "failed": {"process": self.errors.read_text()[-300:]}}


def _killing(process: subprocess.Popen[str], seconds: float) -> Timer:
    timer = Timer(seconds, process.kill)
    timer.start()
    return timer


def _wait_for_parent() -> None:
    print(READY, flush=True)
    sys.stdin.readline()


# ---- the table ------------------------------------------------------------------------------------------------------------


def ratio(row: Row, peers: Sequence[str], ours: Sequence[str] = ("kgen", "kgen-graphs")) -> float | None:
    """The fastest peer's time over that of ours which is fastest. Lower quartiles: on a machine that others use the rest is
    theirs."""
    low: Mapping[str, float] = row.get("low", {})
    mine, theirs = [low[one] for one in ours if one in low], [low[one] for one in peers if one in low]
    return min(theirs) / min(mine) if mine and theirs else None


def table(made: Sequence[Row], contenders: Sequence[str]) -> Table:
    found = Table(title="microseconds of a call (launches on a GPU, kernels compiled; seconds of the first call)")
    for column in ("", *contenders, "eager / kgen", "peer / kgen", "error / eager's", "graphs"):
        found.add_column(column, justify="right")
    for row in made:
        cells = [_cell(row, one) for one in contenders]
        ratios = [ratio(row, peers) for peers in (("eager",), PEERS)]
        errors = row.get("error", {})
        error = f"{errors['kgen'] / max(errors['eager'], 1e-9):.2f}" if {"kgen", "eager"} <= errors.keys() else ""
        graphs = "/".join(str(row.get("graphs", {}).get(one, "")) for one in ("inductor", "kgen"))
        found.add_row(row["name"], *cells, *("" if one is None else f"{one:.2f}" for one in ratios), error, graphs)
    return found


def _cell(row: Row, name: str) -> str:
    if name not in row["seconds"]:
        return "failed"
    counts = [str(row[key][name]) for key in ("launches", "kernels") if name in row[key]]
    return f"{row['seconds'][name] * 1e6:.0f} ({', '.join(counts)}; {row['compile_s'][name]:.1f})"


def geomeans(made: Sequence[Row], console: Console) -> None:
    pairs = {
        "eager / kgen": (("eager",), ("kgen",)),
        "eager / best of kgen": (("eager",), ("kgen", "kgen-graphs")),
        "inductor / kgen": (("inductor",), ("kgen",)),
        "inductor-graphs / kgen-graphs": (("inductor-graphs",), ("kgen-graphs",)),
        "kgen / kgen-rolled": (("kgen",), ("kgen-rolled",)),
    }
    for title, (peers, ours) in pairs.items():
        known = [value for row in made if (value := ratio(row, peers, ours)) is not None]
        if known:
            console.print(f"{title}: geomean {geomean(known):.3f}, lowest {min(known):.3f}, of {len(known)}; "
                          f"median {statistics.median(known):.2f}", highlight=False)  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), default=list(BY_NAME))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), help="all; on a CPU those without CUDA graphs")
    parser.add_argument("--scale", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing, for each contender of each program")
    parser.add_argument("--limit", type=int, default=60, help="seconds after which compiling a contender is given up")
    parser.add_argument("--jobs", type=int, default=1, help="programs compiled at a time, a process for each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, for a machine that others use")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.contenders = options.contenders or list(CONTENDERS if options.device == "cuda" else ON_A_CPU)
    options.threads = 1 if options.cpu_time else options.threads
    return options


def main() -> int:
    options = arguments()
    with torch.no_grad(), thread_count(options.threads):
        if options.child:
            print(json.dumps(_row(BY_NAME[options.child], options, _wait_for_parent)), flush=True)
            return 0
        made: list[Row] = []
        for row in rows(options.only, options):
            made.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                write(options.json, "imperative", made)
    console = Console(width=230)
    for row in made:
        for name, cause in row["failed"].items():
            console.print(f"{row['name']}: {name} failed: {cause}", highlight=False, markup=False)
    console.print(table(made, options.contenders))
    geomeans(made, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
