"""What surrounds a matmul in a conformance check: one row for each kind of prologue and epilogue.

A fusion's `run` gets the matmul as a function of its operands, these, and the tensors that `extras` describe. It takes
float64 as well as the type under test, so that it is its own reference. The matmul is whatever a template computes, an operator
too; the comments call its last two axes rows and columns, and the last one of its first operand the depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from kgen.testing.case import Spec

__all__ = ["EPILOGUES", "FAMILIES", "PROLOGUES", "Fusion", "Shapes", "operand_reductions"]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes of the operands and of the result, and the type of the operands. `own` is the axis of the last operand that
    the result has from it alone."""

    inputs: tuple[tuple[int, ...], ...]
    result: tuple[int, ...]
    dtype: torch.dtype
    own: int = -1

    @property
    def left(self) -> tuple[int, ...]:
        return self.inputs[0]

    @property
    def right(self) -> tuple[int, ...]:
        return self.inputs[-1]

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

    def operands(self) -> tuple[Spec, ...]:
        """All, drawn so that the elements of a matmul are about 1."""
        first = (Spec(shape, self.dtype) for shape in self.inputs[:-1])
        return *first, Spec(self.right, self.dtype, scale=max(self.depth, 1) ** -0.5)

    def with_left(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> tuple[Spec, ...]:
        """The operands, the first one of another shape or type."""
        return Spec(shape, dtype or self.dtype), *self.operands()[1:]

    def with_right(self, stored: Spec) -> tuple[Spec, ...]:
        """The operands, the last one stored in another way."""
        return *self.operands()[:-1], stored


Extras = Callable[[Shapes], tuple[Spec, ...]]


def _none(_: Shapes) -> tuple[Spec, ...]:
    return ()


def _matrices(s: Shapes) -> bool:
    return min(map(len, (*s.inputs, s.result))) >= 2


def _with_room(shapes: Shapes) -> bool:
    """Whether a smaller left operand can be padded to its size."""
    return _pairs_of_rows(shapes) and shapes.left[-2] > 2 and shapes.left[-1] > 3


def _pairs_of_rows(s: Shapes) -> bool:
    return _matrices(s) and s.rows > 0 and s.rows % 2 == 0


def _any(_: Shapes) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Fusion:
    """`kernels` are the launches when all is fused. `operands` says how the operands are stored, where that is not plain, and
    `fits` which shapes there are such problems of."""

    name: str
    run: Callable[..., Any]
    extras: Extras = _none
    kernels: int = 1
    operands: Callable[[Shapes], tuple[Spec, ...]] = Shapes.operands
    fits: Callable[[Shapes], bool] = _matrices


# ---- epilogues --------------------------------------------------------------------------------------------------------


def _after(finish: Callable[..., Any]) -> Callable[..., Any]:
    """A fusion that begins with the matmul."""

    def run(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], *extras: torch.Tensor) -> Any:
        return finish(matmul(*operands), *extras)

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
    """A table, and for each row of the matmul the row of the table that it goes to."""
    rows = s.result[0] if distinct else s.result[0] // 2 + 1
    return Spec((rows, *s.result[1:]), s.dtype), Spec(s.result[:1], torch.int64, high=rows, distinct=distinct)


def _split(c: torch.Tensor) -> torch.Tensor:
    """As attention takes its projections apart: columns become (parts, rest), and the parts lead."""
    return c.unflatten(-1, (3, -1)).movedim(-2, 0).contiguous()


