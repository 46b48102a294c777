"""Blocks of vision and sound: gates, offsets, rays, pyramids, spectra."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, image, weight

SINGLE = torch.float32


# ---- layers ---------------------------------------------------------------------------------------------------------------


def hard_gate(x: Tensor, dw: Tensor, a: Tensor, b: Tensor, out: Tensor, norm: Tensor) -> Tensor:
    """MobileNetV3: a depthwise 5x5, hard swish, a hard gate of the channels, a 1x1 convolution, the input added."""
    c = x.shape[1]
    y = F.hardswish(F.batch_norm(F.conv2d(x, dw, padding=2, groups=c), None, None, norm[0], norm[1], training=True))
    s = F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), a)), b)
    return x + F.conv2d(y * F.hardsigmoid(s), out)


def offset_taps(x: Tensor, where: Tensor, w: Tensor) -> Tensor:
    """A deformable 3x3 convolution by grid_sample: offsets and weights of each tap from a convolution, then a matmul."""
    h, v = x.shape[2:]
    o = F.conv2d(x, where, padding=1).float()
    dy, dx, gate = o[:, :9], o[:, 9:18], o[:, 18:].sigmoid()
    ys = torch.arange(h, device=x.device, dtype=torch.float32)[:, None]
    xs = torch.arange(v, device=x.device, dtype=torch.float32)
    taps = []
    for k in range(9):
        gy = (ys + k // 3 - 1 + dy[:, k]) / ((h - 1) / 2) - 1
        gx = (xs + k % 3 - 1 + dx[:, k]) / ((v - 1) / 2) - 1
        taken = F.grid_sample(x.float(), torch.stack([gx, gy], -1).float(), align_corners=True)
        taps.append(taken * gate[:, k : k + 1])
    return torch.einsum("nkchw,ock->nohw", torch.stack(taps, 1).to(x.dtype), w)


def focused_pixels(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    """YOLO's first layer: four slices of every second pixel as channels, a 3x3 convolution, a batch norm, SiLU."""
    y = torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)
    return F.silu(F.batch_norm(F.conv2d(y, w, padding=1), None, None, norm[0], norm[1], training=True))


def token_masks(x: Tensor, tokens: Tensor, up: Tensor, norm: Tensor, again: Tensor, mlp: Tensor) -> Tensor:
    """Segment Anything's decoder: a map four times as large, a norm over channels, masks by tokens' own filters."""
    y = F.conv_transpose2d(x, up, stride=2)
    u = y.mean(1, keepdim=True)
    s = (y - u).pow(2).mean(1, keepdim=True)
    y = norm[0][:, None, None] * ((y - u) / torch.sqrt(s + 1e-6)) + norm[1][:, None, None]
    y = F.gelu(F.conv_transpose2d(F.gelu(y), again, stride=2))
    t = torch.stack([F.linear(F.relu(F.linear(tokens[:, k], mlp[k])), mlp[k][: y.shape[1]]) for k in range(4)], 1)
    return (t @ y.flatten(2)).view(x.shape[0], 4, y.shape[2], y.shape[3])


def resized_positions(x: Tensor, w: Tensor, table: Tensor, first: Tensor, norm: Tensor) -> Tensor:
    """Patches, a class token, and positions learned for another size, resized by bicubic interpolation; a norm."""
    y = F.conv2d(x, w, stride=w.shape[-1])
    side = int(table.shape[1] ** 0.5)
    at = table.float().reshape(1, side, side, -1).permute(0, 3, 1, 2)
    at = F.interpolate(at, size=y.shape[-2:], mode="bicubic", align_corners=False).to(y.dtype)
    tokens = (y + at).flatten(2).transpose(1, 2)
    tokens = torch.cat([first.expand(y.shape[0], -1, -1), tokens], 1)
    return F.layer_norm(tokens, tokens.shape[-1:], norm[0], norm[1])


