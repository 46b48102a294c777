"""Blocks of learning: losses that distil, contrast and prefer, diffusion steps, norms by iteration, optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def decoupled_distillation(student: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
    """DKD: a divergence of target against the rest, another of the rest among themselves, at temperature four."""
    hit = F.one_hot(target, student.shape[1]).bool()
    s, t = student.float() / 4, teacher.detach().float() / 4
    ps, pt = s.softmax(1), t.softmax(1)

    def two(p: Tensor) -> Tensor:
        return torch.stack([(p * hit).sum(1), (p * ~hit).sum(1)], 1)

    first = F.kl_div(two(ps).clamp(min=1e-8).log(), two(pt), reduction="batchmean") * 16
    rest = F.kl_div((s - 1000.0 * hit).log_softmax(1), (t - 1000.0 * hit).softmax(1), reduction="batchmean") * 16
    return first + 8 * rest


def relational_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    """RKD: distances of all pairs over their mean and angles of all triples, compared by a smooth l1."""

    def distances(e: Tensor) -> Tensor:
        sq = e.square().sum(1)
        d = (sq[:, None] + sq[None] - 2 * e @ e.mT).clamp(min=1e-6).sqrt()
        return d / d.mean()

    def angles(e: Tensor) -> Tensor:
        n = F.normalize(e[None] - e[:, None], dim=2)
        return torch.bmm(n, n.mT).flatten()

    with torch.no_grad():
        td, ta = distances(teacher), angles(teacher)
    return F.smooth_l1_loss(distances(student), td) + 2 * F.smooth_l1_loss(angles(student), ta)


def transferred_attention(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Attention transfer: squared maps of two levels averaged over channels, normed, compared with a teacher's."""

    def maps(t: Tensor) -> Tensor:
        return F.normalize(t.float().pow(2).mean(1).flatten(1), dim=1)

    first = (maps(a) - maps(b).detach()).pow(2).mean()
    return first + (maps(F.avg_pool2d(c, 2)) - maps(F.avg_pool2d(d, 2)).detach()).pow(2).mean()


def spread_out(x: Tensor, y: Tensor) -> Tensor:
    """Alignment of pairs, uniformity of each view by a log of mean kernels, KoLeo's log of nearest distances."""
    x, y = F.normalize(x.float(), dim=1), F.normalize(y.float(), dim=1)
    align = (x - y).norm(dim=1).pow(2).mean()

    def uniform(t: Tensor) -> Tensor:
        d = (2 - 2 * t @ t.mT).clamp(min=0)
        rows = torch.arange(len(t), device=t.device)
        return torch.exp(-2 * d).masked_fill(rows[:, None] <= rows[None], 0.0).sum().log()

    with torch.no_grad():
        near = (x @ x.mT).fill_diagonal_(-1).argmax(1)
    koleo = -torch.log((x - x[near]).norm(dim=1) + 1e-6).mean()
    return align + (uniform(x) + uniform(y)) / 2 + 0.1 * koleo


def lifted_structure(x: Tensor, labels: Tensor) -> Tensor:
    """Lifted structure: positives' distances against logsumexps of both ends' negatives within a margin."""
    e = F.normalize(x.float(), dim=1)
    d = torch.cdist(e, e)
    same = labels[:, None] == labels[None]
    eye = torch.eye(len(x), dtype=torch.bool, device=x.device)
    negative = (1.0 - d).masked_fill(same, float("-inf")).logsumexp(1)
    j = d + torch.logaddexp(negative[:, None], negative[None])
    positive = same & ~eye
    return (F.relu(j).square() * positive).sum() / (2 * positive.sum().clamp(min=1))


