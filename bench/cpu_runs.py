"""What the CPU's benches have in common: their options, and the loop over cases and dtypes."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from bench.measure import machine_facts, thread_count

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
                options.json.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1))
    return rows
