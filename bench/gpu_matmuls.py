"""Matmuls with fused work on a GPU: eager, Inductor (default, max-autotune), cuBLAS and separate kernels, kgen.

python -m bench.gpu_matmuls --json out/matmuls.json
python -m bench.gpu_matmuls --json out/matmuls.json --append          # goes on where an earlier run stopped
python -m bench.gpu_matmuls --only 1 12 13 --contenders eager library kgen --seconds 1
python -m bench.gpu_matmuls --only 2 --contenders eager kgen --force triton_matmul_persistent triton_matmul_tiles
python -m bench.gpu_matmuls --only 8 --contenders kgen --variant apart '{"prologues": false}'
python -m bench.gpu_matmuls --device cpu --shrink 64 --contenders eager kgen    # tries the command out where there is no GPU

All contenders of a matmul take turns. Each is recorded as a CUDA graph of calls on different sets of arguments, together
larger than the L2 cache, and the graph is replayed: the host plays no part. A contender that cannot be recorded is called,
while the device waits until all calls are queued, and is marked with a star. `python -m bench.report` makes tables and plots of
the JSON.
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench import measurements
from bench.contenders import copy_of, failure
from bench.cublas import through_cupy
from bench.gpu_timing import COLD, MAX_SETS, Entry, Function, machine_rates, prepare, timed
from bench.matmuls import BY_NUMBER, MATMULS, Matmul
from bench.measure import synchronize
from bench.report import markdown
from bench.results import Results, load, merged
from kgen.only import only


@dataclass(frozen=True)
class Contender:
    """`make` gives the function to time, None where the contender has nothing to say of a matmul. `whole`: it computes all of
    the matmul. `record`: without the host."""

    make: Callable[[Matmul, Sequence[Tensor]], Function | None]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    whole: bool = True
    record: bool = True


@dataclass(frozen=True)
class Settings:
    """`shrink` divides the lengths of all matmuls; `rates` are the machine's, `seconds` are for the rounds of one matmul."""

    device: str = "cuda"
    seconds: float = 2.0
    shrink: int = 1
    rates: Mapping[str, float] | None = None


def compiled(backend: str = "inductor", **how: Any) -> Contender:
    return Contender(lambda p, args: torch.compile(copy_of(p.fn), backend=backend, fullgraph=True, **how), quiet)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what a compiler prints while it compiles: Inductor's tables of times, and each candidate that does not fit."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)


def kgen_with(
    context: Callable[[], AbstractContextManager[Any]] = nullcontext, record: bool = True, **options: Any
) -> Contender:
    """kgen with other options, compiled anew. It knows nothing that other runs or contenders have measured."""

    def make(matmul: Matmul, args: Sequence[Tensor]) -> Function:
        name = "measured" if "max-autotune" in options.get("mode", "") else "nothing"
        known = {"cache": False, "tuning_file": f"{scratch()}/{name}.json"}
        return torch.compile(copy_of(matmul.fn), backend="kgen", fullgraph=True, options=known | options)

    return Contender(make, context, record=record)


@cache
def scratch() -> str:
    """A folder of this process, for its tuning files."""
    folder = tempfile.TemporaryDirectory(prefix="kgen-bench-")
    atexit.register(folder.cleanup)
    return folder.name


def forced(template: str) -> Contender:
    """kgen with every matmul left to one template."""
    return kgen_with(lambda: only(template, lambda configs: configs[0]))


CONTENDERS: dict[str, Contender] = {
    "eager": Contender(lambda p, args: p.fn),
    "eager-again": Contender(lambda p, args: p.fn),
    "cublas": Contender(lambda p, args: p.bare, whole=False),
    "library": Contender(lambda p, args: p.library or p.fn),
    "cupy": Contender(lambda p, args: through_cupy(p.fn, args)),
    "inductor": compiled(),
    "max-autotune": compiled(mode="max-autotune-no-cudagraphs"),
    "kgen": kgen_with(),
    "kgen-autotune": kgen_with(mode="max-autotune-no-cudagraphs"),
}


