"""Attention in plain PyTorch as models write it, each with the tensors that it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Tensor]


@dataclass(frozen=True)
class Spelling:
    """A function of queries, keys, values and `more` tensors; `heads` of queries, and of keys."""

    function: Function
    more: Sequence[Callable[[int], Tensor]] = ()
    heads: tuple[int, int] = (4, 4)
    learned: bool = field(default=False)  # the further tensors have gradients

    def arguments(self, length: int, head: int, dtype: torch.dtype, batch: int = 2) -> list[Tensor]:
        """For so many queries and keys."""
        shapes = [(batch, n, length, head) for n in (self.heads[0], self.heads[1], self.heads[1])]
        rest = [make(length) for make in self.more]
        rest = [one.to(dtype) if one.is_floating_point() else one for one in rest]
        return [*(_random(k, *shape).to(dtype) for k, shape in enumerate(shapes)), *rest]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def _positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def gpt2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    return torch.where(columns <= rows, s, torch.finfo(s.dtype).min).softmax(-1) @ v


def bert(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return (_scores(q, k) + (1.0 - keep.to(q.dtype)[:, None, None, :]) * -10000.0).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    slopes = (2.0 ** -torch.arange(1, s.shape[1] + 1, device=s.device)).to(s.dtype)[:, None, None]
    return (s + slopes * (columns - rows)).masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """The relative bias, by a table of heads' biases for buckets of distances."""
    s = q @ k.transpose(-1, -2)
    rows, columns = _positions(s)
    distance = (columns - rows).clamp(-15, 15) + 15
    bias = F.embedding(distance, table).permute(2, 0, 1)[None]
    return (s + bias).float().softmax(-1).type_as(s) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = 20 * torch.tanh(_scores(q, k) / 20)
    rows, columns = _positions(s)
    return s.masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    kept = (columns <= rows) & (rows - columns < 16)
    return s.masked_fill(~kept, -math.inf).softmax(-1) @ v


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    return s.masked_fill(~((columns <= rows) | (columns < 10)), -math.inf).softmax(-1) @ v


