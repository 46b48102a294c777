"""Convolutions, transposed ones and their gradients: Contraction nodes over the library call that computes them.

All of them are about three tensors: an image ``x[n, c', q...]``, filters ``w[o, c, t...]``, and what the convolution makes of
them, ``y[n, o, p...]``. A point of y and a tap meet the image at ``q = p * stride - padding + t * dilation``, in the channel
``c' = group of o * channels of a group + c``. A sum of products of two of the three gives the third one, or its gradient:

    y[n, o, p] = sum over c, t of x[n, c', q] * w[o, c, t]      a convolution; the image's gradient of a transposed one
    x[n, c', q] = sum over o, t of y[n, o, p] * w[o, c, t]      a transposed convolution; the image's gradient of a plain one
    w[o, c, t] = sum over n, p of x[n, c', q] * y[n, o, p]      the filters' gradient of both
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Var
from kgen.ir.values import Value
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.contraction import loaded, result_rounding
from kgen.lowering.few_terms import are_few, written_out
from kgen.lowering.pointwise import add
from kgen.lowering.tensor import Tensor, at, indices, reindex

_REASON = "contraction without a template"
# Where the call for gradients is told which of them it computes.
_OUTPUT_MASK = 10


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the filters, and of each dimension its stride, padding and dilation."""

    filters: ir.Sizes
    steps: tuple[tuple[int, int, int], ...]
    groups: int

    @property
    def made(self) -> Expr:
        """Channels of a group of y."""
        return ix.floordiv(self.filters[0], ix.as_expr(self.groups))

    @property
    def taps(self) -> tuple[Var, ...]:
        return tuple(ix.var(f"t{k}", size) for k, size in enumerate(self.filters[2:]))


@dataclass(frozen=True, slots=True)
class Access:
    """An element of a tensor, and where it is one: zero elsewhere."""

    index: tuple[Expr, ...]
    inside: Value | None = None

    def of(self, element: Value) -> Value:
        return element if self.inside is None else vs.masked(self.inside, element, vs.const(0, element.dtype))


@dataclass(frozen=True, slots=True)
class Sum:
    """The loops of a contraction, and how it reads its two operands."""

    out_vars: tuple[Var, ...]
    reduced: tuple[Var, ...]
    left: Access
    right: Access


def shape_of(filters: Tensor, image: Tensor, stride: Any, padding: Any, dilation: Any, groups: Any) -> Shape | None:
    """The shape of a convolution of one batch of images; None where a number depends on sizes."""
    rank = filters.rank - 2
    each = [_per_dimension(given, rank) for given in (stride, padding, dilation)]
    known = isinstance(groups, int) and all(isinstance(n, int) for numbers in each for n in numbers)
    if not known or image.rank != filters.rank:
        return None
    return Shape(tuple(filters.sizes), tuple(zip(*each, strict=True)), groups)


def _per_dimension(given: Any, rank: int) -> list[Any]:
    items = list(given) if isinstance(given, list | tuple) else [given]
    return items if len(items) == rank else items * rank


# ---- the three sums ---------------------------------------------------------------------------------------------------


def made_by(shape: Shape, made: ir.Sizes, image: ir.Sizes) -> Sum:
    """y of x and w, of these sizes."""
    n, o, *positions = _loops("no", "p", made)
    c, taps = ix.var("c", shape.filters[1]), shape.taps
    place = _met(shape, positions, taps)
    left = Access((n.expr(), _channel(shape, o, c), *place), _within(place, image[2:]))
    return Sum((n, o, *positions), (c, *taps), left, Access(_index(o, c, *taps)))


