"""Blocks of science: elements, fluxes, lattices in three dimensions, neighbours, frames, samples along rays."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, DOUBLE = torch.float32, torch.float64
FACES = ((0, 0, 1), (0, 0, -1), (0, 1, 0), (0, -1, 0), (1, 0, 0), (-1, 0, 0))
EDGES = tuple((a, b, c) for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1) if abs(a) + abs(b) + abs(c) == 2)


def spectral_elements(u: Tensor, d: Tensor, g: Tensor) -> Tensor:
    """The stiffness of spectral elements: derivatives along three axes, six geometric factors, transposed derivatives."""
    r = torch.einsum("im,emjk->eijk", d, u)
    s = torch.einsum("jm,eimk->eijk", d, u)
    t = torch.einsum("km,eijm->eijk", d, u)
    a = g[:, 0] * r + g[:, 1] * s + g[:, 2] * t
    b = g[:, 1] * r + g[:, 3] * s + g[:, 4] * t
    c = g[:, 2] * r + g[:, 4] * s + g[:, 5] * t
    back = torch.einsum("mi,emjk->eijk", d, a) + torch.einsum("mj,eimk->eijk", d, b)
    return back + torch.einsum("mk,eijm->eijk", d, c)


def assembled(points: Tensor, cells: Tensor, u: Tensor, modulus: Tensor) -> Tensor:
    """Linear tetrahedra: gradients of shapes from corners, strains, stresses, forces added at nodes."""
    x, v = points[cells], u[cells]
    e = x[:, 1:] - x[:, :1]
    a, b, c = e.unbind(1)
    normals = torch.stack([torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)], 1)
    volume = (a * normals[:, 0]).sum(-1, keepdim=True)
    grads = normals / torch.where(volume.abs() < 0.1, 0.1, volume)[..., None]
    f = (v[:, 1:] - v[:, :1]).mT @ grads
    strain = (f + f.mT) / 2
    trace = strain.diagonal(dim1=1, dim2=2).sum(-1)
    stress = modulus.abs()[:, None, None] * (2 * strain + trace[:, None, None] * torch.eye(3, device=u.device, dtype=u.dtype))
    forces = (grads @ stress) * volume.abs()[..., None] / 6
    whole = torch.cat([-forces.sum(1, keepdim=True), forces], 1)
    return u * torch.zeros_like(u).index_add(0, cells.flatten(), whole.flatten(0, 1))


def weno(q: Tensor) -> Tensor:
    """Fifth-order WENO of four fields along both axes of a periodic plane, Lax and Friedrichs' splitting, one Euler step."""
    density, mx, my, energy = q.abs().unbind(0)
    density = density + 1
    vx, vy = mx / density, my / density
    p = 0.4 * (energy + 2 - 0.5 * density * (vx * vx + vy * vy)).clamp(min=0.1)
    speed = (1.4 * p / density).sqrt()
    out = q
    for dim, v in ((1, vx), (2, vy)):
        flux = torch.stack([density * v, mx * v + p * (dim == 1), my * v + p * (dim == 2), (energy + p) * v])
        top = (v.abs() + speed).max()
        found = []
        for sign in (1, -1):
            f = 0.5 * (flux + sign * top * q)
            a, b, c, d, e = (f.roll(sign * s, dim) for s in (2, 1, 0, -1, -2))
            b0 = 13 / 12 * (a - 2 * b + c) ** 2 + 0.25 * (a - 4 * b + 3 * c) ** 2
            b1 = 13 / 12 * (b - 2 * c + d) ** 2 + 0.25 * (b - d) ** 2
            b2 = 13 / 12 * (c - 2 * d + e) ** 2 + 0.25 * (3 * c - 4 * d + e) ** 2
            w0, w1, w2 = 0.1 / (b0 + 1e-3) ** 2, 0.6 / (b1 + 1e-3) ** 2, 0.3 / (b2 + 1e-3) ** 2
            made = w0 * (2 * a - 7 * b + 11 * c) + w1 * (-b + 5 * c + 2 * d) + w2 * (2 * c + 5 * d - e)
            found.append(made / (6 * (w0 + w1 + w2)))
        whole = found[0] + found[1].roll(-1, dim)
        out = out - 0.1 * (whole - whole.roll(1, dim))
    return out


