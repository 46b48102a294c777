"""Memory-bound patterns: eager, eager again, Inductor and kgen, taking turns in one process.

python -m bench.compare --threads 2 --json out.json
python -m bench.compare --patterns softmax layer_norm --which forward
python -m bench.compare --check            # compare results with eager's instead of timing
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.contenders import COMPILERS, CONTENDERS, Job, failure, jobs
from bench.measure import as_json, cache_environment, copy_rate, geomean, interleave, seconds_of
from bench.measurements import write

WARM_UP_SIZE = 8


# ---- running time -------------------------------------------------------------------------------------------------------


def time_job(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Medians of all contenders that work, and why the others do not."""
    torch._dynamo.reset()
    calls: dict[str, Callable[[], Any]] = {}
    row: dict[str, Any] = {"name": job.name, "failed": {}, "fewest_bytes": job.fewest_bytes(options.megabytes)}
    for name in options.contenders:
        inputs = job.inputs(options.megabytes)
        call = job.bind(name, inputs)
        try:
            call()
        except Exception as cause:
            row["failed"][name] = failure(cause)
            continue
        calls[name] = call
    row["times"] = as_json(interleave(calls, seconds=options.seconds, rounds=options.rounds))
    return row


def ratio(row: dict[str, Any], slow: str, fast: str) -> float | None:
    """How many times faster `fast` is than `slow`."""
    times = row["times"]
    return times[slow]["median"] / times[fast]["median"] if slow in times and fast in times else None


# ---- compile time -------------------------------------------------------------------------------------------------------


