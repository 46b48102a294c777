"""Blocks of pictures and points: detection, tracking, masks, histograms of tiles, colours, neighbours."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def soft_suppression(rects: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Gaussian soft suppression: the best box of each image, the others' scores decayed by their overlap, twenty steps."""
    centre, size = rects[..., :2], F.softplus(rects[..., 2:])
    low, high = centre - size / 2, centre + size / 2
    area = size.prod(-1)
    scores = scores.sigmoid().clone()
    rows = torch.arange(len(rects), device=rects.device)
    kept, found = [], []
    for _ in range(20 if rects.shape[1] > 20 else 3):
        value, best = scores.max(-1)
        kept.append(best)
        found.append(value)
        inner = torch.minimum(high, high[rows, best, None]) - torch.maximum(low, low[rows, best, None])
        overlap = inner.clamp(min=0).prod(-1)
        iou = overlap / (area + area[rows, best, None] - overlap)
        scores = scores * torch.exp(-iou * iou / 0.5)
        scores[rows, best] = 0
    return torch.stack(kept, 1), torch.stack(found, 1)


def located_points(points: Tensor, rects: Tensor, labels: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """FCOS' targets: distances of all points to all rects' borders, the smallest box that fits the level, centre-ness."""
    centre, size = rects[..., :2] * 100, F.softplus(rects[..., 2:]) * 60
    x1y1, x2y2 = centre - size / 2, centre + size / 2
    at = points[None, :, None] * 100
    ltrb = torch.cat([at - x1y1[:, None], x2y2[:, None] - at], -1)
    inside = ltrb.min(-1)[0] > 0
    longest = ltrb.max(-1)[0]
    in_level = (longest >= limits[None, :, :1].abs() * 10) & (longest <= limits[None, :, :1].abs() * 10 + 100)
    area = size.prod(-1)[:, None].expand(inside.shape).clone()
    area[~inside | ~in_level] = 1e8
    least, which = area.min(-1)
    target = labels.gather(1, which)
    target[least == 1e8] = 0
    reg = ltrb.gather(2, which[..., None, None].expand(*which.shape, 1, 4))[:, :, 0]
    left, t, r, b = reg.unbind(-1)
    ratio = (torch.minimum(left, r) / torch.maximum(left, r)).clamp(min=0) * (torch.minimum(t, b) / torch.maximum(t, b)).clamp(
        min=0
    )
    return target, reg, torch.where(least < 1e8, ratio.sqrt(), 0.0)


def dynamic_assignment(logits: Tensor, rects: Tensor, truth: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """SimOTA: costs of all truths and anchors, as many anchors as the sum of the ten best overlaps, conflicts by cost."""

    def corners(t: Tensor) -> tuple[Tensor, Tensor]:
        return t[:, :2] - F.softplus(t[:, 2:]), t[:, :2] + F.softplus(t[:, 2:])

    (pl, ph), (tl, th) = corners(rects), corners(truth)
    wh = (torch.min(ph[None], th[:, None]) - torch.max(pl[None], tl[:, None])).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    iou = inter / ((ph - pl).prod(1)[None] + (th - tl).prod(1)[:, None] - inter + 1e-6)
    onehot = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
    p = logits.float().sigmoid().sqrt().to(logits.dtype)[None].expand(len(truth), -1, -1)
    cls = F.binary_cross_entropy(p.float(), onehot[:, None].expand_as(p).float(), reduction="none").sum(-1)
    cost = cls + 3.0 * -torch.log(iou.float() + 1e-8)
    k = min(10, iou.shape[1])
    wanted = iou.topk(k, dim=1).values.sum(1).int().clamp(min=1)
    rank = cost.argsort(1).argsort(1)
    match = rank < wanted[:, None]
    several = match.sum(0) > 1
    best = cost.argmin(0)
    only = F.one_hot(best, len(truth)).bool().mT
    match = torch.where(several[None], only, match)
    return match.any(0), match.float().argmax(0)


def gated_tracks(mean: Tensor, cov: Tensor, seen: Tensor, looks: Tensor, past: Tensor) -> Tensor:
    """SORT with looks: a constant-velocity prediction, Mahalanobis distances to all detections, cosine costs, a gate."""
    n = mean.shape[1] // 2
    motion = torch.eye(2 * n, device=mean.device, dtype=mean.dtype)
    motion[:n, n:] = torch.eye(n, device=mean.device, dtype=mean.dtype)
    mean = mean @ motion.T
    spread = (cov @ cov.mT) / cov.shape[-1]
    noise = torch.cat([mean[:, 3:4].abs().expand(-1, n) / 20, mean[:, 3:4].abs().expand(-1, n) / 160], 1) + 0.1
    spread = motion @ spread @ motion.T + torch.diag_embed(noise.square())
    innovation = spread[:, :n, :n] + 0.5 * torch.eye(n, device=mean.device, dtype=mean.dtype)
    variance = innovation.diagonal(dim1=1, dim2=2)
    d = seen[None] - mean[:, None, :n]
    distance = (d * d / variance[:, None]).sum(-1)
    cosine = 1 - torch.einsum("tkd,nd->tkn", F.normalize(past, dim=-1), F.normalize(looks, dim=-1)).amax(1)
    cost = 0.98 * cosine + 0.02 * distance
    cost[distance > 9.4877] = 1e5
    return cost


def bins_of_borders(logits: Tensor, target: Tensor, anchors: Tensor, mask: Tensor) -> Tensor:
    """Generalised focal rects: expectations of 17 bins a border, the overlap's loss, cross-entropies of the two next bins."""
    n, anchors = len(logits), anchors.detach()
    p = logits.view(n, 4, 17)
    project = torch.arange(17, device=logits.device, dtype=logits.dtype)
    dist = p.softmax(-1) @ project
    lt, rb = dist.chunk(2, -1)
    box = torch.cat([anchors - lt, anchors + rb], -1)
    want = target.abs().clamp(max=3.9) * 4
    true = torch.cat([anchors - want[:, :2], anchors + want[:, 2:]], -1)
    wh = (torch.min(box[:, 2:], true[:, 2:]) - torch.max(box[:, :2], true[:, :2])).clamp(min=0)
    inter = wh.prod(1)
    union = (box[:, 2:] - box[:, :2]).prod(1) + (true[:, 2:] - true[:, :2]).prod(1) - inter
    left = want.long()
    wl = left + 1 - want
    flat = p.reshape(-1, 17)
    ce = F.cross_entropy(flat, left.view(-1), reduction="none") * wl.view(-1)
    ce = ce + F.cross_entropy(flat, (left + 1).view(-1), reduction="none") * (1 - wl).view(-1)
    ce = ce.view(n, 4).mean(-1)
    loss = (1 - inter / union.clamp(min=1e-6)) * 2 + ce * 0.5
    return (loss * mask).sum() / mask.sum().clamp(min=1)


def dynamic_heads(features: Tensor, params: Tensor, centres: Tensor) -> Tensor:
    """CondInst: each instance's own three layers of width one on shared maps and its relative coordinates."""
    _b, c, h, w = features.shape
    n = len(params)
    ys = torch.linspace(-1, 1, h, device=features.device, dtype=features.dtype)
    xs = torch.linspace(-1, 1, w, device=features.device, dtype=features.dtype)
    grid = torch.stack(torch.meshgrid(ys, xs, indexing="ij"))
    relative = grid[None] - centres[:, :, None, None]
    x = torch.cat([relative, features.expand(n, -1, -1, -1)], 1).flatten(2)
    sizes = [(c + 2) * c, c * c, c, c, c, 1]
    w0, w1, w2, b0, b1, b2 = params.split(sizes, 1)
    x = F.relu(torch.bmm(w0.reshape(n, c, c + 2), x) + b0[..., None])
    x = F.relu(torch.bmm(w1.reshape(n, c, c), x) + b1[..., None])
    return (torch.bmm(w2.reshape(n, 1, c), x) + b2[..., None]).view(n, h, w).sigmoid()


def cropped_masks(protos: Tensor, coefficients: Tensor, rects: Tensor) -> Tensor:
    """YOLACT: prototypes mixed by each instance's coefficients, cropped by its box, thresholded to bytes."""
    h, w, _ = protos.shape
    masks = (protos @ coefficients.tanh().mT).sigmoid()
    b = rects.sigmoid()
    x1, x2 = torch.minimum(b[:, 0], b[:, 2]) * w, torch.maximum(b[:, 0], b[:, 2]) * w
    y1, y2 = torch.minimum(b[:, 1], b[:, 3]) * h, torch.maximum(b[:, 1], b[:, 3]) * h
    rows = torch.arange(w, device=b.device, dtype=b.dtype).view(1, -1, 1).expand(h, w, len(b))
    cols = torch.arange(h, device=b.device, dtype=b.dtype).view(-1, 1, 1).expand(h, w, len(b))
    crop = (rows >= x1) * (rows < x2) * (cols >= y1) * (cols < y2)
    return (masks * crop).permute(2, 0, 1).gt(0.5).to(torch.uint8)


def limb_peaks(heat: Tensor) -> tuple[Tensor, Tensor]:
    """Keypoints from heat maps: the largest pixel, a quarter of a pixel towards the larger neighbour, its score."""
    _b, _j, h, w = heat.shape
    value, at = heat.flatten(2).max(-1)
    y, x = at // w, at % w
    flat = heat.flatten(2)

    def near(dy: int, dx: int) -> Tensor:
        place = (y + dy).clamp(0, h - 1) * w + (x + dx).clamp(0, w - 1)
        return flat.gather(2, place[..., None])[..., 0]

    dx, dy = torch.sign(near(0, 1) - near(0, -1)) * 0.25, torch.sign(near(1, 0) - near(-1, 0)) * 0.25
    inside = (x > 0) & (x < w - 1) & (y > 0) & (y < h - 1)
    found = torch.stack([x + torch.where(inside, dx, 0.0), y + torch.where(inside, dy, 0.0)], -1)
    return found * (value > 0)[..., None], value


def kernel_points(x: Tensor, at: Tensor, near: Tensor, kernel: Tensor, w: Tensor) -> Tensor:
    """KPConv: neighbours' influences on 15 kernel points by distance, features weighted, a matrix a kernel point."""
    to = at[near] - at[:, None]
    distance = (to[:, :, None] - kernel[None, None]).pow(2).sum(-1).clamp(min=1e-6).sqrt()
    influence = (1 - distance / 1.2).clamp(min=0).transpose(1, 2)
    weighted = torch.matmul(influence, x[near])
    out = torch.einsum("nkc,kcd->nd", weighted, w)
    return F.leaky_relu(F.instance_norm(out.T[None])[0].T, 0.1)


def plane_registration(source: Tensor, target: Tensor, normals: Tensor) -> tuple[Tensor, Tensor]:
    """ICP from points to planes: nearest target points, residuals along normals, normal equations of six unknowns."""
    d = source.square().sum(-1)[:, None] + target.square().sum(-1)[None] - 2 * source @ target.mT
    least, which = d.min(1)
    q, n = target[which], F.normalize(normals[which], dim=-1)
    r = ((q - source) * n).sum(-1)
    jac = torch.cat([torch.linalg.cross(source, n), n], -1)
    w = torch.where(r.abs() < 0.3, 1.0, 0.3 / r.abs()) * (least < 4)
    a = torch.einsum("n,ni,nj->ij", w, jac, jac)
    return a, torch.einsum("n,ni,n->i", w, jac, r)


def surface_variation(x: Tensor, near: Tensor) -> Tensor:
    """Eigenvalues of neighbourhoods' covariances in closed form, and what share is the smallest, a curvature."""
    p = x[near]
    p = p - p.mean(1, keepdim=True)
    c = torch.einsum("nki,nkj->nij", p, p) / p.shape[1]
    q = c.diagonal(dim1=1, dim2=2).mean(-1)
    eye = torch.eye(3, device=x.device, dtype=x.dtype)
    b = c - q[:, None, None] * eye
    size = (b.square().sum((1, 2)) / 6 + 1e-8).sqrt()
    b = b / size[:, None, None]
    det = (torch.linalg.cross(b[:, 0], b[:, 1]) * b[:, 2]).sum(-1)
    phi = torch.acos((det / 2).clamp(-0.999, 0.999)) / 3
    high = q + 2 * size * torch.cos(phi)
    low = q + 2 * size * torch.cos(phi + 2.0943951)
    middle = 3 * q - high - low
    return torch.stack([low / (3 * q + 1e-6), (middle - low) / (high + 1e-3), (high - middle) / (high + 1e-3)], -1)


def distance_map(mask: Tensor) -> Tensor:
    """A chamfer transform of distances: sixteen rounds of the least of eight neighbours and their lengths."""
    d = torch.where(mask > 1, 0.0, 1e3)
    for _ in range(16):
        p = F.pad(d, (1, 1, 1, 1), value=1e3)
        straight = torch.stack([p[..., 1:-1, :-2], p[..., 1:-1, 2:], p[..., :-2, 1:-1], p[..., 2:, 1:-1]]).amin(0) + 1
        across = torch.stack([p[..., :-2, :-2], p[..., :-2, 2:], p[..., 2:, :-2], p[..., 2:, 2:]]).amin(0) + 1.4142
        d = torch.minimum(d, torch.minimum(straight, across))
    return d.clamp(max=20)


def dithered(image: Tensor, palette: Tensor, bayer: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes to a palette of 16 colours: an ordered matrix added, the nearest colour, how often each one is chosen."""
    b, h, w, _ = image.shape
    n = len(bayer)
    order = (bayer.argsort().argsort().view(int(n**0.5), -1).float() / n - 0.5) * 32
    s = order.shape[0]
    tiled = order.repeat(-(-h // s), -(-w // s))[:h, :w]
    x = (image.float() + tiled[None, :, :, None]).clamp(0, 255) / 255
    far = (x[..., None, :] - palette.sigmoid()).square().sum(-1)
    code = far.argmin(-1)
    counts = torch.zeros(b, len(palette), device=image.device, dtype=torch.int64)
    counts.scatter_add_(1, code.view(b, -1), torch.ones_like(code).view(b, -1))
    return code.to(torch.uint8), counts


def tile_histograms(image: Tensor) -> Tensor:
    """CLAHE: histograms of an eight by eight grid of tiles, clipped and summed up, four tables mixed at each pixel."""
    b, h, w = image.shape
    th, tw = h // 8, w // 8
    tiles = image.view(b, 8, th, 8, tw).permute(0, 1, 3, 2, 4).reshape(b * 64, -1).long()
    hist = torch.zeros(b * 64, 256, device=image.device).scatter_add_(1, tiles, torch.ones_like(tiles, dtype=torch.float32))
    limit = 4.0 * th * tw / 256
    over = (hist - limit).clamp(min=0).sum(1, keepdim=True)
    lut = ((hist.clamp(max=limit) + over / 256).cumsum(1) * 255 / (th * tw)).clamp(0, 255).view(b, 8, 8, 256)
    y = ((torch.arange(h, device=image.device) + 0.5) / th - 0.5).clamp(0, 7)
    x = ((torch.arange(w, device=image.device) + 0.5) / tw - 0.5).clamp(0, 7)
    y0, x0 = y.long(), x.long()
    y1, x1 = (y0 + 1).clamp(max=7), (x0 + 1).clamp(max=7)
    fy, fx = (y - y0)[None, :, None], (x - x0)[None, None]
    v, batch = image.long(), torch.arange(b, device=image.device)[:, None, None]

    def read(r: Tensor, c: Tensor) -> Tensor:
        return lut[batch, r[None, :, None], c[None, None], v]

    top = read(y0, x0) * (1 - fx) + read(y0, x1) * fx
    low = read(y1, x0) * (1 - fx) + read(y1, x1) * fx
    return (top * (1 - fy) + low * fy).round().to(torch.uint8)


def oriented_cells(image: Tensor) -> Tensor:
    """HOG: gradients, sizes shared between the two next of nine angles, sums of 8 by 8 cells, blocks of four normed."""
    gx = F.pad(image[..., 2:] - image[..., :-2], (1, 1))
    gy = F.pad(image[..., 2:, :] - image[..., :-2, :], (0, 0, 1, 1))
    size, which = (gx * gx + gy * gy).max(1)
    gx, gy = gx.gather(1, which[:, None])[:, 0], gy.gather(1, which[:, None])[:, 0]
    size = (size + 1e-6).sqrt()
    angle = torch.remainder(torch.atan2(gy, gx + 1e-6), 3.14159265) / 3.14159265 * 9 - 0.5
    low = angle.floor()
    part = angle - low
    planes = [
        size * (torch.where(low.long() % 9 == i, 1 - part, 0.0) + torch.where((low.long() + 1) % 9 == i, part, 0.0))
        for i in range(9)
    ]
    cells = F.avg_pool2d(torch.stack(planes, 1), 8)
    blocks = cells.unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).flatten(3)
    blocks = blocks / (blocks.square().sum(-1, keepdim=True) + 1e-3).sqrt()
    blocks = blocks.clamp(max=0.2)
    return blocks / (blocks.square().sum(-1, keepdim=True) + 1e-3).sqrt()


def patch_means(image: Tensor) -> Tensor:
    """Non-local means: a window of 49 shifts, distances of patches by a box filter, weighted averages."""
    top = torch.zeros_like(image)
    weights = torch.zeros_like(image[:, :1])
    for dy in range(-3, 4):
        for dx in range(-3, 4):
            other = image.roll((dy, dx), (2, 3))
            d = F.avg_pool2d((image - other).square().mean(1, keepdim=True), 5, 1, 2)
            w = torch.exp(-d / 0.3)
            top += w * other
            weights += w
    return top / weights


def edge_diffusion(u: Tensor, rate: Tensor) -> Tensor:
    """Perona and Malik: eight steps along the four differences, each with its own conductance."""
    k = F.softplus(rate)
    for _ in range(8):
        p = F.pad(u, (1, 1, 1, 1), mode="replicate")
        north, south = p[:, :, :-2, 1:-1] - u, p[:, :, 2:, 1:-1] - u
        west, east = p[:, :, 1:-1, :-2] - u, p[:, :, 1:-1, 2:] - u
        u = u + 0.2 * sum(g / (1 + (g / k) ** 2) for g in (north, south, west, east))
    return torch.tanh(u)


def filmic(raw: Tensor, matrix: Tensor, curve: Tensor) -> Tensor:
    """A camera's 16 bits to bytes: black level, white balance by means, a colour matrix, ACES' curve, a table of gamma."""
    x = (raw.to(curve.dtype) - 64).clamp(min=0) / 4096
    x = x * (x[:, 1:2].mean((2, 3), keepdim=True) / x.mean((2, 3), keepdim=True).clamp(min=1e-4))
    x = torch.einsum("ij,bjhw->bihw", matrix * 0.1 + torch.eye(3, device=raw.device, dtype=matrix.dtype), x).clamp(min=0)
    x = (x * (2.51 * x + 0.03)) / (x * (2.43 * x + 0.59) + 0.14)
    table = curve.softmax(0).cumsum(0)
    at = x.clamp(0, 1) * (len(table) - 1)
    low = at.long().clamp(max=len(table) - 2)
    y = torch.lerp(table[low], table[low + 1], at - low)
    return (y * 255 + 0.5).to(torch.uint8)


def chroma_planes(image: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes to luma and halved chroma, rounded to bytes, and back by repeated chroma, with the error's sum."""
    r, g, b = image.float().unbind(-1)
    y = 0.299 * r + 0.587 * g + 0.114 * b
    cb, cr = (b - y) * 0.564 + 128, (r - y) * 0.713 + 128
    n, h, w = y.shape
    halved = torch.stack([cb, cr], 1).view(n, 2, h // 2, 2, w // 2, 2).mean((3, 5)).round().clamp(0, 255).to(torch.uint8)
    luma = y.round().clamp(0, 255).to(torch.uint8)
    up = halved.float().repeat_interleave(2, 2).repeat_interleave(2, 3) - 128
    grey = luma.float()
    back = torch.stack([grey + 1.403 * up[:, 1], grey - 0.344 * up[:, 0] - 0.714 * up[:, 1], grey + 1.773 * up[:, 0]], -1)
    back = back.round().clamp(0, 255).to(torch.uint8)
    return back, (back.int() - image.int()).abs().sum((1, 2, 3))


def layers_over(layers: Tensor, opacity: Tensor) -> Tensor:
    """Twelve layers of colour and coverage, each over those below, with three ways of blending."""
    out = torch.zeros_like(layers[:, 0, :3])
    cover = torch.zeros_like(layers[:, 0, :1])
    for i in range(layers.shape[1]):
        rgb, a = layers[:, i, :3].sigmoid(), layers[:, i, 3:].sigmoid() * opacity[i].sigmoid()
        mode = i % 3
        if mode == 1:
            rgb = rgb * out
        elif mode == 2:
            rgb = torch.where(out < 0.5, 2 * rgb * out, 1 - 2 * (1 - rgb) * (1 - out))
        out = rgb * a + out * (1 - a)
        cover = a + cover * (1 - a)
    return torch.cat([out / cover.clamp(min=1e-3), cover], 1)


def line_votes(at: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """Hough: votes of edge points for 180 angles and 512 offsets, peaks of 3 by 3."""
    theta = torch.arange(180, device=at.device, dtype=at.dtype) * 0.0174533
    rho = at[:, :1] * torch.cos(theta) + at[:, 1:] * torch.sin(theta)
    bins = ((rho + 6) / 12 * 511).round().long().clamp(0, 511)
    flat = bins + torch.arange(180, device=at.device) * 512
    votes = torch.zeros(180 * 512, device=at.device, dtype=at.dtype)
    votes = votes.index_add(0, flat.reshape(-1), strength.abs()[:, None].expand_as(flat).reshape(-1)).view(1, 1, 180, 512)
    peaks = votes == F.max_pool2d(votes, 3, 1, 1)
    value, where = (votes * peaks).flatten().topk(20)
    return value, where


def region_properties(labels: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Areas, centroids, rects, mean values and second moments of each label of an image."""
    h, w = labels.shape
    n = 500
    flat = labels.flatten()
    ys = torch.arange(h, device=labels.device).view(-1, 1).expand(h, w).flatten()
    xs = torch.arange(w, device=labels.device).expand(h, w).flatten()
    area = torch.bincount(flat, minlength=n)[:n].clamp(min=1)
    zero = torch.zeros(n, device=labels.device, dtype=image.dtype)
    cy, cx = zero.scatter_add(0, flat, ys.to(image.dtype)) / area, zero.scatter_add(0, flat, xs.to(image.dtype)) / area
    mean = zero.scatter_add(0, flat, image.flatten()) / area
    dy, dx = ys - cy[flat], xs - cx[flat]
    moments = torch.stack([zero.scatter_add(0, flat, a) / area for a in (dy * dy, dx * dy, dx * dx)], -1)
    low = torch.full((n,), max(h, w), device=labels.device)
    box = [low.scatter_reduce(0, flat, v, "amin") for v in (ys, xs)] + [
        (low * 0).scatter_reduce(0, flat, v, "amax") for v in (ys, xs)
    ]
    return torch.stack(box, -1), torch.stack([cy, cx, mean], -1), moments


def soft_superpixels(x: Tensor) -> Tensor:
    """Features of cells, each pixel's softmax over the nine cells around it, cells averaged anew by these, two rounds."""
    b, c, h, _w = x.shape
    s = 8 if h >= 64 else 2
    centres = F.avg_pool2d(x, s)
    for _ in range(2):
        ch, cw = centres.shape[2:]
        near = F.unfold(centres, 3, padding=1).view(b, c, 9, ch, 1, cw, 1)
        pixels = x.view(b, c, 1, ch, s, cw, s)
        inside = F.unfold(torch.ones_like(centres[:, :1]), 3, padding=1).view(b, 9, ch, 1, cw, 1)
        d = (pixels - near).square().sum(1).masked_fill(inside == 0, 1e4)
        p = (-d).softmax(1)
        top = (pixels * p[:, None]).sum((4, 6)).reshape(b, c * 9, ch * cw)
        low = p.sum((3, 5)).reshape(b, 9, ch * cw)
        centres = F.fold(top, (ch, cw), 3, padding=1) / (F.fold(low, (ch, cw), 3, padding=1) + 1e-3)
    return centres


INSTANCES = Sized(
    dynamic_heads,
    lambda m, n, c, h, w: [m(1, c, h, w), m(n, (c + 2) * c + c * c + 3 * c + 1) * 0.3, m(n, 2)],
    (3, 4, 5, 6),
)
KERNELS = Sized(
    kernel_points,
    lambda m, n, k, c, d: [m(n, c), m(n, 3) * 0.5, ids(m, n, n, k), m(15, 3) * 0.7, weight(m, 15, c, d)],
    (9, 4, 5, 6),
)
CURVED = Sized(surface_variation, lambda m, n, k: [m(n, 3), ids(m, n, n, k)], (9, 5), SINGLE)
CELLS = Sized(soft_superpixels, lambda m, b, c, h, w: [m(b, c, h, w)], (2, 3, 8, 6), SINGLE)
FLOWING = Sized(edge_diffusion, lambda m, b, c, h, w: [m(b, c, h, w), m(1)], (2, 1, 7, 9), SINGLE)


BLOCKS: tuple[Block, ...] = (
    Sized(soft_suppression, lambda m, b, n: [m(b, n, 4) * 2, m(b, n)], (2, 9), SINGLE).block("soft suppression", 16, 1000),
    Sized(
        located_points,
        lambda m, b, n, k: [m(n, 2), m(b, k, 4), ids(m, 80, b, k), m(n, 1)],
        (2, 30, 4),
        SINGLE,
    ).block("located points", 8, 17064, 37),
    Sized(
        dynamic_assignment,
        lambda m, n, c, k: [m(n, c), m(n, 4), m(k, 4), ids(m, c, k)],
        (30, 4, 3),
        SINGLE,
    ).block("dynamic assignment", 8400, 80, 23),
    Sized(
        gated_tracks,
        lambda m, t, n, k, d: [m(t, 8), m(t, 8, 8), m(n, 4), m(n, d), m(t, k, d)],
        (5, 7, 2, 6),
        SINGLE,
    ).block("gated tracks", 301, 277, 30, 128),
    Sized(bins_of_borders, lambda m, n: [m(n, 68), m(n, 4), m(n, 2), (m(n) > 0).to(torch.bool)], (12,), SINGLE).block(
        "bins of borders", 67200, training=True
    ),
    *INSTANCES.both("dynamic heads", 60, 8, 100, 152),
    Sized(cropped_masks, lambda m, n, k, h, w: [m(h, w, k), m(n, k), m(n, 4)], (3, 4, 5, 6)).block(
        "cropped masks", 90, 32, 138, 138
    ),
    Sized(limb_peaks, lambda m, b, j, h, w: [m(b, j, h, w)], (2, 3, 5, 6), HALF).block("limb peaks", 64, 17, 96, 72),
    *KERNELS.both("kernel points", 12001, 20, 64, 64),
    Sized(plane_registration, lambda m, n, k: [m(n, 3), m(k, 3), m(k, 3)], (9, 11), SINGLE).block(
        "plane registration", 8001, 5003
    ),
    *CURVED.both("surface variation", 100003, 16),
    Sized(distance_map, lambda m, b, h, w: [m(b, h, w)], (2, 7, 9), SINGLE).block("distance map", 8, 509, 510),
    Sized(
        dithered,
        lambda m, b, h, w: [ids(m, 256, b, h, w, 3).to(torch.uint8), m(16, 3), m(16)],
        (2, 7, 9),
        SINGLE,
    ).block("dithered", 8, 481, 643),
    Sized(tile_histograms, lambda m, b, h, w: [ids(m, 256, b, h, w).to(torch.uint8)], (2, 16, 24), SINGLE).block(
        "tile histograms", 8, 512, 768
    ),
    Sized(oriented_cells, lambda m, b, h, w: [m(b, 3, h, w)], (2, 24, 32), SINGLE).block("oriented cells", 64, 128, 64),
    Sized(patch_means, lambda m, b, h, w: [m(b, 3, h, w)], (1, 8, 9), SINGLE).block("patch means", 1, 510, 764),
    *FLOWING.both("edge diffusion", 4, 3, 251, 333),
    Sized(
        filmic,
        lambda m, b, h, w: [ids(m, 16000, b, 3, h, w).to(torch.int16), m(3, 3), m(257)],
        (2, 5, 7),
        SINGLE,
    ).block("filmic", 2, 1080, 1918),
    Sized(chroma_planes, lambda m, b, h, w: [ids(m, 256, b, h, w, 3).to(torch.uint8)], (2, 6, 8), SINGLE).block(
        "chroma planes", 4, 1080, 1916
    ),
    Sized(layers_over, lambda m, b, k, h, w: [m(b, k, 4, h, w), m(k)], (2, 4, 5, 6), HALF).block(
        "layers over", 2, 12, 405, 721, training=True
    ),
    Sized(line_votes, lambda m, n: [m(n, 2), m(n)], (30,), SINGLE).block("line votes", 20001),
    Sized(region_properties, lambda m, h, w: [ids(m, 500, h, w), m(h, w)], (9, 11), SINGLE).block(
        "region properties", 1021, 1023
    ),
    *CELLS.both("soft superpixels", 4, 20, 208, 320),
)
