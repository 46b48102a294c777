"""Small programs about indices, types, views and writes: what torch.compile is given beside models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def views_of_results(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Results that share storage: a transpose, halves, a diagonal, a slice of one computed tensor, and views of an input."""
    z = torch.tanh(x + y)
    a, b = z.chunk(2, 1)
    return z, z.mT, a, b[:, ::2], z.diagonal(), x[1:].view(-1), y.unsqueeze(0).expand(3, -1, -1)


def written_inputs(x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    """Inputs changed in place through views of them: strided slices, masks, index_put with sums, clamps, a swap."""
    x[:, ::2].mul_(0.5).add_(y[:, 1::2])
    x[at] = x[at].tanh()
    y.index_put_((at,), torch.ones_like(y[0]), accumulate=True)
    y[y > 1.5] = 1.5
    first = x[0].clone()
    x[0] = x[1]
    x[1] = first
    x.t()[3].clamp_(-1, 1)
    return x.sum(1) + y.sum(1)


def scalar_tensors(x: Tensor, gain: Tensor, shift: Tensor, power: Tensor) -> Tensor:
    """Values of no dimensions that come from inputs and reductions, mixed with float64 scalars and Python numbers."""
    mean, top = x.mean(), x.abs().amax()
    wide = torch.tensor(0.25, dtype=torch.float64, device=x.device)
    y = (x - mean) / top * gain + shift * wide
    y = y.abs().clamp(min=1e-3) ** power.sigmoid() * torch.where(mean > 0, gain, -gain)
    return y + ((y.sum() / y.numel()).abs() + 1).rsqrt()


def bytes_and_bits(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Bytes that wrap, blends with rounding, shifts of int16, counts and parities of bits, votes of bools."""
    wrapped = a + b * 3 - 7
    alpha = mask.to(torch.int32)
    blend = ((a.to(torch.int32) * alpha + b.to(torch.int32) * (255 - alpha) + 127) // 255).to(torch.uint8)
    short = (a.to(torch.int16) << 6) ^ (b.to(torch.int16) * -37)
    grey = a ^ (a >> 1)
    parity = grey ^ (grey >> 4)
    parity = ((0x6996 >> (parity & 15).to(torch.int32)) & 1).bool()
    majority = (a > 100).to(torch.int8) + (b > 100).to(torch.int8) + (mask > 100).to(torch.int8) >= 2
    return wrapped, blend, short >> 2, parity & majority | (a == b), (short % 7).sum(1), majority.any(0) ^ parity.all(0)


def random_bits(seed: Tensor) -> tuple[Tensor, Tensor]:
    """A counter's hash in int64 with shifts and multiplications kept to 32 bits, normal values by Box and Muller."""
    low = 2**32 - 1
    x = seed & low
    for k in range(3):
        x = (x ^ (x >> 16)) * 0x45D9F3B & low
        x = x + (k + 1) * 0x9E3779B9 & low
    u = ((x >> 8) + 1).double() / 2**24
    v = ((x * 0x27D4EB2D & low) >> 8).double() / 2**24
    return x, (torch.sqrt(-2 * torch.log(u.clamp(max=1))) * torch.cos(2 * torch.pi * v)).float()


def empty_parts(x: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    """Parts of no elements among others: slices, sums over nothing, a concatenation, a matmul over an empty axis."""
    none = x[:, :0]
    y = torch.cat([none, x.relu(), x[:, 3:3]], 1)
    empty = none @ x[:0]
    return (
        y,
        none.sum(1) + 1,
        F.pad(none.sum(0), (1, 1), value=3),
        empty + 2,
        F.pad(x[at[:0]].mean(1), (0, 2), value=1),
        torch.cat([x[:0].sin(), x * 2]),
        none.prod(1),
    )


def wide_matmuls(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Batched matmuls with broadcast batches on either side, an expanded operand, a transposed result."""
    y = torch.matmul(a[:, None], b)
    z = torch.matmul(c.expand(a.shape[0], -1, -1)[:, None], y.mT)
    return F.gelu(z).mT.contiguous() + y.mean(1, keepdim=True)[..., :1]


def running(x: Tensor, w: Tensor) -> Tensor:
    """Running products, maxima and logsumexps along both axes; a reverse cumulative sum; differences."""
    survive = torch.cumprod(1 - 0.1 * x.sigmoid(), 1)
    lse = torch.logcumsumexp(x, 0) - torch.log(torch.arange(1, x.shape[0] + 1, device=x.device, dtype=x.dtype))[:, None]
    top = torch.cummax(x * w, 1).values
    back = (x * 0.01).flip(1).cumsum(1).flip(1)
    return survive * lse + torch.diff(top, dim=1, prepend=top[:, :1]) + back


def interpolated(x: Tensor, knots: Tensor, values: Tensor) -> Tensor:
    """np.interp: sorted knots, searchsorted, neighbours gathered; a table by bucketize beside."""
    k = knots.sort(-1).values
    right = torch.searchsorted(k.detach(), x.detach()).clamp(1, k.shape[-1] - 1)
    x0, x1 = k[right - 1], k[right]
    y0, y1 = values[right - 1], values[right]
    y = y0 + (y1 - y0) * ((x - x0) / (x1 - x0 + 1e-3)).clamp(0, 1)
    edges = torch.linspace(-2, 2, 33, device=x.device, dtype=x.dtype)
    return y + values[torch.bucketize(x.detach(), edges) % len(values)]


def ordered(x: Tensor) -> Tensor:
    """Ranks by two argsorts, medians and k-th values, trimmed means, a value of the sorted order weighted by its rank."""
    sorted_, order = x.sort(dim=-1, stable=True)
    rank = order.argsort(-1)
    n = x.shape[-1]
    weights = torch.linspace(1, 0, n, device=x.device, dtype=x.dtype)
    middle = x - sorted_[:, n // 2 : n // 2 + 1]
    trimmed = sorted_[:, n // 10 : n - n // 10].mean(-1, keepdim=True)
    kth = torch.kthvalue(x, n // 3, dim=-1, keepdim=True).values
    return (x * weights[rank]).sum(-1) + (middle.abs().median(-1).values + trimmed[:, 0] - kth[:, 0])


def segments(x: Tensor, at: Tensor, w: Tensor) -> Tensor:
    """Sums, means, maxima, minima and spreads of segments in one tensor, gathered back and mixed."""
    n, d = 1024, x.shape[1]
    index = at[:, None].expand(-1, d)
    base = torch.zeros(n, d, device=x.device, dtype=x.dtype)
    mean = base.scatter_reduce(0, index, x, "mean", include_self=False)
    square = base.scatter_reduce(0, index, x * x, "mean", include_self=False)
    top = base.scatter_reduce(0, index, x, "amax", include_self=False)
    low = base.scatter_reduce(0, index, x, "amin", include_self=False)
    std = (square - mean * mean).clamp(min=0).add(1e-5).sqrt()
    return torch.cat([mean, std, top, low], 1)[at] @ w


def strided_reads(x: Tensor, w: Tensor) -> Tensor:
    """Overlapping windows by as_strided and unfold, triangles by indices, diagonals, a Toeplitz matrix by gather."""
    _b, _n = x.shape
    windows = x.unfold(1, 16, 5)
    a = (windows * w[:16]).sum(-1)
    toeplitz = torch.arange(64, device=x.device)
    index = (toeplitz[:, None] - toeplitz).abs()
    t = x[:, :64][:, index]
    i, j = torch.tril_indices(64, 64, -1, device=x.device)
    low = t[:, i, j].square().mean(-1)
    return a.amax(1) + low + torch.diagonal(t, 3, 1, 2).sum(-1) + (t @ w[:64]).sum(-1)


def mixed_promotion(a: Tensor, b: Tensor, c: Tensor, flag: Tensor, count: Tensor) -> tuple[Tensor, ...]:
    """float16, bfloat16, float32, bools and int32 meet in sums, products, comparisons and a where."""
    h, s = a.half(), b.float()
    x = h * flag + count
    y = torch.where(flag, h, s) - c
    z = (count // 3 * flag).float() + (h > c)
    return x, y, z, (x + y).sum(0, dtype=torch.float32), count / 7, torch.add(h, c, alpha=2).amax(1)


def many_norms(x: Tensor, y: Tensor) -> Tensor:
    """Norms of orders 1, 3, infinity, renormalised rows, distances by cdist of order 1, standard deviations."""
    a = x.norm(1, 1) + x.norm(3, 1) + x.norm(float("inf"), 1)
    std, mean = torch.std_mean(x, 1, correction=0)
    clipped = torch.renorm(x, 2, 0, 5.0)
    d = torch.cdist(clipped, y, p=1)
    return (a + std + mean).sum() + d.min(1).values.sum() + torch.var(d, unbiased=False)


def moved_axes(x: Tensor, w: Tensor) -> Tensor:
    """Axes moved between elementwise steps of odd sizes, a flip, a roll, a pixel unshuffle, sums along what was middle."""
    y = x.permute(2, 0, 3, 1).contiguous() * w
    y = y.flip(0).roll((3, -2), (0, 2)).permute(1, 3, 0, 2)
    z = F.pixel_unshuffle(y[..., : y.shape[2] // 3 * 3, : y.shape[3] // 3 * 3], 3)
    return z.transpose(1, 3).reshape(x.shape[0], -1, z.shape[1]).sigmoid().sum(1)


def runs(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths of runs of equal values: starts by a comparison, numbers by a cumulative sum, counts by scatter_add."""
    start = F.pad(x[:, 1:] != x[:, :-1], (1, 0), value=True)
    number = start.cumsum(1) - 1
    count = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number))
    return count, count.gather(1, number) * start


def blocks_of_sizes(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """A block diagonal and a Kronecker sum assembled by slices of zeros, then multiplied; a triangle and a trace."""
    n, m = x.shape[-1], y.shape[-1]
    a = torch.zeros(x.shape[0], n + m, n + m, device=x.device, dtype=x.dtype)
    a[:, :n, :n] = x
    a[:, n:, n:] = y
    a = a + torch.block_diag(torch.ones(n, n, device=x.device), torch.eye(m, device=x.device)).to(x.dtype)
    return torch.tril(a @ z, 1) + torch.triu(z @ a.mT, -1) * a.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]


RUNNING = Sized(running, lambda m, n, d: [m(n, d), m(d)], (7, 9), SINGLE)
SEGMENTS = Sized(segments, lambda m, n, d: [m(n, d), ids(m, 1024, n), m(4 * d, d) * 0.1], (40, 4), SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    Sized(views_of_results, lambda m, n: [m(n, n), m(n, n)], (8,)).block("views of results", 3000),
    Sized(written_inputs, lambda m, n, d: [m(n, d), m(n, d), ids(m, n, n // 4)], (12, 8), SINGLE).block(
        "written inputs", 20001, 500
    ),
    Sized(scalar_tensors, lambda m, n: [m(n, 33), m(), m(), m()], (7,), SINGLE).block("scalar tensors", 100003, training=True),
    Sized(bytes_and_bits, lambda m, n, d: [ids(m, 256, n, d).to(torch.uint8) for _ in range(3)], (5, 7)).block(
        "bytes and bits", 4001, 1001
    ),
    Sized(random_bits, lambda m, n: [ids(m, 2**40, n)], (50,)).block("random bits", 5000011),
    Sized(empty_parts, lambda m, n: [m(n, n), ids(m, n, n)], (6,)).block("empty parts", 2001),
    Sized(
        wide_matmuls, lambda m, b, h, n, d, k: [m(b, n, d), m(h, d, k) * d**-0.5, m(1, n, k) * k**-0.5], (2, 3, 4, 5, 6)
    ).block("wide matmuls", 8, 12, 197, 64, 200, training=True),
    *RUNNING.both("running values", 1500, 777),
    Sized(interpolated, lambda m, n, k: [m(n), m(k), m(k)], (20, 9), SINGLE).block(
        "interpolated", 3000001, 1000, training=True
    ),
    Sized(ordered, lambda m, n, d: [m(n, d) + m(n, 1) * m(d)], (4, 21), SINGLE).block("ordered", 2000, 777, training=True),
    *SEGMENTS.both("segments", 100003, 48),
    Sized(strided_reads, lambda m, b, n: [m(b, n), m(64)], (3, 81), SINGLE).block("strided reads", 1000, 2001, training=True),
    Sized(
        mixed_promotion,
        lambda m, n, d: [m(n, d), m(n, d), m(n, d), m(n, d) > 0, ids(m, 100, n, d).to(torch.int32)],
        (5, 7),
    ).block("mixed promotion", 3001, 1777),
    Sized(many_norms, lambda m, n, k, d: [m(n, d), m(k, d)], (7, 5, 6), SINGLE).block(
        "many norms", 3000, 500, 99, training=True
    ),
    Sized(moved_axes, lambda m, b, c, h, w: [m(b, c, h, w), m(c)], (2, 3, 7, 8), SINGLE).block(
        "moved axes", 16, 31, 131, 127, training=True
    ),
    Sized(runs, lambda m, n, d: [ids(m, 3, n, d)], (4, 20)).block("runs", 2000, 3001),
    Sized(blocks_of_sizes, lambda m, b, p, q: [m(b, p, p), m(b, q, q), m(b, p + q, p + q) * 0.1], (2, 3, 4)).block(
        "blocks of sizes", 64, 130, 201, training=True
    ),
)
