"""Pooling and resampling windows.

A window of few elements is unrolled into one value, which vectorises over the output and fuses with its neighbours; a large
one is a Reduction. Gradients gather: each input element asks the windows that contain it, so no write collides and the result
does not depend on any order. Where very many windows contain an element, they scatter.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.capture.operators import operator_name
from kgen.ir import index as ix
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.nodes import Sizes
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.closed_form import index_form
from kgen.lowering.contraction import library
from kgen.lowering.fallback import Refused
from kgen.lowering.indexing import gather_source
from kgen.lowering.result_readers import reads
from kgen.lowering.scatter import full
from kgen.lowering.separable_windows import gathered_sums, is_separable, separate_windows
from kgen.lowering.tensor import Tensor, at, convert, indices, reindex
from kgen.lowering.views import result_sizes
from kgen.lowering.windows import MAX_UNROLLED, Windows, inside

# Loads from the L1 cache that take as long as storing an element and loading it from L2.
STORED = 16
# Operations of an element that all windows but one compute again, at most: a trip through memory takes less time than more.
MOST_AGAIN = 64


def _ints(given: Any, rank: int, default: int | tuple[int, ...] = 0) -> tuple[int, ...]:
    given = [given] if isinstance(given, int) else list(given or ())
    if not given:
        return default if isinstance(default, tuple) else (default,) * rank
    return tuple(given) if len(given) == rank else (given[0],) * rank


def _windows(rank: int, sizes: Sizes, out: Sizes, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> Windows:
    size = _ints(kernel, rank)
    return Windows(sizes, out[-rank:], size, _ints(stride, rank, size), _ints(padding, rank), _ints(dilation, rank, 1))


# ---- maximum --------------------------------------------------------------------------------------------------------


def max_pool_with_indices(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def rule(
        b: Builder, x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        sizes = b.symbols.sizes(b.current.meta["val"][0].shape)
        windows = _windows(rank, x.sizes, sizes, kernel_size, stride, padding, dilation)
        if is_separable(windows) and not reads(b, 1):
            largest = separate_windows(b, "max", x, windows)
            return largest, full(b, sizes, torch.int64, x.device, 0)
        if math.prod(windows.size) <= MAX_UNROLLED:
            source = _window_source(b, x, windows)
            return _max_unrolled(source, sizes, windows, _tap_number if _gives_taps(b.current) else _flat_position)
        return _max_reduced(b, x, sizes, windows)

    return rule


def _gives_taps(pool: Any) -> bool:
    """Whether a pooling of small windows gives numbers of elements within their windows: nobody wants anything else."""
    positions = [user for user in pool.users if user.target is operator.getitem and user.args[1] == 1]
    readers = [reader for one in positions for reader in one.users]
    unrolled = bool(readers) and all(operator_name(one.target) == "kgen.pool_taps" for one in readers)
    return unrolled and math.prod(readers[0].args[2]) <= MAX_UNROLLED


def pool_taps(b: Builder, positions: Tensor, extents: Any, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The number of each maximum within its window, from its flat position."""
    source = b.current.args[0]
    if source.target is operator.getitem and _gives_taps(source.args[0]):
        return convert(positions, torch.int8)
    windows = Windows(
        tuple(map(ix.as_expr, extents)), positions.sizes[-len(size) :], *map(tuple, (size, stride, padding, dilation))
    )
    left, number, weight = positions.value, vs.const(0, torch.int64), 1
    starts = windows.start(positions.indices[-windows.rank :])
    for n in reversed(range(windows.rank)):
        extent = vs.index_value(windows.sizes[n])
        place = vs.call("sub", vs.call("remainder", left, extent), vs.index_value(starts[n]))
        tap = vs.call("floordiv", place, vs.const(windows.dilation[n], torch.int64))
        number = vs.call("add", number, vs.call("mul", tap, vs.const(weight, torch.int64)))
        left, weight = vs.call("floordiv", left, extent), weight * windows.size[n]
    return convert(positions.with_value(number, torch.int64), torch.int8)


