"""Which contractions templates could compute."""

from __future__ import annotations

from kgen.ir import nodes as ir
from kgen.scheduler.options import Options
from kgen.templates import registry
from kgen.templates.base import Request


def offered(graph: ir.Graph, options: Options) -> frozenset[str]:
    """First results of the contractions that some template could compute."""
    if not options.templates:
        return frozenset()
    outs = (ir.outs(n)[0] for n in graph.nodes if _offerable(n))
    return frozenset(out for out in outs if registry.every(options.device(graph, out).kind))


def offered_for_rows(graph: ir.Graph, options: Options) -> frozenset[str]:
    """Those of them whose tiles may hold full rows: the order in which a row is added up there depends on the tile."""
    if options.stable:
        return frozenset()
    capabilities = options.capabilities(graph)
    return frozenset(out for out in offered(graph, options) if capabilities.may(out, Request(full_row=1)))


def _offerable(node: ir.Node) -> bool:
    if ir.is_contraction(node):
        return node.operands is not None
    return ir.is_template_node(node) and bool(ir.outs(node))
