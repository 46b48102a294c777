"""Blocks of pictures: stems, residuals, gates, attention by convolutions, sampling by offsets, losses of detectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, image, weight

HALF, SINGLE = torch.float16, torch.float32


def convolutional_stem(x: Tensor, w0: Tensor, w1: Tensor, w2: Tensor, g: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Two strided 3x3 convolutions with batch statistics, a pointwise one, tokens with a layer norm."""
    n = w0.shape[0]
    x = F.gelu(F.batch_norm(F.conv2d(x, w0, stride=2, padding=1), None, None, g[:n], b[:n], training=True))
    x = F.gelu(F.batch_norm(F.conv2d(x, w1, stride=2, padding=1), None, None, g, b, training=True))
    return F.layer_norm(F.conv2d(x, w2).flatten(2).mT, (w2.shape[0],), scale)


def edge_residual(x: Tensor, w0: Tensor, w1: Tensor, s0: Tensor, s1: Tensor, keep: Tensor) -> Tensor:
    """A fused inverted residual: a dense 3x3 expansion, squeeze-excite, a projection, dropped whole for some pictures."""
    y = F.silu(F.conv2d(x, w0, padding=1))
    pooled = F.adaptive_avg_pool2d(y, 1)
    y = y * torch.sigmoid(F.conv2d(F.silu(F.conv2d(pooled, s0)), s1))
    y = F.conv2d(y, w1)
    kept = (keep > -0.8).to(x.dtype).view(-1, 1, 1, 1)
    return x + y * kept / 0.8


