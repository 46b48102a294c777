"""Losses, optimizers and small models, as tutorials have them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def clip_loss(a: Tensor, b: Tensor, wa: Tensor, wb: Tensor, scale: Tensor) -> Tensor:
    """Images and texts in one space, the loss of both directions."""
    a, b = F.normalize(F.linear(a, wa), dim=-1), F.normalize(F.linear(b, wb), dim=-1)
    logits = (scale.exp() * a @ b.t()).float()
    labels = torch.arange(logits.shape[0], device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def multi_class_dice(logits: Tensor, labels: Tensor) -> Tensor:
    """Dice and cross-entropy of images with several classes."""
    p = logits.float().softmax(1)
    hot = F.one_hot(labels, logits.shape[1]).permute(0, 3, 1, 2).float()
    both = (p * hot).sum((0, 2, 3))
    dice = 1 - (2 * both + 1) / (p.sum((0, 2, 3)) + hot.sum((0, 2, 3)) + 1)
    return dice.mean() + F.cross_entropy(logits.float(), labels)


def detection(logits: Tensor, corners: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """RetinaNet: focal loss of all anchors, smooth L1 of those with an object."""
    hot = F.one_hot(labels, logits.shape[-1] + 1)[..., 1:].float()
    p = torch.sigmoid(logits.float())
    ce = F.binary_cross_entropy_with_logits(logits.float(), hot, reduction="none")
    focal = (0.25 * hot + 0.75 * (1 - hot)) * (1 - (p * hot + (1 - p) * (1 - hot))) ** 2 * ce
    has = (labels > 0).float()
    near = F.smooth_l1_loss(corners.float(), targets.float(), reduction="none").sum(-1)
    return (focal.sum() + (near * has).sum()) / has.sum().clamp(min=1)


def generalised_rectangles(a: Tensor, b: Tensor) -> Tensor:
    """One minus the generalised overlap of pairs of rectangles by centres and sizes."""
    a = torch.cat([a[:, :2] - a[:, 2:].abs() / 2, a[:, :2] + a[:, 2:].abs() / 2], -1)
    b = torch.cat([b[:, :2] - b[:, 2:].abs() / 2, b[:, :2] + b[:, 2:].abs() / 2], -1)
    inner = (torch.min(a[:, 2:], b[:, 2:]) - torch.max(a[:, :2], b[:, :2])).clamp(min=0).prod(-1)
    outer = (torch.max(a[:, 2:], b[:, 2:]) - torch.min(a[:, :2], b[:, :2])).prod(-1)
    union = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1) - inner
    return (1 - inner / (union + 1e-7) + (outer - union) / (outer + 1e-7)).mean()


def ranked_pairs(scores: Tensor, relevance: Tensor) -> Tensor:
    """All pairs of a list that are in the wrong order, by a logistic loss."""
    apart = scores[:, :, None] - scores[:, None]
    better = (relevance[:, :, None] > relevance[:, None]).float()
    return (F.softplus(-apart) * better).sum() / better.sum()


def beta_autoencoder(x: Tensor, e: Tensor, heads: Tensor, d: Tensor, o: Tensor, noise: Tensor) -> Tensor:
    """A variational autoencoder's loss."""
    mean, log = F.linear(F.relu(F.linear(x, e)), heads).chunk(2, -1)
    z = mean + noise * torch.exp(0.5 * log)
    out = F.linear(F.relu(F.linear(z, d)), o)
    spread = -0.5 * (1 + log - mean.square() - log.exp()).sum(-1)
    return (F.binary_cross_entropy_with_logits(out, torch.sigmoid(x), reduction="none").sum(-1) + spread).mean()


def vector_quantised(x: Tensor, codes: Tensor) -> Tensor:
    """VQ-VAE: the nearest code of each pixel, straight-through, with both losses."""
    flat = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    apart = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ codes.t() + codes.pow(2).sum(1)
    q = codes[apart.argmin(1)].view(x.shape[0], x.shape[2], x.shape[3], -1).permute(0, 3, 1, 2)
    loss = F.mse_loss(q, x.detach()) + 0.25 * F.mse_loss(q.detach(), x)
    return loss + (x + (q - x).detach()).square().mean()


