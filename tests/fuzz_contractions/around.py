"""What surrounds a contraction: prologues of its operands, epilogues of its result, and operands it shares with others.

`run` of a prologue gets the operand, its other tensors, the type to compute in and the dimension that is summed over; that of
an epilogue gets the result, its other tensors and the dimension of the columns. All take float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from .tensors import Spec

Shape = tuple[int, ...]


def along(v: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    """A vector as a tensor that differs along `dim` only."""
    shape = [1] * like.dim()
    shape[dim] = -1
    return v.reshape(shape)


def other(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype is torch.float32 else torch.float32


# ---- prologues ----------------------------------------------------------------------------------------------------------


def _as_it_is(spec: Spec, _dim: int) -> Spec:
    return spec


def _none(_spec: Spec, _dim: int) -> tuple[Spec, ...]:
    return ()


def _vector(spec: Spec, dim: int) -> tuple[Spec, ...]:
    return (Spec((spec.shape[dim],), spec.dtype),)


def _two_vectors(spec: Spec, dim: int) -> tuple[Spec, ...]:
    return _vector(spec, dim) * 2


def _same(spec: Spec, _dim: int) -> tuple[Spec, ...]:
    return (replace(spec, layout="contiguous"),)


def _bytes(spec: Spec, _dim: int) -> Spec:
    return replace(spec, dtype=torch.int8, high=100, scale=1.0)


@dataclass(frozen=True)
class Prologue:
    """`stored` says how the operand is stored, `roundings` how often it is rounded to its type. `fits`: the operand's shape and
    whether it is a convolution's."""

    name: str
    run: Callable[..., torch.Tensor]
    extras: Callable[[Spec, int], tuple[Spec, ...]] = _none
    stored: Callable[[Spec, int], Spec] = _as_it_is
    roundings: int = 1
    fits: Callable[[Shape, bool], bool] = lambda shape, conv: True


def _padded(a: torch.Tensor, _kind: torch.dtype, dim: int) -> torch.Tensor:
    """Margins of zeros: of places where `dim` are channels, else along what is summed over."""
    return F.pad(a, (1, 1) * (a.dim() - 2)) if dim == 1 else F.pad(a, (1, 2))


def _without_margins(spec: Spec, dim: int) -> Spec:
    shape = spec.shape
    less = (*shape[:2], *(n - 2 for n in shape[2:])) if dim == 1 else (*shape[:-1], shape[-1] - 3)
    return replace(spec, shape=less)


def _has_margins(shape: Shape, conv: bool) -> bool:
    return all(n > 3 for n in shape[2:]) if conv else shape[-1] > 4


def _rms(a: torch.Tensor, v: torch.Tensor, kind: torch.dtype, _dim: int) -> torch.Tensor:
    wide = a.to(torch.promote_types(kind, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-2) * v).to(kind)


def _index(spec: Spec, _dim: int) -> tuple[Spec, ...]:
    return (Spec(spec.shape[:1], torch.int64, high=spec.shape[0] + 3, index=True),)


LEFT: dict[str, Prologue] = {
    p.name: p
    for p in (
        Prologue("cast", lambda a, kind, dim: a.to(kind), stored=lambda s, _: replace(s, dtype=other(s.dtype))),
        Prologue("relu", lambda a, kind, dim: F.relu(a), roundings=0),
        Prologue("scale", lambda a, v, kind, dim: a * along(v, a, dim), _vector),
        Prologue("affine relu", lambda a, s, t, kind, dim: F.relu(a * along(s, a, dim) + along(t, a, dim)), _two_vectors,
                 roundings=2),
        Prologue("rms norm", _rms, _vector, roundings=2, fits=lambda shape, conv: not conv and shape[-1] > 1),
        Prologue("gather", lambda a, i, kind, dim: a[i], _index,
                 lambda s, _: replace(s, shape=(s.shape[0] + 3, *s.shape[1:])), 0),
        Prologue("pad", _padded, stored=_without_margins, roundings=0, fits=_has_margins),
        Prologue("add", lambda a, t, kind, dim: a + t, _same),
        Prologue("dequant", lambda a, kind, dim: a.to(kind) * 0.02, stored=_bytes),
    )
}  # fmt: skip


def _column_scales(spec: Spec, dim: int) -> tuple[Spec, ...]:
    return (Spec((spec.shape[dim],), spec.dtype, scale=spec.scale / 50),)


RIGHT: dict[str, Prologue] = {
    p.name: p
    for p in (
        Prologue("dequant", lambda b, v, kind, dim: b.to(kind) * along(v, b, dim), _column_scales, _bytes),
        Prologue("cast", lambda b, kind, dim: b.to(kind), stored=lambda s, _: replace(s, dtype=other(s.dtype))),
        Prologue("scale", lambda b, v, kind, dim: b * along(v, b, dim), _vector),
        Prologue("relu", lambda b, kind, dim: F.relu(b), roundings=0),
    )
}  # fmt: skip


# ---- epilogues ----------------------------------------------------------------------------------------------------------

Extras = Callable[[Shape, torch.dtype, int], tuple[Spec, ...]]


