"""Tensors from in front of a loop that its iterations write into: `b[t] = torch.tanh(b[t - 1] + x[t])`.

Such a buffer is carried from iteration to iteration. The body copies it, writes into the copy, and gives that. Parts whose
position depends on the iteration have no view in a body that all iterations share: they are read by `index`, whenever something
reads them, and what is written into them is put back by `index_put_`. So a read always sees what was written before it.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from kgen.capture.accesses import Offsets, offsets_of
from kgen.capture.batch_body import counted
from kgen.capture.batch_views import Writer
from kgen.capture.operators import PLAIN
from kgen.capture.regions import Refused, columns, example, index_of
from kgen.capture.repeats import Carried, Column, Inside, Repeat, Step, mapped
from kgen.capture.torch_adapter import storage_of
from kgen.capture.trial import Trial

__all__ = ["Buffers", "Memory", "Spot"]

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Spot:
    """Where iterations are along a dimension of a tensor."""

    offsets: Offsets
    device: torch.device

    def rows(self, writer: Writer) -> Node:
        """Indices, a row for each iteration: (count,), or (count, length) for a slice, int64."""
        node = counted(writer, Column(self.offsets.starts), self.device)
        if not self.offsets.kept:
            return node
        within = writer.method("mul", writer.call(torch.arange, self.offsets.length, device=self.device), self.offsets.step)
        return writer.method("add", writer.method("unsqueeze", node, 1), within)


class Buffers:
    """What the iterations of a repeat write of what is there before it. Raises Refused where that is not clear.

    `bases` are the tensors, `aliases` positions of steps that give parts of them, `names` of those that give all of one, and
    `written` positions of steps that write, each with the arguments that it writes into: `Inside` or the base itself. `repeat`
    has the bases in the place of `names`. What calls write is added to `known`, and found there."""

    def __init__(self, writer: Writer, repeat: Repeat, known: dict[Hashable, list[int]]) -> None:
        self.repeat = repeat
        self.inside = frozenset(repeat.nodes)
        self.bases = dict[int, Node]()
        self.aliases = dict[int, int]()
        self.written = dict[int, tuple[Any, ...]]()
        self.names = dict[int, Node]()
        found = {k: nodes for k, step in enumerate(repeat.steps) if (nodes := _written_by(writer, step, known))}
        self.changed = frozenset(storage for node in itertools.chain(*found.values()) for storage in _storages(node))
        given = self.changed.intersection(storage for node in self._given() for storage in _storages(node))
        if given:
            self._note(given, found)

    def __bool__(self) -> bool:
        return bool(self.bases)

    def _given(self) -> Iterator[Node]:
        """Nodes in front of the loop that its steps take."""
        every = itertools.chain(*(node.all_input_nodes for node in self.inside))
        return iter(dict.fromkeys(node for node in every if node not in self.inside))

    def _note(self, written: frozenset[int], found: dict[int, list[Node]]) -> None:
        for node in self._given():
            for storage in written.intersection(_storages(node)):
                if self.bases.setdefault(storage, node) is not node:
                    raise Refused(f"{node.name} shares memory with {self.bases[storage].name}, which iterations write")
        for base in self.bases.values():
            if not isinstance(example(base), torch.Tensor) or not example(base).is_contiguous():
                raise Refused(f"{base.name} is written, and is no contiguous tensor")
        for position, step in enumerate(self.repeat.steps):
            self._note_alias(position, step)
        self.repeat = self._by_name()
        order = {step.nodes[0]: position for position, step in enumerate(self.repeat.steps)}
        for position, nodes in found.items():
            targets = [self._named(order[node]) if node in order else node for node in nodes]
            self.written[position] = tuple(leaf for leaf in targets if self.storage(leaf) is not None)
        self.written = {position: targets for position, targets in self.written.items() if targets}

    def _named(self, position: int) -> Any:
        return self.names.get(position, Inside(position))

    def _note_alias(self, position: int, step: Step) -> None:
        if step.nodes[0].target is operator.setitem:
            return
        of = [frozenset(self.bases).intersection(_storages(node)) for node in step.nodes]
        if any(one != of[0] for one in of):
            raise Refused(f"{step.nodes[0].name} shares other memory in other iterations")
        if not of[0]:
            return
        if not isinstance(example(step.nodes[0]), torch.Tensor):
            raise Refused(f"{step.nodes[0].name} gives several parts of what iterations write")
        (self.aliases[position],) = of[0]
        base = self.bases[self.aliases[position]]
        if all(_place(node) == _place(base) for node in step.nodes):
            self.names[position] = base

    def _by_name(self) -> Repeat:
        """The repeat with buffers in the place of what is all of one: `b += 1` gives `b`. Raises Refused."""

        def leaf(one: Any) -> Any:
            if isinstance(one, Inside):
                return self._named(one.position)
            if isinstance(one, Carried):
                base = self.names.get(one.position)
                if base is not None and all(node is base for node in one.first):
                    return base
                if not frozenset(self.bases).isdisjoint(itertools.chain(*map(_storages, one.first))):
                    raise Refused(f"{one.first[0].name} is carried, and shares memory with what iterations write")
            return one

        steps = [Step(step.nodes, mapped(step.args, leaf), mapped(step.kwargs, leaf)) for step in self.repeat.steps]
        return replace(self.repeat, steps=tuple(steps))

    def storage(self, leaf: Any) -> int | None:
        """The written memory that an argument is a part of."""
        if isinstance(leaf, Inside):
            return self.aliases.get(leaf.position)
        if isinstance(leaf, Node):
            return next((storage for storage, base in self.bases.items() if base is leaf), None)
        return None

    @property
    def touched(self) -> frozenset[int]:
        """Positions of steps that read or write a buffer."""
        found = {*self.aliases, *self.written}
        for position, step in enumerate(self.repeat.steps):
            leaves = list[Any]()
            mapped((step.args, step.kwargs), leaves.append)
            if any(self.storage(leaf) is not None for leaf in leaves):
                found.add(position)
        return frozenset(found)

    @staticmethod
    def moves(step: Step) -> bool:
        """Whether a step's own index differs from iteration to iteration."""
        found = list[bool]()
        mapped((index_of(step) or (None, ()))[1], lambda leaf: found.append(isinstance(leaf, Column)))
        return any(found)

    def spots(self, step: Step) -> list[Spot]:
        """Where a step whose index moves is, along each dimension that its index moves along."""
        base, _ = index_of(step) or (None, ())
        return [Spot(one, self.device(base)) for one in self.offsets(step) if one.moves]

    def is_read(self, position: int) -> bool:
        """Whether a step takes a copy of another part in each iteration, of what nobody writes as long as it is needed."""
        step = self.repeat.steps[position]
        if not self.moves(step) or step.nodes[0].target is operator.setitem or position in self.aliases:
            return False
        base, _ = index_of(step) or (None, ())
        return isinstance(base, Inside | Node) and self.changed.isdisjoint(_storages(step.nodes[0]))

    def device(self, leaf: Any) -> torch.device:
        """Of the tensor that an argument is."""
        device: torch.device = example(self._first(leaf)).device
        return device

    def _first(self, leaf: Any) -> Node:
        node = self.repeat.steps[leaf.position].nodes[0] if isinstance(leaf, Inside) else leaf
        if not isinstance(node, Node) or not isinstance(example(node), torch.Tensor):
            raise Refused("an index that moves is of no tensor")
        return node

    def sizes(self, leaf: Any) -> Sequence[int]:
        """Of the tensor that an argument is."""
        return tuple(example(self._first(leaf)).shape)

    def offsets(self, step: Step) -> list[Offsets]:
        """What a step's own index takes of its tensor. Raises Refused where iterations take parts of other sizes."""
        base, index = index_of(step) or (None, ())
        offsets = offsets_of(self.sizes(base), columns(index, self.repeat.count))
        if offsets is None:
            raise Refused(f"{step.nodes[0].name} takes parts of other sizes in other iterations, or not by numbers and slices")
        moving = [d for d, one in enumerate(offsets) if one.moves]
        if any(one.kept for d, one in enumerate(offsets) if moving and moving[0] < d < moving[-1] and not one.moves):
            raise Refused(f"{step.nodes[0].name} moves along dimensions that are no neighbours")
        return offsets


