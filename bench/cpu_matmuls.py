"""Matmuls with fused work on a CPU: eager, Inductor (default, max-autotune), kgen, and kgen with the template forced.

python -m bench.cpu_matmuls --json out.json
python -m bench.cpu_matmuls --only gelu_8 gate_up_64 --dtype float32 --contenders eager kgen forced --seconds 1
python -m bench.cpu_matmuls --only linear_64 --contenders kgen frozen inductor inductor-frozen

All contenders of a matmul take turns, each with several sets of arguments, so that weights come from memory as they do in
models. `forced` is kgen with every matmul left to the C++ template. `frozen` and `inductor-frozen` have weights and biases
as parameters of a module, one for each set, and the option freezing. Of matmuls with at most 8 rows the rate of reading their
arguments stands beside that of summing a large tensor.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch._inductor.config
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import Module

from bench.contenders import copy_of, failure
from bench.cpu_patterns import DTYPES, MATMULS, Function, Matmul, Model
from bench.cpu_runs import measured, options_of
from bench.measure import as_json, geomean, interleave
from kgen.only import only

TEMPLATE = "cpp_matmul"


CONTENDERS: dict[str, Callable[[Function], Function]] = {
    "eager": lambda fn: fn,
    "eager-again": lambda fn: fn,
    "inductor": lambda fn: torch.compile(copy_of(fn), fullgraph=True),
    "max-autotune": lambda fn: torch.compile(copy_of(fn), mode="max-autotune", fullgraph=True),
    "kgen": lambda fn: torch.compile(copy_of(fn), backend="kgen", fullgraph=True, options={"cache": False}),
    "forced": lambda fn: torch.compile(copy_of(fn), backend="kgen", fullgraph=True, options={"cache": False}),
}
# What freezes, compiled anew for each set of arguments or not, as it pleases. Of Inductor, Dynamo asks the global option.
FREEZERS: dict[str, Callable[[Module], Function]] = {
    "frozen": lambda model: torch.compile(model, backend="kgen", fullgraph=True, options={"cache": False, "freezing": True}),
    "inductor-frozen": lambda model: torch.compile(model, fullgraph=True),
}
PEERS = ("max-autotune", "inductor", "inductor-frozen", "eager")
OURS = ("kgen", "forced", "frozen")


def calls_of(name: str, fn: Function, sets: Sequence[list[Tensor]]) -> list[Callable[[], Any]]:
    """A contender's calls, one for each of the sets."""
    if name in FREEZERS:
        return [partial(FREEZERS[name](Model(fn, args)), *args) for args in sets]
    compiled = CONTENDERS[name](fn)
    return [partial(compiled, *args) for args in sets]


def settings(name: str) -> AbstractContextManager[Any]:
    """What a contender is compiled under."""
    if name == "forced":
        return only(TEMPLATE, lambda configs: configs[0])
    return torch._inductor.config.patch(freezing=True) if name == "inductor-frozen" else nullcontext()


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    endless = itertools.cycle(calls)

    def call() -> Any:
        return next(endless)()

    return call


def relative_error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def measure(matmul: Matmul, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one matmul."""
    torch._dynamo.reset()
    sets = matmul.sets(dtype)
    want = matmul.fn(*(a.double() for a in sets[0]))
    row: dict[str, Any] = {"failed": {}, "errors": {}}
    calls: dict[str, Callable[[], Any]] = {}
    for name in options.contenders:
        try:
            with settings(name):
                own = calls_of(name, matmul.fn, sets)
                results = [call() for call in own]
                row["errors"][name] = relative_error(results[0], want)
        except Exception as cause:
            row["failed"][name] = failure(cause)
            continue
        calls[name] = in_turn(own)
    if matmul.rows <= 8:
        calls["read"] = torch.ones(2**26).sum
    row["times"] = as_json(
        interleave(calls, seconds=options.seconds, clock=time.process_time if options.cpu_time else time.perf_counter)
    )
    row["bytes"] = sum(t.nbytes for t in sets[0])
    return row


def ratios(row: dict[str, Any], ours: str) -> dict[str, float]:
    """The peers' times over ours."""
    times = {name: one["median"] for name, one in row["times"].items()}
    return {peer: times[peer] / times[ours] for peer in PEERS if peer in times and ours in times}


def share_of_read(row: dict[str, Any], ours: str) -> float:
    """Of the bandwidth of summing a large tensor."""
    times = row["times"]
    return (row["bytes"] / times[ours]["median"]) / (2**28 / times["read"]["median"])


def show(title: str, row: dict[str, Any], console: Console) -> None:
    times = "  ".join(f"{name} {one['median'] * 1e3:.3f}" for name, one in row["times"].items())
    console.print(f"[bold]{title}[/]: {times}", highlight=False)
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)


def summarise(rows: dict[str, dict[str, Any]], console: Console) -> None:
    ours, peers = ([name for name in names if any(name in row["times"] for row in rows.values())] for names in (OURS, PEERS))
    table = Table(title="milliseconds of eager, itself again over it, and the peers' times over ours")
    table.add_column("matmul", no_wrap=True)
    for column in ("eager", "again", *(f"{peer}/{name}" for name in ours for peer in peers), "of reading", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    found: dict[tuple[str, str], list[float]] = {}
    for title, row in rows.items():
        times = {name: one["median"] for name, one in row["times"].items()}
        cells = [f"{times['eager'] * 1e3:.3f}"] if "eager" in times else ["-"]
        cells += [f"{times['eager-again'] / times['eager']:.2f}" if {"eager", "eager-again"} <= times.keys() else "-"]
        for name in ours:
            faster = ratios(row, name)
            cells += [f"{faster[peer]:.2f}" if peer in faster else "-" for peer in peers]
            for peer, value in faster.items():
                found.setdefault((name, peer), []).append(value)
        last = next((name for name in reversed(ours) if name in times), None)
        cells.append(f"{100 * share_of_read(row, last):.0f}%" if last and "read" in times else "-")
        cells.append(f"{row['errors'][last]:.0e}" if last else "-")
        table.add_row(title, *cells)
    console.print(table)
    for (name, peer), values in found.items():
        console.print(f"geomean of {peer} / {name}: {geomean(values):.3f}, lowest {min(values):.3f}, of {len(values)}")


def main() -> None:
    options = options_of(__doc__, "matmul", MATMULS, DTYPES, [*CONTENDERS, *FREEZERS], CONTENDERS)
    console = Console(width=200)
    rows = measured(MATMULS, DTYPES, measure, show, options, console)
    summarise(rows, console)


if __name__ == "__main__":
    main()