def _nothing(_shape: Shape, _kind: torch.dtype, _dim: int) -> tuple[Spec, ...]:
    return ()


def _column(shape: Shape, kind: torch.dtype, dim: int) -> tuple[Spec, ...]:
    return (Spec((shape[dim],), kind),)


def _tile(shape: Shape, kind: torch.dtype, _dim: int) -> tuple[Spec, ...]:
    return (Spec(shape, kind),)


def _turned_tile(shape: Shape, kind: torch.dtype, _dim: int) -> tuple[Spec, ...]:
    return (Spec(shape, kind, "transposed" if len(shape) < 4 else "channels_last"),)


def _column_and_tile(shape: Shape, kind: torch.dtype, dim: int) -> tuple[Spec, ...]:
    return *_column(shape, kind, dim), *_tile(shape, kind, dim)


def _float_column(shape: Shape, _kind: torch.dtype, dim: int) -> tuple[Spec, ...]:
    return (Spec((shape[dim],), torch.float32, scale=1e-3),)


@dataclass(frozen=True)
class Epilogue:
    """`factors` says of each of its results how often the contraction's is a factor; once where it is empty."""

    name: str
    run: Callable[..., Any]
    extras: Extras = _nothing
    fits: Callable[[Shape], bool] = lambda shape: True
    integers: bool = False
    factors: tuple[int, ...] = ()

    def factors_of(self, number: int) -> int:
        return self.factors[number] if self.factors else 1


def _turned(c: torch.Tensor, dim: int) -> torch.Tensor:
    """Stored with the columns elsewhere."""
    return F.gelu(c).movedim(dim, -1 if dim == 1 else -2).contiguous()


def _rest(c: torch.Tensor, dim: int) -> tuple[int, ...]:
    """All dimensions but that of the columns."""
    return tuple(d for d in range(c.dim()) if d != dim % c.dim())


def _has_columns(shape: Shape) -> bool:
    return min(shape) > 0 and shape[-1] > 5 and shape[1] > 2


EPILOGUES: dict[str, Epilogue] = {
    e.name: e
    for e in (
        Epilogue("bias", lambda c, v, dim: c + along(v, c, dim), _column),
        Epilogue("relu", lambda c, dim: F.relu(c)),
        Epilogue("bias relu", lambda c, v, dim: F.relu(c + along(v, c, dim)), _column),
        Epilogue("gelu", lambda c, dim: F.gelu(c)),
        Epilogue("silu", lambda c, dim: F.silu(c)),
        Epilogue("residual", lambda c, t, dim: F.relu(c) + t, _tile),
        Epilogue("bias residual relu", lambda c, v, t, dim: F.relu(c + along(v, c, dim) + t), _column_and_tile),
        Epilogue("turned residual", lambda c, t, dim: torch.tanh(c) + t, _turned_tile),
        Epilogue("turned store", _turned),
        Epilogue("several outputs", lambda c, dim: (F.relu(c), c * 2 + 1)),
        Epilogue("float32", lambda c, dim: torch.sigmoid(c.to(torch.promote_types(c.dtype, torch.float32)))),
        Epilogue("a part", lambda c, dim: F.gelu(c[..., 1:, :-3]), fits=_has_columns),
        Epilogue("row sum", lambda c, dim: F.relu(c).sum(dim)),
        Epilogue("column sum", lambda c, dim: F.relu(c).sum(_rest(c, dim))),
        Epilogue("statistics", lambda c, dim: (c, c.sum(_rest(c, dim)), c.square().sum(_rest(c, dim))), factors=(1, 1, 2)),
        Epilogue("kept with squares", lambda c, dim: (c, c.square().sum(dim, keepdim=True)), factors=(1, 2)),
        Epilogue("softmax", lambda c, dim: c.softmax(dim)),
        Epilogue("amax", lambda c, dim: c.amax(dim)),
        Epilogue("amax of columns", lambda c, dim: c.amax(_rest(c, dim))),
        Epilogue("logsumexp", torch.logsumexp),
        Epilogue("layer norm", lambda c, v, dim: (c - c.mean(dim, keepdim=True))
                 * torch.rsqrt(c.var(dim, correction=0, keepdim=True) + 0.1) * along(v, c, dim), _column),
        Epilogue("mean", lambda c, dim: F.silu(c).mean(tuple(range(2, c.dim()))), fits=lambda shape: len(shape) > 2),
        Epilogue("rescaled", lambda c, v, dim: F.relu(c.to(v.dtype) * along(v, c, dim)), _float_column, integers=True),
    )
}  # fmt: skip


# ---- families -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Contractions of one left operand: `parts` are the shares of columns of the further right operands; `run` gets all
    results, of which each of its own has so many as factors."""

    name: str
    parts: tuple[float, ...]
    run: Callable[..., Any]
    factors: int = 1


FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("gate and up", (1,), lambda dim, gate, up: F.silu(gate) * up, factors=2),
        Family("three projections", (0.5, 0.5), lambda dim, q, k, v: (q, F.relu(k), v * 2)),
        Family("joined", (1, 0.5), lambda dim, *parts: torch.cat(parts, dim)),
    )
}
