"""Blocks of vision: detection, flow, radiance, augmentation, odd paddings and pools, point clouds, codecs."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def _corners(frames: Tensor) -> Tensor:
    centre, size = frames[..., :2].sigmoid() * 100, frames[..., 2:].sigmoid() * 30 + 1
    return torch.cat((centre - size / 2, centre + size / 2), -1)


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    area_a, area_b = ((t[:, 2:] - t[:, :2]).prod(1) for t in (a, b))
    inter = (torch.min(a[:, None, 2:], b[:, 2:]) - torch.max(a[:, None, :2], b[:, :2])).clamp(min=0).prod(-1)
    union = area_a[:, None] + area_b - inter
    return inter / union, union


def suppression(frames: Tensor, scores: Tensor, classes: Tensor) -> Tensor:
    """Greedy suppression as a fixed point: frames moved apart by class, sorted, eight rounds of who is kept."""
    order = scores.argsort(descending=True, stable=True)
    b = _corners(frames)[order] + classes[order].to(frames.dtype)[:, None] * 1000
    above = (_overlap(b, b)[0] > 0.3).triu(1)
    keep = torch.ones_like(above[0])
    for _ in range(8):
        keep = ~(above & keep[:, None]).any(0)
    return torch.where(keep, scores[order], -1.0)


def matching_costs(logits: Tensor, frames: Tensor, labels: Tensor, wanted: Tensor) -> Tensor:
    """DETR: focal cost of classes, distances and generalised overlaps of all pairs of predictions and targets."""
    p = logits.flatten(0, 1).sigmoid()
    negative = 0.75 * p**2 * -(1 - p + 1e-8).log()
    positive = 0.25 * (1 - p) ** 2 * -(p + 1e-8).log()
    cost = positive[:, labels] - negative[:, labels]
    ours, theirs = _corners(frames.flatten(0, 1)), _corners(wanted)
    iou, union = _overlap(ours, theirs)
    hull = (torch.max(ours[:, None, 2:], theirs[:, 2:]) - torch.min(ours[:, None, :2], theirs[:, :2])).clamp(min=0).prod(-1)
    distance = torch.cdist(frames.flatten(0, 1), wanted, p=1)
    return (5 * distance + 2 * cost - 2 * (iou - (hull - union) / hull)).view(*logits.shape[:2], -1)


def splatted(x: Tensor, flow: Tensor, importance: Tensor) -> Tensor:
    """Softmax splatting: pixels moved along a flow onto four neighbours by scatter_add, weighted by an importance."""
    b, c, h, w = x.shape
    weighted = torch.cat([x * importance.exp(), importance.exp()], 1)
    yy = torch.arange(h, device=x.device, dtype=x.dtype)[:, None] + flow[:, 1]
    xx = torch.arange(w, device=x.device, dtype=x.dtype) + flow[:, 0]
    y0, x0 = yy.detach().floor(), xx.detach().floor()
    out = x.new_zeros(b, c + 1, h * w)
    for dy in (0, 1):
        for dx in (0, 1):
            yt, xt = y0 + dy, x0 + dx
            share = (1 - (yy - yt).abs()) * (1 - (xx - xt).abs())
            inside = (yt >= 0) & (yt < h) & (xt >= 0) & (xt < w)
            at = (yt.clamp(0, h - 1) * w + xt.clamp(0, w - 1)).long().view(b, 1, -1).expand(-1, c + 1, -1)
            out = out.scatter_add(2, at, (weighted * (share * inside)[:, None]).flatten(2))
    return (out[:, :-1] / (out[:, -1:] + 1e-6)).view(b, c, h, w)


def occlusions(forth: Tensor, back: Tensor, frame: Tensor) -> tuple[Tensor, Tensor]:
    """Forward and backward flows compared after a warp: where they disagree is hidden; the warped frame is masked."""
    _, _, h, w = forth.shape
    ys, xs = torch.meshgrid(torch.arange(h, device=forth.device), torch.arange(w, device=forth.device), indexing="ij")
    at = torch.stack((xs, ys)).to(forth.dtype) + forth
    grid = torch.stack((2 * at[:, 0] / (w - 1) - 1, 2 * at[:, 1] / (h - 1) - 1), -1)
    warped, moved = (F.grid_sample(t, grid, padding_mode="border", align_corners=True) for t in (back, frame))
    gap = (forth + warped).square().sum(1, keepdim=True)
    seen = gap < 0.01 * (forth.square() + warped.square()).sum(1, keepdim=True) + 0.5
    return seen, moved * seen


def cones(mean: Tensor, variance: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """mip-NeRF: expected sines of a Gaussian at ten scales, a narrow MLP."""
    scales = 2.0 ** torch.arange(10, device=mean.device, dtype=mean.dtype) * 0.1
    y = (mean[..., None, :] * scales[:, None]).flatten(-2)
    spread = (variance.abs()[..., None, :] * scales[:, None] ** 2).flatten(-2)
    wave = torch.exp(-0.5 * torch.cat([spread, spread], -1)) * torch.sin(torch.cat([y, y + 0.5 * math.pi], -1))
    return torch.sigmoid(F.relu(wave @ w1) @ w2)


def view_colours(sh: Tensor, means: Tensor, camera: Tensor) -> Tensor:
    """Gaussian splats: colours by spherical harmonics of degree two in the direction of the camera."""
    d = F.normalize(means - camera, dim=1)
    x, y, z = d.unsqueeze(-1).unbind(1)
    xx, yy, zz = x * x, y * y, z * z
    colour = 0.2820948 * sh[..., 0] - 0.4886025 * (y * sh[..., 1] - z * sh[..., 2] + x * sh[..., 3])
    colour = colour + 1.0925484 * (x * y * sh[..., 4] - y * z * sh[..., 5] - x * z * sh[..., 7])
    colour = colour + 0.3153916 * (2 * zz - xx - yy) * sh[..., 6] + 0.5462742 * (xx - yy) * sh[..., 8]
    return torch.clamp_min(colour + 0.5, 0.0)


def composited(centres: Tensor, conics: Tensor, opacity: Tensor, colours: Tensor) -> Tensor:
    """Splats of a tile over its pixels, front to back by a cumprod of what is left."""
    side = 16
    at = torch.arange(side, device=centres.device, dtype=centres.dtype)
    pixels = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1).view(-1, 2)
    d = pixels[None, :, None] - centres.sigmoid()[:, None] * side
    a, b, c = (conics.abs() * 0.05 + 0.01)[:, None].unbind(-1)
    power = -0.5 * (a * d[..., 0] ** 2 + c * d[..., 1] ** 2) - 0.1 * b * d[..., 0] * d[..., 1]
    alpha = (opacity.sigmoid()[:, None] * torch.exp(power.clamp(max=0))).clamp(max=0.99)
    alpha = torch.where(alpha > 1 / 255, alpha, 0)
    left = torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha[..., :-1]], -1), -1)
    return torch.einsum("tpk,tkc->tpc", alpha * left, colours)


def jitter(x: Tensor, factors: Tensor) -> Tensor:
    """Brightness, contrast, saturation and hue of bytes, a factor of each for each image; bytes again."""
    b = x.shape[0]
    bright, contrast, colour, hue = (0.6 + 0.8 * factors.sigmoid()).view(4, b, 1, 1, 1).unbind(0)
    y = (x.to(factors.dtype) / 255 * bright).clamp(0, 1)
    grey = (0.299 * y[:, 0] + 0.587 * y[:, 1] + 0.114 * y[:, 2])[:, None]
    y = (contrast * y + (1 - contrast) * grey.mean((1, 2, 3), keepdim=True)).clamp(0, 1)
    grey = (0.299 * y[:, 0] + 0.587 * y[:, 1] + 0.114 * y[:, 2])[:, None]
    y = (colour * y + (1 - colour) * grey).clamp(0, 1)
    high, low = y.amax(1), y.amin(1)
    gap = high - low
    safe = torch.where(gap == 0, 1.0, gap)
    r, g, bl = ((high - t) / safe for t in y.unbind(1))
    h = torch.where(y[:, 0] == high, bl - g, torch.where(y[:, 1] == high, 2 + r - bl, 4 + g - r))
    h = (h / 6 + 1 + 0.1 * (hue[:, 0] - 1)) % 1
    k = (torch.tensor([5.0, 3.0, 1.0], device=x.device, dtype=y.dtype).view(3, 1, 1) + h[:, None] * 6) % 6
    out = high[:, None] - gap[:, None] * torch.minimum(k, 4 - k).clamp(0, 1)
    return (out * 255).to(torch.uint8)


def mixed_and_cut(x: Tensor, labels: Tensor, lam: Tensor, frames: Tensor, w: Tensor) -> Tensor:
    """Mixup of half a batch, CutMix of the other half by given frames, a patch erased; a loss of soft labels."""
    b, _c, h, _ = x.shape
    lam = lam.sigmoid().view(b, 1, 1, 1)
    other = x.flip(0)
    lo, hi = frames.sigmoid().mul(h).sort(1).values.unbind(1)
    at = torch.arange(h, device=x.device)
    row = (at >= lo[:, None]) & (at < hi[:, None])
    box = (row[:, :, None] & row[:, None, :])[:, None]
    half = (torch.arange(b, device=x.device) < b // 2).view(b, 1, 1, 1)
    y = torch.where(half, lam * x + (1 - lam) * other, torch.where(box, other, x))
    y = y.masked_fill(box.roll(h // 3, 2) & box.roll(h // 3, 3), 0)
    share = torch.where(half, 1 - lam, box.to(x.dtype).mean((1, 2, 3), keepdim=True)).view(b, 1)
    one = F.one_hot(labels, w.shape[0]).to(x.dtype)
    logits = F.adaptive_avg_pool2d(y, 4).flatten(1) @ w.t()
    return -(((1 - share) * one + share * one.flip(0)) * logits.log_softmax(-1)).sum(-1).mean()


def padding_modes(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Reflected, circular and replicated borders before convolutions with strides 2x1, dilations 1x3 and groups."""
    x = F.relu(F.conv2d(F.pad(x, (3, 2, 1, 4), mode="reflect"), w1, stride=(2, 1), dilation=(1, 2)))
    x = F.relu(F.conv2d(F.pad(x, (2, 3, 2, 1), mode="circular"), w2, stride=(1, 2), groups=3))
    return F.conv2d(F.pad(x, (0, 1, 5, 0), mode="replicate"), w3, stride=3, dilation=(2, 1))


