"""Programs of science and signals: stencils in float64, complex numbers, solvers, chains of frames, contractions of tensors."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


def heat_in_space(u: Tensor, k: Tensor) -> Tensor:
    """Two steps of a 27-point stencil in float64, walls that insulate, a varying conductivity."""
    for _ in range(2):
        p = F.pad(u[None, None], (1,) * 6, mode="replicate")[0, 0]
        near = (
            p[2:, 1:-1, 1:-1]
            + p[:-2, 1:-1, 1:-1]
            + p[1:-1, 2:, 1:-1]
            + p[1:-1, :-2, 1:-1]
            + p[1:-1, 1:-1, 2:]
            + p[1:-1, 1:-1, :-2]
        )
        far = sum(
            p[1 + a : p.shape[0] - 1 + a, 1 + b : p.shape[1] - 1 + b, 1 + c : p.shape[2] - 1 + c]
            for a in (-1, 1)
            for b in (-1, 1)
            for c in (-1, 1)
        )
        u = u + 0.05 * torch.sigmoid(k) * (near - 6 * u) + 0.002 * (far - 8 * u)
    return u


def shallow_water(h: Tensor, hu: Tensor, hv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three steps of the shallow water equations by Lax and Friedrichs, periodic, in float64."""
    h, hu, hv = 10 + 0.1 * h, 0.1 * hu, 0.1 * hv
    for _ in range(3):
        u, v = hu / h, hv / h
        fx = (hu, hu * u + 4.9 * h * h, hu * v)
        fy = (hv, hu * v, hv * v + 4.9 * h * h)
        state = []
        for q, f, g in zip((h, hu, hv), fx, fy, strict=True):
            mean = 0.25 * (q.roll(1, 0) + q.roll(-1, 0) + q.roll(1, 1) + q.roll(-1, 1))
            state.append(mean - 0.01 * (f.roll(-1, 1) - f.roll(1, 1) + g.roll(-1, 0) - g.roll(1, 0)))
        h, hu, hv = state
    return h, hu, hv


