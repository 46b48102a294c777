"""Blocks of language models: rotary spellings, choices of tokens, codes of few bits, layers, gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

SINGLE = torch.float32


# ---- positions and scores -------------------------------------------------------------------------------------------------


def halves_by_positions(q: Tensor, k: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by halves, angles read by the tokens' own positions."""

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-b, a), dim=-1)

    c, s = cos[at].unsqueeze(1), sin[at].unsqueeze(1)
    return (q * c) + (turned(q) * s), (k * c) + (turned(k) * s)


def halves_together(q: Tensor, k: Tensor, at: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same, one tensor of all heads."""
    return torch.cat(halves_by_positions(q, k, at, cos, sin), 1)


def every_two(x: Tensor, at: Tensor, table: Tensor) -> Tensor:
    """GPT-J: pairs of adjacent numbers turned, the rest of each head as it is."""
    found = table.expand(at.shape[0], -1, -1).gather(1, at.unsqueeze(-1).expand(-1, -1, table.shape[-1]))
    sin, cos = torch.chunk(found, 2, dim=-1)
    sin, cos = sin[:, :, None].repeat_interleave(2, 3), cos[:, :, None].repeat_interleave(2, 3)
    n = sin.shape[-1]
    a, rest = x[..., :n], x[..., n:]
    pairs = torch.stack((-a[..., 1::2], a[..., ::2]), dim=-1).flatten(-2)
    return torch.cat([a * cos + pairs * sin, rest], -1).permute(0, 2, 1, 3)


def low_rank_heads(x: Tensor, down: Tensor, norms: Tensor, up_q: Tensor, up_kv: Tensor, angles: Tensor) -> Tensor:
    """DeepSeek's projections: narrow queries and a narrow cache, norms, wide again, a turned part for all heads; causal."""
    n, s, _ = x.shape
    r = norms.shape[1]
    q, c, shared = F.linear(x, down).split([r, r, 64], -1)
    q, c = F.rms_norm(q, (r,), norms[0], 1e-6), F.rms_norm(c, (r,), norms[1], 1e-6)
    q = F.linear(q, up_q).view(n, s, -1, 128).transpose(1, 2)
    k, v = F.linear(c, up_kv).view(n, s, -1, 128).transpose(1, 2).split([64, 64], -1)
    plain, q = q.split([64, 64], -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def turned(y: Tensor) -> Tensor:
        y = y.view(*y.shape[:-1], 32, 2).transpose(-1, -2).reshape(y.shape)
        return y * cos + torch.cat((-y[..., 32:], y[..., :32]), -1) * sin

    q = torch.cat([plain, turned(q)], -1)
    k = torch.cat([k, turned(shared[:, None]).expand(-1, k.shape[1], -1, -1)], -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, s, -1)


def window_and_first(q: Tensor, k: Tensor, v: Tensor, width: Tensor) -> Tensor:
    """Each token sees the last few of its own window, and the first four."""
    at = torch.arange(q.shape[2], device=q.device)
    seen = (at[None] <= at[:, None]) & ((at[:, None] - at[None] < width.shape[0]) | (at[None] < 4))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def resampler(latents: Tensor, media: Tensor, norms: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor) -> Tensor:
    """Flamingo's: latents see the media and themselves, scores less their largest."""
    n, _, d = media.shape
    x = F.layer_norm(media, (d,), norms[0], norms[1])
    y = F.layer_norm(latents, (d,), norms[2], norms[3]).expand(n, -1, -1)
    q = F.linear(y, wq).unflatten(-1, (-1, 64)).permute(0, 2, 1, 3) * 64**-0.5
    k, v = F.linear(torch.cat((x, y), dim=-2), wkv).chunk(2, dim=-1)
    k, v = (t.unflatten(-1, (-1, 64)).permute(0, 2, 1, 3) for t in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k)
    scores = scores - scores.amax(dim=-1, keepdim=True).detach()
    out = torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v).permute(0, 2, 1, 3).flatten(2)
    return latents + F.linear(out, wo)


def tanh_gated(x: Tensor, memory: Tensor, lengths: Tensor, wq: Tensor, wkv: Tensor, gates: Tensor) -> Tensor:
    """A layer of cross attention to padded memory behind a gate that starts shut."""
    n, s, d = x.shape
    q = F.linear(F.layer_norm(x, (d,)), wq).view(n, s, -1, 64).transpose(1, 2)
    k, v = F.linear(memory, wkv).view(n, memory.shape[1], 2, -1, 64).permute(2, 0, 3, 1, 4)
    seen = (torch.arange(memory.shape[1], device=x.device) < lengths[:, None])[:, None, None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.expand(-1, -1, s, -1)).transpose(1, 2).reshape(n, s, d)
    return x + gates[0].tanh() * y + gates[1].tanh() * F.silu(x)


# ---- choices of tokens ----------------------------------------------------------------------------------------------------


def chained_choices(logits: Tensor, seen: Tensor, temperature: Tensor) -> Tensor:
    """transformers' choices in their order: repetition, temperature, the 50 largest, 0.9 of the mass."""
    score = torch.gather(logits, 1, seen)
    logits = logits.scatter(1, seen, torch.where(score < 0, score * 1.3, score / 1.3))
    logits = logits / (temperature.abs() + 0.5)
    logits = logits.masked_fill(logits < torch.topk(logits, 50)[0][..., -1, None], -float("inf"))
    ordered, order = torch.sort(logits, descending=False)
    gone = ordered.softmax(dim=-1).cumsum(dim=-1) <= 0.1
    gone[..., -1:] = False
    return logits.masked_fill(gone.scatter(1, order, gone), -float("inf")).softmax(-1)


def rejected_drafts(drafts: Tensor, p: Tensor, q: Tensor, uniform: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Speculative decoding: drafts kept while their ratio allows, then a token of what remains of the target."""
    p, q = p.softmax(-1), q.softmax(-1)
    ratio = (p[:, :-1].gather(2, drafts[..., None]) / q.gather(2, drafts[..., None]).clamp_min(1e-10))[..., 0]
    number = (uniform.sigmoid() <= ratio).int().cumprod(1).sum(1)
    kept = torch.cat([q, torch.zeros_like(q[:, :1])], 1)
    at = number[:, None, None].long().expand(-1, 1, p.shape[-1])
    rest = (p.gather(1, at) - kept.gather(1, at)).clamp_min(0)[:, 0]
    rest = rest / rest.sum(-1, keepdim=True).clamp_min(1e-10)
    token = (rest / (noise.abs() + 1e-3)).argmax(-1)
    out = torch.cat([drafts, torch.zeros_like(drafts[:, :1])], 1)
    return out.scatter(1, number[:, None].long(), token[:, None]), number


def reordered_beams(logits: Tensor, scores: Tensor, cache: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A step of a search with several beams: the best continuations of each text, caches and texts put in their order."""
    b, k = scores.shape
    total = F.log_softmax(logits.float(), -1).view(b, k, -1) + scores[..., None]
    best, at = torch.topk(total.view(b, -1), k, dim=1)
    source, token = at // logits.shape[-1], at % logits.shape[-1]
    rows = (torch.arange(b, device=at.device)[:, None] * k + source).view(-1)
    return best / texts.shape[1] ** 0.6, cache.index_select(0, rows), torch.cat([texts[rows], token.view(-1, 1)], 1)


def ranks_of_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A server's log-probabilities: of the chosen tokens, their ranks, and the twenty largest."""
    logp = logits.log_softmax(dim=-1, dtype=torch.float32)
    own = logp.gather(-1, tokens[:, None])
    return own, (logp >= own).sum(-1), logp.topk(20, dim=-1)[0]


def merged_features(tokens: Tensor, table: Tensor, images: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Embeddings of a text, those of its image tokens replaced by projected features in order."""
    x = F.embedding(tokens, table)
    return x.masked_scatter((tokens == 3)[..., None].expand_as(x), F.gelu(F.linear(images, w, b)))


# ---- codes of few bits ----------------------------------------------------------------------------------------------------


def interleaved_nibbles(x: Tensor, codes: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
    """AWQ: eight numbers of four bits in an int32, in an order of their own, by groups of 128 rows."""
    order = [0, 4, 1, 5, 2, 6, 3, 7]
    shifts = torch.tensor([4 * k for k in order], device=x.device, dtype=torch.int32)
    w = ((codes[:, :, None] >> shifts) & 15).flatten(1)
    z = ((zeros[:, :, None] >> shifts) & 15).flatten(1)
    group = w.shape[0] // z.shape[0]
    w = (w - z.repeat_interleave(group, 0)).to(x.dtype) * scales.repeat_interleave(group, 0)
    return x @ w


def quantised_gate(x: Tensor, gate: Tensor, up: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to int8, two int8 matmuls, a gate, and rows to int8 again for the next."""
    largest = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    q = torch.round(x.float() / largest).clamp(-128, 127).to(torch.int8)
    a = torch._int_mm(q, gate.t()).float() * largest * scales[0].float().abs()
    b = torch._int_mm(q, up.t()).float() * largest * scales[1].float().abs()
    y = F.silu(a) * b
    size = y.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
    return torch.round(y / size).clamp(-128, 127).to(torch.int8), size


def codes_both_ways(x: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Two tensors to float8 for a training step: by rows, and transposed by columns, in two formats."""
    out: list[Tensor] = []
    for t, kind, most in ((x, torch.float8_e4m3fn, 448.0), (gradient, torch.float8_e5m2, 57344.0)):
        for y in (t.float(), t.float().t()):
            scale = y.abs().amax(1, keepdim=True).clamp_min(1e-12) / most
            out += [(y / scale).clamp(-most, most).to(kind).contiguous().float().sum(1), scale]
    return tuple(out)


def nibble_cache(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys in groups of 32 to four bits with zeros of their own, two in a byte; and what they are read as."""
    g = x.unflatten(-1, (-1, 32)).float()
    low, high = g.amin(-1, keepdim=True), g.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-6)
    q = ((g - low) / scale).round().clamp(0, 15).to(torch.uint8)
    packed = q[..., 0::2] | (q[..., 1::2] << 4)
    read = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).float() * scale + low
    return packed.flatten(-2), torch.cat([low, scale], -1), read.view(x.shape).to(x.dtype)


# ---- layers and losses ----------------------------------------------------------------------------------------------------


def adapter_of_each_token(x: Tensor, at: Tensor, down: Tensor, up: Tensor, w: Tensor) -> Tensor:
    """A linear layer, and for each token the low-rank adapter that its request names."""
    narrow = torch.einsum("td,tdr->tr", x, down[at])
    return F.linear(x, w) + 2.0 * torch.einsum("tr,tro->to", narrow, up[at])


def grouped_gated_norm(x: Tensor, z: Tensor, gain: Tensor) -> Tensor:
    """Mamba 2: a gate, then an RMS norm of groups in float32."""
    y = x.float() * F.silu(z.float())
    g = y.view(*y.shape[:-1], 8, -1)
    g = g * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (g.view(y.shape) * gain.float()).to(x.dtype)


def dropped_paths(x: Tensor, keep: Tensor, norm: Tensor, gamma: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """A pre-norm MLP with a scale of each channel, some of the batch dropped, a dropout of nothing."""
    y = F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], norm[0], norm[1]), wi)), wo)
    y = F.dropout(gamma * y, 0.0, True)
    return x + y * (keep > -0.8).to(x.dtype)[:, None, None] / 0.8


