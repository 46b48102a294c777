"""What each optimisation is worth: the suite's times with one of them off, over the times with all on.

python -m bench.ablation --json out/ablation.json
python -m bench.ablation --device cpu --quick --only softmax gelu_8
python -m bench.ablation --switches prologues horizontal_fusion --only 8 10 11

On a GPU the suite is the list of matmuls and the memory-bound patterns; on a CPU, those made for it; on both a residual block.
All variants of one subject take turns. On a GPU they are recorded, so that the host plays no part; what CUDA graphs are worth
is then asked of calls from the host, without graphs (the default mode) over with them (reduce-overhead), with one set of
arguments that stay in their place, as parameters do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.contenders import copy_of, failure
from bench.cpu_patterns import MATMULS as CPU_MATMULS
from bench.gpu_patterns import GPU_PATTERNS
from bench.gpu_timing import COLD, MAX_SETS, Entry, Function, prepare, take_turns
from bench.matmuls import MATMULS
from bench.measure import geomean, interleave, synchronize
from bench.measurements import rows_in, write
from bench.patterns import PATTERNS

# What each switch turns off. The last one leaves a kernel for every operator.
SWITCHES: dict[str, dict[str, Any]] = {
    "fusion": {"fusion": False},
    "inlining": {"inlining": False},
    "loop_reordering": {"loop_reordering": False},
    "templates": {"templates": False},
    "prologues": {"prologues": False},
    "operand_padding": {"operand_padding": False},
    "horizontal_fusion": {"horizontal_fusion": False},
    "loop_batching": {"loop_batching": False},
    "loop_rolling": {"loop_rolling": "off"},
    "fusion+inlining": {"fusion": False, "inlining": False},
    "early_launch": {"early_launch": False},
    "layouts": {"layouts": "off"},
}
ON, AGAIN, GRAPHS = "all on", "all on, again", "cudagraphs"
CALLED, REPLAYED = "called", "called, with graphs"


@dataclass(frozen=True)
class Subject:
    """Something to compile, and sets of arguments to call it with in turn."""

    name: str
    fn: Function
    sets: Callable[[], list[list[Tensor]]]
    tf32: bool = False


def subjects(device: str, quick: bool) -> list[Subject]:
    if device == "cuda":
        matmuls = [p.shrunk(8 if quick else 1) for p in MATMULS]
        counts = {p.number: max(2, min(MAX_SETS, -(-int(COLD) // p.nbytes))) for p in matmuls}
        made = [
            Subject(p.number, p.fn, lambda p=p: [p.make(device, seed) for seed in range(counts[p.number])], p.tf32)
            for p in matmuls
        ]
        made += [Subject(p.name, p.fn, lambda p=p: [list(p.inputs(0, device))]) for p in GPU_PATTERNS]
        return [*made, Subject("residual", residual, lambda: [images(32 // (8 if quick else 1), torch.bfloat16, device)])]
    shrink, megabytes = (16, 1) if quick else (1, 16)
    made = [Subject(name, p.fn, lambda p=p: p.shrunk(shrink).sets(torch.float32)) for name, p in CPU_MATMULS.items()]
    made += [Subject(p.name, p.fn, lambda p=p: [list(p.inputs(megabytes))]) for p in PATTERNS]
    return [*made, Subject("residual", residual, lambda: [images(1 if quick else 8, torch.float32, device)])]


def residual(x: Tensor, w: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """A block of ResNet on a contiguous image, its norms as scales of channels."""
    y = F.conv2d(F.relu(F.conv2d(x, w, padding=1) * s), v, padding=1)
    return F.relu(y * s + x)


def images(count: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    shapes = (count, 64, 56, 56), (64, 64, 3, 3), (64, 64, 3, 3), (64, 1, 1)
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def compiled(fn: Function, mode: str = "default", **switches: Any) -> Function:
    options = {"mode": mode, "cache": False, **switches}
    return torch.compile(copy_of(fn), backend="kgen", fullgraph=True, options=options)


Variants = Mapping[str, Callable[[Function], Function]]


def variants(switches: Sequence[str]) -> Variants:
    made: dict[str, Callable[[Function], Function]] = {ON: compiled, AGAIN: compiled}
    for name in switches:
        if name in SWITCHES:
            made[name] = lambda fn, off=SWITCHES[name]: compiled(fn, **off)
    return made


WITH_AND_WITHOUT_GRAPHS: Variants = {CALLED: compiled, REPLAYED: lambda fn: compiled(fn, mode="reduce-overhead")}


def measure(subject: Subject, switches: Sequence[str], device: str, budget: float) -> dict[str, Any]:
    """Median seconds of all variants that work, and why the others do not.

    The variants with and without CUDA graphs come last, when none of the bench's own recordings is used any more: torch gives
    up cuBLAS's workspaces when it records, and library calls that were recorded earlier then fail unless they need none."""
    torch._dynamo.reset()
    torch.backends.cuda.matmul.allow_tf32 = subject.tf32
    sets = subject.sets()
    row: dict[str, Any] = {"name": subject.name, "failed": {}, "seconds": {}}
    _time(row, subject.fn, variants(switches), sets, budget)
    if GRAPHS in switches and device == "cuda":
        for tensor in sets[0]:
            torch._dynamo.mark_static_address(tensor)
        _time(row, subject.fn, WITH_AND_WITHOUT_GRAPHS, sets[:1], budget, record=False)
    return row


