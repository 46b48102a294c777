"""Small convolutions of all kinds: each with its sizes, steps and layout, and with more or fewer slots of a template filled."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
CALLS = (F.conv1d, F.conv2d, F.conv3d)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(x: Tensor) -> Tensor:
    """The tensor with its channels last in memory."""
    return x.to(memory_format=LAST[x.dim()]) if x.dim() in LAST else x.transpose(1, 2).contiguous().transpose(1, 2)


@dataclass(frozen=True)
class Convolution:
    """Shapes of the image and the filters, a step of each kind for each dimension; `last`: channels are last in memory.
    `slots`: 0 is the convolution alone, 1 has a bias and an activation, 2 a residual, 3 a prologue besides."""

    image: tuple[int, ...]
    filters: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    last: bool = True
    dtype: torch.dtype = bf16
    slots: int = 1

    def __str__(self) -> str:
        how = f"s{self.stride}p{self.padding}d{self.dilation}g{self.groups}".replace(" ", "")
        shapes = "-".join("x".join(map(str, shape)) for shape in (self.image, self.filters))
        return f"{shapes}-{how}-{'last' if self.last else 'first'}-{str(self.dtype).removeprefix('torch.')}-{self.slots}"

    @property
    def plain(self) -> Callable[..., Tensor]:
        call = CALLS[len(self.stride) - 1]
        how = (self.stride, self.padding, self.dilation, self.groups)
        return lambda x, w, b=None: call(x, w, b, *how)

    def function(self, x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
        if self.slots == 0:
            return self.plain(x, w)
        y = self.plain(torch.relu(x * scale) if self.slots == 3 else x, w, b)
        return F.silu(y) if self.slots == 1 else torch.relu(y + y * 0.5)

    def make(self, device: str = "cpu") -> list[Tensor]:
        """The image, the filters, a bias, and a scale of each channel."""
        shapes = self.image, self.filters, (self.filters[0],), (self.image[1], *(1 for _ in self.stride))
        x, w, *more = (self._tensor(shape, seed).to(device) for seed, shape in enumerate(shapes))
        return [*((channels_last(x), channels_last(w)) if self.last else (x, w)), *more]

    def _tensor(self, shape: tuple[int, ...], seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(self.dtype)


@dataclass(frozen=True)
class FilterGradient:
    """The gradient of filters from an image and the gradient of a result with `made` channels, as a sum over windows."""

    image: tuple[int, ...]
    made: int
    taps: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    last: bool = True
    dtype: torch.dtype = bf16

    def __str__(self) -> str:
        how = f"s{self.stride}p{self.padding}d{self.dilation}".replace(" ", "")
        shapes = f"{'x'.join(map(str, self.image))}-{self.made}-{'x'.join(map(str, self.taps))}"
        return f"gradient-{shapes}-{how}-{'last' if self.last else 'first'}-{str(self.dtype).removeprefix('torch.')}"

    @property
    def _counts(self) -> list[int]:
        """Positions of the result along each dimension."""
        sizes = zip(self.image[2:], self.padding, self.taps, self.dilation, self.stride, strict=True)
        return [(size + 2 * pad - (taps - 1) * apart - 1) // step + 1 for size, pad, taps, apart, step in sizes]

    def function(self, x: Tensor, gradient: Tensor) -> Tensor:
        windows = F.pad(x, [pad for pad in reversed(self.padding) for _ in range(2)])
        for k, (count, step) in enumerate(zip(self._counts, self.stride, strict=True)):
            windows = windows.unfold(2 + k, step * (count - 1) + 1, 1)[..., ::step]
            reach = (self.taps[k] - 1) * self.dilation[k] + 1
            windows = windows[(slice(None),) * (2 + k) + (slice(0, reach, self.dilation[k]),)]
        taps, positions = "rst"[: len(self.taps)], "hwd"[: len(self.taps)]
        return torch.einsum(f"nc{taps}{positions},no{positions}->oc{taps}", windows, gradient)

    def make(self, device: str = "cpu") -> list[Tensor]:
        shapes = self.image, (self.image[0], self.made, *self._counts)
        found = (torch.randn(s, generator=torch.Generator().manual_seed(sum(s))).to(device, self.dtype) for s in shapes)
        return [channels_last(one) if self.last else one for one in found]


Problem = Convolution | FilterGradient


def random_gradient(seed: int, large: bool = False) -> FilterGradient:
    """One of one or two dimensions. A `large` one has sums that are worth splitting."""
    g = random.Random(seed)
    rank = g.choice((1, 2))
    taps = tuple(g.choice((2, 3, 4)) for _ in range(rank))
    dilation = tuple(g.choice((1, 1, 2)) for _ in taps)
    lengths = ((5, 9), (40, 61))[large]
    sizes = [(n - 1) * d + g.choice(lengths) for n, d in zip(taps, dilation, strict=True)]
    image = (g.choice((1, 2, 5)), g.choice((3, 20, 40)), *sizes)
    padding, stride = (tuple(g.choice(values) for _ in taps) for values in ((0, 1, 4), (1, 1, 2)))
    return FilterGradient(
        image, g.choice((5, 24, 40)), taps, stride, padding, dilation, g.random() < 0.6, g.choice((f32, bf16, f16))
    )


def random_problem(seed: int, few: bool, large: bool = False) -> Convolution:
    """One of few channels in each group where asked for. Some paddings are longer than filters, some strides too, and some
    dimensions one wide, but for the last one, which is a window. A `large` one has several tiles along each axis."""
    g = random.Random(seed)
    rank = g.choice((1, 2, 2, 2, 3))
    groups = g.choice(((1, 3, 20), (1, 5, 160))[large] if few else (1, 1, 2))
    depth = g.choice((1, 2, 3) if few else ((4, 17, 40), (32, 72, 130))[large])
    made = g.choice((1, 2, 5) if few else ((5, 24, 33), (24, 144, 300))[large])
    taps = tuple(g.choice((1, 2, 3, 3, 4)) for _ in range(rank))
    taps = (*taps[:-1], max(2, taps[-1]))
    dilation = tuple(g.choice((1, 1, 2)) for _ in taps)
    reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
    lengths = ((7, 11), (29, 40))[large] if rank < 3 else ((3, 4), (9, 14))[large]
    sizes = [g.choice((1, n, n + 3, *lengths)) for n in reach]
    sizes[-1] = max(reach[-1] + 3, sizes[-1])
    needed = [max(0, n - size + 1) // 2 for n, size in zip(reach, sizes, strict=True)]
    padding = tuple(least + g.choice((0, 0, 1, 4)) for least in needed)
    stride = tuple(g.choice((1, 1, 2, 5)) for _ in taps)
    image, filters = (g.choice((1, 2, 3)), depth * groups, *sizes), (made * groups, depth, *taps)
    dtype = g.choice((f32, f32, bf16, f16))
    return Convolution(image, filters, stride, padding, dilation, groups, g.random() < 0.6, dtype, g.randrange(4))


def random_depthwise(seed: int, large: bool = False) -> Convolution:
    """One of one channel in each group, whose filters reach along the first dimension of its windows."""
    g = random.Random(seed)
    rank = g.choice((1, 2, 2, 2, 3))
    groups, made = g.choice(((2, 3, 20), (2, 3, 65, 96))[large]), g.choice((1, 1, 1, 2))
    taps = [g.choice((1, 2, 3, 4, 5, 7)) for _ in range(rank)]
    taps[0] = max(2, taps[0])
    dilation = [1, *(g.choice((1, 1, 2)) for _ in taps[1:])]
    lengths = ((5, 9, 13), (29, 40, 61))[large] if rank < 3 else ((3, 5), (9, 14))[large]
    sizes = [(t - 1) * d + g.choice(lengths) for t, d in zip(taps, dilation, strict=True)]
    padding, stride = (tuple(g.choice(values) for _ in taps) for values in ((0, 1, 2, 5), (1, 1, 2, 3)))
    image, filters = (g.choice((1, 2, 3)), groups, *sizes), (made * groups, 1, *taps)
    dtype = g.choice((f32, f32, bf16, f16))
    return Convolution(image, filters, stride, padding, tuple(dilation), groups, g.random() < 0.5, dtype, g.randrange(4))


def random_boxed(seed: int, large: bool = False) -> Convolution:
    """One whose channels are last and begin at multiples of 16 bytes, without a prologue: what TMA reads."""
    g = random.Random(seed)
    rank = g.choice((1, 2, 2, 2, 3))
    groups = g.choice((1, 1, 1, 2)) if rank < 3 else 1
    depth, made = g.choice(((8, 16, 24, 72), (32, 72, 136))[large]), g.choice(((8, 40, 64, 72), (64, 144, 304))[large])
    taps = [g.choice((1, 2, 3, 3, 4)) for _ in range(rank)]
    taps[-1] = max(2, taps[-1])
    dilation = [g.choice((1, 1, 2, 3)) for _ in taps]
    stride = [g.choice((1, 1, 2, 3)) for _ in taps]
    reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation, strict=True)]
    lengths = ((5, 9, 13), (29, 40, 61))[large] if rank < 3 else ((3, 5, 6), (9, 14))[large]
    least = [n + step for n, step in zip(reach, stride, strict=True)]  # two positions along each dimension
    sizes = [g.choice((n, n + 1, *(max(n, length) for length in lengths))) for n in least]
    sizes[-1] = max(sizes[-1], reach[-1] + 5)
    padding = [g.choice((0, 1, 1, 2, 4)) for _ in taps]
    image, filters = (g.choice((1, 2, 3)), depth * groups, *sizes), (made * groups, depth, *taps)
    steps = tuple(tuple(one) for one in (stride, padding, dilation))
    return Convolution(image, filters, *steps, groups, dtype=g.choice((f16, bf16)), slots=g.randrange(3))
