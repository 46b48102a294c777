"""Tensors of a problem: drawn in a layout, in the midst of memory that nobody may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Elements around every tensor: a multiple of 16 bytes in every type, so that the runtime need not copy it to an aligned place.
GUARD = 64


@dataclass(frozen=True)
class Spec:
    """A tensor to draw: floats are normal numbers times `scale`, integers are below `high`, of both signs where the type has
    them; `index`: from 0 on."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    scale: float = 1.0
    high: int = 0
    index: bool = False


@dataclass(frozen=True)
class GuardedTensor:
    """A tensor and the memory around it, with what that was before."""

    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor

    @property
    def damaged(self) -> bool:
        return not torch.equal(self.memory.view(torch.uint8), self.before.view(torch.uint8))


def make(spec: Spec, device: torch.device, generator: torch.Generator) -> GuardedTensor:
    strides, offset = geometry(spec)
    last = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) if 0 not in spec.shape else 0
    memory = torch.empty(GUARD + offset + last + 1 + GUARD, dtype=spec.dtype, device=device)
    memory.copy_(torch.full((1,), _guard(spec.dtype), dtype=torch.float64, device=device).expand(memory.shape))
    tensor = memory.as_strided(spec.shape, strides, GUARD + offset)
    tensor.copy_(_values(spec, device, generator))
    return GuardedTensor(tensor, memory, memory.clone())


def geometry(spec: Spec) -> tuple[tuple[int, ...], int]:
    """Strides and the offset of the first element."""
    shape, rank, layout = list(spec.shape), len(spec.shape), spec.layout
    order = list(range(rank))
    offset, step = 0, 1
    if layout == "transposed" and rank > 1:
        order[-2:] = order[:-3:-1]
    elif layout == "channels_last" and rank > 2:
        order = [0, *range(2, rank), 1]
    elif layout == "sliced" and rank > 1:  # every other element of wider rows
        step, offset = 2, 1
    elif layout == "padded" and rank > 1:  # rows that begin anywhere
        shape[-1] += 3
    elif layout == "offset":
        offset = 5
    strides = [0] * rank
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides), offset


def _guard(dtype: torch.dtype) -> float:
    """An index that is read by mistake must at least not lead anywhere else, so integers of 64 bits have zeros around."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.int64) else torch.iinfo(dtype).max


def _values(spec: Spec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    how: dict[str, Any] = {"generator": generator, "device": device}
    if spec.dtype.is_floating_point:
        return (torch.randn(spec.shape, dtype=torch.float32, **how) * spec.scale).to(spec.dtype)
    low = 0 if spec.index or spec.dtype is torch.uint8 else -spec.high
    return torch.randint(low, max(spec.high, low + 1), spec.shape, **how).to(spec.dtype)
