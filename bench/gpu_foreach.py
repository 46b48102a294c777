"""Concatenations, foreach operators and optimiser steps on a GPU: eager, Inductor and kgen take turns in one process.

python -m bench.gpu_foreach --json out.json
python -m bench.gpu_foreach --quick                 # fewer rounds
python -m bench.gpu_foreach --only clip --only cat

`fused` is torch's own fused optimiser, with gradients clipped by foreach operators, where a pattern has one. Times are wall
clock: the host's part counts. `copy` is the time in which a copy of a large tensor moves the bytes that the pattern must.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from bench.measure import as_json, cache_environment, copy_rate, geomean, interleave, seconds_of
from bench.measurements import write

Call = Callable[[], Any]
# The shapes of a small transformer's parameters, over and over.
MIXED = [(1024, 1024), (1024,), (1024,), (4096, 1024), (4096,), (1024, 4096), (1024,), (512, 64), (33, 5), (7,)]


@dataclass(frozen=True)
class Pattern:
    """`make` gives a function of nothing over tensors on a device, with what it must move in bytes; `fused` is the same by
    torch's fused optimiser."""

    make: Callable[[str], tuple[Call, int]]
    fused: Callable[[str], tuple[Call, int]] | None = None


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(t.nbytes for t in tensors)


def _random(shapes: Sequence[tuple[int, ...]], device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]


def mixed(count: int) -> list[tuple[int, ...]]:
    return [MIXED[k % len(MIXED)] for k in range(count)]


def cat(count: int, length: int) -> Pattern:
    def make(device: str) -> tuple[Call, int]:
        parts = _random([(length + k % 9,) for k in range(count)], device)
        return lambda: torch.cat(parts), 2 * _bytes(parts)

    return Pattern(make)


def clip(count: int) -> Pattern:
    """The gradients are read for the norm, read again and written."""

    def make(device: str) -> tuple[Call, int]:
        parameters = [nn.Parameter(torch.empty_like(t)) for t in _random(mixed(count), device)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        gradients = [p.grad for p in parameters if p.grad is not None]
        return lambda: nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), 3 * _bytes(gradients)

    return Pattern(make)


