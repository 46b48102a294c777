"""Blocks of detection, segmentation, depth and optical flow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def decode_anchors(deltas: Tensor, sizes: Tensor) -> Tensor:
    """Corners of (batch, anchors, height, width, 4) from offsets and the anchors of a grid with stride 8."""
    h, w = deltas.shape[2:4]
    y, x = torch.meshgrid(torch.arange(h, device=deltas.device), torch.arange(w, device=deltas.device), indexing="ij")
    centre = torch.stack((x, y), -1).to(deltas.dtype) * 8 + 4
    size = sizes.abs()[:, None, None] * 16 + 8
    middle = deltas[..., :2] * 0.1 * size + centre
    half = torch.exp(torch.clamp(deltas[..., 2:] * 0.2, max=4.1)) * size / 2
    low = (middle - half).clamp(min=0)
    high = torch.min(middle + half, torch.tensor([w * 8, h * 8], device=deltas.device, dtype=deltas.dtype))
    return torch.cat((low, high), -1).flatten(1, 3)


def box_overlaps(a: Tensor, b: Tensor) -> Tensor:
    low, high = torch.max(a[:, None, :2], b[None, :, :2]), torch.min(a[:, None, 2:], b[None, :, 2:])
    inter = (high - low).clamp(min=0).prod(2)
    area = [(t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1]) for t in (a, b)]
    return inter / (area[0][:, None] + area[1][None] - inter)


def assign_anchors(corner: Tensor, size: Tensor, truth: Tensor, extent: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of anchors: the best box above .5, none below .4, and each box's own best anchor."""
    iou = box_overlaps(torch.cat((corner, corner + size.abs() + 1), 1), torch.cat((truth, truth + extent.abs() + 1), 1))
    value, index = iou.max(1)
    labels = torch.full_like(index, -1)
    labels[value < 0.4] = 0
    labels = torch.where(value >= 0.5, index + 1, labels)
    best = iou.amax(0, keepdim=True)
    return torch.where(((iou == best) & (best > 0.1)).any(1), index + 1, labels), value


def retina_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sigmoid focal loss of one-hot labels, of which -1 is ignored and 0 is background."""
    valid, positive = labels >= 0, labels > 0
    target = F.one_hot(labels.clamp(min=0), logits.shape[-1] + 1)[..., 1:].to(logits.dtype)
    p = logits.sigmoid()
    ce = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
    pt = p * target + (1 - p) * (1 - target)
    loss = ce * (0.25 * target + 0.75 * (1 - target)) * (1 - pt) ** 2
    return (loss * valid[..., None]).sum() / positive.sum().clamp(min=1)


def labelled_focal(logits: Tensor, labels: Tensor) -> Tensor:
    return retina_loss(logits, labels - 1)


def roi_align(x: Tensor, low: Tensor, size: Tensor, which: Tensor) -> Tensor:
    """7x7 bins of two samples a side, sampled in [0, 1] coordinates; x of (images, channels, height, width)."""
    steps = (torch.arange(14, device=x.device, dtype=x.dtype) + 0.5) / 14
    start, extent = torch.sigmoid(low), torch.sigmoid(size) * 0.5
    gx = (start[:, :1] + steps[None] * extent[:, :1]) * 2 - 1
    gy = (start[:, 1:] + steps[None] * extent[:, 1:]) * 2 - 1
    grid = torch.stack((gx[:, None].expand(-1, 14, -1), gy[:, :, None].expand(-1, -1, 14)), -1)
    return F.avg_pool2d(F.grid_sample(x[which], grid, align_corners=False), 2)


def deformable_attention(value: Tensor, offsets: Tensor, scores: Tensor, reference: Tensor) -> Tensor:
    """Deformable DETR's sampling of three levels; value of (batch, positions, heads, channels)."""
    b, _, heads, c = value.shape
    q, points = offsets.shape[1], offsets.shape[4]
    side = int((value.shape[1] / 21) ** 0.5)
    shapes = [(4 * side, 4 * side), (2 * side, 2 * side), (side, side)]
    shares = scores.flatten(3).softmax(-1).view_as(scores)
    levels = value.split([h * w for h, w in shapes], 1)
    sampled = []
    for k, (h, w) in enumerate(shapes):
        scale = torch.tensor([w, h], device=value.device, dtype=value.dtype)
        at = torch.sigmoid(reference)[:, :, None, None] + offsets[:, :, :, k] / scale
        grid = (2 * at - 1).transpose(1, 2).flatten(0, 1)
        maps = levels[k].flatten(2).transpose(1, 2).reshape(b * heads, c, h, w)
        sampled.append(F.grid_sample(maps, grid, align_corners=False))
    weights = shares.transpose(1, 2).reshape(b * heads, 1, q, 3 * points)
    out = (torch.stack(sampled, -2).flatten(-2) * weights).sum(-1)
    return out.view(b, heads * c, q).transpose(1, 2)


