"""Blocks of sequences: scores, chunks of bytes, choices of tokens, losses of policies, codecs, series."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

SINGLE, HALF = torch.float32, torch.float16


# ---- scores and layers ----------------------------------------------------------------------------------------------------


def sinks_beside_scores(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """Causal scores with one learned score of nothing for each head beside them, which the softmax counts and drops."""
    b, h, s, d = q.shape
    k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * d**-0.5
    scores = scores + torch.triu(q.new_full((s, s), -math.inf), diagonal=1)
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1)], -1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return torch.matmul(F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1], v).transpose(1, 2)


def outer_heads(x: Tensor, wa: Tensor, wb: Tensor, wo: Tensor) -> Tensor:
    """TPA: queries, keys and values as means of outer ones of what each token gives for heads and for channels."""
    n, s, _ = x.shape
    ranks, h, d = (6, 2, 2), 8, wb.shape[0] // 10
    a = F.linear(x, wa).view(n, s, 10, h).split(ranks, 2)
    b = F.linear(x, wb).view(n, s, 10, d).split(ranks, 2)
    q, k, v = (torch.einsum("nsrh,nsrd->nhsd", u, w) / u.shape[2] for u, w in zip(a, b, strict=True))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(n, s, -1), wo)


def blocks_by_means(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MoBA: each token sees its own block and the three earlier ones whose mean keys it likes the most."""
    s, d, size = q.shape[2], q.shape[3], q.shape[2] // 16
    means = k.unflatten(2, (16, size)).mean(3)
    gate = torch.einsum("bhsd,bhnd->bhsn", q.float(), means.float())
    at = torch.arange(s, device=q.device)
    own = at[:, None] // size
    gate = gate.masked_fill(torch.arange(16, device=q.device) >= own, -math.inf)
    best = gate.topk(3, dim=-1)
    seen = torch.zeros_like(gate, dtype=torch.bool).scatter(-1, best.indices, best.values > -math.inf)
    seen = seen | (torch.arange(16, device=q.device) == own)
    mask = seen.repeat_interleave(size, -1) & (at[None] <= at[:, None])
    scores = (q @ k.mT * d**-0.5).masked_fill(~mask, -math.inf)
    return scores.float().softmax(-1).to(q.dtype) @ v


def indexed_prefill(x: Tensor, iq: Tensor, ik: Tensor, iw: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """A light index scores all pairs by weighted rectified dots; the best 256 of each row are seen, by all heads."""
    s = x.shape[1]
    a, b = F.linear(x, iq).unflatten(-1, (8, -1)), F.linear(x, ik)
    index = (F.relu(torch.einsum("bshd,btd->bsht", a, b)) * F.linear(x, iw)[..., None]).sum(2).float()
    index = index.masked_fill(torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1), -math.inf)
    at = index.topk(min(256, s), dim=-1).indices
    bias = torch.full_like(index, -math.inf).scatter(-1, at, 0.0) + torch.full_like(index[0], -math.inf).triu(1)
    k, v = kv.chunk(2, -1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[:, None].to(q.dtype))


