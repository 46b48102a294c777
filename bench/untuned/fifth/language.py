"""Blocks of language models: steps of generation, rotary spellings, sparse attention, adapters, packed weights, rewards."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def _norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Root mean square in float32, as in Hugging Face's models."""
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _half_turn(x: Tensor) -> Tensor:
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-b, a), dim=-1)


def _angles(position: Tensor, size: int, base: float = 10000.0) -> Tensor:
    inverse = 1.0 / base ** (torch.arange(0, size, 2, device=position.device, dtype=torch.float32) / size)
    angle = position[..., None].float() * inverse
    return torch.cat((angle, angle), dim=-1)


def static_step(
    x: Tensor, norm: Tensor, wq: Tensor, wkv: Tensor, wo: Tensor, keys: Tensor, values: Tensor, position: Tensor
) -> Tensor:
    """A token through a layer whose cache has a fixed length: index_copy_ at the position, a mask by it, repeated heads."""
    b, _, d = x.shape
    heads, kv, n, size = d // keys.shape[-1], *keys.shape[1:]
    at = position[:1] % n
    y = _norm(x, norm)
    q = F.linear(y, wq).view(b, 1, heads, size).transpose(1, 2)
    k, v = F.linear(y, wkv).view(b, 1, 2 * kv, size).transpose(1, 2).chunk(2, 1)
    angle = _angles(at[None], size)[:, None]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    q, k = q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    mask = torch.arange(n, device=x.device) <= at[:, None]
    repeats = [t[:, :, None].expand(b, kv, heads // kv, n, size).reshape(b, heads, n, size) for t in (keys, values)]
    y = F.scaled_dot_product_attention(q, *repeats, attn_mask=mask[None, None])
    return x + F.linear(y.transpose(1, 2).reshape(b, 1, d), wo)


def sliding_step(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Gemma 2: the caches of a window move by one, the new token comes last, scores are capped, softmax in float32."""
    b, heads, _, d = q.shape
    kv = keys.shape[1]
    keys.copy_(torch.cat((keys[:, :, 1:], k), 2))
    values.copy_(torch.cat((values[:, :, 1:], v), 2))
    grouped = q.view(b, kv, heads // kv, d)
    scores = torch.matmul(grouped, keys.transpose(2, 3)) * d**-0.5
    scores = 50 * torch.tanh(scores / 50)
    p = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(p, values).reshape(b, 1, heads * d)


def partial_rotary(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """GPT-NeoX: queries, keys and values interleaved by head, a quarter of each head turned."""
    b, n, d = x.shape
    heads, size = 8, d // 8
    rotary = size // 4
    q, k, v = F.linear(x, w, bias).view(b, n, heads, 3 * size).transpose(1, 2).chunk(3, dim=-1)
    angle = _angles(torch.arange(n, device=x.device), rotary)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

    def turn(t: Tensor) -> Tensor:
        rot, rest = t[..., :rotary], t[..., rotary:]
        return torch.cat((rot * cos + _half_turn(rot) * sin, rest), dim=-1)

    return F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True).transpose(1, 2).reshape(b, n, d)


def stretched_rotary(q: Tensor, k: Tensor) -> Tensor:
    """YaRN: frequencies mixed by a ramp between stretched and plain ones, a scale by the length; then the scores."""
    n, d = q.shape[-2:]
    at = torch.arange(0, d, 2, device=q.device, dtype=torch.float32)
    plain = 1.0 / 10000 ** (at / d)
    low, high = 4.0, d * 0.4
    ramp = ((torch.arange(d // 2, device=q.device, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    inverse = plain / 4 * ramp + plain * (1 - ramp)
    scale = 0.1 * math.log(4) + 1
    angle = torch.outer(torch.arange(n, device=q.device, dtype=torch.float32), inverse)
    cos, sin = ((t * scale).repeat_interleave(2, -1).to(q.dtype) for t in (angle.cos(), angle.sin()))

    def turn(t: Tensor) -> Tensor:
        pairs = torch.stack((-t[..., 1::2], t[..., ::2]), dim=-1).flatten(-2)
        return t * cos + pairs * sin

    return (turn(q) @ turn(k).transpose(-1, -2) * d**-0.5).softmax(-1) @ k


def sectioned_rotary(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Qwen2-VL: three positions of a token (time, row, column), each for a section of the frequencies."""
    d = q.shape[-1]
    angle = _angles(positions, d)
    sections = [d // 8, 3 * d // 16, 3 * d // 16] * 2
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(t.split(sections, dim=-1))], dim=-1).unsqueeze(1).to(q.dtype)
        for t in (angle.cos(), angle.sin())
    )
    q, k = q * cos + _half_turn(q) * sin, k * cos + _half_turn(k) * sin
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def native_sparse(q: Tensor, k: Tensor, v: Tensor, wk: Tensor, wv: Tensor, gates: Tensor) -> Tensor:
    """NSA: compressed blocks, the four best blocks of each query, a window; gated sums of the three."""
    b, h, n, d = q.shape
    size, best = 32, 4
    blocks = n // size
    at = torch.arange(n, device=q.device)
    small = [torch.einsum("bhmsd,s->bhmd", t.view(b, h, blocks, size, d), w.softmax(0)) for t, w in ((k, wk), (v, wv))]
    ended = (torch.arange(blocks, device=q.device)[None] + 1) * size <= at[:, None] + 1
    scores = (q @ small[0].mT * d**-0.5).masked_fill(~ended, -1e4)
    p = scores.softmax(-1)
    first = p @ small[1]
    own = torch.arange(blocks, device=q.device) == (at // size)[:, None]
    picked = (p.float() * ended).masked_fill(own, 2.0).topk(best, dim=-1).indices
    allowed = torch.zeros(b, h, n, blocks, device=q.device, dtype=torch.bool).scatter(-1, picked, True)
    causal = at[:, None] >= at
    chosen = allowed.repeat_interleave(size, -1) & causal
    second = F.scaled_dot_product_attention(q, k, v, attn_mask=chosen)
    third = F.scaled_dot_product_attention(q, k, v, attn_mask=causal & (at[:, None] - at < 64))
    g = gates.sigmoid().unbind(-1)
    return g[0][..., None] * first + g[1][..., None] * second + g[2][..., None] * third


def indexed_decode(q: Tensor, cache: Tensor, index_q: Tensor, index_k: Tensor, w: Tensor) -> Tensor:
    """DeepSeek's lightning indexer: relu scores of few heads pick entries of a latent cache, attention to these alone."""
    scores = torch.einsum("bh,bhn->bn", w, F.relu(torch.einsum("bhd,bnd->bhn", index_q, index_k)).to(w.dtype))
    picked = scores.topk(min(256, scores.shape[-1] // 2), dim=-1).indices.sort(-1).values
    entries = cache.gather(1, picked[..., None].expand(-1, -1, cache.shape[-1]))
    p = (torch.einsum("bhd,bnd->bhn", q, entries) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bhn,bnd->bhd", p, entries[..., :128])


def gated_heads(x: Tensor, wq: Tensor, wkv: Tensor, q_norm: Tensor, k_norm: Tensor, wo: Tensor) -> Tensor:
    """Qwen3-Next: a query projection that also makes a gate, zero-centred norms of heads, two key heads."""
    b, n, _d = x.shape
    size = q_norm.shape[0]
    q, gate = F.linear(x, wq).view(b, n, -1, 2 * size).chunk(2, dim=-1)
    k, v = F.linear(x, wkv).view(b, n, -1, size).chunk(2, dim=-2)
    q, k = _norm(q, 1 + q_norm).transpose(1, 2), _norm(k, 1 + k_norm).transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.transpose(1, 2).repeat_interleave(groups, 1)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return F.linear((y * torch.sigmoid(gate)).reshape(b, n, -1), wo)


def blocked_rolls(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """BigBird: each block attends to itself, its neighbours and the first block, keys of all four side by side."""
    b, h, n, d = q.shape
    size = 32
    q, k, v = (t.view(b, h, n // size, size, d) for t in (q, k, v))

    def near(t: Tensor) -> Tensor:
        return torch.cat([t.roll(1, 2), t, t.roll(-1, 2), t[:, :, :1].expand_as(t)], dim=3)

    scores = torch.einsum("bhmqd,bhmkd->bhmqk", q, near(k)) / math.sqrt(d)
    p = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bhmqk,bhmkd->bhmqd", p, near(v)).reshape(b, h, n, d)


def hashed_buckets(x: Tensor, rotations: Tensor, v: Tensor) -> Tensor:
    """Reformer: tokens sorted by a random rotation's argmax, attention within chunks of the sorted order, then unsorted."""
    b, n, d = x.shape
    turned = torch.einsum("bnd,dr->bnr", x.detach().float(), rotations.float())
    bucket = torch.cat([turned, -turned], dim=-1).argmax(-1)
    order = (bucket * n + torch.arange(n, device=x.device)).argsort(dim=-1)
    back = order.argsort(dim=-1)
    sx, sv = (t.gather(1, order[..., None].expand_as(t)).view(b, -1, 64 if n % 64 == 0 else 4, d) for t in (x, v))
    kx = F.normalize(sx, dim=-1)
    keys, values = (torch.cat([t, t.roll(1, 1)], 2) for t in (kx, sv))
    p = (torch.einsum("bcid,bcjd->bcij", sx, keys) * d**-0.5).softmax(-1)
    y = torch.einsum("bcij,bcjd->bcid", p, values).reshape(b, n, d)
    return y.gather(1, back[..., None].expand_as(y))


def one_key_head(x: Tensor, wq: Tensor, wkv: Tensor) -> Tensor:
    """Multi-query attention by einsum, key and value without an axis of heads."""
    b, n, _ = x.shape
    q = F.linear(x, wq).view(b, n, -1, wkv.shape[0] // 2)
    k, v = F.linear(x, wkv).chunk(2, -1)
    scores = torch.einsum("bnhd,bmd->bhnm", q, k) * k.shape[-1] ** -0.5
    hidden = torch.ones(n, n, device=x.device, dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    return torch.einsum("bhnm,bmd->bnhd", p, v).flatten(2)


def mixed_shift(x: Tensor, mu: Tensor, five: Tensor, down: Tensor, up: Tensor, wr: Tensor, wk: Tensor) -> Tensor:
    """RWKV-6: five mixes of a token and its predecessor, each weighted by a low-rank function of both."""
    b, n, d = x.shape
    change = F.pad(x, (0, 0, 1, -1)) - x
    low = torch.tanh((x + change * mu) @ down).view(b * n, 5, -1).transpose(0, 1)
    w, k, v, r, g = torch.bmm(low, up).view(5, b, n, d).unbind(0)
    mw, mk, mv, mr, mg = (x + change * (m + t) for m, t in zip(five.unbind(0), (w, k, v, r, g), strict=True))
    decay = torch.exp(-torch.exp(mw.float())).to(x.dtype)
    return F.linear(mr, wr).sigmoid() * F.linear(mk, wk) * decay + mv * F.silu(mg)


def hyper_connections(streams: Tensor, norm: Tensor, static: Tensor, dynamic: Tensor, w: Tensor) -> Tensor:
    """Several residual streams mixed by weights that depend on the tokens, a layer on one mix of them, added to all."""
    s = streams.shape[-2]
    y = F.rms_norm(streams, norm.shape, norm)
    mixes = torch.tanh(y @ dynamic) * 0.1 + static
    alpha, beta = mixes[..., : s + 1], mixes[..., s + 1]
    mixed = alpha.transpose(-1, -2) @ streams
    out = F.gelu(F.linear(mixed[..., 0, :], w))
    return mixed[..., 1:, :] + beta[..., None] * out[..., None, :]


def state_step(
    zxbcdt: Tensor, conv: Tensor, w: Tensor, bias: Tensor, state: Tensor, a: Tensor, dt_bias: Tensor, norm: Tensor
) -> Tensor:
    """Mamba 2 for a token: a window of inputs moved by one, a state decayed and written in place, a gated norm."""
    b = zxbcdt.shape[0]
    _, heads, size, n = state.shape
    inner = heads * size
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * n, heads], dim=-1)
    conv.copy_(torch.roll(conv, -1, -1))
    conv[:, :, -1] = xbc
    xbc = F.silu(torch.sum(conv * w, dim=-1) + bias)
    x, bs, cs = xbc.split([inner, n, n], dim=-1)
    dt = F.softplus(dt.float() + dt_bias.float())
    decay = torch.exp(-dt * a.float().exp())
    x = x.view(b, heads, size)
    write = torch.einsum("bh,bn,bhp->bhpn", dt, bs.float(), x.float())
    state.copy_((state * decay[..., None, None] + write).to(state.dtype))
    y = torch.einsum("bhpn,bn->bhp", state.float(), cs.float()) + x
    y = y.reshape(b, inner).to(z.dtype) * F.silu(z)
    return F.rms_norm(y, (inner,), norm)


def delta_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor) -> Tensor:
    """The gated delta rule for a token: the state forgets, reads by the key, writes the difference, answers the query."""
    q, k = (F.normalize(t.float(), dim=-1, eps=1e-6) for t in (q, k))
    faded = state.float() * torch.exp(-F.softplus(decay.float()))[..., None, None]
    old = torch.einsum("bhkv,bhk->bhv", faded, k)
    change = (v.float() - old) * torch.sigmoid(beta.float())[..., None]
    state.copy_(faded + k[..., None] * change[..., None, :])
    return torch.einsum("bhkv,bhk->bhv", state.float(), q).to(v.dtype)


def tiled_scales(x: Tensor, w: Tensor, scales: Tensor) -> Tensor:
    """DeepSeek V3's weights: float8 with a float32 scale for each tile of 128 by 128, rows of the input in groups."""
    k, n = w.shape
    full = scales.abs().repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n]
    groups = x.float().unflatten(-1, (-1, 128))
    step = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448
    rounded = (groups / step).to(torch.float8_e4m3fn).float() * step
    return F.linear(rounded.flatten(-2).to(x.dtype), (w.float() * full).to(x.dtype))


def four_bit_floats(x: Tensor, packed: Tensor, exponents: Tensor, bias: Tensor) -> Tensor:
    """gpt-oss: e2m1 values in pairs through a table, a power of two for each 32 of them by ldexp."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=x.dtype, device=x.device)
    b = packed.to(torch.uint8)
    low, high = (b & 15).to(torch.int32), (b >> 4).to(torch.int32)
    values = torch.stack((table[low], table[high]), -1).view(b.shape[0], -1, 32)
    w = torch.ldexp(values, exponents.to(torch.int32)[..., None] % 4 - 5)
    return F.linear(x, w.reshape(b.shape[0], -1), bias)


def ordered_groups(x: Tensor, packed: Tensor, zeros: Tensor, scales: Tensor, group: Tensor) -> Tensor:
    """GPTQ with reordered groups: eight codes of four bits in an int32, zero points packed too, a group for each row."""
    shifts = torch.arange(0, 32, 4, device=x.device, dtype=torch.int32)
    codes = ((packed.to(torch.int32)[:, None, :] >> shifts[None, :, None]) & 15).flatten(0, 1)
    points = ((zeros.to(torch.int32)[:, :, None] >> shifts) & 15).flatten(1)
    w = (codes - points[group] - 1).to(x.dtype) * scales[group]
    return x @ w


def summed_codebooks(x: Tensor, codes: Tensor, books: Tensor, scales: Tensor) -> Tensor:
    """AQLM: groups of eight weights are sums of entries of two codebooks."""
    c = codes.to(torch.uint8).long()
    w = books[0][c[..., 0]] + books[1][c[..., 1]]
    return F.linear(x, w.flatten(-2) * scales)


def shared_random_adapter(x: Tensor, w: Tensor, a: Tensor, b: Tensor, d: Tensor, e: Tensor) -> Tensor:
    """VeRA: frozen low-rank matrices, trained diagonals, beside IA3's scale of the output."""
    low = F.linear(x, a.detach()) * d
    return (F.linear(x, w.detach()) + F.linear(low, b.detach()) * e) * (1 + 0.1 * e)


def kronecker_adapter(x: Tensor, w: Tensor, left: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """LoKr: a weight plus torch.kron of a small matrix and a low-rank one."""
    return F.linear(x, w.detach() + torch.kron(left, a @ b) * 0.5)


def orthogonal_blocks(x: Tensor, skew: Tensor, w: Tensor) -> Tensor:
    """OFT: blocks of inputs turned by Cayley transforms, inverses by a Neumann series."""
    s = (skew - skew.mT) * 0.05
    eye = torch.eye(s.shape[-1], device=s.device, dtype=s.dtype)
    inverse, power = eye - s, s
    for _ in range(3):
        power = power @ s
        inverse = inverse + power
    rotations = (eye + s) @ inverse
    y = torch.einsum("...ri,rij->...rj", x.unflatten(-1, (s.shape[0], -1)), rotations)
    return F.linear(y.flatten(-2), w.detach())


def capped_chunks(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """A loss over the vocabulary in chunks of tokens, logits capped, squares of the normaliser added, padding left out."""
    total = x.new_zeros((), dtype=torch.float32)
    live = labels % 7 != 0
    for part, label, keep in zip(x.chunk(4), labels.chunk(4), live.chunk(4), strict=True):
        logits = 30 * torch.tanh(F.linear(part, w).float() / 30)
        z = torch.logsumexp(logits, -1)
        loss = z - logits.gather(-1, label[:, None]).squeeze(-1) + 1e-4 * z.square()
        total = total + torch.where(keep, loss, 0).sum()
    return total / live.sum()


def group_policy(logits: Tensor, tokens: Tensor, old: Tensor, reference: Tensor, rewards: Tensor, mask: Tensor) -> Tensor:
    """GRPO: rewards standardised within groups of eight, a clipped ratio, an unbiased divergence, means over tokens."""
    logp = logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)
    groups = rewards.float().view(-1, 8)
    advantage = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    old, reference = (-t.float().abs() for t in (old, reference))
    ratio = torch.exp((logp - old).clamp(-5, 5))
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    gap = (reference - logp).clamp(-5, 5)
    loss = -(surrogate - 0.04 * (gap.exp() - gap - 1))
    keep = (mask > -1).float()
    return ((loss * keep).sum(1) / keep.sum(1).clamp(min=1)).mean()


def prospects(chosen: Tensor, reference: Tensor, wanted: Tensor) -> Tensor:
    """KTO: rewards against a clamped mean divergence, losses of wanted and unwanted answers weighted apart."""
    reward = 0.1 * (chosen.float().sum(-1) - reference.float().sum(-1))
    point = reward.mean().clamp(min=0).detach()
    good = wanted > 0
    value = torch.where(good, torch.sigmoid(reward - point), 1.33 * torch.sigmoid(point - reward))
    return torch.where(good, 1 - value, 1.33 - value).mean()


def small_probabilities(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Sampling: temperatures, a minimum relative probability, the 50 best, a draw by exponential races."""
    scores = logits.float() / 0.7
    p = scores.softmax(-1)
    scores = scores.masked_fill(p < 0.02 * p.amax(-1, keepdim=True), float("-inf"))
    least = scores.topk(50, dim=-1).values[..., -1:]
    p = scores.masked_fill(scores < least, float("-inf")).softmax(-1)
    return (p / -torch.log(noise.float().sigmoid())).argmax(-1), -(p * (p + 1e-9).log()).sum(-1)


def late_interaction(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """ColBERT: best match of each query token in each document, summed; a softmax over documents in the batch."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    scores = torch.einsum("aqd,bkd->abqk", q, k).masked_fill((mask < -1)[None, :, None], -1e4)
    total = scores.max(-1).values.sum(-1)
    return F.cross_entropy(20 * total.float() / q.shape[1], torch.arange(len(q), device=q.device))


def sparse_lexicon(x: Tensor, w: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """SPLADE: log of one plus relu of the vocabulary's scores, maxima over tokens, a penalty of squared means."""
    logits = F.linear(x, w, bias)
    y = torch.log1p(F.relu(logits)) * (mask > -1).to(x.dtype)[..., None]
    y = y.amax(1)
    return (y.abs().mean(0) ** 2).sum() + (y @ y.mT).float().log_softmax(-1).diagonal().mean()


def inside(spans: Tensor, rules: Tensor) -> Tensor:
    """The inside algorithm of a grammar of few symbols: logsumexp over splits, spans by growing width."""
    _b, n, s = spans.shape
    rules = rules.flatten(1).log_softmax(-1).view_as(rules)
    beta = {1: spans}
    for width in range(2, n + 1):
        count = n - width + 1
        parts = [
            torch.logsumexp(beta[w][:, :count, :, None] + beta[width - w][:, w : w + count, None, :] + 0, dim=(2, 3))
            for w in range(1, width)
        ]
        whole = torch.stack([p[..., None] for p in parts]).logsumexp(0)
        beta[width] = whole + rules.logsumexp((1, 2)) + rules.amax((1, 2))
    return beta[n][:, 0].logsumexp(-1) + s


def several_heads(x: Tensor, residual: Tensor, head: Tensor) -> Tensor:
    """Medusa: residual layers for each later token, one shared vocabulary, the best token and its score."""
    y = x[:, None] + F.silu(torch.einsum("bd,hed->bhe", x, residual))
    logits = F.linear(torch.cat([x[:, None], y], 1), head)
    top = logits.float().log_softmax(-1).topk(8, dim=-1)
    return top.values.cumsum(1)


def _layer(m: Make, b: int, d: int, kv: int, size: int, n: int) -> list[Tensor]:
    weights = [m(d), weight(m, d, d), weight(m, 2 * kv * size, d), weight(m, d, d)]
    return [m(b, 1, d), *weights, m(b, kv, n, size), m(b, kv, n, size), ids(m, n, 4)]


def _mamba(m: Make, b: int, heads: int, size: int, n: int) -> list[Tensor]:
    inner = heads * size
    c = inner + 2 * n
    return [
        m(b, 2 * inner + 2 * n + heads),
        m(b, c, 4),
        m(c, 4),
        m(c),
        m(b, heads, size, n).float(),
        m(heads),
        m(heads),
        m(inner),
    ]


def _bytes(m: Make, *shape: int) -> Tensor:
    return ids(m, 256, *shape).to(torch.uint8)


NEOX = Sized(partial_rotary, lambda m, b, n, d: [m(b, n, d), weight(m, 3 * d, d), m(3 * d)], (2, 7, 128))
SPARSE = Sized(
    native_sparse, lambda m, b, h, n, d: [*(m(b, h, n, d) for _ in range(3)), m(32), m(32), m(b, h, n, 3)], (1, 2, 256, 16)
)
GATED = Sized(
    gated_heads,
    lambda m, b, n, d, h, s: [m(b, n, d), weight(m, 2 * h * s, d), weight(m, 4 * s, d), m(s), m(s), weight(m, d, h * s)],
    (2, 7, 24, 4, 8),
)
ROLLS = Sized(blocked_rolls, lambda m, b, h, n, d: [m(b, h, n, d) for _ in range(3)], (1, 2, 128, 8), HALF)
SHIFTED = Sized(
    mixed_shift,
    lambda m, b, n, d: [m(b, n, d), m(d), m(5, d), weight(m, d, 160), m(5, 32, d) * 0.1, weight(m, d, d), weight(m, d, d)],
    (2, 5, 24),
)
STREAMS = Sized(
    hyper_connections,
    lambda m, n, s, d: [m(n, s, d), m(d), m(s, s + 2), m(d, s + 2) * d**-0.5, weight(m, d, d)],
    (5, 4, 16),
)
ORTHOGONAL = Sized(orthogonal_blocks, lambda m, n, r, s, o: [m(n, r * s), m(r, s, s), weight(m, o, r * s)], (5, 3, 8, 10))

BLOCKS: tuple[Block, ...] = (
    Sized(static_step, _layer, (2, 32, 2, 8, 12)).block("fixed cache", 8, 4096, 8, 128, 4000),
    Sized(
        sliding_step,
        lambda m, b, h, kv, n, d: [m(b, h, 1, d), m(b, kv, 1, d), m(b, kv, 1, d), m(b, kv, n, d), m(b, kv, n, d)],
        (2, 4, 2, 9, 8),
    ).block("moving window cache", 16, 16, 8, 1024, 256),
    *NEOX.both("part of a head turned", 4, 1001, 768),
    Sized(stretched_rotary, lambda m, b, n, d: [m(b, n, d), m(b, n, d)], (3, 7, 32)).block(
        "stretched rotary", 32, 700, 96, training=True
    ),
    Sized(
        sectioned_rotary, lambda m, b, h, n, d: [*(m(b, h, n, d) for _ in range(3)), ids(m, 50, 3, b, n)], (2, 2, 9, 16)
    ).block("sections of rotary", 2, 16, 1300, 128, training=True),
    *SPARSE.both("native sparse", 2, 16, 1024, 64),
    Sized(
        indexed_decode,
        lambda m, b, h, n, d: [m(b, h, d + 64), m(b, n, d + 64), m(b, 8, 64), m(b, n, 64), m(b, 8)],
        (2, 3, 40, 128),
    ).block("indexed decode", 16, 32, 4001, 448),
    *GATED.both("gated heads", 2, 1024, 1024, 16, 128),
    ROLLS.block("blocks by rolls", 2, 12, 4096, 64, training=True),
    Sized(hashed_buckets, lambda m, b, n, d: [m(b, n, d), m(d, 16), m(b, n, d)], (2, 12, 8)).block(
        "hashed buckets", 16, 4096, 64, training=True
    ),
    Sized(
        one_key_head, lambda m, b, n, d, h, s: [m(b, n, d), weight(m, h * s, d), weight(m, 2 * s, d)], (2, 7, 16, 3, 8)
    ).block("one key head", 4, 777, 1024, 16, 64, training=True),
    *SHIFTED.both("mixed shift", 8, 1021, 1024),
    *STREAMS.both("hyper-connections", 8191, 4, 1024),
    Sized(state_step, _mamba, (2, 4, 8, 6)).block("mamba 2 token", 64, 80, 64, 128),
    Sized(
        delta_step,
        lambda m, b, h, d: [m(b, h, d), m(b, h, d), m(b, h, d), m(b, h), m(b, h), m(b, h, d, d).float()],
        (2, 3, 8),
    ).block("delta token", 64, 32, 128),
    Sized(
        tiled_scales,
        lambda m, b, k, n: [m(b, n), m(k, n).to(torch.float8_e4m3fn), m(-(-k // 128), -(-n // 128)).float() * n**-0.5],
        (3, 130, 256),
    ).block("tiled scales", 64, 4112, 7168),
    Sized(four_bit_floats, lambda m, b, k, n: [m(b, n), _bytes(m, k, n // 2), ids(m, 9, k, n // 32), m(k)], (3, 10, 64)).block(
        "four bit floats", 32, 5760, 2880
    ),
    Sized(
        ordered_groups,
        lambda m, b, k, n: [
            m(b, k),
            ids(m, 2**31, k // 8, n),
            ids(m, 2**31, k // 128, n // 8),
            m(k // 128, n) * 0.05,
            ids(m, k // 128, k),
        ],
        (3, 256, 16),
    ).block("ordered groups", 8, 4096, 11008),
    Sized(
        summed_codebooks,
        lambda m, b, k, n: [m(b, n), _bytes(m, k, n // 8, 2), weight(m, 2, 256, 8), m(k, 1)],
        (3, 6, 32),
    ).block("summed codebooks", 4, 4096, 4096),
    Sized(
        shared_random_adapter,
        lambda m, n, d, k, r: [m(n, d), weight(m, k, d), weight(m, r, d), weight(m, k, r), m(r), m(k)],
        (5, 12, 10, 4),
    ).block("shared random adapter", 4001, 2048, 2560, 256, training=True),
    Sized(
        kronecker_adapter,
        lambda m, n, p, k, r: [m(n, p * k), weight(m, p * k, p * k), weight(m, p, p), weight(m, k, r), weight(m, r, k)],
        (5, 3, 4, 2),
    ).block("kronecker adapter", 3000, 16, 96, 8, training=True),
    ORTHOGONAL.block("orthogonal blocks", 4096, 32, 64, 1500, training=True),
    Sized(capped_chunks, lambda m, n, d, v: [m(n, d), weight(m, v, d), ids(m, v, n)], (8, 6, 20)).block(
        "capped chunks", 4000, 1024, 30001, training=True
    ),
    Sized(
        group_policy,
        lambda m, b, n, v: [m(b, n, v), ids(m, v, b, n), m(b, n), m(b, n), m(b), m(b, n)],
        (16, 5, 9),
        SINGLE,
    ).block("group policy", 16, 200, 32003, training=True),
    Sized(prospects, lambda m, b, n: [m(b, n), m(b, n), m(b)], (6, 9), SINGLE).block("prospects", 2048, 1000, training=True),
    Sized(small_probabilities, lambda m, b, v: [m(b, v) * 3, m(b, v)], (3, 100), SINGLE).block(
        "small probabilities", 32, 50257
    ),
    Sized(late_interaction, lambda m, b, q, k, d: [m(b, q, d), m(b, k, d), m(b, k)], (3, 4, 5, 8)).block(
        "late interaction", 64, 32, 180, 128, training=True
    ),
    Sized(sparse_lexicon, lambda m, b, n, d, v: [m(b, n, d), weight(m, v, d), m(v), m(b, n)], (3, 5, 8, 20)).block(
        "sparse lexicon", 16, 128, 768, 30522, training=True
    ),
    Sized(inside, lambda m, b, n, s: [m(b, n, s), m(s, s, s)], (2, 4, 3), SINGLE).block(
        "inside spans", 256, 8, 20, training=True
    ),
    Sized(several_heads, lambda m, b, h, d, v: [m(b, d), weight(m, h, d, d), weight(m, v, d)], (3, 2, 8, 40)).block(
        "several heads", 12, 4, 2048, 32001
    ),
)
