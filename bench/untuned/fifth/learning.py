"""Losses, flows, densities, optimisers and small networks beside vision and language."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def asymmetric(logits: Tensor, wanted: Tensor) -> Tensor:
    """A loss of many labels: negatives shifted and focused more than positives, the focus without gradients; Poly-1 beside."""
    y = (wanted > 1).to(logits.dtype)
    p = logits.sigmoid()
    low = (1 - p + 0.05).clamp(max=1)
    loss = y * torch.log(p.clamp(min=1e-8)) + (1 - y) * torch.log(low.clamp(min=1e-8))
    with torch.no_grad():
        focus = torch.pow(1 - (p * y + low * (1 - y)), 1 * y + 4 * (1 - y))
    return -(loss * focus).sum(-1).mean() + (1 - (p * y).sum(-1)).mean()


def robust(x: Tensor, y: Tensor, alpha: Tensor) -> Tensor:
    """Huber, smooth L1, log-cosh, wing and Barron's adaptive loss of one residual."""
    r = x - y
    a = 2 - 4 * alpha.sigmoid().clamp(0.05, 0.45)
    b = (a - 2).abs()
    barron = b / a * (((r / 0.5) ** 2 / b + 1) ** (a / 2) - 1)
    log_cosh = r + F.softplus(-2 * r) - math.log(2)
    wing = torch.where(r.abs() < 1, 1 * torch.log1p(r.abs() / 0.2), r.abs() - 0.8)
    return F.huber_loss(x, y, delta=0.7) + F.smooth_l1_loss(x, y) + (barron + log_cosh + wing).mean()


def ensemble_scores(members: Tensor, wanted: Tensor) -> Tensor:
    """The fair CRPS of an ensemble by sorting it, and by all pairs; an energy score beside."""
    n = members.shape[0]
    ordered = members.sort(0).values
    factor = 2 * torch.arange(1, n + 1, device=members.device, dtype=members.dtype) - n - 1
    spread = torch.einsum("n,n...->...", factor, ordered) / (n * (n - 1))
    pairs = (members[:, None] - members[None]).square().sum(-1).add(1e-6).sqrt().mean((0, 1))
    return ((members - wanted).abs().mean(0) - spread).mean() - 0.5 * pairs.mean()


def counted(mean: Tensor, spread: Tensor, zero: Tensor, counts: Tensor) -> Tensor:
    """Negative log-likelihood of zero-inflated negative binomial counts (scVI), by lgamma."""
    mu, theta = F.softplus(mean) + 1e-4, F.softplus(spread) + 1e-2
    n = counts.to(mu.dtype)
    log_sum = torch.log(theta + mu)
    plain = theta * (torch.log(theta) - log_sum)
    some = -F.softplus(zero) + plain + n * (torch.log(mu) - log_sum)
    some = some + torch.lgamma(n + theta) - torch.lgamma(theta) - torch.lgamma(n + 1)
    none = F.softplus(plain - zero) - F.softplus(-zero) - F.softplus(zero) * 0
    return -torch.where(counts == 0, none, some).sum(-1).mean()


def evidence(x: Tensor, labels: Tensor) -> Tensor:
    """Dirichlet evidence: expected cross entropy by digamma, a divergence from the uniform one by lgamma."""
    alpha = F.softplus(x) + 1
    y = F.one_hot(labels, x.shape[-1]).to(x.dtype)
    total = alpha.sum(-1, keepdim=True)
    fit = (y * (torch.digamma(total) - torch.digamma(alpha))).sum(-1)
    other = y + (1 - y) * alpha
    whole = other.sum(-1, keepdim=True)
    gap = torch.lgamma(whole).squeeze(-1) - torch.lgamma(other).sum(-1) - math.lgamma(x.shape[-1])
    gap = gap + ((other - 1) * (torch.digamma(other) - torch.digamma(whole))).sum(-1)
    return (fit + 0.1 * gap).mean()