def tapped_pool_backward(
    b: Builder, grad: Tensor, taps: Tensor, x: Tensor, size: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Each element asks the windows that contain it whether it is the one that they name."""
    rank = len(size)
    windows = Windows(x.sizes, grad.sizes[-rank:], *map(tuple, (size, stride, padding, dilation)))
    given, named = gather_source(b, grad), gather_source(b, taps)
    if math.prod(windows.covering()) > MAX_UNROLLED:
        j, (tap,) = grad.indices, (vs.indirect(vs.cast(taps.value, torch.int64), ix.as_expr(math.prod(size)), wrap=False),)
        place, _ = windows.taps(j[-rank:], ix.delinearize(tap, tuple(map(ix.as_expr, size))))
        total = b.copy(full(b, x.sizes, ops.compute_dtype(grad.dtype), x.device, 0))
        return convert(b.scatter(total, grad.sizes, [*j[:-rank], *place], grad.value, "add"), grad.dtype)

    def share(window: Sequence[Expr]) -> Value:
        where = [*x.indices[:-rank], *window]
        offsets = [e - start for e, start in zip(x.indices[-rank:], windows.start(window), strict=True)]
        steps = [ix.floordiv(e, ix.as_expr(d)) for e, d in zip(offsets, windows.dilation, strict=True)]
        own = vs.index_value(ix.linearize(steps, ix.contiguous_strides(tuple(map(ix.as_expr, size)))), torch.int8)
        mine = vs.call("eq", at(named, where), own)
        for e, d in zip(offsets, windows.dilation, strict=True):
            if d > 1:
                mine = vs.call("and", mine, vs.call("eq", vs.index_value(ix.mod(e, ix.as_expr(d))), vs.const(0, torch.int64)))
        return vs.where(mine, at(given, where), vs.const(0, grad.dtype))

    shape = Tensor(x.sizes, grad.dtype, x.device, vs.const(0, grad.dtype))
    return shape.with_value(_gathered(shape, windows, share))


def _window_source(b: Builder, x: Tensor, windows: Windows) -> Tensor:
    """`x`, stored first where windows would load more of what it is made of than that takes, or compute what is dear again: as
    windows of windows, whose loads multiply. Loads from the L1 cache are not free."""
    loads = vs.loads([x.value])
    moving = {v for v, n in zip(x.axes[-windows.rank :], windows.size, strict=True) if n > 1}
    moved = sum(not moving.isdisjoint(load.variables()) for load in loads)
    taps, elements = math.prod(windows.size), math.prod(windows.stride)
    again = math.prod(windows.covering()) - 1
    dear = bool(loads) and again * vs.total_cost([x.value]) > MOST_AGAIN
    return b.stored_once(x) if dear or moved * taps > taps + elements * (moved + STORED) else x


def _max_unrolled(
    x: Tensor, sizes: Sizes, windows: Windows, named: Callable[[Windows, Sequence[Expr], Sequence[Expr]], Value]
) -> tuple[Tensor, Tensor]:
    """As eager scans a window: a later element wins if it is larger or NaN; an empty hand starts at the first real element."""
    j, rank = indices(sizes), windows.rank
    window = j[-rank:]
    first = [_first_inside(s, d) for s, d in zip(windows.start(window), windows.dilation, strict=True)]
    best: Value = vs.const(ops.identity("max", x.dtype), x.dtype)
    lane = named(windows, window, first)
    for tap in windows.all_taps():
        place, real = windows.taps(window, tap)
        read = vs.guard_loads(at(x, [*j[:-rank], *place]), real) if real.op != "const" else at(x, [*j[:-rank], *place])
        wins = vs.call("gt", read, best)
        if x.dtype.is_floating_point:
            wins = vs.call("or", wins, vs.call("isnan", read))
        wins = vs.call("and", real, wins)
        best, lane = vs.where(wins, read, best), vs.where(wins, named(windows, window, place), lane)
    return Tensor(sizes, x.dtype, x.device, best), Tensor(sizes, torch.int64, x.device, lane)


def _flat_position(windows: Windows, window: Sequence[Expr], place: Sequence[Expr]) -> Value:
    return _flat(place, windows.extents)


def _tap_number(windows: Windows, window: Sequence[Expr], place: Sequence[Expr]) -> Value:
    """The number of an element within its window."""
    starts = zip(place, windows.start(window), windows.dilation, strict=True)
    steps = [ix.floordiv(e - start, ix.as_expr(d)) for e, start, d in starts]
    return vs.index_value(ix.linearize(steps, ix.contiguous_strides(tuple(map(ix.as_expr, windows.size)))))


def _first_inside(start: Expr, dilation: int) -> Expr:
    if start.bounds()[0] >= 0:
        return start
    return start + ix.ceildiv(ix.maximum(-start, 0), dilation) * dilation


def _flat(place: Sequence[Expr], extents: Sizes) -> Value:
    return vs.index_value(ix.linearize(place, ix.contiguous_strides(extents)))


def _max_reduced(b: Builder, x: Tensor, sizes: Sizes, windows: Windows) -> tuple[Tensor, Tensor]:
    spread = _spread(b, x, sizes, windows, ops.identity("max", x.dtype))
    rank = windows.rank
    value, tap = b.reduce("argmax", spread, range(len(sizes), len(sizes) + rank))
    taps = ix.delinearize(vs.indirect(tap.value, ix.as_expr(math.prod(windows.size)), wrap=False), windows.size)
    start = [_first_inside(s, d) for s, d in zip(windows.start(value.indices[-rank:]), windows.dilation, strict=True)]
    found, _ = windows.taps(value.indices[-rank:], taps)
    # a window of nothing but -inf may point into the padding: eager names its first real element
    lane = vs.where(inside(found, windows.extents), _flat(found, windows.extents), _flat(start, windows.extents))
    return value, Tensor(sizes, torch.int64, x.device, lane)


def _spread(b: Builder, x: Tensor, sizes: Sizes, windows: Windows, filler: Any) -> Tensor:
    """The windows' elements as extra trailing dimensions, `filler` outside the tensor."""
    rank = windows.rank
    wide = (*sizes, *map(ix.as_expr, windows.size))
    j = indices(wide)
    place, real = windows.taps(j[len(sizes) - rank : len(sizes)], j[len(sizes) :])
    source = gather_source(b, x)
    read = vs.masked(real, at(source, [*j[: len(sizes) - rank], *place]), vs.const(filler, x.dtype))
    return Tensor(wide, x.dtype, x.device, read)


def max_pool_backward(rank: int) -> Callable[..., Tensor]:
    def rule(
        b: Builder,
        grad: Tensor,
        x: Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        lanes: Tensor,
    ) -> Tensor:
        windows = _windows(rank, x.sizes, grad.sizes, kernel_size, stride, padding, dilation)
        own = _flat(x.indices[-rank:], windows.extents)

        def share(window: Sequence[Expr]) -> Value:
            where = [*x.indices[:-rank], *window]
            mine = vs.call("eq", at(lanes, where), own)
            return vs.where(mine, at(grad, where), vs.const(0, grad.dtype))

        if math.prod(windows.covering()) <= MAX_UNROLLED:
            grad, lanes = gather_source(b, grad), gather_source(b, lanes)
            return x.with_value(_gathered(x, windows, share))
        return scatter_to_lanes(b, grad, x, lanes, rank)

    return rule


def scatter_to_lanes(b: Builder, grad: Tensor, x: Tensor, lanes: Tensor, rank: int) -> Tensor:
    """Adds each gradient to the element whose flat position over the last dimensions `lanes` gives."""
    j = grad.indices
    extents = x.sizes[-rank:]
    place = ix.delinearize(vs.indirect(lanes.value, ix.product(extents), wrap=False), extents)
    total = b.copy(full(b, x.sizes, ops.compute_dtype(x.dtype), x.device, 0))
    return convert(b.scatter(total, grad.sizes, [*j[:-rank], *place], grad.value, "add"), x.dtype)


def _gathered(x: Tensor, windows: Windows, share: Callable[[Sequence[Expr]], Value]) -> Value:
    """Sums what every window that contains an element of `x` gives it, in the order of the windows."""
    place = x.indices[-windows.rank :]
    total: Value | None = None
    for back in itertools.product(*(range(n - 1, -1, -1) for n in windows.covering())):
        window = [ix.floordiv(i + p, s) - n for i, p, s, n in zip(place, windows.padding, windows.stride, back, strict=True)]
        real = inside(window, windows.out)
        for i, p, s, k, d, w in zip(
            place, windows.padding, windows.stride, windows.size, windows.dilation, window, strict=True
        ):
            real = vs.call("and", real, vs.compare("le", i + p - w * s, ix.as_expr((k - 1) * d)))
        given = vs.masked(real, share(window), vs.const(0, share(window).dtype))
        total = given if total is None else vs.call("add", total, given)
    assert total is not None
    return total


# ---- average --------------------------------------------------------------------------------------------------------


def avg_pool(rank: int) -> Callable[..., Tensor]:
    def rule(
        b: Builder,
        x: Tensor,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        sizes = result_sizes(b)
        windows = _windows(rank, x.sizes, sizes, kernel_size, stride, padding)
        total = _window_sum(b, x, sizes, windows)
        divisor = _divisor(windows, indices(sizes)[-rank:], count_include_pad, divisor_override)
        return Tensor(sizes, x.dtype, x.device, _divided(total, divisor, x.dtype))

    return rule


def _window_sum(b: Builder, x: Tensor, sizes: Sizes, windows: Windows) -> Value:
    rank, j = windows.rank, indices(sizes)
    if is_separable(windows):
        return separate_windows(b, "sum", convert(x, ops.compute_dtype(x.dtype)), windows).value
    if math.prod(windows.size) > MAX_UNROLLED:
        spread = _spread(b, x, sizes, windows, 0)
        (total,) = b.reduce("sum", spread, range(len(sizes), len(sizes) + rank), dtypes=[ops.compute_dtype(x.dtype)])
        return total.value
    x = gather_source(b, x)
    value = vs.const(0, x.dtype)
    for tap in windows.all_taps():
        place, real = windows.taps(j[-rank:], tap)
        read = vs.masked(real, at(x, [*j[:-rank], *place]), vs.const(0, x.dtype))
        value = read if value.op == "const" else vs.call("add", value, read)
    return value


def _divisor(windows: Windows, window: Sequence[Expr], count_padding: bool, override: int | None) -> Expr:
    """How many elements a window averages: those inside the tensor, or inside its padding too."""
    if override is not None:
        return ix.as_expr(override)
    count = ix.ONE
    last = windows.start([o - 1 for o in windows.out])
    for k, start, pad, extent, end in zip(
        windows.size, windows.start(window), windows.padding, windows.extents, last, strict=True
    ):
        counted = pad if count_padding else 0
        if pad <= counted and ix.lower_bound(extent + counted - end - k) >= 0:  # no window reaches over an end
            count = count * k
        elif count_padding:
            count = count * (ix.minimum(start + k, extent + pad) - start)
        else:
            count = count * (ix.minimum(start + k, extent) - ix.maximum(start, 0))
    return count


def _divided(total: Value, divisor: Expr, dtype: torch.dtype) -> Value:
    return vs.call("truediv" if dtype.is_floating_point else "truncdiv", total, vs.index_value(divisor, total.dtype))


def avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    def rule(
        b: Builder,
        grad: Tensor,
        x: Tensor,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Tensor:
        windows = _windows(rank, x.sizes, grad.sizes, kernel_size, stride, padding)

        def part(at_grad: Sequence[Expr]) -> Value:
            divisor = _divisor(windows, at_grad[-rank:], count_include_pad, divisor_override)
            return _divided(at(grad, at_grad), divisor, grad.dtype)

        if math.prod(windows.covering()) <= MAX_UNROLLED:
            grad = gather_source(b, grad)
            divisor = _divisor(windows, x.indices[-rank:], count_include_pad, divisor_override)
            if divisor.as_int() is not None:  # the same for all windows: one division
                total = _gathered(x, windows, lambda window: at(grad, [*x.indices[:-rank], *window]))
                return x.with_value(_divided(total, divisor, grad.dtype))
            return x.with_value(_gathered(x, windows, lambda window: part([*x.indices[:-rank], *window])))
        shares = convert(grad.with_value(part(grad.indices)), ops.compute_dtype(grad.dtype))
        return convert(gathered_sums(b, shares, windows), x.dtype)

    return rule


# ---- adaptive -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spans:
    """Adaptive windows: `out` spans that cover a dimension of size `extent`. Window o runs from ``o*extent // out`` up to
    ``ceil((o+1)*extent / out)``; the widest has `widest` elements."""

    extent: Expr
    out: Expr
    widest: int | Expr

    def bounds(self, o: Expr) -> tuple[Expr, Expr]:
        return ix.floordiv(o * self.extent, self.out), ix.ceildiv((o + 1) * self.extent, self.out)


def _span(extent: Expr, out: Expr) -> Spans:
    if out == 1:
        return Spans(extent, out, extent)
    n, m = extent.as_int(), out.as_int()
    if n is None or m is None:
        quotient = ix.floordiv(extent, out)
        if quotient * out is extent:
            return Spans(extent, out, quotient)
        raise Refused("adaptive pooling of a symbolic size")
    widest = max((-(-(o + 1) * n // m) - o * n // m for o in range(m)), default=1)
    return Spans(extent, out, widest)


def _adaptive(x: Tensor, sizes: Sizes, rank: int, filler: Any) -> tuple[Tensor, list[Spans], list[Expr]]:
    """Window elements as extra trailing dimensions, and their positions."""
    spans = [_span(n, m) for n, m in zip(x.sizes[-rank:], sizes[-rank:], strict=True)]
    wide = (*sizes, *(ix.as_expr(s.widest) for s in spans))
    j = indices(wide)
    lead = len(sizes) - rank
    place, real = [], vs.const(True, torch.bool)
    for n, span in enumerate(spans):
        start, end = span.bounds(j[lead + n])
        place.append(start + j[len(sizes) + n])
        real = vs.call("and", real, vs.compare("lt", place[-1], end))
    read = vs.masked(real, at(x, [*j[:lead], *place]), vs.const(filler, x.dtype))
    return Tensor(wide, x.dtype, x.device, read), spans, place


def adaptive_avg_pool(rank: int) -> Callable[..., Tensor]:
    def rule(b: Builder, x: Tensor, output_size: Any) -> Tensor:
        sizes = result_sizes(b)
        if any(s == 0 for s in sizes):
            return full(b, sizes, x.dtype, x.device, 0)
        x = gather_source(b, x)
        spread, spans, _ = _adaptive(x, sizes, rank, 0)
        (total,) = b.reduce("sum", spread, range(len(sizes), len(sizes) + rank), dtypes=[ops.compute_dtype(x.dtype)])
        return Tensor(sizes, x.dtype, x.device, _divided(total.value, _count(spans, indices(sizes)[-rank:]), x.dtype))

    return rule


def _count(spans: Sequence[Spans], window: Sequence[Expr]) -> Expr:
    count = ix.ONE
    for span, o in zip(spans, window, strict=True):
        start, end = span.bounds(o)
        count = count * (end - start)
    return count


def adaptive_avg_pool_backward(rank: int) -> Callable[..., Tensor]:
    """An element is in the windows from ``i*out//extent`` to ``((i+1)*out - 1)//extent``, at most two along a dimension
    that shrinks and as many as the ratio along one that grows."""

    def rule(b: Builder, grad: Tensor, x: Tensor) -> Tensor:
        spans = [_span(n, m) for n, m in zip(x.sizes[-rank:], grad.sizes[-rank:], strict=True)]
        grad = gather_source(b, grad)
        place = x.indices[-rank:]
        counts = [_most_windows(s) for s in spans]
        if math.prod(counts) > MAX_UNROLLED:
            return _adaptive_scattered(b, grad, x, rank)
        total = vs.const(0, grad.dtype)
        for step in itertools.product(*(range(c) for c in counts)):
            window = [ix.floordiv(i * s.out, s.extent) + n for i, s, n in zip(place, spans, step, strict=True)]
            real = inside(window, grad.sizes[-rank:])
            for i, s, w in zip(place, spans, window, strict=True):
                real = vs.call("and", real, vs.compare("le", s.bounds(w)[0], i))
            part = _divided(at(grad, [*x.indices[:-rank], *window]), _count(spans, window), grad.dtype)
            total = vs.call("add", total, vs.masked(real, part, vs.const(0, grad.dtype)))
        return x.with_value(total)

    return rule


def _most_windows(span: Spans) -> int:
    if span.out == 1:
        return 1
    n, m = span.extent.as_int(), span.out.as_int()
    if n is None or m is None:
        return 1  # the extent is a multiple of out: every element is in one window
    return max((((i + 1) * m - 1) // n - i * m // n + 1 for i in range(n)), default=1)


def _adaptive_scattered(b: Builder, grad: Tensor, x: Tensor, rank: int) -> Tensor:
    spread, spans, place = _adaptive(x, grad.sizes, rank, 0)
    own = spread.indices[: grad.rank]
    real = vs.const(True, torch.bool)
    for span, o, e in zip(spans, own[-rank:], place, strict=True):
        real = vs.call("and", real, vs.compare("lt", e, span.bounds(o)[1]))
    value = _divided(at(grad, own), _count(spans, own[-rank:]), grad.dtype)
    total = b.copy(full(b, x.sizes, ops.compute_dtype(x.dtype), x.device, 0))
    return convert(
        b.scatter(total, spread.sizes, [*own[:-rank], *place], value, "add", None if real.op == "const" else real), x.dtype
    )


def adaptive_max_pool(rank: int) -> Callable[..., tuple[Tensor, Tensor]]:
    def rule(b: Builder, x: Tensor, output_size: Any) -> tuple[Tensor, Tensor]:
        sizes = b.symbols.sizes(b.current.meta["val"][0].shape)
        if any(s == 0 for s in sizes):
            return full(b, sizes, x.dtype, x.device, 0), full(b, sizes, torch.int64, x.device, 0)
        x = gather_source(b, x)
        spread, spans, _ = _adaptive(x, sizes, rank, ops.identity("max", x.dtype))
        value, tap = b.reduce("argmax", spread, range(len(sizes), len(sizes) + rank))
        taps = ix.delinearize(
            vs.indirect(tap.value, ix.product(ix.as_expr(s.widest) for s in spans), wrap=False), [s.widest for s in spans]
        )
        place = [s.bounds(o)[0] + t for s, o, t in zip(spans, value.indices[-rank:], taps, strict=True)]
        return value, Tensor(sizes, torch.int64, x.device, _flat(place, x.sizes[-rank:]))

    return rule


def adaptive_max_pool_backward(rank: int) -> Callable[..., Tensor]:
    return lambda b, grad, x, lanes: scatter_to_lanes(b, grad, x, lanes, rank)


def max_unpool(rank: int) -> Callable[..., Tensor]:
    def rule(b: Builder, x: Tensor, lanes: Tensor, output_size: Any, *_: Any) -> Tensor:
        sizes = result_sizes(b)
        extents = sizes[-rank:]
        place = ix.delinearize(vs.indirect(lanes.value, ix.product(extents), wrap=False), extents)
        zeros = b.copy(full(b, sizes, x.dtype, x.device, 0))
        return b.scatter(zeros, x.sizes, [*x.indices[:-rank], *place], x.value)

    return rule


# ---- resampling -----------------------------------------------------------------------------------------------------


def nearest(rank: int, shift: float) -> Callable[..., Tensor]:
    def rule(b: Builder, x: Tensor, output_size: Any, *scales: Any) -> Tensor:
        sizes = result_sizes(b)
        given = list(scales) + [None] * (rank - len(scales))
        x = gather_source(b, x)
        return reindex(x, sizes, lambda *j: [*j[:-rank], *_nearest_place(j, sizes, x.sizes, given, shift)])

    return rule


def nearest_backward(rank: int, shift: float) -> Callable[..., Tensor]:
    """Each output element's gradient goes to the input element it was read from."""

    def rule(b: Builder, grad: Tensor, output_size: Any, input_size: Any, *scales: Any) -> Tensor:
        sizes = tuple(map(ix.as_expr, input_size))
        j = grad.indices
        given = list(scales) + [None] * (rank - len(scales))
        place = _nearest_place(j, grad.sizes, sizes, given, shift)
        total = b.copy(full(b, sizes, ops.compute_dtype(grad.dtype), grad.device, 0))
        return convert(b.scatter(total, grad.sizes, [*j[:-rank], *place], grad.value, "add"), grad.dtype)

    return rule


def _nearest_place(j: Sequence[Expr], out: Sizes, sizes: Sizes, scales: Sequence[float | None], shift: float) -> list[Expr]:
    rank = len(scales)
    rows = zip(j[-rank:], out[-rank:], sizes[-rank:], scales, strict=True)
    return [nearest_index(o, m, n, scale, shift) for o, m, n, scale in rows]


def nearest_index(o: Expr, out: Expr, extent: Expr, scale: float | None, shift: float) -> Expr:
    """Eager's ``min(floor((o + shift) * in/out), in - 1)`` in float32 arithmetic."""
    n, m = extent.as_int(), out.as_int()
    if extent is out and not shift:
        return o
    if n is None or m is None:
        raise Refused("nearest resampling of a symbolic size")
    factor = float(torch.tensor(1.0 / scale if scale is not None and scale > 0 else n / m, dtype=torch.float32))
    moved = vs.index_value(o, torch.float32)
    if shift:
        moved = vs.call("add", moved, vs.const(shift, torch.float32))
    scaled = vs.call("floor", vs.call("mul", moved, vs.const(factor, torch.float32)))
    found = vs.call("minimum", vs.cast(scaled, torch.int64), vs.const(n - 1, torch.int64))
    known = index_form(found, extent, False)
    return known if known is not None else vs.indirect(found, extent, wrap=False)


RULES: dict[str, Callable[..., Any]] = {
    "kgen.pool_taps": pool_taps,
    "kgen.tapped_pool_backward": tapped_pool_backward,
    **{f"aten.max_pool{n}d_with_indices": max_pool_with_indices(n) for n in (2, 3)},
    **{f"aten.max_pool{n}d_with_indices_backward": max_pool_backward(n) for n in (2, 3)},
    **{f"aten.avg_pool{n}d": avg_pool(n) for n in (1, 2, 3)},
    **{f"aten.avg_pool{n}d_backward": avg_pool_backward(n) for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d": adaptive_avg_pool(n) for n in (2, 3)},
    **{f"aten._adaptive_avg_pool{n}d_backward": adaptive_avg_pool_backward(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d": adaptive_max_pool(n) for n in (2, 3)},
    **{f"aten.adaptive_max_pool{n}d_backward": adaptive_max_pool_backward(n) for n in (2, 3)},
    **{f"aten.max_unpool{n}d": max_unpool(n) for n in (2, 3)},
    **{f"aten.upsample_nearest{n}d": nearest(n, 0.0) for n in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{n}d": nearest(n, 0.5) for n in (1, 2, 3)},
    **{f"aten.upsample_nearest{n}d_backward": nearest_backward(n, 0.0) for n in (1, 2, 3)},
    **{f"aten._upsample_nearest_exact{n}d_backward": nearest_backward(n, 0.5) for n in (1, 2, 3)},
    "aten.fractional_max_pool2d": library("random windows"),
    "aten.fractional_max_pool3d": library("random windows"),
}
