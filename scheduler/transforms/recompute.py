"""Matmuls that are recomputed: once for what is reduced of their rows, and again for what needs both an element and a
reduction of its row, as a softmax or a normalisation does. Neither stores the matmul: the first runs reductions on its tiles
(`kgen.scheduler.transforms.tile_partials`), the second an epilogue that reads what these have found of each row.

    y = softmax(x w):  m, s = maximum and sum of exponentials of x w;  y = exp(x w - m) / s

A graph is rewritten before fusion: the matmul, and what is made of its elements before any reduction, have copies that only
the reductions read. Here is which matmuls may be, and how; whether it pays is asked elsewhere (`recompute_trial.py`).

The two computations may have tiles of different shapes, and so differ in the last bits. Where that could be told by more than
the last bits of a result, a matmul is computed once: an element may be larger than the maximum of its row by a bit, and what
is rounded, or chosen by a comparison, need not be what its row's sum was made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.plan import Kernel, Schedule, members
from kgen.ir.values import Value
from kgen.scheduler.analysis.dependencies import reads_of
from kgen.scheduler.analysis.items import accumulators
from kgen.scheduler.protocol import Decisions, Draft
from kgen.scheduler.transforms.split_k import parts_by_result
from kgen.scheduler.transforms.tile_partials import Search, Tiles, tiles_of
from kgen.verdict import Outcome, Reason, Verdict

# Operations without steps or poles: a small change of an argument is a small change of the result, whatever the argument.
SMOOTH = frozenset({
    "add", "sub", "mul", "neg", "abs", "square", "maximum", "minimum", "fma", "exp", "exp2", "expm1", "sigmoid", "tanh", "erf",
    "erfc", "sin", "cos", "atan",
})  # fmt: skip
# What a value is made of: elements of a matmul, reductions of its rows, or both.
ELEMENT, OF_ROW, BOTH = 1, 2, 3


_FIRST = "first"


def first_of(graph: ir.Graph, name: str) -> str:
    """The copy of a matmul, or of its elements, that only reductions read."""
    return ir.derived(graph, ir.Derived(name, _FIRST))


def original_of(graph: ir.Graph, name: str) -> str:
    """What a buffer is a copy of, or the buffer."""
    return ir.source_in(graph, name, _FIRST) or name


RECOMPUTE = "recompute"


def recomputed(decisions: Decisions) -> frozenset[str]:
    """The contractions that are recomputed."""
    return frozenset(decisions.settled(RECOMPUTE, bool))


@dataclass(slots=True)
class Around:
    """What is made of a matmul: `early` elements, which wait for no reduction of it, the matmul among them; `reductions`, by
    their first results, with the values that they fold in terms of early elements; `late` elements, which wait for these."""

    graph: ir.Graph = field(repr=False, compare=False)
    node: ir.Contraction
    early: set[str] = field(default_factory=set)
    late: set[str] = field(default_factory=set)
    reductions: dict[str, Value] = field(default_factory=dict)
    results: set[str] = field(default_factory=set)  # all results of the reductions
    refusal: Verdict | None = None

    @property
    def names(self) -> set[str]:
        """All buffers that change their kernel if the matmul is recomputed."""
        return {*self.early, *self.late, *self.results, *(first_of(self.graph, name) for name in self.early)}

    def refuse(self, consumer: ir.Node | str, reason: Reason) -> None:
        name = consumer if isinstance(consumer, str) else "".join(ir.outs(consumer)[:1])
        self.refusal = self.refusal or Verdict(self.node.out, name, Outcome.STORED, reason)


def recompute_candidates(draft: Draft, offered: Iterable[str]) -> list[Around]:
    """Those of the contractions in `offered` whose rows are reduced and read again, with a refusal where they may not be
    recomputed."""
    wanted, graph, cuts = frozenset(offered), draft.graph, parts_by_result(draft.decisions)
    if not wanted or not any(isinstance(node, ir.Reduction) for node in graph.nodes):
        return []
    nodes = [replace(n, vendor=None) if ir.is_contraction(n) and n.out in wanted else n for n in graph.nodes]
    found = [around for around in _Elements(graph, tiles_of(draft), nodes).around.values() if around.reductions and around.late]
    return [around for around in found if around.node.out not in cuts]


def with_recomputation(draft: Draft, again: frozenset[str]) -> list[ir.Node]:
    """The nodes with copies of the contractions in `again`, and of their early elements, for reductions to read. Buffers of
    copies are added to the graph."""
    graph, nodes = draft.graph, draft.nodes
    known = [around for matmul, around in _Elements(graph, tiles_of(draft), nodes).around.items() if matmul in again]
    recomputable = {name: around for around in known for name in (*around.early, *around.reductions)}
    made: list[ir.Node] = []
    for node in nodes:
        around = next((recomputable[out] for out in ir.outs(node) if out in recomputable), None)
        if around is None:
            made.append(node)
        elif isinstance(node, ir.Reduction):
            made.append(replace(node, value=_from_first(around.reductions[node.outs[0]], around)))
        else:
            made += [_copy(graph, node, around), node]
    return made


def _copy(graph: ir.Graph, node: ir.Node, around: Around) -> ir.Node:
    assert ir.is_contraction(node) or isinstance(node, ir.Pointwise)
    copy = replace(node, out=first_of(graph, node.out))
    if isinstance(copy, ir.Pointwise):
        copy = replace(copy, value=_from_first(copy.value, around))
    for name, new in zip(_buffers(graph, node), _buffers(graph, copy), strict=True):
        graph.buffers[new] = replace(graph.buffers[name], name=new)
    return copy


def _buffers(graph: ir.Graph, node: ir.Contraction | ir.Pointwise) -> tuple[str, ...]:
    return (node.out, *accumulators(graph, node)) if ir.is_contraction(node) else (node.out,)


def _from_first(value: Value, around: Around) -> Value:
    """The value, made of the first computation's elements."""

    def first(load: Value) -> Value | None:
        name, index, dtype = load.attr
        return vs.load(first_of(around.graph, name), index, dtype, *load.args) if name in around.early else None

    [renamed] = vs.replace_loads([value], first)
    return renamed


