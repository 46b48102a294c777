"""Which contractions templates could compute."""

from __future__ import annotations

from kgen.ir import nodes as ir
from kgen.scheduler.options import Options
from kgen.templates import registry


def offered(graph: ir.Graph, options: Options) -> frozenset[str]:
    """First results of the contractions that some template could compute."""
    if not options.templates:
        return frozenset()
    outs = (ir.outs(n)[0] for n in graph.nodes if _offerable(n))
    return frozenset(out for out in outs if registry.every(options.device(graph, out).kind))


def offered_on_gpus(graph: ir.Graph, options: Options) -> frozenset[str]:
    """Those of them on GPUs, where the order in which a contraction is added up may depend on its tile."""
    if options.stable:
        return frozenset()
    return frozenset(out for out in offered(graph, options) if options.device(graph, out).kind == "cuda")


def _offerable(node: ir.Node) -> bool:
    if ir.is_contraction(node):
        return node.operands is not None
    return isinstance(node, ir.Operation) and bool(ir.outs(node))
