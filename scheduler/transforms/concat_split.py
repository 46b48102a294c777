"""Tensors that are joined of others are written slice by slice, by the kernels that make what is joined:

    y = relu(cat([x w, x v + b], -1))        becomes        y[:, :n] = relu(x w);  y[:, n:] = relu(x v + b)

A cat is one value that selects by the index, so that it fuses with what follows it. But a kernel with a matmul, or with a
reduction, has the loops of that, and no tile of x w holds a row of y: x w would be stored, to be read and stored again. So a
node whose value compares a loop's index with bounds is cut there into nodes over one run of the loop each. Within a run the
comparisons are decided, and nothing is left of the selection; the run's node fills a part of the buffer (`ir.Buffer.parts`),
and fuses with what makes its elements by the rules for all points.

The graph is rewritten before fusion, and only where the buffer is needed in memory: what fuses into its readers needs no copy.
Where fusion finds no kernel for any of the runs, the graph is scheduled anew with the node whole, for that is one kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kgen.device import SECTOR
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr, Sizes, Var
from kgen.ir.plan import Kernel, Schedule, members
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.protocol import Attempt, Candidate, Decisions, Draft, Transform
from kgen.scheduler.selection.choose import contraction_of
from kgen.verdict import Outcome, Reason, Verdict

# Runs of one node: each is a kernel where nothing takes it, and its own text where something does.
MOST = 16
# Elementary operations of a value that may be written out for a consumer that reads it point by point: one kernel that stores
# both does them once.
AGAIN = 100
AnyNode = TypeVar("AnyNode", bound=ir.Node)


CONCAT_SPLIT = "concat split"


@dataclass(frozen=True, slots=True)
class ConcatParts:
    """Runs of a node's loop: `bounds` are where they begin, and the loop's end. `found` are those of which each element is made
    of one element of something that a kernel of its own makes."""

    node: ir.Pointwise
    dimension: int
    bounds: tuple[Expr, ...]
    found: tuple[str, ...] = ()

    @property
    def runs(self) -> list[tuple[Expr, Expr]]:
        """Start and length of each."""
        return [(low, high - low) for low, high in zip(self.bounds, self.bounds[1:], strict=False)]

    def node_of(self, number: int, out: str) -> ir.Pointwise:
        """The node of one run, over loops of its own."""
        v, (start, length) = self.node.vars[self.dimension], self.runs[number]
        own = ix.var(v.name, length)
        loops = (*self.node.vars[: self.dimension], own, *self.node.vars[self.dimension + 1 :])
        return replace(self.node, out=out, vars=loops, value=vs.substitute(self.node.value, {v: own.expr() + start}))


class ConcatSplit(Transform):
    """Writes tensors that are joined of others slice by slice."""

    name = CONCAT_SPLIT

    def apply(self, draft: Draft) -> None:
        if draft.options.fusion:
            draft.nodes, refused = with_concat_parts(draft.graph, draft.taken, draft.decisions)
            draft.verdicts += refused

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        makers = _makers(attempt.plan, _in_parts(attempt.graph))
        return {Candidate(self.name, whole): _refusal(attempt.plan, whole) for whole, kernels in makers.items() if not kernels}

    def report(self, attempt: Attempt) -> list[Verdict]:
        return [
            Verdict(contraction_of(kernel) if kernel.contracts else kernel.name, whole, Outcome.FUSED, Reason.CONCAT_SPLIT)
            for whole, kernels in _makers(attempt.plan, _in_parts(attempt.graph)).items() for kernel in kernels
        ]  # fmt: skip


def _in_parts(graph: ir.Graph) -> tuple[str, ...]:
    """The buffers that are written in slices."""
    return tuple(n.out for n in graph.nodes if isinstance(n, ir.Pointwise) and graph.buffers[n.out].parts)


def with_concat_parts(graph: ir.Graph, taken: frozenset[str], decisions: Decisions) -> tuple[list[ir.Node], list[Verdict]]:
    """The nodes with those cut of which contractions in `taken`, among others, make a part, and why others are not. Buffers of
    parts are added to the graph."""
    search = _Search(graph, taken)
    nodes: list[ir.Node] = []
    refused: list[Verdict] = []
    cut: dict[str, ir.Pointwise] = {}
    for node in graph.nodes:
        found = search.visit(_of_parts(graph, node, cut))
        if found is None or not decisions.is_open(CONCAT_SPLIT, found.node.out):
            nodes.append(node)
        elif _short(graph, found):
            refused += [Verdict(name, found.node.out, Outcome.UNPROFITABLE, Reason.SHORT_RUNS) for name in found.found]
            nodes.append(node)
        else:
            cut[found.node.out] = found.node
            nodes += _cut(graph, found)
    return nodes, refused


def _of_parts(graph: ir.Graph, node: AnyNode, cut: Mapping[str, ir.Pointwise]) -> AnyNode:
    """A node that reads, point by point, what is cut: as what it makes of that is made of, so that it may be cut in the same
    way."""

    def again(load: Value) -> Value | None:
        source = cut.get(load.attr[0])
        if source is None or load.args:
            return None
        made = vs.substitute(source.value, dict(zip(source.vars, load.attr[1], strict=True)))
        return vs.cast(made, graph.buffers[source.out].dtype)  # as it is in memory

    if not isinstance(node, ir.Pointwise) or cut.keys().isdisjoint(reads_of(node)):
        return node
    [value] = vs.replace_loads([node.value], again)
    return replace(node, value=value) if vs.total_cost([value]) <= AGAIN else node


def _cut(graph: ir.Graph, concat_parts: ConcatParts) -> Iterator[ir.Pointwise]:
    whole = graph.buffers[concat_parts.node.out]
    assert whole.strides is not None
    names = tuple(ir.derived(graph, ir.Derived(whole.name, "slice", n)) for n in range(len(concat_parts.runs)))
    graph.buffers[whole.name] = replace(whole, parts=names)
    for number, (name, (start, _)) in enumerate(zip(names, concat_parts.runs, strict=True)):
        node = concat_parts.node_of(number, name)
        sizes, offset = tuple(v.extent for v in node.vars), start * whole.strides[concat_parts.dimension] + whole.offset
        graph.buffers[name] = replace(whole, name=name, sizes=sizes, offset=offset, alias_of=whole.name, is_part=True)
        yield node


def slice_of(graph: ir.Graph, name: str) -> ir.Pointwise | None:
    """The node of a slice that scheduling cut from one of the graph's; None of other buffers."""
    if name not in graph.buffers or not graph.buffers[name].is_part:
        return None
    whole, cut = graph.buffers[ir.owner(graph, name)], dict[str, ir.Pointwise]()
    for one in graph.nodes:
        if isinstance(one, ir.Pointwise) and graph.buffers[one.out].parts:
            cut[one.out] = _of_parts(graph, one, cut)
    node = cut[whole.name]
    sizes = [graph.buffers[one].sizes for one in whole.parts]
    k = next(k for k in range(len(node.vars)) if any(own[k] is not whole.sizes[k] for own in sizes))
    bounds = tuple(itertools.accumulate((own[k] for own in sizes), initial=ix.ZERO))
    return ConcatParts(node, k, bounds).node_of(whole.parts.index(name), name)


