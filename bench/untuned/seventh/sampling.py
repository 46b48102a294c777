"""Blocks of generation: choices of tokens, steps of diffusion, positions, recurrent states, experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def served_choice(logits: Tensor, temperature: Tensor, k: Tensor, p: Tensor, counts: Tensor, noise: Tensor) -> Tensor:
    """A server's sampler: penalties by counts, each row's own temperature, k and p, and a race of exponentials."""
    x = logits.float()
    seen = counts > 0
    x = torch.where(seen, torch.where(x > 0, x / 1.2, x * 1.2), x)
    x = x - 0.3 * counts - 0.2 * seen.to(x.dtype)
    x = x / F.softplus(temperature)[:, None]
    ordered, index = x.sort(-1)
    v = x.shape[-1]
    least = ordered.gather(1, (v - k.clamp(1, v))[:, None])
    ordered = ordered.masked_fill(ordered < least, float("-inf"))
    total = ordered.softmax(-1).cumsum(-1)
    drop = total <= 1 - p.sigmoid()[:, None]
    drop[:, -1] = False
    ordered = ordered.masked_fill(drop, float("-inf"))
    q = torch.empty_like(ordered).scatter(-1, index, ordered).softmax(-1)
    return q.div(noise.abs() + 1e-3).argmax(-1)


def repeated_suffixes(logits: Tensor, tokens: Tensor) -> Tensor:
    """DRY: how long a suffix each earlier place repeats, exponential penalties on the tokens that came after."""
    b, n = tokens.shape
    longest = min(16, n // 2)
    run = torch.ones(b, n - longest, dtype=torch.bool, device=tokens.device)
    length = torch.zeros(b, n - longest, dtype=torch.long, device=tokens.device)
    for i in range(longest):
        same = tokens[:, longest - 1 - i : n - 1 - i] == tokens[:, n - 1 - i, None]
        run = run & same
        length += run
    penalty = torch.where(length >= 2, 0.8 * 1.75 ** (length - 2).float(), 0.0)
    worst = torch.zeros_like(logits).scatter_reduce(1, tokens[:, longest:], penalty.to(logits.dtype), "amax")
    return (logits - worst).log_softmax(-1)


def guided_logits(amateur: Tensor, expert: Tensor, given: Tensor) -> Tensor:
    """Contrastive decoding: guidance by a prompt, the amateur's logits subtracted where the expert finds tokens plausible."""
    given, plain = given.float().log_softmax(-1), expert.float().log_softmax(-1)
    lp = plain + 1.5 * (given - plain)
    lp = lp - lp.logsumexp(-1, keepdim=True)
    plausible = lp >= lp.amax(-1, keepdim=True) - 2.3
    d = 1.5 * lp - 0.5 * amateur.float().log_softmax(-1)
    return d.masked_fill(~plausible, -1e9).softmax(-1)


