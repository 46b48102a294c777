"""Times untuned patterns and models, the contenders in turns, and prints kgen's time over the best peer's.

python -m bench.untuned --json out.json --seconds 0.4
python -m bench.untuned --only attention resnet50 --contenders eager inductor kgen
python -m bench.untuned --blocks --jobs 8 --kernels 6

python -m bench.untuned --device cpu --list second --limit 300

With `--jobs`, each row has a process and caches of its own: several are compiled at a time, and timed one after the other.
`--limit` gives each row a process, too, and ends it after so many seconds. On a CPU the default is the models alone: the sizes
of blocks are a GPU's.
`--kernels` says where the time goes. Errors are those of kgen and eager against the same block in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from fcntl import LOCK_EX, flock
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.gpu_timing import relative_error, seconds
from bench.measure import geomean, synchronize
from bench.measurements import write
from bench.untuned import (
    eighth,
    eleventh,
    fifth,
    fourteenth,
    fourth,
    language,
    ninth,
    patterns,
    science,
    second,
    seventh,
    sixth,
    tenth,
    third,
    thirteenth,
    twelfth,
    vision,
)
from bench.untuned.block import Block, cast
from bench.untuned.cpu_models import CPU_MODELS
from bench.untuned.models import GPU_MODELS

ROOT = Path(__file__).parents[2]
LISTS: dict[str, tuple[Block, ...]] = {
    "first": (*patterns.BLOCKS, *language.BLOCKS, *vision.BLOCKS, *science.BLOCKS),
    "second": second.BLOCKS,
    "third": third.BLOCKS,
    "fourth": fourth.BLOCKS,
    "fifth": fifth.BLOCKS,
    "sixth": sixth.BLOCKS,
    "seventh": seventh.BLOCKS,
    "eighth": eighth.BLOCKS,
    "ninth": ninth.BLOCKS,
    "tenth": tenth.BLOCKS,
    "eleventh": eleventh.BLOCKS,
    "twelfth": twelfth.BLOCKS,
    "thirteenth": thirteenth.BLOCKS,
    "fourteenth": fourteenth.BLOCKS,
}
BLOCKS = tuple(block for blocks in LISTS.values() for block in blocks)
Call = Callable[[], Any]
Row = dict[str, Any]
PEERS = ("eager", "inductor", "max-autotune")
COMPILE: dict[str, Callable[[Any], Any]] = {
    "eager": lambda fn: fn,
    "inductor": torch.compile,
    "max-autotune": lambda fn: torch.compile(fn, mode="max-autotune-no-cudagraphs"),
    "kgen": lambda fn: torch.compile(fn, backend="kgen"),
}


# ---- one row --------------------------------------------------------------------------------------------------------------


def block_call(block: Block, contender: str, device: str, dtype: torch.dtype) -> Call:
    """The compiled block on its inputs. Of a training block it gives its result and the gradients of all floating inputs, of
    one that returns nothing what it writes."""
    generator = torch.Generator(device).manual_seed(0)
    made = block.inputs(lambda *shape: torch.randn(shape, generator=generator, device=device).to(torch.bfloat16))
    args = cast(made, dtype)
    fn = COMPILE[contender](block.fn)
    if not block.training:
        return lambda: args if (found := fn(*args)) is None else found
    args = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
    wanted = [a for a in args if a.requires_grad]
    seed = torch.ones_like(block.fn(*args).detach())

    def step() -> list[Tensor]:
        out = fn(*args)
        return [out.detach(), *(g for g in torch.autograd.grad(out, wanted, seed, allow_unused=True) if g is not None)]

    return step


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


def measure(name: str, options: argparse.Namespace) -> Row:
    torch._dynamo.reset()
    block = next((b for b in BLOCKS if b.name == name), None)
    dtype = (block and block.dtype) or _dtype(options)
    torch.backends.cuda.matmul.allow_tf32 = bool(block and block.tf32)
    row: Row = {"name": name, "compile_s": {}, "failed": {}, "seconds": {}, "error": {}, "longest": {}}
    ready: dict[str, Call] = {}
    with contextlib.nullcontext() if block and block.training else torch.no_grad():
        exact = block_call(block, "eager", options.device, torch.float64)() if block else None
        for contender in options.contenders:
            started = time.perf_counter()
            try:
                call = (
                    block_call(block, contender, options.device, dtype)
                    if block
                    else model_call(name, contender, options.device, dtype)
                )
                got = call()
                synchronize()
            except Exception as cause:
                row["failed"][contender] = f"{type(cause).__name__}: {cause}"[:300]
                continue
            row["compile_s"][contender] = time.perf_counter() - started
            if exact is not None:
                row["error"][contender] = relative_error(got, exact)
            ready[contender] = call
        del exact
        with _turn(options.lock):
            for contender, samples in _in_turns(ready, options).items():
                row["seconds"][contender] = statistics.median(samples)
            if options.kernels and options.device == "cuda":
                row["longest"] = {contender: _longest(call, options.kernels) for contender, call in ready.items()}
    return row


def _dtype(options: argparse.Namespace) -> torch.dtype:
    """The values' type, of blocks that name none."""
    name = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]


