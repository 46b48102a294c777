"""Finds blocks of calls in Dynamo's graph that are one function of different tensors: the layers of a model.

Two calls have the same identity if they have the same operator, the same constants, and tensors of the same sizes, strides and
types, gradients wanted or not. Where identities repeat with some period, blocks of that length may be equal. They are equal if,
position by position, each argument comes from the same call of the block, or from in front of the block.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kgen.capture.regions import example, tensors_of
from kgen.capture.repeats import LEAST, periods, runs, shape_of

__all__ = ["Blocks", "bytes_of", "candidates", "kind_of"]

# Where blocks are cut, so many cuts are tried.
CUTS = 6


@dataclass(frozen=True)
class Blocks:
    """Equal blocks of calls, one behind the other. `calls` has a row for each block."""

    calls: tuple[tuple[Node, ...], ...]

    @cached_property
    def operands(self) -> dict[tuple[Node, ...], int]:
        """What blocks read from in front of them: of each operand the node for each block, and its number."""
        columns = (column for row in zip(*self.calls, strict=True) for column in self._outside(row))
        return {column: number for number, column in enumerate(dict.fromkeys(columns))}

    def _outside(self, row: Sequence[Node]) -> Iterator[tuple[Node, ...]]:
        first = set(self.calls[0])
        return (column for column in zip(*map(inputs_of, row), strict=True) if column[0] not in first)

    @cached_property
    def results(self) -> list[int]:
        """Positions of calls with users outside of their block."""
        return [k for k, row in enumerate(zip(*self.calls, strict=True)) if any(map(self._is_needed, row, self.calls))]

    @staticmethod
    def _is_needed(node: Node, block: Sequence[Node]) -> bool:
        return not set(node.users) <= set(block)

    def body(self) -> GraphModule:
        """The first block as a function of the operands, with a tuple of results. Raises Refused."""
        graph, made = Graph(), dict[Node, Node]()
        given = [self._placeholder(graph, number, column[0]) for column, number in self.operands.items()]
        for row in zip(*self.calls, strict=True):
            node, outside = row[0], (given[self.operands[column]] for column in self._outside(row))
            args, kwargs = _rewired(node, [made.get(one) or next(outside) for one in inputs_of(node)])
            made[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
            made[node].meta = dict(node.meta)
        graph.output(tuple(made[self.calls[0][position]] for position in self.results))
        return GraphModule(torch.nn.Module(), graph)

    @staticmethod
    def _placeholder(graph: Graph, number: int, node: Node) -> Node:
        made = graph.placeholder(f"arg{number}_{node.name}")
        made.meta = {"example_value": example(node)}
        return made


def inputs_of(node: Node) -> list[Node]:
    """The nodes among a call's arguments, each as often as it is one."""
    found = list[Node]()
    map_arg((node.args, node.kwargs), lambda one: found.append(one) or one)  # type: ignore[func-returns-value]
    return found


def _rewired(node: Node, inputs: Sequence[Node]) -> Any:
    """The arguments of a call with other nodes among them."""
    following = iter(inputs)
    return map_arg((node.args, node.kwargs), lambda _: next(following))


def kind_of(value: Any) -> Hashable:
    """What two tensors, or tuples of tensors, have in common that one function may take; None for others."""
    if isinstance(value, tuple | list):
        kinds = tuple(map(kind_of, value))
        return None if None in kinds or not kinds else (type(value), kinds)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
        return None
    place = value.storage_offset() if value.is_contiguous() else -1
    return tuple(value.shape), value.stride(), place > 0, value.dtype, value.device, value.requires_grad


def bytes_of(value: Any) -> int:
    """Of all tensors in a tree."""
    return sum(one.numel() * one.element_size() for one in tensors_of(value))


def candidates(graph: Graph, least_calls: int, constants: bool = True) -> Iterator[Blocks]:
    """Blocks of at least so many calls, those first that leave the fewest calls.

    Without `constants` they may have different ones: such blocks are not equal."""
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    numbers = dict[Hashable, int]()
    identity = _Identities(constants).of
    ids = [numbers.setdefault(identity(node), len(numbers)) for node in calls]
    found = [(begin, end, period) for period in periods(ids) if period >= least_calls for begin, end in runs(ids, period)]
    for begin, end, period in sorted(found, key=lambda one: (one[0] - one[1] + one[2], one[2])):
        blocks = _cut(calls, begin, end, period)
        if blocks is not None:
            yield blocks


class _Identities:
    """What calls are told apart by."""

    def __init__(self, constants: bool) -> None:
        self.constants = constants
        self.kinds = dict[Node, int | None]()
        self.numbers = dict[Hashable, int]()  # kind -> its number

    def of(self, node: Node) -> Hashable:
        """Equal for calls that may be counterparts. An operator with bodies has none."""
        kind = self._kind(node)
        if kind is None or isinstance(node.target, torch._ops.HigherOrderOperator):
            return id(node)
        return node.op, node.target, kind, shape_of((node.args, node.kwargs), self._leaf)

    def _leaf(self, one: Any) -> Hashable:
        if isinstance(one, Node):
            return self._kind(one) or (id(one),)
        return type(one).__name__, repr(one) if self.constants else ""

    def _kind(self, node: Node) -> int | None:
        """A number, from 1 on: a tuple of many tensors has as many readers, and each hashes what it is told."""
        if node not in self.kinds:
            kind = kind_of(node.meta.get("example_value"))
            self.kinds[node] = None if kind is None else self.numbers.setdefault(kind, len(self.numbers) + 1)
        return self.kinds[node]


# ---- where one block ends and the next one begins -----------------------------------------------------------------------


def _cut(calls: Sequence[Node], begin: int, end: int, period: int) -> Blocks | None:
    """The blocks of a run, cut where the fewest bytes go from one to the next."""
    starts = range(begin, min(begin + period, end - LEAST * period) + 1)
    by_bytes = sorted(starts, key=lambda start: _carried(calls[start + period : start + 2 * period]))
    tried = (_equal_blocks(calls, start, end, period) for start in by_bytes[:CUTS])
    return next((one for one in tried if one is not None), None)


def _carried(block: Sequence[Node]) -> int:
    """Bytes that others need of a block."""
    inside = set(block)
    return sum(bytes_of(node.meta["example_value"]) for node in block if not set(node.users) <= inside)


def _equal_blocks(calls: Sequence[Node], start: int, end: int, period: int) -> Blocks | None:
    """As many blocks as are equal to the first one; None for fewer than make a repeat."""
    rows = [tuple(calls[at : at + period]) for at in range(start, end - period + 1, period)]
    wiring, count = _wiring(rows[0]), 1
    while count < len(rows) and _wiring(rows[count]) == wiring:
        count += 1
    return Blocks(tuple(rows[:count])) if count >= LEAST else None


def _wiring(block: Sequence[Node]) -> list[list[int | None]]:
    """Of each argument the position in the block that it comes from; None from in front of it."""
    positions = {node: k for k, node in enumerate(block)}
    return [[positions.get(one) for one in inputs_of(node)] for node in block]
