"""The arguments that candidates are run on, and how much their results may differ."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.index import Sizes
from kgen.tuning.benchmark import Array

# On the grid: sums spread this much, in steps. Numbers of 8 bits hold them up to eight times as large.
SPREAD = 30
# What an operand may do to the numbers of a buffer without leaving the grid.
PLAIN = ("load", "const", "cast", "round_to", "where", "and", "or", "not", "lt", "le", "index")


def arguments(part: ir.Graph) -> tuple[Array | int, ...]:
    """Arguments like the graph's: sizes at the hints, values that stay as large when multiplied, indices in range."""
    sizes = Sizes(part.size_hints)
    tops = _tops(part, sizes)
    scales = _scales(part, sizes)
    found: list[Array | int] = []
    for item in part.inputs:
        if item.buffer is None:
            assert item.expr is not None
            found.append(sizes.of(item.expr))
            continue
        buffer = part.buffers[item.buffer]
        strides = buffer.strides or ix.contiguous_strides(buffer.sizes)
        lengths, steps = (tuple(map(sizes.of, found)) for found in (map(ix.as_expr, buffer.sizes), map(ix.as_expr, strides)))
        name = buffer.name
        found.append(Array(lengths, steps, buffer.dtype, str(buffer.device), scales.get(name, 1.0), tops.get(name, 0)))
    return tuple(found)


def exact_arguments(part: ir.Graph, given: tuple[Array | int, ...]) -> tuple[Array | int, ...] | None:
    """The same with operands of which all matmuls have sums that no type on the way rounds: multiples of one small step. What
    the library rounds and a template does not is then equal, and what differs is wrong. None where operands are computed."""
    sizes = Sizes(part.size_hints)
    lefts, rights, addends = set[str](), set[str](), set[str]()
    depth = 1
    for node in (n for n in part.nodes if isinstance(n, ir.TemplateNode)):
        if isinstance(node, ir.Operation) or node.scale is not None:
            return None
        for value, names in ((node.lhs, lefts), (node.rhs, rights), (node.addend, addends)):
            if value is None:
                continue
            loads = vs.loads([value])
            if len(loads) != 1 or any(v.op not in PLAIN for v in vs.topological([value], through_indices=False)):
                return None
            names.add(loads[0].attr[0])
        depth = max(depth, sizes.points(node.reduced))
    inputs = {item.buffer for item in part.inputs}
    if not lefts | rights | addends <= inputs or lefts & rights or addends & (lefts | rights):
        return None
    share = min(1.0, SPREAD**2 / depth)
    step = 2.0 ** -round(math.log2(max(1.0, depth * share)) / 2)  # the sums are about as large as 1
    how = {**dict.fromkeys(lefts, (1.0, 1.0)), **dict.fromkeys(rights, (step, share)), **dict.fromkeys(addends, (step, 1.0))}
    return tuple(
        replace(one, scale=how[item.buffer][0], share=how[item.buffer][1])
        if isinstance(one, Array) and item.buffer in how and one.dtype.is_floating_point
        else one
        for item, one in zip(part.inputs, given, strict=True)
    )


def roundings(part: ir.Graph, matmuls: bool) -> tuple[torch.dtype, ...]:
    """The narrowest type that anything on the way to each result is rounded to, where it is computed as the program says; with
    or without that of the matmuls themselves."""
    narrowest: dict[str, torch.dtype] = {}
    for node in part.nodes:
        roots = (*ir.roots(node), *(node.stored if isinstance(node, ir.Contraction | ir.Operation) else ()))
        types = [narrowest[load.attr[0]] for load in vs.loads(roots) if load.attr[0] in narrowest]
        types += [v.attr for v in vs.topological(roots) if v.op == "round_to"]
        for out in ir.outs(node):
            own = part.buffers[out].dtype
            if isinstance(node, ir.TemplateNode) and not matmuls:
                own = ops.compute_dtype(own)
            narrowest[out] = coarsest([own, *types])
    results = [out.buffer for out in part.outputs if isinstance(out, ir.TensorArg)]
    return tuple(narrowest[name] for name in results)


def coarsest(types: Iterable[torch.dtype]) -> torch.dtype:
    """The one with the largest rounding errors; the first where none rounds."""
    return max(types, key=lambda t: torch.finfo(t).eps if t.is_floating_point else 0.0)


def _values(part: ir.Graph) -> Iterable[vs.Value]:
    return vs.topological([root for node in part.nodes for root in ir.roots(node)])


def _tops(part: ir.Graph, sizes: Sizes) -> dict[str, int]:
    """How large indices may be, by the buffers that hold them."""
    found: dict[str, int] = {}
    for value, extent in dict.fromkeys(_indices(part)):
        limit = max(1, sizes.of(extent))
        for load in vs.loads([value]):
            found[load.attr[0]] = min(limit, found.get(load.attr[0], limit))
    return found


def _indices(part: ir.Graph) -> Iterable[tuple[vs.Value, ix.Expr]]:
    """Values with the extents that they index, in accesses and in assertions."""
    for v in _values(part):
        for e in vs.index_exprs(v):
            yield from ((a.value, a.size) for a in ix.free_atoms(e) if isinstance(a, ix.Indirect))
        if v.op == "assert" and v.attr == "index":
            below = [c for c in vs.topological([v.args[1]]) if c.op == "lt"]
            yield from ((c.args[0], ix.constant(c.args[1].attr)) for c in below if c.args[1].op == "const")
            yield from ((c.args[0], c.args[1].attr) for c in below if c.args[1].op == "index")


def _scales(part: ir.Graph, sizes: Sizes) -> dict[str, float]:
    """Right operands are divided by the root of the sum's length."""
    found: dict[str, float] = {}
    for node in part.nodes:
        if isinstance(node, ir.Contraction):
            depth = max(1, sizes.points(node.reduced))
            found |= {load.attr[0]: depth**-0.5 for load in vs.loads([node.rhs])}
    return found
