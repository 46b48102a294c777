"""Reductions over dimensions: sums, means, variances, extremes and their positions, truth, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kgen.capture.check_index import check_index
from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.fallback import Refused
from kgen.lowering.few_terms import LEAST_REDUCED, MOST_COST, are_few, are_parts, combined
from kgen.lowering.one_hot import one_hot_sum
from kgen.lowering.pointwise import Operand, narrowed, number, pointwise
from kgen.lowering.pointwise import extreme as pairwise
from kgen.lowering.special import fixed_power
from kgen.lowering.tensor import Tensor, convert, reindex
from kgen.lowering.unbacked import check

Dims = Sequence[int] | int | None

# The largest number of 32 bits.
INT32 = (1 << 31) - 1
# A value that several loops read is stored first when it costs more than this many additions.
CHEAP = 6


def dims_of(x: Tensor, dims: Dims) -> list[int]:
    """Sorted distinct dimensions; None and an empty list mean all of them."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return list(range(x.rank))
    return sorted({d % x.rank for d in dims}) if x.rank else []


def count(x: Tensor, dims: Sequence[int]) -> Expr:
    """How many elements go into one result."""
    return ix.product(x.sizes[d] for d in dims)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a result of `dtype` is kept while formulas still act on it: rounding happens once, at the end."""
    return ops.compute_dtype(dtype)


def reuse(b: Builder, x: Tensor) -> Tensor:
    """The tensor, stored when several loops will read it and it costs more than a load."""
    return b.realize(x) if vs.total_cost([x.value]) > CHEAP else x


def drop(x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """A tensor without dimensions of size one (or with them, for keepdim)."""
    if keepdim:
        return x
    kept = [k for k in range(x.rank) if k not in dims]

    def where(*index: Expr) -> Sequence[Expr]:
        place = [ix.ZERO] * x.rank
        for k, i in zip(kept, index, strict=True):
            place[k] = i
        return place

    return reindex(x, [x.sizes[k] for k in kept], where)


def expand_back(x: Tensor, sizes: Sequence[Expr], dims: Sequence[int]) -> Tensor:
    """A keepdim result repeated over the reduced dimensions of the shape it came from."""
    return reindex(x, sizes, lambda *index: [ix.ZERO if k in dims else i for k, i in enumerate(index)])


def reduce(b: Builder, op: str, x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None = None) -> Tensor:
    """One reduction with one result; nothing to do where every reduced dimension has one element."""
    dtype = dtype or x.dtype
    if all(x.sizes[d] == 1 for d in dims):
        return drop(Tensor(x.sizes, dtype, x.device, x.value), dims, keepdim)
    return b.reduce(op, x, dims, keepdim, [dtype])[0]


# ---- sums -----------------------------------------------------------------------------------------------------------


def sum_type(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if not dtype.is_floating_point and not dtype.is_complex else dtype


def as_summand(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The input in the dtype that a sum or product adds up in."""
    return convert(x, dtype or sum_type(x.dtype))


