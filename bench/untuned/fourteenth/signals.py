"""Sound, series, physics and chemistry: firing, loudness, rooms, turned states, sky, energies, tensors, waves, cells."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, HALF = torch.float32, torch.float16


# ---- sound ----------------------------------------------------------------------------------------------------------------


def fired(x: Tensor, kernel: Tensor, project: Tensor, lengths: Tensor) -> Tensor:
    """Continuous integrate-and-fire: weights of frames, scaled to a length, cut where their sum passes whole numbers."""
    b, s, d = x.shape
    y = F.relu(F.conv1d(x.transpose(1, 2), kernel, padding=1, groups=d) + x.transpose(1, 2)).transpose(1, 2)
    alpha = torch.sigmoid(y @ project)
    total = alpha.sum(1, keepdim=True)
    alpha = alpha * (lengths[:, None] / total)
    most = s // 4
    right = alpha.cumsum(1)
    left = right - alpha
    last, first = right.detach().floor().long().clamp(0, most), left.detach().floor().long().clamp(0, most)
    fires = last > first
    after = torch.where(fires, right - last.to(x.dtype), 0)
    out = torch.zeros(b, most + 1, d, dtype=x.dtype, device=x.device)
    out = out.scatter_add(1, first[..., None].expand(-1, -1, d), (alpha - after)[..., None] * x)
    out = out.scatter_add(1, last[..., None].expand(-1, -1, d), after[..., None] * x)
    return out[:, :most].square().mean() + (total[:, 0] - lengths).abs().mean() / s


def zip_layer(x: Tensor, bias: Tensor, scale: Tensor, keep: Tensor, pick: Tensor, *w: Tensor) -> Tensor:
    """Zipformer: frames merged by learned weights, Swoosh activations, a gated convolution, BiasNorm, a bypass."""
    up, down, gate, dw, out = w
    b, s, d = x.shape
    n = (s + 1) // 2
    padded = torch.cat([x, x[:, -1:].expand(-1, 2 * n - s, -1)], 1).reshape(b, n, 2, d)
    y = src = (padded * pick.softmax(0)[:, None]).sum(2)
    h = F.linear(y, up)
    h = torch.logaddexp(torch.zeros_like(h), h - 4.0) - 0.08 * h - 0.035
    y = y + F.linear(h, down)
    a, g = F.linear(y, gate).chunk(2, -1)
    c = F.conv1d((a * g.sigmoid()).transpose(1, 2), dw, padding=15, groups=d).transpose(1, 2)
    c = torch.logaddexp(torch.zeros_like(c), c - 1.0) - 0.08 * c - 0.313261687
    y = y + F.linear(c, out)
    y = y * ((y - bias).square().mean(-1, keepdim=True) ** -0.5 * scale.exp())
    y = src + (y - src) * keep.clamp(0.2, 1.0)
    y = y.unsqueeze(2).expand(-1, -1, 2, -1).reshape(b, 2 * n, d)[:, :s]
    return x + (y - x) * keep


def gated_loudness(x: Tensor, shelf: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """BS.1770: two filters, powers of overlapping blocks, an absolute and a relative gate; loudness and a normalised wave."""
    b, c, n = x.shape
    size, hop = (19200, 4800) if n > 20000 else (40, 10)
    y = x.view(b * c, 1, n)
    for taps in (shelf, high):
        y = F.conv1d(F.pad(y, (taps.shape[-1] - 1, 0)), taps.flip(-1)[None, None])
    power = y.view(b, c, n).unfold(2, size, hop).square().mean(-1).sum(1)
    level = -0.691 + 10 * torch.log10(power + 1e-10)
    loud = (level > -70).to(x.dtype)
    mean = (power * loud).sum(1, keepdim=True) / loud.sum(1, keepdim=True).clamp(min=1)
    gate = -0.691 + 10 * torch.log10(mean + 1e-10) - 10
    loud = loud * (level > gate)
    final = -0.691 + 10 * torch.log10((power * loud).sum(1) / loud.sum(1).clamp(min=1) + 1e-10)
    return final, torch.tanh(x * (10 ** ((-23 - final) / 20))[:, None, None])


def image_sources(size: Tensor, source: Tensor, mic: Tensor, walls: Tensor) -> Tensor:
    """A room's echoes by mirrored sources up to order five in each direction: delays, losses, arrivals added up."""
    r = torch.arange(-5, 6, device=size.device)
    n = torch.stack(torch.meshgrid(r, r, r, indexing="ij"), -1).reshape(-1, 3)
    room = size.abs() * 2 + 3
    s, m = room * source.sigmoid(), room * mic.sigmoid()
    odd = (n % 2).to(size.dtype)
    at = n * room[:, None] + torch.where(odd > 0, room[:, None] - s[:, None], s[:, None])
    far = torch.linalg.vector_norm(at - m[:, None], dim=-1)
    hits = torch.stack([(n - 1).abs() // 2 + n.abs() % 2, n.abs() // 2], -1)
    loss = (0.3 + 0.6 * walls.sigmoid()).view(-1, 1, 3, 2)
    amplitude = torch.prod((loss**hits).flatten(2), -1) / (4 * math.pi * far.clamp(min=0.1))
    delay = far * (16000 / 343)
    low = delay.floor()
    part = delay - low
    out = torch.zeros(len(size), 8192, dtype=size.dtype, device=size.device)
    for k, share in ((0, 1 - part), (1, part)):
        out = out.scatter_add(1, (low.long() + k).clamp(max=8191), amplitude * share)
    return out


def quaternion_layers(x: Tensor, a: Tensor, b: Tensor, c: Tensor, labels: Tensor) -> Tensor:
    """Quaternion networks: one matrix of four signed and shared blocks a layer, a convolution and two linear layers, a loss."""

    def hamilton(w: Tensor) -> Tensor:
        r, i, j, k = w.unbind(0)
        rows = [[r, -i, -j, -k], [i, r, -k, j], [j, k, r, -i], [k, -j, i, r]]
        return torch.cat([torch.cat(row, 1) for row in rows], 0)

    y = F.hardtanh(F.conv1d(x, hamilton(a), padding=2))
    y = F.hardtanh(F.linear(y.transpose(1, 2), hamilton(b)))
    logits = F.linear(y, hamilton(c))
    return F.cross_entropy(logits.transpose(1, 2), labels)


def unitary_cells(x: Tensor, w: Tensor, bias: Tensor, phases: Tensor, mirrors: Tensor, out: Tensor) -> Tensor:
    """A unitary recurrence, complex by hand: phases, reflections and a permutation a step, magnitudes thresholded."""
    t, b, _ = x.shape
    d = bias.shape[0]
    inputs = F.linear(x, w)
    cos, sin = phases.cos(), phases.sin()
    order = torch.arange(d - 1, -1, -1, device=x.device)
    re = torch.full((b, d), d**-0.5, dtype=x.dtype, device=x.device)
    im = torch.zeros_like(re)

    def mirrored(re: Tensor, im: Tensor, k: int) -> tuple[Tensor, Tensor]:
        vr, vi = mirrors[k]
        dot_r, dot_i = re @ vr + im @ vi, im @ vr - re @ vi
        scale = 2 / (vr.square().sum() + vi.square().sum())
        dr, di = (scale * dot_r)[:, None], (scale * dot_i)[:, None]
        return re - (dr * vr - di * vi), im - (dr * vi + di * vr)

    for k in range(t):
        re, im = re * cos[0] - im * sin[0], re * sin[0] + im * cos[0]
        re, im = mirrored(re, im, 0)
        re, im = re[:, order], im[:, order]
        re, im = re * cos[1] - im * sin[1], re * sin[1] + im * cos[1]
        re, im = mirrored(re, im, 1)
        re, im = re + inputs[k, :, :d], im + inputs[k, :, d:]
        size = (re * re + im * im + 1e-6).sqrt()
        gain = F.relu(size + bias) / size
        re, im = re * gain, im * gain
    return F.linear(torch.cat([re, im], -1), out)


# ---- series ---------------------------------------------------------------------------------------------------------------


def long_short(x: Tensor, conv: Tensor, *w: Tensor) -> Tensor:
    """LSTNet: a convolution over all series, a GRU's cells by hand, cells that skip a period, an autoregressive part."""
    wi, wh, si, sh, join, own = w
    b, _, _ = x.shape
    c = F.relu(F.conv2d(x[:, None], conv))[..., 0].permute(2, 0, 1)

    def run(steps: Tensor, a: Tensor, u: Tensor) -> Tensor:
        h = torch.zeros(steps.shape[1], u.shape[1], dtype=x.dtype, device=x.device)
        for g in F.linear(steps, a):
            (r, z, n), (hr, hz, hn) = g.chunk(3, -1), F.linear(h, u).chunk(3, -1)
            r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
            h = z * h + (1 - z) * F.relu(n + r * hn)
        return h

    last = run(c[-12:], wi, wh)
    period = 4
    skipped = c[-3 * period :].reshape(3, period, b, -1).flatten(1, 2)
    s = run(skipped, si, sh).view(period, b, -1).transpose(0, 1).flatten(1)
    return torch.sigmoid(F.linear(torch.cat([last, s], 1), join) + (x[:, -own.shape[0] :] * own[:, None]).sum(1))


def graph_sequences(x: Tensor, adjacency: Tensor, g: Tensor, *w: Tensor) -> Tensor:
    """STGCN: gated convolutions in time around a graph convolution with a normalised Laplacian's polynomials, a norm."""
    first, theta, last, out = w
    d = adjacency.sigmoid()
    d = (d + d.T) * 0.5
    scale = d.sum(1).rsqrt()
    lap = -scale[:, None] * d * scale

    def gated(x: Tensor, k: Tensor) -> Tensor:
        p, q = F.conv2d(x, k).chunk(2, 1)
        return p * q.sigmoid()

    y = gated(x, first)
    t1 = torch.einsum("nm,bctm->bctn", lap, y)
    t2 = 2 * torch.einsum("nm,bctm->bctn", lap, t1) - y
    y = F.relu(torch.einsum("kio,kbitn->botn", theta, torch.stack([y, t1, t2])) + y)
    y = gated(y, last)
    y = F.layer_norm(y.permute(0, 2, 3, 1), g.shape[1:], g[0], g[1])
    return F.linear(y, out)[..., 0]


def change_points(y: Tensor, known: Tensor, trend: Tensor, deltas: Tensor, waves: Tensor, spread: Tensor) -> Tensor:
    """Prophet: slopes that change at points of time, yearly and weekly waves, robust errors of known days, priors."""
    n, days = y.shape
    t = torch.arange(days, device=y.device, dtype=y.dtype) / days
    points = torch.linspace(0, 0.8, deltas.shape[1], device=y.device, dtype=y.dtype)
    after = (t[:, None] >= points).to(y.dtype)
    slope = trend[:, :1] + deltas @ after.T
    offset = trend[:, 1:] + (-points * deltas) @ after.T
    angles = 2 * math.pi * days * t[:, None]
    year = angles / 365.25 * torch.arange(1, 11, device=y.device)
    week = angles / 7 * torch.arange(1, 4, device=y.device)
    design = torch.cat([year.cos(), year.sin(), week.cos(), week.sin()], 1)
    made = (slope * t + offset) * (1 + 0.1 * torch.tanh(waves @ design.T))
    sigma = F.softplus(spread)[:, None] + 1e-3
    each = torch.where(known, 2.5 * torch.log1p(((y - made) / sigma) ** 2 / 4) + sigma.log(), 0)
    return each.sum() / n + 10 * deltas.abs().sum() / n + 0.05 * waves.square().sum() / n


# ---- physics, chemistry ---------------------------------------------------------------------------------------------------


def plasma(f: Tensor) -> tuple[Tensor, Tensor]:
    """Vlasov and Poisson: three split steps of a density over places and speeds, shifted by cubic interpolation."""
    nx, nv = f.shape
    f = f.abs()
    v = torch.linspace(-6, 6, nv, device=f.device, dtype=f.dtype)
    dx, dv, dt = 4 * math.pi / nx, 12 / (nv - 1), 0.05

    def shifted(f: Tensor, by: Tensor, dim: int) -> Tensor:
        n = f.shape[dim]
        whole = by.floor()
        a = by - whole
        at = torch.arange(n, device=f.device)
        at = (at[:, None] - whole if dim == 0 else at - whole[:, None]).long()
        weights = (
            -a * (1 - a) * (2 - a) / 6,
            (1 + a) * (1 - a) * (2 - a) / 2,
            (1 + a) * a * (2 - a) / 2,
            -(1 + a) * a * (1 - a) / 6,
        )
        out = torch.zeros_like(f)
        for k, c in zip((1, 0, -1, -2), weights, strict=True):
            out = out + (c if dim == 0 else c[:, None]) * f.gather(dim, (at + k) % n)
        return out

    for _ in range(3):
        f = shifted(f, v * (dt / 2 / dx), 0)
        rho = 1 - f.sum(1) / f.sum(1).mean()
        field = (rho - rho.mean()).cumsum(0) * dx
        field = field - field.mean()
        f = shifted(f, field * (-dt / dv), 1)
        f = shifted(f, v * (dt / 2 / dx), 0)
    return f, field.square().sum() * dx / 2


def exchange_energy(rho: Tensor, grad: Tensor, weights: Tensor) -> Tensor:
    """A density functional's energy on a grid: PBE exchange and correlation without spin; its gradients are the potential."""
    n = rho.abs() + 1e-3
    g = grad.square().sum(-1)
    kf = (3 * math.pi**2 * n) ** (1 / 3)
    s2 = g / (2 * kf * n) ** 2
    ex = -3 / (4 * math.pi) * kf * (1 + 0.804 - 0.804 / (1 + 0.21951 * s2 / 0.804))
    rs = (3 / (4 * math.pi * n)) ** (1 / 3)
    root = rs.sqrt()
    ec = -2 * 0.031091 * (1 + 0.21370 * rs)
    ec = ec * torch.log1p(1 / (2 * 0.031091 * (7.5957 * root + 3.5876 * rs + 1.6382 * rs * root + 0.49294 * rs * rs)))
    gamma, beta = (1 - math.log(2)) / math.pi**2, 0.066725
    t2 = g * math.pi / (16 * kf * n * n)
    a = beta / gamma / torch.expm1(-ec / gamma)
    top = 1 + a * t2
    h = gamma * torch.log1p(beta / gamma * t2 * top / (top + (a * t2) ** 2))
    return (weights.abs() * n * (ex + ec + h)).sum() / n.shape[0]


def second_order_pairs(b: Tensor, occupied: Tensor, virtual: Tensor) -> Tensor:
    """MP2 with fitted densities: integrals of pairs from three-index factors, over differences of four energies."""
    o, v, _ = b.shape
    eri = torch.einsum("iaq,jbq->iajb", b, b)
    eo, ev = -occupied.abs() - 1, virtual.abs() + 0.5
    below = eo[:, None, None, None] + eo[None, None, :, None] - ev[None, :, None, None] - ev
    same, other = (eri * eri / below).sum(), (eri * eri.transpose(1, 3) / below).sum()
    return (1.2 * same + (same - other) / 3) / (o * o * v)


def effective_hamiltonian(left: Tensor, mpo1: Tensor, mpo2: Tensor, right: Tensor, psi: Tensor) -> Tensor:
    """DMRG's inner step: a two-site state through four tensors in turn, its energy, three steepest steps with it."""
    for _ in range(3):
        t = torch.einsum("awb,bstc->awstc", left, psi)
        t = torch.einsum("awstc,wxus->axutc", t, mpo1)
        t = torch.einsum("axutc,xyvt->ayuvc", t, mpo2)
        h = torch.einsum("ayuvc,dyc->auvd", t, right)
        energy = (psi * h).sum() / (psi * psi).sum()
        psi = psi - 0.1 * (h - energy * psi)
        psi = psi / torch.linalg.vector_norm(psi)
    return energy


def lensed(rays: Tensor, lenses: Tensor, masses: Tensor, source: Tensor) -> Tensor:
    """Microlensing: rays bent by all stars, a round source's brightness where they land, its gradients by the stars."""
    d = rays[:, None] - lenses
    r2 = d.square().sum(-1) + 1e-3
    bent = (d * (masses.abs() / r2)[..., None]).sum(1) / lenses.shape[0]
    landed = rays * torch.tensor([0.7, 0.9], dtype=rays.dtype, device=rays.device) - bent - source
    return torch.exp(-landed.square().sum(-1) * 8).mean()


def ultrasound(waves: Tensor, elements: Tensor, sound: Tensor, widths: Tensor) -> Tensor:
    """Delay and sum of in-phase and quadrature samples: interpolated gathers by distances, phases, coherence, decibels."""
    frames, n, _, samples = waves.shape
    rows, columns = (200, 255) if samples > 100 else (5, 6)
    z = torch.linspace(0.1, 1, rows, device=waves.device, dtype=waves.dtype)[:, None]
    x = torch.linspace(-0.5, 0.5, columns, device=waves.device, dtype=waves.dtype)
    depth, across = z.expand(-1, columns).reshape(-1), x.expand(rows, -1).reshape(-1)
    far = (depth**2 + (across - elements[:, None] * 0.2) ** 2).sqrt()
    delay = ((depth + far) / 2.4 * (1 + 0.01 * sound) * (samples - 2)).clamp(0, samples - 2)
    low = delay.floor()
    a = delay - low
    at = low.long()[None, :, None].expand(frames, -1, 2, -1)
    s = waves.gather(3, at) * (1 - a[:, None]) + waves.gather(3, at + 1) * a[:, None]
    phase = 2 * math.pi * 0.25 * delay
    re = s[:, :, 0] * phase.cos() - s[:, :, 1] * phase.sin()
    im = s[:, :, 0] * phase.sin() + s[:, :, 1] * phase.cos()
    seen = torch.exp(-(((across - elements[:, None] * 0.2) / (depth * (0.5 + widths.abs()))) ** 2))
    sr, si = (re * seen).sum(1), (im * seen).sum(1)
    coherence = (sr * sr + si * si) / (n * ((re * re + im * im) * seen * seen).sum(1) + 1e-9)
    power = (sr * sr + si * si) * coherence
    decibels = 10 * torch.log10(power / power.amax(1, keepdim=True) + 1e-6)
    return decibels.clamp(min=-60).view(frames, rows, columns)


def overrelaxed(s: Tensor, random: Tensor) -> tuple[Tensor, Tensor]:
    """Heisenberg spins: checkerboard sweeps of reflections at the local field, one of heat, energy, correlations."""
    side = s.shape[1]
    s = F.normalize(s, dim=-1)
    at = torch.arange(side, device=s.device)
    colour = (at[:, None] + at + at[:, None, None]) % 2
    for sweep in range(3):
        for parity in (0, 1):
            field = sum(s.roll(k, d) for d in (1, 2, 3) for k in (1, -1))
            mirror = 2 * (s * field).sum(-1, keepdim=True) / field.square().sum(-1, keepdim=True).clamp(min=1e-9) * field - s
            if sweep == 2:
                mirror = F.normalize(field + 0.5 * random, dim=-1)
            s = torch.where((colour == parity)[None, ..., None], mirror, s)
    energy = -sum((s * s.roll(1, d)).sum(-1) for d in (1, 2, 3)).mean((1, 2, 3))
    lag = torch.stack([(s * s.roll(k, 3)).sum(-1).mean((1, 2, 3)) for k in (2, 4)], -1)
    return energy, lag


def grid_values(reward: Tensor, walls: Tensor, slip: Tensor) -> tuple[Tensor, Tensor]:
    """Value iteration on worlds of cells: four moves that slip, walls that send back, thirty sweeps, the policy."""
    p = 0.1 * slip.sigmoid()[:, None, None]
    v = torch.zeros_like(reward)
    q = v[:, None]
    for _ in range(30):
        padded = F.pad(v, (1, 1, 1, 1), value=0.0)
        moves = [padded[:, :-2, 1:-1], padded[:, 1:-1, 2:], padded[:, 2:, 1:-1], padded[:, 1:-1, :-2]]
        blocked = F.pad(walls, (1, 1, 1, 1), value=True)
        wall = [blocked[:, :-2, 1:-1], blocked[:, 1:-1, 2:], blocked[:, 2:, 1:-1], blocked[:, 1:-1, :-2]]
        moves = [torch.where(w, v, m) for w, m in zip(wall, moves, strict=True)]
        q = torch.stack([(1 - 2 * p) * moves[k] + p * (moves[k - 1] + moves[(k + 1) % 4]) for k in range(4)], 1)
        q = reward[:, None] + 0.95 * q
        v = q.amax(1)
    return v, q.argmax(1).to(torch.uint8)


def sphere_forecasts(x: Tensor, day: Tensor, w: Tensor, mixed: Tensor, head: Tensor) -> Tensor:
    """A forecast's loss on a sphere: features by latitude, a wrapped 5x5 convolution, moments by bands, areas."""
    h = x.shape[2]
    y = F.conv2d(F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 2), mode="reflect"), w)
    zonal = y.mean(3, keepdim=True)
    y = F.silu((y - zonal) / (y.var(3, keepdim=True, correction=0) + 1e-3).sqrt() + zonal * mixed[:, None, None])
    guess = x + F.conv2d(y, head)
    area = torch.cos(torch.linspace(-math.pi / 2, math.pi / 2, h, device=x.device, dtype=x.dtype)).clamp(min=1e-3)
    off = (guess - day).square() * (area / area.mean())[:, None]
    return off.mean((2, 3)).add(1e-6).sqrt().mean()


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _zip(m: Make, b: int, s: int, d: int, h: int) -> list[Tensor]:
    nets = [weight(m, h, d), weight(m, d, h), weight(m, 2 * d, d), weight(m, d, 1, 31), weight(m, d, d)]
    return [m(b, s, d), m(d) * 0.1, m(1) * 0.1, m(d).sigmoid(), m(2), *nets]


