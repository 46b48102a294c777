"""Blocks of vision: transformers of two streams and of videos, padded windows, wavelets, tokens merged, colour, filters."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, image, weight

HALF, SINGLE = torch.float16, torch.float32


def two_stream_block(
    x: Tensor, text: Tensor, c: Tensor, changes: Tensor, qkv: Tensor, norms: Tensor, outs: Tensor, mlp: Tensor, angle: Tensor
) -> Tensor:
    """Flux: image and text tokens with shifts, scales and gates of their own, one attention over both, turned in pairs."""
    b, _n, d = x.shape
    size = norms.shape[-1]
    made = F.linear(F.silu(c), changes).view(b, 2, 6, 1, d)
    parts = []
    for i, t in enumerate((text, x)):
        y = F.layer_norm(t, (d,)) * (1 + made[:, i, 1]) + made[:, i, 0]
        q, k, v = F.linear(y, qkv[i]).view(b, -1, 3, d // size, size).permute(2, 0, 3, 1, 4)
        parts.append((F.rms_norm(q, (size,), norms[i, 0]), F.rms_norm(k, (size,), norms[i, 1]), v))
    q, k, v = (torch.cat(both, 2) for both in zip(*parts, strict=True))

    def turn(t: Tensor) -> Tensor:
        even, odd = t.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angle.float().cos(), angle.float().sin()
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(t.dtype)

    y = F.scaled_dot_product_attention(turn(q), turn(k), v).transpose(1, 2).flatten(2)
    length = text.shape[1]
    x = x + made[:, 1, 2] * F.linear(y[:, length:], outs[1])
    text = text + made[:, 0, 2] * F.linear(y[:, :length], outs[0])
    y = F.layer_norm(x, (d,)) * (1 + made[:, 1, 4]) + made[:, 1, 3]
    x = x + made[:, 1, 5] * F.linear(F.gelu(F.linear(y, mlp[0]), approximate="tanh"), mlp[1])
    return torch.cat([text, x], 1)


def volume_rotary(qkv: Tensor, norm: Tensor) -> Tensor:
    """Wan: queries and keys normed over all heads, turned by frame, row and column, each with a share of the pairs."""
    b, t, h, w, d = qkv.shape
    d //= 3
    q, k, v = qkv.chunk(3, -1)
    heads, size = d // 32, 32

    def angles() -> Tensor:
        pairs = size // 2
        shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        found = []
        for i, (length, share) in enumerate(zip((t, h, w), shares, strict=True)):
            inverse = 10000.0 ** (-torch.arange(share, device=qkv.device, dtype=torch.float32) / share)
            a = torch.outer(torch.arange(length, device=qkv.device, dtype=torch.float32), inverse)
            shape = [1, 1, 1, share]
            shape[i] = length
            found.append(a.view(shape).expand(t, h, w, share))
        return torch.cat(found, -1)[:, :, :, None]

    angle = angles()

    def turn(x: Tensor, g: Tensor) -> Tensor:
        x = F.rms_norm(x, (d,), g).float().unflatten(-1, (heads, size // 2, 2))
        re, im = x[..., 0], x[..., 1]
        y = torch.stack((re * angle.cos() - im * angle.sin(), re * angle.sin() + im * angle.cos()), -1)
        return y.flatten(-2).to(qkv.dtype).flatten(1, 3).transpose(1, 2)

    v = v.unflatten(-1, (heads, size)).flatten(1, 3).transpose(1, 2)
    y = F.scaled_dot_product_attention(turn(q, norm[0]), turn(k, norm[1]), v)
    return y.transpose(1, 2).reshape(b, t, h, w, d)


def padded_windows(x: Tensor, norm: Tensor, qkv: Tensor, bias: Tensor, out: Tensor) -> Tensor:
    """Swin on any size: padded to windows of 7, shifted by 3, a mask of regions, a table of biases, cut again."""
    b, h, w, d = x.shape
    s, size = 7, 32
    heads = d // size
    y = F.layer_norm(x, (d,), norm)
    y = F.pad(y, (0, 0, 0, -w % s, 0, -h % s)).roll((-3, -3), (1, 2))
    rows, columns = y.shape[1] // s, y.shape[2] // s

    def parts(t: Tensor) -> Tensor:
        return t.view(-1, rows, s, columns, s, t.shape[-1]).transpose(2, 3).reshape(-1, s * s, t.shape[-1])

    def region(n: int) -> Tensor:
        at = torch.arange(n, device=x.device)
        return (at >= n - s).long() + (at >= n - 3).long()

    ids = (3 * region(rows * s)[:, None] + region(columns * s)[None])[None, ..., None]
    which = parts(ids)[..., 0]
    mask = (which[:, :, None] != which[:, None]).to(x.dtype) * -100
    q, k, v = F.linear(parts(y), qkv).view(-1, s * s, 3, heads, size).permute(2, 0, 3, 1, 4)
    at = torch.stack(torch.meshgrid(*[torch.arange(s, device=x.device)] * 2, indexing="ij")).flatten(1)
    apart = at[:, :, None] - at[:, None] + s - 1
    table = bias[(apart[0] * (2 * s - 1) + apart[1])].permute(2, 0, 1)
    scores = (q * size**-0.5) @ k.mT + table
    scores = (scores.view(b, -1, heads, s * s, s * s) + mask[None, :, None]).view_as(scores)
    y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, s * s, d)
    y = F.linear(y, out).view(b, rows, columns, s, s, d).transpose(2, 3).reshape(b, rows * s, columns * s, d)
    return x + y.roll((3, 3), (1, 2))[:, :h, :w]


def wavelet_patches(x: Tensor) -> Tensor:
    """Cosmos: two Haar transforms of a video, the first frame repeated in front, bands stacked as channels."""
    for _ in range(2):
        x = torch.cat([x[:, :, :1], x], 2) if x.shape[2] % 2 else x
        for dim in (2, 3, 4):
            a, b = x.unflatten(dim, (-1, 2)).unbind(dim + 1)
            x = torch.cat([a + b, a - b], 1) * math.sqrt(0.5)
    return x


def folded_shortcut(x: Tensor, w: Tensor) -> Tensor:
    """DC-AE: a convolution and an unshuffle, beside it the unshuffled input averaged over groups of channels."""
    made = F.pixel_unshuffle(F.conv2d(x, w, padding=1), 2)
    short = F.pixel_unshuffle(x, 2)
    b, _, h, v = short.shape
    return made + short.view(b, made.shape[1], -1, h, v).mean(2)


def merged_tokens(x: Tensor, keys: Tensor) -> Tensor:
    """ToMe: the most like pairs of even and odd tokens are joined, sizes counted, the order of the others kept."""
    _b, n, d = x.shape
    k = F.normalize(keys.float(), dim=-1)
    count = n // 8
    best, to = (k[:, ::2] @ k[:, 1::2].mT).max(-1)
    order = best.argsort(-1, descending=True)
    gone, kept = order[:, :count, None], order[:, count:].sort(-1).values[..., None]
    even, odd = x[:, ::2], x[:, 1::2]
    target = to.gather(1, gone[..., 0])[..., None].expand(-1, -1, d)
    joined = odd.scatter_reduce(1, target, even.gather(1, gone.expand(-1, -1, d)), "mean")
    return torch.cat([even.gather(1, kept.expand(-1, -1, d)), joined], 1)


def distributed_borders(x: Tensor, target: Tensor, quality: Tensor) -> Tensor:
    """Borders as expectations of 16 bins a border: generalised IoU, and cross-entropy with the two bins next to the truth."""
    n = len(x)
    logits = x.view(n, 4, 16).float()
    reach = (logits.softmax(-1) * torch.arange(16, device=x.device)).sum(-1)
    truth = target.float().abs().clamp(max=14.9)
    low = truth.long()
    logp = logits.log_softmax(-1)
    near = logp.gather(-1, low[..., None])[..., 0] * (low + 1 - truth) + logp.gather(-1, low[..., None] + 1)[..., 0] * (
        truth - low
    )
    meet = (torch.minimum(reach, truth)[:, :2] + torch.minimum(reach, truth)[:, 2:]).prod(-1)
    hull = (torch.maximum(reach, truth)[:, :2] + torch.maximum(reach, truth)[:, 2:]).prod(-1)
    area = (reach[:, :2] + reach[:, 2:]).prod(-1) + (truth[:, :2] + truth[:, 2:]).prod(-1) - meet
    w = quality.float().sigmoid()
    iou = meet / (area + 1e-7)
    giou = iou - (hull - area) / (hull + 1e-7)
    focal = F.binary_cross_entropy_with_logits(quality.float(), iou.detach(), reduction="none") * (iou.detach() - w).abs()
    return ((1 - giou) * w + 0.25 * -near.mean(-1) + focal).sum() / n


def turned_rectangles(a: Tensor, b: Tensor) -> Tensor:
    """Rotated rectangles as normal distributions: Wasserstein distance of the two and the overlap of a Kalman filter."""

    def spread(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        size, turn = t[:, 2:4].exp() / 2, t[:, 4]
        c, s = turn.cos(), turn.sin()
        r = torch.stack([c, -s, s, c], -1).view(-1, 2, 2)
        return t[:, :2], r @ torch.diag_embed(size**2) @ r.mT, size

    (ma, ca, sa), (mb, cb, sb) = spread(a), spread(b)
    far = (ma - mb).square().sum(-1)
    root = 2 * (torch.det(ca) * torch.det(cb)).clamp(min=1e-7).sqrt()
    cross = ((ca @ cb).diagonal(dim1=-2, dim2=-1).sum(-1) + root).clamp(min=1e-7).sqrt()
    gap = ca.diagonal(dim1=-2, dim2=-1).sum(-1) + cb.diagonal(dim1=-2, dim2=-1).sum(-1) - 2 * cross
    both = ca + cb
    inverse = torch.stack([both[:, 1, 1], -both[:, 0, 1], -both[:, 1, 0], both[:, 0, 0]], -1).view(-1, 2, 2)
    kept = ca - ca @ (inverse / torch.det(both)[:, None, None]) @ ca
    overlap = 4 * torch.det(kept).clamp(min=1e-7).sqrt()
    iou = overlap / (4 * sa.prod(-1) + 4 * sb.prod(-1) - overlap)
    return (1 - 1 / (2 + torch.log1p(far + gap.clamp(min=0))) - iou).mean()


def panoptic(masks: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Masks weighted by their class's score, the best of each pixel, those that keep too little of their area dropped."""
    score, label = classes.float().softmax(-1).max(-1)
    p = masks.float().sigmoid()
    owner = (score[..., None, None] * p).argmax(1)
    mine = owner[:, None] == torch.arange(masks.shape[1], device=masks.device)[:, None, None]
    mostly, whole = (mine & (p >= 0.5)).sum((2, 3)), (p >= 0.5).sum((2, 3))
    valid = (mostly > 0) & (mostly > 0.2 * whole) & (label < classes.shape[-1] - 1)
    number = torch.where(valid, valid.cumsum(1), 0)
    return number.gather(1, owner.flatten(1)).view_as(owner), mostly


