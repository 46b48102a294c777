"""Attention on a GPU: eager, the library by back end, compiled FlexAttention, Inductor, kgen, and kgen with each configuration.

python -m bench.gpu_attention --quick --json out/attention.json           # the essential patterns within eight minutes
python -m bench.gpu_attention --json out/attention.json --append          # all; goes on where an earlier run stopped
python -m bench.gpu_attention --only "causal 128" --contenders cudnn configs --seconds 2
python -m bench.gpu_attention --templates triton_attention triton_attention_warp_specialized --only "causal 64"
python -m bench.gpu_attention --smoke --templates triton_attention_warp_specialized    # is each configuration right?
python -m bench.gpu_attention --device cpu --shrink 64 --quick --contenders eager library configs    # tries the command out

All contenders of a pattern take turns (`bench/gpu_timing.py`). `configs` stands for each configuration on offer of the
`--templates`, `--most` limits them to the first of each by the estimate. Errors are relative, by norms, against eager in
float32; before it is timed a template is compared with float64 on short lengths. `--smoke` times nothing
(`bench/attention_smoke.py`).
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
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import attention_smoke
from bench.attention import BY_NAME, PATTERNS, Pattern
from bench.contenders import copy_of, failure
from bench.gpu_matmuls import quiet, scratch
from bench.gpu_timing import Entry, machine_rates, prepare, relative_error, timed
from bench.measure import machine_facts, synchronize
from kgen.only import Pick, only
from kgen.templates.contract import Config

Function = Callable[..., Any]
TEMPLATES = ("triton_attention", "triton_attention_warp_specialized")
# Patterns whose scores are larger are called and not recorded: each graph would keep memory for all of them.
RECORDED = 512 << 20
# Lengths are divided by so much for the comparison with float64.
SHORT = 16
QUICK_SECONDS = 450.0


@dataclass(frozen=True)
class Contender:
    """`make` gives the function to time, None where there is none for a pattern; `template` is that which has to be used."""

    make: Callable[[Pattern, Sequence[Tensor]], Function | None]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    template: str = ""


def library(*backends: SDPBackend) -> Contender:
    """The library's call by one of its back ends, or by that which it chooses."""
    context = partial(sdpa_kernel, list(backends)) if backends else nullcontext

    def make(pattern: Pattern, args: Sequence[Tensor]) -> Function | None:
        function = pattern.library
        if function is None:
            return None

        def call(*args: Tensor) -> Tensor:
            with context():
                return function(*args)

        return call

    return Contender(make)


def compiled(**how: Any) -> Contender:
    return Contender(lambda p, args: torch.compile(copy_of(p.written), fullgraph=True, **how), quiet)


def kgen_with(template: str = "", pick: Pick | None = None, interpreted: bool = False, **options: Any) -> Contender:
    """kgen, which knows nothing that others have measured, or kgen with one template alone under a configuration."""
    name = "measured" if options else "nothing"
    known = {"cache": False, "gpu_interpreter": interpreted, "tuning_file": f"{scratch()}/attention_{name}.json", **options}
    return Contender(
        lambda p, args: torch.compile(copy_of(p.written), backend="kgen", fullgraph=True, options=known),
        nullcontext if pick is None else partial(only, template, pick), template,
    )  # fmt: skip


CONTENDERS: dict[str, Contender] = {
    "eager": Contender(lambda p, args: p.written),
    "library": library(),
    "library-again": library(),
    "cudnn": library(SDPBackend.CUDNN_ATTENTION),
    "flash": library(SDPBackend.FLASH_ATTENTION),
    "flex": Contender(lambda p, args: None if p.flex is None else p.flex(args), quiet),
    "inductor": compiled(),
    "max-autotune": compiled(mode="max-autotune-no-cudagraphs"),
    "kgen": kgen_with(),
    "kgen-autotune": kgen_with(mode="max-autotune-no-cudagraphs"),
}
CONFIGS = "configs"
QUICK = ("library", "library-again", "cudnn", "flash", "flex", "inductor", "kgen", CONFIGS)