def means_of_layers(x: Tensor, w: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """DenseFormer: after each of six narrow layers a weighted mean of all that came before."""
    past, y = [x], x
    for k in range(6):
        y = y + F.linear(F.silu(F.linear(F.rms_norm(y, y.shape[-1:]), up[k])), down[k])
        past.append(y)
        y = torch.einsum("n,nbsd->bsd", w[k, : len(past)], torch.stack(past))
    return y


def smoothed_chunks(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """H-Net: borders where adjacent tokens are unlike, confident values with a straight-through gradient, chunks repeated."""
    q, k = F.normalize(F.linear(x, w[0]), dim=-1), F.normalize(F.linear(x, w[1]), dim=-1)
    p = 0.5 * (1 - (q[:, 1:] * k[:, :-1]).sum(-1)).float()
    p = torch.cat([torch.ones_like(p[:, :1]), p], 1).clamp(1e-4, 1 - 1e-4)
    border = p > 0.5
    at = border.cumsum(1) - 1
    first = torch.zeros_like(at).scatter_reduce(1, at, torch.arange(x.shape[1], device=x.device).expand_as(at), "amax")
    repeated = torch.gather(x, 1, torch.gather(first, 1, at)[..., None].expand_as(x))
    c = torch.where(border, p, 1 - p)
    c = c + (1 - c).detach()
    ratio = border.float().mean() * p.mean() * 2
    return x * scale + repeated * c[..., None].to(x.dtype) + ratio.to(x.dtype)


def patches_of_bytes(codes: Tensor, lengths: Tensor, table: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Byte embeddings with those of pairs, largest of each patch by scatter, a layer, and bytes that read their patch."""
    x = table[codes] + table[(codes * 31 + F.pad(codes, (1, 0))[:, :-1]) % table.shape[0]]
    at = (lengths == 0).long().cumsum(1)
    n = codes.shape[1] // 3
    at = at.clamp(max=n - 1)[..., None].expand_as(x)
    patches = torch.full_like(x[:, :n], -1e4).scatter_reduce(1, at, x, "amax", include_self=False)
    patches = patches + F.gelu(F.linear(F.rms_norm(patches, patches.shape[-1:]), w))
    return F.linear(x + patches.gather(1, at), out)


def atoms_in_windows(x: Tensor, pair: Tensor, w: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """AlphaFold 3: windows of 32 atoms see the 128 around them, with a bias of pairs and a gate."""
    b, n, d = x.shape
    q, k, v = F.linear(x, w, bias).unflatten(-1, (3, 4, d // 4)).unbind(2)
    k, v = (F.pad(t, (0, 0, 0, 0, 48, 48)).unfold(1, 128, 32).permute(0, 1, 2, 4, 3) for t in (k, v))
    q = q.unflatten(1, (n // 32, 32)).transpose(2, 3)
    scores = q @ k.mT * (d // 4) ** -0.5 + pair
    at = torch.arange(n // 32, device=x.device)[:, None] * 32 + torch.arange(128, device=x.device) - 48
    scores = scores.masked_fill(((at < 0) | (at >= n))[:, None, None], -1e4)
    y = (scores.softmax(-1) @ v).transpose(2, 3).reshape(b, n, d)
    return y * torch.sigmoid(F.linear(x, gate))


def decayed_by_distance(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """RMT: scores of pixels times decays by their city-block distance."""
    n = math.isqrt(q.shape[2])
    at = torch.arange(n, device=q.device)
    y, x = torch.meshgrid(at, at, indexing="ij")
    grid = torch.stack([y, x], -1).reshape(-1, 2)
    far = (grid[:, None] - grid[None]).abs().sum(-1)
    mask = far * torch.log(1 - 2 ** (-2 - slopes.abs())).view(-1, 1, 1)
    p = (q @ k.mT * q.shape[-1] ** -0.5 + mask.to(q.dtype)).softmax(-1)
    return (p @ v).transpose(1, 2).flatten(2)


# ---- choices and drafts ---------------------------------------------------------------------------------------------------


def free_tails(logits: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Curved logits, tokens within one deviation of the best, a tail cut by second differences, a token."""
    z = logits - 0.2 * (logits - logits.amax(-1, keepdim=True)).square()
    z = z.masked_fill(z < z.amax(-1, keepdim=True) - 1.5 * z.std(-1, keepdim=True), -math.inf)
    ordered, at = torch.sort(z, descending=True, dim=-1)
    bend = ordered.softmax(-1).diff(dim=-1).diff(dim=-1).abs()
    mass = (bend / bend.sum(-1, keepdim=True)).cumsum(-1)
    gone = F.pad(mass > 0.95, (1, 1), value=False)
    gone[..., -1] = True
    kept = z.masked_fill(torch.zeros_like(gone).scatter(-1, at, gone), -math.inf)
    return (kept.softmax(-1) / (noise.abs() + 1e-3)).argmax(-1), kept.exp().sum(-1)


def layers_in_contrast(layers: Tensor, words: Tensor, tokens: Tensor) -> Tensor:
    """DoLa: the early layer whose words are the least like the last's, its logits taken off, within a plausible set."""
    logits = torch.matmul(layers, words.t()).float()
    last, early = logits[-1], logits[:-1]
    p, q = last.softmax(-1)[None], early.softmax(-1)
    middle = 0.5 * (p + q)
    kl = F.kl_div(middle.log(), p.expand_as(q), reduction="none").mean(-1)
    kl = kl + F.kl_div(middle.log(), q, reduction="none").mean(-1)
    picked = early.gather(0, kl.argmax(0)[None, :, None].expand(1, -1, early.shape[-1]))[0]
    plausible = last >= last.amax(-1, keepdim=True) + math.log(0.1)
    out = (last.log_softmax(-1) - picked.log_softmax(-1)).masked_fill(~plausible, -1e3).log_softmax(-1)
    return out.gather(-1, tokens[:, None]).squeeze(-1)


def candidates_of_heads(x: Tensor, w: Tensor, words: Tensor, tree: Tensor) -> tuple[Tensor, Tensor]:
    """Medusa: four heads behind residual layers, the ten best words of each, all branches of a tree of them."""
    y = x[None] + F.silu(torch.einsum("nd,hed->hne", x, w))
    logits = torch.cat([x[None], y]) @ words.t()
    best = logits[0].argmax(-1, keepdim=True)
    values, at = logits[1:].float().log_softmax(-1).topk(10, dim=-1)
    flat = torch.cat([best, at.transpose(0, 1).flatten(1)], 1)
    sure = torch.cat([torch.zeros_like(best, dtype=torch.float32), values.transpose(0, 1).flatten(1)], 1)
    return flat[:, tree], sure[:, tree].cumsum(-1)


def drafted_features(hidden: Tensor, seen: Tensor, target: Tensor, w: Tensor, words: Tensor) -> Tensor:
    """EAGLE's training: features and embeddings to the next feature; smooth distances and the teacher's words."""
    guess = F.linear(torch.cat([seen, hidden], -1), w)
    near = F.smooth_l1_loss(guess, target.detach(), reduction="none").mean(-1)
    p = F.linear(target, words).detach().float().softmax(-1)
    words_loss = -(p * F.linear(guess, words).float().log_softmax(-1)).sum(-1)
    return (near.float() + 0.1 * words_loss).mean()


# ---- losses of policies ---------------------------------------------------------------------------------------------------


def ratios_of_sequences(logits: Tensor, tokens: Tensor, old: Tensor, ref: Tensor, gain: Tensor, mask: Tensor) -> Tensor:
    """GSPO: ratios of whole answers with tokens' gradients, advantages within groups of eight, KL and entropy."""
    z = logits.float()
    all_of = torch.logsumexp(z, -1)
    logp = z.gather(-1, tokens[..., None]).squeeze(-1) - all_of
    entropy = all_of - (z.softmax(-1) * z).sum(-1)
    m = (mask > -1).float()
    number = m.sum(-1).clamp(min=1)
    change = ((logp - old.detach()) * m).sum(-1) / number
    ratio = torch.exp((logp - logp.detach() + change.detach()[:, None]).clamp(max=10))
    groups = gain.view(-1, 8)
    a = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1).detach()
    gone = ref.detach() - logp
    kl = gone.exp() - gone - 1
    loss = torch.max(-a * ratio, -a * ratio.clamp(1 - 3e-2, 1 + 4e-2)) + 0.04 * kl - 1e-3 * entropy
    return ((loss * m).sum(-1) / number).mean()


def margins_of_means(x: Tensor, words: Tensor, labels: Tensor) -> Tensor:
    """SimPO with IPO beside: mean log-probabilities of labels that are there, pairs, a margin, the chosen one's likelihood."""
    logits = F.linear(x[:, :-1], words).float()
    there = labels[:, 1:] != 0
    picked = logits.log_softmax(-1).gather(2, labels[:, 1:].unsqueeze(2)).squeeze(2)
    mean = (picked * there).sum(-1) / there.sum(-1).clamp(min=1)
    chosen, rejected = mean.chunk(2)
    ratio = chosen - rejected
    return -F.logsigmoid(2.5 * ratio - 1.4).mean() + (ratio - 0.5).pow(2).mean() - 0.1 * chosen.mean()


def truncated_critics(q: Tensor, following: Tensor, reward: Tensor, logp: Tensor) -> Tensor:
    """TQC: atoms of five critics sorted together, the largest dropped, Huber quantiles against all that remain."""
    n = q.shape[-1]
    target = following.flatten(1).sort(-1).values[:, : 5 * n - 2 * 5]
    target = (reward[:, None] + 0.99 * (target - 0.2 * logp[:, None])).detach()
    delta = target[:, None, None] - q[..., None]
    size = delta.abs()
    huber = torch.where(size > 1, size - 0.5, 0.5 * delta.square())
    tau = (torch.arange(n, device=q.device, dtype=q.dtype) + 0.5) / n
    return ((tau[None, None, :, None] - (delta < 0).to(q.dtype)).abs() * huber).mean()


def balanced_latents(prior: Tensor, post: Tensor, noise: Tensor, w: Tensor) -> Tensor:
    """Dreamer: 32 categories with a share of uniform, a straight-through sample, both KLs above one nat, a decoder."""
    n = prior.shape[-1]
    p, q = (0.99 * t.softmax(-1) + 0.01 / n for t in (prior, post))
    at = (q.detach().log() + noise).argmax(-1)
    sample = F.one_hot(at, n).to(q.dtype) + q - q.detach()

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a.log() - b.log())).sum((-2, -1)).clamp(min=1.0)

    symlog = F.linear(sample.flatten(1), w)
    wide = symlog.sign() * (symlog.abs().exp() - 1)
    return (kl(q.detach(), p) + 0.1 * kl(q, p.detach())).mean() + 1e-3 * wide.square().clamp(max=50.0).mean()


