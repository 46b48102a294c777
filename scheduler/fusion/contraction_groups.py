"""Groups around contractions: the items that one is scheduled as, and which items may share its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir import values as vs
from kgen.scheduler.analysis.items import Group, Item, finished, make_item, template_item
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities


def items_of(node: ir.TemplateNode, position: float, graph: ir.Graph) -> list[Item]:
    """What the template computes, and what turns that into the results."""
    made = template_item(graph, node, position)
    items = [made]
    for out, name in zip(ir.results(node), made.outs, strict=True):
        if out is None:
            continue
        value = vs.load(name, made.store, graph.buffers[name].dtype)
        if ir.is_contraction(node):
            value = finished(node, value)
        value = vs.cast(value, ops.compute_dtype(graph.buffers[out].dtype))
        items.append(make_item(ir.Pointwise(out, made.outer, value, node.origin), position))
    return items if ir.is_contraction(node) else [*items, *(_second(one, node, position) for one in node.seconds)]


def _second(one: ir.Second, node: ir.Operation, position: float) -> Item:
    """The item of a second result: points of one row store one number."""
    stored = ir.Pointwise(one.out, node.out_vars, one.value, node.origin)
    return Item(stored, position, node.out_vars, (), one.value, one.index, in_order=False, second=True)


def has_contraction(group: Group) -> bool:
    """Whether a template computes the group."""
    return group.members.contracts


def are_family(items: Sequence[Item], capabilities: Capabilities) -> bool:
    """Whether the contractions among the items can be one kernel with a joint epilogue: sums of products of one type, over the
    same loops, with an operand in common, as many as a template makes."""
    contractions = [item for item in items if item.contracts]
    sums = [item.node for item in contractions if ir.is_contraction(item.node)]
    if not sums:
        return _are_family_of_calls(contractions, capabilities)
    if len(sums) < len(contractions) or len({node.operands for node in sums}) > 1:
        return False
    if not capabilities.may(sums[0].out, Request(family=len(sums))):
        return False
    return len({item.value for item in contractions}) == 1 or len({item.factors for item in contractions}) == 1


def _are_family_of_calls(items: Sequence[Item], capabilities: Capabilities) -> bool:
    """The same of calls of one operator with equal arguments: all their operands but one are in common, the one of which a
    template of the operator takes several."""
    calls = [item.node for item in items if isinstance(item.node, ir.Operation)]
    kinds = {(node.operator, node.arguments, node.dtypes, item.axes) for node, item in zip(calls, items, strict=True)}
    apart = [k for k, values in enumerate(zip(*((i.value, *i.factors) for i in items), strict=False)) if len(set(values)) > 1]
    if len(kinds) > 1 or len(apart) > 1 or any(node.program is not None for node in calls):
        return False
    first = calls[0]
    families = capabilities.families(ir.outs(first)[0], first.operator, tuple(axis for axis, _ in first.axes))
    return any(len(items) <= most and apart in ([], [k]) for k, most in families)


def feeds_contraction(items: Iterable[Item]) -> bool:
    """Whether a contraction among the items needs what another item makes. That has no tile: even where both are at the same
    element, as those of a column that is multiplied by one number are, operands are read before anything is stored."""
    items = list(items)
    made = {out for item in items for out in item.outs}
    return any(read.buffer in made for item in items if item.contracts for read in item.reads)


def is_partial(group: Group) -> bool:
    """Whether the group reduces the tiles of a contraction that it has not joined yet."""
    return group.members.is_partial
