"""Blocks of learning: reinforcement, optimisers by hand, codes of few bits, sparse forms, classical models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

HALF, SINGLE = torch.float16, torch.float32


def twin_critics(x: Tensor, action: Tensor, reward: Tensor, done: Tensor, noise: Tensor, *w: Tensor) -> Tensor:
    """TD3: two critics of stacked weights, targets of smoothed actions, the least of both, Huber's loss."""
    a = (action + (noise * 0.2).clamp(-0.5, 0.5)).clamp(-1, 1)

    def both(act: Tensor, ws: tuple[Tensor, ...]) -> Tensor:
        h = torch.cat([x, act], -1).expand(2, -1, -1)
        for i, m in enumerate(ws):
            h = torch.baddbmm(torch.zeros_like(m[:, :1, :1]), h, m)
            h = F.relu(h) if i < len(ws) - 1 else h
        return h[..., 0]

    n = len(w) // 2
    with torch.no_grad():
        target = reward + 0.99 * (1 - (done > 1).to(reward.dtype)) * both(a, w[n:]).min(0).values
    return F.smooth_l1_loss(both(action, w[:n]), target.expand(2, -1))


def tree_descent(visits: Tensor, values: Tensor, priors: Tensor, children: Tensor) -> tuple[Tensor, Tensor]:
    """MuZero's search: eight steps down the trees, each to the child of the largest upper bound, values normed."""
    b = len(visits)
    rows = torch.arange(b, device=visits.device)
    node = torch.zeros(b, dtype=torch.long, device=visits.device)
    path = []
    low, high = values.flatten(1).amin(1)[:, None], values.flatten(1).amax(1)[:, None]
    for _ in range(8):
        n, p = visits[rows, node].float(), priors[rows, node].float().softmax(-1)
        q = values[rows, node] / n.clamp(min=1)
        q = torch.where(n > 0, (q - low) / (high - low + 1e-6), 0.0)
        total = n.sum(-1, keepdim=True)
        c = 1.25 + torch.log((total + 19653) / 19652)
        best = (q + c * p * total.sqrt() / (1 + n)).argmax(-1)
        path.append(best)
        node = children[rows, node, best]
    return torch.stack(path, 1), node


