"""Blocks of pictures: stages, matches, views, warps, augmentation of bytes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Sized, ids, image, weight

SINGLE, HALF = torch.float32, torch.float16


# ---- stages ---------------------------------------------------------------------------------------------------------------


def cascaded_heads(x: Tensor, qkv: Tensor, dw: Tensor, out: Tensor, bias: Tensor) -> Tensor:
    """EfficientViT: each head sees its own channels plus the last head's result, queries through a depthwise convolution."""
    b, _, h, v = x.shape
    parts, y = [], None
    for k, part in enumerate(x.chunk(4, 1)):
        y = part if y is None else y + part
        q, key, value = F.conv2d(y, qkv[k]).split([16, 16, y.shape[1]], 1)
        q = F.conv2d(q, dw[k], padding=2, groups=16)
        scores = q.flatten(2).transpose(-2, -1) @ key.flatten(2) * 0.25 + bias[k]
        y = (value.flatten(2) @ scores.softmax(-1).transpose(-2, -1)).view(b, -1, h, v)
        parts.append(y)
    return x + F.conv2d(F.relu(torch.cat(parts, 1)), out)


def recursive_gates(x: Tensor, w: Tensor, dw: Tensor, steps: Tensor, out: Tensor) -> Tensor:
    """HorNet: a large depthwise convolution of widths 1/8 to 1/2, multiplied up order by order."""
    c = x.shape[1]
    y = F.conv2d(x, w)
    first, rest = y.split([c // 8, y.shape[1] - c // 8], 1)
    gates = (F.conv2d(rest, dw, padding=3, groups=rest.shape[1]) * 0.5).split([c // 8, c // 4, c // 2], 1)
    y = first * gates[0]
    for k in range(2):
        n = y.shape[1]
        y = F.conv2d(y, steps[k, : 2 * n, :n]) * gates[k + 1]
    return x + F.conv2d(y, out)


def regions_by_rank(x: Tensor, qkv: Tensor, dw: Tensor) -> Tensor:
    """BiFormer: 49 regions, each sees the four it likes the most; a depthwise convolution of values beside."""
    n, h, _, c = x.shape
    r = h // 7
    q, k, v = F.linear(x, qkv).chunk(3, -1)
    local = F.conv2d(v.permute(0, 3, 1, 2), dw, padding=2, groups=c).permute(0, 2, 3, 1)
    q, k, v = (t.view(n, 7, r, 7, r, c).transpose(2, 3).reshape(n, 49, r * r, c) for t in (q, k, v))
    best = (q.mean(2).float() @ k.mean(2).float().mT).topk(4, dim=-1)[1]
    at = best[..., None, None].expand(-1, -1, -1, r * r, c)
    k, v = (t[:, None].expand(-1, 49, -1, -1, -1).gather(2, at).flatten(2, 3) for t in (k, v))
    q, k, v = (t.unflatten(-1, (-1, 32)).transpose(2, 3) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
    return y.view(n, 7, 7, r, r, c).transpose(2, 3).reshape(n, h, h, c) + local


def crossed_scans(x: Tensor, w: Tensor, bias: Tensor, decay: Tensor) -> Tensor:
    """VMamba's four orders of a picture, each a short convolution and a decayed sum of chunks, merged again."""
    b, c, h, v = x.shape
    rows, columns = x.flatten(2), x.transpose(2, 3).flatten(2)
    xs = torch.stack([rows, columns, rows.flip(-1), columns.flip(-1)], 1)
    y = F.silu(F.conv1d(xs.flatten(1, 2), w, bias, padding=2, groups=4 * c)[..., : h * v]).view(b, 4, c, -1)
    at = torch.arange(8, device=x.device)
    far = (at[:, None] - at[None]).clamp(min=0)
    mask = torch.exp(-far * F.softplus(decay)[:, None, None]) * (at[:, None] >= at[None])
    y = torch.einsum("bkcnt,cst->bkcns", y.unflatten(-1, (-1, 8)).float(), mask.float()).flatten(-2).to(x.dtype)
    a = y[:, 0] + y[:, 2].flip(-1)
    d = y[:, 1] + y[:, 3].flip(-1)
    return a.view(b, c, h, v) + d.view(b, c, v, h).transpose(2, 3)


def fused_rest(x: Tensor, qkv: Tensor, norm: Tensor) -> Tensor:
    """EViT: tokens that the class token sees the most are kept, the rest become one by their shares."""
    b, n, d = x.shape
    y = F.layer_norm(x, (d,), norm[0], norm[1])
    q, k, v = F.linear(y, qkv).reshape(b, n, 3, -1, 64).permute(2, 0, 3, 1, 4)
    p = (q @ k.mT * 0.125).softmax(-1)
    x = x + (p @ v).transpose(1, 2).flatten(2)
    share = p[:, :, 0, 1:].mean(1)
    kept = (n - 1) * 7 // 10
    at = share.detach().float().topk(kept, dim=1)[1]
    left = torch.ones_like(share, dtype=torch.bool).scatter(1, at, False)
    rest = torch.bmm((share * left)[:, None], x[:, 1:])
    return torch.cat([x[:, :1], x[:, 1:].gather(1, at[..., None].expand(-1, -1, d)), rest], 1)


def frames_before(x: Tensor, norm: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A video codec's block: group norms, swish, 3x3x3 convolutions padded by copies of the first frame."""

    def causal(y: Tensor, w: Tensor) -> Tensor:
        y = torch.cat([y[:, :, :1], y[:, :, :1], y], 2)
        return F.conv3d(F.pad(y, (1, 1, 1, 1)), w)

    y = causal(F.silu(F.group_norm(x, 8, norm[0], norm[1])), w1)
    return x + causal(F.silu(F.group_norm(y, 8, norm[2], norm[3])), w2)


def waves_down_and_up(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Demucs: a strided convolution, a gated one, and their way back with a transposed one, what was there added."""
    y = F.gelu(F.conv1d(x, a, stride=4, padding=2))
    y = F.glu(F.conv1d(y, b), 1)
    z = F.glu(F.conv1d(y + y.mean(2, keepdim=True), c, padding=1), 1)
    return F.conv_transpose1d(z, d, stride=4, padding=2)


def conditioned_trajectories(x: Tensor, cond: Tensor, w1: Tensor, w2: Tensor, film: Tensor, skip: Tensor) -> Tensor:
    """Diffusion policy: a 1D block with group norms and Mish, scales and shifts by the condition, a 1x1 shortcut."""
    y = F.mish(F.group_norm(F.conv1d(x, w1, padding=2), 8))
    scale, shift = F.linear(F.mish(cond), film)[..., None].chunk(2, 1)
    y = scale * y + shift
    return F.mish(F.group_norm(F.conv1d(y, w2, padding=2), 8)) + F.conv1d(x, skip)


def odd_windows(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Convolutions of unequal strides, dilations and groups one after another, and a transposed one with output padding."""
    y = F.relu(F.conv2d(x, a, stride=(2, 1), padding=(2, 0), dilation=(1, 2), groups=2))
    y = F.relu(F.conv2d(y, b, stride=(1, 3), padding=(0, 3), dilation=(3, 1), groups=4))
    y = F.conv_transpose2d(y, c, stride=(2, 3), padding=1, output_padding=(1, 2), groups=2)
    return F.conv2d(F.avg_pool2d(y, (3, 2), (2, 1), (1, 0), ceil_mode=True), d, stride=2)


# ---- matches --------------------------------------------------------------------------------------------------------------


def doubly_matched(a: Tensor, b: Tensor, w: Tensor, matchable: Tensor, truth: Tensor) -> Tensor:
    """LightGlue: similarities, log-softmax both ways with how likely each point has a match; the loss of true pairs."""
    p, q = F.linear(a, w), F.linear(b, w)
    d = p.shape[-1]
    sim = torch.einsum("bmd,bnd->bmn", p / d**0.25, q / d**0.25).float()
    z0, z1 = F.linear(a, matchable).float(), F.linear(b, matchable).float()
    scores = sim.log_softmax(2) + sim.mT.contiguous().log_softmax(2).mT
    full = scores.new_zeros(scores.shape[0], scores.shape[1] + 1, scores.shape[2] + 1)
    full[:, :-1, :-1] = scores + F.logsigmoid(z0) + F.logsigmoid(z1).mT
    full[:, :-1, -1] = F.logsigmoid(-z0.squeeze(-1))
    full[:, -1, :-1] = F.logsigmoid(-z1.squeeze(-1))
    return -full.gather(2, truth[..., None]).mean() - full[:, -1, :-1].mean() * 0.5


def fine_offsets(f0: Tensor, f1: Tensor, where: Tensor, w: Tensor) -> Tensor:
    """LoFTR: windows of 5x5 around coarse matches, their middle against all, expected offsets and how sure they are."""
    c = f0.shape[1]
    picked = []
    for f in (f0, f1):
        windows = F.unfold(f, 5, stride=4, padding=2).unflatten(1, (c, 25)).permute(0, 3, 2, 1)
        picked.append(F.linear(windows.flatten(0, 1)[where], w))
    heat = torch.softmax(torch.einsum("mc,mrc->mr", picked[0][:, 12], picked[1]).float() / c**0.5, 1)
    axis = torch.linspace(-1, 1, 5, device=f0.device)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).reshape(1, 25, 2)
    mean = (heat[..., None] * grid).sum(1)
    spread = (heat[..., None] * grid**2).sum(1) - mean**2
    return torch.cat([mean, spread.clamp(min=1e-10).sqrt().sum(-1, keepdim=True)], -1)


def flows_of_all(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    """GMFlow: one softmax of all pixels for the flow, another of the first picture with itself to spread it."""
    n, c, rows, columns = a.shape
    grid = torch.stack(
        torch.meshgrid(torch.arange(columns, device=a.device), torch.arange(rows, device=a.device), indexing="xy"), -1
    ).to(a.dtype)
    p, q = a.flatten(2).mT, b.flatten(2)
    match = (p @ q / c**0.5).softmax(-1) @ grid.view(1, -1, 2).expand(n, -1, -1)
    flow = match - grid.view(1, -1, 2)
    near = F.linear(p, h)
    spread = F.scaled_dot_product_attention(near, near, flow)
    return spread.mT.reshape(n, 2, rows, columns)


def epipolar_distances(x: Tensor, y: Tensor, f: Tensor, w: Tensor) -> Tensor:
    """Sampson's distances of matches to 64 fundamental matrices, robust by weights, scores of each matrix."""
    ones = torch.ones_like(x[:, :1])
    a, b = torch.cat([x, ones], 1), torch.cat([y, ones], 1)
    fa, fb = torch.einsum("kij,nj->kni", f, a), torch.einsum("kji,nj->kni", f, b)
    top = (b * fa).sum(-1).square()
    far = top / (fa[..., :2].square().sum(-1) + fb[..., :2].square().sum(-1)).clamp(min=1e-6)
    return (w.sigmoid() * (1 - torch.exp(-far))).sum(1)


def sparse_kernels(x: Tensor, at: Tensor, w: Tensor, gain: Tensor) -> Tensor:
    """A submanifold convolution: for each of 27 offsets the voxels there are, a matmul, sums, a norm."""
    out = torch.zeros(x.shape[0], w.shape[2], device=x.device, dtype=x.dtype)
    for k in range(27):
        there = at[k] >= 0
        out = out + torch.where(there[:, None], x[at[k].clamp(min=0)], 0.0) @ w[k]
    return F.relu(F.layer_norm(out, out.shape[-1:], gain))


# ---- views and warps ------------------------------------------------------------------------------------------------------


def planes_times_lines(points: Tensor, planes: Tensor, lines: Tensor, w: Tensor) -> Tensor:
    """TensoRF: samples of three planes times those of three lines, density by their sum, features by a matmul."""
    feats = []
    for k, (a, b, c) in enumerate(((0, 1, 2), (0, 2, 1), (1, 2, 0))):
        uv = torch.stack([points[:, a], points[:, b]], -1).view(1, -1, 1, 2).clamp(-1, 1)
        line = torch.stack([torch.zeros_like(points[:, c]), points[:, c]], -1).view(1, -1, 1, 2).clamp(-1, 1)
        p = F.grid_sample(planes[k][None], uv, align_corners=True).view(planes.shape[1], -1)
        s = F.grid_sample(lines[k][None, ..., None], line, align_corners=True).view(planes.shape[1], -1)
        feats.append(p * s)
    z = torch.cat(feats)
    return torch.cat([F.softplus(z.sum(0, keepdim=True)), w @ z])


def bounded_histograms(t: Tensor, w: Tensor, edges: Tensor, proposed: Tensor) -> Tensor:
    """mip-NeRF 360: how much of the fine weights lie outside what coarse ones allow, by searched borders of bins."""
    fine = torch.cat([torch.zeros_like(t[:, :1]), t.abs().cumsum(-1)], -1)
    fine = (fine / fine[:, -1:]).detach()
    coarse = torch.cat([torch.zeros_like(edges[:, :1]), edges.abs().cumsum(-1)], -1)
    coarse = coarse / coarse[:, -1:]
    p, share = proposed.softmax(-1), w.softmax(-1).detach()
    total = torch.cat([torch.zeros_like(p[:, :1]), p.cumsum(-1)], -1)
    low = (torch.searchsorted(coarse.detach().contiguous(), fine[:, :-1].contiguous(), right=True) - 1).clamp(0, p.shape[1])
    high = torch.searchsorted(coarse.detach().contiguous(), fine[:, 1:].contiguous(), right=True).clamp(0, p.shape[1])
    bound = total.gather(-1, high) - total.gather(-1, low)
    return ((share - bound).clamp(min=0).square() / (share + 1e-5)).sum(-1).mean() + 1e-3 * coarse.square().mean()


def shifts_and_scales(x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """MiDaS: the best scale and shift of each picture in closed form, then gradients of the rest at four sizes."""
    m = (mask > -0.5).to(x.dtype)
    a00, a01, a11 = (m * x * x).sum((1, 2)), (m * x).sum((1, 2)), m.sum((1, 2))
    b0, b1 = (m * x * y).sum((1, 2)), (m * y).sum((1, 2))
    det = a00 * a11 - a01 * a01 + 1e-6
    scale, shift = (a11 * b0 - a01 * b1) / det, (a00 * b1 - a01 * b0) / det
    rest = scale[:, None, None] * x + shift[:, None, None] - y
    loss = (m * rest.square()).sum((1, 2)) / (2 * a11)
    for k in range(4):
        d, n = rest[:, :: 2**k, :: 2**k], m[:, :: 2**k, :: 2**k]
        gx = ((d[:, :, 1:] - d[:, :, :-1]).abs() * n[:, :, 1:] * n[:, :, :-1]).sum((1, 2))
        gy = ((d[:, 1:] - d[:, :-1]).abs() * n[:, 1:] * n[:, :-1]).sum((1, 2))
        loss = loss + 0.5 * (gx + gy) / n.sum((1, 2)).clamp(min=1)
    return loss.mean()


def fused_surfaces(volume: Tensor, weights: Tensor, depth: Tensor, pose: Tensor) -> tuple[Tensor, Tensor]:
    """TSDF: voxels' middles to a camera, the depth there, truncated distances averaged in with weights."""
    n, (h, v) = volume.shape[0], depth.shape
    axis = (torch.arange(n, device=volume.device, dtype=volume.dtype) + 0.5) / n - 0.5
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1).view(-1, 3)
    p = grid @ pose[:, :3].t() + pose[:, 3]
    z = p[:, 2].clamp(min=1e-3)
    u, w = (p[:, 0] / z * v + v / 2).round().long(), (p[:, 1] / z * v + h / 2).round().long()
    seen = (u >= 0) & (u < v) & (w >= 0) & (w < h) & (p[:, 2] > 0)
    d = depth[w.clamp(0, h - 1), u.clamp(0, v - 1)]
    far = d - p[:, 2]
    good = seen & (d > 0) & (far > -0.05)
    tsdf = (far / 0.05).clamp(max=1.0)
    old, count = volume.view(-1), weights.abs().view(-1)
    new = torch.where(good, (old * count + tsdf) / (count + 1), old)
    return new.view_as(volume), torch.where(good, count + 1, count).clamp(max=64).view_as(volume)


def bent_plates(x: Tensor, source: Tensor, moved: Tensor) -> Tensor:
    """A thin-plate spline: radial terms of nine points, their solved weights, a picture sampled there."""
    b, _, h, w = x.shape
    k = source.shape[1]

    def radial(a: Tensor, c: Tensor) -> Tensor:
        far = (a[:, :, None] - c[:, None]).square().sum(-1)
        return far * torch.log(far + 1e-6)

    ones = torch.ones(b, k, 1, device=x.device, dtype=x.dtype)
    p = torch.cat([ones, source], 2)
    top = torch.cat([radial(source, source) + 0.1 * torch.eye(k, device=x.device, dtype=x.dtype), p], 2)
    low = torch.cat([p.mT, torch.zeros(b, 3, 3, device=x.device, dtype=x.dtype)], 2)
    goal = torch.cat([moved, torch.zeros(b, 3, 2, device=x.device, dtype=x.dtype)], 1)
    weights = torch.linalg.solve(torch.cat([top, low], 1), goal)
    ys, xs = torch.linspace(-1, 1, h, device=x.device), torch.linspace(-1, 1, w, device=x.device)
    grid = torch.stack(torch.meshgrid(xs, ys, indexing="xy"), -1).view(1, -1, 2).expand(b, -1, -1)
    at = torch.cat([radial(grid, source), torch.ones_like(grid[..., :1]), grid], 2) @ weights
    return F.grid_sample(x, at.view(b, h, w, 2), padding_mode="border", align_corners=False)


def elastic(x: Tensor, noise: Tensor, kernel: Tensor) -> Tensor:
    """Elastic deformation: noise made smooth along rows and columns, a picture sampled at what it moves to."""
    b, _, h, w = x.shape
    k = kernel.softmax(0)
    n = k.shape[0] // 2
    d = F.conv2d(noise.flatten(0, 1)[:, None], k.view(1, 1, 1, -1), padding=(0, n))
    d = F.conv2d(d, k.view(1, 1, -1, 1), padding=(n, 0)).view(b, 2, h, w) * 4
    grid = F.affine_grid(torch.eye(2, 3, device=x.device, dtype=x.dtype).expand(b, 2, 3), [b, 1, h, w], align_corners=False)
    at = grid + d.permute(0, 2, 3, 1) * torch.tensor([2 / w, 2 / h], device=x.device, dtype=x.dtype)
    return F.grid_sample(x, at, mode="bilinear", padding_mode="reflection", align_corners=False)


def corners_to_corners(x: Tensor, moved: Tensor) -> Tensor:
    """Perspective of bytes: homographies of four corners solved, pixels divided by depth, samples rounded to bytes."""
    b, _, h, w = x.shape
    start = torch.tensor([[0.0, 0.0], [w - 1.0, 0.0], [w - 1.0, h - 1.0], [0.0, h - 1.0]], device=x.device, dtype=moved.dtype)
    u, v = (start + moved).unbind(-1)
    px, py = start.unbind(-1)
    zero, one = torch.zeros_like(u), torch.ones_like(u)
    a = torch.stack([u, v, one, zero, zero, zero, -px * u, -px * v], -1)
    c = torch.stack([zero, zero, zero, u, v, one, -py * u, -py * v], -1)
    m = torch.linalg.solve(torch.cat([a, c], 1), torch.cat([px, py]).expand(b, 8)[..., None])[..., 0]
    m = torch.cat([m, torch.ones_like(m[:, :1])], 1).view(b, 3, 3)
    ys, xs = torch.meshgrid(torch.arange(h, device=x.device), torch.arange(w, device=x.device), indexing="ij")
    grid = torch.stack([xs, ys, torch.ones_like(xs)], -1).to(moved.dtype).view(-1, 3)
    p = grid @ m.mT
    at = (p[..., :2] / p[..., 2:]).view(b, h, w, 2) * torch.tensor([2 / (w - 1), 2 / (h - 1)], device=x.device) - 1
    out = F.grid_sample(x.to(moved.dtype), at, align_corners=True)
    return out.round().clamp(0, 255).to(torch.uint8)


def bytes_at_random(x: Tensor, level: Tensor) -> Tensor:
    """RandAugment on bytes: solarised, posterised, stretched from darkest to brightest, a blend with grey, sharper."""
    a = torch.where(x >= 170, 255 - x, x)
    b = (x & 0xF0).float()
    low, high = x.amin((-2, -1), keepdim=True).float(), x.amax((-2, -1), keepdim=True).float()
    c = ((x.float() - low) * torch.where(high > low, 255.0 / (high - low), 1.0)).clamp(0, 255).floor()
    r, g, u = x.float().unbind(1)
    grey = (0.2989 * r + 0.587 * g + 0.114 * u).floor()[:, None]
    t = level.sigmoid().view(-1, 1, 1, 1)
    d = (t * x.float() + (1 - t) * grey).clamp(0, 255)
    kernel = torch.tensor([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]], device=x.device, dtype=d.dtype) / 13
    e = F.conv2d(d, kernel.expand(3, 1, 3, 3), groups=3).round()
    out = (a.float() + b + c + d) * 0.25
    out[..., 1:-1, 1:-1] += 0.5 * (d[..., 1:-1, 1:-1] - e)
    return out.round().clamp(0, 255).to(torch.uint8)


def layered_noise(x: Tensor, table: Tensor) -> Tensor:
    """Perlin's noise of five octaves: hashed corners' gradients, a smooth blend, fog over pictures."""
    h, w = x.shape[-2:]
    total = torch.zeros(h, w, device=x.device, dtype=x.dtype)
    n = table.shape[0]
    ys, xs = torch.arange(h, device=x.device, dtype=x.dtype)[:, None], torch.arange(w, device=x.device, dtype=x.dtype)[None]
    for k in range(5):
        step = 2.0 ** (6 - k)
        y, u = ys / step, xs / step
        y0, u0 = y.floor(), u.floor()
        fy, fu = y - y0, u - u0
        sy, su = fy**3 * (fy * (fy * 6 - 15) + 10), fu**3 * (fu * (fu * 6 - 15) + 10)

        corners = []
        for dy, dx in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at = ((u0.long() + dx) * 73856093 ^ (y0.long() + dy) * 19349663 ^ k) % n
            corners.append(table[at, 0] * (fu - dx) + table[at, 1] * (fy - dy))
        top, low = torch.lerp(corners[0], corners[1], su), torch.lerp(corners[2], corners[3], su)
        total = total + torch.lerp(top, low, sy) * 0.5**k
    fog = total.sigmoid()
    return x * (1 - 0.6 * fog) + 0.6 * fog


CASCADE = Sized(
    cascaded_heads,
    lambda m, b, c, h: [
        m(b, c, h, h), m(4, 32 + c // 4, c // 4, 1, 1) * (c // 4) ** -0.5, m(4, 16, 1, 5, 5) * 0.2,
        weight(m, c, c, 1, 1), m(4, h * h, h * h),
    ],
    (2, 32, 3),
)  # fmt: skip
GATES = Sized(
    recursive_gates,
    lambda m, b, c, h: [
        image(m, b, c, h, h), weight(m, c, c, 1, 1), weight(m, 7 * c // 8, 1, 7, 7),
        m(2, c // 2, c // 4, 1, 1) * (c // 4) ** -0.5,
        weight(m, c, c // 2, 1, 1),
    ],
    (2, 16, 8),
)  # fmt: skip
SCANS = Sized(
    crossed_scans,
    lambda m, b, c, h: [m(b, c, h, h), m(4 * c, 1, 3) * 0.5, m(4 * c), m(c)],
    (2, 4, 8),
)
REST = Sized(fused_rest, lambda m, b, n, d: [m(b, n, d), weight(m, 3 * d, d), m(2, d)], (2, 11, 64))
POLICY = Sized(
    conditioned_trajectories,
    lambda m, b, c, t, o, e: [
        m(b, c, t), m(b, e), weight(m, o, c, 5), weight(m, o, o, 5), weight(m, 2 * o, e), weight(m, o, c, 1),
    ],
    (2, 6, 8, 16, 10),
)  # fmt: skip
MATCHED = Sized(
    doubly_matched,
    lambda m, b, n, k, d: [m(b, n, d), m(b, k, d), weight(m, d, d), weight(m, 1, d), ids(m, k + 1, b, n + 1)],
    (2, 6, 7, 8),
)
PLATES = Sized(bent_plates, lambda m, b, c, h, w: [m(b, c, h, w), m(b, 9, 2), m(b, 9, 2) * 0.5], (2, 3, 8, 9), SINGLE)
BLOCKS: tuple[Block, ...] = (
    CASCADE.block("cascaded heads", 64, 128, 14, training=True),
    GATES.block("recursive gates", 32, 128, 28),
    Sized(regions_by_rank, lambda m, b, h, c: [m(b, h, h, c), weight(m, 3 * c, c), weight(m, c, 1, 5, 5)], (2, 14, 64)).block(
        "regions by rank", 8, 56, 128
    ),
    SCANS.block("crossed scans", 8, 96, 56, training=True),
    REST.block("fused rest", 32, 197, 384, training=True),
    Sized(
        frames_before,
        lambda m, b, c, t, h: [m(b, c, t, h, h), m(4, c), weight(m, c, c, 3, 3, 3), weight(m, c, c, 3, 3, 3)],
        (1, 8, 3, 5),
    ).block("frames before", 1, 128, 9, 60, training=True),
    Sized(
        waves_down_and_up,
        lambda m, b, i, c, t: [
            m(b, i, t),
            weight(m, c, i, 8),
            weight(m, 2 * c, c, 1),
            weight(m, 2 * c, c, 3),
            weight(m, c, i, 8),
        ],
        (2, 3, 8, 32),
        SINGLE,
    ).block("waves down and up", 4, 48, 96, 44100, training=True),
    POLICY.block("conditioned trajectories", 128, 256, 16, 256, 256, training=True),
    Sized(
        odd_windows,
        lambda m, b, c, h, w: [
            m(b, c, h, w),
            weight(m, 2 * c, c // 2, 5, 3),
            weight(m, 2 * c, c // 2, 3, 5),
            weight(m, 2 * c, c // 2, 4, 3),
            weight(m, c, c, 3, 3),
        ],
        (2, 8, 22, 30),
        HALF,
    ).block("odd windows", 16, 64, 63, 81, training=True),
    MATCHED.block("doubly matched", 2, 1023, 900, 256, training=True),
    Sized(
        fine_offsets,
        lambda m, b, c, h, n: [m(b, c, h, h), m(b, c, h, h), ids(m, b * (h // 4) ** 2, n), weight(m, c, c)],
        (2, 8, 12, 7),
    ).block("fine offsets", 2, 64, 160, 2500, training=True),
    Sized(flows_of_all, lambda m, b, c, h, w: [m(b, c, h, w), m(b, c, h, w), weight(m, c, c)], (2, 8, 4, 5), SINGLE).block(
        "flows of all", 2, 128, 45, 60, training=True
    ),
    Sized(epipolar_distances, lambda m, n, k: [m(n, 2), m(n, 2), m(k, 3, 3), m(n)], (9, 4), SINGLE).block(
        "epipolar distances", 8003, 64, training=True
    ),
    Sized(
        sparse_kernels,
        lambda m, n, i, o: [m(n, i), ids(m, 2 * n, 27, n) - n, m(27, i, o) * (27 * i) ** -0.5, m(o)],
        (9, 6, 5),
        HALF,
    ).block("sparse kernels", 30001, 32, 64, training=True),
    Sized(
        planes_times_lines,
        lambda m, n, c, s, o: [m(n, 3), m(3, c, s, s), m(3, c, s), weight(m, o, 3 * c)],
        (9, 4, 6, 5),
        SINGLE,
    ).block("planes times lines", 100003, 16, 300, 27, training=True),
    Sized(bounded_histograms, lambda m, n, s, k: [m(n, s), m(n, s), m(n, k), m(n, k)], (5, 7, 9), SINGLE).block(
        "bounded histograms", 8191, 48, 96, training=True
    ),
    Sized(shifts_and_scales, lambda m, b, h, w: [m(b, h, w), m(b, h, w), m(b, h, w)], (2, 17, 19), SINGLE).block(
        "shifts and scales", 12, 383, 384, training=True
    ),
    Sized(
        fused_surfaces,
        lambda m, n, h, w: [
            m(n, n, n),
            m(n, n, n),
            m(h, w).abs().float() + 1.5,
            torch.cat([torch.eye(3, device=m(1).device), m(3, 1).float() * 0.1 + 2], 1),
        ],
        (6, 10, 12),
        SINGLE,
    ).block("fused surfaces", 256, 480, 640),
    PLATES.block("bent plates", 16, 3, 384, 300),
    Sized(elastic, lambda m, b, c, h, w, k: [m(b, c, h, w), m(b, 2, h, w), m(k)], (2, 3, 20, 22, 5), SINGLE).block(
        "elastic", 16, 3, 256, 300, 31
    ),
    Sized(
        corners_to_corners,
        lambda m, b, h, w: [ids(m, 256, b, 3, h, w).to(torch.uint8), m(b, 4, 2).float()],
        (2, 20, 24),
        SINGLE,
    ).block("corners to corners", 16, 384, 500),
    Sized(bytes_at_random, lambda m, b, h, w: [ids(m, 256, b, 3, h, w).to(torch.uint8), m(b)], (2, 8, 9), SINGLE).block(
        "bytes at random", 32, 256, 300
    ),
    Sized(layered_noise, lambda m, b, h, w: [m(b, 3, h, w), m(1024, 2)], (2, 20, 24), SINGLE).block(
        "layered noise", 8, 720, 1279
    ),
)
