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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from kgen.lowering.few_terms import LEAST_POINTS, MOST_COST, MOST_TERMS, are_few, written_out
from kgen.lowering.layout import store_with
from kgen.lowering.pointwise import add
from kgen.lowering.tensor import Tensor, at, indices, reindex

_REASON = "contraction without a template"
# Where the call for gradients is told which of them it computes.
_OUTPUT_MASK = 10
# Of filters whose gradient is a reduction for each tap: taps in all and along a dimension, and results of each channel.
MOST_TAPS, MOST_TAPS_ALONG, MOST_MULTIPLES = 64, 8, 4
# Terms of each point where images have one channel, that are written out.
MOST_TAPS_OF_ONE = 25
# Dimensions of images with positions along one of them, and along two.
RANK_ALONG_ONE, RANK_OF_IMAGES = 3, 4


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
        if not transposed and _is_short(b, shape, total, x, weight):
            value = vs.substitute(
                _written_out(total, (x, weight), partial(_computed, b)), dict(zip(total.out_vars, indices(sizes), strict=True))
            )
            return Tensor(sizes, x.dtype, x.device, value)
        addend = None if bias is None else at(bias, [total.out_vars[1].expr()])
        wrap = partial(_contraction, b, total, (x, weight), positions=(0, 1), addend=addend)
    result: Tensor = fallback.extern(b, b.current, args, {}, _REASON, wrap)
    return result


def _is_short(b: Builder, shape: Shape, total: Sum, x: Tensor, weight: Tensor) -> bool:
    """Whether a few taps of a depthwise convolution on a GPU are arithmetic at each point, in one kernel with what follows: the
    taps of neighbouring positions, or channels, are neighbours then. Of images with one channel there may be more taps, as of
    blurs and edge filters: a library's matrix units have nothing to multiply, and it turns such images around before."""
    sizes = tuple(v.extent for v in total.out_vars)
    plain = x.dtype == weight.dtype and x.dtype.is_floating_point and shape.filters[1] == 1 and b.on_gpu(x.device)
    single = shape.groups == 1 and all(stride == 1 for stride, _, _ in shape.steps)
    most = MOST_TAPS_OF_ONE if single and (shape.made.as_int() or MOST_TERMS + 1) <= MOST_TERMS else MOST_TERMS
    return plain and are_few(sizes, total.reduced, most=most)


def _computed(b: Builder, tensor: Tensor) -> Tensor:
    """A tensor in memory, where it is: as a view of it, too."""
    return tensor if tensor.value.op == "load" else b.realize(tensor)


def _has_channels_side_by_side(image: Any) -> bool:
    """Whether the channels of a position of an image, a node of the traced graph, are neighbours in memory."""
    return bool(image.meta["val"].stride(1) == 1)


def _written_out(total: Sum, tensors: tuple[Tensor, Tensor], realize: Callable[[Tensor], Tensor]) -> Value:
    """The terms of a short sum, one after the other."""

    def term(x: Tensor, weight: Tensor) -> Value:
        return vs.call("mul", total.left.of(at(x, total.left.index)), total.right.of(at(weight, total.right.index)))

    return written_out(total.reduced, term, tensors, realize)


Tensors = tuple[Tensor, Tensor, Tensor]
Nodes = tuple[ir.Node, ...]


def convolution_backward(
    b: Builder, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, output_padding: Any, groups: int, output_mask: Any,
) -> Any:  # fmt: skip
    """The gradients of the image, the filters and the bias, each a node of its own; the library has one call for all."""
    shape = shape_of(weight, x, stride, padding, dilation, groups)
    if shape is not None and not transposed and _are_few_columns(b, shape, x, gradient):
        gradient = _beside(b, gradient, b.current.args[1])
    args = (
        gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )  # fmt: skip
    if shape is None:
        return fallback.extern(b, b.current, args, {}, _REASON)
    image = image_of(shape, tuple(x.sizes), tuple(gradient.sizes))
    if transposed or not output_mask[0] or not _is_short(b, shape, image, gradient, weight):
        wrap = partial(_gradients, b, shape, (gradient, x, weight), transposed)
        return fallback.extern(b, b.current, args, {}, _REASON, wrap)
    made: list[Value] = []
    others_of = partial(_with_short_image, b, shape, (gradient, x, weight), image, made)
    _, *others = fallback.extern(b, b.current, args, {}, _REASON, others_of, skipped=(0,))
    return Tensor(tuple(x.sizes), x.dtype, x.device, made[0]), *others