def lattice_volume(f: Tensor, solid: Tensor) -> Tensor:
    """Nineteen directions in a box: streaming by rolls, walls that send back, relaxation to an equilibrium."""
    c = ((0, 0, 0), *FACES, *EDGES)
    weights = [1 / 3, *[1 / 18] * 6, *[1 / 36] * 12]
    back = [c.index((-a, -b, -d)) for a, b, d in c]
    moved = torch.stack([f[i].roll(c[i], (0, 1, 2)) for i in range(19)])
    density = moved.sum(0) + 3
    u = [sum(moved[i] * c[i][k] for i in range(19) if c[i][k]) / density for k in range(3)]
    square = u[0] ** 2 + u[1] ** 2 + u[2] ** 2
    wall = solid > 1.5
    found = []
    for i in range(19):
        along = sum(c[i][k] * u[k] for k in range(3) if c[i][k]) if i else torch.zeros_like(square)
        rest = weights[i] * density * (1 + 3 * along + 4.5 * along**2 - 1.5 * square)
        found.append(torch.where(wall, moved[back[i]], moved[i] + 0.6 * (rest - moved[i])))
    return torch.stack(found)


def three_bodies(x: Tensor, near: Tensor) -> Tensor:
    """Stillinger and Weber: energies of pairs and of angles between all pairs of an atom's neighbours."""
    to = x[near] - x[:, None]
    r = (to.square().sum(-1) + 1e-2).sqrt()
    inside = r < 1.8
    gap = torch.where(inside, r - 1.8, -1.0)
    pair = torch.where(inside, 7.05 * (0.6 / r**4 - 1) * torch.exp(1 / gap), 0.0)
    decay = torch.where(inside, torch.exp(1.2 / gap), 0.0)
    unit = to / r[..., None]
    cosine = unit @ unit.mT
    apart = torch.ones(cosine.shape[-2:], device=x.device, dtype=torch.bool).triu(1)
    angle = (cosine + 1 / 3) ** 2 * decay[:, :, None] * decay[:, None]
    return (0.5 * pair.clamp(max=50).sum() + 21 * torch.where(apart, angle, 0.0).sum()) / len(x)


def aligned_errors(frames: Tensor, at: Tensor, points: Tensor, true_at: Tensor, true_points: Tensor) -> Tensor:
    """AlphaFold's loss: frames by Gram and Schmidt, all points seen from all frames, clamped distances averaged."""

    def turned(a: Tensor) -> Tensor:
        e0 = F.normalize(a[:, 0], dim=-1)
        e1 = F.normalize(a[:, 1] - (e0 * a[:, 1]).sum(-1, keepdim=True) * e0, dim=-1)
        return torch.stack([e0, e1, torch.linalg.cross(e0, e1)], -1)

    r = turned(frames)
    seen = torch.einsum("fij,fpi->fpj", r, points[None] - at[:, None])
    true = torch.einsum("fij,fpi->fpj", r.detach(), true_points[None] - true_at[:, None])
    return ((seen - true).square().sum(-1) + 1e-4).sqrt().clamp(max=10).mean() / 10


def proposed_intervals(fine: Tensor, density: Tensor, coarse: Tensor, bound: Tensor) -> Tensor:
    """Mip-NeRF 360: weights along rays, the distortion of their intervals, an upper bound from coarser intervals."""
    edges = F.softplus(fine).cumsum(-1)
    edges = edges / edges[..., -1:]
    width = edges[..., 1:] - edges[..., :-1]
    alpha = 1 - torch.exp(-F.softplus(density) * width)
    w = alpha * torch.cumprod(F.pad(1 - alpha[..., :-1], (1, 0), value=1.0), -1)
    mid = (edges[..., 1:] + edges[..., :-1]) / 2
    total, moment = w.cumsum(-1), (w * mid).cumsum(-1)
    distortion = 2 * (w * (mid * (total - w) - (moment - w * mid))).sum(-1) + (w * w * width).sum(-1) / 3
    old = F.softplus(coarse).cumsum(-1)
    old = (old / old[..., -1:]).detach()
    outer = F.pad(bound.softmax(-1).cumsum(-1), (1, 0))
    low = (torch.searchsorted(old, edges[..., :-1].detach().contiguous(), right=True) - 1).clamp(0, old.shape[-1] - 1)
    high = torch.searchsorted(old, edges[..., 1:].detach().contiguous()).clamp(max=outer.shape[-1] - 1)
    most = outer.gather(-1, high) - outer.gather(-1, low)
    return (distortion * 0.01 + ((w.detach() - most).clamp(min=0) ** 2 / (w.detach() + 1e-3)).sum(-1)).mean()


