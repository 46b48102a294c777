"""A GPU kernel as text, and what the compiler makes of it. Plain data: whoever reads it needs neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kgen.errors import InvalidTensorMap
from kgen.rendered.tensor_map import MapFormat, map_rank

__all__ = ["EARLY", "CompiledKernel", "CompiledLaunches", "TritonKernel"]

# The compile option of kernels that may be launched while the kernel before still runs.
EARLY = ("launch_pdl", True)


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """One GPU kernel: the text of a Python module with one ``@triton.jit`` function `name`.

    `key` is the canonical text (comments and made-up names dropped), which is what the cache key covers. `signature` is the
    Triton type of each run-time parameter in order: "*fp32", "*i1", ... for pointers, "tensordesc<bf16[128, 64]>" for TMA
    descriptors (`kgen.rendered.tensor_map.TensorMap.type`; they need compute capability 9.0), "i32" or "i64" for sizes.
    `divisible` says of each parameter whether it is a multiple of 16 (of a pointer: its address; of a descriptor: never).
    `options` are further compile options, such as ("enable_fp_fusion", False); their values are None, booleans, numbers or
    text. With more bytes of spilled registers than `most_stack`, another kernel had better compute the same.
    """

    name: str
    source: str
    key: str
    signature: tuple[str, ...]
    divisible: tuple[bool, ...]
    num_warps: int
    num_stages: int
    options: tuple[tuple[str, Any], ...] = ()
    most_stack: int | None = None

    def __post_init__(self) -> None:
        for kind, multiple in zip(self.signature, self.divisible, strict=True):
            if multiple and map_rank(kind):
                raise InvalidTensorMap(buffer=f"kernel {self.name}", rule="False among its `divisible`")

    @property
    def identity(self) -> tuple[Any, ...]:
        """What decides the machine code: kernels of one identity are one kernel."""
        return self.key, self.signature, self.divisible, self.num_warps, self.num_stages, self.options

    def launched_in_turn(self) -> TritonKernel:
        """The kernel, launched when the one before has ended."""
        return replace(self, options=tuple(one for one in self.options if one != EARLY))


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A loadable kernel. `name` is the kernel's own name, for messages; `function` its name in the cubin.

    `shared` is dynamic shared memory in bytes, `warps` the warps of a block. After the kernel's own parameters come pointers to
    scratch memory: `scratch` has the bytes that each needs per block, 0 for a null pointer. `registers` and `stack` (bytes) are
    those of one thread; a stack means that registers were spilled. `maps` are the formats of its TMA descriptors in order.
    `early`: it waits for the kernel before it on its stream by itself, and may be launched while that one still runs.
    """

    name: str
    function: str
    cubin: bytes
    signature: tuple[str, ...]
    divisible: tuple[bool, ...]
    warps: int
    shared: int
    scratch: tuple[int, ...]
    registers: int
    stack: int
    maps: tuple[MapFormat, ...] = ()
    early: bool = False


@dataclass(frozen=True, slots=True)
class CompiledLaunches:
    """The GPU kernels of a program, and the indices of the devices that run them, all of one compute capability (90 is 9.0)."""

    kernels: tuple[CompiledKernel, ...] = ()
    devices: tuple[int, ...] = ()
    arch: int = 0
