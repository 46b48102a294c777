"""What the CPU's benches have in common: their options, and the loop over cases and dtypes."""

from __future__ import annotations

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from bench.contenders import failure
from bench.measure import as_json, geomean, interleave, thread_count
from bench.measurements import bench_of, named, write

T = TypeVar("T")
Row = dict[str, Any]


def options_of(
    doc: str | None, case: str, cases: Iterable[str], dtypes: Iterable[str], contenders: Iterable[str], default: Iterable[str]
) -> argparse.Namespace:
    """The command line. `case` is the noun for one of the cases. With `cpu_time` there is one thread."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--dtype", nargs="+", choices=list(dtypes), default=list(dtypes))
    parser.add_argument("--contenders", nargs="+", choices=list(contenders), default=list(default))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=3.0, help=f"of measuring, for each {case}")
    parser.add_argument("--cpu-time", action="store_true", help="of one thread, for a machine that others use")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.cpu_time:
        options.threads = 1
    return options


def measured(
    cases: Mapping[str, T],
    dtypes: Mapping[str, torch.dtype],
    measure: Callable[[T, torch.dtype, argparse.Namespace], Row],
    show: Callable[[str, Row, Console], None],
    options: argparse.Namespace,
    console: Console,
) -> dict[str, Row]:
    """A row for each case that the options name in each dtype. Rows are shown, and written to the JSON, as they come."""
    rows: dict[str, Row] = {}
    with torch.no_grad(), thread_count(options.threads):
        for dtype, name in itertools.product(options.dtype, options.only):
            title = f"{name} {dtype}"
            rows[title] = measure(cases[name], dtypes[dtype], options)
            show(title, rows[title], console)
            if options.json:
                write(options.json, bench_of(getattr(measure, "func", measure)), named(rows))
    return rows


def compared(
    call_of: Callable[[str], Callable[[], Tensor] | None],
    settings: Callable[[str], AbstractContextManager[Any]],
    want: Tensor,
    options: argparse.Namespace,
) -> Row:
    """Errors and times of the contenders that the options name. `call_of` gives a contender's call, None where it has none, and
    `settings` what it is compiled under."""
    row: Row = {"failed": {}, "errors": {}}
    calls: dict[str, Callable[[], Tensor]] = {}
    for name in options.contenders:
        try:
            with settings(name):
                call = call_of(name)
                if call is None:
                    continue
                row["errors"][name] = ((call().double() - want).norm() / want.norm()).item()
        except Exception as cause:
            row["failed"][name] = failure(cause)
            continue
        calls[name] = call
    clock = time.process_time if options.cpu_time else time.perf_counter
    row["times"] = as_json(interleave(calls, seconds=options.seconds, clock=clock))
    return row


def ratio(row: Row, peers: Iterable[str], ours: str = "kgen") -> float:
    """The best peer's time over ours. Lower quartiles: on a machine that others use the rest is theirs."""
    times = {name: one["low"] for name, one in row["times"].items()}
    return min((times[peer] for peer in peers if peer in times), default=math.nan) / times.get(ours, math.nan)


def show_row(title: str, row: Row, console: Console, peers: Iterable[str], error: str) -> None:
    """Times, the ratio, and an error in the words of `error`."""
    times = "  ".join(f"{name} {one['low'] * 1e3:.3f}" for name, one in row["times"].items())
    console.print(f"[bold]{title}[/]: {times}  [bold]ratio {ratio(row, peers):.2f}[/] {error}", highlight=False)
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)


def show_geomean(rows: Iterable[Row], console: Console, peers: Iterable[str], ours: str = "kgen") -> None:
    known = [value for value in (ratio(row, peers, ours) for row in rows) if not math.isnan(value)]
    if known:
        console.print(f"geomean of the best peer over {ours}: {geomean(known):.3f}, lowest {min(known):.3f}, of {len(known)}")
