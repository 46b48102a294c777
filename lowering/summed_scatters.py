"""Sums of what is added to zeros, along dimensions that the sum drops: the gradient of a gather from rows that were expanded.

    before   t = zeros(b, m, n);  t[i, j, at[i, j]] += x[i, j];   y[i, k] = sum over j of t[i, j, k]
    after    y = zeros(b, n);  y[i, at[i, j]] += x[i, j]

On a GPU additions have no order in either form. The table has m times the elements of its sum, and most of them stay zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var

# Additions to each element of the sum, on average, at most: they wait for each other.
MOST_ADDITIONS = 64
KINDS = (torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Chain:
    """Zeros, what is added to them, and the sum of that, by their places among the nodes; the table's dimensions that stay."""

    zeros: int
    scatter: int
    total: int
    kept: tuple[int, ...]


def add_to_sums(graph: ir.Graph, on_gpu: Callable[[torch.device], bool]) -> None:
    """Replaces such tables by their sums."""
    if not any(isinstance(node, ir.Scatter) and node.mode == "add" for node in graph.nodes):
        return
    makers = {out: number for number, node in enumerate(graph.nodes) for out in ir.outs(node)}
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(graph.nodes):
        for name in ir.reads(node):
            readers.setdefault(name, []).append(number)
    dropped: set[int] = set()
    for number, node in enumerate(graph.nodes):
        found = _chain(graph, number, makers, readers)
        if isinstance(node, ir.Scatter) and found is not None and on_gpu(graph.buffers[node.out].device):
            _join(graph, found)
            dropped.add(found.total)
    graph.nodes = [node for number, node in enumerate(graph.nodes) if number not in dropped]


def _chain(graph: ir.Graph, number: int, makers: dict[str, int], readers: dict[str, list[int]]) -> _Chain | None:
    scatter = graph.nodes[number]
    if not isinstance(scatter, ir.Scatter) or scatter.mode != "add" or scatter.target not in makers:
        return None
    zeros, after = makers[scatter.target], readers.get(scatter.out, [])
    alone = readers.get(scatter.target) == [number] and len(after) == 1 and ir.is_hidden_table(graph, scatter)
    if not alone or not _is_zero(graph.nodes[zeros]):
        return None
    kept = _kept(graph, scatter, graph.nodes[after[0]])
    return None if kept is None else _Chain(zeros, number, after[0], kept)


def _is_zero(node: ir.Node) -> bool:
    return isinstance(node, ir.Pointwise) and node.value.op == "const" and node.value.attr == 0


def _kept(graph: ir.Graph, scatter: ir.Scatter, total: ir.Node) -> tuple[int, ...] | None:
    """The table's dimension for each of the sum's; None where the sum is of something else, or indices from data would no
    longer be checked."""
    table = graph.buffers[scatter.out]
    if not isinstance(total, ir.Reduction) or total.op != "sum" or table.dtype not in KINDS:
        return None
    value = total.value
    if value.op != "load" or value.args or value.attr[0] != scatter.out or graph.buffers[total.outs[0]].dtype != table.dtype:
        return None
    place = {atom: k for k, e in enumerate(value.attr[1]) if (atom := e.atom()) is not None}
    loops = (*total.vars, *total.rvars)
    if len(place) != len(loops) or any(v not in place or v.extent != table.sizes[place[v]] for v in loops):
        return None
    known = all(not ix.indirects(scatter.index[place[v]]) for v in total.rvars)
    few = 0 < _count(scatter.vars) <= MOST_ADDITIONS * _count(total.vars)
    return tuple(place[v] for v in total.vars) if known and few else None


def _count(loops: Sequence[Var]) -> int:
    """The points of loops; 0 where a number is not known."""
    return math.prod(v.extent.as_int() or 0 for v in loops)


def _join(graph: ir.Graph, found: _Chain) -> None:
    scatter, total = graph.nodes[found.scatter], graph.nodes[found.total]
    assert isinstance(scatter, ir.Scatter)
    assert isinstance(total, ir.Reduction)
    [out] = total.outs
    old, table = graph.buffers[out], graph.buffers.pop(scatter.out)
    del graph.buffers[scatter.target]
    whole = replace(old, strides=old.strides or ir.dense_strides(old))
    zeros = ir.fresh(graph, f"{out}_zeros")
    graph.buffers[zeros] = replace(whole, name=zeros)
    graph.buffers[out] = replace(whole, alias_of=zeros)
    kind = vs.const(0, table.dtype)
    graph.nodes[found.zeros] = ir.Pointwise(zeros, total.vars, kind, scatter.origin)
    index = tuple(scatter.index[k] for k in found.kept)
    origin = scatter.origin.joined(total.origin)
    graph.nodes[found.scatter] = replace(scatter, out=out, target=zeros, index=index, origin=origin)
