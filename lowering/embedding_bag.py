"""Sums, means and maxima of bags of rows of a table, where all bags have the same number of rows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.lowering.builder import Builder
from kgen.lowering.creation import expected
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import gather_source, position, read_at
from kgen.lowering.pointwise import narrowed, number, pointwise
from kgen.lowering.reduction import reduce
from kgen.lowering.tensor import Tensor, reindex, reshape

SUM, MEAN, MAX = 0, 1, 2


def embedding_bag(
    b: Builder,
    weight: Tensor,
    indices_: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Tensor, ...]:
    """(bags, and three tensors for a backward pass, which nobody reads)."""
    if padding_idx >= 0:
        raise Refused("bags without the rows of a padding index")
    if any(user.target is not operator.getitem or (user.args[1] != 0 and user.users) for user in b.current.users):
        raise Refused("what a gradient of bags needs")
    length = _length(indices_, offsets, include_last_offset)
    bags = expected(b, 0).sizes[0]
    ids = reshape(indices_, (bags, length))
    rows = read_at(
        b, gather_source(b, weight), (bags, ix.constant(length), weight.sizes[1]),
        lambda *j: [position(ids, j[:2], weight.sizes[0], False), j[2]],
    )  # fmt: skip
    wide = Tensor(rows.sizes, ops.compute_dtype(weight.dtype), weight.device, rows.value)
    if per_sample_weights is not None:
        scales = reindex(reshape(per_sample_weights, (bags, length)), wide.sizes, lambda *j: j[:2])
        wide = pointwise(lambda p, s: vs.call("mul", p, s), wide, scales, compute=wide.dtype)
    made = reduce(b, "max" if mode == MAX else "sum", wide, [1], False)
    if mode == MEAN:
        made = pointwise(lambda p: vs.call("truediv", p, number(length, p)), made)
    rest = (expected(b, k).holding(vs.const(0, torch.int64)) for k in (1, 2, 3))
    return narrowed(made, weight.dtype), *rest


def _length(indices_: Tensor, offsets: Tensor, include_last: bool) -> int:
    """The number of rows of every bag, where bags begin at its multiples."""
    [place] = offsets.indices
    value = offsets.value
    stride = ix.stride_of(value.attr, offsets.axes[0]) if value.op == "index" else None
    length = None if stride is None else stride.as_int()
    bags: Expr = offsets.sizes[0] - 1 if include_last else offsets.sizes[0]
    regular = length is not None and length > 0 and value.attr is place * length
    if not regular or indices_.numel() is not bags * (length or 0):
        raise Refused("bags of different lengths")
    assert length is not None
    return length


RULES: dict[str, Callable[..., Any]] = {"aten._embedding_bag_forward_only": embedding_bag}
