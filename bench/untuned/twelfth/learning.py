"""Values and policies, distances of sets, optimisers, likelihoods, tables, series, and losses of embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE = torch.float32


# ---- values and policies --------------------------------------------------------------------------------------------------


def smoothed_histograms(x: Tensor, w: Tensor, bias: Tensor, target: Tensor) -> Tensor:
    """HL-Gauss: targets as normal masses of 101 bins by differences of erf, cross-entropy of a linear head, values back."""
    edges = torch.linspace(-10, 10, w.shape[0] + 1, device=x.device)
    mass = torch.special.erf((edges - target.float().clamp(-9.5, 9.5)[:, None]) / (math.sqrt(2.0) * 0.75 * 0.2))
    p = (mass[:, 1:] - mass[:, :-1]) / (mass[:, -1:] - mass[:, :1])
    logits = F.linear(x, w, bias).float()
    centres = (edges[1:] + edges[:-1]) / 2
    value = (logits.softmax(-1) * centres).sum(-1)
    return -(p * logits.log_softmax(-1)).sum(-1).mean() + 1e-3 * (value - target).abs().mean()


def sampled_quantiles(x: Tensor, tau: Tensor, aim: Tensor, we: Tensor, w1: Tensor, w2: Tensor, act: Tensor) -> Tensor:
    """Implicit quantiles: cosines of sampled levels through a layer times features, a head, Huber's loss of all pairs."""
    level = torch.sigmoid(tau)
    waves = torch.cos(math.pi * torch.arange(1, we.shape[1] + 1, device=x.device) * level[..., None])
    y = x[:, None] * F.relu(F.linear(waves, we))
    q = F.linear(F.relu(F.linear(y, w1)), w2)
    q = q.gather(2, act[:, None, None].expand(-1, q.shape[1], 1))
    far = aim[:, None] - q
    huber = torch.where(far.abs() <= 1, 0.5 * far.square(), far.abs() - 0.5)
    return ((level[..., None] - (far.detach() < 0).float()).abs() * huber).sum(1).mean(1).mean()


def improved_policies(
    q: Tensor, mean: Tensor, log_std: Tensor, old: Tensor, old_std: Tensor, noise: Tensor, duals: Tensor
) -> Tensor:
    """MPO: weights of sampled actions by a temperature that has a loss, likelihoods with mean and spread apart, two bounds."""
    eta, alpha, beta = F.softplus(duals).unbind()
    std, before = log_std.clamp(-3, 1).exp(), old_std.clamp(-3, 1).exp()
    actions = (old + before * noise).detach()
    q = q.detach()
    p = (q / (eta.detach() + 0.1)).softmax(0)
    temperature = eta * (0.1 + (torch.logsumexp(q / (eta + 0.1), 0) - math.log(q.shape[0])).mean())

    def likelihood(m: Tensor, s: Tensor) -> Tensor:
        return (-0.5 * ((actions - m) / s).square() - s.log() - 0.5 * math.log(2 * math.pi)).sum(-1)

    policy = -(p * (likelihood(mean, before.detach()) + likelihood(old.detach(), std))).sum(0).mean()
    far = (0.5 * ((mean - old.detach()) / before.detach()).square()).sum(-1).mean()
    wide = (torch.log(std / before.detach()) + before.detach().square() / (2 * std.square()) - 0.5).sum(-1).mean()
    bound = alpha.detach() * far + alpha * (0.01 - far.detach()) + beta.detach() * wide + beta * (0.001 - wide.detach())
    return policy + temperature + bound


