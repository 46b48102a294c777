"""Verdicts of rewrites, kept with the nodes that they are about: graphs are split and copied with their nodes' meta."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from kgen.verdict import Verdict

__all__ = ["DONATED", "NOTES", "note", "notes"]

NOTES = "kgen_verdicts"
# Of a call of a higher-order operator: its results -> the operands that its bodies turn into them, by writing into them.
DONATED = "kgen_donated"


def note(node: Node, verdict: Verdict) -> None:
    """Adds a verdict to a node's."""
    node.meta[NOTES] = (*node.meta.get(NOTES, ()), verdict)


def notes(gm: GraphModule) -> list[Verdict]:
    """What rewrites have said of a graph's calls. What another graph computes has its notes there."""
    return [one for node in gm.graph.nodes if node.op == "call_function" for one in node.meta.get(NOTES, ())]