def _with_short_image(b: Builder, shape: Shape, tensors: Tensors, image: Sum, made: list[Value], call: ir.Extern) -> Nodes:
    """The nodes of the other gradients. That of the image is `made` as a value: whoever reads it computes it, a slice of it for
    one."""
    gradient, x, weight = tensors
    value = _written_out(image, (gradient, weight), _realize(call, {gradient: 0, weight: 2}))
    made.append(vs.substitute(value, dict(zip(image.out_vars, indices(tuple(x.sizes)), strict=True))))
    return _nodes_of(b, shape, tensors, False, call)


def _beside(b: Builder, gradient: Tensor, image: Any) -> Tensor:
    """The gradient of a result along one dimension with its channels side by side where those of the image are, if it has to be
    stored: autograd puts what it is a slice of in order, and layouts are chosen for images of two dimensions and more."""
    if gradient.rank != RANK_ALONG_ONE or not _has_channels_side_by_side(image) or b.as_view(gradient) is not None:
        return gradient
    _, channels, positions = gradient.sizes
    return store_with(gradient, (channels * positions, ix.ONE, channels), b.stored_operand, b)


def _gradients(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, call: ir.Extern) -> ir.Node | Nodes:
    """A node for each gradient that somebody reads; the call itself where that is the bias's alone."""
    return _nodes_of(b, shape, tensors, transposed, call) if any(out is not None for out in call.outs[:2]) else call


def _nodes_of(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, call: ir.Extern) -> Nodes:
    """Of the gradients that the call gives. A GPU's library sums up the bias's by a kernel that does nothing else."""
    shared = ir.SharedCall(call, _OUTPUT_MASK, sums=not b.on_gpu(tensors[0].device))
    wanted = zip(_GRADIENTS, call.outs, strict=True)
    made = (make(b, shape, tensors, transposed, shared) for make, out in wanted if out is not None)
    return tuple(node for nodes in made for node in nodes)


def _of_image(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, shared: ir.SharedCall) -> Nodes:
    gradient, x, weight = tensors
    total = (made_by if transposed else image_of)(shape, tuple(x.sizes), tuple(gradient.sizes))
    return (_contraction(b, total, (gradient, weight), shared.giving(shared.call.outs[:1]), (0, 2), shared=shared),)


def _of_filters(b: Builder, shape: Shape, tensors: Tensors, transposed: bool, shared: ir.SharedCall) -> Nodes:
    gradient, x, _ = tensors
    image, made, positions = (gradient, x, (0, 1)) if transposed else (x, gradient, (1, 0))
    total = filters_of(shape, tuple(image.sizes), tuple(made.sizes))
    out = shared.call.outs[1]
    if out is not None and _are_few_columns(b, shape, image, made):
        terms = _terms(total, (image, made), _realize(shared.call, {gradient: 0, x: 1}))
        return _tap_by_tap(b, total, out, terms)
    return (_contraction(b, total, (image, made), shared.giving(shared.call.outs[1:2]), positions, shared=shared),)