def noise_loss(x: Tensor, noise: Tensor, at: Tensor, alphas: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A diffusion model's loss: noise by a schedule, a layer in place of a network, weights by the signal."""
    a = alphas.sigmoid()[at][:, None, None, None]
    noisy = a.sqrt() * x + (1 - a).sqrt() * noise
    weights = torch.clamp(a / (1 - a), max=5.0)
    return (weights * (F.conv2d(noisy, w, b, padding=1) - noise).square()).mean()


def deep_and_wide(tables: Tensor, at: Tensor, dense: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """DeepFM: first orders, pairs by squares of sums, and three layers of the embeddings."""
    e = torch.stack([tables[k][at[:, k]] for k in range(at.shape[1])], 1)
    pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1, keepdim=True)
    y = F.relu(F.linear(torch.cat([e.flatten(1), dense], -1), a))
    return torch.sigmoid(F.linear(F.relu(F.linear(y, b)), c) + pairs + e[..., :1].sum(1))


def crossed_features(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """DCN V2: three layers of crosses with the input."""
    y = x
    for k in range(3):
        y = x * F.linear(y, w[k], b[k]) + y
    return y


def mixture_density(x: Tensor, w: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """The likelihood of numbers under eight normal distributions that a layer says."""
    share, mean, log = F.linear(x, w, b).float().chunk(3, -1)
    z = (y[:, None].float() - mean) * torch.exp(-log)
    return -torch.logsumexp(F.log_softmax(share, -1) - 0.5 * z.square() - log - 0.5 * math.log(2 * math.pi), -1).mean()


def clusters(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """A step of k-means."""
    at = torch.cdist(x, centres).argmin(1)
    total = torch.zeros_like(centres).index_add(0, at, x)
    count = torch.bincount(at, minlength=centres.shape[0]).to(x.dtype)
    return total / count.clamp(min=1)[:, None], at


def balanced_transport(x: Tensor, y: Tensor) -> Tensor:
    """Eight Sinkhorn iterations by logarithms between two clouds of points."""
    cost = (x[:, :, None] - y[:, None]).square().sum(-1) / 0.1
    u, v = torch.zeros_like(cost[:, :, 0]), torch.zeros_like(cost[:, 0])
    for _ in range(8):
        u = -torch.logsumexp(v[:, None] - cost, 2)
        v = -torch.logsumexp(u[:, :, None] - cost, 1)
    return (torch.exp(u[:, :, None] + v[:, None] - cost) * cost).sum((1, 2)).mean()


def weighted_adam(step: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """AdamW by hand for a few parameters, with clipping by the norm of all gradients."""
    n = len(tensors) // 4
    p, g, m, v = (tensors[k * n : k * n + n] for k in range(4))
    norm = torch.stack([one.float().norm() for one in g]).norm()
    share = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    out: list[Tensor] = []
    for a, b, c, d in zip(p, g, m, v, strict=True):
        b = b.float() * share
        c, d = c * 0.9 + b * 0.1, d * 0.999 + b * b * 0.001
        fixed = (c / (1 - 0.9**step)) / ((d / (1 - 0.999**step)).sqrt() + 1e-8)
        out += [a * (1 - 1e-4) - (1e-3 * fixed).to(a.dtype), c, d]
    return tuple(out)


def averaged(decay: Tensor, *tensors: Tensor) -> Sequence[Tensor]:
    """The moving average of a model's weights, with their distances."""
    n = len(tensors) // 2
    new = [a * decay + b * (1 - decay) for a, b in zip(tensors[:n], tensors[n:], strict=True)]
    return [*new, torch.stack([(a - b).float().square().mean() for a, b in zip(new, tensors[n:], strict=True)])]


def spectrogram(x: Tensor, window: Tensor, mel: Tensor) -> Tensor:
    """Logarithmic mel energies, normalised over time, by unfold and an FFT."""
    frames = x.unfold(-1, window.shape[0], 160) * window
    power = torch.fft.rfft(frames).abs().square()
    y = torch.log10((power @ mel).clamp(min=1e-10))
    y = torch.maximum(y, y.amax((1, 2), keepdim=True) - 8.0)
    return (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-5)


def distances(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The five nearest of a set of points to each of another, by cosine."""
    a, b = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    near, at = (a @ b.t()).topk(5, -1)
    return 1 - near.float(), at


def emphasised(x: Tensor, mean: Tensor, std: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows normalised by running statistics, clipped, with masked means and maxima of columns."""
    y = ((x - mean) / (std.abs() + 1e-3)).clamp(-5, 5)
    seen = mask > 0
    return y, (y * seen).sum(0) / seen.sum(0).clamp(min=1), y.masked_fill(~seen, float("-inf")).amax(0)


DICE = Sized(multi_class_dice, lambda m, b, c, h, w: [m(b, c, h, w), ids(m, c, b, h, w)], (2, 3, 4, 5))
WIDE = Sized(
    deep_and_wide,
    lambda m, b, f, n, d: [
        m(f, n, d), ids(m, n, b, f), m(b, 13), weight(m, 400, f * d + 13), weight(m, 400, 400), weight(m, 1, 400),
    ],
    (6, 4, 9, 4),
)  # fmt: skip
BLOCKS: tuple[Block, ...] = (
    Sized(clip_loss, lambda m, b, d, e: [m(b, d), m(b, d), weight(m, e, d), weight(m, e, d), m(1)], (5, 8, 4)).block(
        "two encoders", 3000, 768, 512, training=True
    ),
    DICE.block("many classes of pixels", 12, 19, 250, 257, training=True),
    Sized(detection, lambda m, b, a, c: [m(b, a, c), m(b, a, 4), ids(m, c, b, a), m(b, a, 4)], (2, 9, 3), HALF).block(
        "anchors and rectangles", 6, 40001, 80, training=True
    ),
    Sized(generalised_rectangles, lambda m, n: [m(n, 4), m(n, 4)], (9,), SINGLE).block(
        "generalised rectangles", 300007, training=True
    ),
    Sized(ranked_pairs, lambda m, b, n: [m(b, n), m(b, n)], (2, 7), SINGLE).block("ranked pairs", 96, 500, training=True),
    Sized(
        beta_autoencoder,
        lambda m, b, d, h, z: [m(b, d), weight(m, h, d), weight(m, 2 * z, h), weight(m, h, z), weight(m, d, h), m(b, z)],
        (5, 9, 6, 3),
    ).block("beta autoencoder", 6000, 784, 400, 20, training=True),
    Sized(vector_quantised, lambda m, b, c, h, n: [m(b, c, h, h), m(n, c)], (2, 4, 3, 7), SINGLE).block(
        "vector quantised", 24, 64, 32, 512, training=True
    ),
    Sized(
        noise_loss,
        lambda m, b, c, h: [m(b, c, h, h), m(b, c, h, h), ids(m, 1000, b), m(1000), weight(m, c, c, 3, 3), m(c)],
        (2, 3, 5),
    ).block("noise loss", 24, 64, 64, training=True),
    WIDE.block("deep and wide", 8001, 26, 3000, 16),
    WIDE.block("deep and wide", 4000, 26, 2000, 16, training=True),
    Sized(crossed_features, lambda m, b, d: [m(b, d), m(3, d, d) * d**-0.5, m(3, d)], (5, 8)).block(
        "crossed features", 8001, 560, training=True
    ),
    Sized(mixture_density, lambda m, b, d: [m(b, d), weight(m, 24, d), m(24), m(b)], (5, 8)).block(
        "mixture density", 60001, 256, training=True
    ),
    Sized(clusters, lambda m, n, k, d: [m(n, d), m(k, d)], (20, 3, 4), SINGLE).block("clusters", 100003, 200, 64),
    Sized(balanced_transport, lambda m, b, n, d: [m(b, n, d), m(b, n, d)], (2, 6, 3), SINGLE).block(
        "balanced transport", 12, 500, 3, training=True
    ),
    Sized(
        weighted_adam,
        lambda m, d, h: [
            m(1).abs() + 3,
            *(m(*s) for s in ((h, d), (h,), (d, h), (d,))),
            *(m(*s) for s in ((h, d), (h,), (d, h), (d,))),
            *(m(*s).float() for s in ((h, d), (h,), (d, h), (d,))),
            *(m(*s).float().abs() for s in ((h, d), (h,), (d, h), (d,))),
        ],
        (4, 6),
    ).block("adam by hand", 1024, 4096),
    Sized(
        averaged,
        lambda m, d: [m(1).sigmoid(), *(m(d, k) for k in (768, 1, 3072, 50)), *(m(d, k) for k in (768, 1, 3072, 50))],
        (3,),
    ).block("averaged weights", 3000),
    Sized(spectrogram, lambda m, b, t, n: [m(b, t), m(n), m(n // 2 + 1, 80).abs()], (2, 900, 400), SINGLE).block(
        "mel energies", 12, 160000, 400
    ),
    Sized(distances, lambda m, n, k, d: [m(n, d), m(k, d)], (6, 9, 4)).block("nearest by cosine", 3000, 20000, 256),
    Sized(emphasised, lambda m, n, d: [m(n, d), m(d), m(d), m(n, d)], (9, 5), SINGLE).block("emphasised", 60001, 300),
)
