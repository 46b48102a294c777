"""Whole layers of known language models, their steps of generation, what tunes them, and their losses."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE = torch.float32


# ---- what most of them share ----------------------------------------------------------------------------------------------


def rms(x: Tensor, gain: Tensor, eps: float = 1e-6) -> Tensor:
    """Llama's norm."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return gain * y.to(x.dtype)


def one_plus(x: Tensor, gain: Tensor) -> Tensor:
    """Gemma's norm."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (y * (1.0 + gain.float())).type_as(x)


def tables(at: Tensor, size: int, base: float, x: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions, halves repeated."""
    inverse = 1.0 / base ** (torch.arange(0, size, 2, device=x.device).float() / size)
    angles = at[..., None].float() * inverse
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def repeat_kv(x: Tensor, times: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def to_heads(x: Tensor, size: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], -1, size).transpose(1, 2)


def causal(s: int, x: Tensor) -> Tensor:
    return torch.full((s, s), torch.finfo(x.dtype).min, device=x.device, dtype=x.dtype).triu(1)


def unseen(seen: Tensor, x: Tensor) -> Tensor:
    """Zeros, and the type's least number where a key is not seen."""
    return torch.zeros(seen.shape, device=x.device, dtype=x.dtype).masked_fill(~seen, torch.finfo(x.dtype).min)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """The eager attention of most files: repeated keys, an additive mask, a softmax in float32."""
    times = q.shape[1] // k.shape[1]
    scores = torch.matmul(q, repeat_kv(k, times).transpose(2, 3)) * scale + mask
    p = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(p, repeat_kv(v, times)).transpose(1, 2).contiguous().flatten(2)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


# ---- layers ---------------------------------------------------------------------------------------------------------------


