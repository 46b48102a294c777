"""Blocks of recommenders and of reinforcement learning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def cross_layers(x: Tensor, u: Tensor, v: Tensor, b: Tensor) -> Tensor:
    """Three low-rank cross layers (DCN v2)."""
    y = x
    for k in range(3):
        y = x * (F.linear(F.linear(y, v[k]), u[k]) + b[k]) + y
    return y


def triangle_interactions(dense: Tensor, sparse: Tensor, w: Tensor) -> Tensor:
    """DLRM: a batched matmul of the embeddings with themselves, its lower triangle by indices, beside the dense features."""
    t = torch.cat((dense[:, None], sparse), 1)
    z = torch.bmm(t, t.transpose(1, 2))
    i, j = torch.tril_indices(t.shape[1], t.shape[1], offset=-1, device=t.device)
    return F.relu(F.linear(torch.cat((dense, z[:, i, j]), 1), w))


def weighted_bags(table: Tensor, rows: Tensor, shares: Tensor, lengths: Tensor) -> Tensor:
    """Weighted means of embeddings, of as many as each row has."""
    inside = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
    s = torch.where(inside, shares, torch.zeros_like(shares)).abs()
    bag = (F.embedding(rows, table) * s.unsqueeze(-1)).sum(1)
    return bag / (s.sum(1, keepdim=True) + 1e-6)


def bag_calls(table: Tensor, rows: Tensor, shares: Tensor) -> Tensor:
    return F.normalize(F.embedding_bag(rows, table, mode="sum", per_sample_weights=shares), dim=-1)


def factorisation(fields: Tensor, table: Tensor, linear: Tensor, label: Tensor) -> Tensor:
    """A factorisation machine over fields with offsets in one table, and its loss."""
    offset = torch.arange(fields.shape[1], device=fields.device) * 1000
    at = fields + offset
    v = table[at] * 0.1
    pair = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(1)
    return F.binary_cross_entropy_with_logits(pair + linear[at].sum(1), (label > 0).to(v.dtype).detach())


def interest_pooling(q: Tensor, keys: Tensor, lengths: Tensor, w1: Tensor, b1: Tensor, slope: Tensor, w2: Tensor) -> Tensor:
    """DIN's attention: an MLP on the query, the key, their difference, and both multiplied."""
    a = q[:, None].expand(-1, keys.shape[1], -1)
    h = F.linear(torch.cat((a, keys, a - keys, a * keys), -1), w1, b1)
    p = torch.sigmoid((h - h.mean((0, 1))) * (h.var((0, 1), correction=0) + 1e-5).rsqrt())
    score = F.linear(p * h + (1 - p) * slope * h, w2).transpose(1, 2)
    inside = (torch.arange(keys.shape[1], device=q.device)[None] < lengths[:, None])[:, None]
    return torch.matmul(torch.where(inside, score, torch.zeros_like(score)), keys).squeeze(1)


def sampled_softmax(users: Tensor, items: Tensor, item_ids: Tensor, log_q: Tensor) -> Tensor:
    """In-batch negatives corrected by their frequency, equal items hidden."""
    u, v = F.normalize(users, dim=-1), F.normalize(items, dim=-1)
    logits = u @ v.t() / 0.05 - log_q[None]
    hidden = (item_ids[:, None] == item_ids[None]) & ~torch.eye(len(users), dtype=torch.bool, device=users.device)
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min)
    return F.cross_entropy(logits.float(), torch.arange(len(users), device=users.device))


def gates_of_tasks(x: Tensor, experts: Tensor, bias: Tensor, gates: Tensor) -> Tensor:
    """MMoE: each task's softmax over shared experts."""
    y = F.relu(torch.einsum("bi,eio->beo", x, experts) + bias)
    g = torch.einsum("bi,tie->bte", x, gates).softmax(-1)
    return torch.einsum("bte,beo->tbo", g, y)


