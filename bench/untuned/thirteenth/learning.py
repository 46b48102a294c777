"""Whole models and losses of recommendation, graphs, control, series, images and tables, an update, data, metrics."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, Sized, ids, weight

SINGLE = torch.float32


# ---- recommendation -------------------------------------------------------------------------------------------------------


def dlrm(dense: Tensor, at: Tensor, offsets: Tensor, clicks: Tensor, *w: Tensor) -> Tensor:
    """DLRM whole: layers of numbers, bags of each feature, dots of all pairs, layers, a loss of clicks."""
    x, tables = dense, w[12:]
    for k in range(0, 6, 2):
        x = F.relu(F.linear(x, w[k], w[k + 1]))
    bags = [F.embedding_bag(at[k], tables[k], offsets[k], mode="sum") for k in range(len(tables))]
    t = torch.cat([x, *bags], dim=1).view(x.shape[0], -1, x.shape[1])
    z = torch.bmm(t, t.transpose(1, 2))
    i, j = torch.tril_indices(z.shape[1], z.shape[2], offset=-1, device=x.device)
    y = torch.cat([x, z[:, i, j]], dim=1)
    for k in range(6, 10, 2):
        y = F.relu(F.linear(y, w[k], w[k + 1]))
    return F.binary_cross_entropy_with_logits(F.linear(y, w[10], w[11])[:, 0], (clicks > 0.5).to(y.dtype))


def interest_network(item: Tensor, history: Tensor, clicks: Tensor, table: Tensor, alpha: Tensor, *w: Tensor) -> Tensor:
    """DIN whole: an embedding of items, a network on each pair of history and target, Dice as activation, a loss."""

    def dice(y: Tensor, k: int) -> Tensor:
        p = torch.sigmoid((y - y.mean(0)) / torch.sqrt(y.var(0, unbiased=False) + 1e-8))
        return p * y + (1 - p) * alpha[k, : y.shape[-1]] * y

    target, past = F.embedding(item, table), F.embedding(history, table)
    query = target[:, None].expand_as(past)
    y = torch.cat([query, past, query - past, query * past], dim=-1).flatten(0, 1)
    y = torch.sigmoid(F.linear(torch.sigmoid(F.linear(y, w[0], w[1])), w[2], w[3]))
    scores = F.linear(y, w[4]).view(history.shape) / math.sqrt(table.shape[1])
    scores = torch.where(history > 0, scores, -(2**31) + 1.0)
    interest = torch.bmm(F.softmax(scores, dim=-1)[:, None], past)[:, 0]
    y = torch.cat([interest, target, interest * target], dim=1)
    y = dice(F.linear(dice(F.linear(y, w[5], w[6]), 0), w[7], w[8]), 1)
    return F.binary_cross_entropy_with_logits(F.linear(y, w[9])[:, 0], (clicks > 0).to(y.dtype))


def sasrec(seen: Tensor, after: Tensor, wrong: Tensor, table: Tensor, positions: Tensor, *w: Tensor) -> Tensor:
    """SASRec whole: two layers with norms of the queries alone, feed-forward parts as convolutions of one, padding zeroed."""
    norms, wqkv, wo, convs, bias, last = w
    _b, s = seen.shape
    d = table.shape[1]
    real = (seen != 0)[..., None].to(table.dtype)
    x = (F.embedding(seen, table, padding_idx=0) * d**0.5 + positions[:s]) * real
    for k in range(2):
        q = F.layer_norm(x, (d,), norms[k, 0], norms[k, 1], 1e-8)
        wq, wk, wv = wqkv[k]
        y = F.scaled_dot_product_attention(F.linear(q, wq), F.linear(x, wk), F.linear(x, wv), is_causal=True)
        x = q + F.linear(y, wo[k])
        x = F.layer_norm(x, (d,), norms[k, 2], norms[k, 3], 1e-8)
        y = F.conv1d(x.transpose(-1, -2), convs[k, 0, :, :, None], bias[k, 0])
        y = F.conv1d(F.relu(y), convs[k, 1, :, :, None], bias[k, 1]).transpose(-1, -2)
        x = (y + x) * real
    x = F.layer_norm(x, (d,), last[0], last[1], 1e-8)
    good, bad = (x * F.embedding(after, table)).sum(-1), (x * F.embedding(wrong, table)).sum(-1)
    mask = (after != 0).to(x.dtype)
    loss = F.binary_cross_entropy_with_logits(good, torch.ones_like(good), reduction="none")
    loss = loss + F.binary_cross_entropy_with_logits(bad, torch.zeros_like(bad), reduction="none")
    return (loss * mask).sum() / mask.sum()


def layered_extraction(x: Tensor, labels: Tensor, *w: Tensor) -> Tensor:
    """PLE: experts of two tasks and shared ones at two levels, gates of tasks see their own and the shared experts."""
    e1, e2, g1, shared, g2, t1, t2 = w
    inputs = [x, x, x]
    for experts, gates in ((e1, g1), (e2, g2)):
        made = [F.relu(torch.einsum("bd,kod->bko", inputs[k], experts[k])) for k in range(3)]
        seen = [torch.cat([made[0], made[2]], 1), torch.cat([made[1], made[2]], 1), torch.cat(made, 1)]
        mixes = [F.softmax(F.linear(inputs[k], gates[k]), dim=-1) for k in range(2)]
        mixes.append(F.softmax(F.linear(inputs[2], shared if experts is e1 else shared[:, : e1.shape[2]]), dim=-1))
        inputs = [torch.bmm(p[:, None], y)[:, 0] for p, y in zip(mixes, seen, strict=True)]
    click, buy = (F.linear(F.relu(F.linear(inputs[k], t1[k])), t2[k])[:, 0].sigmoid() for k in range(2))
    want = (labels > 0).to(x.dtype)
    both = click * buy
    return F.binary_cross_entropy(click, want[0]) + F.binary_cross_entropy(both, want[0] * want[1])


# ---- graphs ---------------------------------------------------------------------------------------------------------------


def equivariant(h: Tensor, x: Tensor, source: Tensor, target: Tensor, *w: Tensor) -> Tensor:
    """EGNN: three layers of messages by squared distances, moved coordinates, sums at nodes; a loss of both."""
    e1, e2, c1, c2, n1, n2 = w
    n, d = h.shape
    for k in range(3):
        far = x[source] - x[target]
        radial = far.square().sum(1, keepdim=True)
        m = F.silu(F.linear(torch.cat([h[source], h[target], radial], dim=1), e1[k]))
        m = F.silu(F.linear(m, e2[k]))
        push = far / (radial.sqrt() + 1.0) * F.linear(F.silu(F.linear(m, c1[k])), c2[k])
        moved = torch.zeros_like(x).index_add_(0, source, push)
        count = torch.zeros(n, 1, dtype=x.dtype, device=x.device).index_add_(0, source, torch.ones_like(radial))
        x = x + moved / count.clamp(min=1)
        total = h.new_zeros(n, d).index_add_(0, source, m)
        h = h + F.linear(F.silu(F.linear(torch.cat([h, total], dim=1), n1[k])), n2[k])
    return h.square().mean() + x.square().mean()


def schnet(kind: Tensor, place: Tensor, edges: Tensor, molecule: Tensor, energy: Tensor, *w: Tensor) -> Tensor:
    """SchNet: fifty Gaussians of a distance, filters with a cutoff, three interactions, energies of molecules."""
    table, f1, f2, l1, l2, l3, out, last = w
    i, j = edges
    far = (place[i] - place[j]).square().sum(-1).clamp(min=1e-6).sqrt()
    centres = torch.linspace(0.0, 5.0, f1.shape[2], device=far.device)
    wide = torch.exp(-0.5 / (centres[1] - centres[0]) ** 2 * (far[:, None] - centres) ** 2).to(place.dtype)
    cut = 0.5 * (torch.cos(far * math.pi / 5.0) + 1.0) * (far < 5.0)

    def ssp(y: Tensor) -> Tensor:
        return F.softplus(y) - math.log(2.0)

    x = F.embedding(kind, table)
    for k in range(3):
        filters = F.linear(ssp(F.linear(wide, f1[k])), f2[k]) * cut[:, None]
        y = F.linear(x, l1[k])[j] * filters
        y = torch.zeros_like(x).index_add(0, i, y)
        x = x + F.linear(ssp(F.linear(y, l2[k])), l3[k])
    y = F.linear(ssp(F.linear(x, out)), last)[:, 0]
    return F.mse_loss(torch.zeros_like(energy).index_add(0, molecule, y), energy)


def temporal_graph(memory: Tensor, time: Tensor, edges: Tensor, around: Tensor, feature: Tensor, *w: Tensor) -> Tensor:
    """TGN: cosines of time, the latest message of each node through a GRU's gates, attention to ten others, a link's loss."""
    freq, phase, wi, wh, bias, wq, wkv, head = w
    n, d = memory.shape
    source, target = edges
    now = time[: source.shape[0]].abs()
    message = torch.cat([memory[source], memory[target], feature, torch.cos(now[:, None] * freq + phase)], dim=1)
    latest = torch.full((n,), -1.0, dtype=now.dtype, device=now.device).scatter_reduce(0, source, now.detach(), "amax")
    order = torch.arange(source.shape[0], device=source.device)
    is_last = now.detach() == latest[source]
    index = torch.full((n,), -1, dtype=torch.long, device=source.device)
    index = index.scatter_reduce(0, source, torch.where(is_last, order, -1), "amax")
    gi = F.linear(message[index.clamp(min=0)], wi, bias)
    r, z, c = gi.chunk(3, 1)
    hr, hz, hc = F.linear(memory, wh).chunk(3, 1)
    z = torch.sigmoid(z + hz)
    new = (1 - z) * torch.tanh(c + torch.sigmoid(r + hr) * hc) + z * memory
    memory = torch.where(index[:, None] >= 0, new, memory)
    far = (now[:, None] - time[around % time.shape[0]].abs()).abs()
    near = torch.cat([memory[around], torch.cos(far[..., None] * freq + phase)], dim=-1)
    q = F.linear(torch.cat([memory[source], torch.cos(phase).expand(source.shape[0], -1)], dim=-1), wq)
    k, v = F.linear(near, wkv).chunk(2, dim=-1)
    p = F.softmax(torch.einsum("bd,bnd->bn", q, k) * d**-0.5, dim=-1)
    y = torch.einsum("bn,bnd->bd", p, v) + memory[source]
    good, bad = (y * F.linear(memory[target], head)).sum(-1), (y * F.linear(memory[target.roll(1)], head)).sum(-1)
    return F.softplus(-good).mean() + F.softplus(bad).mean()


def gat(x: Tensor, edges: Tensor, labels: Tensor, w1: Tensor, a1: Tensor, w2: Tensor, a2: Tensor) -> Tensor:
    """GAT on citations: eight heads, then one head of classes, softmaxes of a node's edges, a loss of the labelled nodes."""
    source, target = edges
    n = x.shape[0]

    def layer(x: Tensor, w: Tensor, a: Tensor) -> Tensor:
        h = F.linear(x, w).view(n, a.shape[1], -1)
        from_, to = (h * a[0]).sum(-1), (h * a[1]).sum(-1)
        e = F.leaky_relu(from_[source] + to[target], 0.2)
        at = target[:, None].expand_as(e)
        top = torch.full_like(from_, -math.inf).scatter_reduce(0, at, e.detach(), "amax")
        e = torch.exp(e - top[target])
        total = torch.zeros_like(from_).scatter_add(0, at, e)
        e = e / (total[target] + 1e-16)
        return torch.zeros_like(h).index_add(0, target, h[source] * e[..., None])

    x = F.elu(layer(x, w1, a1).flatten(1))
    return F.cross_entropy(layer(x, w2, a2).mean(1), labels, ignore_index=-1)


