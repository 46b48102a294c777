"""Matmuls: Contraction nodes over the library call that computes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value
from kgen.lowering import fallback
from kgen.lowering.builder import Builder
from kgen.lowering.few_terms import are_few, written_out
from kgen.lowering.reduction import reduce
from kgen.lowering.tensor import Tensor, at, broadcast, indices, is_empty

# Types whose matmuls tensor cores round, or do not have: their elements are multiplied one by one.
EXACT = (torch.float32, torch.float64)
# Elements of all matrices that are multiplied by a vector each: below, launches take longer than memory.
LEAST_OF_STATES = 1 << 20
# Operations for an element of a state at least: a decay, and what is added.
STEPS_OF_STATES = 2


@dataclass(frozen=True, slots=True)
class Matmul:
    """A sum of products over `k` at the points of `out_vars`: the two operands' indices as functions of all of these, and what
    happens to the sum."""

    lhs: Tensor
    rhs: Tensor
    out_vars: tuple[Var, ...]
    k: Var
    left: tuple[Expr, ...]
    right: tuple[Expr, ...]
    scale: Value | None = None
    addend: Value | None = None


def _node(b: Builder, matmul: Matmul, call: ir.Extern, factors: slice = slice(-2, None)) -> ir.Contraction:
    """`factors` are the operands' places among the call's arguments."""
    out = call.outs[0]
    assert out is not None
    lhs, rhs = at(matmul.lhs, matmul.left), at(matmul.rhs, matmul.right)
    plain = matmul.lhs.dtype == matmul.rhs.dtype
    stored = tuple(loaded(arg, at) for arg, at in zip(call.args[factors], (matmul.left, matmul.right), strict=True))
    return ir.Contraction(
        out, matmul.out_vars, (matmul.k,), lhs, rhs, call, b.origin,
        matmul.lhs.dtype if plain else None, matmul.scale, matmul.addend, stored, rounded=result_rounding(b, out),
    )  # fmt: skip


def result_rounding(b: Builder, out: str) -> torch.dtype | None:
    """What eager rounds a matmul to, even where it would not have to be stored."""
    kind = b.graph.buffers[out].dtype
    return kind if b.numerics == "eager" and kind in ops.NARROW_FLOATS else None


def loaded(arg: ir.TensorArg, where: tuple[Expr, ...]) -> Value:
    """The element of a library call's operand at a logical index."""
    memo: dict[Expr, Expr] = {}
    mapping: dict[Atom, Expr] = dict(zip(arg.vars, where, strict=True))
    return vs.load(arg.buffer, (ix.substitute(e, mapping, memo) for e in arg.index), arg.dtype)


def mm(b: Builder, x: Tensor, y: Tensor, **kwargs: Any) -> Tensor:
    return _matmul(b, (x, y), kwargs, x, y)


def addmm(b: Builder, bias: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1, **kwargs: Any) -> Tensor:
    return _matmul(b, (bias, x, y), {"beta": beta, "alpha": alpha, **kwargs}, x, y, bias, beta, alpha)


bmm, baddbmm = mm, addmm


def _matmul(
    b: Builder, args: tuple[Tensor, ...], kwargs: dict[str, Any], x: Tensor, y: Tensor,
    bias: Tensor | None = None, beta: Any = 1, alpha: Any = 1,
) -> Tensor:  # fmt: skip
    """``alpha * x @ y + beta * bias`` of matrices, or of as many matrices as a leading dimension counts."""
    matmul, plain = _of_matrices(x, y), all(isinstance(number, int | float) for number in (alpha, beta))
    if bias is not None and plain:
        whole = broadcast(bias, tuple(v.extent for v in matmul.out_vars))
        added = None if beta == 0 else _times(at(whole, [v.expr() for v in matmul.out_vars]), beta)
        kind = ops.compute_dtype(x.dtype)
        matmul = replace(matmul, scale=None if alpha == 1 else vs.const(alpha, kind), addend=added)
    if plain and not kwargs.keys() - {"alpha", "beta"} and x.dtype == y.dtype and x.dtype.is_floating_point:
        written = _written_out(b, matmul)
        if written is not None:
            return written
    if bias is None and not kwargs and (repeated := _repeated(b, x, y)) is not None:
        return repeated
    if bias is None and not kwargs and (row_sums := _with_vectors(b, x, y)) is not None:
        return row_sums
    used = {name: number for name, number in kwargs.items() if number != 1 or name not in ("alpha", "beta")}
    wrap = partial(_node, b, matmul) if plain else None
    result: Tensor = fallback.extern(b, b.current, args, used, "contraction without a template", wrap)
    return result


