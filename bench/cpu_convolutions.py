"""Convolutions and small nets on a CPU, in inference: kgen with and without the choice of layouts and freezing, and others.

python -m bench.cpu_convolutions --seconds 2 --cpu-time
python -m bench.cpu_convolutions --only relu resnet18 --contenders kgen-frozen inductor-frozen --dtype bfloat16

Weights and images are contiguous, as a user's are who has not heard of channels last; random numbers stand for trained ones.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from bench.contenders import failure
from bench.measure import geomean, interleave, thread_count
from bench.measurements import write

# ---- nets ---------------------------------------------------------------------------------------------------------------


def normed(i: int, o: int, k: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(i, o, k, stride, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]


class Residual(nn.Module):
    """Two 3x3 convolutions of ResNet."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(*normed(i, o, 3, stride), nn.ReLU())
        self.second = nn.Sequential(*normed(o, o, 3))
        self.past = nn.Sequential(*normed(i, o, 1, stride)) if stride != 1 or i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.past(x))


class Inverted(nn.Module):
    """An inverted residual of MobileNetV3, with squeeze and excitation."""

    def __init__(self, i: int, o: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        h = i * wider
        self.wide = nn.Sequential(*normed(i, h, 1), nn.Hardswish(), *normed(h, h, 3, stride, h), nn.Hardswish())
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(h, max(8, h // 4), 1), nn.ReLU(), nn.Conv2d(max(8, h // 4), h, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip
        self.narrow = nn.Sequential(*normed(h, o, 1))
        self.adds = stride == 1 and i == o

    def forward(self, x: Tensor) -> Tensor:
        y = self.wide(x)
        y = self.narrow(y * self.gate(y))
        return x + y if self.adds else y


class ConvNext(nn.Module):
    """A block of ConvNeXt: depthwise 7x7, layer norm over channels, two matmuls."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.wide, self.narrow = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.full((c,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.narrow(F.gelu(self.wide(y))) * self.scale).permute(0, 3, 1, 2)


class ChannelNorm(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(c, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return y


def head(c: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 1000)]


def resnet18() -> nn.Module:
    blocks: list[nn.Module] = [*normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    i = 64
    for o, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [Residual(i, o, stride), Residual(o, o)]
        i = o
    return nn.Sequential(*blocks, *head(512))


def mobilenet() -> nn.Module:
    """MobileNetV3's blocks, fewer of them."""
    blocks: list[nn.Module] = [*normed(3, 16, 3, 2), nn.Hardswish()]
    i = 16
    for o, wider, stride, count in ((16, 1, 1, 1), (24, 4, 2, 2), (40, 4, 2, 2), (80, 5, 2, 3), (112, 6, 1, 2), (160, 6, 2, 2)):
        for k in range(count):
            blocks.append(Inverted(i, o, wider, stride if k == 0 else 1))
            i = o
    return nn.Sequential(*blocks, *normed(160, 960, 1), nn.Hardswish(), *head(960))


def convnext() -> nn.Module:
    """ConvNeXt's blocks, half as wide and fewer of them."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 48, 4, 4), ChannelNorm(48)]
    i = 48
    for o, count in ((48, 2), (96, 2), (192, 4), (384, 2)):
        blocks += [ChannelNorm(i), nn.Conv2d(i, o, 2, 2)] if o != i else []
        blocks += [ConvNext(o) for _ in range(count)]
        i = o
    return nn.Sequential(*blocks, *head(384))


class Alone(nn.Module):
    """`fn` of a convolution and of its input."""

    def __init__(self, fn: Callable[[Tensor, Tensor], Tensor], c: int = 64) -> None:
        super().__init__()
        self.fn, self.conv = fn, nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.conv(x), x)


Subject = tuple[Callable[[], nn.Module], tuple[int, ...]]
SUBJECTS: dict[str, Subject] = {
    "relu": (lambda: Alone(lambda y, x: F.relu(y)), (1, 64, 56, 56)),
    "sum and relu": (lambda: Alone(lambda y, x: F.relu(y + x)), (1, 64, 56, 56)),
    "relu, 256": (lambda: Alone(lambda y, x: F.relu(y), 256), (1, 256, 14, 14)),
    "sum and relu, 256": (lambda: Alone(lambda y, x: F.relu(y + x), 256), (1, 256, 14, 14)),
    "residual": (lambda: Residual(64, 64), (8, 64, 56, 56)),
    "resnet18": (resnet18, (1, 3, 224, 224)),
    "mobilenet": (mobilenet, (1, 3, 224, 224)),
    "convnext": (convnext, (1, 3, 224, 224)),
}


def made(name: str, dtype: torch.dtype = torch.float32, last: bool = False) -> tuple[nn.Module, Tensor]:
    """A net with statistics of its norms, and an image."""
    torch.manual_seed(0)
    make, shape = SUBJECTS[name]
    net = make().eval()
    for one in net.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.normal_(one.running_mean, 0, 0.1)  # type: ignore[arg-type]
            nn.init.uniform_(one.running_var, 0.5, 1.5)  # type: ignore[arg-type]
    form = torch.channels_last if last else torch.contiguous_format
    return net.to(dtype).to(memory_format=form), torch.randn(shape).to(dtype).to(memory_format=form)  # type: ignore[call-overload]


# ---- contenders -----------------------------------------------------------------------------------------------------------


def _kgen(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda net: torch.compile(copy.deepcopy(net), backend="kgen", options={"cache": False, **options})


CONTENDERS: dict[str, Callable[[nn.Module], Any]] = {
    "eager": copy.deepcopy,
    "inductor": lambda net: torch.compile(copy.deepcopy(net)),
    "inductor-frozen": lambda net: torch.compile(copy.deepcopy(net)),
    "kgen-off": _kgen(layouts="off"),
    "kgen": _kgen(),
    "kgen-frozen-off": _kgen(layouts="off", freezing=True),
    "kgen-frozen": _kgen(freezing=True),
}


def measure(name: str, contenders: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of all that work, in turns."""
    net, x = made(name, getattr(torch, options.dtype), options.channels_last)
    calls: dict[str, Callable[[], Any]] = {}
    row: dict[str, Any] = {"name": name, "failed": {}, "seconds": {}}
    torch._dynamo.reset()
    for one in contenders:
        try:
            fn = CONTENDERS[one](net)
            with torch._inductor.config.patch(freezing=True) if one == "inductor-frozen" else nullcontext():
                fn(x)
        except Exception as cause:
            row["failed"][one] = failure(cause)
            continue
        calls[one] = lambda fn=fn: fn(x)  # type: ignore[misc]
    clock = time.process_time if options.cpu_time else time.perf_counter
    timings = interleave(calls, seconds=options.seconds, clock=clock)
    row["seconds"] = {one: timing.median for one, timing in timings.items()}
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--channels-last", action="store_true", help="nets and images that have their channels last")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measuring, for each subject")
    parser.add_argument("--cpu-time", action="store_true", help="where others use the machine")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    console, rows = Console(width=160), []
    with torch.no_grad(), thread_count(options.threads):
        for name in options.only:
            rows.append(measure(name, options.contenders, options))
            times = "  ".join(f"{one} {taken * 1e3:.3f}" for one, taken in rows[-1]["seconds"].items())
            console.print(f"[bold]{name}[/] (ms): {times}", highlight=False)
            for one, why in rows[-1]["failed"].items():
                console.print(f"{one} failed: {why}", highlight=False, markup=False)
    for one in options.contenders:
        ratios = [
            r["seconds"]["inductor-frozen"] / r["seconds"][one] for r in rows if {"inductor-frozen", one} <= r["seconds"].keys()
        ]
        if ratios:
            console.print(
                f"inductor-frozen over {one}: geomean {geomean(ratios):.2f}, least {min(ratios):.2f}", highlight=False
            )
    if options.json:
        write(options.json, "cpu_convolutions", rows)


if __name__ == "__main__":
    main()
