"""Sums of all elements of a matrix run beside the kernel that reduces its rows: each row's sum first, then the sum of these.

    m, l = row statistics of x;  s = sum of f(x, m, l)      two kernels read x
    m, l, p = row statistics, and sums, of x;  s = sum of p     one kernel reads x

A divergence of two softmaxes is such a sum. Its loops reduce both axes, those of a softmax one, so fusion keeps them apart.
With the sum in two steps both reduce the same axis. Where fusion joins the first step to nothing that walks the rows anyway,
the graph is scheduled anew with the sum whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Expr
from kgen.ir.plan import Kernel, members
from kgen.scheduler.protocol import Attempt, Candidate, Draft, Transform
from kgen.verdict import Outcome, Reason, Verdict

# Reductions whose partial results join by the same reduction.
OPS = ("sum", "prod", "max", "min", "any", "all")
# Sums that are made by rows, at most: with four a row's values spilled, and a kernel took 180 us where two took 64 each
# (H200, bench.untuned: reflections).
MOST_TOTALS = 2
# Elements from which on reading them again takes longer than a launch; rows that occupy a GPU, and points of a row at least.
LARGE, MIN_ROWS, MIN_LENGTH = 1 << 20, 512, 64
_ROWS = "rows"


class RowTotals(Transform):
    """Reduces all elements by rows first, where the rows are reduced as well."""

    name = "row totals"

    def apply(self, draft: Draft) -> None:
        if draft.options.stable or not draft.options.fusion:
            return
        rows = _reduced_rows(draft)
        reductions = [node for node in draft.nodes if rows and isinstance(node, ir.Reduction)]
        totals = {node.outs[0] for node in reductions if self._is_candidate(node, draft) and _shares(node, rows)}
        if not 0 < len(totals) <= MOST_TOTALS:
            return
        nodes: list[ir.Node] = []
        for node in draft.nodes:
            if isinstance(node, ir.Reduction) and node.outs[0] in totals:
                nodes += _in_two_steps(node, draft.graph)
            else:
                nodes.append(node)
        draft.nodes = nodes

    def _is_candidate(self, node: ir.Reduction, draft: Draft) -> bool:
        return _is_total(node, draft) and draft.decisions.is_open(self.name, node.outs[0])

    def check(self, attempt: Attempt) -> Mapping[Candidate, Verdict]:
        return {Candidate(self.name, total): verdict for total, verdict in self._alone(attempt)}

    def report(self, attempt: Attempt) -> list[Verdict]:
        return list(attempt.decisions.refused(self.name).values())

    def _alone(self, attempt: Attempt) -> Iterator[tuple[str, Verdict]]:
        """The sums whose first step is in no kernel with anything else."""
        for kernel in (one for step in attempt.plan.kernels for one in members(step) if isinstance(one, Kernel)):
            made = [o for s in kernel.statements if s.inner for o in s.outs]
            sources = [ir.source_in(attempt.graph, o, _ROWS) for o in made]
            if made and all(sources):
                yield from (
                    (total, Verdict(kernel.name, total, Outcome.UNPROFITABLE, Reason.NO_SAVING)) for total in sources if total
                )


def _is_total(node: ir.Reduction, draft: Draft) -> bool:
    """Whether it reduces all loops to one result, of many rows on a GPU."""
    if node.vars or len(node.rvars) < 2 or node.op not in OPS:
        return False
    sizes = [v.extent.as_int() or 0 for v in node.rvars]
    rows = ix.product(v.extent for v in node.rvars[:-1]).as_int() or 0
    is_long = rows >= MIN_ROWS and sizes[-1] >= MIN_LENGTH and rows * sizes[-1] >= LARGE
    return is_long and draft.options.device(draft.graph, node.outs[0]).kind == "cuda"


def _reduced_rows(draft: Draft) -> set[tuple[str, tuple[Expr, ...], Expr]]:
    """(what is read, the rows, their length) of reductions of rows, but for what contractions make: of that, tiles are
    reduced."""
    multiplied = {o for node in draft.nodes if ir.is_contraction(node) or ir.is_template_node(node) for o in ir.outs(node)}
    found: set[tuple[str, tuple[Expr, ...], Expr]] = set()
    for node in draft.nodes:
        if isinstance(node, ir.Reduction) and node.vars and len(node.rvars) == 1:
            rows = tuple(v.extent for v in node.vars if v.extent != 1)
            found |= {(name, rows, node.rvars[0].extent) for name in _read_in_full(node) - multiplied}
    return found


def _read_in_full(node: ir.Reduction) -> set[str]:
    """The buffers of which it reads another element at each of its points."""
    loops = {v for v in (*node.vars, *node.rvars) if v.extent != 1}
    return {load.attr[0] for load in vs.loads([node.value]) if loops <= {a for e in load.attr[1] for a in ix.free_atoms(e)}}


def _shares(node: ir.Reduction, rows: set[tuple[str, tuple[Expr, ...], Expr]]) -> bool:
    own = tuple(v.extent for v in node.rvars[:-1] if v.extent != 1)
    return any((name, own, node.rvars[-1].extent) in rows for name in _read_in_full(node))


def _in_two_steps(node: ir.Reduction, graph: ir.Graph) -> tuple[ir.Reduction, ir.Reduction]:
    [out] = node.outs
    *leading, last = node.rvars
    loops = tuple(ix.var(f"i{k}", v.extent) for k, v in enumerate(leading))
    value = vs.substitute(node.value, {v: loop.expr() for v, loop in zip(leading, loops, strict=True)})
    sizes = tuple(v.extent for v in loops)
    name = ir.derived(graph, ir.Derived(out, _ROWS))
    graph.buffers[name] = ir.Buffer(name, value.dtype, graph.buffers[out].device, sizes, ix.contiguous_strides(sizes))
    first = replace(node, outs=(name,), vars=loops, rvars=(last,), value=value)
    return first, replace(node, rvars=tuple(leading), value=vs.load(name, [v.expr() for v in leading], value.dtype))