def _short(graph: ir.Graph, concat_parts: ConcatParts) -> bool:
    """Whether the runs are short parts of what is contiguous in memory."""
    buffer, sizes = graph.buffers[concat_parts.node.out], Sizes(graph.size_hints)
    assert buffer.strides is not None
    stride = sizes.of(buffer.strides[concat_parts.dimension])
    length = sizes.of(buffer.sizes[concat_parts.dimension])
    return length * stride * buffer.dtype.itemsize < SECTOR * len(concat_parts.runs)


# ---- which ------------------------------------------------------------------------------------------------------------


class _Search:
    """Finds nodes to cut, in one walk over the nodes."""

    def __init__(self, graph: ir.Graph, taken: frozenset[str]) -> None:
        self.graph, self.taken = graph, taken
        self.points: dict[str, Expr] = {}  # what is made of a matmul's elements -> their number
        self.rows: dict[str, Expr] = {}  # result of a reduction or a scan -> points of its loops
        self.values: dict[str, Expr] = {}  # what is made point by point -> its points
        self.in_memory = ir.visible(graph)
        for node in graph.nodes:
            if not isinstance(node, ir.Pointwise | ir.Reduction | ir.Scan | ir.Scatter):
                self.in_memory.update(reads_of(node))
                self.in_memory.update(load.attr[0] for load in vs.loads(getattr(node, "stored", ())))

    def visit(self, node: ir.Node) -> ConcatParts | None:
        if ir.is_template_node(node):
            if ir.outs(node)[0] in self.taken:
                self.points |= {out: ix.product(self.graph.buffers[out].sizes) for out in ir.outs(node)}
            return None
        if isinstance(node, ir.Reduction | ir.Scan):
            self.rows |= dict.fromkeys(node.outs, ix.product(v.extent for loops in ir.iteration(node) for v in loops))
            return None
        if not isinstance(node, ir.Pointwise):
            return None
        count, read = ix.product(v.extent for v in node.vars), {load.attr[0] for load in vs.loads([node.value])}
        self.values[node.out] = count
        if any(self.points.get(name) is count for name in read):
            self.points[node.out] = count
        if any(self.rows.get(name) is count for name in read):
            self.rows[node.out] = count
        made_beside = not read.isdisjoint(self.points) or not read.isdisjoint(self.rows)
        if not made_beside or node.out not in self.in_memory or self.graph.buffers[node.out].alias_of is not None:
            return None
        return self._concat_parts(node)

    def _concat_parts(self, node: ir.Pointwise) -> ConcatParts | None:
        for k, bounds in bounds_of(node).items():
            every = ConcatParts(node, k, bounds)
            runs = [every.node_of(number, node.out) for number in range(len(every.runs))]
            found = [tuple(self._whole(run)) for run in runs]
            # neighbours of which no other kernel makes either stay one run, in which the value selects
            apart = [bool(low or high) for low, high in itertools.pairwise(found)]
            made = dict.fromkeys(name for names in found for name in names)
            if made and not (_copied(found) > 1 and _is_symbolic(bounds, node.vars)):
                cut = [ConcatParts(node, k, _kept(bounds, kept), tuple(made)) for kept in (self._of_values(runs, apart), apart)]
                return cut[1] if _short(self.graph, cut[0]) else cut[0]
        return None

    def _of_values(self, runs: Sequence[ir.Pointwise], apart: Sequence[bool]) -> list[bool]:
        """The bounds with those between runs that are both made of values that kernels would store for them alone."""
        values = [self._is_of_values(run) for run in runs]
        return [one or (low and high) for one, (low, high) in zip(apart, itertools.pairwise(values), strict=True)]

    def _whole(self, run: ir.Pointwise) -> Iterator[str]:
        """What a run may be made with, in the loops of that: matmuls of which it reads each element at one point, reductions
        over as many points."""
        loops = {v for v in run.vars if v.extent != 1}
        count = ix.product(v.extent for v in run.vars)
        for load in vs.loads([run.value]):
            name, index, _ = load.attr
            each = self.points.get(name) is count and loops <= {a for e in index for a in ix.free_atoms(e)}
            if not load.args and (each or self.rows.get(name) is count):
                yield name

    def _is_of_values(self, run: ir.Pointwise) -> bool:
        """Whether it reads, at as many points, what other nodes make point by point."""
        count = ix.product(v.extent for v in run.vars)
        return any(not load.args and self.values.get(load.attr[0]) is count for load in vs.loads([run.value]))