def llama_layer(x: Tensor, *w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Llama 3.1: a layer of a prompt, and the keys and values that its cache takes."""
    before, wq, wk, wv, wo, after, gate, up, down = w
    y = rms(x, before, 1e-5)
    q, k, v = (to_heads(F.linear(y, m), 128) for m in (wq, wk, wv))
    cos, sin = tables(torch.arange(x.shape[1], device=x.device), 128, 500000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    x = x + F.linear(attention(q, k, v, causal(x.shape[1], x), 128**-0.5), wo)
    return x + swiglu(rms(x, after, 1e-5), gate, up, down), k, v


def qwen_layer(x: Tensor, *w: Tensor) -> Tensor:
    """Qwen 2.5: biases of queries, keys and values; torch's fused attention."""
    before, wq, bq, wk, bk, wv, bv, wo, after, gate, up, down = w
    y = rms(x, before)
    q, k, v = (to_heads(F.linear(y, m, b), 64) for m, b in ((wq, bq), (wk, bk), (wv, bv)))
    cos, sin = tables(torch.arange(x.shape[1], device=x.device), 64, 1000000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    times = q.shape[1] // k.shape[1]
    y = F.scaled_dot_product_attention(q, repeat_kv(k, times), repeat_kv(v, times), is_causal=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), wo)
    return x + swiglu(rms(x, after), gate, up, down)


def gemma2_layer(x: Tensor, *w: Tensor) -> Tensor:
    """Gemma 2: four norms, a window, capped scores, a gate by GELU."""
    g, wq, wk, wv, wo, gate, up, down = w
    s = x.shape[1]
    y = one_plus(x, g[0])
    q, k, v = (to_heads(F.linear(y, m), 256) for m in (wq, wk, wv))
    at = torch.arange(s, device=x.device)
    cos, sin = tables(at, 256, 10000.0, x)
    q, k, times = turned(q, cos, sin), turned(k, cos, sin), q.shape[1] // k.shape[1]
    scores = torch.matmul(q, repeat_kv(k, times).transpose(2, 3)) * 256**-0.5
    scores = torch.tanh(scores / 50.0) * 50.0
    far = at[:, None] - at
    seen = (far >= 0) & (far < min(4096, s - 2))
    scores = scores + unseen(seen, x)
    p = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
    y = F.linear(torch.matmul(p, repeat_kv(v, times)).transpose(1, 2).flatten(2), wo)
    x = x + one_plus(y, g[1])
    y = one_plus(x, g[2])
    y = F.linear(F.gelu(F.linear(y, gate), approximate="tanh") * F.linear(y, up), down)
    return x + one_plus(y, g[3])


def gemma3_layer(x: Tensor, picture: Tensor, *w: Tensor) -> Tensor:
    """Gemma 3: norms of queries and keys, a window; tokens of one picture see each other both ways."""
    g, heads, wq, wk, wv, wo, gate, up, down = w
    s = x.shape[1]
    y = one_plus(x, g[0])
    q, k, v = (to_heads(F.linear(y, m), 256) for m in (wq, wk, wv))
    q, k = one_plus(q, heads[0]), one_plus(k, heads[1])
    at = torch.arange(s, device=x.device)
    cos, sin = tables(at, 256, 10000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    inside = picture > 0
    start = inside & ~F.pad(inside, (1, 0))[:, :-1]
    number = torch.where(inside, start.int().cumsum(1), -1)
    together = (number[:, :, None] == number[:, None]) & inside[:, None]
    far = at[:, None] - at
    seen = ((far >= 0) | together) & (far.abs() < min(512, s - 2))
    mask = unseen(seen, x)[:, None]
    x = x + one_plus(F.linear(attention(q, k, v, mask, 256**-0.5), wo), g[1])
    y = one_plus(x, g[2])
    y = F.linear(F.gelu(F.linear(y, gate), approximate="tanh") * F.linear(y, up), down)
    return x + one_plus(y, g[3])


def phi_layer(x: Tensor, *w: Tensor) -> Tensor:
    """Phi 2: one norm, attention beside the feed-forward part, two fifths of a head are turned, biases everywhere."""
    norm, wqkv, bqkv, wo, bo, up, bu, down, bd = w
    b, s, d = x.shape
    y = F.layer_norm(x, (d,), norm[0], norm[1])
    q, k, v = F.linear(y, wqkv, bqkv).view(b, s, 3, -1, 80).permute(2, 0, 3, 1, 4)
    cos, sin = tables(torch.arange(s, device=x.device), 32, 10000.0, x)
    q, k = (torch.cat((turned(t[..., :32], cos, sin), t[..., 32:]), -1) for t in (q, k))
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) / math.sqrt(80)
    p = F.softmax(scores + causal(s, scores), dim=-1, dtype=torch.float32).to(v.dtype)
    z = F.linear(torch.matmul(p, v).transpose(1, 2).reshape(b, s, -1), wo, bo)
    return z + F.linear(F.gelu(F.linear(y, up, bu), approximate="tanh"), down, bd) + x


def falcon_layer(x: Tensor, *w: Tensor) -> Tensor:
    """Falcon 7B: 71 heads and one of keys and values from one matrix, attention beside a layer with GELU."""
    norm, wqkv, wo, up, down = w
    b, s, d = x.shape
    y = F.layer_norm(x, (d,), norm[0], norm[1])
    qkv = F.linear(y, wqkv).view(b, s, -1, 64)
    q, k, v = (t.transpose(1, 2) for t in (qkv[..., :-2, :], qkv[..., -2:-1, :], qkv[..., -1:, :]))
    cos, sin = tables(torch.arange(s, device=x.device), 64, 10000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    k, v = k.expand_as(q), v.expand_as(q)
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1)
    return x + F.linear(z, wo) + F.linear(F.gelu(F.linear(y, up)), down)


def neox_layer(x: Tensor, *w: Tensor) -> Tensor:
    """Pythia: queries, keys and values of a head side by side, a quarter turned, baddbmm, both branches added at once."""
    norms, wqkv, bqkv, wo, bo, up, bu, down, bd = w
    b, s, d = x.shape
    qkv = F.linear(F.layer_norm(x, (d,), norms[0], norms[1], 1e-5), wqkv, bqkv).view(b, s, -1, 3 * 64)
    q, k, v = (t.permute(0, 2, 1, 3) for t in qkv.chunk(3, -1))
    cos, sin = tables(torch.arange(s, device=x.device), 16, 10000.0, x)
    q, k = (torch.cat((turned(t[..., :16], cos, sin), t[..., 16:]), -1) for t in (q, k))
    h = q.shape[1]
    scores = torch.zeros(b * h, s, s, dtype=x.dtype, device=x.device)
    scores = torch.baddbmm(scores, q.reshape(b * h, s, 64), k.reshape(b * h, s, 64).transpose(1, 2), beta=1.0, alpha=0.125)
    seen = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
    scores = torch.where(seen, scores.view(b, h, s, s), torch.finfo(x.dtype).min)
    z = torch.matmul(F.softmax(scores, dim=-1).to(v.dtype), v).permute(0, 2, 1, 3).reshape(b, s, d)
    y = F.layer_norm(x, (d,), norms[2], norms[3], 1e-5)
    return F.linear(F.gelu(F.linear(y, up, bu)), down, bd) + F.linear(z, wo, bo) + x


def olmo_layer(x: Tensor, *w: Tensor) -> Tensor:
    """OLMo 2: norms of whole queries and keys, norms behind both branches."""
    wq, wk, wv, wo, g, gate, up, down = w
    q, k = rms(F.linear(x, wq), g[0]), rms(F.linear(x, wk), g[1])
    q, k, v = (to_heads(t, 128) for t in (q, k, F.linear(x, wv)))
    cos, sin = tables(torch.arange(x.shape[1], device=x.device), 128, 500000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    x = x + rms(F.linear(attention(q, k, v, causal(x.shape[1], x), 128**-0.5), wo), g[2])
    return x + rms(swiglu(x, gate, up, down), g[3])


def deepseek_layer(x: Tensor, *w: Tensor) -> Tensor:
    """DeepSeek V3: narrow queries and cache, one turned key for all heads, experts by groups, a bias that only chooses."""
    g, gq, gkv, qa, qb, kva, kvb, wo, router, bias, gates, ups, downs, shared, last = w
    b, s, d = x.shape
    y = rms(x, g[0])
    q = to_heads(F.linear(rms(F.linear(y, qa), gq), qb), 192)
    narrow, key = F.linear(y, kva).split([gkv.shape[0], 64], -1)
    k, v = to_heads(F.linear(rms(narrow, gkv), kvb), 256).split([128, 128], -1)
    cos, sin = tables(torch.arange(s, device=x.device), 64, 10000.0, x)

    def pairs(t: Tensor) -> Tensor:
        return turned(t.unflatten(-1, (32, 2)).transpose(-1, -2).flatten(-2), cos, sin)

    q = torch.cat((q[..., :128], pairs(q[..., 128:])), -1)
    k = torch.cat((k, pairs(key[:, None]).expand(b, k.shape[1], s, 64)), -1)
    scores = torch.matmul(q, k.transpose(2, 3)) * 192**-0.5 + causal(s, x)
    p = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
    x = x + F.linear(torch.matmul(p, v).transpose(1, 2).flatten(2), wo)
    y = rms(x, g[1]).view(b * s, d)
    score = F.linear(y.float(), router.float()).sigmoid()
    chosen = score.detach() + bias.detach().float() * 0.01
    groups = chosen.view(b * s, 4, -1).topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(groups).scatter_(1, groups.topk(2, dim=-1, sorted=False).indices, 1.0)
    chosen = chosen.view(b * s, 4, -1).masked_fill(kept[..., None] == 0, 0.0).flatten(1)
    at = chosen.topk(4, dim=-1, sorted=False).indices
    picked = score.gather(1, at)
    share = torch.zeros_like(score).scatter(1, at, picked / (picked.sum(-1, keepdim=True) + 1e-20) * 2.5).to(x.dtype)
    every = F.silu(torch.einsum("td,edh->eth", y, gates)) * torch.einsum("td,edh->eth", y, ups)
    routed = torch.einsum("eth,ehd->etd", every * share.t()[..., None], downs).sum(0)
    return x + (routed + swiglu(y, shared[0], shared[1], last)).view(b, s, d)


def scout_experts(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, shared: Tensor, last: Tensor) -> Tensor:
    """Llama 4: the best expert of 16 by a sigmoid that scales its input, all experts on all tokens by bmm, one shared."""
    e, t = router.shape[0], x.shape[0]
    logits = F.linear(x, router)
    best, at = logits.topk(1, dim=1)
    scores = torch.full_like(logits, -math.inf).scatter_(1, at, best).transpose(0, 1)
    scores = torch.sigmoid(scores.float()).to(x.dtype)
    routed = x.repeat(e, 1) * scores.reshape(-1, 1)
    gate, up = torch.bmm(routed.view(e, t, -1), gate_up).chunk(2, -1)
    out = swiglu(x, shared[0], shared[1], last)
    return out + torch.bmm(up * F.silu(gate), down).sum(0)


# ---- steps of generation --------------------------------------------------------------------------------------------------


def mistral_token(x: Tensor, at: Tensor, keys: Tensor, values: Tensor, *w: Tensor) -> Tensor:
    """Mistral: a token with a cache of a window's length, written in a circle by index_copy_."""
    before, wq, wk, wv, wo, after, gate, up, down = w
    window = keys.shape[2]
    y = rms(x, before, 1e-5)
    q, k, v = (to_heads(F.linear(y, m), 128) for m in (wq, wk, wv))
    cos, sin = tables(at, 128, 10000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    keys.index_copy_(2, at % window, k)
    values.index_copy_(2, at % window, v)
    seen = torch.arange(window, device=x.device) <= at
    mask = unseen(seen, x)
    x = x + F.linear(attention(q, keys, values, mask, 128**-0.5), wo)
    return x + swiglu(rms(x, after, 1e-5), gate, up, down)


def command_token(x: Tensor, keys: Tensor, values: Tensor, *w: Tensor) -> Tensor:
    """Command R: one norm without a bias, both branches beside each other, pairs turned, a cache written by slices."""
    norm, wq, wk, wv, wo, gate, up, down = w
    place = keys.shape[2] * 3 // 4
    y = x.float()
    y = y - y.mean(-1, keepdim=True)
    y = (norm.float() * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype)
    q, k, v = (to_heads(F.linear(y, m), 128) for m in (wq, wk, wv))
    angles = place / 50000.0 ** (torch.arange(0, 128, 2, device=x.device).float() / 128)
    cos, sin = (t.repeat_interleave(2, dim=-1) for t in (angles.cos(), angles.sin()))

    def pairs(t: Tensor) -> Tensor:
        t = t.float()
        return (t * cos + torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) * sin).to(x.dtype)

    keys[:, :, place : place + 1] = pairs(k)
    values[:, :, place : place + 1] = v
    known, stored = keys[:, :, : place + 1], values[:, :, : place + 1]
    times = q.shape[1] // k.shape[1]
    z = F.scaled_dot_product_attention(pairs(q), repeat_kv(known, times), repeat_kv(stored, times))
    return x + F.linear(z.transpose(1, 2).flatten(2), wo) + swiglu(y, gate, up, down)


def whole_token(token: Tensor, at: Tensor, caches: Tensor, table: Tensor, g: Tensor, *w: Tensor) -> Tensor:
    """Two layers from a token to the next one: Qwen 3's norms of heads, caches of a fixed length, the tied table, argmax."""
    x = table[token]
    cos, sin = tables(at, 128, 1000000.0, x)
    seen = torch.arange(caches.shape[4], device=x.device) <= at
    mask = unseen(seen, x)
    for n in range(2):
        heads, wq, wk, wv, wo, gate, up, down = w[8 * n : 8 * n + 8]
        y = rms(x, g[2 * n])
        q, k, v = (to_heads(F.linear(y, m), 128) for m in (wq, wk, wv))
        q, k = (turned(rms(t, gain), cos, sin) for t, gain in zip((q, k), heads, strict=True))
        keys, values = caches[n]
        keys[:, :, at] = k
        values[:, :, at] = v
        x = x + F.linear(attention(q, keys, values, mask, 128**-0.5), wo)
        x = x + swiglu(rms(x, g[2 * n + 1]), gate, up, down)
    return F.linear(rms(x[:, -1], g[4]), table).float().argmax(-1)


def mamba_token(x: Tensor, window: Tensor, state: Tensor, *w: Tensor) -> Tensor:
    """Mamba 2.8B: a layer for a token, its window rolled and its state written in place."""
    gain, into, taps, bias, wx, wdt, bdt, log_a, skip, out = w
    y = F.linear(rms(x, gain, 1e-5), into)
    y, z = y.chunk(2, -1)
    window.copy_(torch.roll(window, shifts=-1, dims=-1))
    window[:, :, -1] = y
    y = F.silu(torch.sum(window * taps, dim=-1) + bias)
    dt, b, c = F.linear(y, wx).split([wdt.shape[1], state.shape[-1], state.shape[-1]], -1)
    dt = F.softplus(F.linear(dt, wdt).float() + bdt.float())
    decay = torch.exp(torch.einsum("bd,dn->bdn", dt, -torch.exp(log_a.float())))
    state.copy_(state * decay + torch.einsum("bd,bn,bd->bdn", dt, b.float(), y.float()))
    read = torch.einsum("bdn,bn->bd", state.to(x.dtype), c) + skip * y
    return x + F.linear(read * F.silu(z), out)


def rwkv_token(x: Tensor, past: Tensor, first: Tensor, state: Tensor, *w: Tensor) -> Tensor:
    """RWKV-7: both mixes of a layer for a token, low ranks for decays, rates, values and gates, the state in place."""
    mix, big, wa, wb, ga, gb, vectors, wo, key, value, own = w
    b, d = x.shape
    y = F.layer_norm(x, (d,), vectors[0], vectors[1])
    xr, xw, xk, xv, xa, xg = (y + (past[0] - y) * m for m in mix[:6])
    past[0].copy_(y)
    r, k, v = F.linear(xr, big[0]), F.linear(xk, big[1]), F.linear(xv, big[2])
    decay = torch.exp(-0.606531 * torch.sigmoid((vectors[2] + torch.tanh(xw @ wa[0]) @ wb[0]).float()))
    rate = torch.sigmoid(vectors[3] + (xa @ wa[1]) @ wb[1])
    v = v + (first - v) * torch.sigmoid(vectors[4] + (xv @ wa[2]) @ wb[2])
    gate = torch.sigmoid(xg @ ga) @ gb
    removal = F.normalize((k * vectors[5]).view(b, -1, 64), dim=-1, p=2.0)
    k = k * (1 + (rate - 1) * vectors[6])
    r, k, v, rate, decay = (t.view(b, -1, 64) for t in (r, k, v, rate, decay))
    new = v[..., None].to(state.dtype) @ k[:, :, None].to(state.dtype)
    ab = -removal[..., None].to(state.dtype) @ (removal * rate)[:, :, None].to(state.dtype)
    state.copy_(state * decay[:, :, None] + state @ ab + new)
    out = (state.to(x.dtype) @ r[..., None]).view(b, d)
    out = F.group_norm(out, d // 64, vectors[7], vectors[8], eps=64e-5)
    out = out + ((r * k * own).sum(-1, keepdim=True) * v).view(b, d)
    x = x + F.linear(out * gate, wo)
    y = F.layer_norm(x, (d,), vectors[9], vectors[10])
    k = y + (past[1] - y) * mix[6]
    past[1].copy_(y)
    return x + F.linear(F.relu(F.linear(k, key)) ** 2, value)


def processed_logits(logits: Tensor, text: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """What a generator does to logits, step by step: repetition, temperature, 50 best, 0.9 in sum, a floor; a draw."""
    found = torch.gather(logits, 1, text)
    found = torch.where(found < 0, found * 1.1, found / 1.1)
    scores = logits.scatter(1, text, found) / 0.7
    least = torch.topk(scores, min(50, scores.shape[1]))[0][..., -1, None]
    scores = scores.masked_fill(scores < least, -math.inf)
    ordered, at = torch.sort(scores, descending=False)
    beyond = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - 0.9
    beyond[..., -1:] = False
    scores = scores.masked_fill(beyond.scatter(1, at, beyond), -math.inf)
    p = torch.softmax(scores, dim=-1)
    small = p < 0.05 * p.max(dim=-1, keepdim=True).values
    p = F.softmax(scores.masked_fill(small, -math.inf), dim=-1, dtype=torch.float32)
    next_token = torch.argmax(p / noise.float().abs().clamp(min=1e-3), dim=-1)
    return next_token, torch.log(p.gather(1, next_token[:, None]))[:, 0]


# ---- encoders, and encoders with decoders ---------------------------------------------------------------------------------


def roberta(text: Tensor, words: Tensor, positions: Tensor, *w: Tensor) -> Tensor:
    """RoBERTa's embeddings, positions counted past the padding, and its first layer with post-norms."""
    kinds, n0, wqkv, bqkv, wo, bo, n1, up, bu, down, bd, n2 = w
    b, s = text.shape
    d = words.shape[1]
    mask = text.ne(1).int()
    at = (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + 1
    x = F.embedding(text, words, padding_idx=1) + kinds[0] + F.embedding(at, positions, padding_idx=1)
    x = F.layer_norm(x, (d,), n0[0], n0[1], 1e-5)
    q, k, v = (to_heads(t, 64) for t in F.linear(x, wqkv, bqkv).chunk(3, -1))
    hidden = (1.0 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(64) + hidden
    y = torch.matmul(F.softmax(scores, dim=-1), v).permute(0, 2, 1, 3).contiguous().view(b, s, d)
    x = F.layer_norm(F.linear(y, wo, bo) + x, (d,), n1[0], n1[1], 1e-5)
    y = F.linear(F.gelu(F.linear(x, up, bu)), down, bd)
    return F.layer_norm(y + x, (d,), n2[0], n2[1], 1e-5)


def modern_layer(x: Tensor, lengths: Tensor, *w: Tensor) -> Tensor:
    """ModernBERT: norms without biases in front, 64 tokens to each side, one matrix for both halves of a GELU gate."""
    norms, wqkv, wo, wi, down = w
    b, s, d = x.shape
    qkv = F.linear(F.layer_norm(x, (d,), norms[0]), wqkv).view(b, s, 3, -1, 64)
    q, k, v = qkv.transpose(3, 1).unbind(dim=2)
    at = torch.arange(s, device=x.device)
    cos, sin = tables(at, 64, 10000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    near = (at[:, None] - at).abs() <= min(64, s // 3)
    seen = near & (at < lengths[:, None, None, None])
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | (at[:, None] == at))
    x = x + F.linear(y.transpose(1, 2).reshape(b, s, d), wo)
    y, gate = F.linear(F.layer_norm(x, (d,), norms[1]), wi).chunk(2, dim=-1)
    return x + F.linear(F.gelu(y) * gate, down)


def electra(hidden: Tensor, labels: Tensor, noise: Tensor, words: Tensor, *w: Tensor) -> Tensor:
    """ELECTRA: a small generator's head, tokens drawn in place of masked ones, a discriminator's head on their rows."""
    dense, bias, norm, out, up, disc, last = w
    y = F.layer_norm(F.gelu(F.linear(hidden, dense, bias)), dense.shape[:1], norm[0], norm[1])
    logits = F.linear(y, words, out).float()
    masked = labels >= 0
    mlm = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
    drawn = (logits.detach() + noise.detach().float()).argmax(-1)
    fake = masked & (drawn != labels)
    rows = F.embedding(torch.where(masked, drawn, drawn.roll(1, 1)), words)
    z = F.linear(F.gelu(F.linear(F.linear(rows, up), disc)), last)[..., 0].float()
    return mlm + 50.0 * F.binary_cross_entropy_with_logits(z, fake.float())


def t5_decoder(x: Tensor, memory: Tensor, lengths: Tensor, table: Tensor, g: Tensor, *w: Tensor) -> Tensor:
    """Flan-T5: a decoder's layer: buckets of distance in its own attention, the encoder's tokens, a gate by GELU."""
    s = x.shape[1]
    far = (torch.arange(s, device=x.device)[:, None] - torch.arange(s, device=x.device)).clamp(min=0)
    large = 16 + (torch.log(far.float().clamp(min=1) / 16) / math.log(128 / 16) * 16).to(torch.long)
    bucket = torch.where(far < 16, far, torch.min(large, torch.full_like(large, 31)))
    bias = F.embedding(bucket, table).permute(2, 0, 1)[None] + causal(s, x)
    seen = torch.arange(memory.shape[1], device=x.device) < lengths[:, None]
    other = unseen(seen, x)[:, None, None]

    def read(y: Tensor, of: Tensor, m: tuple[Tensor, ...], mask: Tensor) -> Tensor:
        q, k, v = to_heads(F.linear(y, m[0]), 64), to_heads(F.linear(of, m[1]), 64), to_heads(F.linear(of, m[2]), 64)
        scores = torch.matmul(q, k.transpose(3, 2)) + mask
        p = F.softmax(scores.float(), dim=-1).type_as(scores)
        return F.linear(torch.matmul(p, v).transpose(1, 2).contiguous().flatten(2), m[3])

    y = rms(x, g[0])
    x = x + read(y, y, w[:4], bias)
    x = x + read(rms(x, g[1]), memory, w[4:8], other)
    y = rms(x, g[2])
    return x + F.linear(F.gelu(F.linear(y, w[8]), approximate="tanh") * F.linear(y, w[9]), w[10])


def bart_decoder(x: Tensor, memory: Tensor, *w: Tensor) -> Tensor:
    """BART: a decoder's layer with norms behind, biases, heads in the batch of bmm."""
    b, s, d = x.shape
    own, other, norms, up, bu, down, bd, bo = w

    def rows(t: Tensor, m: Tensor, bias: Tensor) -> Tensor:
        t = F.linear(t, m, bias)
        return t.view(b, -1, d // 64, 64).transpose(1, 2).contiguous().view(b * d // 64, -1, 64)

    def read(t: Tensor, of: Tensor, m: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = rows(t, m[0], bias[0]) * 0.125, rows(of, m[1], bias[1]), rows(of, m[2], bias[2])
        scores = torch.bmm(q, k.transpose(1, 2))
        if mask is not None:
            scores = (scores.view(b, -1, s, s) + mask).view(-1, s, s)
        y = torch.bmm(F.softmax(scores, dim=-1), v).view(b, d // 64, s, 64).transpose(1, 2).reshape(b, s, d)
        return F.linear(y, m[3], bias[3])

    x = F.layer_norm(x + read(x, x, own, bo[:4], causal(s, x)), (d,), norms[0], norms[1])
    x = F.layer_norm(x + read(x, memory, other, bo[4:], None), (d,), norms[2], norms[3])
    return F.layer_norm(x + F.linear(F.gelu(F.linear(x, up, bu)), down, bd), (d,), norms[4], norms[5])


def paired_texts(query: Tensor, texts: Tensor, lengths: Tensor, w: Tensor) -> Tensor:
    """E5 and GTE: the last tokens' states of queries and of texts, hard negatives among them, unit length; four contrasts."""
    b = query.shape[0]
    last = (lengths - 1).clamp(min=0)
    q = query[torch.arange(b, device=query.device), last[:b]]
    t = texts[torch.arange(texts.shape[0], device=query.device), last[b:]]
    q, t = F.normalize(F.linear(q, w), p=2, dim=-1), F.normalize(F.linear(t, w), p=2, dim=-1)
    qt = (q @ t.t()).float() / 0.05
    qq = (q @ q.t()).float() / 0.05
    tt = (t[:b] @ t[:b].t()).float() / 0.05
    own = torch.eye(b, dtype=torch.bool, device=q.device)
    qq, tt = qq.masked_fill(own, -math.inf), tt.masked_fill(own, -math.inf)
    labels = torch.arange(b, device=q.device)
    return F.cross_entropy(torch.cat((qt, qq, qt.t()[:b], tt), 1), labels)


# ---- what tunes a model ---------------------------------------------------------------------------------------------------


def lora_heads(x: Tensor, *w: Tensor) -> Tensor:
    """PEFT's LoRA on queries and values of a Llama's attention: frozen 16-bit matrices, adapters in float32, casts between."""
    gain, wq, wk, wv, wo, aq, bq, av, bv = w

    def adapted(y: Tensor, m: Tensor, a: Tensor, b: Tensor) -> Tensor:
        out = F.linear(y, m.detach())
        return (out + F.linear(F.linear(y.to(a.dtype), a), b) * 2.0).to(out.dtype)

    y = rms(x, gain.detach(), 1e-5)
    q, k, v = adapted(y, wq, aq, bq), F.linear(y, wk.detach()), adapted(y, wv, av, bv)
    q, k, v = (to_heads(t, 128) for t in (q, k, v))
    cos, sin = tables(torch.arange(x.shape[1], device=x.device), 128, 10000.0, x)
    q, k = turned(q, cos, sin), turned(k, cos, sin)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return x + F.linear(y, wo.detach())


def tuned_prefix(x: Tensor, prefix: Tensor, one: Tensor, two: Tensor, wqkv: Tensor, wo: Tensor) -> Tensor:
    """Prefix tuning: keys and values of 20 rows by a small network, before those of a GPT's text."""
    b, s, d = x.shape
    past = F.linear(torch.tanh(F.linear(prefix, one)), two).view(1, -1, 2, d // 64, 64).expand(b, -1, -1, -1, -1)
    pk, pv = past.permute(2, 0, 3, 1, 4)
    q, k, v = (to_heads(t, 64) for t in F.linear(x, wqkv.detach()).split(d, dim=2))
    k, v = torch.cat((pk, k), dim=2), torch.cat((pv, v), dim=2)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(64)
    seen = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril()[k.shape[2] - s :]
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    y = torch.matmul(F.softmax(scores, dim=-1), v).transpose(1, 2).contiguous().view(b, s, d)
    return x + F.linear(y, wo.detach())


def byte_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    """A gated layer with int8 weights as torchao and gpt-fast spell them: cast, matmul, scales of rows."""
    y = F.silu(F.linear(x, gate.to(x.dtype)) * s1[0]) * (F.linear(x, up.to(x.dtype)) * s1[1])
    return F.linear(y, down.to(x.dtype)) * s2


class Float8Matmul(torch.autograd.Function):
    """x @ w.T of values in e4m3, gradients in e5m2, a scale for each tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _rounded(x, torch.float8_e4m3fn, 448.0) @ _rounded(w, torch.float8_e4m3fn, 448.0).t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        grad = _rounded(grad, torch.float8_e5m2, 57344.0)
        return grad @ _rounded(w, torch.float8_e4m3fn, 448.0), grad.t() @ _rounded(x, torch.float8_e4m3fn, 448.0)


def _rounded(x: Tensor, dtype: torch.dtype, largest: float) -> Tensor:
    """In few bits and back."""
    scale = torch.exp2(torch.floor(torch.log2(largest / x.float().abs().amax().clamp(min=1e-12))))
    return ((x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale).to(x.dtype)


def float8_mlp(x: Tensor, gain: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A layer trained in 8 bits with dynamic scales of tensors, which are powers of two."""
    y = rms(x, gain)
    y = F.relu(Float8Matmul.apply(y, up)).square()
    return x + Float8Matmul.apply(y, down)


# ---- losses ---------------------------------------------------------------------------------------------------------------


def between_models(student: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """GKD: the Jensen-Shannon divergence of two models' tokens, a tenth of the teacher, where labels are no padding."""
    s, t = F.log_softmax(student.float() / 0.9, dim=-1), F.log_softmax(teacher.detach().float() / 0.9, dim=-1)
    beta = 0.1
    mixture = torch.logsumexp(torch.stack([s + math.log1p(-beta), t + math.log(beta)]), dim=0)
    kl_t = F.kl_div(mixture, t, reduction="none", log_target=True)
    kl_s = F.kl_div(mixture, s, reduction="none", log_target=True)
    jsd = beta * kl_t + (1 - beta) * kl_s
    mask = labels != 0
    return (jsd.sum(-1) * mask).sum() / mask.sum()


def policy_of_tokens(logits: Tensor, values: Tensor, olds: Tensor, rewards: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    """PPO of a language model: advantages by a loop over few tokens, whitened, clipped ratios and values, an entropy."""
    s = logits.shape[1]
    seen = mask > -1
    logp = torch.gather(logits.log_softmax(-1), 2, text[:, :, None])[..., 0]
    old_logp, old_values = olds.detach().unbind(0)
    last, turned_back = torch.zeros_like(old_values[:, 0]), []
    for t in reversed(range(s)):
        after = old_values[:, t + 1] if t < s - 1 else 0.0
        last = rewards.detach()[:, t] + after - old_values[:, t] + 0.95 * last
        turned_back.append(last)
    advantages = torch.stack(turned_back[::-1], dim=1)
    returns = advantages + old_values
    count = seen.sum()
    mean = (advantages * seen).sum() / count
    var = ((advantages - mean).square() * seen).sum() / count
    advantages = (advantages - mean) * torch.rsqrt(var + 1e-8)
    ratio = torch.exp(logp - (logp.detach() * 0.9 + 0.1 * old_logp))
    policy = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2))
    clipped = torch.clamp(values, old_values - 0.2, old_values + 0.2)
    value = torch.max((values - returns).square(), (clipped - returns).square())
    p = F.softmax(logits, dim=-1)
    entropy = torch.logsumexp(logits, dim=-1) - torch.sum(p * logits, dim=-1)
    return ((policy + 0.05 * value - 0.01 * entropy) * seen).sum() / count


def small_model(text: Tensor, table: Tensor, g: Tensor, *w: Tensor) -> Tensor:
    """SmolLM's step with two layers: documents packed in a row by their end token, the tied table, cross-entropy and z loss."""
    s = text.shape[1]
    document = (text == 0).int().cumsum(1)
    starts = torch.cummax(torch.where(text == 0, torch.arange(s, device=text.device), 0), dim=1).values
    at = torch.arange(s, device=text.device) - starts
    x = F.embedding(text, table)
    cos, sin = (t[:, None] for t in tables(at, 64, 10000.0, x))
    seen = (document[:, :, None] == document[:, None]) & torch.ones(s, s, dtype=torch.bool, device=text.device).tril()
    for n in range(2):
        wq, wk, wv, wo, gate, up, down = w[7 * n : 7 * n + 7]
        y = rms(x, g[2 * n], 1e-5)
        q, k, v = (to_heads(F.linear(y, m), 64) for m in (wq, wk, wv))
        q, k, times = turned(q, cos, sin), turned(k, cos, sin), q.shape[1] // k.shape[1]
        y = F.scaled_dot_product_attention(q, repeat_kv(k, times), repeat_kv(v, times), attn_mask=seen[:, None])
        x = x + F.linear(y.transpose(1, 2).flatten(2), wo)
        x = x + swiglu(rms(x, g[2 * n + 1], 1e-5), gate, up, down)
    logits = F.linear(rms(x, g[4], 1e-5), table).float()[:, :-1].flatten(0, 1)
    labels = torch.where(document[:, 1:] == document[:, :-1], text[:, 1:], -100).flatten()
    z = torch.logsumexp(logits, -1).square() * (labels >= 0)
    return F.cross_entropy(logits, labels, ignore_index=-100) + 1e-4 * z.sum() / (labels >= 0).sum()


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _near_one(m: Make, *shape: int) -> Tensor:
    return m(*shape) * 0.1 + 1


def _heads(m: Make, d: int, size: int, h: int, kv: int) -> list[Tensor]:
    """Matrices of queries, keys, values, and of the result."""
    return [weight(m, h * size, d), weight(m, kv * size, d), weight(m, kv * size, d), weight(m, d, h * size)]


def _gated(m: Make, d: int, f: int) -> list[Tensor]:
    return [weight(m, f, d), weight(m, f, d), weight(m, d, f)]


def _llama(m: Make, d: int, h: int, kv: int, f: int) -> list[Tensor]:
    return [_near_one(m, d), *_heads(m, d, 128, h, kv), _near_one(m, d), *_gated(m, d, f)]


def _qwen(m: Make, b: int, s: int, d: int, h: int, kv: int, f: int) -> list[Tensor]:
    q, k, v, o = _heads(m, d, 64, h, kv)
    wide = [q, m(h * 64), k, m(kv * 64), v, m(kv * 64), o]
    return [m(b, s, d), _near_one(m, d), *wide, _near_one(m, d), *_gated(m, d, f)]


def _packed(m: Make, b: int, s: int, v: int, d: int, h: int, kv: int, f: int) -> list[Tensor]:
    text = ids(m, v, b, s)
    text[:, s // 3] = 0
    layers = [t for _ in range(2) for t in (*_heads(m, d, 64, h, kv), *_gated(m, d, f))]
    return [text, weight(m, v, d), _near_one(m, 5, d), *layers]


def _token(m: Make, b: int, s: int, v: int, d: int, h: int, kv: int, f: int) -> list[Tensor]:
    layers = [t for _ in range(2) for t in (_near_one(m, 2, 128), *_heads(m, d, 128, h, kv), *_gated(m, d, f))]
    at = torch.full_like(ids(m, 2, 1), s // 2)
    return [ids(m, v, b, 1), at, m(2, 2, b, kv, s, 128), weight(m, v, d), _near_one(m, 5, d), *layers]


def _deepseek(m: Make, b: int, s: int, d: int, h: int, r: int, e: int, f: int) -> list[Tensor]:
    low = [weight(m, r, d), weight(m, h * 192, r), weight(m, r + 64, d), weight(m, h * 256, r), weight(m, d, h * 128)]
    experts = [m(e, d, f) * d**-0.5, m(e, d, f) * d**-0.5, m(e, f, d) * f**-0.5]
    shared = [m(2, f, d) * d**-0.5, weight(m, d, f)]
    return [m(b, s, d), _near_one(m, 2, d), _near_one(m, r), _near_one(m, r), *low, weight(m, e, d), m(e), *experts, *shared]


def _electra(m: Make, b: int, s: int, v: int, e: int, d: int) -> list[Tensor]:
    labels = torch.where(ids(m, 3, b, s) == 0, ids(m, v, b, s), -100)
    head = [weight(m, e, d), m(e), _near_one(m, 2, e), m(v) * 0.1, weight(m, d, e), weight(m, d, d), weight(m, 1, d)]
    return [m(b, s, d), labels, m(b, s, v), weight(m, v, e), *head]


def _rwkv(m: Make, b: int, d: int, r: int, f: int) -> list[Tensor]:
    low = [m(3, d, r) * d**-0.5, m(3, r, d) * r**-0.5, m(d, r) * d**-0.5, m(r, d) * r**-0.5]
    states = [m(2, b, d), m(b, d), m(b, d // 64, 64, 64).float() * 0.1]
    rest = [weight(m, d, d), weight(m, f, d), weight(m, d, f), m(d // 64, 64) * 0.1]
    return [m(b, d), *states, m(7, d).sigmoid(), m(3, d, d) * d**-0.5, *low, _near_one(m, 11, d), *rest]


BLOCKS: tuple[Block, ...] = (
    Sized(llama_layer, lambda m, b, s, *n: [m(b, s, n[0]), *_llama(m, *n)], (2, 5, 16, 2, 1, 24)).block(
        "llama prefill", 1, 1000, 4096, 32, 8, 14336
    ),
    Sized(qwen_layer, _qwen, (2, 5, 16, 4, 2, 24)).block("qwen layer", 2, 2048, 896, 14, 2, 4864, training=True),
    Sized(
        gemma2_layer,
        lambda m, b, s, d, h, kv, f: [m(b, s, d), m(4, d) * 0.1, *_heads(m, d, 256, h, kv), *_gated(m, d, f)],
        (1, 6, 16, 2, 1, 24),
    ).block("gemma 2 layer", 1, 4500, 2304, 8, 4, 9216, training=True),
    Sized(
        gemma3_layer,
        lambda m, b, s, d, h, kv, f: [
            m(b, s, d),
            ids(m, 2, b, s),
            m(4, d) * 0.1,
            m(2, 256) * 0.1,
            *_heads(m, d, 256, h, kv),
            *_gated(m, d, f),
        ],
        (2, 7, 16, 2, 1, 24),
    ).block("gemma 3 prefill", 3, 1500, 1152, 4, 1, 6912),
    Sized(
        phi_layer,
        lambda m, b, s, d, h: [
            m(b, s, d),
            _near_one(m, 2, d),
            weight(m, 240 * h, d),
            m(240 * h) * 0.1,
            weight(m, d, 80 * h),
            m(d),
            weight(m, 4 * d, d),
            m(4 * d),
            weight(m, d, 4 * d),
            m(d),
        ],
        (2, 5, 16, 2),
    ).block("phi layer", 2, 1024, 2560, 32, training=True),
    Sized(
        falcon_layer,
        lambda m, b, s, d, h: [
            m(b, s, d),
            _near_one(m, 2, d),
            weight(m, (h + 2) * 64, d),
            weight(m, d, h * 64),
            weight(m, 4 * d, d),
            weight(m, d, 4 * d),
        ],
        (2, 5, 16, 3),
    ).block("falcon prefill", 2, 777, 4544, 71),
    Sized(
        neox_layer,
        lambda m, b, s, h: [
            m(b, s, 64 * h),
            _near_one(m, 4, 64 * h),
            weight(m, 192 * h, 64 * h),
            m(192 * h) * 0.1,
            weight(m, 64 * h, 64 * h),
            m(64 * h),
            weight(m, 256 * h, 64 * h),
            m(256 * h),
            weight(m, 64 * h, 256 * h),
            m(64 * h),
        ],
        (2, 5, 2),
    ).block("pythia layer", 4, 1024, 16, training=True),
    Sized(
        olmo_layer,
        lambda m, b, s, h, f: [
            m(b, s, 128 * h),
            *_heads(m, 128 * h, 128, h, h),
            _near_one(m, 4, 128 * h),
            *_gated(m, 128 * h, f),
        ],
        (2, 5, 1, 24),
        SINGLE,
        tf32=True,
    ).block("olmo 2 layer", 1, 1025, 16, 8192, training=True),
    Sized(deepseek_layer, _deepseek, (1, 6, 16, 2, 8, 16, 8)).block(
        "deepseek layer", 2, 1024, 1024, 8, 512, 16, 704, training=True
    ),
    Sized(
        scout_experts,
        lambda m, t, d, e, f: [
            m(t, d),
            weight(m, e, d),
            m(e, d, 2 * f) * d**-0.5,
            m(e, f, d) * f**-0.5,
            m(2, f, d) * d**-0.5,
            weight(m, d, f),
        ],
        (5, 16, 4, 8),
    ).block("scout experts", 200, 5120, 16, 2048),
    Sized(
        mistral_token,
        lambda m, b, s, *n: [
            m(b, 1, n[0]),
            torch.full_like(ids(m, 2, 1), s * 2 // 3),
            m(b, n[2], s, 128),
            m(b, n[2], s, 128),
            *_llama(m, *n),
        ],
        (2, 6, 16, 2, 1, 24),
    ).block("mistral token", 9, 4096, 4096, 32, 8, 14336),
    Sized(
        command_token,
        lambda m, b, s, d, h, kv, f: [
            m(b, 1, d),
            m(b, kv, s, 128),
            m(b, kv, s, 128),
            _near_one(m, d),
            *_heads(m, d, 128, h, kv),
            *_gated(m, d, f),
        ],
        (2, 8, 16, 2, 1, 24),
    ).block("command token", 4, 4000, 4096, 32, 8, 14336),
    Sized(whole_token, _token, (2, 6, 40, 16, 2, 1, 24)).block("whole token", 1, 2048, 151936, 1024, 16, 8, 3072),
    Sized(
        mamba_token,
        lambda m, b, d, e, n, r: [
            m(b, d),
            m(b, e, 4),
            m(b, e, n).float(),
            _near_one(m, d),
            weight(m, 2 * e, d),
            m(e, 4) * 0.5,
            m(e),
            weight(m, r + 2 * n, e),
            weight(m, e, r),
            m(e) - 3,
            m(e, n).float(),
            m(e),
            weight(m, d, e),
        ],
        (2, 8, 16, 4, 2),
    ).block("mamba token", 48, 2560, 5120, 16, 160),
    Sized(rwkv_token, _rwkv, (2, 128, 4, 24)).block("rwkv token", 32, 2048, 96, 8192),
    Sized(processed_logits, lambda m, b, v, s: [m(b, v) * 3, ids(m, v, b, s), m(b, v)], (3, 90, 7)).block(
        "processed logits", 24, 128256, 700
    ),
    Sized(
        roberta,
        lambda m, b, s, v, d, f: [
            ids(m, v, b, s) * (ids(m, 9, b, s) > 0) + (ids(m, 9, b, s) == 0),
            m(v, d) * 0.1,
            m(s + 2, d) * 0.1,
            m(1, d) * 0.1,
            _near_one(m, 2, d),
            weight(m, 3 * d, d),
            m(3 * d) * 0.1,
            weight(m, d, d),
            m(d) * 0.1,
            _near_one(m, 2, d),
            weight(m, f, d),
            m(f) * 0.1,
            weight(m, d, f),
            m(d) * 0.1,
            _near_one(m, 2, d),
        ],
        (2, 6, 30, 128, 24),
    ).block("roberta", 32, 200, 50265, 768, 3072, training=True),
    Sized(
        modern_layer,
        lambda m, b, s, d, f: [
            m(b, s, d),
            ids(m, s, b) + 1,
            _near_one(m, 2, d),
            weight(m, 3 * d, d),
            weight(m, d, d),
            weight(m, 2 * f, d),
            weight(m, d, f),
        ],
        (2, 7, 128, 24),
    ).block("modern bert", 8, 1023, 768, 1152, training=True),
    Sized(electra, _electra, (2, 5, 20, 8, 12)).block("electra", 64, 128, 30522, 128, 256, training=True),
    Sized(
        t5_decoder,
        lambda m, b, s, n, d, f: [
            m(b, s, d),
            m(b, n, d),
            ids(m, n, b) + 1,
            m(32, d // 64),
            _near_one(m, 3, d),
            *(weight(m, d, d) * (0.3 if k in (0, 4) else 1) for k in range(8)),
            weight(m, f, d),
            weight(m, f, d),
            weight(m, d, f),
        ],
        (2, 20, 7, 128, 24),
    ).block("flan t5 decoder", 8, 114, 512, 768, 2048, training=True),
    Sized(
        bart_decoder,
        lambda m, b, s, n, d, f: [
            m(b, s, d),
            m(b, n, d),
            m(4, d, d) * d**-0.5,
            m(4, d, d) * d**-0.5,
            _near_one(m, 6, d),
            weight(m, f, d),
            m(f),
            weight(m, d, f),
            m(d),
            m(8, d) * 0.1,
        ],
        (2, 5, 7, 128, 24),
        SINGLE,
    ).block("bart decoder", 16, 62, 500, 1024, 4096, training=True),
    Sized(
        paired_texts,
        lambda m, b, n, s, d, o: [m(b, s, d), m(b * n, s, d), ids(m, s, b + b * n) + 1, weight(m, o, d)],
        (3, 2, 5, 16, 8),
    ).block("paired texts", 256, 3, 128, 1024, 768, training=True),
    Sized(
        lora_heads,
        lambda m, b, s, d, r: [
            m(b, s, d),
            _near_one(m, d),
            *_heads(m, d, 128, d // 128, d // 128),
            weight(m, r, d).float(),
            weight(m, d, r).float(),
            weight(m, r, d).float(),
            weight(m, d, r).float(),
        ],
        (2, 5, 128, 4),
    ).block("lora heads", 1, 1500, 4096, 16, training=True),
    Sized(
        tuned_prefix,
        lambda m, b, s, d, p, f: [
            m(b, s, d),
            m(p, d),
            weight(m, f, d),
            weight(m, 2 * d, f),
            weight(m, 3 * d, d),
            weight(m, d, d),
        ],
        (2, 5, 128, 3, 8),
    ).block("tuned prefix", 8, 512, 1024, 20, 800, training=True),
    Sized(
        byte_mlp,
        lambda m, t, d, f: [
            m(t, d),
            (m(f, d) * 40).to(torch.int8),
            (m(f, d) * 40).to(torch.int8),
            (m(d, f) * 40).to(torch.int8),
            m(2, f).abs() / 40 * d**-0.5,
            m(d).abs() / 40 * f**-0.5,
        ],
        (3, 16, 24),
    ).block("byte mlp", 1, 4096, 14336),
    Sized(
        float8_mlp,
        lambda m, t, d, f: [m(t, d), _near_one(m, d), weight(m, f, d), weight(m, d, f)],
        (5, 16, 24),
    ).block("float8 mlp", 4096, 2048, 8192, training=True),
    Sized(between_models, lambda m, b, s, v: [m(b, s, v), m(b, s, v), ids(m, 4, b, s)], (2, 5, 20)).block(
        "between models", 4, 511, 49152, training=True
    ),
    Sized(
        policy_of_tokens,
        lambda m, b, s, v: [m(b, s, v), m(b, s), m(2, b, s), m(b, s), ids(m, v, b, s), m(b, s)],
        (2, 5, 20),
    ).block("policy of tokens", 16, 53, 50257, training=True),
    Sized(small_model, _packed, (2, 9, 30, 32, 3, 1, 24)).block("small model", 4, 1024, 49152, 576, 9, 3, 1536, training=True),
)
