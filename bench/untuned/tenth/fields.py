"""Programs of other fields: recommendation, graphs, flows, statistics, physics, robots, radio, tables."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, weight

SINGLE, DOUBLE = torch.float32, torch.float64


# ---- recommendation and learning ------------------------------------------------------------------------------------------


def crossed_experts(x: Tensor, v: Tensor, c: Tensor, u: Tensor, gate: Tensor) -> Tensor:
    """DCN V2's mixture: low-rank crosses of four experts, nonlinear inside, mixed by a gate; two layers."""
    first = y = x
    for k in range(2):
        experts = []
        for e in range(4):
            narrow = torch.tanh(F.linear(torch.tanh(F.linear(y, v[k, e])), c[k, e]))
            experts.append(first * F.linear(narrow, u[k, e]))
        y = torch.matmul(torch.stack(experts, 2), F.softmax(F.linear(y, gate), 1).unsqueeze(2)).squeeze(2) + y
    return y


def interest_capsules(items: Tensor, mask: Tensor, w: Tensor, start: Tensor) -> Tensor:
    """MIND: four interests of a user's items by three rounds of routing with squashed sums."""
    low = F.linear(items, w)
    logits = start.expand(items.shape[0], -1, -1)
    hidden = (mask > -1)[:, None]
    for k in range(3):
        p = torch.where(hidden, torch.softmax(logits, 1), 0.0)
        z = torch.matmul(p, low if k == 2 else low.detach())
        norm = z.pow(2).sum(-1, keepdim=True)
        interests = norm / (1 + norm) / (norm + 1e-9).sqrt() * z
        if k < 2:
            logits = logits + torch.matmul(interests, low.detach().transpose(1, 2))
    return interests


def ensembles_of_critics(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, w3: Tensor, target: Tensor) -> Tensor:
    """REDQ: ten critics by baddbmm, the mean squared error to the smaller of two others' values, their spread beside."""
    n = w1.shape[0]
    y = F.relu(torch.baddbmm(b1[:, None], x.expand(n, -1, -1), w1))
    q = torch.bmm(F.relu(torch.bmm(F.layer_norm(y, y.shape[-1:]), w2)), w3).squeeze(-1)
    goal = torch.minimum(q[2], q[7]).detach() * 0.99 + target
    return (q - goal).pow(2).mean() + 0.01 * q.std(0).mean()


def hard_concrete(x: Tensor, w: Tensor, logs: Tensor, uniform: Tensor) -> Tensor:
    """A linear layer whose inputs have stretched binary gates, and how many are open."""
    u = uniform.sigmoid().clamp(1e-6, 1 - 1e-6)
    s = torch.sigmoid((u.log() - (-u).log1p() + logs) / 0.67) * 1.2 - 0.1
    y = F.linear(x * F.hardtanh(s, 0.0, 1.0), w)
    return y.square().mean() + 1e-2 * torch.sigmoid(logs - 0.67 * math.log(0.1 / 1.1)).sum()


def spiking_layer(x: Tensor, w: Tensor, decay: Tensor) -> Tensor:
    """Leaky neurons for eight steps, spikes with a smooth gradient, soft resets; the rate of the output."""
    current = F.linear(x, w)
    u, rate = torch.zeros_like(current[0]), torch.zeros_like(current[0])
    for t in range(current.shape[0]):
        u = u * decay.sigmoid() + current[t]
        smooth = torch.sigmoid(4 * (u - 1))
        spike = (u > 1).to(u.dtype) + smooth - smooth.detach()
        u, rate = u - spike, rate + spike
    return (rate / current.shape[0]).square().mean()


def class_centres(x: Tensor, labels: Tensor, centres: Tensor, w: Tensor) -> Tensor:
    """Cross-entropy, and how far features are from their classes' centres, with an island loss of the centres."""
    loss = F.cross_entropy(F.linear(x, w).float(), labels)
    near = (x.float() - centres.float()[labels]).pow(2).sum(1).clamp(1e-12, 1e12).mean()
    c = F.normalize(centres.float(), dim=1)
    return loss + 0.003 * near + 0.01 * (c @ c.t() + 1).triu(1).mean()