def image_of(shape: Shape, image: ir.Sizes, made: ir.Sizes) -> Sum:
    """x of y and w. Taps are read from the last one to the first: of stride 1 it is a convolution then."""
    n, channel, *points = _loops("nc", "q", image)
    o = ix.var("o", shape.made)
    group = ix.floordiv(channel.expr(), shape.filters[1]) if shape.groups != 1 else ix.ZERO
    own = group * shape.made + o.expr()
    met = [
        _meeting(q, ix.var(f"t{k}", size), steps)
        for k, (q, size, steps) in enumerate(zip(points, shape.filters[2:], shape.steps, strict=True))
    ]
    there = _all(*(one.there for one in met))
    position = [one.position for one in met]
    left = Access((n.expr(), own, *position), _all(there, *(one.exact for one in met), _within(position, made[2:])))
    right = Access((own, channel.expr() - group * shape.filters[1], *(one.tap for one in met)), there)
    return Sum((n, channel, *points), (o, *(one.loop for one in met)), left, right)


def filters_of(shape: Shape, image: ir.Sizes, made: ir.Sizes) -> Sum:
    """w of x and y."""
    n, _, *positions = _loops("no", "p", made)
    o, c = (ix.var(name, size) for name, size in zip("oc", shape.filters, strict=False))
    taps = shape.taps
    place = _met(shape, positions, taps)
    left = Access((n.expr(), _channel(shape, o, c), *place), _within(place, image[2:]))
    return Sum((o, c, *taps), (n, *positions), left, Access(_index(n, o, *positions)))


def _loops(first: str, rest: str, sizes: ir.Sizes) -> list[Var]:
    names = (*first, *(f"{rest}{k}" for k in range(len(sizes) - len(first))))
    return [ix.var(name, size) for name, size in zip(names, sizes, strict=True)]


def _index(*loops: Var) -> tuple[Expr, ...]:
    return tuple(v.expr() for v in loops)


def _channel(shape: Shape, o: Var, c: Var) -> Expr:
    """The image's channel of a channel of y and one of its group."""
    return c.expr() if shape.groups == 1 else ix.floordiv(o.expr(), shape.made) * shape.filters[1] + c.expr()


def _met(shape: Shape, positions: Sequence[Var], taps: Sequence[Var]) -> list[Expr]:
    """The point of the image that a tap meets at a position."""
    together = zip(positions, taps, shape.steps, strict=True)
    return [p.expr() * stride - padding + t.expr() * dilation for p, t, (stride, padding, dilation) in together]


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Along one dimension, the position of y that meets a point of the image, at which tap, as the loop over taps goes on.
    `there`: whether the filters have the tap; `exact`: whether a position meets the point at it."""

    loop: Var
    position: Expr
    tap: Expr
    there: Value
    exact: Value


def _meeting(q: Var, taps: Var, steps: tuple[int, int, int]) -> _Meeting:
    """In phases where all of these have as many points: at each point only every stride-th tap meets a position."""
    stride, _, dilation = steps
    extent = q.extent.as_int() or 0
    even = stride > 1 and extent > stride and extent % stride == 0 and math.gcd(stride, dilation) == 1
    return _in_phases(q, taps, steps) if even else _divided(q, taps, steps)


def _divided(q: Var, taps: Var, steps: tuple[int, int, int]) -> _Meeting:
    """Each tap, with a position where it is whole strides away. What is divided is not negative: where it would be, whole
    strides are added."""
    stride, padding, dilation = steps
    reach = (taps.extent - 1) * dilation
    divided = q.expr() + padding + taps.expr() * dilation + reach * (stride - 1)
    exact = vs.const(True, torch.bool) if stride == 1 else vs.compare("lt", ix.mod(divided, stride), ix.ONE)
    position = ix.floordiv(divided, stride) - reach
    return _Meeting(taps, position, taps.extent - 1 - taps.expr(), vs.const(True, torch.bool), exact)


def _in_phases(q: Var, taps: Var, steps: tuple[int, int, int]) -> _Meeting:
    """The taps ``first + j * stride``, of which the first one depends on the point's phase, its remainder by the stride."""
    stride, padding, dilation = steps
    phase, whole = ix.mod(q.expr(), stride), ix.floordiv(q.expr(), stride)
    loop = ix.var(taps.name, ix.ceildiv(taps.extent, stride))
    j = loop.extent - 1 - loop.expr()
    first = ix.mod((phase + padding) * pow(dilation, -1, stride), stride)
    if dilation == 1:
        begin = ix.floordiv(phase + padding, stride)
    else:  # it divides evenly; whole strides are added, for it may be negative
        begin = ix.floordiv(phase + padding - first * dilation + stride * dilation, stride) - dilation
    tap = first + j * stride
    there = vs.compare("lt", tap, taps.extent)
    return _Meeting(loop, whole + begin - j * dilation, tap, there, vs.const(True, torch.bool))


