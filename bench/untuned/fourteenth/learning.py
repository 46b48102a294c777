"""Recommendation, graphs, learning by reward, proteins, updates, counts and measures of rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE, HALF = torch.float32, torch.float16


# ---- recommendation, tables -----------------------------------------------------------------------------------------------


def rows_attend(
    x: Tensor, labels: Tensor, columns: Tensor, rows: Tensor, n: Tensor, up: Tensor, down: Tensor, head: Tensor
) -> Tensor:
    """SAINT: attention over the columns of a row, then over the rows of a batch with all columns as one vector; a loss."""
    b, c, d = x.shape
    q, k, v = F.linear(x, columns).unflatten(-1, (3, d // 8, 8)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, c, d)
    x = F.layer_norm(x + y, (d,), n[0], n[1])
    flat = x.view(1, b, c * d)
    q, k, v = F.linear(flat, rows).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, c, -1)
    x = x + F.pad(y, (0, d - y.shape[-1]))
    a, g = F.linear(F.layer_norm(x, (d,), n[2], n[3]), up).chunk(2, -1)
    x = x + F.linear(a * F.gelu(g), down)
    return F.cross_entropy(F.linear(x[:, 0], head), labels)


def interest_evolution(seen: Tensor, target: Tensor, wrong: Tensor, clicks: Tensor, table: Tensor, *w: Tensor) -> Tensor:
    """DIEN: a GRU's states with a loss by the next item, attention of the target, a GRU whose gates the attention scales."""
    wi, wh, ai, ah, att, first, last = w
    b, _s = seen.shape
    e = F.embedding(seen, table)
    t = F.embedding(target, table)
    d = wh.shape[1]
    h = torch.zeros(b, d, dtype=e.dtype, device=e.device)
    states = []
    for g in F.linear(e, wi).unbind(1):
        (r, z, n), (hr, hz, hn) = g.chunk(3, -1), F.linear(h, wh).chunk(3, -1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
        h = (1 - z) * torch.tanh(n + r * hn) + z * h
        states.append(h)
    all_states = torch.stack(states, 1)
    good = (all_states[:, :-1] * e[:, 1:]).sum(-1)
    bad = (all_states[:, :-1] * F.embedding(wrong, table)[:, 1:]).sum(-1)
    aid = F.softplus(-good).mean() + F.softplus(bad).mean()
    a = torch.einsum("bsd,de,be->bs", all_states, att, t).masked_fill(seen == 0, -1e9).softmax(1)
    for k, g in enumerate(F.linear(all_states, ai).unbind(1)):
        (r, z, n), (hr, hz, hn) = g.chunk(3, -1), F.linear(h, ah).chunk(3, -1)
        r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz) * a[:, k : k + 1]
        h = (1 - z) * h + z * torch.tanh(n + r * hn)
    y = F.linear(F.prelu(F.linear(torch.cat([h, t, h * t], 1), first), last[:, 0]), last.T)[:, 0]
    return F.binary_cross_entropy_with_logits(y, (clicks > 0).to(y.dtype)) + 0.5 * aid


def multinomial_autoencoder(clicks: Tensor, dropped: Tensor, noise: Tensor, *w: Tensor) -> Tensor:
    """Mult-VAE: users' normed clicks, a bottleneck with noise, log-probabilities of all items, an annealed divergence."""
    first, b1, second, back, b3, last = w
    x = clicks.to(first.dtype)
    h = F.normalize(x, dim=1) * dropped / 0.5
    mean, log_var = F.linear(torch.tanh(F.linear(h, first, b1)), second).chunk(2, 1)
    z = mean + noise * torch.exp(0.5 * log_var)
    logits = F.linear(torch.tanh(F.linear(z, back, b3)), last)
    loss = -(F.log_softmax(logits, 1) * x).sum(-1).mean()
    return loss - 0.2 * 0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()