def _are_few_columns(b: Builder, shape: Shape, image: Tensor, made: Tensor) -> bool:
    """Whether the gradient of a depthwise convolution's filters on a GPU is a reduction for each tap along a dimension. Matrix
    units have nothing to multiply there, and a library reads the image and the gradient once for each tap. It has kernels for
    images of two dimensions with channels side by side: 38, 51, 79 us for 3x3, 5x5, 7x7 taps, sums 66, 136, 187 (H200). They
    are for taps along both: of 4 along one it took 780 us, a sum 55."""
    taps = [size.as_int() or 0 for size in shape.filters[2:]]
    multiplier, points = shape.made.as_int() or 0, made.numel().as_int()
    plain = image.dtype == made.dtype and image.dtype.is_floating_point and b.on_gpu(image.device)
    depthwise = shape.filters[1] == 1 and shape.groups > 1 and 1 <= multiplier <= MOST_MULTIPLES
    along = sum(tap > 1 for tap in taps)
    beside = along > 1 and image.rank == RANK_OF_IMAGES and _has_channels_side_by_side(b.current.args[1])
    few = 2 <= math.prod(taps) <= MOST_TAPS and max(taps) <= MOST_TAPS_ALONG
    return plain and depthwise and few and not beside and (points is None or points >= LEAST_POINTS)


def _tap_by_tap(b: Builder, total: Sum, out: str, terms: Sequence[Value]) -> Nodes:
    """A reduction for each term along a dimension of taps. All read the same points of the gradient, and neighbouring ones of
    the image, so one kernel has them. Each fills a part of the filters' gradient."""
    along, names = _unrolled(total), tuple(b.fresh(f"{out}_tap{n}") for n in range(len(terms)))
    whole = b.freeze(out)
    assert whole.strides is not None
    b.graph.buffers[out] = replace(whole, parts=names)
    loops = tuple(ix.var(v.name, 1) if k == along else v for k, v in enumerate(total.out_vars))
    sizes = tuple(v.extent for v in loops)
    for n, name in enumerate(names):
        offset = whole.strides[along] * n + whole.offset
        b.graph.buffers[name] = replace(whole, name=name, sizes=sizes, offset=offset, alias_of=out, is_part=True)
    return tuple(
        ir.Reduction((name,), loops, total.reduced, "sum", term, b.origin) for name, term in zip(names, terms, strict=True)
    )


def _unrolled(total: Sum) -> int:
    """The last dimension of filters that has several taps."""
    return max(k for k, v in enumerate(total.out_vars) if k >= 2 and v.extent != 1)


def _terms(total: Sum, tensors: tuple[Tensor, Tensor], realize: Callable[[Tensor], Tensor]) -> list[Value]:
    """What is summed at each tap along a dimension. What is dear to compute for each of them is read from memory."""

    def at_each(image: Tensor, made: Tensor) -> list[Value]:
        term = vs.call("mul", total.left.of(at(image, total.left.index)), at(made, total.right.index))
        return [vs.substitute(term, {tap: ix.constant(n)}) for n in range(tap.extent.as_int() or 0)]

    tap = total.out_vars[_unrolled(total)]
    inlined = at_each(*tensors)
    return inlined if vs.total_cost(inlined) <= MOST_COST else at_each(*map(realize, tensors))


def _realize(call: ir.Extern, positions: Mapping[Tensor, int]) -> Callable[[Tensor], Tensor]:
    """Gives tensors as the call reads them, by their positions among its arguments: they are stored for it already."""

    def realize(tensor: Tensor) -> Tensor:
        return replace(tensor, value=loaded(call.args[positions[tensor]], tensor.indices))

    return realize


def _of_bias(b: Builder, _shape: Shape, tensors: Tensors, _transposed: bool, shared: ir.SharedCall) -> Nodes:
    """The sum of y's gradient over images and positions."""
    gradient, *_ = tensors
    out = shared.call.outs[2]
    assert out is not None
    n, o, *positions = _loops("no", "p", tuple(gradient.sizes))
    value = at(gradient, _index(n, o, *positions))
    if all(v.extent == 1 for v in (n, *positions)):
        return (ir.Pointwise(out, (o,), vs.substitute(value, dict.fromkeys((n, *positions), ix.ZERO)), b.origin),)
    return (ir.Reduction((out,), (o,), (n, *positions), "sum", value, b.origin),)


_GRADIENTS: tuple[Callable[[Builder, Shape, Tensors, bool, ir.SharedCall], Nodes], ...] = (_of_image, _of_filters, _of_bias)

RULES: dict[str, Callable[..., Any]] = {
    "aten.convolution": convolution,
    "aten.convolution_backward": convolution_backward,
}