class _Elements(Search):
    """Follows the elements of matmuls past the reductions of their rows."""

    def __init__(self, graph: ir.Graph, tiles: Tiles, nodes: list[ir.Node]) -> None:
        self.around: dict[str, Around] = {}
        self.late: dict[str, frozenset[str]] = {}  # buffer -> matmuls of which it has late elements
        super().__init__(graph, tiles, nodes)
        kept = ir.visible(graph)
        for name, traced in self.traced.items():
            if name in kept or graph.buffers[name].alias_of is not None:
                self.around[traced.matmul].refuse(name, Reason.NEEDED)
        for around in self.around.values():
            self._compare(around)

    def visit(self, node: ir.Node) -> None:
        super().visit(node)
        early = {self.traced[name].matmul for name in reads_of(node) if name in self.traced}
        late = frozenset().union(*(self.late.get(name, ()) for name in reads_of(node)))
        if ir.is_contraction(node) and node.vendor is None:
            self.around[node.out] = Around(self.graph, node, {node.out})
            if not all(v.extent.as_int() for v in (*node.out_vars, *node.reduced)):
                self.around[node.out].refuse(node, Reason.UNKNOWN_SIZES)
        elif isinstance(node, ir.Reduction):
            self._reduced(node, early, late)
            return
        elif isinstance(node, ir.Pointwise):
            self._points(node, early, late)
            return
        for matmul in early:
            self.around[matmul].refuse(node, Reason.NEEDED)

    def _reduced(self, node: ir.Reduction, early: set[str], late: frozenset[str]) -> None:
        site = self.sites.get(node.outs[0])
        if site is not None:
            around = self.around[site.matmul]
            around.reductions[node.outs[0]] = self._unfolded(node, node.value)
            around.results |= set(node.outs)
        own = {site.matmul} if site is not None else set()
        waiting = frozenset().union(*(self.after.get(name, ()) for name in reads_of(node)))
        for matmul in (early | late) - own:
            self.around[matmul].refuse(node, Reason.CHAINED_REDUCTIONS if matmul in waiting else Reason.NEEDED)

    def _points(self, node: ir.Pointwise, early: set[str], late: frozenset[str]) -> None:
        own = self.traced.get(node.out)
        waiting = early & self.after[node.out]
        if own is not None:
            self.around[own.matmul].early.add(node.out)
        for matmul in late | waiting:
            self.around[matmul].late.add(node.out)
        self.late[node.out] = late | waiting if own is None else frozenset()  # another matmul's epilogue reads memory
        picked = any(isinstance(a, ix.Indirect) for v in vs.loads([node.value]) for e in v.attr[1] for a in ix.free_atoms(e))
        for matmul in early:
            if len(early) > 1:
                self.around[matmul].refuse(node, Reason.TWO_MATMULS)
            elif picked or (matmul not in waiting and (own is None or own.matmul != matmul)):
                self.around[matmul].refuse(node, Reason.NEEDED)

    # ---- the last bits ----------------------------------------------------------------------------------------------

    def _compare(self, around: Around) -> None:
        """Refuses a matmul if something that is made of its elements is no smooth function of them. Only what was made of an
        element and a reduction of its row may be rounded, or to the matmul's own type: the library's result is, too."""
        if around.node.rounded is not None:
            around.refuse(around.node, Reason.UNEQUAL)
        for name in sorted((around.early | around.late) & self.made.keys()):
            if not self._changes_little(self.made[name].value, around):
                around.refuse(name, Reason.UNEQUAL)

    def _changes_little(self, root: Value, around: Around) -> bool:
        kinds: dict[Value, int] = {}
        for value in vs.topological([root]):
            kinds[value] = self._kind(value, around)
            for child in vs.children(value):
                kinds[value] |= kinds[child]
            own = value.op == "round_to" and value.attr == self.graph.buffers[around.node.out].dtype
            if kinds[value] & ELEMENT and not own and not _is_smooth(value, kinds):
                return False
        return True

    def _kind(self, value: Value, around: Around) -> int:
        if value.op != "load":
            return 0
        name, matmul = value.attr[0], around.node.out
        if name in around.late:
            return BOTH
        return ELEMENT if name in around.early else OF_ROW if matmul in self.after.get(name, ()) else 0