def cautious_values(
    state: Tensor, actions: Tensor, log_p: Tensor, target: Tensor, w1: Tensor, w2: Tensor, w3: Tensor
) -> Tensor:
    """CQL: two critics on given, random and policy actions, logsumexps with densities taken off, squared errors beside."""
    n = actions.shape[0]
    pair = torch.cat([state.expand(n, -1, -1), actions], -1)
    y = torch.einsum("nbi,koi->nkbo", pair, w1)
    y = torch.einsum("nkbo,kpo->nkbp", F.relu(y), w2)
    q = torch.einsum("nkbp,kp->nkb", F.relu(y), w3)
    rest = q[1:] - log_p[1:, None]
    push = torch.logsumexp(rest, 0) - q[0]
    return (q[0] - target).square().mean() + 5.0 * push.mean()


def percentile_returns(reward: Tensor, go_on: Tensor, value: Tensor, logits: Tensor, act: Tensor) -> Tensor:
    """Dreamer's actor: lambda returns from the last step backward, scaled by percentiles of all, entropy, a critic beside."""
    stay = torch.sigmoid(go_on) * 0.997
    last, returns = value[-1], []
    for t in range(reward.shape[0] - 2, -1, -1):
        last = reward[t + 1] + stay[t + 1] * (0.05 * value[t + 1] + 0.95 * last)
        returns.append(last)
    returns = torch.stack(returns[::-1])
    low, high = torch.quantile(returns.detach().flatten(), torch.tensor([0.05, 0.95], device=reward.device).to(reward.dtype))
    gain = (returns - value[:-1]).detach() / (high - low).clamp(min=1)
    log = logits.log_softmax(-1)[:-1]
    chosen = log.gather(-1, act[:-1, :, None])[..., 0]
    weights = torch.cumprod(torch.cat([torch.ones_like(stay[:1]), stay[1:-1]]), 0).detach()
    entropy = -(log.exp() * log).sum(-1)
    return -(weights * (chosen * gain + 3e-4 * entropy)).mean() + (weights * (value[:-1] - returns.detach()).square()).mean()


# ---- distances of sets ----------------------------------------------------------------------------------------------------


def debiased_transport(x: Tensor, y: Tensor, a: Tensor) -> Tensor:
    """A Sinkhorn divergence in logarithms: three pairs of clouds, widths that shrink, symmetric steps, the mean of both."""
    log_a = a.log_softmax(-1)
    log_b = torch.full_like(log_a, -math.log(y.shape[1]))

    def cost(u: Tensor, v: Tensor) -> Tensor:
        return 0.5 * (u[:, :, None] - v[:, None]).square().sum(-1)

    xy, xx, yy = cost(x, y), cost(x, x), cost(y, y)
    f, g, p, q = (torch.zeros_like(log_a) for _ in range(4))
    for eps in (4.0, 1.0, 0.25, 0.25):
        f_new = -eps * torch.logsumexp(log_b[:, None] + (g[:, None] - xy) / eps, 2)
        g_new = -eps * torch.logsumexp(log_a[:, :, None] + (f[:, :, None] - xy) / eps, 1)
        p = 0.5 * (p - eps * torch.logsumexp(log_a[:, None] + (p[:, None] - xx) / eps, 2))
        q = 0.5 * (q - eps * torch.logsumexp(log_b[:, None] + (q[:, None] - yy) / eps, 2))
        f, g = 0.5 * (f + f_new), 0.5 * (g + g_new)
    return ((log_a.exp() * (f - p)).sum(1) + (g - q).mean(1)).mean()