def _entry(offsets: Offsets, size: int) -> Any:
    start, length, step = offsets.starts[0], offsets.length, offsets.step
    if not offsets.kept:
        return start
    return slice(None) if (start, length, step) == (0, size, 1) else slice(start, start + length * step, step)


def _written_by(writer: Writer, step: Step, known: dict[Hashable, list[int]]) -> list[Node]:
    """The arguments that the first iteration's node writes into."""
    node = step.nodes[0]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise Refused(f"{node.name} is a higher-order operator")
    key, given = _call_of(node), node.all_input_nodes
    found = _tried(writer, node) if key is None else known.get(key)
    if found is None:
        found = known[key] = _tried(writer, node)
    return [given[k] for k in found]


def _tried(writer: Writer, node: Node) -> list[int]:
    """Which of its inputs a call writes into. Each of them gets memory of its own to find out."""
    with writer.mode, torch.no_grad():
        given = {one: pytree.tree_map_only(torch.Tensor, _like, example(one)) for one in node.all_input_nodes}
        args, kwargs = map_arg((node.args, node.kwargs), given.__getitem__)
        with Trial(set(), layouts=False) as trial:
            if node.op == "call_method":
                getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                node.target(*args, **kwargs)  # type: ignore[operator]
    return [k for k, value in enumerate(given.values()) if not trial.written.isdisjoint(_storages_of(value))]


