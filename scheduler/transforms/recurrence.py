"""Rejections that come back layer by layer.

What one layer does without changes the kernels of the next, of which the same is then rejected in the next attempt: twelve
layers took twelve attempts, each at a schedule of all of them. What was rejected at two attempts in equal surroundings, for one
reason, is rejected wherever else they are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace

from kgen.ir import nodes as ir
from kgen.scheduler.analysis.surroundings import surroundings
from kgen.scheduler.protocol import Attempt, Candidate, Changes
from kgen.verdict import Verdict


def spread(changes: Changes, attempt: Attempt) -> Changes:
    """The changes of one more attempt, with the rejections of what stands in equal surroundings, where they come back: where an
    earlier attempt rejected one in such, for the same reason. What the attempt does not make, as what is within programs, needs
    no decision."""
    if not (changes.rejected and attempt.decisions.rejected):
        return changes
    labels = surroundings(attempt.draft.given)

    def kind(one: Candidate, why: Verdict) -> Hashable:
        return one.transform, labels[one.target], why.outcome, why.reason

    earlier = {kind(one, why) for one, why in attempt.decisions.rejected.items() if one.target in labels}
    found = {kind(one, why): (one, why) for one, why in changes.rejected.items() if one.target in labels}
    again = [both for key, both in found.items() if key in earlier]
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