@dataclass(frozen=True)
class Candidate:
    """A template under a configuration."""

    template: str
    config: Config

    @property
    def name(self) -> str:
        values = dict(self.config.values)
        tile = "x".join(str(values[name]) for name in ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES"))
        more = [
            name.lower() if value is True else f"{name.lower()}{value}" for name, value in values.items() if _tells(name, value)
        ]
        return " ".join(["" if self.template == TEMPLATES[0] else "ws", tile, *more]).strip()

    def contender(self, interpreted: bool) -> Contender:
        return kgen_with(self.template, lambda _: self.config, interpreted)


def _tells(name: str, value: object) -> bool:
    """Whether a knob's value is part of a candidate's name."""
    return value is not False and not name.startswith("BLOCK_") and name not in ("GROUP", "WARPS", "STAGES")


def configs_of(template: str, pattern: Pattern, args: Sequence[Tensor], options: argparse.Namespace) -> list[Candidate]:
    """A template's configurations for a pattern, the likely fastest first; none where it does not take the pattern."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        seen[:] = found
        return seen[0]

    contender = kgen_with(template, pick, options.device == "cpu")
    with contender.context():
        call = contender.make(pattern, args)
        assert call is not None
        call(*args)
    return [Candidate(template, config) for config in seen[: options.most]]


def contenders_of(candidates: Sequence[Candidate], options: argparse.Namespace) -> dict[str, Contender]:
    found = {name: CONTENDERS[name] for name in options.contenders if name != CONFIGS}
    return found | {one.name: one.contender(options.device == "cpu") for one in candidates}


def wide(args: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [a.to(dtype) if a.is_floating_point() else a for a in args]


def check(template: str, pattern: Pattern, options: argparse.Namespace) -> float:
    """A template's relative error on short lengths, against float64."""
    args = pattern.shrunk(SHORT).make(options.device)
    contender = kgen_with(template, lambda configs: configs[0], options.device == "cpu")
    with contender.context():
        call = contender.make(pattern, args)
        assert call is not None
        got = call(*args)
    return relative_error(got.double(), pattern.written(*wide(args, torch.float64)))


def measure(pattern: Pattern, options: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    """All contenders on one pattern."""
    torch._dynamo.reset()
    small = pattern.shrunk(options.shrink)
    sets = [small.make(options.device, seed) for seed in range(2)]
    row: dict[str, Any] = {
        "name": pattern.name, "sizes": pattern.sizes, "flops": pattern.flops, "score_bytes": pattern.score_bytes,
        "rates": dict(rates), "failed": {},
    }  # fmt: skip
    candidates: list[Candidate] = []
    for template in options.templates if CONFIGS in options.contenders else ():
        try:
            row.setdefault("error_short", {})[template] = check(template, pattern, options) if options.check else None
            candidates += configs_of(template, small, sets[0], options)
        except Exception as cause:
            row["failed"][template] = failure(cause)
    row["configs"] = {one.name: {"template": one.template, **dict(one.config.values)} for one in candidates}
    want = small.written(*wide(sets[0], torch.float32))
    entries = prepared(small, contenders_of(candidates, options), sets, want, row["failed"])
    del want
    row |= timed(entries, options.seconds, options.device == "cuda")
    del entries, sets
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def prepared(
    pattern: Pattern, contenders: Mapping[str, Contender], sets: Sequence[list[Tensor]], want: Tensor, failed: dict[str, str]
) -> list[Entry]:
    """The contenders that ran, compiled; why the others did not is noted."""
    entries: list[Entry] = []
    for name, contender in contenders.items():
        entry = Entry(name)
        try:
            function = contender.make(pattern, sets[0])
            if function is None:
                continue
            prepare(entry, function, sets, want, contender.context(), pattern.score_bytes <= RECORDED)
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
    short = [error for error in row.get("error_short", {}).values() if error is not None]
    note = f", against float64 {' '.join(f'{error:.1e}' for error in short)}" if short else ""
    console.print(f"[bold]{row['name']}[/] {'x'.join(map(str, row['sizes']))}{note}", highlight=False)
    for name, one in sorted(row["results"].items(), key=lambda item: item[1]["seconds"]):
        rate = row["flops"] / one["seconds"] / 1e12
        peak = "" if one["peak_bytes"] is None else f", peak {one['peak_bytes'] / 2**20:.0f} MiB"
        console.print(
            f"    {name:36} {one['seconds'] * 1e6:10.1f} us {rate:7.1f} TFLOPS, error {one['error']:.1e}, "
            f"{one['compile_s']:.1f} s{peak}", highlight=False,
        )  # fmt: skip
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)
    console.print(f"    {summary(row)}", highlight=False)


def summary(row: dict[str, Any]) -> str:
    """The best configuration against each peer, and how the estimate's favourite does."""
    times = {name: one["seconds"] for name, one in row["results"].items()}
    ours = {name: times[name] for name in row.get("configs", {}) if name in times}
    if not ours:
        return "no configuration ran"
    best = min(ours, key=lambda name: ours[name])
    peers = "  ".join(f"{name} {seconds / ours[best]:.2f}" for name, seconds in times.items() if name not in ours)
    first = next(iter(ours))
    return f"best {best}; peers' times over it: {peers}; the estimate's choice {first} takes {ours[first] / ours[best]:.2f}"


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine_facts(), "rows": list(rows)}, indent=1))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*CONTENDERS, CONFIGS]
    parser.add_argument("--only", nargs="+", choices=list(BY_NAME), help="patterns")
    parser.add_argument("--quick", action="store_true", help=f"the essential ones, none begun after {QUICK_SECONDS:.0f} s")
    parser.add_argument("--contenders", nargs="+", choices=names, help="all; of a quick run those that compile fast")
    parser.add_argument(
        "--templates", nargs="+", choices=TEMPLATES, default=TEMPLATES[:1], help="whose configurations are timed"
    )
    parser.add_argument("--smoke", action="store_true", help="only whether each configuration is right, on short lengths")
    parser.add_argument("--most", type=int, default=None, help="configurations of a pattern; all, of a quick run 4")
    parser.add_argument("--seconds", type=float, default=None, help="of measuring, for each pattern: 3, of a quick run 1")
    parser.add_argument("--budget", type=float, default=None, help="begin no pattern after so many seconds")
    parser.add_argument("--no-check", dest="check", action="store_false", help="no comparison with float64")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shrink", type=int, default=1, help="divide lengths by about this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--append", action="store_true", help="keep what the JSON has, and leave out what it has already")
    options = parser.parse_args(arguments)
    options.contenders = options.contenders or (QUICK if options.quick else names)
    options.most = options.most or (4 if options.quick else None)
    options.seconds = options.seconds or (1.0 if options.quick else 3.0)
    options.budget = options.budget or (QUICK_SECONDS if options.quick else math.inf)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU here; --device cpu --shrink 64 tries the command out")
    if options.smoke:
        raise SystemExit(attention_smoke.check(options.templates))
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


if __name__ == "__main__":
    main()
