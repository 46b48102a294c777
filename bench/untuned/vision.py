"""Blocks of image, audio and video models, as their authors write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, both, image, mlp_weights


def trained_norm(y: Tensor, norm: Tensor) -> Tensor:
    return F.batch_norm(y, None, None, norm[0], norm[1], training=True)


def folded_norm(y: Tensor, norm: Tensor) -> Tensor:
    return F.batch_norm(y, norm[0], norm[1].abs() + 0.5, norm[2], norm[3])


def squeeze_excite(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, project: Tensor, norm: Tensor) -> Tensor:
    s = F.silu(F.conv2d(x.mean((2, 3), keepdim=True), w1, b1))
    return folded_norm(F.conv2d(x * torch.sigmoid(F.conv2d(s, w2, b2)), project), norm)


def separable(x: Tensor, deep: Tensor, n1: Tensor, point: Tensor, n2: Tensor) -> Tensor:
    y = F.silu(folded_norm(F.conv2d(x, deep, padding=2, groups=x.shape[1]), n1))
    return F.silu(folded_norm(F.conv2d(y, point), n2))


def separable_trained(x: Tensor, deep: Tensor, n1: Tensor, point: Tensor, n2: Tensor) -> Tensor:
    y = F.silu(trained_norm(F.conv2d(x, deep, padding=1, groups=x.shape[1]), n1))
    return F.silu(trained_norm(F.conv2d(y, point), n2))


def diffusion_res_block(x: Tensor, time: Tensor, n1: Tensor, w1: Tensor, wt: Tensor, n2: Tensor, w2: Tensor) -> Tensor:
    y = F.conv2d(F.silu(F.group_norm(x, 32, n1[0], n1[1])), w1, padding=1)
    y = y + F.linear(F.silu(time), wt)[:, :, None, None]
    return x + F.conv2d(F.silu(F.group_norm(y, 32, n2[0], n2[1])), w2, padding=1)


def window_attention(x: Tensor, qkv: Tensor, bias: Tensor, table: Tensor, out: Tensor) -> Tensor:
    """Swin's attention in windows of 7 x 7 (Liu et al. 2021), x of (images, 56, 56, channels)."""
    n, h, w, c = x.shape
    y = x.view(n, h // 7, 7, w // 7, 7, c).transpose(2, 3).reshape(-1, 49, c)
    q, k, v = F.linear(y, qkv, bias).view(-1, 49, 3, c // 32, 32).permute(2, 0, 3, 1, 4)
    y = ((q * 32**-0.5) @ k.transpose(-1, -2) + table).softmax(-1) @ v
    y = F.linear(y.transpose(1, 2).reshape(-1, 49, c), out)
    return x + y.view(n, h // 7, w // 7, 7, 7, c).transpose(2, 3).reshape(n, h, w, c)


def axial_attention(x: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """Attention along the rows of (images, height, width, channels)."""
    q, k, v = F.linear(x, qkv).unflatten(-1, (3, -1, 32)).permute(3, 0, 1, 4, 2, 5)
    y = F.scaled_dot_product_attention(q, k, v)
    return x + F.linear(y.transpose(2, 3).flatten(3), out)


def patch_embedding(x: Tensor, w: Tensor, b: Tensor, first: Tensor, positions: Tensor, norm: Tensor) -> Tensor:
    y = F.conv2d(x, w, b, stride=16).flatten(2).transpose(1, 2)
    y = torch.cat([first.expand(y.shape[0], 1, -1), y], 1) + positions
    return F.layer_norm(y, y.shape[-1:], norm[0], norm[1])


def patch_merging(x: Tensor, norm: Tensor, w: Tensor) -> Tensor:
    y = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
    return F.linear(F.layer_norm(y, y.shape[-1:], norm[0], norm[1]), w)


def fire(x: Tensor, squeeze: Tensor, b0: Tensor, w1: Tensor, b1: Tensor, w3: Tensor, b3: Tensor) -> Tensor:
    y = F.relu(F.conv2d(x, squeeze, b0))
    return torch.cat([F.relu(F.conv2d(y, w1, b1)), F.relu(F.conv2d(y, w3, b3, padding=1))], 1)


def style_layer(x: Tensor, w: Tensor, b: Tensor, norm: Tensor) -> Tensor:
    y = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), w, b)
    return F.relu(F.instance_norm(y, weight=norm[0], bias=norm[1]))


def pyramid_step(low: Tensor, side: Tensor, lateral: Tensor, b: Tensor, smooth: Tensor) -> Tensor:
    y = F.conv2d(side, lateral, b) + F.interpolate(low, scale_factor=2.0, mode="nearest")
    return F.conv2d(y, smooth, padding=1)


def decoder_step(x: Tensor, skip: Tensor, w: Tensor, norm: Tensor) -> Tensor:
    y = torch.cat([F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False), skip], 1)
    return F.relu(folded_norm(F.conv2d(y, w, padding=1), norm))


def super_resolution(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    y = F.leaky_relu(F.pixel_shuffle(F.conv2d(x, w1, b1, padding=1), 2), 0.2)
    return F.conv2d(y, w2, b2, padding=1).clamp(0, 1)


def shuffle_unit(x: Tensor, w1: Tensor, n1: Tensor, w2: Tensor, n2: Tensor) -> Tensor:
    y = F.relu(folded_norm(F.conv2d(x, w1, groups=4), n1))
    y = y.unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)
    return F.relu(x + folded_norm(F.conv2d(y, w2, groups=4), n2))


def video_block(x: Tensor, spatial: Tensor, n1: Tensor, temporal: Tensor, n2: Tensor) -> Tensor:
    """A (2+1)-d convolution (Tran et al. 2018)."""
    y = F.relu(folded_norm(F.conv3d(x, spatial, padding=(0, 1, 1)), n1))
    return F.relu(x + folded_norm(F.conv3d(y, temporal, padding=(1, 0, 0)), n2))


def wave_features(x: Tensor, w1: Tensor, norm: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    y = F.gelu(F.group_norm(F.conv1d(x, w1, stride=5), w1.shape[0], norm[0], norm[1]))
    return F.gelu(F.conv1d(F.gelu(F.conv1d(y, w2, stride=2)), w3, stride=2))


def vocoder_stage(x: Tensor, up: Tensor, b: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = F.conv_transpose1d(F.leaky_relu(x, 0.1), up, b, stride=4, padding=2)
    z = F.conv1d(F.leaky_relu(y, 0.1), w1, padding=3, dilation=3)
    return y + F.conv1d(F.leaky_relu(z, 0.1), w2, padding=1)


def conformer_module(x: Tensor, norm: Tensor, w1: Tensor, deep: Tensor, bn: Tensor, w2: Tensor) -> Tensor:
    y = F.glu(F.linear(F.layer_norm(x, x.shape[-1:], norm[0], norm[1]), w1), -1).transpose(1, 2)
    y = F.silu(folded_norm(F.conv1d(y, deep, padding=15, groups=y.shape[1]), bn))
    return x + F.linear(y.transpose(1, 2), w2)


def log_mel(wave: Tensor, window: Tensor, filters: Tensor) -> Tensor:
    frames = torch.stft(wave.float(), 400, 160, window=window.float(), return_complex=True)
    mel = filters.float() @ frames[..., :-1].abs().square()
    return (torch.clamp(mel, min=1e-10).log10() + 4) / 4


def attention_block_2d(x: Tensor, norm: Tensor, qkv: Tensor, out: Tensor) -> Tensor:
    """The attention of a diffusion U-Net: group norm, 1x1 convolutions, one head."""
    q, k, v = F.conv2d(F.group_norm(x, 32, norm[0], norm[1]), qkv).flatten(2).transpose(1, 2).chunk(3, -1)
    y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
    return x + F.conv2d(y.transpose(1, 2).reshape(x.shape), out)


def segmentation_loss(logits: Tensor, weight: Tensor) -> Tensor:
    """Cross entropy and Dice of per-pixel classes against the classes of another map."""
    labels = weight.argmax(1)
    p = logits.float().softmax(1)
    one_hot = F.one_hot(labels, logits.shape[1]).permute(0, 3, 1, 2)
    dice = 2 * (p * one_hot).sum((2, 3)) / (p + one_hot).sum((2, 3))
    return F.cross_entropy(logits.float(), labels) + (1 - dice).mean()


def ghost(x: Tensor, w: Tensor, n1: Tensor, cheap: Tensor, n2: Tensor) -> Tensor:
    y = F.relu(folded_norm(F.conv2d(x, w), n1))
    return torch.cat([y, F.relu(folded_norm(F.conv2d(y, cheap, padding=1, groups=y.shape[1]), n2))], 1)


def large_kernel_attention(x: Tensor, w5: Tensor, w7: Tensor, w1: Tensor) -> Tensor:
    y = F.conv2d(x, w5, padding=2, groups=x.shape[1])
    y = F.conv2d(y, w7, padding=9, dilation=3, groups=x.shape[1])
    return x * F.conv2d(y, w1)


def warp(x: Tensor, flow: Tensor) -> Tensor:
    h, w = x.shape[2:]
    ys, xs = torch.meshgrid(torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij")
    gx = (xs + flow[:, 0].float()) / (w - 1) * 2 - 1
    gy = (ys + flow[:, 1].float()) / (h - 1) * 2 - 1
    return F.grid_sample(x.float(), torch.stack([gx, gy], -1), align_corners=True)


def _norms(m: Make, c: int) -> Tensor:
    return m(4, c)


def _w(m: Make, *shape: int) -> Tensor:
    terms = 1
    for n in shape[1:]:
        terms *= n
    return m(*shape) * terms**-0.5


def _res(m: Make) -> list[Tensor]:
    return [
        image(m, 8, 320, 64, 64),
        m(8, 1280),
        m(2, 320),
        _w(m, 320, 320, 3, 3),
        _w(m, 320, 1280),
        m(2, 320),
        _w(m, 320, 320, 3, 3),
    ]


def _swin(m: Make) -> list[Tensor]:
    return [m(32, 56, 56, 96), _w(m, 288, 96), m(288), m(3, 49, 49), _w(m, 96, 96)]


BLOCKS: tuple[Block, ...] = (
    Block(
        "squeeze-excite 64x480x28x28",
        squeeze_excite,
        lambda m: [
            image(m, 64, 480, 28, 28),
            _w(m, 20, 480, 1, 1),
            m(20),
            _w(m, 480, 20, 1, 1),
            m(480),
            _w(m, 80, 480, 1, 1),
            _norms(m, 80),
        ],
    ),
    Block(
        "separable 5x5 64x144x56x56",
        separable,
        lambda m: [image(m, 64, 144, 56, 56), _w(m, 144, 1, 5, 5), _norms(m, 144), _w(m, 96, 144, 1, 1), _norms(m, 96)],
    ),
    Block(
        "separable 3x3 32x128x56x56 contiguous",
        separable,
        lambda m: [m(32, 128, 56, 56), _w(m, 128, 1, 5, 5), _norms(m, 128), _w(m, 128, 128, 1, 1), _norms(m, 128)],
    ),
    Block(
        "separable 3x3 64x128x56x56 step",
        separable_trained,
        lambda m: [image(m, 64, 128, 56, 56), _w(m, 128, 1, 3, 3), m(2, 128), _w(m, 256, 128, 1, 1), m(2, 256)],
        training=True,
    ),
    *both("diffusion res block 8x320x64x64", diffusion_res_block, _res),
    *both("window attention 32x56x56x96", window_attention, _swin),
    Block("axial attention 8x64x64x256", axial_attention, lambda m: [m(8, 64, 64, 256), _w(m, 768, 256), _w(m, 256, 256)]),
    *both(
        "patch embedding 64x3x224x224",
        patch_embedding,
        lambda m: [m(64, 3, 224, 224), _w(m, 768, 3, 16, 16), m(768), m(1, 1, 768), m(1, 197, 768), m(2, 768)],
    ),
    *both("patch merging 32x56x56x96", patch_merging, lambda m: [m(32, 56, 56, 96), m(2, 384), _w(m, 192, 384)]),
    Block(
        "fire 32x128x56x56",
        fire,
        lambda m: [
            image(m, 32, 128, 56, 56),
            _w(m, 32, 128, 1, 1),
            m(32),
            _w(m, 128, 32, 1, 1),
            m(128),
            _w(m, 128, 32, 3, 3),
            m(128),
        ],
    ),
    Block("style layer 8x128x128x128", style_layer, lambda m: [m(8, 128, 128, 128), _w(m, 128, 128, 3, 3), m(128), m(2, 128)]),
    Block(
        "pyramid step 8x256x100x100",
        pyramid_step,
        lambda m: [image(m, 8, 256, 50, 50), image(m, 8, 512, 100, 100), _w(m, 256, 512, 1, 1), m(256), _w(m, 256, 256, 3, 3)],
    ),
    Block(
        "decoder step 8x256x64x64",
        decoder_step,
        lambda m: [image(m, 8, 256, 32, 32), image(m, 8, 128, 64, 64), _w(m, 128, 384, 3, 3), _norms(m, 128)],
    ),
    Block(
        "super resolution 4x64x180x320",
        super_resolution,
        lambda m: [image(m, 4, 64, 180, 320), _w(m, 256, 64, 3, 3), m(256), _w(m, 3, 64, 3, 3), m(3)],
    ),
    Block(
        "shuffle unit 64x240x28x28",
        shuffle_unit,
        lambda m: [image(m, 64, 240, 28, 28), _w(m, 240, 60, 1, 1), _norms(m, 240), _w(m, 240, 60, 1, 1), _norms(m, 240)],
    ),
    Block(
        "video block 4x64x16x56x56",
        video_block,
        lambda m: [m(4, 64, 16, 56, 56), _w(m, 64, 64, 1, 3, 3), _norms(m, 64), _w(m, 64, 64, 3, 1, 1), _norms(m, 64)],
    ),
    Block(
        "wave features 8x1x160000",
        wave_features,
        lambda m: [m(8, 1, 160000), _w(m, 512, 1, 10), m(2, 512), _w(m, 512, 512, 3), _w(m, 512, 512, 3)],
    ),
    Block(
        "vocoder stage 16x256x1024",
        vocoder_stage,
        lambda m: [m(16, 256, 1024), m(256, 128, 8) * 0.03, m(128), _w(m, 128, 128, 3), _w(m, 128, 128, 3)],
    ),
    Block(
        "conformer module 16x800x512",
        conformer_module,
        lambda m: [m(16, 800, 512), m(2, 512), _w(m, 1024, 512), _w(m, 512, 1, 31), _norms(m, 512), _w(m, 512, 512)],
    ),
    Block("log mel 16x480000", log_mel, lambda m: [m(16, 480000), m(400), m(80, 201).abs()]),
    Block(
        "attention of a u-net 8x512x32x32",
        attention_block_2d,
        lambda m: [image(m, 8, 512, 32, 32), m(2, 512), _w(m, 1536, 512, 1, 1), _w(m, 512, 512, 1, 1)],
    ),
    Block(
        "segmentation loss 8x21x256x256 step",
        segmentation_loss,
        lambda m: [m(8, 21, 256, 256), m(8, 21, 256, 256)],
        training=True,
    ),
    Block(
        "ghost module 64x64x56x56",
        ghost,
        lambda m: [image(m, 64, 64, 56, 56), _w(m, 64, 64, 1, 1), _norms(m, 64), _w(m, 64, 1, 3, 3), _norms(m, 64)],
    ),
    Block(
        "large kernel attention 16x256x56x56",
        large_kernel_attention,
        lambda m: [image(m, 16, 256, 56, 56), _w(m, 256, 1, 5, 5), _w(m, 256, 1, 7, 7), _w(m, 256, 256, 1, 1)],
    ),
    Block("warp by a flow 8x64x128x128", warp, lambda m: [m(8, 64, 128, 128), m(8, 2, 128, 128)]),
    Block(
        "mlp of a u-net's transformer",
        lambda x, w1, w2: x + F.linear(F.gelu(F.linear(x, w1)), w2),
        lambda m: [m(8, 4096, 320), *mlp_weights(m, 320, 1280)],
    ),
)
