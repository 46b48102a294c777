"""Blocks of networks for images, as their papers' code has them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, image, weight


def vgg_stage(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """Two convolutions with biases and ReLU, and a pool."""
    return F.max_pool2d(F.relu(F.conv2d(F.relu(F.conv2d(x, w, b, padding=1)), v, c, padding=1)), 2)


def dense_layer(x: Tensor, norms: Tensor, inner: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """DenseNet: norms in front of a narrow 1x1 and a 3x3 convolution, whose channels join those of the input."""
    y = F.conv2d(F.relu(F.batch_norm(x, None, None, norms[0], norms[1], True)), w)
    y = F.conv2d(F.relu(F.batch_norm(y, None, None, inner[0], inner[1], True)), v, padding=1)
    return torch.cat([x, y], 1)


def inception(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Four branches side by side."""
    three = F.relu(F.conv2d(F.relu(F.conv2d(x, b)), c, padding=1))
    five = F.relu(F.conv2d(F.relu(F.conv2d(x, d)), e, padding=2))
    pooled = F.relu(F.conv2d(F.max_pool2d(x, 3, 1, 1), f))
    return torch.cat([F.relu(F.conv2d(x, a)), three, five, pooled], 1)


def squeezed(x: Tensor, w: Tensor, norm: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """SE-ResNet: the end of a block whose channels are weighted by means of the image."""
    y = F.batch_norm(F.conv2d(x, w), None, None, norm[0], norm[1], True)
    s = F.relu(F.linear(y.mean((2, 3)), down))
    return F.relu(y * torch.sigmoid(F.linear(s, up))[:, :, None, None] + x)


def top_down(fine: Tensor, coarse: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """A feature pyramid: a lateral 1x1 convolution, the coarser level twice as large, a 3x3 convolution."""
    merged = F.conv2d(fine, w, b) + F.interpolate(coarse, scale_factor=2.0, mode="nearest")
    return F.conv2d(merged, v, c, padding=1)


def shuffled_up(x: Tensor, w: Tensor, b: Tensor, slope: Tensor) -> Tensor:
    """EDSR's upsampler: a convolution into four times the channels, pixels shuffled, a leaky ReLU that learns."""
    return F.prelu(F.pixel_shuffle(F.conv2d(x, w, b, padding=1), 2), slope)


def merged_patches(x: Tensor, gain: Tensor, bias: Tensor, w: Tensor) -> Tensor:
    """Swin: four neighbours' channels normalised and projected."""
    parts = [x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]]
    y = torch.cat(parts, -1)
    return F.linear(F.layer_norm(y, y.shape[-1:], gain, bias), w)


def style_residual(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """CycleGAN: reflected edges, convolutions, norms of each image and channel, ReLU."""
    y = F.relu(F.instance_norm(F.conv2d(F.pad(x, (1,) * 4, "reflect"), w)))
    return F.relu(x + F.instance_norm(F.conv2d(F.pad(y, (1,) * 4, "reflect"), v)))


def attention_gate(skip: Tensor, g: Tensor, wx: Tensor, wg: Tensor, b: Tensor, psi: Tensor) -> Tensor:
    """Attention U-Net: a skip weighted by what a coarser level says."""
    a = F.relu(F.conv2d(skip, wx, stride=2) + F.conv2d(g, wg, b))
    a = torch.sigmoid(F.conv2d(a, psi))
    return skip * F.interpolate(a, size=skip.shape[2:], mode="bilinear", align_corners=False)


def response_normed(x: Tensor, dw: Tensor, norm: Tensor, up: Tensor, grn: Tensor, down: Tensor) -> Tensor:
    """ConvNeXt V2: a depthwise 7x7 convolution, and a response norm between the two linear layers."""
    y = F.conv2d(x, dw, padding=3, groups=x.shape[1]).permute(0, 2, 3, 1)
    y = F.gelu(F.linear(F.layer_norm(y, y.shape[-1:], norm[0], norm[1]), up))
    g = y.float().norm(dim=(1, 2), keepdim=True)
    y = grn[0] * (y * (g / (g.mean(-1, keepdim=True) + 1e-6)).to(y.dtype)) + grn[1] + y
    return x + F.linear(y, down).permute(0, 3, 1, 2)


def unet_step_up(x: Tensor, skip: Tensor, w: Tensor, b: Tensor, v: Tensor, norm: Tensor) -> Tensor:
    """A transposed convolution beside the skip, a convolution and a norm with ReLU."""
    y = torch.cat([skip, F.conv_transpose2d(x, w, b, stride=2)], 1)
    return F.relu(F.batch_norm(F.conv2d(y, v, padding=1), None, None, norm[0], norm[1], True))


def fire(x: Tensor, s: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """SqueezeNet: few channels, made many by 1x1 and 3x3 convolutions."""
    y = F.relu(F.conv2d(x, s))
    return F.relu(torch.cat([F.conv2d(y, a), F.conv2d(y, b, padding=1)], 1) + bias[:, None, None])


def shuffle_unit(x: Tensor, a: Tensor, norms: Tensor, dw: Tensor, b: Tensor) -> Tensor:
    """ShuffleNet V2: half of the channels through three convolutions with norms, then all shuffled."""
    left, y = x.chunk(2, 1)
    y = F.relu(F.batch_norm(F.conv2d(y, a), None, None, norms[0], norms[1], True))
    y = F.batch_norm(F.conv2d(y, dw, padding=1, groups=y.shape[1]), None, None, norms[2], norms[3], True)
    y = F.relu(F.batch_norm(F.conv2d(y, b), None, None, norms[4], norms[5], True))
    n, c, h, w = x.shape
    return torch.cat([left, y], 1).view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def pooled_pyramid(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """PSPNet: means of several grids, projected, as large as the image again."""
    levels = [x]
    for k, bins in enumerate((1, 2, 3, 6)):
        y = F.relu(F.conv2d(F.adaptive_avg_pool2d(x, bins), w[k]))
        levels.append(F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False))
    return F.relu(F.conv2d(torch.cat(levels, 1), v))


def mobile_vit(x: Tensor, wqkv: Tensor, wo: Tensor, gain: Tensor) -> Tensor:
    """MobileViT: attention among the pixels that have the same place in their patches."""
    n, c, h, w = x.shape
    y = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 3, 5, 2, 4, 1).reshape(n * 4, -1, c)
    q, k, v = F.linear(F.layer_norm(y, (c,), gain), wqkv).view(n * 4, -1, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
    y = y + F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), wo)
    return y.view(n, 2, 2, h // 2, w // 2, c).permute(0, 5, 3, 1, 4, 2).reshape(n, c, h, w)


def generator_head(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    """The end of a generator: nearest pixels, a convolution with leaky ReLU, one into three colours, tanh."""
    y = F.leaky_relu(F.conv2d(F.interpolate(x, scale_factor=2.0), w, b, padding=1), 0.2)
    return torch.tanh(F.conv2d(y, v, c, padding=1))


def discriminator(x: Tensor, w: Tensor, v: Tensor, norm: Tensor, u: Tensor) -> Tensor:
    """DCGAN's discriminator: convolutions of 4x4 in steps of 2 with leaky ReLU."""
    y = F.leaky_relu(F.conv2d(x, w, stride=2, padding=1), 0.2)
    y = F.leaky_relu(F.batch_norm(F.conv2d(y, v, stride=2, padding=1), None, None, norm[0], norm[1], True), 0.2)
    return F.conv2d(y, u, stride=2, padding=1).mean((1, 2, 3))


def separable(x: Tensor, dw: Tensor, pw: Tensor, norm: Tensor) -> Tensor:
    """Xception: ReLU, a depthwise and a 1x1 convolution, a norm; the image is added, SiLU."""
    y = F.conv2d(F.conv2d(F.relu(x), dw, padding=1, groups=x.shape[1]), pw)
    return F.silu(x + F.batch_norm(y, None, None, norm[0], norm[1], True))


def group_normed(x: Tensor, w: Tensor, v: Tensor, norms: Tensor) -> Tensor:
    """A residual block with group norms and standard ReLU."""
    y = F.relu(F.group_norm(F.conv2d(x, w, padding=1), 8, norms[0], norms[1]))
    return F.relu(x + F.group_norm(F.conv2d(y, v, padding=1), 8, norms[2], norms[3]))


def deep_stem(x: Tensor, w: Tensor, v: Tensor, u: Tensor, norms: Tensor) -> Tensor:
    """ResNet-D: three small convolutions and a pool in place of one of 7x7, in inference."""
    y = x
    for k, (one, stride) in enumerate(((w, 2), (v, 1), (u, 1))):
        scale, shift = norms[2 * k, : one.shape[0]], norms[2 * k + 1, : one.shape[0]]
        y = F.relu(F.conv2d(y, one, stride=stride, padding=1) * scale[:, None, None] + shift[:, None, None])
    return F.max_pool2d(y, 3, 2, 1)


BN = Sized(
    dense_layer,
    lambda m, b, c, h: [image(m, b, c, h, h), m(2, c), m(2, 128), weight(m, 128, c, 1, 1), weight(m, 32, 128, 3, 3)],
    (2, 8, 5),
)
SQUEEZED = Sized(
    squeezed,
    lambda m, b, c, h: [
        image(m, b, c, h, h), weight(m, c, c, 1, 1), m(2, c), weight(m, max(1, c // 16), c), weight(m, c, max(1, c // 16)),
    ],
    (2, 16, 5),
)  # fmt: skip
TOP = Sized(
    top_down,
    lambda m, b, c, o, h: [
        image(m, b, c, 2 * h, 2 * h), image(m, b, o, h, h), weight(m, o, c, 1, 1), m(o), weight(m, o, o, 3, 3), m(o),
    ],
    (2, 6, 4, 3),
)  # fmt: skip
RESPONSE = Sized(
    response_normed,
    lambda m, b, c, h: [
        image(m, b, c, h, h), weight(m, c, 1, 7, 7), m(2, c), weight(m, 4 * c, c), m(2, 4 * c), weight(m, c, 4 * c),
    ],
    (2, 6, 7),
)  # fmt: skip
MERGED = Sized(merged_patches, lambda m, b, h, c: [m(b, h, h, c), m(4 * c), m(4 * c), weight(m, 2 * c, 4 * c)], (2, 6, 4))
MOBILE = Sized(mobile_vit, lambda m, b, c, h: [m(b, c, h, h), weight(m, 3 * c, c), weight(m, c, c), m(c)], (2, 8, 4))
BLOCKS: tuple[Block, ...] = (
    Sized(
        vgg_stage,
        lambda m, b, c, o, h: [m(b, c, h, h), weight(m, o, c, 3, 3), m(o), weight(m, o, o, 3, 3), m(o)],
        (2, 3, 4, 6),
    ).block("vgg stage", 12, 64, 128, 110),
    BN.block("dense layer", 24, 192, 28, training=True),
    Sized(
        inception,
        lambda m, b, c, h: [
            image(m, b, c, h, h),
            weight(m, 64, c, 1, 1),
            weight(m, 96, c, 1, 1),
            weight(m, 128, 96, 3, 3),
            weight(m, 16, c, 1, 1),
            weight(m, 32, 16, 5, 5),
            weight(m, 32, c, 1, 1),
        ],
        (2, 6, 5),
    ).block("inception", 48, 192, 28),
    SQUEEZED.block("squeezed", 48, 512, 20),
    SQUEEZED.block("squeezed", 48, 256, 33, training=True),
    TOP.block("top down", 6, 512, 256, 25),
    TOP.block("top down", 4, 256, 192, 40, training=True),
    Sized(shuffled_up, lambda m, b, c, h, w: [m(b, c, h, w), weight(m, 4 * c, c, 3, 3), m(4 * c), m(c)], (2, 3, 4, 5)).block(
        "shuffled up", 2, 64, 180, 242
    ),
    MERGED.block("merged patches", 24, 54, 96),
    MERGED.block("merged patches", 40, 28, 192, training=True),
    Sized(style_residual, lambda m, b, c, h: [m(b, c, h, h), weight(m, c, c, 3, 3), weight(m, c, c, 3, 3)], (2, 4, 6)).block(
        "style residual", 4, 256, 63, training=True
    ),
    Sized(
        attention_gate,
        lambda m, b, c, h: [
            m(b, c, 2 * h, 2 * h),
            m(b, 2 * c, h, h),
            weight(m, c, c, 2, 2),
            weight(m, c, 2 * c, 1, 1),
            m(c),
            weight(m, 1, c, 1, 1),
        ],
        (2, 4, 3),
    ).block("attention gate", 8, 128, 44, training=True),
    RESPONSE.block("response normed", 24, 192, 27),
    RESPONSE.block("response normed", 24, 96, 40, training=True),
    Sized(
        unet_step_up,
        lambda m, b, c, h: [
            image(m, b, 2 * c, h, h),
            image(m, b, c, 2 * h, 2 * h),
            weight(m, 2 * c, c, 2, 2) * 2,
            m(c),
            weight(m, c, 2 * c, 3, 3),
            m(2, c),
        ],
        (2, 4, 3),
    ).block("unet step up", 6, 128, 44, training=True),
    Sized(
        fire,
        lambda m, b, c, h: [
            image(m, b, c, h, h),
            weight(m, c // 8, c, 1, 1),
            weight(m, c // 2, c // 8, 1, 1),
            weight(m, c // 2, c // 8, 3, 3),
            m(c),
        ],
        (2, 8, 5),
    ).block("fire", 40, 256, 27),
    Sized(
        shuffle_unit,
        lambda m, b, c, h: [
            image(m, b, 2 * c, h, h),
            weight(m, c, c, 1, 1),
            m(6, c),
            weight(m, c, 1, 3, 3),
            weight(m, c, c, 1, 1),
        ],
        (2, 4, 5),
    ).block("shuffle unit", 96, 116, 28, training=True),
    Sized(
        pooled_pyramid,
        lambda m, b, c, h: [m(b, c, h, h), m(4, c // 4, c, 1, 1) * c**-0.5, weight(m, c // 2, 2 * c, 1, 1)],
        (2, 8, 7),
    ).block("pooled pyramid", 6, 1024, 60),
    MOBILE.block("mobile vit", 24, 144, 32),
    MOBILE.block("mobile vit", 24, 192, 24, training=True),
    Sized(
        generator_head,
        lambda m, b, c, h: [m(b, c, h, h), weight(m, c // 2, c, 3, 3), m(c // 2), weight(m, 3, c // 2, 3, 3), m(3)],
        (2, 4, 5),
    ).block("generator head", 6, 64, 120),
    Sized(
        discriminator,
        lambda m, b, c, h: [
            image(m, b, 3, h, h),
            weight(m, c, 3, 4, 4),
            weight(m, 2 * c, c, 4, 4),
            m(2, 2 * c),
            weight(m, 1, 2 * c, 4, 4),
        ],
        (2, 4, 16),
    ).block("discriminator", 48, 64, 128, training=True),
    Sized(
        separable, lambda m, b, c, h: [image(m, b, c, h, h), weight(m, c, 1, 3, 3), weight(m, c, c, 1, 1), m(2, c)], (2, 4, 5)
    ).block("separable", 24, 728, 19, training=True),
    Sized(
        group_normed,
        lambda m, b, c, h: [image(m, b, c, h, h), weight(m, c, c, 3, 3), weight(m, c, c, 3, 3), m(4, c)],
        (2, 16, 5),
    ).block("group normed", 12, 128, 45, training=True),
    Sized(
        deep_stem,
        lambda m, b, h: [
            image(m, b, 3, h, h),
            weight(m, 32, 3, 3, 3),
            weight(m, 32, 32, 3, 3),
            weight(m, 64, 32, 3, 3),
            m(6, 64),
        ],
        (2, 12),
    ).block("deep stem", 40, 226),
)