def step(count: int, kind: type[torch.optim.Optimizer], clipped: bool, shapes: Sequence[tuple[int, ...]]) -> Pattern:
    """A step of which the state exists. Parameters and both averages are read and written, gradients read; clipping reads them
    once more and need not write them."""

    def made(device: str, **options: Any) -> tuple[Call, int]:
        parameters = [nn.Parameter(t) for t in _random(shapes[:count], device)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimiser = kind(parameters, lr=torch.tensor(1e-3, device=device), **options)  # type: ignore[call-arg]
        optimiser.step()

        def run() -> None:
            if clipped:
                nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
            optimiser.step()

        return run, (8 if clipped else 7) * _bytes(parameters)

    def foreach(device: str) -> tuple[Call, int]:
        return made(device, foreach=True, capturable=device.startswith("cuda"))

    return Pattern(foreach, lambda device: made(device, fused=True))


def norm_of_cat(images: int, channels: int, size: int) -> Pattern:
    """Two channels-last maps, as in a U-Net's decoder: read for the statistics, read again, and the result written."""

    def make(device: str) -> tuple[Call, int]:
        shape = (images, channels, size, size)
        maps = [t.to(memory_format=torch.channels_last) for t in _random([shape] * 2, device, torch.bfloat16)]
        weight, bias = _random([(2 * channels,)] * 2, device, torch.bfloat16)
        return lambda: F.silu(F.group_norm(torch.cat(maps, 1), 32, weight, bias)), 3 * _bytes(maps)

    return Pattern(make)


def cat_of_matmuls(rows: int, inner: int, columns: int) -> Pattern:
    def make(device: str) -> tuple[Call, int]:
        shapes = [(rows, inner), (inner, columns)] * 2
        a, b, c, d = _random(shapes, device, torch.bfloat16)
        moved = _bytes([a, b, c, d]) + 2 * 2 * rows * columns
        return lambda: torch.relu(torch.cat([a @ b, c @ d], 1)), moved

    return Pattern(make)


ADAM, ADAMW = torch.optim.Adam, torch.optim.AdamW
PATTERNS: dict[str, Pattern] = {
    "cat of 500 vectors of 1,000": cat(500, 1000),
    "cat of 500 vectors of 100,000": cat(500, 100_000),
    "clip 200 mixed": clip(200),
    "clip 400 mixed": clip(400),
    "Adam, 100 of 256x1024": step(100, ADAM, False, [(256, 1024)] * 100),
    "clip + AdamW, 400 mixed": step(400, ADAMW, True, mixed(400)),
    "clip + AdamW, 400 of 1,000": step(400, ADAMW, True, [(1000,)] * 400),
    "cat + group_norm + silu, 16x(64+64)x64x64": norm_of_cat(16, 64, 64),
    "cat + group_norm + silu, 8x(320+320)x64x64": norm_of_cat(8, 320, 64),
    "relu(cat of two mm), 4096x1024x1024": cat_of_matmuls(4096, 1024, 1024),
}


COMPILED = ("inductor", "kgen")


def contenders(pattern: Pattern, device: str, names: Sequence[str]) -> tuple[dict[str, Call], dict[str, float], int]:
    """The calls, compiled; the seconds that compiling took; and the bytes that must move."""
    calls: dict[str, Call] = {}
    compiling: dict[str, float] = {}
    calls["eager"], moved = pattern.make(device)
    if pattern.fused is not None and "fused" in names:
        calls["fused"], _ = pattern.fused(device)
    for name in COMPILED:
        if name not in names:
            continue
        torch._dynamo.reset()
        call = calls[name] = torch.compile(pattern.make(device)[0], backend=name)
        first = seconds_of(call)
        compiling[name] = first - statistics.median(seconds_of(call) for _ in range(3))
    return calls, compiling, moved


def measured(name: str, pattern: Pattern, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    calls, compiling, moved = contenders(pattern, options.device, options.contenders)
    times = interleave(calls, seconds=options.seconds, rounds=options.rounds)
    median = {who: timing.median for who, timing in times.items()}
    ratio = min(seconds for who, seconds in median.items() if who != "kgen") / median["kgen"]
    return {"name": name, "copy": moved / rate, "times": as_json(times), "median": median, "compile": compiling, "ratio": ratio}


def line(row: dict[str, Any]) -> str:
    """A row as soon as it is measured."""
    times = "  ".join(f"{who} {seconds * 1e6:.0f}" for who, seconds in row["median"].items())
    compiling = ", ".join(f"{who} {seconds:.1f} s" for who, seconds in row["compile"].items())
    return f"{row['name']}: copy {row['copy'] * 1e6:.0f}  {times} us; best / kgen {row['ratio']:.2f}; compile {compiling}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one row, at least")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="half a second and 5 rounds a row")
    parser.add_argument("--only", action="append", default=[], help="patterns whose name begins so")
    beside = ["fused", *COMPILED]
    parser.add_argument("--contenders", nargs="+", choices=beside, default=beside, help="beside eager")
    parser.add_argument("--json", type=Path, help="written after each row")
    options = parser.parse_args(arguments)
    if "kgen" not in options.contenders:
        parser.error("--contenders without kgen: add kgen, which the others are compared with")
    if options.quick:
        options.seconds, options.rounds = 0.5, 5
    chosen = {name: one for name, one in PATTERNS.items() if not options.only or name.startswith(tuple(options.only))}
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        os.environ |= cache_environment(folder)  # of its own: compile times are cold ones
        for backend in COMPILED:  # what each builds once a machine
            torch.compile(lambda x: torch.relu(x) * 2, backend=backend)(torch.ones(8, device=options.device))
        rate, rows = copy_rate(device=options.device), []
        for name, pattern in chosen.items():
            rows.append(measured(name, pattern, options, rate))
            console.print(line(rows[-1]), highlight=False, soft_wrap=True)
            if options.json:
                write(options.json, "gpu_foreach", rows)
    console.print(f"geomean of best / kgen: {geomean(row['ratio'] for row in rows):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