def matched_geometries(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Entropic Gromov and Wasserstein: distances within both clouds, four rounds of a plan's cost and five scalings each."""
    a, b = (torch.cdist(t, t, compute_mode="donot_use_mm_for_euclid_dist") for t in (x, y))
    n, m = a.shape[1], b.shape[1]
    plan = torch.full((x.shape[0], n, m), 1 / (n * m), device=x.device, dtype=x.dtype)
    fixed = (a.square().mean(2)[:, :, None] + b.square().mean(2)[:, None]) * 1.0
    for _ in range(4):
        cost = fixed - 2 * a @ plan @ b
        kernel = torch.exp(-(cost - cost.amin((1, 2), keepdim=True)) / 0.5)
        u, v = torch.ones_like(kernel[:, :, :1]), torch.ones_like(kernel[:, :1])
        for _ in range(5):
            u = 1 / n / (kernel * v).sum(2, keepdim=True)
            v = 1 / m / (kernel * u).sum(1, keepdim=True)
        plan = u * kernel * v
    return plan, ((fixed - 2 * a @ plan @ b) * plan).sum((1, 2))


def auctioned(value: Tensor) -> tuple[Tensor, Tensor]:
    """An auction: sixteen rounds in which those without an object bid what the best is above the second for all at once."""
    b, n, m = value.shape
    price, owner = value.new_zeros(b, m), torch.full((b, m), -1, dtype=torch.int64, device=value.device)
    mine = torch.full((b, n), -1, dtype=torch.int64, device=value.device)
    for _ in range(16):
        best, at = (value - price[:, None]).topk(2, dim=-1)
        bid = torch.where(mine < 0, best[..., 0] - best[..., 1] + 0.05, -math.inf)
        offer = torch.full((b, n, m), -math.inf, device=value.device, dtype=value.dtype).scatter(2, at[..., :1], bid[..., None])
        most, who = offer.max(1)
        sold = most > -math.inf
        owner = torch.where(sold, who, owner)
        price = torch.where(sold, price + most, price)
        has = owner[:, None] == torch.arange(n, device=value.device)[:, None]
        mine = torch.where(has.any(-1), has.to(torch.int8).argmax(-1), -1)
    return mine, price


# ---- optimisers -----------------------------------------------------------------------------------------------------------


def eigenbasis_steps(w: Tensor, g: Tensor, m: Tensor, v: Tensor, left: Tensor, right: Tensor, ql: Tensor, qr: Tensor) -> None:
    """SOAP: Shampoo's two statistics in place, the gradient and moments turned into their bases, Adam there, and back."""
    left.lerp_(g @ g.T, 0.05)
    right.lerp_(g.T @ g, 0.05)
    turned = ql.T @ g @ qr
    m.lerp_(g, 0.05)
    v.mul_(0.95).addcmul_(turned, turned, value=0.05)
    step = (ql.T @ m @ qr) / (v.abs().sqrt() + 1e-8)
    w.mul_(1 - 3e-5).sub_(3e-3 * (ql @ step @ qr.T))


def triangular_factors(g: Tensor, ql: Tensor, qr: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """PSGD by Kronecker factors: triangles times gradients, a relative step of both by norms, the gradient whitened."""
    ql, qr = ql.triu(), qr.triu()
    a = ql @ g @ qr.T
    b = torch.linalg.solve_triangular(qr, noise, upper=True, left=False)
    b = torch.linalg.solve_triangular(ql.T, b, upper=False)

    def stepped(q: Tensor, one: Tensor, two: Tensor) -> Tensor:
        return q - 0.1 / ((one + two).abs().amax() + 1e-8) * (one - two).triu() @ q

    ql, qr = stepped(ql, a @ a.T, b @ b.T), stepped(qr, a.T @ a, b.T @ b)
    y = ql.T @ (ql @ g @ qr.T) @ qr
    return y * (1.1 / (y.square().mean().sqrt() + 1e-6)).clamp(max=1), ql, qr


def signs_with_feedback(*tensors: Tensor) -> list[Tensor]:
    """One-bit Adam: momentum plus what was left over, packed as signs in bytes with a mean size, the rest left over."""
    n = len(tensors) // 4
    out = []
    for k in range(n):
        g, m, rest, v = (tensors[k + j * n] for j in range(4))
        m = 0.9 * m + 0.1 * g
        send = (m + rest).flatten()
        size = send.abs().mean()
        bits = (send >= 0).view(-1, 8).to(torch.uint8)
        packed = (bits << torch.arange(8, device=g.device, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        got = ((packed[:, None] >> torch.arange(8, device=g.device, dtype=torch.uint8)) & 1).flatten()
        got = (size * (2 * got.to(g.dtype) - 1)).view_as(g)
        out += [packed, m, send.view_as(g) - got, -1e-3 * got / (v.abs().sqrt() + 1e-8)]
    return out


# ---- likelihoods ----------------------------------------------------------------------------------------------------------


def spans_of_labels(scores: Tensor, transition: Tensor, duration: Tensor) -> Tensor:
    """A semi-Markov field: the log partition over spans of up to eight steps, a loop over ends; scores of (b, t, labels)."""
    b, t, c = scores.shape
    total = F.pad(scores.cumsum(1), (0, 0, 1, 0))
    alpha = [torch.zeros(b, c, device=scores.device, dtype=scores.dtype)]
    for end in range(1, t + 1):
        most = min(8, end)
        found = []
        for k in range(1, most + 1):
            start = torch.logsumexp(alpha[end - k][:, :, None] + transition, 1)
            found.append(start + total[:, end] - total[:, end - k] + duration[k - 1])
        alpha.append(torch.logsumexp(torch.stack(found), 0))
    return torch.logsumexp(alpha[-1], 1).mean()


def ensemble_analysis(x: Tensor, seen: Tensor, at: Tensor, noise: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
    """An ensemble Kalman analysis: anomalies, covariances tapered by distance (Gaspari, Cohn), a gain by Newton steps."""
    n = x.shape[0]
    mean = x.mean(0)
    a = 1.02 * (x - mean)
    far = (place[:, None] - place[at]).abs() / 0.8
    near = 1 - 5 / 3 * far**2 + 5 / 8 * far**3 + 0.5 * far**4 - 0.25 * far**5
    wide = 4 - 5 * far + 5 / 3 * far**2 + 5 / 8 * far**3 - 0.5 * far**4 + far**5 / 12 - 2 / (3 * far.clamp(min=1e-3))
    taper = torch.where(far <= 1, near, torch.where(far < 2, wide, 0))
    h = a[:, at]
    cross = taper * (a.t() @ h) / (n - 1)
    own = taper[at] * (h.t() @ h) / (n - 1) + torch.eye(len(at), device=x.device, dtype=x.dtype)
    inverse = own.t() / (own.abs().sum(0).amax() * own.abs().sum(1).amax())
    for _ in range(12):
        inverse = 2 * inverse - inverse @ own @ inverse
    x = mean + a
    x = x + (seen + noise - x[:, at]) @ (cross @ inverse).t()
    return x, x.std(0)


def logistic_couplings(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Flow++: half of the numbers through mixtures of 8 logistics that the other half makes, a logit, bits of each number."""
    half = x.shape[1] // 2
    log_det = 0.0
    for k in range(2):
        a, b = x.split(half, 1)
        p = F.linear(F.gelu(F.linear(a, w1[k])), w2[k]).unflatten(-1, (half, 26))
        shift, log_scale = p[..., 0], torch.tanh(p[..., 1])
        pi, mu, s = p[..., 2:].chunk(3, -1)
        z = (b[..., None] - mu) * torch.exp(-s.clamp(min=-7))
        weights = pi.log_softmax(-1)
        log_cdf = torch.logsumexp(weights + F.logsigmoid(z), -1)
        log_rest = torch.logsumexp(weights + F.logsigmoid(-z), -1)
        log_pdf = torch.logsumexp(weights + z - s.clamp(min=-7) - 2 * F.softplus(z), -1)
        b = (log_cdf - log_rest) * log_scale.exp() + shift
        log_det = log_det + (log_pdf - log_cdf - log_rest + log_scale).sum(1)
        x = torch.cat([b, a], 1)
    return (0.5 * (x.square() + math.log(2 * math.pi)).sum(1) - log_det).mean() / (x.shape[1] * math.log(2))


def mixed_spectra(x: Tensor, z: Tensor, log_w: Tensor, mu: Tensor, log_v: Tensor, y: Tensor) -> Tensor:
    """A spectral mixture kernel of all pairs: Gaussians of distance times cosines for six components, times values."""
    tau = x[:, None] - z[None]
    k = 0
    for c in range(log_w.shape[0]):
        k = k + log_w[c].exp() * torch.exp(-2 * math.pi**2 * (tau.square() * log_v[c].exp()).sum(-1)) * torch.cos(
            2 * math.pi * (tau * mu[c]).sum(-1)
        )
    return k @ y / z.shape[0]


# ---- tables and series ----------------------------------------------------------------------------------------------------


def shared_ensembles(x: Tensor, w: Tensor, r: Tensor, s: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """TabM: one weight for 32 members, each with its own signs of inputs and outputs and bias; three layers, 32 heads."""
    y = x[:, None].expand(-1, r.shape[1], -1)
    for k in range(w.shape[0]):
        y = F.relu(F.linear(y * r[k], w[k]) * s[k] + b[k])
    return torch.einsum("bkd,kdo->bko", y, out)


def recalled_rows(x: Tensor, keys: Tensor, label: Tensor, we: Tensor, table: Tensor, wt: Tensor) -> Tensor:
    """TabR: similarities by distance, a softmax over 96 candidates, labels' rows plus a layer of the difference, added."""
    q, k = F.linear(x, we), F.linear(keys, we)
    near = -q.square().sum(-1, keepdim=True) + 2 * q @ k.t() - k.square().sum(-1)
    best, at = near.topk(min(96, k.shape[0] - 1), dim=-1)
    p = best.softmax(-1)
    far = q[:, None] - k[at]
    value = table[label[at]] + F.linear(F.relu(F.linear(far, wt[0])), wt[1])
    return q + (p[:, None] @ value)[:, 0]


def attended_pairs(codes: Tensor, table: Tensor, first: Tensor, wa: Tensor, bias: Tensor, h: Tensor, p: Tensor) -> Tensor:
    """AFM: all pairs of fields' rows multiplied, a small network's softmax over pairs, a weighted sum and first orders."""
    e = table[codes]
    i, j = torch.triu_indices(codes.shape[1], codes.shape[1], 1, device=codes.device)
    pair = e[:, i] * e[:, j]
    a = (F.relu(F.linear(pair, wa, bias)) @ h).softmax(1)
    return (a[..., None] * pair).sum(1) @ p + first[codes].sum(1)


def shapes_in_series(x: Tensor, shapes: Tensor, w: Tensor) -> Tensor:
    """Shapelets: normed windows against learned shapes, soft minima of their distances over time, a linear layer."""
    s = shapes.shape[-1]
    windows = x.unfold(-1, s, 1)
    mean = windows.mean(-1, keepdim=True)
    windows = (windows - mean) / (windows.var(-1, keepdim=True, correction=0) + 1e-3).sqrt()
    far = windows.square().sum(-1)[..., None] - 2 * windows @ shapes.t() + shapes.square().sum(-1)
    far = far / s
    p = (-10.0 * far).softmax(1)
    return F.linear((p * far).sum(1), w)


def random_dilations(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """ROCKET: random kernels of nine at five dilations, the share of positive results and the largest of each."""
    out = []
    for k, d in enumerate((1, 2, 4, 9, 21)):
        y = F.conv1d(x, w[k], bias[k], padding=4 * d, dilation=d)
        out += [(y > 0).to(x.dtype).mean(-1), y.amax(-1)]
    return torch.cat(out, 1)


# ---- losses of embeddings -------------------------------------------------------------------------------------------------


def smooth_precision(x: Tensor, label: Tensor) -> Tensor:
    """Smooth-AP: ranks among all and among those of the same class by sigmoids of differences of all triples."""
    n = x.shape[0]
    z = F.normalize(x, dim=-1)
    s = z @ z.t()
    same = (label[:, None] == label).to(x.dtype)
    other = 1 - torch.eye(n, device=x.device, dtype=x.dtype)
    above = torch.sigmoid((s[:, None] - s[:, :, None]) / 0.05) * other
    every = 1 + (above * other[:, None]).sum(-1)
    among = 1 + (above * (same * other)[:, None]).sum(-1)
    precision = (among / every * same).sum(1) / same.sum(1)
    return 1 - precision.mean()


def quality_margins(x: Tensor, w: Tensor, label: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """AdaFace: angles grow and cosines shrink by how a feature's norm stands in the batch; log-softmax of 64 times these."""
    size = x.float().norm(dim=1, keepdim=True)
    cosine = (F.normalize(x, dim=1) @ F.normalize(w, dim=1).t()).float().clamp(-1 + 1e-3, 1 - 1e-3)
    safe = size.detach().clamp(0.001, 100)
    mean = 0.01 * safe.mean() + 0.99 * mean.float()
    std = 0.01 * safe.std() + 0.99 * std.float().abs()
    q = ((safe - mean) / (std + 1e-3) * 0.333).clamp(-1, 1)
    hot = F.one_hot(label, w.shape[0])
    angle = (cosine.acos() - 0.4 * q * hot).clamp(1e-3, math.pi - 1e-3)
    return F.cross_entropy(64 * (angle.cos() - (0.4 + 0.4 * q) * hot), label)


def dense_contrast(a: Tensor, b: Tensor, wa: Tensor, queue: Tensor) -> Tensor:
    """DenseCL: each pixel of one view takes the one most like it of the other's, projections of both, a queue of negatives."""
    fa, fb = (t.flatten(2).transpose(1, 2) for t in (a, b))
    at = (F.normalize(fa, dim=-1) @ F.normalize(fb, dim=-1).mT).argmax(-1)
    za, zb = (F.normalize(F.linear(F.relu(F.linear(t, wa[0])), wa[1]), dim=-1) for t in (fa, fb))
    match = zb.gather(1, at[..., None].expand(-1, -1, zb.shape[-1])).detach()
    positive = (za * match).sum(-1, keepdim=True)
    negative = za @ F.normalize(queue, dim=-1).detach().t()
    logits = torch.cat([positive, negative], -1).flatten(0, 1) / 0.2
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.int64, device=a.device))


def semi_hard(x: Tensor, label: Tensor) -> Tensor:
    """Triplets whose negative is the nearest beyond the positive, else the farthest; minima and maxima under masks."""
    n = x.shape[0]
    z = F.normalize(x, dim=-1)
    far = (2 - 2 * z @ z.t()).clamp(min=0)
    same = label[:, None] == label
    beyond = ~same[:, None] & (far[:, None] > far[:, :, None])
    top, low = far.amax(1, keepdim=True), far.amin(1, keepdim=True)
    outside = (far[:, None] - top[:, None]).mul(beyond).amin(2) + top
    inside = ((far - low) * ~same).amax(1, keepdim=True) + low
    negative = torch.where(beyond.any(2), outside, inside)
    pairs = same & ~torch.eye(n, dtype=torch.bool, device=x.device)
    return (F.relu(0.2 + far - negative) * pairs).sum() / pairs.sum()


def attended_instances(x: Tensor, bag: Tensor, v: Tensor, u: Tensor, w: Tensor, head: Tensor) -> Tensor:
    """Gated attention of instances in bags of many sizes: a softmax over each bag by scatter, sums of rows, a classifier."""
    n = 128
    score = (torch.tanh(F.linear(x, v)) * torch.sigmoid(F.linear(x, u))) @ w
    most = torch.full((n,), -math.inf, device=x.device, dtype=score.dtype).scatter_reduce(0, bag, score.detach(), "amax")
    e = torch.exp(score - most[bag])
    total = torch.zeros(n, device=x.device, dtype=e.dtype).index_add(0, bag, e)
    p = e / total[bag]
    z = torch.zeros(n, x.shape[1], device=x.device, dtype=x.dtype).index_add(0, bag, p[:, None] * x)
    return F.softplus(-F.linear(z, head)).mean() + 0.01 * (p * (p + 1e-8).log()).sum() / n


def _one_bit(m: Make, n: int, size: int) -> list[Tensor]:
    return [m(size + 8 * k, 64) for _ in range(4) for k in range(n)]


BLOCKS: tuple[Block, ...] = (
    Sized(
        smoothed_histograms, lambda m, n, d, c: [m(n, d), weight(m, c, d), m(c), m(n) * 3], (5, 8, 11), SINGLE, tf32=True
    ).block("smoothed histograms", 65536, 256, 101, training=True),
    Sized(
        sampled_quantiles,
        lambda m, b, n, d, a: [m(b, d), m(b, n), m(b, n), weight(m, d, 64), weight(m, d, d), weight(m, a, d), ids(m, a, b)],
        (3, 4, 8, 5),
        SINGLE,
        tf32=True,
    ).block("sampled quantiles", 512, 64, 512, 18, training=True),
    Sized(
        improved_policies,
        lambda m, s, b, a: [m(s, b), m(b, a), m(b, a), m(b, a), m(b, a), m(s, b, a), m(3)],
        (5, 6, 3),
        SINGLE,
    ).block("improved policies", 20, 30001, 21, training=True),
    Sized(
        cautious_values,
        lambda m, n, b, s, a, h: [
            m(b, s),
            m(n, b, a),
            m(n, b) - 2,
            m(b),
            m(2, h, s + a) * (s + a) ** -0.5,
            m(2, h, h) * h**-0.5,
            m(2, h) * h**-0.5,
        ],
        (4, 5, 3, 2, 8),
        SINGLE,
        tf32=True,
    ).block("cautious values", 31, 2048, 17, 6, 256, training=True),
    Sized(
        percentile_returns,
        lambda m, t, b, a: [m(t, b), m(t, b) + 3, m(t, b), m(t, b, a), ids(m, a, t, b)],
        (5, 6, 3),
        SINGLE,
    ).block("percentile returns", 16, 16384, 18, training=True),
    Sized(debiased_transport, lambda m, b, n, d: [m(b, n, d), m(b, n, d) + 0.5, m(b, n)], (2, 7, 3), SINGLE).block(
        "debiased transport", 16, 700, 3, training=True
    ),
    Sized(matched_geometries, lambda m, b, n, k, d: [m(b, n, d), m(b, k, d)], (2, 7, 6, 3), SINGLE).block(
        "matched geometries", 8, 500, 400, 5
    ),
    Sized(auctioned, lambda m, b, n, k: [m(b, n, k) * 3], (2, 5, 7), SINGLE).block("auctioned", 64, 100, 300),
    Sized(
        eigenbasis_steps,
        lambda m, a, b: [
            m(a, b),
            m(a, b),
            m(a, b),
            m(a, b).abs(),
            m(a, a),
            m(b, b),
            m(a, a) * a**-0.5,
            m(b, b) * b**-0.5,
        ],
        (5, 7),
        SINGLE,
        tf32=True,
    ).block("eigenbasis steps", 1024, 1536),
    Sized(
        triangular_factors,
        lambda m, a, b: [
            m(a, b),
            torch.eye(a).to(m(1)) + m(a, a) * 0.1 / a,
            torch.eye(b).to(m(1)) + m(b, b) * 0.1 / b,
            m(a, b),
        ],
        (5, 7),
        SINGLE,
        tf32=True,
    ).block("triangular factors", 768, 1024),
    Sized(signs_with_feedback, _one_bit, (2, 8), SINGLE).block("signs with feedback", 12, 40000),
    Sized(spans_of_labels, lambda m, b, t, c: [m(b, t, c), m(c, c), m(8, c)], (2, 10, 4), SINGLE).block(
        "spans of labels", 256, 24, 24, training=True
    ),
    Sized(
        ensemble_analysis,
        lambda m, n, s, k: [m(n, s), m(k), ids(m, s, k), m(n, k), m(s)],
        (6, 12, 4),
        SINGLE,
    ).block("ensemble analysis", 128, 20001, 400),
    Sized(
        logistic_couplings,
        lambda m, n, d, h: [m(n, d), m(2, h, d // 2) * d**-0.5, m(2, 13 * d, h) * h**-0.5],
        (4, 6, 8),
        SINGLE,
    ).block("logistic couplings", 4001, 64, 128, training=True),
    Sized(
        mixed_spectra,
        lambda m, n, k, d, c, v: [m(n, d), m(k, d), m(c), m(c, d), m(c, d) - 3, m(k, v)],
        (7, 6, 2, 3, 2),
        SINGLE,
    ).block("mixed spectra", 3001, 2001, 2, 6, 4, training=True),
    Sized(
        shared_ensembles,
        lambda m, n, d, k, o: [m(n, d), m(3, d, d) * d**-0.5, m(3, k, d), m(3, k, d), m(3, k, d), m(k, d, o) * d**-0.5],
        (3, 8, 4, 2),
    ).block("shared ensembles", 1024, 512, 32, 2, training=True),
    Sized(
        recalled_rows,
        lambda m, n, k, f, d, c: [m(n, f), m(k, f), ids(m, c, k), weight(m, d, f), m(c, d), m(2, d, d) * d**-0.5],
        (4, 9, 5, 8, 3),
        SINGLE,
        tf32=True,
    ).block("recalled rows", 512, 20001, 54, 128, 7, training=True),
    Sized(
        attended_pairs,
        lambda m, n, f, v, d, a: [ids(m, v, n, f), m(v, d), m(v), weight(m, a, d), m(a), m(a), m(d)],
        (4, 5, 30, 8, 3),
    ).block("attended pairs", 4096, 26, 100003, 32, 16, training=True),
    Sized(shapes_in_series, lambda m, b, t, n, s: [m(b, t), m(n, s), weight(m, 5, n)], (3, 30, 4, 7), SINGLE).block(
        "shapes in series", 128, 1000, 64, 31, training=True
    ),
    Sized(random_dilations, lambda m, b, c, t, n: [m(b, c, t), m(5, n, c, 9), m(5, n)], (2, 3, 40, 4), SINGLE).block(
        "random dilations", 64, 3, 1500, 96
    ),
    Sized(smooth_precision, lambda m, n, d: [m(n, d), ids(m, max(n // 4, 2), n)], (8, 5), SINGLE).block(
        "smooth precision", 480, 512, training=True
    ),
    Sized(quality_margins, lambda m, n, d, c: [m(n, d), m(c, d), ids(m, c, n), m(1) + d**0.5, m(1).abs() + 1], (6, 8, 9)).block(
        "quality margins", 1024, 512, 20011, training=True
    ),
    Sized(
        dense_contrast,
        lambda m, b, c, n, k: [m(b, c, n, n), m(b, c, n, n), m(2, c, c) * c**-0.5, m(k, c)],
        (2, 8, 3, 9),
    ).block("dense contrast", 32, 256, 7, 16384, training=True),
    Sized(semi_hard, lambda m, n, d: [m(n, d), ids(m, max(n // 4, 2), n)], (9, 5), SINGLE).block(
        "semi hard", 512, 128, training=True
    ),
    Sized(
        attended_instances,
        lambda m, n, d, a: [
            m(n, d),
            ids(m, 128, n),
            weight(m, a, d),
            weight(m, a, d),
            m(a) * a**-0.5,
            weight(m, 3, d),
        ],
        (40, 8, 5),
        SINGLE,
        tf32=True,
    ).block("attended instances", 60001, 512, 128, training=True),
)
