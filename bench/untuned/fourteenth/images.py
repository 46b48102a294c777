"""Layers and steps of images and volumes: other token mixers, contexts, cells, kernels of pixels, inverse problems, cameras."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

SINGLE, HALF = torch.float32, torch.float16


def normed(x: Tensor, g: Tensor) -> Tensor:
    """A batch norm in training."""
    return F.batch_norm(x, None, None, g[0], g[1], training=True)


# ---- mixers of tokens -----------------------------------------------------------------------------------------------------


def soft_split(x: Tensor, n1: Tensor, wqkv: Tensor, wo: Tensor, n2: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """T2T-ViT: overlapping 7x7 patches as tokens, attention of one head of 64, tokens as an image split by 3x3 again."""
    t = F.unfold(x, 7, stride=4, padding=2).transpose(1, 2)
    q, k, v = F.linear(F.layer_norm(t, t.shape[-1:], n1[0], n1[1]), wqkv).chunk(3, -1)
    y = v + F.linear(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0], wo)
    y = y + F.linear(F.gelu(F.linear(F.layer_norm(y, y.shape[-1:], n2[0], n2[1]), up)), down)
    side = math.isqrt(y.shape[1])
    return F.unfold(y.transpose(1, 2).reshape(y.shape[0], -1, side, side), 3, stride=2, padding=1).transpose(1, 2)


def cross_windows(x: Tensor, wqkv: Tensor, dw: Tensor, wo: Tensor) -> Tensor:
    """CSWin: half of the heads in stripes of rows, half in stripes of columns, a depthwise convolution of the values."""
    b, side, _, c = x.shape
    half, d, width = c // 2, 32 if c > 64 else 4, 7 if side % 7 == 0 else 2
    qkv = F.linear(x, wqkv).unflatten(-1, (3, c)).permute(3, 0, 1, 2, 4)
    parts = []
    for k, (h, w) in enumerate(((side, width), (width, side))):
        part = qkv[..., k * half : (k + 1) * half]
        t = part.reshape(3, b, side // h, h, side // w, w, half // d, d).permute(0, 1, 2, 4, 6, 3, 5, 7)
        q, key, v = t.reshape(3, -1, half // d, h * w, d).unbind(0)
        image_of = t[2].permute(0, 1, 2, 3, 6, 4, 5).reshape(-1, half, h, w)
        local = F.conv2d(image_of, dw[k * half : (k + 1) * half], padding=1, groups=half)
        local = local.reshape(-1, half // d, d, h * w).transpose(-2, -1)
        y = (q * d**-0.5 @ key.transpose(-2, -1)).softmax(-1) @ v + local
        y = y.transpose(1, 2).reshape(b, side // h, side // w, h, w, half)
        parts.append(y.permute(0, 1, 3, 2, 4, 5).reshape(b, side, side, half))
    return x + F.linear(torch.cat(parts, -1), wo)


def permutator(x: Tensor, wh: Tensor, ww: Tensor, wc: Tensor, a: Tensor, b: Tensor, wo: Tensor) -> Tensor:
    """Vision permutator: mixing along height, width and channels by segments, weighted by a split attention."""
    n, h, w, c = x.shape
    s = c // h
    th = x.reshape(n, h, w, h, s).permute(0, 3, 2, 1, 4).reshape(n, h, w, h * s)
    th = F.linear(th, wh).reshape(n, h, w, h, s).permute(0, 3, 2, 1, 4).reshape(n, h, w, c)
    tw = x.reshape(n, h, w, w, s).permute(0, 1, 3, 2, 4).reshape(n, h, w, w * s)
    tw = F.linear(tw, ww).reshape(n, h, w, w, s).permute(0, 1, 3, 2, 4).reshape(n, h, w, c)
    tc = F.linear(x, wc)
    p = F.linear(F.gelu(F.linear((th + tw + tc).mean((1, 2)), a)), b).reshape(n, c, 3).permute(2, 0, 1).softmax(0)
    p = p[:, :, None, None]
    return x + F.linear(th * p[0] + tw * p[1] + tc * p[2], wo)


def affine_mlps(x: Tensor, affine: Tensor, mix: Tensor, mix_bias: Tensor, up: Tensor, bu: Tensor, down: Tensor) -> Tensor:
    """ResMLP: two layers of affine maps instead of norms, one linear map over patches, scaled branches."""
    for k in range(2):
        a = affine[k]
        y = torch.addcmul(a[1], a[0], x)
        x = x + a[2] * F.linear(y.transpose(1, 2), mix[k], mix_bias[k]).transpose(1, 2)
        y = torch.addcmul(a[4], a[3], x)
        x = x + a[5] * F.linear(F.gelu(F.linear(y, up[k], bu[k])), down[k])
    return x


def predicted_patches(x: Tensor, target: Tensor, seen: Tensor, wanted: Tensor, mask: Tensor, at: Tensor, *w: Tensor) -> Tensor:
    """I-JEPA: context patches gathered, placeholders with positions appended, one layer, a smooth loss on normed targets."""
    norms, narrow, wqkv, wo, up, down, wide = w
    b, _, d = x.shape
    context = x.gather(1, seen[..., None].expand(-1, -1, d))
    e = narrow.shape[0]
    pos = at.expand(b, -1, -1)
    t = F.linear(context, narrow) + pos.gather(1, seen[..., None].expand(-1, -1, e))
    queries = mask + pos.gather(1, wanted[..., None].expand(-1, -1, e))
    t = torch.cat([t, queries], 1)
    y = F.layer_norm(t, (e,), norms[0], norms[1], 1e-6)
    q, k, v = F.linear(y, wqkv).reshape(b, -1, 3, e // 32, 32).permute(2, 0, 3, 1, 4)
    t = t + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, e), wo)
    t = t + F.linear(F.gelu(F.linear(F.layer_norm(t, (e,), norms[2], norms[3], 1e-6), up)), down)
    guess = F.linear(t[:, seen.shape[1] :], wide)
    true = F.layer_norm(target, (d,)).gather(1, wanted[..., None].expand(-1, -1, d))
    return F.smooth_l1_loss(guess, true.detach())


# ---- contexts of maps -----------------------------------------------------------------------------------------------------


def global_context(x: Tensor, key: Tensor, down: Tensor, norm: Tensor, up: Tensor) -> Tensor:
    """GCNet: one softmax over all pixels pools a context, a bottleneck with a norm, added to each pixel."""
    b, c, h, w = x.shape
    p = F.conv2d(x, key).view(b, 1, h * w).softmax(2)
    context = torch.matmul(x.view(b, c, h * w), p.transpose(1, 2)).unsqueeze(-1)
    y = F.relu(F.layer_norm(F.conv2d(context, down), (down.shape[0], 1, 1), norm[0][:, None, None], norm[1][:, None, None]))
    return x + F.conv2d(y, up)


def double_attention(x: Tensor, a: Tensor, b: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """A2-Net: descriptors gathered by softmax over pixels, handed to pixels by softmax over descriptors."""
    n, _, h, w = x.shape
    feats, maps, vectors = (F.conv2d(x, t).flatten(2) for t in (a, b, v))
    descriptors = torch.bmm(feats, maps.softmax(-1).mT)
    y = descriptors.matmul(vectors.softmax(1))
    return x + F.conv2d(y.view(n, -1, h, w), out)


def criss_cross(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, gamma: Tensor) -> Tensor:
    """CCNet: each pixel attends to its row and its column under one softmax, twice with the same weights."""
    h, _w = x.shape[2:]
    own = torch.eye(h, dtype=torch.bool, device=x.device)[:, None]
    for _ in range(2):
        q, k, v = F.conv2d(x, wq), F.conv2d(x, wk), F.conv2d(x, wv)
        column = torch.einsum("bchw,bcgw->bhwg", q, k).masked_fill(own, -math.inf)
        row = torch.einsum("bchw,bchu->bhwu", q, k)
        p = torch.cat([column, row], -1).softmax(-1)
        y = torch.einsum("bhwg,bcgw->bchw", p[..., :h], v) + torch.einsum("bhwu,bchu->bchw", p[..., h:], v)
        x = gamma * y + x
    return x


def expected_bases(x: Tensor, bases: Tensor, first: Tensor, last: Tensor, g: Tensor) -> Tensor:
    """EMANet: three rounds of responsibilities and normalised bases without gradients, the map made from the bases."""
    b, c, h, w = x.shape
    y = F.conv2d(x, first)
    flat = y.view(b, c, h * w)
    mu = bases.expand(b, -1, -1)
    with torch.no_grad():
        for _ in range(3):
            z = torch.bmm(flat.mT, mu).softmax(2)
            z_ = z / (1e-6 + z.sum(1, keepdim=True))
            mu = F.normalize(torch.bmm(flat, z_), dim=1)
    z = torch.bmm(flat.mT, mu).softmax(2)
    made = F.relu(mu.matmul(z.mT).view(b, c, h, w))
    return F.relu(normed(F.conv2d(made, last), g) + x)


def object_context(x: Tensor, logits: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, g: Tensor) -> Tensor:
    """OCR: regions of classes as soft means of pixels, attention of pixels to regions, both joined and normed."""
    b, _c, h, w = x.shape
    regions = torch.matmul(logits.flatten(2).softmax(2), x.flatten(2).transpose(1, 2)).transpose(1, 2)[..., None]
    q = F.conv2d(x, wq).flatten(2).transpose(1, 2)
    k, v = F.conv2d(regions, wk).flatten(2), F.conv2d(regions, wv).flatten(2)
    p = (q @ k * wq.shape[0] ** -0.5).softmax(-1)
    y = (p @ v.transpose(1, 2)).transpose(1, 2).reshape(b, -1, h, w)
    return F.relu(normed(F.conv2d(torch.cat([y, x], 1), wo), g))


def corner_pooling(x: Tensor, a: Tensor, b: Tensor, g: Tensor, merge: Tensor) -> Tensor:
    """CornerNet: maxima of all below and of all to the right, by flips and running maxima; joined with a shortcut."""
    top = F.relu(normed(F.conv2d(x, a, padding=1), g[:, 0])).flip(2).cummax(2).values.flip(2)
    left = F.relu(normed(F.conv2d(x, b, padding=1), g[:, 1])).flip(3).cummax(3).values.flip(3)
    return F.relu(normed(F.conv2d(top + left, merge, padding=1), g[:, 2]) + x)


def proposals_interact(p: Tensor, roi: Tensor, dynamic: Tensor, n1: Tensor, n2: Tensor, n3: Tensor, out: Tensor) -> Tensor:
    """Sparse R-CNN: each proposal makes two small matrices that its own 7x7 features go through."""
    d, c = roi.shape[-1], n1.shape[1]
    first, second = F.linear(p, dynamic).split(d * c, -1)
    y = torch.bmm(roi, first.view(-1, d, c))
    y = F.relu(F.layer_norm(y, (c,), n1[0], n1[1]))
    y = torch.bmm(y, second.view(-1, c, d))
    y = F.relu(F.layer_norm(y, (d,), n2[0], n2[1]))
    y = F.relu(F.layer_norm(F.linear(y.flatten(1), out), (d,), n3[0], n3[1]))
    return F.layer_norm(p + y, (d,), n2[0], n3[0])


# ---- cells, residual groups, generators -----------------------------------------------------------------------------------


def spatiotemporal_cell(frames: Tensor, h: Tensor, c: Tensor, m: Tensor, *w: Tensor) -> Tensor:
    """PredRNN: two steps of a cell with a memory of time and one of space, gates by 5x5 convolutions."""
    wx, wh, wm, wo, mix = w
    for t in range(2):
        i, f, g, im, fm, gm, o = F.conv2d(frames[t], wx, padding=2).chunk(7, 1)
        ih, fh, gh, oh = F.conv2d(h, wh, padding=2).chunk(4, 1)
        i2, f2, g2 = F.conv2d(m, wm, padding=2).chunk(3, 1)
        c = torch.sigmoid(f + fh + 1.0) * c + torch.sigmoid(i + ih) * torch.tanh(g + gh)
        m = torch.sigmoid(fm + f2 + 1.0) * m + torch.sigmoid(im + i2) * torch.tanh(gm + g2)
        memory = torch.cat([c, m], 1)
        h = torch.sigmoid(o + oh + F.conv2d(memory, wo, padding=2)) * torch.tanh(F.conv2d(memory, mix))
    return h


def residual_group(x: Tensor, *w: Tensor) -> Tensor:
    """RCAN: two blocks of two convolutions and channel weights, a convolution and a long shortcut."""
    y = x
    for k in range(0, 8, 4):
        a, b, down, up = w[k : k + 4]
        z = F.conv2d(F.relu(F.conv2d(y, a, padding=1)), b, padding=1)
        y = y + z * torch.sigmoid(F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(z, 1), down)), up))
    return x + F.conv2d(y, w[8], padding=1)


def conditional_block(x: Tensor, z: Tensor, gain: Tensor, shift: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Tensor:
    """BigGAN: batch norms whose gains and shifts come from a class and noise, doubled in size between, spectral scales."""

    def scaled(w: Tensor) -> Tensor:
        flat = w.flatten(1)
        u = F.normalize(flat.detach().sum(1), dim=0)
        v = F.normalize(flat.detach().t() @ u, dim=0)
        u = F.normalize(flat.detach() @ v, dim=0)
        return w / torch.dot(u, flat @ v)

    def conditioned(x: Tensor, k: int) -> Tensor:
        g, h = F.linear(z, gain[k])[:, : x.shape[1]], F.linear(z, shift[k])[:, : x.shape[1]]
        return F.relu(torch.addcmul(h[:, :, None, None], F.batch_norm(x, None, None, training=True), 1 + g[:, :, None, None]))

    y = F.conv2d(F.interpolate(conditioned(x, 0), scale_factor=2), scaled(a), padding=1)
    y = F.conv2d(conditioned(y, 1), scaled(b), padding=1)
    return y + F.conv2d(F.interpolate(x, scale_factor=2), scaled(s))


def implicit_image(x: Tensor, at: Tensor, target: Tensor, *w: Tensor) -> Tensor:
    """LIIF: the four nearest features of each query by shifted sampling, offsets and cell appended, an MLP, blended by area."""
    b, _, h, width = x.shape
    feats = F.unfold(x, 3, padding=1).view(b, -1, h, width)
    rows = (torch.arange(h, device=x.device, dtype=x.dtype) * 2 + 1) / h - 1
    columns = (torch.arange(width, device=x.device, dtype=x.dtype) * 2 + 1) / width - 1
    centres = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))[None].expand(b, -1, -1, -1)
    guesses, areas = [], []
    for dy in (-1, 1):
        for dx in (-1, 1):
            moved = torch.stack([at[..., 0] + dy / h, at[..., 1] + dx / width], -1).clamp(-1 + 1e-6, 1 - 1e-6)
            grid = moved.flip(-1)[:, None]
            f = F.grid_sample(feats, grid, mode="nearest", align_corners=False)[:, :, 0].mT
            c = F.grid_sample(centres, grid, mode="nearest", align_corners=False)[:, :, 0].mT
            off = torch.stack([(at - c)[..., 0] * h, (at - c)[..., 1] * width], -1)
            y = torch.cat([f, off, torch.full_like(off, 0.25)], -1)
            for k in range(0, 6, 2):
                y = F.relu(F.linear(y, w[k], w[k + 1]))
            guesses.append(F.linear(y, w[6]))
            areas.append((off[..., 0] * off[..., 1]).abs() + 1e-9)
    total = areas[0] + areas[1] + areas[2] + areas[3]
    made = sum(g * (a / total)[..., None] for g, a in zip(guesses, areas[::-1], strict=True))
    return (made - target).abs().mean()


# ---- kernels of pixels, inverse problems ----------------------------------------------------------------------------------


def separable_kernels(a: Tensor, b: Tensor, va: Tensor, ha: Tensor, vb: Tensor, hb: Tensor) -> Tensor:
    """SepConv: each pixel of a frame between by its own pair of one-dimensional kernels on both frames."""

    def filtered(x: Tensor, v: Tensor, h: Tensor) -> Tensor:
        k = v.shape[1]
        patches = F.pad(x, [k // 2] * 4, mode="replicate").unfold(2, k, 1).unfold(3, k, 1)
        return torch.einsum("bchwij,bihw,bjhw->bchw", patches, v, h)

    return filtered(a, va, ha) + filtered(b, vb, hb)


def burst_kernels(burst: Tensor, core: Tensor, clean: Tensor) -> Tensor:
    """KPN: each frame of a burst by its own 5x5 kernels of pixels, their mean, losses of values and gradients, annealed."""
    b, n, h, w = burst.shape
    padded = F.pad(burst, (2, 2, 2, 2))
    frames = torch.stack([padded[..., i : i + h, j : j + w] for i in range(5) for j in range(5)], 2)
    each = (core.view(b, n, 25, h, w) * frames).sum(2)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        dx, dy = x.diff(dim=-1) - y.diff(dim=-1), x.diff(dim=-2) - y.diff(dim=-2)
        return F.mse_loss(x, y) + dx.abs().mean() + dy.abs().mean()

    mean = each.mean(1)
    annealed = sum(loss(each[:, k], clean) for k in range(n))
    return loss(mean, clean) + 100 * 0.9998**20000 * annealed


def degraded(x: Tensor, sigma: Tensor, angle: Tensor, level: Tensor, noise: Tensor) -> Tensor:
    """Real-ESRGAN's first half: an anisotropic blur of each image's own, resizing by areas, noise by level, eight bits."""
    b, _c, h, w = x.shape
    at = torch.arange(-7, 8, device=x.device, dtype=x.dtype)
    yy, xx = torch.meshgrid(at, at, indexing="ij")
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    u, v = xx * cos + yy * sin, yy * cos - xx * sin
    s = sigma.abs() + 0.5
    k = torch.exp(-0.5 * ((u / s[:, 0, None, None]) ** 2 + (v / s[:, 1, None, None]) ** 2))
    k = k / k.sum((1, 2), keepdim=True)
    y = F.conv2d(F.pad(x, (7, 7, 7, 7), mode="reflect").transpose(0, 1), k[:, None], groups=b).transpose(0, 1)
    y = F.interpolate(y, size=(h * 5 // 8, w * 5 // 8), mode="area")
    strength = 0.1 * level.sigmoid()[:, None, None, None]
    y = y + strength * y.abs().sqrt() * noise[..., : y.shape[2], : y.shape[3]]
    return (y.clamp(0, 1) * 255).round().to(torch.uint8)


def smooth_flow(a: Tensor, b: Tensor) -> Tensor:
    """Horn and Schunck: derivatives of two frames, twenty rounds of averages of neighbouring flows and a correction."""
    quarter = torch.tensor([[[[0.25, 0.25], [0.25, 0.25]]]], dtype=a.dtype, device=a.device)
    flip = torch.tensor([[[[-1.0, 1.0], [-1.0, 1.0]]]], dtype=a.dtype, device=a.device) * 0.25

    def over(x: Tensor, k: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1), mode="replicate"), k)

    ix, iy = over(a, flip) + over(b, flip), over(a, flip.mT) + over(b, flip.mT)
    it = over(b, quarter) - over(a, quarter)
    near = [[1 / 12, 1 / 6, 1 / 12], [1 / 6, 0, 1 / 6], [1 / 12, 1 / 6, 1 / 12]]
    mean = torch.tensor(near, dtype=a.dtype, device=a.device)[None, None]
    u = v = torch.zeros_like(a)
    below = 0.25 + ix * ix + iy * iy
    for _ in range(20):
        um, vm = F.conv2d(u, mean, padding=1), F.conv2d(v, mean, padding=1)
        step = (ix * um + iy * vm + it) / below
        u, v = um - ix * step, vm - iy * step
    return torch.cat([u, v], 1)


def projections(x: Tensor, measured: Tensor) -> Tensor:
    """Tomography: sums along lines of turned images, a ramp filter as a convolution, the weighted error."""
    b, side = x.shape[0], x.shape[-1]
    angles = torch.arange(90, device=x.device, dtype=x.dtype) * (math.pi / 90)
    cos, sin, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    theta = torch.stack([torch.stack([cos, sin, zero], -1), torch.stack([-sin, cos, zero], -1)], 1)
    grid = F.affine_grid(theta, [90, 1, side, side], align_corners=False).expand(90, side, side, 2)
    turned = F.grid_sample(x[:, 0][None].expand(90, -1, -1, -1), grid, align_corners=False)
    sinogram = turned.sum(2).permute(1, 0, 2)
    at = torch.arange(-15, 16, device=x.device, dtype=x.dtype)
    ramp = torch.where(at == 0, 0.25, torch.where(at.abs() % 2 == 1, -1 / (math.pi * at.abs().clamp(min=1)) ** 2, 0.0))
    error = F.conv1d((sinogram - measured).reshape(b * 90, 1, side), ramp.to(x.dtype)[None, None], padding=15)
    return (error * error).mean() / side


def coils(re: Tensor, im: Tensor, sre: Tensor, sim: Tensor, kre: Tensor, kim: Tensor, kept: Tensor) -> Tensor:
    """SENSE: an image times each coil's map, transforms as matmuls in two dimensions, complex by hand, masked error."""

    def transform(n: int) -> tuple[Tensor, Tensor]:
        k = torch.arange(n, device=re.device)
        phase = (-2 * math.pi / n) * ((k[:, None] * k) % n).to(re.dtype)
        return phase.cos() * n**-0.5, phase.sin() * n**-0.5

    hr, hi = transform(re.shape[-2])
    wr, wi = transform(re.shape[-1])
    a, b = re * sre - im * sim, re * sim + im * sre
    a, b = hr @ a - hi @ b, hr @ b + hi @ a
    a, b = a @ wr - b @ wi, a @ wi + b @ wr
    lost = kept[None, None, None]
    return (((a - kre) ** 2 + (b - kim) ** 2) * lost).sum() / re.shape[0]