def cart_poles(state: Tensor, actions: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sixteen steps of many cart poles, those that fall are reset, rewards and lengths counted."""
    x, dx, a, da = (state * 0.05).unbind(-1)
    length = torch.zeros_like(x)
    total = torch.zeros_like(x)
    for i in range(actions.shape[0]):
        force = torch.where(actions[i], 10.0, -10.0)
        cos, sin = torch.cos(a), torch.sin(a)
        temp = (force + 0.05 * da**2 * sin) / 1.1
        aa = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
        ax = temp - 0.05 * aa * cos / 1.1
        x, dx, a, da = x + 0.02 * dx, dx + 0.02 * ax, a + 0.02 * da, da + 0.02 * aa
        dead = (x.abs() > 2.4) | (a.abs() > 0.2094) | (length >= 12)
        length = torch.where(dead, 0.0, length + 1)
        total += ~dead
        x, dx, a, da = (torch.where(dead, f * 0.05, s) for f, s in zip(fresh.unbind(-1), (x, dx, a, da), strict=True))
    return torch.stack([x, dx, a, da], -1), total, length


def projected_moments(p: Tensor, grad: Tensor, basis: Tensor, m: Tensor, v: Tensor) -> Tensor:
    """GaLore: gradients projected to few rows, Adam there, the step projected back, decay in place."""
    low = torch.matmul(basis.mT, grad)
    m.lerp_(low, 0.1)
    v.mul_(0.999).addcmul_(low, low.conj(), value=0.001)
    step = (m / (1 - 0.9**10)) / ((v / (1 - 0.999**10)).sqrt() + 1e-8)
    p.mul_(1 - 1e-4).add_(torch.matmul(basis, step), alpha=-2.5e-4)
    return p.norm()


def unit_clipping(*tensors: Tensor) -> None:
    """Adaptive clipping: each unit's gradient is bound by its weights' norm, then momentum and a step, all in place."""
    n = len(tensors) // 3
    for p, g, m in zip(tensors[:n], tensors[n : 2 * n], tensors[2 * n :], strict=True):
        dims = tuple(range(1, p.dim())) if p.dim() > 1 else (0,)
        top = p.square().sum(dims, keepdim=p.dim() > 1).sqrt().clamp(min=1e-3) * 0.02
        size = g.square().sum(dims, keepdim=p.dim() > 1).sqrt()
        g = torch.where(size > top, g * (top / size.clamp(min=1e-6)), g)
        m.mul_(0.9).add_(g)
        p.sub_(0.1 * (g + 0.9 * m))


def row_adagrad(table: Tensor, state: Tensor, rows: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Adagrad by rows: gradients of equal rows summed, one moment a row, both updated in place."""
    n, _d = grad.shape
    ordered, order = rows.sort()
    first = torch.cat([torch.ones_like(ordered[:1], dtype=torch.bool), ordered[1:] != ordered[:-1]])
    segment = first.long().cumsum(0) - 1
    total = torch.zeros_like(grad).index_add_(0, segment, grad[order])
    index = torch.full_like(rows, len(table) - 1).scatter(0, segment, ordered)
    valid = (torch.arange(n, device=rows.device) <= segment[-1]).to(grad.dtype)
    state.index_add_(0, index, total.pow(2).mean(1) * valid)
    table.index_add_(0, index, -0.01 * total / (state[index].sqrt() + 1e-6)[:, None])
    return table, state


def coded_momentum(p: Tensor, grad: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Lion whose momentum is int8 with a scale for each 256: decoded, stepped, coded again, in place."""
    m = codes.to(p.dtype).view(-1, 256) * (scales / 127)[:, None]
    g = grad.view(-1, 256)
    update = torch.sign(torch.lerp(m, g, 0.1)).view_as(p)
    p.mul_(1 - 1e-5).add_(update, alpha=-1e-4)
    m = torch.lerp(m, g, 0.01)
    top = m.abs().amax(1)
    scales.copy_(top)
    codes.copy_((m * (127 / top.clamp(min=1e-8))[:, None]).round().to(torch.int8).view_as(codes))


def factored_confidence(p: Tensor, grad: Tensor, row: Tensor, col: Tensor, m: Tensor) -> Tensor:
    """CAME's first half: squares factored in rows and columns, clipped by their root mean square, momentum."""
    sq = grad.square() + 1e-30
    row.lerp_(sq.mean(-1), 0.05)
    col.lerp_(sq.mean(-2), 0.05)
    r = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
    update = grad * r * col.unsqueeze(-2).rsqrt()
    update = update / (update.norm(dim=(-2, -1), keepdim=True) / (update[0].numel() ** 0.5)).clamp(min=1.0)
    m.mul_(0.9).add_(update, alpha=0.1)
    res = (update - m).square() + 1e-16
    p.addcmul_(m, res.mean(-1, keepdim=True).rsqrt().clamp(max=10), value=-1e-3)
    return p.square().mean((-2, -1))


def unscaled_gradients(scale: Tensor, *grads: Tensor) -> Tensor:
    """A gradient scaler: gradients in 16 bits unscaled in place, all checked for infinities, clipped by their norm."""
    inv = 1 / (scale.abs() + 1)
    bad = torch.zeros((), device=scale.device)
    total = torch.zeros((), device=scale.device)
    for g in grads:
        g.mul_(inv.to(g.dtype))
        bad = torch.maximum(bad, (~torch.isfinite(g)).any().to(bad.dtype))
        total = total + torch.where(torch.isfinite(g), g, 0.0).float().square().sum()
    factor = torch.where(bad > 0, 0.0, (1.0 / (total.sqrt() + 1e-6)).clamp(max=1))
    for g in grads:
        g.mul_(factor.to(g.dtype))
    return factor


def half_quadratic(w: Tensor) -> tuple[Tensor, Tensor]:
    """HQQ: groups of 64 coded to four bits, zero points by eight steps of a shrinking prior, packed by rows."""
    x = w.float().view(-1, 64)
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    scale = (15 / (high - low)).clamp(max=2e4)
    zero = -low * scale
    beta = 10.0
    for _ in range(8):
        q = (x * scale + zero).round().clamp(0, 15)
        r = (q - zero) / scale
        e = x - r
        e = e.sign() * F.relu(e.abs() - (e.abs() + 1e-8).pow(-0.3) / beta)
        zero = (q - (x - e) * scale).mean(1, keepdim=True)
        beta *= 1.01
    q = (x * scale + zero).round().clamp(0, 15).to(torch.uint8)
    n = len(q) // 2
    return (q[:n] << 4) | q[n:], zero / scale


def fixed_point(x: Tensor, taps: Tensor) -> Tensor:
    """A filter of int16 sound with int16 taps: sums in int32, rounded shifts, saturation."""
    k = len(taps)
    n = x.shape[-1]
    acc = torch.full_like(x[:, : n - k + 1], 1 << 7, dtype=torch.int32)
    for i in range(k):
        acc += (x[:, i : n - k + 1 + i].int() * taps[i].int()) >> 7
    return (acc >> 8).clamp(-32768, 32767).to(torch.int16)


def twelve_bits(raw: Tensor, gain: Tensor) -> Tensor:
    """Three bytes hold two pixels of a Bayer mosaic: unpacked, black level, gains by colour, halved by 2 by 2 cells."""
    h = raw.shape[1]
    b = raw.view(len(raw), h, -1, 3).to(torch.int32)
    even = b[..., 0] | ((b[..., 1] & 15) << 8)
    odd = (b[..., 1] >> 4) | (b[..., 2] << 4)
    x = torch.stack([even, odd], -1).flatten(2)
    x = (x.to(gain.dtype) - 256).clamp(min=0) / 3839
    r, g1, g2, bl = x[:, ::2, ::2], x[:, ::2, 1::2], x[:, 1::2, ::2], x[:, 1::2, 1::2]
    return torch.stack([r * gain[0], (g1 + g2) / 2 * gain[1], bl * gain[2]], 1).clamp(0, 1).sqrt()


def two_of_four(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Semi-structured sparsity: the two largest of each four kept, values packed, their places as bits of bytes."""
    groups = w.view(len(w), -1, 4)
    at = groups.abs().topk(2, dim=-1).indices.sort(-1).values
    kept = groups.gather(-1, at)
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter(-1, at, True)
    code = at[..., 0] | (at[..., 1] << 2)
    meta = (code[:, ::2] | (code[:, 1::2] << 4)).to(torch.uint8)
    return kept.flatten(1), meta, (groups * mask).view_as(w)


def block_rows(x: Tensor, blocks: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """A matrix of blocks of 32 times rows: blocks' columns gathered, batched matmuls, sums by block row."""
    _n, s, _ = blocks.shape
    many = x.view(-1, s, x.shape[1])
    part = torch.bmm(blocks, many[cols])
    return torch.zeros_like(many).index_add(0, rows, part).flatten(0, 1)


def compressed_rows(values: Tensor, cols: Tensor, lengths: Tensor, x: Tensor) -> Tensor:
    """CSR times a matrix: rows of elements by searching their starts, gathered rows weighted, sums by row."""
    starts = lengths.cumsum(0)
    row = torch.searchsorted(starts, torch.arange(len(values), device=values.device), right=True).clamp(max=len(lengths) - 1)
    return torch.zeros(len(lengths), x.shape[1], device=x.device, dtype=x.dtype).index_add(0, row, values[:, None] * x[cols])


def centre_rounds(x: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Three rounds of k-means: squared distances by a matmul, nearest centres, means of their points, empty ones kept."""
    inertia = x.new_zeros(())
    for _ in range(3):
        d = (x * x).sum(1, keepdim=True) - 2 * x @ centres.T + (centres * centres).sum(1)
        least, which = d.min(1)
        inertia = least.mean()
        count = torch.zeros_like(centres[:, :1]).index_add_(0, which, torch.ones_like(x[:, :1]))
        total = torch.zeros_like(centres).index_add_(0, which, x)
        centres = torch.where(count > 0, total / count.clamp(min=1), centres)
    return centres, inertia


def expectation_step(x: Tensor, means: Tensor, chol: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A mixture of full Gaussians as a loop over components: log-densities, responsibilities, new means and covariances."""
    _n, d = x.shape
    tri = chol.tril(-1) * 0.1 + torch.diag_embed(F.softplus(chol.diagonal(dim1=1, dim2=2)) + 0.1)
    found = []
    for mu, prec in zip(means, tri, strict=True):
        y = x @ prec - mu @ prec
        found.append(-0.5 * (d * 1.8378771 + y.square().sum(1)) + prec.diagonal().log().sum())
    lp = torch.stack(found, 1) + logits.log_softmax(0)
    norm = lp.logsumexp(1, keepdim=True)
    r = (lp - norm).exp()
    count = r.sum(0) + 1e-6
    mu = (r.T @ x) / count[:, None]
    cov = torch.empty(len(means), d, d, device=x.device, dtype=x.dtype)
    for k in range(len(means)):
        diff = x - mu[k]
        cov[k] = (r[:, k] * diff.T) @ diff / count[k]
        cov[k].flatten()[:: d + 1] += 1e-3
    return mu, cov, norm.mean()


def power_components(x: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Four principal components by power iterations, the earlier ones removed, without forming the covariance."""
    x = x - x.mean(0)
    found: list[Tensor] = []
    for i in range(4):
        u = F.normalize(v[i], dim=0)
        for _ in range(5):
            u = x.T @ (x @ u) / len(x)
            for w in found:
                u = u - (u @ w) * w
            u = u / u.norm().clamp(min=1e-6)
        found.append(u)
    basis = torch.stack(found)
    return basis, (x @ basis.T).var(0)


def two_loops(grad: Tensor, s: Tensor, y: Tensor) -> Tensor:
    """L-BFGS' direction: ten pairs of steps and differences, backwards and forwards."""
    k = len(s)
    q = grad
    rho = 1 / (s * y).sum(1).abs().clamp(min=1.0)
    alphas: list[Tensor] = [grad] * k
    for i in range(k - 1, -1, -1):
        alphas[i] = rho[i] * s[i].dot(q)
        q = q.sub(y[i] * alphas[i])
    r = q * ((s[-1] * y[-1]).sum() / y[-1].square().sum().clamp(min=1e-6))
    for i in range(k):
        beta = rho[i] * y[i].dot(r)
        r = r + s[i] * (alphas[i] - beta)
    return -r


def contrastive_divergence(v: Tensor, w: Tensor, a: Tensor, b: Tensor, noise: Tensor, more: Tensor) -> None:
    """A restricted Boltzmann machine's update: hidden units drawn, visible ones drawn, weights and biases in place."""
    v = (v > 0).to(w.dtype)
    ph = torch.sigmoid(v @ w + b)
    h = (ph > noise.sigmoid()).to(w.dtype)
    pv = torch.sigmoid(h @ w.T + a)
    u = (pv > more.sigmoid()).to(w.dtype)
    pu = torch.sigmoid(u @ w + b)
    w += 0.01 * (v.T @ ph - u.T @ pu) / len(v)
    a += 0.01 * (v - u).mean(0)
    b += 0.01 * (ph - pu).mean(0)


def soft_thresholds(y: Tensor, a: Tensor, x: Tensor) -> Tensor:
    """FISTA: ten steps of gradient, soft thresholds and momentum, for many signals."""
    step, t, z = 0.1, 1.0, x
    for _ in range(10):
        g = torch.addmm(z, torch.addmm(y, z, a, alpha=-1), a.T, alpha=step)
        new = F.softshrink(g, 0.05)
        s = (1 + (1 + 4 * t * t) ** 0.5) / 2
        z = new + (t - 1) / s * (new - x)
        x, t = new, s
    return x


def student_embedding(y: Tensor, p: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
    """t-SNE's gradient with momentum: Student's kernel of all pairs, attraction and repulsion, centred."""
    n = len(y)
    p = p.sigmoid()
    p = (p + p.T) / (2 * p.sum())
    d = (y[:, None] - y[None]).pow(2).sum(-1)
    num = 1 / (1 + d)
    num = num * (1 - torch.eye(n, device=y.device, dtype=y.dtype))
    q = (num / num.sum()).clamp(min=1e-12)
    pq = (p - q) * num
    grad = 4 * (pq.sum(1, keepdim=True) * y - pq @ y)
    velocity.mul_(0.8).sub_(200 * grad)
    y = y + velocity
    return y - y.mean(0), (p * (p.clamp(min=1e-12) / q).log()).sum()


def tree_traversal(x: Tensor, feature: Tensor, threshold: Tensor, left: Tensor, leaf: Tensor) -> Tensor:
    """A forest's prediction: eight steps down every tree, missing values to the left, leaves averaged."""
    n, trees = len(x), len(feature)
    node = torch.zeros(n, trees, dtype=torch.long, device=x.device)
    at = torch.arange(trees, device=x.device)[None]
    for _ in range(8):
        value = x.gather(1, feature[at, node])
        right = (value >= threshold[at, node]).long()
        node = left[at, node] + right
    return leaf[at, node].mean(1)


def boosted_splits(bins: Tensor, grad: Tensor, hess: Tensor) -> tuple[Tensor, Tensor]:
    """A tree's best split: histograms of gradients for each feature's 64 bins, gains from running sums."""
    n, f = bins.shape
    flat = (bins.long() + torch.arange(f, device=bins.device) * 64).reshape(-1)
    h = hess.abs() + 0.1
    both = torch.stack([grad, h], -1)[:, None].expand(n, f, 2).reshape(-1, 2)
    hist = torch.zeros(f * 64, 2, device=grad.device, dtype=grad.dtype).index_add_(0, flat, both).view(f, 64, 2)
    left = hist.cumsum(1)
    total = left[:, -1:]
    right = total - left

    def score(t: Tensor) -> Tensor:
        return t[..., 0] ** 2 / (t[..., 1] + 1.0)

    gain = score(left) + score(right) - score(total)
    ok = (left[..., 1] > 1) & (right[..., 1] > 1)
    best, at = gain.masked_fill(~ok, -1.0).flatten().max(0)
    return best, at


def _critics(m: Make, n: int, s: int, a: int, h: int) -> list[Tensor]:
    made = [m(n, s), m(n, a).clamp(-1, 1), m(n), m(n), m(n, a)]
    shapes = [(2, s + a, h), (2, h, h), (2, h, 1)] * 2
    return [*made, *(m(*shape) * shape[1] ** -0.5 for shape in shapes)]


def _layers(m: Make, n: int, size: int) -> list[Tensor]:
    shapes = [((size, size // 2), (size,), (size // 4, 9, size))[i % 3] for i in range(n)]
    return [m(*s) for _ in range(3) for s in shapes]


BLOCKS: tuple[Block, ...] = (
    Sized(twin_critics, _critics, (5, 4, 2, 6), tf32=True).block("twin critics", 4096, 67, 21, 256, training=True),
    Sized(
        tree_descent,
        lambda m, b, n, a: [ids(m, 9, b, n, a), m(b, n, a), m(b, n, a), ids(m, n, b, n, a)],
        (3, 9, 4),
        SINGLE,
    ).block("tree descent", 512, 51, 82),
    Sized(cart_poles, lambda m, t, n: [m(n, 4), m(t, n) > 0, m(n, 4)], (4, 9), SINGLE).block("cart poles", 16, 262147),
    Sized(
        projected_moments,
        lambda m, b, n, d, r: [m(b, n, d), m(b, n, d), weight(m, b, n, r), m(b, r, d), m(b, r, d).abs()],
        (2, 6, 7, 3),
        SINGLE,
        tf32=True,
    ).block("projected moments", 4, 2048, 5461, 128),
    Sized(unit_clipping, _layers, (3, 8), SINGLE).block("unit clipping", 18, 768),
    Sized(row_adagrad, lambda m, n, d, k: [m(k, d), m(k).abs(), ids(m, k, n), m(n, d)], (12, 4, 6), SINGLE).block(
        "row adagrad", 40000, 64, 200003
    ),
    Sized(
        coded_momentum,
        lambda m, n, d: [m(n, d), m(n, d), ids(m, 255, n, d).sub(127).to(torch.int8), m(n * d // 256).abs()],
        (4, 128),
        SINGLE,
    ).block("coded momentum", 4096, 11008),
    Sized(
        factored_confidence,
        lambda m, b, n, d: [m(b, n, d), m(b, n, d), m(b, n).abs(), m(b, d).abs(), m(b, n, d)],
        (2, 5, 7),
        SINGLE,
    ).block("factored confidence", 6, 1023, 2731),
    Sized(unscaled_gradients, lambda m, k, n: [m(1).float()[0], *(m(n + i, n - i) for i in range(k))], (3, 7), HALF).block(
        "unscaled gradients", 20, 1201
    ),
    Sized(half_quadratic, lambda m, n, d: [m(n, d)], (4, 128)).block("half quadratic", 4096, 4096),
    Sized(
        fixed_point,
        lambda m, b, n, k: [ids(m, 60000, b, n).sub(30000).to(torch.int16), ids(m, 20000, k).sub(10000).to(torch.int16)],
        (2, 20, 5),
        SINGLE,
    ).block("fixed point", 32, 160001, 31),
    Sized(twelve_bits, lambda m, b, h, w: [ids(m, 256, b, h, w * 3 // 2).to(torch.uint8), m(3).abs()], (2, 6, 8), SINGLE).block(
        "twelve bits", 2, 2160, 3840
    ),
    Sized(two_of_four, lambda m, n, d: [m(n, d)], (5, 24)).block("two of four", 4096, 4104),
    Sized(
        block_rows,
        lambda m, n, k, s, d: [m(k * s, d), m(n, s, s) * s**-0.5, ids(m, k, n), ids(m, k, n)],
        (9, 4, 3, 5),
    ).block("block rows", 1501, 128, 32, 512, training=True),
    Sized(
        compressed_rows,
        lambda m, n, k, d: [m(n * k), ids(m, n, n * k), ids(m, 2 * k, n), m(n, d)],
        (9, 4, 5),
        SINGLE,
    ).block("compressed rows", 20001, 12, 65, training=True),
    Sized(centre_rounds, lambda m, n, k, d: [m(n, d), m(k, d)], (30, 4, 3), SINGLE, tf32=True).block(
        "centre rounds", 100003, 256, 50
    ),
    Sized(expectation_step, lambda m, n, k, d: [m(n, d), m(k, d), m(k, d, d), m(k)], (30, 3, 4), SINGLE, tf32=True).block(
        "expectation step", 50021, 12, 20
    ),
    Sized(power_components, lambda m, n, d: [m(n, d), m(4, d)], (30, 6), SINGLE).block("power components", 20011, 250),
    Sized(two_loops, lambda m, n, k: [m(n), m(k, n), m(k, n)], (30, 4), SINGLE).block("two loops", 1000003, 10),
    Sized(
        contrastive_divergence,
        lambda m, n, d, h: [m(n, d), m(d, h) * 0.1, m(d), m(h), m(n, h), m(n, d)],
        (9, 6, 5),
        SINGLE,
        tf32=True,
    ).block("contrastive divergence", 2048, 784, 500),
    Sized(soft_thresholds, lambda m, n, d, k: [m(n, d), weight(m, k, d), m(n, k)], (7, 5, 9), SINGLE, tf32=True).block(
        "soft thresholds", 1001, 256, 510
    ),
    Sized(student_embedding, lambda m, n: [m(n, 2), m(n, n), m(n, 2)], (9,), SINGLE).block("student embedding", 4001),
    Sized(
        tree_traversal,
        lambda m, n, f, t, k: [m(n, f), ids(m, f, t, k), m(t, k), ids(m, k - 1, t, k), m(t, k)],
        (9, 5, 4, 15),
        SINGLE,
    ).block("tree traversal", 10001, 54, 100, 255),
    Sized(boosted_splits, lambda m, n, f: [ids(m, 64, n, f).to(torch.uint8), m(n), m(n)], (50, 4), SINGLE).block(
        "boosted splits", 50021, 54
    ),
)