def _all(*conditions: Value) -> Value:
    return functools.reduce(lambda a, b: vs.call("and", a, b), conditions, vs.const(True, torch.bool))


def _within(place: Sequence[Expr], sizes: Sequence[Expr]) -> Value:
    both = ((vs.compare("ge", e, ix.ZERO), vs.compare("lt", e, extent)) for e, extent in zip(place, sizes, strict=True))
    return _all(*(_all(*pair) for pair in both))


# ---- nodes ------------------------------------------------------------------------------------------------------------


def _contraction(
    b: Builder, total: Sum, operands: tuple[Tensor, Tensor], call: ir.Extern, positions: tuple[int, int],
    addend: Value | None = None, shared: ir.SharedCall | None = None,
) -> ir.Contraction:  # fmt: skip
    """A library call as a sum of products. `positions` are those of the operands among the call's arguments."""
    [out] = (out for out in call.outs if out is not None)
    kind = operands[0].dtype if operands[0].dtype == operands[1].dtype else None
    accesses = (total.left, total.right)
    lhs, rhs = (access.of(at(one, access.index)) for access, one in zip(accesses, operands, strict=True))
    stored = tuple(access.of(loaded(call.args[k], access.index)) for access, k in zip(accesses, positions, strict=True))
    return ir.Contraction(
        out, total.out_vars, total.reduced, lhs, rhs, call, b.origin, kind, None, addend, stored,
        rounded=result_rounding(b, out), windowed=True, shared_call=shared,
    )  # fmt: skip


