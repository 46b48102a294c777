"""The buffers of what templates compute before it is scaled and rounded: they live in registers only."""

from __future__ import annotations

import torch

from kgen.ir import nodes as ir
from kgen.ir import ops
from kgen.ir.nodes import Buffer
from kgen.scheduler.analysis.items import accumulators


def make_accumulators(graph: ir.Graph, node: ir.TemplateNode) -> None:
    """Adds the buffers of what a template computes, before it is scaled and rounded, to the graph."""
    for number, (out, name) in enumerate(zip(ir.results(node), accumulators(graph, node), strict=True)):
        buffer = graph.buffers[ir.outs(node)[0] if out is None else out]  # all results are over the same axes
        graph.buffers[name] = Buffer(name, _kind(node, number, buffer), buffer.device, buffer.sizes, buffer.strides)


def _kind(node: ir.TemplateNode, number: int, buffer: Buffer) -> torch.dtype:
    """The type of what a template computes."""
    if ir.is_contraction(node):
        assert node.operands is not None
        return ops.sum_dtype(node.operands)
    return ops.compute_dtype(node.kinds[number] if node.kinds else buffer.dtype)
