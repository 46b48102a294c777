"""Products that templates may compute: as what statements they are scheduled, from what operands, and which make a family."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.ir.nodes import Buffer, Origin
from kgen.scheduler.analysis.items import Group, Item, accumulators, make_item, product_item
from kgen.scheduler.transforms.full_row_tiles import whole_rows
from kgen.scheduler.transforms.operand_padding import from_memory, with_copies
from kgen.scheduler.transforms.output_split import cut as cut_pieces
from kgen.scheduler.transforms.output_split import pieces_of, reading
from kgen.scheduler.transforms.recompute import computed_twice
from kgen.scheduler.transforms.scale_hoisting import Scales
from kgen.scheduler.transforms.split_k import cut, finished
from kgen.scheduler.transforms.tile_partials import Tiles, tile_reductions
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import FusionDemand, Verdict


@dataclass(frozen=True, slots=True)
class Operands:
    """What templates may read. Without `prologues` that is what the library call would, without `scales` nothing leaves sums.
    `demands` are the user's."""

    demands: tuple[FusionDemand, ...] = ()
    prologues: bool = True
    scales: bool = True


def offer(
    graph: ir.Graph, taken: frozenset[str], tiles: Tiles, how: Operands
) -> tuple[list[ir.Node], dict[str, str], list[Verdict]]:
    """The graph's nodes with the contractions in `taken` (by result) left to templates, with reductions on the tiles of those,
    and without what nobody reads then; what of it has to be in which product's kernel, for it needs whole rows; and what
    became of scales of operands."""
    makers = {node.out: node for node in graph.nodes if isinstance(node, ir.Pointwise)}
    scales = Scales(graph, taken, how.demands, how.scales, tiles.capabilities)
    pieces = pieces_of(graph, taken, tiles)
    nodes: list[ir.Node] = []
    copied: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, ir.Pointwise):
            nodes.append(reading(graph, node, pieces))
            continue
        if not isinstance(node, ir.Product) or ir.outs(node)[0] not in taken:
            nodes.append(_from_memory(node) if isinstance(node, ir.Product) else node)
            continue
        if not how.prologues:
            node = _from_memory(node)
        elif isinstance(node, ir.Contraction):
            copies_of = from_memory(tiles.copies.get(node.out, ""))
            node, made = scales.without(_with_operands(graph, node, makers, copies_of, how.demands, tiles.capabilities))
            nodes += made
        joining: list[ir.Node] = []
        node = replace(node, vendor=None)
        if isinstance(node, ir.Contraction) and tiles.copies.get(node.out):
            node, copies = with_copies(graph, node, tiles.copies[node.out])
            nodes += [copy for copy in copies if copy.out not in copied]
            copied.update(copy.out for copy in copies)
        if isinstance(node, ir.Contraction) and tiles.cuts.get(node.out, 1) > 1:
            node, joining = cut(graph, node, tiles.cuts[node.out])
        own = [node]
        if isinstance(node, ir.Contraction) and node.out in pieces:
            own = [*cut_pieces(graph, node, pieces[node.out])]
        nodes += [*own, *joining]
        for one in own:
            _make_accumulators(graph, one)
    nodes, held = whole_rows(graph, computed_twice(graph, _needed(graph, nodes), tiles), tiles)
    return _needed(graph, tile_reductions(graph, nodes, tiles) if taken else nodes), held, scales.verdicts


def _make_accumulators(graph: ir.Graph, node: ir.Product) -> None:
    for out, name in zip(_results(node), accumulators(graph, node), strict=True):
        if out is not None:
            buffer = graph.buffers[out]
            graph.buffers[name] = Buffer(name, _kind(node, buffer), buffer.device, buffer.sizes, buffer.strides)


def _results(node: ir.Product) -> tuple[str | None, ...]:
    return (node.out,) if isinstance(node, ir.Contraction) else node.outs


def _kind(node: ir.Product, buffer: Buffer) -> torch.dtype:
    """The type of what a template computes."""
    if isinstance(node, ir.Contraction):
        assert node.operands is not None
        return ops.sum_dtype(node.operands)
    return ops.compute_dtype(buffer.dtype)


