"""Imperative programs on a CPU: decoders of detectors with suppression, recurrent networks; eager, Inductor and kgen.

python -m bench.imperative --cpu-time --json out.json
python -m bench.imperative --only lstm yolov3 --scale 2 --seconds 1

The programs are those of `tests/models/imperative/workloads.py`, for inference, with float32. `--scale` makes their tensors
larger and their loops longer. Kernels are counted while compiling, library calls not among them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch._inductor import metrics

from bench.contenders import CONTENDERS, copy_of
from bench.cpu_runs import Row, compared, measured, options_of, show_geomean, show_row
from kgen.counters import counters
from tests.models.imperative.workloads import WORKLOADS, Workload

NAMES = ("eager", "inductor", "kgen")
PEERS = ("eager", "inductor")


def joined(results: Any) -> Tensor:
    """All results as one row of numbers."""
    return torch.cat([one.flatten().double() for one in ([results] if isinstance(results, Tensor) else results)])


def kernels() -> int:
    """How many have been generated in this process."""
    return int(counters["kernels"]) + int(metrics.generated_kernel_count)


def call_of(workload: Workload, args: Sequence[Tensor], counts: dict[str, int], name: str) -> Callable[[], Tensor]:
    """A call of a contender, compiled; what it took in kernels goes to `counts`."""
    run, before = CONTENDERS[name](copy_of(workload.run)), kernels()
    run(*args)
    counts[name] = kernels() - before
    return lambda: joined(run(*args))


def measure(scale: int, workload: Workload, _dtype: torch.dtype, options: argparse.Namespace) -> Row:
    args, counts = workload.arguments(scale), dict[str, int]()
    want = joined(workload.run(*(arg.double() if arg.is_floating_point() else arg for arg in args)))
    row = compared(partial(call_of, workload, args, counts), lambda _name: nullcontext(), want, options)
    return {**row, "kernels": counts}


def show(title: str, row: Row, console: Console) -> None:
    show_row(title, row, console, PEERS, f"kernels {row['kernels']} errors {row['errors']}")


def scale_of(arguments: list[str]) -> int:
    """Takes `--scale` out of the command line; the other options are those of all CPU benches."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--scale", type=int, default=4)
    known, arguments[:] = parser.parse_known_args(arguments)
    return int(known.scale)


def main() -> int:
    rest = sys.argv[1:]
    scale = scale_of(rest)
    sys.argv[1:] = rest
    cases = {one.name: one for one in WORKLOADS}
    options = options_of(__doc__, "workload", cases, ["float32"], NAMES, NAMES)
    console = Console(width=160)
    rows = measured(cases, {"float32": torch.float32}, partial(measure, scale), show, options, console)
    show_geomean(rows.values(), console, PEERS)
    show_geomean(rows.values(), console, ("inductor",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