def grid_colours(guide: Tensor, x: Tensor, grid: Tensor) -> Tensor:
    """HDRNet: affine colour changes from a grid of brightness and place, sliced by a guide, applied to each pixel."""
    b, _, h, w = x.shape
    rows, columns = (torch.linspace(-1, 1, n, device=x.device, dtype=x.dtype) for n in (h, w))
    at = torch.stack([columns.expand(b, h, w), rows[:, None].expand(b, h, w), torch.tanh(guide)], -1)[:, None]
    a = F.grid_sample(grid, at, align_corners=True, padding_mode="border")[:, :, 0].view(b, 3, 4, h, w)
    return (a[:, :, :3] * x[:, None]).sum(2) + a[:, :, 3]


def median_of_nine(x: Tensor) -> Tensor:
    """Each channel's median of three by three pixels, by sorting, and what is far from it replaced."""
    b, c, h, w = x.shape
    near = F.pad(x, (1, 1, 1, 1), mode="replicate").unfold(2, 3, 1).unfold(3, 3, 1).reshape(b, c, h, w, 9)
    middle = near.sort(-1).values[..., 4]
    spread = (near - middle[..., None]).abs().median(-1).values
    return torch.where((x - middle).abs() > 2 * spread, middle, x)


def sharpened(x: Tensor, kernel: Tensor) -> Tensor:
    """Richardson and Lucy: five rounds of blurred estimates, ratios, and ratios blurred back."""
    k = kernel.softmax(0)
    w = torch.outer(k, k)[None, None].expand(x.shape[1], 1, -1, -1)
    seen, y = x.abs() + 0.1, torch.full_like(x, 0.5)
    pad = len(kernel) // 2
    for _ in range(5):
        blurred = F.conv2d(y, w, padding=pad, groups=x.shape[1])
        y = y * F.conv2d(seen / (blurred + 1e-3), w.flip(2, 3), padding=pad, groups=x.shape[1])
    return y


