"""Optimisers of many parameters, flows and codes, few bits, recommendation, graphs, metrics."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, HALF = torch.float32, torch.float16


# ---- optimisers -----------------------------------------------------------------------------------------------------------


def late_moments(*tensors: Tensor) -> None:
    """ADOPT: gradients divided by the second moment from before them, clipped, many parameters in place."""
    n = len(tensors) // 4
    params, grads, first, second = (list(tensors[k * n : (k + 1) * n]) for k in range(4))
    denominators = torch._foreach_sqrt(second)
    torch._foreach_maximum_(denominators, 1e-6)
    normed = torch._foreach_div(grads, denominators)
    torch._foreach_maximum_(normed, -3.0)
    torch._foreach_minimum_(normed, 3.0)
    torch._foreach_lerp_(first, normed, 0.1)
    torch._foreach_mul_(params, 1 - 1e-5)
    torch._foreach_add_(params, first, alpha=-1e-3)
    torch._foreach_mul_(second, 0.9999)
    torch._foreach_addcmul_(second, grads, grads, value=1e-4)


def mini_moments(*tensors: Tensor) -> list[Tensor]:
    """Adam-mini: one second moment for each head, row or tensor; the new parameters."""
    n = len(tensors) // 4
    out = []
    for k in range(n):
        p, g, m, v = tensors[k], tensors[k + n], tensors[k + 2 * n], tensors[k + 3 * n]
        mean = g.view(v.shape[0], -1).square().mean(1)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v.abs() + 0.05 * mean
        step = m.view(v.shape[0], -1) / ((v / (1 - 0.95**7)).sqrt() + 1e-8)[:, None]
        out.append(p * (1 - 1e-4) - 1e-3 / (1 - 0.9**7) * step.view_as(p))
    return out


def less_variance(*tensors: Tensor) -> list[Tensor]:
    """MARS: gradients corrected by their change, clipped by the norm of each tensor, then Adam's step."""
    n = len(tensors) // 5
    out = []
    for k in range(n):
        p, g, before, m, v = (tensors[k + j * n] for j in range(5))
        c = g + 0.025 * (0.95 / 0.05) * (g - before)
        c = c / torch.linalg.vector_norm(c).clamp(min=1.0)
        m = torch.lerp(m, c, 0.05)
        v = v.abs() * 0.99 + 0.01 * c * c
        out += [p - 3e-3 * (m / (1 - 0.95**3) / ((v / (1 - 0.99**3)).sqrt() + 1e-8) + 0.01 * p), m]
    return out


