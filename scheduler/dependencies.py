"""The order that data and mutation impose on the nodes of a graph."""

from __future__ import annotations

import heapq

from kgen import errors, ir


def edges(graph: ir.Graph) -> list[set[int]]:
    """``result[i]``: nodes that must run after node i. Linear in the number of reads.

    A reader of a buffer version follows its producer and precedes the node that overwrites it; calls with effects keep
    their order.
    """
    producer: dict[str, int] = {}
    overwriter: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for out in ir.outs(node):
            producer[out] = i
        for old in overwritten(node):
            overwriter[old] = i
    after: list[set[int]] = [set() for _ in graph.nodes]
    effect: int | None = None
    for i, node in enumerate(graph.nodes):
        for name in ir.reads(node):
            for version in _versions(graph, name):
                if version in producer and producer[version] != i:
                    after[producer[version]].add(i)
                    break
            later = overwriter.get(name)
            if later is not None and later != i:
                after[i].add(later)
            if name not in producer:  # another view of a storage: read it before the storage changes
                for alias in _aliases(graph, name):
                    writer = overwriter.get(alias)
                    if writer is not None and writer != i:
                        after[i].add(writer)
        if isinstance(node, ir.Extern) and node.effect:
            if effect is not None:
                after[effect].add(i)
            effect = i
    return after


def _versions(graph: ir.Graph, name: str) -> tuple[str, ...]:
    """The buffer, then what it aliases: an alias is defined when its base is."""
    base = graph.buffers[name].alias_of
    return (name,) if base is None else (name, base)


def _aliases(graph: ir.Graph, name: str) -> tuple[str, ...]:
    base = graph.buffers[name].alias_of
    return () if base is None else (base,)


def overwritten(node: ir.Node) -> tuple[str, ...]:
    """Buffer versions whose storage the node changes."""
    if isinstance(node, ir.Scatter):
        return (node.target,)
    call = node.vendor if isinstance(node, ir.Contraction | ir.Attention) else node
    return tuple(old for old, _ in call.mutates) if isinstance(call, ir.Extern) else ()


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
