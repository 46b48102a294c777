"""Models under eager, Inductor and kgen: errors, times, compile seconds, graph breaks, kernels; a process for each.

    python -m tests.models --device cuda --size base --dtype bfloat16 --json out.json
    python -m tests.models --models bert,unet --train --dynamic
    python -m tests.models --device cuda --size base --jobs 4 --kernels 12

With `--jobs`, several models are compiled at a time and timed one after the other. `--kernels` says where the time goes.
A model that crashes or hangs is a row with its error, and the others go on. Errors are against eager in float64. The caches
of both back ends are fresh, so that compile seconds are cold ones. The exit status is 1 if kgen failed or was wrong anywhere.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from torch import nn

import kgen
from tests.models.catalogue import MODELS, SIZES
from tests.models.check import Errors, Results, Run, Subject, cast, errors, graph_breaks, run, worst
from tests.models.estimates import Estimate, estimates, missed

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Step = Callable[[], Results]


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.models", description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--amp", action="store_true", help="float32 weights, the dtype under autocast")
    parser.add_argument("--train", action="store_true", help="forward and backward, instead of inference")
    parser.add_argument("--dynamic", action="store_true", help="torch.compile(dynamic=True)")
    parser.add_argument("--mode", default="default", help="kgen's mode, and Inductor's")
    parser.add_argument("--backends", default="inductor,kgen")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds; each calls eager and every back end once")
    parser.add_argument("--patience", type=float, default=900, help="seconds that a model may take")
    parser.add_argument("--json", default="", help="a file of one row a line, written as they come")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time; they are timed one after the other")
    parser.add_argument(
        "--kernels",
        type=int,
        default=0,
        help="the longest kernels of each contender, on a GPU, and those that the cost model misjudges most",
    )
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    unknown = set(args.models.split(",")) - MODELS.keys()
    if unknown:
        parser.error(f"no such models: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    return args


# ---- one model, in its own process ----------------------------------------------------------------------------------------


def measured(args: argparse.Namespace) -> Row:
    """Everything about one model."""
    torch._dynamo.config.allow_rnn = True
    subject = Subject(MODELS[args.one], args.size, getattr(torch, args.dtype), args.device, args.amp)
    arguments = subject.arguments()

    def step(call: Run, module: nn.Module) -> Results:
        return run(call, module, arguments, args.train, subject.autocast())

    exact = run(subject.exact, subject.exact, cast(arguments, torch.float64, args.device), args.train)
    subject.exact.to("meta")  # its memory is needed
    eager = step(subject.eager, subject.eager)
    row: Row = {
        "model": args.one,
        **_settings(args),
        "torch": torch.__version__,
        "eager_error": _most(errors(eager, eager, exact)),
    }
    expected: Mapping[str, Estimate] = {}
    contenders: dict[str, Step] = {"eager": lambda: step(subject.eager, subject.eager)}
    for name in args.backends.split(","):
        module = copy.deepcopy(subject.ours)
        try:
            compiled = _compiled(module, name, args)
            with estimates() if name == "kgen" and args.kernels else nullcontext(expected) as expected:
                row[name], got = _first_call(lambda: step(compiled, module), args.device)  # noqa: B023 called at once
            found = errors(got, eager, exact)
            row[name] |= {"error": _most(found), "wrong": worst(found)}
            contenders[name] = lambda compiled=compiled, module=module: step(compiled, module)
        except Exception:
            row[name] = {"failed": traceback.format_exc()[-3000:]}
    with _turn(args.lock):
        for name, seconds in _times(contenders, args.repeats, args.device).items():
            row.setdefault(name, {})["ms"] = round(seconds * 1e3, 4)
        if args.kernels and args.device != "cpu":
            for name, one in contenders.items():
                profile = _profile(one)
                row[name]["longest"] = _longest(profile, args.kernels)
                if name == "kgen":
                    row[name]["missed"] = missed(expected, profile)[: args.kernels]
    return row


@contextmanager
def _turn(lock: str) -> Iterator[None]:
    """What is timed does not run beside what other processes time."""
    if not lock:
        yield
        return
    with Path(lock).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _profile(step: Step, steps: int = 3) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of one step, by the names of kernels."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return {k.key: (k.self_device_time_total / steps, k.count / steps) for k in profile.key_averages()}


def _longest(profile: dict[str, tuple[float, float]], number: int) -> list[tuple[float, float, str]]:
    """Of the kernels with the most time, after all together: microseconds and launches of one step, and their name."""
    found = sorted(profile.items(), key=lambda item: -item[1][0])[:number]
    total = (sum(us for us, _ in profile.values()), sum(count for _, count in profile.values()))
    return [(round(us, 1), round(count, 2), name[:120]) for name, (us, count) in [("all", total), *found]]


def _settings(args: argparse.Namespace) -> Row:
    return {k: getattr(args, k) for k in ("device", "size", "dtype", "amp", "train", "dynamic", "mode")}


def _compiled(module: nn.Module, backend: str, args: argparse.Namespace) -> Run:
    options = {} if args.mode == "default" else {"mode": args.mode}
    return torch.compile(module, backend=backend, dynamic=True if args.dynamic else None, **options)  # type: ignore[call-overload]


def _first_call(step: Step, device: str) -> tuple[Row, Results]:
    """Compiles: its seconds, graph breaks, graphs, and what kgen says of itself."""
    torch._dynamo.utils.counters.clear()
    kgen.coverage_reset()
    start = time.perf_counter()
    got = step()
    _synchronize(device)
    seconds = time.perf_counter() - start
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    row: Row = {"compile_s": round(seconds, 3), "graph_breaks": graph_breaks(), "graphs": graphs}
    coverage = kgen.coverage()
    if coverage["graphs"]:
        row |= {name: coverage[name] for name in ("kernels", "externs", "replaced")}
    return row, got


def _most(found: Sequence[Errors]) -> float:
    return max((e.error for e in found), default=0.0)


def _times(contenders: dict[str, Step], repeats: int, device: str) -> dict[str, float]:
    """Medians of seconds, measured in turns."""
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(repeats + 3):
        for name, step in contenders.items():
            _synchronize(device)
            start = time.perf_counter()
            step()
            _synchronize(device)
            if k >= 3:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items() if seconds}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


# ---- all models -----------------------------------------------------------------------------------------------------------


def rows(args: argparse.Namespace, arguments: Sequence[str]) -> Iterator[Row]:
    """A row for each model, from a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kgen-models-") as folder, ThreadPool(args.jobs) as pool:
        lock = ["--lock", f"{folder}/lock"] if args.jobs > 1 else []
        names = args.models.split(",")
        yield from pool.imap_unordered(lambda name: _row(args, [*arguments, *lock], name, f"{folder}/{name}"), names)