def packed_grammar(logits: Tensor, mask: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Allowed tokens as bits of int32 words: unpacked, biases added, forbidden ones hidden, the best and its probability."""
    b, v = logits.shape
    shifts = torch.arange(32, device=mask.device, dtype=torch.int32)
    allowed = ((mask[..., None] >> shifts) & 1).bool().view(b, -1)[:, :v]
    x = (logits + bias).masked_fill(~allowed, float("-inf"))
    p = torch.softmax(x, dim=-1, dtype=torch.float32)
    return x.argmax(-1), p.amax(-1)


def green_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """A watermark: tokens whose hash with the last ones is low are favoured; a text's statistic of such tokens."""

    def mixed(t: Tensor) -> Tensor:
        t = (t ^ (t >> 16)) * 73244475 & 0xFFFFFFFF
        t = (t ^ (t >> 16)) * 73244475 & 0xFFFFFFFF
        return t ^ (t >> 16)

    v = torch.arange(logits.shape[-1], device=logits.device)
    seed = mixed(tokens[:, -1] * 31 + tokens[:, -2])
    green = mixed(seed[:, None] + v) % 4 == 0
    past = mixed(mixed(tokens[:, 1:-1] * 31 + tokens[:, :-2]) + tokens[:, 2:]) % 4 == 0
    n = past.shape[1]
    z = (past.sum(1) - n / 4) / (n * 3 / 16) ** 0.5
    return logits + 2.0 * green, z


def diverse_beams(logits: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Groups of beams, each penalised for tokens that earlier groups chose at this step."""
    b, g, k, v = logits.shape
    taken = torch.zeros(b, v, device=logits.device, dtype=logits.dtype)
    found, kept = [], []
    for i in range(g):
        lp = logits[:, i].log_softmax(-1) - 0.5 * taken[:, None]
        total = (lp + scores[:, i, :, None]).view(b, -1)
        top, at = total.topk(k, dim=-1)
        token = at % v
        taken = taken.scatter_add(1, token, torch.ones_like(top))
        found.append(torch.div(at, v, rounding_mode="floor") * v + token)
        kept.append(top)
    return torch.stack(found, 1), torch.stack(kept, 1)


def unmasked_tokens(logits: Tensor, tokens: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """A masked diffusion's step: Gumbel's noise, confidences of masked places, as many unmasked as the schedule says."""
    _b, _n, _v = logits.shape
    masked = tokens % 3 == 0
    x = logits.float() - 0.5 * torch.log(-torch.log(noise.sigmoid().float()))
    guess = x.argmax(-1)
    p = logits.float().softmax(-1)
    confidence = p.gather(-1, guess[..., None]).squeeze(-1)
    confidence = torch.where(masked, confidence, torch.full_like(confidence, float("-inf")))
    count = masked.sum(1, keepdim=True) // 4 + 1
    rank = confidence.argsort(-1, descending=True).argsort(-1)
    take = (rank < count) & masked
    return torch.where(take, guess, tokens), take.sum(1)


def thresholded_step(model: Tensor, x: Tensor, old: Tensor, sigmas: Tensor) -> Tensor:
    """DPM-Solver++ of second order: guidance, the sample's dynamic threshold by a quantile, two differences."""
    cond, free = model.chunk(2)
    eps = free + 7.5 * (cond - free)
    s = F.softplus(sigmas)
    a = torch.rsqrt(1 + s * s)
    x0 = (x - s[1] * a[1] * eps) / a[1]
    q = torch.quantile(x0.abs().flatten(1), 0.995, dim=1).clamp(min=1)[:, None, None, None]
    x0 = torch.clamp(x0, -q, q) / q
    lam = -torch.log(s)
    h, h0 = lam[2] - lam[1], lam[1] - lam[0]
    d1 = (x0 - old) * (h / torch.where(h0.abs() < 0.1, 0.1, h0))
    return (s[2] * a[2] / (s[1] * a[1])) * x - a[2] * torch.expm1(-h) * (x0 + 0.5 * d1)


def rescaled_guidance(pos: Tensor, neg: Tensor, text: Tensor, x: Tensor, noise: Tensor, sigma: Tensor) -> Tensor:
    """Two guidances, deviations rescaled to the conditional's, an ancestral Euler step, in 16 bits."""
    g = neg + 5 * (text - neg) + 2 * (pos - text)
    ratio = text.std((1, 2, 3), keepdim=True) / g.std((1, 2, 3), keepdim=True)
    g = 0.7 * g * ratio + 0.3 * g
    s = F.softplus(sigma).view(-1, 1, 1, 1)
    down, up = s * 0.8, s * 0.36
    d = (x - (x - s * g)) / s
    return (x + d * (down - s) + noise * up).to(x.dtype)


def noise_schedules(model: Tensor, x0: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """A denoiser's loss of predicted velocity: a cosine schedule by index, min-SNR weights, learned variances' bound."""
    steps = torch.linspace(0, 1, 1001, device=x0.device, dtype=x0.dtype)
    f = torch.cos((steps + 0.008) / 1.008 * 1.5707963) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    bar = torch.cumprod(1 - betas, 0)
    a, s = bar[t].sqrt().view(-1, 1, 1, 1), (1 - bar[t]).sqrt().view(-1, 1, 1, 1)
    xt = a * x0 + s * noise
    v = a * noise - s * x0
    got, frac = model.chunk(2, 1)
    snr = bar / (1 - bar)
    w = torch.minimum(snr, torch.full_like(snr, 5.0))[t] / (snr[t] + 1)
    low, high = betas.log()[t].view(-1, 1, 1, 1) - 0.1, betas.log()[t].view(-1, 1, 1, 1)
    logvar = (frac.tanh() + 1) / 2 * high + (1 - (frac.tanh() + 1) / 2) * low
    nll = 0.5 * (logvar - low + torch.exp(low - logvar) - 1 + (got.detach() - v).square() * torch.exp(-logvar) * 1e-4)
    return (w * (got - v).square().mean((1, 2, 3))).mean() + 1e-3 * nll.mean() + 0 * xt.mean()


def blended_tiles(tiles: Tensor) -> Tensor:
    """Decoded tiles of an image, their overlaps mixed by ramps down and to the right, joined."""
    rows, cols, _c, size, _ = tiles.shape
    extent = size // 4
    ramp = torch.arange(extent, device=tiles.device, dtype=tiles.dtype) / extent
    found = []
    for i in range(rows):
        row = []
        for j in range(cols):
            tile = tiles[i, j].clone()
            if i:
                tile[:, :extent] = tiles[i - 1, j][:, -extent:] * (1 - ramp)[:, None] + tile[:, :extent] * ramp[:, None]
            if j:
                tile[..., :extent] = tiles[i, j - 1][..., -extent:] * (1 - ramp) + tile[..., :extent] * ramp
            row.append(tile[:, : size - extent, : size - extent])
        found.append(torch.cat(row, -1))
    return (torch.cat(found, 1) / 2 + 0.5).clamp(0, 1)


def decayed_rotary(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """xPos: rotary halves scaled up in queries and down in keys by position, causal attention by hand."""
    _b, _h, n, d = q.shape
    at = torch.arange(n, device=q.device, dtype=torch.float32)
    inv = 10000 ** (-torch.arange(0, d, 2, device=q.device).float() / d)
    angle = at[:, None] * inv
    zeta = (torch.arange(0, d, 2, device=q.device).float() / d + 0.4) / 1.4
    scale = zeta ** ((at - n // 2) / 512)[:, None]

    def turn(x: Tensor, s: Tensor) -> Tensor:
        a, c = x.float()[..., ::2], x.float()[..., 1::2]
        cos, sin = angle.cos() * s, angle.sin() * s
        return torch.stack([a * cos - c * sin, a * sin + c * cos], -1).flatten(-2).to(x.dtype)

    q, k = turn(q, scale), turn(k, 1 / scale)
    scores = (q @ k.transpose(-1, -2)).float() * d**-0.5
    mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
    p = torch.where(mask, scores, torch.finfo(torch.float32).min).softmax(-1).to(q.dtype)
    return torch.einsum("bhij,bhjd->bhid", p, v)


def kernel_positions(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, power: Tensor) -> Tensor:
    """Kerple: a logarithm of distance with each head's slope and rate, added to causal scores."""
    n = q.shape[-2]
    at = torch.arange(n, device=q.device)
    apart = (at[:, None] - at[None]).abs().to(q.dtype)
    bias = -F.softplus(slope)[:, None, None] * torch.log1p(F.softplus(power)[:, None, None] * apart)
    s = torch.matmul(q, k.mT) / q.shape[-1] ** 0.5 + bias
    s = s.masked_fill(at[:, None] < at[None], float("-inf"))
    return torch.matmul(s.softmax(-1), v)


def taylor_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Based: features of the second-order Taylor series of exp, causal sums in chunks by einsums."""
    _b, _h, n, d = q.shape

    def features(x: Tensor) -> Tensor:
        x = x * d**-0.25
        square = torch.einsum("bhni,bhnj->bhnij", x, x).flatten(-2) * 0.5**0.5
        return torch.cat([torch.ones_like(x[..., :1]), x, square], -1)

    size = 64 if n >= 64 else 3
    fq, fk = (features(t).unflatten(2, (-1, size)) for t in (q, k))
    vv = v.unflatten(2, (-1, size))
    inner = torch.einsum("bhcif,bhcjf->bhcij", fq, fk).tril()
    kv = torch.einsum("bhcjf,bhcjd->bhcfd", fk, vv).cumsum(2)
    ks = fk.sum(3).cumsum(2)
    kv, ks = F.pad(kv, (0, 0, 0, 0, 1, 0))[:, :, :-1], F.pad(ks, (0, 0, 1, 0))[:, :, :-1]
    top = inner @ vv + torch.einsum("bhcif,bhcfd->bhcid", fq, kv)
    low = inner.sum(-1) + torch.einsum("bhcif,bhcf->bhci", fq, ks)
    return (top / (low[..., None] + 1e-6)).flatten(2, 3)


def gated_recurrence(x: Tensor, w_in: Tensor, w_gate: Tensor, lam: Tensor, conv: Tensor) -> Tensor:
    """Griffin's recurrent block: a causal convolution of four, gates, a diagonal recurrence over time in float32."""
    _b, n, d = x.shape
    y, g = F.linear(x, w_in).chunk(2, -1)
    y = F.conv1d(F.pad(y.mT, (3, 0)), conv[:, None], groups=d).mT
    r, i = torch.sigmoid(F.linear(y, w_gate)).chunk(2, -1)
    log_a = -8 * r.float() * F.softplus(lam.float())
    a = log_a.exp()
    u = (1 - (2 * log_a).exp()).clamp(min=1e-6).sqrt() * (i * y).float()
    h, found = torch.zeros_like(u[:, 0]), []
    for t in range(n):
        h = a[:, t] * h + u[:, t]
        found.append(h)
    return torch.stack(found, 1).to(x.dtype) * F.gelu(g)


def test_time_steps(q: Tensor, k: Tensor, v: Tensor, w: Tensor, eta: Tensor) -> Tensor:
    """TTT: each chunk's linear model learns by one step of gradient from its keys and values, then answers queries."""
    b, h, n, d = q.shape
    size = 16 if n >= 16 else 3
    w = w.expand(b, h, d, d)
    found = []
    for i in range(0, n, size):
        qi, ki, vi = (t[:, :, i : i + size] for t in (q, k, v))
        z = F.layer_norm(ki @ w, (d,)) + ki
        error = (z - vi) * torch.sigmoid(eta[:, :, i : i + size, None]) / d
        inner = torch.tril(qi @ ki.mT) @ error
        found.append(qi @ w - inner + qi)
        w = w - ki.mT @ error
    return torch.cat(found, 2)


def chosen_depth(x: Tensor, router: Tensor, norm: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Mixture of depths: an eighth of the tokens pass the layer in order, weighted by the router, the rest as they are."""
    _, n, d = x.shape
    score = (x @ router)[..., 0]
    k = n // 8 if n > 8 else 2
    top, at = score.topk(k, dim=1)
    at, order = at.sort(1)
    top = top.gather(1, order)
    index = at[..., None].expand(-1, -1, d)
    some = x.gather(1, index)
    y = F.rms_norm(some, (d,), norm)
    gate, value = F.linear(y, up).chunk(2, -1)
    y = F.linear(F.silu(gate) * value, down) * torch.sigmoid(top)[..., None]
    return x.scatter_add(1, index, y)


def permuted_tokens(x: Tensor, gate: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Tokens sorted by expert, equal slots an expert, two batched matmuls, sums back by token; a loss of z."""
    n, d = x.shape
    e = len(gate)
    logits = F.linear(x, gate).float()
    p = logits.softmax(-1)
    weights, chosen = p.topk(2, dim=-1)
    weights = weights / weights.sum(-1, keepdim=True)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(e, dtype=torch.long, device=x.device).scatter_add(0, flat, torch.ones_like(flat))
    start = counts.cumsum(0) - counts
    slot = torch.arange(2 * n, device=x.device) - start[flat[order]]
    room = 3 * n // e + 1
    keep = slot < room
    token = order // 2
    buffer = x.new_zeros(e * room + 1, d)
    place = torch.where(keep, flat[order] * room + slot, e * room)
    buffer = buffer.index_copy(0, place, x[token] * keep[:, None].to(x.dtype))
    h = buffer[:-1].view(e, room, d)
    h = torch.bmm(F.gelu(torch.bmm(h, w1)), w2).view(-1, d)
    h = F.pad(h, (0, 0, 0, 1))[place] * (weights.flatten()[order] * keep)[:, None].to(x.dtype)
    out = torch.zeros_like(x).index_add(0, token, h)
    return out + (1e-3 * logits.logsumexp(-1).square().mean()).to(x.dtype)


TAYLOR = Sized(
    taylor_attention, lambda m, b, h, n, d, e: [m(b, h, n, d) * 0.5, m(b, h, n, d) * 0.5, m(b, h, n, e)], (1, 2, 6, 2, 3)
)
XPOS = Sized(decayed_rotary, lambda m, b, h, n, d: [m(b, h, n, d) for _ in range(3)], (2, 2, 7, 4))
KERPLE = Sized(kernel_positions, lambda m, b, h, n, d: [*(m(b, h, n, d) for _ in range(3)), m(h), m(h)], (2, 3, 7, 4))
GRIFFIN = Sized(
    gated_recurrence,
    lambda m, b, n, d: [m(b, n, d), weight(m, 2 * d, d), weight(m, 2 * d, d), m(d), m(d, 4) * 0.5],
    (2, 5, 4),
)
LEARNED = Sized(
    test_time_steps,
    lambda m, b, h, n, d: [m(b, h, n, d), m(b, h, n, d) * 0.3, m(b, h, n, d), weight(m, h, d, d), m(b, h, n)],
    (1, 2, 6, 4),
)
DEPTH = Sized(
    chosen_depth,
    lambda m, b, n, d, h: [m(b, n, d), weight(m, d, 1) * 0 + m(d, 1), m(d), weight(m, 2 * h, d), weight(m, d, h)],
    (2, 7, 6, 8),
)
PERMUTED = Sized(
    permuted_tokens,
    lambda m, n, d, e, h: [m(n, d), m(e, d), weight(m, e, d, h) * h**0.5, weight(m, e, h, d) * d**0.5],
    (9, 6, 3, 4),
)
BLOCKS: tuple[Block, ...] = (
    Sized(
        served_choice,
        lambda m, b, v: [m(b, v) * 3, m(b), ids(m, v, b), m(b) + 2, ids(m, 3, b, v), m(b, v)],
        (3, 30),
    ).block("served choice", 33, 32003),
    Sized(repeated_suffixes, lambda m, b, n, v: [m(b, v), ids(m, 40, b, n)], (3, 12, 50)).block(
        "repeated suffixes", 16, 4001, 50257
    ),
    Sized(guided_logits, lambda m, b, v: [m(b, v) * 3, m(b, v) * 3, m(b, v) * 3], (3, 30)).block("guided logits", 65, 50257),
    Sized(
        packed_grammar,
        lambda m, b, v: [m(b, v), (ids(m, 2**31, b, -(-v // 32)) | 1).to(torch.int32), m(v)],
        (3, 50),
    ).block("packed grammar", 64, 151669),
    Sized(green_tokens, lambda m, b, v, n: [m(b, v), ids(m, v, b, n)], (3, 30, 9)).block("green tokens", 32, 50257, 1001),
    Sized(diverse_beams, lambda m, b, g, k, v: [m(b, g, k, v) * 2, m(b, g, k)], (2, 2, 3, 20), SINGLE).block(
        "diverse beams", 8, 4, 4, 30003
    ),
    Sized(unmasked_tokens, lambda m, b, n, v: [m(b, n, v), ids(m, 99, b, n), m(b, n, v)], (2, 9, 20)).block(
        "unmasked tokens", 8, 64, 32001
    ),
    Sized(
        thresholded_step,
        lambda m, b, h: [m(2 * b, 3, h, h), m(b, 3, h, h), m(b, 3, h, h), m(3)],
        (2, 6),
        SINGLE,
    ).block("thresholded step", 16, 127),
    Sized(
        rescaled_guidance,
        lambda m, b, c, h, w: [*(m(b, c, h, w) for _ in range(5)), m(b)],
        (2, 3, 5, 6),
        HALF,
    ).block("rescaled guidance", 16, 16, 90, 159),
    Sized(
        noise_schedules,
        lambda m, b, c, h: [m(b, 2 * c, h, h), m(b, c, h, h), m(b, c, h, h), ids(m, 1000, b)],
        (3, 2, 5),
        SINGLE,
    ).block("noise schedules", 64, 4, 63, training=True),
    Sized(blended_tiles, lambda m, r, c, k, s: [m(r, c, k, s, s)], (2, 3, 2, 8)).block("blended tiles", 3, 4, 3, 512),
    *XPOS.both("decayed rotary", 2, 12, 1023, 64),
    *KERPLE.both("kernel positions", 2, 12, 1001, 64),
    *TAYLOR.both("taylor attention", 2, 8, 1024, 16, 64),
    *GRIFFIN.both("gated recurrence", 16, 64, 640),
    *LEARNED.both("test time steps", 4, 12, 256, 64),
    *DEPTH.both("chosen depth", 4, 2049, 768, 2048),
    *PERMUTED.both("permuted tokens", 4001, 512, 16, 1024),
)
