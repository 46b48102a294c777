"""What of a cold compile grows with work that repeats: row writes, steps of an RNN, equal blocks of a transformer, by stage.

python -m bench.growth                        # every program, few and many repeats: CPU seconds
python -m bench.growth --count                # calls of functions instead: no other process changes them
python -m bench.growth rows blocks --contenders kgen --processes 5

Each program is compiled in processes and cache folders of their own, in which what is built once a machine is there already.
Seconds are CPU time of the process and of the compilers that it waits for, on one thread; the median process counts. `torch` is
what AOTAutograd takes on its own for the same program, by the backend `aot_eager`: no backend takes less without a rewrite of
Dynamo's graph. `run` is the first call of what was compiled, forward and backward.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from bench.measure import cache_environment
from bench.measurements import Entry, write
from bench.repeats import cpu_seconds, rnn

# Stages of kgen that are functions of `kgen.backend`; what is left of a call of it is AOTAutograd's.
STAGES = ("rewrite", "compile_bodies", "replace_random", "reinplace", "lower", "schedule", "render", "build")
COLUMNS = ("dynamo", "capture", "passes", *STAGES, "run")
Call = Callable[[], Any]


@dataclass(frozen=True)
class Program:
    """What is compiled for a count of repeats; `few` and `many` are compared, and at most `asked` is asked of their ratio."""

    make: Callable[[int, Callable[..., Any]], Call]
    few: int
    many: int
    asked: float
    options: dict[str, Any] = field(default_factory=dict)


# ---- programs ----------------------------------------------------------------------------------------------------------


def _write_rows(b: torch.Tensor, rows: int) -> torch.Tensor:
    for i in range(rows):
        b[i] = b[i] + 1
    return b


def _rows(count: int, compiler: Callable[..., Any]) -> Call:
    b = torch.zeros(count, 64)
    return lambda: torch.compile(_write_rows, backend=compiler)(b, count)


def _converted_rows(count: int, compiler: Callable[..., Any]) -> Call:
    """From the function's source: Dynamo unrolls up to 64 iterations."""
    import kgen

    b = torch.zeros(count, 64)
    return lambda: torch.compile(kgen.control_flow(_write_rows), backend=compiler)(b, count)


def _steps(trains: bool) -> Callable[[int, Callable[..., Any]], Call]:
    def make(count: int, compiler: Callable[..., Any]) -> Call:
        sizes = (16, count, 64), (64, 64), (64, 64), (64,)
        args = [(torch.randn(size) * 0.1).requires_grad_(trains) for size in sizes]

        def call() -> None:
            result = torch.compile(rnn, backend=compiler)(*args)
            if trains:
                result.sum().backward()

        return call

    return make


def _blocks(nested: bool, width: int = 128, sequence: int = 64) -> Callable[[int, Callable[..., Any]], Call]:
    def make(count: int, compiler: Callable[..., Any]) -> Call:
        from examples.gpt import GPT, TINY, Block, random_batch

        shape = replace(TINY, blocks=count, width=width, sequence=sequence)
        model, batch = GPT(shape), random_batch(shape, "cpu")
        if nested:
            Block.forward = torch.compiler.nested_compile_region(Block.forward)  # type: ignore[method-assign]
        return lambda: torch.compile(model, backend=compiler)(*batch).backward()

    return make


PROGRAMS = {
    "rows": Program(_rows, 10, 1000, 1.2),
    "converted_rows": Program(_converted_rows, 10, 1000, 1.2),
    "rnn": Program(_steps(False), 10, 200, 1.3),
    "rnn_training": Program(_steps(True), 10, 200, 1.3),
    "blocks": Program(_blocks(False), 2, 48, 1.3),
    "shared_blocks": Program(_blocks(False), 2, 48, 1.3, {"layer_sharing": "on"}),
    "wide_blocks": Program(_blocks(False, 256, 128), 2, 48, 1.3),
    "nested_blocks": Program(_blocks(True), 2, 48, 1.3),
}


# ---- one compilation, inside a fresh process ---------------------------------------------------------------------------


class Meter:
    """What has been spent by column. A column that begins inside another one is counted apart from it."""

    def __init__(self, spent: Callable[[], float]) -> None:
        self.found = Counter[str]()
        self._spent, self._open, self._since = spent, ["other"], spent()

    @contextmanager
    def of(self, column: str) -> Iterator[None]:
        self._turn()
        self._open.append(column)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, call: Callable[..., Any], column: str) -> Callable[..., Any]:
        @wraps(call)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.of(column):
                return call(*args, **kwargs)

        return run

    def _turn(self) -> None:
        now = self._spent()
        self.found[self._open[-1]] += now - self._since
        self._since = self._spent()