def compile_times(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Cold, then warm: two processes one after the other on one fresh cache."""
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as cache:
        return {name: _compile_process(contender, options, cache) for name in ("cold", "warm")}


def _compile_process(contender: str, options: argparse.Namespace, cache: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.compare", "--compile-worker", contender, "--which", options.which]
    command += ["--megabytes", str(options.megabytes), "--threads", str(options.threads)]
    command += ["--patterns", *options.patterns] if options.patterns else []
    environment = os.environ | cache_environment(cache)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def compile_worker(contender: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each first call beyond a later one. What a compiler builds once a machine is `first_call`, apart."""
    warm_up = CONTENDERS[contender](lambda x: torch.relu(x) * 2)
    first_call = seconds_of(lambda: warm_up(torch.ones(WARM_UP_SIZE)))
    found: dict[str, Any] = {}
    for job in jobs(options.patterns, options.which):
        torch._dynamo.reset()
        call = job.bind(contender, job.inputs(options.megabytes))
        try:
            first = seconds_of(call)
            found[job.name] = max(0.0, first - statistics.median(seconds_of(call) for _ in range(3)))
        except Exception as cause:
            print(f"{job.name}: {failure(cause)}", file=sys.stderr)
    return {"once": first_call, "seconds": found}


def compile_totals(compiles: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Summed over the jobs that every compiler managed, so that a failure does not look like speed."""
    runs = [run["seconds"] for both in compiles.values() for run in both.values() if "seconds" in run]
    shared = set.intersection(*map(set, runs)) if runs else set()
    return {
        name: {kind: sum(run["seconds"][job] for job in shared) for kind, run in both.items() if "seconds" in run}
        for name, both in compiles.items()
    }


# ---- are the results right? ---------------------------------------------------------------------------------------------


def check_job(job: Job, contender: str, megabytes: int) -> str:
    """Empty when the contender's outputs, gradients and changed inputs are eager's; float32 is compared with double
    precision, as eager itself loses digits in sums over many rows."""
    torch._dynamo.reset()
    inputs = {"eager": job.inputs(megabytes), contender: job.inputs(megabytes)}
    if not job.pattern.random:
        inputs["eager"] = tuple(_wide(t) for t in inputs["eager"])
    try:
        expected, actual = ((job.bind(name, given)(), given) for name, given in inputs.items())
        if job.pattern.random:
            return _check_random(job, expected[0], actual[0])
        for e, a in zip((*expected[0], *expected[1]), (*actual[0], *actual[1]), strict=True):
            torch.testing.assert_close(a, e.to(a.dtype), **_tolerance(a.dtype))
    except Exception as cause:
        return failure(cause)
    return ""


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.detach().double().requires_grad_(t.requires_grad) if t.dtype is torch.float32 else t


def _tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float16: {"rtol": 1e-2, "atol": 1e-2}}.get(dtype, {})


def _check_random(job: Job, expected: tuple[torch.Tensor, ...], actual: tuple[torch.Tensor, ...]) -> str:
    """Only what does not depend on the draw: how much is dropped."""
    for e, a in zip(expected, actual, strict=True):
        if e.shape != a.shape or abs((e == 0).float().mean() - (a == 0).float().mean()) > 0.01:
            return f"{job.name}: another shape or another share of zeros"
    return ""


def check_all(options: argparse.Namespace, console: Console) -> int:
    wrong = 0
    for job in jobs(options.patterns, options.which):
        for contender in options.contenders:
            if contender in COMPILERS:
                problem = check_job(job, contender, options.megabytes)
                wrong += bool(problem)
                console.print(
                    f"{'WRONG' if problem else 'right'}  {contender:10} {job.name}  {problem}", highlight=False, markup=False
                )
    console.print(f"{wrong} wrong")
    return 1 if wrong else 0


# ---- the report ---------------------------------------------------------------------------------------------------------


def print_times(rows: list[dict[str, Any]], options: argparse.Namespace, rate: float, console: Console) -> None:
    names = options.contenders
    table = Table(title=f"Microseconds a call (medians, {options.threads} threads); copy rate {rate / 1e9:.1f} GB/s")
    table.add_column("pattern")
    for column in (*names, "inductor / kgen", "eager / kgen", "eager / again", "of copy rate"):
        table.add_column(column, justify="right")
    for row in rows:
        times = row["times"]
        cells = [f"{times[name]['median'] * 1e6:.1f}" if name in times else "failed" for name in names]
        share = row["fewest_bytes"] / rate / times["kgen"]["median"] if "kgen" in times else None
        pairs = (("inductor", "kgen"), ("eager", "kgen"), ("eager", "eager-again"))
        table.add_row(row["name"], *cells, *(_number(ratio(row, *pair)) for pair in pairs), _number(share))
    summary = [_number(value) for value in geomeans(rows).values()]
    table.add_row("geomean", *[""] * len(names), *summary, "", style="bold")
    console.print(table)
    for row in rows:
        for name, why in row["failed"].items():
            console.print(f"{name} failed on {row['name']}: {why}", highlight=False, markup=False)


def geomeans(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Over the rows where both work."""
    found: dict[str, float | None] = {}
    for slow, fast in (("inductor", "kgen"), ("eager", "kgen"), ("eager", "eager-again")):
        values = [value for row in rows if (value := ratio(row, slow, fast)) is not None]
        found[f"{slow}/{fast}"] = geomean(values) if values else None
    return found


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def print_compiles(compiles: dict[str, Any], console: Console) -> None:
    table = Table(title="Compile seconds, summed over the jobs that every compiler managed")
    for column in ("compiler", "cold", "warm", "once (cold)", "once (warm)", "jobs"):
        table.add_column(column, justify="right")
    totals = compile_totals(compiles)
    for name, both in compiles.items():
        errors = [run["error"] for run in both.values() if "error" in run]
        if errors:
            table.add_row(name, "failed")
            console.print(f"{name}: {errors[0]}", highlight=False, markup=False)
            continue
        cold, warm = both["cold"], both["warm"]
        cells = (totals[name]["cold"], totals[name]["warm"], cold["once"], warm["once"])
        table.add_row(name, *(f"{value:.2f}" for value in cells), str(len(cold["seconds"])))
    console.print(table)


# ---- the command --------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="*", default=[], help="default: all")
    parser.add_argument("--which", choices=("forward", "training", "both"), default="both")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["eager", "eager-again", "inductor", "kgen"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--megabytes", type=int, default=16, help="size of a pattern's inputs, about")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for one row, at least")
    parser.add_argument("--rounds", type=int, default=11, help="rounds for one row, at least")
    parser.add_argument("--no-compile-times", action="store_true", help="leave the cold and warm processes out")
    parser.add_argument("--check", action="store_true", help="compare results with eager's; time nothing")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile-worker", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.compile_worker:
        print(json.dumps(compile_worker(options.compile_worker, options)))
        return 0
    if options.check:
        return check_all(options, console)
    # of its own: Inductor's cached kernels keep the number of threads that they were first compiled for
    folder = tempfile.TemporaryDirectory(prefix="kgen-bench-")
    os.environ |= cache_environment(folder.name)
    compilers = [] if options.no_compile_times else [name for name in options.contenders if name in COMPILERS]
    compiles = {name: compile_times(name, options) for name in compilers}
    rows = []
    for job in jobs(options.patterns, options.which):
        rows.append(time_job(job, options))
        console.print(f"timed {job.name}", style="dim")
    rate = copy_rate(options.threads)
    print_times(rows, options, rate, console)
    print_compiles(compiles, console)
    if options.json:
        facts = {
            "megabytes": options.megabytes, "copy_rate": rate, "geomeans": geomeans(rows), "compile": compiles,
            "compile_totals": compile_totals(compiles),
        }  # fmt: skip
        write(options.json, "compare", rows, facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
