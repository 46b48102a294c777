"""Blocks of language models: attention in other spellings, states, experts, decoding, codes of few bits."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def latent_prefill(x: Tensor, down: Tensor, norm: Tensor, up: Tensor, wq: Tensor, angles: Tensor) -> Tensor:
    """MLA: keys and values from a compressed vector, one rotary key for all heads; values narrower than keys."""
    b, n, _ = x.shape
    heads, nope, rope, vd = 16, 64, 32, 64
    cos, sin = angles
    q = F.linear(x, wq).view(b, n, heads, nope + rope).transpose(1, 2)
    q_nope, q_pe = q.split([nope, rope], dim=-1)
    c, k_pe = F.linear(x, down).split([down.shape[0] - rope, rope], dim=-1)
    c = F.rms_norm(c, (c.shape[-1],), norm)
    k_nope, v = F.linear(c, up).view(b, n, heads, nope + vd).transpose(1, 2).split([nope, vd], dim=-1)

    def rotate(t: Tensor) -> Tensor:
        t = t.view(*t.shape[:-1], rope // 2, 2).transpose(-1, -2).reshape(*t.shape)
        a, d = t.chunk(2, -1)
        return t * cos + torch.cat((-d, a), -1) * sin

    q = torch.cat([q_nope, rotate(q_pe)], -1)
    k = torch.cat([k_nope, rotate(k_pe[:, None]).expand(-1, heads, -1, -1)], -1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, heads * vd)


def bucketed_bias(x: Tensor, qkv: Tensor, table: Tensor) -> Tensor:
    """T5's attention without a scale: relative positions in logarithmic buckets, an embedding of them as a bias."""
    b, n, _ = x.shape
    heads = table.shape[1]
    q, k, v = F.linear(x, qkv).view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
    relative = torch.arange(n, device=x.device)[None, :] - torch.arange(n, device=x.device)[:, None]
    bucket = (relative > 0).to(torch.long) * 16
    relative = relative.abs()
    large = 8 + (torch.log(relative.float() / 8) / math.log(16) * 8).to(torch.long)
    bucket += torch.where(relative < 8, relative, torch.min(large, torch.full_like(large, 15)))
    bias = F.embedding(bucket, table).permute(2, 0, 1).unsqueeze(0)
    p = F.softmax((torch.matmul(q, k.transpose(3, 2)) + bias).float(), dim=-1).type_as(x)
    return torch.matmul(p, v).transpose(1, 2).contiguous().view(b, n, -1)


def disentangled(q: Tensor, k: Tensor, v: Tensor, pos_q: Tensor, pos_k: Tensor) -> Tensor:
    """DeBERTa: content to position and position to content, by gathers along the last axis."""
    n, d, span = q.shape[2], q.shape[3], pos_k.shape[1] // 2
    at = torch.arange(n, device=q.device)
    relative = (at[:, None] - at[None]).clamp(-span, span - 1) + span
    scale = 1 / math.sqrt(3 * d)
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    c2p = torch.matmul(q, pos_k.transpose(-1, -2))
    c2p = torch.gather(c2p, -1, relative.expand(q.shape[0], q.shape[1], n, n))
    p2c = torch.matmul(k, pos_q.transpose(-1, -2))
    p2c = torch.gather(p2c, -1, (2 * span - 1 - relative).clamp(0).expand(q.shape[0], q.shape[1], n, n)).transpose(-1, -2)
    return torch.matmul((scores + (c2p + p2c) * scale).softmax(-1), v)


def skewed(q: Tensor, k: Tensor, v: Tensor, e: Tensor) -> Tensor:
    """Music transformer: relative scores moved into place by a pad and a reshape, causal."""
    n = q.shape[2]
    rel = F.pad(torch.einsum("bhnd,hmd->bhnm", q, e), (1, 0))
    rel = rel.reshape(rel.shape[0], rel.shape[1], n + 1, n)[:, :, 1:]
    scores = (q @ k.mT + rel) / math.sqrt(q.shape[-1])
    mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    return torch.softmax(scores.masked_fill(~mask, float("-inf")), -1) @ v


