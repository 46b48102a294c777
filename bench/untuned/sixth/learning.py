"""Blocks of learning: recommendation, graphs, reinforcement, optimisers' parts, codes of few bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def field_aware(tokens: Tensor, table: Tensor, first: Tensor) -> Tensor:
    """Each field's feature has a vector for every other field: dot products of all pairs, and a linear term."""
    fields = tokens.shape[1]
    v = table[tokens]
    cross = (v * v.transpose(1, 2)).sum(-1)
    return first[tokens].sum(1) + cross.triu(1).sum((1, 2)) / fields


def bilinear_pairs(x: Tensor, squeeze: Tensor, excite: Tensor, w: Tensor) -> Tensor:
    """FiBiNET: fields weighted by their means, then a bilinear term for each pair of fields, by index."""
    fields = x.shape[1]
    scale = F.relu(F.linear(F.relu(F.linear(x.mean(-1), squeeze)), excite))
    rows, columns = torch.triu_indices(fields, fields, 1, device=x.device).unbind(0)
    pairs = [(torch.einsum("bfd,fde->bfe", t, w)[:, rows] * t[:, columns]).sum(-1) for t in (x, x * scale[..., None])]
    return torch.cat(pairs, 1)


def two_towers(users: Tensor, items: Tensor, names: Tensor, counts: Tensor) -> Tensor:
    """Softmax over the batch's items: logarithms of their frequencies subtracted, accidental hits hidden."""
    scores = F.normalize(users, dim=-1) @ F.normalize(items, dim=-1).mT
    scores = scores.float() / 0.05 - torch.log(counts.float().abs() + 1e-3)
    same = (names[:, None] == names[None]) & ~torch.eye(len(names), dtype=torch.bool, device=names.device)
    return F.cross_entropy(scores.masked_fill(same, -1e9), torch.arange(len(names), device=names.device))