def run_child(name: str, count: int, contender: str, counts: bool) -> dict[str, float]:
    """Columns in seconds, or in calls of functions in this thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.compile(lambda x: torch.relu(x) * 2, backend="kgen")(torch.ones(8))
    torch._dynamo.reset()
    profile = cProfile.Profile(subcalls=False)
    meter = Meter((lambda: _calls(profile)) if counts else cpu_seconds)
    program = PROGRAMS[name]
    with ExitStack() as stack:
        call = program.make(count, _compiler(contender, meter, program.options, stack))
        if counts:
            stack.enter_context(profile)
        with meter.of("dynamo"):
            call()
    meter.found.pop("other")
    return dict(meter.found)


def _calls(profile: cProfile.Profile) -> float:
    return sum(entry.callcount - entry.reccallcount for entry in profile.getstats())


def _compiler(contender: str, meter: Meter, options: dict[str, Any], stack: ExitStack) -> Callable[..., Any]:
    """The backend, measured, and what it makes, measured as `run`."""
    from kgen import backend

    if contender == "torch":
        from torch._dynamo.backends.debugging import aot_eager

        made_by: Callable[..., Any] = aot_eager
    else:
        made_by = backend.kgen_backend
        stages = tuple(meter.timed(stage, stage.__name__) for stage in backend.STAGES)
        stack.enter_context(patch.object(backend, "STAGES", stages))
        stack.enter_context(patch.object(backend, "rewrite", meter.timed(backend.rewrite, "rewrite")))
        for name in ("before_partitioning", "compile_graph"):
            made = meter.timed(getattr(backend.Passes, name), "passes")
            stack.enter_context(patch.object(backend.Passes, name, made))

    def compiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with meter.of("capture"):
            made = made_by(gm, inputs, **({"options": options} if options and contender == "kgen" else {}))
        return meter.timed(made, "run")

    return compiled


# ---- all of them -------------------------------------------------------------------------------------------------------


def spawn(name: str, count: int, contender: str, counts: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        command = [sys.executable, "-m", "bench.growth", name, "--child", f"{count}:{contender}"]
        command += ["--count"] if counts else []
        root = Path(__file__).resolve().parent.parent
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False, env=os.environ | cache_environment(folder)
        )
    if done.returncode != 0:
        sys.exit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def median_of(processes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Each column's median; `kgen` is all but Dynamo's and the first run, `whole` is all."""
    made = {column: statistics.median(one.get(column, 0.0) for one in processes) for column in COLUMNS}
    sums = [(sum(one.values()), one.get("dynamo", 0.0) + one.get("run", 0.0)) for one in processes]
    made["backend"] = statistics.median(whole - outside for whole, outside in sums)
    made["whole"] = statistics.median(whole for whole, _ in sums)
    return made


def measure(name: str, contenders: Sequence[str], processes: int, counts: bool) -> dict[str, dict[str, float]]:
    """A row for each contender and count: few and many repeats take turns."""
    program = PROGRAMS[name]
    keys = [(contender, count) for contender in contenders for count in (program.few, program.many)]
    found: dict[Any, list[dict[str, float]]] = {key: [] for key in keys}
    for _ in range(processes):
        for contender, count in keys:
            found[contender, count].append(spawn(name, count, contender, counts))
    return {f"{name}, {count}, {contender}": median_of(rows) for (contender, count), rows in found.items()}


def show(rows: dict[str, dict[str, float]], counts: bool) -> None:
    table = Table(title="Thousands of calls" if counts else "CPU seconds")
    names = list(rows)
    table.add_column("column")
    for name in names:
        table.add_column(name, justify="right")
    scale = 1e3 if counts else 1.0
    for column in (*COLUMNS, "backend", "whole"):
        table.add_row(column, *(f"{rows[name][column] / scale:.{0 if counts else 2}f}" for name in names))
    Console(width=None if sys.stdout.isatty() else 128).print(table)


def show_ratios(name: str, contenders: Sequence[str], rows: dict[str, dict[str, float]]) -> None:
    program = PROGRAMS[name]
    for contender in contenders:
        few, many = (rows[f"{name}, {count}, {contender}"] for count in (program.few, program.many))
        ratios = ", ".join(f"{column} {many[column] / few[column]:.2f}" for column in ("backend", "whole"))
        print(f"{name}: {program.many} over {program.few} by {contender}: {ratios} (asked {program.asked})")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", default=[], help=", ".join(PROGRAMS))
    parser.add_argument("--processes", type=int, default=3, help="so many of each, whose median counts")
    parser.add_argument("--contenders", choices=["kgen", "torch"], nargs="+", default=["kgen", "torch"])
    parser.add_argument("--count", action="store_true", help="calls of functions instead of seconds; a process is enough")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is not None:
        count, contender = options.child.split(":")
        print(json.dumps(run_child(options.programs[0], int(count), contender, options.count)))
        return 0
    unknown = set(options.programs) - set(PROGRAMS)
    if unknown:
        parser.error(f"no program {sorted(unknown)}: {', '.join(PROGRAMS)}")
    rows: dict[str, dict[str, float]] = {}
    for name in options.programs or PROGRAMS:
        made = measure(name, options.contenders, 1 if options.count else options.processes, options.count)
        show(made, options.count)
        show_ratios(name, options.contenders, made)
        rows |= made
    if options.json:
        write(options.json, "growth", [Entry(name, {}, {}, dict(row)) for name, row in rows.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