def aligned_kernels(x: Tensor, y: Tensor) -> Tensor:
    """Centred kernel alignment of two layers' features, without the diagonal."""

    def unbiased(k: Tensor) -> Tensor:
        n = k.shape[0]
        k = k * (1 - torch.eye(n, device=k.device, dtype=k.dtype))
        mean = k.sum(0) / (n - 2)
        mean = mean - mean.sum() / (2 * (n - 1))
        return (k - mean[:, None] - mean[None]) * (1 - torch.eye(n, device=k.device, dtype=k.dtype))

    a, b = unbiased(x @ x.t()), unbiased(y @ y.t())
    return 1 - (a * b).sum() / ((a * a).sum().sqrt() * (b * b).sum().sqrt())


def hazards(logits: Tensor, times: Tensor, seen: Tensor) -> Tensor:
    """Survival in discrete time: hazards, survival by their cumulative log, likelihoods, a loss of ranks within the batch."""
    h = logits.sigmoid()
    alive = torch.cumprod(1 - h, 1)
    event = (seen > 0).float()
    before = torch.cat([torch.ones_like(alive[:, :1]), alive], 1).gather(1, times[:, None]).squeeze(1)
    own, here = h.gather(1, times[:, None]).squeeze(1), alive.gather(1, times[:, None]).squeeze(1)
    loss = -(event * (before.clamp_min(1e-7).log() + own.clamp_min(1e-7).log()) + (1 - event) * here.clamp_min(1e-7).log())
    dead = (1 - alive)[:, times]
    earlier = (times[:, None] < times[None]).float() * event[:, None]
    return loss.mean() + 0.1 * (earlier * torch.exp((dead.t() - dead.diagonal()[:, None]) / 0.1)).mean()


