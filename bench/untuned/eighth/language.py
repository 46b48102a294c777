"""Blocks of language models: attention in unusual spellings, scans, routers, samplers, adapters, layers with own gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def latent_heads(x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, ukv: Tensor, o: Tensor, angles: Tensor) -> Tensor:
    """MLA while training: compressed queries and keys, a part of each head turned, one turned key for all heads."""
    b, s, _ = x.shape
    r, rank = angles.shape[1] * 2, dkv.shape[0] - angles.shape[1] * 2
    n = o.shape[1] // 32
    q = F.linear(F.rms_norm(F.linear(x, dq), (dq.shape[0],)), uq).view(b, s, n, 32 + r).transpose(1, 2)
    latent, shared = F.linear(x, dkv).split([rank, r], -1)
    k, v = F.linear(F.rms_norm(latent, (rank,)), ukv).view(b, s, n, 64).transpose(1, 2).split(32, -1)
    cos, sin = angles[:s].cos(), angles[:s].sin()
    q = torch.cat([q[..., :32], _turned(q[..., 32:], cos, sin)], -1)
    k = torch.cat([k, _turned(shared[:, None], cos, sin).expand(-1, n, -1, -1)], -1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(32 + r) ** -0.5)
    return F.linear(out.transpose(1, 2).reshape(b, s, -1), o)


def sigmoid_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose weights are sigmoids with a bias of the sequence's length, causal, no normalisation."""
    s = q.shape[2]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5 - math.log(s)
    keep = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    return torch.einsum("bhqk,bhkd->bhqd", torch.sigmoid(scores).masked_fill(~keep, 0.0), v)


def normed_groups(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, gq: Tensor, gk: Tensor, gate: Tensor) -> Tensor:
    """Qwen3-Next: normed queries and keys of grouped heads, a sigmoid gate of each head's output from the input."""
    b, s, _ = x.shape
    q = F.rms_norm(F.linear(x, wq).view(b, s, -1, 64), (64,), gq).permute(0, 2, 1, 3)
    k = F.rms_norm(F.linear(x, wk).view(b, s, -1, 64), (64,), gk).permute(0, 2, 1, 3)
    v = F.linear(x, wv).view(b, s, -1, 64).permute(0, 2, 1, 3)
    rep = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.permute(0, 2, 1, 3).reshape(b, s, -1) * torch.sigmoid(F.linear(x, gate))


def scaled_by_length(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """Scalable softmax: scores times a learned factor and the log of how many keys a query sees, by hand."""
    n = q.shape[2]
    length = torch.arange(1, n + 1, device=q.device, dtype=torch.float32).log1p()
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5)
    scores = scores * (s.float().view(1, -1, 1, 1) * length.view(1, 1, n, 1))
    hidden = torch.triu(torch.full((n, n), float("-inf"), device=q.device), 1)
    return torch.softmax(scores + hidden, -1).to(v.dtype) @ v


def own_rotations(x: Tensor, wqkv: Tensor, freqs: Tensor, at: Tensor) -> Tensor:
    """RoPE-mixed: learned frequencies of both axes for each head turn pairs of queries and keys of image tokens."""
    b, s, _ = x.shape
    n, pairs = freqs.shape[1:]
    q, k, v = F.linear(x, wqkv).view(b, s, 3, n, 2 * pairs).permute(2, 0, 3, 1, 4)
    angle = torch.einsum("sa,anp->nsp", at, freqs).float()
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def turn(t: Tensor) -> Tensor:
        a, c = t.unflatten(-1, (pairs, 2)).unbind(-1)
        return torch.stack([a * cos - c * sin, a * sin + c * cos], -1).flatten(-2)

    out = F.scaled_dot_product_attention(turn(q), turn(k), v)
    return out.transpose(1, 2).reshape(b, s, -1)


