"""Sizes that may be 0 by their range, though the program reads an element that is not there where they are.

torch takes symbols of sizes for positive numbers. Of `x[:, :1]` it says that it has one element along the axis, which holds for
every length but 0; for `x[:, 0]` it asks for nothing. A loop then reads an element of a buffer that has none.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from kgen.capture.symbols import SymbolTable
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr, Sizes, Var
from kgen.ir.values import Value

# Loops whose ends are all looked at, at most: of others only the first point and the last one are.
FEW_LOOPS = 6


def rule_out_zeros(graph: ir.Graph, symbols: SymbolTable) -> None:
    """Narrows the ranges of sizes that cannot be 0: exported programs then refuse them."""
    for size in [size for size in symbols.sympy_of if not size.lo and not symbols.depends_on_data(size.expr())]:
        sizes = Sizes(ix.with_derived({**graph.size_hints, size: 0}, graph.derived))
        if any(_reads_nothing(graph, node, sizes) for node in graph.nodes) or _is_nonsense(graph, sizes):
            symbols.ensure_positive(size.expr())


def _reads_nothing(graph: ir.Graph, node: ir.Node, sizes: Sizes) -> bool:
    """Whether a loop that runs reads an element of a buffer that has none."""
    if ir.is_call(node):
        return False
    loops = [v for group in ir.iteration(node) for v in group]
    empty = [load for load in vs.loads(ir.roots(node)) if _is_empty(graph, load.attr[0], sizes)]
    return bool(empty) and any(_is_read(load, point, sizes) for point in _ends(loops, sizes) for load in empty)


def _is_nonsense(graph: ir.Graph, sizes: Sizes) -> bool:
    """Whether a size is negative, or a result is a view of elements that are not there."""
    shown = [arg for arg in graph.outputs if isinstance(arg, ir.TensorArg)]
    extents = [*(b.sizes for b in graph.buffers.values()), *(tuple(v.extent for v in arg.vars) for arg in shown)]
    if any(_points(some, sizes) is None for some in extents):
        return True
    return any(_is_empty(graph, arg.buffer, sizes) and _points([v.extent for v in arg.vars], sizes) for arg in shown)


def _points(extents: Iterable[Expr], sizes: Sizes) -> int | None:
    """How many points there are; None where an extent is negative or has no meaning."""
    try:
        numbers = [sizes.of(extent) for extent in extents]
    except ArithmeticError:
        return None
    return None if min(numbers, default=0) < 0 else math.prod(numbers)


def _is_empty(graph: ir.Graph, name: str, sizes: Sizes) -> bool:
    """Whether the storage of a buffer has no elements."""
    return _points(graph.buffers[ir.storage_owner(graph.buffers, name, {})].sizes, sizes) == 0


def _ends(loops: list[Var], sizes: Sizes) -> Iterator[Mapping[Atom, int]]:
    """The first and last points of loops that run at these sizes."""
    if not _points([v.extent for v in loops], sizes):
        return
    lasts = [sizes.of(v.extent) - 1 for v in loops]
    several = itertools.product(*({0, last} for last in lasts)) if len(loops) <= FEW_LOOPS else ((0,) * len(loops), lasts)
    for point in several:
        yield dict(zip(loops, point, strict=True))


def _is_read(load: Value, point: Mapping[Atom, int], sizes: Sizes) -> bool:
    return not load.args or bool(_number(load.args[0], point, sizes))


def _number(value: Value, point: Mapping[Atom, int], sizes: Sizes) -> torch.Tensor | None:
    """A value at a point; None where data decide it."""
    found: dict[Value, torch.Tensor | None] = {}

    def visit(v: Value) -> torch.Tensor | None:
        if v not in found:
            found[v] = _computed(v, [visit(a) for a in v.args], point, sizes)
        return found[v]

    return visit(value)


def _computed(v: Value, args: list[torch.Tensor | None], point: Mapping[Atom, int], sizes: Sizes) -> torch.Tensor | None:
    if v.op == "const":
        return torch.tensor(v.attr, dtype=v.dtype)
    if v.op == "index" and not any(isinstance(atom, ix.Indirect) for atom in ix.free_atoms(v.attr)):
        return torch.tensor(
            ix.evaluate(v.attr, lambda atom: point.get(atom, 0) if isinstance(atom, Var) else sizes.of(atom.expr()))
        )
    known = [arg for arg in args if arg is not None]
    if len(known) < len(args) or v.op not in ops.OPS:
        return None
    made: torch.Tensor = ops.OPS[v.op].reference(*known)
    return made
