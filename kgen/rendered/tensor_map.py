"""TMA descriptors as parameters of GPU kernels: what the host says of one, and what the compiler decides about it.

In a kernel's signature a descriptor is Triton's "tensordesc<bf16[128, 64]>", and the kernel calls `load` and `store` on it. A
launch gives such a parameter one buffer and the integers `TensorMap.numbers`; the launcher encodes the descriptor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kgen.errors import InvalidTensorMap
from kgen.ir.index import ZERO, Expr

__all__ = ["MAX_RANK", "MapFormat", "TensorMap", "is_pointer", "map_block", "map_rank", "widths"]

#: Of what the hardware knows.
MAX_RANK = 5

_TYPE = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]>")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """`buffer` as a tensor that a kernel reads or writes in blocks; what is out of bounds reads as 0 and is not written.

    `dtype` is Triton's name of the element type ("bf16"), `block` the block's sizes as in the kernel's ``load`` and ``store``.
    Sizes, strides and `offset` count elements; the offset is from where a pointer to `buffer` would point. The last stride
    is 1. When the kernel is launched, the others and the address must be multiples of 16 bytes (TensorMapRefused). A tensor
    without elements is fine as long as the kernel leaves it alone."""

    buffer: str
    dtype: str
    block: tuple[int, ...]
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    offset: Expr = ZERO

    def __post_init__(self) -> None:
        rank = len(self.block)
        if not 1 <= rank <= MAX_RANK or {len(self.sizes), len(self.strides)} != {rank}:
            raise InvalidTensorMap(buffer=self.buffer, rule=f"1 to {MAX_RANK} dimensions, as many in block, sizes and strides")
        if self.strides[-1].as_int() != 1:
            raise InvalidTensorMap(buffer=self.buffer, rule=f"a last stride of 1, got {self.strides[-1]}")

    @property
    def type(self) -> str:
        """The parameter's type in a signature."""
        return f"tensordesc<{self.dtype}[{', '.join(map(str, self.block))}]>"

    @property
    def numbers(self) -> tuple[Expr, ...]:
        """The integers of a launch: the offset, then the sizes, then the strides."""
        return (self.offset, *self.sizes, *self.strides)


@dataclass(frozen=True, slots=True)
class MapFormat:
    """What the compiler decided about a descriptor. `element` and `swizzle` are the driver's numbers (CUtensorMapDataType,
    CUtensorMapSwizzle), `box` the sizes of one transfer, which can be less than the kernel's block."""

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
