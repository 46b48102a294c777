"""Attention as people write it in plain PyTorch, with the library's call and FlexAttention for the same, if there are any."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.matmuls import Given

Function = Callable[..., Tensor]
# From the arguments of a pattern, its function by FlexAttention; masks are made before anything is timed.
Flex = Callable[[Sequence[Tensor]], Function]
WINDOW, PREFIX, DOCUMENTS, CAP, SHARED = 1024, 256, 8, 20.0, 4
# Numbers of T5's table of relative positions.
BUCKETS = 64


@dataclass(frozen=True)
class Pattern:
    """`written` is what is compiled, `library` calls F.scaled_dot_product_attention; `kept` is the share of scores that no mask
    leaves out, `quick` says that a short run has it."""

    name: str
    written: Function
    inputs: tuple[Given, ...]
    library: Function | None = None
    flex: Flex | None = None
    kept: float = 1.0
    quick: bool = False
    sizes: tuple[int, ...] = ()

    @property
    def flops(self) -> float:
        """Of both contractions, of the scores that count."""
        batch, heads, rows, keys, size = self.sizes
        return 4 * batch * heads * rows * keys * size * self.kept

    @property
    def score_bytes(self) -> int:
        """Of all scores in 16 bits."""
        return 2 * math.prod(self.sizes[:4])

    def make(self, device: str, seed: int = 0) -> list[Tensor]:
        return [one.make(device, 100 * seed + k) for k, one in enumerate(self.inputs)]

    def shrunk(self, by: int) -> Pattern:
        """The same with lengths divided by about `by`."""
        return self if by == 1 else replace(self, inputs=tuple(one.shrunk(by) for one in self.inputs))


# ---- spellings ------------------------------------------------------------------------------------------------------


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows and of columns, as far from the ends as they are: the last row sees the last key."""
    rows, columns = s.shape[-2:]
    return torch.arange(rows, device=s.device)[:, None] + (columns - rows), torch.arange(columns, device=s.device)


def causal_scores(s: Tensor) -> Tensor:
    rows, columns = positions(s)
    return s.masked_fill(columns > rows, -math.inf)


