"""What tuning in the background costs at the first call, and what it reaches: on a CPU, against other modes.

    python -m bench.background --json out/bench/background.json

First calls are those of fresh processes. Each has a cache of its own that holds the precompiled header and the runtime, and
nothing of the graph. The modes take turns, each first in every second round, and wait until what the one before has started
is over. Final speed is that of one process: the tuned graph and one of max-autotune are timed in turns once nothing is tuned
any more. Each has a tuning file of its own, and so has a second graph of max-autotune: what two tunings of one problem differ
by is the least that can be asked of any two.
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
MODES: dict[str, dict[str, Any]] = {DEFAULT: {}, BACKGROUND: {"tuning": "background"}}


def gelu_of_matmul(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(x @ w + b)


def feed_forward(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.relu(x @ w) @ v + x


def scores(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(x @ y.transpose(-1, -2) * 0.125, -1)


Case = tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]
CASES: dict[str, Case] = {
    "gelu(x w + b), 256x1024x1024": (gelu_of_matmul, ((256, 1024), (1024, 1024), (1024,))),
    "relu(x w) v + x, 128x512x2048": (feed_forward, ((128, 512), (512, 2048), (2048, 512))),
    "softmax(x y'), 8x256x256x64": (scores, ((8, 256, 64), (8, 256, 64))),
}


def arguments_of(name: str) -> tuple[Callable[..., Tensor], list[Tensor]]:
    function, shapes = CASES[name]
    torch.manual_seed(0)
    return function, [torch.randn(shape) / shape[-1] ** 0.5 for shape in shapes]


# ---- in a process of its own --------------------------------------------------------------------------------------------


def first_call(name: str, mode: str) -> float:
    """Seconds of the first call in this process."""
    function, given = arguments_of(name)
    compiled = kgen.compile(function, options={"template_packages": False, **MODES[mode]})
    started = time.perf_counter()
    compiled(*given)
    return time.perf_counter() - started


def final_speed(name: str, seconds: float, folder: Path) -> dict[str, float]:
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
    timed = interleave({mode: partial(one, *given) for mode, one in compiled.items()}, seconds=4.0)
    return {mode: timing.median for mode, timing in timed.items()}


def child(options: argparse.Namespace) -> int:
    """Prints a number, or several, as JSON."""
    if options.child == "warm":
        torch.compile(torch.sin, backend="kgen")(torch.randn(7))
        made: Any = None
    elif options.child == "final":
        with tempfile.TemporaryDirectory() as folder:
            made = final_speed(options.case, options.seconds, Path(folder))
    else:
        made = first_call(options.case, options.child)
    print(json.dumps(made), flush=True)
    os._exit(0)  # what is tuned in the background has not ended


# ---- the bench ----------------------------------------------------------------------------------------------------------


def asked(what: str, name: str, cache: Path, seconds: float) -> Any:
    """What a process prints whose cache is a folder."""
    command = [sys.executable, "-m", "bench.background", "--child", what, "--case", name, "--seconds", str(seconds)]
    environment = {**os.environ, "KGEN_CACHE_DIR": str(cache)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def in_fresh_cache(what: str, name: str, prepared: Path, seconds: float) -> Any:
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        cache = Path(folder) / "cache"
        shutil.copytree(prepared, cache, symlinks=True)
        return asked(what, name, cache, seconds)


def measured(name: str, prepared: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A row. First calls are medians of processes that take turns."""
    firsts: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(options.processes):
        for mode in list(MODES)[:: -1 if number % 2 else 1]:
            firsts[mode].append(in_fresh_cache(mode, name, prepared, options.seconds))
            time.sleep(SETTLING)
    first = {mode: median(found) for mode, found in firsts.items()}
    final = in_fresh_cache("final", name, prepared, options.seconds)
    return {"name": name, "seconds": final, "first_call": first, "first_calls": firsts}


def text(row: dict[str, Any]) -> str:
    first, final = row["first_call"], row["seconds"]
    calls = f"first call {first[BACKGROUND]:.2f} s, {first[BACKGROUND] / first[DEFAULT]:.3f} of the default mode's"
    speeds = ", ".join(f"{final[BACKGROUND] / final[mode]:.3f} of {mode}'s" for mode in (DEFAULT, AUTOTUNE))
    noise = f"{AGAIN} {final[AGAIN] / final[AUTOTUNE]:.3f} of that"
    return f"{row['name']}: {calls}; then {final[BACKGROUND] * 1e6:.1f} us a call, {speeds} ({noise})"


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
    first = [row["first_call"][BACKGROUND] / row["first_call"][DEFAULT] for row in rows]
    final = [row["seconds"][BACKGROUND] / row["seconds"][AUTOTUNE] for row in rows]
    print(
        f"in geomean: first call {geomean(first):.3f} of the default mode's, final speed {geomean(final):.3f} of max-autotune's"
    )
    if options.json:
        write(options.json, "background", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