# ---- points, rays, cameras, augmentation ----------------------------------------------------------------------------------


def attentive_pools(x: Tensor, xyz: Tensor, near: Tensor, pos: Tensor, g: Tensor, score: Tensor, out: Tensor) -> Tensor:
    """RandLA-Net: neighbours' relative positions encoded, joined with their features, pooled by softmax of each channel."""
    b, n, k = near.shape
    flat = near.reshape(b, n * k, 1)
    other = xyz.gather(1, flat.expand(-1, -1, 3)).view(b, n, k, 3)
    feats = x.gather(1, flat.expand(-1, -1, x.shape[-1])).view(b, n, k, -1)
    centre = xyz[:, :, None].expand_as(other)
    off = centre - other
    far = off.square().sum(-1, keepdim=True).add(1e-6).sqrt()
    code = F.linear(torch.cat([far, off, centre, other], -1), pos)
    code = F.relu(normed(code.permute(0, 3, 1, 2), g)).permute(0, 2, 3, 1)
    both = torch.cat([feats, code], -1)
    pooled = (F.linear(both, score).softmax(2) * both).sum(2)
    return F.leaky_relu(F.linear(pooled, out), 0.2)


def surface_alphas(
    sdf: Tensor, grad: Tensor, direction: Tensor, far: Tensor, colour: Tensor, true: Tensor, s: Tensor
) -> Tensor:
    """NeuS: densities of signed distances by differences of logistic curves, colours along rays, errors, unit gradients."""
    gap = F.softplus(far) * 0.02
    cos = (grad * direction[:, None]).sum(-1)
    cos = -(F.relu(-cos * 0.5 + 0.5) * 0.5 + F.relu(-cos) * 0.5)
    inverse = torch.exp(s * 10).clamp(1e-6, 1e6)
    before, after = torch.sigmoid((sdf - cos * gap * 0.5) * inverse), torch.sigmoid((sdf + cos * gap * 0.5) * inverse)
    alpha = ((before - after + 1e-5) / (before + 1e-5)).clamp(0, 1)
    clear = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-7], -1), -1)[:, :-1]
    w = alpha * clear
    rgb = (colour.sigmoid() * w[..., None]).sum(1)
    unit = ((torch.linalg.vector_norm(grad, dim=-1) - 1) ** 2).mean()
    return (
        F.l1_loss(rgb, true.sigmoid())
        + 0.1 * unit
        + 0.1 * F.binary_cross_entropy(w.sum(-1).clamp(1e-3, 1 - 1e-3), true[:, 0].sigmoid())
    )


