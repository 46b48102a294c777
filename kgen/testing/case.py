"""One problem for a template: a function of tensors, and how the tensors look in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["LAYOUTS", "Case", "GuardedTensor", "Spec", "make"]

# Strides of the last two dimensions, or of all: what `_geometry` makes of them.
LAYOUTS = (
    "contiguous", "transposed", "offset", "padded", "strided", "expanded rows", "expanded columns", "inner batch",
    "expanded batch",
)  # fmt: skip
# Elements around every tensor that nobody may use: NaNs, so that a kernel that reads them gives itself away. A multiple of
# 16 bytes in every type, so that the runtime need not copy the tensor to an aligned place.
GUARD = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor to draw: `layout` is one of LAYOUTS. Floats are normal numbers times `scale`; integers are below `high`, and
    above -`high` if the type has a sign. `distinct` integers are 0 ... n-1 in some order. `written`: the problem changes it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str = "contiguous"
    scale: float = 1.0
    high: int = 0
    distinct: bool = False
    written: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A problem: `function` is compiled for `inputs`. `kind` is what it tries ("size", "layout", "dtype", "epilogue",
    "prologue", "operand reduction", "dynamic"); `kernels` are the launches of a complete fusion; `dynamic` compiles for sizes
    that are symbols. `reference` gets the inputs with all floats as float64; without one that is `function`."""

    name: str
    kind: str
    function: Callable[..., Any]
    inputs: tuple[Spec, ...]
    kernels: int = 1
    dynamic: bool = False
    reference: Callable[..., Any] | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{_short(s.dtype)}{list(s.shape)}" for s in self.inputs)
        return f"{self.kind} {self.name!r} of ({shapes})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class GuardedTensor:
    """A tensor in the midst of its guards, and all of that memory as it was before."""

    spec: Spec
    tensor: torch.Tensor
    memory: torch.Tensor
    before: torch.Tensor

    @property
    def damaged(self) -> bool:
        """Whether somebody wrote around the tensor, or to one that is not to change."""
        before = self.before.clone()
        if self.spec.written:
            before.as_strided(self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset()).copy_(self.tensor)
        return not torch.equal(self.memory.view(torch.uint8), before.view(torch.uint8))


def make(spec: Spec, device: torch.device, generator: torch.Generator) -> GuardedTensor:
    """The tensor of a spec, drawn on the CPU: the same numbers on every device."""
    strides, offset = _geometry(spec)
    last = sum((n - 1) * s for n, s in zip(spec.shape, strides, strict=True)) if 0 not in spec.shape else 0
    memory = torch.full((GUARD + offset + last + 1 + GUARD,), _guard(spec.dtype), dtype=torch.float64).to(spec.dtype)
    # an expanded dimension has one element in memory
    stored = tuple(min(n, 1) if s == 0 else n for n, s in zip(spec.shape, strides, strict=True))
    _view(memory, stored, strides, GUARD + offset).copy_(_values(spec, stored, generator))
    memory = memory.to(device)
    return GuardedTensor(spec, _view(memory, spec.shape, strides, GUARD + offset), memory, memory.clone())


def _view(memory: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
    return memory.as_strided(shape, strides, offset)


def _guard(dtype: torch.dtype) -> float:
    """An index that is read by mistake must at least not lead anywhere else, so integers of 64 bits have zeros around."""
    if dtype.is_floating_point:
        return float("nan")
    return 0 if dtype in (torch.bool, torch.int64) else torch.iinfo(dtype).max


def _values(spec: Spec, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if spec.distinct:
        return torch.randperm(shape[0], generator=generator).to(spec.dtype)
    if spec.dtype.is_floating_point:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spec.scale).to(spec.dtype)
    low = 0 if spec.dtype in (torch.uint8, torch.bool, torch.int64) else -spec.high
    return torch.randint(low, max(spec.high, low + 1), shape, generator=generator).to(spec.dtype)


def _geometry(spec: Spec) -> tuple[tuple[int, ...], int]:
    """Strides and offset, in elements."""
    shape, layout = spec.shape, spec.layout
    if layout == "offset":
        return _packed(shape), 3
    if layout == "transposed":
        turned = _packed((*shape[:-2], shape[-1], shape[-2]))
        return (*turned[:-2], turned[-1], turned[-2]), 0
    if layout == "padded":
        return _packed((*shape[:-1], shape[-1] + 5)), 0
    if layout == "strided":
        return tuple(2 * s for s in _packed(shape)), 0
    if layout == "expanded rows":
        return (*_packed((*shape[:-2], 1, shape[-1]))[:-2], 0, 1), 0
    if layout == "expanded columns":
        return (*_packed((*shape[:-1], 1))[:-1], 0), 0
    if layout == "inner batch":
        moved = _packed((*shape[1:], shape[0]))
        return (moved[-1], *moved[:-1]), 0
    if layout == "expanded batch":
        return (0, *_packed(shape)[1:]), 0
    return _packed(shape), 0


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(reversed(strides)) if shape else ()