def measure(matmul: Matmul, contenders: Mapping[str, Contender], settings: Settings) -> dict[str, Any]:
    """All contenders on one matmul. The row's `samples` are seconds a call, round by round."""
    torch._dynamo.reset()
    small = matmul.shrunk(settings.shrink)
    torch.backends.cuda.matmul.allow_tf32 = False
    count = max(2, min(MAX_SETS, math.ceil(COLD / matmul.nbytes)))
    sets = [small.make(settings.device, seed) for seed in range(count)]
    want = small.reference(sets[0])
    torch.backends.cuda.matmul.allow_tf32 = matmul.tf32
    row: dict[str, Any] = {
        "number": matmul.number, "title": matmul.title, "sets": count, "flops": small.flops, "bytes": small.fewest_bytes,
        "rate": matmul.rate, "rates": settings.rates, "failed": {},
    }  # fmt: skip
    entries: list[Entry] = []
    for name, contender in contenders.items():
        entry = Entry(name)
        try:
            fn = contender.make(small, sets[0])
            if fn is None:
                continue
            prepare(entry, fn, sets, want if contender.whole else None, contender.context(), contender.record)
        except Exception as cause:
            row["failed"][name] = failure(cause)
            synchronize()
            continue
        entries.append(entry)
    del want
    row |= timed(entries, settings.seconds, settings.device == "cuda")
    del entries, sets
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return row


def show(row: dict[str, Any], console: Console) -> None:
    """One matmul as soon as it is measured: what is lost when time runs out is only the summary."""
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


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """The rows without their samples."""
    kept = [{name: value for name, value in row.items() if name != "samples"} for row in rows]
    measurements.write(path, "gpu_matmuls", kept)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NUMBER), help="numbers of matmuls; with --append again")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--force", nargs="*", default=[], metavar="TEMPLATE", help="kgen with this template alone")
    parser.add_argument(
        "--variant", nargs=2, action="append", default=[], metavar=("NAME", "JSON"), help="kgen with these options"
    )
    parser.add_argument(
        "--tuning-file", help="where kgen-autotune keeps what it measures; adds kgen-tuned, the default mode with that file"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each matmul")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide all lengths by about this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")
    return parser.parse_args(arguments)


def contenders_of(options: argparse.Namespace) -> dict[str, Contender]:
    chosen = {name: CONTENDERS[name] for name in options.contenders}
    if options.tuning_file:
        if "kgen-autotune" in chosen:
            chosen["kgen-autotune"] = kgen_with(mode="max-autotune-no-cudagraphs", tuning_file=options.tuning_file)
        chosen["kgen-tuned"] = kgen_with(tuning_file=options.tuning_file)
    chosen |= {name: kgen_with(**json.loads(given)) for name, given in options.variant}
    return chosen | {name: forced(name) for name in options.force}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --shrink 64 tries the command out")
    if "kgen" not in torch.compiler.list_backends():  # peers alone take minutes, and are of no use
        raise SystemExit(f"kgen is not installed for {sys.executable}: {sys.executable} -m pip install --no-deps -e .")
    console = Console(width=200)
    rows: list[dict[str, Any]] = []
    if options.append and options.json and options.json.exists():
        rows = load([options.json]).rows
    known = {row["number"] for row in rows}
    rates = machine_rates(options.device, 8192 if options.device == "cuda" else 64)
    console.print(", ".join(f"{name} {value:.3g}/s" for name, value in rates.items()), highlight=False)
    settings = Settings(options.device, options.seconds, options.shrink, rates)
    contenders = contenders_of(options)
    with torch.no_grad():
        for number in options.only or [p.number for p in MATMULS if p.number not in known]:
            row = measure(BY_NUMBER[number], contenders, settings)
            show(row, console)
            rows = merged(rows, [row])
            if options.json:
                write(options.json, rows)
    console.print(markdown(Results(rows)), highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
