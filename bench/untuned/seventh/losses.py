"""Blocks of training: losses, normalisations, recommenders, graphs' scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def hard_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the hardest quarter of pixels, those of label 255 left out, classes weighted by their counts."""
    b, _c, _, _ = logits.shape
    ignore = labels == 255
    safe = labels.masked_fill(ignore, 0)
    loss = F.cross_entropy(logits.float(), safe, reduction="none").masked_fill(ignore, 0.0)
    flat = loss.view(b, -1)
    k = flat.shape[1] // 4
    least = flat.detach().topk(k, 1).values[:, -1:]
    keep = (flat >= least).float()
    return (flat * keep).sum() / keep.sum().clamp(min=1)


def seesaw(logits: Tensor, labels: Tensor, counts: Tensor) -> Tensor:
    """Seesaw: negatives of rarer classes are mitigated by counts, those that score above the label compensated."""
    n, c = logits.shape
    onehot = F.one_hot(labels, c)
    amount = counts.abs() + 1
    ratio = amount[None].clamp(min=1) / amount[:, None].clamp(min=1)
    mitigation = torch.where(ratio < 1, ratio.pow(0.8), torch.ones_like(ratio))[labels]
    p = logits.detach().softmax(-1)
    own = p[torch.arange(n, device=p.device), labels]
    against = p / own[:, None].clamp(min=1e-2)
    factor = torch.where(against > 1, against.pow(2.0), torch.ones_like(against)) * mitigation
    return F.cross_entropy(logits + factor.log() * (1 - onehot), labels)


def approximate_ndcg(scores: Tensor, gains: Tensor) -> Tensor:
    """ApproxNDCG: ranks by sums of sigmoids of all differences, discounted gains over the ideal ones, padding hidden."""
    real = gains > -1
    g = torch.where(real, gains.clamp(0, 4), torch.zeros_like(gains))
    s = scores.masked_fill(~real, -1e3)
    ideal, _ = g.sort(-1, descending=True)
    at = torch.arange(g.shape[1], device=g.device, dtype=g.dtype)
    best = ((2**ideal - 1) / torch.log2(at + 2)).sum(-1).clamp(min=1e-3)
    apart = (s[:, None] - s[..., None]) / 0.3
    pair = (real[:, None] & real[..., None]).to(s.dtype)
    rank = 0.5 + (torch.sigmoid(apart) * pair).sum(-1)
    return -(((2**g - 1) / torch.log2(1 + rank)).sum(-1) / best).mean()


def multi_similarity(x: Tensor, labels: Tensor) -> Tensor:
    """Multi-similarity: hard pairs mined by the extremes of the other kind, two soft maxima a row."""
    x = F.normalize(x, dim=-1)
    s = x @ x.T
    same = labels[:, None] == labels[None]
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    pos, neg = same & ~eye, ~same
    worst = s.masked_fill(~pos, float("inf")).min(1, keepdim=True).values
    best = s.masked_fill(~neg, float("-inf")).max(1, keepdim=True).values
    pick, drop = pos & (s - 0.1 < best), neg & (s + 0.1 > worst)
    a = torch.log1p((torch.exp(-2 * (s - 0.5)) * pick).sum(1)) / 2
    b = torch.log1p((torch.exp(20 * (s - 0.5)) * drop).sum(1)) / 20
    return (a + b).mean()


def proxy_anchors(x: Tensor, proxies: Tensor, labels: Tensor) -> Tensor:
    """Proxy anchors: soft maxima over the batch for each class, of those with positives and of all."""
    cos = F.linear(F.normalize(x), F.normalize(proxies)).float()
    onehot = F.one_hot(labels, len(proxies)).bool()
    up = torch.where(onehot, torch.exp(-32 * (cos - 0.1)), 0.0).sum(0)
    down = torch.where(~onehot, torch.exp(32 * (cos + 0.1)), 0.0).sum(0)
    present = onehot.any(0).sum()
    return torch.log1p(up).sum() / present + torch.log1p(down).sum() / len(proxies)


