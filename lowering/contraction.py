"""Matrix products, convolutions and attention: Contraction and Attention nodes over the library call that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kgen import index as ix
from kgen import ir
from kgen import values as vs
from kgen.index import Expr, Var
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor, at
from kgen.values import Value


def _product(
    b: Builder,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lhs: Tensor,
    rhs: Tensor,
    out_vars: tuple[Var, ...],
    k: Var,
    where: Callable[..., tuple[list[Expr], list[Expr]]],
) -> Tensor:
    """The vendor call of the current node, wrapped as a Contraction over ``out_vars + (k,)``."""
    left, right = where(*(v.expr() for v in out_vars), k.expr())

    def wrap(call: ir.Extern) -> ir.Node:
        out = call.outs[0]
        assert out is not None
        return ir.Contraction(out, out_vars, (k,), at(lhs, left), at(rhs, right), call, b.origin)

    result: Tensor = fallback.extern(b, b.current, args, kwargs, "contraction without a template", wrap)
    return result


def mm(b: Builder, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    m, n, k = ix.var("m", x.sizes[0]), ix.var("n", y.sizes[1]), ix.var("k", x.sizes[1])
    return _product(b, (x, y), kwargs, x, y, (m, n), k, lambda i, j, r: ([i, r], [r, j]))


def bmm(b: Builder, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    batch, m, n, k = ix.var("b", x.sizes[0]), ix.var("m", x.sizes[1]), ix.var("n", y.sizes[2]), ix.var("k", x.sizes[2])
    return _product(b, (x, y), kwargs, x, y, (batch, m, n), k, lambda h, i, j, r: ([h, i, r], [h, r, j]))


def addmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    m, n, k = ix.var("m", x.sizes[0]), ix.var("n", y.sizes[1]), ix.var("k", x.sizes[1])
    return _product(b, (bias, x, y), kwargs, x, y, (m, n), k, lambda i, j, r: ([i, r], [r, j]))


def baddbmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    batch, m, n, k = ix.var("b", x.sizes[0]), ix.var("m", x.sizes[1]), ix.var("n", y.sizes[2]), ix.var("k", x.sizes[2])
    return _product(b, (bias, x, y), kwargs, x, y, (batch, m, n), k, lambda h, i, j, r: ([h, i, r], [h, r, j]))


def convolution(
    b: Builder, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Tensor:  # fmt: skip
    """``out[n, o, p...] = sum over c and taps of x[n, c, p*stride - padding + tap*dilation] * weight[o, c, tap...]``, the input
    zero outside. With groups, output channel o reads the input channels of its group."""
    args = (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    rank = weight.rank - 2
    steps = [_per_dimension(given, rank) for given in (stride, padding, dilation)]
    if transposed or x.rank != weight.rank or any(not isinstance(n, int) for step in steps for n in step):
        result: Tensor = fallback.extern(b, b.current, args, {}, "contraction without a template")
        return result
    sizes = b.symbols.sizes(b.current.meta["val"].shape)
    n, o = ix.var("n", sizes[0]), ix.var("o", sizes[1])
    spatial = tuple(ix.var(f"p{k}", s) for k, s in enumerate(sizes[2:]))
    c = ix.var("c", weight.sizes[1])
    taps = tuple(ix.var(f"t{k}", s) for k, s in enumerate(weight.sizes[2:]))
    channel = c.expr()
    if groups != 1:
        channel = ix.floordiv(o.expr(), ix.floordiv(weight.sizes[0], ix.as_expr(groups))) * weight.sizes[1] + channel
    place = [p.expr() * s - pad + t.expr() * d for p, t, s, pad, d in zip(spatial, taps, *steps, strict=True)]
    inside = vs.const(True, torch.bool)
    for e, extent in zip(place, x.sizes[2:], strict=True):
        inside = vs.call("and", inside, vs.call("and", vs.compare("ge", e, ix.ZERO), vs.compare("lt", e, extent)))
    lhs = vs.masked(inside, at(x, [n.expr(), channel, *place]), vs.const(0, x.dtype))
    rhs = at(weight, [o.expr(), c.expr(), *(t.expr() for t in taps)])

    def wrap(call: ir.Extern) -> ir.Node:
        out = call.outs[0]
        assert out is not None
        return ir.Contraction(out, (n, o, *spatial), (c, *taps), lhs, rhs, call, b.origin)

    made: Tensor = fallback.extern(b, b.current, args, {}, "contraction without a template", wrap)
    return made


def _per_dimension(given: Any, rank: int) -> list[Any]:
    items = list(given) if isinstance(given, list | tuple) else [given]
    return items if len(items) == rank else items * rank


def library(reason: str) -> Callable[..., Any]:
    """A rule for an operator of the contraction family that stays one library call."""

    def rule(b: Builder, *args: Any, **kwargs: Any) -> Any:
        return fallback.extern(b, b.current, args, kwargs, reason)

    return rule


def attention(b: Builder, *args: Any, **kwargs: Any) -> Any:
    return fallback.extern(
        b, b.current, args, kwargs, "attention without a template", lambda call: ir.Attention(call, b.origin)
    )


_ATTENTION = [
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
]

RULES: dict[str, Callable[..., Any]] = {
    "aten.mm": mm,
    "aten.bmm": bmm,
    "aten.addmm": addmm,
    "aten.baddbmm": baddbmm,
    "aten.convolution": convolution,
    "aten.convolution_backward": library("contraction without a template"),
    "aten._scaled_mm": library("contraction without a template"),
    "aten._int_mm": library("contraction without a template"),
    **{f"aten._scaled_dot_product_{name}": attention for name in _ATTENTION},
    **{f"aten._scaled_dot_product_{name}_backward": attention for name in _ATTENTION},
}

_ = Value
