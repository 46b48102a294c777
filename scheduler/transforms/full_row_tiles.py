"""Rows of a matmul that are reduced and read again, as a softmax or a normalisation does, in the matmul's own kernel: where a
tile holds full rows, a reduction of them is complete at once, and what needs it reads the tile's elements a second time in
registers. The matmul is never stored.

Like partial reductions (tile partials) these are written before fusion: each reduction as a `Partial` of one part,
and a point for each row that has its result. It is all or nothing. Where fusion leaves something that needs both the rows and
their reductions in another kernel, or no template has a tile as long, the matmul would be stored and read again anyway: then
the graph is scheduled anew with its rows apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Schedule, members
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.transforms.tile_partials import FULL_ROWS, Search, Tiles, Traced, parts_of, tiles_of
from kgen.templates.base import Request
from kgen.verdict import Outcome, Reason, Verdict


class FullRowTiles(Transform):
    """Keeps rows that are reduced and read again in the tiles of their contraction."""

    name = FULL_ROWS

    def apply(self, draft: Draft) -> None:
        if draft.taken:
            draft.nodes, full_row_buffers = with_full_rows(draft.graph, draft.nodes, tiles_of(draft))
            draft.full_row_buffers |= full_row_buffers

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        found = rows_apart(attempt.plan, attempt.draft.full_row_buffers)
        return {Candidate(self.name, matmul): verdict for matmul, verdict in found.items()}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        if isinstance(chosen, Kernel):
            return {}
        rows = rows_in(kernel, attempt.draft.full_row_buffers)
        return {Candidate(self.name, matmul): _not_whole(matmul, chosen) for matmul in rows}

    def unmeasured(self, candidate: Candidate, verdict: Verdict) -> Iterable[str]:
        return (candidate.target,)


def _not_whole(matmul: str, chosen: Verdict) -> Verdict:
    """The refusal of full rows, where a template without them may still be better than the library."""
    if chosen.reason is Reason.NO_TEMPLATE:
        return Verdict(matmul, "", Outcome.ILLEGAL, Reason.NOT_WHOLE, detail=chosen.detail)
    return replace(chosen, producer=matmul, outcome=Outcome.UNPROFITABLE)


@dataclass(frozen=True, slots=True)
class Row:
    """A buffer with an element for each row of a matmul, made of these reductions of it, by their first results, each along
    one of the matmul's dimensions."""

    matmul: str
    reductions: frozenset[tuple[str, int]]


def with_full_rows(graph: ir.Graph, nodes: list[ir.Node], tiles: Tiles) -> tuple[list[ir.Node], dict[str, str]]:
    """The nodes with such reductions written for whole tiles, and what has to be in the kernel of which matmul then, by
    buffers. Buffers are added to the graph."""
    search = _Rows(graph, tiles, nodes)
    needed = {(one.matmul, along) for one in search.readers.values() for _, along in one.reductions}
    full_row_buffers = {out: one.matmul for out, one in search.readers.items()}
    full_row_buffers |= {
        out: row.matmul for out, row in search.rows.items() if all((row.matmul, along) in needed for _, along in row.reductions)
    }
    made: list[ir.Node] = []
    for node in nodes:
        if isinstance(node, ir.Reduction) and node.outs[0] in full_row_buffers:
            partial, *points = _of_tiles(graph, node)
            full_row_buffers |= dict.fromkeys(ir.outs(partial), full_row_buffers[node.outs[0]])
            made += [partial, *points]
        else:
            made.append(node)
    return made, full_row_buffers


def _of_tiles(graph: ir.Graph, node: ir.Reduction) -> list[ir.Node]:
    """The reduction of a tile's rows, and its results."""
    length = ix.product(v.extent for v in node.rvars).as_int()
    assert length is not None
    row = tuple(v.expr() for v in node.vars)
    sizes = (ix.ONE, *(v.extent for v in node.vars))
    names = parts_of(graph, node)
    found: list[ir.Node] = [
        ir.Partial(names, node.vars, node.rvars, node.op, node.value, length, True, node.origin, whole=True)
    ]
    for k, (out, name) in enumerate(zip(node.outs, names, strict=True)):
        kind = torch.int64 if k and node.op in ("argmax", "argmin") else node.value.dtype
        graph.buffers[name] = ir.Buffer(name, kind, graph.buffers[out].device, sizes, ix.contiguous_strides(sizes))
        found.append(ir.Pointwise(out, node.vars, vs.load(name, (ix.ZERO, *row), kind), node.origin))
    return found


