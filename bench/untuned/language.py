"""Blocks of language models, recommenders and losses, as their authors write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.untuned.block import Block, Make, both, ids, mlp_weights


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary embedding (Su et al. 2021) of (..., length, size), halves rotated against each other."""
    length, size = x.shape[-2:]
    rates = base ** (-torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size)
    angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def heads(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (-1, size)).transpose(1, 2)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def geglu_packed(x: Tensor, w: Tensor, b: Tensor, down: Tensor) -> Tensor:
    a, gate = F.linear(x, w, b).chunk(2, -1)
    return F.linear(a * F.gelu(gate), down)


def llama_block(x: Tensor, n1: Tensor, qkv: Tensor, out: Tensor, n2: Tensor, *ff: Tensor) -> Tensor:
    y = F.linear(rms_norm(x, n1), qkv)
    q, k, v = y.split([1024, 256, 256], -1)
    q, k, v = rotate(heads(q, 64)), rotate(heads(k, 64)), heads(v, 64)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + F.linear(y.transpose(1, 2).flatten(2), out)
    return x + swiglu(rms_norm(x, n2), *ff)


def bert_layer(
    x: Tensor, mask: Tensor, qkv: Tensor, bias: Tensor, out: Tensor, norms: Tensor, w1: Tensor, w2: Tensor
) -> Tensor:
    q, k, v = (heads(t, 64) for t in F.linear(x, qkv, bias).chunk(3, -1))
    scores = q @ k.transpose(-1, -2) / 8 + (1 - mask[:, None, None, :]) * -1e4
    y = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    x = F.layer_norm(x + F.linear(y, out), (768,), norms[0], norms[1])
    return F.layer_norm(x + F.linear(F.gelu(F.linear(x, w1)), w2), (768,), norms[2], norms[3])


def moe_dense(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """All experts on all tokens, weighted by the two best."""
    weight, chosen = F.linear(x, router).softmax(-1, torch.float32).topk(2)
    share = torch.zeros(x.shape[0], router.shape[0], device=x.device, dtype=torch.float32).scatter(1, chosen, weight)
    h = F.silu(torch.einsum("td,edf->tef", x, w1))
    return torch.einsum("tef,efd,te->td", h, w2, share.to(x.dtype))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Katharopoulos et al. 2020, not causal."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhtd,bhte->bhde", k, v)
    scale = torch.einsum("bhtd,bhd->bht", q, k.sum(2))
    return torch.einsum("bhtd,bhde->bhte", q, state) / scale[..., None]


