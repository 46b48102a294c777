"""Memory-bound patterns on a GPU: eager, Inductor (default, max-autotune) and kgen, taking turns in one process.

python -m bench.gpu_memory_bound --json out.json
python -m bench.gpu_memory_bound --patterns softmax cross_entropy --contenders eager kgen
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.contenders import failure
from bench.gpu_patterns import GPU_PATTERNS
from bench.measure import copy_rate, geomean
from bench.measurements import write
from bench.patterns import Pattern, outputs_of

CONTENDERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "eager": lambda fn: fn,
    "eager-again": lambda fn: fn,
    "inductor": lambda fn: torch.compile(fn, fullgraph=True),
    "max-autotune": lambda fn: torch.compile(fn, mode="max-autotune-no-cudagraphs", fullgraph=True),
    "kgen": lambda fn: torch.compile(fn, backend="kgen", fullgraph=True),
}
PEER = "max-autotune"


def interleave(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each by the device's own clock, the order rotating from round to round."""
    for call in calls.values():
        for _ in range(5):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(_time(calls[name]))
    return {name: statistics.median(times) for name, times in samples.items()}


def _time(call: Callable[[], Any], repeats: int = 4) -> float:
    """Seconds of one of `repeats` calls queued behind each other, so that the host's part hides behind the device's."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    call()
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / repeats


def measure(pattern: Pattern, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    torch._dynamo.reset()
    inputs = pattern.inputs(0, "cuda")
    calls: dict[str, Callable[[], Any]] = {}
    row: dict[str, Any] = {"name": pattern.name, "compile_s": {}, "failed": {}}
    for name in options.contenders:
        fn = CONTENDERS[name](pattern.fn)
        started = time.perf_counter()
        try:
            result = outputs_of(fn(*inputs))
        except Exception as cause:
            row["failed"][name] = failure(cause)
            continue
        torch.cuda.synchronize()
        row["compile_s"][name] = time.perf_counter() - started
        calls[name] = lambda fn=fn: fn(*inputs)
    row["floor"] = pattern.fewest_bytes(inputs, result) / rate
    del result
    row["times"] = interleave(calls, options.rounds)
    torch.cuda.empty_cache()
    return row


def print_table(rows: list[dict[str, Any]], contenders: list[str], console: Console) -> None:
    table = Table(title="times over the floor (bytes at the measured copy rate); kgen against its peers", width=None)
    table.add_column("pattern", no_wrap=True)
    for name in ("floor ms", *contenders, f"vs {PEER}", "vs inductor", "vs eager"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        times, floor = row["times"], row["floor"]
        cells = [f"{times[c] / floor:.2f}" if c in times else "failed" for c in contenders]
        ratios = [
            f"{times[p] / times['kgen']:.2f}" if p in times and "kgen" in times else "-" for p in (PEER, "inductor", "eager")
        ]
        table.add_row(row["name"], f"{floor * 1e3:.3f}", *cells, *ratios)
    console.print(table)
    for peer in (PEER, "inductor", "eager"):
        both = [r["times"][peer] / r["times"]["kgen"] for r in rows if peer in r["times"] and "kgen" in r["times"]]
        if both:
            console.print(f"geomean against {peer}: {geomean(both):.3f}, lowest {min(both):.3f}")
    again = [r["times"]["eager-again"] / r["times"]["eager"] for r in rows if {"eager", "eager-again"} <= r["times"].keys()]
    if again:
        console.print(f"eager against itself: {min(again):.3f} to {max(again):.3f}")
    for name in contenders:
        console.print(f"first calls of {name}: {sum(r['compile_s'].get(name, 0) for r in rows):.1f} s")
    for row in rows:
        for name, cause in row["failed"].items():
            console.print(f"{row['name']}, {name}: {cause}")


def main() -> None:
    names = [p.name for p in GPU_PATTERNS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", choices=names, default=names)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rate = copy_rate(device="cuda", megabytes=1024)
    console = Console(width=160)
    console.print(f"copy rate {rate / 1e9:.0f} GB/s, {torch.cuda.get_device_name()}")
    rows = [measure(p, options, rate) for p in GPU_PATTERNS if p.name in options.patterns]
    print_table(rows, options.contenders, console)
    if options.json:
        write(options.json, "gpu_memory_bound", rows, {"copy_rate": rate})


if __name__ == "__main__":
    main()