def _cells(m: Make, t: int, b: int, i: int, d: int, o: int) -> list[Tensor]:
    return [m(t, b, i), weight(m, 2 * d, i), m(d) * 0.1 - 0.05, m(2, d), m(2, 2, d), weight(m, o, 2 * d)]


def _long(m: Make, b: int, t: int, n: int, k: int, h: int, s: int) -> list[Tensor]:
    cells = [weight(m, 3 * h, k), weight(m, 3 * h, h), weight(m, 3 * s, k), weight(m, 3 * s, s)]
    return [m(b, t, n), weight(m, k, 1, 6, n), *cells, weight(m, n, h + 4 * s), m(9) / 9]


def _stations(m: Make, b: int, c: int, t: int, n: int, d: int) -> list[Tensor]:
    nets = [weight(m, 2 * d, c, 3, 1), m(3, d, d) * (3 * d) ** -0.5, weight(m, 2 * d, d, 3, 1), weight(m, 1, d)]
    return [m(b, c, t, n), m(n, n), m(2, n, d) * 0.1 + 1, *nets]


def _points(m: Make, n: int, days: int, k: int) -> list[Tensor]:
    return [m(n, days), m(n, days) < 1, m(n, 2), m(n, k) * 0.1, m(n, 26) * 0.3, m(n)]


