"""Matmuls of which one consumer reads several parts at once, as gated units read halves:

    c = x w;  y = silu(c[:, :n]) * c[:, n:]        becomes        y = silu(x w[:, :n]) * (x w[:, n:])

Element by element the consumer reads other places than a tile of the matmul holds. Of the parts as matmuls of their own it
reads one place each, and they have an operand in common, so that they are a family: one kernel with a common epilogue, and the
matmul is never stored. What nobody reads of it is not computed.

The graph is rewritten before fusion. It is all or nothing: where fusion leaves a part in memory, or the library is faster, the
graph is scheduled anew with the matmul whole.
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
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of
from kgen.scheduler.transforms.accumulators import make_accumulators
from kgen.scheduler.transforms.recompute import recomputed
from kgen.scheduler.transforms.split_k import SPLIT_OUTPUT, parts_by_result, whole_of
from kgen.templates.base import Request
from kgen.templates.capabilities import Capabilities
from kgen.verdict import Outcome, Reason, Verdict

OUTPUT_SPLIT = "output split"


def split_output(graph: ir.Graph, matmul: str, number: int) -> str:
    return ir.derived(graph, ir.Derived(matmul, SPLIT_OUTPUT, number))


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of equal length along a dimension of a matmul, by where they begin."""

    dimension: int
    starts: tuple[int, ...]
    length: int

    def number(self, place: Expr) -> int:
        """The part that has an index along the dimension."""
        low = ix.lower_bound(place)
        return next(k for k, start in enumerate(self.starts) if start <= low < start + self.length)


class OutputSplit(Transform):
    """Computes a contraction's parts, which one consumer reads together, as contractions of one kernel."""

    name = OUTPUT_SPLIT

    def apply(self, draft: Draft) -> None:
        runs = runs_of(draft)
        if not runs:
            return
        nodes: list[ir.Node] = []
        for node in draft.nodes:
            if ir.is_contraction(node) and node.out in runs:
                own = cut(draft.graph, node, runs[node.out])
                for one in own:
                    make_accumulators(draft.graph, one)
                nodes += own
            else:
                nodes.append(reading(draft.graph, node, runs) if isinstance(node, ir.Pointwise) else node)
        draft.nodes = nodes

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        made = _kernels(attempt.plan).items()
        apart = [matmul for matmul, found in made if any(kept or kernel is not found[0][0] for kernel, kept in found)]
        return {Candidate(self.name, matmul): _refusal(attempt.plan, matmul) for matmul in apart}

    def objections(self, kernel: Kernel, chosen: Kernel | Verdict, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        out = contraction_of(kernel)
        matmul = whole_of(attempt.graph, out)
        if isinstance(chosen, Kernel) or matmul == out:
            return {}
        return {Candidate(self.name, matmul): replace(chosen, producer=matmul, outcome=Outcome.UNPROFITABLE)}

    def report(self, attempt: Attempt) -> list[Verdict]:
        return [
            Verdict(matmul, found[0][0].statements[-1].outs[0], Outcome.FUSED, Reason.OUTPUT_SPLIT)
            for matmul, found in _kernels(attempt.plan).items()
        ]


def runs_of(draft: Draft) -> dict[str, Runs]:
    """Those of the contractions that templates compute which are read in parts, as many as a template makes in one kernel, and
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
            for out in set(reads_of(node)) & candidates.keys():
                reads.setdefault(out, []).append([load for load in vs.loads([node.value]) if load.attr[0] == out])
        else:
            kept.update(reads_of(node))
    found = {out: _runs(candidates[out], loads, capabilities) for out, loads in reads.items() if out not in kept}
    return {out: runs for out, runs in found.items() if runs is not None}


def _runs(node: ir.Contraction, readers: Sequence[Sequence[Value]], capabilities: Capabilities) -> Runs | None:
    left, right = node.lhs.variables(), node.rhs.variables()
    for k, v in enumerate(node.out_vars):
        length = v.extent.as_int()
        if length is None or (v in left) == (v in right):
            continue
        found = _along(length, [[load.attr[1][k] for load in loads] for loads in readers])
        if found is not None and capabilities.may(node.out, Request(family=len(found[0]))):
            return Runs(k, *found)
    return None


def _along(length: int, readers: Sequence[Sequence[Expr]]) -> tuple[tuple[int, ...], int] | None:
    """Where parts begin along a dimension, and how long they are, by the indices of each reader."""
    ranges: list[tuple[int, int]] = []
    for place in {place for indices in readers for place in indices}:
        low, high = place.bounds()
        if low < 0 or high >= length or any(isinstance(a, ix.Indirect) for a in ix.free_atoms(place)):
            return None
        ranges.append((low, high))
    runs: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if runs and low <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(high, runs[-1][1]))
        else:
            runs.append((low, high))
    lengths = {high - low + 1 for low, high in runs}
    if len(runs) < 2 or len(lengths) > 1:
        return None
    together = max(sum(any(low <= ix.lower_bound(p) <= high for p in indices) for low, high in runs) for indices in readers)
    return (tuple(low for low, _ in runs), lengths.pop()) if together > 1 else None


def cut(graph: ir.Graph, node: ir.Contraction, runs: Runs) -> list[ir.Contraction]:
    """The matmul's parts as matmuls. Their buffers are added to the graph."""
    k = runs.dimension
    whole = node.out_vars[k]
    own = ix.var(whole.name, runs.length)
    loops = (*node.out_vars[:k], own, *node.out_vars[k + 1 :])
    buffer = graph.buffers[node.out]
    sizes = tuple(v.extent for v in loops)
    made: list[ir.Contraction] = []
    for number, start in enumerate(runs.starts):
        name = split_output(graph, node.out, number)
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


def reading(graph: ir.Graph, node: ir.Pointwise, found: dict[str, Runs]) -> ir.Pointwise:
    """The node with loads of parts instead of the matmuls'."""

    def from_split(load: Value) -> Value | None:
        name, index, dtype = load.attr
        runs = found.get(name)
        if runs is None:
            return None
        k = runs.dimension
        number = runs.number(index[k])
        moved = (*index[:k], index[k] - runs.starts[number], *index[k + 1 :])
        return vs.load(split_output(graph, name, number), moved, dtype, *load.args)

    [value] = vs.replace_loads([node.value], from_split)
    return node if value is node.value else replace(node, value=value)


def _kernels(plan: Schedule) -> dict[str, list[tuple[Kernel, bool]]]:
    """By matmul, the kernels that make its parts, and whether they store them."""
    found: dict[str, list[tuple[Kernel, bool]]] = {}
    for kernel in (one for step in plan.kernels for one in members(step)):
        for s in kernel.statements:
            for out, kept in zip(s.outs, s.stored, strict=True):
                if (matmul := whole_of(plan.graph, out)) != out:
                    found.setdefault(matmul, []).append((kernel, kept))
    return found


def _refusal(plan: Schedule, matmul: str) -> Verdict:
    """Why fusion kept parts apart."""
    refused = (Outcome.ILLEGAL, Outcome.UNPROFITABLE)
    found = [v for v in plan.verdicts if v.outcome in refused and matmul in (v.producer, v.consumer)]
    return Verdict(matmul, "", Outcome.ILLEGAL, found[-1].reason if found else Reason.INDEX_MISMATCH, detail="its parts")