def quotients(tokens: Tensor, high: Tensor, low: Tensor, w: Tensor) -> Tensor:
    """Embeddings by quotient and remainder, multiplied; their outer products with themselves; a linear layer."""
    k = len(low)
    x = high[tokens // k] * low[tokens % k]
    cross = torch.einsum("bfd,bgd->bfg", x, x).flatten(1)
    return F.linear(torch.cat([x.sum(1), cross], 1), w)


def compressed_interactions(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """xDeepFM: outer products of fields for each component, mixed by convolutions of width one, in two layers."""
    b, _f, d = x.shape
    h, found = x, []
    for w in (w1, w2):
        outer = torch.einsum("bfd,bgd->bfgd", x, h).reshape(b, -1, d)
        h = F.relu(F.conv1d(outer, w[:, :, None]))
        found.append(h.sum(-1))
    return torch.cat(found, 1)


def pointwise_attention(x: Tensor, w: Tensor, out: Tensor, times: Tensor, by_time: Tensor, by_place: Tensor) -> Tensor:
    """HSTU: SiLU of four projections, SiLU of scores with biases by place and by logarithm of time apart, a gated norm."""
    b, n, d = x.shape
    heads = 4
    u, v, q, k = F.silu(F.linear(F.layer_norm(x, (d,)), w)).chunk(4, -1)
    q, k, v = (t.view(b, n, heads, -1).transpose(1, 2) for t in (q, k, v))
    clock = times.abs().float().cumsum(-1)
    apart = (torch.log1p((clock[:, :, None] - clock[:, None]).abs() * 60) * 3).long().clamp(max=len(by_time) - 1)
    at = torch.arange(n, device=x.device)
    bias = by_time[apart] + by_place[(at[:, None] - at[None]).clamp(min=0)]
    scores = F.silu(q @ k.mT + bias[:, None]) / n
    y = scores.masked_fill(at[:, None] < at[None], 0.0) @ v
    return x + F.linear(F.layer_norm(y.transpose(1, 2).flatten(2), (d,)) * u, out)


def propagated(x: Tensor, edges: Tensor, weights: Tensor) -> Tensor:
    """APPNP: ten steps along edges, each node's sum divided by degrees' roots, a tenth of the start kept."""
    n = len(x)
    source, target = edges.unbind(0)
    w = weights.abs()
    degree = torch.zeros(n, device=x.device, dtype=x.dtype).index_add(0, target, w) + 1
    norm = degree.rsqrt()
    w = w * norm[source] * norm[target]
    y = x
    for _ in range(10):
        y = 0.9 * (torch.zeros_like(y).index_add(0, target, y[source] * w[:, None]) + y * (norm**2)[:, None]) + 0.1 * x
    return y


def relations(x: Tensor, edges: Tensor, kinds: Tensor, bases: Tensor, shares: Tensor, own: Tensor) -> Tensor:
    """RGCN: weights of each relation from few bases, messages averaged by relation and node."""
    source, target = edges.unbind(0)
    n, r = len(x), len(shares)
    place = target * r + kinds
    count = torch.zeros(n * r, device=x.device, dtype=x.dtype).index_add(0, place, torch.ones_like(target, dtype=x.dtype))
    share = shares[kinds] / count[place].clamp(min=1)[:, None]
    made = torch.einsum("nd,kde->nke", x, bases)
    message = (made[source] * share[..., None]).sum(1)
    return F.relu(F.linear(x, own).index_add(0, target, message))


def distant_nodes(x: Tensor, apart: Tensor, path: Tensor, table: Tensor, edge: Tensor, qkv: Tensor) -> Tensor:
    """Graphormer: scores of nodes with a bias by distance and the mean of edge features along the shortest path."""
    b, n, d = x.shape
    heads = table.shape[1]
    q, k, v = F.linear(x, qkv).view(b, n, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
    length = apart.clamp(min=1)[..., None]
    bias = table[apart] + edge[path].sum(3) / length
    scores = q @ k.mT * (d // heads) ** -0.5 + bias.permute(0, 3, 1, 2)
    scores = scores.masked_fill((apart == len(table) - 1)[:, None], -1e4)
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)


def munchausen(values: Tensor, later: Tensor, target: Tensor, actions: Tensor, rewards: Tensor, done: Tensor) -> Tensor:
    """Soft Q-learning whose reward has the clipped logarithm of the policy, Huber's loss, n-step returns in a loop."""
    at = actions[..., None]
    logp = (target / 0.03).log_softmax(-1).gather(-1, at)[..., 0].mul(0.03).clamp(-1, 0)
    soft = later / 0.03
    p = soft.softmax(-1)
    value = (p * (later - 0.03 * soft.log_softmax(-1))).sum(-1)
    keep = (done < 1).to(rewards.dtype)
    back, found = value[-1], []
    for t in reversed(range(len(rewards))):
        back = rewards[t] + 0.9 * logp[t] + 0.99 * keep[t] * (0.7 * back + 0.3 * value[t])
        found.append(back)
    returns = torch.stack(found[::-1]).detach()
    return F.smooth_l1_loss(values.gather(-1, at)[..., 0], returns)


def replayed(priorities: Tensor, draws: Tensor, states: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Prioritised replay: strata of the running sum, weights of importance, rows gathered, priorities written back."""
    total = (priorities.abs() + 1e-3).pow(0.6).cumsum(0)
    b = len(draws)
    at = (torch.arange(b, device=draws.device) + draws.sigmoid()) / b * total[-1]
    which = torch.searchsorted(total, at).clamp(max=len(total) - 1)
    p = torch.diff(total, prepend=total.new_zeros(1))[which] / total[-1]
    w = (len(total) * p).pow(-0.4)
    priorities.index_copy_(0, which, errors.abs())
    return states[which], w / w.max()


def inverse_roots(momentum: Tensor, grad: Tensor, left: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Shampoo: a moving statistic in place, its inverse fourth root by Newton's coupled steps, the step grafted on Adam's."""
    left.lerp_(grad @ grad.mT / grad.shape[-1], 0.05)
    n = left.shape[-1]
    eye = torch.eye(n, device=grad.device, dtype=grad.dtype)
    a = left + 1e-3 * left.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None] * eye
    z = 5 / (2 * a.square().sum((-2, -1), keepdim=True).sqrt())
    m, x = a * z, eye * z**0.25
    for _ in range(6):
        t = (5 * eye - m) / 4
        x, m = x @ t, torch.linalg.matrix_power(t, 4) @ m
    step = x @ (momentum.lerp_(grad, 0.1))
    size = grad.abs().mean((-2, -1), keepdim=True) / step.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-9)
    p.mul_(1 - 1e-4).sub_(step * size)
    return left, p


def prodigy(*tensors: Tensor) -> None:
    """An optimiser that finds its rate: dot products over all parameters, moments and distances in place."""
    n = len(tensors) // 5
    params, grads, starts, first, second = (tensors[i * n : (i + 1) * n] for i in range(5))
    d = 1e-2
    top, sums = torch.zeros((), device=params[0].device), torch.zeros((), device=params[0].device)
    for p, g, s, m, v in zip(params, grads, starts, first, second, strict=True):
        top = top + d * torch.dot(g.flatten(), (s - p).flatten())
        m.mul_(0.9).add_(g, alpha=0.1 * d)
        v.mul_(0.999).addcmul_(g, g, value=0.001 * d * d)
        sums = sums + m.abs().sum()
    rate = torch.clamp(top.abs() / (sums + 1e-6), min=d)
    for p, m, v in zip(params, first, second, strict=True):
        p.sub_(rate * m / (v.sqrt() + rate * 1e-8))


def group_scaled(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Rows coded to int8 in groups of 64; sums of each group in float32, times both scales."""
    b, _k = x.shape
    groups = x.float().view(b, -1, 64)
    step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    q = torch.round(groups / step).clamp(-127, 127)
    part = torch.einsum("bgk,ngk->bng", q, codes.view(len(codes), -1, 64).float())
    return (part * step[..., 0][:, None] * scales[None].float()).sum(-1).to(x.dtype)


def error_feedback(w: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """GPTQ within a block: columns coded one after the other, each error spread over the columns to come."""
    n = w.shape[1]
    scale = w.abs().amax(1) / 7
    codes, losses = [], torch.zeros(len(w), device=w.device)
    for i in range(n):
        column, root = w[:, i], inverse[i, i].abs() + 1
        code = torch.round(column / scale).clamp(-8, 7)
        error = (column - code * scale) / root
        codes.append(code.to(torch.int8))
        losses = losses + error.square() / 2
        w = w - torch.cat([torch.zeros_like(w[:, : i + 1]), error[:, None] * inverse[i, i + 1 :][None]], 1)
    return torch.stack(codes, 1), losses


def searched_scales(x: Tensor, w: Tensor) -> Tensor:
    """AWQ: ten powers of the inputs' mean size, weights coded to four bits with each, the least loss's scales."""
    size = x.abs().mean(0).clamp(min=1e-4)
    exact = x @ w.mT
    losses, scales = [], []
    for i in range(10):
        s = size ** (i / 10)
        s = s / (s.max() * s.min()).sqrt()
        groups = (w * s).unflatten(1, (-1, 32))
        step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 7
        coded = ((groups / step).round().clamp(-8, 7) * step).flatten(1) / s
        losses.append((x @ coded.mT - exact).float().square().mean())
        scales.append(s)
    return torch.stack(scales).index_select(0, torch.stack(losses).argmin()[None])[0]


def normal_codes(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NF4's encoding: nearest of 16 levels in blocks of 64, two codes in a byte, scales coded to 8 bits again."""
    levels = [-1, -0.696, -0.525, -0.395, -0.284, -0.185, -0.091, 0, 0.08, 0.161, 0.246, 0.338, 0.441, 0.563, 0.723, 1]
    table = torch.tensor(levels, device=w.device)
    blocks = w.float().view(-1, 64)
    top = blocks.abs().amax(1)
    edges = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / top.clamp(min=1e-8)[:, None], edges).to(torch.uint8)
    packed = (codes[:, ::2] << 4) | codes[:, 1::2]
    means = top.view(-1, 16)
    low = means.mean()
    step = (means - low).abs().amax(1, keepdim=True) / 127
    return packed, ((means - low) / step).round().to(torch.int8), step


def rotated_codes(x: Tensor, signs: Tensor) -> Tensor:
    """QuaRot: random signs, a Hadamard transform by butterflies, rows coded to four bits, and back."""
    b, n = x.shape
    y = x * torch.sign(signs)
    width = 1
    while width < n:
        a, c = y.view(b, -1, 2, width).unbind(2)
        y = torch.stack([a + c, a - c], 2).view(b, n)
        width *= 2
    y = y * n**-0.5
    step = y.abs().amax(-1, keepdim=True) / 7
    coded = torch.round(y / step)
    return y + (coded * step - y).detach()


def rounded_masters(p: Tensor, grad: Tensor, m: Tensor, noise: Tensor) -> Tensor:
    """Weights in 16 bits: the step in float32, its low bits rounded up as often as they are large."""
    m.lerp_(grad.to(m.dtype), 0.1)
    wide = p * (1 - 1e-3) - 1e-2 * m
    bits = wide.float().view(torch.int32) + (noise & 0xFFFF)
    return (bits & -65536).view(torch.float32).to(p.dtype)


def _edges(m: Make, n: int, e: int) -> Tensor:
    return ids(m, n, 2, e)


def _prodigy(m: Make, n: int, size: int) -> list[Tensor]:
    shapes = [(size, size + i) if i % 2 else (size * (i + 1),) for i in range(n)]
    made = [[m(*s).float() for s in shapes] for _ in range(5)]
    return [*(t for ts in made[:4] for t in ts), *(t.abs() for t in made[4])]


HSTU = Sized(
    pointwise_attention,
    lambda m, b, n, d, t: [m(b, n, d), weight(m, 4 * d, d), weight(m, d, d), m(b, n), m(t), m(n)],
    (2, 9, 16, 24),
)
SPREAD = Sized(propagated, lambda m, n, e, d: [m(n, d), _edges(m, n, e), m(e)], (9, 20, 6), SINGLE)
TYPED = Sized(
    relations,
    lambda m, n, e, d, r, k: [m(n, d), _edges(m, n, e), ids(m, r, e), weight(m, k, d, d), m(r, k), weight(m, d, d)],
    (9, 30, 6, 3, 2),
    tf32=True,
)
TURNED = Sized(rotated_codes, lambda m, b, n: [m(b, n), m(n) + 1e-3], (3, 16))

BLOCKS: tuple[Block, ...] = (
    Sized(field_aware, lambda m, b, f, n, k: [ids(m, n, b, f), m(n, f, k) * 0.1, m(n)], (5, 4, 20, 3), SINGLE).block(
        "field aware", 4096, 23, 20011, 8, training=True
    ),
    Sized(
        bilinear_pairs,
        lambda m, b, f, d, r: [m(b, f, d), weight(m, r, f), weight(m, f, r), weight(m, f, d, d)],
        (5, 6, 4, 3),
    ).block("bilinear pairs", 4096, 24, 32, 8, training=True),
    Sized(two_towers, lambda m, n, d, k: [m(n, d), m(n, d), ids(m, k, n), m(n)], (9, 8, 5)).block(
        "two towers", 8192, 128, 3000, training=True
    ),
    Sized(
        quotients,
        lambda m, b, f, n, k, d: [ids(m, n, b, f), m(-(-n // k), d), m(k, d), weight(m, d, d + f * f)],
        (5, 4, 50, 7, 6),
    ).block("quotients", 8192, 26, 1000003, 1024, 64, training=True),
    Sized(
        compressed_interactions,
        lambda m, b, f, d, h: [m(b, f, d), weight(m, h, f * f), weight(m, h, f * h)],
        (3, 4, 5, 6),
    ).block("compressed interactions", 2048, 22, 16, 64, training=True),
    *HSTU.both("pointwise attention", 8, 1024, 256, 128),
    *SPREAD.both("propagated", 20000, 160001, 64),
    *TYPED.both("relations", 15001, 120000, 64, 40, 8),
    Sized(
        distant_nodes,
        lambda m, b, n, d, h: [
            m(b, n, d),
            ids(m, 12, b, n, n),
            ids(m, 30, b, n, n, 4),
            m(12, h),
            m(30, h),
            weight(m, 3 * d, d),
        ],
        (2, 6, 16, 4),
    ).block("distant nodes", 16, 120, 256, 16, training=True),
    Sized(
        munchausen,
        lambda m, t, b, a: [m(t, b, a), m(t, b, a), m(t, b, a), ids(m, a, t, b), m(t, b), m(t, b)],
        (4, 5, 3),
        SINGLE,
    ).block("munchausen", 20, 4096, 18, training=True),
    Sized(
        replayed, lambda m, n, b, d: [torch.linspace(0.5, 3, n, device=m(1).device), m(b), m(n, d), m(b)], (40, 4, 3), SINGLE
    ).block("replayed", 1000003, 4096, 84),
    Sized(
        inverse_roots,
        lambda m, k, n, c: [
            m(k, n, c),
            m(k, n, c),
            torch.eye(n, device=m(1).device).repeat(k, 1, 1),
            m(k, n, c),
        ],
        (2, 6, 8),
        SINGLE,
        tf32=True,
    ).block("inverse roots", 12, 384, 1536),
    Sized(prodigy, _prodigy, (4, 5), SINGLE).block("prodigy", 16, 600),
    Sized(
        group_scaled,
        lambda m, b, n, k: [m(b, k), (ids(m, 255, n, k) - 127).to(torch.int8), m(n, k // 64).float() * k**-0.5 / 64],
        (3, 5, 128),
    ).block("group scaled", 128, 4096, 4096),
    Sized(error_feedback, lambda m, n, k: [m(n, k).float(), m(k, k).float() * 0.1], (5, 8), SINGLE).block(
        "error feedback", 11008, 32
    ),
    Sized(searched_scales, lambda m, b, n, k: [m(b, k), weight(m, n, k)], (5, 6, 64)).block("searched scales", 512, 2048, 2048),
    Sized(normal_codes, lambda m, n, k: [m(n, k)], (4, 256)).block("normal codes", 4096, 11008),
    *TURNED.both("rotated codes", 4096, 4096),
    Sized(
        rounded_masters,
        lambda m, n, k: [m(n, k), m(n, k), m(n, k).float(), ids(m, 65536, n, k).to(torch.int32)],
        (5, 6),
    ).block("rounded masters", 4096, 5120),
)
