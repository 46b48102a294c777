"""Convolutions on a GPU: eager, Inductor (default, max-autotune), kgen (default, max-autotune), and kgen's templates apart.

python -m bench.gpu_convs --quick --json out/convs.json           # the essential patterns within eight minutes
python -m bench.gpu_convs --json out/convs.json --append          # all; goes on where an earlier run stopped
python -m bench.gpu_convs --only "conv3x3 bn relu 256" --most 20 --seconds 2
python -m bench.gpu_convs --smoke                                 # is each configuration of each template right?
python -m bench.gpu_convs --device cpu --shrink 32 --only "conv3x3 bn relu 64"    # tries the command out

All contenders of a pattern take turns (`bench/gpu_timing.py`). Of each of the `--templates`, `--most` configurations that the
estimate likes best are timed on patterns of inference. Errors are relative, by norms, against eager in float32. A pattern that
trains is timed with its backward pass, as calls and not as a recorded graph. `--smoke` times nothing (`bench/conv_smoke.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench import conv_smoke
from bench.contenders import copy_of, failure
from bench.convs import BY_NAME, PATTERNS, Pattern
from bench.gpu_matmuls import quiet, scratch
from bench.gpu_timing import Entry, machine_rates, prepare, timed
from bench.measure import machine_facts, synchronize
from kgen.only import Pick, only
from kgen.templates.contract import Config

Function = Callable[..., Any]
TEMPLATES = ("triton_conv", "triton_conv_direct", "triton_conv_weight")
CONFIGS = "configs"
QUICK_SECONDS = 450.0


@dataclass(frozen=True)
class Contender:
    """`make` gives the function of a pattern; `template` is that which has to be used."""

    make: Callable[[Pattern], Function]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    template: str = ""


def compiled(**how: Any) -> Contender:
    return Contender(lambda p: torch.compile(copy_of(p.written), fullgraph=True, **how), quiet)


def kgen_with(template: str = "", pick: Pick | None = None, interpreted: bool = False, **options: Any) -> Contender:
    """kgen, which knows nothing that others have measured, or kgen with one template alone under a configuration."""
    name = "measured" if options else "nothing"
    known = {"cache": False, "gpu_interpreter": interpreted, "tuning_file": f"{scratch()}/convs_{name}.json", **options}
    context = nullcontext if pick is None else partial(only, template, pick)
    return Contender(
        lambda p: torch.compile(copy_of(p.written), backend="kgen", fullgraph=True, options=known), context, template
    )


CONTENDERS: dict[str, Contender] = {
    "eager": Contender(lambda p: p.written),
    "inductor": compiled(),
    "max-autotune": compiled(mode="max-autotune-no-cudagraphs"),
    "kgen": kgen_with(),
    "kgen-autotune": kgen_with(mode="max-autotune-no-cudagraphs"),
}
PEERS = ("eager", "inductor", "max-autotune")


def step_of(pattern: Pattern, function: Function) -> Function:
    """The function, or, of a pattern that trains, its results with the gradients of all arguments."""
    if not pattern.trains:
        return function

    def step(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            out = function(*args)
            return (out.detach(), *torch.autograd.grad(out, args, out.detach()))

    return step


@dataclass(frozen=True)
class Candidate:
    """A template under a configuration."""

    template: str
    config: Config

    @property
    def name(self) -> str:
        values = dict(self.config.values)
        tile = "x".join(str(value) for name, value in values.items() if name.startswith("BLOCK_"))
        more = "" if values.get("FLATTEN", 1) else " nested"
        return f"{self.template.removeprefix('triton_')} {tile}, {values['WARPS']} warps, {values['STAGES']} stages{more}"

    def contender(self, interpreted: bool) -> Contender:
        return kgen_with(self.template, lambda _: self.config, interpreted)


def configs_of(template: str, pattern: Pattern, options: argparse.Namespace) -> list[Candidate]:
    """A template's configurations for a pattern, the likely fastest first; none where it does not take the pattern."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        return seen[0]

    contender = kgen_with(template, pick, options.device == "cpu")
    torch._dynamo.reset()
    with contender.context():
        contender.make(pattern)(*pattern.make(options.device))
    return [Candidate(template, config) for config in seen[: options.most]]


