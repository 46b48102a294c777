"""Norms, softmax, losses, top-k, quantisation, gathers and scatters on a GPU: eager, Inductor and kgen take turns.

python -m bench.gpu_row_patterns --quick --json out/rows.json              # the essential patterns within eight minutes
python -m bench.gpu_row_patterns --json out/rows.json --append             # all; goes on where an earlier run stopped
python -m bench.gpu_row_patterns --only "train rms_norm, 4k" --contenders eager max-autotune kgen
python -m bench.gpu_row_patterns --only "top 8 of 128k" --contenders eager kgen kgen-top-k
python -m bench.gpu_row_patterns --device cpu --shrink 64 --seconds 1      # on a CPU, with fewer rows

`share` is how near a contender comes to the copy rate of this run: the fewest bytes that a pattern must move, over its
time. A pattern that trains is timed with its backward pass. `kgen-top-k` is kgen with kernels of its own for `topk`. Errors are
relative, by norms, against eager; random patterns and positions of equal elements have none. A contender whose results are
larger than a graph should keep is called and not recorded. `--smoke` times nothing: all patterns on small sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from bench.contenders import copy_of, failure
from bench.gpu_matmuls import quiet
from bench.gpu_runs import Runner, add_arguments, parsed, prepared, require_gpu, run
from bench.gpu_timing import Function, relative_error, timed
from bench.measure import geomean
from bench.patterns import outputs_of
from bench.row_patterns import BY_NAME, Pattern, trained

# Inputs and results of more bytes are not recorded in graphs: each call in one keeps its own.
RECORDED = 2 << 30
# Bytes of all sets of inputs: several times an L2 cache, and never more than a few copies of what is large anyway.
COLD = 256 << 20
SMOKE_SHRINK = 256
# Of results in 16 bits, by norms.
WRONG = 3e-2
PEERS = ("eager", "inductor", "max-autotune")


def compiled(**how: Any) -> Callable[[Pattern], Function]:
    def make(pattern: Pattern) -> Function:
        return torch.compile(_plain(pattern.written), fullgraph=True, **how)

    return make


def _plain(function: Function) -> Function:
    """Its own code object, for each contender."""
    if isinstance(function, partial):
        return partial(copy_of(function.func), *function.args, **function.keywords)
    return copy_of(function)


CONTENDERS: dict[str, tuple[Callable[[Pattern], Function], Callable[[], AbstractContextManager[Any]]]] = {
    "eager": (lambda pattern: pattern.written, nullcontext),
    "eager-again": (lambda pattern: pattern.written, nullcontext),
    "inductor": (compiled(), quiet),
    "max-autotune": (compiled(mode="max-autotune-no-cudagraphs"), quiet),
    "kgen": (compiled(backend="kgen"), nullcontext),
    "kgen-top-k": (compiled(backend="kgen", options={"top_k": "kernels"}), nullcontext),
}
QUICK = ("eager", "inductor", "kgen")


def contender(name: str, pattern: Pattern) -> Function | None:
    """The function to time; None where the contender is the same as another one."""
    if name == "kgen-top-k" and not pattern.name.startswith("top"):
        return None
    function = CONTENDERS[name][0](pattern)
    return trained(function, pattern) if pattern.trains else function


def measure(pattern: Pattern, options: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, Any]:
    torch._dynamo.reset()
    small = pattern.shrunk(options.shrink)
    first = small.make(options.device)
    reference = trained(small.written, small) if small.trains else small.written
    want = outputs_of(reference(*first))
    moved, footprint = small.fewest_bytes(first, want), sum(t.nbytes for t in (*first, *want))
    sets = [first, *(small.make(options.device, seed) for seed in range(1, max(2, min(4, COLD // max(1, footprint)))))]
    row: dict[str, Any] = {
        "name": pattern.name, "sizes": [list(t.shape) for t in first], "bytes": moved, "copy": rates["copy"], "failed": {},
    }  # fmt: skip
    runners = {name: Runner(partial(contender, name, small), CONTENDERS[name][1]()) for name in options.contenders}
    entries = prepared(runners, sets, want if small.compared is None and not small.random else None, row["failed"],
                       footprint <= RECORDED)  # fmt: skip
    del want
    row |= timed(entries, options.seconds, options.device == "cuda")
    if options.device == "cuda":
        torch.cuda.empty_cache()
    return row


def share(row: Mapping[str, Any], seconds: float) -> float:
    return float(row["bytes"] / row["copy"] / seconds)


def show(row: dict[str, Any], console: Console) -> None:
    """A pattern as soon as it is measured."""
    console.print(f"[bold]{row['name']}[/] {row['bytes'] / 1e6:.0f} MB", highlight=False)
    for name, one in sorted(row["results"].items(), key=lambda item: item[1]["seconds"]):
        error = "" if one["error"] is None else f", error {one['error']:.1e}"
        kernels = f", {len(one['chosen'])} steps" if one["chosen"] else ""
        console.print(
            f"    {name:14} {one['seconds'] * 1e6:10.1f} us, share {share(row, one['seconds']):.2f}{error}, "
            f"{one['compile_s']:.1f} s{kernels}", highlight=False,
        )  # fmt: skip
    for name, cause in row["failed"].items():
        console.print(f"    {name} failed: {cause}", highlight=False, markup=False)


def gain(row: Mapping[str, Any], ours: str = "kgen") -> float | None:
    """The best peer's time over ours."""
    times = {name: one["seconds"] for name, one in row["results"].items()}
    peers = [times[name] for name in PEERS if name in times]
    return min(peers) / times[ours] if peers and ours in times else None


