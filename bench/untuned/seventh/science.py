"""Blocks of statistics, physics and geometry: chains, ranks, kernels, fields, particles, meshes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids

SINGLE, DOUBLE = torch.float32, torch.float64


def rank_correlations(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Spearman's correlation by ranks of ranks and Kendall's by signs of all pairs, for some columns."""
    rx, ry = (t.argsort(-1).argsort(-1).to(x.dtype) for t in (x, y))
    rx, ry = rx - rx.mean(-1, keepdim=True), ry - ry.mean(-1, keepdim=True)
    spearman = (rx * ry).sum(-1) / (rx.norm(dim=-1) * ry.norm(dim=-1))
    a, b = torch.sign(x[:, :, None] - x[:, None]), torch.sign(y[:, :, None] - y[:, None])
    kendall = (a * b).sum((1, 2)) / (a.abs().sum((1, 2)) * b.abs().sum((1, 2))).sqrt()
    return spearman, kendall


def independence(x: Tensor, y: Tensor) -> Tensor:
    """HSIC: Gaussian kernels with median widths, centred by rows and columns, the trace of their matmul."""

    def kernel(t: Tensor) -> Tensor:
        n = (t * t).sum(1)
        d = (n[:, None] + n[None] - 2 * t @ t.T).clamp(min=0)
        k = torch.exp(-d / (d.detach().mean() + 1e-6))
        return k - k.mean(0) - k.mean(1, keepdim=True) + k.mean()

    a, b = kernel(x), kernel(y)
    return (a * b).sum() / ((a * a).sum() * (b * b).sum()).sqrt()


def projected_transport(x: Tensor, y: Tensor, directions: Tensor) -> Tensor:
    """Wasserstein by projections: both samples on many directions, sorted, squared differences averaged, a soft maximum."""
    d = F.normalize(directions, dim=0)
    a, b = (x @ d).sort(0).values, (y @ d).sort(0).values
    w = (a - b).square().mean(0)
    return torch.logsumexp(w, 0) + w.mean()


def local_lines(x: Tensor, y: Tensor, at: Tensor, width: Tensor) -> Tensor:
    """LOWESS: tricube weights of all points at each query, a weighted line in closed form."""
    d = x[None] - at[:, None]
    w = (1 - (d.abs() / F.softplus(width)[:, None]).clamp(max=1) ** 3) ** 3
    s0, s1, s2 = w.sum(1) + 1e-3, (w * d).sum(1), (w * d * d).sum(1) + 1e-3
    t0, t1 = (w * y).sum(1), (w * d * y).sum(1)
    return (s2 * t0 - s1 * t1) / (s0 * s2 - s1 * s1 + 1e-3)