def odds_ratio(chosen: Tensor, rejected: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """ORPO: mean log-likelihoods of chosen and rejected tokens, their odds, and a cross-entropy of the chosen."""

    def mean_logp(logits: Tensor, target: Tensor) -> Tensor:
        logp = logits[:, :-1].float().log_softmax(-1).gather(-1, target[:, 1:, None])[..., 0]
        seen = target[:, 1:] % 5 != 0
        return (logp * seen).sum(-1) / seen.sum(-1).clamp(min=1)

    lc, lr = mean_logp(chosen, a), mean_logp(rejected, b)
    odds = (lc - lr) - (torch.log1p(-lc.exp().clamp(max=0.999)) - torch.log1p(-lr.exp().clamp(max=0.999)))
    return -lc.mean() - 0.1 * F.logsigmoid(odds).mean()


def generalised_entropy(logits: Tensor, target: Tensor, soft: Tensor) -> Tensor:
    """Noisy labels: a truncated power of the likelihood, poly-1 of cross-entropy, reverse cross-entropy, bootstrapped."""
    p = logits.float().softmax(1)
    hit = p.gather(1, target[:, None])[:, 0]
    power = torch.where(hit > 0.2, (1 - hit.clamp(min=1e-6) ** 0.7) / 0.7, (1 - 0.2**0.7) / 0.7)
    ce = F.cross_entropy(logits.float(), target, reduction="none", label_smoothing=0.1)
    mixed = 0.8 * F.one_hot(target, p.shape[1]) + 0.2 * soft.float().softmax(1).detach()
    reverse = -(p * mixed.clamp(1e-4, 1).log()).sum(1)
    return (power + ce + (1 - hit) + 0.3 * reverse).mean()


def perceptual(a: Tensor, b: Tensor, w0: Tensor, w1: Tensor, lin0: Tensor, lin1: Tensor) -> Tensor:
    """LPIPS: two convolution levels of both pictures, unit channels, weighted squared differences, means."""

    def levels(t: Tensor) -> list[Tensor]:
        first = F.relu(F.conv2d(t, w0, padding=1))
        return [first, F.relu(F.conv2d(F.max_pool2d(first, 2), w1, padding=1))]

    def unit(t: Tensor) -> Tensor:
        return t / (t.pow(2).sum(1, keepdim=True) + 1e-6).sqrt()

    total = a.new_zeros(())
    for x, y, w in zip(levels(a), levels(b), (lin0, lin1), strict=True):
        total = total + F.conv2d((unit(x) - unit(y)).pow(2), w.abs()).mean((2, 3)).sum()
    return total


def preconditioned_noise(x: Tensor, noise: Tensor, level: Tensor, w0: Tensor, w1: Tensor) -> Tensor:
    """EDM: noise levels' weights of skip, output and input around a network of two convolutions, a weighted error."""
    sigma = (level * 1.2 - 1.2).exp().view(-1, 1, 1, 1)
    noisy = x + noise * sigma
    total = (sigma.square() + 0.25).sqrt()
    inner = noisy / total
    c_noise = (sigma.log() / 4).expand_as(inner[:, :1])
    f = F.conv2d(F.silu(F.conv2d(torch.cat([inner, c_noise], 1), w0, padding=1)), w1, padding=1)
    denoised = noisy * (0.25 / total.square()) + f * (sigma * 0.5 / total)
    return ((total / (sigma * 0.5)).square() * (denoised - x).square()).mean()


def second_order_step(x: Tensor, now: Tensor, before: Tensor, text: Tensor, level: Tensor) -> Tensor:
    """DPM-Solver++ 2M in image space: guided predictions, dynamic thresholds by a quantile, two histories."""
    guided = now + 4.0 * (text - now)
    limit = torch.quantile(guided.flatten(1).abs()[:, ::4], 0.95, dim=1).clamp(min=1.0).view(-1, 1, 1, 1)
    guided = guided.clamp(-limit, limit) / limit
    t0, t1, t2 = (level.sigmoid().view(3, -1, 1, 1, 1) * 0.9 + 0.05).unbind(0)
    lam0, lam1, lam2 = (torch.log((1 - t) / t) for t in (t0, t1, t2))
    h, last = lam1 - lam0, lam0 - lam2
    r = (last / h).abs().clamp(min=0.1)
    d = (1 + 1 / (2 * r)) * guided - (1 / (2 * r)) * before
    return (t1 / t0) * x - (1 - t1) * torch.expm1(-h.clamp(-5, 5)) * d


def renormed_batches(x: Tensor, w: Tensor, mean: Tensor, std: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Batch renormalisation of a convolution: clipped corrections towards running statistics, no gradient in them."""
    y = F.conv2d(x, w, padding=1)
    var, mu = torch.var_mean(y.float(), (0, 2, 3), correction=0)
    sd = (var + 1e-5).sqrt()
    run = std.abs().float() + 0.5
    r = (sd / run).clamp(1 / 3, 3).detach()
    d = ((mu - mean.float()) / run).clamp(-5, 5).detach()
    y = (y - mu.view(1, -1, 1, 1)) / sd.view(1, -1, 1, 1) * r.view(1, -1, 1, 1) + d.view(1, -1, 1, 1)
    return F.relu(y * g.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)).to(x.dtype)


def iterated_whitening(x: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """IterNorm: groups of 64 channels whitened by five Newton-Schulz steps on their covariance, silu."""
    n, c, h, w = x.shape
    size = min(c, 64)
    t = x.transpose(0, 1).reshape(c // size, size, n * h * w).float()
    t = t - t.mean(-1, keepdim=True)
    cov = t @ t.mT / t.shape[-1] + 1e-3 * torch.eye(size, device=x.device)
    trace = cov.diagonal(dim1=1, dim2=2).sum(-1)[:, None, None]
    a, p = cov / trace, torch.eye(size, device=x.device).expand_as(cov)
    for _ in range(5):
        p = 1.5 * p - 0.5 * p @ p @ p @ a
    y = (p @ t) / trace.sqrt()
    y = y.reshape(c, n, h, w).transpose(0, 1)
    return F.silu(y * g.view(1, -1, 1, 1) + b.view(1, -1, 1, 1)).to(x.dtype)


def response_thresholds(x: Tensor, w: Tensor, eps: Tensor, g: Tensor, b: Tensor, tau: Tensor) -> Tensor:
    """Filter response normalisation after a convolution: mean squares of pixels, learned eps, a learned threshold."""
    y = F.conv2d(x, w, stride=2, padding=1)
    nu2 = y.pow(2).mean((2, 3), keepdim=True)
    y = y * torch.rsqrt(nu2 + eps.abs().view(1, -1, 1, 1) + 1e-6)
    return torch.maximum(g.view(1, -1, 1, 1) * y + b.view(1, -1, 1, 1), tau.view(1, -1, 1, 1))


def weighted_norm_gates(x: Tensor, v: Tensor, g: Tensor, cond: Tensor, wc: Tensor, out: Tensor) -> Tensor:
    """A WaveNet layer: weight-normed dilated convolution, a condition upsampled, tanh times sigmoid, a residual."""
    w = v * (g / v.flatten(1).norm(dim=1)).view(-1, 1, 1)
    y = F.conv1d(F.pad(x, (16, 0)), w, dilation=8)
    y = y + F.interpolate(F.conv1d(cond, wc), size=y.shape[-1], mode="nearest")
    a, b = y.chunk(2, 1)
    return (x + F.conv1d(torch.tanh(a) * torch.sigmoid(b), out)) * 0.7071


def private_gradients(x: Tensor, w: Tensor, target: Tensor, noise: Tensor) -> Tensor:
    """DP-SGD of a linear classifier: norms of each example's gradient without forming it, clipped sums, noise."""
    p = F.linear(x, w).float().softmax(-1)
    error = p - F.one_hot(target, w.shape[0])
    norm = (error.square().sum(-1) * x.float().square().sum(-1)).sqrt()
    factor = (1.0 / norm.clamp(min=1.0)).unsqueeze(-1)
    return ((error * factor).to(x.dtype).mT @ x + 0.1 * noise) / len(x)


def convolution_factors(x: Tensor, grad: Tensor, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """K-FAC's factors of a 3x3 convolution: covariances of unfolded patches and of gradients, moving averages."""
    patches = F.unfold(x, 3, padding=1).transpose(1, 2)
    patches = patches.reshape(-1, patches.shape[-1]) / (x.shape[2] * x.shape[3])
    left = patches.mT @ patches / x.shape[0]
    flat = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1]) * x.shape[0]
    return a.lerp(left, 0.05), g.lerp(flat.mT @ flat / flat.shape[0], 0.05)


def slow_and_fast(*tensors: Tensor) -> list[Tensor]:
    """AdEMAMix of many tensors: a fast and a slow moment, decoupled decay, bias corrections, foreach."""
    k = len(tensors) // 5
    p, g, m1, m2, v = (list(tensors[i * k : (i + 1) * k]) for i in range(5))
    m1 = torch._foreach_lerp(m1, g, 0.1)
    m2 = torch._foreach_lerp(m2, g, 0.0001)
    v = torch._foreach_add(torch._foreach_mul(torch._foreach_abs(v), 0.999), torch._foreach_mul(g, g), alpha=0.001)
    den = torch._foreach_add(torch._foreach_div(torch._foreach_sqrt(v), 0.3), 1e-4)
    up = torch._foreach_add(torch._foreach_div(m1, 0.5), torch._foreach_mul(m2, 8.0))
    up = torch._foreach_add(torch._foreach_div(up, den), torch._foreach_mul(p, 0.01))
    return [*torch._foreach_sub(p, torch._foreach_mul(up, 1e-3)), *m1, *m2, *v]


def cautious_adan(*tensors: Tensor) -> list[Tensor]:
    """Adan with cautious masks: gradient differences, three moments, updates that oppose the gradient dropped."""
    k, out = len(tensors) // 6, []
    for i in range(k):
        p, g, last, m, v, n = (tensors[j * k + i] for j in range(6))
        diff = g - last
        m, v = m + 0.02 * (g - m), v + 0.08 * (diff - v)
        n = 0.99 * n.abs() + 0.01 * (g + 0.92 * diff).square()
        up = (m + 0.92 * v) / (n.sqrt() + 1e-3)
        mask = (up * g > 0).to(p.dtype)
        up = up * mask / mask.mean().clamp(min=1e-3)
        out += [(p - 1e-3 * up) / (1 + 1e-5), m, v, n]
    return out


def lookahead_belief(*tensors: Tensor) -> list[Tensor]:
    """AdaBelief with gradient centralisation, then slow weights that move half-way and replace the fast ones."""
    k, out = len(tensors) // 5, []
    for i in range(k):
        p, g, m, s, slow = (tensors[j * k + i] for j in range(5))
        g = g - g.mean(tuple(range(1, g.dim())), keepdim=True)
        m = torch.lerp(m, g, 0.1)
        s = 0.999 * s.abs() + 0.001 * (g - m).square() + 1e-8
        fast = p - 1e-3 * (m / 0.9) / ((s / 0.1).sqrt() + 1e-4)
        slow = slow + 0.5 * (fast - slow)
        out += [slow, m, s]
    return out


def channel_scaled(grad: Tensor, projection: Tensor, m: Tensor, v: Tensor, p: Tensor, last: Tensor) -> tuple[Tensor, ...]:
    """APOLLO: moments of a projected gradient scale the full gradient's channels, with a limit on growth."""
    low = grad @ projection
    m = 0.9 * m + 0.1 * low
    v = 0.999 * v.abs() + 0.001 * low.square()
    step = m / (v.sqrt() + 1e-4)
    scale = step.float().norm(dim=1) / low.float().norm(dim=1).clamp(min=1e-6)
    up = grad * scale[:, None].to(grad.dtype)
    norm = up.float().square().sum().sqrt()
    limit = torch.minimum(norm, 1.01 * last.abs() * 100) / norm.clamp(min=1e-6)
    return p - 1e-2 * up * limit.to(grad.dtype), m, v, norm


def shrunk_blocks(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NVFP4-like: maxima of blocks of 16 under a tensor's scale, e2m1 steps chosen with noise, packed in pairs."""
    whole = x.float().abs().amax() / (6 * 448)
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).clamp(1e-3, 448).to(torch.float16).float()
    y = (blocks / (scale * whole)).clamp(-6, 6)
    steps = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=x.device)
    size = y.abs()
    code = (size[..., None] >= steps[1:]).sum(-1)
    low, high = steps[code], steps[(code + 1).clamp(max=7)]
    up = (size - low) > torch.sigmoid(noise.float()).unflatten(-1, (-1, 16)) * (high - low).clamp(min=1e-3)
    code = (code + up).clamp(max=7) + 8 * (y < 0)
    code = code.flatten(-2).to(torch.uint8)
    return code[:, ::2] | (code[:, 1::2] << 4), scale.squeeze(-1).half(), whole