def resampled_features(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    """StyleGAN 3's nonlinearity: zeros put between pixels, a filter, a leaky ReLU clamped, a filter, every second pixel."""
    n, c, h, v = x.shape
    y = (x + bias[:, None, None]).reshape(n, c, h, 1, v, 1)
    y = F.pad(y, [0, 1, 0, 0, 0, 1]).reshape(n, c, h * 2, v * 2)
    k = taps[None, None].expand(c, 1, -1)
    y = F.conv2d(F.pad(y, [4, 3, 4, 3]), k[:, :, None] * 2, groups=c)
    y = F.conv2d(y, k[..., None] * 2, groups=c)
    y = (F.leaky_relu(y, 0.2) * math.sqrt(2)).clamp(-256, 256)
    y = F.conv2d(F.pad(y, [3, 3, 3, 3]), k.unsqueeze(2), groups=c)
    return F.conv2d(y, k.unsqueeze(3), groups=c)[:, :, ::2, ::2]


# ---- detection, poses and flow --------------------------------------------------------------------------------------------


def centred_overlap(a: Tensor, b: Tensor) -> Tensor:
    """One minus the overlap of pairs of rectangles by corners, and the distance of their centres over the diagonal."""
    low, high = torch.min(a[:, :2], a[:, 2:]), torch.max(a[:, :2], a[:, 2:])
    ax, ay, az, aw = torch.cat([low, high], -1).unbind(-1)
    low, high = torch.min(b[:, :2], b[:, 2:]), torch.max(b[:, :2], b[:, 2:])
    bx, by, bz, bw = torch.cat([low, high], -1).unbind(-1)
    inner = (torch.min(az, bz) - torch.max(ax, bx)).clamp(0) * (torch.min(aw, bw) - torch.max(ay, by)).clamp(0)
    union = (az - ax) * (aw - ay) + (bz - bx) * (bw - by) - inner + 1e-7
    diagonal = (torch.max(az, bz) - torch.min(ax, bx)) ** 2 + (torch.max(aw, bw) - torch.min(ay, by)) ** 2 + 1e-7
    apart = ((ax + az - bx - bz) ** 2 + (ay + aw - by - bw) ** 2) / 4
    return (1 - inner / union + apart / diagonal).sum() / a.shape[0]


def mask_costs(classes: Tensor, masks: Tensor, labels: Tensor, targets: Tensor) -> Tensor:
    """Mask2Former's costs of all queries and truths: classes, cross-entropy and dice of masks at points, by einsum."""
    number = masks.shape[-1]
    out, truth = masks.float(), (targets > 0).float()
    yes = F.binary_cross_entropy_with_logits(out, torch.ones_like(out), reduction="none")
    no = F.binary_cross_entropy_with_logits(out, torch.zeros_like(out), reduction="none")
    entropy = (torch.einsum("bnc,bmc->bnm", yes, truth) + torch.einsum("bnc,bmc->bnm", no, 1 - truth)) / number
    p = out.sigmoid()
    both = 2 * torch.einsum("bnc,bmc->bnm", p, truth)
    dice = 1 - (both + 1) / (p.sum(-1)[:, :, None] + truth.sum(-1)[:, None] + 1)
    prob = -classes.float().softmax(-1).gather(2, labels[:, None].expand(-1, classes.shape[1], -1))
    return (5 * entropy + 5 * dice + 2 * prob).nan_to_num(1e6)


def correlation_pyramid(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """RAFT: all pairs of two maps of features, pooled thrice over the second."""
    n, c, h, w = a.shape
    corr = torch.matmul(a.reshape(n, c, h * w).transpose(1, 2), b.reshape(n, c, h * w))
    corr = corr.view(n * h * w, 1, h, w) / torch.sqrt(torch.tensor(c).float()).to(a.dtype)
    levels = [corr]
    for _ in range(3):
        levels.append(F.avg_pool2d(levels[-1], 2, stride=2))
    return tuple(levels)


def sine_positions(mask: Tensor, level: Tensor) -> Tensor:
    """DETR: rows and columns counted where nothing is padded, sines and cosines by turns, a level's own vector."""
    seen = (mask > -2).float()
    y, x = seen.cumsum(1), seen.cumsum(2)
    y = (y - 0.5) / (y[:, -1:, :] + 1e-6) * 2 * math.pi
    x = (x - 0.5) / (x[:, :, -1:] + 1e-6) * 2 * math.pi
    at = torch.arange(128, dtype=torch.float32, device=mask.device)
    at = 10000 ** (2 * torch.div(at, 2, rounding_mode="trunc") / 128)
    x, y = x[..., None] / at, y[..., None] / at
    x = torch.stack((x[..., 0::2].sin(), x[..., 1::2].cos()), dim=4).flatten(3)
    y = torch.stack((y[..., 0::2].sin(), y[..., 1::2].cos()), dim=4).flatten(3)
    return torch.cat((y, x), dim=3).permute(0, 3, 1, 2).flatten(2).transpose(1, 2) + level


def integral_pose(heat: Tensor, truth: Tensor, weights: Tensor) -> Tensor:
    """Key points as means under a softmax over volumes, a weighted L1 loss of x, y and z."""
    n, j, d, h, w = heat.shape
    p = heat.float().reshape(n, j, -1).softmax(2).reshape(n, j, d, h, w)
    x = (p.sum((2, 3)) * torch.arange(w, device=heat.device)).sum(2) / w - 0.5
    y = (p.sum((2, 4)) * torch.arange(h, device=heat.device)).sum(2) / h - 0.5
    z = (p.sum((3, 4)) * torch.arange(d, device=heat.device)).sum(2) / d - 0.5
    return (torch.abs(torch.stack([x, y, z], -1) - truth.float()) * weights.float().abs()).sum() / n


# ---- pictures -------------------------------------------------------------------------------------------------------------


def structures_of_scales(a: Tensor, b: Tensor, taps: Tensor) -> Tensor:
    """MS-SSIM: Gaussian windows along both axes, contrast of four scales and luminance of the last."""
    k = (taps.softmax(0)[None, None]).expand(a.shape[1], 1, -1)
    a, b = a.sigmoid(), b.sigmoid()

    def blurred(x: Tensor) -> Tensor:
        c = x.shape[1]
        return F.conv2d(F.conv2d(x, k.unsqueeze(2), groups=c), k.unsqueeze(3), groups=c)

    parts = []
    for scale in range(4):
        ma, mb = blurred(a), blurred(b)
        va, vb, both = blurred(a * a) - ma * ma, blurred(b * b) - mb * mb, blurred(a * b) - ma * mb
        contrast = (2 * both + 9e-4) / (va + vb + 9e-4)
        full = (2 * ma * mb + 1e-4) / (ma * ma + mb * mb + 1e-4) * contrast
        parts.append(torch.relu((full if scale == 3 else contrast).flatten(2).mean(-1)))
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    powers = torch.tensor([0.05, 0.3, 0.35, 0.3], device=a.device)
    return 1 - torch.prod((torch.stack(parts, 0) + 1e-4) ** powers[:, None, None], 0).mean()


def lifted_wavelet(x: Tensor) -> tuple[Tensor, ...]:
    """JPEG 2000's 5/3 wavelet by lifting, rows and columns, three levels, details shrunk softly."""

    def split(y: Tensor) -> tuple[Tensor, Tensor]:
        even, odd = y[..., ::2], y[..., 1::2]
        odd = odd - (even + torch.cat([even[..., 1:], even[..., -1:]], -1)) / 2
        return even + (torch.cat([odd[..., :1], odd[..., :-1]], -1) + odd) / 4, odd

    out: list[Tensor] = []
    for _ in range(3):
        low, high = split(x)
        (ll, lh), (hl, hh) = split(low.transpose(-1, -2)), split(high.transpose(-1, -2))
        out += [F.softshrink(t.transpose(-1, -2), 0.1) for t in (lh, hl, hh)]
        x = ll.transpose(-1, -2)
    return (x, *out)


def dual_denoiser(x: Tensor) -> Tensor:
    """Chambolle's projections: ten steps of a dual field that removes total variation."""
    p = torch.zeros(2, *x.shape, device=x.device, dtype=x.dtype)
    for _ in range(10):
        div = F.pad(p[0, :, 1:] - p[0, :, :-1], (0, 0, 1, 0)) + F.pad(p[1, :, :, 1:] - p[1, :, :, :-1], (1, 0))
        u = div - x / 0.1
        g = torch.stack([F.pad(torch.diff(u, dim=1), (0, 0, 0, 1)), F.pad(torch.diff(u, dim=2), (0, 1))])
        p = (p + 0.24 * g) / (1 + 0.24 * torch.linalg.vector_norm(g, dim=0))
    return x - 0.1 * (F.pad(p[0, :, 1:] - p[0, :, :-1], (0, 0, 1, 0)) + F.pad(p[1, :, :, 1:] - p[1, :, :, :-1], (1, 0)))


def projected_angles(x: Tensor, angles: Tensor) -> Tensor:
    """A Radon transform: the picture turned by each angle by affine_grid and grid_sample, summed along rows."""
    n, s = angles.shape[0], x.shape[-1]
    c, d = torch.cos(angles), torch.sin(angles)
    theta = torch.stack([torch.stack([c, -d, 0 * c], -1), torch.stack([d, c, 0 * c], -1)], 1)
    grid = F.affine_grid(theta, [n, 1, s, s], align_corners=False)
    return F.grid_sample(x.expand(n, 1, s, s), grid, align_corners=False).sum(2).squeeze(1)


def distorted_rays(weights: Tensor, ends: Tensor) -> Tensor:
    """mip-NeRF 360's regulariser: how far apart a ray's weights are, pairs and intervals."""
    w, t = weights.softmax(-1), ends.abs().cumsum(-1) / ends.shape[-1]
    mid = 0.5 * (t[..., 1:] + t[..., :-1])
    apart = torch.abs(mid[..., :, None] - mid[..., None, :])
    inter = torch.sum(w * torch.sum(w[..., None, :] * apart, dim=-1), dim=-1)
    return (inter + torch.sum(w**2 * (t[..., 1:] - t[..., :-1]), dim=-1) / 3).mean()


# ---- sound ----------------------------------------------------------------------------------------------------------------


def mel_loss(x: Tensor, y: Tensor, window: Tensor, mel: Tensor) -> Tensor:
    """HiFi-GAN's: mirrored ends, torch.stft, magnitudes, mel bands, logarithms, an L1 loss."""

    def bands(s: Tensor) -> Tensor:
        s = F.pad(s[:, None], (384, 384), mode="reflect").squeeze(1)
        z = torch.stft(s, 1024, 256, 1024, window, center=False, normalized=False, onesided=True, return_complex=True)
        size = torch.sqrt(torch.view_as_real(z).pow(2).sum(-1) + 1e-9)
        return torch.log(torch.clamp(torch.matmul(mel, size), min=1e-5))

    return 45 * F.l1_loss(bands(x), bands(y))


def stretched_phases(real: Tensor, imaginary: Tensor, advance: Tensor) -> tuple[Tensor, Tensor]:
    """A phase vocoder: frames at 1.3 times the pace, phases wrapped and summed up, magnitudes between frames."""
    steps = torch.arange(0, real.shape[-1], 1.3, device=real.device)
    alphas = steps % 1.0
    z = F.pad(torch.complex(real, imaginary), [0, 2])
    first = torch.angle(z[..., :1])
    a, b = z.index_select(-1, steps.long()), z.index_select(-1, (steps + 1).long())
    phase = torch.angle(b) - torch.angle(a) - advance[:, None]
    phase = phase - 2 * math.pi * torch.round(phase / (2 * math.pi)) + advance[:, None]
    phase = torch.cumsum(torch.cat([first, phase[..., :-1]], -1), -1)
    out = torch.polar(alphas * b.abs() + (1 - alphas) * a.abs(), phase)
    return out.real.contiguous(), out.imag.contiguous()


def cepstra(x: Tensor, window: Tensor, mel: Tensor, cosines: Tensor) -> Tensor:
    """MFCCs as Kaldi has them: frames less their mean, pre-emphasis, energies, cosines, a lifter, their mean and spread."""
    f = x.unfold(-1, 400, 160)
    energy = f.square().sum(-1).clamp_min(1e-7).log()
    f = f - f.mean(-1, keepdim=True)
    f = f - 0.97 * F.pad(f, (1, 0), mode="replicate")[..., :-1]
    power = torch.fft.rfft(F.pad(f * window, (0, 112))).abs().pow(2.0)
    c = torch.matmul(torch.matmul(power, mel).clamp_min(1e-7).log(), cosines)
    at = torch.arange(c.shape[-1], device=x.device, dtype=x.dtype)
    c = c * (1 + 11 * torch.sin(math.pi * at / 22))
    c = torch.cat([energy[..., None], c[..., 1:]], -1)
    return (c - c.mean(1, keepdim=True)) / c.std(1, keepdim=True, unbiased=False).clamp_min(1e-5)


def noise_of_bands(x: Tensor, noisy: Tensor, over: Tensor) -> Tensor:
    """A Wiener filter by decisions: sixteen frames in turn, prior signal-to-noise ratios from the frame before."""
    power = noisy.square() + 1e-6
    before = torch.ones_like(power[..., 0])
    out = []
    for t in range(16):
        post = power[..., t] / (over.exp()[:, None] + 1e-3)
        prior = 0.98 * before + 0.02 * (post - 1).clamp_min(0)
        gain = (prior / (1 + prior)).clamp_min(0.05)
        before = gain.square() * post
        out.append(gain * x[..., t])
    return torch.stack(out, -1)


FOCUS = Sized(focused_pixels, lambda m, b, s, c: [m(b, 3, s, s), weight(m, c, 12, 3, 3), m(2, c)], (2, 8, 4))
BLOCKS: tuple[Block, ...] = (
    Sized(
        hard_gate,
        lambda m, b, c, h: [
            image(m, b, c, h, h),
            weight(m, c, 1, 5, 5),
            weight(m, c // 4, c, 1, 1),
            weight(m, c, c // 4, 1, 1),
            weight(m, c, c, 1, 1),
            m(2, c),
        ],
        (2, 8, 5),
    ).block("hard gate", 64, 120, 28, training=True),
    Sized(offset_taps, lambda m, b, c, h: [m(b, c, h, h), weight(m, 27, c, 3, 3), weight(m, c, c, 9)], (2, 4, 6)).block(
        "offset taps", 4, 64, 56, training=True
    ),
    FOCUS.block("focused pixels", 16, 512, 48),
    FOCUS.block("focused pixels", 12, 320, 32, training=True),
    Sized(
        token_masks,
        lambda m, b, c, h: [
            m(b, c, h, h),
            m(b, 4, c),
            weight(m, c, c // 4, 2, 2),
            m(2, c // 4),
            weight(m, c // 4, c // 8, 2, 2),
            m(4, c, c) * c**-0.5,
        ],
        (2, 16, 3),
    ).block("token masks", 6, 256, 64, training=True),
    Sized(
        resized_positions,
        lambda m, b, h, w, p, n, d: [m(b, 3, h, w), weight(m, d, 3, p, p), m(1, n * n, d), m(1, 1, d), m(2, d)],
        (2, 6, 8, 2, 5, 8),
    ).block("resized positions", 24, 224, 336, 14, 37, 768, training=True),
    Sized(resampled_features, lambda m, b, c, h: [m(b, c, h, h), m(8).abs() / 4, m(c)], (2, 3, 6)).block(
        "resampled features", 8, 64, 84, training=True
    ),
    Sized(centred_overlap, lambda m, n: [m(n, 4), m(n, 4)], (9,), SINGLE).block("centred overlap", 400009, training=True),
    Sized(mask_costs, lambda m, b, q, t, p, c: [m(b, q, c), m(b, q, p), ids(m, c, b, t), m(b, t, p)], (2, 4, 3, 20, 5)).block(
        "mask costs", 8, 100, 25, 12544, 81
    ),
    Sized(correlation_pyramid, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w)], (2, 4, 8, 9)).block(
        "correlation pyramid", 1, 256, 55, 98
    ),
    Sized(sine_positions, lambda m, b, h, w: [m(b, h, w), m(256)], (2, 4, 5), SINGLE).block("sine positions", 8, 100, 134),
    Sized(integral_pose, lambda m, b, j, s: [m(b, j, s, s, s), m(b, j, 3), m(b, j, 3)], (2, 3, 4)).block(
        "integral pose", 24, 17, 48, training=True
    ),
    Sized(structures_of_scales, lambda m, b, h, w, k: [m(b, 3, h, w), m(b, 3, h, w), m(k)], (2, 33, 37, 3), SINGLE).block(
        "structures of scales", 8, 256, 320, 11, training=True
    ),
    Sized(lifted_wavelet, lambda m, b, h, w: [m(b, 3, h, w)], (2, 16, 24), SINGLE).block("lifted wavelet", 6, 1080, 1920),
    Sized(dual_denoiser, lambda m, b, h, w: [m(b, h, w)], (2, 6, 7), SINGLE).block("dual denoiser", 8, 510, 767),
    Sized(projected_angles, lambda m, s, n: [m(1, 1, s, s), m(n)], (9, 4), SINGLE).block(
        "projected angles", 256, 90, training=True
    ),
    Sized(distorted_rays, lambda m, n, s: [m(n, s), m(n, s + 1)], (5, 7), SINGLE).block(
        "distorted rays", 8191, 96, training=True
    ),
    Sized(mel_loss, lambda m, b, t: [m(b, t), m(b, t), m(1024), m(80, 513).abs()], (2, 2000), SINGLE).block(
        "mel loss", 16, 32768, training=True
    ),
    Sized(stretched_phases, lambda m, b, f, t: [m(b, f, t), m(b, f, t), m(f).abs().cumsum(0)], (2, 5, 9), SINGLE).block(
        "stretched phases", 8, 513, 700
    ),
    Sized(cepstra, lambda m, b, t: [m(b, t) * 100, m(400), m(257, 40).abs(), m(40, 13)], (2, 1500), SINGLE).block(
        "cepstra", 12, 160000
    ),
    Sized(noise_of_bands, lambda m, b, f: [m(b, f, 16), m(b, f, 16), m(b)], (2, 5), SINGLE).block("noise of bands", 2048, 257),
)