def caser(seen: Tensor, users: Tensor, items: Tensor, table: Tensor, of_users: Tensor, *w: Tensor) -> Tensor:
    """Caser: the last items as a picture, convolutions of all heights and of columns, scores of picked items, a loss."""
    vertical, fc, out_table, out_bias, *horizontal = w
    x = F.embedding(seen, table)[:, None]
    columns = F.conv2d(x, vertical).flatten(1)
    rows = [F.relu(F.conv2d(x, k)).squeeze(3).amax(2) for k in horizontal]
    z = F.relu(F.linear(torch.cat([columns, *rows], 1), fc))
    z = torch.cat([z, F.embedding(users, of_users)], 1)
    y = torch.baddbmm(out_bias[items][..., None], out_table[items], z[..., None])[..., 0]
    good, bad = y[:, :3], y[:, 3:]
    return -(good.sigmoid() + 1e-8).log().mean() - (1 - bad.sigmoid() + 1e-8).log().mean()


def session_graphs(
    nodes: Tensor, last: Tensor, inward: Tensor, outward: Tensor, order: Tensor, target: Tensor, *w: Tensor
) -> Tensor:
    """SR-GNN: gated steps over each session's small graph, attention by the last item, logits of all items."""
    table, win, wout, wi, wh, q1, q2, q3, mix = w
    h = F.embedding(nodes, table)
    for _ in range(2):
        a = torch.cat([torch.bmm(inward.softmax(-1), F.linear(h, win)), torch.bmm(outward.softmax(-1), F.linear(h, wout))], 2)
        (r, z, n), (hr, hz, hn) = F.linear(a, wi).chunk(3, 2), F.linear(h, wh).chunk(3, 2)
        n = torch.tanh(n + torch.sigmoid(r + hr) * hn)
        h = n + torch.sigmoid(z + hz) * (h - n)
    s = h.gather(1, order[..., None].expand(-1, -1, h.shape[2]))
    end = torch.take_along_dim(s, last[:, None, None], dim=1)
    alpha = F.linear(torch.sigmoid(F.linear(end, q1) + F.linear(s, q2)), q3)
    alpha = alpha * (torch.arange(s.shape[1], device=s.device) <= last[:, None])[..., None]
    both = F.linear(torch.cat([(alpha * s).sum(1), end[:, 0]], 1), mix)
    return F.cross_entropy(both @ table[1:].T, target)


def neural_collaborations(
    user: Tensor, item: Tensor, clicks: Tensor, gu: Tensor, gi: Tensor, mu: Tensor, mi: Tensor, *w: Tensor
) -> Tensor:
    """NeuMF: two embeddings multiplied beside a tower of three layers on two others, one output, a loss."""
    a, ba, b, bb, c, bc, out = w
    match = gu[user] * gi[item]
    y = torch.hstack([mu[user], mi[item]])
    for k, bias in ((a, ba), (b, bb), (c, bc)):
        y = torch.addmm(bias, y, k.t()).relu()
    p = torch.sigmoid(torch.hstack([match, y]).mv(out))
    return F.binary_cross_entropy(p, (clicks > 0).to(p.dtype))


# ---- graphs, proteins, cells ----------------------------------------------------------------------------------------------


def typed_attention(x: Tensor, kinds: Tensor, source: Tensor, target: Tensor, relation: Tensor, *w: Tensor) -> Tensor:
    """HGT: projections by kinds of nodes, keys and messages by relations, softmax of edges, a gated shortcut."""
    wq, wk, wv, ra, rm, prior, wo, skip, gain = w
    n, d = x.shape
    h, size = ra.shape[1], ra.shape[2]

    def of_kinds(t: Tensor, m: Tensor) -> Tensor:
        every = torch.einsum("nd,tod->tno", t, m)
        return every.gather(0, kinds[None, :, None].expand(1, -1, m.shape[1]))[0]

    q, k, v = (of_kinds(x, m).view(n, h, size) for m in (wq, wk, wv))
    keys = torch.einsum("nhi,rhij->rnhj", k, ra)[relation, source]
    sent = torch.einsum("nhi,rhij->rnhj", v, rm)[relation, source]
    score = (keys * q[target]).sum(-1) * prior[relation] * size**-0.5
    top = torch.full((n, h), -math.inf, dtype=x.dtype, device=x.device)
    top = top.scatter_reduce(0, target[:, None].expand(-1, h), score, "amax", include_self=False).detach()
    e = torch.exp(score - top[target])
    total = torch.zeros(n, h, dtype=x.dtype, device=x.device).index_add(0, target, e)
    y = torch.zeros(n, h, size, dtype=x.dtype, device=x.device).index_add(0, target, sent * (e / total[target])[..., None])
    gate = torch.sigmoid(skip)[kinds][:, None]
    return F.layer_norm(gate * of_kinds(F.gelu(y.flatten(1)), wo) + (1 - gate) * x, (d,), gain[0], gain[1])


