"""Whole layers of networks for images and videos: stages, pyramids, heads with their losses, diffusion, flow."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, image, weight

SINGLE = torch.float32


def normed(x: Tensor, g: Tensor) -> Tensor:
    """A batch norm in training, gain and shift in the rows of g."""
    return F.batch_norm(x, None, None, g[0], g[1], True)


def known(x: Tensor, g: Tensor) -> Tensor:
    """A batch norm in inference: gain, shift, mean and variance in the rows of g."""
    return F.batch_norm(x, g[2], g[3], g[0], g[1], False)


def running(m: Make, c: int) -> Tensor:
    """Gain, shift, mean and variance of c channels."""
    return torch.cat([m(3, c), m(1, c).abs() + 0.5])


def layer_normed(x: Tensor, g: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], g[0], g[1])


def heads(x: Tensor, size: int) -> Tensor:
    """(b, n, c) as (b, heads, n, size)."""
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def attended(q: Tensor, k: Tensor, v: Tensor, size: int, mask: Tensor | None = None) -> Tensor:
    """Attention of heads of a size; (b, n, c) each."""
    out = F.scaled_dot_product_attention(heads(q, size), heads(k, size), heads(v, size), attn_mask=mask)
    return out.transpose(1, 2).flatten(2)


# ---- stages ---------------------------------------------------------------------------------------------------------------


def regnet_block(x: Tensor, *w: Tensor) -> Tensor:
    """RegNetY: 1x1, grouped 3x3 in steps of two, channels weighted, 1x1, a strided shortcut."""
    a, na, b, nb, down, up, c, nc, s, ns = w
    y = F.relu(normed(F.conv2d(x, a), na))
    y = F.relu(normed(F.conv2d(y, b, stride=2, padding=1, groups=len(b) // b.shape[1]), nb))
    y = y * torch.sigmoid(F.conv2d(F.relu(F.conv2d(F.adaptive_avg_pool2d(y, 1), down)), up))
    return F.relu(normed(F.conv2d(y, c), nc) + normed(F.conv2d(x, s, stride=2), ns))


def bottlenecks(x: Tensor, *w: Tensor) -> Tensor:
    """ResNet-D: a bottleneck whose shortcut is a mean pool and a 1x1 convolution, and one without either."""
    first, second, (s, ns) = w[:6], w[6:12], w[12:]
    for k, (a, na, b, nb, c, nc) in enumerate((first, second)):
        y = F.relu(normed(F.conv2d(x, a), na))
        y = F.relu(normed(F.conv2d(y, b, stride=2 - k, padding=1), nb))
        y = normed(F.conv2d(y, c), nc)
        x = F.relu(y + (x if k else normed(F.conv2d(F.avg_pool2d(x, 2, 2, ceil_mode=True), s), ns)))
    return x


def fused_stage(x: Tensor, *w: Tensor) -> Tensor:
    """EfficientNetV2 in inference: three dense 3x3 expansions and 1x1 projections, the first in steps of two."""
    for k in range(0, len(w), 4):
        a, na, b, nb = w[k : k + 4]
        y = F.silu(known(F.conv2d(x, a, stride=1 if k else 2, padding=1), na))
        y = known(F.conv2d(y, b), nb)
        x = x + y if k else y
    return x


def mobile_stage(x: Tensor, *w: Tensor) -> Tensor:
    """MobileNetV2: two inverted residuals with ReLU6, the first in steps of two, and the expansion after them."""
    for k in range(0, len(w) - 2, 6):
        a, na, d, nd, b, nb = w[k : k + 6]
        y = F.relu6(normed(F.conv2d(x, a), na))
        y = F.relu6(normed(F.conv2d(y, d, stride=1 if k else 2, padding=1, groups=len(d)), nd))
        y = normed(F.conv2d(y, b), nb)
        x = x + y if k else y
    return F.relu6(normed(F.conv2d(x, w[-2]), w[-1]))


def ghost_bottleneck(x: Tensor, *w: Tensor) -> Tensor:
    """GhostNet: half of the channels by a 1x1 convolution, the others cheaply from these, and the start of the next block."""
    a, na, ad, nad, d, nd, down, up, b, nb, bd, nbd, sd, nsd, s, ns, e, ne = w
    y = F.relu(normed(F.conv2d(x, a), na))
    y = torch.cat([y, F.relu(normed(F.conv2d(y, ad, padding=1, groups=len(ad)), nad))], 1)
    y = normed(F.conv2d(y, d, stride=2, padding=1, groups=len(d)), nd)
    y = y * F.hardsigmoid(F.conv2d(F.relu(F.conv2d(y.mean((2, 3), keepdim=True), down)), up))
    y = normed(F.conv2d(y, b), nb)
    y = torch.cat([y, normed(F.conv2d(y, bd, padding=1, groups=len(bd)), nbd)], 1)
    x = normed(F.conv2d(x, sd, stride=2, padding=1, groups=len(sd)), nsd)
    return F.relu(normed(F.conv2d(y + normed(F.conv2d(x, s), ns), e), ne))


def merged_branches(x: Tensor, w: Tensor, nw: Tensor, v: Tensor, nv: Tensor, ni: Tensor) -> Tensor:
    """RepVGG's way to inference: three branches and their norms made one kernel and bias, then the one convolution."""

    def fused(kernel: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        scale = g[0] / (g[3] + 1e-5).sqrt()
        return kernel * scale[:, None, None, None], g[1] - g[2] * scale

    one = torch.eye(len(w), device=w.device, dtype=w.dtype)[:, :, None, None]
    parts = [fused(w, nw), fused(F.pad(v, [1] * 4), nv), fused(F.pad(one, [1] * 4), ni)]
    return F.relu(F.conv2d(x, sum(k for k, _ in parts), sum(b for _, b in parts), padding=1))


def pooled_partial(x: Tensor, *w: Tensor) -> Tensor:
    """YOLOv5's end of a backbone: a cross-stage partial block with a bottleneck, then three pools of five in a row."""

    def unit(x: Tensor, k: int) -> Tensor:
        return F.silu(normed(F.conv2d(x, w[k], padding=w[k].shape[2] // 2), w[k + 1]))

    y = unit(x, 0)
    y = y + unit(unit(y, 2), 4)
    y = unit(torch.cat([y, unit(x, 6)], 1), 8)
    pools = [unit(y, 10)]
    for _ in range(3):
        pools.append(F.max_pool2d(pools[-1], 5, 1, 2))
    return unit(torch.cat(pools, 1), 12)


def dense_residual(x: Tensor, *w: Tensor) -> Tensor:
    """ESRGAN: five convolutions, each of all before, leaky ReLUs, a fifth of the result added."""
    parts = [x]
    for k in range(0, 8, 2):
        parts.append(F.leaky_relu(F.conv2d(torch.cat(parts, 1), w[k], w[k + 1], padding=1), 0.2))
    return x + 0.2 * F.conv2d(torch.cat(parts, 1), w[8], w[9], padding=1)


def convnext_stage(x: Tensor, *w: Tensor) -> Tensor:
    """ConvNeXt: a norm and a 2x2 convolution in steps of two, two blocks with scaled residuals, channels last within."""
    n, d, b = w[:3]
    x = F.conv2d(layer_normed(x.permute(0, 2, 3, 1), n).permute(0, 3, 1, 2), d, b, stride=2)
    for k in range(3, len(w), 8):
        dw, db, n, up, bu, down, bd, gamma = w[k : k + 8]
        y = F.conv2d(x, dw, db, padding=3, groups=len(dw)).permute(0, 2, 3, 1)
        y = gamma * F.linear(F.gelu(F.linear(layer_normed(y, n), up, bu)), down, bd)
        x = x + y.permute(0, 3, 1, 2)
    return x


# ---- transformers ---------------------------------------------------------------------------------------------------------


def window_block(x: Tensor, *w: Tensor) -> Tensor:
    """Swin V2's shifted block: rolled windows of eight, cosine attention, biases and a mask, norms after each part."""
    wqkv, bqkv, scale, bias, wo, bo, n1, up, bu, down, bd, n2 = w
    b, h, wd, c = x.shape
    k, size = 8, c // len(scale)
    regions = torch.zeros(h, wd, device=x.device, dtype=x.dtype)
    for i, rows in enumerate((slice(0, -k), slice(-k, -4), slice(-4, None))):
        for j, columns in enumerate((slice(0, -k), slice(-k, -4), slice(-4, None))):
            regions[rows, columns] = 3 * i + j
    r = regions.view(h // k, k, wd // k, k).transpose(1, 2).reshape(-1, k * k)
    mask = (r[:, None] - r[:, :, None]).ne(0) * -100.0
    y = torch.roll(x, (-4, -4), (1, 2)).view(b, h // k, k, wd // k, k, c).transpose(2, 3).reshape(-1, k * k, c)
    q, key, v = (heads(t, size) for t in F.linear(y, wqkv, bqkv).chunk(3, -1))
    s = F.normalize(q, dim=-1) @ F.normalize(key, dim=-1).mT * scale.clamp(max=math.log(100.0)).exp()
    s = s + 16 * torch.sigmoid(bias)
    s = (s.view(b, len(r), -1, k * k, k * k) + mask[:, None].to(s.dtype)).view(s.shape)
    y = F.linear((s.softmax(-1) @ v).transpose(1, 2).flatten(2), wo, bo)
    y = y.view(b, h // k, wd // k, k, k, c).transpose(2, 3).reshape(b, h, wd, c)
    x = x + layer_normed(torch.roll(y, (4, 4), (1, 2)), n1)
    return x + layer_normed(F.linear(F.gelu(F.linear(x, up, bu)), down, bd), n2)


def pooled_relative(x: Tensor, *w: Tensor) -> Tensor:
    """CoAtNet's first block of a stage: pooled shortcut, attention of pooled pixels with learned relative biases, an MLP."""
    s, n1, wqkv, table, wo, n2, up, down = w
    size = wqkv.shape[0] // 3 // table.shape[1]
    y = layer_normed(x.permute(0, 2, 3, 1), n1).permute(0, 3, 1, 2)
    y = F.max_pool2d(y, 2)
    h, wd = y.shape[2:]
    q, k, v = F.linear(y.flatten(2).mT, wqkv).chunk(3, -1)
    at = torch.arange(h, device=x.device)
    near = at[:, None] - at + h - 1
    index = near[:, None, :, None] * (2 * h - 1) + near[None, :, None, :]
    bias = table[index.reshape(h * wd, -1)].permute(2, 0, 1)
    y = F.linear(attended(q, k, v, size, bias[None]), wo)
    y = F.conv2d(F.max_pool2d(x, 2), s).flatten(2).mT + y
    y = y + F.linear(F.gelu(F.linear(layer_normed(y, n2), up)), down)
    return y.mT.unflatten(2, (h, wd))


def pooled_clips(x: Tensor, *w: Tensor) -> Tensor:
    """MViT: queries, keys and values of a clip pooled by depthwise convolutions beside a class token, normed, queries added."""
    n, wqkv, bqkv, pools, norms, wo, bo = w
    size, c = pools.shape[1], x.shape[-1]
    b, length = x.shape[:2]
    h = math.isqrt((length - 1) // 4)

    def pool(t: Tensor, k: int, step: int) -> Tensor:
        t = heads(t, size)
        first, t = t[:, :, :1], t[:, :, 1:]
        t = t.reshape(-1, 4, h, h, size).permute(0, 4, 1, 2, 3)
        t = F.conv3d(t, pools[k], stride=(1, step, step), padding=1, groups=size)
        t = t.flatten(2).mT.unflatten(0, (b, -1))
        return layer_normed(torch.cat([first, t], 2), norms[k])

    y = F.linear(layer_normed(x, n), wqkv, bqkv).split(c, -1)
    q, k, v = pool(y[0], 0, 1), pool(y[1], 1, 2), pool(y[2], 2, 2)
    y = F.scaled_dot_product_attention(q, k, v) + q
    return x + F.linear(y.transpose(1, 2).flatten(2), wo, bo)


def divided_block(x: Tensor, *w: Tensor) -> Tensor:
    """TimeSformer: attention over the frames of each patch, then over the patches of each frame, an MLP."""
    n0, t0, p0, n1, t1, p1, n2, up, bu, down, bd = w
    b, t, p, c = x.shape
    y = layer_normed(x.transpose(1, 2).reshape(b * p, t, c), n0)
    y = F.linear(attended(*F.linear(y, t0).chunk(3, -1), 64 if c > 64 else 4), p0)
    x = x + y.view(b, p, t, c).transpose(1, 2)
    y = layer_normed(x.reshape(b * t, p, c), n1)
    y = F.linear(attended(*F.linear(y, t1).chunk(3, -1), 64 if c > 64 else 4), p1)
    x = x + y.view(x.shape)
    return x + F.linear(F.gelu(F.linear(layer_normed(x, n2), up, bu)), down, bd)


def eva_block(x: Tensor, sin: Tensor, cos: Tensor, *w: Tensor) -> Tensor:
    """EVA-02: attention with turned pairs but for the class token, a SwiGLU with a norm inside."""
    n1, wq, bq, wk, wv, bv, inner, wo, bo, n2, gate, up, mid, down = w
    size = sin.shape[-1]

    def turned(t: Tensor) -> Tensor:
        first, t = t[:, :, :1], t[:, :, 1:]
        other = torch.stack([-t[..., 1::2], t[..., ::2]], -1).flatten(-2)
        return torch.cat([first, t * cos + other * sin], 2)

    y = layer_normed(x, n1)
    q, k, v = turned(heads(F.linear(y, wq, bq), size)), turned(heads(F.linear(y, wk), size)), heads(F.linear(y, wv, bv), size)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = x + F.linear(layer_normed(y, inner), wo, bo)
    y = layer_normed(x, n2)
    return x + F.linear(layer_normed(F.silu(F.linear(y, gate)) * F.linear(y, up), mid), down)


def detr_layer(x: Tensor, memory: Tensor, pos: Tensor, at: Tensor, *w: Tensor) -> Tensor:
    """DETR's decoder layer, tokens first: queries among themselves, then to padded features, three norms after."""
    pad, sw, sb, so, sob, cw, cb, co, cob, up, bu, down, bd, n1, n2, n3 = w
    c = x.shape[-1]
    count = 8 if c >= 64 else 2

    def attention(q: Tensor, k: Tensor, v: Tensor, p: tuple[Tensor, ...], mask: Tensor | None) -> Tensor:
        got = F.multi_head_attention_forward(
            q, k, v, c, count, p[0], p[1], None, None, False, 0.0, p[2], p[3], key_padding_mask=mask
        )  # fmt: skip
        return got[0]

    q = x + at[:, None]
    x = layer_normed(x + attention(q, q, x, (sw, sb, so, sob), None), n1)
    y = attention(x + at[:, None], memory + pos, memory, (cw, cb, co, cob), pad > 1)
    x = layer_normed(x + y, n2)
    return layer_normed(x + F.linear(F.relu(F.linear(x, up, bu)), down, bd), n3)


def two_ways(q: Tensor, x: Tensor, pe: Tensor, qpe: Tensor, *w: Tensor) -> Tensor:
    """Segment Anything's two-way block: tokens among themselves, tokens to pixels, an MLP, pixels to tokens."""
    norms, (up, bu, down, bd), parts = w[0], w[1:5], w[5:]

    def attention(k: int, q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        wq, wk, wv, wo = parts[4 * k : 4 * k + 4]
        return F.linear(attended(F.linear(q, wq), F.linear(key, wk), F.linear(v, wv), len(wq) // 8), wo)

    q = layer_normed(q + attention(0, q + qpe, q + qpe, q), norms[0])
    q = layer_normed(q + attention(1, q + qpe, x + pe, x), norms[1])
    q = layer_normed(q + F.linear(F.relu(F.linear(q, up, bu)), down, bd), norms[2])
    x = layer_normed(x + attention(2, x + pe, q + qpe, q), norms[3])
    return torch.cat([q, x], 1)


# ---- pyramids and heads ---------------------------------------------------------------------------------------------------


def two_way_pyramid(*t: Tensor) -> Tensor:
    """EfficientDet's layer: five levels down and up again, weighted sums, separable convolutions with norms."""
    levels, shares, shares3, dws, pws, norms = list(t[:5]), *t[5:]

    def mixed(node: int, parts: list[Tensor], share: Tensor) -> Tensor:
        s = F.relu(share)
        s = s / (s.sum() + 1e-4)
        y = F.silu(sum(s[k] * p for k, p in enumerate(parts)))
        return normed(F.conv2d(F.conv2d(y, dws[node], padding=1, groups=len(dws[node])), pws[node]), norms[node])

    down = [levels[4]]
    for k in (3, 2, 1, 0):
        up = F.interpolate(down[-1], size=levels[k].shape[2:], mode="nearest")
        down.append(mixed(k, [levels[k], up], shares[k]))
    down.reverse()
    out = [down[0]]
    for k in (1, 2, 3):
        out.append(mixed(3 + k, [levels[k], down[k], F.max_pool2d(out[-1], 3, 2, 1)], shares3[k - 1]))
    out.append(mixed(7, [levels[4], F.max_pool2d(out[-1], 3, 2, 1)], shares[4]))
    return torch.cat([F.silu(y).flatten(2) for y in out], 2)


def shared_heads(*t: Tensor) -> Tensor:
    """FCOS: four convolutions with group norms shared by five levels, class scores, the focal loss of all points."""
    levels, (ws, bs, norms, wc, bc, labels) = t[:5], t[5:]
    out = []
    for x in levels:
        y = x
        for k in range(4):
            y = F.relu(F.group_norm(F.conv2d(y, ws[k], bs[k], padding=1), len(bs[k]) // 8, norms[k, 0], norms[k, 1]))
        out.append(F.conv2d(y, wc, bc, padding=1).permute(0, 2, 3, 1).flatten(1, 2))
    scores = torch.cat(out, 1).float()
    wanted = F.one_hot(labels[:, : scores.shape[1]], len(bc) + 1)[..., :-1].to(scores.dtype)
    p = torch.sigmoid(scores)
    ce = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
    pt = p * wanted + (1 - p) * (1 - wanted)
    share = 0.25 * wanted + 0.75 * (1 - wanted)
    return (share * ce * (1 - pt) ** 2).sum() / labels.lt(len(bc)).sum().clamp(min=1)


def class_decoder(x: Tensor, low: Tensor, labels: Tensor, *w: Tensor) -> Tensor:
    """DeepLabV3+: coarse features beside narrow fine ones, two convolutions, four times as large, ignored pixels."""
    a, na, b, nb, c, nc, d, bd = w
    fine = F.relu(normed(F.conv2d(low, a), na))
    y = torch.cat([F.interpolate(x, size=low.shape[2:], mode="bilinear", align_corners=False), fine], 1)
    y = F.relu(normed(F.conv2d(y, b, padding=1), nb))
    y = F.relu(normed(F.conv2d(y, c, padding=1), nc))
    y = F.interpolate(F.conv2d(y, d, bd), size=labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(y.float(), labels, ignore_index=255)


def exchanged(*t: Tensor) -> Tensor:
    """HRNet: three resolutions, each the sum of all, by strided convolutions or by 1x1 ones and nearest pixels; a loss."""
    xs, ws = t[:3], list(t[3:])

    def unit(x: Tensor, step: int) -> Tensor:
        w, n = ws.pop(0), ws.pop(0)
        return normed(F.conv2d(x, w, stride=step, padding=w.shape[2] // 2), n)

    out = []
    for i in range(3):
        y = xs[i]
        for j in range(3):
            if j > i:
                y = y + F.interpolate(unit(xs[j], 1), scale_factor=float(2 ** (j - i)), mode="nearest")
            elif j < i:
                z = xs[j]
                for k in range(i - j):
                    z = unit(z, 2) if k == i - j - 1 else F.relu(unit(z, 2))
                y = y + z
        out.append(F.relu(y))
    return torch.cat([y.flatten(1) for y in out], 1)


def levels_to_classes(*t: Tensor) -> Tensor:
    """SegFormer's head: four levels through linear layers, all as large as the first, mixed, scored, cross entropy."""
    xs, ws, (mix, n, wc, bc, labels) = t[:4], t[4:8], t[8:]
    size = xs[0].shape[2:]
    ys = []
    for x, w in zip(xs, ws, strict=True):
        y = F.linear(x.flatten(2).transpose(1, 2), w).permute(0, 2, 1).reshape(len(x), -1, *x.shape[2:])
        ys.append(F.interpolate(y, size=size, mode="bilinear", align_corners=False))
    y = F.conv2d(F.relu(normed(F.conv2d(torch.cat(ys[::-1], 1), mix), n)), wc, bc)
    y = F.interpolate(y, size=labels.shape[1:], mode="bilinear", align_corners=False)
    return F.cross_entropy(y.float(), labels, ignore_index=255)


def volume_levels(x: Tensor, labels: Tensor, *w: Tensor) -> Tensor:
    """nnU-Net: a level down and up again, instance norms and leaky ReLU, dice and cross entropy of three classes."""

    def unit(x: Tensor, k: int, step: int = 1) -> Tensor:
        n = w[k + 1]
        return F.leaky_relu(F.instance_norm(F.conv3d(x, w[k], n[2], stride=step, padding=1), None, None, n[0], n[1]), 0.01)

    skip = unit(x, 0)
    y = unit(unit(skip, 2, 2), 4)
    y = F.conv_transpose3d(y, w[6], stride=2)
    y = unit(torch.cat([y, skip], 1), 7)
    y = F.conv3d(y, w[9], w[10]).float()
    p = y.softmax(1)
    wanted = F.one_hot(labels, p.shape[1]).movedim(-1, 1).to(p.dtype)
    dice = (2 * (p * wanted).sum((0, 2, 3, 4)) + 1e-5) / ((p + wanted).sum((0, 2, 3, 4)) + 1e-5)
    return F.cross_entropy(y, labels) - dice[1:].mean()


def decoded_levels(*t: Tensor) -> tuple[Tensor, Tensor]:
    """YOLOv8's detector: for each level two convolutions for borders and for classes, expected bins, rectangles."""
    rects, scores = [], []
    for level in range(3):
        x, w = t[level], t[3 + 10 * level : 13 + 10 * level]
        y = F.silu(known(F.conv2d(x, w[0], padding=1), w[1]))
        y = F.conv2d(F.silu(known(F.conv2d(y, w[2], padding=1), w[3])), w[4])
        z = F.silu(known(F.conv2d(x, w[5], padding=1), w[6]))
        z = F.conv2d(F.silu(known(F.conv2d(z, w[7], padding=1), w[8])), w[9])
        b, _c, h, wd = y.shape
        p = y.view(b, 4, 16, h * wd).softmax(2)
        far = (p * torch.arange(16, device=x.device, dtype=x.dtype)[:, None]).sum(2)
        rows, columns = torch.meshgrid(
            torch.arange(h, device=x.device, dtype=x.dtype) + 0.5,
            torch.arange(wd, device=x.device, dtype=x.dtype) + 0.5,
            indexing="ij",
        )
        at = torch.stack([columns, rows]).flatten(1)
        low, high = at - far[:, :2], at + far[:, 2:]
        rects.append(torch.cat([(low + high) / 2, high - low], 1) * 8 * 2**level)
        scores.append(z.flatten(2).sigmoid())
    return torch.cat(rects, 2), torch.cat(scores, 2)


def mask_head(x: Tensor, labels: Tensor, wanted: Tensor, ws: Tensor, bs: Tensor, *w: Tensor) -> Tensor:
    """Mask R-CNN: four convolutions of regions, a transposed one, a mask for each class, the loss of the true one's."""
    up, bu, wc, bc = w
    for k in range(len(ws)):
        x = F.relu(F.conv2d(x, ws[k], bs[k], padding=1))
    y = F.conv2d(F.relu(F.conv_transpose2d(x, up, bu, stride=2)), wc, bc)
    y = y[torch.arange(len(y), device=y.device), labels]
    return F.binary_cross_entropy_with_logits(y.float(), wanted.gt(0).float())


def region_head(x: Tensor, labels: Tensor, wanted: Tensor, *w: Tensor) -> Tensor:
    """Faster R-CNN: two wide layers of flattened regions, classes, and the borders of the true class by smooth L1."""
    a, ba, b, bb, wc, bc, wr, br = w
    y = F.relu(F.linear(F.relu(F.linear(x.flatten(1), a, ba)), b, bb))
    scores, rects = F.linear(y, wc, bc).float(), F.linear(y, wr, br).view(len(y), -1, 4)
    mine = rects[torch.arange(len(y), device=y.device), labels].float()
    far = F.smooth_l1_loss(mine, wanted.to(mine.dtype), beta=1 / 9, reduction="none").sum(1)
    return F.cross_entropy(scores, labels) + torch.where(labels > 0, far, 0).sum() / labels.numel()


def depth_fusion(x: Tensor, skip: Tensor, *w: Tensor) -> Tensor:
    """DPT: two residual units around a sum, twice as large with aligned corners, projected, a head of one channel."""
    ws, bs, p, bp, h1, b1, h2, b2 = w

    def unit(x: Tensor, k: int) -> Tensor:
        y = F.conv2d(F.relu(x), ws[2 * k], bs[2 * k], padding=1)
        return x + F.conv2d(F.relu(y), ws[2 * k + 1], bs[2 * k + 1], padding=1)

    y = unit(x + unit(skip, 0), 1)
    y = F.conv2d(F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=True), p, bp)
    y = F.interpolate(F.conv2d(y, h1, b1, padding=1), scale_factor=1.75, mode="bilinear", align_corners=True)
    return F.conv2d(F.relu(y), h2, b2)


# ---- diffusion and videos -------------------------------------------------------------------------------------------------


def unet_level(x: Tensor, t: Tensor, text: Tensor, *w: Tensor) -> Tensor:
    """SDXL: a residual block with a time embedding and a wider shortcut, then a transformer with text and GEGLU."""
    g1, c1, b1, wt, bt, g2, c2, b2, s, bs, g3, pin, n1, qkv, o1, n2, q2, kv2, o2, n3, up, bu, down, bd, pout = w
    groups = 32 if x.shape[1] >= 64 else 4
    y = F.conv2d(F.silu(F.group_norm(x, groups, g1[0], g1[1])), c1, b1, padding=1)
    y = y + F.linear(F.silu(t), wt, bt)[:, :, None, None]
    y = F.conv2d(F.silu(F.group_norm(y, groups, g2[0], g2[1])), c2, b2, padding=1)
    x = F.conv2d(x, s, bs) + y
    b, c, h, wd = x.shape
    size = 64 if c >= 64 else 4
    y = F.group_norm(x, groups, g3[0], g3[1], eps=1e-6).permute(0, 2, 3, 1).reshape(b, h * wd, c)
    y = F.linear(y, pin)
    y = y + F.linear(attended(*F.linear(layer_normed(y, n1), qkv).chunk(3, -1), size), o1)
    k, v = F.linear(text, kv2).chunk(2, -1)
    y = y + F.linear(attended(F.linear(layer_normed(y, n2), q2), k, v, size), o2)
    z, gate = F.linear(layer_normed(y, n3), up, bu).chunk(2, -1)
    y = y + F.linear(z * F.gelu(gate), down, bd)
    return x + F.linear(y, pout).reshape(b, h, wd, c).permute(0, 3, 1, 2)


def vae_middle(x: Tensor, *w: Tensor) -> Tensor:
    """The middle of a diffusion model's decoder of pictures: a residual block, one head over all pixels, twice as large."""
    g1, c1, g2, c2, g3, qkv, bqkv, wo, bo, up, bu = w
    groups = 32 if x.shape[1] >= 64 else 4
    y = F.conv2d(F.silu(F.group_norm(x, groups, g1[0], g1[1], eps=1e-6)), c1, g1[2], padding=1)
    x = x + F.conv2d(F.silu(F.group_norm(y, groups, g2[0], g2[1], eps=1e-6)), c2, g2[2], padding=1)
    b, c, h, wd = x.shape
    y = F.group_norm(x.view(b, c, h * wd), groups, g3[0], g3[1], eps=1e-6).transpose(1, 2)
    y = F.linear(attended(*F.linear(y, qkv, bqkv).chunk(3, -1), c), wo, bo)
    x = x + y.transpose(1, 2).reshape(x.shape)
    return F.conv2d(F.interpolate(x, scale_factor=2.0, mode="nearest"), up, bu, padding=1)


def conditioning_stem(x: Tensor, hint: Tensor, *w: Tensor) -> Tensor:
    """ControlNet: a picture of hints through seven convolutions to the latent's size, a zero convolution, the latent added."""
    ws, bs = w[: len(w) // 2], w[len(w) // 2 :]
    y = hint
    for k in range(7):
        y = F.silu(F.conv2d(y, ws[k], bs[k], stride=2 if k in {2, 4, 6} else 1, padding=1))
    y = F.conv2d(y, ws[7], bs[7], padding=1) + F.conv2d(x, ws[8], bs[8], padding=1)
    return F.conv2d(y, ws[9], bs[9])


def pixart_block(x: Tensor, t: Tensor, text: Tensor, *w: Tensor) -> Tensor:
    """PixArt: shifts, scales and gates from a table and one shared layer, attention, cross attention, an MLP."""
    table, qkv, bqkv, wo, bo, wq, bq, wkv, bkv, co, bco, up, bu, down, bd = w
    c = x.shape[-1]
    size = 72 if c >= 72 else 4
    shift, scale, gate, shift2, scale2, gate2 = (table[None] + t.view(len(x), 6, c)).chunk(6, 1)
    y = F.layer_norm(x, (c,), eps=1e-6) * (1 + scale) + shift
    x = x + gate * F.linear(attended(*F.linear(y, qkv, bqkv).chunk(3, -1), size), wo, bo)
    k, v = F.linear(text, wkv, bkv).chunk(2, -1)
    x = x + F.linear(attended(F.linear(x, wq, bq), k, v, size), co, bco)
    y = F.layer_norm(x, (c,), eps=1e-6) * (1 + scale2) + shift2
    return x + gate2 * F.linear(F.gelu(F.linear(y, up, bu), approximate="tanh"), down, bd)


def mixed_time(x: Tensor, t: Tensor, mix: Tensor, *w: Tensor) -> Tensor:
    """Stable Video Diffusion: a residual block of frames, one of 3x1x1 convolutions over time, a learned blend."""
    g1, c1, wt, bt, g2, c2, g3, t1, wt2, g4, t2 = w
    b = len(t)
    groups = 32 if x.shape[1] >= 64 else 4
    frames = len(x) // b
    y = F.conv2d(F.silu(F.group_norm(x, groups, g1[0], g1[1])), c1, g1[2], padding=1)
    y = y + F.linear(F.silu(t), wt, bt).repeat_interleave(frames, 0)[:, :, None, None]
    x = x + F.conv2d(F.silu(F.group_norm(y, groups, g2[0], g2[1])), c2, g2[2], padding=1)
    v = x.unflatten(0, (b, frames)).permute(0, 2, 1, 3, 4)
    y = F.conv3d(F.silu(F.group_norm(v, groups, g3[0], g3[1])), t1, g3[2], padding=(1, 0, 0))
    y = y + F.linear(F.silu(t), wt2)[:, :, None, None, None]
    y = v + F.conv3d(F.silu(F.group_norm(y, groups, g4[0], g4[1])), t2, g4[2], padding=(1, 0, 0))
    share = torch.sigmoid(mix)
    return (share * v + (1 - share) * y).permute(0, 2, 1, 3, 4).flatten(0, 1)


def depthwise_volumes(x: Tensor, *w: Tensor) -> Tensor:
    """X3D: 1x1x1, a depthwise 3x3x3 in steps of two over pixels, channels weighted, swish, 1x1x1, the shortcut."""
    a, na, d, nd, down, bd, up, bu, b, nb, s, ns = w
    y = F.relu(normed(F.conv3d(x, a), na))
    y = normed(F.conv3d(y, d, stride=(1, 2, 2), padding=1, groups=len(d)), nd)
    g = F.adaptive_avg_pool3d(y, 1)
    y = F.silu(y * torch.sigmoid(F.conv3d(F.relu(F.conv3d(g, down, bd)), up, bu)))
    return F.relu(normed(F.conv3d(y, b), nb) + normed(F.conv3d(x, s, stride=(1, 2, 2)), ns))


def denoiser_loss(x: Tensor, noise: Tensor, level: Tensor, *w: Tensor) -> Tensor:
    """EDM: noise of log-normal levels, inputs, skips and outputs scaled by the level, a small network, weighted squares."""
    a, wt, b, c = w
    sigma = (level * 1.2 - 1.2).exp()[:, None, None, None]
    near = (sigma**2 + 0.25).sqrt()
    noisy = x + noise * sigma
    y = F.conv2d(noisy / near, a, padding=1)
    e = sigma.flatten().log()[:, None] / 4 * torch.linspace(0.1, 4, wt.shape[1] // 2, device=x.device, dtype=x.dtype)
    y = F.silu(y + F.linear(torch.cat([e.cos(), e.sin()], 1), wt)[:, :, None, None])
    y = F.conv2d(F.silu(F.group_norm(F.conv2d(y, b, padding=1), 4)), c, padding=1)
    got = noisy * 0.25 / near**2 + y * sigma * 0.5 / near
    return ((near / (sigma * 0.5)) ** 2 * (got - x).square()).mean()


def critic_end(x: Tensor, *w: Tensor) -> Tensor:
    """StyleGAN2: a residual block blurred and halved, deviations over groups of four as a channel, the critic's softplus."""
    a, ba, b, bb, s, c, bc, d, bd, e, be = w
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0], device=x.device, dtype=x.dtype)
    blur = (taps[:, None] * taps / 64).expand(x.shape[1], 1, 4, 4)

    def smooth(x: Tensor, pad: int) -> Tensor:
        return F.conv2d(F.pad(x, [pad] * 2 + [pad] * 2), blur, groups=x.shape[1])

    y = F.leaky_relu(F.conv2d(x, a, ba, padding=1), 0.2) * 2**0.5
    y = F.leaky_relu(F.conv2d(smooth(y, 2), b, bb, stride=2), 0.2) * 2**0.5
    x = (y + F.conv2d(smooth(x, 1), s, stride=2)) / 2**0.5
    n, _c, h, wd = x.shape
    z = x.view(4, -1, 1, x.shape[1], h, wd).float()
    z = (z.var(0, unbiased=False) + 1e-8).sqrt().mean((2, 3, 4), keepdim=True).squeeze(2)
    x = torch.cat([x, z.repeat(4, 1, h, wd).to(x.dtype)], 1)
    y = F.leaky_relu(F.conv2d(x, c, bc, padding=1), 0.2) * 2**0.5
    y = F.linear(F.leaky_relu(F.linear(y.flatten(1), d, bd), 0.2) * 2**0.5, e, be)
    sign = torch.where(torch.arange(n, device=x.device) % 2 == 0, 1.0, -1.0)[:, None]
    return F.softplus(y.float() * sign).mean()


def flow_update(net: Tensor, inp: Tensor, corr: Tensor, flow: Tensor, *w: Tensor) -> Tensor:
    """RAFT's step: motion features, a gated recurrence along rows and then columns, the flow's and the mask's heads."""
    cv, bs = w[:-1], list(w[-1].split([len(t) for t in w[:-1]]))

    def conv(x: Tensor, k: int) -> Tensor:
        return F.conv2d(x, cv[k], bs[k], padding=(cv[k].shape[2] // 2, cv[k].shape[3] // 2))

    c = F.relu(conv(F.relu(conv(corr, 0)), 1))
    f = F.relu(conv(F.relu(conv(flow, 2)), 3))
    x = torch.cat([inp, F.relu(conv(torch.cat([c, f], 1), 4)), flow], 1)
    for k in (5, 8):
        hx = torch.cat([net, x], 1)
        z, r = torch.sigmoid(conv(hx, k)), torch.sigmoid(conv(hx, k + 1))
        net = (1 - z) * net + z * torch.tanh(conv(torch.cat([r * net, x], 1), k + 2))
    delta = conv(F.relu(conv(net, 11)), 12)
    mask = 0.25 * conv(F.relu(conv(net, 13)), 14)
    return torch.cat([net, flow + delta, mask], 1)


def sampled_grids(rays: Tensor, density: Tensor, colours: Tensor, *w: Tensor) -> Tensor:
    """DVGO: density and features by trilinear samples of grids along rays, a small network of views, composed colours."""
    a, ba, b, bb, wanted = w
    o, d = rays[:, :3].tanh(), F.normalize(rays[:, 3:], dim=-1)
    t = torch.linspace(0.0, 0.9, 48, device=rays.device, dtype=rays.dtype)
    p = (o[:, None] * 0.5 + d[:, None] * t[:, None])[None, :, None]
    sigma = F.grid_sample(density, p, align_corners=True).view(len(rays), -1)
    alpha = 1 - torch.exp(-F.softplus(sigma - 4) * 0.5)
    left = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-7], 1), 1)[:, :-1]
    f = F.grid_sample(colours, p, align_corners=True)[0].flatten(1).T
    view = (d[:, None] * 2.0 ** torch.arange(4, device=d.device)[:, None]).flatten(1)
    view = torch.cat([view.sin(), view.cos()], 1).repeat_interleave(48, 0)
    y = torch.sigmoid(F.linear(F.relu(F.linear(torch.cat([f, view], 1), a, ba)), b, bb)).view(len(rays), 48, 3)
    got = ((alpha * left)[..., None] * y).sum(1) + (left[:, -1] * (1 - alpha[:, -1]))[:, None]
    return F.mse_loss(got, wanted.sigmoid())


def random_crops(pixels: Tensor, frame: Tensor, jitter: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """A training pipeline on bytes: crops of random frames resized, flips, brightness and contrast, normalised, erased."""
    x = pixels.permute(0, 3, 1, 2).to(frame.dtype) / 255
    scale = 0.3 + 0.6 * torch.sigmoid(frame[:, :2])
    flip = torch.where(frame[:, 4] > 0, 1.0, -1.0).to(frame.dtype)
    zero = torch.zeros_like(flip)
    rows = [scale[:, 0] * flip, zero, (1 - scale[:, 0]) * frame[:, 2].tanh()]
    theta = torch.stack([*rows, zero, scale[:, 1], (1 - scale[:, 1]) * frame[:, 3].tanh()], 1).view(-1, 2, 3)
    h = pixels.shape[1] * 7 // 8
    grid = F.affine_grid(theta, [len(x), 3, h, h], align_corners=False)
    x = F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    b, c = (1 + 0.4 * jitter[:, k].tanh()[:, None, None, None] for k in (0, 1))
    x = (x * b).clamp(0, 1)
    grey = (0.299 * x[:, 0] + 0.587 * x[:, 1] + 0.114 * x[:, 2]).mean((1, 2))[:, None, None, None]
    x = ((x - grey) * c + grey).clamp(0, 1)
    x = (x - mean[:, None, None]) / std[:, None, None].exp()
    at = torch.arange(h, device=x.device)
    top = (torch.sigmoid(jitter[:, 2:]) * (h // 2)).long()
    inside = [(at >= top[:, k, None]) & (at < top[:, k, None] + h // 4) for k in (0, 1)]
    return x.masked_fill((inside[0][:, :, None] & inside[1][:, None])[:, None], 0).contiguous(memory_format=torch.channels_last)


def projection_head(x: Tensor, teacher: Tensor, centre: Tensor, *w: Tensor) -> Tensor:
    """DINO: an MLP to a narrow layer, a unit length, a weight-normed last layer, cross entropy with a centred teacher."""
    a, ba, b, bb, c, bc, v = w
    y = F.gelu(F.linear(F.gelu(F.linear(x, a, ba)), b, bb))
    y = F.normalize(F.linear(y, c, bc), dim=-1)
    y = F.linear(y, F.normalize(v, dim=1)).float() / 0.1
    p = ((teacher.float() - centre.float()) / 0.04).softmax(-1)
    return -(p * y.log_softmax(-1)).sum(-1).mean()


# ---- sizes ----------------------------------------------------------------------------------------------------------------


def convs(m: Make, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Weights of convolutions, each with gain and shift of a norm."""
    return [t for s in shapes for t in (weight(m, *s), m(2, s[0]))]


def known_convs(m: Make, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [t for s in shapes for t in (weight(m, *s), running(m, s[0]))]


def biased(m: Make, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Weights of layers, each with its bias."""
    return [t for s in shapes for t in (weight(m, *s), m(s[0]))]


REGNET = Sized(
    regnet_block,
    lambda m, b, c, o, h, g: [
        image(m, b, c, h, h),
        *convs(m, (o, c, 1, 1), (o, g, 3, 3)),
        weight(m, c // 4, o, 1, 1),
        weight(m, o, c // 4, 1, 1),
        *convs(m, (o, o, 1, 1), (o, c, 1, 1)),
    ],
    (2, 16, 12, 6, 4),
)
BOTTLENECKS = Sized(
    bottlenecks,
    lambda m, b, c, o, h: [
        m(b, c, h, h),
        *convs(m, (o // 4, c, 1, 1), (o // 4, o // 4, 3, 3), (o, o // 4, 1, 1)),
        *convs(m, (o // 4, o, 1, 1), (o // 4, o // 4, 3, 3), (o, o // 4, 1, 1)),
        *convs(m, (o, c, 1, 1)),
    ],
    (2, 4, 8, 7),
)
SWIN = Sized(
    window_block,
    lambda m, b, h, c, n: [
        m(b, h, h, c),
        *biased(m, (3 * c, c)),
        m(n, 1, 1) + 2,
        m(n, 64, 64),
        *biased(m, (c, c)),
        m(2, c),
        *biased(m, (4 * c, c), (c, 4 * c)),
        m(2, c),
    ],
    (1, 16, 8, 2),
)
DETR = Sized(
    detr_layer,
    lambda m, b, q, s, c, f: [
        m(q, b, c),
        m(s, b, c),
        m(s, b, c),
        m(q, c),
        m(b, s),
        *biased(m, (3 * c, c), (c, c), (3 * c, c), (c, c), (f, c), (c, f)),
        m(2, c),
        m(2, c),
        m(2, c),
    ],
    (2, 5, 9, 8, 12),
    SINGLE,
)
TWO_WAYS = Sized(
    two_ways,
    lambda m, b, q, s, c, f: [
        m(b, q, c),
        m(b, s, c),
        m(1, s, c),
        m(b, q, c),
        m(4, 2, c),
        *biased(m, (f, c), (c, f)),
        *(weight(m, *z) for z in ((c, c),) * 4 + ((c // 2, c), (c // 2, c), (c // 2, c), (c, c // 2)) * 2),
    ],
    (2, 3, 9, 32, 12),
)
PYRAMID = Sized(
    two_way_pyramid,
    lambda m, b, c, h: [
        *(image(m, b, c, h >> k, h >> k) for k in range(5)),
        m(5, 2).abs() + 0.5,
        m(3, 3).abs() + 0.5,
        m(8, c, 1, 3, 3) / 3,
        m(8, c, c, 1, 1) * c**-0.5,
        m(8, 2, c),
    ],
    (2, 4, 32),
)
UNET = Sized(
    unet_level,
    lambda m, b, c, o, h, s, e: [
        m(b, c, h, h),
        m(b, 4 * c),
        m(b, s, e),
        m(2, c),
        *biased(m, (o, c, 3, 3), (o, 4 * c)),
        m(2, o),
        *biased(m, (o, o, 3, 3), (o, c, 1, 1)),
        m(2, o),
        weight(m, o, o),
        m(2, o),
        weight(m, 3 * o, o),
        weight(m, o, o),
        m(2, o),
        weight(m, o, o),
        weight(m, 2 * o, e),
        weight(m, o, o),
        m(2, o),
        *biased(m, (8 * o, o), (o, 4 * o)),
        weight(m, o, o),
    ],
    (2, 4, 8, 4, 3, 6),
)
VAE = Sized(
    vae_middle,
    lambda m, b, c, h: [
        m(b, c, h, h),
        m(3, c),
        weight(m, c, c, 3, 3),
        m(3, c),
        weight(m, c, c, 3, 3),
        m(2, c),
        *biased(m, (3 * c, c), (c, c), (c, c, 3, 3)),
    ],
    (1, 8, 4),
)
PIXART = Sized(
    pixart_block,
    lambda m, b, n, c, s: [
        m(b, n, c),
        m(b, 6 * c),
        m(b, s, c),
        m(6, c),
        *biased(m, (3 * c, c), (c, c), (c, c), (2 * c, c), (c, c), (4 * c, c), (c, 4 * c)),
    ],
    (2, 6, 8, 3),
)


def flow_inputs(m: Make, b: int, c: int, k: int, h: int, w: int) -> list[Tensor]:
    shapes = [(2 * c, k, 1, 1), (c + c // 2, 2 * c, 3, 3), (c, 2, 7, 7), (c // 2, c, 3, 3), (c - 2, 2 * c, 3, 3)]
    shapes += [*((c, 3 * c, 1, 5),) * 3, *((c, 3 * c, 5, 1),) * 3]
    shapes += [(2 * c, c, 3, 3), (2, 2 * c, 3, 3), (2 * c, c, 3, 3), (576, 2 * c, 1, 1)]
    values = [torch.tanh(m(b, c, h, w)), F.relu(m(b, c, h, w)), m(b, k, h, w), m(b, 2, h, w)]
    return [*values, *(weight(m, *s) for s in shapes), m(sum(s[0] for s in shapes))]


FLOW = Sized(flow_update, flow_inputs, (1, 8, 6, 4, 5), SINGLE, tf32=True)
STEM_WIDTHS = (3, 16, 16, 32, 32, 96, 96, 256)


def stem_inputs(m: Make, b: int, h: int, c: int, part: int) -> list[Tensor]:
    """`part` divides the widths."""
    widths = [3, *(max(2, s // part) for s in STEM_WIDTHS[1:])]
    shapes = [(o, i, 3, 3) for i, o in pairwise(widths)]
    shapes += [(c, widths[-1], 3, 3), (c, 4, 3, 3), (c, c, 1, 1)]
    x = [m(b, 4, h // 8, h // 8), m(b, 3, h, h)]
    return [*x, *(weight(m, *s) for s in shapes), *(m(s[0]) for s in shapes)]


def level_sizes(h: int, w: int) -> list[tuple[int, int]]:
    """Five levels, each half of the one before, rounded up."""
    return [(-(-h // 2**k), -(-w // 2**k)) for k in range(5)]


def detector_inputs(m: Make, b: int, c: int, k: int, h: int) -> list[Tensor]:
    xs = [image(m, b, c << i, h >> i, h >> i) for i in range(3)]
    mid, wide = max(16, c // 4), max(c, min(k, 100))
    for i in range(3):
        x = c << i
        xs += [*known_convs(m, (mid, x, 3, 3), (mid, mid, 3, 3)), weight(m, 64, mid, 1, 1)]
        xs += [*known_convs(m, (wide, x, 3, 3), (wide, wide, 3, 3)), weight(m, k, wide, 1, 1)]
    return xs


def exchange_inputs(m: Make, b: int, c: int, h: int, w: int) -> list[Tensor]:
    xs = [image(m, b, c << k, h >> k, w >> k) for k in range(3)]
    shapes = [(c, 2 * c, 1, 1), (c, 4 * c, 1, 1), (2 * c, c, 3, 3), (2 * c, 4 * c, 1, 1)]
    shapes += [(c, c, 3, 3), (4 * c, c, 3, 3), (4 * c, 2 * c, 3, 3)]
    return [*xs, *convs(m, *shapes)]


BLOCKS: tuple[Block, ...] = (
    REGNET.block("regnet block", 32, 224, 448, 56, 56, training=True),
    REGNET.block("regnet block", 17, 72, 216, 61, 24),
    BOTTLENECKS.block("bottlenecks", 32, 256, 512, 56, training=True),
    Sized(
        fused_stage,
        lambda m, b, c, o, h: [
            image(m, b, c, h, h),
            *known_convs(m, (4 * c, c, 3, 3), (o, 4 * c, 1, 1)),
            *known_convs(m, *((4 * o, o, 3, 3), (o, 4 * o, 1, 1)) * 2),
        ],
        (2, 4, 6, 6),
    ).block("fused stage", 64, 24, 48, 150),
    Sized(
        mobile_stage,
        lambda m, b, c, o, h: [
            image(m, b, c, h, h),
            *convs(m, (6 * c, c, 1, 1), (6 * c, 1, 3, 3), (o, 6 * c, 1, 1)),
            *convs(m, (6 * o, o, 1, 1), (6 * o, 1, 3, 3), (o, 6 * o, 1, 1), (6 * o, o, 1, 1)),
        ],
        (2, 4, 6, 7),
    ).block("mobile stage", 96, 24, 32, 56, training=True),
    Sized(
        ghost_bottleneck,
        lambda m, b, c, e, o, h: [
            m(b, c, h, h),
            *convs(m, (e // 2, c, 1, 1), (e // 2, 1, 3, 3), (e, 1, 3, 3)),
            weight(m, e // 4, e, 1, 1),
            weight(m, e, e // 4, 1, 1),
            *convs(m, (o // 2, e, 1, 1), (o // 2, 1, 3, 3), (c, 1, 3, 3), (o, c, 1, 1), (e // 2, o, 1, 1)),
        ],
        (2, 4, 24, 8, 6),
    ).block("ghost bottleneck", 64, 24, 72, 40, 56, training=True),
    Sized(
        merged_branches,
        lambda m, b, c, o, h: [
            m(b, c, h, h),
            weight(m, o, c, 3, 3),
            running(m, o),
            weight(m, o, c, 1, 1),
            running(m, o),
            running(m, o),
        ],
        (2, 4, 4, 5),
    ).block("merged branches", 128, 192, 192, 28),
    Sized(
        pooled_partial,
        lambda m, b, c, h: [
            image(m, b, c, h, h),
            *convs(m, (c // 2, c, 1, 1), (c // 2, c // 2, 1, 1), (c // 2, c // 2, 3, 3), (c // 2, c, 1, 1), (c, c, 1, 1)),
            *convs(m, (c // 2, c, 1, 1), (c, 2 * c, 1, 1)),
        ],
        (2, 32, 8),
    ).block("pooled partial", 16, 512, 20, training=True),
    Sized(
        dense_residual,
        lambda m, b, c, g, h: [m(b, c, h, h), *biased(m, *((g, c + k * g, 3, 3) for k in range(4)), (c, c + 4 * g, 3, 3))],
        (1, 4, 3, 5),
        SINGLE,
        tf32=True,
    ).block("dense residual", 16, 64, 32, 64, training=True),
    Sized(
        convnext_stage,
        lambda m, b, c, o, h: [
            m(b, c, h, h),
            m(2, c),
            *biased(m, (o, c, 2, 2)),
            *(t for _ in range(2) for t in (*biased(m, (o, 1, 7, 7)), m(2, o), *biased(m, (4 * o, o), (o, 4 * o)), m(o))),
        ],
        (1, 4, 6, 16),
    ).block("convnext stage", 32, 96, 192, 56, training=True),
    SWIN.block("window block", 32, 64, 96, 3),
    SWIN.block("window block", 12, 32, 192, 6, training=True),
    Sized(
        pooled_relative,
        lambda m, b, c, o, h, n: [
            m(b, c, 2 * h, 2 * h),
            weight(m, o, c, 1, 1),
            m(2, c),
            weight(m, 3 * o, c),
            m((2 * h - 1) ** 2, n),
            weight(m, o, o),
            m(2, o),
            weight(m, 4 * o, o),
            weight(m, o, 4 * o),
        ],
        (2, 4, 8, 3, 2),
    ).block("pooled relative", 32, 192, 384, 14, 12, training=True),
    Sized(
        pooled_clips,
        lambda m, b, h, c, d: [
            m(b, 1 + 4 * h * h, c),
            m(2, c),
            *biased(m, (3 * c, c)),
            m(3, d, 1, 3, 3, 3) / 27**0.5,
            m(3, 2, d),
            *biased(m, (c, c)),
        ],
        (2, 4, 8, 4),
    ).block("pooled clips", 8, 28, 192, 96, training=True),
    Sized(
        divided_block,
        lambda m, b, t, p, c: [
            m(b, t, p, c),
            *(z for _ in range(2) for z in (m(2, c), weight(m, 3 * c, c), weight(m, c, c))),
            m(2, c),
            *biased(m, (4 * c, c), (c, 4 * c)),
        ],
        (2, 3, 5, 8),
    ).block("divided block", 4, 8, 196, 768, training=True),
    Sized(
        eva_block,
        lambda m, b, n, c, d, f: [
            m(b, n + 1, c),
            m(n, d).sin(),
            m(n, d).cos(),
            m(2, c),
            *biased(m, (c, c)),
            weight(m, c, c),
            *biased(m, (c, c)),
            m(2, c),
            *biased(m, (c, c)),
            m(2, c),
            weight(m, f, c),
            weight(m, f, c),
            m(2, f),
            weight(m, c, f),
        ],
        (2, 5, 8, 4, 10),
    ).block("eva block", 16, 576, 1024, 64, 2730),
    DETR.block("detr layer", 8, 100, 850, 256, 2048, training=True),
    DETR.block("detr layer", 2, 300, 1064, 256, 1024),
    TWO_WAYS.block("two ways", 16, 7, 4096, 256, 2048),
    TWO_WAYS.block("two ways", 8, 9, 4096, 256, 2048, training=True),
    PYRAMID.block("two way pyramid", 8, 112, 96, training=True),
    Sized(
        shared_heads,
        lambda m, b, c, k, h, w: [
            *(m(b, c, *s) for s in level_sizes(h, w)),
            m(4, c, c, 3, 3) / (3 * c**0.5),
            m(4, c),
            m(4, 2, c),
            *biased(m, (k, c, 3, 3)),
            ids(m, k + 1, b, sum(i * j for i, j in level_sizes(h, w))),
        ],
        (1, 16, 3, 7, 9),
    ).block("shared heads", 4, 256, 80, 100, 136, training=True),
    Sized(
        class_decoder,
        lambda m, b, c, k, h: [
            image(m, b, c, h, h),
            image(m, b, c, 4 * h - 3, 4 * h - 3),
            ids(m, k, b, 16 * h - 15, 16 * h - 15).masked_fill(m(b, 16 * h - 15, 16 * h - 15) > 1.5, 255),
            *convs(m, (c * 3 // 16, c, 1, 1), (c, c + c * 3 // 16, 3, 3), (c, c, 3, 3)),
            *biased(m, (k, c, 1, 1)),
        ],
        (2, 16, 5, 2),
    ).block("class decoder", 8, 256, 21, 33, training=True),
    Sized(exchanged, exchange_inputs, (2, 4, 8, 8)).block("exchanged", 32, 32, 64, 48, training=True),
    Sized(
        levels_to_classes,
        lambda m, b, c, k, h: [
            *(m(b, s * c // 8, h >> i, h >> i) for i, s in enumerate((2, 4, 10, 16))),
            *(weight(m, 8 * c, s * c // 8) for s in (2, 4, 10, 16)),
            *convs(m, (8 * c, 32 * c, 1, 1)),
            *biased(m, (k, 8 * c, 1, 1)),
            ids(m, k, b, 4 * h, 4 * h),
        ],
        (2, 4, 5, 8),
    ).block("levels to classes", 8, 32, 150, 128, training=True),
    Sized(
        volume_levels,
        lambda m, b, c, d, h: [
            m(b, c, d, h, h),
            ids(m, 3, b, d, h, h),
            weight(m, c, c, 3, 3, 3),
            m(3, c),
            weight(m, 2 * c, c, 3, 3, 3),
            m(3, 2 * c),
            weight(m, 2 * c, 2 * c, 3, 3, 3),
            m(3, 2 * c),
            m(2 * c, c, 2, 2, 2) * (2 * c) ** -0.5,
            weight(m, c, 2 * c, 3, 3, 3),
            m(3, c),
            *biased(m, (3, c, 1, 1, 1)),
        ],
        (1, 4, 4, 6),
        SINGLE,
        tf32=True,
    ).block("volume levels", 2, 32, 48, 80, training=True),
    Sized(decoded_levels, detector_inputs, (1, 4, 3, 8)).block("decoded levels", 16, 64, 80, 80),
    Sized(
        mask_head,
        lambda m, b, c, h, k: [
            m(b, c, h, h),
            ids(m, k, b),
            m(b, 2 * h, 2 * h),
            m(4, c, c, 3, 3) / (3 * c**0.5),
            m(4, c),
            m(c, c, 2, 2) * c**-0.5,
            m(c),
            *biased(m, (k, c, 1, 1)),
        ],
        (3, 4, 5, 6),
    ).block("mask head", 200, 256, 14, 80, training=True),
    Sized(
        region_head,
        lambda m, b, c, k, f: [
            m(b, c, 7, 7),
            ids(m, k, b),
            m(b, 4),
            *biased(m, (f, 49 * c), (f, f), (k, f), (4 * k, f)),
        ],
        (6, 2, 5, 8),
        SINGLE,
        tf32=True,
    ).block("region head", 1024, 256, 81, 1024, training=True),
    Sized(
        depth_fusion,
        lambda m, b, c, h: [
            m(b, c, h, h),
            m(b, c, h, h),
            m(4, c, c, 3, 3) / (3 * c**0.5),
            m(4, c),
            *biased(m, (c, c, 1, 1), (c // 2, c, 3, 3), (1, c // 2, 1, 1)),
        ],
        (2, 4, 4),
    ).block("depth fusion", 4, 256, 74, training=True),
    UNET.block("unet level", 2, 320, 640, 64, 77, 2048),
    UNET.block("unet level", 4, 640, 1280, 32, 77, 2048, training=True),
    VAE.block("vae middle", 1, 512, 96),
    VAE.block("vae middle", 4, 512, 32, training=True),
    Sized(conditioning_stem, stem_inputs, (1, 16, 6, 8)).block("conditioning stem", 4, 512, 320, 1, training=True),
    PIXART.block("pixart block", 2, 4096, 1152, 300),
    PIXART.block("pixart block", 8, 1024, 1152, 120, training=True),
    Sized(
        mixed_time,
        lambda m, b, f, c, h, w: [
            m(b * f, c, h, w),
            m(b, 4 * c),
            m(1),
            m(3, c),
            weight(m, c, c, 3, 3),
            *biased(m, (c, 4 * c)),
            m(3, c),
            weight(m, c, c, 3, 3),
            m(3, c),
            weight(m, c, c, 3, 1, 1),
            weight(m, c, 4 * c),
            m(3, c),
            weight(m, c, c, 3, 1, 1),
        ],
        (2, 3, 8, 4, 5),
    ).block("mixed time", 2, 14, 320, 40, 72),
    Sized(
        depthwise_volumes,
        lambda m, b, c, o, t, h: [
            m(b, c, t, h, h),
            *convs(m, (9 * c // 4, c, 1, 1, 1), (9 * c // 4, 1, 3, 3, 3)),
            *biased(m, (8, 9 * c // 4, 1, 1, 1), (9 * c // 4, 8, 1, 1, 1)),
            *convs(m, (o, 9 * c // 4, 1, 1, 1), (o, c, 1, 1, 1)),
        ],
        (2, 4, 6, 3, 6),
    ).block("depthwise volumes", 8, 24, 48, 16, 56, training=True),
    Sized(
        denoiser_loss,
        lambda m, b, h, c: [
            m(b, 3, h, h),
            m(b, 3, h, h),
            m(b),
            weight(m, c, 3, 3, 3),
            weight(m, c, c),
            weight(m, c, c, 3, 3),
            weight(m, 3, c, 3, 3),
        ],
        (2, 5, 8),
        SINGLE,
    ).block("denoiser loss", 64, 64, 128, training=True),
    Sized(
        critic_end,
        lambda m, b, c, h, f: [
            m(b, c, h, h),
            *biased(m, (c, c, 3, 3), (c, c, 3, 3)),
            weight(m, c, c, 1, 1),
            *biased(m, (c, c + 1, 3, 3), (f, c * h * h // 4), (1, f)),
        ],
        (8, 4, 4, 6),
    ).block("critic end", 32, 512, 8, 512, training=True),
    FLOW.block("flow update", 1, 128, 324, 55, 128),
    FLOW.block("flow update", 2, 128, 324, 46, 62, training=True),
    Sized(
        sampled_grids,
        lambda m, n, g, c, f: [
            m(n, 6),
            m(1, 1, g, g, g),
            m(1, c, g, g, g),
            *biased(m, (f, c + 24), (3, f)),
            m(n, 3),
        ],
        (5, 6, 3, 8),
        SINGLE,
    ).block("sampled grids", 8192, 160, 12, 128, training=True),
    Sized(
        random_crops,
        lambda m, b, h: [ids(m, 256, b, h, h, 3).to(torch.uint8), m(b, 5), m(b, 4), m(3), m(3)],
        (2, 16),
        SINGLE,
    ).block("random crops", 128, 256),
    Sized(
        projection_head,
        lambda m, b, c, h, d, k: [m(b, c), m(b, k), m(k), *biased(m, (h, c), (h, h), (d, h)), weight(m, k, d)],
        (4, 6, 8, 5, 11),
    ).block("projection head", 256, 768, 2048, 256, 65536, training=True),
)