EPILOGUES: tuple[Fusion, ...] = (
    Fusion("gelu", _after(F.gelu), fits=_any),
    Fusion("plus a row", _after(lambda c, v: c + v), _row),
    Fusion("times a column", _after(lambda c, v: torch.sigmoid(c) * v), _column),
    Fusion("plus a tile", _after(lambda c, t: F.relu(c) + t), _tile),
    Fusion("plus a transposed tile", _after(lambda c, t: c + t), lambda s: (Spec(s.result, s.dtype, "transposed"),)),
    Fusion("times a scalar", _after(lambda c, v: c * v), _scalar, fits=_any),
    Fusion("all kinds of input", _after(lambda c, row, column, tile, v: F.silu(c + row) * column + tile * v), _all),
    Fusion("several outputs", _after(lambda c: (F.relu(c), c * 2 + 1, c.abs())), fits=_any),
    Fusion("raw result kept", _after(lambda c: (F.relu(c).square(), c))),
    Fusion("to float32", _after(lambda c: F.gelu(c.to(torch.float32)))),
    Fusion("to float16", _after(lambda c: (c * 0.5).to(torch.float16))),
    Fusion("added in place", _after(lambda c, t: t.add_(c)), lambda s: (Spec(s.result, s.dtype, written=True),)),
    Fusion("transposed", _after(lambda c: F.gelu(c).mT.contiguous())),
    Fusion("columns in parts", _after(lambda c: _split(F.silu(c)))),
    Fusion("rows in parts", _after(lambda c: torch.tanh(c).unflatten(-2, (2, -1)).movedim(-2, -1).contiguous()),
           fits=_pairs_of_rows),
    Fusion("a part of it", _after(lambda c: F.gelu(c[..., 1:, :-3])), fits=_pairs_of_rows),
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
    def run(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], *extras: torch.Tensor) -> Any:
        return matmul(change(operands[0], *extras), *operands[1:])

    return run


def _with_right(change: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """`change` also gets the type of the first operand."""

    def run(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], *extras: torch.Tensor) -> Any:
        return matmul(*operands[:-1], change(operands[-1], operands[0].dtype, *extras))

    return run


