"""Matrix products with fused work on a GPU: eager, Inductor (default, max-autotune), cuBLAS and separate kernels, kgen.

python -m bench.gpu_products --json out.json
python -m bench.gpu_products --only 1 12 13 --contenders eager library kgen --seconds 1
python -m bench.gpu_products --only 2 --contenders eager kgen --force triton_matmul_persistent triton_matmul_tiles

All contenders of a product take turns. Each is recorded as a CUDA graph of calls on different sets of arguments, together
larger than the L2 cache, and the graph is replayed: the host plays no part. A contender that cannot be recorded is called, and
marked.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.contenders import copy_of, failure
from bench.measure import geomean, machine_facts
from bench.patterns import outputs_of
from bench.products import BY_NUMBER, PRODUCTS, Product
from kgen.plan import Kernel
from kgen.record import Record, recording

# Bytes of arguments that one graph goes through, several times what the L2 cache holds.
COLD = 220e6
MAX_SETS = 24
# What a graph takes at least, so that its own start does not count.
GRAPH_SECONDS = 4e-4
Function = Callable[..., Any]

CONTENDERS: dict[str, Callable[[Product], Function]] = {
    "eager": lambda p: p.fn,
    "eager-again": lambda p: p.fn,
    "library": lambda p: p.library or p.fn,
    "inductor": lambda p: torch.compile(copy_of(p.fn), fullgraph=True),
    "max-autotune": lambda p: torch.compile(copy_of(p.fn), mode="max-autotune-no-cudagraphs", fullgraph=True),
    "kgen": lambda p: torch.compile(copy_of(p.fn), backend="kgen", fullgraph=True, options={"cache": False}),
}
PEERS = ("max-autotune", "inductor", "library", "eager")


@dataclass
class Entry:
    """One contender on one product. `replay` runs it `calls` times."""

    name: str
    compile_s: float = 0.0
    error: float = math.nan
    recorded: bool = True
    calls: int = 1
    replay: Function = field(default=lambda: None)
    samples: list[float] = field(default_factory=list)
    chosen: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        ordered = sorted(self.samples)
        quarter = len(ordered) // 4
        return {
            "seconds": statistics.median(ordered), "low": ordered[quarter], "high": ordered[-1 - quarter],
            "rounds": len(ordered), "compile_s": self.compile_s, "error": self.error, "recorded": self.recorded,
            "chosen": self.chosen,
        }  # fmt: skip


def relative_error(got: Any, want: Any) -> float:
    """Of the worst output, by its norm; infinite where something is not a number and should be."""
    worst = 0.0
    for ours, theirs in zip(outputs_of(got), outputs_of(want), strict=True):
        found = ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()
        worst = max(worst, math.inf if math.isnan(found) else found)
    return worst


def forced(template: str) -> AbstractContextManager[None]:
    """Products compiled inside go to one template."""
    from kgen.tuning.only import only

    return only(template, lambda configs: configs[0])


def prepare(entry: Entry, fn: Function, sets: Sequence[list[torch.Tensor]], want: Any, context: Any) -> None:
    """Compiles, checks, and records the contender."""
    started = time.perf_counter()
    with recording() as recorder, context:
        got = fn(*sets[0])
    torch.cuda.synchronize()
    entry.compile_s = time.perf_counter() - started
    entry.error = relative_error(got, want)
    entry.chosen = [line for graph in recorder.graphs if isinstance(graph, Record) for line in steps_of(graph)]
    del got
    once = _seconds(lambda: [fn(*args) for args in sets]) / len(sets)
    entry.calls = max(len(sets), min(64, math.ceil(GRAPH_SECONDS / once)))
    order = [sets[k % len(sets)] for k in range(entry.calls)]
    try:
        entry.replay = _recorded(fn, order)
    except RuntimeError:
        torch.cuda.synchronize()
        entry.recorded = False
        entry.replay = lambda: [fn(*args) for args in order]


def _recorded(fn: Function, order: Sequence[list[torch.Tensor]]) -> Function:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        fn(*order[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for args in order:
            fn(*args)
    return graph.replay


def _seconds(call: Function) -> float:
    """By the device's clock."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3


def steps_of(graph: Record) -> list[str]:
    """The kernels and library calls of a compiled graph, with the templates and configurations of products."""
    lines = []
    for step in graph.plan.steps:
        if isinstance(step, Kernel):
            lines.append(f"{step.name}: {step.choice}" if step.choice else step.name)
        else:
            lines.append(str(step.node.target) if hasattr(step, "node") else step.name)
    return lines