def ball_queries(points: Tensor, centres: Tensor, features: Tensor) -> Tensor:
    """PointNet++: the first points within a radius of each centre, the first repeated, their places and features."""
    b, n, _ = points.shape
    count = 16 if n > 100 else 3
    far = torch.cdist(centres, points, compute_mode="donot_use_mm_for_euclid_dist") > 0.4
    at = torch.arange(n, device=points.device).expand(b, centres.shape[1], n).masked_fill(far, n)
    first = at.topk(count, dim=-1, largest=False, sorted=True).values
    first = torch.where(first == n, first[..., :1], first).clamp(max=n - 1)
    rows = torch.arange(b, device=points.device)[:, None, None]
    return torch.cat([points[rows, first] - centres[:, :, None], features[rows, first]], -1).amax(2)


def voxel_means(points: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Points sorted by voxel, runs counted by differences, features averaged over each run, read back by each point."""
    grid = ((points.float() + 4) * 8).long().clamp(0, 63)
    key = (grid[:, 0] * 64 + grid[:, 1]) * 64 + grid[:, 2]
    ordered, order = key.sort(stable=True)
    new = F.pad((ordered[1:] != ordered[:-1]).long(), (1, 0))
    run = new.cumsum(0)
    n = len(points)
    total = torch.zeros_like(features).index_add(0, run, features[order])
    count = torch.zeros(n, device=points.device, dtype=features.dtype).index_add(0, run, torch.ones_like(features[:, 0]))
    mean = total / count.clamp(min=1)[:, None]
    back = torch.empty_like(run).scatter(0, order, run)
    return mean[back], run[-1] + 1


def vector_attention(x: Tensor, at: Tensor, near: Tensor, qkv: Tensor, place: Tensor, w: Tensor) -> Tensor:
    """Point transformers: differences of queries and neighbours' keys, a softmax over neighbours for each channel."""
    q, k, v = F.linear(x, qkv).chunk(3, -1)
    p = F.relu((at[:, None] - at[near]) @ place)
    scores = F.linear(F.relu(q[:, None] - k[near] + p), w)
    return (scores.softmax(1) * (v[near] + p)).sum(1)


def springs(x: Tensor, v: Tensor, pairs: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    """Five steps of masses and springs: forces of each pair added at both ends, a floor, damping."""
    a, b = pairs.unbind(0)
    for _ in range(5):
        to = x[b] - x[a]
        length = to.norm(dim=-1, keepdim=True).clamp(min=1e-3)
        force = 2 * (length - rest.abs()[:, None]) * to / length
        total = torch.zeros_like(x).index_add(0, a, force).index_add(0, b, -force)
        v = 0.99 * v + 0.01 * total
        v[:, 2] -= 0.098
        x = x + 0.01 * v
        x[:, 2].clamp_(min=-3)
    return x, v


def density_estimate(x: Tensor, centres: Tensor, widths: Tensor) -> Tensor:
    """Log-density of points under normal kernels with widths of their own, by squared distances without a matmul."""
    scale = F.softplus(widths) + 0.1
    apart = ((x[:, None] - centres[None]) / scale[None, :, None]).square().sum(-1)
    return (torch.logsumexp(-0.5 * apart - x.shape[1] * scale.log(), 1)).mean()


def spread_phases(re: Tensor, im: Tensor, advance: Tensor) -> tuple[Tensor, Tensor]:
    """A phase vocoder: angles and sizes, differences wrapped, summed along frames, written as real pairs at half speed."""
    _b, _f, t = re.shape
    size, angle = (re.square() + im.square() + 1e-9).sqrt(), torch.atan2(im, re)
    at = torch.arange(0, t - 1, 0.5, device=re.device)
    low, part = at.long(), at - at.long()
    turn = torch.diff(angle, dim=-1) - advance[:, None]
    turn = turn - 6.283185 * torch.round(turn / 6.283185) + advance[:, None]
    phase = torch.cat([angle[..., :1], turn[..., low[:-1]]], -1).cumsum(-1)
    mixed = (1 - part) * size[..., low] + part * size[..., low + 1]
    return mixed * phase.cos(), mixed * phase.sin()


def column_fluxes(depth: Tensor, source: Tensor, albedo: Tensor) -> Tensor:
    """Two streams through 40 layers of air: transmissions, up and down by recurrences over levels, heating of each layer."""
    through = torch.exp(-1.66 * F.softplus(depth))
    down, up = [torch.zeros_like(source[0])], []
    for i in range(len(depth)):
        down.append(down[-1] * through[i] + source[i] * (1 - through[i]))
    a = torch.sigmoid(albedo)
    up.append(a * down[-1] + (1 - a) * source[-1])
    for i in reversed(range(len(depth))):
        up.append(up[-1] * through[i] + source[i] * (1 - through[i]))
    net = torch.stack(up[::-1]) - torch.stack(down)
    return net[1:] - net[:-1]


def _tetrahedra(m: Make, n: int, k: int) -> list[Tensor]:
    return [m(n, 3), ids(m, n, k, 4), m(n, 3) * 0.1, m(k)]


SPECTRAL = Sized(spectral_elements, lambda m, e, n: [m(e, n, n, n), weight(m, n, n), m(e, 6, n, n, n)], (3, 4), SINGLE)
TETRA = Sized(assembled, _tetrahedra, (9, 12), SINGLE)
THREE = Sized(three_bodies, lambda m, n, k: [m(n, 3), ids(m, n, n, k)], (9, 4), SINGLE)
VECTORS = Sized(
    vector_attention,
    lambda m, n, d, k: [m(n, d), m(n, 3), ids(m, n, n, k), weight(m, 3 * d, d), weight(m, 3, d), weight(m, d, d)],
    (9, 6, 4),
)
AIR = Sized(column_fluxes, lambda m, k, n: [m(k, n), m(k, n), m(n)], (5, 7), SINGLE)

BLOCKS: tuple[Block, ...] = (
    *SPECTRAL.both("spectral elements", 8192, 8),
    *TETRA.both("assembled", 100003, 500001),
    Sized(weno, lambda m, n: [m(4, n, n + 1)], (9,), SINGLE).block("weno", 1500),
    Sized(lattice_volume, lambda m, n: [m(19, n, n, n + 1) * 0.1, m(n, n, n + 1)], (4,), SINGLE).block("lattice volume", 127),
    *THREE.both("three bodies", 100003, 12),
    Sized(
        aligned_errors,
        lambda m, f, p: [m(f, 2, 3), m(f, 3) * 5, m(p, 3) * 5, m(f, 3) * 5, m(p, 3) * 5],
        (4, 9),
        SINGLE,
    ).block("aligned errors", 512, 7168, training=True),
    Sized(
        proposed_intervals,
        lambda m, b, n, k: [m(b, n + 1), m(b, n), m(b, k + 1), m(b, k)],
        (4, 7, 5),
        SINGLE,
    ).block("proposed intervals", 16384, 48, 64, training=True),
    Sized(ball_queries, lambda m, b, n, c, d: [m(b, n, 3), m(b, c, 3), m(b, n, d)], (2, 20, 5, 4), SINGLE).block(
        "ball queries", 8, 4096, 1024, 64
    ),
    Sized(voxel_means, lambda m, n, d: [m(n, 3), m(n, d)], (40, 3), SINGLE).block("voxel means", 200003, 32),
    *VECTORS.both("vector attention", 20000, 96, 16),
    Sized(springs, lambda m, n, k: [m(n, 3), m(n, 3), ids(m, n, 2, k), m(k)], (9, 14), SINGLE).block("springs", 100003, 600000),
    Sized(density_estimate, lambda m, n, k, d: [m(n, d), m(k, d), m(k)], (7, 9, 3), SINGLE).block(
        "density estimate", 8001, 2000, 6, training=True
    ),
    Sized(spread_phases, lambda m, b, f, t: [m(b, f, t), m(b, f, t), m(f)], (2, 3, 9), SINGLE).block(
        "spread phases", 8, 513, 400
    ),
    *AIR.both("column fluxes", 40, 100003),
)
