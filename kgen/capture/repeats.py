"""Finds the iterations of loops that Dynamo has unrolled: runs of blocks of nodes with the same operators.

Blocks are isomorphic if they have the same operators, and if each argument is the same in all of them, the result of the same
node of the block, or a number that advances from block to block.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

__all__ = [
    "LEAST", "Carried", "Column", "Each", "Inside", "Lifted", "Refusals", "Repeat", "Search", "Step", "find", "find_carried",
    "mapped", "periods", "runs", "shape_of", "turned",
]  # fmt: skip

# Two equal nodes are no loop yet.
LEAST = 3
# So many occurrences of an operator back, the node's counterpart in the block before may be.
LOOK_BACK = 6
# So many lengths of blocks are tried.
PERIODS = 32
# So many beginnings of a block are tried.
CUTS = 6
# From so many blocks back, a value may come.
DISTANCE = 4


@dataclass(frozen=True, slots=True)
class Inside:
    """The result of the node at `position` of the same block."""

    position: int


@dataclass(frozen=True, slots=True)
class Column:
    """A number in each block. It advances by one step, or as those of a loop in a loop do."""

    values: tuple[Any, ...]

    @property
    def rhythm(self) -> tuple[int, Any, Any]:
        """(m, outer, inner): in block k, `values[0] + outer * (k // m) + inner * (k % m)`. m is 0 for one step, `inner`."""
        first, inner = self.values[0], self.values[1] - self.values[0]
        m = next((k for k, value in enumerate(self.values) if repr(value) != repr(first + k * inner)), 0)
        return m, self.values[m] - first if m else 0, inner


@dataclass(frozen=True, slots=True)
class Lifted:
    """A node in front of the blocks for each of them, by an operator that `step` describes."""

    step: Step


@dataclass(frozen=True, slots=True)
class Each:
    """Another node in front of the blocks for each of them."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """What the node at `position` gives `len(first)` blocks earlier. Until there is one, blocks have `first` in its place."""

    position: int
    first: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One node of all blocks; arguments are trees over constants, nodes in front of the blocks, Inside, Column and Lifted.
    Where blocks may need each other's results (`find_carried`), there are Each and Carried, too."""

    nodes: tuple[Node, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` blocks, one behind the other. `nested` says whether some numbers advance as those of a loop in a loop."""

    count: int
    steps: tuple[Step, ...]
    nested: bool = False

    @property
    def nodes(self) -> Iterator[Node]:
        """Those of all blocks, in order."""
        return (step.nodes[k] for k in range(self.count) for step in self.steps)


def turned(repeat: Repeat) -> Repeat:
    """The blocks in reverse order."""

    def leaf(one: Any) -> Any:
        if isinstance(one, Column):
            return Column(one.values[::-1])
        return Lifted(step(one.step)) if isinstance(one, Lifted) else one

    def step(one: Step) -> Step:
        return Step(one.nodes[::-1], mapped(one.args, leaf), mapped(one.kwargs, leaf))

    return Repeat(repeat.count, tuple(map(step, repeat.steps)))


def mapped(tree: Any, change: Callable[[Any], Any]) -> Any:
    """The tree with its leaves changed; slices are trees, too."""
    if isinstance(tree, slice):
        return slice(*(mapped(one, change) for one in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple | list):
        made = [mapped(one, change) for one in tree]
        return made if isinstance(tree, list) else tuple(made)
    if isinstance(tree, dict):
        return {name: mapped(one, change) for name, one in tree.items()}
    return change(tree)


# ---- isomorphic nodes --------------------------------------------------------------------------------------------------


def _signature(node: Node) -> Any:
    """What two nodes have in common that may be counterparts in two blocks; for others, something unique."""
    if node.op not in ("call_function", "call_method"):
        return id(node)
    kwargs = node.kwargs
    return node.op, node.target, shape_of(node.args, _leaf_shape), shape_of(kwargs, _leaf_shape) if kwargs else None


def shape_of(tree: Any, leaf: Callable[[Any], Hashable]) -> Hashable:
    """Equal for trees of one form with leaves for which `leaf` gives the same."""
    if not isinstance(tree, _TREES):
        return leaf(tree)
    if isinstance(tree, slice):
        return "slice", shape_of((tree.start, tree.stop, tree.step), leaf)
    if isinstance(tree, dict):
        return "dict", *[(name, shape_of(one, leaf)) for name, one in tree.items()]
    # most are arguments, which are no trees themselves
    return type(tree).__name__, *[shape_of(one, leaf) if isinstance(one, _TREES) else leaf(one) for one in tree]


_TREES = (tuple, list, slice, dict)


def _leaf_shape(leaf: Any) -> Any:
    if isinstance(leaf, Node):
        return Node
    if type(leaf) in (int, float):
        return type(leaf)
    return type(leaf), repr(leaf)


class Refusals:
    """Repeats that are left as they are; nodes of others that are `erased` since the search began."""

    def __init__(self) -> None:
        self.erased = set[Node]()
        self._of = dict[Node, set[tuple[Node, int]]]()

    def add(self, repeat: Repeat) -> None:
        """Notes a repeat. Those of its nodes that begin elsewhere, or take several iterations as one, are covered by it."""
        for node in repeat.nodes:
            self._of.setdefault(node, set()).add((repeat.steps[0].nodes[0], len(repeat.steps)))

    def covers(self, first: Node, last: Node, period: int) -> bool:
        """Whether blocks of a length between two nodes are such a repeat."""
        both = self._of.get(first, set()) & self._of.get(last, set())
        return any(period % length == 0 for _, length in both)


class Search:
    """What may be unrolled loops of a graph, until the graph changes."""

    def __init__(self, gm: GraphModule, refused: Refusals | None = None) -> None:
        self.refused = refused or Refusals()
        self.refused.erased.clear()
        self._found = find(list(gm.graph.nodes), self.refused)
        self._first = next(self._found, None)

    def __bool__(self) -> bool:
        return self._first is not None

    def __iter__(self) -> Iterator[Repeat]:
        return iter(()) if self._first is None else itertools.chain((self._first,), self._found)


def find(nodes: Sequence[Node], refused: Refusals) -> Iterator[Repeat]:
    """Repeats, the shortest blocks first, but none of what has been refused."""
    numbers = dict[Any, int]()
    ids = [numbers.setdefault(_signature(node), len(numbers)) for node in nodes]
    order = {node: position for position, node in enumerate(nodes)}
    for period in periods(ids):
        for begin, end in runs(ids, period):
            yield from _in_run(_Blocks(nodes, order, period), begin, end, refused)


def find_carried(nodes: Sequence[Node]) -> list[Repeat]:
    """Repeats whose blocks may need each other's results, those first that leave the fewest nodes."""
    numbers = dict[Any, int]()
    ids = [numbers.setdefault(_signature(node), len(numbers)) for node in nodes]
    order = {node: position for position, node in enumerate(nodes)}
    found = list[Repeat]()
    for period in periods(ids):
        for begin, end in runs(ids, period):
            plain = list(_carried_in_run(_Blocks(nodes, order, period, carries=True), begin, end))
            found += plain
            if len(plain) > 1:
                blocks = _Blocks(nodes, order, period, carries=True, nested=True)
                found += [one for one in _carried_in_run(blocks, begin, end) if one.nested]
    return sorted(found, key=lambda one: (-(one.count - 1) * len(one.steps), len(one.steps)))


def _carried_in_run(blocks: _Blocks, begin: int, end: int) -> Iterator[Repeat]:
    """A block begins where the fewest values go from one to the next."""
    while end - begin >= LEAST * blocks.period:
        made = next((one for start in blocks.cuts(begin, end) if (one := blocks.longest(start, end)) is not None), None)
        if made is None:
            begin += blocks.period
        else:
            yield made
            begin = blocks.order[made.steps[-1].nodes[-1]] + 1


def periods(ids: Sequence[int]) -> list[int]:
    """Distances between equal ids that are frequent enough for blocks so long, the shortest first."""
    seen, found = dict[int, list[int]](), dict[int, int]()
    for position, one in enumerate(ids):
        before = seen.setdefault(one, [])
        for earlier in before[-LOOK_BACK:]:
            found[position - earlier] = found.get(position - earlier, 0) + 1
        before.append(position)
    often = [(count, period) for period, count in found.items() if count >= (LEAST - 1)]
    return sorted(period for _, period in sorted(often, reverse=True)[:PERIODS])


def runs(ids: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """Where each id equals the one a period later, from the first node up to behind the last, for at least `LEAST` blocks."""
    begin = 0
    for position in range(len(ids) - period + 1):
        if position < len(ids) - period and ids[position] == ids[position + period]:
            continue
        if position - begin >= (LEAST - 1) * period:
            yield begin, position + period
        begin = position + 1


def _in_run(blocks: _Blocks, begin: int, end: int, refused: Refusals) -> Iterator[Repeat]:
    """A loop may begin at any node of the run: what stands in front of it may look like its last nodes."""
    while end - begin >= LEAST * blocks.period:
        limit = (end - begin) // blocks.period
        least = blocks.nodes[begin : begin + LEAST * blocks.period]
        if not refused.erased.isdisjoint(least):
            begin += max(k for k, node in enumerate(least, 1) if node in refused.erased)
            continue
        known = refused.covers(least[0], least[-1], blocks.period)
        made = None if known else blocks.steps(begin, LEAST) and blocks.steps(begin, limit)
        if made:
            yield made
            begin += made.count * blocks.period
        else:
            begin += 1


# ---- arguments ---------------------------------------------------------------------------------------------------------


class _Ends(Exception):
    """Counterparts of which only the first few are equal."""

    def __init__(self, count: int) -> None:
        self.count = count


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The nodes of a graph as blocks of one length."""

    nodes: Sequence[Node]
    order: dict[Node, int]
    period: int
    carries: bool = False
    nested: bool = False

    def cuts(self, begin: int, end: int) -> list[int]:
        """Where a block may begin, in order of how many values are needed behind a block that begins a period later."""
        last = min(begin + self.period, end - LEAST * self.period + 1)
        changes = Counter[int]()
        for position in range(begin, min(begin + 2 * self.period, end)):
            used = max((self.order[user] for user in self.nodes[position].users), default=position)
            changes[position + 1] += 1
            changes[used + 1] -= 1
        live = list(itertools.accumulate(changes[position] for position in range(begin, last + self.period)))
        return sorted(range(begin, last), key=lambda start: live[start - begin + self.period])[:CUTS]

    def longest(self, begin: int, end: int) -> Repeat | None:
        """As many blocks as there are from a node on; None if there are too few."""
        return self.steps(begin, LEAST) and self.steps(begin, (end - begin) // self.period)

    def steps(self, begin: int, count: int) -> Repeat | None:
        """The longest repeat of up to `count` blocks that begins at a node; None if it is too short."""
        while count >= LEAST:
            try:
                steps = tuple(self._step(begin, begin + j, count) for j in range(self.period))
                return Repeat(count, steps, self.nested and _has_nested(steps))
            except _Ends as ends:
                count = ends.count
        return None

    def _step(self, begin: int, first: int, count: int) -> Step:
        return self._merged(begin, tuple(self.nodes[first + k * self.period] for k in range(count)))

    def _merged(self, begin: int, column: tuple[Node, ...]) -> Step:
        args = self._tree(begin, [node.args for node in column])
        return Step(column, args, self._tree(begin, [node.kwargs for node in column]))

    def _tree(self, begin: int, column: Sequence[Any]) -> Any:
        first = column[0]
        if isinstance(first, slice):
            parts = [[getattr(one, name) for one in column] for name in ("start", "stop", "step")]
            return slice(*(self._tree(begin, part) for part in parts))
        if isinstance(first, tuple | list):
            made = [self._tree(begin, part) for part in zip(*column, strict=True)]
            return made if isinstance(first, list) else tuple(made)
        if isinstance(first, dict):
            return {name: self._tree(begin, [one[name] for one in column]) for name in first}
        return self._node(begin, column) if isinstance(first, Node) else _constant(column, self.nested)

    def _node(self, begin: int, column: Sequence[Node]) -> Any:
        _all(isinstance(node, Node) for node in column)  # of a node that was erased meanwhile arguments are None
        positions = [self.order[node] for node in column]
        if positions[0] >= begin:
            _all(one == positions[0] + k * self.period for k, one in enumerate(positions))
            return Inside(positions[0] - begin)
        if self.carries and positions[-1] >= begin:
            return self._carried(begin, column, positions)
        if positions[1] == positions[0]:
            _all(one == positions[0] for one in positions)
            return column[0]
        _all(one < begin for one in positions)
        if self.carries:
            return self._lifted(begin, column) or Each(tuple(column))
        _all(node.target is operator.getitem and _signature(node) == _signature(column[0]) for node in column)
        return Lifted(self._merged(begin, tuple(column)))

    def _lifted(self, begin: int, column: Sequence[Node]) -> Lifted | None:
        """What reads one tensor or tuple, at indices that advance; None for other nodes."""
        first = column[0]
        if any(node.target is not operator.getitem or _signature(node) != _signature(first) for node in column):
            return None
        try:
            step = self._merged(begin, tuple(column))
        except _Ends:
            return None
        return Lifted(step) if isinstance(step.args[0], Node) else None

    def _carried(self, begin: int, column: Sequence[Node], positions: Sequence[int]) -> Carried:
        distance = next(k for k, one in enumerate(positions) if one >= begin)
        place = positions[distance]
        if distance > DISTANCE or place >= begin + self.period:
            raise _Ends(distance)
        behind = enumerate(positions[distance:])
        _all(itertools.chain([True] * distance, (one == place + k * self.period for k, one in behind)))
        return Carried(place - begin, tuple(column[:distance]))


def _has_nested(steps: Sequence[Step]) -> bool:
    found = list[bool]()
    mapped(
        [(step.args, step.kwargs) for step in steps],
        lambda leaf: found.append(bool(leaf.rhythm[0])) if isinstance(leaf, Column) else None,
    )
    return any(found)


def _constant(column: Sequence[Any], nested: bool) -> Any:
    """Numbers advance by one step from block to block; with `nested`, integers may as those of a loop in a loop. All else is
    the same in each block, as the signatures say."""
    first, second = column[0], column[1]
    if nested and type(first) is int and any(one != first for one in column):
        made = Column(tuple(column))
        m, outer, inner = made.rhythm
        _all(one == first + (outer * (k // m) + inner * (k % m) if m else inner * k) for k, one in enumerate(column))
        return made
    if type(first) not in (int, float) or repr(first) == repr(second):
        _all(repr(one) == repr(first) for one in column)
        return first
    step = second - first
    _all(repr(one) == repr(first + k * step) for k, one in enumerate(column))
    return Column(tuple(column))


def _all(conditions: Iterable[bool]) -> None:
    """Raises _Ends with the number of blocks in front of the first one for which the condition does not hold."""
    for count, holds in enumerate(conditions):
        if not holds:
            raise _Ends(count)
