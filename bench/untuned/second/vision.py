"""Blocks of image, video and audio models: convolutions of every kind, pools, norms by hand, losses of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

HALF, SINGLE = torch.float16, torch.float32


def dilated_pyramid(x: Tensor, w1: Tensor, w6: Tensor, w12: Tensor, wp: Tensor, out: Tensor) -> Tensor:
    """Atrous spatial pyramid pooling."""
    pooled = F.interpolate(
        F.relu(F.conv2d(F.adaptive_avg_pool2d(x, 1), wp)), size=x.shape[2:], mode="bilinear", align_corners=False
    )
    branches = [F.conv2d(x, w1), F.conv2d(x, w6, padding=6, dilation=6), F.conv2d(x, w12, padding=12, dilation=12)]
    return F.conv2d(torch.cat([*(F.relu(b) for b in branches), pooled], 1), out)


def asymmetric(x: Tensor, w1: Tensor, w2: Tensor, wp: Tensor) -> Tensor:
    """A mixed block: 1x7 and 7x1, beside a pool and a 1x1 convolution."""
    y = F.relu(F.conv2d(F.relu(F.conv2d(x, w1, padding=(0, 3))), w2, padding=(3, 0)))
    return torch.cat([y, F.relu(F.conv2d(F.avg_pool2d(x, 3, 1, 1), wp)), F.max_pool2d(x, 3, 1, 1)], 1)


def temporal_layer(x: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """A causal dilated convolution with weight norm, and the residual (a TCN)."""
    w = g * v / v.norm(2, dim=(1, 2), keepdim=True)
    y = F.conv1d(x, w, b, padding=8, dilation=4)[:, :, :-8]
    return F.relu(x + F.relu(y))


def volume_layer(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    return F.leaky_relu(F.instance_norm(F.conv3d(x, w, padding=1), weight=norm[0], bias=norm[1]), 0.01)


def unet_up(x: Tensor, skip: Tensor, up: Tensor, b: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    y = torch.cat([skip, F.conv_transpose2d(x, up, b, stride=2)], dim=1)
    return F.relu(F.batch_norm(F.conv2d(y, w, padding=1), None, None, norm[0], norm[1], training=True))


def spectral_up(x: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Nearest upsampling and a convolution with spectral norm, one power iteration."""
    flat = w.flatten(1)
    v = F.normalize(flat.detach().t() @ u.detach(), dim=0)
    u = F.normalize(flat.detach() @ v, dim=0)
    sigma = torch.dot(u, flat @ v)
    return F.leaky_relu(F.conv2d(F.interpolate(x, scale_factor=2), w / sigma, b, padding=1), 0.2)


def resnet_d_shortcut(x: Tensor, y: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    s = F.conv2d(F.avg_pool2d(x, 2, 2, ceil_mode=True, count_include_pad=False), w)
    return F.relu(y + F.batch_norm(s, norm[0], norm[1].abs() + 0.5, norm[2], norm[3]))


def pyramid_pool(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, w6: Tensor) -> Tensor:
    found = [x]
    for size, w in ((1, w1), (2, w2), (3, w3), (6, w6)):
        y = F.relu(F.conv2d(F.adaptive_avg_pool2d(x, size), w))
        found.append(F.interpolate(y, x.shape[2:], mode="bilinear", align_corners=True))
    return torch.cat(found, 1)


def mobile_v3(x: Tensor, deep: Tensor, s1: Tensor, s2: Tensor, out: Tensor) -> Tensor:
    y = F.hardswish(F.conv2d(x, deep, stride=2, padding=2, groups=x.shape[1]))
    s = F.hardsigmoid(F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), s1)), s2))
    return F.conv2d(y * s, out)


def blur_pool(x: Tensor) -> Tensor:
    a = torch.tensor([1.0, 3.0, 3.0, 1.0], device=x.device, dtype=x.dtype)
    f = (a[:, None] * a[None]) / 64
    return F.conv2d(F.pad(x, (1, 2, 1, 2), mode="reflect"), f.expand(x.shape[1], 1, 4, 4), stride=2, groups=x.shape[1])


