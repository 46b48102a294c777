"""Additions at indices from data that meet on few lines of a GPU's memory go to copies of the table.

Programs that add to one line wait for each other: 25 million additions to a table of 32x12 numbers took 14.4 ms of an H200, to
128 copies of it .4; 12.6 million to rows of 768 numbers in one place 172 us, to 64 copies 35 (2026-11-26). The rows that are
added go to the copies in turn, and a reduction adds these up.

    t = zeros(32, 12);  t[i[r], c] += x[r, c]
    s = zeros(64, 32, 12);  s[r % 64, i[r], c] += x[r, c];  t = sum over k of s[k]
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kgen.cost.atomics import MOST_LINES, lines_of, meeting_seconds
from kgen.device import LINE
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.protocol import Draft, Transform

# Seconds that copies cost: they are filled, and added up.
WORTH = 20e-6
MOST_COPIES = 128
# Additions to each element of each copy: what fills and sums these has less to do.
ADDED = 16
_COPIES, _FILLED = "copies", "filled copies"


class ScatterCopies(Transform):
    """Has additions to tables of zeros go to copies, where no program of contractions has taken them."""

    name = "scatter copies"

    def apply(self, draft: Draft) -> None:
        graph = draft.graph
        nodes: list[ir.Node] = []
        zeros: set[str] = set()
        gone: set[str] = set()
        for node in draft.nodes:
            if isinstance(node, ir.Pointwise) and node.value.op == "const" and not node.value.attr:
                zeros.add(node.out)
            if isinstance(node, ir.Scatter) and node.mode == "add" and node.target in zeros:
                copies = copies_of(node, graph)
                if copies > 1 and _may_be_copied(node, draft):
                    gone.add(node.target)
                    nodes += _in_copies(node, graph, copies)
                    continue
            nodes.append(node)
        draft.nodes = [node for node in nodes if gone.isdisjoint(ir.outs(node))]


def _may_be_copied(node: ir.Scatter, draft: Draft) -> bool:
    """Whether nobody else sees the table, and a GPU adds to it."""
    graph, table, made = draft.graph, node.target, draft.graph.buffers[node.out]
    if made.dtype is torch.bool or made.parts or made.is_part or made.offset != 0:
        return False
    if draft.options.device(graph, node.out).kind != "cuda":
        return False
    shared = [b.name for b in graph.buffers.values() if b.alias_of in (table, node.out)]
    readers = [other for other in draft.nodes if table in reads_of(other)]
    seen = {o.buffer for o in graph.outputs if isinstance(o, ir.TensorArg)}
    return shared == [node.out] and readers == [node] and table not in seen


def copies_of(node: ir.Scatter, graph: ir.Graph) -> int:
    """How many copies of its table share what a node adds; 1 where sizes are known at run time only."""
    table = graph.buffers[node.target]
    added, elements = (ix.product(sizes).as_int() for sizes in ([v.extent for v in node.vars], table.sizes))
    if not added or not elements or not _rows(node):
        return 1
    lines = lines_of(elements * table.dtype.itemsize)
    together = min(_row_length(node), LINE // table.dtype.itemsize)
    if meeting_seconds(added / together, lines) < WORTH:
        return 1
    wanted = min(2 * MOST_LINES // lines, MOST_COPIES, added // (ADDED * elements))
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


def _row_length(node: ir.Scatter) -> int:
    """How many neighbours the innermost loops walk over: the last loops index the last dimensions."""
    length = 1
    for loop, at in zip(reversed(node.vars), reversed(node.index), strict=False):
        if at != loop.expr():
            break
        length *= loop.extent.as_int() or 1
    return length


def _rows(node: ir.Scatter) -> list[Var]:
    """The loops that are no index themselves: points of these may meet."""
    own = set(node.index)
    return [v for v in node.vars if v.expr() not in own and v.extent != 1]


def _in_copies(node: ir.Scatter, graph: ir.Graph, copies: int) -> list[ir.Node]:
    """What fills the copies, adds to them, and adds them up."""
    table = graph.buffers[node.out]
    sizes = (ix.constant(copies), *table.sizes)
    strides = tuple(ix.contiguous_strides(sizes))
    zeros, filled = (ir.derived(graph, ir.Derived(node.out, role)) for role in (_COPIES, _FILLED))
    graph.buffers[zeros] = ir.Buffer(zeros, table.dtype, table.device, sizes, strides)
    graph.buffers[filled] = replace(graph.buffers[zeros], name=filled, alias_of=zeros)
    graph.buffers[node.out] = replace(table, alias_of=None)
    row = ix.ZERO
    for v in _rows(node):
        row = row * v.extent + v.expr()
    loops = tuple(ix.var(f"d{k}", size) for k, size in enumerate(sizes))
    copy, *rest = loops
    summed = vs.load(filled, [v.expr() for v in loops], table.dtype)
    zero = vs.const(0, vs.cast(node.value, table.dtype).dtype)
    return [
        ir.Pointwise(zeros, loops, zero, node.origin),
        replace(node, out=filled, target=zeros, index=(ix.mod(row, copies), *node.index)),
        ir.Reduction((node.out,), tuple(rest), (copy,), "sum", summed, node.origin),
    ]
