"""What a step costs where equal layers are calls of one body: both ways take turns in one process.

python -m bench.layer_calls                              # a GPT of several widths and depths
python -m bench.layer_calls --sizes 48x64x32 --profile   # functions of Python's that a shared step spends its time in

A size is layers x width x sequence. Milliseconds are CPU time on one thread, the least and the median of the steps. `inference`
is a call without gradients, `training` a forward and a backward pass. The first column is as layers are compiled one by one.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment
from bench.measurements import Entry, write

SIZES = ("12x64x32", "48x64x32", "48x128x64", "12x256x128", "12x768x128")
Step = Callable[[], None]


def steps_of(size: str, sharing: object, training: bool) -> Step:
    """A compiled model's step."""
    from examples.gpt import GPT, TINY, random_batch

    layers, width, sequence = map(int, size.split("x"))
    shape = replace(TINY, blocks=layers, width=width, sequence=sequence)
    torch.manual_seed(0)
    model = GPT(shape)
    batch = random_batch(shape, "cpu")
    run = torch.compile(model, backend="kgen", options={"layer_sharing": sharing})

    parameters = list(model.parameters())

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        run(*batch).backward()

    def infer() -> None:
        with torch.no_grad():
            run(*batch)

    return train if training else infer


def run_child(size: str, training: bool, steps: int, profile: bool) -> dict[str, float]:
    """Measured inside a fresh process."""
    torch.set_num_threads(1)
    contenders: dict[str, Step] = {}
    for name, sharing in (("one by one", "off"), ("shared", "on")):
        torch._dynamo.reset()
        contenders[name] = steps_of(size, sharing, training)
        contenders[name]()
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(steps):
        for name, step in contenders.items():
            started = time.process_time()
            step()
            taken[name].append(time.process_time() - started)
    if profile:
        show_profile(contenders["shared"])
    found = {}
    for name, seconds in taken.items():
        found[f"{name}, least"], found[f"{name}, median"] = min(seconds), statistics.median(seconds)
    return found


def show_profile(step: Step) -> None:
    profile = cProfile.Profile()
    with profile:
        for _ in range(20):
            step()
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def spawn(size: str, training: bool, steps: int, profile: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.layer_calls", "--child", size, "--steps", str(steps)]
        command += ["--training"] * training + ["--profile"] * profile
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            command, cwd=root, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | cache_environment(folder)
        )
    if done.returncode != 0:
        sys.exit(done.returncode)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(rows: dict[str, dict[str, float]]) -> None:
    table = Table(title="CPU milliseconds of a step")
    for column in ("model", "one by one: least", "median", "shared: least", "median", "shared over one by one"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        least, median = (row[f"shared, {one}"] / row[f"one by one, {one}"] for one in ("least", "median"))
        cells = [f"{1e3 * row[f'{way}, {one}']:.2f}" for way in ("one by one", "shared") for one in ("least", "median")]
        table.add_row(name, *cells, f"{least:.3f} {median:.3f}")
    Console(width=None if sys.stdout.isatty() else 128).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="layers x width x sequence")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--kinds", choices=["inference", "training"], nargs="+", default=["inference", "training"])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--training", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(run_child(options.child, options.training, options.steps, options.profile)))
        return 0
    rows = {
        f"{size}, {kind}": spawn(size, kind == "training", options.steps, options.profile)
        for size in options.sizes
        for kind in options.kinds
    }
    show(rows)
    if options.json:
        write(options.json, "layer_calls", [Entry(name, {}, {}, dict(row)) for name, row in rows.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
