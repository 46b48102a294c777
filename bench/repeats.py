"""Loops that Dynamo unrolls: what kgen and Dynamo spend on n row writes, with and without batches of iterations.

python -m bench.repeats --rows 10 100 1000

Each row is compiled cold, in a process and a cache folder of its own in which what is built once a machine is there already.
The seconds of kgen are those of its back end: Dynamo's own grow with n.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment
from bench.measurements import Entry, write

Row = dict[str, float]


def run_child(rows: int, batching: bool) -> Row:
    """Measured inside a fresh process."""
    from kgen import backend
    from kgen.counters import counters

    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8))
    spent: list[float] = []

    def timed(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = time.perf_counter()
        made = backend.kgen_backend(gm, inputs, options={"loop_batching": batching})
        spent.append(time.perf_counter() - started)
        return made

    def write_rows(b: torch.Tensor) -> None:
        for i in range(rows):
            b[i] = b[i] + 1

    torch._dynamo.reset()
    counters.reset()
    started = time.perf_counter()
    torch.compile(write_rows, backend=timed)(torch.zeros(rows, 64))
    return {"kgen": sum(spent), "whole": time.perf_counter() - started, "kernels": counters["kernels"]}


def spawn(rows: int, batching: bool) -> Row:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.repeats", "--child", str(rows), *(() if batching else ("--unrolled",))]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | cache_environment(folder)
        )
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many processes counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--unrolled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(run_child(options.child, not options.unrolled)))
        return 0
    found = {
        f"{n} rows, {'batched' if batching else 'unrolled'}": min(
            (spawn(n, batching) for _ in range(options.repeats)), key=lambda row: row["kgen"]
        )
        for batching in (True, False)
        for n in options.rows
    }
    table = Table(title="Seconds until the first call has returned")
    for column in ("loop", "kgen", "with Dynamo", "kernels"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        table.add_row(name, f"{row['kgen']:.2f}", f"{row['whole']:.2f}", f"{row['kernels']:.0f}")
    Console(width=None if sys.stdout.isatty() else 128).print(table)
    if options.json:
        write(options.json, "repeats", [Entry(name, {"kgen": row["kgen"]}, {}, row) for name, row in found.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
