"""Softmax and normalisations: a few reductions over a row (or a channel) and one elementwise pass over it again.

Statistics are kept in the accumulator dtype (float32 for 16-bit input) until the result is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.creation import expected
from kgen.lowering.pointwise import narrowed, number, pointwise
from kgen.lowering.reduction import accumulator, count, expand_back, mean_and_m2, reduce, reuse, variance_of
from kgen.lowering.tensor import Tensor, reindex, reshape

# ---- softmax --------------------------------------------------------------------------------------------------------


def _widened(x: Tensor) -> Tensor:
    """The tensor in its accumulator dtype, whose values it already has."""
    return Tensor(x.sizes, accumulator(x.dtype), x.device, x.value)


def _shifted(b: Builder, x: Tensor, dim: int) -> Tensor:
    """``x - max(x)`` along `dim`, wide."""
    wide = _widened(reuse(b, x))
    if x.rank == 0:
        return pointwise(lambda p: vs.call("sub", p, p), wide)
    largest = reduce(b, "max", wide, [dim], True)
    return pointwise(lambda p, m: vs.call("sub", p, m), wide, expand_back(largest, x.sizes, [dim]))


def _row_sum(b: Builder, x: Tensor, dim: int) -> Tensor:
    """The sum along `dim`, broadcast back."""
    if x.rank == 0:
        return x
    return expand_back(reduce(b, "sum", x, [dim], True), x.sizes, [dim])


def _dim(x: Tensor, dim: int) -> int:
    return dim % x.rank if x.rank else 0


def softmax(b: Builder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    """The exponentials are stored once, for the sum and for the quotient."""
    dim, out = _dim(x, dim), expected(b).dtype
    powers = b.realize(pointwise(lambda p: vs.call("exp", p), _shifted(b, x, dim)))
    return narrowed(pointwise(lambda e, s: vs.call("truediv", e, s), powers, _row_sum(b, powers, dim)), out)


def log_softmax(b: Builder, x: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    dim, out = _dim(x, dim), expected(b).dtype
    shifted = _shifted(b, x, dim)
    added = _row_sum(b, pointwise(lambda p: vs.call("exp", p), shifted), dim)
    return narrowed(pointwise(lambda p, s: vs.call("sub", p, vs.call("log", s)), shifted, added), out)


def safe_softmax(b: Builder, x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows that are minus infinity throughout give zeros, not NaN."""
    dim, out = _dim(x, dim), expected(b).dtype
    wide = _widened(reuse(b, x))
    powers = b.realize(pointwise(lambda p: vs.call("exp", p), _shifted(b, wide, dim)))
    largest = expand_back(reduce(b, "max", wide, [dim], True), x.sizes, [dim]) if x.rank else wide

    def body(e: Value, s: Value, m: Value) -> Value:
        return vs.where(vs.call("eq", m, number(float("-inf"), m)), number(0, e), vs.call("truediv", e, s))

    return narrowed(pointwise(body, powers, _row_sum(b, powers, dim), largest), out)


