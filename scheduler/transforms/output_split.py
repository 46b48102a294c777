"""Products of which one consumer reads several pieces at once, as gated units read halves:

    c = x w;  y = silu(c[:, :n]) * c[:, n:]        becomes        y = silu(x w[:, :n]) * (x w[:, n:])

Element by element the consumer reads other places than a tile of the product holds. Of the pieces as products of their own it
reads one place each, and they have an operand in common, so that they are a family: one kernel with a joint epilogue, and the
product is never stored. What nobody reads of it is not computed.

The graph is rewritten before fusion. It is all or nothing: where fusion leaves a piece in memory, or the library is faster, the
graph is scheduled anew with the product whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Atom, Expr
from kgen.ir.plan import Kernel, Schedule, members
from kgen.ir.values import Value
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import product_of
from kgen.scheduler.transforms.accumulators import make_accumulators
from kgen.scheduler.transforms.recompute import recomputed
from kgen.scheduler.transforms.split_k import PIECE, parts_by_result, whole_of
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import Outcome, Reason, Verdict

OUTPUT_SPLIT = "output split"


def piece_of(graph: ir.Graph, product: str, number: int) -> str:
    return ir.derived(graph, ir.Derived(product, PIECE, number))


@dataclass(frozen=True, slots=True)
class Pieces:
    """Runs of equal length along a dimension of a product, by where they begin."""

    dimension: int
    starts: tuple[int, ...]
    length: int

    def number(self, place: Expr) -> int:
        """The piece in which an index along the dimension lies."""
        low = ix.lower_bound(place)
        return next(k for k, start in enumerate(self.starts) if start <= low < start + self.length)


class OutputSplit(Transform):
    """Computes a contraction's pieces, which one consumer reads together, as contractions of one kernel."""

    name = OUTPUT_SPLIT

    def apply(self, draft: Draft) -> None:
        pieces = pieces_of(draft)
        if not pieces:
            return
        nodes: list[ir.Node] = []
        for node in draft.nodes:
            if ir.is_contraction(node) and node.out in pieces:
                own = cut(draft.graph, node, pieces[node.out])
                for one in own:
                    make_accumulators(draft.graph, one)
                nodes += own
            else:
                nodes.append(reading(draft.graph, node, pieces) if isinstance(node, ir.Pointwise) else node)
        draft.nodes = nodes

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        made = _kernels(attempt.plan).items()
        apart = [product for product, found in made if any(kept or kernel is not found[0][0] for kernel, kept in found)]
        return {Candidate(self.name, product): _refusal(attempt.plan, product) for product in apart}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        out = product_of(kernel)
        product = whole_of(attempt.graph, out)
        if isinstance(chosen, Kernel) or product == out:
            return {}
        return {Candidate(self.name, product): replace(chosen, producer=product, outcome=Outcome.UNPROFITABLE)}

    def report(self, attempt: Attempt) -> list[Verdict]:
        return [
            Verdict(product, found[0][0].statements[-1].outs[0], Outcome.FUSED, Reason.PIECES)
            for product, found in _kernels(attempt.plan).items()
        ]


def pieces_of(draft: Draft) -> dict[str, Pieces]:
    """Those of the contractions that templates compute which are read in pieces, as many as a template makes in one kernel, and
    only so, some of these together."""
    graph, decisions = draft.graph, draft.decisions
    capabilities = draft.options.capabilities(graph)
    cuts, again = parts_by_result(decisions), recomputed(decisions)
    candidates = {
        node.out: node for node in draft.before
        if ir.is_contraction(node) and node.out in draft.taken and decisions.is_open(OUTPUT_SPLIT, node.out)
        and cuts.get(node.out, 1) == 1 and node.out not in again and graph.buffers[node.out].alias_of is None
    }  # fmt: skip
    kept = ir.visible(graph)
    reads: dict[str, list[list[Value]]] = {}
    for node in draft.before:
        if isinstance(node, ir.Pointwise):
            for out in set(ir.reads(node)) & candidates.keys():
                reads.setdefault(out, []).append([load for load in vs.loads([node.value]) if load.attr[0] == out])
        else:
            kept.update(ir.reads(node))
    found = {out: _pieces(candidates[out], loads, capabilities) for out, loads in reads.items() if out not in kept}
    return {out: pieces for out, pieces in found.items() if pieces is not None}


