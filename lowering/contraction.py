"""Matrix products, convolutions and attention: Contraction and Attention nodes over the library call that computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kgen import index as ix
from kgen import ir
from kgen.index import Expr, Var
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor, at
from kgen.values import Value


def _product(
    b: Builder, args: tuple[Any, ...], kwargs: dict[str, Any], lhs: Tensor, rhs: Tensor, out_vars: tuple[Var, ...], k: Var, where: Callable[..., tuple[list[Expr], list[Expr]]]
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
    return _product(b, (x, y), kwargs, x, y, (m, n), k, lambda i, j, l: ([i, l], [l, j]))


def bmm(b: Builder, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    batch, m, n, k = ix.var("b", x.sizes[0]), ix.var("m", x.sizes[1]), ix.var("n", y.sizes[2]), ix.var("k", x.sizes[2])
    return _product(b, (x, y), kwargs, x, y, (batch, m, n), k, lambda h, i, j, l: ([h, i, l], [h, l, j]))


def addmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    m, n, k = ix.var("m", x.sizes[0]), ix.var("n", y.sizes[1]), ix.var("k", x.sizes[1])
    return _product(b, (bias, x, y), kwargs, x, y, (m, n), k, lambda i, j, l: ([i, l], [l, j]))


def baddbmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    batch, m, n, k = ix.var("b", x.sizes[0]), ix.var("m", x.sizes[1]), ix.var("n", y.sizes[2]), ix.var("k", x.sizes[2])
    return _product(b, (bias, x, y), kwargs, x, y, (batch, m, n), k, lambda h, i, j, l: ([h, i, l], [h, l, j]))


def library(reason: str) -> Callable[..., Any]:
    """A rule for an operator of the contraction family that stays one library call."""

    def rule(b: Builder, *args: Any, **kwargs: Any) -> Any:
        return fallback.extern(b, b.current, args, kwargs, reason)

    return rule


def attention(b: Builder, *args: Any, **kwargs: Any) -> Any:
    return fallback.extern(b, b.current, args, kwargs, "attention without a template", lambda call: ir.Attention(call, b.origin))


_ATTENTION = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention fused_attention_overrideable".split()

RULES: dict[str, Callable[..., Any]] = {
    "aten.mm": mm,
    "aten.bmm": bmm,
    "aten.addmm": addmm,
    "aten.baddbmm": baddbmm,
    "aten.convolution": library("contraction without a template"),
    "aten.convolution_backward": library("contraction without a template"),
    "aten._scaled_mm": library("contraction without a template"),
    "aten._int_mm": library("contraction without a template"),
    **{f"aten._scaled_dot_product_{name}": attention for name in _ATTENTION},
    **{f"aten._scaled_dot_product_{name}_backward": attention for name in _ATTENTION},
}

_ = Value
