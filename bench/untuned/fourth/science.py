"""Simulations, integrators, finance, hidden states, signals, bits, and layouts that are unlike the usual ones."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def dormand_prince(y: Tensor, w1: Tensor, b1: Tensor, w2: Tensor) -> Tensor:
    """A step of RK45 for a network's ODE with its error in the result."""

    def f(t: float, y: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(y, w1, b1 * t)), w2)

    h = 0.1
    a = (
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    )
    e = (71 / 57600, 0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)
    k = [f(0.0, y)]
    for row, t in zip(a, (0.2, 0.3, 0.8, 8 / 9, 1.0, 1.0), strict=True):
        new = y + h * sum(c * s for c, s in zip(row, k, strict=True))
        k.append(f(t * h, new))
    error = h * sum(c * s for c, s in zip(e, k, strict=True))
    tolerance = 0.1 + 0.1 * torch.maximum(y.abs(), new.abs())
    return new.square().mean() + (error / tolerance).pow(2).mean().sqrt()


def padded_laplacians(u: Tensor, v: Tensor, k: Tensor) -> Tensor:
    """A volume's Laplacian with three kinds of border, flux-limited diffusion, and a divergence."""
    p = F.pad(u[:, None], (1, 1, 1, 1, 1, 1), mode="replicate").squeeze(1)
    lap = p[:, 2:, 1:-1, 1:-1] + p[:, :-2, 1:-1, 1:-1] + p[:, 1:-1, 2:, 1:-1] + p[:, 1:-1, :-2, 1:-1]
    lap = lap + p[:, 1:-1, 1:-1, 2:] + p[:, 1:-1, 1:-1, :-2] - 6 * u
    c = F.pad(v[:, None], (1, 1, 1, 1, 1, 1), mode="circular").squeeze(1)
    gx, gy, gz = c[:, 2:, 1:-1, 1:-1] - v, c[:, 1:-1, 2:, 1:-1] - v, c[:, 1:-1, 1:-1, 2:] - v
    limit = torch.rsqrt(1 + gx * gx + gy * gy + gz * gz)
    r = F.pad((k * limit)[:, None], (1, 1, 1, 1, 1, 1), mode="reflect").squeeze(1)
    return u + 0.1 * lap * r[:, 1:-1, 1:-1, :-2] + 0.05 * (gx + gy + gz) * limit


def pressure(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A staggered grid's divergence, eight Jacobi rounds for the pressure, its gradient taken off."""
    div = u[:, 1:, :] - u[:, :-1, :] + v[:, :, 1:] - v[:, :, :-1]
    p = torch.zeros_like(div)
    for _ in range(8):
        q = F.pad(p, (1, 1, 1, 1))
        p = (q[:, 2:, 1:-1] + q[:, :-2, 1:-1] + q[:, 1:-1, 2:] + q[:, 1:-1, :-2] - div) * 0.25
    u, v = u.clone(), v.clone()
    u[:, 1:-1] -= p[:, 1:] - p[:, :-1]
    v[:, :, 1:-1] -= p[:, :, 1:] - p[:, :, :-1]
    return u, v


def limited_advection(q: Tensor, speed: Tensor) -> Tensor:
    """Two steps of a finite-volume scheme with minmod slopes, periodic, by narrow and roll."""
    for _ in range(2):
        left, right = q - q.roll(1, -1), q.roll(-1, -1) - q
        slope = 0.5 * (left.sign() + right.sign()) * torch.min(left.abs(), right.abs())
        c = torch.tanh(speed) * 0.5
        flux = torch.where(c > 0, c * (q + 0.5 * (1 - c) * slope), c * torch.roll(q - 0.5 * (1 + c) * slope, -1, -1))
        q = q - (flux - flux.roll(1, -1))
    return q.square()


def gradients_of_field(u: Tensor) -> Tensor:
    """Total energies of a field by torch.gradient and its curl."""
    gy, gx = torch.gradient(u, spacing=0.5, dim=(1, 2))
    second = torch.gradient(gx, dim=2, edge_order=2)[0]
    return (gx**2 + gy**2).sqrt().add(second.abs()).sum((1, 2))


def spins(s: Tensor, u: Tensor) -> Tensor:
    """Four sweeps of a checkerboard Ising model on spins of int8."""
    n, m = s.shape[-2:]
    board = (torch.arange(n, device=s.device)[:, None] + torch.arange(m, device=s.device)) % 2
    s = torch.where(s >= 0, 1, -1).to(torch.int8)
    for k in range(4):
        near = s.roll(1, -1) + s.roll(-1, -1) + s.roll(1, -2) + s.roll(-1, -2)
        accept = u[k % len(u)].sigmoid() < torch.exp(-0.8 * (s * near).to(u.dtype))
        s = torch.where(accept & (board == k % 2), -s, s)
    return s


def life(board: Tensor) -> Tensor:
    """Three generations by a convolution of ones without its middle."""
    x = (board > 0.5).to(board.dtype)
    kernel = torch.ones(1, 1, 3, 3, device=x.device, dtype=x.dtype)
    kernel[0, 0, 1, 1] = 0
    for _ in range(3):
        n = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="circular"), kernel)
        x = ((n == 3) | ((x == 1) & (n == 2))).to(x.dtype)
    return x