def _cast(matmul: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    return matmul(operands[0].to(operands[-1].dtype), *operands[1:])


def _all_changed(matmul: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    return matmul(*(F.relu(x) + 1 for x in operands[:-1]), operands[-1] * 2)


def _prologue_and_epilogue(
    matmul: Callable[..., Any], operands: Sequence[torch.Tensor], row: torch.Tensor, t: torch.Tensor
) -> Any:
    return F.gelu(matmul(operands[0] * 0.5, *operands[1:]) + row) + t


def _scaled_behind(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], scale: torch.Tensor) -> Any:
    return matmul(*operands[:-1], operands[-1].to(operands[0].dtype)) * scale


def _two(s: Shapes) -> bool:
    return _matrices(s) and len(s.inputs) > 1


def _even(s: Shapes) -> bool:
    return _two(s) and s.right[-2] % 2 == 0


def _unpacked(w: torch.Tensor) -> torch.Tensor:
    """Two numbers of 4 bits in each byte, neighbours along the last axis but one."""
    return torch.stack(((w & 15).to(torch.int8) - 8, (w >> 4).to(torch.int8) - 8), dim=-2).flatten(-3, -2)


def _along_left(s: Shapes) -> tuple[Spec, ...]:
    return (Spec((s.depth,), s.dtype),)


def _across_left(s: Shapes) -> tuple[Spec, ...]:
    return (Spec((s.left[-2], 1), s.dtype),)


def _scales(size: float, columns: Callable[[Shapes], int]) -> Extras:
    """Scales of quantised numbers that are about `size`."""
    return lambda s: (Spec((columns(s),), s.dtype, scale=max(s.depth, 1) ** -0.5 / size),)


def _bytes(s: Shapes) -> tuple[Spec, ...]:
    return s.with_right(Spec(s.right, torch.int8, high=100))


def _half_bytes(s: Shapes) -> tuple[Spec, ...]:
    return s.with_right(Spec((*s.right[:-2], s.right[-2] // 2, s.right[-1]), torch.uint8, high=256))


def _last(s: Shapes) -> int:
    return s.right[-1]


PROLOGUES: tuple[Fusion, ...] = (
    Fusion("cast", _cast, operands=lambda s: s.with_left(s.left, s.other), fits=_two),
    Fusion("times a scalar", _with_left(lambda a, v: a * v), _scalar, fits=_any),
    Fusion("times a row", _with_left(lambda a, v: a * v), _along_left),
    Fusion("times a column", _with_left(lambda a, v: a * v), _across_left),
    Fusion("of all operands", _all_changed, fits=_any),
    Fusion("sum of two", _with_left(lambda a, t: a + t), lambda s: (Spec(s.left, s.dtype),), fits=_any),
    Fusion("gathered rows", _with_left(lambda a, i: a[i]), lambda s: (Spec(s.left[:1], torch.int64, high=2 * s.left[0] + 1),),
           operands=lambda s: s.with_left((2 * s.left[0] + 1, *s.left[1:]))),
    Fusion("padded", _with_left(lambda a: F.pad(a, (1, 2, 0, 2))),
           operands=lambda s: s.with_left((*s.left[:-2], s.left[-2] - 2, s.left[-1] - 3)), fits=_with_room),
    Fusion("dequantised from int8", _with_right(lambda b, kind, scale: b.to(kind) * scale), _scales(50, _last), operands=_bytes,
           fits=_two),
    Fusion("dequantised element by element", _with_right(lambda b, kind, scale: b.to(kind) * scale),
           lambda s: (Spec(s.right, s.dtype, scale=50**-1),), operands=_bytes, fits=_two),
    Fusion("dequantised from 4 bits", _with_right(lambda b, kind, scale: _unpacked(b).to(kind) * scale), _scales(5, _last),
           operands=_half_bytes, fits=_even),
    Fusion("int8, scaled behind", _scaled_behind, _scales(50, lambda s: s.columns), operands=_bytes, fits=_two),
    Fusion("normalised", _with_left(lambda a, rstd, gain: a * rstd * gain), lambda s: (*_across_left(s), *_along_left(s))),
    Fusion("of a layer norm", _with_left(lambda a, gain: F.layer_norm(a, a.shape[-1:], gain)), _along_left, kernels=2),
    Fusion("and epilogue", _prologue_and_epilogue, lambda s: (*_row(s), *_tile(s))),
)  # fmt: skip


# ---- families ---------------------------------------------------------------------------------------------------------


def _gated(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], other: torch.Tensor) -> Any:
    return F.silu(matmul(*operands)) * matmul(*operands[:-1], other)


def _projected(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], *others: torch.Tensor) -> Any:
    return tuple(matmul(*operands[:-1], b) for b in (operands[-1], *others))


def _narrow(s: Shapes) -> Spec:
    axis = s.own % len(s.right)
    return replace(s.operands()[-1], shape=tuple(n // 3 if k == axis else n for k, n in enumerate(s.right)))


FAMILIES: tuple[Fusion, ...] = (
    Fusion("gate and up", _gated, lambda s: s.operands()[-1:]),
    Fusion("three projections", _projected, lambda s: (_narrow(s), _narrow(s))),
)


# ---- operand reductions -----------------------------------------------------------------------------------------------


def operand_reductions(number: int, along: tuple[int, ...]) -> tuple[Fusion, ...]:
    """An operand that is summed along what the matmul sums over as well: alone, with work on both, and computed."""

    def alone(matmul: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
        return matmul(*operands), operands[number].sum(along)

    def worked_on(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], v: torch.Tensor) -> Any:
        return F.relu(matmul(*operands)) * v, operands[number].sum(along, keepdim=True) * 0.5 + v

    def computed(matmul: Callable[..., Any], operands: Sequence[torch.Tensor], v: torch.Tensor) -> Any:
        changed = [a * v if k == number else a for k, a in enumerate(operands)]
        return matmul(*changed), changed[number].sum(along)

    return (
        Fusion("sum of an operand", alone, fits=_any),
        Fusion("sum of an operand, worked on", worked_on, _scalar, fits=_any),
        Fusion("sum of a computed operand", computed, _scalar, fits=_any),
    )
