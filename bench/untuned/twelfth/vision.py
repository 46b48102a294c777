"""Pictures: convolutions with masks, branches and gates, pools, similarity, colours, light, lenses, tracks, points."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, image, weight

SINGLE = torch.float32


# ---- layers ---------------------------------------------------------------------------------------------------------------


def split_attention(x: Tensor, w: Tensor, gain: Tensor, shift: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """ResNeSt: a convolution in four groups makes two splits, a softmax between them from their sum's mean, an average pool."""
    c = w.shape[0] // 2
    y = F.relu(F.batch_norm(F.conv2d(x, w, padding=1, groups=4), None, None, gain, shift, training=True))
    parts = y.split(c, 1)
    gap = sum(parts).mean((2, 3))
    a = F.linear(F.relu(F.layer_norm(F.linear(gap, wi), wi.shape[:1])), wo)
    a = a.view(-1, 2, 2, c // 2).transpose(1, 2).softmax(1).reshape(-1, 2 * c)[:, :, None, None]
    out = sum(g * p for g, p in zip(a.split(c, 1), parts, strict=True))
    return F.avg_pool2d(out, 3, 2, padding=1)


def masked_pixels(x: Tensor, wv: Tensor, wh: Tensor, wl: Tensor, wo: Tensor) -> Tensor:
    """A gated PixelCNN layer: a stack above by a cropped convolution, one to the left by a masked one, gates of both."""
    c = x.shape[1]
    h, v = x, F.pad(x, (0, 0, 1, 0))[:, :, :-1]
    up = F.conv2d(F.pad(v, (1, 1, 1, 0)), wv)
    mask = torch.ones_like(wh)
    mask[..., 2:] = 0
    left = F.conv2d(h, wh * mask, padding=(0, 1)) + F.conv2d(up, wl)
    up, left = (torch.tanh(t[:, :c]) * torch.sigmoid(t[:, c:]) for t in (up, left))
    return h + F.conv2d(left, wo) + up


def carried_moments(x: Tensor, w: Tensor, back: Tensor, gain: Tensor) -> Tensor:
    """PONO-MS: means and deviations over channels at each pixel, taken out before a layer and put back after another."""
    mean = x.mean(1, keepdim=True)
    std = x.var(1, keepdim=True).add(1e-5).sqrt()
    y = (x - mean) / std * gain[:, None, None]
    y = F.conv2d(F.leaky_relu(y, 0.2), w, stride=2, padding=1)
    y = F.instance_norm(y)
    y = F.interpolate(F.leaky_relu(y, 0.2), scale_factor=2.0, mode="bilinear", align_corners=False)
    return F.conv2d(y, back, padding=1) * std + mean


def softly_pooled(x: Tensor, w: Tensor, logit: Tensor) -> Tensor:
    """SoftPool, and LIP beside: means weighted by exps of values, and by exps of a small layer; odd windows, a layer."""
    e = torch.exp(x - x.amax((2, 3), keepdim=True).detach())
    soft = F.avg_pool2d(x * e, 3, 2) / (F.avg_pool2d(e, 3, 2) + 1e-6)
    g = torch.exp(12 * torch.sigmoid(F.instance_norm(F.conv2d(x, logit)))).clamp(max=1e4)
    local = F.avg_pool2d(x * g, 3, 2) / F.avg_pool2d(g, 3, 2)
    return F.conv2d(torch.cat([soft, local], 1), w)


def turned_gates(h: Tensor, x: Tensor, row: Tensor, column: Tensor) -> Tensor:
    """RAFT's unit: gates and states by convolutions of 1x5, then of 5x1, on a state and what it sees."""
    for w, pad in ((row, (0, 2)), (column, (2, 0))):
        hx = torch.cat([h, x], 1)
        z, r = torch.sigmoid(F.conv2d(hx, w[: 2 * h.shape[1]], padding=pad)).chunk(2, 1)
        q = torch.tanh(F.conv2d(torch.cat([r * h, x], 1), w[2 * h.shape[1] :], padding=pad))
        h = (1 - z) * h + z * q
    return h


def pooled_keys(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, gamma: Tensor) -> Tensor:
    """SAGAN: pixels see keys and values that a pool made a quarter as many; a learned share of it is added."""
    b, _c, h, w = x.shape
    q = F.conv2d(x, wq).view(b, -1, h * w)
    k = F.max_pool2d(F.conv2d(x, wk), 2).view(b, -1, h * w // 4)
    v = F.max_pool2d(F.conv2d(x, wv), 2).view(b, -1, h * w // 4)
    p = torch.bmm(q.transpose(1, 2), k).softmax(-1)
    y = torch.bmm(v, p.transpose(1, 2)).view(b, -1, h, w)
    return gamma * F.conv2d(y, wo) + x


def shifted_channels(x: Tensor, w: Tensor, down: Tensor, gain: Tensor) -> Tensor:
    """TSM in a video block: an eighth of the channels from the frame before, one from the next, a grouped convolution."""
    b, t, c, _h, _v = x.shape
    f = c // 8
    y = torch.zeros_like(x)
    y[:, :-1, :f] = x[:, 1:, :f]
    y[:, 1:, f : 2 * f] = x[:, :-1, f : 2 * f]
    y[:, :, 2 * f :] = x[:, :, 2 * f :]
    y = F.relu(F.group_norm(F.conv2d(y.flatten(0, 1), w), 3, gain))
    y = F.conv2d(y, down, stride=(2, 3), padding=(2, 1), groups=3)
    return y.unflatten(0, (b, t)).mean(1)


# ---- similarity and colours -----------------------------------------------------------------------------------------------


def gradient_similarity(a: Tensor, b: Tensor) -> Tensor:
    """GMSD: luma halved by means, Prewitt's gradients, similarity of sizes, its deviation; chroma's similarity beside."""
    k = torch.tensor([[1.0, 0, -1]] * 3, device=a.device, dtype=a.dtype) / 3
    k = torch.stack([k, k.t()])[:, None]
    yiq = torch.tensor([[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], device=a.device)
    a, b = (F.avg_pool2d(torch.einsum("oc,bchw->bohw", yiq.to(t.dtype), t), 2) for t in (a, b))
    ga, gb = ((F.conv2d(t[:, :1], k, padding=1).square().sum(1) + 1e-6).sqrt() for t in (a, b))
    map_ = (2 * ga * gb + 0.01) / (ga.square() + gb.square() + 0.01)
    i, q = ((2 * a[:, c] * b[:, c] + 0.01) / (a[:, c].square() + b[:, c].square() + 0.01) for c in (1, 2))
    return (map_.var((1, 2)) + 1e-8).sqrt().mean() + 0.1 * (1 - i * q).mean()


def even_lightness(x: Tensor, target: Tensor, curve: Tensor) -> Tensor:
    """Oklab: linear light, cones and cube roots, lightness by a learned curve of eight points, a distance with less chroma."""
    one = torch.tensor([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]], device=x.device)
    two = torch.tensor([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]], device=x.device)

    def lab(t: Tensor) -> Tensor:
        t = torch.sigmoid(t)
        t = torch.where(t <= 0.04045, t / 12.92, ((t + 0.055) / 1.055) ** 2.4)
        cones = torch.einsum("oc,bchw->bohw", one.to(t.dtype), t)
        return torch.einsum("oc,bchw->bohw", two.to(t.dtype), (cones + 1e-6) ** (1 / 3))

    p, q = lab(x), lab(target)
    at = (p[:, :1].clamp(0, 0.999) * 7).detach()
    low = at.floor().long()
    knots = F.softplus(curve).cumsum(0) / 8
    share = p[:, :1].clamp(0, 0.999) * 7 - low
    light = knots[low] * (1 - share) + knots[(low + 1).clamp(max=7)] * share
    far = torch.cat([light - q[:, :1], 2 * (p[:, 1:] - q[:, 1:])], 1).square().sum(1)
    return (far + 1e-6).sqrt().mean()


def eroded_distances(logits: Tensor, label: Tensor) -> Tensor:
    """A loss like Hausdorff's: squared errors eroded ten times by a cross, what is left counts by the square of the round."""
    p = torch.sigmoid(logits)
    y = (label > 0.5).to(p.dtype)
    e = (p - y).square()
    cross = torch.tensor([[0.0, 1, 0], [1, 1, 1], [0, 1, 0]], device=p.device, dtype=p.dtype)[None, None] / 5
    total = 0
    for k in range(10):
        e = F.relu(F.conv2d(e, cross, padding=1) - 0.5)
        low, high = e.amin((2, 3), keepdim=True), e.amax((2, 3), keepdim=True)
        e = (e - low) / (high - low + 1e-4)
        total = total + e * (k + 1) ** 2
    return total.mean()


def rough_surfaces(normal: Tensor, albedo: Tensor, rough: Tensor, metal: Tensor, lights: Tensor, view: Tensor) -> Tensor:
    """GGX: eight lights on a picture of normals, roughness and metal: distribution, masking, Fresnel, a filmic curve."""
    n = F.normalize(normal, dim=1)
    a = torch.sigmoid(rough).square() + 1e-2
    base, share = torch.sigmoid(albedo), torch.sigmoid(metal)
    f0 = 0.04 * (1 - share) + base * share
    v = F.normalize(view, dim=0)
    nv = torch.einsum("bchw,c->bhw", n, v)[:, None].clamp(min=1e-3)
    out = torch.zeros_like(base)
    for k in range(lights.shape[0]):
        d = F.normalize(lights[k, :3], dim=0)
        h = F.normalize(d + v, dim=0)
        nd, nh = (torch.einsum("bchw,c->bhw", n, t)[:, None].clamp(min=1e-3) for t in (d, h))
        spread = a.square() / (math.pi * (nh.square() * (a.square() - 1) + 1).square())
        kk = (a + 1).square() / 8
        mask = nv / (nv * (1 - kk) + kk) * nd / (nd * (1 - kk) + kk)
        fresnel = f0 + (1 - f0) * (1 - (h @ v).clamp(0, 1)) ** 5
        out = (
            out
            + (spread * mask * fresnel / (4 * nv * nd) + (1 - fresnel) * (1 - share) * base / math.pi) * nd * lights[k, 3].exp()
        )
    return (out * (2.51 * out + 0.03)) / (out * (2.43 * out + 0.59) + 0.14)


def dark_channels(x: Tensor) -> Tensor:
    """Haze: least values of 15 by 15 pixels, air from the brightest of them, transmission refined by a box mean, light back."""
    _b, _, h, w = x.shape
    x = torch.sigmoid(x)
    dark = -F.max_pool2d(-x.amin(1, keepdim=True), 15, 1, 7)
    at = dark.flatten(1).topk(max(h * w // 1000, 4), dim=1).indices
    air = x.flatten(2).gather(2, at[:, None].expand(-1, 3, -1)).mean(-1)[..., None, None]
    t = 1 + 0.95 * F.max_pool2d(-(x / air).amin(1, keepdim=True), 15, 1, 7)
    grey = x.mean(1, keepdim=True)
    mg, mt, mgt, mgg = (F.avg_pool2d(z, 9, 1, 4, count_include_pad=False) for z in (grey, t, grey * t, grey * grey))
    slope = (mgt - mg * mt) / (mgg - mg * mg + 1e-3)
    t = slope * grey + mt - slope * mg
    return ((x - air) / t.clamp(min=0.1) + air).clamp(0, 1)


def blob_extrema(x: Tensor, taps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """SIFT's first half: six blurs along both axes, their differences, extrema of 27 in contrast and not on edges."""
    _b, _h, _w = x.shape
    levels = [x[:, None]]
    for k in range(5):
        t = taps[k].softmax(0)
        y = F.conv2d(F.pad(levels[-1], (4, 4, 0, 0), mode="reflect"), t.view(1, 1, 1, 9))
        levels.append(F.conv2d(F.pad(y, (0, 0, 4, 4), mode="reflect"), t.view(1, 1, 9, 1)))
    d = torch.cat(levels[1:], 1) - torch.cat(levels[:-1], 1)
    high = F.max_pool3d(d[:, None], 3, 1, 1)[:, 0]
    low = -F.max_pool3d(-d[:, None], 3, 1, 1)[:, 0]
    c = d[:, 1:-1, 1:-1, 1:-1]
    dxx = d[:, 1:-1, 1:-1, 2:] + d[:, 1:-1, 1:-1, :-2] - 2 * c
    dyy = d[:, 1:-1, 2:, 1:-1] + d[:, 1:-1, :-2, 1:-1] - 2 * c
    dxy = (d[:, 1:-1, 2:, 2:] - d[:, 1:-1, 2:, :-2] - d[:, 1:-1, :-2, 2:] + d[:, 1:-1, :-2, :-2]) / 4
    edge = (dxx + dyy).square() * 10 < 121 * (dxx * dyy - dxy.square())
    keep = ((c == high[:, 1:-1, 1:-1, 1:-1]) | (c == low[:, 1:-1, 1:-1, 1:-1])) & (c.abs() > 0.03) & edge
    score = torch.where(keep, c.abs(), 0).flatten(1)
    best, at = score.topk(min(500, score.shape[1] // 4), dim=1)
    return best, torch.where(best > 0, at, -1), keep.sum((2, 3))


# ---- lenses, tracks, points -----------------------------------------------------------------------------------------------


def undistorted(x: Tensor, lens: Tensor) -> Tensor:
    """Brown's lens: eight fixed-point steps from each pixel to the distorted one, four gathers and their blend."""
    b, c, h, w = x.shape
    k1, k2, p1, p2 = (torch.tanh(lens) * 0.1).unbind()
    v, u = torch.meshgrid(
        torch.linspace(-1, 1, h, device=x.device, dtype=x.dtype),
        torch.linspace(-1, 1, w, device=x.device, dtype=x.dtype),
        indexing="ij",
    )
    a, d = u, v
    for _ in range(8):
        r = a * a + d * d
        radial = 1 + r * (k1 + r * k2)
        a, d = (
            (u - 2 * p1 * a * d - p2 * (r + 2 * a * a)) / radial,
            (v - p1 * (r + 2 * d * d) - 2 * p2 * a * d) / radial,
        )
    px, py = (a + 1) * (w - 1) / 2, (d + 1) * (h - 1) / 2
    x0, y0 = px.floor(), py.floor()
    out = 0
    for dy in (0, 1):
        for dx in (0, 1):
            i, j = y0 + dy, x0 + dx
            share = (1 - (py - i).abs()) * (1 - (px - j).abs())
            there = (i >= 0) & (i < h) & (j >= 0) & (j < w)
            at = (i.clamp(0, h - 1) * w + j.clamp(0, w - 1)).long().flatten()
            out = out + x.flatten(2)[:, :, at].view(b, c, h, w) * torch.where(there, share, 0)
    return out


def tracked_points(a: Tensor, b: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Lucas and Kanade: windows of 11 by 11 around points, their structure, five steps of bilinear reads and 2x2 solves."""
    h, w = a.shape
    at = torch.arange(-5, 6, device=a.device, dtype=a.dtype)
    dy, dx = (t.flatten() for t in torch.meshgrid(at, at, indexing="ij"))

    def read(t: Tensor, y: Tensor, x: Tensor) -> Tensor:
        y, x = y.clamp(1, h - 3), x.clamp(1, w - 3)
        i, j = y.floor().long(), x.floor().long()
        fy, fx = y - i, x - j
        top = t[i, j] * (1 - fx) + t[i, j + 1] * fx
        return top * (1 - fy) + (t[i + 1, j] * (1 - fx) + t[i + 1, j + 1] * fx) * fy

    y, x = (torch.sigmoid(points) * torch.tensor([h - 1, w - 1], device=a.device)).to(a.dtype)[..., None].unbind(1)
    here = read(a, y + dy, x + dx)
    gy = (read(a, y + dy + 1, x + dx) - read(a, y + dy - 1, x + dx)) / 2
    gx = (read(a, y + dy, x + dx + 1) - read(a, y + dy, x + dx - 1)) / 2
    yy, xx, xy = (gy * gy).sum(1) + 1, (gx * gx).sum(1) + 1, (gx * gy).sum(1)
    det = yy * xx - xy * xy
    vy, vx = torch.zeros_like(y), torch.zeros_like(x)
    for _ in range(5):
        far = here - read(b, y + dy + vy, x + dx + vx)
        ey, ex = (far * gy).sum(1), (far * gx).sum(1)
        vy = vy + ((xx * ey - xy * ex) / det)[:, None].clamp(-1, 1)
        vx = vx + ((yy * ex - xy * ey) / det)[:, None].clamp(-1, 1)
    return torch.cat([vy, vx], 1), (here - read(b, y + dy + vy, x + dx + vx)).abs().mean(1)


def voxels_at_points(x: Tensor, place: Tensor, w: Tensor, wp: Tensor) -> Tensor:
    """PVCNN: means of points by voxel, a 3x3x3 convolution of the grid, read between eight corners, a layer of points."""
    b, _n, c = x.shape
    r = 16
    p = torch.sigmoid(place) * (r - 1)
    near = p.round().long()
    at = (near[..., 0] * r + near[..., 1]) * r + near[..., 2]
    grid = torch.zeros(b, r**3, c, device=x.device, dtype=x.dtype).scatter_add(1, at[..., None].expand_as(x), x)
    count = torch.zeros(b, r**3, device=x.device, dtype=x.dtype).scatter_add(1, at, torch.ones_like(x[..., 0]))
    grid = (grid / count.clamp(min=1)[..., None]).view(b, r, r, r, c).permute(0, 4, 1, 2, 3)
    grid = F.leaky_relu(F.conv3d(grid, w, padding=1), 0.1).flatten(2).mT
    low = p.detach().floor().clamp(max=r - 2)
    f = p - low
    out = F.linear(x, wp)
    for k in range(8):
        o = torch.tensor([k >> 2, k >> 1 & 1, k & 1], device=x.device)
        i = low.long() + o
        share = torch.where(o == 1, f, 1 - f).prod(-1)
        corner = (i[..., 0] * r + i[..., 1]) * r + i[..., 2]
        out = out + share[..., None] * grid.gather(1, corner[..., None].expand(-1, -1, grid.shape[-1]))
    return out


BLOCKS: tuple[Block, ...] = (
    Sized(
        split_attention,
        lambda m, b, c, n: [
            image(m, b, c, n, n),
            weight(m, 2 * c, c // 4, 3, 3),
            m(2 * c),
            m(2 * c),
            weight(m, c // 2, c),
            weight(m, 2 * c, c // 2),
        ],
        (2, 8, 6),
    ).block("split attention", 32, 128, 28, training=True),
    Sized(
        masked_pixels,
        lambda m, b, c, n: [
            m(b, c, n, n),
            weight(m, 2 * c, c, 2, 3),
            weight(m, 2 * c, c, 1, 3),
            weight(m, 2 * c, 2 * c, 1, 1),
            weight(m, c, c, 1, 1),
        ],
        (2, 3, 6),
    ).block("masked pixels", 16, 120, 32, training=True),
    Sized(
        carried_moments,
        lambda m, b, c, n: [m(b, c, n, n), weight(m, 2 * c, c, 4, 4), weight(m, c, 2 * c, 3, 3), m(c)],
        (2, 4, 8),
    ).block("carried moments", 8, 64, 128, training=True),
    Sized(softly_pooled, lambda m, b, c, n: [m(b, c, n, n), weight(m, c, 2 * c, 1, 1), weight(m, c, c, 1, 1)], (2, 4, 9)).block(
        "softly pooled", 16, 64, 113, training=True
    ),
    Sized(
        turned_gates,
        lambda m, b, c, h, w: [
            torch.tanh(m(b, c, h, w)),
            m(b, 2 * c, h, w),
            weight(m, 3 * c, 3 * c, 1, 5),
            weight(m, 3 * c, 3 * c, 5, 1),
        ],
        (1, 4, 5, 6),
    ).block("turned gates", 4, 96, 46, 62, training=True),
    Sized(
        pooled_keys,
        lambda m, b, c, n: [
            m(b, c, n, n),
            weight(m, c // 8, c, 1, 1),
            weight(m, c // 8, c, 1, 1),
            weight(m, c // 2, c, 1, 1),
            weight(m, c, c // 2, 1, 1),
            m(1),
        ],
        (2, 8, 6),
    ).block("pooled keys", 16, 192, 32, training=True),
    Sized(
        shifted_channels,
        lambda m, b, t, c, o, n: [m(b, t, c, n, n), weight(m, o, c, 1, 1), weight(m, o, o // 3, 5, 3), m(o)],
        (2, 3, 8, 6, 7),
    ).block("shifted channels", 4, 8, 64, 96, 57, training=True),
    Sized(gradient_similarity, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w)], (2, 8, 10), SINGLE).block(
        "gradient similarity", 8, 512, 768, training=True
    ),
    Sized(even_lightness, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w), m(8)], (2, 5, 6), SINGLE).block(
        "even lightness", 8, 512, 768, training=True
    ),
    Sized(eroded_distances, lambda m, b, h, w: [m(b, 1, h, w) - 5, m(b, 1, h, w) + 2], (2, 24, 23), SINGLE).block(
        "eroded distances", 16, 321, 320, training=True
    ),
    Sized(
        rough_surfaces,
        lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, h, w), m(b, 1, h, w), m(b, 1, h, w), m(8, 4), m(3)],
        (1, 4, 5),
        SINGLE,
    ).block("rough surfaces", 4, 500, 700, training=True),
    Sized(dark_channels, lambda m, b, h, w: [m(b, 3, h, w)], (2, 18, 20), SINGLE).block("dark channels", 4, 480, 640),
    Sized(blob_extrema, lambda m, b, h, w: [m(b, h, w), m(5, 9)], (2, 12, 14), SINGLE).block("blob extrema", 4, 600, 800),
    Sized(undistorted, lambda m, b, c, h, w: [m(b, c, h, w), m(4)], (1, 2, 7, 9), SINGLE).block(
        "undistorted", 4, 3, 1080, 1920
    ),
    Sized(tracked_points, lambda m, h, w, n: [m(h, w), m(h, w), m(n, 2)], (30, 40, 5), SINGLE).block(
        "tracked points", 720, 1280, 20001
    ),
    Sized(
        voxels_at_points,
        lambda m, b, n, c: [m(b, n, c), m(b, n, 3), weight(m, c, c, 3, 3, 3), weight(m, c, c)],
        (1, 20, 3),
        SINGLE,
    ).block("voxels at points", 8, 4096, 32, training=True),
)
