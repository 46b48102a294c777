"""Convolutions of all kinds with their gradients: drawn by a seed, each with a function of its tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.conv_problems import channels_last

f16, f32, f64, bf16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
TOLERANCE = {f16: 3e-3, f32: 2e-5, f64: 1e-11, bf16: 2e-2}
Numbers = tuple[int, ...]
aten = torch.ops.aten


@dataclass(frozen=True)
class Problem:
    """An image of `batch` x (`channels` of a group x `groups`) x `lengths`; filters make `made` channels of each group. `extra`
    is the output padding of a transposed convolution. `channels_last`: of the image and of the result's gradient. `memory`: how
    the image, the filters, the bias and the gradient lie, of `MEMORY`."""

    lengths: Numbers
    taps: Numbers
    stride: Numbers
    padding: Numbers
    dilation: Numbers
    batch: int = 2
    channels: int = 1
    groups: int = 1
    made: int = 1
    transposed: bool = False
    extra: Numbers = ()
    channels_last: bool = False
    dtype: torch.dtype = f32
    memory: tuple[str, ...] = ()

    @property
    def how(self) -> tuple[Any, ...]:
        """What operators are told besides tensors."""
        extra = self.extra or (0,) * len(self.taps)
        return list(self.stride), list(self.padding), list(self.dilation), self.transposed, list(extra), self.groups

    @property
    def is_possible(self) -> bool:
        return all(n > 0 for n in self.result)

    @property
    def result(self) -> Numbers:
        """The positions of the result."""
        numbers = zip(self.lengths, self.taps, self.stride, self.padding, self.dilation, strict=True)
        if self.transposed:
            extra = self.extra or (0,) * len(self.taps)
            each = ((n - 1) * s - 2 * p + d * (t - 1) + 1 for n, t, s, p, d in numbers)
            return tuple(one + more for one, more in zip(each, extra, strict=True))
        return tuple((n + 2 * p - d * (t - 1) - 1) // s + 1 for n, t, s, p, d in numbers)

    def args(self, device: str = "cpu") -> list[Tensor]:
        """The image, the filters, a bias, and the gradient of the result."""
        made, channels = self.groups * self.made, self.groups * self.channels
        filters = (channels, self.made) if self.transposed else (made, self.channels)
        shapes = (self.batch, channels, *self.lengths), (*filters, *self.taps), (made,), (self.batch, made, *self.result)
        generator = torch.Generator().manual_seed(sum(self.lengths) + sum(self.taps))
        x, w, b, g = (torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes)
        found = [channels_last(x), w, b, channels_last(g)] if self.channels_last else [x, w, b, g]
        made_there = [one.to(device) for one in found]
        return [MEMORY[how](one) for how, one in zip(self.memory or ("as made",) * 4, made_there, strict=True)]

    def all_of_it(self, x: Tensor, w: Tensor, b: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        """The result with an activation, and the gradients of image, filters and bias from what an activation's gradient
        leaves of `g`; of `g` itself where its strides matter."""
        y = aten.convolution(x, w, b, *self.how)
        passed = g if self.memory else torch.where(g > -1, g, 0)
        return (torch.relu(y), *aten.convolution_backward(passed, x, w, list(b.shape), *self.how, [True, True, True]))

    def wanted(self, *args: Tensor) -> list[Tensor]:
        """The same in float64."""
        return [one.double() for one in self.all_of_it(*(a.double() for a in args))]

    def assert_right(self, got: tuple[Tensor, ...], *args: Tensor) -> None:
        """As exact as the type allows."""
        for one, want in zip(got, self.wanted(*args), strict=True):
            tolerance = TOLERANCE[self.dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
            torch.testing.assert_close(one.double(), want, rtol=0, atol=tolerance)
            assert one.dtype == self.dtype

    def assert_in_eager_layout(self, got: tuple[Tensor, ...], *args: Tensor) -> None:
        """With the strides that eager's results have, where a dimension has several elements. Of no images torch traces other
        strides of the filters' gradient than it gives."""
        if self.memory and self.batch == 0:
            return
        for one, want in zip(got, self.all_of_it(*args), strict=True):
            both = zip(one.stride(), want.stride(), want.shape, strict=True)
            assert want.numel() == 0 or all(ours == eager for ours, eager, size in both if size > 1)


