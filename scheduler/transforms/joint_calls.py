"""Results that the library gives in one call, such as the gradients of a convolution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kgen.ir import nodes as ir
from kgen.scheduler.protocol import Draft, Transform
from kgen.verdict import Outcome, Reason, Verdict


class JointCalls(Transform):
    """Has the library compute in one call what templates leave of the results that it gives in one. Sums and copies among these
    are nodes like any other only where no contraction of the call is left to the library."""

    name = "joint calls"

    def apply(self, draft: Draft) -> None:
        found = list(joint_calls(draft.nodes, draft.graph))
        calls = {one.members[0]: one.call for one in found}
        gone = {out for one in found for out in one.members[1:]}
        kept = (node for node in draft.nodes if gone.isdisjoint(ir.outs(node)))
        draft.nodes = [calls.get(node.out, node) if ir.is_contraction(node) else node for node in kept]
        draft.verdicts += [
            Verdict(one.members[0], other, Outcome.FUSED, Reason.LIBRARY_JOINS, detail=str(one.call.target))
            for one in found for other in one.members[1:]
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joint:
    """One call, and the results that it gives, the one that is made first in front."""

    call: ir.Extern
    members: tuple[str, ...]


def joint_calls(nodes: Sequence[ir.Node], graph: ir.Graph) -> Iterator[Joint]:
    """The calls for several of the nodes. A call stands where the first contraction of it did: what it reads is there."""
    seen: set[tuple[str | None, ...]] = set()
    places = {ir.outs(node)[0]: place for place, node in enumerate(nodes) if len(ir.outs(node)) == 1}
    for first, node in enumerate(nodes):
        if not ir.is_contraction(node) or node.vendor is None or node.joint is None or node.joint.call.outs in seen:
            continue
        seen.add(node.joint.call.outs)
        others = (out for out in node.joint.call.outs if out is not None and places.get(out, -1) > first)
        members = (node.out, *(out for out in others if _is_left(nodes[places[out]], graph)))
        if len(members) > 1:
            yield Joint(node.joint.giving(members), members)


def _is_left(node: ir.Node, graph: ir.Graph) -> bool:
    """Whether the library may compute a node: a contraction that no template has, or a sum in memory of its own."""
    if ir.is_contraction(node):
        return node.vendor is not None
    buffer = graph.buffers[ir.outs(node)[0]]
    return isinstance(node, ir.Pointwise | ir.Reduction) and buffer.alias_of is None