def total(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    given, x = x, as_summand(x, dtype)
    if x.dtype is torch.bool:
        return _truth(b, "any", x, dims_of(x, dim), keepdim)
    dims = dims_of(x, dim)
    picked = one_hot_sum(b, x, dims)
    if picked is not None:
        return drop(picked, dims, keepdim)
    if given.dtype is torch.bool and x.dtype is torch.int64 and ix.within(count(x, dims), INT32):
        # what holds is counted in 32 bits, which take half the registers and instructions
        return convert(reduce(b, "sum", convert(given, torch.int32), dims, keepdim), x.dtype)
    return reduce(b, "sum", x, dims, keepdim)


def product(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = as_summand(x, dtype)
    if x.dtype is torch.bool:
        return _truth(b, "all", x, dims_of(x, dim), keepdim)
    return reduce(b, "prod", x, dims_of(x, dim), keepdim)


def divide_by_count(x: Tensor, n: Expr) -> Tensor:
    return pointwise(lambda p: vs.call("truediv", p, vs.index_value(n, p.dtype)), x)


def mean(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = convert(x, dtype or x.dtype)
    if not x.dtype.is_floating_point:
        raise Refused("mean of integers")
    dims = dims_of(x, dim)
    added = reduce(b, "sum", x, dims, keepdim, accumulator(x.dtype))
    return narrowed(divide_by_count(added, count(x, dims)), x.dtype)


def nansum(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    if x.dtype.is_floating_point:
        x = pointwise(lambda p: vs.where(vs.call("isnan", p), number(0, p), p), x)
    return total(b, x, dim, keepdim, dtype=dtype)


def count_nonzero(b: Builder, x: Tensor, dim: Dims = None) -> Tensor:
    hits = pointwise(lambda p: vs.cast(vs.cast(p, torch.bool), torch.int64), x, result=torch.int64)
    return reduce(b, "sum", hits, dims_of(x, dim), False)


# ---- variance -------------------------------------------------------------------------------------------------------


def mean_and_m2(b: Builder, x: Tensor, dims: Sequence[int], keepdim: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations in one pass, in the accumulator dtype."""
    kind = accumulator(x.dtype)
    if all(x.sizes[d] == 1 for d in dims):
        here = drop(Tensor(x.sizes, kind, x.device, x.value), dims, keepdim)
        # infinities and NaN deviate from themselves by NaN
        return here, pointwise(lambda p: vs.call("sub", p, p), here)
    first, second = b.reduce("welford", x, dims, keepdim, [kind, kind])
    return first, second


def variance_of(m2: Tensor, n: Expr, correction: float | Expr | None) -> Tensor:
    """``m2 / max(0, n - correction)``: NaN or infinity where nothing is left."""
    less = 1 if correction is None else correction
    if isinstance(less, int | Expr):
        return pointwise(lambda p: vs.call("truediv", p, vs.index_value(ix.maximum(n - less, 0), p.dtype)), m2)

    def body(p: Value) -> Value:
        left = vs.call("sub", vs.index_value(n, p.dtype), number(float(less), p))
        return vs.call("truediv", p, vs.call("maximum", left, number(0, p)))

    return pointwise(body, m2)


def _correction(unbiased: Any, correction: Any) -> Any:
    return correction if correction is not None else 1 if unbiased is None else int(bool(unbiased))


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Dims, Any, bool]:
    """(dim, correction, keepdim) of any overload of var: ``(unbiased)``, ``(dim, unbiased, keepdim)``, with ``correction=``."""
    named = dict(kwargs)
    if args and isinstance(args[0], bool):
        named.setdefault("unbiased", args[0])
    else:
        named.update(zip(("dim", "unbiased", "keepdim"), args, strict=False))
    correction = _correction(named.get("unbiased"), named.get("correction"))
    return named.get("dim"), correction, bool(named.get("keepdim", False))


def _moments(b: Builder, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    dim, correction, keepdim = _arguments(args, kwargs)
    if not x.dtype.is_floating_point:
        raise Refused("variance of integers")
    dims = dims_of(x, dim)
    n = count(x, dims)
    middle, m2 = mean_and_m2(b, x, dims, keepdim)
    empty = vs.compare("lt", n, ix.ONE)
    middle = pointwise(lambda p: vs.where(empty, number(math.nan, p), p), middle)
    return variance_of(m2, n, correction), middle


def var(b: Builder, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return narrowed(_moments(b, x, args, kwargs)[0], x.dtype)


def _root(x: Tensor) -> Tensor:
    return pointwise(lambda p: vs.call("sqrt", p), x)


def _as_deviations(x: Tensor) -> Tensor:
    """What a standard deviation is computed from: on a CPU float64, as in eager, because squares of numbers overflow whose
    deviation does not."""
    narrow = x.device.type == "cpu" and x.dtype.is_floating_point
    return convert(x, torch.float64) if narrow else x


def std(b: Builder, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return narrowed(_root(_moments(b, _as_deviations(x), args, kwargs)[0]), x.dtype)


def var_mean(b: Builder, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    spread, middle = _moments(b, x, args, kwargs)
    return narrowed(spread, x.dtype), narrowed(middle, x.dtype)


def std_mean(b: Builder, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    spread, middle = _moments(b, _as_deviations(x), args, kwargs)
    return narrowed(_root(spread), x.dtype), narrowed(middle, x.dtype)


# ---- extremes -------------------------------------------------------------------------------------------------------


def extreme(b: Builder, op: str, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    if x.dtype is torch.bool:
        return _truth(b, "any" if op == "max" else "all", x, dims, keepdim)
    return reduce(b, op, x, dims, keepdim)


def _not_empty(b: Builder, name: str, x: Tensor, dims: Sequence[int]) -> None:
    """Nothing has no extreme: eager's operator raises that where sizes are known to be zero, a check where data decide them."""
    n = count(x, dims)
    if n.as_int() == 0:
        raise Refused("an extreme of nothing, for which eager raises")
    if b.symbols.depends_on_data(n):
        check(b, ix.apply("lt", 0, n), f"{name}(): expected a reduction over at least one element", check_index)


def amax(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return extreme(b, "max", x, dims_of(x, dim), keepdim)


def amin(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    return extreme(b, "min", x, dims_of(x, dim), keepdim)


def aminmax(b: Builder, x: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    x = reuse(b, x)
    return amin(b, x, dim, keepdim), amax(b, x, dim, keepdim)


def positioned(b: Builder, op: str, x: Tensor, dims: Sequence[int], keepdim: bool) -> tuple[Tensor, Tensor]:
    """An extreme and the row-major position of its first occurrence."""
    if all(x.sizes[d] == 1 for d in dims):
        here = drop(x, dims, keepdim)
        return here, here.with_value(vs.const(0, torch.int64), torch.int64)
    # a 16-bit value that is not stored yet has more digits than the user may see: ties must be those of the rounded values
    rounded = x.with_value(vs.cast(x.value, x.dtype))
    value, where = b.reduce(op, rounded, dims, keepdim, [x.dtype, torch.int64])
    return value, where


def extreme_along(op: str) -> Callable[..., Any]:
    """``max(x)``, ``max(x, dim)`` with its positions."""

    def rule(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Any:
        _not_empty(b, op, x, dims_of(x, dim))
        if dim is None:
            return extreme(b, op, x, dims_of(x, None), keepdim)
        return positioned(b, f"arg{op}", x, dims_of(x, dim), keepdim)

    return rule


def position_of(op: str) -> Callable[..., Tensor]:
    def rule(b: Builder, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return positioned(b, op, x, dims_of(x, dim), keepdim)[1]

    return rule


# ---- truth ----------------------------------------------------------------------------------------------------------


def _truth(b: Builder, op: str, x: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    test = x.with_value(vs.cast(x.value, torch.bool), torch.bool)
    return reduce(b, op, test, dims, keepdim)


def truth(op: str) -> Callable[..., Tensor]:
    """any and all: bool, but uint8 for uint8, and an empty list of dimensions reduces none."""

    def rule(b: Builder, x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        none = dim is not None and not isinstance(dim, int) and len(dim) == 0
        result = _truth(b, op, x, [] if none else dims_of(x, dim), keepdim)
        return convert(result, torch.uint8) if x.dtype is torch.uint8 else result

    return rule


# ---- norms ----------------------------------------------------------------------------------------------------------


def _absolute(x: Tensor) -> Tensor:
    return pointwise(lambda p: vs.call("abs", p), x)


def vector_norm(
    b: Builder, x: Tensor, order: Operand = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = convert(x, dtype or x.dtype)
    if not x.dtype.is_floating_point or not isinstance(order, int | float):
        raise Refused("a norm of integers or of a symbolic order")
    dims = dims_of(x, dim)
    kind = accumulator(x.dtype)
    if order in (math.inf, -math.inf):
        return reduce(b, "max" if order > 0 else "min", _absolute(x), dims, keepdim)
    if order == 0:
        hits = pointwise(lambda p: vs.cast(vs.call("ne", p, number(0, p)), p.dtype), x)
        return reduce(b, "sum", hits, dims, keepdim)
    if order == 1 or all(x.sizes[d] == 1 for d in dims):  # the norm of one element: no power of it may overflow
        return reduce(b, "sum", _absolute(x), dims, keepdim)
    if order == 2:
        squares = pointwise(lambda p: vs.call("mul", p, p), x)
        return narrowed(_root(reduce(b, "sum", squares, dims, keepdim, kind)), x.dtype)
    powers = pointwise(lambda p: fixed_power(p, float(order)), _absolute(x))
    added = reduce(b, "sum", powers, dims, keepdim, kind)
    return narrowed(pointwise(lambda p: vs.call("pow", p, number(1 / float(order), p)), added), x.dtype)


def norm(
    b: Builder, x: Tensor, p: Operand | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return vector_norm(b, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


def logsumexp(b: Builder, x: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    """The maximum is subtracted as it is, so that one walk can make it and the sum; where it is infinite, it is the result."""
    few = _logsumexp_of_few(x, dims_of(x, dim))
    if few is not None:
        return narrowed(drop(few, dims_of(x, dim), keepdim), x.dtype)
    x = convert(reuse(b, x), x.dtype if x.dtype.is_floating_point else torch.get_default_dtype())
    dims, kind = dims_of(x, dim), accumulator(x.dtype)
    wide = Tensor(x.sizes, kind, x.device, x.value)
    largest = reduce(b, "max", wide, dims, True)
    shifted = pointwise(lambda p, m: vs.call("exp", vs.call("sub", p, m)), wide, expand_back(largest, x.sizes, dims))
    added = reduce(b, "sum", shifted, dims, True)

    return narrowed(drop(pointwise(_back_in_logarithms, largest, added), dims, keepdim), x.dtype)


def _back_in_logarithms(m: Value, s: Value) -> Value:
    return vs.where(vs.call("isinf", m), m, vs.call("add", vs.call("log", s), m))


def _logsumexp_of_few(x: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Of few terms at each point, as arithmetic, with the dimension kept, where they are the parts of a stack, which is stored
    nowhere then, or in memory; None elsewhere."""
    if len(dims) != 1 or not x.dtype.is_floating_point:
        return None
    [k], loop = dims, ix.var("part", x.sizes[dims[0]])
    sizes = (*x.sizes[:k], ix.ONE, *x.sizes[k + 1 :])
    term = vs.substitute(x.value, {x.axes[k]: loop.expr()})
    if not are_few(sizes, [loop], points=LEAST_REDUCED):
        return None
    largest = combined("maximum", [loop], term)
    costs = (vs.total_cost([vs.substitute(term, {loop: ix.constant(n)})]) for n in range(loop.extent.as_int() or 0))
    if not (are_parts(term, largest) or term.op == "load") or max(costs) > MOST_COST:
        return None
    added = combined("add", [loop], vs.call("exp", vs.call("sub", term, largest)))
    return Tensor(sizes, accumulator(x.dtype), x.device, _back_in_logarithms(largest, added))


def dist(b: Builder, x: Tensor, y: Tensor, p: Operand = 2) -> Tensor:
    return vector_norm(b, pointwise(lambda u, v: vs.call("sub", u, v), x, y), p)


RULES: dict[str, Callable[..., Any]] = {
    "aten.sum": total,
    "aten.prod": product,
    "aten.mean": mean,
    "aten.nansum": nansum,
    "aten.count_nonzero": count_nonzero,
    "aten.var": var,
    "aten.std": std,
    "aten.var_mean": var_mean,
    "aten.std_mean": std_mean,
    "aten.amax": amax,
    "aten.amin": amin,
    "aten.aminmax": aminmax,
    "aten._aminmax": aminmax,
    "aten.max": extreme_along("max"),
    "aten.min": extreme_along("min"),
    "aten.max.other": pairwise("maximum", "or"),
    "aten.min.other": pairwise("minimum", "and"),
    "aten.argmax": position_of("argmax"),
    "aten.argmin": position_of("argmin"),
    "aten.any": truth("any"),
    "aten.all": truth("all"),
    "aten._is_any_true": truth("any"),
    "aten._is_all_true": truth("all"),
    "aten.linalg_vector_norm": vector_norm,
    "aten.norm": norm,
    "aten.logsumexp": logsumexp,
    "aten.dist": dist,
}
