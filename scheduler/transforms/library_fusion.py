"""Matmuls that the library computes in one call with what follows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from kgen.cost.tuning_query import FUSED, Place, TuningResult
from kgen.ir import index as ix
from kgen.ir import nodes as ir
from kgen.scheduler.analysis.dependencies import needed, reads_of
from kgen.scheduler.options import Options
from kgen.scheduler.protocol import Draft, Transform
from kgen.verdict import FusionDemand, Outcome, Reason, Verdict

TuningResults = Mapping[str, Mapping[Place, TuningResult]]


class LibraryFusion(Transform):
    """Has the library compute a contraction and what follows in one call."""

    name = "library fusion"

    def prepare(self, graph: ir.Graph, options: Options) -> None:
        graph.nodes = usable(graph, options.may_fuse_calls(graph), options.demands)

    def apply(self, draft: Draft) -> None:
        draft.nodes = needed(draft.graph, draft.nodes)
        results: TuningResults = {} if draft.options.stable else draft.tuning_results
        apart = kept_apart(results) | unmeasured(draft.graph, results)
        draft.nodes = with_fused_calls(draft.nodes, apart)
        draft.verdicts += verdicts(draft.nodes, draft.graph)


def usable(graph: ir.Graph, allowed: Callable[[str], bool], demands: tuple[FusionDemand, ...]) -> list[ir.Node]:
    """The graph's nodes, without those calls for two nodes that cannot stand in their place: the result has another layout than
    the library's, somebody needs the matmul alone, `allowed` is not true of its result, or a demand says what kernels there
    are to be."""
    readers = {node.out: node for node in graph.nodes if isinstance(node, ir.Pointwise)}
    visible = ir.visible(graph)

    def fits(node: ir.Contraction, call: ir.Extern) -> bool:
        reader = readers.get(call.outs[0] or "")
        if reader is None:
            return False
        made = graph.buffers[reader.out]
        asked = any(d.between(node.origin.calls, reader.origin.calls) for d in demands)  # for one kernel, or for two
        strides = graph.buffers[node.out].strides if node.windowed else ix.contiguous_strides(made.sizes)
        plain = made.alias_of is None and made.strides == strides
        return allowed(node.out) and plain and node.out not in visible and not asked

    return [
        replace(node, fused=None) if ir.is_contraction(node) and node.fused and not fits(node, node.fused) else node
        for node in graph.nodes
    ]


def with_fused_calls(nodes: list[ir.Node], apart: frozenset[str]) -> list[ir.Node]:
    """Matmuls that the library computes, those in `apart` excepted, in one call with the one node that reads them. The call
    stands where the matmul did: what it reads besides has to be there. Of two that could compute a node, the last one does."""
    readers = {node.out: node for node in nodes if isinstance(node, ir.Pointwise)}
    uses = Counter(name for node in nodes for name in reads_of(node))
    made = {name: place for place, node in enumerate(nodes) for name in ir.outs(node)}
    calls: dict[str, tuple[str, ir.Extern]] = {}  # by the node's result: the matmul's, and the call
    for place, node in enumerate(nodes):
        if not ir.is_contraction(node) or node.fused is None or node.vendor is None or node.out in apart:
            continue
        reader = readers.get(node.fused.outs[0] or "")
        late = any(made.get(name, -1) >= place for name in ir.reads(node.fused))
        if reader is not None and uses[node.out] == 1 and not late:
            calls[reader.out] = node.out, replace(node.fused, origin=node.origin.joined(reader.origin))
    by_matmul = dict(calls.values())
    replaced = (by_matmul.get(ir.outs(node)[0], node) if ir.is_contraction(node) else node for node in nodes)
    return [node for node in replaced if not (isinstance(node, ir.Pointwise) and node.out in calls)]


def verdicts(nodes: Iterable[ir.Node], graph: ir.Graph) -> list[Verdict]:
    """What is said of the calls among the nodes that stand for two nodes of the graph."""
    matmuls = {n.fused.outs: n.out for n in graph.nodes if ir.is_contraction(n) and n.fused is not None}
    calls = [n for n in nodes if isinstance(n, ir.Extern) and n.outs in matmuls]
    return [Verdict(matmuls[c.outs], c.outs[0] or "", Outcome.FUSED, Reason.LIBRARY_FUSES, detail=str(c.target)) for c in calls]


def kept_apart(tuning_results: TuningResults) -> frozenset[str]:
    """Matmuls of which it was measured that the plain call and a separate kernel are faster than one call."""
    library = {out: [a.config for a in known.values() if a.template is None] for out, known in tuning_results.items()}
    return frozenset(out for out, configs in library.items() if configs and FUSED not in configs)


def unmeasured(graph: ir.Graph, tuning_results: TuningResults) -> frozenset[str]:
    """Convolutions of a GPU of which it was not measured that one call is faster: its library may choose a slower algorithm."""
    nodes = (node for node in graph.nodes if ir.is_contraction(node) and node.windowed and node.fused is not None)
    known = {
        out for out, found in tuning_results.items() if any(a.template is None and a.config == FUSED for a in found.values())
    }
    return frozenset(n.out for n in nodes if graph.buffers[n.out].device.type == "cuda" and n.out not in known)
