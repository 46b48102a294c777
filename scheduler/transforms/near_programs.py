"""Why a program was not recognised where most of it stands: which operator is in its way, and on which line.

The search for a program (`recognition.py`) notes each place where it goes no further. Of these the one behind most steps says
what is missing. Where a softmax or a contraction was expected and something else was found, the nodes behind that are looked
through: only if the missing step is there, farther away, is the graph one that nearly matches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kgen.ir import nodes as ir
from kgen.ir import values as vs
from kgen.ir.index import Var
from kgen.ir.values import Value
from kgen.scheduler.transforms.graph_reader import MOST_NODES, Reader
from kgen.scheduler.transforms.softmax_form import bare
from kgen.verdict import Outcome, Reason, Verdict


@dataclass(frozen=True, slots=True)
class Miss:
    """Where the search for a program that ends in `end` went no further, behind so many `steps`: what was found in place of a
    softmax `along` loops, or of a contraction's element where there are none; or a `reason`, and the node in the way. What is
    in the way of most is never asked for: `late` finds both out where it is."""

    reader: Reader
    end: ir.Contraction
    steps: int
    found: Value | None = None
    along: Sequence[Var] = ()
    reason: Reason | None = None
    blocker: ir.Node | None = None
    late: Callable[[], tuple[Reason, ir.Node | None]] | None = None


def nearest(misses: Sequence[Miss]) -> list[Verdict]:
    """What is to be said of the programs of one contraction: of the one that stands there but for one thing, if there is."""
    most = max((one.steps for one in misses), default=0)
    found = (_verdict_of(one) for one in misses if one.steps == most)
    return list(itertools.islice((verdict for verdict in found if verdict is not None), 1))


def _verdict_of(miss: Miss) -> Verdict | None:
    """What is to be said of a program that stands there but for one thing; None where more is missing."""
    reason, blocker = (miss.reason, miss.blocker) if miss.late is None else miss.late()
    if reason is not None:
        return _verdict(miss, reason, _named(blocker))
    assert miss.found is not None
    if miss.along:
        return _no_softmax(miss, miss.found)
    way = _way(miss.reader, miss.found, ir.is_contraction)
    return None if not way else _blocked(miss, way) or _verdict(miss, Reason.STEP_TYPES, _named(way[-1]))


def _no_softmax(miss: Miss, found: Value) -> Verdict | None:
    """Where a softmax was expected: there is one, of contractions, before something else; or along another axis."""
    reader = miss.reader
    way = _way(reader, found, lambda node: _is_total(reader, node))
    if not way or not any(_way(reader, root, ir.is_contraction) for root in ir.roots(way[-1])):
        return None
    blocked = _blocked(miss, way)
    if blocked is not None:
        return blocked
    inside = [value for value in vs.topological([found]) if value is not found and reader.weights(value, miss.along)]
    after = next((value for value in vs.topological([found]) if any(arg in inside for arg in value.args)), None)
    if after is None:
        return _verdict(miss, Reason.NOT_SOFTMAX, _named(way[-1]))
    reason = Reason.STEP_TYPES if after.op == "cast" else Reason.NOT_SOFTMAX
    return _verdict(miss, reason, f"{after.op} of the weights, {_named(way[0] if len(way) > 1 else miss.end)}")


def _blocked(miss: Miss, way: Sequence[ir.Node]) -> Verdict | None:
    """The first node on the way to a step that is not elementwise."""
    blocker = next((node for node in way[:-1] if not isinstance(node, ir.Pointwise)), None)
    if blocker is None:
        return None
    reason = Reason.EXTERN_CALL if ir.call_of(blocker) is not None else Reason.NOT_ELEMENTWISE
    return _verdict(miss, reason, _named(blocker))


def _verdict(miss: Miss, reason: Reason, detail: str) -> Verdict:
    return Verdict(miss.end.out, "", Outcome.ILLEGAL, reason, detail=detail)


def _named(node: ir.Node | None) -> str:
    """A node by its operators and the user's line."""
    if node is None:
        return ""
    operators = ", ".join(node.origin.operators) or ir.outs(node)[0]
    return f"{operators} at {node.origin.line}" if node.origin.line else operators


def _is_total(reader: Reader, node: ir.Node) -> bool:
    """Whether a node is a sum of exponentials."""
    return isinstance(node, ir.Reduction) and node.op == "sum" and bare(reader.inlined(node.value)).op == "exp"


def _way(reader: Reader, value: Value, is_goal: Callable[[ir.Node], bool]) -> list[ir.Node]:
    """The nodes from one that a value reads to the nearest goal, through no contraction; empty where there is none."""
    ways = [[reader.makers[load.attr[0]]] for load in reader.loads(value) if load.attr[0] in reader.makers]
    seen = {id(way[0]) for way in ways}
    for way in ways:  # grows on the way
        if is_goal(way[-1]):
            return way
        makers = (reader.makers[name] for name in reader.reads(way[-1]) if name in reader.makers)
        for maker in makers if not ir.is_contraction(way[-1]) else ():
            if id(maker) not in seen and len(ways) < MOST_NODES:
                seen.add(id(maker))
                ways.append([*way, maker])
    return []