def sum_up(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    gains = {row["name"]: found for row in rows if (found := gain(row)) is not None}
    if gains:
        worst = min(gains, key=lambda name: gains[name])
        console.print(
            f"{len(gains)} patterns, best peer over kgen: geomean {geomean(gains.values()):.2f}, "
            f"lowest {gains[worst]:.2f} ({worst})", highlight=False,
        )  # fmt: skip


def smoke(options: argparse.Namespace, console: Console) -> int:
    """How many patterns are wrong on small sizes; kgen's top-k kernels are on."""
    wrong = 0
    for name in options.only or BY_NAME:
        pattern = BY_NAME[name].shrunk(SMOKE_SHRINK)
        torch._dynamo.reset()
        try:
            error = _error(pattern, pattern.make(options.device))
        except Exception as cause:
            console.print(f"{name}: {failure(cause)}", highlight=False, markup=False)
            wrong += 1
            continue
        wrong += error > WRONG
        console.print(f"{name}: error {error:.1e}", highlight=False)
    console.print(f"{wrong} wrong")
    return wrong


def _error(pattern: Pattern, args: list[Tensor]) -> float:
    """Against eager, or against float64 where eager adds up in 16 bits and is the worse of both."""
    function = contender("kgen-top-k" if pattern.name.startswith("top") else "kgen", pattern)
    assert function is not None
    reference = trained(pattern.written, pattern) if pattern.trains else pattern.written
    got = outputs_of(function(*args))[: pattern.compared]
    if pattern.random:
        return 0.0
    wide = [a.double() if a.is_floating_point() else a for a in args]
    wanted = (outputs_of(reference(*given))[: pattern.compared] for given in (args, wide))
    return min(relative_error(got, want) for want in wanted)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, list(BY_NAME), list(CONTENDERS), "rows")
    options = parsed(parser, arguments)
    options.contenders = options.contenders or (QUICK if options.quick else list(CONTENDERS))
    require_gpu(options)
    console = Console(width=160)
    if options.smoke:
        raise SystemExit(smoke(options, console))
    sum_up(run(options, BY_NAME, measure, show), console)


if __name__ == "__main__":
    main()