def survival(x: Tensor, w: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """Cox's partial likelihood: risks in descending order of time, a running logsumexp."""
    risk = (x @ w).squeeze(-1)
    order = time.argsort(descending=True)
    risk, seen = risk[order], (event[order] > 0).to(risk.dtype)
    return -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum()


def listed(scores: Tensor, wanted: Tensor, mask: Tensor) -> Tensor:
    """ListMLE: scores in the wanted order, logsumexp of each tail by flips, shorter lists masked."""
    order = wanted.argsort(dim=-1, descending=True, stable=True)
    s = scores.gather(-1, order).masked_fill((mask < -1).gather(-1, order), -30.0)
    tails = torch.logcumsumexp(s.flip(-1), -1).flip(-1)
    return (tails - s).mean(-1).sum()


def projected_orders(x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """Sliced Wasserstein distances: projections sorted and compared; the largest one too."""
    d = F.normalize(directions, dim=0)
    a, b = (x @ d).sort(0).values, (y @ d).sort(0).values
    each = (a - b).square().mean(0)
    return each.mean() + each.amax()


def coupling(x: Tensor, *weights: Tensor) -> Tensor:
    """RealNVP: four affine couplings of alternating halves with learned scales between; the density."""
    logdet = x.new_zeros(x.shape[0])
    for k in range(0, len(weights), 3):
        w1, w2, scale = weights[k : k + 3]
        x = x * scale.exp() + 0.1
        logdet = logdet + scale.sum()
        a, b = x.chunk(2, -1)
        s, t = (F.silu(a @ w1) @ w2).chunk(2, -1)
        s = 2 * torch.tanh(s / 2)
        x = torch.cat([b * s.exp() + t, a], -1)
        logdet = logdet + s.sum(-1)
    return (-0.5 * x.square().sum(-1) + logdet).mean()


def rational_splines(x: Tensor, widths: Tensor, heights: Tensor, slopes: Tensor) -> Tensor:
    """A neural spline flow: bins by searchsorted, knots gathered, a ratio of quadratics and its log-derivative."""
    k = widths.shape[-1]
    w, h = (1e-2 + (1 - 1e-2 * k) * t.softmax(-1) for t in (widths, heights))
    cw, ch = (F.pad(t.cumsum(-1), (1, 0)) * 6 - 3 for t in (w, h))
    d = 1e-2 + F.softplus(slopes)
    inside = x.clamp(-2.99, 2.99)
    at = (torch.searchsorted(cw.detach(), inside.detach()[..., None], right=True) - 1).clamp(0, k - 1)

    def pick(t: Tensor, shift: int = 0) -> Tensor:
        return t.gather(-1, at + shift).squeeze(-1)

    x0, width, y0, height, d0, d1 = pick(cw), pick(w) * 6, pick(ch), pick(h) * 6, pick(d), pick(d, 1)
    t, slope = (inside - x0) / width, height / width
    mix = t * (1 - t)
    below = slope + (d0 + d1 - 2 * slope) * mix
    y = y0 + height * (slope * t * t + d0 * mix) / below
    log = 2 * slope.log() + (d1 * t * t + 2 * slope * mix + d0 * (1 - t) ** 2).log() - 2 * below.log()
    free = x.abs() < 2.99
    return torch.where(free, y, x).square().sum(-1) + torch.where(free, log, 0).sum(-1)


def masked_density(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    """MADE: linear layers whose masks are made from degrees, log-probabilities of binary values."""
    d, h = x.shape[-1], w1.shape[0]
    into = torch.arange(d, device=x.device)
    hidden = torch.arange(h, device=x.device) % (d - 1)
    m1 = (hidden[:, None] >= into).to(w1.dtype)
    m2 = (into[:, None] > hidden).to(w1.dtype)
    bits = x.to(w1.dtype)
    logits = F.linear(F.relu(F.linear(bits, w1 * m1)), w2 * m2, bias)
    return -F.binary_cross_entropy_with_logits(logits, bits, reduction="none").sum(-1)


def importance_bound(x: Tensor, wm: Tensor, ws: Tensor, out: Tensor, noise: Tensor) -> Tensor:
    """IWAE: several samples of a latent, log-weights in float32, logsumexp over samples."""
    mean, log_scale = x @ wm, (x @ ws).clamp(-3, 2)
    z = mean + noise * log_scale.exp()
    logits = F.leaky_relu(z, 0.1) @ out
    fit = -F.binary_cross_entropy_with_logits(logits, x.sigmoid().expand_as(logits), reduction="none").float().sum(-1)
    log_w = fit + (-0.5 * z.float() ** 2 + 0.5 * noise.float() ** 2 + log_scale.float()).sum(-1)
    return -(log_w.logsumexp(0) - math.log(len(noise))).mean()


def curved_distances(u: Tensor, v: Tensor, negatives: Tensor) -> Tensor:
    """Poincare embeddings: points in a ball, arcosh distances, a softmax over negatives."""

    def ball(x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True)) * 0.95

    u, v, negatives = ball(u), ball(v), ball(negatives)
    every = torch.cat([v[:, None], negatives], 1)
    gap = (u[:, None] - every).square().sum(-1)
    below = (1 - u.square().sum(-1, keepdim=True)) * (1 - every.square().sum(-1))
    return -(-torch.acosh(1 + 2 * gap / below + 1e-5)).log_softmax(-1)[:, 0].mean()


def oblivious_trees(x: Tensor, choose: Tensor, threshold: Tensor, response: Tensor) -> Tensor:
    """NODE: soft choices of features, soft bins of six levels multiplied out to 64 leaves, responses summed."""
    f = torch.einsum("bi,itd->btd", x, choose.softmax(0))
    right = ((f - threshold) * 2).sigmoid()
    leaf = torch.ones_like(f[..., :1])
    for k in range(choose.shape[-1]):
        gate = right[..., k : k + 1]
        leaf = torch.cat([leaf * (1 - gate), leaf * gate], -1)
    return torch.einsum("btl,tlo->bto", leaf, response).mean(1)


def branch_and_trunk(u: Tensor, y: Tensor, b1: Tensor, b2: Tensor, t1: Tensor, t2: Tensor) -> Tensor:
    """DeepONet: an operator as a sum over pairs of a branch and a trunk, coordinates with Fourier features."""
    branch = F.gelu(u @ b1) @ b2
    features = torch.cat([torch.sin(math.pi * y), torch.cos(math.pi * y), y], -1)
    trunk = torch.sin(torch.tanh(features @ t1) @ t2)
    return torch.einsum("bk,nk->bn", branch, trunk) / branch.shape[-1] ** 0.5


def stacked_residuals(x: Tensor, *weights: Tensor) -> Tensor:
    """N-BEATS: each stack subtracts what it explains and adds a forecast; seasonal stacks by a basis of cosines."""
    n = x.shape[-1]
    mean, std = x.mean(-1, keepdim=True).detach(), x.std(-1, keepdim=True, unbiased=False).detach() + 1e-5
    rest, forecast = (x - mean) / std, 0.0
    times = torch.arange(n + 24, device=x.device, dtype=x.dtype) / n
    basis = torch.cat([torch.cos(2 * math.pi * k * times)[None] for k in range(8)])
    for k in range(0, len(weights), 2):
        theta = F.relu(rest @ weights[k]) @ weights[k + 1]
        back, later = theta.chunk(2, -1)
        rest = rest - back @ basis[:, :n]
        forecast = forecast + later @ basis[:, n:]
    return forecast * std + mean


def own_weights(x: Tensor, z: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A hypernetwork: each sample has weights of its own, generated, normalised, and used by baddbmm."""
    made = F.linear(z, w, bias).view(z.shape[0], x.shape[-1], -1)
    made = made / (made.norm(dim=1, keepdim=True) + 1e-6)
    return F.softsign(torch.baddbmm(bias[: made.shape[-1]], x, made, beta=0.5))


def reflections(x: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """An orthogonal layer by eight Householder reflections, and a rotation by a matrix exponential in nine terms."""
    for u in v.unbind(0):
        x = x - 2 * torch.outer(x @ u, u) / u.dot(u)
    s = (a - a.T) * 0.02
    turn = term = torch.eye(len(a), device=a.device, dtype=a.dtype)
    for k in range(1, 10):
        term = term @ s / k
        turn = turn + term
    return x @ turn


def twin_views(x: Tensor, y: Tensor, w1: Tensor, w2: Tensor, norm: Tensor, w3: Tensor) -> Tensor:
    """SimSiam: a projector with batch norms, a predictor, cosines to detached projections, both ways."""

    def project(t: Tensor) -> Tensor:
        h = F.relu(F.batch_norm(t @ w1, None, None, norm, training=True))
        return F.batch_norm(h @ w2, None, None, training=True)

    za, zb = project(x), project(y)
    pa, pb = F.relu(za @ w3) @ w3.t(), F.relu(zb @ w3) @ w3.t()
    return -0.5 * (F.cosine_similarity(pa, zb.detach(), dim=-1).mean() + F.cosine_similarity(pb, za.detach(), dim=-1).mean())


def circle(x: Tensor, labels: Tensor) -> Tensor:
    """Circle loss: similarities of all pairs weighted by their own distance from an optimum, two masked logsumexps."""
    s = F.normalize(x, dim=-1) @ F.normalize(x, dim=-1).T
    same = labels[:, None] == labels
    eye = torch.eye(len(x), device=x.device, dtype=torch.bool)
    ap, an = (1.25 - s.detach()).clamp(min=0), (s.detach() + 0.25).clamp(min=0)
    positive = (-32 * ap * (s - 0.75)).masked_fill(~same | eye, -1e4)
    negative = (32 * an * (s - 0.25)).masked_fill(same, -1e4)
    return F.softplus(positive.logsumexp(1) + negative.logsumexp(1)).mean()


def backward_returns(q: Tensor, pi: Tensor, mu: Tensor, actions: Tensor, rewards: Tensor) -> Tensor:
    """Retrace: targets by a loop from the last step, traces cut by clipped ratios; a dueling critic's squared errors."""
    n = q.shape[0]
    p, m = pi.softmax(-1), mu.softmax(-1)
    taken = q.gather(-1, actions[..., None]).squeeze(-1)
    ratio = (p / m).gather(-1, actions[..., None]).squeeze(-1).clamp(max=1).detach()
    value = (p * q).sum(-1).detach()
    target, found = value[-1], []
    for t in range(n - 2, -1, -1):
        target = rewards[t] + 0.99 * (value[t + 1] + 0.95 * ratio[t + 1] * (target - taken[t + 1].detach()))
        found.append(target)
    return (taken[:-1] - torch.stack(found[::-1])).square().mean() + 0.01 * (p * p.log()).sum(-1).mean()


def shifted_pixels(x: Tensor, shift: Tensor, w: Tensor) -> Tensor:
    """DrQ: bytes padded, moved by whole pixels through a grid sample, a strided convolution."""
    b, _, h, _ = x.shape
    y = F.pad(x.to(w.dtype) / 255 - 0.5, (4, 4, 4, 4), mode="replicate")
    step = 2.0 / (h + 8)
    line = torch.linspace(-1 + step / 2, 1 - step / 2, h + 8, device=x.device, dtype=w.dtype)[:h]
    base = torch.stack((line.expand(h, h), line[:, None].expand(h, h)), -1)
    grid = base + (shift % 9).to(w.dtype).view(b, 1, 1, 2) * step
    return F.relu(F.conv2d(F.grid_sample(y, grid, align_corners=False), w, stride=2))


def three_averages(param: Tensor, grad: Tensor, fast: Tensor, slow: Tensor, square: Tensor, step: Tensor) -> None:
    """AdEMAMix in place: a fast and a slow mean of gradients, bias corrections from a step that is a tensor."""
    t = step.abs().add(1)
    fast.lerp_(grad, 0.1)
    slow.lerp_(grad, 1 - 0.999)
    square.mul_(0.99).addcmul_(grad, grad, value=0.01)
    below = (square / (1 - 0.99**t)).sqrt_().add_(1e-3)
    update = (fast / (1 - 0.9**t) + 5 * slow) / below
    param.mul_(1 - 1e-4).sub_(update * 1e-3)


def nesterov_moments(params: list[Tensor], rest: list[Tensor], lr: Tensor) -> None:
    """Adan over several tensors: means of gradients, of their differences and of squares."""
    n = len(params)
    grads, first, second, third, old = (rest[k * n : (k + 1) * n] for k in range(5))
    rate = lr.abs() * 1e-3
    for p, g, m, v, s, o in zip(params, grads, first, second, third, old, strict=True):
        change = g - o
        m.mul_(0.98).add_(g, alpha=0.02)
        v.mul_(0.92).add_(change, alpha=0.08)
        s.mul_(0.99).addcmul_(g + 0.92 * change, g + 0.92 * change, value=0.01)
        p.sub_(rate * (m + 0.92 * v) / (s.sqrt() + 1e-2)).div_(1 + 0.02 * rate)
        o.copy_(g)


def guessed_rate(x: Tensor, start: Tensor, grad: Tensor, mean: Tensor, square: Tensor, s: Tensor, d: Tensor) -> Tensor:
    """Prodigy: a distance estimated from inner products with the way so far scales the step; all scalars are tensors."""
    size = d.abs() + 1e-3
    mean.mul_(0.9).add_(grad * size, alpha=0.1)
    square.mul_(0.99).addcmul_(grad * size, grad * size, value=0.01)
    s.mul_(0.99).add_(size * size * 0.01 * grad)
    above = torch.dot(grad.flatten().float(), (start - x).flatten().float()) * size
    size = torch.maximum(size, above / (s.abs().sum() + 1e-6))
    x.sub_(size * mean / (square.sqrt() + size * 1e-2))
    return size


def layer_rates(params: Tensor, grads: Tensor, momentum: Tensor, average: Tensor) -> None:
    """LARS over stacked layers: a rate of each from norms of weights and gradients, momentum, an average of weights."""
    w, g = params.flatten(1).norm(dim=1), grads.flatten(1).norm(dim=1)
    rate = torch.where((w > 0) & (g > 0), 0.001 * w / (g + 1e-4 * w), 1.0)
    momentum.mul_(0.9).add_((grads + 1e-4 * params) * rate.view(-1, 1, 1))
    params.sub_(momentum)
    average.lerp_(params, 0.001)


def confident_factors(p: Tensor, g: Tensor, row: Tensor, column: Tensor, m: Tensor, ir: Tensor, ic: Tensor) -> None:
    """CAME: factored squares, an update clipped by its root mean square, factored instability of the mean."""
    square = g.square() + 1e-8
    row.lerp_(square.mean(1), 0.1).abs_()
    column.lerp_(square.mean(0), 0.1).abs_()
    update = g * (row / row.mean()).rsqrt()[:, None] * column.rsqrt()
    update = update / (update.square().mean().sqrt()).clamp(min=1)
    m.mul_(0.9).add_(update, alpha=0.1)
    gap = (update - m).square() + 1e-4
    ir.abs_().lerp_(gap.mean(-1), 0.01)
    ic.abs_().lerp_(gap.mean(-2), 0.01)
    p.sub_(1e-3 * m * (ir / ir.mean(-1, keepdim=True)).rsqrt()[:, None] * ic.rsqrt())


def _adan(m: Make, n: int, d: int) -> list[Tensor]:
    shapes = [(d, d), (d, 3), (d,)] * n
    return [*(m(*s) for s in shapes * 4), *(m(*s).abs() for s in shapes), *(m(*s) for s in shapes), m()]


def _adan_step(*tensors: Tensor) -> None:
    n = (len(tensors) - 1) // 6
    nesterov_moments(list(tensors[:n]), list(tensors[n:-1]), tensors[-1])


SPLINES = Sized(rational_splines, lambda m, n, d, k: [m(n, d), m(n, d, k), m(n, d, k), m(n, d, k + 1)], (5, 3, 4), SINGLE)
FLOW = Sized(
    coupling,
    lambda m, n, d, h: [m(n, d), *(t for _ in range(4) for t in (m(d // 2, h) * 0.1, m(h, d) * 0.1, m(d) * 0.1))],
    (5, 6, 8),
    SINGLE,
    tf32=True,
)

BLOCKS: tuple[Block, ...] = (
    Sized(asymmetric, lambda m, n, c: [m(n, c), m(n, c)], (5, 9), SINGLE).block("asymmetric labels", 4096, 1501, training=True),
    Sized(robust, lambda m, n: [m(n), m(n), m(n)], (50,), SINGLE).block("robust losses", 5000011, training=True),
    Sized(ensemble_scores, lambda m, k, n, d: [m(k, n, d), m(n, d)], (4, 5, 3), SINGLE).block(
        "ensemble scores", 16, 6001, 32, training=True
    ),
    Sized(counted, lambda m, n, g: [m(n, g), m(g), m(n, g), ids(m, 9, n, g)], (5, 7), SINGLE).block(
        "counts of genes", 512, 5003, training=True
    ),
    Sized(evidence, lambda m, n, c: [m(n, c), ids(m, c, n)], (5, 7), SINGLE).block("evidence", 20000, 101, training=True),
    Sized(survival, lambda m, n, d: [m(n, d), m(d, 1), m(n), m(n)], (20, 5), SINGLE, tf32=True).block(
        "partial likelihood", 30001, 200, training=True
    ),
    Sized(listed, lambda m, n, k: [m(n, k), m(n, k), m(n, k)], (4, 7), SINGLE).block(
        "list likelihood", 2048, 501, training=True
    ),
    Sized(projected_orders, lambda m, n, d, k: [m(n, d), m(n, d), m(d, k)], (20, 5, 6), SINGLE, tf32=True).block(
        "projected_orders distances", 2048, 128, 500, training=True
    ),
    *FLOW.both("couplings", 16001, 64, 256),
    *SPLINES.both("rational splines", 40000, 32, 16),
    Sized(
        masked_density,
        lambda m, n, d, h: [ids(m, 2, n, d), weight(m, h, d), weight(m, d, h), m(d)],
        (5, 9, 12),
        SINGLE,
        tf32=True,
    ).block("masked density", 4096, 784, 1000, training=True),
    Sized(
        importance_bound,
        lambda m, k, n, d, z: [m(n, d), m(d, z) * d**-0.5, m(d, z) * d**-0.5, weight(m, z, d), m(k, n, z)],
        (4, 3, 12, 5),
    ).block("importance bound", 32, 512, 784, 64, training=True),
    Sized(curved_distances, lambda m, n, k, d: [m(n, d), m(n, d), m(n, k, d)], (5, 4, 3), SINGLE).block(
        "curved distances", 20000, 50, 10, training=True
    ),
    Sized(
        oblivious_trees,
        lambda m, b, f, t, o: [m(b, f), m(f, t, 6), m(t, 6), m(t, 64, o)],
        (5, 7, 4, 3),
        SINGLE,
        tf32=True,
    ).block("oblivious trees", 2048, 54, 256, 7, training=True),
    Sized(
        branch_and_trunk,
        lambda m, b, n, d, h: [m(b, d), m(n, 3), m(d, h) * d**-0.5, m(h, 128) * h**-0.5, m(9, h) * 0.3, m(h, 128) * h**-0.5],
        (3, 7, 10, 12),
        SINGLE,
        tf32=True,
    ).block("branch and trunk", 256, 16001, 100, 256, training=True),
    Sized(
        stacked_residuals,
        lambda m, b, n, h: [m(b, n), *(t for _ in range(3) for t in (m(n, h) * n**-0.5, m(h, 16) * h**-0.5))],
        (4, 12, 9),
        SINGLE,
        tf32=True,
    ).block("stacked residuals", 8192, 168, 256, training=True),
    Sized(own_weights, lambda m, b, n, d, z, o: [m(b, n, d), m(b, z), weight(m, d * o, z), m(d * o)], (2, 5, 6, 3, 4)).block(
        "own weights", 128, 301, 96, 64, 80, training=True
    ),
    Sized(reflections, lambda m, n, d, k: [m(n, d), m(k, d), m(d, d)], (5, 7, 3), SINGLE).block(
        "reflections", 8192, 300, 8, training=True
    ),
    Sized(
        twin_views,
        lambda m, n, d, h: [m(n, d), m(n, d), m(d, h) * d**-0.5, m(h, h) * h**-0.5, m(h), m(h, h // 4) * h**-0.5],
        (6, 5, 8),
        SINGLE,
        tf32=True,
    ).block("twin views", 512, 2048, 2048, training=True),
    Sized(circle, lambda m, n, d: [m(n, d), ids(m, 5, n)], (9, 6), SINGLE, tf32=True).block("circle", 2001, 256, training=True),
    Sized(
        backward_returns,
        lambda m, n, b, a: [m(n, b, a), m(n, b, a), m(n, b, a), ids(m, a, n, b), m(n, b)],
        (4, 3, 5),
        SINGLE,
    ).block("backward returns", 20, 4001, 18, training=True),
    Sized(
        shifted_pixels,
        lambda m, b, h, c: [ids(m, 256, b, 9, h, h).to(torch.uint8), ids(m, 9, b, 2), weight(m, c, 9, 3, 3)],
        (2, 12, 4),
        SINGLE,
        tf32=True,
    ).block("shifted pixels", 256, 84, 32, training=True),
    Sized(three_averages, lambda m, n: [m(n), m(n), m(n), m(n), m(n).abs(), m()], (31,)).block("three averages", 30000001),
    Sized(_adan_step, _adan, (1, 5), SINGLE).block("nesterov moments", 8, 700),
    Sized(
        guessed_rate, lambda m, n: [m(n, 64), m(n, 64), m(n, 64), m(n, 64), m(n, 64).abs(), m(n, 64), m()], (3,), SINGLE
    ).block("guessed rate", 100003),
    Sized(layer_rates, lambda m, n, d: [m(n, d, d + 1) for _ in range(4)], (3, 5), SINGLE).block("layer rates", 24, 767),
    Sized(
        confident_factors,
        lambda m, n, d: [m(n, d), m(n, d), m(n).abs(), m(d).abs(), m(n, d), m(n).abs(), m(d).abs()],
        (7, 5),
        SINGLE,
    ).block("confident factors", 5001, 4099),
)