def retention(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Parallel form of Sun et al. 2023."""
    i = torch.arange(q.shape[-2], device=q.device)
    gap = (i[:, None] - i[None, :]).float()
    mask = torch.where(gap >= 0, torch.exp(-gap * decay.float().abs()[:, None, None]), 0.0)
    y = ((q @ k.transpose(-1, -2)) * mask.to(q.dtype)) @ v
    return F.group_norm(y.transpose(1, 2).flatten(0, 1).flatten(1), q.shape[1])


def transformer_xl(q: Tensor, k: Tensor, v: Tensor, r: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Relative positions by shifting a padded matmul (Dai et al. 2019)."""
    content = (q + u[:, None]) @ k.transpose(-1, -2)
    b, h, t, s = content.shape
    position = F.pad((q + w[:, None]) @ r.transpose(-1, -2), (1, 0)).reshape(b, h, s + 1, t)[:, :, 1:].reshape(b, h, t, s)
    return ((content + position) / q.shape[-1] ** 0.5).softmax(-1) @ v


def talking_heads(q: Tensor, k: Tensor, v: Tensor, before: Tensor, after: Tensor) -> Tensor:
    scores = torch.einsum("bhts,gh->bgts", q @ k.transpose(-1, -2) * 0.125, before)
    return torch.einsum("bgts,hg->bhts", scores.softmax(-1), after) @ v


def cross_attention(x: Tensor, text: Tensor, wq: Tensor, wkv: Tensor, out: Tensor) -> Tensor:
    q = heads(F.linear(x, wq), 64)
    k, v = (heads(t, 64) for t in F.linear(text, wkv).chunk(2, -1))
    y = F.scaled_dot_product_attention(q, k, v)
    return x + F.linear(y.transpose(1, 2).flatten(2), out)


def pooled_by_query(x: Tensor, query: Tensor, weight: Tensor) -> Tensor:
    keys = torch.tanh(F.linear(x, weight))
    return torch.einsum("bt,btd->bd", (keys @ query).softmax(-1), x)


def time_mix(x: Tensor, mix: Tensor, wr: Tensor, wk: Tensor, wv: Tensor) -> Tensor:
    """Channel mixing of RWKV (Peng et al. 2023): a shift by one token, then gated squares."""
    before = F.pad(x, (0, 0, 1, -1))
    k, r = x * mix[0] + before * (1 - mix[0]), x * mix[1] + before * (1 - mix[1])
    return torch.sigmoid(F.linear(r, wr)) * F.linear(F.relu(F.linear(k, wk)).square(), wv)


def gated_conv(x: Tensor, w: Tensor, filters: Tensor, out: Tensor) -> Tensor:
    """A short causal depthwise convolution between two gates (Hyena, Poli et al. 2023)."""
    y = F.linear(x, w).transpose(1, 2)
    y = F.conv1d(F.pad(y, (3, 0)), filters, groups=y.shape[1])
    a, b, c = y.chunk(3, 1)
    return F.linear((a * (b * c)).transpose(1, 2), out)


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0


def int8_weight(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype)) * scale


def int4_weight(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    low, high = (packed & 15).to(x.dtype) - 8, (packed >> 4).to(x.dtype) - 8
    w = torch.stack([low, high], -1).flatten(1).unflatten(1, (-1, 128)) * scale[..., None]
    return F.linear(x, w.flatten(1))


def quantise_rows(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = rms_norm(x, weight).float()
    scale = y.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
    return (y / scale).round().clamp(-128, 127).to(torch.int8), scale


def token_embedding(tokens: Tensor, table: Tensor, positions: Tensor, g: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(table[tokens] + positions[: tokens.shape[1]], g.shape, g, b)


def cross_entropy_smoothed(h: Tensor, w: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).float(), labels, label_smoothing=0.1)


def distillation(student: Tensor, teacher: Tensor) -> Tensor:
    a, b = (student.float() / 2).log_softmax(-1), (teacher.float() / 2).log_softmax(-1)
    return F.kl_div(a, b, log_target=True, reduction="batchmean") * 4


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    ce = F.binary_cross_entropy_with_logits(logits.float(), target.float(), reduction="none")
    p = torch.sigmoid(logits.float())
    right = p * target + (1 - p) * (1 - target)
    return (ce * (1 - right) ** 2 * (0.25 * target + 0.75 * (1 - target))).mean()


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    """CLIP's loss (Radford et al. 2021)."""
    logits = F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).t() * 14.3
    labels = torch.arange(a.shape[0], device=a.device)
    return (F.cross_entropy(logits.float(), labels) + F.cross_entropy(logits.t().float(), labels)) / 2


def dlrm(dense: Tensor, tables: Tensor, rows: Tensor) -> Tensor:
    parts = torch.stack([dense, *(tables[k][rows[:, k]] for k in range(rows.shape[1]))], 1)
    pairs = parts @ parts.transpose(1, 2)
    i, j = torch.tril_indices(parts.shape[1], parts.shape[1], -1, device=dense.device)
    return torch.cat([dense, pairs[:, i, j]], 1)


def nucleus(logits: Tensor) -> Tensor:
    """Logits with what is beyond the first 0.9 of the probability masked."""
    ordered, where = logits.float().sort(-1, descending=True)
    beyond = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1) > 0.9
    return ordered.masked_fill(beyond, float("-inf")).gather(-1, where.argsort(-1)).softmax(-1)


