"""How compile time grows with the graph: generated graphs of mixed shapes with reductions, timed stage by stage.

    python -m bench.scheduler_scaling --sizes 100 1000 10000

Capture is left out: the aten graphs are built directly. A stage's growth exponent is the slope of log time over log size.
No run finds kernels of another: each is of another seed, and the cache folder is new, with what is built once a machine in it.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from bench.measure import growth_exponent
from bench.measurements import Entry, write

aten = torch.ops.aten
SHAPES = ((64, 96), (96, 64), (128, 32), (16, 8, 40), (512,))
TRANSPOSED = {0: 1, 1: 0}  # shapes that are each other's transpose
POOL = 6  # how many values of a shape stay in use: edges are mostly short, as in models


class Builder:
    """Makes an aten graph with `meta["val"]`, as AOTAutograd would hand it over."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mode = FakeTensorMode()
        self.graph = Graph()
        self.pools: list[list[Node]] = [[] for _ in SHAPES]
        self.outputs: list[Node] = []

    def placeholder(self, index: int) -> None:
        node = self.graph.placeholder(f"arg{index}_1")
        with self.mode:
            node.meta["val"] = torch.empty(SHAPES[index])
        self.pools[index].append(node)

    def call(self, target: Any, *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        values = [arg.meta["val"] if isinstance(arg, Node) else arg for arg in args]
        with self.mode:
            node.meta["val"] = target(*values)
        return node

    def reduce(self) -> None:
        """A row sum, broadcast back: the sum is one realised node."""
        kind, x = self.choose()
        total = self.call(aten.sum.dim_IntList, x, [-1], True)
        self.push(kind, self.call(aten.sub.Tensor, x, self.call(aten.mul.Tensor, total, 1 / 64)))

    def combine(self) -> None:
        """A sum of two values, one transposed where shapes allow it, that the caller gets: one realised node."""
        kind, x = self.choose()
        y = self.random.choice(self.pools[kind])
        if kind in TRANSPOSED and self.random.random() < 0.3:
            y = self.call(aten.permute.default, self.random.choice(self.pools[TRANSPOSED[kind]]), [1, 0])
        made = self.call(aten.relu.default, self.call(aten.add.Tensor, x, y))
        self.outputs.append(made)
        self.push(kind, made)

    def choose(self) -> tuple[int, Node]:
        kind = self.random.randrange(len(SHAPES))
        return kind, self.random.choice(self.pools[kind])

    def push(self, kind: int, node: Node) -> None:
        self.pools[kind] = [*self.pools[kind], node][-POOL:]


def build_graph(realised: int, seed: int = 0) -> GraphModule:
    """An inference graph in which at least `realised` values must exist in memory before fusion."""
    builder = Builder(seed)
    for index in range(len(SHAPES)):
        builder.placeholder(index)
    for step in range(realised):
        if step % 2:
            builder.reduce()
        else:
            builder.combine()
    last = [pool[-1] for pool in builder.pools if pool[-1] not in builder.outputs and pool[-1].op != "placeholder"]
    builder.graph.output((*builder.outputs, *last))
    return GraphModule(torch.nn.Module(), builder.graph)


def stage_arguments(graph: GraphModule) -> tuple[Any, Any]:
    """What the stages take besides the graph."""
    from kgen.capture.torch_adapter import GraphInfo
    from kgen.config import from_call

    outputs = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])  # type: ignore[arg-type]
    return GraphInfo("scaling", "inference", frozenset(), frozenset(range(outputs))), from_call(None, {})


def time_stages(realised: int, last_stage: str, seed: int) -> dict[str, float]:
    """Seconds of each stage on one graph, up to `last_stage`."""
    from kgen import backend

    work: Any = build_graph(realised, seed)
    info, config = stage_arguments(work)
    seconds = {}
    for stage in backend.STAGES:
        started = time.perf_counter()
        work = stage(work, info, config)
        seconds[stage.__name__] = time.perf_counter() - started
        if stage.__name__ == last_stage:
            break
    seconds["total"] = sum(seconds.values())
    return seconds


def exponents(results: dict[int, dict[str, float]]) -> dict[str, float]:
    """By stage; a stage that takes no time at the smallest size says nothing and is left out."""
    series: dict[str, list[float]] = defaultdict(list)
    for row in results.values():
        for stage, seconds in row.items():
            series[stage].append(max(seconds, 1e-6))
    return {
        stage: growth_exponent(list(results), times) for stage, times in series.items() if len(times) > 1 and times[0] > 1e-4
    }


def time_sizes(options: argparse.Namespace) -> dict[int, dict[str, float]]:
    time_stages(min(options.sizes), options.last_stage, options.seed + options.repeats)  # imports and first-use caches
    results = {}
    for size in options.sizes:
        runs = [time_stages(size, options.last_stage, options.seed + turn) for turn in range(options.repeats)]
        results[size] = {stage: min(run[stage] for run in runs) for stage in runs[0]}
    return results


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000, 10000], help="realised nodes")
    parser.add_argument("--last-stage", default="schedule", help="stop after this stage (build runs the C++ compiler)")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many runs counts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as cache:
        os.environ["KGEN_CACHE_DIR"] = cache
        results = time_sizes(options)
    found = exponents(results)
    table = Table(title="Seconds a stage")
    for column in ("stage", *map(str, results), "exponent"):
        table.add_column(column, justify="right")
    for stage in next(iter(results.values())):
        slope = f"{found[stage]:.2f}" if stage in found else "-"
        table.add_row(stage, *(f"{row[stage]:.3f}" for row in results.values()), slope)
    Console(width=None if sys.stdout.isatty() else 128).print(table)
    if options.json:
        entries = [Entry(f"{size} nodes", {"kgen": sum(row.values())}, {}, dict(row)) for size, row in results.items()]
        write(options.json, "scheduler_scaling", entries, {"exponents": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
