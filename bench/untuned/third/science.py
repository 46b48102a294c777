"""Blocks of graph networks, time series, physics and optimisers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def switched_energy(x: Tensor, charges: Tensor) -> Tensor:
    """Pairwise energies with a cutoff and a smooth switch, over the pairs above the diagonal; x of (batch, atoms, 3)."""
    n = x.shape[1]
    i, j = torch.triu_indices(n, n, offset=1, device=x.device)
    d = x[:, i] - x[:, j]
    r = torch.sqrt((d * d).sum(-1) + 1e-6)
    s = ((r - 1.0) / 2.0).clamp(0, 1)
    switch = 1 - s**3 * (10 - 15 * s + 6 * s * s)
    e = charges[:, i] * charges[:, j] / (r + 0.5) + 0.1 * torch.exp(-2 * r)
    return torch.where(r < 3.0, e * switch, torch.zeros_like(e)).sum(1)


def heat_in_place(u: Tensor, k: Tensor) -> None:
    """Four explicit steps on the inner points, the border mirrored."""
    for _ in range(4):
        inner = u[:, 1:-1, 1:-1]
        flux = u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4 * inner
        inner += 0.2 * torch.sigmoid(k)[1:-1, 1:-1] * flux
        u[:, 0], u[:, -1] = u[:, 1], u[:, -2]
        u[:, :, 0], u[:, :, -1] = u[:, :, 1], u[:, :, -2]


def poisson(rho: Tensor) -> tuple[Tensor, Tensor]:
    """The potential of a periodic box by FFT, and its gradient by differences."""
    n = rho.shape[-1]
    k = torch.fft.fftfreq(n, device=rho.device, dtype=rho.dtype) * 2 * math.pi
    kz = torch.fft.rfftfreq(n, device=rho.device, dtype=rho.dtype) * 2 * math.pi
    k2 = k[:, None, None] ** 2 + k[None, :, None] ** 2 + kz**2
    green = torch.where(k2 > 0, -1 / k2.clamp(min=1e-12), torch.zeros_like(k2))
    phi = torch.fft.irfftn(torch.fft.rfftn(rho, dim=(-3, -2, -1)) * green, s=(n, n, n), dim=(-3, -2, -1))
    force = torch.stack([(torch.roll(phi, -1, d) - torch.roll(phi, 1, d)) / 2 for d in (-3, -2, -1)], 1)
    return phi, force


def aligned(a: Tensor, b: Tensor) -> Tensor:
    """Horn's alignment by quaternions, found by squaring a matrix; (batch, points, 3)."""
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    s = (a.transpose(1, 2) @ b) / a.shape[1]
    (xx, xy, xz), (yx, yy, yz), (zx, zy, zz) = (r.unbind(-1) for r in s.unbind(1))
    rows = [
        (xx + yy + zz, yz - zy, zx - xz, xy - yx),
        (yz - zy, xx - yy - zz, xy + yx, zx + xz),
        (zx - xz, xy + yx, yy - xx - zz, yz + zy),
        (xy - yx, zx + xz, yz + zy, zz - xx - yy),
    ]
    m = torch.stack([torch.stack(r, -1) for r in rows], 1)
    m = m + torch.linalg.matrix_norm(m, keepdim=True) * torch.eye(4, device=a.device, dtype=a.dtype)
    for _ in range(6):
        m = m @ m
        m = m / m.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    q = F.normalize(m.sum(2) + 1e-6, dim=-1)
    w, v = q[:, :1, None], q[:, None, 1:].expand_as(a)
    t = 2 * torch.cross(v, a, dim=-1)
    return ((a + w * t + torch.cross(v, t, dim=-1) - b) ** 2).sum(-1).mean(1).sqrt()


def particle_mesh(x: Tensor, mass: Tensor, mesh: Tensor) -> Tensor:
    """Cloud-in-cell: masses spread over eight cells, and the mesh read back at the particles."""
    n = mesh.shape[0]
    low = torch.floor(x.detach())
    f = x - low
    base = low.long() % n
    grid, parts = mesh.flatten(), []
    for c in range(8):
        bit = [(c >> d) & 1 for d in range(3)]
        share = torch.stack([f[:, d] if bit[d] else 1 - f[:, d] for d in range(3)], 1).prod(1)
        at = [(base[:, d] + bit[d]) % n for d in range(3)]
        parts.append((at[0] * n * n + at[1] * n + at[2], share))
    for index, share in parts:
        grid = grid.index_add(0, index, share * mass)
    return sum((grid[index] * share for index, share in parts), torch.zeros_like(mass))


