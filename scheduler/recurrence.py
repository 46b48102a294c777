"""Rejections that come back layer by layer.

What one layer does without changes the kernels of the next, of which the same is then rejected in the next attempt: twelve
layers took twelve attempts, each at a schedule of all of them. What was rejected at two attempts in equal surroundings, for one
reason, is rejected wherever else they are the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field, replace

from kgen.ir import nodes as ir
from kgen.scheduler.analysis.surroundings import surroundings
from kgen.scheduler.protocol import Attempt, Candidate, Changes
from kgen.verdict import Verdict

# Attempts at which a rejection has come back. One of them may be that of a network's first or last layer.
COME_BACK = 2


@dataclass(slots=True)
class Recurrence:
    """Which rejections there were, of each transform, around nodes in which surroundings, and for which reason: at how many
    attempts."""

    attempts: Counter[Hashable] = field(default_factory=Counter)

    def spread(self, changes: Changes, graph: ir.Graph, attempt: Attempt) -> Changes:
        """The changes of one more attempt at a graph, with the rejections of what stands in equal surroundings, where they come
        back. What the attempt does not make, as what is within programs, needs no decision."""
        labels = surroundings(graph)
        found: dict[Hashable, tuple[Candidate, Verdict]] = {}
        for one, why in changes.rejected.items():
            if one.target in labels:
                found.setdefault((one.transform, labels[one.target], why.outcome, why.reason), (one, why))
        self.attempts.update(found.keys())
        again = [both for key, both in found.items() if self.attempts[key] >= COME_BACK]
        if not again:
            return changes
        equals = defaultdict[Hashable, list[str]](list)
        for name in (out for node in attempt.graph.nodes for out in ir.outs(node)):
            if name in labels:
                equals[labels[name]].append(name)
        more = {
            Candidate(one.transform, name): _of(why, one.target, name)
            for one, why in again
            for name in equals[labels[one.target]]
            if attempt.decisions.is_open(one.transform, name)
        }
        return replace(changes, rejected={**more, **changes.rejected})


def _of(why: Verdict, target: str, name: str) -> Verdict:
    """The verdict on a candidate around another node."""
    producer, consumer = (name if one == target else one for one in (why.producer, why.consumer))
    return replace(why, producer=producer, consumer=consumer, measured=())
