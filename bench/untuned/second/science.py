"""Blocks of geometry, statistics, physics, graphs, reinforcement learning, and matmuls of skewed sizes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def chamfer(a: Tensor, b: Tensor) -> Tensor:
    d = ((a[:, :, None] - b[:, None]) ** 2).sum(-1)
    return d.min(2).values.mean() + d.min(1).values.mean()


def edge_convolution(x: Tensor, w: Tensor) -> Tensor:
    """DGCNN's layer: 20 nearest points, a shared matmul, the largest of each channel; x of (batch, channels, points)."""
    inner = -2 * torch.matmul(x.transpose(2, 1), x)
    xx = torch.sum(x**2, dim=1, keepdim=True)
    near = (-xx - inner - xx.transpose(2, 1)).topk(min(20, x.shape[2]), dim=-1)[1]
    n, c, p = x.shape
    flat = x.transpose(2, 1).reshape(n * p, c)
    got = flat[(near + torch.arange(n, device=x.device).view(-1, 1, 1) * p).view(-1)].view(n, p, -1, c)
    mine = x.transpose(2, 1)[:, :, None].expand(-1, -1, got.shape[2], -1)
    return F.leaky_relu(F.linear(torch.cat((got - mine, mine), 3), w), 0.2).max(2)[0]


def rodrigues(axis: Tensor, points: Tensor) -> Tensor:
    """Rotations by vectors, of (n, points, 3)."""
    angle = torch.norm(axis + 1e-8, dim=1, keepdim=True)
    u = axis / angle
    c, s = torch.cos(angle)[..., None], torch.sin(angle)[..., None]
    zero = torch.zeros_like(u[:, 0])
    k = torch.stack([zero, -u[:, 2], u[:, 1], u[:, 2], zero, -u[:, 0], -u[:, 1], u[:, 0], zero], 1).view(-1, 3, 3)
    r = torch.eye(3, device=axis.device, dtype=axis.dtype)[None] + s * k + (1 - c) * torch.bmm(k, k)
    return torch.bmm(points, r.transpose(1, 2))


def six_d(x: Tensor, y: Tensor) -> Tensor:
    """Two vectors to a rotation by Gram and Schmidt, its angle to another one."""

    def matrix(v: Tensor) -> Tensor:
        a = F.normalize(v[..., :3], dim=-1)
        b = F.normalize(v[..., 3:] - (a * v[..., 3:]).sum(-1, keepdim=True) * a, dim=-1)
        return torch.stack((a, b, torch.cross(a, b, dim=-1)), -2)

    trace = torch.einsum("nij,nij->n", matrix(x), matrix(y))
    return torch.acos(((trace - 1) / 2).clamp(-0.999, 0.999)).mean()


def lennard_jones(x: Tensor) -> Tensor:
    """Energy in a periodic box of 10."""
    d = x[:, None] - x[None]
    d = d - 10 * torch.round(d / 10)
    r2 = (d**2).sum(-1) + torch.eye(x.shape[0], device=x.device, dtype=x.dtype) * 100 + 0.5
    s = 1.0 / r2**3
    return torch.where(r2 < 6.25, 4 * (s * s - s), torch.zeros_like(s)).sum() / 2


def segment_softmax(score: Tensor, values: Tensor, target: Tensor, nodes: Tensor) -> Tensor:
    n = nodes.shape[0]
    at = target[:, None].expand_as(score)
    top = torch.full((n, score.shape[1]), -1e9, device=score.device, dtype=score.dtype)
    top = top.scatter_reduce(0, at, score, "amax").detach()
    e = torch.exp(score - top[target])
    share = e / (torch.zeros_like(top).scatter_add(0, at, e)[target] + 1e-9)
    return torch.zeros_like(nodes).index_add(0, target, (share[..., None] * values).flatten(1))