@contextlib.contextmanager
def _turn(lock: str) -> Iterator[None]:
    """What is timed does not run beside what other processes time."""
    if not lock:
        yield
        return
    with Path(lock).open("a") as file:
        flock(file, LOCK_EX)
        yield


def _in_turns(ready: dict[str, Call], options: argparse.Namespace) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for call in ready.values():
        timed(call, options.device, 3)
    repeats = {name: max(1, min(30, int(0.01 / timed(call, options.device, 2)))) for name, call in ready.items()}
    names, deadline, turn = list(ready), time.perf_counter() + options.seconds * len(ready), 0
    while names and (turn < 7 or time.perf_counter() < deadline):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            samples[name].append(timed(ready[name], options.device, repeats[name]))
        turn += 1
    return samples


def _longest(call: Call, number: int, calls: int = 7) -> list[tuple[float, float, str]]:
    """Microseconds and launches of a call, and the name, first of all kernels together, then of those with the most time.

    A launch counts with the median over the calls: other processes compute beside this one while it does not time.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    launches: dict[str, list[float]] = {}
    events = (event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    for event in sorted(events, key=lambda event: event.time_range.start):
        launches.setdefault(event.name[:100], []).append(event.self_device_time_total)
    times = {name: (_of_a_call(us, calls), len(us) / calls) for name, us in launches.items()}
    found = sorted(times, key=lambda name: -times[name][0])
    rows = [(sum(us for us, _ in times.values()), sum(count for _, count in times.values()), "all")]
    rows += [(*times[name], name) for name in found[:number]]
    return [(round(us, 1), round(count, 1), name) for us, count, name in rows]


def _of_a_call(us: list[float], calls: int) -> float:
    """Launches of one kernel in the order of time: the sum over those of a call of each one's median over the calls."""
    if len(us) % calls:
        return statistics.median(us) * len(us) / calls
    each = len(us) // calls
    return sum(statistics.median(us[k::each]) for k in range(each))


# ---- all rows -------------------------------------------------------------------------------------------------------------


def rows(names: Sequence[str], options: argparse.Namespace, arguments: Sequence[str]) -> Iterator[Row]:
    if options.jobs == 1 and options.limit is None:
        yield from (measure(name, options) for name in names)
        return
    with tempfile.TemporaryDirectory(prefix="kgen-untuned-") as folder, ThreadPool(options.jobs) as pool:
        more = [*arguments, "--lock", f"{folder}/lock"]
        yield from pool.imap_unordered(lambda k: _by_process(names[k], more, f"{folder}/{k}", options.limit), range(len(names)))