def _pieces(node: ir.Contraction, readers: Sequence[Sequence[Value]], capabilities: Capabilities) -> Pieces | None:
    left, right = node.lhs.variables(), node.rhs.variables()
    for k, v in enumerate(node.out_vars):
        length = v.extent.as_int()
        if length is None or (v in left) == (v in right):
            continue
        found = _along(length, [[load.attr[1][k] for load in loads] for loads in readers])
        if found is not None and capabilities.may(node.out, Request(family=len(found[0]))):
            return Pieces(k, *found)
    return None


def _along(length: int, readers: Sequence[Sequence[Expr]]) -> tuple[tuple[int, ...], int] | None:
    """Where pieces begin along a dimension, and how long they are, by the indices of each reader."""
    ranges: list[tuple[int, int]] = []
    for place in {place for places in readers for place in places}:
        low, high = place.bounds()
        if low < 0 or high >= length or any(isinstance(a, ix.Indirect) for a in ix.free_atoms(place)):
            return None
        ranges.append((low, high))
    pieces: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if pieces and low <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], max(high, pieces[-1][1]))
        else:
            pieces.append((low, high))
    lengths = {high - low + 1 for low, high in pieces}
    if len(pieces) < 2 or len(lengths) > 1:
        return None
    together = max(sum(any(low <= ix.lower_bound(p) <= high for p in places) for low, high in pieces) for places in readers)
    return (tuple(low for low, _ in pieces), lengths.pop()) if together > 1 else None


def cut(graph: ir.Graph, node: ir.Contraction, pieces: Pieces) -> list[ir.Contraction]:
    """The product's pieces as products. Their buffers are added to the graph."""
    k = pieces.dimension
    whole = node.out_vars[k]
    own = ix.var(whole.name, pieces.length)
    loops = (*node.out_vars[:k], own, *node.out_vars[k + 1 :])
    buffer = graph.buffers[node.out]
    sizes = tuple(v.extent for v in loops)
    made: list[ir.Contraction] = []
    for number, start in enumerate(pieces.starts):
        name = piece_of(graph, node.out, number)
        graph.buffers[name] = ir.Buffer(name, buffer.dtype, buffer.device, sizes, ix.contiguous_strides(sizes))
        moved: dict[Atom, Expr] = {whole: own.expr() + start}
        lhs, rhs, scale, addend = (
            None if value is None else vs.substitute(value, moved)
            for value in (node.lhs, node.rhs, node.scale, node.addend)
        )  # fmt: skip
        assert lhs is not None
        assert rhs is not None
        made.append(replace(
            node, out=name, out_vars=loops, lhs=lhs, rhs=rhs, scale=scale, addend=addend, vendor=None, stored=(), fused=None
        ))  # fmt: skip
    return made


def reading(graph: ir.Graph, node: ir.Pointwise, found: dict[str, Pieces]) -> ir.Pointwise:
    """The node with loads of pieces instead of the products'."""

    def of_piece(load: Value) -> Value | None:
        name, index, dtype = load.attr
        pieces = found.get(name)
        if pieces is None:
            return None
        k = pieces.dimension
        number = pieces.number(index[k])
        moved = (*index[:k], index[k] - pieces.starts[number], *index[k + 1 :])
        return vs.load(piece_of(graph, name, number), moved, dtype, *load.args)

    [value] = vs.replace_loads([node.value], of_piece)
    return node if value is node.value else replace(node, value=value)


def _kernels(plan: Schedule) -> dict[str, list[tuple[Kernel, bool]]]:
    """By product, the kernels that make its pieces, and whether they store them."""
    found: dict[str, list[tuple[Kernel, bool]]] = {}
    for kernel in (one for step in plan.kernels for one in members(step)):
        for s in kernel.statements:
            for out, kept in zip(s.outs, s.stored, strict=True):
                if (product := whole_of(plan.graph, out)) != out:
                    found.setdefault(product, []).append((kernel, kept))
    return found


def _refusal(plan: Schedule, product: str) -> Verdict:
    """Why fusion kept pieces apart."""
    refused = (Outcome.ILLEGAL, Outcome.UNPROFITABLE)
    found = [v for v in plan.verdicts if v.outcome in refused and product in (v.producer, v.consumer)]
    return Verdict(product, "", Outcome.ILLEGAL, found[-1].reason if found else Reason.INDEX_MISMATCH, detail="its pieces")
