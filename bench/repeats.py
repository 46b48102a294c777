"""Loops that Dynamo unrolls: what kgen and Dynamo spend on n row writes, with and without batches of iterations, and on
recurrent cells over n steps, rolled and unrolled.

python -m bench.repeats --rows 10 100 1000
python -m bench.repeats --rows --loops rnn lstm --steps 10 50

Each row is compiled cold, in a process and a cache folder of its own in which what is built once a machine is there already.
The seconds of kgen are those of its back end: Dynamo's own grow with n. Those of recurrent cells are CPU time on one thread, of
compilers too; so are the times of a call, the fastest of many. With `--training`, a call is a forward and a backward pass.
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
Cell = Callable[..., torch.Tensor]
BATCH, FEATURES = 16, 64


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


def rnn(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = x.new_zeros(x.shape[0], u.shape[0])
    rows = []
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ w + h @ u + b)
        rows.append(h)
    return torch.stack(rows, 1)


def lstm(x: torch.Tensor, w: torch.Tensor, u: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    h = c = x.new_zeros(x.shape[0], u.shape[0])
    rows = []
    for t in range(x.shape[1]):
        i, f, g, o = (x[:, t] @ w + h @ u + b).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        rows.append(h)
    return torch.stack(rows, 1)


# A cell, and how many times its features it has gates.
CELLS: dict[str, tuple[Cell, int]] = {"rnn": (rnn, 1), "lstm": (lstm, 4)}


def run_cell(name: str, steps: int, rolling: bool, training: bool) -> Row:
    """Measured inside a fresh process."""
    from kgen import backend
    from kgen.counters import counters

    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8))
    cell, gates = CELLS[name]
    sizes = (BATCH, steps, FEATURES), (FEATURES, gates * FEATURES), (FEATURES, gates * FEATURES), (gates * FEATURES,)
    args = [(torch.randn(size) * 0.1).requires_grad_(training) for size in sizes]
    spent: list[float] = []

    def timed(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = cpu_seconds()
        made = backend.kgen_backend(gm, inputs, options={"loop_rolling": "on" if rolling else "off"})
        spent.append(cpu_seconds() - started)
        return made

    def call(run: Cell) -> float:
        """The CPU seconds of a call's forward and backward pass, one by one."""
        started = cpu_seconds()
        result = run(*args)
        middle = cpu_seconds()
        if training:
            result.sum().backward()
        backwards.append(cpu_seconds() - middle)
        return cpu_seconds() - started

    backwards: list[float] = []
    torch._dynamo.reset()
    counters.reset()
    run = torch.compile(cell, backend=timed)
    whole = call(run)
    seconds = sum(spent) + backwards[0]
    return {
        "kgen": seconds,
        "whole": whole,
        "kernels": counters["kernels"],
        "run": fastest(call, run),
        "eager": fastest(call, cell),
    }


def fastest(call: Callable[[Cell], float], run: Cell) -> float:
    """A call's CPU seconds in the fastest of ten rounds: the clock is too coarse for single calls."""
    return min(sum(call(run) for _ in range(20)) / 20 for _ in range(10))


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    waited = os.times()
    return time.process_time() + waited.children_user + waited.children_system


def spawn(*arguments: str) -> Row:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.repeats", *arguments]
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
    parser.add_argument("--rows", type=int, nargs="*", default=[10, 100, 1000])
    parser.add_argument("--loops", choices=list(CELLS), nargs="*", default=[], help="recurrent cells to measure")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 50])
    parser.add_argument("--training", action="store_true", help="recurrent cells with their backward pass")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many processes counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--unrolled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(_child(options)))
        return 0
    found = {**_row_writes(options), **_cells(options)}
    _show(found)
    if options.json:
        write(options.json, "repeats", [Entry(name, {"kgen": row["kgen"]}, {}, row) for name, row in found.items()])
    return 0


def _child(options: argparse.Namespace) -> Row:
    name, _, count = options.child.rpartition(":")
    if not name:
        return run_child(int(count), not options.unrolled)
    return run_cell(name, int(count), not options.unrolled, options.training)


def _row_writes(options: argparse.Namespace) -> dict[str, Row]:
    return {
        f"{n} rows, {'batched' if batching else 'unrolled'}": _best(options, str(n), batching)
        for batching in (True, False)
        for n in options.rows
    }


def _cells(options: argparse.Namespace) -> dict[str, Row]:
    return {
        f"{name}, {n} steps, {'rolled' if rolling else 'unrolled'}": _best(options, f"{name}:{n}", rolling)
        for name in options.loops
        for rolling in (True, False)
        for n in options.steps
    }


def _best(options: argparse.Namespace, child: str, rolling: bool) -> Row:
    arguments = ["--child", child, *([] if rolling else ["--unrolled"]), *(["--training"] if options.training else [])]
    return min((spawn(*arguments) for _ in range(options.repeats)), key=lambda row: row["kgen"])


def _show(found: dict[str, Row]) -> None:
    table = Table(title="Seconds until the first call has returned")
    for column in ("loop", "kgen", "with Dynamo", "kernels", "a call, ms", "eager, ms"):
        table.add_column(column, justify="right")
    for name, row in found.items():
        times = [f"{row[key] * 1e3:.2f}" if key in row else "" for key in ("run", "eager")]
        table.add_row(name, f"{row['kgen']:.2f}", f"{row['whole']:.2f}", f"{row['kernels']:.0f}", *times)
    Console(width=None if sys.stdout.isatty() else 128).print(table)


if __name__ == "__main__":
    sys.exit(main())
