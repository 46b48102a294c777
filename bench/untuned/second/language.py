"""Blocks of language models and attention in unusual spellings, as their authors write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def split_heads(x: Tensor, heads: int) -> Tensor:
    b, t, c = x.shape
    return x.reshape(b, t, heads, c // heads).permute(0, 2, 1, 3).reshape(b * heads, t, c // heads)


def shifted_windows(x: Tensor, norm: Tensor, qkv: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """Swin's second layer: roll, windows of 7, a relative position table read by index, a mask of regions."""
    b, h, w, c = x.shape
    heads, n = table.shape[1], 49
    y = torch.roll(F.layer_norm(x, (c,), norm[0], norm[1]), shifts=(-3, -3), dims=(1, 2))
    y = y.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, n, c)
    q, k, v = F.linear(y, qkv).reshape(-1, n, 3, heads, c // heads).permute(2, 0, 3, 1, 4).unbind(0)
    at = torch.arange(7, device=x.device)
    grid = torch.stack(torch.meshgrid(at, at, indexing="ij")).flatten(1)
    apart = grid[:, :, None] - grid[:, None, :] + 6
    bias = table[(apart[0] * 13 + apart[1]).view(-1)].view(n, n, heads).permute(2, 0, 1)
    rows = torch.arange(h, device=x.device)
    region = (rows >= h - 7).long() + (rows >= h - 3).long()
    regions = (region[:, None] * 3 + region[None, :]).view(h // 7, 7, w // 7, 7).permute(0, 2, 1, 3).reshape(-1, n)
    mask = (regions[:, None, :] != regions[:, :, None]).to(x.dtype) * -100.0
    a = (q * (c // heads) ** -0.5) @ k.transpose(-2, -1) + bias
    a = (a.view(b, -1, heads, n, n) + mask[None, :, None]).view(-1, heads, n, n)
    y = F.linear((a.softmax(-1) @ v).transpose(1, 2).reshape(-1, n, c), out)
    y = y.view(b, h // 7, w // 7, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return x + torch.roll(y, shifts=(3, 3), dims=(1, 2))


def einsum_cross(x: Tensor, text: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, out: Tensor) -> Tensor:
    """Cross attention of a diffusion U-Net in its first spelling, 8 heads."""
    q, k, v = split_heads(F.linear(x, wq), 8), split_heads(F.linear(text, wk), 8), split_heads(F.linear(text, wv), 8)
    a = (torch.einsum("bid,bjd->bij", q, k) * q.shape[-1] ** -0.5).softmax(dim=-1)
    y = torch.einsum("bij,bjd->bid", a, v)
    y = y.reshape(-1, 8, *y.shape[1:]).permute(0, 2, 1, 3).reshape(x.shape)
    return F.linear(y, out)


def baddbmm_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    a = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=q.shape[-1] ** -0.5)
    return torch.bmm(a.float().softmax(-1).to(q.dtype), v)


def buffer_causal(x: Tensor, qkv: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """A GPT's attention with a triangular buffer, 8 heads."""
    n, t, c = x.shape
    q, k, v = (y.view(n, t, 8, c // 8).transpose(1, 2) for y in F.linear(x, qkv, b).split(c, dim=2))
    lower = torch.tril(torch.ones(t, t, device=x.device)).view(1, 1, t, t)
    a = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    a = F.softmax(a.masked_fill(lower == 0, float("-inf")), dim=-1)
    return F.linear((a @ v).transpose(1, 2).contiguous().view(n, t, c), out)


def padded_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    keep = (torch.arange(k.shape[2], device=q.device)[None] < lengths[:, None]).to(q.dtype)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + (1.0 - keep)[:, None, None] * -10000.0
    return torch.matmul(F.softmax(scores, -1), v).permute(0, 2, 1, 3).contiguous().flatten(2)


def cosine_attention(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    a = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    return (a * torch.clamp(scale, max=4.6).exp()).softmax(-1) @ v


def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(dim=-2), v)
    return torch.einsum("bhnd,bhde->bhne", q.softmax(dim=-1) * q.shape[-1] ** -0.5, context)


def favor(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Positive random features (Choromanski et al. 2021)."""

    def features(x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        u = x @ w.t()
        return torch.exp(u - (x**2).sum(-1, keepdim=True) / 2 - u.amax(-1, keepdim=True)) + 1e-4

    a, b = features(q), features(k)
    scale = 1.0 / (a * b.sum(-2, keepdim=True)).sum(-1, keepdim=True)
    return (a @ (b.transpose(-1, -2) @ v)) * scale


def chunked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention to a chunk of 64 and the one before."""
    b, h, t, d = q.shape
    q, k, v = (x.view(b, h, t // 64, 64, d) for x in (q, k, v))
    k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], dim=3) for x in (k, v))
    at, to = torch.arange(64, device=q.device), torch.arange(128, device=q.device) - 64
    seen = to[None] <= at[:, None]
    first = torch.arange(t // 64, device=q.device)[:, None, None] * 64 + to[None, None] >= 0
    s = torch.einsum("bhcid,bhcjd->bhcij", q, k) * d**-0.5
    s = s.masked_fill(~(seen[None] & first), torch.finfo(s.dtype).min)
    return torch.einsum("bhcij,bhcjd->bhcid", s.softmax(-1), v).reshape(b, h, t, d)


def decode_growing(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One token, grouped heads; the cache grows by concatenation."""
    keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
    groups = q.shape[1] // keys.shape[1]
    wide_k, wide_v = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    a = torch.softmax((q @ wide_k.transpose(2, 3)).float() / math.sqrt(q.shape[-1]), -1).to(q.dtype)
    return a @ wide_v, keys, values


def decode_in_place(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """One token at a place of a cache of fixed length."""
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    seen = torch.arange(keys.shape[2], device=q.device) <= at
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None, None])


def llama_rotary(q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
    """The halves' spelling, cosines by position."""
    d = q.shape[-1]
    inverse = 1.0 / (10000.0 ** (torch.arange(0, d, 2, device=q.device).float() / d))
    angles = (positions[:, :, None].float() * inverse).repeat(1, 1, 2)
    cos, sin = angles.cos().to(q.dtype)[:, None], angles.sin().to(q.dtype)[:, None]

    def turned(x: Tensor) -> Tensor:
        return torch.cat((-x[..., d // 2 :], x[..., : d // 2]), -1)

    return (q * cos + turned(q) * sin) @ (k * cos + turned(k) * sin).transpose(-1, -2)


def interleaved_rotary(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = angles.float().cos()[None, :, None], angles.float().sin()[None, :, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.float()[..., ::2], x.float()[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).type_as(x)

    return turned(q), turned(k)


def complex_rotary(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    phases = torch.polar(torch.ones_like(angles.float()), angles.float())[None, :, None]
    return torch.view_as_real(pairs * phases).flatten(3).type_as(x)


def dora(x: Tensor, w: Tensor, a: Tensor, b: Tensor, magnitude: Tensor) -> Tensor:
    adapted = w + b @ a
    return F.linear(x, adapted * (magnitude / adapted.norm(p=2, dim=1))[:, None])


def fp8_linear(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.silu(F.linear(x, w.to(x.dtype) * scale))


def int4_groups(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Two values a byte, a scale and a zero for 32 of them."""
    low, high = packed & 15, packed >> 4
    values = torch.stack([low, high], -1).flatten(1).to(x.dtype)
    w = (values.unflatten(1, (-1, 32)) - zero[:, :, None]) * scale[:, :, None]
    return F.linear(x, w.flatten(1))


def dynamic_int8(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Rows quantised on the fly, values kept as floats (a simulation)."""
    top = x.abs().amax(-1, keepdim=True).float() / 127
    q = torch.clamp(torch.round(x.float() / top), -128, 127).to(x.dtype)
    return (F.linear(q, w.to(x.dtype)).float() * top * scale.float()).to(x.dtype)


def t5_ff(x: Tensor, norm: Tensor, w0: Tensor, w1: Tensor, out: Tensor) -> Tensor:
    y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    y = (norm * y.to(x.dtype)).to(x.dtype)
    gate = 0.5 * F.linear(y, w0) * (1.0 + torch.tanh(0.7978845608 * (F.linear(y, w0) + 0.044715 * F.linear(y, w0) ** 3)))
    return x + F.linear(gate * F.linear(y, w1), out)


def relu_squared_ff(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return F.linear(torch.square(F.relu(F.linear(x, w1))), w2)


def gemma_norms(x: Tensor, r: Tensor, g1: Tensor, g2: Tensor) -> tuple[Tensor, Tensor]:
    """A norm after a layer, the residual, and the norm before the next one."""

    def norm(t: Tensor, g: Tensor) -> Tensor:
        y = t.float() * torch.rsqrt(t.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + g.float())).type_as(t)

    h = r + norm(x, g1)
    return h, norm(h, g2)


def switch_loss(x: Tensor, router: Tensor) -> Tensor:
    """Load balance and z loss of a router with the best two of its experts."""
    logits = F.linear(x, router).float()
    p = logits.softmax(-1)
    best = p.topk(2, -1)
    share = best.values / best.values.sum(-1, keepdim=True)
    used = F.one_hot(best.indices, p.shape[-1]).float().sum(1).mean(0)
    return p.shape[-1] * (used * p.mean(0)).sum() + 1e-3 * logits.logsumexp(-1).square().mean() + share.square().mean()


def capacity_experts(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Dispatch to a fixed number of rows by one-hot matmuls (Switch transformers), the best expert alone."""
    experts, capacity = router.shape[0], 2 * x.shape[0] // router.shape[0]
    gates = F.linear(x, router).float().softmax(-1)
    best = F.one_hot(gates.argmax(-1), experts)
    place = (best.cumsum(0) - 1) * best
    kept = best * (place < capacity)
    send = kept[:, :, None] * F.one_hot(place.clamp(max=capacity - 1), capacity)
    y = torch.einsum("tec,td->ecd", send.to(x.dtype), x)
    y = torch.einsum("ecf,efd->ecd", F.gelu(torch.einsum("ecd,edf->ecf", y, w1)), w2)
    return torch.einsum("tec,ecd->td", (send * (gates * kept).sum(-1)[:, None, None]).to(x.dtype), y)


def three_embeddings(tokens: Tensor, kinds: Tensor, words: Tensor, types: Tensor, positions: Tensor, g: Tensor) -> Tensor:
    at = torch.arange(tokens.shape[1], device=tokens.device)
    y = words[tokens] + F.embedding(kinds, types) + positions.index_select(0, at)[None]
    return F.layer_norm(y, y.shape[-1:], g[0], g[1], 1e-12)


def bag_of_words(words: Tensor, table: Tensor, w: Tensor) -> Tensor:
    """Mean of embeddings, without the padding (0)."""
    seen = (words != 0).unsqueeze(-1).to(table.dtype)
    y = (F.embedding(words, table) * seen).sum(1) / seen.sum(1).clamp(min=1)
    return F.linear(y, w)


def weighted_smoothing(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=weights.detach().abs().to(logits.dtype), ignore_index=3, label_smoothing=0.1)


def masked_distillation(student: Tensor, teacher: Tensor, keep: Tensor) -> Tensor:
    mask = (keep > 0).float()
    kl = F.kl_div(F.log_softmax(student / 2, -1), F.log_softmax(teacher / 2, -1), reduction="none", log_target=True)
    return (kl.sum(-1) * mask).sum() / mask.sum() * 4


def minimal_gru(x: Tensor, wz: Tensor, wh: Tensor) -> Tensor:
    """The parallel scan of minGRU (Feng et al. 2024) in logarithms."""
    z, h = F.linear(x, wz), F.linear(x, wh)
    decay = torch.cumsum(-F.softplus(z), 1)
    log_h = torch.where(h >= 0, (F.relu(h) + 0.5).log(), -F.softplus(-h))
    return torch.exp(decay + torch.logcumsumexp(-F.softplus(-z) + log_h - decay, 1))


def selective_scan(u: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba's recurrence in a Python loop, u of (batch, steps, channels)."""
    decay = torch.exp(torch.einsum("bld,dn->bldn", F.softplus(delta), -a.exp()))
    new = torch.einsum("bld,bln,bld->bldn", F.softplus(delta), b, u)
    state, ys = torch.zeros_like(decay[:, 0]), []
    for t in range(u.shape[1]):
        state = decay[:, t] * state + new[:, t]
        ys.append(torch.einsum("bdn,bn->bd", state, c[:, t]))
    return torch.stack(ys, 1)


def slot_attention(slots: Tensor, k: Tensor, v: Tensor, wq: Tensor, wi: Tensor, wh: Tensor) -> Tensor:
    """Softmax over slots, a mean over keys, a GRU cell (Locatello et al. 2020)."""
    q = F.linear(F.layer_norm(slots, slots.shape[-1:]), wq)
    a = torch.einsum("bsd,bnd->bsn", q, k * k.shape[-1] ** -0.5).softmax(1) + 1e-8
    new = torch.einsum("bsn,bnd->bsd", a / a.sum(-1, keepdim=True), v)
    ri, zi, ni = F.linear(new, wi).chunk(3, -1)
    rh, zh, nh = F.linear(slots, wh).chunk(3, -1)
    z = torch.sigmoid(zi + zh)
    return (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * slots


def differential(q1: Tensor, q2: Tensor, k1: Tensor, k2: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Differential attention (Ye et al. 2024), causal, with a norm of each head."""
    t, scale = q1.shape[2], q1.shape[-1] ** -0.5
    hidden = torch.triu(torch.ones(t, t, device=v.device, dtype=torch.bool), 1)
    a = (q1 @ k1.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    b = (q2 @ k2.transpose(-1, -2) * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    y = (a - torch.sigmoid(lam) * b) @ v
    return F.rms_norm(y, y.shape[-1:]) * 0.2


def attention_free(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.exp(k - k.amax(1, keepdim=True))
    return torch.sigmoid(q) * (e * v).cumsum(1) / e.cumsum(1)


def penalised_choice(logits: Tensor, seen: Tensor) -> Tensor:
    """Repetition penalty, temperature, the best 50, probabilities."""
    score = logits.gather(1, seen)
    score = torch.where(score < 0, score * 1.2, score / 1.2)
    logits = logits.scatter(1, seen, score) / 0.7
    lowest = torch.topk(logits, 50)[0][..., -1, None]
    return logits.masked_fill(logits < lowest, -float("inf")).softmax(-1)


def sentence_means(x: Tensor, lengths: Tensor) -> Tensor:
    mask = (torch.arange(x.shape[1], device=x.device)[None] < lengths[:, None]).unsqueeze(-1).expand(x.size()).float()
    y = torch.sum(x * mask, 1) / torch.clamp(mask.sum(1), min=1e-9)
    y = F.normalize(y, p=2, dim=1)
    return y @ y.t()


def qk_norm_grouped(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, gq: Tensor, gk: Tensor, out: Tensor) -> Tensor:
    """Grouped heads of 96 with a norm of queries and keys."""
    q, k, v = (F.linear(x, w).unflatten(-1, (-1, 96)).transpose(1, 2) for w in (wq, wk, wv))
    q, k = F.rms_norm(q, (96,), gq), F.rms_norm(k, (96,), gk)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return F.linear(y.transpose(1, 2).flatten(2), out)


def _swin(m: Make, b: int, side: int, heads: int) -> list[Tensor]:
    c = heads * 32
    return [m(b, side, side, c), m(2, c), weight(m, 3 * c, c), m(169, heads) * 0.1, weight(m, c, c)]


def _cross(m: Make, b: int, t: int, s: int, head: int) -> list[Tensor]:
    c = 8 * head
    return [m(b, t, c), m(b, s, 768), weight(m, c, c), weight(m, c, 768), weight(m, c, 768), weight(m, c, c)]


def _qkv(m: Make, *shape: int) -> list[Tensor]:
    return [m(*shape) for _ in range(3)]


def _decode(m: Make, b: int, h: int, kv: int, t: int, d: int) -> list[Tensor]:
    return [m(b, h, 1, d), m(b, kv, 1, d), m(b, kv, 1, d), m(b, kv, t, d), m(b, kv, t, d)]


def _bytes(m: Make, *shape: int) -> Tensor:
    return ids(m, 256, *shape).to(torch.uint8)


WINDOWS = Sized(shifted_windows, _swin, (1, 14, 2), HALF)
EINSUM = Sized(einsum_cross, _cross, (1, 24, 7, 8), HALF)
CAUSAL = Sized(
    buffer_causal, lambda m, b, t, c: [m(b, t, c), weight(m, 3 * c, c), m(3 * c) * 0.1, weight(m, c, c)], (2, 17, 64), HALF
)
DORA = Sized(dora, lambda m, n, i, o, r: [m(n, i), weight(m, o, i), weight(m, r, i), m(o, r) * 0.1, m(o).abs()], (5, 24, 32, 4))
FP8 = Sized(fp8_linear, lambda m, n, i, o: [m(n, i), weight(m, o, i).to(torch.float8_e4m3fn), m(1)], (3, 32, 48))
GQA = Sized(
    qk_norm_grouped,
    lambda m, b, t, h, kv: [
        m(b, t, 1152), weight(m, 96 * h, 1152), weight(m, 96 * kv, 1152), weight(m, 96 * kv, 1152), m(96), m(96),
        weight(m, 1152, 96 * h),
    ],
    (1, 9, 2, 1),
)  # fmt: skip

BLOCKS: tuple[Block, ...] = (
    *WINDOWS.both("shifted windows", 32, 28, 6),
    EINSUM.block("einsum cross attention", 4, 4096, 77, 40),
    EINSUM.block("einsum cross attention", 4, 1024, 77, 80, training=True),
    EINSUM.block("einsum cross attention", 8, 64, 77, 160),
    Sized(baddbmm_attention, _qkv, (2, 9, 16), HALF).block("baddbmm attention", 32, 1024, 80),
    *CAUSAL.both("causal by a buffer", 6, 1000, 640),
    Sized(
        padded_attention, lambda m, b, h, t, d: [*_qkv(m, b, h, t, d), ids(m, t, b) + 1], (2, 2, 9, 8), SINGLE, tf32=True
    ).block("padded attention", 16, 12, 197, 64, training=True),
    Sized(cosine_attention, lambda m, b, h, t, d: [*_qkv(m, b, h, t, d), m(h, 1, 1)], (2, 2, 9, 8)).block(
        "cosine attention", 64, 3, 144, 32, training=True
    ),
    Sized(efficient_attention, _qkv, (2, 2, 9, 8), HALF).block("efficient attention", 2, 8, 9025, 48, training=True),
    Sized(favor, lambda m, b, h, t, d, f: [*_qkv(m, b, h, t, d), m(f, d)], (2, 2, 9, 8, 12), SINGLE, tf32=True).block(
        "random features attention", 2, 8, 3000, 64, 266
    ),
    Sized(chunked_attention, _qkv, (1, 2, 128, 8)).block("chunked attention", 2, 12, 4096, 64, training=True),
    Sized(decode_growing, _decode, (2, 4, 2, 7, 16), HALF).block("decode, growing cache", 4, 32, 8, 1537, 128),
    Sized(decode_in_place, lambda m, *n: [*_decode(m, *n), ids(m, n[3], 1)], (2, 4, 4, 9, 16)).block(
        "decode in place", 8, 16, 16, 2048, 64
    ),
    Sized(llama_rotary, lambda m, b, h, t, d: [m(b, h, t, d), m(b, h, t, d), ids(m, 99, b, t)], (1, 2, 5, 8), HALF).block(
        "scores of rotary halves", 2, 8, 777, 96, training=True
    ),
    Sized(interleaved_rotary, lambda m, b, t, h, d: [m(b, t, h, d), m(b, t, h, d), m(t, d // 2)], (1, 5, 2, 8), HALF).block(
        "interleaved rotary", 2, 2047, 32, 80
    ),
    Sized(complex_rotary, lambda m, b, t, h, d: [m(b, t, h, d), m(t, d // 2)], (1, 5, 2, 8)).block(
        "complex rotary", 4, 2048, 24, 64
    ),
    *DORA.both("dora", 3000, 2048, 2048, 8),
    FP8.block("fp8 weight", 1, 4096, 14336),
    FP8.block("fp8 weight", 24, 3072, 8192),
    Sized(
        int4_groups,
        lambda m, n, i, o: [m(n, i), _bytes(m, o, i // 2), m(o, i // 32) * 0.02, ids(m, 16, o, i // 32).to(torch.bfloat16)],
        (2, 64, 16),
        HALF,
    ).block("int4 groups", 7, 4096, 4096),
    Sized(
        dynamic_int8, lambda m, n, i, o: [m(n, i), ids(m, 255, o, i).sub(127).to(torch.int8), m(o).abs() * 0.01], (3, 32, 24)
    ).block("dynamic int8", 1111, 1536, 4608),
    Sized(
        t5_ff, lambda m, n, d, f: [m(n, d), m(d), weight(m, f, d), weight(m, f, d), weight(m, d, f)], (5, 16, 24), HALF
    ).block("t5 feed-forward", 2500, 768, 2048),
    Sized(relu_squared_ff, lambda m, n, d, f: [m(n, d), weight(m, f, d), weight(m, d, f)], (5, 16, 24)).block(
        "relu squared", 5, 5120, 13824
    ),
    Sized(gemma_norms, lambda m, n, d: [m(n, d), m(n, d), m(d), m(d)], (5, 24), HALF).block("two norms", 3001, 2304),
    Sized(switch_loss, lambda m, n, d, e: [m(n, d), weight(m, e, d)], (13, 16, 6)).block(
        "router loss", 16384, 512, 60, training=True
    ),
    Sized(
        capacity_experts,
        lambda m, n, d, f, e: [m(n, d), weight(m, e, d), m(e, d, f) * d**-0.5, m(e, f, d) * f**-0.5],
        (16, 8, 12, 4),
    ).block("experts with capacity", 2048, 512, 1024, 16),
    *Sized(
        three_embeddings,
        lambda m, b, t, d: [ids(m, 3000, b, t), ids(m, 2, b, t), m(3000, d), m(2, d), m(512, d), m(2, d)],
        (2, 7, 24),
        HALF,
    ).both("three embeddings", 16, 381, 312),
    Sized(bag_of_words, lambda m, b, t, d: [ids(m, 5000, b, t), m(5000, d), weight(m, 20, d)], (3, 7, 12), SINGLE).block(
        "bag of words", 4096, 60, 100, training=True
    ),
    Sized(weighted_smoothing, lambda m, n, c: [m(n, c), ids(m, c, n), m(c)], (9, 7), SINGLE).block(
        "weighted label smoothing", 5000, 1001, training=True
    ),
    Sized(masked_distillation, lambda m, b, t, c: [m(b, t, c), m(b, t, c), m(b, t)], (2, 3, 11)).block(
        "masked distillation", 8, 127, 32001, training=True
    ),
    *Sized(minimal_gru, lambda m, b, t, d: [m(b, t, d), weight(m, d, d), weight(m, d, d)], (2, 9, 8), SINGLE, tf32=True).both(
        "minimal gru", 8, 1000, 256
    ),
    Sized(
        selective_scan, lambda m, b, t, d, n: [m(b, t, d), m(b, t, d), m(d, n), m(b, t, n), m(b, t, n)], (2, 5, 6, 4), SINGLE
    ).block("selective scan", 4, 32, 1536, 16),
    Sized(
        slot_attention,
        lambda m, b, s, n, d: [m(b, s, d), m(b, n, d), m(b, n, d), weight(m, d, d), weight(m, 3 * d, d), weight(m, 3 * d, d)],
        (2, 3, 9, 8),
        HALF,
    ).block("slot attention", 64, 7, 1024, 64, training=True),
    Sized(
        differential, lambda m, b, h, t, d: [*(m(b, h, t, d) for _ in range(4)), m(b, h, t, 2 * d), m(1)], (1, 2, 9, 8)
    ).block("differential attention", 4, 8, 1024, 64),
    Sized(attention_free, _qkv, (2, 9, 8), SINGLE).block("attention free", 8, 700, 384),
    Sized(penalised_choice, lambda m, b, v: [m(b, v), ids(m, v, b, 64)], (2, 80), HALF).block("penalised choice", 17, 50257),
    Sized(sentence_means, lambda m, b, t, d: [m(b, t, d), ids(m, t, b) + 1], (3, 7, 12), HALF).block(
        "sentence means", 300, 123, 384
    ),
    *GQA.both("grouped heads of 96", 2, 1500, 12, 4),
)
