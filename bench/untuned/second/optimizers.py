"""Steps of optimizers over many tensors of odd sizes."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.untuned.block import Block, Make, Sized

SINGLE = torch.float32
SHAPES = ((1021, 512), (512,), (64, 3, 7, 7), (64,), (333, 777), (777,), (1, 1), (4096, 1100), (50, 50, 3), (2048,))


def lion(*tensors: Tensor) -> list[Tensor]:
    n = len(tensors) // 3
    made = []
    for p, g, m in zip(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], strict=True):
        made += [p * (1 - 1e-4) - 1e-3 * torch.sign(0.9 * m + 0.1 * g), 0.99 * m + 0.01 * g]
    return made


def momentum(*tensors: Tensor) -> None:
    """In place, with weight decay and clipping of the whole gradient's norm."""
    n = len(tensors) // 3
    total = torch.sqrt(sum(g.float().pow(2).sum() for g in tensors[n : 2 * n]))
    scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
    for p, g, m in zip(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], strict=True):
        m.mul_(0.9).add_(g * scale + 1e-4 * p)
        p.add_(m, alpha=-0.01)


def moving_average(*tensors: Tensor) -> None:
    n = len(tensors) // 2
    for kept, new in zip(tensors[:n], tensors[n:], strict=True):
        kept.lerp_(new.to(kept.dtype), 0.001)


def adafactor(p: Tensor, g: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, ...]:
    square = g.float().square() + 1e-30
    row = 0.999 * row.float().abs() + 0.001 * square.mean(-1)
    column = 0.999 * column.float().abs() + 0.001 * square.mean(-2)
    update = g * (row / row.mean()).rsqrt()[:, None] * column.rsqrt()[None]
    update = update / (update.norm(2) / update.numel() ** 0.5).clamp(min=1.0)
    return p - 1e-3 * p.norm(2) / p.numel() ** 0.5 * update, row, column


def lamb(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m, v = 0.9 * m + 0.1 * g, 0.999 * v.abs() + 0.001 * g * g
    update = m / (v.sqrt() + 1e-6) + 0.01 * p
    trust = torch.where(p.norm() > 0, p.norm() / update.norm(), torch.ones_like(p.norm()))
    return p - 1e-3 * trust * update, m, v


def muon(g: Tensor) -> Tensor:
    """Newton and Schulz's five steps to the nearest orthogonal matrix."""
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x


def _many(m: Make, copies: int, *, small: int) -> list[Tensor]:
    shapes = [tuple(min(n, 9) for n in shape) for shape in SHAPES] if small else SHAPES
    return [m(*shape) for _ in range(copies) for shape in shapes]


def _sets(m: Make, small: int, copies: int) -> list[Tensor]:
    return _many(m, copies, small=small)


BLOCKS: tuple[Block, ...] = (
    Sized(lion, _sets, (1, 3), SINGLE).block("lion", 0, 3),
    Sized(momentum, _sets, (1, 3), SINGLE).block("clipped momentum", 0, 3),
    Sized(moving_average, _sets, (1, 2), SINGLE).block("moving average", 0, 2),
    Sized(adafactor, lambda m, a, b: [m(a, b), m(a, b), m(a), m(b)], (5, 7), SINGLE).block("adafactor", 4097, 3001),
    Sized(lamb, lambda m, a, b: [m(a, b) for _ in range(4)], (5, 7), SINGLE).block("lamb", 3001, 2047),
    Sized(muon, lambda m, a, b: [m(a, b)], (5, 7)).block("muon", 1000, 3072),
)
