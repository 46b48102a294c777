"""Losses, optimisers' steps, fake quantisation and small networks of tables and series."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def tversky(logits: Tensor, target: Tensor) -> Tensor:
    """Focal Tversky and a multi-class focal loss; one-hot targets permuted to channels first."""
    p = torch.softmax(logits, dim=1)
    hot = F.one_hot(target, logits.shape[1]).permute(0, 3, 1, 2).to(p.dtype)
    tp, fp, fn = ((t).sum((0, 2, 3)) for t in (p * hot, p * (1 - hot), (1 - p) * hot))
    t = (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1)
    ce = F.cross_entropy(logits, target, reduction="none")
    return ((1 - t) ** 0.75).mean() + ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def lovasz(logits: Tensor, target: Tensor) -> Tensor:
    """Lovász softmax: errors of each class sorted, weighted by the gradient of the Jaccard index."""
    p = F.softmax(logits, 1).permute(0, 2, 3, 1).reshape(-1, logits.shape[1])
    losses = []
    for c in range(p.shape[1]):
        fg = (target.view(-1) == c).to(p.dtype)
        errors, order = torch.sort((fg - p[:, c]).abs(), 0, descending=True)
        g = fg[order]
        total = g.sum()
        jaccard = 1.0 - (total - g.cumsum(0)) / (total + (1 - g).cumsum(0))
        jaccard = torch.cat((jaccard[:1], jaccard[1:] - jaccard[:-1]))
        losses.append(torch.dot(errors, jaccard.detach()))
    return torch.stack(losses).mean()


def smoothed_by_hand(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """fairseq's label smoothing: gather, sum, a mask of padding."""
    lprobs = F.log_softmax(F.linear(x, w), dim=-1, dtype=torch.float32 if x.dtype != torch.float64 else None)
    target = labels.unsqueeze(-1)
    nll, smooth = -lprobs.gather(dim=-1, index=target), -lprobs.sum(dim=-1, keepdim=True)
    pad = target.eq(0)
    nll, smooth = nll.masked_fill(pad, 0.0).sum(), smooth.masked_fill(pad, 0.0).sum()
    return ((1 - 0.1 - 0.1 / (lprobs.size(-1) - 1)) * nll + 0.1 / (lprobs.size(-1) - 1) * smooth) / (~pad).sum()


def two_divergences(a: Tensor, b: Tensor, labels: Tensor) -> Tensor:
    """R-Drop: cross entropies of two passes, KL both ways and Jensen-Shannon."""
    ce = 0.5 * (F.cross_entropy(a, labels, ignore_index=3) + F.cross_entropy(b, labels, ignore_index=3))
    p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
    kl = F.kl_div(p, q, reduction="batchmean", log_target=True) + F.kl_div(q, p.exp(), reduction="batchmean")
    m = torch.logaddexp(p, q) - math.log(2)
    js = 0.5 * ((p.exp() * (p - m)).sum(-1) + (q.exp() * (q - m)).sum(-1)).mean()
    return ce + kl + js


def angular_margin(x: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    """ArcFace: the angle of the true class grows by a margin."""
    cosine = F.linear(F.normalize(x), F.normalize(w))
    sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(1e-6, 1))
    phi = cosine * math.cos(0.5) - sine * math.sin(0.5)
    phi = torch.where(cosine > math.cos(math.pi - 0.5), phi, cosine - math.sin(math.pi - 0.5) * 0.5)
    hot = torch.zeros_like(cosine)
    hot.scatter_(1, labels.view(-1, 1), 1)
    return F.cross_entropy(64 * (hot * phi + (1.0 - hot) * cosine), labels)