def grown(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor) -> Tensor:
    """Transposed convolutions: strides 3x2 with extra rows of output, then groups with dilation."""
    y = F.conv_transpose2d(x, w1, bias, stride=(3, 2), padding=(1, 2), output_padding=(2, 1))
    return F.conv_transpose2d(F.leaky_relu(y, 0.2), w2, stride=2, padding=1, output_padding=1, groups=4, dilation=2)


def volume_pools(x: Tensor, w: Tensor) -> Tensor:
    """Pools in three dimensions: a maximum with ceil_mode, a mean without its padding, adaptive ones, a convolution between."""
    a = F.max_pool3d(x, (3, 2, 3), stride=(2, 2, 1), padding=(1, 0, 1), ceil_mode=True)
    b = F.conv3d(a, w, padding=(0, 1, 1), stride=(1, 1, 2))
    c = F.avg_pool3d(b, (2, 3, 3), stride=(1, 2, 2), padding=(1, 1, 1), count_include_pad=False)
    return torch.cat([F.adaptive_avg_pool3d(c, (2, 3, 5)), F.adaptive_max_pool3d(b, (2, 3, 5))], 1)


def uneven_pools(x: Tensor, p: Tensor) -> Tensor:
    """Adaptive pools to sizes that do not divide, a generalised mean with a learned power, an L3 pool."""
    a = F.adaptive_avg_pool2d(x, (5, 7))
    b = F.adaptive_max_pool2d(x, (5, 7))
    power = F.softplus(p)
    gem = x.clamp(min=1e-2).pow(power).mean((2, 3)).pow(1 / power)
    c = F.lp_pool2d(x.abs() + 0.1, 3, 4, stride=3)
    return (a * b).sum((2, 3)) + gem + c.mean((2, 3))


