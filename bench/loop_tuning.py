"""What measuring loop kernels is worth: points, rows, columns and scans, by rule and as max-autotune has them.

    python -m bench.loop_tuning --device cuda --json out/bench/loop_tuning.json

Each pattern is compiled in the default mode with an empty tuning file, and in max-autotune-no-cudagraphs with its own.
Both, and eager, take turns on arguments that no cache holds. The error is that of the tuned kernels, against float64.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import kgen
from bench.gpu_timing import Entry, prepare, timed
from bench.measure import geomean
from bench.measurements import write

EAGER, RULE, TUNED = "eager", "by rule", "measured"
Pattern = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], torch.dtype]
PATTERNS: dict[str, Pattern] = {
    "softmax": (lambda x: x.softmax(-1), ((4096, 8192),), torch.bfloat16),
    "layer_norm of a sum": (lambda x, r: F.layer_norm(x + r, x.shape[-1:]), ((8192, 4096), (8192, 4096)), torch.bfloat16),
    "rms norm, short rows": (lambda x, w: F.rms_norm(x, x.shape[-1:], w), ((65536, 256), (256,)), torch.bfloat16),
    "cross entropy": (lambda x: torch.logsumexp(x.float(), -1), ((2048, 50304),), torch.bfloat16),
    "sum of columns": (lambda x: x.sum(0), ((8192, 4096),), torch.float32),
    "gelu and a residual": (lambda x, r: F.gelu(x) + r, ((8192, 4096), (8192, 4096)), torch.bfloat16),
    "x + y transposed": (lambda x, y: x + y.t(), ((4096, 4096), (4096, 4096)), torch.float32),
    "cumsum": (lambda x: x.cumsum(-1), ((4096, 4096),), torch.float32),
}
# Elements on a CPU to those on a GPU.
SMALLER = 16


def measured(name: str, device: str, folder: Path, seconds: float, tuning_seconds: float) -> dict[str, Any]:
    """A row."""
    function, shapes, dtype = PATTERNS[name]
    if device == "cpu":
        shapes = tuple((max(1, shape[0] // SMALLER), *shape[1:]) for shape in shapes) if len({*shapes}) == 1 else shapes
    nbytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape in shapes)
    sets = [[torch.randn(shape, device=device, dtype=dtype) for shape in shapes] for _ in range(max(1, int(220e6 // nbytes)))]
    want = function(*(one.double() for one in sets[0]))
    options = {
        RULE: {"tuning_file": str(folder / f"{name} none.json")},
        TUNED: {
            "tuning_file": str(folder / f"{name}.json"),
            "mode": "max-autotune-no-cudagraphs",
            "tuning_seconds": tuning_seconds,
        },
    }
    entries = [Entry(EAGER), Entry(RULE), Entry(TUNED)]
    for entry in entries:
        given = options.get(entry.name)
        fn = function if given is None else kgen.compile(function, options={"cache": False, **given})
        torch.compiler.reset()
        prepare(entry, fn, sets, want, contextlib.nullcontext())
    return {"name": name, **timed(entries, seconds, device == "cuda")}


def text(row: dict[str, Any]) -> str:
    eager, rule, tuned = (row["results"][name] for name in (EAGER, RULE, TUNED))
    times = " ".join(f"{1e6 * one['seconds']:9.1f}" for one in (eager, rule, tuned))
    share = tuned["seconds"] / rule["seconds"]
    return (
        f"{row['name']:22} {times} {share:6.3f} {tuned['error']:9.1e} {tuned['compile_s']:6.1f}  {'; '.join(tuned['chosen'])}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=PATTERNS, action="append")
    parser.add_argument("--seconds", type=float, default=1.5, help="of taking turns, for each pattern")
    parser.add_argument("--tuning-seconds", type=float, default=20.0, help="of measuring, for each pattern")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="kgen-bench-") as folder:
        names = options.only or list(PATTERNS)
        rows = [measured(name, options.device, Path(folder), options.seconds, options.tuning_seconds) for name in names]
    print(f"{'':22} {'eager us':>9} {'rule us':>9} {'tuned us':>9} {'share':>6} {'error':>9} {'s':>6}")
    for row in rows:
        print(text(row))
    shares = [row["results"][TUNED]["seconds"] / row["results"][RULE]["seconds"] for row in rows]
    print(f"measured over by rule, in geomean: {geomean(shares):.3f}")
    if options.json:
        write(options.json, "loop_tuning", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