def lstm_cell(x: Tensor, h: Tensor, c: Tensor, wx: Tensor, wh: Tensor, b: Tensor) -> Tensor:
    i, f, g, o = (F.linear(x, wx, b) + F.linear(h, wh)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c)


def gru_cell(x: Tensor, h: Tensor, wx: Tensor, wh: Tensor, b: Tensor) -> Tensor:
    rx, zx, nx = F.linear(x, wx, b).chunk(3, -1)
    rh, zh, nh = F.linear(h, wh).chunk(3, -1)
    z = torch.sigmoid(zx + zh)
    return (1 - z) * torch.tanh(nx + torch.sigmoid(rx + rh) * nh) + z * h


def adaptive_block(x: Tensor, c: Tensor, ada: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    shift, scale, gate = F.linear(F.silu(c), ada)[:, None].chunk(3, -1)
    y = F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift
    return x + gate * F.linear(F.gelu(F.linear(y, w1), approximate="tanh"), w2)


def mixer_block(x: Tensor, n1: Tensor, t1: Tensor, t2: Tensor, n2: Tensor, c1: Tensor, c2: Tensor) -> Tensor:
    y = F.layer_norm(x, n1.shape, n1).transpose(1, 2)
    x = x + F.linear(F.gelu(F.linear(y, t1)), t2).transpose(1, 2)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, n2.shape, n2), c1)), c2)


def _ff(m: Make, d: int, hidden: int) -> list[Tensor]:
    return [m(hidden, d) * d**-0.5, m(hidden, d) * d**-0.5, m(d, hidden) * hidden**-0.5]


def _llama(m: Make, batch: int, length: int) -> list[Tensor]:
    return [m(batch, length, 1024), m(1024), m(1536, 1024) * 0.03, m(1024, 1024) * 0.03, m(1024), *_ff(m, 1024, 2816)]


def _bert(m: Make) -> list[Tensor]:
    seen = (m(8, 512) > -1).to(torch.bfloat16)
    return [m(8, 512, 768), seen, m(2304, 768) * 0.03, m(2304), m(768, 768) * 0.03, m(4, 768), *mlp_weights(m, 768, 3072)]


def _attention(m: Make, b: int, h: int, t: int, d: int) -> list[Tensor]:
    return [m(b, h, t, d) for _ in range(3)]


