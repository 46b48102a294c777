"""Blocks of science: prices, sounds, robots, graphs, molecules, flows, statistics, tables and texts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def ticks_to_bars(price: Tensor, volume: Tensor, time: Tensor, bars: Tensor) -> tuple[Tensor, ...]:
    """Bars of trades: highest, lowest, volume, volume-weighted price and squared returns of each interval."""
    n = len(bars)
    at = time % n
    volume = volume.abs()
    log_price = price * 0.01 + 4
    high = torch.full((n,), -1e9, device=price.device, dtype=price.dtype).scatter_reduce(0, at, log_price, "amax")
    low = torch.full((n,), 1e9, device=price.device, dtype=price.dtype).scatter_reduce(0, at, log_price, "amin")
    total = torch.zeros_like(bars).index_add(0, at, volume)
    money = torch.zeros_like(bars).index_add(0, at, volume * log_price.exp())
    back = F.pad(log_price[1:] - log_price[:-1], (1, 0)).square()
    return high, low, total, money / total.clamp(min=1e-6), torch.zeros_like(bars).index_add(0, at, back)


def indicators(close: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Technical indicators of many assets: bands of 20 days, true ranges, a strength index, a stochastic, an oscillator."""
    close = close.cumsum(1) * 0.01 + 10
    high, low = close + high.abs() * 0.1, close - low.abs() * 0.1
    windows = close.unfold(1, 20, 1)
    mean, std = windows.mean(-1), windows.std(-1)
    delta = close[:, 1:] - close[:, :-1]
    up = F.avg_pool1d(delta.clamp(min=0)[:, None], 14, 1)[:, 0]
    down = F.avg_pool1d((-delta).clamp(min=0)[:, None], 14, 1)[:, 0]
    strength = 100 - 100 / (1 + up / (down + 1e-6))
    span = torch.maximum(high[:, 1:], close[:, :-1]) - torch.minimum(low[:, 1:], close[:, :-1])
    top = F.max_pool1d(high[:, None], 14, 1)[:, 0]
    bottom = -F.max_pool1d(-low[:, None], 14, 1)[:, 0]
    place = (close[:, 13:] - bottom) / (top - bottom)
    n = mean.shape[1] - 5
    return torch.stack([((close[:, 19:] - mean) / std)[:, -n:], strength[:, -n:], span[:, -n:], place[:, -n:]], -1)


