"""Gradients of attention written out, as autograd makes them of weights that are computed again: for tests of templates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
Score = Callable[..., Tensor]


def r(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def positions(s: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(s.shape[-2], device=s.device)[:, None], torch.arange(s.shape[-1], device=s.device)


def causal(s: Tensor, *_: Tensor) -> Tensor:
    rows, columns = positions(s)
    return columns <= rows


def window(s: Tensor, *_: Tensor) -> Tensor:
    rows, columns = positions(s)
    return (columns <= rows) & (rows - columns < 9)


def everywhere(s: Tensor) -> Tensor:
    return causal(s) | True


def by_lengths(s: Tensor, lengths: Tensor) -> Tensor:
    """Each batch has so many keys."""
    return positions(s)[1] < lengths[:, None, None, None]


def by_lengths_of_queries(s: Tensor, lengths: Tensor) -> Tensor:
    """Each batch has so many queries."""
    return positions(s)[0] < lengths[:, None, None, None]


def filled(q: Tensor, k: Tensor, v: Tensor, shift: Tensor, fill: float = -30.0, strict: int = 1) -> Tensor:
    """Causal by a finite number, which shifts of rows make as large as scores, or larger. Row 0 has no key where `strict`."""
    s = q @ k.mT * 0.3 + shift[:, None]
    rows, columns = positions(s)
    return torch.where(columns <= rows - strict, s, fill).softmax(-1) @ v


def shifts(rows: int) -> Tensor:
    """Of most rows none; scores of others are near the number, far below it, or none. In a run of rows all tiles count."""
    made = torch.zeros(rows)
    made[[70, 71, 72]] = torch.tensor([-25.0, -200.0, math.nan])
    made[rows // 2 : rows // 2 + 40] = -28.0
    return made


# A score function, with its derivative by the score.
PLAIN = (lambda s, *_: s * 0.25, lambda s, *_: torch.full_like(s, 0.25))
SOFTCAP = (lambda s: 3 * torch.tanh(s / 3), lambda s: 1 - torch.tanh(s / 3) ** 2)
BIASED = (lambda s, bias: s * 0.25 + bias, lambda s, bias: torch.full_like(s, 0.25))
ALIBI = (lambda s: s * 0.25 - 0.1 * (positions(s)[0] - positions(s)[1]).abs(), PLAIN[1])


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    lse: Tensor,
    delta: Tensor,
    *more: Tensor,
    score: tuple[Score, Score],
    mask: Score | None,
    wanted: Sequence[str] = "qkv",
) -> tuple[Tensor, ...]:
    """What autograd makes of attention with weights computed again, written out."""
    s = q @ k.mT
    weights = torch.exp(score[0](s, *more).float() - lse[..., None])
    weights = weights if mask is None else torch.where(mask(s, *more), weights, 0.0)
    ds = weights * ((g @ v.mT).float() - delta[..., None]) * score[1](s, *more).float()
    ds = (ds if mask is None else torch.where(mask(s, *more), ds, 0.0)).to(q.dtype)
    made = {
        "q": lambda: ds @ k, "k": lambda: ds.mT @ q, "v": lambda: weights.to(q.dtype).mT @ g,
        "rows": lambda: ds.sum(-1), "batches": lambda: ds.sum(0), "table": lambda: _by_distance(ds),
    }  # fmt: skip
    return tuple(made[name]() for name in wanted)


def _by_distance(ds: Tensor) -> Tensor:
    """The gradient of a table of 24 distances."""
    rows, columns = positions(ds)
    entry = (columns - rows).clamp(-11, 12) + 11
    return torch.ops.aten.embedding_dense_backward(ds.sum(0).permute(1, 2, 0), entry, 24, -1, False)


def arguments(
    score: tuple[Score, Score], mask: Score | None, lengths: tuple[int, int, int, int], dtype: torch.dtype, *more: Tensor
) -> list[Tensor]:
    rows, keys, head, values = lengths
    q, k, v, g = (
        r(2, 3, *shape, dtype=dtype, seed=n)
        for n, shape in enumerate([(rows, head), (keys, head), (keys, values), (rows, values)])
    )  # fmt: skip
    s = score[0](q.double() @ k.double().mT, *more)
    s = s if mask is None else torch.where(mask(s, *more), s, -math.inf)
    out = s.softmax(-1) @ v.double()
    return [q, k, v, g, s.logsumexp(-1).float(), (out * g.double()).sum(-1).float(), *more]


# A score function, a mask, rows, keys, elements of a head of queries and of values.
CASES: dict[str, tuple[tuple[Score, Score], Score | None, tuple[int, int, int, int]]] = {
    "plain": (PLAIN, None, (40, 70, 16, 16)),
    "causal": (PLAIN, causal, (150, 150, 32, 32)),
    "window": (PLAIN, window, (100, 100, 16, 16)),
    "softcap": (SOFTCAP, causal, (70, 70, 40, 24)),
    "alibi": (ALIBI, causal, (70, 90, 16, 16)),
    "bias": (BIASED, None, (40, 70, 16, 16)),
    "biased and causal": (BIASED, causal, (40, 70, 16, 48)),
    "wide": (PLAIN, causal, (33, 65, 96, 64)),
    "odd": (SOFTCAP, window, (33, 65, 37, 20)),
    "few rows": (PLAIN, None, (1, 100, 32, 32)),
    "lengths": (PLAIN, by_lengths, (70, 200, 16, 16)),
}


def more_of(name: str) -> list[Tensor]:
    score, mask, (rows, keys, _, _) = CASES[name]
    if mask is by_lengths:
        return [torch.tensor([150, 20])]
    return [r(3, rows, keys)] if score is BIASED else []
