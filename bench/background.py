"""What tuning in the background costs at the first call, and what it reaches: on a CPU, against other modes.

    python -m bench.background --json out/bench/background.json

First calls are those of fresh processes. Each has a cache of its own that holds the precompiled header and the runtime, and
nothing of the graph. The modes take turns, each first in every second round, and wait until what the one before has started
is over. Beside the clock's seconds stand those of the thread that calls, which others on the machine do not add to.

Final speed is that of one process: the tuned graph and one of max-autotune are timed in turns, call by call, once nothing is
tuned any more. Each has a tuning file of its own, and so has a second graph of max-autotune: what two tunings of one problem
differ by is the least that can be asked of any two. Medians stand beside lower quartiles. `again` is the first call of the
next process, and of the one after it, with the cache that the tuning has left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kgen
from bench.measure import geomean, interleave
from bench.measurements import write

DEFAULT, BACKGROUND, AUTOTUNE, AGAIN = "default", "background", "max-autotune", "max-autotune again"
# Seconds after a process: the compilers that its tuning has started end by then.
SETTLING = 3.0
UNTIL_TUNED = " until tuned"
CLOCKS = ("clock", "thread")
MODES: dict[str, dict[str, Any]] = {DEFAULT: {}, BACKGROUND: {"tuning": "background"}}


def gelu_of_matmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b)


def feed_forward(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.relu(x @ w) @ v + x


def scores(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x @ y.transpose(-1, -2) * 0.125, -1)


def normalised(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:]) * F.softmax(x, -1)


Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]
CASES: dict[str, Case] = {
    "gelu(x w + b), 256x1024x1024": (gelu_of_matmul, ((256, 1024), (1024, 1024), (1024,))),
    "relu(x w) v + x, 128x512x2048": (feed_forward, ((128, 512), (512, 2048), (2048, 512))),
    "softmax(x y'), 8x256x256x64": (scores, ((8, 256, 64), (8, 256, 64))),
    "layer_norm(x) softmax(x), 512x4096": (normalised, ((512, 4096),)),
}


def arguments_of(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    return function, [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]


# ---- in a process of its own --------------------------------------------------------------------------------------------


def first_call(name: str, mode: str, until_tuned: bool = False) -> dict[str, float]:
    """Seconds of the first call in this process, of the clock and of its thread."""
    function, given = arguments_of(name)
    compiled = kgen.compile(function, options={"template_packages": False, **MODES[mode]})
    started, worked = time.perf_counter(), time.thread_time()
    compiled(*given)
    found = {"clock": time.perf_counter() - started, "thread": time.thread_time() - worked}
    if until_tuned:
        kgen.wait_for_tuning()
    return found


def final_speed(name: str, seconds: float, folder: Path) -> dict[str, dict[str, float]]:
    """Seconds of a call of each, when the background has nothing left to do."""
    function, given = arguments_of(name)
    measured = {"mode": "max-autotune-no-cudagraphs", "tuning_seconds": seconds}
    modes = {
        DEFAULT: {"tuning_file": str(folder / "none.json")},
        BACKGROUND: {"tuning": "background", "tuning_file": str(folder / "background.json"), "tuning_seconds": seconds},
        AUTOTUNE: {**measured, "tuning_file": str(folder / "autotune.json")},
        AGAIN: {**measured, "tuning_file": str(folder / "again.json")},
    }
    compiled = {mode: kgen.compile(function, options={"cache": False, **options}) for mode, options in modes.items()}
    for one in compiled.values():
        one(*given)
        kgen.wait_for_tuning()
    timed = interleave({mode: partial(one, *given) for mode, one in compiled.items()}, seconds=10.0, sample=2e-4)
    return {mode: {"median": timing.median, "low": timing.low} for mode, timing in timed.items()}


def child(options: argparse.Namespace) -> int:
    """Prints a number, or several, as JSON."""
    if options.child == "warm":
        torch.compile(torch.sin, backend="kgen")(torch.randn(7))
        made: Any = None
    elif options.child == "final":
        with tempfile.TemporaryDirectory() as folder:
            made = final_speed(options.case, options.seconds, Path(folder))
    else:
        made = first_call(options.case, options.child.partition(" ")[0], options.child.endswith(UNTIL_TUNED))
    print(json.dumps(made), flush=True)
    os._exit(0)  # what is tuned in the background has not ended


# ---- the bench ----------------------------------------------------------------------------------------------------------


def asked(what: str, name: str, cache: Path, seconds: float) -> Any:
    """What a process prints whose cache is a folder."""
    command = [sys.executable, "-m", "bench.background", "--child", what, "--case", name, "--seconds", str(seconds)]
    environment = {**os.environ, "KGEN_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_fresh_cache(what: Sequence[str], name: str, prepared: Path, seconds: float) -> list[Any]:
    """What processes print one after the other that share a cache."""
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        cache = Path(folder) / "cache"
        shutil.copytree(prepared, cache, symlinks=True)
        return [asked(one, name, cache, seconds) for one in what]


def measured(name: str, prepared: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row. First calls are medians of processes that take turns."""
    firsts: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(options.processes):
        for mode in list(MODES)[:: -1 if number % 2 else 1]:
            firsts[mode] += in_fresh_cache([mode], name, prepared, options.seconds)
            time.sleep(SETTLING)
    first = {mode: {clock: median(one[clock] for one in found) for clock in CLOCKS} for mode, found in firsts.items()}
    [final] = in_fresh_cache(["final"], name, prepared, options.seconds)
    later = {mode: in_fresh_cache([mode + UNTIL_TUNED] * 3, name, prepared, options.seconds)[1:] for mode in MODES}
    return {"name": name, "seconds": final, "first_call": first, "first_calls": firsts, "again": later}