def mean_of_adjacent(x: Tensor, source: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """GraphSAGE: a mean and the largest of adjacent nodes."""
    at = target[:, None].expand(-1, x.shape[1])
    mean = torch.zeros_like(x).scatter_reduce(0, at, x[source], "mean", include_self=False)
    top = torch.zeros_like(x).scatter_reduce(0, at, x[source], "amax")
    return F.normalize(F.relu(F.linear(torch.cat([x, mean, top], 1), w)), dim=1)


def dense_graph(x: Tensor, adjacency: Tensor, w: Tensor) -> Tensor:
    a = (adjacency > 1.5).to(x.dtype) + torch.eye(x.shape[0], device=x.device, dtype=x.dtype)
    d = a.sum(1).pow(-0.5)
    return F.relu(d[:, None] * a * d[None] @ (x @ w))


def statistics(x: Tensor) -> tuple[Tensor, ...]:
    """Moments down the middle of three dimensions."""
    d = x - x.mean(1, keepdim=True)
    s = d.pow(2).mean(1).sqrt()
    return d.pow(3).mean(1) / s**3, d.pow(4).mean(1) / s**4 - 3, x.amax(1) - x.amin(1), x.argmax(1)


def mixed_reductions(x: Tensor) -> tuple[Tensor, ...]:
    return x.logsumexp((0, 2)), x.var((1, 3)), torch.linalg.vector_norm(x, 3, (0, 1)), x.prod(3).sum(1)


def advantages(rewards: Tensor, values: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
    """Discounted sums by a reversed cumulative sum, normalised."""
    t = torch.arange(rewards.shape[1], device=rewards.device, dtype=rewards.dtype)
    scale = 0.99**t
    kept = rewards * (done < 1).to(rewards.dtype)
    back = torch.flip(torch.cumsum(torch.flip(kept * scale, (1,)), 1), (1,)) / scale
    a = back - values
    return back, (a - a.mean()) / (a.std() + 1e-8)


def moving_statistics(x: Tensor) -> Tensor:
    """z scores against a window of 20 steps, by cumulative sums."""
    s, q = F.pad(x.cumsum(1), (1, 0)), F.pad((x * x).cumsum(1), (1, 0))
    mean, square = (s[:, 20:] - s[:, :-20]) / 20, (q[:, 20:] - q[:, :-20]) / 20
    return (x[:, 19:] - mean) / (square - mean**2).clamp(min=1e-6).sqrt()


def ppo(logits: Tensor, old: Tensor, actions: Tensor, advantage: Tensor, value: Tensor, returns: Tensor) -> Tensor:
    logp = F.log_softmax(logits, -1)
    chosen = logp.gather(1, actions[:, None]).squeeze(1)
    ratio = torch.exp(chosen - old)
    clipped = torch.min(ratio * advantage, torch.clamp(ratio, 0.8, 1.2) * advantage)
    entropy = -(logp.exp() * logp).sum(-1)
    return -clipped.mean() + 0.5 * F.smooth_l1_loss(value, returns) - 0.01 * entropy.mean()


def policy(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A squashed Gaussian policy's action and log probability."""
    h = torch.tanh(F.linear(torch.tanh(F.linear(x, w1, b1)), w2, b2))
    mean, log_std = F.linear(h, w3).chunk(2, -1)
    std = log_std.clamp(-5, 2).exp()
    u = mean + std * noise
    logp = (
        -((u - mean) ** 2) / (2 * std**2) - log_std - 0.5 * math.log(2 * math.pi) - 2 * (math.log(2) - u - F.softplus(-2 * u))
    )
    return torch.tanh(u), logp.sum(-1)


def complex_matmul(ar: Tensor, ai: Tensor, br: Tensor, bi: Tensor) -> tuple[Tensor, Tensor]:
    """A complex matmul by real ones; magnitude and phase."""
    r, i = ar @ br - ai @ bi, ar @ bi + ai @ br
    return torch.sqrt(r * r + i * i + 1e-12), torch.atan2(i, r)


def kalman(x: Tensor, p: Tensor, z: Tensor, f: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One step of many filters of 4 states and 2 measurements."""
    x, p = (
        torch.einsum("ij,bj->bi", f, x),
        f @ (p @ p.transpose(1, 2)) @ f.t() + 0.1 * torch.eye(4, device=x.device, dtype=x.dtype),
    )
    s = h @ p @ h.t() + torch.eye(2, device=x.device, dtype=x.dtype)
    det = s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]
    inverse = torch.stack([s[:, 1, 1], -s[:, 0, 1], -s[:, 1, 0], s[:, 0, 0]], -1).view(-1, 2, 2) / det[:, None, None]
    gain = p @ h.t() @ inverse
    x = x + (gain @ (z - x @ h.t())[..., None]).squeeze(-1)
    return x, p - gain @ h @ p


def mixture(x: Tensor, mean: Tensor, log_std: Tensor, logits: Tensor) -> Tensor:
    """Log likelihood of a mixture of diagonal Gaussians."""
    z = (x[:, None] - mean[None]) * torch.exp(-log_std * 0.1)[None]
    log_p = -0.5 * (z**2).sum(-1) - 0.1 * log_std.sum(-1) + F.log_softmax(logits, -1)
    return -torch.logsumexp(log_p, 1).mean()


def camera_chain(a: Tensor, b: Tensor, points: Tensor) -> Tensor:
    """Homogeneous transforms of 4x4, points projected."""
    t = a @ b @ a
    p = torch.cat([points, torch.ones_like(points[..., :1])], -1)
    y = torch.matmul(t[:, None], p[..., None]).squeeze(-1)
    return y[..., :2] / (y[..., 2:3].abs() + 0.1)


def point_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.tanh(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2))


def best_match(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = a @ b
    return s.max(-1).values, s.argmax(-1), torch.softmax(s * 0.05, -1).square().sum(-1)


def transposed_views(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    """Matmuls of strided slices and transposed views, a bias by row."""
    return F.gelu(x[:, ::2].t() @ y[1:].t().contiguous().t()[:, 1:] + b[:, None])


def hardest_triplets(x: Tensor, labels: Tensor) -> Tensor:
    e = F.normalize(x, dim=1)
    d = (2 - 2 * e @ e.t()).clamp(min=1e-9).sqrt()
    same = labels[:, None] == labels[None]
    far = (d * same).max(1)[0]
    near = (d + d.max().detach() * same).min(1)[0]
    return F.relu(far - near + 0.3).mean()


def supervised_contrast(x: Tensor, labels: Tensor) -> Tensor:
    e = F.normalize(x, dim=1)
    s = e @ e.t() / 0.07
    s = s - s.max(1, keepdim=True)[0].detach()
    other = 1 - torch.eye(x.shape[0], device=x.device, dtype=x.dtype)
    mask = (labels[:, None] == labels[None]).to(x.dtype) * other
    log_p = s - torch.log((s.exp() * other).sum(1, keepdim=True))
    return -((mask * log_p).sum(1) / mask.sum(1).clamp(min=1)).mean()


def queue_contrast(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """InfoNCE against a queue (MoCo)."""
    q, k = F.normalize(q, dim=1), F.normalize(k, dim=1)
    logits = torch.cat([torch.einsum("nc,nc->n", q, k)[:, None], torch.einsum("nc,ck->nk", q, queue.detach())], 1) / 0.2
    return F.cross_entropy(logits, torch.zeros(q.shape[0], dtype=torch.long, device=q.device))


def barlow(a: Tensor, b: Tensor) -> Tensor:
    a, b = (a - a.mean(0)) / a.std(0), (b - b.mean(0)) / b.std(0)
    c = a.t() @ b / a.shape[0]
    on = (torch.diagonal(c) - 1).pow(2).sum()
    n = c.shape[0]
    off = c.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()
    return on + 0.005 * off.pow(2).sum()


def ranking(score: Tensor, relevance: Tensor) -> Tensor:
    """Pairwise logistic loss over the upper triangle."""
    s, r = score[:, :, None] - score[:, None], relevance.detach()[:, :, None] - relevance.detach()[:, None]
    pair = torch.triu(torch.ones_like(s[0]), diagonal=1)
    return (F.softplus(-s * torch.sign(r)) * pair).sum((1, 2)).mean()


def quantiles(prediction: Tensor, y: Tensor) -> Tensor:
    q = torch.arange(1, prediction.shape[-1] + 1, device=y.device, dtype=y.dtype) / (prediction.shape[-1] + 1)
    e = y[..., None] - prediction
    return torch.max(q * e, (q - 1) * e).sum(-1).mean() + F.huber_loss(prediction.mean(-1), y, delta=0.5)


def reaction(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Four steps of Gray and Scott's equations on a torus."""

    def laplace(x: Tensor) -> Tensor:
        return torch.roll(x, 1, -1) + torch.roll(x, -1, -1) + torch.roll(x, 1, -2) + torch.roll(x, -1, -2) - 4 * x

    for _ in range(4):
        uvv = u * v * v
        u, v = u + 0.16 * laplace(u) - uvv + 0.035 * (1 - u), v + 0.08 * laplace(v) + uvv - 0.1 * v
    return u, v


def grey_histogram(x: Tensor, weights: Tensor) -> Tensor:
    """Equalised values: a histogram by scatter_add, its cumulative sum, looked up."""
    h = torch.zeros(x.shape[0], 256, device=x.device, dtype=torch.float32).scatter_add(1, x, weights.float().abs())
    c = h.cumsum(1)
    return torch.gather(c / c[:, -1:], 1, x)


def norm_lstm(xs: Tensor, h: Tensor, c: Tensor, wx: Tensor, wh: Tensor, g: Tensor) -> Tensor:
    """A layer-normed LSTM over the steps of xs."""
    for t in range(xs.shape[1]):
        gates = F.layer_norm(xs[:, t] @ wx + h @ wh, (wx.shape[1],), g[0], g[1])
        i, f, o, n = gates.chunk(4, 1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(n)
        h = torch.sigmoid(o) * torch.tanh(c)
    return h


def runge_kutta(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    def f(y: Tensor) -> Tensor:
        return torch.tanh(y @ w1 + b1) @ w2

    for _ in range(2):
        k1 = f(x)
        k2 = f(x + 0.05 * k1)
        k3 = f(x + 0.05 * k2)
        x = x + 0.1 / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + 0.1 * k3))
    return x


def harmonics(v: Tensor) -> Tensor:
    """Real spherical harmonics to degree 2, and a radial basis with a cutoff."""
    r = v.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    x, y, z = (v / r).unbind(-1)
    y2 = [1.0925 * x * y, 1.0925 * y * z, 0.3154 * (3 * z * z - 1), 1.0925 * x * z, 0.5463 * (x * x - y * y)]
    angular = torch.stack([torch.full_like(x, 0.2821), 0.4886 * y, 0.4886 * z, 0.4886 * x, *y2], -1)
    n = torch.arange(1, 9, device=v.device, dtype=v.dtype)
    radial = math.sqrt(2 / 5) * torch.sin(n * math.pi * r / 5) / r * (0.5 * torch.cos(math.pi * r.clamp(max=5) / 5) + 0.5)
    return torch.einsum("na,nb->nab", angular, radial).flatten(1)


def mmd(x: Tensor, y: Tensor) -> Tensor:
    z = torch.cat([x, y])
    d = torch.cdist(z, z).pow(2)
    k = sum(torch.exp(-d / (x.shape[1] * s)) for s in (0.5, 1.0, 2.0, 4.0))
    n = x.shape[0]
    return k[:n, :n].mean() + k[n:, n:].mean() - 2 * k[:n, n:].mean()


def bilinear_pool(x: Tensor, y: Tensor) -> Tensor:
    o = torch.einsum("bci,bdi->bcd", x, y).flatten(1) / x.shape[2]
    return F.normalize(torch.sign(o) * torch.sqrt(o.abs() + 1e-8), dim=1)


def autocast_mlp(x: Tensor, g: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Weights in float32, matmuls in bfloat16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        y = F.layer_norm(x, x.shape[-1:], g[0], g[1])
        return x + F.linear(F.gelu(F.linear(y, w1, b1)), w2)


def learned_steps(x: Tensor, w: Tensor, step: Tensor) -> Tensor:
    """A linear layer whose weights and inputs are quantised with learned steps (LSQ)."""

    def rounded(t: Tensor) -> Tensor:
        return t + (t.round() - t).detach()

    s = step.abs() + 0.02
    q = rounded((w / s[:, None]).clamp(-8, 7)) * s[:, None]
    return F.linear(rounded(x.clamp(-4, 4) * 8) / 8, q)


def confusion(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    c = logits.shape[1]
    found = logits.argmax(1)
    counts = torch.zeros(c * c, device=logits.device).scatter_add(
        0, labels * c + found, torch.ones_like(found, dtype=torch.float32)
    )
    return counts.view(c, c), (found == labels).float().mean()


def _graph(m: Make, nodes: int, number: int) -> list[Tensor]:
    return [ids(m, nodes, number), ids(m, nodes, number)]


def _lstm(m: Make, b: int, t: int, d: int) -> list[Tensor]:
    return [m(b, t, d), m(b, d), m(b, d), m(d, 4 * d) * d**-0.5, m(d, 4 * d) * d**-0.5, m(2, 4 * d)]


SEGMENTS = Sized(segment_softmax, lambda m, n, e, h, d: [m(e, h), m(e, h, d), ids(m, n, e), m(n, h * d)], (7, 20, 2, 3), SINGLE)
MLP = Sized(
    autocast_mlp, lambda m, n, d: [m(n, d), m(2, d), weight(m, 3 * d, d), m(3 * d), weight(m, d, 3 * d)], (5, 16), SINGLE
)
POINTS = Sized(point_mlp, lambda m, n, i, h, o: [m(n, i), weight(m, h, i), m(h), weight(m, o, h), m(o)], (9, 7, 5, 3), HALF)
CHAMFER = Sized(chamfer, lambda m, n, p, q: [m(n, p, 3), m(n, q, 3)], (2, 9, 7), SINGLE)

BLOCKS: tuple[Block, ...] = (
    *CHAMFER.both("chamfer", 8, 2000, 2048),
    Sized(edge_convolution, lambda m, n, c, p: [m(n, c, p), weight(m, 64, 2 * c)], (2, 3, 30), SINGLE, tf32=True).block(
        "edge convolution", 8, 64, 1024
    ),
    Sized(rodrigues, lambda m, n, p: [m(n, 3), m(n, p, 3)], (5, 7), SINGLE).block("rotations", 5000, 24, training=True),
    Sized(six_d, lambda m, n: [m(n, 6), m(n, 6)], (9,), SINGLE).block("angles of rotations", 200000, training=True),
    Sized(lennard_jones, lambda m, n: [m(n, 3) * 4], (12,), SINGLE).block("lennard-jones", 2000, training=True),
    SEGMENTS.block("softmax of segments", 20000, 200000, 4, 16),
    SEGMENTS.block("softmax of segments", 5000, 60000, 2, 32, training=True),
    Sized(
        mean_of_adjacent, lambda m, n, e, d: [m(n, d), *_graph(m, n, e), weight(m, d, 3 * d)], (9, 30, 6), SINGLE, tf32=True
    ).block("mean of adjacent nodes", 10000, 100000, 100),
    Sized(dense_graph, lambda m, n, i, o: [m(n, i), m(n, n), m(i, o) * i**-0.5], (9, 12, 5), SINGLE, tf32=True).block(
        "dense graph", 2708, 1433, 16, training=True
    ),
    Sized(statistics, lambda m, a, b, c: [m(a, b, c)], (3, 11, 5), SINGLE).block("moments", 500, 4000, 3),
    Sized(mixed_reductions, lambda m, a, b, c, d: [m(a, b, c, d)], (3, 5, 7, 3), SINGLE).block(
        "mixed reductions", 33, 127, 65, 3
    ),
    Sized(advantages, lambda m, n, t: [m(n, t), m(n, t), ids(m, 2, n, t)], (3, 9), SINGLE).block("advantages", 2048, 128),
    Sized(moving_statistics, lambda m, n, t: [m(n, t)], (3, 50), SINGLE).block("moving statistics", 1000, 5000),
    Sized(ppo, lambda m, n, a: [m(n, a), m(n), ids(m, a, n), m(n), m(n), m(n)], (9, 5), SINGLE).block(
        "ppo", 4096, 18, training=True
    ),
    Sized(
        policy,
        lambda m, n, d, a: [m(n, d), weight(m, 64, d), m(64), weight(m, 64, 64), m(64), weight(m, 2 * a, 64), m(n, a)],
        (1, 13, 3),
        SINGLE,
    ).block("policy", 1, 13, 3),
    Sized(complex_matmul, lambda m, n, k, p: [m(n, k), m(n, k), m(k, p), m(k, p)], (5, 7, 6), SINGLE, tf32=True).block(
        "complex matmul", 1023, 511, 769
    ),
    Sized(kalman, lambda m, n: [m(n, 4), m(n, 4, 4), m(n, 2), m(4, 4), m(2, 4)], (5,), SINGLE).block("kalman", 50000),
    Sized(mixture, lambda m, n, k, d: [m(n, d), m(k, d), m(k, d), m(k)], (9, 5, 4), SINGLE).block(
        "mixture", 20000, 37, 16, training=True
    ),
    Sized(camera_chain, lambda m, n, p: [m(n, 4, 4), m(n, 4, 4), m(n, p, 3)], (3, 5), SINGLE).block("camera chain", 1000, 100),
    *POINTS.both("point mlp", 1000000, 7, 64, 3),
    Sized(best_match, lambda m, n, k, p: [m(n, k), m(k, p)], (9, 5, 7), HALF).block("best match", 4099, 513, 1023),
    Sized(transposed_views, lambda m, n, k, p: [m(n, 2 * k), m(n + 1, p + 1), m(k)], (9, 5, 7), HALF).block(
        "transposed views", 1500, 700, 1200
    ),
    Sized(transposed_views, lambda m, n, k, p: [m(n, 2 * k), m(n + 1, p + 1), m(k)], (9, 5, 7), SINGLE).block(
        "transposed views without tf32", 1500, 700, 1200, training=True
    ),
    Sized(hardest_triplets, lambda m, n, d: [m(n, d), ids(m, 50, n)], (12, 6), SINGLE, tf32=True).block(
        "hardest triplets", 1536, 256, training=True
    ),
    Sized(supervised_contrast, lambda m, n, d: [m(n, d), ids(m, 50, n)], (12, 6), SINGLE, tf32=True).block(
        "supervised contrast", 2000, 128, training=True
    ),
    Sized(queue_contrast, lambda m, n, d, k: [m(n, d), m(n, d), m(d, k) * d**-0.5], (4, 6, 9), HALF).block(
        "contrast with a queue", 256, 128, 65536, training=True
    ),
    Sized(barlow, lambda m, n, d: [m(n, d), m(n, d)], (9, 6), SINGLE, tf32=True).block("barlow", 1000, 2050, training=True),
    Sized(ranking, lambda m, n, d: [m(n, d), m(n, d)], (3, 7), SINGLE).block("ranking", 128, 200, training=True),
    Sized(quantiles, lambda m, n, t, q: [m(n, t, q), m(n, t)], (3, 5, 9), SINGLE).block(
        "quantiles", 2000, 96, 9, training=True
    ),
    Sized(reaction, lambda m, n, s: [m(n, s, s), m(n, s, s)], (1, 7), SINGLE).block("reaction", 4, 1000),
    Sized(grey_histogram, lambda m, n, p: [ids(m, 256, n, p), m(n, p)], (2, 40), SINGLE).block("grey histogram", 32, 65536),
    *Sized(norm_lstm, _lstm, (2, 3, 8), HALF).both("layer-normed lstm", 37, 12, 200),
    Sized(
        runge_kutta, lambda m, n, d, h: [m(n, d), m(d, h) * d**-0.5, m(h), m(h, d) * h**-0.5], (5, 6, 8), SINGLE, tf32=True
    ).block("runge-kutta", 2000, 64, 200, training=True),
    Sized(harmonics, lambda m, n: [m(n, 3)], (9,), SINGLE).block("harmonics", 300000, training=True),
    Sized(mmd, lambda m, n, d: [m(n, d), m(n, d)], (7, 5), SINGLE).block("mmd", 1000, 64, training=True),
    Sized(bilinear_pool, lambda m, n, c, p: [m(n, c, p), m(n, c, p)], (2, 5, 9), HALF).block("bilinear pool", 32, 250, 196),
    *MLP.both("autocast mlp", 3000, 770),
    Sized(learned_steps, lambda m, n, i, o: [m(n, i), weight(m, o, i), m(o) * 0.1], (5, 8, 6)).block(
        "learned steps", 3000, 1000, 500, training=True
    ),
    Sized(confusion, lambda m, n, c: [m(n, c), ids(m, c, n)], (40, 5), HALF).block("confusion", 200000, 19),
)