def staggered_fields(ez: Tensor, hx: Tensor, hy: Tensor, eps: Tensor) -> None:
    """Two steps of Yee's scheme in place, with a soft source."""
    for t in range(2):
        hx[:, :-1] -= 0.5 * (ez[:, 1:] - ez[:, :-1])
        hy[:-1] += 0.5 * (ez[1:] - ez[:-1])
        ez[1:-1, 1:-1] += 0.5 / (1 + eps[1:-1, 1:-1].abs()) * (hy[1:-1, 1:-1] - hy[:-2, 1:-1] - hx[1:-1, 1:-1] + hx[1:-1, :-2])
        ez[ez.shape[0] // 3, ez.shape[1] // 2] += math.sin(0.3 * t + 0.1)


def chaotic_ensemble(x: Tensor) -> Tensor:
    """An ensemble of Lorenz systems, four Runge-Kutta steps in float64, its covariance."""

    def rate(s: Tensor) -> Tensor:
        a, b, c = s.unbind(-1)
        return torch.stack((10 * (b - a), a * (28 - c) - b, a * b - 8 / 3 * c), -1)

    for _ in range(4):
        k1 = rate(x)
        k2 = rate(x + 0.005 * k1)
        k3 = rate(x + 0.005 * k2)
        k4 = rate(x + 0.01 * k3)
        x = x + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    x = x - x.mean(0)
    return x.T @ x / (len(x) - 1)


def conjugate_gradients(b: Tensor, k: Tensor) -> Tensor:
    """Four conjugate gradient steps of a screened Poisson problem, each of a batch with its own step size."""

    def apply(v: Tensor) -> Tensor:
        p = F.pad(v, (1, 1, 1, 1))
        return (4 + k.sigmoid()) * v - p[:, 2:, 1:-1] - p[:, :-2, 1:-1] - p[:, 1:-1, 2:] - p[:, 1:-1, :-2]

    x = torch.zeros_like(b)
    r = d = b
    old = (r * r).sum((1, 2), keepdim=True)
    for _ in range(4):
        q = apply(d)
        a = old / (d * q).sum((1, 2), keepdim=True)
        x, r = x + a * d, r - a * q
        new = (r * r).sum((1, 2), keepdim=True)
        d, old = r + new / old * d, new
    return x


def grid_cycle(u: Tensor, f: Tensor) -> Tensor:
    """A cycle of two grids: weighted Jacobi, restriction by strided convolution, correction by interpolation."""
    stencil = torch.tensor([[0.0, -1, 0], [-1, 4, -1], [0, -1, 0]], device=u.device, dtype=u.dtype).view(1, 1, 3, 3)
    line = torch.tensor([0.25, 0.5, 0.25], device=u.device, dtype=u.dtype)
    full = torch.outer(line, line).view(1, 1, 3, 3)

    def smooth(v: Tensor, rhs: Tensor, n: int) -> Tensor:
        for _ in range(n):
            v = v + 0.2 * (rhs - F.conv2d(v, stencil, padding=1))
        return v

    u = smooth(u, f, 2)
    rest = F.conv2d(f - F.conv2d(u, stencil, padding=1), full, stride=2)
    e = smooth(torch.zeros_like(rest), 4 * rest, 4)
    return smooth(u + F.conv_transpose2d(e, 4 * full, stride=2), f, 2)


def tridiagonal(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Thomas' algorithm for many systems of 24 unknowns, unrolled forward and backward."""
    n = a.shape[-1]
    b = b.abs() + 3
    cs, ds = [c[..., 0] / b[..., 0]], [d[..., 0] / b[..., 0]]
    for k in range(1, n):
        below = b[..., k] - a[..., k].tanh() * cs[-1]
        cs.append(c[..., k].tanh() / below)
        ds.append((d[..., k] - a[..., k].tanh() * ds[-1]) / below)
    x = [ds[-1]]
    for k in range(n - 2, -1, -1):
        x.append(ds[k] - cs[k] * x[-1])
    return torch.stack(x[::-1], -1)


def coupled_phases(phase: Tensor, frequency: Tensor) -> Tensor:
    """Kuramoto oscillators: sines of all differences summed, the order as a complex mean."""
    for _ in range(3):
        pull = torch.sin(phase[:, None, :] - phase[:, :, None]).mean(-1)
        phase = phase + 0.1 * (frequency + 1.5 * pull)
    return torch.polar(torch.ones_like(phase), phase).mean(-1).abs()


def circuit(real: Tensor, imaginary: Tensor, angles: Tensor) -> Tensor:
    """A register of qubits: rotations of each and controlled flips between neighbours on complex amplitudes."""
    b, n = real.shape[0], int(math.log2(real.shape[1]))
    state = torch.complex(real, imaginary).view(b, *([2] * n))
    state = state / torch.linalg.vector_norm(state.flatten(1), dim=1).view(b, *([1] * n))
    for k in range(n):
        c, s = torch.cos(angles[k]), torch.sin(angles[k])
        gate = torch.stack(
            [torch.complex(c, 0 * c), torch.complex(0 * s, -s), torch.complex(0 * s, -s), torch.complex(c, 0 * c)]
        )
        state = torch.movedim(torch.tensordot(gate.view(2, 2), state, dims=([1], [k + 1])), 0, k + 1)
        if k:
            flipped = state.select(k, 1).flip(k)
            state = torch.stack([state.select(k, 0), flipped], k)
    return state.abs().square().flatten(1)


def complex_layer(xr: Tensor, xi: Tensor, wr: Tensor, wi: Tensor, bias: Tensor) -> Tensor:
    """A complex convolution by four real ones, modReLU on magnitudes, a magnitude pooled."""
    yr = F.conv2d(xr, wr, padding=1) - F.conv2d(xi, wi, padding=1)
    yi = F.conv2d(xr, wi, padding=1) + F.conv2d(xi, wr, padding=1)
    size = torch.sqrt(yr.square() + yi.square() + 1e-6)
    gain = F.relu(size + bias.view(-1, 1, 1)) / size
    return F.avg_pool2d(torch.sqrt((yr * gain) ** 2 + (yi * gain) ** 2 + 1e-6), 2)


def envelope(x: Tensor) -> Tensor:
    """Hilbert's analytic signal by FFT, its envelope and instantaneous frequency."""
    n = x.shape[-1]
    at = torch.arange(n, device=x.device)
    gain = torch.where((at == 0) | (2 * at == n), 1, torch.where(2 * at < n, 2, 0)).to(x.dtype)
    z = torch.fft.ifft(torch.fft.fft(x) * gain)
    turn = z[..., 1:] * z[..., :-1].conj()
    return torch.cat([z.abs(), torch.atan2(turn.imag, turn.real + 3.0)], -1)


def registered(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Phase correlation: normalised cross spectra of windowed images, the peak and its value."""
    h, w = a.shape[-2:]
    window = torch.outer(*(torch.hann_window(n, device=a.device, dtype=a.dtype) for n in (h, w)))
    fa, fb = (torch.fft.rfft2(t * window) for t in (a, b))
    cross = fa * fb.conj()
    found = torch.fft.fftshift(torch.fft.irfft2(cross / (cross.abs() + 1e-3), s=(h, w)), dim=(-2, -1))
    return found.flatten(1).amax(1), found


def even_cosines(x: Tensor, w: Tensor) -> Tensor:
    """A cosine transform by FFT of a reordered sequence, coefficients weighted, the energy."""
    n = x.shape[-1]
    v = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], -1)
    k = -torch.arange(n, device=x.device, dtype=x.dtype) * math.pi / (2 * n)
    f = torch.view_as_real(torch.fft.fft(v))
    c = f[..., 0] * torch.cos(k) - f[..., 1] * torch.sin(k)
    return torch.log1p((c * w).square()).sum(-1)


def wavelets(x: Tensor, shrink: Tensor) -> Tensor:
    """Three levels of Daubechies' wavelets with circular borders, details shrunk, and back by transposed convolutions."""
    low = torch.tensor([0.4829629, 0.8365163, 0.2241439, -0.1294095], device=x.device, dtype=x.dtype)
    high = low.flip(0) * torch.tensor([1.0, -1, 1, -1], device=x.device, dtype=x.dtype)
    bank = torch.stack([low, high])[:, None]
    y, details = x[:, None], []
    for level in range(3):
        pair = F.conv1d(F.pad(y, (0, 2), mode="circular"), bank, stride=2)
        d = pair[:, 1:]
        details.append(d.sign() * F.relu(d.abs() - shrink[level].abs()))
        y = pair[:, :1]
    for d in reversed(details):
        full = F.conv_transpose1d(torch.cat([y, d], 1), bank, stride=2)
        y = full[..., :-2] + F.pad(full[..., -2:], (0, full.shape[-1] - 4))
    return y[:, 0].square()


def resonators(x: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """Banks of biquads over forty samples, unrolled, the transposed direct form."""
    y, s1, s2 = [], torch.zeros_like(x[0]), torch.zeros_like(x[0])
    a1, a2 = 1.5 * torch.tanh(a[0]), 0.9 * torch.sigmoid(a[1])
    for v in x.unbind(0):
        out = b[0] * v + s1
        s1, s2 = b[1] * v - a1 * out + s2, b[2] * v - a2 * out
        y.append(out)
    return torch.stack(y).square().mean(0)


def resampled_sound(x: Tensor, noise: Tensor) -> Tensor:
    """Sound from 3 to 2 samples by windowed sincs, a running median, mixed as saturated int16."""
    at = torch.arange(-9, 10, device=x.device, dtype=x.dtype)
    kernels = torch.stack([torch.sinc((at + k / 2) * 0.6) * torch.cos((at + k / 2) * math.pi / 24) ** 2 for k in (0, 1)])
    y = F.conv1d(F.pad(x[:, None], (9, 9)), 0.6 * kernels[:, None], stride=3)
    y = y.transpose(1, 2).reshape(x.shape[0], -1)
    smooth = F.pad(y, (2, 2), mode="reflect").unfold(-1, 5, 1).median(-1).values
    a = (smooth * 9000).clamp(-32768, 32767).to(torch.int16)
    b = (noise[: smooth.shape[-1]] * 7000).clamp(-32768, 32767).to(torch.int16)
    return (a.to(torch.int32) + (b >> 1)).clamp(-32768, 32767).to(torch.int16)


def arm(q: Tensor, offsets: Tensor, wanted: Tensor) -> Tensor:
    """Forward kinematics of seven joints by 4x4 transforms, the error of the last one, by position and by rotation."""
    b, n = q.shape
    c, s, o, z = torch.cos(q), torch.sin(q), torch.ones_like(q), torch.zeros_like(q)
    rotations = torch.stack([c, -s, z, z, s, c, z, z, z, z, o, z, z, z, z, o], -1).view(b, n, 4, 4)
    links = torch.eye(4, device=q.device, dtype=q.dtype).repeat(n, 1, 1)
    links[:, :3, 3] = offsets
    links[:, 1, 1] = links[:, 2, 2] = 0
    links[:, 1, 2], links[:, 2, 1] = -1, 1
    pose = links[0] @ rotations[:, 0]
    for k in range(1, n):
        pose = pose @ links[k] @ rotations[:, k]
    place = (pose[:, :3, 3] - wanted).square().sum(-1)
    trace = pose[:, :3, :3].diagonal(dim1=1, dim2=2).sum(-1)
    return place + torch.acos(((trace - 1) / 2).clamp(-0.999, 0.999))


def skinned(v: Tensor, shapes: Tensor, beta: Tensor, weights: Tensor, pose: Tensor) -> Tensor:
    """SMPL: vertices from blend shapes, rotations from axis angles, a linear blend of 24 transforms."""
    b = pose.shape[0]
    moved = v + torch.einsum("bl,mkl->bmk", beta, shapes)
    angle = (pose.square().sum(-1, keepdim=True) + 1e-8).sqrt()
    x, y, z = (pose / angle).unbind(-1)
    o = torch.zeros_like(x)
    k = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(b, -1, 3, 3)
    s, c = angle.sin()[..., None], angle.cos()[..., None]
    rotations = torch.eye(3, device=v.device, dtype=v.dtype) + s * k + (1 - c) * (k @ k)
    blended = torch.einsum("mj,bjpq->bmpq", weights.softmax(-1), rotations)
    return torch.einsum("bmpq,bmq->bmp", blended, moved)


def marched(origin: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Rays marched through a signed distance of blended shapes, ten steps; normals by differences, a light."""

    def distance(p: Tensor) -> Tensor:
        ball = p.norm(dim=-1) - 1
        q = p.abs() - 0.7
        box = q.clamp(min=0).norm(dim=-1) + q.amax(-1).clamp(max=0)
        h = (0.5 + 0.5 * (box - ball) / 0.2).clamp(0, 1)
        return torch.lerp(box, ball, h) - 0.2 * h * (1 - h)

    d = F.normalize(direction, dim=-1)
    start = F.normalize(origin, dim=-1) * 3
    t = torch.zeros_like(d[:, 0])
    for _ in range(10):
        t = t + distance(start + t[:, None] * d).clamp(max=1)
    p = start + t[:, None] * d
    e = torch.eye(3, device=p.device, dtype=p.dtype) * 0.01
    normal = torch.stack([distance(p + e[k]) - distance(p - e[k]) for k in range(3)], -1)
    return t, F.relu(F.normalize(normal, dim=-1, eps=1e-4) @ (e[0] + e[1]) * 70)


def tensor_train(x: Tensor, g1: Tensor, g2: Tensor, g3: Tensor, bias: Tensor) -> Tensor:
    """A linear layer as a train of three cores, contracted by einsum one after the other."""
    b = x.shape[0]
    y = x.view(b, g1.shape[0], g2.shape[1], g3.shape[1])
    y = torch.einsum("bijk,ipr->bjkpr", y, g1)
    y = torch.einsum("bjkpr,rjqs->bkpqs", y, g2)
    return torch.einsum("bkpqs,sko->bpqo", y, g3).flatten(1) + bias


def odd_contractions(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Traces, diagonals, repeated and missing indices, sums over broadcast axes, by einsum."""
    t = torch.einsum("bii->b", a) + torch.einsum("bij,bij->b", a, a.mT)
    u = torch.einsum("bii,ic->bc", a, c)
    v = torch.einsum("bij,jk,bki->b", a, d, b)
    w = torch.einsum("b...j,j...->b...", a, d).sum(1)
    return t + u.square().sum(1).sqrt() + v + w + torch.einsum("bij,ci->bc", b, c.T).amax(1)


def harmonic_tensors(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """e3nn: scalars, vectors, what they make by cross, dot and outer, mixed over channels by weights of paths."""
    s, v = x[..., 0], x[..., 1:]
    t, u = y[:, None, 0], y[:, None, 1:]
    dot = (v * u).sum(-1) / 3**0.5
    cross = torch.linalg.cross(v, u.expand_as(v), dim=-1) / 2**0.5
    outer = (v[..., :, None] * u[..., None, :] + v[..., None, :] * u[..., :, None]) / 2
    outer = outer - torch.eye(3, device=x.device, dtype=x.dtype) * (dot / 3**0.5)[..., None, None]
    scalars = torch.einsum("nc,cd->nd", s * t, w[0]) + torch.einsum("nc,cd->nd", dot, w[1])
    vectors = torch.einsum("nci,cd->ndi", v * t[..., None] + cross, w[2]) + torch.einsum("nc,ni,cd->ndi", s, u[:, 0], w[3])
    tensors = torch.einsum("ncij,cd->ndij", outer, w[4])
    return torch.cat([scalars[..., None], vectors, tensors.flatten(-2)], -1)


def invariant_points(q: Tensor, k: Tensor, v: Tensor, rotations: Tensor, shifts: Tensor, bias: Tensor, scale: Tensor) -> Tensor:
    """AlphaFold's attention by distances of points in global frames, results in local frames again."""
    n, _h = q.shape[:2]
    frame = rotations / rotations.norm(dim=-1, keepdim=True)
    qg, kg, vg = (torch.einsum("nij,nhpj->nhpi", frame, t) + shifts[:, None, None] for t in (q, k, v))
    gap = (qg[:, None] - kg[None]).square().sum((-1, -2))
    p = (bias - 0.5 * F.softplus(scale) * gap * 0.1).softmax(dim=1)
    y = torch.einsum("nmh,mhpi->nhpi", p, vg) - shifts[:, None, None]
    y = torch.einsum("nij,nhpi->nhpj", frame, y)
    return torch.cat([y, (y.square().sum(-1, keepdim=True) + 1e-8).sqrt()], -1).view(n, -1)


def torsions(x: Tensor, at: Tensor, k: Tensor) -> Tensor:
    """Energies of bonds, angles and dihedrals by gathered positions; cross products, atan2, a cosine series."""
    a, b, c, d = x[at].unbind(1)
    b1, b2, b3 = b - a, c - b, d - c
    n1, n2 = torch.linalg.cross(b1, b2), torch.linalg.cross(b2, b3)
    m = torch.linalg.cross(n1, F.normalize(b2, dim=-1))
    phi = torch.atan2((m * n2).sum(-1), (n1 * n2).sum(-1) + 1e-3)
    cosine = F.cosine_similarity(b1, -b2, dim=-1).clamp(-0.99, 0.99)
    order = torch.arange(1, 4, device=x.device, dtype=x.dtype)
    series = (k * (1 + torch.cos(order * phi[:, None]))).sum(-1)
    return (series + (torch.acos(cosine) - 1.9) ** 2 + (b1.norm(dim=-1) - 1.5) ** 2).mean()


def american_options(s: Tensor, k: Tensor) -> Tensor:
    """A binomial tree of thirty levels in float64, the better of holding and exercising at each node."""
    n, up = 30, 1.02
    start, strike = s.abs() + 1, k.abs() + 1
    power = torch.arange(-n, n + 1, 2, device=s.device, dtype=s.dtype)
    value = (strike[:, None] - start[:, None] * up**power).clamp(min=0)
    for level in range(n - 1, -1, -1):
        power = torch.arange(-level, level + 1, 2, device=s.device, dtype=s.dtype)
        hold = 0.999 * (0.505 * value[:, 1:] + 0.495 * value[:, :-1])
        value = torch.maximum(hold, strike[:, None] - start[:, None] * up**power)
    return value[:, 0]


def orbits(mean: Tensor, ellipse: Tensor, axis: Tensor) -> Tensor:
    """Kepler's equation by eight Newton steps in float64, true anomalies, great-circle distances to the first."""
    e = 0.9 * ellipse.sigmoid()
    big = mean + e * mean.sin()
    for _ in range(8):
        big = big - (big - e * big.sin() - mean) / (1 - e * big.cos())
    true = 2 * torch.atan2((1 + e).sqrt() * (big / 2).sin(), (1 - e).sqrt() * (big / 2).cos())
    r = (1 + axis.abs()) * (1 - e * big.cos())
    gap = (true - true[:1]) / 2
    return torch.stack([r, true, 2 * torch.asin((gap.sin() ** 2).clamp(max=1 - 1e-9).sqrt())])


def motifs(x: Tensor, w: Tensor, dense: Tensor) -> Tensor:
    """Motifs of DNA on both strands: a convolution of one-hot bases and of their reverse complement, maxima, a layer."""
    one = F.one_hot(x, 4).transpose(1, 2).to(w.dtype)
    both = torch.maximum(F.conv1d(one, w), F.conv1d(one, w.flip(1, 2)))
    y = F.max_pool1d(F.relu(both), 16, stride=8, ceil_mode=True)
    return torch.einsum("bcl,co->bol", y, dense).softmax(-1).amax(-1)


def backward_riccati(a: Tensor, b: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """LQR of many systems: eight backward Riccati steps with 2x2 inverses by hand, then a rollout."""
    n = a.shape[-1]
    eye = torch.eye(n, device=a.device, dtype=a.dtype)
    a = eye + 0.1 * a
    q = q @ q.mT * 0.1 + eye
    p, gains = q, []
    for _ in range(8):
        m = b.mT @ p @ b + torch.eye(2, device=a.device, dtype=a.dtype)
        (m00, m01), (m10, m11) = (row.unbind(-1) for row in m.unbind(-2))
        inverse = torch.stack([m11, -m01, -m10, m00], -1).view_as(m) / (m00 * m11 - m01 * m10)[:, None, None]
        gain = inverse @ (b.mT @ p @ a)
        p = q + a.mT @ p @ (a - b @ gain)
        gains.append(gain)
    for gain in reversed(gains):
        x = (a - b @ gain) @ x
    return x.squeeze(-1).square().sum(-1) + p.diagonal(dim1=1, dim2=2).sum(-1)


def _points(m: Make, n: int, h: int, p: int) -> list[Tensor]:
    return [m(n, h, p, 3), m(n, h, p, 3), m(n, h, p, 3), m(n, 3, 3), m(n, 3), m(n, n, h), m(h)]


HEAT = Sized(heat_in_space, lambda m, n: [m(n, n + 1, n + 2), m(n, n + 1, n + 2)], (5,), DOUBLE)
CYCLE = Sized(grid_cycle, lambda m, b, n: [m(b, 1, n, n), m(b, 1, n, n)], (1, 9), DOUBLE)
TRAIN = Sized(
    tensor_train,
    lambda m, b, i, r: [m(b, i * i * i), m(i, i, r) * 0.2, m(r, i, i, r) * 0.1, m(r, i, i) * 0.1, m(i**3)],
    (3, 4, 3),
    SINGLE,
    tf32=True,
)
ARM = Sized(arm, lambda m, b: [m(b, 7), m(7, 3), m(b, 3)], (5,), SINGLE)
SKIN = Sized(skinned, lambda m, b, n: [m(n, 3), m(n, 3, 10) * 0.1, m(b, 10), m(n, 24), m(b, 24, 3)], (3, 7), SINGLE, tf32=True)

BLOCKS: tuple[Block, ...] = (
    *HEAT.both("heat in space", 190),
    Sized(shallow_water, lambda m, n: [m(n, n + 1) for _ in range(3)], (7,), DOUBLE).block("shallow water", 1500),
    Sized(staggered_fields, lambda m, n: [m(n, n + 3) for _ in range(4)], (9,), SINGLE).block("staggered fields", 2000),
    Sized(chaotic_ensemble, lambda m, n: [m(n, 3)], (9,), DOUBLE).block("chaotic ensemble", 1000003),
    Sized(conjugate_gradients, lambda m, b, n: [m(b, n, n + 1), m(b, n, n + 1)], (2, 6), SINGLE).block(
        "conjugate gradients", 16, 255, training=True
    ),
    *CYCLE.both("two grids", 4, 511),
    Sized(tridiagonal, lambda m, n, k: [m(n, k) for _ in range(4)], (3, 6), SINGLE).block(
        "tridiagonal", 100003, 24, training=True
    ),
    Sized(coupled_phases, lambda m, b, n: [m(b, n), m(b, n)], (2, 7), SINGLE).block("coupled phases", 16, 1500),
    Sized(circuit, lambda m, b, n: [m(b, n), m(b, n), m(20)], (2, 8), SINGLE).block("circuit", 64, 4096),
    Sized(
        complex_layer,
        lambda m, b, c, h: [m(b, c, h, h), m(b, c, h, h), *(weight(m, 2 * c, c, 3, 3) for _ in range(2)), m(2 * c)],
        (2, 3, 6),
    ).block("complex convolutions", 8, 48, 90, training=True),
    Sized(envelope, lambda m, b, n: [m(b, n)], (2, 12), SINGLE).block("envelope", 64, 16384),
    Sized(registered, lambda m, b, h, w: [m(b, h, w), m(b, h, w)], (2, 8, 10), SINGLE).block("registered", 32, 256, 320),
    Sized(even_cosines, lambda m, b, n: [m(b, n), m(n)], (3, 10), SINGLE).block("even cosines", 4096, 1000, training=True),
    Sized(wavelets, lambda m, b, n: [m(b, n), m(3)], (2, 24), SINGLE).block("wavelets", 256, 16000, training=True),
    Sized(resonators, lambda m, n, b: [m(n, b), m(3, b), m(2, b)], (4, 5), SINGLE).block(
        "resonators", 40, 100003, training=True
    ),
    Sized(resampled_sound, lambda m, b, n: [m(b, n), m(n)], (2, 40), SINGLE).block("resampled sound", 16, 300001),
    *ARM.both("arm", 200003),
    *SKIN.both("skinned", 256, 6890),
    Sized(marched, lambda m, n: [m(n, 3), m(n, 3)], (9,), SINGLE).block("marched rays", 1000003),
    *TRAIN.both("tensor train", 4096, 10, 16),
    Sized(odd_contractions, lambda m, b, n, c: [m(b, n, n), m(b, n, n), m(n, c), m(n, n)], (3, 5, 4), SINGLE, tf32=True).block(
        "odd contractions", 3001, 60, 37, training=True
    ),
    Sized(harmonic_tensors, lambda m, n, c: [m(n, c, 4), m(n, 4), m(5, c, c) * c**-0.5], (5, 6), SINGLE, tf32=True).block(
        "harmonic tensors", 20000, 64, training=True
    ),
    Sized(invariant_points, _points, (6, 2, 3), SINGLE, tf32=True).block("invariant points", 384, 12, 4, training=True),
    Sized(
        torsions,
        lambda m, n, k: [m(n, 3), (ids(m, n, k, 1) + torch.arange(0, 8, 2, device=m(1).device)) % n, m(k, 3)],
        (9, 15),
        SINGLE,
    ).block("torsions", 50000, 150001, training=True),
    Sized(american_options, lambda m, n: [m(n), m(n)], (5,), DOUBLE).block("american options", 100003),
    Sized(orbits, lambda m, n: [m(n), m(n), m(n)], (9,), DOUBLE).block("orbits", 1000003),
    Sized(
        motifs, lambda m, b, n, c, k: [ids(m, 4, b, n), weight(m, c, 4, k), m(c, 9) * c**-0.5], (2, 40, 5, 6), SINGLE, tf32=True
    ).block("motifs", 64, 2001, 128, 19, training=True),
    Sized(backward_riccati, lambda m, b, n: [m(b, n, n), m(b, n, 2), m(b, n, n), m(b, n, 1)], (3, 4), SINGLE).block(
        "riccati", 20000, 6, training=True
    ),
)