def _call_of(node: Node) -> Hashable:
    """Equal for calls of one function with equal numbers and tensors of one layout; None of those that are not compared."""
    leaves, shape = pytree.tree_flatten((node.args, node.kwargs))
    order = {one: k for k, one in enumerate(node.all_input_nodes)}
    described = list[Hashable]()
    for leaf in leaves:
        value = example(leaf) if isinstance(leaf, Node) else None
        if isinstance(value, torch.Tensor) and all(type(one) is int for one in (*value.shape, *value.stride())):
            described.append((order[leaf], value.shape, value.stride(), value.dtype, value.device, type(value)))
        elif type(leaf) is float or type(leaf) in PLAIN:
            described.append((type(leaf), leaf))
        else:
            return None
    return node.op, node.target, shape, tuple(described)


def _like(value: torch.Tensor) -> torch.Tensor:
    """A tensor of this kind with memory of its own."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _place(node: Node) -> tuple[Any, ...]:
    """Which elements of its memory a tensor has."""
    value = example(node)
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype


def _storages(node: Node) -> list[int]:
    return _storages_of(node.meta.get("example_value"))


def _storages_of(value: Any) -> list[int]:
    return [storage_of(one) for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


# ---- in the body ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a buffer as a node: a view of its copy in the body, or elements read at `indices` of `source`."""

    node: Node
    source: Node | None = None
    indices: tuple[Node | None, ...] = ()


