"""Blocks of scientific and geometric programs, graph networks and classical algorithms, as their authors write them."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, both, ids


def rbf_kernel(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    squares = x.square().sum(-1)[:, None] + y.square().sum(-1)[None, :] - 2 * x @ y.t()
    return torch.exp(-squares.clamp(min=0) / x.shape[-1]) @ weight


def small_matmuls(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", torch.einsum("bij,bjk->bik", a, b), c)


def bilinear(a: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bi,oij,bj->bo", a, w, b)


def message_passing(x: Tensor, source: Tensor, target: Tensor, w: Tensor, u: Tensor) -> Tensor:
    message = F.relu(F.linear(x[source], w))
    total = torch.zeros_like(x).index_add(0, target, message)
    return F.relu(F.linear(x, u) + total)


def graph_attention(x: Tensor, source: Tensor, target: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """GAT (Velickovic et al. 2018), one head, softmax over the edges of a node."""
    h = F.linear(x, w)
    score = F.leaky_relu((h @ a)[source] + (h @ b)[target], 0.2).float().exp()
    total = torch.zeros(x.shape[0], device=x.device).index_add(0, target, score)
    share = (score / total[target]).to(h.dtype)
    return torch.zeros_like(h).index_add(0, target, h[source] * share[:, None])


def quantised_codes(x: Tensor, codes: Tensor) -> Tensor:
    """VQ-VAE's nearest codes with a straight-through gradient (van den Oord et al. 2017)."""
    distance = x.square().sum(1, keepdim=True) - 2 * x @ codes.t() + codes.square().sum(1)
    found = codes[distance.argmin(1)]
    return x + (found - x).detach()


def sinkhorn(cost: Tensor) -> Tensor:
    p = -cost.float() * 10
    for _ in range(5):
        p = p - p.logsumexp(-1, keepdim=True)
        p = p - p.logsumexp(-2, keepdim=True)
    return p.exp()


def radiance_field(points: Tensor, *weights: Tensor) -> Tensor:
    """NeRF's network (Mildenhall et al. 2020): frequencies, then layers of 256."""
    rates = 2.0 ** torch.arange(10, device=points.device, dtype=torch.float32)
    angles = (points.float()[:, :, None] * rates).flatten(1)
    y = torch.cat([angles.sin(), angles.cos()], 1).to(weights[0].dtype)
    for w in weights[:-1]:
        y = F.relu(F.linear(y, w))
    return torch.sigmoid(F.linear(y, weights[-1]))