def mosaic(raw: Tensor, gains: Tensor, matrix: Tensor) -> Tensor:
    """A camera's pixels of one colour each: black level, gains by phase in place, colours filled in, a matrix, a curve."""
    raw = ((raw.abs() - 0.06) / 0.94).clamp(0, 4)
    raw[:, ::2, ::2] *= gains[0]
    raw[:, 1::2, 1::2] *= gains[1]
    red, green, blue = torch.zeros_like(raw), torch.zeros_like(raw), torch.zeros_like(raw)
    red[:, ::2, ::2] = raw[:, ::2, ::2]
    green[:, ::2, 1::2] = raw[:, ::2, 1::2]
    green[:, 1::2, ::2] = raw[:, 1::2, ::2]
    blue[:, 1::2, 1::2] = raw[:, 1::2, 1::2]
    p = F.pad(torch.stack([red, green, blue], 1), (1, 1, 1, 1), mode="reflect")
    cross = (p[:, :, :-2, 1:-1] + p[:, :, 2:, 1:-1] + p[:, :, 1:-1, :-2] + p[:, :, 1:-1, 2:]) / 4
    corner = (p[:, :, :-2, :-2] + p[:, :, 2:, :-2] + p[:, :, :-2, 2:] + p[:, :, 2:, 2:]) / 4
    own = p[:, :, 1:-1, 1:-1]
    full = torch.stack(
        [own[:, 0] + 2 * cross[:, 0] + corner[:, 0], own[:, 1] + cross[:, 1], own[:, 2] + 2 * cross[:, 2] + corner[:, 2]], 1
    )
    y = torch.einsum("ij,bjhw->bihw", matrix.softmax(-1), full).clamp(min=0)
    return torch.where(y > 0.0031308, 1.055 * y.clamp(min=1e-4) ** (1 / 2.4) - 0.055, 12.92 * y)


