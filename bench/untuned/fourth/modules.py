"""Whole modules as people write them, called with their parameters as arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bench.untuned.block import Block, Make, Sized

HALF, SINGLE = torch.float16, torch.float32
LAST = torch.channels_last


class DoubleConvolution(nn.Sequential):
    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__(
            nn.Conv2d(narrow, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide, track_running_stats=False),
            nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            nn.BatchNorm2d(wide, track_running_stats=False),
            nn.ReLU(inplace=True),
        )


class DownAndUp(nn.Module):
    """A level of a U-Net: down by a pool, up by a transposed convolution, the skip padded and concatenated."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.pool, self.deep = nn.MaxPool2d(2), DoubleConvolution(c, 2 * c)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.merge = DoubleConvolution(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.deep(self.pool(x)))
        dh, dw = x.size(2) - y.size(2), x.size(3) - y.size(3)
        y = F.pad(y, [dw // 2, dw - dw // 2, dh // 2, dh - dh // 2])
        return self.merge(torch.cat([x, y], dim=1))


class InvertedResidual(nn.Module):
    """EfficientNet's block: expansion, depthwise 5x5, squeeze and excitation, projection beside a shortcut."""

    def __init__(self, c: int, ratio: int) -> None:
        super().__init__()
        e = c * ratio
        self.expand, self.n1 = nn.Conv2d(c, e, 1, bias=False), nn.BatchNorm2d(e, track_running_stats=False)
        self.deep = nn.Conv2d(e, e, 5, padding=2, groups=e, bias=False)
        self.n2, self.n3 = nn.BatchNorm2d(e, track_running_stats=False), nn.BatchNorm2d(c, track_running_stats=False)
        self.fc1, self.fc2 = nn.Conv2d(e, c // 4, 1), nn.Conv2d(c // 4, e, 1)
        self.project = nn.Conv2d(e, c, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.n1(self.expand(x)))
        y = F.silu(self.n2(self.deep(y)))
        s = self.fc2(F.silu(self.fc1(F.adaptive_avg_pool2d(y, 1))))
        return F.hardswish(x + self.n3(self.project(torch.sigmoid(s) * y)))


class LatentCrossAttention(nn.Module):
    """Perceiver: a few latents read a long input by torch's own attention module."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.q, self.kv = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.norm = nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, latents: Tensor, x: Tensor) -> Tensor:
        x = self.kv(x)
        latents = latents.expand(x.shape[0], -1, -1)
        y = latents + self.attention(self.q(latents), x, x, need_weights=False)[0]
        return y + self.mlp(self.norm(y))


class SpatialGate(nn.Module):
    """gMLP: half of the channels are mixed along the sequence and gate the other half."""

    def __init__(self, d: int, n: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(d), nn.LayerNorm(2 * d)
        self.first, self.last = nn.Linear(d, 4 * d), nn.Linear(2 * d, d)
        self.mix = nn.Conv1d(n, n, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = F.gelu(self.first(self.norm(x))).chunk(2, dim=-1)
        return x + self.last(u * (self.mix(self.gate(v)) + 1))


class ConvolutionalGate(nn.Module):
    """Branchformer's branch: channels gated by a depthwise convolution over time."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(d), nn.LayerNorm(3 * d)
        self.up, self.down = nn.Linear(d, 6 * d), nn.Linear(3 * d, d)
        self.deep = nn.Conv1d(3 * d, 3 * d, 31, padding=15, groups=3 * d)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(self.norm(x)).relu().chunk(2, -1)
        b = self.deep(self.inner(b).transpose(1, 2)).transpose(1, 2)
        return x + 0.5 * self.down(a * b)


class Film(nn.Module):
    """A residual block whose normalised maps are scaled and moved by a condition."""

    def __init__(self, c: int, z: int) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(c, c, 1), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(c, affine=False, track_running_stats=False)
        self.film = nn.Linear(z, 2 * c)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        x = F.relu(self.c1(x))
        gamma, beta = self.film(z)[:, :, None, None].chunk(2, 1)
        return x + F.relu((1 + gamma) * self.norm(self.c2(x)) + beta)


class Spade(nn.Module):
    """Normalisation whose scale and shift are maps of a small segmentation."""

    def __init__(self, c: int, labels: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(c)
        self.shared = nn.Conv2d(labels, hidden, 3, padding=1)
        self.gamma, self.beta = (nn.Conv2d(hidden, c, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor, segments: Tensor) -> Tensor:
        s = F.interpolate(segments, size=x.shape[2:], mode="nearest")
        a = F.relu(self.shared(s))
        return F.leaky_relu(self.norm(x) * (1 + self.gamma(a)) + self.beta(a), 0.2)


class ResidualSplits(nn.Module):
    """Res2Net: parts of the channels, each convolved with what the one before gave."""

    def __init__(self, c: int, parts: int) -> None:
        super().__init__()
        self.parts, self.width = parts, c // parts
        self.convs = nn.ModuleList(nn.Conv2d(self.width, self.width, 3, padding=1) for _ in range(parts - 1))
        self.norms = nn.ModuleList(nn.GroupNorm(1, self.width) for _ in range(parts - 1))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, self.width, 1)
        out = [parts[0]]
        for k, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = parts[k + 1] if k == 0 else parts[k + 1] + out[-1]
            out.append(F.relu(norm(conv(y))))
        return torch.cat(out, 1) + x


class SelectiveKernels(nn.Module):
    """Two branches of unlike width, mixed channel by channel by a softmax over the branches."""

    def __init__(self, c: int, groups: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(c, c, 3, padding=1, groups=groups)
        self.far = nn.Conv2d(c, c, 3, padding=2, dilation=2, groups=groups)
        self.squeeze, self.select = nn.Linear(c, 32), nn.Linear(32, 2 * c)

    def forward(self, x: Tensor) -> Tensor:
        u = torch.stack([F.relu(self.near(x)), F.relu(self.far(x))], dim=1)
        s = u.sum(1).mean((-1, -2))
        a = self.select(F.relu(self.squeeze(s))).view(x.shape[0], 2, -1).softmax(1)
        return (u * a[..., None, None]).sum(dim=1)


class NonLocal(nn.Module):
    """Attention of all positions of a map to a pooled one, by plain matmuls."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(c, c // 2, 1, bias=False) for _ in range(3))
        self.out = nn.Conv2d(c // 2, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q = self.theta(x).view(b, -1, h * w).permute(0, 2, 1)
        k = F.max_pool2d(self.phi(x), 2).flatten(2)
        v = F.max_pool2d(self.g(x), 2).flatten(2).permute(0, 2, 1)
        y = torch.matmul(F.softmax(torch.matmul(q, k), dim=-1), v)
        return x + self.out(y.permute(0, 2, 1).contiguous().view(b, -1, h, w))


class GlobalResponse(nn.Module):
    """ConvNeXt V2: depthwise 7x7, a norm over channels, an MLP with global response normalisation."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.gamma, self.beta = (nn.Parameter(torch.zeros(1, 1, 1, 4 * c)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(self.deep(x).permute(0, 2, 3, 1))))
        g = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (g / (g.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + self.down(y).permute(0, 3, 1, 2)


class Covariance(nn.Module):
    """XCiT: attention between channels, q and k normalised along the sequence."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 4, 1)
        a = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) * self.temperature
        return self.out((a.softmax(dim=-1) @ v).permute(0, 3, 1, 2).reshape(b, n, d))


class Fold(nn.Module):
    """MobileViT: a map into 2x2 patches, attention between equal pixels of all patches, and back."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(c, 4, 2 * c, dropout=0.0, activation=F.silu, batch_first=True, norm_first=True)
        self.merge = nn.Conv2d(2 * c, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.reshape(b * c * (h // 2), 2, w // 2, 2).transpose(1, 2)
        y = y.reshape(b, c, h * w // 4, 4).transpose(1, 3).reshape(b * 4, h * w // 4, c)
        y = self.layer(y)
        y = y.view(b, 4, h * w // 4, c).transpose(1, 3)
        y = y.reshape(b * c * (h // 2), w // 2, 2, 2).transpose(1, 2).reshape(b, c, h, w)
        return self.merge(torch.cat((x, y), 1))


class Routing(nn.Module):
    """Capsules: votes by einsum, three rounds of agreement."""

    def __init__(self, n: int, m: int, i: int, o: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n, m, o, i))

    def forward(self, x: Tensor) -> Tensor:
        votes = torch.einsum("nmoi,bni->bnmo", self.w, x)
        logits = torch.zeros(votes.shape[:3], device=x.device, dtype=x.dtype)
        for k in range(3):
            c = F.softmax(logits, dim=2).unsqueeze(-1)
            s = (c * votes).sum(dim=1)
            n2 = (s**2).sum(-1, keepdim=True)
            v = n2 / (1 + n2) * s / torch.sqrt(n2 + 1e-8)
            if k < 2:
                logits = logits + (votes * v.unsqueeze(1)).sum(-1)
        return v


class WideDecoder(nn.Module):
    """torch's decoder layer with a causal mask and a padded memory."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(d, heads, 3 * d, dropout=0.0, activation="gelu", batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        return self.layer(x, memory, tgt_mask=causal, tgt_is_causal=True)


class TwoLayerGru(nn.Module):
    """torch's GRU over few steps between two linear layers."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(d, d), nn.Linear(2 * d, 10)
        self.cells = nn.ModuleList(nn.GRUCell(d, d) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        h = [torch.zeros(x.shape[0], x.shape[2], device=x.device, dtype=x.dtype) for _ in self.cells]
        for t in range(x.shape[1]):
            h[0] = self.cells[0](y[:, t], h[0])
            h[1] = self.cells[1](h[0], h[1])
        return self.last(torch.cat(h, -1))


def _state(made: nn.Module, m: Make) -> list[Tensor]:
    """Parameters: matrices keep the size of what they read, scales are about 1."""
    found = []
    for name, p in made.named_parameters():
        if p.dim() > 1:
            found.append(m(*p.shape) * max(1, p[0].numel()) ** -0.5)
        else:
            found.append(m(*p.shape) * 0.1 + float("norm" in name and name.endswith("weight")))
    return found


def module(made: nn.Module, inputs: Callable[..., Sequence[Tensor]], small: tuple[int, ...], **more: Any) -> Sized:
    """The module as a function of its inputs and its parameters."""
    names = [name for name, _ in made.named_parameters()]

    def fn(*tensors: Tensor) -> Any:
        count = len(tensors) - len(names)
        return functional_call(made, dict(zip(names, tensors[count:], strict=True)), tensors[:count])

    return Sized(fn, lambda m, *at: [*inputs(m, *at), *_state(made, m)], small, **more)


def _map(c: int, last: bool = True) -> Callable[..., list[Tensor]]:
    return lambda m, b, h, w: [m(b, c, h, w).contiguous(memory_format=LAST if last else torch.contiguous_format)]


with torch.device("meta"):
    UNET = module(DownAndUp(32), _map(32), (2, 9, 7), dtype=HALF)
    RESIDUAL = module(InvertedResidual(40, 6), _map(40), (2, 6, 5))
    LATENTS = module(LatentCrossAttention(192, 6), lambda m, b, k, n: [m(1, k, 192), m(b, n, 192)], (2, 5, 11))
    GATE = module(SpatialGate(192, 197), lambda m, b: [m(b, 197, 192)], (2,))
    BRANCH = module(ConvolutionalGate(144), lambda m, b, n: [m(b, n, 144)], (2, 33))
    FILM = module(Film(96, 40), lambda m, b, h: [m(b, 96, h, h), m(b, 40)], (2, 6), dtype=HALF)
    SPADE = module(Spade(80, 19, 48), lambda m, b, h, s: [m(b, 80, h, h), m(b, 19, s, s)], (2, 6, 3))
    SPLITS = module(ResidualSplits(104, 4), _map(104), (2, 5, 6), dtype=HALF)
    SELECT = module(SelectiveKernels(128, 32), _map(128, last=False), (2, 6, 5), dtype=HALF)
    NONLOCAL = module(NonLocal(96), _map(96, last=False), (2, 4, 6))
    RESPONSE = module(GlobalResponse(80), _map(80), (2, 5, 6))
    XCIT = module(Covariance(192, 4), lambda m, b, n: [m(b, n, 192)], (2, 9))
    FOLD = module(Fold(96), _map(96, last=False), (2, 4, 6))
    CAPSULES = module(Routing(288, 10, 8, 16), lambda m, b: [m(b, 288, 8)], (3,), dtype=SINGLE, tf32=True)
    DECODER = module(WideDecoder(320, 5), lambda m, b, n, k: [m(b, n, 320), m(b, k, 320)], (2, 7, 9))
    CELLS = module(TwoLayerGru(160), lambda m, b, n: [m(b, n, 160)], (3, 3), dtype=SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    *UNET.both("u-net level", 8, 125, 126),
    *RESIDUAL.both("inverted residual", 32, 28, 29),
    *LATENTS.both("perceiver read", 8, 100, 3001),
    GATE.block("spatial gate", 64, training=True),
    *BRANCH.both("convolutional gate", 16, 501),
    FILM.block("film", 32, 30, training=True),
    *SPADE.both("spade", 8, 96, 24),
    SPLITS.block("residual splits", 32, 27, 28, training=True),
    SELECT.block("selective kernels", 16, 29, 31, training=True),
    NONLOCAL.block("non-local", 8, 36, 44, training=True),
    *RESPONSE.both("response of channels", 32, 28, 30),
    XCIT.block("covariance attention", 32, 785, training=True),
    FOLD.block("folded transformer", 16, 32, 36),
    FOLD.block("folded transformer", 8, 32, 36, training=True),
    CAPSULES.block("capsules", 128, training=True),
    DECODER.block("decoder layer", 16, 130, 333, training=True),
    CELLS.block("stacked gru cells", 200, 12, training=True),
)