def correct_and_smooth(logits: Tensor, labels: Tensor, known: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Correct and smooth: errors of known nodes spread along normed edges, then guesses with true labels put in."""
    n, c = logits.shape
    p = logits.softmax(-1)
    degree = p.new_zeros(n).scatter_add(0, target, p.new_ones(len(target))).clamp(min=1)
    scale = degree[source].rsqrt() * degree[target].rsqrt()
    true = F.one_hot(labels, c).to(p.dtype)
    error = torch.where(known[:, None], true - p, 0)
    start = error
    for _ in range(4):
        error = torch.zeros_like(error).index_add_(0, target, scale[:, None] * error[source]) * 0.8 + 0.2 * start
        error = error.clamp(-1, 1)
    size = start.abs().sum() / known.sum()
    grown = size / error.abs().sum(1, keepdim=True).clamp(min=1e-6) * error
    y = torch.where(known[:, None], true, p + torch.where(grown.abs() < 1, grown, 0))
    start = y
    for _ in range(4):
        y = torch.zeros_like(y).index_add_(0, target, scale[:, None] * y[source]) * 0.8 + 0.2 * start
        y = y.clamp(0, 1)
    return y


def aligned_rows(
    msa: Tensor, pair: Tensor, mask: Tensor, n: Tensor, wqkv: Tensor, gate: Tensor, bias: Tensor, wo: Tensor
) -> Tensor:
    """Evoformer's row attention: pairs as biases of heads, gated outputs, masked residues, in float32 within float16 values."""
    s, r, d = msa.shape
    x = F.layer_norm(msa, (d,), n[0], n[1])
    q, k, v = F.linear(x, wqkv).view(s, r, 3, d // 32, 32).permute(2, 0, 3, 1, 4)
    b = torch.einsum("ijc,hc->hij", F.layer_norm(pair, pair.shape[-1:]), bias)
    a = torch.einsum("shqc,shkc->shqk", q * 32**-0.5, k) + (1e4 * (mask.to(x.dtype) - 1))[:, None, None] + b
    y = torch.einsum("shqk,shkc->sqhc", a.float().softmax(-1).to(x.dtype), v)
    y = y * torch.sigmoid(F.linear(x, gate)).view(s, r, d // 32, 32)
    return msa + F.linear(y.flatten(2), wo)


def linkage(genotypes: Tensor, effects: Tensor) -> tuple[Tensor, Tensor]:
    """Squared correlations of variants in a block from two-bit calls with gaps, pruned weights, scores of people."""
    missing = genotypes < 0
    x = genotypes.to(effects.dtype).masked_fill(missing, 0)
    count = (~missing).sum(0)
    mean = x.sum(0) / count.clamp(min=1)
    x = torch.where(missing, 0, x - mean)
    x = x * torch.rsqrt(x.square().sum(0) + 1e-6)
    r2 = (x.T @ x).square()
    r2 = r2 - (1 - r2) / (count - 2).clamp(min=1)
    near = torch.arange(r2.shape[0], device=r2.device)
    band = (near[:, None] - near).abs() <= 500
    score = torch.where(band, r2, 0).sum(1)
    return score, x @ (effects / score.clamp(min=1))


# ---- learning by reward ---------------------------------------------------------------------------------------------------


def mixed_values(q: Tensor, actions: Tensor, state: Tensor, reward: Tensor, over: Tensor, later: Tensor, *w: Tensor) -> Tensor:
    """QMIX: agents' chosen values through a network whose positive weights a state makes; errors over time, masked."""
    w1, b1, w2, v1, v2 = w
    t, b, n, _ = q.shape
    d = b1.shape[0]

    def mixed(each: Tensor, s: Tensor) -> Tensor:
        first = F.linear(s, w1).abs().view(-1, n, d)
        h = F.elu(torch.bmm(each.reshape(-1, 1, n), first) + F.linear(s, b1).view(-1, 1, d))
        last = F.linear(s, w2).abs().view(-1, d, 1)
        bias = F.linear(F.relu(F.linear(s, v1)), v2).view(-1, 1, 1)
        return (torch.bmm(h, last) + bias).view(t, b)

    chosen = q.gather(3, actions[..., None]).squeeze(3)
    total = mixed(chosen, state.flatten(0, 1))
    best = later.gather(3, q.detach().argmax(3, keepdim=True)).squeeze(3)
    with torch.no_grad():
        goal = reward + 0.99 * (~over) * mixed(best, state.flatten(0, 1)).roll(-1, 0)
    alive = (over.to(q.dtype).cumsum(0) <= 1).to(q.dtype)
    return ((total - goal) ** 2 * alive).sum() / alive.sum()


def curiosity(
    frames: Tensor, actions: Tensor, e1: Tensor, e2: Tensor, e3: Tensor, inverse: Tensor, out: Tensor, forward: Tensor
) -> Tensor:
    """Intrinsic curiosity: features of two frames, the action guessed from both, the next guessed from one, two losses."""
    x = frames.to(e1.dtype).flatten(0, 1) / 255
    for w in (e1, e2, e3):
        x = F.elu(F.conv2d(x, w, stride=2, padding=1))
    f = x.flatten(1).view(len(frames), 2, -1)
    now, then = f.unbind(1)
    guess = F.linear(F.relu(F.linear(f.flatten(1), inverse)), out)
    action = F.one_hot(actions, out.shape[0]).to(x.dtype)
    next_guess = F.linear(torch.cat([now, action], 1), forward)
    return 0.8 * F.cross_entropy(guess, actions) + 0.2 * 0.5 * (next_guess - then.detach()).square().sum(1).mean()


def simplicial(
    z: Tensor, a: Tensor, goal: Tensor, reward: Tensor, first: Tensor, g: Tensor, second: Tensor, heads: Tensor
) -> Tensor:
    """TD-MPC2: latents as groups of softmaxes of eight, Mish and norms, three steps, losses of latents and rewards."""
    n, k = heads.shape[:2]
    symlog = torch.sign(reward) * torch.log1p(reward.abs())
    at = ((symlog + 10) / 20 * (k - 1)).clamp(0, k - 1)
    low = at.floor()
    two = (
        F.one_hot(low.long(), k) * (1 - (at - low))[..., None]
        + F.one_hot((low.long() + 1).clamp(max=k - 1), k) * (at - low)[..., None]
    )
    loss = 0.0
    for t in range(3):
        y = F.mish(F.layer_norm(F.linear(torch.cat([z, a[t]], -1), first), first.shape[:1], g[0], g[1]))
        r = torch.einsum("bd,nkd->nbk", torch.cat([z, a[t]], -1), heads)
        z = F.linear(y, second).unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)
        loss = loss + 0.5**t * (20 * F.mse_loss(z, goal[t].unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)))
        loss = loss - 0.5**t * 0.1 * (two[t] * F.log_softmax(r, -1)).sum(-1).mean()
    return loss / n


def elite_plans(state: Tensor, noise: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, cost: Tensor) -> tuple[Tensor, Tensor]:
    """The cross-entropy method: plans sampled, a network rolled out six steps, the best kept, means and spreads moved."""
    rounds, b, n, t, a = noise.shape
    mean = torch.zeros(b, 1, t, a, dtype=noise.dtype, device=noise.device)
    spread = torch.ones_like(mean)
    for k in range(rounds):
        plans = (mean + spread * noise[k]).clamp(-2, 2)
        s = state[:, None].expand(-1, n, -1)
        total = torch.zeros(b, n, dtype=noise.dtype, device=noise.device)
        for step in range(t):
            h = F.silu(F.linear(torch.cat([s, plans[:, :, step]], -1), w1, b1))
            s = s + 0.1 * F.linear(h, w2)
            total = total + 0.98**step * ((s * cost).square().sum(-1) + 0.01 * plans[:, :, step].square().sum(-1))
        best = total.topk(n // 10, dim=1, largest=False).indices
        kept = plans.gather(1, best[..., None, None].expand(-1, -1, t, a))
        mean = 0.9 * kept.mean(1, keepdim=True) + 0.1 * mean
        spread = kept.std(1, keepdim=True).clamp(min=0.05)
    return mean[:, 0, 0], total.amin(1)


# ---- updates, measures, counts --------------------------------------------------------------------------------------------


def dual_averages(step: Tensor, *tensors: Tensor) -> None:
    """MADGRAD: sums of gradients and of their squares, cube roots, an average toward the dual point; in place."""
    n = len(tensors) // 5
    params, grads, sums, squares, starts = (tensors[k * n : k * n + n] for k in range(5))
    rate = 1e-2 * (step.abs() + 1).sqrt()
    for p, g, s, q, x0 in zip(params, grads, sums, squares, starts, strict=True):
        s.add_(g * rate)
        q.add_(rate * g * g)
        z = x0 - s / (q.abs().pow(1 / 3) + 1e-6)
        p.mul_(0.9).add_(z, alpha=0.1)
    step.add_(1)


def covers(p: Tensor, g: Tensor, rows: Tensor, columns: Tensor, momentum: Tensor) -> None:
    """SM3 of a matrix: the smaller of a row's and a column's accumulated maximum, each raised; momentum, in place."""
    v = torch.minimum(rows.abs()[:, None], columns.abs()) + g.float().square()
    momentum.mul_(0.9).add_(g.float() * torch.rsqrt(v + 1e-12), alpha=0.1)
    p.sub_((1e-2 * momentum).to(p.dtype))
    rows.copy_(v.amax(1))
    columns.copy_(v.amax(0))


def silhouettes(x: Tensor, labels: Tensor, clusters: Tensor) -> tuple[Tensor, Tensor]:
    """Silhouette scores: all distances, their sums by clusters through a one-hot matrix, own against the nearest other."""
    k = clusters.shape[0]
    far = (
        torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")
        if x.shape[0] < 100
        else ((x.square().sum(1)[:, None] + x.square().sum(1) - 2 * x @ x.T).clamp(min=0).sqrt())
    )
    hot = F.one_hot(labels, k).to(x.dtype)
    count = hot.sum(0)
    total = far @ hot
    own = labels[:, None]
    a = total.gather(1, own)[:, 0] / (count[labels] - 1).clamp(min=1)
    b = (total / count.clamp(min=1)).masked_fill(count == 0, math.inf).scatter(1, own, math.inf).amin(1)
    score = torch.where(count[labels] > 1, (b - a) / torch.maximum(a, b), 0)
    return score.mean(), torch.zeros_like(clusters).index_add(0, labels, score) / count.clamp(min=1)


def mixed_topics(counts: Tensor, topics: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """Latent Dirichlet allocation: rounds of documents' topics by digammas, words' sums, a bound of perplexity."""
    n = counts.to(topics.dtype)
    word = torch.exp(torch.digamma(topics.abs() + 0.1) - torch.digamma((topics.abs() + 0.1).sum(1, keepdim=True)))
    gamma = gamma.abs() + 1
    for _ in range(4):
        doc = torch.exp(torch.digamma(gamma) - torch.digamma(gamma.sum(1, keepdim=True)))
        norm = doc @ word + 1e-9
        gamma = 0.1 + doc * ((n / norm) @ word.T)
    doc = torch.exp(torch.digamma(gamma) - torch.digamma(gamma.sum(1, keepdim=True)))
    stats = word * (doc.T @ (n / (doc @ word + 1e-9)))
    bound = (n * (doc @ word + 1e-9).log()).sum() / n.sum()
    return stats, bound


def count_sketch(keys: Tensor, amounts: Tensor, salts: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """A count-min and a signed sketch: several hashes of a stream, sums in tables, least and median estimates of queries."""
    d, width = salts.shape[0], 65536
    salt = salts[:, None] * 2 + 1

    def hashed(t: Tensor) -> tuple[Tensor, Tensor]:
        h = (t * salt) & 0xFFFFFFFF
        h = (h ^ (h >> 15)) * 73244475 & 0xFFFFFFFF
        h = h ^ (h >> 16)
        return h % width, (h >> 24 & 1) * 2 - 1

    at, sign = hashed(keys)
    least = torch.zeros(d, width, dtype=amounts.dtype, device=keys.device).scatter_add(1, at, amounts.abs().expand(d, -1))
    signed = torch.zeros(d, width, dtype=amounts.dtype, device=keys.device).scatter_add(1, at, amounts * sign)
    at, sign = hashed(queries)
    return least.gather(1, at).amin(0), (signed.gather(1, at) * sign).median(0).values


def exposures(shocks: Tensor, notional: Tensor, fixed: Tensor, hazard: Tensor, curve: Tensor) -> Tensor:
    """A swaps book's credit adjustment: Hull-White paths of short rates, bond prices at each date, netted values."""
    steps, paths = shocks.shape
    dt, a = 0.25, 0.05
    sigma = 0.03 * F.softplus(curve[0])
    x = torch.zeros(paths, dtype=shocks.dtype, device=shocks.device)
    discount = torch.ones_like(x)
    alive, loss = 1.0, 0.0
    tenor = torch.arange(1, 21, device=shocks.device, dtype=shocks.dtype) * 0.5
    b = (1 - torch.exp(-a * tenor)) / a
    for t in range(steps):
        rate = 0.03 + 0.01 * torch.tanh(curve[1 + t]) + x
        discount = discount * torch.exp(-rate * dt)
        x = x * math.exp(-a * dt) + sigma * dt**0.5 * shocks[t]
        bonds = torch.exp(-0.03 * tenor - x[:, None] * b - 0.25 * sigma**2 * b * b)
        left = (tenor > t * dt / 2).to(shocks.dtype)
        annuity = (bonds * left).sum(1) * 0.5
        value = (notional * (1 - bonds[:, -1:] - fixed * 0.03 * annuity[:, None])).sum(1)
        survive = alive * torch.exp(-F.softplus(hazard[t]) * 0.02 * dt)
        loss = loss + 0.6 * (alive - survive) * (discount * F.relu(value)).mean()
        alive = survive
    return loss


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _attend(m: Make, b: int, c: int, d: int, k: int) -> list[Tensor]:
    wide = [weight(m, 3 * c * 8, c * d), m(4, d) * 0.1 + 1, weight(m, 4 * d, d), weight(m, d, 2 * d), weight(m, k, d)]
    return [m(b, c, d), ids(m, k, b), weight(m, 3 * d, d), *wide]


def _evolution(m: Make, b: int, s: int, rows: int, d: int) -> list[Tensor]:
    cells = [weight(m, 3 * d, d) for _ in range(4)]
    nets = [weight(m, d, d), weight(m, 80, 3 * d), m(80, 1) * 0.1]
    return [ids(m, rows, b, s), ids(m, rows, b), ids(m, rows, b, s), m(b), m(rows, d) * d**-0.5, *cells, *nets]


def _users(m: Make, b: int, n: int, h: int, z: int) -> list[Tensor]:
    nets = [weight(m, h, n), m(h) * 0.1, weight(m, 2 * z, h), weight(m, h, z), m(h) * 0.1, weight(m, n, h)]
    return [m(b, n) > 1.7, m(b, n) > 0, m(b, z), *nets]


def _caser(m: Make, b: int, s: int, rows: int, users: int, d: int) -> list[Tensor]:
    heights = [weight(m, 16, 1, k, d) for k in range(1, s + 1)]
    nets = [weight(m, 4, 1, s, 1), weight(m, d, 4 * d + 16 * s), m(rows, 2 * d) * d**-0.5, m(rows) * 0.1]
    return [ids(m, rows, b, s), ids(m, users, b), ids(m, rows, b, 6), m(rows, d) * 0.3, m(users, d) * 0.3, *nets, *heights]


def _sessions(m: Make, b: int, n: int, rows: int, d: int) -> list[Tensor]:
    cells = [weight(m, d, d), weight(m, d, d), weight(m, 3 * d, 2 * d), weight(m, 3 * d, d)]
    nets = [weight(m, d, d), weight(m, d, d), weight(m, 1, d), weight(m, d, 2 * d)]
    graph = [ids(m, rows, b, n), ids(m, n, b), m(b, n, n), m(b, n, n), ids(m, n, b, n), ids(m, rows - 1, b)]
    return [*graph, m(rows, d) * d**-0.5, *cells, *nets]


def _collaborations(m: Make, b: int, users: int, items: int, d: int) -> list[Tensor]:
    tables = [m(users, d) * 0.5, m(items, d) * 0.5, m(users, 4 * d) * 0.5, m(items, 4 * d) * 0.5]
    nets = [t for o, i in ((4 * d, 8 * d), (2 * d, 4 * d), (d, 2 * d)) for t in (weight(m, o, i), m(o) * 0.1)]
    return [ids(m, users, b), ids(m, items, b), m(b), *tables, *nets, m(2 * d) * d**-0.5]


def _typed(m: Make, n: int, e: int, t: int, r: int, h: int, d: int) -> list[Tensor]:
    nets = [*(m(t, h * d, h * d) * (h * d) ** -0.5 for _ in range(3)), *(m(r, h, d, d) * d**-0.5 for _ in range(2))]
    graph = [m(n, h * d), ids(m, t, n), ids(m, n, e), ids(m, n, e), ids(m, r, e)]
    return [*graph, *nets, m(r, h) * 0.3 + 1, m(t, h * d, h * d) * (h * d) ** -0.5, m(t), m(2, h * d)]


def _aligned(m: Make, s: int, r: int, d: int, p: int) -> list[Tensor]:
    nets = [m(2, d) * 0.1 + 1, weight(m, 3 * d, d), weight(m, d, d), weight(m, d // 32, p), weight(m, d, d)]
    return [m(s, r, d), m(r, r, p), m(s, r) < 1.5, *nets]


def _values(m: Make, t: int, b: int, n: int, a: int, s: int, d: int) -> list[Tensor]:
    nets = [weight(m, n * d, s), weight(m, d, s), weight(m, d, s), weight(m, d, s), weight(m, 1, d)]
    return [m(t, b, n, a), ids(m, a, t, b, n), m(t, b, s), m(t, b), m(t, b) > 2, m(t, b, n, a), *nets]


def _curious(m: Make, b: int, side: int, a: int, c: int) -> list[Tensor]:
    grid = side
    for _ in range(3):
        grid = (grid - 1) // 2 + 1
    f = c * grid * grid
    convs = [weight(m, c, 4, 3, 3), weight(m, c, c, 3, 3), weight(m, c, c, 3, 3)]
    return [
        ids(m, 256, b, 2, 4, side, side).to(torch.uint8),
        ids(m, a, b),
        *convs,
        weight(m, 256, 2 * f),
        weight(m, a, 256),
        weight(m, f, f + a),
    ]


def _simplicial(m: Make, b: int, z: int, a: int, d: int, n: int, k: int) -> list[Tensor]:
    nets = [weight(m, d, z + a), m(2, d) * 0.1 + 1, weight(m, z, d), m(n, k, z + a) * (z + a) ** -0.5]
    return [m(b, z), m(3, b, a), m(3, b, z), m(3, b) * 3, *nets]


def _plans(m: Make, b: int, n: int, t: int, s: int, a: int, d: int) -> list[Tensor]:
    return [m(b, s), m(3, b, n, t, a), weight(m, d, s + a), m(d) * 0.1, weight(m, s, d), m(s)]


def _averages(m: Make, r: int, c: int, n: int) -> list[Tensor]:
    shapes = ((r, c), (r,), (3, n))
    return [m(1).float(), *(m(*s).float() * (0.1 if k else 1) for k in range(5) for s in shapes)]


def _book(m: Make, steps: int, paths: int, n: int) -> list[Tensor]:
    return [m(steps, paths), m(n), m(n) * 0.1 + 1, m(steps), m(steps + 1)]


BLOCKS: tuple[Block, ...] = (
    Sized(rows_attend, _attend, (5, 3, 16, 2), SINGLE, tf32=True).block("rows attend", 2000, 57, 32, 7, training=True),
    Sized(interest_evolution, _evolution, (4, 3, 9, 6), SINGLE, tf32=True).block(
        "interest evolution", 1024, 20, 63001, 128, training=True
    ),
    Sized(multinomial_autoencoder, _users, (9, 31, 6, 3), SINGLE, tf32=True).block(
        "multinomial autoencoder", 500, 20108, 600, 200, training=True
    ),
    Sized(caser, _caser, (4, 3, 9, 5, 6), SINGLE, tf32=True).block("caser", 4096, 5, 30011, 50003, 50, training=True),
    Sized(session_graphs, _sessions, (3, 4, 9, 6), SINGLE, tf32=True).block(
        "session graphs", 512, 19, 43098, 100, training=True
    ),
    Sized(neural_collaborations, _collaborations, (9, 7, 8, 4), SINGLE, tf32=True).block(
        "neural collaborations", 65536, 138493, 26744, 32, training=True
    ),
    Sized(typed_attention, _typed, (9, 20, 2, 3, 2, 4), SINGLE, tf32=True).block(
        "typed attention", 11001, 80003, 4, 5, 8, 32, training=True
    ),
    Sized(
        correct_and_smooth, lambda m, n, e, c: [m(n, c), ids(m, c, n), m(n) > 0, ids(m, n, e), ids(m, n, e)], (9, 30, 4), SINGLE
    ).block("correct and smooth", 100003, 1000001, 40),
    Sized(aligned_rows, _aligned, (2, 5, 64, 8), HALF).block("aligned rows", 128, 257, 256, 128, training=True),
    Sized(linkage, lambda m, n, k: [(ids(m, 4, n, k) - 1).to(torch.int8), m(k)], (30, 7), SINGLE).block("linkage", 5003, 4001),
    Sized(mixed_values, _values, (4, 3, 3, 4, 6, 5), SINGLE, tf32=True).block(
        "mixed values", 60, 128, 10, 17, 322, 32, training=True
    ),
    Sized(curiosity, _curious, (3, 12, 4, 4), SINGLE, tf32=True).block("curiosity", 512, 84, 18, 32, training=True),
    Sized(simplicial, _simplicial, (3, 16, 2, 8, 2, 9)).block("simplicial", 4096, 512, 38, 512, 5, 101, training=True),
    Sized(elite_plans, _plans, (2, 20, 3, 4, 2, 8), SINGLE, tf32=True).block("elite plans", 64, 500, 6, 27, 8, 200),
    Sized(dual_averages, _averages, (3, 4, 5), SINGLE).block("dual averages", 4096, 1000, 1000003),
    Sized(covers, lambda m, r, c: [m(r, c), m(r, c), m(r).float(), m(c).float(), m(r, c).float()], (5, 7)).block(
        "covers", 30522, 768
    ),
    Sized(silhouettes, lambda m, n, d, k: [m(n, d), ids(m, k, n), m(k)], (30, 5, 4), SINGLE).block("silhouettes", 7001, 64, 37),
    Sized(mixed_topics, lambda m, n, v, k: [(m(n, v).abs() * 2).to(torch.uint8), m(k, v), m(n, k)], (5, 12, 3), SINGLE).block(
        "mixed topics", 1000, 20003, 50
    ),
    Sized(
        count_sketch, lambda m, d, n, q: [ids(m, 1000003, n), m(n), ids(m, 2**24, d), ids(m, 1000003, q)], (3, 90, 20), SINGLE
    ).block("count sketch", 5, 2000003, 100003),
    Sized(exposures, _book, (3, 41, 9), SINGLE).block("exposures", 20, 65537, 12, training=True),
)
