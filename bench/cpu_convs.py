"""Convolutions with fused work on a CPU: eager, Inductor, kgen by default and with max-autotune.

python -m bench.cpu_convs --cpu-time --json out.json
python -m bench.cpu_convs --only depthwise3 depthwise7 --dtype float32 --contenders eager kgen --seconds 1

All contenders of a pattern take turns. `forced` leaves every convolution that a direct template takes to it, also where its
estimate says nothing. Images and weights are channels-last but for patterns that end in `_rows`. `--cpu-time` measures what one
thread does, for a machine that others use.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from bench.contenders import copy_of
from bench.cpu_runs import compared, measured, options_of, show_geomean, show_row
from kgen.only import only

Function = Callable[..., Tensor]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CONTENDERS = ("eager", "inductor", "kgen", "max-autotune", "forced")
PEERS = ("eager", "inductor")


@dataclass(frozen=True)
class Pattern:
    """relu(scale * conv(x) + shift), or what `after` makes of the convolution; lengths are those of an image's dimensions."""

    batch: int
    channels: int
    lengths: tuple[int, ...]
    made: int
    taps: int
    stride: int = 1
    padding: int | None = None
    groups: int = 1
    rows: bool = False
    after: Function | None = None

    @property
    def function(self) -> Function:
        call = (F.conv1d, F.conv2d, F.conv3d)[len(self.lengths) - 1]
        padding = self.taps // 2 if self.padding is None else self.padding
        how = {"stride": self.stride, "padding": padding, "groups": self.groups}
        after = self.after or _normalised

        def run(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return after(call(x, w, **how), scale, shift)

        return run

    @property
    def template(self) -> str:
        return "cpp_conv_contiguous" if self.rows or len(self.lengths) == 1 else "cpp_conv_direct"

    def args(self, dtype: torch.dtype) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        inner = self.channels // self.groups
        shapes = ((self.batch, self.channels, *self.lengths), (self.made, inner, *(self.taps,) * len(self.lengths)))
        formats = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
        layout = formats[0 if self.rows else len(self.lengths) - 1]
        made = [torch.randn(shape, generator=generator).to(dtype).to(memory_format=layout) for shape in shapes]
        made[1] = made[1] / math.sqrt(inner * self.taps ** len(self.lengths))
        return [*made, *(torch.randn(self.made, generator=generator).to(dtype) for _ in range(2))]


def _normalised(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A batch norm that was folded into a scale and a shift, and the activation."""
    return torch.relu(y * _per_channel(scale, y) + _per_channel(shift, y))


def _silu(y: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return F.silu(y + _per_channel(shift, y))


def _per_channel(of: Tensor, like: Tensor) -> Tensor:
    return of.view(-1, *(1,) * (like.dim() - 2))


def _depthwise(batch: int, channels: int, length: int, taps: int, **how: Any) -> Pattern:
    return Pattern(batch, channels, (length, length), channels, taps, groups=channels, **how)


PATTERNS: dict[str, Pattern] = {
    "depthwise3": _depthwise(1, 96, 56, 3),
    "depthwise3_narrow": _depthwise(1, 384, 14, 3),
    "depthwise3_batch": _depthwise(8, 192, 28, 3),
    "depthwise3_stride2": _depthwise(1, 144, 56, 3, stride=2),
    "depthwise5": _depthwise(1, 240, 14, 5),
    "depthwise7": _depthwise(1, 96, 56, 7, after=_silu),
    "depthwise7_narrow": _depthwise(1, 768, 7, 7, after=_silu),
    "depthwise3_rows": _depthwise(1, 96, 56, 3, rows=True),
    "depthwise3_narrow_rows": _depthwise(1, 384, 14, 3, rows=True),
    "depthwise3_stride2_rows": _depthwise(1, 144, 56, 3, stride=2, rows=True),
    "depthwise7_rows": _depthwise(1, 96, 56, 7, rows=True),
    "causal1d": Pattern(2, 1024, (1024,), 1024, 4, padding=3, groups=1024, after=_silu),
    "stem": Pattern(1, 3, (224, 224), 32, 3, stride=2),
    "conv3": Pattern(1, 64, (56, 56), 64, 3),
    "grouped3": Pattern(1, 128, (28, 28), 128, 3, groups=4),
    "depthwise3d": Pattern(1, 64, (8, 28, 28), 64, 3, groups=64),
}


def call_of(name: str, pattern: Pattern, args: list[Tensor]) -> Callable[[], Tensor]:
    """A contender's call, compiled."""
    function = pattern.function
    if name == "eager":
        return partial(function, *args)
    if name == "inductor":
        return partial(torch.compile(copy_of(function), fullgraph=True), *args)
    mode = {"mode": "max-autotune"} if name == "max-autotune" else {"options": {"cache": False}}
    return partial(torch.compile(copy_of(function), backend="kgen", fullgraph=True, **mode), *args)


def settings(name: str, pattern: Pattern) -> AbstractContextManager[Any]:
    """What a contender is compiled under."""
    return only(pattern.template, lambda configs: configs[0]) if name == "forced" else nullcontext()


def measure(pattern: Pattern, dtype: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    """All contenders on one pattern."""
    torch._dynamo.reset()
    args = pattern.args(dtype)
    want = pattern.function(*(a.double() for a in args))
    return compared(lambda name: call_of(name, pattern, args), lambda name: settings(name, pattern), want, options)


def show(title: str, row: dict[str, Any], console: Console) -> None:
    error = max(row["errors"].values(), default=math.nan)
    show_row(title, row, console, PEERS, f"largest error {error:.0e}")


def main() -> None:
    options = options_of(__doc__, "pattern", PATTERNS, DTYPES, CONTENDERS, CONTENDERS)
    console = Console(width=200)
    rows = measured(PATTERNS, DTYPES, measure, show, options, console)
    for ours in ("kgen", "max-autotune"):
        show_geomean(rows.values(), console, PEERS, ours)


if __name__ == "__main__":
    main()