def pairwise_sigmoid(a: Tensor, b: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """SigLIP: every pair a binary problem."""
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T * scale.exp() + bias
    labels = 2 * torch.eye(len(a), device=a.device, dtype=a.dtype) - 1
    return -F.logsigmoid(labels * logits).sum() / len(a)


def self_distillation(student: Tensor, teacher: Tensor, centre: Tensor) -> Tensor:
    """DINO: teacher's crops centred and sharpened, each against all other crops of the student."""
    s = (student / 0.1).chunk(6)
    t = F.softmax((teacher - centre) / 0.04, dim=-1).detach().chunk(2)
    total, count = 0.0, 0
    for i, q in enumerate(t):
        for k, p in enumerate(s):
            if k != i:
                total = total + torch.sum(-q * F.log_softmax(p, dim=-1), dim=-1).mean()
                count += 1
    return total / count


def assigned_prototypes(x: Tensor, prototypes: Tensor) -> Tensor:
    """SwAV: codes by three Sinkhorn rounds, then each view predicts the other's."""
    scores = F.normalize(x, dim=1, p=2) @ F.normalize(prototypes, dim=1, p=2).t()
    a, b = scores.chunk(2)

    def codes(out: Tensor) -> Tensor:
        q = torch.exp(out.detach() / 0.25).t()
        q /= torch.sum(q)
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True) * q.shape[0]
            q /= torch.sum(q, dim=0, keepdim=True) * q.shape[1]
        return (q * q.shape[1]).t()

    one = torch.mean(torch.sum(codes(a) * F.log_softmax(b / 0.1, dim=1), dim=1))
    other = torch.mean(torch.sum(codes(b) * F.log_softmax(a / 0.1, dim=1), dim=1))
    return -0.5 * (one + other)


def variances_and_covariances(a: Tensor, b: Tensor) -> Tensor:
    """VICReg."""
    n, d = a.shape
    loss = 25 * F.mse_loss(a, b)
    for t in (a, b):
        t = t - t.mean(dim=0)
        loss = loss + 12.5 * F.relu(1 - torch.sqrt(t.var(dim=0) + 1e-4)).mean()
        cov = (t.T @ t) / (n - 1)
        off = cov.flatten()[:-1].view(d - 1, d + 1)[:, 1:].flatten()
        loss = loss + off.pow(2).sum() / d
    return loss