def _row(args: argparse.Namespace, arguments: Sequence[str], name: str, folder: str) -> Row:
    caches = {"KGEN_CACHE_DIR": f"{folder}/kgen", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.models", *arguments, "--one", name]
    failed: Row = {"model": name, **_settings(args)}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **caches},
            capture_output=True,
            text=True,
            timeout=args.patience,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**failed, "failed": f"no answer in {args.patience:.0f} seconds"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    last = done.stdout.strip().rpartition("\n")[2]
    return json.loads(last) if done.returncode == 0 else {**failed, "failed": f"{done.returncode}: {done.stderr[-3000:]}"}


def _is_bad(row: Row) -> bool:
    return bool("failed" in row or row.get("kgen", {}).get("failed") or row.get("kgen", {}).get("wrong"))


def _line(row: Row) -> str:
    if "failed" in row:
        return f"{row['model']:14} FAILED {row['failed'].strip().splitlines()[-1][:150]}"
    cells = [f"{row['model']:14}", f"eager {row['eager']['ms']:9.3f} ms"]
    for name in ("inductor", "kgen"):
        one = row.get(name)
        if one and "failed" in one:
            cells.append(f"{name} FAILED {one['failed'].strip().splitlines()[-1][:80]}")
        elif one:
            cells.append(f"{name} {one['ms']:9.3f} ms, compile {one['compile_s']:6.1f} s")
            cells.append(f"breaks {one['graph_breaks']}, error {one['error']:.2g}")
            cells += [f"WRONG {one['wrong']}"] if one["wrong"] else []
    return " | ".join(cells)


def main() -> int:
    args = parsed()
    if args.one:
        warnings.simplefilter("ignore")
        print(json.dumps(measured(args)))
        return 0
    bad = False
    if args.json:
        Path(args.json).unlink(missing_ok=True)
    for row in rows(args, sys.argv[1:]):
        bad |= _is_bad(row)
        print(_line(row), flush=True)
        if args.json:
            with Path(args.json).open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
