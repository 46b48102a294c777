"""Blocks of series and records: sounds, prices, events, samples with replacement, calibrations; and inputs of odd layouts."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def channel_gains(x: Tensor, smooth: Tensor, alpha: Tensor, delta: Tensor, power: Tensor) -> Tensor:
    """PCEN: a smoothed energy of each channel by a recurrence over frames, a learned gain, bias and root."""
    energy = x.square()
    s = torch.sigmoid(smooth)
    last, found = energy[..., 0], []
    for t in range(x.shape[-1]):
        last = (1 - s) * last + s * energy[..., t]
        found.append(last)
    m = torch.stack(found, -1)
    gain = (m + 1e-6) ** -torch.sigmoid(alpha)[:, None]
    d, r = F.softplus(delta)[:, None], torch.sigmoid(power)[:, None]
    return (energy * gain + d) ** r - d**r


def logistic_mixture(x: Tensor, y: Tensor) -> Tensor:
    """The negative log-likelihood of 16-bit samples under ten discretised logistics each, edges open."""
    mix, mean, scale = y.float().chunk(3, 1)
    x = x.float().tanh()[:, None]
    scale = scale.clamp(min=-7)
    inverse = torch.exp(-scale)
    up, down = inverse * (x - mean + 1 / 65535), inverse * (x - mean - 1 / 65535)
    gap = torch.sigmoid(up) - torch.sigmoid(down)
    mid = inverse * (x - mean)
    dense = mid - scale - 2 * F.softplus(mid) - math.log(32767.5)
    inner = torch.where(gap > 1e-5, gap.clamp(min=1e-12).log(), dense)
    logp = torch.where(x < -0.999, up - F.softplus(up), torch.where(x > 0.999, -F.softplus(down), inner))
    return -(logp + mix.log_softmax(1)).logsumexp(1).mean()


def permuted_sources(made: Tensor, wanted: Tensor) -> Tensor:
    """Scale-invariant ratios of three sources with three estimates, the best of six orders of each recording."""
    made, wanted = (t.float() - t.float().mean(-1, keepdim=True) for t in (made, wanted))
    a, b = made[:, :, None], wanted[:, None]
    part = (a * b).sum(-1, keepdim=True) / (b.square().sum(-1, keepdim=True) + 1e-8) * b
    ratio = 10 * torch.log10(part.square().sum(-1) / ((a - part).square().sum(-1) + 1e-8) + 1e-8)
    orders = itertools.permutations(range(3))
    totals = torch.stack([torch.stack([ratio[:, i, k] for i, k in enumerate(o)]).sum(0) for o in orders], -1)
    return -totals.max(-1).values.mean() / 3


def pitch(x: Tensor) -> tuple[Tensor, Tensor]:
    """YIN: squared differences of a frame with its delays, divided by their running mean; the first dip, refined."""
    frames = x.unfold(-1, 512, 256) if x.shape[-1] > 600 else x.unfold(-1, 16, 8)
    size = frames.shape[-1] // 2
    delayed = frames.unfold(-1, size, 1)[..., 1:, :]
    d = (frames[..., None, :size] - delayed).square().sum(-1)
    d = d * torch.arange(1, d.shape[-1] + 1, device=x.device) / (d.cumsum(-1) + 1e-8)
    low = d < 0.4
    dip = torch.where(low.any(-1), low.int().argmax(-1), d.argmin(-1)).clamp(1, d.shape[-1] - 2)
    a, b, c = (d.gather(-1, (dip + k)[..., None])[..., 0] for k in (-1, 0, 1))
    return dip + 1 + (a - c) / (2 * (a - 2 * b + c).abs() + 1e-3), b


def folded_chunks(x: Tensor, w: Tensor, back: Tensor) -> Tensor:
    """Dual-path separation: half-overlapping chunks, a layer along and one across them, chunks added up again."""
    b, c, n = x.shape
    size = 128 if n > 500 else 4
    chunks = F.pad(x, (size // 2, size // 2 + -n % (size // 2))).unfold(-1, size, size // 2)
    y = chunks + F.silu(torch.einsum("bcts,sr->bctr", chunks, w))
    y = y + torch.einsum("bcts,cd->bdts", F.group_norm(y, 1), back)
    flat = y.permute(0, 1, 3, 2).reshape(b, c * size, -1)
    length = (y.shape[2] - 1) * size // 2 + size
    whole = F.fold(flat, (1, length), (1, size), stride=(1, size // 2))[:, :, 0]
    return whole[..., size // 2 : size // 2 + n]


def monotonic_paths(scores: Tensor) -> Tensor:
    """Glow-TTS: the best monotonic alignment of tokens and frames, forward by a loop, then back by another."""
    b, t, n = scores.shape
    value = torch.full((b, n), -1e9, device=scores.device, dtype=scores.dtype)
    value[:, 0] = 0
    came = []
    for i in range(t):
        before = F.pad(value[:, :-1], (1, 0), value=-1e9)
        came.append(before > value)
        value = torch.maximum(value, before) + scores[:, i]
    at = torch.full((b,), n - 1, device=scores.device)
    found = []
    for i in reversed(range(t)):
        found.append(at)
        at = (at - came[i].gather(1, at[:, None])[:, 0].long()).clamp(min=0)
    return torch.stack(found[::-1], 1)


def volatility(returns: Tensor, params: Tensor) -> Tensor:
    """GJR-GARCH: variances by a recurrence, Student's log-likelihood of each series with parameters of its own."""
    omega, alpha, gamma, beta = (F.softplus(params[i] - 2) for i in range(4))
    nu = 2.1 + F.softplus(params[4])
    total = 1 + alpha + gamma + beta
    h = returns.square().mean(0)
    loss = torch.zeros_like(h)
    for r in returns.unbind(0):
        loss = loss + 0.5 * h.log() + (nu + 1) / 2 * torch.log1p(r * r / (h * (nu - 2)))
        h = omega + ((alpha + gamma * (r < 0)) * r * r + beta * h) / total
    constant = torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * (math.pi * (nu - 2)).log()
    return (loss / len(returns) - constant).mean()