def sine_network(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(torch.sin(30 * F.linear(torch.sin(30 * F.linear(x, w1, b1)), w2, b2)), w3)


def spline_layer(x: Tensor, grid: Tensor, w: Tensor, base: Tensor) -> Tensor:
    """A KAN layer (Liu et al. 2024) of cubic B-splines."""
    t = torch.arange(12, device=x.device, dtype=torch.float32) * 0.4 - 2.4 + grid.float() * 0
    y = x.float()[..., None]
    bases = ((y >= t[:-1]) & (y < t[1:])).float()
    for k in range(1, 4):
        left = (y - t[: -(k + 1)]) / (t[k:-1] - t[: -(k + 1)]) * bases[..., :-1]
        right = (t[k + 1 :] - y) / (t[k + 1 :] - t[1:-k]) * bases[..., 1:]
        bases = left + right
    return F.linear(F.silu(x), base) + F.linear(bases.to(x.dtype).flatten(1), w)


def triangle_update(z: Tensor, norm: Tensor, wa: Tensor, wb: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """AlphaFold's triangle multiplication over outgoing edges (Jumper et al. 2021)."""
    y = F.layer_norm(z, z.shape[-1:], norm[0], norm[1])
    a, b = F.linear(y, wa), F.linear(y, wb)
    x = torch.einsum("bikc,bjkc->bijc", torch.sigmoid(a) * y, torch.sigmoid(b) * y)
    return z + torch.sigmoid(F.linear(y, gate)) * F.linear(F.layer_norm(x, x.shape[-1:]), out)


def outer_mean(m: Tensor, wa: Tensor, wb: Tensor, out: Tensor) -> Tensor:
    a, b = F.linear(m, wa), F.linear(m, wb)
    x = torch.einsum("bsic,bsjd->bijcd", a, b) / m.shape[1]
    return F.linear(x.flatten(3), out)


def wave_equation(u: Tensor, before: Tensor, speed: Tensor) -> Tensor:
    for _ in range(4):
        laplace = u.roll(1, -1) + u.roll(-1, -1) + u.roll(1, -2) + u.roll(-1, -2) - 4 * u
        u, before = 2 * u - before + 0.1 * speed * laplace, u
    return u


def filtered_by_fft(x: Tensor, kernel: Tensor) -> Tensor:
    n = 2 * x.shape[-1]
    y = torch.fft.irfft(torch.fft.rfft(x.float(), n=n) * torch.fft.rfft(kernel.float(), n=n), n=n)
    return F.gelu(y[..., : x.shape[-1]].to(x.dtype)) * x


def exponential_average(x: Tensor, decay: Tensor) -> Tensor:
    """By cumulative sums of logarithms, over the last dimension but one."""
    rate = F.logsigmoid(decay.float())
    total = (rate.expand_as(x)).cumsum(-2)
    return ((x.float() * (-total).exp()).cumsum(-2) * total.exp()).to(x.dtype)


def overlaps(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of all pairs of rectangles, and each box's best partner."""
    a, b = a.float().sort(-1)[0], b.float().sort(-1)[0]
    low, high = torch.maximum(a[:, None, :2], b[None, :, :2]), torch.minimum(a[:, None, 2:], b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(-1)
    area = (a[:, 2:] - a[:, :2]).prod(-1)[:, None] + (b[:, 2:] - b[:, :2]).prod(-1)[None, :]
    return (both / (area - both)).max(1)[0]


def splats(points: Tensor, centres: Tensor, inverse: Tensor, colours: Tensor) -> Tensor:
    d = points[:, None, :] - centres[None, :, :]
    power = torch.einsum("pni,nij,pnj->pn", d, inverse, d)
    alpha = torch.exp(-0.5 * power.abs())
    return alpha @ colours


def quaternion_rotation(q: Tensor, v: Tensor) -> Tensor:
    q = F.normalize(q.float(), dim=-1)
    w, u = q[..., :1], q[..., 1:]
    v = v.float()
    t = 2 * torch.linalg.cross(u, v)
    return v + w * t + torch.linalg.cross(u, t)


def whitened(x: Tensor) -> Tensor:
    y = x.float() - x.float().mean(0)
    covariance = y.t() @ y / (x.shape[0] - 1)
    return covariance.square().sum() - covariance.diagonal().square().sum()


def four_indices(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("abcd,cdef->abef", a, b)


def set_pooling(x: Tensor, mask: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = F.relu(F.linear(x, w1)) * mask[..., None]
    mean = h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    top = h.masked_fill(mask[..., None] == 0, float("-inf")).amax(1)
    return F.linear(torch.cat([mean, top], -1), w2)


def histogram_loss(x: Tensor, y: Tensor, centres: Tensor) -> Tensor:
    def soft(values: Tensor) -> Tensor:
        return torch.exp(-((values[..., None] - centres) ** 2) * 50).mean(1)

    return (soft(x).cumsum(-1) - soft(y).cumsum(-1)).abs().mean()


def adam_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    m = 0.9 * m + 0.1 * grad
    v = 0.999 * v + 0.001 * grad * grad
    return p * 0.999 - 1e-3 * m / (v.abs().sqrt() + 1e-8), m, v


def standardised(x: Tensor) -> Tensor:
    y = (x - x.mean((0, 1), keepdim=True)) / (x.std((0, 1), keepdim=True) + 1e-5)
    return y.clamp(-3, 3)


def _mlp(m: Make, sizes: tuple[int, ...]) -> list[Tensor]:
    return [m(b, a) * a**-0.5 for a, b in itertools.pairwise(sizes)]


def _edges(m: Make) -> list[Tensor]:
    return [m(20000, 128), ids(m, 20000, 200000), ids(m, 20000, 200000), m(128, 128) * 0.09]


BLOCKS: tuple[Block, ...] = (
    *both("rbf kernel 4096x4096x32", rbf_kernel, lambda m: [m(4096, 32), m(4096, 32), m(4096, 16)]),
    Block("small matmuls 65536 of 4x4", small_matmuls, lambda m: [m(65536, 4, 4) for _ in range(3)]),
    Block("bilinear 4096x128x128", bilinear, lambda m: [m(4096, 128), m(64, 128, 128) * 0.01, m(4096, 128)]),
    *both("message passing 200000 edges", message_passing, lambda m: [*_edges(m), m(128, 128) * 0.09]),
    Block("graph attention 200000 edges", graph_attention, lambda m: [*_edges(m), m(128) * 0.1, m(128) * 0.1]),
    *both("nearest codes 32768x1024x64", quantised_codes, lambda m: [m(32768, 64), m(1024, 64)]),
    *both("sinkhorn 64x512x512", sinkhorn, lambda m: [m(64, 512, 512)]),
    *both("radiance field 131072", radiance_field, lambda m: [m(131072, 3), *_mlp(m, (60, 256, 256, 256, 256, 4))]),
    Block(
        "sine network 65536x256 step",
        sine_network,
        lambda m: [m(65536, 2), m(256, 2) * 0.1, m(256), m(256, 256) * 0.01, m(256), m(1, 256) * 0.1],
        training=True,
    ),
    Block("spline layer 8192x64x128", spline_layer, lambda m: [m(8192, 64), m(1), m(128, 512) * 0.05, m(128, 64) * 0.1]),
    *both(
        "triangle update 256x256x128",
        triangle_update,
        lambda m: [m(1, 256, 256, 128), m(2, 128), *(m(128, 128) * 0.09 for _ in range(4))],
    ),
    Block(
        "outer mean 128x256",
        outer_mean,
        lambda m: [m(1, 128, 256, 256), m(32, 256) * 0.06, m(32, 256) * 0.06, m(128, 1024) * 0.03],
    ),
    Block("wave equation 16x1024x1024", wave_equation, lambda m: [m(16, 1024, 1024) for _ in range(3)]),
    Block("fft filter 8x768x4096", filtered_by_fft, lambda m: [m(8, 768, 4096), m(768, 4096)]),
    Block("exponential average 16x1024x512", exponential_average, lambda m: [m(16, 1024, 512), m(512) + 6]),
    Block("overlaps 4096x4096", overlaps, lambda m: [m(4096, 4), m(4096, 4)]),
    Block("splats 16384x512", splats, lambda m: [m(16384, 2), m(512, 2), m(512, 2, 2), m(512, 3)]),
    Block("quaternion rotation 4000000", quaternion_rotation, lambda m: [m(4000000, 4), m(4000000, 3)]),
    Block("covariance loss 8192x2048 step", whitened, lambda m: [m(8192, 2048)], training=True),
    Block("four indices 48", four_indices, lambda m: [m(48, 48, 48, 48), m(48, 48, 48, 48)]),
    Block(
        "set pooling 256x200x256 step",
        set_pooling,
        lambda m: [m(256, 200, 256), (m(256, 200) > 0).to(torch.bfloat16), m(256, 256) * 0.06, m(128, 512) * 0.05],
        training=True,
    ),
    Block("histogram loss 64x65536x32 step", histogram_loss, lambda m: [m(64, 65536), m(64, 65536), m(32)], training=True),
    Block("adam step of 50000000", adam_step, lambda m: [m(50000000) for _ in range(4)]),
    Block("standardised 512x256x384", standardised, lambda m: [m(512, 256, 384)]),
)
