"""An optimiser step over many tensors: eager's foreach operators, Inductor and kgen, taking turns in one process.

python -m bench.foreach --threads 2 --json out.json
python -m bench.foreach --device cuda --json out.json

`floor` is the time in which a copy of a large tensor moves as many bytes as the step must.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import as_json, cache_environment, copy_rate, interleave, seconds_of
from bench.measurements import write

Shapes = list[tuple[int, ...]]


def mixed(count: int) -> Shapes:
    """Vectors of 10 to 10,000 elements, as many short as long ones."""
    generator = torch.Generator().manual_seed(0)
    exponents = 1 + 3 * torch.rand(count, generator=generator)
    return [(int(10**e),) for e in exponents.tolist()]


CASES: dict[str, Shapes] = {"100 of 256x1024": [(256, 1024)] * 100, "300 of 10 to 10,000": mixed(300)}


def adam(shapes: Shapes, device: str) -> Callable[[], Any]:
    """A step that has run once, so that its state exists."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    # counters on the CPU would each be copied to the GPU, step by step
    optimiser = torch.optim.Adam(parameters, foreach=True, capturable=device.startswith("cuda"))
    optimiser.step()
    return optimiser.step


def contenders(shapes: Shapes, device: str) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
    """Calls that are compiled, and the seconds that their first call took beyond a later one."""
    calls: dict[str, Callable[[], Any]] = {"eager": adam(shapes, device)}
    compiling: dict[str, float] = {}
    for name in ("inductor", "kgen"):
        torch._dynamo.reset()
        call = calls[name] = torch.compile(adam(shapes, device), backend=name)
        first = seconds_of(call)
        compiling[name] = first - statistics.median(seconds_of(call) for _ in range(3))
    return calls, compiling


def step_bytes(shapes: Shapes) -> int:
    """Parameters and both averages are read and written, gradients read."""
    return sum(7 * 4 * torch.Size(shape).numel() for shape in shapes)


def run(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    where = f"{options.threads} threads" if options.device == "cpu" else options.device
    table = Table(title=f"Adam step, microseconds (medians, {where}), and compile seconds")
    columns = (
        "tensors",
        "floor",
        "eager",
        "inductor",
        "kgen",
        "eager / kgen",
        "inductor / kgen",
        "compile: inductor",
        "compile: kgen",
    )
    for column in columns:
        table.add_column(column, justify="right")
    rows = []
    rate = copy_rate(options.threads, device=options.device)
    for name, shapes in CASES.items():
        calls, compiling = contenders(shapes, options.device)
        times = interleave(calls, seconds=options.seconds, rounds=options.rounds)
        median = {who: timing.median for who, timing in times.items()}
        floor = step_bytes(shapes) / rate
        cells = [f"{seconds * 1e6:.0f}" for seconds in (floor, *median.values())]
        cells += [f"{median[who] / median['kgen']:.2f}" for who in ("eager", "inductor")]
        table.add_row(name, *cells, *(f"{seconds:.2f}" for seconds in compiling.values()))
        rows.append({"name": name, "floor": floor, "times": as_json(times), "compile": compiling})
    console.print(table)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for one row, at least")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        os.environ |= cache_environment(folder)  # of its own: compile times are cold ones
        for backend in ("inductor", "kgen"):  # what each builds once a machine
            torch.compile(lambda x: torch.relu(x) * 2, backend=backend)(torch.ones(8, device=options.device))
        rows = run(options, Console(width=None if sys.stdout.isatty() else 160))
    if options.json:
        write(options.json, "foreach", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
