"""Blocks of sequences: states in chunks, scores with gates and masks, caches made smaller, experts, few bits, choices."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE = torch.float32


# ---- states in chunks -----------------------------------------------------------------------------------------------------


def gated_slots(q: Tensor, k: Tensor, v: Tensor, f: Tensor) -> Tensor:
    """Gated slots: keys and values written to slots that forget, in chunks of 32; a softmax over slots between."""
    n, size, slots = q.shape[2] // 32, 32, f.shape[-1]
    log = (F.logsigmoid(f.float()) / 16).unflatten(2, (n, size))
    q, k, v = (t.float().unflatten(2, (n, size)) for t in (q, k, v))
    cum = log.cumsum(3)
    write = -torch.expm1(log)
    into, out, end = write * (-cum).exp(), cum.exp(), cum[:, :, :, -1:]
    rest = write * (end - cum).exp()
    mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    inside = (q @ k.mT).masked_fill(~mask, 0) @ into * out
    state = q.new_zeros(*q.shape[:2], q.shape[-1], slots)
    stored = q.new_zeros(*q.shape[:2], slots, v.shape[-1])
    made = []
    for c in range(n):
        p = (inside[:, :, c] + q[:, :, c] @ state * out[:, :, c]).softmax(-1) * out[:, :, c]
        y = (p @ into[:, :, c].mT).masked_fill(~mask, 0) @ v[:, :, c] + p @ stored
        keep = end[:, :, c].exp()
        state = state * keep + k[:, :, c].mT @ rest[:, :, c]
        stored = stored * keep.mT + rest[:, :, c].mT @ v[:, :, c]
        made.append(y)
    return torch.cat(made, 2)


def retained_chunks(x: Tensor, w: Tensor, gate: Tensor, out: Tensor) -> Tensor:
    """RetNet in chunks of 64: decays of heads inside and between, norms of heads, a gate."""
    b, s, d = x.shape
    h, size = 8, 64
    q, k, v = F.linear(x, w).view(b, s // size, size, 3, h, d // h).permute(3, 1, 0, 4, 2, 5)
    decay = torch.log(1 - 2 ** (-5 - torch.arange(h, device=x.device, dtype=torch.float32)))
    at = torch.arange(size, device=x.device)
    far = at[:, None] - at
    inner = torch.where(far >= 0, torch.exp(far * decay[:, None, None]), 0)
    inner = (inner / inner.sum(-1, keepdim=True).sqrt()).to(x.dtype)
    cross = torch.exp((at + 1) * decay[:, None])[..., None].to(x.dtype)
    left = torch.exp((size - 1 - at) * decay[:, None])[..., None].to(x.dtype)
    whole = torch.exp(size * decay)[:, None, None].to(x.dtype)
    k = k * (d // h) ** -0.5
    y = (q @ k.mT * inner) @ v
    state, past = torch.zeros_like(y[0, :, :, :1].mT @ y[0, :, :, :1]), []
    for c in range(s // size):
        past.append(state)
        state = state * whole + (k[c] * left).mT @ v[c]
    y = y + q @ torch.stack(past) * cross
    y = F.rms_norm(y.permute(1, 0, 3, 2, 4), (d // h,), eps=1e-5).reshape(b, s, d)
    return F.linear(F.silu(F.linear(x, gate)) * y, out)


def channel_decays(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """RWKV-6 in chunks of 16: a decay of each channel and token, pairs by differences of logs, a bonus of the token itself."""
    n = r.shape[2] // 16
    r, k, v, w = (t.unflatten(2, (n, 16)) for t in (r, k, v, w))
    log = -torch.exp(w * 0.3 - 2)
    cum = log.cumsum(3)
    before = cum - log
    pair = torch.exp((before[..., :, None, :] - cum[..., None, :, :]).clamp(max=0))
    scores = (r[..., :, None, :] * k[..., None, :, :] * pair).sum(-1).tril(-1)
    own = (r * u[:, None, None] * k).sum(-1, keepdim=True)
    y = scores @ v + own * v
    end = cum[..., -1:, :]
    added = (k * torch.exp(end - cum)).mT @ v
    state, made = torch.zeros_like(added[:, :, 0]), []
    for c in range(n):
        made.append((r[:, :, c] * before[:, :, c].exp()) @ state)
        state = end[:, :, c].exp().mT * state + added[:, :, c]
    return (y + torch.stack(made, 2)).flatten(2, 3)


def both_triangles(x: Tensor, b: Tensor, c: Tensor, dt: Tensor, d: Tensor) -> Tensor:
    """Hydra: a decayed matrix forward and one backward, both moved by one, a diagonal of its own; heads share b and c."""
    step = F.softplus(dt.float())
    cum = torch.cumsum(-step, 1).transpose(1, 2)
    far = cum[..., :, None] - cum[..., None, :]
    n = x.shape[1]
    lower = torch.ones(n, n, dtype=torch.bool, device=x.device).tril(-1)
    decays = torch.exp(torch.where(lower, far, -math.inf)) + torch.exp(torch.where(lower.t(), -far, -math.inf))
    scores = (c @ b.mT)[:, None] * decays.to(x.dtype)
    y = torch.einsum("bhst,bth,bthp->bshp", scores, step.to(x.dtype), x)
    return y + x * (d * F.silu(dt))[..., None]


def damped_averages(x: Tensor, alpha: Tensor, delta: Tensor, beta: Tensor, eta: Tensor, w: Tensor) -> Tensor:
    """Mega: damped moving averages of 4 states a channel as a matrix of 64 steps and a carried state, then a gated layer."""
    bsz, s, d = x.shape
    p = torch.sigmoid(alpha.float())
    q = 1 - p * torch.sigmoid(delta.float())
    at = torch.arange(64, device=x.device)
    power = torch.exp(at * torch.log(q)[..., None])
    taps = torch.einsum("dm,dmt->dt", p * beta.float() * eta.float() * 0.5, power)
    far = at[:, None] - at
    matrix = torch.where(far >= 0, taps[:, far.clamp(min=0)], 0)
    u = x.float().view(bsz, s // 64, 64, d)
    y = torch.einsum("dij,bnjd->bnid", matrix, u)
    into = torch.einsum("dmj,bnjd->bndm", (p * beta.float())[..., None] * power.flip(-1), u)
    state, past = torch.zeros_like(into[:, 0]), []
    for c in range(s // 64):
        past.append(state)
        state = state * q**64 + into[:, c]
    rest = torch.einsum("bndm,dmi->bnid", torch.stack(past, 1), eta[..., None].float() * 0.5 * power * q[..., None])
    y = F.silu((y + rest).view(bsz, s, d).to(x.dtype))
    value, gate = F.linear(y, w).chunk(2, -1)
    return x + torch.sigmoid(gate) * (value - x)


# ---- scores ---------------------------------------------------------------------------------------------------------------


def two_masks(x: Tensor, latents: Tensor, ask: Tensor, w: Tensor, lengths: Tensor, asked: Tensor) -> Tensor:
    """Perceiver IO: latents read a padded input, then queries read the latents; masks of both ends, scores of both softened."""
    b, n, d = x.shape
    seen = torch.arange(n, device=x.device) < (lengths.abs() * 0.3 + 0.5).clamp(max=1)[:, None] * n

    def read(q: Tensor, kv: Tensor, k: int, mask: Tensor) -> Tensor:
        q = F.linear(F.layer_norm(q, (d,)), w[k]).unflatten(-1, (8, -1)).transpose(1, 2)
        key, value = F.linear(F.layer_norm(kv, (d,)), w[k + 1 : k + 3].flatten(0, 1)).unflatten(-1, (2, 8, -1)).unbind(2)
        scores = torch.einsum("bhqc,bkhc->bhqk", q, key) * (d // 8) ** -0.5
        scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
        return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1), value).flatten(2)

    z = latents.expand(b, -1, -1)
    z = z + read(z, x, 0, seen[:, None, None])
    y = read(ask, z, 3, (asked > -1)[:, None, :, None])
    return torch.where((asked > -1)[..., None], ask + y, 0)


def composed_heads(x: Tensor, w: Tensor, w1: Tensor, w2: Tensor, gates: Tensor) -> Tensor:
    """Composable heads: scores before and after the softmax are mixed across heads by low ranks that queries make."""
    b, s, d = x.shape
    h = w1.shape[-1]
    q, k, v = F.linear(x, w).view(b, s, 3, h, d // h).permute(2, 0, 3, 1, 4)
    mask = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)

    def mixed(scores: Tensor, k: int) -> Tensor:
        a = torch.einsum("bsd,drh->bsrh", x, w1[k])
        a = F.rms_norm(a, (h,), eps=1e-6)
        c = torch.einsum("bsd,drh->bsrh", x, w2[k])
        low = torch.einsum("bhst,bsrh->brst", scores, a)
        own = torch.tanh(F.linear(x, gates[k])).transpose(1, 2)[..., None]
        return scores + torch.einsum("brst,bsrh->bhst", low, c) + scores * own

    scores = mixed(q @ k.mT * (d // h) ** -0.5, 0).masked_fill(mask, -math.inf)
    p = mixed(scores.float().softmax(-1).to(x.dtype), 1)
    return (p @ v).transpose(1, 2).reshape(b, s, d)


def clamped_regions(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """NATTEN by indices: each pixel sees 7 by 7 keys, moved inward at the borders, with a bias of the relative place."""
    b, h, n, m, d = q.shape

    def starts(size: int) -> Tensor:
        return (torch.arange(size, device=q.device) - 3).clamp(0, size - 7)

    i, j = (starts(size)[:, None] + torch.arange(7, device=q.device) for size in (n, m))
    at = (i[:, None, :, None] * m + j[None, :, None, :]).view(n * m, 49)
    row, column = (t - torch.arange(t.shape[0], device=q.device)[:, None] + 6 for t in (i, j))
    near, value = k.flatten(2, 3)[:, :, at], v.flatten(2, 3)[:, :, at]
    scores = torch.einsum("bhnd,bhnkd->bhnk", q.flatten(2, 3) * d**-0.5, near)
    scores = scores + bias[:, row[:, None, :, None], column[None, :, None, :]].reshape(h, n * m, 49)
    y = torch.einsum("bhnk,bhnkd->bhnd", scores.softmax(-1), value)
    return y.view(b, h, n, m, d)


def gated_axes(x: Tensor, w: Tensor, table: Tensor, gates: Tensor) -> Tensor:
    """MedT: along rows, then columns: learned terms of relative places for queries, keys and values, each with a gate."""
    _b, c, n, _ = x.shape
    at = torch.arange(n, device=x.device)
    at = at[:, None] - at + n - 1
    for k in range(2):
        y = x.permute(0, 3, 1, 2) if k == 0 else x.permute(0, 2, 1, 3)
        qkv = torch.einsum("oc,bjcn->bjon", w[k], y).unflatten(2, (4, -1))
        q, key, v = qkv.split([c // 8, c // 8, c // 4], 3)
        tq, tk, tv = table[k][:, at].split([c // 8, c // 8, c // 4], 0)
        g = torch.sigmoid(gates[k])
        scores = torch.einsum("bjhcn,bjhcm->bjhnm", q, key)
        scores = scores + g[0] * torch.einsum("bjhcn,cnm->bjhnm", q, tq)
        scores = scores + g[1] * torch.einsum("bjhcn,cnm->bjhmn", key, tk).mT
        p = F.batch_norm(scores.flatten(0, 1), None, None, training=True).view_as(scores).softmax(-1)
        z = torch.einsum("bjhnm,bjhcm->bjhcn", p, v) + g[2] * torch.einsum("bjhnm,cnm->bjhcn", p, tv)
        z = z.flatten(2, 3)
        x = x + (z.permute(0, 2, 3, 1) if k == 0 else z.permute(0, 2, 1, 3))
    return x


def compressive_segments(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
    """Infini-attention: segments of 128 see themselves, and a memory of all before by a delta rule; a gate of each head."""
    b, h, s, d = q.shape
    memory, norm = q.new_zeros(b, h, d, d), q.new_ones(b, h, d, 1) * d**-0.5
    g, made, size = torch.sigmoid(gate)[:, None, None], [], min(128, s // 2)
    for at in range(0, s, size):
        qs, ks, vs = (t[:, :, at : at + size] for t in (q, k, v))
        a, c = F.elu(qs) + 1, F.elu(ks) + 1
        past = a @ memory / (a @ norm)
        near = F.scaled_dot_product_attention(qs, ks, vs, is_causal=True)
        made.append(g * past + (1 - g) * near)
        memory = memory + c.mT @ (vs - c @ memory / (c @ norm))
        norm = norm + c.sum(2, keepdim=True).mT
    return torch.cat(made, 2)


def kept_by_kth(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    """Each query keeps its 64 best causal scores by the least of them as a threshold; a learned temperature of each head."""
    s = q.shape[2]
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = (q @ k.mT * (temperature.abs() * 4 + 4)[:, None, None]).float()
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    least = scores.topk(min(64, s // 2), dim=-1).values[..., -1:]
    p = torch.where(scores >= least, scores, -math.inf).softmax(-1)
    return p.to(q.dtype) @ v


def bounded_entropy(x: Tensor, w: Tensor, u: Tensor, gamma: Tensor, out: Tensor) -> Tensor:
    """Sigma reparametrisation: each weight over its largest singular value by a power iteration, scaled; heads see all."""

    def scaled(m: Tensor, at: Tensor, g: Tensor) -> Tensor:
        with torch.no_grad():
            right = F.normalize(m.t() @ at, dim=0)
            left = F.normalize(m @ right, dim=0)
        return m * (g / torch.einsum("i,ij,j->", left, m, right))

    q, k, v = (F.linear(x, scaled(w[j], u[j], gamma[j])).unflatten(-1, (-1, 64)).transpose(1, 2) for j in range(3))
    y = ((q @ k.mT) * 0.125).softmax(-1) @ v
    return x + F.linear(y.transpose(1, 2).flatten(2), scaled(out, u[3], gamma[3]))


def gated_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor, wg: Tensor, scale: Tensor) -> Tensor:
    """WavLM: a bias of logarithmic buckets of distance, times a gate of each query from two groups of four linear numbers."""
    _b, h, s, _ = q.shape
    at = torch.arange(s, device=q.device)
    far = at[None] - at[:, None]
    size = far.abs()
    large = 20 + (torch.log(size.float().clamp(min=1) / 20) / math.log(800 / 20) * 20).to(torch.int64)
    bucket = (far > 0).to(torch.int64) * 40 + torch.where(size < 20, size, large.clamp(max=39))
    bias = table[bucket].permute(2, 0, 1)
    low, high = torch.sigmoid(F.linear(q, wg).unflatten(-1, (2, 4)).sum(-1)).chunk(2, -1)
    gate = low * (high * scale.view(1, h, 1, 1) - 1) + 2
    scores = q @ k.mT * q.shape[-1] ** -0.5 + gate * bias
    scores = (scores - scores.amax(-1, keepdim=True).detach()) * 0.9
    return scores.softmax(-1) @ v


def one_length(x: Tensor, g: Tensor, wi: Tensor, wo: Tensor, bias: Tensor) -> Tensor:
    """ScaleNorm: rows to one learned length, tokens less the mean of all (PairNorm), a layer, a small residual."""
    y = g[0] * x / x.float().norm(dim=-1, keepdim=True).clamp(min=1e-5).to(x.dtype)
    y = F.linear(F.gelu(F.linear(y, wi, bias)), wo)
    x = x + g[1] * y
    centred = x - x.mean(1, keepdim=True)
    return F.silu(g[2] * centred / (1e-6 + centred.float().square().sum(-1).mean(1)).sqrt()[:, None, None].to(x.dtype))


# ---- caches ---------------------------------------------------------------------------------------------------------------


def voted_entries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """SnapKV: the last 32 queries vote for earlier keys, votes pooled by seven, the best 1/8 stay in order, with the window."""
    b, h, s, d = k.shape
    w = q.shape[2]
    keys = k.repeat_interleave(q.shape[1] // h, 1)
    scores = q @ keys.mT * d**-0.5
    own = torch.full((w, w), -math.inf, device=q.device, dtype=q.dtype).triu(1)
    scores[..., -w:] += own
    votes = scores.float().softmax(-1)[..., :-w].sum(2).view(b, h, -1, s - w).mean(2)
    votes = F.avg_pool1d(votes, 7, padding=3, stride=1)
    at = votes.topk(s // 8, dim=-1).indices.sort(-1).values[..., None].expand(-1, -1, -1, d)
    return tuple(torch.cat([t[:, :, :-w].gather(2, at), t[:, :, -w:]], 2) for t in (k, v))


def merged_evictions(k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Half of a cache is dropped by what was seen of it; each dropped key is merged into the kept one it is the most like."""
    _b, _h, s, d = k.shape
    order = torch.argsort(seen, dim=-1, descending=True, stable=True)
    kept, gone = (t[..., None].expand(-1, -1, -1, d) for t in (order[..., : s // 2], order[..., s // 2 :]))
    kk, kg, vk, vg = k.gather(2, kept), k.gather(2, gone), v.gather(2, kept), v.gather(2, gone)
    like = F.normalize(kg.float(), dim=-1) @ F.normalize(kk.float(), dim=-1).mT
    best, to = like.max(-1)
    share = torch.where(best > 0.2, torch.exp(best), 0)[..., None]
    count = torch.full_like(kk[..., :1], math.e, dtype=torch.float32).scatter_add(2, to[..., None], share)
    to = to[..., None].expand_as(kg)
    return tuple(
        ((math.e * a.float()).scatter_add(2, to, c.float() * share) / count).to(k.dtype) for a, c in ((kk, kg), (vk, vg))
    )


def smoothed_bytes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SageAttention: keys less their mean, queries and keys to int8 by blocks of 64, an integer matmul, float8 values."""
    _b, _h, _s, d = q.shape
    k = k - k.mean(2, keepdim=True)

    def coded(t: Tensor) -> tuple[Tensor, Tensor]:
        t = t.float().unflatten(2, (-1, 64))
        scale = t.abs().amax((-1, -2), keepdim=True) / 127 + 1e-7
        return (t / scale).round().to(torch.int8).flatten(2, 3), scale.expand(-1, -1, -1, 64, 1).flatten(2, 3)

    (a, sa), (c, sc) = coded(q * d**-0.5), coded(k)
    scores = (a.to(q.dtype) @ c.to(q.dtype).mT).float() * sa * sc.mT
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    most = v.float().abs().amax(2, keepdim=True) / 448 + 1e-7
    v8 = (v.float() / most).to(torch.float8_e4m3fn).to(q.dtype)
    return (p.to(q.dtype) @ v8).float() * most / p.sum(-1, keepdim=True)


# ---- experts and adapters -------------------------------------------------------------------------------------------------


def dropped_overflow(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Two experts a token with places by running counts of one-hot rows; beyond the capacity a token is dropped."""
    t, d = x.shape
    e = router.shape[0]
    room = t * 2 // e
    p = F.linear(x, router).float().softmax(-1)
    best, to = p.topk(2, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    hot = F.one_hot(to.t().flatten(), e)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    slot = torch.where(place < room, to.t().flatten() * room + place, e * room)
    buffer = x.new_zeros(e * room + 1, d).index_copy(0, slot, x.repeat(2, 1))
    y = torch.bmm(F.silu(torch.bmm(buffer[:-1].view(e, room, d), up)), down).flatten(0, 1)
    y = F.pad(y, (0, 0, 0, 1))[slot].view(2, t, d) * best.t()[..., None].to(x.dtype)
    share = hot[:t].float().mean(0) @ p.mean(0) * e
    return y.sum(0) + share.to(x.dtype) * 0.01


def ranked_adapters(x: Tensor, w: Tensor, a: Tensor, lam: Tensor, c: Tensor, score: Tensor) -> Tensor:
    """AdaLoRA: a layer with P, lambda and Q, ranks below the budget's threshold off, a penalty of what is not orthogonal."""
    importance = (lam * score).abs()
    least = importance.flatten().float().kthvalue(importance.numel() // 2).values
    on = lam * (importance > least)
    y = F.linear(x, w) + F.linear(F.linear(x, a) * on, c) / a.shape[0]
    eye = torch.eye(a.shape[0], device=x.device, dtype=x.dtype)
    penalty = (a @ a.t() - eye).square().sum().sqrt() + (c.t() @ c - eye).square().sum().sqrt()
    return y + penalty * 1e-3


# ---- few bits -------------------------------------------------------------------------------------------------------------


def nested_scales(x: Tensor, codes: Tensor, inner: Tensor, outer: Tensor, table: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """QLoRA: codes of 4 bits by a table, scales of 64 that are bytes with scales of 256, and an adapter that is trained."""
    size = codes.numel() * 2
    scale = (inner.float().view(-1, 32) - 128) * 0.002 * outer.detach().float().abs()[:, None] + 0.05
    both = torch.stack([codes >> 4, codes & 15], -1).flatten().int()
    w = table.detach()[both].view(-1, 64) * scale.view(-1, 1)[: size // 64]
    w = w.view(-1, x.shape[-1]).to(x.dtype)
    return F.linear(x, w) + F.linear(F.linear(x, a), c) * 2


def super_blocks(x: Tensor, d: Tensor, least: Tensor, packed: Tensor, codes: Tensor) -> Tensor:
    """Q4_K: blocks of 256 in four bits; eight scales and minima of six bits each in twelve bytes; then a linear layer."""
    low, mid, high = packed.int().split(4, -1)
    scale = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], -1)
    minimum = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], -1)
    scale, minimum = d[:, None] * scale.to(d.dtype), least[:, None] * minimum.to(d.dtype)
    q = codes.view(-1, 4, 1, 32) >> torch.tensor([0, 4], device=x.device, dtype=torch.uint8).view(1, 1, 2, 1)
    q = (q & 15).reshape(-1, 8, 32).to(d.dtype)
    w = (scale[..., None] * q - minimum[..., None]).view(-1, x.shape[-1])
    return F.linear(x, w.to(x.dtype))


def three_byte_floats(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """FP6: four weights of e3m2 in three bytes, their bits put where bfloat16 has them, scales of rows, a linear layer."""
    a, b, c = codes.int().unbind(-1)
    six = torch.stack([a >> 2, ((a & 3) << 4) | (b >> 4), ((b & 15) << 2) | (c >> 6), c & 63], -1).flatten(1)
    bits = ((six & 32) << 10) | ((six & 31) << 5)
    w = bits.to(torch.int16).view(torch.bfloat16).to(x.dtype) * 2.0**124
    return F.linear(x, w * scale[:, None])


def lattice_codes(x: Tensor, codes: Tensor, book: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """QuIP#: eight weights a code: an entry of a book, seven signs by bits, the eighth by parity, a quarter added or taken."""
    entry = book.abs()[codes & 255]
    bits = (codes >> 8)[..., None] >> torch.arange(7, device=x.device) & 1
    last = bits.sum(-1, keepdim=True) & 1
    sign = 1 - 2 * torch.cat([bits, last], -1).to(x.dtype)
    shift = torch.where((codes >> 15 & 1) == 1, 0.25, -0.25)[..., None]
    w = (entry * sign + shift).flatten(1)
    y = x * signs.sign()
    n = x.shape[-1]
    step = 1
    while step < n:
        y = y.view(-1, n // (2 * step), 2, step)
        y = torch.stack([y[:, :, 0] + y[:, :, 1], y[:, :, 0] - y[:, :, 1]], 2)
        step *= 2
    return F.linear(y.reshape(-1, n) * n**-0.5, w.to(x.dtype)) * scale


# ---- choices --------------------------------------------------------------------------------------------------------------


def repelled_tokens(logits: Tensor, hidden: Tensor, candidates: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Contrastive search: the five best tokens, less how like their states are to any before; chosen states gathered."""
    p, token = logits.float().softmax(-1).topk(5, dim=-1)
    like = F.normalize(candidates.float(), dim=-1) @ F.normalize(hidden.float(), dim=-1).mT
    there = torch.arange(hidden.shape[1], device=hidden.device) < length[:, None] + 1
    most = like.masked_fill(~there[:, None], -1).amax(-1)
    best = (0.4 * p - 0.6 * most).argmax(-1, keepdim=True)
    return token.gather(1, best), candidates.gather(1, best[..., None].expand(-1, -1, candidates.shape[-1]))


def looked_up_drafts(text: Tensor, guesses: Tensor) -> tuple[Tensor, Tensor]:
    """Prompt lookup: the latest earlier place of the last three tokens, the ten after it as drafts, how many are right."""
    n = text.shape[1]
    grams = text.unfold(1, 3, 1)[:, :-11]
    hit = (grams == text[:, None, -3:]).all(-1)
    at = torch.where(hit, torch.arange(hit.shape[1], device=text.device), -1).amax(1)
    found = at >= 0
    draft = text.gather(1, ((at + 3).clamp(min=0)[:, None] + torch.arange(10, device=text.device)).clamp(max=n - 1))
    right = ((draft == guesses) & found[:, None]).long().cumprod(1).sum(1)
    return torch.where(found[:, None], draft, -1), right + found


def _bytes(m: Make, *shape: int) -> Tensor:
    return ids(m, 256, *shape).to(torch.uint8)


def _text(m: Make, b: int, n: int) -> list[Tensor]:
    return [ids(m, 2, b, n), ids(m, 2, b, 10)]


def _heads(m: Make, b: int, h: int, s: int, d: int) -> list[Tensor]:
    return [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d)]


BLOCKS: tuple[Block, ...] = (
    Sized(gated_slots, lambda m, b, h, s, d, n: [*_heads(m, b, h, s, d), m(b, h, s, n)], (1, 2, 64, 4, 3)).block(
        "gated slots", 4, 8, 512, 64, 64, training=True
    ),
    Sized(
        retained_chunks,
        lambda m, b, s, d: [m(b, s, d), weight(m, 3 * d, d), weight(m, d, d), weight(m, d, d)],
        (1, 128, 64),
    ).block("retained chunks", 4, 2048, 1024, training=True),
    Sized(channel_decays, lambda m, b, h, s, d: [*_heads(m, b, h, s, d), m(b, h, s, d), m(h, d)], (1, 2, 32, 4), SINGLE).block(
        "channel decays", 4, 12, 512, 64, training=True
    ),
    Sized(
        both_triangles, lambda m, b, s, h, p, n: [m(b, s, h, p), m(b, s, n), m(b, s, n), m(b, s, h) - 3, m(h)], (2, 6, 2, 4, 3)
    ).block("both triangles", 4, 700, 12, 64, 64, training=True),
    Sized(
        damped_averages,
        lambda m, b, s, d: [m(b, s, d), m(d, 4), m(d, 4), m(d, 4), m(d, 4), weight(m, 2 * d, d)],
        (1, 128, 6),
    ).block("damped averages", 4, 2048, 512, training=True),
    Sized(
        two_masks,
        lambda m, b, n, k, q, d: [m(b, n, d), m(k, d), m(b, q, d), m(6, d, d) * d**-0.5, m(b), m(b, q)],
        (2, 7, 3, 4, 16),
    ).block("two masks", 4, 5000, 256, 700, 512, training=True),
    Sized(
        composed_heads,
        lambda m, b, s, d, h: [
            m(b, s, d),
            weight(m, 3 * d, d),
            m(2, d, 2, h) * d**-0.5,
            m(2, d, 2, h) * d**-0.5 * 0.3,
            m(2, h, d) * d**-0.5,
        ],
        (2, 5, 16, 4),
    ).block("composed heads", 2, 1024, 1024, 16, training=True),
    Sized(
        clamped_regions, lambda m, b, h, n, k, d: [*(m(b, h, n, k, d) for _ in range(3)), m(h, 13, 13)], (1, 2, 8, 9, 4)
    ).block("clamped regions", 4, 4, 40, 56, 32, training=True),
    Sized(
        gated_axes,
        lambda m, b, c, n: [m(b, c, n, n), m(2, 2 * c, c) * c**-0.5, m(2, c // 2, 2 * n - 1), m(2, 3)],
        (2, 8, 5),
        SINGLE,
    ).block("gated axes", 2, 64, 56, training=True),
    Sized(compressive_segments, lambda m, b, h, s, d: [*_heads(m, b, h, s, d), m(h)], (1, 2, 8, 4)).block(
        "compressive segments", 4, 8, 1024, 64, training=True
    ),
    Sized(kept_by_kth, lambda m, b, h, s, d: [*_heads(m, b, h, s, d), m(h)], (1, 2, 9, 4)).block(
        "kept by kth", 2, 8, 1024, 64, training=True
    ),
    Sized(
        bounded_entropy,
        lambda m, b, s, d: [m(b, s, d), m(3, d, d) * d**-0.5, m(4, d), m(4), weight(m, d, d)],
        (2, 4, 64),
        SINGLE,
        tf32=True,
    ).block("bounded entropy", 4, 577, 768, training=True),
    Sized(
        gated_buckets,
        lambda m, b, h, s, d: [*_heads(m, b, h, s, d), m(80, h), weight(m, 8, d), m(h)],
        (1, 2, 30, 8),
    ).block("gated buckets", 4, 12, 749, 64, training=True),
    Sized(
        one_length,
        lambda m, b, s, d: [m(b, s, d), m(3).abs() + 1, weight(m, 4 * d, d), weight(m, d, 4 * d), m(4 * d)],
        (2, 5, 8),
    ).block("one length", 8, 1023, 768, training=True),
    Sized(voted_entries, lambda m, b, h, s, d: [m(b, 4 * h, 32, d), m(b, h, s, d), m(b, h, s, d)], (1, 2, 80, 8)).block(
        "voted entries", 2, 8, 8192, 128
    ),
    Sized(merged_evictions, lambda m, b, h, s, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s)], (1, 2, 12, 4)).block(
        "merged evictions", 4, 8, 2048, 128
    ),
    Sized(smoothed_bytes, _heads, (1, 2, 128, 16)).block("smoothed bytes", 2, 16, 2048, 128),
    Sized(
        dropped_overflow,
        lambda m, t, d, e, h: [m(t, d), weight(m, e, d), m(e, d, h) * d**-0.5, m(e, h, d) * h**-0.5],
        (24, 8, 3, 5),
    ).block("dropped overflow", 8192, 512, 16, 1024, training=True),
    Sized(
        ranked_adapters,
        lambda m, t, d, o, r: [m(t, d), weight(m, o, d), weight(m, r, d), m(r), weight(m, o, r), m(r)],
        (5, 8, 9, 4),
    ).block("ranked adapters", 8000, 2048, 2560, 12, training=True),
    Sized(
        nested_scales,
        lambda m, t, d, o, r: [
            m(t, d),
            _bytes(m, o * d // 2),
            _bytes(m, o * d // 64),
            m(o * d // 2048),
            m(16).float(),
            weight(m, r, d),
            weight(m, o, r),
        ],
        (3, 64, 64, 4),
    ).block("nested scales", 512, 2048, 4096, 16, training=True),
    Sized(
        super_blocks,
        lambda m, t, d, o: [
            m(t, d),
            m(o * d // 256).abs() * 0.01,
            m(o * d // 256).abs() * 0.01,
            _bytes(m, o * d // 256, 12),
            _bytes(m, o * d // 256, 128),
        ],
        (3, 256, 4),
    ).block("super blocks", 4, 4096, 4096),
    Sized(three_byte_floats, lambda m, t, d, o: [m(t, d), _bytes(m, o, d // 4, 3), m(o).abs() * 0.02], (3, 16, 5)).block(
        "three byte floats", 8, 4096, 6144
    ),
    Sized(lattice_codes, lambda m, t, d, o: [m(t, d), ids(m, 65536, o, d // 8), m(256, 8), m(d), m(o)], (3, 16, 5)).block(
        "lattice codes", 16, 4096, 2048
    ),
    Sized(
        repelled_tokens,
        lambda m, b, v, s, d: [m(b, v), m(b, s, d), m(b, 5, d), ids(m, s - 1, b)],
        (3, 40, 6, 8),
    ).block("repelled tokens", 16, 50257, 1024, 768),
    Sized(looked_up_drafts, _text, (3, 60)).block("looked up drafts", 64, 32768),
)
