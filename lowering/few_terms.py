"""Reductions of a few terms as arithmetic at each point of the result: what follows reads nothing of theirs from memory, and
a kernel of rows has no row of two or three points."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Var
from kgen.ir.values import Value
from kgen.lowering.tensor import Tensor

MOST_TERMS = 4
# Results below which it does not matter: a matmul of fewer is as fast as anything else.
LEAST_POINTS = 1 << 14
# Of a reduction. It is not its own time that counts, but that loops over its terms keep neighbours apart.
LEAST_REDUCED = 1 << 13
# Operations of all terms: each result computes so many again where several kernels read it.
MOST_COST = 32
# Operations of all terms, up to which they are written out for one kernel, which stores the results.
MOST_STORED = 128


def are_last(dims: Sequence[int], rank: int) -> bool:
    """Whether terms are neighbours: sums over batches and heads belong to what makes the tensors that they are sums of."""
    return list(dims) == list(range(rank - len(dims), rank))


def are_few(sizes: ir.Sizes, loops: Sequence[Var], least: int = 2, most: int = MOST_TERMS, points: int = LEAST_POINTS) -> bool:
    """Whether there are few terms, of `least` to `most`, at each of `points` or more."""
    counts = [v.extent.as_int() for v in loops]
    number = ix.product(sizes).as_int()
    if number is None or number < points or None in counts:
        return False
    return least <= (ix.product(v.extent for v in loops).as_int() or 0) <= most


def are_cheap(loops: Sequence[Var], term: Value) -> bool:
    """Whether computing the terms again is cheaper than their sum's way through memory."""
    return _cost(loops, term) <= MOST_COST


def are_affordable(loops: Sequence[Var], term: Value) -> bool:
    """Whether the terms are short enough to be written out at all."""
    return _cost(loops, term) <= MOST_STORED


def are_parts(term: Value, written: Value) -> bool:
    """Whether each term is a part of a concatenation: written out, they cost no more than the choice among them did."""
    return vs.total_cost([written]) <= vs.total_cost([term])


def _cost(loops: Sequence[Var], term: Value) -> int:
    return vs.total_cost([term]) * (ix.product(v.extent for v in loops).as_int() or 0)


def combined(op: str, loops: Sequence[Var], term: Value) -> Value:
    """The terms at all points of the loops, combined one after the other; `op` is a scalar operation of two arguments."""

    def at(point: tuple[int, ...]) -> Value:
        mapping: dict[Atom, Expr] = {v: ix.constant(k) for v, k in zip(loops, point, strict=True)}
        return vs.substitute(term, mapping)

    points = itertools.product(*(range(v.extent.as_int() or 0) for v in loops))
    return functools.reduce(lambda a, b: vs.call(op, a, b), map(at, points))


def running(op: str, loop: Var, axis: Expr, term: Value) -> Value:
    """The terms up to a place on their axis, combined one after the other: a choice among as many results as terms."""
    terms = [vs.substitute(term, {loop: ix.constant(k)}) for k in range(loop.extent.as_int() or 0)]
    found = list(itertools.accumulate(terms, lambda a, b: vs.call(op, a, b)))
    made = found.pop()
    while found:
        made = vs.where(vs.compare("lt", axis, ix.constant(len(found))), found.pop(), made)
    return made


def written_out(
    loops: Sequence[Var], term: Callable[..., Value], tensors: Sequence[Tensor], realize: Callable[[Tensor], Tensor]
) -> Value:
    """The sum of `term` of the tensors over short loops. What each of many terms would compute again is stored first."""
    inlined = term(*tensors)
    return combined("add", loops, inlined if are_cheap(loops, inlined) else term(*map(realize, tensors)))
