"""Blocks of networks for text, sound and series, as their papers' code has them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

SINGLE = torch.float32


def masked_encoder(x: Tensor, lengths: Tensor, wqkv: Tensor, b: Tensor, wo: Tensor, norm: Tensor) -> Tensor:
    """An encoder's attention with padding, post-norm, weights in plain matmuls."""
    n, s, d = x.shape
    q, k, v = F.linear(x, wqkv, b).view(n, s, 3, d // 64, 64).permute(2, 0, 3, 1, 4)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(64)
    unseen = torch.arange(s, device=x.device)[None] >= lengths[:, None]
    scores = scores.masked_fill(unseen[:, None, None], torch.finfo(scores.dtype).min)
    y = torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(n, s, d)
    return F.layer_norm(x + F.linear(y, wo), (d,), norm[0], norm[1])


def crossed(x: Tensor, memory: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor, gain: Tensor) -> Tensor:
    """A decoder's attention to the encoder, pre-norm."""
    n, s, d = x.shape
    q = F.linear(F.layer_norm(x, (d,), gain), wq).view(n, s, d // 64, 64).transpose(1, 2)
    k, v = F.linear(memory, wkv).view(n, -1, 2, d // 64, 64).permute(2, 0, 3, 1, 4)
    return x + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), wo)


def embedded(ids_: Tensor, kinds: Tensor, words: Tensor, positions: Tensor, types: Tensor, norm: Tensor) -> Tensor:
    """BERT's embeddings."""
    y = words[ids_] + positions[: ids_.shape[1]] + types[kinds]
    return F.layer_norm(y, y.shape[-1:], norm[0], norm[1], 1e-12)


def tied_head(x: Tensor, w: Tensor, b: Tensor, gain: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    """The loss of masked words: a dense layer with GELU and a norm, then the embeddings; most labels are ignored."""
    y = F.layer_norm(F.gelu(F.linear(x, w, b)), x.shape[-1:], gain)
    return F.cross_entropy(F.linear(y, words).float(), labels, ignore_index=-100)


def gated_mlp(x: Tensor, gain: Tensor, w: Tensor, v: Tensor, down: Tensor) -> Tensor:
    """Gemma's: RMS norm with 1 + gain, GELU by tanh times a second projection."""
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    y = (y * (1.0 + gain.float())).to(x.dtype)
    return x + F.linear(F.gelu(F.linear(y, w), approximate="tanh") * F.linear(y, v), down)


def characters(ids_: Tensor, table: Tensor, a: Tensor, b: Tensor, c: Tensor, gate: Tensor, way: Tensor) -> Tensor:
    """Words from characters: convolutions of three widths, maxima over time, a highway layer."""
    x = table[ids_].transpose(1, 2)
    y = torch.cat([torch.tanh(F.conv1d(x, w)).amax(-1) for w in (a, b, c)], -1)
    t = torch.sigmoid(F.linear(y, gate) - 2)
    return t * F.relu(F.linear(y, way)) + (1 - t) * y


def convolution_module(x: Tensor, norm: Tensor, up: Tensor, dw: Tensor, stats: Tensor, down: Tensor) -> Tensor:
    """Conformer's convolution module in training."""
    y = F.glu(F.linear(F.layer_norm(x, x.shape[-1:], norm[0], norm[1]), up), -1).transpose(1, 2)
    y = F.conv1d(y, dw, padding=dw.shape[-1] // 2, groups=y.shape[1])
    y = F.silu(F.batch_norm(y, None, None, stats[0], stats[1], True))
    return x + F.linear(y.transpose(1, 2), down)


def sound_features(x: Tensor, w: Tensor, norm: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """wav2vec 2.0: strided convolutions of sound with GELU, the first with a norm of each channel."""
    y = F.gelu(F.group_norm(F.conv1d(x[:, None], w, stride=5), w.shape[0], norm[0], norm[1]))
    y = F.gelu(F.conv1d(y, v, stride=2))
    return F.gelu(F.conv1d(y, u, stride=2))


def causal_wavenet(x: Tensor, w: Tensor, b: Tensor, res: Tensor, skip: Tensor) -> Tensor:
    """WaveNet: a dilated causal convolution, tanh times sigmoid, two 1x1 convolutions."""
    y = F.conv1d(F.pad(x, (4, 0)), w, b, dilation=4)
    a, g = y.chunk(2, 1)
    y = torch.tanh(a) * torch.sigmoid(g)
    return torch.cat([x + F.conv1d(y, res), F.relu(F.conv1d(y, skip))], 1)


def mixed_channels(x: Tensor, shift: Tensor, k: Tensor, r: Tensor, v: Tensor) -> Tensor:
    """RWKV's channel mixing: the token before, squared ReLU, a sigmoid gate."""
    before = F.pad(x, (0, 0, 1, -1))
    xk, xr = x + (before - x) * shift[0], x + (before - x) * shift[1]
    return torch.sigmoid(F.linear(xr, r)) * F.linear(F.relu(F.linear(xk, k)).square(), v)


def additive_attention(q: Tensor, keys: Tensor, wq: Tensor, wk: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Bahdanau's attention of one step with padding."""
    scores = torch.tanh(F.linear(q, wq)[:, None] + F.linear(keys, wk)) @ v
    scores = scores.masked_fill(seen < 0, float("-inf"))
    return (scores.softmax(-1)[:, None] @ keys)[:, 0]


def peephole(x: Tensor, h: Tensor, c: Tensor, w: Tensor, u: Tensor, b: Tensor, p: Tensor) -> Tensor:
    """One step of an LSTM whose gates see the cell: the state and the cell."""
    i, f, g, o = (F.linear(x, w, b) + F.linear(h, u)).chunk(4, -1)
    new = torch.sigmoid(f + p[0] * c) * c + torch.sigmoid(i + p[1] * c) * torch.tanh(g)
    return torch.stack([torch.sigmoid(o + p[2] * new) * torch.tanh(new), new])


def top_two(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Mixtral by einsum over all experts, weighted by the two best."""
    weights = F.softmax(F.linear(x, router).float(), -1)
    best, at = weights.topk(2, -1)
    dense = torch.zeros_like(weights).scatter(-1, at, best / best.sum(-1, keepdim=True)).to(x.dtype)
    y = torch.einsum("teh,ehd->ted", F.silu(torch.einsum("td,edh->teh", x, up)), down)
    return torch.einsum("ted,te->td", y, dense)


def decayed(x: Tensor, w: Tensor, k: Tensor) -> Tensor:
    """A series: the trend by a moving mean with repeated ends, the rest through a linear layer, both added."""
    ends = x[:, :1].expand(-1, 12, -1), x[:, -1:].expand(-1, 12, -1)
    trend = F.avg_pool1d(torch.cat([ends[0], x, ends[1]], 1).transpose(1, 2), 25, 1)
    return F.linear(x.transpose(1, 2) - trend, w) + F.linear(trend, k)


def sampled_nucleus(logits: Tensor, u: Tensor) -> Tensor:
    """The next token by the smallest set of tokens with nine tenths of the probability."""
    p, at = torch.sort(logits.float().softmax(-1), -1, descending=True)
    p = torch.where(p.cumsum(-1) - p > 0.9, 0.0, p)
    chosen = (p.cumsum(-1) < u.sigmoid()[:, None] * p.sum(-1, keepdim=True)).sum(-1, keepdim=True)
    return at.gather(-1, chosen.clamp(max=at.shape[1] - 1))[:, 0]


def eight_bit_cache(q: Tensor, k: Tensor, v: Tensor, scales: Tensor, new: Tensor, at: Tensor) -> Tensor:
    """A step of decoding with keys and values as bytes with a scale for each head and token."""
    keys = (k.to(q.dtype) * scales[0, ..., None]).index_copy(2, at, new)
    values = v.to(q.dtype) * scales[1, ..., None]
    return F.scaled_dot_product_attention(q, keys, values)


def byte_weights(x: Tensor, w: Tensor, s: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A linear layer with int8 weights, scales of rows, and a low-rank adapter."""
    return F.linear(x, w.to(x.dtype)) * s + F.linear(F.linear(x, a), b) * 2.0


def graph_attention(x: Tensor, w: Tensor, a: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """GAT: scores of edges, softmax among a node's edges, weighted sums."""
    y = F.linear(x, w).view(x.shape[0], 4, -1)
    e = F.leaky_relu((y * a[0]).sum(-1)[source] + (y * a[1]).sum(-1)[target], 0.2)
    top = torch.full((x.shape[0], 4), float("-inf"), device=x.device, dtype=e.dtype)
    top = top.scatter_reduce(0, target[:, None].expand(-1, 4), e, "amax")
    p = torch.exp(e - top[target])
    total = torch.zeros_like(top).index_add(0, target, p)
    return F.elu(torch.zeros_like(y).index_add(0, target, y[source] * (p / (total[target] + 1e-9))[..., None]).flatten(1))


def sage(x: Tensor, source: Tensor, target: Tensor, own: Tensor, others: Tensor) -> Tensor:
    """GraphSAGE: means over a node's edges, two linear layers, unit length."""
    n = x.shape[0]
    total = torch.zeros_like(x).index_add(0, target, x[source])
    count = torch.zeros(n, device=x.device, dtype=x.dtype).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
    return F.normalize(F.relu(F.linear(x, own) + F.linear(total / count.clamp(min=1)[:, None], others)), dim=-1)


ENCODER = Sized(
    masked_encoder,
    lambda m, b, s, d: [m(b, s, d), ids(m, s, b) + 1, weight(m, 3 * d, d), m(3 * d), weight(m, d, d), m(2, d)],
    (2, 5, 64),
)
CROSSED = Sized(
    crossed,
    lambda m, b, s, t, d: [m(b, s, d), m(b, t, d), weight(m, d, d), weight(m, 2 * d, d), weight(m, d, d), m(d)],
    (2, 3, 5, 64),
)
EMBEDDED = Sized(
    embedded,
    lambda m, b, s, d: [ids(m, 30001, b, s), ids(m, 2, b, s), m(30001, d), m(512, d), m(2, d), m(2, d)],
    (2, 5, 8),
)
GEMMA = Sized(gated_mlp, lambda m, t, d, h: [m(t, d), m(d), weight(m, h, d), weight(m, h, d), weight(m, d, h)], (5, 8, 12))
MODULE = Sized(
    convolution_module,
    lambda m, b, s, d, k: [m(b, s, d), m(2, d), weight(m, 2 * d, d), weight(m, d, 1, k), m(2, d), weight(m, d, d)],
    (2, 7, 8, 3),
)
GAT = Sized(
    graph_attention,
    lambda m, n, e, d, h: [m(n, d), weight(m, 4 * h, d), m(2, 4, h), ids(m, n, e), ids(m, n, e).flip(0)],
    (9, 20, 6, 5),
    SINGLE,
)
BLOCKS: tuple[Block, ...] = (
    ENCODER.block("masked encoder", 24, 384, 768),
    ENCODER.block("masked encoder", 12, 500, 512, training=True),
    CROSSED.block("attention to memory", 24, 100, 700, 512),
    CROSSED.block("attention to memory", 12, 260, 400, 768, training=True),
    EMBEDDED.block("embedded words", 48, 500, 768),
    EMBEDDED.block("embedded words", 24, 384, 1024, training=True),
    Sized(
        tied_head,
        lambda m, t, d, v: [m(t, d), weight(m, d, d), m(d), m(d), weight(m, v, d), ids(m, 7 * v, t).where(m(t) > 1, -100) % v],
        (7, 8, 11),
    ).block("tied head", 3000, 768, 30002, training=True),
    GEMMA.block("one plus gain mlp", 3000, 1152, 6912),
    GEMMA.block("one plus gain mlp", 2500, 1024, 2816, training=True),
    Sized(
        characters,
        lambda m, t, c, d: [
            ids(m, 262, t, c),
            m(262, 16),
            weight(m, d, 16, 3),
            weight(m, d, 16, 4),
            weight(m, d, 16, 5),
            weight(m, 3 * d, 3 * d),
            weight(m, 3 * d, 3 * d),
        ],
        (4, 9, 4),
    ).block("characters", 6000, 50, 128),
    MODULE.block("convolution module", 24, 430, 256, 31),
    MODULE.block("convolution module", 12, 510, 512, 15, training=True),
    Sized(
        sound_features,
        lambda m, b, t, d: [m(b, t), weight(m, d, 1, 10), m(2, d), weight(m, d, d, 3), weight(m, d, d, 2)],
        (2, 90, 4),
    ).block("sound features", 6, 70000, 512),
    Sized(
        causal_wavenet,
        lambda m, b, c, t: [m(b, c, t), weight(m, 2 * c, c, 2), m(2 * c), weight(m, c, c, 1), weight(m, 2 * c, c, 1)],
        (2, 4, 9),
    ).block("causal wavenet", 6, 64, 16001, training=True),
    Sized(
        mixed_channels,
        lambda m, b, s, d: [m(b, s, d), m(2, d), weight(m, 3 * d, d), weight(m, d, d), weight(m, d, 3 * d)],
        (2, 5, 8),
    ).block("mixed channels", 6, 700, 768, training=True),
    Sized(
        additive_attention,
        lambda m, b, s, d: [m(b, d), m(b, s, d), weight(m, d, d), weight(m, d, d), weight(m, 1, d)[0], m(b, s) + 1],
        (2, 5, 8),
    ).block("additive attention", 96, 300, 512, training=True),
    Sized(
        peephole,
        lambda m, b, d: [m(b, d), m(b, d), m(b, d), weight(m, 4 * d, d), weight(m, 4 * d, d), m(4 * d), m(3, d)],
        (3, 8),
    ).block("peephole", 300, 768, training=True),
    Sized(
        top_two, lambda m, t, d, e, h: [m(t, d), weight(m, e, d), m(e, d, h) * d**-0.5, m(e, h, d) * h**-0.5], (5, 8, 4, 6)
    ).block("einsum experts", 1500, 512, 8, 1408, training=True),
    Sized(decayed, lambda m, b, s, c, o: [m(b, s, c), weight(m, o, s), weight(m, o, s)], (2, 30, 3, 5), SINGLE).block(
        "trend and rest", 48, 336, 321, 96, training=True
    ),
    Sized(sampled_nucleus, lambda m, b, v: [m(b, v), m(b)], (3, 17)).block("sampled nucleus", 48, 50258),
    Sized(
        eight_bit_cache,
        lambda m, b, h, s, d: [
            m(b, h, 1, d),
            (m(b, h, s, d) * 30).to(torch.int8),
            (m(b, h, s, d) * 30).to(torch.int8),
            m(2, b, h, s).abs() / 30,
            m(b, h, 1, d),
            ids(m, s, 1),
        ],
        (2, 2, 6, 8),
    ).block("eight bit cache", 24, 16, 1500, 128),
    Sized(
        byte_weights,
        lambda m, t, d, o: [m(t, d), (m(o, d) * 40).to(torch.int8), m(o) / 99, weight(m, 16, d), weight(m, o, 16)],
        (3, 32, 24),
    ).block("byte weights", 20, 4096, 5120),
    GAT.block("graph attention", 30000, 400000, 128, 32),
    GAT.block("graph attention", 10001, 150001, 128, 16, training=True),
    Sized(
        sage,
        lambda m, n, e, d: [m(n, d), ids(m, n, e), ids(m, n, e).flip(0), weight(m, d, d), weight(m, d, d)],
        (9, 20, 6),
        SINGLE,
    ).block("sage", 40001, 300007, 192, training=True),
)