def standard_weights(x: Tensor, w: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Weight standardisation, a group norm by hand (5 groups)."""
    w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
    y = F.conv2d(x, w, padding=1)
    n, c, h, s = y.shape
    y = y.view(n, 5, -1)
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    return F.silu(y.view(n, c, h, s) * g.view(1, -1, 1, 1) + b.view(1, -1, 1, 1))


def adain(content: Tensor, style: Tensor) -> Tensor:
    def stats(x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(*x.shape[:2], -1)
        return flat.mean(2).view(*x.shape[:2], 1, 1), (flat.var(2) + 1e-5).sqrt().view(*x.shape[:2], 1, 1)

    (cm, cs), (sm, ss) = stats(content), stats(style)
    return (content - cm.expand_as(content)) / cs.expand_as(content) * ss.expand_as(content) + sm.expand_as(content)


def response_norm(x: Tensor, norm: Tensor, w1: Tensor, b1: Tensor, gamma: Tensor, beta: Tensor, w2: Tensor) -> Tensor:
    """ConvNeXt V2's layer after its depthwise convolution, with a channels-first layer norm."""
    u = x.mean(1, keepdim=True)
    y = (x - u) / torch.sqrt((x - u).pow(2).mean(1, keepdim=True) + 1e-6)
    y = norm[0][:, None, None] * y + norm[1][:, None, None]
    y = F.gelu(F.linear(y.permute(0, 2, 3, 1), w1, b1))
    g = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
    y = gamma * (y * (g / (g.mean(-1, keepdim=True) + 1e-6))) + beta + y
    return x + F.linear(y, w2).permute(0, 3, 1, 2)


def cbam(x: Tensor, w1: Tensor, w2: Tensor, w7: Tensor) -> Tensor:
    def mlp(y: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(y, w1)), w2)

    x = x * torch.sigmoid(mlp(F.adaptive_avg_pool2d(x, 1)) + mlp(F.adaptive_max_pool2d(x, 1)))
    s = torch.cat([torch.mean(x, 1, keepdim=True), torch.max(x, 1, keepdim=True)[0]], 1)
    return x * torch.sigmoid(F.conv2d(s, w7, padding=3))


def coordinate_attention(x: Tensor, w: Tensor, wh: Tensor, ww: Tensor) -> Tensor:
    h, s = x.shape[2:]
    y = torch.cat([x.mean(3, keepdim=True), x.mean(2, keepdim=True).permute(0, 1, 3, 2)], 2)
    a, b = torch.split(F.hardswish(F.conv2d(y, w)), [h, s], dim=2)
    return x * F.conv2d(a, wh).sigmoid() * F.conv2d(b.permute(0, 1, 3, 2), ww).sigmoid()


def ssim_loss(a: Tensor, b: Tensor) -> Tensor:
    c = a.shape[1]
    g = torch.exp(-((torch.arange(11, device=a.device, dtype=a.dtype) - 5) ** 2) / 4.5)
    g = g / g.sum()
    window = (g[:, None] * g[None]).expand(c, 1, 11, 11).contiguous()

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(x, window, padding=5, groups=c)

    ma, mb = blur(a), blur(b)
    va, vb, ab = blur(a * a) - ma**2, blur(b * b) - mb**2, blur(a * b) - ma * mb
    s = ((2 * ma * mb + 1e-4) * (2 * ab + 9e-4)) / ((ma**2 + mb**2 + 1e-4) * (va + vb + 9e-4))
    return 1 - s.mean()


def restoration_loss(a: Tensor, b: Tensor) -> Tensor:
    """Charbonnier and total variation."""
    tv = (a[:, :, 1:] - a[:, :, :-1]).abs().mean() + (a[..., 1:] - a[..., :-1]).abs().mean()
    return torch.sqrt((a - b) ** 2 + 1e-6).mean() + 0.1 * tv


