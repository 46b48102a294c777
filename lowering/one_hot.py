"""Sums along a one-hot row as arithmetic: of ``where(i == t, a, 0) * c`` one term counts, so that nothing is left to walk. That
is what the gradient of a negative log-likelihood sums up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kgen.ir import index as ix
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value
from kgen.lowering.builder import Builder
from kgen.lowering.tensor import Tensor

# Of 0 these make 0 or NaN, whatever their other argument is.
LINEAR = ("mul", "neg", "truediv", "round_to", "cast")


def one_hot_sum(b: Builder, x: Tensor, dims: Sequence[int]) -> Tensor | None:
    """The sum along one dimension, which has one element in the result; None where its terms are nothing of that kind."""
    if len(dims) != 1 or not x.dtype.is_floating_point:
        return None
    [dim] = dims
    length = x.sizes[dim].as_int()
    value = None if length is None or length < 2 else _sum(b.made_of(x), x.axes[dim], length)
    sizes = tuple(ix.ONE if k == dim else size for k, size in enumerate(x.sizes))
    return None if value is None else replace(x, sizes=sizes, value=value)


def _sum(term: Value, loop: Var, length: int) -> Value | None:
    """One term is made of `a`, and all others are made of 0: these are 0 together, or NaN as each of them is."""
    path = _path(term, loop)
    position = _position(path[-1], loop) if path else None
    if position is None:
        return None
    inside = vs.call("and", *(vs.call(op, position, vs.const(end, position.dtype)) for op, end in (("ge", 0), ("lt", length))))
    _, hit, miss = path[-1].args
    return vs.call("add", vs.where(inside, _made(path, hit), vs.const(0, term.dtype)), _made(path, miss))


def _path(term: Value, loop: Var) -> list[Value]:
    """The operations from a term down to the only one whose arguments tell points of the loop apart; none if there are more."""
    path = [term]
    while path[-1].op in LINEAR:
        last = path[-1]
        along = [a for a in last.args if loop in a.variables()]
        if len(along) != 1 or not last.dtype.is_floating_point or (last.op == "truediv" and along[0] is not last.args[0]):
            return []
        path.append(along[0])
    return path if path[-1].op == "where" else []


def _position(where: Value, loop: Var) -> Value | None:
    """What the loop is compared with, if the value is 0 elsewhere and does not depend on the loop otherwise."""
    condition, hit, miss = where.args
    if condition.op != "eq" or loop in hit.variables() or miss.op != "const" or miss.attr != 0:
        return None
    for point, position in (condition.args, condition.args[::-1]):
        if point.op == "index" and point.attr is loop.expr() and loop not in position.variables():
            return position if position.dtype in (torch.int32, torch.int64) else None
    return None


def _made(path: Sequence[Value], value: Value) -> Value:
    """What a term makes of a value in the place of the last operation of its path."""
    for below, above in zip(path[:0:-1], path[-2::-1], strict=True):
        value = vs.rebuild(above, tuple(value if a is below else a for a in above.args), above.attr)
    return value