def _of_matrices(x: Tensor, y: Tensor) -> Matmul:
    """``x @ y``, for each index of leading dimensions."""
    batch = tuple(ix.var("b", s) for s in x.sizes[:-2])
    m, n, k = ix.var("m", x.sizes[-2]), ix.var("n", y.sizes[-1]), ix.var("k", x.sizes[-1])
    lead = [v.expr() for v in batch]
    return Matmul(x, y, (*batch, m, n), k, (*lead, m.expr(), k.expr()), (*lead, k.expr(), n.expr()))


def _repeated(b: Builder, x: Tensor, y: Tensor) -> Tensor | None:
    """``x @ y`` where all rows of x, or all columns of y, are the same: one of them, multiplied, at all of these; else None.
    The gradient of a sum is such a matrix, and all its elements are the same. Then a sum of the other matrix is left."""
    if x.dtype != y.dtype or not x.dtype.is_floating_point or is_empty(x.sizes) or is_empty(y.sizes):
        return None  # sums of integers have another type
    row, column = _first_of_equal(x, -2), _first_of_equal(y, -1)
    if (row, column) == (x, y) or not isinstance(b.current.target, torch._ops.OpOverload):
        return None
    whole = (*x.sizes[:-1], y.sizes[-1])
    for one, other, axis in ((row, column, -2), (column, row, -1)):
        if not {one.axes[-1], one.axes[-2]} & one.value.variables():
            return broadcast(reduce(b, "sum", _times_number(other, one), [axis % other.rank], True), whole)
    matmul = _of_matrices(row, column)
    sizes = tuple(v.extent for v in matmul.out_vars)
    made = (sizes, x.dtype, x.device, ix.contiguous_strides(sizes))
    reason = "contraction without a template"
    [result] = b.extern(b.current.target, (row, column), {}, [made], reason, wrap=partial(_node, b, matmul))
    assert result is not None
    return broadcast(result, whole)


def _with_vectors(b: Builder, x: Tensor, y: Tensor) -> Tensor | None:
    """Matrices in float32 that a GPU has just computed, or reads anyway, times a vector each, as sums of rows or columns; else
    None. What updates a state and reads it is one kernel then: a library reads it from memory."""
    matrix, dim = (x, 2) if y.sizes[-1] == 1 else (y, 1)
    if x.rank != 3 or 1 not in (x.sizes[1], y.sizes[2]) or x.dtype != y.dtype or x.dtype not in EXACT:
        return None
    elements = matrix.numel().as_int() or 0
    if (
        elements < LEAST_OF_STATES
        or not b.on_gpu(x.device)
        or not (_is_state(b, matrix) or _is_read_beside(b.current, 2 - dim))
    ):
        return None
    rows, depth, columns = matrix.indices
    left, right = ((rows, ix.ZERO, depth), matrix.indices) if dim == 1 else (matrix.indices, (rows, columns, ix.ZERO))
    return reduce(b, "sum", matrix.with_value(vs.call("mul", at(x, left), at(y, right))), [dim], True)


def _is_state(b: Builder, matrix: Tensor) -> bool:
    """Whether arithmetic has made it: a cache that keys are joined to is none."""
    value = matrix.value
    if value.op == "load" and value.attr[0] in b.stored:
        value = b.stored[value.attr[0]]
    return (
        sum(v.dtype.is_floating_point and v.op in ops.OPS and v.op != "where" for v in vs.topological([value]))
        >= STEPS_OF_STATES
    )


def _is_read_beside(matmul: Node, position: int) -> bool:
    """Whether other operators read an operand of the matmul, too, or what it is a view of."""
    plain = matmul.target is torch.ops.aten.bmm.default
    node = matmul.args[position] if plain else None
    while isinstance(node, Node):
        if len(node.users) > 1:
            return True
        schema = getattr(node.target, "_schema", None)
        if schema is None or schema.returns[0].alias_info is None:
            return False
        node = node.args[0]
    return False


def _times_number(tensor: Tensor, number: Tensor) -> Tensor:
    """The matrix times one that has one element at all places, not rounded."""
    where = (*tensor.indices[:-2], ix.ZERO, ix.ZERO)
    return tensor.with_value(vs.call("mul", tensor.value, at(number, where)))


def _first_of_equal(tensor: Tensor, axis: int) -> Tensor:
    """One of the elements along an axis, if they are all the same: the rest of the tensor's value is its value."""
    if tensor.sizes[axis] == 1 or tensor.axes[axis] in tensor.value.variables():
        return tensor
    at_axis = axis % tensor.rank
    return replace(tensor, sizes=(*tensor.sizes[:at_axis], ix.ONE, *tensor.sizes[at_axis + 1 :]))


