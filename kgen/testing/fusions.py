"""What surrounds a product in a conformance check: one row for each kind of prologue and epilogue.

A fusion's `run` gets the product as a function of its two operands, the operands, and the tensors that `extras` describe. It
takes float64 as well as the type under test, so that it is its own reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kgen.testing.case import Spec

__all__ = ["EPILOGUES", "PROLOGUES", "Fusion", "Shapes"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of both operands and of the result, and the type of the operands."""

    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.result[-2]

    @property
    def columns(self) -> int:
        return self.result[-1]

    @property
    def depth(self) -> int:
        return self.left[-1]

    @property
    def other(self) -> torch.dtype:
        """Another type than the operands'."""
        return torch.float32 if self.dtype.itemsize < 4 else torch.bfloat16

    def operands(self) -> tuple[Spec, Spec]:
        """Both, drawn so that the elements of their product are about 1."""
        return Spec(self.left, self.dtype), Spec(self.right, self.dtype, scale=max(self.depth, 1) ** -0.5)


Extras = Callable[[Shapes], tuple[Spec, ...]]


def _none(_: Shapes) -> tuple[Spec, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Fusion:
    """`kernels` are the launches when all is fused. `operands` says how the operands are stored, where that is not plain."""

    name: str
    run: Callable[..., Any]
    extras: Extras = _none
    kernels: int = 1
    operands: Callable[[Shapes], tuple[Spec, Spec]] = Shapes.operands


# ---- epilogues --------------------------------------------------------------------------------------------------------


def _after(finish: Callable[..., Any]) -> Callable[..., Any]:
    """A fusion that begins with the product."""

    def run(product: Callable[..., Any], a: torch.Tensor, b: torch.Tensor, *extras: torch.Tensor) -> Any:
        return finish(product(a, b), *extras)

    return run


def _row(s: Shapes) -> tuple[Spec, ...]:
    return (Spec((s.columns,), s.dtype),)


def _column(s: Shapes) -> tuple[Spec, ...]:
    return (Spec((s.rows, 1), s.dtype),)


def _tile(s: Shapes) -> tuple[Spec, ...]:
    return (Spec(s.result, s.dtype),)


def _scalar(s: Shapes) -> tuple[Spec, ...]:
    return (Spec((), s.dtype),)


def _all(s: Shapes) -> tuple[Spec, ...]:
    return (*_row(s), *_column(s), *_tile(s), *_scalar(s))


def _rows_of_table(s: Shapes, distinct: bool) -> tuple[Spec, ...]:
    """A table, and for each row of the product the row of the table that it goes to."""
    rows = s.result[0] if distinct else s.result[0] // 2 + 1
    return Spec((rows, *s.result[1:]), s.dtype), Spec(s.result[:1], torch.int64, high=rows, distinct=distinct)


def _split(c: torch.Tensor) -> torch.Tensor:
    """As attention takes its projections apart: columns become (parts, rest), and the parts lead."""
    return c.unflatten(-1, (3, -1)).movedim(-2, 0).contiguous()


EPILOGUES: tuple[Fusion, ...] = (
    Fusion("gelu", _after(F.gelu)),
    Fusion("plus a row", _after(lambda c, v: c + v), _row),
    Fusion("times a column", _after(lambda c, v: torch.sigmoid(c) * v), _column),
    Fusion("plus a tile", _after(lambda c, t: F.relu(c) + t), _tile),
    Fusion("plus a transposed tile", _after(lambda c, t: c + t), lambda s: (Spec(s.result, s.dtype, "transposed"),)),
    Fusion("times a scalar", _after(lambda c, v: c * v), _scalar),
    Fusion("all kinds of input", _after(lambda c, row, column, tile, v: F.silu(c + row) * column + tile * v), _all),
    Fusion("several outputs", _after(lambda c: (F.relu(c), c * 2 + 1, c.abs()))),
    Fusion("raw result kept", _after(lambda c: (F.relu(c).square(), c))),
    Fusion("to float32", _after(lambda c: F.gelu(c.to(torch.float32)))),
    Fusion("to float16", _after(lambda c: (c * 0.5).to(torch.float16))),
    Fusion("added in place", _after(lambda c, t: t.add_(c)), lambda s: (Spec(s.result, s.dtype, written=True),)),
    Fusion("transposed", _after(lambda c: F.gelu(c).mT.contiguous())),
    Fusion("columns in parts", _after(lambda c: _split(F.silu(c)))),
    Fusion("rows in parts", _after(lambda c: torch.tanh(c).unflatten(-2, (2, -1)).movedim(-2, -1).contiguous())),
    Fusion("a part of it", _after(lambda c: F.gelu(c[..., 1:, :-3]))),
    Fusion("every second column", _after(lambda c: c[..., ::2] * 2)),
    Fusion("sum of rows", _after(lambda c: c.exp().sum(-1)), kernels=2),
    Fusion("sum of columns", _after(lambda c: F.relu(c).sum(-2)), kernels=2),
    Fusion("sum of squares kept with it", _after(lambda c: (c, c.square().sum(-1, keepdim=True))), kernels=2),
    Fusion("maximum of rows", _after(lambda c: c.amax(-1)), kernels=2),
    Fusion("maximum of columns", _after(lambda c: c.amax(-2)), kernels=2),
    Fusion("log of a sum of exponentials", _after(lambda c: torch.logsumexp(c, -1)), kernels=2),
    Fusion("sum of everything", _after(lambda c: c.sum()), kernels=2),
    Fusion("rows put elsewhere", _after(lambda c, t, i: t.index_put((i,), c)), lambda s: _rows_of_table(s, True), 2),
    Fusion("rows added up", _after(lambda c, t, i: t.index_add(0, i, c)), lambda s: _rows_of_table(s, False), 2),
)  # fmt: skip


# ---- prologues --------------------------------------------------------------------------------------------------------


def _with_left(change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda product, a, b, *extras: product(change(a, *extras), b)


def _with_right(change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    return lambda product, a, b, *extras: product(a, change(b, *extras))


def _cast_left(s: Shapes) -> tuple[Spec, Spec]:
    return Spec(s.left, s.other), s.operands()[1]


def _more_rows(s: Shapes) -> tuple[Spec, Spec]:
    """A left operand with rows to choose from."""
    return Spec((2 * s.left[0] + 1, *s.left[1:]), s.dtype), s.operands()[1]


def _smaller(s: Shapes) -> tuple[Spec, Spec]:
    """A left operand without its last rows, and without its last columns."""
    return Spec((*s.left[:-2], s.left[-2] - 2, s.left[-1] - 3), s.dtype), s.operands()[1]


def _bytes(s: Shapes) -> tuple[Spec, Spec]:
    return s.operands()[0], Spec(s.right, torch.int8, high=100)


def _packed(s: Shapes) -> tuple[Spec, Spec]:
    """Two numbers of 4 bits in each byte, neighbours along the depth."""
    *lead, depth, columns = s.right
    return s.operands()[0], Spec((*lead, depth // 2, columns), torch.uint8, high=256)


def _unpacked(w: torch.Tensor) -> torch.Tensor:
    return torch.stack(((w & 15).to(torch.int8) - 8, (w >> 4).to(torch.int8) - 8), dim=-2).flatten(-3, -2)


def _depth(s: Shapes, scale: float = 1.0) -> tuple[Spec, ...]:
    return (Spec((s.depth,), s.dtype, scale=scale),)


PROLOGUES: tuple[Fusion, ...] = (
    Fusion("cast", lambda product, a, b: product(a.to(b.dtype), b), operands=_cast_left),
    Fusion("times a scalar", _with_left(lambda a, v: a * v), _scalar),
    Fusion("times a row", _with_left(lambda a, v: a * v), _depth),
    Fusion("times a column", _with_left(lambda a, v: a * v), lambda s: (Spec((s.rows, 1), s.dtype),)),
    Fusion("of both operands", lambda product, a, b: product(F.relu(a), b * 2)),
    Fusion("sum of two", _with_left(lambda a, t: a + t), lambda s: (Spec(s.left, s.dtype),)),
    Fusion("gathered rows", _with_left(lambda a, i: a[i]), lambda s: (Spec(s.left[:1], torch.int64, high=2 * s.left[0] + 1),),
           operands=_more_rows),
    Fusion("padded", _with_left(lambda a: F.pad(a, (1, 2, 0, 2))), operands=_smaller),
    Fusion("dequantised from int8", lambda product, a, b, scale: product(a, b.to(a.dtype) * scale), operands=_bytes,
           extras=lambda s: (Spec((s.columns,), s.dtype, scale=0.02 * max(s.depth, 1) ** -0.5),)),
    Fusion("dequantised from 4 bits", lambda product, a, b, scale: product(a, _unpacked(b).to(a.dtype) * scale),
           operands=_packed, extras=lambda s: (Spec((s.columns,), s.dtype, scale=0.2 * max(s.depth, 1) ** -0.5),)),
    Fusion("int8, scaled behind", lambda product, a, b, scale: product(a, b.to(a.dtype)) * scale, operands=_bytes,
           extras=lambda s: (Spec((s.columns,), s.dtype, scale=0.02 * max(s.depth, 1) ** -0.5),)),
    Fusion("normalised", _with_left(lambda a, rstd, gain: a * rstd * gain),
           lambda s: (Spec((s.rows, 1), s.dtype), *_depth(s))),
    Fusion("of a layer norm", _with_left(lambda a, gain: F.layer_norm(a, a.shape[-1:], gain)), _depth, kernels=2),
    Fusion("and epilogue", lambda product, a, b, row, t: F.gelu(product(a * 0.5, b) + row) + t,
           extras=lambda s: (*_row(s), *_tile(s))),
)  # fmt: skip
