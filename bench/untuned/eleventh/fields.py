"""Programs of other fields: statistics, forces by differentiated energies, robots, trees, texts, random numbers."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids

SINGLE, DOUBLE = torch.float32, torch.float64


# ---- forces ---------------------------------------------------------------------------------------------------------------


def _born_energy(x: Tensor, charge: Tensor, radius: Tensor) -> Tensor:
    """Coulomb's and the generalised Born energy of all pairs, with a soft wall."""
    d = (x[:, None] - x[None]).square().sum(-1)
    r2 = d + torch.eye(x.shape[0], device=x.device, dtype=x.dtype)
    born = radius.abs() + 0.5
    f = (d + born[:, None] * born * torch.exp(-d / (4 * born[:, None] * born))).sqrt()
    q = charge[:, None] * charge
    off = 1 - torch.eye(x.shape[0], device=x.device, dtype=x.dtype)
    return (off * (0.5 * q * (r2 + 0.1).rsqrt() + 0.01 / (r2 + 0.3).pow(6)) - 0.4 * q / f).sum()


def forces_of_energy(x: Tensor, charge: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Energies and forces of molecules in implicit water, forces by `torch.func.grad` under `vmap`."""
    slope, energy = torch.func.vmap(torch.func.grad_and_value(_born_energy), in_dims=(0, None, None))(x, charge, radius)
    return energy, -slope


def matched_forces(x: Tensor, at: Tensor, w1: Tensor, w2: Tensor, truth: Tensor) -> Tensor:
    """A small potential of radial features by atom, forces by differentiation, trained on the forces."""

    def energy(p: Tensor) -> Tensor:
        r = (p[:, None] - p[at]).square().sum(-1) + 0.1
        k = torch.arange(1, 9, device=p.device, dtype=p.dtype)
        g = torch.exp(-(r.sqrt()[..., None] - 0.4 * k).square() * 2).sum(1)
        return (torch.tanh(g @ w1.t()) @ w2).sum()

    forces = -torch.func.grad(energy)(x)
    return (forces - truth).square().mean()


def mean_field_electrons(g: Tensor, h: Tensor, density: Tensor) -> tuple[Tensor, Tensor]:
    """Hartree-Fock: Coulomb and exchange of all integrals, Fock's matrix, the energy, three damped steps of purification."""
    d = density + density.t()
    for _ in range(3):
        f = h + torch.einsum("pqrs,rs->pq", g, d) - 0.5 * torch.einsum("prqs,rs->pq", g, d)
        d2 = d @ d
        d = 0.5 * d + 0.5 * (3 * d2 - 2 * d2 @ d) / (1 + d.abs().sum())
    return f, 0.5 * ((h + f) * d).sum()


def shock_fluxes(u: Tensor) -> Tensor:
    """Euler's equations in one dimension, many tubes: minmod slopes, HLLC fluxes, two steps of Heun's method."""

    def primitive(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rho = s[:, 0].abs() + 0.1
        v = s[:, 1] / rho
        p = (0.4 * (s[:, 2] - 0.5 * rho * v * v)).abs() + 0.05
        return rho, v, p

    def flux(s: Tensor) -> Tensor:
        a, b = s - torch.roll(s, 1, -1), torch.roll(s, -1, -1) - s
        slope = torch.where(a * b > 0, torch.where(a.abs() < b.abs(), a, b), 0.0)
        left, right = s + 0.5 * slope, torch.roll(s - 0.5 * slope, -1, -1)
        (ra, va, pa), (rb, vb, pb) = primitive(left), primitive(right)
        ca, cb = (1.4 * pa / ra).sqrt(), (1.4 * pb / rb).sqrt()
        sa, sb = torch.minimum(va - ca, vb - cb), torch.maximum(va + ca, vb + cb)
        middle = (pb - pa + ra * va * (sa - va) - rb * vb * (sb - vb)) / (ra * (sa - va) - rb * (sb - vb))
        out = []
        for r, v, p, side, e in ((ra, va, pa, sa, left[:, 2]), (rb, vb, pb, sb, right[:, 2])):
            f = torch.stack([r * v, r * v * v + p, v * (e + p)], 1)
            star = r * (side - v) / (side - middle)
            wide = torch.stack([star, star * middle, star * (e / r + (middle - v) * (middle + p / (r * (side - v))))], 1)
            out.append((f, f + side[:, None] * (wide - torch.stack([r, r * v, e], 1))))
        (fa, wa), (fb, wb) = out
        f = torch.where((sa > 0)[:, None], fa, torch.where((middle > 0)[:, None], wa, wb))
        f = torch.where((sb < 0)[:, None], fb, f)
        return f - torch.roll(f, 1, -1)

    for _ in range(2):
        first = u - 0.05 * flux(u)
        u = 0.5 * u + 0.5 * (first - 0.05 * flux(first))
    return u


# ---- robots ---------------------------------------------------------------------------------------------------------------


def inverse_dynamics(q: Tensor, v: Tensor, a: Tensor, mass: Tensor, arms: Tensor) -> Tensor:
    """Newton and Euler of seven joints: velocities and accelerations outward, forces and torques back."""
    n = q.shape[1]
    zero, one = torch.zeros_like(q[:, 0]), torch.ones_like(q[:, 0])
    axis = torch.stack([zero, zero, one], -1)
    w, dw = torch.zeros_like(axis), torch.zeros_like(axis)
    acc = torch.stack([zero, zero, 9.81 * one], -1)
    rotations, forces, torques = [], [], []
    for k in range(n):
        c, s = q[:, k].cos(), q[:, k].sin()
        if k % 2:
            r = torch.stack([c, zero, s, s, zero, -c, zero, one, zero], -1).view(-1, 3, 3)
        else:
            r = torch.stack([c, -s, zero, s, c, zero, zero, zero, one], -1).view(-1, 3, 3)
        arm = arms[k].expand_as(axis)
        acc = acc + torch.linalg.cross(dw, arm) + torch.linalg.cross(w, torch.linalg.cross(w, arm))
        w, dw, acc = (torch.einsum("nji,nj->ni", r, t) for t in (w, dw, acc))
        dw = dw + axis * a[:, k, None] + torch.linalg.cross(w, axis * v[:, k, None])
        w = w + axis * v[:, k, None]
        middle = 0.5 * arm
        here = acc + torch.linalg.cross(dw, middle) + torch.linalg.cross(w, torch.linalg.cross(w, middle))
        i = mass[k].abs() * 0.1
        rotations.append(r)
        forces.append(mass[k].abs() * here)
        torques.append(i * dw + torch.linalg.cross(w, i * w))
    f, t, out = torch.zeros_like(axis), torch.zeros_like(axis), []
    for k in reversed(range(n)):
        arm = arms[k].expand_as(axis)
        if k + 1 < n:
            r = rotations[k + 1]
            f, t = torch.einsum("nij,nj->ni", r, f), torch.einsum("nij,nj->ni", r, t)
        t = t + torques[k] + torch.linalg.cross(0.5 * arm, forces[k]) + torch.linalg.cross(arm, f)
        f = f + forces[k]
        out.append((t * axis).sum(-1))
    return torch.stack(out[::-1], -1)


def damped_arms(q: Tensor, goal: Tensor, links: Tensor) -> Tensor:
    """Inverse kinematics of a planar arm with six joints: three damped steps with its Jacobian, 3x3 systems by hand."""
    for _ in range(3):
        angle = q.cumsum(-1)
        dx, dy = links * angle.cos(), links * angle.sin()
        x, y = dx.sum(-1), dy.sum(-1)
        jx, jy = -dy.flip(-1).cumsum(-1).flip(-1), dx.flip(-1).cumsum(-1).flip(-1)
        e = goal - torch.stack([x, y, angle[:, -1]], -1)
        j = torch.stack([jx, jy, torch.ones_like(jx)], 1)
        m = j @ j.mT + 0.1 * torch.eye(3, device=q.device, dtype=q.dtype)
        a, b, c = m[:, 0], m[:, 1], m[:, 2]
        bc, ca, ab = torch.linalg.cross(b, c), torch.linalg.cross(c, a), torch.linalg.cross(a, b)
        z = torch.stack([(bc * e).sum(-1), (ca * e).sum(-1), (ab * e).sum(-1)], -1) / (a * bc).sum(-1, keepdim=True)
        q = q + torch.einsum("nij,ni->nj", j, z)
    return q


def driven_paths(controls: Tensor, start: Tensor, obstacles: Tensor) -> Tensor:
    """A bicycle's rollouts over 30 steps, costs of the goal, of obstacles and of jerks."""
    x, y, h, v = start.unbind(-1)
    accel, steer = torch.tanh(controls[..., 0]) * 3, torch.tanh(controls[..., 1]) * 0.5
    cost = torch.zeros_like(x)
    for t in range(controls.shape[1]):
        beta = torch.atan(0.5 * torch.tan(steer[:, t]))
        x, y = x + 0.1 * v * torch.cos(h + beta), y + 0.1 * v * torch.sin(h + beta)
        h = h + 0.1 * v / 1.4 * torch.sin(beta)
        v = (v + 0.1 * accel[:, t]).clamp(-1, 15)
        far = ((x[:, None] - obstacles[:, 0]).square() + (y[:, None] - obstacles[:, 1]).square() + 1e-6).sqrt()
        cost = cost + F.relu(1.5 - far).square().sum(1) + 0.01 * ((x - 10).square() + y.square())
    return cost + controls.diff(dim=1).square().sum((1, 2)) * 0.1


# ---- statistics -----------------------------------------------------------------------------------------------------------


def rough_kernel(x: Tensor, z: Tensor, scale: Tensor, v: Tensor, y: Tensor) -> Tensor:
    """A Matern 5/2 kernel with a length for each input, times vectors, squared errors."""
    a, b = x / F.softplus(scale), z / F.softplus(scale)
    far = (a.square().sum(1, keepdim=True) + b.square().sum(1) - 2 * a @ b.t()).clamp(min=1e-6)
    r = (5 * far).sqrt()
    k = (1 + r + 5 / 3 * far) * torch.exp(-r)
    return (k @ v - y).square().mean()


def pruned_trees(tips: Tensor, lengths: Tensor, rates: Tensor) -> Tensor:
    """Felsenstein: likelihoods of four letters from 32 tips to the root, exponentials of rates by squaring, scaled."""
    q = F.softplus(rates)
    q = q - torch.diag(q.diagonal())
    q = q - torch.diag(q.sum(1))
    p = torch.eye(4, device=q.device, dtype=q.dtype) + q * F.softplus(lengths)[:, None, None] / 64
    for _ in range(6):
        p = p @ p
    like, at, log = tips.softmax(-1), 0, torch.zeros_like(tips[0, :, 0])
    while like.shape[0] > 1:
        n = like.shape[0]
        up = torch.einsum("nij,nsj->nsi", p[at : at + n], like)
        like = up[0::2] * up[1::2]
        top = like.amax(-1, keepdim=True)
        log = log + top.log().sum((0, 2))
        like, at = like / top, at + n
    return -(log + (like[0] * 0.25).sum(-1).log()).mean()


def monotone_fits(y: Tensor, w: Tensor) -> Tensor:
    """Isotonic regression of many rows by means of all ranges: smallest over ends of the largest over starts."""
    v = w.abs() + 0.1
    s, t = F.pad((v * y).cumsum(-1), (1, 0)), F.pad(v.cumsum(-1), (1, 0))
    mean = (s[:, None, 1:] - s[:, :-1, None]) / (t[:, None, 1:] - t[:, :-1, None])
    n = y.shape[1]
    inside = torch.ones(n, n, dtype=torch.bool, device=y.device).triu()
    mean = torch.where(inside, mean, math.inf)
    low = mean.flip(-1).cummin(-1)[0].flip(-1)
    low = torch.where(inside, low, -math.inf)
    return low.cummax(1)[0].diagonal(dim1=1, dim2=2)


def median_slopes(x: Tensor, y: Tensor) -> Tensor:
    """Theil and Sen: medians of all pairs' slopes in each row, medians of intercepts, the rest's spread."""
    i, j = torch.triu_indices(x.shape[1], x.shape[1], 1, device=x.device)
    at = x.abs().cumsum(1) + torch.arange(x.shape[1], device=x.device)
    slope = ((y[:, j] - y[:, i]) / (at[:, j] - at[:, i])).median(1)[0]
    shift = (y - slope[:, None] * at).median(1)[0]
    rest = y - slope[:, None] * at - shift[:, None]
    return torch.stack([slope, shift, rest.abs().median(1)[0]], 1)


def shares_of_incomes(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Lorenz curves of rows by weights, Gini's, Theil's and Atkinson's measures, deciles."""
    income = x.exp()
    ordered, at = income.sort(-1)
    v = w.abs().gather(1, at) + 0.05
    v = v / v.sum(-1, keepdim=True)
    curve = (v * ordered).cumsum(-1)
    curve = curve / curve[:, -1:]
    gini = 1 - (v * (curve + F.pad(curve, (1, 0))[:, :-1])).sum(-1)
    mean = (v * ordered).sum(-1, keepdim=True)
    theil = (v * ordered / mean * (ordered / mean).log()).sum(-1)
    atkinson = 1 - torch.exp((v * ordered.log()).sum(-1)) / mean[:, 0]
    q = torch.linspace(0.1, 0.9, 9, device=x.device).expand(x.shape[0], 9).contiguous()
    where = torch.searchsorted(v.cumsum(-1).contiguous(), q.to(v.dtype)).clamp(max=x.shape[1] - 1)
    return gini, theil, atkinson, curve.gather(1, where)


def drawn_together(x: Tensor, points: Tensor) -> Tensor:
    """Mean shift: five rounds of means of all points by Gaussians of their distance."""
    for _ in range(5):
        k = torch.exp(-0.5 * torch.cdist(x, points).square())
        x = k @ points / (k.sum(1, keepdim=True) + 1e-6)
    return x


def multiplied_factors(v: Tensor, w: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Non-negative factors by Kullback and Leibler's rule, five rounds, the divergence at the end."""
    v, w, h = v.abs() + 0.01, w.abs() + 0.1, h.abs() + 0.1
    for _ in range(5):
        h = h * (w.t() @ (v / (w @ h + 1e-6))) / (w.sum(0)[:, None] + 1e-6)
        w = w * ((v / (w @ h + 1e-6)) @ h.t()) / (h.sum(1) + 1e-6)
    near = w @ h
    return w, h, (v * (v / near).log() - v + near).sum()


def odd_ones_out(x: Tensor, points: Tensor) -> Tensor:
    """Local outlier factors: ten nearest of each, distances that reach, densities compared with theirs."""
    d = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    far, at = d.topk(11, dim=1, largest=False)
    far, at = far[:, 1:], at[:, 1:]
    reach = torch.maximum(far[:, -1][at], far)
    density = 1 / (reach.mean(1) + 1e-10)
    mine, near = torch.cdist(x, points, compute_mode="donot_use_mm_for_euclid_dist").topk(10, dim=1, largest=False)
    own = 1 / (torch.maximum(far[:, -1][near], mine).mean(1) + 1e-10)
    return density[near].mean(1) / own


def organised_maps(x: Tensor, w: Tensor) -> Tensor:
    """Kohonen's map, two rounds of a batch: the nearest cell of each, sums to all cells by distance on the grid."""
    n = math.isqrt(w.shape[0])
    at = torch.arange(w.shape[0], device=x.device)
    place = torch.stack([at // n, at % n], -1).to(x.dtype)
    far = torch.cdist(place, place).square()
    for k in range(2):
        best = (w.square().sum(1) - 2 * x @ w.t()).argmin(1)
        near = torch.exp(-far / (2 * (3 - k) ** 2))[:, best]
        w = near @ x / near.sum(1, keepdim=True)
    return w


# ---- texts and numbers ----------------------------------------------------------------------------------------------------


def weighted_terms(terms: Tensor, query: Tensor, lengths: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """BM25: how often documents have the words of queries, saturated and by length, the best ten."""
    count = (terms[None, :, :, None] == query[:, None, None, :]).sum(2).float()
    idf = torch.log(1 + (terms.shape[0] - seen[query] + 0.5) / (seen[query] + 0.5))
    size = lengths / lengths.mean()
    score = (idf[:, None] * count * 2.2 / (count + 1.2 * (0.25 + 0.75 * size)[None, :, None])).sum(-1)
    return torch.topk(score, 10, dim=1)


def counted_apart(keys: Tensor, groups: Tensor) -> Tensor:
    """HyperLogLog: hashes of keys, leading zeros by bits, the largest of each register and group, estimates of numbers."""
    h = keys * -7046029254386353131
    h = (h ^ ((h >> 32) & 0xFFFFFFFF)) * -4417276706812531889
    h = h ^ ((h >> 29) & 0x7FFFFFFFF)
    register, rest = h & 255, (h >> 8) & 0xFFFFFFFF
    rank = torch.ones_like(rest)
    for shift in (16, 8, 4, 2, 1):
        high = rest >> (32 - shift)
        none = high == 0
        rank = rank + none * shift
        rest = torch.where(none, rest << shift, rest) & 0xFFFFFFFF
    table = torch.zeros(16 * 256, dtype=torch.int64, device=keys.device)
    table = table.scatter_reduce(0, groups * 256 + register, rank, "amax").view(16, 256)
    raw = 0.7182725932495458 * 256 * 256 / torch.exp2(-table.float()).sum(1)
    empty = (table == 0).sum(1)
    small = 256 * torch.log(256 / empty.clamp(min=1).float())
    return torch.where((raw < 640) & (empty > 0), small, raw)


def filtered_members(keys: Tensor, asked: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    """Bloom's filter: five hashes of keys set bits, those asked are there where all of theirs are set."""
    n = bits.shape[0]

    def slots(k: Tensor) -> Tensor:
        a, b = (k * 2654435761) & 0x7FFFFFFF, (k * 40503 + 12345) & 0x7FFFFFFF
        return (a[:, None] + torch.arange(5, device=k.device) * b[:, None]) % n

    table = bits > 5
    table = table.index_put((slots(keys).flatten(),), torch.ones((), dtype=torch.bool, device=bits.device))
    found = table[slots(asked)].all(1)
    return found, table.sum()


def even_samples(directions: Tensor, shift: Tensor, prices: Tensor) -> Tensor:
    """Sobol's numbers of 16 dimensions by exclusive ors, shifted, normal by the inverse, Asian options on paths."""
    n = torch.arange(shift.shape[0], device=shift.device) + 1
    gray = n ^ (n >> 1)
    x = torch.zeros(shift.shape[0], directions.shape[0], dtype=torch.int64, device=shift.device)
    for k in range(20):
        x = x ^ torch.where(((gray >> k) & 1)[:, None] == 1, directions[:, k], 0)
    u = (x.to(prices.dtype) / 2**30 + shift[:1].sigmoid()) % 1
    z = torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))
    path = (0.2 * z * 0.25 + 0.001).cumsum(1)
    mean = (prices.abs()[:, None, None] + 50) * path.exp().mean(1)[None, :, None]
    strike = torch.linspace(40, 60, 5, device=shift.device, dtype=prices.dtype)
    return (mean - strike).clamp(min=0).mean(1)


FORCES = Sized(forces_of_energy, lambda m, b, n: [m(b, n, 3) * 3, m(n), m(n)], (2, 7), SINGLE)
BLOCKS: tuple[Block, ...] = (
    FORCES.block("forces of energy", 16, 700),
    Sized(
        matched_forces,
        lambda m, n, k, h: [m(n, 3), ids(m, n, n, k), m(h, 8) * 8**-0.5, m(h) * h**-0.5, m(n, 3)],
        (7, 4, 6),
        SINGLE,
    ).block("matched forces", 20001, 24, 64, training=True),
    Sized(mean_field_electrons, lambda m, n: [m(n, n, n, n) * 0.02, m(n, n), m(n, n) * 0.1], (5,), DOUBLE).block(
        "mean field electrons", 96
    ),
    Sized(shock_fluxes, lambda m, b, n: [m(b, 3, n).abs() + 0.5], (2, 12), SINGLE).block("shock fluxes", 256, 4096),
    Sized(inverse_dynamics, lambda m, n, k: [m(n, k), m(n, k), m(n, k), m(k), m(k, 3) * 0.3], (4, 5), SINGLE).block(
        "inverse dynamics", 20011, 6, training=True
    ),
    Sized(damped_arms, lambda m, n: [m(n, 6), m(n, 3), m(6).abs() * 0.5 + 0.2], (5,), SINGLE).block("damped arms", 200003),
    Sized(driven_paths, lambda m, n, t, o: [m(n, t, 2), m(n, 4), m(o, 2) * 5], (4, 6, 3), SINGLE).block(
        "driven paths", 8192, 30, 12, training=True
    ),
    Sized(rough_kernel, lambda m, n, k, d, c: [m(n, d), m(k, d), m(d), m(k, c), m(n, c)], (9, 7, 4, 3), SINGLE).block(
        "rough kernel", 8191, 1001, 12, 4, training=True
    ),
    Sized(pruned_trees, lambda m, t, s: [m(t, s, 4) * 2, m(2 * t) - 1, m(4, 4)], (4, 6), SINGLE).block(
        "pruned trees", 32, 20001, training=True
    ),
    Sized(monotone_fits, lambda m, b, n: [m(b, n), m(b, n)], (3, 7), SINGLE).block("monotone fits", 128, 300),
    Sized(median_slopes, lambda m, b, n: [m(b, n), m(b, n)], (4, 8), SINGLE).block("median slopes", 1001, 64),
    Sized(shares_of_incomes, lambda m, b, n: [m(b, n), m(b, n)], (3, 30), SINGLE).block("shares of incomes", 500, 4001),
    Sized(drawn_together, lambda m, n, k, d: [m(n, d), m(k, d)], (6, 9, 3), SINGLE).block("drawn together", 4001, 3001, 8),
    Sized(multiplied_factors, lambda m, a, b, r: [m(a, b), m(a, r), m(r, b)], (7, 9, 3), SINGLE).block(
        "multiplied factors", 2001, 3003, 32
    ),
    Sized(odd_ones_out, lambda m, n, k, d: [m(n, d), m(k, d)], (6, 30, 3), SINGLE).block("odd ones out", 3001, 4001, 6),
    Sized(organised_maps, lambda m, n, c, d: [m(n, d), m(c, d)], (20, 9, 4), SINGLE).block("organised maps", 16001, 400, 64),
    Sized(
        weighted_terms,
        lambda m, n, s, q, v: [ids(m, v, n, s), ids(m, v, q, 6), m(n).abs().float() + 1, m(v).abs().float() * 9],
        (12, 8, 3, 20),
        SINGLE,
    ).block("weighted terms", 8001, 128, 16, 5000),
    Sized(counted_apart, lambda m, n: [ids(m, 10**9, n), ids(m, 16, n).flip(0)], (300,), SINGLE).block(
        "counted apart", 2000003
    ),
    Sized(filtered_members, lambda m, n, k, b: [ids(m, 10**9, n), ids(m, 10**9, k).flip(0), m(b)], (20, 30, 400), SINGLE).block(
        "filtered members", 500009, 700001, 8000009
    ),
    Sized(even_samples, lambda m, n, d, p: [ids(m, 2**30, d, 20), m(n, d), m(p)], (30, 4, 3), SINGLE).block(
        "even samples", 65536, 16, 8
    ),
)