def unbalanced_transport(cost: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Ten steps of unbalanced Sinkhorn in logarithms, with gradients through all."""
    la, lb = F.log_softmax(a, -1), F.log_softmax(b, -1)
    f, g = torch.zeros_like(a), torch.zeros_like(b)
    for _ in range(10):
        f = -0.9 * 0.1 * torch.logsumexp((g[:, None] - cost) / 0.1 + lb[:, None], 2)
        g = -0.9 * 0.1 * torch.logsumexp((f[:, :, None] - cost) / 0.1 + la[:, :, None], 1)
    return (f * la.exp()).sum() + (g * lb.exp()).sum()


def edge_softmax(x: Tensor, source: Tensor, target: Tensor, wl: Tensor, wr: Tensor, a: Tensor) -> Tensor:
    """GATv2: softmax over the edges of each node, heads of 16 channels."""
    left, right = (F.linear(x, w).view(x.shape[0], -1, 16) for w in (wl, wr))
    e = (F.leaky_relu(left[source] + right[target], 0.2) * a).sum(-1)
    at = target[:, None].expand_as(e)
    top = torch.full((x.shape[0], e.shape[1]), float("-inf"), device=x.device, dtype=e.dtype)
    top = top.scatter_reduce(0, at, e.detach(), "amax", include_self=True)
    p = torch.exp(e - top[target])
    total = torch.zeros_like(top).scatter_add(0, at, p)
    out = torch.zeros_like(left).index_add(0, target, left[source] * (p / (total[target] + 1e-16))[..., None])
    return F.elu(out.flatten(1))


def isomorphism(x: Tensor, edges: Tensor, epsilon: Tensor, w1: Tensor, norm: Tensor, w2: Tensor, graph: Tensor) -> Tensor:
    """GIN: sums of adjacent nodes, an MLP with a batch norm, sums of each graph."""
    y = (1 + epsilon) * x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
    y = F.relu(F.batch_norm(F.linear(y, w1), None, None, norm[0], norm[1], training=True))
    y = F.relu(F.linear(y, w2))
    return torch.zeros(64, y.shape[1], device=x.device, dtype=y.dtype).index_add(0, graph, y)


def degree_norm(x: Tensor, edges: Tensor, shares: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """GCN with self loops: degrees by scatter, their inverse roots on both ends of an edge."""
    n = x.shape[0]
    loops = torch.arange(n, device=x.device)
    source, target = torch.cat((edges, loops.expand(2, -1)), 1)
    s = torch.cat((shares.abs(), torch.ones(n, device=x.device, dtype=x.dtype)))
    degree = torch.zeros(n, device=x.device, dtype=x.dtype).scatter_add_(0, target, s)
    inverse = degree.pow(-0.5).masked_fill(degree == 0, 0.0)
    norm = inverse[source] * s * inverse[target]
    y = F.linear(x, w)
    return F.relu(torch.zeros_like(y).index_add_(0, target, y[source] * norm[:, None]) + b)


def decomposed_series(x: Tensor, affine: Tensor, seasonal: Tensor, trend: Tensor) -> Tensor:
    """RevIN around DLinear: a moving mean of 25 steps, a linear layer each for it and the rest; x of (batch, steps, series)."""
    mean, std = x.mean(1, keepdim=True).detach(), (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt().detach()
    z = (x - mean) / std * affine[0] + affine[1]
    padded = torch.cat((z[:, :1].repeat(1, 12, 1), z, z[:, -1:].repeat(1, 12, 1)), 1)
    slow = F.avg_pool1d(padded.transpose(1, 2), 25, 1)
    y = (F.linear(z.transpose(1, 2) - slow, seasonal) + F.linear(slow, trend)).transpose(1, 2)
    return (y - affine[1]) / (affine[0] + 1e-5) * std + mean


def seasons(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Trend by a centred mean over 24 steps, the mean of each hour, the rest; x of (batch, steps)."""
    kernel = torch.full((1, 1, 25), 1 / 24, device=x.device, dtype=x.dtype)
    kernel[..., 0] = kernel[..., -1] = 1 / 48
    trend = F.conv1d(F.pad(x[:, None], (12, 12), mode="reflect"), kernel).squeeze(1)
    days = x.shape[1] // 24
    hours = (x - trend)[:, : days * 24].view(x.shape[0], days, 24).mean(1)
    hours = hours - hours.mean(1, keepdim=True)
    season = hours.repeat(1, days + 1)[:, : x.shape[1]]
    return trend, season, x - trend - season


def preconditioned(p: Tensor, g: Tensor, left: Tensor, right: Tensor) -> None:
    """Shampoo in place: statistics of both sides, their inverse fourth roots by Newton's coupled iteration."""

    def root(a: Tensor) -> Tensor:
        eye = torch.eye(a.shape[0], device=a.device, dtype=a.dtype)
        a = a + 0.1 * eye
        z = 5 / (2 * torch.linalg.norm(a))
        m, h = a * z, eye * z**0.25
        for _ in range(6):
            t = (5 * eye - m) / 4
            t2 = t @ t
            m, h = t2 @ t2 @ m, h @ t
        return h

    left.mul_(0.95).addmm_(g, g.t(), alpha=0.05)
    right.mul_(0.95).addmm_(g.t(), g, alpha=0.05)
    p.sub_(root(left @ left.t()) @ g @ root(right @ right.t()), alpha=0.01)


def sharpness(*tensors: Tensor) -> list[Tensor]:
    """SAM's first step: all parameters moved along their gradients, scaled by one norm."""
    half = len(tensors) // 2
    p, g = tensors[:half], tensors[half:]
    norm = torch.stack([(q.abs() * d).norm(p=2) for q, d in zip(p, g, strict=True)]).norm(p=2)
    scale = 0.05 / (norm + 1e-12)
    return [q + q * q * d * scale.to(q) for q, d in zip(p, g, strict=True)]


def schedule_free(*tensors: Tensor) -> None:
    """Schedule-free AdamW in place: parameters of the bench's dtype, states in float32."""
    n = len(tensors) // 4
    for p, g, z, v in zip(*(tensors[k * n : (k + 1) * n] for k in range(4)), strict=True):
        d = g.to(z.dtype)
        v.mul_(0.999).addcmul_(d, d, value=0.001)
        d = d / (v.sqrt() + 1e-8) + 0.01 * p.to(z.dtype)
        y = torch.lerp(p.to(z.dtype), z, 0.1) - 0.0005 * d
        z.sub_(d, alpha=0.001)
        p.copy_(y)


def lattice(f: Tensor, solid: Tensor) -> Tensor:
    """One step of lattice Boltzmann in two dimensions with 9 velocities, walls bounce back; f of (9, height, width)."""
    cx, cy = (0, 1, 0, -1, 0, 1, -1, -1, 1), (0, 0, 1, 0, -1, 1, 1, -1, -1)
    w, back = (4 / 9, *(1 / 9,) * 4, *(1 / 36,) * 4), (0, 3, 4, 1, 2, 7, 8, 5, 6)
    rho = f.abs().sum(0) + 0.1
    ux, uy = (sum(c[k] * f[k] for k in range(9) if c[k]) / rho for c in (cx, cy))
    out = []
    for k in range(9):
        cu = 3 * (cx[k] * ux + cy[k] * uy)
        moved = f[k] - 0.6 * (f[k] - w[k] * rho * (1 + cu + 0.5 * cu * cu - 1.5 * (ux * ux + uy * uy)))
        kept = torch.where(solid > 1, f[back[k]], moved)
        out.append(torch.roll(kept, (cy[k], cx[k]), (0, 1)))
    return torch.stack(out)


def structure_factor(x: Tensor, charge: Tensor, k: Tensor) -> Tensor:
    """Ewald's sum in reciprocal space, by complex exponentials."""
    phase = x @ k.t()
    s = (charge[:, None] * torch.exp(1j * phase)).sum(0)
    k2 = (k * k).sum(1) + 0.1
    return (torch.exp(-k2 / 4) / k2 * s.abs() ** 2).sum()


def _graph(m: Make, n: int, e: int, d: int) -> list[Tensor]:
    return [m(n, d), ids(m, n, e), ids(m, n, e), weight(m, 64, d), weight(m, 64, d), m(4, 16)]


def _molecules(m: Make, n: int, e: int, d: int) -> list[Tensor]:
    return [m(n, d), ids(m, n, 2, e), m(1), weight(m, 2 * d, d), m(2, 2 * d), weight(m, d, 2 * d), ids(m, 64, n)]


def _shapes(m: Make, copies: int, d: int, sets: int) -> list[Tensor]:
    return [m(*s) for _ in range(sets) for _ in range(copies) for s in ((d, d), (d,), (2 * d + 1, 3))]


def _mixed(m: Make, copies: int, d: int) -> list[Tensor]:
    return [*_shapes(m, copies, d, 2), *(t.float().abs() for t in _shapes(m, copies, d, 2))]


TRANSPORT = Sized(unbalanced_transport, lambda m, b, n, k: [m(b, n, k).abs(), m(b, n), m(b, k)], (2, 7, 9), SINGLE)

BLOCKS: tuple[Block, ...] = (
    *Sized(switched_energy, lambda m, b, n: [m(b, n, 3) * 2, m(b, n)], (2, 7), SINGLE).both("switched energy", 64, 150),
    Sized(heat_in_place, lambda m, b, h, w: [m(b, h, w), m(h, w)], (2, 7, 8), SINGLE).block("heat in place", 8, 511, 640),
    Sized(poisson, lambda m, b, n: [m(b, n, n, n)], (2, 6), SINGLE).block("poisson by fft", 4, 90),
    *Sized(aligned, lambda m, b, n: [m(b, n, 3), m(b, n, 3)], (2, 9), SINGLE).both("aligned points", 2048, 101),
    Sized(particle_mesh, lambda m, p, n: [m(p, 3) * n, m(p), m(n, n, n)], (20, 4), SINGLE).block(
        "particle mesh", 200001, 60, training=True
    ),
    TRANSPORT.block("unbalanced transport", 16, 200, 301, training=True),
    *Sized(edge_softmax, _graph, (7, 20, 12), SINGLE, tf32=True).both("edge softmax", 20000, 200003, 100),
    Sized(isomorphism, _molecules, (9, 30, 8), SINGLE, tf32=True).block("isomorphism network", 12000, 26001, 96, training=True),
    Sized(
        degree_norm, lambda m, n, e, d: [m(n, d), ids(m, n, 2, e), m(e), weight(m, 24, d), m(24)], (9, 30, 8), SINGLE, tf32=True
    ).block("degree norm", 50000, 300000, 130),
    Sized(
        decomposed_series,
        lambda m, b, t, s, o: [m(b, t, s), m(2, s).abs() + 0.5, weight(m, o, t), weight(m, o, t)],
        (2, 30, 3, 7),
        SINGLE,
        tf32=True,
    ).block("decomposed series", 64, 336, 321, 96, training=True),
    Sized(seasons, lambda m, b, t: [m(b, t)], (2, 50), SINGLE).block("seasons", 370, 2190),
    Sized(preconditioned, lambda m, r, c: [m(r, c), m(r, c), m(r, r), m(c, c)], (6, 5), SINGLE, tf32=True).block(
        "preconditioned step", 512, 384
    ),
    Sized(sharpness, lambda m, n, d: _shapes(m, n, d, 2), (2, 5), SINGLE).block("sharpness", 30, 256),
    Sized(schedule_free, _mixed, (2, 5)).block("schedule-free step", 24, 384),
    Sized(lattice, lambda m, h, w: [m(9, h, w), m(h, w)], (5, 6), SINGLE).block("lattice", 600, 1001),
    Sized(structure_factor, lambda m, n, k: [m(n, 3), m(n), m(k, 3)], (9, 5), SINGLE).block(
        "structure factor", 4001, 999, training=True
    ),
)
