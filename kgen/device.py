"""What is known of a device that kernels are made for: its limits and its rates."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

__all__ = [
    "ADDITIONS",
    "DRIVER",
    "L2_RATE",
    "LINE",
    "SECTOR",
    "Device",
    "Gpu",
    "driver_version",
    "gpu_from",
    "is_rounded",
    "tf32_settings",
]

#: The shared library of the CUDA driver; tests put a stub in its place.
DRIVER = "libcuda.so.1"

# Operations a cycle of a GPU's SM on 16-bit floats added up in float32, by compute capability; what an H200 reaches of that,
# and of its memory's rate.
MATRIX_FLOPS, OTHER_MATRIX_FLOPS = {80: 2048, 90: 4096, 100: 8192}, 1024
MATRIX_SHARE, MEMORY_SHARE = 0.738, 0.8746
# Bytes of parameters that a kernel can have, by the first version of the CUDA driver's interface that takes so many.
PARAMETER_BYTES = ((12010, 32764), (0, 4096))
# Bytes a second that one SM of a GPU gets from the L2 cache, and bytes of a cache line.
L2_RATE, LINE = 101e9, 128
# Bytes that memory moves together.
SECTOR = 32
# Additions a second of one SM, in epilogues and in kernels of their own (H100, 2026-11-24, bench.regret).
ADDITIONS = 220 * 1.7e9

# How many times faster AVX-512 multiplies bfloat16 than float32; AMX is faster.
AVX512_NARROW = 2


def is_rounded(kind: torch.dtype, windows: bool = False) -> bool:
    """Whether a GPU's matrix units round numbers of a type to TF32, as torch's setting for matmuls allows, or that for
    convolutions, which read `windows`. Its `allow_tf32` is not asked: that raises where `fp32_precision` was set."""
    setting = torch.backends.cudnn.conv if windows else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    return kind is torch.float32 and bool(setting.fp32_precision == "tf32")


def tf32_settings() -> tuple[bool, bool]:
    """Whether float32 numbers are rounded in matmuls, and in convolutions."""
    return is_rounded(torch.float32), is_rounded(torch.float32, windows=True)


@dataclass(frozen=True, slots=True)
class Device:
    """What a choice needs to know of the machine. `arch` is a GPU's compute capability (90), `compute_units` its
    multiprocessors or the CPU's threads, `shared` the shared memory of a program in bytes, `registers` the 32-bit registers of
    a thread; `isa` names the CPU's instruction set, `lanes` are the float32 numbers of a vector. Rates, a second: `flops` of a
    matmul in 16-bit floats, `narrow` times those in float32 (of a CPU, in bfloat16), and `bandwidth` in bytes. `library` is a
    CPU's library's share, on wide floats, of the rate that it has on the GPUs it was made for. Of a GPU that is `interpreted`
    there are only kernels that Triton's interpreter can run."""

    kind: str = "cuda"
    arch: int = 90
    compute_units: int = 132
    shared: int = 232448
    registers: int = 255
    isa: str = ""
    lanes: int = 1
    flops: float = 790e12
    narrow: float = 12
    bandwidth: float = 4.3e12
    library: float = 1.0
    interpreted: bool = False

    def in_tiles(self, kind: torch.dtype) -> bool:
        """Whether a CPU's AMX multiplies numbers of a type."""
        return self.kind == "cpu" and kind is torch.bfloat16 and self.narrow > AVX512_NARROW

    def rate(self, kind: torch.dtype, rounded: bool | None = None) -> float:
        """Operations a second of the units that multiply numbers of a type, which are `rounded` to TF32 or not; where that is
        not given, as matmuls are."""
        if self.kind == "cpu":
            wide = self.flops / self.narrow
            return self.flops if kind is torch.bfloat16 else wide * {1: 2, 8: 0.5}.get(kind.itemsize, 1)
        if kind.itemsize == 1:
            return self.flops * 2
        if kind.itemsize == 2:
            return self.flops
        tf32 = is_rounded(kind) if rounded is None else rounded
        return self.flops / 2 if tf32 else self.flops / self.narrow


H200 = Device()


@dataclass(frozen=True, slots=True)
class Gpu:
    """What the choice of tiles needs to know of a GPU, an H200 unless it is said; fields as in `Device`. A kernel's parameters
    have at most `parameters` bytes."""

    arch: int = H200.arch
    compute_units: int = H200.compute_units
    shared: int = H200.shared
    flops: float = H200.flops
    bandwidth: float = H200.bandwidth
    parameters: int = PARAMETER_BYTES[0][1]


@cache
def driver_version(library: str = DRIVER) -> int:
    """The newest version of CUDA that the driver in a shared library knows, as in 12040; 0 where there is no driver."""
    found = ctypes.c_int(0)
    try:
        status = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):  # no such library, or one without the function
        return 0
    return found.value if status == 0 else 0


def gpu_from(facts: Mapping[str, int], driver: int = 0) -> Gpu:
    """A GPU by what `torch_adapter.gpu_facts` says of it, and by the version of its driver, as in 12040."""
    arch, compute_units = facts["arch"], facts["compute_units"]
    matrix = MATRIX_FLOPS.get(arch, OTHER_MATRIX_FLOPS)
    flops = MATRIX_SHARE * matrix * compute_units * facts["clock"]
    parameters = next(count for version, count in PARAMETER_BYTES if driver >= version)
    return Gpu(arch, compute_units, facts["shared"], flops, MEMORY_SHARE * facts["memory"], parameters)
