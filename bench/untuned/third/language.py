"""Blocks of state space models, experts, quantised weights, decoding and heads of language models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32
NF4 = (
    -1.0,
    -0.6962,
    -0.5251,
    -0.3949,
    -0.2844,
    -0.1848,
    -0.0911,
    0.0,
    0.0796,
    0.1609,
    0.2461,
    0.3379,
    0.4407,
    0.5626,
    0.723,
    1.0,
)


def gated_linear(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Gated linear attention in chunks of 32; (batch, heads, steps, channels)."""
    b, h, t, d = q.shape
    q, k, v = (x.view(b, h, t // 32, 32, -1) for x in (q, k, v))
    decay = (F.logsigmoid(gate) / 16).view(b, h, t // 32, 32, d).cumsum(3)
    inner = (q * decay.exp()) @ (k * (-decay).exp()).transpose(-1, -2)
    out = inner.tril() @ v
    state, carried = torch.zeros(b, h, d, v.shape[-1], device=q.device, dtype=q.dtype), []
    last = decay[:, :, :, -1:]
    new = (k * (last - decay).exp()).transpose(-1, -2) @ v
    for n in range(t // 32):
        carried.append((q[:, :, n] * decay[:, :, n].exp()) @ state)
        state = last[:, :, n].exp().transpose(-1, -2) * state + new[:, :, n]
    return (out + torch.stack(carried, 2)).reshape(b, h, t, -1)


def rwkv(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV's stable recurrence in a Python loop; (batch, steps, channels)."""
    num, den, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e38)
    decay, out = -torch.exp(w), []
    for t in range(k.shape[1]):
        p = torch.maximum(top, u + k[:, t])
        a, b = torch.exp(top - p), torch.exp(u + k[:, t] - p)
        out.append((a * num + b * v[:, t]) / (a * den + b))
        p = torch.maximum(top + decay, k[:, t])
        a, b = torch.exp(top + decay - p), torch.exp(k[:, t] - p)
        num, den, top = a * num + b * v[:, t], a * den + b, p
    return torch.sigmoid(r) * torch.stack(out, 1)


def long_convolution(x: Tensor, w: Tensor, filters: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Hyena: a short convolution of three streams, gates, a convolution as long as the sequence by FFT."""
    t = x.shape[1]
    z = F.linear(x, w).transpose(1, 2)
    z = F.conv1d(z, filters[: z.shape[0], :, -3:].reshape(-1, 1, 3).expand(z.shape[1], 1, 3), padding=2, groups=z.shape[1])[
        ..., :t
    ]
    a, b, v = z.chunk(3, 1)
    u = v * b
    decayed = filters.view(-1, t) * torch.exp(-torch.arange(t, device=x.device, dtype=x.dtype) * 0.01)
    y = torch.fft.irfft(torch.fft.rfft(u, n=2 * t) * torch.fft.rfft(decayed, n=2 * t), n=2 * t)[..., :t]
    return F.linear(((y + u * bias[:, None]) * a).transpose(1, 2), out)


def diagonal_states(x: Tensor, log_dt: Tensor, real: Tensor, imaginary: Tensor, cr: Tensor, ci: Tensor, skip: Tensor) -> Tensor:
    """S4D: the kernel of a diagonal state space, and its convolution by FFT; x of (batch, channels, steps)."""
    t = x.shape[-1]
    dt = torch.exp(log_dt.clamp(max=0) - 4)[:, None]
    a, c = torch.complex(-torch.exp(real), imaginary), torch.complex(cr, ci)
    step = a * dt
    c = c * (torch.exp(step) - 1) / a
    kernel = 2 * torch.einsum("hn,hnl->hl", c, torch.exp(step[..., None] * torch.arange(t, device=x.device))).real
    y = torch.fft.irfft(torch.fft.rfft(x, n=2 * t) * torch.fft.rfft(kernel, n=2 * t), n=2 * t)[..., :t]
    return F.gelu(y + skip[:, None] * x)


def grouped_router(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """DeepSeek-V3's router: 4 of 8 groups by their two best experts, then 8 experts, and how many tokens each gets."""
    scores = F.linear(x.float(), w.float()).sigmoid()
    choice = scores + bias
    n, e = scores.shape
    best = choice.view(n, 8, -1).topk(2, dim=-1)[0].sum(-1)
    mask = torch.zeros_like(best).scatter_(1, best.topk(4, dim=-1, sorted=False)[1], 1)
    mask = mask[..., None].expand(n, 8, e // 8).reshape(n, e)
    at = choice.masked_fill(~mask.bool(), 0.0).topk(8, dim=-1)[1]
    share = scores.gather(1, at)
    share = share / (share.sum(-1, keepdim=True) + 1e-20) * 2.5
    load = torch.zeros(e, device=x.device).index_add_(0, at.flatten(), torch.ones(n * 8, device=x.device))
    return share, at, load


def expert_choice(x: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each expert takes its best tokens; results are added where the tokens were."""
    p = F.linear(x, w).softmax(-1)
    share, at = p.t().topk(2 * x.shape[0] // w.shape[0], dim=1)
    y = torch.bmm(F.gelu(torch.bmm(x[at], up)), down) * share[..., None]
    return torch.zeros_like(x).index_add(0, at.reshape(-1), y.reshape(-1, x.shape[1]))


def shared_experts(x: Tensor, w: Tensor, up: Tensor, down: Tensor, shared: Tensor, back: Tensor, gate: Tensor) -> Tensor:
    """Experts in a loop over all tokens, a shared one with a gate of its own, and the balance of load."""
    p = F.linear(x, w).softmax(-1)
    top, at = p.topk(2)
    top = top / top.sum(-1, keepdim=True)
    y = torch.sigmoid(F.linear(x, gate)) * F.linear(F.silu(F.linear(x, shared)), back)
    for e in range(w.shape[0]):
        share = (top * (at == e)).sum(-1, keepdim=True)
        y = y + share * F.linear(F.silu(F.linear(x, up[e])), down[e])
    load = F.one_hot(at, w.shape[0]).sum(1).to(x.dtype).mean(0)
    return y + (load * p.mean(0)).sum() * w.shape[0]


def normal_floats(x: Tensor, packed: Tensor, scale: Tensor, table: Tensor) -> Tensor:
    """A linear layer of NF4 weights: two codes a byte, looked up, scaled by blocks of 64."""
    codes = torch.stack((packed >> 4, packed & 15), -1).view(-1, 64)
    w = (table[codes.int()] * scale.abs()[:, None]).view(-1, x.shape[-1])
    return F.linear(x, w.to(x.dtype))


def packed_zeros(x: Tensor, words: Tensor, zeros: Tensor, scale: Tensor, group: Tensor) -> Tensor:
    """GPTQ: eight codes in an int32 along k, zero points packed along n, an index of groups."""
    shift = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    w = ((words[:, None] >> shift[:, None]) & 15).reshape(-1, words.shape[1])
    z = ((zeros[..., None] >> shift) & 15).reshape(zeros.shape[0], -1) + 1
    return x @ ((w - z[group]).to(x.dtype) * scale[group])


def smoothed(x: Tensor, w: Tensor, smooth: Tensor) -> Tensor:
    """SmoothQuant while training: scales move from inputs to weights, both rounded with straight-through gradients."""
    s = smooth.abs() + 0.5

    def rounded(t: Tensor) -> Tensor:
        step = t.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return t + ((t / step).round().clamp(-128, 127) * step - t).detach()

    return F.linear(rounded(x / s), rounded(w * s))


def block_scales(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """8-bit floats with scales of 128x128 blocks; inputs with scales of 128 columns, rounded to 8 bits too."""
    g = x.float().unflatten(-1, (-1, 128))
    s = g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    xq = ((g / s).to(torch.float8_e4m3fn).float() * s).flatten(-2)
    big = scale.abs().repeat_interleave(128, 0).repeat_interleave(128, 1)[: w.shape[0]]
    return F.linear(xq.to(x.dtype), (w.float() * big.float()).to(x.dtype))


def conditional_field(emissions: Tensor, transitions: Tensor, tags: Tensor, lengths: Tensor) -> Tensor:
    """The negative log likelihood of a linear-chain CRF, by a loop over (batch, steps, tags)."""
    t = emissions.shape[1]
    mask = torch.arange(t, device=emissions.device) < lengths[:, None]
    own = emissions.gather(2, tags[..., None]).squeeze(2)
    gold = (own * mask).sum(1) + (transitions[tags[:, :-1], tags[:, 1:]] * mask[:, 1:]).sum(1)
    alpha = emissions[:, 0]
    for k in range(1, t):
        new = torch.logsumexp(alpha[:, :, None] + transitions, 1) + emissions[:, k]
        alpha = torch.where(mask[:, k, None], new, alpha)
    return (torch.logsumexp(alpha, 1) - gold).mean()


def best_span(h: Tensor, w: Tensor, b: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Start and end of an answer of at most 30 words within the passage."""
    start, end = F.linear(h, w, b).unbind(-1)
    start, end = (F.log_softmax(t.float().masked_fill(kinds == 0, -1e9), -1) for t in (start, end))
    n = h.shape[1]
    ok = torch.ones(n, n, dtype=torch.bool, device=h.device).triu().tril(29)
    s = (start[:, :, None] + end[:, None]).masked_fill(~ok, -1e9).flatten(1)
    value, at = s.max(1)
    return value, at // n, at % n


def masked_words(h: Tensor, at: Tensor, w: Tensor, b: Tensor, g: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """BERT's head at masked positions, with the tied table of embeddings and ignored labels."""
    x = h.flatten(0, 1)[at]
    x = F.layer_norm(F.gelu(F.linear(x, w, b)), b.shape, g, b)
    return F.cross_entropy(F.linear(x, table).float(), labels - 1, ignore_index=-1, label_smoothing=0.1)


def accepted_drafts(target: Tensor, draft: Tensor, tokens: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative decoding: how many drafted tokens stay, and what the next one is drawn from."""
    p, q = target.float().softmax(-1), draft.float().softmax(-1)
    pt, qt = (v.gather(2, tokens[..., None]).squeeze(2) for v in (p[:, :-1], q))
    accepted = (torch.sigmoid(noise.float()) < pt / qt).int().cumprod(1)
    n = accepted.sum(1)
    at = n.view(-1, 1, 1).expand(-1, 1, p.shape[2])
    residual = (p.gather(1, at) - F.pad(q, (0, 0, 0, 1)).gather(1, at)).squeeze(1).clamp(min=0)
    return n, residual / residual.sum(-1, keepdim=True).clamp(min=1e-9)


def penalties(logits: Tensor, seen: Tensor) -> Tensor:
    """Presence and frequency penalties from counts, then words below a share of the best one, or past .9 in sum, are hidden."""
    counts = torch.zeros(logits.shape, device=logits.device).scatter_add_(1, seen, torch.ones(seen.shape, device=logits.device))
    x = logits.float() - 0.3 * counts - 0.2 * (counts > 0)
    p = x.softmax(-1)
    x = x.masked_fill(p < 0.001 * p.amax(-1, keepdim=True), float("-inf"))
    ordered, at = torch.sort(x, descending=True, stable=True)
    beyond = ordered.softmax(-1).cumsum(-1) > 0.9
    beyond[:, 1:] = beyond[:, :-1].clone()
    beyond[:, 0] = False
    return x.masked_fill(torch.zeros_like(beyond).scatter(1, at, beyond), float("-inf")).softmax(-1)


def attention_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, documents: Tensor) -> Tensor:
    """Attention within documents and a window of 128, with a learned logit that takes share and gives nothing."""
    t = q.shape[2]
    i = torch.arange(t, device=q.device)
    ok = (i[:, None] >= i) & (i[:, None] - i < 128) & (documents[:, :, None] == documents[:, None])
    s = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~ok[:, None], float("-inf"))
    s = torch.cat((s, sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, t, 1)), -1)
    return s.softmax(-1, dtype=torch.float32)[..., :-1].to(v.dtype) @ v


def latent_decode(q: Tensor, rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """Latent attention of one token, the up projections absorbed; q of (batch, heads, channels)."""
    absorbed = torch.einsum("bhd,hdc->bhc", q, up)
    s = torch.einsum("bhc,btc->bht", absorbed, latents) + torch.einsum("bhr,btr->bht", rope, keys)
    p = (s * (q.shape[-1] + rope.shape[-1]) ** -0.5).softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bhc,hcd->bhd", torch.einsum("bht,btc->bhc", p, latents), out).flatten(1)


def clamped_gates(x: Tensor, w: Tensor, b: Tensor, down: Tensor) -> Tensor:
    """A feed-forward layer whose gates and values alternate, both clamped."""
    y = F.linear(x, w, b)
    gate, value = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return F.linear(gate * torch.sigmoid(1.702 * gate) * (value + 1), down)


def cache_in_bytes(k: Tensor, v: Tensor, at: Tensor, keys: Tensor, scales: Tensor, q: Tensor) -> Tensor:
    """A new key is rounded to bytes and put in a cache in place; scores of a query against what the cache holds."""
    s = (k.float().abs().amax(-1, keepdim=True) / 127).clamp(min=1e-6)
    keys.index_copy_(1, at, (k.float() / s).round().to(torch.int8))
    scales.index_copy_(1, at, s.to(scales.dtype))
    full = keys.to(q.dtype) * scales
    return F.scaled_dot_product_attention(q, full, full + v)


def preference(policy: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """DPO: sums of log probabilities of chosen and rejected halves, labels of 0 ignored."""
    mask = labels[:, 1:] != 0

    def summed(logits: Tensor) -> Tensor:
        logp = torch.log_softmax(logits[:, :-1].float(), -1)
        return (logp.gather(2, labels[:, 1:, None]).squeeze(2) * mask).sum(1)

    ours, theirs = summed(policy).chunk(2), summed(reference.detach()).chunk(2)
    return -F.logsigmoid(0.1 * ((ours[0] - ours[1]) - (theirs[0] - theirs[1]))).mean()


def _states(m: Make, b: int, h: int, n: int, t: int) -> list[Tensor]:
    return [m(b, h, t), m(h), m(h, n) * 0.1, m(h, n) * 3, m(h, n), m(h, n), m(h)]


def _words(m: Make, *shape: int) -> Tensor:
    return (ids(m, 2**16, *shape) * 65521 % 2**32 - 2**31).to(torch.int32)


def _gptq(m: Make, n: int, i: int, o: int) -> list[Tensor]:
    groups = i // 32
    return [m(n, i), _words(m, i // 8, o), _words(m, groups, o // 8), m(groups, o) * 0.02, ids(m, groups, i)]


def _shared(m: Make, n: int, d: int, f: int, e: int) -> list[Tensor]:
    return [
        m(n, d),
        weight(m, e, d),
        m(e, f, d) * d**-0.5,
        m(e, d, f) * f**-0.5,
        weight(m, f, d),
        weight(m, d, f),
        weight(m, 1, d),
    ]


def _latents(m: Make, b: int, h: int, d: int, c: int, r: int, t: int) -> list[Tensor]:
    return [m(b, h, d), m(b, h, r), m(b, t, c), m(b, t, r), m(h, d, c) * d**-0.5, m(h, c, d) * c**-0.5]


def _head(m: Make, b: int, t: int, n: int, d: int, v: int) -> list[Tensor]:
    return [m(b, t, d), ids(m, b * t, n), weight(m, d, d), m(d), m(d), weight(m, v, d), ids(m, v, n)]


def _cache(m: Make, b: int, h: int, t: int, d: int) -> list[Tensor]:
    return [
        m(b * h, 1, d),
        m(b * h, 1, d),
        ids(m, t, 1),
        ids(m, 255, b * h, t, d).sub(127).to(torch.int8),
        m(b * h, t, 1).abs() * 0.01,
        m(b * h, 3, d),
    ]


BLOCKS: tuple[Block, ...] = (
    *Sized(gated_linear, lambda m, b, h, t, d: [m(b, h, t, d) for _ in range(4)], (1, 2, 64, 8), SINGLE, tf32=True).both(
        "gated linear attention", 4, 8, 512, 64
    ),
    Sized(rwkv, lambda m, b, t, d: [*(m(b, t, d) for _ in range(3)), m(d), m(d)], (2, 5, 8), SINGLE).block("rwkv", 8, 48, 1025),
    Sized(
        long_convolution,
        lambda m, b, t, d: [m(b, t, d), weight(m, 3 * d, d), m(d, 1, t) * 0.1, m(d), weight(m, d, d)],
        (1, 12, 6),
        SINGLE,
        tf32=True,
    ).block("long convolution", 1, 2047, 512, training=True),
    Sized(diagonal_states, _states, (2, 6, 4, 11), SINGLE).block("diagonal states", 16, 256, 32, 1000),
    Sized(grouped_router, lambda m, n, d, e: [m(n, d), weight(m, e, d), m(e) * 0.1], (5, 12, 32), SINGLE, tf32=True).block(
        "grouped router", 4000, 1024, 256
    ),
    Sized(
        expert_choice,
        lambda m, n, d, f, e: [m(n, d), weight(m, e, d), m(e, d, f) * d**-0.5, m(e, f, d) * f**-0.5],
        (12, 8, 10, 4),
    ).block("expert choice", 4096, 512, 1000, 16, training=True),
    Sized(shared_experts, _shared, (9, 8, 12, 4), HALF).block("shared experts", 777, 512, 768, 8),
    Sized(
        normal_floats,
        lambda m, n, i, o: [
            m(n, i),
            ids(m, 256, o, i // 2).to(torch.uint8),
            m(o * i // 64),
            torch.tensor(NF4, device=m(1).device),
        ],
        (3, 64, 9),
        HALF,
    ).block("normal floats", 9, 4096, 5120),
    Sized(packed_zeros, _gptq, (3, 64, 16), HALF).block("packed zero points", 5, 4096, 6144),
    Sized(smoothed, lambda m, n, i, o: [m(n, i), weight(m, o, i), m(i)], (5, 12, 7)).block(
        "smoothed int8", 3000, 1000, 1536, training=True
    ),
    Sized(
        block_scales,
        lambda m, n, i, o: [m(n, i), m(o, i).to(torch.float8_e4m3fn), m(-(-o // 128), i // 128) * 0.02],
        (3, 256, 130),
    ).block("block scales", 60, 4096, 1400),
    Sized(
        conditional_field,
        lambda m, b, t, k: [m(b, t, k), m(k, k), ids(m, k, b, t), ids(m, t, b) + 1],
        (3, 6, 5),
        SINGLE,
    ).block("conditional random field", 128, 32, 21, training=True),
    Sized(best_span, lambda m, b, t, d: [m(b, t, d), weight(m, 2, d), m(2), ids(m, 3, b, t)], (2, 40, 8), HALF).block(
        "best span", 16, 384, 768
    ),
    Sized(masked_words, _head, (2, 7, 5, 12, 30)).block("masked words", 16, 129, 333, 770, 30522, training=True),
    Sized(accepted_drafts, lambda m, b, k, v: [m(b, k + 1, v), m(b, k, v), ids(m, v, b, k), m(b, k)], (3, 4, 20)).block(
        "accepted drafts", 16, 5, 50257
    ),
    Sized(penalties, lambda m, b, v: [m(b, v), ids(m, v, b, 99)], (2, 80), HALF).block("penalties", 15, 32003),
    Sized(
        attention_sinks,
        lambda m, b, h, t, d: [*(m(b, h, t, d) for _ in range(3)), m(h), ids(m, 3, b, t).cumsum(1) // max(t // 2, 1)],
        (2, 2, 9, 8),
    ).block("attention sinks", 2, 16, 1000, 64, training=True),
    Sized(latent_decode, _latents, (2, 3, 8, 12, 4, 9), HALF).block("latent decode", 8, 64, 128, 512, 64, 1501),
    *Sized(clamped_gates, lambda m, n, d, f: [m(n, d), weight(m, 2 * f, d), m(2 * f), weight(m, d, f)], (5, 12, 10)).both(
        "clamped gates", 1025, 1440, 1440
    ),
    Sized(cache_in_bytes, _cache, (2, 2, 9, 8), HALF).block("cache in bytes", 8, 16, 1500, 128),
    Sized(preference, lambda m, b, t, v: [m(2 * b, t, v), m(2 * b, t, v), ids(m, v, 2 * b, t)], (2, 5, 9)).block(
        "preference loss", 4, 130, 32001, training=True
    ),
)