def gram_loss(x: Tensor, y: Tensor) -> Tensor:
    def gram(t: Tensor) -> Tensor:
        f = t.reshape(t.shape[0], t.shape[1], -1)
        return torch.bmm(f, f.transpose(1, 2)) / f.shape[2]

    return F.mse_loss(gram(x), gram(y))


def yolo_decode(p: Tensor) -> Tensor:
    """One level of a detector: (images, 3 anchors, 85, h, w) to rectangles by corners and scores."""
    n, _a, c, h, w = p.shape
    p = p.permute(0, 1, 3, 4, 2).contiguous().sigmoid()
    ys, xs = torch.meshgrid(torch.arange(h, device=p.device), torch.arange(w, device=p.device), indexing="ij")
    grid = torch.stack((xs, ys), 2).view(1, 1, h, w, 2).to(p.dtype)
    centre, size = (p[..., 0:2] * 2 - 0.5 + grid) * 8, (p[..., 2:4] * 2) ** 2 * 16
    rectangles = torch.cat((centre - size / 2, centre + size / 2), -1)
    return torch.cat((rectangles, p[..., 4:5], p[..., 5:] * p[..., 4:5]), -1).view(n, -1, c)


def ciou_loss(a: Tensor, b: Tensor) -> Tensor:
    """Complete IoU of rectangles by centre and size."""
    aw, bw = a[:, 2:].exp(), b[:, 2:].exp()
    a1, a2, b1, b2 = a[:, :2] - aw / 2, a[:, :2] + aw / 2, b[:, :2] - bw / 2, b[:, :2] + bw / 2
    inside = (torch.min(a2, b2) - torch.max(a1, b1)).clamp(min=0).prod(1)
    union = aw.prod(1) + bw.prod(1) - inside
    iou = inside / (union + 1e-7)
    hull = torch.max(a2, b2) - torch.min(a1, b1)
    far = (hull**2).sum(1) + 1e-7
    rho = ((a[:, :2] - b[:, :2]) ** 2).sum(1)
    v = 0.405284735 * (torch.atan(bw[:, 0] / bw[:, 1]) - torch.atan(aw[:, 0] / aw[:, 1])) ** 2
    alpha = v / (v - iou + 1 + 1e-7)
    return (1 - iou + rho / far + alpha.detach() * v).mean()