def _is_smooth(value: Value, kinds: Mapping[Value, int]) -> bool:
    """Whether a value that is made of elements changes but little where these do."""
    if value.op == "load":
        return not any(kinds[child] & ELEMENT for child in vs.children(value))
    if value.op == "where":
        return not kinds[value.args[0]] & ELEMENT
    if value.op == "truediv":
        return not kinds[value.args[1]] & ELEMENT
    if value.op == "cast":
        return value.dtype.is_floating_point
    return value.op in SMOOTH or (value.op == "round_to" and kinds[value] == BOTH)


# ---- what fusion made of it -------------------------------------------------------------------------------------------


def computations(graph: ir.Graph, again: Iterable[str]) -> dict[str, str]:
    """Both computations of the contractions that are recomputed, with the contractions."""
    return {name: matmul for matmul in sorted(again) for name in (matmul, first_of(graph, matmul))}


def stored(plan: Schedule, again: Iterable[str]) -> dict[str, Verdict]:
    """Contractions that are to be recomputed, but of which fusion stores elements, or which share a kernel with others."""
    kernels = [one for step in plan.kernels for one in members(step)]
    return {p: verdict for p in sorted(again) if (verdict := _stored(plan, kernels, p)) is not None}


def _stored(plan: Schedule, kernels: list[Kernel], matmul: str) -> Verdict | None:
    makers = {out: kernel for kernel in kernels for s in kernel.statements for out in s.outs}
    first, again = makers.get(first_of(plan.graph, matmul)), makers.get(matmul)
    if first is None or again is None or first is again:
        return Verdict(matmul, "", Outcome.STORED, Reason.NOT_IN_TILES)
    kept = [out for s in first.statements if s.kind != "partial" for out, on in zip(s.outs, s.stored, strict=True) if on]
    early = {original_of(plan.graph, name) for s in first.statements for name in s.outs}
    kept += [out for s in again.statements for out, on in zip(s.outs, s.stored, strict=True) if on and out in early]
    if not kept and sum(s.kind == "contraction" for s in (*first.statements, *again.statements)) == 2:
        return None
    names = {origin.name for origin in (*first.origins, *again.origins)}
    refused = [v for v in plan.verdicts if v.outcome in (Outcome.ILLEGAL, Outcome.UNPROFITABLE) and v.producer in names]
    reason = refused[-1].reason if refused else Reason.NOT_IN_TILES
    return Verdict(matmul, kept[0] if kept else "", Outcome.STORED, reason)