def _kept(bounds: Sequence[Expr], kept: Sequence[bool]) -> tuple[Expr, ...]:
    return (bounds[0], *itertools.compress(bounds[1:], kept), bounds[-1])


def _copied(found: Sequence[tuple[str, ...]]) -> int:
    """Runs that would be kernels of their own, neighbours together."""
    return sum(not names and (k == 0 or bool(found[k - 1])) for k, names in enumerate(found))


def _is_symbolic(bounds: Sequence[Expr], loops: Sequence[Var]) -> bool:
    """Whether sizes are symbols: then runs that no other kernel makes may not share one (`fusion/combo_kernels.py`)."""
    return any(e.as_int() is None for e in (*bounds, *(v.extent for v in loops)))


def bounds_of(node: ir.Pointwise) -> dict[int, tuple[Expr, ...]]:
    """By dimension, where runs of the loop begin between which the value's comparisons of its index change, and its end."""
    found: dict[int, dict[Expr, None]] = {}
    for value in vs.topological([node.value], through_indices=False):
        if value.op == "lt" and value.args[0].op == "index":
            place = _bound(node.vars, value.args[0].attr, value.args[1])
            if place is not None:
                found.setdefault(place[0], {})[place[1]] = None
    every = ((k, node.vars[k].extent, [*bounds_found]) for k, bounds_found in found.items())
    ordered = ((k, end, _in_order([ix.ZERO, *bounds_found, end])) for k, end, bounds_found in every)
    return {k: b for k, end, b in ordered if b is not None and (b[0], b[-1]) == (ix.ZERO, end) and len(b) <= MOST + 1}


