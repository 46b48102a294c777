"""Blocks of diffusion models and autoencoders."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, mlp_weights, weight

HALF, SINGLE = torch.float16, torch.float32


def adaptive_norms(x: Tensor, c: Tensor, ada: Tensor, qkv: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A block of DiT: shifts, scales and gates of both branches from one linear layer."""
    s1, c1, g1, s2, c2, g2 = F.linear(F.silu(c), ada)[:, None].chunk(6, -1)
    b, t, d = x.shape
    y = F.layer_norm(x, (d,), eps=1e-6) * (1 + c1) + s1
    q, k, v = F.linear(y, qkv).view(b, t, 3, -1, 8).permute(2, 0, 3, 1, 4).unbind(0)
    a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
    x = x + g1 * F.linear(a, out)
    y = F.layer_norm(x, (d,), eps=1e-6) * (1 + c2) + s2
    return x + g2 * F.linear(F.gelu(F.linear(y, up), approximate="tanh"), down)


def step_embedding(t: Tensor, kinds: Tensor, table: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """Sines and cosines of time steps through an MLP, classes added, some dropped."""
    half = w1.shape[1] // 2
    frequency = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angle = t[:, None].float() * frequency[None]
    e = torch.cat((torch.cos(angle), torch.sin(angle)), -1).to(w1.dtype)
    kinds = torch.where(kinds % 10 == 0, table.shape[0] - 1, kinds)
    return F.silu(F.linear(F.silu(F.linear(e, w1, b1)), w2) + table[kinds])


def velocity_loss(x: Tensor, noise: Tensor, found: Tensor, t: Tensor) -> Tensor:
    """Prediction of velocity, weighted by the least of signal to noise and 5."""
    beta = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, device=x.device) ** 2
    kept = torch.cumprod(1 - beta, 0)[t]
    a, s = (v.sqrt().to(x.dtype).view(-1, 1, 1, 1) for v in (kept, 1 - kept))
    snr = kept / (1 - kept)
    weights = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + 1)
    error = F.mse_loss(found.float(), (a * noise - s * x).float().detach(), reduction="none")
    return (error.mean((1, 2, 3)) * weights).mean()


def guided_step(x: Tensor, pair: Tensor, before: Tensor, sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Classifier-free guidance, rescaled, and one step of DPM-Solver++ of second order."""
    free, given = pair.chunk(2)
    e = free + 7.5 * (given - free)
    scaled = e * (given.std((1, 2, 3), keepdim=True) / e.std((1, 2, 3), keepdim=True))
    e = 0.7 * scaled + 0.3 * e
    now, after, last = (s.abs() + 0.1 for s in sigma.unbind(0))
    x0 = x - now * e
    low, high = x0.flatten(1).amin(1), x0.flatten(1).amax(1)
    limit = torch.maximum(-low, high).clamp(min=1).view(-1, 1, 1, 1)
    x0 = torch.clamp(x0, -limit, limit) / limit
    h, h0 = torch.log(now / after), torch.log(last / now)
    d = (1 + h / (2 * h0)) * x0 - h / (2 * h0) * before
    return after / now * x - torch.expm1(-h) * d, x0


def sampled_latents(moments: Tensor, noise: Tensor, w: Tensor, x: Tensor) -> Tensor:
    """A variational autoencoder: a sample, its reconstruction by a transposed convolution, and the divergence."""
    mean, log_var = moments.chunk(2, 1)
    log_var = torch.clamp(log_var, -30.0, 20.0)
    y = F.conv_transpose2d(mean + torch.exp(0.5 * log_var) * noise, w, stride=2, padding=1)
    kl = 0.5 * torch.sum(mean**2 + log_var.exp() - 1.0 - log_var, dim=[1, 2, 3])
    return (y - x.detach()).abs().mean() + 1e-3 * kl.mean()


def from_patches(x: Tensor, c: Tensor, ada: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """DiT's last layer, and patches of 2x2 put back into an image."""
    shift, scale = F.linear(F.silu(c), ada).chunk(2, 1)
    y = F.linear(F.layer_norm(x, x.shape[-1:]) * (1 + scale[:, None]) + shift[:, None], w, b)
    side = int(x.shape[1] ** 0.5)
    return torch.einsum("nhwpqc->nchpwq", y.view(-1, side, side, 2, 2, w.shape[0] // 4)).reshape(
        -1, w.shape[0] // 4, 2 * side, 2 * side
    )


def _dit(m: Make, b: int, t: int, d: int) -> list[Tensor]:
    return [m(b, t, d), m(b, d), weight(m, 6 * d, d), weight(m, 3 * d, d), weight(m, d, d), *mlp_weights(m, d, 4 * d)]


DIT = Sized(adaptive_norms, _dit, (2, 7, 16))

BLOCKS: tuple[Block, ...] = (
    *DIT.both("adaptive norms", 8, 257, 384),
    Sized(
        step_embedding,
        lambda m, n, d, h: [ids(m, 1000, n), ids(m, 1000, n), m(1001, h), weight(m, h, d), m(h), weight(m, h, h)],
        (5, 8, 12),
        HALF,
    ).block("step embedding", 129, 256, 1152),
    Sized(velocity_loss, lambda m, n, s: [*(m(n, 4, s, s) for _ in range(3)), ids(m, 1000, n)], (3, 5)).block(
        "velocity loss", 64, 96, training=True
    ),
    Sized(guided_step, lambda m, n, s: [m(n, 4, s, s), m(2 * n, 4, s, s), m(n, 4, s, s), m(3)], (2, 5), HALF).block(
        "guided step", 16, 127
    ),
    Sized(
        sampled_latents,
        lambda m, n, c, s: [m(n, 2 * c, s, s), m(n, c, s, s), m(c, 12, 4, 4) * 0.1, m(n, 12, 2 * s, 2 * s)],
        (2, 4, 5),
        SINGLE,
        tf32=True,
    ).block("sampled latents", 16, 16, 65, training=True),
    Sized(
        from_patches,
        lambda m, b, s, d: [m(b, s * s, d), m(b, d), weight(m, 2 * d, d), weight(m, 32, d), m(32)],
        (2, 3, 16),
    ).block("from patches", 16, 31, 768, training=True),
)