def _with_operands(
    graph: ir.Graph,
    node: ir.Contraction,
    makers: Mapping[str, ir.Pointwise],
    made_first: tuple[bool, bool],
    demands: tuple[FusionDemand, ...],
    capabilities: Capabilities,
) -> ir.Contraction:
    """Each operand computed tile by tile, which makes its operators the product's, or read from the buffer that the library
    call would read: as the user demands, as was chosen, or as templates say of what computing it costs. What other kernels
    write in slices is read."""
    operands, origin = [], node.origin
    for value, stored, first in zip((node.lhs, node.rhs), node.stored or (None, None), made_first, strict=True):
        maker = None if stored is None or stored is value else makers.get(vs.loads([stored])[0].attr[0])
        prologue = () if maker is None else maker.origin.operators
        asked = {d.wanted for d in demands if d.between(prologue, node.origin.operators)}
        there = first or (stored is not None and any(graph.buffers[load.attr[0]].parts for load in vs.loads([stored])))
        cheap = stored is None or capabilities.may(node.out, Request(prologue_cost=vs.total_cost([value])))
        computed = stored is None or True in asked or (cheap and not (asked or there))
        operands.append(value if computed or stored is None else stored)
        if computed and prologue:
            origin = Origin(prologue).joined(origin)
    return replace(node, lhs=operands[0], rhs=operands[1], origin=replace(origin, name=node.origin.name, line=node.origin.line))


def _from_memory(node: ir.Product) -> ir.Product:
    """With its operands read from where the library call would read them."""
    if not node.stored:
        return node
    if isinstance(node, ir.Contraction):
        return replace(node, lhs=node.stored[0], rhs=node.stored[1])
    return replace(node, operands=node.stored)


def _needed(graph: ir.Graph, nodes: list[ir.Node]) -> list[ir.Node]:
    """Without pointwise nodes that nobody reads."""
    read = ir.visible(graph)
    kept: list[ir.Node] = []
    for node in reversed(nodes):
        if isinstance(node, ir.Pointwise) and node.out not in read:
            continue
        read.update(ir.reads(node))
        kept.append(node)
    return kept[::-1]


def items_of(node: ir.Product, position: int, graph: ir.Graph) -> list[Item]:
    """What the template computes, and what turns that into the results."""
    made = product_item(graph, node, position)
    items = [made]
    for out, name in zip(_results(node), made.outs, strict=True):
        if out is None:
            continue
        value = vs.load(name, made.store, graph.buffers[name].dtype)
        if isinstance(node, ir.Contraction):
            value = finished(node, value)
        value = vs.cast(value, ops.compute_dtype(graph.buffers[out].dtype))
        items.append(make_item(ir.Pointwise(out, made.outer, value, node.origin), position))
    return items


def is_product(group: Group) -> bool:
    """Whether a template computes the group."""
    return any(item.contracts for item in group.items)


def are_family(items: Sequence[Item], capabilities: Capabilities) -> bool:
    """Whether the products among the items can be one kernel with a joint epilogue: sums of products of one type, over the same
    loops, with an operand in common, as many as a template makes."""
    products = [item for item in items if item.contracts]
    sums = [item.node for item in products if isinstance(item.node, ir.Contraction)]
    if len(sums) < len(products) or len({node.operands for node in sums}) > 1:
        return False
    if not capabilities.may(sums[0].out, Request(family=len(sums))):
        return False
    return len({item.value for item in products}) == 1 or len({item.factors for item in products}) == 1


def feeds_product(items: Iterable[Item]) -> bool:
    """Whether a product among the items needs what another item makes. That has no tile: even where both are at the same
    element, as those of a column that is multiplied by one number are, operands are read before anything is stored."""
    items = list(items)
    made = {out for item in items for out in item.outs}
    return any(read.buffer in made for item in items if item.contracts for read in item.reads)


def is_partial(group: Group) -> bool:
    """Whether the group reduces the tiles of a product that it has not joined yet."""
    return all(item.is_partial for item in group.items) and bool(group.items)