def _time(
    row: dict[str, Any], fn: Function, makers: Variants, sets: list[list[Tensor]], budget: float, record: bool = True
) -> None:
    """Adds to `row` what the variants take, in turns."""
    entries: list[Entry] = []
    for name, make in makers.items():
        entry = Entry(name)
        try:
            prepare(entry, make(fn), sets, None, nullcontext(), record=record)
        except Exception as cause:
            row["failed"][name] = failure(cause)
            synchronize()
            continue
        entries.append(entry)
    if sets[0][0].is_cuda:
        take_turns(entries, budget, True)
        row["seconds"] |= {entry.name: entry.summary()["seconds"] for entry in entries}
    else:
        timings = interleave({entry.name: entry.replay for entry in entries}, seconds=budget)
        row["seconds"] |= {entry.name: timings[entry.name].median / entry.calls for entry in entries}


def slowdowns(rows: Sequence[Mapping[str, Any]], switch: str) -> dict[str, float]:
    """By subject, how many times longer it takes with the switch off."""
    off, on = (CALLED, REPLAYED) if switch == GRAPHS else (switch, ON)
    return {row["name"]: row["seconds"][off] / row["seconds"][on] for row in rows if {off, on} <= row["seconds"].keys()}


def show(rows: Sequence[Mapping[str, Any]], switches: Sequence[str], console: Console) -> None:
    table = Table(title="times without an optimisation, over the times with all")
    for column in ("without", "geomean", "most", "least", "subjects"):
        table.add_column(column, no_wrap=True)
    for switch in (AGAIN, *switches):
        found = slowdowns(rows, switch)
        if not found:
            continue
        most, least = max(found, key=found.__getitem__), min(found, key=found.__getitem__)
        cells = (f"{found[most]:.2f} ({most})", f"{found[least]:.2f} ({least})", str(len(found)))
        table.add_row("nothing (spread)" if switch == AGAIN else switch, f"{geomean(found.values()):.3f}", *cells)
    console.print(table)
    for row in rows:
        for name, why in row["failed"].items():
            console.print(f"{row['name']}, {name} failed: {why}", highlight=False, markup=False)


def main(arguments: Sequence[str] | None = None) -> None:
    known = [*SWITCHES, GRAPHS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", nargs="+", help="names of patterns, numbers or names of matmuls")
    parser.add_argument("--switches", nargs="+", choices=known, default=known)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each subject")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")
    options = parser.parse_args(arguments)
    every = {subject.name: subject for subject in subjects(options.device, options.quick)}
    unknown = sorted(set(options.only or ()) - set(every))
    if unknown:
        raise SystemExit(f"no {', '.join(unknown)} on {options.device}; there are: {', '.join(every)}")
    rows: list[dict[str, Any]] = []
    if options.append and options.json and options.json.exists():
        rows = rows_in(options.json)
    known_already = {row["name"] for row in rows}
    console = Console(width=160)
    with torch.no_grad():
        for name in options.only or every:
            if name in known_already:
                continue
            rows.append(measure(every[name], options.switches, options.device, options.seconds))
            times = "  ".join(f"{variant} {taken * 1e6:.1f}" for variant, taken in rows[-1]["seconds"].items())
            console.print(f"[bold]{name}[/]: {times}", highlight=False)
            if options.json:
                write(options.json, "ablation", rows)
    show(rows, options.switches, console)


if __name__ == "__main__":
    main()