def adaptive_wing(p: Tensor, y: Tensor) -> Tensor:
    """Adaptive wing: powers that depend on the target, a linear part with equal slope, a mask of grown targets."""
    p, y = p.sigmoid(), y.sigmoid()
    d = (y - p).abs()
    t = 0.5 ** (2.1 - y)
    a = 14 * (1 / (1 + t)) * (2.1 - y) * torch.pow(torch.full_like(y, 0.5), 1.1 - y)
    c = 0.5 * a - 14 * torch.log1p(t)
    loss = torch.where(d < 0.5, 14 * torch.log1p(torch.pow(d.clamp(min=1e-4), 2.1 - y)), a * d - c)
    mask = F.max_pool2d(y, 3, 1, 1) > 0.2
    return (loss * (mask * 10 + 1)).mean()


def focal_frequencies(x: Tensor, y: Tensor) -> Tensor:
    """Squared differences of spectra of patches, weighted by their own logarithm, normed by image."""
    a, b = (torch.fft.rfft2(t.unflatten(-1, (4, -1)).unflatten(-3, (4, -1)).transpose(-2, -3), norm="ortho") for t in (x, y))
    d = torch.view_as_real(a - b).square().sum(-1)
    w = torch.log1p(d.detach().sqrt())
    w = w / w.amax((-2, -1), keepdim=True)
    return (torch.nan_to_num(w, nan=0.0).clamp(0, 1) * d).mean()


