"""Graphs, fields, particles, rivers, epidemics, cells, prices, codes and sound."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, DOUBLE = torch.float32, torch.float64


# ---- graphs ---------------------------------------------------------------------------------------------------------------


def restricted_edges(x: Tensor, maps: Tensor, w: Tensor, mix: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A sheaf's diffusion: a 3x3 map of each edge's ends, blocks of degrees, differences sent back to both ends, two layers."""
    n = x.shape[0]
    for k in range(2):
        y = torch.einsum("ij,njc->nic", mix[k], x) @ w[k]
        fa, fb = torch.tanh(maps[0]), torch.tanh(maps[1])
        degree = torch.zeros(n, device=x.device, dtype=x.dtype).index_add(0, a, fa.square().sum((1, 2)))
        degree = (degree.index_add(0, b, fb.square().sum((1, 2))) + 1).rsqrt()
        y = y * degree[:, None, None]
        far = fa @ y[a] - fb @ y[b]
        flow = torch.zeros_like(x).index_add(0, a, fa.mT @ far).index_add(0, b, -(fb.mT @ far))
        x = x - F.elu(flow * degree[:, None, None])
    return x


def gated_graph(x: Tensor, kinds: Tensor, source: Tensor, to: Tensor, w: Tensor, wi: Tensor, wh: Tensor) -> Tensor:
    """A gated graph network: messages by a layer of each edge's kind, sums, a recurrent unit's gates; three rounds."""
    h = x
    for _ in range(3):
        every = torch.einsum("nc,koc->nko", h, w).flatten(0, 1)
        m = torch.zeros_like(h).index_add(0, to, every[source * w.shape[0] + kinds])
        r, z, c = F.linear(m, wi).chunk(3, -1)
        hr, hz, hc = F.linear(h, wh).chunk(3, -1)
        z = torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(c + torch.sigmoid(r + hr) * hc) + z * h
    return F.silu(F.layer_norm(h + x, x.shape[1:]))


