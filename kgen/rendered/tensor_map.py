"""TMA descriptors as parameters of GPU kernels: what the host says of one, and what the compiler decides about it.

In a kernel's signature a descriptor is Triton's "tensordesc<bf16[128, 64]>", and the kernel calls `load` and `store` on it. A
launch gives such a parameter one buffer and the integers `TensorMap.numbers`; the launcher encodes the descriptor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kgen.errors import InvalidTensorMap
from kgen.ir.index import ZERO, Expr

__all__ = [
    "MAX_RANK", "MAX_SIDE", "MAX_STEP", "MapFormat", "TensorMap", "is_pointer", "is_rounded", "map_block", "map_rank",
    "map_steps", "plain_kind", "widths",
]  # fmt: skip

#: Of what the hardware knows.
MAX_RANK = 5
#: Elements that a transfer spans along a dimension, and of which it takes every so many.
MAX_SIDE = 256
MAX_STEP = 8

_TYPE = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\](?:, steps \[([\d, ]+)\])?(, tf32)?>")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """`buffer` as a tensor that a kernel reads or writes in blocks; what is out of bounds reads as 0 and is not written.

    `dtype` is Triton's name of the element type ("bf16"), `block` the block's sizes as in the kernel's ``load`` and ``store``.
    Sizes, strides and `offset` count elements; the offset is from where a pointer to `buffer` would point. The last stride
    is 1. When the kernel is launched, the others and the address must be multiples of 16 bytes (TensorMapRefused). A tensor
    without elements is fine as long as the kernel leaves it alone.

    Along a dimension a block has every `steps`-th element, counted from where it begins, so that a block of 8 with a step of 2
    spans 16; no `steps`: all of them. The last dimension has no step. What is read of float32 is `rounded` to the nearest TF32
    number on its way, which costs nothing; the matrix units would cut the last digits off."""

    buffer: str
    dtype: str
    block: tuple[int, ...]
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr = ZERO
    steps: tuple[int, ...] = ()
    rounded: bool = False

    def __post_init__(self) -> None:
        rank = len(self.block)
        if not 1 <= rank <= MAX_RANK or {len(self.sizes), len(self.strides)} != {rank}:
            raise InvalidTensorMap(buffer=self.buffer, rule=f"1 to {MAX_RANK} dimensions, as many in block, sizes and strides")
        if self.strides[-1].as_int() != 1:
            raise InvalidTensorMap(buffer=self.buffer, rule=f"a last stride of 1, got {self.strides[-1]}")
        if self.steps and not self._steps_hold():
            rule = f"steps from 1 to {MAX_STEP}, of the last dimension 1, that span at most {MAX_SIDE} elements in a block"
            raise InvalidTensorMap(buffer=self.buffer, rule=f"{rule}, got {self.steps}")

    def _steps_hold(self) -> bool:
        if len(self.steps) != len(self.block) or self.steps[-1] != 1:
            return False
        spans = (step == 1 or step * side <= MAX_SIDE for step, side in zip(self.steps, self.block, strict=True))
        return all(1 <= step <= MAX_STEP for step in self.steps) and all(spans)

    @property
    def type(self) -> str:
        """The parameter's type in a signature."""
        steps = f", steps [{', '.join(map(str, self.steps))}]" if any(step > 1 for step in self.steps) else ""
        rounded = ", tf32" if self.rounded else ""
        return f"tensordesc<{self.dtype}[{', '.join(map(str, self.block))}]{steps}{rounded}>"

    @property
    def numbers(self) -> tuple[Expr, ...]:
        """The integers of a launch: the offset, then the sizes, then the strides."""
        return (self.offset, *self.sizes, *self.strides)


@dataclass(frozen=True, slots=True)
class MapFormat:
    """What the compiler decided about a descriptor. `element` and `swizzle` are the driver's numbers (CUtensorMapDataType,
    CUtensorMapSwizzle), `box` the elements of one transfer, which can be less than the kernel's block."""

    element: int
    element_bytes: int
    swizzle: int
    box: tuple[int, ...]


def map_rank(kind: str) -> int:
    """The rank of the descriptor that a parameter of type `kind` is; 0 when it is none."""
    return len(map_block(kind)[1])


def map_block(kind: str) -> tuple[str, tuple[int, ...]]:
    """The element type and the block of the descriptor that a parameter of type `kind` is; an empty block when it is none."""
    found = _TYPE.fullmatch(kind)
    return ("", ()) if found is None else (found[1], tuple(map(int, found[2].split(","))))


def map_steps(kind: str) -> tuple[int, ...]:
    """The steps of the descriptor that a parameter of type `kind` is, each 1 where it has none."""
    found = _TYPE.fullmatch(kind)
    assert found is not None, kind
    return tuple(map(int, found[3].split(","))) if found[3] else (1,) * map_rank(kind)


def is_rounded(kind: str) -> bool:
    """Whether what is read through the descriptor that a parameter of type `kind` is comes as TF32."""
    return kind.endswith(", tf32>")


def plain_kind(kind: str) -> str:
    """The type without steps and rounding: these are the launcher's affair, a compiler knows nothing of them."""
    found = _TYPE.fullmatch(kind)
    return kind if found is None else f"tensordesc<{found[1]}[{found[2]}]>"


def is_pointer(kind: str) -> bool:
    return kind.startswith("*")


_SCALAR_BYTES = {"i32": 4, "i64": 8}


def widths(kind: str) -> list[int]:
    """The bytes of each parameter in machine code that a parameter of type `kind` becomes. For descriptors Triton 3.6 and 3.7
    agree: the descriptor itself, then sizes and strides for the kernel's use."""
    rank = map_rank(kind)
    if rank:
        return [128, *[4] * rank, *[8] * rank]
    return [8 if is_pointer(kind) else _SCALAR_BYTES[kind]]