# ---- control --------------------------------------------------------------------------------------------------------------


def _layers(x: Tensor, w: tuple[Tensor, ...]) -> Tensor:
    """ReLU between the layers, weights and biases in turn."""
    for k in range(0, len(w) - 2, 2):
        x = F.relu(F.linear(x, w[k], w[k + 1]))
    return F.linear(x, w[-2], w[-1])


def soft_actor(states: Tensor, acts: Tensor, rest: Tensor, noise: Tensor, log_alpha: Tensor, *w: Tensor) -> Tensor:
    """SAC whole: squashed actions with densities, two critics and their targets, the actor's and the temperature's loss."""
    actor, one, two, old_one, old_two = (w[6 * k : 6 * k + 6] for k in range(5))
    reward, go_on = rest[0].detach(), (rest[1] > -2).to(rest.dtype)

    def sample(s: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = _layers(s, actor).chunk(2, -1)
        log_std = -5 + 0.5 * 7 * (torch.tanh(log_std) + 1)
        u = mean + log_std.exp() * eps
        log_p = -0.5 * ((u - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)
        log_p = log_p - 2 * (math.log(2.0) - u - F.softplus(-2 * u))
        return torch.tanh(u), log_p.sum(-1)

    def q(net: tuple[Tensor, ...], s: Tensor, a: Tensor) -> Tensor:
        return _layers(torch.cat([s, a], 1), net)[:, 0]

    alpha = log_alpha.exp().detach()
    with torch.no_grad():
        after, log_p = sample(states[1], noise[0])
        goal = torch.min(q(old_one, states[1], after), q(old_two, states[1], after)) - alpha * log_p
        goal = reward + 0.99 * go_on * goal
    critics = F.mse_loss(q(one, states[0], acts), goal) + F.mse_loss(q(two, states[0], acts), goal)
    chosen, log_p = sample(states[0], noise[1])
    frozen = [tuple(t.detach() for t in net) for net in (one, two)]
    policy = (alpha * log_p - torch.min(q(frozen[0], states[0], chosen), q(frozen[1], states[0], chosen))).mean()
    return critics + policy - (log_alpha.exp() * (log_p.detach() - acts.shape[1])).mean()


def dueling(frames: Tensor, acts: Tensor, rest: Tensor, now: Tensor, *w: Tensor) -> Tensor:
    """Double DQN on bytes: three convolutions, a value and advantages, the target network's value of the best action, Huber."""
    nets = (w[:5], w[5:])

    def values(x: Tensor, net: tuple[Tensor, ...]) -> Tensor:
        x = x.to(rest.dtype) / 255.0
        x = F.relu(F.conv2d(x, net[0], stride=4))
        x = F.relu(F.conv2d(x, net[1], stride=2))
        x = F.relu(F.conv2d(x, net[2])).flatten(1)
        x = F.relu(F.linear(x, net[3]))
        y = F.linear(x, net[4])
        return y[:, :1] + y[:, 1:] - y[:, 1:].mean(1, keepdim=True)

    q = values(frames[:, :4], nets[0]).gather(1, acts[:, None])[:, 0]
    with torch.no_grad():
        best = values(frames[:, 1:], nets[0]).argmax(1, keepdim=True)
        goal = rest[0].clamp(-1, 1) + 0.99 * (rest[1] > -2) * values(frames[:, 1:], nets[1]).gather(1, best)[:, 0]
    loss = F.smooth_l1_loss(q, goal, reduction="none")
    return (loss * now.detach().abs()).mean()


def impala(logits: Tensor, value: Tensor, old: Tensor, acts: Tensor, reward: Tensor, last: Tensor) -> Tensor:
    """IMPALA's whole loss: corrected returns by a loop backward, policy gradients, a baseline and an entropy, all summed."""
    log = F.log_softmax(logits, dim=-1)
    chosen = log.gather(-1, acts[..., None])[..., 0]
    with torch.no_grad():
        before = F.log_softmax(old, dim=-1).gather(-1, acts[..., None])[..., 0]
        rho = torch.exp(chosen - before)
        capped = rho.clamp(max=1.0)
        gamma = 0.99 * (reward.abs() < 2).to(value.dtype)
        after = torch.cat([value[1:], last[None]], 0)
        delta = capped * (reward.clamp(-1, 1) + gamma * after - value)
        acc, made = torch.zeros_like(last), []
        for t in range(reward.shape[0] - 1, -1, -1):
            acc = delta[t] + gamma[t] * capped[t] * acc
            made.append(acc)
        vs = torch.stack(made[::-1]) + value
        gain = capped * (reward.clamp(-1, 1) + gamma * torch.cat([vs[1:], last[None]], 0) - value)
    policy = -(chosen * gain).sum()
    return policy + 0.5 * 0.5 * (vs - value).square().sum() + 0.0006 * (log.exp() * log).sum()


def walking(obs: Tensor, acts: Tensor, old: Tensor, reward: Tensor, log_std: Tensor, *w: Tensor) -> Tensor:
    """PPO of many robots: a critic of all steps, advantages by a loop, a normal policy, clipped losses, a bound on actions."""
    actor, critic = w[:8], w[8:]

    def net(x: Tensor, m: tuple[Tensor, ...]) -> Tensor:
        for k in range(0, 6, 2):
            x = F.elu(F.linear(x, m[k], m[k + 1]))
        return F.linear(x, m[6], m[7])

    value = net(obs, critic)[..., 0]
    with torch.no_grad():
        go_on = (reward > -2).to(value.dtype)
        acc, made = torch.zeros_like(value[0]), []
        for t in range(acts.shape[0] - 1, -1, -1):
            acc = reward[t] * 0.1 + 0.99 * go_on[t] * value[t + 1] - value[t] + 0.99 * 0.95 * go_on[t] * acc
            made.append(acc)
        advantage = torch.stack(made[::-1])
        returns = advantage + value[:-1]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    mean = net(obs[:-1], actor)
    log_p = (-0.5 * ((acts - mean) / log_std.exp()).square() - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)
    ratio = torch.exp((log_p - log_p.detach()) + old.detach() * 0.1)
    policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
    bounds = ((mean - 1.1).clamp(min=0).square() + (mean + 1.1).clamp(max=0).square()).sum(-1).mean()
    entropy = (log_std + 0.5 + 0.5 * math.log(2 * math.pi)).sum()
    return policy + 2 * (returns - value[:-1]).square().mean() + 1e-4 * bounds - 1e-3 * entropy


def world_steps(embed: Tensor, acts: Tensor, first: Tensor, noise: Tensor, deter: Tensor, *w: Tensor) -> Tensor:
    """DreamerV3: six steps of a state with 32 categories of 32, a GRU with a norm, both divergences with free bits."""
    win, wgru, norms, prior, prior_out, post, post_out = w
    b, d = deter.shape
    stoch, loss = torch.zeros(b, 1024, dtype=deter.dtype, device=deter.device), 0.0

    def logits(x: Tensor, hidden: Tensor, out: Tensor, gain: Tensor) -> Tensor:
        x = F.linear(F.silu(F.rms_norm(F.linear(x, hidden), (d,), gain, 1e-4)), out)
        p = 0.99 * F.softmax(x.view(b, 32, 32).float(), dim=-1) + 0.01 / 32
        return torch.log(p)

    def divergence(a: Tensor, c: Tensor) -> Tensor:
        return (a.exp() * (a - c)).sum((-1, -2)).clamp(min=1.0).mean()

    for t in range(acts.shape[0]):
        keep = (first[t] != 0)[:, None].to(deter.dtype)
        deter, stoch = deter * keep, stoch * keep
        x = F.silu(F.rms_norm(F.linear(torch.cat([stoch, acts[t] * keep], 1), win), (d,), norms[0], 1e-4))
        reset, cand, update = F.linear(torch.cat([x, deter], 1), wgru).chunk(3, 1)
        update = torch.sigmoid(update - 1)
        deter = update * torch.tanh(torch.sigmoid(reset) * cand) + (1 - update) * deter
        before = logits(deter, prior, prior_out, norms[1])
        after = logits(torch.cat([deter, embed[t]], 1), post, post_out, norms[2])
        hard = F.one_hot((after + noise[t].detach().float()).argmax(-1), 32).to(after.dtype)
        stoch = (hard + after.exp() - after.exp().detach()).flatten(1).to(deter.dtype)
        loss = loss + 0.5 * divergence(after.detach(), before) + 0.1 * divergence(after, before.detach())
    return loss + 1e-3 * deter.float().square().mean()


# ---- series ---------------------------------------------------------------------------------------------------------------


def patch_tst(x: Tensor, target: Tensor, embed: Tensor, positions: Tensor, *w: Tensor) -> Tensor:
    """PatchTST whole: series normed and cut, two encoders with batch norms and scores passed on, a flat head, values back."""
    wqkv, wo, up, down, norms, head = w
    b, _s, m = x.shape
    d = embed.shape[0]
    mean = x.mean(1, keepdim=True).detach()
    std = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5).detach()
    z = ((x - mean) / std).permute(0, 2, 1)
    z = F.pad(z, (0, 8), mode="replicate").unfold(-1, 16, 8)
    y = F.linear(z, embed).flatten(0, 1) + positions
    scores: Tensor | None = None
    for k in range(2):
        q, key, v = F.linear(y, wqkv[k]).view(b * m, -1, 3, d // 8, 8).permute(2, 0, 3, 1, 4)
        now = q @ key.transpose(-1, -2) * 8**-0.5
        scores = now if scores is None else now + scores
        a = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)
        y = y + F.linear(a, wo[k])
        y = F.batch_norm(y.transpose(1, 2), None, None, norms[k, 0], norms[k, 1], training=True).transpose(1, 2)
        y = y + F.linear(F.gelu(F.linear(y, up[k])), down[k])
        y = F.batch_norm(y.transpose(1, 2), None, None, norms[k, 2], norms[k, 3], training=True).transpose(1, 2)
    y = F.linear(y.view(b, m, -1, d).transpose(2, 3).flatten(2), head).permute(0, 2, 1)
    return F.mse_loss(y * std + mean, target)


def fusion_transformer(x: Tensor, static: Tensor, target: Tensor, embed: Tensor, *w: Tensor) -> Tensor:
    """TFT: each variable's own gated residual network, their weights by another one with a context, quantile losses."""
    v1, v2, vg, vn, s1, sc, s2, sg, skip, last = w
    d = v1.shape[-1]
    y = x[..., None] * embed[:, 0] + embed[:, 1]

    def gate(y: Tensor, eq: str, m: Tensor) -> Tensor:
        return F.glu(torch.einsum(eq, y, m), dim=-1)

    h = torch.einsum("btvd,vde->btve", F.elu(torch.einsum("btvd,vde->btve", y, v1)), v2)
    made = F.layer_norm(y + gate(h, "btvd,vde->btve", vg), (d,), vn[0], vn[1])
    flat = y.flatten(2)
    h = F.linear(F.elu(F.linear(flat, s1) + F.linear(static, sc)[:, None]), s2)
    h = F.linear(flat, skip) + F.glu(F.linear(h, sg), dim=-1)
    share = F.softmax(F.layer_norm(h, h.shape[-1:]), dim=-1)
    mixed = (made * share[..., None]).sum(2)
    out = F.linear(mixed, last)
    q = torch.tensor([0.1, 0.5, 0.9], device=x.device, dtype=x.dtype)
    error = target[..., None] - out
    return torch.max(q * error, (q - 1) * error).sum(-1).mean()


def deep_ar(counts: Tensor, features: Tensor, series: Tensor, table: Tensor, *w: Tensor) -> Tensor:
    """DeepAR: two LSTMs over scaled counts with an embedding of the series, negative binomial likelihoods of each step."""
    w1, b1, w2, b2, head = w
    counts = (counts.abs() * 10).detach().floor()
    b, s = counts.shape
    scale = 1 + counts.mean(1, keepdim=True)
    own = F.embedding(series, table)
    d = w2.shape[0] // 4
    h1, c1, h2, c2 = (torch.zeros(b, d, dtype=own.dtype, device=own.device) for _ in range(4))
    outs = []
    for t in range(1, s):
        x = torch.cat([counts[:, t - 1 : t] / scale, features[:, t], own], 1)
        i, f, g, o = F.linear(torch.cat([x, h1], 1), w1, b1).chunk(4, 1)
        c1 = torch.sigmoid(f) * c1 + torch.sigmoid(i) * torch.tanh(g)
        h1 = torch.sigmoid(o) * torch.tanh(c1)
        i, f, g, o = F.linear(torch.cat([h1, h2], 1), w2, b2).chunk(4, 1)
        c2 = torch.sigmoid(f) * c2 + torch.sigmoid(i) * torch.tanh(g)
        h2 = torch.sigmoid(o) * torch.tanh(c2)
        outs.append(h2)
    mean, shape = F.softplus(F.linear(torch.stack(outs, 1), head)).unbind(-1)
    mean, shape, z = mean * scale, shape / scale.sqrt() + 1e-3, counts[:, 1:]
    r = 1 / shape
    log_p = torch.lgamma(z + r) - torch.lgamma(z + 1) - torch.lgamma(r)
    log_p = log_p - r * torch.log1p(shape * mean) + z * (torch.log(shape * mean + 1e-8) - torch.log1p(shape * mean))
    return -log_p.mean()


def sparse_queries(q: Tensor, k: Tensor, v: Tensor, drawn: Tensor) -> Tensor:
    """Informer: how peaked queries are on drawn keys, the most peaked attend, all others take the running sum of values."""
    b, h, s, d = q.shape
    near = k[:, :, drawn]
    scores = torch.matmul(q[:, :, :, None], near.transpose(-2, -1))[:, :, :, 0]
    peaked = scores.max(-1)[0] - scores.sum(-1) / s
    top = peaked.topk(drawn.shape[1], sorted=False)[1]
    rows = q[torch.arange(b, device=q.device)[:, None, None], torch.arange(h, device=q.device)[None, :, None], top]
    scores = torch.matmul(rows, k.transpose(-2, -1)) / math.sqrt(d)
    hidden = torch.arange(s, device=q.device) > top[..., None]
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
    context = v.cumsum(dim=-2)
    at = top[..., None].expand(-1, -1, -1, d)
    return context.scatter(2, at, torch.matmul(p, v)).transpose(1, 2)


def read_text(text: Tensor, lengths: Tensor, labels: Tensor, table: Tensor, *w: Tensor) -> Tensor:
    """A classifier of sentences: a GRU of each direction with padding kept, maxima and means over time, a layer, a loss."""
    wi, bi, wh, bh, out = w
    b, s = text.shape
    d = wh.shape[2]
    gates = torch.einsum("bse,kge->kbsg", F.embedding(text, table, padding_idx=0), wi) + bi[:, None, None]
    made = []
    for k in range(2):
        h, steps = torch.zeros(b, d, dtype=table.dtype, device=table.device), [0] * s
        for t in range(s) if k == 0 else range(s - 1, -1, -1):
            r, z, n = gates[k, :, t].chunk(3, 1)
            hr, hz, hn = F.linear(h, wh[k], bh[k]).chunk(3, 1)
            z = torch.sigmoid(z + hz)
            new = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
            h = torch.where((t < lengths)[:, None], new, h)
            steps[t] = h
        made.append(torch.stack(steps, 1))
    y = torch.cat(made, -1)
    real = (torch.arange(s, device=y.device) < lengths[:, None])[..., None]
    y = torch.cat([y.masked_fill(~real, -math.inf).amax(1), (y * real).sum(1) / lengths[:, None]], -1)
    return F.cross_entropy(F.linear(y, out), labels)


# ---- densities ------------------------------------------------------------------------------------------------------------


def face_autoencoder(x: Tensor, noise: Tensor, *w: Tensor) -> Tensor:
    """A variational autoencoder of faces: strided convolutions with batch norms, transposed ones back, likelihood and bound."""
    c1, c2, c3, n1, n2, n3, head, back, d1, d2, d3 = w
    b = x.shape[0]

    def normed(y: Tensor, n: Tensor) -> Tensor:
        return F.leaky_relu(F.batch_norm(y, None, None, n[0], n[1], training=True))

    want = torch.sigmoid(x)
    y = normed(F.conv2d(want, c1, stride=2, padding=1), n1)
    y = normed(F.conv2d(y, c2, stride=2, padding=1), n2)
    y = normed(F.conv2d(y, c3, stride=2, padding=1), n3)
    side = y.shape[-1]
    mean, log_var = F.linear(y.flatten(1), head).chunk(2, 1)
    z = mean + torch.exp(0.5 * log_var) * noise
    y = F.leaky_relu(F.linear(z, back)).view(b, -1, side, side)
    y = F.leaky_relu(F.conv_transpose2d(y, d1, stride=2, padding=1))
    y = F.leaky_relu(F.conv_transpose2d(y, d2, stride=2, padding=1))
    y = F.conv_transpose2d(y, d3, stride=2, padding=1)
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
    return F.binary_cross_entropy_with_logits(y, want.detach(), reduction="sum") / b + kl


def glow_step(x: Tensor, act: Tensor, lower: Tensor, upper: Tensor, log_s: Tensor, *w: Tensor) -> Tensor:
    """Glow: squeezed, scaled by channel, mixed by a matrix from its LU parts, a coupling by three convolutions, bits."""
    c1, c2, c3 = w
    y = F.pixel_unshuffle(x, 2)
    c, n = y.shape[1], y.shape[2] * y.shape[3]
    y = (y + act[0].view(1, c, 1, 1)) * act[1].exp().view(1, c, 1, 1)
    log_det = n * act[1].sum()
    matrix = (lower.tril(-1) + torch.eye(c, device=x.device, dtype=x.dtype)) @ (upper.triu(1) + torch.diag(log_s.exp()))
    y = F.conv2d(y, matrix.flip(0)[:, :, None, None])
    log_det = log_det + n * log_s.sum()
    a, b = y.chunk(2, 1)
    h = F.relu(F.conv2d(F.relu(F.conv2d(a, c1, padding=1)), c2))
    shift, scale = F.conv2d(h, c3, padding=1).unflatten(1, (-1, 2)).unbind(2)
    scale = torch.sigmoid(scale + 2.0)
    b = (b + shift) * scale
    z = torch.cat([a, b], 1)
    log_p = -0.5 * (z.square() + math.log(2 * math.pi)).sum((1, 2, 3)) + scale.log().sum((1, 2, 3)) + log_det
    return -(log_p / (math.log(2.0) * c * n)).mean()


# ---- tables ---------------------------------------------------------------------------------------------------------------


def tab_net(x: Tensor, labels: Tensor, shared: Tensor, own: Tensor, *w: Tensor) -> Tensor:
    """TabNet: three steps with masks by sparsemax and what is left of features, gated blocks with norms of 128 rows, a loss."""
    shared2, own2, masks, out = w
    b, n = x.shape
    d = own.shape[1] // 2

    def glu(y: Tensor, m: Tensor) -> Tensor:
        y = F.linear(y, m).view(-1, min(128, b), 2 * d)
        mean, var = y.mean(1, keepdim=True), y.var(1, unbiased=False, keepdim=True)
        return F.glu(((y - mean) * torch.rsqrt(var + 1e-5)).view(b, 2 * d), dim=-1)

    def features(y: Tensor, k: int) -> Tensor:
        y = glu(y, shared)
        y = (y + glu(y, shared2)) * math.sqrt(0.5)
        y = (y + glu(y, own[k])) * math.sqrt(0.5)
        return (y + glu(y, own2[k])) * math.sqrt(0.5)

    def sparsemax(y: Tensor) -> Tensor:
        y = y - y.max(1, keepdim=True)[0]
        ordered = torch.sort(y, dim=1, descending=True)[0]
        rank = torch.arange(1, n + 1, device=y.device, dtype=y.dtype)
        total = ordered.cumsum(1) - 1
        support = (rank * ordered > total).sum(1, keepdim=True)
        return torch.clamp(y - total.gather(1, support - 1) / support.to(y.dtype), min=0)

    x = F.batch_norm(x, None, None, training=True)
    prior, made, sparse = torch.ones_like(x), 0.0, 0.0
    a = features(x, 0)[:, d // 2 :]
    for k in range(1, own.shape[0]):
        mask = sparsemax(F.batch_norm(F.linear(a, masks[k - 1]), None, None, training=True) * prior)
        sparse = sparse + (mask * torch.log(mask + 1e-15)).sum(1).mean()
        prior = prior * (1.3 - mask)
        y = features(mask * x, k)
        made, a = made + F.relu(y[:, : d // 2]), y[:, d // 2 :]
    return F.cross_entropy(F.linear(made, out), labels) - 1e-3 * sparse / (own.shape[0] - 1)


def prepared_rows(numbers: Tensor, codes: Tensor, edges: Tensor, holes: Tensor) -> Tensor:
    """Rows made ready: gaps filled by medians and flagged, tails cut at quantiles, logarithms, standardised, bins one-hot."""
    x = torch.where(holes < 1.5, numbers, math.nan)
    gap = torch.isnan(x)
    x = torch.where(gap, torch.nanmedian(x, dim=0).values, x)
    low, high = torch.quantile(x, torch.tensor([0.01, 0.99], dtype=x.dtype, device=x.device), dim=0)
    x = x.clamp(low, high)
    x = torch.sign(x) * torch.log1p(x.abs())
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    bins = F.one_hot(torch.bucketize(x[:, 0].contiguous(), edges.sort().values), edges.shape[0] + 1)
    kinds = F.one_hot((codes * 2654435761 % 4294967296) % 16, 16).flatten(1)
    return torch.cat([x, gap.to(x.dtype), bins.to(x.dtype), kinds.to(x.dtype)], 1)


# ---- an optimiser's step, metrics -----------------------------------------------------------------------------------------


def training_update(count: Tensor, *tensors: Tensor) -> None:
    """What ends a step: the norm of all gradients, clipping, a warm cosine rate, AdamW by kinds, a moving average; in place."""
    n = len(tensors) // 5
    params, grads, firsts, seconds, averages = (tensors[k * n : k * n + n] for k in range(5))
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in grads]))
    clip = (1.0 / (norm + 1e-6)).clamp(max=1.0)
    count.add_(1)
    t = count
    rate = 3e-4 * torch.where(t < 2000, t / 2000, 0.1 + 0.45 * (1 + torch.cos(math.pi * ((t - 2000) / 98000).clamp(max=1))))
    one, two = 1 - 0.9**t, 1 - 0.95**t
    keep = torch.minimum(torch.full_like(t, 0.999), (1 + t) / (10 + t))
    for p, g, m, v, e in zip(params, grads, firsts, seconds, averages, strict=True):
        g = g.to(m.dtype) * clip
        m.lerp_(g, 0.1)
        v.mul_(0.95).addcmul_(g, g, value=0.05)
        if p.dim() > 1:
            p.mul_(1 - rate * 0.1)
        p.sub_(rate * (m / one) / ((v.abs() / two).sqrt() + 1e-8))
        e.lerp_(p.to(e.dtype), 1 - keep)


def epoch_metrics(logits: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    """What an evaluation prints: accuracies of one and five, each class's scores from a confusion, calibration in 15 bins."""
    n, c = logits.shape
    p, found = logits.softmax(-1).max(-1)
    right = (found == labels).float()
    five = (logits.topk(5, dim=-1).indices == labels[:, None]).any(-1).float().mean()
    confusion = torch.zeros(c * c, dtype=torch.float32, device=p.device).index_add(
        0, labels * c + found, torch.ones_like(right)
    )
    confusion = confusion.view(c, c)
    hit = confusion.diagonal()
    precision, recall = hit / confusion.sum(0).clamp(min=1), hit / confusion.sum(1).clamp(min=1)
    f1 = (2 * precision * recall / (precision + recall).clamp(min=1e-9)).mean()
    which = torch.clamp((p * 15).long(), max=14)
    size, sure, true = (torch.zeros(15, device=p.device).index_add(0, which, t.float()) for t in (torch.ones_like(p), p, right))
    off = ((sure - true).abs() / n).sum()
    return right.mean(), five, f1, recall.mean(), off, size / n, F.cross_entropy(logits, labels)


def ranked_metrics(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of several binary tasks: areas under both curves by one sort, the threshold with the largest F1."""
    ordered, order = scores.sort(dim=1, descending=True, stable=True)
    y = (labels > 0.5).to(torch.float32).gather(1, order)
    hits = y.cumsum(1)
    misses = (1 - y).cumsum(1)
    all_hits, all_misses = hits[:, -1:].clamp(min=1), misses[:, -1:].clamp(min=1)
    last = F.pad(ordered[:, 1:] != ordered[:, :-1], (0, 1), value=True)
    hits_at = torch.where(last, hits, 0).cummax(1).values
    misses_at = torch.where(last, misses, 0).cummax(1).values
    tpr, fpr = F.pad(hits_at / all_hits, (1, 0)), F.pad(misses_at / all_misses, (1, 0))
    area = torch.trapezoid(tpr, fpr, dim=1)
    precision = hits / torch.arange(1, y.shape[1] + 1, device=y.device)
    average = (precision * y).sum(1) / all_hits[:, 0]
    f1 = 2 * hits / (torch.arange(1, y.shape[1] + 1, device=y.device) + all_hits)
    return area, average, ordered.gather(1, f1.argmax(1, keepdim=True))[:, 0]


# ---- their sizes ----------------------------------------------------------------------------------------------------------


def _biased(m: Make, *sizes: int) -> list[Tensor]:
    """A weight and a bias for each layer between the sizes."""
    return [t for i, o in itertools.pairwise(sizes) for t in (weight(m, o, i), m(o) * 0.1)]


def _dlrm(m: Make, b: int, n: int, hot: int, rows: int, d: int) -> list[Tensor]:
    offsets = (torch.arange(b, device=m(1).device) * hot).expand(n, b).contiguous()
    pairs = d + (n + 1) * n // 2
    bottom, top = _biased(m, 13, 4 * d, 2 * d, d), _biased(m, pairs, 8 * d, 4 * d, 1)
    return [m(b, 13), ids(m, rows, n, b * hot), offsets, m(b), *bottom, *top, *(m(rows, d) * 0.1 for _ in range(n))]


def _interest(m: Make, b: int, s: int, rows: int, d: int) -> list[Tensor]:
    first = [*_biased(m, 4 * d, 80, 40), weight(m, 1, 40)]
    last = [*_biased(m, 3 * d, 200, 80), weight(m, 1, 80)]
    return [ids(m, rows, b), ids(m, rows, b, s) * (ids(m, 3, b, s) > 0), m(b), m(rows, d) * 0.3, m(2, 200), *first, *last]


def _sasrec(m: Make, b: int, s: int, rows: int, d: int) -> list[Tensor]:
    real = ids(m, 4, b, s) > 0
    rows_of = [ids(m, rows, b, s) * real for _ in range(3)]
    norms = m(2, 4, d) * 0.1 + 1
    square = [m(2, 3, d, d) * d**-0.5, m(2, d, d) * d**-0.5, m(2, 2, d, d) * d**-0.5, m(2, 2, d) * 0.1]
    return [*rows_of, m(rows, d) * d**-0.5, m(s, d) * 0.1, norms, *square, m(2, d) * 0.1 + 1]


def _extraction(m: Make, b: int, d: int, e: int, o: int) -> list[Tensor]:
    gates = [m(2, 2 * e, d) * d**-0.5, m(3 * e, d) * d**-0.5, m(2, 2 * e, o) * o**-0.5]
    experts = [m(3, e, o, d) * d**-0.5, m(3, e, o, o) * o**-0.5]
    return [m(b, d), m(2, b), *experts, *gates, m(2, 64, o) * o**-0.5, m(2, 1, 64) * 0.1]


def _equivariant(m: Make, n: int, e: int, d: int) -> list[Tensor]:
    s = d**-0.5
    nets = [m(3, d, 2 * d + 1) * s * 0.7, m(3, d, d) * s, m(3, d, d) * s, m(3, 1, d) * s * 0.1]
    return [m(n, d), m(n, 3), ids(m, n, e), ids(m, n, e), *nets, m(3, d, 2 * d) * s * 0.7, m(3, d, d) * s]


def _schnet(m: Make, n: int, e: int, k: int, d: int) -> list[Tensor]:
    s = d**-0.5
    nets = [m(3, d, 50) * 50**-0.5, *(m(3, d, d) * s for _ in range(4)), weight(m, d // 2, d), weight(m, 1, d // 2)]
    return [ids(m, 10, n), m(n, 3) * 2, ids(m, n, 2, e), ids(m, k, n).sort().values, m(k), m(10, d), *nets]


def _temporal(m: Make, n: int, e: int, k: int, d: int, f: int) -> list[Tensor]:
    near = [m(d), m(d), weight(m, 3 * d, 3 * d + f), weight(m, 3 * d, d), m(3 * d) * 0.1]
    nets = [weight(m, d, 2 * d), weight(m, 2 * d, 2 * d), weight(m, d, d)]
    return [m(n, d), m(max(n, e)), ids(m, n, 2, e), ids(m, n, e, k), m(e, f), *near, *nets]


def _gat(m: Make, n: int, e: int, f: int, h: int, d: int, c: int) -> list[Tensor]:
    labels = torch.where(ids(m, 5, n) == 0, ids(m, c, n), -1)
    return [m(n, f), ids(m, n, 2, e), labels, weight(m, h * d, f), m(2, h, d), weight(m, c, h * d), m(2, 1, c)]


def _soft(m: Make, b: int, o: int, a: int, d: int) -> list[Tensor]:
    nets = [*_biased(m, o, d, d, 2 * a), *(t for _ in range(4) for t in _biased(m, o + a, d, d, 1))]
    return [m(2, b, o), m(b, a).tanh(), m(2, b), m(2, b, a), m(1) * 0.1, *nets]


def _dueling(m: Make, b: int, side: int, a: int, d: int) -> list[Tensor]:
    grid = ((side // 4 - 1) // 2 - 1) - 2
    net = [(32, 4, 8, 8), (64, 32, 4, 4), (64, 64, 3, 3), (d, 64 * grid * grid), (a + 1, d)]
    frames = (m(b, 5, side, side) * 60).abs().to(torch.uint8)
    return [frames, ids(m, a, b), m(2, b), m(b), *(weight(m, *shape) for _ in range(2) for shape in net)]


def _walking(m: Make, t: int, b: int, o: int, a: int, d: int) -> list[Tensor]:
    nets = [*_biased(m, o, 2 * d, d, d // 2, a), *_biased(m, o, 2 * d, d, d // 2, 1)]
    return [m(t + 1, b, o), m(t, b, a), m(t, b), m(t, b), m(a) * 0.1, *nets]


def _world(m: Make, t: int, b: int, e: int, a: int, d: int) -> list[Tensor]:
    nets = [weight(m, d, 1024 + a), weight(m, 3 * d, 2 * d), m(3, d) * 0.1 + 1]
    heads = [weight(m, d, d), weight(m, 1024, d), weight(m, d, d + e), weight(m, 1024, d)]
    return [m(t, b, e), m(t, b, a), ids(m, 9, t, b), m(t, b, 32, 32), m(b, d), *nets, *heads]


def _patches(m: Make, b: int, s: int, c: int, d: int, f: int, o: int) -> list[Tensor]:
    n = (s + 8 - 16) // 8 + 1
    nets = [m(2, 3 * d, d) * d**-0.5, m(2, d, d) * d**-0.5, m(2, f, d) * d**-0.5, m(2, d, f) * f**-0.5]
    return [m(b, s, c), m(b, o, c), m(d, 16) / 4, m(n, d) * 0.1, *nets, m(2, 4, d) * 0.1 + 1, weight(m, o, d * n)]


def _fusion(m: Make, b: int, t: int, v: int, d: int) -> list[Tensor]:
    s = d**-0.5
    own = [m(v, d, d) * s, m(v, d, d) * s, m(v, d, 2 * d) * s, m(2, d) * 0.1 + 1]
    choice = [weight(m, d, v * d), weight(m, d, d), weight(m, d, d), weight(m, 2 * v, d), weight(m, v, v * d)]
    return [m(b, t, v), m(b, d), m(b, t), m(v, 2, d), *own, *choice, weight(m, 3, d)]


def _deep_ar(m: Make, b: int, s: int, f: int, rows: int, e: int, d: int) -> list[Tensor]:
    layers = [weight(m, 4 * d, 1 + f + e + d), m(4 * d) * 0.1, weight(m, 4 * d, 2 * d), m(4 * d) * 0.1]
    return [m(b, s), m(b, s, f), ids(m, rows, b), m(rows, e), *layers, weight(m, 2, d)]


def _reader(m: Make, b: int, s: int, rows: int, e: int, d: int, c: int) -> list[Tensor]:
    gates = [m(2, 3 * d, e) * e**-0.5, m(2, 3 * d) * 0.1, m(2, 3 * d, d) * d**-0.5, m(2, 3 * d) * 0.1]
    return [ids(m, rows, b, s), ids(m, s, b) + 1, ids(m, c, b), m(rows, e), *gates, weight(m, c, 4 * d)]


def _faces(m: Make, b: int, side: int, c: int, z: int) -> list[Tensor]:
    convs = [weight(m, c, 3, 4, 4), weight(m, 2 * c, c, 4, 4), weight(m, 4 * c, 2 * c, 4, 4)]
    norms = [m(2, k * c) * 0.1 + 1 for k in (1, 2, 4)]
    flat = 4 * c * (side // 8) ** 2
    back = [weight(m, 4 * c, 2 * c, 4, 4), weight(m, 2 * c, c, 4, 4), weight(m, c, 3, 4, 4)]
    return [m(b, 3, side, side), m(b, z), *convs, *norms, weight(m, 2 * z, flat), weight(m, flat, z), *back]


def _glow(m: Make, b: int, side: int, c: int, h: int) -> list[Tensor]:
    k = 4 * c
    nets = [weight(m, h, k // 2, 3, 3), weight(m, h, h, 1, 1), weight(m, k, h, 3, 3) * 0.3]
    return [m(b, c, side, side), m(2, k) * 0.1, m(k, k) * k**-0.5, m(k, k) * k**-0.5, m(k) * 0.1, *nets]


def _tab(m: Make, b: int, n: int, d: int, c: int) -> list[Tensor]:
    s = d**-0.5
    return [
        m(b, n),
        ids(m, c, b),
        weight(m, 2 * d, n),
        m(4, 2 * d, d) * s,
        weight(m, 2 * d, d),
        m(4, 2 * d, d) * s,
        m(3, n, d - d // 2) * s,
        weight(m, c, d // 2),
    ]


def _update(m: Make, d: int, v: int) -> list[Tensor]:
    shapes = [(v, d), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,), (d,)]
    count = m(1).abs().float() * 0 + 1000
    return [count, *(m(*s).float() * (0.01 if k else 1) for k in range(5) for s in shapes)]


BLOCKS: tuple[Block, ...] = (
    Sized(dlrm, _dlrm, (4, 3, 2, 9, 4), SINGLE, tf32=True).block("dlrm", 2048, 26, 3, 40011, 128, training=True),
    Sized(interest_network, _interest, (6, 5, 12, 4), SINGLE).block("interest network", 1024, 100, 63001, 64, training=True),
    Sized(sasrec, _sasrec, (2, 6, 15, 8), SINGLE).block("sasrec", 128, 200, 57289, 50, training=True),
    Sized(layered_extraction, _extraction, (5, 8, 2, 8), SINGLE).block("layered extraction", 4000, 499, 4, 499, training=True),
    Sized(equivariant, _equivariant, (7, 20, 8), SINGLE).block("equivariant", 4608, 82944, 64, training=True),
    Sized(schnet, _schnet, (7, 20, 3, 8), SINGLE).block("schnet", 2304, 40001, 128, 128, training=True),
    Sized(temporal_graph, _temporal, (7, 9, 3, 8, 5), SINGLE).block("temporal graph", 9228, 200, 10, 100, 172, training=True),
    Sized(gat, _gat, (7, 20, 9, 2, 4, 3), SINGLE).block("citations", 2708, 13264, 1433, 8, 8, 7, training=True),
    Sized(soft_actor, _soft, (5, 6, 2, 8), SINGLE, tf32=True).block("soft actor", 256, 376, 17, 256, training=True),
    Sized(dueling, _dueling, (2, 36, 3, 8), SINGLE, tf32=True).block("dueling", 256, 84, 18, 512, training=True),
    Sized(
        impala,
        lambda m, t, b, a: [m(t, b, a), m(t, b), m(t, b, a), ids(m, a, t, b), m(t, b), m(b)],
        (5, 3, 4),
        SINGLE,
    ).block("impala", 20, 256, 18, training=True),
    Sized(walking, _walking, (4, 5, 6, 2, 8), SINGLE).block("walking", 24, 4096, 48, 12, 256, training=True),
    Sized(world_steps, _world, (2, 3, 5, 4, 8)).block("world steps", 6, 1024, 4096, 18, 512, training=True),
    Sized(patch_tst, _patches, (3, 40, 2, 16, 24, 4), SINGLE).block("patch tst", 128, 336, 7, 128, 256, 96, training=True),
    Sized(fusion_transformer, _fusion, (2, 3, 4, 8), SINGLE).block("fusion transformer", 64, 168, 12, 160, training=True),
    Sized(deep_ar, _deep_ar, (3, 5, 2, 7, 3, 4), SINGLE).block("deep ar", 256, 25, 4, 370, 20, 40, training=True),
    Sized(
        sparse_queries, lambda m, b, h, s, d, u: [*(m(b, h, s, d) for _ in range(3)), ids(m, s, s, u)], (2, 2, 9, 4, 3)
    ).block("sparse queries", 32, 8, 720, 64, 35, training=True),
    Sized(read_text, _reader, (3, 4, 12, 5, 6, 3)).block("read text", 64, 20, 25002, 300, 256, 2, training=True),
    Sized(face_autoencoder, _faces, (2, 16, 4, 5), SINGLE, tf32=True).block(
        "face autoencoder", 144, 64, 32, 128, training=True
    ),
    Sized(glow_step, _glow, (2, 6, 3, 8), SINGLE, tf32=True).block("glow step", 32, 64, 3, 512, training=True),
    Sized(tab_net, _tab, (6, 7, 8, 3), SINGLE).block("tab net", 16384, 54, 128, 7, training=True),
    Sized(
        prepared_rows,
        lambda m, n, c, k, e: [m(n, c), ids(m, 1000003, n, k), m(e), m(n, c)],
        (31, 3, 2, 5),
        SINGLE,
    ).block("prepared rows", 50001, 29, 6, 32),
    Sized(training_update, _update, (6, 11)).block("training update", 768, 50257),
    Sized(epoch_metrics, lambda m, n, c: [m(n, c) * 3, ids(m, c, n)], (30, 7), SINGLE).block("epoch metrics", 50000, 1000),
    Sized(ranked_metrics, lambda m, t, n: [m(t, n), m(t, n)], (3, 40), SINGLE).block("ranked metrics", 14, 200003),
)