def _bound(loops: Sequence[Var], place: Expr, limit: Value) -> tuple[int, Expr] | None:
    """The loop of which a comparison of `place` with `limit` decides whether its index is below a number, and that number. The
    index may have been split: of 64 h + d below 128, with d below 64, that is whether h is below 2."""
    if limit.op == "index":
        bound: Expr = limit.attr
    elif limit.op == "const":
        bound = ix.constant(limit.attr)
    else:
        return None
    if any(not isinstance(atom, ix.Size) for atom in ix.free_atoms(bound)):
        return None
    for k, v in enumerate(loops):
        stride = ix.stride_of(place, v)
        if stride is None or not stride.terms:
            continue
        rest = place - stride * v.expr()
        if not any(isinstance(atom, Var | ix.Indirect) for atom in ix.free_atoms(rest)):
            bound, rest = bound - rest, ix.ZERO
        inside = ix.lower_bound(rest) >= 0 and ix.known_less(rest, stride)
        if inside and ix.lower_bound(stride) > 0 and ix.mod(bound, stride) is ix.ZERO:
            return k, ix.floordiv(bound, stride)
    return None


def _in_order(bounds: Iterable[Expr]) -> tuple[Expr, ...] | None:
    """The bounds from the lowest to the highest, each once; None where sizes do not say which that is."""
    ordered: list[Expr] = []
    for bound in dict.fromkeys(bounds):
        at = sum(ix.lower_bound(bound - other) >= 0 for other in ordered)
        if any(ix.lower_bound(other - bound) < 0 for other in ordered[at:]):
            return None
        ordered.insert(at, bound)
    return tuple(ordered)


# ---- what became of it ------------------------------------------------------------------------------------------------


def _makers(plan: Schedule, wholes: Iterable[str]) -> Mapping[str, list[Kernel]]:
    """By buffer, the kernels that make parts of it and something else than points."""
    found: dict[str, list[Kernel]] = {whole: [] for whole in wholes}
    for kernel in (one for step in plan.kernels for one in members(step)):
        if any(s.kind != "pointwise" for s in kernel.statements):
            parts = (out for s in kernel.statements for out in s.outs if plan.graph.buffers[out].is_part)
            for whole in dict.fromkeys(ir.owner(plan.graph, out) for out in parts):
                if whole in found:
                    found[whole].append(kernel)
    return found


def _refusal(plan: Schedule, whole: str) -> Verdict:
    """Why fusion kept the parts apart from what they are made of."""
    refused = (Outcome.ILLEGAL, Outcome.UNPROFITABLE)
    name = next((n.origin.name for n in plan.graph.nodes if whole in ir.outs(n)), "")
    found = [v for v in plan.verdicts if v.outcome in refused and v.consumer in (name, *plan.graph.buffers[whole].parts)]
    reason = found[-1].reason if found else Reason.INDEX_MISMATCH
    return Verdict("", whole, Outcome.UNPROFITABLE, reason, detail="its slices")