def _written_out(b: Builder, matmul: Matmul) -> Tensor | None:
    """The matmul as arithmetic at each point of its result, where its sums are short; else None."""
    sizes, loops = tuple(v.extent for v in matmul.out_vars), (matmul.k,)
    # of one term nothing is summed; batches of such matmuls, as of heads with one row, may be part of a template's program
    least = 1 if b.on_gpu(matmul.lhs.device) or len(sizes) == 2 else 2
    if not are_few(sizes, loops, least=least):
        return None

    def term(lhs: Tensor, rhs: Tensor) -> Value:
        return vs.call("mul", at(lhs, matmul.left), at(rhs, matmul.right))

    value = written_out(loops, term, (matmul.lhs, matmul.rhs), b.realize)
    if matmul.scale is not None:
        value = vs.call("mul", value, matmul.scale)
    if matmul.addend is not None:
        value = vs.call("add", value, matmul.addend)
    made = vs.substitute(value, dict(zip(matmul.out_vars, indices(sizes), strict=True)))
    return Tensor(sizes, matmul.lhs.dtype, matmul.lhs.device, made)


def int_mm(b: Builder, x: Tensor, y: Tensor) -> Tensor:
    """Of 8-bit integers, added up and given in 32 bits."""
    return _matmul(b, (x, y), {}, x, y)


def int8_pack_mm(b: Builder, x: Tensor, y: Tensor, scales: Tensor) -> Tensor:
    """``x @ y.t() * scales``: columns of 8-bit integers, each with its scale."""
    m, n, k = ix.var("m", x.sizes[0]), ix.var("n", y.sizes[0]), ix.var("k", x.sizes[1])
    left, right, kind = (m.expr(), k.expr()), (n.expr(), k.expr()), ops.compute_dtype(x.dtype)

    def wrap(call: ir.Extern) -> ir.Node:
        out = call.outs[0]
        assert out is not None
        stored = loaded(call.args[0], left), vs.cast(loaded(call.args[1], right), kind)
        return ir.Contraction(
            out, (m, n), (k,), at(x, left), vs.cast(at(y, right), kind), call, b.origin, x.dtype, at(scales, [n.expr()]), None,
            stored, rounded=result_rounding(b, out),
        )  # fmt: skip

    result: Tensor = fallback.extern(b, b.current, (x, y, scales), {}, "contraction without a template", wrap)
    return result


def scaled_mm(
    b: Builder, x: Tensor, y: Tensor, scale_x: Tensor, scale_y: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """``(scale_x * scale_y) * x @ y + bias`` with one scale for a tensor, or one for each row of x and each column of y. Where
    the caller asks for sums as exact as float32's, or for 8-bit results, which saturate, it stays the library's."""
    args = (x, y, scale_x, scale_y, bias, scale_result, out_dtype, use_fast_accum)
    m, n, k = ix.var("m", x.sizes[0]), ix.var("n", y.sizes[1]), ix.var("k", x.sizes[1])
    scales = [_scale(s, wanted) for s, wanted in ((scale_x, (m, None)), (scale_y, (None, n)))]
    wrap = None
    if use_fast_accum and scale_result is None and out_dtype is not None and out_dtype.itemsize > 1 and None not in scales:
        left, right = (s for s in scales if s is not None)
        matmul = Matmul(x, y, (m, n), k, (m.expr(), k.expr()), (k.expr(), n.expr()), vs.call("mul", left, right))
        if bias is not None:
            matmul = replace(matmul, addend=at(bias, [n.expr()]))
        wrap = partial(_node, b, matmul, factors=slice(0, 2))
    result: Tensor = fallback.extern(b, b.current, args, {}, "contraction without a template", wrap)
    return result


def _scale(scale: Tensor, wanted: tuple[Var | None, Var | None]) -> Value | None:
    """A tensor's one scale, or one for each index of the loop in `wanted`; None for other arrangements."""
    if all(size == 1 for size in scale.sizes):
        return at(scale, [ix.ZERO] * scale.rank)
    if tuple(scale.sizes) == tuple(ix.ONE if v is None else v.extent for v in wanted):
        return at(scale, [ix.ZERO if v is None else v.expr() for v in wanted])
    return None


def _times(value: Value, number: float) -> Value:
    return value if number == 1 else vs.call("mul", value, vs.const(number, value.dtype))


def library(reason: str) -> Callable[..., Any]:
    """A rule for an operator of the contraction family that stays one library call."""

    def rule(b: Builder, *args: Any, **kwargs: Any) -> Any:
        return fallback.extern(b, b.current, args, kwargs, reason)

    return rule


RULES: dict[str, Callable[..., Any]] = {
    "aten.mm": mm,
    "aten.bmm": bmm,
    "aten.addmm": addmm,
    "aten.baddbmm": baddbmm,
    "aten._scaled_mm": scaled_mm,
    "aten._int_mm": int_mm,
    "aten._weight_int8pack_mm": int8_pack_mm,
}