def text(row: dict[str, Any]) -> str:
    first, final = row["first_call"], row["seconds"]
    shares = ", ".join(f"{first[BACKGROUND][clock] / first[DEFAULT][clock]:.3f} by {clock}" for clock in CLOCKS)
    seconds = {mode: ", ".join(f"{one['clock']:.2f}" for one in found) for mode, found in row["again"].items()}
    later = "; ".join(f"{mode} {found} s" for mode, found in seconds.items())

    def against(mode: str, other: str) -> str:
        return f"{final[mode]['median'] / final[other]['median']:.3f} (low {final[mode]['low'] / final[other]['low']:.3f})"

    return (
        f"{row['name']}\n  first call {first[BACKGROUND]['clock']:.2f} s: of the default mode's {shares}\n  again: {later}\n"
        f"  then {final[BACKGROUND]['low'] * 1e6:.1f} us a call: {against(BACKGROUND, DEFAULT)} of the default mode's,"
        f" {against(BACKGROUND, AUTOTUNE)} of max-autotune's; {AGAIN} {against(AGAIN, AUTOTUNE)} of that"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", choices=CASES, action="append", help="only these")
    parser.add_argument("--processes", type=int, default=5, help="first calls of each mode")
    parser.add_argument("--seconds", type=float, default=20.0, help="how long one graph may measure")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        options.case = options.case[0]
        return child(options)
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        asked("warm", next(iter(CASES)), Path(folder), options.seconds)
        rows = [measured(name, Path(folder), options) for name in options.case or CASES]
    for row in rows:
        print(text(row))
    first = {c: geomean(row["first_call"][BACKGROUND][c] / row["first_call"][DEFAULT][c] for row in rows) for c in CLOCKS}
    final = {k: geomean(row["seconds"][BACKGROUND][k] / row["seconds"][AUTOTUNE][k] for row in rows) for k in ("median", "low")}
    print(f"in geomean: first call {first['clock']:.3f} of the default mode's, {first['thread']:.3f} by thread;", end=" ")
    print(f"final speed {final['median']:.3f} of max-autotune's, {final['low']:.3f} by lower quartiles")
    if options.json:
        write(options.json, "background", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
