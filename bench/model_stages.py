"""CPU seconds of each stage on the models of `tests/models`, and how many kernels a compiler has to build.

    python -m bench.model_stages gpt2 t5 --train
    python -m bench.model_stages llama --layers 4 --device cpu

Tensors have no data and nothing is built, so a GPU need not exist: it is an H200. `--layers` cuts every list of equal blocks,
which shows what grows with them. `kernels` are the GPU kernels that differ, among so many `launches`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from bench.measurements import Entry, write
from kgen import backend
from kgen.capture import equal_layers
from tests.models.catalogue import MODELS, SIZES
from tests.models.check import outputs
from tools.replay_adapter import door, rendering, settle
from tools.replay_corpus import Case
from tools.replay_graphs import call

STAGES = ("capture", "reinplace", "lower", "schedule", "render")
COLUMNS = (*STAGES, "nodes", "launches", "kernels")


@dataclass
class Clock:
    """What the stages of one model take and make."""

    found: Counter[str] = field(default_factory=Counter)
    kernels: set[Any] = field(default_factory=set)

    def timed(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.process_time()
            made = stage(*args)
            self.found[stage.__name__] += time.process_time() - started
            self._count(stage.__name__, made)
            return made

        run.__name__ = stage.__name__
        return run

    def _count(self, stage: str, made: Any) -> None:
        if stage == "lower":
            self.found["nodes"] += len(made[1].nodes)
        if stage == "render":
            launches = [one.launch for one in made[2].calls.values() if one.launch is not None]
            self.found["launches"] += len(launches)
            self.kernels.update(one.identity for one in launches)


def cut(module: nn.Module, layers: int) -> None:
    """Leaves so many of each list of equal blocks."""
    for one in module.modules():
        if isinstance(one, nn.ModuleList | nn.Sequential) and len({type(block) for block in one}) == 1:
            for k in reversed(range(layers, len(one))):
                del one[k]


@dataclass(frozen=True)
class Setting:
    """How models are compiled; `layers` of each list of equal blocks, 0 for all."""

    device: str = "gpu"
    size: str = "base"
    layers: int = 0
    train: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "gpu" else torch.float32


def build(name: str, how: Setting) -> tuple[Callable[..., Any], list[Any]]:
    """The model as a function of its arguments; made in its type, for tensors without data cannot be converted."""
    dtype = how.dtype
    torch.set_default_dtype(dtype)
    try:
        # the first draws until no number is too large, of tensors without data for ever; numbers of the second become floats
        with (
            patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *_, **__: tensor),
            patch.object(torch, "linspace", _with_data(torch.linspace)),
            patch.object(torch.Tensor, "tolist", _with_data(torch.Tensor.tolist)),
            patch.object(torch.Tensor, "split", _with_data(torch.Tensor.split)),
        ):
            model = MODELS[name].module(how.size).train(how.train).requires_grad_(how.train)
    finally:
        torch.set_default_dtype(torch.float32)
    if how.layers:
        cut(model, how.layers)
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in MODELS[name].inputs(how.size).items()}
    return lambda *values: [t for _, t in outputs(model(**dict(zip(given, values, strict=True))))], list(given.values())


def _with_data(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return make(*args, **kwargs)

    return made


def measure(name: str, how: Setting) -> dict[str, float]:
    """Seconds by stage, and counts."""
    clock = Clock()
    case = Case(name, partial(build, name, how), trains=how.train)
    settle()
    on_gpu = how.device == "gpu"  # the tensors are a CPU's
    with (
        patch.object(backend, "STAGES", tuple(map(clock.timed, backend.STAGES))),
        patch.object(equal_layers.torch_adapter, "uses_cuda", lambda _: on_gpu),
    ):
        started = time.process_time()
        call(case, how.device, door({}), partial(rendering, lambda _: None))
        whole = time.process_time() - started
    clock.found["capture"] = whole - sum(clock.found[stage] for stage in STAGES)
    return {column: clock.found[column] for column in COLUMNS[:-1]} | {"kernels": len(clock.kernels)}


def print_table(rows: dict[str, dict[str, float]]) -> None:
    table = Table(title="CPU seconds of stages; building the model counts as capture")
    for column in ("model", *COLUMNS):
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.2f}" if column in STAGES else str(int(row[column])) for column in COLUMNS))
    Console(width=None if sys.stdout.isatty() else 128).print(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--device", choices=("cpu", "gpu"), default="gpu")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--layers", type=int, default=0, help="of each list of equal blocks; 0: all")
    parser.add_argument("--train", action="store_true", help="forward and backward, instead of inference")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    how = Setting(options.device, options.size, options.layers, options.train)
    rows = {name: measure(name, how) for name in options.models}
    print_table(rows)
    if options.json:
        write(options.json, "model_stages", [Entry(name, {}, {}, dict(row)) for name, row in rows.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
