"""Layers, losses and metrics of language: other attentions, copying, trees, cells, paths of words, bytes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, HALF = torch.float32, torch.float16


def split(x: Tensor, heads: int) -> Tensor:
    """(b, s, d) as (b, heads, s, d / heads)."""
    b, s, d = x.shape
    return x.view(b, s, heads, d // heads).permute(0, 2, 1, 3)


def joined(x: Tensor) -> Tensor:
    """(b, heads, s, d) as (b, s, heads * d)."""
    b, h, s, d = x.shape
    return x.permute(0, 2, 1, 3).reshape(b, s, h * d)


# ---- layers ---------------------------------------------------------------------------------------------------------------


def gpt_j_layer(x: Tensor, *w: Tensor) -> Tensor:
    """GPT-J: pairs of the first quarter of a head rotated, scores in float32, a mask by where, the MLP beside the attention."""
    norm, wqkv, wo, up, bu, down, bd = w
    s, size = x.shape[1], 256
    h = F.layer_norm(x, x.shape[-1:], norm[0], norm[1])
    q, k, v = (split(F.linear(h, m), x.shape[-1] // size) for m in wqkv)
    angles = torch.outer(torch.arange(s, device=x.device), 10000 ** (-torch.arange(0, 64, 2, device=x.device) / 64)).to(x.dtype)
    sin, cos = (t.repeat_interleave(2, dim=-1) for t in (angles.sin(), angles.cos()))

    def turned(t: Tensor) -> Tensor:
        a, rest = t[..., :64], t[..., 64:]
        other = torch.stack((-a[..., 1::2], a[..., ::2]), dim=-1).flatten(-2)
        return torch.cat([a * cos + other * sin, rest], dim=-1)

    q, k = turned(q).float(), turned(k).float()
    scores = q @ k.transpose(-1, -2) / math.sqrt(size)
    causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
    scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
    y = F.linear(joined(scores.softmax(-1).to(v.dtype) @ v), wo)
    return x + y + F.linear(F.gelu(F.linear(h, up, bu), approximate="tanh"), down, bd)


def albert(tokens: Tensor, masked: Tensor, table: Tensor, wide: Tensor, *w: Tensor) -> Tensor:
    """ALBERT: small embeddings made wide, one layer used three times, a head that reads the embeddings, a loss."""
    norms, wqkv, bqkv, wo, bo, up, bu, down, bd, narrow = w
    d = wide.shape[0]
    x = F.linear(F.layer_norm(F.embedding(tokens, table), table.shape[1:]), wide)
    for _ in range(3):
        q, k, v = (split(t, d // 64) for t in F.linear(x, wqkv, bqkv).chunk(3, dim=-1))
        y = F.linear(joined(F.scaled_dot_product_attention(q, k, v)), wo, bo)
        x = F.layer_norm(x + y, (d,), norms[0], norms[1], 1e-12)
        y = F.linear(F.gelu(F.linear(x, up, bu), approximate="tanh"), down, bd)
        x = F.layer_norm(x + y, (d,), norms[2], norms[3], 1e-12)
    chosen = x.gather(1, masked[..., None].expand(-1, -1, d)).flatten(0, 1)
    h = F.layer_norm(F.gelu(F.linear(chosen, narrow), approximate="tanh"), table.shape[1:])
    return F.cross_entropy(F.linear(h, table).float(), tokens.gather(1, masked).flatten())


def mpt_layer(x: Tensor, norms: Tensor, wqkv: Tensor, wo: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """MPT: norms without shifts, queries, keys and values clamped, biases of distances in the mask, no biases elsewhere."""
    s, d = x.shape[1:]
    heads = d // 128
    qkv = F.linear(F.layer_norm(x, (d,), norms[0]), wqkv).clamp(-6, 6)
    q, k, v = (split(t, heads) for t in qkv.chunk(3, dim=2))
    slopes = 1.0 / 2 ** (torch.arange(1, heads + 1, device=x.device) * 8.0 / heads)
    bias = torch.arange(1 - s, 1, device=x.device, dtype=torch.float32)[None, None, None] * slopes[None, :, None, None]
    causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
    mask = bias.expand(1, heads, s, s).masked_fill(~causal, -math.inf).to(x.dtype)
    x = x + F.linear(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)), wo)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (d,), norms[1]), up)), down)


def funnel_layer(x: Tensor, padding: Tensor, norms: Tensor, wqkv: Tensor, wo: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Funnel transformer: queries pooled by two but for the first token, keys at full length, shortcuts pooled, too."""
    b, s, d = x.shape
    first, rest = x[:, :1], x[:, 1:].transpose(1, 2)
    pooled = torch.cat([first, F.avg_pool1d(rest, 2, 2, ceil_mode=True).transpose(1, 2)], 1)
    q, k, v = F.linear(pooled, wqkv[0]), F.linear(x, wqkv[1]), F.linear(x, wqkv[2])
    score = torch.einsum("bind,bjnd->bnij", q.view(b, -1, d // 64, 64), k.view(b, s, -1, 64)) * 0.125
    score = score.float() - 1e6 * padding[:, None, None].float()
    y = torch.einsum("bnij,bjnd->bind", score.softmax(-1).to(x.dtype), v.view(b, s, -1, 64)).reshape(b, -1, d)
    x = F.layer_norm(pooled + F.linear(y, wo), (d,), norms[0], norms[1], 1e-9)
    return F.layer_norm(x + F.linear(F.gelu(F.linear(x, up)), down), (d,), norms[2], norms[3], 1e-9)


def synthesised(x: Tensor, a: Tensor, b: Tensor, left: Tensor, right: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """Synthesizer: scores made from each token alone by two layers, plus learned ones of low rank; no keys."""
    heads, s = left.shape[0], x.shape[1]
    dense = F.linear(F.relu(F.linear(x, a)), b).view(x.shape[0], s, heads, s).transpose(1, 2)
    learned = torch.matmul(left, right.transpose(-1, -2))
    p = (dense + learned).softmax(-1)
    return x + F.linear(joined(p @ split(F.linear(x, wv), heads)), wo)


def sandwich(x: Tensor, norms: Tensor, wqkv: Tensor, wo: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """CogView: norms before and after each branch, inputs of norms divided by their maximum, softmax of relaxed scores."""
    d = x.shape[-1]

    def normed(t: Tensor, k: int) -> Tensor:
        return F.layer_norm(t / t.abs().amax(-1, keepdim=True).detach().div(8), (d,), norms[2 * k], norms[2 * k + 1])

    q, k, v = (split(t, d // 64) for t in F.linear(normed(x, 0), wqkv).chunk(3, -1))
    scores = (q / (32 * math.sqrt(64))) @ k.transpose(-1, -2)
    scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1), -2000)
    scores = (scores - scores.detach().amax(-1, keepdim=True)) * 32
    x = x + normed(F.linear(joined(scores.softmax(-1) @ v), wo), 1)
    return x + normed(F.linear(F.gelu(F.linear(normed(x, 2), up)), down), 3)


def cosine_weighted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """cosFormer: positive features weighted by cosines of distances, split into sines and cosines of both positions."""
    s = q.shape[2]
    at = math.pi / 2 * torch.arange(1, s + 1, device=q.device, dtype=q.dtype)[:, None] / s
    q, k = F.relu(q), F.relu(k)
    q, k = (torch.cat([t * at.sin(), t * at.cos()], -1) for t in (q, k))
    kv = torch.einsum("bhsd,bhsm->bhdm", k, v)
    z = 1 / torch.einsum("bhsd,bhd->bhs", q, k.sum(2)).clamp_min(1e-6)
    return torch.einsum("bhsd,bhdm,bhs->bhsm", q, kv, z)


def expert_heads(x: Tensor, router: Tensor, wq: Tensor, wo: Tensor, wkv: Tensor) -> Tensor:
    """Mixture of attention heads: two of several experts' queries and outputs for each token, one key and value for all."""
    d = wq.shape[-1]
    p = F.linear(x, router).float().softmax(-1)
    top, which = p.topk(2, dim=-1)
    gate = torch.zeros_like(p).scatter(-1, which, top / top.sum(-1, keepdim=True)).to(x.dtype)
    k, v = F.linear(x, wkv).chunk(2, -1)
    q = torch.einsum("bsi,eid->besd", x, wq)
    y = F.scaled_dot_product_attention(q, k[:, None], v[:, None], is_causal=True)
    load = (gate > 0).float().mean((0, 1)) * p.mean((0, 1))
    return torch.einsum("besd,edo,bse->bso", y, wo, gate) + load.sum().to(x.dtype) * d**-0.5


def two_conditions(x: Tensor, text: Tensor, picture: Tensor, wq: Tensor, wkv: Tensor, wip: Tensor, wo: Tensor) -> Tensor:
    """IP-Adapter: one query, softmax over text and softmax over a picture's tokens apart, their sum through one layer."""
    heads = x.shape[-1] // 64
    q = split(F.linear(x, wq), heads)
    out = 0.0
    for scale, c, w in ((1.0, text, wkv), (0.6, picture, wip)):
        k, v = (split(t, heads) for t in F.linear(c, w).chunk(2, -1))
        out = out + scale * joined(F.scaled_dot_product_attention(q, k, v))
    return x + F.linear(out, wo)


# ---- cells, trees, copying ------------------------------------------------------------------------------------------------


def pointer_generator(states: Tensor, memory: Tensor, source: Tensor, target: Tensor, *w: Tensor) -> Tensor:
    """See, Liu and Manning: additive attention with coverage, a mixture of the vocabulary and of copied words, both losses."""
    wm, wsx, wc, score, switch, out = w
    b, t, _ = states.shape
    keys, queries = F.linear(memory, wm), F.linear(states, wsx)
    coverage = torch.zeros(b, memory.shape[1], dtype=states.dtype, device=states.device)
    attentions, contexts, missed = [], [], coverage.sum()
    for k in range(t):
        e = torch.tanh(keys + queries[:, k : k + 1] + coverage[..., None] * wc) @ score
        a = e.softmax(-1)
        missed = missed + torch.minimum(a, coverage).sum()
        coverage = coverage + a
        attentions.append(a)
        contexts.append(torch.bmm(a[:, None], memory)[:, 0])
    both = torch.cat([states, torch.stack(contexts, 1)], -1)
    gen = torch.sigmoid(both @ switch)[..., None]
    vocabulary = F.linear(both, out).softmax(-1) * gen
    copied = torch.stack(attentions, 1) * (1 - gen)
    final = F.pad(vocabulary, (0, 50)).scatter_add(2, source[:, None].expand(-1, t, -1), copied)
    return -(final.gather(2, target[..., None]) + 1e-12).log().mean() + missed / (b * t)


def attention_flow(c: Tensor, q: Tensor, q_mask: Tensor, w: Tensor, w1: Tensor) -> Tensor:
    """BiDAF: trilinear similarities, context to query and query to context, four parts joined and projected."""
    d = c.shape[-1]
    s = (c @ w[:d])[:, :, None] + (q @ w[d : 2 * d])[:, None] + torch.bmm(c * w[2 * d :], q.mT)
    s = s.masked_fill(~q_mask[:, None], -1e30)
    u = torch.bmm(s.softmax(2), q)
    h = torch.bmm(s.amax(2).softmax(1)[:, None], c).expand(-1, c.shape[1], -1)
    return F.relu(F.linear(torch.cat([c, u, c * u, c * h], 2), w1))


def tree_cells(x: Tensor, *w: Tensor) -> Tensor:
    """Child-sum Tree-LSTM over full binary trees in heap order, a level at a time; the root's state."""
    wx, wh, wf, b = w
    d = wh.shape[1]
    gates = F.linear(x, wx, b)
    n = (x.shape[1] + 1) // 2
    h = c = torch.zeros(1, dtype=x.dtype, device=x.device)
    while n >= 1:
        i, o, u, f = gates[:, n - 1 : 2 * n - 1].split(d, -1)
        if h.dim() == 3:
            pairs = h.unflatten(1, (n, 2))
            more = F.linear(pairs.sum(2), wh).chunk(3, -1)
            i, o, u = i + more[0], o + more[1], u + more[2]
            kept = (torch.sigmoid(f[:, :, None] + F.linear(pairs, wf)) * c.unflatten(1, (n, 2))).sum(2)
            c = i.sigmoid() * u.tanh() + kept
        else:
            c = i.sigmoid() * u.tanh()
        h = o.sigmoid() * c.tanh()
        n //= 2
    return h[:, 0]


def quasi_recurrent(x: Tensor, w: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """QRNN: gates by a causal convolution of two, then a loop of elementwise steps (fo-pooling), time first."""
    y = F.conv1d(F.pad(x.permute(1, 2, 0), (1, 0)), w, b).permute(2, 0, 1)
    z, f, o = y.chunk(3, -1)
    z, f, o = z.tanh(), f.sigmoid(), o.sigmoid()
    out = []
    for t in range(x.shape[0]):
        c = f[t] * c + (1 - f[t]) * z[t]
        out.append(o[t] * c)
    return torch.stack(out)


def word_paths(h: Tensor, nodes: Tensor, codes: Tensor, lengths: Tensor, table: Tensor) -> Tensor:
    """Hierarchical softmax: each word's path of binary choices, of different lengths, gathered and scored."""
    logits = torch.einsum("nd,nld->nl", h, table[nodes])
    loss = F.softplus(torch.where(codes, logits, -logits))
    real = torch.arange(nodes.shape[1], device=h.device) < lengths[:, None]
    return (loss * real).sum(1).mean()


# ---- losses, metrics, bytes -----------------------------------------------------------------------------------------------


def corrupted_tokens(logits: Tensor, tokens: Tensor, noised: Tensor, steps: Tensor, betas: Tensor) -> Tensor:
    """D3PM with uniform noise: the posterior of a step for the true and for the guessed tokens, their divergence in bits."""
    k = logits.shape[-1]
    keep = torch.cumprod(1 - betas.sigmoid() * 0.1, 0)
    now, before = keep[steps][:, None, None], keep[(steps - 1).clamp(min=0)][:, None, None]
    one = now / before
    here = F.one_hot(noised, k).to(logits.dtype)
    forward = one * here + (1 - one) / k

    def posterior(p: Tensor) -> Tensor:
        q = forward * (before * p + (1 - before) / k)
        return q / q.sum(-1, keepdim=True)

    true, guess = posterior(F.one_hot(tokens, k).to(logits.dtype)), posterior(logits.softmax(-1))
    kl = (true * ((true + 1e-8).log() - (guess + 1e-8).log())).sum(-1)
    return kl.mean() / math.log(2) + 0.01 * F.cross_entropy(logits.transpose(1, 2), tokens)


def ngram_overlap(candidates: Tensor, references: Tensor, lengths: Tensor, reference_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """BLEU of each sentence and of all: clipped counts of one to four words by comparing all pairs of positions."""
    s, r = candidates.shape[1], references.shape[1]
    own = torch.arange(s, device=candidates.device) < lengths[:, None]
    other = torch.arange(r, device=candidates.device) < reference_lengths[:, None]
    mine = candidates[:, :, None] == candidates[:, None]
    theirs = candidates[:, :, None] == references[:, None]
    mine, theirs = mine & own[:, None], theirs & other[:, None]
    same, match, found, total = mine, theirs, [], []
    for n in range(1, 5):
        if n > 1:
            same = same[:, :-1, :-1] & mine[:, n - 1 :, n - 1 :]
            match = match[:, :-1, :-1] & theirs[:, n - 1 :, n - 1 :]
        count, limit = same.sum(2), match.sum(2)
        real = own[:, n - 1 :]
        share = torch.where(real, torch.minimum(count, limit) / count.clamp(min=1), 0)
        found.append(share.sum(1))
        total.append(real.sum(1).clamp(min=1))
    hits, counts = torch.stack(found, 1), torch.stack(total, 1)
    short = torch.exp(1 - reference_lengths.float() / lengths.float()).clamp(max=1)
    each = short * ((hits + 1) / (counts + 1)).log().mean(1).exp()
    return each, (hits.sum(0) / counts.sum(0)).clamp(min=1e-9).log().mean().exp()


def decoded_bytes(data: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """UTF-8: which bytes start a character, how long it is, its code point, written densely; the count, what is malformed."""
    x = data.int()
    start = (x & 0xC0) != 0x80
    size = 1 + (x >= 0xC0).int() + (x >= 0xE0).int() + (x >= 0xF0).int()
    first = torch.where(x < 0x80, x, x & (0xFF >> (size + 1)))
    later = F.pad(x, (0, 3))
    code, n = first, x.shape[0]
    wrong = torch.zeros_like(start)
    for k in range(1, 4):
        byte = later[k : k + n]
        within = size > k
        code = torch.where(within, (code << 6) | (byte & 0x3F), code)
        wrong = wrong | (within & start & ((byte & 0xC0) != 0x80))
    place = torch.where(start, start.int().cumsum(0) - 1, n).long()
    out = torch.zeros(n + 1, dtype=torch.int32, device=x.device).scatter(0, place, code)
    return out[:n], start.sum(), wrong.sum()


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _gpt_j(m: Make, b: int, s: int, d: int) -> list[Tensor]:
    square = [m(3, d, d) * d**-0.5, weight(m, d, d)]
    return [m(b, s, d), m(2, d) * 0.1 + 1, *square, weight(m, 4 * d, d), m(4 * d) * 0.1, weight(m, d, 4 * d), m(d) * 0.1]


def _albert(m: Make, b: int, s: int, rows: int, e: int, d: int, n: int) -> list[Tensor]:
    square = [weight(m, 3 * d, d), m(3 * d) * 0.1, weight(m, d, d), m(d) * 0.1]
    ff = [weight(m, 4 * d, d), m(4 * d) * 0.1, weight(m, d, 4 * d), m(d) * 0.1]
    tables = [m(rows, e) * 0.1, weight(m, d, e)]
    return [ids(m, rows, b, s), ids(m, s, b, n), *tables, m(4, d) * 0.1 + 1, *square, *ff, weight(m, e, d)]


def _funnel(m: Make, b: int, s: int, d: int) -> list[Tensor]:
    nets = [m(3, d, d) * d**-0.5, weight(m, d, d), weight(m, 4 * d, d), weight(m, d, 4 * d)]
    return [m(b, s, d), m(b, s) > 1.5, m(4, d) * 0.1 + 1, *nets]


def _pointer(m: Make, b: int, t: int, s: int, d: int, v: int) -> list[Tensor]:
    nets = [weight(m, d, d), weight(m, d, d), m(d) * 0.1, m(d) * d**-0.5, m(2 * d) * d**-0.5, weight(m, v, 2 * d)]
    return [m(b, t, d), m(b, s, d), ids(m, v + 50, b, s), ids(m, v, b, t), *nets]


def _plain(m: Make, b: int, s: int, d: int, norms: int) -> list[Tensor]:
    nets = [weight(m, 3 * d, d), weight(m, d, d), weight(m, 4 * d, d), weight(m, d, 4 * d)]
    return [m(b, s, d), m(norms, d) * 0.1 + 1, *nets]


def _synthesised(m: Make, b: int, s: int, d: int, h: int) -> list[Tensor]:
    scores = [weight(m, d, d), weight(m, h * s, d), m(h, s, 8), m(h, s, 8) * 0.3]
    return [m(b, s, d), *scores, weight(m, d, d), weight(m, d, d)]


def _experts(m: Make, b: int, s: int, i: int, e: int, d: int) -> list[Tensor]:
    return [m(b, s, i), weight(m, e, i), m(e, i, d) * i**-0.5, m(e, d, i) * d**-0.5, weight(m, 2 * d, i)]


def _conditions(m: Make, b: int, s: int, d: int, c: int) -> list[Tensor]:
    nets = [weight(m, d, d), weight(m, 2 * d, c), weight(m, 2 * d, c), weight(m, d, d)]
    return [m(b, s, d), m(b, 77, c), m(b, 4, c), *nets]


def _overlap(m: Make, n: int, s: int, r: int) -> list[Tensor]:
    return [ids(m, 200, n, s), ids(m, 200, n, r), ids(m, s - 4, n) + 4, ids(m, r - 4, n) + 4]


BLOCKS: tuple[Block, ...] = (
    Sized(gpt_j_layer, _gpt_j, (2, 5, 512), HALF).block("gpt j layer", 1, 999, 4096),
    Sized(albert, _albert, (2, 7, 23, 8, 64, 3), SINGLE, tf32=True).block("albert", 8, 333, 30522, 128, 768, 50, training=True),
    Sized(mpt_layer, lambda m, b, s, d: _plain(m, b, s, d, 2), (2, 7, 256)).block("mpt layer", 2, 1000, 2048, training=True),
    Sized(funnel_layer, _funnel, (2, 8, 64)).block("funnel layer", 16, 384, 768, training=True),
    Sized(synthesised, _synthesised, (2, 9, 16, 2)).block("synthesised", 16, 251, 512, 8, training=True),
    Sized(sandwich, lambda m, b, s, d: _plain(m, b, s, d, 8), (2, 9, 64), HALF).block("sandwich", 2, 1089, 1024, training=True),
    Sized(cosine_weighted, lambda m, b, h, s, d: [m(b, h, s, d) for _ in range(3)], (2, 2, 9, 4)).block(
        "cosine weighted", 4, 12, 4000, 64, training=True
    ),
    Sized(expert_heads, _experts, (2, 9, 16, 4, 8)).block("expert heads", 4, 1000, 1024, 12, 64, training=True),
    Sized(two_conditions, _conditions, (2, 9, 128, 12), HALF).block("two conditions", 4, 4096, 640, 768),
    Sized(pointer_generator, _pointer, (2, 4, 6, 8, 15), SINGLE, tf32=True).block(
        "pointer generator", 16, 20, 400, 256, 50000, training=True
    ),
    Sized(
        attention_flow,
        lambda m, b, s, q, d: [m(b, s, d), m(b, q, d), m(b, q) < 1, m(3 * d) * d**-0.5, weight(m, d, 4 * d)],
        (2, 9, 5, 6),
        SINGLE,
        tf32=True,
    ).block("attention flow", 60, 400, 31, 200, training=True),
    Sized(
        tree_cells,
        lambda m, b, n, e, d: [m(b, n, e), weight(m, 4 * d, e), weight(m, 3 * d, d), weight(m, d, d), m(4 * d) * 0.1],
        (3, 7, 5, 4),
        SINGLE,
        tf32=True,
    ).block("tree cells", 256, 127, 300, 150, training=True),
    Sized(
        quasi_recurrent,
        lambda m, t, b, d: [m(t, b, d), weight(m, 3 * d, d, 2), m(3 * d) * 0.1, m(b, d)],
        (5, 3, 6),
        HALF,
    ).block("quasi recurrent", 60, 128, 640, training=True),
    Sized(
        word_paths,
        lambda m, n, v, s, d: [m(n, d), ids(m, v, n, s), m(n, s) > 0, ids(m, s, n) + 1, m(v, d) * 0.3],
        (9, 13, 4, 6),
        SINGLE,
    ).block("word paths", 16384, 30521, 17, 300, training=True),
    Sized(
        corrupted_tokens,
        lambda m, b, s, k, t: [m(b, s, k), ids(m, k, b, s), ids(m, k, b, s), ids(m, t, b), m(t)],
        (3, 5, 7, 10),
        SINGLE,
    ).block("corrupted tokens", 32, 256, 1001, 1000, training=True),
    Sized(ngram_overlap, _overlap, (3, 9, 8), SINGLE).block("ngram overlap", 1000, 120, 130),
    Sized(decoded_bytes, lambda m, n: [ids(m, 256, n).to(torch.uint8)], (99,), SINGLE).block("decoded bytes", 8000003),
)