def gradient_penalty(real: Tensor, fake: Tensor, share: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """WGAN-GP: a critic's gradient by `torch.func`, differentiated again by the step."""

    def critic(x: Tensor) -> Tensor:
        h = F.leaky_relu(F.linear(x, w1), 0.2)
        return F.linear(F.silu(F.linear(h, w2)), w3).sum()

    s = share.sigmoid()
    g = torch.func.grad(critic)(s * real + (1 - s) * fake)
    return (critic(fake) - critic(real)) / len(real) + 10 * ((g.norm(2, dim=1) - 1) ** 2).mean()


def curvature(x: Tensor, v: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A network's values and directional derivatives by jvp."""
    y, dy = torch.func.jvp(lambda t: F.linear(torch.tanh(F.linear(t, w1)), w2), (x,), (v,))
    return (y * dy).sum(-1)


def soft_alignment(x: Tensor, y: Tensor) -> Tensor:
    """Soft DTW of short series, anti-diagonal by anti-diagonal."""
    d = ((x[:, :, None] - y[:, None]) ** 2).sum(-1)
    b, n, m = d.shape
    flat = F.pad(d, (0, n)).flatten(1)[:, : n * (n + m - 1)].view(b, n, n + m - 1)
    big = d.new_full((b, 1), 1e6)
    before, last = d.new_full((b, n + 1), 1e6), torch.cat((d.new_zeros(b, 1), d.new_full((b, n), 1e6)), 1)
    before, last = last, d.new_full((b, n + 1), 1e6)
    rows = torch.arange(n, device=x.device)
    for k in range(n + m - 1):
        three = torch.stack((before[:, :-1], last[:, :-1], last[:, 1:]), -1)
        r = flat[:, :, k] - torch.logsumexp(-three, -1)
        inside = (rows <= k) & (k - rows < m)
        r = torch.where(inside, r, 1e6)
        before, last = last, torch.cat((big, r), 1)
    return last[:, -1].mean()


def hard_gumbel(logits: Tensor, noise: Tensor, table: Tensor) -> Tensor:
    """A hard sample of a categorical distribution with soft gradients, then an embedding."""
    gumbel = -torch.log(-torch.log(noise.sigmoid().clamp(1e-6, 1 - 1e-6)))
    soft = ((logits + gumbel) / 0.7).softmax(-1)
    index = soft.max(-1, keepdim=True)[1]
    hard = torch.zeros_like(logits).scatter_(-1, index, 1.0)
    return (hard - soft.detach() + soft) @ table


def sparse_maximum(x: Tensor, w: Tensor) -> Tensor:
    """Sparsemax over features by a sort and a cumulative sum, as TabNet masks them."""
    z = F.linear(x, w)
    s, _ = torch.sort(z, dim=-1, descending=True)
    k = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    sums = s.cumsum(-1) - 1
    support = (k * s > sums).sum(-1, keepdim=True)
    tau = sums.gather(-1, support - 1) / support.to(z.dtype)
    return torch.clamp(z - tau, min=0) * x


def two_hot(logits: Tensor, value: Tensor) -> Tensor:
    """MuZero's categorical values: symlog, two bins, scatter_add, cross entropy."""
    v = torch.sign(value) * torch.log1p(value.abs() * 30)
    bins = torch.linspace(-5, 5, logits.shape[-1], device=v.device, dtype=v.dtype)
    at = torch.bucketize(v.clamp(-4.99, 4.99), bins).clamp(1, len(bins) - 1)
    up = (v.clamp(-4.99, 4.99) - bins[at - 1]) / (bins[at] - bins[at - 1])
    target = torch.zeros_like(logits).scatter_add(-1, at[..., None] - 1, 1 - up[..., None])
    target = target.scatter_add(-1, at[..., None], up[..., None])
    return -(target.detach() * logits.log_softmax(-1)).sum(-1).mean()


def fake_quantised(x: Tensor, w: Tensor, step: Tensor) -> Tensor:
    """A convolution with fake quantisation: weights by channel, activations by a learned range."""
    scale = w.detach().abs().amax(dim=(1, 2, 3), keepdim=True) / 127
    wq = torch.clamp(torch.round(w / scale), -128, 127) * scale
    wq = (wq - w).detach() + w
    s = step.abs() + 0.02
    q = torch.clamp(x / s, 0, 255)
    xq = (q.round() - q).detach() * s + q * s
    return F.relu6(F.conv2d(xq, wq, padding=1))


def cast_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 128x128 in float8 with a scale each, rows that no block divides padded."""
    m, n = x.shape
    p = F.pad(x, (0, -n % 128, 0, -m % 128)).view(-(-m // 128), 128, -(-n // 128), 128)
    top = p.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4)
    y = (p * (448.0 / top)).to(torch.float8_e4m3fn)
    return y.view(-(-m // 128) * 128, -1)[:m, :n].contiguous().view(torch.uint8), (top / 448.0).view(p.shape[0], p.shape[2])


def eight_bit_adam(p: Tensor, g: Tensor, m: Tensor, m_scale: Tensor, v: Tensor, v_scale: Tensor) -> None:
    """Adam in place with states of 8 bits, a scale for each 256 values."""
    g = g.view(m.shape).to(m_scale.dtype)
    a = m.to(g.dtype) * m_scale * 0.9 + 0.1 * g
    b = (v.to(g.dtype) * v_scale) * 0.99 + 0.01 * g * g
    p.sub_((1e-3 * a / (b.sqrt() + 1e-3)).view_as(p).to(p.dtype))
    m_scale.copy_(a.abs().amax(1, keepdim=True) / 127 + 1e-8)
    v_scale.copy_(b.amax(1, keepdim=True) / 255 + 1e-8)
    m.copy_((a / m_scale).round().to(torch.int8))
    v.copy_((b / v_scale).round().clamp(0, 255).to(torch.uint8))


def foreach_amsgrad(*tensors: Tensor) -> None:
    """AdamW with the largest second moment, all by torch's own foreach operators."""
    n = len(tensors) // 5
    p, g, m, v, top = (list(tensors[k * n : (k + 1) * n]) for k in range(5))
    torch._foreach_mul_(p, 1 - 1e-4)
    torch._foreach_lerp_(m, g, 0.1)
    torch._foreach_mul_(v, 0.999)
    torch._foreach_addcmul_(v, g, g, 0.001)
    torch._foreach_maximum_(top, v)
    d = torch._foreach_sqrt(top)
    torch._foreach_add_(d, 1e-8)
    torch._foreach_addcdiv_(p, m, d, -1e-3)


def sophia(*tensors: Tensor) -> None:
    """Sophia with a clipped Newton step, and a slow average of all parameters; parameters of the bench's dtype."""
    n = len(tensors) // 5
    for p, g, m, h, slow in zip(*(tensors[k * n : (k + 1) * n] for k in range(5)), strict=True):
        d = g.to(m.dtype)
        m.mul_(0.96).add_(d, alpha=0.04)
        h.lerp_(d.square(), 0.01)
        ratio = (m.abs() / (0.04 * h + 1e-12)).clamp(None, 1)
        p.addcmul_(m.sign().to(p.dtype), ratio.to(p.dtype), value=-1e-3)
        slow.lerp_(p.to(slow.dtype), 0.001)


def rotated_adam(p: Tensor, g: Tensor, q: Tensor, m: Tensor, v: Tensor) -> None:
    """GaLore: Adam in a subspace of few rows, in place."""
    r = q.t() @ g
    m.mul_(0.9).add_(r, alpha=0.1)
    v.mul_(0.999).addcmul_(r, r.conj(), value=0.001)
    p.add_(q @ (m / (v.sqrt() + 1e-8)), alpha=-0.25e-3)


def centred_clipping(*tensors: Tensor) -> list[Tensor]:
    """Gradients less the means of their rows, clipped by the ratio of norms to those of the parameters (AGC)."""
    half = len(tensors) // 2
    out = []
    for p, g in zip(tensors[:half], tensors[half:], strict=True):
        if g.dim() > 1:
            g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
            pn = p.norm(2, dim=tuple(range(1, p.dim())), keepdim=True).clamp(min=1e-3) * 0.01
            gn = g.norm(2, dim=tuple(range(1, g.dim())), keepdim=True)
            g = torch.where(gn > pn, g * (pn / gn.clamp(min=1e-6)), g)
        out.append(g)
    return out


def feature_tokens(x: Tensor, w: Tensor, b: Tensor, cls: Tensor, qkv: Tensor) -> Tensor:
    """FT-transformer: each number a token by a weight of its own, a class token, attention without a mask."""
    t = torch.cat((cls.expand(len(x), -1, -1), x.unsqueeze(-1) * w[None] + b[None]), 1)
    q, k, v = F.linear(F.layer_norm(t, t.shape[-1:]), qkv).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
    a = torch.baddbmm(
        torch.empty(1, 1, 1, device=x.device, dtype=x.dtype),
        q.flatten(0, 1),
        k.flatten(0, 1).mT,
        beta=0,
        alpha=q.shape[-1] ** -0.5,
    )
    y = torch.bmm(a.softmax(-1), v.flatten(0, 1)).view_as(q).transpose(1, 2).flatten(2)
    return (t + y)[:, 0].relu()


def chebyshev(x: Tensor, coefficients: Tensor, centres: Tensor, w: Tensor) -> Tensor:
    """KAN layers: one of Chebyshev polynomials by their recurrence, one of radial functions."""
    t = torch.tanh(x)
    basis = [torch.ones_like(t), t]
    for _ in range(3):
        basis.append(2 * t * basis[-1] - basis[-2])
    y = torch.einsum("bid,iod->bo", torch.stack(basis, -1), coefficients)
    y = F.layer_norm(y, y.shape[-1:])
    return F.linear(torch.exp(-(((y[..., None] - centres) * 2) ** 2)).flatten(1), w)


def auto_correlation(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Autoformer: correlations by FFT, the best delays of the batch, values rolled by them; (batch, length, heads, d)."""
    n = q.shape[1]
    qf, kf = (
        torch.fft.rfft(q.permute(0, 2, 3, 1).contiguous(), dim=-1),
        torch.fft.rfft(k.permute(0, 2, 3, 1).contiguous(), dim=-1),
    )
    corr = torch.fft.irfft(qf * torch.conj(kf), n=n, dim=-1)
    mean = corr.mean(dim=1).mean(dim=1)
    top = int(2 * math.log(n))
    value, delay = torch.topk(mean, top, dim=-1)
    share = torch.softmax(value, dim=-1)
    x = v.permute(0, 2, 3, 1)
    doubled = x.repeat(1, 1, 1, 2)
    at = torch.arange(n, device=q.device).view(1, 1, 1, n)
    out = torch.zeros_like(x)
    for i in range(top):
        moved = torch.gather(doubled, -1, (at + delay[:, i].view(-1, 1, 1, 1)).expand_as(x))
        out = out + moved * share[:, i].view(-1, 1, 1, 1)
    return out.permute(0, 3, 1, 2).relu()


def patched_series(x: Tensor, w: Tensor, pos: Tensor, head: Tensor) -> Tensor:
    """PatchTST: instance norm, overlapping patches by unfold, a linear layer, a head over all patches."""
    mean, std = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
    z = F.pad(((x - mean) / std).transpose(1, 2), (0, 8), mode="replicate").unfold(-1, 16, 8)
    y = F.gelu(F.linear(z, w) + pos)
    return (F.linear(y.flatten(2), head).transpose(1, 2)) * std + mean


def addressing(key: Tensor, memory: Tensor, head: Tensor, shift: Tensor, last: Tensor) -> Tensor:
    """A neural Turing machine's head: by content, blended, shifted in a circle, sharpened, read."""
    strength, gate, sharp = head.split(1, -1)
    c = F.softmax(F.softplus(strength) * F.cosine_similarity(memory + 1e-6, key.unsqueeze(1) + 1e-6, dim=-1), dim=1)
    w = torch.sigmoid(gate) * c + (1 - torch.sigmoid(gate)) * last.softmax(-1)
    s = F.softmax(shift, -1)
    w = s[:, :1] * torch.roll(w, 1, 1) + s[:, 1:2] * w + s[:, 2:] * torch.roll(w, -1, 1)
    w = w ** (1 + F.softplus(sharp))
    w = w / (w.sum(1, keepdim=True) + 1e-6)
    return torch.matmul(w.unsqueeze(1), memory).squeeze(1)


def principal_aggregates(x: Tensor, source: Tensor, target: Tensor, w: Tensor) -> Tensor:
    """PNA: mean, maximum, minimum and deviation of adjacent nodes by scatter_reduce, scaled by degrees."""
    n, d = x.shape
    m = x[source]
    at = target[:, None].expand(-1, d)
    zeros = torch.zeros_like(x)
    mean = zeros.scatter_reduce(0, at, m, "mean", include_self=False)
    square = zeros.scatter_reduce(0, at, m * m, "mean", include_self=False)
    top = zeros.scatter_reduce(0, at, m, "amax", include_self=False)
    low = zeros.scatter_reduce(0, at, m, "amin", include_self=False)
    y = torch.cat((mean, top, low, torch.sqrt(F.relu(square - mean * mean) + 1e-5)), -1)
    degree = torch.bincount(target, minlength=n).clamp(min=1).to(x.dtype)[:, None].log1p()
    return F.relu(F.linear(torch.cat((y, y * degree, y / degree), -1), w))


def _parameters(m: Make, layers: int, d: int, sets: int) -> list[list[Tensor]]:
    shapes = [(d, 2 * d), (2 * d,), (d, 3, 3, 3), (7, d - 1), (1,)] * layers
    return [[m(*s) for s in shapes] for _ in range(sets)]


def _flat(sets: Sequence[Sequence[Tensor]], positive: int) -> list[Tensor]:
    """All tensors; those of the sets from `positive` on without their signs."""
    return [t.abs() if k >= positive else t for k, one in enumerate(sets) for t in one]


def _sophia(m: Make, layers: int, d: int) -> list[Tensor]:
    p, g, a, h, slow = _parameters(m, layers, d, 5)
    return [*p, *g, *(t.float() for t in a), *(t.float().abs() for t in h), *(t.float() for t in slow)]


def _eight(m: Make, n: int, k: int) -> list[Tensor]:
    states = [ids(m, 255, n * k // 256, 256) for _ in range(2)]
    scales = [m(n * k // 256, 1).float().abs() * 0.01 + 0.001 for _ in range(2)]
    return [m(n, k), m(n, k), (states[0] - 127).to(torch.int8), scales[0], states[1].to(torch.uint8), scales[1]]


def _head(m: Make, b: int, n: int, d: int) -> list[Tensor]:
    return [m(b, d), m(b, n, d), m(b, 3), m(b, 3), m(b, n)]


def _subspace(m: Make, r: int, c: int, k: int) -> list[Tensor]:
    return [m(r, c), m(r, c), m(r, k) * r**-0.5, m(k, c), m(k, c).abs()]


CLASSES = Sized(angular_margin, lambda m, n, d, c: [m(n, d), m(c, d), ids(m, c, n)], (5, 8, 7), SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    Sized(tversky, lambda m, b, c, h, w: [m(b, c, h, w), ids(m, c, b, h, w)], (2, 4, 5, 6), SINGLE).block(
        "focal tversky", 8, 11, 250, 251, training=True
    ),
    Sized(lovasz, lambda m, b, c, h, w: [m(b, c, h, w), ids(m, c, b, h, w)], (2, 3, 5, 6), SINGLE).block(
        "lovasz", 4, 5, 180, 200, training=True
    ),
    Sized(smoothed_by_hand, lambda m, n, d, v: [m(n, d), weight(m, v, d), ids(m, v, n)], (7, 8, 20)).block(
        "smoothing by hand", 3000, 512, 20003, training=True
    ),
    Sized(two_divergences, lambda m, n, c: [m(n, c), m(n, c), ids(m, c, n)], (7, 9), SINGLE).block(
        "two divergences", 4000, 3003, training=True
    ),
    CLASSES.block("angular margin", 512, 512, 20000, training=True),
    Sized(pairwise_sigmoid, lambda m, n, d: [m(n, d), m(n, d), m(1), m(1)], (7, 8)).block(
        "pairwise sigmoid", 4000, 768, training=True
    ),
    Sized(self_distillation, lambda m, b, d: [m(6 * b, d), m(2 * b, d), m(d)], (3, 9)).block(
        "self distillation", 32, 65536, training=True
    ),
    Sized(assigned_prototypes, lambda m, n, d, k: [m(2 * n, d), m(k, d)], (5, 8, 7), SINGLE, tf32=True).block(
        "assigned prototypes", 2000, 128, 3000, training=True
    ),
    Sized(variances_and_covariances, lambda m, n, d: [m(n, d), m(n, d)], (7, 5), SINGLE, tf32=True).block(
        "variances and covariances", 1000, 2048, training=True
    ),
    Sized(
        gradient_penalty,
        lambda m, n, d, h: [m(n, d), m(n, d), m(n, 1), weight(m, h, d), weight(m, h, h), weight(m, 1, h)],
        (5, 6, 8),
        SINGLE,
        tf32=True,
    ).block("gradient penalty", 2000, 784, 512, training=True),
    Sized(
        curvature, lambda m, n, d, h: [m(n, d), m(n, d), weight(m, h, d), weight(m, 9, h)], (5, 6, 8), SINGLE, tf32=True
    ).block("directional derivatives", 5000, 100, 300, training=True),
    Sized(soft_alignment, lambda m, b, n, k, d: [m(b, n, d), m(b, k, d)], (2, 4, 5, 3), SINGLE).block(
        "soft alignment", 256, 20, 24, 12, training=True
    ),
    Sized(hard_gumbel, lambda m, n, k, d: [m(n, k), m(n, k), m(k, d)], (7, 9, 5), SINGLE, tf32=True).block(
        "hard gumbel", 16000, 320, 128, training=True
    ),
    Sized(sparse_maximum, lambda m, n, d: [m(n, d), weight(m, d, d) * 2], (5, 9), SINGLE, tf32=True).block(
        "sparse maximum", 8192, 100, training=True
    ),
    Sized(two_hot, lambda m, n, k: [m(n, k), m(n)], (7, 255), SINGLE).block("two hot", 16000, 255, training=True),
    Sized(
        fake_quantised, lambda m, b, c, h: [image(m, b, c, h, h), weight(m, c + 8, c, 3, 3), m(1)], (2, 3, 5), SINGLE, tf32=True
    ).block("fake quantised", 16, 56, 57, training=True),
    Sized(cast_blocks, lambda m, r, c: [m(r, c)], (130, 9)).block("cast blocks", 4000, 7100),
    Sized(eight_bit_adam, _eight, (4, 128)).block("eight bit adam", 4096, 4096),
    Sized(foreach_amsgrad, lambda m, n, d: _flat(_parameters(m, n, d, 5), 3), (1, 5), SINGLE).block("foreach amsgrad", 12, 500),
    Sized(sophia, _sophia, (1, 5)).block("sophia", 10, 640),
    Sized(rotated_adam, _subspace, (9, 7, 4), SINGLE, tf32=True).block("rotated adam", 2048, 3000, 128),
    Sized(centred_clipping, lambda m, n, d: _flat(_parameters(m, n, d, 2), 9), (1, 5)).block("centred clipping", 16, 512),
    Sized(
        feature_tokens,
        lambda m, n, f, d: [m(n, f), m(f, d), m(f, d), m(1, 1, d), weight(m, 3 * d, d)],
        (3, 5, 16),
        SINGLE,
        tf32=True,
    ).block("feature tokens", 512, 99, 192, training=True),
    Sized(
        chebyshev,
        lambda m, n, i, o: [m(n, i), m(i, o, 5) * (5 * i) ** -0.5, m(6), weight(m, o, 6 * o)],
        (5, 6, 7),
        SINGLE,
        tf32=True,
    ).block("chebyshev layers", 8192, 128, 100, training=True),
    Sized(auto_correlation, lambda m, b, n, h, d: [m(b, n, h, d) for _ in range(3)], (2, 12, 2, 4), SINGLE).block(
        "auto-correlation", 16, 336, 8, 64, training=True
    ),
    Sized(
        patched_series,
        lambda m, b, n, s, d: [m(b, n, s), weight(m, d, 16), m(n // 8, d), weight(m, 24, d * (n // 8))],
        (2, 40, 3, 6),
        SINGLE,
        tf32=True,
    ).block("patched series", 32, 512, 21, 128, training=True),
    Sized(addressing, _head, (3, 7, 4), SINGLE).block("addressing", 256, 1001, 40, training=True),
    Sized(
        principal_aggregates,
        lambda m, n, e, d: [m(n, d), ids(m, n, e), ids(m, n, e), weight(m, 24, 12 * d)],
        (7, 20, 4),
        SINGLE,
        tf32=True,
    ).block("principal aggregates", 20000, 160000, 75, training=True),
)