def colour_difference(a: Tensor, b: Tensor) -> Tensor:
    """CIEDE2000 of two images in Lab, as a loss: hue angles, weights of lightness, chroma and hue, a rotation of blues."""
    (l1, a1, b1), (l2, a2, b2) = ((t.float() * 30 + 5).unbind(1) for t in (a, b))
    c = ((a1**2 + b1**2 + 1e-6).sqrt() + (a2**2 + b2**2 + 1e-6).sqrt()) / 2
    g = 1.5 - 0.5 * (c**7 / (c**7 + 25.0**7)).sqrt()
    a1, a2 = a1 * g, a2 * g
    c1, c2 = (a1**2 + b1**2 + 1e-6).sqrt(), (a2**2 + b2**2 + 1e-6).sqrt()
    h1, h2 = torch.atan2(b1, a1), torch.atan2(b2, a2)
    turn = h2 - h1
    turn = torch.where(turn > math.pi, turn - 2 * math.pi, torch.where(turn < -math.pi, turn + 2 * math.pi, turn))
    hue = 2 * (c1 * c2).sqrt() * torch.sin(turn / 2)
    light, chroma, mean = (l1 + l2) / 2, (c1 + c2) / 2, h1 + turn / 2
    t = 1 - 0.17 * torch.cos(mean - 0.52) + 0.24 * torch.cos(2 * mean) + 0.32 * torch.cos(3 * mean + 0.1)
    sl = 1 + 0.015 * (light - 50) ** 2 / (20 + (light - 50) ** 2).sqrt()
    sc, sh = 1 + 0.045 * chroma, 1 + 0.015 * chroma * t
    blue = -torch.sin(1.05 * torch.exp(-(((mean * 57.3 - 275) / 25) ** 2))) * 2 * (chroma**7 / (chroma**7 + 25.0**7)).sqrt()
    dl, dc, dh = (l2 - l1) / sl, (c2 - c1) / sc, hue / sh
    return (dl**2 + dc**2 + dh**2 + blue * dc * dh).clamp(min=1e-6).sqrt().mean()


def flow_along_edges(x: Tensor) -> Tensor:
    """Perona and Malik: four differences, conductances of each, six steps with edges repeated."""
    for _ in range(6):
        p = F.pad(x, (1, 1, 1, 1), mode="replicate")
        near = torch.stack([p[..., :-2, 1:-1], p[..., 2:, 1:-1], p[..., 1:-1, :-2], p[..., 1:-1, 2:]])
        change = near - x
        x = x + 0.2 * (torch.exp(-((change / 0.5) ** 2)) * change).sum(0)
    return x