BLOCKS: tuple[Block, ...] = (
    *both("swiglu 2048x2048x5504", swiglu, lambda m: [m(2048, 2048), *_ff(m, 2048, 5504)]),
    Block(
        "packed geglu 4096x1280x5120",
        geglu_packed,
        lambda m: [m(4096, 1280), m(10240, 1280) * 0.03, m(10240), m(1280, 5120) * 0.014],
    ),
    Block("llama block 2x1024x1024", llama_block, lambda m: _llama(m, 2, 1024)),
    Block("llama block 4x2048x1024 step", llama_block, lambda m: _llama(m, 4, 2048), training=True),
    *both("bert layer 8x512x768", bert_layer, _bert),
    Block(
        "dense mixture of 8 experts",
        moe_dense,
        lambda m: [m(2048, 512), m(8, 512) * 0.05, m(8, 512, 1024) * 0.04, m(8, 1024, 512) * 0.03],
    ),
    *both("linear attention 4x16x4096x64", linear_attention, lambda m: _attention(m, 4, 16, 4096, 64)),
    Block("retention 4x8x1024x128", retention, lambda m: [t * 0.1 for t in _attention(m, 4, 8, 1024, 128)] + [m(8) * 0.01]),
    Block(
        "transformer-xl attention 4x12x512x64",
        transformer_xl,
        lambda m: [*_attention(m, 4, 12, 512, 64), m(12, 512, 64), m(12, 64), m(12, 64)],
    ),
    Block(
        "talking heads 4x12x512x64", talking_heads, lambda m: [*_attention(m, 4, 12, 512, 64), m(12, 12) * 0.3, m(12, 12) * 0.3]
    ),
    *both(
        "cross attention to 77 tokens",
        cross_attention,
        lambda m: [m(4, 4096, 640), m(4, 77, 1024), m(640, 640) * 0.04, m(1280, 1024) * 0.03, m(640, 640) * 0.04],
    ),
    Block("pooling by a query 64x1000x512", pooled_by_query, lambda m: [m(64, 1000, 512), m(512), m(512, 512) * 0.04]),
    *both(
        "rwkv channel mix 8x1024x1024",
        time_mix,
        lambda m: [m(8, 1024, 1024), m(2, 1024), m(1024, 1024) * 0.03, m(3584, 1024) * 0.03, m(1024, 3584) * 0.02],
    ),
    Block(
        "hyena gates 8x2048x768",
        gated_conv,
        lambda m: [m(8, 2048, 768), m(2304, 768) * 0.04, m(2304, 1, 4), m(768, 768) * 0.04],
    ),
    *both(
        "lora 4096x4096x4096 rank 16", lora, lambda m: [m(4096, 4096), m(4096, 4096) * 0.015, m(16, 4096) * 0.015, m(4096, 16)]
    ),
    Block(
        "int8 weight 16x4096x11008",
        int8_weight,
        lambda m: [m(16, 4096), ids(m, 255, 11008, 4096).sub(127).to(torch.int8), m(11008) * 0.01],
    ),
    Block(
        "int4 weight 16x4096x11008",
        int4_weight,
        lambda m: [m(16, 4096), ids(m, 256, 11008, 2048).to(torch.uint8), m(11008, 32) * 0.01],
    ),
    Block("rms norm + int8 rows 8192x5120", quantise_rows, lambda m: [m(8192, 5120), m(5120)]),
    *both(
        "embedding + norm 16x512x768",
        token_embedding,
        lambda m: [ids(m, 30522, 16, 512), m(30522, 768), m(512, 768), m(768), m(768)],
    ),
    Block(
        "smoothed cross entropy 4096x1024x32000 step",
        cross_entropy_smoothed,
        lambda m: [m(4096, 1024), m(32000, 1024) * 0.03, ids(m, 32000, 4096)],
        training=True,
    ),
    Block("distillation 4096x32000 step", distillation, lambda m: [m(4096, 32000), m(4096, 32000)], training=True),
    Block(
        "focal loss 16x76725x20 step",
        focal_loss,
        lambda m: [m(16, 76725, 20), (m(16, 76725, 20) > 2).to(torch.bfloat16)],
        training=True,
    ),
    Block("clip loss 4096x768 step", contrastive, lambda m: [m(4096, 768), m(4096, 768)], training=True),
    Block("dlrm interaction 8192x26x64", dlrm, lambda m: [m(8192, 64), m(26, 10000, 64), ids(m, 10000, 8192, 26)]),
    Block("nucleus sampling 64x32000", nucleus, lambda m: [m(64, 32000) * 3]),
    Block(
        "lstm cell 256x1024",
        lstm_cell,
        lambda m: [m(256, 1024), m(256, 1024), m(256, 1024), m(4096, 1024) * 0.03, m(4096, 1024) * 0.03, m(4096)],
    ),
    Block(
        "gru cell 256x1024",
        gru_cell,
        lambda m: [m(256, 1024), m(256, 1024), m(3072, 1024) * 0.03, m(3072, 1024) * 0.03, m(3072)],
    ),
    *both(
        "adaptive norm + mlp 16x256x1152",
        adaptive_block,
        lambda m: [m(16, 256, 1152), m(16, 1152), m(3456, 1152) * 0.03, *mlp_weights(m, 1152, 4608)],
    ),
    *both(
        "mixer block 64x196x512",
        mixer_block,
        lambda m: [m(64, 196, 512), m(512), *mlp_weights(m, 196, 256), m(512), *mlp_weights(m, 512, 2048)],
    ),
)
