"""A minimal cut of a directed graph with integer capacities, by Dinic's algorithm (1970)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

__all__ = ["INFINITE", "SINK", "SOURCE", "min_cut"]

SOURCE, SINK = 0, 1
# More than any sum of capacities: an edge that no minimal cut has, unless all cuts have such an edge.
INFINITE = 1 << 62


def min_cut(count: int, edges: Iterable[tuple[int, int, int]]) -> frozenset[int]:
    """The nodes on the source's side of a minimal cut, as many as there can be. Nodes are numbers below `count`; an edge is
    (from, to, capacity) and is cut where only its first node is on the source's side."""
    flow = _Flow(count, edges)
    while flow.find_levels():
        flow.saturate()
    return frozenset(range(count)) - flow.before_sink()


class _Flow:
    """Residual capacities: edge k and its reverse k ^ 1 have neighbouring numbers."""

    def __init__(self, count: int, edges: Iterable[tuple[int, int, int]]) -> None:
        self.count = count
        self.ends: list[int] = []
        self.left: list[int] = []
        self.edges: list[list[int]] = [[] for _ in range(count)]
        self.levels: list[int] = []
        for start, end, capacity in edges:
            for node, other, given in ((start, end, capacity), (end, start, 0)):
                self.edges[node].append(len(self.ends))
                self.ends.append(other)
                self.left.append(given)

    def find_levels(self) -> bool:
        """Notes how far nodes are from the source; whether the sink is reached."""
        self.levels = [-1] * self.count
        self.levels[SOURCE] = 0
        pending = deque([SOURCE])
        while pending:
            node = pending.popleft()
            for edge in self.edges[node]:
                if self.left[edge] and self.levels[self.ends[edge]] < 0:
                    self.levels[self.ends[edge]] = self.levels[node] + 1
                    pending.append(self.ends[edge])
        return self.levels[SINK] >= 0

    def saturate(self) -> None:
        """Sends flow along shortest paths until each of them has a full edge."""
        following = [0] * self.count
        path: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                self._send(path)
                path, node = [], SOURCE
            edge = self._next_edge(node, following)
            if edge is not None:
                path.append(edge)
                node = self.ends[edge]
            elif not path:
                return
            else:  # a dead end
                node = self.ends[path.pop() ^ 1]
                following[node] += 1

    def _next_edge(self, node: int, following: list[int]) -> int | None:
        own = self.edges[node]
        while following[node] < len(own):
            edge = own[following[node]]
            if self.left[edge] and self.levels[self.ends[edge]] == self.levels[node] + 1:
                return edge
            following[node] += 1
        return None

    def _send(self, path: list[int]) -> None:
        amount = min(self.left[edge] for edge in path)
        for edge in path:
            self.left[edge] -= amount
            self.left[edge ^ 1] += amount

    def before_sink(self) -> set[int]:
        """The nodes from which more could still flow to the sink."""
        found, pending = {SINK}, [SINK]
        while pending:
            for edge in self.edges[pending.pop()]:
                if self.left[edge ^ 1] and self.ends[edge] not in found:
                    found.add(self.ends[edge])
                    pending.append(self.ends[edge])
        return found
