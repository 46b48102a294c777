"""What a call costs beside the work: microseconds above an AOT compiler that does nothing, for one tiny kernel and for ten.

python -m bench.host_overhead --json out.json
python -m bench.host_overhead --device cuda --contenders inductor kgen inductor-graphs kgen-graphs

`-graphs` are the mode `reduce-overhead`, on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from bench.contenders import failure
from bench.measure import as_json, interleave
from bench.measurements import write


def one(x: Tensor) -> Tensor:
    return x + 1


def ten(*xs: Tensor) -> list[Tensor]:
    """Ten loops that share nothing, not even a size."""
    return [x * 2 + 1 for x in xs]


def in_a_row(x: Tensor, steps: int) -> Tensor:
    """Steps of which each needs all of the one before."""
    for _ in range(steps):
        x = x - x.flip(0).cumsum(0)
    return x


def four_in_a_row(x: Tensor) -> Tensor:
    return in_a_row(x, 4)


def ten_in_a_row(x: Tensor) -> Tensor:
    return in_a_row(x, 10)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "one kernel": (one, (torch.randn(8),)),
    "ten kernels": (ten, tuple(torch.randn(8 + i) for i in range(10))),
    "four in a row": (four_in_a_row, (torch.randn(8),)),
    "ten in a row": (ten_in_a_row, (torch.randn(8),)),
}


def nothing(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The floor: guards and AOTAutograd's wrappers, and outputs made beforehand."""
    (results,) = (n.args[0] for n in gm.graph.nodes if n.op == "output")
    outputs = [torch.empty(r.meta["val"].shape, dtype=r.meta["val"].dtype, device=r.meta["val"].device) for r in results]  # type: ignore[union-attr]
    return make_boxed_func(lambda *args: outputs)


FLOOR = "floor"
CONTENDERS: dict[str, dict[str, Any]] = {
    FLOOR: {"backend": aot_autograd(fw_compiler=nothing)},
    "inductor": {"backend": "inductor"},
    "kgen": {"backend": "kgen"},
    "inductor-graphs": {"backend": "inductor", "mode": "reduce-overhead"},
    "kgen-graphs": {"backend": "kgen", "mode": "reduce-overhead"},
}


def measure_case(name: str, options: argparse.Namespace) -> dict[str, Any]:
    fn, inputs = CASES[name]
    inputs = tuple(x.to(options.device) for x in inputs)
    torch._dynamo.reset()
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: fn(*inputs)}
    row: dict[str, Any] = {"name": name, "failed": {}}
    for contender in (FLOOR, *options.contenders):
        compiled = torch.compile(_fresh(fn), fullgraph=True, **CONTENDERS[contender])
        try:
            compiled(*inputs)
        except Exception as cause:
            row["failed"][contender] = failure(cause)
            continue
        calls[contender] = lambda compiled=compiled: compiled(*inputs)
    row["times"] = as_json(interleave(calls, seconds=options.seconds, sample=5e-3))
    floor = row["times"][FLOOR]["median"]
    row["above"] = {c: row["times"][c]["median"] - floor for c in options.contenders if c in row["times"]}
    return row


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Dynamo keeps compiled code by code object; contenders must not find each other's."""
    kind = type(fn)
    return kind(fn.__code__.replace(), fn.__globals__)  # type: ignore[attr-defined, call-arg]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS][1:], default=["inductor", "kgen"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for one row, at least")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = [measure_case(name, options) for name in CASES]
    table = Table(title="Microseconds a call; in brackets above the floor")
    for column in ("case", "eager", FLOOR, *options.contenders):
        table.add_column(column, justify="right")
    for row in rows:
        times = row["times"]
        plain = [f"{times[name]['median'] * 1e6:.1f}" for name in ("eager", FLOOR)]
        above = [
            f"{times[c]['median'] * 1e6:.1f} ({row['above'][c] * 1e6:.1f})" if c in times else "failed"
            for c in options.contenders
        ]
        table.add_row(row["name"], *plain, *above)
    console = Console(width=None if sys.stdout.isatty() else 128)
    console.print(table)
    for row in rows:
        for name, why in row["failed"].items():
            console.print(f"{name} failed on {row['name']}: {why}", highlight=False, markup=False)
    if options.json:
        write(options.json, "host_overhead", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