def _tensors(m: Make, a: int, w: int, s: int) -> list[Tensor]:
    scale = (w * s) ** -0.5
    sites = [m(w, w, s, s) * scale, m(w, w, s, s) * scale]
    return [m(a, w, a) * a**-0.5, *sites, m(a, w, a) * (a * w) ** -0.5, m(a, s, s, a) * (a * s) ** -1]


BLOCKS: tuple[Block, ...] = (
    Sized(
        fired, lambda m, b, s, d: [m(b, s, d), m(d, 1, 3) * 0.3, m(d) * d**-0.5, ids(m, s // 5, b) + 2], (2, 17, 4), SINGLE
    ).block("fired", 32, 1003, 512, training=True),
    Sized(zip_layer, _zip, (2, 9, 8, 12), HALF).block("zip layer", 24, 1001, 384, 1024, training=True),
    Sized(gated_loudness, lambda m, b, c, n: [m(b, c, n) * 0.1, m(24) * 0.2, m(65) * 0.1], (2, 2, 101), SINGLE).block(
        "gated loudness", 24, 2, 480001
    ),
    Sized(image_sources, lambda m, b: [m(b, 3), m(b, 3), m(b, 3), m(b, 6)], (2,), SINGLE).block("image sources", 2000),
    Sized(
        quaternion_layers,
        lambda m, b, t, c, d, k: [
            m(b, 4 * c, t),
            m(4, d, c, 5) * (20 * c) ** -0.5,
            m(4, d, d) * (4 * d) ** -0.5,
            m(4, k, d) * (4 * d) ** -0.5,
            ids(m, 4 * k, b, t),
        ],
        (2, 5, 3, 4, 2),
        SINGLE,
        tf32=True,
    ).block("quaternion layers", 16, 777, 40, 256, 16, training=True),
    Sized(unitary_cells, _cells, (3, 4, 5, 6, 2), SINGLE, tf32=True).block(
        "unitary cells", 8, 1024, 64, 512, 10, training=True
    ),
    Sized(long_short, _long, (2, 20, 4, 5, 6, 3), SINGLE, tf32=True).block(
        "long short", 256, 168, 321, 100, 100, 10, training=True
    ),
    Sized(graph_sequences, _stations, (2, 3, 7, 5, 4), SINGLE, tf32=True).block(
        "graph sequences", 48, 2, 12, 207, 64, training=True
    ),
    Sized(change_points, _points, (3, 40, 5), SINGLE).block("change points", 6001, 1461, 25, training=True),
    Sized(plasma, lambda m, x, v: [m(x, v)], (12, 15), SINGLE).block("plasma", 2048, 2047),
    Sized(exchange_energy, lambda m, n: [m(n), m(n, 3), m(n)], (41,), SINGLE).block("exchange energy", 6000001, training=True),
    Sized(second_order_pairs, lambda m, o, v, q: [m(o, v, q) * q**-0.5, m(o), m(v)], (3, 4, 5), SINGLE).block(
        "second order pairs", 40, 151, 700, training=True
    ),
    Sized(effective_hamiltonian, _tensors, (5, 3, 2), SINGLE).block("effective hamiltonian", 256, 14, 4),
    Sized(lensed, lambda m, r, n: [m(r, 2), m(n, 2), m(n), m(2) * 0.1], (30, 7), SINGLE).block(
        "lensed", 250001, 200, training=True
    ),
    Sized(ultrasound, lambda m, f, n, s: [m(f, n, 2, s), m(n).tanh(), m(1), m(1)], (2, 4, 50), SINGLE).block(
        "ultrasound", 4, 128, 2048
    ),
    Sized(overrelaxed, lambda m, b, s: [m(b, s, s, s, 3), m(b, s, s, s, 3)], (2, 4), SINGLE).block("overrelaxed", 4, 96),
    Sized(grid_values, lambda m, b, h, w: [m(b, h, w), m(b, h, w) > 1, m(b)], (2, 5, 6), SINGLE).block(
        "grid values", 64, 100, 101
    ),
    Sized(
        sphere_forecasts,
        lambda m, b, c, d, h, w: [m(b, c, h, w), m(b, c, h, w), weight(m, d, c, 5, 5), m(d), weight(m, c, d, 1, 1)],
        (2, 3, 4, 7, 8),
        SINGLE,
        tf32=True,
    ).block("sphere forecasts", 2, 69, 128, 181, 360, training=True),
)
