"""What stands between two steps of a program in a conformance check: one row for each kind of function of a step's elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kgen.testing.case import Spec

__all__ = ["MIDDLES", "Between"]

Shape = tuple[int, ...]


def _none(_: Shape, __: torch.dtype) -> tuple[Spec, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Between:
    """`run` makes of a step's result, whose last two axes are rows and columns, what the next step sees of it; `extras` are the
    tensors that it reads besides, by the shape of the result and its type."""

    name: str
    run: Callable[..., Any]
    extras: Callable[[Shape, torch.dtype], tuple[Spec, ...]] = _none


def _rows(s: torch.Tensor) -> torch.Tensor:
    return torch.arange(s.shape[-2], device=s.device)[:, None]


def _columns(s: torch.Tensor) -> torch.Tensor:
    return torch.arange(s.shape[-1], device=s.device)


def _causal(s: torch.Tensor) -> torch.Tensor:
    return s.masked_fill(_columns(s) > _rows(s), -torch.inf)


def _alibi(s: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    return s - (_columns(s) - _rows(s)).abs() * slope


def _near(s: torch.Tensor) -> torch.Tensor:
    return torch.where((_columns(s) - _rows(s)).abs() <= 4, s * 0.5, -torch.inf)


def _of_one_document(s: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    return torch.where(row[:, None] == column, s, -torch.inf)


def _looked_up(s: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A bias by how far rows and columns are apart."""
    return s + table[(_columns(s) - _rows(s)).clamp(-8, 8) + 8]


def _first_masked(s: torch.Tensor) -> torch.Tensor:
    """Some rows without any element."""
    return s.masked_fill(_rows(s) % 5 == 0, -torch.inf)


def _wide(s: torch.Tensor) -> torch.Tensor:
    return (s.to(torch.promote_types(s.dtype, torch.float32)) * 0.25).to(s.dtype)


MIDDLES: tuple[Between, ...] = (
    Between("scaled and causal", lambda s: _causal(s * 0.3)),
    Between("scaled", lambda s: s * 0.3),
    Between("capped", lambda s: 5 * torch.tanh(s / 5)),
    Between("plus a tile", lambda s, t: s * 0.3 + t, lambda shape, kind: (Spec(shape, kind),)),
    Between("plus a transposed tile", lambda s, t: s * 0.3 + t, lambda shape, kind: (Spec(shape, kind, "transposed"),)),
    Between("plus a row", lambda s, t: s + t, lambda shape, kind: (Spec(shape[-1:], kind),)),
    Between("times a column", lambda s, t: s * t, lambda shape, kind: (Spec((shape[-2], 1), kind),)),
    Between("by distance", _alibi, lambda shape, kind: (Spec((*shape[:-2], 1, 1), kind, scale=0.1),)),
    Between("near the diagonal", _near),
    Between("some columns", lambda s, t: s.masked_fill(t == 0, -torch.inf),
            lambda shape, _: (Spec(shape[-1:], torch.int64, high=4),)),
    Between("of one document", _of_one_document,
            lambda shape, _: (Spec(shape[-2:-1], torch.int64, high=2), Spec(shape[-1:], torch.int64, high=2))),
    Between("by a table", _looked_up, lambda _, kind: (Spec((17,), kind),)),
    Between("rows without elements", _first_masked),
    Between("in float32", _wide),
    Between("much of it", lambda s, slope, row, t: _causal(3 * torch.tanh(_alibi(s, slope) / 3) + row) * t.abs(),
            lambda shape, kind: (Spec((*shape[:-2], 1, 1), kind, scale=0.1), Spec(shape[-1:], kind), Spec((), kind))),
)  # fmt: skip
