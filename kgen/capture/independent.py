"""A `while_loop` whose iterations are independent, as one iteration over a batch.

The loop counts an integer up to a bound. An iteration touches row i of the buffers that it writes, and no other part of them.
Then no iteration sees what another one has written, and all of them are a map over rows. `torch.vmap` says what the body means
for rows.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from kgen.capture.higher_order import NoMeaning
from kgen.capture.torch_adapter import batching_rules_only

__all__ = ["over_rows"]

aten = torch.ops.aten
_CHECKS = (aten._assert_scalar.default,)


def over_rows(condition: GraphModule, body: GraphModule, carried: Sequence[Any], others: Sequence[Any], **_more: Any) -> Any:
    """What the loop gives. Raises NoMeaning where its iterations may need each other's results, or do not fit the buffers."""
    loop = _Loop(condition, body, len(carried))
    given = (*carried, *others)
    start, stop = carried[0], loop.bound(given)
    if type(start) is not int or start != 0 or not isinstance(stop, int | torch.SymInt):
        raise NoMeaning
    loop.check()
    for k in loop.buffers:
        # Beyond the last row, an iteration raises an error: that is for the loop to find out.
        if not isinstance(given[k], torch.Tensor) or not bool(stop <= given[k].shape[0]):
            raise NoMeaning
    if not bool(stop >= 1):
        raise NoMeaning
    return loop.batched(given, stop)


