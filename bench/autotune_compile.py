"""What compiling with measured choices costs: kgen's max-autotune against Inductor's, in fresh processes.

python -m bench.autotune_compile --json out/autotune_compile.json
python -m bench.autotune_compile --only 1 2 3 --json out/autotune_compile.json --append     # a part of the list at a time
python -m bench.autotune_compile --device cpu --shrink 64 --only 2 --compilers kgen kgen-autotune

Of each compiler two processes run one after the other on one folder of caches that is empty before: the first is cold, the
second finds what the first has left, kgen's tuning file among it. A matmul's seconds are those of its first call beyond a
later one. What a process does once (starting up, building a runtime, starting workers) is met by a function compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.contenders import copy_of, failure
from bench.matmuls import BY_NUMBER, MATMULS
from bench.measure import cache_environment, seconds_of
from bench.measurements import Entry, read, write
from bench.report import markdown
from bench.results import Results

Function = Callable[..., Any]
NO_GRAPHS = "max-autotune-no-cudagraphs"
COMPILERS: dict[str, Callable[[Function], Function]] = {
    "max-autotune": lambda fn: torch.compile(fn, mode=NO_GRAPHS, fullgraph=True),
    "inductor": lambda fn: torch.compile(fn, fullgraph=True),
    "kgen-autotune": lambda fn: torch.compile(fn, backend="kgen", mode=NO_GRAPHS, fullgraph=True),
    "kgen": lambda fn: torch.compile(fn, backend="kgen", fullgraph=True),
}


def cold_and_warm(compiler: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        return {kind: _process(compiler, options, folder) for kind in ("cold", "warm")}


def _process(compiler: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.autotune_compile", "--worker", compiler, "--only", *options.only]
    command += ["--device", options.device, "--shrink", str(options.shrink)]
    environment = os.environ | cache_environment(folder)
    environment.pop("KGEN_TUNING_FILE", None)
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:200]}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def worker(compiler: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds by matmul; what went wrong with the others."""
    compiled = COMPILERS[compiler]
    small = torch.ones(8, device=options.device)
    first_call = seconds_of(lambda: compiled(lambda x: torch.relu(x) * 2)(small))
    found: dict[str, Any] = {"once": first_call, "seconds": {}, "errors": {}}
    with torch.no_grad():
        for number in options.only:
            torch._dynamo.reset()
            matmul = BY_NUMBER[number].shrunk(options.shrink)
            torch.backends.cuda.matmul.allow_tf32 = matmul.tf32
            args, fn = matmul.make(options.device), compiled(copy_of(matmul.fn))
            try:
                first = seconds_of(lambda fn=fn, args=args: fn(*args))
                again = statistics.median(seconds_of(lambda fn=fn, args=args: fn(*args)) for _ in range(3))
                found["seconds"][number] = max(0.0, first - again)
            except Exception as cause:
                found["errors"][number] = failure(cause)
    return found


def joined(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Of runs over parts of the list: the matmuls of both, the newer ones where both have them."""
    result = dict(older)
    for compiler, runs in newer.items():
        before = older.get(compiler, {})
        result[compiler] = {
            kind: {**run, **{part: before.get(kind, {}).get(part, {}) | run.get(part, {}) for part in ("seconds", "errors")}}
            for kind, run in runs.items()
        }
    return result


def entries_of_runs(found: dict[str, Any]) -> list[Entry]:
    """An entry for each matmul, with the seconds of each compiler in a cold and in a warm process."""
    runs = {f"{compiler}, {kind}": run for compiler, kinds in found.items() for kind, run in kinds.items()}
    numbers = dict.fromkeys(number for run in runs.values() for number in (*run.get("seconds", {}), *run.get("errors", {})))

    def entry(number: str) -> Entry:
        taken = {name: run["seconds"][number] for name, run in runs.items() if number in run.get("seconds", {})}
        return Entry(
            number, taken, {name: run["errors"][number] for name, run in runs.items() if number in run.get("errors", {})}
        )

    return [entry(number) for number in numbers]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NUMBER), default=[p.number for p in MATMULS])
    parser.add_argument("--compilers", nargs="+", choices=list(COMPILERS), default=["max-autotune", "kgen-autotune"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by about this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="add to what the JSON has")
    parser.add_argument("--worker", choices=list(COMPILERS), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.worker:
        print(json.dumps(worker(options.worker, options)))
        return 0
    found: dict[str, Any] = {}
    if options.append and options.json and options.json.exists():
        found = read(options.json).facts
    for compiler in options.compilers:
        found = joined(found, {compiler: cold_and_warm(compiler, options)})
        if options.json:
            write(options.json, "autotune_compile", entries_of_runs(found), found)
    print(markdown(Results([], compiles=found)))
    for compiler, runs in found.items():
        for kind, run in runs.items():
            slowest = sorted(run["seconds"].items(), key=lambda item: -item[1])[:5]
            print(
                f"{compiler}, {kind}: once {run.get('first_call', 0):.1f} s; slowest",
                ", ".join(f"{n} {s:.2f} s" for n, s in slowest),
            )
            print(*(f"  {number} failed: {why}" for number, why in run["errors"].items()), sep="\n", end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