def softmax_backward(b: Builder, grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    dim = _dim(out, dim)
    grad, out = _widened(reuse(b, grad)), _widened(reuse(b, out))
    product = pointwise(lambda g, y: vs.call("mul", g, y), grad, out)
    added = _row_sum(b, product, dim)
    return narrowed(pointwise(lambda g, y, s: vs.call("mul", vs.call("sub", g, s), y), grad, out, added), input_dtype)


def log_softmax_backward(b: Builder, grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    dim = _dim(out, dim)
    grad, out = _widened(reuse(b, grad)), _widened(reuse(b, out))
    added = _row_sum(b, grad, dim)

    def body(g: Value, y: Value, s: Value) -> Value:
        return vs.call("sub", g, vs.call("mul", vs.call("exp", y), s))

    return narrowed(pointwise(body, grad, out, added), input_dtype)


# ---- statistics -----------------------------------------------------------------------------------------------------


def _reciprocal_deviation(b: Builder, m2: Tensor, n: Expr, eps: float) -> Tensor:
    """``1 / sqrt(m2 / n + eps)``, stored: the elementwise pass reads it once a row."""
    spread = variance_of(m2, n, 0)
    return b.realize(pointwise(lambda p: vs.call("rsqrt", vs.call("add", p, number(eps, p))), spread))


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """``(x - mean) * rstd * weight + bias``, wide; the other tensors are already broadcast to the shape of `x`."""

    def body(p: Value, m: Value, r: Value, *affine: Value) -> Value:
        left = list(affine)
        p = vs.call("mul", vs.call("sub", p, m), r)
        if weight is not None:
            p = vs.call("mul", p, left.pop(0))
        return vs.call("add", p, left[0]) if bias is not None else p

    return pointwise(body, x, mean, rstd, *(t for t in (weight, bias) if t is not None), compute=x.dtype)


def layer_norm(
    b: Builder, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    dims = list(range(x.rank - len(normalized_shape), x.rank))
    wide = _widened(reuse(b, x))
    mean, m2 = mean_and_m2(b, wide, dims)
    rstd = _reciprocal_deviation(b, m2, count(x, dims), eps)
    # weight and bias have the trailing dimensions only, which is how broadcasting aligns them
    back = [expand_back(t, x.sizes, dims) for t in (mean, rstd)]
    out = _normalised(wide, back[0], back[1], weight, bias)
    return narrowed(out, x.dtype), _as_expected(b, mean, 1), _as_expected(b, rstd, 2)


def _as_expected(b: Builder, x: Tensor | None, position: int) -> Tensor:
    """A statistic in the shape and dtype that torch gives it."""
    assert x is not None
    what = expected(b, position)
    return narrowed(reshape(x, what.sizes), what.dtype)


def group_norm(
    b: Builder, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: Any, c: Any, hxw: Any, group: int, eps: float
) -> tuple[Tensor, ...]:
    """Statistics over each group of channels and all positions."""
    batch, channels, positions = ix.as_expr(n), ix.as_expr(c), ix.as_expr(hxw)
    stored = reuse(b, x)
    grouped = reshape(_widened(stored), (batch, group, ix.floordiv(channels, group), positions))
    mean, m2 = mean_and_m2(b, grouped, [2, 3])
    rstd = _reciprocal_deviation(b, m2, count(grouped, [2, 3]), eps)
    back = [expand_back(t, grouped.sizes, [2, 3]) for t in (mean, rstd)]
    flat = reshape(_normalised(grouped, back[0], back[1], None, None), x.sizes)
    out = _affine(flat, *(None if t is None else _by_channel(t, x) for t in (weight, bias)))
    return narrowed(out, x.dtype), _as_expected(b, mean, 1), _as_expected(b, rstd, 2)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = pointwise(lambda p, w: vs.call("mul", p, w), x, weight, compute=x.dtype)
    return x if bias is None else pointwise(lambda p, q: vs.call("add", p, q), x, bias, compute=x.dtype)


def _by_channel(statistic: Tensor, x: Tensor) -> Tensor:
    """A vector over dimension 1, repeated over the shape of `x`."""
    return reindex(statistic, x.sizes, lambda *index: [index[1]])


# ---- batch norm -----------------------------------------------------------------------------------------------------


def _inference(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """With given statistics: everything that depends on the channel only comes first, so that it is computed once."""
    wide = _widened(x)
    rstd = pointwise(lambda v: vs.call("rsqrt", vs.call("add", v, number(eps, v))), _widened(var))
    back = [_by_channel(t, x) for t in (_widened(mean), rstd)]
    affine = [None if t is None else _by_channel(t, x) for t in (weight, bias)]
    return narrowed(_normalised(wide, back[0], back[1], *affine), x.dtype)


def _batch_statistics(b: Builder, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Expr]:
    """(x stored, mean, m2, rstd, n) with the statistics over dimension 1, as vectors."""
    stored = reuse(b, x)
    dims = [k for k in range(x.rank) if k != 1]
    mean, m2 = mean_and_m2(b, _widened(stored), dims, keepdim=False)
    n = count(x, dims)
    return stored, mean, m2, _reciprocal_deviation(b, m2, n, eps), n


def _moved(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    def body(old: Value, now: Value) -> Value:
        return vs.call("add", vs.call("mul", now, number(momentum, now)), vs.call("mul", old, number(1 - momentum, old)))

    return pointwise(body, _widened(running), new)


def _training(
    b: Builder,
    x: Tensor,
    affine: tuple[Tensor | None, Tensor | None],
    running: tuple[Tensor | None, Tensor | None],
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """(out, mean, rstd, new running mean, new running variance), the statistics wide."""
    stored, mean, m2, rstd, n = _batch_statistics(b, x, eps)
    back = [_by_channel(t, x) for t in (mean, rstd)]
    scale = [None if t is None else _by_channel(t, x) for t in affine]
    out = narrowed(_normalised(_widened(stored), back[0], back[1], *scale), x.dtype)
    moved_mean = None if running[0] is None else _moved(running[0], mean, momentum)
    moved_var = None if running[1] is None else _moved(running[1], variance_of(m2, n, 1), momentum)
    return out, mean, rstd, moved_mean, moved_var


def batch_norm_no_training(
    b: Builder, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _inference(x, weight, bias, mean, var, eps), _none_saved(b, 1), _none_saved(b, 2)


def _none_saved(b: Builder, position: int) -> Tensor:
    return expected(b, position).holding(vs.const(0, torch.float32))


def batch_norm_functional(
    b: Builder,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    if not training:
        return _inference(x, weight, bias, mean, var, eps), _none_saved(b, 1), _none_saved(b, 2), mean, var
    out, saved, rstd, moved_mean, moved_var = _training(b, x, (weight, bias), (mean, var), momentum, eps)
    return out, *(_as_expected(b, t, k + 1) for k, t in enumerate((saved, rstd, moved_mean, moved_var)))


def batch_norm_no_stats(
    b: Builder, x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    out, saved, rstd, _, _ = _training(b, x, (weight, bias), (None, None), momentum, eps)
    return out, _as_expected(b, saved, 1), _as_expected(b, rstd, 2)


def batch_norm_update_functional(
    b: Builder, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    out, saved, rstd, moved_mean, moved_var = _training(b, x, (weight, bias), (mean, var), momentum, eps)
    statistics = _as_expected(b, saved, 1), _as_expected(b, rstd, 2)
    return out, *statistics, _none_saved(b, 3), _as_expected(b, moved_mean, 4), _as_expected(b, moved_var, 5)


def batch_norm_no_update(
    b: Builder, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    return _inference(x, weight, bias, mean, var, eps), *(_none_saved(b, k) for k in (1, 2, 3))


def rms_norm(
    b: Builder, x: Tensor, normalized_shape: Sequence[Any], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, ...]:
    """(x * rstd * weight, rstd)."""
    dims = list(range(x.rank - len(normalized_shape), x.rank))
    wide = _widened(reuse(b, x))
    squares = pointwise(lambda p: vs.call("mul", p, p), wide)
    added = reduce(b, "sum", squares, dims, True)
    n, guard = count(x, dims), torch.finfo(x.dtype).eps if eps is None else eps

    def body(s: Value) -> Value:
        return vs.call("rsqrt", vs.call("add", vs.call("truediv", s, vs.index_value(n, s.dtype)), number(guard, s)))

    rstd = b.realize(pointwise(body, added))
    out = pointwise(lambda p, r: vs.call("mul", p, r), wide, expand_back(rstd, x.sizes, dims))
    return narrowed(_affine(out, weight, None), expected(b, 0).dtype), _as_expected(b, rstd, 1)


RULES: dict[str, Callable[..., Any]] = {
    "aten._softmax": softmax,
    "aten._log_softmax": log_softmax,
    "aten._safe_softmax": safe_softmax,
    "aten._softmax_backward_data": softmax_backward,
    "aten._log_softmax_backward_data": log_softmax_backward,
    "aten.native_layer_norm": layer_norm,
    "aten.native_group_norm": group_norm,
    "aten._native_batch_norm_legit_no_training": batch_norm_no_training,
    "aten._native_batch_norm_legit_functional": batch_norm_functional,
    "aten._native_batch_norm_legit.no_stats": batch_norm_no_stats,
    "aten._batch_norm_with_update_functional": batch_norm_update_functional,
    "aten._batch_norm_no_update": batch_norm_no_update,
    "aten._fused_rms_norm": rms_norm,
}