def book_features(bid: Tensor, ask: Tensor, bid_size: Tensor, ask_size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order books: levels sorted by depth, a microprice, imbalances of levels, the cost to trade a size through."""
    bids = 1 - bid.abs().cumsum(-1) * 0.01
    asks = 1 + ask.abs().cumsum(-1) * 0.01
    bs, az = bid_size.abs() + 0.1, ask_size.abs() + 0.1
    micro = (bids[..., 0] * az[..., 0] + asks[..., 0] * bs[..., 0]) / (bs[..., 0] + az[..., 0])
    cb, ca = bs.cumsum(-1), az.cumsum(-1)
    imbalance = (cb - ca) / (cb + ca)
    filled = torch.minimum(ca, ca.new_tensor(3.0)) - torch.minimum(ca - az, ca.new_tensor(3.0))
    cost = (filled * asks).sum(-1) / filled.sum(-1) - micro
    return micro, imbalance, cost


def binomial_tree(spot: Tensor, strike: Tensor, vol: Tensor) -> Tensor:
    """American puts on a binomial tree of 32 steps, all contracts together; vega and delta by the gradient."""
    n = 32
    sigma = F.softplus(vol) * 0.3 + 0.05
    up = torch.exp(sigma * math.sqrt(1 / n))
    p = (math.exp(0.03 / n) - 1 / up) / (up - 1 / up)
    k = torch.arange(n + 1, device=spot.device, dtype=spot.dtype)
    s, x = 100 + 5 * spot, 100 + 5 * strike
    value = F.relu(x[:, None] - s[:, None] * up[:, None] ** (2 * k - n))
    for step in range(n - 1, -1, -1):
        j = k[: step + 1]
        hold = math.exp(-0.03 / n) * (p[:, None] * value[:, 1:] + (1 - p)[:, None] * value[:, :-1])
        value = torch.maximum(hold, x[:, None] - s[:, None] * up[:, None] ** (2 * j - step))
    return value[:, 0]


def rebalanced(weights: Tensor, returns: Tensor, factors: Tensor) -> Tensor:
    """Portfolios: softmax weights drift with returns, turnover costs, a factor penalty, a Sharpe ratio."""
    w = weights.softmax(-1)
    r = returns * 0.01
    gross = (w[:-1] * r[1:]).sum(-1)
    drifted = w[:-1] * (1 + r[1:])
    drifted = drifted / drifted.sum(-1, keepdim=True)
    cost = 0.001 * (w[1:] - drifted).abs().sum(-1)
    net = gross - cost
    exposure = torch.einsum("tba,fa->tbf", w, factors).square().mean((0, 2))
    return -(net.mean(0) / (net.std(0) + 1e-4)) + 0.1 * exposure


def equalised_sound(x: Tensor, gains: Tensor, centres: Tensor, widths: Tensor) -> Tensor:
    """A bank of peaking filters as responses on a grid of frequencies, multiplied, applied by a Fourier transform."""
    n = x.shape[-1]
    w = torch.linspace(0, math.pi, n // 2 + 1, device=x.device, dtype=x.dtype)
    w0 = centres.sigmoid() * 3
    alpha = w0.sin() / (2 * (F.softplus(widths) + 0.3))
    a = torch.exp(gains * 0.2)
    c1, s1, c2, s2 = w.cos(), w.sin(), (2 * w).cos(), (2 * w).sin()

    def size(b0: Tensor, b1: Tensor, b2: Tensor) -> Tensor:
        re = b0[..., None] + b1[..., None] * c1 + b2[..., None] * c2
        im = b1[..., None] * s1 + b2[..., None] * s2
        return re.square() + im.square()

    middle = -2 * w0.cos()
    response = size(1 + alpha * a, middle, 1 - alpha * a) / (size(1 + alpha / a, middle, 1 - alpha / a) + 1e-6)
    total = (0.5 * (response + 1e-6).log().sum(1)).exp()
    return torch.fft.irfft(torch.fft.rfft(x) * total, n=n)


def modulated_delay(x: Tensor, depth: Tensor, rate: Tensor, mix: Tensor) -> Tensor:
    """A chorus of three voices: delay lines moved by slow sines, read between samples, mixed with the dry sound."""
    _b, n = x.shape
    t = torch.arange(n, device=x.device, dtype=x.dtype)
    phase = rate.abs()[:, :, None] * t * 1e-3
    delay = (20 + 10 * depth.sigmoid())[:, :, None] * (1 + 0.5 * phase.sin()) + 1
    at = (t - delay).clamp(min=0)
    low = at.floor()
    part = at - low
    low = low.long()
    line = x[:, None].expand(-1, depth.shape[1], -1)
    wet = line.gather(2, low) * (1 - part) + line.gather(2, (low + 1).clamp(max=n - 1)) * part
    return torch.tanh(x + (wet * mix.softmax(1)[:, :, None]).sum(1))


def wavetables(f0: Tensor, mix: Tensor, tables: Tensor, gain: Tensor) -> Tensor:
    """A wavetable synthesiser: phases summed, tables read between points, mixed by framewise weights, upsampled gains."""
    _b, n = f0.shape
    _k, size = tables.shape
    phase = torch.cumsum((f0.abs() * 0.01 + 0.01).double(), 1).remainder(1.0).to(f0.dtype) * size
    low = phase.floor().long().clamp(max=size - 1)
    part = phase - low
    table = torch.tanh(tables)
    a, c = table[:, low], table[:, (low + 1) % size]
    voices = a + (c - a) * part
    up = F.interpolate(mix.softmax(1), size=n, mode="linear", align_corners=False)
    loud = F.interpolate(gain.exp()[:, None], size=n, mode="linear", align_corners=False)[:, 0]
    return torch.einsum("kbn,bkn->bn", voices, up) * loud


def tempogram(flux: Tensor) -> tuple[Tensor, Tensor]:
    """Local autocorrelations of onset strength in windows of 384 frames, normed, the strongest lag by a prior."""
    size = min(384, flux.shape[1] // 2)
    frames = flux.relu().unfold(1, size, 16) * torch.hann_window(size, device=flux.device, dtype=flux.dtype)
    spectrum = torch.fft.rfft(frames, n=2 * size).abs().square()
    auto = torch.fft.irfft(spectrum)[..., :size]
    auto = auto / auto.amax(-1, keepdim=True).clamp(min=1e-6)
    lags = torch.arange(size, device=flux.device, dtype=flux.dtype)
    prior = torch.exp(-0.5 * ((lags + 1).log2() - 5).square())
    return auto, (auto * prior)[..., 2:].argmax(-1) + 2


def preintegrated(gyro: Tensor, accel: Tensor, bias: Tensor) -> Tensor:
    """Inertial preintegration: rotations by small angles chained over 16 samples, velocities and positions beside."""
    dt = 0.1
    b = gyro.shape[0]
    turn = torch.eye(3, device=gyro.device, dtype=gyro.dtype).expand(b, 3, 3)
    v, p = gyro.new_zeros(b, 3), gyro.new_zeros(b, 3)
    eye = torch.eye(3, device=gyro.device, dtype=gyro.dtype)
    for k in range(gyro.shape[1]):
        a = torch.einsum("bij,bj->bi", turn, accel[:, k] - bias[:, 3:])
        p = p + v * dt + 0.5 * a * dt * dt
        v = v + a * dt
        x, y, z = ((gyro[:, k] - bias[:, :3]) * dt).unbind(-1)
        o = torch.zeros_like(x)
        skew = torch.stack([o, -z, y, z, o, -x, -y, x, o], -1).view(-1, 3, 3)
        angle = (x * x + y * y + z * z + 1e-8).sqrt()[:, None, None]
        turn = turn @ (eye + angle.sin() / angle * skew + (1 - angle.cos()) / angle.square() * skew @ skew)
    return torch.cat([turn.flatten(1), v, p], 1)


def range_image(points: Tensor, intensity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A lidar sweep on to 64 rows of 1024: azimuths, elevations, the nearest range of each cell, its intensity, normals."""
    b = points.shape[0]
    x, y, z = points.unbind(-1)
    r = points.square().sum(-1).sqrt() + 0.1
    column = ((torch.atan2(y, x) / math.pi + 1) * 512).long().clamp(0, 1023)
    row = ((torch.asin((z / r).clamp(-1, 1)) + 0.5) * 64).long().clamp(0, 63)
    cell = row * 1024 + column
    near = torch.full((b, 65536), 100.0, device=x.device, dtype=x.dtype).scatter_reduce(1, cell, r, "amin")
    hit = near.gather(1, cell) == r
    light = torch.zeros_like(near).scatter_reduce(1, cell, torch.where(hit, intensity, 0.0), "sum")
    image = near.view(b, 64, 1024)
    edge = (image - image.roll(1, 2)).abs() > 0.5
    return image, light.view(b, 64, 1024), edge


def sampled_paths(state: Tensor, controls: Tensor, noise: Tensor, goal: Tensor, blocks: Tensor) -> Tensor:
    """MPPI: bicycle models rolled out under noisy controls past round obstacles, costs, a soft minimum of controls."""
    n = noise.shape[0]
    u = controls[None] + noise * 0.3
    x, y, a, v = (state[k].expand(n) for k in range(4))
    cost = torch.zeros(n, device=noise.device, dtype=noise.dtype)
    for t in range(u.shape[1]):
        steer, push = torch.tanh(u[:, t, 0]) * 0.5, u[:, t, 1].clamp(-1, 1)
        x, y = x + 0.1 * v * a.cos(), y + 0.1 * v * a.sin()
        a, v = a + 0.1 * v * steer.tan(), v + 0.1 * push
        d = (x[:, None] - blocks[:, 0]).square() + (y[:, None] - blocks[:, 1]).square()
        cost = cost + (x - goal[0]).square() + (y - goal[1]).square() + 10 * torch.exp(-4 * d).sum(1)
    w = torch.softmax(-cost / 5, 0)
    return torch.einsum("n,ntk->tk", w, u)


def swept_spheres(joints: Tensor, links: Tensor, field: Tensor) -> Tensor:
    """CHOMP: trajectories of a plane arm, points along links looked up in a distance field, smoothness by accelerations."""
    angles = joints.cumsum(-1)
    size = F.softplus(links) * 0.1 + 0.05
    x, y = (size * angles.cos()).cumsum(-1), (size * angles.sin()).cumsum(-1)
    grid = torch.stack([x, y], -1).clamp(-1, 1)
    b, _t, _k, _ = grid.shape
    d = F.grid_sample(field[None].expand(b, -1, -1, -1), grid, align_corners=True, padding_mode="border")[:, 0]
    speed = (grid[:, 1:] - grid[:, :-1]).square().sum(-1).add(1e-6).sqrt()
    near = torch.where(d < 0, -d + 0.1, torch.where(d < 0.2, (d - 0.2).square() * 2.5, 0.0))
    bend = (joints[:, 2:] - 2 * joints[:, 1:-1] + joints[:, :-2]).square().sum((1, 2))
    return (near[:, 1:] * speed).sum((1, 2)) + bend


def spatial_bias(x: Tensor, wqkv: Tensor, hops: Tensor, degree: Tensor, bias: Tensor, central: Tensor) -> Tensor:
    """Graphormer: node degrees embedded, a bias by hops between nodes for each head, padding hidden."""
    b, n, d = x.shape
    h = bias.shape[1]
    x = x + central[degree]
    q, k, v = F.linear(x, wqkv).view(b, n, 3, h, d // h).permute(2, 0, 3, 1, 4).unbind(0)
    mask = bias[hops].permute(0, 3, 1, 2).masked_fill((hops == 0)[:, None], -30.0)
    out = torch.softmax(q @ k.mT * (d // h) ** -0.5 + mask, -1) @ v
    return x + out.transpose(1, 2).reshape(b, n, d)


def directional_messages(m: Tensor, at: Tensor, edge: Tensor, left: Tensor, right: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """DimeNet-like: messages of edges from those that meet them, weighted by radial and angular functions."""
    vec = at[edge[1]] - at[edge[0]]
    d = vec.square().sum(-1).add(1e-4).sqrt()
    cos = (vec[left] * vec[right]).sum(-1) / (d[left] * d[right])
    angular = torch.stack([torch.ones_like(cos), cos, 1.5 * cos**2 - 0.5], -1)
    k = torch.arange(1, 5, device=m.device, dtype=m.dtype)
    radial = torch.sin(k * math.pi * d[left, None] / 5) / d[left, None]
    basis = (radial[:, :, None] * angular[:, None]).flatten(1) @ mix
    gathered = F.silu(m @ w)[left] * basis
    return m + torch.zeros_like(m).index_add(0, right, gathered)


def hyperedges(x: Tensor, node: Tensor, hyper: Tensor, weights: Tensor, w: Tensor) -> Tensor:
    """Hypergraph convolution: nodes averaged into hyperedges, weighted, averaged back, a linear layer, relu."""
    n, e = len(x), len(weights)
    ones = torch.ones_like(node, dtype=x.dtype)
    deg_e = torch.zeros(e, dtype=x.dtype, device=x.device).index_add(0, hyper, ones).clamp(min=1)
    we = F.softplus(weights)
    deg_n = torch.zeros(n, dtype=x.dtype, device=x.device).index_add(0, node, we[hyper]).clamp(min=1e-2)
    y = x @ w
    into = torch.zeros(e, y.shape[1], dtype=x.dtype, device=x.device).index_add(0, hyper, y[node])
    into = into * (we / deg_e)[:, None]
    back = torch.zeros_like(y).index_add(0, node, into[hyper])
    return F.relu(back / deg_n[:, None])


def symmetry_functions(at: Tensor, near: Tensor, eta: Tensor, shift: Tensor) -> Tensor:
    """Behler-Parrinello: radial and angular sums over neighbours' pairs with a smooth cutoff."""
    vec = at[near] - at[:, None]
    r = vec.square().sum(-1).add(1e-4).sqrt()
    cut = 0.5 * (torch.cos(math.pi * r.clamp(max=4) / 4) + 1)
    e = F.softplus(eta)
    radial = (torch.exp(-e * (r[..., None] - shift.abs()).square()) * cut[..., None]).sum(1)
    cos = torch.einsum("nki,nji->nkj", vec, vec) / (r[:, :, None] * r[:, None])
    both = torch.exp(-0.1 * (r[:, :, None].square() + r[:, None].square())) * cut[:, :, None] * cut[:, None]
    both = both * (1 - torch.eye(near.shape[1], device=at.device, dtype=at.dtype))
    angular = torch.stack([(both * (1 + s * cos).clamp(min=1e-4).pow(z)).sum((1, 2)) for s in (-1, 1) for z in (1, 2, 4)], 1)
    return torch.cat([radial, angular], 1)


def local_distances(predicted: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """A smooth lDDT: distances of all pairs within a radius compared at four thresholds, means for residues."""

    def pairs(t: Tensor) -> Tensor:
        return (t[:, :, None] - t[:, None]).square().sum(-1).add(1e-4).sqrt()

    dp, dt = pairs(predicted * 5), pairs(truth * 5)
    n = truth.shape[1]
    keep = (dt < 15) & ~torch.eye(n, dtype=torch.bool, device=truth.device)
    keep = keep & (mask > -1.5)[:, None] & (mask > -1.5)[:, :, None]
    error = (dp - dt).abs()
    score = sum(torch.sigmoid(limit - error) for limit in (0.5, 1.0, 2.0, 4.0)) / 4
    return 1 - (score * keep).sum((1, 2)) / keep.sum((1, 2)).clamp(min=1)


def corrected_contacts(msa: Tensor, weight_of: Tensor) -> Tensor:
    """Covariances of one-hot columns of an alignment, norms of 21x21 blocks, average correction of both ends."""
    _s, n = msa.shape
    x = F.one_hot(msa, 21).to(weight_of.dtype).flatten(1)
    w = weight_of.sigmoid()
    mean = (w[:, None] * x).sum(0) / w.sum()
    d = (x - mean) * w.sqrt()[:, None]
    cov = (d.mT @ d / w.sum()).view(n, 21, n, 21)
    norm = cov[:, :20, :, :20].square().sum((1, 3)).add(1e-8).sqrt()
    norm = norm * (1 - torch.eye(n, device=msa.device, dtype=norm.dtype))
    return norm - norm.sum(0, keepdim=True) * norm.sum(1, keepdim=True) / norm.sum()


def waves_between_cells(u: Tensor) -> Tensor:
    """Euler equations in two dimensions: limited slopes, HLL fluxes of both axes, one explicit step."""
    rho, vx, vy, p = u[:, 0].exp(), u[:, 1], u[:, 2], u[:, 3].exp()

    def flux(rho: Tensor, vn: Tensor, vt: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        energy = p / 0.4 + 0.5 * rho * (vn * vn + vt * vt)
        state = torch.stack([rho, rho * vn, rho * vt, energy], 1)
        return state, torch.stack([rho * vn, rho * vn * vn + p, rho * vn * vt, vn * (energy + p)], 1)

    def change(vn: Tensor, vt: Tensor, dim: int) -> Tensor:
        def ends(q: Tensor) -> tuple[Tensor, Tensor]:
            a, b = q - q.roll(1, dim), q.roll(-1, dim) - q
            slope = torch.where(a * b > 0, torch.sign(a) * torch.minimum(a.abs(), b.abs()), 0.0)
            return q + slope / 2, (q - slope / 2).roll(-1, dim)

        (rl, rr), (nl, nr), (tl, tr), (pl, pr) = (ends(q) for q in (rho, vn, vt, p))
        cl, cr = (1.4 * pl / rl).sqrt(), (1.4 * pr / rr).sqrt()
        sl = torch.minimum(nl - cl, nr - cr).clamp(max=-1e-3)[:, None]
        sr = torch.maximum(nl + cl, nr + cr).clamp(min=1e-3)[:, None]
        (ul, fl), (ur, fr) = flux(rl, nl, tl, pl), flux(rr, nr, tr, pr)
        f = (sr * fl - sl * fr + sl * sr * (ur - ul)) / (sr - sl)
        return f - f.roll(1, dim + 1)

    fx, fy = change(vx, vy, 2), change(vy, vx, 1)
    state, _ = flux(rho, vx, vy, p)
    return state - 0.1 * (fx + fy[:, [0, 2, 1, 3]])


def elastic_tetrahedra(at: Tensor, rest: Tensor, tets: Tensor, stiff: Tensor) -> Tensor:
    """Neo-Hookean energies of tetrahedra: deformation gradients, invariants, logs of volumes, summed for bodies."""
    corner = at[tets]
    now = (corner[:, 1:] - corner[:, :1]).mT
    eye = torch.eye(3, device=at.device, dtype=at.dtype)
    f = (now * 0.05 + eye) @ (eye + rest * 0.05)
    i1 = f.square().sum((1, 2))
    j = (f[:, :, 0] * torch.linalg.cross(f[:, :, 1], f[:, :, 2])).sum(-1).clamp(min=0.05)
    mu = F.softplus(stiff)
    return (mu / 2 * (i1 - 3 - 2 * j.log()) + mu * j.log().square()).view(-1, 7).sum(1)


def softened_gravity(at: Tensor, mass: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of bodies: softened accelerations and potentials, a leap-frog kick and drift, total energy."""
    d = at[None] - at[:, None]
    inverse = torch.rsqrt(d.square().sum(-1) + 1e-2)
    m = mass.abs()
    acc = ((m * inverse**3)[..., None] * d).sum(1) / len(m)
    potential = -(m * inverse).sum(1) / len(m)
    v = velocity + 0.01 * acc
    energy = (m * (0.5 * v.square().sum(-1) + 0.5 * potential)).sum()
    return at + 0.01 * v, v, energy


def pair_counts(a: Tensor, b: Tensor, weights: Tensor) -> Tensor:
    """Two-point correlations: weighted counts of pairs in 24 logarithmic bins of distance."""
    d2 = (a[:, None] - b[None]).square().sum(-1)
    at = ((d2 + 1e-6).log() * 2 + 12).clamp(0, 23).long()
    return torch.zeros(24, device=a.device, dtype=a.dtype).index_add(
        0, at.flatten(), (weights[:, None] * weights[None, : len(b)]).abs().flatten()
    )


def reweighted_squares(x: Tensor, y: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logistic regression by reweighting for many outcomes: weights, normal matrices, gradients, deviances."""
    eta = x @ beta.mT
    p = eta.sigmoid().clamp(1e-4, 1 - 1e-4)
    t = (y > 0).to(x.dtype)
    w = p * (1 - p)
    normal = torch.einsum("ni,nk,nj->kij", x, w, x)
    gradient = torch.einsum("nk,ni->ki", t - p, x) - 0.1 * beta
    return normal, gradient, -2 * (t * p.log() + (1 - t) * (1 - p).log()).sum(0)


def parzen_information(fixed: Tensor, moving: Tensor) -> Tensor:
    """Registration by mutual information: soft shared histograms of 32 bins as a matmul, entropies."""
    bins = torch.linspace(-2, 2, 32, device=fixed.device, dtype=fixed.dtype)

    def soft(t: Tensor) -> Tensor:
        return F.normalize(torch.exp(-((t[..., None] - bins) ** 2) * 60) + 1e-6, p=1.0, dim=-1)

    shared = soft(fixed).mT @ soft(moving) / fixed.shape[1]
    pa, pb = shared.sum(2, keepdim=True), shared.sum(1, keepdim=True)
    return -(shared * (shared / (pa * pb)).log()).sum((1, 2))


def normal_scores(x: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Table columns by ranks to normal scores, outer percents clipped, missing ones flagged and set to the median."""
    missing = low > 1.6
    n = len(x)
    rank = x.argsort(0).argsort(0).to(x.dtype)
    score = torch.erfinv(((rank + 0.5) / n * 2 - 1).clamp(-0.999, 0.999)) * math.sqrt(2)
    ordered = x.sort(0).values
    clipped = torch.minimum(torch.maximum(x, ordered[n // 100]), ordered[-1 - n // 100])
    return torch.where(missing, 0.0, score), torch.where(missing, ordered[n // 2], clipped)


def encoded_targets(codes: Tensor, target: Tensor, fold: Tensor) -> Tensor:
    """Target encoding out of fold: sums and counts of categories and folds, all less the own fold, smoothed."""
    _n, columns = codes.shape
    k = 2048
    flat = codes + torch.arange(columns, device=codes.device) * k
    sums = torch.zeros(columns * k, 5, device=target.device, dtype=target.dtype)
    counts = torch.zeros_like(sums)
    at = flat * 5 + fold[:, None]
    sums = sums.view(-1).index_add(0, at.flatten(), target[:, None].expand(-1, columns).flatten()).view(-1, 5)
    counts = counts.view(-1).index_add(0, at.flatten(), torch.ones_like(at, dtype=target.dtype).flatten()).view(-1, 5)
    s = sums.sum(1)[flat] - sums.view(-1)[at]
    c = counts.sum(1)[flat] - counts.view(-1)[at]
    return (s + 10 * target.mean()) / (c + 10)


def numbers_of_texts(text: Tensor) -> tuple[Tensor, Tensor]:
    """Columns of digits as bytes: signs, points, values by place, flags of what is no number, fixed width of 16."""
    digit = text - 48
    is_digit = (text >= 48) & (text <= 57)
    is_point = text == 46
    after = is_point.cumsum(1) > 0
    behind = (is_digit & after).sum(1)
    place = is_digit.flip(1).cumsum(1).flip(1) - 1
    value = torch.where(is_digit, digit.double() * 10.0 ** place.double(), 0.0).sum(1)
    value = value / 10.0 ** behind.double()
    value = torch.where((text == 45).any(1), -value, value)
    return value.float(), (is_digit | is_point | (text == 45) | (text == 32)).all(1)


def minimal_hashes(tokens: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Near duplicates: hashes of five-token shingles, minima under 64 linear maps, bands of four folded to keys."""
    mixed = tokens[:, 4:].clone()
    for k in range(4):
        mixed = (mixed * 1000003 + tokens[:, k : k + mixed.shape[1]]) % 2147483647
    hashed = (mixed[:, :, None] * a[None, None] + b[None, None]) % 2147483647
    least = hashed.amin(1)
    bands = least.unflatten(1, (-1, 4))
    key = (bands * torch.tensor([1, 31, 961, 29791], device=tokens.device)).sum(-1) & 0xFFFFF
    return least, key


def packed_rows(lengths: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Documents into one padded matrix: ends by a running sum, rows found by bisection, positions, the next ones as labels."""
    size = lengths % 64 + 1
    ends = size.cumsum(0)
    at = torch.arange(len(tokens), device=tokens.device)
    doc = torch.searchsorted(ends, at, right=True).clamp(max=len(size) - 1)
    position = at - (ends - size)[doc]
    inside = position < size[doc]
    label = torch.where((position + 1 < size[doc]) & inside, tokens.roll(-1), -100)
    padded = torch.zeros(len(size), 65, dtype=tokens.dtype, device=tokens.device)
    padded = padded.index_put((doc, position.clamp(max=64)), torch.where(inside, tokens, 0), accumulate=True)
    return padded, torch.where(inside, position, 0), label


HOPS = Sized(
    spatial_bias,
    lambda m, b, n, d, h: [m(b, n, d), weight(m, 3 * d, d), ids(m, 20, b, n, n), ids(m, 64, b, n), m(20, h), m(64, d)],
    (2, 7, 8, 2),
)
MESSAGES = Sized(
    directional_messages,
    lambda m, n, e, t, d: [m(e, d), m(n, 3), ids(m, n, 2, e), ids(m, e, t), ids(m, e, t), weight(m, d, d), m(12, d) * 0.2],
    (6, 9, 12, 4),
    SINGLE,
    tf32=True,
)
HYPER = Sized(
    hyperedges,
    lambda m, n, e, k, d, o: [m(n, d), ids(m, n, k), ids(m, e, k), m(e), weight(m, d, o)],
    (7, 4, 15, 5, 6),
    SINGLE,
    tf32=True,
)
CELLS = Sized(waves_between_cells, lambda m, b, h, w: [m(b, 4, h, w) * 0.3], (2, 6, 7), SINGLE)
TREE = Sized(binomial_tree, lambda m, n: [m(n), m(n), m(n)], (5,), SINGLE)
SOUND = Sized(equalised_sound, lambda m, b, n, k: [m(b, n), m(b, k), m(b, k), m(b, k)], (2, 16, 3), SINGLE)
CHORUS = Sized(modulated_delay, lambda m, b, n: [m(b, n), m(b, 3), m(b, 3), m(b, 3)], (2, 60), SINGLE)
PAIRS = Sized(local_distances, lambda m, b, n: [m(b, n, 3), m(b, n, 3), m(b, n)], (2, 9), SINGLE)
ARM = Sized(swept_spheres, lambda m, b, t, k, h: [m(b, t, k) * 0.3, m(k), m(1, h, h)], (3, 6, 4, 8), SINGLE)

BLOCKS: tuple[Block, ...] = (
    Sized(ticks_to_bars, lambda m, n, k: [m(n), m(n), ids(m, 1000003, n), m(k)], (50, 7), SINGLE).block(
        "ticks to bars", 3000001, 4001
    ),
    Sized(indicators, lambda m, n, t: [m(n, t), m(n, t), m(n, t)], (3, 40), SINGLE).block("indicators", 3001, 2520),
    Sized(book_features, lambda m, n, k: [m(n, k), m(n, k), m(n, k), m(n, k)], (9, 6), SINGLE).block(
        "book features", 400003, 20
    ),
    TREE.block("binomial tree", 20011, training=True),
    Sized(rebalanced, lambda m, t, b, a, f: [m(t, b, a), m(t, b, a), m(f, a)], (6, 2, 5, 3), SINGLE).block(
        "rebalanced", 252, 64, 503, 11, training=True
    ),
    SOUND.block("equalised sound", 32, 32768, 12),
    CHORUS.block("modulated delay", 32, 96001, training=True),
    Sized(
        wavetables,
        lambda m, b, n, k, s, f: [m(b, n), m(b, k, f), m(k, s), m(b, f)],
        (2, 40, 3, 16, 5),
        SINGLE,
    ).block("wavetables", 8, 64000, 10, 512, 250, training=True),
    Sized(tempogram, lambda m, b, n: [m(b, n)], (2, 120), SINGLE).block("tempogram", 64, 12919),
    Sized(preintegrated, lambda m, b, t: [m(b, t, 3), m(b, t, 3), m(b, 6) * 0.1], (4, 3), SINGLE).block(
        "preintegrated", 50021, 16, training=True
    ),
    Sized(range_image, lambda m, b, n: [m(b, n, 3) * 5, m(b, n)], (2, 60), SINGLE).block("range image", 8, 120001),
    Sized(sampled_paths, lambda m, n, t, k: [m(4), m(t, 2), m(n, t, 2), m(2) * 3, m(k, 2) * 3], (9, 4, 3), SINGLE).block(
        "sampled paths", 65537, 30, 12
    ),
    ARM.block("swept spheres", 512, 100, 7, 256, training=True),
    HOPS.block("spatial bias", 32, 192, 256, 8, training=True),
    MESSAGES.block("directional messages", 5001, 60000, 400000, 64),
    HYPER.block("hyperedges", 20001, 5003, 150000, 128, 64, training=True),
    Sized(symmetry_functions, lambda m, n, k, e: [m(n, 3) * 2, ids(m, n, n, k), m(e), m(e)], (9, 5, 4), SINGLE).block(
        "symmetry functions", 20011, 24, 8, training=True
    ),
    PAIRS.block("local distances", 4, 1023),
    Sized(corrected_contacts, lambda m, s, n: [ids(m, 21, s, n), m(s)], (12, 5), SINGLE, tf32=True).block(
        "corrected contacts", 2048, 200
    ),
    CELLS.block("waves between cells", 2, 767, 769),
    Sized(elastic_tetrahedra, lambda m, n, t: [m(n, 3), m(7 * t, 3, 3), ids(m, n, 7 * t, 4), m(7 * t)], (9, 3), SINGLE).block(
        "elastic tetrahedra", 100003, 50021, training=True
    ),
    Sized(softened_gravity, lambda m, n: [m(n, 3), m(n), m(n, 3)], (30,), SINGLE).block("softened gravity", 12001),
    Sized(pair_counts, lambda m, n, k: [m(n, 3), m(k, 3), m(n)], (20, 15), SINGLE).block("pair counts", 5003, 4001),
    Sized(reweighted_squares, lambda m, n, d, k: [m(n, d), m(n, k), m(k, d) * 0.1], (30, 5, 3), SINGLE, tf32=True).block(
        "reweighted squares", 40009, 40, 12
    ),
    Sized(parzen_information, lambda m, b, n: [m(b, n), m(b, n)], (2, 30), SINGLE, tf32=True).block(
        "parzen information", 8, 65536, training=True
    ),
    Sized(normal_scores, lambda m, n, d: [m(n, d), m(n, d)], (30, 4), SINGLE).block("normal scores", 30011, 60),
    Sized(encoded_targets, lambda m, n, c: [ids(m, 2048, n, c), m(n), ids(m, 5, n)], (60, 3), SINGLE).block(
        "encoded targets", 100003, 24
    ),
    Sized(numbers_of_texts, lambda m, n: [(ids(m, 10, n, 16) + 45)], (9,), SINGLE).block("numbers of texts", 600011),
    Sized(
        minimal_hashes, lambda m, b, s, k: [ids(m, 50257, b, s), ids(m, 60000, k) + 1, ids(m, 60000, k)], (3, 12, 8), SINGLE
    ).block("minimal hashes", 512, 1004, 64),
    Sized(packed_rows, lambda m, n, t: [ids(m, 6400, n), ids(m, 50257, t)], (6, 90), SINGLE).block(
        "packed rows", 60013, 2000003
    ),
)