def causal_volumes(x: Tensor, g: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """A video autoencoder's block: channels normed at each place, SiLU, a convolution that sees earlier frames alone."""
    y = F.normalize(x, dim=1) * x.shape[1] ** 0.5 * g[:, None, None, None] + bias[:, None, None, None]
    y = F.silu(y)
    y = torch.cat([y[:, :, :1].expand(-1, -1, 2, -1, -1), y], 2)
    return x + F.conv3d(F.pad(y, (1, 1, 1, 1)), w)


def _flux(m: Make, b: int, n: int, t: int, d: int, s: int) -> list[Tensor]:
    weights = [weight(m, 12 * d, d) * 0.3, weight(m, 2, 3 * d, d), 1 + 0.1 * m(2, 2, s), weight(m, 2, d, d)]
    square = weight(m, 2, d, d)
    return [m(b, n, d), m(b, t, d), m(b, d), *weights, square, m(n + t, s // 2)]


FLUX = Sized(two_stream_block, _flux, (2, 5, 3, 16, 8))
ROTARY = Sized(volume_rotary, lambda m, b, t, h, w, d: [m(b, t, h, w, 3 * d), 1 + 0.1 * m(2, d)], (1, 2, 3, 4, 64))
PADDED = Sized(
    padded_windows,
    lambda m, b, h, w, d: [m(b, h, w, d), m(d), weight(m, 3 * d, d), m(169, d // 32), weight(m, d, d)],
    (2, 9, 12, 64),
)
HAAR = Sized(wavelet_patches, lambda m, b, c, t, h, w: [m(b, c, t, h, w)], (1, 2, 5, 8, 12), HALF)
MERGED = Sized(merged_tokens, lambda m, b, n, d: [m(b, n, d), m(b, n, d)], (2, 16, 8), tf32=True)
GRID = Sized(grid_colours, lambda m, b, h, w: [m(b, h, w), m(b, 3, h, w), m(b, 12, 8, 16, 16) * 0.1], (1, 7, 9), SINGLE)
EDGES = Sized(flow_along_edges, lambda m, b, h, w: [m(b, 1, h, w)], (2, 9, 11), SINGLE)

BLOCKS: tuple[Block, ...] = (
    *FLUX.both("two stream block", 2, 1024, 256, 1536, 64),
    *ROTARY.both("volume rotary", 1, 5, 30, 52, 1536),
    *PADDED.both("padded windows", 8, 57, 100, 192),
    HAAR.block("wavelet patches", 1, 3, 49, 480, 832),
    HAAR.block("wavelet patches", 1, 3, 25, 256, 448, training=True),
    Sized(folded_shortcut, lambda m, b, c, n: [image(m, b, c, n, n), weight(m, c // 2, c, 3, 3)], (2, 4, 6)).block(
        "folded shortcut", 8, 128, 128, training=True
    ),
    *MERGED.both("merged tokens", 32, 1024, 384),
    Sized(distributed_borders, lambda m, n: [m(n, 64), m(n, 4) * 6, m(n)], (7,), SINGLE).block(
        "distributed borders", 134400, training=True
    ),
    Sized(turned_rectangles, lambda m, n: [m(n, 5), m(n, 5)], (7,), SINGLE).block("turned rectangles", 200003, training=True),
    Sized(panoptic, lambda m, b, q, h, w, c: [m(b, q, h, w), m(b, q, c) * 2], (2, 5, 6, 7, 4)).block(
        "panoptic", 2, 100, 256, 320, 134
    ),
    *GRID.both("grid colours", 2, 720, 1280),
    Sized(median_of_nine, lambda m, b, h, w: [m(b, 3, h, w)], (2, 5, 6), SINGLE).block("median of nine", 8, 480, 641),
    Sized(sharpened, lambda m, b, h, w: [m(b, 3, h, w), m(9)], (1, 11, 12), SINGLE).block("sharpened", 4, 512, 510),
    Sized(mosaic, lambda m, b, h, w: [m(b, h, w), m(2).exp(), m(3, 3)], (2, 6, 8), SINGLE).block("mosaic", 4, 1080, 1920),
    Sized(colour_difference, lambda m, b, n: [m(b, 3, n, n), m(b, 3, n, n)], (2, 5), SINGLE).block(
        "colour difference", 8, 512, training=True
    ),
    *EDGES.both("flow along edges", 8, 511, 640),
    Sized(
        causal_volumes,
        lambda m, b, c, t, h: [m(b, c, t, h, h), 1 + 0.1 * m(c), m(c), weight(m, c, c, 3, 3, 3)],
        (1, 3, 3, 5),
    ).block("causal volumes", 1, 96, 9, 64, training=True),
)
