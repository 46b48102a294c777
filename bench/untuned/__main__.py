"""Times untuned patterns and models, the contenders in turns, and prints kgen's time over the best peer's.

python -m bench.untuned --json out.json --seconds 0.4
python -m bench.untuned --only attention resnet50 --contenders eager inductor kgen
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu_timing import seconds
from bench.measure import geomean, synchronize
from bench.measurements import write
from bench.untuned.cpu_models import CPU_MODELS
from bench.untuned.models import GPU_MODELS
from bench.untuned.patterns import BLOCKS, Block

Call = Callable[[], Any]
PEERS = ("eager", "inductor", "max-autotune")
COMPILE: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "inductor": torch.compile,
    "max-autotune": lambda fn: torch.compile(fn, mode="max-autotune-no-cudagraphs"),
    "kgen": lambda fn: torch.compile(fn, backend="kgen"),
}


def block_call(block: Block, contender: str, device: str, dtype: torch.dtype) -> Call:
    generator = torch.Generator(device).manual_seed(0)
    args = block.inputs(lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype))
    fn = COMPILE[contender](block.fn)
    if not block.training:
        return lambda: fn(*args)
    args = [a.detach().requires_grad_() for a in args]
    seed = torch.randn_like(block.fn(*args))
    return lambda: torch.autograd.grad(fn(*args), args, seed)


def models(device: str) -> dict[str, Callable[[], Any]]:
    return CPU_MODELS if device == "cpu" else GPU_MODELS


def model_call(name: str, contender: str, device: str, dtype: torch.dtype) -> Call:
    torch.manual_seed(0)
    model, args = models(device)[name]()
    model = model.to(device, dtype).eval()
    moved = [a.to(device, dtype) if a.is_floating_point() else a.to(device) for a in args]
    fn = COMPILE[contender](model)
    return lambda: fn(*moved)


def timed(call: Call, device: str, repeats: int) -> float:
    """Seconds a call by the device's clock, calls queued behind each other."""

    def several() -> None:
        for _ in range(repeats):
            call()

    return seconds(several, device == "cuda") / repeats


def measure(name: str, calls: dict[str, Callable[[], Call]], options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    row: dict[str, Any] = {"name": name, "compile_s": {}, "failed": {}, "seconds": {}}
    ready: dict[str, Call] = {}
    training = contextlib.nullcontext() if name.endswith("step") else torch.no_grad()
    with training:
        for contender, make in calls.items():
            started = time.perf_counter()
            try:
                call = make()
                call()
                synchronize()
            except Exception as cause:
                row["failed"][contender] = f"{type(cause).__name__}: {cause}"[:300]
                continue
            row["compile_s"][contender] = time.perf_counter() - started
            for _ in range(3):
                call()
            ready[contender] = call
        for contender, samples in _in_turns(ready, options).items():
            row["seconds"][contender] = statistics.median(samples)
    return row


def _in_turns(ready: dict[str, Call], options: argparse.Namespace) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in ready}
    repeats = {name: max(1, min(30, int(0.01 / timed(call, options.device, 2)))) for name, call in ready.items()}
    names, deadline, turn = list(ready), time.perf_counter() + options.seconds * len(ready), 0
    while names and (turn < 7 or time.perf_counter() < deadline):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(timed(ready[name], options.device, repeats[name]))
        turn += 1
    return samples


def ratio(row: dict[str, Any]) -> float | None:
    """kgen's time over the fastest peer's; below 1 is faster."""
    peers = [row["seconds"][name] for name in PEERS if name in row["seconds"]]
    ours = row["seconds"].get("kgen")
    return ours / min(peers) if ours and peers else None


def table(rows: Sequence[dict[str, Any]], contenders: Sequence[str]) -> Table:
    made = Table(title="milliseconds")
    for column in ("", *contenders, "kgen / best peer", "compile s (inductor, kgen)"):
        made.add_column(column)
    for row in rows:
        cells = [f"{row['seconds'][c] * 1e3:.3f}" if c in row["seconds"] else "failed" for c in contenders]
        compiles = ", ".join(f"{row['compile_s'].get(c, 0):.1f}" for c in ("inductor", "kgen"))
        found = ratio(row)
        made.add_row(row["name"], *cells, "" if found is None else f"{found:.3f}", compiles)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=[], help="names that contain one of these")
    parser.add_argument("--contenders", nargs="*", default=["eager", "inductor", "kgen"], choices=list(COMPILE))
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing, for each contender of each row")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    blocks = BLOCKS if options.device == "cuda" else ()  # their sizes are a GPU's
    jobs: dict[str, Callable[[str], Call]] = {
        block.name: lambda c, block=block: block_call(block, c, options.device, dtype) for block in blocks
    }
    jobs |= {name: lambda c, name=name: model_call(name, c, options.device, dtype) for name in models(options.device)}
    rows: list[dict[str, Any]] = []
    for name, make in jobs.items():
        if options.only and not any(part in name for part in options.only):
            continue
        rows.append(measure(name, {c: lambda c=c, make=make: make(c) for c in options.contenders}, options))
        print(json.dumps(rows[-1]), flush=True)
        if options.json:
            write(options.json, "untuned", rows)
    console = Console(width=150)
    console.print(table(rows, options.contenders))
    found = [r for row in rows if (r := ratio(row)) is not None]
    if found:
        console.print(f"geomean of kgen / best peer: {geomean(found):.3f}, worst {max(found):.3f}")


if __name__ == "__main__":
    main()
