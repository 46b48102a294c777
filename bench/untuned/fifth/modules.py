"""Whole modules of vision, audio, graphs and control, called with their parameters as arguments."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.untuned.block import Block, Make, ids
from bench.untuned.fourth.modules import module

HALF, SINGLE = torch.float16, torch.float32
LAST = torch.channels_last


class ScaledBlock(nn.Module):
    """timm's vision transformer with register tokens, normalised queries and keys, and a scale for each layer."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.register = nn.Parameter(torch.zeros(1, 4, d))
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-6), nn.LayerNorm(d, eps=1e-6)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.q_norm, self.k_norm = nn.LayerNorm(d // heads), nn.LayerNorm(d // heads, bias=False)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.fc1, self.fc2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b = x.shape[0]
        x = torch.cat([x[:, :1], self.register.expand(b, -1, -1), x[:, 1:]], dim=1)
        drop = (keep > 0).to(x.dtype).view(b, 1, 1) / 0.9
        qkv = self.qkv(self.norm1(x)).reshape(b, x.shape[1], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        x = x + drop * (self.proj(y.transpose(1, 2).reshape(x.shape)) * self.gamma1)
        x = x + drop * (self.fc2(F.gelu(self.fc1(self.norm2(x)))) * self.gamma2)
        return x[:, 5:].mean(1)


class FusedExpansion(nn.Module):
    """EfficientNetV2: a full 3x3 expansion, squeeze and excitation, projection."""

    def __init__(self, c: int) -> None:
        super().__init__()
        e = 4 * c
        self.conv, self.n1 = nn.Conv2d(c, e, 3, padding=1, bias=False), nn.BatchNorm2d(e, track_running_stats=False)
        self.reduce, self.raise_ = nn.Conv2d(e, c // 4, 1), nn.Conv2d(c // 4, e, 1)
        self.project, self.n2 = nn.Conv2d(e, c, 1, bias=False), nn.BatchNorm2d(c, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.n1(self.conv(x)), inplace=True)
        gate = self.raise_(F.silu(self.reduce(y.mean((2, 3), keepdim=True)), inplace=True)).sigmoid()
        return (x + self.n2(self.project(y * gate))).square().mean(1)


class ThreeBranches(nn.Module):
    """RepVGG in training: a 3x3, a 1x1 and an identity, each normalised over the batch."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(c, c, 3, padding=1, bias=False, groups=4)
        self.thin = nn.Conv2d(c, c, 1, bias=False, groups=4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, track_running_stats=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norms[0](self.wide(x)) + self.norms[1](self.thin(x)) + self.norms[2](x))


class PoolMixer(nn.Module):
    """PoolFormer: the mean of a window less the middle, group norms of one group, scales of layers."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, c, affine=False), nn.GroupNorm(1, c)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.fc1, self.fc2 = nn.Conv2d(c, 4 * c, 1), nn.Conv2d(4 * c, c, 1)
        self.scale1, self.scale2 = nn.Parameter(torch.ones(c)), nn.Parameter(torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale1.unsqueeze(-1).unsqueeze(-1) * (self.pool(y) - y)
        return x + self.scale2.unsqueeze(-1).unsqueeze(-1) * self.fc2(F.gelu(self.fc1(self.norm2(x))))


class BatchNormAttention(nn.Module):
    """LeViT: linear layers normalised over the batch, keys narrower than values, a table of biases by offsets."""

    def __init__(self, d: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.qkv, self.norm1 = nn.Linear(d, heads * 64, bias=False), nn.BatchNorm1d(heads * 64, track_running_stats=False)
        self.proj, self.norm2 = nn.Linear(heads * 32, d, bias=False), nn.BatchNorm1d(d, track_running_stats=False)
        self.biases = nn.Parameter(torch.zeros(heads, side * side))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        y = self.norm1(self.qkv(x).flatten(0, 1)).view(b, n, self.heads, 64).permute(0, 2, 1, 3)
        q, k, v = y.split([16, 16, 32], dim=3)
        at = torch.arange(n, device=x.device)
        rows, columns = at // self.side, at % self.side
        offsets = (rows[:, None] - rows).abs() * self.side + (columns[:, None] - columns).abs()
        p = (q @ k.transpose(-2, -1) * 0.25 + self.biases[:, offsets]).softmax(dim=-1)
        y = F.hardswish((p @ v).transpose(1, 2).reshape(b * n, -1))
        return F.hardswish(x + self.norm2(self.proj(y)).view(b, n, d))


class CompressedConvolutions(nn.Module):
    """Demucs: two dilated residual branches in few channels, gated, scaled by channel."""

    def __init__(self, c: int) -> None:
        super().__init__()
        h = c // 4
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(c, h, 3, dilation=2**k, padding=2**k),
                nn.GroupNorm(1, h),
                nn.GELU(),
                nn.Conv1d(h, 2 * c, 1),
                nn.GroupNorm(1, 2 * c),
                nn.GLU(1),
            )
            for k in range(2)
        )
        self.scale = nn.Parameter(torch.ones(2, c))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scale, strict=True):
            x = x + scale[:, None] * layer(x)
        return x


class CodecUnit(nn.Module):
    """EnCodec: causal convolutions with reflected padding and normalised weights, then one with stride."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.v1, self.g1 = nn.Parameter(torch.zeros(c // 2, c, 3)), nn.Parameter(torch.ones(c // 2, 1, 1))
        self.v2, self.g2 = nn.Parameter(torch.zeros(c, c // 2, 1)), nn.Parameter(torch.ones(c, 1, 1))
        self.down = nn.Conv1d(c, 2 * c, 10, stride=5)

    @staticmethod
    def _normal(v: Tensor, g: Tensor) -> Tensor:
        return g * v / v.norm(2, dim=(1, 2), keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv1d(F.pad(F.elu(x), (4, 0), mode="reflect"), self._normal(self.v1, self.g1), dilation=2)
        x = x + F.conv1d(F.elu(y), self._normal(self.v2, self.g2))
        extra = -x.shape[-1] % 5
        return self.down(F.pad(F.elu(x), (5, extra), mode="reflect"))


class SharedAttentionBlock(nn.Module):
    """Flux: image and text tokens with weights of their own, one attention over both, heads normalised by RMS."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulate = nn.ModuleList(nn.Linear(d, 6 * d) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(approximate="tanh"), nn.Linear(4 * d, d)) for _ in range(2)
        )
        self.norm_q, self.norm_k = nn.RMSNorm(d // heads, eps=1e-6), nn.RMSNorm(d // heads, eps=1e-6)

    def _heads(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = y.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.norm_q(q), self.norm_k(k), v

    def forward(self, image: Tensor, text: Tensor, vector: Tensor, angles: Tensor) -> Tensor:
        d, n = image.shape[-1], text.shape[1]
        parts = [linear(F.silu(vector))[:, None].chunk(6, dim=-1) for linear in self.modulate]
        streams = [text, image]
        made = [
            self._heads(self.qkv[k]((1 + p[1]) * F.layer_norm(s, (d,), eps=1e-6) + p[0]))
            for k, (s, p) in enumerate(zip(streams, parts, strict=True))
        ]
        q, k, v = (torch.cat(both, dim=2) for both in zip(*made, strict=True))
        q, k = self._rotate(q, angles), self._rotate(k, angles)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        results = []
        for at, (s, p) in enumerate(zip(streams, parts, strict=True)):
            s = s + p[2] * self.out[at](y[:, :n] if at == 0 else y[:, n:])
            results.append(s + p[5] * self.mlp[at]((1 + p[4]) * F.layer_norm(s, (d,), eps=1e-6) + p[3]))
        return torch.cat(results, 1)

    @staticmethod
    def _rotate(x: Tensor, angles: Tensor) -> Tensor:
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cos, sin = angles.float().cos(), angles.float().sin()
        real, imaginary = pairs[..., 0], pairs[..., 1]
        return torch.stack((real * cos - imaginary * sin, real * sin + imaginary * cos), -1).flatten(-2).type_as(x)


class TimeConvolutions(nn.Module):
    """diffusers' layer along frames: a group norm over frames, SiLU and a 3x1x1 convolution, two of them, a shortcut."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, c), nn.GroupNorm(8, c)
        self.conv1, self.conv2 = (nn.Conv3d(c, c, (3, 1, 1), padding=(1, 0, 0)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        frames = 7
        y = x[None].reshape((-1, frames, *x.shape[1:])).permute(0, 2, 1, 3, 4)
        z = self.conv1(F.silu(self.norm1(y)))
        z = y + self.conv2(F.silu(self.norm2(z)))
        return z.permute(0, 2, 1, 3, 4).reshape(x.shape)


class ContinuousFilters(nn.Module):
    """SchNet's interaction: filters from radial functions and a cosine cutoff, sums over edges, shifted softplus."""

    def __init__(self, d: int, filters: int, radial: int) -> None:
        super().__init__()
        self.radial = radial
        self.filter1, self.filter2 = nn.Linear(radial, filters), nn.Linear(filters, filters)
        self.into, self.out, self.last = nn.Linear(d, filters, bias=False), nn.Linear(filters, d), nn.Linear(d, d)

    def forward(self, x: Tensor, place: Tensor, source: Tensor, target: Tensor) -> Tensor:
        distance = (place[source] - place[target]).norm(dim=-1)
        centres = torch.linspace(0, 5, self.radial, device=x.device, dtype=x.dtype)
        wide = torch.exp(-2 * (distance[:, None] - centres) ** 2)
        cut = 0.5 * (torch.cos(distance.clamp(max=5) * math.pi / 5) + 1)
        w = self.filter2(F.softplus(self.filter1(wide)) - math.log(2)) * cut.view(-1, 1)
        y = self.into(x)
        y = torch.zeros_like(y).index_add_(0, target, y[source] * w)
        return x + self.last(F.softplus(self.out(y)) - math.log(2))


class Equivariant(nn.Module):
    """EGNN: messages from squared distances, coordinates moved along differences, nodes from sums of messages."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(2 * d + 1, d), nn.SiLU(), nn.Linear(d, d), nn.SiLU())
        self.gate = nn.Linear(d, 1)
        self.move = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, 1, bias=False))
        self.node = nn.Sequential(nn.Linear(2 * d, d), nn.SiLU(), nn.Linear(d, d))

    def forward(self, h: Tensor, x: Tensor, row: Tensor, column: Tensor) -> Tensor:
        difference = x[row] - x[column]
        radial = difference.square().sum(1, keepdim=True)
        m = self.edge(torch.cat([h[row], h[column], radial], 1))
        m = m * torch.sigmoid(self.gate(m))
        shift = torch.clamp(difference / (radial.sqrt() + 1) * self.move(m), -10, 10)
        count = torch.zeros_like(x[:, :1]).index_add(0, row, torch.ones_like(radial)).clamp(min=1)
        x = x + torch.zeros_like(x).index_add(0, row, shift) / count
        h = h + self.node(torch.cat([h, torch.zeros_like(h).index_add(0, row, m)], 1))
        return torch.cat([h, x], 1)


class NoisyHead(nn.Module):
    """Rainbow: two streams of noisy linear layers, a distribution of 51 atoms for each action."""

    def __init__(self, d: int, actions: int) -> None:
        super().__init__()
        self.actions = actions
        self.mean1, self.spread1 = nn.Linear(d, 512), nn.Parameter(torch.zeros(512, d))
        self.mean2, self.spread2 = nn.Linear(512, 51 * (actions + 1)), nn.Parameter(torch.zeros(51 * (actions + 1), 512))

    @staticmethod
    def _noisy(x: Tensor, layer: nn.Linear, spread: Tensor, read: Tensor, made: Tensor) -> Tensor:
        read, made = (e.sign() * e.abs().sqrt() for e in (read, made))
        return F.linear(x, layer.weight + spread * torch.outer(made, read), layer.bias + 0.1 * made)

    def forward(self, x: Tensor, e1: Tensor, e2: Tensor, e3: Tensor) -> Tensor:
        h = F.relu(self._noisy(x, self.mean1, self.spread1, e1, e2))
        y = self._noisy(h, self.mean2, self.spread2, e2, e3).view(-1, self.actions + 1, 51)
        value, advantage = y[:, :1], y[:, 1:]
        p = F.softmax(value + advantage - advantage.mean(1, keepdim=True), dim=-1).clamp(min=1e-3)
        return (p * torch.linspace(-10, 10, 51, device=x.device, dtype=x.dtype)).sum(-1)


class RecurrentState(nn.Module):
    """Dreamer: a GRU whose gates come from one normalised layer, discrete latents with straight-through gradients."""

    def __init__(self, hidden: int, actions: int) -> None:
        super().__init__()
        self.into = nn.Linear(64 + actions, hidden)
        self.gates, self.norm = nn.Linear(2 * hidden, 3 * hidden, bias=False), nn.LayerNorm(3 * hidden)
        self.latent = nn.Linear(hidden, 64)

    def forward(self, actions: Tensor, noise: Tensor) -> Tensor:
        b = actions.shape[1]
        h = torch.zeros(b, self.latent.in_features, device=actions.device, dtype=actions.dtype)
        z = torch.zeros(b, 64, device=actions.device, dtype=actions.dtype)
        total = torch.zeros((), device=actions.device, dtype=actions.dtype)
        for action, e in zip(actions.unbind(0), noise.unbind(0), strict=True):
            x = F.silu(self.into(torch.cat([z, action], -1)))
            reset, new, update = torch.chunk(self.norm(self.gates(torch.cat([x, h], -1))), 3, -1)
            update = torch.sigmoid(update - 1)
            h = update * torch.tanh(torch.sigmoid(reset) * new) + (1 - update) * h
            p = 0.99 * self.latent(h).view(b, 8, 8).softmax(-1) + 0.01 / 8
            picked = F.one_hot((p.log() + e.view(b, 8, 8)).argmax(-1), 8).to(p.dtype)
            z = (picked + p - p.detach()).flatten(1)
            total = total + (p * p.log()).sum((1, 2)).mean()
        return torch.cat([h, z], -1).sum(-1) + total


class RadialLayer(nn.Module):
    """FastKAN: a normalised input through Gaussian bumps into one spline weight, beside a SiLU path."""

    def __init__(self, narrow: int, wide: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(narrow)
        self.spline, self.base = nn.Linear(narrow * 8, wide, bias=False), nn.Linear(narrow, wide)

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.linspace(-2, 2, 8, device=x.device, dtype=x.dtype)
        bumps = torch.exp(-(((self.norm(x)[..., None] - grid) / (4 / 7)) ** 2))
        return self.spline(bumps.view(*x.shape[:-1], -1)) + self.base(F.silu(x))


class ExponentialGates(nn.Module):
    """xLSTM's scalar cell, ten steps: exponential gates with a running maximum, recurrent weights for each head."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads, self.wx = heads, nn.Linear(d, 4 * d)
        self.r = nn.Parameter(torch.zeros(heads, d // heads, 4 * d // heads))

    def forward(self, x: Tensor) -> Tensor:
        b, _, d = x.shape
        h = torch.zeros(b, d, device=x.device, dtype=x.dtype)
        c, n, m = torch.zeros_like(h), torch.ones_like(h), torch.zeros_like(h)
        out = []
        for wx in self.wx(x).unbind(1):
            rh = torch.einsum("bhd,hde->bhe", h.view(b, self.heads, -1), self.r).reshape(b, self.heads, 4, -1)
            i, f, z, o = (wx + rh.transpose(1, 2).reshape(b, 4 * d)).chunk(4, -1)
            log_f = F.logsigmoid(f)
            next_m = torch.maximum(log_f + m, i)
            keep, take = torch.exp(log_f + m - next_m), torch.exp(i - next_m)
            c, n, m = keep * c + take * torch.tanh(z), keep * n + take, next_m
            h = torch.sigmoid(o) * c / n
            out.append(h)
        return torch.stack(out, 1)


class TwoDirections(nn.Module):
    """Bidirectional LSTM cells over seven steps, lengths masked, the halves' last states joined."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.forth, self.back = nn.LSTMCell(d, hidden), nn.LSTMCell(d, hidden)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        n = x.shape[1]
        ends = []
        for cell, order in ((self.forth, range(n)), (self.back, range(n - 1, -1, -1))):
            h = c = torch.zeros(x.shape[0], cell.hidden_size, device=x.device, dtype=x.dtype)
            for t in order:
                new_h, new_c = cell(x[:, t], (h, c))
                live = (lengths > t)[:, None]
                h, c = torch.where(live, new_h, h), torch.where(live, new_c, c)
            ends.append(h)
        return torch.cat(ends, 1)


class ShiftedFrames(nn.Module):
    """Temporal shift: an eighth of the channels from the next frame, an eighth from the last, then a residual block."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv1, self.n1 = nn.Conv2d(c, c // 2, 1, bias=False), nn.BatchNorm2d(c // 2, track_running_stats=False)
        self.conv2 = nn.Conv2d(c // 2, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        nt, c, h, w = x.size()
        y = x.view(nt // 8, 8, c, h, w)
        fold = c // 8
        out = torch.zeros_like(y)
        out[:, :-1, :fold] = y[:, 1:, :fold]
        out[:, 1:, fold : 2 * fold] = y[:, :-1, fold : 2 * fold]
        out[:, :, 2 * fold :] = y[:, :, 2 * fold :]
        return x + self.conv2(F.relu(self.n1(self.conv1(out.view(nt, c, h, w)))))


class GatedResidual(nn.Module):
    """Temporal fusion transformer: variables through gated residual networks, weighted by a softmax from all of them."""

    def __init__(self, variables: int, d: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(variables, d, d)), nn.Parameter(torch.zeros(variables, d, 2 * d))
        self.norm = nn.LayerNorm(d)
        self.flat, self.choose = nn.Linear(variables * d, d), nn.Linear(d, variables)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = F.elu(torch.einsum("bnvd,vde->bnve", x, self.first) + context[:, None, None])
        y = self.norm(x + F.glu(torch.einsum("bnvd,vde->bnve", h, self.second), dim=-1))
        weights = self.choose(F.elu(self.flat(x.flatten(-2)))).softmax(dim=-1)
        return (weights.unsqueeze(-1) * y).sum(dim=-2)


class SetToSet(nn.Module):
    """PyG's Set2Set: an LSTM cell attends to the nodes of each graph, three rounds, by a softmax over segments."""

    def __init__(self, d: int, graphs: int) -> None:
        super().__init__()
        self.d, self.graphs, self.cell = d, graphs, nn.LSTMCell(2 * d, d)

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        h = x.new_zeros(self.graphs, self.d)
        c, q = torch.zeros_like(h), x.new_zeros(self.graphs, 2 * self.d)
        for _ in range(3):
            h, c = self.cell(q, (h, c))
            e = (x * h.index_select(0, batch)).sum(dim=-1)
            top = torch.full_like(h[:, 0], -1e4).scatter_reduce(0, batch, e.detach(), "amax")
            p = (e - top[batch]).exp()
            p = p / (torch.zeros_like(top).scatter_add(0, batch, p)[batch] + 1e-16)
            q = torch.cat([h, torch.zeros_like(h).index_add(0, batch, p[:, None] * x)], dim=-1)
        return q


def _apart(m: Make, n: int, e: int) -> list[Tensor]:
    """Edges without loops: a distance of zero has no gradient."""
    row = ids(m, n, e)
    return [m(n, 64), m(n, 3), row, (row + 1 + ids(m, n - 1, e)) % n]


with torch.device("meta"):
    SCALED = module(ScaledBlock(384, 6), lambda m, b, n: [m(b, n, 384), ids(m, 10, b)], (3, 10))
    FUSED = module(FusedExpansion(56), lambda m, b, h: [m(b, 56, h, h).to(memory_format=LAST)], (2, 6), dtype=HALF)
    BRANCHES = module(ThreeBranches(96), lambda m, b, h: [m(b, 96, h, h + 1)], (2, 5))
    POOLS = module(PoolMixer(96), lambda m, b, h: [m(b, 96, h, h)], (2, 6))
    LEVIT = module(BatchNormAttention(256, 4, 14), lambda m, b: [m(b, 196, 256)], (2,), dtype=HALF)
    DEMUCS = module(CompressedConvolutions(96), lambda m, b, n: [m(b, 96, n)], (2, 21))
    CODEC = module(CodecUnit(64), lambda m, b, n: [m(b, 64, n)], (2, 33), dtype=SINGLE, tf32=True)
    SHARED = module(
        SharedAttentionBlock(768, 12), lambda m, b, n, t: [m(b, n, 768), m(b, t, 768), m(b, 768), m(1, 1, n + t, 32)], (2, 7, 4)
    )
    FRAMES = module(TimeConvolutions(64), lambda m, b, h: [m(7 * b, 64, h, h)], (1, 5))
    SCHNET = module(
        ContinuousFilters(128, 96, 50),
        lambda m, n, e: [m(n, 128), m(n, 3), ids(m, n, e), ids(m, n, e)],
        (9, 30),
        dtype=SINGLE,
        tf32=True,
    )
    EGNN = module(Equivariant(64), _apart, (9, 30), dtype=SINGLE, tf32=True)
    RAINBOW = module(NoisyHead(3136, 18), lambda m, b: [m(b, 3136), m(3136), m(512), m(51 * 19)], (3,), dtype=SINGLE, tf32=True)
    DREAMER = module(RecurrentState(200, 6), lambda m, n, b: [m(n, b, 6), m(n, b, 64)], (3, 4), dtype=SINGLE, tf32=True)
    BUMPS = module(RadialLayer(200, 136), lambda m, n: [m(n, 200)], (7,))
    SCALAR = module(ExponentialGates(256, 4), lambda m, b, n: [m(b, n, 256)], (3, 3))
    DIRECTIONS = module(TwoDirections(100, 120), lambda m, b, n: [m(b, n, 100), ids(m, n, b) + 1], (19, 3))
    SHIFT = module(ShiftedFrames(64), lambda m, b, h: [m(8 * b, 64, h, h)], (1, 5), dtype=HALF)
    FUSION = module(GatedResidual(11, 80), lambda m, b, n: [m(b, n, 11, 80), m(b, 80)], (2, 5), dtype=SINGLE, tf32=True)
    SETS = module(SetToSet(96, 400), lambda m, n: [m(n, 96), ids(m, 400, n).sort().values], (2000,), dtype=SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    *SCALED.both("registers and scales", 32, 197),
    FUSED.block("fused expansion", 32, 40, training=True),
    BRANCHES.block("three branches", 32, 56, training=True),
    *POOLS.both("pool mixer", 32, 56),
    LEVIT.block("attention with batch norms", 64, training=True),
    *DEMUCS.both("compressed convolutions", 16, 8003),
    CODEC.block("codec unit", 16, 12001, training=True),
    *SHARED.both("shared attention block", 2, 1024, 77),
    FRAMES.block("convolutions of frames", 4, 32, training=True),
    SCHNET.block("continuous filters", 5000, 120001, training=True),
    EGNN.block("equivariant messages", 8000, 100003, training=True),
    RAINBOW.block("noisy streams", 512, training=True),
    DREAMER.block("latent rollout", 12, 500, training=True),
    *BUMPS.both("radial layers", 16000),
    SCALAR.block("exponential gates", 128, 10, training=True),
    DIRECTIONS.block("two directions", 300, 7, training=True),
    *SHIFT.both("shifted frames", 4, 56),
    FUSION.block("chosen variables", 64, 96, training=True),
    SETS.block("set to set", 30011, training=True),
)