def matrix_nms(masks: Tensor, scores: Tensor, labels: Tensor) -> Tensor:
    """SOLOv2's decay of scores, masks in the order of their scores."""
    order = torch.argsort(scores, descending=True, stable=True)
    flat = (masks[order] > 0).flatten(1).float()
    inter = flat @ flat.t()
    area = flat.sum(1).expand(len(order), len(order))
    iou = inter / (area + area.t() - inter).clamp(min=1)
    same = labels[order].expand(len(order), len(order))
    decay = (iou * (same == same.t())).triu(1)
    worst = decay.amax(0).expand_as(decay).t()
    shrink = torch.exp(-2 * decay**2) / torch.exp(-2 * worst**2)
    return scores[order] * shrink.amin(0).to(scores.dtype)


def decomposed_positions(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Attention of SAM's image encoder, relative positions of rows and columns added by einsum."""
    b, n, d = q.shape
    side = int(n**0.5)
    relative = torch.arange(side, device=q.device)[:, None] - torch.arange(side, device=q.device)[None] + side - 1
    grid = q.view(b, side, side, d)
    rh = torch.einsum("bhwc,hkc->bhwk", grid, rows[relative])
    rw = torch.einsum("bhwc,wkc->bhwk", grid, columns[relative])
    scores = (q * d**-0.5) @ k.transpose(-2, -1)
    scores = (scores.view(b, side, side, side, side) + rh[..., :, None] + rw[..., None, :]).view(b, n, n)
    return scores.softmax(-1) @ v


def conv_mixer(x: Tensor, deep: Tensor, point: Tensor, norm: Tensor) -> Tensor:
    """Depthwise 9x9 beside a shortcut, then 1x1, each with GELU and a trained batch norm."""
    y = F.batch_norm(F.gelu(F.conv2d(x, deep, padding=4, groups=x.shape[1])), None, None, norm[0], norm[1], training=True)
    return F.batch_norm(F.gelu(F.conv2d(x + y, point)), None, None, norm[2], norm[3], training=True).relu()


def pyramid(a: Tensor, b: Tensor, c: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three levels merged from the top, by bilinear and nearest resizing to sizes that are no multiples."""
    b = b + F.interpolate(c, size=b.shape[-2:], mode="bilinear", align_corners=False)
    a = a + F.interpolate(b, size=a.shape[-2:], mode="nearest")
    return F.conv2d(a, w, padding=1), F.conv2d(b, w, padding=1), F.max_pool2d(c, 1, 2)


def weighted_pyramid(a: Tensor, b: Tensor, c: Tensor, shares: Tensor) -> Tensor:
    """BiFPN's fast normalised fusion of three maps."""
    s = F.relu(shares)
    s = s / (s.sum() + 1e-4)
    x = s[0] * a + s[1] * F.interpolate(b, scale_factor=2.0, mode="nearest") + s[2] * F.max_pool2d(c, 3, 2, 1)
    return F.silu(x)


def depth_loss(prediction: Tensor, depth: Tensor) -> Tensor:
    """Scale-invariant logarithms and matched gradients where depth is valid."""
    valid = depth > -1
    n = valid.sum().clamp(min=1)
    d = torch.where(valid, prediction - torch.log1p(depth.abs()), 0.0)
    loss = (d**2).sum() / n - 0.85 * d.sum() ** 2 / n**2
    for k in range(3):
        step = 2**k
        e, m = d[:, ::step, ::step], valid[:, ::step, ::step]
        gx = (e[:, :, 1:] - e[:, :, :-1]).abs() * (m[:, :, 1:] & m[:, :, :-1])
        gy = (e[:, 1:] - e[:, :-1]).abs() * (m[:, 1:] & m[:, :-1])
        loss = loss + 0.5 * (gx.sum() + gy.sum()) / m.sum().clamp(min=1)
    return loss


def correlation_lookup(f1: Tensor, f2: Tensor, flow: Tensor) -> Tensor:
    """RAFT: all pairs, three pooled levels, windows of 7x7 around where the flow points."""
    b, c, h, w = f1.shape
    volume = torch.matmul(f1.flatten(2).transpose(1, 2), f2.flatten(2)).view(b * h * w, 1, h, w) / c**0.5
    y, x = torch.meshgrid(torch.arange(h, device=f1.device), torch.arange(w, device=f1.device), indexing="ij")
    at = (torch.stack((x, y)).to(flow.dtype)[None] + flow).permute(0, 2, 3, 1).reshape(b * h * w, 1, 1, 2)
    r = torch.linspace(-3, 3, 7, device=f1.device, dtype=flow.dtype)
    delta = torch.stack(torch.meshgrid(r, r, indexing="ij"), -1)[None]
    found = []
    for k in range(3):
        size = torch.tensor([volume.shape[3] - 1, volume.shape[2] - 1], device=f1.device, dtype=flow.dtype).clamp(min=1)
        grid = 2 * (at / 2**k + delta) / size - 1
        found.append(F.grid_sample(volume, grid, align_corners=True).view(b, h, w, -1))
        volume = F.avg_pool2d(volume, 2, stride=2)
    return torch.cat(found, -1).permute(0, 3, 1, 2).contiguous()


def photometric(first: Tensor, second: Tensor, flow: Tensor) -> Tensor:
    """Robust difference to the warped image, and smooth flow where the image is smooth."""
    _, _, h, w = first.shape
    y = torch.arange(h, device=flow.device, dtype=flow.dtype).view(1, -1, 1)
    x = torch.arange(w, device=flow.device, dtype=flow.dtype).view(1, 1, -1)
    gx, gy = 2 * (x + flow[:, 0]) / (w - 1) - 1, 2 * (y + flow[:, 1]) / (h - 1) - 1
    inside = ((gx.abs() <= 1) & (gy.abs() <= 1))[:, None]
    warped = F.grid_sample(second, torch.stack((gx, gy), -1), padding_mode="border", align_corners=True)
    data = (((first - warped) ** 2 + 1e-6) ** 0.45 * inside).mean()
    edge = torch.exp(-10 * (first[..., 1:] - first[..., :-1]).abs().mean(1, keepdim=True))
    return data + 0.1 * (edge * (flow[..., 1:] - flow[..., :-1]).abs()).mean()


def neighbourhood(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to 5x5 neighbours by unfold; q of (batch, channels, height, width), zeros outside."""
    b, c, h, w = q.shape
    keys, values = (F.unfold(t, 5, padding=2).view(b, c, 25, h, w) for t in (k, v))
    share = ((q[:, :, None] * keys).sum(1) * c**-0.5).softmax(1)
    return (share[:, None] * values).sum(2)


def odd_merge(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """Patch merging of odd sides: padded, four strided slices, a norm, a linear layer."""
    x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
    x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], -1)
    return F.linear(F.layer_norm(x, x.shape[-1:], g, b), w)


def channel_conv(x: Tensor, w: Tensor) -> Tensor:
    """ECA: a convolution along the means of channels, and generalised-mean pooling of what it scales."""
    y = F.conv1d(x.mean((2, 3)).unsqueeze(1), w, padding=w.shape[-1] // 2).sigmoid()
    z = x * y.transpose(1, 2)[..., None]
    return z.abs().clamp(min=1e-6).pow(3).mean((2, 3)).pow(1 / 3)


def centre_peaks(heat: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CenterNet: local maxima, the best 40 of all classes, their sizes gathered."""
    p = heat.sigmoid()
    p = p * (F.max_pool2d(p, 3, 1, 1) == p)
    score, at = p.flatten(1).topk(40)
    hw = heat.shape[2] * heat.shape[3]
    place = at % hw
    got = sizes.flatten(2).gather(2, place[:, None].expand(-1, 2, -1))
    x, y = (place % heat.shape[3]).to(got.dtype), (place // heat.shape[3]).to(got.dtype)
    return score, at // hw, torch.stack((x - got[:, 0] / 2, y - got[:, 1] / 2, x + got[:, 0] / 2, y + got[:, 1] / 2), 2)


def _maps(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [m(b, c, h, w), m(b, c, h // 2 + 1, w // 2), m(b, c, h // 4, w // 4), weight(m, c, c, 3, 3)]


def _deformable(m: Make, b: int, side: int, heads: int, c: int, q: int) -> list[Tensor]:
    return [m(b, 21 * side * side, heads, c), m(b, q, heads, 3, 4, 2), m(b, q, heads, 3, 4), m(b, q, 2)]


ROI = Sized(roi_align, lambda m, n, c, h, w, r: [m(n, c, h, w), m(r, 2), m(r, 2), ids(m, n, r)], (2, 3, 9, 8, 5), SINGLE)
MERGE = Sized(odd_merge, lambda m, b, h, w, c: [m(b, h, w, c), m(4 * c), m(4 * c), weight(m, 2 * c, 4 * c)], (2, 5, 6, 8))

BLOCKS: tuple[Block, ...] = (
    Sized(decode_anchors, lambda m, b, a, h, w: [m(b, a, h, w, 4), m(a, 2)], (2, 3, 5, 4), SINGLE).block(
        "decode anchors", 16, 9, 67, 101
    ),
    Sized(assign_anchors, lambda m, n, t: [m(n, 2) * 20, m(n, 2) * 9, m(t, 2) * 20, m(t, 2) * 9], (70, 5), SINGLE).block(
        "assign anchors", 120087, 37
    ),
    Sized(labelled_focal, lambda m, b, n, c: [m(b, n, c), ids(m, c + 2, b, n)], (2, 9, 5), HALF).block(
        "labelled focal loss", 8, 24003, 80, training=True
    ),
    *ROI.both("roi align", 4, 256, 100, 67, 512),
    Sized(deformable_attention, _deformable, (2, 2, 2, 4, 5), SINGLE).block(
        "deformable attention", 4, 20, 8, 32, 900, training=True
    ),
    Sized(matrix_nms, lambda m, n, s: [m(n, s, s + 1), m(n).abs(), ids(m, 5, n)], (9, 7), SINGLE).block("matrix nms", 500, 100),
    Sized(
        decomposed_positions,
        lambda m, b, s, d: [m(b, s * s, d), m(b, s * s, d), m(b, s * s, d), m(2 * s - 1, d), m(2 * s - 1, d)],
        (2, 3, 8),
        HALF,
    ).block("decomposed positions", 100, 14, 64),
    Sized(
        conv_mixer, lambda m, n, c, s: [image(m, n, c, s, s), weight(m, c, 1, 9, 9), weight(m, c, c, 1, 1), m(4, c)], (2, 6, 9)
    ).block("conv mixer", 32, 192, 31, training=True),
    Sized(pyramid, _maps, (1, 4, 10, 12), HALF).block("pyramid of odd sizes", 4, 128, 150, 212),
    Sized(
        weighted_pyramid,
        lambda m, n, c, s: [m(n, c, s, s), m(n, c, s // 2, s // 2), m(n, c, 2 * s, 2 * s), m(3).abs()],
        (1, 3, 6),
    ).block("weighted pyramid", 16, 88, 48, training=True),
    Sized(depth_loss, lambda m, n, h, w: [m(n, h, w), m(n, h, w)], (2, 9, 10), SINGLE).block(
        "depth loss", 16, 353, 470, training=True
    ),
    Sized(correlation_lookup, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w), m(b, 2, h, w)], (1, 4, 9, 10), SINGLE).block(
        "correlation lookup", 1, 128, 46, 62
    ),
    Sized(photometric, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w), m(b, 2, h, w) * 3], (1, 9, 10), SINGLE).block(
        "photometric loss", 8, 255, 511, training=True
    ),
    Sized(neighbourhood, lambda m, b, c, h, w: [m(b, c, h, w) for _ in range(3)], (1, 4, 7, 6), HALF).block(
        "neighbourhood attention", 8, 32, 57, 64
    ),
    *MERGE.both("odd patch merging", 32, 29, 57, 96),
    Sized(channel_conv, lambda m, n, c, s: [image(m, n, c, s, s), weight(m, 1, 1, 5)], (2, 6, 5)).block(
        "channel convolution", 64, 511, 14, training=True
    ),
    Sized(centre_peaks, lambda m, n, c, s: [m(n, c, s, s), m(n, 2, s, s)], (2, 3, 9), SINGLE).block(
        "centre peaks", 16, 80, 129
    ),
)
