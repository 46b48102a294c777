"""What the text of a slot does, on numpy arrays: the addresses it touches, the masks it does so under, and the values it makes.

A slot's text is Python that calls `tl` and `lib`. Here these are objects that compute on arrays of any length, so that one
evaluation covers the tiles of all programs. Floats are not rounded; integers have the bits and the division of a GPU's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

INTEGERS = {"int1": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "int32": np.int32, "int64": np.int64}
FLOATS = ("bfloat16", "float16", "float32", "float64", "float8e4nv", "float8e5")


class Tile(np.ndarray):
    """An array with what Triton's tensors have besides."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(Tile)  # numbers stay tiles

    def to(self, kind: Any, **_how: Any) -> Tile:
        return tile(np.asarray(self).astype(kind))

    def __floordiv__(self, other: Any) -> Any:
        """Towards zero, as the hardware divides."""
        quotient = np.floor_divide(self, other)
        return tile(
            quotient + ((np.remainder(self, other) != 0) & (np.less(self, 0) != np.less(other, 0))).astype(quotient.dtype)
        )

    def __mod__(self, other: Any) -> Any:
        return tile(np.fmod(self, other))


def tile(array: Any) -> Tile:
    return np.asarray(array).view(Tile)


@dataclass
class Memory:
    """A buffer from its first element on: its numbers, and which of them are elements of the tensor. What is `written` was
    stored once."""

    name: str
    values: np.ndarray
    valid: np.ndarray
    written: np.ndarray


@dataclass(frozen=True)
class Pointer:
    memory: Memory
    offsets: Any = 0

    def __add__(self, offsets: Any) -> Pointer:
        return Pointer(self.memory, self.offsets + offsets)


class WrongAccess(Exception):
    """A slot touches what it must not."""


def memory_of(name: str, tensor: torch.Tensor) -> Memory:
    """The memory from a tensor's first element on, to the end of its storage."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    flat = tensor.as_strided((count,), (1,))
    offsets_ = np.zeros(tensor.shape, np.int64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        offsets_ += (np.arange(size) * stride).reshape([-1 if k == axis else 1 for k in range(tensor.dim())])
    valid = np.zeros(count, np.bool_)
    valid[offsets_.reshape(-1)] = True
    exact = flat if not flat.dtype.is_floating_point else flat.double()
    return Memory(name, exact.numpy().copy(), valid, np.zeros(count, np.int64))


def _indices(memory: Memory, offsets: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """Offsets as 64-bit numbers, 0 where nothing is touched, and the mask, both of one shape."""
    at, inside = np.broadcast_arrays(np.asarray(offsets).astype(np.int64), np.asarray(True if mask is None else mask))
    bad = inside & ((at < 0) | (at >= len(memory.valid)))
    at = np.where(inside & ~bad, at, 0)
    bad |= inside & ~memory.valid[at]
    if bad.any():
        first = tuple(int(i[0]) for i in np.nonzero(bad))
        raise WrongAccess(
            f"{int(bad.sum())} of {bad.size} points touch {memory.name} where it has no element, the first one at {first} "
            f"of the tile, offset {int(np.broadcast_to(offsets, bad.shape)[first])}"
        )
    return at, inside


def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tile:
    at, inside = _indices(pointer.memory, pointer.offsets, mask)
    return tile(np.where(inside, pointer.memory.values[at], np.asarray(other).astype(pointer.memory.values.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, inside = _indices(pointer.memory, pointer.offsets, mask)
    shape = np.broadcast_shapes(at.shape, np.shape(value))
    at, inside, value = (np.broadcast_to(x, shape) for x in (at, inside, value))
    np.add.at(pointer.memory.written, at[inside], 1)
    pointer.memory.values[at[inside]] = value[inside]


@dataclass(frozen=True)
class Descriptor:
    """A TMA descriptor: what is out of bounds reads as 0 and is not written."""

    memory: Memory
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]

    def _offsets(self, begin: Sequence[Any]) -> tuple[Any, Any]:
        offsets: Any = np.int64(self.offset)
        inside: Any = np.bool_(True)
        for axis, (start, size, stride, side) in enumerate(zip(begin, self.sizes, self.strides, self.block, strict=True)):
            at = (int(start) + np.arange(side)).reshape([-1 if k == axis else 1 for k in range(len(self.block))])
            offsets, inside = offsets + at * stride, inside & (at >= 0) & (at < size)
        return offsets, inside

    def load(self, begin: Sequence[Any]) -> Tile:
        offsets, inside = self._offsets(begin)
        return _load(Pointer(self.memory, offsets), inside)

    def store(self, begin: Sequence[Any], value: Any) -> None:
        offsets, inside = self._offsets(begin)
        _store(Pointer(self.memory, offsets), value, inside)


def _broadcast(value: Any, shape: Sequence[int]) -> Tile:
    return tile(np.broadcast_to(value, np.broadcast_shapes(np.shape(value), tuple(shape))))


def _trap_unless(condition: Any) -> None:
    if not np.all(condition):
        raise WrongAccess("an index is out of range")


def _joined(left: Any, right: Any) -> Tile:
    return tile(np.stack(np.broadcast_arrays(left, right), -1))


TL = SimpleNamespace(
    load=_load, store=_store, broadcast_to=_broadcast, join=_joined,
    arange=lambda low, high: tile(np.arange(low, high, dtype=np.int32)),
    full=lambda shape, value, kind: tile(np.full(shape, value, kind)),
    zeros=lambda shape, kind: tile(np.zeros(shape, kind)),
    where=lambda condition, one, other: tile(np.where(condition, one, other)),
    cast=lambda value, kind: tile(np.asarray(value).astype(kind)),
    reshape=lambda value, shape: tile(np.reshape(value, shape)),
    permute=lambda value, order: tile(np.transpose(value, order)),
    expand_dims=lambda value, axis: tile(np.expand_dims(value, axis)),
    **INTEGERS, **dict.fromkeys(FLOATS, np.float64),
)  # fmt: skip

LIB = SimpleNamespace(
    maximum=lambda a, b: tile(np.maximum(a, b)), minimum=lambda a, b: tile(np.minimum(a, b)),
    narrow=lambda value, kind: tile(value), cast=TL.cast, rounded_to_bfloat16=tile, round_to=TL.cast, trap_unless=_trap_unless,
    multiply_halves=lambda a, b: tile(a * b), to_halves=lambda value, kind: tile(value),
    bits_of_bytes=lambda value, shift, mask: tile((value >> shift) & mask),
    small_number=lambda value, kind, less: tile(np.asarray(value).astype(np.float64) - less),
)  # fmt: skip


@dataclass
class Scope:
    """The names that a slot's text finds, and its lines as a program."""

    names: dict[str, Any] = field(default_factory=dict)

    def run(self, lines: Sequence[str], **more: Any) -> dict[str, Any]:
        found = {"tl": TL, "lib": LIB, **self.names, **more}
        exec("\n".join(lines), found)
        return found