def random_ways(starts: Tensor, counts: Tensor, targets: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Random ways of sixteen steps along a graph's lists, back to the start sometimes, and how often each node was seen."""
    first = counts.cumsum(0) - counts
    at, path = starts, [starts]
    for k in range(16):
        u = torch.sigmoid(noise[k])
        pick = (u * counts[at]).long().clamp(max=targets.shape[0] - 1)
        pick = torch.minimum(pick, (counts[at] - 1).clamp(min=0))
        step = targets[(first[at] + pick).clamp(max=targets.shape[0] - 1)]
        at = torch.where((counts[at] == 0) | (u < 0.2), starts, step)
        path.append(at)
    path = torch.stack(path, 1)
    return path, torch.bincount(path.flatten(), minlength=counts.shape[0])


# ---- fields and particles -------------------------------------------------------------------------------------------------


def sphere_spectra(x: Tensor, legendre: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """A spherical operator: cosines and sines around each ring by matmuls, Legendre sums, weights by degree, and back."""
    _b, _c, lat, lon = x.shape
    m = legendre.shape[0]
    angle = 2 * math.pi / lon * torch.arange(m, device=x.device)[:, None] * torch.arange(lon, device=x.device)
    wave = torch.stack([angle.cos(), angle.sin()]).to(x.dtype)
    area = torch.cos(torch.linspace(-1.5, 1.5, lat, device=x.device, dtype=x.dtype))
    ring = torch.einsum("bcyx,pmx->pbcmy", x, wave) * (2 * math.pi / lon)
    f = torch.einsum("pbcmy,mly,y->pbcml", ring, legendre, area) / lat
    re = torch.einsum("bcml,lco->boml", f[0], w[0]) - torch.einsum("bcml,lco->boml", f[1], w[1])
    im = torch.einsum("bcml,lco->boml", f[0], w[1]) + torch.einsum("bcml,lco->boml", f[1], w[0])
    ring = torch.einsum("pboml,mly->pbomy", torch.stack([re, im]), legendre)
    y = torch.einsum("pbomy,pmx->boyx", ring, wave)
    return F.gelu(y + torch.einsum("bcyx,oc->boyx", x, mix))


def magnetised_fluxes(u: Tensor) -> Tensor:
    """Ideal magnetohydrodynamics in a periodic plane: slopes by van Leer, Rusanov's fluxes along both axes, a clean field."""
    rho, mx, my, e, bx, by, psi = u.unbind(0)

    def flux(rho: Tensor, mn: Tensor, mt: Tensor, e: Tensor, bn: Tensor, bt: Tensor, psi: Tensor) -> tuple[Tensor, Tensor]:
        vn, vt = mn / rho, mt / rho
        b2 = bn * bn + bt * bt
        p = (0.4 * (e - 0.5 * rho * (vn * vn + vt * vt) - 0.5 * b2)).clamp(min=1e-3)
        total = p + 0.5 * b2
        a2, c2 = 1.4 * p / rho, b2 / rho
        fast = (0.5 * (a2 + c2 + ((a2 + c2).square() - 4 * a2 * bn * bn / rho).clamp(min=0).sqrt())).sqrt()
        f = [mn, mn * vn + total - bn * bn, mt * vn - bn * bt, (e + total) * vn - bn * (vn * bn + vt * bt), psi]
        return torch.stack([*f, bt * vn - bn * vt, bn]), vn.abs() + fast

    def swept(q: Tensor, axis: int) -> Tensor:
        low, high = q - q.roll(1, axis), q.roll(-1, axis) - q
        slope = torch.where(low * high > 0, 2 * low * high / (low + high + 1e-12), 0)
        left, right = q + 0.5 * slope, (q - 0.5 * slope).roll(-1, axis)
        (fl, sl), (fr, sr) = flux(*left.unbind(0)), flux(*right.unbind(0))
        f = 0.5 * (fl + fr) - 0.5 * torch.maximum(sl, sr) * (right - left)
        return f - f.roll(1, axis)

    q = torch.stack([rho, mx, my, e, bx, by, psi])
    for _ in range(2):
        dx = swept(q, 2)
        turned = torch.stack([q[0], q[2], q[1], q[3], q[5], q[4], q[6]])
        dy = swept(turned, 1)
        q = q - 0.05 * (dx + torch.stack([dy[0], dy[2], dy[1], dy[3], dy[5], dy[4], dy[6]]))
        q = torch.cat([q[:6], q[6:] * 0.9])
    return q


def turned_charges(x: Tensor, v: Tensor, electric: Tensor, magnetic: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Boris: fields read between nodes of a periodic line, half kicks around a turn; charges back, a potential."""
    n = electric.shape[0]
    for _ in range(3):
        p = torch.remainder(x, n)
        i = p.floor().long().clamp(max=n - 1)
        f = (p - i)[:, None]
        j = (i + 1) % n
        e = electric[i] * (1 - f) + electric[j] * f
        b = (magnetic[i] * (1 - f) + magnetic[j] * f) * 0.05
        low = v + 0.05 * e
        turn = 2 * b / (1 + (b * b).sum(-1, keepdim=True))
        v = low + torch.linalg.cross(low + torch.linalg.cross(low, b), turn) + 0.05 * e
        x = x + 0.1 * v[:, 0]
    p = torch.remainder(x, n)
    i = p.floor().long().clamp(max=n - 1)
    f = p - i
    rho = torch.zeros(n, device=x.device, dtype=x.dtype).index_add(0, i, 1 - f).index_add(0, (i + 1) % n, f)
    field = (rho - rho.mean()).cumsum(0)
    return x, v, -(field - field.mean()).cumsum(0)


def flocks(x: Tensor, v: Tensor, gains: Tensor) -> Tensor:
    """Boids: cohesion, alignment and separation of all pairs within a soft radius, two steps, speeds between bounds."""
    for _ in range(2):
        far = x[:, None] - x[:, :, None]
        d = (far.square().sum(-1) + 1e-4).sqrt()
        near = torch.sigmoid((1.5 - d) * 8)
        count = near.sum(2, keepdim=True)
        together = (near[..., None] * far).sum(2) / count
        along = (near @ v) / count - v
        apart = -(torch.exp(-4 * d)[..., None] * far / d[..., None]).sum(2)
        v = v + 0.1 * (gains[0] * together + gains[1] * along + gains[2] * apart)
        speed = (v.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        v = v / speed * speed.clamp(0.2, 2.0)
        x = x + 0.1 * v
    return (x.square().sum(-1) + v.square().sum(-1)).mean()


def warm_lattice(f: Tensor, g: Tensor, wall: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two distributions on a plane: nine velocities of a flow and five of heat, buoyancy, rolls, walls that send back."""
    cx = torch.tensor([0, 1, 0, -1, 0, 1, -1, -1, 1], device=f.device, dtype=f.dtype).view(9, 1, 1)
    cy = torch.tensor([0, 0, 1, 0, -1, 1, 1, -1, -1], device=f.device, dtype=f.dtype).view(9, 1, 1)
    w = torch.tensor([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4, device=f.device, dtype=f.dtype).view(9, 1, 1)
    wg = torch.tensor([1 / 3] + [1 / 6] * 4, device=f.device, dtype=f.dtype).view(5, 1, 1)
    back = [0, 3, 4, 1, 2, 7, 8, 5, 6]
    for _ in range(2):
        rho, heat = f.sum(0), g.sum(0)
        ux, uy = (f * cx).sum(0) / rho, (f * cy).sum(0) / rho
        cu = cx * ux + cy * uy
        even = w * rho * (1 + 3 * cu + 4.5 * cu * cu - 1.5 * (ux * ux + uy * uy))
        lift = 3 * w * cy * 0.01 * heat * rho
        warm = wg * heat * (1 + 3 * cu[:5])
        f = torch.where(wall, f[back], f + (even - f) / 0.8 + lift)
        g = torch.where(wall, g[back[:5]], g + (warm - g) / 0.7)
        steps = [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
        f = torch.stack([f[k].roll((y, x), (0, 1)) for k, (x, y) in enumerate(steps)])
        g = torch.stack([g[k].roll((y, x), (0, 1)) for k, (x, y) in enumerate(steps[:5])])
    return f, g, g.sum(0)


def implicit_sweeps(u: Tensor, source: Tensor) -> Tensor:
    """Peaceman and Rachford: half a step implicit along rows, half along columns, Thomas' loops over 24 points each."""

    def solved(d: Tensor, r: float) -> Tensor:
        n, c, y = d.shape[1], [], []
        for k in range(n):
            m = 1 + 2 * r + (r * c[-1] if k else 0)
            c.append(-r / m)
            y.append((d[:, k] + (r * y[-1] if k else 0)) / m)
        for k in range(n - 2, -1, -1):
            y[k] = y[k] - c[k] * y[k + 1]
        return torch.stack(y, 1)

    for _ in range(2):
        p = F.pad(u, (1, 1))
        u = solved(u + 0.3 * (p[..., 2:] - 2 * u + p[..., :-2]) + 0.1 * source, 0.3)
        p = F.pad(u, (0, 0, 1, 1))
        u = solved((u + 0.3 * (p[:, 2:] - 2 * u + p[:, :-2]) + 0.1 * source).mT, 0.3).mT
    return u


# ---- rivers, epidemics, cells, prices -------------------------------------------------------------------------------------


def snow_buckets(rain: Tensor, warm: Tensor, p: Tensor) -> Tensor:
    """HBV: snow, melt, soil, a fast and a slow store over forty days of many basins; one minus the efficiency of flows."""
    tt, melt, field, beta, k0, k1, perc = (torch.sigmoid(t) for t in p.unbind(0))
    snow, soil, fast, slow, flows = (torch.zeros_like(tt) for _ in range(5))
    flows = []
    for t in range(rain.shape[0]):
        wet, degree = rain[t].abs(), warm[t]
        falls = torch.where(degree < tt, wet, 0)
        gone = torch.minimum(melt * (degree - tt).clamp(min=0), snow)
        snow = snow + falls - gone
        water = wet - falls + gone
        runs = water * ((soil + 0.1) / (field * 5 + 0.2)).clamp(max=1) ** (1 + 3 * beta)
        soil = soil + water - runs
        soil = soil - 0.05 * soil * (degree * 0.3).clamp(0, 1)
        down = torch.minimum(perc, fast + runs)
        fast = fast + runs - down
        slow = slow + down
        q0, q1 = k0 * (fast - 0.5).clamp(min=0) + 0.2 * fast, 0.3 * k1 * slow
        fast, slow = fast - q0 * 0.7, slow - q1
        flows.append(q0 + q1)
    q = torch.stack(flows)
    aim = rain.abs() * 0.5
    return ((q - aim).square().sum(0) / ((aim - aim.mean(0)).square().sum(0) + 0.1)).mean()


def mixing_ages(state: Tensor, contact: Tensor, rates: Tensor, seen: Tensor) -> Tensor:
    """Epidemics with ages: forces by a contact matrix, five stages, forty steps, a Poisson likelihood of new cases."""
    s, e, i, r, d = (F.softplus(t) for t in state.unbind(1))
    beta, sigma, gamma, mu = (torch.sigmoid(t)[:, None] * 0.5 for t in rates.unbind(1))
    c = F.softplus(contact)
    loss = 0
    for t in range(seen.shape[1]):
        n = s + e + i + r
        force = beta * ((i / n) @ c) / c.shape[0]
        new, ill, well, dead = force * s, sigma * e, gamma * i, 0.1 * mu * i
        s, e, i, r, d = s - 0.2 * new, e + 0.2 * (new - ill), i + 0.2 * (ill - well - dead), r + 0.2 * well, d + 0.2 * dead
        cases = ill.sum(1) + 1e-3
        loss = loss + (cases - seen[:, t].abs() * cases.log()).mean()
    return loss + 1e-3 * d.mean()


def excitable_membranes(v: Tensor, gates: Tensor, drive: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Hodgkin and Huxley: three gates by exponential steps, currents, thirty steps, a synapse of the cell before."""
    m, h, n = torch.sigmoid(gates).unbind(0)
    v = v * 10 - 65
    spikes = torch.zeros_like(v)
    for _ in range(30):
        am = 0.1 * (v + 40) / (1 - torch.exp(-(v + 40) / 10) + 1e-6)
        bm = 4 * torch.exp(-(v + 65) / 18)
        ah, bh = 0.07 * torch.exp(-(v + 65) / 20), 1 / (1 + torch.exp(-(v + 35) / 10))
        an = 0.01 * (v + 55) / (1 - torch.exp(-(v + 55) / 10) + 1e-6)
        bn = 0.125 * torch.exp(-(v + 65) / 80)
        m = m + (am / (am + bm) - m) * -torch.expm1(-0.02 * (am + bm))
        h = h + (ah / (ah + bh) - h) * -torch.expm1(-0.02 * (ah + bh))
        n = n + (an / (an + bn) - n) * -torch.expm1(-0.02 * (an + bn))
        current = 120 * m**3 * h * (v - 50) + 36 * n**4 * (v + 77) + 0.3 * (v + 54.4)
        new = v + 0.02 * (10 * drive.abs() + w * torch.tanh(v / 50).roll(1, 1) - current)
        spikes = spikes + ((new > 0) & (v <= 0)).to(v.dtype)
        v = new
    return v, spikes


def early_exercises(noise: Tensor, strike: Tensor) -> tuple[Tensor, Tensor]:
    """Longstaff and Schwartz: paths, a regression on three powers by Cramer's rule at each of 12 dates backward, a price."""
    path = (0.06 * noise - 0.0005).cumsum(0).exp()
    strike = 1 + 0.05 * torch.tanh(strike)
    cash = (strike - path[-1]).clamp(min=0)
    for t in range(path.shape[0] - 2, -1, -1):
        cash = cash * 0.998
        s = path[t]
        pay = strike - s
        w = (pay > 0).to(s.dtype)
        z = (s - 1) * 5
        m = [(w * z**k).sum(-1) + (1e-2 if k % 2 == 0 else 0) for k in range(5)]
        r = [(w * z**k * cash).sum(-1) for k in range(3)]
        a, b, c = m[2] * m[4] - m[3] * m[3], m[2] * m[3] - m[1] * m[4], m[1] * m[3] - m[2] * m[2]
        det = m[0] * a + m[1] * b + m[2] * c + 1e-6
        x0 = (a * r[0] + b * r[1] + c * r[2]) / det
        x1 = (b * r[0] + (m[0] * m[4] - m[2] * m[2]) * r[1] + (m[1] * m[2] - m[0] * m[3]) * r[2]) / det
        x2 = (c * r[0] + (m[1] * m[2] - m[0] * m[3]) * r[1] + (m[0] * m[2] - m[1] * m[1]) * r[2]) / det
        stay = x0[..., None] + z * (x1[..., None] + z * x2[..., None])
        cash = torch.where((pay > stay) & (pay > 0), pay, cash)
    return cash.mean(-1), cash.std(-1)


# ---- codes and sound ------------------------------------------------------------------------------------------------------


def soft_trellis(soft: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """Viterbi of a convolutional code of 64 states: butterflies by reshapes, decisions as bits, traced back to bits."""
    b, t, _ = soft.shape
    metric = torch.full((b, 64), -1e4, device=soft.device, dtype=soft.dtype)
    metric = torch.where(torch.arange(64, device=soft.device) == 0, 0, metric)
    chosen = []
    branch = signs.sign()
    for k in range(t):
        gain = soft[:, k] @ branch.t()
        ways = metric.view(b, 32, 2).repeat(1, 2, 1) + gain.view(b, 64, 2)
        metric, pick = ways.max(-1)
        chosen.append(pick)
    state, bits = metric.argmax(-1), []
    for k in range(t - 1, -1, -1):
        bits.append(state >> 5)
        state = (state & 31) * 2 + chosen[k].gather(1, state[:, None])[:, 0]
    return torch.stack(bits[::-1], 1).to(torch.uint8), metric.amax(-1)


def syndromes(words: Tensor, log: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Reed and Solomon: sixteen syndromes of words of 64 bytes in a field of 256, logarithms and powers by tables."""
    n = words.shape[1]
    a = log.long()[words.long()]
    out = []
    for j in range(16):
        at = (a + j * torch.arange(n - 1, -1, -1, device=words.device)) % 255
        term = torch.where(words == 0, 0, power[at])
        while term.shape[1] > 1:
            half = term.shape[1] // 2
            term = term[:, :half] ^ term[:, half:]
        out.append(term[:, 0])
    s = torch.stack(out, 1)
    return s, (s != 0).any(1)


def coded_distances(q: Tensor, books: Tensor, codes: Tensor, coarse: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of parts: tables of distances of 16 parts, looked up by bytes and summed for all items, the best 100."""
    parts = q.unflatten(-1, (books.shape[0], -1))
    table = (parts[:, :, None] - books).square().sum(-1)
    at = codes.long() + torch.arange(books.shape[0], device=q.device) * books.shape[1]
    far = table.flatten(1)[:, at].sum(-1)
    far = far + coarse[:, bias]
    return far.topk(min(100, far.shape[1] // 2), dim=1, largest=False)


def echo_networks(x: Tensor, state: Tensor, gain: Tensor, taps: Tensor) -> tuple[Tensor, Tensor]:
    """A reverberator of eight delay lines in blocks of 256: own delays, low passes of two taps, a Hadamard mix."""
    _b, n = x.shape
    size = min(256, n // 4)
    delays = [size * 2 + 7 * k * k + 3 * k for k in range(8)]
    g = 0.7 * torch.sigmoid(gain)[:, None]
    line, out = state, []
    h = torch.ones(1, 1, device=x.device, dtype=x.dtype)
    for _ in range(3):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    h = h * 8**-0.5
    for at in range(0, n, size):
        read = torch.stack([line[:, k, line.shape[2] - d : line.shape[2] - d + size] for k, d in enumerate(delays)], 1)
        before = torch.stack(
            [line[:, k, line.shape[2] - d - 1 : line.shape[2] - d - 1 + size] for k, d in enumerate(delays)], 1
        )
        y = g * (0.6 * read + 0.4 * before)
        mixed = torch.einsum("kj,bjt->bkt", h, y) + x[:, None, at : at + size] * taps[:, None]
        out.append((y * taps[:, None]).sum(1))
        line = torch.cat([line[:, :, size:], mixed], 2)
    return torch.cat(out, 1), line


def adaptive_taps(x: Tensor, heard: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """An echo canceller: normalised steps of 64 taps along 48 samples of many channels, a leak, no steps in double talk."""
    n = w.shape[1]
    errors = []
    for t in range(heard.shape[1]):
        u = x[:, t : t + n]
        e = heard[:, t] - (w * u).sum(1)
        mu = torch.where(heard[:, t].abs() > 0.9 * u.abs().amax(1), 0, 0.5)
        w = 0.9999 * w + (mu * e / (u.square().sum(1) + 1e-3))[:, None] * u
        errors.append(e)
    return torch.stack(errors, 1), w


def _words(m: Make, n: int) -> list[Tensor]:
    power, log = [1], [0] * 256
    for k in range(1, 255):
        v = power[-1] << 1
        power.append(v ^ 0x11D if v > 255 else v)
        log[power[-1]] = k
    on = m(1).device
    return [
        ids(m, 256, n, 64).to(torch.uint8),
        torch.tensor(log, dtype=torch.uint8, device=on),
        torch.tensor([*power, 0], dtype=torch.uint8, device=on),
    ]


def _ways(m: Make, w: int, n: int, e: int) -> list[Tensor]:
    counts = ids(m, 2 * e // n, n)
    return [ids(m, n, w), counts, ids(m, n, e), m(16, w)]


def _flow(m: Make, h: int, w: int) -> list[Tensor]:
    base = torch.tensor([3.0, 0, 0, 6.0, 0.5, 0.5, 0]).to(m(1))
    return [base[:, None, None] + 0.1 * m(7, h, w)]


BLOCKS: tuple[Block, ...] = (
    Sized(
        restricted_edges,
        lambda m, n, e, c: [
            m(n, 3, c),
            m(2, e, 3, 3) * 0.5,
            m(2, c, c) * c**-0.5,
            m(2, 3, 3),
            ids(m, n, e),
            ids(m, n, e).flip(0),
        ],
        (6, 9, 4),
        SINGLE,
    ).block("restricted edges", 10001, 60001, 16, training=True),
    Sized(
        gated_graph,
        lambda m, n, e, k, c: [
            m(n, c),
            ids(m, k, e),
            ids(m, n, e),
            ids(m, n, e).flip(0),
            m(k, c, c) * c**-0.5,
            weight(m, 3 * c, c),
            weight(m, 3 * c, c),
        ],
        (6, 15, 2, 4),
    ).block("gated graph", 20001, 100003, 4, 128, training=True),
    Sized(random_ways, _ways, (7, 9, 40), SINGLE).block("random ways", 500009, 200003, 3000017),
    Sized(
        sphere_spectra,
        lambda m, b, c, lat, lon, k: [m(b, c, lat, lon), m(k, k, lat), m(2, k, c, c) * c**-0.5, weight(m, c, c)],
        (2, 3, 6, 8, 4),
        SINGLE,
        tf32=True,
    ).block("sphere spectra", 2, 64, 181, 360, 60, training=True),
    Sized(magnetised_fluxes, _flow, (6, 7), SINGLE).block("magnetised fluxes", 1024, 1000),
    Sized(turned_charges, lambda m, n, g: [m(n) * 9, m(n, 3), m(g, 3), m(g, 3)], (20, 7), SINGLE).block(
        "turned charges", 2000003, 1024
    ),
    Sized(flocks, lambda m, b, n: [m(b, n, 2) * 2, m(b, n, 2), m(3)], (2, 7), SINGLE).block("flocks", 32, 500, training=True),
    Sized(
        warm_lattice,
        lambda m, h, w: [m(9, h, w).abs() + 0.5, m(5, h, w).abs() + 0.5, m(h, w) > 2],
        (5, 6),
        SINGLE,
    ).block("warm lattice", 1000, 1024),
    Sized(implicit_sweeps, lambda m, b, n: [m(b, n, n), m(b, n, n)], (2, 7), SINGLE).block("implicit sweeps", 4001, 24),
    Sized(snow_buckets, lambda m, t, n: [m(t, n), m(t, n), m(7, n)], (6, 5), SINGLE).block(
        "snow buckets", 40, 100003, training=True
    ),
    Sized(mixing_ages, lambda m, n, a, t: [m(n, 5, a), m(a, a), m(n, 4), m(n, t)], (3, 4, 5), SINGLE).block(
        "mixing ages", 2048, 16, 40, training=True
    ),
    Sized(excitable_membranes, lambda m, b, n: [m(b, n), m(3, b, n), m(b, n), m(b, n)], (2, 7), SINGLE).block(
        "excitable membranes", 64, 10007
    ),
    Sized(early_exercises, lambda m, t, k, n: [m(t, k, n), m(k, 1)], (4, 2, 30), SINGLE).block(
        "early exercises", 12, 16, 65536
    ),
    Sized(soft_trellis, lambda m, b, t: [m(b, t, 2), m(128, 2)], (2, 9), SINGLE).block("soft trellis", 2048, 48),
    Sized(syndromes, _words, (5,), SINGLE).block("syndromes", 40009),
    Sized(
        coded_distances,
        lambda m, b, n, k, p, d, c: [
            m(b, p * d),
            m(p, k, d),
            ids(m, k, n, p).to(torch.uint8),
            m(b, c),
            ids(m, c, n),
        ],
        (2, 20, 8, 3, 2, 4),
        SINGLE,
    ).block("coded distances", 16, 200003, 256, 16, 8, 1024),
    Sized(echo_networks, lambda m, b, n, s: [m(b, n), m(b, 8, s), m(8), m(8)], (2, 32, 500), SINGLE).block(
        "echo networks", 64, 2048, 1200
    ),
    Sized(adaptive_taps, lambda m, n, t, k: [m(n, t + k), m(n, t), m(n, k)], (3, 5, 7), SINGLE).block(
        "adaptive taps", 20001, 48, 64
    ),
)