def spatial_transformer(x: Tensor, theta: Tensor) -> Tensor:
    grid = F.affine_grid(theta.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def bilinear_by_hand(x: Tensor, at: Tensor) -> Tensor:
    """Features at (images, points, 2) positions by four gathers."""
    n, c, h, w = x.shape
    px, py = at[..., 0].sigmoid() * (w - 1), at[..., 1].sigmoid() * (h - 1)
    x0, y0 = px.floor().long(), py.floor().long()
    x1, y1 = (x0 + 1).clamp(max=w - 1), (y0 + 1).clamp(max=h - 1)
    fx, fy = (px - x0)[:, None], (py - y0)[:, None]
    flat = x.reshape(n, c, -1)

    def read(i: Tensor, j: Tensor) -> Tensor:
        return torch.gather(flat, 2, (j * w + i)[:, None].expand(-1, c, -1))

    top = read(x0, y0) * (1 - fx) + read(x1, y0) * fx
    return top * (1 - fy) + (read(x0, y1) * (1 - fx) + read(x1, y1) * fx) * fy


def correlation(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """All pairs of features and a pyramid of pools (RAFT)."""
    n, c, h, w = a.shape
    v = torch.matmul(a.view(n, c, -1).transpose(1, 2), b.view(n, c, -1)).view(n * h * w, 1, h, w) / c**0.5
    half = F.avg_pool2d(v, 2, stride=2)
    return v, half, F.avg_pool2d(half, 2, stride=2)


def involution(x: Tensor, reduce: Tensor, span: Tensor) -> Tensor:
    """A convolution whose filters depend on the place, 4 groups, 3x3."""
    n, c, h, w = x.shape
    kernel = F.conv2d(F.relu(F.conv2d(x, reduce)), span).view(n, 4, 9, h, w).unsqueeze(2)
    return (kernel * F.unfold(x, 3, padding=1).view(n, 4, c // 4, 9, h, w)).sum(3).view(n, c, h, w)


def edges(x: Tensor) -> Tensor:
    """Sobel's magnitude of grey images."""
    f = torch.tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]], device=x.device, dtype=x.dtype)
    grey = 0.299 * x[:, 0:1] + 0.587 * x[:, 1:2] + 0.114 * x[:, 2:3]
    g = F.conv2d(grey, torch.stack([f, f.t()])[:, None], padding=1)
    m = torch.sqrt(g[:, 0] ** 2 + g[:, 1] ** 2 + 1e-6)
    return m / m.amax((1, 2), keepdim=True)


def from_bytes(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Images of bytes, channels last, to normalised ones, channels first, flipped."""
    y = x.permute(0, 3, 1, 2).to(mean.dtype) / 255
    return ((y - mean[:, None, None]) / (std.abs() + 0.5)[:, None, None]).flip(3).contiguous()


def colours(x: Tensor, matrix: Tensor, factor: Tensor) -> Tensor:
    """Hue by a matrix of 3x3, contrast about the mean grey, saturation."""
    y = torch.einsum("nchw,dc->ndhw", x, matrix)
    grey = (y * y.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
    y = grey + (y - grey) * factor[:, None, None, None]
    return (y.mean((1, 2, 3), keepdim=True) * 0.2 + y * 0.8).clamp(0, 1)


def masked_patches(x: Tensor, noise: Tensor, prediction: Tensor) -> Tensor:
    """A masked autoencoder's loss: patches of 16, each normalised, of those that were hidden."""
    n, c, h, w = x.shape
    p = x.reshape(n, c, h // 16, 16, w // 16, 16)
    p = torch.einsum("nchpwq->nhwpqc", p).reshape(n, -1, 256 * c)
    p = (p - p.mean(-1, keepdim=True)) / (p.var(-1, keepdim=True) + 1e-6) ** 0.5
    hidden = (noise > noise.mean(1, keepdim=True)).to(x.dtype)
    return (((prediction - p) ** 2).mean(-1) * hidden).sum() / hidden.sum()


def scalar_quantiser(z: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Finite scalar quantisation with straight-through gradients."""
    y = torch.tanh(F.linear(z, w)) * 3.5 - 0.5
    y = y + (y.round() - y).detach()
    return F.mse_loss(F.linear(y, out), z)


def volume_rendering(sigma: Tensor, rgb: Tensor, depth: Tensor) -> Tensor:
    z = depth.abs().cumsum(-1) * 0.02
    step = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
    alpha = 1.0 - torch.exp(-F.relu(sigma) * step)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    weights = alpha * through
    return torch.cat([(weights[..., None] * rgb.sigmoid()).sum(1), (weights * z).sum(1, keepdim=True)], -1)


def grouped_up(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.elu(F.conv_transpose1d(x, w, b, stride=5, padding=2, output_padding=1, groups=3))


def denoiser(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """A few channels on one large frame."""
    y = F.relu(F.conv2d(x, w1, padding=2))
    y = F.relu(F.conv2d(y, w2, padding=1))
    return x - F.conv2d(y, w3, padding=1)


def shuffled_down(x: Tensor, w: Tensor, b: Tensor, w2: Tensor) -> Tensor:
    y = F.conv2d(F.pixel_unshuffle(x, 2), w, b, padding=1)
    return F.pixel_shuffle(F.conv2d(F.prelu(y, y.new_full((1,), 0.25)), w2, padding=1), 2)


def focal_modulation(x: Tensor, f: Tensor, d3: Tensor, d5: Tensor, h: Tensor, out: Tensor) -> Tensor:
    """Focal modulation (Yang et al. 2022), two levels, (images, h, w, channels)."""
    c = x.shape[-1]
    q, ctx, gates = torch.split(F.linear(x, f).permute(0, 3, 1, 2), (c, c, 3), 1)
    total = torch.zeros_like(ctx)
    for level, w in enumerate((d3, d5)):
        ctx = F.gelu(F.conv2d(ctx, w, padding=w.shape[-1] // 2, groups=c))
        total = total + ctx * gates[:, level : level + 1]
    pooled = F.gelu(ctx.mean(2, keepdim=True).mean(3, keepdim=True))
    total = total + pooled * gates[:, 2:]
    return F.linear((q * F.conv2d(total, h)).permute(0, 2, 3, 1), out)


def mel_frontend(wave: Tensor, cosine: Tensor, sine: Tensor, mel: Tensor) -> Tensor:
    """Frames, a window, a Fourier transform by matmuls, mel bands, logarithm, normalised over time."""
    y = wave[:, 1:] - 0.97 * wave[:, :-1]
    frames = y.unfold(1, 400, 160)
    window = 0.5 - 0.5 * torch.cos(2 * torch.pi * torch.arange(400, device=wave.device) / 399)
    frames = frames * window.to(wave.dtype)
    power = (frames @ cosine) ** 2 + (frames @ sine) ** 2
    bands = (power @ mel.abs()).clamp(min=1e-5).log()
    return (bands - bands.mean(1, keepdim=True)) / (bands.std(1, keepdim=True) + 1e-5)


def dice_bce(logits: Tensor, target: Tensor) -> Tensor:
    y = (target > 0).to(logits.dtype)
    p = torch.sigmoid(logits).flatten(1)
    t = y.flatten(1)
    dice = (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)
    tversky = (p * t).sum(1) / ((p * t).sum(1) + 0.3 * (p * (1 - t)).sum(1) + 0.7 * ((1 - p) * t).sum(1) + 1e-6)
    bce = F.binary_cross_entropy_with_logits(logits, y, pos_weight=logits.new_tensor(3.0))
    return bce + (1 - dice).mean() + (1 - tversky).pow(0.75).mean()


def _deep(m: Make, c: int, k: int) -> Tensor:
    return weight(m, c, 1, k, k)


UNET = Sized(
    unet_up,
    lambda m, n, c, s: [
        m(n, 2 * c, s, s), m(n, c, 2 * s, 2 * s), weight(m, 2 * c, c, 2, 2), m(c), weight(m, c, 2 * c, 3, 3), m(2, c),
    ],
    (1, 3, 4),
    SINGLE,
    tf32=True,
)  # fmt: skip
VOLUME = Sized(
    volume_layer, lambda m, n, i, o, d, s: [m(n, i, d, s, s), weight(m, o, i, 3, 3, 3), m(2, o)], (1, 2, 3, 4, 5), HALF
)
GRN = Sized(
    response_norm,
    lambda m, n, c, s: [m(n, c, s, s), m(2, c), weight(m, 4 * c, c), m(4 * c), m(4 * c), m(4 * c), weight(m, c, 4 * c)],
    (2, 6, 5),
    HALF,
)

BLOCKS: tuple[Block, ...] = (
    Sized(
        dilated_pyramid,
        lambda m, n, c, s: [
            image(m, n, c, s, s),
            weight(m, 64, c, 1, 1),
            weight(m, 64, c, 3, 3),
            weight(m, 64, c, 3, 3),
            weight(m, 64, c, 1, 1),
            weight(m, 21, 256, 1, 1),
        ],
        (1, 4, 15),
        HALF,
    ).block("dilated pyramid", 4, 256, 65),
    Sized(
        asymmetric,
        lambda m, n, c, s: [m(n, c, s, s), weight(m, 17, c, 1, 7), weight(m, 17, 17, 7, 1), weight(m, 5, c, 1, 1)],
        (1, 3, 9),
    ).block("asymmetric convolutions", 32, 17, 61, training=True),
    *Sized(
        temporal_layer, lambda m, n, c, t: [m(n, c, t), weight(m, c, c, 3), m(c, 1, 1), m(c)], (2, 5, 20), SINGLE, tf32=True
    ).both("temporal layer", 32, 150, 1000),
    *VOLUME.both("volume layer", 2, 33, 30, 24, 50),
    UNET.block("u-net up", 4, 64, 73),
    UNET.block("u-net up", 8, 17, 64, training=True),
    Sized(
        spectral_up, lambda m, n, c, s: [m(n, c, s, s), weight(m, c, c, 3, 3), m(c), m(c)], (1, 5, 6), SINGLE, tf32=True
    ).block("spectral norm up", 16, 128, 32, training=True),
    Sized(
        resnet_d_shortcut,
        lambda m, n, c, s: [
            image(m, n, c, s, s),
            image(m, n, 2 * c, (s + 1) // 2, (s + 1) // 2),
            weight(m, 2 * c, c, 1, 1),
            m(4, 2 * c),
        ],
        (1, 4, 7),
        HALF,
    ).block("shortcut with a pool", 32, 192, 45),
    Sized(pyramid_pool, lambda m, n, c, s: [m(n, c, s, s), *(weight(m, c // 4, c, 1, 1) for _ in range(4))], (2, 4, 12)).block(
        "pyramid of pools", 2, 512, 60
    ),
    Sized(
        mobile_v3,
        lambda m, n, c, s: [
            m(n, c, s, s),
            _deep(m, c, 5),
            weight(m, 24, c, 1, 1),
            weight(m, c, 24, 1, 1),
            weight(m, 40, c, 1, 1),
        ],
        (2, 5, 9),
        SINGLE,
    ).block("mobile block", 1, 72, 55),
    Sized(blur_pool, lambda m, n, c, s: [m(n, c, s, s)], (1, 3, 9), HALF).block("blur pool", 16, 65, 127),
    Sized(
        standard_weights, lambda m, n, c, s: [m(n, 30, s, s), weight(m, c, 30, 3, 3), m(c), m(c)], (1, 10, 6), SINGLE, tf32=True
    ).block("standardised weights", 16, 60, 63, training=True),
    Sized(adain, lambda m, n, c, s: [m(n, c, s, s), m(n, c, s, s)], (2, 3, 5)).block("adain", 4, 511, 63),
    *GRN.both("response norm", 32, 120, 27),
    Sized(
        cbam,
        lambda m, n, c, s: [m(n, c, s, s), weight(m, 8, c, 1, 1), weight(m, c, 8, 1, 1), weight(m, 1, 2, 7, 7)],
        (2, 6, 9),
    ).block("cbam", 32, 128, 28, training=True),
    Sized(
        coordinate_attention,
        lambda m, n, c, s: [image(m, n, c, s, s + 1), weight(m, 12, c, 1, 1), weight(m, c, 12, 1, 1), weight(m, c, 12, 1, 1)],
        (2, 6, 5),
        HALF,
    ).block("coordinate attention", 32, 96, 40),
    Sized(ssim_loss, lambda m, n, c, s: [m(n, c, s, s), m(n, c, s, s)], (1, 3, 14), SINGLE).block(
        "ssim", 8, 3, 253, training=True
    ),
    Sized(restoration_loss, lambda m, n, c, s: [m(n, c, s, s), m(n, c, s, s)], (1, 3, 9), SINGLE).block(
        "restoration loss", 8, 3, 511, training=True
    ),
    Sized(gram_loss, lambda m, n, c, s: [m(n, c, s, s), m(n, c, s, s)], (1, 5, 6), SINGLE, tf32=True).block(
        "gram loss", 4, 128, 111, training=True
    ),
    Sized(yolo_decode, lambda m, n, s: [m(n, 3, 85, s, s + 1)], (1, 4), HALF).block("yolo decode", 8, 79),
    Sized(ciou_loss, lambda m, n: [m(n, 4), m(n, 4)], (33,), SINGLE).block("complete iou", 300001, training=True),
    Sized(spatial_transformer, lambda m, n, c, s: [m(n, c, s, s), m(n, 6)], (1, 3, 6), SINGLE).block(
        "spatial transformer", 64, 3, 120
    ),
    Sized(bilinear_by_hand, lambda m, n, c, s, p: [m(n, c, s, s), m(n, p, 2)], (1, 3, 6, 7), SINGLE).block(
        "bilinear by hand", 4, 64, 90, 20000, training=True
    ),
    Sized(correlation, lambda m, n, c, s: [m(n, c, s, s + 2), m(n, c, s, s + 2)], (1, 4, 8), HALF).block(
        "correlation", 1, 256, 56
    ),
    *Sized(
        involution, lambda m, n, c, s: [m(n, c, s, s), weight(m, 16, c, 1, 1), weight(m, 36, 16, 1, 1)], (1, 8, 5), HALF
    ).both("involution", 8, 64, 55),
    Sized(edges, lambda m, n, s: [m(n, 3, s, s)], (2, 9), SINGLE).block("edges", 16, 511),
    Sized(from_bytes, lambda m, n, s: [ids(m, 256, n, s, s, 3).to(torch.uint8), m(3), m(3)], (2, 5), HALF).block(
        "from bytes", 64, 225
    ),
    Sized(colours, lambda m, n, s: [m(n, 3, s, s), m(3, 3), m(n)], (2, 9)).block("colours", 32, 256),
    Sized(
        masked_patches, lambda m, n, s: [m(n, 3, s, s), m(n, (s // 16) ** 2), m(n, (s // 16) ** 2, 768)], (2, 32), SINGLE
    ).block("masked patches", 64, 208, training=True),
    Sized(scalar_quantiser, lambda m, n, d, k: [m(n, d), weight(m, k, d), weight(m, d, k)], (9, 8, 5), HALF).block(
        "scalar quantiser", 30000, 256, 5, training=True
    ),
    *Sized(volume_rendering, lambda m, n, t: [m(n, t), m(n, t, 3), m(n, t)], (5, 9), SINGLE).both(
        "volume rendering", 8191, 192
    ),
    Sized(grouped_up, lambda m, n, c, t: [m(n, c, t), weight(m, c, 16, 9), m(48)], (1, 6, 11), HALF).block(
        "grouped transposed 1d", 16, 96, 2001
    ),
    Sized(
        denoiser,
        lambda m, n, h, w: [m(n, 3, h, w), weight(m, 17, 3, 5, 5), weight(m, 17, 17, 3, 3), weight(m, 3, 17, 3, 3)],
        (1, 8, 9),
        HALF,
    ).block("denoiser", 1, 1080, 1920),
    Sized(
        shuffled_down, lambda m, n, s: [m(n, 3, s, s), weight(m, 40, 12, 3, 3), m(40), weight(m, 12, 40, 3, 3)], (1, 8), HALF
    ).block("pixel unshuffle", 2, 720),
    Sized(
        focal_modulation,
        lambda m, n, s, c: [
            m(n, s, s, c),
            weight(m, 2 * c + 3, c),
            _deep(m, c, 3),
            _deep(m, c, 5),
            weight(m, c, c, 1, 1),
            weight(m, c, c),
        ],
        (1, 6, 8),
    ).block("focal modulation", 16, 56, 96),
    Sized(
        mel_frontend,
        lambda m, n, t: [m(n, t), m(400, 257) * 0.05, m(400, 257) * 0.05, m(257, 40)],
        (2, 1500),
        SINGLE,
        tf32=True,
    ).block("mel frontend", 32, 64000),
    Sized(dice_bce, lambda m, n, s: [m(n, 1, s, s), m(n, 1, s, s)], (2, 9)).block("dice and bce", 16, 500, training=True),
)