def sliding_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Local attention to 48 keys before and after, keys and values by unfold of a padded sequence."""
    w, d = 48, q.shape[-1]
    ks, vs = (F.pad(t, (0, 0, w, w)).unfold(2, 2 * w + 1, 1) for t in (k, v))
    scores = torch.einsum("bhnd,bhndw->bhnw", q, ks) * d**-0.5
    n = q.shape[2]
    at = torch.arange(n, device=q.device)[:, None] + torch.arange(-w, w + 1, device=q.device)[None]
    scores = scores.masked_fill((at < 0) | (at >= n), torch.finfo(scores.dtype).min)
    return torch.einsum("bhnw,bhndw->bhnd", scores.softmax(-1), vs)


def landmarks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Nyström attention: means of segments, a pseudo-inverse by six Newton steps."""
    b, h, n, d = q.shape
    m = 32
    q, k = q * d**-0.25, k * d**-0.25
    ql, kl = (t.reshape(b, h, m, n // m, d).mean(dim=-2) for t in (q, k))
    first, middle, last = (F.softmax(a @ c.transpose(-1, -2), dim=-1) for a, c in ((q, kl), (ql, kl), (ql, k)))
    eye = torch.eye(m, device=q.device, dtype=q.dtype)
    z = middle.mT / (middle.sum(-1).max() * middle.sum(-2).max())
    for _ in range(6):
        kz = middle @ z
        z = 0.25 * z @ (13 * eye - kz @ (15 * eye - kz @ (7 * eye - kz)))
    return (first @ z) @ (last @ v)


def projected_keys(x: Tensor, qkv: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Linformer: keys and values shortened along the sequence."""
    b, n, d = x.shape
    q, k, v = F.linear(x, qkv).chunk(3, -1)
    k, v = torch.einsum("bnd,nk->bkd", k, e), torch.einsum("bnd,nk->bkd", v, f)
    q, k, v = (t.reshape(b, -1, 8, d // 8).transpose(1, 2) for t in (q, k, v))
    a = (torch.einsum("bhnd,bhkd->bhnk", q, k) * (d // 8) ** -0.5).softmax(dim=-1)
    return torch.einsum("bhnk,bhkd->bhnd", a, v).transpose(1, 2).reshape(b, n, d)


def gated_unit(x: Tensor, norm: Tensor, w: Tensor, wqk: Tensor, affine: Tensor, out: Tensor) -> Tensor:
    """GAU: attention by squared ReLU, one narrow head, gated values."""
    n = x.shape[1]
    gamma, beta = affine
    y = F.layer_norm(x, (x.shape[-1],), norm)
    u, v = F.silu(y @ w).chunk(2, dim=-1)
    z = F.silu(y @ wqk)
    q, k = (torch.einsum("...d,hd->...hd", z, gamma) + beta).unbind(dim=-2)
    a = F.relu(torch.einsum("bid,bjd->bij", q, k) / n) ** 2
    a = a.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), 0.0)
    return (u * torch.einsum("bij,bjd->bid", a, v)) @ out + x


def normalised_layer(x: Tensor, qkv: Tensor, wo: Tensor, scale: Tensor, alpha: Tensor) -> Tensor:
    """nGPT: everything on the unit sphere, weights too, and a step between two points of it."""
    b, n, d = x.shape

    def unit(t: Tensor) -> Tensor:
        return t / t.norm(p=2, dim=-1, keepdim=True).clamp(min=1e-6)

    q, k, v = (t.view(b, n, 12, -1).transpose(1, 2) for t in F.linear(x, unit(qkv)).chunk(3, dim=-1))
    q, k = unit(q) * scale, unit(k) * scale
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=(d // 12) ** 0.5)
    y = unit(F.linear(y.transpose(1, 2).reshape(b, n, d), unit(wo)))
    x = unit(x)
    return unit(x + alpha.abs() * (y - x))


def fourier_mixing(x: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """FNet: the real part of a transform along both axes, then an MLP."""
    y = torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real / math.sqrt(x.shape[1] * x.shape[2])
    y = F.layer_norm(x + y, (x.shape[-1],), norm[0], norm[1])
    return y + F.linear(F.gelu(F.linear(y, up)), down)


def parallel_block(x: Tensor, norm: Tensor, w: Tensor, qk: Tensor, out: Tensor) -> Tensor:
    """ViT-22B: attention and MLP from one wide linear layer, q and k normalised, one linear layer for both results."""
    d = x.shape[-1]
    y = F.layer_norm(x, (d,), norm)
    q, k, v, h = F.linear(y, w).split([d, d, d, w.shape[0] - 3 * d], dim=2)
    q, k, v = (t.unflatten(2, (-1, 64)).transpose(1, 2) for t in (q, k, v))
    q, k = F.layer_norm(q, (64,), qk[0]), F.layer_norm(k, (64,), qk[1])
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return x + F.linear(torch.cat((y, F.gelu(h, approximate="tanh")), -1), out)


def grouped_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries in groups by einsum, capped scores, a causal window of 100 keys."""
    b, n, h, d = q.shape
    kv = k.shape[2]
    q = q.reshape(b, n, kv, h // kv, d)
    scores = torch.einsum("bqkgd,bskd->bkgqs", q, k).float() * d**-0.5
    scores = 30.0 * torch.tanh(scores / 30.0)
    i = torch.arange(n, device=q.device)
    keep = (i[:, None] >= i) & (i[:, None] - i < 100)
    p = torch.where(keep, scores, -2.3819763e38).softmax(-1).to(v.dtype)
    return torch.einsum("bkgqs,bskd->bqkgd", p, v).reshape(b, n, h * d)


def paged_decode(q: Tensor, cache: Tensor, tables: Tensor, lengths: Tensor) -> Tensor:
    """One query each over a cache in pages of 16, found by a table; cache of (2, pages, 16, heads, d)."""
    k, v = (t[tables].flatten(1, 2) for t in cache)
    scores = torch.einsum("bhd,bshd->bhs", q, k) * q.shape[-1] ** -0.5
    inside = torch.arange(k.shape[1], device=q.device)[None] < lengths[:, None]
    p = scores.float().masked_fill(~inside[:, None], float("-inf")).softmax(-1).to(q.dtype)
    return torch.einsum("bhs,bshd->bhd", p, v)


def state_space_dual(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba 2 in chunks of 64: within a chunk by a masked matmul, between them by states; x of (batch, length, heads, d)."""
    size = 64 if x.shape[1] >= 64 else 4

    def segments(t: Tensor) -> Tensor:
        n = t.size(-1)
        t = t[..., None].repeat(*[1] * t.dim(), n)
        t = t.masked_fill(~torch.tril(torch.ones(n, n, device=t.device, dtype=bool), diagonal=-1), 0)
        t = torch.cumsum(t, dim=-2)
        return t.masked_fill(~torch.tril(torch.ones(n, n, device=t.device, dtype=bool)), -torch.inf)

    a = -F.softplus(a)
    x, a, b, c = (t.unflatten(1, (-1, size)) for t in (x, a, b, c))
    a = a.permute(0, 3, 1, 2)
    sums = torch.cumsum(a, dim=-1)
    within = torch.einsum("bclhn,bcshn,bhcls,bcshp->bclhp", c, b, torch.exp(segments(a)), x)
    decay = torch.exp(sums[..., -1:] - sums)
    states = torch.einsum("bclhn,bhcl,bclhp->bchpn", b, decay, x)
    states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
    chunks = torch.exp(segments(F.pad(sums[..., -1], (1, 0))))
    states = torch.einsum("bhzc,bchpn->bzhpn", chunks, states)[:, :-1]
    between = torch.einsum("bclhn,bchpn,bhcl->bclhp", c, states, torch.exp(sums))
    return (within + between).flatten(1, 2)


def short_scan(x: Tensor, conv: Tensor, proj: Tensor, dt_w: Tensor, a_log: Tensor, skip: Tensor) -> Tensor:
    """Mamba's mixer over a short sequence, its scan as a loop; x of (batch, length, 2 channels)."""
    u, z = x.chunk(2, -1)
    d, n, rank = u.shape[-1], a_log.shape[1], dt_w.shape[1]
    u = F.conv1d(u.transpose(1, 2), conv, padding=3, groups=d)[..., : x.shape[1]].transpose(1, 2)
    u = F.silu(u)
    dt, b, c = F.linear(u, proj).split([rank, n, n], -1)
    dt = F.softplus(F.linear(dt, dt_w))
    da = torch.exp(dt.unsqueeze(-1) * -torch.exp(a_log))
    db = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
    h, out = torch.zeros_like(da[:, 0]), []
    for t in range(x.shape[1]):
        h = da[:, t] * h + db[:, t]
        out.append((h * c[:, t].unsqueeze(1)).sum(-1))
    return (torch.stack(out, 1) + u * skip) * F.silu(z)


def matrix_memory(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """xLSTM's matrix memory in parallel: gates as a matrix of logarithms, stabilised by its row maxima."""
    n, d = q.shape[2], q.shape[3]
    log_f = F.logsigmoid(f + 3)
    sums = torch.cumsum(log_f, -1)
    matrix = sums[..., :, None] - sums[..., None, :] + i[..., None, :]
    mask = torch.ones((n, n), dtype=torch.bool, device=q.device).tril()
    matrix = torch.where(mask, matrix, -float("inf"))
    top = torch.max(matrix, dim=-1, keepdim=True).values
    c = (q @ k.transpose(-2, -1) / math.sqrt(d)) * torch.exp(matrix - top)
    return (c / (torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-top)) + 1e-6)) @ v


def logarithmic_scan(x: Tensor, w: Tensor) -> Tensor:
    """minLSTM without a loop: both gates in logarithms, their scan by logcumsumexp."""
    f, i, h = F.linear(x, w).float().chunk(3, -1)
    diff = F.softplus(-f) - F.softplus(-i)
    log_f, log_i = -F.softplus(diff), -F.softplus(-diff)
    log_h = torch.where(h >= 0, (F.relu(h) + 0.5).log(), -F.softplus(-h))
    star = torch.cumsum(log_f, dim=1)
    return torch.exp(star + torch.logcumsumexp(log_i + log_h - star, dim=1)).to(x.dtype)


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """DeltaNet step by step over few tokens: a state of (d, d) a head, corrected by what it would have recalled."""
    q, k, beta = F.silu(q), F.normalize(F.silu(k), p=2, dim=-1), beta.sigmoid()
    s = q.new_zeros(q.shape[0], q.shape[1], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[2]):
        kt = k[:, :, t]
        old = (s * kt[..., None]).sum(-2)
        s = s + kt[..., None] * ((v[:, :, t] - old) * beta[:, :, t, None])[..., None, :]
        out.append((s * q[:, :, t, :, None]).sum(-2))
    return torch.stack(out, dim=2)


def switch_experts(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Two of the experts a token, dispatched by einsum with one-hot codes of places."""
    n, experts = x.shape[0], gate.shape[0]
    room = 2 * n // experts
    p = F.linear(x.float(), gate.float()).softmax(-1)
    top, which = p.topk(2, dim=-1)
    top = top / top.sum(-1, keepdim=True)
    hot = F.one_hot(which, experts)
    place = torch.cumsum(hot.flatten(0, 1), 0).view_as(hot) * hot - 1
    kept = (place < room) & (place >= 0)
    where = F.one_hot(place.clamp(0, room - 1), room).to(x.dtype) * kept.unsqueeze(-1)
    combine = (where * top[..., None, None].to(x.dtype)).sum(1)
    dispatch = (combine > 0).to(x.dtype)
    y = torch.einsum("tec,td->ecd", dispatch, x)
    y = torch.einsum("ech,ehd->ecd", F.silu(torch.einsum("ecd,edh->ech", y, w1)), w2)
    return torch.einsum("tec,ecd->td", combine, y)


def soft_experts(x: Tensor, slots: Tensor, scale: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Soft MoE: slots are mixtures of tokens, tokens mixtures of slots."""
    logits = torch.einsum("bnd,esd->bnes", F.normalize(x, dim=-1), F.normalize(slots, dim=-1) * scale)
    dispatch = logits.softmax(dim=1)
    combine = logits.flatten(2).softmax(dim=-1).view_as(logits)
    y = torch.einsum("bnes,bnd->ebsd", dispatch, x)
    y = torch.einsum("ebsh,ehd->ebsd", F.gelu(torch.einsum("ebsd,edh->ebsh", y, w1)), w2)
    return torch.einsum("bnes,ebsd->bnd", combine, y)


def picked_experts(x: Tensor, gate: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Few tokens of a decoder: the weights of each token's experts are gathered."""
    scores = (x @ gate.t()).sigmoid()
    top, which = torch.topk(scores, 2, dim=-1)
    a, b = torch.einsum("td,tkhd->tkh", x, w13.index_select(0, which.flatten()).view(*which.shape, *w13.shape[1:])).chunk(2, -1)
    y = torch.einsum("tkh,tkdh->tkd", F.silu(a) * b, w2[which])
    return torch.einsum("tkd,tk->td", y, top / top.sum(-1, keepdim=True))


def key_halves(q: Tensor, k1: Tensor, k2: Tensor, values: Tensor) -> Tensor:
    """A memory layer: the best of two sets of half keys, the best of their pairs, a weighted bag of values."""
    a, b = q.chunk(2, -1)
    s1, i1 = (a @ k1.t()).topk(16, dim=-1)
    s2, i2 = (b @ k2.t()).topk(16, dim=-1)
    pairs = (s1[:, :, None] + s2[:, None, :]).flatten(1)
    best, at = pairs.topk(16, dim=-1)
    rows = i1.gather(1, at // 16) * k2.shape[0] + i2.gather(1, at % 16)
    return F.embedding_bag(rows, values, per_sample_weights=best.softmax(-1), mode="sum")


def blocked_ngrams(logits: Tensor, tokens: Tensor) -> Tensor:
    """Tokens that would repeat a trigram become -inf."""
    windows = tokens.unfold(1, 3, 1)
    hit = (windows[:, :, :2] == tokens[:, None, -2:]).all(-1)
    counts = torch.zeros_like(logits, dtype=torch.int32).scatter_add_(1, windows[:, :, 2], hit.int())
    return logits.masked_fill(counts > 0, float("-inf")).log_softmax(-1)


def typical(logits: Tensor, floor: Tensor) -> Tensor:
    """Typical and min-p sampling: tokens by how far their surprise is from the entropy, scattered back."""
    logp = torch.log_softmax(logits, -1)
    p = logp.exp()
    entropy = -(logp * p).nansum(-1, keepdim=True)
    shifted, order = torch.sort((-logp - entropy).abs(), descending=False)
    mass = p.gather(-1, order).cumsum(dim=-1)
    last = (mass < 0.9).sum(dim=1).clamp(max=mass.shape[1] - 1)
    remove = shifted > shifted.gather(1, last.view(-1, 1))
    remove = torch.zeros_like(remove).scatter(1, order, remove)
    remove |= p < floor.sigmoid()[:, None] * 0.1 * p.max(dim=-1, keepdim=True)[0]
    return logits.masked_fill(remove, -float("inf")).softmax(-1)


def ternary(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    """BitNet's linear layer: activations in 8 bits by row, weights in three levels, both with straight-through estimates."""
    x = F.rms_norm(x, (x.shape[-1],), norm)
    scale = 127.0 / x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-5)
    xq = x + ((x * scale).round().clamp_(-128, 127) / scale - x).detach()
    mean = 1.0 / w.abs().mean().clamp_(min=1e-5)
    wq = w + ((w * mean).round().clamp_(-1, 1) / mean - w).detach()
    return F.linear(xq, wq)


def shared_exponents(x: Tensor) -> tuple[Tensor, Tensor]:
    """MXFP4: blocks of 32 with an exponent each, values by bucketize, two codes a byte."""
    blocks = x.unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2**-126))) - 2
    scaled = blocks.float() / torch.exp2(exponent.float())
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=x.device, dtype=scaled.dtype)
    code = torch.bucketize(scaled.abs(), edges).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    code = code.flatten(-2)
    return code[..., ::2] | (code[..., 1::2] << 4), (exponent.squeeze(-1) + 127).to(torch.uint8)


def three_bits(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """Weights of three bits, ten in a 32-bit number, spread by shifts along a new axis."""
    shifts = torch.arange(0, 30, 3, device=codes.device, dtype=torch.int32)
    w = (codes[:, :, None] >> shifts) & 7
    w = (w.flatten(1).to(x.dtype) - 4) * scale
    return x @ w[:, : x.shape[1]].t()


def outliers(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """LLM.int8: columns with large values stay wide, the rest goes by 8 bits a row."""
    large = (x.abs().amax(0) > 3.5)[None]
    rest = torch.where(large, torch.zeros_like(x), x)
    row = rest.abs().amax(-1, keepdim=True).clamp(min=1e-3) / 127
    xq = torch.round(rest / row).to(torch.int8)
    y = (xq.to(x.dtype) @ w.to(x.dtype).t()) * row * scale
    return y + torch.where(large, x, 0) @ (w.to(x.dtype) * scale[:, None]).t()


def interleaved_steps(states: Tensor, actions: Tensor, returns: Tensor, ws: Tensor, wa: Tensor, wr: Tensor) -> Tensor:
    """A decision transformer's input: three tokens a step, stacked, permuted, reshaped, normalised."""
    b, n = states.shape[:2]
    tokens = torch.stack((F.linear(returns, wr), F.linear(states, ws), F.linear(actions, wa)), dim=1)
    y = tokens.permute(0, 2, 1, 3).reshape(b, 3 * n, -1)
    y = F.layer_norm(y, (y.shape[-1],))
    r, s, a = y.reshape(b, n, 3, -1).permute(0, 2, 1, 3).unbind(1)
    return F.gelu(s) + a * r


def axial_rotary(q: Tensor, k: Tensor, v: Tensor, frequencies: Tensor) -> Tensor:
    """Rotary positions of a grid, half of each head for rows and half for columns."""
    side = math.isqrt(q.shape[2])
    at = torch.arange(side, device=q.device, dtype=q.dtype)
    y, x = torch.meshgrid(at, at, indexing="ij")
    angles = torch.cat([y.flatten()[:, None] * frequencies, x.flatten()[:, None] * frequencies], -1)
    cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)

    def turn(t: Tensor) -> Tensor:
        half = torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)
        return t * cos + half * sin

    return F.softmax(turn(q) @ turn(k).transpose(-2, -1) * q.shape[-1] ** -0.5, -1) @ v


def _heads(m: Make, b: int, h: int, n: int, d: int, count: int = 3) -> list[Tensor]:
    return [m(b, h, n, d) for _ in range(count)]


def _latent(m: Make, b: int, n: int, d: int, c: int) -> list[Tensor]:
    angles = m(n, 16).repeat(1, 2)
    return [
        m(b, n, d),
        weight(m, c + 32, d),
        m(c),
        weight(m, 2048, c),
        weight(m, 1536, d),
        torch.stack((angles.cos(), angles.sin())),
    ]


def _dual(m: Make, b: int, n: int, h: int, p: int, s: int) -> list[Tensor]:
    return [m(b, n, h, p), m(b, n, h), m(b, n, h, s) * s**-0.5, m(b, n, h, s)]


def _mixer(m: Make, b: int, n: int, d: int) -> list[Tensor]:
    return [m(b, n, 2 * d), m(d, 1, 4) * 0.5, weight(m, 8 + 32, d), weight(m, d, 8), m(d, 16) * 0.3, m(d)]


def _gau(m: Make, b: int, n: int, d: int) -> list[Tensor]:
    return [
        m(b, n, d),
        m(d),
        m(d, 4 * d) * d**-0.5,
        m(d, 128) * d**-0.5,
        torch.stack((m(2, 128), m(2, 128) * 0.1)),
        m(2 * d, d) * d**-0.5,
    ]


def _experts(m: Make, n: int, d: int, e: int, h: int) -> list[Tensor]:
    return [m(n, d), weight(m, e, d), m(e, d, h) * d**-0.5, m(e, h, d) * h**-0.5]


def _paged(m: Make, b: int, h: int, d: int, pages: int) -> list[Tensor]:
    return [m(b, h, d), m(2, b * pages, 16, h, d), ids(m, b * pages, b, pages), ids(m, 16 * pages, b) + 1]


def _codes(m: Make, n: int, k: int, o: int) -> list[Tensor]:
    return [m(n, k), ids(m, 1 << 30, o, -(-k // 10)).to(torch.int32), m(o, 1).abs() * 0.02]


DUAL = Sized(state_space_dual, _dual, (2, 12, 2, 4, 5), SINGLE, tf32=True)
SCAN = Sized(short_scan, _mixer, (2, 5, 6))
MEMORY = Sized(matrix_memory, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(b, h, n), m(b, h, n)], (2, 2, 7, 8))
SOFT = Sized(
    soft_experts,
    lambda m, b, n, d, e, s: [m(b, n, d), m(e, s, d), m(1), m(e, d, 2 * d) * d**-0.5, m(e, 2 * d, d) * d**-0.5],
    (2, 7, 8, 3, 2),
)
LOCAL = Sized(sliding_chunks, _heads, (1, 2, 60, 8))

BLOCKS: tuple[Block, ...] = (
    Sized(latent_prefill, _latent, (2, 7, 24, 16)).block("latent prefill", 2, 1025, 1536, 384, training=True),
    Sized(bucketed_bias, lambda m, b, n, d: [m(b, n, d), weight(m, 3 * d, d), m(32, 8)], (2, 40, 32), HALF).block(
        "bucketed bias", 8, 509, 512, training=True
    ),
    Sized(disentangled, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(h, 64, d), m(h, 64, d)], (2, 2, 40, 8)).block(
        "disentangled attention", 4, 12, 384, 64, training=True
    ),
    Sized(skewed, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(h, n, d)], (2, 2, 9, 8), SINGLE, tf32=True).block(
        "skewed attention", 4, 8, 500, 64, training=True
    ),
    *LOCAL.both("sliding chunks", 1, 8, 2000, 40),
    Sized(landmarks, _heads, (1, 2, 64, 8), SINGLE, tf32=True).block("landmark attention", 4, 8, 2048, 48, training=True),
    Sized(
        projected_keys,
        lambda m, b, n, d, k: [m(b, n, d), weight(m, 3 * d, d), m(n, k) * n**-0.5, m(n, k) * n**-0.5],
        (2, 9, 16, 5),
    ).block("projected keys", 8, 1500, 512, 120, training=True),
    Sized(gated_unit, _gau, (2, 9, 16)).block("gated attention unit", 8, 513, 384, training=True),
    Sized(
        normalised_layer,
        lambda m, b, n, d: [m(b, n, d), weight(m, 3 * d, d), weight(m, d, d), m(d // 12), m(d)],
        (2, 7, 48),
    ).block("normalised layer", 8, 500, 768, training=True),
    Sized(
        fourier_mixing,
        lambda m, b, n, d: [m(b, n, d), m(2, d), weight(m, 3 * d, d), weight(m, d, 3 * d)],
        (2, 7, 8),
        SINGLE,
        tf32=True,
    ).block("fourier mixing", 8, 500, 384, training=True),
    Sized(
        parallel_block,
        lambda m, b, n, d: [m(b, n, d), m(d), weight(m, 7 * d, d), m(2, 64), weight(m, d, 5 * d)],
        (2, 7, 128),
    ).block("parallel block", 16, 257, 768, training=True),
    Sized(grouped_window, lambda m, b, n, h, k, d: [m(b, n, h, d), m(b, n, k, d), m(b, n, k, d)], (2, 130, 4, 2, 8)).block(
        "grouped window", 2, 1000, 16, 4, 80
    ),
    Sized(paged_decode, _paged, (3, 2, 8, 4), HALF).block("paged decode", 48, 8, 128, 60),
    *DUAL.both("state space dual", 4, 1024, 12, 64, 32),
    *SCAN.both("short scan", 64, 24, 384),
    *MEMORY.both("matrix memory", 4, 4, 640, 96),
    Sized(logarithmic_scan, lambda m, b, n, d: [m(b, n, d), weight(m, 3 * d, d)], (2, 9, 8)).block(
        "logarithmic scan", 8, 1000, 384, training=True
    ),
    Sized(delta_rule, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(b, h, n)], (2, 2, 5, 6), SINGLE).block(
        "delta rule", 16, 8, 32, 32, training=True
    ),
    Sized(switch_experts, _experts, (12, 8, 3, 6)).block("switch experts", 2000, 512, 8, 1024, training=True),
    *SOFT.both("soft experts", 16, 197, 384, 12, 4),
    Sized(
        picked_experts,
        lambda m, n, d, e, h: [m(n, d), weight(m, e, d), m(e, 2 * h, d) * d**-0.5, m(e, d, h) * h**-0.5],
        (3, 8, 4, 6),
    ).block("picked experts", 5, 1024, 16, 1400),
    Sized(key_halves, lambda m, n, d, k, v: [m(n, d), m(k, d // 2), m(k, d // 2), m(k * k, v)], (5, 8, 20, 6), SINGLE).block(
        "key halves", 4096, 256, 200, 128, training=True
    ),
    Sized(blocked_ngrams, lambda m, b, v, n: [m(b, v), ids(m, 50, b, n)], (3, 60, 20)).block("blocked ngrams", 40, 50257, 300),
    Sized(typical, lambda m, b, v: [m(b, v) * 2, m(b)], (3, 50), SINGLE).block("typical sampling", 30, 32003),
    Sized(ternary, lambda m, n, k, o: [m(n, k), weight(m, o, k), m(k)], (5, 16, 6), SINGLE, tf32=True).block(
        "ternary linear", 2050, 1024, 1536, training=True
    ),
    Sized(shared_exponents, lambda m, n, k: [m(n, k)], (5, 64)).block("shared exponents", 3000, 4096),
    Sized(three_bits, _codes, (3, 20, 7)).block("three bits", 8, 4090, 4000),
    Sized(outliers, lambda m, n, k, o: [m(n, k), ids(m, 127, o, k).to(torch.int8), m(o).abs() * 0.01], (5, 16, 6)).block(
        "outlier columns", 1000, 2048, 2560
    ),
    Sized(
        interleaved_steps,
        lambda m, b, n, s, a, d: [m(b, n, s), m(b, n, a), m(b, n, 1), weight(m, d, s), weight(m, d, a), m(d, 1)],
        (2, 5, 7, 3, 8),
        SINGLE,
        tf32=True,
    ).block("interleaved steps", 64, 100, 17, 6, 128, training=True),
    Sized(axial_rotary, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(d // 4)], (2, 2, 9, 8)).block(
        "axial rotary", 4, 12, 784, 64, training=True
    ),
)