def lambda_rank(scores: Tensor, relevance: Tensor) -> Tensor:
    """Pairs weighted by how much a swap changes the gain; ranks by two sorts."""
    order = torch.argsort(scores, 1, descending=True)
    rank = torch.argsort(order, 1).to(scores.dtype)
    gain = 2 ** relevance.to(scores.dtype) - 1
    discount = 1 / torch.log2(rank + 2)
    swap = ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs()
    better = relevance[:, :, None] > relevance[:, None]
    loss = F.softplus(-(scores[:, :, None] - scores[:, None])) * swap.detach()
    return torch.where(better, loss, 0.0).sum() / better.sum().clamp(min=1)


def discounted_advantages(rewards: Tensor, values: Tensor, done: Tensor) -> Tensor:
    """GAE over (steps, batch): sums of differences, discounted by cumprod, which ends with an episode."""
    alive = (done != 0).to(rewards.dtype)
    delta = rewards[:-1] + 0.99 * alive[:-1] * values[1:] - values[:-1]
    factor = (0.99 * 0.95) * alive[:-1].clamp(min=0.5)
    p = torch.cumprod(torch.cat((torch.ones_like(factor[:1]), factor[:-1])), 0)
    sums = torch.flip(torch.cumsum(torch.flip(delta * p, (0,)), 0), (0,)) / p
    return (sums - sums.mean()) / (sums.std() + 1e-8)