class _Rows(Search):
    """Follows the elements of matmuls through reductions of their rows."""

    def __init__(self, graph: ir.Graph, tiles: Tiles, nodes: list[ir.Node]) -> None:
        self.rows: dict[str, Row] = {}
        self.readers: dict[str, Row] = {}  # elements of a matmul's tile that need reductions of their row
        super().__init__(graph, tiles, nodes)

    def visit(self, node: ir.Node) -> None:
        if ir.is_contraction(node) and node.vendor is None:
            self._matmul(node)
            return
        reads = reads_of(node)
        after = frozenset().union(*(self.after.get(name, ()) for name in reads))
        row = self._row(node, after)
        if row is not None:
            self.rows |= dict.fromkeys(ir.outs(node), row)
        elif isinstance(node, ir.Pointwise):
            self._points(node, after)
        else:
            after |= {self.traced[name].matmul for name in reads if name in self.traced}
            after |= {self.rows[name].matmul for name in reads if name in self.rows}
        self.after |= dict.fromkeys(ir.outs(node), after)

    def _points(self, node: ir.Pointwise, after: frozenset[str]) -> None:
        """Elements of a tile, or of its rows."""
        place = self._place(node.value)
        row = self._rows_read(node.value)
        matmuls = set() if row is None else {row.matmul}
        if place is not None and place[0] not in after and matmuls <= {place[0]}:
            self.traced[node.out] = Traced(*place, node.vars)
            if row is not None:
                self.readers[node.out] = row
        elif place is None and row is not None and row.matmul not in after and self._one_each(node):
            self.rows[node.out] = row

    def _row(self, node: ir.Node, after: frozenset[str]) -> Row | None:
        """What a reduction of full rows makes, where their length is known and some template's tile may hold them."""
        if not isinstance(node, ir.Reduction):
            return None
        place, rows = self._place(node.value), self._rows_read(node.value)
        if place is None or place[0] not in self.tiles.rows or place[0] in after:
            return None
        if rows is not None and rows.matmul != place[0]:
            return None
        if any(isinstance(a, ix.Indirect) for e in place[1] for a in ix.free_atoms(e)):
            return None
        loops = self._along(*place, node)
        length = ix.product(v.extent for v in node.rvars).as_int()
        if not loops or not length or any(v not in loops and v.extent != 1 for v in node.rvars):
            return None
        if not self.tiles.capabilities.may(place[0], Request(full_row=length, reduction=node.op)):
            return None
        along = next(k for k, e in enumerate(place[1]) if any(v in ix.free_atoms(e) for v in loops))
        return Row(place[0], frozenset({(node.outs[0], along)}) | (frozenset() if rows is None else rows.reductions))

    def _rows_read(self, value: vs.Value) -> Row | None:
        """The reduced rows that a value reads, as one; those of several matmuls count as those of none of them."""
        read = [self.rows[load.attr[0]] for load in vs.loads([value]) if load.attr[0] in self.rows]
        if not read:
            return None
        matmuls = {row.matmul for row in read}
        return Row(matmuls.pop() if len(matmuls) == 1 else "", frozenset().union(*(row.reductions for row in read)))

    def _one_each(self, node: ir.Pointwise) -> bool:
        """Whether there is one point for each row."""
        loops = {v for v in node.vars if v.extent != 1}
        read = (load for load in vs.loads([node.value]) if load.attr[0] in self.rows)
        return all(loops <= {a for e in load.attr[1] for a in ix.free_atoms(e)} for load in read)


def rows_in(kernel: Kernel, full_row_buffers: Mapping[str, str]) -> set[str]:
    """The matmuls whose rows the kernel reduces and reads again."""
    return {full_row_buffers[out] for s in kernel.statements for out in s.outs if out in full_row_buffers}


def rows_apart(plan: Schedule, full_row_buffers: Mapping[str, str]) -> dict[str, Verdict]:
    """Matmuls whose rows fusion has not kept in their own kernels."""
    found: dict[str, Verdict] = {}
    for kernel in (one for step in plan.kernels for one in members(step)):
        made = {out for s in kernel.statements for out in s.outs}
        for matmul in rows_in(kernel, full_row_buffers) - made:
            found[matmul] = _refusal(plan, kernel, matmul)
    return found


def _refusal(plan: Schedule, kernel: Kernel, matmul: str) -> Verdict:
    """Why fusion kept a kernel apart from a matmul."""
    names = {origin.name for origin in kernel.origins}
    refused = (Outcome.ILLEGAL, Outcome.UNPROFITABLE)
    found = [v for v in plan.verdicts if v.outcome in refused and names & {v.producer, v.consumer}]
    return found[-1] if found else Verdict(matmul, kernel.name, Outcome.ILLEGAL, Reason.NOT_WHOLE)
