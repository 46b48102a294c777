"""Denoisers: a U-Net with attention at low resolutions, and a transformer whose norms the time step modulates (DiT)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def time_features(t: Tensor, size: int) -> Tensor:
    """float[n] -> float[n, size]: sines and cosines of geometrically spaced frequencies."""
    rates = torch.exp(torch.arange(size // 2, device=t.device, dtype=t.dtype) * (-math.log(1e4) / (size // 2)))
    angles = t[:, None] * rates[None]
    return torch.cat([angles.cos(), angles.sin()], -1)


class ResidualBlock(nn.Module):
    """Two normalised convolutions; the embedding of the time step is added between them."""

    def __init__(self, cin: int, cout: int, embedding: int, groups: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(groups, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(embedding, cout)
        self.shortcut = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(y))) + self.shortcut(x)


class SpatialAttention(nn.Module):
    """Attention of all positions of an image to one another."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(groups, channels)
        self.qkv, self.out = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, 3, self.heads, c // self.heads, h * w).transpose(-1, -2).unbind(1)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(-1, -2).reshape(n, c, h, w))


class UNet(nn.Module):
    """(float[n, 4, h, w], float[n] time steps) -> float[n, 4, h, w]; `attend` names the levels with attention."""

    def __init__(self, width: int, multiples: Sequence[int], attend: Sequence[int], heads: int = 4, groups: int = 8) -> None:
        super().__init__()
        self.width, embedding = width, width * 4
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.stem, self.skips = nn.Conv2d(4, width, 3, padding=1), len(multiples)
        self.down, self.down_attention, self.shrink = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        self.up, self.up_attention = nn.ModuleList(), nn.ModuleList()
        c = width
        sizes = [width * m for m in multiples]
        for level, size in enumerate(sizes):
            self.down.append(ResidualBlock(c, size, embedding, groups))
            self.down_attention.append(SpatialAttention(size, heads, groups) if level in attend else nn.Identity())
            self.shrink.append(nn.Conv2d(size, size, 3, 2, 1))
            c = size
        self.middle = ResidualBlock(c, c, embedding, groups)
        for level, size in reversed(list(enumerate(sizes))):
            self.up.append(ResidualBlock(c + size, size, embedding, groups))
            self.up_attention.append(SpatialAttention(size, heads, groups) if level in attend else nn.Identity())
            c = size
        self.head = nn.Sequential(nn.GroupNorm(groups, c), nn.SiLU(), nn.Conv2d(c, 4, 3, padding=1))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        time = self.time(time_features(t, self.width))
        x, kept = self.stem(x), []
        for block, attention, shrink in zip(self.down, self.down_attention, self.shrink, strict=True):
            x = attention(block(x, time))
            kept.append(x)
            x = shrink(x)
        x = self.middle(x, time)
        for block, attention in zip(self.up, self.up_attention, strict=True):
            skip = kept.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="nearest")
            x = attention(block(torch.cat([x, skip], 1), time))
        return self.head(x)


class DiTBlock(nn.Module):
    """Attention and an MLP; shift, scale and gate of each come from the condition."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        n, length, size = x.shape
        qkv = self.qkv(self.norm1(x) * (1 + scale1) + shift1)
        q, k, v = qkv.view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, size)
        x = x + gate1 * self.out(y)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """(float[n, 4, h, w], float[n] time steps, int64[n] classes) -> float[n, 4, h, w]; `side` is h and w in patches."""

    def __init__(self, size: int, depth: int, heads: int, side: int, patch: int = 2, classes: int = 1000) -> None:
        super().__init__()
        self.patch, self.size = patch, size
        self.embed = nn.Conv2d(4, size, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, side * side, size) * 0.02)
        self.time = nn.Sequential(nn.Linear(size, size), nn.SiLU(), nn.Linear(size, size))
        self.classes = nn.Embedding(classes, size)
        self.blocks = nn.ModuleList(DiTBlock(size, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(size, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 2 * size))
        self.head = nn.Linear(size, patch * patch * 4)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        n, _, h, w = x.shape
        condition = self.time(time_features(t, self.size)) + self.classes(y)
        x = self.embed(x).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        p = self.patch
        return x.view(n, h // p, w // p, p, p, 4).permute(0, 5, 1, 3, 2, 4).reshape(n, 4, h, w)