def langevin_chains(theta: Tensor, x: Tensor, y: Tensor, noise: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Four steps of Metropolis-adjusted Langevin on a logistic regression, many chains at a time."""
    sign = torch.where(y > 0, 1.0, -1.0).to(theta.dtype)

    def both(t: Tensor) -> tuple[Tensor, Tensor]:
        m = (t @ x.T) * sign
        lp = F.logsigmoid(m).sum(1) - 0.5 * (t * t).sum(1)
        return lp, (torch.sigmoid(-m) * sign) @ x - t

    eps = 1e-3
    lp, g = both(theta)
    rate = torch.zeros_like(lp)
    for i in range(4):
        new = theta + eps * g + math.sqrt(2 * eps) * noise[i]
        lp1, g1 = both(new)
        fwd = ((new - theta - eps * g) ** 2).sum(1) / (4 * eps)
        back = ((theta - new - eps * g1) ** 2).sum(1) / (4 * eps)
        ok = torch.log(draws[i].sigmoid()) < lp1 - lp + fwd - back
        theta, g = torch.where(ok[:, None], new, theta), torch.where(ok[:, None], g1, g)
        lp = torch.where(ok, lp1, lp)
        rate = rate + ok
    return theta, rate / 4


def page_ranks(edges: Tensor, start: Tensor) -> Tensor:
    """PageRank: twelve rounds of sums along edges, dangling nodes' share to all, from counted degrees."""
    source, target = edges.unbind(0)
    n = len(start)
    out = torch.zeros(n, dtype=torch.long, device=start.device).scatter_add(0, source, torch.ones_like(source))
    inv = torch.where(out > 0, 1.0 / out.clamp(min=1), 0.0).to(start.dtype)
    base = start.softmax(0)
    r = base
    for _ in range(12):
        lost = (r * (out == 0)).sum()
        r = 0.85 * (torch.zeros_like(r).scatter_add_(0, target, (r * inv)[source]) + lost * base) + 0.15 * base
    return r


def plaquettes(links: Tensor, staples: Tensor) -> Tensor:
    """A lattice of unitary links in four dimensions: the six planes' loops by rolls and small complex matmuls."""
    u = torch.view_as_complex(links)
    total = torch.zeros(u.shape[1:-2], device=u.device, dtype=links.dtype)
    for mu in range(4):
        for nu in range(mu):
            a, b = u[mu], u[nu]
            loop = a @ b.roll(-1, mu) @ a.roll(-1, nu).mH @ b.mH
            total = total + loop.diagonal(dim1=-2, dim2=-1).sum(-1).real * staples[mu]
    return total / 18


def vorticity(w: Tensor, force: Tensor) -> Tensor:
    """Two steps of a periodic flow in spectra: velocities from the stream function, advection in space, viscosity."""
    n = w.shape[-1]
    k = torch.fft.fftfreq(n, 1 / n, device=w.device, dtype=w.dtype)
    kx, ky = k[:, None], torch.fft.rfftfreq(n, 1 / n, device=w.device, dtype=w.dtype)[None]
    lap = kx**2 + ky**2
    inv = torch.where(lap > 0, 1 / lap.clamp(min=1), 0.0)
    keep = (kx.abs() < n / 3) & (ky.abs() < n / 3)
    h = torch.fft.rfft2(w)
    f = torch.fft.rfft2(force)
    for _ in range(2):
        psi = h * inv
        u, v, dx, dy = (torch.fft.irfft2(1j * t, s=(n, n)) for t in (ky * psi, -kx * psi, kx * h, ky * h))
        conv = torch.fft.rfft2(u * dx + v * dy) * keep
        h = ((1 - 5e-7 * lap) * h - 1e-3 * (conv - f)) / (1 + 5e-7 * lap)
    return torch.fft.irfft2(h, s=(n, n))


def split_steps(re: Tensor, im: Tensor, potential: Tensor) -> tuple[Tensor, Tensor]:
    """A nonlinear Schroedinger equation: three steps of phases in space and in frequency, the norm kept."""
    psi = torch.complex(re, im)
    n = re.shape[-1]
    k = torch.fft.fftfreq(n, 1 / n, device=re.device, dtype=re.dtype)
    kinetic = torch.polar(torch.ones_like(re[0]), -5e-4 * (k[:, None] ** 2 + k[None] ** 2))
    for _ in range(3):
        angle = -5e-3 * (potential + psi.real**2 + psi.imag**2)
        psi = torch.fft.ifft2(torch.fft.fft2(psi * torch.polar(torch.ones_like(angle), angle)) * kinetic)
        psi = psi / (psi.abs().square().mean((-2, -1), keepdim=True) + 1e-6).sqrt()
    return psi.abs().square(), psi.angle()


def phase_separation(c: Tensor) -> Tensor:
    """Cahn and Hilliard: four explicit steps, Laplacians of Laplacians on a periodic grid, the free energy."""

    def laplacian(t: Tensor) -> Tensor:
        return t.roll(1, -1) + t.roll(-1, -1) + t.roll(1, -2) + t.roll(-1, -2) - 4 * t

    c = torch.tanh(c)
    for _ in range(4):
        mu = c**3 - c - 0.5 * laplacian(c)
        c = c + 0.01 * laplacian(mu)
    gx, gy = c.roll(-1, -1) - c, c.roll(-1, -2) - c
    return (0.25 * (c * c - 1) ** 2 + 0.25 * (gx * gx + gy * gy)).mean((-2, -1))


def material_points(x: Tensor, v: Tensor, affine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MLS-MPM in a plane: masses and momenta to nine grid nodes each by quadratic weights, gravity, walls, back."""
    n = 128 if len(x) > 100 else 8
    p = x.sigmoid() * (n - 6) + 3
    base = (p - 0.5).floor()
    fx = p - base
    w = torch.stack([0.5 * (1.5 - fx) ** 2, 0.75 - (fx - 1) ** 2, 0.5 * (fx - 0.5) ** 2])
    base = base.long()
    grid_v, grid_m = torch.zeros(n * n, 2, device=x.device, dtype=x.dtype), torch.zeros(n * n, device=x.device, dtype=x.dtype)
    for i in range(3):
        for j in range(3):
            d = torch.stack([i - fx[:, 0], j - fx[:, 1]], -1)
            weight_ = w[i, :, 0] * w[j, :, 1]
            at = (base[:, 0] + i) * n + base[:, 1] + j
            grid_v.index_add_(0, at, weight_[:, None] * (v + (affine @ d[..., None])[..., 0]))
            grid_m.index_add_(0, at, weight_)
    gv = grid_v / grid_m.clamp(min=1e-6)[:, None]
    gv = torch.stack([gv[:, 0], gv[:, 1] - 0.01], -1).view(n, n, 2)
    gv[:3, :, 0].clamp_(min=0)
    gv[-3:, :, 0].clamp_(max=0)
    gv[:, :3, 1].clamp_(min=0)
    gv = gv.view(-1, 2)
    nv, na = torch.zeros_like(v), torch.zeros_like(affine)
    for i in range(3):
        for j in range(3):
            d = torch.stack([i - fx[:, 0], j - fx[:, 1]], -1)
            g = (w[i, :, 0] * w[j, :, 1])[:, None] * gv[(base[:, 0] + i) * n + base[:, 1] + j]
            nv = nv + g
            na = na + 4 * torch.einsum("pi,pj->pij", g, d)
    return p + nv * 0.1, nv, na


def embedded_atoms(x: Tensor, near: Tensor, kinds: Tensor, table: Tensor) -> Tensor:
    """EAM: densities from neighbours by type, a root of them, a pair repulsion with a smooth cutoff."""
    to = x[near] - x[:, None]
    r = (to.pow(2).sum(-1) + 0.05).sqrt()
    cut = torch.where(r < 2.5, 0.5 * (1 + torch.cos(math.pi * r / 2.5)), 0.0)
    a = F.softplus(table)[kinds[near]]
    density = (a[..., 0] * torch.exp(-a[..., 1] * (r - 1)) * cut).sum(1)
    pair = (a[..., 2] * torch.exp(-2 * r) / r * cut).sum(1)
    return (0.5 * pair - (density + 1e-4).sqrt()).sum() / len(x)


def seismic(u: Tensor, before: Tensor, speed: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Acoustic waves of eighth order: four steps, a sponge at the border, shots injected, receivers read."""
    c = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)
    n, m = u.shape[-2:]
    ramp_y = torch.arange(n, device=u.device, dtype=u.dtype)
    ramp_x = torch.arange(m, device=u.device, dtype=u.dtype)
    dy, dx = (torch.minimum(r, r.flip(0)).clamp(max=20) for r in (ramp_y, ramp_x))
    sponge = torch.exp(-((0.015 * (20 - dy)) ** 2))[:, None] * torch.exp(-((0.015 * (20 - dx)) ** 2))
    v = (F.softplus(speed) * 0.2) ** 2
    seen = []
    for t in range(4):
        p = F.pad(u, (4, 4, 4, 4))
        lap = 2 * c[0] * u
        for i in range(1, 5):
            lap = lap + c[i] * (p[..., 4:-4, 4 + i : m + 4 + i] + p[..., 4:-4, 4 - i : m + 4 - i])
            lap = lap + c[i] * (p[..., 4 + i : n + 4 + i, 4:-4] + p[..., 4 - i : n + 4 - i, 4:-4])
        new = (2 * u - before * sponge + v * lap) * sponge
        new[:, 2, m // 2] += source[t]
        before, u = u * sponge, new
        seen.append(u[:, 1])
    return u, torch.stack(seen, 1)


def consensus(models: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """RANSAC's scores: homographies' symmetric errors on all matches, a truncated loss, the best one's inliers."""
    h = models.view(-1, 3, 3) * 0.1 + torch.eye(3, device=a.device, dtype=a.dtype)
    one = torch.ones_like(a[:, :1])
    pa, pb = torch.cat([a, one], 1), torch.cat([b, one], 1)
    fwd = torch.einsum("kij,nj->kni", h, pa)
    c0, c1, c2 = h.unbind(-1)
    adj = torch.stack([torch.linalg.cross(c1, c2), torch.linalg.cross(c2, c0), torch.linalg.cross(c0, c1)], 1)
    back = torch.einsum("kij,nj->kni", adj, pb)

    def error(p: Tensor, q: Tensor) -> Tensor:
        z = p[..., 2:]
        return (p[..., :2] / torch.where(z.abs() < 1e-2, 1e-2, z) - q).square().sum(-1)

    e = error(fwd, b) + error(back, a)
    score = e.clamp(max=4).sum(1)
    best = score.argmin()
    return score, e.index_select(0, best[None])[0].clamp(max=4)


def rigid_motions(xi: Tensor, points: Tensor, seen: Tensor) -> Tensor:
    """SE(3)'s exponential by Rodrigues with series near zero, points moved and projected, a robust loss."""
    w, v = xi.chunk(2, -1)
    t2 = (w * w).sum(-1)[:, None, None]
    t = (t2 + 1e-12).sqrt()
    small = t2 < 1e-4
    safe = torch.where(small, torch.ones_like(t), t)
    a = torch.where(small, 1 - t2 / 6, safe.sin() / safe)
    b = torch.where(small, 0.5 - t2 / 24, (1 - safe.cos()) / safe**2)
    c = torch.where(small, 1 / 6 - t2 / 120, (safe - safe.sin()) / safe**3)
    zero = torch.zeros_like(w[:, 0])
    k = torch.stack([zero, -w[:, 2], w[:, 1], w[:, 2], zero, -w[:, 0], -w[:, 1], w[:, 0], zero], -1).view(-1, 3, 3)
    eye = torch.eye(3, device=xi.device, dtype=xi.dtype)
    kk = k @ k
    r, j = eye + a * k + b * kk, eye + b * k + c * kk
    p = points @ r.mT + (j @ v[..., None]).mT
    z = F.softplus(p[..., 2:]) + 0.5
    e = (p[..., :2] / z - seen).square().sum(-1)
    return (torch.log1p(e / 0.1) * 0.1).mean()


def mesh_smoothing(x: Tensor, faces: Tensor) -> Tensor:
    """Normals of corners by areas, cotangent weights of each face's edges, a Laplacian step along them."""
    a, b, c = x[faces].unbind(1)
    normal = torch.linalg.cross(b - a, c - a)
    area = (normal.square().sum(-1) + 1e-6).sqrt()
    total = torch.zeros_like(x)
    mass = torch.zeros_like(x[:, :1])
    corner = torch.zeros_like(x)
    for i, (p, q, r) in enumerate(((a, b, c), (b, c, a), (c, a, b))):
        cot = ((q - p) * (r - p)).sum(-1) / area
        w = cot.clamp(0.05, 2)[:, None]
        j, k = faces[:, (i + 1) % 3], faces[:, (i + 2) % 3]
        total = total.index_add(0, j, w * (r - q)).index_add(0, k, w * (q - r))
        mass = mass.index_add(0, j, w).index_add(0, k, w)
        corner = corner.index_add(0, faces[:, i], normal)
    return torch.cat([x + 0.5 * total / mass.clamp(min=1e-3), F.normalize(corner, dim=-1)], -1)


def cube_codes(sdf: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Marching cubes' first pass: eight corners' signs as a byte, crossings along three axes, cells numbered by a scan."""
    n = sdf.shape[0] - 1
    code = torch.zeros(n, n, n, dtype=torch.uint8, device=sdf.device)
    for i, (x, y, z) in enumerate((x, y, z) for x in (0, 1) for y in (0, 1) for z in (0, 1)):
        code |= (sdf[x : n + x, y : n + y, z : n + z] < 0).to(torch.uint8) << i
    cross = []
    for d in range(3):
        a, b = sdf.narrow(d, 0, n), sdf.narrow(d, 1, n)
        t = a / torch.where((a - b).abs() < 1e-6, 1e-6, a - b)
        cross.append(torch.where((a < 0) != (b < 0), t, -1.0)[:n, :n, :n])
    active = (code > 0) & (code < 255)
    number = active.flatten().int().cumsum(0, dtype=torch.int32)
    return code, torch.stack(cross), number.view(n, n, n)


def inside_polygons(points: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
    """Crossings' parity of each point with a polygon's edges, and the distance to the nearest edge."""
    a = corners
    b = corners.roll(-1, 0)
    px, py = points[:, None, 0], points[:, None, 1]
    above = (a[None, :, 1] > py) != (b[None, :, 1] > py)
    dy = b[:, 1] - a[:, 1]
    at = (b[:, 0] - a[:, 0]) * (py - a[:, 1]) / torch.where(dy.abs() < 1e-6, 1e-6, dy) + a[:, 0]
    inside = (above & (px < at)).sum(1) % 2 == 1
    d = b - a
    t = (((points[:, None] - a) * d).sum(-1) / (d * d).sum(-1).clamp(min=1e-6)).clamp(0, 1)
    gap = points[:, None] - (a + t[..., None] * d)
    return inside, gap.square().sum(-1).amin(1).sqrt()


def nearest_stations(lat: Tensor, lon: Tensor, slat: Tensor, slon: Tensor, value: Tensor) -> Tensor:
    """Great-circle distances to all stations, the four nearest, values weighted by their inverse squares."""
    a, b = lat[:, None] * 0.5, slat[None] * 0.5
    h = torch.sin((a - b) / 2) ** 2 + torch.cos(a) * torch.cos(b) * torch.sin((lon[:, None] - slon[None]) / 2) ** 2
    d = 2 * 6371 * torch.asin(h.clamp(0, 1).sqrt())
    near, at = d.topk(4, largest=False)
    w = 1 / (near + 10) ** 2
    return (w * value[at]).sum(1) / w.sum(1)


def spline_surfaces(control: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Bicubic B-splines: four by four control points gathered for each parameter, positions and unit normals."""
    n, m, _ = control.shape

    def basis(t: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        t = t.sigmoid() * (size - 3.001)
        i = t.floor()
        f = t - i
        w = torch.stack([(1 - f) ** 3, 3 * f**3 - 6 * f**2 + 4, -3 * f**3 + 3 * f**2 + 3 * f + 1, f**3], -1) / 6
        dw = torch.stack([-((1 - f) ** 2), 3 * f**2 - 4 * f, -3 * f**2 + 2 * f + 1, f**2], -1) / 2
        return i.long()[:, None] + torch.arange(4, device=t.device), w, dw

    iu, wu, du = basis(u, n)
    iv, wv, dv = basis(v, m)
    patch = control[iu[:, :, None], iv[:, None]]
    p = torch.einsum("pi,pj,pijc->pc", wu, wv, patch)
    tu = torch.einsum("pi,pj,pijc->pc", du, wv, patch)
    tv = torch.einsum("pi,pj,pijc->pc", wu, dv, patch)
    return torch.cat([p, F.normalize(torch.linalg.cross(tu, tv), dim=-1)], -1)


def _points(m: Make, n: int) -> list[Tensor]:
    return [m(n, 2), m(n, 2), m(n, 2, 2) * 0.1]


LINES = Sized(local_lines, lambda m, n, k: [m(n), m(n), m(k), m(k)], (20, 7), SINGLE)
SEPARATING = Sized(phase_separation, lambda m, b, n: [m(b, n, n + 1)], (2, 7), SINGLE)
ATOMS = Sized(embedded_atoms, lambda m, n, k: [m(n, 3), ids(m, n, n, k), ids(m, 3, n), m(3, 3)], (9, 5), SINGLE)
MESH = Sized(mesh_smoothing, lambda m, n, k: [m(n, 3), ids(m, n, k, 3)], (9, 14), SINGLE)
SURFACES = Sized(spline_surfaces, lambda m, n, k: [m(n, n + 1, 3), m(k), m(k)], (6, 9), SINGLE)
BLOCKS: tuple[Block, ...] = (
    Sized(rank_correlations, lambda m, b, n: [m(b, n), m(b, n)], (2, 20), SINGLE).block("rank correlations", 16, 2001),
    Sized(independence, lambda m, n, d, k: [m(n, d), m(n, k)], (12, 4, 3), SINGLE, tf32=True).block(
        "independence", 2001, 64, 17, training=True
    ),
    Sized(projected_transport, lambda m, n, d, k: [m(n, d), m(n, d), m(d, k)], (12, 4, 3), SINGLE, tf32=True).block(
        "projected transport", 4001, 64, 100, training=True
    ),
    *LINES.both("local lines", 10007, 2003),
    Sized(
        langevin_chains,
        lambda m, c, n, d: [m(c, d) * 0.1, m(n, d), m(n), m(4, c, d), m(4, c)],
        (5, 12, 3),
        SINGLE,
        tf32=True,
    ).block("langevin chains", 500, 4001, 30),
    Sized(page_ranks, lambda m, n, e: [ids(m, n, 2, e), m(n)], (9, 20), SINGLE).block("page ranks", 100003, 1000003),
    Sized(plaquettes, lambda m, n: [m(4, n, n, n, n, 3, 3, 2) * 0.5, m(4)], (2,), SINGLE).block("plaquettes", 12),
    Sized(vorticity, lambda m, b, n: [m(b, n, n), m(b, n, n)], (2, 8), SINGLE).block("vorticity", 4, 256),
    Sized(split_steps, lambda m, b, n: [m(b, n, n), m(b, n, n), m(b, n, n)], (2, 8), SINGLE).block("split steps", 4, 300),
    *SEPARATING.both("phase separation", 8, 511),
    Sized(material_points, _points, (12,), SINGLE).block("material points", 100003),
    *ATOMS.both("embedded atoms", 50021, 42),
    Sized(seismic, lambda m, b, n, w: [m(b, n, w), m(b, n, w), m(n, w), m(4, b)], (2, 9, 11), SINGLE).block(
        "seismic", 6, 301, 701
    ),
    Sized(consensus, lambda m, k, n: [m(k, 9), m(n, 2), m(n, 2)], (5, 9), SINGLE).block("consensus", 2001, 3003),
    Sized(rigid_motions, lambda m, b, n: [m(b, 6), m(b, n, 3), m(b, n, 2)], (5, 7), SINGLE).block(
        "rigid motions", 501, 1003, training=True
    ),
    *MESH.both("mesh smoothing", 100003, 200003),
    Sized(cube_codes, lambda m, n: [m(n, n, n)], (5,), SINGLE).block("cube codes", 200),
    Sized(inside_polygons, lambda m, n, k: [m(n, 2), m(k, 2)], (9, 5), SINGLE).block("inside polygons", 200003, 65),
    Sized(
        nearest_stations,
        lambda m, n, k: [m(n), m(n), m(k), m(k), m(k)],
        (9, 7),
        SINGLE,
    ).block("nearest stations", 20011, 800),
    *SURFACES.both("spline surfaces", 41, 200003),
)
