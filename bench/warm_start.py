"""The first training step of the demo's model in a new process: with empty caches (cold) and with full ones (warm).

python -m bench.warm_start --json out.json
python -m bench.warm_start --device cuda --dtype bfloat16 --cold 3

Each figure is the time of the first forward and backward less that of a later one, so compilation and loading alone. Imports of
torch and of the back end, and what a compiler builds once a machine, are done before and shown in columns of their own.
Processes of the contenders take turns.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONTENDERS = {"inductor": "torch._inductor.compile_fx", "kgen": "kgen.backend"}
# What both need; imported before the clock starts.
SHARED = ("torch", "torch._dynamo", "torch._functorch.aot_autograd", "torch._inductor.output_code")
LABELS = ("cold", "warm")


def run_child(contender: str, model_size: str, device: str, dtype: str) -> dict[str, Any]:
    """Measured inside a fresh process."""
    for module in SHARED:
        importlib.import_module(module)
    started = time.perf_counter()
    importlib.import_module(CONTENDERS[contender])
    imported = time.perf_counter() - started

    import torch

    from bench.measure import synchronize
    from examples.gpt import FULL, GPT, TINY, random_batch

    started = time.perf_counter()
    torch.compile(lambda x: torch.relu(x) * 2, backend=contender)(torch.ones(8, device=device))
    first_call = time.perf_counter() - started
    torch._dynamo.reset()
    counted = _work_done(contender)
    torch.manual_seed(0)
    shape = {"full": FULL, "tiny": TINY}[model_size]
    model = GPT(shape).to(device, getattr(torch, dtype))
    batch = random_batch(shape, device)
    compiled = torch.compile(model, backend=contender)

    def step() -> tuple[float, float]:
        model.zero_grad()
        wall, cpu = time.perf_counter(), time.thread_time()
        compiled(*batch).backward()
        synchronize()
        return time.perf_counter() - wall, time.thread_time() - cpu

    first, *later = [step() for _ in range(4)]
    steady = [min(column) for column in zip(*later, strict=True)]
    work = {name: count - counted[name] for name, count in _work_done(contender).items()}
    return {"import": imported, "once": first_call, "wall": first[0] - steady[0], "cpu": first[1] - steady[1], "work": work}


def _work_done(contender: str) -> dict[str, int]:
    """What shows whether the caches were used."""
    if contender == "kgen":
        from kgen.counters import counters

        return {name: counters[name] for name in ("aot_trace", "lowered", "cpp.compiles", "aot_cache_hit")}
    from torch._dynamo.utils import counters as torch_counters

    return {name: torch_counters["aot_autograd"][name] for name in ("autograd_cache_miss", "autograd_cache_hit")}


def spawn(contender: str, options: argparse.Namespace, caches: Path) -> dict[str, Any]:
    from bench.measure import cache_environment  # it imports torch, whose time a child measures

    command = [sys.executable, "-m", "bench.warm_start", "--child", contender, "--model", options.model]
    command += ["--device", options.device, "--dtype", options.dtype]
    environment = os.environ | cache_environment(caches / contender)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Results by contender and label; every cold run has folders of its own, the warm ones share the last."""
    results: dict[str, dict[str, list[dict[str, Any]]]] = {name: {label: [] for label in LABELS} for name in CONTENDERS}
    cold = max(options.cold, 1)
    with tempfile.TemporaryDirectory() as root:
        for turn in range(cold):
            for name in CONTENDERS:
                results[name]["cold"].append(spawn(name, options, Path(root, str(turn))))
        for turn in range(options.warm):
            order = list(CONTENDERS)[:: 1 if turn % 2 else -1]
            for name in order:
                results[name]["warm"].append(spawn(name, options, Path(root, str(cold - 1))))
    return results


def median(rows: list[dict[str, Any]], column: str) -> float:
    return statistics.median(row[column] for row in rows)


def print_table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="first training step less a later one, seconds (medians)")
    for column in (
        "caches",
        "contender",
        "wall",
        "lowest",
        "cpu of the main thread",
        "import",
        "once a machine",
        "wall / inductor",
        "cpu / inductor",
    ):
        table.add_column(column)
    for label in LABELS:
        for name in CONTENDERS:
            if not results[name][label]:
                continue
            rows, peer = results[name][label], results["inductor"][label]
            ratios = [f"{median(rows, c) / median(peer, c):.2f}" for c in ("wall", "cpu")]
            numbers = [median(rows, "wall"), min(r["wall"] for r in rows)]
            numbers += [median(rows, column) for column in ("cpu", "import", "once")]
            table.add_row(label, name, *(f"{n:.2f}" for n in numbers), *ratios)
    console = Console(width=140)
    console.print(table)
    for name in CONTENDERS:
        for label in LABELS:
            console.print(*(f"{name}, {label}: {row['work']}" for row in results[name][label][-1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("full", "tiny"), default="full")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--cold", type=int, default=1, help="processes with empty caches, each contender")
    parser.add_argument("--warm", type=int, default=3, help="processes with full caches, each contender")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=tuple(CONTENDERS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options.child, options.model, options.device, options.dtype)))
        return
    results = measure(options)
    print_table(results)
    if options.json:
        from bench.measurements import Entry, write  # it imports torch, whose time a child measures

        rows = ((f"{name}, {label}", found) for name, labels in results.items() for label, found in labels.items() if found)
        entries = [Entry(name, {"first step": median(found, "wall")}, {}, {"runs": found}) for name, found in rows]
        write(options.json, "warm_start", entries)


if __name__ == "__main__":
    main()
