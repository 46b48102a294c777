"""Attention with its gradients: patterns, how a contender is trained, and gradients written out for checks of templates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import attention
from bench.attention import Pattern, by_flex, by_library
from bench.contenders import copy_of
from bench.matmuls import Given

TEMPLATES = tuple(f"triton_attention_backward{kind}" for kind in ("", "_values", "_scores", "_table"))
# Of the same gradients, for Hopper GPUs alone, with those in whose place they stand.
WARP_SPECIALIZED = {f"{one}_warp_specialized": one for one in TEMPLATES[:2]}
# Of all gradients in one launch: that of queries and keys with that of values.
ALL_GRADIENTS = tuple(f"{one}_together" for one in TEMPLATES[:2])
# Of a backward pass and its forward pass: contractions that are computed in place of forward's two, recomputed ones included.
CONTRACTIONS = (2 + 5) / 2


# ---- patterns -------------------------------------------------------------------------------------------------------


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A learnt number for each head, row and column."""
    return (attention.scaled(q, k) + bias).softmax(-1) @ v


def _flex_bias(bias: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: s + bias[h, m, n]


def causal_and_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return attention.causal_scores(attention.scaled(q, k) + bias).softmax(-1) @ v


def sloped(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
    """ALiBi with learnt slopes."""
    s = attention.scaled(q, k)
    rows, columns = attention.positions(s)
    return attention.causal_scores(s + slopes[:, None, None] * (columns - rows)).softmax(-1) @ v


def _flex_slopes(slopes: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: s + slopes[h] * (n - m)


def key_biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A learnt number for each head and key, the same for all batches."""
    return (attention.scaled(q, k) + bias[:, None, :]).softmax(-1) @ v


def _flex_keys(bias: Tensor) -> Callable[..., Tensor]:
    return lambda s, b, h, m, n: s + bias[h, n]


def biased_by_library(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias of heads and keys is the same for all rows."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias if bias.dim() == 3 else bias[:, None, :])


PATTERNS = (
    attention.HALF("train causal 128", attention.causal, (4, 16, 4096, 4096, 128), library=by_library(),
                   flex=attention.flex_causal, quick=True),
    attention.HALF("train causal 64", attention.causal, (8, 12, 1024, 1024, 64), library=by_library(),
                   flex=attention.flex_causal, quick=True),
    attention.HALF("train causal 256", attention.causal, (2, 16, 2048, 2048, 256), library=by_library(),
                   flex=attention.flex_causal),
    attention.HALF("train softcap", attention.softcap, (2, 16, 2048, 2048, 128),
                   flex=by_flex(attention._flex_cap, attention._flex_causal), quick=True),
    attention.of("train bias", biased, (8, 12, 1024, 1024, 64), Given((12, 1024, 1024)), library=biased_by_library,
                 flex=by_flex(_flex_bias), quick=True),
    attention.of("train T5", attention.t5, (8, 12, 1024, 1024, 64), Given((12, attention.BUCKETS)),
                 flex=by_flex(attention._flex_table, scale=1.0)),
    attention.HALF("train causal bias", causal_and_biased, (8, 12, 1024, 1024, 64), Given((12, 1024, 1024)),
                   flex=by_flex(_flex_bias, attention._flex_causal)),
    attention.HALF("train slopes", sloped, (2, 16, 2048, 2048, 128), Given((16,)),
                   flex=by_flex(_flex_slopes, attention._flex_causal), quick=True),
    attention.of("train key bias", key_biased, (8, 12, 1024, 1024, 64), Given((12, 1024)), library=biased_by_library,
                 flex=by_flex(_flex_keys)),
    attention.HALF("train grouped", attention.grouped, (2, 32, 2048, 2048, 128), shared=attention.SHARED,
                   library=by_library(gqa=True), flex=by_flex(mask=attention._flex_causal, gqa=True)),
)  # fmt: skip
BY_NAME = {one.name: one for one in PATTERNS}


@cache
def _gradient(shape: tuple[int, ...], device: str) -> Tensor:
    """Of a result, the same for all contenders and types."""
    return Given(shape).make(device, 99)


def trained(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """A function's result, and the gradients of all floating-point arguments. Backward is compiled when it runs first: in this
    thread, so that it has the context that forward had (`kgen.only`)."""

    def call(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            own = [a.detach().requires_grad_(a.is_floating_point()) for a in args]
            made = function(*own)
            gradient = _gradient(tuple(made.shape), str(made.device)).to(made.dtype)
            found = torch.autograd.grad(made, [a for a in own if a.requires_grad], gradient)
        return made.detach(), *found

    return call


def training(pattern: Pattern) -> Pattern:
    """A pattern whose library's call and FlexAttention are trained; what is written is compiled before."""
    flex, library = pattern.flex, pattern.library
    return Pattern(
        pattern.name, pattern.written, pattern.inputs, None if library is None else trained(library),
        None if flex is None else lambda args: trained(flex(args)), pattern.kept * CONTRACTIONS, pattern.quick, pattern.sizes,
    )  # fmt: skip


def compiled(pattern: Pattern, **how: Any) -> Callable[..., tuple[Tensor, ...]]:
    return trained(torch.compile(copy_of(pattern.written), fullgraph=True, **how))


# ---- gradients written out ------------------------------------------------------------------------------------------

Score = Callable[..., Tensor]


@dataclass(frozen=True)
class Scores:
    """A score function, its derivative by the score, and a mask."""

    score: Score
    derivative: Score
    mask: Callable[[Tensor], Tensor] | None = None


def _causal(s: Tensor) -> Tensor:
    rows, columns = attention.positions(s)
    return columns <= rows


def _near(s: Tensor) -> Tensor:
    rows, columns = attention.positions(s)
    return (columns <= rows) & (rows - columns < 100)


def _scaled(s: Tensor, *_: Tensor) -> Tensor:
    return s * 0.125


def _eighth(s: Tensor, *_: Tensor) -> Tensor:
    return torch.full_like(s, 0.125)


def _capped(s: Tensor, bias: Tensor) -> Tensor:
    return 5 * torch.tanh(s / 40) + bias


def _slope(s: Tensor, bias: Tensor) -> Tensor:
    return (1 - torch.tanh(s / 40) ** 2) / 8


PLAIN, CAUSAL, NEAR = Scores(_scaled, _eighth), Scores(_scaled, _eighth, _causal), Scores(_scaled, _eighth, _near)
CAPPED = Scores(_capped, _slope, _causal)


def _recomputed(how: Scores, *args: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, and gradients of scores, of the arguments of `saved`."""
    q, k, v, g, lse, delta, *more = args
    wide = torch.promote_types(q.dtype, torch.float32)
    s = (q @ k.mT).to(wide)
    weights = torch.exp(how.score(s, *more) - lse[..., None])
    weights = weights if how.mask is None else torch.where(how.mask(s), weights, 0.0)
    ds = weights * ((g @ v.mT).to(wide) - delta[..., None]) * how.derivative(s, *more)
    return weights, ds if how.mask is None else torch.where(how.mask(s), ds, 0.0)


def _operands(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    """And sums of rows with other numbers than ones, for the plain ones are zero: gradients of a softmax add up to nothing."""
    q, k, *_ = args
    ds = _recomputed(how, *args)[1].to(q.dtype)
    _, columns = attention.positions(ds)
    return ds @ k, ds.mT @ q, (ds * columns.float().cos().to(ds.dtype)).sum(-1)


def _operands_alone(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    q, k, *_ = args
    ds = _recomputed(how, *args)[1].to(q.dtype)
    return ds @ k, ds.mT @ q


def _all(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    q, k, _, g, *_ = args
    weights, ds = _recomputed(how, *args)
    return ds.to(q.dtype) @ k, ds.to(q.dtype).mT @ q, weights.to(q.dtype).mT @ g


def _values(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    q, _, _, g, *_ = args
    return (_recomputed(how, *args)[0].to(q.dtype).mT @ g,)


def _entries(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    """With the gradient of a table of distances."""
    ds = _recomputed(how, *args)[1].to(args[0].dtype)
    rows, columns = attention.positions(ds)
    entry = (columns - rows).clamp(-30, 29) + 30
    table = torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 60, -1, False)
    return ds @ args[1], table


def _batches(how: Scores, *args: Tensor) -> tuple[Tensor, ...]:
    """With the gradient of a bias that batches share."""
    ds = _recomputed(how, *args)[1].to(args[0].dtype)
    return ds @ args[1], ds.sum(0)


KINDS = dict(
    zip(
        (*TEMPLATES, *WARP_SPECIALIZED, ALL_GRADIENTS[0]),
        (_operands, _values, _batches, _entries, _operands_alone, _values, _all),
        strict=True,
    )
)


def beside(template: str) -> tuple[str, ...]:
    """The templates of what is made beside a template's gradients."""
    if template in ALL_GRADIENTS:
        return ALL_GRADIENTS
    rivals = (template, WARP_SPECIALIZED.get(template))
    return tuple(one for one in TEMPLATES if one not in rivals)


def written_out(how: Scores, template: str) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients that a template makes: of queries and keys, of values, or of what is added to scores, which is nobody's
    without the first one. Arguments are those of `saved`."""
    of = KINDS[template]

    def gradients(*args: Tensor) -> tuple[Tensor, ...]:
        return of(how, *args)

    return gradients


def saved(how: Scores, q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> list[Tensor]:
    """What backward gets: queries, keys, values, the result's gradient, the log-sum-exp, and the sums of the gradient times
    the result."""
    g = Given((*q.shape[:-1], v.shape[-1]), q.dtype).make(q.device, 98)
    s = how.score(q.double() @ k.double().mT, *(one.double() for one in more))
    s = s if how.mask is None else torch.where(how.mask(s), s, -math.inf)
    out = s.softmax(-1) @ v.double()
    return [q, k, v, g, s.logsumexp(-1).float(), (out * g.double()).sum(-1).float(), *more]