def _with_gaps(t: Tensor) -> Tensor:
    """Every second element of longer rows, from the second one on."""
    wide = t.new_zeros(*t.shape[:-1], 2 * t.shape[-1] + 1)
    wide[..., 1::2] = t
    return wide[..., 1::2]


def _cut_out(t: Tensor) -> Tensor:
    """Out of the middle of a larger tensor."""
    wide = t.new_zeros([n + 3 for n in t.shape])
    middle = wide[tuple(slice(1, n + 1) for n in t.shape)]
    return middle.copy_(t)


def _reversed(t: Tensor) -> Tensor:
    """The first dimension fastest in memory."""
    order = range(t.dim() - 1, -1, -1)
    return t.permute(*order).contiguous().permute(*order)


def _expanded(dimension: int) -> Callable[[Tensor], Tensor]:
    """One element along a dimension, read again and again."""
    return lambda t: t.narrow(dimension % t.dim(), 0, min(1, t.shape[dimension % t.dim()])).expand(t.shape) if t.numel() else t


def _one_element(t: Tensor) -> Tensor:
    return t.flatten()[:1].view([1] * t.dim()).expand(t.shape) if t.numel() else t


MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "as made": lambda t: t, "gaps": _with_gaps, "cut out": _cut_out, "reversed": _reversed, "one image": _expanded(0),
    "one position": _expanded(-1), "one element": _one_element,
}  # fmt: skip


def laid_out(seed: int) -> Problem:
    """A random problem of any floating type, whose tensors may be views: with gaps, in another order, or expanded."""
    rng = random.Random(f"memory {seed}")
    memory = tuple(rng.choice(["as made", *MEMORY]) for _ in range(4))
    return replace(drawn(seed), dtype=rng.choice((f16, f32, f32, f64, bf16)), memory=memory)


def drawn(seed: int) -> Problem:
    """A random problem: paddings may be longer than filters, strides too, dimensions one wide, batches empty."""
    rng = random.Random(seed)
    while True:
        problem = _attempt(rng)
        if problem.is_possible:
            return problem


def _attempt(rng: random.Random) -> Problem:
    rank = rng.choice((1, 1, 2, 2, 2, 2, 3))
    longest = ((1, 5, 8, 12, 17), (1, 4, 6, 8, 9, 12), (1, 3, 4, 6))[rank - 1]
    lengths, taps, stride, dilation = (
        tuple(rng.choice(values) for _ in range(rank))
        for values in (longest, (1, 2, 3, 3, 4), (1, 1, 2, 2, 3, 5), (1, 1, 1, 2, 3))
    )
    padding = tuple(rng.choice((0, 0, 1, t // 2, t, t + 1)) for t in taps)
    transposed = rng.random() < 0.35
    extra = tuple(rng.randrange(max(s, d)) if rng.random() < 0.5 else 0 for s, d in zip(stride, dilation, strict=True))
    groups = rng.choice((1, 1, 1, 2, 3, 6))
    channels, made = (rng.choice((1, 1, 2, 3) if groups > 1 else (1, 3, 5, 16)) for _ in range(2))
    if groups > 1 and rng.random() < 0.4:
        channels = 1  # depthwise
    return Problem(
        lengths, taps, stride, padding, dilation, rng.choice((1, 2, 2, 3, 0) if rng.random() < 0.3 else (1, 2, 3)), channels,
        groups, made, transposed, extra if transposed else (), rng.random() < 0.5, rng.choice((f32, f32, f32, bf16)),
    )  # fmt: skip