class _Loop:
    """The two graphs of a loop, and which buffers are touched row by row."""

    def __init__(self, condition: GraphModule, body: GraphModule, carried: int) -> None:
        self.condition, self.body, self.carried = condition, body, carried
        self.arguments = body.graph.find_nodes(op="placeholder")
        self.index = self.arguments[0]
        self.results: Any = body.graph.output_node().args[0]
        self.rows: dict[Node, Node] = {}  # what stands for the rows of a buffer -> the buffer, as an argument
        self.buffers: set[int] = set()
        values = [node.meta.get("val") for node in self.arguments[1:]]
        self.rank = max((one.dim() - 1 for one in values if isinstance(one, torch.Tensor)), default=0)

    def bound(self, given: Sequence[Any]) -> Any:
        """Where the loop ends: its condition is `i < n`, with n from outside."""
        result: Any = self.condition.graph.output_node().args[0]
        arguments = self.condition.graph.find_nodes(op="placeholder")
        if not isinstance(result, Node) or result.target is not operator.lt:
            raise NoMeaning
        left, right = result.args
        if left is not arguments[0]:
            raise NoMeaning
        if isinstance(right, int):
            return right
        if right not in arguments[self.carried :]:
            raise NoMeaning
        return given[arguments.index(right)]

    def check(self) -> None:
        """Raises NoMeaning unless each iteration keeps to its own rows of what is written."""
        if not isinstance(self.results, tuple | list) or len(self.results) != self.carried or self.carried < 2:
            raise NoMeaning
        step = self.results[0]
        if not isinstance(step, Node) or step.target is not operator.add or set(step.args) != {self.index, 1}:
            raise NoMeaning
        for k in range(1, self.carried):
            self._follow(self.arguments[k], k)
            if self.rows.get(self.results[k]) is not self.arguments[k]:
                raise NoMeaning
        for node in self.body.graph.nodes:
            self._check_node(node, step)

    def _follow(self, argument: Node, position: int) -> None:
        """Notes the states of a buffer: the argument, copies of it, and those with row i replaced."""
        self.rows[argument] = argument
        self.buffers.add(position)
        for node in self.body.graph.nodes:
            source = node.args[0] if node.args else None
            is_state = node.op == "call_function" and isinstance(source, Node) and self.rows.get(source) is argument
            if is_state and (node.target is aten.clone.default or self._is_row_write(node)):
                self.rows[node] = argument

    def _is_row_write(self, node: Node) -> bool:
        return node.target is aten.select_scatter.default and tuple(node.args[2:]) == (0, self.index)

    def _check_node(self, node: Node, step: Node) -> None:
        if node.op in ("placeholder", "output") or node in (step, *self.rows) or node.target in _CHECKS:
            return
        touched = [one for one in node.all_input_nodes if one in self.rows]
        is_row = node.target is aten.select.int and tuple(node.args[1:]) == (0, self.index)
        if touched and not is_row:
            raise NoMeaning
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.dim() > self.rank:
            raise NoMeaning  # a batch of it may be much larger than all that is there
        if self.index in node.all_input_nodes and not is_row and not _is_check(node) and not _is_number(node):
            raise NoMeaning

    def batched(self, given: Sequence[Any], stop: Any) -> Any:
        """All iterations at once."""
        positions = sorted(self.buffers)
        rows = [given[k].narrow(0, 0, stop) for k in positions]
        own = [
            k for k, one in enumerate(given) if k >= self.carried and isinstance(one, torch.Tensor) and self._is_read_by_row(k)
        ]
        for k in own:
            if not bool(stop <= given[k].shape[0]):
                raise NoMeaning
        rows += [given[k].narrow(0, 0, stop) for k in own]
        count = torch.arange(stop, device=rows[0].device)

        def one(i: torch.Tensor, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._iteration(i, dict(zip([*positions, *own], parts, strict=True)), given)

        try:
            with batching_rules_only():
                made = torch.vmap(one, randomness="error")(count, *rows)
        except Exception as cause:
            raise NoMeaning from cause
        whole = [aten.slice_scatter.default(given[k], part, 0, 0, stop) for k, part in zip(positions, made, strict=True)]
        return (stop, *whole)

    def _is_read_by_row(self, position: int) -> bool:
        """Whether a tensor that no iteration writes is read at row i alone."""
        argument = self.arguments[position]
        users = [node for node in argument.users if node.target is not aten.sym_size.int]
        return bool(users) and all(node.target is aten.select.int and tuple(node.args[1:]) == (0, self.index) for node in users)

    def _iteration(self, i: torch.Tensor, parts: dict[int, torch.Tensor], given: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """The body on rows."""
        env: dict[Node, Any] = {node: parts.get(k, given[k]) for k, node in enumerate(self.arguments)}
        env[self.index] = i
        for node in self.body.graph.nodes:
            if (
                node.op == "call_function"
                and node.target not in _CHECKS
                and not _is_check(node)
                and node is not self.results[0]
            ):
                env[node] = self._value(node, env)
        return tuple(env[self.results[k]] for k in sorted(parts) if k < self.carried)

    def _value(self, node: Node, env: dict[Node, Any]) -> Any:
        source = node.args[0]
        if node in self.rows or (node.target is aten.select.int and self._is_row(node, source)):
            written: Any = node.args[1] if node.target is aten.select_scatter.default else source
            return env[written]
        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
        if node.target is aten.copy.default:
            given = args[1].to(args[0].dtype)
            return given if given.shape == args[0].shape else given.broadcast_to(args[0].shape)
        value = node.target(*args, **kwargs)  # type: ignore[operator]
        known = node.meta.get("val")
        if isinstance(known, torch.Tensor) and (value.dtype != known.dtype or value.dim() != known.dim()):
            raise NoMeaning  # a number is weaker than a tensor that stands for it
        return value

    def _is_row(self, node: Node, source: Any) -> bool:
        if tuple(node.args[1:]) != (0, self.index):
            return False
        return source in self.rows or (source in self.arguments and self._is_read_by_row(self.arguments.index(source)))


def _is_check(node: Node) -> bool:
    """Whether only checks read the node."""
    return bool(node.users) and all(user.target in _CHECKS for user in node.users)


def _is_number(node: Node) -> bool:
    """Whether the node is arithmetic of a tensor with a number, which may be one of a batch."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name in ("aten::add", "aten::mul", "aten::sub") and isinstance(node.args[0], Node)