def _by_process(name: str, arguments: Sequence[str], folder: str, limit: float | None) -> Row:
    """The row as a process of its own measures it, which has `limit` seconds."""
    caches = {"KGEN_CACHE_DIR": f"{folder}/kgen", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    command = [sys.executable, "-m", "bench.untuned", *arguments, "--one", name]
    environment = {**os.environ, **caches}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return _failed(name, f"no result within {limit:g} s: give more with --limit")
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 0:
        made: Row = json.loads(last)
        return made | {"said": [line for line in done.stderr.splitlines() if "kgen" in line][:3]}
    return _failed(name, done.stderr[-600:])


def _failed(name: str, cause: str) -> Row:
    """The row of a process that gave none."""
    return {"name": name, "compile_s": {}, "failed": {"process": cause}, "seconds": {}, "error": {}, "longest": {}}


def ratio(row: Row) -> float | None:
    """kgen's time over the fastest peer's; below 1 is faster."""
    peers = [row["seconds"][name] for name in PEERS if name in row["seconds"]]
    ours = row["seconds"].get("kgen")
    return ours / min(peers) if ours and peers else None


def table(made: Sequence[Row], contenders: Sequence[str]) -> Table:
    found = Table(title="milliseconds")
    for column in ("", *contenders, "kgen / best peer", "error / eager's", "compile s (inductor, kgen)"):
        found.add_column(column)
    for row in sorted(made, key=lambda row: ratio(row) or math.inf):
        cells = [f"{row['seconds'][c] * 1e3:.3f}" if c in row["seconds"] else "failed" for c in contenders]
        errors = row["error"]
        error = f"{errors['kgen'] / max(errors['eager'], 1e-9):.2f}" if {"kgen", "eager"} <= errors.keys() else ""
        compiles = ", ".join(f"{row['compile_s'].get(c, 0):.1f}" for c in ("inductor", "kgen"))
        share = ratio(row)
        found.add_row(row["name"], *cells, "" if share is None else f"{share:.3f}", error, compiles)
    return found


def names_of_rows(options: argparse.Namespace) -> list[str]:
    """The names that the options choose, in order."""
    every = LISTS if options.device == "cuda" or options.blocks else ()  # sizes of blocks are a GPU's
    names = [b.name for name in options.list or every for b in LISTS[name]]
    names += [] if options.blocks or options.list else models(options.device)
    chosen = [name for name in names if not options.only or any(part in name for part in options.only)]
    number, count = options.shard
    return chosen[number - 1 :: count]


def shard(text: str) -> tuple[int, int]:
    """K and N of ``K/N``. Raises ValueError."""
    number, count = map(int, text.split("/"))
    if not 1 <= number <= count:
        raise ValueError(text)
    return number, count


def command_line() -> argparse.ArgumentParser:
    """The options of the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=[], help="names that contain one of these")
    parser.add_argument("--list", nargs="*", default=[], choices=list(LISTS), help="the blocks of these lists alone")
    parser.add_argument("--shard", default=(1, 1), type=shard, metavar="K/N", help="every N-th row, from the K-th on")
    parser.add_argument("--blocks", action="store_true", help="no whole models")
    parser.add_argument("--contenders", nargs="*", default=["eager", "inductor", "kgen"], choices=list(COMPILE))
    parser.add_argument("--seconds", type=float, default=0.4, help="of timing, for each contender of each row")
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time, a process for each; timed one after the other")
    parser.add_argument("--limit", type=float, help="seconds of a row in a process of its own, compilation and turns included")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="of blocks without one of their own, and models"
    )
    parser.add_argument("--kernels", type=int, default=0, help="the longest kernels of each contender, on a GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    parser.add_argument("--lock", default="", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    options = command_line().parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return
    chosen = names_of_rows(options)
    made: list[Row] = []
    for row in rows(chosen, options, sys.argv[1:]):
        made.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            write(options.json, "untuned", made)
    console = Console(width=170)
    console.print(table(made, options.contenders))
    found = [r for row in made if (r := ratio(row)) is not None]
    if found:
        console.print(f"geomean of kgen / best peer: {geomean(found):.3f}, worst {max(found):.3f}")


if __name__ == "__main__":
    main()