def v_trace(target: Tensor, behaviour: Tensor, rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """IMPALA's corrected returns in a loop from the last step; all of (steps, batch)."""
    rho = torch.exp(target - behaviour)
    clipped = rho.clamp(max=1.0)
    following = torch.cat((values[1:], values[-1:]))
    delta = clipped * (rewards + 0.99 * following - values)
    acc, out = torch.zeros_like(values[0]), []
    for t in range(values.shape[0] - 1, -1, -1):
        acc = delta[t] + 0.99 * clipped[t] * acc
        out.append(acc)
    vs = torch.stack(out[::-1]) + values
    return vs, clipped * (rewards + 0.99 * torch.cat((vs[1:], values[-1:])) - values)


def projected_distribution(logits: Tensor, rewards: Tensor, done: Tensor) -> Tensor:
    """C51: 51 atoms moved by a reward, their probability split over two by index_add."""
    n, atoms = logits.shape
    p = logits.softmax(1)
    z = torch.linspace(-10, 10, atoms, device=logits.device, dtype=logits.dtype)
    moved = (rewards[:, None] + 0.99 * (done > 0)[:, None] * z).clamp(-10, 10)
    b = (moved + 10) / (20 / (atoms - 1))
    low, high = b.floor().long(), b.ceil().long()
    low[(high > 0) & (low == high)] -= 1
    high[(low < (atoms - 1)) & (low == high)] += 1
    start = (torch.arange(n, device=logits.device) * atoms)[:, None]
    out = torch.zeros_like(p)
    out.view(-1).index_add_(0, (low + start).view(-1), (p * (high.to(b.dtype) - b)).view(-1))
    out.view(-1).index_add_(0, (high + start).view(-1), (p * (b - low.to(b.dtype))).view(-1))
    return out


def quantile_huber(quantiles: Tensor, target: Tensor, actions: Tensor) -> Tensor:
    """QR-DQN's loss; quantiles of (batch, actions, quantiles)."""
    n = quantiles.shape[2]
    tau = (torch.arange(n, device=target.device, dtype=target.dtype) + 0.5) / n
    own = quantiles.gather(1, actions[:, None, None].expand(-1, 1, n)).squeeze(1)
    u = target.detach()[:, None] - own[:, :, None]
    huber = torch.where(u.abs() <= 1, 0.5 * u.pow(2), u.abs() - 0.5)
    return ((tau[None, :, None] - (u.detach() < 0).to(u.dtype)).abs() * huber).sum(1).mean()


def soft_critic(state: Tensor, action: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, target: Tensor) -> Tensor:
    """Two critics in one batch of weights, their loss."""
    x = torch.cat((state, action), 1).expand(2, -1, -1)
    y = torch.baddbmm(w3[:, :1, :1], F.relu(torch.bmm(F.relu(torch.bmm(x, w1)), w2)), w3.transpose(1, 2))
    return ((y.squeeze(-1) - target.detach()) ** 2).mean(1).sum()


def soft_targets(*tensors: Tensor) -> None:
    """Averages of many parameters of unlike shapes, in place."""
    half = len(tensors) // 2
    for slow, fast in zip(tensors[:half], tensors[half:], strict=True):
        slow.mul_(0.995).add_(fast, alpha=0.005)


def _critic(m: Make, n: int, s: int, a: int, h: int) -> list[Tensor]:
    return [m(n, s), m(n, a), m(2, s + a, h) * (s + a) ** -0.5, m(2, h, h) * h**-0.5, m(2, 1, h) * h**-0.5, m(n)]


def _parameters(m: Make, layers: int, d: int) -> list[Tensor]:
    shapes = [(d, d + 1), (d,), (3, d // 2, 5), (1,)] * layers
    return [m(*s) for _ in range(2) for s in shapes]


CROSS = Sized(cross_layers, lambda m, n, d, r: [m(n, d), m(3, d, r) * r**-0.5, m(3, r, d) * d**-0.5, m(3, d)], (7, 12, 4), HALF)

BLOCKS: tuple[Block, ...] = (
    *CROSS.both("cross layers", 4095, 845, 128),
    Sized(
        triangle_interactions, lambda m, b, f, d: [m(b, d), m(b, f, d), weight(m, 24, d + f * (f + 1) // 2)], (5, 6, 8)
    ).block("triangle interactions", 8192, 26, 64, training=True),
    Sized(
        weighted_bags, lambda m, b, n, d: [m(9000, d), ids(m, 9000, b, n), m(b, n), ids(m, n, b) + 1], (5, 7, 6), SINGLE
    ).block("weighted bags", 4000, 51, 48, training=True),
    Sized(bag_calls, lambda m, b, n, d: [m(9000, d), ids(m, 9000, b, n), m(b, n)], (5, 7, 6), SINGLE).block(
        "bag calls", 8000, 30, 96
    ),
    Sized(
        factorisation,
        lambda m, b, f, d: [ids(m, 1000, b, f), m(1000 * f, d), m(1000 * f), m(b)],
        (9, 5, 6),
        SINGLE,
    ).block("factorisation machine", 8192, 39, 10, training=True),
    Sized(
        interest_pooling,
        lambda m, b, t, d: [m(b, d), m(b, t, d), ids(m, t, b) + 1, weight(m, 36, 4 * d), m(36), m(36), weight(m, 1, 36)],
        (3, 7, 8),
        SINGLE,
        tf32=True,
    ).block("interest pooling", 512, 99, 64, training=True),
    Sized(sampled_softmax, lambda m, b, d: [m(b, d), m(b, d), ids(m, 2 * b, b), m(b)], (9, 8), HALF).block(
        "sampled softmax", 4099, 128, training=True
    ),
    Sized(gates_of_tasks, lambda m, b, i, e, o: [m(b, i), m(e, i, o) * i**-0.5, m(e, o), m(3, i, e)], (7, 12, 4, 5)).block(
        "gates of tasks", 4096, 499, 8, 128
    ),
    Sized(lambda_rank, lambda m, b, n: [m(b, n), ids(m, 5, b, n)], (2, 9), SINGLE).block(
        "lambda rank", 128, 200, training=True
    ),
    Sized(discounted_advantages, lambda m, t, b: [m(t, b), m(t, b), ids(m, 60, t, b)], (9, 5), SINGLE).block(
        "discounted advantages", 129, 4096
    ),
    Sized(v_trace, lambda m, t, b: [m(t, b) for _ in range(4)], (5, 7), SINGLE).block("v-trace", 40, 8192),
    Sized(projected_distribution, lambda m, n, a: [m(n, a), m(n), m(n)], (9, 51), SINGLE).block(
        "projected distribution", 16384, 51
    ),
    Sized(quantile_huber, lambda m, n, a, q: [m(n, a, q), m(n, q), ids(m, a, n)], (5, 3, 7), SINGLE).block(
        "quantile huber", 2048, 6, 200, training=True
    ),
    Sized(soft_critic, _critic, (9, 6, 3, 8), SINGLE, tf32=True).block("soft critic", 1024, 376, 17, 257, training=True),
    Sized(soft_targets, _parameters, (2, 6), SINGLE).block("soft targets", 24, 300),
)
