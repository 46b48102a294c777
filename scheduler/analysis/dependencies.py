"""Which nodes of a graph somebody reads, and the order that data and mutation impose on them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

from kgen import errors
from kgen.ir import nodes as ir
from kgen.ir.index import Size
from kgen.scheduler.analysis.memo import memoised_for


def reads_of(node: ir.Node) -> tuple[str, ...]:
    """`ir.reads`, worked out once for a node that several transforms and attempts ask about."""
    return memoised_for(node, "reads of node", lambda: ir.reads(node))


def needed(graph: ir.Graph, nodes: Sequence[ir.Node], kinds: tuple[type[ir.Node], ...] = (ir.Pointwise,)) -> list[ir.Node]:
    """The nodes without those of some `kinds` that nobody reads."""
    read = ir.visible(graph)
    kept: list[ir.Node] = []
    for node in reversed(nodes):
        if isinstance(node, kinds) and read.isdisjoint(ir.outs(node)):
            continue
        read.update(reads_of(node))
        kept.append(node)
    return kept[::-1]


def edges(graph: ir.Graph) -> list[set[int]]:
    """``result[i]``: nodes that must run after node i. Linear in the number of reads.

    A reader of a buffer version follows its producer and precedes the node that overwrites it; who needs a size follows the
    call that finds it out; calls with effects keep their order.
    """
    producer: dict[str, int] = {}
    overwriter: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for out in ir.outs(node):
            producer[out] = i
        for old in overwritten(node):
            overwriter[old] = i
    after: list[set[int]] = [set() for _ in graph.nodes]
    below = _views_of_calls(graph)
    for i, node in enumerate(graph.nodes):
        for name in reads_of(node):
            for made in _made_by(graph, name, producer, i):
                after[made].add(i)
            after[i].update(_overwritten_by(graph, name, producer, overwriter) - {i})
            if name in below:
                after[i].update(_overwritten_below(graph, name, below, overwriter, i))
    _keep_effects_in_order(graph, after)
    _add_size_edges(graph, after)
    return after


def _made_by(graph: ir.Graph, name: str, producer: dict[str, int], reader: int) -> list[int]:
    """The nodes that `reader` waits for: what makes the buffer, or each of its parts, or else what it aliases, for an alias is
    there with its base."""
    for version in (name, graph.buffers[name].alias_of):
        if version is None:
            continue
        makers = [producer[one] for one in (version, *graph.buffers[version].parts) if one in producer]
        if makers and makers != [reader]:
            return makers
    return []


def _overwritten_by(graph: ir.Graph, name: str, producer: dict[str, int], overwriter: dict[str, int]) -> set[int]:
    """The nodes that change what a reader of `name` must see first."""
    found = {overwriter.get(name)}
    if name not in producer:  # another view of a storage: read it before the storage changes
        found.add(overwriter.get(graph.buffers[name].alias_of or name))
    return {i for i in found if i is not None}


def _views_of_calls(graph: ir.Graph) -> dict[str, tuple[str, ...]]:
    """For each result of a call that may be a view: the buffers that it may be a view of."""
    calls = [call for call in map(ir.call_of, graph.nodes) if call is not None]
    return {out: viewed for call in calls if (viewed := ir.viewed(call)) for out in call.outs if out is not None}


def _overwritten_below(
    graph: ir.Graph, name: str, below: dict[str, tuple[str, ...]], overwriter: dict[str, int], reader: int
) -> set[int]:
    """The later nodes that change the storage which `name` is a view of. A reader behind a write got a copy while lowering."""
    found: set[int] = set()
    pending = [name]
    while pending:
        for under in below.get(pending.pop(), ()):
            base = graph.buffers[under].alias_of or under
            found.update(i for i in (overwriter.get(under), overwriter.get(base)) if i is not None and i > reader)
            pending.append(under)
    return found


def _keep_effects_in_order(graph: ir.Graph, after: list[set[int]]) -> None:
    calls = [i for i, node in enumerate(graph.nodes) if isinstance(node, ir.Extern) and node.effect]
    for earlier, later in pairwise(calls):
        after[earlier].add(later)


def _add_size_edges(graph: ir.Graph, after: list[set[int]]) -> None:
    """Who needs a size that a call finds out runs after that call, and after the checks of the size that stand before it."""
    binder = {s: i for i, node in enumerate(graph.nodes) if isinstance(node, ir.Extern) for s, _, _ in node.binds}
    first: dict[Size, list[int]] = {s: [i] for s, i in binder.items()}
    for i, node in enumerate(graph.nodes) if binder else ():
        used = ir.sizes_used(graph, node) & binder.keys()
        for call in {call for size in used for call in (binder[size], *first[size])} - {i}:
            after[call].add(i)
        if is_check(node):
            for size in used:
                first[size].append(i)


def is_check(node: ir.Node) -> bool:
    """Whether the node is a call that does nothing but raise where its numbers are not as they must be."""
    return isinstance(node, ir.Extern) and node.effect and not ir.outs(node) and not ir.reads(node)


def overwritten(node: ir.Node) -> tuple[str, ...]:
    """Buffer versions whose storage the node changes."""
    if isinstance(node, ir.Scatter):
        return (node.target,)
    call = ir.call_of(node)
    return () if call is None else tuple(old for old, _ in call.mutates)


def topological(after: list[set[int]], what: str) -> list[int]:
    """Node numbers in an order that respects `after`, otherwise close to program order."""
    waiting = [0] * len(after)
    for targets in after:
        for t in targets:
            waiting[t] += 1
    ready = [i for i, n in enumerate(waiting) if n == 0]
    heapq.heapify(ready)
    out: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        out.append(i)
        for t in after[i]:
            waiting[t] -= 1
            if waiting[t] == 0:
                heapq.heappush(ready, t)
    if len(out) != len(after):
        raise errors.InvalidIR(
            stage="lower", node=what, problem="a value is read both before and after it is overwritten (cycle)"
        )
    return out
