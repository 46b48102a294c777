"""What is gathered from a table by data, and added to what a contraction makes for each of many batches, is stored first.

    s[b, h, m, n] = scores[b, h, m, n] + table[index[m, n], h]
    g[h, m, n] = table[index[m, n], h];  s[b, h, m, n] = scores[b, h, m, n] + g[h, m, n]

A kernel of a program, or an epilogue, would load index and entry again for each batch: with the bias of positions of 4,096
windows a program took 232 us of an H200; a kernel by hand with the bias from memory 73 (2026-11-29).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Transform

# How often an element is gathered at least, and all of them together: fewer gathers take no longer than a kernel.
MANY, WORTH = 32, 1 << 22
_GATHERED = "gathered"


class StoredGathers(Transform):
    """Stores gathered parts of elementwise functions of contractions that are the same for many of their elements."""

    name = "stored gathers"

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        if not options.fusion:
            return
        derived: set[str] = set()
        nodes: list[ir.Node] = []
        for node in graph.nodes:
            inside = isinstance(node, ir.Pointwise) and not derived.isdisjoint(ir.reads(node))
            if inside or ir.is_contraction(node):
                derived.update(ir.outs(node))
            if inside and isinstance(node, ir.Pointwise) and options.device(graph, node.out).kind == "cuda":
                before, node = _apart(graph, node, derived)
                nodes += before
            nodes.append(node)
        graph.nodes[:] = nodes


def _apart(graph: ir.Graph, node: ir.Pointwise, derived: set[str]) -> tuple[list[ir.Node], ir.Pointwise]:
    """Nodes that make such parts, and the node that reads them."""
    made: list[ir.Node] = []
    mapping: dict[Value, Value] = {}
    for k, part in enumerate(_parts(node, derived)):
        loops = tuple(v for v in node.vars if v in part.variables())
        sizes = tuple(v.extent for v in loops)
        device = graph.buffers[node.out].device
        name = ir.derived(graph, ir.Derived(node.out, _GATHERED, k))
        graph.buffers[name] = ir.Buffer(name, vs.memory_dtype(part), device, sizes, ix.contiguous_strides(sizes))
        made.append(ir.Pointwise(name, loops, part, node.origin))
        mapping[part] = vs.load(name, tuple(v.expr() for v in loops), vs.memory_dtype(part))
    return (made, replace(node, value=vs.with_parts(node.value, mapping))) if made else ([], node)


def _parts(node: ir.Pointwise, derived: set[str]) -> list[Value]:
    """The largest parts of a value that need no contraction and not all loops, and gather."""
    points = _count(node.vars)
    if points < WORTH:
        return []
    few: dict[Value, bool] = {}
    for one in vs.topological([node.value], through_indices=False):
        known = [few[arg] for arg in one.args]
        loops = [v for v in node.vars if v in one.variables()]
        read = {load.attr[0] for load in vs.loads([one])} if one.op == "load" else set[str]()
        few[one] = all(known) and derived.isdisjoint(read) and _count(loops) * MANY <= points
    parts = dict.fromkeys(arg for one in few for arg in one.args if few[arg] and not few[one])
    return [part for part in parts if _gathers(part)]


def _gathers(value: Value) -> bool:
    return any(ix.indirects(e) for load in vs.loads([value]) for e in load.attr[1])


def _count(loops: Sequence[Var]) -> float:
    known = [v.extent.as_int() for v in loops]
    return 0 if None in known else math.prod(n for n in known if n is not None)