def odd_norms(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """A group norm of 51 channels in 3 groups, an instance norm in one dimension, a filter response norm."""
    y = F.group_norm(x, 3, w, b, 1e-3)
    y = F.instance_norm(F.gelu(y.flatten(2)), weight=scale).view_as(x)
    return x * torch.maximum(
        y * torch.rsqrt(y.square().mean((2, 3), keepdim=True) + 1e-6) * scale[:, None, None], b[:, None, None]
    )


def antialiased(x: Tensor, w: Tensor) -> Tensor:
    """An image made smaller with antialiasing, normalised, cut into patches."""
    y = F.interpolate(x, size=(x.shape[2] // 3 + 1, x.shape[3] // 2), mode="bilinear", antialias=True)
    mean = torch.tensor([0.485, 0.456, 0.406], device=x.device, dtype=x.dtype).view(3, 1, 1)
    return F.conv2d((y - mean) / 0.225, w, stride=w.shape[-1]).flatten(2).transpose(1, 2)


def folded_patches(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Overlapping patches through an autoencoder, put back by fold and divided by how many overlap."""
    h, width = x.shape[2:]
    patches = F.unfold(x, 8, stride=5)
    y = torch.tanh(patches.transpose(1, 2) @ w1) @ w2
    y = F.fold(y.transpose(1, 2), (h, width), 8, stride=5)
    count = F.fold(F.unfold(torch.ones_like(x[:1]), 8, stride=5), (h, width), 8, stride=5)
    return y / count.clamp(min=1)


def edge_detector(x: Tensor) -> Tensor:
    """Canny: a blur, gradients, thinning across the gradient, two thresholds joined by three dilations."""
    g = torch.exp(-0.5 * torch.arange(-2, 3, device=x.device, dtype=x.dtype) ** 2)
    g = (g / g.sum()).view(1, 1, 1, 5)
    y = F.conv2d(F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), g), g.mT)
    p = F.pad(y, (1, 1, 1, 1), mode="replicate")
    gx = (p[..., 1:-1, 2:] - p[..., 1:-1, :-2]) / 2
    gy = (p[..., 2:, 1:-1] - p[..., :-2, 1:-1]) / 2
    m = torch.hypot(gx, gy)
    q = F.pad(m, (1, 1, 1, 1))
    flat = gx.abs() > 2 * gy.abs()
    before = torch.where(flat, q[..., 1:-1, :-2], q[..., :-2, 1:-1])
    after = torch.where(flat, q[..., 1:-1, 2:], q[..., 2:, 1:-1])
    thin = m * ((m >= before) & (m >= after))
    strong, weak = (thin > 0.3).to(x.dtype), (thin > 0.1).to(x.dtype)
    for _ in range(3):
        strong = F.max_pool2d(strong, 3, 1, 1) * weak
    return strong * m


def components(x: Tensor) -> Tensor:
    """Labels of connected pixels: eight rounds of a maximum over neighbours, within the mask; opening by erosions before."""
    mask = (F.avg_pool2d(x, 5, 1, 2) > 0).to(x.dtype)
    mask = F.max_pool2d(-F.max_pool2d(-mask, 3, 1, 1), 3, 1, 1)
    h, w = x.shape[2:]
    label = torch.arange(1, h * w + 1, device=x.device, dtype=x.dtype).view(1, 1, h, w) * mask
    for _ in range(8):
        label = F.max_pool2d(label, 3, 1, 1) * mask
    return label


def block_codec(x: Tensor, table: Tensor) -> Tensor:
    """JPEG: chroma, cosine transforms of 8x8 blocks, rounding with straight-through gradients, and back."""
    b, _, h, w = x.shape
    y, u, v = x.unbind(1)
    ycc = torch.stack([0.299 * y + 0.587 * u + 0.114 * v, 0.5 * y - 0.419 * u - 0.081 * v, -0.169 * y - 0.331 * u + 0.5 * v], 1)
    k = torch.arange(8, device=x.device, dtype=x.dtype)
    basis = torch.cos((2 * k[None] + 1) * k[:, None] * math.pi / 16) * 0.5
    basis = torch.cat([basis[:1] * 0.5**0.5, basis[1:]])
    blocks = ycc.view(b, 3, h // 8, 8, w // 8, 8).permute(0, 1, 2, 4, 3, 5)
    c = basis @ blocks @ basis.T
    step = table.abs() * 0.1 + 0.05
    q = c / step
    q = (q + (q.round() - q).detach()) * step
    out = (basis.T @ q @ basis).permute(0, 1, 2, 4, 3, 5).reshape(b, 3, h, w)
    return (out - x).abs().mean((1, 2, 3)) + q.abs().log1p().mean((1, 2, 3, 4, 5))


def equalised(x: Tensor) -> Tensor:
    """Histograms of bytes equalised: counts by scatter_add, cumulative sums into a table, lookups."""
    b, c = x.shape[:2]
    at = x.flatten(2).long()
    count = torch.zeros(b, c, 256, device=x.device, dtype=torch.int64).scatter_add_(2, at, torch.ones_like(at))
    total = count.cumsum(-1)
    least = total.masked_fill(total == 0, 2**30).amin(-1, keepdim=True)
    table = ((total - least) * 255 // (total[..., -1:] - least).clamp(min=1)).clamp(0, 255).to(torch.uint8)
    return table.gather(2, at).view_as(x)


def uncertain_points(logits: Tensor, wanted: Tensor, points: Tensor) -> Tensor:
    """Mask2Former: masks sampled at random points, the most uncertain half kept, cross entropy and dice there."""
    grid = 2 * points.sigmoid() - 1
    ours = F.grid_sample(logits[:, None], grid[:, :, None], align_corners=False).flatten(1)
    theirs = F.grid_sample((wanted > 0).to(logits.dtype)[:, None], grid[:, :, None], align_corners=False).flatten(1)
    picked = (-ours.detach().abs()).topk(ours.shape[1] // 2, dim=1).indices
    ours, theirs = ours.gather(1, picked), theirs.gather(1, picked)
    entropy = F.binary_cross_entropy_with_logits(ours, theirs, reduction="none").mean(1)
    p = ours.sigmoid()
    dice = 1 - (2 * (p * theirs).sum(-1) + 1) / (p.sum(-1) + theirs.sum(-1) + 1)
    return (entropy + dice).mean()


def fused_scales(a: Tensor, b: Tensor, c: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """ASFF: three levels brought to one size, weighted by a softmax for each pixel, a convolution."""
    size = b.shape[2:]
    levels = [F.interpolate(a, size=size, mode="nearest"), b, F.max_pool2d(c, 3, stride=2, padding=1)]
    scores = F.conv2d(torch.cat(levels, 1), w).softmax(1)
    y = sum(x * scores[:, k : k + 1] for k, x in enumerate(levels))
    return F.hardswish(F.conv2d(y, out, padding=1))


def deformed(x: Tensor, offset_w: Tensor, w: Tensor) -> Tensor:
    """A modulated deformable 3x3 convolution by nine grid samples and a matmul."""
    b, _c, h, width = x.shape
    found = F.conv2d(x, offset_w, padding=1)
    shift, mask = found[:, :18].view(b, 9, 2, h, width), found[:, 18:].sigmoid()
    ys = torch.arange(h, device=x.device, dtype=x.dtype).view(h, 1)
    xs = torch.arange(width, device=x.device, dtype=x.dtype)
    columns = []
    for k in range(9):
        gy, gx = ys + shift[:, k, 0] + k // 3 - 1, xs + shift[:, k, 1] + k % 3 - 1
        grid = torch.stack((2 * gx / (width - 1) - 1, 2 * gy / (h - 1) - 1), -1)
        columns.append(F.grid_sample(x, grid, align_corners=True) * mask[:, k : k + 1])
    return torch.einsum("bkchw,okc->bohw", torch.stack(columns, 1), w)


def recurrent_maps(x: Tensor, w: Tensor, bias: Tensor, peep: Tensor) -> Tensor:
    """A convolutional LSTM with peepholes over three frames."""
    b, _, _, h, width = x.shape
    hidden = peep.shape[1]
    s = c = torch.zeros(b, hidden, h, width, device=x.device, dtype=x.dtype)
    for frame in x.unbind(1):
        i, f, g, o = F.conv2d(torch.cat([frame, s], 1), w, bias, padding=2).chunk(4, 1)
        c = torch.sigmoid(f + peep[1] * c) * c + torch.sigmoid(i + peep[0] * c) * torch.tanh(g)
        s = torch.sigmoid(o + peep[2] * c) * torch.tanh(c)
    return s


def log_spaced_bias(x: Tensor, qkv: Tensor, tau: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Swin 2: cosine attention in windows with biases from an MLP of logarithmic offsets."""
    b, n, d = x.shape
    side, heads = math.isqrt(n), tau.shape[0]
    at = torch.arange(-side + 1, side, device=x.device, dtype=torch.float32)
    table = torch.stack(torch.meshgrid(at, at, indexing="ij"), -1) * 8 / (side - 1)
    table = (table.sign() * torch.log2(table.abs() + 1) / 3).to(x.dtype)
    bias = 16 * torch.sigmoid(F.relu(table.view(-1, 2) @ w1[:2] + w1[2]) @ w2)
    place = torch.arange(n, device=x.device)
    rows, columns = place // side, place % side
    at = (rows[:, None] - rows + side - 1) * (2 * side - 1) + columns[:, None] - columns + side - 1
    bias = bias[at.view(-1)].view(n, n, heads).permute(2, 0, 1)
    q, k, v = F.linear(x, qkv).view(b, n, 3, heads, -1).permute(2, 0, 3, 1, 4)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * tau.clamp(max=math.log(100.0)).exp()[:, None, None] + bias
    return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)


def binned_distances(x: Tensor, wanted: Tensor) -> Tensor:
    """Distribution focal loss: four distances as distributions over sixteen bins, the two nearest bins as labels."""
    logits = x.view(-1, 4, 16)
    target = wanted.sigmoid() * 14.9
    left = target.long()
    right = left + 1
    share = right - target
    logp = logits.log_softmax(-1)
    loss = -(logp.gather(-1, left[..., None])[..., 0] * share + logp.gather(-1, right[..., None])[..., 0] * (1 - share))
    expected = logits.softmax(-1) @ torch.arange(16, device=x.device, dtype=x.dtype)
    return loss.mean() + F.smooth_l1_loss(expected, target, beta=0.5)


def heat_of_centres(x: Tensor, centres: Tensor, sizes: Tensor) -> Tensor:
    """CenterNet: Gaussians around centres, their maximum as the wanted map, a penalty-reduced focal loss."""
    h, w = x.shape[2:]
    cy, cx = centres.to(x.dtype).unbind(-1)
    ys, xs = torch.arange(h, device=x.device, dtype=x.dtype), torch.arange(w, device=x.device, dtype=x.dtype)
    spread = 2 * (sizes.sigmoid() * 3 + 1) ** 2
    ey = torch.exp(-((ys - cy[..., None]) ** 2) / spread[..., None])
    ex = torch.exp(-((xs - cx[..., None]) ** 2) / spread[..., None])
    heat = (ey[..., :, None] * ex[..., None, :]).amax(1, keepdim=True)
    p = x.sigmoid().clamp(1e-4, 1 - 1e-4)
    hit = heat.eq(1)
    loss = torch.where(hit, (1 - p) ** 2 * p.log(), (1 - heat) ** 4 * p**2 * (1 - p).log())
    return -loss.sum() / hit.sum().clamp(min=1)


def pillars(points: Tensor, cell: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    """PointPillars: points lifted and normalised, maxima for each cell by scatter_reduce, onto a map for a convolution."""
    side, c = 128, w.shape[0]
    y = F.linear(points, w)
    y = F.relu(F.batch_norm(y, None, None, norm, training=True))
    canvas = torch.zeros(side * side, c, device=y.device, dtype=y.dtype)
    canvas = canvas.scatter_reduce(0, cell[:, None].expand(-1, c), y, "amax", include_self=True)
    return F.avg_pool2d(canvas.t().reshape(1, c, side, side), 2).square().sum(1)


def lifted(features: Tensor, depth: Tensor, cell: Tensor) -> Tensor:
    """Lift, splat: features of pixels spread over a distribution of depths, summed into cells seen from above."""
    p = depth.softmax(1)
    volume = p[:, :, None] * features[:, None]
    flat = volume.permute(0, 1, 3, 4, 2).reshape(-1, features.shape[1])
    grid = torch.zeros(200 * 200, features.shape[1], device=flat.device, dtype=flat.dtype)
    return grid.index_add(0, cell, flat).square().view(200, 200, -1).permute(2, 0, 1)


def automaton(x: Tensor, w1: Tensor, bias: Tensor, w2: Tensor, fire: Tensor) -> Tensor:
    """A neural cellular automaton, four steps: fixed filters of each channel, two 1x1 layers, given updates, living cells."""
    c = x.shape[1]
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=x.device, dtype=x.dtype) / 8
    one = torch.zeros_like(sobel)
    one[1, 1] = 1
    kernel = torch.stack([one, sobel, sobel.t()]).repeat(c, 1, 1)[:, None]
    for k in range(4):
        seen = F.conv2d(x, kernel, padding=1, groups=c)
        change = F.conv2d(F.relu(F.conv2d(seen, w1, bias)), w2)
        new = x + change * (fire[k] > 0).to(x.dtype)
        alive = (F.max_pool2d(x[:, 3:4], 3, 1, 1) > 0.1) & (F.max_pool2d(new[:, 3:4], 3, 1, 1) > 0.1)
        x = new * alive.to(x.dtype)
    return x


def variation(x: Tensor, y: Tensor) -> Tensor:
    """Total variation, Charbonnier and gradient losses of an image; a Laplacian pyramid by mean pools."""
    loss = torch.sqrt((x - y).square() + 1e-6).mean()
    for level in range(3):
        loss = loss + 0.1 * ((x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean())
        loss = loss + 0.5**level * (torch.diff(x, dim=-1) - torch.diff(y, dim=-1)).abs().mean()
        small_x, small_y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
        up = F.interpolate(small_x - small_y, size=x.shape[2:], mode="bilinear", align_corners=False)
        loss = loss + (x - y - up).abs().mean()
        x, y = small_x, small_y
    return loss


def _photo(m: Make, *shape: int) -> Tensor:
    return ids(m, 256, *shape).to(torch.uint8)


def _padded(m: Make, b: int, c: int, h: int) -> list[Tensor]:
    return [m(b, c, h, h + 3), weight(m, 2 * c, c, 3, 3), weight(m, 3 * c, 2 * c // 3, 4, 2), weight(m, c, 3 * c, 3, 3)]


PADDED = Sized(padding_modes, _padded, (1, 3, 12))
GROWN = Sized(
    grown,
    lambda m, b, c, h: [m(b, c, h, h + 1), m(c, 8, 5, 4) * (c * 4) ** -0.5, m(8, 3, 3, 3) * 0.2, m(8)],
    (2, 6, 4),
)
NORMS = Sized(odd_norms, lambda m, b, h: [m(b, 51, h, h), m(51), m(51), m(51)], (2, 5))
SPLAT = Sized(
    splatted, lambda m, b, c, h, w: [m(b, c, h, w), m(b, 2, h, w) * 3, m(b, 1, h, w)], (2, 3, 5, 6), SINGLE, tf32=True
)
CONES = Sized(
    cones, lambda m, r, s, d: [m(r, s, 3), m(r, s, 3) * 0.1, weight(m, 60, d), weight(m, d, 4)], (5, 4, 8), SINGLE, tf32=True
)
TILES = Sized(composited, lambda m, t, k: [m(t, k, 2), m(t, k, 3), m(t, k), m(t, k, 3)], (3, 9), SINGLE, tf32=True)
BIAS = Sized(
    log_spaced_bias,
    lambda m, b, s, d, h: [m(b, s * s, d), weight(m, 3 * d, d), m(h), m(3, 512), m(512, h) * 512**-0.5],
    (2, 3, 16, 2),
    HALF,
)

BLOCKS: tuple[Block, ...] = (
    Sized(suppression, lambda m, n: [m(n, 4), m(n), ids(m, 7, n)], (30,), SINGLE).block("greedy suppression", 2000),
    Sized(matching_costs, lambda m, b, q, t, c: [m(b, q, c), m(b, q, 4), ids(m, c, t), m(t, 4)], (2, 5, 4, 7), SINGLE).block(
        "matching costs", 8, 900, 150, 80
    ),
    *SPLAT.both("softmax splatting", 4, 32, 180, 321),
    Sized(occlusions, lambda m, b, h, w: [m(b, 2, h, w), m(b, 2, h, w), m(b, 3, h, w)], (2, 5, 7), SINGLE).block(
        "occlusions", 8, 321, 480
    ),
    *CONES.both("cones", 4096, 65, 128),
    Sized(view_colours, lambda m, n: [m(n, 3, 9), m(n, 3), m(3)], (7,), SINGLE).block("view colours", 700001, training=True),
    *TILES.both("tile of splats", 700, 65),
    Sized(jitter, lambda m, b, h: [_photo(m, b, 3, h, h), m(4, b)], (2, 6), SINGLE).block("colour jitter", 64, 225),
    Sized(
        mixed_and_cut,
        lambda m, b, h, k: [m(b, 3, h, h), ids(m, k, b), m(b), m(b, 2), weight(m, k, 48)],
        (4, 8, 5),
        SINGLE,
        tf32=True,
    ).block("mixed and cut", 64, 224, 1000, training=True),
    *PADDED.both("padding modes", 16, 24, 113),
    *GROWN.both("grown maps", 16, 64, 31),
    Sized(
        volume_pools, lambda m, b, c, h: [m(b, c, h, h, h), weight(m, c + 2, c, 2, 3, 3)], (1, 3, 7), SINGLE, tf32=True
    ).block("pools of volumes", 4, 24, 37, training=True),
    Sized(uneven_pools, lambda m, b, c, h: [m(b, c, h, h + 1), m(1)], (2, 3, 13), SINGLE).block(
        "uneven pools", 32, 96, 47, training=True
    ),
    *NORMS.both("odd norms", 32, 45),
    Sized(antialiased, lambda m, b, h, d: [m(b, 3, h, h + 5), weight(m, d, 3, 8, 8)], (1, 50, 5), SINGLE, tf32=True).block(
        "antialiased", 16, 510, 192
    ),
    Sized(
        folded_patches, lambda m, b, h, d: [m(b, 3, h, h), weight(m, 192, d), weight(m, d, 192)], (1, 18, 6), SINGLE, tf32=True
    ).block("overlapping patches", 8, 253, 64, training=True),
    Sized(edge_detector, lambda m, b, h, w: [m(b, 1, h, w)], (1, 9, 11), SINGLE).block("canny", 16, 481, 641),
    Sized(components, lambda m, b, h: [m(b, 1, h, h)], (1, 12), SINGLE).block("components", 16, 300),
    Sized(block_codec, lambda m, b, h, w: [m(b, 3, h, w), m(8, 8)], (2, 16, 24), SINGLE, tf32=True).block(
        "block codec", 16, 256, 328, training=True
    ),
    Sized(equalised, lambda m, b, h: [_photo(m, b, 3, h, h)], (2, 7)).block("equalised", 32, 255),
    Sized(uncertain_points, lambda m, n, h, k: [m(n, h, h), m(n, 2 * h, 2 * h), m(n, k, 2)], (3, 6, 8), SINGLE).block(
        "uncertain points", 100, 160, 12544, training=True
    ),
    Sized(
        fused_scales,
        lambda m, b, c, h: [
            *(image(m, b, c, s, s) for s in (h // 2, h, 2 * h)),
            weight(m, 3, 3 * c, 1, 1),
            weight(m, c, c, 3, 3),
        ],
        (2, 4, 6),
    ).block("fused scales", 16, 128, 40, training=True),
    Sized(
        deformed,
        lambda m, b, c, h: [m(b, c, h, h + 2), weight(m, 27, c, 3, 3), weight(m, c, 9, c)],
        (1, 3, 5),
        SINGLE,
        tf32=True,
    ).block("modulated convolution", 4, 64, 64, training=True),
    Sized(
        recurrent_maps,
        lambda m, b, c, d, h: [m(b, 3, c, h, h), weight(m, 4 * d, c + d, 5, 5), m(4 * d), m(3, d, h, h)],
        (1, 2, 3, 5),
    ).block("recurrent maps", 8, 32, 64, 48, training=True),
    BIAS.block("logarithmic offsets", 256, 12, 192, 6, training=True),
    Sized(binned_distances, lambda m, n: [m(n, 64), m(n, 4)], (7,), SINGLE).block("bins of distances", 33600, training=True),
    Sized(heat_of_centres, lambda m, b, k, h: [m(b, 1, h, h), ids(m, h, b, k, 2), m(b, k)], (2, 3, 7), SINGLE).block(
        "heat of centres", 16, 50, 128, training=True
    ),
    Sized(pillars, lambda m, n, c: [m(n, 9), ids(m, 128 * 128, n), weight(m, c, 9), m(c)], (50, 4), SINGLE, tf32=True).block(
        "pillars", 120001, 64, training=True
    ),
    Sized(
        lifted, lambda m, n, c, d, h: [m(n, c, h, h), m(n, d, h, h), ids(m, 40000, n * d * h * h)], (2, 3, 4, 5), SINGLE
    ).block("lift and splat", 6, 64, 41, 22, training=True),
    Sized(
        automaton,
        lambda m, b, c, h: [m(b, c, h, h), weight(m, 128, 3 * c, 1, 1), m(128), weight(m, c, 128, 1, 1), m(4, b, 1, h, h)],
        (1, 4, 6),
        SINGLE,
        tf32=True,
    ).block("automaton", 8, 16, 72, training=True),
    Sized(variation, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w)], (1, 18, 20), SINGLE).block(
        "variation", 8, 250, 333, training=True
    ),
)