def normed_neurons(g: Tensor, momentum: Tensor, second: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NorMuon: momentum made orthogonal in bfloat16, a second moment of each row, the norm as it was, decay."""
    m = momentum.lerp(g, 0.05)
    x = torch.lerp(g, m, 0.95).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x.to(g.dtype)
    size = x.norm()
    v = second.abs().lerp(x.square().mean(-1, keepdim=True), 0.05)
    x = x * v.clamp_min(1e-10).rsqrt()
    x = x * (size / x.norm().add(1e-10))
    return w * (1 - 0.01 * 0.02) - 0.02 * max(1, g.shape[0] / g.shape[1]) ** 0.5 * x, m, v


def clipped_scores(x: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, Tensor]:
    """MuonClip: the largest score of each head over the batch, both weights scaled down where it is above a bound."""
    b, s, d = x.shape
    h = wq.shape[0] // 64
    q, k = (F.linear(x, w).view(b, s, h, 64).transpose(1, 2) for w in (wq, wk))
    most = (torch.matmul(q, k.mT) * 0.125).amax((0, 2, 3))
    root = (3.0 / most.float()).clamp(max=1.0).sqrt().to(x.dtype)
    return tuple((w.view(h, 64, d) * root[:, None, None]).view_as(w) for w in (wq, wk))


def scaled_by_projections(*tensors: Tensor) -> list[Tensor]:
    """APOLLO: Adam in random projections of each gradient, the gradient scaled by columns as Adam scaled them."""
    n = len(tensors) // 4
    out = []
    for k in range(n):
        g, p, m, v = (tensors[k + j * n] for j in range(4))
        low = p @ g
        m = 0.9 * m + 0.1 * low
        v = 0.999 * v.abs() + 0.001 * low.square()
        normed = m / (v.sqrt() + 1e-8)
        scale = normed.norm(dim=0) / (low.norm(dim=0) + 1e-8)
        step = g * scale
        out += [step * torch.clamp(1.01 / (step.norm() + 1e-8), max=1.0), m, v]
    return out


# ---- flows and codes ------------------------------------------------------------------------------------------------------


def straight_flows(x: Tensor, noise: Tensor, t: Tensor, freqs: Tensor, wt: Tensor, wi: Tensor, wo: Tensor) -> Tensor:
    """Rectified flow of latents: times of a logit normal, an MLP with times added, the velocity's loss, weights by time."""
    t = torch.sigmoid(t.float() * 1.2)
    at = t[:, None, None].to(x.dtype)
    z = (1 - at) * x + at * noise
    angles = t[:, None] * freqs.float().abs() * 100
    e = F.silu(F.linear(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype), wt))
    shift, scale, gate = e[:, None].chunk(3, -1)
    y = F.linear(F.layer_norm(z, z.shape[-1:]) * (1 + scale) + shift, wi)
    v = z + gate * F.linear(F.gelu(y, approximate="tanh"), wo)
    near = F.normalize(y.float(), dim=-1)
    near_noise = (near * F.normalize(noise.float().repeat(1, 1, y.shape[-1] // x.shape[-1]), dim=-1)).sum(-1).mean()
    return ((v - (noise - x)).float().square().mean((1, 2)) / (t * (1 - t) + 0.1)).mean() - 0.05 * near_noise


def mean_flows(x: Tensor, noise: Tensor, times: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """MeanFlow: an MLP's derivative along its flow by forward mode, a stopped target, an adaptive weight."""
    t, r = times.sigmoid().sort(-1, descending=True)[0].split(1, -1)

    def velocity(z: Tensor, t: Tensor, r: Tensor) -> Tensor:
        y = torch.cat([z, t, r], -1)
        return F.linear(F.silu(F.linear(F.silu(F.linear(y, w1)), w2)), w3)

    z, v = (1 - t) * x + t * noise, noise - x
    u, change = torch.func.jvp(velocity, (z, t, r), (v, torch.ones_like(t), torch.zeros_like(r)))
    target = (v - (t - r) * change).detach()
    far = (u - target).square().sum(-1)
    return (far / (far.detach() + 1e-2)).mean()


def consistent_pairs(x: Tensor, noise: Tensor, sigma: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Consistency training: two noise levels, inputs and outputs scaled by them, a pseudo-Huber distance."""

    def denoised(s: Tensor) -> Tensor:
        s = s[:, None, None, None]
        z = x + s * noise
        y = F.conv2d(z / (s.square() + 0.25).sqrt() + 0.25 * s.log(), w1, padding=1)
        y = F.conv2d(F.silu(F.group_norm(y, 8)), w2, padding=1)
        return 0.25 / ((s - 0.002).square() + 0.25) * z + 0.5 * (s - 0.002) / (s.square() + 0.25).sqrt() * y

    low = sigma.sigmoid() * 2 + 0.01
    high = low * 1.3
    a, b = denoised(high), denoised(low).detach()
    c = 0.00054 * math.sqrt(x[0].numel())
    far = ((a - b).square().sum((1, 2, 3)) + c * c).sqrt() - c
    return (far / (high - low)).mean()


def mixed_feedforward(x: Tensor, w: Tensor, qkv: Tensor, up: Tensor, dw: Tensor, down: Tensor) -> Tensor:
    """SANA: rectified linear scores with a padded one, then a feedforward with a depthwise convolution and a gate."""
    b, c, h, v = x.shape
    tokens = F.rms_norm(x.flatten(2).transpose(1, 2), (c,), w)
    q, k, u = F.linear(tokens, qkv).view(b, h * v, 3, -1, 32).permute(2, 0, 3, 4, 1)
    q, k = F.relu(q), F.relu(k)
    u = F.pad(u.float(), (0, 0, 0, 1), value=1.0)
    y = torch.matmul(torch.matmul(u, k.float().transpose(-1, -2)), q.float())
    y = (y[:, :, :-1] / (y[:, :, -1:] + 1e-8)).to(x.dtype).reshape(b, c, h, v)
    x = x + y
    a, gate = F.conv2d(F.silu(F.conv2d(x, up)), dw, padding=1, groups=dw.shape[0]).chunk(2, 1)
    return x + F.conv2d(a * F.silu(gate), down)


def averaged_shortcuts(x: Tensor, w: Tensor, back: Tensor) -> Tensor:
    """DC-AE: down by a convolution and pixels to channels, a shortcut of averaged channels; up with repeated ones."""
    b, c, h, v = x.shape
    y = F.pixel_unshuffle(F.conv2d(x, w, padding=1), 2)
    y = y + F.pixel_unshuffle(x, 2).view(b, y.shape[1], -1, h // 2, v // 2).mean(2)
    z = F.pixel_shuffle(F.conv2d(F.silu(y), back, padding=1), 2)
    return z + F.pixel_shuffle(y.repeat_interleave(4 * c // y.shape[1], 1), 2)


def scales_of_codes(x: Tensor, codes: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """VAR: the rest at five growing sizes, nearest normed codes, resized by bicubic, a convolution of half of it."""
    size = x.shape[-1]
    rest, total, found = x, torch.zeros_like(x), []
    book = F.normalize(codes, dim=-1)
    for k, p in enumerate((1, 2, 4, 8, size)):
        z = F.interpolate(rest, size=(p, p), mode="area") if p != size else rest
        z = F.normalize(z.permute(0, 2, 3, 1).reshape(-1, x.shape[1]), dim=-1)
        at = torch.argmax(z @ book.t(), dim=1).view(-1, p, p)
        found.append(at.flatten(1))
        y = F.embedding(at, codes).permute(0, 3, 1, 2)
        y = F.interpolate(y, size=(size, size), mode="bicubic") if p != size else y
        y = 0.5 * y + 0.5 * F.conv2d(y, w[min(k, 3)], padding=1)
        total, rest = total + y, rest - y
    return total, torch.cat(found, 1)


# ---- few bits -------------------------------------------------------------------------------------------------------------


def passed_on_errors(w: Tensor, inverse: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """GPTQ: 32 columns one after another, each rounded to four bits, its error passed on to those after it."""
    w, out, lost = w.clone(), torch.zeros_like(w), torch.zeros_like(w[:, 0])
    for k in range(w.shape[1]):
        column, d = w[:, k], inverse[k, k].abs() + 1
        q = torch.clamp(torch.round(column / scale) + 8, 0, 15)
        q = scale * (q - 8)
        out[:, k] = q
        lost = lost + (column - q) ** 2 / d**2
        w[:, k:] -= ((column - q) / d).unsqueeze(1).matmul(inverse[k, k:].unsqueeze(0))
    return out, lost


def blocks_by_exponents(x: Tensor, blocks: Tensor, exponents: Tensor, table: Tensor, bias: Tensor) -> Tensor:
    """MXFP4 weights as transformers reads them: nibbles from a table to even and odd columns, ldexp, a matmul by expert."""
    e, n, g, _ = blocks.shape
    flat = blocks.reshape(-1, 16)
    power = (exponents.to(torch.int32) - 127).reshape(-1, 1)
    w = torch.empty(flat.shape[0], 32, dtype=x.dtype, device=x.device)
    w[:, 0::2] = table[(flat & 15).to(torch.long)]
    w[:, 1::2] = table[(flat >> 4).to(torch.long)]
    w = torch.ldexp(w, power).view(e, n, g * 32)
    y = torch.bmm(x, w.transpose(1, 2).to(x.dtype)) + bias[:, None]
    gate, up = y[..., ::2].clamp(max=7.0), y[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def largest_of_steps(x: Tensor, w: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 with delayed scales: scales of the largest values of 16 steps, casts that saturate, a matmul, the history moved."""
    scale = 448.0 / past.abs().amax(1).clamp(min=1e-4)

    def cast(t: Tensor, s: Tensor) -> Tensor:
        return (t.float() * s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    a, b = cast(x, scale[0]), cast(w, scale[1])
    y = (a.to(x.dtype) @ b.to(x.dtype).t()).float() / (scale[0] * scale[1])
    new = torch.roll(past, -1, 1)
    most = torch.stack([x.abs().amax(), w.abs().amax()]).float()
    return y.to(x.dtype), torch.cat([most[:, None], new[:, 1:]], 1)


def learned_rounding(x: Tensor, w: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    """AdaRound: weights down to whole steps plus a stretched sigmoid, the layer's error, a term that wants 0 or 1."""
    h = (torch.sigmoid(v) * 1.2 - 0.1).clamp(0, 1)
    low = torch.floor(w / scale)
    near = scale * (low + h).clamp(-8, 7)
    error = (F.linear(x, near) - F.linear(x, w)).square().mean()
    return error + 0.01 * (1 - (2 * h - 1).abs().pow(3)).mean()


def clipped_activations(x: Tensor, w: Tensor, alpha: Tensor) -> Tensor:
    """PACT and DoReFa: activations clipped at a learned level, weights by tanh, both rounded to few levels."""
    top = alpha.abs() + 1.0
    y = 0.5 * (x.abs() - (x - top).abs() + top)
    q = torch.round(y * 15 / top) * top / 15
    y = y + (q - y).detach()
    t = torch.tanh(w)
    t = t / (2 * t.abs().max()) + 0.5
    u = 2 * (t + (torch.round(t * 15) / 15 - t).detach()) - 1
    return F.conv2d(y, u, padding=1, stride=2)


# ---- recommendation and tables --------------------------------------------------------------------------------------------


def instance_masks(x: Tensor, down: Tensor, up: Tensor, w: Tensor) -> Tensor:
    """MaskNet: masks of all features from the features, three blocks beside each other, norms, multiplied."""
    flat = x.flatten(1)
    normed = F.layer_norm(x, x.shape[-1:]).flatten(1)
    out = []
    for k in range(3):
        mask = F.linear(F.relu(F.linear(flat.detach(), down[k])), up[k])
        out.append(F.relu(F.layer_norm(F.linear(mask * normed, w[k]), w.shape[1:2])))
    return torch.cat(out, -1)


def own_feedforwards(x: Tensor, wi: Tensor, wo: Tensor, gain: Tensor) -> Tensor:
    """RankMixer: parts of all tokens exchanged, then a feedforward network of each token's own; two layers."""
    b, t, d = x.shape
    for k in range(2):
        y = x.view(b, t, t, d // t).transpose(1, 2).reshape(b, t, d)
        x = F.layer_norm(x + y, (d,), gain[k])
        y = torch.einsum("btd,tdh->bth", x, wi[k])
        x = F.layer_norm(x + torch.einsum("bth,thd->btd", F.gelu(y), wo[k]), (d,), gain[k + 2])
    return x


def complex_orders(x: Tensor, mu: Tensor, orders: Tensor, w: Tensor) -> Tensor:
    """EulerNet: fields as magnitudes and angles, learned orders of them multiplied, real and imaginary parts, a layer."""
    r, p = mu.abs() * torch.cos(x), mu.abs() * torch.sin(x)
    size, angle = torch.log((r * r + p * p + 1e-8).sqrt()), torch.atan2(p, r)
    size, angle = size.transpose(-1, -2) @ orders, angle.transpose(-1, -2) @ orders
    size = size.exp()
    y = torch.stack([size * torch.cos(angle), size * torch.sin(angle)], 3).flatten(2)
    return F.relu(F.layer_norm(F.linear(y, w), w.shape[:1])).mean(1)


def fuzzy_rules(x: Tensor, centre: Tensor, width: Tensor, w: Tensor) -> Tensor:
    """ANFIS: three bells for each of five inputs, all 243 rules, normed strengths, a line for each rule."""
    bell = torch.exp(-(((x[..., None] - centre) / (width.abs() + 0.5)) ** 2))
    rules = bell[:, 0]
    for k in range(1, x.shape[1]):
        rules = (rules[:, :, None] * bell[:, k, None]).flatten(1)
    lines = F.linear(F.pad(x, (0, 1), value=1.0), w)
    return (rules / rules.sum(1, keepdim=True).clamp(min=1e-12) * lines).sum(1)


def waves_as_edges(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A Fourier KAN: cosines and sines of five frequencies of each input, weights for each edge; two layers."""
    for k in range(2):
        n = torch.arange(1, 6, device=x.device, dtype=x.dtype)
        angle = x[:, None, :, None] * n
        y = torch.sum(torch.cos(angle) * w[k, 0], (-2, -1)) + torch.sum(torch.sin(angle) * w[k, 1], (-2, -1))
        x = y + bias[k]
    return x


def rated_players(ability: Tensor, spread: Tensor, items: Tensor, players: Tensor, asked: Tensor, right: Tensor) -> Tensor:
    """A two-parameter model of answers, and pairs of players that win by what they can, with priors."""
    z = spread[asked].exp() * (ability[players] - items[asked])
    loss = F.binary_cross_entropy_with_logits(z, (right > 0).to(z.dtype))
    a, b = ability[players], ability[players.flip(0)]
    pairs = F.softplus(-(a - b) * torch.where(right > 0, 1.0, -1.0)).mean()
    return loss + 0.5 * pairs + 1e-3 * (ability.square().mean() + spread.square().mean() + items.square().mean())


# ---- graphs and metrics ---------------------------------------------------------------------------------------------------


def scalars_and_vectors(s: Tensor, v: Tensor, at: Tensor, to: Tensor, r: Tensor, w: Tensor, wr: Tensor, uv: Tensor) -> Tensor:
    """PaiNN: messages of scalars and vectors by radial filters, then vectors' norms and dots mixed into scalars."""
    f = s.shape[1]
    far = r.norm(dim=-1, keepdim=True).clamp(min=1e-3)
    k = torch.arange(1, 21, device=r.device, dtype=r.dtype)
    near = torch.sin(k * math.pi * far / 5) / far * (0.5 * (torch.cos(math.pi * far / 5) + 1) * (far < 5))
    phi = F.linear(F.silu(F.linear(s, w[:f])), w[f:])
    a, b, c = (phi[at] * F.linear(near, wr)).split(f, -1)
    ds = torch.zeros_like(s).index_add(0, to, a)
    dv = torch.zeros_like(v).index_add(0, to, v[at] * b[:, None] + (r / far)[..., None] * c[:, None])
    s, v = s + ds, v + dv
    u, t = (v @ uv).chunk(2, -1)
    size = (t.square().sum(1) + 1e-8).sqrt()
    return s + torch.tanh(size) * (u * t).sum(1) + u.square().sum(1)


def gated_edges(x: Tensor, e: Tensor, at: Tensor, to: Tensor, w: Tensor, we: Tensor) -> Tensor:
    """GatedGCN: edges from both ends, sums of gated values over sums of gates, batch norms, what was there added."""
    a, b, c, d = F.linear(x, w).chunk(4, -1)
    y = F.linear(e, we) + a[at] + b[to]
    gate = torch.sigmoid(y)
    total = torch.zeros_like(x).index_add(0, to, gate * c[at])
    share = torch.zeros_like(x).index_add(0, to, gate)
    x = x + F.relu(F.batch_norm(d + total / (share + 1e-6), None, None, training=True))
    return x.square().mean() + (e + F.relu(F.batch_norm(y, None, None, training=True))).square().mean()


def return_probabilities(a: Tensor) -> Tensor:
    """Walks on graphs: rows divided by degrees, diagonals of twelve powers."""
    p = (a > 1).to(a.dtype)
    p = p / p.sum(-1, keepdim=True).clamp(min=1)
    out, power = [], p
    for _ in range(12):
        out.append(torch.diagonal(power, dim1=-2, dim2=-1))
        power = power @ p
    return torch.stack(out, -1)


def smooth_distances(x: Tensor, truth: Tensor, mask: Tensor) -> Tensor:
    """AlphaFold 3's smooth LDDT: differences of all pairs' distances through four sigmoids, pairs that are near."""
    d, t = torch.cdist(x, x), torch.cdist(truth, truth)
    e = (t - d).abs()
    score = 0.25 * sum(torch.sigmoid(bound - e) for bound in (0.5, 1.0, 2.0, 4.0))
    c = (t < 2.5) * (1 - torch.eye(x.shape[1], device=x.device)) * ((mask > -1)[:, None] & (mask > -1)[..., None])
    return 1 - ((c * score).sum((-2, -1)) / c.sum((-2, -1)).clamp(min=1)).mean()


def speakers_apart(x: Tensor, w: Tensor) -> Tensor:
    """GE2E: cosines of utterances to speakers' centres, their own centre without themselves, a softmax of all."""
    n, m, _ = x.shape
    e = F.normalize(x.float(), dim=-1)
    centre = e.mean(1)
    own = (e.sum(1, keepdim=True) - e) / (m - 1)
    s = torch.einsum("nmd,kd->nmk", e, F.normalize(centre, dim=-1))
    here = (e * F.normalize(own, dim=-1)).sum(-1)
    s = torch.where(torch.eye(n, dtype=torch.bool, device=x.device)[:, None], here[..., None], s)
    s = s * w[0].float().exp() * 5 + w[1].float()
    return F.cross_entropy(s.reshape(n * m, n), torch.arange(n, device=x.device).repeat_interleave(m))


def _many(count: int, a: int, b: int) -> list[tuple[int, ...]]:
    """Shapes of matrices and of vectors, one for each two."""
    return [shape for k in range(count) for shape in ((a + 3 * k, b), (a + 3 * k,))]


def _late(m: Make, count: int, a: int, b: int) -> list[Tensor]:
    shapes = _many(count, a, b)
    return [m(*s) for s in shapes * 3] + [m(*s).square() for s in shapes]


def _mini(m: Make, count: int, a: int, b: int) -> list[Tensor]:
    shapes = _many(count, a, b)
    return [m(*s) for s in shapes * 3] + [m(s[0] if len(s) == 2 else 1) for s in shapes]


def _apollo(m: Make, count: int, a: int, b: int, r: int) -> list[Tensor]:
    rows = [a + 3 * k for k in range(count)]
    low = [m(r, b) for _ in range(2 * count)]
    return [*(m(n, b) for n in rows), *(m(r, n) * r**-0.5 for n in rows), *low]


SHORTCUT = Sized(
    averaged_shortcuts, lambda m, b, c, h: [m(b, c, h, h), weight(m, c // 2, c, 3, 3), weight(m, 4 * c, 2 * c, 3, 3)], (2, 8, 6)
)
PAINN = Sized(
    scalars_and_vectors,
    lambda m, n, e, f: [
        m(n, f), m(n, 3, f), ids(m, n, e), ids(m, n, e).flip(0), m(e, 3) * 2,
        m(4 * f, f) * f**-0.5, weight(m, 3 * f, 20), m(f, 2 * f) * f**-0.5,
    ],
    (7, 20, 6),
    SINGLE,
)  # fmt: skip
SANA = Sized(
    mixed_feedforward,
    lambda m, b, c, h: [
        m(b, c, h, h), m(c), weight(m, 3 * c, c), weight(m, 5 * c, c, 1, 1),
        weight(m, 5 * c, 1, 3, 3), weight(m, c, 5 * c // 2, 1, 1),
    ],
    (2, 64, 5),
)  # fmt: skip
RANK = Sized(
    own_feedforwards,
    lambda m, b, t, d, h: [m(b, t, d), m(2, t, d, h) * d**-0.5, m(2, t, h, d) * h**-0.5, m(4, d)],
    (3, 4, 8, 12),
)
BLOCKS: tuple[Block, ...] = (
    Sized(late_moments, _late, (3, 5, 7), SINGLE).block("late moments", 40, 768, 769),
    Sized(mini_moments, _mini, (3, 5, 7), SINGLE).block("mini moments", 24, 1024, 768),
    Sized(less_variance, lambda m, n, a, b: [m(a + k, b) for _ in range(5) for k in range(n)], (3, 5, 7), SINGLE).block(
        "less variance", 30, 512, 1031
    ),
    Sized(normed_neurons, lambda m, a, b: [m(a, b).float(), m(a, b).float(), m(a, 1).float(), m(a, b).float()], (9, 12)).block(
        "normed neurons", 1280, 3840
    ),
    Sized(clipped_scores, lambda m, b, s, d, h: [m(b, s, d), weight(m, 64 * h, d), weight(m, 64 * h, d)], (2, 5, 16, 2)).block(
        "clipped scores", 4, 1023, 1024, 16
    ),
    Sized(scaled_by_projections, _apollo, (3, 6, 8, 2), SINGLE).block("scaled by projections", 12, 1024, 1500, 8),
    Sized(
        straight_flows,
        lambda m, b, s, d, h: [
            m(b, s, d),
            m(b, s, d),
            m(b),
            m(32),
            weight(m, 3 * d, 64),
            weight(m, h, d),
            weight(m, d, h),
        ],
        (3, 4, 8, 16),
    ).block("straight flows", 32, 1024, 64, 512, training=True),
    Sized(
        mean_flows,
        lambda m, n, d, h: [m(n, d), m(n, d), m(n, 2), weight(m, h, d + 2), weight(m, h, h), weight(m, d, h)],
        (5, 4, 8),
        SINGLE,
    ).block("mean flows", 4096, 32, 256, training=True),
    Sized(
        consistent_pairs,
        lambda m, b, c, h, k: [m(b, c, h, h), m(b, c, h, h), m(b), weight(m, k, c, 3, 3), weight(m, c, k, 3, 3)],
        (2, 3, 6, 8),
        SINGLE,
    ).block("consistent pairs", 64, 3, 32, 64, training=True),
    SANA.block("mixed feedforward", 2, 768, 24, training=True),
    SHORTCUT.block("averaged shortcuts", 2, 128, 96, training=True),
    Sized(
        scales_of_codes,
        lambda m, b, c, s, n: [m(b, c, s, s), m(n, c), m(4, c, c, 3, 3) * (9 * c) ** -0.5],
        (2, 6, 9, 12),
        SINGLE,
    ).block("scales of codes", 16, 32, 16, 4096),
    Sized(passed_on_errors, lambda m, n, k: [m(n, k), m(k, k) * 0.1, m(n, 1).abs()[:, 0] * 0.1 + 0.2], (6, 8), SINGLE).block(
        "passed on errors", 4096, 32
    ),
    Sized(
        blocks_by_exponents,
        lambda m, e, t, n, g: [
            m(e, t, g * 32),
            ids(m, 256, e, n, g, 16).to(torch.uint8),
            (ids(m, 7, e, n, g) + 121).to(torch.uint8),
            m(16),
            m(e, n),
        ],
        (2, 3, 6, 2),
    ).block("blocks by exponents", 8, 32, 2880, 45),
    Sized(largest_of_steps, lambda m, t, i, o: [m(t, i), weight(m, o, i), m(2, 16).float().abs() * 4], (6, 8, 12)).block(
        "largest of steps", 4000, 1024, 2048
    ),
    Sized(
        learned_rounding, lambda m, t, i, o: [m(t, i), m(o, i) * 0.1, m(o, i), m(o, 1).abs() * 0.05 + 0.02], (6, 8, 12), SINGLE
    ).block("learned rounding", 2048, 512, 1024, training=True),
    Sized(clipped_activations, lambda m, b, c, h, k: [m(b, c, h, h), weight(m, k, c, 3, 3), m(1)], (2, 4, 7, 6), SINGLE).block(
        "clipped activations", 32, 64, 55, 128, training=True
    ),
    Sized(
        instance_masks,
        lambda m, b, f, d, r, o: [
            m(b, f, d),
            m(3, r, f * d) * (f * d) ** -0.5,
            m(3, f * d, r) * r**-0.5,
            m(3, o, f * d) * (f * d) ** -0.5,
        ],
        (4, 5, 6, 7, 8),
    ).block("instance masks", 8192, 39, 16, 256, 128, training=True),
    RANK.block("own feedforwards", 2048, 16, 256, 512),
    Sized(
        complex_orders, lambda m, b, f, d, o: [m(b, f, d), m(f, d), m(f, o) * 0.3, weight(m, 32, 2 * o)], (4, 5, 6, 7), SINGLE
    ).block("complex orders", 8192, 39, 16, 30, training=True),
    Sized(fuzzy_rules, lambda m, n: [m(n, 5), m(5, 3), m(5, 3), m(243, 6)], (6,), SINGLE).block(
        "fuzzy rules", 50021, training=True
    ),
    Sized(waves_as_edges, lambda m, b, d: [m(b, d), m(2, 2, d, d, 5) * (10 * d) ** -0.5, m(2, d)], (4, 6), SINGLE).block(
        "waves as edges", 2000, 64, training=True
    ),
    Sized(
        rated_players, lambda m, p, i, n: [m(p), m(i) * 0.3, m(i), ids(m, p, n), ids(m, i, n).flip(0), m(n)], (6, 5, 40), SINGLE
    ).block("rated players", 100003, 3001, 2000003, training=True),
    PAINN.block("scalars and vectors", 8001, 160001, 64),
    Sized(
        gated_edges,
        lambda m, n, e, d: [m(n, d), m(e, d), ids(m, n, e), ids(m, n, e).flip(0), weight(m, 4 * d, d), weight(m, d, d)],
        (7, 20, 6),
        SINGLE,
    ).block("gated edges", 20001, 100001, 96, training=True),
    Sized(return_probabilities, lambda m, b, n: [m(b, n, n)], (3, 7), SINGLE).block("return probabilities", 256, 100),
    Sized(smooth_distances, lambda m, b, n: [m(b, n, 3), m(b, n, 3), m(b, n)], (2, 9), SINGLE).block(
        "smooth distances", 2, 2001, training=True
    ),
    Sized(speakers_apart, lambda m, n, k, d: [m(n, k, d), m(2)], (4, 3, 8)).block(
        "speakers apart", 256, 10, 256, training=True
    ),
)
