"""Results that the library gives in one call, such as the gradients of a convolution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kgen.ir import nodes as ir
from kgen.scheduler.protocol import Draft, Transform
from kgen.verdict import Outcome, Reason, Verdict


class SharedCalls(Transform):
    """Has the library compute in one call what templates leave of the results that it gives in one. Sums among these are nodes
    like any other where no contraction of the call is left to the library, or where it would make them by a pass of its own."""

    name = "shared calls"

    def apply(self, draft: Draft) -> None:
        found = list(shared_calls(draft.nodes, draft.graph))
        calls = {one.members[0]: one.call for one in found}
        gone = {out for one in found for out in one.members[1:]}
        kept = (node for node in draft.nodes if gone.isdisjoint(ir.outs(node)))
        draft.nodes = [calls.get(node.out, node) if ir.is_contraction(node) else node for node in kept]
        draft.verdicts += [
            Verdict(one.members[0], other, Outcome.FUSED, Reason.LIBRARY_JOINS, detail=str(one.call.target))
            for one in found for other in one.members[1:]
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Merged:
    """One call, and the results that it gives, in the order of their nodes."""

    call: ir.Extern
    members: tuple[str, ...]


def shared_calls(nodes: Sequence[ir.Node], graph: ir.Graph) -> Iterator[Merged]:
    """The calls for several of the nodes. A call stands where the first contraction of it did: what it reads is there."""
    seen: set[tuple[str | None, ...]] = set()
    positions = {ir.outs(node)[0]: k for k, node in enumerate(nodes) if len(ir.outs(node)) == 1}
    for first, node in enumerate(nodes):
        shared = node.shared_call if ir.is_contraction(node) and node.vendor is not None else None
        if shared is None or shared.call.outs in seen or not ir.is_contraction(node):
            continue
        seen.add(shared.call.outs)
        others = (out for out in shared.call.outs if out is not None and positions.get(out, -1) > first)
        members = (node.out, *(out for out in others if _is_left(nodes[positions[out]], shared, graph)))
        if len(members) > 1:
            yield Merged(shared.giving(members), members)


def _is_left(node: ir.Node, shared: ir.SharedCall, graph: ir.Graph) -> bool:
    """Whether the library may compute a node: a contraction that no template has, or a sum in memory of its own."""
    if ir.is_contraction(node):
        return node.vendor is not None
    buffer = graph.buffers[ir.outs(node)[0]]
    return shared.sums and isinstance(node, ir.Pointwise | ir.Reduction) and buffer.alias_of is None
