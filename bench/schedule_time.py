"""How long it takes to schedule a training step of the transformer of examples/gpt.py, and how that grows with its blocks.

    python -m bench.schedule_time
    python -m bench.schedule_time --blocks 4 --device gpu --repeats 9 --json out.json

The times are CPU seconds of the stage `schedule`: medians of repeats with the garbage collector off. Each repeat lowers the
graph anew. The exponent is the slope of log time over log nodes of the lowered graphs. Tensors have no data and nothing is
compiled; the GPU is an H200 that need not exist. `bench.scheduler_scaling` times all stages on generated graphs.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch.fx import GraphModule

from bench.measure import growth_exponent
from bench.measurements import Entry, write
from examples.gpt import FULL
from kgen import backend
from tools.replay_adapter import door, without_compilers
from tools.replay_corpus import Case, gpt
from tools.replay_graphs import Rewrite, call

STAGES = {stage.__name__: stage for stage in backend.STAGES}
DTYPES = {"cpu": torch.float32, "gpu": torch.bfloat16}


@dataclass(frozen=True)
class Job:
    """A graph that is ready to be lowered."""

    gm: GraphModule
    info: Any
    config: Any

    def lowered(self) -> Any:
        return STAGES["lower"](self.gm, self.info, self.config)

    def seconds(self) -> float:
        """CPU time of the scheduler, on the graph lowered anew."""
        work = self.lowered()
        gc.collect()
        started = time.process_time()
        STAGES["schedule"](work, self.info, self.config)
        return time.process_time() - started

    @property
    def nodes(self) -> int:
        return len(self.lowered()[1].nodes)


def jobs(blocks: int, device: str) -> dict[str, Job]:
    """The graphs of a training step by role."""
    found: dict[str, Job] = {}

    @contextmanager
    def collecting(rewrite: Rewrite) -> Iterator[None]:
        def keep(gm: GraphModule, info: Any, config: Any, *_failures: Any) -> Any:
            made = STAGES["replace_random"](rewrite(gm), info, config)
            found[info.role] = Job(STAGES["reinplace"](made, info, config), info, config)
            return backend.run_eagerly(gm, info, config)

        with patch.object(backend, "compile_graph", keep):
            yield

    shape = replace(FULL, blocks=blocks)
    torch._dynamo.reset()
    call(Case("gpt", partial(gpt, shape, DTYPES[device]), trains=True), device, door({}), collecting)
    return found


def measure(blocks: int, device: str, repeats: int) -> dict[str, Any]:
    """Median seconds by role and added up, and nodes."""
    found = jobs(blocks, device)
    seconds = {role: without_collections(partial(_median, job, repeats)) for role, job in found.items()}
    return {"nodes": sum(job.nodes for job in found.values()), **seconds, "total": sum(seconds.values())}


def _median(job: Job, repeats: int) -> float:
    job.seconds()  # what is computed once in a process
    return statistics.median(job.seconds() for _ in range(repeats))


def without_collections(action: Callable[[], float]) -> float:
    gc.disable()
    try:
        return action()
    finally:
        gc.enable()


def exponent(rows: dict[int, dict[str, Any]]) -> float | None:
    """Of the total time over the nodes."""
    if len(rows) < 2:
        return None
    return growth_exponent([row["nodes"] for row in rows.values()], [row["total"] for row in rows.values()])


def print_table(device: str, rows: dict[int, dict[str, Any]], console: Console) -> None:
    table = Table(title=f"CPU milliseconds to schedule a training step, {device}")
    for column in ("blocks", "nodes", "forward", "backward", "total"):
        table.add_column(column, justify="right")
    for blocks, row in rows.items():
        table.add_row(str(blocks), str(row["nodes"]), *(f"{row[name] * 1e3:.1f}" for name in ("forward", "backward", "total")))
    console.print(table)
    slope = exponent(rows)
    if slope is not None:
        console.print(f"growth exponent over nodes: {slope:.2f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--device", nargs="+", choices=("cpu", "gpu"), default=["cpu", "gpu"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 128)
    entries: list[Entry] = []
    exponents: dict[str, float | None] = {}
    for device in options.device:
        with without_compilers():
            rows = {blocks: measure(blocks, device, options.repeats) for blocks in options.blocks}
        print_table(device, rows, console)
        entries += [Entry(f"{blocks} blocks, {device}", {"kgen": row["total"]}, {}, row) for blocks, row in rows.items()]
        exponents[device] = exponent(rows)
    if options.json:
        write(options.json, "schedule_time", entries, {"exponents": exponents})
    return 0


if __name__ == "__main__":
    sys.exit(main())
