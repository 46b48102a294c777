"""Contractions that templates compute: which ones, from what operands, and by which template."""

from __future__ import annotations

from dataclasses import replace

from kgen import ir, ops
from kgen import values as vs
from kgen.ir import Buffer
from kgen.scheduler.items import Group, Item, accumulator, make_item
from kgen.scheduler.partials import Tiles, tile_reductions
from kgen.values import Value

# Elementary operations of an operand's element that are worth doing again for every tile that reads it.
PROLOGUE = 24


def offer(graph: ir.Graph, taken: frozenset[str], tiles: Tiles) -> list[ir.Node]:
    """The graph's nodes with the contractions in `taken` (by result) left to templates, with reductions on the tiles of those,
    and without what nobody reads then."""
    nodes: list[ir.Node] = []
    for node in graph.nodes:
        if not isinstance(node, ir.Contraction) or node.out not in taken:
            nodes.append(node)
            continue
        lhs, rhs = (_operand(v, k, node) for k, v in enumerate((node.lhs, node.rhs)))
        nodes.append(replace(node, vendor=None, lhs=lhs, rhs=rhs))
        assert node.operands is not None
        out, name = graph.buffers[node.out], accumulator(node.out)
        graph.buffers[name] = Buffer(name, ops.sum_dtype(node.operands), out.device, out.sizes, out.strides)
    return _needed(graph, tile_reductions(graph, nodes, tiles) if taken else nodes)


def _operand(value: Value, position: int, node: ir.Contraction) -> Value:
    """The operand computed tile by tile, or read from the buffer that the library call would read."""
    if vs.total_cost([value]) <= PROLOGUE or not node.stored:
        return value
    return node.stored[position]


def _needed(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Node]:
    """Without pointwise nodes that nobody reads."""
    read = {o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg)}
    read |= {b.alias_of for b in graph.buffers.values() if b.alias_of is not None}
    kept: list[ir.Node] = []
    for node in reversed(nodes):
        if isinstance(node, ir.Pointwise) and node.out not in read:
            continue
        read.update(ir.reads(node))
        kept.append(node)
    return kept[::-1]


def items_of(node: ir.Contraction, position: int, graph: ir.Graph) -> list[Item]:
    """The sum, and what turns it into the result."""
    total = make_item(node, position)
    kind = graph.buffers[accumulator(node.out)].dtype
    value = vs.load(accumulator(node.out), total.store, kind)
    if node.scale is not None:
        value = vs.call("mul", value, vs.cast(node.scale, value.dtype))
    if node.addend is not None:
        value = vs.call("add", value, vs.cast(node.addend, value.dtype))
    value = vs.cast(value, ops.compute_dtype(graph.buffers[node.out].dtype))
    finish = ir.Pointwise(node.out, node.out_vars, value, node.origin)
    return [total, make_item(finish, position)]


def is_product(group: Group) -> bool:
    """Whether a template computes the group."""
    return any(item.contracts for item in group.items)


def is_partial(group: Group) -> bool:
    """Whether the group reduces the tiles of a product that it has not joined yet."""
    return all(item.is_partial for item in group.items) and bool(group.items)
