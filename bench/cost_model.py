"""How good the cost model's choice of templates, configurations and libraries is, by times measured on an H200. Needs no GPU.

python -m bench.cost_model
python -m bench.cost_model --only 12 13 --all

`measured_matmuls.json` has prototypes of the templates (the same tiles, loops and epilogues) and eager's own kernels; for
matmuls 4, 6, 16 and 17 the templates themselves, in another session. The clocks of sessions differ, so compare within a
matmul. Regret is the time of what the model would pick among what was measured, over the best of that.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from bench.matmuls import BY_NUMBER, Matmul
from bench.measure import geomean
from kgen.capture.decompositions import TABLE
from kgen.cost import model
from kgen.ir.plan import members
from kgen.lowering import LoweringContext, lower, reinplace
from kgen.scheduler import Options, contraction_of, schedule
from kgen.scheduler.selection.choose import problems
from kgen.templates.contract import Config
from kgen.templates.problem import Problem

# How the table writes a configuration.
SHORT = (
    ("triton_matmul", "mm"), ("BLOCK_M=", ""), (" BLOCK_N=", "x"), (" BLOCK_K=", "x"), (" GROUP=8", ""), ("GROUP=", "g"),
    ("EPILOGUE_SUBTILES=", "p"), (" FLATTEN=True", ""), ("FLATTEN=False", "loop"), (" PROGRAMS=1", ""), ("PROGRAMS=", "x"),
    ("WARPS=", "w"),
    ("STAGES=", "s"),
)  # fmt: skip
MEASURED = Path(__file__).parent / "measured_matmuls.json"


@dataclass(frozen=True)
class Candidate:
    """A way to compute a matmul, what the model says of it, and what was measured (NaN: nothing)."""

    name: str
    seconds: float
    measured: float = math.nan


def problems_of(matmul: Matmul) -> list[Problem]:
    """The matmul as templates see it, on a GPU that need not be here."""
    torch.backends.cuda.matmul.allow_tf32 = matmul.tf32
    mode = FakeTensorMode()
    args = [FakeTensor(mode, torch.empty(g.shape, dtype=g.dtype, device="meta"), torch.device("cuda:0")) for g in matmul.inputs]
    with mode:
        gm = make_fx(matmul.fn, decomposition_table=TABLE)(*args)
    options = Options(recompute=False)
    with _disable_current_modes(), patch.object(model, "vendor_seconds", lambda problem: math.inf):
        plan = schedule(lower(reinplace(gm), LoweringContext()), options)
    kernels = [kernel for step in plan.kernels for kernel in members(step) if kernel.contracts]
    return [p for k in kernels for p in problems(k, plan.graph, options.device(plan.graph, contraction_of(k)), None)[0]]


def candidates(matmul: Matmul, measured: dict[str, Any]) -> list[Candidate]:
    """All configurations of all templates, and the library."""
    times = {(row["template"], _key(row["config"])): row["us"] * 1e-6 for row in measured.get("kernels", ())}
    found: list[Candidate] = []
    offered = problems_of(matmul)
    for problem in offered:
        name = problem.template.name
        for config in dict.fromkeys((*model.feasible(problem), *_measured_configs(problem, measured))):
            us = times.get((name, _key(dict(config.values))), math.nan)
            found.append(Candidate(f"{name} {config}", model.seconds(problem, config), us))
    if offered:
        times_of = measured.get("library", {"eager": math.nan})
        us = times_of.get("vendor", times_of["eager"]) if offered[0].has_fused_call else times_of["eager"]
        found.append(Candidate("library", model.vendor_seconds(offered[0]), us * 1e-6))
    return found


def _measured_configs(problem: Problem, measured: dict[str, Any]) -> list[Config]:
    rows = [row["config"] for row in measured.get("kernels", ()) if row["template"] == problem.template.name]
    return [problem.template.config(**{k: v for k, v in row.items() if k in problem.template.knobs}) for row in rows]


def _key(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BY_NUMBER), default=list(BY_NUMBER))
    parser.add_argument("--all", action="store_true", help="every candidate, the model's favourites first")
    options = parser.parse_args()
    measured = json.loads(MEASURED.read_text())
    console = Console(width=240)
    table = Table(title="microseconds: the model's estimate, what was measured, and the best that was measured")
    for name in ("matmul", "choice", "estimate", "measured", "best", "regret", "library", "measured", "best candidate"):
        table.add_column(name, no_wrap=True)
    regrets: list[float] = []
    for number in options.only:
        matmul = BY_NUMBER[number]
        found = sorted(candidates(matmul, measured.get(number, {})), key=lambda c: c.seconds)
        if not found:
            table.add_row(f"{number} {matmul.title}"[:36], "no template")
            continue
        library = next(c for c in found if c.name == "library")
        known = [c for c in found if not math.isnan(c.measured)]
        best = min(known, key=lambda c: c.measured, default=None)
        cells = (
            ["-"] * 3
            if best is None
            else [_us(known[0].measured), _us(best.measured), f"{known[0].measured / best.measured:.3f}"]
        )
        regrets += [known[0].measured / best.measured] if best else []
        last = [_us(library.seconds), _us(library.measured), _short(best.name) if best else "-"]
        table.add_row(f"{number} {matmul.title}"[:36], _short(found[0].name), _us(found[0].seconds), *cells, *last)
        for c in found if options.all else ():
            console.print(f"{number:5s} {_us(c.seconds):>8s} {_us(c.measured):>8s}  {_short(c.name)}", highlight=False)
    console.print(table)
    if regrets:
        console.print(f"regret: geomean {geomean(regrets):.3f}, largest {max(regrets):.3f}, of {len(regrets)}")


def _us(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:.1f}"


def _short(name: str) -> str:
    for long, short in SHORT:
        name = name.replace(long, short)
    return name


if __name__ == "__main__":
    main()