def concordance(p: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """One minus the concordance of each sequence's valid frames, and a smoothness of differences."""
    m = mask.to(p.dtype)
    n = m.sum(1, keepdim=True).clamp(min=2)
    pm, ym = (p * m).sum(1, keepdim=True) / n, (y * m).sum(1, keepdim=True) / n
    pd, yd = (p - pm) * m, (y - ym) * m
    cov = (pd * yd).sum(1) / n[:, 0]
    ccc = 2 * cov / ((pd**2).sum(1) / n[:, 0] + (yd**2).sum(1) / n[:, 0] + (pm - ym)[:, 0] ** 2 + 1e-3)
    return 1 - ccc.mean() + 0.1 * (torch.diff(p, dim=1) * m[:, 1:]).square().mean()


def ghost_batches(x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Batch norm of chunks of 128 rows, each with its own statistics; running statistics of all written in place."""
    parts = x.chunk(-(-len(x) // 128) if len(x) > 128 else 2)
    found = []
    for part in parts:
        v, m = torch.var_mean(part, 0, correction=0)
        with torch.no_grad():
            mean.mul_(0.9).add_(m.detach(), alpha=0.1)
            var.mul_(0.9).add_(v.detach(), alpha=0.1)
        found.append((part - m) * torch.rsqrt(v + 1e-5))
    return F.glu(torch.cat(found) * w + b, -1)


def switchable(x: Tensor, w: Tensor, b: Tensor, mean_w: Tensor, var_w: Tensor) -> Tensor:
    """Statistics of instances, layers and batches from the same two sums, mixed by softmaxes, then scale and shift."""
    mi = x.mean((2, 3), keepdim=True)
    vi = x.var((2, 3), keepdim=True, correction=0)
    temp = vi + mi**2
    ml = mi.mean(1, keepdim=True)
    vl = temp.mean(1, keepdim=True) - ml**2
    mb = mi.mean(0, keepdim=True)
    vb = temp.mean(0, keepdim=True) - mb**2
    p, q = mean_w.softmax(0), var_w.softmax(0)
    mean = p[0] * mi + p[1] * ml + p[2] * mb
    var = q[0] * vi + q[1] * vl + q[2] * vb
    return F.relu((x - mean) / (var + 1e-5).sqrt() * w[None, :, None, None] + b[None, :, None, None])


def evolved_norm(x: Tensor, v: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """EvoNorm-S0: swish with a learned slope over the deviation of groups, no activation after."""
    n, c, h, k = x.shape
    std = (x.view(n, 8, c // 8, h, k).var((2, 3, 4), keepdim=True) + 1e-5).sqrt()
    std = std.expand(n, 8, c // 8, h, k).reshape(n, c, h, k)
    v, w, b = (t.view(1, -1, 1, 1) for t in (v, w, b))
    return x * torch.sigmoid(v * x) / std * w + b


def tanh_norm(x: Tensor, alpha: Tensor, w: Tensor, b: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A feed-forward layer behind a dynamic tanh in the norm's stead, with a residual."""
    y = torch.tanh(alpha * x) * w + b
    return x + F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)


def next_items(seq: Tensor, hidden: Tensor, table: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
    """SASRec: scores of the true next items and of sampled ones, two logistic losses where the sequence is real."""
    h = F.layer_norm(hidden, hidden.shape[-1:])
    p, n = (h * table[pos]).sum(-1), (h * table[neg]).sum(-1)
    real = (seq != 0).to(h.dtype)
    loss = F.softplus(-p) * real + F.softplus(n) * real
    return loss.sum() / real.sum().clamp(min=1) + 1e-4 * table[pos].square().mean()


def field_attention(tokens: Tensor, table: Tensor, qkv: Tensor, res: Tensor, out: Tensor) -> Tensor:
    """AutoInt: fields attend to each other in two heads, a residual layer, one linear score."""
    x = F.embedding(tokens, table)
    q, k, v = torch.tensordot(x, qkv, 1).chunk(3, -1)
    heads = 2
    q, k, v = (torch.stack(t.split(t.shape[-1] // heads, -1)) for t in (q, k, v))
    p = torch.einsum("hbik,hbjk->hbij", q, k).softmax(-1)
    y = torch.einsum("hbij,hbjk->hbik", p, v)
    y = torch.cat(y.unbind(0), -1) + torch.tensordot(x, res, 1)
    return torch.sigmoid(F.relu(y).flatten(1) @ out)


def paired_ranking(users: Tensor, items: Tensor, u: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """BPR: preferences of seen over unseen items, sums of squares of the rows that were read."""
    a, p, n = users[u], items[i], items[j]
    loss = -F.logsigmoid((a * p).sum(1) - (a * n).sum(1)).mean()
    return loss + 1e-3 * (a.norm() ** 2 + p.norm() ** 2 + n.norm() ** 2) / len(u)


def alternating_squares(factors: Tensor, seen: Tensor, ratings: Tensor, x: Tensor) -> Tensor:
    """Implicit ALS: normal matrices of each user's items and three steps of conjugate gradients."""
    base = factors.T @ factors
    v = factors[seen]
    c = ratings.abs()
    b = torch.einsum("uk,ukd->ud", 1 + c, v)

    def apply(p: Tensor) -> Tensor:
        return p @ base + torch.einsum("uk,ukd->ud", c * torch.einsum("ukd,ud->uk", v, p), v) + 0.1 * p

    r = b - apply(x)
    p, rs = r, (r * r).sum(1, keepdim=True)
    for _ in range(3):
        ap = apply(p)
        alpha = rs / (p * ap).sum(1, keepdim=True).clamp(min=1e-9)
        x = x + alpha * p
        r = r - alpha * ap
        new = (r * r).sum(1, keepdim=True)
        p = r + new / rs.clamp(min=1e-9) * p
        rs = new
    return x


def ranking_metrics(scores: Tensor, relevant: Tensor) -> Tensor:
    """Recall, precision, mean average precision, reciprocal rank and NDCG at 20, from one sort."""
    k = min(20, scores.shape[1])
    order = scores.argsort(dim=1, descending=True)[:, :k]
    hit = relevant.gather(1, order).float()
    total = relevant.sum(1).clamp(min=1).float()
    at = torch.arange(1, k + 1, device=scores.device)
    found = hit.cumsum(1)
    precision = found / at
    ap = (precision * hit).sum(1) / total.clamp(max=k)
    first = torch.where(hit.any(1), 1.0 / (hit.argmax(1) + 1), 0.0)
    discount = 1 / torch.log2(at + 1.0)
    best = (discount * (at <= total[:, None])).sum(1)
    ndcg = (hit * discount).sum(1) / best
    return torch.stack([found[:, -1] / total, precision[:, -1], ap, first, ndcg], 1).mean(0)


def rotated_relations(entities: Tensor, relations: Tensor, triples: Tensor, negatives: Tensor) -> Tensor:
    """RotatE: complex halves turned by phases, distances to tails, negatives weighted by their own softmax."""
    h, r, t = triples.unbind(1)
    re_h, im_h = entities[h].chunk(2, -1)
    phase = relations[r] / (0.1 / 3.14159)
    re_r, im_r = torch.cos(phase), torch.sin(phase)
    re, im = re_h * re_r - im_h * im_r, re_h * im_r + im_h * re_r

    def score(tail: Tensor) -> Tensor:
        a, b = tail.chunk(2, -1)
        re_, im_ = (re[:, None] - a, im[:, None] - b) if tail.dim() == 3 else (re - a, im - b)
        return 9 - torch.stack([re_, im_]).norm(dim=0).sum(-1)

    good, bad = score(entities[t]), score(entities[negatives])
    w = bad.softmax(1).detach()
    return -(F.logsigmoid(good).mean() + (w * F.logsigmoid(-bad)).sum(1).mean()) / 2


def skip_gram(centre: Tensor, context: Tensor, words: Tensor, near: Tensor, noise: Tensor) -> Tensor:
    """Word vectors: logistic losses of the words around, and of five drawn ones, by a batched matmul."""
    v = centre[words]
    good = torch.bmm(context[near], v[..., None])[..., 0]
    bad = torch.bmm(context[noise].neg(), v[..., None])[..., 0]
    return -(F.logsigmoid(good).sum(1) + F.logsigmoid(bad).sum(1)).mean()


def largest_messages(x: Tensor, edges: Tensor, w: Tensor, own: Tensor) -> Tensor:
    """GraphSAGE with maxima: a layer on each node, the largest message of each target, a norm of rows."""
    source, target = edges
    h = F.relu(F.linear(x, w))
    top = torch.zeros_like(h).scatter_reduce(0, target[:, None].expand(-1, h.shape[1]), h[source], "amax", include_self=True)
    return F.normalize(F.linear(torch.cat([x, top], -1), own), dim=-1)


def pooled_graphs(x: Tensor, adjacency: Tensor, assign: Tensor, w: Tensor) -> Tensor:
    """DiffPool: soft clusters of nodes, pooled features and edges, link and entropy losses added to the mean."""
    a = adjacency.sigmoid()
    a = (a + a.mT) / 2
    s = F.linear(a @ x / a.shape[-1], assign).softmax(-1)
    z = F.relu(F.linear(a @ x / a.shape[-1], w))
    pooled = s.mT @ z
    coarse = s.mT @ a @ s
    link = (a - s @ s.mT).square().mean((1, 2)).sqrt()
    entropy = -(s * (s + 1e-6).log()).sum(-1).mean(1)
    return (coarse @ pooled).mean((1, 2)) + link + entropy


GHOST = Sized(ghost_batches, lambda m, n, d: [m(n, d), m(d), m(d), m(d).float(), m(d).abs().float()], (7, 6))
SWITCH = Sized(switchable, lambda m, b, c, h, w: [m(b, c, h, w), m(c), m(c), m(3), m(3)], (3, 4, 5, 6))
EVOLVED = Sized(evolved_norm, lambda m, b, c, h, w: [m(b, c, h, w), m(c), m(c), m(c)], (2, 16, 5, 3))
FIELDS = Sized(
    field_attention,
    lambda m, b, f, n, d, k: [ids(m, n, b, f), m(n, d), weight(m, d, 3 * k), weight(m, d, k), weight(m, f * k, 1)],
    (3, 4, 20, 6, 4),
)
LARGEST = Sized(
    largest_messages,
    lambda m, n, e, d, k: [m(n, d), ids(m, n, 2, e), weight(m, k, d), weight(m, k, d + k)],
    (9, 30, 5, 6),
)
BLOCKS: tuple[Block, ...] = (
    Sized(
        hard_pixels,
        lambda m, b, c, h, w: [m(b, c, h, w), (lambda t: torch.where(t == 0, 255, t))(ids(m, c, b, h, w))],
        (2, 3, 5, 6),
    ).block("hard pixels", 8, 19, 255, 257, training=True),
    Sized(seesaw, lambda m, n, c: [m(n, c), ids(m, c, n), m(c) * 100], (9, 5), SINGLE).block(
        "seesaw", 4096, 1204, training=True
    ),
    Sized(approximate_ndcg, lambda m, b, n: [m(b, n), m(b, n)], (3, 7), SINGLE).block(
        "approximate ndcg", 512, 241, training=True
    ),
    Sized(multi_similarity, lambda m, n, d: [m(n, d), ids(m, 4, n)], (9, 6)).block(
        "multi similarity", 1023, 512, training=True
    ),
    Sized(proxy_anchors, lambda m, n, c, d: [m(n, d), m(c, d), ids(m, c, n)], (7, 5, 6)).block(
        "proxy anchors", 360, 11318, 512, training=True
    ),
    Sized(adaptive_wing, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w)], (2, 3, 5, 6), SINGLE).block(
        "adaptive wing", 16, 98, 64, 65, training=True
    ),
    Sized(focal_frequencies, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w)], (2, 8, 12), SINGLE).block(
        "focal frequencies", 16, 256, 252, training=True
    ),
    Sized(concordance, lambda m, b, n, d: [m(b, n, d), m(b, n, d), m(b, n, 1) > -1], (2, 7, 2), SINGLE).block(
        "concordance", 64, 1501, 7, training=True
    ),
    *GHOST.both("ghost batches", 4001, 256),
    *SWITCH.both("switchable", 16, 64, 57, 55),
    *EVOLVED.both("evolved norm", 32, 96, 28, 31),
    Sized(
        tanh_norm,
        lambda m, n, d, h: [m(n, d), m(1), m(d), m(d), weight(m, h, d), weight(m, d, h)],
        (5, 6, 8),
    ).block("tanh norm", 6001, 384, 1536, training=True),
    Sized(
        next_items,
        lambda m, b, n, v, d: [ids(m, 9, b, n), m(b, n, d), m(v, d), ids(m, v, b, n), ids(m, v, b, n)],
        (3, 5, 20, 6),
        SINGLE,
    ).block("next items", 256, 200, 30011, 50, training=True),
    *FIELDS.both("field attention", 4096, 39, 100003, 16, 64),
    Sized(
        paired_ranking,
        lambda m, b, n, v, d: [m(n, d), m(v, d), ids(m, n, b), ids(m, v, b), ids(m, v, b)],
        (7, 9, 11, 6),
        SINGLE,
    ).block("paired ranking", 16384, 50021, 20011, 64, training=True),
    Sized(
        alternating_squares,
        lambda m, u, k, n, d: [m(n, d) * 0.3, ids(m, n, u, k), m(u, k), m(u, d)],
        (5, 4, 9, 6),
        SINGLE,
    ).block("alternating squares", 4001, 60, 20000, 40),
    Sized(ranking_metrics, lambda m, b, n: [m(b, n), m(b, n) > 2], (3, 30), SINGLE).block("ranking metrics", 1024, 5003),
    Sized(
        rotated_relations,
        lambda m, b, n, v, d: [m(v, 2 * d) * 0.1, m(50, d) * 0.1, ids(m, min(v, 50), b, 3), ids(m, v, b, n)],
        (5, 4, 20, 6),
        SINGLE,
    ).block("rotated relations", 512, 64, 14541, 200, training=True),
    Sized(
        skip_gram,
        lambda m, b, k, v, d: [m(v, d) * 0.1, m(v, d) * 0.1, ids(m, v, b), ids(m, v, b, k), ids(m, v, b, 5 * k)],
        (5, 3, 20, 6),
        SINGLE,
    ).block("skip gram", 8192, 4, 50021, 100, training=True),
    *LARGEST.both("largest messages", 20001, 150001, 100, 128),
    Sized(
        pooled_graphs,
        lambda m, b, n, d, k: [m(b, n, d), m(b, n, n), weight(m, k, d), weight(m, d, d)],
        (3, 7, 4, 3),
    ).block("pooled graphs", 64, 150, 64, 38, training=True),
)
