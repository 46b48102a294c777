"""Equal layers share kernels: what building the kernels of a GPT costs with 2 layers and with 12.

python -m bench.equal_layers --layers 2 12

Each model is compiled cold, in a process and a cache folder of its own in which what is built once a machine is there already.
The seconds are those of `build_units`, the step that runs the C++ compiler, over forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment, machine_facts


def run_child(layers: int) -> dict[str, float]:
    """Measured inside a fresh process."""
    from examples.gpt import GPT, TINY, random_batch
    from kgen.build import cpp
    from kgen.counters import counters

    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8))
    spent: list[float] = []
    cpp.build_units = _timed(cpp.build_units, spent)
    shape = replace(TINY, blocks=layers, width=128, sequence=64)
    torch.manual_seed(0)
    model = GPT(shape)
    batch = random_batch(shape, "cpu")
    torch._dynamo.reset()
    counters.reset()
    started = time.perf_counter()
    torch.compile(model, backend="kgen")(*batch).backward()
    whole = time.perf_counter() - started
    return {"build": sum(spent), "whole": whole, "kernels": counters["kernels"], "units": counters["cpp.compiles"]}


def _timed(f: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    @wraps(f)
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return f(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - started)

    return timed


def spawn(layers: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.equal_layers", "--child", str(layers)]
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | cache_environment(folder)
        )
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12])
    parser.add_argument("--repeats", type=int, default=1, help="the fastest of so many processes counts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        print(json.dumps(run_child(options.child)))
        return 0
    rows = {n: min((spawn(n) for _ in range(options.repeats)), key=lambda row: row["build"]) for n in options.layers}
    table = Table(title="Seconds, forward and backward")
    for column in ("layers", "kernel build", "ratio", "whole first step", "kernels called", "units compiled"):
        table.add_column(column, justify="right")
    base = rows[options.layers[0]]["build"]
    for n, row in rows.items():
        cells = f"{row['build']:.2f}", f"{row['build'] / base:.2f}", f"{row['whole']:.2f}"
        table.add_row(str(n), *cells, f"{row['kernels']:.0f}", f"{row['units']:.0f}")
    Console(width=None if sys.stdout.isatty() else 128).print(table)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