def fractal(c: Tensor) -> Tensor:
    """Twelve iterations of z^2 + c of complex numbers made from pairs."""
    z = torch.zeros_like(c[..., 0], dtype=torch.complex64 if c.dtype != torch.float64 else torch.complex128)
    start = torch.view_as_complex(c.contiguous() * 0.7)
    count = torch.zeros_like(c[..., 0])
    for _ in range(12):
        z = torch.where(z.abs() < 2, z * z + start, z)
        count += (z.abs() < 2).to(count.dtype)
    return count


def volatility_paths(price: Tensor, variance: Tensor, noise: Tensor, rho: Tensor) -> Tensor:
    """Heston's model over 16 steps, payoff of a basket of strikes; gradients are the Greeks."""
    s, v = torch.log(price.abs() + 1), variance.abs() * 0.04 + 0.01
    r = torch.tanh(rho)
    for z in noise.unbind(0):
        z1, z2 = z[0], r * z[0] + torch.sqrt(1 - r * r) * z[1]
        vp = F.relu(v) + 1e-6
        s = s - 0.5 * vp / 16 + torch.sqrt(vp / 16) * z1
        v = v + 1.5 * (0.04 - vp) / 16 + 0.3 * torch.sqrt(vp / 16) * z2
    strikes = torch.linspace(0.5, 2, 7, device=s.device, dtype=s.dtype)
    return F.softplus(8 * (s.exp()[:, None] - strikes)).mean(0).sum()


def option_prices(s: Tensor, k: Tensor, t: Tensor, sigma: Tensor) -> Tensor:
    """Black-Scholes calls and puts, the normal distribution by torch.special."""
    s, k, t, sigma = (x.abs() + 0.2 for x in (s, k, t, sigma))
    root = sigma * torch.sqrt(t)
    d1 = (torch.log(s / k) + (0.02 + sigma**2 / 2) * t) / root
    discount = k * torch.exp(-0.02 * t)
    call = s * torch.special.ndtr(d1) - discount * torch.special.ndtr(d1 - root)
    return torch.stack((call, call - s + discount), -1)


def best_states(scores: Tensor, transitions: Tensor) -> Tensor:
    """Viterbi over few steps: maxima forward, gathers back."""
    v, back = scores[:, 0], []
    for t in range(1, scores.shape[1]):
        best, at = (v.unsqueeze(2) + transitions).max(dim=1)
        v = best + scores[:, t]
        back.append(at)
    path = [v.argmax(-1)]
    for at in reversed(back):
        path.append(at.gather(1, path[-1][:, None]).squeeze(1))
    return torch.stack(path[::-1], 1)


def hidden_forward(scores: Tensor, transitions: Tensor) -> Tensor:
    """Log-likelihoods of a hidden Markov model by logsumexp of broadcast sums."""
    t = transitions.log_softmax(-1)
    a = scores[:, 0].log_softmax(-1)
    for k in range(1, scores.shape[1]):
        a = torch.logsumexp(a[:, :, None] + t[None], 1) + scores[:, k]
    return torch.logsumexp(a, -1)


def edit_distance(a: Tensor, b: Tensor) -> Tensor:
    """Levenshtein distances of short sequences, row by row with a running minimum."""
    n, m = a.shape[1], b.shape[1]
    ramp = torch.arange(m + 1, device=a.device)
    row = ramp.expand(len(a), -1)
    for i in range(n):
        cost = (a[:, i : i + 1] != b).long()
        new = torch.minimum(row[:, 1:] + 1, row[:, :-1] + cost)
        new = torch.cat((row[:, :1] + 1, new), 1)
        row = torch.cummin(new - ramp, 1).values + ramp
    return row[:, -1]