def squared_hinges(x: Tensor, w: Tensor, labels: Tensor, margins: Tensor) -> Tensor:
    """Label-distribution margins on cosines, deferred weights by classes' frequencies, squared hinges to all others."""
    cos = F.linear(F.normalize(x.float()), F.normalize(w.float()))
    hit = F.one_hot(labels, w.shape[0]).to(cos.dtype)
    own = ((cos - margins.abs() * 0.2) * hit).sum(1, keepdim=True)
    count = torch.bincount(labels, minlength=w.shape[0]).float()
    rate = 0.1 / (1 - 0.9 ** count.clamp(min=1))
    hinge = F.relu(1 + cos - own).square() * (1 - hit)
    return (hinge.sum(1) * rate[labels]).mean()


MIXED = Sized(
    perceptual,
    lambda m, b, c, h: (
        [
            image(m, b, 3, h, h),
            image(m, b, 3, h, h),
            weight(m, c, 3, 3, 3),
            weight(m, 2 * c, c, 3, 3),
            m(1, c, 1, 1),
            m(1, 2 * c, 1, 1),
        ]
    ),
    (2, 4, 8),
)
EDM = Sized(
    preconditioned_noise,
    lambda m, b, c, d, h: [m(b, c, h, h), m(b, c, h, h), m(b), weight(m, d, c + 1, 3, 3), weight(m, c, d, 3, 3)],
    (2, 3, 6, 6),
)
WHITE = Sized(iterated_whitening, lambda m, b, c, h: [m(b, c, h, h), m(c), m(c)], (3, 4, 6), tf32=True)
LAYER = Sized(
    weighted_norm_gates,
    lambda m, b, c, s, k: (
        [m(b, c, s), weight(m, 2 * c, c, 3), m(2 * c), m(b, 20, s // k), weight(m, 2 * c, 20, 1), weight(m, c, c, 1)]
    ),
    (2, 4, 24, 8),
)

BLOCKS: tuple[Block, ...] = (
    Sized(decoupled_distillation, lambda m, b, v: [m(b, v) * 2, m(b, v) * 2, ids(m, v, b)], (5, 9)).block(
        "decoupled distillation", 8192, 1000, training=True
    ),
    Sized(relational_distillation, lambda m, n, d, e: [m(n, d), m(n, e)], (6, 5, 7), SINGLE, tf32=True).block(
        "relational distillation", 256, 128, 192, training=True
    ),
    Sized(
        transferred_attention,
        lambda m, b, c, h: [m(b, c, h, h), m(b, 2 * c, h, h), m(b, 2 * c, h, h), m(b, 4 * c, h, h)],
        (2, 3, 6),
        HALF,
    ).block("transferred attention", 32, 64, 56, training=True),
    Sized(spread_out, lambda m, n, d: [m(n, d), m(n, d)], (9, 5), tf32=True).block("spread out", 2048, 256, training=True),
    Sized(lifted_structure, lambda m, n, d, k: [m(n, d), ids(m, k, n)], (12, 5, 4), SINGLE, tf32=True).block(
        "lifted structure", 1500, 128, 60, training=True
    ),
    Sized(odds_ratio, lambda m, b, s, v: [m(b, s, v), m(b, s, v), ids(m, v, b, s), ids(m, v, b, s)], (2, 7, 11)).block(
        "odds ratio", 4, 256, 32000, training=True
    ),
    Sized(generalised_entropy, lambda m, n, v: [m(n, v), ids(m, v, n), m(n, v)], (7, 9)).block(
        "generalised entropy", 8191, 1203, training=True
    ),
    MIXED.block("perceptual", 8, 64, 128),
    EDM.block("preconditioned noise", 16, 4, 128, 64),
    Sized(
        second_order_step,
        lambda m, b, h: [m(b, 3, h, h), m(b, 3, h, h), m(b, 3, h, h), m(b, 3, h, h), m(3, b)],
        (2, 8),
        SINGLE,
    ).block("second order step", 32, 256),
    Sized(
        renormed_batches,
        lambda m, b, c, h: [image(m, b, c, h, h), weight(m, c, c, 3, 3), m(c), m(c), m(c), m(c)],
        (2, 4, 6),
    ).block("renormed batches", 32, 96, 40, training=True),
    WHITE.block("iterated whitening", 32, 128, 28, training=True),
    Sized(
        response_thresholds,
        lambda m, b, c, h, w: [m(b, c, h, w), weight(m, 2 * c, c, 3, 3), m(2 * c), m(2 * c), m(2 * c), m(2 * c)],
        (2, 4, 7, 6),
    ).block("response thresholds", 16, 64, 113, 112, training=True),
    LAYER.block("weighted norm gates", 8, 128, 8192, 256, training=True),
    Sized(private_gradients, lambda m, n, d, k: [m(n, d), weight(m, k, d), ids(m, k, n), m(k, d)], (9, 8, 5)).block(
        "private gradients", 16384, 2048, 100
    ),
    Sized(
        convolution_factors,
        lambda m, b, c, o, h: [m(b, c, h, h), m(b, o, h, h), m(9 * c, 9 * c), m(o, o)],
        (2, 3, 4, 6),
        SINGLE,
        tf32=True,
    ).block("convolution factors", 16, 64, 128, 28),
    Sized(slow_and_fast, lambda m, k, n: [m(n + i, n) for _ in range(5) for i in range(k)], (3, 7), SINGLE).block(
        "slow and fast", 16, 900
    ),
    Sized(cautious_adan, lambda m, k, n: [m(n - i, n) for _ in range(6) for i in range(k)], (2, 9), SINGLE).block(
        "cautious adan", 10, 1100
    ),
    Sized(lookahead_belief, lambda m, k, c: [m(c + 8 * i, c, 3, 3) for _ in range(5) for i in range(k)], (2, 4), SINGLE).block(
        "lookahead belief", 8, 256
    ),
    Sized(channel_scaled, lambda m, n, d, r: [m(n, d), m(d, r), m(n, r), m(n, r), m(n, d), m(1)[0]], (9, 8, 3)).block(
        "channel scaled", 4096, 11008, 64
    ),
    Sized(shrunk_blocks, lambda m, n, d: [m(n, d), m(n, d)], (5, 32)).block("shrunk blocks", 4096, 4096),
    Sized(squared_hinges, lambda m, n, d, k: [m(n, d), m(k, d), ids(m, k, n), m(k)], (9, 6, 5), SINGLE, tf32=True).block(
        "squared hinges", 4096, 512, 2001, training=True
    ),
)