def measure(pattern: Pattern, options: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    """All contenders on one pattern."""
    torch._dynamo.reset()
    small = pattern.shrunk(options.shrink)
    sets = [small.make(options.device, seed) for seed in range(2)]
    row: dict[str, Any] = {"name": pattern.name, "trains": pattern.trains, "rates": dict(rates), "failed": {}}
    candidates: list[Candidate] = []
    for template in options.templates if CONFIGS in options.contenders and not pattern.trains else ():
        try:
            candidates += configs_of(template, small, options)
        except Exception as cause:
            row["failed"][template] = failure(cause)
    row["configs"] = {one.name: {"template": one.template, **dict(one.config.values)} for one in candidates}
    contenders = {name: CONTENDERS[name] for name in options.contenders if name != CONFIGS}
    contenders |= {one.name: one.contender(options.device == "cpu") for one in candidates}
    wide = [a.detach().float().requires_grad_(a.requires_grad) for a in sets[0]]
    entries = prepared(small, contenders, sets, step_of(small, small.written)(*wide), row["failed"])
    row |= timed(entries, options.seconds, options.device == "cuda")
    del entries, sets
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def prepared(
    pattern: Pattern, contenders: Mapping[str, Contender], sets: Sequence[list[Tensor]], want: Any, failed: dict[str, str]
) -> list[Entry]:
    """The contenders that ran, compiled; why the others did not is noted."""
    entries: list[Entry] = []
    for name, contender in contenders.items():
        entry = Entry(name)
        try:
            prepare(entry, step_of(pattern, contender.make(pattern)), sets, want, contender.context(), not pattern.trains)
        except Exception as cause:
            failed[name] = failure(cause)
            synchronize()
            continue
        if contender.template and not any(contender.template in line for line in entry.chosen):
            failed[name] = f"{contender.template} is not used: {'; '.join(entry.chosen)}"
            continue
        entries.append(entry)
    return entries


def show(row: dict[str, Any], console: Console) -> None:
    """A pattern as soon as it is measured."""
    console.print(f"[bold]{row['name']}[/]", highlight=False)
    for name, one in sorted(row["results"].items(), key=lambda item: item[1]["seconds"]):
        console.print(
            f"    {name:44} {one['seconds'] * 1e6:10.1f} us, error {one['error']:.1e}, {one['compile_s']:.1f} s",
            highlight=False,
        )
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)
    console.print(f"    {summary(row)}", highlight=False)


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """How many times faster than the best peer kgen and the best configuration of each template are."""
    times = {name: one["seconds"] for name, one in row["results"].items()}
    peers = [times[name] for name in PEERS if name in times]
    ours = {name: times[name] for name in times if name not in PEERS and name not in row["configs"]}
    for name, config in row["configs"].items():
        if name in times:
            best = f"best of {config['template']}"
            ours[best] = min(ours.get(best, math.inf), times[name])
    return {name: min(peers) / seconds for name, seconds in ours.items()} if peers else {}


def summary(row: dict[str, Any]) -> str:
    found = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios(row).items())
    return f"times of the best peer over ours: {found or 'nothing ran'}"


def overall(rows: Sequence[dict[str, Any]]) -> str:
    """The geometric means of all patterns that a contender ran."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, ratio in ratios(row).items():
            found.setdefault(name, []).append(math.log(ratio))
    means = (f"{name} {math.exp(sum(logs) / len(logs)):.2f} of {len(logs)}" for name, logs in found.items())
    return f"geometric means: {'  '.join(means)}"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine_facts(), "rows": list(rows)}, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CONTENDERS, CONFIGS]
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), help="patterns")
    parser.add_argument("--quick", action="store_true", help=f"the essential ones, none begun after {QUICK_SECONDS:.0f} s")
    parser.add_argument("--contenders", nargs="+", choices=names, help="all; of a quick run those that compile fast")
    parser.add_argument("--templates", nargs="+", choices=TEMPLATES, default=TEMPLATES, help="whose configurations are timed")
    parser.add_argument("--smoke", action="store_true", help="only whether each configuration is right, on small sizes")
    parser.add_argument("--most", type=int, default=None, help="configurations of each template: 12, of a quick run 4")
    parser.add_argument("--seconds", type=float, default=None, help="of measuring, for each pattern: 3, of a quick run 1")
    parser.add_argument("--budget", type=float, default=None, help="begin no pattern after so many seconds")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide numbers of images and positions by about this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")
    options = parser.parse_args(arguments)
    options.contenders = options.contenders or [n for n in names if not options.quick or n != "kgen-autotune"]
    options.most = options.most or (4 if options.quick else 12)
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    options.budget = options.budget or (QUICK_SECONDS if options.quick else math.inf)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --shrink 32 tries the command out")
    if options.smoke:
        raise SystemExit(conv_smoke.check(options.templates))
    console = Console(width=200)
    started, rows = time.perf_counter(), []
    if options.append and options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    known = {row["name"] for row in rows}
    rates = machine_rates(options.device, 8192 if options.device == "cuda" else 64)
    console.print(", ".join(f"{name} {value:.3g}/s" for name, value in rates.items()), highlight=False)
    names = options.only or [p.name for p in PATTERNS if (p.quick or not options.quick) and p.name not in known]
    with torch.no_grad():
        for name in names:
            if time.perf_counter() - started > options.budget:
                console.print(f"no time is left for {name} and what follows", highlight=False)
                break
            row = measure(BY_NAME[name], options, rates)
            show(row, console)
            rows = [*(old for old in rows if old["name"] != name), row]
            if options.json:
                write(options.json, rows)
    console.print(overall(rows), highlight=False)


if __name__ == "__main__":
    main()
