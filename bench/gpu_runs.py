"""What benches of a family of GPU templates have in common: arguments, contenders that ran, rows that are kept one by one."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.contenders import failure
from bench.gpu_timing import Entry, Function, machine_rates, prepare
from bench.measure import synchronize
from bench.measurements import bench_of, rows_in, write

QUICK_SECONDS = 450.0
Row = dict[str, Any]


@dataclass(frozen=True)
class Runner:
    """`make` gives the function to time, None where there is none; `template` is that which has to be used."""

    make: Callable[[], Function | None]
    context: AbstractContextManager[Any]
    template: str = ""


def add_arguments(parser: argparse.ArgumentParser, patterns: Collection[str], contenders: Collection[str], shrunk: str) -> None:
    """Those of all such benches but `--templates` and `--most`; `shrunk` is what `--shrink` divides."""
    parser.add_argument("--only", nargs="+", choices=patterns, help="patterns")
    parser.add_argument("--quick", action="store_true", help=f"the essential ones, none begun after {QUICK_SECONDS:.0f} s")
    parser.add_argument("--contenders", nargs="+", choices=contenders, help="all; of a quick run those that compile fast")
    parser.add_argument("--smoke", action="store_true", help="only whether each configuration is right, on small sizes")
    parser.add_argument("--seconds", type=float, default=None, help="of measuring, for each pattern: 3, of a quick run 1")
    parser.add_argument("--budget", type=float, default=None, help="begin no pattern after so many seconds")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help=f"divide {shrunk} by about this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """With the times that a run has, quick or not."""
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    options.budget = options.budget or (QUICK_SECONDS if options.quick else math.inf)
    return options


def require_gpu(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --shrink 64 tries the command out")


def prepared(
    runners: Mapping[str, Runner], sets: Sequence[list[Tensor]], want: Any, failed: dict[str, str], record: bool
) -> list[Entry]:
    """The contenders that ran, compiled; why the others did not is noted."""
    entries: list[Entry] = []
    for name, runner in runners.items():
        entry = Entry(name)
        try:
            function = runner.make()
            if function is None:
                continue
            prepare(entry, function, sets, want, runner.context, record)
        except Exception as cause:
            failed[name] = failure(cause)
            synchronize()
            continue
        if runner.template and not any(runner.template in line for line in entry.chosen):
            failed[name] = f"{runner.template} is not used: {'; '.join(entry.chosen)}"
            continue
        entries.append(entry)
    return entries


def run(
    options: argparse.Namespace,
    patterns: Mapping[str, Any],
    measure: Callable[[Any, argparse.Namespace, Mapping[str, float]], Row],
    show: Callable[[Row, Console], None],
) -> list[Row]:
    """Measures and shows patterns one after the other; the file has each at once. All are compiled for their sizes."""
    console = Console(width=200)
    started, rows = time.perf_counter(), []
    if options.append and options.json and options.json.exists():
        rows = rows_in(options.json)
    known = {row["name"] for row in rows}
    rates = machine_rates(options.device, 8192 if options.device == "cuda" else 64)
    console.print(", ".join(f"{name} {value:.3g}/s" for name, value in rates.items()), highlight=False)
    names = options.only or [n for n, p in patterns.items() if (p.quick or not options.quick) and n not in known]
    with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for name in names:
            if time.perf_counter() - started > options.budget:
                console.print(f"no time is left for {name} and what follows", highlight=False)
                break
            row = measure(patterns[name], options, rates)
            show(row, console)
            rows = [*(old for old in rows if old["name"] != name), row]
            if options.json:
                write(options.json, bench_of(measure), rows)
    return rows
