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
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench import conv_smoke
from bench.contenders import copy_of, failure
from bench.convs import BY_NAME, Pattern
from bench.gpu_matmuls import quiet, scratch
from bench.gpu_runs import Runner, add_arguments, parsed, prepared, require_gpu, run
from bench.gpu_timing import timed
from kgen.only import Pick, only
from kgen.templates.contract import Config

Function = Callable[..., Any]
TEMPLATES = ("triton_conv", "triton_conv_direct", "triton_conv_depthwise", "triton_conv_weight", "triton_conv_warp_specialized")
CONFIGS = "configs"


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


def _step(contender: Contender, pattern: Pattern) -> Function:
    return step_of(pattern, contender.make(pattern))


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
        if box := [str(value) for name, value in reversed(values.items()) if name.startswith("BOX_") and value > 1]:
            more += f", box {'x'.join(box)}, {values['EPILOGUE_SUBTILES']} subtiles" + (
                ", cooperative" if values["COOPERATIVE"] else ""
            )
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
    runners = {name: Runner(partial(_step, one, small), one.context(), one.template) for name, one in contenders.items()}
    entries = prepared(runners, sets, step_of(small, small.written)(*wide), row["failed"], not small.trains)
    row |= timed(entries, options.seconds, options.device == "cuda")
    del entries, sets
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CONTENDERS, CONFIGS]
    add_arguments(parser, list(BY_NAME), names, "numbers of images and positions")
    parser.add_argument("--templates", nargs="+", choices=TEMPLATES, default=TEMPLATES, help="whose configurations are timed")
    parser.add_argument("--most", type=int, default=None, help="configurations of each template: 12, of a quick run 4")
    options = parsed(parser, arguments)
    options.contenders = options.contenders or [n for n in names if not options.quick or n != "kgen-autotune"]
    options.most = options.most or (4 if options.quick else 12)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    require_gpu(options)
    if options.smoke:
        raise SystemExit(conv_smoke.check(options.templates))
    rows = run(options, BY_NAME, measure, show)
    Console(width=200).print(overall(rows), highlight=False)


if __name__ == "__main__":
    main()