def resampled(particles: Tensor, logw: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """A particle filter's systematic resampling: cumsum, searchsorted, gather; and the effective number."""
    w = logw.softmax(-1)
    n = w.shape[1]
    at = (torch.arange(n, device=w.device, dtype=w.dtype) + u.sigmoid()) / n
    index = torch.searchsorted(w.cumsum(-1).contiguous(), at).clamp(max=n - 1)
    moved = torch.take_along_dim(particles, index[..., None], 1)
    return moved + 0.1 * torch.sin(moved), 1 / w.square().sum(-1)


def running(x: Tensor) -> tuple[Tensor, ...]:
    """Running maxima and minima with places, logcumsumexp, quantiles and ranks of rows."""
    top, at = torch.cummax(x, 1)
    low = torch.cummin(x, 1)[0]
    drawdown = (top - x).amax(1)
    q = torch.quantile(x, torch.tensor([0.1, 0.5, 0.9], device=x.device, dtype=x.dtype), dim=1)
    return top - low, at, drawdown, torch.logcumsumexp(x, 1), q, x.median(1).values, torch.kthvalue(x, 3, 1).values


def histograms(x: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
    """One histogram of all, and one of each row by bucketize and scatter_add."""
    e = edges.sort().values
    b = torch.bucketize(x, e, right=True)
    rows = torch.zeros(x.shape[0], len(e) + 1, device=x.device, dtype=torch.int64).scatter_add_(1, b, torch.ones_like(b))
    return torch.histc(x.float(), 64, -3, 3), rows


def hamming(codes: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes of 128 bits in two 64-bit numbers, bits counted in parallel."""
    v = queries[:, None] ^ codes[None]
    v = v - ((v >> 1) & 0x5555555555555555)
    v = (v & 0x3333333333333333) + ((v >> 2) & 0x3333333333333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F0F0F0F0F
    d = ((v * 0x0101010101010101) >> 56).sum(-1)
    return d.min(1)


def packed_signs(x: Tensor, w: Tensor) -> Tensor:
    """XNOR: signs packed into bytes by shifts and a sum, agreements from a table of counts."""
    bit = (1 << torch.arange(8, device=x.device)).to(torch.uint8)
    a, b = (((t > 0).unflatten(-1, (-1, 8)).to(torch.uint8) * bit).sum(-1, dtype=torch.uint8) for t in (x, w))
    table = ((torch.arange(256, device=x.device)[:, None] >> torch.arange(8, device=x.device)) & 1).sum(-1)
    return x.shape[-1] - 2 * table[(a[:, None] ^ b[None]).long()].sum(-1)


def morton(points: Tensor) -> tuple[Tensor, Tensor]:
    """Z-order codes of points by spread bits, and a generator's xorshift of them."""
    x = (points.sigmoid() * 1023).to(torch.int64)

    def spread(v: Tensor) -> Tensor:
        v = (v | (v << 16)) & 0x030000FF
        v = (v | (v << 8)) & 0x0300F00F
        v = (v | (v << 4)) & 0x030C30C3
        return (v | (v << 2)) & 0x09249249

    code = spread(x[:, 0]) | (spread(x[:, 1]) << 1) | (spread(x[:, 2]) << 2)
    h = code
    for a, b, c in ((13, 7, 17), (5, 9, 11)):
        h = h ^ (h << a)
        h = h ^ ((h >> b) & 0x1FFFFFFFFFFFFF)
        h = h ^ (h << c)
    return code, h & 0xFFFF


def polar_filter(signal: Tensor, gain: Tensor, phase: Tensor) -> Tensor:
    """A short-time transform shaped by torch.polar and turned back, with gradients."""
    window = torch.hann_window(256, device=signal.device, dtype=signal.dtype)
    s = torch.stft(signal, 256, 64, window=window, return_complex=True)
    s = s * torch.polar(F.softplus(gain), phase)[None, :, None]
    y = torch.istft(s, 256, 64, window=window, length=signal.shape[-1])
    return torch.log1p(s.abs()).mean() + y.square().mean()


def beamformer(x: Tensor, mask: Tensor) -> Tensor:
    """Spatial covariances of complex channels by masks, one step of a power method, beams; x of (b, mics, f, t, 2)."""
    z = torch.view_as_complex(x.contiguous())
    m = mask.sigmoid()
    phi = torch.einsum("bcft,bft,bdft->bfcd", z, m.to(z.dtype), z.conj()) / m.sum(-1)[..., None, None]
    v = phi[..., 0]
    for _ in range(3):
        v = torch.einsum("bfcd,bfd->bfc", phi, v)
        v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp(min=1e-6)
    y = torch.einsum("bfc,bcft->bft", v.conj(), z)
    return torch.view_as_real(y).square().sum(-1)


def multiplexed(bits: Tensor, channel: Tensor) -> Tensor:
    """OFDM: symbols by a constellation, an inverse transform, a cyclic prefix, a channel by its taps, and back."""
    symbol = torch.complex(bits[..., 0], bits[..., 1]) / math.sqrt(2)
    n = symbol.shape[-1]
    t = torch.fft.ifft(symbol, norm="ortho")
    t = torch.cat((t[..., -16:], t), -1)
    taps = torch.view_as_complex(channel.contiguous())
    y = sum(taps[k] * F.pad(t, (k, 0))[..., : n + 16] for k in range(taps.shape[0]))
    f = torch.fft.fft(y[..., 16:], norm="ortho") / (torch.fft.fft(taps, n=n) + 0.1)
    return (f - symbol).abs().square().mean(-1)


def ray_triangles(origin: Tensor, direction: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Möller and Trumbore: the nearest of all triangles for each ray."""
    a, b, c = corners.unbind(1)
    e1, e2 = b - a, c - a
    d = F.normalize(direction, dim=-1)[:, None]
    p = torch.linalg.cross(d.expand(-1, len(a), -1), e2[None].expand(len(d), -1, -1))
    det = (e1 * p).sum(-1)
    inv = 1 / torch.where(det.abs() < 1e-6, 1e-6, det)
    s = origin[:, None] - a
    u = (s * p).sum(-1) * inv
    q = torch.linalg.cross(s, e1[None].expand_as(s))
    v = (d * q).sum(-1) * inv
    t = (e2 * q).sum(-1) * inv
    hit = (u >= 0) & (v >= 0) & (u + v <= 1) & (t > 1e-3)
    return torch.where(hit, t, 1e6).min(1)


def inverse_distances(x: Tensor, known: Tensor, values: Tensor) -> Tensor:
    """Three nearest points by cdist and topk, their values by inverse distances."""
    d, at = torch.cdist(x, known).topk(3, dim=-1, largest=False)
    w = 1 / (d + 1e-3)
    w = w / w.sum(-1, keepdim=True)
    b = torch.arange(x.shape[0], device=x.device)[:, None, None]
    return (values[b, at] * w[..., None]).sum(2)


def leapfrog(x: Tensor, v: Tensor, mass: Tensor) -> Tensor:
    """Two steps of gravity among all bodies, with gradients."""

    def acceleration(x: Tensor) -> Tensor:
        d = x.unsqueeze(0) - x.unsqueeze(1)
        inv = (d.pow(2).sum(-1) + 0.05).pow(-1.5)
        return torch.einsum("ijk,ij,j->ik", d, inv, mass.abs())

    for _ in range(2):
        v = v + 0.005 * acceleration(x)
        x = x + 0.01 * v
        v = v + 0.005 * acceleration(x)
    return x


def smoothed_particles(x: Tensor, cell: Tensor) -> Tensor:
    """Densities and forces by a cubic spline kernel over 32 listed particles around each."""
    d = x[:, None] - x[cell]
    r = (d.square().sum(-1) + 1e-3).sqrt()
    q = r / 1.5
    w = torch.where(q < 0.5, 6 * (q**3 - q**2) + 1, torch.where(q < 1, 2 * (1 - q) ** 3, torch.zeros_like(q)))
    rho = w.sum(1) + 0.5
    p = (rho - 1) ** 2
    pair = (p / rho**2)[:, None] + (p / rho**2)[cell]
    return -(pair[..., None] * w[..., None] * d / r[..., None]).sum(1)


def mixed_types(a: Tensor, b: Tensor, c: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """float16, bfloat16, float32 and whole numbers in one expression, promoted as torch promotes."""
    h, f = a.to(torch.float16), c.to(torch.float32)
    y = h * b + n - f / 3
    z = torch.where(n > 2, h * 2, b.to(torch.bfloat16)) + n.to(torch.uint8).clamp(max=3)
    return y.softmax(-1), z.sum(0)


def expanded(x: Tensor, row: Tensor, one: Tensor) -> Tensor:
    """Inputs whose strides are 0, sizes of 1, and a result in another order."""
    y = x.expand(row.shape[0], -1, -1) * row.unsqueeze(-1).expand(-1, -1, x.shape[-1])
    y = torch.sin(y * one.expand_as(row)[..., None])
    return F.relu(y - y.mean((0, 2), keepdim=True)).permute(2, 0, 1) * torch.rsqrt(y.var((0, 2)) + 1e-3)


def outer_reductions(x: Tensor) -> tuple[Tensor, ...]:
    """Statistics over long outer axes of few columns, in several kinds at once."""
    top, at = x.max(0)
    mean = x.mean(0)
    std = (x - mean).square().mean(0).sqrt()
    z = (x - mean) / (std + 1e-5)
    return top, at, std, z.pow(3).mean(0), z.pow(4).mean(0) - 3, (x > mean).sum(0), x.abs().argmin(0), torch.logsumexp(x, 0)


def middle_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Statistics over the first and the last axis, a scale for the middle one, then sums over the middle."""
    var, mean = torch.var_mean(x, dim=(0, 2), keepdim=True, correction=0)
    y = (x - mean) * torch.rsqrt(var + 1e-5) * w[:, None] + b[:, None]
    return F.glu(y, dim=1).sum(1) + torch.amax(y, 1)


def many_small(*tensors: Tensor) -> Tensor:
    """Two hundred small tensors: norms, a stack, a scale of each, all of them in one."""
    norms = torch.stack([t.pow(2).sum() for t in tensors]).sqrt()
    s = 1 / norms.clamp(min=1)
    return torch.cat([(t * s[k]).reshape(-1) for k, t in enumerate(tensors)]).tanh()


def transposed_inputs(a: Tensor, b: Tensor, v: Tensor) -> Tensor:
    """Matrices and maps that come transposed and sliced with steps."""
    y = (a.t()[::2] @ b.t()[:, ::3]).relu()
    return y.t() * v[: y.shape[0]].flip(0)


def banded(x: Tensor, bands: Tensor) -> Tensor:
    """A banded matrix times vectors by as_strided windows, then ten sweeps of a tridiagonal solve."""
    b, n = x.shape
    p = F.pad(x, (3, 3)).contiguous()
    windows = p.as_strided((b, n, 7), (n + 6, 1, 1))
    y = (windows * bands).sum(-1)
    d = bands[:, 3].abs() + 4
    for _ in range(10):
        z = F.pad(x, (1, 1))
        x = (y - 0.5 * z[:, :-2] - 0.5 * z[:, 2:]) / d
    return x


def _steps(m: Make, n: int, k: int) -> list[Tensor]:
    return [m(n), m(n), m(k, 2, n), m(1)]


def _small(m: Make, n: int) -> list[Tensor]:
    shapes = [(7, 5), (13,), (3, 3, 3), (1,), (31, 2)]
    return [m(*shapes[k % 5]) for k in range(n)]


def _mixed(m: Make, n: int, d: int) -> list[Tensor]:
    return [m(n, d), m(n, 1), m(d), ids(m, 5, n, d).to(torch.int32)]


def _codes(m: Make, n: int, q: int) -> list[Tensor]:
    return [ids(m, 1 << 40, n, 2) * 7919, ids(m, 1 << 40, q, 2) * 104729]


WIDE = Sized(option_prices, lambda m, n: [m(n) for _ in range(4)], (9,), SINGLE)
STEPS = Sized(hidden_forward, lambda m, b, t, s: [m(b, t, s), m(s, s)], (3, 4, 5), SINGLE)
PADDED = Sized(padded_laplacians, lambda m, b, n, k: [m(b, n, k, n), m(b, n, k, n), m(b, n, k, n)], (1, 4, 5), SINGLE)

BLOCKS: tuple[Block, ...] = (
    Sized(
        dormand_prince, lambda m, n, d, h: [m(n, d), weight(m, h, d), m(h), weight(m, d, h)], (5, 4, 6), SINGLE, tf32=True
    ).block("dormand-prince", 4000, 64, 256, training=True),
    *PADDED.both("padded laplacians", 2, 96, 129),
    Sized(pressure, lambda m, b, n, k: [m(b, n + 1, k), m(b, n, k + 1)], (1, 5, 6), SINGLE).block("pressure", 4, 500, 511),
    Sized(limited_advection, lambda m, b, n: [m(b, n), m(b, n)], (2, 9), SINGLE).block(
        "limited advection", 300, 4001, training=True
    ),
    Sized(gradients_of_field, lambda m, b, n, k: [m(b, n, k)], (2, 5, 6), SINGLE).block(
        "gradients of a field", 16, 300, 301, training=True
    ),
    Sized(spins, lambda m, b, n: [m(b, n, n), m(2, b, n, n)], (2, 6), SINGLE).block("spins", 16, 512),
    Sized(life, lambda m, b, n, k: [m(b, 1, n, k)], (2, 6, 7), HALF).block("game of life", 8, 500, 510),
    Sized(fractal, lambda m, n, k: [m(n, k, 2)], (5, 6), SINGLE).block("fractal", 700, 1001),
    Sized(volatility_paths, _steps, (7, 3), SINGLE).block("volatility paths", 200000, 16, training=True),
    *WIDE.both("option prices", 3000001),
    Sized(best_states, lambda m, b, t, s: [m(b, t, s), m(s, s)], (3, 4, 5), SINGLE).block("best states", 128, 24, 45),
    *STEPS.both("hidden forward", 256, 20, 48),
    Sized(edit_distance, lambda m, b, n, k: [ids(m, 4, b, n), ids(m, 4, b, k)], (3, 4, 5)).block("edit distance", 2000, 16, 20),
    Sized(resampled, lambda m, b, n, d: [m(b, n, d), m(b, n), m(b, 1)], (2, 9, 3), SINGLE).block("resampled", 64, 5000, 6),
    Sized(running, lambda m, b, n: [m(b, n)], (3, 11), SINGLE).block("running extremes", 500, 2047),
    Sized(histograms, lambda m, b, n, k: [m(b, n), m(k)], (3, 20, 6), SINGLE).block("histograms", 200, 10000, 40),
    Sized(hamming, _codes, (7, 3)).block("hamming", 8000, 1001),
    Sized(packed_signs, lambda m, n, o, k: [m(n, k), m(o, k)], (5, 4, 16)).block("packed signs", 500, 600, 512),
    Sized(morton, lambda m, n: [m(n, 3)], (9,), SINGLE).block("morton codes", 2000001),
    Sized(polar_filter, lambda m, b, n: [m(b, n), m(129), m(129)], (2, 700), SINGLE).block(
        "polar filter", 16, 60000, training=True
    ),
    Sized(beamformer, lambda m, b, c, f, t: [m(b, c, f, t, 2), m(b, f, t)], (2, 3, 4, 5), SINGLE).block(
        "beamformer", 8, 6, 257, 200
    ),
    Sized(multiplexed, lambda m, b, n: [m(b, n, 2), m(6, 2) * 0.3], (3, 32), SINGLE).block(
        "multiplexed", 2000, 512, training=True
    ),
    Sized(ray_triangles, lambda m, r, t: [m(r, 3), m(r, 3), m(t, 3, 3)], (5, 6), SINGLE).block("ray triangles", 8000, 999),
    Sized(inverse_distances, lambda m, b, n, k, c: [m(b, n, 3), m(b, k, 3), m(b, k, c)], (2, 9, 6, 4), SINGLE).block(
        "inverse distances", 8, 2048, 512, 96, training=True
    ),
    Sized(leapfrog, lambda m, n: [m(n, 3), m(n, 3), m(n)], (7,), SINGLE).block("leapfrog", 1500, training=True),
    *Sized(smoothed_particles, lambda m, n, k: [m(n, 3), ids(m, n, n, k)], (9, 4), SINGLE).both(
        "smoothed particles", 60000, 32
    ),
    Sized(mixed_types, _mixed, (5, 6), SINGLE).block("mixed types", 4001, 1500),
    Sized(expanded, lambda m, b, n, d: [m(1, n, d), m(b, n), m(1, 1)], (3, 4, 5)).block(
        "expanded", 40, 300, 401, training=True
    ),
    Sized(outer_reductions, lambda m, n, d: [m(n, d)], (20, 3), SINGLE).block("outer reductions", 300001, 37),
    Sized(middle_norm, lambda m, b, c, n: [m(b, c, n), m(c), m(c)], (3, 4, 5), HALF).block(
        "middle norm", 100, 70, 1111, training=True
    ),
    Sized(many_small, _small, (7,), SINGLE).block("many small", 200, training=True),
    Sized(transposed_inputs, lambda m, k, n, o: [m(k, n), m(o, k), m(n)], (6, 8, 9), HALF).block(
        "transposed inputs", 1000, 1502, 1203, training=True
    ),
    Sized(banded, lambda m, b, n: [m(b, n), m(n, 7)], (2, 9), SINGLE).block("banded", 200, 5001, training=True),
)