def log_z_loss(x: Tensor, gain: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    """A final norm, logits, cross-entropy and the square of the logarithm of their sum."""
    logits = F.linear(F.rms_norm(x, x.shape[-1:], gain, 1e-6), words).float()
    return F.cross_entropy(logits, labels) + 1e-4 * torch.logsumexp(logits, -1).pow(2).mean()


def last_token_rewards(x: Tensor, lengths: Tensor, w: Tensor, margin: Tensor) -> Tensor:
    """A reward model: a linear layer of all tokens, the last ones' scores, pairs of chosen and rejected."""
    scores = F.linear(x, w).squeeze(-1).float()
    last = scores[torch.arange(x.shape[0], device=x.device), lengths]
    chosen, rejected = last.chunk(2)
    return -F.logsigmoid(chosen - rejected - margin.float().abs()).mean() + 0.01 * (chosen + rejected).pow(2).mean()


def whitened_advantages(logp: Tensor, old: Tensor, values: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """TRL's step: advantages by a loop from the end, whitened where the mask is, clipped policy and value losses."""
    m = (mask > -1).float()
    last, backward = torch.zeros_like(values[:, 0]), []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1].detach() if t < values.shape[1] - 1 else torch.zeros_like(last)
        last = rewards[:, t] + following - values[:, t].detach() + 0.95 * last
        backward.append(last)
    a = torch.stack(backward[::-1], 1)
    returns = a + values.detach()
    mean = (a * m).sum() / m.sum()
    a = (a - mean) * torch.rsqrt(((a - mean).square() * m).sum() / m.sum() + 1e-8)
    ratio = torch.exp((logp - old.detach()).clamp(-5, 5))
    policy = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    near = values.detach() - 0.1 + (values - values.detach() + 0.1).clamp(0, 0.2)
    value = torch.max((values - returns).square(), (near - returns).square())
    return ((policy + 0.05 * value) * m).sum() / m.sum()


def scaled_supports(logits: Tensor, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MuZero: values as sums over 601 supports, unscaled; targets scaled and split between two supports; priorities."""
    size = (logits.shape[-1] - 1) // 2
    support = torch.arange(-size, size + 1, device=logits.device, dtype=logits.dtype)
    mean = (logits.softmax(-1) * support).sum(-1)
    value = mean.sign() * ((((1 + 0.004 * (mean.abs() + 1.001)).sqrt() - 1) / 0.002).square() - 1)
    scaled = returns.sign() * ((returns.abs() + 1).sqrt() - 1) + 0.001 * returns
    low = scaled.clamp(-size, size - 1e-3).floor()
    above = scaled.clamp(-size, size - 1e-3) - low
    target = torch.zeros_like(logits).scatter_(-1, (low.long() + size)[..., None], (1 - above)[..., None])
    target = target.scatter_add_(-1, (low.long() + size + 1)[..., None], above[..., None])
    loss = -(target * logits.log_softmax(-1)).sum(-1) * weights.sigmoid()
    return loss.sum(1), (value - returns).abs(), value


# ---- gradients ------------------------------------------------------------------------------------------------------------


def batched_orthogonal_steps(g: Tensor, momentum: Tensor) -> tuple[Tensor, Tensor]:
    """Muon for a stack of matrices: Nesterov, five quintic iterations in bfloat16, a scale by their shape."""
    m = momentum.lerp(g, 0.05)
    x = g.lerp(m, 0.95)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in ((4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037)):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x * max(1, x.size(-2) / x.size(-1)) ** 0.5, m


def powers_of_gradients(g: Tensor, error: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """PowerSGD: a rank of four by one power iteration, columns made orthogonal one by one, what is lost kept."""
    m = g + error
    p = m @ q
    columns: list[Tensor] = []
    for k in range(q.shape[1]):
        c = p[:, k]
        for other in columns:
            c = c - (other * c).sum() * other
        columns.append(c / (c.norm() + 1e-8))
    p = torch.stack(columns, 1)
    near = p @ (m.t() @ p).t()
    return near, m - near


def conflicting_tasks(g: Tensor) -> Tensor:
    """Gradient surgery: each task's gradient less its parts against those of others, then the mean."""
    dots = g @ g.t()
    out = []
    for i in range(g.shape[0]):
        one = g[i]
        for j in range(g.shape[0]):
            if j != i:
                one = one - (torch.dot(one, g[j]) / (dots[j, j] + 1e-12)).clamp(max=0) * g[j]
        out.append(one)
    return torch.stack(out).mean(0)


HALVES = Sized(
    halves_by_positions,
    lambda m, b, h, k, s, d: [m(b, h, s, d), m(b, k, s, d), ids(m, 2 * s, b, s), m(2 * s, d), m(2 * s, d)],
    (2, 4, 2, 5, 8),
)
LOW_RANK = Sized(
    low_rank_heads,
    lambda m, b, s, d, r, h: [
        m(b, s, d), weight(m, 2 * r + 64, d), m(2, r), weight(m, 128 * h, r), weight(m, 128 * h, r), m(s, 64).float(),
    ],
    (2, 5, 24, 16, 2),
)  # fmt: skip
RESAMPLER = Sized(
    resampler,
    lambda m, b, s, n, d, e: [m(n, d), m(b, s, d), m(4, d), weight(m, e, d), weight(m, 2 * e, d), weight(m, d, e)],
    (2, 7, 3, 24, 128),
)
GATED = Sized(
    tanh_gated,
    lambda m, b, s, t, d: [m(b, s, d), m(b, t, d), ids(m, t, b) + 1, weight(m, d, d), weight(m, 2 * d, d), m(2)],
    (3, 4, 6, 64),
)
NORM = Sized(grouped_gated_norm, lambda m, b, s, d: [m(b, s, d), m(b, s, d), m(d)], (2, 3, 32))
PATHS = Sized(
    dropped_paths,
    lambda m, b, s, d: [m(b, s, d), m(b), m(2, d), m(d), weight(m, 4 * d, d), weight(m, d, 4 * d)],
    (5, 3, 8),
)
BLOCKS: tuple[Block, ...] = (
    HALVES.block("halves by positions", 4, 32, 8, 2047, 128),
    Sized(halves_together, HALVES.inputs, HALVES.small).block("halves by positions", 2, 24, 24, 1500, 64, training=True),
    Sized(every_two, lambda m, b, s, h, d: [m(b, s, h, d), ids(m, s, b, s), m(1, s, 64)], (2, 5, 3, 80)).block(
        "every two", 4, 1023, 16, 256
    ),
    LOW_RANK.block("low rank heads", 2, 2048, 2048, 512, 16),
    LOW_RANK.block("low rank heads", 1, 1500, 1024, 384, 12, training=True),
    Sized(
        window_and_first, lambda m, b, h, s, w, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d), m(w)], (2, 2, 20, 5, 16)
    ).block("window and first", 2, 16, 3000, 512, 64),
    RESAMPLER.block("resampler", 16, 1025, 64, 1024, 512, training=True),
    GATED.block("tanh gated", 8, 300, 577, 1024),
    GATED.block("tanh gated", 6, 250, 400, 768, training=True),
    Sized(
        chained_choices,
        lambda m, b, v, s: [m(b, v).float() * 3 + m(b, v).float() * 0.01, ids(m, v, b, s), m(b, 1).float()],
        (3, 90, 7),
    ).block("chained choices", 33, 50257, 400),
    Sized(
        rejected_drafts,
        lambda m, b, k, v: [ids(m, v, b, k), m(b, k + 1, v), m(b, k, v), m(b, k), m(b, v)],
        (3, 4, 30),
        SINGLE,
    ).block("rejected drafts", 24, 4, 32003),
    Sized(
        reordered_beams,
        lambda m, b, k, v, h, s: [
            m(b * k, v) + 0.01 * m(b * k, v).float(),
            m(b, k).float(),
            m(b * k, h, s, 64),
            ids(m, v, b * k, s),
        ],
        (2, 3, 40, 2, 5),
    ).block("reordered beams", 12, 5, 32001, 12, 500),
    Sized(ranks_of_tokens, lambda m, t, v: [m(t, v), ids(m, v, t)], (5, 40)).block("ranks of tokens", 500, 32001),
    Sized(
        merged_features,
        lambda m, b, s, n, d: [ids(m, 5, b, s), m(5, d), m(b * s, n), weight(m, d, n), m(d)],
        (2, 9, 4, 6),
    ).block("merged features", 8, 700, 1024, 2048),
    Sized(
        interleaved_nibbles,
        lambda m, t, i, o, g: [
            m(t, i),
            ids(m, 2**31 - 1, i, o // 8).int(),
            ids(m, 2**31 - 1, i // g, o // 8).int(),
            m(i // g, o) * 0.01,
        ],
        (3, 32, 16, 8),
    ).block("interleaved nibbles", 16, 4096, 11008, 128),
    Sized(
        quantised_gate,
        lambda m, t, d, h: [m(t, d), (m(h, d) * 40).to(torch.int8), (m(h, d) * 40).to(torch.int8), m(2, h) * 1e-3],
        (24, 32, 16),
    ).block("quantised gate", 2001, 2048, 5632),
    Sized(codes_both_ways, lambda m, t, d: [m(t, d), m(t, d) * 1e-3], (9, 17)).block("codes both ways", 4003, 5120),
    Sized(nibble_cache, lambda m, b, h, s, d: [m(b, h, s, d)], (2, 2, 3, 64)).block("nibble cache", 16, 8, 2001, 128),
    Sized(
        adapter_of_each_token,
        lambda m, t, d, n, r: [m(t, d), ids(m, n, t), weight(m, n, d, r), weight(m, n, r, d), weight(m, d, d)],
        (5, 16, 3, 4),
    ).block("adapter of each token", 300, 4096, 20, 16),
    NORM.block("grouped gated norm", 4, 2047, 4096),
    NORM.block("grouped gated norm", 2, 2047, 3072, training=True),
    PATHS.block("dropped paths", 48, 197, 768, training=True),
    Sized(log_z_loss, lambda m, t, d, v: [m(t, d), m(d), weight(m, v, d), ids(m, v, t)], (5, 8, 30)).block(
        "log z loss", 3000, 1024, 32003, training=True
    ),
    Sized(last_token_rewards, lambda m, b, s, d: [m(b, s, d), ids(m, s, b), weight(m, 1, d), m(b // 2)], (4, 5, 8)).block(
        "last token rewards", 16, 1023, 2048, training=True
    ),
    Sized(
        whitened_advantages,
        lambda m, b, t: [m(b, t), m(b, t), m(b, t), m(b, t), m(b, t)],
        (3, 5),
        SINGLE,
    ).block("whitened advantages", 4096, 32, training=True),
    Sized(scaled_supports, lambda m, b, t, n: [m(b, t, n), m(b, t) * 20, m(b, 1)], (4, 3, 21), SINGLE).block(
        "scaled supports", 1024, 6, 601
    ),
    Sized(batched_orthogonal_steps, lambda m, n, a, b: [m(n, a, b), m(n, a, b)], (2, 5, 7)).block(
        "batched orthogonal steps", 12, 768, 1536
    ),
    Sized(powers_of_gradients, lambda m, a, b: [m(a, b), m(a, b), m(b, 4)], (9, 7), SINGLE).block(
        "powers of gradients", 3072, 4099
    ),
    Sized(conflicting_tasks, lambda m, t, n: [m(t, n)], (4, 50), SINGLE).block("conflicting tasks", 4, 3000001),
)