def three_twins(x: Tensor, w3: Tensor, w1: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """RepVGG while training: a 3x3 and a 1x1 convolution and the input itself, batch norms of their own, summed."""
    dense = F.batch_norm(F.conv2d(x, w3, padding=1), None, None, g[0], b[0], training=True)
    point = F.batch_norm(F.conv2d(x, w1), None, None, g[1], b[1], training=True)
    return F.relu(dense + point + F.batch_norm(x, None, None, g[2], b[2], training=True))


def strips(x: Tensor, w5: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, mix: Tensor) -> Tensor:
    """SegNeXt: a depthwise 5x5, pairs of strips of 7 and 11, mixed by a pointwise convolution, the input gated."""
    n = x.shape[1]
    base = F.conv2d(x, w5, padding=2, groups=n)
    short = F.conv2d(F.conv2d(base, a, padding=(0, 3), groups=n), b, padding=(3, 0), groups=n)
    long = F.conv2d(F.conv2d(base, c, padding=(0, 5), groups=n), d, padding=(5, 0), groups=n)
    return F.conv2d(base + short + long, mix) * x


def gated_skip(low: Tensor, skip: Tensor, wg: Tensor, ws: Tensor, psi: Tensor, w: Tensor) -> Tensor:
    """Attention U-Net: the skip gated by what the lower level says, joined with the upsampled level, convolved."""
    up = F.interpolate(low, scale_factor=2, mode="bilinear", align_corners=False)
    gate = torch.sigmoid(F.conv2d(F.relu(F.conv2d(up, wg) + F.conv2d(skip, ws)), psi))
    return F.relu(F.instance_norm(F.conv2d(torch.cat([up, skip * gate], 1), w, padding=1)))


def partial_convolution(x: Tensor, seen: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """Inpainting: a convolution over seen pixels, renormalised by how many each window has, zero where none."""
    mask = (seen > -0.5).to(x.dtype)
    with torch.no_grad():
        count = F.conv2d(mask, torch.ones(1, 1, 5, 5, dtype=x.dtype, device=x.device), padding=2)
        share = 25 / (count + 1e-6) * count.clamp(0, 1)
    y = F.conv2d(x * mask, w, padding=2) * share
    return F.leaky_relu(y + bias.view(1, -1, 1, 1) * count.clamp(0, 1), 0.2)


def octaves(high: Tensor, low: Tensor, hh: Tensor, hl: Tensor, lh: Tensor, ll: Tensor) -> Tensor:
    """Octave convolution: two frequencies at two resolutions, each from both; the low one is upsampled and joined."""
    up = F.interpolate(F.conv2d(low, lh, padding=1), scale_factor=2, mode="nearest")
    new_high = F.silu(F.conv2d(high, hh, padding=1) + up)
    new_low = F.silu(F.conv2d(low, ll, padding=1) + F.conv2d(F.avg_pool2d(high, 2), hl, padding=1))
    return torch.cat([new_high, F.interpolate(new_low, scale_factor=2)], 1)


def mixed_kernels(x: Tensor, kernels: Tensor, w0: Tensor, w1: Tensor) -> Tensor:
    """Dynamic convolution: each picture's kernel is a softmax mixture of four, run as one grouped convolution."""
    b, c, h, w = x.shape
    k, o = kernels.shape[:2]
    scores = F.relu(x.mean((2, 3)) @ w0.mT) @ w1.mT / 4
    own = (scores.softmax(-1) @ kernels.reshape(k, -1)).view(b * o, c, 3, 3)
    return F.conv2d(x.reshape(1, b * c, h, w), own, padding=1, groups=b).view(b, o, h, w)


def reassembled(x: Tensor, w0: Tensor, w1: Tensor) -> Tensor:
    """CARAFE: 5x5 kernels predicted for each of four new pixels, a softmax over each, applied to unfolded maps."""
    b, c, h, w = x.shape
    kernels = F.conv2d(F.conv2d(x, w0), w1, padding=1)
    kernels = F.pixel_shuffle(kernels, 2).softmax(1)
    near = F.unfold(x, 5, padding=2).view(b, c * 25, h, w)
    near = F.interpolate(near, scale_factor=2, mode="nearest").view(b, c, 25, 2 * h, 2 * w)
    return torch.einsum("bkhw,bckhw->bchw", kernels, near)


def energy_gate(x: Tensor) -> Tensor:
    """SimAM: each pixel's energy from its channel's mean and variance, no weights."""
    n = x.shape[2] * x.shape[3] - 1
    d = (x - x.mean((2, 3), keepdim=True)).pow(2)
    energy = d / (4 * (d.sum((2, 3), keepdim=True) / n + 1e-4)) + 0.5
    return x * torch.sigmoid(energy)


def adjacent_channels(x: Tensor, w: Tensor, skip: Tensor) -> Tensor:
    """ECA: pooled channels convolved with their neighbours, a sigmoid gate, a residual, relu."""
    pooled = F.adaptive_avg_pool2d(x, 1).squeeze(-1).transpose(-1, -2)
    gate = F.conv1d(pooled, w, padding=w.shape[-1] // 2).transpose(-1, -2).unsqueeze(-1)
    return F.relu(x * torch.sigmoid(gate).expand_as(x) + skip)


def rotated_gates(x: Tensor, wa: Tensor, wb: Tensor, wc: Tensor) -> Tensor:
    """Triplet attention: maxima and means over each of three axes, a 7x7 convolution, three gated copies averaged."""

    def gate(t: Tensor, w: Tensor) -> Tensor:
        pooled = torch.cat([t.amax(1, keepdim=True), t.mean(1, keepdim=True)], 1)
        return t * torch.sigmoid(F.conv2d(pooled, w, padding=3))

    rows = gate(x.permute(0, 2, 1, 3).contiguous(), wa).permute(0, 2, 1, 3)
    columns = gate(x.permute(0, 3, 2, 1).contiguous(), wb).permute(0, 3, 2, 1)
    return (rows + columns + gate(x, wc)) / 3


def star(x: Tensor, dw: Tensor, f1: Tensor, f2: Tensor, g: Tensor, dw2: Tensor, scale: Tensor) -> Tensor:
    """StarNet: depthwise 7x7, two expansions multiplied, projected, another depthwise, scaled onto the input."""
    c = x.shape[1]
    y = F.batch_norm(F.conv2d(x, dw, padding=3, groups=c), None, None, training=True)
    y = F.relu6(F.conv2d(y, f1)) * F.conv2d(y, f2)
    return x + scale.view(1, -1, 1, 1) * F.conv2d(F.conv2d(y, g), dw2, padding=3, groups=c)


def simple_gates(x: Tensor, w0: Tensor, dw: Tensor, s: Tensor, w1: Tensor, g: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """NAFNet: layer norms over channels, halves multiplied for a non-linearity, channels weighted, two residuals."""

    def norm(t: Tensor, k: int) -> Tensor:
        d = t - t.mean(1, keepdim=True)
        return d * torch.rsqrt(d.pow(2).mean(1, keepdim=True) + 1e-6) * g[k].view(1, -1, 1, 1)

    def halves(t: Tensor) -> Tensor:
        a, b = t.chunk(2, 1)
        return a * b

    y = halves(F.conv2d(F.conv2d(norm(x, 0), w0), dw, padding=1, groups=dw.shape[0]))
    y = y * F.conv2d(F.adaptive_avg_pool2d(y, 1), s)
    x = x + F.conv2d(y, w1)
    return x + F.conv2d(halves(F.conv2d(norm(x, 1), w2)), w3)


def pixel_kernel_attention(x: Tensor, qkv: Tensor, dw: Tensor, proj: Tensor) -> Tensor:
    """EfficientViT: relu linear attention over pixels of two scales, in float32, with a column that counts."""
    b, _c, h, w = x.shape
    d = 16
    first = F.conv2d(x, qkv)
    both = torch.cat([first, F.conv2d(first, dw, padding=2, groups=dw.shape[0])], 1)
    q, k, v = both.reshape(b, -1, 3 * d, h * w).float().split(d, 2)
    v = F.pad(v, (0, 0, 0, 1), value=1.0)
    out = torch.matmul(torch.matmul(v, F.relu(k).mT), F.relu(q))
    out = out[:, :, :-1] / (out[:, :, -1:] + 1e-5)
    return x + F.conv2d(out.to(x.dtype).reshape(b, -1, h, w), proj)


def halo_attention(q: Tensor, k: Tensor, v: Tensor, relative: Tensor) -> Tensor:
    """HaloNet: blocks of 8x8 queries look at 14x14 keys that unfold gives, a learned bias for each pair."""
    b, c, h, w = q.shape
    heads, block, halo = relative.shape[0], 8, 3
    d, side = c // heads, block + 2 * halo
    n = (h // block) * (w // block)

    def around(t: Tensor) -> Tensor:
        return F.unfold(t, side, stride=block, padding=halo).view(b, heads, d, side * side, n).permute(0, 1, 4, 3, 2)

    queries = F.unfold(q, block, stride=block).view(b, heads, d, block * block, n).permute(0, 1, 4, 3, 2)
    scores = queries @ around(k).mT * d**-0.5 + relative[:, None]
    out = scores.softmax(-1) @ around(v)
    return F.fold(out.permute(0, 1, 4, 3, 2).reshape(b, c * block * block, n), (h, w), block, stride=block)


def convolutional_lstm(x: Tensor, h: Tensor, c: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Three steps of a convolutional LSTM with layer norms over channels of the cell."""
    for k in range(x.shape[1]):
        i, f, o, g = F.conv2d(torch.cat([x[:, k], h], 1), w, b, padding=1).chunk(4, 1)
        c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(F.layer_norm(c.permute(0, 2, 3, 1), (c.shape[1],)).permute(0, 3, 1, 2))
    return h


def partial_stages(x: Tensor, w0: Tensor, a: Tensor, b: Tensor, w1: Tensor) -> Tensor:
    """YOLO's C2f: half of the channels goes through two bottlenecks, all steps are joined and mixed."""
    ys = list(F.silu(F.conv2d(x, w0)).chunk(2, 1))
    for k in range(2):
        y = F.silu(F.conv2d(ys[-1], a[k], padding=1))
        ys.append(ys[-1] + F.silu(F.conv2d(y, b[k], padding=1)))
    return F.silu(F.conv2d(torch.cat(ys, 1), w1))


def fused_levels(a: Tensor, b: Tensor, c: Tensor, wa: Tensor, wb: Tensor, wc: Tensor, out: Tensor) -> Tensor:
    """ASFF: three levels brought to one size, weighted pixel by pixel with a softmax over levels, convolved."""
    levels = [F.max_pool2d(a, 3, stride=2, padding=1), b, F.interpolate(c, size=b.shape[2:], mode="nearest")]
    scores = torch.cat([F.conv2d(t, w) for t, w in zip(levels, (wa, wb, wc), strict=True)], 1).softmax(1)
    mixed = sum(t * scores[:, k : k + 1] for k, t in enumerate(levels))
    return F.silu(F.conv2d(mixed, out, padding=1))


def generator_stage(x: Tensor, w0: Tensor, w1: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """DCGAN: a transposed 4x4 convolution, batch norm, relu, another to three colours, tanh."""
    y = F.conv_transpose2d(x, w0, stride=2, padding=1)
    y = F.relu(F.batch_norm(y, None, None, g, b, training=True))
    return F.conv_transpose2d(y, w1, stride=2, padding=1).tanh()


def planes_swept(source: Tensor, target: Tensor, depth: Tensor, motion: Tensor) -> Tensor:
    """Multi-view stereo: a source's maps warped on to planes of depth, variance against the target's maps."""
    b, _c, h, w = source.shape
    n = len(depth)
    ys, xs = torch.meshgrid(
        torch.arange(h, device=depth.device, dtype=depth.dtype),
        torch.arange(w, device=depth.device, dtype=depth.dtype),
        indexing="ij",
    )
    rays = torch.stack([xs / w - 0.5, ys / h - 0.5, torch.ones_like(xs)]).view(3, -1)
    turn = torch.eye(3, device=depth.device, dtype=depth.dtype) + motion[:, :, :3] * 0.02
    points = (turn @ rays)[:, None] * (2 + depth.abs())[None, :, None, None] + motion[:, None, :, 3:] * 0.1
    grid = 2 * points[:, :, :2] / points[:, :, 2:].clamp(min=0.1)
    grid = grid.permute(0, 1, 3, 2).reshape(b, n * h, w, 2)
    warped = F.grid_sample(source, grid.to(source.dtype), align_corners=False).view(b, -1, n, h, w)
    mean = (warped + target[:, :, None]) / 2
    return ((warped - mean) ** 2 + (target[:, :, None] - mean) ** 2).mean(1) / 2


def range_normals(depth: Tensor, camera: Tensor) -> Tensor:
    """Points from a depth image, normals from differences of neighbours, flat where depth jumps, shaded by a light."""
    _b, h, w = depth.shape
    z = depth.abs() + 1
    ys = torch.arange(h, device=z.device, dtype=z.dtype).view(1, h, 1)
    xs = torch.arange(w, device=z.device, dtype=z.dtype).view(1, 1, w)
    f = (camera[:, :1, None].abs() + 1) * w
    points = torch.stack([(xs - w / 2) * z / f, (ys - h / 2) * z / f, z], -1)
    dx = F.pad(points[:, :, 2:] - points[:, :, :-2], (0, 0, 1, 1))
    dy = F.pad(points[:, 2:] - points[:, :-2], (0, 0, 0, 0, 1, 1))
    normal = F.normalize(torch.linalg.cross(dx, dy), dim=-1, eps=1e-6)
    jump = (dx[..., 2].abs() + dy[..., 2].abs()) > 0.8 * z
    normal = torch.where(jump[..., None], points.new_tensor([0.0, 0.0, -1.0]), normal)
    light = F.normalize(camera[:, 1:4], dim=-1)
    return (normal * light[:, None, None]).sum(-1).clamp(min=0) + 0.1


def gaussian_rectangles(p: Tensor, t: Tensor, weight_of: Tensor) -> Tensor:
    """ProbIoU: rotated rectangles as Gaussians, the Bhattacharyya distance, weighted."""

    def parts(r: Tensor) -> tuple[Tensor, ...]:
        x, y, w, h, a = r.unbind(-1)
        w, h = F.softplus(w) ** 2 / 12, F.softplus(h) ** 2 / 12
        cos, sin = a.cos(), a.sin()
        return x, y, w * cos**2 + h * sin**2, w * sin**2 + h * cos**2, (w - h) * cos * sin

    x1, y1, a1, b1, c1 = parts(p)
    x2, y2, a2, b2, c2 = parts(t)
    den = (a1 + a2) * (b1 + b2) - (c1 + c2) ** 2
    t1 = ((a1 + a2) * (y1 - y2) ** 2 + (b1 + b2) * (x1 - x2) ** 2) / (den + 1e-3) * 0.25
    t2 = (c1 + c2) * (x2 - x1) * (y1 - y2) / (den + 1e-3) * 0.5
    inner = (a1 * b1 - c1**2).clamp(min=0) * (a2 * b2 - c2**2).clamp(min=0)
    t3 = (den / (4 * torch.sqrt(inner + 1e-6) + 1e-3) + 1e-3).log() * 0.5
    distance = (t1 + t2 + t3).clamp(1e-3, 100)
    loss = torch.sqrt(1 - torch.exp(-distance) + 1e-3)
    return (loss * weight_of.sigmoid()).sum() / weight_of.sigmoid().sum()


def varied_focus(logits: Tensor, quality: Tensor, hit: Tensor) -> Tensor:
    """Varifocal loss: hits weighted by their overlap, the others by a power of their own score."""
    p = logits.float().sigmoid()
    q = quality.float().sigmoid() * (hit > 1.5)
    factor = torch.where(q > 0, q, 0.75 * (p - q).abs().pow(2)).detach()
    loss = F.binary_cross_entropy_with_logits(logits.float(), q, reduction="none") * factor
    return loss.sum() / q.sum().clamp(min=1)


def dropped_regions(x: Tensor, noise: Tensor, w: Tensor) -> Tensor:
    """DropBlock: seeds grown to 7x7 blocks, what is left scaled up by its share, then a convolution."""
    with torch.no_grad():
        seeds = (noise > 2.2).to(x.dtype)
        mask = 1 - F.max_pool2d(seeds, 7, stride=1, padding=3)
        gain = mask.numel() / mask.sum().clamp(min=1)
    return F.silu(F.conv2d(x * mask * gain, w))


def soft_skeleton(logits: Tensor, truth: Tensor) -> Tensor:
    """clDice: skeletons by iterated soft erosions and openings, precision and sensitivity of the centre lines."""

    def erode(t: Tensor) -> Tensor:
        return torch.minimum(-F.max_pool2d(-t, (3, 1), 1, (1, 0)), -F.max_pool2d(-t, (1, 3), 1, (0, 1)))

    def skeleton(t: Tensor) -> Tensor:
        found = F.relu(t - F.max_pool2d(erode(t), 3, 1, 1))
        for _ in range(3):
            t = erode(t)
            delta = F.relu(t - F.max_pool2d(erode(t), 3, 1, 1))
            found = found + F.relu(delta - found * delta)
        return found

    p, t = logits.sigmoid(), (truth > 0).to(logits.dtype)
    sp, st = skeleton(p), skeleton(t)
    precision = ((sp * t).sum((1, 2, 3)) + 1) / (sp.sum((1, 2, 3)) + 1)
    recall = ((st * p).sum((1, 2, 3)) + 1) / (st.sum((1, 2, 3)) + 1)
    return (1 - 2 * precision * recall / (precision + recall)).mean()


def amp_unit(x: Tensor, w0: Tensor, w1: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """A residual unit under autocast with float32 weights: two convolutions, batch norms, a pooled mean."""
    with torch.autocast(x.device.type, torch.bfloat16):
        y = F.relu(F.batch_norm(F.conv2d(x, w0, padding=1), None, None, g[0], b[0], training=True))
        y = F.batch_norm(F.conv2d(y, w1, padding=1), None, None, g[1], b[1], training=True)
        return F.relu(y + x).float().mean((2, 3))


STEM = Sized(
    convolutional_stem,
    lambda m, b, h, c, d: (
        [
            image(m, b, 3, h, h),
            weight(m, c, 3, 3, 3),
            weight(m, 2 * c, c, 3, 3),
            weight(m, d, 2 * c, 1, 1),
            m(2 * c),
            m(2 * c),
            m(d),
        ]
    ),
    (2, 16, 4, 6),
)
EDGE = Sized(
    edge_residual,
    lambda m, b, c, e, h: (
        [
            image(m, b, c, h, h),
            weight(m, e, c, 3, 3),
            weight(m, c, e, 1, 1),
            weight(m, c // 4, e, 1, 1),
            weight(m, e, c // 4, 1, 1),
            m(b),
        ]
    ),
    (3, 8, 12, 5),
)
STRIPS = Sized(
    strips,
    lambda m, b, c, h, w: (
        [
            image(m, b, c, h, w),
            weight(m, c, 1, 5, 5),
            weight(m, c, 1, 1, 7),
            weight(m, c, 1, 7, 1),
            weight(m, c, 1, 1, 11),
            weight(m, c, 1, 11, 1),
            weight(m, c, c, 1, 1),
        ]
    ),
    (2, 5, 9, 8),
)
SKIP = Sized(
    gated_skip,
    lambda m, b, c, h: (
        [
            m(b, c, h, h),
            m(b, c, 2 * h, 2 * h),
            weight(m, c // 2, c, 1, 1),
            weight(m, c // 2, c, 1, 1),
            weight(m, 1, c // 2, 1, 1),
            weight(m, c, 2 * c, 3, 3),
        ]
    ),
    (2, 4, 5),
)
OCTAVES = Sized(
    octaves,
    lambda m, b, c, h: [image(m, b, c, 2 * h, 2 * h), image(m, b, c, h, h)] + [weight(m, c, c, 3, 3) for _ in range(4)],
    (2, 4, 5),
)
KERNELS = Sized(
    mixed_kernels,
    lambda m, b, c, o, h: [m(b, c, h, h), weight(m, 4, o, c, 3, 3) * 2, weight(m, c // 4, c), weight(m, 4, c // 4)],
    (3, 8, 5, 6),
)
TRIPLET = Sized(rotated_gates, lambda m, b, c, h, w: [m(b, c, h, w)] + [weight(m, 1, 2, 7, 7) for _ in range(3)], (2, 8, 9, 7))
STAR = Sized(
    star,
    lambda m, b, c, h: (
        [
            image(m, b, c, h, h),
            weight(m, c, 1, 7, 7),
            weight(m, 4 * c, c, 1, 1),
            weight(m, 4 * c, c, 1, 1),
            weight(m, c, 4 * c, 1, 1),
            weight(m, c, 1, 7, 7),
            m(c),
        ]
    ),
    (2, 4, 8),
    HALF,
)
GATES = Sized(
    simple_gates,
    lambda m, b, c, h, w: (
        [
            m(b, c, h, w),
            weight(m, 2 * c, c, 1, 1),
            weight(m, 2 * c, 1, 3, 3),
            weight(m, c, c, 1, 1),
            weight(m, c, c, 1, 1),
            m(2, c),
            weight(m, 2 * c, c, 1, 1),
            weight(m, c, c, 1, 1),
        ]
    ),
    (2, 4, 6, 7),
)
PIXELS = Sized(
    pixel_kernel_attention,
    lambda m, b, c, h: [m(b, c, h, h), weight(m, 3 * c, c, 1, 1), weight(m, 3 * c, 1, 5, 5), weight(m, c, 2 * c, 1, 1)],
    (2, 32, 5),
)
HALO = Sized(
    halo_attention,
    lambda m, b, n, d, h: [m(b, n * d, h, h), m(b, n * d, h, h), m(b, n * d, h, h), m(n, 64, 196)],
    (2, 2, 4, 16),
)
STAGES = Sized(
    partial_stages,
    lambda m, b, c, h, w: (
        [
            image(m, b, c, h, w),
            weight(m, 2 * c, c, 1, 1),
            weight(m, 2, c, c, 3, 3) * 1.4,
            weight(m, 2, c, c, 3, 3) * 1.4,
            weight(m, c, 4 * c, 1, 1),
        ]
    ),
    (2, 4, 5, 6),
)
LEVELS = Sized(
    fused_levels,
    lambda m, b, c, h: (
        [m(b, c, 2 * h, 2 * h), m(b, c, h, h), m(b, c, h // 2, h // 2)]
        + [weight(m, 1, c, 1, 1) for _ in range(3)]
        + [weight(m, c, c, 3, 3)]
    ),
    (2, 4, 6),
)
SWEPT = Sized(
    planes_swept,
    lambda m, b, c, n, h, w: [m(b, c, h, w), m(b, c, h, w), m(n), m(b, 3, 4)],
    (2, 3, 4, 5, 6),
    SINGLE,
)

BLOCKS: tuple[Block, ...] = (
    STEM.block("convolutional stem", 32, 224, 64, 384, training=True),
    EDGE.block("edge residual", 32, 48, 192, 56, training=True),
    Sized(
        three_twins,
        lambda m, b, c, h: [image(m, b, c, h, h), weight(m, c, c, 3, 3), weight(m, c, c, 1, 1), m(3, c), m(3, c)],
        (2, 4, 6),
    ).block("three twins", 32, 128, 28, training=True),
    STRIPS.block("strips", 16, 64, 128, 120, training=True),
    SKIP.block("gated skip", 8, 128, 48),
    Sized(
        partial_convolution,
        lambda m, b, c, o, h, w: [m(b, c, h, w), m(b, 1, h, w), weight(m, o, c, 5, 5), m(o)],
        (2, 3, 4, 7, 9),
    ).block("partial convolution", 8, 64, 64, 127, 129, training=True),
    OCTAVES.block("octaves", 16, 128, 28, training=True),
    KERNELS.block("mixed kernels", 32, 64, 128, 28, training=True),
    Sized(
        reassembled, lambda m, b, c, h: [m(b, c, h, h), weight(m, c // 4, c, 1, 1), weight(m, 100, c // 4, 3, 3)], (2, 4, 5)
    ).block("reassembled", 4, 128, 40, training=True),
    Sized(energy_gate, lambda m, b, c, h, w: [m(b, c, h, w)], (2, 3, 5, 7)).block(
        "energy gate", 32, 256, 56, 55, training=True
    ),
    Sized(adjacent_channels, lambda m, b, c, h: [image(m, b, c, h, h), m(1, 1, 5), image(m, b, c, h, h)], (2, 6, 5)).block(
        "neighbour channels", 64, 512, 28, training=True
    ),
    TRIPLET.block("rotated gates", 32, 256, 28, 28, training=True),
    STAR.block("star", 32, 64, 56),
    GATES.block("simple gates", 4, 64, 128, 126, training=True),
    PIXELS.block("pixel kernel attention", 16, 128, 32),
    HALO.block("halo attention", 8, 4, 32, 64, training=True),
    Sized(
        convolutional_lstm,
        lambda m, b, t, c, h: [m(b, t, c, h, h), m(b, c, h, h), m(b, c, h, h), weight(m, 4 * c, 2 * c, 3, 3), m(4 * c)],
        (2, 3, 4, 5),
    ).block("convolutional lstm", 16, 3, 64, 32, training=True),
    STAGES.block("partial stages", 16, 64, 80, 76),
    LEVELS.block("fused levels", 8, 256, 40, training=True),
    Sized(
        generator_stage,
        lambda m, b, c, h: [m(b, 2 * c, h, h), weight(m, 2 * c, c, 4, 4) * 4, weight(m, c, 3, 4, 4), m(c), m(c)],
        (2, 4, 4),
    ).block("generator stage", 64, 64, 16, training=True),
    SWEPT.block("planes swept", 1, 32, 48, 128, 160, training=True),
    Sized(range_normals, lambda m, b, h, w: [m(b, h, w), m(b, 4)], (2, 7, 9), SINGLE).block("range normals", 8, 480, 641),
    Sized(gaussian_rectangles, lambda m, n: [m(n, 5), m(n, 5), m(n)], (20,), SINGLE).block(
        "gaussian rectangles", 800003, training=True
    ),
    Sized(varied_focus, lambda m, b, n, c: [m(b, n, c), m(b, n, c), m(b, n, c)], (2, 9, 5), HALF).block(
        "varied focus", 16, 8400, 80, training=True
    ),
    Sized(
        dropped_regions, lambda m, b, c, h, w: [image(m, b, c, h, w), m(b, c, h, w), weight(m, c, c, 1, 1)], (2, 4, 9, 8)
    ).block("dropped regions", 32, 128, 40, 42, training=True),
    Sized(soft_skeleton, lambda m, b, h, w: [m(b, 1, h, w), m(b, 1, h, w)], (2, 9, 8), SINGLE).block(
        "soft skeleton", 16, 384, 385, training=True
    ),
    Sized(
        amp_unit,
        lambda m, b, c, h: [t.float() for t in (m(b, c, h, h), weight(m, c, c, 3, 3), weight(m, c, c, 3, 3), m(2, c), m(2, c))],
        (2, 4, 6),
    ).block("autocast unit", 32, 128, 28, training=True),
)
