"""One iteration of a loop with carried values as a graph of its own, with the proof that it is a function.

The graph takes what iterations carry, then rows, then what is the same in all iterations. It gives the carried values anew,
and results of which each iteration makes a row. That is the body of `scan`. Buffers that iterations write into are carried.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from kgen.capture.batch_body import moves, numbers
from kgen.capture.batch_views import Writer, batch_view
from kgen.capture.loop_buffers import Buffers, Memory
from kgen.capture.regions import Refused, Regions, example
from kgen.capture.repeats import Carried, Column, Inside, Lifted, Repeat, Step, mapped
from kgen.capture.torch_adapter import own_fake_mode, storage_of
from kgen.capture.trial import Trial

__all__ = ["LoopBody", "Made", "kind_of"]


@dataclass(frozen=True, slots=True)
class Made:
    """What the step at `position` gives in all iterations, made in front of the loop."""

    position: int


def kind_of(value: Any) -> tuple[Any, ...] | None:
    """What values of a step have in common in all iterations; None for what is no ordinary tensor."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    return tuple(value.shape), tuple(value.stride()), value.dtype, value.device


class LoopBody:
    """The body of a repeat. `results` are positions of steps of which all iterations' values are wanted, `hoisted` nodes with
    the values of steps that are made in front of the loop, and `skipped` are steps that nothing else needs then. `buffers` are
    what the iterations write of what is there before them.

    Raises Refused where it is no function of what it is given."""

    def __init__(
        self,
        writer: Writer,
        repeat: Repeat,
        buffers: Buffers,
        results: Sequence[int],
        hoisted: Mapping[int, Node],
        skipped: frozenset[int],
    ) -> None:
        self.writer, self.repeat, self.results, self.hoisted, self.buffers = writer, repeat, results, hoisted, buffers
        self.steps = {k: step for k, step in enumerate(repeat.steps) if k not in skipped}
        self.carried = list[Carried]()
        self.rows = dict[Hashable, Node]()
        self.others = dict[Node, None]()
        self.views = dict[int, Hashable]()
        self.reads = set[int]()  # positions of steps that take another part of a tensor in each iteration, by indices
        self._regions = Regions(repeat)
        self._collect(self._regions)
        self._check_parts()
        self._made = dict[Any, Node]()
        self.graph = self._built()
        self._check()
        if writer.has_gradients:
            self._copy_results()

    # ---- what goes in --------------------------------------------------------------------------------------------------

    def _collect(self, regions: Regions) -> None:
        for position, step in self.steps.items():
            region = regions.of.get(position)
            if position in self.buffers.touched and self.buffers.moves(step):
                self._note_place(step, regions)
            elif region is None and self.buffers.is_read(position):
                self.reads.add(position)
                mapped(step.args[:1], partial(self._note, step, regions))
                self._note_place(step, regions)
            elif region is not None and moves(step):
                self.views[position] = self._row(region, batch_view, region.base, region.access, self.repeat.count)
            else:
                mapped((step.args, step.kwargs), partial(self._note, step, regions))
        self.carried = _longest(self.carried)
        for leaf in self.carried:
            self._note(self.repeat.steps[leaf.position], regions, Inside(leaf.position))
        for position in self.results:
            self._note(self.repeat.steps[position], regions, Inside(position))
        if not self.rows:  # what has as many rows says how many iterations there are
            self._row("count", Writer.call, torch.arange, self.repeat.count)

    def _note_place(self, step: Step, regions: Regions) -> None:
        """What a read or a write at an index that moves takes: what it writes, and rows of indices."""
        if step.nodes[0].target is operator.setitem:
            mapped(step.args[2], partial(self._note, step, regions))
        for spot in self.buffers.spots(step):
            self._row(spot, lambda writer, one: one.rows(writer), spot)

    def _row(self, key: Hashable, make: Any, *args: Any) -> Hashable:
        if key not in self.rows:
            self.rows[key] = make(self.writer, *args)
        return key

    def _note(self, step: Step, regions: Regions, leaf: Any) -> None:
        if isinstance(leaf, Carried) and leaf not in self.carried:
            self.carried.append(leaf)
        elif isinstance(leaf, Inside) and leaf.position in self.hoisted:
            self.rows.setdefault(Made(leaf.position), self.hoisted[leaf.position])
        elif isinstance(leaf, Lifted):
            region = regions.lifted(leaf)
            self._row(region, batch_view, region.base, region.access, self.repeat.count)
        elif isinstance(leaf, Column):
            self._row(leaf, numbers, leaf, step)
        elif isinstance(leaf, Node) and self.buffers.storage(leaf) is None:
            if not isinstance(example(leaf), torch.Tensor):
                raise Refused(f"{leaf.name} is no tensor")
            self.others[leaf] = None

    @property
    def registers(self) -> Iterator[tuple[Carried, int]]:
        """Carried values, the oldest of each first."""
        return ((leaf, k) for leaf in self.carried for k in range(len(leaf.first)))

    # ---- the graph -----------------------------------------------------------------------------------------------------

    def _built(self) -> GraphModule:
        graph = Graph()
        self._memory = Memory(graph, self.buffers, self._made.__getitem__, partial(self._write, graph))
        for number, key in enumerate((*self.registers, *self.buffers.bases, *self.rows, *self.others)):
            self._made[key] = graph.placeholder(f"arg{number}")
        for storage in self.buffers.bases:
            self._memory.add(storage, self._made[storage])
        for position, step in self.steps.items():
            if position in self.views:
                continue
            if position in self.buffers.touched:
                self._put_access(graph, position, step)
            elif position in self.reads:
                self._made[position] = self._memory.gather(step, self._argument(step.args[0]))
            else:
                self._made[position] = self._write(graph, position)
        graph.output(tuple(self._outputs(graph)))
        return GraphModule(torch.nn.Module(), graph)

    def _write(self, graph: Graph, position: int) -> Node:
        """A copy of the step's node in the body."""
        step = self.repeat.steps[position]
        args, kwargs = (mapped(tree, self._argument) for tree in (step.args, step.kwargs))
        made = graph.create_node(step.nodes[0].op, step.nodes[0].target, args, kwargs, step.nodes[0].name)
        made.meta = dict(step.nodes[0].meta)
        return made

    def _argument(self, leaf: Any) -> Any:
        if self.buffers.storage(leaf) is not None:
            return self._memory.value(leaf)
        if isinstance(leaf, Inside):
            return self._value(leaf.position)
        if isinstance(leaf, Carried):
            return self._made[_register(self.carried, leaf)]
        if isinstance(leaf, Lifted):
            return self._made[self._regions.lifted(leaf)]
        return self._made[leaf] if isinstance(leaf, Node | Column) else leaf

    def _put_access(self, graph: Graph, position: int, step: Step) -> None:
        """A step that reads or writes a buffer. Parts of one are read where something needs them."""
        targets = self.buffers.written.get(position, ())
        if step.nodes[0].target is operator.setitem and self.buffers.moves(step):
            self._memory.assign(step, self._argument(step.args[2]))
        elif targets or position not in self.buffers.aliases:
            self._made[position] = self._write(graph, position)
            for leaf in targets:
                self._memory.changed(leaf)
            if position in self.buffers.aliases:
                self._memory.same(position, targets)

    def _value(self, position: int) -> Node:
        if position in self.views:
            return self._made[self.views[position]]
        return self._made[position] if position in self._made else self._made[Made(position)]

    def _outputs(self, graph: Graph) -> Iterator[Node]:
        """Carried values and rows of results. One that is given, or is there twice, is copied: nobody writes into either."""
        taken = set(graph.find_nodes(op="placeholder"))
        copies = self._memory.copies.values()
        for node in (*self._carried_on(), *copies, *map(self._value, self.results)):
            yield graph.call_method("clone", (node,)) if node in taken else node
            taken.add(node)

    def _copy_results(self) -> None:
        """With gradients, what backward needs of an iteration becomes a further result, which may be none of the others."""
        output = self.graph.graph.output_node()
        results: Any = output.args[0]
        with self.graph.graph.inserting_before(output):
            output.args = (tuple(self.graph.graph.call_method("clone", (node,)) for node in results),)
        self.graph.recompile()

    def _carried_on(self) -> Iterator[Node]:
        for leaf in self.carried:
            yield from (self._made[leaf, k] for k in range(1, len(leaf.first)))
            yield self._value(leaf.position)

    @property
    def wanted(self) -> list[Any]:
        """What Dynamo saw in the place of each result of the body, in the first iteration."""
        carried = [self.repeat.steps[leaf.position].nodes[0] for leaf, _ in self.registers]
        results = [self.repeat.steps[position].nodes[0] for position in self.results]
        return [example(node) for node in (*carried, *self.buffers.bases.values(), *results)]

    # ---- is it a function? ---------------------------------------------------------------------------------------------

    def _check_parts(self) -> None:
        parts = self.buffers.aliases.keys() - self.buffers.names.keys()
        if not parts.isdisjoint((*(leaf.position for leaf in self.carried), *self.results)):
            raise Refused("parts of what iterations write are carried, or needed behind the loop")

    def _check(self) -> None:
        """Raises Refused."""
        if not self.carried and not self.buffers:
            raise Refused("iterations carry nothing")
        for one, node in zip(self.wanted, self.graph.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
            if not isinstance(one, torch.Tensor) or not one.is_contiguous():
                raise Refused(f"{node} is carried or needed behind the loop, and is no contiguous tensor")
        for leaf, k in self.registers:
            first, later = example(leaf.first[k]), example(self.repeat.steps[leaf.position].nodes[0])
            if not isinstance(first, torch.Tensor) or _type(first) != _type(later):
                raise Refused(f"{leaf.first[k].name} has another type or other sizes than what takes its place")
        for step in self.steps.values():
            self._check_step(step)
        self._try()

    @staticmethod
    def _check_step(step: Step) -> None:
        if isinstance(step.nodes[0].target, torch._ops.HigherOrderOperator):
            raise Refused(f"{step.nodes[0].name} is a higher-order operator")
        if step.nodes[0].target is not operator.setitem:
            kinds = [[kind_of(one) for one in pytree.tree_leaves(example(node))] for node in step.nodes]
            if not kinds[0] or None in kinds[0] or any(kind != kinds[0] for kind in kinds):
                raise Refused(f"{step.nodes[0].name} gives no tensors, or others in other iterations")

    def _try(self) -> None:
        with own_fake_mode(self.wanted), torch.no_grad():
            given = [torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in self.wanted[: self._count]]
            rows = [one.meta["example_value"] for one in self.rows.values()]
            given += [torch.empty(one.shape[1:], dtype=one.dtype, device=one.device) for one in rows]
            given += [example(one) for one in self.others]
            memory = {storage_of(one) for one in given}
            try:
                with Trial(memory, layouts=False) as trial:
                    results = _Compared(self.graph).run(*given)
                    self.writes = trial.writes
            except Refused:
                raise
            except Exception as cause:
                raise Refused(f"{type(cause).__name__}: {cause}") from cause
        for wanted, result in zip(self.wanted, results, strict=True):
            if storage_of(result) in memory:
                raise Refused("a result of an iteration shares memory with another one, or with what it is given")
            memory.add(storage_of(result))
            if kind_of(result) != kind_of(wanted):
                raise Refused("a result of an iteration has other strides where rows are contiguous")

    @property
    def _count(self) -> int:
        return sum(1 for _ in self.registers) + len(self.buffers.bases)


def _longest(leaves: Sequence[Carried]) -> list[Carried]:
    """Without what others carry, too, on the way to a later iteration."""
    kept = list[Carried]()
    for leaf in sorted(leaves, key=lambda one: -len(one.first)):
        if _register(kept, leaf) is None:
            kept.append(leaf)
    return kept


def _register(carried: Sequence[Carried], leaf: Carried) -> tuple[Carried, int] | None:
    """Which of the values that are carried is the leaf's."""
    for one in carried:
        older = len(one.first) - len(leaf.first)
        if one.position == leaf.position and older >= 0 and one.first[older:] == leaf.first:
            return one, older
    return None


class _Compared(Interpreter):
    """Runs a graph; values have the sizes and types that Dynamo saw. Raises Refused."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op.startswith("call") and "example_value" in n.meta:
            wanted, got = (pytree.tree_leaves(one) for one in (n.meta["example_value"], value))
            if list(map(_type, wanted)) != list(map(_type, got)):
                raise Refused(f"{n.name} has another type or other sizes in the body")
        return value


def _type(value: Any) -> Any:
    return (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else value