def documents(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    kept = (ids[:, None, :, None] == ids[:, None, None, :]) & (columns <= rows)
    return s.masked_fill(~kept, -math.inf).softmax(-1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return (_scores(q1, k1).softmax(-1) - 0.2 * _scores(q2, k2).softmax(-1)) @ v


def learned_differential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """With a weight of each head that is learned, as the authors have it."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return (_scores(q1, k1).softmax(-1) - weight.sigmoid() * _scores(q2, k2).softmax(-1)) @ v


def normed_and_rotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def prepared(x: Tensor) -> Tensor:
        x = F.rms_norm(x, x.shape[-1:])
        angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 0.01 ** torch.linspace(0, 1, x.shape[-1] // 2)
        first, second = x.float().chunk(2, -1)
        return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1).to(
            q.dtype
        )

    return F.scaled_dot_product_attention(prepared(q), prepared(k), v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    s = _scores(q, k)
    rows, columns = _positions(s)
    return s.masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head that takes weight and has no value."""
    s = _scores(q, k)
    rows, columns = _positions(s)
    s = s.masked_fill(columns > rows, -math.inf)
    all_ = torch.cat((s, sink[None, :, None, None].expand(*s.shape[:-1], 1)), -1)
    return all_.softmax(-1)[..., :-1] @ v


def shifted_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """As GPT-OSS has it: the maximum of each row is subtracted first, and has a gradient."""
    s = _scores(q, k)
    rows, columns = _positions(s)
    s = s.masked_fill(columns > rows, -math.inf)
    all_ = torch.cat((s, sink.reshape(1, -1, 1, 1).expand(*s.shape[:-1], 1)), -1)
    all_ = all_ - all_.max(dim=-1, keepdim=True).values
    return all_.softmax(-1, dtype=all_.dtype)[..., :-1] @ v


def shifted(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """CogView's: divided scores lose their maximum, and are multiplied again."""
    s = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2) + (1.0 - keep.to(q.dtype)[:, None, None, :]) * -10000.0
    divided = s / 32
    return ((divided - divided.amax(dim=-1).unsqueeze(-1)) * 32).softmax(-1) @ v


def doubly_masked(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """As encoders of speech do: rows that are padding as a whole give zeros."""
    masked = keep[:, None, None, :].eq(0)
    s = _scores(q, k).masked_fill(masked, torch.finfo(q.dtype).min)
    return s.softmax(-1).masked_fill(masked, 0.0) @ v


def clamped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """OPT's: queries are scaled, and masks added to lowest numbers overflow."""
    b, h, n, d = q.shape
    s = torch.bmm((q * d**-0.5).reshape(b * h, n, d), k.reshape(b * h, n, d).transpose(1, 2)).view(b, h, n, n) + mask
    s = torch.max(s, torch.tensor(torch.finfo(s.dtype).min, dtype=s.dtype)).view(b * h, n, n)
    return torch.bmm(s.softmax(-1), v.reshape(b * h, n, d)).view(b, h, n, d)


def added(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """BLOOM's: the contraction adds the positions' part of scores."""
    b, h, n, d = q.shape
    keys, bias = k.reshape(b * h, n, d).transpose(1, 2), (slopes[:, None, None] * torch.arange(n)).to(q.dtype)
    s = bias.repeat(b, 1, 1).baddbmm(q.reshape(b * h, n, d), keys, beta=1.0, alpha=d**-0.5)
    rows, columns = _positions(s)
    s = s.view(b, h, n, n).masked_fill(columns > rows, torch.finfo(s.dtype).min)
    return torch.bmm(s.softmax(-1).view(b * h, n, n), v.reshape(b * h, n, d)).view(b, h, n, d)


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    s = torch.einsum("bhid,bhjd->bhij", q * 0.3, k)
    s = s.masked_fill(~keep[:, None, None, :], -torch.finfo(s.dtype).max)
    return torch.einsum("bhij,bhjd->bhid", s.softmax(-1), v)


def _padding(n: int) -> Tensor:
    """Of two sentences, the second one of which has half the length."""
    return torch.arange(n) < torch.tensor([[n], [n // 2]])


SPELLINGS = {
    "GPT-2": Spelling(gpt2),
    "BERT": Spelling(bert, [_padding]),
    "ALiBi": Spelling(alibi),
    "T5": Spelling(t5, [lambda n: _random(5, 31, 4)], learned=True),
    "softcap": Spelling(softcap),
    "sliding window": Spelling(window),
    "prefix": Spelling(prefix),
    "documents": Spelling(documents, [lambda n: (torch.arange(n) // 20).expand(2, -1).contiguous()]),
    "differential": Spelling(differential),
    "learned differential": Spelling(learned_differential, [lambda n: _random(4, 4, 1, 1)], learned=True),
    "QK norm and rotary": Spelling(normed_and_rotated),
    "grouped heads": Spelling(grouped, heads=(4, 2)),
    "sink": Spelling(with_sink, [lambda n: _random(6, 4)], learned=True),
    "shifted sink": Spelling(shifted_sink, [lambda n: _random(6, 4)], learned=True),
    "shifted": Spelling(shifted, [_padding]),
    "doubly masked": Spelling(doubly_masked, [_padding]),
    "clamped": Spelling(clamped, [lambda n: torch.zeros(2, 1, 1, n).masked_fill(~_padding(n)[:, None, None], -1e4)]),
    "added": Spelling(added, [lambda n: 0.01 * _random(7, 4).abs()]),
    "scaled queries": Spelling(scaled_queries, [_padding]),
}


# ---- with tensors that the scores' function learns -------------------------------------------------------------------


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k) + bias).softmax(-1) @ v


def causal_and_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    s = _scores(q, k) + bias
    rows, columns = _positions(s)
    return s.masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def by_library(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = _scores(q, k)
    rows, columns = _positions(s)
    return (s + slopes[:, None, None] * 0.1 * (columns - rows)).masked_fill(columns > rows, -math.inf).softmax(-1) @ v


def key_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k) + bias[:, :, None, :]).softmax(-1) @ v


def query_scaled(q: Tensor, k: Tensor, v: Tensor, scale: Tensor) -> Tensor:
    return (_scores(q, k) * scale[..., None]).softmax(-1) @ v


def learned_softcap(q: Tensor, k: Tensor, v: Tensor, cap: Tensor) -> Tensor:
    cap = 2 + cap * cap
    return (cap * torch.tanh(_scores(q, k) / cap)).softmax(-1) @ v


BUCKETS = 16


def t5_buckets(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """T5's buckets: exact near the diagonal, then by the logarithm of the distance, of both signs."""
    s = q @ k.transpose(-1, -2)
    rows, columns = _positions(s)
    distance, half = columns - rows, BUCKETS // 2
    near, far = distance.abs(), half // 2
    large = far + (torch.log(near.float().clamp(min=1) / far) / math.log(64 / far) * (half - far)).long()
    bucket = torch.where(distance > 0, half, 0) + torch.where(near < far, near, large.clamp(max=half - 1))
    return (s + F.embedding(bucket, table).permute(2, 0, 1)).float().softmax(-1).type_as(s) @ v


def indexed(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias for each head and distance, read by an index."""
    s = _scores(q, k)
    rows, columns = _positions(s)
    half = table.shape[1] // 2
    return (s + table[:, (columns - rows).clamp(-half, half - 1) + half]).softmax(-1) @ v


LEARNED = {
    "bias of heads": Spelling(biased, [lambda n: _random(7, 4, n, n)], learned=True),
    "causal bias": Spelling(causal_and_biased, [lambda n: _random(7, 4, n, n)], learned=True),
    "one bias": Spelling(biased, [lambda n: _random(8, 1, 1, n, n)], learned=True),
    "mask of the library": Spelling(by_library, [lambda n: _random(7, 1, 4, n, n)], learned=True),
    "slopes": Spelling(sloped, [lambda n: _random(6, 4)], learned=True),
    "bias of keys": Spelling(key_biased, [lambda n: _random(9, 2, 4, n)], learned=True),
    "bias of keys for all heads": Spelling(key_biased, [lambda n: _random(9, 2, 1, n)], learned=True),
    "scale of queries": Spelling(query_scaled, [lambda n: _random(9, 2, 4, n)], learned=True),
    "softcap": Spelling(learned_softcap, [lambda n: _random(3, 1)], learned=True),
    "buckets": Spelling(t5_buckets, [lambda n: _random(5, BUCKETS, 4)], learned=True),
    "indexed table": Spelling(indexed, [lambda n: _random(5, 4, 24)], learned=True),
}