def returns_between(returns: Tensor, states: Tensor, actions: Tensor, w: Tensor, times: Tensor, out: Tensor) -> Tensor:
    """Decision transformer: returns, states and actions one after another, times added, a layer of heads, actions read."""
    b, t, _ = states.shape
    ws, wa, wr, qkv = w.split([states.shape[2], actions.shape[2], 1, w.shape[1] - states.shape[2] - actions.shape[2] - 1], 1)
    parts = (F.linear(returns[..., None], wr), F.linear(states, ws), F.linear(actions, wa))
    x = torch.stack([p + times for p in parts], 1).permute(0, 2, 1, 3).reshape(b, 3 * t, -1)
    d = x.shape[-1]
    x = F.layer_norm(x, (d,))
    q, k, v = (F.linear(x, m).view(b, 3 * t, -1, 32).transpose(1, 2) for m in qkv.chunk(3, 1))
    y = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, 3 * t, d)
    return torch.tanh(F.linear(y.view(b, t, 3, d)[:, :, 1], out))


# ---- codecs and series ----------------------------------------------------------------------------------------------------


def split_bands(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Bands of a spectrum, wider with height, each with a norm and a layer of its own, and masks back."""
    sizes = [4] * 10 + [8] * 8 + [16] * 6
    at, parts = 0, []
    for k, size in enumerate(sizes):
        band = x[..., at : at + size]
        parts.append(F.linear(F.layer_norm(band, (size,)), w[k, :, :size]))
        at += size
    z = torch.tanh(torch.stack(parts, 2))
    masks = [F.linear(z[:, :, k], out[k, :size]) for k, size in enumerate(sizes)]
    return x * torch.cat(masks, -1).sigmoid()


def learned_bands(x: Tensor, low: Tensor, width: Tensor, w: Tensor) -> Tensor:
    """SincNet: filters made of two learned frequencies each, a strided convolution, pools, a norm."""
    k = (torch.arange(251, device=x.device, dtype=torch.float32) - 125) / 16000
    f1 = 50 + low.abs() * 3000
    f2 = (f1 + 50 + width.abs() * 2000).clamp(max=8000)
    window = 0.54 + 0.46 * torch.cos(math.pi * torch.arange(251, device=x.device) / 125 - math.pi)
    bands = 2 * f2[:, None] * torch.sinc(2 * f2[:, None] * k) - 2 * f1[:, None] * torch.sinc(2 * f1[:, None] * k)
    bands = bands / (2 * (f2 - f1))[:, None] * window
    y = F.max_pool1d(F.conv1d(x, bands[:, None], stride=5).abs(), 3)
    y = F.leaky_relu(F.layer_norm(y, y.shape[-1:]), 0.2)
    return F.conv1d(y, w, padding=2).mean((1, 2))


def squeezed_residuals(x: Tensor, a: Tensor, w: Tensor, b: Tensor, s1: Tensor, s2: Tensor) -> Tensor:
    """ECAPA: a 1x1 layer, eight parts each with a dilated convolution of itself and the part before, a squeeze."""
    y = F.batch_norm(F.relu(F.conv1d(x, a)), None, None, training=True)
    parts, last = [], None
    for k, part in enumerate(y.chunk(8, 1)):
        here = part if last is None else F.relu(F.conv1d(part + last, w[k - 1], padding=3, dilation=3))
        last = None if k == 0 else here
        parts.append(here)
    y = F.batch_norm(F.relu(F.conv1d(torch.cat(parts, 1), b)), None, None, training=True)
    gate = torch.sigmoid(F.conv1d(F.relu(F.conv1d(y.mean(2, keepdim=True), s1)), s2))
    y = x + y * gate
    p = F.softmax(y.float(), 2)
    mean = (p * y).sum(2)
    return torch.cat([mean, ((p * y * y).sum(2) - mean.square()).clamp(min=1e-6).sqrt()], 1)


def moved_codebook(x: Tensor, codes: Tensor, counts: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
    """A quantiser's step: the nearest code, counts and sums that follow slowly, rare codes taken from the batch."""
    far = x.square().sum(1, keepdim=True) - 2 * x @ codes.t() + codes.square().sum(1)
    at = far.argmin(1)
    number = torch.bincount(at, minlength=codes.shape[0]).to(x.dtype)
    counts = counts * 0.99 + number * 0.01
    sums = sums * 0.99 + torch.zeros_like(sums).index_add(0, at, x) * 0.01
    total = counts.sum()
    near = (counts + 1e-5) / (total + codes.shape[0] * 1e-5) * total
    fresh = torch.where((counts < 0.02)[:, None], x[: codes.shape[0]], sums / near[:, None])
    share = number / number.sum()
    return codes[at], fresh, counts, torch.exp(-(share * (share + 1e-10).log()).sum())


def signs_as_codes(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Look-up free codes: signs with a straight-through gradient, entropies of each group of nine bits, a commitment."""
    z = F.linear(x, w)
    q = torch.where(z > 0, 1.0, -1.0).to(z.dtype)
    bits = torch.arange(512, device=x.device)[:, None] >> torch.arange(9, device=x.device) & 1
    book = (bits * 2 - 1).to(z.dtype)
    p = (z.unflatten(-1, (-1, 9)) @ book.t() * 2).float().softmax(-1)
    each = -(p * (p + 1e-8).log()).sum(-1).mean()
    mean = p.flatten(0, 1).mean(0)
    batch = -(mean * (mean + 1e-8).log()).sum(-1).mean()
    y = F.linear(z + (q - z).detach(), out)
    return (y - x).float().square().mean() + 0.1 * (each - batch) + 0.25 * (z - q.detach()).float().square().mean()


def seasonal_smoothing(y: Tensor, rates: Tensor, season: Tensor) -> Tensor:
    """Holt and Winters: level, trend and a season of twelve over 60 months, the squared errors of the next step."""
    a, b, c = rates.sigmoid().unbind(-1)
    level, trend = y[:, 0], torch.zeros_like(y[:, 0])
    seasons = list(season.unbind(1))
    errors = []
    for t in range(1, y.shape[1]):
        guess = level + trend + seasons[t % 12]
        errors.append(y[:, t] - guess)
        new = a * (y[:, t] - seasons[t % 12]) + (1 - a) * (level + trend)
        trend = b * (new - level) + (1 - b) * trend
        seasons[t % 12] = c * (y[:, t] - new) + (1 - c) * seasons[t % 12]
        level = new
    return torch.stack(errors, 1).square().mean()


def pooled_forecasts(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """N-HiTS: three stacks that see the rest pooled by 8, 4 and 1, few numbers interpolated to past and future."""
    rest, forecast = x, x.new_zeros(x.shape[0], 96)
    for k, (pool, number) in enumerate(((8, 12), (4, 24), (1, 96))):
        y = F.max_pool1d(rest[:, None], pool, pool, ceil_mode=True)[:, 0]
        y = F.relu(F.linear(F.relu(F.linear(y, w1[k, :, : y.shape[1]])), w2[k]))
        theta = F.linear(y, w3[k, : x.shape[1] + number])
        rest = rest - theta[:, : x.shape[1]]
        forecast = forecast + F.interpolate(theta[:, None, x.shape[1] :], size=96, mode="linear", align_corners=False)[:, 0]
    return (forecast - x.mean(1, keepdim=True)).square().mean() + 0.1 * rest.abs().mean()


def evens_and_odds(x: Tensor, w: Tensor) -> Tensor:
    """SCINet: two levels that split even and odd steps, scale each by the other's exponent and add; steps put back."""

    def level(y: Tensor, k: int) -> Tensor:
        even, odd = y[..., ::2], y[..., 1::2]
        padded = [F.pad(t, (2, 2), mode="replicate") for t in (even, odd)]
        e, o = (torch.tanh(F.conv1d(F.leaky_relu(p), w[k, j], groups=1)) for j, p in enumerate(padded))
        d, c = odd * e.exp(), even * o.exp()
        c, d = (
            c + F.conv1d(F.pad(d, (2, 2), mode="replicate"), w[k, 2]),
            d - F.conv1d(F.pad(c, (2, 2), mode="replicate"), w[k, 3]),
        )
        if k < 1:
            c, d = level(c, k + 1), level(d, k + 1)
        return torch.stack([c, d], -1).flatten(-2)

    return x + level(x, 0)


def liquid_cells(x: Tensor, w: Tensor, u: Tensor, tau: Tensor, a: Tensor) -> Tensor:
    """Liquid time constants: sixteen steps, four implicit ones inside each, states pulled to learned targets."""
    h = torch.zeros_like(x[0] @ w.t())
    inputs = x @ w.t()
    for t in range(x.shape[0]):
        for _ in range(4):
            f = torch.sigmoid(inputs[t] + h @ u.t())
            h = (h + 0.25 * f * a) / (1 + 0.25 * (F.softplus(tau) + f))
    return h


SINKS = Sized(
    sinks_beside_scores,
    lambda m, b, h, k, s, d: [m(b, h, s, d), m(b, k, s, d), m(b, k, s, d), m(h)],
    (2, 4, 2, 9, 8),
)
OUTER = Sized(
    outer_heads,
    lambda m, b, s, e, d: [m(b, s, e), weight(m, 80, e), weight(m, 10 * d, e), weight(m, e, 8 * d)],
    (2, 7, 24, 8),
)
BYTES = Sized(
    patches_of_bytes,
    lambda m, b, s, v, d: [ids(m, v, b, s), ids(m, 4, b, s), m(v, d), weight(m, d, d), weight(m, d, d)],
    (2, 30, 50, 16),
)
ATOMS = Sized(
    atoms_in_windows,
    lambda m, b, n, d: [m(b, n, d), m(b, n // 32, 4, 32, 128), weight(m, 3 * d, d), m(3 * d), weight(m, d, d)],
    (1, 96, 16),
)
ECAPA = Sized(
    squeezed_residuals,
    lambda m, b, c, t: [
        m(b, c, t),
        weight(m, c, c, 1),
        m(7, c // 8, c // 8, 3) * (c // 8 * 3) ** -0.5,
        weight(m, c, c, 1),
        weight(m, c // 4, c, 1),
        weight(m, c, c // 4, 1),
    ],
    (3, 16, 20),
)
BANDS = Sized(split_bands, lambda m, b, t, n: [m(b, t, 200), m(24, n, 16) * 0.25, m(24, 16, n) * n**-0.5], (2, 3, 5), SINGLE)
BLOCKS: tuple[Block, ...] = (
    SINKS.block("sinks beside scores", 2, 16, 4, 768, 64, training=True),
    OUTER.block("outer heads", 4, 2047, 1024, 64),
    Sized(blocks_by_means, lambda m, b, h, s, d: [m(b, h, s, d), m(b, h, s, d), m(b, h, s, d)], (1, 2, 64, 8), HALF).block(
        "blocks by means", 1, 16, 2048, 128
    ),
    Sized(
        indexed_prefill,
        lambda m, b, s, d, h: [
            m(b, s, d),
            weight(m, 256, d),
            weight(m, 32, d),
            weight(m, 8, d),
            m(b, h, s, 64),
            m(b, 1, s, 128).expand(-1, h, -1, -1),
        ],
        (2, 9, 16, 2),
    ).block("indexed prefill", 2, 1536, 1024, 16),
    Sized(
        means_of_layers,
        lambda m, b, s, d, e: [m(b, s, d), m(6, 7) * 0.3, m(6, e, d) * d**-0.5, m(6, d, e) * e**-0.5],
        (2, 3, 16, 8),
    ).block("means of layers", 4, 1023, 512, 256, training=True),
    Sized(smoothed_chunks, lambda m, b, s, d: [m(b, s, d), weight(m, 2, d, d) * d**0.5, m(d)], (2, 12, 16)).block(
        "smoothed chunks", 4, 4095, 512, training=True
    ),
    BYTES.block("patches of bytes", 4, 2400, 30011, 384, training=True),
    ATOMS.block("atoms in windows", 4, 4096, 128),
    Sized(
        decayed_by_distance, lambda m, b, h, n, d: [m(b, h, n * n, d), m(b, h, n * n, d), m(b, h, n * n, d), m(h)], (2, 3, 4, 8)
    ).block("decayed by distance", 16, 8, 21, 32, training=True),
    Sized(free_tails, lambda m, b, v: [m(b, v) * 2, m(b, v)], (3, 60), SINGLE).block("free tails", 48, 50257),
    Sized(layers_in_contrast, lambda m, n, t, d, v: [m(n, t, d), weight(m, v, d), ids(m, v, t)], (3, 4, 8, 30)).block(
        "layers in contrast", 9, 60, 1024, 32003
    ),
    Sized(
        candidates_of_heads,
        lambda m, n, d, v, t: [m(n, d), m(4, d, d) * d**-0.5, weight(m, v, d), ids(m, 41, t, 5)],
        (3, 16, 50, 6),
    ).block("candidates of heads", 12, 2048, 32003, 64),
    Sized(
        drafted_features,
        lambda m, b, s, d, v: [m(b, s, d), m(b, s, d), m(b, s, d), weight(m, d, 2 * d), weight(m, v, d)],
        (2, 3, 8, 30),
    ).block("drafted features", 2, 700, 1024, 16001, training=True),
    Sized(
        ratios_of_sequences,
        lambda m, b, s, v: [m(b, s, v), ids(m, v, b, s), m(b, s) * 0.1 - 4, m(b, s) * 0.1 - 4, m(b).float(), m(b, s)],
        (8, 5, 30),
    ).block("ratios of sequences", 16, 130, 32003, training=True),
    Sized(margins_of_means, lambda m, b, s, d, v: [m(b, s, d), weight(m, v, d), ids(m, v, b, s)], (4, 6, 8, 30)).block(
        "margins of means", 8, 300, 768, 16001, training=True
    ),
    Sized(truncated_critics, lambda m, b, n: [m(b, 5, n), m(b, 5, n), m(b), m(b)], (4, 7), SINGLE).block(
        "truncated critics", 512, 25, training=True
    ),
    Sized(
        balanced_latents,
        lambda m, b, c, n, o: [m(b, c, n), m(b, c, n), m(b, c, n).float(), weight(m, o, c * n)],
        (3, 4, 5, 6),
        SINGLE,
    ).block("balanced latents", 1024, 32, 32, 512, training=True),
    Sized(
        returns_between,
        lambda m, b, t, s, a, d: [
            m(b, t),
            m(b, t, s),
            m(b, t, a),
            weight(m, d, s + a + 1 + 3 * d),
            m(t, d),
            weight(m, a, d),
        ],
        (2, 5, 7, 3, 64),
    ).block("returns between", 64, 20, 17, 6, 128, training=True),
    BANDS.block("split bands", 8, 300, 64),
    Sized(
        learned_bands, lambda m, b, t, c: [m(b, 1, t), m(c).abs(), m(c).abs(), weight(m, 24, c, 5)], (2, 600, 4), SINGLE
    ).block("learned bands", 16, 3200, 80, training=True),
    ECAPA.block("squeezed residuals", 32, 512, 301),
    Sized(moved_codebook, lambda m, n, d, k: [m(n, d), m(k, d), m(k).abs(), m(k, d)], (40, 6, 9), SINGLE).block(
        "moved codebook", 16001, 64, 1024
    ),
    Sized(signs_as_codes, lambda m, b, n, d: [m(b, n, d), weight(m, 18, d), weight(m, d, 18)], (2, 5, 8)).block(
        "signs as codes", 16, 256, 256, training=True
    ),
    Sized(seasonal_smoothing, lambda m, n, t: [m(n, t), m(n, 3), m(n, 12)], (5, 15), SINGLE).block(
        "seasonal smoothing", 30011, 60, training=True
    ),
    Sized(
        pooled_forecasts,
        lambda m, n, t, h: [m(n, t), m(3, h, t) * t**-0.5, m(3, h, h) * h**-0.5, m(3, t + 96, h) * h**-0.5],
        (4, 40, 8),
        SINGLE,
    ).block("pooled forecasts", 2048, 480, 256, training=True),
    Sized(evens_and_odds, lambda m, b, c, t: [m(b, c, t), m(2, 4, c, c, 5) * (5 * c) ** -0.5], (2, 3, 16), SINGLE).block(
        "evens and odds", 64, 21, 384, training=True
    ),
    Sized(
        liquid_cells, lambda m, t, b, d, h: [m(t, b, d), weight(m, h, d), weight(m, h, h), m(h), m(h)], (4, 3, 5, 8), SINGLE
    ).block("liquid cells", 16, 1024, 64, 128),
)
