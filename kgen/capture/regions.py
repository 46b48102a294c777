"""Which parts of tensors that are there before a loop its steps touch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils import _pytree as pytree

from kgen.capture.accesses import Access, whole
from kgen.capture.repeats import Column, Inside, Lifted, Repeat, Step, mapped

__all__ = ["Region", "Regions", "Refused", "example", "index_of", "is_view_step", "runs_backwards", "tensors_of"]


class Refused(Exception):
    """Why a loop stays unrolled."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a tensor that is there before the loop."""

    base: Node
    access: Access


def example(node: Node) -> Any:
    """What Dynamo has traced a node with. Raises Refused, for tensor subclasses and under functorch's transforms, too."""
    value = node.meta.get("example_value")
    if type(value) is FakeTensor:
        return value
    tensors = tensors_of(value)
    if value is None or not all(isinstance(one, FakeTensor) for one in tensors):
        raise Refused(f"{node.name} is no ordinary tensor")
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in a tree. Most example values are one tensor: a tree takes ten times as long."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def index_of(step: Step) -> tuple[Any, tuple[Any, ...]] | None:
    """The tensor and the index of a step that reads or writes at an index; None for other steps."""
    target, args = step.nodes[0].target, step.args
    if step.kwargs:
        return None
    if target in (operator.getitem, operator.setitem):
        return args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if target in ("select", "narrow") and type(args[1]) is int and args[1] >= 0:
        full = (slice(None),) * args[1]
        return args[0], (*full, args[2] if target == "select" else _narrowed(*args[2:]))
    return None


def _narrowed(start: Any, length: Any) -> Any:
    if isinstance(start, Column) and type(length) is int and min(start.values) >= 0:
        return slice(start, Column(tuple(one + length for one in start.values)), None)
    return slice(start, start + length, None) if type(start) is type(length) is int and start >= 0 else None


def is_view_step(step: Step) -> bool:
    """Whether a step gives a part of a tensor, so that it may stay behind where the loop goes."""
    index = index_of(step)
    return (
        index is not None
        and step.nodes[0].target is not operator.setitem
        and isinstance(index[0], Node)
        and isinstance(example(index[0]), torch.Tensor)
        and all(type(one) in (int, slice, Column) or one is Ellipsis for one in index[1])
    )


def runs_backwards(repeat: Repeat) -> bool:
    """Whether iterations go through tensors from the end more often than from the start. Raises Refused. What they assign to
    decides where there is such: of the rest a batch may have a copy."""
    regions = Regions(repeat)
    written = [region for at, region in regions.of.items() if repeat.steps[at].nodes[0].target is operator.setitem]
    spans = [region.access.spans[d] for region in written or regions.touched for d in region.access.moving]
    return sum(1 if span.advance > 0 else -1 for span in spans) < 0


def columns(index: Sequence[Any], count: int) -> list[list[Any]]:
    """What each entry of an index is in each iteration."""
    return [[_at(entry, k) for k in range(count)] for entry in index]


def _at(entry: Any, iteration: int) -> Any:
    return mapped(entry, lambda leaf: leaf.values[iteration] if isinstance(leaf, Column) else leaf)


class Regions:
    """The regions of a loop's steps, and all that they touch. Raises Refused."""

    def __init__(self, repeat: Repeat) -> None:
        self.count = repeat.count
        self.of = dict[int, Region]()
        self.touched = list[Region]()
        for position, step in enumerate(repeat.steps):
            region = self.region(step)
            if region is not None:
                self.of[position] = region
                self.touched.append(region)
            mapped((step.args if region is None else step.args[1:], step.kwargs), self._touch)

    def region(self, step: Step) -> Region | None:
        """What a step touches of a tensor by its index; None where it has none, or one that is not understood."""
        index = index_of(step)
        outer = self._base(index[0]) if index is not None else None
        if index is None or outer is None:
            return None
        access = outer.access.at(columns(index[1], self.count))
        return None if access is None else Region(outer.base, access)

    def _base(self, base: Any) -> Region | None:
        if isinstance(base, Inside):
            return self.of.get(base.position)
        if isinstance(base, Lifted):
            return self.lifted(base)
        value = example(base) if isinstance(base, Node) else None
        return Region(base, whole(value.shape)) if isinstance(value, torch.Tensor) else None

    def lifted(self, leaf: Lifted) -> Region:
        """The part of a tensor that nodes in front of the loop are."""
        region = self.region(leaf.step)
        if region is None:
            raise Refused(f"{leaf.step.nodes[0].name} and its like are no parts of one tensor")
        return region

    def _touch(self, leaf: Any) -> None:
        if isinstance(leaf, Lifted):
            self.touched.append(self.lifted(leaf))
        elif isinstance(leaf, Node):
            self.touched.extend(Region(leaf, whole(one.shape)) for one in tensors_of(example(leaf)))
