"""Blocks of images and volumes: resizing, pools, windows, filters, stereo, fields, points."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def resizings(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One map at three sizes: bicubic, nearest-exact, bilinear against aliasing."""
    h, w = x.shape[-2:]
    return (
        F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False),
        F.interpolate(x, size=(h * 3 // 2, w - 3), mode="nearest-exact"),
        F.interpolate(x, size=(h // 2 + 1, w // 3), mode="bilinear", antialias=True),
    )


def bicubic_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.smooth_l1_loss(F.interpolate(x, size=y.shape[-2:], mode="bicubic", align_corners=True), y, beta=0.5)


def volume_up(x: Tensor, skip: Tensor, w: Tensor) -> Tensor:
    """A decoder of volumes: trilinear up, concatenated with a skip, convolved, instance norm."""
    y = F.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=True)
    return F.leaky_relu(F.instance_norm(F.conv3d(torch.cat((skip, y), 1), w, padding=1)), 0.01)


def pools(x: Tensor) -> Tensor:
    """Adaptive means and maxima, a power mean, all of one map, side by side."""
    a = F.adaptive_avg_pool2d(x, (5, 3)).flatten(1)
    b = F.adaptive_max_pool2d(x, (4, 7)).flatten(1)
    c = F.lp_pool2d(x.abs() + 0.1, 3, kernel_size=3, stride=2).flatten(2).mean(-1)
    d = x.clamp(min=1e-6).pow(3).mean((-2, -1)).pow(1 / 3)
    return torch.cat((a, b, c, d), 1)


def unpooled(x: Tensor, w: Tensor) -> Tensor:
    """SegNet: a pool's indices put its values back after a convolution."""
    y, at = F.max_pool2d(x, 2, 2, return_indices=True)
    y = F.relu(F.conv2d(y, w, padding=1))
    return F.max_unpool2d(y, at, 2, 2, output_size=x.shape[-2:])


def subpixel(x: Tensor, w1: Tensor, w2: Tensor, target: Tensor) -> Tensor:
    """Super-resolution by a pixel shuffle of factor 3, Charbonnier's loss and total variation."""
    y = F.pixel_shuffle(F.conv2d(F.prelu(F.conv2d(x, w1, padding=2), w1.new_full((1,), 0.2)), w2, padding=1), 3)
    tv = (y[..., 1:, :] - y[..., :-1, :]).abs().mean() + (y[..., :, 1:] - y[..., :, :-1]).abs().mean()
    return torch.sqrt((y - target) ** 2 + 1e-6).mean() + 0.01 * tv


def unfold_conv(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """A convolution written as unfold and a matmul, then a fold of its maps."""
    n, _, h, wide = x.shape
    columns = F.unfold(x, (3, 3), padding=1, stride=2)
    y = (columns.transpose(1, 2).matmul(w.view(w.size(0), -1).t()) + b).transpose(1, 2)
    return y.view(n, -1, (h + 1) // 2, (wide + 1) // 2)


def merged_windows(x: Tensor, w: Tensor) -> Tensor:
    """Windows of 7 with stride 3 through a linear layer, folded back, divided by how often a pixel was in one."""
    columns = F.unfold(x, 7, padding=3, stride=3)
    y = F.fold((columns.transpose(1, 2) @ w).transpose(1, 2), x.shape[-2:], 7, padding=3, stride=3)
    ones = torch.ones_like(x[:1, :1]).expand(1, x.shape[1], -1, -1)
    return y / F.fold(F.unfold(ones, 7, padding=3, stride=3), x.shape[-2:], 7, padding=3, stride=3)


def convex_up(flow: Tensor, mask: Tensor) -> Tensor:
    """RAFT: each fine pixel a convex combination of nine coarse ones."""
    n, _, h, w = flow.shape
    mask = torch.softmax(mask.view(n, 1, 9, 8, 8, h, w), dim=2)
    up = F.unfold(8 * flow, [3, 3], padding=1).view(n, 2, 9, 1, 1, h, w)
    up = torch.sum(mask * up, dim=2)
    return up.permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 8 * h, 8 * w)


def stereo_volume(left: Tensor, right: Tensor, w: Tensor) -> Tensor:
    """Group-wise correlations for 24 disparities written into a volume, a 3d convolution, soft argmin."""
    n, c, h, wide = left.shape
    groups = 8
    volume = left.new_zeros(n, groups, 24, h, wide)
    for d in range(24):
        if d:
            both = left[..., d:] * right[..., :-d]
            volume[:, :, d, :, d:] = both.view(n, groups, c // groups, h, wide - d).mean(2)
        else:
            volume[:, :, 0] = (left * right).view(n, groups, c // groups, h, wide).mean(2)
    p = F.softmax(F.conv3d(volume, w, padding=1).squeeze(1), dim=1)
    return torch.sum(p * torch.arange(24, device=p.device, dtype=p.dtype).view(1, 24, 1, 1), dim=1)


def census(left: Tensor, right: Tensor) -> Tensor:
    """Hamming distances of census codes over 16 disparities, the best of each pixel; bits counted by shifts."""

    def code(x: Tensor) -> Tensor:
        p = F.pad(x, (2, 2, 2, 2), mode="replicate")
        bits = torch.zeros_like(x, dtype=torch.int32)
        for dy in range(5):
            for dx in range(5):
                if (dy, dx) != (2, 2):
                    bits = (bits << 1) | (p[..., dy : dy + x.shape[-2], dx : dx + x.shape[-1]] > x).int()
        return bits

    def count(v: Tensor) -> Tensor:
        v = v - ((v >> 1) & 0x55555555)
        v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
        v = (v + (v >> 4)) & 0x0F0F0F0F
        return (v + (v >> 8) + (v >> 16)) & 0x3F

    a, b = code(left), code(right)
    costs = [F.avg_pool2d(count(a ^ torch.roll(b, d, -1)).to(left.dtype), 5, 1, 2) for d in range(16)]
    return torch.stack(costs, 1).argmin(1)


def guided_filter(guide: Tensor, x: Tensor) -> Tensor:
    """Box means as differences of cumulative sums, a local linear model."""
    r = 4

    def box(t: Tensor) -> Tensor:
        for dim in (2, 3):
            s = t.cumsum(dim)
            n = t.shape[dim]
            head = s.narrow(dim, r, r + 1)
            middle = s.narrow(dim, 2 * r + 1, n - 2 * r - 1) - s.narrow(dim, 0, n - 2 * r - 1)
            tail = s.narrow(dim, n - 1, 1) - s.narrow(dim, n - 2 * r - 1, r)
            t = torch.cat((head, middle, tail), dim)
        return t

    count = box(torch.ones_like(x[:1, :1]))
    mean_g, mean_x = box(guide) / count, box(x) / count
    a = (box(guide * x) / count - mean_g * mean_x) / (box(guide * guide) / count - mean_g * mean_g + 1e-2)
    return box(a) / count * guide + box(mean_x - a * mean_g) / count


def bilateral(x: Tensor) -> Tensor:
    """A bilateral filter of 7x7 by two unfolds of tensors, reflected at the border."""
    p = F.pad(x, (3, 3, 3, 3), mode="reflect").unfold(2, 7, 1).unfold(3, 7, 1).flatten(-2)
    d = torch.arange(-3, 4, device=x.device, dtype=x.dtype)
    space = torch.exp(-(d[:, None] ** 2 + d[None] ** 2).flatten() / 8)
    w = space * torch.exp(-((p - x.unsqueeze(-1)) ** 2) / 0.5)
    return (w * p).sum(-1) / w.sum(-1)


def corners(x: Tensor) -> Tensor:
    """Harris: image gradients, smoothed structure tensor, local maxima by a pool."""
    sobel = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=x.device, dtype=x.dtype) / 4
    g = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), torch.stack((sobel, sobel.t()))[:, None])
    a = torch.exp(-((torch.arange(7, device=x.device, dtype=x.dtype) - 3) ** 2) / 4)
    blur = (a[:, None] * a / a.sum() ** 2).expand(3, 1, 7, 7)
    t = torch.stack((g[:, 0] ** 2, g[:, 1] ** 2, g[:, 0] * g[:, 1]), 1)
    xx, yy, xy = F.conv2d(t, blur, padding=3, groups=3).unbind(1)
    response = xx * yy - xy**2 - 0.05 * (xx + yy) ** 2
    return torch.where(response == F.max_pool2d(response, 5, 1, 2), response, 0).clamp(min=1e-4)


def lab(rgb: Tensor) -> Tensor:
    """sRGB to CIE Lab, channels last."""
    x = rgb.sigmoid()
    x = torch.where(x > 0.04045, ((x + 0.055) / 1.055) ** 2.4, x / 12.92)
    m = [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
    y = torch.tensordot(x, torch.tensor(m, device=x.device, dtype=x.dtype), dims=([-1], [1]))
    y = y / torch.tensor([0.95047, 1.0, 1.08883], device=x.device, dtype=x.dtype)
    f = torch.where(y > 0.008856, y.clamp(min=1e-9).pow(1 / 3), 7.787 * y + 16 / 116)
    return torch.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], dim=-1)


def sample_filters(x: Tensor, route: Tensor, experts: Tensor) -> Tensor:
    """CondConv: filters mixed for each image, all images in one grouped convolution."""
    n, c, h, w = x.shape
    mix = torch.sigmoid(F.linear(x.mean((2, 3)), route))
    filters = (mix @ experts.flatten(1)).view(n * experts.shape[1], *experts.shape[2:])
    return F.conv2d(x.reshape(1, n * c, h, w), filters, padding=1, groups=n).view(n, -1, h, w)


def odd_convolutions(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Dilated, grouped, transposed with an output padding; channels that no power of two divides."""
    y = F.elu(F.conv2d(x, w1, padding=(4, 2), dilation=(4, 2), stride=(1, 2), groups=3))
    y = F.hardswish(F.conv_transpose2d(y, w2, stride=2, padding=1, output_padding=1, groups=3))
    return F.conv2d(F.pad(y, (1, 2, 2, 1), mode="circular"), w3)


def series_convolutions(x: Tensor, w1: Tensor, w2: Tensor, g: Tensor, up: Tensor) -> Tensor:
    """WaveNet's gates with weight norm, causal by a pad on the left; then a transposed convolution."""
    v = w1 * (g / w1.norm(dim=(1, 2), keepdim=True))
    for k in range(3):
        a, b = F.conv1d(F.pad(x, (2 << k, 0)), v, dilation=2**k).chunk(2, 1)
        x = x + F.conv1d(torch.tanh(a) * torch.sigmoid(b), w2)
    return F.conv_transpose1d(x, up, stride=3, padding=1)


def volume_convolutions(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Grouped and strided 3d convolution, then a transposed one."""
    y = F.mish(F.conv3d(x, w1, stride=(1, 2, 2), padding=(2, 1, 1), dilation=(2, 1, 1), groups=2))
    return F.conv_transpose3d(y, w2, stride=(1, 2, 2), padding=(0, 1, 1), output_padding=(0, 1, 1))


def grid_attention(x: Tensor, w: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """MaxViT: attention over a dilated grid, with biases by index and torch's fused attention."""
    b, c, h, wide = x.shape
    g = 8 if h % 8 == 0 else 2
    y = x.view(b, c, g, h // g, g, wide // g).permute(0, 3, 5, 2, 4, 1).reshape(-1, g * g, c)
    heads = table.shape[1]
    q, k, v = F.linear(y, w).view(y.shape[0], g * g, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
    bias = table[index[: g * g, : g * g].reshape(-1)].view(g * g, g * g, heads).permute(2, 0, 1).contiguous()
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).reshape(-1, g * g, c)
    y = y.view(b, h // g, wide // g, g, g, c).permute(0, 5, 3, 1, 4, 2).reshape(b, c, h, wide)
    return x + y


def positional_mlp(points: Tensor, views: Tensor, *weights: Tensor) -> Tensor:
    """NeRF: sines and cosines of a position in ten octaves, six layers with a skip, colours by the direction."""

    def encode(t: Tensor, octaves: int) -> Tensor:
        parts = [t]
        for k in range(octaves):
            parts += [torch.sin(2.0**k * t), torch.cos(2.0**k * t)]
        return torch.cat(parts, -1)

    e = encode(points, 10)
    h = e
    for k, w in enumerate(weights[:6]):
        h = F.relu(F.linear(h, w))
        if k == 2:
            h = torch.cat([e, h], -1)
    sigma = F.softplus(F.linear(h, weights[6]) - 1)
    rgb = torch.sigmoid(F.linear(F.relu(F.linear(torch.cat((h, encode(views, 4)), -1), weights[7])), weights[8]))
    return torch.cat((rgb, sigma), -1)


def hash_grid(points: Tensor, table: Tensor) -> Tensor:
    """Eight levels of hashed grids, trilinear between eight corners; table of (levels, rows, 2)."""
    size = table.shape[1]
    x, out = points.sigmoid(), []
    for level in range(table.shape[0]):
        scaled = x * (16 * 1.5**level)
        low = scaled.detach().floor()
        f, at = scaled - low, low.long()
        value = 0.0
        for corner in range(8):
            bits = [(corner >> d) & 1 for d in range(3)]
            c = [at[:, d] + bits[d] for d in range(3)]
            row = (c[0] ^ (c[1] * 2654435761) ^ (c[2] * 805459861)) % size
            share = [f[:, d] if bits[d] else 1 - f[:, d] for d in range(3)]
            value = value + table[level, row] * (share[0] * share[1] * share[2])[:, None]
        out.append(value)
    return torch.cat(out, -1)


def triplanes(planes: Tensor, points: Tensor, w: Tensor) -> Tensor:
    """EG3D: features of three planes sampled at projected points, their mean through a linear layer."""
    n, _, c, h, wide = planes.shape
    p = torch.tanh(points)
    at = torch.stack((p[..., [0, 1]], p[..., [1, 2]], p[..., [0, 2]]), 1).flatten(0, 1).unsqueeze(1)
    f = F.grid_sample(planes.reshape(n * 3, c, h, wide), at, mode="bilinear", padding_mode="zeros", align_corners=True)
    return F.softplus(F.linear(f.squeeze(2).view(n, 3, c, -1).mean(1).transpose(1, 2), w))


def inverse_samples(bins: Tensor, shares: Tensor, u: Tensor) -> Tensor:
    """NeRF's fine samples: a CDF, searchsorted, linear between its steps."""
    w = shares.abs() + 1e-5
    cdf = torch.cumsum(w / torch.sum(w, -1, keepdim=True), -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = u.sigmoid().contiguous()
    at = torch.searchsorted(cdf.detach(), u, right=True)
    pair = torch.stack([(at - 1).clamp(min=0), at.clamp(max=cdf.shape[-1] - 1)], -1)
    shape = [*pair.shape[:2], cdf.shape[-1]]
    c = torch.gather(cdf.unsqueeze(1).expand(shape), 2, pair)
    b = torch.gather(bins.sort(-1).values.unsqueeze(1).expand(shape), 2, pair)
    width = c[..., 1] - c[..., 0]
    t = (u - c[..., 0]) / torch.where(width < 1e-5, torch.ones_like(width), width)
    return torch.sort(b[..., 0] + t * (b[..., 1] - b[..., 0]), -1).values


def projected_splats(q: Tensor, scale: Tensor, mean: Tensor) -> Tensor:
    """Covariances of Gaussians from quaternions and scales, projected to an image, inverted; (n, 6)."""
    r, x, y, z = F.normalize(q, dim=-1).unbind(-1)
    rows = [
        1 - 2 * (y * y + z * z), 2 * (x * y - r * z), 2 * (x * z + r * y),
        2 * (x * y + r * z), 1 - 2 * (x * x + z * z), 2 * (y * z - r * x),
        2 * (x * z - r * y), 2 * (y * z + r * x), 1 - 2 * (x * x + y * y),
    ]  # fmt: skip
    m = torch.stack(rows, -1).view(-1, 3, 3) * scale.exp()[:, None, :]
    sigma = m @ m.transpose(1, 2)
    tx, ty, tz = mean[:, 0], mean[:, 1], mean[:, 2].abs() + 2
    o = torch.zeros_like(tz)
    j = torch.stack([torch.stack([1 / tz, o, -tx / tz**2], -1), torch.stack([o, 1 / tz, -ty / tz**2], -1)], -2)
    cov = j @ sigma @ j.transpose(1, 2)
    a, b, c = cov[:, 0, 0] + 0.3, cov[:, 0, 1], cov[:, 1, 1] + 0.3
    det = a * c - b * b
    mid = 0.5 * (a + c)
    radius = 3 * torch.sqrt(mid + torch.sqrt((mid * mid - det).clamp(min=0.1)))
    return torch.stack((c / det, -b / det, a / det, radius, tx / tz, ty / tz), -1)


def grouped_points(xyz: Tensor, features: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """PointNet++: balls around every eighth point by sorted indices, an MLP, maxima."""
    n = xyz.shape[1]
    centre = xyz[:, ::8]
    d2 = torch.sum(centre**2, -1)[:, :, None] - 2 * centre @ xyz.transpose(1, 2) + torch.sum(xyz**2, -1)[:, None, :]
    index = torch.arange(n, device=xyz.device).view(1, 1, n).repeat(xyz.shape[0], centre.shape[1], 1)
    index[d2 > 0.5**2] = n
    index = index.sort(dim=-1)[0][:, :, :24]
    first = index[:, :, :1].clamp(max=n - 1).expand_as(index)
    index = torch.where(index == n, first, index)
    batch = torch.arange(xyz.shape[0], device=xyz.device).view(-1, 1, 1)
    grouped = torch.cat((xyz[batch, index] - centre[:, :, None], features[batch, index]), -1)
    y = F.relu(F.linear(F.relu(F.linear(grouped, w1)), w2))
    return torch.max(y, 2)[0]


def farthest_points(xyz: Tensor) -> Tensor:
    """Sixteen points, each the farthest from those before."""
    b, n, _ = xyz.shape
    found = torch.zeros(b, 16, dtype=torch.long, device=xyz.device)
    distance = torch.full((b, n), 1e10, device=xyz.device, dtype=xyz.dtype)
    farthest = torch.zeros(b, dtype=torch.long, device=xyz.device)
    batch = torch.arange(b, device=xyz.device)
    for k in range(16):
        found[:, k] = farthest
        d = torch.sum((xyz - xyz[batch, farthest, :].view(b, 1, 3)) ** 2, -1)
        distance = torch.minimum(distance, d)
        farthest = torch.max(distance, -1)[1]
    return found


def residual_codes(x: Tensor, books: Tensor) -> Tensor:
    """Four codebooks one after the other, each for what the ones before left, with straight-through estimates."""
    rest, out, loss = x, torch.zeros_like(x), 0.0
    for book in books.unbind(0):
        d = rest.pow(2).sum(1, keepdim=True) - 2 * rest @ book.t() + book.pow(2).sum(1)
        q = F.embedding(torch.argmin(d, dim=1), book)
        loss = loss + F.mse_loss(q, rest.detach()) + 0.25 * F.mse_loss(rest, q.detach())
        q = rest + (q - rest).detach()
        out, rest = out + q, rest - q.detach()
    return out.square().mean() + loss


def fourier_operator(x: Tensor, w1: Tensor, w2: Tensor, point: Tensor) -> Tensor:
    """FNO: few modes of a 2d transform multiplied by complex weights, beside a 1x1 convolution."""
    n, _, h, w = x.shape
    modes = w1.shape[2]
    f = torch.fft.rfft2(x)
    out = torch.zeros(n, w1.shape[1], h, w // 2 + 1, dtype=f.dtype, device=x.device)
    out[:, :, :modes, :modes] = torch.einsum("bixy,ioxy->boxy", f[:, :, :modes, :modes], torch.view_as_complex(w1))
    out[:, :, -modes:, :modes] = torch.einsum("bixy,ioxy->boxy", f[:, :, -modes:, :modes], torch.view_as_complex(w2))
    return F.gelu(torch.fft.irfft2(out, s=(h, w)) + F.conv2d(x, point))


def mean_field(unary: Tensor, image: Tensor) -> Tensor:
    """Three steps of a convolutional CRF: weights of 5x5 pixels by colours, messages by unfold."""
    n, c, h, w = unary.shape
    near = F.unfold(image, 5, padding=2).view(n, -1, 25, h, w)
    k = torch.exp(-((near - image.unsqueeze(2)) ** 2).sum(1, keepdim=True))
    q = F.softmax(unary, 1)
    for _ in range(3):
        message = (F.unfold(q, 5, padding=2).view(n, c, 25, h, w) * k).sum(2)
        q = F.softmax(unary + message / k.sum(2), 1)
    return q


def _volumes(m: Make, b: int, c: int, d: int, h: int) -> list[Tensor]:
    return [m(b, c, d, h, h), m(b, c // 2, 2 * d, 2 * h - 1, 2 * h), weight(m, 24, c + c // 2, 3, 3, 3)]


def _nerf(m: Make, n: int, d: int) -> list[Tensor]:
    e, v = 63, 27
    widths = [(d, e), (d, d), (d, d), (d, d + e), (d, d), (d, d), (1, d), (d // 2, d + v), (3, d // 2)]
    return [m(n, 3), m(n, 3), *(weight(m, *s) for s in widths)]


def _grid(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [m(b, c, h, w), weight(m, 3 * c, c), m(225, 4), ids(m, 225, 64, 64)]


def _wavenet(m: Make, b: int, c: int, n: int) -> list[Tensor]:
    return [m(b, c, n), m(2 * c, c, 3), weight(m, c, c, 1), m(2 * c, 1, 1).abs() + 0.5, m(c, 17, 5) * 0.1]


def _odd(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [m(b, c, h, w), weight(m, 2 * c, c // 3, 3, 3), weight(m, 2 * c, c // 3, 3, 3), weight(m, 7, c, 4, 4)]


def _points(m: Make, b: int, n: int, c: int) -> list[Tensor]:
    return [m(b, n, 3), m(b, n, c), weight(m, 4 * c, c + 3), weight(m, 8 * c, 4 * c)]


def _operator(m: Make, b: int, c: int, h: int, w: int, k: int) -> list[Tensor]:
    return [m(b, c, h, w), m(c, c, k, k, 2) / c, m(c, c, k, k, 2) / c, weight(m, c, c, 1, 1)]


def _condconv(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [m(b, c, h, w), weight(m, 4, c), m(4, c, c, 3, 3) * (9 * c) ** -0.5]


UP = Sized(volume_up, _volumes, (1, 4, 3, 4))
NERF = Sized(positional_mlp, _nerf, (7, 16), SINGLE, tf32=True)
GRID = Sized(grid_attention, _grid, (2, 8, 4, 6), HALF)
OPERATOR = Sized(fourier_operator, _operator, (2, 3, 9, 10, 3), SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    Sized(resizings, lambda m, b, c, h, w: [image(m, b, c, h, w)], (2, 3, 9, 12), SINGLE).block("resizings", 16, 32, 127, 160),
    Sized(bicubic_loss, lambda m, b, h, w: [m(b, 3, h, w), m(b, 3, 2 * h + 1, 3 * w)], (2, 5, 6), SINGLE).block(
        "bicubic loss", 16, 120, 100, training=True
    ),
    UP.block("volume up", 1, 48, 24, 40, training=True),
    Sized(pools, lambda m, b, c, h, w: [m(b, c, h, w)], (2, 3, 13, 11), SINGLE).block("pools", 64, 256, 33, 35, training=True),
    Sized(unpooled, lambda m, b, c, h, w: [m(b, c, h, w), weight(m, c, c, 3, 3)], (2, 3, 6, 7), HALF).block(
        "unpooled", 16, 64, 112, 113, training=True
    ),
    Sized(
        subpixel,
        lambda m, b, h, w: [m(b, 3, h, w), weight(m, 40, 3, 5, 5), weight(m, 27, 40, 3, 3), m(b, 3, 3 * h, 3 * w)],
        (2, 5, 6),
        SINGLE,
        tf32=True,
    ).block("subpixel loss", 8, 100, 130, training=True),
    Sized(unfold_conv, lambda m, b, c, h, w: [m(b, c, h, w), weight(m, 96, c, 3, 3), m(96)], (2, 3, 6, 7), HALF).block(
        "unfolded convolution", 16, 48, 63, 65, training=True
    ),
    Sized(merged_windows, lambda m, b, c, h, w: [m(b, c, h, w), m(49 * c, 49 * c) / (7 * c**0.5)], (2, 2, 12, 9)).block(
        "merged windows", 16, 12, 96, 97, training=True
    ),
    *Sized(convex_up, lambda m, b, h, w: [m(b, 2, h, w), m(b, 576, h, w)], (1, 4, 5), SINGLE).both("convex up", 4, 55, 96),
    Sized(
        stereo_volume, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w), weight(m, 1, 8, 3, 3, 3)], (1, 16, 4, 26), HALF
    ).block("stereo volume", 2, 80, 64, 120, training=True),
    Sized(census, lambda m, b, h, w: [m(b, h, w), m(b, h, w)], (1, 9, 20), SINGLE).block("census", 4, 375, 620),
    Sized(guided_filter, lambda m, b, h, w: [m(b, 1, h, w), m(b, 3, h, w)], (1, 13, 14), SINGLE).block(
        "guided filter", 4, 480, 641
    ),
    *Sized(bilateral, lambda m, b, h, w: [m(b, 3, h, w)], (1, 8, 9), SINGLE).both("bilateral", 4, 250, 301),
    Sized(corners, lambda m, b, h, w: [m(b, 1, h, w)], (1, 12, 13), SINGLE).block("corners", 16, 480, 639),
    Sized(lab, lambda m, b, h, w: [m(b, h, w, 3)], (1, 5, 6), SINGLE).block("lab colours", 16, 255, 511, training=True),
    Sized(sample_filters, _condconv, (2, 3, 6, 5), HALF).block("filters of each image", 32, 64, 28, 28, training=True),
    Sized(odd_convolutions, _odd, (2, 9, 12, 13), SINGLE, tf32=True).block("odd convolutions", 16, 45, 65, 66, training=True),
    Sized(series_convolutions, _wavenet, (2, 4, 15), SINGLE, tf32=True).block("gated series", 16, 65, 4001, training=True),
    Sized(
        volume_convolutions,
        lambda m, b, c, d, h: [m(b, c, d, h, h), weight(m, 2 * c, c // 2, 3, 3, 3), weight(m, 2 * c, 5, 1, 3, 3)],
        (1, 6, 5, 7),
        HALF,
    ).block("volume convolutions", 2, 18, 20, 62, training=True),
    *GRID.both("grid attention", 16, 64, 48, 56),
    *NERF.both("positional mlp", 65000, 128),
    *Sized(hash_grid, lambda m, n, s, r: [m(n, 3), m(s, r, 2)], (9, 2, 50), SINGLE).both("hash grid", 100000, 8, 1 << 17),
    *Sized(
        triplanes, lambda m, b, c, h, n: [m(b, 3, c, h, h), m(b, n, 3), weight(m, 33, c)], (2, 4, 6, 9), SINGLE, tf32=True
    ).both("triplanes", 4, 32, 128, 40000),
    Sized(inverse_samples, lambda m, r, n, k: [m(r, n + 1), m(r, n), m(r, k)], (4, 6, 5), SINGLE).block(
        "inverse samples", 8192, 63, 128, training=True
    ),
    *Sized(projected_splats, lambda m, n: [m(n, 4), m(n, 3) * 0.3, m(n, 3)], (7,), SINGLE).both("projected splats", 500000),
    Sized(grouped_points, _points, (2, 32, 5), SINGLE, tf32=True).block("grouped points", 8, 2048, 32, training=True),
    Sized(farthest_points, lambda m, b, n: [m(b, n, 3)], (2, 30), SINGLE).block("farthest points", 32, 4000),
    Sized(residual_codes, lambda m, n, k, d: [m(n, d), m(4, k, d)], (9, 7, 5), SINGLE, tf32=True).block(
        "residual codes", 8192, 512, 96, training=True
    ),
    *OPERATOR.both("fourier operator", 16, 32, 85, 128, 12),
    Sized(mean_field, lambda m, b, c, h, w: [m(b, c, h, w), m(b, 3, h, w)], (1, 4, 7, 8), SINGLE).block(
        "mean field", 2, 21, 96, 127
    ),
)
