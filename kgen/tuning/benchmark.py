"""A benchmark job: candidates that compute one thing, as plain data that another process can run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kgen.config import Config, override
from kgen.device import tf32_settings

__all__ = ["Array", "BenchmarkJob", "Check", "Setting", "undisturbed"]


@dataclass(frozen=True, slots=True)
class Array:
    """An argument: numbers around 0 that are `scale` large, or, where `top` is given, integers from 0 up to it. Of a `share`,
    where it is given, the numbers are plus or minus `scale`, and the others are 0."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    scale: float = 1.0
    top: int = 0
    share: float = 0.0

    @property
    def span(self) -> int:
        """Elements from the first to the last one."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """A tensor of these strides with random data."""
        flat = self._numbers(max(1, self.span), generator)
        return torch.as_strided(flat, self.sizes, self.strides)

    def _numbers(self, count: int, generator: torch.Generator) -> torch.Tensor:
        device = torch.device(self.device)
        if self.dtype is torch.bool:
            return torch.rand(count, generator=generator, device=device) < 0.5
        if self.top or not (self.dtype.is_floating_point or self.dtype.is_complex):
            low, high = (0, self.top) if self.top else _range(self.dtype)
            return torch.randint(low, high, (count,), generator=generator, device=device).to(self.dtype)
        if self.share:
            found = torch.rand(count, generator=generator, device=device) / self.share  # below 1: one of the share
            return ((found < 1).float() - 2 * (found < 0.5).float() * (found < 1)).mul(self.scale).to(self.dtype)
        kind = torch.float64 if self.dtype is torch.float64 else torch.float32
        return (torch.randn(count, generator=generator, device=device, dtype=kind) * self.scale).to(self.dtype)


def _range(dtype: torch.dtype) -> tuple[int, int]:
    """Small integers of both signs where the type has them."""
    return max(torch.iinfo(dtype).min, -100), min(torch.iinfo(dtype).max, 100) + 1


@dataclass(frozen=True, slots=True)
class Setting:
    """What of the asking process changes how fast things run, or what they compute."""

    threads: int
    allow_tf32: bool
    options: tuple[tuple[str, str | None], ...]  # of kgen's configuration: folders, compiler, instruction set
    allow_tf32_windows: bool = True  # of convolutions

    @classmethod
    def here(cls, config: Config) -> Setting:
        """That of this process."""
        options = (("cache_dir", config.cache_dir), ("compiler", config.compiler), ("isa", config.isa))
        matmuls, windows = tf32_settings()
        return cls(torch.get_num_threads(), matmuls, options, windows)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """In the process that runs what was asked, which it has for itself."""
        torch.set_num_threads(self.threads)
        torch.backends.cuda.matmul.allow_tf32 = self.allow_tf32
        torch.backends.cudnn.allow_tf32 = self.allow_tf32_windows
        with self.toolchain():
            yield

    def toolchain(self) -> contextlib.AbstractContextManager[object]:
        """The folders, compiler and instruction set alone."""
        options: dict[str, Any] = {name: value for name, value in self.options if value is not None}
        return override(**options)


@dataclass(frozen=True, slots=True)
class Check:
    """More arguments that results are compared on, none of them timed: those of which nothing but `roundings` is rounded."""

    arguments: tuple[Array | int, ...]
    roundings: tuple[torch.dtype, ...]


@dataclass(frozen=True, slots=True)
class BenchmarkJob:
    """`candidates` are compiled graphs in their serialised form, all of the same function; `arguments` are what they take.
    Results are compared with those of candidate `reference`, bit by bit if `exact`, else as far as rounding allows: `roundings`
    has for each result the narrowest type on the way to it. `check` is a second, closer comparison. At least `cold` bytes of
    arguments are gone through before any are used again. Convolutions read `windows`."""

    title: str
    candidates: dict[int, bytes]
    arguments: tuple[Array | int, ...]
    reference: int
    seconds: float
    cold: float
    setting: Setting
    names: dict[int, str] = field(default_factory=dict)
    exact: bool = False
    roundings: tuple[torch.dtype, ...] = ()
    check: Check | None = None
    windows: bool = False


def undisturbed(samples: Sequence[float]) -> float:
    """What the fastest sixteenth takes at most. Others who use the machine only ever add time, and may do so in most rounds.
    Two medians of one kernel, taken beside compilers on all cores, differed by a factor of 18."""
    return sorted(samples)[(len(samples) - 1) // 16]