def compound_counts(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Insurance: Tweedie's deviance and a zero-inflated negative binomial's likelihood of the same layer."""
    mu, disperse, zero = F.linear(x, w).unbind(-1)
    mu, disperse, y = mu.exp(), F.softplus(disperse) + 0.1, y.to(x.dtype)
    tweedie = -y * mu.pow(-0.5) / -0.5 + mu.pow(0.5) / 0.5
    nb = (disperse / (disperse + mu)).log() * disperse + (mu / (disperse + mu)).log() * y
    nb = nb + torch.lgamma(y + disperse) - torch.lgamma(disperse) - torch.lgamma(y + 1)
    some = F.logsigmoid(-zero) + nb
    none = torch.logaddexp(F.logsigmoid(zero), F.logsigmoid(-zero) + disperse * (disperse / (disperse + mu)).log())
    return tweedie.mean() - torch.where(y < 0.5, none, some).mean()


# ---- flows ----------------------------------------------------------------------------------------------------------------


def planar_flows(z: Tensor, w: Tensor, u: Tensor, b: Tensor) -> Tensor:
    """Eight planar flows and a radial one, their log-determinants, the density of a normal."""
    total = torch.zeros_like(z[:, 0])
    for k in range(8):
        inner = (w[k] * u[k]).sum()
        safe = u[k] + (F.softplus(inner) - 1 - inner) * w[k] / w[k].square().sum()
        t = torch.tanh(z @ w[k] + b[k])
        total = total + (1 + (1 - t.square()) * (w[k] * safe).sum()).abs().clamp_min(1e-6).log()
        z = z + safe * t[:, None]
    return (0.5 * z.square().sum(1) - total).mean()


def glow_step(x: Tensor, bias: Tensor, log: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Glow: an activation norm, an invertible 1x1 convolution with its determinant, an affine coupling; bits per dimension."""
    c, h, v = x.shape[1:]
    y = (x + bias.view(1, -1, 1, 1)) * log.view(1, -1, 1, 1).exp()
    y = F.conv2d(y, w.view(c, c, 1, 1))
    det = h * v * (log.sum() + torch.slogdet(w)[1])
    first, second = y.chunk(2, 1)
    shift, scale = F.conv2d(F.relu(F.conv2d(first, a, padding=1)), b).chunk(2, 1)
    scale = torch.sigmoid(scale + 2.0)
    y = torch.cat([first, (second + shift) * scale], 1)
    det = det + scale.log().sum((1, 2, 3))
    return -(det - 0.5 * (y.square() + math.log(2 * math.pi)).sum((1, 2, 3))).mean() / (math.log(2) * c * h * v)


# ---- graphs and atoms -----------------------------------------------------------------------------------------------------


def queried_edges(x: Tensor, e: Tensor, source: Tensor, target: Tensor, w: Tensor, we: Tensor) -> Tensor:
    """A graph transformer's layer: queries of targets, keys and values of sources with edges, a softmax by scatter_reduce."""
    n, d = x.shape
    q, k, v, skip = F.linear(x, w).chunk(4, -1)
    edge = F.linear(e, we)
    k, v = (k[source] + edge).view(-1, 4, d // 4), (v[source] + edge).view(-1, 4, d // 4)
    scores = (q[target].view(-1, 4, d // 4) * k).sum(-1) / math.sqrt(d // 4)
    at = target[:, None].expand_as(scores)
    most = torch.full((n, 4), -math.inf, device=x.device, dtype=x.dtype).scatter_reduce(0, at, scores.detach(), "amax")
    p = torch.exp(scores - most[target])
    total = torch.zeros(n, 4, device=x.device, dtype=x.dtype).scatter_add(0, at, p)
    p = p / (total[target] + 1e-16)
    out = torch.zeros(n, 4, d // 4, device=x.device, dtype=x.dtype).index_add(0, target, v * p[..., None])
    return F.gelu(out.view(n, d) + skip)


def graph_norm(x: Tensor, batch: Tensor, gain: Tensor, shift: Tensor, share: Tensor) -> Tensor:
    """GraphNorm: means and variances of each graph by index_add, a learned share of the mean; pooled sums at the end."""
    n, d = int(batch.shape[0]) // 32, x.shape[1]
    number = torch.zeros(n, device=x.device, dtype=x.dtype).index_add(0, batch, torch.ones_like(x[:, 0])).clamp_min(1)
    mean = torch.zeros(n, d, device=x.device, dtype=x.dtype).index_add(0, batch, x) / number[:, None]
    out = x - mean.index_select(0, batch) * share
    var = torch.zeros(n, d, device=x.device, dtype=x.dtype).index_add(0, batch, out.pow(2)) / number[:, None]
    y = F.relu(gain * out / (var + 1e-5).sqrt().index_select(0, batch) + shift)
    return torch.zeros(n, d, device=x.device, dtype=x.dtype).index_add(0, batch, y)


def pooled_sets(x: Tensor, batch: Tensor, w: Tensor) -> Tensor:
    """Sums, means, largest and smallest of each set by scatter_reduce, one layer of all four."""
    n = int(batch.shape[0]) // 24
    at = batch[:, None].expand_as(x)
    zero = torch.zeros(n, x.shape[1], device=x.device, dtype=x.dtype)
    parts = [zero.scatter_reduce(0, at, x, kind, include_self=False) for kind in ("sum", "mean", "amax", "amin")]
    return F.silu(F.linear(torch.cat(parts, -1), w))


def cluster_expansions(a: Tensor, two: Tensor, three: Tensor, w2: Tensor, w3: Tensor, kinds: Tensor) -> Tensor:
    """MACE: features contracted with themselves by coupling coefficients, weights by each atom's element."""
    hot = F.one_hot(kinds, w2.shape[0]).to(a.dtype)
    y = torch.einsum("wijkz,ekc,ncz,ne->ncwij", three, w3, a, hot)
    y = y + torch.einsum("wijk,ekc,ne->ncwij", two, w2, hot)
    y = torch.einsum("ncwij,ncj->ncwi", y, a)
    return torch.einsum("ncwi,nci->ncw", y, a)


def frame_errors(rotations: Tensor, origins: Tensor, points: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """AlphaFold's loss: all points in all frames, predicted and true, clamped distances, a mean by the mask."""

    def local(r: Tensor, t: Tensor, p: Tensor) -> Tensor:
        return torch.einsum("bfji,bfpj->bfpi", r, p[:, None] - t[:, :, None])

    a, b = local(rotations, origins, points), local(rotations.detach(), origins.detach() + 0.1, truth)
    d = torch.sqrt((a - b).square().sum(-1) + 1e-4).clamp(max=10.0) / 10.0
    m = (mask > -1).to(d.dtype)
    return ((d * m[:, None]).sum(-1) / (m.sum(-1)[:, None] + 1e-4)).mean()


# ---- statistics -----------------------------------------------------------------------------------------------------------


def smoothed_states(y: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Kalman's filter of a position and a velocity over twelve steps, and the Rauch-Tung-Striebel pass back."""
    f = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=y.device, dtype=y.dtype)
    noise = torch.diag_embed(q.abs() + 0.1)
    x, p = torch.zeros_like(q), torch.eye(2, device=y.device, dtype=y.dtype).expand(q.shape[0], 2, 2)
    states, guesses = [], []
    for t in range(y.shape[1]):
        x, p = x @ f.T, f @ p @ f.T + noise
        guesses.append((x, p))
        gain = p[:, :, 0] / (p[:, 0, 0] + r.abs() + 0.1)[:, None]
        x, p = x + gain * (y[:, t] - x[:, 0])[:, None], p - gain[:, :, None] * p[:, :1]
        states.append((x, p))
    out, last = [x], x
    for t in reversed(range(y.shape[1] - 1)):
        x, p = states[t]
        m, v = guesses[t + 1]
        det = v[:, 0, 0] * v[:, 1, 1] - v[:, 0, 1] * v[:, 1, 0]
        inverse = torch.stack([v[:, 1, 1], -v[:, 0, 1], -v[:, 1, 0], v[:, 0, 0]], -1).view(-1, 2, 2) / det[:, None, None]
        last = x + torch.einsum("nij,njk,nk->ni", p @ f.T, inverse, last - m)
        out.append(last)
    return torch.stack(out[::-1], 1)


def hamiltonian_chains(beta: Tensor, momentum: Tensor, x: Tensor, y: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Hamiltonian Monte Carlo: five leapfrog steps of many chains of a logistic regression, accepted or not."""
    t = (y > 0).to(x.dtype)

    def energy(b: Tensor) -> Tensor:
        z = b @ x.t()
        return (F.softplus(z) - z * t).sum(1) + 0.5 * b.square().sum(1)

    def slope(b: Tensor) -> Tensor:
        return (torch.sigmoid(b @ x.t()) - t) @ x + b

    b, p = beta, momentum - 0.005 * slope(beta)
    for k in range(5):
        b = b + 0.01 * p
        p = p - (0.01 if k < 4 else 0.005) * slope(b)
    change = energy(beta) - energy(b) + 0.5 * (momentum.square().sum(1) - p.square().sum(1))
    kept = uniform.sigmoid().log() < change
    return torch.where(kept[:, None], b, beta), kept.to(x.dtype).mean()


def weighted_medians(x: Tensor, w: Tensor) -> Tensor:
    """Medians of rows by weights, and the weighted spread around them, scaled to a normal's."""

    def median(v: Tensor) -> Tensor:
        ordered, at = v.sort(-1)
        mass = w.abs().gather(-1, at).cumsum(-1)
        where = (mass < 0.5 * mass[:, -1:]).sum(-1, keepdim=True).clamp(max=v.shape[-1] - 1)
        return ordered.gather(-1, where)

    middle = median(x)
    return torch.cat([middle, 1.4826 * median((x - middle).abs())], -1)


def weighted_anomalies(a: Tensor, b: Tensor, mean: Tensor, latitudes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weather: errors, correlations of anomalies and activities, by the cosine of the latitude."""
    w = torch.cos(latitudes.sigmoid() * 3 - 1.5)
    w = (w / w.mean()).view(1, 1, -1, 1)
    p, t = a - mean, b - mean
    p, t = p - (p * w).mean((-2, -1), keepdim=True), t - (t * w).mean((-2, -1), keepdim=True)
    both = (w * p * t).sum((-2, -1)) / torch.sqrt((w * p * p).sum((-2, -1)) * (w * t * t).sum((-2, -1)))
    return torch.sqrt((w * (a - b) ** 2).mean((-2, -1))), both, torch.sqrt((w * p * p).mean((-2, -1)))


# ---- physics, robots and radio --------------------------------------------------------------------------------------------


def stabilised_gradients(b: Tensor, k: Tensor) -> Tensor:
    """BiCGSTAB: six iterations of a convection and diffusion problem on grids, each with its own scalars."""

    def apply(x: Tensor) -> Tensor:
        near = F.pad(x, (1, 1, 1, 1))
        lap = 4 * x - near[:, 2:, 1:-1] - near[:, :-2, 1:-1] - near[:, 1:-1, 2:] - near[:, 1:-1, :-2]
        return lap + x + 0.1 * k * (near[:, 1:-1, 2:] - near[:, 1:-1, :-2])

    def dot(u: Tensor, v: Tensor) -> Tensor:
        return (u * v).sum((1, 2), keepdim=True)

    x, r = torch.zeros_like(b), b
    p, rho = r, dot(b, r)
    for _ in range(6):
        v = apply(p)
        alpha = rho / dot(b, v)
        s = r - alpha * v
        t = apply(s)
        omega = dot(t, s) / dot(t, t).clamp_min(1e-20)
        x, r = x + alpha * p + omega * s, s - omega * t
        new = dot(b, r)
        p = r + (new / rho) * (alpha / omega) * (p - omega * v)
        rho = new
    return x


def lanczos(a: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Ten steps of Lanczos with full orthogonalisation; diagonals of the tridiagonal matrix."""
    v = v / torch.linalg.norm(v)
    basis, alphas, betas = [v], [], []
    w = torch.mv(a, v)
    for _ in range(10):
        alpha = torch.dot(w, basis[-1])
        q = torch.stack(basis)
        w = w - torch.mv(q.t(), torch.mv(q, w))
        beta = torch.linalg.norm(w)
        alphas.append(alpha)
        betas.append(beta)
        basis.append(w / beta)
        w = torch.mv(a, basis[-1])
    return torch.stack(alphas), torch.stack(betas)


def flame_fronts(u: Tensor) -> Tensor:
    """Kuramoto-Sivashinsky by exponential time differencing of second order, four steps, two thirds of the modes."""
    k = torch.fft.rfftfreq(u.shape[-1], 1 / u.shape[-1], device=u.device, dtype=u.dtype) / 16
    linear = k**2 - k**4
    decay, h = torch.exp(0.05 * linear), 0.05
    safe = torch.where(linear.abs() < 1e-6, torch.ones_like(linear), linear)
    first = torch.where(linear.abs() < 1e-6, torch.full_like(linear, h), (decay - 1) / safe)
    kept = (k < k.max() * 2 / 3).to(u.dtype)
    hat = torch.fft.rfft(u) * kept

    def slope(z: Tensor) -> Tensor:
        return -0.5j * k * kept * torch.fft.rfft(torch.fft.irfft(z, n=u.shape[-1]).square())

    for _ in range(4):
        n = slope(hat)
        a = decay * hat + first * n
        hat = a + 0.5 * h * decay * (slope(a) - n)
    return torch.fft.irfft(hat, n=u.shape[-1])


def dual_quaternions(p: Tensor, real: Tensor, moved: Tensor, w: Tensor) -> Tensor:
    """Skinning by dual quaternions: blended by weights of joints, signs by the first joint, normed, applied to points."""
    real = F.normalize(real, dim=-1)
    x, y, z, s = real.unbind(-1)
    tx, ty, tz = moved.unbind(-1)
    dual = 0.5 * torch.stack(
        [s * tx + ty * z - tz * y, s * ty + tz * x - tx * z, s * tz + tx * y - ty * x, -(tx * x + ty * y + tz * z)], -1
    )
    signs = torch.where((real * real[:, :1]).sum(-1, keepdim=True) < 0, -1.0, 1.0)
    share = w.softmax(-1)
    r, d = torch.einsum("nj,bjc->bnc", share, real * signs), torch.einsum("nj,bjc->bnc", share, dual * signs)
    size = r.norm(dim=-1, keepdim=True)
    r, d = r / size, d / size
    v, at = r[..., :3], p.expand(r.shape[0], -1, -1)
    turned = at + 2 * torch.cross(v, torch.cross(v, at, dim=-1) + r[..., 3:] * at, dim=-1)
    return turned + 2 * (r[..., 3:] * d[..., :3] - d[..., 3:] * v + torch.cross(v, d[..., :3], dim=-1))


def false_alarms(real: Tensor, imaginary: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
    """Radar: windowed ranges and Doppler by FFTs, power in decibels, cells above their surroundings' mean."""
    z = torch.fft.fft(torch.complex(real, imaginary) * window, dim=-1)
    z = torch.fft.fftshift(torch.fft.fft(z, dim=-2), dim=-2)
    power = z.abs().square().mean(1, keepdim=True)
    outer = F.avg_pool2d(power, 17, 1, 8, count_include_pad=False, divisor_override=1)
    inner = F.avg_pool2d(power, 5, 1, 2, count_include_pad=False, divisor_override=1)
    noise = (outer - inner) / (17 * 17 - 25)
    peak = F.max_pool2d(power, 3, 1, 1) == power
    return 10 * torch.log10(power + 1e-12), ((power > 8 * noise) & peak).float().sum((1, 2))


def least_sums(channel: Tensor, at: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
    """LDPC: five rounds of normalised min-sum, messages by gathers, signs by counts, the two smallest of each check."""
    b = channel.shape[0]
    message = torch.zeros(b, *at.shape, device=channel.device, dtype=channel.dtype)
    for _ in range(5):
        total = channel + message.flatten(1)[:, back].sum(-1)
        v = total[:, at] - message
        signs = 1 - 2 * ((v < 0).sum(-1, keepdim=True) % 2).to(v.dtype)
        low, place = torch.topk(v.abs(), 2, dim=-1, largest=False)
        here = torch.arange(v.shape[-1], device=v.device) == place[..., :1]
        message = 0.8 * signs * torch.where(v < 0, -1.0, 1.0) * torch.where(here, low[..., 1:], low[..., :1])
    total = channel + message.flatten(1)[:, back].sum(-1)
    return total, ((total[:, at] < 0).sum(-1) % 2).sum(1)


# ---- tables ---------------------------------------------------------------------------------------------------------------


def sessions(times: Tensor, users: Tensor, amounts: Tensor) -> tuple[Tensor, ...]:
    """Events to sessions: a new one after a gap or with another user, sums and last amounts, lengths by scatter_reduce."""
    start = torch.ones_like(users, dtype=torch.bool)
    start[1:] = (times.diff() > 1.5) | (users[1:] != users[:-1])
    at = start.cumsum(0) - 1
    zero = torch.zeros(times.shape[0], device=times.device, dtype=times.dtype)
    first = zero.scatter_reduce(0, at, times, "amin", include_self=False)
    last = zero.scatter_reduce(0, at, times, "amax", include_self=False)
    number = torch.zeros_like(zero, dtype=torch.int64).scatter_add(0, at, torch.ones_like(at))
    return zero.index_add(0, at, amounts), last - first, number, amounts - (zero.index_add(0, at, amounts) / number)[at]


def as_of_join(left: Tensor, right: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each event's last quote before it, if not too old, else -1; differences of the joined columns."""
    at = torch.searchsorted(right, left, right=True) - 1
    safe = at.clamp(min=0)
    age = left - right[safe]
    good = (at >= 0) & (age < 3.0)
    taken = torch.where(good[:, None], values[safe], -1.0)
    return taken, taken.diff(dim=0, prepend=taken[:1])


def hashed_keys(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Murmur's finaliser of keys by 64 bits, four seeds, a count sketch's sums with signs, and medians read again."""
    parts = []
    for seed in (1, 7, 99, 1234):
        h = keys ^ seed
        h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * -49064778989728563
        h = (h ^ ((h >> 33) & 0x7FFFFFFF)) * -4265267296055464877
        parts.append(h ^ ((h >> 33) & 0x7FFFFFFF))
    h = torch.stack(parts)
    bucket, sign = h.abs() % table.shape[1], 1 - 2 * ((h >> 50) & 1).to(values.dtype)
    out = table.scatter_add(1, bucket, sign * values)
    return out, (out.gather(1, bucket) * sign).median(0)[0]


CROSSED = Sized(
    crossed_experts,
    lambda m, b, d, r: [
        m(b, d), m(2, 4, r, d) * d**-0.5, m(2, 4, r, r) * r**-0.5, m(2, 4, d, r) * r**-0.5, weight(m, 4, d),
    ],
    (5, 12, 4),
)  # fmt: skip
PLANAR = Sized(planar_flows, lambda m, n, d: [m(n, d), m(8, d), m(8, d), m(8)], (7, 5), SINGLE)
BLOCKS: tuple[Block, ...] = (
    CROSSED.block("crossed experts", 8192, 432, 64),
    CROSSED.block("crossed experts", 4096, 432, 64, training=True),
    Sized(interest_capsules, lambda m, b, s, d, k: [m(b, s, d), m(b, s), weight(m, d, d), m(1, k, s)], (3, 7, 8, 4)).block(
        "interest capsules", 2048, 50, 64, 4, training=True
    ),
    Sized(
        ensembles_of_critics,
        lambda m, b, d, h: [m(b, d), m(10, d, h) * d**-0.5, m(10, h), m(10, h, h) * h**-0.5, m(10, h, 1) * h**-0.5, m(b)],
        (4, 5, 8),
        SINGLE,
    ).block("ensembles of critics", 512, 111, 256, training=True),
    Sized(hard_concrete, lambda m, b, d, o: [m(b, d), weight(m, o, d), m(d), m(b, d)], (5, 8, 6), SINGLE).block(
        "hard concrete", 4096, 784, 300, training=True
    ),
    Sized(spiking_layer, lambda m, t, b, d, o: [m(t, b, d), weight(m, o, d), m(o)], (8, 3, 6, 5), SINGLE).block(
        "spiking layer", 8, 512, 700, 1001, training=True
    ),
    Sized(class_centres, lambda m, b, d, n: [m(b, d), ids(m, n, b), m(n, d), weight(m, n, d)], (9, 8, 6)).block(
        "class centres", 2048, 512, 3001, training=True
    ),
    Sized(aligned_kernels, lambda m, n, a, b: [m(n, a), m(n, b)], (9, 6, 5), SINGLE).block(
        "aligned kernels", 1023, 768, 512, training=True
    ),
    Sized(hazards, lambda m, b, t: [m(b, t) - 2, ids(m, t, b), m(b)], (6, 8), SINGLE).block(
        "hazards", 2048, 100, training=True
    ),
    Sized(compound_counts, lambda m, n, d: [m(n, d), weight(m, 3, d) * 0.5, ids(m, 4, n)], (20, 6), SINGLE).block(
        "compound counts", 200003, 60, training=True
    ),
    PLANAR.block("planar flows", 200003, 16),
    PLANAR.block("planar flows", 100003, 24, training=True),
    Sized(
        glow_step,
        lambda m, b, c, h, k: [
            m(b, c, h, h),
            m(c),
            m(c) * 0.1,
            m(c, c) * 0.1 + torch.eye(c, device=m(1).device, dtype=m(1).dtype),
            weight(m, k, c // 2, 3, 3),
            weight(m, c, k, 1, 1) * 0.1,
        ],
        (2, 6, 4, 5),
        SINGLE,
    ).block("glow step", 32, 48, 16, 256, training=True),
    Sized(
        queried_edges,
        lambda m, n, e, d, f: [m(n, d), m(e, f), ids(m, n, e), ids(m, n, e).flip(0), weight(m, 4 * d, d), weight(m, d, f)],
        (9, 20, 8, 5),
        SINGLE,
    ).block("queried edges", 20001, 150001, 128, 16, training=True),
    Sized(graph_norm, lambda m, n, d: [m(n, d), ids(m, n // 32, n).sort()[0], m(d), m(d), m(d)], (70, 5), SINGLE).block(
        "graph norm", 120001, 128, training=True
    ),
    Sized(pooled_sets, lambda m, n, d: [m(n, d), ids(m, n // 24, n).sort()[0], weight(m, d, 4 * d)], (50, 6), SINGLE).block(
        "pooled sets", 100003, 96, training=True
    ),
    Sized(
        cluster_expansions,
        lambda m, n, c, a, k, e: [
            m(n, c, a),
            m(3, a, a, k),
            m(3, a, a, k, a),
            m(e, k, c),
            m(e, k, c),
            ids(m, e, n),
        ],
        (4, 3, 4, 2, 3),
        SINGLE,
    ).block("cluster expansions", 700, 64, 9, 4, 5, training=True),
    Sized(
        frame_errors,
        lambda m, b, f, p: [torch.linalg.qr(m(b, f, 3, 3).float())[0], m(b, f, 3), m(b, p, 3), m(b, p, 3), m(b, p)],
        (2, 4, 6),
        SINGLE,
    ).block("frame errors", 2, 384, 1536, training=True),
    Sized(smoothed_states, lambda m, n, t: [m(n, t), m(n, 2), m(n)], (5, 6), SINGLE).block("smoothed states", 50021, 12),
    Sized(hamiltonian_chains, lambda m, n, d, k: [m(n, d), m(n, d), m(k, d), m(k), m(n)], (4, 3, 9), SINGLE).block(
        "hamiltonian chains", 1001, 24, 4003
    ),
    Sized(weighted_medians, lambda m, n, d: [m(n, d), m(n, d)], (4, 9), SINGLE).block("weighted medians", 4001, 1000),
    Sized(
        weighted_anomalies, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w), m(c, h, w), m(h)], (2, 3, 5, 8), SINGLE
    ).block("weighted anomalies", 2, 69, 361, 720),
    Sized(stabilised_gradients, lambda m, b, s: [m(b, s, s), m(b, s, s)], (2, 9), DOUBLE).block(
        "stabilised gradients", 12, 255
    ),
    Sized(lanczos, lambda m, n: [m(n, n).float(), m(n).float()], (40,), DOUBLE).block("lanczos", 3001),
    Sized(flame_fronts, lambda m, b, n: [m(b, n)], (3, 32), SINGLE).block("flame fronts", 512, 2048),
    Sized(dual_quaternions, lambda m, b, n, j: [m(n, 3), m(b, j, 4), m(b, j, 3), m(n, j)], (2, 6, 3), SINGLE).block(
        "dual quaternions", 48, 10475, 55, training=True
    ),
    Sized(false_alarms, lambda m, b, c, d, r: [m(b, c, d, r), m(b, c, d, r), m(d, r)], (2, 3, 18, 20), SINGLE).block(
        "false alarms", 6, 8, 256, 512
    ),
    Sized(
        least_sums, lambda m, b, n, d, k: [m(b, n), ids(m, n, n // 2, d), ids(m, n // 2 * d, n, k)], (3, 10, 6, 3), SINGLE
    ).block("least sums", 500, 2304, 6, 3),
    Sized(sessions, lambda m, n: [m(n).abs().float().cumsum(0), ids(m, 7, n).sort()[0], m(n).float()], (30,), SINGLE).block(
        "sessions", 2000003
    ),
    Sized(
        as_of_join, lambda m, n, k, c: [m(n).float().sort()[0] * 9, m(k).float().sort()[0] * 9, m(k, c)], (9, 7, 3), SINGLE
    ).block("as of join", 1000003, 300007, 8),
    Sized(hashed_keys, lambda m, n, w: [ids(m, 10**9, n), m(n).float(), m(4, w).float() * 0], (30, 64), SINGLE).block(
        "hashed keys", 1000003, 65536
    ),
)
