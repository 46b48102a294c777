"""Blocks of language models: scores with gates and memories, residual streams, experts with a bias, choices, packed caches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def _causal(n: int, x: Tensor) -> Tensor:
    return torch.ones(n, n, device=x.device, dtype=torch.bool).tril()


def forgetting(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    """FoX: sums of the logarithms of forget gates between a key and a query are added to the scores."""
    n, d = q.shape[-2:]
    total = F.logsigmoid(gates.float()).cumsum(-1)
    decay = total[..., :, None] - total[..., None, :]
    scores = (q @ k.mT).float() * d**-0.5 + decay
    return scores.masked_fill(~_causal(n, q), float("-inf")).softmax(-1).to(v.dtype) @ v


def stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each key, from the nearest to the farthest, takes a share of what the nearer ones left."""
    n, d = q.shape[-2:]
    scores = (q @ k.mT).float() * d**-0.5
    before = torch.ones(n, n, device=q.device, dtype=torch.bool).tril(-1)
    kept = F.logsigmoid(-scores).masked_fill(~before, 0.0)
    left = kept.flip(-1).cumsum(-1).flip(-1) - kept
    p = torch.exp(F.logsigmoid(scores) + left).masked_fill(~before, 0.0)
    return p.to(v.dtype) @ v


def contextual_positions(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """CoPE: a key's position is the sum of gates up to the query; its embedding's score is interpolated."""
    n, d = q.shape[-2:]
    scores = (q @ k.mT).float() * d**-0.5
    scores = scores.masked_fill(~_causal(n, q), float("-inf"))
    at = torch.sigmoid(scores).flip(-1).cumsum(-1).flip(-1).clamp(max=positions.shape[-1] - 1)
    low, high = at.floor().long(), at.ceil().long()
    table = (q @ positions).float()
    part = at - low
    scores = scores + table.gather(-1, high) * part + table.gather(-1, low) * (1 - part)
    return scores.softmax(-1).to(v.dtype) @ v


def convolved_scores(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Multi-token attention: scores are convolved over queries and keys of each head before the softmax."""
    n, d = q.shape[-2:]
    seen = _causal(n, q)
    scores = (q @ k.mT * d**-0.5).masked_fill(~seen, 0.0)
    rows, columns = w.shape[-2:]
    scores = F.conv2d(F.pad(scores, (columns // 2, columns // 2, rows - 1, 0)), w, groups=q.shape[1])
    return scores.float().masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v


def packed_documents(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
    """Documents side by side in a row: where one starts a count goes up, tokens see their own document."""
    n = q.shape[-2]
    document = (starts > 2).cumsum(-1)
    same = document[:, :, None] == document[:, None, :]
    mask = (same & _causal(n, q))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def chunked_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Gated delta nets in chunks of 16: the inverse of a triangle by substitution, states from chunk to chunk."""
    b, h, n, d = q.shape
    c = 16
    q, k = F.normalize(q.float(), dim=-1), F.normalize(k.float(), dim=-1)
    q, k, v = (t.float().view(b, h, n // c, c, -1) for t in (q, k, v))
    rate = torch.sigmoid(beta.float()).view(b, h, n // c, c, 1)
    g = F.logsigmoid(decay.float()).view(b, h, n // c, c).cumsum(-1)
    lower = torch.ones(c, c, device=q.device, dtype=torch.bool).tril(-1)
    fade = (g[..., :, None] - g[..., None, :]).masked_fill(~_causal(c, q), float("-inf")).exp()
    a = -((k * rate) @ k.mT * fade).masked_fill(~lower, 0.0)
    rows = [a[..., 0, :]]
    for i in range(1, c):
        known = torch.stack(rows, -2)
        rows.append(a[..., i, :] + (a[..., i, :i, None] * known).sum(-2))
    inverse = torch.stack(rows, -2) + torch.eye(c, device=q.device)
    u, w = inverse @ (v * rate), inverse @ (k * rate * g.exp()[..., None])
    state, out = torch.zeros(b, h, d, v.shape[-1], device=q.device, dtype=q.dtype), []
    for i in range(n // c):
        new = u[:, :, i] - w[:, :, i] @ state
        scores = q[:, :, i] @ k[:, :, i].mT * fade[:, :, i]
        out.append((q[:, :, i] * g[:, :, i].exp()[..., None]) @ state + scores @ new)
        last = g[:, :, i, -1:, None]
        state = state * last.exp() + (k[:, :, i] * (last - g[:, :, i, :, None]).exp()).mT @ new
    return torch.stack(out, 2).view(b, h, n, -1)


def stochastic_streams(streams: Tensor, norm: Tensor, mixes: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """Hyper-connections on a manifold: mixes of streams are made doubly stochastic by ten rounds of Sinkhorn."""
    n, s, d = streams.shape
    y = F.rms_norm(streams.flatten(1).float(), (s * d,), norm.float())
    made = y @ mixes.float() + bias.float()
    before, after, m = torch.sigmoid(made[:, :s]), 2 * torch.sigmoid(made[:, s : 2 * s]), made[:, 2 * s :].view(n, s, s)
    m = torch.exp(m - m.amax((1, 2), keepdim=True))
    for _ in range(10):
        m = m / (m.sum(-1, keepdim=True) + 1e-6)
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
    x = (before[..., None] * streams.float()).sum(1).to(streams.dtype)
    out = F.silu(F.linear(x, w)).float()
    return (m @ streams.float() + after[..., None] * out[:, None]).to(streams.dtype)


def balanced_experts(x: Tensor, router: Tensor, bias: Tensor, up: Tensor, down: Tensor, shared: Tensor) -> Tensor:
    """DeepSeek V3: sigmoid scores, a bias that only chooses and is moved by the load, tokens sorted by expert, one shared."""
    n, d = x.shape
    experts, best = len(router), 2
    room = 2 * n * best // experts
    scores = torch.sigmoid(F.linear(x.float(), router.float()))
    picked = (scores + bias).topk(best, dim=-1).indices
    gates = scores.gather(-1, picked)
    gates = 2.5 * gates / gates.sum(-1, keepdim=True)
    flat = picked.flatten()
    order = flat.argsort(stable=True)
    load = torch.zeros(experts, device=x.device, dtype=torch.long).scatter_add(0, flat, torch.ones_like(flat))
    first = load.cumsum(0) - load
    place = torch.arange(n * best, device=x.device) - first[flat[order]]
    slot = torch.where(place < room, flat[order] * room + place, experts * room)
    rows = torch.zeros(experts * room + 1, d, device=x.device, dtype=x.dtype).index_copy(0, slot, x[order // best])
    hidden = F.silu(torch.bmm(rows[:-1].view(experts, room, d), up.mT))
    made = F.pad(torch.bmm(hidden, down.mT).view(experts * room, d), (0, 0, 0, 1))
    back = torch.zeros_like(made[: n * best]).index_copy(0, order, made[slot]).view(n, best, d)
    uneven = torch.sign(load.to(bias.dtype).mean() - load)
    bias.detach().add_(uneven, alpha=1e-3)
    return (uneven * bias).mean().to(x.dtype) + (back * gates[..., None].to(x.dtype)).sum(1) + F.silu(F.linear(x, shared))


def allowed_choice(logits: Tensor, words: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A grammar's allowed tokens as bits of int32 words, a temperature, a race of exponentials, the choice's logarithm."""
    b, v = logits.shape
    bits = (words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    allowed = bits.view(b, -1)[:, :v] == 1
    scores = torch.where(allowed, logits.float() / 0.8, float("-inf"))
    p = scores.log_softmax(-1)
    choice = (p - torch.log(-torch.log(noise.float().sigmoid()))).argmax(-1)
    return choice, p.gather(-1, choice[:, None])[:, 0]


def verified_tree(logits: Tensor, tokens: Tensor, paths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Medusa: how far each path through a tree of drafts agrees with the best tokens; the longest path and its tokens."""
    best = logits.argmax(-1)
    drafts = tokens.gather(1, paths.flatten()[None].expand(len(tokens), -1)).view(len(tokens), *paths.shape)
    wanted = best.gather(1, paths.flatten()[None].expand(len(tokens), -1)).view_as(drafts)
    agreed = (drafts[:, :, 1:] == wanted[:, :, :-1]).int().cumprod(-1).sum(-1)
    length, path = agreed.max(-1)
    chosen = drafts.gather(1, path[:, None, None].expand(-1, 1, drafts.shape[-1]))[:, 0]
    return length, path, chosen.masked_fill(torch.arange(drafts.shape[-1], device=path.device) > length[:, None], -1)


def entropy_patches(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    """Byte latent models: a patch starts where a small model is unsure; maxima and means of each patch, read back."""
    b, n, d = x.shape
    logp = logits.detach().float().log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    starts = F.pad((entropy[:, 1:] > entropy.mean(-1, keepdim=True)).long(), (1, 0))
    patch = starts.cumsum(-1)[..., None].expand(b, n, d)
    top = torch.zeros_like(x).scatter_reduce(1, patch, x, "amax", include_self=False)
    mean = torch.zeros_like(x).scatter_reduce(1, patch, x, "mean", include_self=False)
    return F.linear(torch.cat([top, mean], -1), w).gather(1, patch)


def hashed_ngrams(tokens: Tensor, tables: Tensor, w: Tensor) -> Tensor:
    """Rolling polynomial hashes of the last three to six bytes, a table for each length, added to the bytes' own rows."""
    sizes = tables.shape[1]
    y = tables[0][tokens]
    rolled = tokens
    for k in range(1, 6):
        rolled = rolled * 1000003 + F.pad(tokens, (k, 0))[:, : tokens.shape[1]]
        if k >= 2:
            y = y + tables[k - 1][rolled % sizes]
    return F.rms_norm(y / 5, (w.shape[1],)) @ w.mT


def two_bit_cache(q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """KIVI: keys coded in two bits by channel over 32 tokens, values by token, four codes in a byte; attention to them."""

    def coded(t: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
        low, high = t.amin(dim, keepdim=True), t.amax(dim, keepdim=True)
        step = ((high - low) / 3).clamp(min=1e-5)
        codes = ((t - low) / step).round().clamp(0, 3).to(torch.uint8).unflatten(-1, (-1, 4))
        shifts = torch.arange(0, 8, 2, device=t.device, dtype=torch.uint8)
        return (codes << shifts).sum(-1).to(torch.uint8), low, step

    def plain(packed: Tensor, low: Tensor, step: Tensor) -> Tensor:
        shifts = torch.arange(0, 8, 2, device=packed.device, dtype=torch.uint8)
        return ((packed[..., None] >> shifts) & 3).flatten(-2).to(low.dtype) * step + low

    k = coded(keys.unflatten(2, (-1, 32)), 3)
    v = coded(values.unflatten(-1, (-1, 32)), -1)
    p = (q @ plain(*k).flatten(2, 3).mT * q.shape[-1] ** -0.5).softmax(-1)
    return p @ plain(*v).flatten(-2), k[0]


def nested_sizes(x: Tensor, y: Tensor) -> Tensor:
    """Matryoshka: contrast of two views by their first 1/8, 1/4, 1/2 and all components."""
    target, total = torch.arange(len(x), device=x.device), x.new_zeros(())
    for part in (8, 4, 2, 1):
        a, b = (F.normalize(t[:, : t.shape[1] // part], dim=-1) for t in (x, y))
        total = total + F.cross_entropy((a @ b.mT).float() * 20, target)
    return total


def later_tokens(x: Tensor, rows: Tensor, norms: Tensor, join: Tensor, head: Tensor, target: Tensor) -> Tensor:
    """Multi-token prediction: a hidden state beside the next token's row, joined; one head gives both losses."""
    d = x.shape[-1]
    joined = torch.cat([F.rms_norm(x[:, :-1], (d,), norms[0]), F.rms_norm(rows[:, 1:], (d,), norms[1])], -1)
    y = F.linear(joined, join)
    first = F.cross_entropy(F.linear(x, head).float().flatten(0, 1), target.flatten())
    return first + 0.3 * F.cross_entropy(F.linear(y, head).float().flatten(0, 1), target[:, 1:].flatten())


def _heads(m: Make, b: int, h: int, n: int, d: int) -> list[Tensor]:
    return [m(b, h, n, d), m(b, h, n, d), m(b, h, n, d)]


FORGET = Sized(forgetting, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(b, h, n) + 3], (2, 2, 9, 8))
STICK = Sized(stick_breaking, _heads, (2, 2, 9, 8))
COPE = Sized(contextual_positions, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(d, n // 2)], (2, 2, 10, 8))
STREAMS = Sized(
    stochastic_streams,
    lambda m, n, s, d: [m(n, s, d), m(s * d), m(s * d, s * s + 2 * s) * (s * d) ** -0.5, m(s * s + 2 * s), weight(m, d, d)],
    (5, 4, 16),
)
EXPERTS = Sized(
    balanced_experts,
    lambda m, n, d, e, h: [
        m(n, d),
        weight(m, e, d),
        m(e).float() * 0.01,
        weight(m, e, h, d),
        weight(m, e, d, h),
        weight(m, d, d),
    ],
    (12, 8, 4, 6),
)

BLOCKS: tuple[Block, ...] = (
    *FORGET.both("forgetting attention", 2, 16, 2048, 64),
    *STICK.both("stick breaking", 2, 12, 1024, 64),
    *COPE.both("contextual positions", 4, 12, 1024, 64),
    Sized(convolved_scores, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), weight(m, h, 1, 6, 11)], (2, 2, 9, 8)).block(
        "convolved scores", 4, 12, 512, 64, training=True
    ),
    Sized(packed_documents, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(b, n)], (2, 2, 9, 8)).block(
        "packed documents", 2, 16, 3000, 64, training=True
    ),
    Sized(
        chunked_delta, lambda m, b, h, n, d: [*_heads(m, b, h, n, d), m(b, h, n), m(b, h, n) + 3], (1, 2, 48, 8), tf32=True
    ).block("chunked delta", 4, 16, 256, 64, training=True),
    *STREAMS.both("stochastic streams", 4096, 4, 1024),
    *EXPERTS.both("balanced experts", 4096, 1024, 32, 512),
    Sized(
        allowed_choice, lambda m, b, v: [m(b, v), ids(m, 2**31, b, -(-v // 32)).to(torch.int32), m(b, v)], (3, 70), SINGLE
    ).block("allowed choice", 64, 128256),
    Sized(
        verified_tree, lambda m, b, t, v, p, d: [m(b, t, v), ids(m, v, b, t), ids(m, t, p, d)], (3, 6, 9, 4, 3), SINGLE
    ).block("verified tree", 8, 64, 32000, 42, 5),
    Sized(entropy_patches, lambda m, b, n, d: [m(b, n, d), m(b, n, 256), weight(m, d, 2 * d)], (2, 9, 8)).block(
        "entropy patches", 8, 4096, 512, training=True
    ),
    Sized(hashed_ngrams, lambda m, b, n, d, t: [ids(m, 256, b, n), m(5, t, d), weight(m, d, d)], (2, 9, 8, 300)).block(
        "hashed ngrams", 8, 4001, 512, 50021, training=True
    ),
    Sized(two_bit_cache, lambda m, b, h, n, d: [m(b, h, 1, d), m(b, h, n, d), m(b, h, n, d)], (2, 2, 64, 32)).block(
        "two bit cache", 8, 8, 4096, 128
    ),
    Sized(nested_sizes, lambda m, n, d: [m(n, d), m(n, d)], (6, 16)).block("nested sizes", 2000, 768, training=True),
    Sized(
        later_tokens,
        lambda m, b, n, d, v: [
            m(b, n, d),
            m(b, n, d),
            m(2, d),
            weight(m, d, 2 * d),
            weight(m, v, d),
            ids(m, v, b, n),
        ],
        (2, 5, 8, 20),
    ).block("later tokens", 2, 1024, 1024, 32000, training=True),
)
