"""Attention on a GPU: eager, the library by back end, compiled FlexAttention, Inductor, kgen, and kgen with each configuration.

python -m bench.gpu_attention --quick --json out/attention.json           # the essential patterns within eight minutes
python -m bench.gpu_attention --json out/attention.json --append          # all; goes on where an earlier run stopped
python -m bench.gpu_attention --only "causal 128" --contenders cudnn configs --seconds 2
python -m bench.gpu_attention --templates triton_attention triton_attention_warp_specialized --only "causal 64"
python -m bench.gpu_attention --smoke --templates triton_attention_warp_specialized    # is each configuration right?
python -m bench.gpu_attention --backward --smoke && python -m bench.gpu_attention --backward --json out/attention_backward.json
python -m bench.gpu_attention --device cpu --shrink 64 --quick --contenders eager library configs    # tries the command out

All contenders of a pattern take turns (`bench/gpu_timing.py`). `configs` stands for each configuration on offer of the
`--templates`, `--most` limits them to the first of each by the estimate. Errors are relative, by norms, against eager in
float32; before it is timed a template is compared with float64 on short lengths. `--smoke` times nothing
(`bench/attention_smoke.py`). `--backward` is for the templates of gradients (`bench/attention_backward.py`): each contender
makes its result and all gradients, and kgen computes scores again; configurations are those of the gradients' templates.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import attention_backward, attention_smoke
from bench.attention import BY_NAME, Pattern
from bench.attention_smoke import is_of
from bench.contenders import copy_of, failure
from bench.gpu_matmuls import quiet, scratch
from bench.gpu_runs import Runner, add_arguments, parsed, prepared, require_gpu, run
from bench.gpu_timing import relative_error, timed
from kgen.only import Pick, only
from kgen.templates.contract import Config

Function = Callable[..., Any]
TEMPLATES = ("triton_attention", "triton_attention_warp_specialized")
# Patterns whose scores are larger are called and not recorded: each graph would keep memory for all of them.
RECORDED = 512 << 20
# Lengths are divided by so much for the comparison with float64.
SHORT = 16
# Of backward passes: only scores that are larger than their operands are computed again.
TRAINED_SHORT = 4


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


# Their templates for forward and backward passes, and what kgen is told.
FORWARD = TEMPLATES[0]
RECOMPUTED = {"recompute_scores": "on"}


def trained_with(candidates: Sequence[str], pick: Pick, interpreted: bool) -> Contender:
    """kgen with the templates of a training step alone; `pick` chooses for all of them."""
    how = {"cache": False, "gpu_interpreter": interpreted, **RECOMPUTED}
    return Contender(
        lambda p, args: attention_backward.compiled(p, backend="kgen", options=how),
        partial(only, FORWARD, pick, also=attention_backward.TEMPLATES), candidates[0],
    )  # fmt: skip


@dataclass(frozen=True)
class TrainedCandidate(Candidate):
    """A template of gradients under a configuration; other templates get the first ones of theirs."""

    @property
    def name(self) -> str:
        return f"{self.template.removeprefix('triton_attention_')} {super().name.removeprefix('ws ')}"

    def contender(self, interpreted: bool) -> Contender:
        def pick(found: Sequence[Config]) -> Config:
            return self.config if self.config in found and is_of(self.template, found[0]) else found[0]

        return trained_with([self.template], pick, interpreted)


def trained_configs_of(template: str, pattern: Pattern, args: Sequence[Tensor], options: argparse.Namespace) -> list[Candidate]:
    """As `configs_of`."""
    seen: list[Config] = []

    def pick(found: Sequence[Config]) -> Config:
        if is_of(template, found[0]):
            seen[:] = found
        return found[0]

    contender = trained_with([template], pick, options.device == "cpu")
    with contender.context():
        call = contender.make(pattern, args)
        assert call is not None
        call(*args)
    return [TrainedCandidate(template, config) for config in seen[: options.most]]


def training_contenders() -> dict[str, Contender]:
    """Of forward and backward passes."""

    def by(**how: Any) -> Contender:
        return Contender(lambda p, args: attention_backward.compiled(p, **how), quiet)

    known = {"cache": False, **RECOMPUTED}
    return {
        **{name: CONTENDERS[name] for name in ("library", "library-again", "cudnn", "flash", "flex")},
        "eager": Contender(lambda p, args: attention_backward.trained(p.written)),
        "inductor": by(),
        "max-autotune": by(mode="max-autotune-no-cudagraphs"),
        "kgen": by(backend="kgen", options={"cache": False}),
        "kgen-recomputing": by(backend="kgen", options=known),
    }


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
    known = training_contenders() if options.backward else CONTENDERS
    found = {name: known[name] for name in options.contenders if name in known}
    return found | {one.name: one.contender(options.device == "cpu") for one in candidates}


def wide(args: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [a.to(dtype) if a.is_floating_point() else a for a in args]


def check(template: str, pattern: Pattern, options: argparse.Namespace) -> float:
    """A template's relative error on short lengths, against float64."""
    args = pattern.shrunk(TRAINED_SHORT if options.backward else SHORT).make(options.device)
    make = trained_with([template], first, options.device == "cpu") if options.backward else None
    contender = make or kgen_with(template, first, options.device == "cpu")
    with contender.context():
        call = contender.make(pattern, args)
        assert call is not None
        got = call(*args)
    return relative_error(got, reference(pattern, options)(*wide(args, torch.float64)))


