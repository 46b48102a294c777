"""Blocks of models in plain PyTorch, with the shapes of their issue reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, image


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * 0.125).softmax(-1) @ v


def gpt2_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 8.0
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = torch.where(seen, scores, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, torch.float32).to(v.dtype) @ v


def softcap_attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    scores = 50 * torch.tanh(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 / 50)
    i = torch.arange(q.shape[-2], device=q.device)
    scores = scores + slopes[:, None, None] * (i[None, :] - i[:, None])
    scores = scores.masked_fill(i[None, :] > i[:, None], float("-inf"))
    return scores.softmax(-1, torch.float32).to(v.dtype) @ v


def convnext(x: Tensor, window: Tensor, b: Tensor, norm: Tensor, *mlp: Tensor) -> Tensor:
    g, beta = norm
    w1, b1, w2, b2 = mlp
    y = F.conv2d(x, window, b, padding=3, groups=x.shape[1]).permute(0, 2, 3, 1)
    y = F.linear(F.gelu(F.linear(F.layer_norm(y, g.shape, g, beta), w1, b1)), w2, b2)
    return x + y.permute(0, 3, 1, 2)


def conv_bn_relu(x: Tensor, w: Tensor, mean: Tensor, var: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.relu(F.batch_norm(F.conv2d(x, w, padding=1), mean, var.abs() + 1, g, b))


def bottleneck(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *norms: Tensor) -> Tensor:
    def norm(y: Tensor, k: int) -> Tensor:
        return F.batch_norm(y, None, None, norms[2 * k], norms[2 * k + 1], True)

    y = F.relu(norm(F.conv2d(x, w1), 0))
    y = F.relu(norm(F.conv2d(y, w2, padding=1), 1))
    return F.relu(x + norm(F.conv2d(y, w3), 2))


def linear_relu_linear(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.relu(F.linear(x, w, b)), v, c)


def pre_norm_mlp(x: Tensor, norm: Tensor, *mlp: Tensor) -> Tensor:
    g, b = norm
    w1, b1, w2, b2 = mlp
    y = F.layer_norm(x, g.shape, g, b)
    return x + F.linear(F.gelu(F.linear(y, w1, b1), approximate="tanh"), w2, b2)


def cat_group_norm(x: Tensor, y: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.silu(F.group_norm(torch.cat([x, y], 1), 32, g, b))


def _lrl(m: int, k: int, n: int) -> Callable[[Make], Sequence[Tensor]]:
    return lambda make: [make(m, k), make(n, k) * 0.02, make(n), make(k, n) * 0.02, make(k)]


BLOCKS: tuple[Block, ...] = (
    Block("attention 8x12x1024x64", attention, lambda m: [m(8, 12, 1024, 64) for _ in range(3)]),
    Block("attention 8x12x1024x64 step", attention, lambda m: [m(8, 12, 1024, 64) for _ in range(3)], training=True),
    Block("gpt2 attention 8x12x1024x64", gpt2_attention, lambda m: [m(8, 12, 1024, 64) for _ in range(3)]),
    Block("softcap + alibi 2x16x2048x128", softcap_attention, lambda m: [*(m(2, 16, 2048, 128) for _ in range(3)), m(16)]),
    Block(
        "convnext block 32x96x56x56",
        convnext,
        lambda m: [image(m, 32, 96, 56, 56), m(96, 1, 7, 7), m(96), m(2, 96), m(384, 96), m(384), m(96, 384), m(96)],
    ),
    Block(
        "relu(bn(conv3x3)) 32x256x56x56",
        conv_bn_relu,
        lambda m: [image(m, 32, 256, 56, 56), image(m, 256, 256, 3, 3) * 0.02, *(m(256) for _ in range(4))],
    ),
    Block("stem 7x7 64x3x224x224", lambda x, w: F.relu(F.conv2d(x, w, stride=2, padding=3)),
          lambda m: [image(m, 64, 3, 224, 224), image(m, 64, 3, 7, 7)]),
    Block("relu(conv1x1 + r) 32x256x56x56", lambda x, w, r: F.relu(F.conv2d(x, w) + r),
          lambda m: [image(m, 32, 256, 56, 56), image(m, 256, 256, 1, 1) * 0.1, image(m, 32, 256, 56, 56)]),
    Block(
        "bottleneck 16x256x56x56 step",
        bottleneck,
        lambda m: [image(m, 16, 256, 56, 56), image(m, 64, 256, 1, 1) * 0.1, image(m, 64, 64, 3, 3) * 0.05,
                   image(m, 256, 64, 1, 1) * 0.1, *(m(n) for n in (64, 64, 64, 64, 256, 256))],
        training=True,
    ),
    Block("linear-relu-linear 512x1024x4096", linear_relu_linear, _lrl(512, 1024, 4096)),
    Block("linear-relu-linear 4096x4096x16384", linear_relu_linear, _lrl(4096, 4096, 16384)),
    Block(
        "pre-norm mlp 4096x1024x4096",
        pre_norm_mlp,
        lambda m: [m(4096, 1024), m(2, 1024), m(4096, 1024) * 0.03, m(4096), m(1024, 4096) * 0.03, m(1024)],
    ),
    Block(
        "cat + group_norm + silu",
        cat_group_norm,
        lambda m: [image(m, 16, 320, 64, 64), image(m, 16, 320, 64, 64), m(640), m(640)],
    ),
)  # fmt: skip