def drawdowns(scores: Tensor, returns: Tensor) -> Tensor:
    """Weights of assets by softmax, costs of turnover, Sharpe's ratio and the deepest fall below the running maximum."""
    w = scores.softmax(-1)
    gain = (w * returns * 0.01).sum(-1) - 1e-3 * (w[:, 1:] - w[:, :-1]).abs().sum(-1).mean(-1, keepdim=True)
    wealth = gain.cumsum(-1)
    fall = (wealth.cummax(-1).values - wealth).amax(-1)
    return (fall - gain.mean(-1) / (gain.std(-1) + 1e-4)).mean()


def rolling_betas(x: Tensor, market: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes and residual deviations of each series on the market in windows of 60, by differences of running sums."""
    size = 60 if len(x) > 100 else 4

    def window(t: Tensor) -> Tensor:
        total = F.pad(t.cumsum(0), (0, 0, 1, 0))
        return (total[size:] - total[:-size]) / size

    m = market[:, None]
    mx, mm = window(x), window(m)
    beta = (window(x * m) - mx * mm) / (window(m * m) - mm**2 + 1e-6)
    rest = window(x * x) - mx**2 - beta**2 * (window(m * m) - mm**2)
    return beta, rest.clamp(min=0).sqrt()


def resampled_statistics(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bootstrap: means, deviations and medians of samples with replacement, and intervals of each."""
    samples = x[chosen]
    stats = torch.stack([samples.mean(-1), samples.std(-1), samples.median(-1).values])
    ordered = stats.sort(-1).values
    n = ordered.shape[-1]
    return ordered[:, n // 20], ordered[:, n - 1 - n // 20], (stats - stats.mean(-1, keepdim=True)).pow(3).mean(-1)


def calibration(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Expected calibration error in 15 bins, and the area under the curve of the confidences by ranks."""
    confidence, best = logits.float().softmax(-1).max(-1)
    right = (best == target).float()
    which = (confidence * 15).long().clamp(max=14)
    zero = torch.zeros(15, device=logits.device, dtype=confidence.dtype)
    count, hits = zero.index_add(0, which, torch.ones_like(confidence)), zero.index_add(0, which, right.to(confidence.dtype))
    gap = (hits - zero.index_add(0, which, confidence)).abs().sum() / len(target)
    rank = confidence.argsort().argsort().to(confidence.dtype)
    return gap, (rank * right).sum() / right.sum().clamp(min=1) / len(target) + count.max()


def excited_events(times: Tensor, decay: Tensor, rates: Tensor) -> Tensor:
    """A Hawkes process of several kernels: log intensities at each event by running sums, minus their integral."""
    at = F.softplus(times).cumsum(-1) / times.shape[-1]
    speed = F.softplus(decay)[:, None, None]
    weight = F.softplus(rates)[:, None, None]
    past = torch.exp(speed * at).cumsum(-1) - torch.exp(speed * at)
    intensity = 1 + (weight * speed * torch.exp(-speed * at) * past).sum(0)
    whole = at[:, -1] + (weight * (1 - torch.exp(-speed * (at[:, -1:] - at)))).sum((0, 2))
    return (whole - intensity.log().sum(-1)).mean()


def missing_values(x: Tensor, w: Tensor) -> Tensor:
    """Columns with gaps: means and deviations of what is there, filled and flagged, then a layer."""
    gaps = x > 1
    y = torch.where(gaps, float("nan"), x)
    mean = torch.nanmean(y, 0)
    count = (~y.isnan()).sum(0)
    spread = ((torch.nan_to_num(y - mean, nan=0.0) ** 2).sum(0) / (count - 1).clamp(min=1) + 0.1).sqrt()
    filled = torch.where(gaps, mean, x)
    return F.linear(torch.cat([F.silu((filled - mean) / (spread + 1e-3)), gaps.to(x.dtype)], -1), w)


def special_likelihoods(x: Tensor, k: Tensor) -> Tensor:
    """Von Mises', beta's, Student's and Weibull's log-densities with parameters of each element, averaged."""
    k = F.softplus(k) + 0.5
    circle = k * torch.cos(x) - torch.log(torch.special.i0e(k)) - k - math.log(2 * math.pi)
    p = torch.sigmoid(x).clamp(1e-4, 1 - 1e-4)
    beta = (k - 1) * p.log() + 2 * torch.log1p(-p) - torch.lgamma(k) + torch.lgamma(k + 3)
    student = torch.lgamma((k + 1) / 2) - torch.lgamma(k / 2) - (k + 1) / 2 * torch.log1p(x * x / k)
    normal = torch.log(torch.special.ndtr(x).clamp(min=1e-6)) + torch.erfinv(p * 0.9) + torch.special.log_ndtr(x)
    return (circle + beta + student + 0.1 * normal + torch.digamma(k) * 0.01).mean()


def strided_inputs(even: Tensor, turned: Tensor, repeated: Tensor, inner: Tensor) -> tuple[Tensor, Tensor]:
    """Every second column of a wider tensor, a transpose, a row repeated by a stride of zero, a window of a larger block."""
    y = even * turned + repeated
    return (y - y.mean(0)) / (y.std(0) + 1e-3) + inner.sigmoid(), (inner * turned).sum(1)


def kept_in_place(state: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """A state whose odd columns move, whose border is cleared, whose low values are cut; a count of rows, all in place."""
    state[:, 1::2] += 0.5 * x[:, 1::2]
    state[:, ::2].mul_(0.9).clamp_(-2, 2)
    state[0].zero_()
    state[-1] = state[-2]
    state[state < -1] = -1.0
    counts[(x.sum(1) > 0).long()] += 1
    counts.add_((state.amax(1) > 1).to(counts.dtype))
    state.diagonal().fill_(1)
    return state.sum(1, keepdim=True).expand_as(x).contiguous() + x


def unit_sizes(x: Tensor, w: Tensor, none: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Axes of one and of nothing: norms, softmaxes, sums and cats along them."""
    y = F.layer_norm(x, (x.shape[-1],)) * w
    p = y.softmax(1) + y.log_softmax(2)
    whole = torch.cat([p[:, 0], none[:, 0]], 0)
    return whole, none.sum(0) + 1, (none.mT @ none).sum((0, 1)) + 2, p.std(1, correction=0) + p.amax(1) + p.cumsum(1)[:, -1]


def mirrored(x: Tensor, w: Tensor) -> Tensor:
    """A signal, its mirror image and three rolls of it beside each other, filtered, folded back on itself."""
    n = x.shape[-1]
    many = torch.cat([x, x.flip(-1), *(x.roll(s, -1) for s in (1, 5, -n // 3))], 1)
    y = torch.tanh(torch.einsum("bcn,cd->bdn", many, w))
    half = n // 2
    return y[..., :half] + y[..., n - half :].flip(-1) - torch.cat([y[..., 1:half], y[..., :1]], -1)


def one_row(x: Tensor, table: Tensor, head: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """A single row through a layer, a head and a search for its five best, as in a service with one user."""
    y = F.gelu(x @ table)
    logits = (F.layer_norm(y, y.shape[-1:]) @ head.mT + bias).float()
    top = logits.log_softmax(-1).topk(5)
    return top.values.exp(), top.indices


GAINS = Sized(channel_gains, lambda m, b, c, n: [m(b, c, n) + 0.01, m(c), m(c), m(c), m(c)], (2, 3, 7), SINGLE)
CHUNKS = Sized(folded_chunks, lambda m, b, c, n, s: [m(b, c, n), weight(m, s, s), weight(m, c, c)], (2, 3, 13, 4), tf32=True)
ODD = Sized(mirrored, lambda m, b, c, n: [m(b, c, n), weight(m, 5 * c, c)], (2, 3, 13))

BLOCKS: tuple[Block, ...] = (
    *GAINS.both("channel gains", 32, 128, 100),
    Sized(logistic_mixture, lambda m, b, n: [m(b, n), m(b, 30, n)], (2, 9), SINGLE).block(
        "logistic mixture", 16, 16001, training=True
    ),
    Sized(permuted_sources, lambda m, b, n: [m(b, 3, n), m(b, 3, n)], (3, 17), SINGLE).block(
        "permuted sources", 16, 32000, training=True
    ),
    Sized(pitch, lambda m, b, n: [m(b, n)], (2, 50), SINGLE).block("pitch", 8, 80000),
    *CHUNKS.both("folded chunks", 4, 64, 8000, 128),
    Sized(monotonic_paths, lambda m, b, t, n: [m(b, t, n)], (2, 9, 4), SINGLE).block("monotonic paths", 64, 80, 30),
    Sized(volatility, lambda m, t, n: [m(t, n), m(5, n)], (6, 7), SINGLE).block("volatility", 60, 100003, training=True),
    Sized(drawdowns, lambda m, b, t, n: [m(b, t, n), m(b, t, n)], (2, 9, 5), SINGLE).block(
        "drawdowns", 256, 504, 60, training=True
    ),
    Sized(rolling_betas, lambda m, t, n: [m(t, n), m(t)], (11, 5), DOUBLE).block("rolling betas", 2520, 3000),
    Sized(resampled_statistics, lambda m, n, k: [m(n), ids(m, n, k, n)], (21, 40), SINGLE).block(
        "resampled statistics", 2001, 4000
    ),
    Sized(calibration, lambda m, n, c: [m(n, c), ids(m, c, n)], (30, 5), SINGLE).block("calibration", 200003, 100),
    Sized(excited_events, lambda m, b, n: [m(b, n), m(3), m(3)], (2, 9), SINGLE).block(
        "excited events", 500, 4001, training=True
    ),
    Sized(missing_values, lambda m, n, d, k: [m(n, d), weight(m, k, 2 * d)], (9, 5, 4), SINGLE).block(
        "missing values", 20000, 203, 64, training=True
    ),
    Sized(special_likelihoods, lambda m, n: [m(n), m(n)], (31,), SINGLE).block("special likelihoods", 1000003, training=True),
    Sized(
        strided_inputs,
        lambda m, n, d: [
            m(n, 2 * d)[:, ::2],
            m(d, n).mT,
            m(1, d).expand(n, d),
            m(n + 4, d + 3)[2:-2, 1 : d + 1],
        ],
        (7, 6),
        torch.bfloat16,
    ).block("strided inputs", 4001, 1003),
    Sized(kept_in_place, lambda m, n, d: [m(n, d), m(n, d), m(n)], (7, 9), SINGLE).block("kept in place", 4003, 2001),
    Sized(unit_sizes, lambda m, n, d: [m(n, 1, d), m(1, d), m(0, 1, d)], (5, 7)).block("unit sizes", 3001, 515),
    *ODD.both("mirrored", 16, 24, 16001),
    Sized(one_row, lambda m, d, h, v: [m(1, d), weight(m, d, h), weight(m, v, h), m(v)], (6, 8, 30)).block(
        "one row", 1024, 4096, 50257
    ),
)
