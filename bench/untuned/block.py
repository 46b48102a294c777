"""What a block of a model is, and how its inputs are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Block:
    """A function and its arguments; a `training` one is run forward and backward."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[Make], Sequence[Tensor]]
    training: bool = False


def both(name: str, fn: Callable[..., Any], inputs: Callable[[Make], Sequence[Tensor]]) -> tuple[Block, Block]:
    """The block forward alone, and its training step."""
    return Block(name, fn, inputs), Block(f"{name} step", fn, inputs, training=True)


def image(make: Make, *shape: int) -> Tensor:
    """Normal values in channels-last order."""
    return make(*shape).to(memory_format=torch.channels_last)


def ids(make: Make, high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to high - 1, int64."""
    return (make(*shape).double() * 7919.7).long() % high


def mlp_weights(make: Make, size: int, hidden: int) -> list[Tensor]:
    """Weights of two linear layers, size -> hidden -> size."""
    return [make(hidden, size) * size**-0.5, make(size, hidden) * hidden**-0.5]