def scaled(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled(q, k).softmax(-1) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_scores(scaled(q, k)).softmax(-1) @ v


def gpt2(x: Tensor) -> Tensor:
    """Heads cut out of one projection's result; the softmax in float32; masked scores are the least number, not -inf."""
    q, k, v = (one.transpose(1, 2) for one in x.unbind(2))
    s = scaled(q, k)
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
    s = torch.where(keep, s, torch.finfo(s.dtype).min)
    return (F.softmax(s, -1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2).flatten(2)


def bert(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Keys past the end of a sentence are padding."""
    s = scaled(q, k)
    keep = torch.arange(k.shape[-2], device=k.device) <= lengths[:, None]
    return (s + torch.where(keep, 0.0, torch.finfo(s.dtype).min).to(s.dtype)[:, None, None, :]).softmax(-1) @ v


def alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = scaled(q, k)
    rows, columns = positions(s)
    return causal_scores(s + slopes[:, None, None] * (columns - rows)).softmax(-1) @ v


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A learnt number for each head and distance; scores are not scaled."""
    s = q @ k.mT
    rows, columns = positions(s)
    bucket = (columns - rows).clamp(-BUCKETS // 2, BUCKETS // 2 - 1) + BUCKETS // 2
    return (s + table[:, bucket]).softmax(-1) @ v


def softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_scores(CAP * torch.tanh(scaled(q, k) / CAP)).softmax(-1) @ v


def softcap_alibi(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    s = CAP * torch.tanh(scaled(q, k) / CAP)
    rows, columns = positions(s)
    return causal_scores(s + slopes[:, None, None] * (columns - rows)).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scaled(q, k)
    rows, columns = positions(s)
    return s.masked_fill((columns > rows) | (rows - columns >= WINDOW), -math.inf).softmax(-1) @ v


def prefix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scaled(q, k)
    rows, columns = positions(s)
    return s.masked_fill((columns > rows) & (columns >= PREFIX), -math.inf).softmax(-1) @ v


def document(q: Tensor, k: Tensor, v: Tensor, ids: Tensor) -> Tensor:
    """Several documents in one sequence; `ids` is sorted."""
    s = causal_scores(scaled(q, k))
    return s.masked_fill(ids[:, None] != ids[None, :], -math.inf).softmax(-1) @ v


def differential(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """The difference of two softmaxes, each of a half of the heads (Differential Transformer)."""
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    first, second = (causal_scores(scaled(a, b)).softmax(-1) for a, b in ((q1, k1), (q2, k2)))
    return (first - weight * second) @ v


def rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 1e-4 ** (torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


def qk_norm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (rotated(F.rms_norm(x, (x.shape[-1],))) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal(q, k.repeat_interleave(SHARED, 1), v.repeat_interleave(SHARED, 1))


def sink(q: Tensor, k: Tensor, v: Tensor, logit: Tensor) -> Tensor:
    """A logit of each head's own that takes weight away."""
    s = causal_scores(scaled(q, k))
    more = logit[None, :, None, None].expand(*s.shape[:-1], 1)
    return torch.cat((s, more), -1).softmax(-1)[..., :-1] @ v


def few_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A step of decoding."""
    return plain(q, k.repeat_interleave(SHARED, 1), v.repeat_interleave(SHARED, 1))


# ---- the library ----------------------------------------------------------------------------------------------------


def by_library(causal: bool = True, gqa: bool = False) -> Function:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa)

    return call


def gpt2_by_library(x: Tensor) -> Tensor:
    q, k, v = (one.transpose(1, 2) for one in x.unbind(2))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def bert_by_library(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    keep = (torch.arange(k.shape[-2], device=k.device) <= lengths[:, None])[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep)


# ---- FlexAttention --------------------------------------------------------------------------------------------------


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention  # it takes seconds, and not all runs need it

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def by_flex(
    score: Callable[..., Callable[..., Tensor]] | None = None,
    mask: Callable[..., Callable[..., Tensor]] | None = None,
    batched: bool = False,
    scale: float | None = None,
    gqa: bool = False,
) -> Flex:
    """`score` and `mask` make of the further arguments what FlexAttention takes; a mask may depend on the batch."""

    def make(args: Sequence[Tensor]) -> Function:
        from torch.nn.attention.flex_attention import create_block_mask

        q, k, *more = args
        blocks = None
        if mask is not None:
            batch = q.shape[0] if batched else None
            blocks = create_block_mask(mask(*more[1:]), batch, None, q.shape[-2], k.shape[-2], device=q.device)

        def call(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
            modified = None if score is None else score(*more)
            made: Tensor = _compiled_flex()(q, k, v, score_mod=modified, block_mask=blocks, scale=scale, enable_gqa=gqa)
            return made

        return call

    return make


def _flex_causal(*_: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, m, n: n <= m


def _flex_window(*_: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, m, n: (n <= m) & (m - n < WINDOW)


def _flex_prefix(*_: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, m, n: (n <= m) | (n < PREFIX)


def _flex_padding(lengths: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, m, n: n <= lengths[b]


def _flex_document(ids: Tensor) -> Callable[..., Tensor]:
    return lambda b, h, m, n: (n <= m) & (ids[m] == ids[n])


def _flex_alibi(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: s + slopes[h] * (n - m)


def _flex_cap(*_: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: CAP * torch.tanh(s / CAP)


def _flex_cap_alibi(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: CAP * torch.tanh(s / CAP) + slopes[h] * (n - m)


def _flex_table(table: Tensor) -> Callable[..., Tensor]:
    half = BUCKETS // 2
    return lambda s, b, h, m, n: s + table[h, (n - m).clamp(-half, half - 1) + half]


# ---- the list -------------------------------------------------------------------------------------------------------


def of(
    name: str,
    written: Function,
    sizes: Sequence[int],
    *more: Given,
    shared: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    **how: Any,
) -> Pattern:
    """A pattern of q, k and v of `sizes`: batch, heads, rows, keys and elements; `shared` heads have one of keys."""
    batch, heads, rows, keys, size = sizes
    q, k = Given((batch, heads, rows, size), dtype), Given((batch, heads // shared, keys, size), dtype)
    return Pattern(name, written, (q, k, k, *more), sizes=tuple(sizes), **how)


def _slopes(heads: int) -> Given:
    return Given((heads,), scale=0.02)


flex_causal = by_flex(mask=_flex_causal)
HALF = partial(of, kept=0.5)
PATTERNS = (
    HALF("causal 128", causal, (4, 32, 4096, 4096, 128), library=by_library(), flex=flex_causal, quick=True),
    HALF("causal 128 long", causal, (2, 32, 8192, 8192, 128), library=by_library(), flex=flex_causal),
    HALF("causal 64", causal, (4, 32, 4096, 4096, 64), library=by_library(), flex=flex_causal, quick=True),
    of("plain 64", plain, (8, 12, 1024, 1024, 64), library=by_library(causal=False), flex=by_flex(), quick=True),
    of("plain 96", plain, (8, 16, 2048, 2048, 96), library=by_library(causal=False), flex=by_flex()),
    HALF("causal 256", causal, (2, 16, 4096, 4096, 256), library=by_library(), flex=flex_causal),
    of("plain float32", plain, (2, 12, 1024, 1024, 64), dtype=torch.float32, library=by_library(causal=False), flex=by_flex()),
    Pattern(
        "GPT-2", gpt2, (Given((8, 1024, 3, 12, 64)),), gpt2_by_library, kept=0.5, quick=True, sizes=(8, 12, 1024, 1024, 64),
    ),
    of("BERT", bert, (16, 12, 512, 512, 64), Given((16,), torch.int64, top=512), library=bert_by_library,
       flex=by_flex(mask=_flex_padding, batched=True)),
    HALF("ALiBi", alibi, (2, 16, 2048, 2048, 128), _slopes(16), flex=by_flex(_flex_alibi, _flex_causal)),
    of("T5", t5, (8, 12, 1024, 1024, 64), Given((12, BUCKETS)), flex=by_flex(_flex_table, scale=1.0), quick=True),
    HALF("softcap", softcap, (2, 16, 2048, 2048, 128), flex=by_flex(_flex_cap, _flex_causal)),
    HALF("softcap, ALiBi", softcap_alibi, (2, 16, 2048, 2048, 128), _slopes(16), flex=by_flex(_flex_cap_alibi, _flex_causal),
         quick=True),
    of("window", window, (1, 8, 16384, 16384, 128), flex=by_flex(mask=_flex_window), kept=WINDOW / 16384, quick=True),
    HALF("prefix", prefix, (2, 16, 2048, 2048, 128), flex=by_flex(mask=_flex_prefix)),
    of("documents", document, (2, 16, 4096, 4096, 128), Given((4096,), torch.int64, top=DOCUMENTS, rising=True),
       flex=by_flex(mask=_flex_document), kept=0.5 / DOCUMENTS),
    HALF("differential", differential, (2, 16, 2048, 2048, 128), Given((1,))),
    HALF("QK norm", qk_norm, (2, 16, 2048, 2048, 128)),
    HALF("grouped", grouped, (2, 32, 2048, 2048, 128), shared=SHARED, library=by_library(gqa=True),
         flex=by_flex(mask=_flex_causal, gqa=True), quick=True),
    HALF("sink", sink, (2, 16, 2048, 2048, 128), Given((16,))),
    of("few queries", few_queries, (32, 32, 1, 8192, 128), shared=SHARED, library=by_library(causal=False, gqa=True),
       flex=by_flex(gqa=True)),
)  # fmt: skip
BY_NAME = {one.name: one for one in PATTERNS}
