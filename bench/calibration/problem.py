"""What a problem of the calibration set is: a small function with the arguments that a model calls it with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
# What problems are sorted into. The class names the hardest part; what is fused around it is in the title.
CLASSES = (
    "matmul", "skinny-matmul", "conv1x1", "conv3x3", "conv-large", "depthwise", "conv-backward", "matmul-backward", "attention",
    "attention-backward", "norm", "pointwise", "reduction", "gather",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Of what problems are made. `batch` is that of images, `tokens` those of a training step or a prefill, `length` that of a
    sequence. `divide` shortens widths and images, for tests."""

    name: str
    batch: int
    tokens: int
    length: int
    divide: int = 1

    def of(self, length: int, least: int = 16) -> int:
        """A width, or a side of an image."""
        return max(min(length, least), length // self.divide)


SIZES = {
    "gpu": Size("gpu", batch=32, tokens=4096, length=1024),
    "cpu": Size("cpu", batch=1, tokens=128, length=128),
    "tiny": Size("tiny", batch=2, tokens=16, length=16, divide=4),
}


@dataclass(frozen=True)
class Arg:
    """A tensor: normal numbers times `scale`, integers below `top`, or, where `mask`, truth values. Without a `dtype` it has
    the problem's. `channels_last` is the order in memory; `positive` numbers are at least a tenth."""

    shape: tuple[int, ...]
    scale: float = 1.0
    top: int = 0
    mask: bool = False
    channels_last: bool = False
    positive: bool = False
    dtype: torch.dtype | None = None

    def kind(self, dtype: torch.dtype) -> torch.dtype:
        return torch.int64 if self.top else torch.bool if self.mask else self.dtype or dtype

    def make(self, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> Tensor:
        kind = self.kind(dtype)
        if str(device) == "meta":
            return self._ordered(torch.empty(self.shape, dtype=kind, device="meta"))
        generator = torch.Generator(device).manual_seed(seed)
        if self.top:
            return torch.randint(0, self.top, self.shape, generator=generator, device=device)
        if self.mask:
            return torch.rand(self.shape, generator=generator, device=device) < 0.8
        made = torch.randn(self.shape, generator=generator, device=device) * self.scale
        return self._ordered((made.abs() + 0.1 if self.positive else made).to(kind))

    def _ordered(self, made: Tensor) -> Tensor:
        if not self.channels_last:
            return made
        return made.to(memory_format=torch.channels_last if made.dim() == 4 else torch.channels_last_3d)

    def nbytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * self.kind(dtype).itemsize


@dataclass(frozen=True)
class Problem:
    """`kind` is one of CLASSES, `direction` forward or backward."""

    model: str
    title: str
    kind: str
    fn: Function
    args: tuple[Arg, ...]
    direction: str = "forward"
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        assert self.kind in CLASSES, self.kind
        assert self.direction in ("forward", "backward"), self.direction

    @property
    def name(self) -> str:
        short = str(self.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "f")
        return f"{self.model}: {self.title}, {short}"

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes(self.dtype) for one in self.args)

    def make(self, device: str | torch.device, seed: int = 0) -> list[Tensor]:
        return [one.make(device, self.dtype, 100 * seed + k) for k, one in enumerate(self.args)]

    def of_type(self, dtype: torch.dtype) -> Problem:
        return replace(self, dtype=dtype)


def activation(*shape: int) -> Arg:
    """What flows through a model, the rows one behind the other."""
    return Arg(shape)


def image(*shape: int, scale: float = 1.0) -> Arg:
    """What flows through a network of convolutions: channels last in memory."""
    return Arg(shape, scale, channels_last=True)


def weight(*shape: int, inner: int = 0) -> Arg:
    """A matrix that leaves numbers as large as they were; `inner` is the length of its sums, if not the last one."""
    return Arg(shape, (inner or shape[-1]) ** -0.5)


def kernel(out: int, into: int, *window: int) -> Arg:
    """Of a convolution."""
    return Arg((out, into, *window), (into * math.prod(window)) ** -0.5, channels_last=len(window) > 1)


def vector(length: int) -> Arg:
    """A bias, or the weight of a norm."""
    return Arg((length,))


def variance(length: int) -> Arg:
    return Arg((length,), positive=True)


def indices(top: int, *shape: int) -> Arg:
    return Arg(shape, top=top)
