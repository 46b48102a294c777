"""Writes at every k-th place of a dimension, from each of the first k places on, as one stack of what they write.

    w[:, 0::2] = a; w[:, 1::2] = b        ->        w = torch.stack([a, b], 2).flatten(1, 2)

Functionalisation makes a new tensor of each write. As writes they are kernels of their own, each of which moves every k-th
element of its results. A stack fuses with its producers and its consumer.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kgen.capture.recompute_scores import Calls

__all__ = ["stack_interleaved_writes"]

aten = torch.ops.aten

END = sys.maxsize
# Of more writes each is a run, which kernels move well.
MOST = 8


def stack_interleaved_writes(gm: GraphModule) -> GraphModule:
    """The graph, changed in place, with a stack for writes that fill a tensor between them."""
    changed = [_Rewrite(gm, node).run() for node in list(gm.graph.nodes) if node.target is aten.slice_scatter.default]
    if any(changed):
        gm.graph.eliminate_dead_code()
        gm.graph.lint()
        gm.recompile()
    return gm


class _Rewrite(Calls):
    """Replaces one write, if it is the last one of such."""

    def __init__(self, gm: GraphModule, node: Node) -> None:
        super().__init__(gm.graph, node)
        self.node = node
        self.dim, _, self.step = _place(node)

    def run(self) -> bool:
        writes = self._writes()
        value = self.node.meta["val"]
        if not writes or not value.is_contiguous():
            return False
        with self.graph.inserting_before(self.node):
            ordered = sorted(writes, key=lambda one: _place(one)[1])
            stacked = self._call(aten.stack.default, [self._part(one, writes[-1]) for one in ordered], self.dim + 1)
            made = self._call(aten.view.default, stacked, list(value.shape))
        self.node.replace_all_uses_with(made)
        return True

    def _writes(self) -> list[Node]:
        """The writes, this one first; none where they leave something of what was there, or others read what they have made."""
        writes, starts, step = [self.node], {_place(self.node)[1]}, self.step
        if not 2 <= step <= MOST or not self._fills(self.node):
            return []
        while len(writes) < step:
            before: Any = writes[-1].args[0]
            if (
                before.target is not aten.slice_scatter.default
                or not self._fills(before)
                or not _is_read_by(before, writes[-1])
            ):
                return []
            starts.add(_place(before)[1])
            writes.append(before)
        return writes if starts == set(range(step)) else []

    def _fills(self, write: Node) -> bool:
        """Whether a write goes on to the end of the dimension, as many elements as the others."""
        dim, _, step = _place(write)
        length, end = write.meta["val"].shape[dim], _arguments(write)[2]
        known = type(length) is int and type(end) is int and type(step) is int
        return known and dim == self.dim and step == self.step and length % step == 0 and length > 0 and end >= length

    def _part(self, write: Node, first: Node) -> Node:
        """What is written. A copy takes its shape and type from the place: the first tensor has that, too."""
        source: Any = write.args[1]
        if source.target is not aten.copy.default:
            return source
        dim, start, step = _place(write)
        place = self._call(aten.slice.Tensor, first.args[0], dim, start, END, step)
        return self._call(aten.copy.default, place, *source.args[1:], **source.kwargs)


def _is_read_by(write: Node, user: Node) -> bool:
    """Whether nobody else needs the elements that a write gives. Copies read no elements of what they are written to."""
    return all(one is user or _is_place(one) for one in write.users)


def _is_place(node: Node) -> bool:
    return node.target is aten.slice.Tensor and all(
        one.target is aten.copy.default and one.args[0] is node and node not in one.args[1:] for one in node.users
    )


def _place(write: Node) -> tuple[int, Any, Any]:
    """The dimension, and where in it a write begins and what its steps are."""
    dim, start, _, step = _arguments(write)
    return dim % write.meta["val"].dim(), start, step


def _arguments(write: Node) -> tuple[int, Any, Any, Any]:
    names = ("dim", "start", "end", "step")
    given: dict[str, Any] = dict(zip(names, write.args[2:], strict=False)) | dict(write.kwargs)
    start, end = given.get("start"), given.get("end")
    return given.get("dim", 0), 0 if start is None else start, END if end is None else end, given.get("step", 1)