def measure(product: Product, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one product."""
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = False
    count = max(2, min(MAX_SETS, math.ceil(COLD / product.nbytes)))
    sets = [product.make("cuda", seed) for seed in range(count)]
    want = product.reference(sets[0])
    torch.backends.cuda.matmul.allow_tf32 = product.tf32
    row: dict[str, Any] = {"number": product.number, "title": product.title, "sets": count, "failed": {}}
    entries: list[Entry] = []
    for name in (*options.contenders, *options.force):
        entry = Entry(name)
        fn = CONTENDERS[name if name in CONTENDERS else "kgen"](product)
        try:
            prepare(entry, fn, sets, want, nullcontext() if name in CONTENDERS else forced(name))
        except Exception as cause:
            row["failed"][name] = failure(cause)
            torch.cuda.synchronize()
            continue
        entries.append(entry)
    del want
    deadline = time.perf_counter() + options.seconds
    turn = 0
    while turn < 7 or time.perf_counter() < deadline:
        for entry in entries[turn % len(entries) :] + entries[: turn % len(entries)]:
            entry.samples.append(_seconds(entry.replay) / entry.calls)
        turn += 1
    row["results"] = {entry.name: entry.summary() for entry in entries}
    del entries, sets
    torch.cuda.empty_cache()
    return row


def show(row: dict[str, Any], console: Console) -> None:
    """One product as soon as it is measured: what is lost when time runs out is only the summary."""
    results = row["results"]
    times = "  ".join(f"{name} {r['seconds'] * 1e6:.1f}{'' if r['recorded'] else '*'}" for name, r in results.items())
    console.print(f"[bold]{row['number']}[/] {row['title']}: {times}", highlight=False)
    for name, r in results.items():
        if r["chosen"]:
            console.print(
                f"    {name}: error {r['error']:.1e}, {r['compile_s']:.1f} s; {'; '.join(r['chosen'])}", highlight=False
            )
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)


def summarise(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title="microseconds, and the peers' times over kgen's")
    table.add_column("product", no_wrap=True)
    names = [name for name in CONTENDERS if any(name in row["results"] for row in rows)]
    peers = [peer for peer in PEERS if peer in names]
    for name in (*names, *(f"/ {peer}" for peer in peers), "error", "eager's"):
        table.add_column(name, justify="right", no_wrap=True)
    ratios: dict[str, list[float]] = {peer: [] for peer in peers}
    for row in rows:
        results = row["results"]
        cells = [f"{results[n]['seconds'] * 1e6:.1f}" if n in results else "-" for n in names]
        for peer in peers:
            both = peer in results and "kgen" in results
            if both:
                ratios[peer].append(results[peer]["seconds"] / results["kgen"]["seconds"])
            cells.append(f"{ratios[peer][-1]:.2f}" if both else "-")
        errors = [f"{results[n]['error']:.0e}" if n in results else "-" for n in ("kgen", "eager")]
        table.add_row(f"{row['number']} {row['title']}"[:44], *cells, *errors)
    console.print(table)
    for peer, found in ratios.items():
        if found:
            console.print(f"geomean against {peer}: {geomean(found):.3f}, lowest {min(found):.3f}, of {len(found)}")
    again = [
        r["results"]["eager-again"]["seconds"] / r["results"]["eager"]["seconds"]
        for r in rows if {"eager", "eager-again"} <= r["results"].keys()
    ]  # fmt: skip
    if again:
        console.print(f"eager against itself: {min(again):.3f} to {max(again):.3f}")
    for name in names:
        total = sum(r["results"][name]["compile_s"] for r in rows if name in r["results"])
        console.print(f"first calls of {name}: {total:.1f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NUMBER), default=[p.number for p in PRODUCTS])
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--force", nargs="*", default=[], metavar="TEMPLATE", help="kgen with this template alone")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each product")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    console = Console(width=200)
    console.print(torch.cuda.get_device_name())
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for number in options.only:
            rows.append(measure(BY_NUMBER[number], options))
            show(rows[-1], console)
            if options.json:
                options.json.write_text(json.dumps({"machine": machine_facts(), "rows": rows}, indent=1))
    summarise(rows, console)


if __name__ == "__main__":
    main()
