"""Equal layers are compiled once: what compiling a GPT costs with 2 layers and with 48, with and without `layer_sharing`.

python -m bench.equal_layers --layers 2 12 48

Each model is compiled cold, in a process and a cache folder of its own in which what is built once a machine is there already.
Seconds are CPU time of the process and of the compilers that it starts, over forward and backward, on one thread. Those of kgen
are its back end's, AOTAutograd's tracing included; Dynamo's own grow with the layers. A step is a forward and a backward pass.
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment
from bench.measurements import Entry, write

Row = dict[str, float]


def run_child(layers: int, sharing: bool, steps: int) -> Row:
    """Measured inside a fresh process."""
    from examples.gpt import GPT, TINY, random_batch
    from kgen import backend
    from kgen.counters import counters

    torch.set_num_threads(1)
    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8))
    spent: list[float] = []

    def timed(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        started = cpu_seconds()
        made = backend.kgen_backend(gm, inputs, options={"layer_sharing": "on" if sharing else "off"})
        spent.append(cpu_seconds() - started)
        return made

    shape = replace(TINY, blocks=layers, width=128, sequence=64)
    torch.manual_seed(0)
    model = GPT(shape)
    batch = random_batch(shape, "cpu")
    torch._dynamo.reset()
    counters.reset()
    run = torch.compile(model, backend=timed)
    started = cpu_seconds()
    loss = run(*batch)
    forward = cpu_seconds()
    loss.backward()
    ended = cpu_seconds()
    taken = sorted(_seconds_of_step(run, batch) for _ in range(steps))
    return {
        "kgen": sum(spent) + ended - forward,
        "whole": ended - started,
        "kernels": counters["kernels"],
        "calls": counters["extern.invoke_subgraph"],
        "step": taken[len(taken) // 2],
    }


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def _seconds_of_step(run: Callable[..., Any], batch: Sequence[torch.Tensor]) -> float:
    started = time.process_time()
    run(*batch).backward()
    return time.process_time() - started


def spawn(layers: int, sharing: bool, steps: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.equal_layers", "--child", str(layers), "--steps", str(steps)]
        command += [] if sharing else ["--unshared"]
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
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 48])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many processes counts")
    parser.add_argument("--steps", type=int, default=10, help="forward and backward passes that are timed")
    parser.add_argument("--sharing", choices=["on", "off", "both"], default="both")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--unshared", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(run_child(options.child, not options.unshared, options.steps)))
        return 0
    rows = {
        f"{n} layers, {'shared' if sharing else 'one by one'}": min(
            (spawn(n, sharing, options.steps) for _ in range(options.repeats)), key=lambda row: row["kgen"]
        )
        for sharing in (True, False)
        if options.sharing in ("both", "on" if sharing else "off")
        for n in options.layers
    }
    show(rows)
    if options.json:
        write(options.json, "equal_layers", [Entry(name, {"kgen": row["kgen"]}, {}, row) for name, row in rows.items()])
    return 0


def show(rows: dict[str, Row]) -> None:
    table = Table(title="CPU seconds until the first backward pass has returned")
    for column in ("model", "kgen", "with Dynamo", "kernels", "calls", "a step, ms"):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        cells = f"{row['kgen']:.2f}", f"{row['whole']:.2f}", f"{row['kernels']:.0f}", f"{row['calls']:.0f}"
        table.add_row(name, *cells, f"{row['step'] * 1e3:.1f}")
    Console(width=None if sys.stdout.isatty() else 128).print(table)


if __name__ == "__main__":
    sys.exit(main())