def first_values(x: Tensor, v1: Tensor, wqkv: Tensor, mix: Tensor, o: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A speed run's block: the first layer's values mixed in, normed queries and keys, capped relu squared mlp."""
    b, s, d = x.shape
    n = d // 64
    q, k, v = F.linear(F.rms_norm(x, (d,)), wqkv).view(b, s, 3 * n, 64).chunk(3, dim=2)
    v = mix[0] * v + mix[1] * v1.view_as(v)
    q, k = F.rms_norm(q, (64,)), F.rms_norm(k, (64,))
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=0.12)
    x = x + F.linear(out.transpose(1, 2).contiguous().view(b, s, d), o)
    return x + F.linear(F.relu(F.linear(F.rms_norm(x, (d,)), up)).square(), down)


def prefix_both_ways(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor, bias: Tensor) -> Tensor:
    """A prefix is seen in both directions, the rest causally, a learned bias by distance in 32 clamped steps."""
    s = q.shape[1]
    at = torch.arange(s, device=q.device)
    seen = (at[:, None] >= at[None]) | (at[None, None] < prefix[:, None, None])
    distance = (at[:, None] - at[None]).clamp(-16, 15) + 16
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1]) + bias[:, distance]
    p = scores.masked_fill(~seen[:, None], -1e4).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def thinned_weights(q: Tensor, k: Tensor, v: Tensor, noise: Tensor) -> Tensor:
    """Attention weights dropped by given noise and normed again, in baddbmm with a key mask of padding."""
    b, s, d = q.shape
    pad = torch.zeros(b, 1, s, dtype=q.dtype, device=q.device)
    pad[:, :, s - s // 8 :] = -1e4
    p = torch.baddbmm(pad.expand(b, s, s), q, k.mT, alpha=d**-0.5).float().softmax(-1)
    p = p * (noise > -1.3)
    p = p / (p.sum(-1, keepdim=True) + 1e-6)
    return torch.bmm(p.to(v.dtype), v)


def bisected_entmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by 1.5-entmax: a threshold by twelve bisections, no gradient through it, then a smooth step."""
    z = (q @ k.mT).float() * (q.shape[-1] ** -0.5) / 2
    with torch.no_grad():
        top = z.amax(-1, keepdim=True)
        low, high = top - 1, top - z.shape[-1] ** -0.5
        for _ in range(12):
            mid = (low + high) / 2
            more = (z - mid).clamp(min=0).square().sum(-1, keepdim=True) >= 1
            low, high = torch.where(more, mid, low), torch.where(more, high, mid)
    p = (z - low).clamp(min=0).square()
    return (p / p.sum(-1, keepdim=True)).to(v.dtype) @ v


def primer(x: Tensor, wqkv: Tensor, cq: Tensor, ck: Tensor, cv: Tensor) -> Tensor:
    """Primer: causal depthwise convolutions of width three over projected queries, keys and values."""
    b, s, d = x.shape
    q, k, v = F.linear(x, wqkv).mT.chunk(3, 1)
    q, k, v = (F.conv1d(F.pad(t, (2, 0)), w, groups=d).view(b, -1, 64, s).mT for t, w in ((q, cq), (k, ck), (v, cv)))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, d)


