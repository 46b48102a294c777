"""The strides that results of a graph have when it is called."""

from __future__ import annotations

from typing import Any

from kgen.ir import index as ix
from kgen.ir import nodes as ir

__all__ = ["strides_of_results"]

Strides = tuple[tuple[Any, ...] | None, ...]


def strides_of_results(graph: ir.Graph, traced: Strides) -> Strides:
    """`traced` has the strides that tracing computed for each result, None for what is no tensor. Elements that share memory in
    eager have places of their own here (`kgen/lowering/results.py`), so backward gets such a tensor with other strides."""
    return tuple(_found(graph, item, strides) for item, strides in zip(graph.outputs, traced, strict=True))


def _found(graph: ir.Graph, item: Any, traced: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """Symbolic strides stay as traced, and those of dimensions of length 1, which no address depends on."""
    if traced is None or not isinstance(item, ir.TensorArg) or not all(isinstance(s, int) for s in traced):
        return traced
    buffer = graph.buffers[item.buffer]
    linear = ix.linearize(item.index, ir.dense_strides(buffer))
    strides = [ix.stride_of(linear, v) for v in item.vars]
    known = [None if s is None else s.as_int() for s in strides]
    return tuple(old if new is None or v.extent == 1 else new for v, old, new in zip(item.vars, traced, known, strict=True))