def pasted(images: Tensor, masks: Tensor, shift: Tensor, flips: Tensor) -> tuple[Tensor, Tensor]:
    """Copy-paste: another image's objects, mirrored and rolled, over this one; masks cut where covered, blended edges."""
    _b, c, h, w = images.shape
    other, shape = images.roll(1, 0), masks.roll(1, 0)
    other = torch.where(flips[:, None, None, None], other.flip(3), other)
    shape = torch.where(flips[:, None, None, None], shape.flip(3), shape)
    columns = (torch.arange(w, device=images.device) - shift[:, None]) % w
    other = other.gather(3, columns[:, None, None].expand(-1, c, h, -1))
    shape = shape.gather(3, columns[:, None, None].expand(-1, masks.shape[1], h, -1))
    over = shape.any(1, keepdim=True)
    soft = F.avg_pool2d(over.float(), 5, 1, 2, count_include_pad=False)
    mixed = images.float() * (1 - soft) + other.float() * soft
    return mixed.round().to(torch.uint8), torch.cat([masks & ~over, shape], 1)


def integer_layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor, zero: Tensor, scales: Tensor) -> Tensor:
    """A quantised inverted residual: bytes with zero points, weights in eight bits, sums scaled back and rounded to bytes."""

    def requantised(x: Tensor, w: Tensor, k: int, groups: int = 1) -> Tensor:
        y = F.conv2d(x.to(scales.dtype) - zero[k], w.to(scales.dtype), padding=w.shape[-1] // 2, groups=groups)
        scale = (0.01 + scales[k, : len(w)].abs() * 0.01) / w.shape[1] ** 0.5
        return ((y * scale[:, None, None] / w.shape[-1]).round() + zero[k + 1]).clamp(0, 255).to(torch.uint8)

    y = requantised(requantised(requantised(x, a, 0), b, 1, len(b)), c, 2)
    whole = (x.to(torch.int32) + y.to(torch.int32) + 1) // 2
    return whole.clamp(0, 255).to(torch.uint8)


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _tokens(m: Make, b: int, side: int) -> list[Tensor]:
    nets = [m(2, 147) * 0.1 + 1, weight(m, 192, 147), weight(m, 64, 64), m(2, 64) * 0.1 + 1]
    return [m(b, 3, side, side), *nets, weight(m, 64, 64), weight(m, 64, 64)]


def _permutator(m: Make, b: int, h: int, c: int) -> list[Tensor]:
    return [
        m(b, h, h, c),
        *(weight(m, c, c) for _ in range(3)),
        weight(m, c // 4, c),
        weight(m, 3 * c, c // 4),
        weight(m, c, c),
    ]


def _affine(m: Make, b: int, n: int, d: int) -> list[Tensor]:
    nets = [m(2, 4 * d, d) * d**-0.5, m(2, 4 * d) * 0.1, m(2, d, 4 * d) * d**-0.5 / 2]
    return [m(b, n, d), m(2, 6, d) * 0.3, m(2, n, n) * n**-0.5, m(2, n) * 0.1, *nets]


def _predicted(m: Make, b: int, n: int, d: int, e: int, s: int, t: int) -> list[Tensor]:
    nets = [m(4, e) * 0.1 + 1, weight(m, e, d), weight(m, 3 * e, e), weight(m, e, e), weight(m, 4 * e, e), weight(m, e, 4 * e)]
    return [m(b, n, d), m(b, n, d), ids(m, n, b, s), ids(m, n, b, t), m(e) * 0.1, m(1, n, e) * 0.1, *nets, weight(m, d, e)]


def _criss(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [m(b, c, h, w), weight(m, c // 4, c, 1, 1), weight(m, c // 4, c, 1, 1), weight(m, c, c, 1, 1), m(1)]


def _proposals(m: Make, p: int, n: int, d: int, c: int) -> list[Tensor]:
    norms = [m(2, c) * 0.1 + 1, m(2, d) * 0.1 + 1, m(2, d) * 0.1 + 1]
    return [m(p, d), m(p, n, d), weight(m, 2 * d * c, d), *norms, weight(m, d, n * d)]


def _cell(m: Make, b: int, c: int, side: int) -> list[Tensor]:
    convs = [weight(m, 7 * c, c, 5, 5), weight(m, 4 * c, c, 5, 5), weight(m, 3 * c, c, 5, 5), weight(m, c, 2 * c, 5, 5)]
    return [m(2, b, c, side, side), *(m(b, c, side, side) for _ in range(3)), *convs, weight(m, c, 2 * c, 1, 1)]


def _group(m: Make, b: int, c: int, h: int) -> list[Tensor]:
    one = [(c, c, 3, 3), (c, c, 3, 3), (c // 4, c, 1, 1), (c, c // 4, 1, 1)]
    return [image(m, b, c, h, h), *(weight(m, *s) for s in (*one, *one, (c, c, 3, 3)))]


def _conditional(m: Make, b: int, c: int, o: int, z: int, side: int) -> list[Tensor]:
    n = max(c, o)
    convs = [weight(m, o, c, 3, 3), weight(m, o, o, 3, 3), weight(m, o, c, 1, 1)]
    return [m(b, c, side, side), m(b, z), m(2, n, z) * z**-0.5, m(2, n, z) * z**-0.5, *convs]


def _implicit(m: Make, b: int, c: int, side: int, n: int, d: int) -> list[Tensor]:
    nets = [t for i in (9 * c + 4, d, d) for t in (weight(m, d, i), m(d) * 0.1)]
    return [m(b, c, side, side), m(b, n, 2).tanh(), m(b, n, 3), *nets, weight(m, 3, d)]


def _kernels(m: Make, b: int, h: int, w: int, k: int) -> list[Tensor]:
    return [m(b, 3, h, w), m(b, 3, h, w), *(m(b, k, h, w) / k for _ in range(4))]


def _coils(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    return [*(m(b, 1, h, w) for _ in range(2)), *(m(b, c, h, w) for _ in range(4)), m(w) > 0.5]


def _attentive(m: Make, b: int, n: int, k: int, d: int) -> list[Tensor]:
    return [
        m(b, n, d),
        m(b, n, 3),
        ids(m, n, b, n, k),
        weight(m, d, 10),
        m(2, d) * 0.1 + 1,
        weight(m, 2 * d, 2 * d),
        weight(m, d, 2 * d),
    ]


def _surface(m: Make, r: int, s: int) -> list[Tensor]:
    return [m(r, s) * 0.1, m(r, s, 3), F.normalize(m(r, 3), dim=-1), m(r, s), m(r, s, 3), m(r, 3), m(1) * 0.1]


def _pasted(m: Make, b: int, n: int, h: int, w: int) -> list[Tensor]:
    return [ids(m, 256, b, 3, h, w).to(torch.uint8), m(b, n, h, w) > 1.5, ids(m, w, b), m(b) > 0]


def _integers(m: Make, b: int, c: int, e: int, side: int) -> list[Tensor]:
    convs = [(m(*s) * 40).clamp(-127, 127).to(torch.int8) for s in ((e, c, 1, 1), (e, 1, 3, 3), (c, e, 1, 1))]
    return [ids(m, 256, b, c, side, side).to(torch.uint8), *convs, ids(m, 100, 4) + 50, m(3, e)]


BLOCKS: tuple[Block, ...] = (
    Sized(soft_split, _tokens, (2, 13)).block("soft split", 16, 224, training=True),
    Sized(
        cross_windows,
        lambda m, b, s, c: [m(b, s, s, c), weight(m, 3 * c, c), weight(m, c, 1, 3, 3), weight(m, c, c)],
        (2, 4, 16),
    ).block("cross windows", 32, 28, 192, training=True),
    Sized(permutator, _permutator, (2, 3, 12)).block("permutator", 32, 32, 384, training=True),
    Sized(affine_mlps, _affine, (2, 7, 8)).block("affine mlps", 64, 196, 384, training=True),
    Sized(predicted_patches, _predicted, (2, 7, 12, 32, 3, 4)).block(
        "predicted patches", 32, 197, 1280, 384, 85, 112, training=True
    ),
    Sized(
        global_context,
        lambda m, b, c, d, h, w: [
            m(b, c, h, w),
            weight(m, 1, c, 1, 1),
            weight(m, d, c, 1, 1),
            m(2, d) * 0.1 + 1,
            weight(m, c, d, 1, 1),
        ],
        (2, 8, 4, 3, 5),
    ).block("global context", 32, 256, 16, 50, 68, training=True),
    Sized(
        double_attention,
        lambda m, b, c, d, h: [m(b, c, h, h), *(weight(m, d, c, 1, 1) for _ in range(3)), weight(m, c, d, 1, 1)],
        (2, 8, 4, 5),
        HALF,
    ).block("double attention", 32, 512, 128, 49, training=True),
    Sized(criss_cross, _criss, (2, 8, 5, 7), SINGLE, tf32=True).block("criss cross", 4, 256, 97, 97, training=True),
    Sized(
        expected_bases,
        lambda m, b, c, k, h: [
            m(b, c, h, h),
            m(1, c, k) * c**-0.5,
            weight(m, c, c, 1, 1),
            weight(m, c, c, 1, 1),
            m(2, c) * 0.1 + 1,
        ],
        (2, 8, 3, 5),
        SINGLE,
        tf32=True,
    ).block("expected bases", 8, 512, 64, 65, training=True),
    Sized(
        object_context,
        lambda m, b, c, k, h, w: [
            m(b, c, h, w),
            m(b, k, h, w),
            *(weight(m, c // 2, c, 1, 1) for _ in range(3)),
            weight(m, c, c * 3 // 2, 1, 1),
            m(2, c) * 0.1 + 1,
        ],
        (2, 8, 5, 3, 4),
    ).block("object context", 8, 512, 19, 65, 129, training=True),
    Sized(
        corner_pooling,
        lambda m, b, c, h: [
            m(b, c, h, h),
            weight(m, c, c, 3, 3),
            weight(m, c, c, 3, 3),
            m(2, 3, c) * 0.1 + 1,
            weight(m, c, c, 3, 3),
        ],
        (2, 4, 7),
        HALF,
    ).block("corner pooling", 8, 128, 127, training=True),
    Sized(proposals_interact, _proposals, (3, 9, 8, 4)).block("proposals interact", 1200, 49, 256, 64, training=True),
    Sized(spatiotemporal_cell, _cell, (2, 3, 6), SINGLE, tf32=True).block("spatiotemporal cell", 8, 64, 64, training=True),
    Sized(residual_group, _group, (2, 8, 7), HALF).block("residual group", 16, 64, 97, training=True),
    Sized(conditional_block, _conditional, (3, 6, 4, 5, 4)).block("conditional block", 32, 512, 256, 148, 16, training=True),
    Sized(implicit_image, _implicit, (2, 3, 5, 9, 8), SINGLE, tf32=True).block(
        "implicit image", 8, 64, 48, 2304, 256, training=True
    ),
    Sized(separable_kernels, _kernels, (2, 6, 7, 5), SINGLE).block("separable kernels", 1, 192, 255, 25, training=True),
    Sized(burst_kernels, lambda m, b, n, h, w: [m(b, n, h, w), m(b, n * 25, h, w) * 0.04, m(b, h, w)], (2, 3, 6, 7)).block(
        "burst kernels", 2, 8, 256, 257, training=True
    ),
    Sized(
        degraded, lambda m, b, h, w: [m(b, 3, h, w).sigmoid(), m(b, 2), m(b), m(b), m(b, 3, h, w)], (2, 16, 17), SINGLE
    ).block("degraded", 24, 400, 403),
    Sized(smooth_flow, lambda m, b, h, w: [m(b, 1, h, w), m(b, 1, h, w)], (2, 6, 7), SINGLE).block("smooth flow", 4, 480, 639),
    Sized(projections, lambda m, b, s: [m(b, 1, s, s), m(b, 90, s)], (2, 9), SINGLE).block(
        "projections", 4, 257, training=True
    ),
    Sized(coils, _coils, (2, 3, 5, 6), SINGLE).block("coils", 4, 15, 320, 333, training=True),
    Sized(attentive_pools, _attentive, (2, 7, 3, 4), SINGLE, tf32=True).block(
        "attentive pools", 4, 11253, 16, 32, training=True
    ),
    Sized(surface_alphas, _surface, (5, 7), SINGLE).block("surface alphas", 16383, 129, training=True),
    Sized(pasted, _pasted, (3, 2, 6, 7), SINGLE).block("pasted", 32, 10, 333, 500),
    Sized(integer_layers, _integers, (2, 4, 8, 5), SINGLE).block("integer layers", 32, 24, 144, 57),
)
