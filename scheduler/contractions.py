"""Products that templates may compute: as what statements they are scheduled, from what operands, and which make a family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kgen import ir, ops
from kgen import values as vs
from kgen.ir import Buffer
from kgen.scheduler.items import Group, Item, accumulators, make_item
from kgen.scheduler.partials import Tiles, tile_reductions
from kgen.values import Value

# Products that one kernel makes: each has accumulators of its own.
MAX_FAMILY = 3
# Elementary operations of an operand's element that are worth doing again for every tile that reads it.
PROLOGUE = 24


def offer(graph: ir.Graph, taken: frozenset[str], tiles: Tiles) -> list[ir.Node]:
    """The graph's nodes with the contractions in `taken` (by result) left to templates, with reductions on the tiles of those,
    and without what nobody reads then."""
    nodes: list[ir.Node] = []
    for node in graph.nodes:
        if not isinstance(node, ir.Product) or ir.outs(node)[0] not in taken:
            nodes.append(node)
            continue
        if isinstance(node, ir.Contraction):
            lhs, rhs = (_operand(v, k, node) for k, v in enumerate((node.lhs, node.rhs)))
            node = replace(node, lhs=lhs, rhs=rhs)
        nodes.append(replace(node, vendor=None))
        for out, name in zip(_results(node), accumulators(node), strict=True):
            if out is not None:
                buffer = graph.buffers[out]
                graph.buffers[name] = Buffer(name, _kind(node, buffer), buffer.device, buffer.sizes, buffer.strides)
    return _needed(graph, tile_reductions(graph, nodes, tiles) if taken else nodes)


def _results(node: ir.Product) -> tuple[str | None, ...]:
    return (node.out,) if isinstance(node, ir.Contraction) else node.outs


def _kind(node: ir.Product, buffer: Buffer) -> torch.dtype:
    """The type of what a template computes."""
    if isinstance(node, ir.Contraction):
        assert node.operands is not None
        return ops.sum_dtype(node.operands)
    return ops.compute_dtype(buffer.dtype)


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


def items_of(node: ir.Product, position: int, graph: ir.Graph) -> list[Item]:
    """What the template computes, and what turns that into the results."""
    made = make_item(node, position)
    items = [made]
    for out, name in zip(_results(node), accumulators(node), strict=True):
        if out is None:
            continue
        value = vs.load(name, made.store, graph.buffers[name].dtype)
        if isinstance(node, ir.Contraction):
            value = _finished(node, value)
        value = vs.cast(value, ops.compute_dtype(graph.buffers[out].dtype))
        items.append(make_item(ir.Pointwise(out, made.outer, value, node.origin), position))
    return items


def _finished(node: ir.Contraction, value: Value) -> Value:
    """The sum with its scale and its addend."""
    if node.scale is not None:
        value = vs.call("mul", value, vs.cast(node.scale, value.dtype))
    return value if node.addend is None else vs.call("add", value, vs.cast(node.addend, value.dtype))


def is_product(group: Group) -> bool:
    """Whether a template computes the group."""
    return any(item.contracts for item in group.items)


def are_family(items: Sequence[Item]) -> bool:
    """Whether the products among the items can be one kernel with a joint epilogue: sums of products of one type, over the same
    loops, with an operand in common, of which none needs another one's result."""
    products = [item for item in items if item.contracts]
    sums = [item.node for item in products if isinstance(item.node, ir.Contraction)]
    if len(sums) < len(products) or len(products) > MAX_FAMILY or len({node.operands for node in sums}) > 1:
        return False
    made = {out for item in items for out in item.outs}
    if any(read.buffer in made for item in products for read in item.reads):
        return False
    return len({item.value for item in products}) == 1 or len({item.factors for item in products}) == 1


def is_partial(group: Group) -> bool:
    """Whether the group reduces the tiles of a product that it has not joined yet."""
    return all(item.is_partial for item in group.items) and bool(group.items)
