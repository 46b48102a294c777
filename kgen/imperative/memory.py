"""The buffers that a block writes into: what it gets, works on, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kgen.imperative.problems import report
from kgen.imperative.storage import shared_storages

__all__ = ["Memory", "enter"]

Values = tuple[Any, ...]


@dataclass(slots=True)
class Memory:
    """`carried` are the buffers. `locations` says of each state variable, buffer and read tensor whether it is one of them (its
    position), a view of one (position, sizes, strides, offset), or neither (None)."""

    site: Any
    buffers: Values
    reads: Values
    carried: list[torch.Tensor]
    locations: list[Any]
    given: Values
    updated: list[int]

    def split(self, memory: Sequence[torch.Tensor], state: Values) -> tuple[Values, Values, Values]:
        """What a block gets, on given contents of the buffers."""
        given = (*state, *self.buffers, *self.reads)
        values = tuple([_placed(one, place, memory) for one, place in zip(given, self.locations, strict=True)])
        first, second = len(state), len(state) + len(self.buffers)
        return values[:first], values[first:second], values[second:]

    def run(
        self, block: Callable[..., Any], memory: Sequence[torch.Tensor], state: Values
    ) -> tuple[list[torch.Tensor], Values]:
        """Runs a block on copies of the buffers: gives the copies and the block's results. Writes change the strides of what is
        not contiguous, and operators want them the same."""
        copies = [one.contiguous().clone() for one in memory]
        values, buffers, reads = self.split(copies, state)
        results = block(*values, *buffers, *reads)
        self._check(copies, results)
        return copies, results

    def _check(self, copies: Sequence[torch.Tensor], results: Values) -> None:
        """Refuses variables that are views: behind the block they are memory of their own."""
        fragile = [k for k, name in enumerate(self.site.state) if name in self.site.fragile and k not in self.updated]
        fragile = [k for k in fragile if isinstance(results[k], torch.Tensor)]
        others = [one for one in (*copies, *self.buffers, *self.reads) if isinstance(one, torch.Tensor)]
        if not fragile or not others:
            return
        shared = shared_storages([*others, *[results[k] for k in fragile]])
        for k, (first, _, _) in zip(fragile, shared[len(others) :], strict=True):
            if first < len(others):
                name = self.site.state[k]
                problem = f"{name} is a view of a tensor, which is written somewhere, when it leaves the block; use .clone()"
                report(self.site.function, self.site.file, self.site.line, problem)
                raise RuntimeError(problem)

    def shares(self, value: torch.Tensor) -> bool:
        """Whether a variable's memory is that of something else which a block gets."""
        if len([one for one in self.given if one is value]) > 1:
            return True
        others = [one for one in self.given if isinstance(one, torch.Tensor) and one is not value]
        return len(others) > 0 and shared_storages([*others, value])[-1][0] < len(others)

    def entering(self) -> list[torch.Tensor]:
        """The buffers as an operator gets them. What it keeps for gradients must not change when they are written behind it."""
        return [one.clone() for one in self.carried] if torch.is_grad_enabled() and self._differs() else self.carried

    def _differs(self) -> bool:
        return any([isinstance(one, torch.Tensor) and one.requires_grad for one in (*self.given, *self.carried)])

    def leave(self, results: Sequence[torch.Tensor]) -> None:
        """Writes what a block has made of the buffers into them."""
        for one, result in zip(self.carried, results, strict=True):
            one.copy_(result)

    def with_updated(self, results: Sequence[Any], state: Values) -> Values:
        """The variables behind a block; those that `x += 1` has changed are the tensors that they were."""
        return tuple([state[k] if k in self.updated else one for k, one in enumerate(results)])


def _placed(value: Any, place: Any, memory: Sequence[torch.Tensor]) -> Any:
    if place is None:
        return value
    if isinstance(place, int):
        return memory[place]
    position, sizes, strides, offset = place
    return memory[position].as_strided(sizes, strides, offset)


def enter(site: Any, state: Values, buffers: Values, reads: Values) -> Memory:
    """What a block may write: its buffers, and state that `x += 1` writes to. Tensors in one storage become views of it."""
    updated = [k for k, name in enumerate(site.state) if name in site.updated and isinstance(state[k], torch.Tensor)]
    given = (*state, *buffers, *reads)
    first = len(state)
    writes = [*updated, *[first + k for k, one in enumerate(buffers) if isinstance(one, torch.Tensor)]]
    memory = Memory(site, buffers, reads, [], [None for _ in given], given, updated)
    tensors = [k for k, one in enumerate(given) if isinstance(one, torch.Tensor)]
    if not writes:
        return memory
    shared = shared_storages([given[k] for k in tensors])
    for position, (owner, room, _) in enumerate(shared):
        if owner != position:
            continue
        group = [(tensors[p], offset) for p, (one, _, offset) in enumerate(shared) if one == owner]
        if any([k in writes for k, _ in group]):
            _carry(memory, given, group, room)
    return memory


def _carry(memory: Memory, given: Values, group: Sequence[tuple[int, int]], room: int) -> None:
    """Adds the memory of tensors that share one storage."""
    position = len(memory.carried)
    first = given[group[0][0]]
    if len(group) == 1:
        memory.carried.append(first)
        memory.locations[group[0][0]] = position
        return
    if any([given[k].dtype != first.dtype for k, _ in group]):
        problem = "tensors of different types share memory that the block writes"
        report(memory.site.function, memory.site.file, memory.site.line, problem)
        raise RuntimeError(problem)
    memory.carried.append(first.as_strided((room,), (1,), 0))
    for k, offset in group:
        one = given[k]
        memory.locations[k] = (position, one.shape, one.stride(), offset)