def heavy_hitters(q: Tensor, k: Tensor, v: Tensor, mass: Tensor) -> tuple[Tensor, ...]:
    """H2O: a decode step adds up attention, keeps the newest and the heaviest half of the cache, gathers it."""
    s, d = k.shape[2:]
    p = ((q * d**-0.5) @ k.mT).float().softmax(-1)
    out = p.to(v.dtype) @ v
    mass = mass.abs() + p.sum(2)
    ranked = mass.clone()
    ranked[..., -s // 8 :] = float("inf")
    keep = ranked.topk(s // 2, -1).indices.sort(-1).values
    at = keep[..., None].expand(-1, -1, -1, d)
    return out, k.gather(2, at), v.gather(2, at), mass.gather(2, keep)


def recurrent_delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Gated delta net's decode step in float32: states decayed, the old value removed, the new one written, read."""
    wide = state.dtype
    q, k = F.normalize(q.to(wide), dim=-1) * q.shape[-1] ** -0.5, F.normalize(k.to(wide), dim=-1)
    state = state * torch.exp(-F.softplus(g.to(wide)))[..., None, None]
    memory = torch.einsum("bhkv,bhk->bhv", state, k)
    delta = (v.to(wide) - memory) * torch.sigmoid(beta.to(wide))[..., None]
    state = state + k[..., :, None] * delta[..., None, :]
    return torch.einsum("bhkv,bhk->bhv", state, q).to(v.dtype), state


def logged_lstm(x: Tensor, wf: Tensor, wi: Tensor, wh: Tensor) -> Tensor:
    """minLSTM in logs: gates normed, prefix sums of log decays, a running logsumexp gives all states in one pass."""
    f, i, h = F.linear(x, wf).float(), F.linear(x, wi).float(), F.linear(x, wh).float()
    log_f, log_i = -F.softplus(F.softplus(-f) - F.softplus(-i)), -F.softplus(F.softplus(-i) - F.softplus(-f))
    log_h = torch.where(h >= 0, (F.relu(h) + 0.5).log(), -F.softplus(-h))
    total = log_f.cumsum(1)
    return torch.exp(total + torch.logcumsumexp(log_i + log_h - total, 1)).to(x.dtype)


def wkv_steps(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, state: Tensor) -> Tensor:
    """RWKV-7's recurrence, a few steps: decays of channels, a rank-one removal, a rank-one write, a read."""
    out = []
    for t in range(r.shape[1]):
        kk = F.normalize(k[:, t], dim=-1)
        rate = torch.sigmoid(a[:, t])
        removed = torch.einsum("bhvk,bhk->bhv", state, -kk)
        decay = torch.exp(-0.606531 * torch.sigmoid(w[:, t]))
        state = state * decay[:, :, None] + removed[..., None] * (kk * rate)[:, :, None]
        state = state + v[:, t, :, :, None] * (k[:, t] * (1 + (rate - 1) * 0.5))[:, :, None]
        out.append(torch.einsum("bhvk,bhk->bhv", state, r[:, t]))
    return torch.stack(out, 1)


def routed_by_mass(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Top-p routing: as many experts as hold 0.4 of the mass, at most 8, weights normed, loads and entropy."""
    p = F.linear(x, w).float().softmax(-1)
    value, at = p.topk(8, -1)
    wanted = (value.cumsum(-1) - value) < 0.4
    value = value * wanted
    value = value / value.sum(-1, keepdim=True)
    load = torch.zeros(w.shape[0], device=x.device).index_add_(0, at.flatten(), wanted.flatten().float())
    return value.to(x.dtype), at, load * p.mean(0)


def sequence_balance(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """DeepSeek's router: sigmoid scores, the choice with a bias, each sequence's balance loss and a z-loss."""
    scores = torch.sigmoid(F.linear(x.float(), w.float()))
    at = (scores + bias.float()).topk(8, -1).indices
    value = scores.gather(-1, at)
    value = value / value.sum(-1, keepdim=True) * 2.5
    hits = torch.zeros_like(scores).scatter(-1, at, 1.0)
    f = hits.mean(1) * (w.shape[0] / 8)
    p = (scores / scores.sum(-1, keepdim=True)).mean(1)
    return value.square().mean() + 1e-2 * (f * p).sum(-1).mean() + 1e-3 * scores.logsumexp(-1).square().mean()


def mirostat(logits: Tensor, mu: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Mirostat 2: tokens more surprising than mu dropped, one drawn by Gumbel noise, mu moved by its surprise."""
    logp = logits.float().log_softmax(-1)
    surprise = -logp / math.log(2)
    best = logp.argmax(-1, keepdim=True)
    keep = (surprise <= mu.abs()[:, None] * 4).scatter(-1, best, True)
    gumbel = -torch.log(-torch.log(torch.sigmoid(noise.float()).clamp(1e-6, 1 - 1e-6)))
    drawn = (logp.masked_fill(~keep, float("-inf")) + gumbel).argmax(-1)
    seen = surprise.gather(-1, drawn[:, None])[:, 0]
    return drawn, mu - 0.1 * (seen - 5.0)


def excluded_tops(logits: Tensor, noise: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Min-p, then XTC: of tokens above 0.1 all but the least are dropped where a coin says so, then a draw."""
    p = (logits.float() / (temperature.abs()[:, None] + 0.5)).softmax(-1)
    p = torch.where(p < 0.02 * p.amax(-1, keepdim=True), 0.0, p)
    top = p > 0.1 * p.amax(-1, keepdim=True)
    least = torch.where(top, p, 2.0).argmin(-1, keepdim=True)
    drop = top & (noise[:, :1] > 0)
    p = p.masked_fill(drop.scatter(-1, least, False), 0.0)
    p = p / p.sum(-1, keepdim=True)
    race = (p / -torch.log(torch.sigmoid(noise.float()).clamp(1e-6, 1 - 1e-6))).argmax(-1)
    return race, p.gather(-1, race[:, None])[:, 0]


def adapters_of_rows(x: Tensor, w: Tensor, a: Tensor, b: Tensor, which: Tensor) -> Tensor:
    """Multi-tenant LoRA: each row's own pair of small matrices, gathered by its adapter's number, by einsum."""
    low = torch.einsum("tsd,trd->tsr", x, a[which])
    return F.linear(x, w) + 2.0 * torch.einsum("tsr,tor->tso", low, b[which])


def hadamard_adapter(x: Tensor, w: Tensor, a1: Tensor, b1: Tensor, a2: Tensor, b2: Tensor) -> Tensor:
    """LoHa: a weight plus an elementwise multiple of two low-rank matrices, applied in one linear layer."""
    return F.gelu(F.linear(x, w + (b1 @ a1) * (b2 @ a2)), approximate="tanh")


def neuron_experts(x: Tensor, keys: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """PEER: 16 single neurons a token of many, by the best of two halves of keys, gathered, gelu, weighted, summed."""
    d = x.shape[-1]
    q1, q2 = x[:, : d // 2], x[:, d // 2 :]
    s1, i1 = (q1 @ keys[0].mT).float().topk(16, -1)
    s2, i2 = (q2 @ keys[1].mT).float().topk(16, -1)
    value, at = (s1[:, :, None] + s2[:, None]).flatten(1).topk(16, -1)
    n = keys.shape[1]
    which = i1.gather(1, at // 16) * n + i2.gather(1, at % 16)
    hidden = F.gelu(torch.einsum("td,tkd->tk", x, down[which])) * value.softmax(-1).to(x.dtype)
    return torch.einsum("tk,tkd->td", hidden, up[which])


def capped_vocabulary(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Logits soft-capped at 30, cross-entropy in float32 with ignored targets and a z-loss."""
    logits = 30 * torch.tanh(F.linear(x, w).float() / 30)
    z = logits.logsumexp(-1)
    target = torch.where(target % 7 == 0, -100, target)
    seen = target != -100
    loss = (z - logits.gather(-1, target.clamp(min=0)[:, None])[:, 0]) * seen
    return loss.sum() / seen.sum() + 1e-4 * (z.square() * seen).sum() / seen.sum()


def sparse_dictionary(x: Tensor, enc: Tensor, dec: Tensor, be: Tensor, bd: Tensor, threshold: Tensor) -> Tensor:
    """A jump-relu autoencoder of activations: thresholds of features, squared error and a tanh penalty of norms."""
    pre = F.linear(x - bd, enc, be)
    gate = (pre > threshold.exp() * 0.5).to(x.dtype)
    act = F.relu(pre) * gate
    back = act @ dec + bd
    norm = dec.float().norm(dim=-1)
    return (x - back).float().square().sum(-1).mean() + 0.3 * torch.tanh(4 * act.float() * norm).sum(-1).mean()


def hopfield(x: Tensor, patterns: Tensor, mask: Tensor) -> Tensor:
    """A modern Hopfield network: three updates of states towards stored patterns, some of them hidden."""
    stored = F.layer_norm(patterns, (patterns.shape[-1],))
    state = F.layer_norm(x, (x.shape[-1],))
    for _ in range(3):
        scores = 0.25 * state @ stored.mT
        state = scores.masked_fill(mask[None] > 1.5, float("-inf")).softmax(-1) @ stored
    return state * x


class _Swish(torch.autograd.Function):
    """x times the sigmoid of a scaled x; keeps x alone for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, beta: Tensor) -> Tensor:
        ctx.save_for_backward(x, beta)
        return x * torch.sigmoid(beta * x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, beta = ctx.saved_tensors
        s = torch.sigmoid(beta * x)
        slope = s * (1 - s)
        return grad * (s + beta * x * slope), (grad * x * x * slope).sum_to_size(beta.shape)


def thrifty_swish(x: Tensor, w0: Tensor, w1: Tensor, beta: Tensor) -> Tensor:
    """A gated mlp whose activation has a gradient of its own and a learned slope for each channel."""
    a, b = F.linear(x, w0).chunk(2, -1)
    return F.linear(_Swish.apply(a, beta) * b, w1)


class _Rounded(torch.autograd.Function):
    """Rows rounded to 8 bits by their maxima; the gradient goes through, clipped by its own rows' scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 127
        return (x / scale).round().clamp(-128, 127) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        limit = 3 * grad.float().square().mean(-1, keepdim=True).sqrt()
        return grad.clamp(-limit.to(grad.dtype), limit.to(grad.dtype))


def rounded_rows(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """A linear layer of normed rows and weights rounded through a function with its own gradient."""
    y = F.linear(_Rounded.apply(F.rms_norm(x, (x.shape[-1],), g)), _Rounded.apply(w))
    return F.silu(y) + x


def kept_largest(x: Tensor, w0: Tensor, w1: Tensor) -> Tensor:
    """CATS-like sparsity: an mlp keeps each row's activations above its own mean magnitude, as a mask."""
    h = F.silu(F.linear(x, w0))
    size = h.detach().abs()
    keep = size > size.float().mean(-1, keepdim=True).to(h.dtype)
    return F.linear(h * keep, w1) * keep.float().mean().to(h.dtype)


LATENT = Sized(
    latent_heads,
    lambda m, b, s, d, n: (
        [
            m(b, s, d),
            weight(m, d // 2, d),
            weight(m, n * 48, d // 2),
            weight(m, d // 4 + 16, d),
            weight(m, n * 64, d // 4),
            weight(m, d, n * 32),
            m(s, 8),
        ]
    ),
    (2, 9, 32, 2),
)
SIGMOID = Sized(sigmoid_scores, lambda m, b, h, s, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d)], (2, 2, 9, 8), HALF)
GROUPS = Sized(
    normed_groups,
    lambda m, b, s, d, n, kv: (
        [m(b, s, d), weight(m, n * 64, d), weight(m, kv * 64, d), weight(m, kv * 64, d), m(64), m(64), weight(m, n * 64, d)]
    ),
    (2, 9, 32, 4, 2),
)
LENGTH = Sized(scaled_by_length, lambda m, b, h, s, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d), m(h).abs()], (2, 2, 9, 8))
ROTATIONS = Sized(
    own_rotations,
    lambda m, b, s, n, p: [m(b, s, n * 2 * p), weight(m, 3 * n * 2 * p, n * 2 * p), m(2, n, p), m(s, 2)],
    (2, 9, 2, 4),
)
FIRST = Sized(
    first_values,
    lambda m, b, s, d: (
        [m(b, s, d), m(b, s, d), weight(m, 3 * d, d), m(2), weight(m, d, d), weight(m, 4 * d, d), weight(m, d, 4 * d)]
    ),
    (2, 9, 128),
)
PREFIX = Sized(
    prefix_both_ways,
    lambda m, b, s, h, d: [m(b, s, h, d), m(b, s, h, d), m(b, s, h, d), ids(m, s, b), m(h, 32)],
    (2, 20, 2, 8),
)
PRIMER = Sized(
    primer,
    lambda m, b, s, d: [m(b, s, d), weight(m, 3 * d, d), weight(m, d, 1, 3), weight(m, d, 1, 3), weight(m, d, 1, 3)],
    (2, 9, 64),
)
LOGGED = Sized(
    logged_lstm, lambda m, b, s, d, h: [m(b, s, d), weight(m, h, d), weight(m, h, d), weight(m, h, d)], (2, 11, 8, 6)
)
HADAMARD = Sized(
    hadamard_adapter,
    lambda m, t, d, o, r: [m(t, d), weight(m, o, d), m(r, d) * 0.1, m(o, r) * 0.1, m(r, d) * 0.1, m(o, r) * 0.1],
    (9, 8, 6, 2),
)
NEURONS = Sized(
    neuron_experts,
    lambda m, t, d, n: [m(t, d), weight(m, 2, n, d // 2), weight(m, n * n, d), m(n * n, d)],
    (5, 8, 16),
)

BLOCKS: tuple[Block, ...] = (
    LATENT.block("latent heads", 2, 2048, 1024, 16, training=True),
    SIGMOID.block("sigmoid scores", 2, 12, 1024, 64),
    GROUPS.block("normed groups", 2, 2048, 1024, 16, 4, training=True),
    LENGTH.block("scaled by length", 2, 12, 1023, 64, training=True),
    ROTATIONS.block("own rotations", 16, 577, 12, 32),
    FIRST.block("first values", 2, 2048, 768, training=True),
    PREFIX.block("prefix both ways", 4, 768, 12, 64, training=True),
    Sized(thinned_weights, lambda m, b, s, d: [m(b, s, d), m(b, s, d), m(b, s, d), m(b, s, s)], (3, 16, 8)).block(
        "thinned weights", 48, 512, 64, training=True
    ),
    Sized(bisected_entmax, lambda m, b, h, s, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d)], (2, 2, 9, 8)).block(
        "bisected entmax", 2, 12, 512, 64, training=True
    ),
    PRIMER.block("primer", 4, 1024, 768),
    Sized(
        heavy_hitters,
        lambda m, b, h, s, d: [m(b, h, 1, d), m(b, h, s, d), m(b, h, s, d), m(b, h, s)],
        (2, 2, 16, 8),
        HALF,
    ).block("heavy hitters", 8, 16, 2048, 128),
    Sized(
        recurrent_delta,
        lambda m, b, h, d: [m(b, h, d), m(b, h, d), m(b, h, d), m(b, h), m(b, h), m(b, h, d, d).float()],
        (2, 3, 8),
    ).block("recurrent delta", 64, 32, 128),
    LOGGED.block("logged lstm", 8, 1024, 512, 768, training=True),
    Sized(
        wkv_steps,
        lambda m, b, t, h, d: [m(b, t, h, d) for _ in range(5)] + [m(b, h, d, d)],
        (2, 3, 2, 8),
        SINGLE,
    ).block("wkv steps", 32, 4, 32, 64, training=True),
    Sized(routed_by_mass, lambda m, t, d, e: [m(t, d), weight(m, e, d)], (9, 8, 12)).block("routed by mass", 16384, 1024, 64),
    Sized(sequence_balance, lambda m, b, s, d, e: [m(b, s, d), weight(m, e, d), m(e) * 0.1], (2, 9, 8, 16)).block(
        "sequence balance", 8, 2048, 1024, 256, training=True
    ),
    Sized(mirostat, lambda m, b, v: [m(b, v) * 3, m(b), m(b, v)], (3, 50), SINGLE).block("mirostat", 64, 128256),
    Sized(excluded_tops, lambda m, b, v: [m(b, v) * 3, m(b, v), m(b)], (3, 50), HALF).block("excluded tops", 96, 151936),
    Sized(
        adapters_of_rows,
        lambda m, b, s, d, o, e, r: [m(b, s, d), weight(m, o, d), weight(m, e, r, d), m(e, o, r), ids(m, e, b)],
        (3, 5, 8, 6, 4, 2),
    ).block("adapters of rows", 32, 128, 2048, 2048, 16, 16, training=True),
    HADAMARD.block("hadamard adapter", 4096, 1024, 3072, 16),
    NEURONS.block("neuron experts", 4096, 512, 256, training=True),
    Sized(capped_vocabulary, lambda m, t, d, v: [m(t, d), weight(m, v, d), ids(m, v, t)], (9, 8, 30)).block(
        "capped vocabulary", 2048, 768, 50257, training=True
    ),
    Sized(
        sparse_dictionary,
        lambda m, t, d, f: [m(t, d), weight(m, f, d), weight(m, f, d), m(f) * 0.1, m(d), m(f) * 0.3],
        (9, 8, 20),
    ).block("sparse dictionary", 4096, 768, 6144, training=True),
    Sized(hopfield, lambda m, t, n, d: [m(t, d), m(n, d), m(n)], (9, 12, 8)).block("hopfield", 4096, 2048, 256, training=True),
    Sized(
        thrifty_swish,
        lambda m, t, d, h: [m(t, d), weight(m, 2 * h, d), weight(m, d, h), m(h).abs()],
        (9, 8, 12),
    ).block("thrifty swish", 4096, 1024, 2730, training=True),
    Sized(rounded_rows, lambda m, t, d: [m(t, d), weight(m, d, d), m(d)], (9, 8)).block(
        "rounded rows", 8192, 2048, training=True
    ),
    Sized(kept_largest, lambda m, t, d, h: [m(t, d), weight(m, h, d), weight(m, d, h)], (9, 8, 16)).block(
        "kept largest", 4096, 1024, 4096, training=True
    ),
)