def first(configs: Sequence[Config]) -> Config:
    return configs[0]


def reference(pattern: Pattern, options: argparse.Namespace) -> Function:
    """What all contenders are compared with."""
    return attention_backward.trained(pattern.written) if options.backward else pattern.written


def measure(pattern: Pattern, options: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    """All contenders on one pattern, compiled for its sizes: those of the check must not make them symbols for all others."""
    torch._dynamo.reset()
    small = pattern.shrunk(options.shrink)
    small = attention_backward.training(small) if options.backward else small
    sets = [small.make(options.device, seed) for seed in range(2)]
    row: dict[str, Any] = {
        "name": pattern.name, "sizes": pattern.sizes, "flops": pattern.flops, "score_bytes": pattern.score_bytes,
        "rates": dict(rates), "failed": {},
    }  # fmt: skip
    candidates: list[Candidate] = []
    for template in options.templates if CONFIGS in options.contenders else ():
        try:
            row.setdefault("error_short", {})[template] = check(template, pattern, options) if options.check else None
            candidates += (trained_configs_of if options.backward else configs_of)(template, small, sets[0], options)
        except Exception as cause:
            row["failed"][template] = failure(cause)
    row["configs"] = {one.name: {"template": one.template, **dict(one.config.values)} for one in candidates}
    want = reference(small, options)(*wide(sets[0], torch.float32))
    runners = {
        name: Runner(partial(one.make, small, sets[0]), one.context(), one.template)
        for name, one in contenders_of(candidates, options).items()
    }
    entries = prepared(runners, sets, want, row["failed"], small.score_bytes <= RECORDED)
    del want
    row |= timed(entries, options.seconds, options.device == "cuda")
    del entries, sets
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


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


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*dict.fromkeys((*CONTENDERS, *training_contenders())), CONFIGS]
    templates = (*TEMPLATES, *attention_backward.KINDS)
    add_arguments(parser, [*BY_NAME, *attention_backward.BY_NAME], names, "lengths")
    parser.add_argument("--backward", action="store_true", help="forward and backward passes, and templates of gradients")
    parser.add_argument("--templates", nargs="+", choices=templates, help="whose configurations are timed")
    parser.add_argument("--most", type=int, default=None, help="configurations of a pattern; all, of a quick run 4")
    parser.add_argument("--no-check", dest="check", action="store_false", help="no comparison with float64")
    options = parsed(parser, arguments)
    options.templates = options.templates or (attention_backward.TEMPLATES if options.backward else TEMPLATES[:1])
    options.contenders = options.contenders or (QUICK if options.quick else names)
    options.most = options.most or (4 if options.quick else None)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    require_gpu(options)
    if options.smoke:
        raise SystemExit(attention_smoke.check(options.templates))
    patterns = attention_backward.BY_NAME if options.backward else BY_NAME
    run(options, patterns, measure, show)


if __name__ == "__main__":
    main()
