"""What a block of a model is, and how its inputs are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Make = Callable[..., Tensor]


@dataclass(frozen=True)
class Block:
    """A function and its arguments; a `training` one is run forward and backward.

    `dtype` is that of the values on a GPU, None for the bench's own. `small` makes arguments for a test on a CPU. With `tf32`
    matmuls in float32 may round their operands."""

    name: str
    fn: Callable[..., Any]
    inputs: Callable[[Make], Sequence[Tensor]]
    training: bool = False
    dtype: torch.dtype | None = None
    small: Callable[[Make], Sequence[Tensor]] | None = None
    tf32: bool = False


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


def cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """bfloat16 tensors in `dtype`; float32 ones stay so, but for float64. Whole numbers and float8 keep theirs."""

    def one(t: Tensor) -> Tensor:
        wide = t.dtype == torch.float32 and dtype == torch.float64
        return t.to(dtype) if t.dtype == torch.bfloat16 or wide else t

    return [one(t) for t in tensors]


@dataclass(frozen=True)
class Sized:
    """A function whose inputs are made for sizes: `at` for a GPU, `small` for a test."""

    fn: Callable[..., Any]
    inputs: Callable[..., Sequence[Tensor]]
    small: tuple[int, ...]
    dtype: torch.dtype | None = None
    tf32: bool = False

    def block(self, name: str, *at: int, training: bool = False) -> Block:
        full, less = (lambda m: self.inputs(m, *at)), (lambda m: self.inputs(m, *self.small))
        shown = "x".join(map(str, at))
        return Block(
            f"{name} {shown}{' step' * training}",
            self.fn,
            full,
            training=training,
            dtype=self.dtype,
            small=less,
            tf32=self.tf32,
        )

    def both(self, name: str, *at: int) -> tuple[Block, Block]:
        return self.block(name, *at), self.block(name, *at, training=True)


def weight(make: Make, *shape: int) -> Tensor:
    """Normal values that keep a matmul's or a convolution's results about as large as what it reads."""
    return make(*shape) * math.prod(shape[1:]) ** -0.5