class Memory:
    """The copies of buffers that a body writes into, and parts of them: as nodes that hold what was written last.

    `rows` gives the placeholder of a Spot, `replay` writes a step with its arguments."""

    def __init__(self, graph: Graph, buffers: Buffers, rows: Callable[[Hashable], Node], replay: Callable[[int], Node]) -> None:
        self.graph, self.buffers, self.rows, self.replay = graph, buffers, rows, replay
        self.copies = dict[int, Node]()
        self._parts = dict[int, tuple[_Part, int]]()
        self._same = dict[int, Any]()  # results of operators that give what they have written into
        self._version = dict.fromkeys(buffers.bases, 0)

    def add(self, storage: int, given: Node) -> None:
        """A buffer, which the body is given as a placeholder."""
        self.copies[storage] = self.graph.call_method("clone", (given,))

    def holds(self, leaf: Any) -> bool:
        return self.buffers.storage(leaf) is not None

    def value(self, leaf: Any) -> Node:
        """What an argument is now."""
        if isinstance(leaf, Node):
            return self.copies[self._storage(leaf)]
        return self._part(leaf.position).node

    def _storage(self, leaf: Any) -> int:
        storage = self.buffers.storage(leaf)
        assert storage is not None
        return storage

    def _part(self, position: int) -> _Part:
        if position in self._same:
            leaf = self._same[position]
            return _Part(self.value(leaf))
        version = self._version[self.buffers.aliases[position]]
        known = self._parts.get(position)
        if known is None or known[1] != version:
            known = self._read(position), version
            self._parts[position] = known
        return known[0]

    def _read(self, position: int) -> _Part:
        step = self.buffers.repeat.steps[position]
        if not self.buffers.moves(step):
            return _Part(self.replay(position))
        base, _ = index_of(step) or (None, ())
        source, indices = self._place(step, self.value(base))
        return _Part(self.graph.call_function(aten.index.Tensor, (source, list(indices))), source, indices)

    def gather(self, step: Step, given: Node) -> Node:
        """The elements of `given` that a step with an index that moves takes."""
        source, indices = self._place(step, given)
        return self.graph.call_function(aten.index.Tensor, (source, list(indices)))

    def _place(self, step: Step, given: Node) -> tuple[Node, tuple[Node | None, ...]]:
        """A view of what a step takes by numbers that stay, and indices into it."""
        base, _ = index_of(step) or (None, ())
        offsets = self.buffers.offsets(step)
        left = [one for one in offsets if one.moves or one.kept]
        wide = sum(1 for one in left if one.moves and one.kept)
        indices = list[Node | None]()
        for one in left[: 1 + max((d for d, one in enumerate(left) if one.moves), default=-1)]:
            indices.append(self._index(Spot(one, self.buffers.device(base)), wide - 1) if one.moves else None)
            wide -= one.moves and one.kept
        return self._still(given, offsets, self.buffers.sizes(base)), tuple(indices)

    def _still(self, node: Node, offsets: Sequence[Offsets], sizes: Sequence[int]) -> Node:
        """The view by those entries of an index that are the same in all iterations."""
        index = [slice(None) if one.moves else _entry(one, size) for one, size in zip(offsets, sizes, strict=True)]
        if all(entry == slice(None) for entry in index):
            return node
        return self.graph.call_function(operator.getitem, (node, tuple(index)))

    def _index(self, spot: Spot, behind: int) -> Node:
        """Indices that several slices together make a grid of."""
        row = self.rows(spot)
        if not spot.offsets.kept or not behind:
            return row
        return self.graph.call_method("view", (row, (spot.offsets.length, *[1] * behind)))

    # ---- writing -------------------------------------------------------------------------------------------------------

    def assign(self, step: Step, value: Any) -> None:
        """`buffer[index] = value`, at an index that moves."""
        base = step.args[0]
        source, indices = self._place(step, self.value(base))
        tensor = example(self.buffers.bases[self._storage(base)])
        kept = sum(1 for one in self.buffers.offsets(step) if one.kept)
        given = step.nodes[0].args[2]
        if isinstance(given, Node) and (not isinstance(example(given), torch.Tensor) or example(given).dim() > kept):
            raise Refused(f"{step.nodes[0].name} writes what has more dimensions")
        kind = {"dtype": tensor.dtype, "device": tensor.device}
        if isinstance(value, Node):
            value = self.graph.call_method("to", (value,), kind)
        else:
            value = self.graph.call_function(torch.full, ((), value), kind)
        self.graph.call_function(aten.index_put_.default, (source, list(indices), value))
        self.changed(base)

    def changed(self, leaf: Any) -> None:
        """Notes that a part was written into, and puts elements that had been read back into the buffer."""
        storage, chain = self._storage(leaf), list[int]()
        while isinstance(leaf, Inside):
            if leaf.position in self._same:
                leaf = self._same[leaf.position]
                continue
            part, _ = self._parts[leaf.position]
            if part.source is not None:
                self.graph.call_function(aten.index_put_.default, (part.source, list(part.indices), part.node))
            chain.append(leaf.position)
            leaf = self._source(leaf.position)
        self._version[storage] += 1
        for position in chain:
            self._parts[position] = self._parts[position][0], self._version[storage]

    def _source(self, position: int) -> Any:
        """What a step has made a part of."""
        found = list[Any]()
        step = self.buffers.repeat.steps[position]
        mapped((step.args, step.kwargs), lambda leaf: found.append(leaf) if self.holds(leaf) else None)
        if len(set(found)) != 1:
            raise Refused(f"{step.nodes[0].name} makes parts of several tensors")
        return found[0]

    def same(self, position: int, targets: Sequence[Any]) -> None:
        """Notes that a step gives what it has written into. Raises Refused where that is not the same part."""
        if position in self.buffers.names:
            return
        first = self.buffers.repeat.steps[position].nodes[0]
        if len(targets) != 1:
            raise Refused(f"{first.name} writes into several tensors")
        leaf = targets[0]
        other = self.buffers.repeat.steps[leaf.position].nodes[0] if isinstance(leaf, Inside) else leaf
        if _place(first) != _place(other):
            raise Refused(f"{first.name} gives another part than it writes into")
        self._same[position] = leaf
