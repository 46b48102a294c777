"""Where a cold compile spends its time: stage by stage, and inside the C++ compiler.

python -m bench.compile_profile --graphs softmax demo generated
python -m bench.compile_profile --graphs demo --device cuda     # the demo in bfloat16; no report of g++

Runs in a cache folder of its own, in which what is built once a machine is there before the clock starts. Capture is what the
stages leave of the first call. The compiler's parts are g++'s own report, summed over all units, one unit after the other.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment, synchronize
from bench.measurements import Entry, write

# g++'s phases under the names of the table.
PHASES = {
    "phase setup": "precompiled header",
    "phase parsing": "parse",
    "phase lang. deferred": "templates",
    "phase opt and generate": "optimise",
}
LINE = re.compile(r"^ ?(phase [\w .]+?|TOTAL)\s*:\s*(.*)$", re.MULTILINE)


class StageClock:
    """The list of stages, each timed; keeps what the build stage made."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.sources: list[str] = []

    def wrap(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            made = stage(*args)
            self.seconds[stage.__name__] += time.perf_counter() - started
            if stage.__name__ == "build":
                self.sources += [unit.source for unit in made.blueprint.units]
            return made

        return timed


def softmax(device: str) -> Callable[[], Any]:
    x = torch.randn(512, 1000, device=device)
    f = torch.compile(lambda x: torch.softmax(x, -1), backend="kgen")
    return lambda: f(x)


def demo(device: str) -> Callable[[], Any]:
    from examples.gpt import FULL, GPT, random_batch

    model = GPT(FULL).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    batch = random_batch(FULL, device)
    compiled = torch.compile(model, backend="kgen")

    def step() -> None:
        compiled(*batch).backward()
        synchronize()

    return step


def generated(device: str, realised: int = 1000) -> Callable[[], Any]:
    """A graph of scheduler_scaling.py, handed to the stages directly: no capture. On a CPU, whatever the device."""
    from bench.scheduler_scaling import build_graph, stage_arguments
    from kgen import backend

    graph = build_graph(realised)
    return lambda: backend.compile_graph(graph, *stage_arguments(graph))


GRAPHS: dict[str, Callable[[str], Callable[[], Any]]] = {"softmax": softmax, "demo": demo, "generated": generated}


def profile(name: str, device: str) -> dict[str, dict[str, float]]:
    """Seconds by stage, and by part of the C++ compiler."""
    from kgen import backend

    call = GRAPHS[name](device)
    clock = StageClock()
    stages = backend.STAGES
    backend.STAGES = tuple(map(clock.wrap, stages))
    try:
        started = time.perf_counter()
        call()
        whole = time.perf_counter() - started
    finally:
        backend.STAGES = stages
    seconds = dict(clock.seconds)
    found = {"capture and first run": whole - sum(seconds.values()), **seconds, "whole": whole}
    inside: Counter[str] = Counter()
    for source in clock.sources:
        inside.update(inside_compiler(source))
    return {"stages": found, "g++": {"units": len(clock.sources), **inside}}


def inside_compiler(source: str) -> dict[str, float]:
    """Seconds of one unit by the compiler's phases; what its report leaves of the command is assembler and linker."""
    from kgen.build import cpp, toolchain

    includes = f"-I{cpp.kernel_include_dir()}"
    header = cpp.precompiled_header(cpp.kernel_include_dir() / "kgen" / "kernel.h", (*toolchain.kernel_flags(), includes))
    use = ["-include", str(header)] if header else []
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder, "unit.cpp")
        unit.write_text(source, encoding="utf-8")
        command = [*toolchain.compiler().command, "-ftime-report", "-shared", str(unit), "-o", f"{folder}/unit.so"]
        command += [*toolchain.kernel_flags(), includes, *use, *toolchain.kernel_link_flags()]
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
        whole = time.perf_counter() - started
    walls = {name: float(re.sub(r"\([^)]*\)", "", rest).split()[2]) for name, rest in LINE.findall(done.stderr)}
    parts = {label: walls.get(name, 0.0) for name, label in PHASES.items()}
    return {**parts, "assemble, link, start": whole - walls["TOTAL"]}


def build_once(folder: str, device: str) -> None:
    """What a machine builds once, in a cache folder of this run's own."""
    os.environ |= cache_environment(folder)
    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8, device=device))
    torch._dynamo.reset()


def print_table(results: dict[str, dict[str, dict[str, float]]]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 128)
    for part in ("stages", "g++"):
        table = Table(title="Seconds a stage" if part == "stages" else "Seconds inside g++, all units")
        for column in (part, *results):
            table.add_column(column, justify="right")
        for row in dict.fromkeys(row for found in results.values() for row in found[part]):
            cells = [found[part].get(row, 0.0) for found in results.values()]
            table.add_row(row, *(f"{cell:.0f}" if row == "units" else f"{cell:.3f}" for cell in cells))
        console.print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=list(GRAPHS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        build_once(folder, options.device)
        results = {name: profile(name, options.device) for name in options.graphs}
    print_table(results)
    if options.json:
        write(options.json, "compile_profile", [Entry(name, {}, {}, dict(found)) for name, found in results.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
