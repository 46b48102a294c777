"""Decides the strides of buffers whose layout is still flexible."""

from __future__ import annotations

from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir.index import Expr


def freeze_layouts(graph: ir.Graph) -> None:
    """Gives every flexible buffer a dense layout in the order its hint prefers (eager's order)."""
    for name, buffer in graph.buffers.items():
        if buffer.strides is None:
            graph.buffers[name] = replace(buffer, strides=_dense(buffer))


def _dense(buffer: ir.Buffer) -> ir.Sizes:
    order = buffer.hint or tuple(range(len(buffer.sizes)))
    strides: list[Expr] = [ix.ONE] * len(order)
    total = ix.ONE
    for k in reversed(order):
        strides[k] = total
        total = total * (ix.ONE if buffer.sizes[k] == 0 else buffer.sizes[k])
    return tuple(strides)