def convolution(
    b: Builder, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """A convolution, or a transposed one, the image zero outside. `output_padding` says no more than the result's sizes.

    On a GPU the library adds a bias in a kernel of its own. Here what reads the result may add it."""
    if bias is not None and b.on_gpu(x.device) and x.rank == weight.rank:
        plain = convolution(b, x, weight, None, stride, padding, dilation, transposed, output_padding, groups)
        return add(b, plain, reindex(bias, [1, *bias.sizes, *[1] * (weight.rank - 2)], lambda *index: [index[1]]))
    args = (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    shape = shape_of(weight, x, stride, padding, dilation, groups)
    wrap = None
    if shape is not None:
        sizes = b.symbols.sizes(b.current.meta["val"].shape)
        total = (image_of if transposed else made_by)(shape, sizes, tuple(x.sizes))
        if not transposed and _is_short(b, shape, total, x, weight, b.current.args[0]):
            value = vs.substitute(_written_out(b, total, x, weight), dict(zip(total.out_vars, indices(sizes), strict=True)))
            return Tensor(sizes, x.dtype, x.device, value)
        addend = None if bias is None else at(bias, [total.out_vars[1].expr()])
        wrap = partial(_contraction, b, total, (x, weight), positions=(0, 1), addend=addend)
    result: Tensor = fallback.extern(b, b.current, args, {}, _REASON, wrap)
    return result


def _is_short(b: Builder, shape: Shape, total: Sum, x: Tensor, weight: Tensor, image: Any) -> bool:
    """Whether a few taps of a depthwise convolution on a GPU are arithmetic at each point: the taps of neighbouring positions
    are neighbours then. Channels side by side are a template's."""
    sizes = tuple(v.extent for v in total.out_vars)
    plain = x.dtype == weight.dtype and x.dtype.is_floating_point and shape.filters[1] == 1 and b.on_gpu(x.device)
    apart = image.meta["val"].stride(1) != 1 and not _reads_channels_side_by_side(b, x)
    return plain and are_few(sizes, total.reduced) and apart


def _reads_channels_side_by_side(b: Builder, x: Tensor) -> bool:
    """Whether an image is computed from a buffer in which the channels of a position are neighbours, as a padded one is."""
    for load in vs.loads([x.value]):
        strides = b.graph.buffers[load.attr[0]].strides
        if strides is not None and ix.stride_of(ix.linearize(load.attr[1], strides), x.axes[1]) == 1:
            return True
    return False


def _written_out(b: Builder, total: Sum, x: Tensor, weight: Tensor) -> Value:
    """The terms of a short sum, one after the other."""

    def term(x: Tensor, weight: Tensor) -> Value:
        return vs.call("mul", total.left.of(at(x, total.left.index)), total.right.of(at(weight, total.right.index)))

    return written_out(total.reduced, term, (x, weight), b.realize)


def convolution_backward(
    b: Builder, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    """The gradients of the image, the filters and the bias, each a node of its own; the library has one call for all."""
    args = (
        gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )  # fmt: skip
    shape = shape_of(weight, x, stride, padding, dilation, groups)
    wrap = None if shape is None else partial(_gradients, b, shape, (gradient, x, weight), transposed)
    return fallback.extern(b, b.current, args, {}, _REASON, wrap)


def _gradients(
    b: Builder, shape: Shape, tensors: tuple[Tensor, Tensor, Tensor], transposed: bool, call: ir.Extern
) -> ir.Node | tuple[ir.Node, ...]:
    """A node for each gradient that somebody reads."""
    shared = ir.SharedCall(call, _OUTPUT_MASK)
    made = tuple(
        make(b, shape, tensors, transposed, shared)
        for make, out in zip(_GRADIENTS, call.outs, strict=True) if out is not None
    )  # fmt: skip
    return made if any(ir.is_contraction(node) or isinstance(node, ir.Pointwise) for node in made) else call


Tensors = tuple[Tensor, Tensor, Tensor]


def _of_image(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, shared: ir.SharedCall) -> ir.Node:
    gradient, x, weight = tensors
    total = (made_by if transposed else image_of)(shape, tuple(x.sizes), tuple(gradient.sizes))
    out = shared.call.outs[0]
    if not transposed and out is not None and _is_short(b, shape, total, gradient, weight, b.current.args[1]):
        return ir.Pointwise(out, total.out_vars, _written_out(b, total, gradient, weight), b.origin)
    return _contraction(b, total, (gradient, weight), shared.giving(shared.call.outs[:1]), (0, 2), shared=shared)


def _of_filters(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, shared: ir.SharedCall) -> ir.Contraction:
    gradient, x, _ = tensors
    image, made, positions = (gradient, x, (0, 1)) if transposed else (x, gradient, (1, 0))
    total = filters_of(shape, tuple(image.sizes), tuple(made.sizes))
    return _contraction(b, total, (image, made), shared.giving(shared.call.outs[1:2]), positions, shared=shared)


def _of_bias(b: Builder, _shape: Shape, tensors: Tensors, _transposed: bool, shared: ir.SharedCall) -> ir.Node:
    """The sum of y's gradient over images and positions."""
    gradient, *_ = tensors
    out = shared.call.outs[2]
    assert out is not None
    n, o, *positions = _loops("no", "p", tuple(gradient.sizes))
    value = at(gradient, _index(n, o, *positions))
    if all(v.extent == 1 for v in (n, *positions)):
        return ir.Pointwise(out, (o,), vs.substitute(value, dict.fromkeys((n, *positions), ix.ZERO)), b.origin)
    return ir.Reduction((out,), (o,), (n, *positions), "sum", value, b.origin)


_GRADIENTS: tuple[Callable[[Builder, Shape, Tensors, bool, ir.SharedCall], ir.Node], ...] = (_of_image, _of_filters, _of_bias)

RULES: dict[str, Callable[..., Any]] = {
    "aten.convolution": convolution,
    "aten.convolution_backward": convolution_backward,
}
